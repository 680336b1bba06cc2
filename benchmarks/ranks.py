"""What an update from a sharded trainer costs, against gathering the weights and broadcasting them.

``python -m benchmarks.ranks`` shards weights over trainer ranks with FSDP2, each rank a Ray actor, and brings them to
engines that are Ray actors. In one run, in changing order, on the same weights:

* ``ours``: ``WeightSynchronizer.update_weights()`` with staged engines, digests and all;
* ``gather``: ``full_tensor()`` of every parameter, on all ranks, in order, as frameworks do it before they send;
* ``gloo``: one bare gloo broadcast of as many bytes to the same engines, into warm buffers.

Medians of several rounds, after two to warm up; after every update the engines must hold the trainer's bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import torch
from rich.console import Console
from rich.table import Table

import asyncsync
from asyncsync import cluster
from benchmarks import layouts
from benchmarks.contenders import WARM_UP, BareGloo, WrongBytesError, in_turn
from benchmarks.fleets import Fleet
from benchmarks.layouts import Layout
from benchmarks.running import on_a_private_cluster, write_rows

ROUNDS = 7
CASES = ("64 MB", "256 MB", "smollm2")


class Rank(asyncsync.TrainerRank):
    """A rank of a trainer that shards its weights with FSDP2."""

    def __init__(self, layout: Layout, rank: int, size: int, store: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        self.module = layouts.make_module(layout)
        fully_shard(self.module, mesh=init_device_mesh("cpu", (size,)))
        super().__init__(self.module)

    def change(self) -> None:
        """Change every weight."""
        layouts.change([parameter.to_local() for parameter in self._sharded()])

    def gather(self) -> str:
        """Collective. Gather every parameter, one after another; returns their digest."""
        return layouts.fingerprint(parameter.full_tensor() for parameter in self._sharded())

    def time_gather(self) -> float:
        """Collective. Seconds to gather every parameter."""
        torch.distributed.barrier()
        start = time.perf_counter()
        for parameter in self._sharded():
            parameter.full_tensor()
        torch.distributed.barrier()
        return time.perf_counter() - start

    def _sharded(self) -> list[Any]:
        return list(self.module.parameters())


RemoteRank = asyncsync.remote(num_cpus=0)(Rank)


async def every(ranks: Sequence[Any], method: str) -> list[Any]:
    """Call every rank."""
    return await asyncio.gather(*(cluster.call(rank, method) for rank in ranks))


async def measure(layout: Layout, fleet: Fleet, size: int, folder: Path) -> dict[str, Any]:
    """Measure one layout over so many ranks.

    Raises:
        WrongBytesError: An engine holds other bytes than the ranks.
    """
    store = str(folder / uuid.uuid4().hex)
    ranks = await asyncio.to_thread(lambda: [RemoteRank.remote(layout, rank, size, store) for rank in range(size)])
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    gloo = BareGloo(fleet, [flat])
    seconds: dict[str, list[float]] = {"ours": [], "gather": [], "gloo": []}
    await fleet.all("hold", layout)
    try:
        async with asyncsync.WeightSynchronizer(ranks, fleet.engines) as synchronizer:

            async def ours() -> float:
                start = time.perf_counter()
                await synchronizer.update_weights()
                took = time.perf_counter() - start
                expected, *_ = await every(ranks, "gather")
                if any(found != expected for found in await fleet.all("fingerprint")):
                    raise WrongBytesError("an engine holds other bytes than the ranks")
                return took

            async def gather() -> float:
                return float(max(await every(ranks, "time_gather")))

            contenders = {"ours": ours, "gather": gather, "gloo": gloo.run}
            for turn in range(WARM_UP + ROUNDS):
                for name in in_turn(contenders, turn):
                    await every(ranks, "change")
                    took = await contenders[name]()
                    if turn >= WARM_UP:
                        seconds[name].append(took)
    finally:
        await asyncio.gather(*(cluster.kill_actor(rank) for rank in ranks))
    medians = {f"{name}_s": round(statistics.median(took), 6) for name, took in seconds.items()}
    return {"case": layout.name, "bytes": layout.nbytes, "ranks": size, "engines": len(fleet.engines), **medians}


async def measure_all(cases: Sequence[str], size: int, engines: int, say: Console) -> list[dict[str, Any]]:
    """Measure every case."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet.start(engines) as fleet:
            await fleet.form_group()
            for case in cases:
                say.print(f"{case}, {size} ranks, {engines} engines ...")
                rows.append(await measure(layouts.all_layouts()[case], fleet, size, Path(folder)))
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows, and what ours costs of the two others together."""
    table = Table(title="Update from FSDP2 ranks: medians in ms")
    for column in ("case", "MB", "ranks", "engines", "ours", "gather", "gloo", "ours / (gather + gloo)"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['bytes'] / 1e6:.4g}",
            str(row["ranks"]),
            str(row["engines"]),
            *(f"{row[f'{name}_s'] * 1e3:.4g}" for name in ("ours", "gather", "gloo")),
            f"{row['ours_s'] / (row['gather_s'] + row['gloo_s']):.2f}",
        )
    Console(width=110).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=tuple(layouts.all_layouts()), help="only this case")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="trainer ranks (2)")
    parser.add_argument("--engines", type=int, default=2, metavar="N", help="rollout engines (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    rows = on_a_private_cluster(
        lambda: measure_all(options.case or CASES, options.ranks, options.engines, say=Console(stderr=True))
    )
    show(rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
