"""Real vLLM engines put to the checks that every engine must pass: tensor parallel, and behind HTTP.

One in this process is put to them in ``test_vllm_inside``, and one in a Ray actor in ``test_vllm_fleet``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncsync import WeightSynchronizer
from asyncsync.testing import CHECKS, failed, serves
from tests.tiny_model import save_tiny
from tests.vllm_engines import VLLMSubject, behind_http, in_process

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tensor parallel", "http"])
async def subject(request: Any, tiny: Path) -> AsyncIterator[VLLMSubject]:
    parallel = request.param == "tensor parallel"
    async with in_process(tiny, ranks=2, prefix_cache=False) if parallel else behind_http(tiny) as subject:
        yield subject


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(subject: VLLMSubject, check: str) -> None:
    await CHECKS[check](subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_vllm_takes_the_calls_by_which_an_engine_sleeps_and_wakes(subject: VLLMSubject) -> None:
    """On a CPU its workers ignore them. What its executor notes, and when the scheduler goes on, is as on a GPU."""
    client = subject.engine._client
    await client.sleep(1)
    await client.wake_up(["weights"])
    assert await client.is_sleeping(), "in part"
    await client.sleep(1)  # back again
    await client.wake_up(["weights"])
    await client.wake_up(["weights"])  # a second time: it is ignored
    assert await client.is_sleeping()
    await client.wake_up(None)
    assert not await client.is_sleeping(), "the scheduler goes on by itself"
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after it was woken up")
        await client.sleep(1)
        assert "somebody else has paused it" in str(await failed(synchronizer.update_weights())), (
            "all its memory is there"
        )
        await client.wake_up(None)
