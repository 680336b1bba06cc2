"""asyncsync: the asyncio-native weight synchronizer for RL post-training.

A weight update is one awaited transaction: see :class:`WeightSynchronizer`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from asyncsync.cluster import remote
from asyncsync.engines import (
    CheckedEngine,
    Completion,
    CompletionPart,
    EngineGroup,
    EngineReceipt,
    GivingEngine,
    ModuleEngine,
    RolloutEngine,
    TransformersEngine,
    WeightVersionSpan,
)
from asyncsync.errors import (
    AsyncSyncError,
    ClosedError,
    ConnectError,
    EngineError,
    EngineErrorGroup,
    EventLoopError,
    LinkLostError,
    LockError,
    LockTimeoutError,
    MembershipError,
    MemorySaverError,
    NotReadyError,
    OutOfStepError,
    PlanError,
    TaintedEngineError,
    TrainerError,
    TransferError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from asyncsync.guard import MemorySaverGuard, memory_saver_guard
from asyncsync.lock import RolloutLock
from asyncsync.masters import MasterWeights
from asyncsync.memory_saver.status import MemorySaverStatus, memory_saver_status
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.reading import PublishedWeights, read_weights
from asyncsync.report import EngineOutcome, EngineState, EngineStatistics, SynchronizerStatistics, WeightUpdate
from asyncsync.shared_lock import SharedRolloutLock
from asyncsync.started import StartedUpdate
from asyncsync.synchronizer import WeightSynchronizer
from asyncsync.trainer import TrainerRank
from asyncsync.weights import GatheredWeights

if TYPE_CHECKING:
    from asyncsync.engines.sglang import SGLangActor, SGLangEngine
    from asyncsync.engines.vllm import VLLMActor, VLLMEngine

_ON_FIRST_USE = {
    "SGLangActor": "asyncsync.engines.sglang",
    "SGLangEngine": "asyncsync.engines.sglang",
    "VLLMActor": "asyncsync.engines.vllm",
    "VLLMEngine": "asyncsync.engines.vllm",
}
"""What needs more than the library itself does, and where it is."""


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncSyncError",
    "CheckedEngine",
    "ClosedError",
    "Completion",
    "CompletionPart",
    "ConnectError",
    "Contacts",
    "EngineError",
    "EngineErrorGroup",
    "EngineGroup",
    "EngineOutcome",
    "EngineReceipt",
    "EngineState",
    "EngineStatistics",
    "EngineStatus",
    "EventLoopError",
    "GatheredWeights",
    "GivingEngine",
    "Layout",
    "LinkLostError",
    "LockError",
    "LockTimeoutError",
    "MasterWeights",
    "MembershipError",
    "MemorySaverError",
    "MemorySaverGuard",
    "MemorySaverStatus",
    "ModuleEngine",
    "NotReadyError",
    "OutOfStepError",
    "PlanError",
    "Policy",
    "PublishedWeights",
    "Rendezvous",
    "RolloutEngine",
    "RolloutLock",
    "SGLangActor",
    "SGLangEngine",
    "SharedRolloutLock",
    "StartedUpdate",
    "SynchronizerStatistics",
    "TaintedEngineError",
    "TrainerError",
    "TrainerRank",
    "TransferError",
    "TransformersEngine",
    "UpdateOrder",
    "VLLMActor",
    "VLLMEngine",
    "WeightSynchronizer",
    "WeightUpdate",
    "WeightUpdateError",
    "WeightUpdateTimeoutError",
    "WeightVersionSpan",
    "memory_saver_guard",
    "memory_saver_status",
    "read_weights",
    "remote",
]
