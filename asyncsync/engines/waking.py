"""Engines that sleep: whose memory is released by tag, that of the weights and what else they have (a KV cache, say).

An update wakes what it must: the weights right before they are written, all else once they are whole and before anybody
generates. If it fails after that, the engine is put back to sleep, since in colocated training the trainer needs that
memory next. What to put back is kept here (:class:`Woken`). How an engine sleeps and wakes is its own affair.

What a sleeping engine held is not known: once its weights were released it holds no version until it is updated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from asyncsync.buckets import list_names
from asyncsync.errors import EngineError
from asyncsync.messages import UpdateOrder
from asyncsync.shield import shielded

WAKE_TIMEOUT = 60.0
"""Seconds, at the most, that an engine may take to wake up; or to fall asleep, where nobody waits to clean up."""


def time_to_wake(order: UpdateOrder) -> float:
    """Seconds that an engine may take to wake up: less than its conductor waits for it, who would blame others."""
    return min(WAKE_TIMEOUT, order.timeout / 2)


def asleep_and_refused(released: Collection[str]) -> str:
    """What is said of a sleeping engine that an update must not wake."""
    return (
        f"the engine is asleep ({list_names(set(released))} released), and this synchronizer does not wake engines "
        '(asleep="refuse"): wake it up before the update'
    )


class Woken:
    """What the newest update has woken of an engine, until it is put back to sleep or the next update begins.

    Epochs tell what to do. One that was committed keeps the engine awake. One that was not, and that nobody came to
    undo (its conductor died), is undone by whoever comes next.

    Attributes:
        tags: What was woken.
    """

    def __init__(self) -> None:
        self.tags: frozenset[str] = frozenset()
        self._epoch = 0

    def __repr__(self) -> str:
        return f"<Woken in epoch {self._epoch}: {', '.join(sorted(self.tags)) or 'nothing'}>"

    def begin(self, epoch: int, committed: int) -> None:
        """An update begins.

        Args:
            epoch: Its epoch.
            committed: That of the last update that the engine took into service.
        """
        if self._epoch == committed:
            self.tags = frozenset()
        self._epoch = epoch

    def note(self, tags: Collection[str]) -> None:
        """It wakes these now: noted before it does so, since it may be cut off."""
        self.tags |= frozenset(tags)

    def was_put_back(self, tags: Collection[str]) -> None:
        """These sleep again: whoever wakes them now is somebody else."""
        self.tags -= frozenset(tags)

    def to_put_back(self, epoch: int, committed: int, *, whole: bool) -> frozenset[str]:
        """What has to be put back to sleep as an update is aborted.

        Args:
            epoch: Its epoch.
            committed: That of the last update that the engine took into service.
            whole: Whether the engine holds a whole version.
        """
        undone = self._epoch != committed
        return self.tags if undone or (self._epoch == epoch and not whole) else frozenset()


class OwnMemory:
    """The memory of an engine that knows itself what is released, one call at a time.

    Args:
        released: Gives the tags of what is released.
        resume: Gets memory back.
        release: Releases it.
    """

    def __init__(
        self,
        released: Callable[[], Collection[str]],
        resume: Callable[[frozenset[str]], Awaitable[None]],
        release: Callable[[frozenset[str]], Awaitable[None]],
    ) -> None:
        self._released = released
        self._resume = resume
        self._release = release
        self._calls = asyncio.Lock()

    @property
    def released(self) -> frozenset[str]:
        """What is released now.

        Raises:
            EngineError: The engine's own code does not give tags.
        """
        tags = self._released()
        if isinstance(tags, str) or not isinstance(tags, Collection):
            raise EngineError(f"released_memory() must give a collection of tags, not {tags!r}")
        return frozenset(tags)

    async def wake(self, tags: Collection[str], timeout: float) -> None:
        """Get back whichever of these is released. A call that has begun comes to its end, whoever is cancelled.

        Raises:
            EngineError: It could not, or not in time.
        """
        await _to_its_end(self._wake(frozenset(tags)), timeout, "woken")

    async def put_back(self, tags: Collection[str], timeout: float) -> None:
        """Release whichever of these is not.

        Raises:
            EngineError: It could not, or not in time.
        """
        await _to_its_end(self._put_back(frozenset(tags)), timeout, "put back to sleep")

    async def _wake(self, tags: frozenset[str]) -> None:
        async with self._calls:
            if asleep := tags & self.released:
                await self._resume(asleep)
            if left := tags & self.released:
                raise EngineError(f"its memory was to be woken, and is released still: {list_names(set(left))}")

    async def _put_back(self, tags: frozenset[str]) -> None:
        async with self._calls:
            if awake := tags - self.released:
                await self._release(awake)


async def _to_its_end(call: Coroutine[Any, Any, None], timeout: float, what: str) -> None:
    try:
        await shielded(call, timeout)
    except EngineError:
        raise
    except Exception as error:  # whatever the engine's own code raises
        raise EngineError(f"its memory could not be {what}: {type(error).__name__}: {error}") from error
