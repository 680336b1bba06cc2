"""What SGLang makes of a checkpoint's tensors: under which name it holds each, and which part of it on which rank.

Pure. SGLang's own answer says little: a name that it does not know is no error to it, and one rank of several speaks
for all. But it gives the names and checksums of all that each of its ranks holds. So names are compared before anything
is sent, and what was loaded is compared after.

The rules here are those of SGLang's linear layers and embeddings, as decoder-only models of the Llama and Qwen kind are
made of them: the projections of attention, and of a gated MLP, are fused along their rows; with tensor parallelism rows
are split (of a fused parameter: those of each tensor in it), but of what ends a block, columns. What no rule covers is
not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncsync.buckets import TensorSpec, list_names
from asyncsync.errors import PlanError
from asyncsync.messages import ChecksumPart
from asyncsync.shards import Block

ParameterNames = Callable[[str], str]
"""From the name of a tensor in the checkpoint to that of the engine's parameter that it goes into."""

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Of a module of the checkpoint: the engine's, and its place in that."""

_ROWS = {*_FUSED, "embed_tokens", "lm_head"}
_COLUMNS = {"o_proj", "down_proj"}
_REPEATED = {"k_proj", "v_proj"}
"""Held by several ranks alike, where there are fewer heads of them than ranks."""

_VOCABULARY = {"embed_tokens", "lm_head"}
_VOCABULARY_PADDING = 64  # rows; SGLang fills a vocabulary up to a multiple of it

_DRAFT = "draft."
"""What SGLang puts before the names of a draft model's parameters."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the tensors of a layout go.

    Attributes:
        names: For each tensor, the name to send it under.
        sources: For each of the engine's parameters, the indices of the tensors in it, in their order.
    """

    names: tuple[str, ...]
    sources: Mapping[str, tuple[int, ...]]


def match_names(
    specs: Sequence[TensorSpec],
    parameters: Collection[str],
    *,
    partial: bool,
    parameter_names: ParameterNames | None = None,
) -> Targets:
    """Find each tensor's place in the engine, and refuse what has none.

    Args:
        specs: What will be sent.
        parameters: The names of all that the engine holds.
        partial: Whether parameters that nothing is sent for are fine.
        parameter_names: The caller's own rule, in place of those here.

    Raises:
        PlanError: The engine does not know a name, or holds what nothing is sent for, or fuses a tensor with one that
            is not sent.
    """
    rule = parameter_names or (lambda name: parameter_of(name, parameters))
    known = set(parameters) | {name.removeprefix(_DRAFT) for name in parameters}
    names: list[str] = []
    found: dict[str, list[tuple[int, int]]] = {}
    strangers: set[str] = set()
    split: dict[str, list[str]] = {}
    for index, spec in enumerate(specs):
        places = {name: place for name in spec.names if (place := rule(name)) in known}
        names.append(next(iter(places), spec.name))
        if not places:
            strangers.add(spec.name)
        elif len(set(places.values())) > 1:
            split[spec.name] = sorted(places)
        for place in set(places.values()):
            found.setdefault(place, []).append((_order(names[index]), index))
    if strangers:
        raise PlanError(f"the engine holds no {list_names(strangers)}", names=sorted(strangers))
    if split:
        tied = "; ".join(list_names(each) for each in split.values())
        raise PlanError(f"one tensor at the trainer, and several parameters at the engine: {tied}", names=sorted(split))
    lacking = {
        name for place, parts in found.items() for name in _missing_parts(place, [names[index] for _, index in parts])
    }
    if lacking:
        raise PlanError(
            f"fused in the engine, and only a part of it is sent: nothing comes as {list_names(lacking)}",
            names=sorted(lacking),
        )
    absent = {name for name in parameters if not name.startswith(_DRAFT) and name not in found}
    if absent and not partial:
        raise PlanError(
            f"nothing is sent for what the engine holds: {list_names(absent)} (partial=True allows that)",
            names=sorted(absent),
        )
    return Targets(
        tuple(names), {place: tuple(index for _, index in sorted(parts)) for place, parts in sorted(found.items())}
    )


def _missing_parts(parameter: str, sent: Sequence[str]) -> set[str]:
    """What a fused parameter lacks, under the names that the tensors sent for it suggest.

    Refused even where not all parameters need be sent: of such a one no checksum could tell whether it came right.
    """
    kinds = {_taken_apart(name)[1] for name in sent}
    members = _members_of(parameter)
    if kinds.isdisjoint(members):
        return set()  # it is fused in the checkpoint, or of names that are not known here
    module, _, leaf = _taken_apart(sent[0])
    return {f"{module}{kind}.{leaf}" for kind in members if kind not in kinds}


def _members_of(parameter: str) -> list[str]:
    """The modules of the checkpoint that are fused into a parameter, in their order there."""
    fused = _taken_apart(parameter)[1]
    return [kind for kind, (name, _) in _FUSED.items() if name == fused]


def parameter_of(name: str, parameters: Collection[str]) -> str:
    """Under which name the engine holds a tensor of the checkpoint: its own, or that of what it is fused into."""
    module, kind, leaf = _taken_apart(name)
    if kind in _FUSED and name not in parameters:
        fused = f"{module}{_FUSED[kind][0]}.{leaf}"
        return fused if fused in parameters or _DRAFT + fused in parameters else name
    return name


def parts_of(
    parameter: str, specs: Sequence[TensorSpec], rank: int, ranks: int
) -> tuple[tuple[ChecksumPart, ...], ...]:
    """What one rank holds of the tensors in one parameter, one behind the other.

    Args:
        parameter: Its name.
        specs: The tensors, in order.
        rank: Which tensor parallel rank.
        ranks: How many there are.

    Returns:
        The ways in which it can be: several where it depends on how many heads the model has. Empty if no rule tells.
    """
    members = _members_of(parameter)
    if (members and [_kind(spec) for spec in specs] != members) or (not members and len(specs) > 1):
        return ()
    ways: dict[tuple[ChecksumPart, ...], None] = {}
    repeats = [times for times in range(1, ranks + 1) if ranks % times == 0]
    for times in repeats if any(_kind(spec) in _REPEATED for spec in specs) else repeats[:1]:
        parts = [_part(spec, rank, ranks, times if _kind(spec) in _REPEATED else 1) for spec in specs]
        told = tuple(part for part in parts if part is not None)
        if len(told) == len(parts):
            ways[told] = None
    return tuple(ways)


def _part(spec: TensorSpec, rank: int, ranks: int, repeated: int) -> ChecksumPart | None:
    kind, dimensions = _kind(spec), len(spec.shape)
    if kind in _VOCABULARY and spec.shape[0] % _VOCABULARY_PADDING:
        return None  # it has rows that were not sent
    if ranks == 1:
        return ChecksumPart(spec.name)
    if kind in _ROWS and dimensions:
        return _slice(spec, 0, rank // repeated, ranks // repeated)
    if kind in _COLUMNS and dimensions == 2:
        return _slice(spec, 1, rank, ranks)
    if kind in _COLUMNS or "norm" in kind:
        return ChecksumPart(spec.name)
    return None


def _slice(spec: TensorSpec, dimension: int, index: int, count: int) -> ChecksumPart | None:
    size, rest = divmod(spec.shape[dimension], count)
    if rest:
        return None
    start, shape = [0] * len(spec.shape), list(spec.shape)
    start[dimension], shape[dimension] = index * size, size
    return ChecksumPart(spec.name, Block(tuple(start), tuple(shape)))


def _taken_apart(name: str) -> tuple[str, str, str]:
    """``"layers.0.mlp."``, ``"up_proj"``, ``"weight"`` of ``"layers.0.mlp.up_proj.weight"``."""
    module, _, leaf = name.rpartition(".")
    outer, dot, kind = module.rpartition(".")
    return outer + dot, kind, leaf


def _kind(spec: TensorSpec) -> str:
    return _taken_apart(spec.name)[1]


def _order(name: str) -> int:
    return _FUSED.get(_taken_apart(name)[1], ("", 0))[1]


def differing(wanted: Iterable[str], sent: Mapping[str, str], held: Sequence[Mapping[str, str]]) -> list[str]:
    """The parameters whose checksum at the engine is none of those of what was sent.

    Args:
        wanted: The keys of all that was asked for (see :func:`key_of`).
        sent: The checksums of what was sent, by key.
        held: Those of each rank, by parameter.
    """
    matches: dict[tuple[int, str], bool] = {}
    for key in wanted:
        rank, parameter = place_of(key)
        same = rank < len(held) and sent.get(key) is not None and sent.get(key) == held[rank].get(parameter)
        matches[rank, parameter] = matches.get((rank, parameter), False) or same
    several = len(held) > 1
    return [f"{name} at rank {rank}" if several else name for (rank, name), same in matches.items() if not same]


def key_of(rank: int, way: int, parameter: str) -> str:
    """The key of a checksum: of one of the ways in which a rank can hold a parameter."""
    return f"{rank}/{way}/{parameter}"


def place_of(key: str) -> tuple[int, str]:
    """The rank and the parameter of a key."""
    rank, _, parameter = key.split("/", 2)
    return int(rank), parameter
