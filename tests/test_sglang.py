"""Real SGLang engines, each way they can be reached, put to the checks that every engine must pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import asyncsync.testing
from asyncsync import WeightSynchronizer
from asyncsync.testing import CHECKS, failed, serves, step
from tests.sglang_engines import WITHOUT_RADIX_CACHE, SGLangSubject, in_actor, in_process, over_http
from tests.tiny_model import save_tiny

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

SLOW_ON_TWO_CORES = {"cancellation", "failing calls"}
"""Checks that take an engine for paused if it does not answer in time: two ranks and all else on two cores are slow."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["in an actor", "over http"])
async def subject(request: Any, tiny: Path, ray_cluster: None) -> AsyncIterator[SGLangSubject]:
    # In the actor it is the client for an engine of one's own process that makes the calls.
    engine = in_actor(tiny, **WITHOUT_RADIX_CACHE) if request.param == "in an actor" else over_http(tiny)
    async with engine as subject:
        yield subject


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_ranks(tiny: Path) -> AsyncIterator[SGLangSubject]:
    async with in_process(tiny, tp=2) as subject:
        yield subject


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(subject: SGLangSubject, check: str) -> None:
    await CHECKS[check](subject)


@pytest.mark.parametrize("check", sorted(set(CHECKS) - SLOW_ON_TWO_CORES))
@pytest.mark.asyncio(loop_scope="module")
async def test_tensor_parallel_in_process(two_ranks: SGLangSubject, check: str) -> None:
    await CHECKS[check](two_ranks)


async def is_woken_and_put_back(subject: SGLangSubject) -> None:
    """On a CPU SGLang has nothing to release: this shows that it takes these calls, in this order."""
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
        for seed, tags in enumerate((None, ["kv_cache"], ["weights"], None), start=70):
            step(subject.trainer, seed)
            await subject.engine.release_memory_occupation(tags)
            await synchronizer.update_weights()
            assert (await subject.engine.describe_engine()).released == ()
            await serves(subject, subject.trainer, f"after {tags or 'all'} was released")
        await subject.engine.release_memory_occupation()
    failing = asyncsync.testing._Failing(subject.trainer, after=2)
    async with WeightSynchronizer(failing, [subject.engine], bucket_size=1024) as synchronizer:
        assert "planned" in str(await failed(synchronizer.update_weights()))
    status = await subject.engine.describe_engine()
    assert status.released == ("cuda_graph", "kv_cache", "weights")
    assert status.weight_version is None
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after it was put back to sleep")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_sleeps_is_woken_and_put_back_if_the_update_fails(subject: SGLangSubject) -> None:
    await is_woken_and_put_back(subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_ranks_that_sleep_are_woken_and_put_back_if_the_update_fails(two_ranks: SGLangSubject) -> None:
    await is_woken_and_put_back(two_ranks)
