"""A class for a Ray actor that holds an SGLang engine: its control calls, under SGLang's names."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from asyncsync.engines.sglang.clients import InProcessClient


def _exposed(call: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def method(self: SGLangActor, **fields: Any) -> Any:
        return await self._asyncsync.ask(call, fields)

    method.__name__, method.__doc__ = call, f"SGLang's ``{call}``; fields by name."
    return method


class SGLangActor:
    """A Ray actor's class with an SGLang engine in it: all that ``SGLangEngine`` needs of an actor.

    Make an actor of it, or of a class that includes it, with plain ``ray.remote``. Constructing it takes as long as
    SGLang takes to start; its calls run on the actor's own loop, beside its requests.

    Example:
        >>> actor = ray.remote(asyncsync.SGLangActor).options(num_gpus=1).remote(model_path="Qwen/Qwen3-0.6B")
        >>> await actor.generate.remote(prompt="The", sampling_params={"max_new_tokens": 8})

    Args:
        **arguments: Of ``sglang.Engine``.

    Attributes:
        engine: The ``sglang.Engine``.
    """

    def __init__(self, **arguments: Any) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.engine: Any = Engine(**arguments)
        self._asyncsync = InProcessClient(self.engine)

    async def generate(self, **request: Any) -> Any:
        """One request, as ``sglang.Engine.async_generate`` takes it."""
        return await self.engine.async_generate(**request)

    async def get_server_info(self) -> dict[str, Any]:
        """Of what the engine's configuration says, what an update needs to know."""
        return self._asyncsync.server_info()

    async def shutdown(self) -> None:
        """End the engine's processes."""
        self.engine.shutdown()

    abort_request = _exposed("abort_request")
    begin_weight_update = _exposed("begin_weight_update")
    check_weights = _exposed("check_weights")
    continue_generation = _exposed("continue_generation")
    destroy_weights_update_group = _exposed("destroy_weights_update_group")
    end_weight_update = _exposed("end_weight_update")
    flush_cache = _exposed("flush_cache")
    get_weight_version = _exposed("get_weight_version")
    init_weights_update_group = _exposed("init_weights_update_group")
    pause_generation = _exposed("pause_generation")
    release_memory_occupation = _exposed("release_memory_occupation")
    resume_memory_occupation = _exposed("resume_memory_occupation")
    update_weight_version = _exposed("update_weight_version")
    update_weights_from_distributed = _exposed("update_weights_from_distributed")
