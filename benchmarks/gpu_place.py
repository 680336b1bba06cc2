"""Where a check of :mod:`benchmarks.gpu_check` runs, and what it writes down while it does.

As much of a check as can be is the same on every device, and is really run on the CPU as well; what differs is asked of
its *place*. What a check finds is written to a file at once, line by line: one that ends its process has told what it
found before.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from asyncsync.memory_saver import door
from asyncsync.memory_saver.driver import is_ipc_capable, is_mapped
from asyncsync.memory_saver.sharing import shareable
from benchmarks import layouts

T = TypeVar("T")

IPC_CAPABLE, MAPPED = 10, 13
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE and _MAPPED (cuda.h): what the library tells memory apart by."""


class Notes:
    """What a check finds.

    Args:
        file: Where it is written, as lines of JSON.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, kind: str, name: str, value: Any = None) -> None:
        """Write a line, at once."""
        with self._file.open("a") as file:
            file.write(json.dumps([kind, name, value], default=str) + "\n")

    def step(self, what: str) -> None:
        """Say what is done next: where it was, if it does not come back."""
        self.write("step", what)

    def __setitem__(self, name: str, value: Any) -> None:
        self.write("figure", name, value)

    def expect(self, name: str, value: T, wanted: T) -> None:
        """Note a figure that must have a value; the check goes on, and has failed in the end."""
        self.write("figure", name, value)
        if value != wanted:
            self.write("broken", name, f"{name} is {value}, not {wanted}")

    def attempt(self, name: str, function: Callable[[], Any]) -> None:
        """Note what comes of something that may fail, whatever that is."""
        self.step(name)
        try:
            self[name] = function()
        except Exception as error:  # noqa: BLE001 - what happens is what is to be known
            self[name] = said(error)


def said(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


class Place:
    """The CPU: nothing is paused, and nobody tracks.

    Attributes:
        name: What it is called, and torch's device.
        saver: torch_memory_saver, if it is loaded and has something to take away here.
        second: Torch's name of another such device, if there is one; else of the same.
        transport: How weights come from here to another process of the same node.
        engine: Makes an engine for this place, in a second process, of what ``PolicyEngine`` is made of; None: that.
    """

    name = "cpu"
    saver: Any = None
    second = "cpu"
    transport: Literal["shared", "cuda_ipc"] = "shared"
    engine: Callable[..., Any] | None = None

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, with its strides and offset, and memory of its own."""
        storage = tensor.untyped_storage()
        flat = self.allocate(storage.nbytes())
        flat.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        placed = torch.empty(0, dtype=tensor.dtype, device=self.name).set_(
            flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        placed = placed.conj() if tensor.is_conj() else placed
        return torch._neg_view(placed) if tensor.is_neg() else placed

    def put_module(self, module: nn.Module) -> nn.Module:
        """A module, moved here."""
        return module.to(self.name)

    def allocate(self, nbytes: int) -> Tensor:
        """Fresh memory, flat uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.name)

    def pause(self) -> None:
        """Have the saver take its memory away."""
        self.synchronize()
        if self.saver is not None:
            self.saver.pause()

    def resume(self) -> None:
        """Have it give its memory back."""
        if self.saver is not None:
            self.saver.resume()

    def away(self, tensors: Iterable[Tensor]) -> str:
        """Which tensors' memory is taken away: all, none, or some."""
        if self.saver is None:
            return "none"
        found = {is_mapped(tensor) for tensor in tensors if tensor.numel()}
        return "some" if len(found) == 2 else "none" if True in found else "all"

    @property
    def paused(self) -> str:
        """What :meth:`away` says of the saver's memory while it is paused."""
        return "none" if self.saver is None else "all"

    def tracked(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is the saver's."""
        return self.saver is not None and not is_ipc_capable(tensor)

    def shareable(self, names: list[str], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Tensors that another process can be given. Guarded work."""
        return tuple(tensors) if self.saver is None else shareable(names, tensors)

    def ask_driver(self, tensor: Tensor) -> dict[str, list[int]] | None:
        """What the driver says of memory: its result, and the value."""
        return None

    def synchronize(self) -> None:
        """Wait for the device."""

    def memory(self) -> dict[str, float]:
        """MB in use: on the whole device, and what torch's allocator holds of it in this process."""
        return {}

    def empty_cache(self) -> None:
        """Have torch give back what it holds and does not use."""


class CudaPlace(Place):
    """The first GPU that is seen."""

    name = "cuda"
    transport = "cuda_ipc"

    def __init__(self) -> None:
        self.second = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
        if door.hook() is not None:
            from torch_memory_saver import torch_memory_saver

            self.saver = torch_memory_saver

    def ask_driver(self, tensor: Tensor) -> dict[str, list[int]] | None:
        """See :meth:`Place.ask_driver`."""
        driver, found = ctypes.CDLL("libcuda.so.1"), {}
        for name, attribute in (("ipc_capable", IPC_CAPABLE), ("mapped", MAPPED)):
            value = ctypes.c_int(0)
            address = ctypes.c_void_p(tensor.data_ptr())
            found[name] = [int(driver.cuPointerGetAttribute(ctypes.byref(value), attribute, address)), value.value]
        return found

    def synchronize(self) -> None:
        """See :meth:`Place.synchronize`."""
        torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        """See :meth:`Place.memory`."""
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        return {"device": round((total - free) / layouts.MB, 1), "held": round(held / layouts.MB, 1)}

    def empty_cache(self) -> None:
        """See :meth:`Place.empty_cache`."""
        torch.cuda.empty_cache()


PLACES: dict[str, Callable[[], Place]] = {"cpu": Place, "cuda": CudaPlace}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A digest of the bytes of contiguous tensors on any device, in their order."""
    return layouts.fingerprint(tensor.detach().cpu() for tensor in tensors)
