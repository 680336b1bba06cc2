"""The broadcast transport: real gloo groups, in one process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from asyncsync.errors import ConnectError, TransferError
from asyncsync.messages import Rendezvous
from asyncsync.threads import WorkerThread
from asyncsync.transports.broadcast import BroadcastLink, Listener, join
from tests.sample import random_bytes

pytestmark = pytest.mark.asyncio

ADDRESS = "127.0.0.1"


def rendezvous(listener: Listener, rank: int, size: int, **changes: float) -> Rendezvous:
    base = Rendezvous(
        connection=listener.connection,
        backend="gloo",
        address=listener.address,
        port=listener.port,
        rank=rank,
        world_size=size,
        join_timeout=10,
        operation_timeout=30,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def group(size: int, **changes: float) -> AsyncIterator[list[BroadcastLink]]:
    """A connected group, each member with a thread of its own."""
    listener = Listener(ADDRESS, timeout=10)
    workers = [WorkerThread(f"rank {rank}") for rank in range(size)]
    joins = [
        workers[rank].run(
            join,
            rendezvous(listener, rank, size, **changes),
            address=ADDRESS,
            stop=threading.Event(),
        )
        for rank in range(size)
    ]
    links = await asyncio.gather(*joins)
    yield links
    for link in links:
        link.close()
    for worker in workers:
        worker.close()


async def test_buckets_arrive_in_order_with_several_on_their_way() -> None:
    async with group(3) as (source, *engines):
        sent = [random_bytes(100_003, seed) for seed in range(4)]
        received = [[torch.zeros_like(flat) for flat in sent] for _ in engines]
        handles = [(source, source.start_send(flat)) for flat in sent]
        for engine, buffers in zip(engines, received, strict=True):
            handles += [(engine, engine.start_receive(buffer)) for buffer in buffers]
        await asyncio.gather(*(link.wait(handle) for link, handle in handles))
        for buffers in received:
            assert all(torch.equal(buffer, flat) for buffer, flat in zip(buffers, sent, strict=True))
        assert "0 operations" in repr(source)


async def test_a_member_that_does_not_come_is_an_error_in_time() -> None:
    listener = Listener(ADDRESS, timeout=10)
    with pytest.raises(ConnectError, match=r"rank 0 waited 0\.2 s in vain: 1 of 2 members came"):
        await asyncio.to_thread(
            join,
            rendezvous(listener, 0, 2, join_timeout=0.2),
            address=ADDRESS,
            stop=threading.Event(),
        )


async def test_joining_can_be_stopped() -> None:
    listener, stop, worker = Listener(ADDRESS, timeout=10), threading.Event(), WorkerThread("rank 0")
    joining = worker.submit(join, rendezvous(listener, 0, 2), address=ADDRESS, stop=stop)
    assert not joining.done()
    stop.set()
    with pytest.raises(ConnectError, match="stopped"):
        await asyncio.wrap_future(joining)
    worker.close()


async def test_nobody_listening_is_an_error_in_time() -> None:
    listener = Listener(ADDRESS, timeout=10)
    nowhere = rendezvous(listener, 1, 2, join_timeout=0.2)
    del listener
    with pytest.raises(ConnectError, match="could not join"):
        await asyncio.to_thread(join, nowhere, address=ADDRESS, stop=threading.Event())


async def test_another_protocol_is_refused_before_anything_is_tried() -> None:
    listener = Listener(ADDRESS, timeout=10)
    with pytest.raises(ConnectError, match="protocol 1, the other 99"):
        join(rendezvous(listener, 0, 2, protocol=99), address=ADDRESS, stop=threading.Event())


async def test_an_address_that_is_not_ours_cannot_be_listened_on() -> None:
    with pytest.raises(ConnectError, match="cannot listen on"):
        Listener("192.0.2.1", timeout=1)


async def test_the_store_listens_on_its_address_only() -> None:
    listener = Listener(ADDRESS, timeout=10)
    with socket.create_connection((ADDRESS, listener.port), timeout=5):
        pass
    with pytest.raises(OSError):  # noqa: PT011 - refused: 127.0.0.2 is this machine too
        socket.create_connection(("127.0.0.2", listener.port), timeout=5)


async def test_an_operation_whose_peer_is_silent_ends_by_itself() -> None:
    async with group(2, operation_timeout=0.3) as (_, engine):
        with pytest.raises(TransferError, match="broadcast failed"):
            await engine.wait(engine.start_receive(torch.zeros(1_000, dtype=torch.uint8)))


async def test_an_operation_can_be_left_behind_without_waiting() -> None:
    async with group(2, operation_timeout=1) as (source, engine):
        del source
        handle = engine.start_receive(torch.zeros(1_000, dtype=torch.uint8))
        waiting = asyncio.create_task(engine.wait(handle))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        engine.close()
        assert "closed" in repr(engine)
        with pytest.raises(TransferError, match="closed"):
            engine.start_receive(torch.zeros(1, dtype=torch.uint8))
        aside = [thread for thread in threading.enumerate() if thread.name == "asyncsync-drop-group"]
        assert aside
        del handle
        for thread in aside:
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()
