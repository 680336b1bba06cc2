"""One run at a time; requests that come meanwhile share the next one (R1).

A *round* is one run of the work with everyone who waits for it. It may be joined until it begins, since until then
nothing of the weights has been read. There is at most one round running and one that waits.

IDLE -> RUNNING: a request, when no round runs. RUNNING -> RUNNING: a round ends and another waits. RUNNING -> IDLE: a
round ends and none waits. A caller that is cancelled leaves its round; when the last one leaves, a round that has not
begun is dropped, and a running one is cancelled and waited for.

A run may have a first part after which some callers go on: those that *start* a round get their share in it when the
work says that it is halfway, and await the outcome later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from asyncsync.errors import ClosedError
from asyncsync.shield import shielded

T = TypeVar("T")

LONGEST_UNDO = 120.0
"""Seconds for a run that was cancelled to end; it bounds its own clean-up."""

_log = logging.getLogger("asyncsync")


class _Round(Generic[T]):
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[T] = loop.create_future()
        self.halfway: asyncio.Future[None] = loop.create_future()
        self.callers = 0
        self.started = False  # whether some caller waits for the first part
        self.task: asyncio.Task[None] | None = None


class Share(Generic[T]):
    """A caller's share in a round, until it leaves.

    Args:
        round_: The round.
        abandon: Called when the last caller has left a round that has no outcome yet.
    """

    def __init__(self, round_: _Round[T], abandon: Callable[[_Round[T]], Awaitable[None]]) -> None:
        self._round = round_
        self._abandon = abandon
        self._left = False
        self._awaiting = 0
        round_.callers += 1

    @property
    def done(self) -> bool:
        """Whether the round has its outcome."""
        return self._round.outcome.done()

    async def halfway(self) -> None:
        """Wait until the first part is over.

        Raises:
            Exception: The round has ended before that, with this.
        """
        await asyncio.wait((self._round.halfway, self._round.outcome), return_when=asyncio.FIRST_COMPLETED)
        if self.done:
            await self.outcome()

    async def outcome(self) -> T:
        """Wait for the outcome. Cancelled, it leaves, unless somebody else waits for it here as well."""
        self._awaiting += 1
        try:
            return await asyncio.shield(self._round.outcome)
        finally:
            self._awaiting -= 1
            if not self._awaiting:
                await self.leave()

    async def leave(self) -> None:
        """Have no share any more. A second call does nothing."""
        if not self._left:
            self._left = True
            self._round.callers -= 1
            if self._round.callers == 0 and not self._round.outcome.done():
                await self._abandon(self._round)


class Coalescer(Generic[T]):
    """Runs ``work`` for whoever asks, once for all who ask together.

    Args:
        work: What to run, in a task of its own.
        name: The task's name.
    """

    def __init__(self, work: Callable[[], Awaitable[T]], name: str) -> None:
        self._work = work
        self._name = name
        self._running: _Round[T] | None = None
        self._next: _Round[T] | None = None
        self._closed = False

    @property
    def running(self) -> bool:
        """Whether a round is running."""
        return self._running is not None

    @property
    def callers(self) -> int:
        """How many wait for a round, running or not."""
        return sum(round_.callers for round_ in (self._running, self._next) if round_ is not None)

    async def request(self) -> T:
        """Wait for the outcome of a round that begins after this call.

        Raises:
            ClosedError: It was closed, before or meanwhile.
            Exception: Whatever the work raised; every caller of the round gets it.
        """
        return await self._join().outcome()

    async def start(self) -> Share[T]:
        """Wait until a round that begins after this call is halfway; its outcome may be awaited later.

        Raises:
            ClosedError: It was closed, before or meanwhile.
            Exception: Whatever the work raised before that.
        """
        share = self._join()
        share._round.started = True
        try:
            await share.halfway()
        except BaseException:
            await share.leave()
            raise
        return share

    def _join(self) -> Share[T]:
        if self._closed:
            raise ClosedError("closed: no more updates")
        round_ = self._next
        if round_ is None:
            round_ = self._next = _Round()
            if self._running is None:
                self._begin()
        return Share(round_, self._abandon)

    @property
    def started(self) -> bool:
        """Of the round that runs: whether some caller waits for its first part only."""
        return self._running is not None and self._running.started

    def halfway(self) -> None:
        """The first part of the round that runs is over."""
        if self._running is not None and not self._running.halfway.done():
            self._running.halfway.set_result(None)

    async def aclose(self) -> None:
        """Refuse new requests, drop the round that waits, cancel the one that runs, and wait for its end."""
        self._closed = True
        for round_ in (self._next, self._running):
            if round_ is not None:
                if not round_.outcome.done():
                    round_.outcome.set_exception(ClosedError("closed while an update was under way"))
                    round_.outcome.exception()
                await self._abandon(round_)

    def _begin(self) -> None:
        assert self._next is not None
        round_ = self._next
        round_.task = asyncio.create_task(self._drive(round_), name=self._name)
        # A task that is cancelled before its first step runs none of its code: its end is seen from outside.
        round_.task.add_done_callback(lambda _: self._ended(round_))

    async def _drive(self, round_: _Round[T]) -> None:
        if self._next is round_:
            self._next = None
        self._running = round_
        try:
            result = await self._work()
        except asyncio.CancelledError:
            round_.outcome.cancel()
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to the callers
            if not round_.outcome.done():
                round_.outcome.set_exception(error)
                if not round_.callers:
                    round_.outcome.exception()
        else:
            if not round_.outcome.done():
                round_.outcome.set_result(result)

    def _ended(self, round_: _Round[T]) -> None:
        round_.outcome.cancel()  # does nothing if it has one
        if self._running is round_:
            self._running = None
        if self._next is round_:
            self._next = None
        if self._next is not None and self._next.task is None and self._running is None:
            self._begin()

    async def _abandon(self, round_: _Round[T]) -> None:
        if round_.task is None:
            if self._next is round_:
                self._next = None
            return
        round_.task.cancel()
        try:
            await shielded(_ended(round_.task), LONGEST_UNDO)
        except TimeoutError as error:  # must not take the place of the cancellation
            _log.warning("%s: %s", self._name, error)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
