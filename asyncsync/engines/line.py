"""A line to an engine's actor on the conductor's node: what an update asks for in its hot path goes over it.

A call through Ray takes a millisecond or more each way; over a connection of its own it takes a fifth of that. All else
is called through Ray, and so is everything where there is no line: on another node, or once it broke, until the engine
joins a group again. Through Ray the actor is asked to connect, and told the token; and what a call raised comes back
through Ray too, whole, with the actor's traceback.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Any

from asyncsync import cluster
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.channel import Calls, Exchange, Hello, Line, LineBrokenError, answer_over, as_error
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

PATIENCE = 3.0
"""Seconds, once a line broke, for Ray to tell whether the actor is gone."""

KEPT = 60.0
"""Seconds for which an actor keeps what a call has raised."""

_log = logging.getLogger("asyncsync")


class ActorLine:
    """The conductor's end.

    As long as it is open, a call through Ray waits at the actor for its end: so Ray's news of a death come as they come
    to any call, and a process that is gone is told from a connection that broke.

    Args:
        handle: The actor's.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._exchange: Exchange | None = None
        self._line: Line | None = None
        self._held: asyncio.Task[bool] | None = None
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<ActorLine {self._line!r}>"

    def __del__(self) -> None:
        """An engine that was let go of, and is not told."""
        if self._exchange is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and with it the line
                self._loop.call_soon_threadsafe(self._exchange.close)

    @property
    def is_open(self) -> bool:
        """Whether it can be called over."""
        if self._line is None or self._loop is not asyncio.get_running_loop():
            return False  # of another loop's it is not known whether anybody listens still
        return self._line.is_open

    async def open(self) -> None:
        """Have the actor connect, unless it has. If it cannot, there is no line."""
        async with self._opening:
            if not self.is_open:
                self.close()
                await self._open()

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        exchange = self._exchange = Exchange(LOOPBACK, CALLS, proves=True)
        held: asyncio.Task[bool] | None = None
        try:
            async with asyncio.timeout(LINE_TIMEOUT):
                port = await exchange.open()
                calling = cluster.call(self._handle, "open_control_line", exchange.token, exchange.secret, port)
                held = asyncio.ensure_future(calling)
                held.add_done_callback(partial(_ended, exchange))
                (line,) = await exchange.all_lines(LINE_TIMEOUT)
            if self._exchange is exchange:  # else it was closed in this very moment
                self._line, self._held = line, held
        except Exception as error:  # noqa: BLE001 - whatever it is, there is Ray
            _log.info("no line to %s: %s", cluster.actor_class_name(self._handle), error)
        finally:
            exchange.listen_no_more()
            if self._exchange is not exchange or self._line is None:
                exchange.close()
                if held is not None:
                    held.cancel()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the actor.

        Raises:
            Exception: What the method raised, as it raised it.
            ActorLostError: Its process is gone, or was replaced.
            LineBrokenError: The line broke, and the actor is not known to be gone.
        """
        exchange, line, held = self._exchange, self._line, self._held
        assert exchange is not None
        assert line is not None
        assert held is not None
        try:
            answer = await line.answer_to(method, *arguments)
        except LineBrokenError:
            await asyncio.wait([held], timeout=PATIENCE)
            lost = held.exception() if held.done() and not held.cancelled() else None
            raise lost if isinstance(lost, cluster.ActorLostError) else LineBrokenError("its line broke") from lost
        if answer.error is None:
            return line.value_of(method, answer)
        await cluster.call(self._handle, "repeat_control_error", exchange.token, answer.number)
        raise as_error(answer)  # the actor has forgotten

    def close(self) -> None:
        """Hang up. Does not wait."""
        exchange, held = self._exchange, self._held
        self._exchange = self._line = self._held = None
        if exchange is not None:
            exchange.close()
        if held is not None:
            with suppress(RuntimeError):  # its loop is closed
                held.cancel()


def _ended(exchange: Exchange, held: asyncio.Task[bool]) -> None:
    """The actor is gone, or has hung up, or could not connect."""
    exchange.close()
    if not held.cancelled():
        held.exception()  # is looked at, if it is asked for


class AnsweredLines:
    """The actor's end of all lines to it: one to each conductor."""

    def __init__(self) -> None:
        self._errors: dict[str, dict[int, BaseException]] = {}
        self._left: set[asyncio.Task[None]] = set()  # calls of conductors that are gone: they run on, as Ray's do

    def __repr__(self) -> str:
        return f"<AnsweredLines: {len(self._errors)}>"

    async def open(self, engine: object, token: str, secret: str, port: int) -> bool:
        """Connect to a conductor, and answer its calls until it hangs up.

        Args:
            engine: Whose methods it calls.
            token: What the conductor knows it by.
            secret: What it knows the conductor by.
            port: Where it listens.

        Returns:
            Whether it could be reached.
        """
        try:
            async with asyncio.timeout(LINE_TIMEOUT):
                reader, writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError as error:  # a timeout is one
            _log.info("no line to a conductor: %s", error)
            return False
        errors = self._errors[token] = {}

        def failed(number: int, error: BaseException) -> None:
            errors[number] = error
            # Its traceback holds on to a lot, and who was cancelled does not ask for it.
            asyncio.get_running_loop().call_later(KEPT, errors.pop, number, None)

        hello = Hello(token=token, rank=0, ranks=1)
        try:
            await answer_over(engine, hello, reader, writer, CALLS, secret, failed, self._left)
        finally:
            self._errors.pop(token, None)
        return True

    def repeat_error(self, token: str, number: int) -> None:
        """Raise what a call has raised, once more."""
        if (error := self._errors.get(token, {}).pop(number, None)) is not None:
            raise error
