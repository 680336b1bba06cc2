"""The checks that every engine must pass, on transformers' continuous batching in Ray actors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import nn

import asyncsync
from asyncsync import Completion, TransformersEngine, WeightVersionSpan
from asyncsync.messages import Policy
from asyncsync.testing import CHECKS
from tests.tiny_model import greedy_continued, greedy_recomputed, prompt_of, tiny_model

pytestmark = [pytest.mark.models, pytest.mark.ray]

PROMPT = prompt_of(70)


class EngineActor(TransformersEngine):
    """An engine in an actor of its own."""

    def __init__(self, staged: bool) -> None:
        torch.set_num_threads(1)
        super().__init__(tiny_model(99), staged=staged)


Engine: Any = asyncsync.remote(num_cpus=0)(EngineActor)


class TransformersSubject:
    """An engine of transformers', put to the checks."""

    prompt = PROMPT
    tokens = 240
    policies: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
    tells_shapes = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.trainer = tiny_model(1)

    async def generate(
        self, prompt: Sequence[int], count: int, started: Callable[[], None] | None = None
    ) -> Completion:
        tokens: list[int] = []
        spans: list[WeightVersionSpan] = []
        reason: Any = None
        async for reference in self.engine.stream.remote(list(prompt), max_new_tokens=count):
            part = await reference
            start, end = len(tokens), len(tokens) + len(part.tokens)
            tokens += part.tokens
            reason = part.finish_reason
            if spans and spans[-1].version == part.weight_version:
                start = spans.pop().start
            if start < end:
                spans.append(WeightVersionSpan(version=part.weight_version, start=start, end=end))
            if started is not None and len(tokens) > 2:
                started()
        return Completion(tokens=tuple(tokens), finish_reason=reason, weight_versions=tuple(spans))

    def expected(self, old: nn.Module, new: nn.Module, switch: int, count: int, policy: Policy) -> list[int]:
        switched = greedy_continued if policy == "continue" else greedy_recomputed
        return switched(old, new, PROMPT, switch, count)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False], ids=["staged", "in place"])
async def subject(request: Any, ray_cluster: None) -> AsyncIterator[TransformersSubject]:
    import ray

    actor = Engine.remote(request.param)
    yield TransformersSubject(actor)
    ray.kill(actor)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(subject: TransformersSubject, check: str) -> None:
    await CHECKS[check](subject)
