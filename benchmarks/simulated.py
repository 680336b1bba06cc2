"""Trainers and engines for the control plane alone: they answer and check calls as real ones do, and move no bytes.

Each call is a coroutine that gives the event loop back once, as if its answer had come from elsewhere. What a real end
does on threads or in other processes (joining a group, receiving, hashing, planning a layout) is left out, or done once
for all. The digest of a source's weights is one of its plan and the version, so both ends come to the same.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Sequence

from asyncsync.buckets import Plan, TensorSpec, joint_digest, plan_buckets
from asyncsync.digests import hash_text
from asyncsync.engines import EngineReceipt
from asyncsync.errors import ConnectError, EngineError, OutOfStepError, PlanError
from asyncsync.messages import (
    PROTOCOL_VERSION,
    Contacts,
    EngineStatus,
    Layout,
    Policy,
    ReadOptions,
    Rendezvous,
    SendReceipt,
    TrainerStatus,
    UpdateOrder,
)
from asyncsync.shards import Holding

ADDRESS = bytes(128)
"""In place of what a member says of how it is reached."""


@functools.lru_cache
def weights_digest(parts: tuple[str, ...], version: int) -> str:
    """Digest of the weights of a version, from the plan's digest of each source."""
    return joint_digest([hash_text((part, str(version))) for part in parts])


class Seats:
    """The groups that an end has opened or joined, one in each place."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[object, Rendezvous]] = {}
        self._taken: dict[object, str] = {}
        self._joined: dict[str, None] = {}

    @property
    def connections(self) -> tuple[str, ...]:
        """The groups it has joined."""
        return tuple(self._joined)

    def open(self, place: object, rendezvous: Rendezvous) -> Contacts:
        """Begin to join a group, and leave the one that is in its place."""
        if rendezvous.protocol != PROTOCOL_VERSION or not 0 <= rendezvous.rank < rendezvous.world_size:
            raise ConnectError(f"cannot join as {rendezvous}")
        if place in self._taken:
            self.leave(self._taken[place])
        self._opened[rendezvous.connection] = place, rendezvous
        self._taken[place] = rendezvous.connection
        return {str(rendezvous.rank): ADDRESS}

    def join(self, connection: str, contacts: Contacts) -> None:
        """Join it, once all members are known."""
        if connection not in self._opened:
            raise ConnectError("the group to join was closed meanwhile")
        wanted = self._opened[connection][1].world_size
        if len(contacts) != wanted:
            raise ConnectError(f"{len(contacts)} members came to a group of {wanted}")
        self._joined[connection] = None

    def leave(self, connection: str) -> None:
        """Leave it, if it is there."""
        if (opened := self._opened.pop(connection, None)) is not None:
            del self._taken[opened[0]]
            self._joined.pop(connection, None)

    def check(self, order: UpdateOrder) -> None:
        """Refuse an order that goes through other groups."""
        if not order.connections or any(connection not in self._joined for connection in order.connections):
            raise OutOfStepError("not in the groups that the order names")


class SimulatedTrainer:
    """A source of some tensors; satisfies :class:`asyncsync.trainer.Rank`."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._instance = uuid.uuid4().hex
        self._plan: Plan | None = None
        self._seats = Seats()
        self._epoch = 0

    async def begin_update(self) -> bool:
        """It has no hook."""
        await asyncio.sleep(0)
        return False

    async def end_update(self) -> None:
        """It has no hook."""
        await asyncio.sleep(0)

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """Plan, and say how it is."""
        await asyncio.sleep(0)
        plan = self._plan = self._plan or plan_buckets(self._specs, options.bucket_size)
        return TrainerStatus(
            instance=self._instance,
            device="cpu",
            connections=self._seats.connections,
            plan_digest=plan.digest,
            specs=None if plan.digest == known_digest else plan.specs,
            epoch=self._epoch,
        )

    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        """Begin to join a group, beside those it is in."""
        await asyncio.sleep(0)
        return self._seats.open(rendezvous.connection, rendezvous)

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """Join it."""
        await asyncio.sleep(0)
        self._seats.join(connection, contacts)

    async def leave_trainer_group(self, connection: str) -> None:
        """Leave it."""
        await asyncio.sleep(0)
        self._seats.leave(connection)

    async def share_holdings(self, rank: int, holdings: tuple[Holding | None, ...]) -> tuple[int, ...]:
        """It is alone: nobody brings anything."""
        await asyncio.sleep(0)
        return ()

    async def send_weights(self, order: UpdateOrder) -> SendReceipt:
        """Compare the order with what it knows."""
        await asyncio.sleep(0)
        self._seats.check(order)
        if order.epoch <= self._epoch:
            raise OutOfStepError(f"epoch {order.epoch} is over")
        plan = self._plan
        if plan is None or plan.digest != order.plan_digest:
            raise OutOfStepError("the layout changed")
        for connection in set(self._seats.connections) - set(order.connections):
            self._seats.leave(connection)
        self._epoch = order.epoch
        return SendReceipt(
            digest=weights_digest((plan.digest,), order.version),
            tensors=len(plan.specs),
            tensors_changed=len(plan.specs),
            buckets=len(plan.buckets),
            nbytes=plan.nbytes,
            nbytes_changed=plan.nbytes,
        )

    async def snapshot_weights(self, order: UpdateOrder) -> None:
        """It has no weights to copy."""
        await asyncio.sleep(0)

    async def drop_snapshot(self, snapshot: str) -> None:
        """It has copied nothing."""
        await asyncio.sleep(0)

    async def publish_weights(self, epoch: int, digest: str, sources: int) -> None:
        """Nothing: no folder was written."""

    async def abort_send(self, epoch: int) -> None:
        """Nothing is being sent for long."""
        await asyncio.sleep(0)
        self._epoch = max(self._epoch, epoch)


class SharedPlan:
    """Plans a layout once for all engines: real ones plan it each in its own process, at the same time."""

    def __init__(self) -> None:
        self._known: tuple[Layout, Plan] | None = None

    def of(self, layout: Layout) -> Plan:
        """The plan of a layout."""
        if self._known is None or self._known[0] is not layout:
            self._known = layout, layout.plan()
        return self._known[1]


class SimulatedEngine:
    """A rollout engine; satisfies :class:`asyncsync.engines.base.GivingEngine`.

    Attributes:
        weight_version: The version it serves.
    """

    def __init__(self, plans: SharedPlan, *, staged: bool) -> None:
        self.weight_version: int | None = None
        self._plans = plans
        self._staged = staged
        self._instance = uuid.uuid4().hex
        self._parts: tuple[str, ...] = ()
        self._plan_digest: str | None = None
        self._holds: dict[str, str] = {}
        self._seats = Seats()
        self._epoch = 0
        self._received: UpdateOrder | None = None
        self._paused = False

    async def describe_engine(self) -> EngineStatus:
        """Say how it is."""
        await asyncio.sleep(0)
        return EngineStatus(
            instance=self._instance,
            device="cpu",
            staged=self._staged,
            epoch=self._epoch,
            weight_version=self.weight_version,
            newest_version=self.weight_version or 0,
            connections=self._seats.connections,
            plan_digest=self._plan_digest,
            holds=self._holds,
            gives=True,
        )

    async def accept_layout(self, layout: Layout) -> None:
        """Compare the plans' digests."""
        await asyncio.sleep(0)
        plan = self._plans.of(layout)
        if plan.digest != layout.digest:
            raise PlanError("trainer and engine plan the same tensors differently")
        self._plan_digest = plan.digest
        self._parts = tuple(part.digest for part in plan.parts or (plan,))

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """Begin to join a group, in place of the one with the same source."""
        await asyncio.sleep(0)
        return self._seats.open(rendezvous.source, rendezvous)

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """Join it."""
        await asyncio.sleep(0)
        self._seats.join(connection, contacts)

    async def leave_group(self, connection: str) -> None:
        """Leave it."""
        await asyncio.sleep(0)
        self._seats.leave(connection)

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """Nobody generates here."""
        await asyncio.sleep(0)
        self._see(epoch)
        self._paused = True

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """Compare the order with what it knows."""
        await asyncio.sleep(0)
        self._see(order.epoch)
        self._seats.check(order)
        if order.version <= (self.weight_version or 0):
            raise OutOfStepError(f"version {order.version} exists already")
        if order.plan_digest != self._plan_digest:
            raise OutOfStepError("the layout was not agreed on")
        if not self._staged and not self._paused:
            raise EngineError("an engine that receives in place must be paused")
        self._received = order
        return EngineReceipt(digest=weights_digest(self._parts, order.version))

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        """Serve what was received."""
        await asyncio.sleep(0)
        if self._received is None or self._received.epoch != order.epoch:
            raise EngineError(f"there is no received update of epoch {order.epoch} to finish")
        self._received, self.weight_version = None, order.version
        self._holds = {order.plan_digest: weights_digest(self._parts, order.version)}

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """Drop what was received."""
        self._see(epoch)
        self._received = None
        return await self.describe_engine()

    async def resume_generation(self, epoch: int) -> None:
        """Serve again."""
        await asyncio.sleep(0)
        self._see(epoch)
        self._paused = False

    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        """Say the digest of what it serves."""
        await asyncio.sleep(0)
        self._see(order.epoch)
        self._seats.check(order)
        if order.version != self.weight_version:
            raise OutOfStepError(f"this engine serves version {self.weight_version}")
        return EngineReceipt(digest=weights_digest(self._parts, order.version))

    def _see(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise OutOfStepError(f"a call of epoch {epoch} is out of date")
        self._epoch = epoch
