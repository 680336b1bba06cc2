"""One attempt at an update: its order, and what became of each engine so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncsync.buckets import joint_digest
from asyncsync.clock import UpdateClock
from asyncsync.errors import TrainerError, WeightUpdateError, WeightUpdateTimeoutError, what_was_said
from asyncsync.fleet import Fleet, Member
from asyncsync.messages import STORES, EngineStatus, SendReceipt, Transport, UpdateOrder
from asyncsync.report import EngineOutcome, EngineState, WeightUpdate


@dataclass(frozen=True, slots=True)
class Orders:
    """What each end of an update is ordered to do: the same, but through which groups.

    Attributes:
        all: What is ordered to all; it names no groups.
        sources: What is ordered to each source, in order.
        engines: What is ordered to each engine.
        checks: For each engine that compares checksums: its own keys, each with the key of the same one at the sources.
        transports: What the bytes go through to each engine.
        seats: Whose each place in a group is, by the group's name and the rank in it, but for the sources'.
        publishes: Whether the sources write to a folder, where the version is to be published.
        deltas: The engines that get what differs from an earlier update, and not whole buckets.
    """

    all: UpdateOrder
    sources: tuple[UpdateOrder, ...]
    engines: Mapping[Member, UpdateOrder]
    checks: Mapping[Member, Mapping[str, str]]
    transports: Mapping[Member, Transport]
    seats: Mapping[tuple[str, int], Member]
    publishes: bool = False
    deltas: frozenset[Member] = frozenset()


class Attempt:
    """An update under way.

    Args:
        orders: What was ordered.
        engines: How each engine was when it began.

    Attributes:
        orders: What was ordered, to each end.
        order: What was ordered to all of them.
        fleet: The engines.
        staged: Whether every engine holds new weights beside the old.
        stopped: Engines that are paused since an earlier update, and can end what waits for them to be resumed.
        sent: What each source sent, once every engine has confirmed it.
        digests: What each engine received, as it says.
        paused: How long nothing was generated at each engine, where it tells.
        instances: Which process or object each engine was when it began.
        left: Engines whose connection was heard to break.
        lost: Engines that are gone, each with its error.
        received: How many buckets each engine has received, and of how many, once it was asked.
        lost_sources: Errors of sources that are gone.
        late_sources: Errors of sources that did not answer in time.
        replaced: Whether an engine turned out to be another process than it was.
        finishing: Whether engines were told to switch to the new version.
        switched: Whether one has, as far as is known.
        untold: Engines that were to fetch, and were not told yet where: they wait for nobody, and hold nobody up.
        unpublished: Why the version was not published in the folder, if it was to be.
        undone: Whether both ends were told that it has failed.
        outcomes: What became of each engine so far.
    """

    def __init__(self, orders: Orders, engines: Mapping[Member, EngineStatus]) -> None:
        self.orders = orders
        self.order = orders.all
        self.fleet = Fleet(tuple(engines))
        self.staged = all(status.staged for status in engines.values())
        self.stopped = tuple(
            member
            for member, status in engines.items()
            if (status.tainted is not None or status.paused) and "abort" in status.policies
        )
        self.sent: Sequence[SendReceipt] = ()
        self.digests: dict[Member, str] = {}
        self.paused: Mapping[Member, float | None] = {}
        self.untold = {member for member in engines if orders.transports.get(member) in STORES}
        self.unpublished: Exception | None = None
        self.undone = False
        self.left: Collection[Member] = ()
        self.lost: dict[Member, Exception] = {}
        self.received: dict[Member, tuple[int, int]] = {}
        self.lost_sources: list[TrainerError] = []
        self.late_sources: list[TrainerError] = []
        self.replaced = False
        self.finishing = False
        self.switched = False
        self.instances = {member: status.instance for member, status in engines.items()}
        self.outcomes = {
            member: EngineOutcome(
                engine=member.name,
                state=EngineState.TAINTED if status.tainted else EngineState.UNCHANGED,
                weight_version=status.weight_version,
                transport=orders.transports.get(member),
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
            transport=self.orders.transports.get(member),
            delta=member in self.orders.deltas,
            bytes=self._bytes_of(member) if state is EngineState.UPDATED else None,
            paused=self.paused.get(member) if state is EngineState.UPDATED else None,
            error=None if error is None else what_was_said(error),
        )

    def _bytes_of(self, member: Member) -> int | None:
        """Bytes that were sent to an engine; None if that is not known."""
        order = self.orders.engines.get(member)
        if order is None or not self.sent:
            return None
        if member not in self.orders.deltas:
            return sum(receipt.nbytes for receipt in self.sent)
        return sum(receipt.sent.get(name, 0) for receipt in self.sent for name in order.connections)

    def lose(self, member: Member, error: Exception) -> None:
        """Note that an engine does not answer any more."""
        member.is_lost = True
        self.lost[member] = error
        self.record(member, EngineState.LOST, error=error)

    @property
    def is_the_trainers(self) -> bool:
        """Whether it has failed because of the trainer; a late source may only wait for an engine that is lost."""
        return bool(self.lost_sources or (self.late_sources and not self.lost))

    @property
    def digest(self) -> str:
        """Digest of the whole set of weights that was sent."""
        return joint_digest([receipt.digest for receipt in self.sent])

    @property
    def checksums(self) -> Mapping[str, str]:
        """Those that engines asked for, of what was sent."""
        return {key: checksum for receipt in self.sent for key, checksum in receipt.checksums.items()}

    def note_versions(self) -> None:
        """Have the members know what they hold now; one that is as it was holds what it was known to hold."""
        for member, outcome in self.outcomes.items():
            if outcome.state is EngineState.UPDATED:
                member.weight_version = self.order.version
            elif outcome.state is not EngineState.UNCHANGED:
                member.weight_version = None

    @property
    def slowest(self) -> Sequence[Member]:
        """The engines that had received the least, if others had received more: those may have waited for them."""
        least = min(self.received.values(), default=None)
        slow = [member for member, received in self.received.items() if received == least]
        told = len(self.fleet.members) - len(self.untold)
        return slow if len(slow) < len(self.received) == told else []

    def reached_all_but(self, members: Collection[Member]) -> bool:
        """Whether the new version is out, and in all engines but these; at least one has it."""
        others = [outcome for member, outcome in self.outcomes.items() if member not in members]
        return self.switched and bool(others) and all(each.state is EngineState.UPDATED for each in others)

    def may_serve(self, member: Member) -> bool:
        """Whether an engine holds whole weights, as far as is known."""
        return self.outcomes[member].state in (EngineState.UPDATED, EngineState.UNCHANGED)

    def explain(self, error: WeightUpdateError, clock: UpdateClock) -> None:
        """Tell an error where the update ended, and with what result."""
        for inner in getattr(error, "exceptions", ()):
            self.explain(inner, clock)
        error.phase = error.phase or clock.phase_name
        error.weight_version = self.order.version
        for member, outcome in self.outcomes.items():
            if outcome.engine == getattr(error, "engine", None) and outcome.error is None:
                self.outcomes[member] = replace(outcome, error=what_was_said(error))
        error.outcomes = tuple(self.outcomes.values())
        for outcome in error.outcomes:
            if outcome.error is not None and outcome.error not in str(error):
                error.add_note(f"{outcome.engine} is {outcome.state}: {outcome.error}")
        if isinstance(error, WeightUpdateTimeoutError) and error.phase == "transfer":
            for member, (arrived, buckets) in self.received.items():
                how_far = f"received {arrived} of {buckets} buckets" if arrived >= 0 else "not begun to receive"
                error.add_note(f"{member.name} had {how_far}")

    @property
    def _density(self) -> float | None:
        """Which part of all elements differs from the update that they were compared with; None: with none."""
        changed = [receipt.elements_changed for receipt in self.sent if receipt.elements_changed is not None]
        elements = sum(receipt.elements for receipt in self.sent if receipt.elements_changed is not None)
        return sum(changed) / elements if elements else None

    def report(self, clock: UpdateClock) -> WeightUpdate:
        """The result of an update that succeeded."""
        return WeightUpdate(
            version=self.order.version,
            outcomes=tuple(self.outcomes.values()),
            tensors=sum(receipt.tensors for receipt in self.sent),
            tensors_changed=sum(receipt.tensors_changed for receipt in self.sent),
            buckets=sum(receipt.buckets for receipt in self.sent),
            bytes=sum(receipt.nbytes for receipt in self.sent),
            bytes_changed=sum(receipt.nbytes_changed for receipt in self.sent),
            digest=self.digest,
            density=self._density,
            seconds=clock.seconds | {"total": clock.elapsed},
        )
