"""What a trainer rank holds: reading a module, a state dict or an iterable into specs and tensors.

Everything that cannot be sent is refused here, by name, before anything is planned, connected or paused.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from asyncsync.buckets import TensorSpec, list_names
from asyncsync.devices import home_of
from asyncsync.errors import PlanError, TransferError
from asyncsync.masters import MasterWeights, NamedTensors, Pair
from asyncsync.messages import NameMap
from asyncsync.packing import is_dense
from asyncsync.shards import Block, Holding
from asyncsync.transports.dtensor import Boxes, is_dtensor, local_tensor


@runtime_checkable
class GatheredWeights(Protocol):
    """Weights that lie on several trainer ranks in a way that only the trainer knows (Megatron's, say).

    Every rank of the trainer gives an object of this kind as its weights.

    Example:
        >>> class Sharded:
        ...     def describe(self):
        ...         return [("up.weight", torch.bfloat16, (4096, 1024))]
        ...
        ...     def gather(self, name):
        ...         parts = all_gather(self.shards[name], group=self.group)
        ...         return torch.cat(parts) if self.rank == 0 else None
    """

    def describe(self) -> Iterable[tuple[str, torch.dtype, Sequence[int]]]:
        """Name, dtype and full shape of every tensor, in the same order on every rank. Not collective."""
        ...

    def gather(self, name: str) -> Tensor | None:
        """Collective. Put one tensor together: the first rank needs it whole, what the others return is ignored.

        Called on a thread of the library's, for one tensor after another, in the same order on every rank. Training
        stands still meanwhile, since the weights must not change during an update; use a process group of its own
        nevertheless if anything else may use the training's. If it fails on one rank, the others wait in theirs for the
        group's own timeout, and no update can begin before: give it a short one, and a new group afterwards.
        """
        ...


Weights: TypeAlias = NamedTensors | GatheredWeights | MasterWeights | Callable[[], NamedTensors]
"""What can be sent: a module, a state dict, pairs of name and tensor, a function that returns one of these, what only
the trainer's ranks together can put together, or what is rebuilt from master weights."""

_Found: TypeAlias = tuple[str, torch.dtype, torch.Size, object, Block | None]
"""A tensor as one reading found it: name, dtype, shape, what tells its memory, and which part of it lies here."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tensors and what they are; the tensors are the live ones, unless they are copies that were made of them.

    Attributes:
        specs: One per distinct tensor; tied names are aliases of one spec.
        tensors: The tensors, in the same order, detached; of a sharded one, what lies on this rank.
        holding: Which part of each tensor that is; None if every tensor is whole.
        gather: Collective. Gives a tensor whole, by its index, where no tensor lies here; on some ranks only None.
        home: Where the weights are, if the tensors are copies of them that lie elsewhere.
        dense: What :func:`~asyncsync.packing.is_dense` says of each tensor, if that is known.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[Tensor, ...]
    holding: Holding | None = None
    gather: Callable[[int], Tensor | None] | None = None
    home: torch.device | None = None
    dense: tuple[bool, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the weights are, whether or not their memory is there now."""
        return home_of(self.tensors) if self.home is None else self.home


class WeightSource:
    """Reads weights anew for every update.

    Args:
        weights: A module (its parameters and persistent buffers), a state dict, pairs of name and tensor, a function
            returning one of these, :class:`GatheredWeights` or :class:`MasterWeights`. A list of pairs is read again at
            each update; a one-shot iterator is read once, here, and the tensors it gave are kept. A function is called
            at each update.

    Raises:
        TypeError: ``weights`` is none of these.
    """

    def __init__(self, weights: Weights) -> None:
        self._last: _Reading | None = None
        self._last_gathered: _GatheredReading | None = None
        if isinstance(weights, nn.Module | Mapping | GatheredWeights | MasterWeights) or callable(weights):
            self._weights: Weights = weights
        elif isinstance(weights, Iterable):
            self._weights = list(weights) if isinstance(weights, Iterator) else weights
        else:
            raise TypeError(
                "weights must be a module, a state dict, an iterable of (name, tensor), a function that returns one of "
                f"these, GatheredWeights or MasterWeights, not {type(weights).__name__}"
            )

    def read(self, *, name_map: NameMap | None = None, dtype: torch.dtype | None = None) -> Snapshot:
        """Read names and tensors.

        Args:
            name_map: Applied to every name.
            dtype: Floating-point tensors are sent in this dtype; the others as they are.

        Raises:
            PlanError: A name occurs twice (after ``name_map``), or a tensor cannot be sent: it is on the meta device,
                sparse, quantized, nested, a DTensor that is still to be summed, or no tensor at all.
        """
        if isinstance(self._weights, GatheredWeights) and not isinstance(self._weights, nn.Module):
            return self._read_gathered(self._weights, name_map, dtype)
        last = self._last if self._last is not None and self._last.dtype == dtype else None
        found: Iterable[tuple[Any, ...]]
        if isinstance(self._weights, MasterWeights):
            found = self._weights.pair(named_tensors(self._weights.weights), _memory_of)
        else:
            found = named_tensors(self._weights)
        if name_map is not None:
            found = ((name, *rest) for held, *rest in found if (name := _map(name_map, held)) is not None)
        found = list(found)
        with torch.no_grad():
            tensors = None if last is None else last.look_again(found)
            if last is None or tensors is None:
                pairs = list(itertools.starmap(Pair, found))
                tensors = None if last is None else last.reread(pairs)
                if last is None or tensors is None:
                    last, tensors = _read_anew(pairs, dtype)
        self._last = last
        return Snapshot(last.specs, tensors, last.holding, dense=last.dense)

    def _read_gathered(self, weights: GatheredWeights, name_map: NameMap | None, dtype: torch.dtype | None) -> Snapshot:
        described = [(name, held, tuple(shape)) for name, held, shape in weights.describe()]
        last = self._last_gathered
        if last is None or (last.described, last.name_map, last.dtype) != (described, name_map, dtype):
            last = self._last_gathered = _GatheredReading(described, name_map, dtype)
        return Snapshot(last.specs, (), gather=partial(last.gather, weights))


class _GatheredReading:
    """What weights that must be gathered said of themselves."""

    def __init__(
        self,
        described: list[tuple[str, torch.dtype, tuple[int, ...]]],
        name_map: NameMap | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.described, self.name_map, self.dtype = described, name_map, dtype
        self._sent: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        specs = []
        for name, held, shape in described:
            if (mapped := name if name_map is None else _map(name_map, name)) is not None:
                self._sent.append((name, held, shape))
                specs.append(TensorSpec(mapped, dtype if dtype and held.is_floating_point else held, shape))
        _refuse_duplicates([spec.name for spec in specs])
        self.specs = tuple(specs)

    def gather(self, weights: GatheredWeights, index: int) -> Tensor | None:
        """Collective. See :attr:`Snapshot.gather`.

        Raises:
            TransferError: It failed, or the tensor is not what was described.
        """
        name, dtype, shape = self._sent[index]
        try:
            tensor = weights.gather(name)
        except Exception as error:
            raise TransferError(f"gathering {name} failed: {type(error).__name__}: {error}") from error
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TransferError(f"gathering {name} gave no tensor but {type(tensor).__name__}")
        if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise TransferError(
                f"gathering {name} gave {tensor.dtype} {list(tensor.shape)}, described as {dtype} {list(shape)}"
            )
        return tensor


class _Reading:
    """What one reading found, kept since the next mostly finds the same.

    Args:
        pairs: Names and tensors.
        held: What lies here of each.
        dtype: What floating-point tensors are sent in.

    Raises:
        PlanError: A name occurs twice.
    """

    def __init__(self, pairs: Sequence[Pair], held: Sequence[Held], dtype: torch.dtype | None) -> None:
        layout = [_find(pair, one) for pair, one in zip(pairs, held, strict=True)]
        _refuse_duplicates([name for name, *_ in layout])
        firsts: dict[object, int] = {}
        aliases: dict[int, list[str]] = {}
        for index, (name, _, _, identity, _) in enumerate(layout):
            first = index if identity is None else firsts.setdefault(identity, index)
            if first != index:
                aliases.setdefault(first, []).append(name)
        tied = set(itertools.chain.from_iterable(aliases.values()))
        self.layout = layout
        self.dtype = dtype
        self._is_own = [name not in tied for name, *_ in layout]
        self._names = tuple(pair.name for pair in pairs)
        is_plain = pairs and all(pair.master is None for pair in pairs)
        self._looks = _looks([pair.weight for pair in pairs]) if is_plain else None
        self.specs = tuple(
            TensorSpec(
                name,
                dtype if dtype is not None and held.is_floating_point else held,
                tuple(shape),
                tuple(aliases.get(index, ())),
            )
            for index, (name, held, shape, _, _) in enumerate(layout)
            if self._is_own[index]
        )
        own_tensors = self.own(one.tensor for one in held)
        self.dense = tuple(is_dense(spec, own) for spec, own in zip(self.specs, own_tensors, strict=True))
        holding = tuple(block for (*_, block), own in zip(layout, self._is_own, strict=True) if own)
        self.holding = None if all(block is None for block in holding) else holding

    def look_again(self, found: Sequence[tuple[Any, ...]]) -> tuple[Tensor, ...] | None:
        """The tensors, detached, if they are of torch's own classes, and certainly where and what they were; else None.

        Args:
            found: Names and tensors.
        """
        if self._looks is None or len(found) != len(self.layout) or len(found[0]) > 2:
            return None
        names, tensors = zip(*found, strict=True)
        if names != self._names or _looks(tensors) != self._looks:
            return None
        return self.own(tensors)

    def reread(self, pairs: Sequence[Pair]) -> tuple[Tensor, ...] | None:
        """The tensors, detached, if they are where and what they were; else None."""
        if len(pairs) != len(self.layout):
            return None
        boxes = Boxes()
        tensors = []
        for pair, found in zip(pairs, self.layout, strict=True):
            held = _hold(pair, boxes)
            if reason_against(held.tensor) is not None or _find(pair, held) != found:
                return None
            tensors.append(held.tensor)
        return self.own(tensors)

    def own(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Of all names' tensors those that are sent, detached."""
        return tuple(map(Tensor.detach, itertools.compress(tensors, self._is_own)))


def _looks(tensors: Sequence[Tensor]) -> tuple[list[object], ...] | None:
    """What tells tensors of torch's own classes from others, and where they lie; None if some are of another class.

    In a few calls, not some for each tensor: there may be thousands.
    """
    if not set(map(type, tensors)) <= _PLAIN:
        return None
    try:
        return tuple(list(map(look, tensors)) for look in _LOOKS)
    except RuntimeError:  # a kind that has no such thing
        return None


_PLAIN = {Tensor, nn.Parameter}
_LOOKS: tuple[Callable[[Tensor], object], ...] = (
    Tensor.data_ptr,
    *map(operator.attrgetter, ("dtype", "shape", "device")),
    Tensor.stride,
    Tensor.is_conj,
    Tensor.is_neg,
)


def _read_anew(pairs: Sequence[Pair], dtype: torch.dtype | None) -> tuple[_Reading, tuple[Tensor, ...]]:
    boxes = Boxes()
    held = [_hold(pair, boxes) for pair in pairs]
    _refuse_unsendable((pair.name, one.tensor) for pair, one in zip(pairs, held, strict=True))
    if odd := [pair.name for pair in pairs if not isinstance(pair.name, str)]:
        raise PlanError(f"names must be strings, not {', '.join(map(repr, odd[:8]))}")
    reading = _Reading(pairs, held, dtype)
    return reading, reading.own(one.tensor for one in held)


def named_tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of any kind of weights, tied names included, in the order of the weights."""
    if isinstance(weights, nn.Module):
        yield from module_tensors(weights).items()
    elif isinstance(weights, Mapping):
        yield from weights.items()
    elif callable(weights):
        yield from named_tensors(weights())
    elif not isinstance(weights, Iterable):
        raise PlanError(f"the function that gives the weights returned {type(weights).__name__}, which is none")
    else:
        for pair in weights:
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
                raise PlanError(f"weights must come as pairs of name and tensor, not {type(pair).__name__}")
            yield pair[0], pair[1]


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers, the objects themselves, under every name.

    What else a state dict may hold (``_extra_state``) is not a weight and is left out.
    """
    # One walk, and no generators for each module: there may be a hundred thousand.
    own = {
        id(tensor)
        for each in module.modules()
        for tensor in (*each._parameters.values(), *each._buffers.values())
        if tensor is not None
    }
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if id(tensor) in own}


def _map(name_map: NameMap, name: str) -> str | None:
    try:
        return name_map(name)
    except Exception as error:
        raise PlanError(f"name_map failed for {name!r}: {type(error).__name__}: {error}", names=(name,)) from error


class Held(NamedTuple):
    """A tensor as it lies on this rank.

    Attributes:
        tensor: What lies here.
        whole: The shape of the whole, of a DTensor.
        block: Which part of the whole lies here; None if it is all.
        origin: What tells a DTensor with nothing here from another.
    """

    tensor: Tensor
    whole: torch.Size | None = None
    block: Block | None = None
    origin: int | None = None

    @property
    def shape(self) -> torch.Size:
        """The whole tensor's shape."""
        return self.tensor.shape if self.whole is None else self.whole


def hold(name: str, tensor: Tensor, boxes: Boxes) -> Held:
    """What lies here of a tensor.

    Args:
        name: What an error calls it.
        tensor: Any tensor.
        boxes: Made for this reading.

    Raises:
        PlanError: It is a DTensor of which no box lies here, or that is still to be summed.
    """
    if not is_dtensor(tensor):
        return Held(tensor)
    local, block = boxes.local(name, tensor)
    return Held(local, tensor.shape, block, id(tensor))


def _hold(pair: Pair, boxes: Boxes) -> Held:
    return hold(pair.name, pair.weight if pair.master is None else pair.master, boxes)


def _find(pair: Pair, held: Held) -> _Found:
    identity = _identity(held)
    if pair.master is not None and identity is not None:
        identity = identity, pair.weight.dtype  # a master that two weights share may be sent in two dtypes
    return pair.name, pair.weight.dtype, held.shape, identity, held.block


def _memory_of(weight: object) -> object:
    """Equal for weights that are tied: the same tensor, or the same memory seen the same way."""
    if not isinstance(weight, Tensor) or weight.is_meta:
        return id(weight)
    return _identity(Held(local_tensor(weight))) or id(weight)


def _identity(held: Held) -> object:
    """Equal for two names of the same memory seen the same way; None without memory: there is nothing to share."""
    tensor = held.tensor
    if tensor.numel() == 0:
        return held.origin
    where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    return (*where, tensor.is_conj(), tensor.is_neg())  # lazily: the same memory, read as other values


def _refuse_duplicates(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
        raise PlanError(f"duplicate names in the weights: {list_names(twice)}", names=sorted(twice))


def _refuse_unsendable(pairs: Iterable[tuple[str, Tensor]]) -> None:
    refused: dict[str, list[str]] = {}
    for name, tensor in pairs:
        if (reason := reason_against(tensor)) is not None:
            refused.setdefault(reason, []).append(name)
    if refused:
        reasons = "; ".join(f"{list_names(names)}: {reason}" for reason, names in refused.items())
        names = sorted(name for group in refused.values() for name in group)
        raise PlanError(f"these tensors cannot be sent: {reasons}", names=names)


def reason_against(tensor: object) -> str | None:
    """Why a tensor can neither be sent nor take bytes, or None."""
    if isinstance(tensor, Tensor) and is_lazy(tensor):
        return "not initialized yet: run the module once first"
    if type(tensor) is nn.Parameter or type(tensor) is Tensor:
        pass
    elif not isinstance(tensor, Tensor):
        return f"not a tensor but {type(tensor).__name__}"
    elif _is_wrapper(tensor):
        return f"a {type(tensor).__name__}: give its local or full tensor"
    if tensor.is_meta:
        return "on the meta device, it has no bytes"
    if tensor.layout is not torch.strided:
        return f"sparse ({str(tensor.layout).removeprefix('torch.')}), not strided"
    if tensor.is_quantized:
        return "a quantized tensor: send its integers and scales"
    if tensor.is_nested:
        return "a nested tensor"
    return None


def _is_wrapper(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))
