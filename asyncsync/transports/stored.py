"""What the ends of a store have in common: a source brings all its buckets there, and then engines fetch them.

There is no group. The source's end is taken up and given up as one's place in a group is, so that it is known, kept and
left as those are; an engine's is made for one update, from what the source said of it. Whatever may block in bringing
something there (a full store, a slow disk) runs on a thread of the store's own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from asyncsync.buckets import Plan
from asyncsync.errors import ClosedError, LinkLostError, TransferError
from asyncsync.messages import Stored, UpdateOrder
from asyncsync.threads import WorkerThread

SLICE = 0.02
"""Seconds of a wait; in between it is looked whether it is still wanted."""


class StoringLink(ABC):
    """A source's end of a store. Satisfies :class:`~asyncsync.transports.base.Link`.

    Attributes:
        connection: Its name.
        device: Where the bytes are stored from: ``"cpu"``.
        order: What is stored next.
    """

    device = "cpu"

    def __init__(self, connection: str) -> None:
        self.connection = connection
        self.order: UpdateOrder | None = None
        self.closed = False
        self._thread = WorkerThread("asyncsync-store")
        self._last: Future[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.connection[:8]}{': closed' if self.closed else ''}>"

    def stores(self, epoch: int) -> bool:
        """Whether this update's weights were the last that were to be stored."""
        return self.order is not None and self.order.epoch == epoch

    def begin(self, plan: Plan, stop: threading.Event) -> None:
        """Get ready for an update's buckets; what is left of the last one is given up. Blocks.

        Args:
            plan: The source's plan.
            stop: Ends it, from another thread.

        Raises:
            TransferError: There is no room for it, or it was stopped.
            PlanError: There is something that cannot be stored there.
        """
        self.release()
        self.wait(self.submit(lambda: self._begin(plan)), stop)  # behind what is still being published, say

    @abstractmethod
    def _begin(self, plan: Plan) -> None:
        """See :meth:`begin`; on the store's thread."""

    @abstractmethod
    def _store(self, flat: Tensor) -> None:
        """Store the next bucket; on the store's thread."""

    @abstractmethod
    def _complete(self) -> None:
        """See that all is there for whoever comes to fetch it; on the store's thread."""

    @abstractmethod
    def _give_up(self) -> None:
        """Take away what nobody is to fetch; on the store's thread."""

    @abstractmethod
    def place(self) -> Stored:
        """Where all is that was stored, for those who fetch it."""

    @abstractmethod
    def release(self) -> None:
        """Keep nothing any more that an update which is over has needed. Does not block."""

    def start_send(self, flat: Tensor) -> Future[None]:
        """Start to store a bucket."""
        return self.submit(lambda: self._store(flat))

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Start something on the store's thread, behind what was started before.

        Raises:
            TransferError: The link was closed.
        """

        def run() -> None:
            if self.closed:
                raise TransferError("the link was closed")
            job()

        try:
            self._last = self._thread.submit(run)
        except ClosedError as error:
            raise TransferError("the link was closed") from error
        return self._last

    def start_receive(self, flat: Tensor) -> object:
        """Not at this end."""
        raise TransferError("engines send nothing through a store")

    def wait(self, handle: Future[None], stop: threading.Event) -> None:
        """Wait until a bucket is stored. Blocks.

        Raises:
            TransferError: It could not be, or it was stopped.
        """
        while not handle.done():
            futures.wait([handle], SLICE)
            if self.closed or stop.is_set():
                raise LinkLostError("storing the weights was stopped")
        handle.result()

    def complete(self, stop: threading.Event) -> None:
        """See that all is there for whoever comes to fetch it. Blocks.

        Raises:
            TransferError: It is not, or it was stopped.
        """
        self.wait(self.submit(self._complete), stop)

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> None:  # noqa: B027 - it is not abstract
        """Not at this end."""

    def finish(self) -> None:  # noqa: B027 - it is not abstract
        """Nothing: :meth:`complete` has seen to it."""

    def close(self) -> None:
        """Give it up, and take away what nobody is to fetch. Does not block."""
        if not self.closed:
            self.closed = True
            self.release()
            self._thread.submit(self._give_up)
            self._thread.close()

    def is_quiet(self, timeout: float) -> bool:
        """Whether no bucket is being stored any more. Blocks."""
        return self._last is None or bool(futures.wait([self._last], timeout).done)


class FetchingLink(ABC):
    """An engine's way to what a source has stored for one update. Satisfies :class:`~asyncsync.transports.base.Link`.

    Args:
        connection: The store's.
        plan: The source's plan.

    Attributes:
        connection: The store's.
        device: Where the bytes arrive: ``"cpu"``.
    """

    device = "cpu"

    def __init__(self, connection: str, plan: Plan) -> None:
        self.connection = connection
        self.plan = plan
        self.closed = False
        self._started = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.connection[:8]}{': closed' if self.closed else ''}>"

    def _next(self) -> int:
        """The number of the bucket that is started now."""
        if self.closed:
            raise TransferError("the link was closed")
        self._started += 1
        return self._started - 1

    def check(self, stop: threading.Event) -> None:
        """Raise an error if it is not wanted any more.

        Raises:
            LinkLostError: It is not.
        """
        if self.closed or stop.is_set():
            raise LinkLostError("fetching the weights was stopped")

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> None:
        """None: buckets are fetched into buffers. What was promised is looked at here, before the first.

        Raises:
            TransferError: It is not there, or something else is.
        """
        self._open()

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def start_receive(self, flat: Tensor) -> object:
        """Start to fetch the next bucket."""

    @abstractmethod
    def wait(self, handle: Any, stop: threading.Event) -> None:
        """See :meth:`asyncsync.transports.base.Link.wait`."""

    def start_send(self, flat: Tensor) -> object:
        """Not at this end."""
        raise TransferError("engines send nothing through a store")

    def finish(self) -> None:
        """All was taken."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Keep nothing of it."""

    def is_quiet(self, timeout: float) -> bool:
        """Nothing but the engine's own thread writes to its buffers."""
        return True
