"""Cancelling at each await."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Literal


class CancelAt:
    """Await a coroutine and cancel a task, the current one if none is given, at its n-th suspension.

    ``waiting``: while the awaited future is pending; ``handed over``: in the turn in which it is done, but
    before the task learns of it. ``reached`` tells whether it came to that suspension.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        at: int,
        when: Literal["waiting", "handed over"],
        task: asyncio.Task[Any] | None = None,
    ) -> None:
        self.coroutine, self.at, self.when, self.task = coroutine, at, when, task
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        task = self.task or asyncio.current_task()
        assert task is not None
        inner = self.coroutine.__await__()
        step: Callable[[], Any] = partial(inner.send, None)
        suspensions = 0
        while True:
            try:
                future = step()
            except StopIteration as ended:
                return ended.value
            if suspensions == self.at:
                self.reached = True
                if future is None or self.when == "waiting":
                    asyncio.get_running_loop().call_soon(task.cancel)
                else:
                    future.add_done_callback(lambda _: task.cancel())
            suspensions += 1
            try:
                yield future
            except BaseException as thrown:  # noqa: BLE001 - handed on as it is
                step = partial(inner.throw, thrown)
            else:
                step = partial(inner.send, None)


class CancelsWithin:
    """Cancels a task at the n-th await within the next call of an engine's method.

    Attributes:
        task: Which task.
        reached: Whether it came to that await.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._name: str | None = None
        self.task: asyncio.Task[Any] | None = None
        self.reached = False

    def next(self, name: str, number: int, when: Literal["waiting", "handed over"]) -> None:
        """Have the next call of this name be the one."""
        self.clear()
        self._name, self.reached = name, False
        call = getattr(self._engine, name)

        async def cancelled(*args: Any) -> Any:
            self.clear()
            cancelling = CancelAt(call(*args), number, when, self.task)
            try:
                return await cancelling
            finally:
                self.reached = cancelling.reached

        setattr(self._engine, name, cancelled)

    def clear(self) -> None:
        """Leave the engine as it was."""
        if self._name is not None:
            delattr(self._engine, self._name)
            self._name = None
