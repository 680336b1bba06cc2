"""The stubs' device as a GPU that torch knows of, as far as CUDA IPC needs it. Import it where the stubs are found.

A process need not be under the saver's hook. What torch allocates lies in the middle of an allocation, as what its own
allocator gives does.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from asyncsync.memory_saver import door
from tests.cuda_stubs import device

OFFSET = 512
FREE = 1 << 30

said: list[str] = []
"""What was waited for, and whatever a test adds."""

_kinds: dict[int, type[device.OnStub]] = {}


def kind(number: int) -> type[device.OnStub]:
    """The class of a GPU's tensors."""
    if number not in _kinds:

        class OnGpu(device.OnStub):
            """A tensor that says it is on a GPU."""

            is_cpu = False
            device = torch.device("cuda", number)

            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                function: Any = super().__torch_function__
                return function(func, (cls,), args, kwargs)  # also with another GPU's

            def cpu(self, *args: Any, **options: Any) -> Tensor:
                return self.as_subclass(Tensor).clone()

        _kinds[number] = OnGpu
    return _kinds[number]


def put(tensor: Tensor, number: int = 0) -> Tensor:
    """A copy of a tensor on a GPU, with its strides and offset."""
    return device.on_device(tensor).as_subclass(kind(number))


def put_all(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights on the first GPU, tied ones once."""
    placed = {id(tensor): put(tensor) for tensor in weights.values()}
    return {name: placed[id(tensor)] for name, tensor in weights.items()}


def put_module(module: nn.Module) -> nn.Module:
    """A module, moved to the first GPU."""
    placed: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    on_gpu = placed.setdefault(id(tensor), put(tensor.detach()))
                    if isinstance(tensor, nn.Parameter):
                        on_gpu.requires_grad_(tensor.requires_grad)
                        on_gpu._is_param = True
                    held[name] = on_gpu  # type: ignore[assignment]
    return module


def opened() -> int:
    """How many allocations of other processes are open here."""
    return int(ctypes.CDLL("libcuda.so.1").stub_opened())


def install(*gpus: str) -> None:
    """Put the stand-ins into torch.

    Args:
        gpus: The UUIDs of those that this process sees.
    """
    ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
    if door.hook() is not None:
        device.install()
    cuda: Any = torch.cuda
    cuda.is_initialized = lambda: True
    cuda.current_device = device.current_device
    cuda.set_device = _set_device
    cuda.device = _on
    cuda.device_count = lambda: len(gpus)
    cuda.get_device_properties = lambda which: SimpleNamespace(uuid=gpus[which.index])
    cuda.synchronize = lambda which=None: said.append("synchronize")
    cuda.current_stream = lambda which=None: SimpleNamespace(synchronize=lambda: said.append("stream"))
    cuda.mem_get_info = lambda which=None: (FREE, 2 * FREE)
    patched: Any = torch
    empty, as_tensor = torch.empty, torch.as_tensor
    patched.empty = lambda *size, **options: (
        _allocate(*size) if _is_gpu(options.get("device")) else empty(*size, **options)
    )
    patched.as_tensor = lambda of, **options: (
        _tensor_over(of) if hasattr(of, "__cuda_array_interface__") else as_tensor(of, **options)
    )


def _set_device(which: torch.device | int) -> None:
    device._process.cudaSetDevice(which.index if isinstance(which, torch.device) else which)


@contextmanager
def _on(which: torch.device) -> Iterator[None]:
    before = device.current_device()
    _set_device(which)
    yield
    _set_device(before)


def _is_gpu(which: Any) -> bool:
    return which is not None and torch.device(which).type == "cuda"


def _allocate(nbytes: int) -> Tensor:
    address = device.allocate(OFFSET + nbytes)
    memory = (ctypes.c_uint8 * nbytes).from_address(address + OFFSET)
    weakref.finalize(memory, device.free, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).as_subclass(kind(device.current_device()))


def _tensor_over(of: Any) -> Tensor:
    interface = of.__cuda_array_interface__
    (nbytes,), (address, _) = interface["shape"], interface["data"]
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.of = of
    return torch.frombuffer(memory, dtype=torch.uint8).as_subclass(kind(device.current_device()))


def allocations() -> Sequence[dict[str, Any]]:
    """What was allocated here, and not freed."""
    return device._segments
