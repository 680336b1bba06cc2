"""vLLM engines of a tiny model to test with: in this process, in Ray actors, behind HTTP. And what they must give."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from torch import nn

import asyncsync
from asyncsync import Completion, WeightVersionSpan
from asyncsync.messages import Policy
from tests.tiny_model import greedy_continued, greedy_recomputed, prompt_of, tiny_model

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""Where the ranks of a tensor parallel engine run; vLLM cannot tell by itself on a machine of one NUMA node."""

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.1,
    "weight_transfer_config": {"backend": "asyncsync"},
}
API_KEY = "secret"
START_TIMEOUT = 240.0
PROMPT = prompt_of(140)  # longer than a block of vLLM's cache on CPUs, which holds 128 tokens
TOKENS = 240


def new_llm(path: Path | str, **settings: Any) -> Any:
    """An ``AsyncLLM`` of this process and event loop."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(path), **SETTINGS | settings))


def version_span(version: str, start: int, end: int) -> WeightVersionSpan:
    """A span as vLLM tells it: its versions are labels, of which the first is a word."""
    return WeightVersionSpan(version=int(version) if version.isdigit() else None, start=start, end=end)


async def ask(llm: Any, prompt: Sequence[int], count: int, started: Callable[[], None] | None, name: str) -> Completion:
    """Have an ``AsyncLLM`` generate greedily."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
    output = None
    async for answer in llm.generate({"prompt_token_ids": list(prompt)}, sampling, name):
        output = answer.outputs[0]
        if started is not None and len(output.token_ids) > 2:
            started()
    assert output is not None
    spans = (version_span(span.version, span.start, span.end) for span in output.weight_versions or ())
    reason: Any = output.finish_reason
    return Completion(tokens=tuple(output.token_ids), finish_reason=reason, weight_versions=tuple(spans))


class RolloutActor(asyncsync.VLLMActor):
    """An engine in an actor of its own."""

    def __init__(self, path: str, **settings: Any) -> None:
        super().__init__(new_llm(path, **settings))
        self._started: dict[str, asyncio.Event] = {}

    async def generate(self, prompt: list[int], count: int, name: str) -> Completion:
        started = self._started.setdefault(name, asyncio.Event())
        return await ask(self.llm, prompt, count, started.set, name)

    async def has_started(self, name: str) -> None:
        await self._started.setdefault(name, asyncio.Event()).wait()

    async def pid(self) -> int:
        return os.getpid()

    async def shutdown(self) -> None:
        self.llm.shutdown()


Rollout: Any = ray.remote(num_cpus=0)(RolloutActor)


class VLLMSubject:
    """An engine of vLLM's, put to the checks.

    Args:
        engine: The adapter.
        ask: Generates with the engine.
        policies: What it can do with requests in flight.
    """

    prompt = PROMPT
    tokens = TOKENS
    tells_shapes = True

    def __init__(self, engine: asyncsync.VLLMEngine, ask: Any, policies: tuple[Policy, ...]) -> None:
        self.engine = engine
        self.trainer = tiny_model(1)
        self.policies = policies
        self._ask = ask
        self._names = (f"request-{number}" for number in itertools.count())

    async def generate(
        self, prompt: Sequence[int], count: int, started: Callable[[], None] | None = None
    ) -> Completion:
        generated: Completion = await self._ask(prompt, count, started, next(self._names))
        return generated

    def expected(self, old: nn.Module, new: nn.Module, switch: int, count: int, policy: Policy) -> list[int]:
        switched = greedy_continued if policy == "continue" else greedy_recomputed
        return switched(old, new, list(PROMPT), switch, count)


EVERY_POLICY: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
WITH_PREFIX_CACHE: tuple[Policy, ...] = ("drain", "abort", "recompute")


@asynccontextmanager
async def in_process(
    path: Path, *, backend: Any = "asyncsync", ranks: int = 1, prefix_cache: bool = True, **settings: Any
) -> AsyncIterator[VLLMSubject]:
    """An engine in this process, of one rank or more."""
    os.environ.update(ENVIRONMENT | (TWO_CORES if ranks == 2 else {}))
    llm = new_llm(path, tensor_parallel_size=ranks, enable_prefix_caching=prefix_cache, **settings)
    try:

        async def ask_here(*args: Any) -> Completion:
            return await ask(llm, *args)

        policies = WITH_PREFIX_CACHE if prefix_cache else EVERY_POLICY
        subject = VLLMSubject(asyncsync.VLLMEngine(llm, backend=backend), ask_here, policies)
        yield subject
        await subject.engine.aclose()
    finally:
        llm.shutdown()
        for name in TWO_CORES:
            os.environ.pop(name, None)


@asynccontextmanager
async def in_actor(path: Path, **settings: Any) -> AsyncIterator[VLLMSubject]:
    """An engine in a Ray actor; ``subject.actor`` is its handle."""
    actor = Rollout.options(runtime_env={"env_vars": ENVIRONMENT}).remote(str(path), **settings)

    async def ask_actor(prompt: Sequence[int], count: int, started: Callable[[], None] | None, name: str) -> Completion:
        answer = actor.generate.remote(list(prompt), count, name)
        if started is not None:
            await actor.has_started.remote(name)
            started()
        return await answer  # type: ignore[no-any-return]

    subject = VLLMSubject(asyncsync.VLLMEngine(actor), ask_actor, WITH_PREFIX_CACHE)
    subject.actor = actor  # type: ignore[attr-defined]
    try:
        yield subject
        await subject.engine.aclose()
        await actor.shutdown.remote()
    finally:
        ray.kill(actor)


@asynccontextmanager
async def behind_http(path: Path) -> AsyncIterator[VLLMSubject]:
    """An engine in a server of its own, that wants an API key; ``subject.process`` is the server's."""
    import httpx

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--api-key", API_KEY, "--enable-scale-out", "--no-enable-prefix-caching"]
    for name, value in SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        else:
            command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"}
    url = f"http://127.0.0.1:{port}"
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=null, stderr=null)  # noqa: ASYNC220 - done at once
    try:
        async with httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=120
        ) as client:
            await _is_up(client, process)

            async def ask_server(
                prompt: Sequence[int], count: int, started: Callable[[], None] | None, name: str
            ) -> Completion:
                sampling = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
                body = {"request_id": name, "token_ids": list(prompt), "sampling_params": sampling, "stream": True}
                tokens: list[int] = []
                last: dict[str, Any] = {}
                async with client.stream("POST", "/inference/v1/generate", json=body) as response:
                    assert response.is_success, await response.aread()
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            last = json.loads(line.removeprefix("data: "))["choices"][0]
                            tokens += last.get("token_ids") or []
                            if started is not None and len(tokens) > 2:
                                started()
                spans = tuple(version_span(**span) for span in last["weight_versions"] or ())
                return Completion(tokens=tuple(tokens), finish_reason=last["finish_reason"], weight_versions=spans)

            subject = VLLMSubject(asyncsync.VLLMEngine(url, api_key=API_KEY), ask_server, EVERY_POLICY)
            subject.process = process  # type: ignore[attr-defined]
            subject.url = url  # type: ignore[attr-defined]
            yield subject
            await subject.engine.aclose()
    finally:
        process.terminate()
        process.wait(30)


async def _is_up(client: Any, process: subprocess.Popen[bytes]) -> None:
    import httpx

    async with asyncio.timeout(START_TIMEOUT):
        while True:
            assert process.poll() is None, "the server did not start"
            try:
                if (await client.get("/health")).is_success:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.2)
