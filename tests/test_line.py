"""Lines: engines on the conductor's node are called without Ray in the hot path, and nothing else is different."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from asyncio import CancelledError
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayTaskError
from torch import nn

import asyncsync
from asyncsync import EngineError, EngineState, WeightSynchronizer, cluster
from asyncsync.engines.channel import Exchange, Line, LineBrokenError
from asyncsync.engines.line import LOOPBACK, ActorLine
from asyncsync.engines.remote import RemoteEngine
from asyncsync.messages import Policy, UpdateOrder
from tests.actors import EngineActor
from tests.sample import Zoo, contents

pytestmark = [pytest.mark.asyncio, pytest.mark.ray]

ZOO = partial(Zoo, 2, strided=False)
BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])


class BrokenError(Exception):
    """An error of an engine's own."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class LinedActor(EngineActor):
    """An engine that does with its lines what it is told."""

    def __init__(self) -> None:
        super().__init__(ZOO)
        self._whims: set[str] = set()
        self._line: asyncio.Future[bool]
        self._moments = {name: threading.Event() for name in ("pausing", "let go on", "paused", "cancelled")}

    async def hold(self, whims: set[str], *, staged: bool) -> None:
        """Serve anew."""
        self._whims = whims
        for moment in self._moments.values():
            moment.clear()
        asyncsync.ModuleEngine.__init__(self, ZOO(), staged=staged)

    async def open_control_line(self, token: str, secret: str, port: int) -> bool:
        """See :meth:`asyncsync.ModuleEngine.open_control_line`."""
        if "silent" in self._whims:
            try:
                await asyncio.Event().wait()
            finally:
                self._moments["cancelled"].set()
        if "unreachable" in self._whims:
            port = 9  # where nobody listens
        if "doubtful" in self._whims:
            secret = "another"
        self._line = asyncio.ensure_future(super().open_control_line(token, secret, port))
        await asyncio.wait([self._line])
        return not self._line.cancelled() and self._line.result()

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        if "waits" in self._whims:
            self._moments["pausing"].set()
            try:
                await asyncio.to_thread(self._moments["let go on"].wait)
            except CancelledError:
                self._moments["cancelled"].set()
                raise
            self._moments["paused"].set()
        else:
            await super().pause_generation(epoch, policy)

    def let_go_on(self) -> None:
        """End the wait of a call."""
        self._moments["let go on"].set()

    @cluster.control
    async def comes_to(self, moment: str) -> bool:
        """Wait until a call has come so far."""
        return await asyncio.to_thread(self._moments[moment].wait)

    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`."""
        if "fails" in self._whims:
            raise BrokenError(7)
        if "gives up" in self._whims:
            raise CancelledError
        if "hangs up" in self._whims:
            self._whims.clear()
            self._line.cancel()
            await asyncio.Event().wait()
        return await super().finish_weight_update(order)

    @cluster.control
    async def hung_up(self) -> bool:
        """Wait for the end of its line."""
        await asyncio.wait([self._line])
        return True


RemoteLined = asyncsync.remote(num_cpus=0)(LinedActor)


@pytest.fixture(scope="module")
def engine(ray_cluster: None) -> Iterator[Any]:
    actor = RemoteLined.remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr("asyncsync.engines.line.LINE_TIMEOUT", 60.0)
    monkeypatch.setattr("asyncsync.engines.line.PATIENCE", 60.0)


@pytest.fixture
def through_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that went through Ray."""
    calls: list[str] = []
    call = cluster.call

    async def noted(handle: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        return await call(handle, method, *args, **kwargs)

    monkeypatch.setattr(cluster, "call", noted)
    return calls


async def assert_brought(engine: Any, trainer: nn.Module) -> None:
    assert await engine.contents.remote() == contents(trainer)


@BOTH
async def test_an_update_calls_an_engine_over_its_line_alone(engine: Any, through_ray: list[str], staged: bool) -> None:
    await engine.hold.remote(set(), staged=staged)
    trainer = Zoo(1)
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        await synchronizer.update_weights()
        assert "open_control_line" in through_ray
        through_ray.clear()
        for _ in range(3):
            trainer.weight.data.add_(1)
            await synchronizer.update_weights()
            assert through_ray == []
            await assert_brought(engine, trainer)
    assert await engine.hung_up.remote()


@pytest.mark.parametrize("whim", ["unreachable", "doubtful", "silent"])
@BOTH
async def test_who_cannot_be_reached_over_a_line_is_called_through_ray(
    engine: Any, through_ray: list[str], monkeypatch: pytest.MonkeyPatch, whim: str, staged: bool
) -> None:
    if whim == "silent":
        monkeypatch.setattr("asyncsync.engines.line.LINE_TIMEOUT", 0.05)
    await engine.hold.remote({whim}, staged=staged)
    trainer = Zoo(1)
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        await synchronizer.update_weights()
        through_ray.clear()
        await synchronizer.update_weights()
        assert {"receive_weights", "finish_weight_update"} <= set(through_ray)
        await assert_brought(engine, trainer)


async def test_an_engines_own_error_comes_whole_with_the_actors_traceback(engine: Any) -> None:
    await engine.hold.remote({"fails"}, staged=True)
    async with WeightSynchronizer(Zoo(1), [engine]) as synchronizer:
        with pytest.raises(EngineError, match="BrokenError: 7") as caught:
            await synchronizer.update_weights()
        error = caught.value.__cause__
        assert isinstance(error, BrokenError)
        assert error.code == 7
        assert isinstance(error.__cause__, RayTaskError)
        assert "in finish_weight_update" in str(error.__cause__)


async def test_a_cancelled_error_that_nobody_asked_for_is_a_failure(engine: Any) -> None:
    await engine.hold.remote({"gives up"}, staged=True)
    async with WeightSynchronizer(Zoo(1), [engine]) as synchronizer:
        with pytest.raises(EngineError, match="Cancelled"):
            await synchronizer.update_weights()


async def test_a_line_that_breaks_in_the_middle_of_a_call_is_a_failure_and_ray_takes_its_place(
    engine: Any, through_ray: list[str]
) -> None:
    await engine.hold.remote({"hangs up"}, staged=True)
    trainer = Zoo(1)
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        with pytest.raises(EngineError, match="its line broke") as caught:
            await synchronizer.update_weights()
        assert caught.value.outcomes[0].state in (EngineState.UNCHANGED, EngineState.TAINTED)
        through_ray.clear()
        await synchronizer.update_weights()
        assert "finish_weight_update" in through_ray
        await assert_brought(engine, trainer)


def listening() -> set[int]:
    """The ports on which this process lets others connect over loopback."""
    connections = psutil.Process().net_connections(kind="tcp4")
    return {each.laddr.port for each in connections if each.status == "LISTEN" and each.laddr.ip == LOOPBACK}


async def test_who_opens_a_line_at_the_same_time_opens_one(engine: Any, through_ray: list[str]) -> None:
    await engine.hold.remote(set(), staged=True)
    before = listening()
    line = ActorLine(engine)
    await asyncio.gather(*(line.open() for _ in range(3)))
    assert line.is_open
    assert through_ray == ["open_control_line"]
    assert listening() == before, "nobody else is expected"
    line.close()
    assert await engine.hung_up.remote()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once somebody waits for an actor to connect."""
    reached, all_lines = asyncio.Event(), Exchange.all_lines

    async def noted(self: Exchange, timeout: float) -> list[Line]:
        reached.set()
        return await all_lines(self, timeout)

    monkeypatch.setattr(Exchange, "all_lines", noted)
    return reached


async def test_who_hangs_up_while_a_line_is_opened_is_not_waited_for(
    engine: Any, waiting: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.hold.remote({"silent"}, staged=True)
    monkeypatch.setattr("asyncsync.engines.line.LINE_TIMEOUT", 1000.0)
    line = ActorLine(engine)
    opening = asyncio.create_task(line.open())
    await waiting.wait()
    line.close()
    await opening
    assert not line.is_open


async def test_who_is_cancelled_while_a_line_is_opened_leaves_nothing(engine: Any, waiting: asyncio.Event) -> None:
    await engine.hold.remote({"silent"}, staged=True)
    before = listening()
    line = ActorLine(engine)
    opening = asyncio.create_task(line.open())
    await waiting.wait()
    opening.cancel()
    with pytest.raises(CancelledError):
        await opening
    states = [line.is_open]
    assert listening() == before
    assert await engine.comes_to.remote("cancelled")
    await engine.hold.remote(set(), staged=True)
    await line.open()
    assert [*states, line.is_open] == [False, True]
    line.close()


async def test_a_call_that_is_cancelled_is_cancelled_at_the_actor(engine: Any) -> None:
    await engine.hold.remote({"waits"}, staged=True)
    line = ActorLine(engine)
    await line.open()
    call = asyncio.create_task(line.call("pause_generation", 1, "drain"))
    assert await engine.comes_to.remote("pausing")
    call.cancel()
    with pytest.raises(CancelledError):
        await call
    assert await engine.comes_to.remote("cancelled")
    await engine.let_go_on.remote()
    assert await line.call("resume_generation", 1) is None, "it is still there"
    line.close()


async def test_a_loop_that_is_closed_with_a_line_open_keeps_nobody_from_another(engine: Any) -> None:
    await engine.hold.remote(set(), staged=True)
    line = ActorLine(engine)

    def leave_open() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(line.open())
        assert line._line is not None
        loop.close()

    await asyncio.to_thread(leave_open)
    states = [line.is_open]
    await line.open()
    assert [*states, line.is_open] == [False, True]
    line.close()


async def test_the_group_of_control_calls_has_room_for_a_line_whatever_a_class_asks_for(ray_cluster: None) -> None:
    engine = asyncsync.remote(num_cpus=0, concurrency_groups={"asyncsync": 1, "io": 1})(LinedActor).remote()
    try:
        await engine.hold.remote(set(), staged=True)
        trainer = Zoo(1)
        async with WeightSynchronizer(trainer, [engine]) as synchronizer:
            await synchronizer.update_weights()
            await assert_brought(engine, trainer)
    finally:
        ray.kill(engine)


async def test_an_engine_that_joins_anew_and_one_that_is_let_go_of_leave_no_line(engine: Any) -> None:
    await engine.hold.remote(set(), staged=True)
    async with WeightSynchronizer(Zoo(1), [engine], bucket_size=4096) as synchronizer:
        await synchronizer.update_weights()
        await engine.hold.remote(set(), staged=True)  # in no group any more
        await synchronizer.update_weights()
    assert await engine.hung_up.remote()
    remote = RemoteEngine(engine)
    line = remote._line
    assert line is not None
    await line.open()
    del line, remote
    gc.collect()
    assert await engine.hung_up.remote()


async def test_hanging_up_is_heard_of_though_a_child_has_the_line_still(engine: Any) -> None:
    await engine.hold.remote(set(), staged=True)
    line = ActorLine(engine)
    await line.open()
    read, write = os.pipe()
    if not (child := os.fork()):  # has all that is open here
        os.read(read, 1)
        os._exit(0)
    try:
        line.close()
        assert await engine.hung_up.remote()
    finally:
        os.write(write, b"1")
        await asyncio.to_thread(os.waitpid, child, 0)
        os.close(read)
        os.close(write)


async def test_a_call_outlives_its_conductor_as_one_through_ray_does(engine: Any) -> None:
    await engine.hold.remote({"waits"}, staged=True)
    line = ActorLine(engine)
    await line.open()
    call = asyncio.create_task(line.call("pause_generation", 1, "drain"))
    assert await engine.comes_to.remote("pausing")
    line.close()
    with pytest.raises(LineBrokenError):
        await call
    assert await engine.hung_up.remote()
    await engine.let_go_on.remote()
    assert await engine.comes_to.remote("paused")


async def test_a_dead_process_is_told_from_a_broken_line_though_ray_starts_it_anew(ray_cluster: None) -> None:
    engine = RemoteLined.options(max_restarts=1, max_task_retries=5).remote()
    try:
        await engine.hold.remote({"waits"}, staged=True)
        line = ActorLine(engine)
        await line.open()
        call = asyncio.create_task(line.call("pause_generation", 1, "drain"))
        assert await engine.comes_to.remote("pausing")
        os.kill(await engine.pid.remote(), signal.SIGKILL)
        with pytest.raises(cluster.ActorLostError):
            await call
        assert not line.is_open
    finally:
        ray.kill(engine)
