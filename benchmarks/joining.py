"""How long engines are held back while another joins, against an ordinary update.

``python -m benchmarks.joining`` keeps three engines generating all the time, as Ray actors, each of which notes the
longest time that a generation of its own was held back. Round by round, on the same weights:

* ``update``: an ordinary update of the three;
* ``join``: a fourth engine is added, and gets the version from one of the three;
* ``first update``: the update after that, which connects the fourth;

then the fourth leaves. Medians of several rounds, after one to warm up; after each step every engine must hold the
trainer's bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import torch
from rich.console import Console
from rich.table import Table

import asyncsync
from asyncsync import cluster
from benchmarks import layouts
from benchmarks.contenders import WrongBytesError
from benchmarks.layouts import Layout
from benchmarks.running import on_a_private_cluster, write_rows

ROUNDS = 7
CASES = ("tiny", "64 MB", "smollm2")
STEPS = ("update", "join", "first update")
_PAUSE = 0.0005  # seconds between two generations


class Generating(asyncsync.ModuleEngine):
    """An engine that generates all the time, and notes how long it was held back."""

    def __init__(self, layout: Layout) -> None:
        torch.set_num_threads(1)
        super().__init__(layouts.make_module(layout))
        self._longest = 0.0

    async def generate_on(self) -> None:
        """Generate, one after another, for ever."""
        while True:
            start = time.perf_counter()
            async with self.generating():
                self._longest = max(self._longest, time.perf_counter() - start)
            await asyncio.sleep(_PAUSE)

    async def longest(self) -> float:
        """Seconds that a generation was held back at the most, since this was asked last."""
        longest, self._longest = self._longest, 0.0
        return longest

    async def fingerprint(self) -> str:
        """Of the weights it holds."""
        return layouts.fingerprint(self.module.parameters())


RemoteGenerating: Any = asyncsync.remote(num_cpus=0)(Generating)


async def measure(layout: Layout, rounds: int) -> list[dict[str, Any]]:
    """Measure one layout.

    Raises:
        WrongBytesError: An engine holds other bytes than the trainer.
    """
    weights = layouts.make_weights(layout)
    three = await asyncio.to_thread(lambda: [RemoteGenerating.remote(layout) for _ in range(3)])
    fourth = await asyncio.to_thread(RemoteGenerating.remote, layout)
    held: dict[str, list[float]] = {step: [] for step in STEPS}
    took: dict[str, list[float]] = {step: [] for step in STEPS}
    running = [engine.generate_on.remote() for engine in three]
    try:
        async with asyncsync.WeightSynchronizer(weights, three) as synchronizer:

            async def update() -> None:
                await asyncio.to_thread(layouts.change, weights.values())
                await synchronizer.update_weights()

            async def join() -> None:
                await synchronizer.add_engine(fourth)

            steps: dict[str, Callable[[], Awaitable[None]]] = {"update": update, "join": join, "first update": update}
            for turn in range(1 + rounds):
                for step, run in steps.items():
                    await _longest(three)
                    start = time.perf_counter()
                    await run()
                    seconds, longest = time.perf_counter() - start, await _longest(three)
                    if turn:
                        took[step].append(seconds)
                        held[step].append(longest)
                    expected = layouts.fingerprint(weights.values())
                    for engine in synchronizer.ready_engines:
                        if await engine.fingerprint.remote() != expected:
                            raise WrongBytesError(f"after {step} an engine holds other bytes than the trainer")
                await synchronizer.remove_engine(fourth)
    finally:
        await asyncio.gather(*(cluster.kill_actor(engine) for engine in (*three, fourth)))
        await asyncio.gather(*running, return_exceptions=True)
    return [
        {
            "case": layout.name,
            "step": step,
            "seconds": round(statistics.median(took[step]), 6),
            "held_ms": round(statistics.median(held[step]) * 1e3, 3),
            "most_held_ms": round(max(held[step]) * 1e3, 3),
        }
        for step in STEPS
    ]


async def _longest(engines: Sequence[Any]) -> float:
    return float(max(await asyncio.gather(*(engine.longest.remote() for engine in engines))))


async def measure_all(cases: Sequence[str], rounds: int, say: Console) -> list[dict[str, Any]]:
    """Measure every case."""
    torch.set_num_threads(1)
    rows = []
    for case in cases:
        say.print(f"{case} ...")
        rows += await measure(layouts.all_layouts()[case], rounds)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows."""
    table = Table(title="Three engines, and one that joins them: how long the three are held back")
    for column in ("case", "step", "takes, ms", "held back, ms", "at the most, ms"):
        table.add_column(column, justify="left" if column in ("case", "step") else "right")
    for row in rows:
        held = (f"{row[key]:.3g}" for key in ("held_ms", "most_held_ms"))
        table.add_row(row["case"], row["step"], f"{row['seconds'] * 1e3:.3g}", *held)
    Console(width=110).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.joining", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=tuple(layouts.all_layouts()), help="only this case")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds to measure ({ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    rows = on_a_private_cluster(lambda: measure_all(options.case or CASES, options.rounds, say=Console(stderr=True)))
    show(rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
