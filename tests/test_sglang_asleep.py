"""SGLang asleep, over a pretended engine that dies of what SGLang would: its adapter's books must be exact."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

import asyncsync
from asyncsync import EngineState, WeightSynchronizer
from asyncsync.engines.sglang.calls import SGLangUnreachableError
from asyncsync.engines.sglang.memory import Memory
from asyncsync.errors import EngineError, OutOfStepError, TransferError
from asyncsync.messages import Policy
from tests.cancelling import CancelsWithin
from tests.pretended_sglang import ALL_TAGS, Llama, PretendedSGLang
from tests.test_sglang_engine import SLIME, adapter, in_order, same, state_after

pytestmark = pytest.mark.asyncio

ALL = set(ALL_TAGS)


@asynccontextmanager
async def asleep(
    tags: set[str] = ALL, facts: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Llama, asyncsync.SGLangEngine, PretendedSGLang, WeightSynchronizer]]:
    """A synchronizer that has updated once, and an engine that was then put to sleep."""
    (engine, sglang), trainer = adapter(**facts or {}), Llama(1)
    async with WeightSynchronizer(trainer, [engine], **{"bucket_size": 2048} | options) as synchronizer:
        await synchronizer.update_weights()
        await engine.release_memory_occupation(sorted(tags))
        sglang.calls.clear()
        trainer.load_state_dict(Llama(2).state_dict())
        yield trainer, engine, sglang, synchronizer
    assert sglang.crashes == []


def moves(sglang: PretendedSGLang) -> list[str]:
    return [call.removesuffix("_memory_occupation") for call in sglang.calls if call.endswith("_memory_occupation")]


async def assert_serves(engine: asyncsync.SGLangEngine, sglang: PretendedSGLang, trainer: Llama, version: int) -> None:
    assert sglang.released == set()
    assert not sglang.paused
    assert same(sglang.model, trainer)
    status = await engine.describe_engine()
    assert (status.weight_version, status.released) == (version, ())


async def assert_sleeps(engine: asyncsync.SGLangEngine, sglang: PretendedSGLang, tags: set[str]) -> None:
    assert sglang.released == tags
    status = await engine.describe_engine()
    assert status.released == tuple(sorted(tags))
    assert (status.weight_version is None) is ("weights" in tags)
    served = sglang.served
    if sglang.paused:
        sglang.comes()
        assert sglang.served == served, "who comes waits"
    assert sglang.crashes == []


@pytest.mark.parametrize("policy", ["drain", "abort", "recompute", "continue"])
async def test_an_update_wakes_the_weights_before_the_first_bucket_and_the_rest_once_all_are_there(
    policy: Policy,
) -> None:
    facts = {"radix_cache": False, "overlap_schedule": False}
    async with asleep(facts=facts, policy=policy) as (trainer, engine, sglang, synchronizer):
        resumed: list[list[str]] = []
        sglang.before["resume_memory_occupation"] = lambda fields: resumed.append(fields["tags"])
        sglang.before["begin_weight_update"] = lambda fields: sglang.comes()  # between weights and cache
        assert (await synchronizer.update_weights()).version == 2
        assert resumed == [["weights"], ["cuda_graph", "kv_cache"]]
        assert in_order(
            sglang.calls,
            f"pause {'in_place' if policy == 'continue' else 'retract'}",
            "resume_memory_occupation",
            "begin_weight_update",
            "update_weights_from_distributed",
            "end_weight_update",
            "resume_memory_occupation",
            "check_weights",
            "update_weight_version",
            "continue_generation",
        )
        assert sglang.calls.count("continue_generation") == 1
        assert sglang.served == 1
        await assert_serves(engine, sglang, trainer, 2)


async def test_what_an_earlier_pause_has_put_back_does_not_go_on_without_its_cache() -> None:
    async with asleep({"kv_cache"}) as (trainer, engine, sglang, synchronizer):
        sglang.before["flush_cache"] = lambda fields: {"success": False, "message": "requests are queued"}
        await synchronizer.update_weights()
        assert "pause retract" in sglang.calls
        assert sglang.calls.count("continue_generation") == 1
        await assert_serves(engine, sglang, trainer, 2)


async def test_an_engine_that_has_slept_before_anybody_met_it() -> None:
    (engine, sglang), trainer = adapter(), Llama(1)
    await engine.release_memory_occupation()
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        await synchronizer.update_weights()
        await assert_serves(engine, sglang, trainer, 1)
    assert sglang.crashes == []
    assert sglang.calls.count("check_weights") == 2, "its names were learned while it had them"


async def test_updates_in_a_row_with_sleep_in_between() -> None:
    async with asleep() as (trainer, engine, sglang, synchronizer):
        for version in (2, 3, 4):
            await synchronizer.update_weights()
            await assert_serves(engine, sglang, trainer, version)
            await engine.release_memory_occupation([["weights"], ["kv_cache"], None][version - 2])
            trainer.load_state_dict(Llama(version).state_dict())


async def test_an_actor_of_an_older_interface() -> None:
    async with asleep(facts=SLIME, policy="abort", bucket_size=1) as (trainer, engine, sglang, synchronizer):
        await synchronizer.update_weights()
        await assert_serves(engine, sglang, trainer, 2)


@pytest.mark.parametrize("connected", [True, False])
async def test_refused_it_is_by_name_and_nothing_was_sent(connected: bool) -> None:
    (engine, sglang), trainer = adapter(), Llama(1)
    async with WeightSynchronizer(trainer, [engine], asleep="refuse") as synchronizer:
        if connected:
            await synchronizer.update_weights()
        await engine.release_memory_occupation(["kv_cache", "weights"])
        sglang.calls.clear()
        error, _ = await state_after(synchronizer.update_weights())
        assert isinstance(error, EngineError)
        assert "asleep (kv_cache, weights released)" in str(error)
        assert error.engine is not None
        assert error.engine in str(error)
        assert not any(call.startswith(("begin", "update", "resume", "continue")) for call in sglang.calls)
        assert connected or not any(call.startswith("pause") for call in sglang.calls)
        await engine.resume_memory_occupation()
        assert (await engine.describe_engine()).weight_version is None  # who knows what it holds
        await synchronizer.update_weights()
        await assert_serves(engine, sglang, trainer, 1 + connected)
    assert sglang.crashes == []


async def test_what_is_not_released_is_not_resumed_and_what_is_not_there_not_released() -> None:
    async with asleep({"weights"}) as (_, engine, sglang, _):
        with pytest.raises(EngineError, match="not released: kv_cache"):
            await engine.resume_memory_occupation(["kv_cache", "weights"])
        with pytest.raises(EngineError, match="released already: weights"):
            await engine.release_memory_occupation(["weights", "kv_cache"])
        await engine.release_memory_occupation()
        assert sglang.released == ALL
        with pytest.raises(EngineError, match="released already: all"):
            await engine.release_memory_occupation()
        await engine.resume_memory_occupation()
        with pytest.raises(EngineError, match="not released: anything"):
            await engine.resume_memory_occupation()


async def test_nobody_moves_its_memory_in_the_middle_of_an_update() -> None:
    async with asleep({"kv_cache"}) as (_, engine, sglang, synchronizer):
        refused: list[str] = []

        async def move(fields: Mapping[str, Any]) -> None:
            for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
                with pytest.raises(EngineError, match="under way") as error:
                    await call(None)
                refused.append(str(error.value))

        sglang.before["end_weight_update"] = move
        await synchronizer.update_weights()
        assert len(refused) == 2


def fails(sglang: PretendedSGLang, call: str, number: int = 1) -> None:
    """Have the n-th call of a name fail, once."""
    calls = itertools.count(1)

    def fail(fields: Mapping[str, Any]) -> Any:
        return {"success": False, "message": "planned"} if next(calls) == number else None

    sglang.before[call] = fail


FAILURES = [
    ("resume_memory_occupation", 1, "resume"),  # which was refused
    ("begin_weight_update", 1, "resume release"),
    ("update_weights_from_distributed", 1, "resume release"),
    ("update_weights_from_distributed", 3, "resume release"),
    ("end_weight_update", 1, "resume release"),
    ("resume_memory_occupation", 2, "resume resume release"),
]


@pytest.mark.parametrize(("call", "number", "moved"), FAILURES)
async def test_whatever_fails_it_sleeps_as_it_did(call: str, number: int, moved: str) -> None:
    async with asleep(policy="recompute") as (trainer, engine, sglang, synchronizer):
        fails(sglang, call, number)
        error, state = await state_after(synchronizer.update_weights())
        assert "planned" in str(error)
        assert state is EngineState.TAINTED
        await assert_sleeps(engine, sglang, ALL)
        assert moves(sglang) == moved.split()
        update = await synchronizer.update_weights()
        await assert_serves(engine, sglang, trainer, update.version)


async def test_what_it_holds_is_not_what_was_sent() -> None:
    async with asleep() as (trainer, engine, sglang, synchronizer):

        async def spoil(fields: Mapping[str, Any]) -> None:
            sglang.model.lm_head.weight.data[0] = 5
            del sglang.before["end_weight_update"]

        sglang.before["end_weight_update"] = spoil
        error, state = await state_after(synchronizer.update_weights())
        assert isinstance(error, TransferError)
        assert state is EngineState.TAINTED
        await assert_sleeps(engine, sglang, ALL)
        await synchronizer.update_weights()
        await assert_serves(engine, sglang, trainer, 3)


async def test_only_the_cache_asleep_and_an_update_that_fails_before_it_has_begun() -> None:
    async with asleep({"kv_cache"}) as (trainer, engine, sglang, synchronizer):
        fails(sglang, "begin_weight_update")
        error, state = await state_after(synchronizer.update_weights())
        assert "planned" in str(error)
        assert state is EngineState.UNCHANGED
        await assert_sleeps(engine, sglang, {"kv_cache"})
        paused = [sglang.paused]
        await engine.resume_memory_occupation()
        assert [*paused, sglang.paused] == [True, False], "who has come waits, and goes on once the engine was woken"
        await synchronizer.update_weights()
        await assert_serves(engine, sglang, trainer, 2)


async def test_an_engine_that_cannot_be_put_back_says_so_and_the_first_error_is_the_one_raised() -> None:
    async with asleep() as (trainer, engine, sglang, synchronizer):
        fails(sglang, "end_weight_update")
        sglang.before["release_memory_occupation"] = lambda fields: {"success": False, "message": "no room for it"}
        error, state = await state_after(synchronizer.update_weights())
        assert "planned" in str(error)
        assert state is EngineState.TAINTED
        assert any("could not be put back to sleep: " in note and "no room for it" in note for note in error.__notes__)
        sglang.before.clear()
        await synchronizer.update_weights()
        await assert_serves(engine, sglang, trainer, 2)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("call", ["resume_memory_occupation", "release_memory_occupation"])
async def test_a_call_that_was_not_answered_leaves_nothing_to_guess(call: str, done: bool) -> None:
    async with asleep() as (_, engine, sglang, synchronizer):

        async def unanswered(fields: Mapping[str, Any]) -> None:
            if done:
                await getattr(sglang, f"_{call}")(**fields)
            raise SGLangUnreachableError("no answer in 60 s", call)

        sglang.before[call] = unanswered
        if call.startswith("release"):
            fails(sglang, "end_weight_update")
        _, state = await state_after(synchronizer.update_weights())
        assert state is EngineState.TAINTED
        sglang.before.clear()
        before = moves(sglang)
        error, _ = await state_after(synchronizer.update_weights())
        assert "is not known, since a call for that was not answered" in str(error)
        assert "restart the engine, and give the synchronizer a new SGLangEngine" in str(error)
        for by_hand in (engine.release_memory_occupation, engine.resume_memory_occupation):
            with pytest.raises(EngineError, match="is not known"):
                await by_hand(["weights"])
        assert moves(sglang) == before, "nothing is tried"
        sglang.restart()  # its label tells so
        sglang.label = "another"
        await engine._look_whether_same()
        await synchronizer.update_weights()


async def test_an_answer_that_comes_late_counts() -> None:
    sglang = PretendedSGLang()
    memory, asked, answer = Memory(sglang), asyncio.Event(), asyncio.Event()

    async def late(fields: Mapping[str, Any]) -> None:
        asked.set()
        await answer.wait()

    sglang.before["release_memory_occupation"] = late
    releasing = asyncio.create_task(memory.release(["weights"]))
    await asked.wait()
    releasing.cancel()
    await asyncio.sleep(0)
    assert memory.missing == {"weights"}
    with pytest.raises(EngineError, match="is not known"):
        memory.check()
    answer.set()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    memory.check()
    assert memory.released == {"weights"}
    await memory.resume(None)
    assert sglang.crashes == []


async def test_a_restarted_engine_is_not_woken() -> None:
    async with asleep() as (trainer, engine, sglang, synchronizer):
        sglang.restart()
        await synchronizer.update_weights()
        assert moves(sglang) == []
        await assert_serves(engine, sglang, trainer, 2)


async def test_late_calls_wake_nobody() -> None:
    async with asleep() as (_, engine, sglang, synchronizer):
        await synchronizer.update_weights()
        sglang.calls.clear()
        with pytest.raises(OutOfStepError):
            await engine.abort_weight_update(1, None)
        assert sglang.released == set()
        assert moves(sglang) == []


async def test_weights_that_are_lost_are_not_repaired_by_an_update_of_some_of_them() -> None:
    some = {name: tensor for name, tensor in Llama(3).state_dict().items() if "lm_head" not in name}
    for kept in (None, False, True):
        engine, sglang = adapter(weights_kept=kept)
        async with (
            WeightSynchronizer(Llama(1), [engine]) as whole,
            WeightSynchronizer(some, [engine], partial=True) as synchronizer,
        ):
            await whole.update_weights()
            await synchronizer.update_weights()
            await engine.release_memory_occupation()
            if kept:
                await synchronizer.update_weights()
                continue
            for _ in range(2):
                error, _ = await state_after(synchronizer.update_weights())
                assert "brings only some of them" in str(error)
                if sglang.released:
                    await engine.resume_memory_occupation()
            await whole.update_weights()
            await synchronizer.update_weights()
        assert sglang.crashes == []


@pytest.mark.parametrize("tags", [ALL, {"kv_cache"}], ids=["all", "the cache"])
async def test_requests_that_wait_at_a_sleeping_engine_are_not_let_in_to_be_aborted(tags: set[str]) -> None:
    async with asleep(tags, policy="abort") as (trainer, engine, sglang, synchronizer):
        left = asyncio.Event()

        async def read() -> None:
            async with synchronizer.generation():
                await left.wait()

        def comes(fields: Mapping[str, Any]) -> None:
            sglang.comes()
            if sglang.calls.count("abort_request") == 3:
                left.set()

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        sglang.before["abort_request"] = comes
        await synchronizer.update_weights()
        await reading
        assert sglang.served >= 3, "once it was awake"
        assert sglang.calls.count("continue_generation") == 1
        await assert_serves(engine, sglang, trainer, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["waiting", "handed over"])
@pytest.mark.parametrize("call", ["receive_weights", "finish_weight_update", "resume_generation"])
async def test_cancelled_at_each_await_it_is_whole_and_awake_or_as_asleep_as_it_was(
    call: str, when: Literal["waiting", "handed over"]
) -> None:
    async with asleep() as (trainer, engine, sglang, synchronizer):
        within = CancelsWithin(engine)

        async def a_turn(fields: Mapping[str, Any]) -> None:
            await asyncio.sleep(0)

        names = ("begin_weight_update", "end_weight_update", "resume_memory_occupation", "release_memory_occupation")
        sglang.before = dict.fromkeys((*names, "update_weight_version", "continue_generation"), a_turn)
        version = 1
        for number in itertools.count():
            trainer.load_state_dict(Llama(10 + number).state_dict())
            within.next(call, number, when)
            within.task = asyncio.create_task(synchronizer._update())
            await asyncio.wait([within.task])
            within.clear()
            if synchronizer.weight_version == version:
                await assert_sleeps(engine, sglang, ALL)
                trainer.load_state_dict(Llama(90 + number).state_dict())
                await synchronizer.update_weights()
            assert synchronizer.weight_version is not None
            version = synchronizer.weight_version
            await assert_serves(engine, sglang, trainer, version)
            if not within.reached:
                break
            await engine.release_memory_occupation()
        assert number >= 1


async def test_tags_that_sglang_does_not_have_are_refused_and_one_alone_may_be_given_as_text() -> None:
    async with asleep({"kv_cache"}) as (_, engine, _, _):
        for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
            with pytest.raises(EngineError, match="no memory of these tags: kv, weigths"):
                await call(["kv", "weigths"])
        await engine.resume_memory_occupation("kv_cache")
        await engine.release_memory_occupation("kv_cache")
        assert (await engine.describe_engine()).released == ("kv_cache",)
