"""What holds generation back while an engine's weights change.

:class:`Generations` is what an update needs of whatever generates. For code that reads a module by itself it is a gate,
before which it waits: generations enter and leave; a pause shuts the gate and waits until the last has left. In a Ray
actor the two sides run on different event loops, and a synchronous ``generate`` blocks its own, so the gate is built on
a mutex and ``concurrent.futures``: any thread may enter, and any loop may wait. Who waits is let in by whoever opens
the gate, and is counted before it runs, so that a pause right behind a resume never overlooks it.

States: OPEN -> SHUT in ``shut``; SHUT -> OPEN in ``resume``; OPEN or SHUT -> BARRED in ``bar`` (the engine is tainted:
who waits is turned away with the reason, and so is who comes); BARRED -> OPEN in ``resume``.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from enum import Enum
from typing import Protocol

from asyncsync.errors import EngineError, TaintedEngineError
from asyncsync.messages import Policy


class Generations(Protocol):
    """What generates with an engine's weights, as an update sees it. Any thread may call it.

    Attributes:
        policies: What it can do with requests in flight.
    """

    policies: tuple[Policy, ...]

    async def hold(self, policy: Policy) -> None:
        """Hold back new requests, and deal with those in flight as the policy says.

        Called again for the same pause, it deals with those that have come in meanwhile as well. It may be cancelled;
        then :meth:`resume` is called.

        Returns:
            Once nothing reads the weights.
        """
        ...

    def resume(self) -> None:
        """Let everything go on."""
        ...

    def bar(self, reason: str) -> None:
        """Turn everyone away with a :class:`~asyncsync.TaintedEngineError`, now and until :meth:`resume`."""
        ...


class GateState(Enum):
    """Whether generations may enter."""

    OPEN = "open"
    SHUT = "shut"
    BARRED = "barred"


class GenerationGate:
    """Satisfies :class:`Generations`: counts those who read, and holds others back while the weights change."""

    policies: tuple[Policy, ...] = ("drain",)

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._state = GateState.OPEN
        self._reason = ""
        self._inside = 0
        self._waiting: list[Future[None]] = []
        self._emptied: list[Future[None]] = []

    def __repr__(self) -> str:
        return f"<GenerationGate {self._state.value}: {self._inside} inside, {len(self._waiting)} waiting>"

    @property
    def inside(self) -> int:
        """How many generations are running."""
        return self._inside

    @property
    def waiting(self) -> int:
        """How many generations are held back."""
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether a generation would be let in at once."""
        return self._state is GateState.OPEN

    def _knock(self) -> Future[None] | None:
        """Enter at once (None), or get a future that is done once the gate has let one in."""
        with self._mutex:
            if self._state is GateState.BARRED:
                raise TaintedEngineError(self._reason)
            if self._state is GateState.OPEN:
                self._inside += 1
                return None
            waiter: Future[None] = Future()
            self._waiting.append(waiter)
            return waiter

    async def enter(self) -> None:
        """Enter, waiting while the gate is shut.

        Raises:
            TaintedEngineError: The engine holds part of an update.
        """
        waiter = self._knock()
        if waiter is None:
            return
        try:
            await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        self._leave_if_barred()

    def enter_blocking(self) -> None:
        """The same from a synchronous method; blocks its thread.

        Raises:
            TaintedEngineError: The engine holds part of an update.
        """
        waiter = self._knock()
        if waiter is None:
            return
        try:
            waiter.result()
        except BaseException:
            self._withdraw(waiter)
            raise
        self._leave_if_barred()

    def _leave_if_barred(self) -> None:
        """The gate was barred between the moment in which one was let in, and that in which one hears of it."""
        with self._mutex:
            barred, reason = self._state is GateState.BARRED, self._reason
        if barred:
            self.leave()
            raise TaintedEngineError(reason)

    def leave(self) -> None:
        """Leave; the last one out lets the pause go on."""
        with self._mutex:
            self._inside -= 1
            emptied = self._take_emptied()
        _settle(emptied)

    def shut(self) -> Future[None]:
        """Shut the gate; the future is done once nobody is inside."""
        with self._mutex:
            if self._state is GateState.OPEN:
                self._state = GateState.SHUT
            empty: Future[None] = Future()
            self._emptied.append(empty)
            emptied = self._take_emptied()
        _settle(emptied)
        return empty

    async def hold(self, policy: Policy) -> None:
        """Shut the gate, and wait until nobody is inside.

        Raises:
            EngineError: Who reads a module by himself can neither be ended nor stopped.
        """
        if policy not in self.policies:
            raise EngineError(f"this engine can only {' or '.join(self.policies)}, not {policy}")
        if not (empty := self.shut()).done():
            await asyncio.wrap_future(empty)

    def resume(self) -> None:
        """Open the gate and let in everyone who waits."""
        with self._mutex:
            self._state = GateState.OPEN
            admitted = [waiter for waiter in self._waiting if waiter.set_running_or_notify_cancel()]
            self._waiting.clear()
            self._inside += len(admitted)
        _settle(admitted)

    def bar(self, reason: str) -> None:
        """Turn everyone away, now and until the gate is opened."""
        with self._mutex:
            self._state, self._reason = GateState.BARRED, reason
            refused = [waiter for waiter in self._waiting if waiter.set_running_or_notify_cancel()]
            self._waiting.clear()
        for waiter in refused:
            waiter.set_exception(TaintedEngineError(reason))

    def _take_emptied(self) -> list[Future[None]]:
        if self._inside:
            return []
        emptied = [future for future in self._emptied if future.set_running_or_notify_cancel()]
        self._emptied.clear()
        return emptied

    def _withdraw(self, waiter: Future[None]) -> None:
        """Give up a place in the queue, or the entry, if it was granted in the same moment."""
        if waiter.cancel():
            with self._mutex:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        elif waiter.exception() is None:
            self.leave()


def _settle(futures: list[Future[None]]) -> None:
    for future in futures:
        future.set_result(None)
