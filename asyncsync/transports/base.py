"""What every transport offers: a link a member, over which buckets travel in order."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import Tensor


class Link(Protocol):
    """One member's end of a connected data plane.

    Buckets travel in the order in which they are started, which must be the same at every end; several may be on
    their way. All but ``close`` is called on the member's own worker thread, always the same one.
    """

    connection: str
    device: str
    """Device type that the bytes are sent from and received on."""

    def start_send(self, flat: Tensor) -> Any:
        """Start to send a flat uint8 tensor, which must stay as it is until the returned handle is waited for."""
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

    def close(self) -> None:
        """Leave the group. Never blocks: what is still on its way is left behind, its buffers must not be reused."""
        ...
