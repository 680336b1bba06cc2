"""SGLang engines of a tiny model, put to the checks: in this process, in Ray actors, behind HTTP."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from torch import nn

import asyncsync
from asyncsync import Completion, WeightVersionSpan
from asyncsync.messages import Policy
from tests import sglang_bed as bed
from tests.tiny_model import greedy_continued, greedy_recomputed, prompt_of, tiny_model

PROMPT = prompt_of(64)
TOKENS = 240

EVERY_POLICY: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
WITH_RADIX_CACHE: tuple[Policy, ...] = ("drain", "abort", "recompute")
WITHOUT_RADIX_CACHE = {"disable_radix_cache": True, "disable_overlap_schedule": True}
"""What ``continue`` needs."""


def asked_for(prompt: Sequence[int], count: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}


def completion(answers: Sequence[dict[str, Any]]) -> Completion:
    """What a request came to, from all that was streamed of it."""
    last = answers[-1]["meta_info"]
    tokens = max((tuple(answer.get("output_ids") or ()) for answer in answers), key=len)
    spans = (version_span(**span) for span in last.get("weight_versions") or ())
    reason: Any = last["finish_reason"]["type"]
    return Completion(tokens=tokens, finish_reason=reason, weight_versions=tuple(spans))


def version_span(version: str, start: int, end: int) -> WeightVersionSpan:
    return WeightVersionSpan(version=int(version) if version.isdigit() else None, start=start, end=end)


async def ask(engine: Any, prompt: Sequence[int], count: int, started: Callable[[], None] | None) -> Completion:
    """Have an ``sglang.Engine`` of this process generate greedily."""
    answers: list[dict[str, Any]] = []
    async for answer in await engine.async_generate(**asked_for(prompt, count)):
        answers.append(answer)
        if started is not None and len(answer.get("output_ids") or ()) > 2:
            started()
    return completion(answers)


async def ask_server(url: str, prompt: Sequence[int], count: int, started: Callable[[], None] | None) -> Completion:
    """Have a server generate greedily."""
    answers: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {bed.API_KEY}"}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=120) as client,
        client.stream("POST", f"{url}/generate", json=asked_for(prompt, count), headers=headers) as response,
    ):
        assert response.is_success, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answers.append(json.loads(line.removeprefix("data: ")))
                if started is not None and len(answers[-1].get("output_ids") or ()) > 2:
                    started()
    return completion(answers)


class RolloutActor(asyncsync.SGLangActor):
    """An engine in an actor, whose requests tell when they have begun."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._started: dict[str, asyncio.Event] = {}

    async def ask(self, prompt: list[int], count: int, name: str) -> Completion:
        return await ask(self.engine, prompt, count, self._started.setdefault(name, asyncio.Event()).set)

    async def has_started(self, name: str) -> None:
        await self._started.setdefault(name, asyncio.Event()).wait()


class SlimeActor:
    """An actor with the methods of slime's, and sessions: it posts to a server of its own.

    Args:
        url: The server's.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def _post(self, call: str, **fields: Any) -> Any:
        headers = {"Authorization": f"Bearer {bed.API_KEY}"}
        response = httpx.post(f"{self._url}/{call}", json=fields, headers=headers, timeout=60, trust_env=False)
        return response.raise_for_status().json()

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Any:
        fields = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset}
        fields |= {"world_size": world_size, "group_name": group_name, "backend": backend}
        return self._post("init_weights_update_group", **fields)

    def destroy_weights_update_group(self, group_name: str) -> Any:
        return self._post("destroy_weights_update_group", group_name=group_name)

    def begin_weight_update(self) -> Any:
        return self._post("begin_weight_update")

    def end_weight_update(self) -> Any:
        return self._post("end_weight_update")

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> Any:
        fields = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
        fields |= {"flush_cache": flush_cache, "weight_version": weight_version}
        return self._post("update_weights_from_distributed", **fields)

    def pause_generation(self) -> Any:
        return self._post("pause_generation")

    def continue_generation(self) -> Any:
        return self._post("continue_generation")

    def flush_cache(self) -> None:
        httpx.post(f"{self._url}/flush_cache", headers={"Authorization": f"Bearer {bed.API_KEY}"}, trust_env=False)

    def get_weight_version(self) -> Any:
        headers = {"Authorization": f"Bearer {bed.API_KEY}"}
        response = httpx.get(f"{self._url}/model_info", headers=headers, trust_env=False)
        return response.raise_for_status().json()["weight_version"]


class SlimeHandle:
    """Calls such an actor's methods as Ray would: beside what this process does.

    Args:
        url: The server's.
    """

    def __init__(self, url: str) -> None:
        self._actor = SlimeActor(url)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=functools.partial(asyncio.to_thread, method), function=method)


class SGLangSubject:
    """An engine of SGLang's, put to the checks.

    Args:
        engine: The adapter.
        ask: Generates with the engine.
        policies: What it can do with requests in flight.
        handle: What the adapter is of.
    """

    prompt = PROMPT
    tokens = TOKENS
    tells_shapes = False

    def __init__(self, engine: asyncsync.SGLangEngine, ask: Any, policies: tuple[Policy, ...], handle: Any) -> None:
        self.engine = engine
        self.trainer = tiny_model(1)
        self.policies = policies
        self.handle = handle
        self.processes = 0  # of a server: its process group
        self._ask = ask

    async def generate(
        self, prompt: Sequence[int], count: int, started: Callable[[], None] | None = None
    ) -> Completion:
        result: Completion = await self._ask(prompt, count, started)
        return result

    def expected(self, old: nn.Module, new: nn.Module, switch: int, count: int, policy: Policy) -> list[int]:
        switched = greedy_continued if policy == "continue" else greedy_recomputed
        return switched(old, new, list(PROMPT), switch, count)


@asynccontextmanager
async def in_process(path: Path, *, tp: int = 1, **more: Any) -> AsyncIterator[SGLangSubject]:
    """An engine of this process."""
    async with bed.in_process(path, tp=tp, **more) as engine:

        async def ask_here(*args: Any) -> Completion:
            return await ask(engine, *args)

        policies = EVERY_POLICY if "disable_radix_cache" in more else WITH_RADIX_CACHE
        yield SGLangSubject(asyncsync.SGLangEngine(engine), ask_here, policies, engine)


@asynccontextmanager
async def in_actor(path: Path, *, tp: int = 1, **more: Any) -> AsyncIterator[SGLangSubject]:
    """An engine in a Ray actor."""
    async with bed.in_actor(path, tp=tp, actor_class=RolloutActor, **more) as actor:
        names = (f"request-{number}" for number in itertools.count())

        async def ask_actor(prompt: Sequence[int], count: int, started: Callable[[], None] | None) -> Completion:
            name = next(names)
            answer = actor.ask.remote(list(prompt), count, name)
            if started is not None:
                await actor.has_started.remote(name)
                started()
            result: Completion = await answer
            return result

        policies = EVERY_POLICY if "disable_radix_cache" in more else WITH_RADIX_CACHE
        yield SGLangSubject(asyncsync.SGLangEngine(actor), ask_actor, policies, actor)


@asynccontextmanager
async def over_http(path: Path, *, tp: int = 1, **more: Any) -> AsyncIterator[SGLangSubject]:
    """An engine behind HTTP, that wants an API key."""
    async with bed.server(path, tp=tp, **more) as (url, processes):

        async def ask_url(*args: Any) -> Completion:
            return await ask_server(url, *args)

        policies = EVERY_POLICY if "disable_radix_cache" in more else WITH_RADIX_CACHE
        engine = asyncsync.SGLangEngine(url, api_key=bed.API_KEY)
        subject = SGLangSubject(engine, ask_url, policies, url)
        subject.processes = processes
        yield subject
        await engine.aclose()
