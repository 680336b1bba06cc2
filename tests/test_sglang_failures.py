"""SGLang engines that fail, stall or die in an update: each ends in time, says how it is, and harms no other."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync.errors import EngineError, PlanError, TransferError, WeightUpdateError
from asyncsync.report import EngineState
from asyncsync.testing import Probe, copied, serves, step
from tests import sglang_bed as bed
from tests.sglang_engines import PROMPT, SGLangSubject, SlimeHandle, over_http
from tests.tiny_model import greedy, save_tiny, tiny_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tiny: Path) -> AsyncIterator[SGLangSubject]:
    async with over_http(tiny) as subject:
        yield subject


class Bystander:
    """A second engine, of plain torch, that must be whole whatever becomes of the first."""

    def __init__(self) -> None:
        self.engine = asyncsync.ModuleEngine(tiny_model(7))

    async def serves_one_of(self, *models: nn.Module) -> None:
        async with self.engine.generating():
            tokens = greedy(self.engine.module, list(PROMPT), 16)
        assert tokens in [greedy(model, list(PROMPT), 16) for model in models]


class Stalling:
    """Weights that stop coming in the middle, until they are let go on.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = dict(model.state_dict())
        self._left = len(self._tensors) // 2
        self.stalled = threading.Event()
        self.go_on = threading.Event()

    def describe(self) -> Iterator[tuple[str, torch.dtype, Sequence[int]]]:
        return ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items())

    def gather(self, name: str) -> Tensor:
        self._left -= 1
        if self._left < 0:
            self.stalled.set()
            self.go_on.wait(60)
        return self._tensors[name]


def states(error: WeightUpdateError) -> list[EngineState]:
    return [outcome.state for outcome in error.outcomes]


@pytest.mark.parametrize("call", ["pause_generation", "receive_weights", "finish_weight_update", "compare_checksums"])
@pytest.mark.asyncio(loop_scope="module")
async def test_failing_in_a_step(subject: SGLangSubject, call: str) -> None:
    probe, bystander = Probe(subject.engine), Bystander()
    engines = [probe, bystander.engine]
    async with asyncsync.WeightSynchronizer(subject.trainer, engines) as synchronizer:
        await synchronizer.update_weights()
        old = copied(subject.trainer)
        step(subject.trainer, 5)

        async def fail() -> None:
            raise RuntimeError("planned")

        probe.after[call] = fail
        with pytest.raises(EngineError, match=r"Probe-0 failed.*planned") as failure:
            await synchronizer.update_weights()
        sglang, other = states(failure.value)
        assert sglang is not EngineState.LOST
        assert other in (EngineState.UNCHANGED, EngineState.UPDATED)
        await bystander.serves_one_of(old, subject.trainer)
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after the update that repairs it")
        await bystander.serves_one_of(subject.trainer)


@pytest.mark.asyncio(loop_scope="module")
async def test_sglang_says_success_where_there_is_none(subject: SGLangSubject) -> None:
    async with asyncsync.WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
        accepted = subject.engine._accepted
        assert accepted is not None
        assert accepted.targets is not None
        norms = {
            f"model.layers.{layer}.input_layernorm.weight": f"model.layers.{1 - layer}.input_layernorm.weight"
            for layer in range(2)
        }
        for names, wrong in (
            (tuple(norms.get(name, name) for name in accepted.names), sorted(norms)),  # each into the other's place
            (tuple(name.replace("model.norm.", "nowhere.") for name in accepted.names), ["model.norm.weight"]),
        ):
            step(subject.trainer, 6)
            subject.engine._accepted = replace(accepted, targets=replace(accepted.targets, names=names))
            with pytest.raises(TransferError, match="other weights than were sent") as failure:
                await synchronizer.update_weights()
            assert all(name in str(failure.value) for name in wrong)
            assert "self_attn" not in str(failure.value)
            assert states(failure.value) == [EngineState.TAINTED]
            subject.engine._accepted = accepted
            await synchronizer.update_weights()
            await serves(subject, subject.trainer, "after the update that repairs it")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_shape_that_does_not_fit(subject: SGLangSubject) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    weights: dict[str, Tensor] = dict(subject.trainer.state_dict())
    wrong = weights | {name: torch.zeros(3, 128)}
    async with asyncsync.WeightSynchronizer(wrong, [subject.engine], bucket_size=1024) as synchronizer:
        with pytest.raises(
            TransferError, match=r"partially updated.*down_proj\.weight \(float32 \[3, 128\]\)"
        ) as failure:
            await synchronizer.update_weights()
        assert failure.value.bucket is not None
        assert states(failure.value) == [EngineState.TAINTED]
    async with asyncsync.WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
    await serves(subject, subject.trainer, "after the update that repairs it")


@pytest.mark.asyncio(loop_scope="module")
async def test_another_dtype_is_told(subject: SGLangSubject) -> None:
    model = copied(subject.trainer).to(torch.bfloat16)
    async with asyncsync.WeightSynchronizer(model, [subject.engine]) as synchronizer:
        with pytest.raises(PlanError, match="dtype="):
            await synchronizer.update_weights()
    await serves(subject, subject.trainer, "after weights of another dtype")
    async with asyncsync.WeightSynchronizer(model, [subject.engine], dtype=torch.float32) as synchronizer:
        update = await synchronizer.update_weights()
        # Not by its tokens: after rounding two of them may be best by nothing.
        assert update.outcomes[0].digest == update.digest


@pytest.mark.parametrize("lack", ["layers.0.self_attn.q_proj", "layers.1.mlp.gate_proj", "v_proj"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_part_of_what_is_fused_is_refused(subject: SGLangSubject, lack: str) -> None:
    async with asyncsync.WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
    old = copied(subject.trainer)
    step(subject.trainer, 7)
    weights = {name: tensor for name, tensor in subject.trainer.state_dict().items() if lack not in name}
    async with asyncsync.WeightSynchronizer(weights, [subject.engine]) as synchronizer:
        with pytest.raises(PlanError, match=f"only a part of it is sent: .*{lack}"):
            await synchronizer.update_weights()
    await serves(subject, old, f"after weights without {lack}")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_actor_in_the_manner_of_slime_is_labelled(subject: SGLangSubject) -> None:
    engine = asyncsync.SGLangEngine(SlimeHandle(subject.handle), tp_size=1)
    options: dict[str, Any] = {"policy": "abort", "bucket_size": 1}
    for _ in range(2):
        async with asyncsync.WeightSynchronizer(subject.trainer, [engine], **options) as synchronizer:
            step(subject.trainer, 8)
            update = await synchronizer.update_weights()
        answer = await bed.request(subject.handle, list(PROMPT), 4)
        assert {span["version"] for span in answer["meta_info"]["weight_versions"]} == {str(update.version)}
        await serves(subject, subject.trainer, "after an update over an actor in the manner of slime")
    assert (await engine.describe_engine()).newest_version == update.version


@pytest.mark.asyncio(loop_scope="module")
async def test_asleep_and_refused(subject: SGLangSubject) -> None:
    async with asyncsync.WeightSynchronizer(subject.trainer, [subject.engine], asleep="refuse") as synchronizer:
        await synchronizer.update_weights()
        await subject.engine.release_memory_occupation(["kv_cache"])
        with pytest.raises(EngineError, match=r"asleep \(kv_cache released\)"):
            await synchronizer.update_weights()
        await subject.engine.resume_memory_occupation()
        await synchronizer.update_weights()
    await serves(subject, subject.trainer, "awake again")


@pytest.mark.asyncio(loop_scope="module")
async def test_stopped_and_then_killed(subject: SGLangSubject) -> None:
    """The last: it ends the server."""
    bystander = Bystander()
    engines = [subject.engine, bystander.engine]
    async with asyncsync.WeightSynchronizer(subject.trainer, engines) as synchronizer:
        await synchronizer.update_weights()
    old = copied(subject.trainer)

    async def interrupted(sign: int, timeout: float) -> WeightUpdateError:
        weights = Stalling(subject.trainer)
        async with asyncsync.WeightSynchronizer(weights, engines, bucket_size=1024, timeout=timeout) as synchronizer:
            update = asyncio.create_task(synchronizer.update_weights())
            assert await asyncio.to_thread(weights.stalled.wait, 20)
            os.killpg(subject.processes, sign)
            weights.go_on.set()
            async with asyncio.timeout(60):
                with pytest.raises(WeightUpdateError) as failure:
                    await update
            return failure.value

    step(subject.trainer, 8)
    error = await interrupted(signal.SIGSTOP, timeout=3)
    assert states(error)[1] in (EngineState.UNCHANGED, EngineState.UPDATED)  # as far as its seconds reach
    assert states(error)[0] in (EngineState.LOST, EngineState.TAINTED)
    await bystander.serves_one_of(old, subject.trainer)
    os.killpg(subject.processes, signal.SIGCONT)
    async with asyncsync.WeightSynchronizer(subject.trainer, engines) as synchronizer:
        async with asyncio.timeout(90):
            while True:
                try:
                    await synchronizer.update_weights()
                    break
                except WeightUpdateError:
                    await asyncio.sleep(1)
        await serves(subject, subject.trainer, "thawed, and updated")
        await bystander.serves_one_of(subject.trainer)
    step(subject.trainer, 9)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    error = await interrupted(signal.SIGKILL, timeout=60)
    assert loop.time() - begun < 20
    assert states(error) == [EngineState.LOST, EngineState.UPDATED]  # the other gets the whole of it
    assert "SGLangEngine-0" in str(error)
    await bystander.serves_one_of(subject.trainer)


@pytest.mark.asyncio
async def test_the_example() -> None:
    program = bed.ROOT / "examples" / "sglang_rollouts.py"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), "--steps", "3"),
        env=os.environ | bed.environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 200)
    text: Any = output.decode()
    assert process.returncode == 0, text
    assert [f"WeightUpdate(version={version}, 1/1 engines" in text for version in (1, 2, 3)] == [True] * 3, text
