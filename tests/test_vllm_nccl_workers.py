"""vLLM itself with its own ``nccl`` backend, on a CPU: all of it is real but NCCL, in whose place there are sockets.

Two ranks, and the checks in which vLLM has the most to say: the others are passed in ``test_vllm_nccl``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

import asyncsync
from asyncsync import EngineState, TransferError, WeightSynchronizer
from asyncsync.testing import CHECKS, failed, serves, step
from asyncsync.transports import pynccl
from tests.fake_nccl import FakeCommunicator, FakeLane
from tests.tiny_model import save_tiny
from tests.vllm_engines import VLLMSubject, in_process

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

SETTINGS: dict[str, Any] = {
    "weight_transfer_config": {"backend": "nccl"},
    "worker_extension_cls": "tests.nccl_over_sockets.OverSockets",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tiny: Path) -> AsyncIterator[VLLMSubject]:
    async with in_process(tiny, backend="nccl", ranks=2, prefix_cache=False, **SETTINGS) as subject:
        yield subject


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sockets in place of NCCL at the trainer's end, too."""
    from vllm.distributed.device_communicators import pynccl as of_vllm

    monkeypatch.setattr(of_vllm, "PyNcclCommunicator", FakeCommunicator)
    monkeypatch.setattr(pynccl, "Lane", FakeLane)
    yield
    for communicator in FakeCommunicator.instances:
        communicator.destroy()
    FakeCommunicator.instances.clear()


@pytest.mark.parametrize("check", ["updates", "requests around updates", "failed bucket", "reconnect"])
@pytest.mark.asyncio(loop_scope="module")
async def test_conformance(subject: VLLMSubject, check: str) -> None:
    subject.tells_shapes = False  # nor dtypes
    await CHECKS[check](subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_tells_what_is_needed_of_it(subject: VLLMSubject) -> None:
    status = await subject.engine.describe_engine()
    assert isinstance(subject.engine, asyncsync.VLLMEngine)
    assert status.world_size == 2
    assert ("continue" in status.policies) == ("continue" in subject.policies)


def with_an_unknown_name(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of which one is refused, between two parts of one layer."""
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        weights[name] = tensor
        if name.endswith("layers.1.self_attn.q_proj.weight"):
            weights["no.such.weight"] = torch.zeros(3, dtype=tensor.dtype)
    return weights


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_that_have_failed_are_not_believed_again(subject: VLLMSubject) -> None:
    """The last of those with this engine: it would have to be restarted."""
    weights = dict(subject.trainer.state_dict())
    llm = subject.engine._client._llm  # type: ignore[attr-defined]
    engine = asyncsync.VLLMEngine(llm, backend="nccl")
    for conductor in (engine, engine, asyncsync.VLLMEngine(llm, backend="nccl")):
        async with WeightSynchronizer(with_an_unknown_name(weights), [conductor], bucket_size=1024) as synchronizer:
            error = await failed(synchronizer.update_weights())
            assert "has to be restarted" in str(error)
    assert await llm.is_sleeping(), "it stays paused"
    with pytest.raises(Exception, match="no module or parameter named"):  # the second worker's answer to another call
        await llm.collective_rpc("synchronize_device")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_that_vllm_has_broken_off_leaves_nothing_in_the_next(tiny: Path) -> None:
    """Layers that have got a part of their weights keep it over an error: the next update must not be mixed with it."""
    async with in_process(tiny, backend="nccl", prefix_cache=False, **SETTINGS) as subject:
        state = dict(subject.trainer.state_dict())
        weights = with_an_unknown_name(state)
        async with WeightSynchronizer(lambda: weights, [subject.engine], bucket_size=1024) as synchronizer:
            error = await failed(synchronizer.update_weights())
            assert isinstance(error, TransferError), repr(error)
            assert error.bucket is not None
            assert "no module or parameter named" in str(error)
            assert [outcome.state for outcome in error.outcomes] == [EngineState.TAINTED]
            step(subject.trainer, 90)
            weights = dict(subject.trainer.state_dict())
            await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after a session that was broken off")
