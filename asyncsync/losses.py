"""Engines that an update goes on without: whose failure it was, and what is told of it in the end (R4).

An update whose engine fails is undone, and done again for the others, inside the same call and deadline. Here it is
decided whose failure an error is, and kept what became of those engines. A failure that is nobody's in particular, and
one of the trainer, ends the update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from asyncsync.attempt import Attempt
from asyncsync.engines.base import RolloutEngine
from asyncsync.errors import (
    ConnectError,
    EngineError,
    PlanError,
    TrainerError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
    what_was_said,
)
from asyncsync.fanout import end
from asyncsync.fleet import PATIENCE, Fleet, Member, group_errors
from asyncsync.messages import EngineStatus
from asyncsync.report import EngineOutcome, EngineState, WeightUpdate

T = TypeVar("T")

TELL_TIMEOUT = 600.0
"""Seconds that an engine which does not answer may take to hear that it is behind."""

_log = logging.getLogger("asyncsync")


class Losses:
    """The engines that one update goes on without.

    Attributes:
        errors: Each of them, with what it failed with.
        unpublished: Why the version that engines got was not published in the folder, if it was to be.
    """

    def __init__(self) -> None:
        self.errors: dict[Member, Exception] = {}
        self.unpublished: Exception | None = None
        self._outcomes: dict[Member, EngineOutcome] = {}
        self._order: dict[str, None] = {}
        self._forgotten: set[str] = set()

    def __repr__(self) -> str:
        return f"<Losses: {', '.join(member.name for member in self.errors) or 'none'}>"

    def blame(self, error: WeightUpdateError, attempt: Attempt) -> None:
        """Find whose failure it was that an attempt ended with."""
        if not attempt.is_the_trainers:
            found = blamed(error, attempt.fleet, attempt.lost)
            if isinstance(error, WeightUpdateTimeoutError) and error.phase == "transfer" and not found:
                found = dict.fromkeys(attempt.slowest, error)
            if not found:
                found = dict.fromkeys(attempt.left, error)  # they are there, but have left, and did not say why
            self._add(attempt.fleet, found, attempt.outcomes, error.phase)

    def blame_before(self, error: WeightUpdateError, fleet: Fleet, gone: Mapping[Member, Exception]) -> None:
        """Find whose failure it was that it never came to an attempt.

        Args:
            error: What happened.
            fleet: The engines.
            gone: Those who do not answer.
        """
        outcomes = dict(zip(fleet.members, error.outcomes, strict=True))
        self._add(fleet, blamed(error, fleet, gone), outcomes, error.phase)

    def _add(
        self,
        fleet: Fleet,
        found: Mapping[Member, Exception],
        outcomes: Mapping[Member, EngineOutcome],
        phase: str | None,
    ) -> None:
        self._order |= dict.fromkeys(member.name for member in fleet.members)
        for member, cause in found.items():
            member.is_lost |= isinstance(cause, WeightUpdateTimeoutError) and cause.phase == "describe"
            if isinstance(cause, WeightUpdateError):
                cause.phase = cause.phase or phase
            self.errors[member] = _as_ones_own(cause, member)
            self._outcomes[member] = outcomes[member]

    def forget(self, members: Iterable[Member]) -> None:
        """Count some no more: they do not belong to the synchronizer any longer."""
        for member in members:
            self._forgotten.add(member.name)
            del self.errors[member], self._outcomes[member]

    def leave_some(self, fleet: Fleet) -> bool:
        """Whether engines of a fleet are lost, and others are not."""
        return 0 < len(fleet.without(self.errors).members) < len(fleet.members)

    def note(self, member: Member, result: EngineStatus | Exception) -> None:
        """Keep what an engine said when it was told that it is behind."""
        if isinstance(result, Exception):
            state, error = EngineState.LOST, what_was_said(self.errors[member])
            member.is_lost = True
        else:
            state, error = EngineState.TAINTED, result.tainted or what_was_said(self.errors[member])
        self._outcomes[member] = EngineOutcome(engine=member.name, state=state, error=error)

    def merge(self, outcomes: Iterable[EngineOutcome]) -> tuple[EngineOutcome, ...]:
        """Outcomes of an attempt, and of those that were lost before it."""
        merged = {outcome.engine: outcome for outcome in (*outcomes, *self._outcomes.values())}
        names = [name for name in {**self._order, **merged} if name in merged and name not in self._forgotten]
        return tuple(merged[name] for name in names)

    def explain(self, error: WeightUpdateError | PlanError, fleet: Fleet) -> WeightUpdateError | PlanError:
        """What to raise for an update that ended with an error, of an attempt with these engines."""
        before = [cause for member, cause in self.errors.items() if member not in fleet.members]
        if not before:
            return error
        if len(fleet.without(self.errors).members) < len(fleet.members):
            return self.error()  # the last of them have failed as well
        for cause in before:
            error.add_note(f"before that: {cause}")
        if isinstance(error, WeightUpdateError):
            error.outcomes = self.merge(error.outcomes)
        return error

    def error(self, update: WeightUpdate | None = None) -> WeightUpdateError:
        """The error of an update that lost engines.

        Args:
            update: What was brought to the others; None: there are no others.
        """
        causes = self._causes
        error = causes[0] if len(causes) == 1 else group_errors(causes)
        assert isinstance(error, WeightUpdateError)
        phases = (each.phase for each in causes if isinstance(each, WeightUpdateError))
        error.phase = error.phase or next((phase for phase in phases if phase is not None), None)
        error.outcomes = self.merge(error.outcomes if update is None else update.outcomes)
        for each in causes:
            if isinstance(each, WeightUpdateError):
                each.outcomes = error.outcomes
        if update is not None:
            error.update = replace(update, outcomes=error.outcomes)
            error.weight_version = update.version
            updated = sum(outcome.state is EngineState.UPDATED for outcome in error.outcomes)
            error.add_note(
                f"version {update.version} was published: {updated} of {len(error.outcomes)} engines hold it. "
                "The next update tries the others again; remove_engine() lets one go"
            )
        return error

    def not_published(self, cause: Exception, update: WeightUpdate) -> WeightUpdateError:
        """The error of an update that engines have got, and readers of the folder have not."""
        error = TrainerError(f"engines serve version {update.version}, but {cause}")
        error.__cause__ = cause
        error.phase, error.weight_version = "publish", update.version
        error.outcomes = self.merge(update.outcomes)
        error.update = replace(update, outcomes=error.outcomes)
        error.add_note("the next update publishes the weights of then")
        return error

    @property
    def _causes(self) -> list[Exception]:
        return list({id(cause): cause for cause in self.errors.values()}.values())


def _as_ones_own(error: Exception, member: Member) -> Exception:
    """What took too long, as the failure of the engine that held it up."""
    if not isinstance(error, WeightUpdateTimeoutError):
        return error
    said = f"{member.name} held the update up: {error.said}"
    own = WeightUpdateTimeoutError(said, silent=error.silent, engine=member.name)
    own.phase, own.weight_version, own.outcomes = error.phase, error.weight_version, error.outcomes
    for note in getattr(error, "__notes__", ()):
        own.add_note(note)
    own.__cause__ = error.__cause__
    return own


def blamed(error: WeightUpdateError, fleet: Fleet, gone: Mapping[Member, Exception]) -> Mapping[Member, Exception]:
    """Whose failure an error is, each with what it failed with; nobody's, if it is the trainer's, or all's.

    Args:
        error: The error.
        fleet: The engines.
        gone: Those who do not answer any more.
    """
    if isinstance(error, TrainerError):
        return {}
    by_name = {member.name: member for member in fleet.members}
    late = error.silent if isinstance(error, WeightUpdateTimeoutError) else ()
    found = {member: error if member.name in late else cause for member, cause in gone.items()}
    if gone and isinstance(error, ConnectError):
        return found  # who could not join missed those
    for each in getattr(error, "exceptions", (error,)):
        if (member := by_name.get(getattr(each, "engine", None) or "")) is not None:
            found[member] = each
    if late and not found and by_name.keys() >= set(late):  # else they may have waited for a source
        silent = [by_name[name] for name in late]
        found = dict.fromkeys([member for member in silent if not member.was_waiting], error)
        if not found and len(silent) == 1:
            return {silent[0]: error}  # nobody else waits, so neither does it
    return found


class LateCalls:
    """Calls to engines that do not answer: made all the same, for an engine that was only frozen hears them first.

    One of a kind an engine; the next one takes the place of the last.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[Member, str], asyncio.Task[Any]] = {}

    def __repr__(self) -> str:
        names = dict.fromkeys(member.name for member, _ in self._calls)
        return f"<LateCalls to {', '.join(names) or 'nobody'}>"

    async def bar(
        self, members: Iterable[Member], epoch: int, version: int, patience: float
    ) -> Mapping[Member, EngineStatus | Exception]:
        """Tell engines that they are behind a version; those that are lost are not waited for.

        Args:
            members: The engines.
            epoch: Of the update.
            version: Which version others serve.
            patience: Seconds to wait for an answer.

        Returns:
            What each has said by then: its status, or an error.
        """
        calls = {
            member: self.start(member, "is behind", lambda engine: engine.abort_weight_update(epoch, version))
            for member in members
        }
        waiting = [call for member, call in calls.items() if not member.is_lost]
        if waiting:
            await asyncio.wait(waiting, timeout=patience)
        await asyncio.sleep(0)
        return {member: _result(member, call) for member, call in calls.items()}

    def start(self, member: Member, what: str, call: Callable[[RolloutEngine], Awaitable[T]]) -> asyncio.Task[T]:
        """Tell an engine something, and do not wait.

        Args:
            member: The engine; it may have been expelled.
            what: What it is told, for the log: that it …
            call: The call.
        """

        async def tell() -> T:
            async with asyncio.timeout(TELL_TIMEOUT):
                return await call(member.engine)

        def ended(task: asyncio.Task[T]) -> None:
            if self._calls.get((member, what)) is task:
                del self._calls[member, what]
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.info("%s was not told that it %s: %r", member.name, what, error)

        if (before := self._calls.get((member, what))) is not None:
            before.cancel()
        task = self._calls[member, what] = asyncio.create_task(tell(), name=f"asyncsync: {member.name} {what}")
        task.add_done_callback(ended)
        return task

    async def aclose(self) -> None:
        """Make none of them any more."""
        calls = list(self._calls.values())
        if calls:
            await asyncio.wait(calls, timeout=PATIENCE)
        await end(calls, PATIENCE)


def _result(member: Member, call: asyncio.Task[EngineStatus]) -> EngineStatus | Exception:
    if not call.done() or call.cancelled():
        return EngineError(f"{member.name} does not answer", engine=member.name)
    error = call.exception()
    if error is None:
        return call.result()
    return EngineError(f"{member.name} was not told that it is behind: {error!r}", engine=member.name)
