"""Clean-up that comes to its end, whatever cancels the one who waits for it (R7).

``anyio.CancelScope(shield=True)`` holds off the cancellations of anyio's own scopes, and no others: ``task.cancel()``,
``asyncio.timeout`` and Ray cancel the task itself. Clean-up that is cut off there leaves locks held and engines shut.
So it runs in a task of its own, and a cancellation that comes meanwhile waits until that is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

CLEANUP_TIMEOUT = 10.0
"""Seconds for one step of clean-up."""


async def shielded(cleanup: Coroutine[Any, Any, T], timeout: float = 3 * CLEANUP_TIMEOUT) -> T:
    """Run clean-up to its end.

    Args:
        cleanup: A coroutine; it runs in a task of its own.
        timeout: Seconds it may take.

    Returns:
        What it returned.

    Raises:
        TimeoutError: It took longer, and was cancelled.
        asyncio.CancelledError: The caller was cancelled meanwhile, natively; raised once the clean-up is over.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(cleanup, name="asyncsync clean-up")
    deadline = loop.time() + timeout
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done() and loop.time() < deadline:
            try:
                await asyncio.wait([task], timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
    if not task.done():
        task.cancel()
    if cancelled is not None:
        if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
            cancelled.add_note(f"clean-up failed too: {failure!r}")
        raise cancelled
    if not task.done():
        raise TimeoutError(f"clean-up took longer than {timeout:.3g} s")
    return task.result()
