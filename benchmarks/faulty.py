"""Engines that fail when told, at any step of an update: they raise, end, stop, are late, or answer wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import asyncsync
from asyncsync.buckets import Bucket
from asyncsync.engines.loading import Loader
from asyncsync.messages import Contacts, EngineStatus, Policy, Rendezvous, UpdateOrder
from benchmarks import layouts
from benchmarks.layouts import Layout

T = TypeVar("T")

LATE = 0.2
"""Seconds that an answer may be late without harm."""


class Fault:
    """What an actor is to do, once, when it comes to a step."""

    def __init__(self) -> None:
        self.step: str | None = None
        self.kind = ""
        self.arrived = threading.Event()
        self.released = threading.Event()

    def arm(self, step: str, kind: str) -> None:
        """Fail once, at a step."""
        self.step, self.kind = step, kind
        self.arrived.clear()
        self.released.clear()

    def disarm(self) -> bool:
        """Fail no more, and go on if it stands still; whether it had come to the step."""
        came = self.step is None
        self.step = None
        self.released.set()
        return came

    def due(self, step: str) -> bool:
        """Whether it is this step's turn; it is that once."""
        if self.step != step:
            return False
        self.step = None
        return True

    def happen(self) -> None:
        """Do it. May block."""
        self.arrived.set()
        if self.kind == "raises":
            raise OSError("the disk is full")
        if self.kind == "exits":
            os._exit(1)
        if self.kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "answers late":
            time.sleep(LATE)  # noqa: TID251 - on a thread that is to be late
        if self.kind == "does not answer":
            self.released.wait()

    async def before(self, step: str, call: Awaitable[T]) -> T:
        """Do it before a call, if it is the turn of that step."""
        try:
            if self.due(step):
                await asyncio.to_thread(self.happen)
        except BaseException:
            call.close()  # type: ignore[attr-defined]  # a coroutine that is not awaited after all
            raise
        return await call


class FailingSteps(asyncsync.ModuleEngine):
    """The steps of an engine that fails when told: put it before the engine's own class.

    ``receive_weights`` fails at a bucket, :attr:`fails_at`; the others before they begin.
    """

    fails_at = 8

    def fails_when_told(self) -> None:
        """To be called once the engine is made."""
        self._fault = Fault()
        inner = self._asyncsync._loader_for
        self._asyncsync._loader_for = partial(self._watched, inner)  # type: ignore[method-assign]

    def _watched(self, inner: Callable[[str], Loader], device: str) -> Loader:
        loader = inner(device)
        take, itself = type(loader).take, weakref.proxy(loader)  # no cycle: it may keep a set of weights

        def watched(bucket: Bucket, buffer: Tensor) -> None:
            if bucket.index == self.fails_at and self._fault.due("receive_weights"):
                self._fault.happen()
                if self._fault.kind == "answers wrongly":
                    buffer[0] ^= 1
            take(itself, bucket, buffer)

        loader.take = watched  # type: ignore[method-assign]
        return loader

    async def describe_engine(self) -> EngineStatus:
        """May fail."""
        return await self._fault.before("describe_engine", super().describe_engine())

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """May fail."""
        return await self._fault.before("open_group", super().open_group(rendezvous))

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """May fail."""
        await self._fault.before("join_group", super().join_group(connection, contacts))

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """May fail."""
        await self._fault.before("pause_generation", super().pause_generation(epoch, policy))

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        """May fail."""
        await self._fault.before("finish_weight_update", super().finish_weight_update(order))

    async def resume_generation(self, epoch: int) -> None:
        """May fail."""
        await self._fault.before("resume_generation", super().resume_generation(epoch))


class FaultyEngineActor(FailingSteps):
    """An engine that fails when told, and tells how it is.

    Args:
        layout: Of what it serves.
        staged: Whether it holds new weights beside the old.
    """

    def __init__(self, layout: Layout, *, staged: bool = True) -> None:
        torch.set_num_threads(1)
        super().__init__(layouts.make_module(layout), staged=staged)
        self.fails_when_told()

    async def read(self) -> tuple[int | None, str]:
        """Generate: the version, and a digest of what was read."""
        async with self.generating() as version:
            return version, layouts.fingerprint(self.module.parameters())

    async def arm(self, step: str, kind: str, bucket: int = 0) -> None:
        """Fail once, when it comes to a step; while weights arrive, at a bucket."""
        self.fails_at = bucket
        self._fault.arm(step, kind)

    async def arrived(self) -> None:
        """Return once it has come to the step."""
        await asyncio.to_thread(self._fault.arrived.wait)

    async def disarm(self) -> bool:
        """Fail no more, and go on if it stands still; whether it had come to the step."""
        return self._fault.disarm()

    async def vitals(self) -> dict[str, int]:
        """How the process is: see :func:`vitals`."""
        return vitals()


FaultyEngine: Any = asyncsync.remote(num_cpus=0, max_restarts=-1)(FaultyEngineActor)
# Not as a decorator: a type checker would go on to see the class.


def vitals() -> dict[str, int]:
    """How this process is: its id, resident memory (bytes), file descriptors and threads."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "pid": os.getpid(),
        "rss": pages * os.sysconf("SC_PAGESIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
