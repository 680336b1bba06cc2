"""What a source holds of the last update that was confirmed, for the next to be compared with.

It is a whole set of weights in host memory, laid out as the plan lays it out. As an update is sent, the new bytes are
written over it, and what they were is kept in messages that bring it back: an update that fails changes nothing here.
One that brings a bucket whole cannot be taken back, since that would take a second set; if it fails, what is held is
of no update, and the next one is sent whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.deltas import Changes, Grain, apply, grain_of
from asyncsync.report import format_bytes


class Baseline:
    """The bytes of one update at a source.

    An update is at first *open*: between :meth:`begin` and :meth:`end`. If it is never ended, it has failed.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._grains: list[Grain] = []
        self._epoch: int | None = None  # whose bytes it holds; while one is open, what it can be taken back to
        self._before: int | None = None  # the update before that
        self._undo: list[tuple[Bucket, Tensor]] | None = None  # takes it back; None: nothing can
        self._open = False
        self.compares = False

    def __repr__(self) -> str:
        return f"<Baseline of {format_bytes(self._memory.numel())}: epochs {self._epochs}{', open' * self._open}>"

    def epochs_of(self, plan: Plan) -> tuple[int, ...]:
        """The updates in this layout whose bytes it holds, or can be taken back to; the newest first."""
        return self._epochs if self._plan is not None and self._plan.digest == plan.digest else ()

    @property
    def _epochs(self) -> tuple[int, ...]:
        known = (self._epoch if not self._open or self._undo is not None else None, self._before)
        return tuple(epoch for epoch in known if epoch is not None)

    def begin(self, plan: Plan, against: int | None) -> None:
        """Get ready to take the bytes of an update.

        Args:
            plan: Its layout.
            against: The update that it is to be compared with, which is held; None: with none.
        """
        if self._plan is None or self._plan.digest != plan.digest:
            self._memory = torch.zeros(plan.arena_nbytes, dtype=torch.uint8)  # and so is what lies between tensors
            self._grains = [grain_of(plan, bucket) for bucket in plan.buckets]
            self._epoch = self._before = self._undo = None
            self._open = False
        self._plan = plan
        if self._open:
            self._take_back(self._epoch)
        elif against is not None and against == self._before:
            self._take_back(self._before)
        assert against is None or against == self._epoch
        self.compares = against is not None
        self._before, self._open = None, True
        self._undo = [] if self.compares else None

    def _take_back(self, epoch: int | None) -> None:
        self._epoch = None if self._undo is None else epoch
        for bucket, message in self._undo or ():
            apply(message, self._grains[bucket.index].runs, self.place(bucket))

    def place(self, bucket: Bucket) -> Tensor:
        """Where a bucket lies."""
        return self._memory[bucket.start : bucket.stop]

    @property
    def elements(self) -> int:
        """How many elements its tensors have."""
        return sum(grain.elements for grain in self._grains)

    def grain(self, bucket: Bucket) -> Grain:
        """How a bucket is made up."""
        return self._grains[bucket.index]

    def note(self, bucket: Bucket, changes: Changes | None) -> None:
        """Note what of a bucket was written over; None: that is not known.

        Called before the next bucket's place is written to.
        """
        if changes is None:
            self._undo = None
        elif self._undo is not None and changes.count:
            message = torch.empty(changes.nbytes, dtype=torch.uint8)
            self._undo.append((bucket, changes.write(message, back=True)))

    def end(self, epoch: int) -> None:
        """Note that all bytes of an update are here."""
        self._before = self._epoch if self._undo is not None else None
        self._epoch, self._open = epoch, False
