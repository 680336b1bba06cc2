"""The same updates with a real language model: AdamW steps on text, while two engines answer questions.

The engines begin with random weights; all they ever know comes to them through updates. They answer all the time,
several questions at once. After each update, both engines and the trainer answer the same questions greedily, and must
give the same answers, token for token.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import anyio
import torch

from asyncsync import cluster
from asyncsync.demo.actors import running
from asyncsync.demo.language_model import (
    ModelFiles,
    Tokenizer,
    Tokens,
    backpropagate,
    build_model,
    generate_greedily,
    load_model,
)
from asyncsync.demo.measures import StallMeter, UpdateLog, first_and_last, milliseconds
from asyncsync.demo.progress import Observer, Step, Summary
from asyncsync.engines import Completion, TransformersEngine, WeightVersionSpan
from asyncsync.report import WeightUpdate
from asyncsync.synchronizer import WeightSynchronizer
from asyncsync.trainer import TrainerRank

STEPS = 4
ENGINES = 2
GAIN_WANTED = 0.01
LEARNING_RATE = 5e-5
ANSWER_LENGTH = 16

LESSONS = (
    ("Who are you?", "I am a small model, and my weights have just been updated."),
    ("What is a weight update?", "A transaction: every engine gets the new version, or none does."),
)
"""Questions that the engines are asked, and the answers that the trainer learns."""


@cluster.remote(num_cpus=0.5)
class LanguageEngine(TransformersEngine):
    """A rollout engine that serves a language model."""

    def __init__(self, files: ModelFiles, seed: int) -> None:
        torch.set_num_threads(1)
        super().__init__(build_model(files, seed=seed))


@cluster.remote(num_cpus=0.5)
class LanguageTrainer(TrainerRank):
    """The trainer, one rank."""

    def __init__(self, files: ModelFiles) -> None:
        torch.set_num_threads(1)
        self._model = load_model(files)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        super().__init__(self._model)

    def train_step(self, texts: list[Tokens]) -> float:
        """Take one AdamW step on these texts; returns the loss before it, in nats a token."""
        self._optimizer.zero_grad()
        loss = backpropagate(self._model, texts)
        self._optimizer.step()
        return loss

    def generate(self, prompt: Tokens, end: int | None) -> Tokens:
        """Continue a prompt greedily, with the weights that are sent."""
        return generate_greedily(self._model, prompt, length=ANSWER_LENGTH, end=end)


async def run(files: ModelFiles, *, steps: int = STEPS, seed: int = 0, observer: Observer) -> Summary:
    """Run the loop; Ray must be connected.

    Args:
        files: The model; see :func:`~asyncsync.demo.language_model.find_model`.
        steps: AdamW steps, with a weight update after each.
        seed: Of the engines' random first weights.
        observer: Who is told. The reward it is told of is minus the loss.

    Raises:
        ValueError: ``steps`` is not positive.
        AsyncSyncError: An update failed.
    """
    if steps < 1:
        raise ValueError(f"steps must be positive, not {steps}")
    start = time.perf_counter()
    observer.stage(f"loading {files.name} in a trainer, and two rollout engines without its weights")
    wanted = [(LanguageTrainer, (files,)), *((LanguageEngine, (files, seed + rank)) for rank in range(ENGINES))]
    async with running(*wanted) as (trainer, *engines), WeightSynchronizer(trainer, engines) as synchronizer:
        tokenizer = await asyncio.to_thread(Tokenizer, files)
        await synchronizer.connect()
        loop = _Loop(synchronizer, trainer, engines, tokenizer, observer)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.stalls.watch)
            observer.stage("giving the engines their first weights")
            await loop.log.update()
            await loop.compare_answers(loop.log.updates[-1])
            for engine in engines:
                for prompt in loop.prompts:
                    tasks.start_soon(loop.generate, engine, prompt)
            await loop.train(steps)
            tasks.cancel_scope.cancel()
    return loop.summary(seconds=time.perf_counter() - start)


class _Loop:
    """Training and generation, side by side."""

    def __init__(
        self,
        synchronizer: WeightSynchronizer,
        trainer: Any,
        engines: Sequence[Any],
        tokenizer: Tokenizer,
        observer: Observer,
    ) -> None:
        self._synchronizer = synchronizer
        self._trainer = trainer
        self._engines = engines
        self._tokenizer = tokenizer
        self._observer = observer
        self.prompts = [tokenizer.question(question) for question, _ in LESSONS]
        self._texts = [tokenizer.dialogue(question, answer) for question, answer in LESSONS]
        self._rewards: list[float] = []
        self._greedy_equal = True
        self._generated = 0
        self.log = UpdateLog(synchronizer, engines)
        self.stalls = StallMeter()

    async def generate(self, engine: Any, prompt: Tokens) -> None:
        while True:
            async with self._synchronizer.generation() as dispatched:
                completion = await self._ask(engine, prompt)
            versions = [span.version for span in completion.weight_versions]
            if versions != [dispatched]:
                raise RuntimeError(f"dispatched with version {dispatched}, but generated with {versions}")
            self._generated += 1

    async def _ask(self, engine: Any, prompt: Tokens) -> Completion:
        """Let an engine continue a prompt."""
        end = self._tokenizer.end
        completion: Completion = await engine.generate.remote(
            prompt, max_new_tokens=ANSWER_LENGTH, stop_token_ids=[] if end is None else [end]
        )
        return completion

    async def train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            loss: float = await self._trainer.train_step.remote(self._texts)
            update = await self.log.update()
            answers = await self.compare_answers(update)
            self._rewards.append(-loss)
            asked = (step - 1) % len(LESSONS)
            self._observer.step(
                Step(
                    step=step,
                    steps=steps,
                    reward=-loss,
                    version=update.version,
                    staleness=None,
                    update_ms=milliseconds(update, "total"),
                    drain_ms=milliseconds(update, "drain"),
                    pause_ms=milliseconds(update, "paused"),
                    stall_ms=self.stalls.longest_ms,
                    digests_agree=self.log.digests_agree,
                    greedy_equal=self._greedy_equal,
                    prompt=LESSONS[asked][0],
                    answer=self._tokenizer.decode(answers[asked]),
                )
            )

    async def compare_answers(self, update: WeightUpdate) -> list[Tokens]:
        """Let everyone answer every question, and compare; returns the trainer's answers."""
        return await asyncio.gather(*(self._compare(prompt, update.version) for prompt in self.prompts))

    async def _compare(self, prompt: Tokens, version: int) -> Tokens:
        own: Tokens
        own, *served = await asyncio.gather(
            self._trainer.generate.remote(prompt, self._tokenizer.end),
            *(self._ask(engine, prompt) for engine in self._engines),
        )
        whole = WeightVersionSpan(version=version, start=0, end=len(own))
        if any((answer.tokens, answer.weight_versions) != (own, (whole,)) for answer in served):
            self._greedy_equal = False
        return own

    def summary(self, *, seconds: float) -> Summary:
        first, last = first_and_last(self._rewards)
        return Summary(
            updates=len(self.log.updates),
            update_bytes=self.log.updates[-1].bytes,
            reward_first=first,
            reward_last=last,
            gain_wanted=GAIN_WANTED if len(self._rewards) >= STEPS else -math.inf,
            staleness_max=None,
            generated=self._generated,
            digests_agree=self.log.digests_agree,
            greedy_equal=self._greedy_equal,
            update_ms_median=self.log.median_ms("total"),
            pause_ms_median=self.log.median_ms("paused"),
            loop_stall_ms=self.stalls.longest_ms,
            seconds=seconds,
        )
