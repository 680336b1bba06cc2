"""How long a weight update takes, against the loop it replaces and against what the machine can do.

``python -m benchmarks.sync_latency`` brings the same weights from this process to Ray actors, in turns:

* ``ours``: ``WeightSynchronizer.update_weights()`` with staged engines, digests and all, through shared memory;
* ``broadcast``: the same with ``transport="broadcast"``, as engines on other nodes have it;
* ``put``: one ``ray.put`` of the same bytes as one array, which every actor copies into a warm buffer, unchecked;
* ``seed``: the loop that RL frameworks ship, see :mod:`benchmarks.seed_loop`;
* ``gloo``: one gloo broadcast of the same bytes to the same actors, from barrier to barrier, into warm buffers;
* ``memcpy``: one copy of the same bytes in this process, on one thread.

Each is the median of several rounds, after two to warm up. Weights change before every run, and after it the engines
must hold the trainer's bytes. A *stall* is the longest that a 1 ms ticker in this process's event loop came late, in
rounds of their own: the ticker takes time from whoever leaves the loop free, and none from whoever blocks it. ``ours``
and ``put`` have actors of their own: the seed's loop writes to its engines' weights, which would be pages of the shared
memory to copy. torch runs on one thread in every process. Garbage is collected before each run, since one full
collection of what torch and Ray bring along holds a process up for 150 ms, whoever's turn it is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import torch
from rich.console import Console
from rich.table import Table

import asyncsync
from benchmarks import layouts
from benchmarks.contenders import WARM_UP, BareGloo, Contender, Memcpy, Ours, Put, Seed, in_turn, once, stall_of
from benchmarks.fleets import Fleet
from benchmarks.layouts import Layout
from benchmarks.running import machine, memory_available, on_a_private_cluster, write_rows
from benchmarks.seed_loop import BUCKET_SIZE

STALL_ROUNDS = 3
MEMORY_RESERVE = 2 * layouts.GB
OBJECT_STORE_MEMORY = 3 * layouts.GB // 2
"""Bytes: an object that does not fit is put on the disk, and would be slow through no fault of its own."""

QUICK: Sequence[tuple[int, Sequence[str]]] = ((2, ("tiny", "2000x4KB", "16 MB", "smollm2")),)
FULL: Sequence[tuple[int, Sequence[str]]] = (
    (2, tuple(layouts.all_layouts())),
    (1, ("tiny", "16 MB", "smollm2", "1 GB")),
    (4, ("tiny", "16 MB", "smollm2", "1 GB")),
)
"""Which layouts to measure with how many engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one layout and number of engines: medians in seconds, longest stalls in milliseconds."""

    case: str
    bytes: int
    tensors: int
    engines: int
    ours_s: float
    broadcast_s: float
    put_s: float
    seed_s: float
    gloo_s: float
    memcpy_s: float
    ours_stall_ms: float
    seed_stall_ms: float


# -- measuring --------------------------------------------------------------------------------------------------------


async def measure(layout: Layout, near: Fleet, fleet: Fleet, *, rounds: int) -> Row:
    """Measure one layout: every contender once a round.

    Args:
        layout: What to send.
        near: Engines to send it to through shared memory and the object store.
        fleet: Engines to send it to through a group, which they have formed.
        rounds: How many rounds count, after two that do not.

    Raises:
        WrongBytesError: A contender left an engine with other bytes than it sent.
    """
    weights = layouts.make_weights(layout)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    await asyncio.gather(fleet.all("hold", layout), near.all("hold", layout))
    async with (
        asyncsync.WeightSynchronizer(weights, near.engines, transport="shared") as shared,
        asyncsync.WeightSynchronizer(weights, fleet.engines, transport="broadcast") as broadcast,
    ):
        contenders: dict[str, Contender] = {
            "ours": Ours(near, weights, shared),
            "broadcast": Ours(fleet, weights, broadcast),
            "put": Put(near, [flat]),
            "seed": Seed(fleet, weights),
            "gloo": BareGloo(fleet, [flat]),
            "memcpy": Memcpy([flat]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(WARM_UP + rounds):
            for name in in_turn(contenders, turn):
                took = await once(contenders[name])
                if turn >= WARM_UP:
                    seconds[name].append(took)
        stalls = {"ours": 0.0, "seed": 0.0}
        for _ in range(STALL_ROUNDS):
            for name, longest in stalls.items():
                stalls[name] = max(longest, await stall_of(contenders[name]))
    return Row(
        case=layout.name,
        bytes=layout.nbytes,
        tensors=len(layout.shapes),
        engines=len(fleet.engines),
        **{f"{name}_s": round(statistics.median(took), 6) for name, took in seconds.items()},
        ours_stall_ms=round(stalls["ours"], 2),
        seed_stall_ms=round(stalls["seed"], 2),
    )


async def measure_all(plan: Sequence[tuple[int, Sequence[str]]], *, quick: bool, say: Console) -> list[Row]:
    """Measure every case of the plan; those that the machine has no memory for are left out, and said so."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not to be looked through again at every collection
    known = layouts.all_layouts()
    rows = []
    for engines, names in plan:
        async with Fleet.start(engines) as near, Fleet.start(engines) as fleet:
            await fleet.form_group()
            for name in names:
                layout = known[name]
                wanted, free = memory_wanted(layout, engines), memory_available()
                if wanted > free:
                    what = f"{wanted / layouts.GB:.0f} GiB wanted, {free / layouts.GB:.0f} free"
                    say.print(f"{name}, {engines} engines: left out, {what}")
                    continue
                say.print(f"{name}, {engines} engines ...")
                rows.append(await measure(layout, near, fleet, rounds=rounds(layout, quick=quick)))
    return rows


def rounds(layout: Layout, *, quick: bool) -> int:
    """How many rounds count: more where one takes milliseconds."""
    few = 5 if quick else 9
    return 3 * few if layout.nbytes <= 64 * layouts.MB and len(layout.shapes) < 100 else few


def memory_wanted(layout: Layout, engines: int) -> int:
    """Bytes a case needs: weights, flat, copied, two shared sets and an object here; two sets and two flat there."""
    return (6 + 4 * engines) * layout.nbytes + engines * min(layout.nbytes, BUCKET_SIZE) + MEMORY_RESERVE


# -- showing ----------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    """Print the rows, with ratios, and the machine."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(title="Weight update: medians in ms; longest loop stall in ms")
    table.add_column("case")
    columns = ["MB", "tensors", "engines", "ours", "broadcast", "put", "seed", "gloo", "memcpy"]
    columns += ["seed/ours", "put/ours", "ours/memcpy"]
    for column in (*columns, "ours stall", "seed stall"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.bytes / 1e6:.4g}",
            str(row.tensors),
            str(row.engines),
            *(
                f"{seconds * 1e3:.4g}"
                for seconds in (row.ours_s, row.broadcast_s, row.put_s, row.seed_s, row.gloo_s, row.memcpy_s)
            ),
            f"{row.seed_s / row.ours_s:.2f}",
            f"{row.put_s / row.ours_s:.2f}",
            f"{row.ours_s / row.memcpy_s:.2f}",
            f"{row.ours_stall_ms:.1f}",
            f"{row.seed_stall_ms:.1f}",
        )
    console.print(table)
    console.print(machine(), highlight=False)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync_latency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="four cases, two engines, fewer rounds: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument(
        "--case", action="append", choices=tuple(layouts.all_layouts()), help="only this case (may be repeated)"
    )
    parser.add_argument("--engines", action="append", type=int, metavar="N", help="only with so many engines")
    options = parser.parse_args()
    plan = [
        (engines, chosen)
        for engines, names in (QUICK if options.quick else FULL)
        if (not options.engines or engines in options.engines)
        and (chosen := [name for name in names if not options.case or name in options.case])
    ]
    rows = on_a_private_cluster(
        lambda: measure_all(plan, quick=options.quick, say=Console(stderr=True)),
        object_store_memory=OBJECT_STORE_MEMORY,
    )
    show(rows)
    write_rows([asdict(row) for row in rows], options.json)


if __name__ == "__main__":
    main()
