"""How many buckets a source has begun to send, told to whoever conducts those that receive.

An engine that receives by itself may have no timeout: told to receive what is not sent, it hangs for ever. So its
conductor waits until the source has begun with a bucket before it has the engine receive it. What it waits on is a
plain connection to the source, which hears of its end at once; it carries a number, and nothing that needs a secret.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from asyncsync.errors import ConnectError, LinkLostError

_COUNT = struct.Struct("!Q")
_CONNECT_TIMEOUT = 10.0  # seconds


class SentCount:
    """The source's side: tells every watch, each time. Nothing here blocks.

    Args:
        address: This node's own address.
        watches: How many watches there may be; they connect before the first bucket, and are held until then.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, address: str, watches: int) -> None:
        self._listening = socket.create_server((address, 0), backlog=max(watches, 1))
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._watches: list[socket.socket] = []
        self._count = 0

    def add(self) -> None:
        """Count one more. A watch that does not read is dropped."""
        self._count += 1
        while (watch := self._accept()) is not None:
            watch.setblocking(False)
            self._watches.append(watch)
        for watch in list(self._watches):
            try:
                watch.sendall(_COUNT.pack(self._count))
            except OSError:
                watch.close()
                self._watches.remove(watch)

    def _accept(self) -> socket.socket | None:
        try:
            return self._listening.accept()[0]
        except OSError:
            return None  # there is none

    def close(self) -> None:
        """Hang up; every watch hears it."""
        for each in (self._listening, *self._watches):
            each.close()


class SentWatch:
    """A conductor's side; made by :func:`watch_source`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._count = 0

    async def wait_for(self, count: int) -> None:
        """Wait until the source has begun to send so many buckets, since the group was formed.

        Raises:
            LinkLostError: It has left, or this was closed.
        """
        while self._count < count:
            try:
                (self._count,) = _COUNT.unpack(await self._reader.readexactly(_COUNT.size))
            except (asyncio.IncompleteReadError, OSError) as error:
                raise LinkLostError("the source has left the group") from error

    def close(self) -> None:
        """Hang up. Does not wait."""
        self._writer.close()


async def watch_source(address: str, port: int) -> SentWatch:
    """Connect to a source.

    Raises:
        ConnectError: It cannot be reached.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            return SentWatch(*await asyncio.open_connection(address, port))
    except (OSError, TimeoutError) as error:
        raise ConnectError(f"the source at {address}:{port} cannot be reached: {error or 'in time'}") from error
