"""Random histories of a synchronizer, its engines and its readers, and what must hold after each step.

Everything is real but the groups, which copy real bytes within this process (:mod:`tests.memory_link`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import hypothesis
import pytest
import torch
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import asyncsync
from asyncsync import WeightSynchronizer
from asyncsync.connection import TransportChoice
from tests.cancelling import CancelAt
from tests.engines import ToldEngine, failing, flip_a_bit, gate_of
from tests.memory_link import MemoryJoining

T = TypeVar("T")

CALLS = (
    "describe_engine",
    "accept_layout",
    "open_group",
    "join_group",
    "pause_generation",
    "receive_weights",
    "finish_weight_update",
    "resume_generation",
)

SIZES = {"a": (5,), "b": (), "c": (0, 3), "d": (3, 7)}
BUCKET = 40  # bytes: a few buckets

engine_index = strategies.integers(0, 3)


def served(value: float) -> nn.Module:
    """A module whose every element is one value."""
    module = nn.Module()
    for name, shape in SIZES.items():
        module.register_parameter(name, nn.Parameter(torch.full(shape, value)))
    return module


def value_of(engine: ToldEngine) -> float:
    """The one value that an engine's weights have.

    Raises:
        AssertionError: They are torn.
    """
    (value,) = {float(each) for tensor in engine.module.parameters() for each in tensor.detach().reshape(-1)}
    return value


class Histories(RuleBasedStateMachine):
    """Joins, leaves, restarts, updates, failures, cancellations and reads, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.value = 0.0
        self.weights = {name: torch.zeros(shape) for name, shape in SIZES.items()}
        self.engines: list[ToldEngine] = []
        self.values: dict[int, float] = {}  # what each version holds
        self.transport: TransportChoice = "auto"
        self.folder = TemporaryDirectory()
        self.restarted: list[ToldEngine] = []  # and the synchronizer does not know

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to its end; nothing may hang."""

        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.loop.run_until_complete(bounded())

    def new_engine(self, staged: bool) -> ToldEngine:
        return ToldEngine(served(-1.0), staged=staged)

    def new_synchronizer(self) -> WeightSynchronizer:
        return WeightSynchronizer(
            self.weights,
            self.engines,
            bucket_size=BUCKET,
            timeout=300.0,
            on_engine_failure=self.on_failure,
            transport=self.transport,
            folder=self.folder.name if self.transport == "folder" else None,
        )

    def pick(self, index: int) -> ToldEngine:
        return self.engines[index % len(self.engines)]

    def note(self) -> None:
        """Keep what a new version holds, and who still belongs to the synchronizer."""
        if (version := self.synchronizer.weight_version) is not None and version not in self.values:
            self.values[version] = self.value
            self.restarted.clear()
        handles = [member.handle for member in self.synchronizer._membership.members]
        self.engines = [engine for engine in self.engines if engine in handles]
        for engine in self.engines:
            engine.before.clear()
            engine.after.clear()
            vars(engine._asyncsync).pop("_loader_for", None)  # a bit that was not flipped after all
            if engine._asyncsync._loader is not None:
                vars(engine._asyncsync._loader).pop("take", None)

    @initialize(
        staged=strategies.lists(strategies.booleans(), min_size=1, max_size=3),
        on_failure=strategies.sampled_from(["raise", "drop", "abort"]),
        transport=strategies.sampled_from(["shared", "broadcast", "folder"]),
    )
    def begin(
        self, staged: list[bool], on_failure: Literal["raise", "drop", "abort"], transport: TransportChoice
    ) -> None:
        self.on_failure, self.transport = on_failure, transport
        self.engines = [self.new_engine(each) for each in staged]
        self.synchronizer = self.new_synchronizer()

    @rule()
    def step(self) -> None:
        """The trainer takes one."""
        self.value += 1.0
        for tensor in self.weights.values():
            tensor.fill_(self.value)

    @rule()
    def update(self) -> None:
        """One without a fault reaches every engine, whatever happened before."""
        update = self.run(self.synchronizer.update_weights())
        self.note()
        assert update.version == self.synchronizer.weight_version
        assert [value_of(engine) for engine in self.engines] == [self.value] * len(self.engines)
        assert self.synchronizer.ready_engines == tuple(self.engines)

    @rule(
        faults=strategies.dictionaries(engine_index, strategies.sampled_from(CALLS), min_size=1, max_size=2),
        after=strategies.booleans(),
        wrong=strategies.booleans(),
    )
    def failing_update(self, faults: dict[int, str], after: bool, wrong: bool) -> None:
        """Calls of some engines fail, before or after they have done what was asked; or a bit is flipped."""
        for index, call in faults.items():
            engine = self.pick(index)
            if wrong and call == "receive_weights":
                flip_a_bit(engine)
            else:
                (engine.after if after else engine.before)[call] = failing(OSError("no"))
        with suppress(asyncsync.WeightUpdateError):
            self.run(self.synchronizer.update_weights())
        self.note()

    @rule(
        fault=strategies.none() | strategies.tuples(engine_index, strategies.sampled_from(CALLS)),
        cancelled=strategies.booleans(),
    )
    def started_update(self, fault: tuple[int, str] | None, cancelled: bool) -> None:
        """The trainer takes a step as soon as its weights are copied; engines get the copy, or nothing."""
        was = self.value
        if fault is not None:
            self.pick(fault[0]).before[fault[1]] = failing(OSError("no"))

        async def started() -> None:
            update = await self.synchronizer.start_update()
            self.step()
            await (update.cancel() if cancelled else update)

        with suppress(asyncsync.WeightUpdateError):
            self.run(started())
        now, self.value = self.value, was
        self.note()
        self.value = now
        if fault is None and not cancelled:
            assert [value_of(engine) for engine in self.engines] == [was] * len(self.engines)

    @rule(at=strategies.integers(0, 12), when=strategies.sampled_from(["waiting", "handed over"]))
    def cancelled_update(self, at: int, when: Literal["waiting", "handed over"]) -> None:
        """It is cancelled at one of its awaits."""

        async def cancelled() -> None:
            update = CancelAt(self.synchronizer._update(), at, when)

            async def wait() -> None:
                await update

            await asyncio.wait([asyncio.create_task(wait())])

        self.run(cancelled())
        self.note()

    @rule(index=engine_index, call=strategies.sampled_from(CALLS), others=strategies.integers(1, 3))
    def one_of_several_callers_is_cancelled(self, index: int, call: str, others: int) -> None:
        """While an engine is in a call; the others get their update."""

        async def several() -> None:
            arrived, go_on = asyncio.Event(), asyncio.Event()

            async def wait() -> None:
                arrived.set()
                await go_on.wait()

            self.pick(index).before[call] = wait
            updates = [asyncio.create_task(self.synchronizer.update_weights()) for _ in range(others + 1)]
            came = asyncio.create_task(arrived.wait())
            await asyncio.wait([came, updates[0]], return_when=asyncio.FIRST_COMPLETED)
            came.cancel()
            updates[0].cancel()
            go_on.set()
            await asyncio.wait(updates)
            for update in updates[1:]:
                assert update.result().version == self.synchronizer.weight_version

        self.run(several())
        self.note()

    @rule(index=engine_index, call=strategies.sampled_from(CALLS))
    def reads_during_an_update(self, index: int, call: str) -> None:
        """Readers of every engine come while one of them is in a call; each meets a whole version."""
        seen: list[tuple[int, int | None, float]] = []

        async def read(engine: ToldEngine) -> None:
            with suppress(asyncsync.NotReadyError, asyncsync.TaintedEngineError):
                async with self.synchronizer.generation(engine) as version, engine.generating() as own:
                    seen.append((version, own, value_of(engine)))

        async def during() -> None:
            readers: list[asyncio.Task[None]] = []

            async def let_read() -> None:
                readers.extend(asyncio.create_task(read(engine)) for engine in self.engines)
                for _ in range(3):
                    await asyncio.sleep(0)

            self.pick(index).before[call] = let_read
            await self.synchronizer.update_weights()
            if readers:
                await asyncio.wait(readers)
                assert not [task.exception() for task in readers if task.exception() is not None]

        self.run(during())
        self.note()
        for version, own, value in seen:
            assert own == version, "read at dispatch, and nothing changes under a reader"
            assert self.values[version] == value

    @precondition(lambda self: len(self.engines) < 4)
    @rule(staged=strategies.booleans(), updating=strategies.booleans())
    def join(self, staged: bool, updating: bool) -> None:
        """An engine joins, alone or while an update is under way."""
        joiner, version = self.new_engine(staged), self.synchronizer.weight_version

        async def joined() -> None:
            adding = asyncio.create_task(self.synchronizer.add_engine(joiner))
            if updating or not self.can_give:
                await asyncio.wait([asyncio.create_task(self.synchronizer.update_weights()), adding])
            await adding

        self.run(joined())
        self.engines.append(joiner)
        self.note()
        if version is not None:
            assert joiner in self.synchronizer.ready_engines

    @property
    def can_give(self) -> bool:
        """Whether a joiner gets the version without an update; else it waits for one."""
        ready = [engine for engine in self.synchronizer.ready_engines if engine not in self.restarted]
        return self.synchronizer.weight_version is None or bool(ready)

    @precondition(lambda self: len(self.engines) > 1)
    @rule(index=engine_index, updating=strategies.booleans())
    def leave(self, index: int, updating: bool) -> None:
        """An engine leaves, alone or while an update is under way."""
        leaver = self.pick(index)

        async def left() -> None:
            update = asyncio.create_task(self.synchronizer.update_weights()) if updating else None
            await asyncio.sleep(0)
            await self.synchronizer.remove_engine(leaver)
            if update is not None:
                await update

        self.run(left())
        self.note()
        assert leaver not in self.engines

    @rule(index=engine_index)
    def restart(self, index: int) -> None:
        """An engine's process is another one, with other weights."""
        engine = self.pick(index)
        staged = engine._asyncsync._staged
        for seat in engine._asyncsync.receiver.seats.values():
            seat.close()
        asyncsync.ModuleEngine.__init__(engine, served(-1.0), staged=staged)
        self.restarted.append(engine)
        engine._asyncsync.record.taint("its process was restarted, and holds weights of no version")
        self.forget()

    @rule()
    def another_conductor_takes_over(self) -> None:
        """The synchronizer is closed, and a new one finds the engines as they are."""
        version = self.synchronizer.weight_version
        self.run(self.synchronizer.aclose())
        self.synchronizer = self.new_synchronizer()
        self.run(self.synchronizer.connect())
        taken = self.synchronizer.weight_version
        assert taken is None or taken <= (version or 0)
        self.forget()
        self.note()

    def forget(self) -> None:
        """Numbers that nobody knows any more, of engines that were restarted or have left, may come again."""
        versions = (engine._asyncsync.record.version for engine in self.engines)
        known = max(version or 0 for version in (self.synchronizer.weight_version, *versions))
        self.values = {number: value for number, value in self.values.items() if number <= known}

    @invariant()
    def all_is_whole(self) -> None:
        """Nothing is held, nobody serves what is torn, and the version does not go back."""
        if not self.engines:
            return
        assert "free" in repr(self.synchronizer._lock)
        assert not self.synchronizer._busy.locked()
        version = self.synchronizer.weight_version
        if self.transport == "folder" and version is not None:
            published = asyncsync.read_weights(self.folder.name)
            found = {float(each) for tensor in published.tensors.values() for each in tensor.reshape(-1)}
            assert (published.version, found) == (version, {self.values[version]})
        for engine in self.engines:
            status = self.run(asyncsync.ModuleEngine.describe_engine(engine))
            assert engine._asyncsync.receiver.session is None
            assert gate_of(engine).is_open == (status.tainted is None and not status.paused)
            if status.tainted is None and status.weight_version is not None:
                assert value_of(engine) == self.values[status.weight_version]
            if engine in self.synchronizer.ready_engines and engine not in self.restarted:
                assert status.weight_version == version
                assert gate_of(engine).is_open
        if version is not None:
            assert version <= max(self.values)

    def teardown(self) -> None:
        """In the end, one more update reaches all; and nothing is left running."""
        if self.engines:
            self.update()
            self.run(self.synchronizer.aclose())
            left = asyncio.all_tasks(self.loop)
            assert not left, left
        self.loop.close()
        self.folder.cleanup()


@pytest.fixture(autouse=True)
def groups_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.transports.seat.Joining", MemoryJoining)


def run(examples: int, steps: int) -> None:
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.stateful.run_state_machine_as_test(Histories, settings=settings)


def test_histories() -> None:
    run(20, 15)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_many_long_histories() -> None:
    run(150, 40)
