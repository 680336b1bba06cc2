"""An ``AsyncLLM`` in all that an update asks of one, over a chain in place of a language model.

Its ranks are ours, as they run in vLLM's workers: real lines, real process groups, real bytes. Requests are scheduled
as vLLM does: paused, they wait in a queue; ``wait`` lets those in flight end, ``abort`` ends them and those that wait,
``keep`` keeps them. A session is each worker's own. And if a worker fails, the answers of those after it stay where
they are, and are taken for those to later calls.

It sleeps as vLLM does (read in 0.32.0): at level 1 a copy of the weights is kept, at level 2 none. The executor's books
of tags are not the workers', and what they do not allow is ignored with a warning. With all memory back, requests go
on, whoever has paused them. What it would die of is noted as a crash: there, released weights are real garbage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncsync import Completion, WeightVersionSpan
from asyncsync.buckets import Plan
from asyncsync.engines.channel import Hello, answer_calls
from asyncsync.engines.vllm.rank import WorkerRank
from asyncsync.errors import PlanError
from tests.chain import Chain

LONG = 200
"""So many tokens are a long request: in the middle it waits for a pause."""


class FakeLLM:
    """Generates with a chain, one token for each turn of the loop.

    Args:
        ranks: How many workers it has; each holds all of the weights.

    Attributes:
        calls: What was asked of it, in order.
        released: On each worker, what is released, and whether a copy of it is kept.
        crashes: What would have ended a real one.
        failing: Calls that fail, once; ``load`` fails in every worker, ``load 1`` in the second alone.
    """

    def __init__(self, *, ranks: int = 1, prefix_caching: bool = False) -> None:
        self.modules = [Chain(0) for _ in range(ranks)]
        self.calls: list[str] = []
        self.released: list[dict[str, bool]] = [{} for _ in self.modules]
        self.crashes: list[str] = []
        self.failing: set[str] = set()
        self.backend = True
        self._ranks = [
            WorkerRank(
                self._check,
                self._load_into(module),
                device="cpu",
                prefix_caching=prefix_caching,
                released=lambda rank=rank: self.released[rank],  # type: ignore[misc]
            )
            for rank, module in enumerate(self.modules)
        ]
        self._kept: list[dict[str, Tensor]] = [{} for _ in self.modules]
        self._sleeping_tags: set[str] = set()  # as the executor knows them
        self.answering: list[asyncio.Task[None]] = []
        self._mode: str | None = None  # how it is paused
        self._pauses = 0
        self._changed = asyncio.Condition()
        self._running: set[int] = set()
        self._queued: set[int] = set()
        self._aborted: set[int] = set()
        self._label = "default"
        self._active = [False] * ranks  # a session, of each worker
        self._answers: list[list[object]] = [[] for _ in range(ranks)]  # of the workers, that nobody has taken

    def _check(self, plan: Plan, partial: bool) -> frozenset[str]:
        names = {name for spec in plan.specs for name in spec.names}
        own = self.modules[0].state_dict()
        wrong = (names ^ own.keys()) if not partial else (names - own.keys())
        wrong |= {
            spec.name
            for spec in plan.specs
            if spec.name in own and (spec.shape, spec.dtype) != (tuple(own[spec.name].shape), own[spec.name].dtype)
        }
        if wrong:
            raise PlanError(f"the weights do not fit the engine: {sorted(wrong)}", names=sorted(wrong))
        return frozenset()

    def _load_into(self, module: Chain) -> Callable[[Iterator[tuple[str, Tensor]]], None]:
        @torch.no_grad()
        def load(weights: Iterator[tuple[str, Tensor]]) -> None:
            own = module.state_dict()
            if "weights" in self.released[self.modules.index(module)]:
                self.crashes.append("weights loaded while they are released")
            for number, (name, tensor) in enumerate(weights):
                if number:
                    self._load_planned(self.modules.index(module))
                own[name].copy_(tensor)

        return load

    def _load_planned(self, rank: int) -> None:
        if self.failing & {"load", f"load {rank}"}:
            raise RuntimeError(f"planned: rank {rank} could not load")

    def _on_each(self, call: Callable[[int], None]) -> None:
        """Run on every worker, and take their answers."""
        results: list[object] = []
        for rank in range(len(self.modules)):
            try:
                results.append(call(rank))  # type: ignore[func-returns-value]
            except Exception as error:  # noqa: BLE001 - an answer
                results.append(error)
        self._answer(results)

    def _answer(self, results: Sequence[object]) -> None:
        """Raise the first worker's error, and leave the other workers' answers to the next call, as vLLM does."""
        for answers, result in zip(self._answers, results, strict=True):
            answers.append(result)
        for answers in self._answers:
            if isinstance(answer := answers.pop(0), BaseException):
                raise RuntimeError(f"Worker failed with error {str(answer)!r}")

    def _start(self, rank: int) -> None:
        if self._active[rank]:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self._active[rank] = True

    def _update(self, rank: int, load: Callable[[int], None]) -> None:
        if not self._active[rank]:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            load(rank)
        except BaseException:
            self._active[rank] = False
            raise

    def _finish(self, rank: int) -> None:
        if not self._active[rank]:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self._active[rank] = False

    def _asked(self, name: str) -> None:
        self.calls.append(name)
        self._fails(name)

    # -- what an AsyncLLM has -------------------------------------------------------------------------------------

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._asked(f"pause {mode} {clear_cache}")
        async with self._changed:
            self._mode, self._pauses = mode, self._pauses + 1
            if mode == "abort":
                self._aborted |= self._running | self._queued
            self._changed.notify_all()
            if mode in ("wait", "abort"):
                await self._changed.wait_for(lambda: not self._running)
        self._on_each(lambda rank: None)  # their devices are idle

    async def resume_generation(self) -> None:
        self._asked("resume")
        await self._go_on()

    async def _go_on(self) -> None:
        async with self._changed:
            self._mode = None
            self._changed.notify_all()

    async def is_sleeping(self) -> bool:
        return bool(self._sleeping_tags) or self._mode is not None

    async def sleep(self, *, level: int = 1, mode: str = "abort") -> None:
        await self.pause_generation(mode=mode, clear_cache=True)
        self._asked(f"sleep {level}")
        if "weights" not in self._sleeping_tags:
            self._on_each(lambda rank: self._release(rank, level))
            self._sleeping_tags |= {"weights", "kv_cache"}

    @torch.no_grad()
    def _release(self, rank: int, level: int) -> None:
        self._fails(f"sleep on {rank}")
        released, own = self.released[rank], self.modules[rank].state_dict()
        if "weights" not in released:
            self._kept[rank] = {name: tensor.clone() for name, tensor in own.items()} if level == 1 else {}
            for tensor in own.values():
                tensor.fill_(float("nan"))
            released["weights"] = level == 1
        released.setdefault("kv_cache", False)

    async def wake_up(self, *, tags: list[str] | None = None) -> bool:
        self._asked(f"wake {tags}")
        if self._sleeping_tags.issuperset(tags or ()) and self._sleeping_tags:
            self._on_each(lambda rank: self._get_back(rank, tags or ["weights", "kv_cache"]))
            self._sleeping_tags -= set(tags or self._sleeping_tags)
        if not self._sleeping_tags:
            await self._go_on()
        return not self._sleeping_tags

    @torch.no_grad()
    def _get_back(self, rank: int, tags: Sequence[str]) -> None:
        self._fails(f"wake {tags} on {rank}")
        if "weights" in tags and self.released[rank].pop("weights", False):
            for name, tensor in self.modules[rank].state_dict().items():
                tensor.copy_(self._kept[rank][name])
        if "kv_cache" in tags:
            self.released[rank].pop("kv_cache", False)

    def _fails(self, name: str) -> None:
        if name in self.failing:
            self.failing.discard(name)
            raise RuntimeError(f"planned: {name} fails")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self._asked("init")
        if not self.backend:
            raise RuntimeError("Weight transfer not configured. Please set weight_transfer_config.")
        info = request.init_info
        for rank, worker in enumerate(self._ranks):
            hello = Hello(token=info["token"], rank=rank, ranks=len(self._ranks))
            answering = answer_calls(worker, hello, info["address"], info["port"], worker.reached_by)
            self.answering.append(asyncio.ensure_future(answering))

    async def start_weight_update(self) -> None:
        self._asked("start")
        self._on_each(self._start)

    async def update_weights(self, request: Any) -> None:
        self._asked("update")
        assert self._mode is not None, "loaded while it generates"
        epoch = request.update_info["epoch"]
        try:
            self._on_each(lambda rank: self._update(rank, lambda rank: self._ranks[rank].load(epoch)))
        finally:
            self.failing -= {name for name in self.failing if name.startswith("load")}

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._asked("finish")
        self._on_each(self._finish)

    async def update_weight_version(self, new_version: str) -> None:
        self._asked("label")
        self._label = new_version

    async def get_weight_version(self) -> str:
        return self._label

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        return [{f"tp{rank}": module.digest()} for rank, module in enumerate(self.modules)]

    # -- generation -----------------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], count: int, started: Callable[[], None] | None) -> Completion:
        """Generate greedily."""
        request = object.__hash__(asyncio.current_task())
        async with self._changed:
            self._queued.add(request)
            try:
                await self._changed.wait_for(lambda: self._mode is None or request in self._aborted)
            finally:
                self._queued.discard(request)
            self._running.add(request)
        tokens: list[int] = []
        pauses = self._pauses
        switches: list[tuple[str, int]] = []
        try:
            while len(tokens) < count and request not in self._aborted:
                if count >= LONG and len(tokens) == LONG // 2:
                    async with self._changed:  # so that it is in flight when a pause comes, however fast the machine
                        await self._changed.wait_for(lambda: self._pauses > pauses)
                if self._mode == "keep":
                    async with self._changed:
                        await self._changed.wait_for(lambda: self._mode != "keep")
                if not switches or switches[-1][0] != self._label:
                    switches.append((self._label, len(tokens)))
                if any(self.released):
                    self.crashes.append("generated with memory that is not there")
                before = tokens[-1] if tokens else prompt[-1]
                following = {module.following(before) for module in self.modules}
                assert len(following) == 1, "the ranks hold different weights"
                tokens += following
                if started is not None:
                    started()
                await asyncio.sleep(0)
        finally:
            async with self._changed:
                self._running.discard(request)
                self._changed.notify_all()
        reason: Any = "abort" if request in self._aborted else "length"
        self._aborted.discard(request)
        ends = [*(start for _, start in switches[1:]), len(tokens)]
        spans = (
            WeightVersionSpan(version=int(label) if label.isdigit() else None, start=start, end=end)
            for (label, start), end in zip(switches, ends, strict=False)  # it may have been ended before it began
        )
        return Completion(tokens=tuple(tokens), finish_reason=reason, weight_versions=tuple(spans))
