"""Checks of :mod:`benchmarks.gpu_check`: what is read, tracked and shared of the saver's memory."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import asyncsync
from asyncsync.memory_saver.host_copies import HostCopies
from asyncsync.threads import WorkerThread
from benchmarks import layouts
from benchmarks.gpu_peer import Peer
from benchmarks.gpu_place import PLACES, Notes, Place, fingerprint, said

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(getattr(torch, name) for name in dir(torch) if name.startswith("float8_")),
)
BIG = 96 * layouts.MB
"""Bytes that torch's allocator has kept from nobody, so that it must ask for them."""

ROUNDS, QUICK_ROUNDS = 11, 5
SHARED, QUICK_SHARED = layouts.GB, 64 * layouts.MB
PIECES = 8


def kinds() -> dict[str, Tensor]:
    """Tensors of every kind that a trainer may hold, of random bytes, on the host."""
    generator = torch.Generator().manual_seed(3)

    def flat(dtype: torch.dtype, count: int) -> Tensor:
        made = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return (made % 2 if dtype is torch.bool else made).view(dtype)

    found: dict[str, Tensor] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found[f"matrix {name}"] = flat(dtype, 35).view(5, 7)
        found[f"0-dim {name}"] = flat(dtype, 3)[1]
    matrix, numbers = flat(torch.bfloat16, 90).view(9, 10), torch.randn(6, dtype=torch.complex64, generator=generator)
    return found | {
        "transposed": flat(torch.float32, 24).view(6, 4).t(),
        "sliced": matrix[::2, 1::3],
        "expanded": flat(torch.float32, 5).expand(3, 5),
        "lonely": flat(torch.float32, 4)[::4],
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "empty": torch.empty(0, 4),
        "large": flat(torch.bfloat16, 3 * layouts.MB).view(-1, 1024),
    }


def content(tensor: Tensor) -> bytes:
    """A tensor's bytes, row-major, on any device."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return bytes(host.reshape(-1).view(torch.uint8).numpy()) if host.numel() else b""


async def host_copies(place: Place, notes: Notes, quick: bool) -> None:
    """Reading every kind of tensor while it is paused; what has no host copy; and what the driver says of memory."""
    originals = kinds()
    expected = [content(tensor) for tensor in originals.values()]
    names, tensors = list(originals), [place.put(tensor) for tensor in originals.values()]
    notes["kinds"] = len(names)
    awake = HostCopies(names, tensors).tensors
    notes.expect("awake: are themselves", all(map(lambda one, two: one is two, awake, tensors)), True)
    notes.expect("awake: bytes are equal", [content(tensor) for tensor in awake] == expected, True)
    async with asyncsync.memory_saver_guard() as guard:
        plain = await guard.run(place.put, torch.arange(7))
    weight = place.put(torch.zeros(4))
    lost, foreign = _without_copies(place)
    memory = {"plain": plain, "the saver's": weight, "on the host": torch.zeros(4)}

    notes.expect("weights are tracked", place.tracked(weight), place.saver is not None)
    notes.expect("plain memory is tracked", place.tracked(plain), False)

    def ask(moment: str) -> None:
        notes[f"driver {moment}"] = {name: place.ask_driver(tensor) for name, tensor in memory.items()}

    ask("awake")
    ask_elsewhere: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: ask_elsewhere.update(found=place.ask_driver(weight)))
    thread.start()
    await asyncio.to_thread(thread.join)
    notes["driver awake, asked on a new thread"] = ask_elsewhere.get("found")
    notes.expect("awake: away", place.away(tensors), "none")
    notes.step("pausing")
    place.pause()
    ask("paused")
    notes.expect("paused: away", place.away(tensors), place.paused)
    notes.expect("paused: plain memory is away", place.away([plain]), "none")
    notes.step("reading host copies")
    asleep = HostCopies([*names, "plain"], [*tensors, plain], keep=True)
    asleep.begin()
    wrong = [
        name
        for name, copy, tensor, wanted in zip(names, asleep.tensors, tensors, expected, strict=False)
        if content(copy) != wanted or (copy.stride(), copy.dtype) != (tensor.stride(), tensor.dtype)
    ]
    notes.expect("paused: bytes that are wrong", wrong, [])
    notes.expect("paused: plain is itself", asleep.tensors[-1] is plain, True)
    for reason, refused in (("keeps it nowhere", lost), ("none of the saver's", foreign)):
        if refused:
            notes.expect(f"refused: {reason}", _refusal(list(refused), list(refused.values()), reason), list(refused))
    asleep.end()
    notes.step("resuming")
    place.resume()
    ask("resumed")
    notes.expect("resumed: away", place.away(tensors), "none")
    notes.expect("resumed: bytes are equal", [content(tensor) for tensor in tensors] == expected, True)
    if place.saver is not None:
        try:
            asleep.end()
        except asyncsync.MemorySaverError as error:
            notes["resumed: old copies"] = said(error)
        else:
            notes.expect("resumed: old copies", "not noticed", "refused")
        notes.step("keeping host copies over a pause")
        place.saver.retain_cpu_backup = True
        place.pause()
        place.resume()
        weight.add_(1)
        notes["retained: the saver's copy"] = [float(each) for each in place.saver.get_cpu_backup(weight)]
    else:
        weight.add_(1)
    (read,) = HostCopies(["weight"], [weight]).tensors
    notes.expect("retained: what is read", read.tolist(), [1.0] * 4)


def _without_copies(place: Place) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Tensors of a region that is kept nowhere, and of a memory pool that is none of the saver's."""
    if place.saver is None:
        return {}, {}
    with place.saver.region("nowhere"):
        lost = {f"lost.{number}": place.put(torch.arange(3)) for number in range(2)}
    pool = POOLS.setdefault("foreign", torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(pool):
        return lost, {"foreign": place.put(torch.arange(4))}


POOLS: dict[str, Any] = {}
"""Kept: a pool's memory goes with it."""


def _refusal(names: Sequence[str], tensors: Sequence[Tensor], reason: str) -> list[str]:
    try:
        HostCopies(names, tensors)
    except asyncsync.PlanError as error:
        return list(error.names) if reason in str(error) else [str(error)]
    return []


async def tracking(place: Place, notes: Notes, quick: bool) -> None:
    """What guarded work allocates is untracked, and what others do is not; what the memory pool gives back."""
    active = place.saver is not None
    kept: list[Tensor] = []

    def allocate(_: int = 0) -> Tensor:
        kept.append(place.allocate(BIG + len(kept) * layouts.MB))  # of another size each time
        return kept[-1]

    notes.step("a guard before anything was done on the device")
    async with asyncsync.memory_saver_guard() as guard:
        made = await guard.run(allocate)
        place.synchronize()  # so that this thread has a context
        notes.expect("first: guarded work", place.tracked(made), False)

    def allocate_and_free() -> None:
        for memory in [place.allocate(BIG) for _ in range(4)]:
            memory.zero_()

    def bystander() -> bool:
        place.synchronize()  # so that the thread has a context
        return place.tracked(allocate())

    thread = WorkerThread("shared")
    notes.expect("bystander before", place.tracked(allocate()), active)
    async with asyncsync.memory_saver_guard(thread=thread) as guard:
        notes.expect("guarded work", place.tracked(await guard.run(allocate)), False)
        notes.expect("bystander on the loop's thread", place.tracked(allocate()), active)
        notes.expect("bystander on another thread", await asyncio.to_thread(bystander), active)
        async with asyncsync.memory_saver_guard(thread=thread) as inner:
            notes.expect("guarded work, inside", place.tracked(await inner.run(allocate)), False)
        notes.expect("guarded work, after the inner guard", place.tracked(await guard.run(allocate)), False)
    notes.expect("the thread, left", place.tracked(await thread.run(allocate)), active)
    first, second = (asyncsync.memory_saver_guard(thread=thread) for _ in range(2))
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    notes.expect("guarded work, the first guard left first", place.tracked(await second.run(allocate)), False)
    await second.__aexit__(None, None, None)
    notes.expect("the thread, left again", place.tracked(await thread.run(allocate)), active)
    kept.clear()
    place.empty_cache()

    notes.step("what the memory pool gives back")
    memory = {"before": place.memory()}
    async with asyncsync.memory_saver_guard() as guard:
        survivor = await guard.run(lambda: place.put(torch.arange(layouts.MB)))
        await guard.run(allocate_and_free)
        memory["inside, all but 8 MB freed"] = place.memory()
    memory["left"] = place.memory()
    place.empty_cache()
    memory["left, cache emptied"] = place.memory()
    expected = content(survivor)
    place.pause()
    notes.expect("survivor is away", place.away([survivor]), "none")
    notes.expect("survivor's bytes are equal", content(survivor) == expected, True)
    place.resume()
    del survivor
    memory["survivor freed"] = place.memory()
    place.empty_cache()
    memory["survivor freed, cache emptied"] = place.memory()
    notes["MB"] = memory
    thread.close()


# -- sharing ----------------------------------------------------------------------------------------------------------


class Copier:
    """A process that is given another's memory, and copies it into weights of its own."""

    def __init__(self, device: str) -> None:
        self._place = PLACES[device]()
        self._shared: list[Tensor] = []
        self._own: list[Tensor] = []

    def take(self, shared: Sequence[Tensor]) -> str:
        """Take memory; the digest of what is in it."""
        self._shared = list(shared)
        self._own = [torch.zeros_like(tensor) for tensor in shared]
        return self.look()

    def look(self) -> str:
        """The digest of what is in the shared memory now."""
        return fingerprint(self._shared)

    def copy(self) -> float:
        """Copy it into its own; seconds."""
        return timed_copy(self._place, self._own, self._shared)

    def fingerprint(self) -> str:
        """The digest of its own."""
        return fingerprint(self._own)

    def drop(self) -> None:
        """Let go of it."""
        self._shared = []


def timed_copy(place: Place, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> float:
    """Copy tensors; seconds until the device has."""
    place.synchronize()
    start = time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    place.synchronize()
    return time.perf_counter() - start


async def ipc(place: Place, notes: Notes, quick: bool) -> None:
    """The saver's memory is repacked and shared with a second process: bytes, and how fast it copies them."""
    nbytes = QUICK_SHARED if quick else SHARED
    source = torch.randint(0, 256, (nbytes // PIECES,), dtype=torch.uint8).view(layouts.DTYPE)
    names = [f"layers.{index}.weight" for index in range(PIECES)]
    tensors = [place.put(source.roll(index)) for index in range(PIECES)]
    expected = fingerprint(tensors)
    notes["bytes"] = nbytes
    notes["driver"] = place.ask_driver(tensors[0])
    async with asyncsync.memory_saver_guard() as guard:
        notes.step("repacking")
        try:
            shared = await guard.run(place.shareable, names, tensors)
        except asyncsync.MemorySaverError as error:
            notes.expect("repacking on a new thread", said(error), "succeeded")
            await guard.run(place.synchronize)  # so that the thread has a context
            shared = await guard.run(place.shareable, names, tensors)
    repacked = sum(one is not two for one, two in zip(shared, tensors, strict=True))
    notes.expect("repacked", repacked, PIECES if place.saver is not None else 0)
    notes.expect("tracked", [place.tracked(tensor) for tensor in shared], [False] * PIECES)
    async with Peer.start(Copier, place.name) as copier:
        notes.step("sharing")
        notes.expect("bytes are equal there", await copier.take.remote(shared) == expected, True)
        own = [torch.zeros_like(tensor) for tensor in shared]
        ways: dict[str, Callable[[], Any]] = {
            "into the other process": lambda: copier.copy.remote(),
            "within this process": lambda: asyncio.to_thread(timed_copy, place, own, shared),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(2 + (QUICK_ROUNDS if quick else ROUNDS)):
            for way, copy in ways.items():
                notes.step(f"copying {way}, {turn + 1}")
                took = await copy()
                if turn >= 2:
                    seconds[way].append(took)
        medians = {way: statistics.median(each) for way, each in seconds.items()}
        for way, median in medians.items():
            notes[f"{way}: GB/s"] = round(nbytes / median / 1e9, 2)
        one, other = medians.values()
        notes["other process / this process"] = round(other / one, 3)
        notes.expect("bytes copied there are equal", await copier.fingerprint.remote() == expected, True)
        notes.step("pausing, shared")
        place.pause()
        notes.expect("paused: bytes are equal there", await copier.look.remote() == expected, True)
        place.resume()
        await copier.drop.remote()
        notes.step("sharing without repacking")
        try:
            found = await copier.take.remote(tensors)
        except Exception as error:  # noqa: BLE001 - what happens is what is to be known
            notes["without repacking"] = said(error)
        else:
            notes["without repacking"] = "bytes are equal" if found == expected else "other bytes arrive"
