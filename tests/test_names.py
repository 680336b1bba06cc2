"""Classes of users that include ours: their own names, whatever they are, meet none of the library's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

import asyncsync
from asyncsync import WeightSynchronizer
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.module import memory_of
from asyncsync.engines.serving import ServedModule
from asyncsync.rank_worker import RankWorker
from tests.sample import contents


def inner_names(kind: type, instance: object) -> set[str]:
    """Every name that a part of the library's own inside has, state and methods."""
    methods = {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("__")}
    return (methods | set(vars(instance))) - {"module"}


def with_names(base: Any, names: set[str]) -> Any:
    """A class like a user's, that has attributes of all these names."""
    return type("Users", (base,), dict.fromkeys(names, "mine"))


@pytest.mark.asyncio
async def test_a_users_class_may_use_every_name_that_the_library_uses_inside() -> None:
    served = nn.Linear(2, 2)
    other = asyncsync.ModuleEngine(served)
    inside = ServedModule(
        lambda: served, staged=True, generations=GenerationGate(), flush=other.flush_cache, memory=memory_of(other)
    )
    protocol = {name for name in dir(asyncsync.ModuleEngine) if not name.startswith("_")}
    engine = with_names(asyncsync.ModuleEngine, inner_names(ServedModule, inside) - protocol)(nn.Linear(2, 2))
    protocol = {name for name in dir(asyncsync.TrainerRank) if not name.startswith("_")}
    model = nn.Linear(2, 2)
    trainer = with_names(asyncsync.TrainerRank, inner_names(RankWorker, RankWorker(model)) - protocol)(model)
    assert engine._binding == trainer._rank == engine._loader == trainer._holdings == "mine"
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        for version in (1, 2):
            await synchronizer.update_weights()
            assert engine.weight_version == version
    assert contents(engine.module) == contents(model)
    assert engine._binding == "mine"
