# ruff: noqa: TID251 - this is the baseline: blocking on Ray and polling the lock are what it is measured for.
"""The baseline: the weight sync loop that RL frameworks ship.

The trainer's process polls a lock actor every 0.1 s. For each bucket it then sends every engine one RPC with names,
dtypes and shapes, starts one broadcast per tensor, waits for the broadcasts, and waits for the engines with
``ray.get``. An engine starts to receive every tensor of the bucket, waits, and copies each into its parameter.

Where frameworks differ, the faster way was taken: the lock once an update, not once a bucket; all broadcasts of a
bucket in flight at once; and a receive buffer that is kept, since on a GPU the caching allocator makes a fresh one
nearly free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

BUCKET_SIZE = 512 * 2**20  # bytes: the usual default
POLL = 0.1  # seconds
TIMEOUT = timedelta(seconds=120)


class Group:
    """A gloo group of its own, beside the library's; rank 0 is the trainer. Making it waits for all members.

    Args:
        address: This node's address.
        port: The store's port.
        rank: This member's rank.
        size: Members in all.
        store: The store, in the process that holds it.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, *, store: TCPStore | None = None) -> None:
        self._store = store or TCPStore(address, port, None, False, wait_for_workers=False, timeout=TIMEOUT)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = TIMEOUT
        self._group: Any = ProcessGroupGloo(PrefixStore("benchmark", self._store), rank, size, options)

    def broadcast(self, tensor: Tensor) -> Any:
        """Start a broadcast from rank 0; returns what to wait for."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, TIMEOUT
        return self._group.broadcast([tensor], options)

    def barrier(self) -> None:
        """Wait until every member is here."""
        self._group.barrier().wait()


def open_store(address: str) -> TCPStore:
    """The trainer's store, on a free port."""
    return TCPStore(address, 0, None, True, wait_for_workers=False, timeout=TIMEOUT)


class SeedLock:
    """The lock actor: it can only be asked."""

    def __init__(self) -> None:
        self._taken = False

    def acquire(self) -> bool:
        """Take the lock if it is free."""
        if self._taken:
            return False
        self._taken = True
        return True

    def release(self) -> None:
        """Free the lock."""
        self._taken = False


class SeedReceiver:
    """An engine's end: include it in the actor's class.

    Attributes:
        module: What the engine serves.
        group: The group that tensors come through.
    """

    module: nn.Module
    group: Group
    _buffer: Tensor = torch.empty(0, dtype=torch.uint8)
    _seed_serving = True

    def join_seed_group(self, address: str, port: int, rank: int, size: int) -> None:
        """Join the group that tensors come through."""
        self.group = Group(address, port, rank, size)

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Receive one bucket, tensor by tensor, and load it."""
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = torch.split(self._buffer[: sum(sizes)], sizes)
        received = [part.view(dtype).view(shape) for part, dtype, shape in zip(parts, dtypes, shapes, strict=True)]
        works = [self.group.broadcast(tensor) for tensor in received]
        for work in works:
            work.wait()
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in zip(names, received, strict=True):
                parameters[name].copy_(tensor)

    def pause_seed_generation(self) -> None:
        """Stop serving: nothing may read weights that are half new."""
        self._seed_serving = False

    def continue_seed_generation(self) -> None:
        """Serve again."""
        self._seed_serving = True

    def forget_seed_buffer(self) -> None:
        """Free the receive buffer."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


class SeedLoop:
    """The trainer's end.

    Args:
        engines: Actors that include :class:`SeedReceiver` and are in the group.
        group: The group, as its rank 0.
        lock: A :class:`SeedLock` actor.
        bucket_size: Bytes of a bucket.
    """

    def __init__(self, engines: Sequence[Any], group: Group, lock: Any, *, bucket_size: int = BUCKET_SIZE) -> None:
        self._engines = engines
        self._group = group
        self._lock = lock
        self._bucket_size = bucket_size

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Bring the weights to every engine, and hold generation back meanwhile. Blocks."""
        ray.get([engine.pause_seed_generation.remote() for engine in self._engines])
        while not ray.get(self._lock.acquire.remote()):
            time.sleep(POLL)
        for bucket in self._buckets(weights):
            names = [name for name, _ in bucket]
            dtypes = [tensor.dtype for _, tensor in bucket]
            shapes = [tuple(tensor.shape) for _, tensor in bucket]
            refs = [engine.update_weights_from_distributed.remote(names, dtypes, shapes) for engine in self._engines]
            works = [self._group.broadcast(tensor) for _, tensor in bucket]
            for work in works:
                work.wait()
            ray.get(refs)
        ray.get(self._lock.release.remote())
        ray.get([engine.continue_seed_generation.remote() for engine in self._engines])

    def _buckets(self, weights: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights.items():
            if bucket and size + tensor.nbytes > self._bucket_size:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket
