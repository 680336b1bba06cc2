"""A generating engine with no more than torch and transformers: its continuous batching, in a class to include."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from torch import nn

from asyncsync.engines.batched import BatchedGenerations
from asyncsync.engines.batching_config import stop_tokens
from asyncsync.engines.completion import Completion, CompletionPart
from asyncsync.engines.continuous_batch import ContinuousBatch
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.module import Generation, ModuleEngine, memory_of
from asyncsync.engines.request import Request
from asyncsync.engines.serving import ServedModule
from asyncsync.errors import ClosedError
from asyncsync.shield import CLEANUP_TIMEOUT

MAX_NEW_TOKENS = 64


class _GeneratingModule(ServedModule):
    """A served module with a batch that generates with it."""

    def __init__(self, engine: TransformersEngine, batch: ContinuousBatch, *, staged: bool) -> None:
        self.batch = batch
        self.gate = GenerationGate()
        self.batched = BatchedGenerations(batch, lambda: self.weight_version, self.gate)
        super().__init__(
            lambda: engine.module,
            staged=staged,
            generations=self.batched,
            flush=lambda: engine.flush_cache(),
            memory=memory_of(engine),
        )
        batch.start(self.batched)

    def request(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        stop_token_ids: int | Sequence[int] | None,
        sampling: dict[str, Any],
        *,
        streamed: bool,
    ) -> Request:
        """A request that can be computed.

        Raises:
            ValueError: It cannot.
        """
        if isinstance(cast("object", prompt_ids), str):
            raise ValueError("a prompt is a sequence of token ids: give the text to the tokenizer first")
        prompt = [int(token) for token in prompt_ids]
        self.batch.check(prompt, max_new_tokens, sampling)
        stop = self.batch.stop if stop_token_ids is None else stop_tokens(stop_token_ids)
        return Request(prompt, max_new_tokens, stop, sampling, streamed=streamed)

    async def aclose(self) -> None:
        """End the thread that generates; see :meth:`TransformersEngine.aclose`."""
        self.batched.end(ClosedError("the engine was closed, and generates no more"))
        self.batch.stop_soon()
        await asyncio.to_thread(self.batch.join, CLEANUP_TIMEOUT)


class TransformersEngine(ModuleEngine):
    """A rollout engine that generates with a language model of transformers; include it in an actor's class.

    Many requests are generated for at once. While weights are updated it does with those in flight what the update's
    policy says: all four are kept exactly, and each answer tells which weights computed which tokens. Nothing that was
    computed from older weights is ever shared with another request. Needs transformers 5.19 or newer.

    Example:
        >>> @asyncsync.remote(num_cpus=1)
        ... class Engine(asyncsync.TransformersEngine):
        ...     def __init__(self):
        ...         super().__init__(AutoModelForCausalLM.from_pretrained(path))
        >>> await engine.generate.remote([1, 2, 3], max_new_tokens=2)
        Completion(tokens=(7, 2), finish_reason='stop', weight_versions=(WeightVersionSpan(version=1, start=0, end=2),))

    Args:
        model: A causal language model with attention that transformers can page (``sdpa``, flash or eager). It stays
            the engine's: nobody else may compute with it but inside :meth:`generating`.
        staged: As for a :class:`ModuleEngine`. A staged engine uses no CUDA graphs, which would go on reading the
            memory of the old weights.
        generation_config: transformers' ``GenerationConfig``: how all requests are sampled. None: greedily, until the
            model's own end-of-text token.
        continuous_batching_config: transformers' ``ContinuousBatchingConfig``: the size of the cache, mainly. None:
            what transformers chooses on a GPU; on a CPU a cache of 8,192 tokens. Some fields have no say: requests
            share no blocks, and every step is counted before the next is prepared.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError: The model, or a configuration, is none that requests can be batched with.
    """

    _asyncsync: _GeneratingModule

    def __init__(
        self,
        model: nn.Module,
        *,
        staged: bool = True,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
    ) -> None:
        if not hasattr(model, "init_continuous_batching"):
            raise ValueError(
                f"{type(model).__name__} is no language model of transformers that can be batched: "
                "give what AutoModelForCausalLM makes"
            )
        self.module = model
        batch = ContinuousBatch(model, generation_config, continuous_batching_config, staged=staged)
        self._asyncsync = _GeneratingModule(self, batch, staged=staged)

    def generating(self) -> Generation:
        """Read the weights outside of the batch, as of a :class:`ModuleEngine`; an update waits under every policy."""
        return Generation(self._asyncsync, self._asyncsync.gate)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop_token_ids: int | Sequence[int] | None = None,
        **sampling: Any,
    ) -> Completion:
        """Continue a prompt; call it as often as you like at the same time.

        Cancelled, it takes its request out of the batch.

        Args:
            prompt_ids: Token ids, one at least.
            max_new_tokens: New tokens at the most.
            stop_token_ids: Tokens that end the answer, and are its last; None: those of the generation config.
            **sampling: ``temperature`` and the like, for this request alone: with a generation config that samples,
                and ``per_request_processors=True`` in the continuous batching config.

        Raises:
            ValueError: The request cannot be computed: too long, or with tokens that the model does not have.
            TaintedEngineError: The engine holds part of an update.
            EngineError: The request failed, or the engine generates no more; the model's error is the ``__cause__``.
        """
        served = self._asyncsync
        request = served.request(prompt_ids, max_new_tokens, stop_token_ids, sampling, streamed=False)
        return await served.batched.complete(request)

    async def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop_token_ids: int | Sequence[int] | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[CompletionPart, None]:
        """The same, token by token: what was computed since the last part, each part with one version.

        The last part has a finish reason. Closed before that, the iterator takes its request out of the batch.
        """
        served = self._asyncsync
        request = served.request(prompt_ids, max_new_tokens, stop_token_ids, sampling, streamed=True)
        async with aclosing(served.batched.stream(request)) as parts:
            async for part in parts:
                yield part

    async def aclose(self) -> None:
        """Generate no more; in an actor, the end of its process does the same.

        Requests in flight and those that come get a ``ClosedError``. Waits for the step that runs, ten seconds at most.
        """
        await self._asyncsync.aclose()
