"""Real vLLM engines, each way they can be reached, put to the checks that every engine must pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncsync.testing import CHECKS
from tests.tiny_model import save_tiny
from tests.vllm_engines import VLLMSubject, behind_http, in_actor, in_process

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

WAYS = ("in process", "tensor parallel", "ray", "http")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def subject(request: Any, tiny: Path) -> AsyncIterator[VLLMSubject]:
    way: str = request.param
    if way == "ray":
        request.getfixturevalue("ray_cluster")
    async with AsyncExitStack() as stack:
        if way == "in process":
            engine = in_process(tiny, prefix_cache=True)
        elif way == "tensor parallel":
            engine = in_process(tiny, ranks=2, prefix_cache=False)
        else:
            engine = in_actor(tiny) if way == "ray" else behind_http(tiny)
        yield await stack.enter_async_context(engine)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(subject: VLLMSubject, check: str) -> None:
    await CHECKS[check](subject)
