"""The sources of a synchronizer: mostly one, several for a trainer that is cut into pipeline stages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncsync import cluster
from asyncsync.errors import PlanError, TrainerError, WeightUpdateError
from asyncsync.fanout import is_ours, race, settle
from asyncsync.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One source of weights.

    Attributes:
        name: What errors call it.
        trainer: The trainer, or the stage of it, that it is the source of.
        silent: Where it is noted if a call is given up before it has answered.
    """

    name: str
    trainer: Trainer
    silent: list[str]

    async def call(self, call: Callable[[Trainer], Awaitable[T]], timeout: float | None = None) -> T:
        """Call it; an error that is not the library's own becomes a TrainerError.

        Args:
            call: What to call.
            timeout: Seconds it may take.

        Raises:
            TrainerError: It failed, is gone, or did not answer in time; its own error is the cause.
        """
        try:
            async with asyncio.timeout(timeout) as limit:
                return await call(self.trainer)
        except (PlanError, WeightUpdateError):
            raise
        except BaseException as error:
            if is_ours(error):
                self.silent.append(self.name)
                raise
            waited = timeout if limit.expired() else None
            raise TrainerError(cluster.how_it_failed(self.name, error, waited)) from error


class Sources:
    """All sources, in the order in which they connect and send (R2).

    Args:
        trainers: One a source.
        silent: Where it is noted if a call is given up before one has answered.
    """

    def __init__(self, trainers: Sequence[Trainer], silent: list[str]) -> None:
        names = ["the trainer"] if len(trainers) == 1 else [f"source {index}" for index in range(len(trainers))]
        self.all = tuple(Source(name, trainer, silent) for name, trainer in zip(names, trainers, strict=True))

    async def race(self, call: Callable[[int, Trainer], Awaitable[T]]) -> list[T]:
        """Call every source, each with its number; the first failure ends the other calls."""
        results = await race(self._calls(call))
        return [results[number] for number in range(len(self.all))]

    async def settle(self, call: Callable[[int, Trainer], Awaitable[T]], timeout: float) -> list[T | Exception]:
        """Call every source, each with its number; an error takes the place of its result."""
        results = await settle(self._calls(call, timeout))
        return [results[number] for number in range(len(self.all))]

    def _calls(
        self, call: Callable[[int, Trainer], Awaitable[T]], timeout: float | None = None
    ) -> Mapping[int, Awaitable[T]]:
        def one(number: int, source: Source) -> Awaitable[T]:
            return source.call(lambda trainer: call(number, trainer), timeout)

        return {number: one(number, source) for number, source in enumerate(self.all)}
