"""The engines that benchmarks bring weights to: Ray actors, ready for every contender.

A fleet's engines can take what :class:`asyncsync.WeightSynchronizer` sends, and, once the fleet has a group, what the
seed's loop and a bare broadcast send.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

import asyncsync
from asyncsync import cluster
from asyncsync.demo.actors import running
from benchmarks import layouts
from benchmarks.layouts import Layout
from benchmarks.seed_loop import Group, SeedLock, SeedReceiver, open_store


class FlatReceiver(SeedReceiver):
    """An engine's end of all that the library has no part in: include it in the actor's class.

    Attributes:
        flat: Where bytes go that come as one piece.
    """

    flat: torch.Tensor

    def receive_flat(self) -> None:
        """Take part in one bare broadcast."""
        self.group.barrier()
        self.group.broadcast(self.flat).wait()
        self.group.barrier()

    def receive_object(self, array: Any) -> None:
        """Copy what comes through the object store."""
        self.flat.numpy()[:] = array

    def fingerprint(self) -> str:
        """Digest of the module's weights."""
        return layouts.fingerprint(self.module.parameters())

    def flat_fingerprint(self) -> str:
        """Digest of what came as one piece."""
        return layouts.fingerprint([self.flat])


class BenchmarkEngine(FlatReceiver, asyncsync.ModuleEngine):
    """An engine for every contender: it holds whatever layout it is told to."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        super().__init__(nn.Module())
        self.flat = torch.empty(0, dtype=torch.uint8)

    def hold(self, layout: Layout, *, staged: bool = True) -> None:
        """Become a new engine that serves a module of this layout."""
        super().__init__(layouts.make_module(layout), staged=staged)
        self.flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.forget_seed_buffer()


RemoteEngine = asyncsync.remote(num_cpus=0)(BenchmarkEngine)


def _other_nodes() -> list[str]:
    """The cluster's nodes without this process's own."""
    own = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["NodeID"] for node in nodes if node["Alive"] and node["NodeID"] != own]


class Fleet:
    """Engines, and, once it is formed, the group that seed loop and bare broadcast go through.

    Make it with :meth:`start`.

    Attributes:
        engines: The engines.
        lock: What the seed's loop locks.
    """

    def __init__(self, engines: Sequence[Any], lock: Any) -> None:
        self.engines = engines
        self.lock = lock
        self._group: Group | None = None

    @classmethod
    @asynccontextmanager
    async def start(cls, count: int, actor_class: Any = RemoteEngine) -> AsyncIterator[Self]:
        """Start ``count`` engines, and stop them in the end. On a cluster of several nodes they are on the others."""
        lock_class = ray.remote(num_cpus=0)(SeedLock)
        others = await asyncio.to_thread(_other_nodes)
        placed = [
            actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in others
        ] or [actor_class]
        wanted = itertools.islice(itertools.cycle(placed), count)
        async with running((lock_class, ()), *((each, ()) for each in wanted)) as (lock, *engines):
            yield cls(engines, lock)

    @property
    def group(self) -> Group:
        """The group, as its rank 0."""
        assert self._group is not None, "form_group() comes first"
        return self._group

    async def form_group(self) -> None:
        """Bring this process and the engines together in a new group."""
        address, size = cluster.node_address(), len(self.engines) + 1
        store = open_store(address)
        joins = [
            cluster.call(engine, "join_seed_group", address, store.port, rank, size)
            for rank, engine in enumerate(self.engines, start=1)
        ]
        forming = asyncio.to_thread(Group, address, store.port, 0, size, store=store)
        self._group, *_ = await asyncio.gather(forming, *joins)

    async def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every engine."""
        return await asyncio.gather(*(cluster.call(engine, method, *args, **kwargs) for engine in self.engines))
