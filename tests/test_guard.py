"""The memory-saver guard, over a stand-in for the saver that is as per-thread and as touchy as the real one."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from asyncsync.errors import MemorySaverError
from asyncsync.guard import memory_saver_guard
from asyncsync.threads import WorkerThread

pytestmark = pytest.mark.asyncio


class FakeSaver:
    """``disable()`` with the real one's habits: the flag is the thread's, and entering twice is an error."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.sections = 0
        self.fail_on_exit = False

    @property
    def tracking(self) -> bool:
        return getattr(self._thread, "tracking", True)

    @contextmanager
    def disable(self) -> Iterator[None]:
        assert self.tracking, "disable() should be called only when it is active"
        self._thread.tracking = False
        self.sections += 1
        try:
            yield
        finally:
            self._thread.tracking = True
            if self.fail_on_exit:
                raise RuntimeError("the saver broke")


async def occupied(thread: WorkerThread) -> threading.Event:
    """A thread that is busy now, until this is set."""
    began, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        began.set()
        go_on.wait(10)

    thread.submit(busy)
    await asyncio.to_thread(began.wait, 10)
    return go_on


async def test_guarded_work_is_untracked_and_nothing_else_is() -> None:
    saver = FakeSaver()
    async with memory_saver_guard(disable=saver.disable) as guarded:
        assert not await guarded.run(lambda: saver.tracking)
        assert saver.tracking  # the loop's thread
        assert await asyncio.to_thread(lambda: saver.tracking)  # any other
    assert saver.sections == 1


async def test_without_offload_it_enters_nothing_and_starts_no_thread() -> None:
    saver, before = FakeSaver(), threading.active_count()
    async with memory_saver_guard(offload=False, disable=saver.disable) as guarded:
        assert threading.active_count() == before
        assert await guarded.run(lambda: saver.tracking)
    assert saver.sections == 0
    assert not guarded.active


async def test_where_the_saver_is_not_loaded_it_does_nothing() -> None:
    before = threading.active_count()
    async with memory_saver_guard(offload=True) as guarded:
        assert not guarded.active
        assert threading.active_count() == before
        assert await guarded.run(lambda: 3) == 3


async def test_guards_on_one_thread_nest_in_one_section() -> None:
    saver, thread = FakeSaver(), WorkerThread("shared")
    async with memory_saver_guard(disable=saver.disable, thread=thread) as outer:
        async with memory_saver_guard(disable=saver.disable, thread=thread) as inner:
            assert not await inner.run(lambda: saver.tracking)
        assert not await outer.run(lambda: saver.tracking)
    assert saver.sections == 1
    assert await thread.run(lambda: saver.tracking)
    thread.close()


async def test_guards_on_one_thread_overlap_in_any_order() -> None:
    saver, thread = FakeSaver(), WorkerThread("shared")
    first, second = (memory_saver_guard(disable=saver.disable, thread=thread) for _ in range(2))
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert not await second.run(lambda: saver.tracking), "the one that entered the section may leave first"
    await second.__aexit__(None, None, None)
    assert saver.sections == 1
    assert await thread.run(lambda: saver.tracking)
    thread.close()


async def test_guards_of_their_own_overlap_in_any_order() -> None:
    saver = FakeSaver()
    first, second = memory_saver_guard(disable=saver.disable), memory_saver_guard(disable=saver.disable)
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert not await second.run(lambda: saver.tracking)
    await second.__aexit__(None, None, None)


@pytest.mark.parametrize("how", ["asyncio", "anyio"])
async def test_cancelled_in_the_middle_it_waits_for_the_running_call_and_leaves_the_flag_right(how: str) -> None:
    saver, thread = FakeSaver(), WorkerThread("mine")
    began, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        began.set()
        go_on.wait(10)
        ended.append(saver.tracking)

    scope = anyio.CancelScope()

    async def guarded_work() -> None:
        with scope:
            async with memory_saver_guard(disable=saver.disable, thread=thread) as guarded:
                await guarded.run(work)

    task = asyncio.create_task(guarded_work())
    await asyncio.to_thread(began.wait, 10)
    if how == "asyncio":
        task.cancel()
    else:
        scope.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    await asyncio.wait([task])
    assert ended == [False]
    assert await thread.run(lambda: saver.tracking)
    thread.close()


@pytest.mark.parametrize("offload", [None, False])
async def test_a_call_that_is_cancelled_has_ended_when_its_wait_has(offload: bool | None) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        began.set()
        go_on.wait(10)
        ended.set()

    async def guarded_work() -> None:
        async with memory_saver_guard(offload=offload, disable=FakeSaver().disable) as guarded:
            try:
                await guarded.run(work)
            finally:
                seen.append(ended.is_set())

    task = asyncio.create_task(guarded_work())
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert seen == [True]


async def test_cancelled_on_entry_it_is_left_again() -> None:
    saver, thread, began, go_on = FakeSaver(), WorkerThread("mine"), threading.Event(), threading.Event()

    def busy() -> None:
        began.set()
        go_on.wait(10)

    async def enter() -> None:
        async with memory_saver_guard(disable=saver.disable, thread=thread):
            pytest.fail("entered")

    thread.submit(busy)
    await asyncio.to_thread(began.wait, 10)
    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    go_on.set()
    assert await thread.run(lambda: saver.tracking)
    thread.close()


async def test_an_exit_that_fails_is_reported_and_its_thread_is_given_up() -> None:
    saver, thread = FakeSaver(), WorkerThread("mine")
    saver.fail_on_exit = True
    with pytest.raises(MemorySaverError) as caught:
        async with memory_saver_guard(disable=saver.disable, thread=thread):
            pass
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "closed" in repr(thread)


async def test_a_guard_that_is_queued_behind_an_exit_that_fails_is_not_entered() -> None:
    saver, thread = FakeSaver(), WorkerThread("mine")
    first, second = (memory_saver_guard(disable=saver.disable, thread=thread) for _ in range(2))
    await first.__aenter__()
    go_on = await occupied(thread)
    saver.fail_on_exit = True
    leaving = asyncio.create_task(first.__aexit__(None, None, None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # its clean-up is a task of its own
    entering = asyncio.create_task(second.__aenter__())
    await asyncio.sleep(0)
    left = thread.submit(lambda: saver.tracking)
    go_on.set()
    for outcome in await asyncio.gather(leaving, entering, return_exceptions=True):
        assert isinstance(outcome, MemorySaverError)
    assert left.result(10), "nothing is left open"
    assert saver.sections == 1


async def test_an_exit_that_fails_and_that_nobody_waits_for_gives_its_thread_up_all_the_same() -> None:
    saver, thread = FakeSaver(), WorkerThread("mine")
    guard = memory_saver_guard(disable=saver.disable, thread=thread)
    await guard.__aenter__()
    saver.fail_on_exit = True
    go_on = await occupied(thread)
    guard.leave_behind()
    behind = thread.submit(lambda: None)
    go_on.set()
    behind.result(10)
    assert thread.closed


async def test_it_is_left_also_when_the_wait_for_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.guard.CLEANUP_TIMEOUT", 0.05)
    saver, thread = FakeSaver(), WorkerThread("mine")
    guard = memory_saver_guard(disable=saver.disable, thread=thread)
    await guard.__aenter__()
    go_on = await occupied(thread)
    leaving = asyncio.create_task(guard.__aexit__(None, None, None))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    after = thread.submit(lambda: saver.tracking)
    go_on.set()
    assert after.result(10), "left behind what it was waiting for"
    thread.close()


async def test_a_call_that_can_be_stopped_is_told_when_its_wait_is_cancelled() -> None:
    began, stop = threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return stop.wait(10)

    async def guarded_work() -> None:
        async with memory_saver_guard(disable=FakeSaver().disable) as guarded:
            await guarded.run(work, on_cancel=stop.set)

    task = asyncio.create_task(guarded_work())
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_an_exit_that_fails_rides_along_with_the_first_error() -> None:
    saver = FakeSaver()
    saver.fail_on_exit = True
    with pytest.raises(KeyError) as caught:
        async with memory_saver_guard(disable=saver.disable):
            raise KeyError("first")
    assert any("guard failed too" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("offload", [None, False])
async def test_work_outside_of_it_is_refused(offload: bool | None) -> None:
    thread = WorkerThread("mine")
    guard = memory_saver_guard(offload=offload, disable=FakeSaver().disable, thread=thread)
    with pytest.raises(MemorySaverError, match="outside of the guard"):
        await guard.run(lambda: None)
    assert "not entered" in repr(guard)
    async with guard:
        with pytest.raises(MemorySaverError, match="entered already"):
            await guard.__aenter__()
        assert "not entered" not in repr(guard)
    with pytest.raises(MemorySaverError, match="outside of the guard"):
        await guard.run(lambda: None)
    thread.close()


async def test_one_that_was_left_may_be_entered_again() -> None:
    saver, thread = FakeSaver(), WorkerThread("mine")
    guard = memory_saver_guard(disable=saver.disable, thread=thread)
    for _ in range(2):
        async with guard as guarded:
            assert not await guarded.run(lambda: saver.tracking)
        assert await thread.run(lambda: saver.tracking)
    thread.close()


async def test_it_gives_its_thread_up_when_it_cannot_be_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.guard.CLEANUP_TIMEOUT", 0.05)
    thread, began, go_on = WorkerThread("mine"), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(10)

    async def guarded_work() -> None:
        async with memory_saver_guard(disable=FakeSaver().disable, thread=thread) as guarded:
            await guarded.run(work)

    task = asyncio.create_task(guarded_work())
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled(), "both waits are bounded"
    assert thread.closed
    go_on.set()


async def test_context_variables_travel_with_the_work() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(5)
    async with memory_saver_guard(disable=FakeSaver().disable) as guarded:
        assert await guarded.run(variable.get) == 5
