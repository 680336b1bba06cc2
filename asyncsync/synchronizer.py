"""The weight synchronizer: a weight update as one awaited transaction.

``_transaction`` is the whole of it. Every step that must be undone is a context manager around what follows, so that
the way back is the way in reversed, on success, failure and cancellation alike (R2).

Updates run in a task of their own: those who ask meanwhile share the next one, and a caller who is cancelled takes
nothing from the others (R1).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

import anyio
import torch

from asyncsync.attempt import Attempt
from asyncsync.buckets import DEFAULT_BUCKET_SIZE
from asyncsync.clock import UpdateClock
from asyncsync.coalesce import Coalescer
from asyncsync.connection import BackendChoice, Connection, call_trainer
from asyncsync.errors import (
    ClosedError,
    EventLoopError,
    LockError,
    LockTimeoutError,
    NotReadyError,
    OutOfStepError,
    TrainerError,
    TransferError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from asyncsync.fanout import race, settle
from asyncsync.fleet import Fleet, Member, combine_errors
from asyncsync.lock import RolloutLock
from asyncsync.messages import Backend, EngineStatus, NameMap, Policy, ReadOptions, SendReceipt, UpdateOrder
from asyncsync.report import EngineState, WeightUpdate
from asyncsync.shared_lock import SharedRolloutLock
from asyncsync.shield import CLEANUP_TIMEOUT, shielded
from asyncsync.trainer_group import as_trainer
from asyncsync.weights import Weights

DEFAULT_TIMEOUT = 600.0
"""Seconds for a whole update."""

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
            or a list of them, one a rank (FSDP2, tensor parallel, replicated). The first of several is the source.
        engines: Where they go: Ray actors whose class includes :class:`asyncsync.ModuleEngine`, or objects with the
            :class:`asyncsync.RolloutEngine` protocol.
        initial_version: The version of the weights that every engine holds already; None if they hold none that
            counts, and nothing may be generated before the first update.
        bucket_size: Bytes a message may have at the most.
        name_map: From the trainer's name of a tensor to the engines'; None leaves the tensor out. Must be picklable
            for a trainer that is an actor.
        dtype: Floating-point tensors are converted to this dtype on purpose; without it, dtypes must agree.
        partial: Whether engines may hold tensors that the trainer does not send. Those are taken to be as they
            should be in every engine, also in one that was restarted.
        backend: ``"gloo"``, ``"nccl"``, or ``"auto"``: NCCL if all weights are on GPUs.
        timeout: Seconds for a whole update; phases have shares of it.
        offload: For a trainer in this process: False if it never offloads its memory (see
            :func:`asyncsync.memory_saver_guard`).
        lock: The lock that generation and updates share, if others are to use it too; a lock of its own if None.

    Raises:
        ValueError: No engines, an engine or a trainer rank given twice, or a size or time that is not positive.
        TypeError: Something is neither a trainer nor weights, or no engine; or an option is of the wrong kind.
    """

    def __init__(
        self,
        trainer: Weights | Any,
        engines: Iterable[Any],
        *,
        initial_version: int | None = None,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        name_map: NameMap | None = None,
        dtype: torch.dtype | None = None,
        partial: bool = False,
        backend: BackendChoice = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        offload: bool | None = None,
        lock: RolloutLock | SharedRolloutLock | None = None,
    ) -> None:
        _refuse_kind("bucket_size", bucket_size, int, "a number of bytes")
        _refuse_kind("timeout", timeout, int | float, "a number of seconds")
        _refuse_kind("dtype", dtype, torch.dtype | None, "a torch.dtype")
        _refuse_kind("initial_version", initial_version, int | None, "a number")
        _refuse_kind("partial", partial, bool, "True or False")
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
        if name_map is not None and not callable(name_map):
            raise TypeError(f"name_map must be a function from name to name, not {type(name_map).__name__}")
        self._fleet = Fleet(engines)
        self._trainer, self._own_trainer = as_trainer(trainer, offload=offload)
        self._lock = lock if lock is not None else RolloutLock("generation lock")
        self._version = initial_version
        self._timeout = timeout
        self._policy: Policy = "drain"
        self._base_epoch: int | None = None
        self._connection = Connection(
            self._trainer,
            self._fleet,
            options=ReadOptions(bucket_size=bucket_size, name_map=name_map, dtype=dtype),
            partial=partial,
            backend=backend,
            policy=self._policy,
            timeout=timeout,
            cleanup_timeout=CLEANUP_TIMEOUT,
        )
        self._busy = asyncio.Lock()
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
        state = "closed" if self._closed else "updating" if self._updates.running else "idle"
        engines = ", ".join(member.name for member in self._fleet.members)
        return (
            f"<WeightSynchronizer {state}: version {self._version}, engines {engines}; "
            f"{self._updates.callers} waiting for an update; {self._lock!r}>"
        )

    @property
    def weight_version(self) -> int | None:
        """The published version: the newest that engines hold whole. None before the first."""
        return self._version

    async def update_weights(self) -> WeightUpdate:
        """Bring the trainer's present weights to every engine, and publish them as a new version.

        One update runs at a time. A call that comes while one is running waits for the next, together with all others
        that come meanwhile; each gets that update's outcome. The weights must not change until it returns.

        If it is cancelled, and nobody else waits for the same update, the update is undone before the cancellation
        goes on.

        Raises:
            PlanError: The weights cannot be sent, or do not fit an engine: nothing was sent.
            ConnectError: The group could not be set up: nothing was sent.
            WeightUpdateError: The update failed; ``.phase`` and ``.outcomes`` say where and with what result. One
                engine's failure is an EngineError, that of several an EngineErrorGroup. Engines that hold
                whole weights serve on; the next update repairs the others.
            LockError: Called inside :meth:`generation`, it would wait for itself.
            ClosedError: The synchronizer was closed, before or meanwhile.
        """
        self._check_usable()
        if self._lock.holds() is not None:
            raise LockError("update_weights() inside generation() would wait for itself: leave generation() first")
        return await self._updates.request()

    @asynccontextmanager
    async def generation(self, *, timeout: float | None = None) -> AsyncIterator[int]:
        """Generate with a whole version: many at once, and never while an update commits.

        Entering waits while engines are paused; it gives the version that will be read, now, at dispatch.

        Args:
            timeout: Seconds to wait; the lock's own default if None.

        Raises:
            NotReadyError: There is no version yet: update first, or pass ``initial_version``.
            LockTimeoutError: An update held generation back for longer than ``timeout``.
            ClosedError: The synchronizer was closed.
        """
        self._check_usable()
        self._check_version()
        async with self._lock.reader(timeout=timeout):
            self._check_usable()
            yield self._check_version()

    async def connect(self) -> None:
        """Do now what the first update would do first: agree on the layout, and connect.

        Raises:
            PlanError: The weights cannot be sent, or do not fit an engine.
            ConnectError: The group could not be set up; nothing is left half-open.
            EngineError: An engine failed.
            TrainerError: The trainer failed.
        """
        self._check_usable()
        async with self._busy:
            await self._agree(UpdateClock(self._timeout, self._fleet.silent))

    async def aclose(self) -> None:
        """Cancel the running update, leave the group, and refuse further use; a second call does nothing."""
        if not self._closed:
            self._closed = True
            await shielded(self._aclose(), 6 * CLEANUP_TIMEOUT)

    async def _aclose(self) -> None:
        await self._updates.aclose()
        with anyio.move_on_after(CLEANUP_TIMEOUT):
            await self._busy.acquire()  # a connect() that is under way; kept, since nothing may follow
        await self._connection.aclose()
        if self._own_trainer is not None:
            self._own_trainer.close()

    # -- the transaction ------------------------------------------------------------------------------------------

    async def _update(self) -> WeightUpdate:
        async with self._busy:
            clock = UpdateClock(self._timeout, self._fleet.silent)
            if self._connection.in_step:
                try:
                    return await self._attempt(clock)
                except OutOfStepError as error:
                    _log.info("asking everyone anew: %s", error)
            return await self._attempt(clock)

    async def _attempt(self, clock: UpdateClock) -> WeightUpdate:
        in_step = self._connection.in_step
        try:
            order, engines = await self._agree(clock)
            attempt = Attempt(order, engines)
            try:
                await self._transaction(attempt, clock)
            except WeightUpdateError as error:
                attempt.explain(error, clock)
                if isinstance(error, TransferError) and attempt.replaced and in_step and not attempt.switched:
                    raise OutOfStepError(f"an engine was restarted since the last update: {error}") from error
                if isinstance(error, TransferError) and attempt.lost:
                    # An end's connection was heard to break before the end itself was missed.
                    lost = [each for each in attempt.lost if isinstance(each, TrainerError)] or attempt.lost
                    gone = cast("WeightUpdateError", combine_errors(lost))
                    gone.phase = error.phase
                    attempt.explain(gone, clock)
                    raise gone from error
                raise
        except BaseException:
            self._connection.forget()
            raise
        self._connection.confirm(order)
        update = attempt.report(clock)
        _log.info("%s", update)
        return update

    async def _transaction(self, attempt: Attempt, clock: UpdateClock) -> None:
        if attempt.staged:
            async with self._undone_if_it_fails(attempt):
                await self._transfer(attempt, clock)
                async with self._no_readers(attempt, clock), self._undone_if_it_fails(attempt):
                    await self._finish(attempt, clock)
        else:
            async with (
                self._no_readers(attempt, clock),
                self._paused(attempt, clock),
                self._undone_if_it_fails(attempt),
            ):
                await self._transfer(attempt, clock)
                await self._finish(attempt, clock)

    async def _agree(self, clock: UpdateClock) -> tuple[UpdateOrder, dict[Member, EngineStatus]]:
        return await self._connection.agree(clock, base_epoch=self._base_epoch, version=self._version or 0)

    async def _transfer(self, attempt: Attempt, clock: UpdateClock) -> None:
        """Send and receive at once; the first failure at either end wins (R5), and digests must agree (R12)."""
        order = attempt.order
        with clock.phase("transfer"):
            ends: dict[Member | None, Any] = {  # engines first: they are farther away
                member: member.call(lambda engine: engine.receive_weights(order)) for member in self._fleet.members
            }
            ends[None] = call_trainer(lambda: self._trainer.send_weights(order), silent=self._fleet.silent)
            receipts = await race(ends)
            sent: SendReceipt = receipts.pop(None)
            for member, receipt in receipts.items():
                attempt.digests[cast("Member", member)] = receipt.digest
            for member, digest in attempt.digests.items():
                if digest != sent.digest:
                    raise TransferError(
                        f"{member.name} received other bytes than were sent: digest {digest}, sent {sent.digest} "
                        "(did the trainer change its weights before the update was done?)"
                    )
        attempt.sent = sent

    @asynccontextmanager
    async def _no_readers(self, attempt: Attempt, clock: UpdateClock) -> AsyncIterator[None]:
        """The writer's side of the generation lock: who generates has left, who wants to waits."""
        async with AsyncExitStack() as stack:
            with clock.measure("drain"):
                holder = f"update to version {attempt.order.version}"
                writer = self._lock.writer(timeout=clock.limit("drain"), holder=holder)
                try:
                    await stack.enter_async_context(writer)
                except LockTimeoutError as error:
                    raise WeightUpdateTimeoutError(f"generation did not end in time: {error}") from error
            with clock.measure("paused"):
                yield

    @asynccontextmanager
    async def _paused(self, attempt: Attempt, clock: UpdateClock) -> AsyncIterator[None]:
        """Every engine paused; in the end, every one that holds whole weights serves again."""
        try:
            with clock.phase("pause"):
                await self._fleet.all(lambda engine: engine.pause_generation(attempt.order.epoch, self._policy))
            yield
        finally:
            errors = await shielded(self._resume(attempt, clock))
        if errors:
            raise combine_errors(errors)

    async def _resume(self, attempt: Attempt, clock: UpdateClock) -> list[Exception]:
        whole = [member for member in self._fleet.members if attempt.may_serve(member)]
        with clock.measure("resume"):
            results = await self._fleet.each(
                lambda engine: engine.resume_generation(attempt.order.epoch),
                members=whole,
                timeout=CLEANUP_TIMEOUT,
            )
        errors = {
            member: result
            for member, result in results.items()
            # Out of step: another conductor has begun an update of it meanwhile, and will resume it.
            if isinstance(result, Exception) and not isinstance(result, OutOfStepError)
        }
        for member, error in errors.items():
            attempt.record(member, EngineState.LOST, error=error)
            _log.warning("could not resume: %s", error)
        return list(errors.values())

    async def _finish(self, attempt: Attempt, clock: UpdateClock) -> None:
        """Switch every engine to the new version, and publish it, last of all (R3)."""
        with clock.phase("finish"):
            await self._fleet.all(lambda engine: engine.finish_weight_update(attempt.order))
        self._publish(attempt)
        for member in self._fleet.members:
            attempt.record(member, EngineState.UPDATED, weight_version=attempt.order.version)

    def _publish(self, attempt: Attempt) -> None:
        self._version, self._base_epoch = attempt.order.version, attempt.order.epoch

    @asynccontextmanager
    async def _undone_if_it_fails(self, attempt: Attempt) -> AsyncIterator[None]:
        """On failure, end the update at both ends and learn who holds what; shielded and bounded (R7)."""
        try:
            yield
        except BaseException:
            if not attempt.undone:
                attempt.undone = True
                await shielded(self._undo(attempt))
            raise

    async def _undo(self, attempt: Attempt) -> None:
        epoch = attempt.order.epoch
        ends: dict[str, Any] = {
            "trainer": call_trainer(lambda: self._trainer.abort_send(epoch), timeout=CLEANUP_TIMEOUT),
            "engines": self._fleet.each(
                lambda engine: engine.abort_weight_update(epoch, None), timeout=CLEANUP_TIMEOUT
            ),
        }
        results = await settle(ends)
        if isinstance(results["trainer"], Exception):
            _log.warning("could not stop the sending: %s", results["trainer"])
            attempt.lost.append(results["trainer"])
        engines = cast("dict[Member, EngineStatus | Exception]", results["engines"])
        version = attempt.order.version
        switched = {
            member
            for member, status in engines.items()
            if isinstance(status, EngineStatus) and status.weight_version == version
        }
        attempt.switched = bool(switched)
        if switched:
            # Some engines hold the new version whole, so it is out; those that do not are behind it.
            self._publish(attempt)
            behind = [member for member in engines if member not in switched]
            engines |= await self._fleet.each(
                lambda engine: engine.abort_weight_update(epoch, version),
                members=behind,
                timeout=CLEANUP_TIMEOUT,
            )
        for member, status in engines.items():
            if isinstance(status, Exception):
                attempt.lost.append(status)
                attempt.record(member, EngineState.LOST, error=status)
            elif status.instance != attempt.instances[member]:
                attempt.replaced = True
                attempt.record(member, EngineState.LOST, error="its process was replaced during the update")
            elif status.tainted is not None:
                attempt.record(member, EngineState.TAINTED, error=status.tainted)
            else:
                state = EngineState.UPDATED if member in switched else EngineState.UNCHANGED
                attempt.record(member, state, weight_version=status.weight_version)

    # -- use ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the synchronizer was closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise EventLoopError("a WeightSynchronizer belongs to the event loop that first used it, not to this one")

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
