"""SGLang on a CPU: a tiny engine in this process, in a Ray actor, or behind HTTP.

SGLang has no CPU build of its kernels on the package index; ``tests/sglang_stubs`` stands in for what is missing. That
is no configuration SGLang supports, and says nothing about its speed; its scheduler, loader and control calls are real.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import signal
import socket
import sys
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import torch
from torch import Tensor, nn
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

import asyncsync
from asyncsync.engines.sglang.actor import SGLangActor

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tests" / "sglang_stubs"
API_KEY = "the-key-of-the-tests"
START_TIMEOUT = 240.0  # seconds; 20 on a quiet machine


def arguments(model: Path | str, **more: Any) -> dict[str, Any]:
    """Arguments of ``sglang.Engine`` for the tiny model."""
    return {
        "model_path": str(model),
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.05,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "context_length": 512,
        "log_level": "warning",
        "sleep_on_idle": True,  # else its scheduler takes a core even when there is nothing to do
        **more,
    }


def environment(tensor_parallel_size: int = 1) -> dict[str, str]:
    """What the processes of an engine must have in their environment."""
    path = [str(STUBS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)}
    if tensor_parallel_size > 1:  # else it wants a NUMA node for each rank
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tensor_parallel_size))
    return variables


@contextmanager
def importable(tensor_parallel_size: int = 1) -> Iterator[None]:
    """Make SGLang importable here, and in the processes that it starts from here."""
    variables = environment(tensor_parallel_size)
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    sys.path.insert(0, str(STUBS))
    try:
        yield
    finally:
        sys.path.remove(str(STUBS))
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@asynccontextmanager
async def in_process(model: Path | str, *, tp: int = 1, **more: Any) -> AsyncIterator[Any]:
    """An ``sglang.Engine`` of this process."""
    with importable(tp):
        others = set(psutil.Process().children(recursive=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang's own, while it is imported
            from sglang.srt.entrypoints.engine import Engine

            engine: Any = Engine(**arguments(model, tp_size=tp, **more))
        try:
            yield engine
        finally:
            # Its own shutdown, now and at exit, kills every child of this process: Ray's, too.
            atexit.unregister(engine.shutdown)
            engine.tokenizer_manager._subprocess_watchdog.stop()
            own = [child for child in psutil.Process().children(recursive=True) if child not in others]
            for process in own:
                process.kill()
            psutil.wait_procs(own, timeout=10)


@asynccontextmanager
async def in_actor(
    model: Path | str, *, tp: int = 1, actor_class: type = SGLangActor, **more: Any
) -> AsyncIterator[Any]:
    """A Ray actor with an engine in it."""
    remote: Any = ray.remote(actor_class)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment(tp)}}
    actor = remote.options(**options).remote(**arguments(model, tp_size=tp, **more))
    try:
        await asyncio.wait_for(actor.get_server_info.remote(), START_TIMEOUT)
        yield actor
    finally:
        await asyncio.wait_for(actor.shutdown.remote(), START_TIMEOUT)
        await asyncsync.cluster.kill_actor(actor)


@asynccontextmanager
async def over_http(model: Path | str, *, tp: int = 1, **more: Any) -> AsyncIterator[str]:
    """The URL of an SGLang server, whose key is ``API_KEY``."""
    async with server(model, tp=tp, **more) as (url, _):
        yield url


@asynccontextmanager
async def server(model: Path | str, *, tp: int = 1, **more: Any) -> AsyncIterator[tuple[str, int]]:
    """The URL of an SGLang server, and the process group of all its processes."""
    port = _free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
    for name, value in arguments(model, tp_size=tp, api_key=API_KEY, skip_server_warmup=True, **more).items():
        option = f"--{name.replace('_', '-')}"
        command += [option] if value is True else [option, str(value)]
    nowhere = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environment(tp), stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await asyncio.wait_for(_healthy(url, process), START_TIMEOUT)
        yield url, process.pid
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: it and what it started
            await process.wait()


async def _healthy(url: str, server: asyncio.subprocess.Process) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        while server.returncode is None:
            try:
                if (await client.get(f"{url}/model_info", headers={"Authorization": f"Bearer {API_KEY}"})).is_success:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the SGLang server ended with {server.returncode} while it started")


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


async def generate(engine: Any, prompt_ids: list[int], count: int) -> list[int]:
    """Greedy tokens of an engine, however it is reached: an ``Engine``, an actor or the URL of a server."""
    return list((await request(engine, prompt_ids, count))["output_ids"])


async def request(engine: Any, prompt_ids: list[int], count: int) -> dict[str, Any]:
    """One greedy request, and all that SGLang says about it."""
    body = {
        "input_ids": prompt_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
    }
    answer: dict[str, Any]
    if isinstance(engine, str):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            headers = {"Authorization": f"Bearer {API_KEY}"}
            answer = (await client.post(f"{engine}/generate", json=body, headers=headers)).raise_for_status().json()
    elif hasattr(engine, "tokenizer_manager"):
        answer = await engine.async_generate(**body)
    else:
        answer = await engine.generate.remote(**body)
    return answer


class Source:
    """The first rank of a gloo group that SGLang joins, without any of ``torch.distributed``'s global state.

    Args:
        name: The group's, as SGLang is told it.
        ranks: The engine's.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
        self._group: Any = None
        self.group: dict[str, Any] = {
            "address": "127.0.0.1",
            "port": self._store.port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": name,
            "backend": "gloo",
        }

    def join(self) -> None:
        """Blocks until the engine has joined."""
        name = self.group["group_name"]
        store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=10)
        self._group = ProcessGroupGloo(store, 0, self.group["world_size"], options)

    def send(self, flat: Tensor) -> None:
        """Blocks until the bytes have left."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=10)
        self._group.broadcast([flat], options).wait()

    def leave(self) -> None:
        self._group = None


def described(model: nn.Module) -> dict[str, Any]:
    """Names, dtypes and shapes, as SGLang takes them."""
    parameters = dict(model.named_parameters())
    return {
        "names": list(parameters),
        "dtypes": [str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()],
        "shapes": [list(parameter.shape) for parameter in parameters.values()],
    }


def flat(model: nn.Module) -> Tensor:
    """All bytes of a model's parameters, in the order of their names."""
    return torch.cat([parameter.detach().reshape(-1).view(torch.uint8) for parameter in model.parameters()])


def checksums(model: nn.Module, rank: int, ranks: int) -> Mapping[str, str]:
    """What SGLang's ``weights_checker`` must say of the tiny model at one tensor parallel rank, on a CPU."""
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def shard(name: str, dim: int) -> Tensor:
        return whole[name].chunk(ranks, dim)[rank]

    held: dict[str, Tensor] = {}
    for name in whole:
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf == "q_proj":
            parts = [shard(f"{module}.{part}_proj.weight", 0) for part in "qkv"]
            held[f"{module}.qkv_proj.weight"] = torch.cat(parts)
        elif leaf == "gate_proj":
            parts = [shard(f"{module}.{part}_proj.weight", 0) for part in ("gate", "up")]
            held[f"{module}.gate_up_proj.weight"] = torch.cat(parts)
        elif leaf in ("o_proj", "down_proj"):
            held[name] = shard(name, 1)
        elif leaf in ("embed_tokens", "lm_head"):
            held[name] = shard(name, 0)
        elif leaf not in ("k_proj", "v_proj", "up_proj"):
            held[name] = whole[name]
    return {name: hashlib.sha256(_bytes(tensor)).hexdigest()[:16] for name, tensor in held.items()}


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
