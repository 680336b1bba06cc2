"""The memory-saver guard: work that must not allocate from memory the saver may unmap.

torch_memory_saver keeps its on/off flag, and torch its ``use_mem_pool``, *per thread*. A ``disable()`` held across an
``await`` on the loop's thread would switch tracking off for every other coroutine, would not cover worker threads, and
breaks as soon as two coroutines overlap (R9). So the flag is changed on one dedicated thread and nowhere else, and all
guarded work is sent there.

Guards on one thread share one *section*: the first to enter enters ``disable()``, and the last to leave leaves it, in
whatever order they go. Whether there is anything to enter, the thread itself is asked: its flag is all that counts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

import torch

from asyncsync.errors import ClosedError, MemorySaverError
from asyncsync.memory_saver import door
from asyncsync.memory_saver.status import memory_saver_status
from asyncsync.shield import shielded
from asyncsync.threads import WorkerThread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLEANUP_TIMEOUT = 30.0
"""Seconds that leaving a guard, or a call cancelled inside it, may take before its thread is given up."""

Disable = Callable[[], AbstractContextManager[None]]


class _Section(threading.local):
    """A thread's section: how many guards are in it, and what is left when the last one goes."""

    guards = 0
    context: AbstractContextManager[None] | None = None
    is_broken = False

    def enter(self, disable: Disable) -> None:
        if self.is_broken:  # whoever was queued behind the exit that failed
            raise MemorySaverError("another guard could not be left on this thread: it is given up")
        if self.guards == 0:
            context = disable()
            context.__enter__()
            self.context = context
        self.guards += 1

    def leave(self) -> None:
        self.guards -= 1
        if self.guards == 0 and self.context is not None:
            context, self.context = self.context, None
            self.is_broken = True  # until it is not
            context.__exit__(None, None, None)
            self.is_broken = False


_section = _Section()


def _untracked() -> AbstractContextManager[None]:
    """The saver's ``disable()``, if it tracks the thread that asks."""
    return door.disable() if door.is_tracked_here() else nullcontext()


class MemorySaverGuard:
    """See :func:`memory_saver_guard`, which makes it.

    Attributes:
        active: Whether entering it goes to its thread, since the saver may track that.
    """

    def __init__(
        self, *, offload: bool | None, thread: WorkerThread | None, device: int | None, disable: Disable | None
    ) -> None:
        self.active = offload is not False and (disable is not None or door.hook() is not None)
        self._own_thread = thread is None
        self._thread = thread or WorkerThread("asyncsync-guard")
        self._device = device
        self._disable = disable or _untracked
        self._is_inside = False
        self._entered = False  # on its thread

    def __repr__(self) -> str:
        state = "entered" if self._is_inside else "not entered"
        return f"<MemorySaverGuard {state}{'' if self.active else ', nothing to guard'}: {self._thread!r}>"

    async def __aenter__(self) -> Self:
        if self._is_inside:
            raise MemorySaverError("this guard is entered already: make another, guards nest")
        self._is_inside = True
        if self.active:
            try:
                await self._thread.run(self._enter, self._current_device())
            except asyncio.CancelledError:
                self.leave_behind()
                raise
            except Exception as error:
                self._is_inside = False
                self._end_own_thread()
                raise MemorySaverError(
                    f"the memory-saver guard could not be entered: {type(error).__name__}: {error} "
                    f"({memory_saver_status()})"
                ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_inside = False
        try:
            if self.active:
                left = self._thread.submit(self._leave)  # at once: it is left also if nobody waits for that
                await shielded(_done(left), CLEANUP_TIMEOUT)
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            self._thread.close()
            if error is None:
                raise MemorySaverError("leaving the memory-saver guard failed; its thread is given up") from failure
            error.add_note(f"leaving the memory-saver guard failed too: {failure!r}")
        finally:
            self._end_own_thread()

    def run_behind(self, function: Callable[[], object]) -> None:
        """Enter it, run something, and leave it, behind what runs already. Does not wait; nobody hears of an error."""
        self._thread.submit(self.run_here, function)

    def run_here(self, function: Callable[[], T]) -> T:
        """Enter it, run something, and leave it, on its thread: for whoever is there. Blocks."""
        if not self.active:
            return function()
        self._enter(self._device)
        try:
            return function()
        finally:
            self._leave()

    def leave_behind(self) -> None:
        """Have it left once what it runs is over. Does not wait, and nobody hears of an error."""
        self._is_inside = False
        with suppress(ClosedError):  # a thread that was given up is nobody's any more
            self._thread.submit(self._leave)
        self._end_own_thread()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, on_cancel: Callable[[], object] | None = None) -> T:
        """Run blocking work on the guard's thread, in order, with the caller's context variables and CUDA device.

        Cancelled, it waits until the running call has returned (at most :data:`CLEANUP_TIMEOUT` seconds), so that the
        guard is never left while guarded work goes on.

        Args:
            function: What to run.
            args: Its arguments.
            on_cancel: Called when the wait is cancelled, to make a call that can be stopped return sooner.

        Raises:
            MemorySaverError: The guard is not entered: the work would be tracked.
        """
        if not self._is_inside:
            raise MemorySaverError("run() outside of the guard: use it inside of async with memory_saver_guard()")
        future = self._thread.submit(_on_device, self._current_device(), partial(function, *args))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if on_cancel is not None:
                on_cancel()
            if not future.cancel() and not future.done():
                with suppress(TimeoutError, ClosedError):
                    await shielded(self._thread.run(lambda: None), CLEANUP_TIMEOUT)
            raise

    def _current_device(self) -> int | None:
        if self._device is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._device
        return torch.cuda.current_device()

    def _end_own_thread(self) -> None:
        if self._own_thread:
            self._thread.close()

    def _enter(self, device: int | None) -> None:
        # Before disable(): the memory pool that it makes is the current device's.
        _on_device(device, partial(_section.enter, self._disable))
        self._entered = True

    def _leave(self) -> None:
        if not self._entered:
            return
        self._entered = False
        try:
            _section.leave()
        except BaseException:
            self._thread.close()  # its flag is unknown, whoever hears of it
            raise


async def _done(future: Future[None]) -> None:
    await asyncio.shield(asyncio.wrap_future(future))  # to give the wait up must not take it out of the queue


def _on_device(device: int | None, function: Callable[[], T]) -> T:
    if device is not None:  # also if it is that already: a thread is bound to a device only by setting it
        torch.cuda.set_device(device)  # and not back again: each job says which it wants
    return function()


def memory_saver_guard(
    *,
    offload: bool | None = None,
    thread: WorkerThread | None = None,
    device: int | None = None,
    disable: Disable | None = None,
) -> MemorySaverGuard:
    """Keep torch_memory_saver from tracking what guarded work allocates.

    Example:
        >>> async with memory_saver_guard() as guarded:
        ...     group = await guarded.run(create_process_group)

    Entering and leaving wait. Where the saver's preload library is not loaded they do nothing, and no thread is started
    until work is given; :func:`asyncsync.memory_saver_status` tells which case holds. Guards with threads of their own
    are independent of each other. Threads that guarded work starts itself are not covered: their flag is their own.

    Args:
        offload: False: the trainer is not offloaded, never enter ``disable()``. True or None: enter it where the saver
            tracks the guard's thread.
        thread: The thread that owns the guard; guards on the same thread share one section. None: one of its own.
        device: The CUDA device that guarded work runs on; the caller's current one, if None and CUDA is in use.
        disable: What makes the context to enter; the saver's own ``disable()`` unless replaced.

    Raises:
        MemorySaverError: ``disable()`` could not be entered, and the error says why; or leaving it failed, and the
            thread is given up: its flag is unknown.
    """
    return MemorySaverGuard(offload=offload, thread=thread, device=device, disable=disable)
