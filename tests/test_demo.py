"""The command line and its demo: a policy learns while its weights are updated."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from asyncsync import cli
from asyncsync.demo import measures, policy_loop, reversal
from asyncsync.demo.language_model import find_model
from asyncsync.demo.progress import Observer, SilentObserver, Step, Summary

JSON_KEYS = {
    "updates",
    "reward_first",
    "reward_last",
    "digests_agree",
    "update_ms_median",
    "pause_ms_median",
    "loop_stall_ms",
    "seconds",
}

GOOD = Summary(
    updates=101,
    update_bytes=126_504,
    reward_first=0.1,
    reward_last=0.98,
    gain_wanted=0.3,
    staleness_max=2,
    generated=80_000,
    digests_agree=True,
    greedy_equal=None,
    update_ms_median=30.0,
    pause_ms_median=8.0,
    loop_stall_ms=12.0,
    seconds=25.0,
)


STEP = Step(
    step=1,
    steps=60,
    reward=0.5,
    version=7,
    staleness=2,
    update_ms=31.4,
    drain_ms=3.0,
    pause_ms=8.2,
    stall_ms=12_345.0,
    digests_agree=True,
    greedy_equal=None,
    prompt="12345678",
    answer="87654321",
)


class Recorder(SilentObserver):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step(self, step: Step) -> None:
        self.steps.append(step)


@pytest.mark.ray
@pytest.mark.asyncio
async def test_the_policy_demo(ray_cluster: None) -> None:
    observer = Recorder()
    summary = await policy_loop.run(steps=8, seed=1, observer=observer)
    assert summary.digests_agree
    assert summary.updates == 9
    assert [step.version for step in observer.steps] == list(range(2, 10))
    assert all(0 <= (step.staleness or 0) <= policy_loop.MAX_STALENESS for step in observer.steps)
    assert summary.as_json().keys() == JSON_KEYS
    assert 0 < summary.pause_ms_median < summary.update_ms_median
    assert summary.generated >= 8 * policy_loop.ROLLOUTS * policy_loop.PROMPTS * policy_loop.GROUP


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.exhaustive
def test_the_policy_learns_from_its_own_answers(one_thread: None) -> None:
    torch.manual_seed(0)
    policy, prompts = reversal.Policy(), random.Random(0)
    optimizer = torch.optim.Adam(policy.parameters(), 4e-3)
    rewards = []
    for version in range(45):
        rollout = reversal.generate(policy, reversal.draw_prompts(prompts, 32), group=8, version=version)
        optimizer.zero_grad()
        reversal.policy_gradient_loss(policy, rollout).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rewards.append(float(rollout.rewards.mean()))
    first, last = measures.first_and_last(rewards)
    assert first == pytest.approx(1 / reversal.DIGITS, abs=0.02)
    assert last > first + 0.1


@pytest.mark.asyncio
async def test_the_stall_meter_sees_the_loop_stand_still() -> None:
    meter = measures.StallMeter()
    watch = asyncio.create_task(meter.watch())
    await asyncio.sleep(0.005)
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until:
        pass
    await asyncio.sleep(0.005)
    watch.cancel()
    assert meter.longest_ms >= 45


def test_progress_shows_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*, steps: int, seed: int, observer: Observer) -> Summary:
        observer.stage("starting")
        for step in range(1, steps + 1):
            observer.step(replace(STEP, step=step, steps=steps, digests_agree=step != 3))
        return GOOD

    monkeypatch.setattr(policy_loop, "run", run)
    monkeypatch.setattr(cli, "_local_ray", nullcontext)
    result = CliRunner().invoke(cli.app, ["demo", "--steps", "60"])
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if "→ 87654321" in line]
    assert " ".join(rows[0].split()) == "1 7 0.500 ████░░░░ 2 31 ms 8 ms 12.3 s 12345678 → 87654321"
    assert [int(row.split()[0]) for row in rows] == [1, 3, *range(5, 65, 5)]
    assert result.stdout.count("DIGESTS DISAGREE") == 1
    assert all(word in result.stdout for word in ("version", "reward", "stale", "update", "pause", "stall"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"digests_agree": False}, ["digests disagree"]),
        ({"greedy_equal": True}, []),
        ({"greedy_equal": False}, ["different tokens"]),
        ({"reward_last": 0.2}, ["did not clearly rise"]),
        ({"reward_last": math.nan, "digests_agree": False}, ["digests disagree", "did not clearly rise"]),
    ],
)
def test_what_counts_as_a_failure(changes: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    summary = replace(GOOD, **changes)
    assert len(summary.failures) == len(words)
    monkeypatch.setattr(cli, "_run_demo", lambda *_, **__: summary)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == (1 if words else 0)
    flat = " ".join(result.stdout.split())
    assert all(word in flat for word in words)


def test_json_is_one_object_on_the_last_line_of_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_run_demo", lambda *_, **__: GOOD)
    result = CliRunner().invoke(cli.app, ["demo", "--json"])
    assert json.loads(result.stdout) == GOOD.as_json()
    assert "0.100 → 0.980" in result.stderr


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (ValueError("it is odd"), "ValueError: it is odd", 1),
        (ExceptionGroup("several", [ExceptionGroup("one", [OSError("no room")])]), "OSError: no room", 1),
        (RuntimeError("remote:\n  File …\nKeyError: 'weight'"), "KeyError: 'weight'", 1),
        (RuntimeError("killed\n" + "advice " * 60), "RuntimeError: killed", 1),
        (TimeoutError(), "TimeoutError", 1),
    ],
)
def test_errors_are_one_line(error: BaseException, words: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Summary:
        raise error

    monkeypatch.setattr(cli, "_run_demo", fail)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert (result.exit_code, result.stdout) == (code, f"error: {words}\n")


def test_version_and_help() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).stdout.startswith("asyncsync ")
    assert "demo" in CliRunner().invoke(cli.app, ["--help"]).stdout
    described = CliRunner().invoke(cli.app, ["demo", "--help"])
    assert described.exit_code == 0
    assert all(option in described.stdout for option in ("--steps", "--model", "--json", "--seed"))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nothing", "there is no model"), (tmp_path, "no config.json")):
        result = CliRunner().invoke(cli.app, ["demo", "--model", str(path)])
        assert result.exit_code == 2
        assert words in " ".join(result.stdout.split())
        assert "Traceback" not in result.output


def test_finding_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.demo.language_model.find_spec", lambda _: object())
    gguf = tmp_path / "Tiny.Q4.gguf"
    gguf.touch()
    assert find_model(gguf) == find_model(tmp_path)
    assert find_model(gguf).name == "Tiny.Q4"
    (tmp_path / "readme.txt").touch()
    with pytest.raises(ValueError, match="not a GGUF file"):
        find_model(tmp_path / "readme.txt")
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path).gguf is None
    assert find_model(tmp_path).name == tmp_path.name


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.demo.language_model.find_spec", lambda _: None)
    (tmp_path / "config.json").touch()
    result = CliRunner().invoke(cli.app, ["demo", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "pip install '.[models]'" in " ".join(result.stdout.split())
