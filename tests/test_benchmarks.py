"""The benchmarks measure what they say, on weights that arrived."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console

import asyncsync
from asyncsync.buckets import TensorSpec
from asyncsync.demo.actors import running
from asyncsync.messages import Transport, UpdateOrder
from benchmarks import (
    contenders,
    engine_death,
    gpu_check,
    guard_latency,
    joining,
    layouts,
    overlap,
    scale,
    seed_loop,
    simulated,
    soak,
    sync_latency,
)
from benchmarks.fleets import Fleet
from benchmarks.gpu_child import CHECKS
from benchmarks.peers import command, entries, measuring
from benchmarks.running import stalls_of_the_loop

KEYS = [
    "case",
    "bytes",
    "tensors",
    "engines",
    "ours_s",
    "broadcast_s",
    "put_s",
    "seed_s",
    "gloo_s",
    "memcpy_s",
    "ours_stall_ms",
    "seed_stall_ms",
]


def test_smollm2_is_the_real_layout() -> None:
    layout = layouts.smollm2()
    assert len(layout.shapes) == 272
    assert layout.nbytes == 269_030_016
    assert layout.shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)


def test_layouts_have_the_sizes_they_are_named_after() -> None:
    sizes = {name: layout.nbytes for name, layout in layouts.all_layouts().items()}
    assert sizes["1 MB"] == 2**20
    assert sizes["16 MB"] == 2**24
    assert sizes["64 MB"] == 2**26
    assert sizes["256 MB"] == 2**28
    assert sizes["1 GB"] == 2**30
    assert sizes["2000x4KB"] == 2000 * 4096
    assert sizes["tiny"] < 10_000


def test_a_module_holds_its_layout() -> None:
    layout = layouts.smollm2()
    small = layouts.Layout("small", {name: shape[:1] for name, shape in layout.shapes.items()})
    module = layouts.make_module(small)
    assert {name: tuple(tensor.shape) for name, tensor in module.named_parameters()} == small.shapes


def test_change_changes_every_element_and_the_fingerprint() -> None:
    weights = list(layouts.make_weights(layouts.tiny()).values())
    before = [tensor.clone() for tensor in weights]
    layouts.change(weights)
    for old, new in zip(before, weights, strict=True):
        assert (old.view(torch.int16) != new.view(torch.int16)).all()
    assert layouts.fingerprint(before) != layouts.fingerprint(weights)


@pytest.mark.benchmarks
@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_cluster")
async def test_measures_every_contender_and_finds_a_wrong_byte() -> None:
    async with Fleet.start(2) as near, Fleet.start(2) as fleet:
        await fleet.form_group()
        for layout in (layouts.tiny(), layouts.even("uneven", 3, 5, 7)):
            row = dataclasses.asdict(await sync_latency.measure(layout, near, fleet, rounds=1))
            assert list(row) == KEYS
            assert json.loads(json.dumps(row)) == row
            assert (row["case"], row["tensors"], row["engines"]) == (layout.name, len(layout.shapes), 2)
            assert all(row[key] > 0 for key in KEYS if key.endswith("_s"))

        sent = layouts.make_weights(layout)
        seed = contenders.Seed(fleet, sent)
        await seed.run()
        await seed.check()
        sent["layers.1.weight"].view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(contenders.WrongBytesError, match="Seed: engine 0"):
            await seed.check()
        seed_loop.SeedLoop(fleet.engines, fleet.group, fleet.lock, bucket_size=100).update(sent)  # three buckets
        await seed.check()


@pytest.mark.benchmarks
@pytest.mark.timeout(400)
def test_measures_the_peers_that_are_installed_and_names_the_others(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--case", "tiny", "--json", str(file)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert process.returncode == 0, process.stderr
    rows = json.loads(file.read_text())
    assert all(list(row) == ["contender", "layout", "seconds", "stall_ms", "first_s", "ours_s"] for row in rows)
    assert all(row["layout"] == "tiny" and row["seconds"] > 0 and row["first_s"] > 0 for row in rows)
    measured = [row["contender"] for row in rows]
    assert len(set(measured)) == len(measured)
    needed = {"torchrl": "torchrl", "torchstore": "torchstore", "Ray direct transport, NIXL": "nixl"}
    for name in (entry.name for entry in entries.all_entries()):
        said = f"not measured: {name}, tiny: "
        assert (name in measured) != (said in process.stdout), process.stdout
        if name not in needed:
            assert name in measured
        elif importlib.util.find_spec(needed[name]) is None:
            assert f"{said}NotInstalledError: " in process.stdout
    assert f"peer: ray.put, packed / {entries.REFERENCE}: tiny " in process.stdout


class Failing(contenders.Contender):
    """A way that leaves other bytes, or fails, in one of its runs."""

    def __init__(self, error: Exception | None, run: int) -> None:
        super().__init__([torch.zeros(4, dtype=torch.uint8)])
        self._error = error
        self._left = run

    async def run(self) -> float:
        self._left -= 1
        if self._left == 0 and self._error is not None:
            raise self._error
        return 1.0

    async def fingerprints(self) -> list[str]:
        return [await self.expected() if self._left else "other bytes"]


@pytest.mark.benchmarks
@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_cluster")
async def test_who_fails_or_leaves_other_bytes_has_no_figures() -> None:
    def failing(name: str, kind: entries.Kind, error: Exception | None, run: int) -> entries.Entry:
        return entries.Entry(name=name, kind=kind, sets=0, make=lambda _: contextlib.nullcontext(Failing(error, run)))

    async def measure(more: list[entries.Entry]) -> measuring.Findings:
        always = [entry for entry in entries.all_entries() if entry.name in (entries.FLOOR, entries.REFERENCE)]
        return await measuring.measure(layouts.tiny(), [*always, *more], rounds=1, memory=2**40, say=said.append)

    said: list[str] = []
    broken = RuntimeError("first line\n\n  the reason  ")
    peers = [failing("a", "peer", None, 1), failing("b", "peer", broken, 1), failing("c", "peer", broken, 4)]
    peers.append(failing("d", "peer", None, 6))
    findings = await measure([*peers, failing("sound", "peer", None, -1)])
    assert [row.contender for row in findings.rows] == [entries.FLOOR, entries.REFERENCE, "sound"]
    wrong = "WrongBytesError: Failing: engine 0 holds other bytes than were sent"
    reasons = {"a": wrong, "b": "RuntimeError: the reason", "c": "RuntimeError: the reason", "d": wrong}
    assert findings.missing == {(name, "tiny"): why for name, why in reasons.items()}
    assert all(any(why in line for line in said) for why in reasons.values())
    with pytest.raises(contenders.WrongBytesError):
        await measure([failing("ours", "ours", None, 3)])


def test_the_library_takes_part_over_each_of_its_transports() -> None:
    union = Literal["a", "b"] | Literal["c"]
    assert entries._names(union) == ["a", "b", "c"]
    names = {entry.name for entry in entries.all_entries() if entry.kind == "ours"}
    assert {entries.our_name("broadcast", staged=False), entries.REFERENCE} < names
    assert len(names) == 2 * len([name for name in entries._names(Transport) if name not in entries.ON_GPUS])


def test_few_run_together_and_none_beside_who_is_restless(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, everyone = layouts.all_layouts()["1 GB"], entries.all_entries()
    restless = [entry.name for entry in everyone if entry.is_restless]
    assert restless == ["Ray direct transport, NIXL"]
    for memory in (2**20, 20 * 2**30, 2**50):
        found = measuring.heats(everyone, layout, memory)
        always, *_ = ([entry.name for entry in heat[:2]] for heat in found)
        assert always == [entries.FLOOR, entries.REFERENCE]
        assert all([entry.name for entry in heat[:2]] == always for heat in found)
        others = [entry.name for heat in found for entry in heat[2:]]
        calm = [entry.name for entry in everyone if entry.name not in (*always, *restless)]
        assert others == calm + restless
        assert [entry.name for entry in found[-1][2:]] == restless
        for heat in found:
            sets = entries.PLACE_SETS + sum(entry.sets for entry in heat)
            assert len(heat) == 3 or sets * layout.nbytes <= memory
    assert max(map(len, found)) == 2 + measuring.AT_ONCE
    assert len(measuring.heats(everyone, layout, 2**20)) == len(everyone) - 2
    monkeypatch.setattr(measuring, "AT_ONCE", 100)
    assert len(measuring.heats(everyone, layout, 2**50)) == 2
    assert measuring.heats(everyone[:1], layout, 0) == [everyone[:1]]


def test_the_peers_table_says_who_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    everyone = [entry for entry in entries.all_entries() if entry.kind != "ours" or entry.name == entries.REFERENCE]
    took = {entry.name: 2.0 for entry in everyone} | {"torchrl": 0.5, entries.FLOOR: 0.1, entries.REFERENCE: 1.0}
    rows = [
        measuring.Row(contender=name, layout="x", seconds=seconds, stall_ms=1.0, first_s=1.0, ours_s=1.0)
        for name, seconds in took.items()
        if name != "torchstore"
    ]
    command.show(measuring.Findings(rows, {("torchstore", "x"): "NotInstalledError: [no]"}), everyone)
    printed = capsys.readouterr().out
    assert f"peer: torchrl / {entries.REFERENCE}: x 0.50 (FASTER)" in printed
    assert f"bare: memcpy / {entries.REFERENCE}: x 0.10\n" in printed
    assert f"peer: seed's loop / {entries.REFERENCE}: x 2.00\n" in printed
    assert printed.count("FASTER") == 1
    assert "not measured: torchstore, x: NotInstalledError: [no]" in printed


@pytest.mark.benchmarks
@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_cluster")
async def test_measures_what_an_update_holds_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overlap, "WINDOW", 0.1)
    rows = await overlap.measure(layouts.tiny(), rounds=1)
    keys = ["mode", "rollouts_before", "rollouts_during", "rollouts_after", "update_ms", "pause_ms"]
    keys += ["trainer_stall_ms", "memcpy_ms", "stall_ms"]
    for row in map(dataclasses.asdict, rows):
        assert list(row) == keys
        assert json.loads(json.dumps(row)) == row
        assert row["rollouts_before"] > 0
        assert row["rollouts_after"] > 0
        assert 0 < row["pause_ms"] <= row["update_ms"]
        assert 0 < row["trainer_stall_ms"] <= row["update_ms"]
    overlap.show("tiny", rows)
    printed = capsys.readouterr().out
    there = hasattr(asyncsync.WeightSynchronizer, "start_update")
    calls = overlap.CALLS if there else overlap.CALLS[:1]
    assert [row.mode for row in rows] == [f"{kind}, {call}" for kind in ("staged", "in place") for call in calls]
    assert ("not measured: start_update()" in printed) != there


@pytest.mark.benchmarks
@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_cluster")
async def test_an_update_that_brings_other_bytes_than_the_trainer_had_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def update_weights(synchronizer: asyncsync.WeightSynchronizer) -> asyncsync.WeightUpdate:
        layouts.change(training.weights.values())
        return await update(synchronizer)

    update = asyncsync.WeightSynchronizer.update_weights
    monkeypatch.setattr(asyncsync.WeightSynchronizer, "update_weights", update_weights)
    monkeypatch.setattr(overlap, "WINDOW", 0.01)
    training = overlap.Training(layouts.tiny())
    wanted = (overlap.RemoteRollingEngine, (layouts.tiny(), True))
    async with running(wanted) as engines, asyncsync.WeightSynchronizer(training.weights, engines) as synchronizer:
        bench = overlap.Bench(training, {"staged": engines}, {"staged": synchronizer})
        with pytest.raises(contenders.WrongBytesError, match="staged, update_weights: an engine holds other bytes"):
            await bench.update("staged", "update_weights")


def test_rollouts_are_counted_between_two_moments() -> None:
    assert overlap.rate([[0.5, 1.0, 1.5, 2.0], [1.75], []], 1.0, 2.0) == 3
    assert overlap.rate([[0.5, 2.5]], 1.0, 1.5) == 0


def test_what_staged_engines_reach_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"rollouts_before": 100.0, "rollouts_during": 60.0, "rollouts_after": 100.0, "update_ms": 100.0}
    figures |= {"pause_ms": 4.0, "trainer_stall_ms": 30.0, "memcpy_ms": 20.0, "stall_ms": 3.0}
    modes = ("staged, start_update", "staged, update_weights", "in place, start_update")
    overlap.show("x", [overlap.Row(mode=mode, **figures) for mode in modes])
    printed = capsys.readouterr().out
    assert "staged, start_update: pause / update 0.04, target 0.05\n" in printed
    assert "staged, start_update: rollouts during / before 0.6, target 0.7 MISSED" in printed
    assert "staged, start_update: trainer stall / memcpy 1.5, target 1.4 MISSED" in printed
    assert "staged, update_weights: trainer stall" not in printed
    assert "in place, start_update: " not in printed


@pytest.mark.benchmarks
@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_cluster")
async def test_measures_how_long_engines_are_held_back_while_another_joins(capsys: pytest.CaptureFixture[str]) -> None:
    rows = await joining.measure(layouts.tiny(), rounds=1)
    assert [row["step"] for row in rows] == list(joining.STEPS)
    assert all(row["seconds"] > 0 and row["held_ms"] > 0 for row in rows)
    joining.show(rows)
    assert "first update" in capsys.readouterr().out


@pytest.mark.benchmarks
@pytest.mark.timeout(400)
@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_cluster")
async def test_a_short_soak_finds_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    figures = await soak.measure(soak.QUICK_MINUTES, seed=0, timeout=30.0)  # timing decides no test
    assert json.loads(json.dumps(figures)) == figures
    assert figures["messages"] == []
    assert figures["violations"] == 0
    assert figures["updates"] > 0
    assert figures["faults"] == sum(figures["faults_by_kind"].values()) > 0
    assert figures["reads"] > 0
    assert {"minutes", "seed", "rss_mb"} <= figures.keys()
    soak.show(figures)
    assert "violations" in capsys.readouterr().out


def test_a_soak_says_what_is_wrong() -> None:
    findings = soak.Findings()
    for moment, files in (("quarter", 10), ("end", 100)):
        findings.note_vitals("driver", moment, {"pid": 1, "rss": 0, "files": files, "threads": 1})
    soak.find_growth(findings)
    assert findings.messages == ["driver: files grew by 90, from 10"]


@pytest.mark.benchmarks
@pytest.mark.timeout(400)
@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_cluster")
async def test_measures_how_long_it_takes_to_go_on_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    figures = await engine_death.measure(engine_death.QUICK_CASE, rounds=1, say=Console(stderr=True))
    assert json.loads(json.dumps(figures)) == figures
    assert figures["undisturbed_s"] > 0
    assert figures["survivors_s"] > figures["known_s"] > 0
    assert isinstance(figures["stopped_after_deadline_s"], float)
    engine_death.show(figures)
    assert "1 (killed)" in capsys.readouterr().out


def test_the_table_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = sync_latency.Row(
        case="x",
        bytes=10**6,
        tensors=1,
        engines=2,
        ours_s=0.001,
        broadcast_s=0.003,
        put_s=0.002,
        seed_s=0.004,
        gloo_s=0.0005,
        memcpy_s=0.0001,
        ours_stall_ms=1,
        seed_stall_ms=2,
    )
    sync_latency.show([row])
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    assert printed.count(" x ") == 1


async def _blocked(seconds: float) -> float:
    async with stalls_of_the_loop() as meter:
        time.sleep(seconds)  # noqa: ASYNC251, TID251 - a blocked loop is what must be seen
    return meter.longest_ms


@pytest.mark.asyncio
async def test_the_ticker_sees_a_loop_blocked_to_the_end() -> None:
    assert await _blocked(0.05) >= 48


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.asyncio
async def test_the_control_plane_is_measured_over_simulated_engines_and_sources(staged: bool) -> None:
    row = await scale.measure_control(3, 2, staged=staged, rounds=1)
    assert json.loads(json.dumps(row)) == row
    assert (row["engines"], row["sources"], row["staged"]) == (3, 2, staged)
    assert row["control_ms"] > 0


@pytest.mark.asyncio
async def test_simulated_ends_refuse_what_real_ones_refuse() -> None:
    plans = simulated.SharedPlan()
    engines = [simulated.SimulatedEngine(plans, staged=True) for _ in range(2)]
    trainer = simulated.SimulatedTrainer([TensorSpec("weight", torch.float32, (3,))])
    async with asyncsync.WeightSynchronizer(trainer, engines) as synchronizer:
        await synchronizer.update_weights()
        update = await synchronizer.update_weights()
        assert [engine.weight_version for engine in engines] == [2, 2]
        assert [outcome.digest for outcome in update.outcomes] == [update.digest] * 2
        status = await engines[0].describe_engine()
        assert (status.epoch > 0, status.plan_digest is not None, len(status.connections)) == (True, True, 1)
        order = UpdateOrder(
            epoch=status.epoch + 1,
            version=3,
            connections=status.connections,
            plan_digest=str(status.plan_digest),
            policy="drain",
            base_epoch=None,
            timeout=1.0,
        )
        older = dataclasses.replace(order, epoch=status.epoch - 1)
        elsewhere = dataclasses.replace(order, connections=("another",))
        other = dataclasses.replace(order, plan_digest="another")
        for wrong in (older, elsewhere, other, dataclasses.replace(order, version=2)):
            with pytest.raises(asyncsync.OutOfStepError):
                await engines[0].receive_weights(wrong)
        for wrong in (older, elsewhere, other):
            with pytest.raises(asyncsync.OutOfStepError):
                await trainer.send_weights(wrong)
        await engines[0].receive_weights(order)


def test_planning_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [scale.measure_planning(count, rounds=1) for count in (300, 600)]
    for row, count in zip(rows, (300, 600), strict=True):
        assert json.loads(json.dumps(row)) == row
        assert row["tensors"] == count
        assert row["plan_first_s"] > 0
        assert row["plan_again_s"] >= 0
    control = dict.fromkeys(
        ("control_ms", "least_ms", "first_ms", "joined_ms", "left_ms", "stall_ms", "bare_ms"), 500.0
    )
    scale.show([{"engines": count, "sources": 1, "staged": True} | control for count in (1, 1024)], rows)
    printed = capsys.readouterr().out
    assert "1024 engines, 1 sources, staged: 500 ms, target 300 MISSED; one more: 0 us up to 1024" in printed
    assert "600 tensors, planned again" in printed


@pytest.mark.asyncio
async def test_the_guard_is_measured_beside_a_context_that_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    rows = await guard_latency.measure(10)
    assert json.loads(json.dumps(rows)) == rows
    assert [row["case"] for row in rows] == ["nothing", "offload=False", "offload=None"]
    assert all(row["median_us"] > 0 for row in rows)
    guard_latency.show([*rows, {"case": "slow", "rounds": 1, "median_us": 21.0, "p99_us": 30.0}])
    assert "slow: median 21.00 us, 99 % 30.00 us, target 20 MISSED" in capsys.readouterr().out


@pytest.mark.benchmarks
@pytest.mark.timeout(400)
def test_without_a_gpu_its_check_runs_as_far_as_it_can_and_says_what_it_skipped(tmp_path: Path) -> None:
    """Every check runs on the CPU, and what must hold there does."""
    file = tmp_path / "report.json"
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--quick", "--json", str(file)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    report = json.loads(process.stdout)
    assert json.loads(file.read_text()) == report
    assert (process.returncode, report["broken"]) == (0, []), process.stdout
    assert report["machine"]["torch"] == torch.__version__
    assert report["skipped"] == list(CHECKS)
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [name for check in CHECKS for name in (f"on cpu: {check}", check)]
    for name in CHECKS:
        assert (checks[name]["outcome"], checks[name]["figures"]) == ("skipped", {})
        assert checks[name]["why"].startswith("no CUDA device; not run: ")
        assert checks[f"on cpu: {name}"]["outcome"] == "ok"
        assert checks[f"on cpu: {name}"]["figures"]
    found = {name: checks[f"on cpu: {name}"]["figures"] for name in CHECKS}
    assert found["guarded"]["update 3: engines' bytes are equal"] == [True, True]
    for name in ("unguarded_host_copies", "unguarded_live"):
        assert (found[name]["update"], found[name]["engine's bytes are equal"]) == ("succeeded", True)
    for name in ("unguarded_new_memory", "unguarded_cached_memory"):
        assert found[name]["trainer's bytes are equal"] is True
    assert found["host_copies"]["paused: bytes that are wrong"] == []
    assert found["ipc"]["bytes copied there are equal"] is True
    assert found["cuda_ipc"]["update 2: engines' bytes are equal"] == [True, True]
    assert found["gloo"]["device / host"] > 0


@pytest.mark.benchmarks
def test_a_check_that_hangs_is_ended_and_one_that_raises_is_told(tmp_path: Path) -> None:
    def run(module: str, timeout: float) -> gpu_check.Outcome:
        environment = {**gpu_check.plain_environment(), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        return gpu_check.run("x", place="cpu", quick=True, environment=environment, timeout=timeout, module=module)

    (tmp_path / "hangs.py").write_text("import threading\nprint('here')\nthreading.Event().wait()\n")
    (tmp_path / "aborts.py").write_text("import os\nos.abort()\n")
    hung, aborted = run("hangs", 1.0), run("aborts", 30.0)
    assert (hung.outcome, hung.why, hung.stderr) == (
        "timed out",
        "its process did not end (after: the start)",
        ["here"],
    )
    assert (aborted.outcome, aborted.why) == ("crashed", "its process was ended by SIGABRT (after: the start)")


@pytest.mark.parametrize(
    ("returncode", "notes", "outcome", "why"),
    [
        (0, [("figure", "equal", True), ("done", "", None)], "ok", ""),
        (0, [("broken", "equal", "equal is False"), ("done", "", None)], "failed", "equal is False"),
        (1, [("done", "", None)], "ok", "its process exited with 1, after all was done"),
        (1, [("step", "reading", None), ("raised", "OSError: no", None)], "failed", "OSError: no (after: reading)"),
        (-11, [("step", "reading", None)], "crashed", "its process was ended by SIGSEGV (after: reading)"),
        (0, [("step", "reading", None)], "crashed", "its process exited with 0 (after: reading)"),
        (None, [("done", "", None)], "timed out", "its process did not end, after all was done"),
    ],
)
def test_what_became_of_a_check(returncode: int | None, notes: Any, outcome: str, why: str) -> None:
    judged = gpu_check.judge(returncode, notes)
    assert (judged["outcome"], judged["why"]) == (outcome, why)
