"""Two vLLM engines in Ray actors, a trainer in a third: the checks, and what becomes of one when the other fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from torch import nn

import asyncsync
from asyncsync import EngineState, WeightSynchronizer
from asyncsync.testing import CHECKS, Probe, failed, serves
from tests.tiny_model import save_tiny, tiny_model
from tests.vllm_engines import VLLMSubject, in_actor

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


class TrainerActor(asyncsync.TrainerRank):
    """A trainer of the tiny model."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = tiny_model(1)
        super().__init__(self.model)

    def step(self, seed: int) -> None:
        """Change every weight."""
        with torch.no_grad():
            for ours, theirs in zip(self.model.parameters(), tiny_model(seed).parameters(), strict=True):
                ours.copy_(theirs)


Trainer: Any = asyncsync.remote(num_cpus=0)(TrainerActor)


@dataclass
class Fleet:
    """Two engines and a trainer."""

    one: VLLMSubject
    two: VLLMSubject
    trainer: Any
    weights: nn.Module  # what the trainer holds
    seed: int = 100

    async def step(self) -> nn.Module:
        """Have the trainer take a step; returns what it held before."""
        before, self.seed = self.weights, self.seed + 1
        self.weights = tiny_model(self.seed)
        await self.trainer.step.remote(self.seed)
        return before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    tiny = save_tiny(tmp_path_factory.mktemp("tiny"))
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(in_actor(tiny))
        two = await stack.enter_async_context(in_actor(tiny))
        await asyncio.gather(one.generate(one.prompt, 1), two.generate(two.prompt, 1))  # both have started
        fleet = Fleet(one, two, Trainer.remote(), tiny_model(1))
        await fleet.step()
        yield fleet


async def worker(subject: VLLMSubject) -> psutil.Process:
    """The process in which the engine's only rank runs."""
    pid = await subject.actor.pid.remote()  # type: ignore[attr-defined]
    (found,) = [each for each in psutil.Process(pid).children(recursive=True) if "Worker" in each.name()]
    return found


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(fleet: Fleet, check: str) -> None:
    await CHECKS[check](fleet.one)


@pytest.mark.asyncio(loop_scope="module")
async def test_two_engines_and_a_trainer(fleet: Fleet) -> None:
    async with WeightSynchronizer(fleet.trainer, [fleet.one.engine, fleet.two.engine]) as synchronizer:
        for _ in range(5):
            await fleet.step()
            update = await synchronizer.update_weights()
            for subject in (fleet.one, fleet.two):
                await serves(subject, fleet.weights, f"after update {update.version}")
        checksums = [await subject.engine.weights_checksum() for subject in (fleet.one, fleet.two)]
        assert checksums[0] == checksums[1], "by vLLM's own checksums both hold the same"
        await fleet.step()
        await synchronizer.update_weights()
        # What vLLM repacks for a CPU it hashes as nothing; norms and embeddings it does not.
        assert await fleet.one.engine.weights_checksum() != checksums[0]


@pytest.mark.parametrize("policy", ["drain", "abort"])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_fails_in_any_call_leaves_the_other_whole(fleet: Fleet, policy: asyncsync.Policy) -> None:
    probe = Probe(fleet.one.engine)
    async with WeightSynchronizer(fleet.trainer, [probe, fleet.two.engine], policy=policy) as synchronizer:
        await synchronizer.update_weights()
        probe.calls.clear()
        await synchronizer.update_weights()
        for call in sorted(set(probe.calls)):
            before = await fleet.step()

            async def fail(call: str = call) -> None:
                raise RuntimeError(f"planned: {call} fails")

            probe.before[call] = fail
            error = await failed(synchronizer.update_weights())
            assert isinstance(error, asyncsync.EngineError)
            assert "Probe-0" in str(error)
            second = error.outcomes[1]
            assert second.state in (EngineState.UPDATED, EngineState.UNCHANGED), second
            await serves(fleet.two, fleet.weights if second.state is EngineState.UPDATED else before, call)
            assert fleet.two.engine in synchronizer.ready_engines
            await synchronizer.update_weights()
            for subject in (fleet.one, fleet.two):
                await serves(subject, fleet.weights, f"repaired after {call}")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_stalls_is_named_and_repaired_once_it_runs_again(fleet: Fleet) -> None:
    stalled = await worker(fleet.one)
    probe = Probe(fleet.one.engine)
    async with WeightSynchronizer(fleet.trainer, [probe, fleet.two.engine], timeout=12) as synchronizer:
        await synchronizer.update_weights()
        await fleet.step()

        async def stall() -> None:
            stalled.send_signal(signal.SIGSTOP)

        probe.before["receive_weights"] = stall
        try:
            error = await failed(synchronizer.update_weights())
        finally:
            stalled.send_signal(signal.SIGCONT)
        assert isinstance(error, asyncsync.WeightUpdateError)
        assert "Probe-0" in f"{error} {error.__notes__ if hasattr(error, '__notes__') else ''}"
        assert error.outcomes[0].state is EngineState.LOST
        assert error.outcomes[1].state is EngineState.UPDATED
        await serves(fleet.two, fleet.weights, "beside an engine that stalls")
    async with WeightSynchronizer(fleet.trainer, [fleet.one.engine, fleet.two.engine]) as synchronizer:
        await synchronizer.update_weights()
        for subject in (fleet.one, fleet.two):
            await serves(subject, fleet.weights, "after it has run again")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_is_killed_is_named_and_the_other_goes_on(fleet: Fleet) -> None:
    """The last: the engine is gone then."""
    killed = await worker(fleet.one)
    probe = Probe(fleet.one.engine)
    async with WeightSynchronizer(fleet.trainer, [probe, fleet.two.engine]) as synchronizer:
        await synchronizer.update_weights()
        await fleet.step()

        async def kill() -> None:
            os.kill(killed.pid, signal.SIGKILL)

        probe.before["receive_weights"] = kill
        error = await failed(synchronizer.update_weights())
        assert isinstance(error, asyncsync.EngineError)
        assert "Probe-0" in str(error)
        assert "its connection broke" in str(error)
        assert error.outcomes[0].state is EngineState.LOST
        await serves(fleet.two, fleet.weights, "beside an engine that was killed")
        await synchronizer.remove_engine(probe)
        update = await synchronizer.update_weights()
        assert [outcome.engine for outcome in update.outcomes] == ["VLLMEngine-1"]
        await serves(fleet.two, fleet.weights, "without the engine that was killed")
