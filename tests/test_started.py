"""``start_update()``: engines get what the weights were when they were copied, however the trainer goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import ClosedError, EngineState, LockError, PlanError, TransferError, WeightSynchronizer
from asyncsync.coalesce import Coalescer
from asyncsync.connection import TransportChoice
from asyncsync.rank_worker import RankWorker
from tests.cancelling import CancelAt
from tests.chain import Chain
from tests.engines import ToldEngine, change, failing, hanging, holds, synced, zoo
from tests.sample import Zoo, contents, fingerprint
from tests.test_sources import of_stage, stages

pytestmark = pytest.mark.asyncio

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
OVER = pytest.mark.parametrize("transport", ["shared", "broadcast"])


def rank_of(synchronizer: WeightSynchronizer) -> RankWorker:
    (rank,) = (source.trainer for source in synchronizer._sources.all)
    assert isinstance(rank, RankWorker)
    return rank


@asynccontextmanager
async def held_up(engines: list[ToldEngine], call: str = "receive_weights") -> AsyncIterator[asyncio.Event]:
    """Engines that wait in a call until the event that this gives is set."""
    go_on = asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    for engine in engines:
        engine.before[call] = wait
    try:
        yield go_on
    finally:
        go_on.set()


@BOTH
@OVER
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "deltas"])
async def test_engines_get_every_kind_of_tensor_as_it_was_when_the_update_was_started(
    staged: bool, transport: TransportChoice, delta: bool
) -> None:
    async with synced(staged=staged, transport=transport, delta=delta) as (trainer, engines, synchronizer):
        for version in range(1, 5):
            change(trainer)
            was = contents(trainer)
            async with held_up(engines) as go_on:
                update = await synchronizer.start_update()
                assert not update.done()
                change(trainer)
                go_on.set()
            change(trainer)
            done = await update
            assert update.done()
            assert done is await update
            assert done.version == version
            assert {outcome.transport for outcome in done.outcomes} == {transport}
            assert {outcome.delta for outcome in done.outcomes} == {delta and version > 1}
            assert done.seconds["snapshot"] > 0
            assert [contents(engine.module) == was for engine in engines] == [True, True]
            assert not rank_of(synchronizer)._held
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


@BOTH
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "deltas"])
async def test_what_is_fetched_from_a_folder_is_the_copy(staged: bool, delta: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"transport": "folder", "folder": tmp_path, "delta": delta}
    async with synced(staged=staged, **options) as (trainer, engines, synchronizer):
        for version in range(1, 4):
            was = contents(trainer)
            update = await synchronizer.start_update()
            change(trainer)
            done = await update
            assert {outcome.delta for outcome in done.outcomes} == {delta and version > 1}
            assert [contents(engine.module) == was for engine in engines] == [True, True]


async def test_the_copy_lies_where_engines_map_it_and_is_the_only_one() -> None:
    async with synced(transport="shared") as (trainer, engines, synchronizer):
        rank = rank_of(synchronizer)
        for _ in range(6):
            async with held_up(engines) as go_on:
                update = await synchronizer.start_update()
                (held,) = rank._held.values()
                assert held.shared is not None
                assert held.arena is held.shared.memory
                assert held.shared.holders, "another update would write to it"
                go_on.set()
            await update
            change(trainer)
        assert len(rank._sets.numbers) == 2


async def test_where_nothing_is_shared_the_next_copy_takes_the_place_of_the_last() -> None:
    async with synced(transport="broadcast") as (trainer, engines, synchronizer):
        places = set()
        for _ in range(4):
            async with held_up(engines) as go_on:
                update = await synchronizer.start_update()
                (held,) = rank_of(synchronizer)._held.values()
                assert held.arena is not None
                places.add(held.arena.data_ptr())
                go_on.set()
            await update
            change(trainer)
        assert len(places) == 1


@BOTH
@OVER
async def test_when_an_engine_fails_the_others_get_the_same_weights(staged: bool, transport: TransportChoice) -> None:
    async with synced(staged=staged, transport=transport, count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        was = contents(trainer)
        async with held_up([engines[0]]) as go_on:
            engines[1].before["receive_weights"] = failing(RuntimeError("planned"))
            update = await synchronizer.start_update()
            change(trainer)
            go_on.set()
        with pytest.raises(asyncsync.EngineError, match="planned") as caught:
            await update
        assert caught.value.update is not None
        assert [contents(engines[index].module) == was for index in (0, 2)] == [True, True]
        assert not rank_of(synchronizer)._held
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True] * 3


@BOTH
async def test_several_sources_each_copy_their_own(staged: bool) -> None:
    model = stages(3)
    engines = [ToldEngine(stages(3, 50 + index, strided=False), staged=staged) for index in range(2)]
    ranks = [[of_stage(model, index)] for index in range(3)]
    async with WeightSynchronizer(ranks, engines, bucket_size=256, timeout=60) as synchronizer:
        for _ in range(3):
            was = contents(model)
            async with held_up(engines) as go_on:
                update = await synchronizer.start_update()
                change(model)
                go_on.set()
            await update
            assert [contents(engine.module) == was for engine in engines] == [True, True]


class Gathered(asyncsync.GatheredWeights):
    """Weights that only a gathering puts together; it counts what it was asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[str] = []

    def describe(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, each.dtype, tuple(each.shape)) for name, each in self.module.state_dict().items()]

    def gather(self, name: str) -> Tensor:
        self.calls.append(name)
        return self.module.state_dict()[name]  # type: ignore[no-any-return]


async def test_what_must_be_gathered_is_gathered_when_it_is_copied_and_only_then() -> None:
    model, engines = Chain(1), [ToldEngine(Chain(0)), ToldEngine(Chain(0))]
    gathered = [Gathered(model) for _ in range(2)]
    ranks = [asyncsync.TrainerRank(each) for each in gathered]
    async with WeightSynchronizer(ranks, engines, timeout=60) as synchronizer:
        for _ in range(2):
            was = contents(model)
            async with held_up([engines[0]]) as go_on:
                engines[1].before["receive_weights"] = failing(RuntimeError("planned"))  # it is done once more
                for each in gathered:
                    each.calls.clear()
                update = await synchronizer.start_update()
                change(model)
                go_on.set()
            with pytest.raises(asyncsync.EngineError, match="planned"):
                await update
            for each in gathered:
                assert sorted(each.calls) == sorted(was)
            assert contents(engines[0].module) == was


class Hooked(asyncsync.TrainerRank):
    """A rank that notes when its hooks are called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.calls: list[str] = []

    def before_update(self) -> None:
        self.calls.append("before")

    def after_update(self) -> None:
        self.calls.append("after")


async def test_the_trainers_hooks_are_called_around_the_copying_and_not_again() -> None:
    trainer, engines = Hooked(Zoo(1)), [ToldEngine(zoo(50)), ToldEngine(zoo(51))]
    async with WeightSynchronizer(trainer, engines, timeout=60) as synchronizer:
        async with held_up(engines) as go_on:
            engines[1].before["finish_weight_update"] = failing(RuntimeError("planned"))
            update = await synchronizer.start_update()
            assert trainer.calls == ["before", "after"]
            go_on.set()
        with pytest.raises(asyncsync.EngineError, match="planned"):
            await update
        assert trainer.calls == ["before", "after"]
        await synchronizer.update_weights()
        assert trainer.calls == ["before", "after"] * 2


async def test_what_fails_before_the_copy_is_there_is_raised_at_once_and_what_fails_later_by_awaiting() -> None:
    model, engines = Chain(1), [ToldEngine(Chain(0))]
    weights = {"more": torch.ones(1), **model.state_dict()}
    async with WeightSynchronizer(weights, engines, timeout=60) as synchronizer:
        with pytest.raises(PlanError, match="more"):
            await synchronizer.start_update()
        del weights["more"]
        engines[0].before["finish_weight_update"] = failing(RuntimeError("planned"))
        update = await synchronizer.start_update()
        for _ in range(2):
            with pytest.raises(asyncsync.EngineError, match="planned"):
                await update
        assert update.done()


async def test_a_copy_that_cannot_be_made_fails_the_update_and_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async with synced() as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        rank = rank_of(synchronizer)
        with monkeypatch.context() as patched:

            def fail(*_: Any) -> None:
                raise TransferError("planned")

            patched.setattr("asyncsync.rank_worker.hold_whole", fail)
            with pytest.raises(TransferError, match="planned") as caught:
                await synchronizer.start_update()
        assert caught.value.phase == "snapshot"
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UNCHANGED] * 2
        assert not rank._held
        assert "receive_weights" not in engines[0].calls[-2:]
        change(trainer)
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_starting_and_updating_coalesce_and_one_that_comes_later_waits_for_the_next_copy() -> None:
    async with synced() as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        async with held_up(engines) as go_on:
            first, second = await asyncio.gather(synchronizer.start_update(), synchronizer.start_update())
            plain = asyncio.create_task(synchronizer.update_weights())
            third = asyncio.create_task(synchronizer.start_update())
            change(trainer)
            was = contents(trainer)
            await asyncio.sleep(0)
            assert not third.done()
            go_on.set()
            assert (await first).version == (await second).version == 2
        later = await third
        change(trainer)
        assert (await later).version == (await plain).version == 3
        assert [contents(engine.module) == was for engine in engines] == [True, True]


@OVER
async def test_a_started_update_that_is_cancelled_is_undone(transport: TransportChoice) -> None:
    async with synced(transport=transport) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        was = contents(trainer)
        for how in ("awaiting", "cancel"):
            change(trainer)
            finishing = asyncio.Event()

            async def hang(finishing: asyncio.Event = finishing) -> None:
                finishing.set()
                await asyncio.Event().wait()

            engines[1].before["finish_weight_update"] = hang
            update = await synchronizer.start_update()
            if how == "awaiting":
                task = asyncio.ensure_future(_outcome(update))
                await finishing.wait()
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
            else:
                await update.cancel()
                await update.cancel()
            assert update.done()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert not rank_of(synchronizer)._held
            engines[1].before.clear()
            assert contents(engines[1].module) == was
            await synchronizer.update_weights()
            was = contents(trainer)
            assert [contents(engine.module) == was for engine in engines] == [True, True]


async def _outcome(update: asyncsync.StartedUpdate) -> asyncsync.WeightUpdate:
    return await update


async def test_one_of_two_who_have_started_an_update_may_leave() -> None:
    async with synced() as (trainer, engines, synchronizer):
        async with held_up(engines) as go_on:
            first, second = await asyncio.gather(synchronizer.start_update(), synchronizer.start_update())
            await first.cancel()
            assert not second.done()
            go_on.set()
        assert (await second).version == 1
        assert (await first).version == 1
        assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_closing_ends_an_update_that_was_started() -> None:
    async with synced() as (_, engines, synchronizer):
        engines[0].before["receive_weights"] = hanging()
        update = await synchronizer.start_update()
    with pytest.raises(ClosedError):
        await update


async def test_inside_generation_it_is_neither_started_nor_awaited() -> None:
    async with synced(initial_version=0) as (_, engines, synchronizer):
        async with held_up(engines) as go_on:
            update = await synchronizer.start_update()
            async with synchronizer.generation():
                with pytest.raises(LockError, match="inside generation"):
                    await synchronizer.start_update()
                with pytest.raises(LockError, match="inside generation"):
                    await update
            go_on.set()
        await update
        async with synchronizer.generation():
            assert (await update).version == 1  # it does not wait


@pytest.mark.parametrize("when", ["waiting", "handed over"])
@pytest.mark.parametrize("fails", [False, True], ids=["", "in one that fails"])
async def test_cancelled_at_each_await_of_an_update_that_was_started(
    monkeypatch: pytest.MonkeyPatch, when: Any, fails: bool
) -> None:
    monkeypatch.setattr(Coalescer, "started", property(lambda _: True))
    async with synced() as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        at, reached = 0, True
        while reached:
            was, version = contents(trainer), synchronizer.weight_version
            change(trainer)
            if fails:
                engines[1].before["receive_weights"] = failing(RuntimeError("planned"))
            update = CancelAt(synchronizer._update(), at, when)
            task = asyncio.ensure_future(_run(update))
            await asyncio.wait([task])
            reached = update.reached
            assert not rank_of(synchronizer)._held, at
            assert task.cancelled() == reached, at
            engines[1].before.clear()
            held = [contents(engine.module) for engine in engines]
            assert all(each in (was, contents(trainer)) for each in held), at
            assert synchronizer.weight_version in (version, (version or 0) + 1)
            await synchronizer.update_weights()
            assert [holds(engine, trainer) for engine in engines] == [True, True], at
            at += 1
        assert at > 5


async def _run(update: CancelAt) -> Any:
    return await update


@pytest.mark.exhaustive
async def test_a_snapshot_whose_conductor_is_gone_is_held_no_longer_than_its_update_may_take() -> None:
    async with synced(timeout=5.0) as (_, _, synchronizer):
        await synchronizer.update_weights()
        rank = rank_of(synchronizer)
        dropped = asyncio.Event()
        drop = rank._drop_snapshot

        def note(name: str) -> None:
            drop(name)
            dropped.set()

        async def stay(snapshot: str) -> None:
            """What a conductor that is gone does."""

        rank._drop_snapshot, rank.drop_snapshot = note, stay  # type: ignore[method-assign]
        await (await synchronizer.start_update())
        assert rank._held
        await asyncio.wait_for(dropped.wait(), 20)
        assert not rank._held


# -- across processes -------------------------------------------------------------------------------------------------


class Trainer(asyncsync.TrainerRank):
    def __init__(self) -> None:
        self.module = Zoo(1)
        super().__init__(self.module)

    def step(self) -> str:
        change(self.module)
        return fingerprint(self.module)

    def pid(self) -> int:
        return os.getpid()


class Engine(asyncsync.ModuleEngine):
    def __init__(self) -> None:
        super().__init__(zoo(50))
        self._go_on = asyncio.Event()
        self._arrived = asyncio.Event()
        self._waits = False

    @asyncsync.cluster.control
    async def hold_up(self, waits: bool) -> None:
        self._waits = waits
        self._go_on.clear()
        self._arrived.clear()

    @asyncsync.cluster.control
    async def go_on(self) -> None:
        self._go_on.set()

    @asyncsync.cluster.control
    async def arrived(self) -> None:
        await self._arrived.wait()

    @asyncsync.cluster.control
    async def receive_weights(self, order: asyncsync.UpdateOrder) -> asyncsync.EngineReceipt:
        self._arrived.set()
        if self._waits:
            await self._go_on.wait()
        return await super().receive_weights(order)

    def read(self) -> str:
        return fingerprint(self.module)


@pytest.mark.faults
@pytest.mark.ray
@OVER
async def test_across_processes_and_a_trainer_that_dies_after_the_copy(
    ray_cluster: None, transport: TransportChoice
) -> None:
    trainer, engine = (asyncsync.remote(num_cpus=0)(each).remote() for each in (Trainer, Engine))
    async with WeightSynchronizer(trainer, [engine], transport=transport, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        was = await trainer.step.remote()
        await engine.hold_up.remote(True)
        update = await synchronizer.start_update()
        await trainer.step.remote()
        await engine.go_on.remote()
        assert (await update).version == 2
        assert await engine.read.remote() == was
        await engine.hold_up.remote(True)
        update = await synchronizer.start_update()
        await engine.arrived.remote()
        os.kill(await trainer.pid.remote(), signal.SIGKILL)
        await engine.go_on.remote()
        with pytest.raises(asyncsync.TrainerError, match="the trainer"):
            await update
        assert await engine.read.remote() == was
        assert synchronizer.weight_version == 2
    ray.kill(trainer)
    ray.kill(engine)


# -- where parts meet -------------------------------------------------------------------------------------------------


async def test_a_copy_that_comes_to_nothing_leaves_its_memory_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with synced(transport="shared") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        rank = rank_of(synchronizer)
        original = rank._on_what_stays

        def fail(*args: Any) -> Any:
            original(*args)
            raise asyncsync.MemorySaverError("planned")  # the trainer was resumed in the middle, say

        for _ in range(4):
            with monkeypatch.context() as patched:
                patched.setattr(rank, "_on_what_stays", fail)
                with pytest.raises(asyncsync.TrainerError, match="planned"):
                    await synchronizer.start_update()
            assert not [one for one in rank._sets._sets if any(isinstance(holder, str) for holder, _ in one.holders)]
        await synchronizer.update_weights()
        assert len(rank._sets.numbers) <= 2
        assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_one_of_two_who_await_the_same_update_may_give_up() -> None:
    async with synced() as (trainer, engines, synchronizer):
        async with held_up(engines) as go_on:
            update = await synchronizer.start_update()
            first, second = (asyncio.ensure_future(_outcome(update)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            assert not second.done()
            go_on.set()
        assert (await second).version == 1
        assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_a_snapshot_that_an_engine_serves_from_already_is_sent_from_another_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had switched when the others did not answer: a second attempt must not offer it what it serves."""
    async with synced(transport="shared", count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        rank, lies = rank_of(synchronizer), []
        original = rank._lay_out

        def note(*args: Any) -> Any:
            memory = original(*args)
            lies.append(None if memory is None else memory.data_ptr())
            return memory

        monkeypatch.setattr(rank, "_lay_out", note)
        was = contents(trainer)
        async with held_up(engines) as go_on:
            update = await synchronizer.start_update()
            (held,) = rank._held.values()
            assert held.shared is not None
            held.shared.holders.add((object(), 1))  # a line to an engine
            change(trainer)
            go_on.set()
        await update
        assert held.shared.memory.data_ptr() not in lies
        assert [contents(engine.module) == was for engine in engines] == [True, True]
