"""What an update holds up: rollouts, the trainer, and the event loop it is awaited in.

``python -m benchmarks.overlap`` keeps everyone busy: two engines (Ray actors) run small forward passes all the time,
and a thread of this process takes one optimizer step after another. Now and then the weights are brought to the
engines, in four modes, one after the other in an order that changes:

* *staged* engines, or engines that are overwritten *in place*;
* ``update_weights()``, for which the trainer stands still until it is over, or ``start_update()``, for which it does
  until the weights are copied. A library without ``start_update()`` is measured without it, and that is said.

Each round: rollouts per second of both engines in the half second before, from the start to the end of the update, and
in the half second after; how long generation was paused, by the engines' clocks if they tell; how long the trainer
stood still, and, while it does, how long one copy of as many bytes takes. Medians, after two rounds to warm up. The
longest that a 1 ms ticker in this process's event loop came late is measured in rounds of its own. After each update
the engines must hold the bytes that the trainer had when it began to stand still.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import threading
import time
from bisect import bisect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

import asyncsync
from asyncsync import cluster
from asyncsync.demo.actors import running
from asyncsync.demo.measures import StallMeter
from benchmarks import layouts
from benchmarks.contenders import WARM_UP, WrongBytesError, in_turn
from benchmarks.layouts import Layout
from benchmarks.running import machine, on_a_private_cluster, stalls_of_the_loop, write_rows

CASE, QUICK_CASE = "smollm2", "16 MB"
ROUNDS, QUICK_ROUNDS = 9, 3
STALL_ROUNDS = 3
ENGINES = 2
WINDOW = 0.5
"""Seconds before and after an update in which rollouts are counted."""

MATRICES = 16
"""How many matrices a forward pass goes through."""

LARGEST = 4 * layouts.MB
"""Bytes that one of them may have."""

CALLS = ("update_weights", "start_update")
TARGETS = {
    "pause / update": 0.05,
    "rollouts during / before": 0.7,
    "trainer stall / memcpy": 1.4,
    "loop stall, ms": 10.0,
}
"""What staged engines are to reach; the trainer's stall is ``start_update()``'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured in one mode: medians; rollouts a second, of both engines; the longest stall of the loop."""

    mode: str
    rollouts_before: float
    rollouts_during: float
    rollouts_after: float
    update_ms: float
    pause_ms: float
    trainer_stall_ms: float
    memcpy_ms: float
    stall_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One update: seconds; rollouts a second; the loop's longest stall in milliseconds, if it was watched."""

    before: float
    during: float
    after: float
    update: float
    paused: float
    trainer_stall: float
    memcpy: float
    stall_ms: float


class RollingEngine(asyncsync.ModuleEngine):
    """An engine that does forward passes, one after another, and knows when each was done."""

    def __init__(self, layout: Layout, staged: bool) -> None:
        torch.set_num_threads(1)
        super().__init__(layouts.make_module(layout), staged=staged)
        self._rolling = False
        self._done: list[float] = []

    async def roll(self) -> None:
        """Generate until told to stop."""
        self._rolling, self._done = True, []
        while self._rolling:
            async with self.generating():
                self._forward()
            self._done.append(time.perf_counter())  # which all processes of a machine share
            await asyncio.sleep(0)

    def _forward(self) -> None:
        small = [each for each in self.module.parameters() if each.dim() == 2 and each.nbytes <= LARGEST]
        for weight in small[:MATRICES]:
            linear(torch.ones(4, weight.shape[1], dtype=weight.dtype), weight)

    async def stop(self) -> list[float]:
        """Stop, and tell when each forward pass was done."""
        self._rolling = False
        return self._done

    async def fingerprint(self) -> str:
        """Of the weights it holds."""
        return layouts.fingerprint(self.module.parameters())


RemoteRollingEngine: Any = asyncsync.remote(num_cpus=0)(RollingEngine)


class Training:
    """Optimizer steps, one after another, on a thread.

    Args:
        layout: Of the weights.

    Attributes:
        weights: What is trained.
        steps: How many steps were taken.
    """

    def __init__(self, layout: Layout) -> None:
        self.weights = layouts.make_weights(layout)
        self.steps = 0
        for tensor in self.weights.values():
            tensor.grad = torch.ones_like(tensor)
        self._optimizer = torch.optim.SGD(list(self.weights.values()), lr=1e-2)
        self._turn = threading.Lock()
        self._over = False

    def run(self) -> None:
        """Train until it is ended. Blocks."""
        while not self._over:
            with self._turn:
                self._optimizer.step()
                self.steps += 1
            time.sleep(0)  # noqa: TID251 - gives whoever waits for the lock a chance

    def end(self) -> None:
        """Have :meth:`run` return."""
        self._over = True

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """Wait for the step that runs, and hold the next one off."""
        await asyncio.to_thread(self._turn.acquire)
        try:
            yield
        finally:
            self._turn.release()

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Train while the context is entered."""
        thread = threading.Thread(target=self.run, name="training")
        thread.start()
        try:
            yield
        finally:
            self.end()
            await asyncio.to_thread(thread.join)


class Bench:
    """A trainer that trains, and engines to bring its weights to.

    Args:
        training: The trainer.
        engines: By how they take weights.
        synchronizers: Likewise.
    """

    def __init__(
        self,
        training: Training,
        engines: Mapping[str, Sequence[Any]],
        synchronizers: Mapping[str, asyncsync.WeightSynchronizer],
    ) -> None:
        self._training = training
        self._engines = engines
        self._synchronizers = synchronizers
        self._source = torch.zeros(sum(tensor.nbytes for tensor in training.weights.values()), dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)

    async def update(self, kind: str, call: str, *, watch: bool = False) -> Round:
        """Bring the weights to engines that roll all the while.

        Args:
            kind: Which engines.
            call: Which method of the synchronizer.
            watch: Whether to watch this event loop meanwhile.

        Raises:
            WrongBytesError: An engine holds other bytes than the trainer had.
        """
        engines, synchronizer = self._engines[kind], self._synchronizers[kind]
        gc.collect()
        rolling = [asyncio.ensure_future(cluster.call(engine, "roll")) for engine in engines]
        await asyncio.sleep(2 * WINDOW)
        meter = StallMeter()
        async with AsyncExitStack() as watching:
            async with self._training.standing_still():
                copying = time.perf_counter()
                await asyncio.to_thread(self._target.copy_, self._source)
                copied = time.perf_counter()
                expected = await asyncio.to_thread(layouts.fingerprint, self._training.weights.values())
                if watch:
                    meter = await watching.enter_async_context(stalls_of_the_loop())
                start = time.perf_counter()
                handle = await getattr(synchronizer, call)()
                still = time.perf_counter() - start
            update: asyncsync.WeightUpdate = await handle if call == "start_update" else handle
            end = time.perf_counter()
        await asyncio.sleep(WINDOW)
        done = await asyncio.gather(*(cluster.call(engine, "stop") for engine in engines))
        await asyncio.gather(*rolling)
        for engine in engines:
            if await cluster.call(engine, "fingerprint") != expected:
                raise WrongBytesError(f"{kind}, {call}: an engine holds other bytes than the trainer had")
        return Round(
            before=rate(done, copying - WINDOW, copying),
            during=rate(done, start, end),
            after=rate(done, end, end + WINDOW),
            update=end - start,
            paused=pause_of(update),
            trainer_stall=still,
            memcpy=copied - copying,
            stall_ms=meter.longest_ms,
        )


def pause_of(update: asyncsync.WeightUpdate) -> float:
    """Seconds in which an engine generated nothing, by its own clock; where it does not tell, by the conductor's."""
    told = [outcome.paused for outcome in update.outcomes]
    return max((each for each in told if each is not None), default=update.seconds["paused"])


def rate(done: Sequence[Sequence[float]], start: float, end: float) -> float:
    """Rollouts a second between two moments, of all engines, from when each was done."""
    return sum(bisect(moments, end) - bisect(moments, start) for moments in done) / (end - start)


async def measure(layout: Layout, *, rounds: int) -> list[Row]:
    """Measure every mode.

    Raises:
        WrongBytesError: An engine holds other bytes than the trainer had.
    """
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not to be looked through again at every collection
    calls = [call for call in CALLS if hasattr(asyncsync.WeightSynchronizer, call)]
    kinds = {"staged": True, "in place": False}
    training = Training(layout)
    async with AsyncExitStack() as stack:
        engines, synchronizers = {}, {}
        for kind, staged in kinds.items():
            wanted = [(RemoteRollingEngine, (layout, staged))] * ENGINES
            engines[kind] = await stack.enter_async_context(running(*wanted))
            synchronizer = asyncsync.WeightSynchronizer(training.weights, engines[kind])
            synchronizers[kind] = await stack.enter_async_context(synchronizer)
        await stack.enter_async_context(training.going_on())
        bench = Bench(training, engines, synchronizers)
        modes = {f"{kind}, {call}": (kind, call) for kind in kinds for call in calls}
        found: dict[str, list[Round]] = {mode: [] for mode in modes}
        for turn in range(WARM_UP + rounds):
            for mode in in_turn(modes, turn):
                update = await bench.update(*modes[mode])
                if turn >= WARM_UP:
                    found[mode].append(update)
        stalls = dict.fromkeys(modes, 0.0)
        for turn in range(STALL_ROUNDS):
            for mode in in_turn(modes, turn):
                watched = await bench.update(*modes[mode], watch=True)
                stalls[mode] = max(stalls[mode], watched.stall_ms)
    return [row_of(mode, updates, stalls[mode]) for mode, updates in found.items()]


def row_of(mode: str, updates: Sequence[Round], stall_ms: float) -> Row:
    """The medians of a mode."""

    def median(name: str, scale: float = 1.0) -> float:
        values: list[float] = [getattr(update, name) for update in updates]
        return round(statistics.median(values) * scale, 3)

    return Row(
        mode=mode,
        rollouts_before=median("before"),
        rollouts_during=median("during"),
        rollouts_after=median("after"),
        update_ms=median("update", 1e3),
        pause_ms=median("paused", 1e3),
        trainer_stall_ms=median("trainer_stall", 1e3),
        memcpy_ms=median("memcpy", 1e3),
        stall_ms=round(stall_ms, 2),
    )


def show(layout: str, rows: Sequence[Row]) -> None:
    """Print the rows, and what staged engines have reached."""
    console = Console(width=130)
    table = Table(title=f"{layout}: two engines that roll and a trainer that trains, on the same machine")
    table.add_column("mode", no_wrap=True)
    rollouts_columns = ("rollouts/s before", "during", "after", "during / before")
    for column in (*rollouts_columns, "update, ms", "paused", "trainer still", "memcpy", "loop stall"):
        table.add_column(column, justify="right")
    for row in rows:
        rollouts = (row.rollouts_before, row.rollouts_during, row.rollouts_after)
        times = (row.update_ms, row.pause_ms, row.trainer_stall_ms, row.memcpy_ms, row.stall_ms)
        table.add_row(
            row.mode,
            *(f"{figure:.4g}" for figure in rollouts),
            f"{row.rollouts_during / row.rollouts_before:.2f}" if row.rollouts_before else "",
            *(f"{figure:.3g}" for figure in times),
        )
    console.print(table)
    for row in rows:
        for what, figure in reached(row).items():
            missed = figure < TARGETS[what] if what.startswith("rollouts") else figure > TARGETS[what]
            text = f"{row.mode}: {what} {figure:.3g}, target {TARGETS[what]:g}{' MISSED' if missed else ''}"
            console.print(text, highlight=False)
    if not hasattr(asyncsync.WeightSynchronizer, "start_update"):
        console.print("not measured: start_update(), which this version of the library does not have", highlight=False)
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(f"{machine()}; load average {loads}", highlight=False)


def reached(row: Row) -> dict[str, float]:
    """What a mode is to reach, as it is; nothing for engines that are overwritten in place."""
    if not row.mode.startswith("staged"):
        return {}
    figures = {"pause / update": row.pause_ms / row.update_ms, "loop stall, ms": row.stall_ms}
    if row.rollouts_before:
        figures["rollouts during / before"] = row.rollouts_during / row.rollouts_before
    if row.mode.endswith("start_update"):
        figures["trainer stall / memcpy"] = row.trainer_stall_ms / row.memcpy_ms
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"on {QUICK_CASE}, with fewer rounds: under a minute")
    parser.add_argument("--case", choices=tuple(layouts.all_layouts()), help=f"the layout ({CASE})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    case = options.case or (QUICK_CASE if options.quick else CASE)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    rows = on_a_private_cluster(lambda: measure(layouts.all_layouts()[case], rounds=rounds))
    show(case, rows)
    write_rows([asdict(row) for row in rows], options.json)


if __name__ == "__main__":
    main()
