"""A member's place in a process group: taken in two steps, left in one, on the member's own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncsync.errors import ConnectError
from asyncsync.fanout import settle
from asyncsync.guard import MemorySaverGuard
from asyncsync.messages import STORES, Contacts, Rendezvous
from asyncsync.transports.base import GroupJoining, Link
from asyncsync.transports.broadcast import Joining
from asyncsync.transports.cuda_ipc import IpcJoining
from asyncsync.transports.device_memory import DeviceSets
from asyncsync.transports.memory_files import SharedSets
from asyncsync.transports.pynccl import PyNcclJoining
from asyncsync.transports.shared import SharedJoining
from asyncsync.transports.stores import StoreJoining


class Seat:
    """A place in one group at a time.

    Args:
        guard: Makes the guard under which, and on whose thread, groups are joined and left.
        sets: At a source: where weights come to lie that are shared,
        device_sets: and where on its GPU.

    Attributes:
        link: The member's end of the group it has joined, or None.
    """

    def __init__(
        self,
        guard: Callable[[], MemorySaverGuard],
        sets: SharedSets | None = None,
        device_sets: DeviceSets | None = None,
    ) -> None:
        self._guard = guard
        self._sets = sets
        self._device_sets = device_sets
        self._joining: tuple[GroupJoining, asyncio.Future[None]] | None = None
        self.link: Link | None = None

    def __repr__(self) -> str:
        return f"<Seat {'joining' if self._joining and not self.link else self.link}>"

    @property
    def taken(self) -> bool:
        """Whether it has joined a group, or is joining one."""
        return self.link is not None or (self._joining is not None and not self._joining[1].done())

    @property
    def connection(self) -> str | None:
        """The group it has joined."""
        return self.link.connection if self.link else None

    async def open(self, rendezvous: Rendezvous, *, address: str) -> Contacts:
        """Leave the group it is in, if any, and begin to join this one; does not wait for its other members.

        Args:
            rendezvous: Which group, and as whom.
            address: This node's own address.

        Returns:
            How this member is reached.

        Raises:
            ConnectError: This end cannot be reached, or speaks another protocol.
            MemorySaverError: The guard could not be entered.
        """
        while self.taken:  # another may have opened one meanwhile
            await self.leave()
        joining: GroupJoining
        if rendezvous.transport == "pynccl":
            joining = PyNcclJoining(rendezvous, address=address)
        elif rendezvous.transport == "shared":
            joining = SharedJoining(rendezvous, sets=self._sets)
        elif rendezvous.transport == "cuda_ipc":
            joining = IpcJoining(rendezvous, sets=self._device_sets)
        elif rendezvous.transport in STORES:
            joining = StoreJoining(rendezvous)
        else:
            joining = Joining(rendezvous, address=address)
        joined = asyncio.ensure_future(self._join(joining))
        self._joining = joining, joined
        contacts = asyncio.ensure_future(joining.contacts())
        try:
            await asyncio.wait((contacts, joined), return_when=asyncio.FIRST_COMPLETED)
            if not contacts.done():
                await joined  # it failed before it came to its group
            return await contacts
        finally:
            contacts.cancel()

    def expects(self, connection: str) -> bool:
        """Whether this group was opened here."""
        return self._joining is not None and self._joining[0].rendezvous.connection == connection

    async def join(self, connection: str, contacts: Contacts) -> None:
        """Collective. Join the group that was opened, whose members are reached like this.

        Raises:
            ConnectError: A member could not be reached, or the group was left meanwhile.
        """
        if self._joining is None or not self.expects(connection):
            raise ConnectError("the group to join was closed meanwhile")
        joining, joined = self._joining
        joining.introduce(contacts)
        await asyncio.shield(joined)

    async def _join(self, joining: GroupJoining) -> None:
        def join() -> None:
            # Sets the link itself: whoever leaves the seat after a cancelled join still finds it.
            self.link = joining.join()

        async with self._guard() as guarded:
            await guarded.run(join, on_cancel=joining.stop)

    async def leave(self, connection: str | None = None) -> None:
        """Leave a group, joined or only opened.

        Args:
            connection: Only if it is this one; None: whichever it is.
        """
        if self._joining is not None and connection in (None, self._joining[0].rendezvous.connection):
            joining, joined = self._joining
            self._joining = None
            joining.stop()
            await settle({"joined": joined})
        if (link := self.link) is not None and connection in (None, link.connection):
            async with self._guard() as guarded:
                await guarded.run(self._close, link)

    def close(self) -> None:
        """Leave the group that it has joined. Does not block."""
        if self.link is not None:
            self._close(self.link)

    def _close(self, link: Link) -> None:
        link.close()
        if self.link is link:  # else another was joined meanwhile
            self.link = None
