"""A trainer rank's part of an update: it reads, gathers, packs, hashes and sends its weights.

A rank has one *sender thread*. The user's hooks, joining groups, gathering, packing and broadcasting all run there,
inside the memory-saver guard, so that collectives keep their order and the guard covers them (R8, R9). Hashing has a
thread of its own, beside the sending. The sender thread waits for the network, too, and can be stopped while it does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard, TypeVar

import anyio
import numpy as np
import torch
from torch import Tensor

from asyncsync import cluster
from asyncsync.baseline import Baseline
from asyncsync.buckets import Plan, replan
from asyncsync.checksums import Witness
from asyncsync.delta_sending import DeltaSender, Route, SentChanges
from asyncsync.devices import CPU, gpu_of, settle
from asyncsync.digests import Digests
from asyncsync.errors import ConnectError, OutOfStepError, TrainerError, TransferError
from asyncsync.gathering import CallGathering, ShardGathering, bring_shards, take_part
from asyncsync.guard import MemorySaverGuard
from asyncsync.held import HeldWeights, LaidOut, hold_nothing, hold_shards, hold_whole
from asyncsync.memory_saver.host_copies import HostCopies
from asyncsync.messages import Contacts, ReadOptions, Rendezvous, SendReceipt, TrainerStatus, UpdateOrder
from asyncsync.sender_thread import SenderThread
from asyncsync.sending import Filler, OwnTensors, Repacked, Sender
from asyncsync.shards import Holding, ShardPlan
from asyncsync.shield import CLEANUP_TIMEOUT, shielded
from asyncsync.threads import WorkerThread
from asyncsync.transports.base import QUIET_TIMEOUT, Link
from asyncsync.transports.cuda_ipc import IpcSourceLink
from asyncsync.transports.device_memory import DeviceSets, this_process
from asyncsync.transports.folder import FolderSourceLink
from asyncsync.transports.memory_files import SharedSet, SharedSets, shared_nbytes, this_node
from asyncsync.transports.seat import Seat
from asyncsync.transports.shared import SharedSourceLink
from asyncsync.transports.stored import StoringLink
from asyncsync.weights import Snapshot, Weights, WeightSource

T = TypeVar("T")

STUCK_TIMEOUT = 2.0
"""Seconds in which the sender thread, once the guard has given up on what it was doing, must do something new."""

ABANDONED_TIMEOUT = 120.0
"""Seconds after which an operation that was abandoned has ended by itself: twice what one may take."""

_log = logging.getLogger("asyncsync")


class RankWorker:
    """Satisfies :class:`~asyncsync.trainer.Rank` for weights of this process.

    Args:
        weights: What to send.
        offload: False if this trainer never offloads its memory; None to find out.
        hooks: What is called before and after an update; None: there is nothing to call.

    Raises:
        TypeError: ``weights`` is none.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        offload: bool | None = None,
        hooks: tuple[Callable[[], None], Callable[[], None]] | None = None,
    ) -> None:
        self._source = WeightSource(weights)
        self._hooks = hooks
        self._instance = uuid.uuid4().hex
        self._sender = SenderThread(offload=offload)
        self._hasher = WorkerThread("asyncsync-hasher")
        self._awake = False
        self._resting: set[asyncio.Future[None]] = set()
        self._sets = SharedSets()
        self._device_sets = DeviceSets()
        self._engine_seats: dict[str, Seat] = {}  # by group
        self._shard_seats: dict[int, Seat] = {}  # by the rank that brings something
        self._rank = 0
        self._holdings: tuple[Holding | None, ...] = ()
        self._shards: ShardPlan | None = None
        self._shared: tuple[str, int, int] | None = None
        self._gathers = False
        self._gathered_epoch = 0
        self._options: ReadOptions | None = None
        self._plan: Plan | None = None
        self._bucket_sender = Sender(self._hasher)
        self._held: dict[str, HeldWeights] = {}  # by the snapshot's name
        self._spare: HeldWeights | None = None  # held no more: its memory is there for the next
        self._delta_sender = DeltaSender(self._hasher)
        self._baseline: Baseline | None = None
        self._messages: list[Tensor] = []
        self._sending: _Sending | None = None
        self._ended_epoch = 0
        self._sent: tuple[int, str, Digests] | None = None
        self._published: tuple[int, str, Digests] | None = None

    async def begin_update(self) -> bool:
        """See :class:`~asyncsync.trainer.Trainer`."""
        if self._hooks is not None:
            async with self._guard() as guarded:
                await guarded.run(self._wake)
        return self._hooks is not None

    async def end_update(self) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        if self._hooks is not None:
            # Whatever becomes of the wait: it is queued behind the hook before, which may still be running.
            resting = asyncio.ensure_future(self._end_update())
            self._resting.add(resting)
            resting.add_done_callback(self._resting.discard)
            await asyncio.shield(resting)

    async def _end_update(self) -> None:
        async with self._guard() as guarded:
            await guarded.run(self._rest)

    def _wake(self) -> None:
        assert self._hooks is not None
        if not self._awake:
            self._hooks[0]()
            self._awake = True

    def _rest(self) -> None:
        assert self._hooks is not None
        if self._awake:
            self._awake = False
            self._hooks[1]()

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            PlanError: The weights cannot be sent; see :meth:`asyncsync.weights.WeightSource.read`.
            TrainerError: The snapshot that is asked for is gone.
        """
        if self._sending is not None:
            await self._sending.ended.wait()  # one that fails closes the groups that are told of here
        self._options = options
        if not options.delta:
            self._baseline = None
        held = None if options.snapshot is None else self._snapshot(options.snapshot)
        plan, snapshot, no_ipc = await self._sender.run_connecting(self._read_to_describe, options, held)
        self._plan, self._gathers = plan, held.gathers if held else snapshot.gather is not None
        return TrainerStatus(
            instance=self._instance,
            device=snapshot.device.type,
            gpus=gpu_of(snapshot.device),
            connections=tuple(name for name, seat in self._engine_seats.items() if seat.connection == name),
            plan_digest=plan.digest,
            specs=None if plan.digest == known_digest else plan.specs,
            holding=snapshot.holding,
            shard_connections=tuple(seat.connection for seat in self._shard_seats.values() if seat.connection),
            gathers=self._gathers,
            shared=self._shared,
            epoch=self._ended_epoch,
            node=this_node(),
            shortage=await asyncio.to_thread(self._sets.shortage, shared_nbytes(plan)),
            base_epochs=self._baseline.epochs_of(plan) if self._baseline is not None else (),
            no_ipc=no_ipc,
            process=this_process(),
        )

    def _snapshot(self, name: str) -> HeldWeights:
        if name not in self._held:
            raise TrainerError(
                "the weights that the update was started with are gone: this process is another, or it took too long"
            )
        return self._held[name]

    def _read_to_describe(self, options: ReadOptions, held: HeldWeights | None) -> tuple[Plan, Snapshot, str | None]:
        plan, snapshot, _ = self._read(options, held)
        return plan, snapshot, self._device_sets.why_not(shared_nbytes(plan))

    def _read(
        self, options: ReadOptions, held: HeldWeights | None = None, keep: bool = False
    ) -> tuple[Plan, Snapshot, HostCopies]:
        read = partial(self._source.read, name_map=options.name_map, dtype=options.dtype)
        snapshot = read() if held is None else held.snapshot
        plan = replan(self._plan, snapshot.specs, options.bucket_size, whole_tensors=options.whole_tensors)
        home = self._device_sets.device = snapshot.device
        if home.type == "cuda":
            self._sender.device = home.index
        if held is not None:
            return plan, snapshot, HostCopies([], [])
        settle(home)  # a training step that was started may still be writing them
        names = [spec.name for spec in snapshot.specs] if snapshot.tensors else []
        return plan, snapshot, HostCopies(names, snapshot.tensors, keep=keep)

    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            ConnectError: This end cannot be reached, or speaks another protocol.
            MemorySaverError: The guard could not be entered.
        """
        rank = rendezvous.shards_of
        if rank is None:
            seat = self._engine_seats.setdefault(
                rendezvous.connection, Seat(self._guard, self._sets, self._device_sets)
            )
        else:
            seat = self._shard_seats.setdefault(rank, Seat(self._guard))
        self._sender.opened(rendezvous.connection)
        return await seat.open(rendezvous, address=cluster.node_address())

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            ConnectError: A member could not be reached, or the group was closed meanwhile.
        """
        for seat in self._seats:
            if seat.expects(connection):
                return await seat.join(connection, contacts)
        raise ConnectError("the group to join was closed meanwhile")

    async def leave_trainer_group(self, connection: str) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        for seat in self._seats:
            await seat.leave(connection)
        for name in [name for name, seat in self._engine_seats.items() if not seat.taken]:
            del self._engine_seats[name]
        if not self._engine_seats:
            self._clear_sets()
        await self._sender.left(connection)

    async def share_holdings(self, rank: int, holdings: tuple[Holding | None, ...]) -> tuple[int, ...]:
        """See :class:`~asyncsync.trainer.Rank`.

        Raises:
            PlanError: The shards of a tensor do not tile it.
        """
        self._rank, self._holdings, self._shared = rank, holdings, None
        plan = self._plan
        self._shards = await self._sender.worker.run(self._plan_shards, plan)
        self._shared = (plan.digest if plan else "", rank, len(holdings))
        return self._shards.bringers if self._shards else ()

    def _plan_shards(self, plan: Plan | None) -> ShardPlan | None:
        if plan is None or all(holding is None for holding in self._holdings):
            return None
        whole: Holding = (None,) * len(plan.specs)
        return ShardPlan(plan, [whole if holding is None else holding for holding in self._holdings])

    @property
    def _seats(self) -> tuple[Seat, ...]:
        return (*self._engine_seats.values(), *self._shard_seats.values())

    def _close_links(self) -> None:
        for seat in self._seats:
            seat.close()
        self._engine_seats.clear()

    def _clear_sets(self) -> None:
        self._sets.clear()
        self._device_sets.clear()

    def _break_off(self, links: _Links) -> bool:
        """Leave all groups in the middle; whether nothing touches the buffers any more. Blocks."""
        self._close_links()
        return all(link.is_quiet(QUIET_TIMEOUT) for link in (*links.engines, *links.shards.values()))

    async def _leave_all_but(self, connections: Sequence[str]) -> None:
        """Leave the groups of engines that went, and of a conductor that is gone: an order names all that count."""
        for connection in [name for name in self._engine_seats if name not in connections]:
            await self._engine_seats[connection].leave()
            self._engine_seats.pop(connection, None)

    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            OutOfStepError: The order's groups or layout are not this rank's (any more). Nothing was sent.
            PlanError: The weights cannot be sent (any more).
            TransferError: The bytes did not arrive, the sending was aborted, or took too long.
        """
        try:
            return await self._send_weights(order)
        except BaseException:
            await self._take_part_all_the_same(order.epoch)
            raise

    async def _run_or_give_up(self, timeout: float, function: Callable[..., T], *args: Any) -> T | None:
        """Run something on the sender thread; if that is stuck, in a gathering say, or in a hook, it is replaced."""
        thread = self._sender.worker
        try:
            async with asyncio.timeout(timeout):
                return await thread.run(function, *args)
        except TimeoutError:
            _log.warning("the sender thread has been busy for too long with what is not ours, and is given up")
            thread.close()
            self._sender.clean_up(self._close_links)
            return None

    @property
    def _gathers_with_others(self) -> bool:
        return self._gathers and len(self._holdings) > 1

    async def _take_part_all_the_same(self, epoch: int) -> None:
        """Gather, if that was not done in an update that has failed: the other ranks may have begun, and wait."""
        if self._gathers_with_others and self._gathered_epoch != epoch and not self._held:
            self._gathered_epoch = epoch
            guard = self._guard()
            with suppress(Exception):  # the error that ended the update is the one that counts
                await shielded(self._run_or_give_up(CLEANUP_TIMEOUT, guard.run_here, self._only_take_part))

    def _only_take_part(self) -> None:
        if self._options is not None:
            plan, snapshot, _ = self._read(self._options)
            if snapshot.gather is not None:
                take_part(plan, snapshot.gather)

    async def _send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        held = None if order.snapshot is None else self._snapshot(order.snapshot)
        async with self._under_way(order, "sending") as (sending, options, links):
            async with self._sender.transferring() as guarded:
                async with self._reading(order, links, sending, guarded, options, held) as (plan, snapshot, copies):
                    await self._leave_all_but(order.connections)
                    stop = threading.Event()
                    witness = Witness(plan, order.checksums) if order.checksums else None
                    what = (copies, order, links, plan, snapshot, stop, witness, held)
                    sent = await self._work(sending, guarded, links, self._send_and_store, *what, on_cancel=stop.set)
                if guarded.active:
                    await guarded.run(self._free_device_buffers)  # a trainer that is asleep keeps none
            if sent is None:
                return None
            receipt = await self._hasher.run(self._receipt, order, plan, sent, witness)
            return replace(receipt, stored={store.connection: store.place() for store in links.stores})

    async def snapshot_weights(self, order: UpdateOrder) -> None:
        """See :class:`~asyncsync.trainer.Trainer`. It is held until it is dropped, or the order's lease has run out.

        Raises:
            OutOfStepError: The order's groups or layout are not this rank's (any more).
            PlanError: The weights cannot be sent (any more).
            TransferError: It was aborted, or took too long; or a gathering has failed.
        """
        try:
            await self._snapshot_weights(order)
        except BaseException:
            if self._sending is None or self._sending.quiet:
                self._sets.let_go_all(order.snapshot)
            else:  # it may be written to still
                self._sets.ended(order.snapshot)
            await self._take_part_all_the_same(order.epoch)
            raise

    async def _snapshot_weights(self, order: UpdateOrder) -> None:
        assert order.snapshot is not None
        async with (
            self._under_way(order, "copying") as (sending, options, links),
            self._sender.transferring() as guarded,
            self._reading(order, links, sending, guarded, options, None) as (plan, snapshot, copies),
        ):
            stop = threading.Event()
            what = (copies, partial(self._copy, order.snapshot), order, links, plan, snapshot, stop)
            held = await self._work(sending, guarded, None, self._on_what_stays, *what, on_cancel=stop.set)
            self._held[order.snapshot] = held
            if order.lease < math.inf:  # or its conductor is gone, and nobody will drop it
                asyncio.get_running_loop().call_later(order.lease, self._drop_snapshot, order.snapshot)

    async def drop_snapshot(self, snapshot: str) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        self._drop_snapshot(snapshot)

    def _drop_snapshot(self, name: str) -> None:
        if (held := self._held.pop(name, None)) is None:
            return
        if held.shared is not None:
            self._sets.let_go_all(name)
        elif not self._held and not held.left_behind and not any(tensor.is_cuda for tensor in held.snapshot.tensors):
            self._spare = held

    @asynccontextmanager
    async def _under_way(self, order: UpdateOrder, what: str) -> AsyncIterator[tuple[_Sending, ReadOptions, _Links]]:
        """Something that an order has begun, and that an abort ends, at any moment, and waits for.

        Raises:
            OutOfStepError: The order comes to the wrong rank, or too late.
            TransferError: It was aborted, or took too long.
        """
        if self._options is None:
            raise OutOfStepError("the trainer was not asked for its weights yet")
        links = self._links(order)
        if order.epoch <= self._ended_epoch:
            raise OutOfStepError(f"the update of epoch {order.epoch} has ended already")
        sending = _Sending(order.epoch, anyio.CancelScope(deadline=anyio.current_time() + order.timeout))
        self._sending = sending
        try:
            with sending.scope:
                yield sending, self._options, links
                return
        finally:
            for store in links.stores:
                store.release()  # what was not handed over
            if not sending.quiet:
                self._bucket_sender.forget()
                self._messages, self._spare = [], None  # an abandoned operation may still use them
                if order.snapshot in self._held:
                    self._held[order.snapshot].left_behind = True
                self._delta_sender, self._baseline = DeltaSender(self._hasher), None
            sending.ended.set()
        how = "was aborted" if sending.scope.deadline > anyio.current_time() else "took too long"
        raise TransferError(f"{what} the weights of update {order.version} {how}")

    @asynccontextmanager
    async def _reading(
        self,
        order: UpdateOrder,
        links: _Links,
        sending: _Sending,
        guarded: MemorySaverGuard,
        options: ReadOptions,
        held: HeldWeights | None,
    ) -> AsyncIterator[tuple[Plan, Snapshot, HostCopies]]:
        """The weights, or a snapshot of them, as the order expects them; readable while this is entered."""
        plan, snapshot, copies = await self._read_to_send(guarded, options, held)
        try:
            self._check_in_step(order, plan, snapshot, links)
            yield plan, snapshot, copies
        finally:
            if sending.quiet:
                copies.release()
            else:  # an operation that was abandoned may still read them
                asyncio.get_running_loop().call_later(ABANDONED_TIMEOUT, copies.release)

    async def _work(
        self,
        sending: _Sending,
        guarded: MemorySaverGuard,
        links: _Links | None,
        function: Callable[..., T],
        *args: Any,
        on_cancel: Callable[[], None],
    ) -> T:
        """Run what reads the weights; if it fails, groups in whose middle that was are left."""
        sending.begun, sending.quiet = True, False
        try:
            result = await guarded.run(partial(function, *args), on_cancel=on_cancel)
        except BaseException:
            clean_up = (lambda: True) if links is None else partial(self._break_off, links)
            left = await shielded(self._run_or_give_up(STUCK_TIMEOUT, clean_up))
            sending.quiet = left is True
            raise
        sending.quiet = True
        return result

    def _check_in_step(self, order: UpdateOrder, plan: Plan, snapshot: Snapshot, links: _Links) -> None:
        if plan.digest != order.plan_digest:
            raise OutOfStepError("the layout of the trainer's weights changed")
        if order.shards is not None and (self._shared is None or self._shared[0] != plan.digest):
            raise OutOfStepError("this rank was told last what the others hold of another layout")
        if snapshot.holding != (None if order.shards is None else self._holdings[self._rank]):
            raise OutOfStepError("the trainer's weights are sharded in another way now")
        compared = order.against if order.connections else None
        if compared is not None and (self._baseline is None or compared not in self._baseline.epochs_of(plan)):
            raise OutOfStepError("the trainer does not hold (any more) what this update is to be compared with")
        if order.deltas and not self._compares(links.engines):
            raise OutOfStepError("the trainer is not to compare what it sends, or moves it from device to device")

    def _compares(self, links: Sequence[Link]) -> bool:
        """Whether what is sent is kept on the host, to be compared with the next."""
        wanted = self._options is not None and self._options.delta
        return wanted and all(link.device == "cpu" for link in links)

    def _links(self, order: UpdateOrder) -> _Links:
        """The groups that an order goes through at this rank; only the source's order names groups of engines."""
        engines: list[Link] = []
        for connection in order.connections:
            seat = self._engine_seats.get(connection)
            if seat is None or seat.link is None:
                raise OutOfStepError("the trainer is not in the groups that the update goes through")
            engines.append(seat.link)
            if isinstance(seat.link, StoringLink):
                seat.link.order = order
        if order.shards is None:
            return _Links(engines)
        if self._shards is None:
            raise OutOfStepError("this rank was not told what the others hold")
        shards: dict[int, Link] = {}
        for rank in self._shards.bringers if engines else (self._rank,):
            link = self._shard_seats[rank].link if rank in self._shard_seats else None
            if link is None or link.connection != shard_connection(order.shards, rank):
                raise OutOfStepError("the trainer's ranks are not in the groups that their shards go through")
            shards[rank] = link
        return _Links(engines, self._shards, shards)

    async def _read_to_send(
        self, guarded: MemorySaverGuard, options: ReadOptions, held: HeldWeights | None
    ) -> tuple[Plan, Snapshot, HostCopies]:
        try:
            return await self._sender.worker.run(self._read, options, held, keep=True)
        except BaseException:
            if guarded.active:  # it is left when its thread is free, which hangs maybe in what gives the weights
                await shielded(self._run_or_give_up(STUCK_TIMEOUT, lambda: None))
            raise

    def _on_what_stays(
        self,
        copies: HostCopies,
        function: Callable[..., T],
        order: UpdateOrder,
        links: _Links,
        plan: Plan,
        snapshot: Snapshot,
        *rest: Any,
    ) -> T:
        """Read from where the weights can be read, and see whether they have stayed what they were."""
        copies.begin()
        # Where the weights are stays what it is, also if copies of them are read on the host.
        readable = replace(snapshot, home=snapshot.device)
        if copies.are_elsewhere:
            readable = replace(readable, tensors=copies.tensors, dense=())
        result = function(order, links, plan, readable, *rest)
        copies.end()
        return result

    def _send_and_store(
        self,
        copies: HostCopies,
        order: UpdateOrder,
        links: _Links,
        plan: Plan,
        snapshot: Snapshot,
        stop: threading.Event,
        *rest: Any,
    ) -> SentChanges | None:
        """Send every bucket, and wait until stores have all."""
        sent = self._on_what_stays(copies, self._send, order, links, plan, snapshot, stop, *rest)
        for store in links.stores:
            store.complete(stop)
        return sent

    def _copy(
        self, name: str, order: UpdateOrder, links: _Links, plan: Plan, snapshot: Snapshot, stop: threading.Event
    ) -> HeldWeights:
        """This rank's part of a snapshot."""
        spare, self._spare = self._spare, None
        if snapshot.gather is not None:
            self._gathered_epoch = order.epoch
            if not links.engines:
                return hold_nothing(plan, snapshot, snapshot.gather)
        if links.plan is not None:
            copies = spare.snapshot.tensors if spare is not None and spare.arena is None else ()
            return hold_shards(plan, snapshot, copies, stop)
        if (shared := self._take_set(plan, links.engines)) is None:
            lies = spare.arena if spare is not None else None
            return hold_whole(plan, snapshot, self._arena(plan, links, snapshot, lies), stop)
        self._sets.lend(shared, name, 0)  # to itself: nobody may write to it
        return hold_whole(plan, snapshot, shared.memory, stop, shared)

    def _arena(self, plan: Plan, links: _Links, snapshot: Snapshot, spare: Tensor | None) -> Tensor:
        """Where a snapshot is to lie: where it is sent from."""
        home = snapshot.device if {link.device for link in links.engines} == {snapshot.device.type} else CPU
        if spare is not None and (spare.numel(), spare.device) == (plan.arena_nbytes, home):
            return spare
        return torch.empty(plan.arena_nbytes, dtype=torch.uint8, device=home)

    def _send(
        self,
        order: UpdateOrder,
        links: _Links,
        plan: Plan,
        snapshot: Snapshot,
        stop: threading.Event,
        witness: Witness | None,
        held: HeldWeights | None,
    ) -> SentChanges | None:
        """This rank's part of sending every bucket; None if another rank is the source."""
        is_source = bool(links.engines)
        if held is not None and held.gathers and not is_source:
            return None  # that was done when the snapshot was taken
        if snapshot.gather is not None:
            self._gathered_epoch = order.epoch
            if not is_source:
                take_part(plan, snapshot.gather)
                return None
            gathering = CallGathering(plan, snapshot.gather)
            try:
                return self._send_buckets(order, plan, gathering, links.engines, stop, witness, held)
            finally:
                if self._gathers_with_others:
                    gathering.finish()
        if links.plan is None:
            filler: Filler = OwnTensors(plan, snapshot.tensors, snapshot.dense)
            if held is not None and held.arena is not None and plan.digest == held.plan.digest:
                filler = filler if self._compares(links.engines) else LaidOut(held.arena)  # with padding, as it lies
        else:
            assert snapshot.holding is not None
            own = (snapshot.holding, snapshot.tensors)
            if not is_source:
                bring_shards(links.plan, self._rank, *own, links.shards[self._rank], self._messages, stop)
                return None
            filler = ShardGathering(links.plan, *own, links.shards, self._messages)
        return self._send_buckets(order, plan, filler, links.engines, stop, witness, held)

    def _send_buckets(
        self,
        order: UpdateOrder,
        plan: Plan,
        filler: Filler,
        links: Sequence[Link],
        stop: threading.Event,
        witness: Witness | None,
        held: HeldWeights | None,
    ) -> SentChanges:
        deltas = [link for link in links if link.connection in order.deltas]
        whole = [link for link in links if link not in deltas]
        arena = self._lay_out(order.epoch, plan, whole, held, stop)
        filler = self._repacked(order.epoch, plan, filler, whole, stop)
        if not self._compares(links):
            self._baseline = None
            return SentChanges(self._bucket_sender.send(plan, filler, links, stop, witness, arena), None, {})
        if self._baseline is None:
            self._baseline = Baseline()
        base = self._baseline
        if order.against is not None and order.against not in base.epochs_of(plan):
            raise OutOfStepError("another conductor had what this update is to be compared with dropped meanwhile")
        base.begin(plan, order.against)
        shared = self._lay_out(order.epoch, plan, deltas, None, stop)
        routes = [Route(link, False, arena if _maps(link) else None) for link in whole]
        for link in deltas:
            if isinstance(link, FolderSourceLink):
                routes += [Route(link, False), Route(link, True, beside=link.start_send_changes)]
            else:
                routes.append(Route(link, True, shared if _maps(link) else None))
        sent = self._delta_sender.send(plan, filler, base, routes, stop, witness)
        base.end(order.epoch)
        return sent

    def _lay_out(
        self, epoch: int, plan: Plan, links: Sequence[Link], held: HeldWeights | None, stop: threading.Event
    ) -> Tensor | None:
        """Where the weights are to be written, if some engines read them there; a snapshot may lie there already.

        Raises:
            OutOfStepError: There is no memory for it (any more).
            TransferError: There is no room where some are to fetch them.
            PlanError: They cannot be stored there.
        """
        for link in links:
            if isinstance(link, StoringLink):
                link.begin(plan, stop)
        lies = held.shared if held is not None and plan.digest == held.plan.digest else None
        taken = self._take_set(plan, links) if lies is None or self._is_read(lies, links) else lies
        for link in links:
            if _maps(link) and taken is not None:
                link.begin(epoch, taken, len(plan.buckets))
        return None if taken is None else taken.memory

    def _repacked(self, epoch: int, plan: Plan, filler: Filler, links: Sequence[Link], stop: threading.Event) -> Filler:
        """What fills buckets, by way of the GPU's memory if engines open that.

        Raises:
            OutOfStepError: There is no memory for it (any more).
        """
        opened = [link for link in links if isinstance(link, IpcSourceLink)]
        if not opened:
            return filler
        for link in opened:
            link.hear()  # of what was let go of
        taken = self._device_sets.take(shared_nbytes(plan))
        for link in opened:
            link.begin(epoch, taken, len(plan.buckets))
        return Repacked(filler, taken.memory, stop)

    def _is_read(self, lies: SharedSet, links: Sequence[Link]) -> bool:
        """Whether an engine holds the set a snapshot lies in: it has switched, in an attempt that then failed."""
        for link in links:
            if _maps(link):
                link.hear()
        return any(not isinstance(holder, str) for holder, _ in lies.holders)

    def _take_set(self, plan: Plan, links: Sequence[Link]) -> SharedSet | None:
        """A set for engines that map it, if there are such."""
        shared = [link for link in links if _maps(link)]
        for link in shared:
            link.hear()  # of what was let go of
        return self._sets.take(shared_nbytes(plan)) if shared else None

    def _receipt(self, order: UpdateOrder, plan: Plan, sent: SentChanges, witness: Witness | None) -> SendReceipt:
        digests = sent.digests
        if self._sent is not None and self._sent[0] == order.base_epoch:
            self._published = self._sent
        changed = np.ones(len(plan.specs), dtype=bool)
        if self._published is not None and self._published[0] == order.base_epoch:
            _, layout_digest, published = self._published
            if layout_digest == plan.layout_digest:
                changed = digests != published
        self._sent = (order.epoch, plan.layout_digest, digests)
        return SendReceipt(
            digest=plan.digest_of(digests),
            tensors=len(plan.specs),
            tensors_changed=int(changed.sum()),
            buckets=len(plan.buckets),
            nbytes=plan.nbytes,
            nbytes_changed=sum(plan.specs[index].nbytes for index in np.flatnonzero(changed)),
            checksums=witness.result() if witness else {},
            sent=sent.nbytes,
            elements=0 if self._baseline is None else self._baseline.elements,
            elements_changed=sent.differing,
        )

    def _free_device_buffers(self) -> None:
        self._bucket_sender.free_device_buffers()
        self._messages = [message for message in self._messages if message.device.type == "cpu"]
        self._device_sets.give_back()

    async def abort_send(self, epoch: int) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        self._ended_epoch = max(self._ended_epoch, epoch)
        sending = self._sending
        if sending is not None and sending.epoch == epoch:
            sending.scope.cancel()
            await sending.ended.wait()
            if not sending.begun:
                # An engine that receives by itself may be waiting for the first byte, and would go on to wait in the
                # same group: for that of the next update.
                self._sender.clean_up(self._close_links)
        # Also where the order never came: Ray drops a call that is cancelled before it has begun.
        await self._take_part_all_the_same(epoch)

    async def publish_weights(self, epoch: int, digest: str, sources: int) -> None:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            TransferError: They cannot be published, or are not there (any more).
        """
        links = [seat.link for seat in self._engine_seats.values()]
        folders = [link for link in links if isinstance(link, FolderSourceLink) and link.stores(epoch)]
        if not folders:
            raise TransferError("what is to be published was given up")
        for folder in folders:
            await asyncio.wrap_future(folder.publish(epoch, digest, sources))

    def close(self) -> None:
        """Leave the group and let the rank's threads end. Does not wait."""
        self._sender.clean_up(self._close_links)
        self._clear_sets()
        self._baseline = None
        self._sender.close()
        self._hasher.close()

    def _guard(self) -> MemorySaverGuard:
        return self._sender.guard()


def _maps(link: Link) -> TypeGuard[SharedSourceLink]:
    """Whether engines map what they get over a link."""
    return isinstance(link, SharedSourceLink) and not isinstance(link, IpcSourceLink)


class _Sending:
    def __init__(self, epoch: int, scope: anyio.CancelScope) -> None:
        self.epoch = epoch
        self.scope = scope
        self.begun = False
        self.quiet = True  # nothing touches the rank's buffers
        self.ended = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _Links:
    """The groups of one update at one rank: to engines, and by rank those that shards come or go through."""

    engines: Sequence[Link]
    plan: ShardPlan | None = None
    shards: Mapping[int, Link] = field(default_factory=dict)

    @property
    def stores(self) -> Sequence[StoringLink]:
        """Those that engines fetch from."""
        return [link for link in self.engines if isinstance(link, StoringLink)]


def shard_connection(shards: str, rank: int) -> str:
    """Name of the group through which a rank brings its shards."""
    return f"{shards}/{rank}"
