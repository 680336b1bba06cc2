"""Which of a module's tensors each tensor of a layout goes to, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from asyncsync.buckets import Plan, list_names
from asyncsync.errors import PlanError
from asyncsync.messages import Layout
from asyncsync.weights import module_tensors, reason_against

_Seen: TypeAlias = tuple[Tensor, torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True, slots=True)
class Binding:
    """A layout accepted by a module.

    Attributes:
        plan: The plan, computed here from the layout.
        targets: For every tensor of the plan, the module's distinct tensors that take its bytes.
        held: All the module's tensors, as they were then: the tensor, its dtype, shape and device.
        shared: Ids of targets whose memory other tensors of the module see too, but are no targets of the same bytes:
            these must be written where they lie.
        partial: Whether the layout was accepted as a partial one.
    """

    plan: Plan
    targets: tuple[tuple[Tensor, ...], ...]
    held: Mapping[str, _Seen]
    shared: frozenset[int]
    partial: bool

    def fits(self, module: nn.Module) -> bool:
        """Whether the module still holds these very tensors, unchanged in kind.

        One that was replaced would get nothing. One that was converted or moved in place (``module.half()`` keeps the
        parameter and gives it other memory) would get bytes that mean something else.
        """
        now = module_tensors(module)
        return now.keys() == self.held.keys() and all(
            now[name] is tensor and (tensor.dtype, tensor.shape, tensor.device) == (dtype, shape, device)
            for name, (tensor, dtype, shape, device) in self.held.items()
        )


def bind(module: nn.Module, layout: Layout) -> Binding:
    """Compare a layout with a module (R10).

    Raises:
        PlanError: The two ends cut buckets differently; or names are unknown or missing (missing ones are fine if the
            layout is partial); or shapes or dtypes differ; or two tensors would go to memory that the module ties.
    """
    plan = layout.plan()
    if plan.digest != layout.digest:
        raise PlanError(
            "trainer and engine plan the same tensors differently: install the same version of asyncsync at both"
        )
    held = module_tensors(module)
    problems: list[str] = []
    names: set[str] = set()
    for name, tensor in held.items():
        if (reason := reason_against(tensor)) is not None:
            raise PlanError(f"the engine cannot take {name}: {reason}", names=(name,))
        if tensor.is_conj() or tensor.is_neg():
            raise PlanError(f"the engine cannot take {name}: it is a lazy view of other values", names=(name,))

    def refuse(what: str, which: set[str], details: Mapping[str, str] | None = None) -> None:
        if which:
            problems.append(f"{what}: {list_names({details[name] for name in which} if details else which)}")
            names.update(which)

    sent = {name for spec in plan.specs for name in spec.names}
    memory = {_memory(held[name]) for name in sent & held.keys()}
    refuse("the engine does not know", sent - held.keys())
    if not layout.partial:
        refuse(
            "the trainer does not send (pass partial=True if that is meant)",
            {name for name in held.keys() - sent if _memory(held[name]) not in memory},
        )
    differences = _differences(plan, held)
    refuse("differ in shape or dtype", set(differences), differences)
    refuse("tied in the engine, but sent as tensors of their own", _torn_ties(plan, held))
    if problems:
        raise PlanError(f"the weights do not fit the engine: {'; '.join(problems)}", names=sorted(names))

    for spec in plan.specs:
        for name in spec.names:
            _give_own_elements(held[name])
    everything = list({id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values())
    by_memory: dict[object, list[Tensor]] = {}
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in everything:
        by_memory.setdefault(_memory(tensor), []).append(tensor)
        by_storage.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), []).append(tensor)
    targets: list[tuple[Tensor, ...]] = []
    shared: set[int] = set()
    for spec in plan.specs:
        group = {id(tensor): tensor for name in spec.names for tensor in by_memory[_memory(held[name])]}
        targets.append(tuple(group.values()))
        for tensor in group.values():
            neighbours = by_storage[tensor.untyped_storage().data_ptr() or id(tensor)]
            if any(id(neighbour) not in group for neighbour in neighbours):
                shared.add(id(tensor))
    seen = {name: (tensor, tensor.dtype, tensor.shape, tensor.device) for name, tensor in held.items()}
    return Binding(plan, tuple(targets), seen, frozenset(shared), layout.partial)


def _differences(plan: Plan, held: Mapping[str, Tensor]) -> dict[str, str]:
    messages: dict[str, str] = {}
    for spec in plan.specs:
        for name in spec.names:
            tensor = held.get(name)
            if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                sent, own = (str(dtype).removeprefix("torch.") for dtype in (spec.dtype, tensor.dtype))
                messages[name] = f"{name} (sent {sent} {list(spec.shape)}, held {own} {list(tensor.shape)})"
    return messages


def _torn_ties(plan: Plan, held: Mapping[str, Tensor]) -> set[str]:
    """Names whose memory in the engine two different tensors would be written to."""
    owners: dict[object, tuple[int, str]] = {}
    torn: set[str] = set()
    for index, spec in enumerate(plan.specs):
        for name in spec.names:
            if name in held and held[name].numel():
                owner, first = owners.setdefault(_memory(held[name]), (index, name))
                if owner != index:
                    torn |= {first, name}
    return torn


def _memory(tensor: Tensor) -> object:
    return (tensor.device, tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride())


def _give_own_elements(tensor: Tensor) -> None:
    """Give an expanded tensor memory for each of its elements: each may be sent a value of its own."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor.data = tensor.detach().contiguous()
