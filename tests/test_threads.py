"""The worker thread."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from asyncsync.errors import ClosedError
from asyncsync.threads import WorkerThread

pytestmark = pytest.mark.asyncio

marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker")


async def test_jobs_run_in_order_on_one_thread_with_the_callers_context() -> None:
    worker = WorkerThread("test")
    marker.set("mine")

    def job(index: int) -> tuple[int, str, str]:
        return index, threading.current_thread().name, marker.get()

    jobs = [worker.submit(job, index) for index in range(5)]
    results = [await asyncio.wrap_future(job) for job in jobs]
    assert results == [(index, "test", "mine") for index in range(5)]
    worker.close()


async def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    worker = WorkerThread("test")
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)
    assert await worker.run(lambda: 7) == 7
    worker.close()


async def test_a_cancelled_job_that_has_not_begun_never_runs_and_a_running_one_runs_on() -> None:
    worker, began, go_on = WorkerThread("test"), threading.Event(), threading.Event()
    done: list[str] = []

    def slow() -> None:
        began.set()
        go_on.wait(10)
        done.append("slow")

    running = asyncio.ensure_future(worker.run(slow))
    await asyncio.to_thread(began.wait, 10)
    queued = asyncio.ensure_future(worker.run(done.append, "queued"))
    await asyncio.sleep(0)
    running.cancel()
    queued.cancel()
    await asyncio.wait([running, queued])
    go_on.set()
    await worker.run(lambda: None)
    assert done == ["slow"]
    worker.close()


async def test_a_closed_thread_does_what_it_was_given_and_refuses_more() -> None:
    worker = WorkerThread("test")
    job = worker.submit(lambda: 1)
    worker.close()
    assert await asyncio.wrap_future(job) == 1
    with pytest.raises(ClosedError):
        worker.submit(lambda: 2)
    assert "closed" in repr(worker)


async def test_a_thread_that_waits_keeps_nothing_of_its_last_job() -> None:
    import gc
    import weakref

    class Thing:
        pass

    worker, thing = WorkerThread("test"), Thing()
    gone = weakref.ref(thing)
    await worker.run(lambda given: given, thing)
    await worker.run(lambda: None)
    del thing
    gc.collect()
    assert gone() is None
    worker.close()


@pytest.mark.exhaustive
async def test_a_job_that_never_ends_does_not_hold_the_program() -> None:
    program = (
        "import threading; from asyncsync.threads import WorkerThread;"
        "WorkerThread('stuck').submit(threading.Event().wait)"
    )
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode == 0


async def test_a_thread_ends_with_its_owner() -> None:
    import gc

    worker = WorkerThread("orphan")
    await worker.run(lambda: None)
    thread = worker._thread
    assert thread is not None
    del worker
    gc.collect()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
