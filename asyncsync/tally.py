"""What a synchronizer counts of its updates, for :meth:`asyncsync.WeightSynchronizer.statistics`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from asyncsync.clock import UpdateClock
from asyncsync.errors import WeightUpdateError
from asyncsync.report import EngineOutcome, EngineState, WeightUpdate


@dataclass(slots=True)
class EngineTally:
    """Counts of one engine."""

    updates: int = 0
    failures: int = 0
    last_error: str | None = None


class Tally:
    """Counts over all updates of a synchronizer.

    Attributes:
        updates: How many versions were published.
        failed: How many updates ended with an error.
        cancelled: How many were cancelled.
        dropped: How many engines were let go because they failed.
        attempts: How many attempts it took.
        bytes: Bytes of the tensors that were sent in those that were published.
        seconds: Seconds by phase, over all updates.
        last_error: What the last update that failed ended with.
        clock: That of the update that is under way.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.failed = 0
        self.cancelled = 0
        self.dropped = 0
        self.attempts = 0
        self.bytes = 0
        self.seconds: dict[str, float] = {}
        self.last_error: str | None = None
        self.clock: UpdateClock | None = None
        self._engines: dict[str, EngineTally] = {}

    def __repr__(self) -> str:
        return f"<Tally: {self.updates} updates, {self.failed} failed, {self.cancelled} cancelled>"

    def of(self, engine: str) -> EngineTally:
        """The counts of an engine."""
        return self._engines.get(engine, EngineTally())

    def keep(self, engines: Iterable[str]) -> None:
        """Forget the counts of all others: engines come and go, and each has a new name."""
        self._engines = {name: self._engines[name] for name in engines if name in self._engines}

    async def count(self, update: Callable[[], Awaitable[WeightUpdate]]) -> WeightUpdate:
        """Run an update, and count what becomes of it."""
        try:
            done = await update()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except Exception as error:
            self.failed += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if isinstance(error, WeightUpdateError):
                self._note(error.update, error.outcomes)
            raise
        self._note(done, done.outcomes)
        return done

    def count_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of an update that has ended."""
        for phase, spent in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def _note(self, update: WeightUpdate | None, outcomes: Iterable[EngineOutcome]) -> None:
        if update is not None:
            self.updates += 1
            self.bytes += update.bytes
        for outcome in outcomes:
            engine = self._engines.setdefault(outcome.engine, EngineTally())
            engine.updates += outcome.state is EngineState.UPDATED
            if outcome.error is not None:
                engine.failures += 1
                engine.last_error = outcome.error
