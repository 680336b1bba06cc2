"""A trainer rank that sleeps between updates, in a Ray actor that runs under torch_memory_saver's real hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch_memory_saver import torch_memory_saver as saver

import asyncsync
from asyncsync import cluster
from asyncsync.memory_saver.driver import is_mapped
from tests.cuda_stubs import device


@cluster.remote(num_cpus=0)
class SleepingRank(asyncsync.TrainerRank):
    """Holds a part of a weight in the saver's memory, which is there only while an update needs it.

    Args:
        rank: Which rank this is.
        size: Of how many.
        store: Where their process groups meet; each is a new one.
    """

    def __init__(self, rank: int, size: int, store: str) -> None:
        device.install()
        self._where = (rank, size, store)
        self._updates = 0
        self._tracked: list[bool] = []
        self.part = device.on_device(torch.arange(4.0) + 10 * rank)
        super().__init__(self)
        saver.pause()

    def _look(self) -> None:
        self._tracked.append(device.tracked())

    def before_update(self) -> None:
        """Collective. Wake up, and make the process groups anew."""
        rank, size, store = self._where
        self._updates += 1
        saver.resume()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}-{self._updates}", rank=rank, world_size=size
        )
        self._look()

    def after_update(self) -> None:
        """Destroy the process groups, and go back to sleep."""
        torch.distributed.destroy_process_group()
        self._look()
        saver.pause()

    def describe(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """See :class:`asyncsync.GatheredWeights`."""
        _, size, _ = self._where
        return [("weight", torch.float32, (4 * size,))]

    def gather(self, name: str) -> Tensor | None:
        """Collective. See :class:`asyncsync.GatheredWeights`."""
        rank, size, _ = self._where
        self._look()
        parts = [torch.empty(4) for _ in range(size)] if rank == 0 else None
        torch.distributed.gather(self.part.detach().as_subclass(Tensor), parts)
        return torch.cat(parts) if parts is not None else None

    def step(self) -> None:
        """Wake up, train, and go back to sleep."""
        saver.resume()
        self.part.add_(1)
        saver.pause()

    def state(self) -> dict[str, Any]:
        """How it is between updates."""
        return {
            "asleep": not is_mapped(self.part),
            "in a group": torch.distributed.is_initialized(),
            "updates": self._updates,
            "its work was tracked": any(self._tracked),
            "others are tracked": device.tracked(),
            "guarded": asyncsync.memory_saver_status().guarded,
        }
