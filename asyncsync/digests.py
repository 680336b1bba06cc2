"""Digests: what tells two sets of weights apart, whatever way they travelled.

A tensor's digest is the xxh3-64 of its bytes, row-major. The digest of a set of weights is the xxh3-128 of its names,
dtypes and shapes followed by the tensors' digests, in the trainer's order. Neither knows about buckets or transports,
so a digest taken while the bytes pass by equals one taken later from the weights themselves.

xxh3 is not cryptographic: it finds faults, not attackers. It hashes some 25 GB/s and releases the GIL for anything
large. This module is the only door to ``xxhash``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Digests = npt.NDArray[np.uint64]
"""One 64-bit digest a tensor, in the order of the plan."""

EMPTY_DIGEST: int = xxhash.xxh3_64_intdigest(b"")


def hash_text(parts: Iterable[str]) -> str:
    """Digest of a sequence of strings, as 32 hex digits; no two sequences are joined to the same text."""
    return xxhash.xxh3_128_hexdigest("".join(f"{len(part)}:{part}" for part in parts).encode())


def combine(layout_digest: str, digests: Digests) -> str:
    """The digest of a whole set of weights, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(layout_digest.encode() + digests.tobytes())


def digest_of(data: memoryview) -> int:
    """xxh3-64 of bytes."""
    return xxhash.xxh3_64_intdigest(data)


class StreamingDigests:
    """Takes the tensors' bytes as they pass by, bucket by bucket, and knows every tensor's digest at the end.

    Args:
        count: How many tensors there are; those that no byte is added to are empty.
    """

    def __init__(self, count: int) -> None:
        self._values: list[int] = [EMPTY_DIGEST] * count
        self._open: dict[int, Any] = {}

    def add_whole(self, tensors: Sequence[int], spans: Sequence[tuple[int, int]], data: memoryview) -> None:
        """Hash tensors that lie whole in ``data``, each in its span of bytes."""
        digest, values = xxhash.xxh3_64_intdigest, self._values
        for tensor, (start, stop) in zip(tensors, spans, strict=True):
            values[tensor] = digest(data[start:stop])

    def add_piece(self, tensor: int, data: memoryview, *, last: bool) -> None:
        """Hash the next piece of a tensor that is split over buckets."""
        state = self._open.setdefault(tensor, xxhash.xxh3_64())
        state.update(data)
        if last:
            self._values[tensor] = self._open.pop(tensor).intdigest()

    def result(self) -> Digests:
        """All digests, in order."""
        return np.array(self._values, dtype=np.uint64)
