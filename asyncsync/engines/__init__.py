"""Rollout engines: what is conducted. Every kind satisfies one protocol, :class:`RolloutEngine`."""

from asyncsync.engines.base import CheckedEngine, EngineReceipt, GivingEngine, RolloutEngine
from asyncsync.engines.completion import Completion, CompletionPart, WeightVersionSpan
from asyncsync.engines.group import EngineGroup
from asyncsync.engines.module import ModuleEngine
from asyncsync.engines.remote import RemoteEngine
from asyncsync.engines.transformers import TransformersEngine

__all__ = [
    "CheckedEngine",
    "Completion",
    "CompletionPart",
    "EngineGroup",
    "EngineReceipt",
    "GivingEngine",
    "ModuleEngine",
    "RemoteEngine",
    "RolloutEngine",
    "TransformersEngine",
    "WeightVersionSpan",
]
