"""What every transport offers: a link a member, over which buckets travel in order."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Link(Protocol):
    """One member's end of a connected data plane.

    Buckets travel in the order in which they are started, which must be the same at every end; several may be on
    their way. ``start_*`` must be called on the member's own worker thread, always the same one; ``wait`` on an event
    loop.
    """

    connection: str

    def start_send(self, flat: Tensor) -> Any:
        """Start to send a flat uint8 tensor, which must stay as it is until the returned handle is waited for."""
        ...

    def start_receive(self, flat: Tensor) -> Any:
        """Start to receive into a flat uint8 tensor; returns a handle to wait for."""
        ...

    async def wait(self, handle: Any) -> None:
        """Wait until the bytes of one bucket have left, or have arrived.

        Raises:
            TransferError: They have not, and nothing that is started on this link later can be trusted.
        """
        ...

    def close(self) -> None:
        """Leave the group. Never blocks: what is still on its way is left behind, its buffers must not be reused."""
        ...
