"""Moving tensors into a flat buffer of bytes and out of it, bit for bit.

A tensor is its bytes (R11): strided, expanded, 0-dim and empty ones, and every dtype. Copies go through integer views
of the same width wherever source and target have the same dtype, so no kernel for an exotic dtype is needed and no
NaN payload or odd bool is touched. Tensors that are split over buckets are walked row-major in slices, so not even a
large strided one is ever copied whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Piece, Plan, TensorSpec
from asyncsync.digests import StreamingDigests

_LARGE = 2**16  # bytes: a smaller tensor is packed with its neighbours
_GROUP = 2**20  # bytes, at the most, that are packed together: they stay in the cache
_HASHED = 2**18  # bytes that are hashed as soon as they were copied: source and target are in the nearest cache then
_RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SMALL = 64 * 2**10
"""Bytes up to which torch takes longer to begin a copy than to make it: several times, of a few kilobytes."""

_memmove = ctypes.PyDLL(None).memmove  # it keeps the GIL: to let go of it takes longer
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None
_memmove_without_gil = ctypes.CDLL(None).memmove
_memmove_without_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove_without_gil.restype = None


def raw(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width (complex128 stays as it is: no integer is as wide)."""
    if tensor.is_conj():  # a lazy conjugate's memory is not its value
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.view(_RAW_DTYPES.get(tensor.dtype.itemsize, tensor.dtype))


def row_major(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Elements ``start`` to ``stop`` of a tensor in row-major order, as views that follow one another."""
    if start >= stop:
        return
    if start == 0 and stop == tensor.numel():
        yield tensor
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor.numel() // tensor.shape[0]
    first, whole = start // row, stop // row
    if start % row:
        yield from row_major(tensor[first], start - first * row, min(row, stop - first * row))
        first += 1
    if whole > first:
        yield tensor[first:whole]
    if stop % row and whole >= first:
        yield from row_major(tensor[whole], 0, stop - whole * row)


def arena_views(plan: Plan, arena: Tensor) -> list[Tensor]:
    """Every tensor of the plan as a view of a flat uint8 arena of ``plan.arena_nbytes``."""
    return [
        arena[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        for spec, offset in zip(plan.specs, plan.offsets, strict=True)
    ]


def pack(
    plan: Plan,
    bucket: Bucket,
    tensors: Sequence[Tensor] | Mapping[int, Tensor],
    buffer: Tensor,
    dense: Sequence[bool] = (),
) -> None:
    """Fill a bucket's buffer from the tensors of the plan.

    Args:
        plan: The plan.
        bucket: One of its buckets.
        tensors: The bucket's tensors, by their index in the plan. One whose dtype differs from its spec's is converted.
        buffer: Flat uint8, ``bucket.nbytes`` long. May be on another device.
        dense: What :func:`is_dense` says of all tensors of the plan, if that is known.
    """
    with torch.no_grad():
        targets, sources = [], []
        base = buffer.data_ptr() if buffer.is_cpu else 0
        for index, (start, stop) in zip(bucket.whole, bucket.spans, strict=True):
            size = stop - start
            if base and size <= _SMALL:
                tensor = tensors[index]
                if dense[index] if dense else is_dense(plan.specs[index], tensor):
                    _memmove(base + start, tensor.data_ptr(), size)
                    continue
            spec, tensor = plan.specs[index], tensors[index]
            target = buffer[start:stop]
            if tensor.dtype == spec.dtype:
                tensor = raw(tensor)
                if tensor.is_contiguous():
                    tensor = tensor.view(-1)  # two views less of the target: of thousands of small tensors these count
                    targets.append(target if tensor.dtype == torch.uint8 else target.view(tensor.dtype))
                    sources.append(tensor)
                    continue
                target = target.view(tensor.dtype)
            else:
                target = target.view(spec.dtype)
            targets.append(target.view(spec.shape))
            sources.append(tensor)
        if targets:
            torch._foreach_copy_(targets, sources)
        for piece in bucket.pieces:
            for tensor_part, buffer_part in _parts(plan, piece, tensors[piece.tensor], buffer):
                buffer_part.copy_(tensor_part)


def pack_and_hash(
    plan: Plan,
    bucket: Bucket,
    tensors: Sequence[Tensor] | Mapping[int, Tensor],
    buffer: Tensor,
    dense: Sequence[bool],
    digests: StreamingDigests,
) -> None:
    """:func:`pack` and :func:`hash_bucket` in one go, to host memory: bytes are hashed while the cache still has them.

    It takes a tenth longer than copying alone; hashing what lies in memory takes half as long as copying it. All of it
    happens on this thread.
    """
    data = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
    whole = list(zip(bucket.whole, bucket.spans, strict=True))
    large = [Piece(index, 0, stop - start, start) for index, (start, stop) in whole if stop - start > _SMALL]
    done: set[int] = set()
    for piece in (*large, *bucket.pieces):
        index = piece.tensor
        if dense[index] if dense else is_dense(plan.specs[index], tensors[index]):
            _copy_and_hash(plan, piece, tensors[index], data, buffer.data_ptr(), digests)
            done.add(index)
    if done:
        whole = [(index, span) for index, span in whole if index not in done]
        bucket = replace(
            bucket,
            whole=tuple(index for index, _ in whole),
            spans=tuple(span for _, span in whole),
            pieces=tuple(piece for piece in bucket.pieces if piece.tensor not in done),
        )
    pack(plan, bucket, tensors, buffer, dense)
    hash_bucket(plan, bucket, buffer, digests)


def _copy_and_hash(
    plan: Plan, piece: Piece, tensor: Tensor, data: memoryview, base: int, digests: StreamingDigests
) -> None:
    nbytes = piece.stop - piece.start
    is_last = piece.stop == plan.specs[piece.tensor].nbytes
    for start in range(0, nbytes, _HASHED):
        stop = min(start + _HASHED, nbytes)
        offset = piece.offset + start
        # Asked for anew: to share a tensor with another process (share_memory(), a queue) moves its memory.
        _memmove_without_gil(base + offset, tensor.data_ptr() + piece.start + start, stop - start)
        last = is_last and stop == nbytes
        digests.add_piece(piece.tensor, data[offset : offset + stop - start], last=last)


def is_dense(spec: TensorSpec, tensor: Tensor) -> bool:
    """Whether a tensor's bytes lie one behind the other in host memory, as they are sent."""
    return (
        tensor.dtype == spec.dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def in_place(plan: Plan, bucket: Bucket, tensors: Sequence[Tensor], device: str) -> Tensor | None:
    """A bucket's bytes where they lie already: if it is one contiguous tensor, or a part of one; else None.

    Args:
        plan: The plan.
        bucket: One of its buckets.
        tensors: All tensors of the plan, in order.
        device: Device type that the bytes are wanted on.
    """
    if (piece := bucket.lone) is None:
        return None
    tensor = tensors[piece.tensor]
    if tensor.dtype != plan.specs[piece.tensor].dtype:
        return None
    flat = flat_bytes(tensor, device)
    return None if flat is None else flat[piece.start : piece.stop]


def flat_bytes(tensor: Tensor, device: str) -> Tensor | None:
    """A tensor's own memory as flat uint8, if it is contiguous and on this type of device."""
    if tensor.device.type != device or not tensor.is_contiguous():
        return None
    # Not view(-1): a tensor of one element is contiguous whatever its strides, and would keep them.
    return raw(tensor.detach()).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bucket_parts(
    plan: Plan, bucket: Bucket, tensors: Sequence[Tensor], scratch: Callable[[int], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """A bucket's bytes part by part, in order, each with where it lies in the bucket: large tensors where they are.

    Args:
        plan: The plan.
        bucket: One of its buckets.
        tensors: All tensors of the plan, in order.
        scratch: Gives flat uint8 memory of a size, on the host, for what must be packed. It stays as it is only until
            the next part is asked for; between tensors it is zero.
    """
    group: list[tuple[int, tuple[int, int]]] = []

    def packed() -> Iterator[tuple[int, Tensor]]:
        if group:
            first, last = group[0][1][0], group[-1][1][1]
            spans = tuple((start - first, stop - first) for _, (start, stop) in group)
            buffer = scratch(last - first)
            if sum(stop - start for start, stop in spans) < last - first:
                buffer.zero_()
            indices = tuple(index for index, _ in group)
            pack(plan, Bucket(0, 0, last - first, indices, spans, ()), tensors, buffer)
            group.clear()
            yield first, buffer

    for index, span in zip(bucket.whole, bucket.spans, strict=True):
        large = span[1] - span[0] >= _LARGE
        flat = flat_bytes(tensors[index], "cpu") if large and tensors[index].dtype == plan.specs[index].dtype else None
        if flat is not None or (group and span[1] - group[0][1][0] > _GROUP):
            yield from packed()
        if flat is None:
            group.append((index, span))
        else:
            yield span[0], flat
    yield from packed()
    for piece in bucket.pieces:
        only = Bucket(0, 0, piece.stop - piece.start, (), (), (replace(piece, offset=0),))
        flat = in_place(plan, only, tensors, "cpu")
        if flat is None:
            flat = scratch(only.nbytes)
            pack(plan, only, tensors, flat)
        yield piece.offset, flat


def unpack(
    plan: Plan, bucket: Bucket, buffer: Tensor, tensors: Sequence[Sequence[Tensor]] | Mapping[int, Sequence[Tensor]]
) -> None:
    """Write a bucket's bytes into tensors: the inverse of :func:`pack`.

    Args:
        plan: The plan.
        bucket: One of its buckets.
        buffer: Flat uint8, ``bucket.nbytes`` long.
        tensors: For every tensor of the bucket, by its index in the plan, the tensors to write it to (dtype and shape
            as in its spec).
    """
    with torch.no_grad():
        address = buffer.data_ptr() if buffer.is_cpu else 0
        for index, (start, stop) in zip(bucket.whole, bucket.spans, strict=True):
            spec = plan.specs[index]
            if address and stop - start <= _SMALL and all(is_dense(spec, tensor) for tensor in tensors[index]):
                for tensor in tensors[index]:
                    _memmove(tensor.data_ptr(), address + start, stop - start)
                continue
            source = raw(buffer[start:stop].view(spec.dtype)).view(spec.shape)
            for tensor in tensors[index]:
                raw(tensor).copy_(source)
        for piece in bucket.pieces:
            for tensor in tensors[piece.tensor]:
                for tensor_part, buffer_part in _parts(plan, piece, tensor, buffer):
                    tensor_part.copy_(buffer_part)


def _parts(plan: Plan, piece: Piece, tensor: Tensor, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views that cover a piece: of the tensor, and of the buffer."""
    spec = plan.specs[piece.tensor]
    width = spec.dtype.itemsize
    flat = buffer[piece.offset : piece.offset + piece.stop - piece.start].view(spec.dtype)
    if tensor.dtype == spec.dtype:
        flat, tensor = raw(flat), raw(tensor)
    position = 0
    for part in row_major(tensor, piece.start // width, piece.stop // width):
        yield part, flat[position : position + part.numel()].view(part.shape)
        position += part.numel()


def hash_bucket(plan: Plan, bucket: Bucket, buffer: Tensor, digests: StreamingDigests) -> None:
    """Add a bucket's tensors to the digests. Buckets must come in order.

    Args:
        plan: The plan.
        bucket: One of its buckets.
        buffer: Its bytes: flat uint8; a buffer on a device is copied to the host first.
        digests: Where they are added.
    """
    data = memoryview(buffer.cpu().numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
    digests.add_whole(bucket.whole, bucket.spans, data)
    for piece in bucket.pieces:
        end = piece.offset + piece.stop - piece.start
        last = piece.stop == plan.specs[piece.tensor].nbytes
        digests.add_piece(piece.tensor, data[piece.offset : end], last=last)


def digest_weights(plan: Plan, tensors: Sequence[Tensor]) -> str:
    """The digest of a set of weights as they lie in memory now; needs one bucket of extra memory."""
    digests = StreamingDigests(len(plan.specs))
    buffer = torch.empty(plan.largest_bucket, dtype=torch.uint8)
    for bucket in plan.buckets:
        part = buffer[: bucket.nbytes]
        pack(plan, bucket, tensors, part)
        hash_bucket(plan, bucket, part, digests)
    return plan.digest_of(digests.result())
