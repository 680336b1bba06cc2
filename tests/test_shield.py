"""Clean-up that no cancellation cuts off."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncsync.shield import shielded

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("how", ["asyncio", "asyncio twice", "anyio", "timeout"])
async def test_it_comes_to_its_end_and_the_cancellation_goes_on(how: str) -> None:
    began, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    scope = anyio.CancelScope()

    async def cleanup() -> None:
        began.set()
        await go_on.wait()
        ended.set()

    async def work() -> None:
        with scope:
            async with asyncio.timeout(0.01 if how == "timeout" else None):
                await shielded(cleanup())
                await asyncio.sleep(0)
                pytest.fail("went on")

    task = asyncio.create_task(work())
    await began.wait()
    if how == "anyio":
        scope.cancel()
    elif how == "timeout":
        await asyncio.sleep(0.02)
    else:
        task.cancel()
        await asyncio.sleep(0)
        if how == "asyncio twice":
            task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    await asyncio.wait([task])
    assert ended.is_set()
    if how == "timeout":
        assert isinstance(task.exception(), TimeoutError)
    else:
        assert task.cancelled() == (how != "anyio")


async def test_its_result_and_its_error_come_back() -> None:
    async def give() -> int:
        return 5

    async def fail() -> None:
        raise KeyError("x")

    assert await shielded(give()) == 5
    with pytest.raises(KeyError):
        await shielded(fail())


async def test_it_is_bounded() -> None:
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError, match="clean-up took longer"):
        await shielded(hang(), 0.01)
    await cancelled.wait()


async def test_an_error_of_the_clean_up_rides_along_with_the_cancellation() -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        began.set()
        await go_on.wait()
        raise KeyError("x")

    task = asyncio.create_task(shielded(fail()))
    await began.wait()
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert "clean-up failed too: KeyError('x')" in caught.value.__notes__
