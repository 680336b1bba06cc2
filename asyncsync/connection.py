"""Agreeing on what is sent, and connecting what is new: everything before an update's first byte.

At first, and after any failure, both ends are asked how they are, in one round; their answers decide what has to be
done. After an update that succeeded everywhere nobody is asked: the next order is given on what is known, and an end
that finds it out of step (an engine that was restarted, a layout that changed) refuses it before the first byte. Then
everyone is asked again. A round of calls to Ray actors costs 2 ms, so an update in step costs two rounds, not three.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

from asyncsync import cluster
from asyncsync.clock import UpdateClock
from asyncsync.errors import ConnectError, PlanError, TrainerError, WeightUpdateError
from asyncsync.fanout import race, settle
from asyncsync.fleet import Fleet, Member, is_ours
from asyncsync.messages import (
    Backend,
    Contacts,
    EngineStatus,
    Layout,
    Policy,
    ReadOptions,
    Rendezvous,
    TrainerStatus,
    UpdateOrder,
    next_epoch,
)
from asyncsync.shield import shielded
from asyncsync.trainer import Trainer

JOIN_TIMEOUT = 30.0
"""Seconds, at the most, that the members of a group wait for each other."""

OPERATION_TIMEOUT = 60.0
"""Seconds, at the most, that one bucket may take; an operation that was given up ends by then."""

BackendChoice = Literal["auto"] | Backend

T = TypeVar("T")
_log = logging.getLogger("asyncsync")


class Connection:
    """What trainer and engines have agreed on, and the group they are in.

    Args:
        trainer: The source rank.
        fleet: The engines.
        options: How the trainer is to read its weights.
        partial: Whether engines may hold names that are not sent.
        backend: The group's backend; ``"auto"`` is NCCL if every weight is on a GPU, else gloo.
        policy: What is done with requests in flight.
        timeout: Seconds for an operation of the group.
        cleanup_timeout: Seconds for undoing a failed connect.
    """

    def __init__(
        self,
        trainer: Trainer,
        fleet: Fleet,
        *,
        options: ReadOptions,
        partial: bool,
        backend: BackendChoice,
        policy: Policy,
        timeout: float,
        cleanup_timeout: float,
    ) -> None:
        self._trainer = trainer
        self._fleet = fleet
        self._options = options
        self._partial = partial
        self._backend = backend
        self._policy = policy
        self._timeout = timeout
        self._cleanup_timeout = cleanup_timeout
        self._layout: Layout | None = None
        self._group: tuple[str, tuple[str, ...]] | None = None
        self._engines: dict[Member, EngineStatus] | None = None
        self._epoch = 0

    @property
    def in_step(self) -> bool:
        """Whether the next order may be given without asking."""
        return self._engines is not None

    def confirm(self, order: UpdateOrder) -> None:
        """An update succeeded at every end."""
        if self._engines is not None:
            self._engines = {
                member: replace(status, weight_version=order.version, newest_version=order.version, tainted=None)
                for member, status in self._engines.items()
            }

    def forget(self) -> None:
        """An update failed: ask everyone before the next."""
        self._engines = None

    async def agree(
        self, clock: UpdateClock, *, base_epoch: int | None, version: int
    ) -> tuple[UpdateOrder, dict[Member, EngineStatus]]:
        """Read the trainer's layout, have the engines accept it, and connect whatever is not.

        Args:
            clock: The update's clock.
            base_epoch: The attempt that made the published version.
            version: The last version known here.

        Returns:
            The order for an update that may now begin, and how each engine is.

        Raises:
            PlanError: The weights cannot be sent, or do not fit an engine.
            ConnectError: The group could not be set up.
            EngineError: An engine failed; several of them as an EngineErrorGroup.
            TrainerError: The trainer failed.
        """
        engines = self._engines
        if engines is None:
            engines = await self._ask_and_connect(clock)
            self._engines = engines
        assert self._group is not None
        assert self._layout is not None
        self._epoch = next_epoch(max(self._epoch, *(status.epoch for status in engines.values())))
        newest = max(version, *(status.newest_version for status in engines.values()))
        order = UpdateOrder(
            epoch=self._epoch,
            version=newest + 1,
            connection=self._group[0],
            plan_digest=self._layout.digest,
            policy=self._policy,
            base_epoch=base_epoch,
            timeout=clock.limit("transfer"),
        )
        return order, engines

    async def _ask_and_connect(self, clock: UpdateClock) -> dict[Member, EngineStatus]:
        with clock.phase("describe"):
            known = self._layout.digest if self._layout else None
            answers: dict[str, Any] = await race(
                {
                    "trainer": call_trainer(
                        lambda: self._trainer.describe_weights(self._options, known), silent=self._fleet.silent
                    ),
                    "engines": self._fleet.describe(self._policy),
                }
            )
            trainer: TrainerStatus = answers["trainer"]
            engines: dict[Member, EngineStatus] = answers["engines"]
            layout = self._agreed_layout(trainer)
        self._epoch = max(self._epoch, trainer.epoch)
        unacquainted = [
            member
            for member, status in engines.items()
            if (status.plan_digest, status.partial) != (layout.digest, layout.partial)
        ]
        connected = self._is_connected(trainer, engines)
        if unacquainted or not connected:
            with clock.phase("connect"):
                await self._fleet.all(lambda engine: engine.accept_layout(layout), members=unacquainted)
                if not connected:
                    await self._connect(clock, trainer, engines)
        return engines

    async def aclose(self) -> None:
        """Leave the group, at every end; bounded, and no error if an end is gone."""
        if self._group is not None:
            await self._leave(self._group[0])

    def _agreed_layout(self, trainer: TrainerStatus) -> Layout:
        if not trainer.control_group:
            raise ConnectError(
                "the trainer would not answer while it trains: "
                "declare its class with @asyncsync.remote(…) in place of @ray.remote(…)"
            )
        if trainer.holding is not None:
            raise PlanError("the trainer's weights are sharded over ranks: give the synchronizer a list of all of them")
        if trainer.specs == ():
            raise PlanError("there is not one tensor to send (did name_map leave all of them out?)")
        if trainer.specs is not None:
            self._layout = Layout(
                specs=trainer.specs,
                bucket_size=self._options.bucket_size,
                digest=trainer.plan_digest,
                partial=self._partial,
            )
        assert self._layout is not None
        return self._layout

    def _is_connected(self, trainer: TrainerStatus, engines: dict[Member, EngineStatus]) -> bool:
        return (
            self._group is not None
            and self._group == (trainer.connection, _instances(trainer, engines))
            and all(status.connection == trainer.connection for status in engines.values())
        )

    async def _connect(self, clock: UpdateClock, trainer: TrainerStatus, engines: dict[Member, EngineStatus]) -> None:
        self._group = None  # until it is: a failed connect must not look like a connection (R13)
        join_timeout = min(JOIN_TIMEOUT, clock.limit("connect"))
        connection = secrets.token_hex(16)
        world_size = 1 + sum(status.world_size for status in engines.values())
        backend = self._choose_backend(trainer, engines)

        def rendezvous(rank: int) -> Rendezvous:
            return Rendezvous(
                connection=connection,
                backend=backend,
                rank=rank,
                world_size=world_size,
                join_timeout=join_timeout,
                operation_timeout=min(OPERATION_TIMEOUT, self._timeout),
            )

        def open_group(member: Member, rank: int) -> Awaitable[Contacts]:
            return member.call(lambda engine: engine.open_group(rendezvous(rank)))

        def join_group(member: Member, contacts: Contacts) -> Awaitable[None]:
            return member.call(lambda engine: engine.join_group(connection, contacts))

        opened: dict[object, Awaitable[Contacts]] = {
            self._trainer: call_trainer(
                lambda: self._trainer.open_trainer_group(rendezvous(0)), silent=self._fleet.silent
            )
        }
        rank = 1
        for member, status in engines.items():
            opened[member] = open_group(member, rank)
            rank += status.world_size
        try:
            everyone: Contacts = {}
            for contacts in (await race(opened)).values():
                everyone |= contacts
            joined: dict[object, Awaitable[None]] = {
                self._trainer: call_trainer(
                    lambda: self._trainer.join_trainer_group(connection, everyone), silent=self._fleet.silent
                )
            }
            joined |= {member: join_group(member, everyone) for member in engines}
            await race(joined)
        except BaseException:
            await shielded(self._leave(connection))
            raise
        self._group = (connection, _instances(trainer, engines))
        _log.debug("connected %s: %d members over %s", connection[:8], world_size, backend)

    def _choose_backend(self, trainer: TrainerStatus, engines: dict[Member, EngineStatus]) -> Backend:
        if self._backend != "auto":
            return self._backend
        devices = {trainer.device, *(status.device for status in engines.values())}
        return "nccl" if devices == {"cuda"} else "gloo"

    async def _leave(self, connection: str) -> None:
        timeout = self._cleanup_timeout
        ends: dict[object, Awaitable[None]] = {
            "trainer": call_trainer(lambda: self._trainer.leave_trainer_group(connection), timeout=timeout)
        }
        ends |= {
            member: member.call(lambda engine: engine.leave_group(connection), timeout)
            for member in self._fleet.members
        }
        for result in (await settle(ends)).values():
            if isinstance(result, Exception):
                _log.info("leaving group %s: %s", connection[:8], result)


async def call_trainer(
    call: Callable[[], Awaitable[T]], *, timeout: float | None = None, silent: list[str] | None = None
) -> T:
    """Call the trainer; an error that is not the library's own becomes a TrainerError.

    Args:
        call: What to call.
        timeout: Seconds it may take.
        silent: Where it is noted if the call is given up before the trainer has answered.

    Raises:
        TrainerError: It failed, is gone, or did not answer in time; its own error is the cause.
    """
    try:
        async with asyncio.timeout(timeout) as limit:
            return await call()
    except (PlanError, WeightUpdateError):
        raise
    except cluster.ActorLostError as error:
        raise TrainerError(f"the trainer is gone: {cluster.how_it_was_lost(error)}") from error
    except BaseException as error:
        if is_ours(error):
            if silent is not None:
                silent.append("the trainer")
            raise
        if limit.expired():
            raise TrainerError(f"the trainer did not answer within {timeout} s") from error
        raise TrainerError(f"the trainer failed: {type(error).__name__}: {error}") from error


def _instances(trainer: TrainerStatus, engines: dict[Member, EngineStatus]) -> tuple[str, ...]:
    return (trainer.instance, *(status.instance for status in engines.values()))
