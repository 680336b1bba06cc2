"""A trainer rank by itself: what its conductor may rely on when calls cross each other on their way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from asyncsync.errors import OutOfStepError, TransferError
from asyncsync.messages import ReadOptions, UpdateOrder, next_epoch
from asyncsync.rank_worker import RankWorker

pytestmark = pytest.mark.asyncio


class Reading:
    """Weights whose reading can be held up."""

    def __init__(self) -> None:
        self.holds_up = False
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        if self.holds_up:
            self.begun.set()
            assert self.go_on.wait(20)
        yield "w", torch.ones(3)


async def order_for(worker: RankWorker) -> UpdateOrder:
    status = await worker.describe_weights(ReadOptions(bucket_size=1 << 20), None)
    return UpdateOrder(
        epoch=next_epoch(status.epoch),
        version=1,
        connections=(),
        plan_digest=status.plan_digest,
        policy="drain",
        base_epoch=None,
        timeout=30.0,
    )


async def test_an_abort_while_the_weights_are_read_ends_the_sending_before_it_answers() -> None:
    reading = Reading()
    worker = RankWorker(reading)
    order = await order_for(worker)
    reading.holds_up = True
    sending = asyncio.ensure_future(worker.send_weights(order))
    await asyncio.to_thread(reading.begun.wait, 20)
    await worker.abort_send(order.epoch)
    reading.go_on.set()
    with pytest.raises(TransferError, match="was aborted"):
        await sending
    assert await worker.describe_weights(ReadOptions(bucket_size=1 << 20), None)
    worker.close()


async def test_an_order_that_comes_after_its_abort_is_refused() -> None:
    worker = RankWorker(Reading())
    order = await order_for(worker)
    await worker.abort_send(order.epoch)
    with pytest.raises(OutOfStepError, match="has ended already"):
        await worker.send_weights(order)
    worker.close()


class Gathering:
    """Weights that all ranks put together: counts how often this one took part."""

    def __init__(self) -> None:
        self.times = 0

    def describe(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [("w", torch.float32, (3,))]

    def gather(self, name: str) -> Tensor:
        self.times += 1
        return torch.ones(3)


async def test_a_rank_whose_order_never_came_takes_part_in_the_gathering_once() -> None:
    """Ray drops a call that is cancelled before it has begun; another rank may have begun, and waits in its gather."""
    gathering = Gathering()
    worker = RankWorker(gathering)
    order = await order_for(worker)
    await worker.share_holdings(1, (None, None))
    await worker.abort_send(order.epoch)
    assert gathering.times == 1
    await worker.abort_send(order.epoch)
    with pytest.raises(OutOfStepError, match="has ended already"):
        await worker.send_weights(order)  # it was late
    assert gathering.times == 1
    worker.close()


async def test_a_rank_that_has_gathered_does_not_do_so_again_when_the_update_fails_after_that() -> None:
    gathering = Gathering()
    worker = RankWorker(gathering)
    order = await order_for(worker)
    await worker.share_holdings(1, (None, None))
    assert await worker.send_weights(order) is None
    await worker.abort_send(order.epoch)
    assert gathering.times == 1
    worker.close()
