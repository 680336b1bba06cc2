"""Reading weights whose memory the saver has taken away: from its host copies."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncsync.buckets import list_names
from asyncsync.digests import digest_of
from asyncsync.errors import MemorySaverError, PlanError
from asyncsync.memory_saver import door
from asyncsync.memory_saver.driver import absent, is_mapped, may_be_absent
from asyncsync.memory_saver.status import was_always_on

_DEFAULT_POOL = (0, 0)
_UNKNOWN_POOL = (-1, -1)


class HostCopies:
    """Tensors as they can be read now: those whose memory is paused, from the saver's host copies.

    A host copy is no copy of ours: it is the saver's own memory, and the next pause writes to it. So who reads it holds
    it (``keep``), and looks in the end whether it is what it was.

    Args:
        names: What errors call the tensors.
        tensors: Tensors of any device, whose memory may be paused. Make it on a thread that has their device set.
        keep: Whether they are to be read: until :meth:`release` a copy stays where it is, even if memory is resumed.

    Raises:
        PlanError: Memory is paused, and has no host copy; by name.
        MemorySaverError: The driver did not say whether there is memory.

    Attributes:
        tensors: The same tensors, in order; those that are paused are views of host memory, not to be written to.
        are_elsewhere: Whether there are such.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor], *, keep: bool = False) -> None:
        self._names = names
        # Before anybody looks what is paused: it may be resumed in this moment.
        self._kept = door.KeptCopies() if keep and may_be_absent(tensors) else None
        if self._kept is not None:
            weakref.finalize(self, self._kept.release)  # should nobody be left to do so
        self._digests: dict[int, int] = {}
        try:
            self._away = {index: tensors[index] for index in absent(tensors)}
            if self._away:
                self._refuse_without_copy()
            copies = {index: _copy_of(tensor) for index, tensor in self._away.items()}
        except BaseException:
            self.release()
            raise
        self._memory = {index: memory for index, (_, memory) in copies.items()}
        self.tensors = tuple(copies[index][0] if index in copies else one for index, one in enumerate(tensors))
        self.are_elsewhere = bool(copies)
        if not copies:
            self.release()

    def begin(self) -> None:
        """Note what is read, before the first byte of it is. Blocks."""
        self._digests = self._hash()

    def end(self) -> None:
        """See whether what was read has stayed what it was: who resumes a trainer may pause it again. Blocks.

        Raises:
            MemorySaverError: Memory was resumed meanwhile, or its copy was written to.
        """
        now = self._hash()
        changed = [
            index for index, tensor in self._away.items() if now[index] != self._digests[index] or is_mapped(tensor)
        ]
        if changed:
            raise MemorySaverError(
                "the trainer was resumed in the middle of an update that read its weights from their host copies: keep "
                f"it paused until the update is over ({list_names([self._names[index] for index in changed])})"
            )

    def release(self) -> None:
        """Nothing is read any more."""
        if self._kept is not None:
            self._kept.release()

    def _hash(self) -> dict[int, int]:
        return {index: digest_of(memory) for index, memory in self._memory.items()}

    def _refuse_without_copy(self) -> None:
        segments = _Segments()
        refused: dict[str, list[str]] = {}
        for index, tensor in self._away.items():
            if (reason := segments.reason_against(tensor)) is not None:
                refused.setdefault(reason, []).append(self._names[index])
        if refused:
            reasons = "; ".join(f"{list_names(names)}: {reason}" for reason, names in refused.items())
            raise PlanError(
                f"these tensors are in memory that is paused, and cannot be read: {reasons}. Allocate them with a host "
                "copy (TMS_INIT_ENABLE_CPU_BACKUP=1, or enable_cpu_backup=True of their region), wake the trainer in "
                "before_update(), or give asyncsync.MasterWeights",
                names=sorted(name for names in refused.values() for name in names),
            )


def _copy_of(tensor: Tensor) -> tuple[Tensor, memoryview]:
    """A paused tensor's host copy, not copied: same dtype, shape and strides; and the memory that it is a view of."""
    physical = tensor.detach()
    if tensor.is_conj():  # lazily: the memory has the other value
        physical = physical.conj()
    if tensor.is_neg():
        physical = torch._neg_view(physical)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    host = door.host_copy(physical.as_strided((span,), (1,), tensor.storage_offset()))
    if host is None:
        raise MemorySaverError("the trainer was resumed in the moment its weights' host copies were asked for")
    copy = host.as_strided(tensor.shape, tensor.stride())
    if tensor.is_conj():
        copy = copy.conj()
    if tensor.is_neg():
        copy = torch._neg_view(copy)
    return copy, memoryview(host.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


class _Segment(NamedTuple):
    start: int
    stop: int
    pool: tuple[int, int]


class _Segments:
    """Where torch's allocator got its memory, and with which of the saver's settings, as far as that is known."""

    def __init__(self) -> None:
        self._regions = door.regions()
        self._segments = sorted(
            _Segment(
                start=segment["address"],
                stop=segment["address"] + segment["total_size"],
                pool=tuple(segment.get("segment_pool_id", _UNKNOWN_POOL)),
            )
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        )

    def reason_against(self, tensor: Tensor) -> str | None:
        """Why a paused tensor has no host copy that may be asked for, or None."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._segments, address, key=lambda segment: segment.start) - 1
        segment = self._segments[index] if index >= 0 else None
        if segment is None or address >= segment.stop:
            return "not memory of torch's allocator, so who has taken it away is not known"
        if segment.pool in self._regions:
            return self._regions[segment.pool]
        if segment.pool != _DEFAULT_POOL:
            return "allocated in a memory pool that is none of the saver's, so whether it is kept is not known"
        if not was_always_on("TMS_INIT_ENABLE_CPU_BACKUP"):
            return "allocated outside of a region, with TMS_INIT_ENABLE_CPU_BACKUP off (now or at first)"
        return None
