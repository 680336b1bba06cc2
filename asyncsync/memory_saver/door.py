"""The one door to torch_memory_saver.

Its flag, by which it decides whether it tracks an allocation, belongs to a thread; its table of allocations to the
process. What it is asked wrongly ends the process: pausing twice, a host copy of memory that has none, or that it does
not track. So nothing is asked of it here that was not found out before, from the driver and from torch's allocator.
What it does not offer to ask is read from attributes of its own, named as in 0.0.10.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch import Tensor

_starting = threading.Lock()


@cache
def hook() -> ctypes.CDLL | None:
    """The saver's preload library, if this process was started with it."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "tms_get_interesting_region"):
        return None
    process.tms_get_interesting_region.restype = ctypes.c_bool
    return process


def is_tracked_here() -> bool:
    """Whether the saver tracks what this thread allocates now."""
    library = hook()
    return library is not None and bool(library.tms_get_interesting_region())


def start() -> None:
    """Have it get ready: it does so at its first use, and does not survive two first uses at once (0.0.10)."""
    from torch_memory_saver import torch_memory_saver

    with _starting:
        try:
            _ = torch_memory_saver.retain_cpu_backup  # looking at anything makes it ready
        except AttributeError:  # somebody else was at it, and has done it
            if torch_memory_saver._impl is None:
                raise


def disable() -> AbstractContextManager[None]:
    """Its own ``disable()``, for this thread; what is to be entered and left on it."""
    from torch_memory_saver import torch_memory_saver

    start()
    context: AbstractContextManager[None] = torch_memory_saver.disable()
    return context


def hook_mode() -> str:
    """``"preload"`` or ``"torch"``: how it was told to get at allocations."""
    saver = _saver()
    if saver is None:
        return "preload"
    if (started := saver._impl) is not None:
        return str(started._hook_mode)
    return str(getattr(saver, "_impl_ctor_kwargs", {}).get("hook_mode", "preload"))


def is_started() -> bool:
    """Whether it is ready: before that it can take nothing away."""
    saver = _saver()
    return saver is not None and saver._impl is not None


def host_copy(flat: Tensor) -> Tensor | None:
    """The host copy of a contiguous tensor that is paused, its memory itself; None if it has been resumed.

    Ends the process if the memory has no host copy, or is not the saver's.
    """
    from torch_memory_saver import torch_memory_saver

    copy: Tensor | None = torch_memory_saver.get_cpu_backup(flat, zero_copy=True)
    return copy


class KeptCopies:
    """While one of these is held, host copies outlive their pause: what reads them does not lose the ground it is on.

    The saver frees a copy as its memory is resumed, unless it was told to retain it; that is told for the process.
    """

    _lock = threading.Lock()
    _held = 0
    _before = False

    def __init__(self) -> None:
        from torch_memory_saver import torch_memory_saver

        self._saver: Any = torch_memory_saver
        self._is_held = True
        with KeptCopies._lock:
            if KeptCopies._held == 0:
                KeptCopies._before = bool(self._saver.retain_cpu_backup)
                self._saver.retain_cpu_backup = True
            KeptCopies._held += 1

    def release(self) -> None:
        """Let them go; no error if they were let go already."""
        with KeptCopies._lock:
            if not self._is_held:
                return
            self._is_held = False
            KeptCopies._held -= 1
            if KeptCopies._held == 0:
                self._saver.retain_cpu_backup = KeptCopies._before


def regions() -> Mapping[tuple[int, int], str | None]:
    """Its regions by the identity of their memory pools: why what is in one has no host copy, or None if it has."""
    saver = _saver()
    pools: Mapping[Any, Any] = getattr(saver._impl, "_mem_pools", {}) if is_started() else {}
    found: dict[tuple[int, int], str | None] = {}
    for (tag, on_host, on_disk, *_), pool in list(pools.items()):
        where = "on disk only" if on_disk else "nowhere"
        found[tuple(pool.id)] = None if on_host else f"its region {tag!r} keeps it {where}"
    return found


def _saver() -> Any:
    """Its object, if this process has imported it."""
    module = sys.modules.get("torch_memory_saver")
    return None if module is None else module.torch_memory_saver
