"""Checksums of what is sent, for engines that load by themselves and can tell what they hold.

Such an engine fuses tensors and cuts them over its ranks, so a checksum is asked for as a list of parts: of these
tensors these blocks, one behind the other. They are taken while the buckets pass by, beside the sending.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.messages import Checksums
from asyncsync.packing import raw
from asyncsync.shards import Block

DIGITS = 16
"""Hex digits of a checksum."""


def checksum(parts: Sequence[Tensor]) -> str:
    """The checksum of tensors, one behind the other: of their bytes' sha256, the first 16 hex digits."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(_bytes(part))
    return hasher.hexdigest()[:DIGITS]


class Witness:
    """Takes buckets as they are sent, in order, and knows the checksums that were asked for in the end.

    Args:
        plan: How buckets are cut: a tensor that is asked for lies whole in one.
        wanted: What is asked for; what this plan has not all tensors of is left out.
    """

    def __init__(self, plan: Plan, wanted: Checksums) -> None:
        self._plan = plan
        index = {spec.name: number for number, spec in enumerate(plan.specs)}
        known = {key: parts for key, parts in wanted.items() if all(part.name in index for part in parts)}
        self._hashers: dict[str, Any] = {key: hashlib.sha256() for key in known}
        self._counts = {key: len(parts) for key, parts in known.items()}
        self._next = dict.fromkeys(known, 0)
        self._early: dict[tuple[str, int], bytes] = {}  # came before those that they stand behind
        self._users: dict[int, list[tuple[str, int, Block | None]]] = {}
        for key, parts in known.items():
            for place, part in enumerate(parts):
                self._users.setdefault(index[part.name], []).append((key, place, part.block))
        for number, spec in enumerate(plan.specs):
            if not spec.nbytes:  # in no bucket
                self._see(number, torch.empty(spec.shape, dtype=spec.dtype))

    def add(self, bucket: Bucket, buffer: Tensor) -> None:
        """Take a bucket: flat uint8, as it is sent."""
        if not any(index in self._users for index in bucket.whole):
            return
        host = buffer.cpu()
        for index, (start, stop) in zip(bucket.whole, bucket.spans, strict=True):
            spec = self._plan.specs[index]
            self._see(index, host[start:stop].view(spec.dtype).view(spec.shape))

    def _see(self, index: int, tensor: Tensor) -> None:
        for key, place, block in self._users.get(index, ()):
            part = tensor if block is None else block.of(tensor, (0,) * tensor.ndim)
            if place == self._next[key]:
                self._hashers[key].update(_bytes(part))
                self._next[key] += 1
                while (early := self._early.pop((key, self._next[key]), None)) is not None:
                    self._hashers[key].update(early)
                    self._next[key] += 1
            else:
                self._early[key, place] = bytes(_bytes(part))

    def result(self) -> Mapping[str, str]:
        """The checksums, by key; of those whose tensors have all passed by."""
        return {
            key: hasher.hexdigest()[:DIGITS]
            for key, hasher in self._hashers.items()
            if self._next[key] == self._counts[key]
        }


def _bytes(tensor: Tensor) -> memoryview:
    flat = raw(tensor.detach()).contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
