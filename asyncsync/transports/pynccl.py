"""A group of vLLM's own making, at its source: the bytes go straight to the NCCL engines in vLLM's workers.

vLLM's ``nccl`` weight-transfer backend joins no group of ``torch.distributed``'s. Its members meet at a ``TCPStore``,
take an id from there, and make an NCCL communicator with it. Here is rank 0 of that, of vLLM's own parts: the source.

Three facts shape it. Making the communicator cannot be interrupted, and has no timeout: one worker that does not come
would hold the worker thread for ever. So it begins only when every worker has come to the store, which is waited for
aside. A worker that finds no store looks for it for five minutes, and holds its engine: so the store of a join that was
given up stays for those who are late, and sends them away. And a broadcast has no timeout in vLLM: a worker that was
told to receive what then is not sent hangs its whole engine for ever. So the source tells what it has begun to send
(:mod:`~asyncsync.transports.sent_count`); whoever conducts the workers has them receive nothing else; and a link that
is closed lets what it has begun come to its end.

None of this was ever run on a GPU: the tests put a communicator in place of NCCL's that does the same over sockets.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncsync.errors import ConnectError, LinkLostError, TransferError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, Rendezvous
from asyncsync.transports.sent_count import SentCount

STORE, COUNT = "pynccl/store", "pynccl/count"
"""The keys under which contacts tell where the store is, and where the source tells what it sends."""

_POLL_INTERVAL = 0.001  # seconds
_DISMISS_TIMEOUT = timedelta(seconds=10)  # torch's clients look names up, which may take five seconds
_LAST_TIMEOUT = 5.0  # seconds that a closed link gives to what it has begun to send


class Done(Protocol):
    """Tells whether a broadcast has come to its end."""

    def query(self) -> bool:
        """Whether it has."""
        ...


class Lane:
    """A stream of the device's own for broadcasts: nothing that is computed waits behind them.

    Attributes:
        device: The current device of the thread that makes it.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def broadcast(self, communicator: Any, flat: Tensor) -> Done:
        """Broadcast what is in a tensor once all is in it that the thread's current stream has to put there."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        communicator.broadcast(flat, src=0, stream=self._stream)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done


class PyNcclJoining:
    """A group that is being joined, as its rank 0. Satisfies :class:`~asyncsync.transports.base.GroupJoining`.

    Args:
        rendezvous: Which group, and as whom.
        address: This node's own address: the group's store listens there.

    Raises:
        ConnectError: The two ends speak different protocols, or this is not the group's source.
    """

    def __init__(self, rendezvous: Rendezvous, *, address: str) -> None:
        if rendezvous.protocol != PROTOCOL_VERSION or rendezvous.rank != 0:
            raise ConnectError(
                f"rank {rendezvous.rank} with protocol {rendezvous.protocol}: a group of vLLM's can be joined as its "
                f"rank 0, with protocol {PROTOCOL_VERSION} (install the same version of asyncsync at both ends)"
            )
        self.rendezvous = rendezvous
        self._address = address
        self._port = 0
        self._contacts: Future[Contacts] = Future()
        self._meeting: Future[Any] | None = Future()  # vLLM's group, once all members have come
        self._mutex = threading.Lock()

    def join(self) -> PyNcclLink:
        """Collective. Make the group. Blocks until every worker has come: call it on the member's worker thread.

        Raises:
            ConnectError: They did not come in time, vLLM or a GPU is missing here, or it was stopped.
        """
        count: SentCount | None = None
        try:
            new_group, new_communicator = _vllm_parts()
            meeting = self._meeting
            assert meeting is not None
            lane = Lane()
            count = SentCount(self._address, self.rendezvous.world_size)
            with self._mutex:
                if meeting.done():
                    meeting.result()  # stopped before it began
                # Bound before anyone is told of it, and held: the store takes over this very socket.
                listening = socket.create_server((self._address, 0))
                self._port = listening.getsockname()[1]
            run = partial(self._meet, new_group, listening, meeting)
            threading.Thread(target=run, name="asyncsync-meet", daemon=True).start()
            with suppress(InvalidStateError):
                ports = {STORE: self._port, COUNT: count.port}
                self._contacts.set_result({name: f"{self._address}:{ports[name]}".encode() for name in ports})
            group = meeting.result()  # the store has a timeout
            self._meeting = meeting = None  # only the communicator is to keep the group, and with it the store
            # On this thread, and under its guard: it allocates on the device.
            communicator = new_communicator(group, lane.device)
            if communicator.disabled:  # it would send nothing, without a word
                raise ConnectError("vLLM found no NCCL here, or VLLM_DISABLE_PYNCCL is set")
            link = PyNcclLink(self.rendezvous, communicator, count, lane)
            count = None
            return link
        except (RuntimeError, OSError, AssertionError, ConnectError) as error:
            size = self.rendezvous.world_size
            failed = ConnectError(f"rank 0 of {size} could not join vLLM's group: {error or type(error).__name__}")
            with suppress(InvalidStateError):
                self._contacts.set_exception(failed)
            raise failed from error
        finally:
            if count is not None:
                count.close()

    async def contacts(self) -> Contacts:
        """Where the group's store is, once :meth:`join` has begun on its thread.

        Raises:
            ConnectError: Joining has failed already.
        """
        return await asyncio.wrap_future(self._contacts)

    def introduce(self, contacts: Contacts) -> None:
        """Nothing: the workers come to the store."""

    def stop(self) -> None:
        """Have :meth:`join` give up waiting, and send away the workers that have come."""
        with self._mutex, suppress(InvalidStateError):
            if self._meeting is not None:
                self._meeting.set_exception(ConnectError("joining was stopped"))
                if self._port:
                    threading.Thread(target=self._dismiss, name="asyncsync-dismiss", daemon=True).start()

    def _meet(self, new_group: Callable[..., Any], listening: socket.socket, meeting: Future[Any]) -> None:
        """Host the store, and wait for the workers: its constructor does, and cannot be interrupted."""
        deadline = time.monotonic() + self.rendezvous.join_timeout
        try:
            group = new_group(
                host=self._address,
                port=self._port,
                rank=0,
                world_size=self.rendezvous.world_size,
                store_timeout=max(1, round(self.rendezvous.join_timeout)),
                listen_socket=listening,
            )
        except (RuntimeError, OSError) as error:
            with suppress(InvalidStateError):
                meeting.set_exception(ConnectError(f"not every worker came: {error}"))
            return
        try:
            meeting.set_result(group)
        except InvalidStateError:  # stopped meanwhile
            group.broadcast_obj(None, src=0)  # what no communicator can be made of, in place of NCCL's id
            threading.Event().wait(deadline - time.monotonic())

    def _dismiss(self) -> None:
        """Come to the store in place of the workers that are missing: then its constructor need not wait for them."""
        with suppress(RuntimeError):
            for _ in range(self.rendezvous.world_size):
                TCPStore(
                    self._address,
                    self._port,
                    self.rendezvous.world_size,
                    is_master=False,
                    timeout=_DISMISS_TIMEOUT,
                )


@dataclass(eq=False, slots=True)
class _Sending:
    flat: Tensor
    done: Done


class PyNcclLink:
    """The source's end of a group of vLLM's. Satisfies :class:`~asyncsync.transports.base.Link`.

    Attributes:
        connection: The group's name.
        device: Device type that the bytes are sent from; those that lie on the CPU are moved there.
    """

    def __init__(self, rendezvous: Rendezvous, communicator: Any, count: SentCount, lane: Lane) -> None:
        self.connection = rendezvous.connection
        self.device = lane.device.type
        self._timeout = rendezvous.operation_timeout
        self._lane = lane
        self._communicator = communicator
        self._count = count
        self._running: list[_Sending] = []
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self._communicator is None else f"{len(self._running)} broadcasts running"
        return f"<PyNcclLink {self.connection[:8]}: {state}>"

    def start_send(self, flat: Tensor) -> _Sending:
        """Start a broadcast; the tensor must not change until it is waited for."""
        with self._mutex:
            if self._communicator is None:
                raise TransferError("the link was closed")
            try:
                flat = flat.to(self._lane.device)
                sending = _Sending(flat, self._lane.broadcast(self._communicator, flat))
                self._running.append(sending)
                self._count.add()  # only now may workers be told to receive it
            except RuntimeError as error:
                raise LinkLostError(f"a broadcast could not be started: {error}") from error
        return sending

    def start_receive(self, flat: Tensor) -> Any:
        """Not here.

        Raises:
            TransferError: Always.
        """
        raise TransferError("a source receives nothing")

    def wait(self, handle: _Sending, stop: threading.Event) -> None:
        """Wait for one broadcast. Blocks.

        Raises:
            LinkLostError: It failed, was stopped, or not every worker took it in time.
        """
        deadline = time.monotonic() + self._timeout
        try:
            while not handle.done.query():
                if stop.is_set() or self._communicator is None:
                    raise LinkLostError("a broadcast was stopped")
                if time.monotonic() > deadline:
                    raise LinkLostError(f"a broadcast was not taken by every worker within {self._timeout:.3g} s")
                stop.wait(_POLL_INTERVAL)
        except RuntimeError as error:
            raise LinkLostError(f"a broadcast failed: {error}") from error
        with self._mutex, suppress(ValueError):
            self._running.remove(handle)

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> None:
        """None: buckets are received into buffers."""

    def finish(self) -> None:
        """Nothing: every bucket was waited for at both ends."""

    def close(self) -> None:
        """Leave the group without blocking. What was begun has some seconds left, for workers that wait for it."""
        with self._mutex:
            communicator, self._communicator = self._communicator, None
            running, self._running = self._running, []
        self._count.close()
        if communicator is not None:
            threading.Thread(target=_drop, args=(communicator, running), name="asyncsync-drop", daemon=True).start()

    def is_quiet(self, timeout: float) -> bool:
        """Never, for all that is known."""
        return False


def _drop(communicator: Any, running: list[_Sending]) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + _LAST_TIMEOUT
    with suppress(RuntimeError):
        while not all(sending.done.query() for sending in running) and time.monotonic() < deadline:
            pause.wait(_POLL_INTERVAL)
    communicator.destroy()  # may block; aborts what is left
    running.clear()


def endpoint(contacts: Contacts, name: str) -> tuple[str, int]:
    """Where the source listens.

    Args:
        contacts: Those that it gave.
        name: :data:`STORE` or :data:`COUNT`.

    Raises:
        ConnectError: They do not tell.
    """
    if name not in contacts:
        raise ConnectError(
            "the source is none of a group of vLLM's: install the same version of asyncsync at both ends"
        )
    address, _, port = contacts[name].decode().rpartition(":")
    return address, int(port)


def _vllm_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What vLLM makes its groups with, and its communicators.

    Raises:
        ConnectError: vLLM is not installed here.
    """
    try:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError as error:
        raise ConnectError(
            "an engine whose backend is vLLM's \"nccl\" is reached by vLLM's own communicator: "
            f"install vLLM in the trainer's process, too ({error})"
        ) from error

    def new_communicator(group: Any, device: torch.device) -> Any:
        with unpinned_nccl_env():  # as vLLM does at the other end
            return PyNcclCommunicator(group, device=device)

    return StatelessProcessGroup.create, new_communicator
