"""One deadline for a whole update, a share of it for each phase, and how long each took (R6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from asyncsync.errors import WeightUpdateError, WeightUpdateTimeoutError

SHARES = {
    "describe": 0.25,
    "connect": 0.25,
    "snapshot": 0.25,
    "transfer": 0.5,
    "drain": 0.5,
    "pause": 0.25,
    "finish": 0.25,
}
"""The part of the update's timeout that a phase may take; the others may take what is left. None takes more than half:
then there is time to do it again without an engine that did not answer."""

HINTS = {
    "describe": " (is an actor still starting, or waiting for a place to run?)",
    "pause": " (does a generation not end?)",
    "finish": " (does a generation, or the flushing of a cache, not end?)",
}
"""What a phase that takes too long mostly waits for."""


class UpdateClock:
    """Measures and bounds the phases of one update. Make it where the update begins.

    Args:
        timeout: Seconds for the whole.
        silent: Who was given up on without an answer: emptied when a phase begins, and named if it takes too long.

    Attributes:
        seconds: Seconds by phase, so far.
        phase_name: The phase that is running, or ran last.
    """

    def __init__(self, timeout: float, silent: list[str] | None = None) -> None:
        self.timeout = timeout
        self._silent = [] if silent is None else silent
        self.seconds: dict[str, float] = {}
        self.phase_name = "start"
        self._start = anyio.current_time()

    @property
    def elapsed(self) -> float:
        """Seconds since the update began."""
        return anyio.current_time() - self._start

    @property
    def remaining(self) -> float:
        """Seconds left of the whole; never less than zero."""
        return max(0.0, self.timeout - self.elapsed)

    def limit(self, phase: str) -> float:
        """Seconds that a phase that begins now may take."""
        return max(min(self.remaining, self.timeout * SHARES.get(phase, 1.0)), 0.001)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Bound and measure one phase; errors that leave it know its name.

        Raises:
            WeightUpdateTimeoutError: It took longer than it may.
        """
        self.phase_name = name
        limit, start = self.limit(name), anyio.current_time()
        self._silent.clear()
        try:
            with anyio.CancelScope(deadline=start + limit) as scope:
                yield
        except WeightUpdateError as error:
            error.phase = error.phase or name
            raise
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + anyio.current_time() - start
        if scope.cancelled_caught:
            late = WeightUpdateTimeoutError(
                f"{name} took longer than the {limit:.3g} s it may (update timeout {self.timeout:.3g} s)"
                + (f": no answer from {', '.join(self._silent)}" if self._silent else "")
                + HINTS.get(name, ""),
                silent=self._silent,
            )
            late.phase = name
            raise late

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a phase that bounds itself, or one that others are part of."""
        self.phase_name = name
        start = anyio.current_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + anyio.current_time() - start
