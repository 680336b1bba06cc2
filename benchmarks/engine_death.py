"""How long it takes to go on when an engine dies, or stops answering, in the middle of an update.

``python -m benchmarks.engine_death`` updates three staged engines (Ray actors) from a trainer in this process with 1 GB
of weights, over a broadcast, as if they were elsewhere: through shared memory there is hardly a middle. Medians over a
few rounds, all in one run:

* *undisturbed*: seconds of an update in which nothing happens;
* *known*: one of the engines is killed (SIGKILL) when it has half of the buckets: seconds until the update goes on
  without it. By then the transfer has failed, it is known whose failure that was, and what was sent is undone;
* *survivors*: seconds from the same moment until the call ends; then both survivors hold the new version, checked by a
  digest of their bytes;
* *stopped*: one is stopped (SIGSTOP) there, and the update has a deadline of four undisturbed ones: seconds from the
  deadline to the end of the call, less than zero if it ended before.

Beside each is what it is to reach.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import torch
from ray.exceptions import RayActorError
from rich.console import Console
from rich.table import Table

from asyncsync import WeightSynchronizer, WeightUpdateError, cluster
from benchmarks import layouts
from benchmarks.contenders import WrongBytesError
from benchmarks.faulty import FaultyEngine
from benchmarks.layouts import Layout
from benchmarks.running import on_a_private_cluster

CASE, QUICK_CASE = "1 GB", "64 MB"
ROUNDS, QUICK_ROUNDS = 5, 2
TIMEOUT = 120.0
"""Seconds that an update may take that is to fail for no lack of time."""

LEAST_TIMEOUT = 4.0
"""Seconds, at the least, for an update in which an engine is stopped."""

PATIENCE = 180.0
"""Seconds for an actor to start."""

TRIES = 5
"""How many times engines are tried to be brought to one version again."""

VICTIM, SURVIVORS = 1, (0, 2)
LINES = {
    "undisturbed_s": "undisturbed update",
    "known_s": "killed: until the update goes on without it",
    "survivors_s": "killed: until the survivors are updated, and the call ends",
    "stopped_after_deadline_s": "stopped: from the deadline to the end of the call",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """An update in the middle of which an engine got a signal.

    Attributes:
        known: Seconds from the signal until the update went on without it; None if it did not.
        ended: Seconds from the signal to the end of the call.
        whole: Seconds from the beginning of the call to its end.
        survived: Whether the others got it.
    """

    known: float | None
    ended: float
    whole: float
    survived: bool


class Death:
    """Three engines and their trainer, of which one engine dies again and again."""

    def __init__(self, layout: Layout) -> None:
        self.weights = layouts.make_weights(layout)
        self.engines: list[Any] = [FaultyEngine.remote(layout, staged=True) for _ in range(3)]
        self.buckets = 0

    @asynccontextmanager
    async def synchronizer(self, timeout: float) -> AsyncIterator[WeightSynchronizer]:
        """A synchronizer that is connected, as that of a training that runs, and whose engines hold whole weights."""
        async with WeightSynchronizer(
            self.weights, self.engines, timeout=timeout, transport="broadcast"
        ) as synchronizer:
            await synchronizer.connect()
            yield synchronizer

    async def update(self, synchronizer: WeightSynchronizer) -> float:
        """Update all three, and check what they hold; the seconds that it took."""
        await asyncio.to_thread(layouts.change, self.weights.values())
        start = time.perf_counter()
        self.buckets = (await synchronizer.update_weights()).buckets
        seconds = time.perf_counter() - start
        await self.check(synchronizer, range(3))
        return seconds

    async def repair(self, synchronizer: WeightSynchronizer) -> None:
        """Have all three be well again, once the victim is there."""
        await self.pid()
        for _ in range(TRIES - 1):
            with suppress(WeightUpdateError):
                await self.update(synchronizer)
                return
        await self.update(synchronizer)

    async def check(self, synchronizer: WeightSynchronizer, engines: Sequence[int]) -> None:
        """See that engines hold the published version, and that it is what the trainer holds.

        Raises:
            WrongBytesError: One does not.
        """
        expected = (synchronizer.weight_version, layouts.fingerprint(self.weights.values()))
        for number in engines:
            if await self.engines[number].read.remote() != expected:
                raise WrongBytesError(f"engine {number} does not hold version {synchronizer.weight_version}, whole")

    async def pid(self) -> int:
        """The process of the victim, once it is there."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    return int((await self.engines[VICTIM].vitals.remote())["pid"])
                except RayActorError:
                    await asyncio.sleep(0.05)

    async def disturbed(self, synchronizer: WeightSynchronizer, how: signal.Signals) -> Disturbed:
        """An update in the middle of which the victim gets a signal; then all three are well again.

        Args:
            synchronizer: Conducts it.
            how: The signal.

        Raises:
            WrongBytesError: A survivor does not hold the published version.
        """
        victim, pid = self.engines[VICTIM], await self.pid()
        await victim.arm.remote("receive_weights", "goes on", self.buckets // 2)  # there the signal finds it
        await asyncio.to_thread(layouts.change, self.weights.values())
        with listening() as known:
            start = time.perf_counter()
            update = asyncio.create_task(synchronizer.update_weights())
            await victim.arrived.remote()
            sent = time.perf_counter()
            os.kill(pid, how)
            await asyncio.wait([update])
            ended = time.perf_counter()
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        error = update.exception()
        if not isinstance(error, WeightUpdateError):
            raise error or RuntimeError("an update did not notice that an engine was gone")
        if error.update is not None:
            await self.check(synchronizer, SURVIVORS)
        await self.pid()
        await victim.disarm.remote()
        await self.repair(synchronizer)
        return Disturbed(
            known=None if known.at is None else known.at - sent,
            ended=ended - sent,
            whole=ended - start,
            survived=error.update is not None,
        )

    async def close(self) -> None:
        """End the engines."""
        await asyncio.gather(*(cluster.kill_actor(engine) for engine in self.engines))


class WhenKnown(logging.Handler):
    """Notes when the library says that an update goes on without those who failed."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Note it, the first time."""
        if self.at is None and record.getMessage().startswith("once more without those who failed"):
            self.at = time.perf_counter()


@contextmanager
def listening() -> Iterator[WhenKnown]:
    """Listen to the library's log."""
    handler, log = WhenKnown(), logging.getLogger("asyncsync")
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


async def measure(case: str, rounds: int, say: Console) -> dict[str, Any]:
    """Measure it.

    Args:
        case: Name of the layout.
        rounds: How many of each kind.
        say: Where progress goes.
    """
    torch.set_num_threads(1)
    layout = layouts.all_layouts()[case]
    death = await asyncio.to_thread(Death, layout)
    undisturbed: list[float] = []
    killed: list[Disturbed] = []
    stopped: list[Disturbed] = []
    try:
        await death.pid()
        async with death.synchronizer(TIMEOUT) as synchronizer:
            for _ in range(3):  # the first ones allocate
                await death.update(synchronizer)
            for number in range(rounds):
                say.print(f"{case}: killed, {number + 1} of {rounds} ...")
                await death.update(synchronizer)  # the victim is a new process, which allocates in its first two
                undisturbed.append(await death.update(synchronizer))
                killed.append(await death.disturbed(synchronizer, signal.SIGKILL))
        timeout = max(4 * statistics.median(undisturbed), LEAST_TIMEOUT)
        async with death.synchronizer(timeout) as synchronizer:
            for number in range(rounds):
                say.print(f"{case}: stopped, {number + 1} of {rounds} ...")
                stopped.append(await death.disturbed(synchronizer, signal.SIGSTOP))
    finally:
        await death.close()
    took = {
        "undisturbed_s": undisturbed,
        "known_s": [each.known for each in killed if each.known is not None],
        "survivors_s": [each.ended for each in killed],
        "stopped_after_deadline_s": [each.whole - timeout for each in stopped],
    }
    return {
        "case": case,
        "bytes": layout.nbytes,
        "rounds": rounds,
        "timeout_s": round(timeout, 3),
        **{key: round(statistics.median(seconds), 4) if seconds else None for key, seconds in took.items()},
        "survived": [sum(each.survived for each in those) for those in (killed, stopped)],
        "all_s": {key: [round(each, 4) for each in seconds] for key, seconds in took.items()},
    }


def show(figures: dict[str, Any]) -> None:
    """Print the figures, each beside what it is to reach."""
    table = Table(title=f"One of three engines in the middle of an update of {figures['case']}: medians, s")
    for column in ("what", "seconds", "to reach", ""):
        table.add_column(column, justify="left" if column == "what" else "right")
    targets: dict[str, float] = {}
    if figures["case"] == CASE:
        undisturbed = figures["undisturbed_s"]
        targets = {"known_s": 1.0, "survivors_s": 2 * undisturbed + 1, "stopped_after_deadline_s": 1.0}
    for key, what in LINES.items():
        seconds, target = figures[key], targets.get(key)
        if seconds is None or target is None:
            table.add_row(what, "never" if seconds is None else f"{seconds:.3g}", "", "")
        else:
            table.add_row(what, f"{seconds:.3g}", f"{target:.3g}", "" if seconds <= target else "MISSED")
    console = Console(width=110)
    console.print(table)
    killed, stopped = figures["survived"]
    console.print(
        f"Of {figures['rounds']} rounds each, survivors were updated in {killed} (killed) and {stopped} (stopped)"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_death",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds of each kind ({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASE} and {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    case, rounds = (QUICK_CASE, QUICK_ROUNDS) if options.quick else (CASE, ROUNDS)
    gc.freeze()
    figures = on_a_private_cluster(lambda: measure(case, options.rounds or rounds, say=Console(stderr=True)))
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
