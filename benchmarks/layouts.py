"""The sets of weights that are measured: real layouts without real values.

A layout is a name, and a shape for each tensor; every tensor is bfloat16, as policies are served.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

DTYPE = torch.bfloat16
KB, MB, GB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of a set of weights.

    Attributes:
        name: What the table calls it.
        shapes: Shape by tensor name, in the order of the weights.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * DTYPE.itemsize


def tiny() -> Layout:
    """A module of two linear layers, 32 wide: 4 tensors, 4 kB."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in ("up", "down"):
        shapes |= {f"{layer}.weight": (32, 32), f"{layer}.bias": (32,)}
    return Layout("tiny", shapes)


def even(name: str, layers: int, *shape: int) -> Layout:
    """``layers`` tensors of one shape."""
    return Layout(name, {f"layers.{index}.weight": shape for index in range(layers)})


def smollm2() -> Layout:
    """SmolLM2-135M as Hugging Face lays it out: 272 tensors, 269 MB; the tied ``lm_head.weight`` is not sent twice."""
    vocabulary, hidden, intermediate, layers, kv_heads, head_dim = 49152, 576, 1536, 30, 3, 64
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    return Layout("smollm2", shapes)


def all_layouts() -> dict[str, Layout]:
    """Every layout by its name, small ones first; sizes are powers of two."""
    layouts = (
        tiny(),
        even("1 MB", 4, 512, 256),
        even("2000x4KB", 2000, 2048),
        even("16 MB", 8, 1024, 1024),
        even("64 MB", 8, 2048, 2048),
        even("256 MB", 16, 4096, 2048),
        smollm2(),
        even("1 GB", 32, 4096, 4096),
    )
    return {layout.name: layout for layout in layouts}


def make_weights(layout: Layout) -> dict[str, Tensor]:
    """Random weights of a layout, each tensor with memory of its own."""
    return {name: torch.randn(shape).to(DTYPE) for name, shape in layout.shapes.items()}


def make_module(layout: Layout) -> nn.Module:
    """A module whose parameters are a layout, all zero."""
    root = nn.Module()
    for name, shape in layout.shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            child = getattr(module, part, None)
            if child is None:
                child = nn.Module()
                module.add_module(part, child)
            module = child
        module.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=DTYPE), requires_grad=False))
    return root


def change(tensors: Iterable[Tensor]) -> None:
    """Change every element of every tensor, as a training step would, but to other bits whatever they are."""
    for tensor in tensors:
        tensor.view(torch.uint8 if tensor.dtype is torch.uint8 else torch.int16).add_(1)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A digest of the bytes of contiguous tensors, in their order."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(memoryview(tensor.detach().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return state.hexdigest()
