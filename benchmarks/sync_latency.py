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
import platform
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import ray
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import asyncsync
from asyncsync import cluster
from asyncsync.demo.measures import TICK, StallMeter
from benchmarks import layouts
from benchmarks.layouts import Layout
from benchmarks.running import on_a_private_cluster, write_rows
from benchmarks.seed_loop import BUCKET_SIZE, Group, SeedLock, SeedLoop, SeedReceiver, open_store

WARM_UP = 2  # runs: an engine allocates memory to stage weights in during the first two updates
STALL_ROUNDS = 3
MEMORY_RESERVE = 2 * layouts.GB

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


class WrongBytesError(Exception):
    """After an update, what an engine holds is not what the trainer sent: no figure counts."""


# -- the engines ------------------------------------------------------------------------------------------------------


class BenchmarkEngine(SeedReceiver, asyncsync.ModuleEngine):
    """An engine for every contender: it holds whatever layout it is told to."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        super().__init__(nn.Module())
        self._flat = torch.empty(0, dtype=torch.uint8)

    def hold(self, layout: Layout) -> None:
        """Become a new engine that serves a module of this layout."""
        super().__init__(layouts.make_module(layout))
        self._flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.forget_seed_buffer()

    def receive_flat(self) -> None:
        """Take part in one bare broadcast."""
        self.group.barrier()
        self.group.broadcast(self._flat).wait()
        self.group.barrier()

    def receive_object(self, array: Any) -> None:
        """Copy what comes through the object store."""
        self._flat.numpy()[:] = array

    def fingerprint(self) -> str:
        """Digest of the module's weights."""
        return layouts.fingerprint(self.module.parameters())

    def flat_fingerprint(self) -> str:
        """Digest of what the bare broadcast brought."""
        return layouts.fingerprint([self._flat])


RemoteEngine = asyncsync.remote(num_cpus=0)(BenchmarkEngine)


class Fleet:
    """Engines, and the group that seed loop and bare broadcast go through. Make it with :meth:`start`.

    Attributes:
        engines: Those that have a place in the group.
        near: As many, that have not.
        group: The group.
        lock: What the seed's loop locks.
    """

    def __init__(self, engines: Sequence[Any], near: Sequence[Any], group: Group, lock: Any) -> None:
        self.engines = engines
        self.near = near
        self.group = group
        self.lock = lock

    @classmethod
    @asynccontextmanager
    async def start(cls, count: int) -> AsyncIterator[Self]:
        """Start ``count`` engines, and stop them in the end."""
        lock = await cluster.start_actor(SeedLock)
        engines, near = await asyncio.to_thread(
            lambda: ([RemoteEngine.remote() for _ in range(count)], [RemoteEngine.remote() for _ in range(count)])
        )
        try:
            address = cluster.node_address()
            store = open_store(address)
            joins = [
                cluster.call(engine, "join_seed_group", address, store.port, rank, count + 1)
                for rank, engine in enumerate(engines, start=1)
            ]
            group, *_ = await asyncio.gather(
                asyncio.to_thread(Group, address, store.port, 0, count + 1, store=store), *joins
            )
            yield cls(engines, near, group, lock)
        finally:
            await asyncio.gather(*(cluster.kill_actor(actor) for actor in (*engines, *near, lock)))

    async def all(self, method: str, *args: Any, near: bool = False) -> list[Any]:
        """Call every engine of one kind."""
        return await asyncio.gather(
            *(cluster.call(engine, method, *args) for engine in (self.near if near else self.engines))
        )


# -- the contenders ---------------------------------------------------------------------------------------------------


class Contender(ABC):
    """One way to bring weights to engines."""

    def __init__(self, fleet: Fleet, tensors: Sequence[Tensor]) -> None:
        self.fleet = fleet
        self.tensors = tensors

    @abstractmethod
    async def run(self) -> float:
        """Bring the tensors to every engine, once; the seconds it took."""

    def prepare(self) -> None:
        """Change the tensors, and have nothing else to do in the next run."""
        layouts.change(self.tensors)
        gc.collect()

    async def fingerprints(self) -> list[str]:
        """Digests of what the engines hold now."""
        return await self.fleet.all("fingerprint")

    async def check(self) -> None:
        """Compare the engines' bytes with the trainer's.

        Raises:
            WrongBytesError: They differ.
        """
        expected = layouts.fingerprint(self.tensors)
        for index, found in enumerate(await self.fingerprints()):
            if found != expected:
                raise WrongBytesError(f"{type(self).__name__}: engine {index} holds other bytes than were sent")


class Ours(Contender):
    """The library."""

    def __init__(self, fleet: Fleet, weights: dict[str, Tensor], synchronizer: asyncsync.WeightSynchronizer) -> None:
        super().__init__(fleet, list(weights.values()))
        self.synchronizer = synchronizer

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        await self.synchronizer.update_weights()
        return time.perf_counter() - start


class Shared(Ours):
    """The library, on engines that seed's loop leaves alone."""

    async def fingerprints(self) -> list[str]:
        """See :meth:`Contender.fingerprints`."""
        return await self.fleet.all("fingerprint", near=True)


class Put(Contender):
    """Ray's object store, as lean as can be: one array, put from a thread, and copied by each actor."""

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        reference = await asyncio.to_thread(ray.put, self.tensors[0].numpy())
        await self.fleet.all("receive_object", reference, near=True)
        return time.perf_counter() - start

    async def fingerprints(self) -> list[str]:
        """Digests of the engines' flat buffers."""
        return await self.fleet.all("flat_fingerprint", near=True)


class Seed(Contender):
    """The loop that the library replaces. It blocks the event loop: that is what its stall shows."""

    def __init__(self, fleet: Fleet, weights: dict[str, Tensor]) -> None:
        super().__init__(fleet, list(weights.values()))
        self.weights = weights
        self.loop = SeedLoop(fleet.engines, fleet.group, fleet.lock)

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        self.loop.update(self.weights)
        return time.perf_counter() - start


class BareGloo(Contender):
    """One broadcast of as many bytes: what the data plane can do."""

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        received = asyncio.create_task(self.fleet.all("receive_flat"))
        seconds = await asyncio.to_thread(self._broadcast)
        await received
        return seconds

    def _broadcast(self) -> float:
        self.fleet.group.barrier()
        start = time.perf_counter()
        self.fleet.group.broadcast(self.tensors[0]).wait()
        self.fleet.group.barrier()
        return time.perf_counter() - start

    async def fingerprints(self) -> list[str]:
        """Digests of the engines' flat buffers."""
        return await self.fleet.all("flat_fingerprint")


class Memcpy(Contender):
    """One copy of as many bytes: what the memory can do."""

    def __init__(self, fleet: Fleet, tensors: Sequence[Tensor]) -> None:
        super().__init__(fleet, tensors)
        self.target = torch.zeros_like(tensors[0])

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        self.target.copy_(self.tensors[0])
        return time.perf_counter() - start

    async def fingerprints(self) -> list[str]:
        """The copy's digest."""
        return [layouts.fingerprint([self.target])]


# -- measuring --------------------------------------------------------------------------------------------------------


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


async def measure(layout: Layout, fleet: Fleet, *, rounds: int) -> Row:
    """Measure one layout: every contender once a round.

    Args:
        layout: What to send.
        fleet: Where to.
        rounds: How many rounds count, after two that do not.

    Raises:
        WrongBytesError: A contender left an engine with other bytes than it sent.
    """
    weights = layouts.make_weights(layout)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    await asyncio.gather(fleet.all("hold", layout), fleet.all("hold", layout, near=True))
    async with (
        asyncsync.WeightSynchronizer(weights, fleet.near, transport="shared") as near,
        asyncsync.WeightSynchronizer(weights, fleet.engines, transport="broadcast") as synchronizer,
    ):
        contenders: dict[str, Contender] = {
            "ours": Shared(fleet, weights, near),
            "broadcast": Ours(fleet, weights, synchronizer),
            "put": Put(fleet, [flat]),
            "seed": Seed(fleet, weights),
            "gloo": BareGloo(fleet, [flat]),
            "memcpy": Memcpy(fleet, [flat]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(WARM_UP + rounds):
            # Who comes after whom matters: an engine that has rested for a while is slower. So that changes.
            for name in random.Random(turn).sample(list(contenders), len(contenders)):
                contenders[name].prepare()
                took = await contenders[name].run()
                await contenders[name].check()
                if turn >= WARM_UP:
                    seconds[name].append(took)
        stalls = {"ours": 0.0, "seed": 0.0}
        for _ in range(STALL_ROUNDS):
            for name, longest in stalls.items():
                contenders[name].prepare()
                async with stalls_of_the_loop() as meter:
                    await contenders[name].run()
                await contenders[name].check()
                stalls[name] = max(longest, meter.longest_ms)
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
        async with Fleet.start(engines) as fleet:
            for name in names:
                layout = known[name]
                wanted, free = memory_wanted(layout, engines), memory_available()
                if wanted > free:
                    what = f"{wanted / layouts.GB:.0f} GiB wanted, {free / layouts.GB:.0f} free"
                    say.print(f"{name}, {engines} engines: left out, {what}")
                    continue
                say.print(f"{name}, {engines} engines ...")
                rows.append(await measure(layout, fleet, rounds=rounds(layout, quick=quick)))
    return rows


def rounds(layout: Layout, *, quick: bool) -> int:
    """How many rounds count: more where one takes milliseconds."""
    few = 3 if quick else 5
    return 3 * few if layout.nbytes <= 64 * layouts.MB and len(layout.shapes) < 100 else few


def memory_wanted(layout: Layout, engines: int) -> int:
    """Bytes a case needs: weights, flat, copied, two shared sets and an object here; two sets and two flat there."""
    return (6 + 4 * engines) * layout.nbytes + engines * min(layout.nbytes, BUCKET_SIZE) + MEMORY_RESERVE


def memory_available() -> int:
    """Bytes that this machine can still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, value, *_ = line.split()
        if key == "MemAvailable:":
            return int(value) * layouts.KB
    raise RuntimeError("this machine does not tell how much memory it has left")


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
    console.print(
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, ray {ray.__version__}",
        highlight=False,
    )


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
    rows = on_a_private_cluster(lambda: measure_all(plan, quick=options.quick, say=Console(stderr=True)))
    show(rows)
    write_rows([asdict(row) for row in rows], options.json)


if __name__ == "__main__":
    main()
