"""One thread that runs what it is given, in order.

Blocking work (collectives, gathers, packing, hashing, loading) must not run on an event loop (R8), and much of it must
run on *one* thread: collectives keep their order that way, and torch_memory_saver's flag belongs to a thread (R9).
A ``ThreadPoolExecutor`` of one worker would do, but it is joined when the interpreter exits, so one collective stuck
on a dead peer would hold the program for its whole timeout. This thread is a daemon, and is waited for at exit, but not
long: one that lets go of a tensor while the interpreter shuts down would end the process with SIGABRT.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeAlias, TypeVar

from asyncsync.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")
_Jobs: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"

_EXIT_TIMEOUT = 2.0  # seconds that the interpreter's exit may wait for jobs that run
_threads: weakref.WeakKeyDictionary[threading.Thread, _Jobs] = weakref.WeakKeyDictionary()


class WorkerThread:
    """A daemon thread, started by its first job, that runs jobs one at a time in the order they came.

    Args:
        name: The thread's name, for a person with a stack dump.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: _Jobs = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "idle" if self._thread is None else "started"
        return f"<WorkerThread {self.name!r}: {state}, {self._jobs.qsize()} jobs queued>"

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job; it sees the caller's context variables.

        Raises:
            ClosedError: The thread was closed.
        """
        if self._closed:
            raise ClosedError(f"thread {self.name!r} is closed")
        if self._thread is None:
            with self._starting:
                self._start()
        context = contextvars.copy_context()
        future: Future[T] = Future()
        self._jobs.put((future, lambda: context.run(function, *args, **kwargs)))
        return future

    def _start(self) -> None:
        if self._thread is not None:  # another was faster
            return
        thread = threading.Thread(target=_work, args=(self._jobs,), name=self.name, daemon=True)
        if not _threads:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _threads[thread] = self._jobs
        thread.start()
        self._thread = thread
        weakref.finalize(self, self._jobs.put, None)  # the thread does not know its owner, and ends with it

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job and wait for it.

        Cancelled, it takes the job out of the queue; a job that runs already runs on, and whatever is queued next
        starts after it.
        """
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    @property
    def closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closed

    def close(self) -> None:
        """Let the thread end after the jobs it has; more are refused. Does not wait."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)


class RenewedThread:
    """A worker thread, and another in its place once it was closed: by a guard that gave it up, say.

    Args:
        name: The threads' name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = WorkerThread(name)
        self._ended = False

    def __repr__(self) -> str:
        return f"<RenewedThread: {self._thread!r}>"

    @property
    def current(self) -> WorkerThread:
        """The thread of now."""
        if self._thread.closed and not self._ended:
            self._thread = WorkerThread(self._name)
        return self._thread

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`WorkerThread.submit`."""
        return self.current.submit(function, *args, **kwargs)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See :meth:`WorkerThread.run`."""
        return await self.current.run(function, *args, **kwargs)

    def close(self) -> None:
        """Let it end after the jobs it has, with no other in its place. Does not wait."""
        self._ended = True
        self._thread.close()


def _end_all() -> None:
    for jobs in list(_threads.values()):
        jobs.put(None)
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = function()
        except StopIteration as error:
            # A coroutine cannot raise it, so nobody who awaits this could be told.
            future.set_exception(RuntimeError(f"job raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - it is the caller's: the future hands it over
            future.set_exception(error)
        else:
            future.set_result(result)
        del job, future, function  # a thread that waits must not keep the last job's tensors alive
        result = None
