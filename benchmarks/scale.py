"""How the control plane's cost grows with engines and sources, and that of planning with tensors.

``python -m benchmarks.scale`` runs ``WeightSynchronizer.update_weights()`` over engines and sources that are simulated
(:mod:`benchmarks.simulated`): every call is a coroutine in this process and checks what it is told, and no bytes move.
What is left is the library's own work, and the event loop's. A call to a Ray actor costs its process more, beside that.

* ``in step``, ``least``: an update like most, median of several (``control_ms``), and the least;
* ``first``: the first one, which connects; one source after another;
* ``joined``, ``left``: the one after an engine has joined (that is a group more) or left (all connect anew);
* ``stall``: the longest that a 1 ms ticker in the event loop came late during updates in step;
* ``bare``: as many rounds of calls to the same engines through ``asyncio.gather``.

Planning is measured on names and shapes of a large mixture of experts, each tensor with memory of its own (and only
one element of it): at the trainer, at an engine, joined from eight sources, and for a trainer of eight FSDP ranks.
``read`` is what goes before it at the trainer: to find the module's tensors, and compare them with those of the last
update; ``engine again`` is the same at an engine. Seconds are the least of several: whatever else runs on the machine
makes them longer, never shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import asyncsync
from asyncsync.buckets import DEFAULT_BUCKET_SIZE, TensorSpec, replan
from asyncsync.engines.binding import bind
from asyncsync.messages import Layout
from asyncsync.shards import Block, Holding, ShardPlan
from asyncsync.weights import WeightSource
from benchmarks import layouts
from benchmarks.running import stalls_of_the_loop, write_rows
from benchmarks.simulated import SharedPlan, SimulatedEngine, SimulatedTrainer

ENGINES, SOURCES, TENSORS = (1, 32, 256, 1024), (1, 8, 64), (1_000, 10_000, 100_000)
QUICK_ENGINES, QUICK_SOURCES, QUICK_TENSORS = (1, 32), (1, 2), (500, 1_000)
STAGES, SHARDS = 8, 8
CONTROL_TARGET_MS, FIRST_TARGET_S, AGAIN_TARGET_S = 300, 2.0, 0.05


# -- the control plane ------------------------------------------------------------------------------------------------


async def milliseconds(work: Callable[[], Awaitable[object]]) -> float:
    """How long it takes, with nothing else to do."""
    gc.collect()
    start = time.perf_counter()
    await work()
    return (time.perf_counter() - start) * 1e3


async def measure_control(engines: int, sources: int, *, staged: bool, rounds: int) -> dict[str, Any]:
    """Measure updates over so many engines and sources."""
    plans = SharedPlan()
    fleet = [SimulatedEngine(plans, staged=staged) for _ in range(engines)]
    stages = [[SimulatedTrainer([TensorSpec(f"layers.{stage}", layouts.DTYPE, (64,))])] for stage in range(sources)]
    async with asyncsync.WeightSynchronizer(stages, fleet) as synchronizer:
        update = synchronizer.update_weights
        first = await milliseconds(update)
        in_step = [await milliseconds(update) for _ in range(rounds)]
        async with stalls_of_the_loop() as meter:
            for _ in range(rounds):
                await update()

        async def bare() -> None:
            for _ in range(2 if staged else 4):
                await asyncio.gather(*(engine.describe_engine() for engine in fleet))

        bares = [await milliseconds(bare) for _ in range(rounds)]
        fleet.append(SimulatedEngine(plans, staged=staged))
        await synchronizer.add_engine(fleet[-1])
        joined = await milliseconds(update)
        await synchronizer.remove_engine(fleet.pop(0))
        left = await milliseconds(update)
        assert {engine.weight_version for engine in fleet} == {synchronizer.weight_version}
    times = {"control": statistics.median(in_step), "least": min(in_step), "first": first, "joined": joined}
    times |= {"left": left, "stall": meter.longest_ms, "bare": statistics.median(bares)}
    return {"engines": engines, "sources": sources, "staged": staged} | {
        f"{name}_ms": round(took, 3) for name, took in times.items()
    }


# -- planning ---------------------------------------------------------------------------------------------------------


def experts(count: int) -> layouts.Layout:
    """So many tensors of a mixture of 256 experts a layer."""
    hidden, inner = 7168, 2048

    def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
        for index in itertools.count():
            layer = f"model.layers.{index}"
            yield f"{layer}.input_layernorm.weight", (hidden,)
            yield f"{layer}.self_attn.q_proj.weight", (2 * hidden, hidden)
            yield f"{layer}.self_attn.o_proj.weight", (hidden, 2 * hidden)
            yield f"{layer}.mlp.gate.weight", (256, hidden)
            for expert in range(256):
                yield f"{layer}.mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
                yield f"{layer}.mlp.experts.{expert}.up_proj.weight", (inner, hidden)
                yield f"{layer}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)

    return layouts.Layout(f"{count} tensors", dict(itertools.islice(shapes(), count)))


def shard(specs: Sequence[TensorSpec], rank: int) -> Holding:
    """What a rank holds of each tensor, by FSDP: some of its rows."""
    return tuple(
        Block((spec.shape[0] // SHARDS * rank, *(0,) * len(spec.shape[1:])), (spec.shape[0] // SHARDS, *spec.shape[1:]))
        for spec in specs
    )


def measure_planning(count: int, rounds: int) -> dict[str, Any]:
    """Measure reading and planning so many tensors."""
    layout, size = experts(count), DEFAULT_BUCKET_SIZE
    module = layouts.make_module(layouts.Layout("an element each", dict.fromkeys(layout.shapes, (1,))))
    gc.collect()
    gc.freeze()

    def least(work: Callable[[], object]) -> float:
        took = []
        for _ in range(rounds):
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)
        return min(took)

    small = WeightSource(module).read().specs
    binding = bind(module, Layout(parts=(small,), bucket_size=size, digest=replan(None, small, size).digest))
    assert binding.fits(module)
    seconds = {"engine_again": least(lambda: binding.fits(module))}
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.expand(layout.shapes[name])
    source = WeightSource(module)
    specs = source.read().specs
    plan = replan(None, specs, size)
    parts = tuple(specs[stage * count // STAGES : (stage + 1) * count // STAGES] for stage in range(STAGES))
    holdings, copy = [shard(specs, rank) for rank in range(SHARDS)], shard(specs, 0)

    def plan_at_an_engine(*parts: tuple[TensorSpec, ...]) -> str:
        return Layout(parts=parts, bucket_size=size, digest="").plan().digest

    seconds |= {
        "plan_first": least(lambda: replan(None, specs, size)),
        "plan_again": least(lambda: replan(plan, specs, size)),
        "read_first": least(lambda: WeightSource(module).read()),
        "read_again": least(source.read),
        "engine_first": least(lambda: plan_at_an_engine(specs)),
        "joined_first": least(lambda: plan_at_an_engine(*parts)),
        "shards_first": least(lambda: ShardPlan(plan, holdings).largest_gather),
        "shards_again": least(lambda: holdings[0] == copy),
    }
    gc.unfreeze()
    return {"tensors": count, "buckets": len(plan.buckets)} | {
        f"{name}_s": round(took, 6) for name, took in seconds.items()
    }


# -- showing ----------------------------------------------------------------------------------------------------------


def show(control: Sequence[dict[str, Any]], planning: Sequence[dict[str, Any]]) -> None:
    """Print the rows, and whether the targets are reached."""
    console = Console(width=110)
    columns = ("control_ms", "least_ms", "first_ms", "joined_ms", "left_ms", "stall_ms", "bare_ms")
    table = Table("engines", title="The control plane of an update: ms")
    for column in ("sources", "kept", "in step", "least", "first", "joined", "left", "stall", "bare"):
        table.add_column(column, justify="right")
    for row in control:
        kept = "staged" if row["staged"] else "in place"
        table.add_row(str(row["engines"]), str(row["sources"]), kept, *(f"{row[column]:.4g}" for column in columns))
    console.print(table)
    names = ["plan_first", "plan_again", "read_first", "read_again", "engine_first", "joined_first", "engine_again"]
    names += ["shards_first", "shards_again"]
    table = Table("tensors", title="Planning, the first time and again: ms")
    for column in ("buckets", *(name.replace("_", " ") for name in names)):
        table.add_column(column, justify="right")
    for row in planning:
        table.add_row(str(row["tensors"]), str(row["buckets"]), *(f"{row[f'{name}_s'] * 1e3:.4g}" for name in names))
    console.print(table)
    for line in (*judge_control(control), *judge_planning(planning)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"{os.cpu_count()} CPU cores ({platform.machine()}), load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}",
        highlight=False,
    )


def judge_control(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Whether the control plane is fast enough, and what one engine more costs, among few and among many."""
    for sources, staged in dict.fromkeys((row["sources"], row["staged"]) for row in rows):
        alike = [row for row in rows if (row["sources"], row["staged"]) == (sources, staged)]
        growth = ", ".join(
            f"{(more['least_ms'] - less['least_ms']) / (more['engines'] - less['engines']) * 1e3:.3g} us up to "
            f"{more['engines']}"
            for less, more in itertools.pairwise(alike)
        )
        took = alike[-1]["control_ms"]
        yield (
            f"{alike[-1]['engines']} engines, {sources} sources, {'staged' if staged else 'in place'}: {took:.4g} ms, "
            f"target {CONTROL_TARGET_MS} {'held' if took < CONTROL_TARGET_MS else 'MISSED'}; one more: {growth}"
        )


def judge_planning(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Whether planning is fast enough."""
    row = rows[-1]
    firsts = max(row[f"{name}_first_s"] for name in ("plan", "engine", "joined", "shards"))
    for what, took, target in (("first", firsts, FIRST_TARGET_S), ("again", row["plan_again_s"], AGAIN_TARGET_S)):
        yield (
            f"{row['tensors']} tensors, planned {what}: {took:.3g} s, target {target:g} "
            f"{'held' if took < target else 'MISSED'}; reading them at the trainer: {row[f'read_{what}_s']:.3g} s"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few engines, sources and tensors: seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    gc.freeze()  # what was imported is not to be looked through again at every collection
    engines, sources = (QUICK_ENGINES, QUICK_SOURCES) if options.quick else (ENGINES, SOURCES)
    rounds, say = 3 if options.quick else 9, Console(stderr=True)
    control, planning = [], []
    for staged, number, count in itertools.product((True, False), sources, engines):
        say.print(f"{count} engines, {number} sources, {'staged' if staged else 'in place'} ...")
        control.append(asyncio.run(measure_control(count, number, staged=staged, rounds=rounds)))
    for count in QUICK_TENSORS if options.quick else TENSORS:
        say.print(f"{count} tensors ...")
        planning.append(measure_planning(count, rounds=3))
    show(control, planning)
    write_rows([*control, *planning], options.json)


if __name__ == "__main__":
    main()
