"""A broadcast over a process group of its own: gloo on CPU, NCCL on GPU.

The group is independent of ``torch.distributed``'s global state: its store and its group object belong to the link,
many can exist beside the trainer's own groups, and leaving one touches no other. Every bucket is broadcast as a flat
uint8 tensor, since gloo refuses many dtypes and a tensor is its bytes anyway. This floor is the only one that uses
``torch.distributed``.

Seven facts shape it.

* A gloo operation that is in the middle of its bytes does not hear that its peer is gone: it ends by its timeout alone.
  So operations have a finite one, waits can be abandoned, and a closed link keeps its group alive aside until its last
  operation has ended.
* But whatever is begun with that peer after that fails at once. So while a wait lasts, the source greets every member,
  and every member the source, with a byte that nobody receives: who has hung up is known in some 20 ms, and by name.
* A receive that times out has gloo close all connections of its group. So a link that is closed in the middle of
  something asks for a byte that nobody sends, for a millisecond: the others hear of it, and nothing touches its buffers
  any more, though the operations may not have ended.
* The forming of a group cannot be interrupted, once a member was told of others that then do not come; so it runs on a
  thread that can be left behind, too.
* A process group must not be dropped on one of its own threads, or while it is busy, since its destructor waits; so it
  is dropped on a thread made for that.
* gloo lets in whoever says a small number at its port. So members prove each other that they know the group's name
  before anything is sent (:mod:`asyncsync.transports.proof`).
* No Python code may run on gloo's threads: a callback on an operation that was left behind and ends while the
  interpreter shuts down would end the process with SIGABRT (its thread asks for the GIL, is unwound by Python, and C++
  calls that a terminate; Python 3.14 hangs such threads instead). So an operation is waited for on the member's worker
  thread, in slices of 20 ms, after which that thread is back in Python; and links that are still open are closed, and
  threads waited for, before the interpreter ends. For the same reason a link keeps the tensors of its last operations,
  lest one of gloo's threads be the last to let go of a Python object.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup, Work

from asyncsync.errors import ConnectError, LinkLostError, TransferError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, Rendezvous
from asyncsync.transports.meeting import MeetingStore
from asyncsync.transports.proof import prove_each_other, willing

_FORM_TIMEOUT = 10.0  # seconds to wait for the group to form once every member is there; it takes milliseconds
_GLOO_TIMEOUT = _FORM_TIMEOUT / 5  # gloo takes this five times
_SLICE = timedelta(milliseconds=20)  # of a wait; in between it is looked whether it is still wanted
_AT_ONCE = timedelta(milliseconds=1)
_GREETING, _CUT = 1, 2  # tags; only broadcasts are ever received, and those have none
_OWN_TIMEOUT = "Application timeout"  # gloo's words for a connection that it has closed by itself
_POLL_INTERVAL = 0.001  # seconds
_DROP_INTERVAL = 0.05  # seconds
_KEPT = 4  # tensors of the last operations
_EXIT_TIMEOUT = 2.0  # seconds that the interpreter's exit may wait for operations that were left behind
_JOIN_EXIT_TIMEOUT = _FORM_TIMEOUT + 2  # for a group that is being formed: it would be back in the middle of the exit

_NOTHING = torch.zeros(1, dtype=torch.uint8)

_joinings: weakref.WeakSet[Joining] = weakref.WeakSet()
_links: weakref.WeakSet[BroadcastLink] = weakref.WeakSet()
_aside: weakref.WeakKeyDictionary[threading.Thread, float] = weakref.WeakKeyDictionary()


class Joining:
    """A group that is being joined, in two steps: one's own contacts first, then those of all.

    Args:
        rendezvous: Which group, and as whom.
        address: This node's own address, for the group's sockets.

    Raises:
        ConnectError: The two ends speak different protocols.
    """

    def __init__(self, rendezvous: Rendezvous, *, address: str) -> None:
        if rendezvous.protocol != PROTOCOL_VERSION:
            raise ConnectError(
                f"this end speaks asyncsync protocol {PROTOCOL_VERSION}, the other {rendezvous.protocol}: "
                "install the same version of asyncsync at both"
            )
        self.rendezvous = rendezvous
        self._address = address
        self._meeting = MeetingStore(rendezvous.join_timeout)
        self._group: Future[ProcessGroup] = Future()

    def join(self) -> BroadcastLink:
        """Collective. Make the group. Blocks until all members were introduced: call it on the member's worker thread.

        Raises:
            ConnectError: Not every member was introduced in time, one could not be reached, or it was stopped.
        """
        _joinings.add(self)
        _clean_up_at_exit()
        if self.rendezvous.backend == "nccl":
            self._make()  # on this thread, and under its guard: it allocates on the device
        else:
            _run_aside(self._make, "asyncsync-join", _JOIN_EXIT_TIMEOUT)
        try:
            group = self._group.result(self.rendezvous.join_timeout + _FORM_TIMEOUT)
            self._group = Future()  # only the link keeps the group: closing it must end it, so that the others hear
            return BroadcastLink(self.rendezvous, group, self._meeting)
        except (RuntimeError, ConnectError, TimeoutError) as error:  # gloo's errors are RuntimeErrors
            self.stop()
            rank, size = self.rendezvous.rank, self.rendezvous.world_size
            failed = ConnectError(f"rank {rank} of {size} could not join the group: {error or 'in time'}")
            if not self._meeting.contacts.done():
                self._meeting.contacts.set_exception(failed)
            raise failed from error

    async def contacts(self) -> Contacts:
        """How this member is reached, once :meth:`join` has begun on its thread.

        Raises:
            ConnectError: It cannot be reached: joining has failed already.
        """
        own = await asyncio.wrap_future(self._meeting.contacts)
        return own | willing(self.rendezvous.rank) if self.rendezvous.backend == "gloo" else own

    def introduce(self, contacts: Contacts) -> None:
        """Tell this member how the others are reached."""
        self._meeting.introduce(contacts)

    def stop(self) -> None:
        """Have :meth:`join` give up at once."""
        self._meeting.stop()
        with suppress(InvalidStateError):
            self._group.set_exception(ConnectError("joining was stopped"))

    def _make(self) -> None:
        try:
            group = self._new_group()
        except Exception as error:  # noqa: BLE001 - handed over to whoever waits in join
            # As a new error: the traceback of this one would keep gloo's device alive, which listens on, and hands what
            # a member that was only frozen says when it thaws to a context that is gone: SIGSEGV.
            failed = ConnectError(str(error))
            with suppress(InvalidStateError):
                self._group.set_exception(failed)
        else:
            with suppress(InvalidStateError):  # stopped meanwhile: nobody wants it any more
                self._group.set_result(group)

    def _new_group(self) -> ProcessGroup:
        rank, size, backend = self.rendezvous.rank, self.rendezvous.world_size, self.rendezvous.backend
        if backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=self.rendezvous.operation_timeout)
            group = _as_group(ProcessGroupNCCL(self._meeting, rank, size, nccl))
            # NCCL connects at the first operation, and needs the store for that.
            _synchronize(group.broadcast([torch.zeros(1, dtype=torch.uint8, device="cuda")], _from_source()))
            return group
        from torch.distributed import ProcessGroupGloo

        gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        gloo._timeout = timedelta(seconds=_GLOO_TIMEOUT)  # operations carry their own with them
        group = _as_group(ProcessGroupGloo(self._meeting, rank, size, gloo))
        others = [each for each in range(size) if each != rank and self._meeting.check([*willing(each)])]
        prove_each_other(group, self.rendezvous.connection, rank, others, _FORM_TIMEOUT)
        return group


def _as_group(backend: Any) -> ProcessGroup:
    # A bare backend has the collectives of a ProcessGroup without being one.
    group: ProcessGroup = backend
    return group


def _from_source() -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


class BroadcastLink:
    """A member of a broadcast group; rank 0 sends, the others receive. See :class:`~asyncsync.transports.base.Link`.

    Attributes:
        connection: The group's name.
        backend: ``"gloo"`` or ``"nccl"``.
        device: Device type that the bytes are sent from and received on.
    """

    def __init__(self, rendezvous: Rendezvous, group: ProcessGroup, store: MeetingStore) -> None:
        self.connection = rendezvous.connection
        self.backend = rendezvous.backend
        self.device = "cuda" if rendezvous.backend == "nccl" else "cpu"
        self._timeout = timedelta(seconds=rendezvous.operation_timeout)
        others = [rank for rank in range(rendezvous.world_size) if rank != rendezvous.rank]
        self._others = others
        self._watched = others if rendezvous.rank == 0 else [0]
        self._group: ProcessGroup | None = group
        self._store: MeetingStore | None = store
        # By handle: an operation itself keeps the group's connections open, and an error's traceback keeps what it has
        # passed. So nobody else gets to see one.
        self._running: dict[object, tuple[Work, Tensor]] = {}
        self._kept: deque[Tensor] = deque(maxlen=_KEPT)
        # An operation that starts while the link is closed must be known to whoever drops the group.
        self._mutex = threading.Lock()
        self._quiet = threading.Event()
        _links.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._group is None else f"{len(self._running)} operations running"
        return f"<BroadcastLink {self.connection[:8]} {self.backend}: {state}>"

    def start_send(self, flat: Tensor) -> object:
        """Start a broadcast from this rank; the buffer must not change until it is waited for."""
        return self._broadcast(flat)

    def start_receive(self, flat: Tensor) -> object:
        """Start a broadcast into this rank's buffer."""
        return self._broadcast(flat)

    def _broadcast(self, flat: Tensor) -> object:
        options = _from_source()
        options.timeout = self._timeout
        with self._mutex:
            if self._group is None:
                raise TransferError("the link was closed")
            handle = object()
            self._running[handle] = self._group.broadcast([flat], options), flat
        return handle

    def wait(self, handle: object, stop: threading.Event) -> None:
        """Wait for one broadcast. Blocks.

        Raises:
            TransferError: It failed, ran into the group's operation timeout, or was stopped.
        """
        try:
            while not self._wait_a_little(handle, stop):
                if stop.is_set() or self._group is None:
                    raise LinkLostError("a broadcast was stopped")
        except RuntimeError as error:
            self._ended(handle)
            raise LinkLostError(f"a broadcast failed: {error}", peers=self._who_left(self._others)) from error
        self._ended(handle)

    def _wait_a_little(self, handle: object, stop: threading.Event) -> bool:
        """Whether the broadcast ended well in this slice of time."""
        running = self._running.get(handle)
        if running is None:
            return False  # the link was closed
        work, running = running[0], None
        ended = work.is_completed()
        if self.backend == "nccl":
            if ended:
                _synchronize(work)
            else:
                stop.wait(_POLL_INTERVAL)  # a wait for the device cannot be interrupted
            return ended
        try:
            work.wait(_SLICE)
        except RuntimeError:
            del work
            if ended:
                raise
            if gone := self._who_left(self._watched):
                ranks = ", ".join(str(rank) for _, rank in gone)
                raise LinkLostError(f"rank {ranks} has left the group", peers=gone) from None
            return False  # only this slice is over, or it failed just now: the next one will tell
        return True

    def _who_left(self, ranks: Iterable[int]) -> Sequence[tuple[str, int]]:
        """Whose connection to here is closed, and was not closed here: by group, and rank."""
        gone: list[tuple[str, int]] = []
        with self._mutex:
            for rank in ranks if self._group is not None and self.backend == "gloo" else ():
                try:
                    self._group.send([_NOTHING], rank, _GREETING)  # type: ignore[union-attr]
                except RuntimeError as error:
                    if _OWN_TIMEOUT not in str(error):
                        gone.append((self.connection, rank))
        return gone

    def _ended(self, handle: object) -> None:
        with self._mutex:
            if (running := self._running.pop(handle, None)) is not None:
                self._kept.append(running[1])

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> None:
        """None: buckets are received into buffers."""

    def finish(self) -> None:
        """Nothing: every bucket was waited for at both ends."""

    def close(self) -> None:
        """Leave the group without blocking; operations still running end by themselves, aside."""
        with self._mutex:
            if self._group is None:
                return
            owned = [self._store, self._group]  # let go of from the end
            running = [work for work, _ in self._running.values()]
            tensors = [*(flat for _, flat in self._running.values()), *self._kept]
            self._group, self._store, self._running = None, None, {}
            self._kept.clear()
        if running:
            # The thread owns them now, and lets go of the group first.
            cut = self._others if self.backend == "gloo" else ()
            _run_aside(partial(_drop, owned, running, tensors, cut, self._quiet), "asyncsync-drop-group")
        else:
            owned.clear()
            tensors.clear()
            self._quiet.set()

    def is_quiet(self, timeout: float) -> bool:
        """Whether no operation touches its buffers any more, once it was closed. Blocks."""
        return self._quiet.wait(timeout)


def _drop(
    owned: list[Any], running: list[Work], tensors: list[Tensor], others: Sequence[int], quiet: threading.Event
) -> None:
    if others:
        for rank in others:
            _cut(owned[-1], rank)
        quiet.set()
    pause = threading.Event()
    while not all(work.is_completed() for work in running):
        pause.wait(_DROP_INTERVAL)
    quiet.set()
    running.clear()
    owned.clear()  # joins gloo's threads; only then
    tensors.clear()


def _cut(group: ProcessGroup, rank: int) -> None:
    """Have gloo close all connections of a group, unless that with this rank is closed already."""
    with suppress(RuntimeError):  # mostly: it timed out, as it should
        group.recv([_NOTHING.clone()], rank, _CUT).wait(_AT_ONCE)


def _run_aside(function: Callable[[], None], name: str, patience: float = _EXIT_TIMEOUT) -> None:
    """Run on a thread that can be left behind; the interpreter's exit waits for it, but not longer than it may take."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    _aside[thread] = patience
    thread.start()


def _clean_up_at_exit() -> None:
    # Last registered is first run: before the libraries that were imported meanwhile clean up after themselves.
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)


def _leave_all() -> None:
    """At the interpreter's exit, while Python still runs: no group with threads of its own is left, if it can be."""
    for joining in list(_joinings):
        joining.stop()
    for link in list(_links):
        link.close()
    start = time.monotonic()
    for thread, patience in list(_aside.items()):
        thread.join(max(0.0, start + patience - time.monotonic()))


def _synchronize(work: Work) -> None:
    work.wait()
    torch.cuda.current_stream().synchronize()
