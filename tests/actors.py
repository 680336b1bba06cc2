"""Ray actors to test with."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync.packing import raw
from tests.sample import contents, fingerprint


class Flat(nn.Module):
    """A module of many tensors of one shape."""

    def __init__(self, count: int, shape: tuple[int, ...], *, fill: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full(shape, fill) for _ in range(count)])


class Probe:
    """What a test asks an actor: its memory, its process, its weights."""

    module: nn.Module

    def resident(self) -> int:
        """Resident memory, bytes."""
        return int(psutil.Process().memory_info().rss)

    def open_files(self) -> int:
        """Number of file descriptors."""
        return int(psutil.Process().num_fds())

    def threads(self) -> int:
        """Number of Python's threads."""
        return threading.active_count()

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    def node(self) -> str:
        """Id of the Ray node it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def contents(self) -> dict[str, bytes]:
        """The weights' bytes."""
        return contents(self.module)

    def block_until(self, path: str) -> None:
        """Be a long synchronous call: hold the actor's main loop until a file is there."""
        while not Path(path).exists():
            time.sleep(0.005)  # noqa: TID251 - this actor is to block


class EngineActor(Probe, asyncsync.ModuleEngine):
    """A rollout engine of any module."""

    def __init__(self, make: Callable[[], nn.Module], *, staged: bool = True) -> None:
        torch.set_num_threads(1)
        self._gone: set[str] = set()
        super().__init__(make(), staged=staged)

    def released_memory(self) -> set[str]:
        """What is released; whatever the weights were is overwritten then."""
        return self._gone

    async def release_memory(self, tags: Collection[str]) -> None:
        """Sleep."""
        assert not self._gone & set(tags)
        self._gone |= set(tags)
        if "weights" in tags:
            with torch.no_grad():
                for tensor in self.module.state_dict(keep_vars=True).values():
                    raw(tensor).fill_(91)

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Wake up."""
        assert self._gone.issuperset(tags)
        self._gone -= set(tags)

    async def receiving(self) -> bool:
        """Whether it keeps what came of an update that is neither finished nor dropped."""
        return self._asyncsync.receiver.session is not None

    async def serve(self, make: Callable[[], nn.Module]) -> None:
        """Serve another module from now on: as a newly started engine would."""
        asyncsync.ModuleEngine.__init__(self, make(), staged=self._asyncsync._staged)

    async def read(self) -> tuple[int | None, str]:
        """Generate: the version and a digest of what was read."""
        async with self.generating() as version:
            return version, fingerprint(self.module)


class TrainerActor(Probe, asyncsync.TrainerRank):
    """A trainer of any module."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.set_num_threads(1)
        self.module = make()
        super().__init__(self._weights)

    def _weights(self) -> nn.Module:
        return self.module

    def hold(self, make: Callable[[], nn.Module]) -> None:
        """Train another module from now on."""
        self.module = make()

    def change(self, names: list[str] | None = None) -> None:
        """Take a step: add one to float32 tensors."""
        tensors: dict[str, Tensor] = self.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values():
                if tensor.dtype is torch.float32 and 0 not in tensor.stride() and (names is None or name in names):
                    tensor.add_(1)


# Not as decorators: a type checker would go on to see the classes.
Engine: Any = asyncsync.remote(num_cpus=0, max_restarts=4)(EngineActor)
Trainer: Any = asyncsync.remote(num_cpus=0)(TrainerActor)
