"""Engines that join, leave and are restarted: in one process, over real gloo groups, with real bytes."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import asyncsync
from asyncsync import EngineError, EngineState, MembershipError, PlanError, WeightSynchronizer
from asyncsync.connection import MAX_COHORTS
from asyncsync.messages import PEER, EngineStatus
from tests.cancelling import CancelAt
from tests.engines import ToldEngine, change, failing, hanging, holds, synced, zoo
from tests.sample import Zoo, contents, fingerprint

pytestmark = pytest.mark.asyncio


async def turn() -> None:
    """Let everything else run once: for conditions that have no event."""
    await asyncio.sleep(0)


BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])


def restart(engine: ToldEngine, seed: int, *, staged: bool = True) -> None:
    """Make it what Ray makes of an actor whose process died: the same handle, other bytes, no groups, no version."""
    for seat in engine._asyncsync.receiver.seats.values():
        seat.close()
    engine.__init__(zoo(seed), staged=staged)  # type: ignore[misc]


# -- joining ---------------------------------------------------------------------------------------------------------


@BOTH
async def test_a_joiner_gets_the_published_version_though_the_trainer_has_moved_on(staged: bool) -> None:
    async with synced(staged=staged, count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        published = contents(trainer)
        change(trainer)
        for engine in engines:
            engine.calls.clear()
            engine.joined.clear()
        joiner = ToldEngine(zoo(60), staged=staged)
        await synchronizer.add_engine(joiner)
        assert contents(joiner.module) == published
        assert joiner.weight_version == synchronizer.weight_version == 1
        assert synchronizer.ready_engines == (*engines, joiner)
        async with joiner.generating() as version:
            assert version == 1
        assert not {"pause_generation", "receive_weights", "accept_layout"} & set(engines[0].calls), "they generate on"
        assert [engine.joined for engine in engines] == [[PEER], [], []], "one gives, the others are not touched"
        update = await synchronizer.update_weights()
        assert [outcome.state for outcome in update.outcomes] == [EngineState.UPDATED] * 4
        assert all(holds(engine, trainer) for engine in (*engines, joiner))
        assert [engine.joined for engine in engines] == [[PEER], [], []], "only the joiner was connected"
        assert joiner.joined == [PEER, 0]


async def test_engines_generate_on_while_one_of_them_gives_its_weights() -> None:
    async with synced(count=1) as (_, (engine,), synchronizer):
        await synchronizer.update_weights()
        giving, read = asyncio.Event(), asyncio.Event()

        async def wait_for_a_reader() -> None:
            giving.set()
            await read.wait()

        engine.before["give_weights"] = wait_for_a_reader
        adding = asyncio.create_task(synchronizer.add_engine(ToldEngine(zoo(60))))
        await giving.wait()
        async with synchronizer.generation() as version, engine.generating() as served:
            assert version == served == 1
            read.set()
        await adding


async def test_an_update_does_not_wait_for_joiners_but_takes_them_along() -> None:
    async with synced(count=2, timeout=600) as (trainer, _, synchronizer):
        await synchronizer.update_weights()
        joiners, catching_up = [ToldEngine(zoo(60 + index)) for index in range(3)], asyncio.Event()

        async def hang() -> None:
            catching_up.set()
            await asyncio.Event().wait()

        for joiner in joiners:
            joiner.before["receive_weights"] = hang
        adding = [asyncio.create_task(synchronizer.add_engine(joiner)) for joiner in joiners]
        await catching_up.wait()  # the first; the others wait for their turn
        for joiner in joiners[1:]:
            del joiner.before["receive_weights"]
            joiner.before["pause_generation"] = hang
        change(trainer)
        async with asyncio.timeout(60):  # if it waits for one of them, it waits far longer
            update = await synchronizer.update_weights()
            await asyncio.gather(*adding)
        assert [outcome.state for outcome in update.outcomes] == [EngineState.UPDATED] * 5
        for joiner in joiners:
            assert holds(joiner, trainer)
            async with joiner.generating() as version:
                assert version == 2


async def test_many_join_at_once_and_an_update_comes_between() -> None:
    async with synced(count=1) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        joiners = [ToldEngine(zoo(60 + index)) for index in range(5)]
        async with asyncio.TaskGroup() as group:
            for joiner in joiners:
                group.create_task(synchronizer.add_engine(joiner))
            await asyncio.sleep(0)
            update = group.create_task(synchronizer.update_weights())
        assert update.result().version == 2
        assert set(synchronizer.ready_engines) == {*engines, *joiners}
        assert all(holds(engine, trainer) for engine in (*engines, *joiners))


async def test_engines_that_join_one_by_one_end_in_few_groups_and_each_holds_every_update() -> None:
    async with synced(count=1, transport="broadcast") as (trainer, engines, synchronizer):
        everyone: list[ToldEngine] = list(engines)
        await synchronizer.update_weights()
        for index in range(2 * MAX_COHORTS):
            everyone.append(ToldEngine(zoo(60 + index)))
            await synchronizer.add_engine(everyone[-1])
            change(trainer)
            await synchronizer.update_weights()
            assert all(holds(engine, trainer) for engine in everyone)
            assert len(synchronizer._connection._cohorts) <= MAX_COHORTS
        assert everyone[0].joined.count(0) == 3, (
            "connected at first, and anew when there would have been too many groups"
        )


async def test_before_the_first_version_a_joiner_has_nothing_to_wait_for() -> None:
    async with synced(count=1) as (trainer, engines, synchronizer):
        joiner = ToldEngine(zoo(60))
        await synchronizer.add_engine(joiner)
        assert synchronizer.ready_engines == ()
        await synchronizer.update_weights()
        assert synchronizer.ready_engines == (*engines, joiner)
        assert holds(joiner, trainer)
    async with synced(count=1, initial_version=4) as (_, engines, synchronizer):
        await synchronizer.add_engine(joiner := ToldEngine(zoo(61)))
        assert synchronizer.ready_engines == (*engines, joiner), "it is taken to hold the initial version, as all are"


class Stingy(ToldEngine):
    """An engine that cannot give its weights to others."""

    async def describe_engine(self) -> EngineStatus:
        status = await super().describe_engine()
        return EngineStatus(**{name: getattr(status, name) for name in status.__slots__} | {"gives": False})


async def test_where_no_engine_can_give_a_joiner_waits_for_the_next_update() -> None:
    trainer, engine, joiner = Zoo(1), Stingy(zoo(50)), ToldEngine(zoo(60))
    async with WeightSynchronizer(trainer, [engine], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        asked = asyncio.Event()

        async def answer() -> None:
            asked.set()

        engine.after["describe_engine"] = answer
        adding = asyncio.create_task(synchronizer.add_engine(joiner))
        await asked.wait()
        assert synchronizer.ready_engines == (engine,)
        change(trainer)
        await synchronizer.update_weights()
        await adding
        assert holds(joiner, trainer)
    async with WeightSynchronizer(trainer, [Stingy(zoo(50))], timeout=0.5) as synchronizer:
        await synchronizer.update_weights()
        with pytest.raises(asyncsync.WeightUpdateTimeoutError, match=r"ToldEngine-1 waited 0\.5 s for an update"):
            await synchronizer.add_engine(ToldEngine(zoo(60)))
        assert len(synchronizer.ready_engines) == 1


async def test_a_giver_whose_bytes_are_not_those_published_is_passed_over() -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        with torch.no_grad():
            next(engines[0].module.parameters())[0, 0] += 1
        joiner = ToldEngine(zoo(60))
        await synchronizer.add_engine(joiner)
        assert holds(joiner, trainer)
        assert engines[1].calls.count("give_weights") == 2, "each was asked: they share one list"


async def test_a_giver_that_fails_or_changes_its_mind_is_passed_over() -> None:
    for step in ("describe_engine", "open_group", "join_group", "give_weights"):
        async with synced(count=2) as (trainer, engines, synchronizer):
            await synchronizer.update_weights()
            engines[0].before[step] = failing(OSError("no"))
            joiner = ToldEngine(zoo(60))
            await synchronizer.add_engine(joiner)
            assert holds(joiner, trainer)
            change(trainer)
            await synchronizer.update_weights()
            assert all(holds(engine, trainer) for engine in (*engines, joiner))


JOINING = (
    "describe_engine",
    "accept_layout",
    "open_group",
    "join_group",
    "pause_generation",
    "receive_weights",
    "finish_weight_update",
    "resume_generation",
)


@BOTH
@pytest.mark.parametrize("step", JOINING)
async def test_a_joiner_that_fails_has_not_joined_and_may_try_again(step: str, staged: bool) -> None:
    async with synced(staged=staged, count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        joiner = ToldEngine(zoo(60), staged=staged)
        joiner.before[step] = failing(OSError("no"))
        with pytest.raises(EngineError, match=r"ToldEngine-2 failed: OSError: no"):
            await synchronizer.add_engine(joiner)
        assert synchronizer.ready_engines == tuple(engines)
        await synchronizer.add_engine(joiner)
        assert holds(joiner, trainer)
        change(trainer)
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in (*engines, joiner))


async def test_a_joiner_whose_weights_do_not_fit_is_refused_by_name_and_the_others_go_on() -> None:
    async with synced(count=1) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        with pytest.raises(PlanError, match=r"ToldEngine-1: .*does not know") as caught:
            await synchronizer.add_engine(ToldEngine(nn.Linear(2, 2)))
        assert "weight" in caught.value.names
        change(trainer)
        await synchronizer.update_weights()
        assert holds(engines[0], trainer)


@pytest.mark.exhaustive
async def test_joining_that_is_cancelled_at_any_await_leaves_all_fit_for_the_next_update() -> None:
    async def run(adding: CancelAt) -> None:
        await adding

    for at in itertools.count():
        async with synced(count=2) as (trainer, engines, synchronizer):
            await synchronizer.update_weights()
            joiner = ToldEngine(zoo(60))
            adding = CancelAt(synchronizer.add_engine(joiner), at, "waiting")
            await asyncio.wait([asyncio.create_task(run(adding))])
            joined = joiner in synchronizer.ready_engines
            assert joined or adding.reached
            change(trainer)
            update = await synchronizer.update_weights()
            assert len(update.outcomes) == 2 + joined
            if not joined:
                await synchronizer.add_engine(joiner)
            async with asyncio.timeout(60), joiner.generating() as version:
                assert version == synchronizer.weight_version
            assert all(holds(engine, trainer) for engine in (*engines, joiner))
        if not adding.reached:
            break
    assert at >= 8


async def test_closing_ends_what_waits_to_join() -> None:
    for engine, step in ((Stingy(zoo(50)), "describe_engine"), (ToldEngine(zoo(50)), "give_weights")):
        reached, joiner = asyncio.Event(), ToldEngine(zoo(60))

        async def note(reached: asyncio.Event = reached) -> None:
            reached.set()

        synchronizer = WeightSynchronizer(Zoo(1), [engine], timeout=600)
        await synchronizer.update_weights()
        engine.before[step] = note
        joiner.before["receive_weights"] = hanging()
        adding = asyncio.create_task(synchronizer.add_engine(joiner))
        await reached.wait()
        await synchronizer.aclose()
        async with asyncio.timeout(60):
            with pytest.raises(asyncsync.ClosedError):
                await adding


@BOTH
async def test_a_joiner_that_was_cancelled_in_its_last_step_serves_when_it_joins_again(staged: bool) -> None:
    async with synced(staged=staged, count=1) as (_, _, synchronizer):
        await synchronizer.update_weights()
        joiner, reached = ToldEngine(zoo(60), staged=staged), asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        joiner.before["resume_generation"] = hang
        adding = asyncio.create_task(synchronizer.add_engine(joiner))
        await reached.wait()
        adding.cancel()
        await asyncio.wait([adding])
        await synchronizer.add_engine(joiner)
        async with asyncio.timeout(60), joiner.generating() as version:
            assert version == 1


async def test_an_engine_that_comes_from_another_job_is_not_taken_for_one_that_holds_the_version() -> None:
    async with synced(count=1) as (_, moved, other):
        for _ in range(3):
            await other.update_weights()
        mine = Zoo(5)
        async with WeightSynchronizer(mine, [ToldEngine(zoo(50))], timeout=60) as synchronizer:
            await synchronizer.update_weights()
            adding = asyncio.create_task(synchronizer.add_engine(moved[0]))
            while len(synchronizer._membership.members) < 2:
                await turn()
            assert moved[0] not in synchronizer.ready_engines, "its version 3 is another job's"
            await synchronizer.update_weights()
            await adding
            assert holds(moved[0], mine)


async def test_an_engine_that_left_and_comes_back_to_the_same_version_is_ready_at_once() -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        await synchronizer.remove_engine(engines[1])
        engines[1].calls.clear()
        await synchronizer.add_engine(engines[1])
        assert "receive_weights" not in engines[1].calls
        assert holds(engines[1], trainer)
        assert synchronizer.ready_engines == tuple(engines)


async def test_a_joiner_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.synchronizer.DESCRIBE_TIMEOUT", 1.0)
    async with synced(count=1) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        joiner = ToldEngine(zoo(60))
        joiner.before["describe_engine"] = hanging()
        adding = asyncio.create_task(synchronizer.add_engine(joiner))
        await turn()
        change(trainer)
        update = await synchronizer.update_weights()
        assert len(update.outcomes) == 1
        assert holds(engines[0], trainer)
        with pytest.raises(EngineError, match="ToldEngine-1 did not answer within 1"):
            await adding


async def test_a_joiner_that_is_removed_meanwhile_says_so() -> None:
    async with synced(count=1) as (_, _, synchronizer):
        await synchronizer.update_weights()
        joiner, reached = ToldEngine(zoo(60)), asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        joiner.before["receive_weights"] = hang
        adding = asyncio.create_task(synchronizer.add_engine(joiner))
        await reached.wait()
        async with asyncio.timeout(60):
            await synchronizer.remove_engine(joiner)
            with pytest.raises(MembershipError, match="ToldEngine-1 was removed while it was joining"):
                await adding


async def test_after_a_failed_first_update_the_initial_version_is_still_held() -> None:
    async with synced(count=2, initial_version=4, on_engine_failure="abort") as (trainer, engines, synchronizer):
        engines[1].before["receive_weights"] = failing(OSError("no"))
        with pytest.raises(EngineError):
            await synchronizer.update_weights()
        assert synchronizer.ready_engines == tuple(engines)
        async with asyncio.timeout(60):
            await synchronizer.connect()
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in engines)


async def test_closing_ends_what_is_being_asked_before_it_joins_and_what_waits_for_its_turn() -> None:
    async with synced(count=1, timeout=600) as (_, _, synchronizer):
        await synchronizer.update_weights()
        asked, answer = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            asked.set()
            await answer.wait()

        joiners = [ToldEngine(zoo(60)), ToldEngine(zoo(61))]
        joiners[0].before["describe_engine"] = wait
        joiners[1].before["accept_layout"] = hanging()
        adding = [asyncio.create_task(synchronizer.add_engine(joiner)) for joiner in joiners]
        await asked.wait()
        while "accept_layout" not in joiners[1].calls:
            await turn()
        waiting = asyncio.create_task(synchronizer.connect())
        await turn()
        adding[1].cancel()
        await synchronizer.aclose()
        answer.set()
        async with asyncio.timeout(60):
            for task in (adding[0], waiting):
                with pytest.raises(asyncsync.ClosedError):
                    await task


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["connect", "remove"])
async def test_connecting_and_removing_cancelled_at_any_await_leave_all_fit_for_the_next_update(what: str) -> None:
    async def run(call: CancelAt) -> None:
        await call

    for at in itertools.count():
        async with synced(count=3) as (trainer, engines, synchronizer):
            await synchronizer.update_weights()
            if what == "connect":
                restart(engines[2], 99)
                call = CancelAt(synchronizer.connect(), at, "waiting")
            else:
                call = CancelAt(synchronizer.remove_engine(engines[2]), at, "waiting")
            await asyncio.wait([asyncio.create_task(run(call))])
            change(trainer)
            await synchronizer.update_weights()
            left = engines if what == "connect" else engines[:2]
            assert all(holds(engine, trainer) for engine in left)
            assert synchronizer.ready_engines == tuple(left)
            if what == "remove":
                assert not any(seat.taken for seat in engines[2]._asyncsync.receiver.seats.values())
        if not call.reached:
            break
    assert at >= (8 if what == "connect" else 1)


# -- leaving ---------------------------------------------------------------------------------------------------------


@BOTH
async def test_an_engine_that_leaves_is_not_updated_any_more_and_is_in_no_group(staged: bool) -> None:
    async with synced(staged=staged, count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        old = contents(trainer)
        await synchronizer.remove_engine(engines[1])
        assert not any(seat.taken for seat in engines[1]._asyncsync.receiver.seats.values())
        change(trainer)
        update = await synchronizer.update_weights()
        assert [outcome.engine for outcome in update.outcomes] == ["ToldEngine-0", "ToldEngine-2"]
        assert contents(engines[1].module) == old
        assert holds(engines[0], trainer)
        assert holds(engines[2], trainer)
        assert synchronizer.ready_engines == (engines[0], engines[2])


async def test_a_group_that_all_its_engines_have_left_is_not_sent_to_any_more() -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        await synchronizer.add_engine(joiner := ToldEngine(zoo(60)))
        await synchronizer.update_weights()
        await synchronizer.remove_engine(joiner)
        change(trainer)
        await synchronizer.update_weights()
        assert [holds(engine, trainer) for engine in engines] == [True, True]
        assert [engine.joined.count(0) for engine in engines] == [1, 1]


async def test_an_engine_whose_removal_was_cancelled_is_told_to_leave_with_the_next_turn() -> None:
    async with synced(count=2) as (_, engines, synchronizer):
        await synchronizer.update_weights()
        receiving, go_on = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            receiving.set()
            await go_on.wait()

        engines[0].before["receive_weights"] = wait
        updating = asyncio.create_task(synchronizer.update_weights())
        await receiving.wait()
        removing = asyncio.create_task(synchronizer.remove_engine(engines[1]))
        while len(synchronizer._membership.members) == 2:
            await turn()
        removing.cancel()
        await asyncio.wait([removing])
        go_on.set()
        await updating
        await synchronizer.update_weights()
        assert not any(seat.taken for seat in engines[1]._asyncsync.receiver.seats.values())


async def test_removing_ends_when_the_synchronizer_is_closed() -> None:
    async with synced(count=2) as (_, engines, synchronizer):
        await synchronizer.update_weights()
        receiving = asyncio.Event()

        async def hang() -> None:
            receiving.set()
            await asyncio.Event().wait()

        engines[0].before["receive_weights"] = hang
        updating = asyncio.create_task(synchronizer.update_weights())
        await receiving.wait()
        removing = asyncio.create_task(synchronizer.remove_engine(engines[1]))
        await turn()
        await synchronizer.aclose()
        async with asyncio.timeout(60):
            await asyncio.wait([removing, updating])


@BOTH
async def test_an_engine_that_is_removed_in_mid_update_is_waited_for_if_it_is_well(staged: bool) -> None:
    async with synced(staged=staged, count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        removing: list[asyncio.Task[None]] = []

        async def remove() -> None:
            removing.append(asyncio.create_task(synchronizer.remove_engine(engines[1])))
            await asyncio.sleep(0)

        engines[1].before["receive_weights"] = remove
        change(trainer)
        update = await synchronizer.update_weights()
        await removing[0]
        assert [outcome.state for outcome in update.outcomes] == [EngineState.UPDATED] * 2
        assert len((await synchronizer.update_weights()).outcomes) == 1


@BOTH
@pytest.mark.parametrize("step", ["pause_generation", "receive_weights", "finish_weight_update"])
@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_an_engine_that_is_removed_in_mid_update_and_is_not_well_is_left_out_in_the_same_call(
    step: str, how: str, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if staged and step == "pause_generation":
        step = "accept_layout"
    monkeypatch.setattr("asyncsync.synchronizer.PING_TIMEOUT", 0.1)
    async with synced(staged=staged, count=3) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)
        removing: list[asyncio.Task[None]] = []

        async def remove() -> None:
            engines[1].before = dict.fromkeys(("describe_engine", "leave_group"), hanging())
            removing.append(asyncio.create_task(synchronizer.remove_engine(engines[1])))
            if how == "hangs":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            raise OSError("no")

        if step == "accept_layout":
            synchronizer._connection.forget()
            engines[1]._asyncsync._binding = None
        engines[1].before[step] = remove
        update = await synchronizer.update_weights()
        await removing[0]
        assert [outcome.engine for outcome in update.outcomes] == ["ToldEngine-0", "ToldEngine-2"]
        assert [outcome.state for outcome in update.outcomes] == [EngineState.UPDATED] * 2
        for engine in (engines[0], engines[2]):
            assert holds(engine, trainer)
            async with engine.generating() as version:
                assert version == update.version == synchronizer.weight_version


async def test_an_engine_that_failed_is_removed_by_the_name_in_the_error() -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        engines[1].before["receive_weights"] = failing(OSError("no"))
        with pytest.raises(EngineError) as caught:
            await synchronizer.update_weights()
        assert caught.value.engine is not None
        await synchronizer.remove_engine(caught.value.engine)
        update = await synchronizer.update_weights()
        assert [outcome.engine for outcome in update.outcomes] == ["ToldEngine-0"]
        assert holds(engines[0], trainer)


async def test_the_last_engine_may_leave_and_another_come() -> None:
    async with synced(count=1) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        await synchronizer.remove_engine(engines[0])
        with pytest.raises(MembershipError, match="at least one engine"):
            await synchronizer.update_weights()
        assert "engines none" in repr(synchronizer)
        joiner = ToldEngine(zoo(60))
        adding = asyncio.create_task(synchronizer.add_engine(joiner))
        change(trainer)
        while synchronizer._membership.members == ():  # it answers, and its weights are compared, before it belongs
            await turn()
        await synchronizer.update_weights()
        await adding
        assert holds(joiner, trainer)


# -- restarted -------------------------------------------------------------------------------------------------------


@BOTH
async def test_connect_brings_an_engine_that_was_restarted_to_the_published_version(staged: bool) -> None:
    async with synced(staged=staged, count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        published = contents(trainer)
        restart(engines[1], 99, staged=staged)
        change(trainer)
        await synchronizer.connect()
        assert [contents(engine.module) for engine in engines] == [published] * 2
        assert engines[1].weight_version == 1
        update = await synchronizer.update_weights()
        assert update.version == 2
        assert all(holds(engine, trainer) for engine in engines)


async def test_only_the_group_of_a_restarted_engine_is_made_anew() -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        await synchronizer.add_engine(joiner := ToldEngine(zoo(60)))
        await synchronizer.update_weights()
        restart(joiner, 98)
        for engine in engines:
            engine.joined.clear()
        change(trainer)
        await synchronizer.connect()
        assert joiner.joined == [0, PEER]
        assert [engine.joined for engine in engines] == [[PEER], []]
        change(trainer)
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in (*engines, joiner))


async def test_an_engine_that_knows_it_was_restarted_serves_nobody_until_it_holds_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        with monkeypatch.context() as patched:
            patched.setattr("asyncsync.cluster.was_restarted", lambda: True)
            restart(engines[1], 99)
        with pytest.raises(asyncsync.TaintedEngineError, match="was restarted"):
            async with engines[1].generating():
                pytest.fail("read")
        await synchronizer.connect()
        async with engines[1].generating() as version:
            assert version == 1
        assert holds(engines[1], trainer)


# -- engines that are asked for ---------------------------------------------------------------------------------------


async def test_a_function_is_asked_once_an_update_and_its_answer_is_the_list_of_all() -> None:
    trainer, engines = Zoo(1), [ToldEngine(zoo(50 + index)) for index in range(4)]
    answers: list[Iterable[Any]] = [engines[:2], iter(engines[1:3]), tuple(engines)]
    asked = 0

    async def find() -> Iterable[Any]:
        nonlocal asked
        asked += 1
        return answers[asked - 1]

    async with WeightSynchronizer(trainer, find, timeout=60) as synchronizer:
        for expected in (engines[:2], engines[1:3], engines):
            change(trainer)
            update = await synchronizer.update_weights()
            assert len(update.outcomes) == len(expected)
            assert set(synchronizer.ready_engines) == set(expected)
            assert all(holds(engine, trainer) for engine in expected)
        assert asked == 3
        with pytest.raises(MembershipError, match="the function that was given for engines must do it"):
            await synchronizer.add_engine(ToldEngine(zoo(60)))
        with pytest.raises(MembershipError, match="the function that was given for engines must do it"):
            await synchronizer.remove_engine(engines[0])


async def test_engines_that_an_answer_leaves_out_are_told_to_leave() -> None:
    trainer, engines = Zoo(1), [ToldEngine(zoo(50 + index)) for index in range(3)]
    answers = [engines, engines[:1]]

    async def find() -> Iterable[Any]:
        return answers.pop(0)

    async with WeightSynchronizer(trainer, find, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        await synchronizer.update_weights()
        assert [any(seat.taken for seat in engine._asyncsync.receiver.seats.values()) for engine in engines] == [
            True,
            False,
            False,
        ]


async def test_a_function_that_hangs_after_a_failure_does_not_hold_the_update() -> None:
    engine, asked = ToldEngine(zoo(50)), itertools.count()

    async def find() -> Iterable[Any]:
        if next(asked):
            await asyncio.Event().wait()
        return [engine]

    async with WeightSynchronizer(Zoo(1), find, timeout=1) as synchronizer:
        engine.before["receive_weights"] = failing(OSError("no"))
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="OSError: no"):
                await synchronizer.update_weights()


async def test_an_answer_that_is_new_each_time_does_not_hide_what_failed() -> None:
    class Failing(asyncsync.TrainerRank):
        async def send_weights(self, order: asyncsync.UpdateOrder) -> Any:
            raise OSError("no")

    async def find() -> Iterable[Any]:
        return [ToldEngine(zoo(50))]

    async with WeightSynchronizer(Failing(Zoo(1)), find, timeout=60) as synchronizer:
        with pytest.raises(asyncsync.TrainerError, match="OSError: no"):
            await synchronizer.update_weights()


async def test_an_answer_that_cannot_be_used_is_an_error_and_changes_nothing() -> None:
    trainer, engine = Zoo(1), ToldEngine(zoo(50))
    answers: list[Any] = [[engine]]

    async def find() -> Any:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    async with WeightSynchronizer(trainer, find, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        for answer, message in (
            ([engine, engine], "engine 1 is given twice: it is engine 0 too"),
            ([], "at least one engine"),
            (None, "a list of engines is needed, not NoneType"),
            ([nn.Linear(2, 2)], "no rollout engine"),
            (OSError("no answer"), "could not be asked for: OSError: no answer"),
        ):
            answers.append(answer)
            with pytest.raises(MembershipError, match=message):
                await synchronizer.update_weights()
            assert synchronizer.ready_engines == (engine,)
        answers.append([engine])
        change(trainer)
        await synchronizer.update_weights()
        assert holds(engine, trainer)


async def test_a_function_for_engines_that_is_not_async_is_an_error_that_says_so() -> None:
    not_async: Any = lambda: [ToldEngine(zoo(50))]  # noqa: E731
    async with WeightSynchronizer(Zoo(1), not_async) as synchronizer:
        with pytest.raises(MembershipError, match="must be async"):
            await synchronizer.update_weights()


async def test_engines_that_are_missing_in_the_next_answer_are_left_out_in_the_same_call() -> None:
    trainer, engines = Zoo(1), [ToldEngine(zoo(50)), ToldEngine(zoo(51))]
    answer = engines

    async def find() -> Iterable[Any]:
        return answer

    async with WeightSynchronizer(trainer, find, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        change(trainer)

        async def die() -> None:
            nonlocal answer
            answer = engines[:1]
            raise OSError("dead")

        engines[1].before["receive_weights"] = die
        update = await synchronizer.update_weights()
        assert [outcome.engine for outcome in update.outcomes] == ["ToldEngine-0"]
        assert holds(engines[0], trainer)


# -- all of it at once ------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@BOTH
@pytest.mark.parametrize("seed", range(2))
async def test_random_joins_leaves_and_restarts_with_rollouts_going_on(seed: int, staged: bool) -> None:
    chance = random.Random(seed)
    held: dict[int, str] = {}
    stop = asyncio.Event()
    async with synced(staged=staged, count=3) as (trainer, engines, synchronizer):
        pool = [*engines, *(ToldEngine(zoo(70 + index), staged=staged) for index in range(3))]

        async def update() -> None:
            change(trainer)
            held[(await synchronizer.update_weights()).version] = fingerprint(trainer)

        async def rollouts() -> None:
            while not stop.is_set():
                async with synchronizer.generation() as version:
                    for engine in synchronizer.ready_engines:
                        try:
                            async with engine.generating() as own:
                                if own is not None:  # else it was restarted just now, and knows
                                    assert own == version
                                    assert fingerprint(engine.module) == held[version]
                        except asyncsync.TaintedEngineError:
                            pass
                await asyncio.sleep(0)

        async def come_and_go() -> None:
            membership = synchronizer._membership
            members = [member.handle for member in membership.members]
            joining = [member.handle for member in membership._joining.values()]
            outside = [engine for engine in pool if engine not in (*members, *joining)]
            if outside and (len(members) < 2 or chance.random() < 0.5):
                await synchronizer.add_engine(chance.choice(outside))
            else:
                await synchronizer.remove_engine(chance.choice(members))

        await update()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rollouts())
            for _ in range(20):
                if chance.random() < 0.2:
                    restart(chance.choice(synchronizer.ready_engines), 90, staged=staged)
                going = [tasks.create_task(come_and_go()) for _ in range(chance.randrange(3))]
                await update()
                while not all(task.done() for task in going):
                    while synchronizer._busy.locked() or synchronizer._membership._joining:
                        await turn()
                    await update()  # one that joins, and whom nobody could give the version, waits for the next
                assert all(holds(engine, trainer) for engine in synchronizer.ready_engines)
                assert len(synchronizer.ready_engines) == len(synchronizer._membership.members)
            stop.set()


# -- what makes no sense ---------------------------------------------------------------------------------------------


async def test_joining_twice_and_leaving_without_having_joined_are_refused_by_name() -> None:
    async with synced(count=2) as (_, engines, synchronizer):
        with pytest.raises(MembershipError, match="this engine has joined already: it is ToldEngine-1"):
            await synchronizer.add_engine(engines[1])
        with pytest.raises(MembershipError, match=r"ToldEngine is none of the engines: .*ToldEngine-0, ToldEngine-1"):
            await synchronizer.remove_engine(ToldEngine(zoo(60)))
        with pytest.raises(MembershipError, match=r"ToldEngine-7 is none of the engines"):
            await synchronizer.remove_engine("ToldEngine-7")
        with pytest.raises(TypeError, match="no rollout engine"):
            await synchronizer.add_engine(nn.Linear(2, 2))
        joiner = ToldEngine(zoo(60))
        adding = asyncio.create_task(synchronizer.add_engine(joiner))
        await asyncio.sleep(0)
        with pytest.raises(MembershipError, match="joined already: it is ToldEngine-2"):
            await synchronizer.add_engine(joiner)
        await adding
        assert len((await synchronizer.update_weights()).outcomes) == 3


# -- several synchronizers -------------------------------------------------------------------------------------------


class Halved(nn.Module):
    """Two parts, each trained by a trainer of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.policy, self.critic = zoo(seed), zoo(seed + 1000)


def part(model: Halved, name: str) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in model.get_submodule(name).state_dict(keep_vars=True).items()}


@BOTH
async def test_two_synchronizers_that_share_engines_and_a_lock_take_turns(staged: bool) -> None:
    model = Halved(1)
    engines = [ToldEngine(Halved(50 + index), staged=staged) for index in range(2)]
    lock = asyncsync.RolloutLock("shared")
    options: dict[str, Any] = {"partial": True, "lock": lock, "timeout": 60, "bucket_size": 1024}
    async with (
        WeightSynchronizer(part(model, "policy"), engines, **options) as policy,
        WeightSynchronizer(part(model, "critic"), reversed(engines), **options) as critic,
    ):
        for _ in range(4):
            change(model)
            updates = await asyncio.gather(policy.update_weights(), critic.update_weights())
            assert updates[0].version != updates[1].version
            assert all(holds(engine, model) for engine in engines)
        await policy.remove_engine(engines[1])
        change(model)
        await asyncio.gather(policy.update_weights(), critic.update_weights())
        assert not holds(engines[1], model)
        adding = asyncio.create_task(policy.add_engine(engines[1]))  # it has seen a newer number than the policy's
        while engines[1] not in [member.handle for member in policy._membership.members]:
            await turn()
        assert policy.ready_engines == (engines[0],)
        await policy.update_weights()
        await adding
        assert all(holds(engine, model) for engine in engines)


async def test_a_synchronizer_waits_for_another_and_says_for_whom_if_it_takes_too_long() -> None:
    lock = asyncsync.RolloutLock("shared")
    engine = ToldEngine(zoo(50))
    async with (
        WeightSynchronizer(Zoo(1), [engine], lock=lock, timeout=60) as first,
        WeightSynchronizer(Zoo(2), [engine], lock=lock, timeout=0.2) as second,
    ):
        receiving = asyncio.Event()

        async def hang() -> None:
            receiving.set()
            await asyncio.Event().wait()

        engine.before["receive_weights"] = hang
        updating = asyncio.create_task(first.update_weights())
        await receiving.wait()
        with pytest.raises(asyncsync.WeightUpdateTimeoutError, match=r"another synchronizer .*asyncsync weight update"):
            await second.update_weights()
        assert engine.calls.count("describe_engine") == 1, "the second has not touched it"
        updating.cancel()
        await asyncio.wait([updating])
        await second.update_weights()


async def test_membership_cannot_be_changed_inside_generation() -> None:
    async with synced(count=1) as (_, engines, synchronizer):
        await synchronizer.update_weights()
        async with synchronizer.generation():
            for changing in (
                synchronizer.add_engine(ToldEngine(zoo(60))),
                synchronizer.remove_engine(engines[0]),
                synchronizer.connect(),
            ):
                with pytest.raises(asyncsync.LockError, match=r"\(\) inside generation\(\) would wait for itself"):
                    await changing
