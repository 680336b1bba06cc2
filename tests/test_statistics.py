"""What a synchronizer tells of itself, at any time."""

from __future__ import annotations

import asyncio

import pytest

import asyncsync
from asyncsync import EngineError
from tests.engines import change, failing, synced

pytestmark = pytest.mark.asyncio


async def test_updates_failures_and_cancellations_are_counted() -> None:
    async with synced(count=2) as (trainer, engines, synchronizer):
        assert synchronizer.statistics().state == "idle"
        update = await synchronizer.update_weights()
        engines[1].before["receive_weights"] = failing(OSError("no"))
        with pytest.raises(EngineError):
            await synchronizer.update_weights()
        for engine in engines:
            engine.before["finish_weight_update"] = failing(OSError("never"))
        with pytest.raises(asyncsync.WeightUpdateError):
            await synchronizer.update_weights()
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        engines[0].before["receive_weights"] = hang
        task = asyncio.create_task(synchronizer.update_weights())
        await reached.wait()
        during = synchronizer.statistics()
        assert (during.state, during.phase, during.waiting) == ("updating", "transfer", 1)
        assert "updating (transfer)" in repr(synchronizer)
        task.cancel()
        await asyncio.wait([task])
        change(trainer)

        told = synchronizer.statistics()
        assert (told.state, told.phase, told.waiting, told.weight_version) == ("idle", None, 0, 2)
        assert (told.updates, told.failed, told.cancelled) == (2, 2, 1)
        assert told.attempts >= 5
        assert told.bytes == 2 * update.bytes
        assert told.seconds["transfer"] > update.seconds["transfer"]
        assert told.last_error is not None
        assert "never" in told.last_error
        first, second = told.engines["ToldEngine-0"], told.engines["ToldEngine-1"]
        assert (first.weight_version, first.ready, first.lost, first.updates) == (2, True, False, 2)
        assert (second.ready, second.updates) == (False, 1)
        assert second.failures >= 1
        assert second.last_error is not None

        await synchronizer.update_weights()
        assert synchronizer.statistics().engines["ToldEngine-1"].ready
        await synchronizer.remove_engine(engines[1])
        await synchronizer.update_weights()
        assert list(synchronizer.statistics().engines) == ["ToldEngine-0"]
        assert "ToldEngine-1" not in synchronizer._tally._engines
    assert synchronizer.statistics().state == "closed"
