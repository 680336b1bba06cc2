"""Reading what was published in a folder, without a synchronizer."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import asyncsync
from asyncsync import NotReadyError, TransferError, WeightSynchronizer
from tests.engines import ToldEngine, change, holds, synced, zoo
from tests.sample import Zoo, content, contents

pytestmark = pytest.mark.asyncio


async def publish(folder: Path, count: int = 1) -> tuple[Zoo, asyncsync.WeightUpdate]:
    """Have a trainer publish some versions."""
    async with synced(folder=folder, count=1) as (trainer, _, synchronizer):
        for _ in range(count):
            change(trainer)
            update = await synchronizer.update_weights()
    return trainer, update


def held(weights: asyncsync.PublishedWeights) -> dict[str, bytes]:
    return {name: content(tensor) for name, tensor in weights.tensors.items()}


async def test_every_kind_of_tensor_is_read_under_every_name_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsync.weight_files.FILE_SIZE", 500)
    trainer, update = await publish(tmp_path, 3)
    weights = asyncsync.read_weights(tmp_path)
    assert (weights.version, weights.digest) == (3, update.digest)
    assert held(weights) == contents(trainer)
    assert list(weights.tensors) == [*contents(trainer)], "in order"
    for name, tensor in trainer.state_dict().items():
        assert (weights.tensors[name].dtype, weights.tensors[name].shape) == (tensor.dtype, tensor.shape)
    assert weights.tensors["tied"] is weights.tensors["weight"]
    older = asyncsync.read_weights(tmp_path, 2)
    assert older.version == 2
    assert older.digest != weights.digest
    zoo(5).load_state_dict(dict(weights.tensors))


async def test_the_folder_is_one_of_hugging_faces(tmp_path: Path) -> None:
    trainer, _ = await publish(tmp_path)
    latest = tmp_path / "latest"
    index = json.loads((latest / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        len(each) for name, each in contents(trainer).items() if name != "tied"
    )
    for name, file in index["weight_map"].items():
        assert content(load_file(latest / file)[name]) == contents(trainer)[name]
    assert not [name for name in os.listdir(latest) if name.startswith(".")]


async def test_what_is_mapped_stays_when_its_version_goes_and_is_written_to_here_alone(tmp_path: Path) -> None:
    trainer, _ = await publish(tmp_path)
    weights = asyncsync.read_weights(tmp_path)
    again = asyncsync.read_weights(tmp_path)
    expected = contents(trainer)
    with torch.no_grad():
        weights.tensors["weight"].zero_()
    assert held(again) == expected
    assert held(asyncsync.read_weights(tmp_path)) == expected
    shutil.rmtree(tmp_path)
    assert held(again) == expected


async def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotReadyError, match="nothing was published"):
            asyncsync.read_weights(folder)
    await publish(tmp_path)
    with pytest.raises(NotReadyError, match=r"version 7 is not in .*: there are v00000001-"):
        asyncsync.read_weights(tmp_path, 7)


def of_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        change(index)
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return harm


def truncated(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)


def one_bit(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def no_file(path: Path) -> None:
    next(path.glob("*.safetensors")).unlink()


def no_json(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{")


HARM: dict[str, Callable[[Path], None]] = {
    "truncated": truncated,
    "one bit": one_bit,
    "a file is gone": no_file,
    "no json": no_json,
    "another's": of_index(lambda index: index["metadata"].pop("asyncsync")),
    "a newer format": of_index(lambda index: index["metadata"]["asyncsync"].update(format=99)),
    "a path": of_index(lambda index: index["weight_map"].update(weight="../../etc/passwd")),
    "another name": of_index(lambda index: index["weight_map"].update(other=index["weight_map"].pop("weight"))),
    "another dtype": of_index(lambda index: index["metadata"]["asyncsync"]["parts"][0]["raw"].update(empty=["nn", []])),
}


@pytest.mark.parametrize("harm", HARM)
async def test_what_is_not_what_was_published_is_refused(tmp_path: Path, harm: str) -> None:
    await publish(tmp_path)
    HARM[harm](tmp_path / os.readlink(tmp_path / "latest"))
    with pytest.raises(TransferError, match=r"does not hold what was published|is not whole"):
        asyncsync.read_weights(tmp_path)


async def test_a_version_that_goes_as_it_is_read_is_looked_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(tmp_path / "one")
    await publish(tmp_path / "two", 3)
    read = asyncsync.reading._read

    def late(path: Path, check: bool) -> asyncsync.PublishedWeights:
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "one")
        (tmp_path / "two").rename(tmp_path / "one")
        return read(path, check)

    monkeypatch.setattr("asyncsync.reading._read", late)
    assert asyncsync.read_weights(tmp_path / "one").version == 3


async def test_another_site_brings_a_folders_weights_to_engines_of_its_own(tmp_path: Path) -> None:
    async with synced(folder=tmp_path) as (trainer, _, here):
        engine = ToldEngine(zoo(70))
        async with WeightSynchronizer(lambda: asyncsync.read_weights(tmp_path).tensors, [engine]) as there:
            for _ in range(3):
                change(trainer)
                update = await here.update_weights()
                brought = await there.update_weights()
                assert holds(engine, trainer)
                assert brought.digest == update.digest
                await asyncio.sleep(0)
