"""A line to an engine's actor on the conductor's node: what an update asks for in its hot path goes over it.

A call through Ray takes a millisecond or more each way; over a connection of its own it takes a fifth of that. All else
is called through Ray, and so is everything where there is no line: on another node, or once it broke, until the engine
joins a group again. Through Ray the actor is asked to connect, and told the token; and what a call raised comes back
through Ray too, whole, with the actor's traceback.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from asyncsync import cluster
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.channel import Calls, Exchange, Hello, Line, LineBrokenError, answer_over
from asyncsync.errors import EngineError
from asyncsync.messages import Policy, UpdateOrder

CALLS: Calls = {
    "pause_generation": (tuple[int, Policy], None),
    "receive_weights": (tuple[UpdateOrder], EngineReceipt),
    "finish_weight_update": (tuple[UpdateOrder], float | None),
    "resume_generation": (tuple[int], None),
}
"""The calls that an engine's actor answers over its line."""

LOOPBACK = "127.0.0.1"
LINE_TIMEOUT = 5.0
"""Seconds within which the actor must connect."""

PATIENCE = 1.0
"""Seconds for an actor whose line broke to say that it is there."""

KEPT = 60.0
"""Seconds for which an actor keeps what a call has raised."""

_REMEMBERED = 64  # lines that have ended: their conductors may ask still

_log = logging.getLogger("asyncsync")


class ActorLine:
    """The conductor's end.

    Args:
        handle: The actor's.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._exchange: Exchange | None = None
        self._line: Line | None = None
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ActorLine {self._line!r}>"

    @property
    def is_open(self) -> bool:
        """Whether it can be called over."""
        return self._line is not None and self._line.is_open

    async def open(self) -> None:
        """Have the actor connect, unless it has. If it cannot, there is no line."""
        async with self._opening:
            if not self.is_open:
                self.close()
                await self._open()

    async def _open(self) -> None:
        exchange = self._exchange = Exchange(LOOPBACK, CALLS)
        try:
            if await cluster.call(self._handle, "open_line", exchange.token, await exchange.open()):
                (self._line,) = await exchange.all_lines(LINE_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is Ray
            _log.info("no line to %s: %s", cluster.actor_class_name(self._handle), error)
        finally:
            exchange.listen_no_more()
            if self._line is None:
                exchange.close()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the actor.

        Raises:
            Exception: What the method raised, as it raised it.
            ActorLostError: Its process is gone, or was replaced.
        """
        exchange, line = self._exchange, self._line
        assert exchange is not None
        assert line is not None
        try:
            return await line.call(method, *arguments)
        except LineBrokenError:
            error: Exception = EngineError("its connection broke")
            patience: float | None = PATIENCE  # an actor that Ray starts anew answers in its own time
        except Exception as raised:  # noqa: BLE001 - the actor has kept what it was
            error, patience = raised, None
        try:
            async with asyncio.timeout(patience):
                knows = await cluster.call(self._handle, "repeat_error", exchange.token, method, _epoch_of(arguments))
        except TimeoutError:
            if patience is None:
                raise
            knows = False
        raise error if knows else cluster.actor_was_lost("its connection broke, and it does not answer")

    def close(self) -> None:
        """Hang up. Does not wait."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._line = None


class AnsweredLines:
    """The actor's end of all lines to it: one to each conductor."""

    def __init__(self) -> None:
        self._errors: dict[str, dict[tuple[str, int], Exception]] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._answering: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<AnsweredLines: {len(self._errors)}>"

    async def open(self, engine: object, token: str, port: int) -> bool:
        """Connect to a conductor, and answer its calls until it hangs up.

        Args:
            engine: Whose methods it calls.
            token: What the conductor knows it by.
            port: Where it listens.

        Returns:
            Whether it could be reached.
        """
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError as error:
            _log.info("no line to a conductor: %s", error)
            return False
        answering = asyncio.ensure_future(self._answer(engine, token, reader, writer))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        return True

    async def _answer(
        self, engine: object, token: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        errors = self._errors[token] = {}

        def failed(method: str, arguments: tuple[Any, ...], error: Exception) -> None:
            key = method, _epoch_of(arguments)
            errors.clear()  # their tracebacks hold on to a lot
            errors[key] = error
            asyncio.get_running_loop().call_later(KEPT, errors.pop, key, None)

        try:
            await answer_over(engine, Hello(token=token, rank=0, ranks=1), reader, writer, CALLS, failed)
        finally:
            del self._errors[token]
            self._ended.append(token)

    def repeat_error(self, token: str, method: str, epoch: int) -> bool:
        """Raise what a call has raised, once more.

        Returns:
            Whether the line is one of this process.
        """
        if (error := self._errors.get(token, {}).pop((method, epoch), None)) is not None:
            raise error
        return token in self._errors or token in self._ended


def _epoch_of(arguments: tuple[Any, ...]) -> int:
    first = arguments[0]
    epoch: int = first.epoch if isinstance(first, UpdateOrder) else first
    return epoch
