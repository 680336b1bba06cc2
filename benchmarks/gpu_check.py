"""Does it work on a GPU? Run it once there: under five minutes on one GPU, and one JSON report on the last lines.

``python -m benchmarks.gpu_check`` runs each check in a process of its own, with the environment that it needs and a
deadline; one that crashes or hangs is recorded, and does not stop the others.

* ``guarded``: a trainer that is paused by torch_memory_saver updates two engines (staged and in place) again and again;
* ``unguarded_…``: what happens without the guard, or without host copies: recorded, never judged;
* ``host_copies``: reading paused memory, for every kind of tensor, and what the driver says of memory;
* ``tracking``: whose memory guarded work and bystanders allocate, and what is given back;
* ``ipc``: the saver's memory repacked and shared with a second process, and how fast that copies it;
* ``cuda_ipc``: updates through the GPU's memory, of weights that are the saver's, awake and paused (also to a second
  GPU, if there is one);
* ``gloo``: updates of CUDA weights over gloo, beside updates from host to host;
* ``nccl``: between two GPUs, if there are two: NCCL refuses two ranks on one.

Without a GPU each check is run on the CPU as far as it can be, under that name, and said to be skipped. The exit status
is 1 if something that must hold did not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_child import CHECKS, Check
from benchmarks.gpu_place import said

TIMEOUT = 60.0
"""Seconds that a check may take."""

TOTAL = 290.0
"""Seconds for all of them."""

FIRST_LINES, LAST_LINES = 20, 40
"""Of what a check wrote to stderr, those that are kept if it did not succeed: a dump of threads begins with the one."""

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a check.

    Attributes:
        name: The check's; of a run on the CPU, ``"on cpu: "`` and that.
        outcome: ``"ok"``, ``"failed"`` (it raised, or something that must hold did not), ``"crashed"``, ``"timed out"``
            or ``"skipped"``.
        judged: Whether it must be ok, or skipped.
        why: What happened, unless it is ok.
        seconds: How long it took.
        figures: What it found, as far as it came.
        stderr: The last lines, unless it is ok.
    """

    name: str
    outcome: str
    judged: bool = True
    why: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    stderr: Sequence[str] = ()


def run(
    name: str,
    *,
    place: str,
    quick: bool,
    environment: Mapping[str, str],
    timeout: float,
    module: str = "benchmarks.gpu_child",
) -> Outcome:
    """Run one check in a process of its own, and say what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        notes, stderr = Path(folder, "notes"), Path(folder, "stderr")
        command = [sys.executable, "-m", module, name, str(notes), "--on", place]
        command += ["--timeout", str(timeout), *(["--quick"] if quick else [])]
        start = time.perf_counter()
        with stderr.open("w") as said_aloud:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=said_aloud,
                stderr=said_aloud,
                start_new_session=True,
            )
            try:
                returncode: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = None
            with suppress(ProcessLookupError):  # what it has started may still be there
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = notes.read_text().splitlines() if notes.exists() else []
        outcome = judge(returncode, [json.loads(line) for line in lines if line.endswith("]")])
        lines = stderr.read_text(errors="replace").splitlines()
        if len(lines) > FIRST_LINES + LAST_LINES:
            lines = [*lines[:FIRST_LINES], "...", *lines[-LAST_LINES:]]
        return Outcome(
            name=name,
            seconds=round(time.perf_counter() - start, 1),
            stderr=[] if outcome["outcome"] == "ok" else lines,
            **outcome,
        )


def judge(returncode: int | None, notes: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
    """What became of a check, by how its process ended and what it wrote down."""
    figures = {name: value for kind, name, value in notes if kind == "figure"}
    last = next((name for kind, name, _ in reversed(notes) if kind == "step"), "the start")
    broken = [str(value) for kind, _, value in notes if kind == "broken"]
    raised = [name for kind, name, _ in notes if kind == "raised"]
    done = any(kind == "done" for kind, *_ in notes)
    ended = "did not end" if returncode is None else _how_it_ended(returncode)
    outcome = "timed out" if returncode is None else "failed" if raised or broken else "ok" if done else "crashed"
    why = [raised[0] if raised else "" if done and returncode == 0 else f"its process {ended}", *broken]
    if done and returncode != 0:  # at the exit the saver's library may find that CUDA has ended before it
        why[0] += ", after all was done"
    elif why[0]:
        why[0] += f" (after: {last})"
    return {"outcome": outcome, "why": "; ".join(filter(None, why)), "figures": figures}


def _how_it_ended(returncode: int) -> str:
    return f"was ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with {returncode}"


def plain_environment() -> dict[str, str]:
    """This process's, without what the saver or torch's allocator would go by."""
    return {
        "RAY_AUTH_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TMS_") and name not in ("LD_PRELOAD", *ALLOCATOR_SETTINGS)
        },
    }


def hooked_environment(found: Mapping[str, Any]) -> dict[str, str]:
    """What a process must be started with to be under the saver's hook.

    Args:
        found: What the machine is.

    Raises:
        RuntimeError: The saver has no library for this torch, or it cannot be loaded.
    """
    from torch_memory_saver import configure_subprocess

    environment = plain_environment()
    with configure_subprocess():
        environment["LD_PRELOAD"] = os.environ["LD_PRELOAD"].split(":")[0]
    environment |= {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    # The library wants CUDA's before Python runs; a process that does not find them never starts. torch has found its
    # own in a folder that the loader does not know. The driver's is mostly known; its folder may hold much else.
    folders = [str(Path(path).parent) for path in (*found.get("libcudart", ()), *found.get("libcuda", ()))]
    known = environment.get("LD_LIBRARY_PATH")
    refusal = ""
    for count in range(len(folders) + 1):
        environment["LD_LIBRARY_PATH"] = ":".join([*([known] if known else []), *folders[:count]])
        probe = subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL(None).tms_get_interesting_region"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        if probe.returncode == 0:
            return environment
        refusal = probe.stderr.strip()
    raise RuntimeError(f"{environment['LD_PRELOAD']} cannot be loaded: {refusal}")


def check_all(names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Run checks, one after another; the report."""
    start, plain = time.monotonic(), plain_environment()

    def left() -> float:
        return min(TIMEOUT, max(1.0, start + TOTAL - time.monotonic()))

    say("machine ...")
    facts = run("machine", place="cpu", quick=quick, environment=plain, timeout=left())
    outcomes: list[Outcome] = [] if facts.outcome == "ok" else [facts]
    gpus = len(facts.figures.get("gpus", ()))
    hooked: dict[str, str] | str
    try:
        hooked = hooked_environment(facts.figures)
    except Exception as error:  # noqa: BLE001 - the report tells of it
        hooked = said(error)

    def add(check: Check, name: str, shown: str, place: str, environment: Mapping[str, str]) -> None:
        if start + TOTAL < time.monotonic():
            outcomes.append(Outcome(name=shown, outcome="timed out", judged=check.judged, why="no time was left"))
            return
        say(f"{shown} ...")
        found = run(name, place=place, quick=quick or place == "cpu", environment=environment, timeout=left())
        # What is only recorded on a GPU has nothing to go wrong over on a CPU.
        outcomes.append(Outcome(**{**_fields(found), "name": shown, "judged": check.judged or place == "cpu"}))
        say(f"{shown}: {found.outcome}{f': {found.why}' if found.why else ''} ({found.seconds} s)")

    for name in names:
        check = CHECKS[name]
        if gpus >= check.gpus and not (check.hooked and isinstance(hooked, str)):
            add(check, name, name, "cuda", hooked if check.hooked and not isinstance(hooked, str) else plain)
            continue
        if not gpus:
            add(check, name, f"on cpu: {name}", "cpu", plain)
            skipped = f"no CUDA device; not run: {check.beyond_cpu}"
        elif gpus < check.gpus:
            skipped = f"{gpus} GPU; not run: {check.beyond_cpu}, which refuses two ranks on one"
        else:  # there is a GPU, and nothing of the saver can be shown on it: no reason to be content
            outcomes.append(Outcome(name=name, outcome="failed", judged=check.judged, why=str(hooked)))
            continue
        outcomes.append(Outcome(name=name, outcome="skipped", judged=check.judged, why=skipped))
    return {
        "machine": {
            **facts.figures,
            "hook": hooked
            if isinstance(hooked, str)
            else {key: hooked.get(key) for key in ("LD_PRELOAD", "LD_LIBRARY_PATH")},
            "left out of the environment": [name for name in ALLOCATOR_SETTINGS if name in os.environ],
        },
        "quick": quick,
        "seconds": round(time.monotonic() - start, 1),
        "skipped": [each.name for each in outcomes if each.outcome == "skipped"],
        "broken": [each.name for each in outcomes if each.judged and each.outcome not in ("ok", "skipped")],
        "checks": [asdict(each) for each in outcomes],
    }


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in Outcome.__slots__}


def say(what: str) -> None:
    """Tell how far it is."""
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help=f"only checks whose names begin so: {', '.join(CHECKS)}"
    )
    parser.add_argument("--quick", action="store_true", help="64 MB in place of 1 GB, and fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file, too")
    options = parser.parse_args()
    chosen = [name for name in CHECKS if not options.only or name.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"there is no check of that name: {', '.join(options.only)}")
    report = check_all(chosen, quick=options.quick)
    text = json.dumps(report, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    sys.exit(1 if report["broken"] else 0)


if __name__ == "__main__":
    main()
