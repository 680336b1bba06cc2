"""The memory-saver guard: work that must not allocate from memory the saver may unmap.

torch_memory_saver keeps its on/off flag, and torch its ``use_mem_pool``, *per thread*. A ``disable()`` held across an
``await`` on the loop's thread would switch tracking off for every other coroutine, would not cover worker threads, and
breaks as soon as two coroutines overlap (R9). So the flag is changed on one dedicated thread and nowhere else, and all
guarded work is sent there. This module is the only door to ``torch_memory_saver``.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

from asyncsync.errors import MemorySaverError
from asyncsync.shield import shielded
from asyncsync.threads import WorkerThread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLEANUP_TIMEOUT = 30.0
"""Seconds that leaving a guard, or a call cancelled inside it, may take before its thread is given up."""

_here = threading.local()  # how deep the guards on this thread are nested, as the saver's flag is per thread too


def saver_is_active() -> bool:
    """Whether torch_memory_saver tracks this process's allocations: preloaded, and on for new threads."""
    preloaded = "torch_memory_saver" in os.environ.get("LD_PRELOAD", "")
    return preloaded and os.environ.get("TMS_INIT_ENABLE", "0") not in ("", "0")


def _disable() -> AbstractContextManager[None]:
    from torch_memory_saver import torch_memory_saver

    context: AbstractContextManager[None] = torch_memory_saver.disable()
    return context


class MemorySaverGuard:
    """See :func:`memory_saver_guard`, which makes it."""

    def __init__(
        self,
        *,
        offload: bool | None,
        thread: WorkerThread | None,
        disable: Callable[[], AbstractContextManager[None]] | None,
    ) -> None:
        self.active = offload is not False and (disable is not None or saver_is_active())
        self._own_thread = thread is None
        self._thread = thread or WorkerThread("asyncsync-guard")
        self._disable = disable or _disable
        self._context: AbstractContextManager[None] | None = None
        self._entered = False

    async def __aenter__(self) -> Self:
        if self.active:
            try:
                await self._thread.run(self._enter)
            except asyncio.CancelledError:
                self._thread.submit(self._leave)  # queued behind whatever the entry came to
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.active:
                await shielded(self._thread.run(self._leave), CLEANUP_TIMEOUT)
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            self._thread.close()
            if error is None:
                raise MemorySaverError("leaving the memory-saver guard failed; its thread is given up") from failure
            error.add_note(f"leaving the memory-saver guard failed too: {failure!r}")
        finally:
            if self._own_thread:
                self._thread.close()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, on_cancel: Callable[[], object] | None = None) -> T:
        """Run blocking work on the guard's thread, in order.

        Cancelled, it waits until the running call has returned (at most :data:`CLEANUP_TIMEOUT` seconds), so that the
        guard is never left while guarded work goes on.

        Args:
            function: What to run.
            args: Its arguments.
            on_cancel: Called when the wait is cancelled, to make a call that can be stopped return sooner.
        """
        future = self._thread.submit(function, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if on_cancel is not None:
                on_cancel()
            if not future.cancel() and not future.done():
                with suppress(TimeoutError):
                    await shielded(self._thread.run(lambda: None), CLEANUP_TIMEOUT)
            raise

    def _enter(self) -> None:
        depth = getattr(_here, "depth", 0)
        if depth == 0:
            context = self._disable()
            context.__enter__()
            self._context = context
        _here.depth = depth + 1
        self._entered = True

    def _leave(self) -> None:
        if not self._entered:
            return
        self._entered = False
        _here.depth -= 1
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)


def memory_saver_guard(
    *,
    offload: bool | None = None,
    thread: WorkerThread | None = None,
    disable: Callable[[], AbstractContextManager[None]] | None = None,
) -> MemorySaverGuard:
    """Keep torch_memory_saver from tracking what guarded work allocates.

    Example:
        >>> async with memory_saver_guard() as guarded:
        ...     group = await guarded.run(create_process_group)

    Entering and leaving wait; without an active saver they do nothing, and no thread is started until work is given.

    Args:
        offload: False: the trainer is not offloaded, never enter ``disable()``. True or None: enter it if
            torch_memory_saver is active in this process (preloaded, with ``TMS_INIT_ENABLE=1``).
        thread: The thread that owns the guard; guards on the same thread nest. None: one of the guard's own.
        disable: What makes the context to enter; the saver's own ``disable()`` unless replaced.

    Raises:
        MemorySaverError: Leaving ``disable()`` failed. The thread is given up: its flag is unknown.
    """
    return MemorySaverGuard(offload=offload, thread=thread, disable=disable)
