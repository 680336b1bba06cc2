"""A letter box: where a member that only knows a store on the network meets those who are introduced to each other.

Members of this library's groups are told by their conductor how the others are reached
(:mod:`asyncsync.transports.meeting`). An engine with a process group of its own making asks a ``TCPStore`` instead. The
box is such a store, hosted beside the engine's adapter: what the engine's ranks put into it is taken out and told to
the others, and theirs are put in. No byte of the weights comes near it, and it is closed once the group stands.

It must be there before the engine is asked to join: one that finds nobody at an address tries for half an hour. And
closing it ends the engine's waiting, at any time.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncsync.errors import ConnectError
from asyncsync.messages import Contacts

_POLL_INTERVAL = 0.005  # seconds; a question to the store costs some 50 µs
_CALL_TIMEOUT = timedelta(seconds=5)  # of a call to the store, which is in this process


class LetterBox:
    """One group's letter box, open from the start.

    Args:
        group: The group's name, as its members are told.
        address: This node's address, as the engine reaches it: the box listens there, and nowhere else.

    Attributes:
        port: Where it listens.

    Raises:
        ConnectError: It cannot listen there.
    """

    def __init__(self, group: str, address: str) -> None:
        # What torch.distributed puts before a contact's key, in a gloo group made by its rendezvous: one prefix of the
        # maker's, one of the group's, and one of the device's backend.
        self._prefix = f"{group}/{group}//cpu//"
        self._closed = threading.Event()
        self._store: TCPStore | None = None
        try:
            listening = socket.create_server((address, 0))
            self.port: int = listening.getsockname()[1]
            self._store = TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=_CALL_TIMEOUT,
                master_listen_fd=listening.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise ConnectError(f"no store can listen at {address}: {error}") from error

    def __repr__(self) -> str:
        return f"<LetterBox at port {self.port}{': closed' if self._closed.is_set() else ''}>"

    def collect(self, ranks: Iterable[int], timeout: float) -> Contacts:
        """How the engine's ranks are reached. Blocks until each has said so.

        Raises:
            ConnectError: They did not in time, or the box was closed.
        """
        wanted = [f"0/{rank}" for rank in ranks]
        keys = [self._prefix + contact for contact in wanted]
        deadline = time.monotonic() + timeout
        try:
            while (store := self._store) is not None:
                if store.check(keys):
                    return {contact: store.get(key) for contact, key in zip(wanted, keys, strict=True)}
                del store  # only the box holds it: closing it must end it
                if time.monotonic() > deadline:
                    raise ConnectError(f"the engine did not come to the group within {timeout:.3g} s")
                self._closed.wait(_POLL_INTERVAL)
        except RuntimeError as error:
            raise ConnectError(f"the group's store failed: {error}") from error
        raise ConnectError("joining was stopped")

    def deliver(self, contacts: Contacts) -> None:
        """Tell the engine how others are reached. Blocks, but not for long.

        Raises:
            ConnectError: The box was closed.
        """
        store = self._store
        if store is None:
            raise ConnectError("joining was stopped")
        try:
            for contact, value in contacts.items():
                store.set(self._prefix + contact, value)  # type: ignore[arg-type]  # bytes it takes
        except RuntimeError as error:
            raise ConnectError(f"the group's store failed: {error}") from error

    def close(self) -> None:
        """Close it. Does not block."""
        self._closed.set()
        held, self._store = [self._store], None
        # Aside: the last to let go of a store waits for its thread.
        threading.Thread(target=held.clear, name="asyncsync-letter-box", daemon=True).start()
