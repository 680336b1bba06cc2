"""asyncsync: the asyncio-native weight synchronizer for RL post-training.

A weight update is one awaited transaction: see :class:`WeightSynchronizer`.
"""

from asyncsync.cluster import remote
from asyncsync.engines import (
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
from asyncsync.guard import memory_saver_guard
from asyncsync.lock import RolloutLock
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.report import EngineOutcome, EngineState, WeightUpdate
from asyncsync.shared_lock import SharedRolloutLock
from asyncsync.synchronizer import WeightSynchronizer
from asyncsync.trainer import TrainerRank
from asyncsync.weights import GatheredWeights

__all__ = [
    "AsyncSyncError",
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
    "EngineStatus",
    "EventLoopError",
    "GatheredWeights",
    "GivingEngine",
    "Layout",
    "LinkLostError",
    "LockError",
    "LockTimeoutError",
    "MembershipError",
    "MemorySaverError",
    "ModuleEngine",
    "NotReadyError",
    "OutOfStepError",
    "PlanError",
    "Policy",
    "Rendezvous",
    "RolloutEngine",
    "RolloutLock",
    "SharedRolloutLock",
    "TaintedEngineError",
    "TrainerError",
    "TrainerRank",
    "TransferError",
    "TransformersEngine",
    "UpdateOrder",
    "WeightSynchronizer",
    "WeightUpdate",
    "WeightUpdateError",
    "WeightUpdateTimeoutError",
    "WeightVersionSpan",
    "memory_saver_guard",
    "remote",
]
