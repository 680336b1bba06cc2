"""vLLM with its ``nccl`` backend, on a machine without GPUs: the same calls in the same order, real bytes over sockets.

Two things stand in for vLLM's own. *Modules* of its names give the trainer's process a process group that meets at a
real ``TCPStore``, and a communicator. Like NCCL's, that one has no timeout: who waits for a member that is gone waits
until it is destroyed. And :class:`FakeNCCLLLM` receives as vLLM's workers do, and keeps its layers as vLLM does: not
usable between a session's start and its finish, and spoilt by a session that begins where another has broken off. Its
calls go on though who has made them is gone.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncsync.transports import pynccl
from tests.fake_vllm import FakeLLM

T = TypeVar("T")
_SIZE = struct.Struct("!Q")


class FakeGroup:
    """A process group that meets at a store."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        store_timeout: int = 300,
        listen_socket: socket.socket | None = None,
    ) -> FakeGroup:
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=store_timeout),
            use_libuv=False,
            **({} if listen_socket is None else {"master_listen_fd": listen_socket.detach()}),  # type: ignore[arg-type]
        )
        return FakeGroup(rank, world_size, store)

    def broadcast_obj(self, value: Any, src: int) -> Any:
        """As vLLM's does it, once."""
        if self.rank == src:
            self.store.set("broadcast_from/0/0", pickle.dumps(value))
        return pickle.loads(self.store.get("broadcast_from/0/0"))


class FakeCommunicator:
    """A communicator over sockets: rank 0 sends to all others."""

    disabled = False
    instances: list[FakeCommunicator] = []  # noqa: RUF012 - those that a test must end

    def __init__(self, group: FakeGroup, device: Any) -> None:
        self.group = group
        self.destroyed = threading.Event()
        self.broadcasts: list[int] = []  # sizes
        self.threads = {threading.current_thread().name}  # that have used it
        self._operations: list[_Operation] = []
        self._peers: list[socket.socket] = []
        if group.rank == 0:
            listening = socket.create_server(("127.0.0.1", 0))
            group.broadcast_obj(listening.getsockname()[1], src=0)
            for _ in range(group.world_size - 1):
                self._peers.append(listening.accept()[0])
            listening.close()
            self._work = threading.Condition()
            threading.Thread(target=self._send, daemon=True).start()
        else:
            if (port := group.broadcast_obj(None, src=0)) is None:
                raise TypeError("there is no id")  # as ctypes says it of NCCL's
            self._peers.append(socket.create_connection(("127.0.0.1", port)))
        FakeCommunicator.instances.append(self)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> _Operation:
        assert src == 0
        assert (tensor.dtype, tensor.ndim, tensor.is_contiguous()) == (torch.uint8, 1, True)
        self.broadcasts.append(tensor.numel())
        self.threads.add(threading.current_thread().name)
        operation = _Operation(tensor)
        if self.group.rank == 0:
            with self._work:
                self._operations.append(operation)
                self._work.notify()
        else:
            self._receive(tensor)
        return operation

    def _send(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._operations or self.destroyed.is_set())
                if self.destroyed.is_set():
                    return
                operation = self._operations.pop(0)
            data = bytes(operation.tensor.numpy())
            try:
                for peer in self._peers:
                    peer.sendall(_SIZE.pack(len(data)) + data)
                for peer in self._peers:
                    if peer.recv(1) != b"!":
                        return  # and nobody is told
            except OSError:
                return
            operation.ended.set()

    def _receive(self, tensor: Tensor) -> None:
        (peer,) = self._peers
        try:
            (size,) = _SIZE.unpack(self._exactly(peer, _SIZE.size))
            assert size == tensor.numel(), f"{size} bytes were sent, and {tensor.numel()} expected"
            tensor.copy_(torch.frombuffer(bytearray(self._exactly(peer, size)), dtype=torch.uint8))
            peer.sendall(b"!")
        except OSError:
            self.destroyed.wait()  # as NCCL does: for ever
            raise RuntimeError("the communicator was destroyed") from None

    def _exactly(self, peer: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = peer.recv(count - len(data))
            if not part:
                raise OSError("gone")
            data += part
        return data

    def lose(self) -> None:
        """Its process dies, or its network: nobody else is told."""
        for peer in self._peers:
            peer.close()

    def destroy(self) -> None:
        self.destroyed.set()
        for peer in self._peers:
            peer.close()
        if self.group.rank == 0:
            with self._work:
                self._work.notify()


class _Operation:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.ended = threading.Event()

    def query(self) -> bool:
        return self.ended.is_set()


class FakeLane:
    """A stream of no device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def broadcast(self, communicator: FakeCommunicator, flat: Tensor) -> _Operation:
        return communicator.broadcast(flat, src=0)


@contextmanager
def _as_launched() -> Iterator[None]:
    yield


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the trainer's process find modules of vLLM's names, and no GPU be needed."""
    contents: dict[str, dict[str, Any]] = {
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": FakeCommunicator},
        "vllm.distributed.utils": {"StatelessProcessGroup": FakeGroup},
        "vllm.utils.nccl": {"unpinned_nccl_env": _as_launched},
    }
    for name in {".".join(name.split(".")[:end]) for name in contents for end in range(1, 5)}:
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(pynccl, "Lane", FakeLane)
    # torch's stores look names up; where no name server answers, not for long.
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    yield
    for communicator in FakeCommunicator.instances:
        communicator.destroy()
    FakeCommunicator.instances.clear()


class FakeNCCLLLM(FakeLLM):
    """An ``AsyncLLM`` whose workers have vLLM's ``nccl`` backend. Its calls wait for each other, as vLLM's do.

    Attributes:
        communicators: Of each worker.
        on_meta: Of which workers the layers cannot be used.
    """

    def __init__(self, *, ranks: int = 1, prefix_caching: bool = False) -> None:
        super().__init__(ranks=ranks, prefix_caching=prefix_caching)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size_across_dp=ranks),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        )
        self.communicators: list[FakeCommunicator | None] = [None] * ranks
        self.on_meta: set[int] = set()
        self._info: dict[str, Any] = {}
        self._rest: set[int] = set()  # of which workers layers hold something of a session that was broken off
        self._mixed: set[int] = set()
        self._core = asyncio.Lock()

    async def _on_ranks(self, call: Callable[[int], T]) -> None:
        """Run on every worker at once; the engine answers nothing else meanwhile, even if who asked has gone."""

        async def run() -> None:
            async with self._core:
                results = await asyncio.gather(
                    *(_on_thread(call, rank) for rank in range(len(self.modules))), return_exceptions=True
                )
                self._answer(results)

        await asyncio.shield(asyncio.ensure_future(run()))

    async def resume_generation(self) -> None:
        async with self._core:
            assert not self.on_meta, "EngineDeadError: a step on layers that are on the meta device"
        await super().resume_generation()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self._asked("init")
        if not self.backend:
            raise RuntimeError("Weight transfer not configured. Please set weight_transfer_config.")
        info = self._info = request.init_info
        assert info.keys() == {
            "master_address",
            "master_port",
            "rank_offset",
            "world_size",
            "packed",
            "packed_buffer_size_bytes",
        }
        assert info["packed"]
        await self._on_ranks(self._join)

    def _join(self, rank: int) -> None:
        if f"rank {rank}" in self.failing:
            self.failing.discard(f"rank {rank}")
            raise RuntimeError(f"planned: rank {rank} does not come")
        where = self._info["master_address"], self._info["master_port"]
        group = FakeGroup.create(*where, self._info["rank_offset"] + rank, self._info["world_size"])
        self.communicators[rank] = FakeCommunicator(group, None)

    async def shutdown_weight_transfer_engine(self) -> None:
        self._asked("shutdown")

        def leave(rank: int) -> None:
            if self._active[rank]:
                raise RuntimeError("Cannot release a trainer connection during a weight update")
            communicator, self.communicators[rank] = self.communicators[rank], None
            if communicator is not None:
                communicator.destroy()

        await self._on_ranks(leave)

    async def start_weight_update(self) -> None:
        def start(rank: int) -> None:
            assert self._mode is not None, "a session was begun while it generates"
            self._start(rank)
            self._mixed |= self._rest & {rank}
            self.on_meta.add(rank)

        self._asked("start")
        await self._on_ranks(start)

    async def update_weights(self, request: Any) -> None:
        info = request.update_info
        assert info.keys() == {"names", "dtype_names", "shapes"}

        def load(rank: int) -> None:
            self._rest.add(rank)
            self._receive(rank, info)

        self._asked("update")
        await self._on_ranks(lambda rank: self._update(rank, load))

    def _receive(self, rank: int, info: Any) -> None:
        communicator = self.communicators[rank]
        if communicator is None:
            raise RuntimeError("NCCL weight transfer not initialized. Call init_transfer_engine() first.")
        chunk: list[tuple[str, list[int], torch.dtype, int]] = []
        entries = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        for index, (name, dtype_name, shape) in enumerate(entries):
            dtype = getattr(torch, dtype_name)
            chunk.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
            total = sum(size for *_, size in chunk)
            if total > self._info["packed_buffer_size_bytes"] or index == len(entries) - 1:
                packed = torch.empty(total, dtype=torch.uint8)
                communicator.broadcast(packed, src=0)
                parts = torch.split(packed, [size for *_, size in chunk])
                self._load_chunk(
                    rank,
                    [
                        (name, part.contiguous().view(dtype).view(shape))
                        for (name, shape, dtype, _), part in zip(chunk, parts, strict=True)
                    ],
                )
                chunk.clear()

    @torch.no_grad()
    def _load_chunk(self, rank: int, weights: list[tuple[str, Tensor]]) -> None:
        own = self.modules[rank].state_dict()
        for name, tensor in weights:
            self._load_planned(rank)
            own[name].copy_(tensor)  # KeyError: a name that the model does not know

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        def finish(rank: int) -> None:
            self._finish(rank)
            if rank in self._mixed:
                with torch.no_grad():
                    self.modules[rank].bias.add_(100)
            for ranks in (self.on_meta, self._rest, self._mixed):
                ranks.discard(rank)

        self._asked("finish")
        await self._on_ranks(finish)


async def _on_thread(call: Callable[[int], T], rank: int) -> T:
    """On a thread that may be left behind: a worker that waits for ever."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if not result.done():
            result.set_exception(error) if error is not None else result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failed = None, None
        try:
            value = call(rank)
        except BaseException as error:  # noqa: BLE001 - handed over
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, value, failed)

    threading.Thread(target=run, daemon=True).start()
    return await result


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for a thread's work, outside a loop."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        pause.wait(0.01)
    return condition()
