"""What a :class:`asyncsync.ModuleEngine` does in an update: it receives, holds back generation, and switches.

Threads: control calls run on a loop (in an actor, that of the ``asyncsync`` group); joining, hashing, loading and the
commit run on one worker thread, in order; generation runs wherever the actor's own methods run, and meets the weights
only where it is held back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

import anyio
import torch
from torch import nn

from asyncsync import cluster
from asyncsync.buckets import Plan, list_names
from asyncsync.devices import gpu_of, home_of, visible_gpus
from asyncsync.digests import Digests
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.binding import Binding, bind, local_tensors, module_shards
from asyncsync.engines.gate import Generations
from asyncsync.engines.line import AnsweredLines
from asyncsync.engines.loading import InPlaceLoader, Installed, Loader, StagedLoader
from asyncsync.engines.ranks import WITHIN_CLEANUP, also
from asyncsync.engines.receiving import Receiver, Session
from asyncsync.engines.record import WeightRecord, all_names
from asyncsync.engines.waking import WAKE_TIMEOUT, OwnMemory, Woken, asleep_and_refused, time_to_wake
from asyncsync.errors import EngineError, OutOfStepError, PlanError, TaintedEngineError
from asyncsync.messages import WEIGHTS, Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.packing import digest_weights
from asyncsync.sending import Filler, OwnTensors, Sender
from asyncsync.shield import shielded
from asyncsync.threads import RenewedThread, WorkerThread
from asyncsync.transports.base import Link
from asyncsync.transports.device_memory import this_process, why_not_opened
from asyncsync.transports.memory_files import this_node
from asyncsync.transports.stored import StoringLink
from asyncsync.transports.stores import stores_here

TIDY_DELAY = 0.1
"""Seconds after a commit until memory that was let go of is tidied up: not while the conductor waits for the answer."""

_log = logging.getLogger("asyncsync")


class ServedModule:
    """Satisfies :class:`asyncsync.GivingEngine` for a module of this process.

    Args:
        module: Gives the module that is served now.
        staged: Whether new weights are held beside the old.
        generations: What reads the weights.
        flush: Drops what was computed from older weights.
        memory: What of its memory is released, and how that changes.

    Attributes:
        generations: What reads the weights.
        record: What it knows of them.
        receiver: Takes new ones.
        lines: Connections over which conductors call it.
    """

    def __init__(
        self,
        module: Callable[[], nn.Module],
        *,
        staged: bool,
        generations: Generations,
        flush: Callable[[], Awaitable[None]],
        memory: OwnMemory,
        keeps_weights: Callable[[], bool] = lambda: False,
    ) -> None:
        self._module = module
        self._flush = flush
        self._memory = memory
        self._keeps_weights = keeps_weights
        self._woken = Woken()
        self._lost_weights = False  # they were released, with no copy kept, and not all were brought anew
        self._staged = staged
        self.generations = generations
        self._worker = RenewedThread("asyncsync-receiver")
        self.record = WeightRecord(generations.bar)
        self.receiver = Receiver(self.record, self._worker, device=lambda: self._home.index)
        self.lines = AnsweredLines()
        self._installed = Installed()
        self._stale_cache = False
        self._paused_for: int | None = None  # the epoch of the update it is paused for
        self._switching = False  # staged, and from the moment on that it holds requests back by itself
        self._expiry: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._binding: Binding | None = None
        self._loader: Loader | None = None
        self._sender = Sender(WorkerThread("asyncsync-hasher"))  # started only by an engine that gives
        self._givings: dict[int, threading.Event] = {}
        if cluster.was_restarted():
            self.record.taint("its process was restarted, and holds weights of no version")

    @property
    def weight_version(self) -> int | None:
        """The version it serves; None before the first update, and while it holds part of one."""
        return self.record.weight_version

    async def weights_digest(self) -> str:
        """Digest of the weights as they lie in memory now (32 hex digits), in the layout of the last update.

        A rank that holds only shards has none: the digest is that of whole tensors, of which an update confirms every
        byte as it arrives. Compare their ``full_tensor()`` with the trainer's.

        Raises:
            EngineError: No layout was accepted yet, or the module holds shards.
        """
        if self._binding is None:
            raise EngineError("no layout yet: the digest of its weights has no order")
        if WEIGHTS in self._memory.released:
            raise EngineError("its weights are released: wake it up first")
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
        released = self._look_at_memory()
        status = self.record.status(
            device=self._home.type,
            gpus=gpu_of(self._home),
            node=this_node(),
            stores=stores_here(),
            staged=self._staged,
            policies=self.generations.policies,
            connections=self.receiver.connections,
            plan_digest=binding.plan.digest if binding else None,
            partial=binding is not None and binding.partial,
            shards=shards,
            gives=not shards,
            paused=self._paused_for is not None or self._switching,
            released=tuple(sorted(released)),
            base_epoch=self._base_epoch if binding is not None else None,
            no_deltas="it holds shards of its weights" if shards else None,
            no_ipc=why_not_opened(self._home),
            sees=visible_gpus() if self._home.type == "cuda" else (),
            processes=(this_process(),),
        )
        session = self.receiver.session
        if session is not None and session.loader.touched and status.tainted is None:
            # To its own conductor this is nothing new. To another: that one may be gone, and the weights are not whole.
            under_way = f"update {session.order.version} of it is not over"
            status = replace(status, tainted=under_way, weight_version=None, holds={})
        return status

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        binding = await self._worker.run(bind, self._module(), layout)
        if self._staged and len({tensor.device for tensor in binding.tensors}) > 1:
            raise PlanError("a staged engine's weights must be on one device: use staged=False")
        held = local_tensors(self._module())
        self._installed.keep(held)
        self._binding, self._loader = binding, None

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        return await self.receiver.open_group(rendezvous)

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        await self.receiver.join_group(connection, contacts)

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        await self.receiver.leave_group(connection)

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        self.record.see(epoch)
        self._paused_for = epoch
        await self._hold(policy)

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        binding = self._binding
        fits = binding is None or await self._worker.run(binding.fits, self._module())
        if not fits or self._binding is not binding:
            # Before anything has begun: left groups would be heard at the other ends before this error is.
            raise OutOfStepError("the module's tensors were replaced since the layout was agreed on")
        plan = self.receiver.check(order, None if binding is None else binding.plan)
        slept = bool(self._refuse_asleep(order))
        if order.against is not None and order.against != self._base_epoch:
            raise OutOfStepError("this engine does not hold (any more) what the update was compared with")
        if binding is not None and binding.partial and self._lost_weights:
            raise EngineError(
                "its weights were released with no copy kept, and this update brings only some of them (partial=True): "
                "send all, or keep a copy (keeps_released_weights)"
            )
        self._expect_end(replace(order, stored=()))
        self.record.see(order.epoch)
        self._woken.begin(order.epoch, self.record.committed_epoch)
        if not self._staged:
            await self._wake({WEIGHTS}, time_to_wake(order))
        return EngineReceipt(digest=await self.receiver.receive(order, plan, self._loader_for), slept=slept)

    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`."""
        session = self.receiver.received(order.epoch)
        self._refuse_asleep(order)
        if self._paused_for == order.epoch:  # else a pause that an earlier update left behind ends here
            await self._switch(session)
            return None
        self._switching = True
        try:
            await self._hold(order.policy)
            held = anyio.current_time()
            await self._switch(session)
        except BaseException:
            await shielded(self._serve(order.epoch))
            raise
        await shielded(self._flush_and_resume(order.epoch))
        return anyio.current_time() - held

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`."""
        self.record.end(epoch)
        if (giving := self._givings.get(epoch)) is not None:
            giving.set()
        await self.receiver.abort()
        self.record.compare(epoch, published, all_names(self._plan))
        await self._put_back(epoch)
        self._expect_no_end()
        return await self.describe_engine()

    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        self.record.see(epoch)
        if (session := self.receiver.session) is not None and session.order.epoch < epoch:
            await self.receiver.abort()  # its conductor is gone: nobody will finish it
        await shielded(self._serve(epoch))
        if self.record.tainted:
            raise TaintedEngineError(self.record.tainted)

    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.GivingEngine.give_weights`."""
        self.record.see(order.epoch)
        if WEIGHTS in self._look_at_memory():
            raise OutOfStepError("this engine's weights are released")
        if self.weight_version != order.version:
            raise OutOfStepError(f"this engine serves version {self.weight_version}, not {order.version}")
        binding = self._binding
        if binding is None or binding.shards or binding.plan.digest != order.plan_digest:
            raise OutOfStepError("the layout that was asked for is not this engine's, or it holds shards only")
        links = self.receiver.links(order, binding.plan)
        stop = self._givings[order.epoch] = threading.Event()
        filler = OwnTensors(binding.plan, [targets[0] for targets in binding.targets])
        stores = [link for link in links if isinstance(link, StoringLink)]
        for store in stores:
            store.order = order
        try:
            async with asyncio.timeout(order.timeout):
                digests = await self._worker.run(self._give, binding.plan, filler, links, stores, stop)
        except BaseException:
            stop.set()
            self._sender.forget()
            self.receiver.close(links)
            raise
        finally:
            del self._givings[order.epoch]
        stored = {store.connection: store.place() for store in stores}
        return EngineReceipt(digest=binding.plan.digest_of(digests), stored=stored)

    def _give(
        self, plan: Plan, filler: Filler, links: Sequence[Link], stores: Sequence[StoringLink], stop: threading.Event
    ) -> Digests:
        for store in stores:
            store.begin(plan, stop)
        digests = self._sender.send(plan, filler, links, stop)
        for store in stores:
            store.complete(stop)
        return digests

    # -- what it does itself --------------------------------------------------------------------------------------

    def _expect_no_end(self) -> None:
        """Nothing is left of an update that somebody would have to end."""
        if self._expiry is not None and self.receiver.session is None and self._paused_for is None:
            self._expiry.cancel()
            self._expiry = None

    def _expect_end(self, order: UpdateOrder) -> None:
        """Have an update be over when its lease is, should nobody say what becomes of it."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if order.lease < math.inf:
            self._expiry = asyncio.get_running_loop().call_later(order.lease, self._expire, order)

    def _expire(self, order: UpdateOrder) -> None:
        self._giving_up = asyncio.create_task(self._give_up(order))

    async def _give_up(self, order: UpdateOrder) -> None:
        session = self.receiver.session
        if order.epoch == self.record.epoch:
            self.record.end(order.epoch)  # a call that still waits for the engine to wake up must not go on
        if session is not None and session.order.epoch == order.epoch:
            _log.warning("update %d was not finished in time: is its conductor gone? It is dropped", order.version)
            await self.receiver.abort()
        if order.epoch == self.record.epoch:
            await self._put_back(order.epoch)
        if self._staged and self._paused_for == order.epoch:
            await self._serve(order.epoch)

    def _look_at_memory(self) -> frozenset[str]:
        """What is released now. Weights that are have lost what they were, also when they are back."""
        released = self._memory.released
        if WEIGHTS in released and not self._keeps_weights():
            self._lost_weights = True
            if self._loader is not None:
                self._loader.base_epoch = None
            self.record.lose(all_names(self._plan))
        return released

    @property
    def _base_epoch(self) -> int | None:
        """The update whose bytes are all here, to apply what differs to."""
        asleep = WEIGHTS in self._look_at_memory()
        return None if asleep or self._loader is None else self._loader.base_epoch

    def check_awake(self) -> None:
        """Refuse to generate with what is not there.

        Raises:
            EngineError: Memory is released.
        """
        if released := self._look_at_memory():
            raise EngineError(f"the engine is asleep ({list_names(set(released))} released): an update wakes it")

    async def sleep(self, tags: Collection[str]) -> None:
        """Release memory. See :meth:`asyncsync.ModuleEngine.sleep`."""
        if self.receiver.session is not None or self._paused_for is not None or self._switching:
            raise EngineError("an update of it is not over: it cannot be put to sleep now")
        await self._memory.put_back(tags, WAKE_TIMEOUT)
        self._look_at_memory()

    async def wake_up(self, tags: Collection[str]) -> None:
        """Get memory back. See :meth:`asyncsync.ModuleEngine.wake_up`."""
        self._look_at_memory()
        await self._memory.wake(tags, WAKE_TIMEOUT)

    def _refuse_asleep(self, order: UpdateOrder) -> frozenset[str]:
        if (released := self._look_at_memory()) and not order.wake:
            raise EngineError(asleep_and_refused(released))
        return released

    async def _hold(self, policy: Policy) -> None:
        if policy == "drain" and self._memory.released and "recompute" in self.generations.policies:
            policy = "recompute"  # what an earlier pause has kept must not go on: its memory is not there
        await self.generations.hold(policy)

    async def _wake(self, tags: Collection[str], timeout: float) -> None:
        self._woken.note(self._look_at_memory() & frozenset(tags))
        await self._memory.wake(tags, timeout)

    async def _put_back(self, epoch: int) -> None:
        """After an update that failed: release what it has woken."""
        record = self.record
        tags = self._woken.to_put_back(epoch, record.committed_epoch, whole=record.tainted is None)
        if not tags:
            return
        try:
            await self._memory.put_back(tags, WITHIN_CLEANUP)
            self._woken.was_put_back(tags)
        except EngineError as error:
            _log.warning("after a failed update: %s", error)
            record.taint(f"it could not be put back to sleep: {error}", all_names(self._plan))
        self._look_at_memory()

    async def _switch(self, session: Session) -> None:
        """Take what was received into service; then all memory is there."""
        self.receiver.received(session.order.epoch)  # else it was aborted, and what was woken now nobody would put back
        if not self._staged and WEIGHTS in self._look_at_memory():
            raise EngineError("its weights were released while they were being updated")
        await self._wake({WEIGHTS}, time_to_wake(session.order))
        await self._worker.run(self._commit, session)
        asyncio.get_running_loop().call_later(TIDY_DELAY, self._tidy)
        await self._wake_all(session.order.epoch, time_to_wake(session.order))

    def _tidy(self) -> None:
        self._worker.submit(self._installed.tidy)

    async def _wake_all(self, epoch: int, timeout: float) -> None:
        """After the weights of an update have come, wake the rest: nobody generates before that."""
        try:
            await self._wake(self._memory.released, timeout)
        except BaseException as error:
            if self._memory.released:
                self.record.taint("it did not wake up whole", all_names(self._plan))
                await also(error, self._put_back(epoch))
            raise
        if self.record.tainted is not None:
            raise TaintedEngineError(self.record.tainted)  # its weights were released meanwhile, and woken here

    async def _serve(self, epoch: int) -> None:
        await self._worker.run(lambda: None)  # a load or a commit that has begun comes to its end
        if self.record.tainted is None:
            await self._flush_and_resume(epoch)

    async def _flush_and_resume(self, epoch: int) -> None:
        if self.record.committed_epoch == epoch:
            await self._wake_all(epoch, WITHIN_CLEANUP)  # a commit whose caller was cancelled has left that to do
        if self._stale_cache:
            try:
                await self._flush()
            except Exception:
                self.record.taint("its cache could not be flushed")
                raise
            self._stale_cache = False
        if epoch == self.record.epoch:  # else a newer update has paused it meanwhile
            self._paused_for, self._switching = None, False
            self.generations.resume()
        self._expect_no_end()

    def _commit(self, session: Session) -> None:
        names = all_names(session.plan)
        with self.receiver.taking(session):
            try:
                if self._binding is not None and not self._binding.fits(self._module()):
                    raise EngineError("the module's tensors were replaced while the update was under way")
                session.loader.commit()
            except BaseException:
                self.record.taint(f"update {session.order.version} could not be loaded", names)
                raise
            if self._binding is not None and not self._binding.shards:
                session.loader.base_epoch = session.order.epoch
            self._stale_cache = True
            self._lost_weights = self._lost_weights and self._binding is not None and self._binding.partial
            self.record.committed(session.order, names, session.digest)

    def _loader_for(self, device: str) -> Loader:
        assert self._binding is not None
        if self._loader is None or self._loader.device != device:
            self._loader = (
                StagedLoader(self._binding, self._installed, device)
                if self._staged
                else InPlaceLoader(self._binding, device)
            )
        return self._loader

    @property
    def _plan(self) -> Plan | None:
        return self._binding.plan if self._binding else None

    @property
    def _home(self) -> torch.device:
        return home_of(itertools.chain(self._module().parameters(), self._module().buffers()))
