"""An object in a second process, whose methods are called like an actor's: ``await peer.method.remote(…)``.

No Ray actor, since the trainer's process is the one that runs under the saver's hook: Ray's processes inherit that, and
Ray hides the GPU from an actor that asks for none. And CUDA IPC goes from process to process by torch's own pickling.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch.multiprocessing  # noqa: F401 - registers how tensors are shared

from benchmarks.gpu_place import said

MADE = -1
"""Number of the message that tells that the object was made."""

END_TIMEOUT = 5.0
"""Seconds that a process may take to end."""

_Message: TypeAlias = tuple[int, str, bytes]
"""Of a call its number, the method and the arguments; of its answer the number, "" and the result, or the error.

What is packed on its own can fail to be unpacked on its own: CUDA IPC memory is opened then.
"""


class Peer:
    """The object, seen from outside; make it with :meth:`start`."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._made = self._waiting[MADE] = self._loop.create_future()
        threading.Thread(target=self._read, name="peer", daemon=True).start()

    @classmethod
    @asynccontextmanager
    async def start(cls, make: Callable[..., Any], *args: Any) -> AsyncIterator[Any]:
        """Start a process, and make the object in it; both end with the context.

        Args:
            make: Makes it; a function or class that can be imported.
            args: What it is made of.

        Raises:
            ConnectionError: The process has ended; of a call, too.
            Exception: What making it raised.
        """
        context = multiprocessing.get_context("spawn")  # a process that uses CUDA must not be forked
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, make, args), daemon=True)
        with _without_hook():
            process.start()
        there.close()
        peer = cls(process, here)
        try:
            await peer._made
            yield peer
        finally:
            with suppress(OSError):
                here.send(None)
            await asyncio.to_thread(process.join, END_TIMEOUT)
            if process.is_alive():
                process.kill()

    def __getattr__(self, name: str) -> Any:
        """A method; what it raises, so does its call."""
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def _call(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        packed = _pack(args)
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        try:
            self._connection.send((number, method, packed))
        except OSError as error:
            del self._waiting[number]
            raise ConnectionError("the other process has ended") from error
        return future

    def _read(self) -> None:
        with suppress(EOFError, OSError, RuntimeError):  # the last: the loop is closed
            while True:
                self._loop.call_soon_threadsafe(self._take, self._connection.recv())
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _take(self, reply: _Message) -> None:
        number, _, packed = reply
        future = self._waiting.pop(number)
        if future.done():
            return
        result = pickle.loads(packed)
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _end(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the other process has ended"))


def _pack(value: Any) -> bytes:
    return bytes(ForkingPickler.dumps(value))


class _Method:
    def __init__(self, peer: Peer, name: str) -> None:
        self._peer, self._name = peer, name

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return self._peer._call(self._name, args)


@contextmanager
def _without_hook() -> Iterator[None]:
    """What is started meanwhile is not under the saver's hook."""
    taken = {name: value for name, value in os.environ.items() if name == "LD_PRELOAD" or name.startswith("TMS_")}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)


def _serve(connection: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    asyncio.run(_answer(connection, make, args))


async def _answer(connection: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        served = make(*args)
    except Exception as error:
        connection.send((MADE, "", _pack(RuntimeError(f"it could not be made: {said(error)}"))))
        raise
    connection.send((MADE, "", _pack(None)))
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, method: str, packed: bytes) -> None:
        try:
            result = getattr(served, method)(*pickle.loads(packed))
            reply = await result if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001 - it is the caller's
            reply = error
        try:
            packed = _pack(reply)
            pickle.loads(packed)  # some errors cannot be made again from what they say
        except Exception:  # noqa: BLE001
            packed = _pack(RuntimeError(said(reply) if isinstance(reply, Exception) else repr(reply)))
        with suppress(OSError):
            connection.send((number, "", packed))

    def begin(call: _Message) -> None:
        task = loop.create_task(answer(*call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        with suppress(EOFError, OSError):  # whoever started this has ended
            while (call := connection.recv()) is not None:
                loop.call_soon_threadsafe(begin, call)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, name="peer", daemon=True).start()
    await ended.wait()
