"""How a set of weights lies in safetensors files: as Hugging Face lays it out, so that any reader can load it.

Whole tensors fill one file after another, in the plan's order; within a file the widest dtypes come first, so that each
tensor is aligned. Tied weights lie there once, under their first name. Which byte lies where follows from the plan
alone, headers included: both ends of an update compute it, and buckets are written and read as they come.

What safetensors has no name for (complex numbers, rarer kinds of fp8) is stored as bytes, and the index tells what they
are. Such files stay loadable, but by readers that do not know the index those tensors are seen as flat uint8.

This module is the only door to ``safetensors``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.errors import PlanError

FILE_SIZE = 5 * 10**9
"""Bytes of tensors a file may have, unless one alone has more."""

INDEX = "model.safetensors.index.json"
"""The name of a folder's index."""

_SLICE = 16 * 2**20  # bytes
_PIECES = 512  # of a vectored read or write; the kernel takes 1024
_HEADER_ALIGNMENT = 64
_METADATA = "__metadata__"
_DTYPES = {  # those of safetensors 0.5
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file.

    Attributes:
        name: Its name.
        tensors: Which tensors of the plan lie in it, in order.
        nbytes: Bytes of these.
    """

    name: str
    tensors: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that follow one another in a file.

    Attributes:
        file: The file's number.
        start: Where they begin among the bytes of its tensors.
        spans: Where they lie in the bucket: (start, stop), in order.
    """

    file: int
    start: int
    spans: tuple[tuple[int, int], ...]


class FileLayout:
    """Where each tensor of one source's plan lies.

    Args:
        plan: The plan.
        source: The source's number; files of several sources lie in one folder.

    Raises:
        PlanError: A tensor has a name that safetensors cannot store.

    Attributes:
        plan: The plan.
        source: The source's number.
        files: The files.
        nbytes: Bytes of all tensors.
    """

    def __init__(self, plan: Plan, source: int = 0) -> None:
        if any(spec.name == _METADATA for spec in plan.specs):
            raise PlanError(f"no tensor in a safetensors file can be named {_METADATA}", names=[_METADATA])
        self.plan, self.source = plan, source
        self.nbytes = plan.nbytes
        filled = list(_filled(plan))
        part = f"{source}-" if source else ""
        self.files = tuple(
            WeightFile(
                f"model-{part}{number:05}-of-{len(filled):05}.safetensors",
                tuple(sorted(tensors, key=lambda index: -plan.specs[index].dtype.itemsize)),
                sum(plan.specs[index].nbytes for index in tensors),
            )
            for number, tensors in enumerate(filled, start=1)
        )
        self._places: dict[int, tuple[int, int]] = {}
        for number, file in enumerate(self.files):
            start = 0
            for index in file.tensors:
                self._places[index] = number, start
                start += plan.specs[index].nbytes
        self._runs: dict[int, tuple[Run, ...]] = {}
        self._headers: dict[int, str] = {}

    def header(self, number: int, metadata: Mapping[str, str]) -> bytes:
        """All that comes before the tensors in a file."""
        text = json.dumps({_METADATA: {"format": "pt", **metadata}}, separators=(",", ":"))[:-1] + self._entries(number)
        text += " " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text.encode("ascii")

    def _entries(self, number: int) -> str:
        """What a file's header says of its tensors: the same in every update."""
        if (text := self._headers.get(number)) is None:
            entries: dict[str, object] = {}
            start = 0
            for index in self.files[number].tensors:
                spec = self.plan.specs[index]
                stop = start + spec.nbytes
                known = _DTYPES.get(spec.dtype)
                entries[spec.name] = {
                    "dtype": known or "U8",
                    "shape": list(spec.shape) if known else [spec.nbytes],
                    "data_offsets": [start, stop],
                }
                start = stop
            text = self._headers[number] = "," + json.dumps(entries, separators=(",", ":"))[1:]
        return text

    def runs(self, bucket: Bucket) -> tuple[Run, ...]:
        """Where the bytes of a bucket lie; padding lies nowhere."""
        if (found := self._runs.get(bucket.index)) is None:
            found = self._runs[bucket.index] = tuple(self._runs_of(bucket))
        return found

    def _runs_of(self, bucket: Bucket) -> Iterator[Run]:
        parts = [(*self._places[index], *span) for index, span in zip(bucket.whole, bucket.spans, strict=True)]
        for piece in bucket.pieces:
            file, start = self._places[piece.tensor]
            parts.append((file, start + piece.start, piece.offset, piece.offset + piece.stop - piece.start))
        file, first, end = -1, 0, 0
        spans: list[tuple[int, int]] = []
        for number, at, start, stop in sorted(part for part in parts if part[2] < part[3]):
            if (number, at) != (file, end) or len(spans) == _PIECES:
                if spans:
                    yield Run(file, first, tuple(spans))
                file, first, spans = number, at, []
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
            end = at + stop - start
        if spans:
            yield Run(file, first, tuple(spans))

    def describe(self) -> Mapping[str, object]:
        """What the index tells of it: which file each tensor is in, and what files do not tell."""
        specs = self.plan.specs
        return {
            "layout": self.plan.layout_digest,
            "weight_map": {spec.name: self.files[self._places[index][0]].name for index, spec in enumerate(specs)},
            "aliases": {spec.name: list(spec.aliases) for spec in specs if spec.aliases},
            "raw": {
                spec.name: [str(spec.dtype).removeprefix("torch."), list(spec.shape)]
                for spec in specs
                if spec.dtype not in _DTYPES
            },
        }


class FileLayouts:
    """The layouts that were needed last: the next update mostly needs the same."""

    def __init__(self) -> None:
        self._layouts: dict[int, FileLayout] = {}

    def of(self, plan: Plan, source: int) -> FileLayout:
        """A source's, as in :class:`FileLayout`."""
        layout = self._layouts.get(source)
        if layout is None or layout.plan is not plan:
            layout = self._layouts[source] = FileLayout(plan, source)
        return layout


def _filled(plan: Plan) -> Iterator[list[int]]:
    """The tensors of each file."""
    tensors: list[int] = []
    size = 0
    for index, spec in enumerate(plan.specs):
        if tensors and size + spec.nbytes > FILE_SIZE:
            yield tensors
            tensors, size = [], 0
        tensors.append(index)
        size += spec.nbytes
    if tensors:
        yield tensors


def sliced(run: Run) -> Iterator[Run]:
    """A run in parts of some size each, so that there is a moment between them."""
    spans: list[tuple[int, int]] = []
    at, size = run.start, 0
    for start, stop in run.spans:
        while start < stop:
            end = min(stop, start + _SLICE - size)
            spans.append((start, end))
            size += end - start
            start = end
            if size == _SLICE:
                yield Run(run.file, at, tuple(spans))
                at, size, spans = at + size, 0, []
    if spans:
        yield Run(run.file, at, tuple(spans))


def write_run(fd: int, at: int, run: Run, bucket: memoryview) -> None:
    """Write a run's bytes. Blocks.

    Args:
        fd: The file's descriptor.
        at: Where its tensors begin.
        run: The run.
        bucket: The bucket.

    Raises:
        OSError: They could not be written.
    """
    views = [bucket[start:stop] for start, stop in run.spans]
    position = at + run.start
    while views:
        done = os.pwritev(fd, views, position)
        position += done
        views = _after(views, done)


def read_run(fd: int, at: int, run: Run, bucket: memoryview) -> None:
    """Read a run's bytes into their places in a bucket. Blocks.

    Args:
        fd: The file's descriptor.
        at: Where its tensors begin.
        run: The run.
        bucket: The bucket.

    Raises:
        EOFError: The file has ended.
        OSError: They could not be read.
    """
    views = [bucket[start:stop] for start, stop in run.spans]
    position = at + run.start
    while views:
        done = os.preadv(fd, views, position)
        if done == 0:
            raise EOFError("the file has ended")
        position += done
        views = _after(views, done)


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers of which so many bytes were done."""
    for number, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[number + 1 :]]
        done -= view.nbytes
    return []


def open_tensors(path: Path, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Tensors of a file, mapped: their bytes are read as they are used.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no safetensors file, or lacks one of them.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(str(error)) from error
