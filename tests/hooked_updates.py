"""Offloaded trainers under torch_memory_saver's real hook: programs, as in :mod:`tests.hooked`.

The process is started with TMS_INIT_ENABLE_CPU_BACKUP=1: what the trainer allocates is kept on the host while paused.
"""

from __future__ import annotations

import asyncio
import doctest
import importlib.metadata
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch_memory_saver import torch_memory_saver as saver

import asyncsync
from asyncsync.engines.loading import InPlaceLoader
from asyncsync.guard import memory_saver_guard
from asyncsync.memory_saver import door
from asyncsync.memory_saver.driver import is_ipc_capable, is_mapped
from asyncsync.memory_saver.host_copies import HostCopies
from asyncsync.memory_saver.sharing import shareable
from tests.cancelling import CancelAt
from tests.cuda_stubs import device
from tests.engines import ToldEngine, failing, zoo
from tests.sample import Zoo, content, contents

Found = dict[str, Any]


def on_device(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the saver's memory, tied ones once."""
    placed = {id(tensor): device.on_device(tensor) for tensor in weights.values()}
    return {name: placed[id(tensor)] for name, tensor in weights.items()}


def refused(call: Callable[[], object]) -> list[Any]:
    """The names and the text of a PlanError."""
    try:
        call()
    except asyncsync.PlanError as error:
        return [list(error.names), str(error)]
    return []


# -- reading ----------------------------------------------------------------------------------------------------------


def reading() -> Found:
    """Every kind of tensor from its host copy; and which memory has none that may be asked for."""
    kinds = dict(Zoo(1).state_dict(keep_vars=True))
    lazy = torch.randn(4, 3, dtype=torch.complex64)
    kinds |= {"conjugate": lazy.conj(), "conjugate_slice": lazy[1:, ::2].conj(), "negative": lazy.conj().imag}
    expected = {name: content(tensor) for name, tensor in kinds.items()}
    placed = on_device(kinds)
    names, tensors = list(placed), list(placed.values())
    awake = HostCopies(names, tensors)
    with saver.region("kept", enable_cpu_backup=True):
        kept = device.on_device(torch.arange(5))
    with saver.region("nowhere"):
        lost = [device.on_device(torch.arange(3)) for _ in range(2)]
    with saver.region("disk", enable_disk_backup=True):
        spilled = device.on_device(torch.arange(4))
    with device.use_pool(device.Pool()):
        foreign = device.on_device(torch.arange(6))
    with saver.disable():
        untracked = device.on_device(torch.arange(7))
    on_host = torch.arange(8)
    with memory_unknown_to_torch():
        unknown = device.on_device(torch.arange(9))
    saver.pause()
    asleep = HostCopies([*names, "kept", "untracked", "on_host"], [*tensors, kept, untracked, on_host], keep=True)
    asleep.begin()
    copies, (kept_copy, *others) = asleep.tensors[: len(names)], asleep.tensors[len(names) :]
    without = {"lost": [*lost, kept], "spilled": [spilled], "foreign": [foreign], "unknown": [unknown]}
    found: Found = {
        "kinds": len(kinds),
        "equal": [content(copy) for copy in copies] == list(expected.values()),
        "same strides": all(
            (copy.stride(), copy.dtype, copy.shape) == (tensor.stride(), tensor.dtype, tensor.shape)
            for copy, tensor in zip(copies, tensors, strict=True)
        ),
        "awake is itself": all(one is other for one, other in zip(awake.tensors, tensors, strict=True)),
        "region": kept_copy.tolist(),
        "others are themselves": all(one is other for one, other in zip(others, (untracked, on_host), strict=True)),
        "still asleep": not any(is_mapped(tensor) for tensor in tensors if tensor.numel()),
        "refused": {
            which: refused(partial(HostCopies, _numbered(which, some), some)) for which, some in without.items()
        },
    }
    os.environ["TMS_INIT_ENABLE_CPU_BACKUP"] = "0"
    found["refused"]["off"] = refused(lambda: HostCopies(["weight"], [placed["matrix_float32"]]))
    asleep.end()
    saver.resume()
    try:
        asleep.end()
    except asyncsync.MemorySaverError as error:
        found["resumed"] = str(error)
    return found


def _numbered(name: str, tensors: list[Tensor]) -> list[str]:
    return [f"{name}.{number}" for number in range(len(tensors))]


@contextmanager
def memory_unknown_to_torch() -> Iterator[None]:
    """Allocations that torch's allocator knows nothing of."""
    before = list(device._segments)
    yield
    device._segments[:] = before


def stale() -> Found:
    """A host copy that the saver keeps after resuming is not what the trainer has made of the weights since."""
    saver.retain_cpu_backup = True
    weight = device.on_device(torch.zeros(4))
    saver.pause()
    saver.resume()
    weight.add_(1)
    kept = saver.get_cpu_backup(weight)
    (read,) = HostCopies(["weight"], [weight]).tensors
    return {"kept": kept.tolist(), "read": read.tolist()}


def naive_read() -> Found:
    """Reading paused memory itself, as an update without host copies would."""
    weight = device.on_device(torch.zeros(4))
    saver.pause()
    return {"read": weight.tolist()}


# -- updates ----------------------------------------------------------------------------------------------------------


class Sections:
    """Counts the guarded sections, and which work allocates how."""

    def __init__(self) -> None:
        self.entered = 0
        self.tracked: dict[str, list[bool]] = {}
        original = door.disable

        def disable() -> Any:
            self.entered += threading.current_thread().name == "asyncsync-sender"  # engines have sections of their own
            return original()

        door.disable = disable

    def take(self) -> int:
        """How many there were since this was asked last."""
        entered, self.entered = self.entered, 0
        return entered

    def look(self, who: str) -> None:
        """Note whether what this thread allocates is tracked."""
        self.tracked.setdefault(who, []).append(device.tracked())


def step(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Change weights in the saver's memory, and the module that they were made of."""
    for tensor, own in zip(weights.values(), model.state_dict(keep_vars=True).values(), strict=True):
        if own.dtype is torch.float32 and own.numel() and 0 not in own.stride():
            for one in (tensor, own.data):
                one.add_(1)


async def updated() -> Found:
    """A paused trainer updates engines, and stays paused; sections are counted on the way."""
    sections, model = Sections(), Zoo(1)
    weights = on_device(dict(model.state_dict(keep_vars=True)))
    engines = [ToldEngine(zoo(50)), ToldEngine(zoo(51), staged=False)]
    counts: dict[str, int] = {}

    def equal() -> bool:
        return [contents(engine.module) for engine in engines] == [contents(model)] * 2

    def asleep() -> bool:
        return not any(is_mapped(tensor) for tensor in weights.values() if tensor.numel())

    found: Found = {"counts": counts, "equal": [], "asleep": [], "intact": []}

    def note(state: str) -> None:
        counts[state] = sections.take()
        found["equal"].append(equal())
        found["asleep"].append(asleep())

    options: dict[str, Any] = {"bucket_size": 1024, "timeout": 60, "on_engine_failure": "abort"}
    async with asyncsync.WeightSynchronizer(asyncsync.TrainerRank(weights), engines, **options) as synchronizer:
        saver.pause()
        engines[1].before["join_group"] = failing(OSError("no"))
        try:
            await synchronizer.update_weights()
        except asyncsync.EngineError:
            note("connect fails")
        await synchronizer.update_weights()
        note("not connected")
        for state in ("connected", "asked again"):
            saver.resume()
            found["intact"].append({name: content(tensor) for name, tensor in weights.items()} == contents(model))
            step(weights, model)
            saver.pause()
            if state == "asked again":
                synchronizer._connection.forget()
            await synchronizer.update_weights()
            note(state)
        saver.resume()
    trainer = asyncsync.TrainerRank(weights, offload=False)
    async with asyncsync.WeightSynchronizer(trainer, engines, **options) as synchronizer:
        sections.take()
        await synchronizer.update_weights()
        note("not offloaded")
    return found


async def started() -> Found:
    """A trainer that is paused again as soon as its weights are copied: it is resumed, and changed, as they travel."""
    sections, model = Sections(), Zoo(1)
    weights = on_device(dict(model.state_dict(keep_vars=True)))
    engines = [ToldEngine(zoo(50)), ToldEngine(zoo(51), staged=False)]
    found: Found = {"equal": [], "counts": []}
    async with asyncsync.WeightSynchronizer(asyncsync.TrainerRank(weights), engines, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        for _ in range(3):
            saver.pause()
            sections.take()
            go_on = asyncio.Event()

            async def wait(go_on: asyncio.Event = go_on) -> None:
                await go_on.wait()

            engines[0].before["receive_weights"] = wait
            update = await synchronizer.start_update()
            saver.resume()
            was = contents(model)
            step(weights, model)
            go_on.set()
            await update
            found["counts"].append(sections.take())
            found["equal"].append([contents(engine.module) for engine in engines] == [was] * 2)
    return found


async def refusing() -> Found:
    """Weights that are paused and kept nowhere: refused by name, and nothing is sent, paused or connected."""
    weights = {"kept": device.on_device(torch.arange(4.0))}
    with saver.region("nowhere"):
        weights["lost"] = device.on_device(torch.arange(3.0))
    module = nn.ParameterDict({"kept": torch.zeros(4), "lost": torch.zeros(3)})
    engine = ToldEngine(module, staged=False)
    async with asyncsync.WeightSynchronizer(asyncsync.TrainerRank(weights), [engine], timeout=60) as synchronizer:
        saver.pause()
        try:
            await synchronizer.update_weights()
        except asyncsync.PlanError as error:
            found: Found = {"names": list(error.names), "calls": list(engine.calls)}
        found["untouched"] = content(module["kept"]) == content(torch.zeros(4))
        saver.resume()
        weights["lost"].copy_(torch.arange(3.0))
        await synchronizer.update_weights()
        found["awake"] = content(module["lost"]) == content(torch.arange(3.0))
        saver.pause()
        engine.calls.clear()
        try:
            await synchronizer.update_weights()  # in step: found out by the rank that is to send
        except asyncsync.PlanError as error:
            found["names in step"] = list(error.names)
        saver.resume()
        weights["lost"].copy_(torch.arange(3.0) + 1)
        await synchronizer.update_weights()
        found["repaired"] = content(module["lost"]) == content(torch.arange(3.0) + 1)
    return found


async def released() -> Found:
    """An engine whose weights' memory is released: nothing is written there, and it is said by name."""
    weights = {"there": torch.arange(4.0), "away": torch.arange(3.0)}
    held = nn.ParameterDict({"there": torch.zeros(4), "away": torch.zeros(3)})
    with saver.region("weights"):
        held["away"] = nn.Parameter(device.on_device(torch.zeros(3)), requires_grad=False)
    engine = ToldEngine(held, staged=False)
    found: Found = {}
    async with asyncsync.WeightSynchronizer(asyncsync.TrainerRank(weights), [engine], timeout=60) as synchronizer:
        saver.pause("weights")
        try:
            await synchronizer.update_weights()
        except asyncsync.EngineError as error:
            found["error"], found["untouched"] = str(error), held["there"].tolist()
        found["state"] = str(engine.weight_version)
        saver.resume("weights")
        await synchronizer.update_weights()
        found["awake"] = [held["there"].tolist(), held["away"].tolist()]
    with saver.region("fused"):
        fused = device.on_device(torch.zeros(2, 3))
    module = nn.ParameterDict({"there": torch.zeros(4), "away": nn.Parameter(fused[1], requires_grad=False)})
    engine = ToldEngine(module)  # staged: what is a view of more is written where it lies, at the switch
    async with asyncsync.WeightSynchronizer(asyncsync.TrainerRank(weights), [engine], timeout=60) as synchronizer:
        saver.pause("fused")
        try:
            await synchronizer.update_weights()
        except asyncsync.EngineError as error:
            found["staged"] = [str(error), module["there"].tolist()]
        saver.resume("fused")
        await synchronizer.update_weights()
        found["staged awake"] = [module["there"].tolist(), fused[1].tolist()]
    return found


async def documented() -> Found:
    """The engine of a docstring of ModuleEngine's: it sleeps, refuses to generate, and is woken by an update."""

    def build_model() -> nn.Module:
        model = nn.ParameterDict({"weight": torch.zeros(5)})
        model["weight"] = nn.Parameter(device.on_device(torch.zeros(5)), requires_grad=False)
        return model

    def undecorated(**options: Any) -> Callable[[type], type]:
        return lambda kind: kind

    names: dict[str, Any] = {"asyncio": asyncio, "build_model": build_model, "build_cache": lambda: device.allocate(64)}
    names["asyncsync"] = SimpleNamespace(ModuleEngine=asyncsync.ModuleEngine, remote=undecorated)
    for example in doctest.DocTestParser().get_examples(asyncsync.ModuleEngine.released_memory.__doc__ or ""):
        exec(example.source, names)
    engine, weights, found = names["Engine"](), {"weight": torch.arange(5.0)}, Found()
    async with asyncsync.WeightSynchronizer(asyncsync.TrainerRank(weights), [engine], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        await engine.sleep({"weights", "kv_cache"})
        found["asleep"] = not is_mapped(engine.module["weight"])
        found["version asleep"] = engine.weight_version
        try:
            async with engine.generating():
                found["generated"] = True
        except asyncsync.AsyncSyncError as error:
            found["refused"] = str(error)
        await synchronizer.update_weights()
        async with engine.generating() as version:
            found["awake"] = [version, engine.module["weight"].tolist(), sorted(engine.released_memory())]
    return found


async def resumed_in_the_middle() -> Found:
    """A trainer that is resumed while its weights are read: whatever was sent, no engine may switch to it."""
    weights = {"weight": device.on_device(torch.zeros(1 << 18))}  # so large that what is freed is really gone
    engine = ToldEngine(nn.ParameterDict({"weight": torch.ones(1 << 18)}))
    reading, read = HostCopies.begin, HostCopies.end
    begun, resumed = threading.Event(), threading.Event()

    def begin(copies: HostCopies) -> None:
        reading(copies)
        begun.set()
        resumed.wait(10)

    def end(copies: HostCopies) -> None:
        resumed.wait(10)
        read(copies)

    patched: Any = HostCopies
    found: Found = {}
    async with asyncsync.WeightSynchronizer(asyncsync.TrainerRank(weights), [engine], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        saver.pause()
        for moment in ("before", "after"):
            for again in (False, True):
                begun.clear()
                resumed.clear()

                async def resume(again: bool = again) -> None:
                    await asyncio.to_thread(begun.wait, 10)
                    saver.resume()
                    if again:
                        weights["weight"].add_(1)
                        saver.pause()
                    resumed.set()

                getattr(engine, moment)["receive_weights"] = resume
                patched.begin, patched.end = (begin, read) if moment == "before" else (_begun(begun), end)
                try:
                    await synchronizer.update_weights()
                except asyncsync.TrainerError as error:
                    found[f"{moment}{' and paused again' if again else ''}"] = [str(error), engine.weight_version]
                patched.begin, patched.end = reading, read
                if not again:
                    saver.pause()
        found["retains"] = saver.retain_cpu_backup
        saver.retain_cpu_backup = True
        await synchronizer.update_weights()
        found["retains what it did"] = saver.retain_cpu_backup
        found["works on"] = contents(engine.module)["weight"] == content(torch.full((1 << 18,), 2.0))
    return found


def _begun(event: threading.Event) -> Callable[[HostCopies], None]:
    begin = HostCopies.begin

    def begin_and_tell(copies: HostCopies) -> None:
        begin(copies)
        event.set()

    return begin_and_tell


class Looking(asyncsync.TrainerRank):
    """A trainer whose own code is called in an update, and allocates."""

    def __init__(self, weights: Any, sections: Sections) -> None:
        self._sections = sections
        super().__init__(weights)

    def before_update(self) -> None:
        self._sections.look("before_update")

    def after_update(self) -> None:
        self._sections.look("after_update")


class Gathered:
    """Weights that the trainer puts together itself."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections

    def describe(self) -> Any:
        self._sections.look("describe")
        return [("weight", torch.float32, (4,))]

    def gather(self, name: str) -> Tensor:
        self._sections.look("gather")
        return torch.arange(4.0)


async def own_code() -> Found:
    """Every allocation that a trainer's own code makes in an update is untracked; the rest of the process goes on."""
    sections = Sections()

    def give() -> dict[str, Tensor]:
        sections.look("function")
        return {"weight": torch.arange(4.0)}

    for weights in (give, Gathered(sections)):
        engine = ToldEngine(nn.ParameterDict({"weight": torch.zeros(4)}), staged=False)
        begin = InPlaceLoader.begin

        def begin_and_look(loader: InPlaceLoader, begin: Callable[..., None] = begin, **options: Any) -> None:
            sections.look("engine")
            begin(loader, **options)

        patched: Any = InPlaceLoader
        patched.begin = begin_and_look

        async def bystander() -> None:
            sections.look("bystander")
            await asyncio.to_thread(sections.look, "bystander on a thread")

        engine.before["receive_weights"] = bystander
        trainer = Looking(weights, sections)
        async with asyncsync.WeightSynchronizer(trainer, [engine], timeout=60) as synchronizer:
            for _ in range(2):
                await synchronizer.update_weights()
        trainer._asyncsync._sender.clean_up(lambda: sections.look("clean-up"))
        await trainer._asyncsync._sender.worker.run(lambda: None)
    return sections.tracked


class Slow(Gathered):
    """Weights that can be made to wait while they are described."""

    def __init__(self, sections: Sections) -> None:
        super().__init__(sections)
        self.go_on = threading.Event()
        self.go_on.set()

    def describe(self) -> Any:
        self.go_on.wait(10)
        return super().describe()


async def after_a_failure() -> Found:
    """An update that fails while a rank still reads: the others gather, and so does that one then, untracked."""
    sections = [Sections(), Sections()]
    weights = [Slow(own) for own in sections]
    ranks = [asyncsync.TrainerRank(own) for own in weights]
    engine = ToldEngine(nn.ParameterDict({"weight": torch.zeros(4)}))
    async with asyncsync.WeightSynchronizer(ranks, [engine], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        for own in sections:
            own.tracked.clear()
        weights[0].go_on.clear()
        original = ranks[0].abort_send

        async def go_on(epoch: int) -> None:
            weights[0].go_on.set()
            await original(epoch)

        patched: Any = ranks[0]
        patched.abort_send = go_on
        engine.before["receive_weights"] = failing(OSError("no"))
        try:
            await synchronizer.update_weights()
        except asyncsync.EngineError:
            return {"tracked": [own.tracked for own in sections]}
    return {}


async def devices() -> Found:
    """Guarded work runs on the caller's CUDA device, or on the one that is named."""
    torch.cuda.set_device(3)
    found = []
    async with memory_saver_guard() as guarded:
        found.append(await guarded.run(device.current_device))
        torch.cuda.set_device(1)
        found.append(await guarded.run(device.current_device))
    async with memory_saver_guard(device=2) as guarded:
        found.append(await guarded.run(device.current_device))
    async with memory_saver_guard(offload=False) as guarded:
        found.append(await guarded.run(device.current_device))
    return {"devices": found, "own": device.current_device()}


async def _awaiting(what: Awaitable[None]) -> None:
    await what


async def cancelled() -> Found:
    """A trainer rank that is cancelled at each await of an update: the next one works, every thread is as it was."""
    model = Zoo(1)
    weights = on_device(dict(model.state_dict(keep_vars=True)))
    engine = ToldEngine(zoo(50))
    saver.pause()
    found: Found = {"wrong": [], "reached": {}}

    async def once(method: str, at: int, when: Any) -> bool:
        """Whether it came to that await."""
        trainer = asyncsync.TrainerRank(weights)
        original, cancelling, answers = getattr(trainer, method), [], []

        async def cut_short(*args: Any) -> Any:
            async def answer() -> None:
                answers.append(await original(*args))

            setattr(trainer, method, original)
            cancelling.append(CancelAt(answer(), at, when))
            await asyncio.wait([asyncio.ensure_future(_awaiting(cancelling[0]))])  # as in an actor: the caller is not
            if not answers:
                raise OSError("cancelled over there")
            return answers[0]

        setattr(trainer, method, cut_short)
        where = f"{method} {when} at {at}"
        async with asyncsync.WeightSynchronizer(trainer, [engine], bucket_size=1024, timeout=60) as synchronizer:
            try:
                await synchronizer.update_weights()
            except asyncsync.WeightUpdateError as error:
                if not cancelling[0].reached:
                    found["wrong"].append(f"{where}: {error!r}")
            with torch.no_grad():
                engine.module.get_buffer("matrix_float32").zero_()
            await synchronizer.update_weights()
            if contents(engine.module) != contents(model):
                found["wrong"].append(f"{where}: the engine holds other weights")
            sender = trainer._asyncsync._sender.worker
            if (left := await sender.run(device.settings)) != (True, "default"):
                found["wrong"].append(f"{where}: the sender thread was left at {left}")
        if device.settings() != (True, "default") or any(is_mapped(one) for one in weights.values() if one.numel()):
            found["wrong"].append(f"{where}: the loop's thread, or the trainer, was left otherwise")
        return cancelling[0].reached

    for method in ("describe_weights", "open_trainer_group", "join_trainer_group", "send_weights"):
        for when in ("waiting", "handed over"):
            at = 0
            while await once(method, at, when):
                at += 1
            found["reached"][f"{method} {when}"] = at
    return found


# -- sharing ----------------------------------------------------------------------------------------------------------


async def sharing() -> Found:
    """Memory of the saver's is copied out before it is shared, or refused by name."""
    plain_memory = await _untracked(lambda: device.on_device(torch.arange(5)))
    tracked, empty = device.on_device(torch.arange(6).view(2, 3).t()), device.on_device(torch.empty(0))
    names, tensors = ["plain", "tracked", "empty"], [plain_memory, tracked, empty]
    found: Found = {"refused": refused(lambda: shareable(names, tensors, repack=False))}
    try:
        shareable(names, tensors)
    except asyncsync.MemorySaverError as error:
        found["tracked here"] = str(error)
    patched: Any = device.OnStub
    patched.clone = lambda tensor: device.on_device(tensor.as_subclass(Tensor))  # as on a GPU
    shared = await _untracked(lambda: shareable(names, tensors))
    found["can be shared"] = is_ipc_capable(shared[1])
    del patched.clone
    found["itself"] = [one is other for one, other in zip(shared, tensors, strict=True)]
    found["equal"] = [content(one) == content(other) for one, other in zip(shared, tensors, strict=True)]
    found["elsewhere"] = shared[1].data_ptr() != tracked.data_ptr()
    saver.pause()
    found["paused"] = refused(lambda: shareable(names, tensors))
    return found


async def _untracked(make: Callable[[], Any]) -> Any:
    async with memory_saver_guard() as guarded:
        return await guarded.run(make)


# -- what is found out ------------------------------------------------------------------------------------------------


def statuses() -> Found:
    """Which cases of the saver are told, and what of."""
    found: Found = {}

    def note(name: str) -> None:
        status = asyncsync.memory_saver_status()
        found[name] = [status.case, status.guarded, str(status)]

    note("active")
    with changed("TMS_INIT_ENABLE", "0"):
        note("regions only")
    with changed("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"):
        note("expandable segments")
    with changed("PYTORCH_ALLOC_CONF", "expandable_segments:True"):
        note("expandable segments, by their new name")
    with changed("LD_PRELOAD", ""):
        note("no longer named")
    saver.hook_mode = "torch"
    note("both")
    saver.hook_mode = "preload"
    original = torch.xpu.is_available
    torch.xpu.is_available = lambda: True
    note("xpu")
    torch.xpu.is_available = original
    version = importlib.metadata.version
    importlib.metadata.version = lambda distribution_name: "0.0.9.post1"
    note("old")
    importlib.metadata.version = version
    found["started"] = saver._impl is not None
    return found


async def broken() -> Found:
    """A saver that cannot be switched off: entering the guard says why, and what to do."""
    found: Found = {}
    with changed("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"):
        try:
            async with memory_saver_guard():
                found["entered"] = True
        except asyncsync.MemorySaverError as error:
            found["error"] = str(error)
        weights = {"weight": device.on_device(torch.arange(3.0))}
        engine = ToldEngine(nn.ParameterDict({"weight": torch.zeros(3)}))
        trainer = asyncsync.TrainerRank(weights, offload=False)
        async with asyncsync.WeightSynchronizer(trainer, [engine], timeout=60) as synchronizer:
            engine._asyncsync.receiver._guard = partial(  # type: ignore[method-assign]
                memory_saver_guard, offload=False, thread=engine._asyncsync._worker.current
            )
            await synchronizer.update_weights()
        found["not offloaded"] = engine.weight_version
    with changed("TMS_INIT_ENABLE", "0"):
        async with memory_saver_guard() as guarded:
            found["tracked in regions only"] = await guarded.run(device.tracked)
    return found


@contextmanager
def changed(variable: str, value: str) -> Iterator[None]:
    """A variable of the environment, for a while."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    yield
    if before is None:
        del os.environ[variable]
    else:
        os.environ[variable] = before


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        *(
            reading,
            stale,
            naive_read,
            updated,
            started,
            refusing,
            released,
            documented,
            cancelled,
            resumed_in_the_middle,
            own_code,
            after_a_failure,
            devices,
            sharing,
        ),
        *(statuses, broken),
    )
}

if __name__ == "__main__":
    device.install()
    made = PROGRAMS[sys.argv[1]]()
    found = asyncio.run(made) if asyncio.iscoroutine(made) else made
    sys.stdout.write(f"{json.dumps(found)}\n")
