"""Shared memory: lines, sets and what is adopted, in one process; and with real ones that die."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import WeightSynchronizer
from asyncsync.errors import ConnectError, LinkLostError, OutOfStepError, TransferError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, EngineStatus, Rendezvous
from asyncsync.rank_worker import RankWorker
from asyncsync.threads import WorkerThread
from asyncsync.transports import shared
from asyncsync.transports.base import LentArena
from asyncsync.transports.host_memory import available_memory
from asyncsync.transports.memory_files import Mapping, SharedSet, SharedSets, new_memory_file, this_node
from asyncsync.transports.shared import SharedEngineLink, SharedJoining, SharedSourceLink
from tests.actors import Engine, Flat, Trainer
from tests.engines import ToldEngine, change, fills_are_noted, holds, synced, zoo
from tests.faulty import BUCKET, FaultyEngine, weights
from tests.sample import Zoo, contents, fingerprint, random_bytes

NBYTES = 3 * 4096 + 5
TOKEN = "a group"
NEVER = threading.Event()


def rendezvous(rank: int, size: int, **changes: float) -> Rendezvous:
    base = Rendezvous(
        connection=TOKEN,
        backend="gloo",
        transport="shared",
        rank=rank,
        world_size=size,
        join_timeout=10,
        operation_timeout=30,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def joining(
    rank: int, size: int, sets: SharedSets | None, **changes: float
) -> AsyncIterator[tuple[SharedJoining, Awaitable[Any]]]:
    """A member that joins, on a thread of its own."""
    worker = WorkerThread(f"rank {rank}")
    member = SharedJoining(rendezvous(rank, size, **changes), sets=sets)
    joined = asyncio.wrap_future(worker.submit(member.join))
    yield member, joined
    member.stop()
    await asyncio.wait([joined])
    worker.close()


@asynccontextmanager
async def group(sets: SharedSets, size: int = 2) -> AsyncIterator[tuple[SharedSourceLink, list[SharedEngineLink]]]:
    """A source and engines whose lines are connected."""
    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(joining(rank, size, None if rank else sets)) for rank in range(size)]
        contacts: Contacts = {}
        for member, _ in members:
            contacts |= await member.contacts()
        for member, _ in members:
            member.introduce(contacts)
        source, *engines = [await joined for _, joined in members]
        yield source, engines
        for link in (source, *engines):
            link.close()


def send(source: SharedSourceLink, sets: SharedSets, epoch: int, content: Tensor) -> tuple[SharedSet, int]:
    """Write a set in two buckets; what is to be waited for."""
    source.hear()
    taken = sets.take(content.numel())
    source.begin(epoch, taken, 2)
    taken.memory.copy_(content)
    source.start_send(taken.memory[:4096])
    return taken, source.start_send(taken.memory[4096:])


def receive(link: SharedEngineLink, epoch: int) -> LentArena:
    """Take a set, and keep it."""
    lent = link.arena(epoch, NBYTES, NEVER)
    for _ in range(2):
        link.wait(link.start_receive(lent.memory), NEVER)
    link.finish()
    return lent


# -- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_is_written_once_is_read_by_all_and_two_sets_change_places() -> None:
    sets, held, numbers = SharedSets(), dict[SharedEngineLink, LentArena](), []
    async with group(sets, 3) as (source, engines):
        for epoch in range(1, 6):
            content = random_bytes(NBYTES, epoch)
            taken, last = send(source, sets, epoch, content)
            numbers.append(taken.number)
            for link in engines:
                lent = receive(link, epoch)
                assert torch.equal(lent.memory, content)
                if link in held:
                    held[link].let_go()
                held[link] = lent
            source.wait(last, NEVER)
    assert numbers == [1, 2, 1, 2, 1]


@pytest.mark.asyncio
async def test_a_set_that_somebody_holds_is_not_written_to_whatever_becomes_of_his_line() -> None:
    sets = SharedSets()
    async with group(sets, 3) as (source, (one, other)):
        old = random_bytes(NBYTES, 0)
        first, _ = send(source, sets, 1, old)
        held = receive(one, 1)
        receive(other, 1).let_go()
        for epoch in range(2, 5):
            taken, _ = send(source, sets, epoch, random_bytes(NBYTES, epoch))
            assert taken is not first
            for link in (one, other):
                receive(link, epoch).let_go()
            assert torch.equal(held.memory, old)
        one.close()
        with pytest.raises(LinkLostError, match="rank 1 has left") as caught:
            source.wait(2, NEVER)
        assert caught.value.peers == {(TOKEN, 1)}
        assert first.retired
        for epoch in range(5, 8):
            taken, _ = send(source, sets, epoch, random_bytes(NBYTES, epoch))
            receive(other, epoch).let_go()
            assert taken is not first
        assert len(sets.numbers) <= 2
        assert other._sets.keys() <= sets.numbers, "it does not keep mapped what was retired"
        held.let_go()  # nobody hears it any more
        assert torch.equal(held.memory, old)


def test_sets_beyond_two_are_given_up_once_nobody_holds_them() -> None:
    sets, holder = SharedSets(), object()
    taken = []
    for epoch in range(4):
        taken.append(sets.take(NBYTES))
        sets.lend(taken[-1], holder, epoch)
    assert sets.numbers == {1, 2, 3, 4}
    for epoch, each in enumerate(taken):
        sets.let_go(each.number, holder, epoch)
    sets.take(NBYTES)
    assert len(sets.numbers) == 2


@pytest.mark.asyncio
async def test_what_an_engine_writes_is_seen_there_alone_and_gone_with_the_next_update() -> None:
    sets = SharedSets()
    async with group(sets, 3) as (source, (one, other)):
        for epoch in range(1, 4):
            content = random_bytes(NBYTES, epoch)
            taken, _ = send(source, sets, epoch, content)
            assert taken.number == 1, "it comes again"
            mine, others = receive(one, epoch), receive(other, epoch)
            assert torch.equal(mine.memory, content), "what was written before is gone"
            mine.memory.zero_()
            assert torch.equal(others.memory, content)
            assert torch.equal(taken.memory, content)
            mine.let_go()
            others.let_go()


@pytest.mark.asyncio
async def test_a_late_epoch_is_refused_and_what_was_sent_in_it_is_let_go_of() -> None:
    sets = SharedSets()
    async with group(sets) as (source, (engine,)):
        late, _ = send(source, sets, 1, random_bytes(NBYTES, 1))  # and nobody begins to receive it
        assert late.holders
        content = random_bytes(NBYTES, 2)
        taken, last = send(source, sets, 2, content)
        assert taken is not late
        assert torch.equal(receive(engine, 2).memory, content)
        source.wait(last, NEVER)
        assert not late.holders
        send(source, sets, 3, content)
        with pytest.raises(LinkLostError, match="another update than that of epoch 1"):
            engine.arena(1, NBYTES, NEVER)


@pytest.mark.asyncio
async def test_waits_can_be_stopped_and_closing_ends_them() -> None:
    sets = SharedSets()
    async with group(sets) as (source, (engine,)):
        _, last = send(source, sets, 1, random_bytes(NBYTES, 1))
        waits: list[Callable[[threading.Event], object]] = [
            lambda stop: source.wait(last, stop),
            lambda stop: engine.arena(1, NBYTES, stop) and engine.arena(1, NBYTES, stop),
        ]
        for wait in waits:
            stop = threading.Event()
            waiting = asyncio.ensure_future(asyncio.to_thread(wait, stop))
            await asyncio.wait([waiting], timeout=0.05)
            assert not waiting.done()
            started = asyncio.get_running_loop().time()
            stop.set()
            with pytest.raises(LinkLostError, match="stopped"):
                await waiting
            assert asyncio.get_running_loop().time() - started < 0.5
        waiting = asyncio.ensure_future(asyncio.to_thread(engine.arena, 2, NBYTES, NEVER))
        source.close()
        with pytest.raises(LinkLostError, match="the source has left"):
            await waiting
        with pytest.raises(TransferError, match="closed"):
            source.start_send(torch.zeros(1))
        engine.close()
        with pytest.raises(TransferError, match="closed"):
            engine.start_receive(torch.zeros(1))


@pytest.mark.asyncio
async def test_an_engine_that_reads_nothing_holds_no_source_up() -> None:
    sets = SharedSets()
    async with group(sets) as (source, (engine,)):
        many = 5_000
        taken = sets.take(NBYTES)
        source.begin(1, taken, many)
        for _ in range(many):
            last = source.start_send(taken.memory)
        lent = engine.arena(1, NBYTES, NEVER)

        def take_all() -> None:
            for _ in range(many):
                engine.wait(engine.start_receive(lent.memory), NEVER)
            engine.finish()

        await asyncio.gather(asyncio.to_thread(take_all), asyncio.to_thread(source.wait, last, NEVER))


# -- strangers --------------------------------------------------------------------------------------------------------


def hello(token: str = TOKEN, rank: int = 1, protocol: int = PROTOCOL_VERSION) -> bytes:
    return shared._HELLO.pack(b"asyncsync", protocol, rank) + token.encode()


STRANGE = {
    "another token": hello("a grouq"),
    "no token": hello(""),
    "the source's rank": hello(rank=0),
    "a rank too many": hello(rank=3),
    "another protocol": hello(protocol=99),
    "garbage": os.urandom(300),
    "too short": b"asyncsync",
    "nothing": None,
}


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.asyncio
async def test_strangers_are_turned_away_and_disturb_nobody(what: str) -> None:
    async with joining(0, 3, SharedSets()) as (member, joined):
        contacts = await member.contacts()
        strangers = []
        for _ in range(shared._STRANGERS + 5):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(contacts["0"])
            said = STRANGE[what]
            if said is not None:
                stranger.send(said)
                assert await asyncio.to_thread(stranger.recv, 100) == b"", "turned away"
            strangers.append(stranger)
            if said is not None:
                break
        if STRANGE[what] is None:
            shut_out, _, _ = await asyncio.to_thread(select.select, strangers, [], [], shared.HELLO_TIMEOUT / 2)
            assert shut_out, "there are only so many who may say nothing"
            for stranger in strangers:
                stranger.close()
        async with joining(1, 3, None) as (one, first), joining(2, 3, None) as (two, second):
            for engine in (one, two):
                engine.introduce(contacts)
            source = await joined
            links = [await first, await second]
            for link in (source, *links):
                link.close()
        for stranger in strangers:
            stranger.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.asyncio
async def test_another_user_is_turned_away_though_he_knows_the_token() -> None:
    async with joining(0, 2, SharedSets()) as (member, joined):
        contacts = await member.contacts()
        script = f"""
            import os, socket
            os.setuid(65534)
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.connect({contacts["0"]!r})
            try:
                line.send({hello()!r})
                print(line.recv(100))
            except (BrokenPipeError, ConnectionResetError):
                print(b"")
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)
        assert ended.stdout.strip() == "b''"
        assert not (isinstance(joined, asyncio.Future) and joined.done())


@pytest.mark.asyncio
async def test_garbage_on_a_line_ends_it_at_both_ends() -> None:
    sets = SharedSets()
    async with group(sets, 3) as (source, (engine, other)):
        taken, last = send(source, sets, 1, random_bytes(NBYTES, 1))
        assert engine._line is not None
        engine._line.send(os.urandom(40))
        with pytest.raises(LinkLostError, match="rank 1 has left"):
            source.wait(last, NEVER)
        assert taken.retired
        line = source._peers[1].line
        assert line is not None
        receive(other, 1)
        line.send(os.urandom(40))
        with pytest.raises(LinkLostError, match="nobody understands"):
            other.arena(2, NBYTES, NEVER)


@pytest.mark.asyncio
async def test_a_file_that_could_be_cut_off_under_its_readers_is_refused() -> None:
    sets = SharedSets()
    async with group(sets) as (source, (engine,)):
        taken = sets.take(NBYTES)
        fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NBYTES)
        own, taken.fd = taken.fd, fd
        source.begin(1, taken, 1)
        with pytest.raises(LinkLostError, match="no sealed file"):
            engine.arena(1, NBYTES, NEVER)
        taken.fd = own
        os.close(fd)


@pytest.mark.asyncio
async def test_a_member_that_does_not_come_is_an_error_in_time_and_joining_can_be_stopped() -> None:
    async with joining(0, 2, SharedSets(), join_timeout=0.2) as (_, joined):
        with pytest.raises(ConnectError, match=r"rank 0 of 2 .* the other members did not come within 0\.2 s"):
            await joined
    for rank, sets in ((0, SharedSets()), (1, None)):
        async with joining(rank, 2, sets) as (member, joined):
            await member.contacts()
            member.stop()
            with pytest.raises(ConnectError, match="joining was stopped"):
                await joined
    async with joining(1, 2, None) as (member, joined):
        member.introduce({"0": b"\0asyncsync-nobody"})
        with pytest.raises(ConnectError, match="refused"):
            await joined
    with pytest.raises(ConnectError, match=f"protocol {PROTOCOL_VERSION}, the other 99"):
        SharedJoining(rendezvous(0, 2, protocol=99), sets=SharedSets())


# -- sets and memory --------------------------------------------------------------------------------------------------


def test_a_set_keeps_its_size_and_can_be_written_to_by_nobody_else() -> None:
    made = SharedSet(1, NBYTES)
    for size in (0, 2 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(made.fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    assert os.fstat(made.fd).st_mode & 0o777 == 0o600
    assert os.fstat(made.fd).st_nlink == 0, "it never had a name"


def test_a_mapping_goes_with_its_last_tensor_and_keeps_no_descriptor() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:asyncsync" in line for line in file)

    before, descriptors = mapped(), os.listdir("/proc/self/fd")
    fd = new_memory_file(NBYTES)
    view = Mapping(fd, NBYTES, private=True).memory[5:7]
    os.close(fd)
    assert mapped() == before + 1
    assert os.listdir("/proc/self/fd") == descriptors
    view[0] = 1
    del view
    assert mapped() == before


def test_too_little_memory_is_told_with_what_is_needed_and_what_there_is() -> None:
    sets = SharedSets(lambda: 3_000_000)
    assert sets.shortage(1_500_000) is None
    assert sets.shortage(2_000_000) == (
        "shared memory for 2 sets of the weights needs 4 MB, and there is 3 MB of memory left"
    )
    sets.take(2_000_000)
    assert sets.shortage(2_000_000) is None, "one is there"
    with pytest.raises(OutOfStepError, match=r"for a set of the weights needs 4 MB, and there is 3 MB"):
        sets.take(4_000_000)
    assert SharedSets(lambda: None).shortage(1 << 60) is None, "nobody tells"


MACHINE = {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}
V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MACHINE, 8000 * 1024),
        (
            MACHINE
            | {"/proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n", f"{V2}/a/b/memory.current": "7"}
            | {f"{V2}/a/memory.max": "5000", f"{V2}/a/memory.current": "4000"}
            | {f"{V2}/a/memory.stat": "anon 1\ninactive_file 500\n"},
            1500,
        ),
        (
            MACHINE
            | {"/proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/x\n", f"{V1}/x/memory.limit_in_bytes": "5000"}
            | {f"{V1}/x/memory.usage_in_bytes": "6000", f"{V1}/x/memory.stat": "total_inactive_file 200"},
            0,
        ),
        (
            MACHINE
            | {"/proc/self/cgroup": "4:memory:/of/the/host\n", f"{V1}/memory.limit_in_bytes": "900"}
            | {f"{V1}/memory.usage_in_bytes": "100", f"{V1}/memory.stat": ""},
            800,
        ),
    ],
    ids=["nothing tells", "the machine", "a group around it, v2", "its group, v1", "in a container"],
)
def test_what_memory_is_left_is_the_least_that_anything_leaves(files: dict[str, str], free: int | None) -> None:
    def read(path: str) -> str:
        try:
            return files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    assert available_memory(read) == free


def test_this_machine_tells_what_memory_is_left() -> None:
    free = available_memory()
    assert free is not None
    assert 0 < free < psutil.virtual_memory().total


# -- updates ----------------------------------------------------------------------------------------------------------


def sets_of(synchronizer: WeightSynchronizer) -> SharedSets:
    worker = synchronizer._sources.all[0].trainer
    assert isinstance(worker, RankWorker)
    return worker._sets


def memory_of(engine: asyncsync.ModuleEngine) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in engine.module.parameters()}


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
@pytest.mark.asyncio
async def test_engines_on_this_node_are_updated_through_two_sets(staged: bool) -> None:
    open_before = files_of(os.getpid())
    async with synced(staged=staged) as (trainer, engines, synchronizer):
        for _ in range(5):
            change(trainer)
            update = await synchronizer.update_weights()
            assert all(holds(engine, trainer) for engine in engines)
            assert [outcome.transport for outcome in update.outcomes] == ["shared", "shared"]
            assert {outcome.digest for outcome in update.outcomes} == {update.digest}
            if staged:
                assert len(memory_of(engines[0])) == 1, "adopted, not copied"
        sets = len(sets_of(synchronizer).numbers)
        assert sets == (2 if staged else 1)
        assert files_of(os.getpid()) <= open_before + sets, "engines keep no descriptors"


@pytest.mark.asyncio
async def test_a_weight_that_an_engine_writes_to_changes_there_alone() -> None:
    async with synced() as (trainer, (one, other), synchronizer):
        for _ in range(4):
            change(trainer)
            await synchronizer.update_weights()
            assert holds(one, trainer), "what it wrote before is gone"
            change(one.module)
            assert not holds(one, trainer)
            assert holds(other, trainer)


async def removed(synchronizer: WeightSynchronizer, engine: ToldEngine) -> None:
    await synchronizer.remove_engine(engine)


async def hung_up(synchronizer: WeightSynchronizer, engine: ToldEngine) -> None:
    await synchronizer.remove_engine(engine)
    for seat in engine._asyncsync.receiver.seats.values():
        seat.close()


async def failing(synchronizer: WeightSynchronizer, engine: ToldEngine) -> None:
    async def fail() -> None:
        raise RuntimeError("no")

    engine.before["receive_weights"] = fail
    synchronizer._on_engine_failure = "drop"


@pytest.mark.parametrize("leave", [removed, hung_up, failing])
@pytest.mark.asyncio
async def test_the_weights_of_an_engine_that_stays_behind_are_never_torn(
    leave: Callable[[WeightSynchronizer, ToldEngine], Awaitable[None]],
) -> None:
    async with synced() as (trainer, (one, other), synchronizer):
        await synchronizer.update_weights()
        await synchronizer.update_weights()
        held = contents(one.module)
        await leave(synchronizer, one)
        for _ in range(5):
            change(trainer)
            await synchronizer.update_weights()
            assert contents(one.module) == held
            assert holds(other, trainer)
        assert len(sets_of(synchronizer).numbers) <= 2
    assert contents(one.module) == held


@pytest.mark.parametrize("shares_trainer", [True, False], ids=["of the same trainer", "of another trainer"])
@pytest.mark.asyncio
async def test_what_another_synchronizer_does_leaves_adopted_weights_as_they_are(shares_trainer: bool) -> None:
    trainer = Zoo(1)
    rank = RankWorker(trainer)
    one, other = ToldEngine(zoo(50)), ToldEngine(zoo(51))
    options: dict[str, Any] = {"bucket_size": 1024, "timeout": 60.0, "transport": "shared"}
    async with (
        WeightSynchronizer([rank], [one], **options) as first,
        WeightSynchronizer([rank] if shares_trainer else trainer, [other], **options) as second,
    ):
        for _ in range(3):
            change(trainer)
            await first.update_weights()
            held = contents(one.module)
            for _ in range(3):
                change(trainer)
                await second.update_weights()
                assert holds(other, trainer)
                assert contents(one.module) == held
    async with WeightSynchronizer([rank], [one], **options) as successor:  # the conductor was replaced
        await successor.connect()
        assert contents(one.module) == held
        for _ in range(3):
            change(trainer)
            await successor.update_weights()
            assert holds(one, trainer)
    rank.close()


@pytest.mark.asyncio
async def test_what_was_received_for_nothing_is_let_go_of_and_written_again() -> None:
    async with synced(on_engine_failure="abort") as (trainer, (one, other), synchronizer):
        await synchronizer.update_weights()
        await synchronizer.update_weights()
        sets, held = sets_of(synchronizer), contents(one.module)
        for _ in range(3):

            async def fail() -> None:
                raise RuntimeError("no")

            other.before["pause_generation"] = fail
            change(trainer)
            with pytest.raises(asyncsync.EngineError, match="no"):
                await synchronizer.update_weights()
            assert contents(one.module) == held
            synchronizer._sources.all[0].trainer._engine_seats.copy().popitem()[1].link.hear()  # type: ignore[attr-defined]
            assert sum(bool(each.holders) for each in sets._sets) == 1, "only what is in service is held"
        await synchronizer.update_weights()
        assert holds(one, trainer)
        assert sets.numbers == {1, 2}


@pytest.mark.asyncio
async def test_joiners_are_a_cohort_that_reads_the_same_set() -> None:
    async with synced(count=1) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        joiner = ToldEngine(zoo(60))
        await synchronizer.add_engine(joiner)
        assert holds(joiner, trainer), "it caught up over a broadcast"
        for _ in range(3):
            change(trainer)
            await synchronizer.update_weights()
            assert holds(joiner, trainer)
            assert holds(engines[0], trainer)
        assert len(synchronizer._connection._cohorts) == 2
        assert len(sets_of(synchronizer).numbers) == 2


class Elsewhere(ToldEngine):
    """An engine that is on another node."""

    async def describe_engine(self) -> EngineStatus:
        return replace(await super().describe_engine(), node="elsewhere")


@pytest.mark.asyncio
async def test_one_reading_of_the_weights_serves_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = fills_are_noted(monkeypatch)
    trainer, near, far = Zoo(1), [ToldEngine(zoo(50)), ToldEngine(zoo(51), staged=False)], Elsewhere(zoo(52))
    async with WeightSynchronizer(trainer, [*near, far], bucket_size=1024, timeout=60) as synchronizer:
        for _ in range(3):
            change(trainer)
            filled.clear()
            update = await synchronizer.update_weights()
            assert filled == list(range(update.buckets))
            assert all(holds(engine, trainer) for engine in (*near, far))
            assert [outcome.transport for outcome in update.outcomes] == ["shared", "shared", "broadcast"]


@pytest.mark.asyncio
async def test_shared_memory_that_was_asked_for_and_cannot_be_is_an_error_by_name() -> None:
    engines = [ToldEngine(zoo(50)), Elsewhere(zoo(51))]
    async with WeightSynchronizer(Zoo(1), engines, transport="shared") as synchronizer:
        with pytest.raises(ConnectError, match=r"Elsewhere-1: it is not on the trainer's node") as caught:
            await synchronizer.update_weights()
        assert "ToldEngine" not in str(caught.value)
        assert [engine.calls for engine in engines] == [["describe_engine"]] * 2, "before anything else"


@pytest.mark.parametrize("transport", ["auto", "shared"])
@pytest.mark.asyncio
async def test_a_full_memory_is_told_before_anything_or_a_broadcast_does_it(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with synced(staged=False, transport=transport) as (trainer, engines, synchronizer):
        sets_of(synchronizer)._available = lambda: 1000
        if transport == "shared":
            with pytest.raises(ConnectError, match=r"needs 10\.8 kB, and there is 1 kB of memory left"):
                await synchronizer.update_weights()
            assert not {"pause_generation", "receive_weights"} & set(engines[0].calls)
        else:
            with caplog.at_level(logging.WARNING, "asyncsync"):
                update = await synchronizer.update_weights()
            assert "10.8 kB" in caplog.text
            assert {outcome.transport for outcome in update.outcomes} == {"broadcast"}
            assert all(holds(engine, trainer) for engine in engines)
            sets_of(synchronizer)._available = lambda: None
            synchronizer._connection.forget()
            update = await synchronizer.update_weights()
            assert {outcome.transport for outcome in update.outcomes} == {"shared"}


@pytest.mark.asyncio
async def test_memory_that_is_used_up_between_two_updates_ends_none() -> None:
    async with synced() as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        sets_of(synchronizer)._available = lambda: 1000  # the second set is not there yet
        change(trainer)
        update = await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in engines)
        assert {outcome.transport for outcome in update.outcomes} == {"broadcast"}


@pytest.mark.parametrize("transport", ["auto", "shared"])
@pytest.mark.asyncio
async def test_a_layout_that_changes_comes_in_sets_of_its_size(transport: str) -> None:
    trainer: dict[str, Tensor] = {"a": torch.ones(100)}
    engine = ToldEngine(torch.nn.Module())
    engine.module.a = torch.nn.Parameter(torch.zeros(100))
    async with WeightSynchronizer(trainer, [engine], transport=transport) as synchronizer:  # type: ignore[arg-type]
        await synchronizer.update_weights()
        await synchronizer.update_weights()
        for size in (3000, 50):
            trainer["a"] = torch.full((size,), float(size))
            engine.module.a = torch.nn.Parameter(torch.zeros(size))
            for _ in range(3):
                trainer["a"] += 1
                await synchronizer.update_weights()
                assert torch.equal(engine.module.a, trainer["a"])
            assert len(sets_of(synchronizer).numbers) == 2


@pytest.mark.asyncio
async def test_changing_between_the_two_ways_loses_nothing() -> None:
    async with synced() as (trainer, engines, synchronizer):
        for index in range(8):
            synchronizer._connection._transport = "broadcast" if index // 2 % 2 else "shared"
            synchronizer._connection.forget()
            change(trainer)
            held = contents(engines[0].module)
            update = await synchronizer.update_weights()
            assert update.outcomes[0].transport == synchronizer._connection._transport
            assert contents(engines[0].module) != held
            assert all(holds(engine, trainer) for engine in engines)


@pytest.mark.exhaustive
def test_a_node_is_a_place_that_memory_can_be_passed_within() -> None:
    command = [sys.executable, "-c", "from asyncsync.transports.memory_files import this_node; print(this_node())"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    assert other == this_node() != ""


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.asyncio
async def test_memory_stays_flat_over_many_updates() -> None:
    def used() -> tuple[int, int]:
        with open("/proc/self/maps") as file:
            maps = sum("memfd:asyncsync" in line for line in file)
        return maps, len(os.listdir("/proc/self/fd"))

    async with synced() as (trainer, engines, synchronizer):
        for index in range(200):
            change(trainer)
            change(engines[0].module)
            await synchronizer.update_weights()
            if index == 3:
                before = used()
        assert used() == before
        assert all(holds(engine, trainer) for engine in engines)
        assert len(sets_of(synchronizer).numbers) == 2


# -- processes --------------------------------------------------------------------------------------------------------


def files_of(pid: int) -> int:
    """Descriptors of files in memory that a process has open."""
    links = [os.path.join(f"/proc/{pid}/fd", fd) for fd in os.listdir(f"/proc/{pid}/fd")]
    return sum("memfd:asyncsync" in os.readlink(link) for link in links if os.path.islink(link))


def names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "asyncsync" in name}


@pytest.mark.faults
@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["is killed", "is stopped"])
@pytest.mark.asyncio
async def test_an_engine_that_dies_in_the_middle_leaves_nothing_and_the_others_are_updated(
    ray_cluster: None, fault: str
) -> None:
    trainer = Trainer.remote(lambda: weights(1))
    engines = [FaultyEngine.remote(lambda: weights(0)) for _ in range(2)]
    async with WeightSynchronizer(trainer, engines, bucket_size=BUCKET, timeout=60, transport="shared") as synchronizer:
        await synchronizer.update_weights()
        await synchronizer.update_weights()
        pid, trainer_pid = await engines[1].pid.remote(), await trainer.pid.remote()
        await engines[1].arm.remote("receive_weights", fault)
        synchronizer._timeout = 16.0
        with pytest.raises(asyncsync.WeightUpdateError, match="EngineActor-1") as caught:
            await synchronizer.update_weights()
        assert caught.value.update is not None
        assert (await engines[0].read.remote())[1] == fingerprint(weights(1))
        if fault == "is stopped":
            os.kill(pid, signal.SIGCONT)
        synchronizer._timeout = 60.0
        while True:
            try:
                await engines[1].release.remote()
                break
            except ray.exceptions.RayActorError:
                await asyncio.sleep(0.05)
        await trainer.hold.remote(lambda: weights(2))
        for _ in range(2):
            update = await synchronizer.update_weights()
        assert [outcome.transport for outcome in update.outcomes] == ["shared"] * 2
        for engine in engines:
            assert await engine.read.remote() == (update.version, fingerprint(weights(2)))
            assert files_of(await engine.pid.remote()) == 0, "a mapping needs no descriptor"
        assert files_of(trainer_pid) == 2
        assert not names()
    assert files_of(trainer_pid) == 0
    for actor in (trainer, *engines):
        ray.kill(actor)


@pytest.mark.faults
@pytest.mark.ray
@pytest.mark.asyncio
async def test_a_trainer_that_is_killed_is_heard_at_once_and_its_engines_keep_what_they_hold(ray_cluster: None) -> None:
    trainer = Trainer.remote(lambda: Flat(8, (1000,), fill=1.0))
    engines = [Engine.remote(lambda: Flat(8, (1000,))) for _ in range(2)]
    async with WeightSynchronizer(trainer, engines, timeout=60, transport="shared") as synchronizer:
        version = (await synchronizer.update_weights()).version
        expected = [(version, fingerprint(Flat(8, (1000,), fill=1.0)))] * 2
        os.kill(await trainer.pid.remote(), signal.SIGKILL)
        with pytest.raises(asyncsync.WeightUpdateError, match="trainer"):
            await synchronizer.update_weights()
        assert [await engine.read.remote() for engine in engines] == expected
    assert not names()
    new = Flat(8, (1000,), fill=2.0)
    async with WeightSynchronizer(new, engines, timeout=60, transport="shared") as synchronizer:
        version = (await synchronizer.update_weights()).version
        assert [await engine.read.remote() for engine in engines] == [(version, fingerprint(new))] * 2
    for engine in engines:
        ray.kill(engine)


@pytest.mark.asyncio
async def test_members_meet_in_a_process_with_more_open_files_than_select_knows() -> None:
    with ExitStack() as stack:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit[0] < 1300:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limit[1]), limit[1]))
        spare = os.open(os.devnull, os.O_RDONLY)
        for fd in [spare, *(os.dup(spare) for _ in range(1100))]:
            stack.callback(os.close, fd)
        async with synced(transport="shared") as (trainer, engines, synchronizer):
            await synchronizer.update_weights()
            assert [holds(engine, trainer) for engine in engines] == [True, True]


def test_who_comes_while_many_others_are_being_let_in_is_not_turned_away() -> None:
    name = b"\0asyncsync-test-" + os.urandom(8).hex().encode()
    with ExitStack() as stack:

        def line() -> socket.socket:
            made = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            made.setblocking(False)
            return made

        listener = line()
        listener.bind(name)
        listener.listen(1)
        came = [line() for _ in range(4)]
        connected = [shared._connected(one, name) for one in came]
        assert connected[0]
        assert not connected[-1]
        for _ in range(sum(connected)):
            stack.enter_context(listener.accept()[0])
        assert shared._connected(came[-1], name)


def test_a_forked_child_keeps_no_set() -> None:
    made = SharedSet(1, NBYTES)
    child = os.fork()
    if not child:
        try:
            os.fstat(made.fd)
        except OSError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.fstat(made.fd)


@pytest.mark.asyncio
async def test_weights_that_can_only_be_copied_to_take_deltas_after_what_was_adopted() -> None:
    """All parameters are views of one memory: they are copied to, and deltas are applied to what was adopted."""

    class Views(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.flat = torch.arange(600.0) + seed
            self.a, self.b = (nn.Parameter(part) for part in torch.split(self.flat, 300))

    trainer, engine = Views(1), ToldEngine(Views(2))
    async with WeightSynchronizer(trainer, [engine], transport="shared", delta=True, timeout=60) as synchronizer:
        for number in range(6):
            update = await synchronizer.update_weights()
            assert update.outcomes[0].delta == (number > 0)
            assert contents(engine.module) == contents(trainer)
            with torch.no_grad():
                trainer.a[number] += 1
