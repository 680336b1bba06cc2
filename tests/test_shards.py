"""Shards: whatever way tensors are cut over ranks, the buckets come out as those of the whole tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncsync.buckets import ALIGNMENT, TensorSpec, plan_buckets
from asyncsync.errors import PlanError
from asyncsync.packing import pack
from asyncsync.shards import Block, Holding, Shard, ShardPlan, boxes, owners_of, unpack_shards
from tests.sample import content, random_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex128)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[Tensor], list[Holding]]:
    """Whole tensors, and what each rank holds of them: some whole everywhere, others cut into a grid."""
    ranks = draw(st.integers(2, 4))
    tensors: list[Tensor] = []
    columns: list[list[Block | None]] = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tensors.append(random_tensor(draw(st.sampled_from(DTYPES)), shape, index))
        grid = [cuts(draw, size) for size in shape]
        boxes = [
            Block(tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
            for box in itertools.product(*grid)
        ]
        if len(boxes) > ranks or draw(st.booleans()):
            columns.append([None] * ranks)
            continue
        empty = Block((0,) * len(shape), (0,) * len(shape)) if shape else boxes[0]
        held = [*boxes, *(draw(st.sampled_from([*boxes, empty])) for _ in range(ranks - len(boxes)))]
        columns.append(list(draw(st.permutations(held))))
    return tensors, [tuple(column[rank] for column in columns) for rank in range(ranks)]


def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """A dimension, cut in one or two."""
    if size < 2 or draw(st.booleans()):
        return [(0, size)]
    at = draw(st.integers(1, size - 1))
    return [(0, at), (at, size)]


def local(tensor: Tensor, block: Block | None) -> Tensor:
    return tensor if block is None else block.of(tensor, (0,) * tensor.dim()).clone()


@settings(max_examples=150, deadline=None)
@given(sharded(), st.sampled_from([1, 64, 192, 1 << 20]))
def test_buckets_come_out_as_those_of_the_whole_tensors(
    case: tuple[list[Tensor], list[Holding]], bucket_size: int
) -> None:
    tensors, holdings = case
    specs = [TensorSpec(f"t{index}", tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)]
    plan = plan_buckets(specs, bucket_size)
    shards = ShardPlan(plan, holdings)
    held = [[local(tensor, block) for tensor, block in zip(tensors, holding, strict=True)] for holding in holdings]
    for bucket in plan.buckets:
        expected, buffer = (torch.zeros(bucket.nbytes, dtype=torch.uint8) for _ in range(2))
        pack(plan, bucket, tensors, expected)
        messages = {}
        for rank in range(1, len(holdings)):
            messages[rank] = torch.zeros(shards.nbytes(bucket, rank), dtype=torch.uint8)
            shards.pack_parts(bucket, rank, holdings[rank], held[rank], messages[rank])
        shards.assemble(bucket, holdings[0], held[0], messages, buffer)
        assert torch.equal(buffer, expected)
        if shards.is_whole(bucket):
            assert not any(messages[rank].numel() for rank in messages)


@pytest.mark.parametrize(
    "blocks",
    [
        [Block((0,), (3,)), Block((4,), (2,))],
        [Block((0,), (4,)), Block((3,), (3,))],
        [Block((0,), (4,)), Block((4,), (3,))],
        [Block((0,), (3,)), Block((0,), (3,))],
        [Block((-1,), (3,)), Block((2,), (3,))],
    ],
    ids=["a gap", "an overlap", "too long", "the same half twice", "before the beginning"],
)
def test_blocks_that_do_not_tile_are_refused_by_name(blocks: list[Block]) -> None:
    plan = plan_buckets([TensorSpec("fine", torch.int8, (6,)), TensorSpec("torn", torch.int8, (6,))])
    fine = [Block((0,), (3,)), Block((3,), (3,))]
    with pytest.raises(PlanError, match=r"overlap, or leave gaps: torn \(int8 \[6\]\)") as caught:
        ShardPlan(plan, [(one, other) for one, other in zip(fine, blocks, strict=True)])
    assert caught.value.names == ("torn",)


def test_a_block_that_several_ranks_hold_is_brought_by_the_first() -> None:
    plan = plan_buckets([TensorSpec("t", torch.int8, (4,))])
    low, high = Block((0,), (2,)), Block((2,), (2,))
    shards = ShardPlan(plan, [(low,), (high,), (low,), (high,)])
    assert [len(shards.parts(plan.buckets[0], rank)) for rank in range(4)] == [1, 1, 0, 0]


@settings(max_examples=150, deadline=None)
@given(sharded(), st.sampled_from([1, 64, 192, 1 << 20]))
def test_blocks_are_taken_out_of_buckets_bit_for_bit(
    case: tuple[list[Tensor], list[Holding]], bucket_size: int
) -> None:
    tensors, holdings = case
    plan = plan_buckets(
        [TensorSpec(f"t{index}", tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)],
        bucket_size,
    )
    held: dict[int, list[Shard]] = {}
    for holding in holdings:
        for index, block in enumerate(holding):
            if block is not None:
                mine = torch.empty(block.shape[::-1], dtype=tensors[index].dtype)
                mine = mine.permute(tuple(range(mine.dim()))[::-1])  # strided
                held.setdefault(index, []).append(Shard(mine, block))
    for bucket in plan.buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        pack(plan, bucket, tensors, buffer)
        unpack_shards(plan, bucket, buffer, held)
    for index, shards in held.items():
        for shard in shards:
            assert content(shard.tensor) == content(local(tensors[index], shard.block))


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(0, 700), st.integers(0, 700))
def test_boxes_are_any_range_of_a_tensor_in_order(shape: list[int], start: int, stop: int) -> None:
    tensor = torch.arange(int(torch.Size(shape).numel())).view(shape)
    start, stop = min(start, tensor.numel()), min(stop, tensor.numel())
    origin = (0,) * len(shape)
    found = [box.of(tensor, origin).reshape(-1) for box in boxes(tuple(shape), start, stop)]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, max(start, stop)))


def test_what_two_boxes_have_in_common() -> None:
    box = Block((1, 2), (3, 4))
    assert box.common(Block((0, 0), (9, 9))) == box
    assert box.common(Block((2, 0), (9, 3))) == Block((2, 2), (2, 1))
    assert box.common(Block((4, 2), (1, 1))).numel == 0
    assert box.common(Block((0, 0), (0, 0))).numel == 0
    assert Block((), ()).common(Block((), ())) == Block((), ())


def test_blocks_that_do_not_tile_have_no_owners() -> None:
    halves = [Block((0,), (2,)), Block((2,), (3,))]
    assert owners_of((5,), halves) == {0: halves[0], 1: halves[1]}
    assert owners_of((5,), [halves[1], None]) == {1: Block((0,), (5,))}
    assert owners_of((5,), halves[:1]) is None
    assert owners_of((5,), [halves[0], Block((1,), (3,))]) is None


@pytest.mark.parametrize("shape", [(1, 4096), (2, 4096), (4096,), (3, 7, 512)], ids=str)
def test_no_message_is_larger_than_its_bucket_whatever_the_rows(shape: tuple[int, ...]) -> None:
    plan = plan_buckets([TensorSpec("t", torch.float32, shape)], 1024)
    half = shape[-1] // 2
    halves = [
        Block((*(0,) * (len(shape) - 1), start), (*shape[:-1], size)) for start, size in ((0, half), (half, half))
    ]
    shards = ShardPlan(plan, [(block,) for block in halves])
    assert len(plan.buckets) > 3
    for bucket in plan.buckets:
        parts = len(shards.parts(bucket, 1))
        assert shards.nbytes(bucket, 1) <= bucket.nbytes + parts * ALIGNMENT
        assert parts <= 2 * len(shape) - 1
