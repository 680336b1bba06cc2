"""The sections on a trainer rank's thread, over a stand-in for the saver."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from asyncsync.sender_thread import SenderThread
from asyncsync.sending import Sender
from asyncsync.threads import RenewedThread, WorkerThread

pytestmark = pytest.mark.asyncio


class Saver:
    """Tracks every thread until it is switched off there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._here = threading.local()
        self.sections = self.left = 0
        self.fail: Exception | None = None
        monkeypatch.setattr("asyncsync.memory_saver.door.disable", self.disable)
        monkeypatch.setattr("asyncsync.memory_saver.door.is_tracked_here", self.tracks)
        monkeypatch.setattr("asyncsync.memory_saver.door.hook", lambda: ctypes.CDLL(None))

    def tracks(self) -> bool:
        return getattr(self._here, "tracks", True)

    @contextmanager
    def disable(self) -> Iterator[None]:
        if self.fail is not None:
            raise self.fail
        self._here.tracks = False
        self.sections += 1
        yield
        self._here.tracks = True
        self.left += 1


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    return Saver(monkeypatch)


async def test_the_section_for_connecting_ends_by_itself(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.sender_thread.CONNECTING_TIMEOUT", 0.01)
    sender = SenderThread(offload=None)
    assert not await sender.run_connecting(saver.tracks)
    ended = asyncio.Event()
    original = sender._end_connecting

    async def end() -> None:
        await original()
        ended.set()

    monkeypatch.setattr(sender, "_end_connecting", end)
    async with asyncio.timeout(10):
        await ended.wait()
    assert await sender.worker.run(saver.tracks)
    sender.close()


async def test_what_comes_behind_an_entry_that_comes_to_nothing_is_guarded_all_the_same(saver: Saver) -> None:
    sender = SenderThread(offload=None)
    began, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        began.set()
        go_on.wait(10)

    sender.worker.submit(busy)
    await asyncio.to_thread(began.wait, 10)
    first = asyncio.create_task(sender.run_connecting(saver.tracks))
    await asyncio.sleep(0)
    second = asyncio.create_task(sender.run_connecting(saver.tracks))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert await second is False
    await asyncio.wait([first])
    sender.close()


async def test_a_call_that_fails_does_not_forget_the_section_of_another(saver: Saver) -> None:
    sender = SenderThread(offload=None)
    saver.fail = OSError("the saver broke")
    with pytest.raises(Exception, match="could not be entered"):
        await sender.run_connecting(saver.tracks)
    saver.fail = None
    assert not await sender.run_connecting(saver.tracks)
    async with sender.transferring() as guarded:
        assert not await guarded.run(saver.tracks)
    assert await sender.worker.run(saver.tracks)
    assert saver.sections == 1
    sender.close()


async def test_closing_ends_the_section(saver: Saver) -> None:
    sender = SenderThread(offload=None)
    await sender.run_connecting(saver.tracks)
    thread = sender.worker._thread
    assert thread is not None
    sender.close()
    await asyncio.to_thread(thread.join, 10)
    assert (saver.sections, saver.left) == (1, 1)


async def test_of_the_buffers_those_on_a_device_are_freed() -> None:
    sender = Sender(WorkerThread("hasher"))
    kept = torch.empty(4, dtype=torch.uint8)
    sender._buffers = [kept, torch.empty(4, dtype=torch.uint8, device="meta")]
    sender.free_device_buffers()
    assert [buffer is kept for buffer in sender._buffers] == [True]


async def test_a_thread_is_renewed_until_it_is_closed_itself() -> None:
    thread = RenewedThread("mine")
    first = await thread.run(threading.current_thread)
    assert await thread.run(threading.current_thread) is first
    thread.current.close()
    assert await thread.run(threading.current_thread) is not first
    thread.close()
    with pytest.raises(Exception, match="is closed"):
        await thread.run(threading.current_thread)


async def test_a_thread_that_was_given_up_takes_its_open_section_with_it(saver: Saver) -> None:
    sender = SenderThread(offload=None)
    await sender.run_connecting(saver.tracks)
    sender.worker.close()
    assert not await sender.run_connecting(saver.tracks)
    async with sender.transferring() as guarded:
        assert not await guarded.run(saver.tracks)
    assert await sender.worker.run(saver.tracks)
    sender.close()
