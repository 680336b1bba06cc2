"""Ray's object store: a source puts one flat array of bytes a bucket there, and engines copy it out of the store.

An envelope (of a bucket of which only what differs is sent) is not worth an object, and comes with the references. An
object stays as long as somebody holds a reference. The source hands its own to whoever conducts the update, who empties
the list when the update needs them no more; an engine holds those of the buckets that it has not taken yet. What comes
out of the store is read only, and only ever used as the bytes that it is.
"""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import numpy as np
from torch import Tensor

from asyncsync import cluster
from asyncsync.buckets import Plan
from asyncsync.errors import LinkLostError, TransferError
from asyncsync.messages import Stored
from asyncsync.report import format_bytes
from asyncsync.transports.envelopes import ENVELOPE
from asyncsync.transports.stored import SLICE, FetchingLink, StoringLink


class ObjectsSourceLink(StoringLink):
    """A source's end of Ray's object store."""

    def __init__(self, connection: str) -> None:
        super().__init__(connection)
        self._nbytes = 0
        self._objects: list[Any] = []

    def _begin(self, plan: Plan) -> None:
        self._nbytes = plan.arena_nbytes

    def _store(self, flat: Tensor) -> None:
        if flat.numel() <= ENVELOPE:
            self._objects.append(flat.numpy().tobytes())
            return
        try:
            stored = cluster.put_object(flat.numpy())
        except cluster.NoRoomError as error:
            raise TransferError(
                f"Ray's object store has no room for the weights, {format_bytes(self._nbytes)}: {error}"
            ) from error
        self._objects.append(stored)

    def _complete(self) -> None:
        pass

    def _give_up(self) -> None:
        self.release()

    def place(self) -> Stored:
        """References to all buckets; this end keeps none."""
        stored, self._objects = Stored(objects=self._objects), []
        return stored

    def release(self) -> None:
        """Let go of what was put for an update that has failed."""
        self._objects = []


class ObjectsEngineLink(FetchingLink):
    """An engine's way to a source's objects.

    Args:
        connection: The store's.
        plan: The source's plan.
        stored: References to all buckets.
        whole: Whether each of them is a whole bucket; else what differs comes, each in an envelope.
    """

    def __init__(self, connection: str, plan: Plan, stored: Stored, *, whole: bool = True) -> None:
        super().__init__(connection, plan)
        self._objects: list[Any] = list(stored.objects)
        self._whole = whole

    def _open(self) -> None:
        if self._whole and len(self._objects) != len(self.plan.buckets):
            raise TransferError(
                f"the source has put {len(self._objects)} objects, for {len(self.plan.buckets)} buckets of weights"
            )

    def start_receive(self, flat: Tensor) -> tuple[Future[Any] | bytes, Tensor]:
        """Start to fetch the next bucket."""
        number = self._next()
        if number >= len(self._objects):
            raise TransferError(f"the source has put only {len(self._objects)} objects")
        found, self._objects[number] = self._objects[number], None  # it is held by what is under way, and not longer
        return found if isinstance(found, bytes) else cluster.fetch_object(found), flat

    def wait(self, handle: tuple[Future[Any] | bytes, Tensor], stop: threading.Event) -> None:
        """Wait for a bucket, and copy it in. Blocks.

        Raises:
            LinkLostError: It is gone, with its source most likely; or it was stopped.
            TransferError: It is something else than was promised.
        """
        fetched, flat = handle
        if isinstance(fetched, bytes):
            if len(fetched) != flat.numel():
                raise TransferError(f"the source has put {len(fetched)} bytes, and not {flat.numel()}")
            flat.numpy()[:] = np.frombuffer(fetched, dtype=np.uint8)
            return
        while True:
            self.check(stop)
            if fetched.done() or futures.wait([fetched], SLICE).done:
                break
        try:
            array = fetched.result()
        except cluster.ObjectGoneError as error:
            raise LinkLostError(f"an object with weights is gone: {type(error).__name__}: {error}") from error
        if type(array) is not np.ndarray or array.dtype != np.uint8 or array.shape != (flat.numel(),):
            what = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TransferError(f"an object is none of the weights: {what}, not {flat.numel()} bytes")
        np.copyto(flat.numpy(), array)

    def close(self) -> None:
        """Let go of all objects."""
        self.closed = True
        self._objects.clear()
