"""Actors that fail in every way, at every step of an update: they raise, end, stop, are late, or answer wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

import asyncsync
from asyncsync.buckets import Bucket
from asyncsync.engines import EngineReceipt
from asyncsync.engines.loading import Loader
from asyncsync.messages import (
    Contacts,
    EngineStatus,
    Policy,
    ReadOptions,
    Rendezvous,
    SendReceipt,
    TrainerStatus,
    UpdateOrder,
)
from asyncsync.sending import OwnTensors
from tests.actors import EngineActor, Flat, TrainerActor

T = TypeVar("T")

COUNT, SIZE = 16, 2**16

BUCKET = 4 * SIZE
"""Bytes of a bucket: each holds one tensor."""

MIDDLE = COUNT // 2
"""The bucket in the middle of a transfer."""

LATE = 0.2
"""Seconds that an answer may be late without harm."""


def weights(fill: float) -> nn.Module:
    """What trainers send and engines serve."""
    return Flat(COUNT, (SIZE,), fill=float(fill))


class Fault:
    """What an actor is to do, once, when it comes to a step."""

    def __init__(self) -> None:
        self.step: str | None = None
        self.kind = ""
        self.arrived = threading.Event()
        self.released = threading.Event()

    def arm(self, step: str, kind: str) -> None:
        self.step, self.kind = step, kind
        self.arrived.clear()
        self.released.clear()

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


class Faulty:
    """What a test tells such an actor."""

    _fault: Fault

    async def arm(self, step: str, kind: str) -> None:
        """Fail once, when it comes to a step."""
        self._fault.arm(step, kind)

    async def arrived(self) -> None:
        """Return once it has come there."""
        await asyncio.to_thread(self._fault.arrived.wait)

    async def release(self) -> None:
        """Go on, if it stands still."""
        self._fault.released.set()


class FaultyEngineActor(Faulty, EngineActor):
    """An engine that fails when told. ``receive_weights`` fails in the middle of the transfer."""

    def __init__(self, make: Callable[[], nn.Module], *, staged: bool = True) -> None:
        super().__init__(make, staged=staged)
        self._fault = Fault()
        inner = self._asyncsync._loader_for
        self._asyncsync._loader_for = partial(self._watched, inner)  # type: ignore[method-assign]

    def _watched(self, inner: Callable[[str], Loader], device: str) -> Loader:
        loader = inner(device)
        take = type(loader).take

        def watched(bucket: Bucket, buffer: Tensor) -> None:
            if bucket.index == MIDDLE and self._fault.due("receive_weights"):
                self._fault.happen()
                if self._fault.kind == "answers wrongly":
                    buffer[0] ^= 1
            take(loader, bucket, buffer)

        loader.take = watched  # type: ignore[method-assign]
        return loader

    async def describe_engine(self) -> EngineStatus:
        return await self._fault.before("describe_engine", super().describe_engine())

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        if self._fault.due("cannot listen"):
            self._asyncsync.receiver._address = lambda: "203.0.113.7"  # nobody's: for documentation
        try:
            return await self._fault.before("open_group", super().open_group(rendezvous))
        finally:
            self._asyncsync.receiver._address = asyncsync.cluster.node_address

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        await self._fault.before("join_group", super().join_group(connection, contacts))

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        await self._fault.before("pause_generation", super().pause_generation(epoch, policy))

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        return await super().receive_weights(order)

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        await self._fault.before("finish_weight_update", super().finish_weight_update(order))

    async def resume_generation(self, epoch: int) -> None:
        await self._fault.before("resume_generation", super().resume_generation(epoch))


class FaultyTrainerActor(Faulty, TrainerActor):
    """A trainer that fails when told. ``send_weights`` fails in the middle of the transfer."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self._fault = fault = Fault()
        lying = OwnTensors.lying

        def watched(filler: OwnTensors, bucket: Bucket, device: str) -> Tensor | None:
            if bucket.index == MIDDLE and fault.due("send_weights"):
                fault.happen()
            return lying(filler, bucket, device)

        OwnTensors.lying = watched  # type: ignore[assignment,method-assign]

    async def begin_update(self) -> bool:
        return await self._fault.before("begin_update", super().begin_update())

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        return await self._fault.before("describe_weights", super().describe_weights(options, known_digest))

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        await self._fault.before("join_trainer_group", super().join_trainer_group(connection, contacts))

    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        return await super().send_weights(order)


# Not as decorators: a type checker would go on to see the classes.
FaultyEngine: Any = asyncsync.remote(num_cpus=0, max_restarts=-1)(FaultyEngineActor)
FaultyTrainer: Any = asyncsync.remote(num_cpus=0)(FaultyTrainerActor)
