"""The one thread of a trainer rank on which it connects, reads, sends and cleans up, and the guard on it (R9).

How many guarded sections an update has is part of the promise to an offloaded trainer: one to connect, with all that
comes before it, and one to transfer, with the clean-up after it; if all is connected already, one. But a conductor
connects in several calls (it asks for the weights, opens groups, joins them), and whether there is anything to connect
shows only after the first. So the section of the first is left open for the next ones, and ends with the transfer: at
its beginning if a group was opened, at its end if not. The thread is nobody else's, so an open section is in nobody's
way; if no transfer comes, it ends when a group is given up again, or after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from asyncsync.guard import MemorySaverGuard, memory_saver_guard
from asyncsync.memory_saver import door
from asyncsync.memory_saver.status import memory_saver_status
from asyncsync.threads import RenewedThread, WorkerThread

T = TypeVar("T")

CONNECTING_TIMEOUT = 10.0
"""Seconds after the last call that the section for connecting stays open, if no transfer comes."""

_log = logging.getLogger("asyncsync")


class SenderThread:
    """A thread, replaced if a guard had to give it up, and the guarded sections on it.

    Args:
        offload: Whether the trainer is offloaded; None to find out.

    Attributes:
        device: The CUDA device of the weights, if it is known.
    """

    def __init__(self, *, offload: bool | None) -> None:
        self._offload = offload
        self._threads = RenewedThread("asyncsync-sender")
        self._thread = self._threads.current
        # A control call comes on another thread than the one that has set the device: that of the constructor.
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._connecting: MemorySaverGuard | None = None
        self._opened: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        if offload is not False:
            self._prepare()

    def _prepare(self) -> None:
        status = memory_saver_status()
        if (self._offload and not status.guarded) or (status.guarded and status.advice):
            _log.warning("%s", status)
        if status.guarded:
            door.start()  # here, where the trainer itself is not using it

    @property
    def worker(self) -> WorkerThread:
        """The thread."""
        if self._threads.current is not self._thread:  # the section that was open went with the last one
            self._thread, self._connecting = self._threads.current, None
        return self._thread

    def guard(self) -> MemorySaverGuard:
        """A guard on the thread; those that overlap are one section."""
        return memory_saver_guard(offload=self._offload, thread=self.worker, device=self.device)

    async def run_connecting(self, function: Callable[..., T], *args: Any) -> T:
        """Run what comes before connecting, in the section for that."""
        thread, guard = self.worker, self._connecting
        if guard is None:
            guard = self.guard()
            if guard.active:
                self._connecting, self._opened = guard, set()  # at once: whoever comes now is queued behind the entry
                try:
                    await guard.__aenter__()
                except BaseException:
                    if self._connecting is guard:
                        self._connecting = None
                    raise
        self._stay_open()
        # In a guard of its own, too: that of another who came before may have come to nothing. Cancelled, it is not
        # waited for: the section is left behind it.
        return await thread.run(self.guard().run_here, partial(function, *args))

    def opened(self, connection: str) -> None:
        """A group is being joined."""
        if self._connecting is not None:
            self._opened.add(connection)
            self._stay_open()

    async def left(self, connection: str) -> None:
        """A group was left; if it was opened in the section for connecting, that has failed, and ends."""
        if connection in self._opened:
            await self._end_connecting()

    @asynccontextmanager
    async def transferring(self) -> AsyncIterator[MemorySaverGuard]:
        """The section for a transfer: the one that is open, if no group was opened in it.

        Raises:
            MemorySaverError: It could not be entered or left.
        """
        if self._opened:
            await self._end_connecting()
        async with AsyncExitStack() as stack:
            if (connecting := self._take_connecting()) is not None:
                stack.push_async_exit(connecting)
            yield await stack.enter_async_context(self.guard())

    def _stay_open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._connecting is not None:
            self._timer = asyncio.get_running_loop().call_later(CONNECTING_TIMEOUT, self._time_out)

    def _time_out(self) -> None:
        ending = asyncio.ensure_future(self._end_connecting())
        ending.add_done_callback(_log_failure)

    async def _end_connecting(self) -> None:
        if (connecting := self._take_connecting()) is not None:
            await connecting.__aexit__(None, None, None)

    def _take_connecting(self) -> MemorySaverGuard | None:
        connecting, self._connecting, self._opened = self._connecting, None, set()
        self._stay_open()
        return connecting

    def clean_up(self, function: Callable[[], object]) -> None:
        """Run clean-up that does not block, as guarded work if there is a guard. Does not wait for it then."""
        guard = self.guard()
        if guard.active and not self.worker.closed:
            guard.run_behind(function)
        else:
            function()

    def close(self) -> None:
        """Let the thread end after the jobs it has. Does not wait."""
        if not self._thread.closed and (connecting := self._take_connecting()) is not None:
            connecting.leave_behind()
        self._threads.close()


def _log_failure(ending: asyncio.Future[None]) -> None:
    if not ending.cancelled() and (failure := ending.exception()) is not None:
        _log.warning("%s", failure)
