"""The main job on real processes: one trainer actor, two engine actors."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import asyncsync
from asyncsync import EngineError, EngineState, WeightSynchronizer
from tests.actors import Engine, Flat, Trainer
from tests.sample import Zoo, contents, fingerprint

pytestmark = [pytest.mark.asyncio, pytest.mark.ray]

Make = Callable[[], nn.Module]
TINY: Make = partial(nn.Linear, 2, 2)
ZOO: Make = partial(Zoo, 2, strided=False)


class Actors:
    """A trainer and two engines, shared by the tests of this module; each test gives them its weights."""

    def __init__(self) -> None:
        self.trainer = Trainer.remote(TINY)
        self.engines = [Engine.remote(TINY) for _ in range(2)]

    async def hold(self, trainer: Make, engines: Make) -> None:
        await self.trainer.hold.remote(trainer)
        await asyncio.gather(*(engine.serve.remote(engines) for engine in self.engines))


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[Actors]:
    made = Actors()
    yield made
    for actor in (made.trainer, *made.engines):
        ray.kill(actor)


async def assert_equal(actors: Actors) -> None:
    expected = await actors.trainer.contents.remote()
    for engine in actors.engines:
        assert await engine.contents.remote() == expected


async def test_every_kind_of_tensor_from_a_trainer_actor_to_two_engine_actors(actors: Actors) -> None:
    await actors.hold(partial(Zoo, 1), ZOO)
    async with WeightSynchronizer(actors.trainer, actors.engines, bucket_size=1024) as synchronizer:
        for version in (1, 2, 3):
            update = await synchronizer.update_weights()
            assert update.version == version
            await assert_equal(actors)
            assert await actors.engines[1].weights_digest.remote() == update.digest
            await actors.trainer.change.remote()
        await actors.trainer.change.remote(["weight"])


@pytest.mark.exhaustive
async def test_twenty_thousand_tiny_tensors_and_a_tensor_three_times_the_bucket(actors: Actors) -> None:
    await actors.hold(partial(Flat, 20_000, (3,), fill=2.0), partial(Flat, 20_000, (3,)))
    async with WeightSynchronizer(actors.trainer, actors.engines) as synchronizer:
        update = await synchronizer.update_weights()
        assert (update.tensors, update.bytes) == (20_000, 240_000)
    await assert_equal(actors)
    large = partial(Flat, 1, (3 * 2**20 // 4,))
    await actors.hold(partial(large, fill=3.0), large)
    async with WeightSynchronizer(actors.trainer, actors.engines, bucket_size=2**20) as synchronizer:
        update = await synchronizer.update_weights()
        assert update.buckets == 3
    await assert_equal(actors)


async def test_a_trainer_in_this_process_and_rollouts_all_the_time(actors: Actors) -> None:
    trainer = Zoo(1)
    await actors.hold(TINY, ZOO)
    async with WeightSynchronizer(trainer, actors.engines) as synchronizer:
        await synchronizer.update_weights()
        read: list[tuple[int, int, str]] = []
        held = {1: fingerprint(trainer)}
        stop = asyncio.Event()

        async def rollouts(engine: Any) -> None:
            while not stop.is_set():
                async with synchronizer.generation() as version:
                    own, digest = await engine.read.remote()
                    read.append((version, own, digest))

        async with asyncio.TaskGroup() as tasks:
            for engine in actors.engines:
                tasks.create_task(rollouts(engine))
            for _ in range(10):
                with torch.no_grad():
                    trainer.weight.add_(1)
                held[(await synchronizer.update_weights()).version] = fingerprint(trainer)
            stop.set()
        for version, own, found in read:
            assert version == own, "read at dispatch, and nothing changes under a reader"
            assert found == held[version]
        assert len({version for version, _, _ in read}) > 3


async def test_control_calls_are_answered_while_a_synchronous_method_runs(actors: Actors, tmp_path: Path) -> None:
    await actors.hold(partial(Zoo, 1), ZOO)
    release = tmp_path / "release"
    busy = [actor.block_until.remote(str(release)) for actor in (actors.trainer, *actors.engines)]
    async with WeightSynchronizer(actors.trainer, actors.engines, timeout=60) as synchronizer:
        update = await synchronizer.update_weights()
        assert all(outcome.state is EngineState.UPDATED for outcome in update.outcomes)
        release.touch()
        await asyncio.gather(*busy)
    await assert_equal(actors)


async def test_a_restarted_engine_is_seen_as_new_and_brought_up_to_date(actors: Actors) -> None:
    restarted = Engine.remote(partial(Zoo, 3, strided=False))
    trainer = Zoo(1)
    await actors.hold(TINY, ZOO)
    async with WeightSynchronizer(trainer, [actors.engines[0], restarted], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        pid = await restarted.pid.remote()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"EngineActor-1 (is gone|did not answer)") as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UPDATED, EngineState.LOST]
        while True:
            try:
                assert await restarted.pid.remote() != pid
                break
            except ray.exceptions.ActorUnavailableError:
                continue
        update = await synchronizer.update_weights()
        assert update.version == 3
        assert "connect" in update.seconds
        assert await restarted.contents.remote() == contents(trainer)
    ray.kill(restarted)


@pytest.mark.exhaustive
async def test_twenty_random_joins_leaves_and_restarts_during_twenty_updates(actors: Actors) -> None:
    chance, trainer = random.Random(7), Zoo(1)
    own = [Engine.remote(ZOO) for _ in range(2)]  # Ray makes them anew with the same module
    pool = [*actors.engines, *own]
    await actors.hold(TINY, ZOO)
    what = ["restart"] * 3 + ["change membership"] * 17
    chance.shuffle(what)
    held: dict[int, str] = {}
    reads = joined = left = 0
    stop = asyncio.Event()

    async with WeightSynchronizer(trainer, pool[1:3], bucket_size=1024, timeout=60) as synchronizer:

        async def update() -> None:
            with torch.no_grad():
                trainer.weight.add_(1)
            while True:
                try:
                    held[(await synchronizer.update_weights()).version] = fingerprint(trainer)
                    return
                except EngineError as error:  # the engine that was killed: the next call finds it anew
                    if error.update is not None:
                        held[error.update.version] = fingerprint(trainer)  # the others have it

        async def rollouts() -> None:
            nonlocal reads
            while not stop.is_set():
                async with synchronizer.generation() as version:
                    if not (ready := synchronizer.ready_engines):
                        continue
                    try:
                        version_read, found = await random.choice(ready).read.remote()
                    except (ray.exceptions.RayActorError, asyncsync.TaintedEngineError):
                        continue  # it was killed, or has just come back
                    assert version_read == version
                    assert found == held[version], "no reader ever sees a version that is not whole"
                    reads += 1

        async def change_membership(count: int) -> None:
            nonlocal joined, left
            for _ in range(count):
                members = [member.handle for member in synchronizer._membership.members]
                outside = [engine for engine in pool if engine not in members]
                if outside and (len(members) < 2 or chance.random() < 0.5):
                    await synchronizer.add_engine(chance.choice(outside))
                    joined += 1
                else:
                    await synchronizer.remove_engine(chance.choice(members))
                    left += 1

        await update()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rollouts())
            tasks.create_task(rollouts())
            for event in what:
                if event == "restart":
                    while not (serving := [engine for engine in own if engine in synchronizer.ready_engines]):
                        await change_membership(1)
                    os.kill(await chance.choice(serving).pid.remote(), signal.SIGKILL)
                    await update()
                else:
                    changing = tasks.create_task(change_membership(1))
                    await update()
                    await changing
                for engine in synchronizer.ready_engines:
                    assert await engine.contents.remote() == contents(trainer)
                assert len(synchronizer.ready_engines) == len(synchronizer._membership.members)
            stop.set()
        assert len(held) >= 21
        assert reads
        assert min(joined, left) > 4
    for engine in own:
        ray.kill(engine)


async def test_a_control_call_that_is_overridden_runs_on_the_loop_of_the_others() -> None:
    class Overriding(asyncsync.TrainerRank):
        async def send_weights(self, order: asyncsync.UpdateOrder) -> Any:
            return await super().send_weights(order)

    actor: Any = asyncsync.remote(num_cpus=0)(Overriding)
    groups = actor.__ray_metadata__.method_meta.concurrency_group_for_methods
    assert groups["send_weights"] == groups["abort_send"] == "asyncsync"


async def test_an_engine_killed_in_the_middle_of_a_transfer_is_named_and_the_other_is_updated_all_the_same(
    actors: Actors,
) -> None:
    victim = Engine.options(max_restarts=0).remote(partial(Flat, 16, (2**22,)))
    await actors.engines[0].serve.remote(partial(Flat, 16, (2**22,)))
    trainer = Flat(16, (2**22,), fill=1.0)
    async with WeightSynchronizer(trainer, [actors.engines[0], victim], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        pid = await victim.pid.remote()
        before = await actors.engines[0].read.remote()
        update = asyncio.create_task(synchronizer.update_weights())
        while not (await victim.describe_engine.remote()).epoch > 1:
            pass
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"EngineActor-1 (is gone|did not answer)") as caught:
            await update
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UPDATED, EngineState.LOST]
        assert await actors.engines[0].read.remote() == (2, before[1])
        assert synchronizer.weight_version == 2


@pytest.mark.exhaustive
async def test_a_class_that_was_declared_with_plain_ray_is_refused_with_the_remedy(actors: Actors) -> None:
    class Plain(asyncsync.ModuleEngine):
        def __init__(self) -> None:
            super().__init__(nn.Linear(1, 1))

    plain: Any = ray.remote(num_cpus=0)(Plain).remote()
    async with WeightSynchronizer(nn.Linear(1, 1), [plain]) as synchronizer:
        with pytest.raises(asyncsync.ConnectError, match=r"with @asyncsync\.remote"):
            await synchronizer.update_weights()
    ray.kill(plain)


@pytest.mark.exhaustive
async def test_an_engine_whose_constructor_failed_says_why(ray_cluster: None) -> None:
    class Broken(asyncsync.ModuleEngine):
        def __init__(self) -> None:
            raise OSError("the checkpoint is gone")

    broken: Any = asyncsync.remote(num_cpus=0)(Broken).remote()
    async with WeightSynchronizer(nn.Linear(1, 1), [broken]) as synchronizer:
        with pytest.raises(
            EngineError, match=r"Broken-0 is gone: its constructor failed: OSError: the checkpoint is gone"
        ):
            await synchronizer.update_weights()


async def test_an_actor_without_the_protocol_is_refused_by_the_names_it_lacks(actors: Actors) -> None:
    with pytest.raises(TypeError, match="TrainerActor is no rollout engine: it lacks describe_engine, accept_layout"):
        WeightSynchronizer(nn.Linear(1, 1), [actors.trainer])
    with pytest.raises(
        TypeError, match="EngineActor is no trainer rank: it lacks begin_update, end_update, describe_weights"
    ):
        WeightSynchronizer(actors.engines[0], [actors.engines[1]])
    with pytest.raises(ValueError, match="given twice"):
        WeightSynchronizer(actors.trainer, [actors.engines[0], actors.engines[0]])
    actor_class: Any = ray.remote(asyncsync.ModuleEngine)
    with pytest.raises(TypeError, match=r"ModuleEngine is an actor class, no actor: call its \.remote"):
        WeightSynchronizer(nn.Linear(1, 1), [actor_class])
    with pytest.raises(ValueError, match="trainer rank 1 is given twice: it is rank 0 too"):
        WeightSynchronizer([actors.trainer, actors.trainer], actors.engines)


async def test_weights_that_do_not_fit_come_back_as_our_error_from_another_process(actors: Actors) -> None:
    await actors.hold(partial(nn.Linear, 3, 2), partial(nn.Linear, 4, 2))
    async with WeightSynchronizer(actors.trainer, actors.engines) as synchronizer:
        with pytest.raises(
            asyncsync.PlanError, match=r"weight \(sent float32 \[2, 3\], held float32 \[2, 4\]\)"
        ) as caught:
            await synchronizer.update_weights()
        assert caught.value.names == ("weight",)


@pytest.mark.exhaustive
async def test_the_generation_lock_can_be_one_that_other_processes_share(actors: Actors) -> None:
    await actors.hold(partial(nn.Linear, 2, 2), partial(nn.Linear, 2, 2))
    lock = await asyncsync.SharedRolloutLock.create()
    async with WeightSynchronizer(actors.trainer, actors.engines, lock=lock) as synchronizer:
        await synchronizer.update_weights()
        async with synchronizer.generation() as version:
            assert version == 1
    await lock.aclose()


@pytest.mark.exhaustive
async def test_memory_stays_flat_and_nothing_is_left(actors: Actors) -> None:
    layout = partial(Flat, 8, (2**19,))  # 16 MiB
    await actors.hold(partial(layout, fill=1.0), layout)
    everyone = [actors.trainer, *actors.engines]
    shared = set(os.listdir("/dev/shm"))
    async with WeightSynchronizer(actors.trainer, actors.engines, bucket_size=2**22) as synchronizer:
        for _ in range(5):
            await synchronizer.update_weights()
        before = [(await actor.resident.remote(), await actor.open_files.remote()) for actor in everyone]
        for _ in range(100):
            await synchronizer.update_weights()
        after = [(await actor.resident.remote(), await actor.open_files.remote()) for actor in everyone]
    for (memory, files), (memory_after, files_after) in zip(before, after, strict=True):
        assert memory_after - memory < 2**22
        assert files_after <= files
    assert set(os.listdir("/dev/shm")) <= shared


async def test_a_trainer_needs_two_buckets_of_extra_memory(actors: Actors) -> None:
    bucket_size, layout = 8 * 2**20, partial(Flat, 16, (2**22,))  # 256 MiB
    await actors.hold(partial(layout, fill=1.0), layout)
    before = await actors.trainer.resident.remote()
    options: dict[str, Any] = {"bucket_size": bucket_size, "transport": "broadcast"}
    async with WeightSynchronizer(actors.trainer, actors.engines, **options) as synchronizer:
        await synchronizer.update_weights()
        after = await actors.trainer.resident.remote()
    assert after - before < 2 * bucket_size + 16 * 2**20


@pytest.mark.exhaustive
async def test_two_drivers_that_share_engines_take_turns_through_a_shared_lock(actors: Actors) -> None:
    class Two(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.policy, self.critic = Zoo(seed, strided=False), Zoo(seed + 1000, strided=False)

    model = Two(1)
    await actors.hold(TINY, partial(Two, 5))
    name = f"lock-{os.getpid()}"
    locks = [await asyncsync.SharedRolloutLock.create(name) for _ in range(2)]  # as two processes would
    parts = [
        {f"{part}.{key}": tensor for key, tensor in model.get_submodule(part).state_dict().items()}
        for part in ("policy", "critic")
    ]
    first, second = (
        WeightSynchronizer(weights, actors.engines, partial=True, lock=lock, timeout=60)
        for weights, lock in zip(parts, locks, strict=True)
    )
    async with first, second:
        for _ in range(3):
            with torch.no_grad():
                model.policy.weight.add_(1)
                model.critic.weight.add_(1)
            await asyncio.gather(first.update_weights(), second.update_weights())
            for engine in actors.engines:
                assert await engine.contents.remote() == contents(model)
    await locks[0].aclose()
