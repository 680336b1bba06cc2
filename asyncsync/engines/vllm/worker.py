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

from asyncsync.buckets import Plan
from asyncsync.engines.channel import Hello, answer_calls
from asyncsync.engines.vllm.rank import WorkerRank

_log = logging.getLogger("asyncsync")


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
        self._end = WorkerRank(
            self._check, self._load, device=device.type, prefix_caching=prefixes, released=released_memory
        )
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
        self._end.load(update_info.epoch)

    def _check(self, plan: Plan, partial: bool) -> frozenset[str]:
        from asyncsync.engines.vllm.check import check_layout  # here: of vLLM's insides, it needs the most

        stages = self.parallel_config.pipeline_parallel_size
        return check_layout(self.model, plan, partial=partial, stages=stages)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            with _complete_or_not():
                self.model.load_weights(weights)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)  # no layer stays on the meta device

    def finish_weight_update(self) -> None:
        """Nothing: the layers are complete already."""

    def shutdown(self) -> None:
        """Hang up."""
        if self._control is not None:
            asyncio.run_coroutine_threadsafe(_end_loop(), self._control)
            self._control = None


def released_memory() -> dict[str, bool]:
    """What sleep mode has taken away of this process's device memory (``device_allocator/cumem.py``, 0.32.0).

    Returns:
        By vLLM's tag, whether a copy of all of it is kept in host memory: of weights that is so at level 1 only.
    """
    try:
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.instance
        # Copied in one go: this may be asked while vLLM's main thread allocates.
        asleep = (
            [] if allocator is None else [each for each in list(allocator.pointer_to_data.values()) if each.is_asleep]
        )
        released: dict[str, bool] = {}
        for each in asleep:
            released[each.tag] = released.get(each.tag, True) and each.cpu_backup_tensor is not None
        return released
    except (ImportError, AttributeError):
        return {}  # another version or device: it cannot be told here


async def _end_loop() -> None:
    """Cancel all that runs on this loop, and stop it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _complete_or_not() -> Any:
    """Have models with prediction heads load without them: those are another model's part."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    return disable_mtp_completeness_check()
