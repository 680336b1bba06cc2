"""Weights to test with: every dtype and every kind of tensor, and what it takes to compare them bit for bit."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *FLOAT8, *INTEGERS, *COMPLEX, torch.bool)


def random_bytes(count: int, seed: int) -> Tensor:
    """Flat uint8 tensor of random bytes."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor whose bytes are random: NaNs with payloads, negative zeros and all. Bools are 0 or 1."""
    count = int(torch.Size(shape).numel())
    flat = random_bytes(count * dtype.itemsize, seed)
    if dtype is torch.bool:
        flat = flat % 2
    return flat.view(dtype).view(shape)


def content(tensor: Tensor) -> bytes:
    """A tensor's bytes, row-major."""
    if not tensor.numel():
        return b""
    detached = tensor.detach().resolve_conj().resolve_neg()
    dense = detached.clone(memory_format=torch.contiguous_format)  # one element alone may keep an odd stride otherwise
    return bytes(dense.reshape(-1).view(torch.uint8).numpy())


class Zoo(nn.Module):
    """A module with every kind of tensor that a trainer may hold.

    Args:
        seed: Of the random bytes.
        strided: Whether to hold transposed, sliced and expanded tensors as such; a serving engine holds them dense.
    """

    def __init__(self, seed: int = 0, *, strided: bool = True) -> None:
        super().__init__()
        for index, dtype in enumerate(DTYPES):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"matrix_{name}", random_tensor(dtype, (5, 7), seed + index))
            self.register_buffer(f"one_{name}", random_tensor(dtype, (), seed + 100 + index))
        self.register_buffer("a_byte", random_tensor(torch.uint8, (1,), seed + 200))
        self.register_buffer("before_wide", random_tensor(torch.complex128, (3,), seed + 201))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("empty_3d", torch.empty(2, 0, 3, dtype=torch.int64))
        transposed = random_tensor(torch.float32, (6, 4), seed + 202).t()
        sliced = random_tensor(torch.bfloat16, (9, 10), seed + 203)[::2, 1::3]
        expanded = random_tensor(torch.float32, (1, 5), seed + 204).expand(3, 5)
        lonely = random_tensor(torch.float32, (4,), seed + 205)[::4]  # one element: contiguous, whatever its stride
        for name, tensor in (
            ("transposed", transposed),
            ("sliced", sliced),
            ("expanded", expanded),
            ("lonely", lonely),
        ):
            self.register_buffer(name, tensor if strided else tensor.contiguous())
        self.weight = nn.Parameter(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)))
        self.tied = self.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def fingerprint(module: nn.Module) -> str:
    """What tells two modules' bytes apart, in any process."""
    digest = hashlib.sha256()
    for name, data in sorted(contents(module).items()):
        digest.update(name.encode() + data)
    return digest.hexdigest()


def contents(module: nn.Module) -> dict[str, bytes]:
    """The bytes of everything a module saves, by name."""
    return {name: content(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
