"""Both ends of a store, by what the control plane says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncsync import cluster
from asyncsync.buckets import Plan
from asyncsync.errors import ConnectError, OutOfStepError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, Rendezvous, Store, UpdateOrder
from asyncsync.transports.base import Link
from asyncsync.transports.folder import FolderEngineLink, FolderSourceLink
from asyncsync.transports.objects import ObjectsEngineLink, ObjectsSourceLink
from asyncsync.transports.stored import StoringLink
from asyncsync.weight_files import FileLayouts


class StoreJoining:
    """A source's end of a store, that is being taken up. Satisfies :class:`~asyncsync.transports.base.GroupJoining`.

    Nobody is waited for: engines have no end of it.

    Args:
        rendezvous: Which store, and as which source.

    Raises:
        ConnectError: The two ends speak different protocols, or this is no source.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        if rendezvous.protocol != PROTOCOL_VERSION:
            raise ConnectError(
                f"this end speaks asyncsync protocol {PROTOCOL_VERSION}, the other {rendezvous.protocol}: "
                "install the same version of asyncsync at both"
            )
        if rendezvous.rank != 0 or rendezvous.world_size != 1:
            raise ConnectError("of a store there is only the source's end")
        self.rendezvous = rendezvous

    def join(self) -> StoringLink:
        """Take it up.

        Raises:
            ConnectError: It cannot be used here.
        """
        rendezvous = self.rendezvous
        if rendezvous.transport == "objects":
            if not cluster.is_connected():
                raise ConnectError('transport="objects" needs a trainer whose process is connected to Ray')
            return ObjectsSourceLink(rendezvous.connection)
        try:
            return FolderSourceLink(rendezvous.connection, Path(rendezvous.folder), max(0, rendezvous.source))
        except OSError as error:
            raise ConnectError(f"weights cannot be stored in {rendezvous.folder}: {error}") from error

    async def contacts(self) -> Contacts:
        """None: nobody comes here."""
        return {}

    def introduce(self, contacts: Contacts) -> None:
        """Nothing: nobody is met."""

    def stop(self) -> None:
        """Nothing: nobody is waited for."""


def stores_here() -> tuple[Store, ...]:
    """What an engine in this process can fetch weights from."""
    return ("objects", "folder") if cluster.is_connected() else ("folder",)


def fetching_links(order: UpdateOrder, plan: Plan, layouts: FileLayouts) -> Sequence[Link]:
    """An engine's ways to what each source has stored for an update.

    Args:
        order: The update's.
        plan: The layout that was agreed on.
        layouts: Those of the files that it has read before.

    Raises:
        OutOfStepError: There are not as many as sources.
    """
    parts = plan.parts if len(order.stored) > 1 else (plan,)  # one may have stored what others have sent it
    if len(order.stored) != len(parts) or len(order.connections) != len(parts):
        raise OutOfStepError(f"the order names {len(order.stored)} stores, and there are {len(parts)} sources")
    return [
        FolderEngineLink(connection, part, stored, number, layouts, order.against)
        if stored.folder
        else ObjectsEngineLink(connection, part, stored, whole=order.against is None)
        for number, (connection, part, stored) in enumerate(zip(order.connections, parts, order.stored, strict=True))
    ]
