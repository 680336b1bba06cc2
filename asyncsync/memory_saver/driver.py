"""What the CUDA driver knows of memory: whether it is there, and whether it can be shared."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from asyncsync.errors import MemorySaverError
from asyncsync.memory_saver import door

_LEGACY_IPC_CAPABLE, _MAPPED = 10, 13  # CU_POINTER_ATTRIBUTE_…, cuda.h of CUDA 13.0
_SUCCESS, _INVALID_VALUE = 0, 1


def may_be_absent(tensors: Sequence[Tensor]) -> bool:
    """Whether any of these tensors' memory may be taken away, now or soon."""
    return door.is_started() and torch.version.hip is None and any(tensor.is_cuda for tensor in tensors)


def absent(tensors: Sequence[Tensor]) -> list[int]:
    """Which of these tensors' memory was taken away, by index. Where the saver was not started this costs nothing.

    Tensors on other devices than CUDA's are always there, and so are, for all that is known here, those of ROCm.

    Raises:
        MemorySaverError: The driver did not say.
    """
    if not may_be_absent(tensors):
        return []
    return [
        index for index, tensor in enumerate(tensors) if tensor.is_cuda and tensor.numel() and not is_mapped(tensor)
    ]


def is_mapped(tensor: Tensor) -> bool:
    """Whether a CUDA tensor has memory behind its addresses. Ask on a thread that has its device set.

    Raises:
        MemorySaverError: The driver did not say.
    """
    return _attribute(tensor, _MAPPED)


def is_ipc_capable(tensor: Tensor) -> bool:
    """Whether a CUDA tensor's memory can be shared by CUDA IPC (``cudaIpcGetMemHandle``): the saver's cannot.

    Raises:
        MemorySaverError: The driver did not say.
    """
    return _attribute(tensor, _LEGACY_IPC_CAPABLE)


def _attribute(tensor: Tensor, attribute: int) -> bool:
    value = ctypes.c_int(0)
    result = library().cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_void_p(tensor.data_ptr()))
    if result not in (_SUCCESS, _INVALID_VALUE):
        raise MemorySaverError(f"the CUDA driver does not tell about memory at {tensor.data_ptr():#x}: error {result}")
    return result == _SUCCESS and bool(value.value)  # an address that it does not know has no memory, either


@cache
def library() -> ctypes.CDLL:
    """The driver's library.

    Raises:
        MemorySaverError: It cannot be loaded.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MemorySaverError(f"the CUDA driver's library cannot be loaded: {error}") from error
