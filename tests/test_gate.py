"""The gate between generations and a change of weights."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncsync.engines.gate import GenerationGate
from asyncsync.errors import TaintedEngineError

pytestmark = pytest.mark.asyncio


async def test_a_pause_waits_for_the_last_generation_and_holds_back_new_ones() -> None:
    gate = GenerationGate()
    await gate.enter()
    await gate.enter()
    empty = gate.shut()
    newcomer = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.leave()
    assert not empty.done()
    gate.leave()
    assert empty.done()
    assert not newcomer.done()
    gate.resume()
    await newcomer
    assert gate.inside == 1


async def test_who_is_let_in_counts_before_it_runs() -> None:
    gate = GenerationGate()
    gate.shut()
    newcomer = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.resume()
    empty = gate.shut()  # in the same moment: the newcomer has not run yet
    assert not empty.done()
    await newcomer
    gate.leave()
    assert empty.done()


async def test_a_newcomer_that_is_cancelled_leaves_no_trace() -> None:
    gate = GenerationGate()
    gate.shut()
    newcomer = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    newcomer.cancel()
    await asyncio.wait([newcomer])
    assert gate.waiting == 0
    gate.resume()
    assert gate.inside == 0


async def test_a_newcomer_that_is_cancelled_in_the_moment_it_is_let_in_gives_its_entry_back() -> None:
    gate = GenerationGate()
    gate.shut()
    newcomer = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.resume()
    newcomer.cancel()
    await asyncio.wait([newcomer])
    assert newcomer.cancelled()
    assert gate.inside == 0
    assert gate.shut().done()


async def test_threads_wait_at_the_same_gate() -> None:
    gate, entered = GenerationGate(), threading.Event()
    gate.shut()

    def generate() -> None:
        gate.enter_blocking()
        entered.set()

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    while gate.waiting == 0:  # noqa: ASYNC110 - the gate has no event for a test
        await asyncio.sleep(0)
    assert not entered.is_set()
    gate.resume()
    await asyncio.to_thread(entered.wait, 10)
    assert gate.inside == 1
    thread.join(10)


async def test_one_that_was_let_in_and_has_not_heard_of_it_is_turned_away_by_a_bar() -> None:
    gate = GenerationGate()
    gate.shut()
    newcomer = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.resume()
    gate.bar("it missed version 4")
    with pytest.raises(TaintedEngineError, match="missed version 4"):
        await newcomer
    assert gate.inside == 0


async def test_a_tainted_engine_turns_away_who_waits_and_who_comes_until_it_is_opened() -> None:
    gate = GenerationGate()
    gate.shut()
    newcomer = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.bar("half of update 3")
    with pytest.raises(TaintedEngineError, match="half of update 3"):
        await newcomer
    with pytest.raises(TaintedEngineError):
        await gate.enter()
    with pytest.raises(TaintedEngineError):
        gate.enter_blocking()
    assert gate.shut().done()
    with pytest.raises(TaintedEngineError):
        await gate.enter()
    gate.resume()
    await gate.enter()
    assert "open" in repr(gate)
