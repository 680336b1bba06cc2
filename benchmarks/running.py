"""What every benchmark does around its measuring: a private cluster, a watch on the event loop, and rows to a file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.cluster_utils import Cluster

from asyncsync.demo.measures import TICK, StallMeter
from benchmarks import layouts

T = TypeVar("T")


def on_a_private_cluster(
    work: Callable[[], Coroutine[Any, Any, T]], *, object_store_memory: int = 100 * layouts.MB, nodes: int = 1
) -> T:
    """Run a coroutine on a cluster of this machine alone, which ends with it.

    Args:
        work: Makes the coroutine.
        object_store_memory: Bytes of each node's object store.
        nodes: How many Ray nodes there are. This process is on the first.
    """
    several: Any = Cluster() if nodes > 1 else None
    node = {"num_cpus": 2, "object_store_memory": object_store_memory, "include_dashboard": False}
    try:
        for _ in range(nodes if several else 0):
            several.add_node(**node)
        where = {"address": several.address} if several else node
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
        return asyncio.run(work())
    finally:
        ray.shutdown()
        if several:
            several.shutdown()


def write_rows(rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Write the rows to a file, if one is wanted."""
    if file is not None:
        file.write_text(json.dumps(rows, indent=2) + "\n")


@asynccontextmanager
async def stalls_of_the_loop() -> AsyncIterator[StallMeter]:
    """Watch this loop while the context is entered."""
    meter = StallMeter()
    watching = asyncio.create_task(meter.watch())
    await asyncio.sleep(5 * TICK)
    meter.longest_ms = 0.0
    yield meter
    await asyncio.sleep(2 * TICK)  # a loop that was blocked to the end is seen by the tick after it
    watching.cancel()
    await asyncio.wait([watching])


def memory_available() -> int:
    """Bytes that this machine can still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, value, *_ = line.split()
        if key == "MemAvailable:":
            return int(value) * layouts.KB
    raise RuntimeError("this machine does not tell how much memory it has left")


def machine() -> str:
    """This machine and what runs on it, in one line."""
    return (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, ray {ray.__version__}"
    )
