"""What a :class:`asyncsync.ModuleEngine` does in an update: it receives, holds back generation, and switches.

Threads: control calls run on a loop (in an actor, that of the ``asyncsync`` group); joining, hashing, loading and the
commit run on one worker thread, in order; generation runs wherever the actor's own methods run, and meets the weights
only at the gate.

Sessions: an update's session begins in ``receive_weights`` and ends in ``finish_weight_update`` or
``abort_weight_update``. Its epoch then counts as ended, so a call that arrives late finds nothing to do harm to.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
from torch import Tensor, nn

from asyncsync import cluster
from asyncsync.buckets import Bucket, list_names
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.binding import Binding, bind, local_tensors, module_shards
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.loading import InPlaceLoader, Loader, StagedLoader
from asyncsync.errors import ConnectError, EngineError, OutOfStepError, PlanError, TaintedEngineError, TransferError
from asyncsync.guard import MemorySaverGuard, memory_saver_guard
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.packing import digest_weights
from asyncsync.sending import OwnTensors, Sender, wait
from asyncsync.shield import shielded
from asyncsync.threads import WorkerThread
from asyncsync.transports.base import Link
from asyncsync.transports.seat import Seat

ANOTHER = "(does another synchronizer update it, that does not share this one's lock?)"


@dataclass(slots=True)
class _Session:
    order: UpdateOrder
    loader: Loader
    scope: anyio.CancelScope
    received: bool = False
    digest: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ServedModule:
    """Satisfies :class:`asyncsync.GivingEngine` for a module of this process.

    Args:
        module: Gives the module that is served now.
        staged: Whether new weights are held beside the old.
        flush: Drops what was computed from older weights.
    """

    def __init__(self, module: Callable[[], nn.Module], *, staged: bool, flush: Callable[[], Awaitable[None]]) -> None:
        self._module = module
        self._flush = flush
        self._staged = staged
        self._instance = uuid.uuid4().hex
        self._gate = GenerationGate()
        self._worker = WorkerThread("asyncsync-receiver")
        self._installed: dict[int, Tensor] = {}
        self._version: int | None = None
        self._epoch = 0
        self._ended_epoch = 0
        self._tainted: str | None = None
        self._torn: set[str] = set()  # tensors that are not of the same version as the others
        self._holds: dict[str, tuple[set[str], str]] = {}  # by layout: its names, and the digest of what it brought
        self._stale_cache = False
        self._paused_for: int | None = None  # the epoch of the update it is paused for
        self._binding: Binding | None = None
        self._loader: Loader | None = None
        self._seats: dict[int, Seat] = {}  # by source
        self._sender = Sender(WorkerThread("asyncsync-hasher"))  # started only by an engine that gives
        self._session: _Session | None = None
        self._givings: dict[int, threading.Event] = {}
        if cluster.was_restarted():
            self._taint("its process was restarted, and holds weights of no version", torn=False)

    @property
    def weight_version(self) -> int | None:
        """The version it serves; None before the first update, and while it holds part of one."""
        return None if self._tainted else self._version

    @property
    def gate(self) -> GenerationGate:
        """Where generations enter."""
        return self._gate

    async def weights_digest(self) -> str:
        """Digest of the weights as they lie in memory now (32 hex digits), in the layout of the last update.

        A rank that holds only shards has none: the digest is that of whole tensors, of which an update confirms every
        byte as it arrives. Compare their ``full_tensor()`` with the trainer's.

        Raises:
            EngineError: No layout was accepted yet, or the module holds shards.
        """
        if self._binding is None:
            raise EngineError("no layout yet: the digest of its weights has no order")
        binding = self._binding
        if binding.shards:
            raise EngineError("this rank holds only shards of its weights, and the digest is that of the whole")
        return await self._worker.run(lambda: digest_weights(binding.plan, [targets[0] for targets in binding.targets]))

    # -- the RolloutEngine protocol -------------------------------------------------------------------------------

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`."""
        binding = self._binding
        if binding is not None and not await asyncio.to_thread(binding.fits, self._module()):
            binding = None
        shards = await asyncio.to_thread(module_shards, self._module())
        return EngineStatus(
            instance=self._instance,
            device=self._device(),
            staged=self._staged,
            epoch=self._epoch,
            weight_version=self.weight_version,
            newest_version=self._version or 0,
            tainted=self._tainted,
            connections=tuple(seat.connection for seat in self._seats.values() if seat.connection),
            plan_digest=binding.plan.digest if binding else None,
            partial=binding is not None and binding.partial,
            shards=shards,
            holds={layout: digest for layout, (_, digest) in self._holds.items()},
            gives=not shards,
        )

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        binding = await self._worker.run(bind, self._module(), layout)
        if self._staged and len({tensor.device for tensor in binding.tensors}) > 1:
            raise PlanError("a staged engine's weights must be on one device: use staged=False")
        held = local_tensors(self._module())
        self._installed = {key: view for key, view in self._installed.items() if key in held}
        self._binding, self._loader = binding, None

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        seat = self._seats.setdefault(rendezvous.source, Seat(self._guard))
        return await seat.open(rendezvous, address=cluster.node_address())

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        for seat in self._seats.values():
            if seat.expects(connection):
                return await seat.join(connection, contacts)
        raise ConnectError(f"the group to join was closed meanwhile {ANOTHER}")

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        for seat in list(self._seats.values()):
            await seat.leave(connection)

    def _guard(self) -> MemorySaverGuard:
        return memory_saver_guard(offload=False, thread=self._worker)

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        self._see(epoch)
        self._paused_for = epoch
        await self._shut(policy)

    async def _shut(self, policy: Policy) -> None:
        if policy != "drain":
            raise EngineError(f"a ModuleEngine can only drain, not {policy}")
        if not (empty := self._gate.shut()).done():
            await asyncio.wrap_future(empty)

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        binding = self._binding
        if binding is not None and not await self._worker.run(binding.fits, self._module()):
            # Before anything has begun: left groups would be heard at the other ends before this error is.
            raise OutOfStepError("the module's tensors were replaced since the layout was agreed on")
        session, links = self._begin(order)
        try:
            with session.scope:
                session.digest = await self._worker.run(self._receive, links, session)
                session.received = True
                return EngineReceipt(digest=session.digest)
        finally:
            session.stop.set()
            if not session.received:
                self._spoil(session, links)
            session.ended.set()
        what = "was aborted" if session.scope.deadline > anyio.current_time() else "took too long"
        raise TransferError(f"receiving the weights of update {order.version} {what}")

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`."""
        session = self._session
        if session is None or session.order.epoch != order.epoch or not session.received:
            raise EngineError(f"there is no received update of epoch {order.epoch} to finish")
        if self._paused_for == order.epoch:  # else a pause that an earlier update left behind ends here
            await self._worker.run(self._commit, session)
            return
        try:
            await self._shut(order.policy)
            await self._worker.run(self._commit, session)
        except BaseException:
            await shielded(self._serve(order.epoch))
            raise
        await shielded(self._flush_and_open(order.epoch))

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`."""
        self._see(epoch)
        self._ended_epoch = epoch
        if (giving := self._givings.get(epoch)) is not None:
            giving.set()
        session = self._session
        if session is not None:
            session.scope.cancel()
            await session.ended.wait()
            # A commit that runs already runs to its end; then the session is gone, and there is nothing to drop.
            await self._worker.run(self._drop, session)
        if published is not None and self._version != published and self._tainted is None:
            ahead = self._version is not None and self._version > published
            self._taint(f"it holds version {self._version} alone" if ahead else f"it missed version {published}")
        return await self.describe_engine()

    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        self._see(epoch)
        await shielded(self._serve(epoch))
        if self._tainted:
            raise TaintedEngineError(self._tainted)

    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.GivingEngine.give_weights`."""
        self._see(order.epoch)
        if self.weight_version != order.version:
            raise OutOfStepError(f"this engine serves version {self.weight_version}, not {order.version}")
        binding = self._binding
        if binding is None or binding.shards or binding.plan.digest != order.plan_digest:
            raise OutOfStepError("the layout that was asked for is not this engine's, or it holds shards only")
        links = self._links(order)
        stop = self._givings[order.epoch] = threading.Event()
        filler = OwnTensors(binding.plan, [targets[0] for targets in binding.targets])
        try:
            async with asyncio.timeout(order.timeout):
                digests = await self._worker.run(self._sender.send, binding.plan, filler, links, stop)
        except BaseException:
            stop.set()
            self._sender.forget()
            self._close(links)
            raise
        finally:
            del self._givings[order.epoch]
        return EngineReceipt(digest=binding.plan.digest_of(digests))

    async def _serve(self, epoch: int) -> None:
        await self._worker.run(lambda: None)  # a load or a commit that has begun comes to its end
        if self._tainted is None:
            await self._flush_and_open(epoch)

    async def _flush_and_open(self, epoch: int) -> None:
        if self._stale_cache:
            try:
                await self._flush()
            except Exception:
                self._taint("its cache could not be flushed", torn=False)
                raise
            self._stale_cache = False
        if epoch == self._epoch:  # else a newer update has paused it meanwhile
            self._paused_for = None
            self._gate.open()

    # -- sessions -------------------------------------------------------------------------------------------------

    def _see(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise OutOfStepError(
                f"a call of epoch {epoch} is out of date: this engine has seen epoch {self._epoch} {ANOTHER}"
            )
        self._epoch = epoch

    def _begin(self, order: UpdateOrder) -> tuple[_Session, Sequence[Link]]:
        if order.epoch < self._epoch or order.epoch <= self._ended_epoch:
            raise OutOfStepError(f"epoch {order.epoch} is over: this engine has seen {self._epoch} {ANOTHER}")
        if order.version <= (self._version or 0):
            raise OutOfStepError(f"version {order.version} is past: this engine has served {self._version} {ANOTHER}")
        if self._session is not None and not self._session.ended.is_set():
            raise EngineError(f"the update of epoch {self._session.order.epoch} is still being received")
        if self._binding is None or self._binding.plan.digest != order.plan_digest:
            raise OutOfStepError(f"the layout of this update was not agreed on with this engine {ANOTHER}")
        links = self._links(order)
        self._epoch = order.epoch
        device = links[0].device
        if self._loader is None or self._loader.device != device:
            self._loader = (
                StagedLoader(self._binding, self._installed, device)
                if self._staged
                else InPlaceLoader(self._binding, device)
            )
        scope = anyio.CancelScope(deadline=anyio.current_time() + order.timeout)
        self._session = _Session(order, self._loader, scope)
        return self._session, links

    def _links(self, order: UpdateOrder) -> list[Link]:
        """The groups that an order names."""
        held = {seat.connection: seat.link for seat in self._seats.values()}
        links = [link for connection in order.connections if (link := held.get(connection)) is not None]
        if not links or len(links) != len(order.connections):
            raise OutOfStepError(f"this engine is not in the groups that the order names {ANOTHER}")
        return list(links)

    def _receive(self, links: Sequence[Link], session: _Session) -> str:
        """Take and hash every bucket, while others are on their way; returns the digest of all."""
        binding, loader = self._binding, session.loader
        assert binding is not None
        sources = max(1, len(binding.plan.parts))
        if len(links) not in (1, sources):
            raise OutOfStepError(f"the order names {len(links)} groups, and there are {sources} sources")
        loader.begin()
        on_the_way: deque[tuple[Bucket, Tensor, object]] = deque()

        def link_of(bucket: Bucket) -> Link:
            return links[bucket.source] if len(links) > 1 else links[0]

        def take_oldest() -> None:
            bucket, buffer, handle = on_the_way.popleft()
            wait(link_of(bucket), handle, bucket, session.stop)
            loader.take(bucket, buffer)

        for bucket in binding.plan.buckets:
            if len(on_the_way) == loader.in_flight:
                take_oldest()
            buffer = loader.target(bucket)
            on_the_way.append((bucket, buffer, link_of(bucket).start_receive(buffer)))
        while on_the_way:
            take_oldest()
        return loader.digest()

    def _spoil(self, session: _Session, links: Sequence[Link]) -> None:
        """The transfer failed: leave its groups, and the buffers that they may still write to."""
        self._close(links)
        self._worker.submit(self._drop, session)

    def _close(self, links: Sequence[Link]) -> None:
        for seat in self._seats.values():
            if seat.link in links:
                seat.close()

    def _drop(self, session: _Session) -> None:
        if self._session is not session:
            return
        self._session = None
        session.loader.discard()
        if session.loader.touched:
            self._taint(f"update {session.order.version} was not received whole")

    def _commit(self, session: _Session) -> None:
        if self._session is not session:
            raise EngineError(f"the update of epoch {session.order.epoch} was overtaken by another")
        try:
            session.loader.commit()
        except BaseException:
            self._taint(f"update {session.order.version} could not be loaded")
            raise
        self._version, self._tainted, self._stale_cache = session.order.version, None, True
        self._ended_epoch = session.order.epoch
        self._session = None
        names = self._names()
        self._holds = {layout: held for layout, held in self._holds.items() if not held[0] & names}
        self._holds[session.order.plan_digest] = names, session.digest
        if self._torn:
            self._torn -= self._names()
        if self._torn:
            self._taint(f"it lacks what an earlier update brought to others: {list_names(self._torn)}", torn=False)
            raise TaintedEngineError(str(self._tainted))

    def _taint(self, what: str, *, torn: bool = True) -> None:
        if torn:
            self._torn |= self._names()
            self._holds.clear()
        self._tainted = f"{what}: the engine stays paused until a whole update repairs it"
        self._gate.bar(self._tainted)

    def _names(self) -> set[str]:
        """Every tensor of the layout that was accepted last, under every name."""
        return {name for spec in self._binding.plan.specs for name in spec.names} if self._binding else set()

    def _device(self) -> str:
        tensors = itertools.chain(self._module().parameters(), self._module().buffers())
        return next((tensor.device.type for tensor in tensors), "cpu")
