"""SGLang's control calls: over a pretended server, over pretended actors, and over SGLang itself."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from torch import nn

import asyncsync
from asyncsync.engines.http import HTTPServer
from asyncsync.engines.sglang.calls import (
    NotFlushedError,
    SGLangClient,
    SGLangError,
    SGLangUnreachableError,
    UnsupportedBySGLangError,
)
from asyncsync.engines.sglang.clients import ActorClient, HTTPClient, InProcessClient, client_for
from asyncsync.errors import EngineError

from . import sglang_bed as bed
from .tiny_model import greedy, prompt_of, save_tiny, tiny_model

GROUP: dict[str, Any] = {
    "address": "10.0.0.1",
    "port": 1234,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
    "backend": "gloo",
}
UPDATE: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [(2, 3)], "group_name": "g"}
NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."


class PretendedServer:
    """Answers like SGLang's HTTP server; notes what it was asked.

    Args:
        answers: For paths that answer otherwise: a status and a body.
    """

    def __init__(self, answers: dict[str, tuple[int, Any]] | None = None) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: list[str | None] = []
        self.answers = {
            "/server_info": (200, {"tp_size": 2, "disable_radix_cache": True, "version": "0.5.23"}),
            "/model_info": (200, {"weight_version": "default"}),
            "/pause_generation": (200, {"status": "ok"}),
            "/continue_generation": (200, {"status": "ok"}),
            "/flush_cache": (200, "Cache flushed."),
            "/weights_checker": (200, {"success": True, "message": "", "ranks": [{"checksums": {"a": "0"}}]}),
            **(answers or {}),
        }

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.keys.append(request.headers.get("Authorization"))
        self.asked.append((request.method, path, json.loads(request.content) if request.content else None))
        if request.method == "GET" and path == "/begin_weight_update" and path not in self.answers:
            return httpx.Response(405)
        status, body = self.answers.get(path, (200, {"success": True, "message": "Success"}))
        return httpx.Response(status, text=body) if isinstance(body, str) else httpx.Response(status, json=body)


def http_client(server: Callable[[httpx.Request], httpx.Response], **options: Any) -> HTTPClient:
    transport = httpx.MockTransport(server)
    return HTTPClient(HTTPServer("http://engine:30000/", transport=transport, **options))


@pytest.mark.asyncio
async def test_what_is_sent_over_http() -> None:
    server = PretendedServer()
    client = http_client(server, api_key="secret")
    await client.init_weights_update_group(**GROUP)
    await client.pause_generation("retract")
    await client.begin_weight_update("target")
    await client.update_weights_from_distributed(**UPDATE, selector="target")
    await client.end_weight_update()
    await client.update_weight_version("7")
    assert await client.flush_cache()
    await client.continue_generation()
    await client.abort_all()
    assert await client.weights_checksums() == ({"a": "0"},)
    assert await client.get_weight_version() == "default"
    await client.aclose()
    sent = {path: body for _, path, body in server.asked}
    assert sent["/init_weights_update_group"] == {
        "master_address": "10.0.0.1",
        "master_port": 1234,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
    }
    assert sent["/update_weights_from_distributed"] == {
        "names": ["a"],
        "dtypes": ["float32"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "flush_cache": False,  # SGLang's default is True, which fails the call after the weights were loaded
        "load_format": "flattened_bucket",
        "selector": "target",
        "weight_version": None,
    }
    assert sent["/update_weight_version"]["abort_all_requests"] is False  # SGLang's default is True
    assert sent["/continue_generation"] == {}  # a body is required
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in repr(client._server)


@pytest.mark.asyncio
async def test_facts_over_http() -> None:
    facts = await http_client(PretendedServer()).get_facts()
    assert (facts.tensor_parallel_size, facts.radix_cache, facts.sessions, facts.version) == (2, False, True, "0.5.23")
    assert facts.overlap_schedule is None  # it did not say


@pytest.mark.asyncio
async def test_an_older_server() -> None:
    missing = (404, {"detail": "Not Found"})
    old: dict[str, tuple[int, Any]] = {"/server_info": missing, "/model_info": missing, "/begin_weight_update": missing}
    old |= {"/get_server_info": (200, {"tp_size": 1}), "/get_model_info": (200, {"weight_version": "3"})}
    client = http_client(PretendedServer(old))
    facts = await client.get_facts()
    assert (facts.tensor_parallel_size, facts.sessions) == (1, False)
    assert await client.get_weight_version() == "3"
    with pytest.raises(UnsupportedBySGLangError, match="begin_weight_update: the server has no such call"):
        await client.begin_weight_update()


@pytest.mark.asyncio
async def test_no_failure_is_dropped_over_http() -> None:
    no = (400, {"success": False, "message": "the reason"})
    client = http_client(PretendedServer({f"/{name}": no for name in ALL_CALLS} | {"/weights_checker": no}))
    for name, call in calls(client).items():
        with pytest.raises(SGLangError, match="the reason") as caught:
            await call()
        assert (caught.value.call, caught.value.message) == (name, "the reason")


ALL_CALLS = (
    "init_weights_update_group",
    "destroy_weights_update_group",
    "begin_weight_update",
    "update_weights_from_distributed",
    "end_weight_update",
    "update_weight_version",
    "pause_generation",
    "continue_generation",
    "check_weights",
    "abort_request",
    "release_memory_occupation",
    "resume_memory_occupation",
)


def calls(client: SGLangClient) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every call whose failure is an error, by SGLang's name for it."""
    made = (
        lambda: client.init_weights_update_group(**GROUP),
        lambda: client.destroy_weights_update_group("g"),
        client.begin_weight_update,
        lambda: client.update_weights_from_distributed(**UPDATE),
        client.end_weight_update,
        lambda: client.update_weight_version("1"),
        lambda: client.pause_generation("abort"),
        client.continue_generation,
        client.weights_checksums,
        client.abort_all,
        client.release_memory_occupation,
        client.resume_memory_occupation,
    )
    return dict(zip(ALL_CALLS, made, strict=True))


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [422, 500, 502])
async def test_answers_that_are_no_answers(status: int) -> None:
    client = http_client(PretendedServer({"/end_weight_update": (status, "a page of text")}))
    with pytest.raises(SGLangError, match=f"HTTP {status}: a page of text"):
        await client.end_weight_update()


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_refused(status: int) -> None:
    client = http_client(PretendedServer(dict.fromkeys(("/server_info", "/pause_generation"), (status, "no"))))
    with pytest.raises(SGLangError, match="API key is refused") as refused:
        await client.get_facts()
    assert client.tell(refused.value).startswith("http://engine:30000: SGLang's /server_info: HTTP")
    with pytest.raises(SGLangError, match="API key is refused"):
        await client.pause_generation("abort")


@pytest.mark.asyncio
async def test_an_admin_key_that_is_refused_is_no_server_without_sessions() -> None:
    client = http_client(PretendedServer({"/begin_weight_update": (401, "no")}))
    with pytest.raises(SGLangError, match="API key is refused"):
        await client.get_facts()


@pytest.mark.parametrize("answer", [(404, "Not Found"), (200, {"vllm_config": "…"})])
@pytest.mark.asyncio
async def test_a_server_that_is_none_of_sglangs(answer: tuple[int, Any]) -> None:
    client = http_client(PretendedServer(dict.fromkeys(("/server_info", "/get_server_info"), answer)))
    with pytest.raises(SGLangError, match="is it an SGLang server"):
        await client.get_facts()


@pytest.mark.asyncio
async def test_errors_name_the_engine_as_its_owner_knows_it() -> None:
    engine = asyncsync.SGLangEngine("http://engine:30000")
    engine._client = http_client(PretendedServer({"/model_info": (401, "no")}))
    async with asyncsync.WeightSynchronizer(nn.Linear(1, 1), [engine]) as synchronizer:
        with pytest.raises(EngineError, match=r"SGLangEngine-0 failed: .*http://engine:30000: .*API key is refused"):
            await synchronizer.update_weights()

    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody there")

    engine._client = http_client(unreachable)
    with pytest.raises(EngineError) as failure:
        await engine.describe_engine()
    assert str(failure.value) == "GET http://engine:30000/model_info: nobody there"  # and not twice


@pytest.mark.asyncio
async def test_loaded_but_not_flushed_is_told_from_failed() -> None:
    no = (400, {"success": False, "message": NOT_FLUSHED})
    client = http_client(PretendedServer({"/update_weights_from_distributed": no}))
    with pytest.raises(NotFlushedError):
        await client.update_weights_from_distributed(**UPDATE, flush_cache=True)


@pytest.mark.asyncio
async def test_a_flush_that_was_not_done_is_no_error() -> None:
    assert not await http_client(PretendedServer({"/flush_cache": (400, "requests run")})).flush_cache()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (httpx.ConnectError("All connection attempts failed"), "/begin_weight_update: All connection attempts failed"),
        (httpx.ReadTimeout(""), "no answer in 3.0 s"),
        (httpx.ConnectTimeout(""), "no answer in 5.0 s"),
        (httpx.RemoteProtocolError(""), "RemoteProtocolError"),
    ],
)
async def test_a_server_that_is_not_reached(raised: Exception, says: str) -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise raised

    with pytest.raises(SGLangUnreachableError, match=re.escape(says)):
        await http_client(unreachable, timeout=3).begin_weight_update()


@pytest.mark.asyncio
async def test_a_flush_that_may_wait_is_waited_for_longer() -> None:
    limits: list[Any] = []

    def server(request: httpx.Request) -> httpx.Response:
        limits.append((request.extensions["timeout"]["read"], request.url.params["timeout"]))
        return httpx.Response(200)

    assert await http_client(server, timeout=3).flush_cache(wait=20)
    assert limits == [(23, "20")]


@pytest.mark.asyncio
async def test_the_admin_key_is_for_what_changes_something() -> None:
    server = PretendedServer()
    transport = httpx.MockTransport(server)
    user = HTTPServer("http://engine", api_key="user", transport=transport)
    client = HTTPClient(user, admin=HTTPServer("http://engine", api_key="admin", transport=transport))
    await client.get_facts()
    await client.pause_generation("abort")
    assert server.keys == ["Bearer user", "Bearer admin", "Bearer admin"]


def test_errors_travel() -> None:
    error = pickle.loads(pickle.dumps(NotFlushedError("a message", "a_call")))
    assert (type(error), error.message, error.call, str(error)) == (
        NotFlushedError,
        "a message",
        "a_call",
        "SGLang's a_call: a message",
    )


class PretendedHandle:
    """Calls an object's methods as if it were a Ray actor."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        async def remote(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return SimpleNamespace(remote=remote, function=method)


class NarrowActor:
    """An actor with the methods of slime's, which has neither modes, sessions, buckets nor labels."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Any:
        self.calls.append(("init", (master_address, master_port, rank_offset, world_size, group_name, backend)))
        return {"success": True, "message": ""}

    def destroy_weights_update_group(self, group_name: str) -> None:
        self.calls.append(("destroy", group_name))

    def update_weights_from_distributed(
        self,
        names: Any,
        dtypes: Any,
        shapes: Any,
        group_name: str,
        flush_cache: bool = False,
        weight_version: Any = None,
    ) -> Any:
        self.calls.append(("update", (names, dtypes, shapes, group_name, flush_cache)))
        return {"success": False, "message": "no memory"}

    def pause_generation(self) -> None:
        self.calls.append(("pause", ()))

    def flush_cache(self) -> None:
        error = TimeoutError("Timeout while flushing cache.")
        error.add_note("response.text='busy'")
        raise error

    def update_weight_version(self, weight_version: str) -> None:
        raise AssertionError("this would abort all requests")


@pytest.mark.asyncio
async def test_a_narrow_actor_is_asked_only_for_what_it_can() -> None:
    actor = NarrowActor()
    client = client_for(PretendedHandle(actor))
    assert isinstance(client, ActorClient)
    facts = await client.get_facts()
    assert facts.tensor_parallel_size is None
    assert facts.pause_modes == ("abort",)
    assert {facts.sessions, facts.flattened_buckets, facts.selectors, facts.labels, facts.checksums} == {False}
    assert facts.labels_in_updates
    await client.init_weights_update_group(**GROUP)
    await client.pause_generation("abort")
    for refused in (
        client.pause_generation("retract"),
        client.begin_weight_update(),
        client.update_weights_from_distributed(**UPDATE),  # as a bucket
        client.update_weights_from_distributed(**UPDATE, flattened=False, selector="draft"),
        client.update_weight_version("7"),
        client.weights_checksums(),
    ):
        with pytest.raises(UnsupportedBySGLangError):
            await refused
    with pytest.raises(SGLangError, match="no memory"):
        await client.update_weights_from_distributed(**UPDATE, flattened=False)
    with pytest.raises(SGLangError, match=r"Timeout while flushing cache\.; response\.text='busy'"):
        await client.flush_cache()
    assert actor.calls == [
        ("init", ("10.0.0.1", 1234, 1, 2, "g", "gloo")),
        ("pause", ()),
        ("update", (["a"], ["float32"], [[2, 3]], "g", False)),
    ]


def test_what_is_no_engine() -> None:
    with pytest.raises(TypeError, match="object is no SGLang engine"):
        client_for(object())
    with pytest.raises(ValueError, match="begins with http"):
        client_for("10.0.0.1:30000")


class PretendedManager:
    """A tokenizer manager whose flush is slow, and whose answers are handed to whoever waits, as SGLang's are."""

    def __init__(self) -> None:
        self.flushing, self.go, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def flush_cache(self) -> Any:
        try:
            self.flushing.set()
            await self.go.wait()
            return SimpleNamespace(success=True)
        finally:
            if self.go.is_set():
                self.ended.set()


@pytest.mark.asyncio
async def test_a_cancelled_call_comes_to_its_end_in_this_process() -> None:
    manager = PretendedManager()
    client = InProcessClient(SimpleNamespace(tokenizer_manager=manager))
    call = asyncio.create_task(client.flush_cache())
    await manager.flushing.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not manager.ended.is_set()
    manager.go.set()
    await asyncio.wait_for(manager.ended.wait(), 5)
    with pytest.raises(UnsupportedBySGLangError, match="this version of SGLang has no such call"):
        await client.end_weight_update()


# SGLang itself.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


STARTED: dict[str, Callable[[Path], Any]] = {
    "process": lambda model: bed.in_process(model),
    "process, TP 2": lambda model: bed.in_process(model, tp=2),
    "actor": lambda model: bed.in_actor(model),
    "http": lambda model: bed.over_http(model),
}


@pytest.mark.sglang
@pytest.mark.timeout(300)
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", STARTED)
async def test_sglang(kind: str, model: Path, ray_cluster: None) -> None:
    ranks = 2 if kind.endswith("TP 2") else 1
    old, new = tiny_model(0), tiny_model(1)
    prompt = prompt_of(12)
    async with STARTED[kind](model) as engine:
        client = client_for(engine, api_key=bed.API_KEY)
        facts = await client.get_facts()
        assert (facts.tensor_parallel_size, facts.device, facts.version) == (ranks, "cpu", "0.5.23")
        assert facts.radix_cache
        assert facts.overlap_schedule
        assert facts.sessions
        assert facts.labels
        assert facts.checksums
        assert await bed.generate(engine, prompt, 16) == greedy(old, prompt, 16)
        assert await client.get_weight_version() == "default"

        source = bed.Source("first", ranks)
        joining = asyncio.create_task(client.init_weights_update_group(**source.group))
        await asyncio.to_thread(source.join)
        await joining

        await client.pause_generation("retract")
        with pytest.raises(SGLangError, match="must run between"):
            await client.update_weights_from_distributed(**bed.described(new), group_name="first")
        await client.begin_weight_update()
        with pytest.raises(SGLangError, match="already open"):
            await client.begin_weight_update()
        with pytest.raises(SGLangError, match="not in"):
            await client.update_weights_from_distributed(**bed.described(new), group_name="another")
        receiving = asyncio.create_task(
            client.update_weights_from_distributed(**bed.described(new), group_name="first", flush_cache=True)
        )
        await asyncio.to_thread(source.send, bed.flat(new))
        await receiving
        await client.end_weight_update()
        await client.update_weight_version("7")
        assert await client.flush_cache()
        await client.continue_generation()
        assert await bed.generate(engine, prompt, 16) == greedy(new, prompt, 16)
        assert await client.get_weight_version() == "7"
        assert await client.weights_checksums() == tuple(bed.checksums(new, rank, ranks) for rank in range(ranks))

        # The source goes while the engine receives: that ends with an error, and the group can be left.
        await client.pause_generation("retract")
        await client.begin_weight_update()
        receiving = asyncio.create_task(
            client.update_weights_from_distributed(**bed.described(old), group_name="first")
        )
        await asyncio.sleep(0.2)
        source.leave()
        with pytest.raises(SGLangError, match="Connection closed by peer"):
            await receiving
        await client.end_weight_update()
        await client.destroy_weights_update_group("first")
        with pytest.raises(SGLangError, match="does not exist"):
            await client.destroy_weights_update_group("first")
        await client.continue_generation()
        assert await bed.generate(engine, prompt, 16) == greedy(new, prompt, 16)
        await client.aclose()
