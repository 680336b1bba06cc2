"""Real SGLang engines, each way they can be reached, put to the checks that every engine must pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncsync.testing import CHECKS
from tests.sglang_engines import WITHOUT_RADIX_CACHE, SGLangSubject, in_actor, in_process, over_http
from tests.tiny_model import save_tiny

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(240)]

WAYS = ("in process", "tensor parallel", "ray", "http")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def subject(request: Any, tiny: Path) -> AsyncIterator[SGLangSubject]:
    way: str = request.param
    if way == "ray":
        request.getfixturevalue("ray_cluster")
    async with AsyncExitStack() as stack:
        if way == "in process":
            engine = in_process(tiny)
        elif way == "tensor parallel":
            engine = in_process(tiny, tp=2, **WITHOUT_RADIX_CACHE)
        elif way == "ray":
            engine = in_actor(tiny, **WITHOUT_RADIX_CACHE)
        else:
            engine = over_http(tiny)
        yield await stack.enter_async_context(engine)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(subject: SGLangSubject, check: str) -> None:
    await CHECKS[check](subject)
