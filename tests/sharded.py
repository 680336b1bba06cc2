"""Trainers of several ranks, each an actor with a real process group: FSDP2, tensor parallel, both, and replicated."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import cluster
from asyncsync.messages import SendReceipt, UpdateOrder
from asyncsync.weights import WeightSource
from tests.actors import Probe
from tests.sample import content


class Mixed(nn.Module):
    """Layers of sizes that no number of ranks divides, one dimension, no dimension, and tied weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)
        self.tied = nn.Linear(5, 7, bias=False)
        self.big = nn.Parameter(torch.empty(9, 6, 5))
        self.short = nn.Parameter(torch.empty(1))
        self.register_buffer("steps", torch.tensor(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.tied.weight = self.up.weight


class Scattered:
    """Weights that only their trainer can put together: of every tensor each rank holds some elements, round robin."""

    def __init__(self, module: nn.Module, rank: int, size: int) -> None:
        self._size = size
        self._whole = {name: (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()}
        self._own = {name: tensor.reshape(-1)[rank::size].clone() for name, tensor in module.state_dict().items()}
        del self._whole["tied.weight"], self._own["tied.weight"]

    def describe(self) -> Iterable[tuple[str, torch.dtype, Sequence[int]]]:
        return [(name, dtype, shape) for name, (dtype, shape) in self._whole.items()]

    def gather(self, name: str) -> Tensor | None:
        dtype, shape = self._whole[name]
        most = -(-shape.numel() // self._size)
        padded = torch.zeros(most, dtype=dtype)
        padded[: self._own[name].numel()] = self._own[name]
        parts = [torch.empty_like(padded) for _ in range(self._size)]
        torch.distributed.all_gather(parts, padded)
        return torch.stack(parts, 1).reshape(-1)[: shape.numel()].reshape(shape)

    def step(self) -> None:
        for tensor in self._own.values():
            tensor.mul_(-2)


class ShardedTrainer(Probe, asyncsync.TrainerRank):
    """One rank of a trainer."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else torch's own groups look this machine's name up
        self._number = rank
        self.module = nn.Module()
        self._scattered: Scattered | None = None
        self._masters: dict[str, Tensor] = {}
        self._group = ("", 0, 0)
        self._wakes = -1
        self._stopped = False
        self.hooks: list[str] = []
        super().__init__(lambda: self.module)

    def hold(self, kind: str, size: int, store: str, seed: int = 1, stage: str = "") -> None:
        """Collective. Become a rank of a new trainer, or of one stage of it, on a process group of its own."""
        rank = self._number % size
        self._group, self._wakes, self.hooks = (store, rank, size), -1, []
        self._end_group()
        self._make_group()
        self._asyncsync._bucket_sender.forget()
        self._asyncsync._messages = []
        module = Mixed(seed)
        self._scattered = Scattered(module, rank, size) if kind == "scattered" else None
        if self._scattered is not None:
            self._asyncsync._source = WeightSource(self._scattered)
            self._wakes = 0  # from now on it sleeps between updates
            self._end_group()
            return
        self._masters = {}
        shard(module, "fsdp" if kind == "masters" else kind, size)
        if kind == "masters":
            self._masters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            self.module = module.to(torch.bfloat16)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()  # nobody is to read them
            self._asyncsync._source = WeightSource(asyncsync.MasterWeights(self.module, self._masters))
            return
        self.module = nn.ModuleDict({stage: module}) if stage else module
        self._asyncsync._source = WeightSource(lambda: self.module)

    def _make_group(self) -> None:
        store, rank, size = self._group
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}-{self._wakes}", rank=rank, world_size=size
        )

    def _end_group(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def before_update(self) -> None:
        """Collective. Make the process groups of a trainer that sleeps anew."""
        if self._wakes >= 0:
            self._wakes += 1
            self.hooks.append("before")
            self._make_group()

    def after_update(self) -> None:
        """Destroy the process groups of a trainer that sleeps."""
        if self._wakes >= 0:
            self.hooks.append("after")
            self._end_group()

    def hooks_called(self) -> list[str]:
        """Which hooks of a trainer that sleeps were called."""
        return self.hooks

    def is_asleep(self) -> bool:
        """Whether it is in no process group of its own."""
        return not torch.distributed.is_initialized()

    def step(self) -> None:
        """Change every weight, on this rank's shard."""
        if self._scattered is not None:
            return self._scattered.step()
        with torch.no_grad():
            for parameter in self._masters.values() or self.module.parameters():
                parameter.mul_(-2)

    def whole(self) -> dict[str, bytes]:
        """Collective. The bytes of every whole tensor, put together by torch."""
        state = self.module.state_dict()
        if self._masters:
            masters = self._masters | {"tied.weight": self._masters["up.weight"]}
            state |= {name: _whole(master).to(torch.bfloat16) for name, master in masters.items()}
        return {name: content(_whole(tensor)) for name, tensor in state.items()}

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name."""
        path, _, name = old.rpartition(".")
        owner = self.module.get_submodule(path)
        parameter = getattr(owner, name)
        delattr(owner, name)
        owner.register_parameter(new.rpartition(".")[2], parameter)

    def extra_memory(self) -> tuple[list[int], int]:
        """Bytes of each buffer that the last update used, and of the largest bucket."""
        assert self._asyncsync._plan is not None
        buffers = (*self._asyncsync._bucket_sender._buffers, *self._asyncsync._messages)
        return [buffer.numel() for buffer in buffers], self._asyncsync._plan.largest_bucket

    def groups(self) -> int:
        """How many groups this rank is in, or joining."""
        return sum(seat.taken for seat in self._asyncsync._seats)

    def fail_to_open(self) -> None:
        """Fail, once, to open a group."""

        def fail() -> str:
            cluster.node_address = original
            raise OSError("no port")

        original = cluster.node_address
        cluster.node_address = fail

    def stop_before_sending(self) -> None:
        """Bring nothing in the next update: hang, as a rank does whose training step has not ended."""
        self._stopped = True

    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        if self._stopped:
            self._asyncsync._sender.worker.submit(threading.Event().wait)
        return await super().send_weights(order)


def shard(module: Mixed, kind: str, size: int) -> None:
    """Cut a module up over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "fsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    elif kind == "tensor parallel":
        parallelize_module(module, init_device_mesh("cpu", (size,)), styles)
        module.tied.weight = module.up.weight  # torch has untied them
    elif kind == "fsdp and tensor parallel":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], styles)
        module.tied.weight = module.up.weight
        fully_shard(module, mesh=mesh["dp"])
    elif kind == "hsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    else:
        assert kind == "replicated"


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


RemoteShardedTrainer = asyncsync.remote(num_cpus=0)(ShardedTrainer)


async def become(ranks: list[Any], kind: str, folder: Path, *, seed: int = 1, stage: str = "") -> None:
    """Have actors become the ranks of a trainer, or of one stage of it."""
    store = str(folder / uuid.uuid4().hex)
    await every(ranks, "hold", kind, len(ranks), store, seed, stage)


async def every(ranks: list[Any], method: str, *args: Any) -> list[Any]:
    """Call every rank."""
    return await asyncio.gather(*(cluster.call(rank, method, *args) for rank in ranks))
