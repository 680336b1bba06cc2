"""The conductor's process is killed in the middle of an update: what engines do, and that another one takes over."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray

from asyncsync import WeightSynchronizer
from asyncsync.connection import TransportChoice
from tests.actors import Engine
from tests.conductor import BUCKET, POINTS, WEIGHTS
from tests.sample import fingerprint

pytestmark = [pytest.mark.asyncio, pytest.mark.faults]


@asynccontextmanager
async def killed_at(point: str, transport: TransportChoice, names: list[str]) -> AsyncIterator[None]:
    """A conductor that is killed once it has come to a point."""
    context = ray.get_runtime_context()
    command = ["-m", "tests.conductor", point, transport, context.gcs_address, context.namespace, *names]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.decode().strip() == f"at {point}":
                break
        else:
            pytest.fail(f"the conductor did not come to {point!r}")
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        yield
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


OLD, NEW = fingerprint(WEIGHTS(fill=1.0)), fingerprint(WEIGHTS(fill=2.0))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shared", "broadcast"])
@pytest.mark.parametrize(
    ("point", "staged"),
    [(point, staged) for point in POINTS for staged in (True, False) if point != "paused" or not staged],
)
async def test_engines_drop_the_half_update_and_another_conductor_takes_over(
    ray_cluster: None, point: str, staged: bool, transport: TransportChoice
) -> None:
    names = [f"{uuid.uuid4().hex}-{index}" for index in range(2)]
    engines = [Engine.options(name=name).remote(WEIGHTS, staged=staged) for name in names]
    async with killed_at(point, transport, names):
        if point == "sending":  # both ends hear it at once
            while any([await engine.receiving.remote() for engine in engines]):
                pass
        if staged:  # whole versions are served all the time
            served = [await engine.read.remote() for engine in engines]
            new = {"one switched": 1, "all switched": 2}.get(point, 0)
            assert served == [(2, NEW)] * new + [(1, OLD)] * (2 - new)
        while any([await engine.receiving.remote() for engine in engines]):
            pass  # at the latest when the update's time is over
        statuses = [await engine.describe_engine.remote() for engine in engines]
        if not staged:
            torn = {"sending": 2, "received": 2, "one switched": 1}.get(point, 0)
            assert [status.tainted is None for status in statuses] == [True] * (2 - torn) + [False] * torn
            assert all(status.paused for status in statuses)
        options: dict[str, Any] = {"timeout": 60, "bucket_size": BUCKET, "transport": transport}
        async with WeightSynchronizer(WEIGHTS(fill=3.0), engines, **options) as synchronizer:
            await synchronizer.connect()
            if not staged and point in ("sending", "received"):
                assert (synchronizer.weight_version, synchronizer.ready_engines) == (None, ())
            else:
                version, held = (2, NEW) if "switched" in point else (1, OLD)
                assert synchronizer.weight_version == version
                assert synchronizer.ready_engines == tuple(engines)
                assert [await engine.read.remote() for engine in engines] == [(version, held)] * 2
            update = await synchronizer.update_weights()
            assert update.version == (3 if "switched" in point else 2)
            now = fingerprint(WEIGHTS(fill=3.0))
            assert [await engine.read.remote() for engine in engines] == [(update.version, now)] * 2
    for engine in engines:
        ray.kill(engine)
