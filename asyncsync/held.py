"""A snapshot: a trainer rank's weights, copied as they are, so that the trainer may go on while the copy is sent.

Whole tensors are copied to where they will be sent from, laid out as the plan has them: into the memory that engines
map, if there are such; else into an arena of the rank's own, on the GPU if that is where they are sent from. Of shards
each rank copies its own, and brings those to the source later. What only a gathering of the trainer's can put together
is gathered now, at the source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.devices import settle
from asyncsync.digests import StreamingDigests
from asyncsync.errors import TransferError
from asyncsync.gathering import CallGathering, take_part
from asyncsync.packing import arena_views, pack, raw
from asyncsync.transports.memory_files import SharedSet
from asyncsync.weights import Snapshot


@dataclass(slots=True, eq=False)
class HeldWeights:
    """A snapshot that a rank holds.

    Attributes:
        plan: How it is laid out.
        snapshot: The copies, and what they are copies of.
        gathers: Whether they had to be gathered: at other ranks than the source there are none then.
        arena: What they lie in, flat uint8, laid out as the plan is; None if they are copies one by one, or none.
        shared: The set that the arena is, if engines map it.
        left_behind: Whether an operation that was abandoned may still read it: it is not to be written to again.
    """

    plan: Plan
    snapshot: Snapshot
    gathers: bool = False
    arena: Tensor | None = None
    shared: SharedSet | None = None
    left_behind: bool = False


class LaidOut:
    """Fills buckets from weights that are laid out as the plan is. Satisfies :class:`~asyncsync.sending.Filler`."""

    buffers = 2

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena

    def hash_into(self, digests: StreamingDigests) -> bool:
        """See :class:`~asyncsync.sending.Filler`."""
        return False

    def lying(self, bucket: Bucket, device: str) -> Tensor | None:
        """See :class:`~asyncsync.sending.Filler`."""
        return self._place(bucket) if self._arena.device.type == device else None

    def expect(self, bucket: Bucket) -> None:
        """See :class:`~asyncsync.sending.Filler`."""

    def fill(self, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
        """See :class:`~asyncsync.sending.Filler`."""
        if (place := self._place(bucket)).data_ptr() != buffer.data_ptr():
            buffer.copy_(place)

    def _place(self, bucket: Bucket) -> Tensor:
        return self._arena[bucket.start : bucket.stop]


def hold_whole(
    plan: Plan, snapshot: Snapshot, arena: Tensor, stop: threading.Event, shared: SharedSet | None = None
) -> HeldWeights:
    """Copy whole tensors into an arena. Blocks.

    Args:
        plan: The plan.
        snapshot: What is there: all tensors of the plan, or a gathering that gives them.
        arena: Flat uint8, at least as long as the plan's.
        stop: Ends it, from another thread.
        shared: The set that the arena is, if engines map it.

    Raises:
        TransferError: It was stopped, or the gathering failed.
    """
    home = snapshot.device
    gathering = None if snapshot.gather is None else CallGathering(plan, snapshot.gather)
    try:
        for bucket in plan.buckets:
            _check(stop)
            place = arena[bucket.start : bucket.stop]
            if gathering is not None:
                gathering.fill(bucket, place, stop)
            else:
                pack(plan, bucket, snapshot.tensors, place, snapshot.dense)
    finally:
        if gathering is not None:
            gathering.finish()
    settle(home)
    copies = replace(snapshot, tensors=tuple(arena_views(plan, arena)), gather=None, home=home, dense=())
    return HeldWeights(plan, copies, snapshot.gather is not None, arena, shared)


def hold_shards(plan: Plan, snapshot: Snapshot, spare: Sequence[Tensor], stop: threading.Event) -> HeldWeights:
    """Copy what lies of each tensor on this rank. Blocks.

    Args:
        plan: The plan.
        snapshot: What is there.
        spare: Tensors that nobody needs: those of the last snapshot.
        stop: Ends it, from another thread.

    Raises:
        TransferError: It was stopped.
    """
    copies = []
    with torch.no_grad():
        for index, tensor in enumerate(snapshot.tensors):
            _check(stop)
            copy = spare[index] if index < len(spare) else None
            if copy is None or (copy.shape, copy.dtype, copy.device) != (tensor.shape, tensor.dtype, tensor.device):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            raw(copy).copy_(raw(tensor))
            copies.append(copy)
    settle(snapshot.device)
    return HeldWeights(plan, replace(snapshot, tensors=tuple(copies), home=snapshot.device, dense=()))


def hold_nothing(plan: Plan, snapshot: Snapshot, gather: Callable[[int], Tensor | None]) -> HeldWeights:
    """Collective. Take part in the gathering that fills the source's snapshot; nothing is copied here. Blocks."""
    take_part(plan, gather)
    return HeldWeights(plan, snapshot, gathers=True)


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise TransferError("copying the weights was stopped")
