"""The broadcast transport: real gloo groups, in one process."""

from __future__ import annotations

import ast
import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import psutil
import pytest
import torch

from asyncsync.errors import ConnectError, LinkLostError, TransferError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, Rendezvous
from asyncsync.threads import WorkerThread
from asyncsync.transports.broadcast import BroadcastLink, Joining
from tests.sample import random_bytes

pytestmark = pytest.mark.asyncio

ADDRESS = "127.0.0.1"


def rendezvous(rank: int, size: int, **changes: float) -> Rendezvous:
    base = Rendezvous(
        connection="a group", backend="gloo", rank=rank, world_size=size, join_timeout=10, operation_timeout=30
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def joining(rank: int, size: int, **changes: float) -> AsyncIterator[tuple[Joining, Awaitable[BroadcastLink]]]:
    """A member that joins, on a thread of its own."""
    worker, member = WorkerThread(f"rank {rank}"), Joining(rendezvous(rank, size, **changes), address=ADDRESS)
    joined = asyncio.wrap_future(worker.submit(member.join))
    yield member, joined
    member.stop()
    await asyncio.wait([joined])
    worker.close()


@asynccontextmanager
async def group(size: int, **changes: float) -> AsyncIterator[list[BroadcastLink]]:
    """A connected group, each member with a thread of its own."""
    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(joining(rank, size, **changes)) for rank in range(size)]
        contacts: Contacts = {}
        for member, _ in members:
            contacts |= await member.contacts()
        for member, _ in members:
            member.introduce(contacts)
        links = [await joined for _, joined in members]
        yield links
        for link in links:
            link.close()


OTHER = """
    import asyncio, os, signal, sys, threading, torch
    from concurrent.futures import Future
    from asyncsync.messages import Rendezvous
    from asyncsync.transports.broadcast import Joining

    rank = int(sys.argv[1])
    seat = Rendezvous(connection="a group", backend="gloo", rank=rank, world_size=2, join_timeout=10,
                      operation_timeout=30)
    member, joined = Joining(seat, address="127.0.0.1"), Future()
    threading.Thread(target=lambda: joined.set_result(member.join())).start()
    print(asyncio.run(member.contacts()), flush=True)
    member.introduce(eval(sys.stdin.readline()))
    link = joined.result(10)
    flat = torch.ones(int(sys.argv[2]), dtype=torch.uint8)
    handle = link.start_receive(flat) if rank else link.start_send(flat)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        link.wait(handle, threading.Event())
    except Exception as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
"""
"""A member in a process of its own, that stops as soon as it has begun with its first bucket."""

BUCKET = 1 << 26
"""Bytes of a bucket that no socket takes at once."""


@asynccontextmanager
async def group_with_a_stopped_one(rank: int) -> AsyncIterator[tuple[BroadcastLink, asyncio.subprocess.Process]]:
    """A group of two, of which that of this rank is another process, and is stopped."""
    command = [sys.executable, "-c", textwrap.dedent(OTHER), str(rank), str(BUCKET)]
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        async with joining(1 - rank, 2) as (member, joined):
            contacts = await member.contacts() | ast.literal_eval((await other.stdout.readline()).decode())
            other.stdin.write(f"{contacts}\n".encode())
            member.introduce(contacts)
            link = await joined
            while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            yield link, other
            link.close()
    finally:
        if other.returncode is None:
            other.kill()
        await other.wait()


@pytest.mark.faults
async def test_a_source_hears_in_the_middle_of_a_bucket_who_has_died() -> None:
    async with group_with_a_stopped_one(1) as (source, other):
        handle = source.start_send(random_bytes(BUCKET, 0))
        waiting = asyncio.ensure_future(asyncio.to_thread(source.wait, handle, threading.Event()))
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done(), "who is only stopped has not left"
        other.kill()
        with pytest.raises(LinkLostError, match="rank 1 has left") as caught:
            await waiting
        assert caught.value.peers == {("a group", 1)}
        assert "1 operations running" in repr(source), "the operation itself does not know"


async def test_a_link_that_is_closed_in_the_middle_of_a_bucket_is_quiet_and_the_other_hears_of_it() -> None:
    async with group_with_a_stopped_one(0) as (engine, other):
        flat = torch.zeros(BUCKET, dtype=torch.uint8)
        engine.start_receive(flat)
        engine.close()
        assert await asyncio.to_thread(engine.is_quiet, 10)
        before = flat.clone()
        other.send_signal(signal.SIGCONT)
        assert other.stdout is not None
        assert (await other.stdout.readline()).decode().strip() == "LinkLostError"
        assert torch.equal(flat, before)
        assert not flat.all(), "it was in the middle"


async def test_buckets_arrive_in_order_with_several_on_their_way() -> None:
    async with group(3) as (source, *engines):
        sent = [random_bytes(100_003, seed) for seed in range(4)]
        received = [[torch.zeros_like(flat) for flat in sent] for _ in engines]
        handles = [(source, source.start_send(flat)) for flat in sent]
        for engine, buffers in zip(engines, received, strict=True):
            handles += [(engine, engine.start_receive(buffer)) for buffer in buffers]
        for link, handle in handles:
            await asyncio.to_thread(link.wait, handle, threading.Event())
        for buffers in received:
            assert all(torch.equal(buffer, flat) for buffer, flat in zip(buffers, sent, strict=True))
        assert "0 operations" in repr(source)


async def test_a_member_that_does_not_come_is_an_error_in_time() -> None:
    async with joining(0, 2, join_timeout=0.2) as (member, joined):
        assert "0/0" in await member.contacts()
        with pytest.raises(ConnectError, match=r"rank 0 of 2 .* the other members did not come within 0\.2 s"):
            await joined


async def test_a_failed_forming_keeps_no_frame_of_gloo_alive() -> None:
    """Gloo's device would listen on, and crash the process when a member that was only frozen thaws and speaks."""
    async with joining(0, 2, join_timeout=0.1) as (_, joined):
        with pytest.raises(ConnectError) as caught:
            await joined
    frames, error = [], caught.value
    chain: BaseException | None = error
    while chain is not None:
        frames += [frame.f_code.co_name for frame, _ in traceback.walk_tb(chain.__traceback__)]
        chain = chain.__cause__ or chain.__context__
    assert "join" in frames
    assert "_new_group" not in frames


async def test_joining_can_be_stopped() -> None:
    async with joining(0, 2) as (member, joined):
        await member.contacts()  # it waits for the other now
        member.stop()
        with pytest.raises(ConnectError, match="joining was stopped"):
            await joined


async def test_a_join_that_is_stopped_before_it_begins_makes_nothing() -> None:
    member = Joining(rendezvous(0, 2), address=ADDRESS)
    member.stop()
    with pytest.raises(ConnectError, match="joining was stopped"):
        await asyncio.to_thread(member.join)


async def test_another_protocol_is_refused_before_anything_is_tried() -> None:
    with pytest.raises(ConnectError, match=f"protocol {PROTOCOL_VERSION}, the other 99"):
        Joining(rendezvous(0, 2, protocol=99), address=ADDRESS)


async def test_an_address_that_is_not_ours_is_told_to_whoever_asks() -> None:
    member = Joining(rendezvous(0, 2), address="192.0.2.1")
    with pytest.raises(ConnectError, match=r"192\.0\.2\.1"):
        await asyncio.to_thread(member.join)
    with pytest.raises(ConnectError, match=r"192\.0\.2\.1"):
        await member.contacts()


async def test_a_group_listens_on_its_address_only() -> None:
    def listening() -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections("tcp")
        return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}

    before = listening()
    async with group(2):
        own = listening() - before
        assert own
        assert {address for address, _ in own} == {ADDRESS}


@pytest.mark.exhaustive
async def test_a_process_that_ends_while_it_joins_ends_cleanly() -> None:
    script = """
        import asyncio
        from asyncsync.messages import Contacts, Rendezvous
        from asyncsync.threads import WorkerThread
        from asyncsync.transports.broadcast import Joining

        async def main():
            seat = Rendezvous(connection="a group", backend="gloo", rank=0, world_size=2, join_timeout=60,
                              operation_timeout=60)
            member = Joining(seat, address="127.0.0.1")
            WorkerThread("rank 0").submit(member.join)
            await member.contacts()

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_an_operation_whose_peer_is_silent_ends_by_itself() -> None:
    async with group(2, operation_timeout=0.3) as (_, engine):
        handle = engine.start_receive(torch.zeros(1_000, dtype=torch.uint8))
        with pytest.raises(TransferError, match="broadcast failed"):
            await asyncio.to_thread(engine.wait, handle, threading.Event())


@pytest.mark.parametrize("how", ["stop", "close"])
async def test_an_operation_can_be_left_behind_without_waiting(how: str) -> None:
    before = threading.enumerate()
    async with group(2, operation_timeout=1) as (_, engine):
        handle, stop = engine.start_receive(torch.zeros(1_000, dtype=torch.uint8)), threading.Event()
        waiting = asyncio.ensure_future(asyncio.to_thread(engine.wait, handle, stop))
        await asyncio.sleep(0)
        if how == "stop":
            stop.set()
        else:
            engine.close()
        with pytest.raises(TransferError, match="stopped"):
            await waiting
        engine.close()
        assert "closed" in repr(engine)
        with pytest.raises(TransferError, match="closed"):
            engine.start_receive(torch.zeros(1, dtype=torch.uint8))
        new = [thread for thread in threading.enumerate() if thread not in before]
        aside = [thread for thread in new if thread.name == "asyncsync-drop-group"]
        assert aside
        del handle
        for thread in aside:
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()


@pytest.mark.exhaustive
@pytest.mark.parametrize("told", [0, 1])
async def test_a_process_that_ends_while_it_connects_to_one_that_is_gone_ends_cleanly(told: int) -> None:
    script = """
        import asyncio, sys, time
        from dataclasses import replace
        from asyncsync.messages import Rendezvous
        from asyncsync.threads import WorkerThread
        from asyncsync.transports.broadcast import Joining

        class Slow:  # an interpreter that takes its time to end; a thread that came back in it was SIGABRT
            def __del__(self):
                time.sleep(12)

        slow = Slow()

        async def main(told):
            seat = Rendezvous(connection="a group", backend="gloo", rank=0, world_size=2, join_timeout=60,
                              operation_timeout=60)
            members = [Joining(replace(seat, rank=rank), address="127.0.0.1") for rank in range(2)]
            joined = [WorkerThread("a rank").submit(member.join) for member in members]
            contacts = [await member.contacts() for member in members]
            members[1 - told].stop()
            await asyncio.wait([asyncio.wrap_future(joined[1 - told])])
            members[told].introduce(contacts[0] | contacts[1])

        asyncio.run(main(int(sys.argv[1])))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(told)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
