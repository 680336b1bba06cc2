"""Requests that are generated together, and what a weight update does with them.

Three sides meet here: callers on any event loop, the thread that generates, and the control loop, which holds all back
while the weights change. One mutex keeps the books, and is never held while anyone waits; futures are settled outside.

Whose weights computed a token is known for certain: the batch is *parked* between two steps while the weights change,
every token of the steps before has been taken by then, and what comes after ``resume`` is the new version's.

States: OPEN -> HELD in ``hold`` (new requests wait; the batch is parked once those in flight are dealt with); HELD ->
OPEN in ``resume``; OPEN or HELD -> BARRED in ``bar`` (nobody waits, nobody is in flight, who comes is turned away;
``hold`` leaves it so); BARRED -> OPEN in ``resume``; any -> ENDED in ``end`` (the thread that generates is gone).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, Protocol

from asyncsync.engines.completion import Completion, CompletionPart
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.request import Request
from asyncsync.errors import AsyncSyncError, EngineError, TaintedEngineError
from asyncsync.messages import Policy


class Batch(Protocol):
    """What generates for many requests at once, step by step. Methods may be called from any thread."""

    def add(
        self, key: str, prompt: Sequence[int], max_new_tokens: int, stop: frozenset[int], options: dict[str, Any]
    ) -> None:
        """Take a request in, with a cache of its own; does not wait."""
        ...

    def cancel(self, key: str) -> None:
        """Drop a request, if it is still there; a step that has begun may still compute it."""
        ...

    async def park(self) -> None:
        """Stop between two steps; returns when no weights are read. May be cancelled: ``unpark`` undoes it even then.

        Raises:
            EngineError: The thread that generates is gone.
        """
        ...

    def unpark(self) -> None:
        """Go on; comes into effect after all calls of ``park`` that came before."""
        ...


class BatchState(Enum):
    """Whether requests may enter."""

    OPEN = "open"
    HELD = "held"
    BARRED = "barred"
    ENDED = "ended"


class BatchedGenerations:
    """Satisfies :class:`~asyncsync.engines.gate.Generations` for a batch.

    Args:
        batch: What generates.
        version: Gives the weight version that is served now.
        gate: Where they enter who read the same weights outside of the batch; they are waited for under every policy.
    """

    policies: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")

    def __init__(self, batch: Batch, version: Callable[[], int | None], gate: GenerationGate) -> None:
        self._batch = batch
        self._version = version
        self._gate = gate
        self._mutex = threading.Lock()
        self._state = BatchState.OPEN
        self._refusal: AsyncSyncError | None = None  # what those who come are told while it is barred or ended
        self._keys = map(str, itertools.count())
        self._in_flight: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._emptied: list[Future[None]] = []

    def __repr__(self) -> str:
        return f"<BatchedGenerations {self._state.value}: {len(self._in_flight)} in flight, {self.waiting} waiting>"

    @property
    def in_flight(self) -> int:
        """How many requests are being generated for."""
        return len(self._in_flight)

    @property
    def waiting(self) -> int:
        """How many requests are held back."""
        return len(self._waiting)

    # -- the callers' side ----------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """Generate; a caller that is cancelled takes its request along.

        Raises:
            TaintedEngineError: The engine holds part of an update.
            EngineError: The request failed, or the thread that generates is gone.
        """
        self._submit(request)
        try:
            return await request.completion()
        finally:
            self._withdraw(request)

    async def stream(self, request: Request) -> AsyncGenerator[CompletionPart, None]:
        """Generate, and give the tokens as they come; an iterator that is closed takes its request along.

        Raises:
            TaintedEngineError: The engine holds part of an update.
            EngineError: The request failed, or the thread that generates is gone.
        """
        self._submit(request)
        try:
            ended = False
            while not ended:
                await request.changed()
                with self._mutex:
                    parts, ended = request.news()
                for part in parts:
                    yield part
        finally:
            self._withdraw(request)

    def _submit(self, request: Request) -> None:
        with self._mutex:
            if self._refusal is not None:
                raise _anew(self._refusal)
            if self._state is BatchState.HELD:
                self._waiting.append(request)
            else:
                self._begin(request, self._version())

    def _begin(self, request: Request, version: int | None) -> None:
        prompt, max_new_tokens = request.begin(version)
        request.key = key = next(self._keys)
        self._in_flight[key] = request
        self._batch.add(key, prompt, max_new_tokens, request.stop, request.options)

    def _withdraw(self, request: Request) -> None:
        """Forget a request whose caller has gone, if it has not ended."""
        with self._mutex:
            if request in self._waiting:
                self._waiting.remove(request)
            elif self._in_flight.get(request.key) is request:
                self._drop(request)
            emptied = self._take_emptied()
        _settle(emptied)

    def _drop(self, request: Request) -> None:
        del self._in_flight[request.key]
        self._batch.cancel(request.key)

    # -- the generating thread's side -----------------------------------------------------------------------------

    def take(self, outputs: Sequence[tuple[str, Sequence[int], bool, str | None]]) -> None:
        """Take what a step has come to.

        Args:
            outputs: For each request its key, all its tokens, whether it has ended, and why it has failed, if it has.
        """
        told: list[Request] = []
        ended: list[Request] = []
        with self._mutex:
            for key, tokens, is_over, failure in outputs:
                request = self._in_flight.get(key)
                if request is None:
                    if not is_over:
                        self._batch.cancel(key)  # again: a cancellation may come in between, and be lost
                    continue
                request.take(tokens)
                if not is_over:
                    told.append(request)
                    continue
                if failure is None:
                    request.finish()
                else:
                    request.fail(EngineError(f"the request failed: {failure}"))
                del self._in_flight[key]
                ended.append(request)
            emptied = self._take_emptied()
        for request in told:
            request.tell()
        for request in ended:
            request.settle()
        _settle(emptied)

    def end(self, error: AsyncSyncError) -> None:
        """The thread that generates is gone: whoever waits is told, and whoever comes."""
        with self._mutex:
            if self._state is BatchState.ENDED:
                return
            self._state, self._refusal = BatchState.ENDED, error
            ended = self._fail_all(error)
            emptied, self._emptied = self._emptied, []
        for request in ended:
            request.settle()
        for future in emptied:
            if future.set_running_or_notify_cancel():
                future.set_exception(_anew(error))

    def _fail_all(self, error: AsyncSyncError) -> list[Request]:
        ended = [*self._in_flight.values(), *self._waiting]
        for request in ended:
            request.fail(_anew(error))
        self._in_flight.clear()
        self._waiting.clear()
        return ended

    # -- the control loop's side ----------------------------------------------------------------------------------

    async def hold(self, policy: Policy) -> None:
        """See :meth:`asyncsync.engines.gate.Generations.hold`.

        Raises:
            EngineError: The thread that generates is gone.
        """
        drained = self._shut(policy)
        await self._gate.hold("drain")
        if drained is not None:
            await asyncio.wrap_future(drained)
        await self._batch.park()

    def _shut(self, policy: Policy) -> Future[None] | None:
        ended: list[Request] = []
        drained: Future[None] | None = None
        with self._mutex:
            if self._state is BatchState.ENDED:
                assert self._refusal is not None
                raise _anew(self._refusal)
            if self._state is BatchState.OPEN:
                self._state = BatchState.HELD
            if policy == "drain":
                drained = Future()
                self._emptied.append(drained)
                self._go_on()  # those whom an earlier hold has kept
            for request in list(self._in_flight.values()):
                request.recompute = policy == "recompute"
                if policy == "abort":
                    self._drop(request)
                    ended.append(request)
            if policy == "abort":
                # Those who came to the same pause, too: their callers may be what the update waits for.
                ended += self._waiting
                self._waiting.clear()
            for request in ended:
                request.end("abort")
            emptied = self._take_emptied()
        for request in ended:
            request.settle()
        _settle(emptied)
        return drained

    def resume(self) -> None:
        """See :meth:`asyncsync.engines.gate.Generations.resume`."""
        with self._mutex:
            if self._state is BatchState.ENDED:
                return
            self._state, self._refusal = BatchState.OPEN, None
            self._go_on()
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._begin(request, self._version())
        self._gate.resume()

    def _go_on(self) -> None:
        """Let those in flight go on, with the weights of now."""
        version = self._version()
        for request in list(self._in_flight.values()):
            if request.goes_on(version) and request.recompute:
                self._drop(request)
                self._begin(request, version)
        self._batch.unpark()

    def bar(self, reason: str) -> None:
        """See :meth:`asyncsync.engines.gate.Generations.bar`."""
        error = TaintedEngineError(reason)
        self._gate.bar(reason)
        with self._mutex:
            if self._state is BatchState.ENDED:
                return
            self._state, self._refusal = BatchState.BARRED, error
            for key in self._in_flight:
                self._batch.cancel(key)
            ended = self._fail_all(error)
            emptied = self._take_emptied()
        for request in ended:
            request.settle()
        _settle(emptied)

    def _take_emptied(self) -> list[Future[None]]:
        if self._in_flight:
            return []
        emptied = [future for future in self._emptied if future.set_running_or_notify_cancel()]
        self._emptied.clear()
        return emptied


def _anew(error: AsyncSyncError) -> AsyncSyncError:
    """The same error once more: one object must not be raised at several places."""
    again = type(error)(str(error))
    again.__cause__ = error.__cause__
    return again


def _settle(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.set_result(None)
