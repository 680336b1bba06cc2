"""The fault matrix: each fault in each phase, on staged engines and in place, on real processes.

All of it goes over shared memory, and where bytes come or their ways are made, over a broadcast as well.

In each cell one of three engines (or the trainer, or whoever awaits the update) fails, while every engine's weights are
read all the time. What must hold: no reader meets mixed weights, the update ends in time, the others have the new
version, or all the old one; and the next update reaches everyone. What became of the engines is kept, and is the table
in ``docs/reliability.md``: ``ASYNCSYNC_WRITE_TABLE=1`` writes it anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import asyncsync
from asyncsync import EngineState, SharedRolloutLock, WeightSynchronizer
from asyncsync.connection import TransportChoice
from tests.faulty import BUCKET, FaultyEngine, FaultyTrainer, weights
from tests.sample import fingerprint

pytestmark = [pytest.mark.asyncio, pytest.mark.faults, pytest.mark.timeout(180)]

TIMEOUT = 8.0
"""Seconds for an update with a fault."""

SLACK = 6.0
"""Seconds that it may take longer before it counts as stuck: how long it takes is measured elsewhere."""

ENGINE_STEPS: Mapping[str, str] = {
    "describe": "describe_engine",
    "connect": "open_group",
    "pause": "pause_generation",
    "transfer": "receive_weights",
    "finish": "finish_weight_update",
    "resume": "resume_generation",
}
TRAINER_STEPS: Mapping[str, str] = {
    "before update": "begin_update",
    "describe": "describe_weights",
    "connect": "join_trainer_group",
    "transfer": "send_weights",
}
PHASES = ("queue", "before update", "describe", "connect", "drain", "pause", "transfer", "finish", "resume")
ENGINE_FAULTS = ("raises", "exits", "is killed", "is stopped", "answers late", "does not answer")
MODES = {True: "staged", False: "in place"}
TRANSPORTS: tuple[TransportChoice, ...] = ("shared", "broadcast")
TRANSPORT_PHASES = ("connect", "transfer")
"""In which a transport has a part; the other phases are the same over each."""


def phases(staged: bool) -> list[str]:
    """The phases of an update that call engines."""
    return [phase for phase in ENGINE_STEPS if not staged or phase not in ("pause", "resume")]


ENGINE_CELLS = [
    *((fault, phase, staged) for staged in MODES for fault in ENGINE_FAULTS for phase in phases(staged)),
    *(("answers wrongly", "transfer", staged) for staged in MODES),
    *(("cannot listen", "connect", staged) for staged in MODES),
]
TRAINER_CELLS = [
    *((fault, phase, staged) for staged in MODES for fault in ("raises", "is killed") for phase in TRAINER_STEPS),
    *(("is stopped", "transfer", staged) for staged in MODES),
]
LOCK_CELLS = [(side, staged) for staged in MODES for side in ("updater", "reader")]
CANCEL_CELLS = [(phase, staged) for staged in MODES for phase in phases(staged)]

Cell = tuple[str, str, bool]


def over_transports(cells: Iterable[tuple[Any, ...]], phase: int) -> list[tuple[Any, ...]]:
    """Cells, each with every transport that makes a difference; ``phase`` is where they name theirs."""
    return [
        (*cell, transport)
        for cell in cells
        for transport in (TRANSPORTS if cell[phase] in TRANSPORT_PHASES else TRANSPORTS[:1])
        if transport == "broadcast" or "cannot listen" not in cell  # for shared memory an engine does not listen
        if transport == "shared" or cell[0] not in ("exits", "answers late")  # as "is killed", and as nothing
    ]


RESULTS: dict[Cell, dict[str, str]] = defaultdict(dict)  # by transport
DIGESTS = {fill: fingerprint(weights(fill)) for fill in range(1, 4)}
OLD, NEW, NEXT = 1, 2, 3


class Fleet:
    """Three engines of one mode, of which the second is to fail."""

    def __init__(self, staged: bool) -> None:
        self.staged = staged
        self.engines = [FaultyEngine.remote(partial(weights, 0.0), staged=staged) for _ in range(3)]
        self.victim = self.engines[1]

    async def heal(self, pid: int) -> None:
        """Have the victim, of which this was the process, be as good as new."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        while True:
            with suppress(ray.exceptions.RayActorError):
                return await self.victim.release.remote()  # type: ignore[no-any-return]

    @asynccontextmanager
    async def healed_after(self, pid: int) -> AsyncIterator[None]:
        """Whatever a test comes to, the next one finds it well."""
        try:
            yield
        finally:
            await self.heal(pid)

    def end(self) -> None:
        for engine in self.engines:
            ray.kill(engine)


@pytest.fixture(scope="module")
def fleets(ray_cluster: None) -> Iterator[Mapping[bool, Fleet]]:
    made = {staged: Fleet(staged) for staged in MODES}
    yield made
    for fleet in made.values():
        fleet.end()


class Readers:
    """Reads every engine's weights all the time, and keeps what was read."""

    def __init__(self, fleet: Fleet, synchronizer: WeightSynchronizer) -> None:
        self._fleet, self._synchronizer = fleet, synchronizer
        self.read: list[tuple[int, int, str]] = []  # the version at dispatch, the engine's own, and what it held

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._run(engine)) for engine in self._fleet.engines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            assert task.cancelled(), task.exception()

    async def _run(self, engine: Any) -> None:
        while True:
            with suppress(
                asyncsync.EngineError, asyncsync.NotReadyError, asyncsync.LockTimeoutError, ray.exceptions.RayActorError
            ):
                async with self._synchronizer.generation(engine) as version:
                    own, digest = await engine.read.remote()
                    self.read.append((version, own, digest))
            await asyncio.sleep(0.005)


def set_weights(trainer: nn.Module, fill: int) -> None:
    """Take a step."""
    with torch.no_grad():
        for tensor in trainer.parameters():
            tensor.fill_(float(fill))


@asynccontextmanager
async def prepared(
    fleet: Fleet, trainer: Any, phase: str, transport: TransportChoice, **options: Any
) -> AsyncIterator[tuple[WeightSynchronizer, int]]:
    """Engines that hold version n, of the old weights, and a synchronizer whose next update comes to a phase."""
    first: dict[str, Any] = {"bucket_size": BUCKET, "timeout": 60, "transport": transport}
    async with WeightSynchronizer(trainer, fleet.engines, **first) as synchronizer:
        version = (await synchronizer.update_weights()).version
    options |= {"bucket_size": BUCKET, "timeout": 60.0, "transport": transport}
    async with WeightSynchronizer(trainer, fleet.engines, initial_version=version, **options) as synchronizer:
        if phase not in ("before update", "describe", "connect"):
            await synchronizer.connect()  # else the update does it
        yield synchronizer, version


async def check_all_hold(fleet: Fleet, synchronizer: WeightSynchronizer, fill: int) -> None:
    version = synchronizer.weight_version
    assert [await engine.read.remote() for engine in fleet.engines] == [(version, DIGESTS[fill])] * 3
    assert "free" in repr(synchronizer._lock)


def check_reads(readers: Readers, old: int, fills: Mapping[int, int]) -> None:
    """Every reader met one whole version, and none older than it was given."""
    for given, own, digest in readers.read:
        assert digest == DIGESTS[fills.get(own, OLD)], (given, own)
        assert old <= given <= own


def told(states: list[EngineState], fleet: Fleet) -> str:
    """A cell of the table."""
    others = " or ".join(sorted({states[0], states[2]}))
    return f"{states[1]}, others {others}" if len(set(states)) > 1 else f"all {states[0]}"


@pytest.mark.parametrize(("fault", "phase", "staged", "transport"), over_transports(ENGINE_CELLS, phase=1))
async def test_an_engine(
    fleets: Mapping[bool, Fleet], fault: str, phase: str, staged: bool, transport: TransportChoice
) -> None:
    fleet, trainer = fleets[staged], weights(OLD)
    async with prepared(fleet, trainer, phase, transport) as (synchronizer, version):
        readers = Readers(fleet, synchronizer)
        pid = await fleet.victim.pid.remote()
        await fleet.victim.arm.remote(fault if fault == "cannot listen" else ENGINE_STEPS[phase], fault)
        set_weights(trainer, NEW)
        synchronizer._timeout = TIMEOUT
        async with fleet.healed_after(pid), readers.reading():
            started = asyncio.get_running_loop().time()
            if fault == "answers late":
                outcomes = (await synchronizer.update_weights()).outcomes
            else:
                with pytest.raises(asyncsync.WeightUpdateError, match="EngineActor-1") as caught:
                    await synchronizer.update_weights()
                assert caught.value.update is not None, "the others are to be updated"
                outcomes = caught.value.outcomes
            took = asyncio.get_running_loop().time() - started
            assert took < TIMEOUT + SLACK, "stuck"
            states = [outcome.state for outcome in outcomes]
            assert states[0] is states[2] is EngineState.UPDATED
            assert synchronizer.weight_version is not None
            assert synchronizer.weight_version > version
            for engine in fleet.engines[::2]:
                assert await engine.read.remote() == (synchronizer.weight_version, DIGESTS[NEW])
            await fleet.heal(pid)
            fills = dict.fromkeys(range(version + 1, synchronizer.weight_version + 1), NEW)
            set_weights(trainer, NEXT)
            synchronizer._timeout = 60.0
            update = await synchronizer.update_weights()
            fills[update.version] = NEXT
        await check_all_hold(fleet, synchronizer, NEXT)
        assert readers.read, "nobody read anything"
        check_reads(readers, version, fills)
        RESULTS[f"an engine {fault}", phase, staged][transport] = told(states, fleet)


@pytest.mark.parametrize(("fault", "phase", "staged", "transport"), over_transports(TRAINER_CELLS, phase=1))
async def test_the_trainer(
    fleets: Mapping[bool, Fleet], fault: str, phase: str, staged: bool, transport: TransportChoice
) -> None:
    fleet, trainer = fleets[staged], FaultyTrainer.remote(partial(weights, OLD))
    async with prepared(fleet, trainer, phase, transport) as (synchronizer, version):
        readers = Readers(fleet, synchronizer)
        pid = await trainer.pid.remote()
        await trainer.hold.remote(partial(weights, NEW))
        await trainer.arm.remote(TRAINER_STEPS[phase], fault)
        synchronizer._timeout = TIMEOUT
        async with readers.reading():
            with pytest.raises(asyncsync.WeightUpdateError, match="trainer") as caught:
                await synchronizer.update_weights()
            states = [outcome.state for outcome in caught.value.outcomes]
            torn = not staged and phase == "transfer"
            assert states == [EngineState.TAINTED if torn else EngineState.UNCHANGED] * 3
            assert synchronizer.weight_version == version
        check_reads(readers, version, {})
        if not torn:
            await check_all_hold(fleet, synchronizer, OLD)
        if fault == "is stopped":
            os.kill(pid, signal.SIGCONT)
        if fault != "is killed":
            synchronizer._timeout = 60.0
            await synchronizer.update_weights()
            await check_all_hold(fleet, synchronizer, NEW)
    async with WeightSynchronizer(weights(NEXT), fleet.engines, bucket_size=BUCKET, timeout=60) as synchronizer:
        assert (await synchronizer.update_weights()).version > version
        await check_all_hold(fleet, synchronizer, NEXT)
    ray.kill(trainer)
    RESULTS[f"the trainer {fault}", phase, staged][transport] = told(states, fleet)


@pytest.mark.parametrize(("phase", "staged", "transport"), over_transports(CANCEL_CELLS, phase=0))
async def test_who_awaits_it_is_cancelled(
    fleets: Mapping[bool, Fleet], phase: str, staged: bool, transport: TransportChoice
) -> None:
    fleet, trainer = fleets[staged], weights(OLD)
    async with prepared(fleet, trainer, phase, transport) as (synchronizer, version):
        readers = Readers(fleet, synchronizer)
        await fleet.victim.arm.remote(ENGINE_STEPS[phase], "does not answer")
        set_weights(trainer, NEW)
        async with readers.reading():
            update = asyncio.create_task(synchronizer.update_weights())
            await fleet.victim.arrived.remote()
            if phase == "finish":  # else the others would have switched or not, whichever is heard first
                for engine in (fleet.engines[0], fleet.engines[2]):
                    await engine.has_finished.remote(version + 1)
            update.cancel()
            if phase == "finish":  # and so would this one
                await asyncio.wait([update])
            await fleet.victim.release.remote()
            await asyncio.wait([update])
            assert update.cancelled()
            states = []
            for engine in fleet.engines:
                status = await engine.describe_engine.remote()
                new = status.weight_version is not None and status.weight_version > version
                state = EngineState.UPDATED if new else EngineState.UNCHANGED
                states.append(EngineState.TAINTED if status.tainted is not None else state)
                assert not await engine.receiving.remote()
            fills = {version + 1: NEW}
            published = synchronizer.weight_version
            assert published == version + any(state is EngineState.UPDATED for state in states)
            set_weights(trainer, NEXT)
            update = asyncio.create_task(synchronizer.update_weights())
            fills[(await update).version] = NEXT
        await check_all_hold(fleet, synchronizer, NEXT)
        check_reads(readers, version, fills)
        RESULTS["its caller is cancelled", phase, staged][transport] = told(states, fleet)


class LockHolder:
    """Another process, that holds the lock."""

    def pid(self) -> int:
        return os.getpid()

    async def hold(self, lock: SharedRolloutLock, side: str) -> None:
        """Take a side of the lock, and never let it go."""
        self._held = getattr(lock, side)(timeout=60)
        await self._held.__aenter__()


@pytest.mark.parametrize(("side", "staged"), LOCK_CELLS)
async def test_who_holds_the_lock_is_killed(fleets: Mapping[bool, Fleet], side: str, staged: bool) -> None:
    transport = TRANSPORTS[0]
    fleet, trainer = fleets[staged], weights(OLD)
    lock = await SharedRolloutLock.create(lease_ttl=2.0)
    actor_class: Any = ray.remote(num_cpus=0)(LockHolder)
    holder = actor_class.remote()
    async with prepared(fleet, trainer, "transfer", transport, lock=lock) as (synchronizer, version):
        await holder.hold.remote(lock, side)
        set_weights(trainer, NEW)
        update = asyncio.create_task(synchronizer.update_weights())
        status = await lock.status()
        while not status.queue and not status.updater_queue:
            status = await lock.status()
        os.kill(await holder.pid.remote(), signal.SIGKILL)
        states = [outcome.state for outcome in (await update).outcomes]
        assert synchronizer.weight_version == version + 1
        assert [await engine.read.remote() for engine in fleet.engines] == [(version + 1, DIGESTS[NEW])] * 3
    await lock.aclose()
    what = "another conductor" if side == "updater" else "a reader elsewhere"
    RESULTS[f"{what} is killed", "queue" if side == "updater" else "drain", staged][transport] = told(states, fleet)


BEGIN, END = "<!-- the fault matrix begins -->", "<!-- the fault matrix ends -->"
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"


def cell(key: Cell) -> str:
    """What became of it: over both transports the same, or first over shared memory and then over a broadcast."""
    found = RESULTS.get(key, {})
    told = {found[one].replace("lost", "tainted"): found[one] for one in TRANSPORTS if one in found}
    return "; ".join(told.values()) or "·"


def table() -> str:
    """The matrix, of what was seen in this run."""
    faults = list(dict.fromkeys(fault for fault, _, _ in RESULTS))
    lines = []
    for staged, mode in MODES.items():
        used = [phase for phase in PHASES if any((fault, phase, staged) in RESULTS for fault in faults)]
        lines += [f"**{mode.capitalize()} engines**", "", f"| | {' | '.join(used)} |", "| --- " * (len(used) + 1) + "|"]
        lines += [
            f"| {fault} | {' | '.join(cell((fault, phase, staged)) for phase in used)} |"
            for fault in faults
            if any(key[0] == fault and key[2] == staged for key in RESULTS)
        ]
        lines.append("")
    return "\n".join(lines)


async def test_the_table_in_the_docs_has_every_cell() -> None:
    cells = len(ENGINE_CELLS) + len(TRAINER_CELLS) + len(CANCEL_CELLS) + len(LOCK_CELLS)
    assert len(RESULTS) == cells, "run the whole module: the table is made of all cells"
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    written = f"{before}{BEGIN}\n\n{table()}\n{END}{after}"
    if os.environ.get("ASYNCSYNC_WRITE_TABLE"):
        PAGE.write_text(written)
    assert comparable(PAGE.read_text()) == comparable(written)


def comparable(page: str) -> str:
    """The table of a page. Whether a killed engine is back by then, as a new one, the machine decides."""
    return page.split(BEGIN)[1].split(END)[0].replace("lost", "tainted")
