"""The examples that need no model run as they are."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.asyncio, pytest.mark.faults]

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("rollout_loop.py", "WeightUpdate(version=6, 2/2 engines"),
        ("surviving_loop.py", "7 versions, and 3 engines in the end"),
        ("two_sites.py", "the other site serves version 3: "),
    ],
)
async def test_an_example(name: str, last: str) -> None:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), stdout=pipe, stderr=pipe, env=environment
    )
    printed, complained = await program.communicate()
    assert program.returncode == 0, complained.decode()
    assert printed.decode().splitlines()[-1].startswith(last)
