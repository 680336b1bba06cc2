"""CUDA IPC: who it is chosen for. How it works is shown over stubbed CUDA, in ``test_memory_saver``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync.buckets import DEFAULT_BUCKET_SIZE, TensorSpec, joint_digest, plan_buckets
from asyncsync.connection import why_not_ipc
from asyncsync.engines.binding import bind
from asyncsync.engines.loading import Installed, StagedLoader
from asyncsync.engines.receiving import Session, receive_buckets
from asyncsync.errors import ConnectError, OutOfStepError
from asyncsync.memory_saver import ipc
from asyncsync.messages import EngineStatus, Layout, TrainerStatus, UpdateOrder
from asyncsync.transports import device_memory
from asyncsync.transports.device_memory import DeviceSets, Share, this_process
from tests.engines import ToldEngine
from tests.memory_link import MemoryLink

SOURCE = TrainerStatus(
    instance="a",
    device="cuda",
    connections=(),
    plan_digest="",
    specs=None,
    gpus=("one",),
    node="here",
    no_ipc=None,
    process="1/2:10",
)
ENGINE = EngineStatus(
    instance="b",
    device="cuda",
    staged=True,
    gpus=("two",),
    node="here",
    no_ipc=None,
    sees=("one", "two"),
    processes=("1/2:11",),
)


@pytest.mark.parametrize(
    ("source", "engine", "reason"),
    [
        ({}, {}, None),
        ({}, {"gpus": ("one",), "sees": ("one",)}, None),
        ({"node": "there"}, {}, "not on the trainer's node"),
        ({"node": ""}, {"node": ""}, "not on the trainer's node"),
        ({"no_ipc": "expandable segments"}, {}, "expandable segments"),
        ({}, {"no_ipc": "its weights are on no GPU"}, "on no GPU"),
        ({}, {"sees": ("two",)}, "does not see the trainer's GPU one"),
        ({}, {"processes": ("1/2:11", "1/2:10")}, "the trainer's own process"),
        ({}, {"processes": ("1/3:11",)}, "another container"),
    ],
)
def test_it_is_chosen_where_all_ends_are_on_gpus_of_a_node_and_can_do_it(
    source: dict[str, Any], engine: dict[str, Any], reason: str | None
) -> None:
    found = why_not_ipc([SOURCE, replace(SOURCE, **source)], replace(ENGINE, **engine))
    assert (found is None) == (reason is None)
    assert reason is None or (found is not None and reason in found)


@pytest.mark.parametrize(
    ("choice", "backend", "delta", "reason"),
    [
        ("auto", "gloo", False, None),
        ("auto", "nccl", False, "NCCL moves them"),
        ("auto", "gloo", True, "what differs"),
        ("shared", "nccl", True, None),
        ("cuda_ipc", "nccl", True, None),
        ("broadcast", "gloo", False, "a broadcast was asked for"),
    ],
)
def test_nccl_and_deltas_go_before_it_unless_it_is_asked_for(
    choice: Any, backend: Any, delta: bool, reason: str | None
) -> None:
    engine = ToldEngine(nn.ParameterDict({"weight": torch.zeros(3)}))
    synchronizer = asyncsync.WeightSynchronizer({"weight": torch.ones(3)}, [engine], delta=delta)
    found = synchronizer._connection._why_not_ipc(choice, [SOURCE], ENGINE, backend)
    assert (found is None) == (reason is None)
    assert reason is None or (found is not None and reason in found)


def test_an_engine_whose_driver_does_not_open_memory_says_so_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_handle(handle: bytes) -> int:
        raise OSError("no")

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(device_memory, "_failures", [])
    monkeypatch.setattr(device_memory, "_device_of", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(ipc, "why_not_here", lambda: None)
    monkeypatch.setattr(ipc, "open_handle", open_handle)
    assert device_memory.why_not_opened(gpu) is None
    with open(os.devnull, "rb") as lease:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="no"):
            device_memory.OpenedSet(Share(b"", 0, "one"), 8, lease.fileno())
        assert len(os.listdir("/proc/self/fd")) == before
    assert "does not open memory of the trainer's GPU: no" in str(device_memory.why_not_opened(gpu))


@pytest.mark.asyncio
async def test_asked_for_by_name_where_no_gpu_is_it_is_an_error_before_anything() -> None:
    engine = ToldEngine(nn.ParameterDict({"weight": torch.zeros(3)}))
    async with asyncsync.WeightSynchronizer({"weight": torch.ones(3)}, [engine], transport="cuda_ipc") as synchronizer:
        with pytest.raises(ConnectError, match="its weights are on no GPU"):
            await synchronizer.update_weights()
    assert engine.calls == ["describe_engine"]


def test_it_moves_bytes_without_nccl() -> None:
    engine = ToldEngine(nn.ParameterDict({"weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match="cuda_ipc"):
        asyncsync.WeightSynchronizer({"weight": torch.ones(3)}, [engine], transport="cuda_ipc", backend="nccl")


class PassingArena:
    """Memory of a source's that goes with it."""

    stays = False

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.is_let_go = False

    def let_go(self) -> None:
        self.is_let_go = True

    def tidy(self) -> None:
        pass


class FullLink(MemoryLink):
    """A link whose buckets are all there."""

    def __init__(self, lent: PassingArena) -> None:
        self._lent = lent

    def arena(self, epoch: int, nbytes: int, stop: threading.Event) -> Any:
        return self._lent

    def start_receive(self, flat: Tensor) -> object:
        return None

    def wait(self, handle: object, stop: threading.Event) -> None:
        pass


@pytest.mark.asyncio
async def test_memory_that_goes_with_its_source_is_copied_and_never_served_from() -> None:
    module = nn.ParameterDict({"weight": torch.zeros(300)})
    specs = (TensorSpec("weight", torch.float32, (300,)),)
    plan = plan_buckets(specs)
    layout = Layout(parts=(specs,), bucket_size=DEFAULT_BUCKET_SIZE, digest=joint_digest([plan.digest]))
    binding = bind(module, layout)
    loader = StagedLoader(binding, Installed(), "cpu")
    lent = PassingArena(torch.arange(300.0).view(torch.uint8).clone())
    order = UpdateOrder(
        epoch=1, version=1, connections=(), plan_digest="", policy="drain", base_epoch=None, timeout=1.0
    )
    receive_buckets(Session(order, binding.plan, loader, [FullLink(lent)], anyio.CancelScope()))
    assert lent.is_let_go
    lent.memory.zero_()
    loader.commit()
    assert torch.equal(module["weight"], torch.arange(300.0))


def test_a_share_is_bytes_of_a_fixed_width() -> None:
    share = Share(bytes(range(64)), 2**40 + 3, "0f3b8a51-0000-4000-8000-00000000000a")
    assert len(share.pack()) == Share.NBYTES
    assert Share.unpack(share.pack()) == share


def test_no_two_processes_are_one() -> None:
    command = [
        sys.executable,
        "-c",
        "from asyncsync.transports.device_memory import this_process; print(this_process())",
    ]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    assert other != this_process()
    assert other.rpartition(":")[0] == this_process().rpartition(":")[0] != ""


def test_memory_that_cannot_be_had_is_told_when_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int, device: torch.device) -> torch.Tensor:
        raise OSError("out of memory")

    monkeypatch.setattr(ipc, "why_not_here", lambda: None)
    monkeypatch.setattr(DeviceSets, "_free", lambda sets: 1 << 30)
    sets = DeviceSets()
    assert sets.why_not(100) == "the trainer's weights are on no GPU"
    sets.device = torch.device("cuda", 0)
    monkeypatch.setattr(device_memory, "_allocate", none)
    with pytest.raises(OutOfStepError, match=r"memory of the GPU of 0\.1 kB cannot be had: out of memory"):
        sets.take(100)
    monkeypatch.setattr(device_memory, "_allocate", lambda nbytes, device: torch.empty(nbytes))
    assert "out of memory" in str(sets.why_not(100))
    assert sets.why_not(100) is None, "and tried anew after that"
