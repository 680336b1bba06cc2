"""Whether weights fit a vLLM model, found out before one byte is sent and without touching what is served.

Only the model's own loading code knows which names it takes, what it fuses and how it slices. So that code is run, on a
*shadow*: the same layers, but with parameters on the meta device, as vLLM keeps their description for reloading. Each
tensor of the layout is loaded into it as a meta tensor of its shape. Names that the model does not know raise there,
and so do shapes that do not fit; what each parameter took is counted.

vLLM loads a fused parameter (q, k and v in one) without a word if only a part of it comes, and leaves the rest
uninitialised. So a parameter has to be taken whole or not at all, even where an update may leave weights out.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from asyncsync.buckets import Plan, TensorSpec, list_names
from asyncsync.errors import PlanError

MOST = 64
"""Tensors that do not fit, after which no more are looked for."""

_log = logging.getLogger("asyncsync")


def check_layout(model: nn.Module, plan: Plan, *, partial: bool, stages: int = 1) -> frozenset[str]:
    """Compare a layout with a model.

    Args:
        model: What vLLM serves (this rank's part of it).
        plan: The layout.
        partial: Whether parameters may be left out.
        stages: Over how many pipeline stages the engine's layers are spread; each leaves out what others hold.

    Returns:
        Names of tied tensors that the model does not know, and need not: it takes them under another name.

    Raises:
        PlanError: Names are unknown, shapes or dtypes differ, or parameters would be loaded in part or not at all.
    """
    trial = _Trial(model)
    with torch.no_grad():
        trial.load(plan)
    trial.judge(partial=partial, knows_all=stages == 1)
    return frozenset(trial.spare)


class _Trial:
    def __init__(self, model: nn.Module) -> None:
        self._shadows: dict[int, nn.Module] = {}
        self._parameters: dict[int, tuple[nn.Module, str, Tensor]] = {}  # by id: its layer, full name, itself
        self._loaded: dict[int, int] = {}  # elements
        self._unchecked = False
        self._now: TensorSpec | None = None
        self._taken: tuple[str, Tensor] | None = None  # the parameter that took what is loaded now
        self._ignored: set[str] = set()
        self.spare: set[str] = set()
        self._unknown: set[str] = set()
        self._unfit: dict[str, str] = {}
        self._model = self._shadow(model, "")

    def _shadow(self, layer: nn.Module, prefix: str) -> nn.Module:
        if (known := self._shadows.get(id(layer))) is not None:
            return known
        shadow = self._shadows[id(layer)] = copy.copy(layer)
        described, buffers = get_layerwise_info(layer).restore_metadata
        # As tensors of our own: those that are described here are what vLLM itself reloads by.
        own = {name: to_meta_tensor(restore_layer_refs(tensor, layer)) for name, tensor in described.items()}
        others = {
            name: to_meta_tensor(tensor)
            for name, tensor in layer._parameters.items()
            if tensor is not None and name not in own
        }
        vars(shadow)["_parameters"] = {
            name: self._watched(layer, prefix + name, tensor) for name, tensor in (own | others).items()
        }
        vars(shadow)["_buffers"] = {
            name: to_meta_tensor(restore_layer_refs(buffers[name], layer) if name in buffers else tensor)
            for name, tensor in layer._buffers.items()
            if tensor is not None
        }
        vars(shadow)["_modules"] = {
            name: None if child is None else self._shadow(child, f"{prefix}{name}.")
            for name, child in layer._modules.items()
        }
        return shadow

    def _watched(self, layer: nn.Module, name: str, parameter: Any) -> Any:
        """The parameter, with a loader that counts what it takes."""
        loader: Callable[..., Any] = getattr(parameter, "weight_loader", default_weight_loader)
        loader = inspect.unwrap(loader, stop=lambda each: each.__name__ != "online_process_loader")  # that of a reload
        signature = inspect.signature(loader)

        @functools.wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Any:
            self._taken = name, parameter
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            loaded = next((each for each in bound.args[1:] if isinstance(each, Tensor)), None)
            self._compare_dtypes(parameter, loaded)
            count, result = get_numel_loaded(loader, bound)
            self._loaded[id(parameter)] = self._loaded.get(id(parameter), 0) + count
            return result

        parameter.weight_loader = load
        self._parameters[id(parameter)] = layer, name, parameter
        return parameter

    def _compare_dtypes(self, parameter: Tensor, loaded: Tensor | None) -> None:
        if loaded is None or self._now is None or parameter.dtype == loaded.dtype:
            return
        if parameter.dtype.is_floating_point and loaded.dtype.is_floating_point:
            sent, own = (str(dtype).removeprefix("torch.") for dtype in (loaded.dtype, parameter.dtype))
            self._unfit[self._now.name] = f"{self._now.name} (sent {sent}, held {own}: pass dtype= to convert)"

    def load(self, plan: Plan) -> None:
        """Load every tensor of a plan; where one fails, note it and go on behind it."""
        todo = [(spec, name) for spec in plan.specs for name in spec.names]
        position = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal position
            while position < len(todo):
                self._now, name = todo[position]
                self._taken = None
                position += 1
                yield name, torch.empty(self._now.shape, dtype=self._now.dtype, device="meta")
                if self._taken is None:
                    self._ignored.add(name)  # without a word
            self._now = None

        while position < len(todo) and len(self._unknown) + len(self._unfit) < MOST:
            try:
                self._model.load_weights(tensors())  # type: ignore[operator]  # every vLLM model has it
            except Exception as error:  # noqa: BLE001 - the model's own code: whatever it raises says that
                self._note(error, todo[position - 1][1])
        self._finish(plan)

    def _note(self, error: Exception, name: str) -> None:
        if (
            self._now is None
            or isinstance(error, NotImplementedError)
            or (isinstance(error, RuntimeError) and "meta" in str(error))  # torch's; a name may have it in it, too
        ):
            # Loading code that looks at values cannot be tried out.
            _log.info("whether %s fits cannot be told beforehand: %s", name, error)
            self._unchecked = True
        elif self._taken is not None:
            held, parameter = self._taken
            why = f": {error}" if str(error).strip() else ""
            self._unfit[name] = f"{name} (sent {list(self._now.shape)}, for {held} of {list(parameter.shape)}{why})"
        else:
            self._unknown.add(name)

    def _finish(self, plan: Plan) -> None:
        """A tied tensor has several names; it is enough if one is known. And what is computed is no weight."""
        lost = self._unknown | self._ignored
        for spec in plan.specs:
            if spec.aliases and any(name not in lost for name in spec.names):
                self.spare |= lost.intersection(spec.names)
        self._unknown -= self.spare
        self._ignored -= self.spare | {name for name in self._ignored if ".rotary_emb." in name}

    def judge(self, *, partial: bool, knows_all: bool) -> None:
        """Say what does not fit.

        Args:
            partial: Whether parameters may be left out.
            knows_all: Whether what is ignored here is nobody's.

        Raises:
            PlanError: Something.
        """
        missing: set[str] = set()
        incomplete: set[str] = set()
        for key, (layer, name, parameter) in self._parameters.items():
            if name.rpartition(".")[2] in SKIP_LOAD_TENSORS or is_deferred_attention_layer(layer):
                continue
            loaded = self._loaded.get(key, 0)
            if loaded == 0 and parameter.numel():
                missing.add(name)
            elif loaded < get_tensor_load_numel(parameter) and not isinstance(layer, VocabParallelEmbedding):
                incomplete.add(name)
        if knows_all:
            self._unknown |= self._ignored
        if self._unchecked:
            missing, incomplete = set(), set()
        if partial:
            missing = set()
        problems = [
            f"{what}: {list_names(set(which))}"
            for what, which in (
                ("the engine does not know", self._unknown),
                ("differ in shape or dtype", self._unfit.values()),
                ("fused in the engine, and only a part of it is sent", incomplete),
                (
                    "the trainer does not send (pass partial=True if that is meant, name_map=… if only names differ)",
                    missing,
                ),
            )
            if which
        ]
        if problems:
            names = {*self._unknown, *self._unfit, *incomplete, *missing}
            raise PlanError(f"the weights do not fit the engine: {'; '.join(problems)}", names=sorted(names))
