"""Updates of which only what differs is sent: engines hold the trainer's bytes, whoever joins, fails, dies or lies."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import EngineState, WeightSynchronizer, cluster
from asyncsync.buckets import Bucket
from asyncsync.deltas import Renewal
from asyncsync.engines.loading import InPlaceLoader, StagedLoader
from asyncsync.errors import EngineError, TransferError
from asyncsync.messages import STORES, EngineStatus
from asyncsync.packing import raw
from asyncsync.rank_worker import RankWorker
from asyncsync.transports import envelopes
from tests.actors import EngineActor, Flat, Trainer
from tests.chain import Chain
from tests.engines import ToldEngine, failing, gate_of, hanging, holds, synced, zoo
from tests.fake_vllm import FakeLLM
from tests.sample import Zoo, contents
from tests.sharded import Mixed, RemoteShardedTrainer, become, every
from tests.test_vllm_adapter import serves

pytestmark = pytest.mark.asyncio

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
WAYS = pytest.mark.parametrize(
    "transport", ["broadcast", "folder", pytest.param("shared", marks=pytest.mark.exhaustive)]
)

AUTO_OR_FOLDER = pytest.mark.parametrize("transport", ["auto", "folder"])


@pytest.fixture
def way(transport: str, tmp_path: Path) -> dict[str, Any]:
    """Of a synchronizer that goes over a transport."""
    return {"transport": transport, "folder": tmp_path / "weights" if transport == "folder" else None}


def nudge(module: nn.Module, step: int, *, only: Collection[str] | None = None) -> int:
    """Flip a bit of one element of every third tensor, or of some; how many elements that are."""
    changed = 0
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    with torch.no_grad():
        for index, (name, tensor) in enumerate(found.values()):
            chosen = (index + step) % 3 == 0 if only is None else name in only
            if chosen and tensor.numel() and 0 not in tensor.stride():
                integers = raw(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
                integers[(0,) * integers.ndim].bitwise_xor_(1)
                changed += 1
    return changed


def nudge_in_place(tensor: Tensor) -> None:
    """Flip a bit of a tensor's first element, behind everyone's back."""
    with torch.no_grad():
        raw(tensor).view(-1)[0].bitwise_xor_(1)


def were_deltas(update: asyncsync.WeightUpdate) -> list[bool]:
    """Which engines got what differs."""
    return [outcome.delta for outcome in update.outcomes]


def rank_of(synchronizer: WeightSynchronizer) -> RankWorker:
    """The trainer, in this process."""
    rank = synchronizer._own_trainer
    assert rank is not None
    return rank


# -- what arrives -----------------------------------------------------------------------------------------------------


@WAYS
@BOTH
async def test_every_kind_of_tensor_arrives_bit_for_bit(staged: bool, way: dict[str, Any]) -> None:
    async with synced(staged=staged, delta=True, **way) as (trainer, engines, synchronizer):
        first = await synchronizer.update_weights()
        assert were_deltas(first) == [False, False]
        assert first.density is None
        assert [outcome.bytes for outcome in first.outcomes] == [first.bytes] * 2
        elements = sum(tensor.numel() for tensor in {id(t): t for t in trainer.state_dict().values()}.values())
        for step in range(7):  # from the fourth on, a staged engine receives into memory it has served before
            changed = nudge(trainer, step) if step != 3 else 0
            update = await synchronizer.update_weights()
            assert [holds(engine, trainer) for engine in engines] == [True, True]
            assert were_deltas(update) == [True, True]
            assert update.density is not None
            assert (update.density > 0) == (changed > 0)
            assert update.density <= (changed + 2) / (elements - 10)  # a complex128 counts as two, tied ones once
            assert update.bytes == first.bytes
            assert all(0 <= (outcome.bytes or 0) < first.bytes for outcome in update.outcomes)
            assert changed or [outcome.bytes for outcome in update.outcomes] == [0, 0]
            assert [outcome.digest for outcome in update.outcomes] == [update.digest] * 2


@WAYS
@BOTH
@pytest.mark.parametrize("bucket_size", [64, 2**20])
async def test_large_tensors_are_split_and_compared_where_they_lie(
    staged: bool, way: dict[str, Any], bucket_size: int
) -> None:
    trainer = nn.ModuleDict({"large": nn.Linear(300, 300), "small": nn.Linear(3, 3), "turned": nn.Linear(300, 200)})
    turned = trainer["turned"]
    assert isinstance(turned, nn.Linear)
    turned.weight.data = turned.weight.data.t().contiguous().t()
    make = partial(
        nn.ModuleDict, {"large": nn.Linear(300, 300), "small": nn.Linear(3, 3), "turned": nn.Linear(300, 200)}
    )
    engine = ToldEngine(make(), staged=staged)
    options: dict[str, Any] = {"delta": True, **way, "bucket_size": max(bucket_size, 4096)}
    async with WeightSynchronizer(trainer, [engine], timeout=60, **options) as synchronizer:
        await synchronizer.update_weights()
        for step in range(4):
            nudge(trainer, step, only=("large.weight", "turned.weight", "small.bias"))
            update = await synchronizer.update_weights()
            assert were_deltas(update) == [True]
            assert holds(engine, trainer)
            assert (update.outcomes[0].bytes or 0) < update.bytes / 50


@WAYS
@BOTH
async def test_a_bucket_of_which_too_much_differs_comes_whole_beside_deltas(staged: bool, way: dict[str, Any]) -> None:
    trainer = Flat(8, (300,), fill=1.0)
    engine = ToldEngine(Flat(8, (300,)), staged=staged)
    options: dict[str, Any] = {"delta": True, **way, "bucket_size": 1200}
    async with WeightSynchronizer(trainer, [engine], timeout=60, **options) as synchronizer:
        await synchronizer.update_weights()
        for step in range(4):
            with torch.no_grad():
                trainer.weights[step].add_(1)  # all of a bucket
                trainer.weights[step + 1][7] += 1
            update = await synchronizer.update_weights()
            assert were_deltas(update) == [True]
            assert update.density == pytest.approx(301 / 2400)
            assert 1200 < (update.outcomes[0].bytes or 0) < 1300
            assert holds(engine, trainer)
        with torch.no_grad():
            for weight in trainer.weights:
                weight.add_(1)
        update = await synchronizer.update_weights()
        assert (update.density, update.outcomes[0].bytes) == (1.0, update.bytes)
        assert holds(engine, trainer)


@WAYS
async def test_what_lies_between_tensors_of_a_bucket_that_comes_whole_is_not_counted(way: dict[str, Any]) -> None:
    trainer, engine = Flat(4, (299,)), ToldEngine(Flat(4, (299,)))
    async with WeightSynchronizer(trainer, [engine], delta=True, bucket_size=2500, **way) as synchronizer:
        await synchronizer.update_weights()
        with torch.no_grad():
            for weight in trainer.weights:
                weight.add_(1)
        update = await synchronizer.update_weights()
        assert (were_deltas(update), update.outcomes[0].bytes, update.bytes) == ([True], 4 * 1196, 4 * 1196)
        assert holds(engine, trainer)


async def test_weights_that_are_converted_on_purpose_differ_as_what_is_sent() -> None:
    trainer, engine = nn.Linear(64, 64), ToldEngine(nn.Linear(64, 64).to(torch.bfloat16))
    options: dict[str, Any] = {"delta": True, "dtype": torch.bfloat16}
    async with WeightSynchronizer(trainer, [engine], timeout=60, **options) as synchronizer:
        await synchronizer.update_weights()
        with torch.no_grad():
            trainer.weight.mul_(1 + 1e-7)  # too little for bfloat16, but for a few
            trainer.weight[0, 0] += 1
        update = await synchronizer.update_weights()
        assert update.density is not None
        assert 0 < update.density < 0.02
        assert contents(engine.module) == contents(copy.deepcopy(trainer).to(torch.bfloat16))


@AUTO_OR_FOLDER
async def test_an_engine_that_loads_by_itself_takes_deltas_into_its_store(way: dict[str, Any]) -> None:
    llm, model = FakeLLM(ranks=2), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)], delta=True, **way) as synchronizer:
        await synchronizer.update_weights()
        for step in range(3):
            nudge_in_place(next(model.parameters()))
            update = await synchronizer.update_weights()
            assert were_deltas(update) == [True], step
            assert all(
                torch.equal(own, sent)
                for own, sent in zip(llm.modules[0].parameters(), model.parameters(), strict=True)
            )
        llm.failing.add("update")  # all was received, and is not loaded
        nudge_in_place(next(model.parameters()))
        with pytest.raises(asyncsync.EngineError, match="planned"):
            await synchronizer.update_weights()
        update = await synchronizer.update_weights()
        assert were_deltas(update) == [True], "to what its store holds, though nobody serves it"
        assert await serves(llm, model)
        nudge_in_place(next(model.parameters()))
        assert were_deltas(await synchronizer.update_weights()) == [True]


async def test_without_delta_nothing_is_kept_and_nothing_compared() -> None:
    async with synced() as (trainer, _, synchronizer):
        for step in range(2):
            nudge(trainer, step)
            update = await synchronizer.update_weights()
            assert (update.density, were_deltas(update)) == (None, [False, False])
        assert rank_of(synchronizer)._baseline is None
    with pytest.raises(TypeError, match="delta must be True or False"):
        WeightSynchronizer(trainer, [ToldEngine(zoo(1))], delta=1)  # type: ignore[arg-type]


# -- who comes, and what is agreed on ---------------------------------------------------------------------------------


@WAYS
async def test_a_joiner_gets_the_whole_beside_those_who_get_deltas(way: dict[str, Any]) -> None:
    async with synced(delta=True, **way) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        joiner = ToldEngine(zoo(60))
        nudge(trainer, 0)
        synchronizer._membership.admit(synchronizer._membership.add(joiner))  # with the update, not from another engine
        update = await synchronizer.update_weights()
        assert were_deltas(update) == [True, True, False]
        assert [outcome.bytes == update.bytes for outcome in update.outcomes] == [False, False, True]
        assert [holds(engine, trainer) for engine in (*engines, joiner)] == [True] * 3
        for step in range(3):
            nudge(trainer, step)
            assert were_deltas(await synchronizer.update_weights()) == [True] * 3
            assert [holds(engine, trainer) for engine in (*engines, joiner)] == [True] * 3


async def test_a_joiner_that_caught_up_from_another_engine_gets_the_whole_first() -> None:
    async with synced(delta=True, count=1) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        joiner = ToldEngine(zoo(60))
        await synchronizer.add_engine(joiner)
        for deltas in ([True, False], [True, True]):
            nudge(trainer, 0)
            assert were_deltas(await synchronizer.update_weights()) == deltas
            assert [holds(engine, trainer) for engine in (*engines, joiner)] == [True] * 2


async def test_an_engine_that_takes_no_deltas_gets_the_whole_each_time() -> None:
    class Whole(ToldEngine):
        async def describe_engine(self) -> EngineStatus:
            return replace(await super().describe_engine(), no_deltas="it takes whole tensors only", base_epoch=None)

    trainer, engine = Zoo(1), Whole(zoo(50))
    async with WeightSynchronizer(trainer, [engine], delta=True, bucket_size=1024) as synchronizer:
        for step in range(3):
            nudge(trainer, step)
            update = await synchronizer.update_weights()
            assert (were_deltas(update), update.density) == ([False], None)
            assert holds(engine, trainer)
        assert engine.calls.count("describe_engine") == 1, "nobody is asked anew for that"


@BOTH
async def test_another_conductors_update_in_between_is_noticed_before_the_first_byte(staged: bool) -> None:
    trainer, engine = Zoo(1), ToldEngine(zoo(50), staged=staged)
    lock = asyncsync.RolloutLock()
    options: dict[str, Any] = {"delta": True, "bucket_size": 1024, "lock": lock, "timeout": 60.0}
    other = Zoo(3)
    async with (
        WeightSynchronizer(trainer, [engine], **options) as first,
        WeightSynchronizer(other, [engine], **options) as second,
    ):
        for _ in range(2):
            for synchronizer, module in ((first, trainer), (second, other)):
                assert were_deltas(await synchronizer.update_weights()) == [False]
                assert holds(engine, module)
                nudge(module, 1)
                assert were_deltas(await synchronizer.update_weights()) == [True]
                assert holds(engine, module)


@pytest.mark.ray
@pytest.mark.parametrize("store", STORES)
async def test_engines_that_fetch_get_deltas_beside_those_of_a_broadcast(
    ray_cluster: None, store: str, tmp_path: Path
) -> None:
    trainer, near, far = Zoo(1), ToldEngine(zoo(50)), ToldEngine(zoo(51))

    def transport(engine: Any) -> Any:
        return store if engine is far else "broadcast"

    options: dict[str, Any] = {"delta": True, "bucket_size": 1024, "timeout": 60.0, "transport": transport}
    async with WeightSynchronizer(trainer, [near, far], folder=tmp_path, **options) as synchronizer:
        for step in range(4):
            nudge(trainer, step)
            update = await synchronizer.update_weights()
            assert were_deltas(update) == [step > 0] * 2
            assert (step > 0) == all((outcome.bytes or 0) < update.bytes for outcome in update.outcomes)
            assert [holds(engine, trainer) for engine in (near, far)] == [True, True]
            assert asyncsync.read_weights(tmp_path).digest == update.digest


async def test_what_is_compared_with_may_be_dropped_in_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another conductor of the same trainer, without deltas, asks for its weights once this one's order was checked."""
    async with synced(delta=True, transport="broadcast") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        nudge(trainer, 1)
        rank = rank_of(synchronizer)
        leave = rank._leave_all_but

        async def drop_and_leave(connections: Any) -> None:
            monkeypatch.undo()
            rank._baseline = None
            await leave(connections)

        monkeypatch.setattr(rank, "_leave_all_but", drop_and_leave)
        assert were_deltas(await synchronizer.update_weights()) == [False, False]
        assert [holds(engine, trainer) for engine in engines] == [True, True]


@pytest.mark.ray
@BOTH
async def test_deltas_alone_come_through_objects(ray_cluster: None, staged: bool) -> None:
    async with synced(staged=staged, delta=True, transport="objects") as (trainer, engines, synchronizer):
        for step in range(5):
            nudge(trainer, step)
            update = await (await synchronizer.start_update() if step % 2 else synchronizer.update_weights())
            assert were_deltas(update) == [step > 0] * 2
            assert [holds(engine, trainer) for engine in engines] == [True, True]
        engines[1].before["receive_weights"] = failing(OSError("no"))
        nudge(trainer, 9)
        with pytest.raises(asyncsync.EngineError, match="OSError: no"):
            await synchronizer.update_weights()
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


@WAYS
async def test_what_was_snapshotted_is_compared_while_the_trainer_goes_on(way: dict[str, Any]) -> None:
    async with synced(delta=True, **way) as (trainer, engines, synchronizer):
        for step in range(4):
            nudge(trainer, step)
            expected = contents(trainer)
            handle = await synchronizer.start_update()
            nudge(trainer, step + 1)
            update = await handle
            assert were_deltas(update) == [step > 0] * 2
            assert [contents(engine.module) for engine in engines] == [expected] * 2


@pytest.mark.parametrize("end", ["engine", "source"])
@BOTH
async def test_an_end_that_lost_what_is_compared_with_says_so_before_the_first_byte(staged: bool, end: str) -> None:
    async with synced(delta=True, staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        for _ in range(2):
            nudge(trainer, 1)
            if end == "engine":
                loader = engines[1]._asyncsync._loader
                assert loader is not None
                loader.base_epoch = None
            else:
                rank_of(synchronizer)._baseline = None
            assert were_deltas(await synchronizer.update_weights()) == [False, False], "in the same call"
            assert [holds(engine, trainer) for engine in engines] == [True, True]
            nudge(trainer, 2)
            assert were_deltas(await synchronizer.update_weights()) == [True, True]
            assert [holds(engine, trainer) for engine in engines] == [True, True]


@BOTH
async def test_weights_that_were_released_with_no_copy_are_brought_whole(staged: bool) -> None:
    class Sleeper(ToldEngine):
        gone: frozenset[str] = frozenset()

        def released_memory(self) -> Collection[str]:
            return self.gone

        async def release_memory(self, tags: Collection[str]) -> None:
            self.gone |= frozenset(tags)
            with torch.no_grad():
                for tensor in self.module.state_dict(keep_vars=True).values():
                    raw(tensor).fill_(91)

        async def resume_memory(self, tags: Collection[str]) -> None:
            self.gone -= frozenset(tags)

    trainer, engine = Zoo(1), Sleeper(zoo(50), staged=staged)
    async with WeightSynchronizer(trainer, [engine], delta=True, bucket_size=1024, timeout=60) as synchronizer:
        for deltas in (False, True, True):
            nudge(trainer, 1)
            assert were_deltas(await synchronizer.update_weights()) == [deltas]
        await engine.sleep(["weights"])
        for deltas in (False, True, True, True):
            nudge(trainer, 2)
            assert were_deltas(await synchronizer.update_weights()) == [deltas]
            assert holds(engine, trainer)


async def test_synchronizers_that_share_a_trainer_do_not_compare_with_each_others_updates() -> None:
    trainer = Zoo(1)
    rank = RankWorker(trainer)
    one, other = ToldEngine(zoo(50)), ToldEngine(zoo(51))
    options: dict[str, Any] = {"bucket_size": 1024, "timeout": 60.0}
    async with (
        WeightSynchronizer([rank], [one], delta=True, **options) as first,
        WeightSynchronizer([rank], [other], delta=True, **options) as second,
        WeightSynchronizer([rank], [ToldEngine(zoo(52))], **options) as third,
    ):
        for synchronizer, engine in ((first, one), (first, one), (second, other), (first, one), (second, other)):
            nudge(trainer, 1)
            await synchronizer.update_weights()
            assert holds(engine, trainer)
        await third.update_weights()
        nudge(trainer, 1)
        await first.update_weights()
        assert holds(one, trainer)
    rank.close()


async def test_a_layout_that_changes_is_sent_whole_and_then_in_deltas() -> None:
    model, engine = Zoo(1), ToldEngine(zoo(50))
    sent = ["weight", "matrix_float32"]
    weights = [(name, model.state_dict()[name]) for name in sent]
    async with WeightSynchronizer(lambda: weights, [engine], partial=True, delta=True, timeout=60) as synchronizer:
        for deltas in (False, True):
            nudge(model, 0, only=sent)
            assert were_deltas(await synchronizer.update_weights()) == [deltas]
        weights.append(("matrix_int64", model.state_dict()["matrix_int64"]))
        for deltas in (False, True, True):
            nudge(model, 0, only=("matrix_float32", "matrix_int64"))
            assert were_deltas(await synchronizer.update_weights()) == [deltas]
            for name, tensor in weights:
                assert contents(engine.module)[name] == contents(model)[name]
                assert tensor.numel()


@WAYS
@BOTH
async def test_several_sources_each_compare_their_own(staged: bool, way: dict[str, Any]) -> None:
    model = nn.ModuleDict({"s0": Zoo(1), "s1": nn.Linear(4, 5), "s2": nn.Linear(5, 5)})
    ranks = [[asyncsync.TrainerRank(nn.ModuleDict({name: stage}))] for name, stage in model.items()]
    engine = ToldEngine(nn.ModuleDict({"s0": zoo(50), "s1": nn.Linear(4, 5), "s2": nn.Linear(5, 5)}), staged=staged)
    options: dict[str, Any] = {"delta": True, **way, "bucket_size": 256, "timeout": 60.0}
    async with WeightSynchronizer(ranks, [engine], **options) as synchronizer:
        for step in range(4):
            changed = nudge(model, step)
            update = await synchronizer.update_weights()
            assert were_deltas(update) == [step > 0]
            assert holds(engine, model)
            assert step == 0 or 0 < (update.density or 0) < 2 * changed / 1000


class Gathered:
    """Weights that are put together tensor by tensor."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {name: tensor for name, tensor in module.state_dict().items() if name != "tied"}

    def describe(self) -> list[tuple[str, torch.dtype, Sequence[int]]]:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()]

    def gather(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor.clone()


async def test_weights_that_must_be_gathered_are_compared_as_they_come() -> None:
    trainer, engine = Zoo(1), ToldEngine(zoo(50))
    async with WeightSynchronizer(
        Gathered(trainer), [engine], delta=True, bucket_size=1024, timeout=60
    ) as synchronizer:
        for step in range(4):
            changed = nudge(trainer, step)
            update = await synchronizer.update_weights()
            assert were_deltas(update) == [step > 0]
            assert holds(engine, trainer)
            assert (update.density or 0) * 800 < 2 * changed, "what lies between tensors does not count"


@WAYS
async def test_a_staged_engine_brings_its_free_arena_up_to_date_by_what_has_changed(way: dict[str, Any]) -> None:
    async with synced(delta=True, count=1, **way) as (trainer, (engine,), synchronizer):
        for step in range(5):
            nudge(trainer, step)
            update = await synchronizer.update_weights()
        loader = engine._asyncsync._loader
        assert isinstance(loader, StagedLoader)
        buckets = loader._binding.plan.buckets
        assert loader._lag.keys() == {bucket.index for bucket in buckets}, "nothing has to be copied"
        loader.begin(delta=True)
        loader.take_changes(buckets[0], None)
        loader.target(buckets[1]).fill_(91)  # it would come whole, and did not come
        loader.begin(delta=True)
        for bucket in buckets:
            loader.take_changes(bucket, None)
        assert loader.digest() == update.digest


# -- what fails -------------------------------------------------------------------------------------------------------


async def test_an_update_that_nobody_took_into_service_is_followed_by_a_delta() -> None:
    async with synced(delta=True, on_engine_failure="abort") as (trainer, (one, other), synchronizer):
        await synchronizer.update_weights()
        for step in range(3):
            held = contents(one.module)
            nudge(trainer, step)
            other.before["pause_generation"] = failing(RuntimeError("no"))
            with pytest.raises(asyncsync.EngineError, match="no"):
                await synchronizer.update_weights()
            assert contents(one.module) == contents(other.module) == held
            nudge(trainer, step + 1)
            assert were_deltas(await synchronizer.update_weights()) == [True, True]
            assert [holds(engine, trainer) for engine in (one, other)] == [True, True]


@AUTO_OR_FOLDER
@BOTH
async def test_an_update_that_is_cancelled_changes_nothing_of_the_next(staged: bool, way: dict[str, Any]) -> None:
    async with synced(delta=True, staged=staged, **way) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        for step in range(2):
            nudge(trainer, step)
            begun = asyncio.Event()

            async def begin(begun: asyncio.Event = begun) -> None:
                begun.set()
                await hanging()()

            engines[0].before["receive_weights"] = begin
            update = asyncio.create_task(synchronizer.update_weights())
            await begun.wait()
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            nudge(trainer, step + 1)
            again = await synchronizer.update_weights()
            assert staged <= all(were_deltas(again)), "those who serve what they served take deltas"
            assert [holds(engine, trainer) for engine in engines] == [True, True]
            assert all(gate_of(engine).is_open for engine in engines)


@BOTH
async def test_weights_that_somebody_changed_behind_its_back_are_found_and_replaced(staged: bool) -> None:
    async with synced(delta=True, staged=staged, count=1) as (trainer, (engine,), synchronizer):
        for step in range(4):
            nudge(trainer, step)
            await synchronizer.update_weights()
        for name in ("weight", "matrix_int64"):
            nudge_in_place(engine.module.state_dict(keep_vars=True)[name])
        error = None
        for step in range(2):  # a staged engine is brought up to date in memory that was in service before
            nudge(trainer, step, only=["a_byte"])
            try:
                await synchronizer.update_weights()
            except TransferError as caught:
                error = caught
                break
        assert error is not None
        assert "received other bytes than were sent" in str(error)
        assert error.outcomes[0].state is (EngineState.UNCHANGED if staged else EngineState.TAINTED)
        update = await synchronizer.update_weights()
        assert were_deltas(update) == [False]
        assert holds(engine, trainer)
        nudge(trainer, 0)
        assert were_deltas(await synchronizer.update_weights()) == [True]
        assert holds(engine, trainer)


@WAYS
async def test_a_wrong_byte_on_the_way_is_found(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with synced(delta=True, **way) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        held = contents(engines[0].module)
        take = StagedLoader.take_changes

        def take_wrong(loader: StagedLoader, bucket: Bucket, message: Tensor | None) -> None:
            if message is not None:
                monkeypatch.setattr(StagedLoader, "take_changes", take)
                message[message.numel() - 16] ^= 1  # a value
            take(loader, bucket, message)

        monkeypatch.setattr(StagedLoader, "take_changes", take_wrong)
        nudge(trainer, 0, only=["weight"])
        with pytest.raises(TransferError, match="received other bytes than were sent"):
            await synchronizer.update_weights()
        assert held in [contents(engine.module) for engine in engines], "it was not taken into service"
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


@pytest.mark.parametrize("what", ["envelope", "message"])
@BOTH
async def test_what_nobody_understands_is_an_error_and_the_next_update_repairs(
    staged: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with synced(delta=True, staged=staged, count=1, transport="broadcast") as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        nudge(trainer, 0)
        with monkeypatch.context() as patch:
            if what == "envelope":
                patch.setattr(envelopes, "write_envelope", lambda envelope, content, nbytes: envelope.fill_(255))
            else:
                start_send = envelopes.Outbox.start_send

                def garbled(outbox: Any, index: int, content: Any, body: Tensor) -> list[Any]:
                    return start_send(outbox, index, content, torch.full_like(body, 255))

                patch.setattr(envelopes.Outbox, "start_send", garbled)
            with pytest.raises(TransferError, match=r"an envelope speaks of|a delta speaks of"):
                await synchronizer.update_weights()
        await synchronizer.update_weights()
        assert holds(engine, trainer)


@AUTO_OR_FOLDER
@BOTH
async def test_an_engine_that_fails_in_the_middle_is_repaired_and_the_other_gets_the_update(
    staged: bool, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = StagedLoader if staged else InPlaceLoader
    async with synced(delta=True, staged=staged, **way) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        take = kind.take_changes

        def fail(loader: Any, bucket: Bucket, message: Tensor | None) -> None:
            if bucket.index == 2 and loader is engines[1]._asyncsync._loader:
                raise RuntimeError("the disk is full")
            take(loader, bucket, message)

        for step in range(2):
            nudge(trainer, step)
            with monkeypatch.context() as patch:
                patch.setattr(kind, "take_changes", fail)
                with pytest.raises(asyncsync.EngineError, match="the disk is full"):
                    await synchronizer.update_weights()
            assert holds(engines[0], trainer)
            for again in range(2):
                nudge(trainer, step + again)
                await synchronizer.update_weights()
                assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_a_source_that_fails_in_the_middle_takes_back_what_it_had_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with synced(delta=True) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        nudge(trainer, 0)
        taken = 0
        take = Renewal.take

        def fail(renewal: Renewal, start: int, new: Tensor) -> None:
            nonlocal taken
            taken += 1
            take(renewal, start, new)
            if taken == 3:
                raise RuntimeError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(Renewal, "take", fail)
            with pytest.raises(asyncsync.WeightUpdateError, match="the disk is full"):
                await synchronizer.update_weights()
        nudge(trainer, 1)
        update = await synchronizer.update_weights()
        assert were_deltas(update) == [True, True]
        assert [holds(engine, trainer) for engine in engines] == [True, True]


# -- with processes ---------------------------------------------------------------------------------------------------


class MortalEngineActor(EngineActor):
    """An engine whose process is killed in the middle of a transfer, when told."""

    def die_at(self, index: int) -> None:
        """End at a bucket."""
        take = StagedLoader.take_changes

        def take_or_die(loader: StagedLoader, bucket: Bucket, message: Tensor | None) -> None:
            if bucket.index == index:
                os.kill(os.getpid(), signal.SIGKILL)
            take(loader, bucket, message)

        StagedLoader.take_changes = take_or_die  # type: ignore[assignment,method-assign]


MortalEngine: Any = asyncsync.remote(num_cpus=0, max_restarts=4)(MortalEngineActor)
WEIGHTS: Callable[[], nn.Module] = partial(Flat, 16, (2**14,), fill=1.0)


@asynccontextmanager
async def actors(*wanted: Any) -> AsyncIterator[list[Any]]:
    """Actors that end with the test."""
    try:
        yield list(wanted)
    finally:
        await asyncio.gather(*(cluster.kill_actor(actor) for actor in wanted))


@pytest.mark.ray
@pytest.mark.exhaustive
@WAYS
async def test_an_engine_killed_in_a_delta_is_repaired_whole_while_the_other_gets_it(
    ray_cluster: None, way: dict[str, Any]
) -> None:
    made = [Trainer.remote(WEIGHTS), *(MortalEngine.remote(WEIGHTS) for _ in range(2))]
    options: dict[str, Any] = {"delta": True, **way, "bucket_size": 2**16, "timeout": 60.0}
    async with actors(*made) as (trainer, *engines), WeightSynchronizer(trainer, engines, **options) as synchronizer:
        await synchronizer.update_weights()
        for deltas in ([True, True],) * 2:
            await trainer.change.remote(["weights.3"])
            assert were_deltas(await synchronizer.update_weights()) == deltas
        await trainer.change.remote(["weights.5"])
        await engines[1].die_at.remote(8)
        with pytest.raises(asyncsync.EngineError) as caught:
            await synchronizer.update_weights()
        assert caught.value.outcomes[0].state is EngineState.UPDATED
        expected = await trainer.contents.remote()
        assert await engines[0].contents.remote() == expected
        while len(synchronizer.ready_engines) < 2:
            with suppress(EngineError):  # Ray starts it anew meanwhile
                await synchronizer.connect()
        await trainer.change.remote(["weights.6"])
        update = await synchronizer.update_weights()
        assert were_deltas(update)[1] is False
        await trainer.change.remote(["weights.7"])
        assert were_deltas(await synchronizer.update_weights()) == [True, True]
        expected = await trainer.contents.remote()
        assert [await engine.contents.remote() for engine in engines] == [expected] * 2


@pytest.fixture(scope="module")
def ranks(ray_cluster: None) -> Iterator[list[Any]]:
    made = [RemoteShardedTrainer.remote(rank) for rank in range(2)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel", "replicated"])
async def test_a_sharded_trainer_compares_what_its_ranks_hold_together(
    ranks: list[Any], kind: str, tmp_path: Path
) -> None:
    await become(ranks, kind, tmp_path)
    for bucket_size in (64, 1 << 20):
        engines = [asyncsync.ModuleEngine(Mixed(7)), asyncsync.ModuleEngine(Mixed(8), staged=False)]
        async with WeightSynchronizer(ranks, engines, delta=True, bucket_size=bucket_size) as synchronizer:
            for step in range(4):
                if step != 2:
                    await every(ranks, "step")
                update = await synchronizer.update_weights()
                assert were_deltas(update) == [step > 0] * 2
                assert (update.density == 0) == (step == 2)
                whole, *_ = await every(ranks, "whole")
                assert [contents(engine.module) for engine in engines] == [whole, whole]
