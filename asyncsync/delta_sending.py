"""Sending what differs from an update that engines hold: compared, and sent, bucket by bucket.

Each bucket is compared with the :class:`~asyncsync.baseline.Baseline` where its tensors lie, and written over it. So
the baseline has the new bytes then, laid out as the plan lays them out: they are hashed there, and sent from there to
those who get whole buckets. While what was found in one bucket is on its way, the next is compared.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncsync.baseline import Baseline
from asyncsync.buckets import Bucket, Plan
from asyncsync.checksums import Witness
from asyncsync.deltas import Changes, Grain, Renewal
from asyncsync.digests import Digests, StreamingDigests
from asyncsync.errors import TransferError
from asyncsync.sending import IN_FLIGHT, Filler, OwnTensors, hash_sent, kept, wait
from asyncsync.threads import WorkerThread
from asyncsync.transports.base import Link
from asyncsync.transports.envelopes import Content, Outbox


@dataclass(frozen=True, slots=True)
class Route:
    """A link of an update.

    Attributes:
        link: The link.
        delta: Whether what differs goes over it, each bucket in an envelope; else buckets go whole.
        memory: In memory that is shared: that, in which each bucket has its place, and behind them its envelope.
        beside: In a folder, where buckets go whole by a route of their own: stores a part of what differs beside them.
    """

    link: Link
    delta: bool
    memory: Tensor | None = None
    beside: Callable[[Tensor], Any] | None = None

    def outbox(self, plan: Plan) -> Outbox | None:
        """What puts an update's buckets in envelopes; None if they go whole."""
        if not self.delta:
            return None
        if self.beside is not None:
            return Outbox(self.beside, whole=False)
        return Outbox(self.link.start_send, None if self.memory is None else self.memory[plan.arena_nbytes :])


@dataclass(frozen=True, slots=True)
class SentChanges:
    """What was sent.

    Attributes:
        digests: Of all tensors.
        differing: How many elements differ; None if they were not compared.
        nbytes: Bytes that each link brings to those who know the old ones, padding and envelopes not counted, by the
            connection.
    """

    digests: Digests
    differing: int | None
    nbytes: dict[str, int]


class DeltaSender:
    """Sends updates, one at a time, and keeps its buffers from one to the next.

    Args:
        hasher: The thread that hashes.
    """

    def __init__(self, hasher: WorkerThread) -> None:
        self._hasher = hasher
        self._buffers: list[Tensor] = []

    def send(
        self,
        plan: Plan,
        filler: Filler,
        base: Baseline,
        routes: Sequence[Route],
        stop: threading.Event,
        witness: Witness | None = None,
    ) -> SentChanges:
        """Compare, send and hash every bucket: one while others are on their way. Blocks.

        Args:
            plan: The plan.
            filler: Where the bytes come from.
            base: What they are compared with, if it says so, and written to; it has begun with this update.
            routes: Where they go: every bucket over each of them.
            stop: Ends it, from another thread.
            witness: Takes every bucket as well, on the hashing thread.

        Raises:
            TransferError: A bucket did not arrive, or it was stopped.
        """
        digests = StreamingDigests(len(plan.specs))
        outboxes = [route.outbox(plan) for route in routes]
        on_the_way: deque[_Sent] = deque()
        differing = 0
        nbytes = {route.link.connection: 0 for route in routes if route.delta}

        def wait_for_oldest() -> None:
            sent = on_the_way.popleft()
            for link, handle in sent.handles:
                wait(link, handle, sent.bucket, stop)
            sent.hashed.result()

        for bucket, following in itertools.zip_longest(plan.buckets, plan.buckets[1:]):
            if bucket.index == 0:
                filler.expect(bucket)
            if len(on_the_way) == IN_FLIGHT:
                wait_for_oldest()
            if stop.is_set():
                raise TransferError("sending was stopped")
            place = base.place(bucket)
            changes: Changes | None = None
            if base.compares:
                count, changes = self._compare(plan, filler, base, bucket, stop)
                differing += count
            elif (lying := filler.lying(bucket, "cpu")) is not None:
                place.copy_(lying)
            else:
                filler.fill(bucket, place, stop)
            content, body = _content(changes, place)
            handles: list[tuple[Link, Any]] = []
            for route, outbox in zip(routes, outboxes, strict=True):
                sent = body if route.delta else place
                if route.delta:
                    padding = base.grain(bucket).padding if sent is place else 0
                    nbytes[route.link.connection] += sent.numel() - padding
                if route.memory is not None:
                    lies = route.memory[bucket.start : bucket.start + sent.numel()]
                    sent = lies.copy_(sent)
                if outbox is None:
                    handles.append((route.link, route.link.start_send(sent)))
                else:
                    handles += [(route.link, each) for each in outbox.start_send(bucket.index, content, sent)]
            hashed = self._hasher.submit(hash_sent, plan, bucket, place, digests, witness)
            on_the_way.append(_Sent(bucket, handles, hashed))
            if following is not None:
                filler.expect(following)
        while on_the_way:
            wait_for_oldest()
        return SentChanges(digests.result(), differing if base.compares else None, nbytes)

    def _compare(
        self, plan: Plan, filler: Filler, base: Baseline, bucket: Bucket, stop: threading.Event
    ) -> tuple[int, Changes | None]:
        """How many elements of a bucket differ, and which; None if it is to be sent whole."""
        renewal = Renewal(base.grain(bucket), base.place(bucket))
        try:
            for start, part in self._parts(plan, filler, base.grain(bucket), bucket, stop):
                renewal.take(start, part)
        finally:
            changes = renewal.changes()  # if it was stopped: of what was taken
            base.note(bucket, changes)
        return renewal.count, changes

    def _parts(
        self, plan: Plan, filler: Filler, grain: Grain, bucket: Bucket, stop: threading.Event
    ) -> Iterator[tuple[int, Tensor]]:
        if isinstance(filler, OwnTensors):
            yield from filler.parts(bucket, lambda nbytes: kept(self._buffers, 0, nbytes, "cpu")[:nbytes])
            return
        flat = filler.lying(bucket, "cpu")
        if flat is None:
            flat = kept(self._buffers, 0, plan.largest_bucket, "cpu")[: bucket.nbytes]
            if grain.padding:
                flat.zero_()
            filler.fill(bucket, flat, stop)
        yield 0, flat


def _content(changes: Changes | None, place: Tensor) -> tuple[Content, Tensor]:
    """What is sent of a bucket to those who know the old one."""
    if changes is None:
        return Content.WHOLE, place
    if not changes.count:
        return Content.NOTHING, place[:0]
    return Content.DELTA, changes.write(torch.empty(changes.nbytes, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class _Sent:
    bucket: Bucket
    handles: list[tuple[Link, Any]]
    hashed: Future[None]
