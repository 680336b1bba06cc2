"""One attempt at an update: its order, and what became of each engine so far."""

from __future__ import annotations

from asyncsync.clock import UpdateClock
from asyncsync.errors import WeightUpdateError
from asyncsync.fleet import Member
from asyncsync.messages import EngineStatus, SendReceipt, UpdateOrder
from asyncsync.report import EngineOutcome, EngineState, WeightUpdate


class Attempt:
    """An update under way.

    Args:
        order: What was ordered.
        engines: How each engine was when it began.

    Attributes:
        order: What was ordered.
        staged: Whether every engine holds new weights beside the old.
        sent: What the trainer sent, once every engine has confirmed it.
        digests: What each engine received, as it says.
        instances: Which process or object each engine was when it began.
        lost: Errors of ends that are gone.
        replaced: Whether an engine turned out to be another process than it was.
        switched: Whether an engine serves the new version, though the update failed.
        undone: Whether both ends were told that it has failed.
        outcomes: What became of each engine so far.
    """

    def __init__(self, order: UpdateOrder, engines: dict[Member, EngineStatus]) -> None:
        self.order = order
        self.staged = all(status.staged for status in engines.values())
        self.sent: SendReceipt | None = None
        self.digests: dict[Member, str] = {}
        self.undone = False
        self.lost: list[Exception] = []
        self.replaced = False
        self.switched = False
        self.instances = {member: status.instance for member, status in engines.items()}
        self.outcomes = {
            member: EngineOutcome(
                engine=member.name,
                state=EngineState.TAINTED if status.tainted else EngineState.UNCHANGED,
                weight_version=status.weight_version,
                error=status.tainted,
            )
            for member, status in engines.items()
        }

    def record(
        self,
        member: Member,
        state: EngineState,
        *,
        weight_version: int | None = None,
        error: Exception | str | None = None,
    ) -> None:
        """Note what became of an engine."""
        self.outcomes[member] = EngineOutcome(
            engine=member.name,
            state=state,
            weight_version=weight_version,
            digest=self.digests.get(member) if state is EngineState.UPDATED else None,
            error=None if error is None else str(error),
        )

    def may_serve(self, member: Member) -> bool:
        """Whether an engine holds whole weights, as far as is known."""
        return self.outcomes[member].state in (EngineState.UPDATED, EngineState.UNCHANGED)

    def explain(self, error: WeightUpdateError, clock: UpdateClock) -> None:
        """Tell an error where the update ended, and with what result."""
        for inner in getattr(error, "exceptions", ()):
            self.explain(inner, clock)
        error.phase = error.phase or clock.phase_name
        error.weight_version = self.order.version
        error.outcomes = tuple(self.outcomes.values())
        for outcome in error.outcomes:
            if outcome.error is not None and outcome.error not in str(error):
                error.add_note(f"{outcome.engine} is {outcome.state}: {outcome.error}")

    def report(self, clock: UpdateClock) -> WeightUpdate:
        """The result of an update that succeeded."""
        assert self.sent is not None
        return WeightUpdate(
            version=self.order.version,
            outcomes=tuple(self.outcomes.values()),
            tensors=self.sent.tensors,
            tensors_changed=self.sent.tensors_changed,
            buckets=self.sent.buckets,
            bytes=self.sent.nbytes,
            bytes_changed=self.sent.nbytes_changed,
            digest=self.sent.digest,
            seconds=clock.seconds | {"total": clock.elapsed},
        )
