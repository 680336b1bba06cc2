"""The fully-async loop: engines generate all the time, a trainer learns, weights follow after each step.

``run`` is what a training script looks like with this library: :func:`_generate` runs several times an engine and
never waits for the trainer, only for a place in the queue; :func:`_train` takes what is there, steps and updates. How
old a rollout may be when it is trained on is bounded twice, by the queue's length and by a limit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import anyio
import torch

from asyncsync import cluster
from asyncsync.demo.actors import running
from asyncsync.demo.measures import StallMeter, UpdateLog, first_and_last, milliseconds
from asyncsync.demo.progress import Observer, Step, Summary
from asyncsync.demo.reversal import Policy, Prompt, Rollout, draw_prompts, generate, join_rollouts, policy_gradient_loss
from asyncsync.engines import ModuleEngine
from asyncsync.synchronizer import WeightSynchronizer
from asyncsync.trainer import TrainerRank

STEPS = 100
ENGINES = 2
GAIN_WANTED = 0.3

PROMPTS = 4
"""Prompts in a rollout."""
GROUP = 8
"""Answers to each."""
ROLLOUTS = 8
"""Rollouts that a step trains on."""
IN_FLIGHT = 2
"""Requests an engine has at any time, so that it finds the next one when it is done with one."""
QUEUE = 8
"""Rollouts that may wait to be trained on."""
MAX_STALENESS = 4
"""Versions a rollout may be behind when it is trained on; an older one is thrown away."""
LEARNING_RATE = 3e-3


@cluster.remote(num_cpus=0.5)
class PolicyEngine(ModuleEngine):
    """A rollout engine that serves the policy."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._policy = Policy()
        super().__init__(self._policy)

    async def generate(self, prompts: list[Prompt]) -> Rollout:
        """Answer every prompt GROUP times."""
        async with self.generating() as version:
            assert version is not None
            return generate(self._policy, prompts, group=GROUP, version=version)


@cluster.remote(num_cpus=0.5)
class PolicyTrainer(TrainerRank):
    """The trainer, one rank."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._policy = Policy()
        self._optimizer = torch.optim.Adam(self._policy.parameters(), LEARNING_RATE)
        super().__init__(self._policy)

    def train_step(self, rollouts: list[Rollout]) -> float:
        """Take one step of policy gradient; returns the mean reward."""
        batch = join_rollouts(rollouts)
        self._optimizer.zero_grad()
        policy_gradient_loss(self._policy, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(batch.rewards.mean())


async def run(*, steps: int = STEPS, seed: int = 0, observer: Observer) -> Summary:
    """Run the loop; Ray must be connected.

    Args:
        steps: Training steps, with a weight update after each.
        seed: Of the prompts, the policy's first weights and the engines' draws. Which rollouts a step gets depends on
            timing, so figures differ a little from run to run all the same.
        observer: Who is told.

    Raises:
        ValueError: ``steps`` is not positive.
        AsyncSyncError: An update failed.
    """
    if steps < 1:
        raise ValueError(f"steps must be positive, not {steps}")
    start = time.perf_counter()
    observer.stage("starting a trainer and two rollout engines")
    wanted = [(PolicyTrainer, (seed,)), *((PolicyEngine, (seed + 1 + rank,)) for rank in range(ENGINES))]
    async with running(*wanted) as (trainer, *engines), WeightSynchronizer(trainer, engines) as synchronizer:
        loop = _Loop(synchronizer, trainer, engines, Random(seed), observer)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.stalls.watch)
            observer.stage("giving the engines their first weights")
            await loop.log.update()
            for engine in engines:
                for _ in range(IN_FLIGHT):
                    tasks.start_soon(loop.generate, engine)
            await loop.train(steps)
            tasks.cancel_scope.cancel()
    return loop.summary(seconds=time.perf_counter() - start)


class _Loop:
    """The two halves of the loop, and the queue between them."""

    def __init__(
        self,
        synchronizer: WeightSynchronizer,
        trainer: Any,
        engines: Sequence[Any],
        random: Random,
        observer: Observer,
    ) -> None:
        self._synchronizer = synchronizer
        self._trainer = trainer
        self._random = random
        self._observer = observer
        self._rollouts: asyncio.Queue[Rollout] = asyncio.Queue(QUEUE)
        self._rewards: list[float] = []
        self._staleness_max = 0
        self._generated = 0
        self.log = UpdateLog(synchronizer, engines)
        self.stalls = StallMeter()

    async def generate(self, engine: Any) -> None:
        while True:
            prompts = draw_prompts(self._random, PROMPTS)
            async with self._synchronizer.generation() as version:
                rollout: Rollout = await engine.generate.remote(prompts)
            if rollout.version != version:
                raise RuntimeError(f"dispatched with version {version}, but generated with {rollout.version}")
            self._generated += PROMPTS * GROUP
            if self._rollouts.full():
                self._rollouts.get_nowait()  # the oldest makes room: engines never wait for the trainer
            self._rollouts.put_nowait(rollout)

    async def train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            batch, staleness = await self._next_batch()
            reward: float = await self._trainer.train_step.remote(batch)
            update = await self.log.update()
            self._rewards.append(reward)
            self._staleness_max = max(self._staleness_max, staleness)
            prompt, answer = batch[-1].example()
            self._observer.step(
                Step(
                    step=step,
                    steps=steps,
                    reward=reward,
                    version=update.version,
                    staleness=staleness,
                    update_ms=milliseconds(update, "total"),
                    drain_ms=milliseconds(update, "drain"),
                    pause_ms=milliseconds(update, "paused"),
                    stall_ms=self.stalls.longest_ms,
                    digests_agree=self.log.digests_agree,
                    greedy_equal=None,
                    prompt=prompt,
                    answer=answer,
                )
            )

    async def _next_batch(self) -> tuple[list[Rollout], int]:
        """The next rollouts that are not too old, and how many versions the oldest is behind."""
        now = self._synchronizer.weight_version or 0
        batch: list[Rollout] = []
        while len(batch) < ROLLOUTS:
            rollout = await self._rollouts.get()
            if now - rollout.version <= MAX_STALENESS:
                batch.append(rollout)
        return batch, max(now - rollout.version for rollout in batch)

    def summary(self, *, seconds: float) -> Summary:
        first, last = first_and_last(self._rewards)
        return Summary(
            updates=len(self.log.updates),
            update_bytes=self.log.updates[-1].bytes,
            reward_first=first,
            reward_last=last,
            gain_wanted=GAIN_WANTED if len(self._rewards) >= STEPS else -math.inf,
            staleness_max=self._staleness_max,
            generated=self._generated,
            digests_agree=self.log.digests_agree,
            greedy_equal=None,
            update_ms_median=self.log.median_ms("total"),
            pause_ms_median=self.log.median_ms("paused"),
            loop_stall_ms=self.stalls.longest_ms,
            seconds=seconds,
        )
