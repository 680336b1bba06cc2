"""The ways to a vLLM engine: an ``AsyncLLM`` in this process, a Ray actor that holds one, vLLM's HTTP server.

Each offers the same few calls, under our words; the names and forms on the other side are vLLM's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar

from asyncsync import cluster
from asyncsync.engines.asked import as_engine_error
from asyncsync.engines.http import Answer, HTTPServer, ServerUnreachableError
from asyncsync.errors import EngineError

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]


class VLLMClient(Protocol):
    """What an update asks of the engine as a whole. Every call may raise whatever the way there raises."""

    def address(self) -> str:
        """Where the engine's processes reach this one."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Hold back new requests; ``wait`` for those in flight, ``abort`` or ``keep`` them."""
        ...

    async def resume(self) -> None:
        """Let requests go on."""
        ...

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Hand this to the weight-transfer backend in every worker."""
        ...

    async def start_update(self) -> None:
        """Begin vLLM's session."""
        ...

    async def update(self, info: Mapping[str, Any]) -> None:
        """Have every worker's backend load."""
        ...

    async def finish_update(self, version: str | None) -> None:
        """End vLLM's session, and label the weights."""
        ...

    async def label(self, version: str) -> None:
        """Label the weights."""
        ...

    async def is_sleeping(self) -> bool:
        """Whether the engine has been put to sleep."""
        ...

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Get memory back that sleep mode has taken away; None: all. Once all is back, vLLM lets requests go on."""
        ...

    async def sleep(self, level: int) -> None:
        """Put the engine to sleep, keeping requests. What sleeps already stays as it is."""
        ...

    async def weight_version(self) -> str | None:
        """The label of the weights; None if it does not tell."""
        ...

    async def checksums(self) -> dict[str, str]:
        """A checksum of each parameter as vLLM holds it, on each worker."""
        ...

    async def end_transfer(self) -> None:
        """Have the weight-transfer backend in every worker leave what it has joined, if that can be asked."""
        ...

    async def ranks(self) -> int | None:
        """How many workers it has, those of all data parallel replicas together; None if it does not tell."""
        ...

    async def prefix_caching(self) -> bool | None:
        """Whether it keeps what prefixes of requests came to; None if it does not tell."""
        ...

    async def aclose(self) -> None:
        """Hang up."""
        ...


class InProcessClient:
    """An ``AsyncLLM`` of this process and event loop.

    Args:
        llm: The engine.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __repr__(self) -> str:
        return type(self._llm).__name__

    def address(self) -> str:
        """See :class:`VLLMClient`."""
        return cluster.node_address()

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._llm, method)(*args, **kwargs)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """See :class:`VLLMClient`."""
        await self._call("pause_generation", mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """See :class:`VLLMClient`."""
        await self._call("resume_generation")

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """See :class:`VLLMClient`."""
        # vLLM reads one attribute of its request types; so this process need not have vLLM.
        await self._call("init_weight_transfer_engine", SimpleNamespace(init_info=dict(info)))

    async def start_update(self) -> None:
        """See :class:`VLLMClient`."""
        await self._call("start_weight_update")

    async def update(self, info: Mapping[str, Any]) -> None:
        """See :class:`VLLMClient`."""
        await self._call("update_weights", SimpleNamespace(update_info=dict(info)))

    async def finish_update(self, version: str | None) -> None:
        """See :class:`VLLMClient`."""
        await self._call("finish_weight_update")
        if version is not None:
            await self.label(version)

    async def label(self, version: str) -> None:
        """See :class:`VLLMClient`."""
        await self._call("update_weight_version", version)

    async def is_sleeping(self) -> bool:
        """See :class:`VLLMClient`."""
        return bool(await self._call("is_sleeping"))

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """See :class:`VLLMClient`."""
        self._need("wake_up")
        await self._call("wake_up", tags=None if tags is None else list(tags))

    async def sleep(self, level: int) -> None:
        """See :class:`VLLMClient`."""
        self._need("sleep")
        await self._call("sleep", level=level, mode="keep")

    async def weight_version(self) -> str | None:
        """See :class:`VLLMClient`."""
        return str(await self._call("get_weight_version")) if self._has("get_weight_version") else None

    async def checksums(self) -> dict[str, str]:
        """See :class:`VLLMClient`."""
        return {
            name: checksum
            for worker in await self._call("compute_weight_checksums")
            for name, checksum in worker.items()
        }

    async def end_transfer(self) -> None:
        """See :class:`VLLMClient`."""
        if self._has("shutdown_weight_transfer_engine"):
            await self._call("shutdown_weight_transfer_engine")

    async def ranks(self) -> int | None:
        """See :class:`VLLMClient`."""
        config = getattr(self._llm, "vllm_config", None)
        return None if config is None else int(config.parallel_config.world_size_across_dp)

    async def prefix_caching(self) -> bool | None:
        """See :class:`VLLMClient`."""
        config = getattr(self._llm, "vllm_config", None)
        return None if config is None else bool(config.cache_config.enable_prefix_caching)

    def _has(self, method: str) -> bool:
        return callable(getattr(self._llm, method, None))

    def _need(self, method: str) -> None:
        if not self._has(method):
            raise EngineError(f"it has no method {method}(), and cannot be woken: include asyncsync.VLLMActor in it")

    async def aclose(self) -> None:
        """See :class:`VLLMClient`."""


class RayClient(InProcessClient):
    """A Ray actor with methods of an ``AsyncLLM``'s names, that are called on its event loop.

    Args:
        handle: The actor.

    Raises:
        TypeError: It lacks methods that an update needs.
    """

    NEEDED = (
        "pause_generation",
        "resume_generation",
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
    )

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        if missing := cluster.missing_methods(handle, self.NEEDED):
            raise TypeError(
                f"{cluster.actor_class_name(handle)} is no vLLM engine: it lacks {', '.join(missing)}; "
                "include asyncsync.VLLMActor in its class"
            )

    def __repr__(self) -> str:
        return f"{cluster.actor_class_name(self._llm)} {cluster.actor_key(self._llm)[:8]}"

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await cluster.call(self._llm, method, *args, **kwargs)

    async def is_sleeping(self) -> bool:
        """See :class:`VLLMClient`. An actor that does not tell is taken to be awake."""
        return self._has("is_sleeping") and await super().is_sleeping()

    async def ranks(self) -> int | None:
        """See :class:`VLLMClient`."""
        return int(await self._call("get_world_size")) if self._has("get_world_size") else None

    async def prefix_caching(self) -> bool | None:
        """See :class:`VLLMClient`."""
        return bool(await self._call("has_prefix_cache")) if self._has("has_prefix_cache") else None

    def _has(self, method: str) -> bool:
        return not cluster.missing_methods(self._llm, (method,))


class HTTPClient:
    """vLLM's HTTP server, started with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        server: The server.
    """

    def __init__(self, server: HTTPServer) -> None:
        self._server = server

    def __repr__(self) -> str:
        return self._server.url

    def address(self) -> str:
        """See :class:`VLLMClient`: of this machine's addresses, the one from which the server is reached."""
        try:
            return self._server.own_address()
        except OSError as error:
            raise EngineError(f"{self._server.url} cannot be reached: {error}") from error

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = await self._server.call(method, path, **options)
        except ServerUnreachableError as error:
            raise EngineError(str(error)) from error
        if 200 <= answer.status < 300:
            return answer.body
        hint = {
            401: " (wrong api_key?)",
            404: " (was the server started with VLLM_SERVER_DEV_MODE=1?)",
        }.get(answer.status, "")
        raise EngineError(f"{self._server.url}{path} answered {answer.status}{hint}: {_message(answer)}")

    async def _post(self, path: str, body: Any = None, **params: Any) -> Any:
        return await self._request("POST", path, json=body, params=params)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/pause", mode=mode, clear_cache=str(clear_cache).lower())

    async def resume(self) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/resume")

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/init_weight_transfer_engine", {"init_info": dict(info)})

    async def start_update(self) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/start_weight_update")

    async def update(self, info: Mapping[str, Any]) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/update_weights", {"update_info": dict(info)})

    async def finish_update(self, version: str | None) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/finish_weight_update", {} if version is None else {"weight_version": version})

    async def label(self, version: str) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/update_weight_version", {"new_version": version})

    async def is_sleeping(self) -> bool:
        """See :class:`VLLMClient`."""
        return bool((await self._request("GET", "/is_sleeping"))["is_sleeping"])

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/wake_up", **({} if tags is None else {"tags": list(tags)}))

    async def sleep(self, level: int) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/sleep", level=level, mode="keep")

    async def weight_version(self) -> str | None:
        """See :class:`VLLMClient`."""
        return str((await self._request("GET", "/weight_info"))["weight_version"])

    async def checksums(self) -> dict[str, str]:
        """See :class:`VLLMClient`."""
        found: dict[str, str] = (await self._post("/weight_checker", {"action": "checksum"}))["checksums"]
        return found

    async def end_transfer(self) -> None:
        """See :class:`VLLMClient`."""
        await self._post("/shutdown_weight_transfer_engine")

    async def ranks(self) -> int | None:
        """See :class:`VLLMClient`."""
        return int((await self._request("GET", "/get_world_size", params={"include_dp": "true"}))["world_size"])

    async def prefix_caching(self) -> bool | None:
        """See :class:`VLLMClient`."""
        return None

    async def aclose(self) -> None:
        """See :class:`VLLMClient`."""
        await self._server.aclose()


def _message(answer: Answer) -> str:
    error = answer.fields.get("error")
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(answer.body)[:500]


async def asked(what: str, call: Awaitable[T]) -> T:
    """Await a call of vLLM's API; its errors, of whatever kind, come back as the engine's."""
    return await as_engine_error(call, lambda error: f"{what} failed: {type(error).__name__}: {error}")


async def asked_to_connect(backend: str, call: Awaitable[None]) -> None:
    """Await ``init_weight_transfer_engine``.

    Raises:
        EngineError: It failed. If the engine was started with another backend, the error says how to start it.
    """
    try:
        await asked("init_weight_transfer_engine", call)
    except EngineError as error:
        if "not configured" in str(error) or "Invalid init_info" in str(error):
            config = f'weight_transfer_config={{"backend": "{backend}"}}'
            raise EngineError(f"the engine has another backend, or none: start it with {config} ({error})") from error
        raise


def client_for(engine: Any, *, api_key: str | None, timeout: float) -> VLLMClient:
    """The way to an engine, by what it is.

    Raises:
        TypeError: It is no engine of vLLM's.
        ValueError: It is text, and not the address of a server.
    """
    if isinstance(engine, str):
        return HTTPClient(HTTPServer(engine, api_key=api_key, timeout=timeout))
    if cluster.is_actor(engine) or hasattr(getattr(engine, "update_weights", None), "remote"):
        return RayClient(engine)
    missing = [name for name in RayClient.NEEDED if not callable(getattr(engine, name, None))]
    if missing:
        raise TypeError(
            f"{type(engine).__name__} is no vLLM engine: it lacks {', '.join(missing)}; "
            "give an AsyncLLM, a Ray actor that holds one, or the address of a server"
        )
    return InProcessClient(engine)
