"""A set of weights in host memory, beside an engine that loads by its own code."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.deltas import apply, grain_of
from asyncsync.digests import StreamingDigests
from asyncsync.packing import arena_views, hash_bucket
from asyncsync.transports.base import LentArena


class HostStore:
    """A whole set of weights in host memory: where buckets are received, and what is loaded from.

    Kept from one update to the next. Satisfies :class:`~asyncsync.engines.loading.Loader`.

    Args:
        pinned: Whether the memory is to be page-locked, so that a GPU copies from it fast.
    """

    touched = False

    def __init__(self, *, pinned: bool) -> None:
        self.device = "cpu"
        self.base_epoch: int | None = None  # set by who knows that all of an update has come
        self._pinned = pinned
        self._plan: Plan | None = None
        self._memory: Tensor | None = None
        self._bounce: list[Tensor] = []
        self._digests = StreamingDigests(0)

    @property
    def in_flight(self) -> int:
        """How many buckets may be on their way at the same time."""
        return 8 if self.device == "cpu" else 2

    def take_up(self, plan: Plan, device: str) -> None:
        """Prepare for a layout, whose buckets arrive on this type of device."""
        if plan is not self._plan or device != self.device:
            self.discard()
        self._plan, self.device = plan, device

    def begin(self, *, delta: bool = False) -> None:
        """Get ready for an update."""
        assert self._plan is not None
        self.base_epoch = None  # until it is whole
        if self._memory is None:
            self._memory = torch.empty(self._plan.arena_nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        if self.device != "cpu" and not self._bounce:
            size = self._plan.largest_bucket
            self._bounce = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._digests = StreamingDigests(len(self._plan.specs))

    def target(self, bucket: Bucket) -> Tensor:
        """Where a bucket is received into."""
        return self._bounce[bucket.index % 2][: bucket.nbytes] if self._bounce else self._place(bucket)

    def _place(self, bucket: Bucket) -> Tensor:
        assert self._memory is not None
        return self._memory[bucket.start : bucket.stop]

    def take(self, bucket: Bucket, buffer: Tensor) -> None:
        """Take a bucket that has arrived."""
        assert self._plan is not None
        place = self._place(bucket)
        if buffer.data_ptr() != place.data_ptr():
            place.copy_(buffer)
        hash_bucket(self._plan, bucket, place, self._digests)

    def take_changes(self, bucket: Bucket, message: Tensor | None) -> None:
        """Take what differs in a bucket from what the store holds; None: nothing does.

        Raises:
            TransferError: The message is none of such a bucket. Nothing was written.
        """
        assert self._plan is not None
        place = self._place(bucket)
        if message is not None:
            apply(message, grain_of(self._plan, bucket).runs, place)
        hash_bucket(self._plan, bucket, place, self._digests)

    def digest(self) -> str:
        """Digest of all that was taken."""
        assert self._plan is not None
        return self._plan.digest_of(self._digests.result())

    def named_tensors(self, left_out: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, under each of its names but these."""
        assert self._plan is not None
        assert self._memory is not None
        for spec, view in zip(self._plan.specs, arena_views(self._plan, self._memory), strict=True):
            for name in spec.names:
                if name not in left_out:
                    yield name, view

    def adopt(self, lent: LentArena) -> bool:
        """No: what is loaded from here may be page-locked."""
        return False

    def drop(self) -> None:
        """Nothing: the memory is this store's own."""

    def commit(self) -> None:
        """Nothing: what is loaded from here is copied."""

    def discard(self) -> None:
        """Give up the memory: a transfer that was abandoned may still write to it."""
        self.base_epoch = None
        self._memory, self._bounce = None, []
