"""Ray's object store: with all tensors packed into one array, by hand, and as it is used without further thought."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray
import torch
from torch import Tensor

from benchmarks.contenders import ToFleet
from benchmarks.fleets import Fleet
from benchmarks.peers.held import Holder


class StateDictReceiver(Holder):
    """An engine's end: include it in an actor's class."""

    def receive_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Copy what came with the call to where the weights lie."""
        self.module.load_state_dict(weights)

    def receive_packed(self, array: Any) -> None:
        """Copy what came in one array to where the weights lie."""
        parts = torch.split(torch.from_numpy(array), [tensor.nbytes for tensor in self.tensors])
        for mine, theirs in zip(self.tensors, parts, strict=True):
            mine.view(-1).view(torch.uint8).copy_(theirs)


class PutPacked(ToFleet):
    """One array with every tensor's bytes: packed into warm memory and put by a thread, unpacked by each actor."""

    def __init__(self, fleet: Fleet, weights: Mapping[str, Tensor]) -> None:
        super().__init__(fleet, list(weights.values()))
        self._packed = torch.zeros(sum(tensor.nbytes for tensor in self.tensors), dtype=torch.uint8)

    async def run(self) -> float:
        """See :meth:`benchmarks.contenders.Contender.run`."""
        start = time.perf_counter()
        await self.fleet.all("receive_packed", await asyncio.to_thread(self._put))
        return time.perf_counter() - start

    def _put(self) -> Any:
        torch.cat([tensor.view(-1).view(torch.uint8) for tensor in self.tensors], out=self._packed)
        return ray.put(self._packed.numpy())


class PutStateDict(ToFleet):
    """One object with every tensor, put from the event loop, and loaded by each actor."""

    def __init__(self, fleet: Fleet, weights: Mapping[str, Tensor]) -> None:
        super().__init__(fleet, list(weights.values()))
        self.weights = dict(weights)

    async def run(self) -> float:
        """See :meth:`benchmarks.contenders.Contender.run`."""
        start = time.perf_counter()
        await self.fleet.all("receive_state_dict", ray.put(self.weights))
        return time.perf_counter() - start
