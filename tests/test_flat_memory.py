"""Two hundred updates, over each transport: memory, files and threads stay what they are."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines import change, holds, synced

pytestmark = [pytest.mark.asyncio, pytest.mark.exhaustive]

UPDATES, WARM_UP = 200, 60
SLACK = 4_000_000
"""Bytes that the allocator may keep. Weights are 10 kB: a set that leaked each time would be less, so files count."""


def used() -> tuple[int, int, int]:
    """Bytes, open files (each set is one), and threads."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), threading.active_count()


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "shared"},
        {"transport": "broadcast"},
        {"transport": "shared", "delta": True},
        {"transport": "broadcast", "delta": True},
        {"transport": "folder"},
        {"transport": "folder", "delta": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
async def test_memory_stays_flat(options: dict[str, Any], staged: bool, tmp_path: Path) -> None:
    if options["transport"] == "folder":
        options = options | {"folder": tmp_path}
    async with synced(staged=staged, **options) as (trainer, engines, synchronizer):
        before = (0, 0, 0)
        for number in range(UPDATES):
            if number == WARM_UP:
                before = used()
            change(trainer)
            await (await synchronizer.start_update() if number % 2 else synchronizer.update_weights())
        memory, files, threads = (now - then for now, then in zip(used(), before, strict=True))
        assert memory < SLACK
        assert files <= 2, "a set may be held, or not"
        assert threads <= 1
        assert [holds(engine, trainer) for engine in engines] == [True, True]
