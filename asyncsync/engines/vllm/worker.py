"""asyncsync inside vLLM's worker processes: the ``asyncsync`` weight-transfer backend.

vLLM makes one :class:`AsyncSyncTransferEngine` in each worker. ``init_weight_transfer_engine`` gives it an address;
from then on a thread of its own answers whoever conducts updates there (:mod:`~asyncsync.engines.channel`), whatever
the engine is doing. New weights are received into host memory while the engine generates. vLLM's own calls come only
when they are loaded, in one ``update_weights``: the layers are on the meta device within that call and never between
two, so no step of the engine can meet them there, and an engine whose update failed can go on, or be updated again.

Threads: vLLM's main thread loads; the control thread answers; one worker thread joins groups, receives and hashes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncsync.buckets import Bucket, Plan
from asyncsync.digests import StreamingDigests
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.channel import Hello, answer_calls
from asyncsync.engines.receiving import Receiver, Session
from asyncsync.engines.record import WeightRecord, all_names
from asyncsync.errors import OutOfStepError
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.packing import arena_views, hash_bucket
from asyncsync.threads import WorkerThread

_log = logging.getLogger("asyncsync")

STALE_PREFIXES = (
    "its prefix cache would serve what the old weights computed to new requests: "
    'start it with enable_prefix_caching=False, or choose "recompute"'
)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the conductor listens."""

    address: str
    port: int
    token: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which of the updates that were received is to be loaded."""

    epoch: int


class AsyncSyncTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side of the backend, in one worker: its methods are called by vLLM, on its main thread."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        self._rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._ranks = parallel.data_parallel_size * parallel.world_size
        prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._end = WorkerRank(model, device, prefix_caching=prefixes)
        self._control: asyncio.AbstractEventLoop | None = None
        self._answering: set[Future[None]] = set()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to whoever conducts; does not wait for it. Those that were connected before are not disturbed."""
        if self._control is None:
            self._control = asyncio.new_event_loop()
            threading.Thread(target=self._control.run_forever, name="asyncsync-control", daemon=True).start()
        answering = asyncio.run_coroutine_threadsafe(self._answer(init_info), self._control)
        self._answering.add(answering)  # the loop itself would let the garbage collector have it
        answering.add_done_callback(self._answering.discard)

    async def _answer(self, init: InitInfo) -> None:
        hello = Hello(token=init.token, rank=self._rank, ranks=self._ranks)
        try:
            await answer_calls(self._end, hello, init.address, init.port, self._end.reached_by)
        except OSError as error:
            _log.warning("asyncsync cannot be reached at %s:%d: %s", init.address, init.port, error)

    def start_weight_update(self) -> None:
        """Nothing: the layers are made ready where they are loaded."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what was received in an epoch."""
        self._end.load(update_info.epoch, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing: the layers are complete already."""

    def shutdown(self) -> None:
        """Hang up."""
        if self._control is not None:
            asyncio.run_coroutine_threadsafe(_end_loop(), self._control)
            self._control = None


async def _end_loop() -> None:
    """Cancel all that runs on this loop, and stop it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()


class WorkerRank:
    """Satisfies :class:`~asyncsync.engines.base.WeightReceiver` for a worker's part of a model.

    Args:
        model: What the worker serves.
        device: Where.
        prefix_caching: Whether the engine keeps what prefixes of requests came to.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, prefix_caching: bool) -> None:
        self._model = model
        self._device = device
        self._prefix_caching = prefix_caching
        self._address = "127.0.0.1"
        self._worker = WorkerThread("asyncsync-receiver")
        self._record = WeightRecord()
        self._receiver = Receiver(self._record, self._worker, lambda: self._address)
        self._loading = threading.Lock()
        self._layout: tuple[Plan, bool] | None = None
        self._left_out: frozenset[str] = frozenset()
        self._store = HostStore(pinned=device.type == "cuda")

    def reached_by(self, address: str) -> None:
        """Note the address by which others reach this process."""
        self._address = address

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`."""
        policies: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
        cannot: dict[Policy, str] = {"continue": STALE_PREFIXES} if self._prefix_caching else {}
        return self._record.status(
            device=self._device.type,
            staged=True,
            policies=tuple(policy for policy in policies if policy not in cannot),
            cannot=cannot,
            connections=self._receiver.connections,
            plan_digest=self._layout[0].digest if self._layout else None,
            partial=self._layout is not None and self._layout[1],
        )

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        self._layout = await self._worker.run(self._check, layout), layout.partial

    def _check(self, layout: Layout) -> Plan:
        from asyncsync.engines.vllm.check import check_layout  # here: of vLLM's insides, it needs the most

        plan = layout.agreed_plan()
        self._left_out = check_layout(self._model, plan, partial=layout.partial)
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
        plan = self._layout[0] if self._layout else None
        return EngineReceipt(digest=await self._receiver.receive(order, plan, self._loader_for))

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`. A load that has begun comes to its end."""
        self._record.end(epoch)
        await self._worker.run(self._wait_for_load)
        await self._receiver.abort()
        self._record.compare(published, all_names(self._layout[0] if self._layout else None))
        return await self.describe_engine()

    def _wait_for_load(self) -> None:
        with self._loading:
            pass

    def _loader_for(self, device: str) -> HostStore:
        assert self._layout is not None
        self._store.take_up(self._layout[0], device)
        return self._store

    def load(self, epoch: int, model_config: Any) -> None:
        """Load what was received into the model. On vLLM's main thread, between two steps of the engine.

        Raises:
            EngineError: Nothing was received in that epoch (any more).
            OutOfStepError: The epoch was aborted.
            Exception: What the model raised; the engine is tainted then.
        """
        with self._loading:
            if epoch <= self._record.ended_epoch:
                raise OutOfStepError(f"epoch {epoch} is over: it was aborted")
            session = self._receiver.received(epoch)
            self._receiver.take(session)
            self._load(session, model_config)

    def _load(self, session: Session, model_config: Any) -> None:
        names = all_names(session.plan)
        try:
            initialize_layerwise_reload(self._model)
            try:
                with _complete_or_not():
                    self._model.load_weights(self._store.named_tensors(self._left_out))  # type: ignore[operator]
            finally:
                finalize_layerwise_reload(self._model, model_config)  # no layer stays on the meta device
        except BaseException:
            self._record.taint(f"update {session.order.version} could not be loaded", names)
            raise
        self._record.committed(session.order, names, session.digest)


class HostStore:
    """A whole set of weights in host memory: where buckets are received, and what is loaded from.

    Kept from one update to the next. Satisfies :class:`~asyncsync.engines.loading.Loader`.

    Args:
        pinned: Whether the memory is to be page-locked, so that a GPU copies from it fast.
    """

    touched = False

    def __init__(self, *, pinned: bool) -> None:
        self.device = "cpu"
        self._pinned = pinned
        self._plan: Plan | None = None
        self._memory: Tensor | None = None
        self._bounce: list[Tensor] = []
        self._digests = StreamingDigests(0)

    @property
    def in_flight(self) -> int:
        """How many buckets may be on their way at the same time."""
        return 8 if self.device == "cpu" else 2

    def take_up(self, plan: Plan, device: str) -> None:
        """Prepare for a layout, whose buckets arrive on this type of device."""
        if plan is not self._plan or device != self.device:
            self.discard()
        self._plan, self.device = plan, device

    def begin(self) -> None:
        """Get ready for an update."""
        assert self._plan is not None
        if self._memory is None:
            self._memory = torch.empty(self._plan.arena_nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        if self.device != "cpu" and not self._bounce:
            size = self._plan.largest_bucket
            self._bounce = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._digests = StreamingDigests(len(self._plan.specs))

    def target(self, bucket: Bucket) -> Tensor:
        """Where a bucket is received into."""
        return self._bounce[bucket.index % 2][: bucket.nbytes] if self._bounce else self._place(bucket)

    def _place(self, bucket: Bucket) -> Tensor:
        assert self._memory is not None
        return self._memory[bucket.start : bucket.stop]

    def take(self, bucket: Bucket, buffer: Tensor) -> None:
        """Take a bucket that has arrived."""
        assert self._plan is not None
        if self._bounce:
            self._place(bucket).copy_(buffer)
        hash_bucket(self._plan, bucket, self._place(bucket), self._digests)

    def digest(self) -> str:
        """Digest of all that was taken."""
        assert self._plan is not None
        return self._plan.digest_of(self._digests.result())

    def named_tensors(self, left_out: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, under each of its names but these."""
        assert self._plan is not None
        assert self._memory is not None
        for spec, view in zip(self._plan.specs, arena_views(self._plan, self._memory), strict=True):
            for name in spec.names:
                if name not in left_out:
                    yield name, view

    def commit(self) -> None:
        """Nothing: what is loaded from here is copied."""

    def discard(self) -> None:
        """Give up the memory: a transfer that was abandoned may still write to it."""
        self._memory, self._bounce = None, []


def _complete_or_not() -> Any:
    """Have models with prediction heads load without them: those are another model's part."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    return disable_mtp_completeness_check()
