"""The stubs' device, as torch would use it: allocations, tensors in them, memory pools.

The CPU build of torch has no CUDA to allocate with, and no memory pools, so both are stood in for; the calls go to the
hook, as those of torch's allocator do.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_process = ctypes.CDLL(None)
_here = threading.local()
_pool_numbers = itertools.count(1)
_segments: list[dict[str, Any]] = []


class Pool:
    """In place of ``torch.cuda.MemPool``."""

    def __init__(self, allocator: object = None) -> None:
        self.id = (next(_pool_numbers), 0)


@contextmanager
def use_pool(pool: Pool) -> Iterator[None]:
    """In place of ``torch.cuda.use_mem_pool``: of the thread, like that."""
    before = pool_here()
    _here.pool = pool
    try:
        yield
    finally:
        assert pool_here() is pool, "memory pools of a thread must be left in the reverse order"
        _here.pool = before


def pool_here() -> Pool | None:
    """The pool that this thread allocates in."""
    return getattr(_here, "pool", None)


def install() -> None:
    """Put the stand-ins into torch, in a process that runs under the hook."""
    _process.tms_get_interesting_region.restype = ctypes.c_bool
    _process.tms_get_current_tag.restype = ctypes.c_char_p
    cuda: Any = torch.cuda
    cuda.MemPool, cuda.use_mem_pool = Pool, use_pool
    cuda.is_initialized = lambda: True
    cuda.current_device = current_device
    cuda.set_device = lambda device: _process.cudaSetDevice(torch.device("cuda", device).index)
    cuda.memory_snapshot = lambda: list(_segments)
    patched: Any = torch
    patched.get_device_module = lambda *_: cuda  # what the saver asks for


def current_device() -> int:
    """This thread's device."""
    device = ctypes.c_int(-1)
    _process.cudaGetDevice(ctypes.byref(device))
    return device.value


def allocate(nbytes: int) -> int:
    """``cudaMalloc``, as torch's allocator calls it: the address."""
    address = ctypes.c_void_p()
    assert _process.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
    assert address.value is not None
    pool = pool_here()
    _segments.append(
        {"address": address.value, "total_size": nbytes, "segment_pool_id": pool.id if pool is not None else (0, 0)}
    )
    return address.value


def free(address: int) -> None:
    """``cudaFree``."""
    assert _process.cudaFree(ctypes.c_void_p(address)) == 0
    _segments[:] = [segment for segment in _segments if segment["address"] != address]


def tracked() -> bool:
    """Whether what this thread allocates now is the saver's: allocates, looks, and frees."""
    address = allocate(64)
    capable = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuPointerGetAttribute(ctypes.byref(capable), 10, ctypes.c_void_p(address)) == 0
    free(address)
    return not capable.value  # the driver gives out memory that can be shared; the saver maps its own


def settings() -> tuple[bool, str]:
    """This thread's flag and tag."""
    return bool(_process.tms_get_interesting_region()), _process.tms_get_current_tag().decode()


class OnStub(Tensor):
    """A tensor that says it is on the device; its bytes lie where the hook has put them."""

    is_cuda = True


def on_device(tensor: Tensor) -> Tensor:
    """A copy of a tensor in newly allocated memory, with its strides and offset."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor.detach().clone().as_subclass(OnStub)
    address = allocate(storage.nbytes())
    ctypes.memmove(address, storage.data_ptr(), storage.nbytes())
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    placed = torch.empty(0, dtype=tensor.dtype).set_(
        flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    if tensor.is_conj():
        placed = placed.conj()
    if tensor.is_neg():
        placed = torch._neg_view(placed)
    return placed.as_subclass(OnStub)
