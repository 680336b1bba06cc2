"""Engines that have released their memory: an update wakes what it must, and puts it back if it fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import pytest
import ray
from torch import nn

import asyncsync
from asyncsync import EngineError, EngineState, WeightUpdateError
from asyncsync.engines import EngineReceipt
from asyncsync.engines.serving import ServedModule
from asyncsync.engines.waking import OwnMemory, Woken
from asyncsync.messages import Policy, UpdateOrder
from tests.actors import Engine
from tests.cancelling import CancelsWithin
from tests.engines import IN_PLACE, STAGED, change, failing, flip_a_bit, gate_of, hanging, holds, zoo
from tests.sample import Zoo, contents, fingerprint
from tests.sleepers import ALL, Sleeper

pytestmark = pytest.mark.asyncio

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])


@asynccontextmanager
async def fleet(
    staged: bool, *, count: int = 1, **options: Any
) -> AsyncIterator[tuple[Zoo, list[Sleeper], asyncsync.WeightSynchronizer]]:
    trainer = Zoo(1)
    engines = [Sleeper(zoo(50 + index), staged=staged) for index in range(count)]
    options = {"bucket_size": 1024, "timeout": 60.0} | options
    async with asyncsync.WeightSynchronizer(trainer, engines, **options) as synchronizer:
        yield trainer, engines, synchronizer
    for engine in engines:
        assert engine.crashes == []


async def assert_serves(engine: Sleeper, version: int | None, module: nn.Module) -> None:
    assert engine.released == set()
    assert await engine.generate() == (version, contents(module))
    assert holds(engine, module)


async def assert_sleeps_as_before(engine: Sleeper, tags: set[str]) -> None:
    """Asleep, with no version if its weights are gone, and nobody reads them."""
    assert engine.released == tags
    status = await engine.describe_engine()
    assert status.released == tuple(sorted(tags))
    if "weights" in tags:
        assert (status.weight_version, status.holds) == (None, {})
        assert status.tainted is not None
        with pytest.raises(asyncsync.TaintedEngineError):
            await engine.generate()


async def failure(update: Awaitable[Any]) -> WeightUpdateError:
    with pytest.raises(WeightUpdateError) as error:
        await update
    return error.value


@BOTH
async def test_an_update_wakes_the_weights_before_they_are_written_and_the_rest_once_they_are_whole(
    staged: bool,
) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await engine.sleep()

        async def not_written_yet() -> None:
            received = engine._asyncsync.receiver.session is not None
            assert received is staged, "no earlier than needed"

        async def written() -> None:
            assert holds(engine, trainer)
            assert not gate_of(engine).is_open

        engine.at |= {"+weights": not_written_yet, "+kv_cache": written}
        update = await synchronizer.update_weights()
        assert engine.moves == ["+weights", "+kv_cache"]
        assert engine.flushed == 1
        assert [outcome.digest for outcome in update.outcomes] == [update.digest]
        assert (await engine.describe_engine()).released == ()
        await assert_serves(engine, update.version, trainer)


@BOTH
@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
async def test_only_what_sleeps_is_woken(staged: bool, tag: str) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        await engine.sleep({tag})
        change(trainer)
        await synchronizer.update_weights()
        assert engine.moves == [f"+{tag}"]
        await assert_serves(engine, 2, trainer)


@BOTH
async def test_updates_in_a_row_with_sleep_in_between_ask_nobody_how_he_is(staged: bool) -> None:
    async with fleet(staged, count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        for version in (2, 3, 4):
            await engines[version % 2].sleep()
            for engine in engines:
                engine.calls.clear()
            change(trainer)
            assert (await synchronizer.update_weights()).version == version
            for engine in engines:
                assert "describe_engine" not in engine.calls
                await assert_serves(engine, version, trainer)


@BOTH
async def test_refused_it_is_by_name_and_nothing_was_paused_or_sent(staged: bool) -> None:
    async with fleet(staged, asleep="refuse") as (trainer, (engine,), synchronizer):
        await engine.sleep()
        error = await failure(synchronizer.update_weights())
        assert isinstance(error, asyncsync.EngineError)
        assert "asleep (kv_cache, weights released)" in str(error)
        assert error.engine is not None
        assert error.engine in str(error)
        assert set(engine.calls) == {"describe_engine"}
        await engine.wake()
        await synchronizer.update_weights()
        engine.calls.clear()
        await engine.sleep({"kv_cache"})
        change(trainer)
        error = await failure(synchronizer.update_weights())  # in step: it refuses the order itself
        assert isinstance(error, asyncsync.EngineError)
        assert "asleep (kv_cache released)" in str(error)
        assert (error.outcomes[0].state, error.outcomes[0].weight_version) == (EngineState.UNCHANGED, 1)
        assert "finish_weight_update" not in engine.calls
        assert engine.moves == []
        assert engine.released == {"kv_cache"}
        await engine.wake({"kv_cache"})
        await synchronizer.update_weights()
        await assert_serves(engine, 2, trainer)


async def test_one_that_is_refused_is_gone_without() -> None:
    async with fleet(True, count=2, asleep="refuse") as (trainer, engines, synchronizer):
        await engines[0].sleep()
        error = await failure(synchronizer.update_weights())
        assert error.update is not None
        assert "asleep" in str(error)
        await assert_serves(engines[1], 1, trainer)
        assert engines[0].released == ALL


async def test_what_may_become_of_a_sleeping_engine_is_said_in_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="asleep must be one of wake, refuse, not 'no'"):
        asyncsync.WeightSynchronizer(Zoo(1), [Sleeper(zoo(2))], asleep="no")  # type: ignore[arg-type]


def at(engine: Sleeper, step: str) -> None:
    """Have an update fail at a step."""
    planned = failing(RuntimeError("planned"))
    moment, _, name = step.partition(" ")
    if moment == "at":
        engine.at[name] = planned
    elif moment == "flipped":
        flip_a_bit(engine)
    elif moment == "commit":
        served = engine._asyncsync

        def commit(session: Any) -> None:
            served._commit = type(served)._commit.__get__(served)  # type: ignore[method-assign]
            raise RuntimeError("planned")

        served._commit = commit  # type: ignore[method-assign]
    else:
        getattr(engine, moment)[name] = planned


STEPS = [
    "before receive_weights",
    "at +weights",
    "flipped",
    "after receive_weights",
    "before finish_weight_update",
    "commit",
    "at +kv_cache",
]


@BOTH
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
@pytest.mark.parametrize("step", STEPS)
async def test_an_update_that_fails_at_any_step_leaves_the_engine_as_asleep_as_it_was(
    step: str, others: int, staged: bool
) -> None:
    async with fleet(staged, count=1 + others) as (trainer, (engine, *rest), synchronizer):
        await synchronizer.update_weights()
        for each in (engine, *rest):
            await each.sleep()
        change(trainer)
        at(engine, step)
        error = await failure(synchronizer.update_weights())
        assert "planned" in str(error) or step == "flipped"
        assert error.outcomes[0].state is EngineState.TAINTED
        await assert_sleeps_as_before(engine, ALL)
        for each in rest:  # the others got it, in the same call
            await assert_serves(each, 2, trainer)
        update = await synchronizer.update_weights()
        for each in (engine, *rest):
            await assert_serves(each, update.version, trainer)


@BOTH
async def test_with_all_or_none_everyone_sleeps_on(staged: bool) -> None:
    async with fleet(staged, count=2, on_engine_failure="abort") as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        for engine in engines:
            await engine.sleep()
        change(trainer)
        flip_a_bit(engines[1])
        await failure(synchronizer.update_weights())
        for engine in engines:
            await assert_sleeps_as_before(engine, ALL)
        await synchronizer.update_weights()
        for engine in engines:
            await assert_serves(engine, 2, trainer)


async def test_those_who_take_their_time_to_go_back_to_sleep_are_not_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncsync.transaction.LINK_PATIENCE", 0.01)
    async with fleet(False, count=3) as (trainer, engines, synchronizer):
        for _ in range(2):  # asked how they are at first, and then in step
            for engine in engines:
                await engine.sleep()
            await synchronizer.update_weights()
        for engine in engines:
            await engine.sleep()
        change(trainer)

        async def leave() -> None:
            engines[2]._asyncsync.receiver.seats[0].close()
            await asyncio.Event().wait()

        slept = asyncio.Event()

        async def take_time() -> None:
            asyncio.get_running_loop().call_later(0.3, slept.set)  # far longer than the patience of before
            await slept.wait()

        engines[2].before["receive_weights"] = leave
        engines[0].at["-weights"] = engines[1].at["-weights"] = take_time
        error = await failure(synchronizer.update_weights())
        assert error.update is not None
        states = [outcome.state for outcome in error.outcomes]
        assert states[:2] == [EngineState.UPDATED] * 2
        for engine in engines[:2]:
            assert engine.moves == ["+weights", "-weights", "+weights", "+kv_cache"]
            await assert_serves(engine, 3, trainer)
        await synchronizer.update_weights()


@BOTH
async def test_an_engine_that_cannot_be_put_back_says_so_and_the_first_error_is_the_one_raised(staged: bool) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await engine.sleep()
        at(engine, "at +kv_cache")

        async def release(tags: Collection[str]) -> None:
            raise RuntimeError("planned: no room in the host's memory")

        engine.release_memory = release  # type: ignore[method-assign]
        error = await failure(synchronizer.update_weights())
        assert "could not be woken: RuntimeError: planned" in str(error)
        assert any("could not be put back to sleep" in note for note in error.__notes__)
        assert engine.released == {"kv_cache"}
        del engine.release_memory
        update = await synchronizer.update_weights()
        await assert_serves(engine, update.version, trainer)


@BOTH
async def test_what_an_older_update_has_woken_no_late_call_puts_back(staged: bool) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await engine.sleep()
        await synchronizer.update_weights()
        first = (await engine.describe_engine()).epoch
        await synchronizer.update_weights()
        with pytest.raises(asyncsync.OutOfStepError):
            await engine.abort_weight_update(first, None)
        at(engine, "before receive_weights")
        await failure(synchronizer.update_weights())  # it has woken nothing
        await assert_serves(engine, 2, trainer)
        await engine.abort_weight_update((await engine.describe_engine()).epoch, 7)  # others have 7
        assert engine.released == set(), "it was awake"


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["waiting", "handed over"])
@pytest.mark.parametrize(
    ("staged", "call"),
    [
        *((True, call) for call in (*STAGED, "abort_weight_update")),
        *((False, call) for call in (*IN_PLACE[1:], "abort_weight_update")),
    ],
)
async def test_cancelled_at_each_await_of_an_engines_call_it_is_whole_and_awake_or_as_asleep_as_it_was(
    call: str, when: Literal["waiting", "handed over"], staged: bool
) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        within = CancelsWithin(engine)
        await synchronizer.update_weights()
        version = 1
        for number in itertools.count():
            await engine.sleep()
            change(trainer)
            if call == "abort_weight_update":
                at(engine, "commit")
            within.next(call, number, when)
            within.task = asyncio.create_task(synchronizer._update())
            await asyncio.wait([within.task])
            within.clear()
            if synchronizer.weight_version == version:
                await assert_sleeps_as_before(engine, ALL)
            else:
                version += 1
                await assert_serves(engine, version, trainer)
            assert engine.crashes == []
            await synchronizer.update_weights()
            version += 1
            await assert_serves(engine, version, trainer)
            if not within.reached:
                break
        assert number >= 1


@pytest.mark.exhaustive
@BOTH
async def test_an_engine_whose_conductor_is_gone_goes_back_to_sleep_when_the_lease_is_over(staged: bool) -> None:
    async with fleet(staged, timeout=2.0) as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        await engine.sleep()
        reached, over, expire = asyncio.Event(), asyncio.Event(), engine._asyncsync._expire

        def expires(order: UpdateOrder) -> None:
            expire(order)
            over.set()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        engine._asyncsync._expire = expires  # type: ignore[method-assign]
        engine.after["receive_weights"] = hang
        engine.abort_weight_update = _never  # type: ignore[method-assign]
        engine.resume_generation = _never  # type: ignore[method-assign, assignment]
        update = asyncio.create_task(synchronizer.update_weights())
        await reached.wait()
        expiry = engine._asyncsync._expiry
        assert expiry is not None
        update.cancel()
        await asyncio.wait([update])
        await over.wait()
        assert engine._asyncsync._giving_up is not None
        await engine._asyncsync._giving_up
        del engine.abort_weight_update, engine.resume_generation
        await assert_sleeps_as_before(engine, ALL)
        assert engine.moves == ([] if staged else ["+weights", "-weights"])
        await synchronizer.update_weights()
        await assert_serves(engine, 2, trainer)


async def test_a_wake_up_that_hangs_does_not_hold_an_update_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.engines.waking.WAKE_TIMEOUT", 0.1)
    async with fleet(False) as (trainer, (engine,), synchronizer):
        await engine.sleep()
        engine.at["+weights"] = hanging()
        assert "could not be woken" in str(await failure(synchronizer.update_weights()))
        await assert_sleeps_as_before(engine, ALL)
        await synchronizer.update_weights()
        await assert_serves(engine, 1, trainer)


async def test_weights_that_are_released_in_the_middle_of_an_update_are_none_of_its_version() -> None:
    async with fleet(False) as (trainer, (engine,), synchronizer):

        async def release() -> None:
            await engine.release_memory({"weights"})

        engine.after["receive_weights"] = release
        error = await failure(synchronizer.update_weights())
        assert "released while they were being updated" in str(error)
        await assert_sleeps_as_before(engine, {"weights"})
        await synchronizer.update_weights()
        await assert_serves(engine, 1, trainer)


async def test_an_engine_that_tells_of_released_memory_and_cannot_wake_says_what_to_override() -> None:
    class Halfway(asyncsync.ModuleEngine):
        def released_memory(self) -> tuple[str, ...]:
            return ("kv_cache",)

    async with asyncsync.WeightSynchronizer(Zoo(1), [Halfway(zoo(2))]) as synchronizer:
        assert "Halfway has memory released, and does not override resume_memory()" in str(
            await failure(synchronizer.update_weights())
        )


async def test_a_sleeping_engine_gives_nobody_its_weights_and_tells_no_digest_of_them() -> None:
    async with fleet(True, count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        await engines[0].sleep()
        joiner = Sleeper(zoo(60))
        await synchronizer.add_engine(joiner)
        await assert_serves(joiner, 1, trainer)
        assert engines[0].released == ALL
        with pytest.raises(asyncsync.EngineError, match="wake it up"):
            await engines[0].weights_digest()


async def test_one_that_joins_asleep_is_woken_by_the_next_update_and_not_before() -> None:
    async with fleet(True) as (trainer, _, synchronizer):
        await synchronizer.update_weights()
        joiner = Sleeper(zoo(60))
        await joiner.sleep()
        joining = asyncio.create_task(synchronizer.add_engine(joiner))
        described = asyncio.Event()
        joiner.after["describe_engine"] = _set(described)
        await described.wait()
        assert joiner.released == ALL
        while not joining.done():
            await synchronizer.update_weights()
        await joining
        await assert_serves(joiner, synchronizer.weight_version, trainer)
        assert joiner.crashes == []


def _set(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def tell() -> None:
        event.set()

    return tell


@BOTH
@pytest.mark.parametrize("fails", [None, 0, 1])
async def test_an_engine_of_several_ranks_wakes_whole_or_not_at_all(fails: int | None, staged: bool) -> None:
    trainer, ranks = Zoo(1), [Sleeper(zoo(50 + index), staged=staged) for index in range(2)]
    async with asyncsync.WeightSynchronizer(trainer, [ranks], bucket_size=1024) as synchronizer:
        await synchronizer.update_weights()
        for rank in ranks:
            await rank.sleep()
        change(trainer)
        if fails is not None:
            ranks[fails].at["+kv_cache"] = failing(RuntimeError("planned"))
            assert f"rank {fails}" in str(await failure(synchronizer.update_weights()))
            for rank in ranks:
                await assert_sleeps_as_before(rank, ALL)
        update = await synchronizer.update_weights()
        for rank in ranks:
            await assert_serves(rank, update.version, trainer)
            assert rank.crashes == []


async def test_an_update_that_is_aborted_while_it_waits_for_a_reader_wakes_nobody_after_that() -> None:
    async with fleet(True) as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        orders: list[UpdateOrder] = []
        receive = engine.receive_weights

        async def note(order: UpdateOrder) -> EngineReceipt:
            orders.append(order)
            return await receive(order)

        engine.receive_weights = note  # type: ignore[method-assign]
        engine.before["finish_weight_update"] = failing(RuntimeError("planned: it is made below, by one that hangs on"))
        engine.abort_weight_update, abort = _never, engine.abort_weight_update  # type: ignore[method-assign]
        holding, hold = asyncio.Event(), engine._asyncsync.generations.hold

        async def holds_on(policy: Policy) -> None:
            holding.set()
            await hold(policy)

        engine._asyncsync.generations.hold = holds_on  # type: ignore[method-assign]
        async with engine.generating():
            await engine.sleep()
            change(trainer)
            await failure(synchronizer.update_weights())
            finishing = asyncio.create_task(engine.finish_weight_update(orders[0]))
            await holding.wait()
            await abort(orders[0].epoch, None)
        with pytest.raises(asyncsync.EngineError, match="no received update"):
            await finishing
        assert engine.moves == []
        await assert_sleeps_as_before(engine, ALL)
        del engine.abort_weight_update


async def _never(epoch: int, published: int | None) -> asyncsync.EngineStatus:
    raise RuntimeError("planned: it does not come")


@pytest.mark.parametrize(("released", "policy"), [((), "drain"), (("kv_cache",), "recompute")])
async def test_what_an_earlier_pause_has_kept_does_not_go_on_without_memory(
    released: tuple[str, ...], policy: Policy
) -> None:
    held: list[Policy] = []

    class Generates:
        policies: tuple[Policy, ...] = ("drain", "recompute")

        async def hold(self, policy: Policy) -> None:
            held.append(policy)

        def resume(self) -> None: ...

        def bar(self, reason: str) -> None: ...

    async def nothing(*_: object) -> None: ...

    memory = OwnMemory(lambda: released, nothing, nothing)
    served = ServedModule(lambda: zoo(1), staged=True, generations=Generates(), flush=nothing, memory=memory)
    await served.pause_generation(1, "drain")
    assert held == [policy]


@pytest.mark.exhaustive
@pytest.mark.ray
@BOTH
async def test_actors_that_sleep(staged: bool, ray_cluster: None) -> None:
    trainer, engines = Zoo(1), [Engine.remote(partial(zoo, 50 + index), staged=staged) for index in range(2)]
    try:
        async with asyncsync.WeightSynchronizer(trainer, engines, timeout=60) as synchronizer:
            for version in (1, 2, 3):
                for engine in engines:
                    await engine.release_memory.remote({"weights", "kv_cache"})
                change(trainer)
                await synchronizer.update_weights()
                for engine in engines:
                    assert (await engine.describe_engine.remote()).released == ()
                    assert await engine.read.remote() == (version, fingerprint(trainer))
    finally:
        for engine in engines:
            ray.kill(engine)


async def test_what_is_put_back() -> None:
    woken = Woken()
    woken.begin(5, 0)
    woken.note({"weights"})
    assert woken.to_put_back(5, 0, whole=False) == {"weights"}
    assert woken.to_put_back(5, 5, whole=True) == set(), "it was committed"
    assert woken.to_put_back(5, 5, whole=False) == {"weights"}, "and spoiled after that"
    assert woken.to_put_back(6, 5, whole=False) == set(), "which is another update's affair"
    woken.begin(7, 0)  # that of epoch 5 was never undone
    assert woken.to_put_back(7, 0, whole=False) == {"weights"}
    woken.begin(8, 7)
    assert woken.to_put_back(8, 7, whole=False) == set()


@BOTH
async def test_whoever_wants_to_generate_with_what_is_not_there_is_refused(staged: bool) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        await engine.sleep({"kv_cache"})
        for _ in range(2):
            with pytest.raises(EngineError, match=r"asleep .kv_cache released."):
                await engine.generate()
        with pytest.raises(EngineError, match="asleep"), engine.generating():
            pytest.fail("entered")
        await engine.wake({"kv_cache"})
        await assert_serves(engine, 1, trainer)


@BOTH
async def test_weights_that_were_released_and_woken_by_hand_are_lost(staged: bool) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        await asyncsync.ModuleEngine.sleep(engine, {"weights"})
        assert engine.weight_version is None
        await asyncsync.ModuleEngine.wake_up(engine, {"weights"})
        with pytest.raises(asyncsync.TaintedEngineError):
            await engine.generate()
        engine.moves.clear()
        await synchronizer.update_weights()
        await assert_serves(engine, 2, trainer)


async def test_sleeping_twice_and_waking_twice_is_asked_for_once() -> None:
    async with fleet(False) as (_, (engine,), _):
        for _ in range(2):
            await asyncsync.ModuleEngine.sleep(engine, ALL)
        for _ in range(2):
            await asyncsync.ModuleEngine.wake_up(engine, {"kv_cache"})
        assert engine.moves == ["-kv_cache", "-weights", "+kv_cache"]
        await asyncsync.ModuleEngine.wake_up(engine, {"weights"})


async def test_it_is_not_put_to_sleep_in_the_middle_of_an_update() -> None:
    async with fleet(False) as (trainer, (engine,), synchronizer):

        async def sleep() -> None:
            with pytest.raises(EngineError, match="not over"):
                await asyncsync.ModuleEngine.sleep(engine, ALL)

        engine.after["receive_weights"] = sleep
        await synchronizer.update_weights()
        await assert_serves(engine, 1, trainer)


@BOTH
async def test_weights_that_are_lost_are_not_repaired_by_an_update_of_some_of_them(staged: bool) -> None:
    async with fleet(staged, partial=True) as (_, (engine,), synchronizer):
        await synchronizer.update_weights()
        await engine.sleep()
        error = await failure(synchronizer.update_weights())
        assert "keep a copy" in str(error)
        await engine.wake()
        assert "keep a copy" in str(await failure(synchronizer.update_weights())), "nor when they are back"
        engine.keeps_released_weights = True
        assert "keep a copy" in str(await failure(synchronizer.update_weights())), "these are gone"
    async with fleet(staged, partial=True) as (trainer, (engine,), synchronizer):
        engine.keeps_released_weights = True
        await synchronizer.update_weights()
        await engine.sleep()
        assert engine.weight_version == 1, "they come back as they were"
        await synchronizer.update_weights()
        await assert_serves(engine, 2, trainer)


@BOTH
async def test_an_engine_of_several_ranks_of_which_one_sleeps_is_refused_before_any_is_written_to(staged: bool) -> None:
    trainer, ranks = Zoo(1), [Sleeper(zoo(50 + index), staged=staged) for index in range(2)]
    async with asyncsync.WeightSynchronizer(trainer, [ranks], bucket_size=1024, asleep="refuse") as synchronizer:
        await synchronizer.update_weights()
        before = contents(trainer)
        await ranks[1].sleep({"kv_cache"})
        change(trainer)
        error = await failure(synchronizer.update_weights())
        assert "asleep (kv_cache released)" in str(error)
        assert [outcome.state for outcome in error.outcomes] == [EngineState.UNCHANGED]
        assert [contents(rank.module) for rank in ranks] == [before] * 2
        await ranks[1].wake({"kv_cache"})
        await synchronizer.update_weights()
        for rank in ranks:
            await assert_serves(rank, 2, trainer)


@BOTH
async def test_what_its_owner_has_woken_no_failing_update_puts_to_sleep(staged: bool) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        await engine.sleep()
        at(engine, "commit")
        await failure(synchronizer.update_weights())  # it has woken it, and put it back
        assert engine.released == ALL
        await engine.wake()
        at(engine, "before receive_weights")
        await failure(synchronizer.update_weights())  # it has woken nothing
        assert engine.released == set()
        await synchronizer.update_weights()
        await assert_serves(engine, 2, trainer)


@pytest.mark.parametrize("tags", ["weights", 3, None])
async def test_released_memory_must_give_tags(tags: Any) -> None:
    async with fleet(False) as (_, (engine,), synchronizer):
        await synchronizer.update_weights()
        engine.released_memory = lambda: tags  # type: ignore[method-assign]
        assert "collection of tags" in str(await failure(synchronizer.update_weights()))
        del engine.released_memory
        await synchronizer.update_weights()


@BOTH
async def test_an_engine_whose_thread_was_given_up_goes_on_with_another(staged: bool) -> None:
    async with fleet(staged) as (trainer, (engine,), synchronizer):
        await synchronizer.update_weights()
        engine._asyncsync._worker.current.close()
        change(trainer)
        await synchronizer.update_weights()
        await assert_serves(engine, 2, trainer)
