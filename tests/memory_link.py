"""Groups within one process, in place of gloo's: real bytes are copied, real threads wait, and nothing listens."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from torch import Tensor

from asyncsync.errors import ConnectError, LinkLostError, TransferError
from asyncsync.messages import Contacts, Rendezvous

SLICE = 0.02  # seconds of a wait; in between it is looked whether it is still wanted


class Room:
    """A group: who is in it, and what was sent."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.joined: set[int] = set()
        self.closed = False
        self.sent: list[Tensor] = []
        self.taken: dict[int, int] = defaultdict(int)  # how many were taken, by rank

    def wait_for(self, done: Callable[[], bool], stop: threading.Event) -> bool:
        """Wait until something is so, it is stopped, or the group is closed."""
        with self.changed:
            while not done():
                if stop.is_set() or self.closed:
                    return False
                self.changed.wait(SLICE)
        return True


ROOMS: dict[str, Room] = {}


class MemoryJoining:
    """In place of :class:`asyncsync.transports.broadcast.Joining`."""

    def __init__(self, rendezvous: Rendezvous, *, address: str) -> None:
        self.rendezvous = rendezvous
        self._stopped = threading.Event()
        self._room = ROOMS.setdefault(rendezvous.connection, Room())

    def join(self) -> MemoryLink:
        room, size = self._room, self.rendezvous.world_size
        with room.changed:
            room.joined.add(self.rendezvous.rank)
            room.changed.notify_all()
        if not room.wait_for(lambda: len(room.joined) == size, self._stopped):
            raise ConnectError("joining was stopped")
        return MemoryLink(self.rendezvous, room)

    async def contacts(self) -> Contacts:
        return {str(self.rendezvous.rank): b""}

    def introduce(self, contacts: Contacts) -> None:
        if len(contacts) != self.rendezvous.world_size:
            self.stop()

    def stop(self) -> None:
        self._stopped.set()


class MemoryLink:
    """In place of :class:`asyncsync.transports.broadcast.BroadcastLink`."""

    device = "cpu"

    def __init__(self, rendezvous: Rendezvous, room: Room) -> None:
        self.connection = rendezvous.connection
        self._rank, self._others = rendezvous.rank, range(1, rendezvous.world_size)
        self._room = room
        self._started = 0

    def _start(self) -> int:
        if self._room.closed:
            raise TransferError("the link was closed")
        self._started += 1
        return self._started

    def start_send(self, flat: Tensor) -> object:
        number = self._start()
        with self._room.changed:
            self._room.sent.append(flat)
            self._room.changed.notify_all()
        return number, None

    def start_receive(self, flat: Tensor) -> object:
        return self._start(), flat

    def wait(self, handle: tuple[int, Tensor | None], stop: threading.Event) -> None:
        number, buffer = handle
        room = self._room
        if buffer is None:
            arrived = room.wait_for(lambda: all(room.taken[rank] >= number for rank in self._others), stop)
        elif arrived := room.wait_for(lambda: len(room.sent) >= number, stop):
            buffer.copy_(room.sent[number - 1])
            with room.changed:
                room.taken[self._rank] = number
                room.changed.notify_all()
        if not arrived:
            raise LinkLostError("the group was closed")

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> None:
        return None

    def finish(self) -> None:
        pass

    def close(self) -> None:
        with self._room.changed:
            self._room.closed = True
            self._room.changed.notify_all()
        ROOMS.pop(self.connection, None)

    def is_quiet(self, timeout: float) -> bool:
        return True
