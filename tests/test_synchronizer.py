"""The transaction, in one process: real gloo groups, real bytes, and engines that fail when told."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import itertools
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import psutil
import pytest
import torch
from torch import nn

import asyncsync
from asyncsync import EngineError, EngineState, PlanError, TransferError, WeightSynchronizer, cluster
from asyncsync.messages import SendReceipt, UpdateOrder
from asyncsync.testing import Probe, failed
from tests.cancelling import CancelAt
from tests.chain import Chain
from tests.engines import (
    CONNECTING,
    IN_PLACE,
    STAGED,
    ToldEngine,
    change,
    failing,
    flip_a_bit,
    gate_of,
    hanging,
    holds,
    synced,
    zoo,
)
from tests.sample import Zoo, contents

pytestmark = pytest.mark.asyncio

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])


async def turn() -> None:
    """Let everything else run once: for conditions that have no event."""
    await asyncio.sleep(0)


def waiting(synchronizer: WeightSynchronizer) -> tuple[int, int]:
    assert isinstance(synchronizer._lock, asyncsync.RolloutLock)
    return synchronizer._lock.waiting


# -- bytes -----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("bucket_size", [64, 1024, 1 << 20])
async def test_every_kind_of_tensor_arrives_in_every_engine_update_after_update(staged: bool, bucket_size: int) -> None:
    async with synced(staged=staged, bucket_size=bucket_size) as (trainer, engines, synchronizer):
        for version in (1, 2, 3, 4):
            update = await synchronizer.update_weights()
            assert update.version == version
            assert [holds(engine, trainer) for engine in engines] == [True, True]
            assert [await engine.weights_digest() for engine in engines] == [update.digest] * 2
            change(trainer)


SOURCES: dict[str, Callable[[Zoo], Any]] = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "pairs": lambda module: list(module.state_dict().items()),
    "iterator": lambda module: iter(module.state_dict().items()),
    "function": lambda module: module.state_dict,
    "rank": lambda module: asyncsync.TrainerRank(module),
}


@pytest.mark.parametrize("kind", SOURCES)
async def test_every_kind_of_weights(kind: str) -> None:
    trainer, engine = Zoo(1), asyncsync.ModuleEngine(zoo(2))
    async with WeightSynchronizer(SOURCES[kind](trainer), [engine]) as synchronizer:
        await synchronizer.update_weights()
        change(trainer)
        await synchronizer.update_weights()
    assert holds(engine, trainer)


async def test_tied_weights_travel_once_and_reach_an_engine_that_does_not_tie_them() -> None:
    class Untied(Zoo):
        def __init__(self) -> None:
            super().__init__(9, strided=False)
            self.tied = nn.Parameter(self.weight.detach().clone())

    trainer, engine = Zoo(1), asyncsync.ModuleEngine(Untied())
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        update = await synchronizer.update_weights()
    assert holds(engine, trainer)
    assert update.bytes == sum(len(data) for name, data in contents(trainer).items() if name != "tied")


async def test_a_tied_engine_takes_weights_that_come_under_one_of_its_names_only() -> None:
    trainer, engine = Zoo(1), asyncsync.ModuleEngine(zoo(2))
    async with WeightSynchronizer(
        trainer, [engine], name_map=lambda name: None if name == "tied" else name
    ) as synchronizer:
        await synchronizer.update_weights()
    assert holds(engine, trainer)


async def test_names_are_mapped_and_dtypes_converted_on_purpose() -> None:
    trainer = nn.Linear(3, 2)
    engine = asyncsync.ModuleEngine(nn.ModuleDict({"model": nn.Linear(3, 2)}).to(torch.bfloat16))
    async with WeightSynchronizer(
        trainer, [engine], name_map=lambda name: f"model.{name}", dtype=torch.bfloat16
    ) as synchronizer:
        await synchronizer.update_weights()
    served = engine.module.state_dict()["model.weight"]
    assert torch.equal(served, trainer.weight.to(torch.bfloat16))


@BOTH
async def test_an_engine_that_holds_more_keeps_the_rest_if_partial(staged: bool) -> None:
    trainer, served = nn.Linear(3, 2), nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    rest = contents(served["b"])
    engine = asyncsync.ModuleEngine(served, staged=staged)
    async with WeightSynchronizer(trainer, [engine], name_map=lambda name: f"a.{name}", partial=True) as synchronizer:
        await synchronizer.update_weights()
    assert contents(served["a"]) == contents(trainer)
    assert contents(served["b"]) == rest


async def test_a_fused_weight_of_the_engine_follows_its_parts() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = torch.zeros(4, 3)  # no buffer: what a kernel would read
            self.a, self.b = nn.Parameter(self.fused[:2]), nn.Parameter(self.fused[2:])

    trainer = {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}
    served = Fused()
    engine = asyncsync.ModuleEngine(served)
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        for _ in range(3):
            trainer["a"].add_(1)
            await synchronizer.update_weights()
            assert torch.equal(served.fused, torch.cat([trainer["a"], trainer["b"]]))


@BOTH
async def test_a_layout_that_changes_is_agreed_on_anew_inside_the_same_update(staged: bool) -> None:
    weights = {"a": torch.randn(5), "b": torch.randn(7, 3)}
    module = nn.Module()
    module.a, module.b = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(7, 3))
    engine = ToldEngine(module, staged=staged)
    async with WeightSynchronizer(weights, [engine], partial=True) as synchronizer:
        await synchronizer.update_weights()
        del weights["b"]
        weights["a"] = torch.randn(5)
        update = await synchronizer.update_weights()
        assert (update.tensors, update.tensors_changed) == (1, 1)
        weights["b"] = torch.randn(7, 3)
        await synchronizer.update_weights()
    assert torch.equal(module.a, weights["a"])
    assert torch.equal(module.b, weights["b"])
    assert engine.calls.count("accept_layout") == 3


@BOTH
async def test_a_parameter_that_was_replaced_in_the_engine_is_found_again(staged: bool) -> None:
    trainer, served = nn.Linear(3, 2), nn.Linear(3, 2)
    async with WeightSynchronizer(trainer, [asyncsync.ModuleEngine(served, staged=staged)]) as synchronizer:
        await synchronizer.update_weights()
        served.weight = nn.Parameter(torch.zeros(2, 3))
        await synchronizer.update_weights()
    assert contents(served) == contents(trainer)


@BOTH
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
async def test_a_scripted_module_is_served_and_compared_like_any_other(staged: bool) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    trainer, served = make(), torch.jit.script(make())
    async with WeightSynchronizer(trainer, [asyncsync.ModuleEngine(served, staged=staged)]) as synchronizer:
        for _ in range(2):
            with torch.no_grad():
                next(trainer.parameters()).add_(1)
            await synchronizer.update_weights()
            assert contents(served) == contents(trainer)
        served.half()
        with pytest.raises(PlanError, match="differ in shape or dtype"):
            await synchronizer.update_weights()


# -- the transaction -------------------------------------------------------------------------------------------------


async def test_the_order_of_a_staged_update() -> None:
    async with synced(count=1) as (_, (engine,), synchronizer):
        await synchronizer.update_weights()
        assert engine.calls == [*CONNECTING, *STAGED]
        engine.calls.clear()
        await synchronizer.update_weights()
        assert engine.calls == [*STAGED]


async def test_the_order_of_an_update_in_place() -> None:
    async with synced(count=1, staged=False) as (_, (engine,), synchronizer):
        await synchronizer.update_weights()
        assert engine.calls == [*CONNECTING, *IN_PLACE]
        engine.calls.clear()
        await synchronizer.update_weights()
        assert engine.calls == [*IN_PLACE]


async def test_the_report() -> None:
    async with synced() as (trainer, engines, synchronizer):
        first = await synchronizer.update_weights()
        assert first.tensors == first.tensors_changed == len(contents(trainer)) - 1  # one is tied
        assert first.bytes == first.bytes_changed
        assert first.buckets > 5
        assert [(outcome.state, outcome.weight_version, outcome.digest) for outcome in first.outcomes] == [
            (EngineState.UPDATED, 1, first.digest)
        ] * 2
        assert [outcome.engine for outcome in first.outcomes] == ["ToldEngine-0", "ToldEngine-1"]
        again = await synchronizer.update_weights()
        assert (again.tensors_changed, again.bytes_changed, again.digest) == (0, 0, first.digest)
        assert "no tensor changed" in str(again)
        with torch.no_grad():
            trainer.weight[0, 0] += 1
        third = await synchronizer.update_weights()
        assert (third.tensors_changed, third.bytes_changed) == (1, 8 * 3 * 4)
        assert f"1/{third.tensors} tensors changed" in str(third)
        assert "\n" not in str(third)
        assert {"queue", "transfer", "drain", "finish", "paused", "total"} == set(third.seconds)
        assert engines[0].weight_version == synchronizer.weight_version == 3


async def test_what_changed_is_told_against_the_published_version_even_after_a_failure() -> None:
    async with synced() as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        with torch.no_grad():
            trainer.weight.add_(1)
        engines[0].before["finish_weight_update"] = engines[1].before["finish_weight_update"] = failing(OSError())
        with pytest.raises(ExceptionGroup):
            await synchronizer.update_weights()
        for engine in engines:
            engine.before.clear()
        assert (await synchronizer.update_weights()).tensors_changed == 1


async def test_five_requests_at_once_are_at_most_two_updates() -> None:
    async with synced() as (_, engines, synchronizer):
        updates: list[asyncsync.WeightUpdate] = await asyncio.gather(*(synchronizer.update_weights() for _ in range(5)))
        assert len({update.version for update in updates}) == engines[0].calls.count("receive_weights") // 2 <= 2


async def test_requests_during_an_update_get_the_weights_as_they_are_after_it() -> None:
    async with synced(count=1) as (trainer, (engine,), synchronizer):
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def stop() -> None:
            reached.set()
            await go_on.wait()

        engine.before["finish_weight_update"] = stop
        first = asyncio.create_task(synchronizer.update_weights())
        await reached.wait()
        later = [asyncio.create_task(synchronizer.update_weights()) for _ in range(3)]
        await asyncio.sleep(0)
        change(trainer)
        go_on.set()
        assert (await first).version == 1
        assert [update.version for update in await asyncio.gather(*later)] == [2] * 3
        assert holds(engine, trainer)


@BOTH
async def test_names_and_views_of_the_same_memory_in_the_engine_follow(staged: bool) -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))
            self.head.data = self.embed.data  # tied, but not the same object
            self.qkv = nn.Parameter(torch.zeros(6))
            self.register_buffer("q", self.qkv.detach()[:2], persistent=False)

    served = Sharing()
    weights = {"embed": torch.ones(4, 2), "qkv": torch.ones(6)}
    async with WeightSynchronizer(weights, [asyncsync.ModuleEngine(served, staged=staged)]) as synchronizer:
        for _ in range(3):
            weights["embed"].add_(1)
            weights["qkv"].add_(1)
            await synchronizer.update_weights()
            assert torch.equal(served.head, weights["embed"])
            assert torch.equal(served.get_buffer("q"), weights["qkv"][:2])


@BOTH
@pytest.mark.parametrize("kind", ["meta", "conjugate", "not initialized"])
async def test_an_engine_whose_tensors_cannot_take_bytes_is_refused_by_name(kind: str, staged: bool) -> None:
    served = nn.Module()
    if kind == "meta":
        served.a = nn.Parameter(torch.zeros(2, device="meta"))
    elif kind == "conjugate":
        served.register_buffer("a", torch.zeros(2, dtype=torch.complex64).conj())
    else:
        served.a = nn.UninitializedParameter()
    weights = {"a": torch.zeros(2, dtype=torch.complex64 if kind == "conjugate" else torch.float32)}
    async with WeightSynchronizer(weights, [asyncsync.ModuleEngine(served, staged=staged)]) as synchronizer:
        with pytest.raises(PlanError, match="the engine cannot take a: ") as caught:
            await synchronizer.update_weights()
        assert caught.value.names == ("a",)


async def test_a_partial_layout_that_was_accepted_is_not_taken_for_a_whole_one() -> None:
    weights, engine = {"weight": torch.zeros(2, 3)}, asyncsync.ModuleEngine(nn.Linear(3, 2))
    async with WeightSynchronizer(weights, [engine], partial=True) as synchronizer:
        await synchronizer.update_weights()
    async with WeightSynchronizer(weights, [engine]) as synchronizer:
        with pytest.raises(PlanError, match="does not send"):
            await synchronizer.update_weights()


async def test_nothing_to_send_is_refused() -> None:
    engine = asyncsync.ModuleEngine(nn.Linear(3, 2))
    async with WeightSynchronizer(nn.Linear(3, 2), [engine], partial=True, name_map=lambda name: None) as synchronizer:
        with pytest.raises(PlanError, match="not one tensor to send"):
            await synchronizer.update_weights()


# -- several conductors ----------------------------------------------------------------------------------------------


async def test_two_conductors_at_once_never_publish_what_no_engine_holds() -> None:
    engines = [asyncsync.ModuleEngine(nn.Linear(64, 64)) for _ in range(2)]
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    succeeded: list[tuple[int, str]] = []

    async def update(trainer: nn.Module) -> None:
        async with WeightSynchronizer(trainer, engines, timeout=60) as synchronizer:
            for _ in range(5):
                try:
                    result = await synchronizer.update_weights()
                except asyncsync.WeightUpdateError:
                    continue
                succeeded.append((result.version, result.digest))

    await asyncio.gather(update(first), update(second))
    versions = [version for version, _ in succeeded]
    assert len(set(versions)) == len(versions), "one number never names two sets of weights"
    async with WeightSynchronizer(first, engines) as synchronizer:
        update_ = await synchronizer.update_weights()
        assert [await engine.weights_digest() for engine in engines] == [update_.digest] * 2


async def test_the_version_does_not_go_back_when_the_engine_is_tainted_and_the_driver_is_new() -> None:
    engine = ToldEngine(zoo(2), staged=False)
    async with WeightSynchronizer(Zoo(1), [engine]) as synchronizer:
        for _ in range(3):
            await synchronizer.update_weights()
        flip_a_bit(engine)
        with pytest.raises(TransferError):
            await synchronizer.update_weights()
    assert engine.weight_version is None
    async with WeightSynchronizer(Zoo(1), [engine]) as synchronizer:
        assert (await synchronizer.update_weights()).version == 4


async def test_a_trainer_that_outlives_its_conductor_serves_the_next_one() -> None:
    rank = asyncsync.TrainerRank(nn.Linear(2, 2))
    engine = ToldEngine(nn.Linear(2, 2))
    async with WeightSynchronizer(rank, [engine]) as synchronizer:
        engine.before["receive_weights"] = failing(OSError("no"))
        with pytest.raises(EngineError):
            await synchronizer.update_weights()
    async with WeightSynchronizer(rank, [asyncsync.ModuleEngine(nn.Linear(2, 2))]) as synchronizer:
        assert (await synchronizer.update_weights()).version == 1


@pytest.mark.parametrize("step", [*CONNECTING, *STAGED])
async def test_a_cancellation_that_comes_from_the_engine_is_the_engines_failure(step: str) -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError

    async with synced(timeout=60) as (trainer, engines, synchronizer):
        engines[1].before[step] = cancel
        with pytest.raises(EngineError, match="ToldEngine-1 failed: CancelledError"):
            await synchronizer.update_weights()
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


# -- the memory saver ------------------------------------------------------------------------------------------------


class Sections:
    """Counts guarded sections, in place of the saver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = 0
        self.fail = False
        monkeypatch.setattr("asyncsync.memory_saver.door.disable", self.disable)
        monkeypatch.setattr("asyncsync.memory_saver.door.is_tracked_here", lambda: True)
        monkeypatch.setattr("asyncsync.memory_saver.door.hook", lambda: ctypes.CDLL(None))

    @contextmanager
    def disable(self) -> Iterator[None]:
        is_the_trainers = threading.current_thread().name == "asyncsync-sender"  # engines have sections of their own
        self.entered += is_the_trainers
        yield
        if self.fail and is_the_trainers:
            self.fail = False
            raise OSError("the saver broke")


@pytest.mark.parametrize("offload", [True, None, False])
async def test_guarded_sections_are_counted(monkeypatch: pytest.MonkeyPatch, offload: bool | None) -> None:
    sections, expected = Sections(monkeypatch), 0 if offload is False else 1
    engine = ToldEngine(nn.Linear(2, 2))

    async def fail_while_the_trainer_is_joining() -> None:
        while sections.entered < expected:
            await turn()
        raise OSError("no")

    async with WeightSynchronizer(nn.Linear(2, 2), [engine], offload=offload, timeout=60) as synchronizer:
        engine.before["open_group"] = fail_while_the_trainer_is_joining  # it cannot have joined yet
        with pytest.raises(EngineError):
            await synchronizer.update_weights()
        assert sections.entered == expected, "connect failed: one, and nothing is transferred"
        await synchronizer.update_weights()
        assert sections.entered == 3 * expected, "not connected yet: one for connect, one for transfer"
        await synchronizer.update_weights()
        assert sections.entered == 4 * expected, "connected already: one"
        synchronizer._connection.forget()
        await synchronizer.update_weights()
        assert sections.entered == 5 * expected, "connected already, and asked all the same: one"


async def test_a_guard_that_gave_its_thread_up_does_not_end_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = Sections(monkeypatch)
    async with WeightSynchronizer(nn.Linear(2, 2), [ToldEngine(nn.Linear(2, 2))]) as synchronizer:
        await synchronizer.update_weights()
        sections.fail = True
        with pytest.raises(asyncsync.TrainerError, match="memory-saver guard"):
            await synchronizer.update_weights()
        await synchronizer.update_weights()


# -- generation ------------------------------------------------------------------------------------------------------


async def test_generation_reads_the_version_at_dispatch() -> None:
    async with synced(initial_version=4) as (_, _, synchronizer):
        async with synchronizer.generation() as version:
            assert version == 4
        await synchronizer.update_weights()
        async with synchronizer.generation() as version:
            assert version == 5


@BOTH
async def test_nobody_reads_while_weights_change_and_the_version_is_published_last(staged: bool) -> None:
    async with synced(staged=staged) as (_, engines, synchronizer):
        await synchronizer.update_weights()
        seen: list[tuple[str, int | None]] = []
        readers: list[asyncio.Task[int]] = []

        async def read() -> int:
            async with synchronizer.generation() as version:
                seen.append(("read", version))
                return version

        async def during() -> None:
            readers.append(asyncio.create_task(read()))
            for _ in range(5):
                await asyncio.sleep(0)
            seen.append(("finish", synchronizer.weight_version))

        engines[0].before["finish_weight_update"] = during
        await synchronizer.update_weights()
        assert await asyncio.gather(*readers) == [2]
        assert seen == [("finish", 1), ("read", 2)]


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
async def test_an_engine_that_holds_requests_back_by_itself_tells_how_long(staged: bool) -> None:
    async with synced(staged=staged) as (_, _, synchronizer):
        update = await synchronizer.update_weights()
        paused = [outcome.paused for outcome in update.outcomes]
        if staged:
            assert all(each is not None and 0 < each <= update.seconds["paused"] for each in paused)
        else:
            assert paused == [None] * len(update.outcomes)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
async def test_another_module_in_the_place_of_that_which_was_agreed_on_is_updated(staged: bool) -> None:
    async with synced(staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        engines[0].module = copy.deepcopy(engines[0].module)
        change(trainer)
        await synchronizer.update_weights()
        assert [contents(engine.module) for engine in engines] == [contents(trainer)] * len(engines)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
async def test_a_module_that_is_replaced_after_its_weights_were_received_is_no_success(staged: bool) -> None:
    async with synced(staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()

        async def replace_module() -> None:
            engines[0].module = copy.deepcopy(engines[0].module)

        engines[0].after["receive_weights"] = replace_module
        change(trainer)
        with pytest.raises(asyncsync.WeightUpdateError, match="replaced while the update was under way"):
            await synchronizer.update_weights()
        await synchronizer.update_weights()
        assert [contents(engine.module) for engine in engines] == [contents(trainer)] * len(engines)


async def test_staged_engines_generate_during_the_transfer() -> None:
    async with synced() as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        before = contents(trainer)
        change(trainer)

        async def during() -> None:
            async with synchronizer.generation() as version, engines[0].generating() as own:
                assert version == own == 1
                assert contents(engines[0].module) == before

        engines[0].after["receive_weights"] = during
        assert (await synchronizer.update_weights()).version == 2


async def test_an_update_waits_for_generations_and_generations_for_it() -> None:
    async with synced(initial_version=0) as (_, engines, synchronizer):
        async with synchronizer.generation():
            update = asyncio.create_task(synchronizer.update_weights())
            while waiting(synchronizer) != (0, 1):
                await turn()
            assert "finish_weight_update" not in engines[0].calls
        assert (await update).version == 1


async def test_an_engines_own_readers_are_waited_for_too() -> None:
    async with synced(initial_version=0) as (_, engines, synchronizer):
        async with engines[1].generating() as version:
            assert version is None
            update = asyncio.create_task(synchronizer.update_weights())
            while gate_of(engines[1]).is_open:
                await turn()
            assert engines[1].weight_version is None
        await update
        with engines[1].generating() as version:
            assert version == 1


async def test_the_cache_is_flushed_once_an_update_and_before_generation_resumes() -> None:
    class Caching(ToldEngine):
        flushed = 0

        async def flush_cache(self) -> None:
            assert not gate_of(self).is_open
            self.flushed += 1

    engine = Caching(zoo(2))
    async with WeightSynchronizer(Zoo(1), [engine]) as synchronizer:
        await synchronizer.update_weights()
        await synchronizer.update_weights()
    assert engine.flushed == 2


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("step", "staged"),
    [(step, True) for step in (*CONNECTING, *STAGED)] + [(step, False) for step in (*CONNECTING, *IN_PLACE)],
)
async def test_an_engine_that_fails_at_any_step_leaves_nothing_locked_and_the_next_update_repairs(
    step: str, when: str, staged: bool
) -> None:
    async with synced(staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        old = contents(trainer)
        change(trainer)
        new = contents(trainer)
        if step in CONNECTING:
            synchronizer._connection.forget()
            for engine in engines:
                engine._asyncsync._binding = None
                engine._asyncsync.receiver.seats[0].close()
        getattr(engines[1], when)[step] = failing(OSError("the disk is full"))
        with pytest.raises(EngineError, match=r"ToldEngine-1.*the disk is full") as caught:
            await synchronizer.update_weights()
        assert caught.value.engine == "ToldEngine-1"
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.phase is not None

        assert not synchronizer._lock.holds()
        published = {1: old, 2: new}[synchronizer.weight_version or 0]
        for engine in engines:
            if (await engine.describe_engine()).tainted is None:
                if gate_of(engine).is_open:
                    assert contents(engine.module) == published
            else:
                with pytest.raises(asyncsync.TaintedEngineError):
                    async with engine.generating():
                        pytest.fail("a tainted engine served")
        assert engines[0].weight_version == synchronizer.weight_version or not staged

        engines[1].before.clear()
        engines[1].after.clear()
        update = await synchronizer.update_weights()
        assert update.version == (synchronizer.weight_version or 0)
        assert [holds(engine, trainer) for engine in engines] == [True, True]
        assert all(gate_of(engine).is_open for engine in engines)


async def test_one_failed_finish_publishes_for_those_who_switched_and_bars_the_one_behind() -> None:
    async with synced() as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        engines[1].before["finish_weight_update"] = failing(OSError("no"))
        with pytest.raises(EngineError) as caught:
            await synchronizer.update_weights()
        assert synchronizer.weight_version == 2
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UPDATED, EngineState.TAINTED]
        assert (caught.value.phase, caught.value.weight_version) == ("finish", 2)
        async with engines[0].generating() as version:
            assert version == 2
        with pytest.raises(asyncsync.TaintedEngineError, match="missed version 2"):
            async with engines[1].generating():
                pytest.fail("served")


async def test_in_place_an_update_that_broke_in_the_middle_taints_and_is_repaired() -> None:
    async with synced(staged=False, on_engine_failure="abort") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        flip_a_bit(engines[0])
        with pytest.raises(TransferError) as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.TAINTED] * 2
        assert synchronizer.weight_version == 1
        assert engines[0].weight_version is None
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_one_wrong_bit_is_caught_and_never_served() -> None:
    async with synced(on_engine_failure="abort") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        old = contents(trainer)
        change(trainer)
        flip_a_bit(engines[1])
        with pytest.raises(TransferError, match="ToldEngine-1 received other bytes than were sent") as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UNCHANGED] * 2
        assert synchronizer.weight_version == 1
        for engine in engines:
            async with engine.generating() as version:
                assert version == 1
                assert contents(engine.module) == old


async def test_several_engines_that_fail_are_a_group() -> None:
    async with synced() as (_, engines, synchronizer):
        for engine in engines:
            engine.before["finish_weight_update"] = failing(OSError("no"))
        with pytest.raises(asyncsync.EngineErrorGroup, match="2 engines failed") as caught:
            await synchronizer.update_weights()
        assert isinstance(caught.value, asyncsync.WeightUpdateError)
        assert (caught.value.phase, len(caught.value.outcomes)) == ("finish", 2)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.phase, len(again.exceptions)) == ("finish", 2)
        assert {error.engine for error in caught.value.exceptions if isinstance(error, EngineError)} == {
            "ToldEngine-0",
            "ToldEngine-1",
        }
        assert synchronizer.weight_version is None


PHASES = dict(
    zip((*CONNECTING, *STAGED), ("describe", "connect", "connect", "connect", "transfer", "finish"), strict=True)
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", PHASES)
async def test_an_engine_that_hangs_is_an_error_in_time_that_names_the_phase(step: str) -> None:
    async with synced(timeout=60) as (trainer, engines, synchronizer):
        if step in STAGED:
            await synchronizer.connect()
        synchronizer._timeout = 4.0
        engines[1].before[step] = hanging()
        with pytest.raises(
            asyncsync.WeightUpdateTimeoutError, match=r"took longer than .*: no answer from .*ToldEngine-1"
        ) as caught:
            await synchronizer.update_weights()
        if step not in ("join_group", "receive_weights"):  # there the others wait for it, too
            assert "ToldEngine-0" not in str(caught.value)
        assert caught.value.phase == PHASES[step]
        synchronizer._timeout = 60.0
        engines[1].before.clear()
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_a_generation_that_does_not_end_is_named() -> None:
    async with synced(timeout=60, initial_version=0) as (_, engines, synchronizer):
        await synchronizer.connect()
        synchronizer._timeout = 1.0
        async with synchronizer.generation():
            update = asyncio.create_task(synchronizer.update_weights(), name="trainer")
            with pytest.raises(asyncsync.WeightUpdateTimeoutError, match="generation did not end in time") as caught:
                await update
            assert caught.value.phase == "drain"
        assert all(gate_of(engine).is_open for engine in engines)


async def test_a_trainer_that_fails_is_a_trainer_error() -> None:
    def broken() -> dict[str, torch.Tensor]:
        raise OSError("the checkpoint is gone")

    async with WeightSynchronizer(broken, [asyncsync.ModuleEngine(nn.Linear(1, 1))]) as synchronizer:
        with pytest.raises(asyncsync.TrainerError, match="the checkpoint is gone"):
            await synchronizer.update_weights()


# -- cancellation ----------------------------------------------------------------------------------------------------


async def assert_all_is_whole(trainer: Zoo, engines: list[ToldEngine], synchronizer: WeightSynchronizer) -> None:
    """Nothing is held, no engine is shut unless it is tainted, and the next update reaches all."""
    assert waiting(synchronizer) == (0, 0)
    assert "free" in repr(synchronizer._lock)
    assert not synchronizer._busy.locked()
    for engine in engines:
        status = await engine.describe_engine()
        assert gate_of(engine).is_open == (status.tainted is None)
        assert engine._asyncsync.receiver.session is None
    await synchronizer.update_weights()
    assert [holds(engine, trainer) for engine in engines] == [True, True]


def held_open() -> tuple[int, int, int, int]:
    """How many tasks, threads, file descriptors and blocks of shared memory there are."""
    gc.collect()
    shared = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    threads = [each for each in threading.enumerate() if not each.name.startswith("asyncio_")]  # but the loop's pool
    return len(asyncio.all_tasks()), len(threads), psutil.Process().num_fds(), len(shared)


async def check_nothing_is_left(before: tuple[int, int, int, int]) -> None:
    """No more is held open than before, once what was left behind has ended by itself, aside."""
    deadline = asyncio.get_running_loop().time() + 20
    while any(now > then for now, then in zip(held_open(), before, strict=True)):
        assert asyncio.get_running_loop().time() < deadline, (before, held_open(), threading.enumerate())
        await asyncio.sleep(0.02)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["waiting", "handed over"])
@pytest.mark.parametrize(
    "connected", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["connected", "connecting"]
)
@BOTH
async def test_cancelled_at_each_await_it_leaves_all_whole_and_nothing_open(
    staged: bool, connected: bool, when: Literal["waiting", "handed over"]
) -> None:
    async def run(update: CancelAt) -> None:
        await update

    async with synced(staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()  # what the process keeps from the first on
    before = held_open()
    for at in itertools.count():
        async with synced(staged=staged) as (trainer, engines, synchronizer):
            if connected:
                await synchronizer.update_weights()
                change(trainer)
            update = CancelAt(synchronizer._update(), at, when)
            task = asyncio.create_task(run(update))
            await asyncio.wait([task])
            await assert_all_is_whole(trainer, engines, synchronizer)
        if not update.reached:
            break
    assert task.exception() is None
    assert at >= (2 if connected else 5)
    del trainer, engines, synchronizer, update, task
    await check_nothing_is_left(before)


@pytest.mark.parametrize(
    ("staged", "step"), [*((True, step) for step in (*CONNECTING, *STAGED)), *((False, step) for step in IN_PLACE)]
)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_cancelled_while_an_engine_is_in_any_call_it_leaves_all_whole(staged: bool, step: str, when: str) -> None:
    async with synced(staged=staged) as (trainer, engines, synchronizer):
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def arrive() -> None:
            arrived.set()
            await go_on.wait()

        getattr(engines[1], when)[step] = arrive
        update = asyncio.create_task(synchronizer.update_weights())
        await arrived.wait()
        update.cancel()
        if step == "resume_generation":  # that is clean-up: it is not cut short
            await turn()
            assert not update.done()
            go_on.set()
        await asyncio.wait([update])
        assert update.cancelled()
        await assert_all_is_whole(trainer, engines, synchronizer)


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
@BOTH
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
async def test_cancelled_at_some_turn_of_the_loop_it_leaves_all_whole(staged: bool, connected: bool) -> None:
    cancelled = 0
    for turns in range(0, 400, 13):  # at each await, by another test; here between awaits as well
        async with synced(staged=staged) as (trainer, engines, synchronizer):
            if connected:
                await synchronizer.update_weights()
                change(trainer)
            update = asyncio.create_task(synchronizer.update_weights())
            for _ in range(turns):
                await asyncio.sleep(0)
            update.cancel()
            await asyncio.wait([update])
            cancelled += update.cancelled()
            assert not synchronizer._updates.running
            if connected and synchronizer.weight_version == 1 and staged:
                assert all(engine.weight_version == 1 for engine in engines)
            await assert_all_is_whole(trainer, engines, synchronizer)
        if not update.cancelled():
            break
    assert cancelled >= 2, "how many turns an update takes depends on the machine"


# -- bad input -------------------------------------------------------------------------------------------------------


def module_without(name: str) -> nn.Module:
    module = nn.Linear(3, 2)
    delattr(module, name)
    return module


def renamed(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"inner": module})


LINEAR = partial(nn.Linear, 3, 2)
MISFITS: dict[str, tuple[Any, nn.Module, str, tuple[str, ...]]] = {
    "unknown name": (
        {"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "scale": torch.zeros(1)},
        LINEAR(),
        "does not know: scale",
        ("scale",),
    ),
    "missing name": (LINEAR(bias=False), LINEAR(), r"does not send \(pass partial=True", ("bias",)),
    "other shape": (
        LINEAR(),
        nn.Linear(4, 2),
        r"weight \(sent float32 \[2, 3\], held float32 \[2, 4\]\)",
        ("weight",),
    ),
    "other dtype": (
        LINEAR().half(),
        LINEAR(),
        r"bias \(sent float16 \[2\], held float32 \[2\]\)",
        ("bias", "weight"),
    ),
    "other prefix": (
        renamed(LINEAR()),
        LINEAR(),
        "does not know: inner.bias, inner.weight",
        ("bias", "inner.bias", "inner.weight", "weight"),
    ),
    "duplicate": (
        [("weight", torch.zeros(2, 3)), ("weight", torch.zeros(2, 3))],
        LINEAR(bias=False),
        "duplicate names in the weights: weight",
        ("weight",),
    ),
    "meta": (LINEAR(device="meta"), LINEAR(), "meta device", ("bias", "weight")),
    "sparse": ({"weight": torch.eye(3).to_sparse()}, nn.Linear(3, 3, bias=False), "sparse", ("weight",)),
}


@pytest.mark.parametrize("what", MISFITS)
async def test_weights_that_do_not_fit_are_refused_by_name_before_anything_is_sent_or_paused(what: str) -> None:
    weights, module, message, names = MISFITS[what]
    engine = ToldEngine(copy.deepcopy(module))
    before = contents(engine.module)
    async with WeightSynchronizer(weights, [engine]) as synchronizer:
        with pytest.raises(PlanError, match=message) as caught:
            await synchronizer.update_weights()
        assert caught.value.names == names
        assert {"receive_weights", "pause_generation", "join_group"}.isdisjoint(engine.calls)
        assert contents(engine.module) == before
        async with engine.generating():
            pass


async def test_two_engines_that_refuse_give_one_error_that_names_both() -> None:
    engines = [asyncsync.ModuleEngine(nn.Linear(4, 2)) for _ in range(2)]
    async with WeightSynchronizer(nn.Linear(3, 2), engines) as synchronizer:
        with pytest.raises(PlanError, match=r"ModuleEngine-0: .* \| ModuleEngine-1: "):
            await synchronizer.connect()


async def test_tensors_of_their_own_that_the_engine_ties_are_refused_by_name() -> None:
    served = Zoo(2, strided=False)
    weights = {name: tensor.clone() for name, tensor in Zoo(1).state_dict().items()}
    async with WeightSynchronizer(weights, [asyncsync.ModuleEngine(served)]) as synchronizer:
        with pytest.raises(PlanError, match="tied in the engine, but sent as tensors of their own: tied, weight"):
            await synchronizer.update_weights()


async def test_arguments_that_make_no_sense_are_refused_at_once() -> None:
    engine, trainer = asyncsync.ModuleEngine(nn.Linear(1, 1)), nn.Linear(1, 1)
    with pytest.raises(ValueError, match="at least one engine"):
        WeightSynchronizer(trainer, [])
    with pytest.raises(ValueError, match="engine 1 is given twice"):
        WeightSynchronizer(trainer, [engine, engine])
    with pytest.raises(TypeError, match="is no rollout engine"):
        WeightSynchronizer(trainer, [object()])
    with pytest.raises(TypeError, match="is no rollout engine"):
        WeightSynchronizer(trainer, [asyncsync.ModuleEngine])
    with pytest.raises(TypeError, match="not int"):
        WeightSynchronizer(3, [engine])
    for size in (0, -5):
        with pytest.raises(ValueError, match="bucket_size must be a positive"):
            WeightSynchronizer(trainer, [engine], bucket_size=size)
    for timeout in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout must be a positive"):
            WeightSynchronizer(trainer, [engine], timeout=timeout)
    with pytest.raises(ValueError, match="must not be negative"):
        WeightSynchronizer(trainer, [engine], initial_version=-1)


async def test_generation_before_the_first_update_is_refused_unless_a_version_is_given() -> None:
    async with synced() as (_, _, synchronizer):
        with pytest.raises(asyncsync.NotReadyError, match="initial_version"):
            async with synchronizer.generation():
                pytest.fail("read")
        await synchronizer.update_weights()
        async with synchronizer.generation() as version:
            assert version == 1


async def test_a_closed_synchronizer_refuses_everything() -> None:
    async with synced() as (_, engines, synchronizer):
        await synchronizer.update_weights()
    for call in (synchronizer.update_weights, synchronizer.connect, synchronizer.__aenter__):
        with pytest.raises(asyncsync.ClosedError):
            await call()
    with pytest.raises(asyncsync.ClosedError):
        async with synchronizer.generation():
            pytest.fail("read")
    await synchronizer.aclose()
    assert "closed" in repr(synchronizer)
    assert [engine._asyncsync.receiver.seats[0].link for engine in engines] == [None, None]


async def test_an_update_inside_generation_is_refused_in_place_of_waiting_for_itself() -> None:
    async with synced(initial_version=0) as (_, _, synchronizer):
        async with synchronizer.generation():
            with pytest.raises(asyncsync.LockError, match="would wait for itself"):
                await synchronizer.update_weights()
        await synchronizer.update_weights()


async def test_connecting_early_leaves_only_the_transfer_to_the_first_update() -> None:
    async with synced() as (_, engines, synchronizer):
        await synchronizer.connect()
        assert synchronizer.weight_version is None
        engines[0].calls.clear()
        update = await synchronizer.update_weights()
        assert "connect" not in update.seconds
        assert "join_group" not in engines[0].calls


async def test_the_version_only_grows_even_under_a_new_synchronizer() -> None:
    engine = asyncsync.ModuleEngine(nn.Linear(2, 2))
    for expected in (1, 2, 3):
        async with WeightSynchronizer(nn.Linear(2, 2), [engine]) as synchronizer:
            assert (await synchronizer.update_weights()).version == expected


@BOTH
@pytest.mark.parametrize("how", ["half", "double", "moved"])
async def test_an_engine_whose_module_was_converted_in_place_is_refused_by_name(staged: bool, how: str) -> None:
    trainer, module = nn.Linear(2, 2), nn.Linear(2, 2)
    engine = asyncsync.ModuleEngine(module, staged=staged)
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        await synchronizer.update_weights()
        if how == "moved":  # the same kind of memory elsewhere is fine
            module.weight.data = module.weight.data.clone()
            await synchronizer.update_weights()
            assert contents(module) == contents(trainer)
            return
        getattr(module, how)()
        before = contents(module)
        with pytest.raises(PlanError, match=r"weight \(sent float32 \[2, 2\], held float") as caught:
            await synchronizer.update_weights()
        assert caught.value.names == ("bias", "weight")
        assert contents(module) == before
        assert gate_of(engine).is_open


WRONG_KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "bucket_size": ({"bucket_size": "1GB"}, "bucket_size must be a number of bytes, not '1GB'"),
    "half a byte": ({"bucket_size": 1.5}, "bucket_size must be a number of bytes"),
    "timeout": ({"timeout": None}, "timeout must be a number of seconds, not None"),
    "bool": ({"timeout": True}, "timeout must be a number of seconds, not True"),
    "dtype": ({"dtype": "bfloat16"}, "dtype must be a torch.dtype, not 'bfloat16'"),
    "initial_version": ({"initial_version": "1"}, "initial_version must be a number, not '1'"),
    "partial": ({"partial": "no"}, "partial must be True or False, not 'no'"),
    "lock": ({"lock": 5}, "lock must be a RolloutLock or a SharedRolloutLock, not 5"),
    "name_map": ({"name_map": {"a": "b"}}, "name_map must be a function from name to name, not dict"),
    "engines": ({"engines": 3}, "engines must be a list, even of one: not int"),
}


@pytest.mark.parametrize("what", WRONG_KINDS)
async def test_an_option_of_the_wrong_kind_is_named(what: str) -> None:
    options, message = WRONG_KINDS[what]
    with pytest.raises(TypeError, match=re.escape(message)):
        WeightSynchronizer(nn.Linear(1, 1), **{"engines": [asyncsync.ModuleEngine(nn.Linear(1, 1))]} | options)


async def test_a_backend_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match='backend must be "auto", "gloo" or "nccl", not \'mpi\''):
        WeightSynchronizer(nn.Linear(1, 1), [asyncsync.ModuleEngine(nn.Linear(1, 1))], backend="mpi")  # type: ignore[arg-type]


async def test_a_constructor_that_was_not_called_is_what_the_error_says() -> None:
    class Forgetful(asyncsync.ModuleEngine):
        def __init__(self) -> None:
            self.module = nn.Linear(1, 1)

    class ForgetfulTrainer(asyncsync.TrainerRank):
        def __init__(self) -> None:
            pass

    async with WeightSynchronizer(nn.Linear(1, 1), [Forgetful()]) as synchronizer:
        with pytest.raises(EngineError, match=r"Forgetful-0 .*call super\(\).__init__\(module\)"):
            await synchronizer.update_weights()
    async with WeightSynchronizer(ForgetfulTrainer(), [asyncsync.ModuleEngine(nn.Linear(1, 1))]) as synchronizer:
        with pytest.raises(asyncsync.TrainerError, match=r"call super\(\).__init__\(weights\)"):
            await synchronizer.update_weights()
    with pytest.raises(TypeError, match=r"serves an nn\.Module, not dict"):
        asyncsync.ModuleEngine({})  # type: ignore[arg-type]


async def test_a_name_map_that_fails_is_named() -> None:
    names = {"weight": "weight"}
    async with WeightSynchronizer(
        nn.Linear(1, 1), [asyncsync.ModuleEngine(nn.Linear(1, 1))], name_map=names.__getitem__
    ) as synchronizer:
        with pytest.raises(PlanError, match="name_map failed for 'bias': KeyError"):
            await synchronizer.update_weights()


@BOTH
async def test_two_synchronizers_may_take_turns_on_the_same_engines(staged: bool) -> None:
    engines = [asyncsync.ModuleEngine(nn.Linear(2, 2), staged=staged) for _ in range(2)]
    trainers = [nn.Linear(2, 2) for _ in range(2)]
    async with WeightSynchronizer(trainers[0], engines) as one, WeightSynchronizer(trainers[1], engines) as other:
        for version in range(1, 7):
            synchronizer, trainer = ((one, trainers[0]), (other, trainers[1]))[version % 2]
            assert (await synchronizer.update_weights()).version == version
            assert [holds(engine, trainer) for engine in engines] == [True, True]


@BOTH
async def test_an_engine_that_missed_an_update_is_not_repaired_by_a_part_of_one(staged: bool) -> None:
    trainer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    engines = [ToldEngine(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), staged=staged) for _ in range(2)]
    sent: list[str] = list(trainer.state_dict())

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in trainer.state_dict().items() if name in sent}

    async with WeightSynchronizer(weights, engines, partial=True) as synchronizer:
        await synchronizer.update_weights()
        change(trainer)
        engines[1].before["finish_weight_update"] = failing(OSError("no"))
        with pytest.raises(EngineError):
            await synchronizer.update_weights()
        sent.remove("0.weight")
        sent.remove("0.bias")
        with pytest.raises(
            EngineError, match=r"ToldEngine-1.*lacks what an earlier update .*: 0\.bias, 0\.weight"
        ) as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UPDATED, EngineState.TAINTED]
        assert engines[1].weight_version is None
        with pytest.raises(asyncsync.TaintedEngineError):
            async with engines[1].generating():
                pytest.fail("read")
        sent.extend(["0.weight", "0.bias"])
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]


@BOTH
async def test_an_engine_that_was_restarted_while_idle_is_brought_up_to_date_in_the_same_call(staged: bool) -> None:
    async with synced(staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        engines[1]._asyncsync.receiver.seats[0].close()
        engines[1].__init__(zoo(99), staged=staged)  # type: ignore[misc]  # a new process, as far as anyone can tell
        for engine in engines:  # the trainer hears its connection break before an engine says that it is new
            engine.before["receive_weights"] = hanging()
        change(trainer)
        update = await synchronizer.update_weights()
        assert [outcome.state for outcome in update.outcomes] == [EngineState.UPDATED] * 2
        assert [holds(engine, trainer) for engine in engines] == [True, True]


async def test_a_trainer_that_dies_in_mid_transfer_is_named_and_no_engine_that_heard_it_first() -> None:
    class Mortal(asyncsync.TrainerRank):
        dead = False

        async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
            if not self.dead:
                return await super().send_weights(order)
            self._asyncsync._close_links()  # what its engines hear
            await asyncio.Event().wait()
            raise AssertionError

        async def abort_send(self, epoch: int) -> None:
            if self.dead:
                raise cluster.ActorLostError
            await super().abort_send(epoch)

    trainer, engines = Mortal(Zoo(1)), [ToldEngine(zoo(50)), ToldEngine(zoo(51))]
    async with WeightSynchronizer(trainer, engines, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        trainer.dead = True
        with pytest.raises(asyncsync.TrainerError, match="the trainer is gone") as caught:
            await synchronizer.update_weights()
        assert caught.value.phase == "transfer"
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UNCHANGED] * 2
        trainer.dead = False
        await synchronizer.update_weights()


@pytest.mark.asyncio
async def test_a_version_is_out_only_once_those_behind_it_are_barred_and_then_at_once() -> None:
    model = Chain(1)
    whole, behind = (Probe(asyncsync.ModuleEngine(Chain(0))) for _ in range(2))
    async with WeightSynchronizer(model, [whole, behind]) as synchronizer:
        await synchronizer.update_weights()
        telling, go_on = asyncio.Event(), asyncio.Event()

        async def fail() -> None:
            raise RuntimeError("planned")

        async def hang() -> None:
            telling.set()
            await go_on.wait()

        async def then_hang() -> None:
            behind.before["abort_weight_update"] = hang

        behind.before["finish_weight_update"] = fail
        behind.after["abort_weight_update"] = then_hang
        update = asyncio.create_task(failed(synchronizer.update_weights()))
        await telling.wait()
        assert synchronizer.weight_version == 1, "one that does not hold the next is not barred yet"
        assert synchronizer.ready_engines == (whole, behind)
        go_on.set()
        await update
        assert synchronizer.weight_version == 2
        assert [*synchronizer.ready_engines] == [whole]


@pytest.mark.asyncio
async def test_an_engine_that_was_met_and_refused_is_parted_with_and_keeps_nothing_open() -> None:
    model = Chain(1)
    refused, unfit = (Probe(asyncsync.ModuleEngine(module)) for module in (Chain(0), nn.Linear(2, 2)))

    async def fail() -> None:
        raise RuntimeError("planned")

    refused.before["accept_layout"] = fail
    async with WeightSynchronizer(model, [refused]) as synchronizer:
        await failed(synchronizer.update_weights())
        assert "leave_group" not in refused.calls
    assert refused.calls[-1] == "leave_group"
    async with WeightSynchronizer(model, [asyncsync.ModuleEngine(Chain(0))]) as synchronizer:
        await synchronizer.update_weights()
        await failed(synchronizer.add_engine(unfit))
        await synchronizer.update_weights()
        assert unfit.calls[-1] == "leave_group"
    async with WeightSynchronizer(model, [never := Probe(asyncsync.ModuleEngine(Chain(0)))]):
        pass
    assert never.calls == []
