"""The lock across processes: the table of leases, its client, and both over Ray with processes that die."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import anyio
import pytest

from asyncsync import cluster
from asyncsync.errors import ClosedError, LockError, LockTimeoutError
from asyncsync.lock import KINDS, Kind
from asyncsync.shared_lock import LeaseTable, SharedRolloutLock

pytestmark = pytest.mark.asyncio

T = TypeVar("T")
AGAINST: dict[Kind, Kind] = {"reader": "writer", "writer": "writer", "updater": "updater"}  # who holds it up
SOON = 5.0  # seconds: a wait that long is a lock that is stuck
TTL = 1.0  # seconds, of the locks served by Ray


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def settled() -> None:
    await turns(20)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ------------------------------------------------------------------ the table


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(ttl=10.0, clock=clock)


async def test_leases_exclude_each_other_and_tokens_grow(table: LeaseTable) -> None:
    first = await table.acquire("a", "writer", "A", 60)
    waiting = asyncio.create_task(table.acquire("b", "reader", "B", 60))
    await settled()
    assert not waiting.done()
    assert re.fullmatch(r"writer A for \d\.\d\d s; waiting: 1 reader", str(await table.status()))
    assert await table.release("a")
    assert first is not None
    async with asyncio.timeout(SOON):
        assert await waiting == first + 1
    assert not await table.release("a"), "released before"


async def test_one_updater_at_a_time_whoever_reads_and_writes(table: LeaseTable) -> None:
    first = await table.acquire("a", "updater", "A", 60)
    second = asyncio.create_task(table.acquire("b", "updater", "B", 60))
    await table.acquire("r", "reader", "R", 60)
    await table.release("r")
    writer = await table.acquire("w", "writer", "A", 60)
    await settled()
    assert not second.done()
    assert first is not None
    assert writer == first + 2
    assert re.fullmatch(r"writer A for .*, updater A for \d\.\d\d s; waiting: 1 updater", str(await table.status()))
    assert await table.release("w")
    assert await table.release("a")
    async with asyncio.timeout(SOON):
        assert await second == writer + 1
    assert (await table.status()).updater == "B"


async def test_an_updater_that_is_not_heard_is_in_nobodys_way(table: LeaseTable, clock: Clock) -> None:
    """Nor is the writer that it was: the two leases end with it, each a ttl after it was last heard."""
    await table.acquire("update", "updater", "dead", 60)
    clock.now += 1
    await table.acquire("commit", "writer", "dead", 60)
    clock.now += 5
    second = asyncio.create_task(table.acquire("b", "updater", "B", 60))
    await settled()
    clock.now += 4
    table.expire()
    async with asyncio.timeout(SOON):
        assert await second is not None
    assert (await table.status()).holders == ("dead",)
    clock.now += 1
    async with asyncio.timeout(SOON):
        assert await table.acquire("w", "writer", "B", 60) is not None


async def test_a_lease_ends_a_ttl_after_it_was_last_heard(table: LeaseTable, clock: Clock) -> None:
    await table.acquire("a", "writer", "A", 60)
    clock.now += 9.9
    assert await table.renew("a")
    clock.now += 9.9
    assert (await table.status()).holders == ("A",)
    clock.now += 0.1
    assert (await table.status()).kind is None
    assert not await table.renew("a")
    assert not await table.release("a")


async def test_a_waiter_that_is_not_heard_loses_its_place(table: LeaseTable, clock: Clock) -> None:
    await table.acquire("a", "reader", "A", 60)
    for key, kind in (("dead", "writer"), ("c", "reader")):
        call = asyncio.create_task(table.acquire(key, kind, key, 60))  # type: ignore[arg-type]
        await settled()
        if key == "dead":
            clock.now += 5
    assert (await table.status()).queue == ("dead", "c")
    assert await table.renew("a")
    clock.now += 5
    table.expire()
    async with asyncio.timeout(SOON):
        assert await call is not None
    assert (await table.status()).holders == ("A", "c")


async def test_a_grant_adds_nothing_to_the_life_of_a_silent_waiter(table: LeaseTable, clock: Clock) -> None:
    await table.acquire("a", "writer", "A", 60)
    dead = asyncio.create_task(table.acquire("dead", "writer", "dead", 60))
    await settled()
    clock.now += 9
    await table.release("a")
    assert await dead is not None  # into the void: its process is gone
    clock.now += 1
    assert (await table.status()).kind is None


async def test_a_long_poll_ends_after_a_third_of_the_ttl_and_keeps_its_place(clock: Clock) -> None:
    table = LeaseTable(ttl=0.03, clock=clock)
    await table.acquire("a", "writer", "A", 60)
    assert await table.acquire("b", "writer", "B", 60) is None
    assert await table.acquire("c", "writer", "C", 60) is None
    await table.release("a")
    assert await table.acquire("c", "writer", "C", 60) is None
    assert await table.acquire("b", "writer", "B", 60) is not None


async def test_a_key_that_was_given_up_stays_refused(table: LeaseTable, clock: Clock) -> None:
    """The release may overtake the request it belongs to."""
    await table.release("late")
    with pytest.raises(LockError, match="given this request up"):
        await table.acquire("late", "writer", "ghost", 60)
    assert (await table.status()).kind is None
    clock.now += 10
    table.expire()
    assert not table._given_up


@pytest.mark.parametrize("way", ["release", "cancel"])
async def test_a_request_that_is_given_up_leaves_the_queue(table: LeaseTable, way: str) -> None:
    await table.acquire("a", "writer", "A", 60)
    call = asyncio.create_task(table.acquire("b", "writer", "B", 60))
    await settled()
    if way == "release":
        assert await table.release("b")
        with pytest.raises(LockError, match="ended while it waited"):
            await call
    else:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (await table.status()).queue == ()


async def test_a_request_times_out_by_name(table: LeaseTable) -> None:
    await table.acquire("a", "reader", "A", 60)
    with pytest.raises(LockTimeoutError, match=r"B was not given the writer side within 0\.01 s.*1 reader \(A"):
        await table.acquire("b", "writer", "B", 0.01)
    assert list(table._requests) == ["a"]


async def test_a_timer_ends_leases_when_nobody_calls() -> None:
    table = LeaseTable(ttl=0.06)
    await table.acquire("dead", "writer", "dead", 60)
    waiting = asyncio.create_task(table._lock.acquire("writer", timeout=SOON))
    async with asyncio.timeout(SOON):
        await (await waiting).release()
    assert not table._requests


# ------------------------------------------------------------------ the client, over a table in this process


class InProcess:
    """A handle as Ray's are, to a table in this loop; ``down`` plays a server that does not answer."""

    def __init__(self, table: LeaseTable) -> None:
        self.table = table
        self.down = False
        self.calls: asyncio.Queue[str] = asyncio.Queue()
        self.delays: Callable[[], int] = lambda: 0  # turns of the loop by which a message is late

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self._run(name, args)))

    async def _run(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.down:
            await asyncio.Event().wait()
        await turns(self.delays())
        self.calls.put_nowait(name)
        return await getattr(self.table, name)(*args)

    def end_leases(self) -> None:
        for key in list(self.table._requests):
            self.table._end(key)


def local_lock(ttl: float = 0.3) -> SharedRolloutLock:
    return SharedRolloutLock(InProcess(LeaseTable(name="shared", ttl=ttl)), name="shared", lease_ttl=ttl)


async def assert_free(lock: SharedRolloutLock) -> None:
    await settled()
    status = await lock.status()
    assert str(status) == "free"
    assert lock._tenures == {}


async def test_the_same_calls_as_the_lock_in_one_process() -> None:
    lock = local_lock()
    async with lock.reader(holder="R") as lease:
        assert (lease.kind, lease.holder, lease.lost) == ("reader", "R", None)
        assert lock.holds() == "reader"
        with pytest.raises(LockError, match="would wait for itself"):
            await lock.acquire("writer")
        writer = asyncio.create_task(lock.acquire("writer", holder="W"))
        await settled()
        async with lock.reader() as again:
            assert again.token == lease.token
        assert re.fullmatch(r"1 reader \(R for \d\.\d\d s\); waiting: 1 writer", str(await lock.status()))
        assert repr(lock) == "<SharedRolloutLock 'shared': reader R held by this object>"
    won = await writer
    assert won.token > lease.token
    with pytest.raises(LockTimeoutError, match=r"shared: late was not given the reader side within 0.02 s.*writer W"):
        await lock.acquire("reader", timeout=0.02, holder="late")
    await asyncio.create_task(won.release())
    await won.release()
    with pytest.raises(ValueError, match="positive, finite"):
        await lock.acquire("reader", timeout=0)
    await assert_free(lock)
    await lock.aclose()
    with pytest.raises(ClosedError):
        await lock.acquire("reader")


async def test_an_updater_writes_within_and_asks_for_nothing_twice() -> None:
    lock = local_lock()
    async with lock.updater(holder="U") as update:
        assert (update.kind, lock.holds()) == ("updater", None)
        with pytest.raises(LockError, match=r"holds the updater side and asks for the updater side.*wait for itself"):
            await lock.acquire("updater")
        async with lock.writer(holder="W") as commit:
            assert commit.token > update.token
            assert lock.holds() == "writer"
            assert repr(lock) == "<SharedRolloutLock 'shared': updater U, writer W held by this object>"
        assert repr(lock) == "<SharedRolloutLock 'shared': updater U held by this object>"
        other = asyncio.create_task(lock.acquire("writer"))  # another task of the updater's
        async with asyncio.timeout(SOON):
            await (await other).release()
        late = asyncio.create_task(lock.acquire("updater", timeout=0.02, holder="late"))
        with pytest.raises(LockTimeoutError, match=r"late was not given the updater side within 0.02 s.*updater U for"):
            await late
    async with lock.writer():
        with pytest.raises(LockError, match="holds the writer side and asks for the updater side"):
            await lock.acquire("updater")
    await assert_free(lock)


async def test_a_copy_holds_nothing() -> None:
    lock = SharedRolloutLock("handle", name="shared", lease_ttl=1.0)
    lock._owns_server = True
    copy = pickle.loads(pickle.dumps(lock))
    assert (copy._server, copy.name, copy.lease_ttl, copy._owns_server) == ("handle", "shared", 1.0, False)


async def test_a_lease_is_renewed_while_it_is_held() -> None:
    lock = local_lock(ttl=0.15)
    async with lock.writer() as lease:
        renewals = 0
        async with asyncio.timeout(SOON):
            while renewals < 5:  # well past the first ttl
                renewals += await lock._server.calls.get() == "renew"
    assert lease.lost is None
    await assert_free(lock)


@pytest.mark.parametrize("scope_kind", ["asyncio", "anyio"])
@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("turn", range(16))
@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_at_every_turn(kind: Kind, turn: int, contended: bool, scope_kind: str) -> None:
    lock = local_lock(ttl=5)
    scope = anyio.CancelScope()

    async def use() -> None:
        with scope:
            async with getattr(lock, kind)():
                await asyncio.sleep(0)

    hold = await asyncio.create_task(lock.acquire(AGAINST[kind])) if contended else None
    victim = asyncio.create_task(use())
    if hold is not None:
        await settled()
        hold.release_nowait()
    await turns(turn)
    if scope_kind == "anyio":
        scope.cancel()
    else:
        victim.cancel()
    async with asyncio.timeout(1):
        await asyncio.wait({victim})
    await assert_free(lock)


async def test_a_closed_coroutine_gives_its_lease_back() -> None:
    lock = local_lock()

    async def use() -> None:
        async with lock.writer():
            await asyncio.Event().wait()

    coroutine = use()
    call = coroutine.send(None)
    await asyncio.wait({call})
    coroutine.send(None)
    assert lock.holds() == "writer"
    coroutine.close()
    await assert_free(lock)


@pytest.mark.parametrize("kind", ["writer", "updater"])
async def test_a_lost_lease_cancels_the_body(kind: Kind) -> None:
    lock = local_lock()

    async def use() -> None:
        async with asyncio.timeout(SOON), getattr(lock, kind)():
            lock._server.end_leases()
            await asyncio.Event().wait()

    with pytest.raises(LockError, match=f"lost its {kind} lease 1: it had ended at the server") as caught:
        await use()
    assert "Another may hold the lock now" in str(caught.value)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
    await assert_free(lock)


async def test_a_lost_lease_cancels_the_inner_body_and_both_end() -> None:
    lock = local_lock()
    inner: list[LockError] = []

    async def use() -> None:
        async with asyncio.timeout(SOON), lock.reader():
            try:
                async with lock.reader():
                    lock._server.down = True
                    await asyncio.Event().wait()
            except LockError as error:
                inner.append(error)

    with pytest.raises(LockError, match="lost its reader lease"):
        await use()
    assert "could not be renewed in time" in str(inner[0])


@pytest.mark.parametrize("lost", ["updater", "writer", "both"])
async def test_an_updater_that_writes_is_cancelled_whichever_lease_it_loses(lost: str) -> None:
    lock = local_lock()
    cut = False

    async def use() -> None:
        nonlocal cut
        async with asyncio.timeout(SOON), lock.updater():
            update = set(lock._server.table._requests)
            async with lock.writer():
                both = set(lock._server.table._requests)
                for key in {"updater": update, "writer": both - update, "both": both}[lost]:
                    lock._server.table._end(key)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cut = True
                    raise

    match = {"updater": "its updater lease 1", "writer": "its writer lease 2", "both": "lost its"}[lost]
    with pytest.raises(LockError, match=match):
        await use()
    assert cut
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
    await assert_free(lock)


async def test_an_error_of_the_body_comes_out_as_it_is() -> None:
    lock = local_lock()
    error = StopAsyncIteration("of the body")
    with pytest.raises(StopAsyncIteration) as caught:
        async with lock.writer():
            raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    await assert_free(lock)


async def test_an_error_of_a_body_that_lost_its_lease_says_so() -> None:
    lock = local_lock()

    async def use() -> None:
        async with lock.writer():
            lock._server.end_leases()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise KeyError("of the clean-up") from None

    with pytest.raises(KeyError, match="of the clean-up") as caught:
        await use()
    assert "lost its writer lease" in caught.value.__notes__[0]


async def test_a_cancellation_beside_the_loss_is_passed_on() -> None:
    lock = local_lock()
    inside = asyncio.Event()

    async def use() -> None:
        async with lock.writer():
            lock._server.end_leases()
            inside.set()
            try:
                await asyncio.Event().wait()
            finally:
                task.cancel()

    task = asyncio.create_task(use())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_body_that_swallows_the_cancellation_is_told_at_the_end() -> None:
    lock = local_lock()

    async def use() -> None:
        async with lock.writer():
            lock._server.end_leases()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    with pytest.raises(LockError, match="lost its writer lease"):
        await use()


async def test_a_body_that_blocked_the_loop_is_told_at_the_end() -> None:
    lock = local_lock(ttl=0.05)
    with pytest.raises(LockError, match="not renewed in time"):
        async with lock.writer():
            threading.Event().wait(0.1)


async def test_a_lease_without_a_body_says_that_it_is_lost() -> None:
    lock = local_lock(ttl=0.1)
    lease = await lock.acquire("writer")
    lock._server.end_leases()
    async with asyncio.timeout(SOON):
        await asyncio.wait({tenure._renewing for tenure in lock._tenures.values()})
    assert lease.lost == "it had ended at the server"
    with pytest.raises(LockError, match="lost its writer lease"):
        await lease.release()
    await lease.release()


async def test_a_server_that_does_not_answer_is_a_timeout() -> None:
    lock = local_lock(ttl=0.05)
    lock._server.down = True
    with pytest.raises(LockTimeoutError, match="the lock server does not answer"):
        await lock.acquire("writer", timeout=0.05)
    with pytest.raises(LockError, match="does not answer"):
        await lock.status()


@pytest.mark.parametrize("seed", range(6))
async def test_random_use_over_messages_that_overtake_each_other(seed: int) -> None:
    chance = random.Random(seed)
    lock = local_lock(ttl=30)
    lock._server.delays = lambda: chance.randrange(8)
    inside: Counter[Kind] = Counter()
    served = 0

    async def use(kind: Kind, work: int) -> None:
        nonlocal served
        async with getattr(lock, kind)(timeout=SOON):
            inside[kind] += 1
            try:
                for _ in range(work):
                    assert inside[kind] == 1 or kind == "reader"
                    assert kind == "updater" or not (inside["reader"] and inside["writer"])
                    await asyncio.sleep(0)
                if kind == "updater" and work % 2:
                    await use("writer", work)
                served += 1
            finally:
                inside[kind] -= 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(80):
        tasks.append(asyncio.create_task(use(chance.choice(KINDS), chance.randrange(6))))
        await turns(chance.randrange(10))
        if chance.random() < 0.4:
            chance.choice(tasks).cancel()
    async with asyncio.timeout(2 * SOON):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if result is not None]
    assert all(isinstance(error, asyncio.CancelledError) for error in errors), errors
    assert served > 30
    await assert_free(lock)


# ------------------------------------------------------------------ over Ray, with processes of their own


def client_class() -> type:
    """The class is local, so that Ray pickles it whole: the actor's process cannot import this module."""

    class Client:
        """Uses the lock in a process of its own."""

        def __init__(self) -> None:
            self.inside = asyncio.Event()

        async def pid(self) -> int:
            return os.getpid()

        async def turns(self, lock: SharedRolloutLock, kind: Kind, count: int) -> list[tuple[int, float, float]]:
            """Take the lock ``count`` times; token, entered and left on the system's monotonic clock."""
            spans = []
            for _ in range(count):
                async with getattr(lock, kind)(timeout=SOON) as lease:
                    entered = time.monotonic()
                    await asyncio.sleep(0.001)
                    spans.append((lease.token, entered, time.monotonic()))
            return spans

        async def hold(self, lock: SharedRolloutLock, kinds: list[Kind], holder: str) -> str:
            """Hold these sides, each within the one before, until a lease is lost; the error's text."""
            try:
                async with AsyncExitStack() as stack:
                    for kind in kinds:
                        await stack.enter_async_context(getattr(lock, kind)(holder=holder, timeout=30))
                    self.inside.set()
                    await asyncio.Event().wait()
            except LockError as error:
                return f"{type(error).__name__}: {error}"
            finally:
                self.inside.clear()
            return "left"

        async def wait_inside(self) -> None:
            await self.inside.wait()

    return Client


async def start_client() -> tuple[Any, int]:
    client = await cluster.start_actor(client_class())
    return client, await cluster.call(client, "pid")


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on a loop of its own, on a thread: out of pytest-asyncio's way."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@pytest.fixture(scope="module")
def shared_lock(ray_cluster: None) -> Iterator[SharedRolloutLock]:
    lock = run_apart(SharedRolloutLock.create(lease_ttl=TTL))
    yield lock
    run_apart(lock.aclose())


@pytest.fixture(scope="module")
def clients(ray_cluster: None) -> Iterator[list[tuple[Any, int]]]:
    """Two processes, for tests that let them live."""

    async def start() -> list[tuple[Any, int]]:
        return list(await asyncio.gather(start_client(), start_client()))

    started = run_apart(start())
    yield started
    for client, _ in started:
        run_apart(cluster.kill_actor(client))


async def take(lock: SharedRolloutLock, kinds: list[Kind]) -> list[int]:
    """Enter these sides, each within the one before, and leave; their tokens."""
    async with AsyncExitStack() as stack:
        entries = [getattr(lock, kind)(timeout=SOON) for kind in kinds]
        return [(await stack.enter_async_context(entry)).token for entry in entries]


async def queue(lock: SharedRolloutLock) -> tuple[str, ...]:
    status = await lock.status()
    return status.queue + status.updater_queue


async def waiting_for(lock: SharedRolloutLock, count: int) -> None:
    """Ask until ``count`` wait in the server's queues."""
    async with asyncio.timeout(SOON):
        while len(await queue(lock)) != count:  # noqa: ASYNC110 - it is another process that knows
            await asyncio.sleep(0.01)


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["writer", "updater"])
async def test_processes_exclude_each_other(
    shared_lock: SharedRolloutLock, clients: list[tuple[Any, int]], kind: Kind
) -> None:
    lock = shared_lock
    spans = await asyncio.gather(
        *(cluster.call(client, "turns", lock, kind, 15) for client, _ in clients),
        client_class()().turns(lock, kind, 15),
    )
    ordered = sorted(span for part in spans for span in part)
    assert len(ordered) == 45
    assert len({token for token, _, _ in ordered}) == 45
    for (_, _, left), (_, entered, _) in pairwise(ordered):
        assert left <= entered, "two processes were inside at once"


@pytest.mark.ray
@pytest.mark.parametrize(
    "kinds", [["writer"], pytest.param(["updater", "writer"], marks=pytest.mark.exhaustive)], ids="-".join
)
async def test_a_killed_holder_and_a_killed_waiter_let_go(shared_lock: SharedRolloutLock, kinds: list[Kind]) -> None:
    lock = shared_lock
    (holder, holder_pid), (waiter, waiter_pid) = await asyncio.gather(start_client(), start_client())
    before = await lock.acquire("writer")
    await before.release()

    cluster.send(holder, "hold", lock, kinds, "doomed holder")
    await cluster.call(holder, "wait_inside")
    cluster.send(waiter, "hold", lock, kinds, "doomed waiter")
    await waiting_for(lock, 1)
    next_one = asyncio.create_task(take(lock, kinds))
    await waiting_for(lock, 2)
    assert (await queue(lock))[0] == "doomed waiter"

    killed = time.monotonic()
    os.kill(waiter_pid, signal.SIGKILL)
    os.kill(holder_pid, signal.SIGKILL)
    tokens = await next_one
    # Both were last heard before they were killed: no more than one ttl for the two of them together.
    assert time.monotonic() - killed < 1.6 * TTL
    assert tokens[0] > before.token
    assert str(await lock.status()) == "free"


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["writer", "updater"])
async def test_a_stopped_holder_learns_that_it_lost_the_lease(
    shared_lock: SharedRolloutLock, clients: list[tuple[Any, int]], kind: Kind
) -> None:
    lock = shared_lock
    client, pid = clients[0]
    outcome = cluster.send(client, "hold", lock, [kind], "sleeper")
    await cluster.call(client, "wait_inside")
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(SOON):
            lease = await lock.acquire(kind, timeout=SOON)
    finally:
        os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(SOON):
        text = await outcome
    assert text.startswith(f"LockError: shared rollout lock: sleeper lost its {kind} lease")
    assert lease.lost is None
    await lease.release()


@pytest.mark.ray
async def test_a_cancelled_or_late_waiter_leaves_the_queue(shared_lock: SharedRolloutLock) -> None:
    lock = shared_lock
    async with lock.writer(holder="update-7"):
        waiter = asyncio.create_task(lock.acquire("reader"))
        await waiting_for(lock, 1)
        waiter.cancel()
        cancelled = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await waiting_for(lock, 0)
        assert time.monotonic() - cancelled < TTL / 2, "it was the ttl that ended the wait"
        late = asyncio.create_task(lock.acquire("writer", timeout=0.1, holder="late"))
        with pytest.raises(LockTimeoutError, match=r"late was not given.*writer update-7 for"):
            await late
        assert (await lock.status()).queue == ()
    async with lock.reader(timeout=SOON):
        pass


@pytest.mark.exhaustive
@pytest.mark.ray
async def test_a_named_server_that_is_found_killed_and_made_anew(ray_cluster: None) -> None:
    lock = await SharedRolloutLock.create("weights", lease_ttl=TTL)
    same = await SharedRolloutLock.create("weights", lease_ttl=99)
    assert same.lease_ttl == TTL
    async with lock.writer(holder="W"):
        assert (await same.status()).holders == ("W",)
    await same.aclose()  # it only found the server, and does not stop it
    async with lock.writer() as lease:
        token = lease.token

    async def use() -> None:
        async with asyncio.timeout(SOON), lock.writer():
            waiter = asyncio.create_task(lock.acquire("reader"))
            await waiting_for(lock, 1)
            await lock.aclose()  # it made the server: this kills it
            with pytest.raises(LockError, match="the lock server is gone"):
                await waiter
            await asyncio.Event().wait()

    with pytest.raises(LockError, match=r"lost its writer lease.*the lock server is gone"):
        await use()

    anew = await SharedRolloutLock.create("weights", lease_ttl=TTL)
    async with anew.writer() as lease:
        assert lease.token > token, "tokens grow over the death of a server"
    await anew.aclose()
