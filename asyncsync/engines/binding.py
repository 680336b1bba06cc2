"""Which of a module's tensors each tensor of a layout goes to, and what does not fit.

A module may hold DTensors: of each, a block lies here, or all of it. A layout always speaks of whole tensors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from asyncsync.buckets import Plan, list_names
from asyncsync.errors import EngineError, PlanError
from asyncsync.memory_saver.driver import absent
from asyncsync.messages import Layout
from asyncsync.shards import Block, Shard
from asyncsync.transports.dtensor import Boxes, is_dtensor, local_tensor
from asyncsync.weights import Held, hold, module_tensors, reason_against


class Contents:
    """What a module holds, and under which names: all its parts, parameters and buffers, as they are now.

    Compared column by column, in a few calls: there may be thousands, and the trainer is reading its own meanwhile.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = module_tensors(module)
        self._locals = [
            (tensor, local) for tensor in self.tensors.values() if (local := local_tensor(tensor)) is not tensor
        ]
        self._kinds = _kinds(self.tensors.values())
        self._parts = list(module.modules())
        holdings = _holdings(self._parts)
        self._types = list(map(type, holdings))
        # Scripted modules have dictionaries of a kind of their own, which are not even iterable.
        self._is_plain = all(issubclass(each, dict) for each in self._types)
        self._sizes = list(map(len, holdings)) if self._is_plain else []
        holdings = list(itertools.compress(holdings, self._sizes))
        self._names = list(itertools.chain.from_iterable(holdings))
        self._held = list(itertools.chain.from_iterable(map(_values, holdings)))

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether the module still holds these very tensors, unchanged in kind."""
        if module is not self._parts[0] or not self._are_untouched():
            now = module_tensors(module)  # ten times slower, and knows what is no weight
            if now.keys() != self.tensors.keys() or any(now[name] is not one for name, one in self.tensors.items()):
                return False
        return self._kinds == _kinds(self.tensors.values()) and all(
            local_tensor(tensor) is local for tensor, local in self._locals
        )

    def _are_untouched(self) -> bool:
        holdings = _holdings(self._parts)
        if not self._is_plain or list(map(type, holdings)) != self._types or list(map(len, holdings)) != self._sizes:
            return False
        holdings = list(itertools.compress(holdings, self._sizes))  # most are empty
        return list(itertools.chain.from_iterable(holdings)) == self._names and all(
            map(operator.is_, itertools.chain.from_iterable(map(_values, holdings)), self._held)
        )


_values = cast("Callable[[Mapping[str, object]], Iterable[object]]", dict.values)  # faster than each one's own
_dictionaries = operator.attrgetter("_modules", "_parameters", "_buffers")


def _holdings(parts: Iterable[nn.Module]) -> list[Mapping[str, object]]:
    """The dictionaries in which parts of a module hold what is theirs."""
    return list(itertools.chain.from_iterable(map(_dictionaries, parts)))


def _kinds(tensors: Collection[Tensor]) -> tuple[list[object], ...]:
    """Dtypes, shapes and devices."""
    return tuple(list(map(operator.attrgetter(what), tensors)) for what in ("dtype", "shape", "device"))


@dataclass(frozen=True, slots=True)
class Binding:
    """A layout accepted by a module.

    Attributes:
        plan: The plan, computed here from the layout.
        targets: For every tensor of the plan, the module's distinct tensors that take all of its bytes.
        shards: Those that take only a block of them, by the tensor's index in the plan.
        contents: What the module held then.
        shared: Ids of targets whose memory other tensors of the module see too, but are no targets of the same bytes:
            these must be written where they lie.
        partial: Whether the layout was accepted as a partial one.
    """

    plan: Plan
    targets: tuple[tuple[Tensor, ...], ...]
    shards: Mapping[int, tuple[Shard, ...]]
    contents: Contents
    shared: frozenset[int]
    partial: bool

    @property
    def tensors(self) -> list[Tensor]:
        """All that take bytes."""
        whole = [tensor for group in self.targets for tensor in group]
        return whole + [shard.tensor for group in self.shards.values() for shard in group]

    def check_memory(self, tensors: Sequence[Tensor]) -> None:
        """See whether there is memory behind tensors that bytes are to be written to.

        Raises:
            EngineError: Some of it was released.
        """
        if away := {id(tensors[index]) for index in absent(tensors)}:
            taking = [(index, tensor) for index, targets in enumerate(self.targets) for tensor in targets]
            taking += [(index, shard.tensor) for index, some in self.shards.items() for shard in some]
            names = {self.plan.specs[index].name for index, tensor in taking if id(tensor) in away}
            raise EngineError(
                f"the memory of these weights is released, so they cannot be written: {list_names(names)}"
            )

    def fits(self, module: nn.Module) -> bool:
        """Whether the module still holds these very tensors, unchanged in kind.

        One that was replaced would get nothing. One that was converted or moved in place (``module.half()`` keeps the
        parameter and gives it other memory) would get bytes that mean something else.
        """
        return self.contents.are_those_of(module)


def bind(module: nn.Module, layout: Layout) -> Binding:
    """Compare a layout with a module (R10).

    Raises:
        PlanError: The two ends cut buckets differently; or names are unknown or missing (missing ones are fine if the
            layout is partial); or shapes or dtypes differ; or two tensors would go to memory that the module ties.
    """
    plan = layout.agreed_plan()
    found = module_tensors(module)
    boxes = Boxes()
    held = {name: hold(name, tensor, boxes) for name, tensor in found.items()}
    problems: list[str] = []
    names: set[str] = set()
    for name, one in held.items():
        if (reason := reason_against(one.tensor)) is not None:
            raise PlanError(f"the engine cannot take {name}: {reason}", names=(name,))
        if one.tensor.is_conj() or one.tensor.is_neg():
            raise PlanError(f"the engine cannot take {name}: it is a lazy view of other values", names=(name,))

    def refuse(what: str, which: set[str], details: Mapping[str, str] | None = None) -> None:
        if which:
            problems.append(f"{what}: {list_names({details[name] for name in which} if details else which)}")
            names.update(which)

    sent = {name for spec in plan.specs for name in spec.names}
    memory = {_memory(held[name].tensor) for name in sent & held.keys()}
    refuse("the engine does not know", sent - held.keys())
    if not layout.partial:
        refuse(
            "the trainer does not send (pass partial=True if that is meant, name_map=… if only names differ)",
            {name for name in held.keys() - sent if _memory(held[name].tensor) not in memory},
        )
    differences = _differences(plan, held)
    refuse("differ in shape or dtype", set(differences), differences)
    refuse("tied in the engine, but sent as tensors of their own", _torn_ties(plan, held))
    if problems:
        raise PlanError(f"the weights do not fit the engine: {'; '.join(problems)}", names=sorted(names))

    for spec in plan.specs:
        for name in spec.names:
            _give_own_elements(held[name].tensor)
    everything = local_tensors(module)
    by_memory: dict[object, list[Tensor]] = {}
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in everything.values():
        by_memory.setdefault(_memory(tensor), []).append(tensor)
        by_storage.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), []).append(tensor)
    targets: list[tuple[Tensor, ...]] = []
    shards: dict[int, tuple[Shard, ...]] = {}
    shared: set[int] = set()
    for index, spec in enumerate(plan.specs):
        group = {
            id(tensor): (tensor, held[name].block)
            for name in spec.names
            for tensor in by_memory[_memory(held[name].tensor)]
        }
        targets.append(tuple(tensor for tensor, block in group.values() if block is None))
        if parts := tuple(Shard(tensor, block) for tensor, block in group.values() if block is not None):
            shards[index] = parts
        for tensor, _ in group.values():
            neighbours = by_storage[tensor.untyped_storage().data_ptr() or id(tensor)]
            if any(id(neighbour) not in group for neighbour in neighbours):
                shared.add(id(tensor))
    return Binding(plan, tuple(targets), shards, Contents(module), frozenset(shared), layout.partial)


def local_tensors(module: nn.Module) -> dict[int, Tensor]:
    """What lies here of a module's parameters and buffers, by id."""
    own = (local_tensor(tensor) for tensor in (*module.parameters(), *module.buffers()))
    return {id(tensor): tensor for tensor in own}


def module_shards(module: nn.Module) -> dict[str, tuple[tuple[int, ...], Block]]:
    """Of which tensors only a block lies here: the whole's shape, and the block. What cannot be taken is left out."""
    shards: dict[str, tuple[tuple[int, ...], Block]] = {}
    boxes = Boxes()
    for name, tensor in module_tensors(module).items():
        if is_dtensor(tensor):
            with suppress(PlanError):  # binding will say so
                if (block := hold(name, tensor, boxes).block) is not None:
                    shards[name] = (tuple(tensor.shape), block)
    return shards


def _differences(plan: Plan, held: Mapping[str, Held]) -> dict[str, str]:
    messages: dict[str, str] = {}
    for spec in plan.specs:
        for name in spec.names:
            one = held.get(name)
            if one is not None and (tuple(one.shape), one.tensor.dtype) != (spec.shape, spec.dtype):
                sent, own = (str(dtype).removeprefix("torch.") for dtype in (spec.dtype, one.tensor.dtype))
                messages[name] = f"{name} (sent {sent} {list(spec.shape)}, held {own} {list(one.shape)})"
    return messages


def _torn_ties(plan: Plan, held: Mapping[str, Held]) -> set[str]:
    """Names whose memory in the engine two different tensors would be written to."""
    owners: dict[object, tuple[int, str]] = {}
    torn: set[str] = set()
    for index, spec in enumerate(plan.specs):
        for name in spec.names:
            if name in held and held[name].tensor.numel():
                owner, first = owners.setdefault(_memory(held[name].tensor), (index, name))
                if owner != index:
                    torn |= {first, name}
    return torn


def _memory(tensor: Tensor) -> object:
    return (tensor.device, tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride())


def _give_own_elements(tensor: Tensor) -> None:
    """Give an expanded tensor memory for each of its elements: each may be sent a value of its own."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor.data = tensor.detach().contiguous()
