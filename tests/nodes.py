"""A Ray cluster of several nodes on this machine, and what is seen on it: ``python -m tests.nodes SEEN.json``.

A process belongs to one Ray cluster, and pytest's to that of all other tests: so ``test_nodes`` runs this in a process
of its own, and judges what it has seen. Each node has a loopback address of its own, so that a wrong one shows. An
actor is placed by a resource of its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import ActorUnavailableError
from torch import nn

from asyncsync import WeightSynchronizer, WeightUpdateError
from tests.actors import Engine
from tests.sample import contents
from tests.sharded import Mixed, RemoteShardedTrainer, become, every

NODES = {
    "127.0.0.2": ("rank 0",),  # and the driver
    "127.0.0.3": ("rank 1", "engine 0"),
    "127.0.0.4": ("engine 1",),
}
SPARE = "127.0.0.5"
"""Takes the place of the node that dies."""

# The "nodes" are one machine's, where memory can be passed from one to the other: so it is asked for a broadcast.
TIMEOUT = 60.0  # seconds an update may take: a hang is seen as a WeightUpdateTimeoutError

Sockets = set[tuple[str, int]]


@contextmanager
def started() -> Iterator[tuple[Any, Actors]]:
    """The cluster, with this process as a driver on its first node."""
    nodes: Any = Cluster()
    try:
        first, *others = NODES.items()
        # A node that refuses connections is given up after half a second, not 15; a slow one as late as ever.
        add_node(
            nodes,
            *first,
            include_dashboard=False,
            no_monitor=True,
            include_log_monitor=False,
            _system_config={"health_check_period_ms": 100},
        )
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        actors = Actors()  # each starts when its node comes
        for node in others:
            add_node(nodes, *node)
        yield nodes, actors
    finally:
        ray.shutdown()
        nodes.shutdown()


def add_node(nodes: Any, address: str, names: tuple[str, ...], **options: Any) -> None:
    """Add a node with room for these actors."""
    nodes.add_node(wait=False, node_ip_address=address, resources=dict.fromkeys(names, 1), **options)


class Actors:
    """A trainer of two ranks, and two engines."""

    def __init__(self) -> None:
        self.ranks = [placed(RemoteShardedTrainer, f"rank {rank}").remote(rank) for rank in range(2)]
        self.engines = [placed(Engine, f"engine {index}").remote(partial(Mixed, 7 + index)) for index in range(2)]

    async def each(self, method: str) -> dict[str, Any]:
        """Call every actor; answers by the actors' names."""
        answers = await every([*self.ranks, *self.engines], method)
        return dict(zip(("rank 0", "rank 1", "engine 0", "engine 1"), answers, strict=True))

    async def nodes(self) -> dict[str, str]:
        """On which node each actor is, by its address."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
        return {name: addresses[node] for name, node in (await self.each("node")).items()}


def placed(actor_class: Any, name: str) -> Any:
    return actor_class.options(resources={name: 1})


async def some_updates(actors: Actors, kind: str, size: int, folder: Path) -> dict[str, Any]:
    """Updates from a trainer of so many ranks, and the sockets they go through."""
    ranks, engines = actors.ranks[:size], actors.engines
    await become(ranks, kind, folder, seed=size)
    pids = await actors.each("pid")
    before = {name: listening(pid) for name, pid in pids.items()}
    updates = []
    async with WeightSynchronizer(
        ranks, engines, bucket_size=256, timeout=TIMEOUT, transport="broadcast"
    ) as synchronizer:
        for _ in range(3):
            await every(ranks, "step")
            await synchronizer.update_weights()
            whole, *_ = await every(ranks, "whole")
            updates.append({"sent": digest(whole), "held": await held(engines)})
        opened = {name: listening(pid) - before[name] for name, pid in pids.items()}
        reached = {name: connected_to(pid) for name, pid in pids.items()}
    return {
        "updates": updates,
        "listening": {name: addresses_of(sockets) for name, sockets in opened.items()},
        "connections": sorted(sorted((one, other)) for one in pids for other in pids if reached[one] & opened[other]),
        "left": {name: addresses_of(listening(pid) - before[name]) for name, pid in pids.items()},
    }


async def a_node_that_dies(nodes: Any, actors: Actors) -> dict[str, Any]:
    """An engine's node dies in the middle of an update; Ray starts the engine again on another."""
    trainer, sending, loop = Mixed(9), asyncio.Event(), asyncio.get_running_loop()

    def weights() -> nn.Module:
        loop.call_soon_threadsafe(sending.set)
        return trainer

    seen: dict[str, Any] = {}
    engine = actors.engines[1]
    node = next(node for node in nodes.worker_nodes if "engine 1" in NODES[node.node_ip_address])
    process = psutil.Process(await engine.pid.remote())
    before = listening(os.getpid())
    async with WeightSynchronizer(weights, actors.engines, timeout=TIMEOUT, transport="broadcast") as synchronizer:
        await synchronizer.update_weights()
        seen["driver listening"] = addresses_of(listening(os.getpid()) - before)
        seen["whole"] = {"version": synchronizer.weight_version, "sent": digest(contents(trainer))}
        seen["whole"]["held"] = await held(actors.engines)

        with torch.no_grad():
            trainer.big.mul_(-2)
        sending.clear()
        process.suspend()  # this update cannot end before the node does
        update = asyncio.create_task(synchronizer.update_weights())
        await sending.wait()
        nodes.remove_node(node, allow_graceful=False)
        process.kill()  # an actor outlives its raylet for a while; a machine that dies leaves nothing
        try:
            await update
        except WeightUpdateError as error:
            states = [outcome.state for outcome in error.outcomes]
            seen["error"] = {"type": type(error).__name__, "text": str(error), "phase": error.phase, "states": states}
        version, _ = await actors.engines[0].read.remote()
        seen["survivor"] = {"version": version, "held": await held(actors.engines[:1])}

        add_node(nodes, SPARE, ("engine 1",))
        before = listening(await running_again(engine))
        await synchronizer.connect()
        seen["caught up"] = await held([engine])
        await synchronizer.update_weights()
        seen["repaired"] = {"sent": digest(contents(trainer)), "held": await held(actors.engines)}
        seen["moved to"] = (await actors.nodes())["engine 1"]
        seen["moved engine listening"] = addresses_of(listening(await engine.pid.remote()) - before)
    return seen


async def running_again(actor: Any) -> int:
    """Wait until Ray has restarted an actor, and ask for its process."""
    while True:
        try:
            return int(await actor.pid.remote())
        except ActorUnavailableError:
            await asyncio.sleep(0.05)


async def held(engines: list[Any]) -> list[str]:
    return [digest(await engine.contents.remote()) for engine in engines]


def digest(tensors: Mapping[str, bytes]) -> str:
    hasher = hashlib.sha256()
    for name, content in sorted(tensors.items()):
        hasher.update(f"{name} {len(content)} ".encode() + content)
    return hasher.hexdigest()


def listening(pid: int) -> Sockets:
    """Where a process listens."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return {tuple(each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN}


def connected_to(pid: int) -> Sockets:
    """What a process is connected to."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return {tuple(each.raddr) for each in sockets if each.status == psutil.CONN_ESTABLISHED}


def addresses_of(sockets: Sockets) -> list[str]:
    return sorted({address for address, _ in sockets})


async def look(nodes: Any, actors: Actors, folder: Path) -> dict[str, Any]:
    return {
        "nodes": await actors.nodes(),
        "one rank": await some_updates(actors, "replicated", 1, folder),
        "two ranks": await some_updates(actors, "fsdp", 2, folder),
        "a node that dies": await a_node_that_dies(nodes, actors),
    }


def main() -> None:
    with started() as (nodes, actors), tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(look(nodes, actors, Path(folder)))
    Path(sys.argv[1]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
