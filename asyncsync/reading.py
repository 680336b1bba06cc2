"""Reading a version of a folder: for those whom no synchronizer knows, at another site say."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncsync.buckets import Plan, TensorSpec, join_plans, plan_buckets
from asyncsync.errors import NotReadyError, TransferError
from asyncsync.packing import digest_weights
from asyncsync.transports.folder import FORMAT, LATEST, PUBLISHED
from asyncsync.weight_files import INDEX, open_tensors

TRIES = 3
"""How often the newest version is looked for anew, because it was taken away as it was opened."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version that lies in a folder.

    Attributes:
        path: Its own folder, that any reader of safetensors files can load.
        version: Its number.
        digest: Digest of its weights (32 hex digits), as :class:`asyncsync.WeightUpdate` has it.
        tensors: Its tensors under every name, in the trainer's order. They are mapped: their bytes are read from the
            files as they are used, also once the version was taken away. What is written to one is seen here alone.
    """

    path: Path
    version: int
    digest: str
    tensors: Mapping[str, Tensor] = field(repr=False)


def read_weights(folder: str | os.PathLike[str], version: int | None = None, *, check: bool = True) -> PublishedWeights:
    """Read a version that a synchronizer has published in its ``folder``. Blocks: on an event loop, run it on a thread.

    Example:
        >>> weights = asyncsync.read_weights("/mnt/policy")
        >>> module.load_state_dict(weights.tensors)

    At another site a synchronizer can bring them on, with a function for its trainer:
    ``WeightSynchronizer(lambda: asyncsync.read_weights("/mnt/policy").tensors, engines)``.

    Args:
        folder: The folder.
        version: Which; the newest if None. The two newest are kept.
        check: Whether to read all bytes now, and compare their digest with that which engines have confirmed.

    Raises:
        NotReadyError: There is none there (yet), or not this one (any more).
        TransferError: The files are not those that were published, or not all of them.
    """
    folder = Path(folder)
    for tries_left in reversed(range(TRIES)):
        path = _find(folder, version)
        try:
            return _read(path, check)
        except FileNotFoundError as error:
            # A reader that came late: newer ones have been published since it looked.
            if path.exists() or not tries_left:
                raise TransferError(f"{path} is not whole: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TransferError(f"{path} does not hold what was published: {error!r}") from error
    raise AssertionError("not reached")


def _find(folder: Path, version: int | None) -> Path:
    try:
        latest = os.readlink(folder / LATEST)
        if not PUBLISHED.fullmatch(latest):
            raise TransferError(f"{folder / LATEST} leads to {latest}, which is no version")
        found = [path for path in folder.iterdir() if PUBLISHED.fullmatch(path.name)]
    except OSError as error:
        raise NotReadyError(f"nothing was published in {folder} yet: {error}") from error
    if version is None:
        return folder / latest
    # The newest of a number counts: a trainer that begins anew counts anew.
    alike = [path for path in found if int(path.name[1:].partition("-")[0]) == version]
    if not alike:
        there = ", ".join(sorted(path.name for path in found))
        raise NotReadyError(f"version {version} is not in {folder} (any more): there are {there or 'none'}")
    return next((path for path in alike if path.name == latest), max(alike, key=lambda path: path.stat().st_mtime_ns))


def _read(path: Path, check: bool) -> PublishedWeights:
    index = json.loads((path / INDEX).read_text())
    own = index["metadata"]["asyncsync"]
    if own["format"] != FORMAT:
        raise ValueError(f"its format is {own['format']}, and this version of asyncsync reads {FORMAT}")
    stored = _mapped(path, index["weight_map"])
    names = iter(index["weight_map"])
    plans: list[Plan] = []
    found: list[Tensor] = []
    tensors: dict[str, Tensor] = {}
    for part in own["parts"]:
        specs = []
        for name in itertools.islice(names, part["tensors"]):
            tensor = _typed(stored[name], part["raw"].get(name))
            spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape), tuple(part["aliases"].get(name, ())))
            specs.append(spec)
            found.append(tensor)
            tensors |= dict.fromkeys(spec.names, tensor)
        plans.append(plan_buckets(specs))
    if check and (digest := digest_weights(join_plans(plans), found)) != own["digest"]:
        raise ValueError(f"its digest is {digest}, and {own['digest']} was published")
    return PublishedWeights(path, int(own["version"]), str(own["digest"]), tensors)


def _mapped(path: Path, weight_map: Mapping[str, str]) -> Mapping[str, Tensor]:
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise ValueError(f"its index leads out of it, to {file}")
        files.setdefault(file, []).append(name)
    return dict(pair for file, names in files.items() for pair in open_tensors(path / file, names).items())


def _typed(tensor: Tensor, raw: Any) -> Tensor:
    """A tensor as what it is, if it is stored as bytes."""
    if raw is None:
        return tensor
    name, shape = raw
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return tensor.view(dtype).view(shape)
