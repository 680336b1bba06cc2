"""Shared memory between a source and engines on its own node: the weights are written once, and read where they lie.

Between the source and each engine rank there is a *line*, a socket of two ends. Over it go a few bytes a message and
the descriptors of memory files, never a weight: which set this update's weights come to lie in, how many buckets are
there; and, back, that all were taken, and that a set was let go of (:mod:`~asyncsync.transports.memory_files`). Its
end is the end of whoever held it: a process that dies is heard at once.

The source listens on an abstract socket with a random name, which members hear over the control plane. Who connects
must be of the same user, as the kernel says, and know the group's name, which is random and never used again; anyone
else is turned away, and disturbs nobody. Nothing that comes in is more than numbers of a fixed width.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from asyncsync.errors import ConnectError, LinkLostError, TransferError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, Rendezvous
from asyncsync.transports.base import LentArena
from asyncsync.transports.memory_files import Mapping, WeightSet, WeightSets, is_sealed

HELLO_TIMEOUT = 5.0
"""Seconds within which who connects must say who it is."""

_SLICE = 0.02  # seconds of a wait; in between it is looked whether it is still wanted
_STRANGERS = 32  # who have connected and said nothing yet, at the most, beside those who are expected
_MAX_MESSAGE = 512
_MAGIC = b"asyncsync"
_HELLO = struct.Struct("!9sHI")  # then the group's name
_WELCOME = b"welcome"
_TO_ENGINE = struct.Struct("!BQQQ")  # what, the update's epoch, two numbers
SET, _BUCKETS, _FORGET = 1, 2, 3  # set and bytes (and a descriptor, if it is new there); how many are there; which set
_TO_SOURCE = struct.Struct("!BQQ")  # what, the update's epoch, a number
_TAKEN, LET_GO = 1, 2  # all of an update; which set

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _kept_from_children(own: socket.socket) -> socket.socket:
    """A socket that a forked child does not hold open: its end must be heard when this process dies."""
    _sockets.add(own)
    return own


def _close_in_child() -> None:
    for own in list(_sockets):
        own.close()


os.register_at_fork(after_in_child=_close_in_child)


class SharedJoining:
    """Lines that are being joined. Satisfies :class:`~asyncsync.transports.base.GroupJoining`.

    Args:
        rendezvous: Which group, and as whom.
        sets: At the source: where the weights come to lie.

    Raises:
        ConnectError: The two ends speak different protocols.
    """

    def __init__(self, rendezvous: Rendezvous, *, sets: WeightSets[Any] | None) -> None:
        if rendezvous.protocol != PROTOCOL_VERSION:
            raise ConnectError(
                f"this end speaks asyncsync protocol {PROTOCOL_VERSION}, the other {rendezvous.protocol}: "
                "install the same version of asyncsync at both"
            )
        if (rendezvous.rank == 0) != (sets is not None):
            raise ConnectError("shared memory leads from a trainer's source rank to engines")
        self.rendezvous = rendezvous
        self._sets = sets
        self._stopped = threading.Event()
        self._contacts: Future[Contacts] = Future()
        self._introduced: Future[Contacts] = Future()
        self._source_link: type[SharedSourceLink] = SharedSourceLink
        self._engine_link: type[SharedEngineLink] = SharedEngineLink

    def join(self) -> SharedSourceLink | SharedEngineLink:
        """Collective. Make the lines. Blocks until all members are there: called on the member's worker thread.

        Raises:
            ConnectError: Not every member came in time, the source could not be reached, or it was stopped.
        """
        deadline = time.monotonic() + self.rendezvous.join_timeout
        try:
            return self._connect(deadline) if self._sets is None else self._listen(self._sets, deadline)
        except (OSError, ConnectError) as error:
            rank, size = self.rendezvous.rank, self.rendezvous.world_size
            failed = ConnectError(f"rank {rank} of {size} could not join the group: {error}")
            with suppress(InvalidStateError):
                self._contacts.set_exception(failed)
            raise failed from error

    async def contacts(self) -> Contacts:
        """How this member is reached: the name that the source listens on; engines have none.

        Raises:
            ConnectError: It cannot be reached: joining has failed already.
        """
        return await asyncio.wrap_future(self._contacts)

    def introduce(self, contacts: Contacts) -> None:
        """Tell this member how the source is reached."""
        with suppress(InvalidStateError):
            self._introduced.set_result(contacts)

    def stop(self) -> None:
        """Have :meth:`join` give up at once."""
        self._stopped.set()

    def _check(self, deadline: float, late: str) -> None:
        if self._stopped.is_set():
            raise ConnectError("joining was stopped")
        if time.monotonic() > deadline:
            raise ConnectError(late)

    # -- the source ---------------------------------------------------------------------------------------------------

    def _listen(self, sets: WeightSets[Any], deadline: float) -> SharedSourceLink:
        expected = set(range(1, self.rendezvous.world_size))
        late = f"the other members did not come within {self.rendezvous.join_timeout:.3g} s"
        joined: dict[int, socket.socket] = {}
        strangers: dict[socket.socket, float] = {}
        with _kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
            name = b"\0asyncsync-" + secrets.token_hex(16).encode()
            listener.bind(name)
            listener.listen(len(expected) + _STRANGERS)
            listener.setblocking(False)
            with suppress(InvalidStateError):
                self._contacts.set_result({"0": name})
            try:
                while joined.keys() != expected:
                    self._check(deadline, late)
                    ready = _readable([listener, *strangers], _SLICE)
                    if listener in ready:
                        self._accept(listener, strangers, len(expected) + _STRANGERS)
                    for stranger in [one for one in strangers if one in ready]:
                        del strangers[stranger]
                        if (rank := self._rank_of(stranger)) in expected - joined.keys() and _said(stranger, _WELCOME):
                            joined[rank] = stranger
                        else:
                            stranger.close()
                    for stranger in [one for one, until in strangers.items() if time.monotonic() > until]:
                        del strangers[stranger]
                        stranger.close()
            except BaseException:
                for line in joined.values():
                    line.close()
                raise
            finally:
                for stranger in strangers:
                    stranger.close()
        return self._source_link(self.rendezvous.connection, joined, sets)

    def _accept(self, listener: socket.socket, strangers: dict[socket.socket, float], most: int) -> None:
        try:
            stranger = _kept_from_children(listener.accept()[0])
        except OSError:  # he has gone again
            return
        stranger.setblocking(False)
        if _is_of_this_user(stranger) and len(strangers) < most:
            strangers[stranger] = time.monotonic() + HELLO_TIMEOUT
        else:
            stranger.close()

    def _rank_of(self, stranger: socket.socket) -> int | None:
        """The rank that one who has connected proves to be; None if it proves nothing."""
        try:
            said = stranger.recv(_MAX_MESSAGE)
        except OSError:
            return None
        if len(said) < _HELLO.size:
            return None
        magic, protocol, rank = _HELLO.unpack_from(said)
        known = hmac.compare_digest(said[_HELLO.size :], self.rendezvous.connection.encode())
        return rank if known and (magic, protocol) == (_MAGIC, PROTOCOL_VERSION) else None

    # -- an engine ----------------------------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> SharedEngineLink:
        with suppress(InvalidStateError):
            self._contacts.set_result({})
        while not self._introduced.done():
            self._check(deadline, "nobody told where the source is")
            self._stopped.wait(_SLICE / 10)
        name = self._introduced.result().get("0")
        if name is None or not name.startswith(b"\0"):
            raise ConnectError("the source is not reached by shared memory")
        line = _kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            line.setblocking(False)
            while not _connected(line, name):
                self._check(deadline, f"the source did not answer within {self.rendezvous.join_timeout:.3g} s")
                self._stopped.wait(_SLICE / 10)
            if not _is_of_this_user(line):
                raise ConnectError("the source is another user's")
            hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, self.rendezvous.rank) + self.rendezvous.connection.encode()
            line.send(hello)
            while not _readable([line], _SLICE):
                self._check(deadline, f"the source did not answer within {self.rendezvous.join_timeout:.3g} s")
            if line.recv(_MAX_MESSAGE) != _WELCOME:
                raise ConnectError("the source has turned this end away")
        except BaseException:
            line.close()
            raise
        return self._engine_link(self.rendezvous.connection, self.rendezvous.rank, line)


def _readable(sockets: Sequence[socket.socket], timeout: float) -> list[socket.socket]:
    """Those of which something can be read, or that have ended. Not by ``select``: it knows files up to 1,023 only."""
    poll = select.poll()
    by_number = {one.fileno(): one for one in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(timeout * 1000)]


def _connected(line: socket.socket, name: bytes) -> bool:
    """Whether a line is connected: not yet, if too many others are just being let in."""
    try:
        line.connect(name)
    except BlockingIOError:
        return False
    return True


def _is_of_this_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _said(line: socket.socket, message: bytes) -> bool:
    try:
        line.send(message)
    except OSError:
        return False
    return True


class _Peer:
    """The source's end of one line. Its owner's lock is held around each call."""

    def __init__(self, rank: int, line: socket.socket) -> None:
        self.rank = rank
        self.line: socket.socket | None = line
        weakref.finalize(self, line.close).atexit = False
        self.known: set[int] = set()  # sets that it has mapped
        self.told = 0  # how many buckets it knows of
        self.taken_epoch = 0

    def say(self, what: int, epoch: int, *numbers: int, fds: Sequence[int] = (), more: bytes = b"") -> bool:
        """Whether a message has left: not if the line is full, or broken, which is found out by hearing."""
        if self.line is None:
            return False
        message = _TO_ENGINE.pack(what, epoch, *numbers, *[0] * (2 - len(numbers))) + more
        try:
            socket.send_fds(self.line, [message], list(fds))
        except OSError:
            return False
        return True

    def hear(self) -> Iterator[tuple[int, int, int]]:
        """What it has said; it ends in a ConnectionError if the line has ended, or carries anything else."""
        while self.line is not None:
            try:
                said = self.line.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            if len(said) != _TO_SOURCE.size:
                raise ConnectionError
            what, epoch, number = _TO_SOURCE.unpack(said)
            if what not in (_TAKEN, LET_GO):
                raise ConnectionError
            yield what, epoch, number


class SharedSourceLink:
    """The source's end of the lines to some engine ranks. Satisfies :class:`~asyncsync.transports.base.Link`.

    Attributes:
        connection: The group's name.
        device: Where the bytes are sent from: ``"cpu"``.
    """

    device = "cpu"

    def __init__(self, connection: str, lines: dict[int, socket.socket], sets: WeightSets[Any]) -> None:
        self.connection = connection
        self._sets = sets
        self._peers = [_Peer(rank, line) for rank, line in sorted(lines.items())]
        self._mutex = threading.RLock()
        self._closed = False
        self._epoch = self._buckets = self._there = 0

    def __repr__(self) -> str:
        lines = sum(peer.line is not None for peer in self._peers)
        return f"<{type(self).__name__} {self.connection[:8]}: {'closed' if self._closed else f'{lines} lines'}>"

    def hear(self) -> None:
        """Take note of what engines have said. Does not wait."""
        with self._mutex:
            for peer in self._peers:
                self._hear(peer)

    def _hear(self, peer: _Peer) -> None:
        try:
            for what, epoch, number in peer.hear():
                if what == _TAKEN:
                    peer.taken_epoch = epoch
                else:
                    self._sets.let_go(number, peer, epoch)
        except OSError:
            self._end(peer)

    def _end(self, peer: _Peer) -> None:
        line, peer.line = peer.line, None
        if line is not None:
            line.close()
            self._sets.ended(peer)

    def begin(self, epoch: int, lent: WeightSet, buckets: int) -> None:
        """Tell engines where an update's weights come to lie, and in how many steps."""
        with self._mutex:
            self._epoch, self._buckets, self._there = epoch, buckets, 0
            for peer in self._peers:
                peer.told = 0
                for number in peer.known - self._sets.numbers:
                    if peer.say(_FORGET, epoch, number):
                        peer.known.discard(number)
                if peer.line is not None:
                    self._sets.lend(lent, peer, epoch)  # before it can read: if saying fails, nobody ever lets go
                    if not self._give(peer, epoch, lent):
                        self._end(peer)

    def _give(self, peer: _Peer, epoch: int, lent: WeightSet) -> bool:
        """Tell an engine where a set is; whether that has left."""
        fds = [] if lent.number in peer.known else [lent.fd]
        is_said = peer.say(SET, epoch, lent.number, lent.memory.numel(), fds=fds)
        if is_said:
            peer.known.add(lent.number)
        return is_said

    def start_send(self, flat: Tensor) -> int:
        """Tell engines that the next bucket lies in the set."""
        with self._mutex:
            if self._closed:
                raise TransferError("the link was closed")
            self._there += 1
            self._tell()
            return self._there

    def _tell(self) -> None:
        for peer in self._peers:
            if peer.told < self._there and peer.say(_BUCKETS, self._epoch, self._there):
                peer.told = self._there

    def start_receive(self, flat: Tensor) -> int:
        """Not at this end."""
        raise TransferError("engines send nothing through shared memory")

    def wait(self, handle: int, stop: threading.Event) -> None:
        """See that nobody has left; for the last bucket, wait until everyone has taken all. Blocks.

        Raises:
            LinkLostError: A line has ended, or it was stopped.
        """
        while True:
            with self._mutex:
                self._tell()
                self.hear()
                if self._closed or stop.is_set():
                    raise LinkLostError("sending through shared memory was stopped")
                if gone := [peer.rank for peer in self._peers if peer.line is None]:
                    ranks = ", ".join(map(str, gone))
                    raise LinkLostError(
                        f"rank {ranks} has left the group", peers=[(self.connection, rank) for rank in gone]
                    )
                waiting = [peer for peer in self._peers if peer.taken_epoch != self._epoch]
                if handle < self._buckets or not waiting:
                    return
                poll = select.poll()
                for peer in waiting:
                    assert peer.line is not None
                    full = select.POLLOUT if peer.told < self._there else 0
                    poll.register(peer.line, select.POLLIN | full)
            poll.poll(_SLICE * 1000)

    def close(self) -> None:
        """Hang up. What engines have not let go of is never written to again."""
        with self._mutex:
            self._closed = True
            self.hear()
            for peer in self._peers:
                self._end(peer)

    def is_quiet(self, timeout: float) -> bool:
        """Nothing but the sender thread ever touched the weights."""
        return True

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> None:
        """Not at this end."""

    def finish(self) -> None:
        """Nothing: :meth:`wait` has heard it."""


class Lent:
    """A set that an engine was lent. Satisfies :class:`~asyncsync.transports.base.LentArena`."""

    stays = True

    def __init__(self, link: weakref.ref[SharedEngineLink], number: int, mapping: Mapping) -> None:
        self._link = link
        self._number = number
        self._mapping = mapping
        self.memory = mapping.memory
        self.epoch: int | None = None  # of the update that it is held for
        self._is_tidy = True

    def lend(self, epoch: int) -> None:
        """Note for which update it is lent, to be seen as the source writes it."""
        self.tidy()
        self.epoch, self._is_tidy = epoch, False

    def let_go(self) -> None:
        """Say that nobody here reads it any more."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None and (link := self._link()) is not None:
            link.say(LET_GO, epoch, self._number)

    def tidy(self) -> None:
        """Have it show the source's bytes also where this process has written."""
        if self.epoch is None and not self._is_tidy:
            self._mapping.forget_writes()
            self._is_tidy = True


class SharedEngineLink:
    """An engine rank's end of its line. Satisfies :class:`~asyncsync.transports.base.Link`.

    Attributes:
        connection: The group's name.
        device: Where the bytes arrive: ``"cpu"``.
    """

    device = "cpu"
    _more = 0  # bytes that follow where a set is given

    def __init__(self, connection: str, rank: int, line: socket.socket) -> None:
        self.connection = connection
        self._rank = rank
        self._line: socket.socket | None = line
        weakref.finalize(self, line.close).atexit = False  # of an engine that was only dropped
        self._mutex = threading.RLock()
        self._sets: dict[int, Lent] = {}
        self._epoch = self._there = self._started = 0

    def __repr__(self) -> str:
        state = "closed" if self._line is None else f"{len(self._sets)} sets mapped"
        return f"<{type(self).__name__} {self.connection[:8]} rank {self._rank}: {state}>"

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> LentArena:
        """The set in which an update's weights come to lie; it is to be let go of once. Blocks.

        Raises:
            LinkLostError: The source has left, says anything else, or it was stopped.
        """
        self._epoch, self._there, self._started = epoch, 0, 0
        while (lent := self._hear(nbytes, stop)) is None:
            pass
        return lent

    def _hear(self, nbytes: int | None, stop: threading.Event) -> Lent | None:
        """Wait for a message, and follow it; the set that it gives for this update, if it does."""
        with self._received(stop) as (what, epoch, first, second, fds, more):
            late = epoch < self._epoch
            if what == _FORGET:
                self._sets.pop(first, None)
            elif what == _BUCKETS and epoch == self._epoch:
                self._there = first
            elif what == SET and late:
                self._note(first, second, fds)
                self.say(LET_GO, epoch, first)
            elif what == SET and epoch == self._epoch and nbytes is not None:
                if second != nbytes:
                    raise self._lost(f"the source shares {second} bytes, and the weights have {nbytes}")
                lent = self._set(first, nbytes, fds, more)
                if lent.epoch is not None:
                    raise self._lost("the source shares memory that is still in use here")
                lent.lend(epoch)
                return lent
            elif not (late and what == _BUCKETS):
                raise self._lost(f"the source speaks of another update than that of epoch {self._epoch}")
        return None

    def _note(self, number: int, nbytes: int, fds: Sequence[int]) -> None:
        """A set of an update that is over: it is known here from now on, as the source takes it to be."""
        self._set(number, nbytes, fds, b"")

    def _set(self, number: int, nbytes: int, fds: Sequence[int], more: bytes) -> Lent:
        if number not in self._sets:
            if len(fds) != 1 or not is_sealed(fds[0], nbytes):
                raise self._lost("the source shares what is no sealed file in memory")
            try:
                mapping = Mapping(fds[0], nbytes, private=True)
            except OSError as error:
                raise self._lost(str(error)) from error
            self._sets[number] = Lent(weakref.ref(self), number, mapping)
        return self._sets[number]

    @contextmanager
    def _received(self, stop: threading.Event) -> Iterator[tuple[int, int, int, int, Sequence[int], bytes]]:
        """One message, whose descriptors are closed in the end."""
        while True:
            with self._mutex:
                line = self._line
                if line is None or stop.is_set():
                    raise LinkLostError("receiving through shared memory was stopped")
                try:
                    message, fds, _, _ = socket.recv_fds(line, _MAX_MESSAGE, 4, socket.MSG_CMSG_CLOEXEC)
                    break
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(line, select.POLLIN)
                except OSError as error:
                    raise self._lost(str(error)) from error
            poll.poll(_SLICE * 1000)
        try:
            if not message:
                raise self._lost("the source has left the group")
            head, more = message[: _TO_ENGINE.size], message[_TO_ENGINE.size :]
            if len(head) != _TO_ENGINE.size or len(more) != (self._more if head[0] == SET else 0):
                raise self._lost("the source says what nobody understands")
            yield (*_TO_ENGINE.unpack(head), fds, more)
        finally:
            for fd in fds:
                os.close(fd)

    def _lost(self, why: str) -> LinkLostError:
        return LinkLostError(why, peers=[(self.connection, 0)])

    def start_send(self, flat: Tensor) -> int:
        """Not at this end."""
        raise TransferError("engines send nothing through shared memory")

    def start_receive(self, flat: Tensor) -> int:
        """Expect the next bucket, which comes to lie where it is to be read."""
        if self._line is None:
            raise TransferError("the link was closed")
        self._started += 1
        return self._started

    def wait(self, handle: int, stop: threading.Event) -> None:
        """Wait until a bucket is there. Blocks.

        Raises:
            LinkLostError: The source has left, or it was stopped.
        """
        while self._there < handle:
            self._hear(None, stop)

    def finish(self) -> None:
        """Tell the source that all was taken."""
        self.say(_TAKEN, self._epoch, 0)

    def say(self, what: int, epoch: int, number: int) -> None:
        """Tell the source something; if that cannot be, the line ends, and with it all that is held."""
        with self._mutex:
            if self._line is not None:
                try:
                    self._line.send(_TO_SOURCE.pack(what, epoch, number))
                except OSError:
                    self.close()

    def close(self) -> None:
        """Hang up. What was adopted here stays as it is."""
        with self._mutex:
            line, self._line = self._line, None
            self._sets = {}
            if line is not None:
                line.close()

    def is_quiet(self, timeout: float) -> bool:
        """Nothing writes to this process's memory."""
        return True
