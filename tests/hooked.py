"""Programs that run under torch_memory_saver's real hook, each in a process of its own.

``python -m tests.hooked NAME`` runs one; what it found is written as JSON, on the last line.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import contextmanager, suppress
from typing import Any

import anyio
from torch_memory_saver import torch_memory_saver as saver

from asyncsync.errors import MemorySaverError
from asyncsync.guard import memory_saver_guard
from asyncsync.memory_saver import door
from asyncsync.threads import WorkerThread
from tests.cuda_stubs import device

AT_FIRST = (True, "default")

Found = dict[str, Any]


def on_a_thread(main: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    """Run a program on a loop and a thread whose flag and tag nobody has touched, and look at them after it."""
    found: Found = {}

    def run() -> None:
        assert device.settings() == AT_FIRST
        try:
            found.update(asyncio.run(main()))
        except AssertionError:
            found["raised"] = "AssertionError"
        found["left"] = list(device.settings())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


class Turns:
    """Two coroutines that go on in turns."""

    def __init__(self) -> None:
        self.inside, self.go_on = asyncio.Event(), asyncio.Event()


# -- the naive way: disable() held across an await on the loop's thread ------------------------------------------------


async def naive_bystander() -> Found:
    turns = Turns()

    async def connect() -> None:
        with saver.disable():
            turns.inside.set()
            await turns.go_on.wait()

    async def bystander() -> bool:
        await turns.inside.wait()
        tracked = device.tracked()
        turns.go_on.set()
        return tracked

    _, tracked = await asyncio.gather(connect(), bystander())
    return {"bystander tracked": tracked}


async def naive_thread() -> Found:
    with saver.disable():
        return {"work tracked": await asyncio.to_thread(device.tracked)}


async def naive_second() -> Found:
    turns, raised = Turns(), ""

    async def first() -> None:
        with saver.disable():
            turns.inside.set()
            await turns.go_on.wait()

    async def second() -> None:
        nonlocal raised
        await turns.inside.wait()
        try:
            with saver.disable():
                pass
        except AssertionError:
            raised = "AssertionError"
        turns.go_on.set()

    await asyncio.gather(first(), second())
    return {"second": raised}


async def naive_region_inside() -> Found:
    turns = Turns()

    async def disabling() -> None:
        with saver.disable():
            turns.inside.set()
            await turns.go_on.wait()

    async def region() -> None:
        await turns.inside.wait()
        with suppress(AssertionError), saver.region("weights"):  # the pools are left in the wrong order, too
            turns.go_on.set()
            await first

    first = asyncio.create_task(disabling())
    await asyncio.gather(first, region(), return_exceptions=True)
    return {}


async def naive_region_around() -> Found:
    turns, raised = Turns(), ""

    async def region() -> None:
        nonlocal raised
        try:
            with saver.region("weights"):
                turns.inside.set()
                await turns.go_on.wait()
        except AssertionError:
            raised = "AssertionError"

    async def disabling() -> None:
        await turns.inside.wait()
        with suppress(AssertionError), saver.disable():
            turns.go_on.set()
            await first

    first = asyncio.create_task(region())
    await asyncio.gather(first, disabling(), return_exceptions=True)
    return {"region": raised}


async def naive_cancelled() -> Found:
    async def hold() -> None:
        with saver.disable():
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return {}


def naive() -> Found:
    """The six interleavings, with the saver's own context on the loop's thread."""
    cases = (naive_bystander, naive_thread, naive_second, naive_region_inside, naive_region_around, naive_cancelled)
    return {case.__name__.removeprefix("naive_"): on_a_thread(case) for case in cases}


# -- the same with the guard ------------------------------------------------------------------------------------------


async def guarded_bystander() -> Found:
    turns = Turns()

    async def connect() -> bool:
        async with memory_saver_guard() as guarded:
            turns.inside.set()
            await turns.go_on.wait()
            return await guarded.run(device.tracked)

    async def bystander() -> bool:
        await turns.inside.wait()
        tracked = device.tracked()
        turns.go_on.set()
        return tracked

    work, tracked = await asyncio.gather(connect(), bystander())
    return {"bystander tracked": tracked, "work tracked": work}


async def guarded_thread() -> Found:
    async with memory_saver_guard() as guarded:
        return {
            "work tracked": await guarded.run(device.tracked),
            "bystander tracked": await asyncio.to_thread(device.tracked),
        }


async def guarded_second() -> Found:
    turns = Turns()

    async def first() -> bool:
        async with memory_saver_guard() as guarded:
            turns.inside.set()
            await turns.go_on.wait()
            return await guarded.run(device.tracked)

    async def second() -> bool:
        await turns.inside.wait()
        async with memory_saver_guard() as guarded:
            tracked = await guarded.run(device.tracked)
        turns.go_on.set()
        return tracked

    return {"work tracked": any(await asyncio.gather(first(), second()))}


async def guarded_region_inside() -> Found:
    turns = Turns()

    async def guarding() -> bool:
        async with memory_saver_guard() as guarded:
            turns.inside.set()
            await turns.go_on.wait()
            return await guarded.run(device.tracked)

    async def region() -> Any:
        await turns.inside.wait()
        with saver.region("weights"):
            turns.go_on.set()
            await first
            return [device.tracked(), device.settings()[1]]

    first = asyncio.create_task(guarding())
    tracked, inside = await asyncio.gather(first, region())
    return {"work tracked": tracked, "in the region": inside}


async def guarded_region_around() -> Found:
    turns = Turns()

    async def region() -> Any:
        with saver.region("weights"):
            turns.inside.set()
            await turns.go_on.wait()
            return [device.tracked(), device.settings()[1]]

    async def guarding() -> bool:
        await turns.inside.wait()
        async with memory_saver_guard() as guarded:
            turns.go_on.set()
            await first
            return await guarded.run(device.tracked)

    first = asyncio.create_task(region())
    inside, tracked = await asyncio.gather(first, guarding())
    return {"work tracked": tracked, "in the region": inside}


async def guarded_cancelled() -> Found:
    thread, began, go_on = WorkerThread("guard"), threading.Event(), threading.Event()
    found: Found = {}

    def work() -> None:
        began.set()
        go_on.wait(10)
        found["work tracked"] = device.tracked()

    async def hold() -> None:
        async with memory_saver_guard(thread=thread) as guarded:
            await guarded.run(work)

    task = asyncio.create_task(hold())
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    go_on.set()
    await asyncio.wait([task])
    found["thread left"] = list(await thread.run(device.settings))
    return found


def guarded() -> Found:
    """The six interleavings, with the guard."""
    cases = (
        *(guarded_bystander, guarded_thread, guarded_second, guarded_region_inside, guarded_region_around),
        guarded_cancelled,
    )
    return {case.__name__.removeprefix("guarded_"): on_a_thread(case) for case in cases}


# -- random interleavings ---------------------------------------------------------------------------------------------


class History:
    """One random history: tasks that guard, allocate, enter regions, fail, and are cancelled, all at once.

    Args:
        seed: Of its choices.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shared = [WorkerThread(f"shared {number}") for number in range(2)]
        self.region = asyncio.Lock()  # the saver's regions of one thread must be left in the reverse order
        self.wrong: list[str] = []
        self.counts = dict.fromkeys(("guards", "guarded work", "bystanders", "regions", "cancelled", "failed"), 0)

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._live(random.Random(self.random.random()))) for _ in range(5)]
        while any(not task.done() for task in tasks):
            for _ in range(self.random.randrange(1, 30)):
                await asyncio.sleep(0)
            if self.random.random() < 0.3:
                self.counts["cancelled"] += self.random.choice(tasks).cancel()
            self._look()
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.wrong.append(f"a task ended with {error!r}")
        self._look()
        for thread in self.shared:
            if not thread.closed:
                if (left := await thread.run(device.settings)) != AT_FIRST:
                    self.wrong.append(f"{thread.name} was left at {left}")
                thread.close()
        for left in await asyncio.gather(*(asyncio.to_thread(device.settings) for _ in range(4))):
            if left != AT_FIRST:
                self.wrong.append(f"a thread of the pool was left at {left}")
        if device.settings() != AT_FIRST or device.pool_here() is not None:
            self.wrong.append(f"the loop's thread was left at {device.settings()}")

    def _look(self) -> None:
        """What the loop's thread allocates is tracked, whatever is under way."""
        self.counts["bystanders"] += 1
        if not device.tracked():
            self.wrong.append("a bystander was untracked")

    async def _live(self, choices: random.Random) -> None:
        for _ in range(choices.randrange(1, 6)):
            step = choices.choice((self._guard, self._guard, self._guard, self._region, self._thread))
            with suppress(_ToldError):
                await step(choices, 0)

    async def _guard(self, choices: random.Random, depth: int) -> None:
        thread = choices.choice((None, *(thread for thread in self.shared if not thread.closed)))
        self.counts["guards"] += 1
        try:
            async with memory_saver_guard(thread=thread) as guarded:
                for _ in range(choices.randrange(4)):
                    if depth < 2 and choices.random() < 0.3:
                        await self._guard(choices, depth + 1)
                    elif choices.random() < 0.1:
                        self.counts["failed"] += 1
                        await guarded.run(self._fail)
                    else:
                        await guarded.run(self._work)
                    self._look()
        except MemorySaverError:
            pass  # its exit was made to fail, or that of another on its thread
        except Exception as error:
            if "is closed" not in str(error):
                raise

    def _work(self) -> None:
        self.counts["guarded work"] += 1
        if device.tracked():
            self.wrong.append("guarded work was tracked")

    def _fail(self) -> None:
        self._work()
        raise _ToldError

    async def _region(self, choices: random.Random, depth: int) -> None:
        async with self.region:
            with saver.region(tag := choices.choice(("weights", "kv_cache"))):
                self.counts["regions"] += 1
                await self._guard(choices, depth)
                if device.settings() != (True, tag):
                    self.wrong.append(f"a region was left with {device.settings()}")

    async def _thread(self, choices: random.Random, depth: int) -> None:
        if not await asyncio.to_thread(device.tracked):
            self.wrong.append("a bystander on a thread was untracked")


class _ToldError(Exception):
    """Guarded work that was told to fail."""


def histories() -> Found:
    """500 random histories; in every fifth, leaving ``disable()`` fails now and then."""
    wrong: list[str] = []
    counts: dict[str, int] = {}
    door.start()  # as a trainer does in its constructor: two first uses at once are too much for the saver
    for seed in range(500):
        breaking = _BreakingDisable(seed) if seed % 5 == 0 else None

        async def live(seed: int = seed) -> Found:
            history = History(seed)
            with anyio.fail_after(60):
                await history.run()
            wrong.extend(f"history {seed}: {what}" for what in history.wrong)
            for name, count in history.counts.items():
                counts[name] = counts.get(name, 0) + count
            return {}

        left = on_a_thread(live)["left"]
        if left != list(AT_FIRST):
            wrong.append(f"history {seed}: the thread was left at {left}")
        if breaking is not None:
            counts["broken exits"] = counts.get("broken exits", 0) + breaking.end()
    return {"wrong": wrong[:20], "counts": counts}


class _BreakingDisable:
    """In place of the door's ``disable()``: the real one, and then an error, now and then."""

    def __init__(self, seed: int) -> None:
        self._random, self._broken, self._original = random.Random(seed), 0, door.disable
        door.disable = self._disable

    def _disable(self) -> Any:
        @contextmanager
        def context() -> Any:
            with self._original():
                yield
            if self._random.random() < 0.2:
                self._broken += 1
                raise OSError("the saver broke")

        return context()

    def end(self) -> int:
        door.disable = self._original
        return self._broken


PROGRAMS: dict[str, Callable[[], Found]] = {"naive": naive, "guarded": guarded, "histories": histories}

if __name__ == "__main__":
    device.install()
    sys.stdout.write(f"{json.dumps(PROGRAMS[sys.argv[1]]())}\n")
