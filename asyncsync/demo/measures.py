"""What both demos measure: the updates, and how long the event loop stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from asyncsync import cluster
from asyncsync.report import WeightUpdate
from asyncsync.synchronizer import WeightSynchronizer

TICK = 0.001
"""Seconds between two ticks of the stall meter."""


class StallMeter:
    """Ticks on an event loop, and knows by how much the latest tick of all came late.

    Attributes:
        longest_ms: The longest stall so far, in milliseconds.
    """

    def __init__(self) -> None:
        self.longest_ms = 0.0

    async def watch(self) -> None:
        """Tick until cancelled."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self.longest_ms = max(self.longest_ms, (now - last - TICK) * 1e3)
            last = now


class UpdateLog:
    """Updates the engines, and compares every digest there is after each update.

    Args:
        synchronizer: Whose updates these are.
        engines: Its engines: Ray actors that include :class:`asyncsync.ModuleEngine`.

    Attributes:
        updates: All updates so far.
        digests_agree: Whether no digest was ever another than the update's.
    """

    def __init__(self, synchronizer: WeightSynchronizer, engines: Sequence[Any]) -> None:
        self._synchronizer = synchronizer
        self._engines = engines
        self.updates: list[WeightUpdate] = []
        self.digests_agree = True

    async def update(self) -> WeightUpdate:
        """Update the weights; ask each engine for the digest of the weights that now lie in its memory."""
        update = await self._synchronizer.update_weights()
        live = await asyncio.gather(*(cluster.call(engine, "weights_digest") for engine in self._engines))
        confirmed = [outcome.digest for outcome in update.outcomes]
        if any(digest != update.digest for digest in (*confirmed, *live)):
            self.digests_agree = False
        self.updates.append(update)
        return update

    def median_ms(self, phase: str) -> float:
        """Median milliseconds of a phase. The first update, which also connects, does not count unless it is alone."""
        return median(milliseconds(update, phase) for update in self.updates[1:] or self.updates)


def milliseconds(update: WeightUpdate, phase: str) -> float:
    """How long a phase of an update took."""
    return update.seconds.get(phase, 0.0) * 1e3


def first_and_last(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean of the first tenth and of the last tenth, of one value at least."""
    tenth = max(1, len(rewards) // 10)
    return fmean(rewards[:tenth]), fmean(rewards[-tenth:])
