"""The stubs' device, as a place where :mod:`benchmarks.gpu_check` runs its checks. Import it under the hook only."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from benchmarks.gpu_place import CudaPlace
from tests.cuda_stubs import device


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
