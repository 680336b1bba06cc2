"""Sharing CUDA memory with another process: what of it is the saver's cannot be, and is copied out, or refused."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asyncsync.buckets import list_names
from asyncsync.errors import MemorySaverError, PlanError
from asyncsync.memory_saver import door
from asyncsync.memory_saver.driver import is_ipc_capable, is_mapped


def shareable(names: Sequence[str], tensors: Sequence[Tensor], *, repack: bool = True) -> tuple[Tensor, ...]:
    """CUDA tensors whose memory can be shared by CUDA IPC: those that lie in the saver's are copied out of it.

    Call it as guarded work: the copies must not be the saver's, either.

    Args:
        names: What errors call the tensors.
        tensors: CUDA tensors.
        repack: Whether to copy those that cannot be shared; else they are refused.

    Returns:
        The tensors, in order: themselves, or contiguous copies.

    Raises:
        PlanError: Some cannot be shared: their memory is paused, or ``repack`` is false; by name.
        MemorySaverError: The driver did not say, or copies made here would be tracked.
    """
    present = [(name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor.numel()]
    if away := [name for name, tensor in present if not is_mapped(tensor)]:
        raise PlanError(f"the memory of these tensors is paused, and cannot be shared: {list_names(away)}", names=away)
    tracked = {name for name, tensor in present if not is_ipc_capable(tensor)}
    if tracked and not repack:
        raise PlanError(
            f"CUDA IPC cannot share memory of torch_memory_saver's, where these tensors lie: {list_names(tracked)}",
            names=sorted(tracked),
        )
    if tracked and door.is_tracked_here():
        raise MemorySaverError("copies made here would be the saver's, too: run this in memory_saver_guard()")
    shared = tuple(
        tensor.contiguous().clone() if name in tracked else tensor for name, tensor in zip(names, tensors, strict=True)
    )
    copies = [(name, copy) for name, copy in zip(names, shared, strict=True) if name in tracked and copy.is_cuda]
    if left := [name for name, copy in copies if not is_ipc_capable(copy)]:
        raise PlanError(
            f"CUDA IPC cannot share what torch allocates here (expandable segments?): {list_names(left)}", names=left
        )
    return shared
