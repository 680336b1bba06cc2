"""How much memory this process may still take: of the machine's, and of its control groups' (versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

Read: TypeAlias = Callable[[str], str]
"""Gives a file's text, by its path; an OSError if there is none."""

_V1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def read_file(path: str) -> str:
    """A file's text."""
    return Path(path).read_text()


def available_memory(read: Read = read_file) -> int | None:
    """Bytes that can still be allocated; None if nothing here tells.

    Args:
        read: Gives what the kernel tells, by path.
    """
    found = [_of_machine(read), *_of_groups(read)]
    return min((free for free in found if free is not None), default=None)


def _of_machine(read: Read) -> int | None:
    try:
        lines = read("/proc/meminfo").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _of_groups(read: Read) -> Iterator[int | None]:
    """What is left in each group that this process is in, and in those around it."""
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            root, limit, usage, cached = _V2 if not controllers else _V1
            group = PurePosixPath(path)
            # In a container the path may be the host's, while what is mounted begins at the container's own group.
            for each in (group, *group.parents):
                yield _of_group(read, f"{root}{each}".rstrip("/"), limit, usage, cached)


def _of_group(read: Read, folder: str, limit: str, usage: str, cached: str) -> int | None:
    try:
        most, used = int(read(f"{folder}/{limit}")), int(read(f"{folder}/{usage}"))
        pairs = (line.split() for line in read(f"{folder}/memory.stat").splitlines())
        reclaimable = next((int(value) for key, value in pairs if key == cached), 0)
    except (OSError, ValueError):  # not there; or "max"
        return None
    return max(0, most - used + reclaimable)
