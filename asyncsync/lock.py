"""The rollout lock: many readers or one writer, beside them one updater; in one process, first come, first served.

Design note. Generation reads, and an update's commit writes. The update as a whole, which connects and sends
while others generate, is the *updater's*: a third side, which keeps out other updaters and nobody else. An
updater takes the writer side within its own. The other way round, a task that writes, or reads, would wait for
an updater that waits for it; so that order is refused (:data:`_MAY_HOLD`).

The lock proper is aiorwlock's, and for updaters an ``asyncio.Lock`` beside it. Three things are added, each for
a fault of its own:

* *A keeper task per hold.* aiorwlock's owner is the task that acquired it, so no other task could release a
  hold. Each hold is therefore acquired and released inside a small task of its own, the keeper.
* *A turnstile.* aiorwlock lets writers go first, so looping writers starve readers; and a waiting writer
  that is cancelled leaves the readers behind it asleep. Keepers pass an ``asyncio.Lock``, which serves in
  order of arrival, and keep it until they have the lock: at most one of them ever waits inside aiorwlock,
  and nobody overtakes. Updaters need none, since their lock serves in order itself.
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
from collections.abc import Container
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import aiorwlock

from asyncsync.errors import EventLoopError, LockError, LockTimeoutError

Kind = Literal["reader", "writer", "updater"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_MAY_HOLD: dict[Kind, tuple[Kind, ...]] = {"reader": ("reader", "updater"), "writer": ("updater",), "updater": ()}
"""What a task that asks for a side may hold already."""

DEFAULT_TIMEOUT = 600.0
"""Seconds that a wait for a lock may take where no ``timeout`` is given: every wait is finite."""


class Waiting(NamedTuple):
    """How many wait to read and to write."""

    readers: int
    writers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStatus:
    """Who holds a lock and who waits for it, at one moment.

    Attributes:
        kind: ``"reader"``, ``"writer"``, or None if nobody reads or writes.
        holders: Names of the readers, or of the writer, the oldest first.
        held_for: Seconds since the oldest of them got the lock; 0 if there is none.
        queue: Names of those who wait to read or write, in the order in which they will be served.
        waiting: How many of them want to read, and how many to write.
        updater: Name of the updater, or None.
        updater_for: Seconds since it got its side; 0 if there is none.
        updater_queue: Names of those who wait for the updater's side, in the order in which they will be served.
    """

    kind: Kind | None
    holders: tuple[str, ...]
    held_for: float
    queue: tuple[str, ...]
    waiting: Waiting
    updater: str | None
    updater_for: float
    updater_queue: tuple[str, ...]

    def __str__(self) -> str:
        held = []
        if self.kind == "writer":
            held.append(f"writer {self.holders[0]} for {self.held_for:.2f} s")
        elif self.kind == "reader":
            oldest = f"{'oldest ' * (len(self.holders) > 1)}{self.holders[0]} for {self.held_for:.2f} s"
            held.append(f"{_count(len(self.holders), 'reader')} ({oldest})")
        if self.updater is not None:
            held.append(f"updater {self.updater} for {self.updater_for:.2f} s")
        counts = zip((*self.waiting, len(self.updater_queue)), KINDS, strict=True)
        waiting = [_count(number, kind) for number, kind in counts if number]
        if not held and not waiting:
            return "free"
        return f"{', '.join(held) or 'free'}; waiting: {', '.join(waiting) or 'none'}"


class RolloutLock:
    """A reader/writer lock for one event loop, with a third side for updaters.

    Generation reads; a weight update is the updater while it lasts, and the writer while it commits. Fair on
    every side, safe to cancel at any await, and it knows its holders. It belongs to the first event loop that
    uses it. A task that holds it as a reader may read again, at once, even if a writer waits, and an updater may
    ask to read or to write; any other second request of the same task would wait for itself and is refused. What
    counts is the task that asks: give ``timeout`` here rather than wrap the call in ``asyncio.wait_for``, which
    may make it another task's.

    Example:
        ::

            lock = RolloutLock("weights")
            async with lock.reader():  # many at once
                ...
            async with lock.updater():  # the only one, whoever reads meanwhile
                async with lock.writer(timeout=30):  # alone
                    ...
    """

    def __init__(self, name: str = "rollout lock") -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        # fast: without it aiorwlock yields once after an uncontended acquire; the keeper yields anyway.
        lock, turnstile = aiorwlock.RWLock(fast=True), asyncio.Lock()
        # Of each side: what is passed on the way to it, and what is had in the end.
        self._sides: dict[Kind, tuple[AbstractAsyncContextManager[None], Any]] = {
            "reader": (turnstile, lock.reader),
            "writer": (turnstile, lock.writer),
            "updater": (nullcontext(), asyncio.Lock()),
        }
        self._queue: dict[_Grant, None] = {}
        self._grants: dict[tuple[asyncio.Task[Any], Kind], _Grant] = {}

    def reader(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Hold]:
        """Share the lock with other readers; entering waits, leaving does not. See :meth:`acquire`."""
        return _Entry(self, "reader", timeout, holder)

    def writer(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Hold]:
        """Have the lock alone; entering waits, leaving does not. See :meth:`acquire`."""
        return _Entry(self, "writer", timeout, holder)

    def updater(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Hold]:
        """Be the only updater, whoever reads or writes; entering waits, leaving does not. See :meth:`acquire`.

        To write, take the writer side within it, in this task or another, and give that back first.
        """
        return _Entry(self, "updater", timeout, holder)

    async def acquire(self, kind: Kind, *, timeout: float | None = None, holder: str | None = None) -> Hold:
        """Wait for the lock; whoever gets the hold must release it, from any task of this loop.

        Args:
            kind: ``"reader"``, ``"writer"`` or ``"updater"``.
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
        check_reentry(self.name, kind, self._grants, task)
        mine = self._grants.get((task, kind))
        if mine is not None:
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
        """How ``task``, or else the current one, holds the lock: ``"reader"``, ``"writer"`` or None.

        Being the updater does not count: that keeps nobody from reading or writing.
        """
        return side_held(self._grants, task or requesting_task())

    @property
    def readers(self) -> int:
        """How many readers hold the lock; one task counts once."""
        return len(self._holding("reader"))

    @property
    def writer_name(self) -> str | None:
        """Name of the writer that holds the lock, if one does."""
        return next((grant.holder for grant in self._holding("writer")), None)

    @property
    def updater_name(self) -> str | None:
        """Name of the updater, if there is one."""
        return next((grant.holder for grant in self._holding("updater")), None)

    @property
    def waiting(self) -> Waiting:
        """How many wait: ``(readers, writers)``; for the updaters see :meth:`status`."""
        kinds = [grant.kind for grant in self._queue]
        return Waiting(kinds.count("reader"), kinds.count("writer"))

    def status(self) -> LockStatus:
        """Who holds the lock and who waits for it, now."""
        holding = self._holding("reader") or self._holding("writer")
        updating = self._holding("updater")
        return LockStatus(
            kind=holding[0].kind if holding else None,
            holders=tuple(grant.holder for grant in holding),
            held_for=holding[0].held_for() if holding else 0.0,
            queue=tuple(grant.holder for grant in self._queue if grant.kind != "updater"),
            waiting=self.waiting,
            updater=self.updater_name,
            updater_for=updating[0].held_for() if updating else 0.0,
            updater_queue=tuple(grant.holder for grant in self._queue if grant.kind == "updater"),
        )

    def _holding(self, kind: Kind) -> list[_Grant]:
        return [grant for grant in self._grants.values() if grant.kind == kind]

    def __repr__(self) -> str:
        return f"<RolloutLock {self.name!r}: {self.status()}>"

    async def _keep(self, grant: _Grant) -> None:
        turnstile, side = self._sides[grant.kind]
        async with turnstile:
            await side.acquire()
        try:
            if grant.answer.done():  # it timed out in this very moment
                return
            grant.since = grant.loop.time()
            del self._queue[grant]
            self._grants[grant.task, grant.kind] = grant
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
        if self._grants.get((grant.task, grant.kind)) is grant:
            del self._grants[grant.task, grant.kind]
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
        """``"reader"``, ``"writer"`` or ``"updater"``."""
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

    def held_for(self) -> float:
        return self.loop.time() - self.since


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
    if kind not in KINDS:
        raise ValueError(f"kind must be 'reader', 'writer' or 'updater', not {kind!r}")
    seconds = DEFAULT_TIMEOUT if timeout is None else timeout
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"timeout must be a positive, finite number of seconds, not {timeout!r}")
    return seconds


def check_reentry(
    name: str, wanted: Kind, held: Container[tuple[asyncio.Task[Any], Kind]], task: asyncio.Task[Any]
) -> None:
    """Refuse a second request of one task, unless it reads again, or is the updater and reads or writes.

    Raises:
        LockError: The task would wait for itself, or for one that waits for it.
    """
    for kind in KINDS:
        if (task, kind) in held and kind not in _MAY_HOLD[wanted]:
            raise LockError(
                f"{name}: {task.get_name()} holds the {kind} side and asks for the {wanted} side: "
                "it would wait for itself for ever, or for one that waits for it. Leave the first before asking again"
            )


def side_held(held: Container[tuple[asyncio.Task[Any], Kind]], task: asyncio.Task[Any]) -> Kind | None:
    """Whether ``task`` reads or writes: ``"reader"``, ``"writer"`` or None."""
    return next((kind for kind in KINDS if kind != "updater" and (task, kind) in held), None)


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
