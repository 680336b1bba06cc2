"""The plan: offsets, cuts, digests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncsync.buckets import ALIGNMENT, Piece, Plan, TensorSpec, join_plans, joint_digest, plan_buckets
from asyncsync.errors import PlanError

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]

specs_strategy = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=30).map(
    lambda items: [TensorSpec(f"t{index}", dtype, tuple(shape)) for index, (dtype, shape) in enumerate(items)]
)


def covered(plan: Plan) -> list[list[tuple[int, int, int]]]:
    """For every tensor, the (start, stop, place in the arena) of each part that some bucket holds."""
    parts: list[list[tuple[int, int, int]]] = [[] for _ in plan.specs]
    for bucket in plan.buckets:
        for tensor, (start, stop) in zip(bucket.whole, bucket.spans, strict=True):
            parts[tensor].append((0, stop - start, bucket.start + start))
        for piece in bucket.pieces:
            parts[piece.tensor].append((piece.start, piece.stop, bucket.start + piece.offset))
    return parts


@given(specs_strategy, st.integers(1, 700))
def test_every_byte_is_sent_once_and_lies_where_the_arena_has_it(specs: list[TensorSpec], bucket_size: int) -> None:
    plan = plan_buckets(specs, bucket_size)
    for spec, offset, parts in zip(plan.specs, plan.offsets, covered(plan), strict=True):
        position = 0
        for start, stop, place in parts:
            assert start == position
            assert place == offset + start
            assert start % spec.dtype.itemsize == 0
            assert stop % spec.dtype.itemsize == 0
            position = stop
        assert position == spec.nbytes
        assert offset % ALIGNMENT == 0
    limit = max(ALIGNMENT, bucket_size // ALIGNMENT * ALIGNMENT)
    assert all(0 < bucket.nbytes <= limit for bucket in plan.buckets)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for earlier, later in zip(plan.buckets, plan.buckets[1:], strict=False):
        assert earlier.stop <= later.start
    assert plan.nbytes == sum(spec.nbytes for spec in specs)


@given(specs_strategy, st.integers(1, 700))
def test_buckets_of_whole_tensors_are_of_one_dtype_with_nothing_in_between(
    specs: list[TensorSpec], bucket_size: int
) -> None:
    plan = plan_buckets(specs, bucket_size, whole_tensors=True)
    for spec, offset, parts in zip(plan.specs, plan.offsets, covered(plan), strict=True):
        assert parts == ([(0, spec.nbytes, offset)] if spec.nbytes else [])
        assert offset % spec.dtype.itemsize == 0
    limit = max(ALIGNMENT, bucket_size // ALIGNMENT * ALIGNMENT)
    for bucket in plan.buckets:
        assert not bucket.pieces
        assert len({specs[index].dtype for index in bucket.whole}) == 1
        assert bucket.spans[0][0] == 0
        assert bucket.spans[-1][1] == bucket.nbytes == sum(specs[index].nbytes for index in bucket.whole)
        assert bucket.nbytes <= limit or len(bucket.whole) == 1
        assert bucket.start % ALIGNMENT == 0
    assert [index for bucket in plan.buckets for index in bucket.whole] == [
        index for index, spec in enumerate(specs) if spec.nbytes
    ]
    assert plan.arena_nbytes % ALIGNMENT == 0
    assert plan.digest != plan_buckets(specs, bucket_size).digest


@given(st.lists(specs_strategy, min_size=2, max_size=4), st.integers(1, 700))
def test_joined_plans_send_every_byte_of_each_source_once_in_turns(
    parts: list[list[TensorSpec]], bucket_size: int
) -> None:
    plans = [
        plan_buckets([replace(spec, name=f"{source}.{spec.name}") for spec in specs], bucket_size)
        for source, specs in enumerate(parts)
    ]
    joined = join_plans(plans)
    assert joined.specs == tuple(spec for plan in plans for spec in plan.specs)
    for spec, offset, found in zip(joined.specs, joined.offsets, covered(joined), strict=True):
        assert sum(stop - start for start, stop, _ in found) == spec.nbytes
        assert all(place == offset + start for start, _, place in found)
    assert [bucket.index for bucket in joined.buckets] == list(range(len(joined.buckets)))
    for source, plan in enumerate(plans):
        own = [bucket for bucket in joined.buckets if bucket.source == source]
        assert [bucket.nbytes for bucket in own] == [bucket.nbytes for bucket in plan.buckets]
        assert [bucket.spans for bucket in own] == [bucket.spans for bucket in plan.buckets], "each in its own order"
        for turn, bucket in enumerate(own):
            before = [other for other in joined.buckets[: bucket.index] if other.source != source]
            assert len(before) == sum(
                min(len(other.buckets), turn + (index < source)) for index, other in enumerate(plans) if index != source
            )
    digests = np.arange(len(joined.specs), dtype=np.uint64)
    cuts = np.cumsum([len(plan.specs) for plan in plans])[:-1]
    own_digests = [plan.digest_of(part) for plan, part in zip(plans, np.split(digests, cuts), strict=True)]
    assert joined.digest_of(digests) == joint_digest(own_digests)
    assert joined.digest == joint_digest([plan.digest for plan in plans])


def test_one_plan_joined_is_itself_and_rivals_are_refused_by_name() -> None:
    plan = plan_buckets([TensorSpec("a", torch.uint8, (1,), ("b",))])
    assert join_plans([plan]) is plan
    with pytest.raises(PlanError, match="sources 0 and 1 both send b") as caught:
        join_plans([plan, plan_buckets([TensorSpec("b", torch.uint8, (1,))])])
    assert caught.value.names == ("b",)


def test_a_tensor_three_times_the_bucket_is_split() -> None:
    plan = plan_buckets([TensorSpec("large", torch.float32, (768,))], 1024)
    assert [bucket.pieces[0].stop - bucket.pieces[0].start for bucket in plan.buckets] == [1024, 1024, 1024]


def test_a_byte_before_a_wide_element_does_not_misalign_it() -> None:
    plan = plan_buckets([TensorSpec("byte", torch.uint8, (1,)), TensorSpec("wide", torch.int64, (1,))])
    assert plan.offsets == (0, ALIGNMENT)
    assert plan.nbytes == 9


def test_large_weights_are_cut_finer_than_the_bucket_size_so_that_packing_overlaps_sending() -> None:
    specs = [TensorSpec(f"t{index}", torch.uint8, (2**20,)) for index in range(512)]
    assert len(plan_buckets(specs, 256 * 2**20).buckets) == 32
    assert len(plan_buckets(specs, 256 * 2**20, whole_tensors=True).buckets) == 8, "each is a call to an engine"


def test_a_large_tensor_has_buckets_of_its_own() -> None:
    small, large = TensorSpec("small", torch.uint8, (3,)), TensorSpec("large", torch.uint8, (2**22,))
    plan = plan_buckets([small, large, TensorSpec("other", torch.uint8, (5,))])
    assert [bucket.lone for bucket in plan.buckets] == [
        Piece(0, 0, 3, 0),
        Piece(1, 0, 2**22, 0),
        Piece(2, 0, 5, 0),
    ]


def test_nothing_to_send_is_a_plan_too() -> None:
    plan = plan_buckets([TensorSpec("empty", torch.float32, (0, 3))])
    assert plan.buckets == ()
    assert plan.arena_nbytes == 0
    assert plan.largest_bucket == 0


@pytest.mark.parametrize("size", [0, -1])
def test_a_bucket_size_that_is_not_positive_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_buckets([], size)


def test_a_name_that_occurs_twice_is_refused_by_name() -> None:
    specs = [TensorSpec("a", torch.uint8, (1,)), TensorSpec("b", torch.uint8, (1,), aliases=("a",))]
    with pytest.raises(PlanError, match="twice: a") as caught:
        plan_buckets(specs)
    assert caught.value.names == ("a",)


BASE = (TensorSpec("a", torch.float32, (4,)), TensorSpec("b", torch.float32, (2, 2)))
OTHERS = {
    "name": (TensorSpec("c", torch.float32, (4,)), BASE[1]),
    "dtype": (TensorSpec("a", torch.int32, (4,)), BASE[1]),
    "shape": (TensorSpec("a", torch.float32, (2, 2)), BASE[1]),
    "order": (BASE[1], BASE[0]),
    "alias": (TensorSpec("a", torch.float32, (4,), aliases=("z",)), BASE[1]),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_digest_tells_layouts_apart(what: str) -> None:
    assert plan_buckets(BASE).digest == plan_buckets(BASE).digest
    assert plan_buckets(BASE).digest != plan_buckets(OTHERS[what]).digest
    assert plan_buckets(BASE).layout_digest != plan_buckets(OTHERS[what]).layout_digest


def test_the_cutting_is_in_the_plan_digest_and_not_in_the_layout_digest() -> None:
    coarse, fine = plan_buckets(BASE, 1024), plan_buckets(BASE, 64)
    assert coarse.digest != fine.digest
    assert coarse.layout_digest == fine.layout_digest
