"""Engines of several ranks, each an actor with a real process group: tensor parallel and replicated."""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import cluster
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.loading import StagedLoader
from tests.sample import content


class Served(nn.Module):
    """What trainers and engines hold: whole numbers, so that sums come out the same in any order.

    No number of ranks divides what is cut; there are all numbers of dimensions, tied weights, and what is not cut.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)
        self.tied = nn.Linear(5, 7, bias=False)
        self.deep = nn.Parameter(torch.empty(3, 5, 7))
        self.last = nn.Parameter(torch.empty(4, 3, 5))
        self.few = nn.Parameter(torch.empty(1, 6))
        self.brief = nn.Parameter(torch.empty(9, 3, dtype=torch.bfloat16))
        self.copied = nn.Parameter(torch.empty(3, 4))
        self.plain = nn.Parameter(torch.empty(6, 5))
        self.one = nn.Parameter(torch.empty(()))
        self.register_buffer("table", torch.randint(0, 99, (5, 3), generator=generator))
        self.register_buffer("steps", torch.tensor(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator))
        self.tied.weight = self.up.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Two layers, of which a tensor parallel engine's ranks hold a part each."""
        hidden: Tensor = torch.relu(self.up(inputs))
        outputs: Tensor = self.down(hidden)
        return outputs

    def step(self) -> None:
        """Change every tensor, in whole numbers."""
        with torch.no_grad():
            for tensor in self.state_dict().values():  # a tied one comes twice
                tensor.add_(1)


def cut(module: Served, size: int) -> None:
    """Cut a module up over the ranks: along every dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(module, mesh, styles)
    placements = {"deep": Shard(1), "last": Shard(2), "few": Shard(0), "brief": Shard(0), "copied": Replicate()}
    for name, placement in placements.items():
        setattr(module, name, nn.Parameter(distribute_tensor(module.get_parameter(name).detach(), mesh, [placement])))
    module.table = distribute_tensor(module.get_buffer("table"), mesh, [Shard(0)])
    module.tied.weight = module.up.weight  # torch has untied them


class ParallelEngine(asyncsync.ModuleEngine):
    """One rank of an engine."""

    module: Served

    def __init__(self) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else torch's own groups look this machine's name up
        super().__init__(Served(0))
        self._others: list[Any] = []
        self._one_by_one = asyncio.Lock()

    def hold(self, kind: str, rank: int, size: int, store: str, seed: int, staged: bool) -> None:
        """Collective. Become a rank of a new engine, on a process group of its own."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        module = Served(seed)
        if kind == "tensor parallel":
            cut(module, size)
        asyncsync.ModuleEngine.__init__(self, module, staged=staged)

    def lead(self, others: list[Any]) -> None:
        """Be the front of these."""
        self._others = others

    async def generate(self, inputs: Tensor) -> tuple[int | None, Tensor]:
        """Compute on all ranks; called on the front."""
        async with self.generating() as version, self._one_by_one:  # collectives keep their order
            outputs, *_ = await asyncio.gather(
                self.compute(inputs), *(cluster.call(other, "compute", inputs) for other in self._others)
            )
            return version, outputs

    async def compute(self, inputs: Tensor) -> Tensor:
        """Collective. This rank's part."""
        return await asyncio.to_thread(self._compute, inputs)

    def _compute(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return _whole(self.module(inputs)).clone()  # which waits for the sum

    def whole(self) -> dict[str, bytes]:
        """Collective. The bytes of every whole tensor, put together by torch."""
        return {name: content(_whole(tensor)) for name, tensor in self.module.state_dict().items()}

    def here(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what lies here."""
        return {name: tuple(_local(tensor).shape) for name, tensor in self.module.state_dict().items()}

    def staged_bytes(self) -> tuple[int, int]:
        """Bytes of the arenas beside and behind the weights, and of the weights that lie here."""
        assert isinstance(self._asyncsync._loader, StagedLoader)
        arenas = [
            arena for arena in (self._asyncsync._loader._spare, self._asyncsync._loader._live) if arena is not None
        ]
        own = {_local(tensor).data_ptr(): _local(tensor).nbytes for tensor in self.module.state_dict().values()}
        return sum(arena.memory.nbytes for arena in arenas), sum(own.values())

    def is_serving(self) -> bool:
        """Whether its gate is open."""
        assert isinstance(self._asyncsync.generations, GenerationGate)
        return self._asyncsync.generations.is_open

    def replace_parameter(self) -> None:
        """Serve another DTensor in place of one."""
        self.module.deep = nn.Parameter(self.module.deep.detach().clone())

    def convert_and_back(self) -> None:
        """Keep the parameters, and have torch give them other memory."""
        self.module.up.double().float()


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _local(tensor: Tensor) -> Tensor:
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


RemoteRank = asyncsync.remote(num_cpus=0)(ParallelEngine)
_seeds = itertools.count(100)


async def become(ranks: list[Any], kind: str, folder: Path, *, staged: bool = True) -> None:
    """Have actors become the ranks of an engine."""
    store, seed = str(folder / uuid.uuid4().hex), next(_seeds)
    await asyncio.gather(
        *(cluster.call(actor, "hold", kind, rank, len(ranks), store, seed, staged) for rank, actor in enumerate(ranks))
    )
    await cluster.call(ranks[0], "lead", ranks[1:])


async def every(ranks: list[Any], method: str, *args: Any) -> list[Any]:
    """Call every rank."""
    return await asyncio.gather(*(cluster.call(rank, method, *args) for rank in ranks))
