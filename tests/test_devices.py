"""Which devices weights are on, and which backend that makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncsync.connection import Connection
from asyncsync.devices import CPU, gpu_of, home_of
from asyncsync.messages import EngineStatus, ReadOptions, TrainerStatus
from asyncsync.sources import Sources


class OnDevice(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


def trainer(device: str, *gpus: str) -> TrainerStatus:
    return TrainerStatus(instance="t", device=device, connections=(), plan_digest="", specs=(), gpus=gpus)


def engine(device: str, *gpus: str) -> EngineStatus:
    return EngineStatus(instance="e", device=device, staged=True, gpus=gpus)


@pytest.mark.parametrize(
    ("ends", "backend"),
    [
        ([trainer("cuda", "a"), engine("cuda", "b"), engine("cuda", "c", "d")], "nccl"),
        ([trainer("cuda", "a"), engine("cuda", "b"), engine("cuda", "a")], "gloo"),
        ([trainer("cuda", "a"), engine("cuda", "b", "b")], "gloo"),
        ([trainer("cuda", "a"), engine("cuda")], "nccl"),
        ([trainer("cuda", "a"), engine("cpu")], "gloo"),
        ([trainer("cpu"), engine("cpu")], "gloo"),
        ([trainer("cuda", "a"), engine("cpu+cuda", "b")], "gloo"),
    ],
)
def test_nccl_is_chosen_where_every_member_has_a_gpu_of_its_own(ends: list[Any], backend: str) -> None:
    connection = Connection(
        Sources([], []),
        options=ReadOptions(bucket_size=1),
        partial=False,
        backend="auto",
        transport="auto",
        policy="drain",
        wake=True,
        timeout=1,
    )
    assert connection.choose_backend(ends) == backend


def test_weights_are_at_home_where_the_first_of_them_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host, on_device = torch.zeros(2), torch.zeros(2).as_subclass(OnDevice)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert home_of([on_host, on_device]) == torch.device("cuda", 1)
    assert home_of([on_host]) == home_of([]) == CPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert home_of(iter([on_host])) == CPU
    assert home_of([torch.empty(2, device="meta")]).type == "meta"
    assert gpu_of(CPU) == ()
