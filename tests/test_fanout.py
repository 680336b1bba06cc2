"""Several calls at once, and the clock that bounds them."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncsync.clock import UpdateClock
from asyncsync.errors import LinkLostError, TransferError, WeightUpdateTimeoutError
from asyncsync.fanout import race, settle

pytestmark = pytest.mark.asyncio


class Calls:
    """Calls that fail, return or hang, and what became of them."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def hang(self, name: str) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.cancelled.append(name)
            raise
        return name

    async def fail(self, error: Exception, turns: int = 1) -> str:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise error


async def value(result: int) -> int:
    return result


async def test_all_results_by_key() -> None:
    assert await race({"a": value(1), "b": value(2)}) == {"a": 1, "b": 2}
    assert await settle({"a": value(1), "b": value(2)}) == {"a": 1, "b": 2}
    assert await race({}) == {}
    assert await settle({}) == {}


async def test_the_first_failure_wins_and_the_others_are_ended() -> None:
    calls = Calls()
    first, second = KeyError("first"), KeyError("second")
    with pytest.raises(KeyError) as caught:
        await race({1: calls.hang("x"), 2: calls.fail(second, turns=3), 3: calls.fail(first, turns=1)})
    assert caught.value is first
    assert calls.cancelled == ["x"]


async def test_everyone_is_heard() -> None:
    calls = Calls()
    error = KeyError("one")
    assert await settle({1: calls.fail(error, turns=2), 2: value(5)}) == {1: error, 2: 5}


@pytest.mark.parametrize("how", ["asyncio", "anyio"])
@pytest.mark.parametrize("together", [race, settle], ids=["race", "settle"])
async def test_cancelled_it_ends_every_call_first(together: object, how: str) -> None:
    calls = Calls()
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await together({1: calls.hang("x"), 2: calls.hang("y")})  # type: ignore[operator]

    task = asyncio.create_task(run())
    for _ in range(3):
        await asyncio.sleep(0)
    if how == "asyncio":
        task.cancel()
    else:
        scope.cancel()
    await asyncio.wait([task])
    assert sorted(calls.cancelled) == ["x", "y"]


async def test_a_phase_that_takes_too_long_is_named() -> None:
    clock = UpdateClock(0.04)
    with pytest.raises(WeightUpdateTimeoutError, match="connect took longer") as caught, clock.phase("connect"):
        await asyncio.Event().wait()
    assert caught.value.phase == "connect"
    assert isinstance(caught.value, TimeoutError)
    assert clock.seconds["connect"] > 0


async def test_the_phases_together_have_one_deadline() -> None:
    clock = UpdateClock(0.05)
    with pytest.raises(WeightUpdateTimeoutError), clock.phase("anything"):
        await asyncio.Event().wait()
    assert clock.remaining == 0.0
    assert clock.limit("transfer") < 0.01


async def test_an_error_that_leaves_a_phase_knows_its_name() -> None:
    clock = UpdateClock(1.0)
    with pytest.raises(TransferError) as caught, clock.phase("transfer"):
        raise TransferError("lost", bucket=3)
    assert (caught.value.phase, caught.value.bucket) == ("transfer", 3)


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
async def test_a_lost_link_waits_for_the_failure_it_comes_from(turns: int) -> None:
    cause = OSError("the disk is full")
    with pytest.raises(OSError, match="disk"):
        await race({1: value(1), 2: Calls().fail(LinkLostError("gone")), 3: Calls().fail(cause, turns=turns)})
    with pytest.raises(LinkLostError, match="first"):
        await race({1: Calls().fail(LinkLostError("first")), 2: Calls().fail(LinkLostError("second"), turns=2)})


async def test_a_lost_link_whose_cause_is_never_heard_is_raised_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.fanout.GRACE", 0.05)
    calls = Calls()
    with pytest.raises(LinkLostError, match="gone"):
        await race({1: calls.hang("x"), 2: calls.fail(LinkLostError("gone"))})
    assert calls.cancelled == ["x"]
