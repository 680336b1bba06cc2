"""How the members of a group find each other: over the control plane, with no server and no port to guess.

A process group finds its members in a *store*, in which each puts what the others need to reach it. torch's stores are
servers that every member connects to. Here a member's store is an object in its own process, and the conductor carries
what is in it: each member begins to join and says how it is reached, and once all have, each is told how the others
are. So nobody waits inside a group for one who never comes, a join can be given up at any moment, no stranger finds a
store to talk to, and no connection hangs on a name server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from asyncsync.errors import ConnectError
from asyncsync.messages import Contacts


class MeetingStore(Store):
    """A member's store. One thread makes the group with it, and waits here; any other may introduce or stop.

    Args:
        timeout: Seconds to wait for the others, from now.

    Attributes:
        contacts: Done once this member has said how it is reached, or waits for others with nothing to say.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.contacts: Future[Contacts] = Future()
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._entries: Contacts = {}
        self._stopped = False
        self._changed = threading.Condition()

    def introduce(self, contacts: Mapping[str, bytes]) -> None:
        """Tell this member how others are reached."""
        with self._changed:
            self._entries.update(contacts)
            self._changed.notify_all()

    def stop(self) -> None:
        """Have this member give up waiting, now or whenever it next would."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # -- what a process group calls, under torch's names -------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes it is, from C++
        """Say how this member is reached."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()
        self._say({key: value})

    def get(self, key: str) -> bytes:
        """How another member is reached; waits until that is known."""
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until others are known.

        Raises:
            ConnectError: They did not come in time, or joining was stopped.
        """

        # The group's own timeout says nothing here: the deadline is that of the meeting.
        def ended() -> bool:
            return self._stopped or all(key in self._entries for key in keys)

        with self._changed:
            if not ended():
                self._say({})
                self._changed.wait_for(ended, max(0.0, self._deadline - time.monotonic()))
            if self._stopped:
                raise ConnectError("joining was stopped")
            if not ended():
                raise ConnectError(f"the other members did not come within {self._timeout:.3g} s")

    def check(self, keys: list[str]) -> bool:
        """Whether others are known."""
        with self._changed:
            return all(key in self._entries for key in keys)

    def _say(self, contacts: Contacts) -> None:
        if not self.contacts.done():
            self.contacts.set_result(contacts)
