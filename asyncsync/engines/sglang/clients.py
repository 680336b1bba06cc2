"""The three ways to reach an SGLang engine: in this process, in a Ray actor, over HTTP.

SGLang's ``Engine`` offers its control calls as blocking ones that cannot run inside a loop, while its tokenizer manager
has them as coroutines. Such a coroutine must not be cancelled: the manager would hand the late answer to the next call
of the same name (seen: a group "joined" that never was). So each runs in a task of its own to its end, on the loop that
the engine is used on; a caller that is cancelled leaves it behind.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from asyncsync import cluster
from asyncsync.engines.http import Answer, HTTPServer, ServerUnreachableError
from asyncsync.engines.sglang.calls import (
    PAUSE_MODES,
    SGLangClient,
    SGLangError,
    SGLangFacts,
    SGLangRefusalError,
    SGLangUnreachableError,
    UnsupportedBySGLangError,
    facts_from,
    fields_that_fit,
)

_REQUESTS = {
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "check_weights": "CheckWeightsReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""SGLang's call, and the structure in ``sglang.srt.managers.io_struct`` that it takes."""

_SESSION = ("begin_weight_update", "end_weight_update")
_INFO = (
    *("tp_size", "dp_size", "pp_size", "device", "dtype", "quantization", "model_path", "speculative_algorithm"),
    *("disable_radix_cache", "disable_overlap_schedule", "enable_memory_saver"),
    "enable_weights_cpu_backup",
)


def client_for(
    engine: Any, *, api_key: str | None = None, admin_api_key: str | None = None, timeout: float = 60.0
) -> SGLangClient:
    """The client that fits: for the URL of a server, an ``Engine`` of this process, or a Ray actor's handle.

    Args:
        engine: The engine.
        api_key: Of an HTTP server.
        admin_api_key: Of an HTTP server that has one.
        timeout: Seconds that an HTTP server may take to answer a call.

    Raises:
        TypeError: It is none of them.
    """
    if isinstance(engine, str):
        server = HTTPServer(engine, api_key=api_key, timeout=timeout)
        admin = HTTPServer(engine, api_key=admin_api_key, timeout=timeout) if admin_api_key else None
        return HTTPClient(server, admin=admin)
    if hasattr(engine, "tokenizer_manager"):
        return InProcessClient(engine)
    if not cluster.missing_methods(engine, ("init_weights_update_group", "update_weights_from_distributed")):
        return ActorClient(engine)
    raise TypeError(
        f"{cluster.actor_class_name(engine)} is no SGLang engine: give the URL of a server, an sglang.Engine, or a "
        "Ray actor with SGLang's calls (such as asyncsync.SGLangActor)"
    )


class HTTPClient(SGLangClient):
    """Over an SGLang server, such as ``python -m sglang.launch_server`` starts.

    Args:
        server: Where it is.
        admin: The same with the admin key, if it has one: then the calls that change something need that key.
    """

    def __init__(self, server: HTTPServer, *, admin: HTTPServer | None = None) -> None:
        self._server = server
        self._admin = admin or server

    def __repr__(self) -> str:
        return self._server.url

    def address(self) -> str:
        try:
            return self._server.own_address()
        except OSError as error:
            raise SGLangUnreachableError(f"{self._server.url}: {error}") from error

    async def aclose(self) -> None:
        await self._server.aclose()
        await self._admin.aclose()

    async def get_facts(self) -> SGLangFacts:
        try:
            info = await self._info("/server_info", "/get_server_info")
        except UnsupportedBySGLangError:
            info = {}
        if "tp_size" not in info:  # every SGLang says so
            raise SGLangError("this is no answer of SGLang's: is it an SGLang server?", "/server_info")
        # It takes POST only: asking with GET tells whether it is there, and does nothing.
        probe = await self._send(self._admin, "GET", "/begin_weight_update")
        return facts_from(info, sessions=probe.status == 405)

    async def get_weight_version(self) -> str:
        return str((await self._info("/model_info", "/get_model_info")).get("weight_version"))

    async def _ask(self, call: str, fields: dict[str, Any]) -> Any:
        if call == "flush_cache":
            wait = fields["timeout"]
            answer = await self._send(self._admin, "POST", "/flush_cache", params={"timeout": wait}, longer=wait)
            return {"success": _known(answer, call).status == 200, "message": answer.body}
        path = "/weights_checker" if call == "check_weights" else f"/{call}"
        answer = _known(await self._send(self._admin, "POST", path, json=fields), call)
        if answer.status >= 500 and "success" not in answer.fields:  # maybe a proxy's, and no answer to what was asked
            raise SGLangError(f"HTTP {answer.status}: {str(answer.body)[:500]}", call)
        if answer.status >= 400 and "success" not in answer.fields:
            return {"success": False, "message": f"HTTP {answer.status}: {str(answer.body)[:500]}"}
        return answer.body

    async def _info(self, path: str, older: str) -> Mapping[str, Any]:
        answer = await self._send(self._server, "GET", path)
        if answer.status == 404:
            answer = await self._send(self._server, "GET", older)
        if _known(answer, path).status != 200:
            raise SGLangError(f"HTTP {answer.status}: {str(answer.body)[:500]}", path)
        return answer.fields

    async def _send(self, server: HTTPServer, method: str, path: str, *, longer: float = 0.0, **parts: Any) -> Answer:
        try:
            answer = await server.call(method, path, timeout=server.timeout + longer, **parts)
        except ServerUnreachableError as error:
            raise SGLangUnreachableError(str(error)) from error
        if answer.status in (401, 403):
            raise SGLangRefusalError(f"HTTP {answer.status}: the API key is refused (api_key, admin_api_key)", path)
        return answer


def _known(answer: Answer, call: str) -> Answer:
    if answer.status in (404, 405):
        raise UnsupportedBySGLangError("the server has no such call", call)
    return answer


class InProcessClient(SGLangClient):
    """Over an SGLang ``Engine`` of this process, on the loop that its requests run on.

    Args:
        engine: The engine, or anything with its ``tokenizer_manager``.
    """

    def __init__(self, engine: Any) -> None:
        self._manager = engine.tokenizer_manager
        self._running: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return "in process"

    async def get_facts(self) -> SGLangFacts:
        info = self.server_info()
        return facts_from(info, sessions=info["sessions"])

    def server_info(self) -> dict[str, Any]:
        """Of what the engine's configuration says, what matters here."""
        import sglang

        arguments = self._manager.server_args
        resolved = arguments.resolved_dict() if hasattr(arguments, "resolved_dict") else vars(arguments)
        info = {name: resolved.get(name) for name in _INFO}
        sessions = all(hasattr(self._manager, call) for call in _SESSION)
        return info | {"version": getattr(sglang, "__version__", None), "sessions": sessions}

    async def _ask(self, call: str, fields: dict[str, Any]) -> Any:
        return await self.ask(call, fields)

    async def ask(self, call: str, fields: Mapping[str, Any]) -> Any:
        """Make one of SGLang's calls by its name; the answer is what SGLang's HTTP server would say.

        Raises:
            UnsupportedBySGLangError: This version of SGLang has no such call.
            SGLangError: The call raised.
        """
        task = asyncio.ensure_future(self._made(call, fields))
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except SGLangError:
            raise
        except Exception as error:
            raise SGLangError(f"{type(error).__name__}: {error}", call) from error

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if whoever asked has left

    async def _made(self, call: str, fields: Mapping[str, Any]) -> Any:
        manager = self._manager
        if call == "get_weight_version":
            value = getattr(manager, "config_value", None)
            return value("weight_version") if value else manager.server_args.weight_version
        if not hasattr(manager, call):
            raise UnsupportedBySGLangError("this version of SGLang has no such call", call)
        method = getattr(manager, call)
        if call == "abort_request":
            return method(**fields)
        if call == "flush_cache":
            accepted = inspect.signature(method).parameters
            answer = await method(**fields_that_fit(call, {"timeout_s": fields["timeout"]}, accepted))
            return {"success": answer.success, "message": getattr(answer, "message", "")}
        from sglang.srt.managers import io_struct

        kind = getattr(io_struct, _REQUESTS[call])
        answer = await method(kind(**fields_that_fit(call, fields, inspect.signature(kind).parameters)))
        if isinstance(answer, tuple):
            return dict(zip(("success", "message", "ranks"), answer, strict=False))
        return answer


class ActorClient(SGLangClient):
    """Over a Ray actor with SGLang's calls: :class:`SGLangActor`, or what slime and miles call ``SGLangEngine``.

    Args:
        handle: The actor's, or anything whose methods have ``.remote(…)``.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __repr__(self) -> str:
        return f"actor {cluster.actor_class_name(self._handle)} {cluster.actor_key(self._handle)[:8]}"

    async def get_facts(self) -> SGLangFacts:
        info: Mapping[str, Any] = {}
        if not cluster.missing_methods(self._handle, ("get_server_info",)):
            info = await self._ask("get_server_info", {})
        return facts_from(
            info,
            sessions=info.get("sessions", not cluster.missing_methods(self._handle, _SESSION)),
            pause_modes=PAUSE_MODES if self._takes("pause_generation", "mode") else ("abort",),
            flattened_buckets=self._takes("update_weights_from_distributed", "load_format"),
            selectors=self._takes("update_weights_from_distributed", "selector"),
            labels=self._takes("update_weight_version", "abort_all_requests"),
            labels_in_updates=self._takes("update_weights_from_distributed", "weight_version"),
            checksums=self._takes("check_weights", "action"),
            aborts=self._takes("abort_request", "abort_all"),
            timed_flush=self._takes("flush_cache", "timeout"),
        )

    def _takes(self, call: str, field: str) -> bool:
        if cluster.missing_methods(self._handle, (call,)):
            return False
        accepted = cluster.parameters(self._handle, call)
        return accepted is None or field in accepted

    async def _ask(self, call: str, fields: dict[str, Any]) -> Any:
        if cluster.missing_methods(self._handle, (call,)):
            raise UnsupportedBySGLangError(f"{cluster.actor_class_name(self._handle)} has no such method", call)
        fitting = fields_that_fit(call, fields, cluster.parameters(self._handle, call))
        try:
            return await cluster.call(self._handle, call, **fitting)
        except SGLangError:
            raise
        except cluster.ActorLostError as error:
            raise SGLangUnreachableError(cluster.how_it_was_lost(error), call) from error
        except Exception as error:
            # requests' errors, as slime's and miles' actors raise them, have the server's words as a note.
            said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            raise SGLangError("; ".join(said), call) from error
