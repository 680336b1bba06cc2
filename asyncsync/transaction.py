"""The transaction: the one order of all that changes engines' weights, and the way back.

:meth:`Transaction.run` is the whole of it. Every step that must be undone is a context manager around what follows, so
that the way back is the way in reversed, on success, failure and cancellation alike (R2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import anyio

from asyncsync import cluster
from asyncsync.attempt import Attempt
from asyncsync.catch_up import Published
from asyncsync.clock import UpdateClock
from asyncsync.engines.base import CheckedEngine, EngineReceipt
from asyncsync.errors import (
    EngineError,
    LinkLostError,
    LockTimeoutError,
    OutOfStepError,
    TrainerError,
    TransferError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from asyncsync.fanout import beside, race, settle
from asyncsync.fleet import LATE_TIMEOUT, LINK_PATIENCE, PATIENCE, Member, combine_errors
from asyncsync.lock import RolloutLock
from asyncsync.losses import LateCalls, Losses
from asyncsync.messages import STORES, EngineStatus, Policy, SendReceipt
from asyncsync.report import EngineState
from asyncsync.shared_lock import SharedRolloutLock
from asyncsync.shield import CLEANUP_TIMEOUT, shielded
from asyncsync.sources import Sources

ABORT_INTERVAL = 0.05
"""Seconds between two rounds of aborting, while those who read the last version are to leave."""

PUBLISH_TIMEOUT = CLEANUP_TIMEOUT + PATIENCE
"""Seconds for what an update wrote to a folder to be given its name there."""

UNDO_TIMEOUT = 5 * CLEANUP_TIMEOUT
"""Seconds for all steps of undoing an update; each of them is bounded for itself."""

_log = logging.getLogger("asyncsync")


class Transaction:
    """One attempt to bring new weights to engines, from the first byte to the last engine that serves again.

    Args:
        attempt: What was ordered, and where it is noted what became of it.
        clock: The update's.
        sources: Where the weights come from.
        lock: Who generates reads, and the commit writes.
        publish: Told the new version, and the attempt that made it, once engines serve it.
        losses: Engines that the update goes on without.
        late: Calls to those that do not answer.
        all_or_nothing: Whether engines are to be paused before the first one switches, so that switching cannot wait
            for anything any more.
    """

    def __init__(
        self,
        attempt: Attempt,
        clock: UpdateClock,
        sources: Sources,
        lock: RolloutLock | SharedRolloutLock,
        publish: Callable[[Published, int], None],
        *,
        losses: Losses,
        late: LateCalls,
        all_or_nothing: bool,
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._sources = sources
        self._lock = lock
        self._publish_version = publish
        self._losses = losses
        self._late = late
        self._all_or_nothing = all_or_nothing
        self._order = attempt.order
        self._policy = attempt.order.policy

    async def run(self) -> None:
        """Do it.

        Raises:
            WeightUpdateError: It failed; the attempt's outcomes say where that left each engine.
        """
        async with self._published_in_folder():
            if self._attempt.staged:
                async with self._undone_if_it_fails():
                    await self._transfer()
                    async with self._held_back(), self._undone_if_it_fails():
                        await self._finish()
            else:
                async with self._held_back(), self._undone_if_it_fails():
                    await self._transfer()
                    await self._finish()

    @asynccontextmanager
    async def _published_in_folder(self) -> AsyncIterator[None]:
        """In the end readers of the folder find the version, if engines serve it (R3)."""
        try:
            yield
        finally:
            if self._attempt.switched and self._attempt.orders.publishes:
                with self._clock.measure("publish"):
                    self._attempt.unpublished = await shielded(self._publish_in_folder(), PUBLISH_TIMEOUT)

    async def _publish_in_folder(self) -> Exception | None:
        first, *_ = self._sources.all
        epoch, digest, count = self._order.epoch, self._attempt.digest, len(self._sources.all)
        try:
            await first.call(lambda source: source.publish_weights(epoch, digest, count), CLEANUP_TIMEOUT)
        except WeightUpdateError as error:
            _log.warning("version %d is not published in the folder: %s", self._order.version, error)
            return error
        return None

    @asynccontextmanager
    async def _held_back(self) -> AsyncIterator[None]:
        """Whatever the policy says of those who generate, while weights change.

        Staged engines hold requests back by themselves as they switch. They are paused before that only where requests
        are aborted: who holds ``generation()`` around one leaves it then, and could not while the lock is written. And
        where all or none are to switch: the pause is what may take long, or fail.
        """
        async with AsyncExitStack() as stack:
            if self._policy == "drain":
                # Who waits at an engine that is paused already may be waiting for this update, and this update for him.
                stopped = self._attempt.stopped
                await stack.enter_async_context(self._resumed_after(stopped))
                await stack.enter_async_context(self._no_readers(aborted_at=stopped))
            stack.enter_context(self._clock.measure("paused"))
            if not self._attempt.staged or self._policy == "abort" or self._all_or_nothing:
                await stack.enter_async_context(self._paused(self._attempt.fleet.members, self._policy))
            if self._policy == "abort":
                await stack.enter_async_context(self._no_readers(aborted_at=self._attempt.fleet.members))
            yield

    async def _transfer(self) -> None:
        """Send and receive at once; the first failure at either end wins (R5), and digests must agree (R12)."""
        orders = self._attempt.orders
        sent: list[SendReceipt] = []
        all_sent = asyncio.Event()

        async def send() -> Sequence[SendReceipt]:
            # A source gives a receipt; what gives none are ranks that only bring it something.
            sent.extend(
                cast("SendReceipt", receipt)
                for receipt in await self._sources.race(
                    lambda number, source: source.send_weights(orders.sources[number])
                )
            )
            all_sent.set()
            return sent

        def receive(member: Member) -> Awaitable[EngineReceipt]:
            if orders.transports[member] in STORES:
                return self._fetch(member, sent, all_sent)
            return member.call(lambda engine: engine.receive_weights(orders.engines[member]), waits=True)

        with self._clock.phase("transfer"):
            # Engines first: they are farther away.
            ends: dict[Member | None, Any] = {member: receive(member) for member in self._attempt.fleet.members}
            ends[None] = send()
            try:
                receipts = await race(ends)
            finally:
                for place in (place for receipt in sent for place in receipt.stored.values()):
                    place.objects.clear()  # nobody needs them any more, whoever still has this list
            self._attempt.sent = receipts.pop(None)
            for member, receipt in cast("dict[Member, EngineReceipt]", receipts).items():
                member.sleeps |= receipt.slept
                if receipt.digest is not None:
                    self._attempt.digests[member] = receipt.digest
            self._compare_digests()

    async def _fetch(self, member: Member, sent: Sequence[SendReceipt], all_sent: asyncio.Event) -> EngineReceipt:
        """Have an engine fetch what all sources have stored, once they have."""
        await all_sent.wait()
        order = self._attempt.orders.engines[member]
        stored = tuple(receipt.stored[name] for receipt, name in zip(sent, order.connections, strict=True))
        order = replace(order, stored=stored)
        self._attempt.untold.discard(member)
        try:
            return await member.call(lambda engine: engine.receive_weights(order))
        except TransferError as error:
            if not isinstance(error, LinkLostError):
                error.engine = member.name  # all is there, and others may find it
            raise

    def _compare_digests(self) -> None:
        sent, received = self._attempt.digest, self._attempt.digests
        wrong = {member: digest for member, digest in received.items() if digest != sent}
        everyone = len(wrong) == len(received)  # then it was the trainer
        for member in received:
            member.differs = member in wrong
        errors = [
            TransferError(
                f"{member.name} received other bytes than were sent: digest {digest}, sent {sent} "
                "(did the trainer change its weights before the update was done?)",
                engine=None if everyone else member.name,
            )
            for member, digest in wrong.items()
        ]
        if errors:
            raise errors[0] if everyone else combine_errors(errors)

    @asynccontextmanager
    async def _no_readers(self, aborted_at: Sequence[Member]) -> AsyncIterator[None]:
        """The writer's side of the generation lock: who generates has left, who wants to waits.

        Args:
            aborted_at: Engines that are paused. What readers who were in already still bring to them is aborted.
        """
        async with AsyncExitStack() as stack:
            with self._clock.measure("drain"):
                holder = f"update to version {self._order.version}"
                writer = self._lock.writer(timeout=self._clock.limit("drain"), holder=holder)
                try:
                    async with beside(lambda: self._abort_newcomers(aborted_at)) if aborted_at else nullcontext():
                        await stack.enter_async_context(writer)
                except LockTimeoutError as error:
                    late = WeightUpdateTimeoutError(
                        f"generation did not end in time (does who awaits this update hold generation()?): {error}"
                    )
                    late.phase = "drain"
                    raise late from error
            yield

    async def _abort_newcomers(self, members: Sequence[Member]) -> None:
        while True:
            await anyio.sleep(ABORT_INTERVAL)
            await self._pause(members, "abort")

    async def _pause(self, members: Sequence[Member], policy: Policy) -> None:
        epoch = self._order.epoch
        await self._attempt.fleet.all(lambda engine: engine.pause_generation(epoch, policy), members=members)

    @asynccontextmanager
    async def _paused(self, members: Sequence[Member], policy: Policy) -> AsyncIterator[None]:
        """Engines paused; in the end, every one of them that holds whole weights serves again."""
        async with self._resumed_after(members):
            with self._clock.phase("pause"):
                await self._pause(members, policy)
            yield

    @asynccontextmanager
    async def _resumed_after(self, members: Sequence[Member]) -> AsyncIterator[None]:
        patience = PATIENCE
        try:
            yield
            patience = LATE_TIMEOUT  # all is well, and caches are flushed now
        finally:
            errors = await shielded(self._resume(members, patience)) if members else []
        if errors:
            raise combine_errors(errors)

    async def _resume(self, members: Sequence[Member], patience: float) -> list[Exception]:
        whole = [member for member in members if self._attempt.may_serve(member)]
        with self._clock.measure("resume"):
            results = await self._attempt.fleet.each(
                lambda engine: engine.resume_generation(self._order.epoch),
                members=whole,
                timeout=min(CLEANUP_TIMEOUT, max(self._clock.remaining, PATIENCE)),
                patience=patience,
            )
        errors = {
            member: result
            for member, result in results.items()
            # Out of step: another conductor has begun an update of it meanwhile, and will resume it.
            if isinstance(result, Exception) and not isinstance(result, OutOfStepError)
        }
        for member, error in errors.items():
            if isinstance(error.__cause__, cluster.ActorLostError | TimeoutError):
                self._attempt.lose(member, error)
            else:
                self._attempt.record(member, EngineState.TAINTED, error=error)
            _log.warning("could not resume: %s", error)
        return list(errors.values())

    async def _finish(self) -> None:
        """Switch every engine to the new version, and publish it, last of all (R3)."""
        with self._clock.phase("finish"):
            self._attempt.finishing = True
            self._attempt.paused = await self._attempt.fleet.all(
                lambda engine: engine.finish_weight_update(self._attempt.order)
            )
        if self._attempt.orders.checks:
            with self._clock.phase("check"):
                await self._check()
        for member in self._attempt.fleet.members:
            self._attempt.record(member, EngineState.UPDATED, weight_version=self._order.version)
        self._attempt.switched = True
        await self._leave_behind()
        self._publish()

    async def _check(self) -> None:
        """Have those that have loaded by themselves compare what they hold with what was sent (R12)."""
        sent, wanted = self._attempt.checksums, self._attempt.orders.checks

        def check(member: Member) -> Awaitable[None]:
            own = {key: sent[name] for key, name in wanted[member].items() if name in sent}
            return member.call(lambda engine: cast("CheckedEngine", engine).compare_checksums(self._order.epoch, own))

        results = await settle({member: check(member) for member in wanted})
        for member, keys in wanted.items():
            if isinstance(error := results[member], TransferError):
                error.engine = member.name
            elif error is None and keys:  # in place of a digest, from an engine that cannot tell one
                self._attempt.digests.setdefault(member, self._attempt.digest)
        if errors := [result for result in results.values() if isinstance(result, Exception)]:
            raise combine_errors(errors)

    async def _leave_behind(self) -> None:
        """Before a version is out, bar the engines that do not get it: who is given it must not meet an older."""
        if members := tuple(self._losses.errors):
            said = await self._late.bar(members, self._order.epoch, self._order.version, PATIENCE)
            for member, result in said.items():
                self._losses.note(member, result)

    def _publish(self) -> None:
        self._attempt.note_versions()  # at once: between the two, no engine would hold the published version
        version, layout = self._order.version, self._order.plan_digest
        published = Published(version=version, digest=self._attempt.digest, plan_digest=layout)
        self._publish_version(published, self._order.epoch)

    @asynccontextmanager
    async def _undone_if_it_fails(self) -> AsyncIterator[None]:
        """On failure, end the update at both ends and learn who holds what; shielded and bounded (R7)."""
        try:
            yield
        except BaseException as error:
            if not self._attempt.undone:
                self._attempt.undone = True
                try:
                    self._attempt.left = self._who_left(error)
                    await shielded(self._undo(self._patience(error)), UNDO_TIMEOUT)
                except TimeoutError as failure:  # must not take the place of what has failed (R7)
                    error.add_note(f"then: {failure}")
            raise

    def _patience(self, error: BaseException) -> float:
        """Seconds without an answer from anybody after which who is silent counts as lost."""
        if any(member.sleeps for member in self._attempt.fleet.members):
            return CLEANUP_TIMEOUT  # to put back to sleep what was woken takes time, in which nobody answers
        if isinstance(error, LinkLostError):
            return LINK_PATIENCE
        if isinstance(error, WeightUpdateTimeoutError):
            return PATIENCE
        return max(PATIENCE, min(CLEANUP_TIMEOUT, self._clock.remaining))

    def _who_left(self, error: BaseException) -> Collection[Member]:
        if not isinstance(error, LinkLostError):
            return ()
        seats = self._attempt.orders.seats
        left = {seats[peer] for peer in error.peers if peer in seats}
        # Who hears that another has left fails, and leaves as well.
        return {member for member in left if member.name not in error.witnesses}

    async def _undo(self, patience: float) -> None:
        epoch = self._order.epoch
        gone = {member: member.gone for member in self._attempt.fleet.members if member.gone is not None}
        others = [member for member in self._attempt.fleet.members if member not in gone]
        ends: dict[str, Any] = {
            "sources": self._sources.settle(lambda _, source: source.abort_send(epoch), max(patience, LATE_TIMEOUT)),
            "engines": self._attempt.fleet.each(
                lambda engine: engine.abort_weight_update(epoch, None),
                members=others,
                timeout=CLEANUP_TIMEOUT,
                patience=patience,
                left=self._attempt.left,
            ),
        }
        results = await settle(ends)
        for result in cast("list[Exception | None]", results["sources"]):
            if isinstance(result, TrainerError):
                _log.warning("could not stop the sending: %s", result)
                is_gone = isinstance(result.__cause__, cluster.ActorLostError)
                (self._attempt.lost_sources if is_gone else self._attempt.late_sources).append(result)
        engines = gone | cast("dict[Member, EngineStatus | Exception]", results["engines"])
        for member in self._attempt.left:
            if isinstance(engines[member], Exception) and member not in gone:
                why = f"{member.name} is gone: its connection broke, and it does not answer"
                engines[member] = EngineError(why, engine=member.name)
        version = self._order.version
        switched = {
            member
            for member, status in engines.items()
            if self._attempt.finishing and isinstance(status, EngineStatus) and status.weight_version == version
        }
        self._attempt.switched = bool(switched)
        for member, status in engines.items():
            member.is_lost = isinstance(status, Exception)
            member.sleeps |= isinstance(status, EngineStatus) and bool(status.released)
            if isinstance(status, EngineStatus) and status.received is not None and member not in self._attempt.untold:
                self._attempt.received[member] = status.received
        if switched:
            # Those that do not hold the new version are behind it, and must not serve.
            behind = [member for member in engines if member not in switched]
            said = await self._late.bar(behind, epoch, version, CLEANUP_TIMEOUT)
            engines |= {member: each for member, each in said.items() if not member.is_lost}
        self._note(engines, switched)
        if switched:  # some engines hold it whole, so it is out
            await self._leave_behind()
            self._publish()
        # Those that are whole and paused, by a conductor that is gone as well, serve again.
        left = [
            member
            for member, status in engines.items()
            if isinstance(status, EngineStatus) and status.paused and status.tainted is None
        ]
        await self._resume(left, patience)

    def _note(self, engines: Mapping[Member, EngineStatus | Exception], switched: Collection[Member]) -> None:
        for member, status in engines.items():
            if isinstance(status, Exception):
                self._attempt.lose(member, status)
            elif status.instance != self._attempt.instances[member]:
                self._attempt.replaced = True
                why = f"{member.name} is gone: its process was replaced during the update"
                self._attempt.lose(member, EngineError(why, engine=member.name))
                member.is_lost = False  # the new one answers
            elif status.tainted is not None:
                self._attempt.record(member, EngineState.TAINTED, error=status.tainted)
            else:
                state = EngineState.UPDATED if member in switched else EngineState.UNCHANGED
                self._attempt.record(member, state, weight_version=status.weight_version)
