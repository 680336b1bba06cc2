"""How long a client waits for a lock: polled every 0.1 s, or awaited.

``python -m benchmarks.lock_latency`` runs 1 to 16 clients, each taking the lock again and again, alone, for 5 ms. The
clients are tasks of this process, the same for every lock; the polled lock and the shared one are Ray actors.

* ``polled``: the usual lock actor, asked every 0.1 s until it says yes;
* ``awaited, shared``: :class:`asyncsync.SharedRolloutLock`, a lease from a Ray actor;
* ``awaited``: :class:`asyncsync.RolloutLock`, in one process.

Measured is the time from asking to having. With n clients a fair wait is the turns of the n - 1 others. A
polled lock's low median is one client taking it again and again; the others are in its maximum.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

from rich.console import Console
from rich.table import Table

from asyncsync import cluster
from asyncsync.lock import RolloutLock
from asyncsync.shared_lock import SharedRolloutLock
from benchmarks.running import on_a_private_cluster, write_rows

CLIENTS = (1, 2, 4, 8, 16)
HOLD = 0.005  # seconds
POLL = 0.1  # seconds
TIMEOUT = 120.0  # seconds: no client waits longer, whatever the lock

Enter = Callable[[], AbstractAsyncContextManager[object]]


class PolledLock:
    """The baseline: a lock that can only be asked."""

    def __init__(self) -> None:
        self.taken = False

    async def try_acquire(self) -> bool:
        """Take the lock if it is free."""
        if self.taken:
            return False
        self.taken = True
        return True

    async def release(self) -> None:
        """Free the lock."""
        self.taken = False


@asynccontextmanager
async def polled(server: Any) -> AsyncIterator[None]:
    """Ask every 0.1 s."""
    while not await cluster.call(server, "try_acquire"):  # noqa: ASYNC110 - the fault that is measured
        await asyncio.sleep(POLL)
    try:
        yield
    finally:
        await cluster.call(server, "release")


async def client(enter: Enter, rounds: int) -> list[float]:
    """Take the lock ``rounds`` times; the waits, in seconds."""
    waits = []
    for _ in range(rounds):
        asked = time.perf_counter()
        async with enter():
            waits.append(time.perf_counter() - asked)
            await asyncio.sleep(HOLD)
    return waits


async def measure(name: str, enter: Enter, clients: int, rounds: int) -> dict[str, Any]:
    """One row: the waits of ``clients`` clients of ``rounds`` turns each."""
    await client(enter, 2)  # warm
    async with asyncio.timeout(TIMEOUT):
        parts = await asyncio.gather(*(client(enter, rounds) for _ in range(clients)))
    waits = sorted(wait * 1_000 for part in parts for wait in part)
    return {
        "lock": name,
        "clients": clients,
        "median_ms": round(statistics.median(waits), 3),
        "p99_ms": round(waits[int(0.99 * (len(waits) - 1))], 3),
        "max_ms": round(waits[-1], 3),
    }


async def run(rounds: int) -> list[dict[str, Any]]:
    """All rows, lock by lock."""
    server = await cluster.start_actor(PolledLock)
    shared = await SharedRolloutLock.create()
    local = RolloutLock()
    locks: dict[str, Enter] = {
        "polled": lambda: polled(server),
        "awaited, shared": shared.writer,
        "awaited": local.writer,
    }
    rows = [await measure(name, enter, clients, rounds) for name, enter in locks.items() for clients in CLIENTS]
    await shared.aclose()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows, and how many times longer the unluckiest polling client waited."""
    polled_max = {row["clients"]: row["max_ms"] for row in rows if row["lock"] == "polled"}
    table = Table(title=f"Wait for the lock, held {HOLD * 1_000:g} ms each time")
    table.add_column("lock")
    for column in ("clients", "median ms", "p99 ms", "max ms", "polled max / max"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = polled_max[row["clients"]] / row["max_ms"]
        cells = [f"{row[key]:.2f}" for key in ("median_ms", "p99_ms", "max_ms")]
        table.add_row(row["lock"], str(row["clients"]), *cells, f"{ratio:.1f}")
    Console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lock_latency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 turns a client instead of 50")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    rows = on_a_private_cluster(lambda: run(10 if options.quick else 50))
    show(rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
