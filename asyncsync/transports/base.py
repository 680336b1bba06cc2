"""What every transport offers: a way to join, and a link a member, over which buckets travel in order."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import Tensor

from asyncsync.messages import Contacts, Rendezvous

QUIET_TIMEOUT = 0.2
"""Seconds that a closed link may take until its buffers can be used again; else they are given up."""


class LentArena(Protocol):
    """Memory of the source's, mapped here, in which a whole set of weights comes to lie as its plan lays it out.

    It does not change once it is whole, until it was let go of. What is written to it here is seen here alone.

    Attributes:
        memory: Flat uint8.
        stays: Whether it stays what it is if the source ends, so that an engine may serve from it.
    """

    memory: Tensor
    stays: bool

    def let_go(self) -> None:
        """Say that nobody here reads it any more: the source will write to it again. A second call does nothing."""
        ...

    def tidy(self) -> None:
        """After that, and whenever there is time: undo what was written to it here. Else that is done as it is lent."""
        ...


class Link(Protocol):
    """One member's end of a connected data plane.

    Buckets travel in the order in which they are started, which must be the same at every end; several may be on
    their way. All but ``close`` is called on the member's own worker thread, always the same one.
    """

    connection: str
    device: str
    """Device type that the bytes are sent from and received on."""

    def start_send(self, flat: Tensor) -> Any:
        """Start to send a flat uint8 tensor, which must stay as it is until the returned handle is waited for.

        It lies on the link's own type of device, or on the CPU.
        """
        ...

    def start_receive(self, flat: Tensor) -> Any:
        """Start to receive into a flat uint8 tensor; returns a handle to wait for."""
        ...

    def wait(self, handle: Any, stop: threading.Event) -> None:
        """Wait until the bytes of one bucket have left, or have arrived. Blocks.

        Args:
            handle: What starting it returned.
            stop: Ends the wait within some 20 ms, from another thread; so does closing the link.

        Raises:
            LinkLostError: They have not, and nothing that is started on this link later can be trusted.
        """
        ...

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> LentArena | None:
        """At an engine: where an update's buckets come to lie by themselves; None if each is received into a buffer.

        Called once an update, before its first bucket; it is to be let go of. Blocks until the source has said.

        Args:
            epoch: The update's.
            nbytes: Size of the set.
            stop: Ends the wait, as in :meth:`wait`.

        Raises:
            LinkLostError: The source has left, it speaks of another update, or it was stopped.
        """
        ...

    def finish(self) -> None:
        """At an engine: all buckets of an update were taken. Does not block."""
        ...

    def close(self) -> None:
        """Leave the group. Never blocks: what is still on its way is left behind, and may touch its buffers."""
        ...

    def is_quiet(self, timeout: float) -> bool:
        """Whether nothing that was left behind touches its buffers any more, once the link was closed. Blocks.

        Args:
            timeout: Seconds to wait for that.
        """
        ...


class GroupJoining(Protocol):
    """A group that is being joined, in two steps: one's own contacts first, then those of all."""

    rendezvous: Rendezvous

    def join(self) -> Link:
        """Collective. Make the group. Blocks until all members are there: called on the member's worker thread.

        Raises:
            ConnectError: Not every member came in time, one could not be reached, or it was stopped.
        """
        ...

    async def contacts(self) -> Contacts:
        """How this member is reached, once :meth:`join` has begun on its thread.

        Raises:
            ConnectError: It cannot be reached: joining has failed already.
        """
        ...

    def introduce(self, contacts: Contacts) -> None:
        """Tell this member how the others are reached."""
        ...

    def stop(self) -> None:
        """Have :meth:`join` give up at once."""
        ...
