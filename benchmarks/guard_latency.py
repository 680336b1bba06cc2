"""What the memory-saver guard costs a trainer that is not offloaded.

``python -m benchmarks.guard_latency`` enters and leaves, in turns, an async context manager that does nothing, and
``asyncsync.memory_saver_guard`` where it has nothing to do: told so (``offload=False``), and finding it out
(``offload=None``, in a process without the saver's library). Medians in microseconds of making, entering and leaving.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncsync import memory_saver_guard, memory_saver_status
from benchmarks.running import write_rows

ROUNDS, QUICK_ROUNDS = 20_000, 2_000
TARGET = 20.0
"""Microseconds, at the most."""


class Nothing:
    """An async context manager that does nothing."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


CASES: dict[str, Callable[[], AbstractAsyncContextManager[object]]] = {
    "nothing": Nothing,
    "offload=False": lambda: memory_saver_guard(offload=False),
    "offload=None": memory_saver_guard,
}


async def measure(rounds: int) -> list[dict[str, Any]]:
    """All rows: each case once a round, in an order that changes."""
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    choices = random.Random(0)
    for _ in range(rounds):
        for case in choices.sample(list(CASES), len(CASES)):
            make = CASES[case]
            start = time.perf_counter()
            async with make():
                pass
            seconds[case].append(time.perf_counter() - start)
    return [
        {
            "case": case,
            "rounds": rounds,
            "median_us": round(statistics.median(took) * 1e6, 3),
            "p99_us": round(statistics.quantiles(took, n=100)[98] * 1e6, 3),
        }
        for case, took in seconds.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows."""
    for row in rows:
        missed = "" if row["median_us"] < TARGET else f", target {TARGET:g} MISSED"
        print(f"{row['case']}: median {row['median_us']:.2f} us, 99 % {row['p99_us']:.2f} us{missed}")
    print(memory_saver_status())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard_latency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    rows = asyncio.run(measure(QUICK_ROUNDS if options.quick else ROUNDS))
    show(rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
