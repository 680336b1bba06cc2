"""A conductor in a process of its own, that stands still at a point of its second update, to be killed there.

``python -m tests.conductor POINT ADDRESS NAMESPACE ENGINE…`` says ``at POINT`` on its standard output once it is there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor

import asyncsync
from asyncsync.buckets import Bucket
from asyncsync.sending import OwnTensors
from asyncsync.transaction import Transaction
from tests.actors import Flat

TIMEOUT = 4.0
"""Seconds for the second update: then engines know that it is over."""

BUCKET = 2**20

WEIGHTS = partial(Flat, 16, (2**18,))
"""Sixteen buckets."""

POINTS = ("paused", "sending", "received", "one switched", "all switched")


def say(point: str) -> None:
    """Say that it has come there."""
    sys.stdout.write(f"at {point}\n")
    sys.stdout.flush()


async def stand_still(point: str) -> None:
    """Say so, and do no more."""
    say(point)
    await asyncio.Event().wait()


def stand_still_at(point: str) -> None:
    """Have the next update do so."""
    if point == "paused":
        Transaction._transfer = lambda self: stand_still(point)  # type: ignore[method-assign]
    elif point == "sending":
        lying, fill = OwnTensors.lying, OwnTensors.fill

        def stand_still_in_the_middle(bucket: Bucket) -> None:
            if bucket.index == 12:
                say(point)
                threading.Event().wait()

        def some_lying(filler: OwnTensors, bucket: Bucket, device: str) -> Tensor | None:
            stand_still_in_the_middle(bucket)
            return lying(filler, bucket, device)

        def some_filled(filler: OwnTensors, bucket: Bucket, buffer: Tensor, stop: threading.Event) -> None:
            stand_still_in_the_middle(bucket)
            fill(filler, bucket, buffer, stop)

        OwnTensors.lying = some_lying  # type: ignore[assignment,method-assign]
        OwnTensors.fill = some_filled  # type: ignore[assignment,method-assign]
    elif point == "received":
        Transaction._finish = lambda self: stand_still(point)  # type: ignore[method-assign]
    elif point == "one switched":

        async def finish_one(self: Transaction) -> None:
            first = self._attempt.fleet.members[0]
            await first.call(lambda engine: engine.finish_weight_update(self._order))
            await stand_still(point)

        Transaction._finish = finish_one  # type: ignore[method-assign]
    else:
        Transaction._leave_behind = lambda self: stand_still(point)  # type: ignore[method-assign]


async def conduct(point: str, transport: Any, engines: list[Any]) -> None:
    """Bring version 1, of ones, and begin with version 2, of twos."""
    trainer = WEIGHTS(fill=1.0)
    options: dict[str, Any] = {"timeout": 60, "bucket_size": BUCKET, "transport": transport}
    async with asyncsync.WeightSynchronizer(trainer, engines, **options) as synchronizer:
        await synchronizer.update_weights()
        with torch.no_grad():
            for tensor in trainer.parameters():
                tensor.fill_(2.0)
        stand_still_at(point)
        synchronizer._timeout = TIMEOUT
        await synchronizer.update_weights()


if __name__ == "__main__":
    where, way, address, namespace, *names = sys.argv[1:]
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    asyncio.run(conduct(where, way, [ray.get_actor(name) for name in names]))
