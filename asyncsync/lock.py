"""The rollout lock: many readers or one writer, in one process, first come, first served.

Design note. The lock proper is aiorwlock's. Three things are added, each for a fault of its own:

* *A keeper task per hold.* aiorwlock's owner is the task that acquired it, so no other task could release a
  hold. Each hold is therefore acquired and released inside a small task of its own, the keeper.
* *A turnstile.* aiorwlock lets writers go first, so looping writers starve readers; and a waiting writer
  that is cancelled leaves the readers behind it asleep. Keepers pass an ``asyncio.Lock``, which serves in
  order of arrival, and keep it until they have the lock: at most one of them ever waits inside aiorwlock,
  and nobody overtakes.
* *One suspension point.* :meth:`RolloutLock.acquire` waits for one future and nothing else; leaving a hold
  is synchronous. So there is one place where a cancellation can strike, whether it comes from asyncio, from
  an anyio scope or as ``GeneratorExit``, and a lock that was handed over in that very moment is given back
  there.

States of a hold: ``WAITING -> HELD`` in :meth:`RolloutLock._keep`, ``WAITING | HELD -> ENDED`` in
:meth:`RolloutLock._end`. Nothing is awaited between reading and writing a state.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import aiorwlock

from asyncsync.errors import EventLoopError, LockError, LockTimeoutError

Kind = Literal["reader", "writer"]

DEFAULT_TIMEOUT = 600.0
"""Seconds that a wait for a lock may take where no ``timeout`` is given: every wait is finite."""


class Waiting(NamedTuple):
    """How many wait for a lock, each kind for itself."""

    readers: int
    writers: int

    def __str__(self) -> str:
        parts = [_count(self.readers, "reader")] * bool(self.readers)
        parts += [_count(self.writers, "writer")] * bool(self.writers)
        return ", ".join(parts) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStatus:
    """Who holds a lock and who waits for it, at one moment.

    Attributes:
        kind: ``"reader"``, ``"writer"``, or None if the lock is free.
        holders: Names of the holders, the oldest first.
        held_for: Seconds since the oldest holder got the lock; 0 if it is free.
        queue: Names of those who wait, in the order in which they will be served.
        waiting: How many of them want to read, and how many to write.
    """

    kind: Kind | None
    holders: tuple[str, ...]
    held_for: float
    queue: tuple[str, ...]
    waiting: Waiting

    def __str__(self) -> str:
        if self.kind is None:
            return f"free; waiting: {self.waiting}" if self.queue else "free"
        if self.kind == "writer":
            held = f"writer {self.holders[0]} for {self.held_for:.2f} s"
        else:
            oldest = f"{'oldest ' * (len(self.holders) > 1)}{self.holders[0]} for {self.held_for:.2f} s"
            held = f"{_count(len(self.holders), 'reader')} ({oldest})"
        return f"{held}; waiting: {self.waiting}"


class RolloutLock:
    """A reader/writer lock for one event loop: generation reads, a weight update writes.

    Fair both ways, safe to cancel at any await, and it knows its holders. It belongs to the first event loop
    that uses it. A task that holds it as a reader may read again, at once, even if a writer waits; any other
    second request of the same task would wait for itself and is refused. What counts is the task that asks:
    give ``timeout`` here rather than wrap the call in ``asyncio.wait_for``, which may make it another task's.

    Example:
        ::

            lock = RolloutLock("weights")
            async with lock.reader():  # many at once
                ...
            async with lock.writer(timeout=30):  # alone
                ...
    """

    def __init__(self, name: str = "rollout lock") -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        # fast: without it aiorwlock yields once after an uncontended acquire; the keeper yields anyway.
        self._lock = aiorwlock.RWLock(fast=True)
        self._turnstile = asyncio.Lock()
        self._queue: dict[_Grant, None] = {}
        self._grants: dict[asyncio.Task[Any], _Grant] = {}

    def reader(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Hold]:
        """Share the lock with other readers; entering waits, leaving does not. See :meth:`acquire`."""
        return _Entry(self, "reader", timeout, holder)

    def writer(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Hold]:
        """Have the lock alone; entering waits, leaving does not. See :meth:`acquire`."""
        return _Entry(self, "writer", timeout, holder)

    async def acquire(self, kind: Kind, *, timeout: float | None = None, holder: str | None = None) -> Hold:
        """Wait for the lock; whoever gets the hold must release it, from any task of this loop.

        Args:
            kind: ``"reader"`` or ``"writer"``.
            timeout: Seconds to wait at most, positive and finite; :data:`DEFAULT_TIMEOUT` if None.
            holder: Name to show to others; the current task's name if None.

        Raises:
            LockTimeoutError: The lock was not free in time; the message names who holds it.
            LockError: This task holds the lock already, in a way that makes it wait for itself.
            EventLoopError: The lock belongs to another event loop.
            ValueError: An unknown kind, or a timeout that is not positive and finite.
        """
        seconds = check_request(kind, timeout)
        loop = self._check_loop()
        task = requesting_task()
        mine = self._grants.get(task)
        if mine is not None:
            check_reentry(self.name, kind, mine.kind, task)
            mine.uses += 1
            return Hold(self, mine)

        grant = _Grant(kind, holder or task.get_name(), task, loop)
        self._queue[grant] = None
        grant.keeper = loop.create_task(self._keep(grant), name=f"{self.name}: {kind} {grant.holder}")
        timer = loop.call_later(seconds, self._time_out, grant, seconds)
        try:
            refusal = await grant.answer
            if refusal is not None:
                raise LockTimeoutError(refusal)
        except BaseException:
            # Cancelled, timed out, or closed; if the lock was handed over meanwhile, this gives it back.
            self._end(grant)
            raise
        finally:
            timer.cancel()
        return Hold(self, grant)

    def holds(self, task: asyncio.Task[Any] | None = None) -> Kind | None:
        """How ``task``, or else the current one, holds the lock: ``"reader"``, ``"writer"`` or None."""
        grant = self._grants.get(task or requesting_task())
        return grant.kind if grant else None

    @property
    def readers(self) -> int:
        """How many readers hold the lock; one task counts once."""
        return sum(grant.kind == "reader" for grant in self._grants.values())

    @property
    def writer_name(self) -> str | None:
        """Name of the writer that holds the lock, if one does."""
        return next((grant.holder for grant in self._grants.values() if grant.kind == "writer"), None)

    @property
    def waiting(self) -> Waiting:
        """How many wait: ``(readers, writers)``."""
        writers = sum(grant.kind == "writer" for grant in self._queue)
        return Waiting(len(self._queue) - writers, writers)

    def status(self) -> LockStatus:
        """Who holds the lock and who waits for it, now."""
        oldest = next(iter(self._grants.values()), None)
        return LockStatus(
            kind=oldest.kind if oldest else None,
            holders=tuple(grant.holder for grant in self._grants.values()),
            held_for=oldest.loop.time() - oldest.since if oldest else 0.0,
            queue=tuple(grant.holder for grant in self._queue),
            waiting=self.waiting,
        )

    def __repr__(self) -> str:
        return f"<RolloutLock {self.name!r}: {self.status()}>"

    async def _keep(self, grant: _Grant) -> None:
        side = self._lock.reader if grant.kind == "reader" else self._lock.writer
        async with self._turnstile:
            await side.acquire()
        try:
            if grant.answer.done():  # it timed out in this very moment
                return
            grant.since = grant.loop.time()
            del self._queue[grant]
            self._grants[grant.task] = grant
            grant.answer.set_result(None)
            try:
                await grant.released
            except asyncio.CancelledError:
                # Only a loop that shuts down cancels a keeper that holds. It cancels the holder too, whose
                # clean-up may still need the lock: let that finish first.
                if not grant.ended:
                    grant.released = grant.loop.create_future()
                    await asyncio.wait({grant.released, grant.task}, return_when=asyncio.FIRST_COMPLETED)
                raise
        finally:
            side.release()

    def _end(self, grant: _Grant) -> None:
        if grant.ended:
            return
        grant.ended = True
        waiting = grant in self._queue
        self._queue.pop(grant, None)
        if self._grants.get(grant.task) is grant:
            del self._grants[grant.task]
        if grant.loop.is_closed():  # a coroutine collected after its loop: nobody is left to wake
            return
        if waiting and grant.keeper is not None:
            grant.keeper.cancel()
        elif not grant.released.done():
            grant.released.set_result(None)

    def _time_out(self, grant: _Grant, seconds: float) -> None:
        if not grant.answer.done():
            grant.answer.set_result(
                f"{self.name}: {grant.holder} was not given the {grant.kind} side within {seconds:g} s. "
                f"Held by: {self.status()} (this one included)"
            )

    def _check_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EventLoopError(
                f"{self.name}: this lock belongs to another event loop, the first that used it; "
                "make one lock for each loop, or a SharedRolloutLock for several"
            )
        return loop


class Hold:
    """One hold of a :class:`RolloutLock`, until it is released."""

    __slots__ = ("_grant", "_lock", "_released")

    def __init__(self, lock: RolloutLock, grant: _Grant) -> None:
        self._lock = lock
        self._grant = grant
        self._released = False

    @property
    def kind(self) -> Kind:
        """``"reader"`` or ``"writer"``."""
        return self._grant.kind

    @property
    def holder(self) -> str:
        """The name it was acquired under."""
        return self._grant.holder

    async def release(self) -> None:
        """Give the lock back; it does not wait, may be called from any task of the loop, and more than once.

        Raises:
            EventLoopError: Called from another event loop.
        """
        self._lock._check_loop()
        self.release_nowait()

    def release_nowait(self) -> None:
        """The same, for callers that cannot await. Call it on the thread of the lock's loop."""
        if not self._released:
            self._released = True
            self._grant.uses -= 1
            if not self._grant.uses:
                self._lock._end(self._grant)

    def __repr__(self) -> str:
        return f"<Hold of {self._lock.name!r}: {self.kind} {self.holder}{' (released)' * self._released}>"


class _Grant:
    """One request of one task, and the keeper that stands for it; re-entrant readers share it."""

    def __init__(self, kind: Kind, holder: str, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.kind: Kind = kind
        self.holder = holder
        self.task = task
        self.loop = loop
        self.answer: asyncio.Future[str | None] = loop.create_future()  # None: granted; else why it was not
        self.released: asyncio.Future[None] = loop.create_future()
        self.keeper: asyncio.Task[None] | None = None
        self.since = 0.0
        self.uses = 1
        self.ended = False


class _Entry(AbstractAsyncContextManager[Hold]):
    """``async with lock.reader()``: leaving never waits, so nothing can interrupt it."""

    def __init__(self, lock: RolloutLock, kind: Kind, timeout: float | None, holder: str | None) -> None:
        self._lock, self._kind, self._timeout, self._holder = lock, kind, timeout, holder
        self._hold: Hold | None = None

    async def __aenter__(self) -> Hold:
        if self._hold is not None:
            raise LockError(f"{self._lock.name}: enter each {self._kind}() once")
        self._hold = await self._lock.acquire(self._kind, timeout=self._timeout, holder=self._holder)
        return self._hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hold is not None:
            self._hold.release_nowait()


def check_request(kind: Kind, timeout: float | None) -> float:
    """Refuse what no lock can serve; return the seconds to wait.

    Raises:
        ValueError: An unknown kind, or a timeout that is not positive and finite.
    """
    if kind not in ("reader", "writer"):
        raise ValueError(f"kind must be 'reader' or 'writer', not {kind!r}")
    seconds = DEFAULT_TIMEOUT if timeout is None else timeout
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"timeout must be a positive, finite number of seconds, not {timeout!r}")
    return seconds


def check_reentry(name: str, wanted: Kind, held: Kind, task: asyncio.Task[Any]) -> None:
    """Refuse a second request of one task, unless it reads and wants to read again.

    Raises:
        LockError: The task would wait for itself.
    """
    if wanted == "writer" or held == "writer":
        raise LockError(
            f"{name}: {task.get_name()} holds it as a {held} and asks for it as a {wanted}: "
            "it would wait for itself for ever. Leave the first before asking again"
        )


def requesting_task() -> asyncio.Task[Any]:
    """The current task.

    Raises:
        LockError: There is none.
    """
    task = asyncio.current_task()
    if task is None:
        raise LockError("a rollout lock is used from an asyncio task")
    return task


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
