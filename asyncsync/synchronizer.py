"""The weight synchronizer: a weight update as one awaited transaction.

What happens to engines in one, and the way back, is a :class:`~asyncsync.transaction.Transaction`. Here it is decided
when one may run, with which engines, and what it means that it failed.

Updates run in a task of their own: those who ask meanwhile share the next one, and a caller who is cancelled takes
nothing from the others (R1).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

import anyio
import torch

from asyncsync.attempt import Attempt, Orders
from asyncsync.buckets import DEFAULT_BUCKET_SIZE
from asyncsync.catch_up import Published, catch_up, holds
from asyncsync.clock import UpdateClock
from asyncsync.coalesce import LONGEST_UNDO, Coalescer
from asyncsync.connection import (
    TRANSPORTS,
    BackendChoice,
    Connection,
    SnapshotName,
    TransportsChoice,
    leave_groups,
)
from asyncsync.errors import (
    ClosedError,
    EventLoopError,
    LockError,
    LockTimeoutError,
    MembershipError,
    NotReadyError,
    OutOfStepError,
    PlanError,
    TrainerError,
    TransferError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from asyncsync.fleet import PATIENCE, Fleet, Member, combine_errors
from asyncsync.lock import RolloutLock
from asyncsync.losses import LateCalls, Losses, blamed
from asyncsync.membership import Engines, Membership
from asyncsync.messages import Asleep, Backend, EngineStatus, NameMap, Policy, ReadOptions
from asyncsync.readers import Readers
from asyncsync.report import EngineStatistics, SynchronizerStatistics, WeightUpdate
from asyncsync.shared_lock import SharedRolloutLock
from asyncsync.shield import CLEANUP_TIMEOUT, shielded
from asyncsync.sources import Sources
from asyncsync.started import StartedUpdate
from asyncsync.tally import Tally
from asyncsync.trainer_group import as_sources
from asyncsync.transaction import Transaction
from asyncsync.weights import Weights

DEFAULT_TIMEOUT = 600.0
"""Seconds for a whole update."""

DESCRIBE_TIMEOUT = 60.0
"""Seconds, at the most, that an engine which is to join may take to answer at all."""

MAX_LEAVINGS = 3
"""How many times an update may be tried because engines have left meanwhile."""

PING_TIMEOUT = 2.0
"""Seconds within which an engine that is being removed must answer, not to be taken for dead."""

OnEngineFailure = Literal["raise", "drop", "abort"]
"""What an update does when an engine fails: the others get it and an error is raised; the others get it and the engine
is let go; or nobody gets it."""

_log = logging.getLogger("asyncsync")


class WeightSynchronizer:
    """Brings a trainer's weights to rollout engines, a whole version at a time.

    Example:
        >>> async with asyncsync.WeightSynchronizer(trainer, engines) as synchronizer:
        ...     update = await synchronizer.update_weights()
        ...     async with synchronizer.generation() as version:
        ...         sample = await engines[0].generate.remote(prompt)

    Nothing is connected before the first update, or :meth:`connect`. A synchronizer belongs to the event loop that
    first uses it.

    Args:
        trainer: Where the weights come from: a module, a state dict, pairs of (name, tensor) or a function that
            returns one of these, in this process; or a Ray actor whose class includes :class:`asyncsync.TrainerRank`,
            or a list of them, one a rank (FSDP2, tensor parallel, replicated), of which the first is the source; or a
            list of such lists, one a pipeline stage, each with a source of its own. In the place of an actor there may
            be an object here with the :class:`asyncsync.trainer.Rank` protocol.
        engines: Where they go: Ray actors whose class includes :class:`asyncsync.ModuleEngine`, objects with the
            :class:`asyncsync.RolloutEngine` protocol, or lists of the ranks of an engine that has several. Or an async
            function that returns the engines of now: it is called once before every update, and again before one that
            failed is tried without those who left; its answer is the list that all ranks and phases go by.
        initial_version: The version of the weights that every engine holds already; None if they hold none that
            counts, and nothing may be generated before the first update. An engine that joins before the first update
            is taken to hold it as well.
        bucket_size: Bytes a message may have at the most.
        name_map: From the trainer's name of a tensor to the engines'; None leaves the tensor out. Must be picklable
            for a trainer that is an actor.
        dtype: Floating-point tensors are converted to this dtype on purpose; without it, dtypes must agree.
        partial: Whether engines may hold tensors that the trainer does not send. Those are taken to be as they
            should be in every engine, also in one that was restarted.
        backend: ``"gloo"``, ``"nccl"``, or ``"auto"``: NCCL if all weights are on GPUs.
        transport: How bytes come to engines. ``"auto"``: through shared memory to those on the trainer's node that can
            take it (if there is enough, and NCCL does not do it), and through a broadcast to all others. ``"shared"``:
            through shared memory only; an engine that cannot be reached so is a ConnectError. Where the weights of all
            sources and of the engine are on GPUs, both are by the GPU's memory (CUDA IPC), if it can be.
            ``"cuda_ipc"``: through that only. ``"broadcast"``: never through shared memory. ``"objects"``: through
            Ray's object store. ``"folder"``: through files in ``folder``. With these two the trainer stores all first,
            and engines fetch it: nothing is connected, and no port opened. Or a function from an engine, as it was
            given, to one of these names, called whenever engines are asked how they are. An engine that cannot be
            reached in the way that was named is a ConnectError. The outcomes say which engine got it how.
        folder: A folder, the same wherever the trainer and engines run, in which each version is published as
            safetensors files: for engines whose transport is ``"folder"``, and for other readers
            (:func:`asyncsync.read_weights`). The last two are kept.
        delta: Whether to send only what differs, bit by bit, from the last update, to engines that hold that one; they
            confirm the digest of the whole all the same. Who does not hold it, or holds another layout, gets the whole,
            and so does everyone of a bucket of which too much differs. In ``folder`` versions are whole; engines read
            what differs beside them. The source keeps a set of the weights in host memory for this. It pays where bytes
            have far to go, and few elements change: as small learning rates change bfloat16 weights.
        timeout: Seconds for a whole update; phases have shares of it.
        offload: For a trainer in this process: False if it never offloads its memory (see
            :func:`asyncsync.memory_saver_guard`).
        policy: What happens to requests in flight when the weights change. ``"drain"``: they finish on the old weights
            first. ``"abort"``: they end now, with what they have. ``"recompute"``: they go on, with what they have, and
            their cache is computed anew under the new weights. ``"continue"``: they go on over the old cache. With the
            last two an update never waits for who is in :meth:`generation`. An engine that cannot do it is refused when
            it is connected.
        asleep: What an update does with an engine that has released memory. ``"wake"``: it wakes the weights before
            they are written, and all else (a KV cache) once they are whole, before the engine serves; if the update
            fails, the engine is put back to sleep. ``"refuse"``: nothing is sent to it, and an EngineError names what
            is released. For an engine that was put to sleep since the last update, that is the error of its transfer.
        on_engine_failure: What an update does when an engine fails, dies, or does not answer in time, and others do
            not. ``"raise"``: the others get the whole update, inside the same call and deadline; then an error with the
            outcomes is raised. The next update tries that engine again. ``"drop"``: the others get it, and the engine
            is removed; the report says so. (If a function is given for the engines and names it again, it joins again.)
            ``"abort"``: all or none: staged engines keep the version that they serve, and an error is raised. (One that
            fails after others have switched to the new version fails alone.)
        lock: The lock that generation and updates share, if others are to use it too; a lock of its own if None.
            Synchronizers that update the same engines must share one: they take turns.

    Raises:
        ValueError: No engines, an engine or a trainer rank given twice, a size or time that is not positive, or no
            folder where one is needed.
        TypeError: Something is neither a trainer nor weights, or no engine; or an option is of the wrong kind.
    """

    def __init__(
        self,
        trainer: Weights | Any,
        engines: Engines,
        *,
        initial_version: int | None = None,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        name_map: NameMap | None = None,
        dtype: torch.dtype | None = None,
        partial: bool = False,
        backend: BackendChoice = "auto",
        transport: TransportsChoice = "auto",
        folder: str | os.PathLike[str] | None = None,
        delta: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        offload: bool | None = None,
        policy: Policy = "drain",
        asleep: Asleep = "wake",
        on_engine_failure: OnEngineFailure = "raise",
        lock: RolloutLock | SharedRolloutLock | None = None,
    ) -> None:
        _refuse_kind("bucket_size", bucket_size, int, "a number of bytes")
        _refuse_kind("timeout", timeout, int | float, "a number of seconds")
        _refuse_kind("dtype", dtype, torch.dtype | None, "a torch.dtype")
        _refuse_kind("initial_version", initial_version, int | None, "a number")
        _refuse_kind("partial", partial, bool, "True or False")
        _refuse_kind("folder", folder, str | os.PathLike | None, "a path")
        _refuse_kind("delta", delta, bool, "True or False")
        _refuse_kind("lock", lock, RolloutLock | SharedRolloutLock | None, "a RolloutLock or a SharedRolloutLock")
        if bucket_size <= 0:
            raise ValueError(f"bucket_size must be a positive number of bytes, not {bucket_size}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive, finite number of seconds, not {timeout}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, not {dtype}: it is for floating-point tensors")
        if initial_version is not None and initial_version < 0:
            raise ValueError(f"initial_version must not be negative, but is {initial_version}")
        if backend not in get_args(Literal["auto"]) + get_args(Backend):
            raise ValueError(f'backend must be "auto", "gloo" or "nccl", not {backend!r}')
        if not callable(transport) and transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, or a function, not {transport!r}")
        if transport == "folder" and folder is None:
            raise ValueError('transport="folder" needs a folder: give folder=')
        if transport in ("shared", "cuda_ipc") and backend == "nccl":
            raise ValueError(f'transport="{transport}" moves bytes without NCCL: leave backend out')
        if policy not in get_args(Policy):
            raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}, not {policy!r}")
        if asleep not in get_args(Asleep):
            raise ValueError(f"asleep must be one of {', '.join(get_args(Asleep))}, not {asleep!r}")
        if on_engine_failure not in get_args(OnEngineFailure):
            raise ValueError(
                f"on_engine_failure must be one of {', '.join(get_args(OnEngineFailure))}, not {on_engine_failure!r}"
            )
        if name_map is not None and not callable(name_map):
            raise TypeError(f"name_map must be a function from name to name, not {type(name_map).__name__}")
        self._membership = Membership(engines, initial_version=initial_version)
        trainers, self._own_trainer = as_sources(trainer, offload=offload)
        self._sources = Sources(trainers, self._membership.silent)
        self._lock = lock if lock is not None else RolloutLock("generation lock")
        self._version = initial_version
        self._timeout = timeout
        self._policy = policy
        self._on_engine_failure = on_engine_failure
        self._late = LateCalls()
        self._tally = Tally()
        self._readers = Readers()
        self._base_epoch: int | None = None
        self._published: Published | None = None
        self._updating: Fleet | None = None
        self._trainer_has_hooks: bool | None = None
        self._connection = Connection(
            self._sources,
            options=ReadOptions(bucket_size=bucket_size, name_map=name_map, dtype=dtype, delta=delta),
            partial=partial,
            backend=backend,
            transport=transport,
            folder=None if folder is None else os.path.abspath(folder),
            policy=self._policy,
            wake=asleep == "wake",
            timeout=timeout,
        )
        self._busy = asyncio.Lock()
        self._catching_up: anyio.CancelScope | None = None
        self._updated = asyncio.Event()
        self._updates = Coalescer(self._update, "asyncsync weight update")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._check_usable()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        phase = f" ({self._tally.clock.phase_name})" if self._tally.clock else ""
        behind = {each for each in self._membership.members if self._version is not None and not self._is_ready(each)}
        engines = ", ".join(
            f"{each.name}{' (lost)' if each.is_lost else ' (not ready)' if each in behind else ''}"
            for each in self._membership.members
        )
        return (
            f"<WeightSynchronizer {self._state}{phase}: version {self._version}, engines {engines or 'none'}; "
            f"{self._updates.callers} waiting for an update; {self._lock!r}>"
        )

    @property
    def _state(self) -> str:
        return "closed" if self._closed else "updating" if self._updates.running else "idle"

    def statistics(self) -> SynchronizerStatistics:
        """What it is doing, what it has done, and how the engines are; at any time, and at once."""
        tally, clock = self._tally, self._tally.clock
        return SynchronizerStatistics(
            state=self._state,
            phase=clock.phase_name if clock else None,
            weight_version=self._version,
            waiting=self._updates.callers,
            updates=tally.updates,
            failed=tally.failed,
            cancelled=tally.cancelled,
            dropped=tally.dropped,
            attempts=tally.attempts,
            bytes=tally.bytes,
            seconds=dict(tally.seconds),
            last_error=tally.last_error,
            engines={
                member.name: EngineStatistics(
                    weight_version=member.weight_version,
                    ready=self._is_ready(member),
                    lost=member.is_lost,
                    **asdict(tally.of(member.name)),
                )
                for member in self._membership.members
            },
        )

    @property
    def weight_version(self) -> int | None:
        """The published version: the newest that engines hold whole. None before the first."""
        return self._version

    @property
    def ready_engines(self) -> tuple[Any, ...]:
        """The engines, as they were given, that hold the published version whole, as far as is known.

        Give rollouts to these: an engine that has joined or was restarted, or that an update has failed at, is none of
        them until it holds the version, nor is one that did not answer the last time. Within :meth:`generation` none of
        them changes its weights.
        """
        members = self._membership.members
        return tuple(member.handle for member in members if self._is_ready(member))

    def _is_ready(self, member: Member) -> bool:
        return self._version is not None and member.weight_version == self._version and not member.is_lost

    async def update_weights(self) -> WeightUpdate:
        """Bring the trainer's present weights to every engine, and publish them as a new version.

        One update runs at a time. A call that comes while one is running waits for the next, together with all others
        that come meanwhile; each gets that update's outcome. The weights must not change until it returns.

        If it is cancelled, and nobody else waits for the same update, the update is undone before the cancellation
        goes on.

        Raises:
            PlanError: The weights cannot be sent, or do not fit an engine: nothing was sent.
            ConnectError: The group could not be set up: nothing was sent.
            WeightUpdateError: The update failed, or some engines did; ``.phase`` and ``.outcomes`` say where and with
                what result, and ``.update`` what the other engines got. One engine's failure is an EngineError, that of
                several an EngineErrorGroup. Engines that hold whole weights serve on; the next update repairs
                the others.
            LockError: Called inside :meth:`generation`, it would wait for itself.
            ClosedError: The synchronizer was closed, before or meanwhile.
        """
        self._check_not_reading("update_weights")
        return await self._updates.request()

    async def start_update(self) -> StartedUpdate:
        """Begin an update of the trainer's present weights; returns as soon as those are copied.

        The trainer may change its weights then, while the copy travels and engines commit: they get what the weights
        were, bit for bit. Calls coalesce with each other, and with those of :meth:`update_weights`; one that comes
        while an update is running returns when the next one has its copy. So there is one copy at a time. It lies in
        the memory that engines on the trainer's node map, if there are any; else it takes as much memory again as the
        weights do (on the GPU, if NCCL sends from there).

        Example:
            >>> update = await synchronizer.start_update()
            >>> train_step(batch)                       # the weights may change
            >>> print(await update)

        Returns:
            The update: await it for the outcome, or cancel it. Its ``seconds["snapshot"]`` tells how long copying took.

        Raises:
            PlanError: The weights cannot be sent, or do not fit an engine: nothing was copied.
            WeightUpdateError: It failed before the weights were copied. What fails later is raised by awaiting it.
            LockError: Called inside :meth:`generation`, it might wait for itself.
            ClosedError: The synchronizer was closed, before or meanwhile.
        """
        self._check_not_reading("start_update")
        return StartedUpdate(await self._updates.start(), lambda: self._check_not_reading("awaiting an update"))

    @asynccontextmanager
    async def generation(self, engine: Any = None, *, timeout: float | None = None) -> AsyncIterator[int]:
        """Generate with a whole version: many at once, and never while an update commits.

        Entering waits while engines are paused; it gives the version that will be read, now, at dispatch. Under the
        policies ``"recompute"`` and ``"continue"`` it neither waits nor holds an update off: a request may begin on
        this version and end on a newer one, and the engine says where it changed.

        Args:
            engine: The engine that is to generate, in the form in which it was given, or its name. Then it is one that
                holds the version; and if it turns out not to answer any more, this generation ends, in place of holding
                the others' update off.
            timeout: Seconds to wait; the lock's own default if None.

        Raises:
            NotReadyError: There is no version yet: update first, or pass ``initial_version``. Or the engine does not
                hold it (yet): choose one of :attr:`ready_engines`.
            EngineError: The engine does not answer any more, and was given up; raised in place of the cancellation of
                what runs inside.
            MembershipError: The engine is none of the synchronizer's.
            LockTimeoutError: An update held generation back for longer than ``timeout``.
            ClosedError: The synchronizer was closed.
        """
        self._check_usable()
        self._check_version()
        async with self._lock.reader(timeout=timeout):
            self._check_usable()
            version = self._check_version()
            if engine is None:
                yield version
                return
            member = self._membership.find(engine)
            if not self._is_ready(member):
                raise NotReadyError(f"{member.name} does not hold version {version} (yet): choose a ready engine")
            with self._readers.reading(member):
                yield version

    async def connect(self) -> None:
        """Do now what the next update would do first: agree on the layout, and connect what is new.

        Engines that are behind (they have joined, or Ray has restarted them) are brought to the published version.
        Where none was published yet, and no ``initial_version`` given, that is the newest that an engine holds whole in
        this layout: so a synchronizer takes over from one whose process is gone. The weights are then those that the
        engines hold, not the trainer's.

        An engine that fails is gone without, as in an update (``on_engine_failure``): the error is raised when the
        others are connected and brought up.

        Raises:
            PlanError: The weights cannot be sent, or do not fit an engine.
            ConnectError: A group could not be set up; nothing is left half-open.
            EngineError: An engine failed.
            TrainerError: The trainer failed.
            MembershipError: There are no engines, or the function that was given for them failed.
        """
        self._check_not_reading("connect")
        losses = Losses()
        async with self._turn() as clock:
            async with self._trainer_ready(clock):
                fleet, statuses = await self._connected(clock, losses)
            if self._version is None:
                self._take_over(statuses.values())
            for member, status in statuses.items():
                if self._published is not None:
                    ready = holds(status, self._published) and not status.paused
                    member.weight_version = self._version if ready else None
        for member in fleet.members:
            await self._bring_up(member, wait=False)
        if losses.errors:
            if self._on_engine_failure != "drop":
                raise self._told(losses.error())
            self._drop(losses)

    async def _connected(self, clock: UpdateClock, losses: Losses) -> tuple[Fleet, Mapping[Member, EngineStatus]]:
        """Connect all engines, or those that do not fail."""
        while True:
            fleet = (await self._reconcile(clock)).without(losses.errors)
            self._connection.forget()
            try:
                return fleet, (await self._agree(clock, fleet, losses))[1]
            except WeightUpdateError as error:
                if clock.remaining == 0.0 or not losses.leave_some(fleet):
                    raise losses.explain(error, fleet) from error.__cause__

    async def add_engine(self, engine: Any) -> None:
        """Have an engine join; returns once it holds the published version, and may be given rollouts.

        It gets the version from an engine that serves it, while all others generate: the trainer is not asked, and may
        be in the middle of a step. If an update comes meanwhile, the engine gets that one's weights instead, with the
        others. If no engine can give it the version, it waits for the next update. Before the first version there is
        nothing to wait for.

        If this fails or is cancelled, the engine has not joined.

        Args:
            engine: A rollout engine, in any of the forms that the constructor takes.

        Raises:
            MembershipError: It has joined already, or a function was given for the engines.
            TypeError: It is no rollout engine.
            PlanError: The weights do not fit it.
            EngineError: It failed.
            WeightUpdateTimeoutError: No update came that it had to wait for.
        """
        self._check_not_reading("add_engine")
        member = self._membership.add(engine)
        try:
            await self._admit(member)
            await self._bring_up(member, wait=True)
            if member not in self._membership:
                raise MembershipError(f"{member.name} was removed while it was joining")
        except BaseException:
            self._membership.discard(member)
            raise

    async def _admit(self, member: Member) -> None:
        """Let an engine in once it has answered and its weights fit, lest it spoil an update for the others."""
        statuses = await Fleet([member]).describe(self._policy, min(self._timeout, DESCRIBE_TIMEOUT))
        if self._connection.layout is not None:
            async with self._turn():
                await self._connection.acquaint(member, statuses[member])
        self._membership.admit(member)

    async def remove_engine(self, engine: Any) -> None:
        """Have an engine leave; returns once no update needs it any more, so that it may be ended.

        An update that is under way comes to its end with it. If the engine does not answer any more, or that update
        fails, the others get the whole update without it.

        Args:
            engine: The engine, in the form in which it was given; or its name, as errors and reports have it.

        Raises:
            MembershipError: It is none of the engines, or a function was given for them.
        """
        self._check_not_reading("remove_engine")
        member = self._membership.remove(engine)
        if self._updating is not None and member in self._updating.members:
            try:
                await member.call(lambda engine: engine.describe_engine(), PING_TIMEOUT)
            except (WeightUpdateError, PlanError) as error:
                _log.info("%s was removed, and does not answer: %s", member.name, error)
                member.is_lost = True
                member.expel()
                self._readers.end([member])
        self._interrupt_catching_up()  # it may be the one that is given to, or that gives
        if not self._closed:  # else all have left, or are leaving
            async with self._busy:
                await self._dismiss_departed()

    async def _dismiss_departed(self) -> None:
        if departed := self._take_departed():
            await shielded(self._connection.dismiss(departed, PING_TIMEOUT))

    def _take_departed(self) -> list[Member]:
        """Those who have left; who does not answer is told so without being waited for, and is none of them."""
        departed = self._membership.take_departed()
        for member in departed:
            if member.is_lost:
                groups = self._connection.groups_of(member)
                self._late.start(member, "was let go", partial(leave_groups, connections=groups))
        return [member for member in departed if not member.is_lost]

    async def _bring_up(self, member: Member, *, wait: bool) -> None:
        """Bring an engine to the published version: from another engine, or with the next update."""
        deadline = anyio.current_time() + self._timeout
        while self._published is not None and not self._is_ready(member) and member in self._membership:
            self._check_usable()
            updated = self._updated
            async with self._turn() as clock:
                if self._is_ready(member) or member not in self._membership:
                    continue
                if self._updates.running:
                    continue  # it waits for this turn, and brings what this would bring
                givers = [each for each in self._membership.members if self._is_ready(each)]
                with anyio.CancelScope() as scope, clock.phase("catch up"):
                    self._catching_up = scope
                    if await catch_up(
                        member, givers, self._published, self._connection, self._policy, clock.limit("transfer")
                    ):
                        member.weight_version = self._version
                        continue
            if scope.cancelled_caught:
                continue  # an update came, and brings what this would have brought
            if not wait:
                return
            try:
                async with asyncio.timeout(deadline - anyio.current_time()):
                    await updated.wait()
            except TimeoutError as error:
                raise WeightUpdateTimeoutError(
                    f"{member.name} waited {self._timeout:.3g} s for an update: no engine could give it version "
                    f"{self._version}, and none was made"
                ) from error

    async def aclose(self) -> None:
        """Cancel the running update, leave the group, and refuse further use; a second call does nothing."""
        if not self._closed:
            self._closed = True
            await shielded(self._aclose(), LONGEST_UNDO + 4 * CLEANUP_TIMEOUT)

    async def _aclose(self) -> None:
        self._interrupt_catching_up()
        self._updated.set()  # who waits for an update is told that none will come
        try:
            await self._updates.aclose()
        finally:
            try:
                await shielded(self._part())
            finally:
                if self._own_trainer is not None:
                    self._own_trainer.close()

    async def _part(self) -> None:
        """Leave all ends."""
        async with AsyncExitStack() as stack:
            with anyio.move_on_after(CLEANUP_TIMEOUT):
                await stack.enter_async_context(self._busy)  # a connect() that is under way
            departed = self._take_departed()
            await self._late.aclose()
            await self._connection.aclose([*self._membership.members, *departed])

    # -- the transaction ------------------------------------------------------------------------------------------

    async def _update(self) -> WeightUpdate:
        self._interrupt_catching_up()
        try:
            return await self._tally.count(self._brought_to_all)
        finally:
            self._tally.keep(member.name for member in self._membership.members)

    async def _brought_to_all(self) -> WeightUpdate:
        try:
            async with self._turn() as clock, self._trainer_ready(clock) as trainer, self._snapshot() as snapshot:
                return await self._tried_until_it_holds(clock, trainer, snapshot)
        except LockError as error:
            raise self._told(WeightUpdateError(f"the lock that updates share was lost: {error}")) from error
        except WeightUpdateError as error:
            self._told(error)
            raise

    def _told(self, error: WeightUpdateError) -> WeightUpdateError:
        """An error that tells where the update was, and what is left."""
        if not error.outcomes and self._membership.members:
            error.outcomes = self._membership.fleet().outcomes({})
        if error.update is None:
            version = "" if error.weight_version is None else f" to version {error.weight_version}"
            error.add_note(
                f"the update{version} ended in the phase {error.phase!r}; version {self._version} stays published. "
                "The next update_weights() tries again; remove_engine() lets an engine go"
            )
        return error

    @asynccontextmanager
    async def _snapshot(self) -> AsyncIterator[SnapshotName | None]:
        """A name for the copy of the weights, if somebody waits for no more than that; in the end, it is dropped."""
        snapshot = SnapshotName() if self._updates.started else None
        try:
            yield snapshot
        finally:
            if snapshot is not None and snapshot.taken:
                await shielded(self._drop_snapshot(snapshot))

    async def _take_snapshot(
        self, snapshot: SnapshotName, orders: Orders, clock: UpdateClock, trainer: AsyncExitStack
    ) -> None:
        """Have the trainer copy its weights, and let it go on."""
        with clock.phase("snapshot"):
            try:
                await self._sources.race(lambda number, source: source.snapshot_weights(orders.sources[number]))
                snapshot.taken = True
            except BaseException:
                aborted = self._sources.settle(lambda _, source: source.abort_send(orders.all.epoch), CLEANUP_TIMEOUT)
                await shielded(aborted, 2 * CLEANUP_TIMEOUT)
                await shielded(self._drop_snapshot(snapshot))
                raise
        await trainer.aclose()  # its hook is called now: it does not wait for engines
        self._updates.halfway()

    async def _drop_snapshot(self, snapshot: SnapshotName) -> None:
        results = await self._sources.settle(lambda _, source: source.drop_snapshot(snapshot.name), CLEANUP_TIMEOUT)
        for result in results:
            if isinstance(result, Exception):
                _log.info("dropping a snapshot: %s", result)

    async def _tried_until_it_holds(
        self, clock: UpdateClock, trainer: AsyncExitStack, snapshot: SnapshotName | None
    ) -> WeightUpdate:
        losses, leavings, asked = Losses(), 0, False
        while True:
            try:
                fleet = self._updating = (await self._reconcile(clock, ask=not asked)).without(losses.errors)
            except WeightUpdateError as error:
                raise losses.explain(error, Fleet(())) from error.__cause__
            losses.forget([member for member in losses.errors if member not in self._membership])
            if not fleet.members:
                raise losses.error()
            in_step, asked = self._connection.in_step(fleet), False
            try:
                update = await self._try(clock, fleet, losses, trainer, snapshot)
                break
            except OutOfStepError as error:
                if not in_step:
                    raise losses.explain(error, fleet) from error.__cause__
                _log.info("asking everyone anew: %s", error)
            except (WeightUpdateError, PlanError) as error:
                if clock.remaining > 0.0 and leavings < MAX_LEAVINGS:
                    asked = await self._ask_for_engines(clock)
                if asked and any(member not in self._membership for member in fleet.members):
                    leavings += 1
                    _log.warning("once more without those who left meanwhile: %s", error)
                elif clock.remaining > 0.0 and losses.leave_some(fleet):
                    _log.warning("once more without those who failed: %r: %s", losses, error)
                else:
                    ended = losses.explain(error, fleet)
                    if ended is error:
                        raise
                    raise ended from error
            finally:
                self._updating = None
        return self._conclude(update, losses)

    def _conclude(self, update: WeightUpdate, losses: Losses) -> WeightUpdate:
        """An update that reached whom it could: what is said of the others."""
        losses.forget([member for member in losses.errors if member not in self._membership])
        if losses.errors and self._on_engine_failure != "drop":
            error = losses.error(update)
            if losses.unpublished is not None:
                error.add_note(f"and: {losses.unpublished}")
            raise error
        self._drop(losses)
        if losses.unpublished is not None:
            raise losses.not_published(losses.unpublished, update)
        return replace(update, outcomes=losses.merge(update.outcomes))

    def _drop(self, losses: Losses) -> None:
        for member, error in losses.errors.items():
            _log.warning("%s was let go: %s", member.name, error)
            self._membership.discard(member)
            self._tally.dropped += 1
            if member.is_lost:
                member.expel()

    def _interrupt_catching_up(self) -> None:
        if self._catching_up is not None:
            self._catching_up.cancel()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[UpdateClock]:
        """Alone among all that changes engines, here and at other synchronizers that share the lock (R1)."""
        async with AsyncExitStack() as stack:
            clock = UpdateClock(self._timeout, self._membership.silent)
            with clock.phase("queue"):
                await stack.enter_async_context(self._busy)
            self._check_usable()  # else it was closed while this waited
            self._tally.clock = clock
            try:
                with clock.measure("queue"):
                    try:
                        await stack.enter_async_context(self._lock.updater(timeout=clock.limit("queue")))
                    except LockTimeoutError as error:
                        late = WeightUpdateTimeoutError(f"another synchronizer did not end in time: {error}")
                        late.phase = "queue"
                        raise late from error
                yield clock
            finally:
                self._tally.clock = None
                self._tally.count_seconds(clock.seconds)

    @asynccontextmanager
    async def _trainer_ready(self, clock: UpdateClock) -> AsyncIterator[AsyncExitStack]:
        """The trainer's own hooks around all that it has to do with: both are called, or none.

        What is yielded may be closed before, once the trainer has nothing to do with the rest.
        """
        async with AsyncExitStack() as stack:
            if self._trainer_has_hooks is not False:
                stack.push_async_exit(partial(self._after_update, clock))
                with clock.phase("before update"):
                    self._trainer_has_hooks = any(await self._sources.race(lambda _, source: source.begin_update()))
            yield stack

    async def _after_update(
        self,
        clock: UpdateClock,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._trainer_has_hooks is False:
            return
        with clock.measure("after update"):
            timeout = CLEANUP_TIMEOUT if failure is not None else max(clock.remaining, CLEANUP_TIMEOUT)
            try:
                await shielded(self._end_update(failure, timeout), timeout + CLEANUP_TIMEOUT + 1)
            except TimeoutError as late:
                if failure is None:
                    raise TrainerError(f"the trainer did not end its part of the update: {late}") from late
                failure.add_note(f"then: {late}")

    async def _end_update(self, failure: BaseException | None, timeout: float) -> None:
        results = await self._sources.settle(lambda _, source: source.end_update(), timeout)
        errors = [result for result in results if isinstance(result, Exception)]
        if failure is None and errors:
            raise errors[0]
        for error in errors:
            _log.warning("after the update: %s", error)
            assert failure is not None
            failure.add_note(f"then: {error}")

    async def _reconcile(self, clock: UpdateClock, *, ask: bool = True) -> Fleet:
        """The engines of now: one snapshot for a whole attempt."""
        if self._membership.is_asked and ask:
            with clock.phase("members"):
                await self._membership.refresh()
        await self._dismiss_departed()
        return self._membership.fleet()

    async def _ask_for_engines(self, clock: UpdateClock) -> bool:
        """After an attempt that failed; whether it is known now who belongs to the synchronizer."""
        try:
            with clock.phase("members"):
                await self._membership.refresh()
        except WeightUpdateError as error:
            _log.warning("after a failed update: %s", error)
            return False
        return True

    async def _try(
        self,
        clock: UpdateClock,
        fleet: Fleet,
        losses: Losses,
        trainer: AsyncExitStack,
        snapshot: SnapshotName | None,
    ) -> WeightUpdate:
        """One attempt, with these engines; if it fails, ``losses`` has whose failure it was."""
        self._tally.attempts += 1
        in_step = self._connection.in_step(fleet)
        try:
            orders, statuses = await self._agree(clock, fleet, losses, snapshot)
            if snapshot is not None and not snapshot.taken:
                await self._take_snapshot(snapshot, orders, clock, trainer)
            attempt = Attempt(orders, statuses)
            try:
                await self._transaction(attempt, clock, losses).run()
            except WeightUpdateError as failure:
                if isinstance(failure, WeightUpdateTimeoutError) and not failure.silent and not attempt.undone:
                    for member, cause in (await fleet.roll_call(PATIENCE)).items():
                        attempt.lose(member, cause)  # who generates may wait for one that is gone
                error = self._explained(failure, attempt, clock, in_step=in_step)
                if not isinstance(error, OutOfStepError) and (attempt.switched or self._on_engine_failure != "abort"):
                    losses.blame(error, attempt)
                self._readers.end([member for member in fleet.members if member.is_lost])
                if not attempt.reached_all_but(losses.errors):
                    raise error from (failure if error is not failure else failure.__cause__)
                self._connection.forget()
            else:
                self._connection.confirm(attempt.order, attempt.sent)
            finally:
                attempt.note_versions()
        except BaseException:
            self._connection.forget()
            raise
        losses.unpublished = attempt.unpublished
        update = attempt.report(clock)
        _log.info("%s", update)
        return update

    def _transaction(self, attempt: Attempt, clock: UpdateClock, losses: Losses) -> Transaction:
        return Transaction(
            attempt,
            clock,
            self._sources,
            self._lock,
            self._publish,
            losses=losses,
            late=self._late,
            all_or_nothing=self._on_engine_failure == "abort",
        )

    def _explained(
        self, error: WeightUpdateError, attempt: Attempt, clock: UpdateClock, *, in_step: bool
    ) -> WeightUpdateError:
        """The error of an attempt; in place of a symptom, its cause."""
        attempt.explain(error, clock)
        if not isinstance(error, TransferError) or error.engine is not None:
            return error
        if attempt.replaced and in_step and not attempt.switched:
            return OutOfStepError(f"an engine was restarted since the last update: {error}")
        # An end's connection was heard to break before the end itself was missed.
        gone: WeightUpdateError | None = None
        if attempt.is_the_trainers:
            gone, *others = [*attempt.lost_sources, *attempt.late_sources]
            for other in others:
                gone.add_note(f"and: {other}")
        elif attempt.lost:
            gone = cast("WeightUpdateError", combine_errors(list(attempt.lost.values())))
        if gone is None:
            return error
        gone.phase = error.phase
        attempt.explain(gone, clock)
        return gone

    async def _agree(
        self, clock: UpdateClock, fleet: Fleet, losses: Losses, snapshot: SnapshotName | None = None
    ) -> tuple[Orders, Mapping[Member, EngineStatus]]:
        try:
            return await self._connection.agree(
                clock, fleet, base_epoch=self._base_epoch, version=self._version or 0, snapshot=snapshot
            )
        except WeightUpdateError as error:
            if not isinstance(error, OutOfStepError):
                gone: Mapping[Member, Exception] = {}
                if clock.phase_name == "connect" and not isinstance(error, TrainerError):
                    # In a group that is not formed, those who are there miss those who are not: who is that?
                    late = isinstance(error, WeightUpdateTimeoutError)
                    gone = await fleet.roll_call(PATIENCE if late else None)
                for member in (found := blamed(error, fleet, gone)):
                    member.is_lost |= isinstance(error, WeightUpdateTimeoutError) and error.phase == "describe"
                error.outcomes = error.outcomes or fleet.outcomes({**gone, **found})
                if self._on_engine_failure != "abort":
                    losses.blame_before(error, fleet, gone)
                self._readers.end([member for member in fleet.members if member.is_lost])
            raise

    def _take_over(self, engines: Collection[EngineStatus]) -> None:
        """Take the newest version that engines hold whole for the published one."""
        assert self._connection.layout is not None
        layout = self._connection.layout.digest
        held = {
            (status.weight_version, status.holds[layout])
            for status in engines
            if status.weight_version is not None and status.tainted is None and layout in status.holds
        }
        version = max((version for version, _ in held), default=None)
        digests = {digest for number, digest in held if number == version}
        if version is not None and len(digests) == 1:
            _log.info("taking over at version %d, which engines hold", version)
            self._version = version
            self._published = Published(version=version, digest=digests.pop(), plan_digest=layout)

    def _publish(self, published: Published, epoch: int) -> None:
        self._version, self._published, self._base_epoch = published.version, published, epoch
        updated, self._updated = self._updated, asyncio.Event()
        updated.set()

    # -- use ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the synchronizer was closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise EventLoopError("a WeightSynchronizer belongs to the event loop that first used it, not to this one")

    def _check_not_reading(self, what: str) -> None:
        self._check_usable()
        if self._lock.holds() is not None:
            raise LockError(f"{what}() inside generation() would wait for itself: leave generation() first")

    def _check_version(self) -> int:
        if self._version is None:
            raise NotReadyError(
                "no weights were published yet: await update_weights() first, "
                "or pass initial_version if the engines hold them already"
            )
        return self._version


def _refuse_kind(option: str, value: object, kind: Any, what: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{option} must be {what}, not {value!r}")
