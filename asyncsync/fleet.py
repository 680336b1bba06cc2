"""The engines of one update: one call to all of them, and whose error an error is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import anyio

from asyncsync import cluster
from asyncsync.buckets import list_names
from asyncsync.engines.base import EngineReceipt, RolloutEngine
from asyncsync.errors import (
    ConnectError,
    EngineError,
    EngineErrorGroup,
    OutOfStepError,
    PlanError,
    TransferError,
    what_was_said,
)
from asyncsync.fanout import beside, end, is_ours, settle
from asyncsync.messages import EngineStatus, Policy
from asyncsync.report import EngineOutcome, EngineState
from asyncsync.shield import CLEANUP_TIMEOUT

PATIENCE = 1.0
"""Seconds without an answer from anybody after which, once something took too long, who is silent counts as lost."""

LINK_PATIENCE = 0.5
"""The same, once a link has broken: whoever broke it is mostly gone, and the others answer at once."""

LEFT_PATIENCE = 0.2
"""The same, for those whose connection broke."""

LATE_TIMEOUT = 3 * PATIENCE
"""Seconds for a source to end its part, once something took too long: it waits for nobody then."""

LOST_TIMEOUT = 5.0
"""Seconds for a call to an engine that did not answer the last time."""

T = TypeVar("T")


class Member:
    """One engine, as long as it belongs to the synchronizer.

    Args:
        name: What reports and errors call it.
        handle: What the user gave.
        engine: The engine behind it.
        silent: Where it is noted if a call is given up before the engine has answered.

    Attributes:
        weight_version: The version of this synchronizer's that it holds whole, as far as is known.
        was_called: Whether it was called; then it may keep something open for more.
        was_waiting: Whether the last call that it did not answer was one in which it waits for others.
        gone: The error that says that its process is gone; None once it has answered again.
        differs: Whether it was found to hold other bytes than were sent: then it gets the next update whole.
        sleeps: Whether it was ever seen asleep: after a failed update it may take its time to go back to that.
        is_lost: Whether it did not answer when an update failed. Until it does, no call to it takes longer than
            :data:`LOST_TIMEOUT`.
    """

    def __init__(self, name: str, handle: Any, engine: RolloutEngine, silent: list[str]) -> None:
        self.name = name
        self.handle = handle
        self.engine = cast("RolloutEngine", _Answering(engine))
        self.weight_version: int | None = None
        self.was_called = False
        self.was_waiting = False
        self.gone: EngineError | None = None
        self.is_lost = False
        self.sleeps = False
        self.differs = False
        self._silent = silent
        self._calls: set[asyncio.Timeout] = set()
        self._expelled = False

    def __repr__(self) -> str:
        return f"<Member {self.name}: version {self.weight_version}{', expelled' * self._expelled}>"

    def expel(self) -> None:
        """End every call to it, and refuse new ones: it was removed, and does not answer."""
        self._expelled = True
        self.give_up()

    def give_up(self) -> None:
        """Have the calls to it that are running end as calls that were not answered."""
        for limit in self._calls:
            with suppress(RuntimeError):  # it is running out just now
                limit.reschedule(asyncio.get_running_loop().time())

    async def call(
        self, call: Callable[[RolloutEngine], Awaitable[T]], timeout: float | None = None, *, waits: bool = False
    ) -> T:
        """Call the engine; its errors come back as its own.

        Args:
            call: What to call.
            timeout: Seconds it may take.
            waits: Whether it waits for others in it: then it is not to blame for not answering.

        Raises:
            EngineError: It failed, or is gone; the engine's own error is the cause.
            PlanError: It refused the weights.
            ConnectError: It could not join.
            OutOfStepError: It does not know what it is ordered.
            TransferError: The bytes did not reach it.
        """
        if self._expelled:
            raise EngineError(f"{self.name} was removed", engine=self.name)
        if self.is_lost:
            timeout = LOST_TIMEOUT if timeout is None else min(timeout, LOST_TIMEOUT)
        self.was_called = True
        limit = asyncio.timeout(timeout)
        started = anyio.current_time()
        self._calls.add(limit)
        try:
            async with limit:
                answer = await _left_if_it_does_not_end(call(self.engine), limit)
                self.is_lost, self.gone = False, None
                return answer
        except OutOfStepError:
            raise
        except (PlanError, ConnectError, TransferError) as error:
            named = error.named(self.name)
            if isinstance(named, ConnectError):  # if the bytes did not come, this end cannot know whose fault that is
                named.engine = self.name
            raise named from error
        except BaseException as error:
            if is_ours(error):
                self._silent.append(self.name)
                self.was_waiting = waits
                raise
            waited = anyio.current_time() - started if limit.expired() else None
            said = cluster.how_it_failed(self.name, error, waited)
            failure = EngineError(f"{self.name} was removed" if self._expelled else said, engine=self.name)
            if isinstance(error, cluster.ActorLostError):
                self.gone = failure
            raise failure from error
        finally:
            self._calls.discard(limit)


class _Answering:
    """An engine whose answers are looked at: whoever writes an adapter may forget one."""

    KINDS: Mapping[str, type] = {
        "describe_engine": EngineStatus,
        "open_group": dict,
        "receive_weights": EngineReceipt,
        "give_weights": EngineReceipt,
        "abort_weight_update": EngineStatus,
    }

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)
        kind = self.KINDS.get(name)
        if kind is None:
            return method

        async def call(*arguments: Any) -> Any:
            answer = await method(*arguments)
            if not isinstance(answer, kind):
                raise TypeError(f"{name} returned {answer!r}, and must return {kind.__name__}")
            return answer

        return call


class Fleet:
    """The engines of one update: a snapshot of who belongs to the synchronizer, the same for every rank and phase.

    Args:
        members: The engines.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)

    def without(self, members: Collection[Member]) -> Fleet:
        """The same, but for these."""
        return Fleet([member for member in self.members if member not in members])

    async def roll_call(self, patience: float | None) -> dict[Member, Exception]:
        """Who does not answer; each with what came instead.

        Args:
            patience: Seconds without an answer from anybody, after which to give up.
        """
        answers = await self.each(lambda engine: engine.describe_engine(), timeout=CLEANUP_TIMEOUT, patience=patience)
        gone: dict[Member, Exception] = {
            member: answer for member, answer in answers.items() if isinstance(answer, EngineError)
        }
        for member in gone:
            member.is_lost = True
        return gone

    def outcomes(self, failed: Mapping[Member, Exception]) -> tuple[EngineOutcome, ...]:
        """How engines are before an update has touched them, as far as is known.

        Args:
            failed: Those who do not answer, or have failed.
        """

        def outcome(member: Member) -> EngineOutcome:
            error = what_was_said(failed[member]) if member in failed else None
            if error is not None and (member.is_lost or member.gone is not None):
                return EngineOutcome(engine=member.name, state=EngineState.LOST, error=error)
            version = member.weight_version
            return EngineOutcome(engine=member.name, state=EngineState.UNCHANGED, weight_version=version, error=error)

        return tuple(outcome(member) for member in self.members)

    async def all(
        self,
        call: Callable[[RolloutEngine], Awaitable[T]],
        *,
        members: Sequence[Member] | None = None,
        timeout: float | None = None,
    ) -> dict[Member, T]:
        """Call every engine, and wait for all of them.

        Raises:
            EngineError: One failed (its error is raised as itself).
            PlanError: Engines refused the weights; one error that tells what each refused.
            EngineErrorGroup: Several failed.
        """
        results = await self.each(call, members=members, timeout=timeout)
        errors = [result for result in results.values() if isinstance(result, Exception)]
        if errors:
            raise combine_errors(errors)
        return results  # type: ignore[return-value]  # no exceptions left

    async def each(
        self,
        call: Callable[[RolloutEngine], Awaitable[T]],
        *,
        members: Sequence[Member] | None = None,
        timeout: float | None = None,
        patience: float | None = None,
        left: Collection[Member] = (),
    ) -> dict[Member, T | Exception]:
        """Call every engine, wait for all of them, and give each one's result or error.

        Args:
            call: What to call.
            members: Which engines; all of them if None.
            timeout: Seconds that each may take, whatever the others do.
            patience: Seconds after which those are given up that have not answered, and nobody else has meanwhile.
            left: Those for whom :data:`LEFT_PATIENCE` is enough.
        """
        chosen = self.members if members is None else members
        calls = {member: asyncio.ensure_future(member.call(call, timeout)) for member in chosen}
        if patience is None:
            return await settle(calls)
        async with beside(lambda: _hurry(calls, patience, left)):
            return await settle(calls)

    async def describe(self, policy: Policy, timeout: float | None = None) -> dict[Member, EngineStatus]:
        """Ask every engine how it is.

        Args:
            policy: What it must be able to do with requests in flight.
            timeout: Seconds that each may take to answer.

        Raises:
            ConnectError: One cannot be used: it is another one too, cannot do the policy, or would not answer while
                it generates.
            PlanError: One has not all of a tensor: it is a rank of an engine, and others are missing.
        """
        statuses = await self.all(lambda engine: engine.describe_engine(), timeout=timeout)
        seen: dict[str, str] = {}
        for member, status in statuses.items():
            member.sleeps |= bool(status.released)
            for instance in status.instance.split("+"):
                if instance in seen:
                    raise ConnectError(f"{member.name} and {seen[instance]} are the same engine, or share a rank")
                seen[instance] = member.name
            if status.shards:
                raise PlanError(
                    f"{member.name} holds only a part of {list_names(set(status.shards))}: "
                    "give the synchronizer a list of all ranks of the engine in its place",
                    names=sorted(status.shards),
                )
            if policy not in status.policies:
                can = ", ".join(status.policies)
                why = f": {status.cannot[policy]}" if policy in status.cannot else ""
                raise ConnectError(f"{member.name} cannot {policy} requests in flight, only {can}{why}")
            if not status.control_group:
                raise ConnectError(
                    f"{member.name} would not answer while it generates: "
                    "declare its class with @asyncsync.remote(…) in place of @ray.remote(…)"
                )
        return statuses


async def _left_if_it_does_not_end(call: Awaitable[T], limit: asyncio.Timeout) -> T:
    """Wait for a call; one that is cancelled, and does not end by that, is left to itself."""
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    finally:
        await end([task], PATIENCE if limit.expired() else CLEANUP_TIMEOUT)


async def _hurry(calls: Mapping[Member, asyncio.Future[Any]], patience: float, left: Collection[Member]) -> None:
    while waiting := {member: call for member, call in calls.items() if not call.done()}:
        limit = LEFT_PATIENCE if waiting.keys() <= set(left) else patience
        ended, _ = await asyncio.wait(waiting.values(), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if not ended:
            for member in waiting:
                member.give_up()
            return


def combine_errors(errors: Sequence[Exception]) -> Exception:
    """One error of several engines: itself if it is the only one, a PlanError if all are, else a group.

    That an engine is out of step counts only if nothing worse happened: then everyone is asked anew.
    """
    errors = [error for error in errors if not isinstance(error, OutOfStepError)] or errors[:1]
    if len(errors) == 1:
        return errors[0]
    plans = [error for error in errors if isinstance(error, PlanError)]
    if len(plans) == len(errors):
        names = sorted({name for error in plans for name in error.names})
        return PlanError(" | ".join(str(error) for error in plans), names=names)
    return group_errors(errors)


def group_errors(errors: Sequence[Exception]) -> EngineErrorGroup:
    """Several engines' errors as one, whose text has those of all."""
    return EngineErrorGroup(f"{len(errors)} engines failed: {' | '.join(map(str, errors))}", list(errors))
