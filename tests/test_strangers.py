"""Strangers stay out: who was not told of a group over the control plane gets no place in it, and nothing that is sent.

Lines of shared memory have tests of their own (:mod:`tests.test_shared_memory`), as have the lines to vLLM's workers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import asyncsync
from asyncsync.engines.channel import Exchange
from asyncsync.errors import AsyncSyncError, ConnectError
from asyncsync.messages import Contacts, Rendezvous
from asyncsync.threads import WorkerThread
from asyncsync.transports.broadcast import BroadcastLink, Joining
from asyncsync.transports.letterbox import LetterBox
from asyncsync.transports.sent_count import SentCount
from tests.engines import holds, synced
from tests.sample import random_bytes

NAME = "0123456789abcdef" * 2
ADDRESS = "127.0.0.7"
"""One of this machine's that nobody else listens at."""


def member(rank: int, *, name: str = NAME, size: int = 2) -> Joining:
    seat = Rendezvous(
        connection=name, backend="gloo", rank=rank, world_size=size, join_timeout=10, operation_timeout=30
    )
    return Joining(seat, address=ADDRESS)


def listening() -> list[tuple[str, int]]:
    """Where this process listens on the network."""
    found = psutil.Process().net_connections("inet")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


@contextmanager
def strangers(said: bytes) -> Iterator[list[socket.socket]]:
    """Those who connect to all that listens at the address, and say something."""
    with ExitStack() as stack:
        made = []
        for address in listening():
            if address[0] == ADDRESS:
                with suppress(ConnectionRefusedError):  # of an earlier group, which is gone by now
                    made.append(stack.enter_context(socket.create_connection(address)))
                    made[-1].sendall(said)
                    made[-1].setblocking(False)
        yield made


def heard(stranger: socket.socket) -> bytes:
    with suppress(OSError):
        return stranger.recv(1 << 20)
    return b""


@contextmanager
def joining(members: list[Joining]) -> Iterator[list[asyncio.Future[BroadcastLink]]]:
    """Members that join, each on a thread of its own."""
    threads = [WorkerThread("member") for _ in members]
    yield [asyncio.wrap_future(thread.submit(each.join)) for thread, each in zip(threads, members, strict=True)]
    for thread in threads:
        thread.close()


async def all_contacts(members: list[Joining]) -> Contacts:
    contacts: Contacts = {}
    for each in members:
        contacts |= await each.contacts()
    return contacts


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 3])
async def test_who_takes_a_place_in_a_group_of_gloos_gets_no_weights_and_is_found_out(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Gloo itself gives a member's place to whoever connects and says a small number."""
    monkeypatch.setattr("asyncsync.transports.broadcast._FORM_TIMEOUT", 1.0)
    members = [member(rank, size=size) for rank in range(size)]
    with joining(members) as joins, ExitStack() as stack:
        contacts = await all_contacts(members)
        came = [one for number in range(6) for one in stack.enter_context(strangers(struct.pack("<q", number)))]
        for each in members:
            each.introduce(contacts)
        results = await asyncio.gather(*joins, return_exceptions=True)
        assert all(isinstance(result, ConnectError) for result in results), results
        assert any("did not prove that it is a member" in str(result) for result in results)
        assert any(map(heard, came)), "nobody had a place: this test shows nothing"
        assert not any(NAME.encode() in heard(one) for one in came)


@pytest.mark.asyncio
async def test_a_stranger_who_speaks_as_members_do_cannot_answer() -> None:
    """It has all that can be found on the network, and another name."""
    members = [member(0), member(1, name="f" * 32)]
    with joining(members) as joins:
        contacts = await all_contacts(members)
        for each in members:
            each.introduce(contacts)
        for result in await asyncio.gather(*joins, return_exceptions=True):
            assert isinstance(result, ConnectError)
            assert "is a stranger: it does not know the group's name" in str(result)


@pytest.mark.asyncio
async def test_members_know_each_other_and_whoever_only_makes_noise_disturbs_nobody() -> None:
    members = [member(rank, size=3) for rank in range(3)]
    with joining(members) as joins, ExitStack() as stack:
        contacts = await all_contacts(members)
        stack.enter_context(strangers(b"GET / HTTP/1.1\r\n\r\n" * 9))
        for each in members:
            each.introduce(contacts)
        links = await asyncio.gather(*joins)
        sent, received = random_bytes(1000, 1), [torch.zeros(1000, dtype=torch.uint8) for _ in links[1:]]
        handles = [links[0].start_send(sent)]
        handles += [link.start_receive(buffer) for link, buffer in zip(links[1:], received, strict=True)]
        for link, handle in zip(links, handles, strict=True):
            await asyncio.to_thread(link.wait, handle, threading.Event())
        assert all(torch.equal(sent, buffer) for buffer in received)
        for link in links:
            link.close()


@pytest.mark.asyncio
async def test_all_that_listens_listens_at_the_nodes_address_alone() -> None:
    before = set(listening())
    exchange, box, count = Exchange(ADDRESS), LetterBox("group", ADDRESS), SentCount(ADDRESS, 1)
    await exchange.open()
    with joining(members := [member(rank) for rank in range(2)]) as joins:
        await all_contacts(members)
        made = set(listening()) - before
        assert len(made) >= 5
        assert {address for address, _ in made} == {ADDRESS}
        for each in members:
            each.stop()
        await asyncio.gather(*joins, return_exceptions=True)
    box.close()
    count.close()
    exchange.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
async def test_calls_of_an_older_epoch_are_refused_and_change_nothing(staged: bool) -> None:
    async with synced(staged=staged) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        engine, (source,) = engines[0], (each.trainer for each in synchronizer._sources.all)
        order = asyncsync.UpdateOrder(
            epoch=engine._asyncsync.record.epoch - 1,
            version=9,
            connections=engine._asyncsync.receiver.connections,
            plan_digest=synchronizer._connection.layout.digest if synchronizer._connection.layout else "",
            policy="drain",
            base_epoch=None,
            timeout=5.0,
        )
        calls = (
            engine.receive_weights(order),
            engine.finish_weight_update(order),
            engine.pause_generation(order.epoch, "drain"),
            engine.resume_generation(order.epoch),
            engine.give_weights(order),
        )
        for call in calls:
            with pytest.raises(AsyncSyncError):
                await call
        await source.abort_send(order.epoch + 1)
        with pytest.raises(asyncsync.OutOfStepError):
            await source.send_weights(order)
        with pytest.raises(asyncsync.OutOfStepError):
            await source.snapshot_weights(replace(order, snapshot="late"))
        async with synchronizer.generation(engine) as version:
            assert version == engine.weight_version == 1
            assert holds(engine, trainer)


UNPICKLES = re.compile(
    r"^\s*(from|import)\s+(pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
    r"|\b(torch|np|numpy)\.load\(|(?<!json)\.loads\(|_object_list\(|(all_)?gather_object\(",
    re.MULTILINE,
)
"""Modules that make objects of bytes, files that are pickles inside, and collectives of objects."""


def test_nothing_in_the_package_can_unpickle_what_comes_in() -> None:
    """What the control plane of Ray's carries is Ray's; the library itself has no way to do it."""
    assert all(map(UNPICKLES.search, ("    import pickle", "x = torch.load(file)", "dist.all_gather_object(a, b)")))
    found = {
        path.name: match.group()
        for path in Path(asyncsync.__file__).parent.rglob("*.py")
        if (match := UNPICKLES.search(path.read_text())) is not None
    }
    assert not found


@pytest.mark.asyncio
async def test_an_http_engines_keys_are_in_no_error_log_or_repr(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = {"api_key": "sk-a-secret-key"}
    engines: list[Any] = [
        asyncsync.VLLMEngine("http://127.0.0.1:9", timeout=2.0, **keys),  # type: ignore[arg-type]
        asyncsync.SGLangEngine("http://127.0.0.1:9", timeout=2.0, admin_api_key="sk-another-secret", **keys),  # type: ignore[arg-type]
    ]
    for engine in engines:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
            await engine.describe_engine()
        inner = [getattr(engine, name) for name in vars(engine)]
        told = [repr(engine), str(engine), *map(repr, inner), str(caught.value), repr(caught.value), caplog.text]
        told += getattr(caught.value, "__notes__", [])
        assert not any("secret" in text for text in told)
