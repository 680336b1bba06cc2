"""What the CUDA driver knows of memory: whether it is there, and whether it can be shared."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from asyncsync.errors import MemorySaverError
from asyncsync.memory_saver import door

_LEGACY_IPC_CAPABLE, _MAPPED = 10, 13  # CU_POINTER_ATTRIBUTE_…, cuda.h of CUDA 13.0
_SUCCESS, _INVALID_VALUE = 0, 1


def may_be_paused(tensor: Tensor) -> bool:
    """Whether a tensor's memory may have been taken away; false costs next to nothing. ROCm is not looked at."""
    return tensor.is_cuda and tensor.numel() > 0 and torch.version.hip is None and door.is_in_use()


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
    result = _driver().cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_void_p(tensor.data_ptr()))
    if result not in (_SUCCESS, _INVALID_VALUE):
        raise MemorySaverError(f"the CUDA driver does not tell about memory at {tensor.data_ptr():#x}: error {result}")
    return result == _SUCCESS and bool(value.value)  # an address that it does not know has no memory, either


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MemorySaverError(f"the CUDA driver's library cannot be loaded: {error}") from error
