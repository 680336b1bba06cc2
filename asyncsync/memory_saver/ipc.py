"""CUDA IPC: the driver's handles, by which another process opens memory of a GPU (CUDA driver API, memory management).

A handle is of a whole allocation, and 64 bytes that mean something to the driver alone. Where it was opened, the memory
is at some other address. To free an allocation that is open elsewhere is undefined, by the driver's documentation: see
to it that nobody has it open any more. Ask on a thread that has the device set.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from asyncsync.errors import MemorySaverError
from asyncsync.memory_saver import driver

HANDLE_NBYTES = 64
"""``CU_IPC_HANDLE_SIZE``."""

_SUCCESS, _LAZY_ENABLE_PEER_ACCESS = 0, 1
_CALLS = ("cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle")


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_NBYTES),)


def why_not_here() -> str | None:
    """Why the driver of this process cannot share memory of GPUs; None if it can, as far as is known without a try."""
    if torch.version.hip is not None:
        return "ROCm is not CUDA"
    try:
        library = driver.library()
    except MemorySaverError as error:
        return str(error)
    missing = [name for name in _CALLS if not hasattr(library, name)]
    return f"the CUDA driver is too old: it has no {missing[0]}" if missing else None


def handle_of(tensor: Tensor) -> tuple[bytes, int]:
    """The handle of the allocation that a CUDA tensor lies in, and where it begins there, in bytes.

    Raises:
        OSError: The driver gives none.
        MemorySaverError: Its library cannot be loaded.
    """
    start, nbytes, handle = ctypes.c_uint64(0), ctypes.c_size_t(0), _Handle()
    address = ctypes.c_uint64(tensor.data_ptr())
    _call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(nbytes), address)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), start)
    return bytes(handle.reserved), tensor.data_ptr() - start.value


def open_handle(handle: bytes) -> int:
    """Open the allocation of another process; its address here. It is to be closed once for each time it was opened.

    Raises:
        OSError: The driver does not open it.
        MemorySaverError: Its library cannot be loaded.
    """
    address = ctypes.c_uint64(0)
    passed = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), passed, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    return address.value


def close_handle(address: int) -> None:
    """Close what was opened.

    Raises:
        OSError: The driver does not know it.
        MemorySaverError: Its library cannot be loaded.
    """
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _call(name: str, *args: object) -> None:
    result = getattr(driver.library(), name)(*args)
    if result != _SUCCESS:
        raise OSError(f"{name.removesuffix('_v2')} of the CUDA driver fails with error {result}")
