"""Random faults, for minutes on end, and whether all that is promised holds meanwhile.

``python -m benchmarks.soak --minutes 10`` updates two fleets of real engines (Ray actors) at the same time, one staged
and one in place, each of three engines and a fourth that joins and leaves; the trainers are in this process. Every
engine's weights are read all the time, inside ``generation(engine)``. Update after update, as a seed has it, engines
raise, exit, are killed, are stopped (and go on later), are late, do not answer or receive a wrong bit, at some step or
at any moment; the trainer raises; the caller cancels; a new synchronizer takes over. After one or two such updates the
engines are healed, and one more must reach all of them.

Each of these is a *violation*:

* a reader met bytes that are no published version, an older version than it was given, or an unexpected error;
* an update ended later than its deadline and :data:`SLACK`;
* a version was published that an engine without a fault lacks, or does not serve;
* one engine had a fault, and the others did not get the update in the same call (but for a hang while all join a group:
  there they wait for each other);
* the update after healing failed, or did not reach every engine;
* something is left in the end: tasks or threads of the library, shared memory; or file descriptors, threads and memory
  have grown since a quarter of the time, of this process or of the first engine of a fleet (which is never killed).

Ends with status 1 if there was one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import math
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import torch
from ray.exceptions import RayActorError
from rich.console import Console
from rich.table import Table

import asyncsync
from asyncsync import EngineState, WeightSynchronizer, WeightUpdate, cluster
from benchmarks import layouts
from benchmarks.faulty import FaultyEngine, vitals
from benchmarks.running import on_a_private_cluster

MINUTES, QUICK_MINUTES = 10.0, 0.4
LAYOUT = layouts.even("4 MB", 16, 2**17)
BUCKETS, BUCKET = 16, 2**18  # a tensor each

TIMEOUT = 10.0
"""Seconds for an update."""

SLACK = 2.0
"""Seconds that it may take longer."""

PATIENCE = 120.0
"""Seconds for whatever else must end: actors start anew on a busy machine."""

BEGINNINGS = 10
"""How many times the first update is tried."""

PAUSE = 0.005
"""Seconds between two readings of an engine."""

GROWTH = {"rss": 32 * layouts.MB, "files": 16, "threads": 8}
"""What a process may have more in the end than at a quarter of the time: bytes (eight sets of weights), and file
descriptors and threads, of which Ray keeps some for each process that it talks to."""

SETTLED = 2.0
"""Minutes from which on growth counts: before, processes are still warming up."""

ASIDE = ("asyncsync-join", "asyncsync-drop-group")
"""Threads that end by themselves: an operation that was left behind has a timeout."""

FLEETS = {"staged": True, "in place": False}
STEPS = ("describe_engine", "open_group", "join_group", "receive_weights", "finish_weight_update")
IN_PLACE_STEPS = ("pause_generation", "resume_generation")
GENTLE = ("raises", "answers late", "does not answer", "is stopped", "answers wrongly")
FATAL = ("exits", "is killed")
AT_ANY_MOMENT = {"is stopped": signal.SIGSTOP, "is killed": signal.SIGKILL}

EXPECTED = (
    asyncsync.EngineError,
    asyncsync.NotReadyError,
    asyncsync.LockTimeoutError,
    asyncsync.MembershipError,
    asyncsync.ClosedError,
    RayActorError,
)
"""What a reader may be told in place of a version."""

Meanwhile = Callable[[asyncio.Task[WeightUpdate]], Coroutine[Any, Any, None]]


class StuckError(Exception):
    """An update does not end."""


class Findings:
    """What was seen in a run.

    Attributes:
        updates: How many versions were published.
        calls: How many updates were asked for.
        faults: How many faults happened, by kind.
        reads: How many times weights were read.
        refused: How many times a reader was told that there is nothing to read.
        for_all: How many updates reached nobody, though only some engines had a fault.
        took: Seconds of each update that reached all.
        latest_s: How much later than its deadline an update ended, at the most.
        messages: What was violated.
        vitals: Of each process that lives all the time: how it was at a quarter of the time, and in the end.
    """

    def __init__(self) -> None:
        self.took: list[float] = []
        self.updates = self.calls = self.reads = self.refused = self.for_all = 0
        self.faults: Counter[str] = Counter()
        self.latest_s = -math.inf
        self.messages: list[str] = []
        self.vitals: dict[str, dict[str, dict[str, int]]] = {}

    def violated(self, message: str) -> None:
        """Note a violation."""
        self.messages.append(message)
        print(f"violation: {message}", file=sys.stderr, flush=True)

    def note_vitals(self, process: str, when: str, seen: dict[str, int]) -> None:
        """Keep how a process was, the last time that it was seen at that moment."""
        self.vitals.setdefault(process, {})[when] = seen


@dataclass(frozen=True, slots=True)
class Trouble:
    """What befalls an engine in an update.

    Attributes:
        engine: Its number.
        kind: What happens.
        step: Where; None: at any moment.
        bucket: At which bucket, while weights arrive.
    """

    engine: int
    kind: str
    step: str | None
    bucket: int

    def __str__(self) -> str:
        return f"engine {self.engine} {self.kind} at {self.step or 'some moment'}"


class Soak:
    """One fleet, its trainer, its readers, and what befalls them.

    Args:
        name: For messages.
        staged: Whether its engines hold new weights beside the old.
        seed: What happens depends on it.
        timeout: Seconds for an update.
        findings: Where it is noted.

    Attributes:
        pids: Every process that its engines have had.
    """

    def __init__(self, name: str, *, staged: bool, seed: int, timeout: float, findings: Findings) -> None:
        self._timeout = timeout
        self._name, self._staged, self._findings = name, staged, findings
        self._random = random.Random(f"{seed} {name}")
        self._engines: list[Any] = [FaultyEngine.remote(LAYOUT, staged=staged) for _ in range(4)]
        self._weights = layouts.make_weights(LAYOUT)
        self._digests: dict[int, str] = {}
        self._read: list[tuple[int, int, int | None, str]] = []
        self._pid: dict[int, int] = {}
        self.pids: set[int] = set()
        self._members = [0, 1, 2]  # those that belong to the synchronizer, and neither join nor leave just now
        self._joining: asyncio.Task[None] | None = None
        self._armed: dict[int, list[Trouble]] = {}  # since they were healed last
        self._took = 0.1
        self._trainer_raises = False
        self._synchronizer = self._new_synchronizer(None)

    def _new_synchronizer(self, version: int | None) -> WeightSynchronizer:
        engines = [self._engines[number] for number in self._members]
        return WeightSynchronizer(
            self._state, engines, initial_version=version, bucket_size=BUCKET, timeout=self._timeout
        )

    def _state(self) -> dict[str, torch.Tensor]:
        """What the trainer gives."""
        if self._trainer_raises:
            raise OSError("the optimizer's state is gone")
        return self._weights

    async def begin(self) -> None:
        """Have the engines start, and bring them their first weights."""
        for number in range(4):
            await self._recover(number)
        for _ in range(BEGINNINGS):  # nothing is judged yet: the machine may be busy with starting
            result = await self._update("the first update")
            if isinstance(result, WeightUpdate):
                break
        await self._heal("the second update")

    async def run(self, quarter: float, until: float) -> None:
        """Update until then."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._readers())
            looked = False
            while time.monotonic() < until:
                connected = await self._may_take_over()
                for turn in range(self._random.choice((1, 1, 2))):
                    await self._trouble(repeated=turn > 0, connected=connected or turn > 0)
                await self._heal("the update after healing")
                if not looked and time.monotonic() >= quarter:
                    looked = True
                    await self._note_vitals("quarter")
            await _all_ended_aside()
            await self._note_vitals("end")

    async def close(self) -> None:
        """End the engines, and all that was for them."""
        await self._synchronizer.aclose()
        if self._joining is not None:
            await asyncio.wait([self._joining])
        await asyncio.gather(*(cluster.kill_actor(engine) for engine in self._engines))

    async def _note_vitals(self, when: str) -> None:
        gc.collect()
        self._findings.note_vitals("driver", when, vitals())
        self._findings.note_vitals(f"{self._name} engine", when, await self._engines[0].vitals.remote())

    # -- readers --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _readers(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._read_on(number)) for number in range(4)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for number, task in enumerate(tasks):
                if not task.cancelled():
                    self._violated(f"the reader of engine {number} failed: {task.exception()!r}")

    async def _read_on(self, number: int) -> None:
        while True:
            try:
                async with self._synchronizer.generation(self._engines[number], timeout=PATIENCE) as version:
                    own, digest = await self._engines[number].read.remote()
                    self._read.append((number, version, own, digest))
            except EXPECTED:
                self._findings.refused += 1
            await asyncio.sleep(PAUSE)

    def _check_reads(self, what: str) -> None:
        read, self._read = self._read, []
        for number, given, own, digest in read:
            self._findings.reads += 1
            if own is None or self._digests.get(own) != digest:
                self._violated(f"{what}: engine {number} read other bytes than those of version {own}")
            elif own < given:
                self._violated(f"{what}: engine {number} read version {own}, and was given {given}")

    # -- updates --------------------------------------------------------------------------------------------------

    async def _update(self, what: str, *meanwhile: Meanwhile) -> BaseException | WeightUpdate:
        """Take a step, and bring it to the engines; what that ended with.

        Args:
            what: For messages.
            meanwhile: What happens while the update runs; it is given its task.
        """
        synchronizer, before = self._synchronizer, self._synchronizer.weight_version or 0
        await asyncio.to_thread(layouts.change, self._weights.values())
        digest = layouts.fingerprint(self._weights.values())
        self._findings.calls += 1
        start = time.monotonic()
        update = asyncio.create_task(synchronizer.update_weights())
        beside = [asyncio.create_task(each(update)) for each in meanwhile]
        await asyncio.wait([update], timeout=self._timeout + PATIENCE)
        took = time.monotonic() - start
        if not update.done():
            self._violated(f"{what}: has not ended after {took:.3g} s: {synchronizer!r}")
            raise StuckError(what)
        if beside:
            await asyncio.wait(beside, timeout=PATIENCE)
        for each in beside:
            if not each.done() or each.exception() is not None:
                self._violated(f"{what}: meanwhile, {each!r}")
        self._findings.latest_s = max(self._findings.latest_s, took - self._timeout)
        if took > self._timeout + SLACK:
            self._violated(f"{what}: ended {took - self._timeout:.3g} s after its deadline")
        published = synchronizer.weight_version or 0
        self._digests |= dict.fromkeys(range(before + 1, published + 1), digest)
        self._findings.updates += published > before
        self._check_reads(what)
        if update.cancelled():
            return asyncio.CancelledError()
        result = update.exception() or update.result()
        if isinstance(result, WeightUpdate):
            self._took = 0.9 * self._took + 0.1 * took
            self._findings.took.append(took)
        elif not isinstance(result, asyncsync.WeightUpdateError):
            self._violated(f"{what}: ended with {result!r}")
        return result

    async def _trouble(self, *, repeated: bool, connected: bool) -> None:
        """An update in which something happens.

        Args:
            repeated: Whether engines were not healed since the last one.
            connected: Whether it is known what engines hold, so that one may join.
        """
        choose = self._random
        victims = choose.sample(self._members, choose.choices((0, 1, 2), (2, 6, 1))[0])
        troubles = [self._choose(number) for number in victims if number not in self._armed]
        meanwhile: list[Meanwhile] = []
        for trouble in troubles:
            self._armed.setdefault(trouble.engine, []).append(trouble)
            if trouble.step is not None:
                await self._engines[trouble.engine].arm.remote(trouble.step, trouble.kind, trouble.bucket)
            else:
                meanwhile.append(partial(self._strike, trouble, choose.uniform(0, 1.2 * self._took)))
        what = [str(trouble) for trouble in troubles]
        self._trainer_raises = not troubles and choose.random() < 0.3
        if self._trainer_raises:
            what.append("the trainer raises")
        if choose.random() < (0.2 if troubles else 0.6):
            longest = choose.choice((self._took, self._timeout)) if troubles else self._took
            meanwhile.append(partial(self._cancel, choose.uniform(0, longest)))
            what.append("its caller cancels")
        if connected and self._joining is None and 3 not in self._armed and choose.random() < 0.3:
            after = choose.uniform(0, 1.2 * self._took)
            if 3 in self._members:
                self._members.remove(3)
                meanwhile.append(partial(self._leave, after))
                what.append("engine 3 leaves")
            else:
                self._joining = asyncio.create_task(self._join(after))
                what.append("engine 3 joins")
        before = self._synchronizer.weight_version
        said = f"update {self._findings.calls}{' (not healed)' * repeated}: {', '.join(what) or 'nothing happens'}"
        result = await self._update(said, *meanwhile)
        published = self._synchronizer.weight_version != before
        cancelled = isinstance(result, asyncio.CancelledError)
        if self._trainer_raises:
            self._trainer_raises = False
            self._findings.faults["the trainer raises"] += 1
            if published:
                self._violated(f"{said}: a version was published")
        self._findings.faults["the caller cancels"] += cancelled
        if not published and not cancelled:
            self._findings.for_all += 1
            print(f"{self._name}: {said}: nobody was updated: {result}", file=sys.stderr)
            if len(troubles) == 1 and len(what) == 1 and not repeated and not _hangs_in_join(troubles[0]):
                self._violated(f"{said}: the others were not updated in the same call: {result}")
        # Who is cut off in the middle may leave engines behind; and in place, bytes may have arrived.
        whole = (published and not cancelled) or (self._staged and not published and not repeated)
        for number in self._members:
            if number not in self._armed:
                await self._check(number, said, may_be_tainted=not whole)

    def _choose(self, number: int) -> Trouble:
        kind = self._random.choice(GENTLE + FATAL * (number > 0))
        steps: list[str | None] = [*STEPS, *(() if self._staged else IN_PLACE_STEPS)]
        if kind == "answers wrongly":
            steps = ["receive_weights"]
        elif kind in AT_ANY_MOMENT:
            steps += [None] * len(steps)
        return Trouble(number, kind, self._random.choice(steps), self._random.randrange(BUCKETS))

    async def _strike(self, trouble: Trouble, after: float, _: asyncio.Task[WeightUpdate]) -> None:
        await asyncio.sleep(after)
        os.kill(self._pid[trouble.engine], AT_ANY_MOMENT[trouble.kind])

    async def _cancel(self, after: float, update: asyncio.Task[WeightUpdate]) -> None:
        await asyncio.wait([update], timeout=after)
        update.cancel()

    async def _leave(self, after: float, _: asyncio.Task[WeightUpdate]) -> None:
        await asyncio.sleep(after)
        await self._synchronizer.remove_engine(self._engines[3])
        self._findings.faults["an engine leaves"] += 1

    async def _join(self, after: float) -> None:
        await asyncio.sleep(after)
        await self._synchronizer.add_engine(self._engines[3])
        self._findings.faults["an engine joins"] += 1

    async def _may_take_over(self) -> bool:
        """Now and then, have a new synchronizer take the old one's place; whether it knows what engines hold."""
        if self._random.random() > 0.15:
            return True
        version = self._synchronizer.weight_version
        await self._synchronizer.aclose()
        self._findings.faults["another synchronizer takes over"] += 1
        if self._random.random() < 0.5:
            self._synchronizer = self._new_synchronizer(version)
            return False
        synchronizer = self._new_synchronizer(None)
        await synchronizer.connect()
        self._synchronizer = synchronizer
        if synchronizer.weight_version != version or len(synchronizer.ready_engines) != len(self._members):
            self._violated(f"taken over at version {version}: {synchronizer!r}")
        return True

    # -- healing --------------------------------------------------------------------------------------------------

    async def _heal(self, what: str) -> None:
        """Have all engines be as good as new, and bring an update to all of them."""
        what = f"{what} ({'; '.join(str(trouble) for each in self._armed.values() for trouble in each) or 'no fault'})"
        for number in list(self._armed):
            await self._recover(number)
        self._armed.clear()
        result = await self._update(what)
        failed = not isinstance(result, WeightUpdate)
        if not isinstance(result, WeightUpdate):
            self._violated(f"{what}: failed: {result!r}")
        elif any(outcome.state is not EngineState.UPDATED for outcome in result.outcomes):
            self._violated(f"{what}: did not reach all engines: {result.outcomes}")
        if self._joining is not None:
            await asyncio.wait([self._joining], timeout=PATIENCE)
            if not self._joining.done() or self._joining.exception() is not None:
                self._violated(f"{what}: engine 3 could not join: {self._joining!r}")
            else:
                self._members.append(3)
            self._joining = None
        for number in self._members:
            await self._check(number, what, may_be_tainted=failed)

    async def _recover(self, number: int) -> None:
        if number in self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid[number], signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                async with asyncio.timeout(10):
                    came = await self._engines[number].disarm.remote()
                    seen = await self._engines[number].vitals.remote()
                break
            except (RayActorError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
        self._pid[number] = seen["pid"]
        self.pids.add(seen["pid"])
        for trouble in self._armed.get(number, ()):
            self._findings.faults[f"an engine {trouble.kind}"] += trouble.step is None or came

    async def _check(self, number: int, what: str, *, may_be_tainted: bool = False) -> None:
        """Whether an engine serves the published version."""
        version = self._synchronizer.weight_version
        try:
            async with asyncio.timeout(PATIENCE):
                own, digest = await self._engines[number].read.remote()
        except asyncsync.TaintedEngineError as error:
            if not may_be_tainted:
                self._violated(f"{what}: engine {number} serves nobody: {str(error).splitlines()[-1]}")
        except (RayActorError, TimeoutError) as error:
            self._violated(f"{what}: engine {number} does not serve: {error!r}")
        else:
            if version is None or (own, digest) != (version, self._digests[version]):
                self._violated(f"{what}: engine {number} holds version {own}, and not {version}, whole")

    def _violated(self, message: str) -> None:
        self._findings.violated(f"{self._name}: {message}")


def _hangs_in_join(trouble: Trouble) -> bool:
    """There all wait for each other, and whose failure it is cannot be told."""
    return (trouble.step, trouble.kind) == ("join_group", "does not answer")


async def _all_ended_aside() -> None:
    """Return once groups that were left in the middle are gone, which keep threads and descriptors until then."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not any(thread.name in ASIDE for thread in threading.enumerate()):
            return
        await asyncio.sleep(0.1)


async def measure(minutes: float, seed: int, timeout: float = TIMEOUT) -> dict[str, Any]:
    """Run it.

    Args:
        minutes: How long.
        seed: What happens when depends on it.
        timeout: Seconds for an update.
    """
    torch.set_num_threads(1)
    findings, before = Findings(), set(os.listdir("/dev/shm"))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: findings.violated(f"left to the loop: {context}"))
    soaks = [
        Soak(name, staged=staged, seed=seed, timeout=timeout, findings=findings) for name, staged in FLEETS.items()
    ]
    try:
        await asyncio.gather(*(soak.begin() for soak in soaks))
        start = time.monotonic()
        runs = (soak.run(start + 15 * minutes, start + 60 * minutes) for soak in soaks)
        for result in await asyncio.gather(*runs, return_exceptions=True):
            if isinstance(result, BaseException):
                findings.violated(f"the soak itself ended with {result!r}")
    finally:
        await asyncio.gather(*(soak.close() for soak in soaks))
    await asyncio.sleep(1)  # what was cancelled ends
    find_leaks(findings, {os.getpid(), *(pid for soak in soaks for pid in soak.pids)}, before)
    if minutes >= SETTLED:
        find_growth(findings)
    return {
        "minutes": minutes,
        "seed": seed,
        "timeout_s": timeout,
        "updates": findings.updates,
        "calls": findings.calls,
        "faults": sum(findings.faults.values()),
        "faults_by_kind": dict(sorted(findings.faults.items())),
        "reached_nobody": findings.for_all,
        "reads": findings.reads,
        "reads_refused": findings.refused,
        "median_s": round(statistics.median(findings.took), 4) if findings.took else None,
        "latest_s": round(findings.latest_s, 3),
        "rss_mb": {
            process: {when: round(seen["rss"] / layouts.MB, 1) for when, seen in moments.items()}
            for process, moments in findings.vitals.items()
        },
        "vitals": findings.vitals,
        "violations": len(findings.messages),
        "messages": findings.messages,
    }


def find_leaks(findings: Findings, pids: set[int], before: set[str]) -> None:
    """Note what is left after all was closed.

    Args:
        findings: Where to note it.
        pids: This process, and all that engines have had.
        before: What shared memory there was before.
    """
    tasks = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncsync")]
    new = set(os.listdir("/dev/shm")) - before
    shared = [name for name in new if pids & {int(number) for number in re.findall(r"\d+", name)}]
    for kind, left in {"tasks": tasks, "threads": threads, "shared memory": shared}.items():
        if left:
            findings.violated(f"left in the end: {kind}: {', '.join(left)}")


def find_growth(findings: Findings) -> None:
    """Note what has grown since a quarter of the time."""
    for process, moments in findings.vitals.items():
        if moments.keys() >= {"quarter", "end"}:
            for what, most in GROWTH.items():
                growth = moments["end"][what] - moments["quarter"][what]
                if growth > most:
                    findings.violated(f"{process}: {what} grew by {growth}, from {moments['quarter'][what]}")


def show(figures: dict[str, Any]) -> None:
    """Print the figures."""
    table = Table(title=f"{figures['minutes']:.3g} minutes, seed {figures['seed']}")
    table.add_column("what")
    table.add_column("how often", justify="right")
    for key in ("calls", "updates", "reads", "reached_nobody", "faults"):
        table.add_row(key.replace("_", " "), str(figures[key]))
    for kind, count in figures["faults_by_kind"].items():
        table.add_row(f"  {kind}", str(count))
    for process, moments in figures["rss_mb"].items():
        table.add_row(f"{process}: MB at a quarter, in the end", " → ".join(map(str, moments.values())))
    table.add_row("an update that reached all, median, s", str(figures["median_s"]))
    table.add_row("latest end after a deadline, s", str(figures["latest_s"]))
    table.add_row("violations", str(figures["violations"]))
    Console(width=110).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, metavar="N", help=f"how long ({MINUTES:g})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="what happens when depends on it (0)")
    parser.add_argument("--quick", action="store_true", help="some seconds, unless --minutes is given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    minutes = options.minutes if options.minutes is not None else QUICK_MINUTES if options.quick else MINUTES
    logging.getLogger("asyncsync").addHandler(logging.NullHandler())  # it warns of each fault
    gc.freeze()
    figures = on_a_private_cluster(lambda: measure(minutes, options.seed))
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(1 if figures["violations"] else 0)


if __name__ == "__main__":
    main()
