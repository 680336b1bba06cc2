"""Ray's direct transport (RDT): tensors go from actor to actor, past the object store.

NIXL as Ray's guide to tuning it says: memory registered once at both ends, views of one storage, and received where the
weights lie. gloo as its walkthrough says: a task returns the tensors, and tasks that take them get them over a group.

https://docs.ray.io/en/latest/ray-core/direct-transport.html
"""
# ruff: noqa: TID251 - the documented way to receive is ray.get, in an actor without an event loop.

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.experimental import register_nixl_memory, set_target_for_ref
from ray.experimental.collective import create_collective_group, destroy_collective_group
from torch import Tensor

from asyncsync import cluster
from benchmarks.fleets import Fleet
from benchmarks.peers.held import FromTrainer, Holder


class DirectSender(Holder):
    """The trainer's end: include it in an actor's class."""

    def register_memory(self) -> None:
        """Register the weights with NIXL, for good."""
        register_nixl_memory(self.flat)

    def put_direct(self) -> list[Any]:
        """A reference to the weights, in a list, so that it is not fetched before the receiver says where to."""
        return [ray.put(self.tensors, _tensor_transport="nixl")]

    @ray.method(tensor_transport="gloo")
    def give_direct(self) -> list[Tensor]:
        """The weights."""
        return self.tensors


class DirectReceiver(Holder):
    """An engine's end: include it in an actor's class."""

    def register_memory(self) -> None:
        """Register the weights with NIXL, for good."""
        register_nixl_memory(self.flat)

    def receive_direct(self, references: Sequence[Any]) -> None:
        """Fetch the weights to where they lie."""
        set_target_for_ref(references[0], self.tensors)
        ray.get(references[0])

    def receive_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Copy weights that came with the call to where they lie."""
        for mine, theirs in zip(self.tensors, tensors, strict=True):
            mine.copy_(theirs)


class Nixl(FromTrainer):
    """Over NIXL."""

    async def load(self) -> None:
        """Import NIXL.

        Raises:
            NotInstalledError: It is not there.
        """
        await asyncio.gather(cluster.call(self.trainer, "load", "nixl"), self.fleet.all("load", "nixl"))

    async def connect(self) -> None:
        """Register the memory of both ends."""
        await asyncio.gather(cluster.call(self.trainer, "register_memory"), self.fleet.all("register_memory"))

    async def run(self) -> float:
        """See :meth:`benchmarks.contenders.Contender.run`."""
        start = time.perf_counter()
        references = await cluster.call(self.trainer, "put_direct")
        await self.fleet.all("receive_direct", references)
        return time.perf_counter() - start


class DirectGloo(FromTrainer):
    """Over gloo."""

    def __init__(self, fleet: Fleet, trainer: Any) -> None:
        super().__init__(fleet, trainer)
        self._group: Any = None

    async def connect(self) -> None:
        """Form the group."""
        members = [self.trainer, *self.fleet.engines]
        self._group = await asyncio.to_thread(create_collective_group, members, backend="gloo")

    async def run(self) -> float:
        """See :meth:`benchmarks.contenders.Contender.run`."""
        start = time.perf_counter()
        await self.fleet.all("receive_tensors", self.trainer.give_direct.remote())
        return time.perf_counter() - start

    async def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            await asyncio.to_thread(destroy_collective_group, self._group)
