"""DTensors: the block of a sharded tensor that lies on this rank. Nothing here is collective."""

from __future__ import annotations

from torch import Tensor

from asyncsync.errors import PlanError
from asyncsync.shards import Block


def is_dtensor(tensor: object) -> bool:
    """Whether this is a DTensor; imports nothing to find out."""
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")


def local_block(name: str, tensor: Tensor) -> tuple[Tensor, Block | None]:
    """What lies on this rank of a DTensor, and where in the whole it belongs; None: it is the whole.

    Args:
        name: What an error calls it.
        tensor: A DTensor, sharded or replicated over any mesh.

    Raises:
        PlanError: This rank's part is no box of the tensor, or it is not in its final state (``Partial``).
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise PlanError(f"{name} still has to be summed over ranks (placements {tensor.placements})", names=(name,))
    local = tensor.to_local()
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(local.shape) != tuple(shape):
        raise PlanError(
            f"{name} is cut in a way that is not known here (placements {tensor.placements}): "
            f"this rank holds {list(local.shape)} where {list(shape)} was expected",
            names=(name,),
        )
    if tuple(shape) == tuple(tensor.shape):
        return local, None
    return local, Block(tuple(start), tuple(shape))
