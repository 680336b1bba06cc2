"""Real vLLM engines put to the checks that every engine must pass: tensor parallel, and behind HTTP.

One in this process is put to them in ``test_vllm_inside``, and one in a Ray actor in ``test_vllm_fleet``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncsync.testing import CHECKS
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
