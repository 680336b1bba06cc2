"""One check of :mod:`benchmarks.gpu_check`, in a process of its own: ``python -m benchmarks.gpu_child NAME FILE``."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib.metadata
import platform
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

import asyncsync
from benchmarks import gpu_memory, gpu_updates
from benchmarks.gpu_place import PLACES, Notes, Place, said

Program: TypeAlias = Callable[[Place, Notes, bool], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is checked.

    Attributes:
        program: What is run, somewhere.
        hooked: Whether the saver's library must be loaded.
        judged: Whether it must succeed; else what happens is only recorded.
        gpus: How many it needs.
        beyond_cpu: What of it a run on the CPU leaves out.
    """

    program: Program
    hooked: bool = True
    judged: bool = True
    gpus: int = 1
    beyond_cpu: str


_BAD = "what becomes of a trainer that is paused"
CHECKS = {
    "guarded": Check(
        program=gpu_updates.guarded,
        beyond_cpu="pausing the trainer, reading host copies, disable(), copying to and from the GPU",
    ),
    "unguarded_host_copies": Check(program=gpu_updates.unguarded_host_copies, judged=False, beyond_cpu=_BAD),
    "unguarded_live": Check(program=gpu_updates.unguarded_live, judged=False, beyond_cpu=_BAD),
    "unguarded_new_memory": Check(program=gpu_updates.unguarded_new_memory, judged=False, beyond_cpu=_BAD),
    "unguarded_cached_memory": Check(program=gpu_updates.unguarded_cached_memory, judged=False, beyond_cpu=_BAD),
    "unguarded_fresh_thread": Check(program=gpu_updates.unguarded_fresh_thread, judged=False, beyond_cpu=_BAD),
    "host_copies": Check(
        program=gpu_memory.host_copies,
        beyond_cpu="pausing, reading host copies, refusing what has none, what the driver says of memory",
    ),
    "tracking": Check(
        program=gpu_memory.tracking, beyond_cpu="disable(), whose memory it is, what the memory pool gives back"
    ),
    "ipc": Check(program=gpu_memory.ipc, beyond_cpu="repacking, CUDA IPC, copying on the GPU"),
    "cuda_ipc": Check(program=gpu_updates.cuda_ipc, beyond_cpu="CUDA IPC, in place of shared memory of the host"),
    "gloo": Check(program=gpu_updates.gloo, hooked=False, beyond_cpu="copying to and from the GPU"),
    "nccl": Check(program=gpu_updates.nccl, hooked=False, gpus=2, beyond_cpu="NCCL"),
}
"""By name, in the order in which they are run."""


async def machine(place: Place, notes: Notes, quick: bool) -> None:
    """What the machine is."""
    _describe(notes)


def _describe(notes: Notes) -> None:
    notes["python"], notes["torch"], notes["cuda"] = platform.python_version(), torch.__version__, torch.version.cuda
    notes["torch_memory_saver"] = importlib.metadata.version("torch_memory_saver")
    notes["memory_saver_status"] = str(asyncsync.memory_saver_status())
    notes["gpus"] = []
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        notes["gpus"] = [
            f"{each.name}, {each.total_memory / 2**30:.0f} GiB, sm_{each.major}{each.minor}" for each in devices
        ]
        if torch.distributed.is_nccl_available():
            notes["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        torch.zeros(1, device="cuda")  # so that all is loaded that will be
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/lib" in line}
        for name in ("libcudart", "libcuda"):
            notes[name] = sorted(path for path in loaded if Path(path).name.startswith(f"{name}.so"))
        driver = Path("/proc/driver/nvidia/version")
        notes["driver"] = driver.read_text().splitlines()[0] if driver.exists() else None


def run(program: Program, place: Place, notes: Notes, quick: bool) -> bool:
    """Run a check; whether it came to its end."""
    try:
        asyncio.run(_run(program, place, notes, quick))
    except Exception as error:  # noqa: BLE001 - the report tells of it
        traceback.print_exc()
        notes.write("raised", said(error))
        return False
    notes.write("done", "")
    return True


async def _run(program: Program, place: Place, notes: Notes, quick: bool) -> None:
    await program(place, notes, quick)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_child", description=__doc__)
    parser.add_argument("name", choices=("machine", *CHECKS))
    parser.add_argument("file", type=Path, help="where what is found is written")
    parser.add_argument("--on", choices=tuple(PLACES), default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds; before that it says where it is")
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, options.timeout - 3))
    program = machine if options.name == "machine" else CHECKS[options.name].program
    sys.exit(0 if run(program, PLACES[options.on](), Notes(options.file), options.quick) else 1)


if __name__ == "__main__":
    main()
