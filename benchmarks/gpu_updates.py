"""Checks of :mod:`benchmarks.gpu_check`: updates of an engine in a second process."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import rank_worker
from asyncsync.memory_saver import door
from benchmarks import layouts
from benchmarks.gpu_peer import Peer
from benchmarks.gpu_place import Notes, Place, fingerprint, said

TIMEOUT = 45.0
"""Seconds that an update may take."""

UPDATES, QUICK_UPDATES = 4, 3
SECTIONS = (2, 1, 1, 1)
"""Guarded sections of updates one after another: the first one has to connect."""

ROUNDS, QUICK_ROUNDS, WARM_UP = 3, 2, 2
SHAPE, QUICK_SHAPE = (4096, 8), (512, 8)
LARGE_SHAPE, QUICK_LARGE_SHAPE = (4096, 32), (2048, 8)
"""Width and depth of a policy: 256 MB or 4 MB, and 1 GB or 64 MB."""


class Policy(nn.Module):
    """Linear layers in bfloat16, of zeros.

    Args:
        shape: How wide, and how many.
        device: Where.
    """

    def __init__(self, shape: tuple[int, int], device: str) -> None:
        super().__init__()
        width, depth = shape
        with torch.device("meta"):  # a gigabyte takes seconds to fill with numbers that nobody needs
            self.layers = nn.ModuleList(nn.Linear(width, width, dtype=layouts.DTYPE) for _ in range(depth))
        self.to_empty(device=device)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """From width to width."""
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


class PolicyEngine(asyncsync.ModuleEngine):
    """An engine that serves a policy, in a process of its own."""

    def __init__(self, shape: tuple[int, int], device: str, staged: bool) -> None:
        if device != "cpu":
            torch.cuda.set_device(torch.device(device).index or 0)
        super().__init__(Policy(shape, device), staged=staged)

    def fingerprint(self) -> str:
        """Digest of its weights as they lie on its device."""
        return fingerprint(self.module.parameters())


class Training:
    """A policy that is trained: with momentum, so that not only the weights must come through a pause."""

    def __init__(self, place: Place, shape: tuple[int, int]) -> None:
        self.place = place
        self.module = place.put_module(Policy(shape, place.name))
        self.batch = place.put(torch.randn(8, shape[0], generator=torch.Generator().manual_seed(1)).to(layouts.DTYPE))
        with torch.no_grad():
            for parameter in self.weights:
                parameter.normal_(std=shape[0] ** -0.5)
        self._optimizer = torch.optim.SGD(self.weights, lr=0.01, momentum=0.9, foreach=False)

    @property
    def weights(self) -> list[Tensor]:
        """Its parameters."""
        return list(self.module.parameters())

    def step(self) -> float:
        """Train a step; the loss."""
        loss = (self.module(self.batch).float() - 1).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())

    def rehearse(self) -> list[Tensor]:
        """What the next step will make of the weights, on the host; then all is as it was."""
        state = [
            *self.weights,
            *(each["momentum_buffer"] for each in self._optimizer.state.values() if "momentum_buffer" in each),
        ]
        with torch.no_grad():
            before = [tensor.to("cpu", copy=True) for tensor in state]
            with torch.enable_grad():
                self.step()
            made = [tensor.to("cpu", copy=True) for tensor in self.weights]
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        return made


class Sections:
    """Counts the guarded sections."""

    def __init__(self) -> None:
        self._entered = 0
        self._original, door.disable = door.disable, self._disable

    def _disable(self) -> AbstractContextManager[None]:
        self._entered += 1
        return self._original()

    def take(self) -> int:
        """How many there were since this was asked last."""
        entered, self._entered = self._entered, 0
        return entered


async def guarded(place: Place, notes: Notes, quick: bool) -> None:
    """A trainer that is paused over updates, with the guard: bytes, guarded sections, memory, and that it trains on."""
    sections = Sections()
    training = Training(place, QUICK_SHAPE if quick else SHAPE)
    notes["losses"] = [training.step() for _ in range(2)]
    notes["bytes"] = sum(tensor.nbytes for tensor in training.weights)
    status = asyncsync.memory_saver_status()
    notes["memory_saver_status"] = str(status)
    notes.expect("is guarded", status.guarded, place.saver is not None)
    rank, (staged, in_place) = asyncsync.TrainerRank(training.module), (True, False)
    shape = QUICK_SHAPE if quick else SHAPE
    async with (
        Peer.start(PolicyEngine, shape, place.name, staged) as one,
        Peer.start(PolicyEngine, shape, place.name, in_place) as other,
        asyncsync.WeightSynchronizer(
            rank, [one, other], backend="gloo", transport="broadcast", timeout=TIMEOUT
        ) as synchronizer,
    ):
        for number in range(QUICK_UPDATES if quick else UPDATES):
            update = f"update {number + 1}"
            expected, rehearsed = fingerprint(training.weights), training.rehearse()
            memory = {"awake": place.memory()}
            notes.step(f"{update}: pausing")
            place.pause()
            memory["paused"] = place.memory()
            notes.expect(f"{update}: away before", place.away(training.weights), place.paused)
            notes.step(f"{update}: updating")
            sections.take()
            start = time.perf_counter()
            await synchronizer.update_weights()
            notes[f"{update}: seconds"] = round(time.perf_counter() - start, 4)
            notes.expect(f"{update}: guarded sections", sections.take(), SECTIONS[number] if status.guarded else 0)
            notes.expect(f"{update}: away after", place.away(training.weights), place.paused)
            memory["updated"] = place.memory()
            found = await asyncio.gather(one.fingerprint.remote(), other.fingerprint.remote())
            notes.expect(f"{update}: engines' bytes are equal", [each == expected for each in found], [True, True])
            notes.step(f"{update}: resuming")
            place.resume()
            memory["resumed"] = place.memory()
            notes[f"{update}: MB"] = memory
            notes.expect(f"{update}: away resumed", place.away(training.weights), "none")
            notes.expect(f"{update}: trainer's bytes are equal", fingerprint(training.weights) == expected, True)
            notes.step(f"{update}: training on")
            notes[f"{update}: loss"] = training.step()
            # A matrix product need not come to the same bits twice, so what must be is that it comes close.
            made = [tensor.to("cpu", copy=True) for tensor in training.weights]
            notes[f"{update}: next step is the same bits"] = all(map(torch.equal, made, rehearsed))
            close = all(
                torch.allclose(one.float(), two.float(), rtol=0.02, atol=1e-3)
                for one, two in zip(made, rehearsed, strict=True)
            )
            notes.expect(f"{update}: next step is right", close, True)


async def cuda_ipc(place: Place, notes: Notes, quick: bool) -> None:
    """Updates through a GPU's memory that engines open by CUDA IPC: of weights of the saver's, awake and paused."""
    shape = QUICK_SHAPE if quick else LARGE_SHAPE
    policy, engine = place.put_module(Policy(shape, place.name)), place.engine or PolicyEngine
    weights = list(policy.parameters())
    fill(weights)
    notes["bytes"] = sum(tensor.nbytes for tensor in weights)
    notes["devices"] = [place.name, place.second]
    async with (
        Peer.start(engine, shape, place.name, True) as one,
        Peer.start(engine, shape, place.second, False) as other,
        asyncsync.WeightSynchronizer(
            asyncsync.TrainerRank(policy), [one, other], transport=place.transport, timeout=TIMEOUT
        ) as synchronizer,
    ):
        for number in range(QUICK_UPDATES if quick else UPDATES):
            paused, update = number % 2 == 1, f"update {number + 1}"
            with torch.no_grad():
                layouts.change(weights)
            expected = fingerprint(weights)
            if paused:
                notes.step(f"{update}: pausing")
                place.pause()
            notes.step(f"{update}: updating")
            start = time.perf_counter()
            report = await synchronizer.update_weights()
            notes[f"{update}: seconds"] = round(time.perf_counter() - start, 4)
            transports = [outcome.transport for outcome in report.outcomes]
            notes.expect(f"{update}: transports", transports, [place.transport] * 2)
            notes.expect(f"{update}: away", place.away(weights), place.paused if paused else "none")
            notes[f"{update}: MB"] = place.memory()
            found = await asyncio.gather(one.fingerprint.remote(), other.fingerprint.remote())
            notes.expect(f"{update}: engines' bytes are equal", [each == expected for each in found], [True, True])
            if paused:
                notes.step(f"{update}: resuming")
                place.resume()
            notes.expect(f"{update}: trainer's bytes are equal", fingerprint(weights) == expected, True)


def fill(weights: Sequence[Tensor]) -> None:
    """Fill bfloat16 weights with numbers that are none of them NaN."""
    with torch.no_grad():
        for tensor in weights:
            tensor.view(torch.int16).random_(0, 2**14)


# -- without the guard ------------------------------------------------------------------------------------------------


class LiveReading:
    """In place of reading host copies: tensors are read where they lie, whether or not there is memory."""

    are_elsewhere = True

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor], *, keep: bool = False) -> None:
        self.tensors = tuple(tensors)

    def begin(self) -> None:
        """Nothing is noted."""

    end = release = begin


async def unguarded_host_copies(place: Place, notes: Notes, quick: bool) -> None:
    """An update with ``offload=False``: host copies are read, but nothing is kept from tracking."""
    await _update_unguarded(place, notes)


async def unguarded_live(place: Place, notes: Notes, quick: bool) -> None:
    """An update with ``offload=False`` that reads paused memory itself."""
    patched: Any = rank_worker
    patched.HostCopies = LiveReading
    await _update_unguarded(place, notes)


async def _update_unguarded(place: Place, notes: Notes) -> None:
    training = Training(place, QUICK_SHAPE)
    training.step()
    expected = fingerprint(training.weights)
    rank = asyncsync.TrainerRank(training.module, offload=False)
    async with (
        Peer.start(PolicyEngine, QUICK_SHAPE, place.name, True) as engine,
        asyncsync.WeightSynchronizer(
            rank, [engine], backend="gloo", transport="broadcast", timeout=TIMEOUT
        ) as synchronizer,
    ):
        place.pause()
        notes.step("updating")
        try:
            await synchronizer.update_weights()
        except asyncsync.AsyncSyncError as error:
            notes["update"] = said(error)
        else:
            notes["update"] = "succeeded"
        notes["engine's bytes are equal"] = await engine.fingerprint.remote() == expected
        notes.attempt("device after the update", place.synchronize)
        notes.attempt("resuming", place.resume)
        notes.attempt("trainer's bytes are equal", lambda: fingerprint(training.weights) == expected)
        notes.attempt("loss of the next step", training.step)


async def unguarded_new_memory(place: Place, notes: Notes, quick: bool) -> None:
    """What unguarded work allocates anew while the trainer is paused: the saver's, so what does resuming do?"""
    await _allocate_unguarded(place, notes, 64 * layouts.MB)


async def unguarded_cached_memory(place: Place, notes: Notes, quick: bool) -> None:
    """Unguarded work that is given memory which torch had kept, and the saver has taken away."""
    await _allocate_unguarded(place, notes, 64 * layouts.KB)


async def _allocate_unguarded(place: Place, notes: Notes, nbytes: int) -> None:
    training = Training(place, QUICK_SHAPE)
    training.step()
    for _ in range(4):  # freed again, and kept by torch
        place.allocate(64 * layouts.KB)
    expected = fingerprint(training.weights)
    place.pause()
    async with asyncsync.memory_saver_guard(offload=False) as unguarded:
        notes.step("allocating")
        memory = await unguarded.run(place.allocate, nbytes)
        notes["driver"] = place.ask_driver(memory)
        notes.attempt("writing to it", lambda: memory.fill_(1) is memory)
        notes.attempt("device after that", place.synchronize)
    notes.attempt("resuming", place.resume)
    notes.attempt("trainer's bytes are equal", lambda: fingerprint(training.weights) == expected)


async def unguarded_fresh_thread(place: Place, notes: Notes, quick: bool) -> None:
    """The first thing that a new thread does on the device is to allocate, tracked."""
    place.put(torch.zeros(1))
    notes.step("allocating on a new thread")
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(place.allocate(layouts.MB)))
    thread.start()
    await asyncio.to_thread(thread.join)
    notes["driver"] = [place.ask_driver(memory) for memory in made]


# -- speed, and other transports --------------------------------------------------------------------------------------


@asynccontextmanager
async def _updating(
    shape: tuple[int, int], source: str, target: str, backend: Any
) -> AsyncIterator[tuple[Policy, Any, asyncsync.WeightSynchronizer]]:
    policy = Policy(shape, source)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.view(torch.int16).random_(0, 2**15)
    async with (
        Peer.start(PolicyEngine, shape, target, True) as engine,
        asyncsync.WeightSynchronizer(
            policy, [engine], backend=backend, transport="broadcast", timeout=TIMEOUT
        ) as synchronizer,
    ):
        yield policy, engine, synchronizer


async def _timed_update(policy: Policy, engine: Any, synchronizer: asyncsync.WeightSynchronizer) -> tuple[float, bool]:
    """Seconds of an update of changed weights, and whether the engine has them, bit for bit."""
    with torch.no_grad():
        layouts.change(policy.parameters())
    start = time.perf_counter()
    await synchronizer.update_weights()
    seconds = time.perf_counter() - start
    return seconds, await engine.fingerprint.remote() == fingerprint(policy.parameters())


async def gloo(place: Place, notes: Notes, quick: bool) -> None:
    """Updates over gloo with both ends on the device, in turns with updates from host to host."""
    shape = QUICK_LARGE_SHAPE if quick else LARGE_SHAPE
    seconds: dict[str, list[float]] = {"device to device": [], "host to host": []}
    async with (
        _updating(shape, place.name, place.name, "gloo") as on_device,
        _updating(shape, "cpu", "cpu", "gloo") as on_host,
    ):
        notes["bytes"] = sum(tensor.nbytes for tensor in on_host[0].parameters())
        for turn in range(WARM_UP + (QUICK_ROUNDS if quick else ROUNDS)):
            for way, ends in zip(seconds, (on_device, on_host), strict=True):
                notes.step(f"{way}, update {turn + 1}")
                took, equal = await _timed_update(*ends)
                if turn >= WARM_UP:
                    seconds[way].append(took)
                if turn == 0 or not equal:
                    notes.expect(f"{way}: bytes are equal", equal, True)
    for way, took_all in seconds.items():
        notes[f"{way}: median seconds"] = round(statistics.median(took_all), 4)
    one, other = (statistics.median(took_all) for took_all in seconds.values())
    notes["device / host"] = round(one / other, 2)


async def nccl(place: Place, notes: Notes, quick: bool) -> None:
    """Updates over NCCL from the first GPU to the second; on the CPU the same over gloo."""
    source, target, backend = ("cpu", "cpu", "gloo") if place.name == "cpu" else ("cuda:0", "cuda:1", "nccl")
    notes["backend"] = backend
    async with _updating(QUICK_LARGE_SHAPE if quick else LARGE_SHAPE, source, target, backend) as ends:
        for turn in range(3):
            notes.step(f"update {turn + 1}")
            took, equal = await _timed_update(*ends)
            notes[f"update {turn + 1}: seconds"] = round(took, 4)
            notes.expect(f"update {turn + 1}: bytes are equal", equal, True)
