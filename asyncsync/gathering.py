"""Filling buckets from tensors that lie in pieces on several trainer ranks: the source's part, and the others'.

Two ways. Where every rank can say which block of a tensor it holds, it brings its parts of each bucket to the source
through the library's own groups (:class:`ShardGathering`, :func:`bring_shards`). Where only the trainer knows how its
tensors are put together, all its ranks call its own gathering, in the plan's order (:class:`CallGathering`,
:func:`take_part`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.digests import StreamingDigests
from asyncsync.errors import TransferError
from asyncsync.packing import in_place, pack
from asyncsync.sending import kept, wait
from asyncsync.shards import Holding, ShardPlan
from asyncsync.transports.base import Link

BUFFERS = 2
"""Messages that a rank which brings shards has under way, at the most."""


class ShardGathering:
    """Fills buckets at the source, from its own blocks and from what the other ranks bring.

    The messages for the next bucket arrive while the last bucket is sent: one buffer for each of the two.

    Args:
        shards: Who brings what.
        holding: What the source holds.
        tensors: The blocks it holds, of every tensor of the plan.
        links: To the ranks that bring something, by rank.
        messages: Where the buffer is kept from update to update.
    """

    buffers = 1

    def __init__(
        self,
        shards: ShardPlan,
        holding: Holding,
        tensors: Sequence[Tensor],
        links: Mapping[int, Link],
        messages: list[Tensor],
    ) -> None:
        self._shards = shards
        self._holding = holding
        self._tensors = tensors
        self._links = links
        self._kept = messages
        self._messages: dict[int, Tensor] = {}
        self._handles: dict[int, object] = {}

    def hash_into(self, digests: StreamingDigests) -> bool:
        """See :class:`~asyncsync.sending.Filler`."""
        return False

    def lying(self, bucket: Bucket, device: str) -> Tensor | None:
        whole = self._shards.is_whole(bucket)
        return in_place(self._shards.plan, bucket, self._tensors, device) if whole else None

    def expect(self, bucket: Bucket) -> None:
        self._messages, self._handles, start = {}, {}, 0
        for rank, link in self._links.items():
            if nbytes := self._shards.nbytes(bucket, rank):
                message = kept(self._kept, 0, self._shards.largest_gather, link.device)[start : start + nbytes]
                self._messages[rank], self._handles[rank] = message, link.start_receive(message)
                start += nbytes

    def fill(self, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
        for rank, handle in self._handles.items():
            wait(self._links[rank], handle, bucket, stop)
        self._shards.assemble(bucket, self._holding, self._tensors, self._messages, buffer)


def bring_shards(
    shards: ShardPlan,
    rank: int,
    holding: Holding,
    tensors: Sequence[Tensor],
    link: Link,
    messages: list[Tensor],
    stop: threading.Event,
) -> None:
    """Bring a rank's parts of every bucket to the source: one while the last is on its way. Blocks.

    Args:
        shards: Who brings what.
        rank: Which rank this is.
        holding: What it holds.
        tensors: The blocks it holds, of every tensor of the plan.
        link: To the source.
        messages: Where the buffers are kept from update to update.
        stop: Ends it, from another thread.

    Raises:
        TransferError: A message did not arrive, or it was stopped.
    """
    on_the_way: deque[tuple[Bucket, object]] = deque()
    sent = 0
    for bucket in shards.plan.buckets:
        if nbytes := shards.nbytes(bucket, rank):
            if len(on_the_way) == BUFFERS:
                oldest, handle = on_the_way.popleft()
                wait(link, handle, oldest, stop)
            message = kept(messages, sent % BUFFERS, shards.largest_message(rank), link.device)[:nbytes]
            shards.pack_parts(bucket, rank, holding, tensors, message)
            on_the_way.append((bucket, link.start_send(message)))
            sent += 1
    for oldest, handle in on_the_way:
        wait(link, handle, oldest, stop)


class CallGathering:
    """Fills buckets at the source, from whole tensors that the trainer's own gathering gives, one at a time.

    However an update ends, every rank calls the gathering for every tensor (:meth:`finish`, :func:`take_part`): a
    collective that one rank leaves out would hold the others, and spoil the trainer's group for good.

    Args:
        plan: The plan.
        gather: Collective. Gives a tensor of the plan whole, by its index.
    """

    buffers = 1

    def __init__(self, plan: Plan, gather: Callable[[int], Tensor | None]) -> None:
        self._plan = plan
        self._gather = gather
        self._ahead = deque(_in_order(plan))
        self._failed = False
        self._split: tuple[int, Tensor] | None = None

    def hash_into(self, digests: StreamingDigests) -> bool:
        """See :class:`~asyncsync.sending.Filler`."""
        return False

    def lying(self, bucket: Bucket, device: str) -> Tensor | None:
        return None

    def expect(self, bucket: Bucket) -> None:
        pass

    def fill(self, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
        if stop.is_set():
            raise TransferError("gathering was stopped")
        nothing = replace(bucket, whole=(), spans=(), pieces=())
        for index, span in zip(bucket.whole, bucket.spans, strict=True):
            pack(self._plan, replace(nothing, whole=(index,), spans=(span,)), {index: self._whole(index)}, buffer)
        for piece in bucket.pieces:
            if self._split is None or self._split[0] != piece.tensor:
                self._split = None  # before the next one is there
                self._split = piece.tensor, self._whole(piece.tensor)
            pack(self._plan, replace(nothing, pieces=(piece,)), {piece.tensor: self._split[1]}, buffer)

    def finish(self) -> None:
        """Collective. Call the gathering for all that is left, unless it has failed itself."""
        self._split = None
        while self._ahead and not self._failed:
            with suppress(Exception):  # the error that ended the update is the one that counts
                self._next()

    def _whole(self, index: int) -> Tensor:
        assert index == self._ahead[0]
        if (tensor := self._next()) is None:
            raise TransferError(f"gathering {self._plan.specs[index]} gave the source nothing")
        return tensor.detach()

    def _next(self) -> Tensor | None:
        self._failed = True  # until it has not
        tensor = self._gather(self._ahead.popleft())
        self._failed = False
        return tensor


def take_part(plan: Plan, gather: Callable[[int], Tensor | None]) -> None:
    """Collective. Call the trainer's gathering in the same order as the source does, and keep nothing.

    It cannot be stopped: the source does not stop either.
    """
    for index in _in_order(plan):
        gather(index)


def _in_order(plan: Plan) -> Iterator[int]:
    """Tensors in the order in which the source first needs them."""
    last = None
    for bucket in plan.buckets:
        for index in (*bucket.whole, *(piece.tensor for piece in bucket.pieces)):
            if index != last:
                yield index
            last = index
