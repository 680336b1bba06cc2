"""The plan: where each tensor lies, and how the whole is cut into buckets. Pure: nothing here does any I/O.

All tensors are laid one after another into one address space, the *arena*, each at an offset aligned to
:data:`ALIGNMENT`. Buckets are consecutive cuts of the arena. Two things follow, and both ends rely on them: a tensor
that is split over buckets lies in one piece once they have all arrived, so an engine that receives into an arena of
its own holds every tensor as a view; and a plan needs no more than names, dtypes, shapes and a bucket size, so both
ends compute it and compare digests. Where several sources send, each plans its own tensors, and the plans are joined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from asyncsync.digests import Digests, combine, hash_text
from asyncsync.errors import PlanError

ALIGNMENT = 64
"""Bytes; a multiple of every element size, and of a cache line."""

DEFAULT_BUCKET_SIZE = 256 * 2**20
"""Bytes."""

_OVERLAP_BUCKETS = 32, 4 * 2**20  # how many at least, unless they would be smaller than that
_FEWER_BUCKETS = 8, 8 * 2**20  # the same where each is a call to an engine
_ALONE = 2 * 2**20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its bytes.

    Attributes:
        name: The name it is sent under.
        dtype: The dtype it is sent in.
        shape: Its shape.
        aliases: Other names of the same tensor (tied weights).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it has, its own first."""
        return (self.name, *self.aliases)

    def __str__(self) -> str:
        """For an error message: ``lm_head.weight (bfloat16 [49152, 576])``."""
        return f"{self.name} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one tensor in one bucket.

    Attributes:
        tensor: Index of the tensor in the plan.
        start: First byte of the tensor that it holds.
        stop: One past the last.
        offset: Where it begins in the bucket, in bytes.
    """

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A cut of the arena, sent as one message.

    Attributes:
        index: Its place in the plan.
        start: First byte of the arena that it holds.
        stop: One past the last.
        whole: Indices of the tensors that lie whole in it.
        spans: Where each of those lies: (start, stop) in the bucket, bytes.
        pieces: Parts of tensors that are split over buckets.
        source: Which of several sources sends it.
    """

    index: int
    start: int
    stop: int
    whole: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    source: int = 0

    @property
    def nbytes(self) -> int:
        """Its size in bytes, padding between tensors included."""
        return self.stop - self.start

    @property
    def whole_pieces(self) -> Iterator[Piece]:
        """The tensors that lie whole in it, as pieces."""
        for tensor, (start, stop) in zip(self.whole, self.spans, strict=True):
            yield Piece(tensor, 0, stop - start, start)

    @property
    def lone(self) -> Piece | None:
        """The tensor, or the part of one, that it consists of, if that is all it holds."""
        if len(self.whole) == 1 and not self.pieces:
            return Piece(self.whole[0], 0, self.nbytes, 0)
        return self.pieces[0] if len(self.pieces) == 1 and not self.whole else None


@dataclass(frozen=True)
class Plan:
    """The layout of a set of weights in arena and buckets.

    Attributes:
        specs: The tensors, in the trainer's order.
        offsets: Where each begins in the arena, in bytes.
        buckets: The cuts.
        bucket_size: The most bytes a bucket may have.
        arena_nbytes: Size of the arena, padding included.
        whole_tensors: Whether every bucket holds whole tensors of one dtype, one right behind the other.
        parts: The plans it was joined from, one a source; none if it is one source's own.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    bucket_size: int
    arena_nbytes: int
    whole_tensors: bool = False
    parts: tuple[Plan, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding not counted."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every tensor, under every name."""
        return frozenset(name for spec in self.specs for name in spec.names)

    @cached_property
    def largest_bucket(self) -> int:
        """Bytes of the largest bucket; 0 if there is none."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @cached_property
    def layout_digest(self) -> str:
        """Digest of names, dtypes and shapes, in order; tied names count, the cutting does not."""
        if self.parts:
            return hash_text(part.layout_digest for part in self.parts)
        return hash_text(
            text
            for spec in self.specs
            for text in ("\0".join(spec.names), str(spec.dtype), ",".join(map(str, spec.shape)))
        )

    @cached_property
    def digest(self) -> str:
        """Digest of the whole plan: two ends with the same one agree on every byte's place."""
        if self.parts:
            return joint_digest([part.digest for part in self.parts])
        cuts = (f"{bucket.start}-{bucket.stop}" for bucket in self.buckets)
        return hash_text((self.layout_digest, "whole" if self.whole_tensors else str(ALIGNMENT), *cuts))

    def digest_of(self, digests: Digests) -> str:
        """The digest of a whole set of weights, from its tensors' digests, in order."""
        if not self.parts:
            return combine(self.layout_digest, digests)
        starts = itertools.accumulate((len(part.specs) for part in self.parts), initial=0)
        return joint_digest(
            [
                part.digest_of(digests[start : start + len(part.specs)])
                for part, start in zip(self.parts, starts, strict=False)
            ]
        )


def plan_buckets(
    specs: Sequence[TensorSpec], bucket_size: int = DEFAULT_BUCKET_SIZE, *, whole_tensors: bool = False
) -> Plan:
    """Lay tensors out and cut them into buckets, in the order given.

    A bucket holds ``bucket_size`` bytes at the most (rounded down to :data:`ALIGNMENT`, and never less than that). A
    tensor larger than that is split. Weights that would fill few buckets are cut finer, into some 32 buckets of 4 MiB
    or more (of whole tensors: 8 of 8 MiB), so that packing one overlaps sending another. A tensor of 2 MiB or more has
    buckets of its own: if it is contiguous, it is sent from where it lies.

    Args:
        specs: The tensors; names must be unique, aliases included.
        bucket_size: Bytes.
        whole_tensors: No tensor is split: one that is larger than a bucket may be has a larger one to itself. And a
            bucket's tensors are of one dtype, with nothing in between: what an engine that receives by itself can read.

    Raises:
        PlanError: A name occurs twice.
        ValueError: ``bucket_size`` is not positive.
    """
    if bucket_size <= 0:
        raise ValueError(f"bucket_size must be a positive number of bytes, not {bucket_size}")
    _refuse_duplicates(specs)
    sizes = [spec.nbytes for spec in specs]
    count, floor = _FEWER_BUCKETS if whole_tensors else _OVERLAP_BUCKETS
    finer = max(floor, math.ceil(sum(map(_align, sizes)) / count))
    limit = max(min(bucket_size, _align(finer)) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    if whole_tensors:
        return _plan_whole(specs, sizes, limit, bucket_size)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += _align(size)

    cutter = _Cutter()
    for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size == 0:
            continue  # it has a place in the arena and no bytes to send
        alone = size >= min(_ALONE, limit)
        if alone or offset + size - cutter.start > limit:
            cutter.cut(offset)
        if size <= limit:
            cutter.add_whole(index, offset, size)
        else:
            for start in range(0, size, limit):
                cutter.cut(offset + start)
                cutter.add_piece(index, offset, start, min(start + limit, size))
        if alone:
            cutter.cut(offset + _align(size))
    cutter.cut(end)
    return Plan(tuple(specs), tuple(offsets), tuple(cutter.buckets), bucket_size, end)


def _plan_whole(specs: Sequence[TensorSpec], sizes: Sequence[int], limit: int, bucket_size: int) -> Plan:
    cutter = _Cutter()
    offsets, end, dtype = [], 0, None
    for index, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
        alone = size >= min(_ALONE, limit)
        if size and (alone or spec.dtype != dtype or end + size - cutter.start > limit):
            end = _align(end)
            cutter.cut(end)
        offsets.append(end if size else 0)  # an empty one has a place only in name, and it must be aligned
        if size:
            cutter.add_whole(index, end, size)
            end, dtype = end + size, None if alone else spec.dtype  # behind one that stands alone, another begins
    cutter.cut(end)
    return Plan(tuple(specs), tuple(offsets), tuple(cutter.buckets), bucket_size, _align(end), whole_tensors=True)


def replan(known: Plan | None, specs: Sequence[TensorSpec], bucket_size: int, *, whole_tensors: bool = False) -> Plan:
    """The plan of these tensors: the known one, if it is that; else a new one, its digest computed.

    Raises:
        PlanError: A name occurs twice.
    """
    if known is not None and (known.specs, known.bucket_size, known.whole_tensors) == (
        specs,
        bucket_size,
        whole_tensors,
    ):
        return known
    plan = plan_buckets(specs, bucket_size, whole_tensors=whole_tensors)
    _ = plan.digest, plan.nbytes  # computed here, and kept: large plans take a while
    return plan


def join_plans(plans: Sequence[Plan]) -> Plan:
    """The plan of several sources: their tensors one after another, their buckets in turns.

    The order of the buckets is the order in which every engine takes them. Each source sends its own in the same order,
    so the first one that is not through is always on its way at its source, and awaited at every engine: sources and
    engines can never wait for each other in a circle. And no source waits for the whole of another's part.

    Raises:
        PlanError: Two sources send a tensor of the same name.
    """
    if len(plans) == 1:
        return plans[0]
    refuse_rivals([plan.specs for plan in plans])
    first_tensor = list(itertools.accumulate((len(plan.specs) for plan in plans), initial=0))
    first_byte = list(itertools.accumulate((plan.arena_nbytes for plan in plans), initial=0))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*(plan.buckets for plan in plans)))
    sources = itertools.cycle(range(len(plans)))
    buckets: list[Bucket] = []
    for source, bucket in zip(sources, turns, strict=False):
        if bucket is not None:
            tensor, byte = first_tensor[source], first_byte[source]
            buckets.append(
                Bucket(
                    len(buckets),
                    bucket.start + byte,
                    bucket.stop + byte,
                    tuple(index + tensor for index in bucket.whole),
                    bucket.spans,
                    tuple(replace(piece, tensor=piece.tensor + tensor) for piece in bucket.pieces),
                    source,
                )
            )
    return Plan(
        specs=tuple(spec for plan in plans for spec in plan.specs),
        offsets=tuple(offset + byte for plan, byte in zip(plans, first_byte, strict=False) for offset in plan.offsets),
        buckets=tuple(buckets),
        bucket_size=max(plan.bucket_size for plan in plans),
        arena_nbytes=first_byte[-1],
        whole_tensors=all(plan.whole_tensors for plan in plans),
        parts=tuple(plans),
    )


def joint_digest(digests: Sequence[str]) -> str:
    """The digest of several parts, from the digest of each; that of a single one is its own."""
    return digests[0] if len(digests) == 1 else hash_text(digests)


class _Cutter:
    """Collects tensors and closes buckets; `start` is where the open bucket begins in the arena."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.start = 0
        self._end = 0
        self._whole: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._pieces: list[Piece] = []

    def add_whole(self, tensor: int, offset: int, size: int) -> None:
        self._whole.append(tensor)
        self._spans.append((offset - self.start, offset - self.start + size))
        self._end = offset + size

    def add_piece(self, tensor: int, offset: int, start: int, stop: int) -> None:
        self._pieces.append(Piece(tensor, start, stop, offset + start - self.start))
        self._end = offset + stop

    def cut(self, at: int) -> None:
        """Close the open bucket, if it holds anything, and begin the next at this place in the arena."""
        if self._whole or self._pieces:
            self.buckets.append(
                Bucket(
                    len(self.buckets),
                    self.start,
                    self._end,
                    tuple(self._whole),
                    tuple(self._spans),
                    tuple(self._pieces),
                )
            )
            self._whole, self._spans, self._pieces = [], [], []
        self.start = at


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _refuse_duplicates(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    twice: set[str] = set()
    for spec in specs:
        for name in spec.names:
            (twice if name in seen else seen).add(name)
    if twice:
        raise PlanError(f"weights name a tensor twice: {list_names(twice)}", names=sorted(twice))


def refuse_rivals(parts: Sequence[Sequence[TensorSpec]]) -> None:
    """Compare what several sources send.

    Raises:
        PlanError: Two of them send a tensor of the same name.
    """
    owners: dict[str, int] = {}
    claims: dict[tuple[int, int], list[str]] = {}
    for source, specs in enumerate(parts):
        for spec in specs:
            for name in spec.names:
                if (owner := owners.setdefault(name, source)) != source:
                    claims.setdefault((owner, source), []).append(name)
    if claims:
        rivals = sorted(claims.items())
        found = (f"sources {one} and {other} both send {list_names(names)}" for (one, other), names in rivals)
        names = sorted(name for claimed in claims.values() for name in claimed)
        raise PlanError(f"a tensor must have one source: {'; '.join(found)}", names=names)


def list_names(names: Sequence[str] | set[str], most: int = 8) -> str:
    """Names for an error message, sorted, the tail of a long list counted instead."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest
