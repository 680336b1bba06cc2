"""The CUDA devices that weights are on: which those are, and having their work come to an end.

Threads of ours work on a device's default stream, and weights may be written or read on any other: so before they are
read, and before and after they are written, the device is waited for once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CPU = torch.device("cpu")


def home_of(tensors: Iterable[Tensor]) -> torch.device:
    """The device that tensors are on: the first CUDA device, if any of them is on one; else that of the first."""
    first = CPU
    for number, tensor in enumerate(tensors):
        if tensor.is_cuda:
            return tensor.device
        if number == 0:
            first = tensor.device
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # nothing is there: look no further
            break
    return first


def gpu_of(device: torch.device) -> tuple[str, ...]:
    """What tells a GPU from every other, in any process: its UUID; nothing of other devices."""
    return (str(torch.cuda.get_device_properties(device).uuid),) if device.type == "cuda" else ()


def visible_gpus() -> tuple[str, ...]:
    """What tells the GPUs that this process sees, in the order of their numbers here."""
    return tuple(gpu for number in range(torch.cuda.device_count()) for gpu in gpu_of(torch.device("cuda", number)))


def settle(device: torch.device) -> None:
    """Make a CUDA device this thread's own, and wait until all that was started there is done. Blocks."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)
