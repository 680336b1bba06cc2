"""Engines to test with, in this process: real module engines over real gloo groups, that fail when told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync.buckets import Bucket
from asyncsync.engines import EngineReceipt, RolloutEngine
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.loading import Loader
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.sending import OwnTensors
from tests.sample import Zoo, contents

CONNECTING = ("describe_engine", "accept_layout", "open_group", "join_group")
"""The calls before a first update."""

STAGED = ("receive_weights", "finish_weight_update")
"""The calls of an update of staged engines."""

IN_PLACE = ("pause_generation", "receive_weights", "finish_weight_update", "resume_generation")
"""The calls of an update in place."""

When = Callable[[], Awaitable[None]]


class ToldEngine(asyncsync.ModuleEngine):
    """A module engine that records its calls, and does what it is told, once, before or after one of them."""

    def __init__(self, module: nn.Module, *, staged: bool = True, calls: list[str] | None = None) -> None:
        super().__init__(module, staged=staged)
        self.calls = calls if calls is not None else []
        self.joined: list[int] = []  # the source of every group it was asked to join
        self.before: dict[str, When] = {}
        self.after: dict[str, When] = {}

    async def _told(self, name: str, call: Awaitable[Any]) -> Any:
        self.calls.append(name)
        try:
            if (told := self.before.pop(name, None)) is not None:
                await told()
        except BaseException:
            call.close()  # type: ignore[attr-defined]  # a coroutine that is not awaited after all
            raise
        result = await call
        if (told := self.after.pop(name, None)) is not None:
            await told()
        return result

    async def describe_engine(self) -> EngineStatus:
        return await self._told("describe_engine", super().describe_engine())  # type: ignore[no-any-return]

    async def accept_layout(self, layout: Layout) -> None:
        await self._told("accept_layout", super().accept_layout(layout))

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        self.joined.append(rendezvous.source)
        return await self._told("open_group", super().open_group(rendezvous))  # type: ignore[no-any-return]

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        await self._told("join_group", super().join_group(connection, contacts))

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        await self._told("pause_generation", super().pause_generation(epoch, policy))

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        return await self._told("receive_weights", super().receive_weights(order))  # type: ignore[no-any-return]

    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        return await self._told("finish_weight_update", super().finish_weight_update(order))  # type: ignore[no-any-return]

    async def resume_generation(self, epoch: int) -> None:
        await self._told("resume_generation", super().resume_generation(epoch))

    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        return await self._told("give_weights", super().give_weights(order))  # type: ignore[no-any-return]


def failing(error: Exception) -> When:
    """Fail."""

    async def fail() -> None:
        raise error

    return fail


def hanging() -> When:
    """Never come back."""

    async def hang() -> None:
        await asyncio.Event().wait()

    return hang


def gate_of(engine: asyncsync.ModuleEngine) -> GenerationGate:
    """Where the engine's readers enter."""
    assert isinstance(engine._asyncsync.generations, GenerationGate)
    return engine._asyncsync.generations


def flip_a_bit(engine: asyncsync.ModuleEngine) -> None:
    """Have the engine's next update find one bit changed in the first bucket that arrives."""
    original = engine._asyncsync._loader_for

    def loader_for(device: str) -> Loader:
        loader = original(device)
        take = loader.take

        def take_flipped(bucket: Bucket, buffer: Tensor) -> None:
            buffer[0] ^= 1
            loader.take = take  # type: ignore[method-assign]
            take(bucket, buffer)

        engine._asyncsync._loader_for = original  # type: ignore[method-assign]
        loader.take = take_flipped  # type: ignore[method-assign]
        return loader

    engine._asyncsync._loader_for = loader_for  # type: ignore[method-assign]


def change(module: nn.Module) -> None:
    """Change every tensor of a module that has bits to change, tied ones once."""
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}.values():
            if tensor.numel() and tensor.dtype is torch.float32 and 0 not in tensor.stride():
                tensor.add_(1)


def zoo(seed: int) -> Zoo:
    """What an engine serves: all kinds of tensors, dense, with other bytes than the trainer's."""
    return Zoo(seed, strided=False)


@asynccontextmanager
async def synced(
    *, staged: bool = True, count: int = 2, **options: Any
) -> AsyncIterator[tuple[Zoo, list[ToldEngine], asyncsync.WeightSynchronizer]]:
    """A trainer, engines, and a synchronizer, all in this process."""
    trainer = Zoo(1)
    calls: list[str] = []
    engines = [ToldEngine(zoo(50 + index), staged=staged, calls=calls) for index in range(count)]
    options = {"bucket_size": 1024, "timeout": 60.0} | options
    async with asyncsync.WeightSynchronizer(trainer, engines, **options) as synchronizer:
        yield trainer, engines, synchronizer


def holds(engine: RolloutEngine, module: nn.Module) -> bool:
    """Whether an engine serves exactly a module's bytes, under every name."""
    assert isinstance(engine, asyncsync.ModuleEngine)
    return contents(engine.module) == contents(module)


def fills_are_noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which buckets a source in this process fills, from now on, by index; none may be read where it lies."""
    filled: list[int] = []
    fill = OwnTensors.fill

    def watched(filler: OwnTensors, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
        filled.append(bucket.index)
        fill(filler, bucket, buffer, stop)

    monkeypatch.setattr(OwnTensors, "fill", watched)
    monkeypatch.setattr(OwnTensors, "lying", lambda *_: pytest.fail("read where it lies"))
    return filled
