"""ray.util.collective: a broadcast for each tensor, over gloo.

https://docs.ray.io/en/latest/ray-more-libs/ray-collective.html
"""

from __future__ import annotations

import asyncio
import time

from ray.util import collective
from ray.util.collective import types

from asyncsync import cluster
from benchmarks.peers.held import FromTrainer, Holder

_GROUP = "benchmark"


class CollectiveMember(Holder):
    """One end: include it in an actor's class."""

    def join_collective(self, size: int, rank: int) -> None:
        """Join the group; returns when all have."""
        collective.init_collective_group(size, rank, backend=types.Backend("gloo"), group_name=_GROUP)

    def broadcast_tensors(self) -> None:
        """Take part in one broadcast of each tensor, from rank 0."""
        for tensor in self.tensors:
            collective.broadcast(tensor, src_rank=0, group_name=_GROUP)

    def leave_collective(self) -> None:
        """Leave the group."""
        collective.destroy_collective_group(_GROUP)


class Collective(FromTrainer):
    """A broadcast for each tensor."""

    async def connect(self) -> None:
        """Form the group."""
        size = len(self.fleet.engines) + 1
        ends = enumerate([self.trainer, *self.fleet.engines])
        await asyncio.gather(*(cluster.call(end, "join_collective", size, rank) for rank, end in ends))

    async def run(self) -> float:
        """See :meth:`benchmarks.contenders.Contender.run`."""
        start = time.perf_counter()
        await self._all("broadcast_tensors")
        return time.perf_counter() - start

    async def close(self) -> None:
        """Leave the group."""
        await self._all("leave_collective")

    async def _all(self, method: str) -> None:
        await asyncio.gather(cluster.call(self.trainer, method), self.fleet.all(method))
