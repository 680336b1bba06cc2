"""Stored transports: everything is brought to a place first, and engines fetch it from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import change, holds, synced

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
async def test_a_folder_smoke(tmp_path: Path, staged: bool) -> None:
    async with synced(staged=staged, transport="folder", folder=tmp_path) as (trainer, engines, synchronizer):
        for _ in range(4):
            change(trainer)
            update = await synchronizer.update_weights()
            print(update, update.seconds)
            assert all(holds(engine, trainer) for engine in engines)
        import os
        for r,d,f in os.walk(tmp_path): print(r,d,f)
    for r,d,f in os.walk(tmp_path): print(r,d,f)

@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
async def test_objects_smoke(ray_cluster: None, staged: bool) -> None:
    async with synced(staged=staged, transport="objects") as (trainer, engines, synchronizer):
        for _ in range(4):
            change(trainer)
            update = await synchronizer.update_weights()
            print(update, update.seconds)
            assert all(holds(engine, trainer) for engine in engines)
