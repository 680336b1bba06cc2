"""A pretended SGLang: its control calls, its groups and its checksums, without its scheduler; in milliseconds.

Groups are real: it joins them through the store it is told of, and takes bytes out of broadcasts, as SGLang does. What
it cannot do is generate. It notes every call, and fails where it is told to.

Weights that are released are really overwritten. What would end SGLang's process is noted as a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from asyncsync.engines.sglang.calls import SGLangClient, SGLangFacts, facts_from
from tests.sglang_bed import checksums

ALL_TAGS = ("kv_cache", "weights", "cuda_graph")
NO_SESSION = "no weight-update session is open; call begin_weight_update() first"
NOT_BETWEEN = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
TORN = "The full weights of the ModelRunner are partially updated. Please discard the whole weights."
NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."


class Block(nn.Module):
    """One layer, with the names of a Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = nn.Module(), nn.Module(), nn.LayerNorm(16, bias=False)
        for name, rows, columns in (("q", 16, 16), ("k", 8, 16), ("v", 8, 16), ("o", 16, 16)):
            self.self_attn.add_module(f"{name}_proj", nn.Linear(columns, rows, bias=False))
        for name, rows, columns in (("gate", 32, 16), ("up", 32, 16), ("down", 16, 32)):
            self.mlp.add_module(f"{name}_proj", nn.Linear(columns, rows, bias=False))


class Llama(nn.Module):
    """Weights with the names of a Llama's."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(64, 16)
            self.model.layers = nn.ModuleList([Block(), Block()])
            self.model.norm = nn.LayerNorm(16, bias=False)
            self.lm_head = nn.Linear(16, 64, bias=False)
            for parameter in self.parameters():
                nn.init.normal_(parameter)  # norms begin as ones, whatever the seed


class PretendedSGLang(SGLangClient):
    """Satisfies the adapter in place of an engine.

    Args:
        **facts: Where it differs from SGLang 0.5.23 on a CPU.

    Attributes:
        model: Its weights.
        calls: What it was asked, in order; pauses with their mode.
        before: Called with its fields before a call of that name; what it returns is the answer, unless that is None.
        running: Whether requests are in flight; what ends them is up to the test.
        held: How many requests a pause holds back.
        served: How many have been.
        released: The tags of its memory that is released.
        crashes: What would have ended it.
    """

    def __init__(self, **facts: Any) -> None:
        info = {"version": "0.5.23", "tp_size": 1, "device": "cpu", "dtype": "float32", "disable_radix_cache": False}
        info |= {"disable_overlap_schedule": False, "dp_size": 1, "pp_size": 1}
        self.facts: SGLangFacts = replace(facts_from(info, sessions=True), **facts)
        self.model = Llama()
        self.label = "default"
        self.session = False
        self.paused = False
        self.running = False
        self.held = self.served = 0
        self.released: set[str] = set()
        self.crashes: list[str] = []
        self._garbage: dict[str, Tensor] = {}
        self.groups: dict[str, Any] = {}
        self.calls: list[str] = []
        self.before: dict[str, Callable[[Mapping[str, Any]], Any]] = {}

    def __repr__(self) -> str:
        return "pretended"

    def address(self) -> str:
        return "127.0.0.1"

    async def get_facts(self) -> SGLangFacts:
        return self.facts

    async def _ask(self, call: str, fields: dict[str, Any]) -> Any:
        self.calls.append(f"pause {fields['mode']}" if call == "pause_generation" else call)
        if (before := self.before.get(call)) is not None:
            answer = before(fields)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                return answer
        return await getattr(self, f"_{call}")(**fields)

    def restart(self, label: str = "default") -> None:
        """Be another process, with the weights that it was started with."""
        self.model, self.label, self.session, self.paused = Llama(), label, False, False
        self.groups.clear()
        self.released.clear()

    def comes(self) -> None:
        """Have a request come, that is over in a moment."""
        if self.paused:
            self.held += 1
        else:
            self._serves(1)

    def _serves(self, count: int) -> None:
        self.served += count
        if count and self.released:
            self.crashes.append("generated with memory that is not there")

    async def _get_weight_version(self) -> Any:
        return self.label

    async def _update_weight_version(self, new_version: str, abort_all_requests: bool) -> Any:
        assert not abort_all_requests
        self.label = new_version
        return _said(True)

    async def _pause_generation(self, mode: str) -> Any:
        self.paused = True

    async def _continue_generation(self) -> Any:
        self.paused = False
        held, self.held = self.held, 0
        self._serves(held)

    async def _abort_request(self, rid: str, abort_all: bool) -> Any:
        self.running = False

    async def _flush_cache(self, timeout: float) -> Any:
        return _said(not self.running)

    async def _init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Any:
        assert backend == "gloo"

        def join() -> Any:
            store = TCPStore(master_address, master_port, timeout=timedelta(seconds=20))
            prefixed = PrefixStore("cpu/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=4)
            return ProcessGroupGloo(prefixed, rank_offset, world_size, options)

        if group_name in self.groups:
            return _said(False, "group name has already been created")
        try:
            self.groups[group_name] = await asyncio.to_thread(join)
        except RuntimeError as error:
            return _said(False, f"Failed to initialize custom process group: {error}")
        return _said(True)

    async def _destroy_weights_update_group(self, group_name: str) -> Any:
        if self.groups.pop(group_name, None) is None:
            return _said(False, "The group to be destroyed does not exist.")
        return _said(True)

    async def _begin_weight_update(self, selector: str) -> Any:
        if self.session:
            return _said(False, "a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return _said(True)

    async def _end_weight_update(self) -> Any:
        if not self.session:
            return _said(False, NO_SESSION)
        self.session = False
        return _said(True)

    async def _update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        flush_cache: bool,
        load_format: str | None,
        selector: str,
        weight_version: str | None,
    ) -> Any:
        if self.facts.sessions and not self.session:
            return _said(False, NOT_BETWEEN)
        if group_name not in self.groups:
            return _said(False, f"Failed to receive weights: Group {group_name} not in {list(self.groups)}.")
        kinds = [getattr(torch, name) for name in dtypes]
        whole = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in whole]
        messages = [sum(sizes)] if load_format == "flattened_bucket" else sizes
        try:
            buffers = [await asyncio.to_thread(_receive, self.groups[group_name], size) for size in messages]
        except RuntimeError as error:
            return _said(False, f"Failed to receive weights: {error}")
        if names and "weights" in self.released:
            self.crashes.append("weights written while they are released")
        flat, start = torch.cat([torch.empty(0, dtype=torch.uint8), *buffers]), 0
        held = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor, size in zip(names, whole, sizes, strict=True):
                if tensor.shape == held[name].shape:
                    held[name].copy_(flat[start : start + size].view(tensor.dtype).view(tensor.shape))
                else:
                    held_shape, sent_shape = list(held[name].shape), list(tensor.shape)
                    return _said(False, f"param_data.shape={held_shape} loaded_weight.shape={sent_shape}. {TORN}")
                start += size
        if weight_version is not None:
            self.label = weight_version
        if flush_cache and self.running:
            return _said(False, NOT_FLUSHED)
        return _said(True)

    async def _check_weights(self, action: str, selector: str) -> Any:
        if "weights" in self.released:
            self.crashes.append("weights read while they are released")
        return {"success": True, "message": "", "ranks": [{"checksums": checksums(self.model, 0, 1)}]}

    async def _release_memory_occupation(self, tags: list[str] | None) -> Any:
        if self.running:
            self.crashes.append("released while requests run")
        for tag in tags or ALL_TAGS:
            if tag in self.released:
                self.crashes.append(f"{tag} released twice")
            self.released.add(tag)
            if tag == "weights":
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.fill_(7)
                self._garbage = {name: each.clone() for name, each in self.model.state_dict().items()}

    async def _resume_memory_occupation(self, tags: list[str] | None) -> Any:
        for tag in tags or ALL_TAGS:
            if tag not in self.released:
                self.crashes.append(f"{tag} resumed twice")
            self.released.discard(tag)
            if tag == "weights" and not all(
                torch.equal(each, self._garbage[name]) for name, each in self.model.state_dict().items()
            ):
                self.crashes.append("weights written while they are released")


def _receive(group: Any, size: int) -> Tensor:
    flat = torch.empty(size, dtype=torch.uint8)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=20)
    group.broadcast([flat], options).wait()
    return flat


def _said(success: bool, message: str = "Success") -> dict[str, Any]:
    return {"success": success, "message": message}
