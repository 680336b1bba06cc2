"""What a request to a generating engine comes to: tokens, why they end, and which weights computed which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["length", "stop", "abort"]
"""Why there are no more tokens: as many as were asked for; one that ends a text; a weight update that aborts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersionSpan:
    """Output tokens that were computed with the same weights.

    Attributes:
        version: The weight version; None: the weights the engine started with.
        start: Index of the first of them among the output tokens.
        end: Index after the last.
    """

    version: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to a request.

    Attributes:
        tokens: Ids of the new tokens.
        finish_reason: Why there are no more.
        weight_versions: Which of them were computed with which weights: in order, without a gap, none empty.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    weight_versions: tuple[WeightVersionSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPart:
    """Some tokens of an answer, as they come.

    Attributes:
        tokens: Ids of the new tokens since the last part.
        weight_version: The version that computed them all.
        finish_reason: Why there are no more; None: there are.
    """

    tokens: tuple[int, ...]
    weight_version: int | None
    finish_reason: FinishReason | None


class VersionLog:
    """Under which version a growing list of tokens goes on, from where."""

    def __init__(self) -> None:
        self._switches: list[tuple[int | None, int]] = []

    def goes_on(self, version: int | None, at: int) -> bool:
        """Note that tokens from index ``at`` on are this version's; returns whether that is another than before."""
        if self._switches and self._switches[-1][0] == version:
            return False
        if self._switches and self._switches[-1][1] == at:
            self._switches.pop()  # that version computed nothing
        if not self._switches or self._switches[-1][0] != version:
            self._switches.append((version, at))
        return True

    def spans(self, start: int, end: int) -> tuple[WeightVersionSpan, ...]:
        """The spans of the tokens from ``start`` to ``end``."""
        following = [*(at for _, at in self._switches[1:]), end]
        cut = (
            WeightVersionSpan(version=version, start=max(at, start), end=min(until, end))
            for (version, at), until in zip(self._switches, following, strict=False)  # nothing has begun: no switch yet
        )
        return tuple(span for span in cut if span.start < span.end)
