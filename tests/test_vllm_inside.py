"""A vLLM engine in this process: the checks, what does not fit it, what it is left in, and who updates it next."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

import asyncsync
from asyncsync import EngineState, PlanError, WeightSynchronizer
from asyncsync.testing import CHECKS, failed, serves, step
from tests.tiny_model import VOCABULARY, save_tiny
from tests.vllm_engines import ENVIRONMENT, VLLMSubject, ask, in_process, new_llm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VLLMSubject]:
    async with in_process(save_tiny(tmp_path_factory.mktemp("tiny")), prefix_cache=False) as subject:
        yield subject


def llm_of(subject: VLLMSubject) -> Any:
    return subject.engine._client._llm  # type: ignore[attr-defined]


def state_of(subject: VLLMSubject) -> dict[str, Tensor]:
    return dict(subject.trainer.state_dict())


async def refused(subject: VLLMSubject, weights: dict[str, Tensor], **options: Any) -> PlanError:
    async with WeightSynchronizer(weights, [subject.engine], **options) as synchronizer:
        error = await failed(synchronizer.update_weights())
    assert isinstance(error, PlanError), repr(error)
    return error


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(subject: VLLMSubject, check: str) -> None:
    await CHECKS[check](subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_fused_group_is_never_split_over_updates(subject: VLLMSubject) -> None:
    """vLLM itself would leave the rest of it uninitialised without a word."""
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
    state = state_of(subject)
    query = "model.layers.0.self_attn.q_proj.weight"
    error = await refused(subject, {query: state[query]}, partial=True)
    assert "model.layers.0.self_attn.qkv_proj.weight" in error.names
    gate = "model.layers.1.mlp.gate_proj.weight"
    error = await refused(subject, {name: tensor for name, tensor in state.items() if name != gate})
    assert error.names == ("model.layers.1.mlp.gate_up_proj.weight",)
    await serves(subject, subject.trainer, "after what was refused")


@pytest.mark.asyncio(loop_scope="module")
async def test_whole_layers_may_come_alone_and_the_others_keep_their_weights(subject: VLLMSubject) -> None:
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
    layer = "model.layers.1."
    step(subject.trainer.get_submodule(layer[:-1]), 5)
    part = {name: tensor for name, tensor in state_of(subject).items() if name.startswith(layer)}
    async with WeightSynchronizer(part, [subject.engine], partial=True) as synchronizer:
        update = await synchronizer.update_weights()
        assert update.tensors == len(part) < len(state_of(subject))
        await serves(subject, subject.trainer, "after an update of one layer")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_does_not_fit_is_named_all_at_once(subject: VLLMSubject) -> None:
    state = state_of(subject)
    norm, table, down = "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"
    state[norm] = state[norm].bfloat16()
    state[table] = torch.zeros(VOCABULARY + 64, 64)
    deep, bias = "model.layers.7.mlp.down_proj.weight", "model.norm.bias"  # vLLM itself ignores biases without a word
    state |= {deep: state[down].clone(), bias: torch.zeros(64)}
    error = await refused(subject, state)
    for name in (norm, table, deep, bias):
        assert name in str(error)
    assert "bfloat16" in str(error)
    async with WeightSynchronizer(
        state_of(subject) | {norm: state[norm]}, [subject.engine], dtype=torch.float32
    ) as synchronizer:
        await synchronizer.update_weights()  # converted on purpose
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unknown_name_is_unknown_whatever_it_is(subject: VLLMSubject) -> None:
    """What torch says of tensors on the meta device is told from a name with that word in it."""
    state = state_of(subject)
    for name in ("model.metadata.weight", "model.layers.0.meta.weight"):
        error = await refused(subject, state | {name: torch.zeros(3)})
        assert error.names == (name,)
    await serves(subject, subject.trainer, "after what was refused")


@pytest.mark.asyncio(loop_scope="module")
async def test_tied_weights_may_go_to_an_engine_that_does_not_tie_them(subject: VLLMSubject) -> None:
    state = state_of(subject)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # one memory, two names
    async with WeightSynchronizer(state, [subject.engine]) as synchronizer:
        update = await synchronizer.update_weights()
        assert update.tensors == len(state) - 1
    with torch.no_grad():
        subject.trainer.lm_head.weight.copy_(subject.trainer.model.embed_tokens.weight)  # type: ignore
    await serves(subject, subject.trainer, "after tied weights")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_sleeps_is_not_updated(subject: VLLMSubject) -> None:
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
        await llm_of(subject).sleep(level=1)
        try:
            for _ in range(2):  # the first on what is known, the second after everyone was asked
                error = await failed(synchronizer.update_weights())
                assert "asleep" in str(error)
                assert isinstance(error, asyncsync.EngineError)
        finally:
            await llm_of(subject).wake_up()
        step(subject.trainer, 6)
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after it was woken up")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_conductor_that_died_in_mid_commit_is_followed_by_another(subject: VLLMSubject) -> None:
    """It has left the engine paused, with vLLM's session open."""
    dead = WeightSynchronizer(subject.trainer, [subject.engine])
    await dead.update_weights()
    await subject.engine.pause_generation(subject.engine._epoch + 1, "recompute")
    await llm_of(subject).start_weight_update()
    step(subject.trainer, 7)
    successor = asyncsync.VLLMEngine(llm_of(subject))
    async with WeightSynchronizer(subject.trainer, [successor]) as synchronizer:
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after the successor's update")
    await dead.aclose()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_could_not_load_stays_paused_until_an_update_repairs_it(subject: VLLMSubject) -> None:
    engine = subject.engine
    async with WeightSynchronizer(subject.trainer, [engine], initial_version=0) as synchronizer:
        await synchronizer.update_weights()
        step(subject.trainer, 8)
        update, engine._client.update = engine._client.update, _forget  # type: ignore[method-assign]
        error = await failed(synchronizer.update_weights())
        engine._client.update = update  # type: ignore[method-assign]
        assert "planned" in str(error)
        assert isinstance(error, asyncsync.WeightUpdateError)
        assert error.outcomes[0].state is EngineState.UNCHANGED, "nothing was loaded: it serves what it did"
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after the update that followed")


async def _forget(info: object) -> None:
    raise RuntimeError("planned: the call is lost")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_version_label_moves_with_the_weights(subject: VLLMSubject) -> None:
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        update = await synchronizer.update_weights()
        assert await llm_of(subject).get_weight_version() == str(update.version)
        generated = await subject.generate(subject.prompt, 4)
        assert [span.version for span in generated.weight_versions or ()] == [update.version]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_policy_that_the_engine_cannot_keep_is_refused_when_it_is_connected(
    subject: VLLMSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    describe = subject.engine.describe_engine

    async def with_prefixes() -> asyncsync.EngineStatus:
        status = await describe()
        return replace(status, policies=("drain",), cannot={"continue": "its prefix cache is old"})

    monkeypatch.setattr(subject.engine, "describe_engine", with_prefixes)
    async with WeightSynchronizer(subject.trainer, [subject.engine], policy="continue") as synchronizer:
        with pytest.raises(asyncsync.ConnectError, match="its prefix cache is old"):
            await synchronizer.connect()


@pytest.mark.asyncio(loop_scope="module")
async def test_smollm2_says_what_the_trainers_model_says(smollm2: Path, tmp_path: Path) -> None:
    """The engine starts with other weights, made up by vLLM."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(smollm2.parent), "gguf_file": smollm2.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    del model.config.quantization_config  # of the file that it was read from
    model.config.save_pretrained(tmp_path)
    llm = new_llm(tmp_path, load_format="dummy")
    try:
        text = "Question: What is the capital of France?\nAnswer:"
        prompt = list(tokenizer(text)["input_ids"])
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
        engine = asyncsync.VLLMEngine(llm)
        async with WeightSynchronizer(model, [engine]) as synchronizer:
            update = await synchronizer.update_weights()
            assert update.bytes > 500e6
            generated = await ask(llm, prompt, 24, None, "smollm2")
        assert tokenizer.decode(list(generated.tokens), skip_special_tokens=True).startswith(expected.strip()[:40])
        assert list(generated.tokens)[: output.shape[1] - len(prompt)] == output[0, len(prompt) :].tolist()
    finally:
        llm.shutdown()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_without_the_backend_says_how_to_start_it(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    llm = new_llm(tmp_path, weight_transfer_config=None)
    try:
        async with WeightSynchronizer(torch.nn.Linear(1, 1), [asyncsync.VLLMEngine(llm)]) as synchronizer:
            error = await failed(synchronizer.update_weights())
        assert 'weight_transfer_config={"backend": "asyncsync"}' in str(error)
    finally:
        llm.shutdown()


def test_the_example_runs() -> None:
    import os

    command = [sys.executable, str(Path(__file__).parent.parent / "examples" / "vllm_rollouts.py"), "--steps", "3"]
    environment = os.environ | ENVIRONMENT
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert sum("WeightUpdate(version=" in line for line in lines) == 3
    assert sum("answers span an update" in line for line in lines) == 3  # how many do, the machine decides


def test_a_worker_sees_that_its_memory_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator

    from asyncsync.engines.vllm.worker import released_memory

    def piece(tag: str, *, asleep: bool = True, kept: bool = False) -> AllocationData:
        handle = (0, 0, 0, 0)
        return AllocationData(handle, tag, cpu_backup_tensor=torch.empty(1) if kept else None, is_asleep=asleep)

    assert released_memory() == {}
    pieces = [
        piece("weights", kept=True),
        piece("weights", kept=True),
        piece("kv_cache"),
        piece("runtime", asleep=False),
    ]
    monkeypatch.setattr(CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=dict(enumerate(pieces))))
    assert released_memory() == {"weights": True, "kv_cache": False}
    pieces[1].cpu_backup_tensor = None
    assert released_memory() == {"weights": False, "kv_cache": False}, "what is not kept whole is lost"
    for each in pieces:
        each.is_asleep = False
    assert released_memory() == {}
