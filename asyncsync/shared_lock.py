"""The rollout lock across processes: leases that a Ray actor hands out and that end with their holder.

Design note. A lock server that waits for ``release()`` is stuck once a holder is killed, and hands the lock
to waiters that died in its queue. So whoever wants the lock, waiting or holding, keeps saying so:

* The server (:class:`LeaseTable`) knows requests by a key the client made up. A request ends ``ttl``
  seconds after the client was last heard, in the queue as well as with the lock; the grant itself adds
  nothing. A killed process, or one that is stopped for long, is thus in nobody's way for longer than the
  ttl, queue and ownership together.
* The client asks by long polls, each a third of the ttl, under the same key, so that it keeps its place;
  with the lease in hand it renews as often. It counts the ttl from *before* it sent the message, hence its
  view of a lease always ends before the server's does.
* A lease that is lost cancels the body that runs under it, which ends in a :class:`asyncsync.LockError`.
  Between the loss and the cancellation a stopped process may still run a few lines: for what must never
  happen twice, hand on ``lease.token``, which only grows, and let the other side refuse an older one
  (fencing).
* An updater that writes has two leases, each with a life of its own: of a killed one, the next updater waits
  for both, one after the other, and no longer than a ttl for the two of them. If the outer one is lost, the
  cancellation reaches the inner body first, and passes through it.
* Giving up is one message that nobody waits for, so it can be sent from a cancelled task. Ray may overtake:
  a key that was given up stays refused, lest a late request come to own the lock.

States of a request at the server: ``QUEUED -> HELD`` in ``_obtain``, ``QUEUED | HELD -> ENDED`` in ``_end``.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from asyncsync import cluster
from asyncsync.errors import ClosedError, LockError, LockTimeoutError
from asyncsync.lock import (
    Hold,
    Kind,
    LockStatus,
    RolloutLock,
    check_reentry,
    check_request,
    requesting_task,
    side_held,
)

DEFAULT_LEASE_TTL = 10.0
"""Seconds after which a lease, or a place in the queue, ends if its owner is not heard any more."""

_START_TIMEOUT = 60.0  # seconds for the lock actor to come up
_MANY_WAITERS = 10_000  # concurrent calls of the lock actor: each waiter keeps one open


@dataclass(slots=True)
class _Request:
    expires: float
    obtaining: asyncio.Task[tuple[Hold, int]]

    @property
    def hold(self) -> Hold | None:
        task = self.obtaining
        return task.result()[0] if task.done() and not task.cancelled() and not task.exception() else None


class LeaseTable:
    """The server's side: leases with a time to live over a :class:`RolloutLock`.

    It runs in an actor, or on any event loop. Its methods decide synchronously; only ``acquire`` waits.

    Args:
        name: Name of the lock, for messages.
        ttl: Seconds a request lives after it was last heard.
        clock: A monotonic clock, in seconds.
        first_token: The first fencing token; later ones are larger.
        server_id: Whatever tells this server from another.
    """

    def __init__(
        self,
        *,
        name: str = "shared rollout lock",
        ttl: float = DEFAULT_LEASE_TTL,
        clock: Callable[[], float] = time.monotonic,
        first_token: int = 1,
        server_id: str = "",
    ) -> None:
        self._name, self._ttl, self._clock, self._server_id = name, ttl, clock, server_id
        self._lock = RolloutLock(name)
        self._tokens = itertools.count(first_token)
        self._requests: dict[str, _Request] = {}
        self._given_up: dict[str, float] = {}  # key -> when it may be forgotten
        self._timer: asyncio.TimerHandle | None = None

    async def describe(self) -> tuple[str, float]:
        """The server's id, and its time to live in seconds."""
        return self._server_id, self._ttl

    async def status(self) -> LockStatus:
        """Who holds the lock, and who waits."""
        self.expire()
        return self._lock.status()

    async def acquire(self, key: str, kind: Kind, holder: str, timeout: float) -> int | None:
        """Ask for the lock, or ask on under the same key: keeps the place and counts as a sign of life.

        Args:
            key: Made up by the client, new for each request.
            kind: ``"reader"``, ``"writer"`` or ``"updater"``.
            holder: Name to show to others.
            timeout: Seconds from the first call until the request fails.

        Returns:
            The fencing token once the lock is held; None after a third of the ttl, to be called again.

        Raises:
            LockTimeoutError: The lock was not free in time.
            LockError: The key was given up, or ended while this call waited.
        """
        self.expire()
        if key in self._given_up:
            raise LockError(f"{self._name}: {holder} has given this request up")
        request = self._requests.get(key)
        if request is None:
            obtaining = asyncio.create_task(self._obtain(kind, holder, timeout))
            request = self._requests[key] = _Request(self._clock() + self._ttl, obtaining)
        request.expires = self._clock() + self._ttl
        self._watch()
        try:
            await asyncio.wait({request.obtaining}, timeout=self._ttl / 3)
        except asyncio.CancelledError:
            self._end(key)  # the client's wait was cancelled, and the call with it
            raise
        if not request.obtaining.done():
            return None
        if request.obtaining.cancelled():
            raise LockError(f"{self._name}: the request of {holder} ended while it waited")
        if request.obtaining.exception() is not None:
            self._end(key)
        return request.obtaining.result()[1]

    async def renew(self, key: str) -> bool:
        """Let the lease live for another ttl; False if it has ended."""
        self.expire()
        request = self._requests.get(key)
        if request is None or request.hold is None:
            return False
        request.expires = self._clock() + self._ttl
        return True

    async def release(self, key: str) -> bool:
        """Give up the lease, or the place in the queue; whether there was one."""
        self.expire()
        self._given_up[key] = self._clock() + self._ttl
        return self._end(key)

    def expire(self) -> None:
        """End every request that was not heard for a ttl; a timer calls it, and so do the other methods."""
        now = self._clock()
        for key in [key for key, request in self._requests.items() if request.expires <= now]:
            self._end(key)
        while self._given_up and (first := next(iter(self._given_up))) and self._given_up[first] <= now:
            del self._given_up[first]

    async def _obtain(self, kind: Kind, holder: str, timeout: float) -> tuple[Hold, int]:
        return await self._lock.acquire(kind, timeout=timeout, holder=holder), next(self._tokens)

    def _end(self, key: str) -> bool:
        request = self._requests.pop(key, None)
        if request is None:
            return False
        if request.hold is not None:
            request.hold.release_nowait()
        else:
            request.obtaining.cancel()  # in time: a lock that is handed over meanwhile is given back
        return True

    def _watch(self) -> None:
        # One timer is enough: requests live equally long, so none ends before the one it was set for.
        if self._timer is None and self._requests:
            due = min(request.expires for request in self._requests.values())
            delay = max(due - self._clock(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        self._watch()


class SharedRolloutLock:
    """A :class:`RolloutLock` for several processes: the same calls, served by a Ray actor, by leases.

    Make one with :meth:`create` and send it to other processes: it pickles. The server lives as long as the
    process that created it. A holder that is killed, or stopped for longer than the ttl, loses its lease; a
    task that lost its lease is cancelled at its next await and leaves its ``async with`` with a
    :class:`asyncsync.LockError`.

    Example:
        ::

            lock = await SharedRolloutLock.create()
            async with lock.writer(timeout=30) as lease:  # in any process that was given the lock
                print(lease.token)
    """

    def __init__(self, server: Any, *, name: str, lease_ttl: float) -> None:
        self.name = name
        self.lease_ttl = lease_ttl
        self._server = server
        self._owns_server = False
        self._closed = False
        self._tenures: dict[tuple[asyncio.Task[Any], Kind], _Tenure] = {}

    @classmethod
    async def create(cls, name: str | None = None, lease_ttl: float = DEFAULT_LEASE_TTL) -> SharedRolloutLock:
        """Start a lock server in the running Ray cluster, or find the one of that name in this Ray namespace.

        Args:
            name: The actor's name; None for a server that only this object, and copies of it, know.
            lease_ttl: Seconds after which a silent holder loses the lock: more than twice what a holder's event
                loop may ever stand still. A server that exists keeps its own.

        Raises:
            LockError: Ray is not initialized, or the server did not start within a minute.
            ValueError: The ttl is not positive and finite.
        """
        if not (lease_ttl > 0 and math.isfinite(lease_ttl)):
            raise ValueError(f"lease_ttl must be a positive, finite number of seconds, not {lease_ttl!r}")
        if not cluster.is_connected():
            raise LockError("a SharedRolloutLock needs a Ray cluster: call ray.init() first")
        server_id = uuid.uuid4().hex
        server = await cluster.start_actor(
            LeaseTable,
            name=name,
            max_concurrency=_MANY_WAITERS,
            arguments={
                "name": name or "shared rollout lock",
                "ttl": lease_ttl,
                "server_id": server_id,
                # Microseconds since 1970: tokens grow even over a server that died and was made anew.
                "first_token": time.time_ns() // 1_000,
            },
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                found_id, found_ttl = await cluster.call(server, "describe")
        except (TimeoutError, cluster.ActorLostError) as error:
            raise LockError("the lock server did not start, or is gone") from error
        lock = cls(server, name=name or "shared rollout lock", lease_ttl=found_ttl)
        lock._owns_server = found_id == server_id
        return lock

    def reader(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Lease]:
        """Share the lock with other readers, wherever they run. See :meth:`acquire`."""
        return _LeaseEntry(self, "reader", timeout, holder)

    def writer(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Lease]:
        """Have the lock alone. See :meth:`acquire`."""
        return _LeaseEntry(self, "writer", timeout, holder)

    def updater(self, *, timeout: float | None = None, holder: str | None = None) -> AbstractAsyncContextManager[Lease]:
        """Be the only updater, whoever reads or writes, wherever they run. See :meth:`acquire`.

        To write, take the writer side within it, in this task or another, and give that back first.
        """
        return _LeaseEntry(self, "updater", timeout, holder)

    async def acquire(self, kind: Kind, *, timeout: float | None = None, holder: str | None = None) -> Lease:
        """Wait for a lease, and release it from any task.

        Nothing is cancelled if the lease is lost: look at ``lease.lost``, or better use ``async with``.

        Args:
            kind: ``"reader"``, ``"writer"`` or ``"updater"``.
            timeout: Seconds to wait at most, positive and finite; ten minutes if None.
            holder: Name to show to others; the task's name and process id if None.

        Raises:
            LockTimeoutError: The lock was not free in time; the message names who holds it.
            LockError: The server is gone, or this task holds the lock already and would wait for itself.
            ClosedError: The lock was closed.
            ValueError: An unknown kind, or a timeout that is not positive and finite.
        """
        seconds = check_request(kind, timeout)
        if self._closed:
            raise ClosedError(f"{self.name} was closed")
        task = requesting_task()
        check_reentry(self.name, kind, self._tenures, task)
        mine = self._tenures.get((task, kind))
        if mine is not None:
            mine.check()
            mine.uses += 1
            return Lease(mine)

        holder = holder or f"{task.get_name()} (process {os.getpid()})"
        try:
            # The server keeps the timeout and knows whom to name; this one is for a server that does not
            # answer.
            async with asyncio.timeout(seconds + self.lease_ttl):
                key, token, expires = await self._poll(kind, holder, seconds)
        except LockTimeoutError:
            raise
        except TimeoutError as error:
            raise LockTimeoutError(
                f"{self.name}: {holder} was not given the {kind} side within {seconds:g} s, "
                "and the lock server does not answer"
            ) from error
        except cluster.ActorLostError as error:
            raise LockError(f"{self.name}: the lock server is gone; create a new lock") from error
        return Lease(_Tenure(self, key, kind, holder, token, expires, task))

    async def _poll(self, kind: Kind, holder: str, seconds: float) -> tuple[str, int, float]:
        deadline = time.monotonic() + seconds
        key = uuid.uuid4().hex
        try:
            while True:
                sent = time.monotonic()
                left = max(round(deadline - sent, 3), 0.001)
                token = await cluster.call(self._server, "acquire", key, kind, holder, left)
                expires = sent + self.lease_ttl
                if token is not None and time.monotonic() < expires:
                    return key, token, expires
                if token is not None:  # stopped for so long that the lease may be over: line up again
                    self._give_up(key)
                    key = uuid.uuid4().hex
        except BaseException:
            self._give_up(key)
            raise

    def _give_up(self, key: str) -> Any:
        with suppress(Exception):  # no cluster any more: then the lease ends by its ttl
            return cluster.send(self._server, "release", key)

    def holds(self, task: asyncio.Task[Any] | None = None) -> Kind | None:
        """How ``task``, or else the current one, holds the lock: ``"reader"``, ``"writer"`` or None.

        Being the updater does not count: that keeps nobody from reading or writing.
        """
        return side_held(self._tenures, task or requesting_task())

    async def status(self) -> LockStatus:
        """Ask the server who holds the lock and who waits; ``str()`` of it is a line to read.

        Raises:
            LockError: The server is gone, or did not answer within the ttl.
        """
        try:
            async with asyncio.timeout(self.lease_ttl):
                status: LockStatus = await cluster.call(self._server, "status")
        except (cluster.ActorLostError, TimeoutError) as error:
            raise LockError(f"{self.name}: the lock server does not answer") from error
        return status

    async def aclose(self) -> None:
        """Close this object; if it made the server, stop that too: leases held elsewhere are lost then."""
        self._closed = True
        if self._owns_server:
            self._owns_server = False
            await cluster.kill_actor(self._server)

    def __getstate__(self) -> dict[str, Any]:
        # Leases stay behind: a copy in another process holds nothing, and does not own the server.
        return {"server": self._server, "name": self.name, "lease_ttl": self.lease_ttl}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["server"], name=state["name"], lease_ttl=state["lease_ttl"])  # type: ignore[misc]

    def __repr__(self) -> str:
        here = ", ".join(f"{tenure.kind} {tenure.holder}" for tenure in self._tenures.values()) or "nothing"
        return f"<SharedRolloutLock {self.name!r}: {here} held by this object{'; closed' * self._closed}>"


class Lease:
    """One lease of a :class:`SharedRolloutLock`, until it is released or lost."""

    __slots__ = ("_released", "_tenure")

    def __init__(self, tenure: _Tenure) -> None:
        self._tenure = tenure
        self._released = False

    @property
    def token(self) -> int:
        """Fencing token: larger for every later lease of the lock."""
        return self._tenure.token

    @property
    def kind(self) -> Kind:
        """``"reader"``, ``"writer"`` or ``"updater"``."""
        return self._tenure.kind

    @property
    def holder(self) -> str:
        """The name it was acquired under."""
        return self._tenure.holder

    @property
    def lost(self) -> str | None:
        """Why the lease ended before it was released; None while it is in force."""
        return self._tenure.lost

    async def release(self) -> None:
        """Give the lease back, from any task, more than once if need be; waits a ttl at most for the answer.

        Raises:
            LockError: The lease had been lost: others may have held the lock meanwhile.
        """
        if self._released:
            return
        answer = self.release_nowait()
        self._tenure.check()
        if answer is None:
            return
        # The message is sent, and shielded: cancelling this wait does not call it back.
        with suppress(cluster.ActorLostError, TimeoutError):  # in force to the end, by our own clock
            async with asyncio.timeout(self._tenure.lock.lease_ttl):
                if not await asyncio.shield(answer):
                    self._tenure.lost = "it had ended at the server"
        self._tenure.check()

    def release_nowait(self) -> Any:
        """Send the release and do not wait for an answer; for callers that cannot."""
        if self._released:
            return None
        self._released = True
        self._tenure.uses -= 1
        return self._tenure.end() if not self._tenure.uses else None

    def __repr__(self) -> str:
        state = "lost" if self.lost else "released" if self._released else "in force"
        return f"<Lease {self.token} of {self._tenure.lock.name!r}: {self.kind} {self.holder}, {state}>"


class _Tenure:
    """A lease as its process knows it, renewed in the background; re-entrant readers share it."""

    def __init__(
        self,
        lock: SharedRolloutLock,
        key: str,
        kind: Kind,
        holder: str,
        token: int,
        expires: float,
        task: asyncio.Task[Any],
    ) -> None:
        self.lock, self.key, self.holder, self.token, self.task = lock, key, holder, token, task
        self.kind: Kind = kind
        self.expires = expires
        self.uses = 1
        self.lost: str | None = None
        self.bodies: list[_LeaseEntry] = []
        lock._tenures[task, kind] = self
        self._loop = asyncio.get_running_loop()
        self._renewing = asyncio.create_task(self._renew(), name=f"{lock.name}: renew {kind} {holder}")

    async def _renew(self) -> None:
        while not self.lost:
            await asyncio.sleep(self.lock.lease_ttl / 3)
            sent = time.monotonic()
            try:
                async with asyncio.timeout(self.expires - sent):
                    if not await cluster.call(self.lock._server, "renew", self.key):
                        self.lost = "it had ended at the server"
                self.expires = sent + self.lock.lease_ttl
            except TimeoutError:
                self.lost = "it could not be renewed in time (this process stood still, or the server does)"
            except cluster.ActorLostError:
                self.lost = "the lock server is gone"
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody renews the lease any more
                self.lost = f"it could not be renewed: {error!r}"
        if self.bodies:
            self.bodies[-1].cut()  # the outer ones learn of it by the error that comes out

    def loss(self) -> LockError | None:
        if self.lost is None:
            return None
        return LockError(
            f"{self.lock.name}: {self.holder} lost its {self.kind} lease {self.token}: {self.lost}. "
            "Another may hold the lock now: what was done under it cannot be relied upon"
        )

    def check(self) -> None:
        if (loss := self.loss()) is not None:
            raise loss

    def end(self) -> Any:
        if self.lock._tenures.get((self.task, self.kind)) is self:
            del self.lock._tenures[self.task, self.kind]
        if not self._loop.is_closed():
            self._renewing.cancel()
        if time.monotonic() >= self.expires and not self.lost:
            self.lost = "it was not renewed in time (the event loop, or this process, stood still)"
        return self.lock._give_up(self.key)


class _LeaseEntry(AbstractAsyncContextManager[Lease]):
    """``async with lock.writer()``: the body is cancelled if its lease is lost."""

    def __init__(self, lock: SharedRolloutLock, kind: Kind, timeout: float | None, holder: str | None) -> None:
        self._lock, self._kind, self._timeout, self._holder = lock, kind, timeout, holder
        self._lease: Lease | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._cut = False

    async def __aenter__(self) -> Lease:
        if self._lease is not None:
            raise LockError(f"{self._lock.name}: enter each {self._kind}() once")
        lease = await self._lock.acquire(self._kind, timeout=self._timeout, holder=self._holder)
        self._task = requesting_task()
        self._cancelling = self._task.cancelling()
        self._lease = lease
        lease._tenure.bodies.append(self)
        return lease

    def cut(self) -> None:
        if self._task is not None:
            self._cut = True
            self._task.cancel("the lease was lost")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, task = self._lease, self._task
        if lease is None or task is None:
            return
        lease._tenure.bodies.remove(self)
        # As in asyncio.timeout: our own cancellation is taken back, anybody else's is passed on.
        ours = self._cut and task.uncancel() <= self._cancelling
        if error is None:
            await lease.release()
            return
        lease.release_nowait()
        loss = lease._tenure.loss()
        if loss is None:
            return
        if ours and isinstance(error, asyncio.CancelledError):
            raise loss from error
        if isinstance(error, Exception) and not isinstance(error, LockError):
            error.add_note(str(loss))
