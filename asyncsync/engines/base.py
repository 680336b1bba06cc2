"""The protocol that every rollout engine satisfies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from asyncsync.messages import Checksums, Contacts, EngineStatus, Layout, Policy, Rendezvous, Stored, UpdateOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReceipt:
    """What an engine took in one update.

    Attributes:
        digest: Digest of the whole set of weights, as the engine computed it from the bytes that arrived; None if it
            cannot tell, as one that receives by itself: what it has loaded is to be compared another way.
        stored: Of one that gives its weights: what it has put where others fetch it, by the store's connection.
        slept: Whether it had released memory. If the update fails now, it takes its time: to put that back to sleep.
    """

    digest: str | None
    stored: Mapping[str, Stored] = field(default_factory=dict)
    slept: bool = False


class WeightReceiver(Protocol):
    """What takes weights and holds them, a whole engine or a rank of one: the part of an update that moves bytes."""

    async def describe_engine(self) -> EngineStatus:
        """Say who and how it is; changes nothing."""
        ...

    async def accept_layout(self, layout: Layout) -> None:
        """Compare what will be sent with what it holds, and remember it.

        Raises:
            PlanError: Names, shapes or dtypes do not fit; named in full. Nothing changed.
        """
        ...

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """Leave the group it is in, if any, and begin to join this one; does not wait for the other members.

        Returns:
            How its ranks are reached, for the others.

        Raises:
            ConnectError: It could not; it is in no group then.
        """
        ...

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """Collective. Join the group that was opened, whose members are reached like this.

        Raises:
            ConnectError: It could not; it is in no group then.
        """
        ...

    async def leave_group(self, connection: str) -> None:
        """Leave a group, joined or only opened; no error if it is in another, or in none.

        One that is in no group then keeps nothing open for its conductor: if it never was, it is asked to leave ``""``.
        """
        ...

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """Take every bucket: beside the weights it serves if it is staged, over them if not.

        Raises:
            OutOfStepError: The order's group, layout or epoch is not this engine's (any more). Nothing changed.
            TransferError: Something did not arrive. A staged engine serves on; an in-place one is tainted.
        """
        ...

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """Drop what was received of an update that will not be finished here; no error if there is none.

        Args:
            epoch: The update's.
            published: The version that counts after this very update, since other engines serve it; an engine that does
                not hold it must count itself as tainted. None: no engine switched.

        Returns:
            How it is now: tainted, if weights it served were overwritten in part, or if it is behind.
        """
        ...


@runtime_checkable
class RolloutEngine(WeightReceiver, Protocol):
    """An engine as the conductor sees it: the steps of a weight update, each one awaited call.

    The first time, and after any failure, the conductor calls ``describe_engine``, then ``accept_layout``,
    ``open_group`` and ``join_group`` if something is new. An update of staged engines is ``receive_weights`` and
    ``finish_weight_update``; one of in-place engines ``pause_generation``, ``receive_weights``,
    ``finish_weight_update`` and ``resume_generation``. After a failure it calls ``abort_weight_update`` instead of
    finishing. Every call must be answered while another is running, and while the engine generates.

    Every call may be cancelled. Every call with an epoch older than the newest the engine has seen must be refused
    with an :class:`~asyncsync.errors.OutOfStepError`, and change nothing.
    """

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """Hold back new requests, and deal with those in flight as the policy says; return when none runs."""
        ...

    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        """Make what was received the weights it serves. Called once an update.

        An engine that is paused stays so. One that is not (it must be staged) holds generation back by itself, as the
        order's policy says, switches, drops caches computed under other weights, and serves again.

        Returns:
            Seconds in which nothing was generated; None if it was paused before, or does not tell.
        """
        ...

    async def resume_generation(self, epoch: int) -> None:
        """Drop caches computed under other weights, and serve.

        Raises:
            TaintedEngineError: It holds part of an update, and stays paused.
        """
        ...


class GivingEngine(RolloutEngine, Protocol):
    """An engine that can give its weights to others, as its status says (``gives``)."""

    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        """Send the weights it serves, in the layout it has accepted last; it goes on serving them.

        Args:
            order: Names the version that is wanted and the group, in which this engine is rank 0.

        Returns:
            The digest of what was sent.

        Raises:
            OutOfStepError: It does not serve that version, or is not in the group. Nothing was sent.
            TransferError: The bytes did not arrive.
        """
        ...


class CheckedEngine(RolloutEngine, Protocol):
    """An engine that receives by itself, and can tell what it has loaded, as its status says (``checks``)."""

    async def wanted_checksums(self) -> Checksums:
        """What it wants the trainer's checksums of, to compare; of the layout that it has accepted last."""
        ...

    async def compare_checksums(self, epoch: int, checksums: Mapping[str, str]) -> None:
        """Compare what it has loaded with what was sent. Called when all have finished, before any is resumed.

        Args:
            epoch: The update's.
            checksums: Those of what was sent, by the keys that it named.

        Raises:
            TransferError: Something differs, by name. The engine is tainted.
        """
        ...
