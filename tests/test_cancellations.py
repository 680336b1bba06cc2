"""Updates that are cancelled at random moments, on real actors: nothing is left behind, and the next one works."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import psutil
import pytest
import ray

from asyncsync import SharedRolloutLock, WeightSynchronizer
from tests.actors import Engine, Flat
from tests.sample import fingerprint
from tests.test_faults import set_weights

pytestmark = [pytest.mark.asyncio, pytest.mark.faults]

COUNT = 200
WEIGHTS = partial(Flat, 16, (2**16,))
BUCKET = 2**18
SPARE = {"threads": 6, "files": 6}
"""How many more there may be: pools that fill as they are needed. What is left behind once an update is far more."""

MEMORY = 40 * 2**20
"""Bytes that a process may have grown by: one that kept a single bucket of each update would by 50 MiB."""


@pytest.fixture(params=[True, False], ids=["staged", "in place"])
def engines(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    made = [Engine.remote(WEIGHTS, staged=request.param) for _ in range(2)]
    yield made
    for engine in made:
        ray.kill(engine)


async def held(engines: list[Any], synchronizer: WeightSynchronizer) -> dict[str, list[int]]:
    """What this process and the engines hold of all that could be left behind."""
    gc.collect()
    own = synchronizer._own_trainer
    assert own is not None
    return {
        "threads": [threading.active_count(), *[await engine.threads.remote() for engine in engines]],
        "files": [psutil.Process().num_fds(), *[await engine.open_files.remote() for engine in engines]],
        "tasks": [len(asyncio.all_tasks())],
        "groups": [
            len(own._engine_seats),
            *[len((await engine.describe_engine.remote()).connections) for engine in engines],
        ],
        "shared memory": [len([name for name in os.listdir("/dev/shm") if "asyncsync" in name or "torch" in name])],
    }


async def more_than(
    before: dict[str, list[int]], engines: list[Any], synchronizer: WeightSynchronizer
) -> dict[str, tuple[list[int], list[int]]]:
    """Of what more is held than was before."""
    now = await held(engines, synchronizer)
    return {
        kind: (before[kind], counts)
        for kind, counts in now.items()
        if any(more > then + SPARE.get(kind, 0) for more, then in zip(counts, before[kind], strict=True))
    }


async def memory(engines: list[Any]) -> list[int]:
    return [psutil.Process().memory_info().rss, *[await engine.resident.remote() for engine in engines]]


async def cancelled_natively(synchronizer: WeightSynchronizer, seconds: float) -> None:
    update = asyncio.create_task(synchronizer.update_weights())
    await asyncio.wait([update], timeout=seconds)
    update.cancel()
    await asyncio.wait([update])


async def cancelled_by_a_scope(synchronizer: WeightSynchronizer, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await synchronizer.update_weights()


@pytest.mark.timeout(400)
async def test_updates_cancelled_at_random_moments_leave_nothing_behind(engines: list[Any]) -> None:
    chance, trainer = random.Random(11), WEIGHTS(fill=0.0)
    lock = await SharedRolloutLock.create()
    async with WeightSynchronizer(trainer, engines, timeout=60, bucket_size=BUCKET, lock=lock) as synchronizer:
        await synchronizer.update_weights()
        usual = min([(await synchronizer.update_weights()).seconds["total"] for _ in range(5)])
        before, memory_before = await held(engines, synchronizer), await memory(engines)
        for number in range(1, COUNT + 1):
            set_weights(trainer, number)
            cancel = chance.choice([cancelled_natively, cancelled_by_a_scope])
            await cancel(synchronizer, chance.uniform(0.0, usual))
            if number % 10 == 0:
                version = (await synchronizer.update_weights()).version
                expected = (version, fingerprint(WEIGHTS(fill=float(number))))
                assert [await engine.read.remote() for engine in engines] == [expected] * 2
                assert str(await lock.status()) == "free"
        assert synchronizer.statistics().cancelled > COUNT / 4, "most were over before"
        # Operations that were given up end by themselves, when their peer has gone.
        deadline = time.monotonic() + 100
        while left := await more_than(before, engines, synchronizer):
            assert time.monotonic() < deadline, left
            await anyio.sleep(0.1)
        for now, then in zip(await memory(engines), memory_before, strict=True):
            assert now < then + MEMORY
    await lock.aclose()
