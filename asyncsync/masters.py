"""Weights that are rebuilt from master weights: what an offloaded trainer still has on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from asyncsync.buckets import list_names
from asyncsync.errors import PlanError

NamedTensors: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

Masters: TypeAlias = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]


class MasterWeights:
    """Weights of which master copies of a wider dtype are to be read, in place of themselves.

    A mixed precision trainer keeps, beside its bfloat16 weights, a float32 copy of each, in its optimizer's state, and
    often on the host. From these the weights are rebuilt as buckets are filled, so one bucket of extra memory is all
    that takes; the weights themselves are not read, and may be paused, or even on the meta device. Give it in place of
    the module or state dict.

    Example:
        >>> masters = {name: weight.detach().float().cpu() for name, weight in model.named_parameters()}
        >>> optimizer = torch.optim.AdamW(masters.values())  # steps on the host, with the gradients brought there
        >>> trainer = asyncsync.TrainerRank(asyncsync.MasterWeights(model, masters))

    Each tensor is sent in the dtype of the weight, or in the synchronizer's ``dtype``; the conversion is torch's own
    (round to nearest even), as in ``weight.copy_(master)``. A weight without a master is read itself.

    Args:
        weights: What is sent: a module, a state dict, pairs of name and tensor, or a function that gives one.
        masters: The master of a weight, by the weight's name (of tied ones, any); of the same shape, and sharded in its
            own way if it is a DTensor. Or a function that returns them, called at each update.

    Raises:
        TypeError: One of the two is none of these.
    """

    def __init__(self, weights: NamedTensors | Callable[[], NamedTensors], masters: Masters) -> None:
        if not (isinstance(weights, nn.Module | Mapping | Iterable) or callable(weights)):
            raise TypeError(f"weights must be a module, a state dict or pairs, not {type(weights).__name__}")
        if not (isinstance(masters, Mapping) or callable(masters)):
            raise TypeError(f"masters must be a dict of tensors, by name, not {type(masters).__name__}")
        # A one-shot iterator is read once, here.
        self.weights: NamedTensors | Callable[[], NamedTensors] = (
            list(weights) if isinstance(weights, Iterator) else weights
        )
        self._masters = masters

    def pair(self, weights: Iterable[tuple[str, Tensor]], memory_of: Callable[[Tensor], object]) -> Iterator[Pair]:
        """Weights, by name, with their masters.

        Args:
            weights: The weights.
            memory_of: Gives something that is equal for tied ones.

        Raises:
            PlanError: Tied weights have two masters; or a master has no weight of its name or shape, or one of the two
                no floating-point numbers.
        """
        masters = self._masters() if callable(self._masters) else self._masters
        if not isinstance(masters, Mapping):
            raise PlanError(f"the function that gives the masters returned {type(masters).__name__}, not a dict")
        named = [(name, weight, memory_of(weight)) for name, weight in weights]
        if strangers := set(masters) - {name for name, *_ in named}:
            raise PlanError(f"masters of no weight: {list_names(strangers)}", names=sorted(strangers))
        own: dict[object, Tensor] = {}
        having = [(name, memory) for name, _, memory in named if name in masters]
        rivals = [name for name, memory in having if own.setdefault(memory, masters[name]) is not masters[name]]
        if rivals:
            raise PlanError(f"tied weights have two masters: {list_names(rivals)}", names=sorted(rivals))
        pairs = [Pair(name, weight, own.get(memory)) for name, weight, memory in named]
        if wrong := [pair.name for pair in pairs if pair.master is not None and not _fits(pair.weight, pair.master)]:
            raise PlanError(
                f"a master and its weight must be floating-point tensors of the same shape: {list_names(wrong)}",
                names=sorted(wrong),
            )
        yield from pairs


class Pair(NamedTuple):
    """A weight, and what is read in its place."""

    name: str
    weight: Tensor
    master: Tensor | None = None


def _fits(weight: object, master: object) -> bool:
    if not isinstance(weight, Tensor) or not isinstance(master, Tensor):
        return False
    return weight.is_floating_point() and master.is_floating_point() and master.shape == weight.shape
