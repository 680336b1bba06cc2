"""DTensors: the block of a sharded tensor that lies on this rank. Nothing here is collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from asyncsync.errors import PlanError
from asyncsync.shards import Block

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> bool:
    """Whether this is a DTensor; imports nothing to find out."""
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")


def local_tensor(tensor: Tensor) -> Tensor:
    """The very tensor that holds what lies here of a DTensor; any other tensor is that itself."""
    # Not to_local(): of a parameter it gives a new view each time, and what that is pointed to the DTensor never sees.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


class Boxes:
    """Where the parts that lie on this rank belong; those that are cut alike are looked for once.

    Make one for each reading: ranks may change places between two.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[tuple[int, ...], Block | None]] = {}

    def local(self, name: str, tensor: Tensor) -> tuple[Tensor, Block | None]:
        """What lies on this rank of a DTensor, and where in the whole it belongs; None: it is the whole.

        Args:
            name: What an error calls it.
            tensor: A DTensor, sharded or replicated over any mesh.

        Raises:
            PlanError: This rank's part is no box of the tensor, or it is not in its final state (``Partial``).
        """
        from torch.distributed.tensor import DTensor

        assert isinstance(tensor, DTensor)
        cut = (tensor.shape, tensor.device_mesh, tensor.placements)
        if (known := self._known.get(cut)) is None:
            known = self._known[cut] = _find_box(name, tensor)
        shape, block = known
        local = local_tensor(tensor)
        if local.shape != shape:
            raise PlanError(
                f"{name} is cut in a way that is not known here (placements {tensor.placements}): "
                f"this rank holds {list(local.shape)} where {list(shape)} was expected",
                names=(name,),
            )
        return local, block


def _find_box(name: str, tensor: DTensor) -> tuple[tuple[int, ...], Block | None]:
    """The shape of what lies here, and its box, if that is not the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise PlanError(f"{name} still has to be summed over ranks (placements {tensor.placements})", names=(name,))
    found, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    shape = tuple(found)
    return shape, None if shape == tuple(tensor.shape) else Block(tuple(start), shape)
