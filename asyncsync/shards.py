"""Tensors that lie in pieces on several ranks: who holds what, how a bucket is put together, and taken apart. Pure.

Every rank tells which *block* of each tensor it holds: a box, as data parallel, tensor parallel and combined sharding
all give. From that, each rank knows which parts of a bucket it has to bring to the source rank, in which order, and the
source knows what comes from whom. No rank ever needs more than its parts of a bucket, and the source no tensor whole:
the parts go to their places in the bucket's buffer.

A rank of an engine that holds blocks receives whole buckets, and takes out of each what lies in its blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from asyncsync.buckets import ALIGNMENT, Bucket, Piece, Plan, TensorSpec
from asyncsync.errors import PlanError
from asyncsync.packing import pack, raw


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a tensor that a rank holds: a box of it.

    Attributes:
        start: Its first index in every dimension.
        shape: Its shape; empty if any size is 0.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def of(self, tensor: Tensor, origin: Sequence[int]) -> Tensor:
        """The view of a tensor that this box is, if the tensor's first element lies at ``origin``."""
        for dimension, (start, size, at) in enumerate(zip(self.start, self.shape, origin, strict=True)):
            tensor = tensor.narrow(dimension, start - at, size)
        return tensor

    def common(self, other: Block) -> Block:
        """The box that the two have in common; empty if there is none."""
        start = tuple(map(max, self.start, other.start))
        stops = (
            min(begin + size, first + extent)
            for begin, size, first, extent in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        return Block(start, tuple(max(0, stop - begin) for begin, stop in zip(start, stops, strict=True)))

    def overlaps(self, other: Block) -> bool:
        """Whether the two have an element in common."""
        return all(
            max(start, begin) < min(start + size, begin + extent)
            for start, size, begin, extent in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )


Holding: TypeAlias = tuple[Block | None, ...]
"""What a rank holds of each tensor of a layout, in order; None is all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of a tensor, with its memory.

    Attributes:
        tensor: What lies here.
        block: Which part of the whole that is.
    """

    tensor: Tensor
    block: Block


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank brings to one bucket of one tensor.

    Attributes:
        tensor: Index of the tensor in the plan.
        block: Which box of the tensor.
        offset: Where it begins in the rank's flat message, in bytes.
    """

    tensor: int
    block: Block
    offset: int


class ShardPlan:
    """Which rank brings which parts of each bucket to the source, which is rank 0.

    Of a block that several ranks hold, the first brings it.

    Args:
        plan: The plan of the whole tensors.
        holdings: What each rank holds.

    Raises:
        PlanError: The blocks of a tensor overlap or leave gaps.
    """

    def __init__(self, plan: Plan, holdings: Sequence[Holding]) -> None:
        self.plan = plan
        self.ranks = len(holdings)
        self._owners: dict[int, Mapping[int, Block]] = {}
        known: dict[object, Mapping[int, Block] | None] = {}
        torn: list[TensorSpec] = []
        for index, spec in enumerate(plan.specs):
            held = tuple(holding[index] for holding in holdings)
            if held[0] is None or spec.nbytes == 0:
                continue  # the source has all of it
            key = (spec.shape, held)
            if key not in known:
                known[key] = owners_of(spec.shape, held)
            owners = known[key]
            if owners is None:
                torn.append(spec)
            else:
                self._owners[index] = owners
        if torn:
            names = [spec.name for spec in torn]
            raise PlanError(
                f"the ranks' shards overlap, or leave gaps: {', '.join(map(str, torn[:8]))}"
                f"{f' and {len(torn) - 8} more' if len(torn) > 8 else ''} (are all ranks of the mesh given?)",
                names=names,
            )
        self._parts: dict[tuple[int, int], tuple[Part, ...]] = {}

    def is_whole(self, bucket: Bucket) -> bool:
        """Whether the source holds all of a bucket."""
        return not any(index in self._owners for index in _tensors(bucket))

    def parts(self, bucket: Bucket, rank: int) -> tuple[Part, ...]:
        """What a rank brings to a bucket, in order."""
        if (bucket.index, rank) not in self._parts:
            self._parts[bucket.index, rank] = tuple(self._find_parts(bucket, rank))
        return self._parts[bucket.index, rank]

    def nbytes(self, bucket: Bucket, rank: int) -> int:
        """Bytes of the message that a rank sends for a bucket."""
        parts = self.parts(bucket, rank)
        return _end(self.plan, parts[-1]) if parts else 0

    @cached_property
    def bringers(self) -> tuple[int, ...]:
        """The ranks that have something to bring to the source."""
        owners = set(itertools.chain.from_iterable(self._owners.values()))
        return tuple(sorted(owners - {0}))

    @cached_property
    def largest_gather(self) -> int:
        """Bytes of all messages of a bucket, at the most."""
        return max(sum(self.nbytes(bucket, rank) for rank in self.bringers) for bucket in self._unlike)

    def largest_message(self, rank: int) -> int:
        """Bytes of a rank's message for a bucket, at the most."""
        return max(self.nbytes(bucket, rank) for bucket in self._unlike)

    @cached_property
    def _unlike(self) -> Sequence[Bucket]:
        """Some buckets, such that each other one is like one of them: of every rank it takes as many bytes."""
        found: dict[object, Bucket] = {}
        for bucket in self.plan.buckets:
            like = [(piece.start, piece.stop) for piece in bucket.pieces]
            kinds = [(id(self._owners.get(index)), self.plan.specs[index].dtype) for index in _tensors(bucket)]
            found.setdefault((*like, *kinds), bucket)
        return tuple(found.values())

    def _find_parts(self, bucket: Bucket, rank: int) -> list[Part]:
        parts: list[Part] = []
        pieces = {piece.tensor: piece for piece in bucket.pieces}
        for index in _tensors(bucket):
            if (block := self._owners.get(index, {}).get(rank)) is None:
                continue
            wanted = [block]
            if index in pieces:
                wanted = [box.common(block) for box in _boxes_of(self.plan.specs[index], pieces[index])]
            for part in wanted:
                if part.numel:
                    offset = _end(self.plan, parts[-1]) if parts else 0
                    parts.append(Part(index, part, offset))
        return parts

    def pack_parts(
        self, bucket: Bucket, rank: int, holding: Holding, tensors: Sequence[Tensor], message: Tensor
    ) -> None:
        """Fill a rank's message for a bucket.

        Args:
            bucket: The bucket.
            rank: Which rank this is.
            holding: What it holds.
            tensors: The blocks it holds, of every tensor of the plan.
            message: Flat uint8.
        """
        with torch.no_grad():
            for part in self.parts(bucket, rank):
                _copy(self._of_message(part, message), self._of_tensor(part, holding, tensors))

    def assemble(
        self,
        bucket: Bucket,
        holding: Holding,
        tensors: Sequence[Tensor],
        messages: Mapping[int, Tensor],
        buffer: Tensor,
    ) -> None:
        """Fill a bucket's buffer at the source: from its own blocks, and from the other ranks' messages.

        Args:
            bucket: The bucket.
            holding: What the source holds.
            tensors: The blocks it holds, of every tensor of the plan.
            messages: The other ranks' messages, by rank.
            buffer: Flat uint8, ``bucket.nbytes`` long.
        """
        own = [index in self._owners for index in bucket.whole]
        pack(
            self.plan,
            replace(
                bucket,
                whole=tuple(index for index, sharded in zip(bucket.whole, own, strict=True) if not sharded),
                spans=tuple(span for span, sharded in zip(bucket.spans, own, strict=True) if not sharded),
                pieces=tuple(piece for piece in bucket.pieces if piece.tensor not in self._owners),
            ),
            tensors,
            buffer,
        )
        found: dict[int, list[tuple[Block, Tensor]]] = {}
        for rank in range(self.ranks):
            for part in self.parts(bucket, rank):
                source = self._of_message(part, messages[rank]) if rank else self._of_tensor(part, holding, tensors)
                found.setdefault(part.tensor, []).append((part.block, source))
        with torch.no_grad():
            for index, (start, stop) in zip(bucket.whole, bucket.spans, strict=True):
                spec = self.plan.specs[index]
                target = buffer[start:stop].view(spec.dtype).view(spec.shape)
                for block, source in found.get(index, ()):
                    _copy(block.of(target, (0,) * len(spec.shape)), source)
            for piece in bucket.pieces:
                if piece.tensor in found:
                    self._assemble_piece(piece, found[piece.tensor], buffer)

    def _assemble_piece(self, piece: Piece, found: Sequence[tuple[Block, Tensor]], buffer: Tensor) -> None:
        spec = self.plan.specs[piece.tensor]
        flat = buffer[piece.offset : piece.offset + piece.stop - piece.start].view(spec.dtype)
        position = 0
        for box in _boxes_of(spec, piece):
            target = flat[position : position + box.numel].view(box.shape)
            position += box.numel
            for block, source in found:
                part = box.common(block)
                if part.numel:
                    _copy(part.of(target, box.start), part.of(source, block.start))

    def _of_message(self, part: Part, message: Tensor) -> Tensor:
        dtype = self.plan.specs[part.tensor].dtype
        return message[part.offset : part.offset + part.block.numel * dtype.itemsize].view(dtype).view(part.block.shape)

    def _of_tensor(self, part: Part, holding: Holding, tensors: Sequence[Tensor]) -> Tensor:
        held = holding[part.tensor]
        assert held is not None
        return part.block.of(tensors[part.tensor], held.start)


def unpack_shards(plan: Plan, bucket: Bucket, buffer: Tensor, shards: Mapping[int, Sequence[Shard]]) -> None:
    """Write a bucket's bytes into shards: of each tensor only the blocks that lie here.

    Args:
        plan: The plan of the whole tensors.
        bucket: One of its buckets.
        buffer: Flat uint8, ``bucket.nbytes`` long. May be on another device.
        shards: Where to write, by the tensor's index in the plan; those that are not in it are left out.
    """
    with torch.no_grad():
        for index, (start, stop) in zip(bucket.whole, bucket.spans, strict=True):
            spec = plan.specs[index]
            for shard in shards.get(index, ()):
                source = buffer[start:stop].view(spec.dtype).view(spec.shape)
                _copy(shard.tensor, shard.block.of(source, (0,) * len(spec.shape)))
        for piece in bucket.pieces:
            spec = plan.specs[piece.tensor]
            flat = buffer[piece.offset : piece.offset + piece.stop - piece.start].view(spec.dtype)
            for shard in shards.get(piece.tensor, ()):
                position = 0
                for box in _boxes_of(spec, piece):
                    source = flat[position : position + box.numel].view(box.shape)
                    position += box.numel
                    part = box.common(shard.block)
                    if part.numel:
                        _copy(part.of(shard.tensor, shard.block.start), part.of(source, box.start))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    """The boxes that elements ``start`` to ``stop`` of a tensor in row-major order are; they follow one another."""
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield Block((0,) * len(shape), shape)
        return
    row = math.prod(shape[1:])
    first, whole = start // row, stop // row
    if start % row:
        for box in boxes(shape[1:], start - first * row, min(row, stop - first * row)):
            yield Block((first, *box.start), (1, *box.shape))
        first += 1
    if whole > first:
        yield Block((first, *(0,) * (len(shape) - 1)), (whole - first, *shape[1:]))
    if stop % row and whole >= first:
        for box in boxes(shape[1:], 0, stop - whole * row):
            yield Block((whole, *box.start), (1, *box.shape))


def owners_of(shape: tuple[int, ...], held: Sequence[Block | None]) -> Mapping[int, Block] | None:
    """The blocks that make up a tensor, by the first rank that holds each; None if they do not tile it."""
    blocks: dict[Block, int] = {}
    for rank, block in enumerate(held):
        if block is None:
            return {rank: Block((0,) * len(shape), shape)}
        if block.numel:
            blocks.setdefault(block, rank)
    within = all(
        start >= 0 and start + size <= extent
        for block in blocks
        for start, size, extent in zip(block.start, block.shape, shape, strict=True)
    )
    whole = sum(block.numel for block in blocks) == math.prod(shape)
    if not within or not whole or any(one.overlaps(other) for one, other in itertools.combinations(blocks, 2)):
        return None
    return {rank: block for block, rank in blocks.items()}


def _tensors(bucket: Bucket) -> tuple[int, ...]:
    return (*bucket.whole, *(piece.tensor for piece in bucket.pieces))


def _boxes_of(spec: TensorSpec, piece: Piece) -> Iterator[Block]:
    """The boxes of the tensor that a piece consists of, in order."""
    width = spec.dtype.itemsize
    return boxes(spec.shape, piece.start // width, piece.stop // width)


def _end(plan: Plan, part: Part) -> int:
    nbytes = part.block.numel * plan.specs[part.tensor].dtype.itemsize
    return part.offset + -(-nbytes // ALIGNMENT) * ALIGNMENT


def _copy(target: Tensor, source: Tensor) -> None:
    if target.dtype == source.dtype:
        target, source = raw(target), raw(source)
    target.copy_(source)
