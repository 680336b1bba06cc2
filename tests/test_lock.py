"""The in-process lock: exclusion, fairness, cancellation at every await, and what it says of itself."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from itertools import product
from typing import Literal

import anyio
import anyio.lowlevel
import pytest

from asyncsync.errors import EventLoopError, LockError, LockTimeoutError
from asyncsync.lock import KINDS, Kind, RolloutLock, Waiting
from tests.cancelling import CancelAt

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

AGAINST: dict[Kind, Kind] = {"reader": "writer", "writer": "writer", "updater": "updater"}  # who holds it up
SOON = 2.0  # seconds: nothing here takes long, so a wait that long is a lock that is stuck


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def settled() -> None:
    """Let everything that can run without the clock run."""
    await turns(20)


def keepers(lock: RolloutLock) -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(lock.name)]


async def assert_free(lock: RolloutLock) -> None:
    assert (lock.readers, lock.writer_name, lock.waiting, str(lock.status())) == (0, None, (0, 0), "free")
    for kind in KINDS:
        async with asyncio.timeout(SOON), getattr(lock, kind)(timeout=SOON):
            pass
    await settled()
    assert not keepers(lock), "a keeper task was left behind"


async def test_readers_share_and_a_writer_is_alone() -> None:
    lock = RolloutLock()
    order: list[str] = []

    async def write() -> None:
        async with lock.writer():
            order.append("writer in")
            await settled()
            order.append("writer out")

    async def read() -> None:
        async with lock.reader():
            order.append("late reader")

    async with lock.reader():
        async with asyncio.timeout(SOON):
            second = await asyncio.create_task(lock.acquire("reader"))
        writing = asyncio.create_task(write())
        await settled()
        reading = asyncio.create_task(read())
        await settled()
        assert order == []
        assert lock.readers == 2
        assert lock.waiting == Waiting(readers=1, writers=1)
        await second.release()
        await settled()
        assert order == []
    await asyncio.gather(writing, reading)
    assert order == ["writer in", "writer out", "late reader"]
    await assert_free(lock)


async def test_an_updater_is_alone_among_updaters_whoever_reads_and_writes() -> None:
    lock = RolloutLock()
    async with lock.updater(holder="update-1"):
        second = asyncio.create_task(lock.acquire("updater", holder="update-2"))
        for kind in ("reader", "writer"):
            async with asyncio.timeout(SOON):
                await (await asyncio.create_task(lock.acquire(kind))).release()
        await settled()
        assert not second.done()
        assert (lock.updater_name, lock.status().updater_queue) == ("update-1", ("update-2",))
    async with asyncio.timeout(SOON):
        hold = await second
    assert lock.updater_name == "update-2"
    await hold.release()
    await assert_free(lock)


@pytest.mark.parametrize("writes", ["itself", "another task"])
async def test_an_updater_writes_once_the_readers_have_left(writes: str) -> None:
    lock = RolloutLock()
    reading = await asyncio.create_task(lock.acquire("reader"))
    written = asyncio.Event()

    async def write() -> None:
        async with lock.writer(holder="commit"):
            assert lock.holds() == "writer"
            assert (lock.writer_name, lock.updater_name) == ("commit", "update")
            written.set()

    async def update() -> None:
        async with lock.updater(holder="update"):
            assert lock.holds() is None
            await (write() if writes == "itself" else asyncio.create_task(write()))
            assert (lock.holds(), lock.updater_name) == (None, "update")

    updating = asyncio.create_task(update())
    await settled()
    assert lock.waiting == Waiting(readers=0, writers=1)
    assert not written.is_set()
    await reading.release()
    async with asyncio.timeout(SOON):
        await updating
    assert written.is_set()
    await assert_free(lock)


async def test_an_updater_reads_and_then_may_not_write() -> None:
    lock = RolloutLock()
    async with lock.updater(), lock.reader():
        assert (lock.holds(), lock.readers) == ("reader", 1)
        with pytest.raises(LockError, match="holds the reader side and asks for the writer side"):
            await lock.acquire("writer")
    await assert_free(lock)


@pytest.mark.parametrize(("looping", "lone"), [("reader", "writer"), ("writer", "reader"), ("updater", "updater")])
async def test_nobody_starves(looping: Kind, lone: Kind) -> None:
    lock = RolloutLock()
    grants = 0

    async def loop_for_ever() -> None:
        nonlocal grants
        while True:
            async with getattr(lock, looping)():
                grants += 1
                await turns(3)

    others = [asyncio.create_task(loop_for_ever()) for _ in range(4)]
    await settled()
    assert grants
    before = grants
    async with asyncio.timeout(SOON), getattr(lock, lone)():
        overtaken_by = grants - before
    assert overtaken_by <= len(others), "those who came later went first"
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await assert_free(lock)


async def test_first_come_first_served() -> None:
    lock = RolloutLock()
    order: list[int] = []

    async def use(index: int, kind: Kind) -> None:
        async with getattr(lock, kind)(holder=f"task-{index}"):
            order.append(index)
            await turns(2)

    kinds: list[Kind] = ["reader", "writer", "writer", "reader", "reader", "writer", "reader"]
    async with lock.writer():
        tasks = [asyncio.create_task(use(index, kind)) for index, kind in enumerate(kinds)]
        await settled()
        assert lock.status().queue == tuple(f"task-{index}" for index in range(len(kinds)))
    await asyncio.gather(*tasks)
    assert order == list(range(len(kinds)))


async def test_updaters_are_served_as_they_came_apart_from_readers_and_writers() -> None:
    lock = RolloutLock()
    order: list[int] = []

    async def update(index: int) -> None:
        async with lock.updater(holder=f"update-{index}"):
            await turns(5 - index)
            async with lock.writer():
                order.append(index)

    async with lock.updater(), lock.writer():
        updates = [asyncio.create_task(update(index)) for index in range(5)]
        others = [asyncio.create_task(lock.acquire(kind, holder=kind)) for kind in ("reader", "writer")]
        await settled()
        assert lock.status().updater_queue == tuple(f"update-{index}" for index in range(5))
        assert lock.status().queue == ("reader", "writer")
    for other in others:
        await (await other).release()
    await asyncio.gather(*updates)
    assert order == list(range(5))


async def test_a_cancelled_waiting_updater_leaves_its_place() -> None:
    lock = RolloutLock()
    async with lock.updater():
        waiting = [asyncio.create_task(lock.acquire("updater", holder=f"update-{index}")) for index in range(3)]
        await settled()
        waiting[0].cancel()
        waiting[1].cancel()
        await settled()
        assert lock.status().updater_queue == ("update-2",)
        assert not waiting[2].done(), "it was let in beside the first"
        assert len(keepers(lock)) == 2, "that of a cancelled one waits on"
    async with asyncio.timeout(SOON):
        await (await waiting[2]).release()
    assert waiting[0].cancelled()
    assert waiting[1].cancelled()
    await assert_free(lock)


async def test_a_cancelled_waiting_writer_wakes_the_readers_behind_it() -> None:
    """aiorwlock alone leaves them asleep until the first reader is done."""
    lock = RolloutLock()
    async with lock.reader():
        writer = asyncio.create_task(lock.acquire("writer"))
        await settled()
        readers = [asyncio.create_task(lock.acquire("reader")) for _ in range(3)]
        await settled()
        assert lock.waiting == (3, 1)
        writer.cancel()
        async with asyncio.timeout(SOON):
            holds = await asyncio.gather(*readers)
        assert lock.readers == 4
    for hold in holds:
        await hold.release()
    assert writer.cancelled()
    await assert_free(lock)


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("when", ["waiting", "handed over"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_at_every_suspension(
    kind: Kind, at: int, when: Literal["waiting", "handed over"], contended: bool
) -> None:
    lock = RolloutLock()
    entered = False

    async def use() -> None:
        nonlocal entered
        async with getattr(lock, kind)():
            entered = True
            await turns(3)

    async def cancelled() -> None:
        await CancelAt(use(), at, when)

    hold = await lock.acquire(AGAINST[kind]) if contended else None
    victim = asyncio.create_task(cancelled())
    await settled()
    behind = [asyncio.create_task(lock.acquire(other)) for other in KINDS]
    await settled()
    if hold is not None:
        await hold.release()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(SOON):
            await victim
    assert entered == (at > 0), "the first suspension is the wait for the lock, and the only one"
    for task in behind:
        async with asyncio.timeout(SOON):
            await (await task).release()
    await assert_free(lock)


@pytest.mark.parametrize("scope_kind", ["asyncio", "anyio"])
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", KINDS)
async def test_cancel_at_every_turn_of_a_hand_over(first: Kind, kind: Kind, turn: int, scope_kind: str) -> None:
    """Between a release and the next holder's body lie a few turns of the loop: cancel in each of them."""
    lock = RolloutLock()
    scope = anyio.CancelScope()

    async def use() -> None:
        with scope:
            async with getattr(lock, kind)():
                await asyncio.Event().wait()

    hold = await lock.acquire(first)
    victim = asyncio.create_task(use())
    await turns(turn // 2)
    behind = [asyncio.create_task(lock.acquire(other)) for other in (*KINDS, *KINDS)]
    await settled()
    await hold.release()
    await turns(turn)
    if scope_kind == "anyio":
        scope.cancel()
    else:
        victim.cancel()
    async with asyncio.timeout(SOON):
        await asyncio.wait({victim})
    assert victim.cancelled() == (scope_kind == "asyncio")
    for task in behind:
        async with asyncio.timeout(SOON):
            await (await task).release()
    await assert_free(lock)


async def test_a_cancelled_anyio_scope_does_not_get_in_the_way_of_leaving() -> None:
    lock = RolloutLock()
    with anyio.CancelScope() as scope:
        async with lock.writer():
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with lock.reader():
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    await assert_free(lock)


@pytest.mark.parametrize("kind", ["writer", "updater"])
@pytest.mark.parametrize("where", ["waiting", "handed over", "body"])
async def test_a_closed_coroutine_leaves_nothing(where: str, kind: Kind) -> None:
    """``GeneratorExit`` allows no await: neither the wait nor the exit may need one."""
    lock = RolloutLock()

    async def use() -> None:
        async with getattr(lock, kind)():
            await asyncio.Event().wait()

    hold = await asyncio.create_task(lock.acquire(AGAINST[kind]))
    coroutine = use()
    coroutine.send(None)
    await settled()
    if where != "waiting":
        await hold.release()
        await settled()
        assert (lock.writer_name or lock.updater_name) is not None
    if where == "body":
        coroutine.send(None)
    coroutine.close()
    await hold.release()
    await settled()
    await assert_free(lock)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failing_body_raises_its_own_error(kind: Kind) -> None:
    lock = RolloutLock()
    error = StopAsyncIteration("of the body")
    with pytest.raises(StopAsyncIteration) as caught:
        async with getattr(lock, kind)():
            raise error
    assert caught.value is error
    await assert_free(lock)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_timeout_names_the_holder_and_the_queue(kind: Kind) -> None:
    lock = RolloutLock("weights")
    hold = await asyncio.create_task(lock.acquire(AGAINST[kind], holder="update-7"))
    with pytest.raises(LockTimeoutError) as caught:
        await lock.acquire(kind, timeout=0.01, holder="impatient")
    assert isinstance(caught.value, TimeoutError)
    assert re.search(rf"weights: impatient was not given the {kind} side within 0.01 s", str(caught.value))
    assert re.search(rf"{AGAINST[kind]} update-7 for 0\.\d\d s; waiting: 1 {kind}", str(caught.value))
    assert (lock.waiting, lock.status().updater_queue) == ((0, 0), ())
    await hold.release()
    await assert_free(lock)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
async def test_a_timeout_is_positive_and_finite(timeout: float) -> None:
    lock = RolloutLock()
    with pytest.raises(ValueError, match="positive, finite"):
        await lock.acquire("reader", timeout=timeout)
    with pytest.raises(ValueError, match="positive, finite"):
        async with lock.writer(timeout=timeout):
            pass
    with pytest.raises(ValueError, match="'reader', 'writer' or 'updater'"):
        await lock.acquire("both")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["writer", "updater"])
async def test_timed_out_in_the_turn_of_the_hand_over(kind: Kind) -> None:
    """Whichever comes first counts, and nothing leaks: the timer is fired by hand in every turn."""
    for turn in range(8):
        lock = RolloutLock()
        hold = await asyncio.create_task(lock.acquire(kind))
        waiter = asyncio.create_task(lock.acquire(kind))
        await settled()
        (grant,) = lock._queue
        await hold.release()
        await turns(turn)
        lock._time_out(grant, 1.0)
        try:
            await (await waiter).release()
        except LockTimeoutError:
            assert turn < 4
        await assert_free(lock)


async def test_a_task_that_would_wait_for_itself_is_refused() -> None:
    """Or for an updater that would wait for it: who reads or writes may not ask to update."""
    lock = RolloutLock("weights")
    granted = {("reader", "reader"), ("updater", "reader"), ("updater", "writer")}
    for held, wanted in set(product(KINDS, KINDS)) - granted:
        async with getattr(lock, held)():
            holds = None if held == "updater" else held
            assert lock.holds() == holds
            with pytest.raises(LockError, match=f"holds the {held} side and asks for the {wanted} side: .* itself"):
                async with getattr(lock, wanted)():
                    pass
            assert lock.holds() == holds
        assert lock.holds() is None
    await assert_free(lock)


async def test_a_reader_may_read_again_though_a_writer_waits() -> None:
    lock = RolloutLock()
    outer = await lock.acquire("reader")
    writer = asyncio.create_task(lock.acquire("writer"))
    await settled()
    async with asyncio.timeout(SOON), lock.reader() as inner:
        assert lock.readers == 1
        await outer.release()  # in the wrong order, and twice
        await outer.release()
        await settled()
        assert not writer.done()
        assert inner.kind == "reader"
    async with asyncio.timeout(SOON):
        await (await writer).release()
    assert lock.holds() is None
    await assert_free(lock)


async def test_holds_answers_for_any_task() -> None:
    lock = RolloutLock()
    inside, leave = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async with lock.reader():
            inside.set()
            await leave.wait()

    task = asyncio.create_task(read())
    await inside.wait()
    assert lock.holds(task) == "reader"
    assert lock.holds() is None
    leave.set()
    await task
    assert lock.holds(task) is None


async def test_another_task_may_release() -> None:
    lock = RolloutLock()
    for kind in KINDS:
        hold = await lock.acquire(kind)
        waiter = asyncio.create_task(lock.acquire("writer"))
        await asyncio.create_task(hold.release())
        async with asyncio.timeout(SOON):
            await (await waiter).release()
    await assert_free(lock)


async def test_another_loop_is_refused() -> None:
    lock = RolloutLock("weights")
    hold = await lock.acquire("reader")

    async def acquire() -> None:
        await lock.acquire("reader")

    for attempt in (acquire, hold.release):
        with pytest.raises(EventLoopError, match="weights: this lock belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, attempt())
    await hold.release()
    await assert_free(lock)


async def test_a_loop_that_shuts_down_lets_the_holder_finish_first() -> None:
    order: list[str] = []

    async def holder(lock: RolloutLock) -> None:
        async with lock.writer():
            try:
                await asyncio.Event().wait()
            finally:
                await settled()
                order.append("clean-up under the lock")

    async def latecomer(lock: RolloutLock) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            async with lock.writer(timeout=SOON):
                order.append("next")

    async def main() -> None:
        lock = RolloutLock()
        tasks.extend(asyncio.create_task(user(lock)) for user in (latecomer, holder))
        await settled()

    tasks: list[asyncio.Task[None]] = []
    await asyncio.to_thread(asyncio.run, main())
    assert order == ["clean-up under the lock", "next"]


async def test_a_forgotten_hold_does_not_keep_the_loop_from_ending() -> None:
    async def main() -> None:
        await RolloutLock().acquire("writer")

    async with asyncio.timeout(SOON):
        await asyncio.to_thread(asyncio.run, main())


async def test_repr_names_holders_and_queue() -> None:
    lock = RolloutLock("weights")
    assert repr(lock) == "<RolloutLock 'weights': free>"
    hold = await asyncio.create_task(lock.acquire("writer", holder="update-7"))
    waiters = [asyncio.create_task(lock.acquire(kind)) for kind in ("reader", "reader", "writer")]
    await settled()
    assert re.fullmatch(
        r"<RolloutLock 'weights': writer update-7 for \d\.\d\d s; waiting: 2 readers, 1 writer>", repr(lock)
    )
    assert repr(hold) == "<Hold of 'weights': writer update-7>"
    await hold.release()
    assert repr(hold) == "<Hold of 'weights': writer update-7 (released)>"
    await settled()
    name = waiters[0].get_name()
    oldest = rf"2 readers \(oldest {name} for \d\.\d\d s\)"
    assert re.fullmatch(rf"<RolloutLock 'weights': {oldest}; waiting: 1 writer>", repr(lock))
    for waiter in waiters:
        await (await waiter).release()
    await assert_free(lock)


async def test_repr_names_the_updater_beside_the_others() -> None:
    lock = RolloutLock("weights")
    hold = await lock.acquire("updater", holder="update-7")
    waiters = [asyncio.create_task(lock.acquire("updater")) for _ in range(2)]
    await settled()
    assert re.fullmatch(r"<RolloutLock 'weights': updater update-7 for \d\.\d\d s; waiting: 2 updaters>", repr(lock))
    assert repr(hold) == "<Hold of 'weights': updater update-7>"
    async with lock.writer(holder="commit"):
        reader = asyncio.create_task(lock.acquire("reader"))
        await settled()
        held = r"writer commit for \d\.\d\d s, updater update-7 for \d\.\d\d s"
        assert re.fullmatch(rf"<RolloutLock 'weights': {held}; waiting: 1 reader, 2 updaters>", repr(lock))
        status = lock.status()
        assert (status.kind, status.holders, status.updater) == ("writer", ("commit",), "update-7")
        assert status.updater_for >= status.held_for > 0
    await hold.release()
    for waiter in (reader, *waiters):
        await (await waiter).release()
    await assert_free(lock)


@pytest.mark.parametrize("seed", range(12))
async def test_random_use_never_mixes_readers_and_writers(seed: int) -> None:
    chance = random.Random(seed)
    lock = RolloutLock()
    inside: Counter[Kind] = Counter()
    served = 0

    async def use(kind: Kind, work: int, timeout: float) -> None:
        nonlocal served
        async with getattr(lock, kind)(timeout=timeout):
            inside[kind] += 1
            try:
                for _ in range(work):
                    assert inside[kind] == 1 or kind == "reader"
                    assert kind == "updater" or not (inside["reader"] and inside["writer"])
                    await asyncio.sleep(0)
                if kind == "updater" and work % 2:
                    await use("writer", work, timeout)
                served += 1
            finally:
                inside[kind] -= 1

    async def use_in_a_scope(kind: Kind, work: int, timeout: float, cancelled_after: int) -> None:
        async def cancel_later() -> None:
            await turns(cancelled_after)
            scope.cancel()

        with anyio.CancelScope() as scope:
            canceller = asyncio.create_task(cancel_later())
            await use(kind, work, timeout)
        await canceller

    tasks: list[asyncio.Task[None]] = []
    for _ in range(150):
        kind, work = chance.choice(KINDS), chance.randrange(6)
        timeout = 0.0005 if chance.random() < 0.1 else SOON
        if chance.random() < 0.2:
            tasks.append(asyncio.create_task(use_in_a_scope(kind, work, timeout, chance.randrange(30))))
        else:
            tasks.append(asyncio.create_task(use(kind, work, timeout)))
        await turns(chance.randrange(4))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if result is not None]
    assert all(isinstance(error, asyncio.CancelledError | LockTimeoutError) for error in errors), errors
    assert served > 50
    await assert_free(lock)
