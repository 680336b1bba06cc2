"""What a demo tells while it runs, and what it found in the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step and the weight update behind it.

    Attributes:
        step: Its number, from 1.
        steps: How many there will be.
        reward: The reward of what was trained on; for a language model minus the loss.
        version: The weight version that was published.
        staleness: The largest (version at training minus version at dispatch) in the batch; None if nothing generated
            is trained on.
        update_ms: Milliseconds for the whole update.
        drain_ms: Of these, waiting for generations in flight to end.
        pause_ms: Of these, holding every generation back.
        stall_ms: The longest stall of the caller's event loop so far.
        digests_agree: Whether both engines hold the bytes that were sent.
        greedy_equal: Whether both engines and the trainer generate the same tokens; None if not compared.
        prompt: Something an engine was asked.
        answer: What it answered.
    """

    step: int
    steps: int
    reward: float
    version: int
    staleness: int | None
    update_ms: float
    drain_ms: float
    pause_ms: float
    stall_ms: float
    digests_agree: bool
    greedy_equal: bool | None
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a demo found.

    Attributes:
        updates: Weight updates, the first one (that gave the engines their weights) included.
        update_bytes: Bytes of one update.
        reward_first: Mean reward of the first tenth of the steps.
        reward_last: Mean reward of the last tenth of the steps.
        gain_wanted: How much the reward has to rise by; minus infinity after too few steps to judge it.
        staleness_max: The largest staleness trained on; None if nothing generated is trained on.
        generated: Sequences that the engines generated beside the training.
        digests_agree: Whether at every update each engine held the bytes that were sent.
        greedy_equal: Whether after every update engines and trainer generated the same tokens; None if not compared.
        update_ms_median: Median milliseconds of an update.
        pause_ms_median: Median milliseconds that an update held generation back.
        loop_stall_ms: The longest stall of the caller's event loop.
        seconds: Wall time.
    """

    updates: int
    update_bytes: int
    reward_first: float
    reward_last: float
    gain_wanted: float
    staleness_max: int | None
    generated: int
    digests_agree: bool
    greedy_equal: bool | None
    update_ms_median: float
    pause_ms_median: float
    loop_stall_ms: float
    seconds: float

    @property
    def failures(self) -> list[str]:
        """What is not as it should be, in words; empty if all is well."""
        failures = []
        if not self.digests_agree:
            failures.append("an engine's weights were not those that the trainer sent: digests disagree")
        if self.greedy_equal is False:
            failures.append("engines and trainer generated different tokens from the same weights")
        gain = self.reward_last - self.reward_first
        if not (math.isfinite(gain) and gain >= self.gain_wanted):
            failures.append(
                f"the reward did not clearly rise: {self.reward_first:.3f} -> {self.reward_last:.3f} "
                f"(wanted: {self.gain_wanted:+g})"
            )
        return failures

    def as_json(self) -> dict[str, Any]:
        """The figures for scripts; ``greedy_equal`` only where it was compared."""
        figures: dict[str, Any] = {
            "updates": self.updates,
            "reward_first": round(self.reward_first, 4),
            "reward_last": round(self.reward_last, 4),
            "digests_agree": self.digests_agree,
            "update_ms_median": round(self.update_ms_median, 2),
            "pause_ms_median": round(self.pause_ms_median, 2),
            "loop_stall_ms": round(self.loop_stall_ms, 2),
            "seconds": round(self.seconds, 2),
        }
        if self.greedy_equal is not None:
            figures["greedy_equal"] = self.greedy_equal
        return figures


class Observer(Protocol):
    """Who is told; called on the event loop, so it must be quick."""

    def stage(self, what: str) -> None:
        """A stage of the preparations begins."""
        ...

    def step(self, step: Step) -> None:
        """A step and its update are done."""
        ...


class SilentObserver:
    """Tells nobody."""

    def stage(self, what: str) -> None:
        """See :class:`Observer`."""

    def step(self, step: Step) -> None:
        """See :class:`Observer`."""
