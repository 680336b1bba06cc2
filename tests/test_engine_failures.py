"""What becomes of the others when an engine fails: they get the whole update, in the same call, or nobody gets it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import asyncsync
from asyncsync import EngineError, EngineState, WeightSynchronizer
from asyncsync.engines.loading import Loader
from asyncsync.shield import shielded
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
from tests.sample import contents

pytestmark = pytest.mark.asyncio

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
STEPS = [*itertools.product((*CONNECTING, *STAGED), [True]), *itertools.product((*CONNECTING, *IN_PLACE), [False])]


def disconnect(engines: list[ToldEngine], synchronizer: WeightSynchronizer) -> None:
    """Have the next update connect anew."""
    synchronizer._connection.forget()
    for engine in engines:
        engine._asyncsync._binding = None
        engine._asyncsync.receiver.seats[0].close()


async def is_barred(engine: ToldEngine) -> bool:
    """Whether an engine turns readers away."""
    try:
        async with engine.generating():
            return False
    except asyncsync.TaintedEngineError:
        return True


@pytest.mark.parametrize(("step", "staged"), STEPS)
async def test_the_others_get_the_whole_update_in_the_same_call(step: str, staged: bool) -> None:
    async with synced(staged=staged, count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        if step in CONNECTING:
            disconnect(engines, synchronizer)
        engines[1].before[step] = failing(OSError("the disk is full"))
        with pytest.raises(EngineError, match=r"ToldEngine-1 failed: OSError: the disk is full") as caught:
            await synchronizer.update_weights()
        error = caught.value
        assert [holds(engine, trainer) for engine in engines[::2]] == [True, True]
        assert all(gate_of(engine).is_open for engine in engines[::2])
        assert error.weight_version == synchronizer.weight_version == 2
        assert error.update is not None
        assert error.update.version == 2
        assert error.outcomes == error.update.outcomes or len(error.outcomes) == 3
        assert [outcome.state for outcome in error.outcomes[::2]] == [EngineState.UPDATED] * 2
        assert "version 2 was published: 2 of 3 engines hold it" in "".join(error.__notes__)
        if step == "resume_generation":  # it holds version 2 already, but nobody resumed it
            assert not gate_of(engines[1]).is_open
        else:
            assert error.outcomes[1].state is EngineState.TAINTED
            assert await is_barred(engines[1])
        assert synchronizer.ready_engines == (engines[0], engines[2])

        assert (await synchronizer.update_weights()).version == 3
        assert [holds(engine, trainer) for engine in engines] == [True] * 3
        assert all(gate_of(engine).is_open for engine in engines)


@BOTH
async def test_nobody_is_given_the_new_version_before_the_one_left_behind_is_barred(staged: bool) -> None:
    async with synced(staged=staged, count=2, initial_version=0) as (_, engines, synchronizer):
        seen: list[tuple[int | None, bool]] = []
        publish = synchronizer._publish

        def published(*arguments: Any) -> None:
            seen.append((synchronizer.weight_version, gate_of(engines[1]).is_open))
            publish(*arguments)

        synchronizer._publish = published  # type: ignore[assignment,method-assign]
        engines[1].before["receive_weights"] = failing(OSError("no"))
        with pytest.raises(EngineError):
            await synchronizer.update_weights()
        assert seen == [(0, False)]


@BOTH
async def test_one_wrong_bit_costs_only_the_engine_that_received_it(staged: bool) -> None:
    async with synced(staged=staged, count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        flip_a_bit(engines[0])
        with pytest.raises(asyncsync.TransferError, match="ToldEngine-0 received other bytes") as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [
            EngineState.TAINTED,
            EngineState.UPDATED,
            EngineState.UPDATED,
        ]
        assert [holds(engine, trainer) for engine in engines[1:]] == [True, True]
        assert await is_barred(engines[0])


async def test_weights_that_change_under_the_update_are_the_trainers_failure() -> None:
    async with synced(count=2) as (_, engines, synchronizer):
        await synchronizer.update_weights()
        for engine in engines:
            flip_a_bit(engine)
        with pytest.raises(asyncsync.TransferError, match="did the trainer change its weights") as caught:
            await synchronizer.update_weights()
        assert (caught.value.update, synchronizer.weight_version) == (None, 1)
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UNCHANGED] * 2


async def test_engines_that_fail_one_after_the_other_are_all_told_of() -> None:
    async with synced(count=4) as (trainer, engines, synchronizer):
        engines[0].before["describe_engine"] = failing(OSError("first"))
        engines[1].before["join_group"] = failing(OSError("second"))
        engines[2].before["finish_weight_update"] = failing(OSError("third"))
        with pytest.raises(asyncsync.EngineErrorGroup, match="3 engines failed") as caught:
            await synchronizer.update_weights()
        errors = [error for error in caught.value.exceptions if isinstance(error, EngineError)]
        assert [error.said.split(": ")[-1] for error in errors] == ["first", "second", "third"]
        assert [error.phase for error in errors] == ["describe", "connect", "finish"]
        states = [outcome.state for outcome in caught.value.outcomes]
        assert states == [EngineState.TAINTED] * 3 + [EngineState.UPDATED]
        assert holds(engines[3], trainer)
        assert (await synchronizer.update_weights()).version == 2


async def test_when_the_last_engine_fails_too_nothing_is_published() -> None:
    async with synced(count=2) as (_, engines, synchronizer):
        engines[0].before["describe_engine"] = failing(OSError("first"))
        engines[1].before["receive_weights"] = failing(OSError("second"))
        with pytest.raises(asyncsync.EngineErrorGroup, match="2 engines failed") as caught:
            await synchronizer.update_weights()
        assert (caught.value.update, synchronizer.weight_version) == (None, None)
        assert (await synchronizer.update_weights()).version == 1


async def test_a_trainer_that_fails_for_the_others_is_told_of_with_the_engine_that_failed_before() -> None:
    rank = asyncsync.TrainerRank(zoo(1))
    engines = [ToldEngine(zoo(2)), ToldEngine(zoo(3))]
    async with WeightSynchronizer(rank, engines) as synchronizer:

        async def fail_both() -> None:
            def broken() -> Any:
                raise OSError("the checkpoint is gone")

            rank._asyncsync._source = asyncsync.weights.WeightSource(broken)
            raise OSError("no")

        engines[1].before["receive_weights"] = fail_both
        with pytest.raises(asyncsync.TrainerError, match="the checkpoint is gone") as caught:
            await synchronizer.update_weights()
        assert "before that: ToldEngine-1 failed: OSError: no [in the transfer" in "".join(caught.value.__notes__)
        assert len(caught.value.outcomes) == 2


@pytest.mark.parametrize(
    ("step", "staged"),
    [("describe_engine", True), ("join_group", True), ("receive_weights", True), ("finish_weight_update", False)],
)
async def test_dropped_it_is_reported_and_removed(step: str, staged: bool) -> None:
    async with synced(staged=staged, count=2, on_engine_failure="drop") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        if step in CONNECTING:
            disconnect(engines, synchronizer)
        engines[1].before[step] = failing(OSError("no"))
        update = await synchronizer.update_weights()
        assert [outcome.state for outcome in update.outcomes] == [EngineState.UPDATED, EngineState.TAINTED]
        assert "1/2 engines" in str(update)
        assert synchronizer.statistics().dropped == 1
        assert holds(engines[0], trainer)
        assert await is_barred(engines[1])
        calls = len(engines[1].calls)
        assert [outcome.engine for outcome in (await synchronizer.update_weights()).outcomes] == ["ToldEngine-0"]
        assert len(engines[1].calls) > calls  # engine 0's; they share the list
        await synchronizer.add_engine(engines[1])
        assert holds(engines[1], trainer)


@pytest.mark.parametrize("step", [*CONNECTING, "pause_generation", *STAGED])
async def test_all_or_nothing_leaves_every_staged_engine_serving_the_old_version(step: str) -> None:
    async with synced(count=3, on_engine_failure="abort") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        old = contents(trainer)
        change(trainer)
        if step in CONNECTING:
            disconnect(engines, synchronizer)
        # One that fails as it switches fails alone; but what makes that fail is mostly the pause, and that comes first.
        engines[1].before[step] = failing(OSError("no"))
        with pytest.raises(EngineError) as caught:
            await synchronizer.update_weights()
        if step == "finish_weight_update":
            assert synchronizer.weight_version == 2
            assert [holds(engine, trainer) for engine in engines] == [True, False, True]
            return
        assert (caught.value.update, synchronizer.weight_version) == (None, 1)
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UNCHANGED] * 3
        for engine in engines:
            async with engine.generating() as version:
                assert version == 1
                assert contents(engine.module) == old
        assert (await synchronizer.update_weights()).version == 2
        assert [holds(engine, trainer) for engine in engines] == [True] * 3


@pytest.mark.exhaustive
async def test_all_or_nothing_waits_for_every_generation_before_the_first_engine_switches() -> None:
    async with synced(count=2, on_engine_failure="abort", initial_version=0) as (_, engines, synchronizer):
        await synchronizer.connect()
        synchronizer._timeout = 4.0
        async with engines[1].generating():
            with pytest.raises(asyncsync.WeightUpdateTimeoutError, match="no answer from ToldEngine-1") as caught:
                await synchronizer.update_weights()
        assert caught.value.phase == "pause"
        assert [engine.weight_version for engine in engines] == [None, None]
        assert all(gate_of(engine).is_open for engine in engines)


TIMEOUT = 8.0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "staged"), [(step, staged) for step, staged in STEPS if step != "join_group"])
async def test_one_that_does_not_answer_costs_the_others_a_phase(step: str, staged: bool) -> None:
    async with synced(staged=staged, count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        if step in CONNECTING:
            disconnect(engines, synchronizer)
        synchronizer._timeout = TIMEOUT
        engines[1].before[step] = hanging()
        with pytest.raises(asyncsync.WeightUpdateError, match="ToldEngine-1") as caught:
            await synchronizer.update_weights()
        assert synchronizer.weight_version == 2
        assert [holds(engine, trainer) for engine in engines[::2]] == [True, True]
        assert caught.value.update is not None
        synchronizer._timeout = 60.0
        engines[1].before.clear()
        assert (await synchronizer.update_weights()).version == 3
        assert [holds(engine, trainer) for engine in engines] == [True] * 3


class Frozen(ToldEngine):
    """An engine that answers nothing, from one of its calls on, until it thaws; then it hears what it was told."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.frozen = asyncio.Event()
        self.heard: list[str] = []

    def freeze_at(self, step: str) -> None:
        async def freeze() -> None:
            self.thawed.clear()
            self.frozen.set()
            await self.thawed.wait()

        self.before[step] = freeze

    async def _told(self, name: str, call: Any) -> Any:
        if not self.thawed.is_set():
            try:
                await self.thawed.wait()
            except BaseException:
                call.close()
                raise
        return await super()._told(name, call)

    async def abort_weight_update(self, epoch: int, published: int | None) -> asyncsync.EngineStatus:
        await self.thawed.wait()
        self.heard.append(f"behind {published}")
        return await super().abort_weight_update(epoch, published)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", ["describe_engine", "finish_weight_update"])
async def test_a_frozen_engine_hears_that_it_is_behind_as_soon_as_it_thaws(step: str) -> None:
    trainer, frozen = zoo(1), Frozen(zoo(2))
    engines = [ToldEngine(zoo(3)), frozen, ToldEngine(zoo(4))]
    async with WeightSynchronizer(trainer, engines, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        change(trainer)
        if step == "describe_engine":
            synchronizer._connection.forget()
        synchronizer._timeout = 4.0
        frozen.freeze_at(step)
        with pytest.raises(asyncsync.WeightUpdateError, match="Frozen-1") as caught:
            await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, False, True]
        assert caught.value.outcomes[1].state is EngineState.LOST
        assert "Frozen-1" in repr(synchronizer._late)
        frozen.thawed.set()
        await asyncio.wait(synchronizer._late._calls.values())
        assert frozen.heard[-1] == "behind 2"
        assert await is_barred(frozen)
        synchronizer._timeout = 60.0
        assert (await synchronizer.update_weights()).version == 3
        assert [holds(engine, trainer) for engine in engines] == [True] * 3


@pytest.mark.exhaustive
async def test_one_that_does_not_receive_is_told_from_those_who_wait_for_it_and_named_with_the_bucket() -> None:
    async with synced(count=3, staged=False, transport="broadcast") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        synchronizer._timeout = 2.0
        engines[2].before["receive_weights"] = hanging()
        with pytest.raises(asyncsync.WeightUpdateTimeoutError, match="transfer took longer") as caught:
            await synchronizer.update_weights()
        notes = "".join(caught.value.__notes__)
        assert "ToldEngine-2 had not begun to receive" in notes
        assert "ToldEngine-0 had received 0 of " in notes  # gloo has it hand on what the other does not take
        assert "ToldEngine-2" in caught.value.silent
        assert [holds(engine, trainer) for engine in engines] == [True, True, False]


async def test_one_that_leaves_the_group_without_a_word_is_gone_without() -> None:
    async with synced(count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)

        async def leave() -> None:
            engines[2]._asyncsync.receiver.seats[0].close()
            await asyncio.Event().wait()

        engines[2].before["receive_weights"] = leave
        with pytest.raises(asyncsync.LinkLostError) as caught:
            await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True, False]
        assert caught.value.update is not None
        assert (await synchronizer.update_weights()).version == 3
        assert [holds(engine, trainer) for engine in engines] == [True] * 3


@BOTH
async def test_what_was_received_for_nothing_is_written_over_by_the_next_attempt(staged: bool) -> None:
    async with synced(count=2, staged=staged, transport="broadcast") as (trainer, engines, synchronizer):

        def memory() -> dict[int, torch.Tensor]:  # held on to, lest new memory come to lie where the old did
            loader: Any = engines[0]._asyncsync._loader
            held = [loader._spare.memory, loader._live.memory] if staged else loader._bounce._buffers
            return {tensor.data_ptr(): tensor for tensor in held}

        for _ in range(2):
            await synchronizer.update_weights()
        before = memory()

        async def fail() -> None:
            while engines[0]._asyncsync.receiver.session is None:  # noqa: ASYNC110 - it has no event for a test
                await asyncio.sleep(0)
            raise OSError("no")

        engines[1].before["receive_weights"] = fail
        with pytest.raises(EngineError, match="no"):
            await synchronizer.update_weights()
        assert memory().keys() == before.keys()
        assert holds(engines[0], trainer)


@pytest.mark.parametrize("value", ["ignore", None, 3])
async def test_other_ways_to_take_a_failure_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="on_engine_failure must be one of raise, drop, abort"):
        WeightSynchronizer(zoo(1), [ToldEngine(zoo(2))], on_engine_failure=value)


@pytest.mark.exhaustive
async def test_a_joiner_gets_the_version_from_another_engine_if_the_first_is_frozen() -> None:
    trainer, frozen, joiner = zoo(1), Frozen(zoo(2)), ToldEngine(zoo(4))
    async with WeightSynchronizer(trainer, [frozen, ToldEngine(zoo(3))], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        synchronizer._timeout = 12.0
        frozen.freeze_at("give_weights")
        async with asyncio.timeout(30):  # of which the frozen one costs some
            await synchronizer.add_engine(joiner)
        assert holds(joiner, trainer)
        assert joiner in synchronizer.ready_engines
        frozen.thawed.set()


@pytest.mark.exhaustive
async def test_a_version_of_the_same_number_that_was_never_published_is_barred() -> None:
    trainer, frozen = zoo(1), Frozen(zoo(2))
    engines = [ToldEngine(zoo(3)), frozen]
    async with WeightSynchronizer(trainer, engines, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        change(trainer)
        synchronizer._timeout = 4.0
        frozen.freeze_at("finish_weight_update")
        frozen.after["finish_weight_update"] = frozen.before.pop("finish_weight_update")  # it has switched by then

        engines[0].before["finish_weight_update"] = hanging()
        update = asyncio.create_task(synchronizer.update_weights())
        await frozen.frozen.wait()
        update.cancel()
        await asyncio.wait([update])
        assert synchronizer.weight_version == 1, "nobody answers that holds the new one"
        change(trainer)
        with pytest.raises(asyncsync.WeightUpdateError, match="Frozen-1"):
            await synchronizer.update_weights()
        assert (synchronizer.weight_version, frozen.weight_version) == (2, 2)
        assert [holds(engine, trainer) for engine in engines] == [True, False]
        frozen.thawed.set()
        await asyncio.wait(synchronizer._late._calls.values())
        assert await is_barred(frozen)
        synchronizer._timeout = 60.0
        assert (await synchronizer.update_weights()).version == 3
        assert [holds(engine, trainer) for engine in engines] == [True, True]


@BOTH
async def test_who_aborts_an_update_that_is_being_committed_hears_what_came_of_it(staged: bool) -> None:
    async with synced(staged=staged, count=1, initial_version=0) as (trainer, (engine,), synchronizer):
        begun, go_on = threading.Event(), threading.Event()
        original = engine._asyncsync._loader_for

        def loader_for(device: str) -> Loader:
            loader = original(device)
            commit = loader.commit

            def slow() -> None:
                begun.set()
                assert go_on.wait(20)
                commit()

            loader.commit = slow  # type: ignore[method-assign]
            return loader

        engine._asyncsync._loader_for = loader_for  # type: ignore[method-assign]
        update = asyncio.create_task(synchronizer.update_weights())
        await asyncio.to_thread(begun.wait, 20)
        update.cancel()
        await asyncio.wait([update], timeout=0.2)
        aborting = [task for task in asyncio.all_tasks() if "clean-up" in task.get_name()]
        assert aborting, "the abort is under way"
        assert not update.done(), "it waits for the commit"
        go_on.set()
        await asyncio.wait([update])
        assert (synchronizer.weight_version, engine.weight_version) == (1, 1)
        assert holds(engine, trainer)
        assert synchronizer.ready_engines == (engine,)


@pytest.mark.exhaustive
async def test_a_staged_engine_that_was_paused_and_is_forgotten_serves_again_when_the_update_is_over() -> None:
    async with synced(count=1, on_engine_failure="abort", initial_version=0) as (_, (engine,), synchronizer):
        await synchronizer.connect()
        synchronizer._timeout = 2.0
        engine.resume_generation = lambda epoch: asyncio.Event().wait()  # type: ignore[assignment,method-assign,return-value]
        with pytest.raises(asyncsync.WeightUpdateError):
            await synchronizer.update_weights()
        async with asyncio.timeout(10), engine.generating() as version:
            assert version == 1


async def test_an_error_tells_of_those_lost_before_though_the_engines_cannot_be_asked_for_any_more() -> None:
    engines, asked = [ToldEngine(zoo(2)), ToldEngine(zoo(3))], itertools.count()

    async def find() -> list[ToldEngine]:
        if next(asked) == 1:
            raise OSError("the registry is down")
        return engines

    engines[1].before["receive_weights"] = failing(OSError("no"))
    async with WeightSynchronizer(zoo(1), find) as synchronizer:
        synchronizer._membership._members = {}
        with pytest.raises(EngineError, match="ToldEngine-1 failed: OSError: no") as caught:
            await synchronizer.update_weights()
        assert caught.value.update is not None
        assert next(asked) == 3, "asked before each attempt, and once after the failure"


@pytest.mark.parametrize("on_failure", ["raise", "drop", "abort"])
async def test_who_takes_over_beside_a_dead_engine_finds_the_version_of_the_others(on_failure: Any) -> None:
    trainer, engines = zoo(1), [ToldEngine(zoo(2)), ToldEngine(zoo(3)), ToldEngine(zoo(4))]
    async with WeightSynchronizer(trainer, engines) as before:
        await before.update_weights()
    engines[1].before["describe_engine"] = failing(OSError("gone"))
    async with WeightSynchronizer(zoo(5), engines, on_engine_failure=on_failure) as synchronizer:
        if on_failure == "drop":
            await synchronizer.connect()
            assert "ToldEngine-1" not in repr(synchronizer)
        else:
            with pytest.raises(EngineError, match="ToldEngine-1 failed: OSError: gone"):
                await synchronizer.connect()
        if on_failure == "abort":
            assert synchronizer.weight_version is None
            await synchronizer.connect()  # it answers again
            assert synchronizer.ready_engines == tuple(engines)
        else:
            assert synchronizer.weight_version == 1
            assert synchronizer.ready_engines == (engines[0], engines[2])
            async with synchronizer.generation(engines[2]) as version:
                assert version == 1


async def test_who_takes_over_does_not_take_weights_for_whole_that_nobody_finished() -> None:
    trainer, engines = zoo(1), [ToldEngine(zoo(2), staged=False), ToldEngine(zoo(3), staged=False)]
    async with WeightSynchronizer(trainer, engines) as gone, WeightSynchronizer(zoo(4), engines) as other:
        await gone.update_weights()
        change(trainer)
        received = [asyncio.Event() for _ in engines]
        for engine, event in zip(engines, received, strict=True):

            async def stop(event: asyncio.Event = event) -> None:
                event.set()
                await asyncio.Event().wait()

            engine.before["finish_weight_update"] = stop
        update = asyncio.create_task(gone.update_weights())
        for event in received:
            await event.wait()
        await other.connect()
        assert (other.weight_version, other.ready_engines) == (None, ())
        await other.update_weights()
        assert [holds(engine, zoo(4)) for engine in engines] == [True, True]
        update.cancel()
        await asyncio.wait([update])
        assert [holds(engine, zoo(4)) for engine in engines] == [True, True]
        assert all(gate_of(engine).is_open for engine in engines)


@BOTH
@pytest.mark.exhaustive
async def test_an_engine_that_has_switched_and_does_not_serve_is_not_told_to_be_updated(staged: bool) -> None:
    async with synced(count=2, staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        synchronizer._timeout = 4.0
        flush, calls = engines[1].flush_cache, asyncio.Event()
        engines[1].flush_cache = calls.wait  # type: ignore[assignment,method-assign]
        with pytest.raises(asyncsync.WeightUpdateError, match="ToldEngine-1") as caught:
            await synchronizer.update_weights()
        first, second = caught.value.outcomes
        assert (first.state, second.state) == (EngineState.UPDATED, EngineState.LOST)
        assert "1 of 2 engines hold it" in "".join(caught.value.__notes__)
        assert synchronizer.ready_engines == (engines[0],)
        assert "ToldEngine-1 (lost)" in repr(synchronizer)
        engines[1].flush_cache = flush  # type: ignore[method-assign]
        calls.set()
        synchronizer._timeout = 60.0
        assert (await synchronizer.update_weights()).version == 3
        assert [holds(engine, trainer) for engine in engines] == [True, True]
        assert synchronizer.ready_engines == tuple(engines)


@pytest.mark.parametrize("step", ["describe_engine", "open_group", "receive_weights"])
async def test_an_answer_of_the_wrong_kind_is_the_engines_failure(step: str) -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):

        async def forget(*_: Any) -> None:
            return None

        setattr(engines[1], step, forget)
        with pytest.raises(EngineError, match=f"ToldEngine-1 failed: TypeError: {step} returned None") as caught:
            await synchronizer.update_weights()
        assert caught.value.update is not None
        assert holds(engines[0], trainer)


async def test_a_lost_lease_of_updaters_is_an_error_of_the_update() -> None:
    class Lost(asyncsync.RolloutLock):
        @asynccontextmanager
        async def updater(self, **options: Any) -> AsyncIterator[None]:  # type: ignore[override]
            yield
            raise asyncsync.LockError("the lease was lost")

    async with synced(lock=Lost("a lock")) as (_, _, synchronizer):
        with pytest.raises(asyncsync.WeightUpdateError, match="the lock that updates share was lost") as caught:
            await synchronizer.update_weights()
        assert [outcome.engine for outcome in caught.value.outcomes] == ["ToldEngine-0", "ToldEngine-1"]


@pytest.mark.exhaustive
async def test_a_sender_thread_that_is_stuck_in_the_trainers_own_code_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncsync.guard.CLEANUP_TIMEOUT", 2.0)
    trainer, engine = torch.nn.Linear(3, 3), ToldEngine(torch.nn.Linear(3, 3))
    stuck, go_on = threading.Event(), threading.Event()

    class Sharded:
        def describe(self) -> Any:
            return [(name, each.dtype, each.shape) for name, each in trainer.state_dict().items()]

        def gather(self, name: str) -> Any:
            if not stuck.is_set():
                stuck.set()
                go_on.wait(120)
            return trainer.state_dict()[name]

    async with WeightSynchronizer(Sharded(), [engine], timeout=60) as synchronizer:
        synchronizer._timeout = 4.0
        with pytest.raises(asyncsync.WeightUpdateError):
            await synchronizer.update_weights()
        assert stuck.is_set()
        synchronizer._timeout = 60.0
        assert (await synchronizer.update_weights()).version == 1
        assert holds(engine, trainer)
        go_on.set()


class Stubborn(ToldEngine):
    """An engine whose calls do not end when they are cancelled."""

    async def abort_weight_update(self, epoch: int, published: int | None) -> asyncsync.EngineStatus:
        await shielded(asyncio.Event().wait())
        raise AssertionError


@pytest.mark.exhaustive
async def test_an_end_that_cannot_be_cancelled_does_not_hide_the_error_nor_hold_the_version_back() -> None:
    trainer, stubborn = zoo(1), Stubborn(zoo(2))
    engines = [ToldEngine(zoo(3)), stubborn]
    async with WeightSynchronizer(trainer, engines) as synchronizer:
        stubborn.before["finish_weight_update"] = failing(OSError("no"))
        with pytest.raises(EngineError, match="Stubborn-1 failed: OSError: no") as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UPDATED, EngineState.LOST]
        assert synchronizer.weight_version == 1
        assert synchronizer.ready_engines == (engines[0],)
        await synchronizer.remove_engine(stubborn)


async def test_an_engine_that_was_called_and_never_answered_is_parted_with() -> None:
    left: list[str] = []

    class Opening(ToldEngine):
        async def leave_group(self, connection: str) -> None:
            left.append(connection)
            await super().leave_group(connection)

    engine = Opening(zoo(2))
    engine.before["describe_engine"] = failing(OSError("asleep"))
    async with WeightSynchronizer(zoo(1), [engine]) as synchronizer:
        with pytest.raises(EngineError, match="asleep"):
            await synchronizer.update_weights()
    assert left == [""]


@pytest.mark.exhaustive
async def test_one_that_was_removed_while_it_did_not_answer_is_let_go_as_soon_as_it_does() -> None:
    frozen, left = Frozen(zoo(2)), asyncio.Event()
    leave_group = frozen.leave_group

    async def leave(connection: str) -> None:
        await frozen.thawed.wait()
        await leave_group(connection)
        left.set()

    frozen.leave_group = leave  # type: ignore[method-assign]
    async with WeightSynchronizer(zoo(1), [ToldEngine(zoo(3)), frozen], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        frozen.freeze_at("receive_weights")
        update = asyncio.create_task(synchronizer.update_weights())
        await frozen.frozen.wait()
        await synchronizer.remove_engine(frozen)
        assert len((await update).outcomes) == 1
        assert not left.is_set()
        frozen.thawed.set()
        await left.wait()


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_failure", ["raise", "abort"])
async def test_a_generation_on_a_frozen_engine_ends_whatever_is_done_about_the_engine(on_failure: Any) -> None:
    frozen = Frozen(zoo(2), staged=False)
    engines = [ToldEngine(zoo(3), staged=False), frozen]
    async with WeightSynchronizer(zoo(1), engines, timeout=60, on_engine_failure=on_failure) as synchronizer:
        await synchronizer.update_weights()
        synchronizer._timeout = 4.0
        entered = asyncio.Event()

        async def generate() -> None:
            async with synchronizer.generation(frozen):
                frozen.thawed.clear()
                entered.set()
                await asyncio.Event().wait()

        reader = asyncio.create_task(generate())
        await entered.wait()
        with pytest.raises(asyncsync.WeightUpdateError) as caught:
            await synchronizer.update_weights()
        await asyncio.wait([reader])
        with pytest.raises(EngineError, match="Frozen-1 does not answer, and was given up"):
            await reader
        assert caught.value.outcomes[1].state is EngineState.LOST
        frozen.thawed.set()
        synchronizer._timeout = 60.0
        await synchronizer.update_weights()
