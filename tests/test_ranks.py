"""Trainers of several ranks: real actors, real meshes, bytes compared with what torch puts together."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import asyncsync
from asyncsync import EngineState, PlanError, WeightSynchronizer, cluster
from asyncsync.messages import STORES, Store
from tests.cancelling import CancelAt
from tests.engines import ToldEngine, failing
from tests.sample import content, contents
from tests.sharded import Mixed, RemoteShardedTrainer, become, every

pytestmark = [pytest.mark.asyncio, pytest.mark.ranks]

CASES = [
    ("fsdp", 2),
    ("tensor parallel", 2),
    ("replicated", 2),
    ("fsdp", 4),
    ("fsdp and tensor parallel", 4),
    ("hsdp", 4),
]


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[Any]]:
    made = [RemoteShardedTrainer.remote(rank) for rank in range(4)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.parametrize(("kind", "size"), CASES, ids=[f"{kind} {size}" for kind, size in CASES])
async def test_engines_get_what_the_ranks_hold_together(
    actors: list[Any], kind: str, size: int, tmp_path: Path
) -> None:
    ranks = actors[:size]
    await become(ranks, kind, tmp_path)
    for bucket_size in (1, 256, 1 << 20):
        engines = [asyncsync.ModuleEngine(Mixed(7)), asyncsync.ModuleEngine(Mixed(8), staged=False)]
        async with WeightSynchronizer(ranks, engines, bucket_size=bucket_size) as synchronizer:
            for _ in range(3):
                await every(ranks, "step")
                update = await synchronizer.update_weights()
                assert update.tensors_changed >= update.tensors - 1
                whole, *others = await every(ranks, "whole")
                assert all(other == whole for other in others)
                assert [contents(engine.module) for engine in engines] == [whole, whole]


@pytest.mark.parametrize("store", STORES)
async def test_sharded_ranks_store_what_they_hold_together(actors: list[Any], store: Store, tmp_path: Path) -> None:
    ranks, options = actors[:2], {"transport": store, "folder": tmp_path / "weights"}
    await become(ranks, "fsdp", tmp_path)
    engines = [ToldEngine(Mixed(7)), ToldEngine(Mixed(8), staged=False)]
    async with WeightSynchronizer(ranks, engines, bucket_size=256, **options) as synchronizer:  # type: ignore[arg-type]
        for _ in range(3):
            await every(ranks, "step")
            update = await synchronizer.update_weights()
            whole, _ = await every(ranks, "whole")
            assert [contents(engine.module) for engine in engines] == [whole, whole]
            published = asyncsync.read_weights(tmp_path / "weights")
            assert (published.version, published.digest) == (update.version, update.digest)
            assert {name: content(tensor) for name, tensor in published.tensors.items()} == whole
        assert [engine.joined for engine in engines] == [[], []]
    assert await every(ranks, "groups") == [0, 0], "the ranks have left each other"


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
async def test_stages_of_a_pipeline_that_are_sharded_themselves(actors: list[Any], kind: str, tmp_path: Path) -> None:
    def model(seed: int) -> nn.ModuleDict:
        return nn.ModuleDict({stage: Mixed(seed + index) for index, stage in enumerate(("first", "second"))})

    stages = [actors[:2], actors[2:]]
    await asyncio.gather(
        become(stages[0], kind, tmp_path, seed=3, stage="first"),
        become(stages[1], kind, tmp_path, seed=4, stage="second"),
    )
    for bucket_size in (64, 1 << 20):
        engines = [ToldEngine(model(7)), ToldEngine(model(8), staged=False)]
        async with WeightSynchronizer(stages, engines, bucket_size=bucket_size) as synchronizer:
            for _ in range(2):
                await every(actors, "step")
                await synchronizer.update_weights()
                first, _, second, _ = await every(actors, "whole")
                assert [contents(engine.module) for engine in engines] == [first | second] * 2
            joiner = ToldEngine(model(9))
            await synchronizer.add_engine(joiner)
            assert contents(joiner.module) == first | second
            await every(actors, "step")
            await synchronizer.update_weights()
            first, _, second, _ = await every(actors, "whole")
            assert [contents(engine.module) for engine in (*engines, joiner)] == [first | second] * 3
        assert await every(actors, "groups") == [0, 0, 0, 0], "closing leaves every group"


async def test_a_trainer_that_sleeps_makes_its_groups_anew_for_every_update_and_gathers_with_them(
    actors: list[Any], tmp_path: Path
) -> None:
    for size, bucket_size in ((2, 64), (3, 1 << 20)):
        ranks, model = actors[:size], Mixed(5)
        await become(ranks, "scattered", tmp_path, seed=5)
        engines = [ToldEngine(Mixed(7)), ToldEngine(Mixed(8), staged=False)]
        async with WeightSynchronizer(ranks, engines, bucket_size=bucket_size) as synchronizer:
            for _ in range(2):
                await synchronizer.update_weights()
                assert [contents(engine.module) for engine in engines] == [contents(model)] * 2
                assert await every(ranks, "is_asleep") == [True] * size
                await every(ranks, "step")
                with torch.no_grad():
                    for tensor in {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values():
                        tensor.mul_(-2)
            engines[1].before["receive_weights"] = failing(OSError("no"))
            with pytest.raises(asyncsync.EngineError, match="OSError: no"):
                await synchronizer.update_weights()
            assert await every(ranks, "is_asleep") == [True] * size
        assert await every(ranks, "hooks_called") == [["before", "after"] * 3] * size


@pytest.mark.parametrize(("kind", "size"), [*CASES[:3], CASES[4], ("scattered", 3)], ids=lambda value: f"{value}")
async def test_a_started_update_brings_what_the_ranks_held_then(
    actors: list[Any], kind: str, size: int, tmp_path: Path
) -> None:
    ranks = actors[:size]
    await become(ranks, kind, tmp_path, seed=5)
    model = Mixed(5)  # of what the ranks hold, if nobody but their gathering can tell
    engines = [ToldEngine(Mixed(7)), ToldEngine(Mixed(8), staged=False)]
    async with WeightSynchronizer(ranks, engines, bucket_size=256) as synchronizer:
        for fails in (False, False, True):
            was = contents(model) if kind == "scattered" else (await every(ranks, "whole"))[0]
            go_on = asyncio.Event()

            async def wait(go_on: asyncio.Event = go_on) -> None:
                await go_on.wait()

            engines[0].before["receive_weights"] = wait
            if fails:
                engines[1].before["receive_weights"] = failing(OSError("no"))
            update = await synchronizer.start_update()
            await every(ranks, "step")
            with torch.no_grad():
                for tensor in {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values():
                    tensor.mul_(-2)
            go_on.set()
            if fails:
                with pytest.raises(asyncsync.EngineError, match="OSError: no"):
                    await update
            else:
                await update
            assert [contents(engine.module) == was for engine in engines] == [True, not fails]
        await synchronizer.update_weights()
        now = contents(model) if kind == "scattered" else (await every(ranks, "whole"))[0]
        assert [contents(engine.module) for engine in engines] == [now, now]


async def test_weights_are_rebuilt_from_each_ranks_shards_of_the_masters(actors: list[Any], tmp_path: Path) -> None:
    await become(actors[:2], "masters", tmp_path)
    for bucket_size in (64, 1 << 20):
        engines = [asyncsync.ModuleEngine(Mixed(seed).bfloat16(), staged=bool(seed)) for seed in range(2)]
        async with WeightSynchronizer(actors[:2], engines, bucket_size=bucket_size) as synchronizer:
            for _ in range(2):
                await every(actors[:2], "step")
                await synchronizer.update_weights()
                whole, _ = await every(actors[:2], "whole")
                assert [contents(engine.module) for engine in engines] == [whole] * 2


def served(seed: int) -> list[asyncsync.ModuleEngine]:
    return [asyncsync.ModuleEngine(Mixed(seed)), asyncsync.ModuleEngine(Mixed(seed + 1), staged=False)]


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel", "scattered"])
async def test_no_rank_needs_more_than_two_buckets(actors: list[Any], kind: str, tmp_path: Path) -> None:
    ranks = actors[:3] if kind == "scattered" else actors
    await become(ranks, kind, tmp_path)
    for bucket_size in (256, 512):
        async with WeightSynchronizer(ranks, served(7), bucket_size=bucket_size, transport="broadcast") as synchronizer:
            for _ in range(2):
                await synchronizer.update_weights()
            padding = 64 * 7 * len(ranks)  # a tensor and rank, in what is brought for a bucket
            for buffers, bucket in await every(ranks, "extra_memory"):
                assert len(buffers) <= 2
                assert all(size <= bucket + padding for size in buffers)
            assert any(buffers for buffers, _ in await every(ranks, "extra_memory"))


async def test_a_rank_that_is_missing_is_an_error_that_names_the_tensors(actors: list[Any], tmp_path: Path) -> None:
    await become(actors, "fsdp", tmp_path)
    engines = served(7)
    async with WeightSynchronizer(actors[:3], engines) as synchronizer:
        with pytest.raises(PlanError, match=r"leave gaps: up\.weight .*are all ranks of the mesh given") as caught:
            await synchronizer.update_weights()
        assert caught.value.names == ("up.weight", "up.bias"), "three ranks of four hold all of the others"
    async with WeightSynchronizer(actors[0], engines) as synchronizer:
        with pytest.raises(PlanError, match="sharded over ranks: give the synchronizer a list of all of them"):
            await synchronizer.update_weights()


async def test_ranks_that_disagree_are_named_with_their_tensors(actors: list[Any], tmp_path: Path) -> None:
    ranks = actors[:2]
    await become(ranks, "replicated", tmp_path)
    await cluster.call(ranks[1], "rename", "down.bias", "down.offset")
    async with WeightSynchronizer(ranks, served(7)) as synchronizer:
        with pytest.raises(
            PlanError, match=r"rank 1 holds tensors that rank 0 does not: down\.offset; lacks .*: down\.bias"
        ) as caught:
            await synchronizer.update_weights()
        assert caught.value.names == ("down.bias", "down.offset")


async def test_ranks_that_are_cut_anew_are_found_out_of_step_and_asked_again(actors: list[Any], tmp_path: Path) -> None:
    ranks, engines = actors[:2], served(7)
    await become(ranks, "fsdp", tmp_path)
    async with WeightSynchronizer(ranks, engines) as synchronizer:
        await synchronizer.update_weights()
        for kind in ("tensor parallel", "replicated", "fsdp"):
            await become(ranks, kind, tmp_path, seed=3)
            await synchronizer.update_weights()
            whole, _ = await every(ranks, "whole")
            assert [contents(engine.module) for engine in engines] == [whole, whole]


@pytest.mark.parametrize("when", ["receive_weights", "finish_weight_update"])
async def test_an_engine_that_fails_leaves_the_ranks_fit_for_the_next_update(
    actors: list[Any], tmp_path: Path, when: str
) -> None:
    ranks, engines = actors[:2], [ToldEngine(Mixed(7)), ToldEngine(Mixed(8))]
    await become(ranks, "fsdp", tmp_path)
    async with WeightSynchronizer(ranks, engines, timeout=30) as synchronizer:
        await synchronizer.update_weights()
        engines[1].before[when] = failing(OSError("no"))
        with pytest.raises(asyncsync.EngineError, match="ToldEngine-1"):
            await synchronizer.update_weights()
        await every(ranks, "step")
        await synchronizer.update_weights()
        whole, _ = await every(ranks, "whole")
        assert [contents(engine.module) for engine in engines] == [whole, whole]


async def test_a_rank_that_is_killed_in_mid_update_is_named_and_engines_serve_on(
    ray_cluster: None, tmp_path: Path
) -> None:
    ranks = [RemoteShardedTrainer.remote(rank) for rank in range(2)]
    await become(ranks, "fsdp", tmp_path)
    engines = [ToldEngine(Mixed(7)), ToldEngine(Mixed(8))]
    killed = await cluster.call(ranks[1], "pid")

    async def kill() -> None:
        os.kill(killed, signal.SIGKILL)

    async with WeightSynchronizer(ranks, engines, timeout=30) as synchronizer:
        await synchronizer.update_weights()
        old = contents(engines[0].module)
        await cluster.call(ranks[1], "stop_before_sending")
        engines[0].before["receive_weights"] = kill
        with pytest.raises(asyncsync.TrainerError, match="trainer rank 1 is gone") as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UNCHANGED] * 2
        for engine in engines:
            async with engine.generating() as version:
                assert version == 1
                assert contents(engine.module) == old
    ray.kill(ranks[0])


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
async def test_cancelled_at_each_await_the_ranks_are_fit_for_the_next_update(
    actors: list[Any], tmp_path: Path, connected: bool
) -> None:
    async def run(update: CancelAt) -> None:
        await update

    ranks = actors[:2]
    await become(ranks, "fsdp", tmp_path)
    for at in itertools.count():
        engines = served(7)
        async with WeightSynchronizer(ranks, engines) as synchronizer:
            if connected:
                await synchronizer.update_weights()
            update = CancelAt(synchronizer._update(), at, "waiting")
            await asyncio.wait([asyncio.create_task(run(update))])
            await every(ranks, "step")
            await synchronizer.update_weights()
            whole, _ = await every(ranks, "whole")
            assert [contents(engine.module) for engine in engines] == [whole, whole]
        assert await every(ranks, "groups") == [0, 0], "closing leaves every group"
        if not update.reached:
            break
    assert at >= (2 if connected else 5)


async def test_updates_of_ranks_that_are_asked_for_at_once_share_their_runs(actors: list[Any], tmp_path: Path) -> None:
    ranks, engines = actors[:2], served(7)
    await become(ranks, "fsdp", tmp_path)
    async with WeightSynchronizer(ranks, engines) as synchronizer:
        updates = await asyncio.gather(*(synchronizer.update_weights() for _ in range(5)))
        assert {update.version for update in updates} <= {1, 2}
        whole, _ = await every(ranks, "whole")
        assert [contents(engine.module) for engine in engines] == [whole, whole]


async def test_two_synchronizers_of_one_sharded_trainer_each_get_what_they_ask_for(
    actors: list[Any], tmp_path: Path
) -> None:
    ranks = actors[:2]
    await become(ranks, "fsdp", tmp_path)
    half, brain = ToldEngine(Mixed(7).half()), ToldEngine(Mixed(8).bfloat16())
    async with (
        WeightSynchronizer(ranks, [half], dtype=torch.float16, bucket_size=256) as first,
        WeightSynchronizer(ranks, [brain], dtype=torch.bfloat16, bucket_size=512) as second,
    ):
        for _ in range(3):
            await every(ranks, "step")
            await first.update_weights()
            await second.update_weights()
            whole = Mixed(1)
            found, _ = await every(ranks, "whole")
            for name, tensor in whole.state_dict().items():
                tensor.copy_(torch.frombuffer(bytearray(found[name]), dtype=tensor.dtype).view(tensor.shape))
            assert contents(half.module) == contents(copy.deepcopy(whole).half())
            assert contents(brain.module) == contents(copy.deepcopy(whole).bfloat16())


async def test_ranks_that_cannot_be_connected_leave_none_of_them_in_a_group(actors: list[Any], tmp_path: Path) -> None:
    await become(actors, "fsdp", tmp_path)
    await cluster.call(actors[3], "fail_to_open")
    async with WeightSynchronizer(actors, served(7)) as synchronizer:
        with pytest.raises(asyncsync.TrainerError, match="trainer rank 3 failed: OSError: no port"):
            await synchronizer.update_weights()
        assert await every(actors, "groups") == [0, 0, 0, 0]
        await synchronizer.update_weights()
        assert sum(await every(actors, "groups")) > 4
