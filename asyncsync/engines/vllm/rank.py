"""What an engine's worker process does in an update, whatever loads there: it receives beside what is served.

Threads: a control thread answers calls; one worker thread joins groups, receives, hashes and checks; whoever may load
calls :meth:`WorkerRank.load`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

from asyncsync.buckets import Plan
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.host_store import HostStore
from asyncsync.engines.receiving import Receiver
from asyncsync.engines.record import WeightRecord, all_names
from asyncsync.engines.vllm.pauses import PauseNote
from asyncsync.errors import EngineError, OutOfStepError
from asyncsync.messages import WEIGHTS, Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.threads import RenewedThread
from asyncsync.transports.memory_files import this_node

Check: TypeAlias = Callable[[Plan, bool], frozenset[str]]
Load: TypeAlias = Callable[[Iterator[tuple[str, Tensor]]], None]

STALE_PREFIXES = (
    "its prefix cache would serve what the old weights computed to new requests: "
    'start it with enable_prefix_caching=False, or choose "recompute"'
)


class WorkerRank:
    """Satisfies :class:`~asyncsync.engines.base.WeightReceiver` for a worker's part of a model.

    Args:
        check: Compares a layout with the model, and gives names of tied tensors that are to be left out in loading.
        load: Loads a whole set of weights.
        device: Device type of the model.
        prefix_caching: Whether the engine keeps what prefixes of requests came to.
        released: Tells which memory of the engine has been taken away, by tag, and whether a copy of it is kept.
    """

    def __init__(
        self,
        check: Check,
        load: Load,
        *,
        device: str,
        prefix_caching: bool,
        released: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._check_layout = check
        self._load_weights = load
        self._released = released
        self._lost_weights = False  # they were dropped as the engine slept, and not all were brought anew
        self._device = device
        self._prefix_caching = prefix_caching
        self._address = "127.0.0.1"
        self._worker = RenewedThread("asyncsync-receiver")
        self._record = WeightRecord()
        self._pause = PauseNote(self._record)
        self._receiver = Receiver(self._record, self._worker, lambda: self._address)
        self._loading = threading.Lock()
        self._layout: tuple[Plan, bool] | None = None
        self._left_out: frozenset[str] = frozenset()
        self._store = HostStore(pinned=device == "cuda")

    def reached_by(self, address: str) -> None:
        """Note the address by which others reach this process."""
        self._address = address

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`."""
        released = await self.released_memory()
        policies: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
        cannot: dict[Policy, str] = {"continue": STALE_PREFIXES} if self._prefix_caching else {}
        return self._record.status(
            device=self._device,
            node=this_node(),
            stores=("folder",),  # nothing but msgpack comes over its line: no references to objects
            staged=True,
            policies=tuple(policy for policy in policies if policy not in cannot),
            cannot=cannot,
            connections=self._receiver.connections,
            plan_digest=self._layout[0].digest if self._layout else None,
            partial=self._layout is not None and self._layout[1],
            paused=self._pause.paused,
            released=tuple(sorted(released)),
            base_epoch=self._store.base_epoch,
            no_deltas=None,
        )

    async def released_memory(self) -> Mapping[str, bool]:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        released = self._released()
        if released.get(WEIGHTS) is False:
            self._lost_weights = True
            self._record.lose(all_names(self._layout[0] if self._layout else None))
        return released

    async def note_pause(self, epoch: int, paused: bool) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`. Noted here: who comes later must be able to tell."""
        self._pause.note(epoch, paused)

    async def check_pause(self, epoch: int) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        self._pause.check(epoch)

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        self._layout = await self._worker.run(self._check, layout), layout.partial
        self._store.base_epoch = None

    def _check(self, layout: Layout) -> Plan:
        plan = layout.agreed_plan()
        self._left_out = self._check_layout(plan, layout.partial)
        return plan

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        return await self._receiver.open_group(rendezvous)

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        await self._receiver.join_group(connection, contacts)

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        await self._receiver.leave_group(connection)

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        plan, partial = self._layout if self._layout else (None, False)
        self._record.check_new(order)
        await self.released_memory()
        if self._lost_weights and partial:
            raise EngineError(
                "its weights were dropped as it slept (level 2), and this update brings only some of them "
                "(partial=True): let it sleep at level 1, or send all"
            )
        if order.against is not None and order.against != self._store.base_epoch:
            raise OutOfStepError("this engine does not hold (any more) what the update was compared with")
        await self._worker.run(self._overtake, order.epoch)
        digest = await self._receiver.receive(order, plan, self._loader_for)
        self._store.base_epoch = order.epoch
        return EngineReceipt(digest=digest)

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`. A load that has begun comes to its end."""
        self._record.end(epoch)
        await self._worker.run(self._wait_for_load)
        await self._receiver.abort()
        self._record.compare(epoch, published, all_names(self._layout[0] if self._layout else None))
        return await self.describe_engine()

    def _wait_for_load(self) -> None:
        with self._loading:
            pass

    def _overtake(self, epoch: int) -> None:
        """Have older updates be over: what is received now lies where they would be loaded from."""
        with self._loading:
            self._record.see(epoch)

    def _loader_for(self, device: str) -> HostStore:
        assert self._layout is not None
        self._store.take_up(self._layout[0], device)
        return self._store

    def load(self, epoch: int) -> None:
        """Load what was received in an epoch. On the thread that may load, between two steps of the engine.

        Raises:
            EngineError: Nothing was received then (any more), or the engine is asleep.
            OutOfStepError: The epoch was aborted.
            Exception: What the model raised; the engine is tainted then.
        """
        with self._loading:
            if epoch <= self._record.ended_epoch or epoch < self._record.epoch:
                raise OutOfStepError(f"epoch {epoch} is over: it was aborted, loaded, or overtaken")
            session = self._receiver.received(epoch)
            if WEIGHTS in self._released():  # put to sleep since it was woken, or since anybody has looked
                raise EngineError("the engine is asleep: wake it up before the update")
            names = all_names(session.plan)
            with self._receiver.taking(session):
                try:
                    self._load_weights(self._store.named_tensors(self._left_out))
                except BaseException:
                    self._record.taint(f"update {session.order.version} could not be loaded", names)
                    raise
                self._lost_weights = self._lost_weights and self._layout is not None and self._layout[1]
                self._record.committed(session.order, names, session.digest)
