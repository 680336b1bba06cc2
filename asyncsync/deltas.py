"""What of a bucket differs from an older one: found bit by bit, written as a message, and applied. Pure.

Elements are compared as integers of their width, so a NaN's payload counts and 0.0 is not -0.0. A *run* is a part of a
bucket in which all tensors are of one width; both ends know the runs from the plan. A message has, for each run, how
many elements differ, their values as they are, and their places as gaps: how many equal elements lie before each one,
in the smallest width that fits all of the run. A message is applied exactly or not at all: gaps cannot be negative, so
places grow, and if the last one is inside the run, all are.

Whoever compares goes through both buckets once, in blocks that stay in the cache: finds what differs in one, takes the
new values and the old, and writes the new over the old. All of that lets go of the GIL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.errors import TransferError

Array: TypeAlias = npt.NDArray[Any]

_BLOCK = 2**18  # elements that are compared at a time
_HEAD = struct.Struct("<QQ")  # of a run: how many elements differ, and the width of the gaps
_GAPS = (1, 2, 4, 8)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a bucket whose elements are of one width.

    Attributes:
        start: Where it begins in the bucket, in bytes.
        stop: One past its end.
        width: Bytes of an element: 1, 2, 4 or 8. One of 16 (complex128) counts as two.
    """

    start: int
    stop: int
    width: int

    @property
    def elements(self) -> int:
        """How many there are, padding included."""
        return (self.stop - self.start) // self.width


@dataclass(frozen=True, slots=True)
class Grain:
    """How a bucket is made up.

    Attributes:
        nbytes: Its size.
        runs: Its runs, in order.
        elements: How many elements its tensors have.
        padding: How many of its bytes belong to no tensor.
    """

    nbytes: int
    runs: tuple[Run, ...]
    elements: int
    padding: int


def grain_of(plan: Plan, bucket: Bucket) -> Grain:
    """How a bucket of a plan is made up."""
    parts = [
        (start, stop, plan.specs[index].dtype.itemsize)
        for index, (start, stop) in zip(bucket.whole, bucket.spans, strict=True)
    ]
    parts += [
        (piece.offset, piece.offset + piece.stop - piece.start, plan.specs[piece.tensor].dtype.itemsize)
        for piece in bucket.pieces
    ]
    runs: list[Run] = []
    elements = nbytes = 0
    for start, stop, itemsize in sorted(parts):
        width = min(itemsize, 8)
        last = runs[-1] if runs else None
        if last is not None and last.width == width and (start - last.start) % width == 0:
            runs[-1] = Run(last.start, stop, width)
        else:
            runs.append(Run(start, stop, width))
        elements += (stop - start) // width
        nbytes += stop - start
    return Grain(bucket.nbytes, tuple(runs), elements, bucket.nbytes - nbytes)


class Renewal:
    """Makes an old bucket equal to a new one, part by part, and knows then what differed.

    Args:
        grain: How the bucket is made up.
        base: The old one: flat uint8, in host memory.

    Attributes:
        count: How many elements differed.
        hopeless: Whether a message would not be smaller than the bucket.
    """

    def __init__(self, grain: Grain, base: Tensor) -> None:
        self._grain = grain
        self._base = base.numpy()
        self._found: list[list[tuple[Array, Array, Array]]] = [[] for _ in grain.runs]
        self._left = grain.nbytes - _HEAD.size * len(grain.runs)
        self._mask = np.empty(_BLOCK, dtype=np.bool_)
        self._changes: Changes | None = None
        self.count = 0
        self.hopeless = False

    def take(self, start: int, new: Tensor) -> None:
        """Take a part of the new bucket; parts come in order.

        Args:
            start: Where it lies in the bucket, in bytes.
            new: Flat uint8, in host memory. What lies in it between tensors must be zero.
        """
        part, stop = new.numpy(), start + new.numel()
        for run, found in zip(self._grain.runs, self._found, strict=True):
            first, last = max(start, run.start), min(stop, run.stop)
            if first < last:
                kind = f"<u{run.width}"
                self._renew(
                    part[first - start : last - start].view(kind),
                    self._base[first:last].view(kind),
                    (first - run.start) // run.width,
                    run.width,
                    found,
                )

    def _renew(self, new: Array, base: Array, before: int, width: int, found: list[tuple[Array, Array, Array]]) -> None:
        for at in range(0, len(new), _BLOCK):
            ours, theirs = new[at : at + _BLOCK], base[at : at + _BLOCK]
            differ = np.not_equal(ours, theirs, out=self._mask[: len(ours)])
            if self.hopeless:
                self.count += int(np.count_nonzero(differ))
                theirs[:] = ours
                continue
            places = _where(differ)
            if not len(places):
                continue
            values, old = ours[places], theirs[places]
            theirs[places] = values
            places += before + at
            found.append((places, values, old))
            self.count += len(places)
            self._left -= len(places) * (width + 1)
            if self._left <= 0:
                self.hopeless = True
                found.clear()

    def changes(self) -> Changes | None:
        """What differed, once all parts were taken; None if a message that tells of it would not be smaller."""
        if self.hopeless:
            return None
        changes = Changes(
            [
                (
                    np.concatenate([places for places, _, _ in found]),
                    np.concatenate([values for _, values, _ in found]),
                    np.concatenate([old for _, _, old in found]),
                )
                if found
                else (np.empty(0, dtype=np.int64), np.empty(0, dtype=f"<u{run.width}"), np.empty(0, f"<u{run.width}"))
                for run, found in zip(self._grain.runs, self._found, strict=True)
            ]
        )
        return changes if changes.nbytes < self._grain.nbytes or not changes.count else None


class Changes:
    """What differs between two buckets.

    Args:
        runs: Of each run: which elements differ, in order, their new values, and their old.

    Attributes:
        count: How many elements differ.
        nbytes: How long a message is that tells of it: 0 if nothing differs.
    """

    def __init__(self, runs: Sequence[tuple[Array, Array, Array]]) -> None:
        self._gaps = [_gaps_of(places) for places, _, _ in runs]
        self._values = [values for _, values, _ in runs], [old for _, _, old in runs]
        self.count = sum(map(len, self._gaps))
        sections = sum(_padded(section.nbytes) for section in (*self._gaps, *self._values[0]))
        self.nbytes = _HEAD.size * len(runs) + sections if self.count else 0

    def write(self, message: Tensor, *, back: bool = False) -> Tensor:
        """Write the message that makes the old bucket equal to the new one.

        Args:
            message: Flat uint8, :attr:`nbytes` long, in host memory.
            back: Write the one that makes the new bucket equal to the old one.
        """
        target = message.numpy()
        at = _HEAD.size * len(self._gaps)
        for number, (gaps, values) in enumerate(zip(self._gaps, self._values[back], strict=True)):
            _HEAD.pack_into(target.data, number * _HEAD.size, len(gaps), gaps.itemsize)
            for section in (values, gaps):
                end = at + section.nbytes
                target[at:end] = section.view(np.uint8)
                at += _padded(section.nbytes)
                target[end:at] = 0
        return message


def _where(mask: Array) -> Array:
    """Where a mask is true. In two steps, since in a mask that is true here and there numpy finds the next by steps."""
    if len(mask) % 8:
        return np.flatnonzero(mask)
    groups = mask.view(np.uint64)
    some = np.flatnonzero(groups != 0)
    inside = np.flatnonzero(groups[some].view(np.bool_))
    places: Array = some[inside >> 3]
    places <<= 3
    inside &= 7
    places |= inside
    return places


def _gaps_of(places: Array) -> Array:
    if not len(places):
        return np.empty(0, dtype=np.uint8)
    gaps = np.diff(places, prepend=-1)
    gaps -= 1
    widest = int(gaps.max())
    return gaps.astype(next(f"<u{width}" for width in _GAPS if widest < 256**width))


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


@dataclass(frozen=True, slots=True)
class Changed:
    """What a message says of one run.

    Attributes:
        run: The run.
        places: Which of its elements differ, in order; each is inside it.
        values: Their values, as integers.
    """

    run: Run
    places: Array
    values: Array

    def within(self, start: int, stop: int) -> Changed:
        """What of it is in a part of the run; places count from the part's beginning.

        Args:
            start: Where the part begins in the bucket, in bytes.
            stop: One past its end.
        """
        width = self.run.width
        first, last = ((at - self.run.start) // width for at in (start, stop))
        low, high = np.searchsorted(self.places, (first, last))
        return Changed(Run(start, stop, width), self.places[low:high] - first, self.values[low:high])

    def write(self, flat: Tensor) -> None:
        """Write it to the memory of its run: flat uint8, on any device."""
        if not len(self.places):
            return
        if flat.device.type == "cpu":
            flat.numpy().view(f"<u{self.run.width}")[self.places] = self.values
        else:
            self.write_on_device(flat)

    def write_on_device(self, flat: Tensor) -> None:
        """The same, with torch's means, wherever it lies."""
        kind = _INTEGERS[self.run.width]
        values = torch.from_numpy(self.values.view(np.uint8)).view(kind)
        flat.view(kind)[torch.from_numpy(self.places).to(flat.device)] = values.to(flat.device)


def read(message: Tensor, runs: Sequence[Run]) -> list[Changed]:
    """What a message says, checked.

    Args:
        message: Flat uint8, in host memory; what is returned may be a view of it.
        runs: The bucket's.

    Raises:
        TransferError: It is no message of such a bucket.
    """
    return list(_read(message.numpy(), runs))


def _read(message: Array, runs: Sequence[Run]) -> Iterator[Changed]:
    at = _HEAD.size * len(runs)
    if len(message) < at:
        raise TransferError(f"a delta of {len(message)} bytes has no room for its heads")
    for number, run in enumerate(runs):
        count, width = _HEAD.unpack_from(message.data, number * _HEAD.size)
        if width not in _GAPS or count > run.elements:
            raise TransferError(f"a delta speaks of {count} elements of {run.elements}, and of gaps of {width} bytes")
        values_end = at + _padded(count * run.width)
        end = values_end + _padded(count * width)
        if end > len(message):
            raise TransferError(f"a delta of {len(message)} bytes ends in the middle of what it tells of")
        values = message[at : at + count * run.width].view(f"<u{run.width}")
        gaps = message[values_end : values_end + count * width].view(f"<u{width}")
        places = np.cumsum(gaps, dtype=np.int64)
        places += np.arange(count)
        if count and (places[-1] >= run.elements or int(gaps.max()) >= run.elements):  # of 8 bytes, a sum may overflow
            raise TransferError(f"a delta speaks of more than the {run.elements} elements of its tensors")
        yield Changed(run, places, values)
        at = end
    if at != len(message):
        raise TransferError(f"a delta of {len(message)} bytes says all it has to say in {at}")


def apply(message: Tensor, runs: Sequence[Run], flat: Tensor) -> None:
    """Make a bucket equal to the one that a message was taken of.

    Args:
        message: Flat uint8, in host memory.
        runs: The bucket's.
        flat: The bucket that it was taken against: flat uint8, on any device.

    Raises:
        TransferError: It is no message of such a bucket. Nothing was written.
    """
    for changed in read(message, runs):
        changed.write(flat[changed.run.start : changed.run.stop])
