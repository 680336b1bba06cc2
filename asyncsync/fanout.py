"""Several calls at once, with the endings an update needs: the first failure wins, or everyone is heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from asyncsync.errors import LinkLostError
from asyncsync.shield import CLEANUP_TIMEOUT, shielded

K = TypeVar("K")
T = TypeVar("T")


GRACE = 0.3
"""Seconds that the cause of a lost link may take to be heard."""


async def race(calls: Mapping[K, Awaitable[T]]) -> dict[K, T]:
    """Run calls together; the first to fail ends the others, and its error is raised as it is (R5).

    A lost link is mostly heard before the failure at its other end that it comes from: then the others have
    :data:`GRACE` seconds to tell the cause, and that is raised. If none does, the error tells what all have heard.

    Cancelled, it cancels every call and waits until each has ended.
    """
    failures: list[BaseException] = []

    def note(task: asyncio.Future[T]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)

    tasks = {key: asyncio.ensure_future(call) for key, call in calls.items()}
    for task in tasks.values():
        task.add_done_callback(note)
    try:
        if tasks:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            await _wait_for_cause(failures, tasks.values())
    finally:
        await end(tasks.values())
    if failures:
        raise _cause(failures)
    return {key: task.result() for key, task in tasks.items()}


def _cause(failures: Sequence[BaseException]) -> BaseException:
    lost = [failure for failure in failures if isinstance(failure, LinkLostError)]
    if len(lost) < len(failures):
        return next(failure for failure in failures if failure not in lost)
    for other in lost[1:]:
        lost[0].peers |= other.peers
        lost[0].witnesses |= other.witnesses
    return lost[0]


async def _wait_for_cause(failures: Sequence[BaseException], tasks: Iterable[asyncio.Future[Any]]) -> None:
    deadline = asyncio.get_running_loop().time() + GRACE
    while failures and all(isinstance(failure, LinkLostError) for failure in failures):
        running = [task for task in tasks if not task.done()]
        left = deadline - asyncio.get_running_loop().time()
        if not running or left <= 0:
            await asyncio.sleep(0)  # one that has failed in this very moment is noted now
            return
        await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_EXCEPTION)


async def settle(calls: Mapping[K, Awaitable[T]]) -> dict[K, T | Exception]:
    """Run calls together and wait for all; an error takes the place of its call's result.

    Cancelled, it cancels every call and waits until each has ended.
    """
    tasks = {key: asyncio.ensure_future(call) for key, call in calls.items()}
    try:
        if tasks:
            await asyncio.wait(tasks.values())
    finally:
        await end(tasks.values())
    results: dict[K, T | Exception] = {}
    for key, task in tasks.items():
        error = task.exception()
        if error is None:
            results[key] = task.result()
        elif isinstance(error, Exception):
            results[key] = error
        else:
            raise error
    return results


@asynccontextmanager
async def beside(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run work beside the body, and end it with the body; an error of either ends both, and is raised as itself."""
    task = asyncio.current_task()
    assert task is not None
    cancellations = task.cancelling()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            yield
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        if task.cancelling() > cancellations:  # passed on, whatever failed in the same moment
            raise asyncio.CancelledError from errors
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


def is_ours(error: BaseException) -> bool:
    """Whether this is for the one who called, not a failure of the one who was called.

    A CancelledError in a task that nobody cancelled is such a failure: it comes from the other side.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


async def end(tasks: Collection[asyncio.Future[Any]], timeout: float = CLEANUP_TIMEOUT) -> None:
    """Cancel tasks, wait until each has ended (bounded: one that does not let go is left), and note their errors."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    for task in tasks:
        task.add_done_callback(_seen)
    if running:
        await shielded(_ended(running, timeout), timeout + 1)


async def _ended(running: Collection[asyncio.Future[Any]], timeout: float) -> None:
    await asyncio.wait(running, timeout=timeout)


def _seen(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # one error is raised for all, or each is handed over
