"""Stored transports: a source brings everything to a place first, and engines fetch it from there."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import asyncsync
from asyncsync import ConnectError, EngineState, PlanError, TrainerError, TransferError, WeightSynchronizer, cluster
from asyncsync.buckets import Plan, plan_buckets
from asyncsync.deltas import Renewal, apply, grain_of
from asyncsync.engines import EngineReceipt
from asyncsync.errors import LinkLostError, OutOfStepError
from asyncsync.messages import STORES, EngineStatus, Rendezvous, Store, Stored, UpdateOrder
from asyncsync.sending import OwnTensors
from asyncsync.transports import folder as folders
from asyncsync.transports.envelopes import Content, Inbox, Outbox
from asyncsync.transports.objects import ObjectsEngineLink
from asyncsync.transports.stores import StoreJoining, fetching_links
from asyncsync.weight_files import FileLayout, FileLayouts, Run, read_run, sliced
from asyncsync.weights import WeightSource
from tests.actors import Engine, Flat, Trainer
from tests.cancelling import CancelAt
from tests.engines import ToldEngine, change, failing, fills_are_noted, hanging, holds, synced, zoo
from tests.faulty import BUCKET, FaultyEngine, FaultyTrainer, weights
from tests.sample import Zoo, content, contents, fingerprint, random_bytes
from tests.test_delta_updates import nudge, were_deltas

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
EACH = pytest.mark.parametrize("store", STORES)
NEVER = threading.Event()


@pytest.fixture
def options(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of a synchronizer that goes over a store."""
    if store == "objects":
        request.getfixturevalue("ray_cluster")
        return {"transport": store}
    return {"transport": store, "folder": tmp_path / "weights"}


def there(folder: Path) -> list[str]:
    """What lies in a folder, but for the link to the newest: versions by their number, hidden ones, too."""
    names = (path.name for path in folder.iterdir() if path.name != "latest")
    return sorted(name.partition("-")[0] for name in names)


async def emptied() -> bool:
    """Whether nothing is left in the object store, once Ray has heard of everything."""
    gc.collect()
    untyped: Any = ray
    total = untyped.cluster_resources()["object_store_memory"]
    for _ in range(1000):
        if untyped.available_resources().get("object_store_memory") == total:
            return True
        await asyncio.sleep(0.02)
    return False


async def held_here(at_most: int = 0) -> int:
    """How many objects this process holds references to; Ray's threads may take a moment to let go of the last."""
    worker: Any = ray._private.worker.global_worker
    for _ in range(500):
        gc.collect()
        if (held := len(worker.core_worker.get_all_reference_counts())) <= at_most:
            break
        await asyncio.sleep(0.01)
    return held


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize("bucket_size", [64, 1000, 1 << 20])
def test_every_kind_of_tensor_lies_in_files_that_anyone_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_size: int, whole_tensors: bool
) -> None:
    monkeypatch.setattr("asyncsync.weight_files.FILE_SIZE", 700)
    zoo = Zoo(3)
    snapshot = WeightSource(zoo).read()
    plan = plan_buckets(snapshot.specs, bucket_size, whole_tensors=whole_tensors)
    layout = FileLayout(plan)
    assert len(layout.files) > 2
    writing = folders._Writing(tmp_path / "v", layout, {"version": "1"})
    buffer = torch.empty(plan.largest_bucket, dtype=torch.uint8)
    for bucket in plan.buckets:
        OwnTensors(plan, snapshot.tensors).fill(bucket, buffer[: bucket.nbytes], NEVER)
        writing.write(memoryview(buffer[: bucket.nbytes].numpy()))  # type: ignore[arg-type]
    writing.complete(0)
    writing.close()
    loaded = {
        name: tensor for path in (tmp_path / "v").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert loaded.keys() == {spec.name for spec in plan.specs}
    raw = cast("dict[str, Any]", layout.describe()["raw"])
    assert "matrix_complex128" in raw
    for name, tensor in loaded.items():
        assert content(tensor) == contents(zoo)[name]
        original = zoo.state_dict()[name]
        if name not in raw:
            assert (tensor.dtype, tensor.shape) == (original.dtype, original.shape)
            assert tensor.data_ptr() % tensor.dtype.itemsize == 0
    for file in layout.files:
        header = layout.header(layout.files.index(file), {"version": "1"})
        assert len(header) % 64 == 0
        assert (tmp_path / "v" / file.name).stat().st_size == len(header) + file.nbytes


def test_a_run_is_read_in_slices_that_cover_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.weight_files._SLICE", 10)
    run = Run(2, 100, ((0, 3), (5, 30), (64, 69)))
    parts = list(sliced(run))
    assert [part.start for part in parts] == [100, 110, 120, 130]
    covered = [byte for part in parts for start, stop in part.spans for byte in range(start, stop)]
    assert covered == [*range(3), *range(5, 30), *range(64, 69)]


# -- updates ----------------------------------------------------------------------------------------------------------


@EACH
@BOTH
@pytest.mark.asyncio
async def test_every_kind_of_tensor_arrives_bit_for_bit(options: dict[str, Any], store: Store, staged: bool) -> None:
    for bucket_size in (256, 1 << 20):
        async with synced(staged=staged, bucket_size=bucket_size, **options) as (trainer, engines, synchronizer):
            for version in (1, 2, 3):
                update = await synchronizer.update_weights()
                assert update.version == version
                assert all(holds(engine, trainer) for engine in engines)
                assert [outcome.transport for outcome in update.outcomes] == [store] * 2
                assert [outcome.digest for outcome in update.outcomes] == [update.digest] * 2
                change(trainer)
            joining = {"open_group", "join_group", "leave_group"}
            assert not joining & set(engines[0].calls), "no engine is in any group"


class Elsewhere(ToldEngine):
    """An engine that is on another node."""

    async def describe_engine(self) -> EngineStatus:
        return replace(await super().describe_engine(), node="elsewhere")


@BOTH
@pytest.mark.asyncio
async def test_four_ways_to_four_engines_from_one_reading(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    filled = fills_are_noted(monkeypatch)
    trainer, read = Zoo(1), list[int]()

    def give() -> nn.Module:
        read.append(1)
        return trainer

    ways = ("shared", "broadcast", "objects", "folder")
    engines = [ToldEngine(zoo(50 + index), staged=staged or index != 1) for index in range(4)]
    by_engine = dict(zip(map(id, engines), ways, strict=True))
    async with WeightSynchronizer(
        give,
        engines,
        bucket_size=1024,
        timeout=60,
        folder=tmp_path,
        transport=lambda engine: by_engine[id(engine)],  # type: ignore[arg-type,return-value]
    ) as synchronizer:
        await synchronizer.update_weights()
        for _ in range(3):
            change(trainer)
            filled.clear()
            read.clear()
            update = await synchronizer.update_weights()
            assert (len(read), filled) == (1, list(range(update.buckets)))
            assert all(holds(engine, trainer) for engine in engines)
            assert [outcome.transport for outcome in update.outcomes] == list(ways)
        engines[2].before["receive_weights"] = failing(OSError("no"))
        change(trainer)
        with pytest.raises(asyncsync.EngineError, match="OSError: no") as caught:
            await synchronizer.update_weights()
        assert caught.value.update is not None
        assert [holds(engine, trainer) for engine in engines] == [True, True, False, True]
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in engines)


@EACH
@pytest.mark.asyncio
async def test_a_joiner_costs_no_connecting_and_gets_the_version_the_same_way(options: dict[str, Any]) -> None:
    async with synced(count=1, **options) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        cohorts = [cohort.connections for cohort in synchronizer._connection._cohorts]
        joiner = ToldEngine(zoo(60))
        engines[0].joined.clear()
        await synchronizer.add_engine(joiner)
        assert holds(joiner, trainer)
        assert "open_group" not in joiner.calls
        assert engines[0]._asyncsync.receiver.connections == ()
        for _ in range(2):
            change(trainer)
            await synchronizer.update_weights()
            assert holds(joiner, trainer)
        await synchronizer.remove_engine(engines[0])
        change(trainer)
        await synchronizer.update_weights()
        assert holds(joiner, trainer)
        assert not holds(engines[0], trainer)
        assert [cohort.connections for cohort in synchronizer._connection._cohorts] == cohorts, "and none is made anew"


@EACH
@pytest.mark.asyncio
async def test_an_engine_that_begins_anew_is_asked_anew(options: dict[str, Any]) -> None:
    async with synced(**options) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        asyncsync.ModuleEngine.__init__(engines[0], zoo(70))  # as in a new process
        change(trainer)
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in engines)


@EACH
@pytest.mark.asyncio
async def test_each_rank_of_an_engine_fetches_for_itself(options: dict[str, Any], store: Store) -> None:
    trainer, ranks = Zoo(1), [ToldEngine(zoo(50)), ToldEngine(zoo(51), staged=False)]
    async with WeightSynchronizer(trainer, [ranks], bucket_size=1024, **options) as synchronizer:
        for _ in range(2):
            update = await synchronizer.update_weights()
            assert all(holds(rank, trainer) for rank in ranks)
            assert update.outcomes[0].transport == store
            change(trainer)


@EACH
@BOTH
@pytest.mark.asyncio
async def test_two_sources_have_a_place_each(options: dict[str, Any], store: Store, staged: bool) -> None:
    model = nn.ModuleDict({"a": Zoo(1), "b": nn.Linear(7, 5)})
    ranks = [asyncsync.TrainerRank(nn.ModuleDict({name: model[name]})) for name in ("a", "b")]
    engine = ToldEngine(nn.ModuleDict({"a": zoo(2), "b": nn.Linear(7, 5)}), staged=staged)
    async with WeightSynchronizer([[rank] for rank in ranks], [engine], bucket_size=256, **options) as synchronizer:
        for _ in range(3):
            update = await synchronizer.update_weights()
            assert holds(engine, model)
            change(model)
        joiner = ToldEngine(nn.ModuleDict({"a": zoo(3), "b": nn.Linear(7, 5)}))
        await synchronizer.add_engine(joiner)
        assert contents(joiner.module) == contents(engine.module)
        if store == "folder":
            published = asyncsync.read_weights(options["folder"])
            assert (published.version, published.digest) == (3, update.digest)
            assert {name: content(tensor) for name, tensor in published.tensors.items()} == contents(engine.module)
    for rank in ranks:
        rank._asyncsync.close()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("objects", r"Elsewhere-0: it takes nothing from the object store, only from its own groups"),
        ("folder", r"Elsewhere-0: it takes nothing from a folder"),
        (lambda engine: "folder", r"Elsewhere-0: it takes nothing from a folder"),
        (lambda engine: "post", r"for Elsewhere-0 'post' was chosen, and not one of auto, shared, .*folder"),
        (lambda engine: 1 // 0, r"no transport was chosen for Elsewhere-0: ZeroDivisionError"),
    ],
)
@pytest.mark.asyncio
async def test_what_an_engine_cannot_take_is_told_by_name_before_anything(
    chosen: Any, said: str, tmp_path: Path
) -> None:
    class Closed(Elsewhere):
        async def describe_engine(self) -> EngineStatus:
            return replace(await super().describe_engine(), stores=())

    Closed.__name__ = "Elsewhere"
    engine = Closed(zoo(50))
    async with WeightSynchronizer(Zoo(1), [engine], transport=chosen, folder=tmp_path) as synchronizer:
        with pytest.raises(ConnectError, match=said):
            await synchronizer.update_weights()
    assert set(engine.calls) == {"describe_engine"}


@pytest.mark.asyncio
async def test_a_folder_that_was_not_given_or_cannot_be_written_is_told() -> None:
    with pytest.raises(ValueError, match="give folder="):
        WeightSynchronizer(Zoo(1), [ToldEngine(zoo(2))], transport="folder")
    with pytest.raises(TypeError, match="folder must be a path"):
        WeightSynchronizer(Zoo(1), [ToldEngine(zoo(2))], folder=3)  # type: ignore[arg-type]
    async with synced(transport=lambda engine: "folder") as (_, _, synchronizer):
        with pytest.raises(ConnectError, match=r"ToldEngine-0, ToldEngine-1: folder= was not given"):
            await synchronizer.update_weights()
    async with synced(transport="folder", folder="/proc/nowhere") as (_, engines, synchronizer):
        with pytest.raises(ConnectError, match="weights cannot be stored in /proc/nowhere"):
            await synchronizer.update_weights()
        assert "receive_weights" not in engines[0].calls
    base = {"connection": "c", "backend": "gloo", "transport": "folder", "join_timeout": 1, "operation_timeout": 1}
    with pytest.raises(ConnectError, match="only the source's end"):
        StoreJoining(Rendezvous(**base, rank=1, world_size=2))  # type: ignore[arg-type]
    with pytest.raises(ConnectError, match="protocol"):
        StoreJoining(Rendezvous(**base, rank=0, world_size=1, protocol=1))  # type: ignore[arg-type]


# -- what a folder shows ----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.asyncio
async def test_a_version_is_seen_once_engines_serve_it_and_two_are_kept(tmp_path: Path, staged: bool) -> None:
    seen: list[list[str]] = []
    async with synced(staged=staged, transport="folder", folder=tmp_path) as (trainer, engines, synchronizer):

        async def look() -> None:
            seen.append([name for name in there(tmp_path) if name.startswith("v")])

        for version in range(1, 5):
            engines[1].after["finish_weight_update"] = look
            await synchronizer.update_weights()
            assert [int(name[1:]) for name in there(tmp_path)] == [max(1, version - 1), version][-min(2, version) :]
            assert asyncsync.read_weights(tmp_path).version == version
            change(trainer)
        assert [len(names) for names in seen] == [0, 1, 2, 2], "not before"
        engines[1].before["finish_weight_update"] = failing(OSError("no"))
        synchronizer._on_engine_failure = "abort"
        with pytest.raises(asyncsync.EngineError):
            await synchronizer.update_weights()
        # One has switched, and the other has failed: the version is out.
        assert asyncsync.read_weights(tmp_path).version == synchronizer.weight_version == 5
        await synchronizer.update_weights()
        assert asyncsync.read_weights(tmp_path).version == synchronizer.weight_version
        assert len(there(tmp_path)) == 2


@pytest.mark.parametrize("call", ["receive_weights", "pause_generation"])
@pytest.mark.asyncio
async def test_a_version_that_failed_is_never_seen_and_the_next_update_takes_it_away(tmp_path: Path, call: str) -> None:
    async with synced(transport="folder", folder=tmp_path, on_engine_failure="abort") as (trainer, engines, one):
        first = await one.update_weights()
        for _ in range(2):
            change(trainer)
            engines[1].before[call] = failing(OSError("no"))
            with pytest.raises(asyncsync.EngineError):
                await one.update_weights()
            published = asyncsync.read_weights(tmp_path)
            assert (published.version, published.digest) == (1, first.digest)
            assert there(tmp_path) == [".asyncsync", "v00000001"]
        await one.update_weights()
        assert there(tmp_path) == ["v00000001", "v00000002"]
        assert asyncsync.read_weights(tmp_path).version == 2
        change(trainer)
        engines[1].before[call] = failing(OSError("no"))
        with pytest.raises(asyncsync.EngineError):
            await one.update_weights()
    for _ in range(500):  # it is taken away on a thread of its own
        if not any(name.startswith(".") for name in os.listdir(tmp_path)):
            break
        await asyncio.sleep(0.01)
    assert there(tmp_path) == ["v00000001", "v00000002"]


@pytest.mark.asyncio
async def test_only_what_nobody_writes_to_any_more_and_only_ours_is_taken_away(tmp_path: Path) -> None:
    for name in (".asyncsync-v00000009-0000000000000001", ".asyncsync-v00000009-0000000000000002", ".cache", "v1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".writing").touch()
    (tmp_path / ".asyncsync-v00000009-0000000000000003").mkdir()  # killed before it had a lock
    (tmp_path / "notes.txt").touch()
    held = os.open(tmp_path / ".asyncsync-v00000009-0000000000000002" / ".writing", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    async with synced(transport="folder", folder=tmp_path) as (_, _, synchronizer):
        await synchronizer.update_weights()
        names = set(os.listdir(tmp_path))
    os.close(held)
    published = {name for name in names if folders.PUBLISHED.fullmatch(name)}
    assert names - published == {
        ".asyncsync-v00000009-0000000000000002", ".cache", "v1", "notes.txt", "latest",
    }  # fmt: skip
    assert len(published) == 1


def written(folder: Path, part: int = 0) -> Path:
    """The one file of a part of a version that is not published."""
    (file,) = folder.glob(f".asyncsync-*/model-{f'{part}-' if part else ''}00001-of-*.safetensors")
    return file


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def other_weights(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(re.sub(rb'"version":"\d+"', b'"version":"7"', data))


def other_changes(path: Path) -> None:
    path.write_bytes(re.sub(rb'"epoch": "\w+"', b'"epoch": "7"', path.read_bytes()))


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def gone(path: Path) -> None:
    path.unlink()


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@BOTH
@pytest.mark.parametrize("harm", [truncate, other_weights, one_bit, gone, a_link])
@pytest.mark.asyncio
async def test_what_is_not_what_was_written_is_an_error_and_staged_engines_keep_what_they_serve(
    tmp_path: Path, harm: Callable[[Path], None], staged: bool
) -> None:
    async with synced(staged=staged, transport="folder", folder=tmp_path) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        held = contents(engines[0].module)
        change(trainer)

        async def do() -> None:
            harm(written(tmp_path))

        synchronizer._on_engine_failure = "abort"
        engines[0].before["receive_weights"] = do
        with pytest.raises(TransferError) as caught:
            await synchronizer.update_weights()
        said: dict[Callable[[Path], None], str] = {
            truncate: "something else",
            other_weights: "something else",
            one_bit: "digest",
        }
        assert said.get(harm, "cannot be read") in str(caught.value)
        if staged:
            assert contents(engines[0].module) == held
            assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.UNCHANGED] * 2
        assert asyncsync.read_weights(tmp_path).version == 1
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in engines)


@pytest.mark.asyncio
async def test_an_engine_that_does_not_find_the_folder_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    class Apart(ToldEngine):
        """An engine whose machine has another folder there."""

        async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
            stored = tuple(replace(each, folder=str(tmp_path / "not mounted")) for each in order.stored)
            return await super().receive_weights(replace(order, stored=stored))

    trainer, engines = Zoo(1), [ToldEngine(zoo(50)), Apart(zoo(51))]
    async with WeightSynchronizer(trainer, engines, transport="folder", folder=tmp_path / "w") as synchronizer:
        with pytest.raises(TransferError, match=r"Apart-1: the weights cannot be read: .*not mounted") as caught:
            await synchronizer.update_weights()
        assert caught.value.update is not None
        assert holds(engines[0], trainer)
        assert asyncsync.read_weights(tmp_path / "w").version == 1


@BOTH
@pytest.mark.asyncio
async def test_a_full_disk_is_told_with_what_was_needed_and_nothing_is_half_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    async with synced(staged=staged, transport="folder", folder=tmp_path) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        held = contents(engines[0].module)
        change(trainer)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def little(path: object) -> os.statvfs_result:
            return os.statvfs_result((1, 1, 1, 1000, 1000, 1, 1, 1, 0, 255))

        for where, what, said in (
            ("asyncsync.transports.folder.os.statvfs", little, "1 kB are free"),
            ("asyncsync.weight_files.os.pwritev", full, "No space left"),
            ("asyncsync.transports.folder.os.fsync", full, "No space left"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(where, what)
                with pytest.raises(TransferError) as caught:
                    await synchronizer.update_weights()
            assert re.search(rf"the weights, 3\.07 kB, cannot be written to .*{said}", str(caught.value))
            assert contents(engines[0].module) == held
            assert asyncsync.read_weights(tmp_path).version == 1
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in engines)
        assert there(tmp_path) == ["v00000001", "v00000002"]


@pytest.mark.asyncio
async def test_a_version_that_cannot_be_published_is_an_error_of_an_update_that_engines_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with synced(transport="folder", folder=tmp_path) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        change(trainer)

        def fail(*_: object) -> None:
            raise OSError("no")

        with monkeypatch.context() as patched:
            patched.setattr("asyncsync.transports.folder._publish", fail)
            with pytest.raises(TrainerError, match=r"engines serve version 2, but .* cannot be published") as caught:
                await synchronizer.update_weights()
        assert caught.value.update is not None
        assert (caught.value.update.version, synchronizer.weight_version) == (2, 2)
        assert all(holds(engine, trainer) for engine in engines)
        assert asyncsync.read_weights(tmp_path).version == 1
        await synchronizer.update_weights()
        assert asyncsync.read_weights(tmp_path).version == 3
        assert there(tmp_path) == ["v00000001", "v00000003"]


@pytest.mark.asyncio
async def test_engines_over_other_ways_and_a_folder_for_other_readers(tmp_path: Path) -> None:
    async with synced(folder=tmp_path) as (trainer, _, synchronizer):
        for _ in range(2):
            update = await synchronizer.update_weights()
            assert [outcome.transport for outcome in update.outcomes] == ["shared"] * 2
            assert asyncsync.read_weights(tmp_path).digest == update.digest
            change(trainer)


# -- what differs, in a folder ----------------------------------------------------------------------------------------


def changes(folder: Path) -> list[Path]:
    """The files of what differs from the last update, in a version that is not published."""
    return sorted(folder.glob(".asyncsync-*/.changes-*"))


@pytest.mark.asyncio
async def test_what_differs_lies_beside_the_whole_until_it_is_published(tmp_path: Path) -> None:
    flats = {name: Flat(4, (300,)) for name in ("a", "b")}
    model = nn.ModuleDict(flats)
    ranks = [asyncsync.TrainerRank(nn.ModuleDict({name: flat})) for name, flat in flats.items()]
    engine = ToldEngine(nn.ModuleDict({"a": Flat(4, (300,)), "b": Flat(4, (300,))}))
    options: dict[str, Any] = {"transport": "folder", "folder": tmp_path, "delta": True, "bucket_size": 1200}
    seen: list[dict[str, int]] = []

    async def look() -> None:
        seen.append({path.name: path.stat().st_size for path in changes(tmp_path)})
        assert {path.stat().st_mode for path in changes(tmp_path)} <= {written(tmp_path, 1).stat().st_mode}

    async with WeightSynchronizer([[rank] for rank in ranks], [engine], **options) as synchronizer:
        for step in range(3):
            with torch.no_grad():
                for name, flat in flats.items():
                    flat.weights[step][7] += 1
                    flat.weights[3].add_(step if name == "b" else 0)  # a bucket of which all differs, after the first
            engine.before["receive_weights"] = look
            update = await synchronizer.update_weights()
            assert holds(engine, model)
            published = asyncsync.read_weights(tmp_path)
            assert published.digest == update.digest
            assert {path.suffix for path in published.path.iterdir()} == {".json", ".safetensors"}
        assert (update.outcomes[0].bytes or 0) - 1200 < 100
    assert [sorted(names) for names in seen] == [[], *[[".changes-0", ".changes-1"]] * 2]
    assert max(size for names in seen for size in names.values()) < 1200, "what is whole is there once"
    for rank in ranks:
        rank._asyncsync.close()


@pytest.mark.asyncio
async def test_for_other_readers_alone_no_file_tells_what_differs(tmp_path: Path) -> None:
    async with synced(folder=tmp_path, transport="broadcast", delta=True) as (trainer, engines, synchronizer):
        for version in range(1, 3):
            seen: list[Path] = []

            async def look(seen: list[Path] = seen) -> None:
                assert written(tmp_path)
                seen += changes(tmp_path)

            engines[0].before["finish_weight_update"] = look
            nudge(trainer, version)
            update = await synchronizer.update_weights()
            assert were_deltas(update) == [version > 1] * 2
            assert not seen
            assert asyncsync.read_weights(tmp_path).digest == update.digest


@pytest.mark.asyncio
async def test_each_engine_reads_from_the_folder_what_it_needs(tmp_path: Path) -> None:
    async with synced(transport="folder", folder=tmp_path, delta=True, count=3) as (trainer, engines, synchronizer):
        asyncsync.ModuleEngine.__init__(engines[1], zoo(60), staged=False)

        def lose() -> None:
            loader = engines[1]._asyncsync._loader
            assert loader is not None
            loader.base_epoch = None

        def begin_anew() -> None:
            asyncsync.ModuleEngine.__init__(engines[2], zoo(70))  # as in a new process

        for happens, wanted in (
            (None, [False, False, False]),
            (None, [True, True, True]),
            (lose, [True, False, True]),
            (begin_anew, [True, True, False]),
            (None, [True, True, True]),
        ):
            if happens is not None:
                happens()
            nudge(trainer, 1)
            update = await synchronizer.update_weights()
            assert were_deltas(update) == wanted
            assert [outcome.bytes == update.bytes for outcome in update.outcomes] == [not delta for delta in wanted]
            assert [holds(engine, trainer) for engine in engines] == [True] * 3


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(16))


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def another_base(path: Path) -> None:
    path.write_bytes(re.sub(rb'"against": "\w+"', b'"against": "7"', path.read_bytes()))


def a_large_envelope(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"\n") + 1
    data[at : at + 16] = (1).to_bytes(8, "little") + (2**62).to_bytes(8, "little")
    path.write_bytes(data)


def in_a_message(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-32] ^= 1  # a value, of the last bucket
    path.write_bytes(data)


HARMS: dict[Callable[[Path], None], str] = {
    truncate: r"\.changes-0: it has \d+ bytes, and speaks of",
    longer: r"\.changes-0: it has \d+ bytes, and speaks of",
    half: "it ends before bucket|and speaks of",
    other_changes: "of another update",
    another_base: "of another update, or against another",
    a_large_envelope: "an envelope speaks of 4611686018427387904 bytes",
    gone: "cannot be read",
    a_link: "cannot be read",
    in_a_message: "digest",
}


@BOTH
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.asyncio
async def test_changes_that_are_not_what_was_written_are_an_error_and_nothing_is_written(
    tmp_path: Path, harm: Callable[[Path], None], staged: bool
) -> None:
    async with synced(staged=staged, transport="folder", folder=tmp_path, delta=True, on_engine_failure="abort") as (
        trainer,
        engines,
        synchronizer,
    ):
        await synchronizer.update_weights()
        held = contents(engines[0].module)
        nudge(trainer, 0)
        nudge(trainer, 0, only=[list(trainer.state_dict())[-1]])
        files = len(os.listdir("/proc/self/fd"))

        async def do() -> None:
            (path,) = changes(tmp_path)
            harm(path)

        engines[0].before["receive_weights"] = do
        with pytest.raises(TransferError, match=HARMS[harm]) as caught:
            await synchronizer.update_weights()
        del caught
        assert len(os.listdir("/proc/self/fd")) <= files + 1, "the source's lock"
        if staged or harm is not in_a_message:
            assert contents(engines[0].module) == held
        assert asyncsync.read_weights(tmp_path).version == 1
        for _ in range(2):
            await synchronizer.update_weights()
            assert all(holds(engine, trainer) for engine in engines)
            nudge(trainer, 1)


def stored_changes(folder: Path) -> tuple[Plan, Stored, Tensor, Tensor]:
    """Two buckets in a folder, of which the second differs in part: and what an engine holds, and is to hold."""
    plan = plan_buckets(WeightSource({name: torch.zeros(1024, dtype=torch.uint8) for name in "ab"}).read().specs, 1024)
    whole, old = random_bytes(1024, 1), random_bytes(1024, 2)
    new = old.clone()
    new[::5] ^= 1
    renewal = Renewal(grain_of(plan, plan.buckets[1]), old.clone())
    renewal.take(0, new)
    changes = renewal.changes()
    assert changes is not None
    link = folders.FolderSourceLink("c", folder, 0)
    link.order = UpdateOrder(
        epoch=2, version=2, connections=("c",), plan_digest="", policy="drain", base_epoch=None, timeout=1, against=1,
        deltas=("c",),
    )  # fmt: skip
    link.begin(plan, NEVER)
    outbox = Outbox(link.start_send_changes, whole=False)
    for flat in (whole, new):
        link.start_send(flat)
    outbox.start_send(0, Content.WHOLE, whole)
    outbox.start_send(1, Content.DELTA, changes.write(torch.empty(changes.nbytes, dtype=torch.uint8)))
    link.complete(NEVER)
    assert len(plan.buckets) == 2
    return plan, link.place(), torch.cat([torch.zeros(1024, dtype=torch.uint8), old]), torch.cat([whole, new])


@pytest.mark.parametrize("end", ["", "stopped", "closed before", "cut off meanwhile"])
def test_reading_what_differs_ends_between_two_slices_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("asyncsync.weight_files._SLICE", 100)
    plan, stored, held, wanted = stored_changes(tmp_path)
    files, slices, stop = len(os.listdir("/proc/self/fd")), list[int](), threading.Event()

    def read(fd: int, at: int, run: Run, view: memoryview) -> None:
        slices.append(run.file)
        if slices.count(1) == 2 and end == "stopped":
            stop.set()
        if slices.count(1) == 2 and end == "cut off meanwhile":
            os.truncate(Path(stored.folder, ".changes-0"), 300)
        read_run(fd, at, run, view)

    monkeypatch.setattr(folders, "read_run", read)
    link = folders.FolderEngineLink("c", plan, stored, 0, FileLayouts(), 1)
    link.closed = end == "closed before"

    def receive() -> None:
        link.arena(2, plan.arena_nbytes, stop)
        inbox = Inbox(link, 2, None, plan.arena_nbytes, stop)
        for bucket in plan.buckets:
            content, body = inbox.receive(
                bucket.nbytes, bucket.start, lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8)
            )
            assert body is not None
            part = held[bucket.start : bucket.stop]
            if content is Content.WHOLE:
                part.copy_(body)
            else:
                apply(body, grain_of(plan, bucket).runs, part)

    if end:
        with pytest.raises(TransferError, match="cannot be read" if end == "cut off meanwhile" else "stopped"):
            receive()
        assert slices.count(1) == (0 if end == "closed before" else 2)
    else:
        receive()
        assert slices == [0] * 11 + [1] * 5
        assert torch.equal(held, wanted)
    link.close()
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("harm", ["is cancelled", "finds a full disk"])
@BOTH
@pytest.mark.asyncio
async def test_a_source_that_fails_as_it_stores_what_differs_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: bool, harm: str
) -> None:
    async with synced(staged=staged, transport="folder", folder=tmp_path, delta=True) as (trainer, engines, one):
        await one.update_weights()
        held = contents(engines[0].module)
        files = len(os.listdir("/proc/self/fd"))
        loop, came, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        write, calls = folders._Writing.write_changes, list[int]()

        def fail(writing: folders._Writing, part: memoryview) -> None:
            calls.append(1)
            if len(calls) == 3:
                if harm == "finds a full disk":
                    raise OSError(errno.ENOSPC, "No space left on device")
                loop.call_soon_threadsafe(came.set)
                go_on.wait(10)
            write(writing, part)

        monkeypatch.setattr(folders._Writing, "write_changes", fail)
        nudge(trainer, 0)
        update = asyncio.ensure_future(one.update_weights())
        if harm == "is cancelled":
            await came.wait()
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            go_on.set()
        else:
            with pytest.raises(TransferError, match=r"cannot be written to .*No space left"):
                await update
        monkeypatch.undo()
        assert contents(engines[0].module) == held
        assert asyncsync.read_weights(tmp_path).version == 1
        for _ in range(2):
            done = await one.update_weights()
            assert all(holds(engine, trainer) for engine in engines)
            nudge(trainer, 1)
        assert were_deltas(done) == [True, True]
        assert there(tmp_path) == ["v00000002", "v00000003"]
        assert len(os.listdir("/proc/self/fd")) <= files


def test_a_name_that_no_file_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    async def update() -> None:
        trainer, engine = {"__metadata__": torch.ones(3)}, nn.Module()
        engine.register_parameter("__metadata__", nn.Parameter(torch.zeros(3)))
        told = ToldEngine(engine)
        async with WeightSynchronizer(trainer, [told], transport="folder", folder=tmp_path) as synchronizer:
            with pytest.raises(PlanError, match="__metadata__"):
                await synchronizer.update_weights()
        assert "receive_weights" not in told.calls

    asyncio.run(update())


# -- objects ----------------------------------------------------------------------------------------------------------


def told(came: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """Tell that it came here, and never come back."""

    async def tell_and_hang() -> None:
        came.set()
        await hanging()()

    return tell_and_hang


@pytest.mark.asyncio
async def test_an_object_that_is_none_of_the_weights_is_refused(ray_cluster: None) -> None:
    plan = plan_buckets(WeightSource({"a": torch.zeros(100, dtype=torch.uint8)}).read().specs)
    flat = torch.zeros(100, dtype=torch.uint8)
    right = random_bytes(100, 1)

    def fetch(value: object) -> None:
        link = ObjectsEngineLink("c", plan, Stored(objects=[cluster.put_object(value)]))
        link.arena(1, 100, NEVER)
        link.wait(link.start_receive(flat), NEVER)

    await asyncio.to_thread(fetch, right.numpy())
    assert torch.equal(flat, right)
    wrong: list[object] = [right[:99].numpy(), right.view(10, 10).numpy(), np.zeros(100, np.int8), b"x" * 100, {}]
    for value in wrong:
        with pytest.raises(TransferError, match="none of the weights"):
            await asyncio.to_thread(fetch, value)
    assert torch.equal(flat, right)
    with pytest.raises(TransferError, match="2 objects, for 1 bucket"):
        ObjectsEngineLink("c", plan, Stored(objects=[None, None])).arena(1, 100, NEVER)
    order = UpdateOrder(
        epoch=1, version=1, connections=("a",), plan_digest="", policy="drain", base_epoch=None, timeout=1,
        stored=(Stored(), Stored()),
    )  # fmt: skip
    with pytest.raises(OutOfStepError, match="2 stores, and there are"):
        fetching_links(order, plan, FileLayouts())


@pytest.mark.asyncio
async def test_a_fetch_ends_when_it_is_stopped_or_closed(ray_cluster: None) -> None:
    plan = plan_buckets(WeightSource({"a": torch.zeros(100, dtype=torch.uint8)}).read().specs)
    pending = never.remote()
    for end in ("stop", "close"):
        link, stop = ObjectsEngineLink("c", plan, Stored(objects=[pending])), threading.Event()
        waiting = asyncio.ensure_future(
            asyncio.to_thread(link.wait, link.start_receive(torch.zeros(100, dtype=torch.uint8)), stop)
        )
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        stop.set() if end == "stop" else link.close()
        async with asyncio.timeout(1):
            with pytest.raises(LinkLostError, match="stopped"):
                await waiting
    ray.cancel(pending, force=True)


@BOTH
@pytest.mark.asyncio
async def test_the_object_store_is_empty_after_success_failure_and_cancellation(
    ray_cluster: None, staged: bool
) -> None:
    async with synced(staged=staged, transport="objects", on_engine_failure="abort") as (trainer, engines, one):
        await one.update_weights()
        before = await held_here()

        async def look() -> None:
            assert await held_here(before) == before, "before the commit"
            session = engines[0]._asyncsync.receiver.session
            assert session is not None
            assert session.order.stored == ()

        for _ in range(3):
            change(trainer)
            engines[0].before["finish_weight_update"] = look
            await one.update_weights()
            assert await held_here(before) == before
        for call in ("receive_weights", "finish_weight_update"):
            engines[1].before[call] = failing(OSError("no"))
            with pytest.raises(asyncsync.EngineError) as caught:
                await one.update_weights()
            assert await held_here(before) == before, "though the error still lives, with all its frames"
            del caught
            came = asyncio.Event()
            engines[1].before[call] = told(came)
            update = asyncio.ensure_future(one.update_weights())
            await came.wait()
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert await held_here(before) == before
        await one.update_weights()
        assert all(holds(engine, trainer) for engine in engines)


# -- any moment -------------------------------------------------------------------------------------------------------


@EACH
@BOTH
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "deltas"])
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_an_update_that_is_cancelled_at_any_moment_leaves_nothing(
    options: dict[str, Any], store: Store, staged: bool, delta: bool
) -> None:
    async with synced(staged=staged, delta=delta, **options) as (trainer, engines, synchronizer):
        await synchronizer.update_weights()
        before = await held_here() if store == "objects" else 0
        for at in range(200):
            nudge(trainer, at)
            cancelling = CancelAt(synchronizer._update(), at, "waiting" if at % 2 else "handed over")
            task = asyncio.ensure_future(_awaited(cancelling))
            done, _ = await asyncio.wait([task], timeout=60)
            assert done
            if store == "folder":
                assert asyncsync.read_weights(options["folder"]).version == synchronizer.weight_version
            else:
                assert await held_here(before) == before
            if not cancelling.reached:
                break
        else:
            pytest.fail("it never came to its end")
        await synchronizer.update_weights()
        assert all(holds(engine, trainer) for engine in engines)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@EACH
@pytest.mark.exhaustive
@pytest.mark.asyncio
async def test_memory_and_files_stay_flat_over_many_updates(options: dict[str, Any]) -> None:
    async def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), await held_here() if options["transport"] == "objects" else 0

    async with synced(**options) as (trainer, engines, synchronizer):
        for index in range(200):
            change(trainer)
            await synchronizer.update_weights()
            if index == 20:
                before, threads = await used(), threading.active_count()
        assert await used() == before
        assert threading.active_count() <= threads
        assert all(holds(engine, trainer) for engine in engines)
    if options["transport"] == "objects":
        assert await emptied()


# -- processes --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def processes(count: int, **options: Any) -> AsyncIterator[tuple[Any, list[Any], WeightSynchronizer]]:
    """A trainer and engines, each in a process of its own."""
    trainer = FaultyTrainer.remote(partial(weights, 1))
    engines = [FaultyEngine.remote(partial(weights, 0), staged=index != 1) for index in range(count)]
    async with WeightSynchronizer(trainer, engines, bucket_size=BUCKET, timeout=60, **options) as synchronizer:
        yield trainer, engines, synchronizer
    for actor in (trainer, *engines):
        ray.kill(actor)


@pytest.mark.ray
@pytest.mark.asyncio
async def test_between_processes_over_both_stores(ray_cluster: None, tmp_path: Path) -> None:
    trainer, engine = Trainer.remote(partial(Zoo, 1)), Engine.remote(partial(zoo, 2))
    for store, delta in zip((*STORES, "folder"), (False, False, True), strict=True):
        options: dict[str, Any] = {"transport": store, "folder": tmp_path, "delta": delta}
        async with WeightSynchronizer(trainer, [engine], **options) as synchronizer:
            for number in range(2):
                await trainer.change.remote()
                update = await synchronizer.update_weights()
                assert await engine.contents.remote() == await trainer.contents.remote()
                assert (update.outcomes[0].transport, update.outcomes[0].delta) == (store, delta and number > 0)
                assert asyncsync.read_weights(tmp_path).digest == update.digest
    assert await emptied()
    for actor in (trainer, engine):
        ray.kill(actor)


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.asyncio
async def test_an_engine_and_a_trainer_that_are_killed_in_the_middle(ray_cluster: None, tmp_path: Path) -> None:
    # One of each store; the first is staged, the second is in place.
    by_engine: dict[str, str] = {}
    async with processes(3, folder=tmp_path, transport=lambda engine: by_engine[cluster.actor_key(engine)]) as (
        trainer,
        engines,
        synchronizer,
    ):
        by_engine |= dict(zip(map(cluster.actor_key, engines), ("objects", "folder", "objects"), strict=True))
        update = await synchronizer.update_weights()
        assert [outcome.transport for outcome in update.outcomes] == ["objects", "folder", "objects"]
        expected = fingerprint(weights(1))
        assert [await engine.read.remote() for engine in engines] == [(1, expected)] * 3
        assert await emptied()

        await trainer.hold.remote(partial(weights, 2))
        await engines[2].arm.remote("receive_weights", "is killed")
        with pytest.raises(asyncsync.EngineError, match="EngineActor-2 is gone") as caught:
            await synchronizer.update_weights()
        assert caught.value.update is not None
        expected = fingerprint(weights(2))
        assert [await engine.read.remote() for engine in engines[:2]] == [(2, expected)] * 2
        assert await emptied()
        await synchronizer.remove_engine(engines[2])

        await trainer.arm.remote("send_weights", "is killed")
        with pytest.raises(TrainerError, match="the trainer is gone"):
            await synchronizer.update_weights()
        assert (await engines[0].read.remote()) == (2, expected)
        assert await emptied()
        assert asyncsync.read_weights(tmp_path).version == 2
        left = written(tmp_path).parent
        async with WeightSynchronizer(weights(3), engines[:2], transport="folder", folder=tmp_path) as successor:
            update = await successor.update_weights()
            expected = fingerprint(weights(3))
            assert [await engine.read.remote() for engine in engines[:2]] == [(update.version, expected)] * 2
        assert left.name not in os.listdir(tmp_path), "whose writer has died"
        assert asyncsync.read_weights(tmp_path).version == update.version


class Owner:
    """Owns an object that never comes to be."""

    def __init__(self) -> None:
        self._object = never.remote()

    def give(self) -> list[Any]:
        return [self._object]

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
def never() -> None:
    """Run for ever."""
    threading.Event().wait()


@pytest.mark.faults
@pytest.mark.asyncio
async def test_an_object_whose_owner_has_died_is_a_lost_link(ray_cluster: None) -> None:
    owner: Any = ray.remote(num_cpus=0)(Owner).remote()
    plan = plan_buckets(WeightSource({"a": torch.zeros(100, dtype=torch.uint8)}).read().specs)
    link = ObjectsEngineLink("c", plan, Stored(objects=await owner.give.remote()))
    handle = link.start_receive(torch.zeros(100, dtype=torch.uint8))
    waiting = asyncio.ensure_future(asyncio.to_thread(link.wait, handle, NEVER))
    os.kill(await owner.pid.remote(), signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(LinkLostError, match="an object with weights is gone: OwnerDiedError"):
            await waiting


FULL = """
    import asyncio, ray, torch
    from torch import nn
    import asyncsync

    async def main():
        trainer, engine = nn.Linear(3000, 3000), asyncsync.ModuleEngine(nn.Linear(3000, 3000))
        async with asyncsync.WeightSynchronizer(trainer, [engine], transport="objects") as synchronizer:
            blocks = [ray.put(bytes(30 * 2**20)) for _ in range(2)]
            try:
                await synchronizer.update_weights()
            except asyncsync.TransferError as error:
                print(error)
            del blocks
            total = ray.cluster_resources()["object_store_memory"]
            while ray.available_resources().get("object_store_memory") != total:
                await asyncio.sleep(0.05)
            print(await synchronizer.update_weights())
            assert torch.equal(engine.module.weight, trainer.weight)

    system = {"local_fs_capacity_threshold": 0.001}
    size = 80 * 2**20
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=size, _system_config=system, log_to_driver=False)
    asyncio.run(main())
"""


@pytest.mark.exhaustive
def test_an_object_store_that_is_full_is_told_with_what_was_needed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL)], capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, ended.stderr
    refused, updated = ended.stdout.splitlines()[0], ended.stdout.splitlines()[-1]
    assert refused.startswith("the trainer") or "no room for the weights, 36 MB" in refused
    assert "no room for the weights, 36 MB" in ended.stdout
    assert updated.startswith("WeightUpdate(version=1, 1/1 engines")
