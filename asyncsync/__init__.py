"""asyncsync: the asyncio-native weight synchronizer for RL post-training.

A weight update is one awaited transaction: see :class:`WeightSynchronizer`.
"""

from asyncsync.cluster import remote
from asyncsync.engines import EngineReceipt, ModuleEngine, RolloutEngine
from asyncsync.errors import (
    AsyncSyncError,
    ClosedError,
    ConnectError,
    EngineError,
    EngineErrorGroup,
    EventLoopError,
    LockError,
    LockTimeoutError,
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

__all__ = [
    "AsyncSyncError",
    "ClosedError",
    "ConnectError",
    "Contacts",
    "EngineError",
    "EngineErrorGroup",
    "EngineOutcome",
    "EngineReceipt",
    "EngineState",
    "EngineStatus",
    "EventLoopError",
    "Layout",
    "LockError",
    "LockTimeoutError",
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
    "UpdateOrder",
    "WeightSynchronizer",
    "WeightUpdate",
    "WeightUpdateError",
    "WeightUpdateTimeoutError",
    "memory_saver_guard",
    "remote",
]
