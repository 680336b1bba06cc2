"""What an update did, as values: the outcome per engine, and the :class:`WeightUpdate` that sums them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EngineState(StrEnum):
    """Where an update left an engine."""

    UPDATED = "updated"
    """It holds the new version, whole."""
    UNCHANGED = "unchanged"
    """It holds the weights it held before, whole."""
    TAINTED = "tainted"
    """It took part of the update and did not finish: paused until a whole update repairs it."""
    LOST = "lost"
    """It does not answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutcome:
    """What became of one engine in one update.

    Attributes:
        engine: The engine's name.
        state: Where the update left it.
        weight_version: The version it holds; None if it holds no whole version, or never said.
        digest: The digest of the weights it confirmed (32 hex digits), if it got that far.
        transport: What its bytes came through, or were to: ``"shared"`` memory of the host, or of a GPU
            (``"cuda_ipc"``), a ``"broadcast"``, Ray ``"objects"``, a ``"folder"``, or ``"pynccl"``, a broadcast of
            vLLM's own. None if it was not asked to receive.
        delta: Whether only what differs from an earlier update was sent to it, or was to be (``delta=True``).
        bytes: Bytes that were sent to it, or to it and those beside it at once; None if it did not get the update.
        paused: Seconds in which it generated nothing, by its own clock, of a staged engine that holds requests back by
            itself as it switches; None where it was paused from outside (``WeightUpdate.seconds``), or did not tell.
        error: What it failed with, in words.
    """

    engine: str
    state: EngineState
    weight_version: int | None = None
    digest: str | None = None
    transport: str | None = None
    delta: bool = False
    bytes: int | None = None
    paused: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The result of one successful weight update.

    Attributes:
        version: The weight version that was published.
        outcomes: One per engine.
        tensors: Distinct tensors sent (tied names count once).
        tensors_changed: How many of them differ, by digest, from the last published version (all, in the first).
        buckets: Buckets sent.
        bytes: Bytes of the tensors sent, padding not counted; of deltas fewer went out, as the outcomes say.
        bytes_changed: Bytes of the tensors that differ.
        digest: Digest of the whole set of weights, confirmed by every engine that can tell (32 hex digits).
        density: Which part of all elements differs, bit by bit, from the update that they were compared with; None if
            with none (``delta=True``, and some engine held one).
        seconds: Seconds by phase, plus ``"total"``. ``"drain"`` is how long the update waited for generations to end
            (new ones wait meanwhile), ``"paused"`` how long nothing was generated after that, at the most: from the
            first call to the last answer; ``"publish"`` how long it took to give the version its name in the folder.
    """

    version: int
    outcomes: tuple[EngineOutcome, ...]
    tensors: int
    tensors_changed: int
    buckets: int
    bytes: int
    bytes_changed: int
    digest: str
    density: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """One line, for a log."""
        updated = sum(outcome.state is EngineState.UPDATED for outcome in self.outcomes)
        changed = (
            "no tensor changed"
            if self.tensors_changed == 0
            else f"{self.tensors_changed}/{self.tensors} tensors changed"
        )
        return (
            f"WeightUpdate(version={self.version}, {updated}/{len(self.outcomes)} engines, "
            f"{format_bytes(self.bytes)} in {self.seconds.get('total', 0.0):.3g} s, "
            f"paused {self.seconds.get('paused', 0.0) * 1e3:.3g} ms, {changed}{self._in_deltas})"
        )

    @property
    def _in_deltas(self) -> str:
        sent = [outcome.bytes for outcome in self.outcomes if outcome.delta and outcome.bytes is not None]
        if self.density is None or not sent:
            return ""
        return f"; {self.density:.2%} of elements, sent in {format_bytes(max(sent))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """One engine, as its synchronizer knows it.

    Attributes:
        weight_version: The version it holds whole; None if it holds none, or if that is not known.
        ready: Whether that is the published one.
        lost: Whether it did not answer the last time.
        updates: How many updates it has got.
        failures: How many it has failed at, or was left out of for a failure.
        last_error: What it failed with the last time, in words.
    """

    weight_version: int | None
    ready: bool
    lost: bool
    updates: int
    failures: int
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizerStatistics:
    """A synchronizer, now and so far.

    Attributes:
        state: ``"idle"``, ``"updating"`` or ``"closed"``.
        phase: What the update that is under way is doing; None if none is.
        weight_version: The published version.
        waiting: How many callers wait for an update.
        updates: How many versions were published.
        failed: How many updates ended with an error; those that reached some of the engines count as published, too.
        cancelled: How many were cancelled.
        dropped: How many engines were let go because they failed (``on_engine_failure="drop"``).
        attempts: How many attempts that took: more than updates if some were done again without engines that failed.
        bytes: Bytes of the tensors that were sent in those that were published, once for all engines.
        seconds: Seconds by phase, over all updates.
        last_error: What the last update that failed ended with, in words.
        engines: The engines, by name.
    """

    state: str
    phase: str | None
    weight_version: int | None
    waiting: int
    updates: int
    failed: int
    cancelled: int
    dropped: int
    attempts: int
    bytes: int
    seconds: Mapping[str, float] = field(hash=False)
    last_error: str | None
    engines: Mapping[str, EngineStatistics] = field(hash=False)


def format_bytes(count: int) -> str:
    """Write a number of bytes as a person would, in decimal units: ``0.27 GB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size / 10:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
