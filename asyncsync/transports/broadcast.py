"""A broadcast over a process group of its own: gloo on CPU, NCCL on GPU.

The group is independent of ``torch.distributed``'s global state: its store and its group object belong to the link,
many can exist beside the trainer's own groups, and leaving one touches no other. Every bucket is broadcast as a flat
uint8 tensor, since gloo refuses many dtypes and a tensor is its bytes anyway. This is the only module that uses
``torch.distributed``.

Three facts shape it. A gloo operation whose peer is gone cannot be interrupted, only left to run into its timeout; so
operations have a finite timeout, waits can be abandoned, and a closed link keeps its group alive aside until its last
operation has ended. A process group must not be dropped on one of its own threads, or while it is busy, since its
destructor waits; so it is dropped on a thread made for that. And no Python code may run on gloo's threads: a callback
on an operation that was left behind and ends while the interpreter shuts down would end the process with SIGABRT (its
thread asks for the GIL, is unwound by Python, and C++ calls that a terminate; Python 3.14 hangs such threads instead).
So completion is looked at, every millisecond while an operation runs; a bucket takes a hundred. For the same reason a
link keeps the tensors of its last operations, lest one of gloo's threads be the last to let go of a Python object, and
links that are still open are closed when the interpreter exits.

The store's socket is bound and listening before its port is told to anyone, on this node's address only, and a
member must know the connection's random name to find the group in it.
"""

from __future__ import annotations

import asyncio
import atexit
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, TCPStore, Work  # type: ignore[attr-defined]

from asyncsync.errors import ConnectError, TransferError
from asyncsync.messages import PROTOCOL_VERSION, Rendezvous

_MEET_INTERVAL = 0.002  # seconds
_FORM_TIMEOUT = 10.0  # seconds for the group to form once every member is there; it takes milliseconds
_SPIN = 0.0005  # seconds that a small operation is waited for without sleeping
_POLL_INTERVAL = 0.001  # seconds
_DROP_INTERVAL = 0.05  # seconds
_WORD = "word"
_KEPT = 4  # tensors of the last operations
_EXIT_TIMEOUT = 2.0  # seconds that the interpreter's exit may wait for operations that were left behind
_CONNECT_EXIT_TIMEOUT = 20.0  # and for connections that were: they end by themselves in that time
_HEDGE = 0.5  # seconds until a connection to the store is tried once more, beside the earlier tries; then doubled
_ATTEMPTS = 4

_links: weakref.WeakSet[BroadcastLink] = weakref.WeakSet()
_aside: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_connecting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Listener:
    """The source rank's store: it holds the port at which the others find each other.

    Args:
        address: This node's address, as the other members reach it.
        timeout: Seconds a store operation may take.

    Attributes:
        connection: A fresh random name for the group.
        address: The address it listens on.
        port: The port it holds.

    Raises:
        ConnectError: It cannot listen there.
    """

    def __init__(self, address: str, *, timeout: float) -> None:
        self.connection = secrets.token_hex(16)
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            try:
                listening.bind((address, 0))
                listening.listen(1024)
            except OSError as error:
                raise ConnectError(f"cannot listen on {address}: {error}") from error
            self.port = int(listening.getsockname()[1])
            descriptor = listening.detach()
        # The server answers from now on. Making it also connects a client of its own, which may take long (see
        # _connect) and which nobody needs: a thread does that, and the server lives as long as its future.
        self._server: Future[TCPStore] = Future()
        _run_aside(
            self._server,
            lambda: TCPStore(
                address,
                self.port,
                None,
                True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
                master_listen_fd=descriptor,
            ),
        )


def join(rendezvous: Rendezvous, *, address: str, stop: threading.Event) -> BroadcastLink:
    """Join a group and wait for its other members. Blocks: call it on the member's worker thread.

    Collective. Every member calls it at about the same time.

    Args:
        rendezvous: Where and as whom.
        address: This node's own address, for the group's sockets.
        stop: Makes it give up, from another thread.

    Raises:
        ConnectError: The protocols differ, not every member came in time, or it was stopped. Nothing is left
            half-open.
    """
    if rendezvous.protocol != PROTOCOL_VERSION:
        raise ConnectError(
            f"this end speaks asyncsync protocol {PROTOCOL_VERSION}, the other {rendezvous.protocol}: "
            "install the same version of asyncsync at both"
        )
    try:
        store = _connect(rendezvous, stop)
        named = PrefixStore(rendezvous.connection, store)
        _meet(rendezvous, named, stop)
        group = _group(rendezvous, named, address)
    except RuntimeError as error:  # DistStoreError, DistNetworkError and gloo's own are all RuntimeErrors
        raise ConnectError(
            f"rank {rendezvous.rank} of {rendezvous.world_size} could not join the group at "
            f"{rendezvous.address}:{rendezvous.port} in time: {error}"
        ) from error
    return BroadcastLink(rendezvous, group, store)


def _connect(rendezvous: Rendezvous, stop: threading.Event) -> TCPStore:
    """Connect to the source rank's store.

    The client looks its peer's name up and cannot be interrupted meanwhile: where a name server does not answer, that
    takes five seconds. So it runs on a thread that can be left behind, and others try too if it takes long.
    """
    timeout = timedelta(seconds=min(rendezvous.join_timeout, _FORM_TIMEOUT))
    attempts: list[Future[TCPStore]] = []
    began = time.monotonic()
    while True:
        if len(attempts) < _ATTEMPTS and time.monotonic() - began >= _HEDGE * (2 ** len(attempts) - 1):
            attempt: Future[TCPStore] = Future()
            attempts.append(attempt)
            _run_aside(
                attempt,
                lambda: TCPStore(
                    rendezvous.address, rendezvous.port, None, False, wait_for_workers=False, timeout=timeout
                ),
            )
        for done in wait(attempts, timeout=_MEET_INTERVAL, return_when=FIRST_COMPLETED).done:
            if done.exception() is None or all(each.done() for each in attempts):
                return done.result()
        if stop.is_set():
            raise ConnectError("joining was stopped")


def _run_aside(future: Future[TCPStore], make: Callable[[], TCPStore]) -> None:
    """Make a store on a thread that can be left behind."""

    def run() -> None:
        try:
            future.set_result(make())
        except RuntimeError as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="asyncsync-connect", daemon=True)
    if not _connecting:
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)
    _connecting.add(thread)
    thread.start()


def _meet(rendezvous: Rendezvous, store: PrefixStore, stop: threading.Event) -> None:
    """Wait until every member is here. The group's constructor waits too, but nothing can make it give up.

    The last to arrive says "go", one who gives up says "stopped", and the store lets the first of these words stand
    for all: either every member goes on to the constructor, or none does.
    """
    if store.add("arrived", 1) == rendezvous.world_size:
        store.compare_set(_WORD, "", "go")
    deadline = time.monotonic() + rendezvous.join_timeout
    while not store.check([_WORD]):
        late = time.monotonic() > deadline
        if late or stop.wait(_MEET_INTERVAL):
            arrived = store.add("arrived", 0)
            if store.compare_set(_WORD, "", "stopped") == b"stopped":
                raise ConnectError(
                    f"rank {rendezvous.rank} waited {rendezvous.join_timeout:.3g} s in vain: "
                    f"{arrived} of {rendezvous.world_size} members came"
                    if late
                    else "joining was stopped"
                )
    if store.get(_WORD) != b"go":
        raise ConnectError("joining was stopped by another member")


def _group(rendezvous: Rendezvous, store: PrefixStore, address: str) -> ProcessGroup:
    # The group's own timeout bounds how long it waits for its members; operations carry theirs with them.
    form_timeout = timedelta(seconds=min(rendezvous.join_timeout, _FORM_TIMEOUT))
    store.set_timeout(form_timeout)
    if rendezvous.backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=rendezvous.operation_timeout)
        return _as_group(ProcessGroupNCCL(store, rendezvous.rank, rendezvous.world_size, nccl))
    from torch.distributed import ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [ProcessGroupGloo.create_device(hostname=address)]
    gloo._timeout = form_timeout
    return _as_group(ProcessGroupGloo(store, rendezvous.rank, rendezvous.world_size, gloo))


def _as_group(backend: Any) -> ProcessGroup:
    # A bare backend has the collectives of a ProcessGroup without being one.
    group: ProcessGroup = backend
    return group


class BroadcastLink:
    """A member of a broadcast group; rank 0 sends, the others receive. See :class:`~asyncsync.transports.base.Link`.

    Attributes:
        connection: The group's name.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    def __init__(self, rendezvous: Rendezvous, group: ProcessGroup, store: TCPStore) -> None:
        self.connection = rendezvous.connection
        self.backend = rendezvous.backend
        self._timeout = timedelta(seconds=rendezvous.operation_timeout)
        self._group: ProcessGroup | None = group
        self._store: TCPStore | None = store
        self._running: dict[Work, Tensor] = {}
        self._kept: deque[Tensor] = deque(maxlen=_KEPT)
        # An operation that starts while the link is closed must be known to whoever drops the group.
        self._mutex = threading.Lock()
        self._turn = asyncio.Lock()
        if not _links and not _aside:
            atexit.unregister(_leave_all)
            atexit.register(_leave_all)
        _links.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._group is None else f"{len(self._running)} operations running"
        return f"<BroadcastLink {self.connection[:8]} {self.backend}: {state}>"

    def start_send(self, flat: Tensor) -> Work:
        """Start a broadcast from this rank; the buffer must not change until it is waited for."""
        return self._broadcast(flat)

    def start_receive(self, flat: Tensor) -> Work:
        """Start a broadcast into this rank's buffer."""
        return self._broadcast(flat)

    def _broadcast(self, flat: Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._timeout
        with self._mutex:
            if self._group is None:
                raise TransferError("the link was closed")
            work = self._group.broadcast([flat], options)
            self._running[work] = flat
        return work

    async def wait(self, handle: Work) -> None:
        """Wait for one broadcast, without blocking the loop.

        Raises:
            TransferError: It failed, or ran into the group's operation timeout.
        """
        try:
            if self.backend == "nccl":
                # An NCCL future says that the operation was enqueued; only the stream knows when it is done.
                await asyncio.to_thread(_synchronize, handle)
            else:
                async with self._turn:  # they end in order: one is looked at, not all of them
                    await _completion(handle)
        except RuntimeError as error:
            self._ended(handle)
            raise TransferError(f"a broadcast failed: {error}") from error
        self._ended(handle)

    def _ended(self, work: Work) -> None:
        with self._mutex:
            flat = self._running.pop(work, None)
            if flat is not None:
                self._kept.append(flat)

    def close(self) -> None:
        """Leave the group without blocking; operations still running end by themselves, aside."""
        with self._mutex:
            owned, running = [self._group, self._store], self._running
            tensors = [*running.values(), *self._kept]
            self._group, self._store, self._running = None, None, {}
            self._kept.clear()
        if running:
            drop = threading.Thread(
                target=_drop, args=(owned, list(running), tensors), name="asyncsync-drop-group", daemon=True
            )
            _aside.add(drop)
            drop.start()
            # The thread owns them now, and lets go of the group first.
        else:
            owned.clear()
            tensors.clear()


def _drop(owned: list[Any], running: list[Work], tensors: list[Tensor]) -> None:
    pause = threading.Event()
    while not all(work.is_completed() for work in running):
        pause.wait(_DROP_INTERVAL)
    running.clear()
    owned.clear()  # joins gloo's threads; only then
    tensors.clear()


def _leave_all() -> None:
    """At the interpreter's exit, while Python still runs: no group with threads of its own is left, if it can be."""
    for link in list(_links):
        link.close()
    began = time.monotonic()
    for threads, timeout in ((_aside, _EXIT_TIMEOUT), (_connecting, _CONNECT_EXIT_TIMEOUT)):
        for thread in list(threads):
            thread.join(max(0.0, began + timeout - time.monotonic()))


def _synchronize(work: Work) -> None:
    work.wait()
    torch.cuda.current_stream().synchronize()


async def _completion(work: Work) -> None:
    clock = asyncio.get_running_loop().time
    soon = clock() + _SPIN
    while not work.is_completed():  # noqa: ASYNC110 - no callback, for the reason above
        await asyncio.sleep(0 if clock() < soon else _POLL_INTERVAL)
    work.wait()  # returns at once, and raises what went wrong
