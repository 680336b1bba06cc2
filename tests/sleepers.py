"""Module engines that sleep: what they release is really overwritten, and what a real one would die of is noted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from asyncsync.packing import raw
from tests.engines import ToldEngine, When, gate_of
from tests.sample import contents

ALL = {"weights", "kv_cache"}


class Sleeper(ToldEngine):
    """A module engine with weights and a cache that can be released.

    Attributes:
        released: What is.
        crashes: What would have ended a real one.
        moves: What was released and resumed, in order: ``-weights`` or ``+kv_cache``.
        at: Awaited before a move of that name, once.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.released: set[str] = set()
        self.crashes: list[str] = []
        self.moves: list[str] = []
        self.at: dict[str, When] = {}
        self.flushed = 0
        self._garbage: dict[str, bytes] = {}
        self._by_hand = False

    async def sleep(self, tags: Collection[str] = ALL) -> None:
        """Put it to sleep, as its owner does."""
        await self.release_memory(tags)
        self.moves.clear()

    async def wake(self, tags: Collection[str] = ALL) -> None:
        """Wake it, as its owner does."""
        self._by_hand = True
        await self.resume_memory(tags)
        self._by_hand = False
        self.moves.clear()

    def released_memory(self) -> Collection[str]:
        return self.released

    async def release_memory(self, tags: Collection[str]) -> None:
        for tag in sorted(tags):
            await self._moves(f"-{tag}")
            if tag in self.released:
                self.crashes.append(f"{tag} released twice")
            if tag == "weights":
                with torch.no_grad():
                    for tensor in self.module.state_dict(keep_vars=True).values():
                        raw(tensor).fill_(91)
                self._garbage = contents(self.module)
            self.released.add(tag)

    async def resume_memory(self, tags: Collection[str]) -> None:
        for tag in sorted(tags, reverse=True):
            await self._moves(f"+{tag}")
            if tag not in self.released:
                self.crashes.append(f"{tag} resumed twice")
            if tag == "weights" and contents(self.module) != self._garbage:
                self.crashes.append("weights written while they were released")
            self.released.discard(tag)

    async def _moves(self, move: str) -> None:
        await asyncio.sleep(0)  # so that there is an await to be cancelled at
        self.moves.append(move)
        if gate_of(self).is_open and move == "+kv_cache" and not self._by_hand:
            self.crashes.append("generation may begin before the cache is there")
        if (told := self.at.pop(move, None)) is not None:
            await told()

    async def flush_cache(self) -> None:
        self.flushed += 1
        if self.released:
            self.crashes.append("flushed what is not there")

    async def generate(self) -> tuple[int | None, dict[str, bytes]]:
        """The version, and what was read."""
        async with self.generating() as version:
            if self.released:
                self.crashes.append("generated with what is not there")
            return version, contents(self.module)
