"""A class to include in a Ray actor that holds an ``AsyncLLM``: its calls, forwarded."""

from __future__ import annotations

from typing import Any


class VLLMActor:
    """Makes a Ray actor a vLLM engine for :class:`asyncsync.VLLMEngine`.

    All its methods are coroutines, and run where the engine's own loop does; so declare it with plain ``ray.remote``.

    Example:
        >>> @ray.remote(num_gpus=1)
        ... class Engine(asyncsync.VLLMActor):
        ...     def __init__(self, model):
        ...         config = {"backend": "asyncsync"}
        ...         args = AsyncEngineArgs(model, weight_transfer_config=config)
        ...         super().__init__(AsyncLLM.from_engine_args(args))
        ...
        ...     async def generate(self, prompt): ...

    Args:
        llm: The ``AsyncLLM``.

    Attributes:
        llm: The ``AsyncLLM``.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """See ``AsyncLLM``."""
        await self.llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """See ``AsyncLLM``."""
        await self.llm.resume_generation()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See ``AsyncLLM``."""
        await self.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """See ``AsyncLLM``."""
        await self.llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """See ``AsyncLLM``."""
        await self.llm.update_weights(request)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See ``AsyncLLM``."""
        await self.llm.finish_weight_update(weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        """See ``AsyncLLM``."""
        await self.llm.update_weight_version(new_version)

    async def get_weight_version(self) -> str:
        """See ``AsyncLLM``."""
        return str(await self.llm.get_weight_version())

    async def is_sleeping(self) -> bool:
        """See ``AsyncLLM``."""
        return bool(await self.llm.is_sleeping())

    async def sleep(self, *, level: int = 1, mode: str = "abort") -> None:
        """See ``AsyncLLM``."""
        await self.llm.sleep(level=level, mode=mode)

    async def wake_up(self, *, tags: list[str] | None = None) -> bool:
        """See ``AsyncLLM``."""
        return bool(await self.llm.wake_up(tags=tags))

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        """See ``AsyncLLM``."""
        found: list[dict[str, str]] = await self.llm.compute_weight_checksums()
        return found

    async def shutdown_weight_transfer_engine(self) -> None:
        """See ``AsyncLLM``."""
        await self.llm.shutdown_weight_transfer_engine()

    async def get_world_size(self) -> int:
        """How many workers the engine has, those of all data parallel replicas together."""
        return int(self.llm.vllm_config.parallel_config.world_size_across_dp)

    async def has_prefix_cache(self) -> bool:
        """Whether the engine keeps what prefixes of requests came to."""
        return bool(self.llm.vllm_config.cache_config.enable_prefix_caching)
