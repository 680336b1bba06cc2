"""Actors that fail in every way, at every step of an update: they raise, end, stop, are late, or answer wrongly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import asyncsync
from asyncsync.buckets import Bucket
from asyncsync.messages import (
    Contacts,
    ReadOptions,
    Rendezvous,
    TrainerStatus,
    UpdateOrder,
)
from asyncsync.sending import OwnTensors
from benchmarks.faulty import FailingSteps, Fault
from tests.actors import EngineActor, Flat, TrainerActor

COUNT, SIZE = 16, 2**16

BUCKET = 4 * SIZE
"""Bytes of a bucket: each holds one tensor."""

MIDDLE = COUNT // 2
"""The bucket in the middle of a transfer."""


def weights(fill: float) -> nn.Module:
    """What trainers send and engines serve."""
    return Flat(COUNT, (SIZE,), fill=float(fill))


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


class FaultyEngineActor(Faulty, FailingSteps, EngineActor):
    """An engine that fails when told. ``receive_weights`` fails in the middle of the transfer."""

    fails_at = MIDDLE

    def __init__(self, make: Callable[[], nn.Module], *, staged: bool = True) -> None:
        super().__init__(make, staged=staged)
        self._finishing, self._finished = threading.Condition(), 0
        self._lined = True
        self.fails_when_told()

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        await super().finish_weight_update(order)
        with self._finishing:
            self._finished = order.version
            self._finishing.notify_all()

    async def has_finished(self, version: int) -> None:
        """Return once it has finished the update to a version."""

        def wait() -> None:
            with self._finishing:
                self._finishing.wait_for(lambda: self._finished >= version)

        await asyncio.to_thread(wait)

    async def open_control_line(self, token: str, secret: str, port: int) -> bool:
        # Over a broadcast it is called as an engine on another node is.
        return self._lined and await super().open_control_line(token, secret, port)

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        self._lined = rendezvous.transport != "broadcast"
        if self._fault.due("cannot listen"):
            self._asyncsync.receiver._address = lambda: "203.0.113.7"  # nobody's: for documentation
        try:
            return await super().open_group(rendezvous)
        finally:
            self._asyncsync.receiver._address = asyncsync.cluster.node_address


class FaultyTrainerActor(Faulty, TrainerActor):
    """A trainer that fails when told. ``send_weights`` fails in the middle of the transfer."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self._fault = fault = Fault()
        lying, fill = OwnTensors.lying, OwnTensors.fill

        def fail_if_due(bucket: Bucket) -> None:
            if bucket.index == MIDDLE and fault.due("send_weights"):
                fault.happen()

        def watched_lying(filler: OwnTensors, bucket: Bucket, device: str) -> Tensor | None:
            fail_if_due(bucket)
            return lying(filler, bucket, device)

        def watched_fill(filler: OwnTensors, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
            fail_if_due(bucket)
            fill(filler, bucket, buffer, stop)

        OwnTensors.lying = watched_lying  # type: ignore[assignment,method-assign]
        OwnTensors.fill = watched_fill  # type: ignore[assignment,method-assign]

    async def begin_update(self) -> bool:
        return await self._fault.before("begin_update", super().begin_update())

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        return await self._fault.before("describe_weights", super().describe_weights(options, known_digest))

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        await self._fault.before("join_trainer_group", super().join_trainer_group(connection, contacts))


# Not as decorators: a type checker would go on to see the classes.
FaultyEngine: Any = asyncsync.remote(num_cpus=0, max_restarts=-1)(FaultyEngineActor)
FaultyTrainer: Any = asyncsync.remote(num_cpus=0)(FaultyTrainerActor)
