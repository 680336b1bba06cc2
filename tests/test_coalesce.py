"""Requests that share a run."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncsync.coalesce import Coalescer
from asyncsync.errors import ClosedError

pytestmark = pytest.mark.asyncio


class Work:
    """Runs that are counted, and that end when told."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.active = 0
        self.gate = asyncio.Event()
        self.started = asyncio.Event()
        self.fail: Exception | None = None

    async def __call__(self) -> int:
        self.begun += 1
        self.active += 1
        assert self.active == 1
        self.started.set()
        try:
            await self.gate.wait()
            if self.fail is not None:
                raise self.fail
            return self.begun
        finally:
            await asyncio.sleep(0)  # undoing takes a while
            self.active -= 1
            self.ended += 1


async def started(work: Work) -> None:
    await work.started.wait()
    work.started.clear()


async def test_requests_made_together_share_one_run() -> None:
    work = Work()
    work.gate.set()
    coalescer = Coalescer(work, "test")
    assert await asyncio.gather(*(coalescer.request() for _ in range(5))) == [1] * 5


async def test_requests_during_a_run_share_the_next_one() -> None:
    work = Work()
    coalescer = Coalescer(work, "test")
    first = asyncio.create_task(coalescer.request())
    await started(work)
    later = [asyncio.create_task(coalescer.request()) for _ in range(4)]
    await asyncio.sleep(0)
    assert coalescer.callers == 5
    work.gate.set()
    assert await first == 1
    assert await asyncio.gather(*later) == [2] * 4
    assert work.begun == 2
    assert not coalescer.running


async def test_every_caller_gets_the_error_and_the_next_request_runs_anew() -> None:
    work = Work()
    coalescer = Coalescer(work, "test")
    work.fail = KeyError("broken")
    work.gate.set()
    results = await asyncio.gather(*(coalescer.request() for _ in range(3)), return_exceptions=True)
    assert all(result is work.fail for result in results)
    work.fail = None
    assert await coalescer.request() == 2


async def test_a_caller_that_cancels_takes_nothing_from_the_others() -> None:
    work = Work()
    coalescer = Coalescer(work, "test")
    staying, leaving = (asyncio.create_task(coalescer.request()) for _ in range(2))
    await started(work)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    assert work.active == 1
    work.gate.set()
    assert await staying == 1


@pytest.mark.parametrize("how", ["asyncio", "anyio"])
async def test_the_last_caller_that_cancels_ends_the_run_and_waits_for_its_end(how: str) -> None:
    work = Work()
    coalescer = Coalescer(work, "test")
    scope = anyio.CancelScope()

    async def call() -> None:
        with scope:
            await coalescer.request()

    caller = asyncio.create_task(call())
    await started(work)
    if how == "asyncio":
        caller.cancel()
    else:
        scope.cancel()
    await asyncio.wait([caller])
    assert (work.begun, work.ended, work.active) == (1, 1, 0)
    work.gate.set()
    assert await coalescer.request() == 2


async def test_a_round_that_nobody_waits_for_any_more_never_begins() -> None:
    work = Work()
    coalescer = Coalescer(work, "test")
    first = asyncio.create_task(coalescer.request())
    await started(work)
    second = asyncio.create_task(coalescer.request())
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    work.gate.set()
    assert await first == 1
    assert await coalescer.request() == 2


async def test_cancelled_before_the_run_took_its_first_step() -> None:
    work = Work()
    coalescer = Coalescer(work, "test")
    caller = asyncio.create_task(coalescer.request())
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    work.gate.set()
    assert await coalescer.request() == work.begun


async def test_closing_ends_the_run_and_tells_everyone_who_waits() -> None:
    work = Work()
    coalescer = Coalescer(work, "test")
    first = asyncio.create_task(coalescer.request())
    await started(work)
    second = asyncio.create_task(coalescer.request())
    await asyncio.sleep(0)
    await coalescer.aclose()
    assert work.ended == 1
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert all(isinstance(result, ClosedError) for result in results)
    with pytest.raises(ClosedError):
        await coalescer.request()
    assert work.begun == 1


class Halfway(Work):
    """A run of two parts: it says that it is halfway when told, and ends when told."""

    def __init__(self) -> None:
        super().__init__()
        self.half = asyncio.Event()
        self.coalescer = Coalescer(self, "test")

    async def __call__(self) -> int:
        await self.half.wait()
        self.coalescer.halfway()
        return await super().__call__()


async def test_who_starts_a_run_goes_on_halfway_and_has_a_share_in_it_until_the_end() -> None:
    work = Halfway()
    plain = asyncio.create_task(work.coalescer.request())
    starting = asyncio.create_task(work.coalescer.start())
    await asyncio.sleep(0)
    assert not starting.done()
    work.half.set()
    share = await starting
    assert [work.coalescer.started, share.done] == [True, False]
    assert not plain.done()
    plain.cancel()
    await asyncio.wait([plain])
    assert work.active == 1, "who has started it still has a share"
    work.gate.set()
    assert [await share.outcome(), await share.outcome()] == [1, 1]
    assert [work.coalescer.started, share.done] == [False, True]


async def test_a_share_that_is_left_by_the_last_ends_the_run() -> None:
    work = Halfway()
    work.half.set()
    first, second = await asyncio.gather(work.coalescer.start(), work.coalescer.start())
    await first.leave()
    await first.leave()
    assert work.active == 1
    await second.leave()
    assert work.active == 0
    for share in (first, second):
        with pytest.raises(asyncio.CancelledError):
            await share.outcome()


async def test_a_run_that_fails_before_it_is_halfway_fails_who_starts_it() -> None:
    work = Work()
    work.fail = ValueError("planned")
    work.gate.set()
    coalescer = Coalescer(work, "test")
    with pytest.raises(ValueError, match="planned"):
        await coalescer.start()
    assert coalescer.callers == 0


async def test_a_run_without_halves_is_over_when_who_starts_it_goes_on() -> None:
    work = Work()
    work.gate.set()
    share = await Coalescer(work, "test").start()
    assert share.done
    assert await share.outcome() == 1
