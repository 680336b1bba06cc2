"""A request on its way through a generating engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from asyncsync.engines.completion import Completion, CompletionPart, FinishReason, VersionLog


class Request:
    """What was asked for, and what has come of it.

    Tokens come on the thread that generates, and the caller waits on its own loop, whichever that is. All methods are
    called under the mutex of whoever keeps the requests, but for ``completion`` and ``changed``, which are the
    caller's, and for ``tell`` and ``settle``, which wake it.

    Args:
        prompt: Token ids.
        max_new_tokens: How many new tokens it may come to.
        stop: Tokens that end it.
        options: What else the batch is told.
        streamed: Whether the caller wants to hear of every token.

    Attributes:
        key: The batch's name for it; another one each time it begins.
        tokens: The new tokens so far.
        recompute: Whether its cache is to be computed anew, if it goes on under other weights.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop: frozenset[int],
        options: dict[str, Any],
        *,
        streamed: bool = False,
    ) -> None:
        self.prompt = tuple(prompt)
        self.max_new_tokens = max_new_tokens
        self.stop = stop
        self.options = options
        self.key = ""
        self.tokens: list[int] = []
        self.recompute = False
        self._given = 0  # tokens that were in the prompt when it was given to the batch
        self._log = VersionLog()
        self._outcome: Completion | Exception | None = None
        self._done: Future[Completion] = Future()
        self._done.set_running_or_notify_cancel()  # a caller that gives up must not settle it
        self._changed = asyncio.Event()
        self._listener = asyncio.get_running_loop() if streamed else None
        self._told = 0  # tokens that ``news`` has given

    def begin(self, version: int | None) -> tuple[tuple[int, ...], int]:
        """Have it computed from the first token of its prompt on: what the batch is given, and how much it may add."""
        self._given = len(self.tokens)
        self.recompute = False
        self._log.goes_on(version, self._given)
        return (*self.prompt, *self.tokens), self.max_new_tokens - self._given

    def goes_on(self, version: int | None) -> bool:
        """Note that what comes is computed with these weights; returns whether they are others than before."""
        return self._log.goes_on(version, len(self.tokens))

    def take(self, generated: Sequence[int]) -> None:
        """Take all that the batch has generated since ``begin``."""
        self.tokens.extend(generated[len(self.tokens) - self._given :])

    def finish(self) -> None:
        """The batch has ended it."""
        self.end("stop" if self.tokens and self.tokens[-1] in self.stop else "length")

    def end(self, reason: FinishReason) -> None:
        """End it with what it has."""
        end = len(self.tokens)
        self._outcome = Completion(
            tokens=tuple(self.tokens), finish_reason=reason, weight_versions=self._log.spans(0, end)
        )

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self._outcome = error

    def news(self) -> tuple[list[CompletionPart], bool]:
        """What has come since this was asked last, and whether that is the end; for a request that is streamed.

        Raises:
            Exception: What it failed with; what came before is given first.
        """
        self._changed.clear()
        outcome, end = self._outcome, len(self.tokens)
        parts = [
            CompletionPart(
                tokens=tuple(self.tokens[span.start : span.end]), weight_version=span.version, finish_reason=None
            )
            for span in self._log.spans(self._told, end)
        ]
        self._told = end
        if isinstance(outcome, Exception) and not parts:
            raise outcome
        if isinstance(outcome, Completion):
            last = parts.pop() if parts else CompletionPart(tokens=(), weight_version=None, finish_reason=None)
            parts.append(replace(last, finish_reason=outcome.finish_reason))
        return parts, isinstance(outcome, Completion)

    def tell(self) -> None:
        """Let a caller know who listens to every token."""
        if self._listener is not None:
            try:
                self._listener.call_soon_threadsafe(self._changed.set)
            except RuntimeError:  # that loop is closed, and nobody waits in it
                self._listener = None

    def settle(self) -> None:
        """Let the caller know that it has ended; called once, by whoever ended it."""
        if isinstance(self._outcome, Completion):
            self._done.set_result(self._outcome)
        elif self._outcome is not None:
            self._done.set_exception(self._outcome)
        self.tell()

    async def changed(self) -> None:
        """Wait until there is news."""
        if not isinstance(self._outcome, Exception):  # it may be the only news that is left
            await self._changed.wait()

    async def completion(self) -> Completion:
        """Wait for the end.

        Raises:
            Exception: What it failed with.
        """
        return await asyncio.wrap_future(self._done)
