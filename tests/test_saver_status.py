"""Which case of torch_memory_saver is told, where its preload library is not loaded; and what a trainer says of it."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_memory_saver

import asyncsync
from asyncsync import TrainerRank, memory_saver_status
from asyncsync.memory_saver.status import is_old


@pytest.fixture
def torch_hook_mode() -> Iterator[None]:
    saver: Any = torch_memory_saver.torch_memory_saver
    saver.hook_mode = "torch"
    yield
    del saver._impl_ctor_kwargs["hook_mode"]


def test_not_loaded() -> None:
    status = memory_saver_status()
    assert (status.case, status.guarded) == ("inactive", False)
    assert status.advice is not None
    assert "LD_PRELOAD" in status.advice
    assert "TMS_INIT_ENABLE=1" in str(status)


def test_named_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/torch_memory_saver_hook_mode_preload_cu13.abi3.so")
    status = memory_saver_status()
    assert status.case == "inactive"
    assert "before the process starts" in str(status)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    status = memory_saver_status()
    assert (status.case, status.version, status.advice) == ("absent", None, None)


def test_torch_hook_mode(torch_hook_mode: None, monkeypatch: pytest.MonkeyPatch) -> None:
    status = memory_saver_status()
    assert (status.case, status.guarded) == ("torch hook mode", False)
    assert "a thread of its own" in str(status)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.9")
    assert "a thread of its own" in str(memory_saver_status())
    assert "install 0.0.10 or newer" in str(memory_saver_status())


def test_intel_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    status = memory_saver_status()
    assert (status.case, status.guarded) == ("xpu", False)


@pytest.mark.parametrize(
    ("version", "old"), [("0.0.9", True), ("0.0.9.post1", True), ("0.0.10", False), ("0.1", False), (None, False)]
)
def test_versions_that_end_the_process_when_paused_memory_is_freed(version: str | None, old: bool) -> None:
    assert is_old(version) is old


def test_a_trainer_that_is_to_be_offloaded_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asyncsync"):
        TrainerRank({"weight": torch.zeros(1)})
        TrainerRank({"weight": torch.zeros(1)}, offload=False)
        assert not caplog.records, "nobody asked"
        TrainerRank({"weight": torch.zeros(1)}, offload=True)
    assert "torch_memory_saver: inactive" in caplog.text


def test_looking_starts_nothing() -> None:
    before = torch_memory_saver.torch_memory_saver._impl
    assert isinstance(asyncsync.memory_saver_status(), asyncsync.MemorySaverStatus)
    assert torch_memory_saver.torch_memory_saver._impl is before
