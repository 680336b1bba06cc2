"""The trainer's side: a rank that reads, packs, hashes and sends its weights.

A trainer rank has one *sender thread*. Joining the group, packing and broadcasting all run there, inside the
memory-saver guard, so that collectives keep their order and the guard covers them (R8, R9). Hashing has a thread of its
own, beside the sending. The sender thread waits for the network, too, and can be stopped while it does.

Two bucket buffers take turns: while one is on its way, the next bucket is packed into the other. A bucket that is one
large contiguous tensor needs no buffer: it is sent, and hashed, from where it lies.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import numpy as np
import torch
from torch import Tensor

from asyncsync import cluster
from asyncsync.buckets import Bucket, Plan, plan_buckets
from asyncsync.digests import Digests, StreamingDigests, combine
from asyncsync.errors import OutOfStepError, TransferError
from asyncsync.guard import MemorySaverGuard, memory_saver_guard
from asyncsync.messages import Contacts, ReadOptions, Rendezvous, SendReceipt, TrainerStatus, UpdateOrder
from asyncsync.packing import hash_bucket, in_place, pack
from asyncsync.shield import shielded
from asyncsync.threads import WorkerThread
from asyncsync.transports.base import Link
from asyncsync.transports.seat import Seat
from asyncsync.weights import Snapshot, Weights, WeightSource

BUFFERS = 2
"""Bucket buffers, at the most."""

IN_FLIGHT = 8
"""Buckets on their way at the same time, at the most; those that are sent from where they lie need no buffer."""


class Trainer(Protocol):
    """A trainer rank as the conductor sees it. In this process or in an actor, the calls are the same."""

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """Read names, dtypes and shapes, and plan. The tensors are left out if the plan is the known one."""
        ...

    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        """Leave the group it is in, if any, and begin to join this one; returns how this rank is reached."""
        ...

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """Collective. Join the group that was opened, whose members are reached like this."""
        ...

    async def leave_trainer_group(self, connection: str) -> None:
        """Leave a group, joined or only opened; no error if there is none of that name."""
        ...

    async def send_weights(self, order: UpdateOrder) -> SendReceipt:
        """Collective. Read the weights, and send every bucket."""
        ...

    async def abort_send(self, epoch: int) -> None:
        """Stop sending an update, and leave its group; no error if it is not being sent."""
        ...


class TrainerRank:
    """A rank that holds weights: include it in a trainer actor's class, or use one in this process.

    Example:
        >>> @asyncsync.remote(num_gpus=1)
        ... class Trainer(asyncsync.TrainerRank):
        ...     def __init__(self):
        ...         self.model = build_model()
        ...         super().__init__(self.model)
        ...
        ...     def train_step(self, batch): ...

    Args:
        weights: What to send: a module, a state dict, pairs of name and tensor, or a function that returns one of
            these. Must not change while an update is under way.
        offload: False if this trainer never offloads its memory; None to find out (see
            :func:`asyncsync.memory_saver_guard`).

    Raises:
        TypeError: ``weights`` is none of these.
    """

    control_group: str | None = None

    def __init__(self, weights: Weights, *, offload: bool | None = None) -> None:
        self._source = WeightSource(weights)
        self._offload = offload
        self._instance = uuid.uuid4().hex
        self._sender_thread = WorkerThread("asyncsync-sender")
        self._hasher = WorkerThread("asyncsync-hasher")
        self._seat = Seat(self._guard)
        self._options: ReadOptions | None = None
        self._plan: Plan | None = None
        self._buffers: list[Tensor] = []
        self._sending: _Sending | None = None
        self._ended_epoch = 0
        self._closed = False
        self._sent: tuple[int, str, Digests] | None = None
        self._published: tuple[int, str, Digests] | None = None

    @cluster.control
    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """See :class:`Trainer`.

        Raises:
            PlanError: The weights cannot be sent; see :meth:`asyncsync.weights.WeightSource.read`.
        """
        self._options = options
        plan, snapshot = await self._sender.run(self._read, options)
        self._plan = plan
        return TrainerStatus(
            instance=self._instance,
            device=next((tensor.device.type for tensor in snapshot.tensors), "cpu"),
            connection=self._seat.connection,
            plan_digest=plan.digest,
            specs=None if plan.digest == known_digest else plan.specs,
            epoch=self._ended_epoch,
            control_group=self.control_group is not None or not cluster.in_actor(),
        )

    def _read(self, options: ReadOptions) -> tuple[Plan, Snapshot]:
        snapshot = self._source.read(name_map=options.name_map, dtype=options.dtype)
        plan = self._plan
        if plan is None or plan.specs != snapshot.specs or plan.bucket_size != options.bucket_size:
            plan = plan_buckets(snapshot.specs, options.bucket_size)
            _ = plan.digest, plan.nbytes  # computed here, and kept: large plans take a while
        return plan, snapshot

    @cluster.control
    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :class:`Trainer`.

        Raises:
            ConnectError: This end cannot be reached, or speaks another protocol.
            MemorySaverError: The guard could not be entered.
        """
        return await self._seat.open(rendezvous, address=cluster.node_address())

    @cluster.control
    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """See :class:`Trainer`.

        Raises:
            ConnectError: A member could not be reached, or the group was closed meanwhile.
        """
        await self._seat.join(connection, contacts)

    @cluster.control
    async def leave_trainer_group(self, connection: str) -> None:
        """See :class:`Trainer`."""
        await self._seat.leave(connection)

    @cluster.control
    async def send_weights(self, order: UpdateOrder) -> SendReceipt:
        """See :class:`Trainer`.

        Raises:
            OutOfStepError: The order's group or layout is not this trainer's (any more). Nothing was sent.
            PlanError: The weights cannot be sent (any more).
            TransferError: The bytes did not arrive, the sending was aborted, or took too long.
        """
        link = self._seat.link
        if self._options is None or link is None or link.connection != order.connection:
            raise OutOfStepError("the trainer is not in the group that the update goes through")
        if order.epoch <= self._ended_epoch:
            raise OutOfStepError(f"the update of epoch {order.epoch} has ended already")
        plan, snapshot = await self._sender.run(self._read, self._options)
        if plan.digest != order.plan_digest:
            raise OutOfStepError("the layout of the trainer's weights changed")
        sending = _Sending(order.epoch, anyio.CancelScope(deadline=anyio.current_time() + order.timeout))
        self._sending = sending
        try:
            with sending.scope:
                async with self._guard() as guarded:
                    try:
                        stop = threading.Event()
                        digests = await guarded.run(self._send, link, plan, snapshot, stop, on_cancel=stop.set)
                    except BaseException:
                        await shielded(guarded.run(self._seat.close))
                        raise
                sending.done = True
                return await self._hasher.run(self._receipt, order, plan, digests)
        finally:
            if not sending.done:
                self._buffers = []  # an abandoned broadcast may still read them
            sending.ended.set()
        what = "was aborted" if sending.scope.deadline > anyio.current_time() else "took too long"
        raise TransferError(f"sending the weights of update {order.version} {what}")

    def _send(self, link: Link, plan: Plan, snapshot: Snapshot, stop: threading.Event) -> Digests:
        """Pack, send and hash every bucket: one while others are on their way."""
        digests = StreamingDigests(len(plan.specs))
        on_the_way: deque[_Sent] = deque()
        packed = 0

        def wait_for_oldest() -> None:
            sent = on_the_way.popleft()
            try:
                link.wait(sent.handle, stop)
            except TransferError as error:
                error.bucket = sent.bucket.index
                raise
            sent.hashed.result()

        for bucket in plan.buckets:
            if len(on_the_way) == IN_FLIGHT:
                wait_for_oldest()
            flat = in_place(plan, bucket, snapshot.tensors, link.device)
            buffer = None
            if flat is None:
                buffer = packed % BUFFERS
                packed += 1
                while any(sent.buffer == buffer for sent in on_the_way):
                    wait_for_oldest()
                flat = self._buffer(buffer, plan, link.device)[: bucket.nbytes]
                pack(plan, bucket, snapshot.tensors, flat)
            handle = link.start_send(flat)
            on_the_way.append(
                _Sent(bucket, handle, self._hasher.submit(hash_bucket, plan, bucket, flat, digests), buffer)
            )
        while on_the_way:
            wait_for_oldest()
        return digests.result()

    def _buffer(self, index: int, plan: Plan, device: str) -> Tensor:
        if any(buffer.numel() < plan.largest_bucket or buffer.device.type != device for buffer in self._buffers):
            self._buffers = []  # free the old ones before the new ones are allocated
        while len(self._buffers) <= index:
            self._buffers.append(torch.empty(plan.largest_bucket, dtype=torch.uint8, device=device))
        return self._buffers[index]

    def _receipt(self, order: UpdateOrder, plan: Plan, digests: Digests) -> SendReceipt:
        if self._sent is not None and self._sent[0] == order.base_epoch:
            self._published = self._sent
        changed = np.ones(len(plan.specs), dtype=bool)
        if self._published is not None and self._published[0] == order.base_epoch:
            _, layout_digest, published = self._published
            if layout_digest == plan.layout_digest:
                changed = digests != published
        self._sent = (order.epoch, plan.layout_digest, digests)
        return SendReceipt(
            digest=combine(plan.layout_digest, digests),
            tensors=len(plan.specs),
            tensors_changed=int(changed.sum()),
            buckets=len(plan.buckets),
            nbytes=plan.nbytes,
            nbytes_changed=sum(plan.specs[index].nbytes for index in np.flatnonzero(changed)),
        )

    @cluster.control
    async def abort_send(self, epoch: int) -> None:
        """See :class:`Trainer`."""
        self._ended_epoch = max(self._ended_epoch, epoch)
        if self._sending is not None and self._sending.epoch == epoch:
            self._sending.scope.cancel()
            await self._sending.ended.wait()

    def close(self) -> None:
        """Leave the group and let the rank's threads end. Does not wait."""
        self._closed = True
        self._seat.close()
        self._sender.close()
        self._hasher.close()

    @property
    def _sender(self) -> WorkerThread:
        if self._sender_thread.closed and not self._closed:
            self._sender_thread = WorkerThread("asyncsync-sender")  # a guard gave the last one up
        return self._sender_thread

    def _guard(self) -> MemorySaverGuard:
        return memory_saver_guard(offload=self._offload, thread=self._sender)


class _Sending:
    def __init__(self, epoch: int, scope: anyio.CancelScope) -> None:
        self.epoch = epoch
        self.scope = scope
        self.done = False
        self.ended = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _Sent:
    bucket: Bucket
    handle: object
    hashed: Future[None]
    buffer: int | None


TRAINER_METHODS = tuple(name for name in vars(Trainer) if not name.startswith("_"))
"""The names of the methods a trainer rank must have."""


class RemoteTrainer:
    """A trainer rank that is a Ray actor: the same calls, remote.

    Args:
        handle: A Ray actor that includes :class:`TrainerRank`, or anything called the same way.

    Raises:
        TypeError: The handle lacks methods of a trainer rank; they are named.
    """

    def __init__(self, handle: Any) -> None:
        missing = cluster.missing_methods(handle, TRAINER_METHODS)
        if missing:
            raise TypeError(
                f"{cluster.actor_class_name(handle)} is no trainer rank: it lacks {', '.join(missing)}; "
                "include asyncsync.TrainerRank in its class"
            )
        self.handle = handle

    def __repr__(self) -> str:
        return f"<RemoteTrainer {cluster.actor_class_name(self.handle)} {cluster.actor_key(self.handle)[:8]}>"

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        status: TrainerStatus = await cluster.call(self.handle, "describe_weights", options, known_digest)
        return status

    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        contacts: Contacts = await cluster.call(self.handle, "open_trainer_group", rendezvous)
        return contacts

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        await cluster.call(self.handle, "join_trainer_group", connection, contacts)

    async def leave_trainer_group(self, connection: str) -> None:
        await cluster.call(self.handle, "leave_trainer_group", connection)

    async def send_weights(self, order: UpdateOrder) -> SendReceipt:
        receipt: SendReceipt = await cluster.call(self.handle, "send_weights", order)
        return receipt

    async def abort_send(self, epoch: int) -> None:
        await cluster.call(self.handle, "abort_send", epoch)


def as_trainer(candidate: Any, *, offload: bool | None) -> tuple[Trainer, TrainerRank | None]:
    """The trainer behind whatever a user may pass as one; and the rank made for it here, if one was.

    Raises:
        TypeError: It is neither a trainer nor weights.
        ValueError: It is several trainer ranks.
    """
    if isinstance(candidate, list | tuple) and candidate and _is_remote(candidate[0]):
        if len(candidate) > 1:
            raise ValueError(f"this version sends from one trainer rank, not {len(candidate)}")
        candidate = candidate[0]
    if _is_remote(candidate):
        return RemoteTrainer(candidate), None
    if isinstance(candidate, TrainerRank):
        return candidate, None
    rank = TrainerRank(candidate, offload=offload)
    return rank, rank


def _is_remote(candidate: Any) -> bool:
    return cluster.is_actor(candidate) or hasattr(getattr(candidate, "describe_weights", None), "remote")
