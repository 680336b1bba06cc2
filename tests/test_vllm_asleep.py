"""vLLM asleep, where there is no GPU: an engine that sleeps as vLLM's source says, and dies of what vLLM would."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Literal

import pytest

import asyncsync
from asyncsync import EngineState, WeightSynchronizer, WeightUpdateError
from asyncsync.messages import Policy
from asyncsync.testing import copied, failed, step
from tests.cancelling import CancelsWithin
from tests.chain import Chain, continued
from tests.fake_vllm import FakeLLM

pytestmark = pytest.mark.asyncio

LEVELS = pytest.mark.parametrize("level", [1, 2])
LOAD = ["wake ['weights']", "start", "update", "finish", "label", "wake None", "resume"]


async def assert_serves(llm: FakeLLM, model: Any) -> None:
    assert not any(llm.released)
    generated = await llm.generate([7], 12, None)
    assert list(generated.tokens) == continued(model, model, 7, 0, 12)
    assert llm.crashes == []


async def assert_sleeps(llm: FakeLLM, engine: asyncsync.VLLMEngine, level: int, version: int | None) -> None:
    """As it was: at that level, with that version in its host memory if one is kept."""
    assert llm.released == [{"weights": level == 1, "kv_cache": False}] * len(llm.modules)
    assert await llm.is_sleeping()
    status = await engine.describe_engine()
    assert status.released == ("kv_cache", "weights")
    assert status.weight_version == version
    assert bool(status.holds) is (version is not None)
    request = asyncio.create_task(llm.generate([7], 12, None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not request.done()
    request.cancel()
    await asyncio.wait([request])
    assert llm.crashes == []


@LEVELS
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("policy", "pause"),
    [("drain", "keep True"), ("abort", "abort True"), ("recompute", "keep True"), ("continue", "keep False")],
)
async def test_an_update_wakes_the_weights_to_load_them_and_the_rest_last_of_all(
    policy: Policy, pause: str, ranks: int, level: int
) -> None:
    llm, model = FakeLLM(ranks=ranks), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)], policy=policy) as synchronizer:
        await llm.sleep(level=level)
        for version in (1, 2, 3):  # the second and third in step
            step(model, version)
            llm.calls.clear()
            assert (await synchronizer.update_weights()).version == version
            calls = [call for call in llm.calls if call != "init"]
            assert calls == [*[f"pause {pause}"] * (len(calls) - len(LOAD)), *LOAD], "all is loaded before it goes on"
            await assert_serves(llm, model)
            await llm.sleep(level=level)


async def test_requests_that_came_while_it_slept_are_answered_by_the_new_weights() -> None:
    llm, model = FakeLLM(), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
        await synchronizer.update_weights()
        await llm.sleep()
        request = asyncio.create_task(llm.generate([7], 12, None))
        step(model, 1)
        await synchronizer.update_weights()
        assert list((await request).tokens) == continued(model, model, 7, 0, 12)
    assert llm.crashes == []


async def test_only_the_cache_asleep() -> None:
    llm, model = FakeLLM(), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
        await synchronizer.update_weights()
        await llm.sleep()
        await llm.wake_up(tags=["weights"])
        llm.calls.clear()
        step(model, 1)
        await synchronizer.update_weights()
        assert llm.calls == ["pause keep True", *LOAD[1:]]
        await assert_serves(llm, model)


@LEVELS
@pytest.mark.parametrize(
    "call",
    [
        "pause keep True",
        "wake ['weights']",
        "wake ['weights'] on 0",
        "wake ['weights'] on 1",
        "update",
        "load 0",
        "load 1",
    ],
)
async def test_whatever_fails_it_sleeps_as_it_did(call: str, level: int) -> None:
    llm, model = FakeLLM(ranks=2), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await synchronizer.update_weights()
        await llm.sleep(level=level)
        step(model, 1)
        llm.failing.add(call)
        error = await failed(synchronizer.update_weights())
        assert "planned" in str(error)
        assert isinstance(error, WeightUpdateError)
        whole = level == 1 and not call.startswith("load")
        assert error.outcomes[0].state is (EngineState.UNCHANGED if whole else EngineState.TAINTED)
        assert "resume" not in llm.calls[llm.calls.index(f"sleep {level}") :]
        await assert_sleeps(llm, engine, level, 1 if whole else None)
        step(model, 2)
        await synchronizer.update_weights()
        await assert_serves(llm, model)


@LEVELS
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cache_that_cannot_be_woken_is_the_engines_failure(times: int, level: int) -> None:
    class Tight(FakeLLM):
        left = times

        async def wake_up(self, *, tags: list[str] | None = None) -> bool:
            if tags is None and self.left:
                self.left -= 1
                self.failing.add("wake None on 0")
            return await super().wake_up(tags=tags)

        def _get_back(self, rank: int, tags: Any) -> None:
            self._fails(f"wake None on {rank}")
            super()._get_back(rank, tags)

    llm, model = Tight(), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await llm.sleep(level=level)
        error = await failed(synchronizer.update_weights())
        assert "planned: wake None" in str(error)
        assert isinstance(error, WeightUpdateError)
        if level == 1 and times == 1:  # it holds the version whole, and the way back wakes it once more
            assert error.outcomes[0].state is EngineState.UPDATED
            await assert_serves(llm, model)
        else:
            assert error.outcomes[0].state is EngineState.TAINTED
            await assert_sleeps(llm, engine, level, 1 if level == 1 else None)
        step(model, 2)
        llm.left = 0
        await synchronizer.update_weights()
        await assert_serves(llm, model)


@LEVELS
async def test_with_all_or_none_everyone_sleeps_on(level: int) -> None:
    llms, model = [FakeLLM(), FakeLLM()], Chain(1)
    engines = [asyncsync.VLLMEngine(llm) for llm in llms]
    async with WeightSynchronizer(model, engines, on_engine_failure="abort") as synchronizer:
        await synchronizer.update_weights()
        for llm in llms:
            await llm.sleep(level=level)
        step(model, 1)
        llms[1].failing.add("pause keep True")
        await failed(synchronizer.update_weights())
        for llm, engine in zip(llms, engines, strict=True):
            await assert_sleeps(llm, engine, level, 1 if level == 1 else None)
        await synchronizer.update_weights()
        for llm in llms:
            await assert_serves(llm, model)


@LEVELS
async def test_an_engine_that_is_left_behind_sleeps_on(level: int) -> None:
    llms, model = [FakeLLM(), FakeLLM()], Chain(1)
    engines = [asyncsync.VLLMEngine(llm) for llm in llms]
    async with WeightSynchronizer(model, engines) as synchronizer:
        await synchronizer.update_weights()
        for llm in llms:
            await llm.sleep(level=level)
        step(model, 1)
        llms[1].failing.add("update")
        error = await failed(synchronizer.update_weights())
        assert isinstance(error, WeightUpdateError)
        assert [outcome.state for outcome in error.outcomes] == [EngineState.UPDATED, EngineState.TAINTED]
        await assert_serves(llms[0], model)
        await assert_sleeps(llms[1], engines[1], level, None)
        await synchronizer.update_weights()
        await assert_serves(llms[1], model)


@pytest.mark.exhaustive
@LEVELS
@pytest.mark.parametrize("when", ["waiting", "handed over"])
@pytest.mark.parametrize("call", ["receive_weights", "finish_weight_update"])
async def test_cancelled_at_each_await_it_is_whole_and_awake_or_as_asleep_as_it_was(
    call: str, when: Literal["waiting", "handed over"], level: int
) -> None:
    llm, model = FakeLLM(), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    within = CancelsWithin(engine)
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        version = (await synchronizer.update_weights()).version
        old = copied(model)
        for number in itertools.count():
            await llm.sleep(level=level)
            step(model, number)
            within.next(call, number, when)
            within.task = asyncio.create_task(synchronizer._update())
            await asyncio.wait([within.task])
            within.clear()
            if synchronizer.weight_version == version:
                await assert_sleeps(llm, engine, level, version if level == 1 else None)
                if level == 1:
                    await llm.wake_up()
                    await assert_serves(llm, old)
            else:
                await assert_serves(llm, model)
            version = (await synchronizer.update_weights()).version
            await assert_serves(llm, model)
            old = copied(model)
            if not within.reached:
                break
        assert number >= 1


async def test_an_engine_that_cannot_be_asked_to_wake_says_what_it_lacks() -> None:
    class Older(FakeLLM):
        def __init__(self) -> None:
            super().__init__()
            self.waking, self.wake_up = self.wake_up, None  # type: ignore[method-assign, assignment]

    llm, model = Older(), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await synchronizer.update_weights()
        await llm.sleep()
        error = await failed(synchronizer.update_weights())
        assert "no method wake_up(), and cannot be woken: include asyncsync.VLLMActor" in str(error)
        await assert_sleeps(llm, engine, 1, 1)
        await llm.waking()
        await synchronizer.update_weights()
        await assert_serves(llm, model)


@LEVELS
async def test_weights_that_are_lost_are_not_repaired_by_an_update_of_some_of_them(level: int) -> None:
    llm, model = FakeLLM(), Chain(1)
    some = {name: tensor for name, tensor in model.state_dict().items() if name != "bias"}
    async with (
        WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as whole,
        WeightSynchronizer(some, [asyncsync.VLLMEngine(llm)], partial=True) as synchronizer,
    ):
        await whole.update_weights()
        await synchronizer.update_weights()
        await llm.sleep(level=level)
        step(model, 1)
        if level == 1:
            await synchronizer.update_weights()
            assert not any(llm.released)
        else:
            for by_hand in (False, True):  # woken meanwhile, it has lost them all the same
                if by_hand:
                    await llm.wake_up()
                assert "brings only some of them" in str(await failed(synchronizer.update_weights()))
            await whole.update_weights()
            await assert_serves(llm, model)
            await synchronizer.update_weights()
    assert llm.crashes == []
