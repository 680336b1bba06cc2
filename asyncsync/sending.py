"""Sending a set of weights: filled bucket by bucket, hashed beside the sending, over one link or several at once.

Whoever sends has its worker thread run :meth:`Sender.send`: a trainer's source rank, and an engine that gives its
weights to another. Buffers take turns: while one is on its way, the next bucket is filled into another. A bucket that
is one large contiguous tensor needs no buffer: it is sent, and hashed, from where it lies.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.checksums import Witness
from asyncsync.digests import Digests, StreamingDigests
from asyncsync.errors import TransferError
from asyncsync.packing import bucket_parts, hash_bucket, in_place, pack, pack_and_hash
from asyncsync.threads import WorkerThread
from asyncsync.transports.base import Link

IN_FLIGHT = 8
"""Buckets on their way at the same time, at the most; those that are sent from where they lie need no buffer."""


class Filler(Protocol):
    """Where the bytes of buckets come from. Buckets are asked for in the plan's order."""

    buffers: int
    """How many bucket buffers it may fill: two, less what it needs for itself."""

    def hash_into(self, digests: StreamingDigests) -> bool:
        """Whether it adds all that it fills from now on to these digests itself, in host memory that it fills."""
        ...

    def lying(self, bucket: Bucket, device: str) -> Tensor | None:
        """The bucket's bytes where they lie, flat uint8 on this type of device; None if a buffer must be filled."""
        ...

    def expect(self, bucket: Bucket) -> None:
        """Start what filling this bucket will need: it is the next one. Does not block."""
        ...

    def fill(self, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
        """Fill a bucket's buffer: flat uint8, ``bucket.nbytes`` long. Blocks; ``stop`` ends the wait.

        Raises:
            TransferError: What it needs did not come, or it was stopped.
        """
        ...


class OwnTensors:
    """Fills buckets from tensors that lie whole in this process.

    Args:
        plan: The plan.
        tensors: All its tensors, in order.
        dense: What :func:`~asyncsync.packing.is_dense` says of each, if that is known.
    """

    buffers = 2

    def __init__(self, plan: Plan, tensors: Sequence[Tensor], dense: Sequence[bool] = ()) -> None:
        self._plan = plan
        self._tensors = tensors
        self._dense = dense
        self._digests: StreamingDigests | None = None

    def hash_into(self, digests: StreamingDigests) -> bool:
        # Where torch copies with several threads it is quicker to hash beside them.
        if torch.get_num_threads() > 1 or not all(tensor.is_cpu for tensor in self._tensors):
            return False
        self._digests = digests
        return True

    def lying(self, bucket: Bucket, device: str) -> Tensor | None:
        return in_place(self._plan, bucket, self._tensors, device)

    def expect(self, bucket: Bucket) -> None:
        pass

    def fill(self, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
        if self._digests is None:
            pack(self._plan, bucket, self._tensors, buffer, self._dense)
        else:
            pack_and_hash(self._plan, bucket, self._tensors, buffer, self._dense, self._digests)

    def parts(self, bucket: Bucket, scratch: Callable[[int], Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The bucket part by part; see :func:`~asyncsync.packing.bucket_parts`."""
        return bucket_parts(self._plan, bucket, self._tensors, scratch)


class Repacked:
    """Fills buckets from what it first copies to memory on a GPU. Satisfies :class:`Filler`.

    Whatever other links the buckets go over, the weights are read once.

    Args:
        filler: Where the bytes come from.
        memory: Flat uint8, laid out as the plan is, that nobody reads yet.
        stop: Ends filling, from another thread.
    """

    def __init__(self, filler: Filler, memory: Tensor, stop: threading.Event) -> None:
        self.buffers = filler.buffers
        self._filler = filler
        self._memory = memory
        self._filled = -1
        self._stop = stop

    def hash_into(self, digests: StreamingDigests) -> bool:
        return False

    def lying(self, bucket: Bucket, device: str) -> Tensor | None:
        return self._place(bucket) if device == self._memory.device.type else None

    def expect(self, bucket: Bucket) -> None:
        self._filler.expect(bucket)

    def fill(self, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
        buffer.copy_(self._place(bucket))

    def _place(self, bucket: Bucket) -> Tensor:
        place = self._memory[bucket.start : bucket.stop]
        if self._filled < bucket.index:
            self._filler.fill(bucket, place, self._stop)
            self._filled = bucket.index
        return place


class Sender:
    """Sends whole sets of weights, one at a time, and keeps its buffers from one to the next.

    Args:
        hasher: The thread that hashes.
    """

    def __init__(self, hasher: WorkerThread) -> None:
        self._hasher = hasher
        self._buffers: list[Tensor] = []

    def send(
        self,
        plan: Plan,
        filler: Filler,
        links: Sequence[Link],
        stop: threading.Event,
        witness: Witness | None = None,
        arena: Tensor | None = None,
    ) -> Digests:
        """Fill, send and hash every bucket: one while others are on their way. Blocks.

        With an arena every bucket is filled at its place in it, whatever lies elsewhere, and sent over all links from
        there: the weights are read once, however many ways they go.

        Args:
            plan: The plan.
            filler: Where the bytes come from.
            links: Where they go: every bucket over each of them.
            stop: Ends it, from another thread.
            witness: Takes every bucket as well, on the hashing thread.
            arena: Flat uint8 in host memory, laid out as the plan is, that nobody reads yet.

        Raises:
            TransferError: A bucket did not arrive, or it was stopped.
        """
        digests = StreamingDigests(len(plan.specs))
        devices = {link.device for link in links}
        device = "cpu" if "cpu" in devices else links[0].device  # a link to other devices moves the bytes by itself
        on_the_way: deque[_Sent] = deque()
        filled = 0
        is_hashed = arena is not None and filler.hash_into(digests)

        def wait_for_oldest() -> None:
            sent = on_the_way.popleft()
            for link, handle in zip(links, sent.handles, strict=True):
                wait(link, handle, sent.bucket, stop)
            if sent.hashed is not None:
                sent.hashed.result()

        for bucket, following in itertools.zip_longest(plan.buckets, plan.buckets[1:]):
            if bucket.index == 0:
                filler.expect(bucket)
            if len(on_the_way) == IN_FLIGHT:
                wait_for_oldest()
            flat, buffer = filler.lying(bucket, device) if arena is None else None, None
            if arena is not None:
                flat = arena[bucket.start : bucket.stop]
                filler.fill(bucket, flat, stop)
            elif flat is None:
                buffer = filled % filler.buffers
                filled += 1
                while any(sent.buffer == buffer for sent in on_the_way):
                    wait_for_oldest()
                flat = kept(self._buffers, buffer, plan.largest_bucket, device)[: bucket.nbytes]
                filler.fill(bucket, flat, stop)
            handles = [link.start_send(flat) for link in links]
            hashed = None
            if not is_hashed:
                hashed = self._hasher.submit(hash_sent, plan, bucket, flat, digests, witness)
            elif witness is not None:
                hashed = self._hasher.submit(witness.add, bucket, flat)
            on_the_way.append(_Sent(bucket, handles, hashed, buffer))
            if following is not None:
                filler.expect(following)
        while on_the_way:
            wait_for_oldest()
        return digests.result()

    def free_device_buffers(self) -> None:
        """Keep no buffers that are not in host memory."""
        self._buffers = [buffer for buffer in self._buffers if buffer.device.type == "cpu"]

    def forget(self) -> None:
        """Never use the buffers again: an operation that was abandoned may still read them."""
        self._buffers = []


def hash_sent(plan: Plan, bucket: Bucket, flat: Tensor, digests: StreamingDigests, witness: Witness | None) -> None:
    """Hash a bucket that is sent. Buckets must come in order."""
    hash_bucket(plan, bucket, flat, digests)
    if witness is not None:
        witness.add(bucket, flat)


@dataclass(frozen=True, slots=True)
class _Sent:
    bucket: Bucket
    handles: list[object]
    hashed: Future[None] | None
    buffer: int | None


def wait(link: Link, handle: object, bucket: Bucket, stop: threading.Event) -> None:
    """Wait for a bucket's operation; its error says which bucket it was."""
    try:
        link.wait(handle, stop)
    except TransferError as error:
        error.bucket = bucket.index
        raise


def kept(buffers: list[Tensor], index: int, nbytes: int, device: str) -> Tensor:
    """One of several flat uint8 buffers of a size, kept from update to update."""
    if any(buffer.numel() < nbytes or buffer.device.type != device for buffer in buffers):
        buffers.clear()  # free the old ones before the new ones are allocated
    while len(buffers) <= index:
        buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
    return buffers[index]
