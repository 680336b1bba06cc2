"""Trainers of several ranks: real actors, real meshes, bytes compared with what torch puts together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import asyncsync
from asyncsync import WeightSynchronizer
from tests.sample import contents
from tests.sharded import Mixed, RemoteShardedTrainer, become, every

pytestmark = [pytest.mark.asyncio, pytest.mark.ray]

CASES = [
    ("fsdp", 2),
    ("tensor parallel", 2),
    ("replicated", 2),
    ("fsdp", 4),
    ("fsdp and tensor parallel", 4),
    ("hsdp", 4),
]


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[Any]]:
    made = [RemoteShardedTrainer.remote(rank) for rank in range(4)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.parametrize(("kind", "size"), CASES, ids=[f"{kind} {size}" for kind, size in CASES])
async def test_engines_get_what_the_ranks_hold_together(
    actors: list[Any], kind: str, size: int, tmp_path: Path
) -> None:
    ranks = actors[:size]
    await become(ranks, kind, tmp_path)
    for bucket_size in (1, 256, 1 << 20):
        engines = [asyncsync.ModuleEngine(Mixed(7)), asyncsync.ModuleEngine(Mixed(8), staged=False)]
        async with WeightSynchronizer(ranks, engines, bucket_size=bucket_size) as synchronizer:
            for _ in range(3):
                await every(ranks, "step")
                update = await synchronizer.update_weights()
                assert update.tensors_changed >= update.tensors - 1
                whole, *others = await every(ranks, "whole")
                assert all(other == whole for other in others)
                assert [contents(engine.module) for engine in engines] == [whole, whole]
