"""Agreeing on what is sent, and connecting what is new: everything before an update's first byte.

At first, after any failure, and when engines have come or gone, everyone is asked how they are, in one round; the
answers decide what has to be done. After an update that succeeded everywhere nobody is asked: the next order is given
on what is known, and an end that finds it out of step (an engine that was restarted, a layout that changed) refuses it
before the first byte. Then everyone is asked again. A round of calls to Ray actors costs 2 ms, so an update in step
costs two rounds, not three.

Engines are connected in *cohorts*: those that were connected together are in one group with each source, so that one
broadcast serves them all. Engines that join become a cohort of their own, and nobody else is touched. A cohort that an
engine has left is formed anew of those that remain and those that join. As each bucket is sent to each cohort, there
are only so many: beyond that, all are made one. An engine that takes another kind of group is alone in it.

Which way the bytes go to each engine is chosen by where it is: through memory that the source shares, if it is on the
node of all sources and there is enough, memory of the GPU if all weights are on such; else through the broadcast;
unless a way was named. Those of one way are a cohort. Engines that fetch from a store are in no group: of their cohort
only sources have an end, and whoever joins it costs no connecting.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast, get_args

from asyncsync.attempt import Orders
from asyncsync.buckets import TensorSpec, joint_digest, refuse_rivals
from asyncsync.clock import UpdateClock
from asyncsync.engines.base import CheckedEngine, RolloutEngine
from asyncsync.engines.waking import asleep_and_refused
from asyncsync.errors import ConnectError, EngineError, PlanError
from asyncsync.fanout import race, settle
from asyncsync.fleet import LATE_TIMEOUT, PATIENCE, Fleet, Member, combine_errors
from asyncsync.messages import (
    NO_GROUP,
    STORES,
    Backend,
    ChecksumPart,
    Checksums,
    Contacts,
    EngineStatus,
    Layout,
    Policy,
    ReadOptions,
    Rendezvous,
    SendReceipt,
    Store,
    TrainerStatus,
    Transport,
    UpdateOrder,
    next_epoch,
)
from asyncsync.shield import CLEANUP_TIMEOUT, shielded
from asyncsync.sources import Source, Sources
from asyncsync.transports.forming import End, form_group

JOIN_TIMEOUT = 30.0
"""Seconds, at the most, that the members of a group wait for each other."""

OPERATION_TIMEOUT = 60.0
"""Seconds, at the most, that one bucket may take; an operation that was given up ends by then."""

MAX_COHORTS = 4
"""How many times a bucket may have to be sent because engines joined one by one."""

BackendChoice = Literal["auto"] | Backend

TransportChoice = Literal["auto", "shared", "cuda_ipc", "broadcast"] | Store

TRANSPORTS: tuple[str, ...] = (*get_args(Literal["auto", "shared", "cuda_ipc", "broadcast"]), *STORES)
"""All choices there are."""

TransportsChoice: TypeAlias = TransportChoice | Callable[[Any], TransportChoice]
"""One for all engines, or a function from an engine, as it was given, to its own."""

_log = logging.getLogger("asyncsync")


@dataclass(frozen=True, slots=True)
class Cohort:
    """Engines that are in the same groups.

    Attributes:
        connections: The groups' names, one a source, in order.
        engines: What identified each engine, with its number of ranks, when it was connected.
        sources: What identified each source.
        backend: Of the groups.
        transport: Of the groups; of a store only the sources have an end, and engines are in none of them.
    """

    connections: tuple[str, ...]
    engines: Mapping[Member, tuple[str, int]]
    sources: tuple[str, ...]
    backend: Backend
    transport: Transport

    @property
    def seats(self) -> Mapping[tuple[str, int], Member]:
        """Whose each rank in each of the groups is; rank 0 is the source's."""
        if self.transport in STORES:
            return {}
        ranks = [member for member, (_, ranks) in self.engines.items() for _ in range(ranks)]
        return {(name, rank): member for name in self.connections for rank, member in enumerate(ranks, start=1)}

    @property
    def alike(self) -> Sequence[Collection[Member]]:
        """Its engines, those together that all get what differs or all get whole buckets."""
        return [(member,) for member in self.engines] if self.transport == "folder" else [self.engines.keys()]

    def stands(
        self,
        sources: Sequence[TrainerStatus],
        engines: Mapping[Member, EngineStatus],
        backend: Backend,
        transports: Mapping[Member, Transport],
    ) -> bool:
        """Whether every end is still who it was, and in the groups that it is to be in."""
        same_sources = self.sources == _identities(sources) and all(
            name in source.connections for name, source in zip(self.connections, sources, strict=True)
        )
        if self.transport in STORES:
            return same_sources
        return (
            self.backend == backend
            and same_sources
            and all(
                member in engines
                and transports[member] == self.transport
                and _identity(engines[member]) == identity
                and set(self.connections) <= set(engines[member].connections)
                for member, identity in self.engines.items()
            )
        )

    def of(self, engines: Mapping[Member, EngineStatus], transports: Mapping[Member, Transport]) -> Cohort:
        """Itself; that of a store is of whoever fetches from there now."""
        if self.transport not in STORES:
            return self
        fetching = {member: status for member, status in engines.items() if transports[member] == self.transport}
        return replace(self, engines={member: _identity(status) for member, status in fetching.items()})


@dataclass(slots=True)
class SnapshotName:
    """The snapshot that the weights of one update come from, however often it is tried.

    Attributes:
        name: Random: two conductors never use the same.
        taken: Whether sources have it.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    taken: bool = False


class Connection:
    """What sources and engines have agreed on, and the groups they are in.

    Args:
        sources: Where the weights come from.
        options: How they are to be read.
        partial: Whether engines may hold names that are not sent.
        backend: The groups' backend; ``"auto"`` is NCCL if every weight is on a GPU, else gloo.
        transport: How the bytes are to come to engines; ``"auto"`` is through shared memory where that can be.
        folder: Where every version is written, for engines that fetch it there, and for other readers.
        policy: What is done with requests in flight.
        wake: Whether engines that sleep may be woken by an update.
        timeout: Seconds for an operation of a group.

    Attributes:
        layout: What was agreed on last.
        folder: Where every version is written.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        options: ReadOptions,
        partial: bool,
        backend: BackendChoice,
        transport: TransportsChoice,
        folder: str | None = None,
        policy: Policy,
        wake: bool,
        timeout: float,
    ) -> None:
        self._sources = sources
        self._options = options
        self._partial = partial
        self._backend = backend
        self._transport = transport
        self.folder = folder
        self._policy = policy
        self._wake = wake
        self._timeout = timeout
        self.layout: Layout | None = None
        self._parts: tuple[tuple[TensorSpec, ...], ...] = ((),) * len(sources.all)
        self._plans: tuple[str | None, ...] = (None,) * len(sources.all)
        self._cohorts: tuple[Cohort, ...] = ()
        self._engines: Mapping[Member, EngineStatus] | None = None
        self._wanted: dict[Member, Checksums] = {}
        self._bases: tuple[tuple[int, ...], ...] = ()  # by source: the updates that it can compare with
        self._epoch = 0

    def __repr__(self) -> str:
        state = "in step" if self._engines is not None else "to be asked"
        return f"<Connection {state}: {len(self._cohorts)} cohorts, {len(self._sources.all)} sources>"

    def in_step(self, fleet: Fleet) -> bool:
        """Whether the next order may be given to these engines without asking anyone."""
        return self._engines is not None and tuple(self._engines) == fleet.members

    def confirm(self, order: UpdateOrder, sent: Sequence[SendReceipt]) -> None:
        """An update succeeded at every end."""
        self._bases = tuple((order.epoch,) if receipt.elements else () for receipt in sent)
        if self._engines is not None:
            self._engines = {
                member: replace(
                    status,
                    weight_version=order.version,
                    newest_version=order.version,
                    tainted=None,
                    paused=False,
                    released=(),  # or it was put to sleep since: then it wakes by the next order, or refuses it
                    base_epoch=order.epoch if status.no_deltas is None else None,
                )
                for member, status in self._engines.items()
            }

    def forget(self) -> None:
        """An update failed: ask everyone before the next."""
        self._engines = None

    async def agree(
        self,
        clock: UpdateClock,
        fleet: Fleet,
        *,
        base_epoch: int | None,
        version: int,
        snapshot: SnapshotName | None = None,
    ) -> tuple[Orders, Mapping[Member, EngineStatus]]:
        """Read the trainer's layout, have the engines accept it, and connect whatever is not.

        Args:
            clock: The update's clock.
            fleet: The engines.
            base_epoch: The attempt that made the published version.
            version: The last version known here.
            snapshot: The snapshot that sources are to take, or have taken and send; None: they send what is there.

        Returns:
            The orders for an update that may now begin, and how each engine is.

        Raises:
            PlanError: The weights cannot be sent, or do not fit an engine.
            ConnectError: A group could not be set up.
            EngineError: An engine failed; several of them as an EngineErrorGroup.
            TrainerError: The trainer failed.
        """
        self._options = replace(self._options, snapshot=snapshot.name if snapshot and snapshot.taken else None)
        if not self.in_step(fleet):
            self._engines = None
            self._engines = await self._ask_and_connect(clock, fleet)
        engines = self._engines
        assert engines is not None
        assert self.layout is not None
        newest = max(version, *(status.newest_version for status in engines.values()))
        order = UpdateOrder(
            epoch=self.next_epoch(engines.values()),
            version=newest + 1,
            connections=(),
            plan_digest=self.layout.digest,
            policy=self._policy,
            base_epoch=base_epoch,
            timeout=clock.limit("transfer"),
            lease=clock.remaining,
            wake=self._wake,
        )
        wanted: dict[tuple[ChecksumPart, ...], str] = {}  # engines that are alike want the same, which is taken once
        checks = {
            member: {key: wanted.setdefault(parts, str(len(wanted))) for key, parts in each.items()}
            for member, each in self._wanted.items()
        }
        checksums = {key: parts for parts, key in wanted.items()}
        against, deltas = self._deltas(engines)
        comparing = [cohort for cohort in self._cohorts if not deltas.isdisjoint(cohort.engines)]
        sources = tuple(
            replace(
                order,
                connections=tuple(cohort.connections[number] for cohort in self._cohorts),
                plan_digest=plan,
                checksums=checksums,
                snapshot=snapshot.name if snapshot else None,
                against=against,
                deltas=tuple(cohort.connections[number] for cohort in comparing),
            )
            for number, plan in enumerate(self._plans)
            if plan is not None
        )
        received = {
            member: replace(order, connections=cohort.connections, against=against if member in deltas else None)
            for cohort in self._cohorts
            for member in cohort.engines
        }
        seats = {seat: member for cohort in self._cohorts for seat, member in cohort.seats.items()}
        transports = {member: cohort.transport for cohort in self._cohorts for member in cohort.engines}
        publishes = any(cohort.transport == "folder" for cohort in self._cohorts)
        return Orders(order, sources, received, checks, transports, seats, publishes, deltas), engines

    def _deltas(self, engines: Mapping[Member, EngineStatus]) -> tuple[int | None, frozenset[Member]]:
        """The update that the next is to be compared with, if any, and the engines that get only what differs.

        A cohort does if each of its engines holds the bytes of an update that all sources can compare with. All others
        get whole buckets, beside them: one that has joined, was repaired, or has agreed on the layout only now. In a
        folder there is both, and each engine reads what it needs.
        """
        known = set.intersection(*map(set, self._bases)) if self._options.delta and self._bases else set()
        if any(
            cohort.transport in ("pynccl", "cuda_ipc") or (cohort.transport == "broadcast" and cohort.backend == "nccl")
            for cohort in self._cohorts
        ):
            return None, frozenset()  # what moves from device to device never lies on the host
        held = [
            (alike, {None if member.differs else engines[member].base_epoch for member in alike})
            for cohort in self._cohorts
            for alike in cohort.alike
        ]
        common = [epoch for _, epochs in held if len(epochs) == 1 for epoch in epochs]
        against = max((epoch for epoch in common if epoch is not None and epoch in known), default=None)
        if against is None:
            return None, frozenset()
        return against, frozenset(member for alike, epochs in held if epochs == {against} for member in alike)

    def next_epoch(self, engines: Iterable[EngineStatus]) -> int:
        """An epoch newer than any that these engines have seen."""
        self._epoch = next_epoch(max(self._epoch, *(status.epoch for status in engines)))
        return self._epoch

    async def _ask_and_connect(self, clock: UpdateClock, fleet: Fleet) -> Mapping[Member, EngineStatus]:
        with clock.phase("describe"):
            answers: dict[str, Any] = await race(
                {"sources": self._describe_sources(), "engines": fleet.describe(self._policy)}
            )
            sources: list[TrainerStatus] = answers["sources"]
            engines: dict[Member, EngineStatus] = answers["engines"]
            self._refuse_asleep(engines)
            whole_tensors = any(status.whole_tensors for status in engines.values())
            if whole_tensors != self._options.whole_tensors:
                self._options = replace(self._options, whole_tensors=whole_tensors)
                sources = await self._describe_sources()
            backend = self.choose_backend([*sources, *engines.values()])
            transports = self._choose_transports(sources, engines, backend)
            layout = await self._agreed_layout(sources)
        self._epoch = max(self._epoch, *(status.epoch for status in sources))
        self._bases = tuple(status.base_epochs for status in sources)
        unacquainted = [member for member, status in engines.items() if not is_acquainted(status, layout)]
        standing = [
            cohort.of(engines, transports)
            for cohort in self._cohorts
            if self._is_wanted(cohort.transport, transports) and cohort.stands(sources, engines, backend, transports)
        ]
        groups = [cohort for cohort in standing if cohort.transport == "broadcast"]
        many = sum(transport == "broadcast" for transport in transports.values())
        if len(groups) >= MAX_COHORTS and sum(len(cohort.engines) for cohort in groups) < many:
            standing = [cohort for cohort in standing if cohort not in groups]
        alone = {
            member: status
            for member, status in engines.items()
            if not any(member in cohort.engines for cohort in standing)
        }
        checking = [member for member, status in engines.items() if status.checks]
        is_lacking = any(
            self._is_wanted(store, transports) and all(cohort.transport != store for cohort in standing)
            for store in STORES
        )
        if unacquainted or alone or checking or is_lacking or len(standing) < len(self._cohorts):
            with clock.phase("connect"):
                await fleet.all(lambda engine: engine.accept_layout(layout), members=unacquainted)
                self._wanted = await fleet.all(
                    lambda engine: cast("CheckedEngine", engine).wanted_checksums(), members=checking
                )
                await self._connect(clock, sources, standing, alone, backend, transports)
        self._cohorts = tuple(standing) if len(standing) == len(self._cohorts) else self._cohorts
        strange = {member: replace(engines[member], base_epoch=None) for member in unacquainted}
        if self._options.delta and (reasons := {status.no_deltas for status in engines.values()} - {None}):
            _log.debug("some engines get whole buckets: %s", "; ".join(sorted(map(str, reasons))))
        return {**engines, **strange}

    def _refuse_asleep(self, engines: Mapping[Member, EngineStatus]) -> None:
        if self._wake:
            return
        asleep = {member: status.released for member, status in engines.items() if status.released}
        if asleep:
            raise combine_errors(
                [
                    EngineError(f"{member.name}: {asleep_and_refused(released)}", engine=member.name)
                    for member, released in asleep.items()
                ]
            )

    async def _describe_sources(self) -> list[TrainerStatus]:
        return list(
            await self._sources.race(lambda number, source: source.describe_weights(self._options, self._plans[number]))
        )

    async def acquaint(self, member: Member, status: EngineStatus) -> None:
        """Have an engine accept the layout that was agreed on last, if there is one.

        One that needs whole tensors may have to wait for the next update, which agrees on another.

        Raises:
            PlanError: The weights do not fit it.
            EngineError: It failed.
        """
        layout = self.layout
        if layout is not None and layout.whole_tensors >= status.whole_tensors:
            await member.call(lambda engine: engine.accept_layout(layout), JOIN_TIMEOUT)

    async def aclose(self, members: Iterable[Member]) -> None:
        """Leave every group, at every end; bounded, and no error if an end is gone.

        Args:
            members: All that may have been met: those that are in no group keep nothing open, either.
        """
        connected = {member for cohort in self._cohorts for member in cohort.engines}
        await settle(
            {
                "groups": settle(
                    {each.connections: self._leave(each.connections, each.engines) for each in self._cohorts}
                ),
                "others": self.dismiss([member for member in members if member not in connected], CLEANUP_TIMEOUT),
            }
        )

    async def dismiss(self, members: Iterable[Member], timeout: float) -> None:
        """Have engines leave their groups; bounded, and no error if one is gone."""

        def leave(member: Member) -> Awaitable[None]:
            return self._engines_leave(self.groups_of(member), [member], timeout)

        await settle({member: leave(member) for member in members if member.was_called})

    def groups_of(self, member: Member) -> Sequence[str]:
        """What an engine must leave."""
        names = [name for cohort in self._cohorts if member in cohort.engines for name in cohort.connections]
        return names or [NO_GROUP]

    async def _agreed_layout(self, sources: Sequence[TrainerStatus]) -> Layout:
        for source, status in zip(self._sources.all, sources, strict=True):
            if not status.control_group:
                raise ConnectError(
                    f"{source.name} would not answer while it trains: "
                    "declare its class with @asyncsync.remote(…) in place of @ray.remote(…)"
                )
            if status.holding is not None:
                raise PlanError(
                    f"the weights of {source.name} are sharded over ranks: give the synchronizer a list of all of them"
                )
        parts = tuple(
            known if status.specs is None else status.specs for known, status in zip(self._parts, sources, strict=True)
        )
        if not any(parts):
            raise PlanError("there is not one tensor to send (did name_map leave all of them out?)")
        plans = tuple(status.plan_digest for status in sources)
        if self.layout is None or plans != self._plans:
            await asyncio.to_thread(refuse_rivals, parts)
            self._parts, self._plans = parts, plans
            self.layout = Layout(
                parts=parts,
                bucket_size=self._options.bucket_size,
                digest=joint_digest(plans),
                whole_tensors=self._options.whole_tensors,
                partial=self._partial,
            )
        return self.layout

    def choose_backend(self, ends: Iterable[TrainerStatus | EngineStatus]) -> Backend:
        """The backend of a group of these."""
        if self._backend != "auto":
            return self._backend
        ends = list(ends)
        gpus = [gpu for status in ends for gpu in status.gpus]
        own = len(set(gpus)) == len(gpus)  # NCCL refuses two members on one GPU: trainer and engine may share theirs
        return "nccl" if own and {status.device for status in ends} == {"cuda"} else "gloo"

    def _choose_transports(
        self, sources: Sequence[TrainerStatus], engines: Mapping[Member, EngineStatus], backend: Backend
    ) -> Mapping[Member, Transport]:
        """The way to each engine: as it was chosen, or by where it is.

        Raises:
            ConnectError: One was named that some engines cannot be reached by.
        """
        transports: dict[Member, Transport] = {}
        reasons: dict[tuple[str, str], list[str]] = {}
        for member, status in engines.items():
            choice = self.choice(member)
            if choice in STORES:
                transports[member] = choice
                reason = self._why_not_stored(choice, status)
            elif (reason := self._why_not_ipc(choice, sources, status, backend)) is None:
                transports[member] = "cuda_ipc"
            else:
                if choice in ("auto", "shared"):
                    _tell_why_not_ipc(member, choice, sources, status, reason)
                if choice != "cuda_ipc":
                    reason = self._why_not_shared(choice, sources, status, backend)
                transports[member] = "shared" if reason is None else status.transport
            if reason is not None:
                reasons.setdefault((choice, reason), []).append(member.name)
        told = [(choice, f"{', '.join(names)}: {reason}") for (choice, reason), names in reasons.items()]
        if refused := [
            f'{text} (transport="{choice}")' for choice, text in told if choice in ("shared", "cuda_ipc", *STORES)
        ]:
            raise ConnectError(f"not every engine is reached as it was asked for: {'; '.join(refused)}")
        if others := [text for choice, text in told if choice == "auto"]:
            short = any(status.shortage for status in sources)
            _log.log(logging.WARNING if short else logging.DEBUG, "a broadcast it is for %s", "; ".join(others))
        return transports

    def _is_wanted(self, transport: Transport, transports: Mapping[Member, Transport]) -> bool:
        """Whether anything is to go this way; a folder is written for other readers, too."""
        return transport in transports.values() or (transport == "folder" and self.folder is not None)

    def choice(self, member: Member) -> TransportChoice:
        """What was chosen for an engine.

        Raises:
            ConnectError: The function that chooses has failed, or did not choose anything there is.
        """
        if not callable(self._transport):
            return self._transport
        try:
            choice = self._transport(member.handle)
        except Exception as error:
            why = f"no transport was chosen for {member.name}: {type(error).__name__}: {error}"
            raise ConnectError(why) from error
        if choice not in TRANSPORTS:
            raise ConnectError(f"for {member.name} {choice!r} was chosen, and not one of {', '.join(TRANSPORTS)}")
        return choice

    def store_of(self, member: Member, status: EngineStatus) -> Store | None:
        """What an engine is to fetch from, if it is to; None: it is sent what it gets.

        Raises:
            ConnectError: It cannot; or what chooses has failed.
        """
        choice = self.choice(member)
        if choice not in STORES:
            return None
        if (reason := self._why_not_stored(choice, status)) is not None:
            raise ConnectError(f'{member.name}: {reason} (transport="{choice}")', engine=member.name)
        return choice

    def _why_not_stored(self, store: Store, engine: EngineStatus) -> str | None:
        if store == "folder" and self.folder is None:
            return "folder= was not given"
        if store in engine.stores:
            return None
        if store == "objects" and "folder" in engine.stores:
            return "it takes no Ray objects (its process is not connected to Ray, or it is another program's)"
        return (
            f"it takes nothing from {'a folder' if store == 'folder' else 'the object store'}, only from its own groups"
        )

    def _why_not_ipc(
        self, choice: TransportChoice, sources: Sequence[TrainerStatus], engine: EngineStatus, backend: Backend
    ) -> str | None:
        if choice == "broadcast":
            return "a broadcast was asked for"
        if choice == "auto" and backend == "nccl":
            return "all weights are on GPUs, and NCCL moves them"
        if choice == "auto" and self._options.delta:
            return "what differs does not go through it"
        return why_not_ipc(sources, engine)

    def _why_not_shared(
        self, choice: TransportChoice, sources: Sequence[TrainerStatus], engine: EngineStatus, backend: Backend
    ) -> str | None:
        if choice == "broadcast":
            return "a broadcast was asked for"
        if not engine.node or engine.transport != "broadcast":
            return "it takes no shared memory"
        if any(source.node != engine.node for source in sources):
            return "it is not on the trainer's node, or another user's there"
        if backend == "nccl" and choice == "auto":
            return "all weights are on GPUs, and NCCL moves them"
        return next((source.shortage for source in sources if source.shortage is not None), None)

    async def _connect(
        self,
        clock: UpdateClock,
        sources: Sequence[TrainerStatus],
        standing: Sequence[Cohort],
        engines: Mapping[Member, EngineStatus],
        backend: Backend,
        transports: Mapping[Member, Transport],
    ) -> None:
        """Make cohorts of engines that are in none, beside those that stand."""
        names = {cohort.connections for cohort in standing}
        gone = [cohort for cohort in self._cohorts if cohort.connections not in names]
        self._cohorts = tuple(standing)  # until it is: a failed connect must not look like a connection (R13)
        if gone:
            await self._sources_leave([cohort.connections for cohort in gone])
        for transport, some in _cohorts_of(engines, transports):
            await self._connect_cohort(clock, sources, some, backend, transport)
        if self.folder is not None and all(cohort.transport != "folder" for cohort in self._cohorts):
            await self._connect_cohort(clock, sources, {}, backend, "folder")

    async def _connect_cohort(
        self,
        clock: UpdateClock,
        sources: Sequence[TrainerStatus],
        engines: Mapping[Member, EngineStatus],
        backend: Backend,
        transport: Transport,
    ) -> None:
        connections = tuple(secrets.token_hex(16) for _ in sources)
        joining = {} if transport in STORES else engines
        rendezvous = Rendezvous(
            connection="",
            backend=backend,
            transport=transport,
            rank=0,
            world_size=1 + sum(status.world_size for status in joining.values()),
            join_timeout=min(JOIN_TIMEOUT, clock.limit("connect")),
            operation_timeout=min(OPERATION_TIMEOUT, self._timeout),
            folder=self.folder or "" if transport == "folder" else "",
        )
        try:
            # One source after the other, always in this order: no ends can wait for each other in a circle (R2).
            for number, (source, connection) in enumerate(zip(self._sources.all, connections, strict=True)):
                await self._form(source, joining, replace(rendezvous, connection=connection, source=number))
        except BaseException:
            await shielded(self._leave(connections, joining))
            raise
        identities = {member: _identity(status) for member, status in engines.items()}
        self._cohorts += (Cohort(connections, identities, _identities(sources), backend, transport),)
        way = {"broadcast": backend, "shared": "shared memory", "cuda_ipc": "CUDA IPC"}.get(transport, transport)
        _log.debug("connected %d engines to %d sources over %s", len(engines), len(sources), way)

    async def _form(self, source: Source, engines: Mapping[Member, EngineStatus], rendezvous: Rendezvous) -> None:
        def open_source() -> Awaitable[Contacts]:
            return source.call(lambda trainer: trainer.open_trainer_group(rendezvous))

        def join_source(contacts: Contacts) -> Awaitable[None]:
            return source.call(lambda trainer: trainer.join_trainer_group(rendezvous.connection, contacts))

        await form_group({source: End(open_source, join_source)} | engine_ends(engines, rendezvous, first_rank=1))

    async def _leave(self, connections: Sequence[str], members: Iterable[Member]) -> None:
        await settle(
            {
                "sources": self._sources_leave([connections], LATE_TIMEOUT),
                "engines": self._engines_leave(connections, members, CLEANUP_TIMEOUT),
            }
        )

    async def _sources_leave(self, groups: Sequence[Sequence[str]], timeout: float = CLEANUP_TIMEOUT) -> None:
        async def leave(connections: Sequence[str]) -> None:
            results = await self._sources.settle(
                lambda number, source: source.leave_trainer_group(connections[number]), timeout
            )
            _note(results)

        await settle({index: leave(connections) for index, connections in enumerate(groups)})

    async def _engines_leave(self, connections: Sequence[str], members: Iterable[Member], timeout: float) -> None:
        def leave(engine: RolloutEngine) -> Awaitable[None]:
            return leave_groups(engine, connections)

        # Who does not answer is not waited for: the next group that it joins takes the place of this one.
        _note((await Fleet(tuple(members)).each(leave, timeout=timeout, patience=PATIENCE)).values())


async def leave_groups(engine: RolloutEngine, connections: Sequence[str]) -> None:
    """Have an engine leave groups."""
    # One by one: with all of them at once, many engines would stall the loop. The last first: it may still be
    # waiting for others, on the thread on which those that were joined before it have to be left.
    for connection in reversed(connections):
        await engine.leave_group(connection)


def why_not_ipc(sources: Sequence[TrainerStatus], engine: EngineStatus) -> str | None:
    """Why an engine cannot open the memory of all sources by CUDA IPC; None if it can, as far as they know."""
    if not engine.node or any(source.node != engine.node for source in sources):
        return "it is not on the trainer's node, or another user's there"
    for reason in (engine.no_ipc, *(source.no_ipc for source in sources)):
        if reason is not None:
            return reason
    for source in sources:
        if source.process in engine.processes:
            return "it is in the trainer's own process, where its memory cannot be opened"
        if any(_namespaces(process) != _namespaces(source.process) for process in engine.processes):
            return "it is in another container than the trainer"
        if hidden := set(source.gpus) - set(engine.sees):
            return f"it does not see the trainer's GPU {', '.join(sorted(hidden))} (CUDA_VISIBLE_DEVICES?)"
    return None


def _tell_why_not_ipc(
    member: Member, choice: TransportChoice, sources: Sequence[TrainerStatus], engine: EngineStatus, reason: str
) -> None:
    """Log why it is not CUDA IPC, though everything is on GPUs; aloud what a source could change."""
    if {engine.device, *(source.device for source in sources)} == {"cuda"}:
        aloud = choice == "shared" and reason in {source.no_ipc for source in sources}
        level = logging.WARNING if aloud else logging.DEBUG
        _log.log(level, "no CUDA IPC for %s: %s", member.name, reason)


def _namespaces(process: str) -> str:
    return process.rpartition(":")[0]


def _cohorts_of(
    engines: Mapping[Member, EngineStatus], transports: Mapping[Member, Transport]
) -> Iterator[tuple[Transport, Mapping[Member, EngineStatus]]]:
    """Who shares a group, or a store. In a group of vLLM's nothing has a timeout: who fails would hang the others."""
    kinds: tuple[Transport, ...] = ("broadcast", "shared", "cuda_ipc", *STORES)
    for kind in kinds:
        if together := {member: status for member, status in engines.items() if transports[member] == kind}:
            yield kind, together
    for member, status in engines.items():
        if transports[member] not in kinds:
            yield transports[member], {member: status}


def engine_ends(
    engines: Mapping[Member, EngineStatus], rendezvous: Rendezvous, *, first_rank: int, timeout: float | None = None
) -> dict[object, End]:
    """The engines' ends of a group, each with as many ranks as it has.

    Args:
        engines: The engines.
        rendezvous: Of the group.
        first_rank: The first engine's first rank.
        timeout: Seconds that an engine may take for each step.
    """

    def end(member: Member, rank: int) -> End:
        own = replace(rendezvous, rank=rank)
        return End(
            open=lambda: member.call(lambda engine: engine.open_group(own), timeout),
            join=lambda contacts: member.call(
                lambda engine: engine.join_group(own.connection, contacts), timeout, waits=True
            ),
        )

    ends: dict[object, End] = {}
    for member, status in engines.items():
        ends[member] = end(member, first_rank)
        first_rank += status.world_size
    return ends


def is_acquainted(status: EngineStatus, layout: Layout) -> bool:
    """Whether an engine has accepted a layout."""
    return (status.plan_digest, status.partial) == (layout.digest, layout.partial)


def _identity(status: EngineStatus) -> tuple[str, int]:
    return status.instance, status.world_size


def _identities(sources: Sequence[TrainerStatus]) -> tuple[str, ...]:
    return tuple(status.instance for status in sources)


def _note(results: Iterable[object]) -> None:
    for result in results:
        if isinstance(result, Exception):
            _log.info("leaving a group: %s", result)
