"""A line to a rank that lives inside another program's process: calls there, answers back, over one TCP connection.

Real engines run ranks in worker processes of their own, which their API reaches only between two steps of generation.
An update's calls must be answered while the engine generates, loads or hangs, so each rank keeps a connection of its
own to whoever conducts it. The rank connects, to an address and with a token that came in through the engine's API.

Messages are msgpack, each behind its length, decoded into the very dataclasses that are expected and nothing else: no
side can make the other run anything but calls that are listed. This module and its neighbours for vLLM are the
only users of ``msgspec``.

Of the library's own engines, actors on the conductor's node have such a line, too (:mod:`asyncsync.engines.line`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch

from asyncsync import errors
from asyncsync.engines.base import EngineReceipt
from asyncsync.errors import AsyncSyncError, ConnectError, EngineError, PlanError
from asyncsync.fanout import is_ours
from asyncsync.messages import PROTOCOL_VERSION, Contacts, EngineStatus, Layout, Rendezvous, UpdateOrder

T = TypeVar("T")

Calls: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Calls that can be made: what they take, and what they return."""

CALLS: Calls = {
    "describe_engine": (tuple[()], EngineStatus),
    "accept_layout": (tuple[Layout], None),
    "open_group": (tuple[Rendezvous], Contacts),
    "join_group": (tuple[str, Contacts], None),
    "leave_group": (tuple[str], None),
    "receive_weights": (tuple[UpdateOrder], EngineReceipt),
    "abort_weight_update": (tuple[int, int | None], EngineStatus),
    "note_pause": (tuple[int, bool], None),
    "check_pause": (tuple[int], None),
    "released_memory": (tuple[()], dict[str, bool]),
}
"""The calls that a rank in a program of its own answers."""

HELLO_TIMEOUT = 5.0
"""Seconds within which who connects must say who it is."""

MAX_MESSAGE = 2**30
"""Bytes that a message may have at the most."""

MAX_HELLO = 2**12
"""Bytes that the first one may have, of somebody who may be a stranger."""

_LENGTH = struct.Struct("!I")
_ERRORS: Mapping[str, type[AsyncSyncError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AsyncSyncError) and kind is not errors.EngineErrorGroup
}
_log = logging.getLogger("asyncsync")


class LineBrokenError(EngineError):
    """The other side is gone, or has hung up."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a rank."""

    token: str
    rank: int
    ranks: int
    protocol: int = PROTOCOL_VERSION


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a conductor to a rank that asks for it."""

    secret: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A call, or the end of one: without a method, the call of that number is cancelled."""

    number: int
    method: str = ""
    arguments: bytes = b""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call came to: a value, or the error's class, text and names."""

    number: int
    value: bytes = b""
    error: str | None = None
    message: str = ""
    names: tuple[str, ...] = ()


def _to_wire(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"{type(value).__name__} is not sent")


def _from_wire(kind: type, value: object) -> object:
    if kind is torch.dtype and isinstance(value, str) and isinstance(dtype := getattr(torch, value, None), torch.dtype):
        return dtype
    raise ValueError(f"{value!r} is no {kind.__name__}")


def encode(value: object) -> bytes:
    """A value as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_to_wire)


def decode(data: bytes, kind: type[T]) -> T:
    """A value of a kind.

    Raises:
        msgspec.ValidationError: It is something else.
    """
    value: T = msgspec.msgpack.decode(data, type=kind, dec_hook=_from_wire)
    return value


async def _read(reader: asyncio.StreamReader, kind: type[T], most: int = MAX_MESSAGE) -> T:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise EngineError(f"a message of {length} bytes")
    return decode(await reader.readexactly(length), kind)


def _write(writer: asyncio.StreamWriter, message: object) -> None:
    data = encode(message)
    writer.write(_LENGTH.pack(len(data)) + data)


def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection; the other side hears of it even if a forked child of this process has it, too."""
    try:
        connection = writer.get_extra_info("socket")
        if connection is not None and (fd := connection.fileno()) >= 0:
            with socket.socket(fileno=os.dup(fd)) as own:  # that of uvloop has no shutdown()
                own.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was faster
    finally:
        with suppress(RuntimeError):  # its loop is closed
            writer.close()


def _told(number: int, error: BaseException) -> Answer:
    """What is said of an error: something, whatever it is."""
    try:
        text = _sayable(error)
        names = tuple(map(_sayable, error.names)) if isinstance(error, PlanError) else ()
    except Exception:  # noqa: BLE001 - it cannot even say what it is
        text, names = "", ()
    return Answer(number=number, error=type(error).__name__, message=text, names=names)


def _sayable(value: object) -> str:
    return str(value).encode(errors="backslashreplace").decode()


class Line:
    """The conductor's end: calls one rank.

    Args:
        hello: What the rank said.
        reader: From the rank.
        writer: To it.
        calls: What it answers.

    Attributes:
        rank: Which of the engine's ranks it is.
        ranks: How many there are.
    """

    def __init__(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, calls: Calls = CALLS
    ) -> None:
        self.rank = hello.rank
        self.ranks = hello.ranks
        self._calls = calls
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._listening = asyncio.ensure_future(self._listen())

    def __repr__(self) -> str:
        return f"<Line to rank {self.rank} of {self.ranks}: {'open' if self.is_open else 'broken'}>"

    @property
    def is_open(self) -> bool:
        """Whether the rank can be called."""
        return not self._listening.done()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the rank; cancelled, the call is cancelled there as well.

        Raises:
            AsyncSyncError: What the rank raised.
            LineBrokenError: It is gone.
            EngineError: It raised something else.
        """
        answer = await self.answer_to(method, *arguments)
        if answer.error is not None:
            raise as_error(answer)
        return self.value_of(method, answer)

    async def answer_to(self, method: str, *arguments: Any) -> Answer:
        """Call the rank; cancelled, the call is cancelled there as well.

        Raises:
            LineBrokenError: It is gone.
        """
        number = next(self._numbers)
        encoded = await asyncio.to_thread(encode, arguments) if method == "accept_layout" else encode(arguments)
        self._check_open()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            _write(self._writer, Request(number=number, method=method, arguments=encoded))
            return await answer
        except asyncio.CancelledError:
            if self.is_open:
                _write(self._writer, Request(number=number))
            raise
        finally:
            del self._waiting[number]

    def value_of(self, method: str, answer: Answer) -> Any:
        """What the method has returned."""
        kind = self._calls[method][1]
        return None if kind is None else decode(answer.value, kind)

    def _check_open(self) -> None:
        if not self.is_open:
            raise LineBrokenError(f"rank {self.rank} is gone: its connection broke")

    async def _listen(self) -> None:
        try:
            while True:
                answer = await _read(self._reader, Answer)
                if (waiting := self._waiting.get(answer.number)) is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError, EngineError) as error:
            gone = f"rank {self.rank} is gone: its connection broke"
            _log.info("%s: %s", gone, error)
        finally:
            _hang_up(self._writer)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(LineBrokenError(f"rank {self.rank} is gone: its connection broke"))

    def close(self) -> None:
        """Hang up. Does not wait."""
        _hang_up(self._writer)
        with suppress(RuntimeError):  # its loop is closed
            self._listening.cancel()


def as_error(answer: Answer) -> AsyncSyncError:
    """What is known of an error from an answer."""
    kind = _ERRORS.get(answer.error or "")
    if kind is None:
        return EngineError(f"{answer.error}: {answer.message}")
    return PlanError(answer.message, names=answer.names) if kind is PlanError else kind(answer.message)


class Exchange:
    """Where the ranks of one engine connect to.

    Args:
        address: Where this process is reached from theirs.
        calls: What they answer.
        proves: Whether to say the secret to who has said the token.

    Attributes:
        address: Where it listens.
        token: What a rank must know.
        secret: What a rank may want to hear before it obeys.
    """

    def __init__(self, address: str, calls: Calls = CALLS, *, proves: bool = False) -> None:
        self.address = address
        self.secret = secrets.token_hex(16)
        self._proves = proves
        self._calls = calls
        self.token = secrets.token_hex(16)
        self._lines: dict[int, Line] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Exchange at {self.address}: {len(self._lines)} ranks>"

    @property
    def lines(self) -> list[Line]:
        """The lines to all ranks, in order; empty unless every one is open."""
        lines = [line for _, line in sorted(self._lines.items())]
        whole = bool(lines) and len(lines) == lines[0].ranks and all(line.is_open for line in lines)
        return lines if whole else []

    async def open(self) -> int:
        """Listen.

        Returns:
            The port.

        Raises:
            ConnectError: It cannot.
        """
        if self._server is None:
            try:
                self._server = await asyncio.start_server(self._connected, self.address, 0)
            except OSError as error:
                raise ConnectError(f"cannot listen at {self.address} for the engine's ranks: {error}") from error
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                hello = await _read(reader, Hello, MAX_HELLO)
            if not secrets.compare_digest(hello.token.encode(), self.token.encode()):
                raise ConnectError("a stranger connected, who does not know the token")
            if hello.protocol != PROTOCOL_VERSION:
                raise ConnectError(
                    f"rank {hello.rank} speaks asyncsync protocol {hello.protocol}, not {PROTOCOL_VERSION}"
                )
            if self._closed:
                raise ConnectError(f"rank {hello.rank} came when nobody waited for it any more")
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError, AsyncSyncError) as error:
            _log.warning("a connection was refused: %s", error)
            writer.close()
            return
        if self._proves:
            _write(writer, Welcome(secret=self.secret))
        if (old := self._lines.get(hello.rank)) is not None:
            old.close()
        self._lines[hello.rank] = Line(hello, reader, writer, self._calls)
        self._changed.set()

    async def all_lines(self, timeout: float) -> list[Line]:
        """The lines to all ranks, in order, once they have connected.

        Raises:
            ConnectError: They did not, in time.
        """
        try:
            async with asyncio.timeout(timeout):
                while not self.lines:
                    if self._closed:
                        raise ConnectError("nobody waits for the engine's ranks any more")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise ConnectError(
                f"the engine's ranks did not connect to {self.address} within {timeout:.3g} s: can they reach it?"
            ) from error
        return self.lines

    def listen_no_more(self) -> None:
        """Let nobody else connect. Does not wait."""
        self._closed = True
        self._changed.set()
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Hang up, and listen no more. Does not wait."""
        self.listen_no_more()
        for line in self._lines.values():
            line.close()


async def answer_calls(
    rank: object, hello: Hello, address: str, port: int, connected: Callable[[str], None] = lambda address: None
) -> None:
    """The rank's end: connect, and answer calls until the other side hangs up.

    Args:
        rank: Has the methods of :data:`CALLS`.
        hello: Who it is.
        address: Where the conductor listens.
        port: Its port there.
        connected: Told the address by which the conductor's machine sees this one.

    Raises:
        OSError: The conductor cannot be reached.
    """
    reader, writer = await asyncio.open_connection(address, port)
    connected(writer.get_extra_info("sockname")[0])
    await answer_over(rank, hello, reader, writer)


async def answer_over(
    rank: object,
    hello: Hello,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    calls: Calls = CALLS,
    secret: str | None = None,
    failed: Callable[[int, BaseException], None] = lambda number, error: None,
    left: set[asyncio.Task[None]] | None = None,
) -> None:
    """:func:`answer_calls` over a connection that is there.

    Args:
        rank: Has the methods of the calls.
        hello: Who it is.
        reader: From the conductor.
        writer: To it.
        calls: What it answers; nothing else can be called.
        secret: What the conductor must say first; None if it says nothing.
        failed: Told the number of a call, and what it has raised.
        left: Takes the calls that still run when the conductor hangs up, and are to run to their end; None if they are
            to be cancelled.
    """
    running: dict[int, asyncio.Task[None]] = {}

    def ended(number: int, task: asyncio.Task[None]) -> None:
        del running[number]

    async def answer(request: Request) -> None:
        try:
            kind, returns = calls[request.method]
            value = await getattr(rank, request.method)(*decode(request.arguments, kind))
            said = Answer(number=request.number, value=b"" if returns is None else encode(value))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | GeneratorExit | KeyboardInterrupt) and is_ours(error):
                raise
            failed(request.number, error)
            said = _told(request.number, error)
        if not writer.is_closing():  # else nobody waits for it any more
            _write(writer, said)

    try:
        _write(writer, hello)
        if secret is not None:
            async with asyncio.timeout(HELLO_TIMEOUT):
                welcome = await _read(reader, Welcome, MAX_HELLO)
            if not secrets.compare_digest(welcome.secret.encode(), secret.encode()):
                raise EngineError("it does not know the secret")
        while True:
            request = await _read(reader, Request)
            if request.method:
                task = running[request.number] = asyncio.ensure_future(answer(request))
                task.add_done_callback(partial(ended, request.number))
            elif (cancelled := running.get(request.number)) is not None:
                cancelled.cancel()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the conductor has hung up
    except (TimeoutError, msgspec.DecodeError, EngineError) as error:
        _log.warning("whoever listens is no conductor of ours: %s", error)
    finally:
        for task in list(running.values()):
            if left is None:
                task.cancel()
            else:
                left.add(task)
                task.add_done_callback(left.discard)
        _hang_up(writer)
        with suppress(OSError):
            await writer.wait_closed()
