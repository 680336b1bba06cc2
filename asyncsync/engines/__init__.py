"""Rollout engines: what is conducted. Every kind satisfies one protocol, :class:`RolloutEngine`."""

from asyncsync.engines.base import CheckedEngine, EngineReceipt, GivingEngine, RolloutEngine
from asyncsync.engines.group import EngineGroup
from asyncsync.engines.module import ModuleEngine
from asyncsync.engines.remote import RemoteEngine

__all__ = [
    "CheckedEngine",
    "EngineGroup",
    "EngineReceipt",
    "GivingEngine",
    "ModuleEngine",
    "RemoteEngine",
    "RolloutEngine",
]
