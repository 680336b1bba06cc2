"""The stubs' device, as a place where :mod:`benchmarks.gpu_check` runs its checks. Import it under the hook only."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

import asyncsync
from benchmarks.gpu_place import CudaPlace
from benchmarks.gpu_updates import Policy, PolicyEngine
from tests.cuda_stubs import device, gpu

GPU = "0f3b8a51-0000-4000-8000-00000000000a"


class StubPlace(CudaPlace):
    """The stubs' device; to torch, and to a second process, it is the CPU."""

    name = "cpu"

    def put(self, tensor: Tensor) -> Tensor:
        return device.on_device(tensor)

    def put_module(self, module: nn.Module) -> nn.Module:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(device.on_device(parameter))
        return module

    def allocate(self, nbytes: int) -> Tensor:
        memory = (ctypes.c_uint8 * nbytes).from_address(device.allocate(nbytes))
        return torch.frombuffer(memory, dtype=torch.uint8).as_subclass(device.OnStub)

    def synchronize(self) -> None:
        pass

    def memory(self) -> dict[str, float]:
        return {}

    def empty_cache(self) -> None:
        pass


class StubGpuEngine(PolicyEngine):
    """An engine on the stubs' GPU, in a process of its own."""

    def __init__(self, shape: tuple[int, int], name: str, staged: bool) -> None:
        gpu.install(GPU)
        asyncsync.ModuleEngine.__init__(self, gpu.put_module(Policy(shape, "cpu")), staged=staged)


class StubGpuPlace(StubPlace):
    """The stubs' device, as a GPU."""

    engine = StubGpuEngine

    def __init__(self) -> None:
        gpu.install(GPU)
        super().__init__()

    def put(self, tensor: Tensor) -> Tensor:
        return gpu.put(tensor)

    def put_module(self, module: nn.Module) -> nn.Module:
        return gpu.put_module(module)
