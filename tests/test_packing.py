"""Packing and unpacking, bit for bit; digests that do not depend on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncsync import packing
from asyncsync.buckets import TensorSpec, plan_buckets
from asyncsync.digests import StreamingDigests
from asyncsync.packing import (
    arena_views,
    digest_weights,
    hash_bucket,
    in_place,
    is_dense,
    pack,
    pack_and_hash,
    row_major,
    unpack,
)
from tests.sample import DTYPES, content, random_tensor


def through_the_arena(tensors: list[Tensor], bucket_size: int, *, whole_tensors: bool = False) -> list[Tensor]:
    """Pack tensors into buckets of an arena, and view them there."""
    plan = plan_buckets(
        [TensorSpec(f"t{index}", tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)],
        bucket_size,
        whole_tensors=whole_tensors,
    )
    arena = torch.full((plan.arena_nbytes,), 0xAB, dtype=torch.uint8)
    for bucket in plan.buckets:
        pack(plan, bucket, tensors, arena[bucket.start : bucket.stop])
    return arena_views(plan, arena)


def kinds(dtype: torch.dtype) -> list[Tensor]:
    base = random_tensor(dtype, (6, 8, 4), seed=1)
    return [
        base,
        base[0, 0, 0],
        base[:0],
        base.transpose(0, 2),
        base[::2, 1::3, 2:],
        base[:1, :1].expand(5, 3, 4),
        base.permute(2, 0, 1)[1],
        base[:1, :1, ::4],
    ]


@pytest.mark.parametrize("whole_tensors", [False, True], ids=["", "whole tensors"])
@pytest.mark.parametrize("bucket_size", [64, 128, 1 << 20], ids=["split fine", "split", "whole"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_arrives_bit_for_bit(dtype: torch.dtype, bucket_size: int, whole_tensors: bool) -> None:
    tensors = [random_tensor(torch.uint8, (1,), seed=2), *kinds(dtype)]
    views = through_the_arena(tensors, bucket_size, whole_tensors=whole_tensors)
    for tensor, view in zip(tensors, views, strict=True):
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        assert content(view) == content(tensor)


@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_into_strided_tensors_is_the_inverse(dtype: torch.dtype, bucket_size: int) -> None:
    source = random_tensor(dtype, (6, 8), seed=3)
    targets = [torch.zeros_like(source), torch.zeros_like(source).t().contiguous().t()]
    plan = plan_buckets([TensorSpec("t", dtype, (6, 8))], bucket_size)
    for bucket in plan.buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        pack(plan, bucket, [source], buffer)
        unpack(plan, bucket, buffer, [targets])
    assert [content(target) for target in targets] == [content(source)] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bucket_of_one_contiguous_tensor_needs_no_packing(dtype: torch.dtype) -> None:
    for tensor in kinds(dtype):
        plan = plan_buckets([TensorSpec("t", dtype, tuple(tensor.shape))], 64)
        for bucket in plan.buckets:
            flat = in_place(plan, bucket, [tensor], "cpu")
            packed = torch.empty(bucket.nbytes, dtype=torch.uint8)
            pack(plan, bucket, [tensor], packed)
            if tensor.is_contiguous():
                assert flat is not None
                assert flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert torch.equal(flat, packed)
            else:
                assert flat is None
    assert in_place(plan, plan.buckets[0], [kinds(dtype)[0]], "cuda") is None


def test_lazy_conjugates_and_negatives_are_sent_as_their_values() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, negative = base.conj(), base.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    views = through_the_arena([conjugate, negative], 1 << 20)
    assert torch.equal(views[0], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(views[1], torch.tensor([-2.0, 4.0]))


@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
def test_another_dtype_in_the_plan_converts(bucket_size: int) -> None:
    master = torch.randn(40, 3).t()
    plan = plan_buckets([TensorSpec("t", torch.bfloat16, (3, 40))], bucket_size)
    arena = torch.empty(plan.arena_nbytes, dtype=torch.uint8)
    for bucket in plan.buckets:
        pack(plan, bucket, [master], arena[bucket.start : bucket.stop])
    assert content(arena_views(plan, arena)[0]) == content(master.to(torch.bfloat16))


@pytest.mark.parametrize("bucket_size", [64, 192, 1 << 20])
@pytest.mark.parametrize("are_known", [False, True], ids=["looked at", "known"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_and_hashing_in_one_go_is_the_same(
    dtype: torch.dtype, bucket_size: int, are_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_SMALL", 16)
    monkeypatch.setattr(packing, "_HASHED", 40)  # a large tensor takes several steps, and the last is shorter
    tensors = [random_tensor(torch.float64, (5,), seed=2), *kinds(dtype), torch.randn(40)]
    specs = [TensorSpec(f"t{index}", tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)]
    specs[-1] = TensorSpec("converted", torch.bfloat16, (40,))
    plan = plan_buckets(specs, bucket_size)
    dense = tuple(map(is_dense, specs, tensors)) if are_known else ()
    arenas = [torch.zeros(plan.arena_nbytes, dtype=torch.uint8) for _ in range(2)]
    apart, at_once = StreamingDigests(len(specs)), StreamingDigests(len(specs))
    for bucket in plan.buckets:
        one, other = (arena[bucket.start : bucket.stop] for arena in arenas)
        pack(plan, bucket, tensors, one)
        hash_bucket(plan, bucket, one, apart)
        pack_and_hash(plan, bucket, tensors, other, dense, at_once)
    assert torch.equal(*arenas)
    assert apart.result().tolist() == at_once.result().tolist()


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.integers(0, 700),
    st.integers(0, 700),
)
def test_row_major_walks_any_range_of_any_stride(shape: list[int], order: list[int], start: int, stop: int) -> None:
    axes = [axis for axis in order if axis < len(shape)]
    tensor = torch.arange(int(torch.Size(shape).numel())).view(shape).permute(axes)
    start, stop = min(start, tensor.numel()), min(stop, tensor.numel())
    walked = list(row_major(tensor, start, stop))
    got = [element for part in walked for element in part.reshape(-1).tolist()]
    assert got == tensor.reshape(-1).tolist()[start:stop]
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in walked)


def test_the_digest_is_the_same_for_every_cutting_and_tells_one_changed_bit() -> None:
    tensors = [random_tensor(torch.float32, (30, 7), seed=4).t(), random_tensor(torch.int16, (), seed=5)]
    specs = [TensorSpec(f"t{index}", tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)]
    digests = {digest_weights(plan_buckets(specs, size), tensors) for size in (64, 192, 1 << 20)}
    assert len(digests) == 1
    tensors[1] = tensors[1] ^ 1
    assert digest_weights(plan_buckets(specs), tensors) not in digests


def test_padding_does_not_count() -> None:
    plan = plan_buckets([TensorSpec("a", torch.uint8, (1,)), TensorSpec("b", torch.uint8, (1,))])
    results = []
    for filler in (0, 255):
        buffer = torch.full((plan.arena_nbytes,), filler, dtype=torch.uint8)
        pack(plan, plan.buckets[0], [torch.ones(1, dtype=torch.uint8)] * 2, buffer)
        digests = StreamingDigests(2)
        hash_bucket(plan, plan.buckets[0], buffer, digests)
        results.append(digests.result().tolist())
    assert results[0] == results[1]
