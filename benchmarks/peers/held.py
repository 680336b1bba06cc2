"""What the ends of most peers have in common: weights that lie in one memory, and a trainer that is an actor."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from asyncsync import cluster
from benchmarks import layouts
from benchmarks.contenders import ToFleet
from benchmarks.fleets import Fleet
from benchmarks.layouts import Layout


class NotInstalledError(Exception):
    """What a peer needs is not installed."""


def imported(module: str) -> Any:
    """A module that may be missing.

    Raises:
        NotInstalledError: It is, or what it needs is.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalledError(f"{module} is not installed, or not whole: {error}") from error


class Holder:
    """Holds the weights of a layout, as views of one memory: include it in an actor's class.

    Attributes:
        module: Whose parameters the weights are.
        flat: The memory.
        tensors: The weights themselves.
    """

    module: nn.Module
    flat: Tensor
    tensors: list[Tensor]

    def hold(self, layout: Layout) -> None:
        """Hold the weights of this layout, all zero."""
        self.flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.module = layouts.make_module(layout)
        offset = 0
        for parameter in self.module.parameters():
            part = self.flat[offset : offset + parameter.nbytes]
            parameter.data = part.view(parameter.dtype).view(parameter.shape)
            offset += parameter.nbytes
        # Kept, since Ray's direct transport holds what it is told to receive into by weak references.
        self.tensors = [parameter.data for parameter in self.module.parameters()]

    def load(self, module: str) -> None:
        """Import what is used later."""
        imported(module)

    def change(self) -> None:
        """Change every weight, and have nothing else to do in the next run."""
        layouts.change(self.tensors)
        gc.collect()


class FromTrainer(ToFleet):
    """A way that starts in an actor, because it is for actors alone.

    Args:
        fleet: The engines.
        trainer: The actor.
    """

    def __init__(self, fleet: Fleet, trainer: Any) -> None:
        super().__init__(fleet, [])
        self.trainer = trainer

    async def prepare(self) -> None:
        """Have the actor change its weights."""
        await super().prepare()
        await cluster.call(self.trainer, "change")

    async def expected(self) -> str:
        """Digest of the actor's weights."""
        return str(await cluster.call(self.trainer, "fingerprint"))
