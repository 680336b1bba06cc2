"""An engine's end of the data plane: its places in groups, and one update's buckets at a time.

A session begins in :meth:`Receiver.receive` and ends when what it received was taken into service, or in
:meth:`Receiver.abort`. Joining, receiving, hashing and dropping run on the engine's worker thread, in order.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import anyio
import torch
from torch import Tensor

from asyncsync import cluster
from asyncsync.buckets import Bucket, Plan
from asyncsync.engines.loading import Loader
from asyncsync.engines.record import ANOTHER, WeightRecord, all_names
from asyncsync.errors import ConnectError, EngineError, OutOfStepError, TransferError
from asyncsync.guard import MemorySaverGuard, memory_saver_guard
from asyncsync.messages import Contacts, Rendezvous, UpdateOrder
from asyncsync.sending import wait
from asyncsync.threads import RenewedThread
from asyncsync.transports.base import QUIET_TIMEOUT, LentArena, Link
from asyncsync.transports.envelopes import Content, Inbox
from asyncsync.transports.memory_files import shared_nbytes
from asyncsync.transports.seat import Seat
from asyncsync.transports.stored import FetchingLink
from asyncsync.transports.stores import fetching_links
from asyncsync.weight_files import FileLayouts


@dataclass(slots=True)
class Session:
    """One update, from its first bucket until it is in service or dropped.

    Attributes:
        order: The update's.
        plan: How its buckets are cut.
        loader: Where they go.
        links: The groups they come through: one of each source, or one for all.
        scope: Ends the receiving.
        arrived: How many are there.
        received: Whether all of them are.
        digest: Of all that was received.
        stop: Ends the wait for a bucket.
        ended: Set once nothing is received any more.
    """

    order: UpdateOrder
    plan: Plan
    loader: Loader
    links: Sequence[Link]
    scope: anyio.CancelScope
    arrived: int = 0
    received: bool = False
    digest: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, bucket: Bucket, buffer: Tensor) -> None:
        """Take one that has arrived."""
        self.loader.take(bucket, buffer)
        self.arrived += 1

    def take_changes(self, bucket: Bucket, message: Tensor | None) -> None:
        """Take what differs in one from the update in service."""
        self.loader.take_changes(bucket, message)
        self.arrived += 1


class Receiver:
    """Joins groups, and receives.

    Args:
        record: What the engine knows of its weights.
        worker: The engine's worker thread.
        address: Gives this node's own address, by which others reach it.
        device: Gives the CUDA device on which it receives; None if that is none, or to be found out.

    Attributes:
        seats: Its places in groups, by source.
        session: The update that is being received, or waits to be taken into service.
    """

    def __init__(
        self,
        record: WeightRecord,
        worker: RenewedThread,
        address: Callable[[], str] = cluster.node_address,
        device: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._record = record
        record.received = 0, 0, 0
        self._worker = worker
        self._address = address
        self._device = device
        self._layouts = FileLayouts()
        self.seats: dict[int, Seat] = {}
        self.session: Session | None = None

    def __repr__(self) -> str:
        return f"<Receiver in {len(self.connections)} groups{', receiving' if self.session else ''}>"

    @property
    def connections(self) -> tuple[str, ...]:
        """The groups it has joined."""
        return tuple(seat.connection for seat in self.seats.values() if seat.connection)

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        seat = self.seats.setdefault(rendezvous.source, Seat(self._guard))
        return await seat.open(rendezvous, address=self._address())

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        for seat in self.seats.values():
            if seat.expects(connection):
                return await seat.join(connection, contacts)
        raise ConnectError(f"the group to join was closed meanwhile {ANOTHER}")

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        for seat in list(self.seats.values()):
            await seat.leave(connection)

    def _guard(self) -> MemorySaverGuard:
        # What an engine allocates to receive must not go when it releases its memory.
        return memory_saver_guard(thread=self._worker.current, device=self._device())

    def links(self, order: UpdateOrder, plan: Plan) -> Sequence[Link]:
        """The groups that an order names; or ways to where it says that all was stored.

        Raises:
            OutOfStepError: This engine is not in all of them.
        """
        if order.stored:
            return fetching_links(order, plan, self._layouts)
        held = {seat.connection: seat.link for seat in self.seats.values()}
        links = [link for connection in order.connections if (link := held.get(connection)) is not None]
        if not links or len(links) != len(order.connections):
            raise OutOfStepError(f"this engine is not in the groups that the order names {ANOTHER}")
        return list(links)

    def check(self, order: UpdateOrder, plan: Plan | None) -> Plan:
        """Refuse an order that cannot be followed here (any more); gives the layout that was agreed on.

        Raises:
            OutOfStepError: Its groups, layout or epoch are not this engine's.
        """
        self._record.check_new(order)
        if plan is None or plan.digest != order.plan_digest:
            raise OutOfStepError(f"the layout of this update was not agreed on with this engine {ANOTHER}")
        self.links(order, plan)
        return plan

    def close(self, links: Sequence[Link]) -> None:
        """Leave groups whose operations may still run."""
        for link in links:
            if isinstance(link, FetchingLink):
                link.close()
        for seat in self.seats.values():
            if seat.link in links:
                seat.close()

    async def receive(self, order: UpdateOrder, plan: Plan | None, loader: Callable[[str], Loader]) -> str:
        """Take every bucket of an update.

        Args:
            order: The update's.
            plan: The layout that was agreed on.
            loader: Gives where the buckets go, by the type of device on which they arrive.

        Returns:
            The digest of all that was received.

        Raises:
            OutOfStepError: The order's groups, layout or epoch are not this engine's (any more). Nothing changed.
            EngineError: Another update is still being received.
            TransferError: Something did not arrive, or it was aborted.
        """
        self._record.check_new(order)
        while (last := self.session) is not None:
            if not last.ended.is_set():
                raise EngineError(f"the update of epoch {last.order.epoch} is still being received")
            await self._worker.run(self._drop, last)  # nobody came to finish it
        plan = self.check(order, plan)
        links = self.links(order, plan)
        order = replace(order, stored=())  # the links have what they need of it, and let go of it
        self._record.see(order.epoch)
        scope = anyio.CancelScope(deadline=anyio.current_time() + order.timeout)
        session = self.session = Session(order, plan, loader(links[0].device), links, scope)
        try:
            with scope:
                async with self._guard():
                    try:
                        session.digest = await self._worker.run(receive_buckets, session)
                    finally:
                        session.stop.set()  # the guard is left when this is over
                session.received = True
                return session.digest
        finally:
            session.ended.set()
            self._record.received = order.epoch, session.arrived, len(plan.buckets)
            if not session.received:
                self.close(links)  # operations may still run in them
                self._worker.submit(self._drop, session)
        what = "was aborted" if scope.deadline > anyio.current_time() else "took too long"
        raise TransferError(f"receiving the weights of update {order.version} {what}")

    def received(self, epoch: int) -> Session:
        """The update that was received in an epoch, and is to be taken into service.

        Raises:
            EngineError: There is none.
        """
        session = self.session
        if session is None or session.order.epoch != epoch or not session.received:
            raise EngineError(f"there is no received update of epoch {epoch} to finish")
        return session

    @contextmanager
    def taking(self, session: Session) -> Iterator[None]:
        """Take what was received into service; the session ends with that, so that who aborts it meanwhile waits.

        Raises:
            EngineError: It has ended already.
        """
        if self.session is not session:
            raise EngineError(f"the update of epoch {session.order.epoch} was overtaken by another")
        try:
            yield
        finally:
            self.session = None

    async def abort(self) -> None:
        """End the session, if there is one, and drop what it received.

        A commit that runs already runs to its end; then the session is gone, and there is nothing to drop.
        """
        session = self.session
        if session is not None:
            session.scope.cancel()
            await session.ended.wait()
            await self._worker.run(self._drop, session)

    def _drop(self, session: Session) -> None:
        if self.session is not session:
            return
        session.loader.drop()
        if not (session.received or all(link.is_quiet(QUIET_TIMEOUT) for link in session.links)):
            session.loader.discard()
        if session.loader.touched:
            self._record.taint(f"update {session.order.version} was not received whole", all_names(session.plan))
        self.session = None  # last of all: who aborts it meanwhile is to find the engine as it will be


def receive_buckets(session: Session) -> str:
    """Take and hash every bucket, while others are on their way. Blocks.

    Args:
        session: What is received, and where it goes; its ``stop`` ends it, from another thread.

    Returns:
        The digest of all.

    Raises:
        OutOfStepError: There are not as many groups as sources. Nothing was received.
        TransferError: A bucket did not arrive, or it was stopped.
    """
    plan, loader, links = session.plan, session.loader, session.links
    sources = max(1, len(plan.parts))
    if len(links) not in (1, sources):
        raise OutOfStepError(f"the order names {len(links)} groups, and there are {sources} sources")
    loader.begin(delta=session.order.against is not None)
    parts = plan.parts if len(links) > 1 else (plan,)
    starts = list(itertools.accumulate((part.arena_nbytes for part in parts), initial=0))
    lent = [
        link.arena(session.order.epoch, shared_nbytes(part), session.stop)
        for link, part in zip(links, parts, strict=True)
    ]
    if session.order.against is not None:
        read = [one for one in lent if one is not None]
        inboxes = [
            Inbox(link, len(part.buckets), one, part.arena_nbytes, session.stop)
            for link, part, one in zip(links, parts, lent, strict=True)
        ]
        for bucket in plan.buckets:
            source = bucket.source if len(links) > 1 else 0
            take_envelope(session, bucket, inboxes[source], bucket.start - starts[source], lent[source] is not None)
        return _all_taken(session, read)
    # What is not adopted is let go of as soon as all was copied in; if that fails, by the end of the link.
    read = [one for one in lent if one is not None and not (one.stays and loader.adopt(one))]
    _take_buckets(session, lent, starts)
    return _all_taken(session, read)


def _take_buckets(session: Session, lent: Sequence[LentArena | None], starts: Sequence[int]) -> None:
    """Take whole buckets, while others are on their way. Nothing here is a view of what was lent once it is over."""
    plan, loader, links = session.plan, session.loader, session.links
    on_the_way: deque[tuple[Bucket, Tensor, object]] = deque()

    def link_of(bucket: Bucket) -> Link:
        return links[bucket.source] if len(links) > 1 else links[0]

    def take_oldest() -> None:
        bucket, buffer, handle = on_the_way.popleft()
        wait(link_of(bucket), handle, bucket, session.stop)
        session.take(bucket, buffer)

    def place_of(bucket: Bucket) -> Tensor:
        source = bucket.source if len(links) > 1 else 0
        one, start = lent[source], starts[source]
        return loader.target(bucket) if one is None else one.memory[bucket.start - start : bucket.stop - start]

    for bucket in plan.buckets:
        if len(on_the_way) == loader.in_flight:
            take_oldest()
        buffer = place_of(bucket)
        on_the_way.append((bucket, buffer, link_of(bucket).start_receive(buffer)))
    while on_the_way:
        take_oldest()


def take_envelope(session: Session, bucket: Bucket, inbox: Inbox, start: int, lent: bool) -> None:
    """Take the next bucket of an update of which what differs is sent. Blocks.

    Args:
        session: What is received, and where it goes.
        bucket: The bucket.
        inbox: Where it comes from.
        start: Where it lies in the source's arena.
        lent: Whether it comes to lie in memory of the source's.
    """

    def buffer_for(content: Content, nbytes: int) -> Tensor:
        whole = content is Content.WHOLE
        return session.loader.target(bucket) if whole else torch.empty(nbytes, dtype=torch.uint8)

    try:
        content, body = inbox.receive(bucket.nbytes, start, buffer_for)
        if content is Content.WHOLE:
            assert body is not None
            session.take(bucket, body)
        else:
            session.take_changes(bucket, body.clone() if lent and body is not None else body)
    except TransferError as error:
        error.bucket = bucket.index
        raise


def _all_taken(session: Session, read: Sequence[LentArena]) -> str:
    for one in read:
        one.let_go()
    for link in session.links:
        link.finish()
    return session.loader.digest()
