"""How torch_memory_saver stands in this process, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from asyncsync.memory_saver.door import hook, hook_mode, is_tracked_here

SaverCase = Literal["absent", "inactive", "regions only", "torch hook mode", "xpu", "broken", "active"]

FREES_PAUSED_MEMORY = (0, 0, 10)
"""The first version in which freeing a tensor whose memory is paused does not end the process (its #95)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaverStatus:
    """How torch_memory_saver stands in this process: see :func:`memory_saver_status`.

    Attributes:
        case: Which case holds: ``"absent"`` (not installed), ``"inactive"`` (not loaded into this process),
            ``"regions only"`` (loaded, and new threads track nothing), ``"torch hook mode"``, ``"xpu"``, ``"broken"``
            (loaded, and cannot be switched off), ``"active"`` (new threads track what they allocate).
        guarded: Whether :func:`asyncsync.memory_saver_guard` has something to do: it enters ``disable()`` then.
        version: The saver's version, if it is installed.
        reason: What was found.
        advice: What to do about it, or None.
    """

    case: SaverCase
    guarded: bool
    version: str | None
    reason: str
    advice: str | None = None

    def __str__(self) -> str:
        return f"torch_memory_saver: {self.case}: {self.reason}" + (f" ({self.advice})" if self.advice else "")


def memory_saver_status() -> MemorySaverStatus:
    """Which case of torch_memory_saver holds in this process, and why.

    Looks only: it initializes neither the saver nor CUDA. Takes up to a millisecond.
    """
    try:
        version = importlib.metadata.version("torch_memory_saver")
    except importlib.metadata.PackageNotFoundError:
        version = None
    case, reason, advice = _find_case(version)
    if case in ("active", "regions only", "torch hook mode") and is_old(version):
        newer = ".".join(map(str, FREES_PAUSED_MEMORY))
        warning = f"version {version} ends the process when paused memory is freed: install {newer} or newer"
        advice = warning if advice is None else f"{advice}; {warning}"
    return MemorySaverStatus(case=case, guarded=case == "active", version=version, reason=reason, advice=advice)


def _find_case(version: str | None) -> tuple[SaverCase, str, str | None]:
    if version is None and hook() is None:
        return "absent", "it is not installed", None
    if torch.xpu.is_available():
        return (
            "xpu",
            "on Intel GPUs it cannot be switched off for a while, and only regions are tracked",
            "guarded work runs on a thread of its own, outside of every region: nothing there is tracked. Weights that "
            "are paused cannot be read: wake the trainer in before_update()",
        )
    if hook_mode() == "torch":
        if hook() is not None:
            return (
                "broken",
                "it is set to hook_mode='torch', and its preload library is loaded as well",
                "leave one of the two out: with both, disable() switches off the one that is not in use",
            )
        return (
            "torch hook mode",
            "in hook_mode='torch' only regions are tracked, and freeing their memory outside of one ends the process",
            "guarded work runs on a thread of its own, outside of every region, and is not tracked. Where a region's "
            "memory may be freed meanwhile, use the preload mode",
        )
    preload = os.environ.get("LD_PRELOAD", "")
    if hook() is None:
        if "torch_memory_saver" in preload:
            return (
                "inactive",
                "LD_PRELOAD names it, but it was not loaded into this process",
                "LD_PRELOAD must be set before the process starts (in a Ray actor: runtime_env's env_vars), and the "
                "library be there",
            )
        return (
            "inactive",
            "its preload library is not loaded into this process",
            "a trainer that is to be offloaded is started with TMS_INIT_ENABLE=1 and "
            "LD_PRELOAD=…/torch_memory_saver_hook_mode_preload_cu….so",
        )
    if sum("torch_memory_saver" in path for path in preload.split(":")) != 1:
        return (
            "broken",
            "it is loaded, and LD_PRELOAD does not name it once (any more)",
            "leave LD_PRELOAD as it was when the process started: the saver finds its library by it",
        )
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the saver looks at the first only (0.0.10)
        if "expandable_segments:True" in os.environ.get(variable, ""):
            return (
                "broken",
                "it does not work with expandable segments",
                f"take expandable_segments:True out of {variable}",
            )
    if not _tracks_on_new_threads():
        return "regions only", "it is loaded, and TMS_INIT_ENABLE is off: nothing outside of a region is tracked", None
    rocm = "on ROCm nobody looks whether weights are paused: wake the trainer in before_update()"
    return "active", "it is loaded, and tracks what new threads allocate", rocm if torch.version.hip else None


def was_always_on(variable: str) -> bool:
    """Whether a variable of the environment is on, as the saver reads it, and was when the process started.

    Each thread reads it when it first allocates: what was set or taken back meanwhile holds for some of them.
    """
    at_first = dict(entry.partition("=")[::2] for entry in Path("/proc/self/environ").read_text().split("\0"))
    on = ("1", "true", "TRUE", "yes", "YES")
    return os.environ.get(variable, "") in on and at_first.get(variable, "") in on


def is_old(version: str | None) -> bool:
    """Whether this version of the saver ends the process when paused memory is freed."""
    if version is None:
        return False
    public = version.partition("+")[0]  # without what it was built for
    numbers = [int(part) for part in public.split(".") if part.isdecimal()]
    return tuple(numbers) < FREES_PAUSED_MEMORY


def _tracks_on_new_threads() -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_tracked_here()), name="asyncsync-saver-probe")
    thread.start()
    thread.join()
    return found == [True]
