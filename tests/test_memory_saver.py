"""torch_memory_saver's own library at work: *real hook, stubbed CUDA* (see ``tests/cuda_stubs``).

Run with ``-m memory_saver``. Each program runs in a process of its own, under the hook; its findings are judged here.
Without a C compiler these tests fail, they are never skipped.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncsync
from benchmarks import gpu_check
from tests.cuda_stubs import build
from tests.engines import ToldEngine, failing
from tests.hooked_trainer import SleepingRank
from tests.sample import content, contents

pytestmark = [pytest.mark.memory_saver, pytest.mark.timeout(300)]

Found = dict[str, Any]

FIRST = [True, "default"]
"""A thread's flag and tag, as nobody has touched them."""


@pytest.fixture(scope="session")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process under the hook."""
    disk = tmp_path_factory.mktemp("disk")
    return build(tmp_path_factory.mktemp("stubs")) | {
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
        "TMS_DISK_BACKUP_DIR": str(disk),
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    }


def ended(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="session")
def run(hooked: dict[str, str]) -> Callable[..., Found]:
    """Runs a program, once, and gives what it found."""
    known: dict[tuple[str, str], Found] = {}

    def run(name: str, module: str = "tests.hooked_updates") -> Found:
        if (module, name) not in known:
            process = ended(hooked, module, name)
            assert process.returncode == 0, process.stderr
            known[module, name] = json.loads(process.stdout.splitlines()[-1])
        return known[module, name]

    return run


# -- the guard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("bystander", {"bystander tracked": False, "left": FIRST}),
        ("thread", {"work tracked": True, "left": FIRST}),
        ("second", {"second": "AssertionError", "left": FIRST}),
        ("region_inside", {"left": [False, "default"]}),
        ("region_around", {"region": "AssertionError", "left": [True, "weights"]}),
        ("cancelled", {"left": FIRST}),
    ],
)
def test_the_naive_way_fails(run: Callable[..., Found], case: str, outcome: Found) -> None:
    """Why there is a guard: ``disable()`` held across an await on the loop's thread. If it works, the guard may go."""
    assert run("naive", "tests.hooked")[case] == outcome


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("bystander", {"bystander tracked": True}),
        ("thread", {"bystander tracked": True}),
        ("second", {}),
        ("region_inside", {"in the region": [True, "weights"]}),
        ("region_around", {"in the region": [True, "weights"]}),
        ("cancelled", {"thread left": FIRST}),
    ],
)
def test_the_guard_does_not(run: Callable[..., Found], case: str, outcome: Found) -> None:
    assert run("guarded", "tests.hooked")[case] == {"work tracked": False, "left": FIRST} | outcome


def test_whatever_is_interleaved_only_guarded_work_is_untracked_and_every_thread_is_left_as_it_was(
    run: Callable[..., Found],
) -> None:
    found = run("histories", "tests.hooked")
    assert found["wrong"] == []
    assert all(found["counts"].values()), "everything has happened"
    assert found["counts"]["guarded work"] > 1000


def test_guarded_work_runs_on_the_callers_device(run: Callable[..., Found]) -> None:
    assert run("devices") == {"devices": [3, 1, 2, 1], "own": 1}


def test_a_saver_that_cannot_be_switched_off_is_an_error_that_says_why(run: Callable[..., Found]) -> None:
    found = run("broken")
    assert "entered" not in found
    assert "take expandable_segments:True out" in found["error"]
    assert found["not offloaded"] == 1, "a trainer that is not offloaded has nothing to do with it"
    assert found["tracked in regions only"] is False


@pytest.mark.parametrize(
    ("which", "case", "guarded", "text"),
    [
        ("active", "active", True, "tracks what new threads allocate"),
        ("regions only", "regions only", False, "TMS_INIT_ENABLE is off"),
        ("expandable segments", "broken", False, "out of PYTORCH_CUDA_ALLOC_CONF"),
        ("expandable segments, by their new name", "broken", False, "out of PYTORCH_ALLOC_CONF"),
        ("no longer named", "broken", False, "leave LD_PRELOAD as it was"),
        ("both", "broken", False, "leave one of the two out"),
        ("xpu", "xpu", False, "a thread of its own"),
        ("old", "active", True, "install 0.0.10 or newer"),
    ],
)
def test_the_status_tells_which_case_holds(
    run: Callable[..., Found], which: str, case: str, guarded: bool, text: str
) -> None:
    found = run("statuses")
    assert found[which][:2] == [case, guarded]
    assert text in found[which][2]
    assert found["started"] is False, "it looks only"


# -- weights that are paused ------------------------------------------------------------------------------------------


def test_paused_memory_cannot_be_read(hooked: dict[str, str]) -> None:
    """The stubs are as unforgiving as a GPU is."""
    assert ended(hooked, "tests.hooked_updates", "naive_read").returncode < 0


def test_every_kind_of_tensor_is_read_from_its_host_copy(run: Callable[..., Found]) -> None:
    found = run("reading")
    assert found["kinds"] > 40
    assert (found["equal"], found["same strides"]) == (True, True)
    assert found["awake is itself"], "memory that is there is read itself"
    assert found["region"] == [0, 1, 2, 3, 4]
    assert found["others are themselves"], "what is not the saver's is read itself"
    assert found["still asleep"]
    assert "keep it paused until the update is over" in found["resumed"]


@pytest.mark.parametrize(
    ("which", "names", "reason"),
    [
        ("lost", ["lost.0", "lost.1"], "its region 'nowhere' keeps it nowhere"),
        ("spilled", ["spilled.0"], "on disk only"),
        ("foreign", ["foreign.0"], "none of the saver's"),
        ("unknown", ["unknown.0"], "not memory of torch's allocator"),
        ("off", ["weight"], "TMS_INIT_ENABLE_CPU_BACKUP off"),
    ],
)
def test_paused_memory_without_a_host_copy_is_refused_by_name(
    run: Callable[..., Found], which: str, names: list[str], reason: str
) -> None:
    refused, text = run("reading")["refused"][which]
    assert refused == names
    assert reason in text


def test_a_host_copy_that_outlived_its_pause_is_not_read(run: Callable[..., Found]) -> None:
    assert run("stale") == {"kept": [0.0] * 4, "read": [1.0] * 4}


# -- updates ----------------------------------------------------------------------------------------------------------


def test_a_trainer_that_is_paused_stays_paused_over_whole_updates(run: Callable[..., Found]) -> None:
    found = run("updated")
    assert found["equal"] == [False, True, True, True, True]
    assert found["asleep"] == [True, True, True, True, False], "the last one was not to be offloaded"
    assert found["intact"] == [True, True]


def test_guarded_sections_are_as_few_as_promised(run: Callable[..., Found]) -> None:
    assert run("updated")["counts"] == {
        "connect fails": 1,
        "not connected": 2,
        "connected": 1,
        "asked again": 1,
        "not offloaded": 0,
    }


def test_a_trainer_whose_weights_are_copied_may_be_resumed_and_changed(run: Callable[..., Found]) -> None:
    found = run("started")
    assert found["equal"] == [True] * 3
    assert found["counts"] == [2] * 3, "one to copy, one to send"


def test_what_cannot_be_read_is_refused_before_anything_is_sent(run: Callable[..., Found]) -> None:
    found = run("refusing")
    assert (found["names"], found["calls"], found["untouched"]) == (["lost"], ["describe_engine"], True)
    assert (found["awake"], found["names in step"], found["repaired"]) == (True, ["lost"], True)


def test_nothing_is_written_to_memory_that_an_engine_has_released(run: Callable[..., Found]) -> None:
    found = run("released")
    assert "the memory of these weights is released, so they cannot be written: away" in found["error"]
    assert found["untouched"] == [0.0] * 4
    assert found["awake"] == [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]
    error, there = found["staged"]
    assert "cannot be written: away" in error
    assert there == [0.0] * 4
    assert found["staged awake"] == [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]


def test_the_documented_engine_sleeps_and_is_woken(run: Callable[..., Found]) -> None:
    found = run("documented")
    assert (found["asleep"], found["version asleep"]) == (True, None)
    assert "generated" not in found
    assert "released" in found["refused"]
    assert found["awake"] == [2, [0.0, 1.0, 2.0, 3.0, 4.0], []]


def test_a_trainer_that_is_cancelled_at_any_await_leaves_every_thread_as_it_was(run: Callable[..., Found]) -> None:
    found = run("cancelled")
    assert found["wrong"] == []
    assert all(found["reached"].values())
    assert found["reached"]["send_weights waiting"] >= 6


def test_a_trainer_that_is_resumed_in_the_middle_fails_the_update(run: Callable[..., Found]) -> None:
    found = run("resumed_in_the_middle")
    for moment in ("before", "before and paused again", "after", "after and paused again"):
        error, version = found[moment]
        assert "was resumed in the middle of an update" in error
        assert version == 1
    assert found["works on"]
    assert (found["retains"], found["retains what it did"]) == (False, True), "as its owner has it"


def test_what_the_trainers_own_code_allocates_in_an_update_is_untracked(run: Callable[..., Found]) -> None:
    found = run("own_code")
    assert {who: set(tracked) for who, tracked in found.items()} == {
        **{who: {False} for who in ("before_update", "after_update", "function", "describe", "gather", "clean-up")},
        "engine": {False},
        **{who: {True} for who in ("bystander", "bystander on a thread")},
    }


def test_a_gathering_that_goes_on_after_a_failure_is_untracked(run: Callable[..., Found]) -> None:
    first, second = run("after_a_failure")["tracked"]
    assert not any(tracked for who in (first, second) for some in who.values() for tracked in some)
    assert first["gather"], "it takes part all the same"
    assert second["gather"]


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_memory_that_cuda_ipc_cannot_share_is_copied_out_or_refused(run: Callable[..., Found]) -> None:
    found = run("sharing")
    assert found["refused"][0] == ["tracked"]
    assert found["paused"][0] == ["tracked"]
    assert "memory_saver_guard" in found["tracked here"]
    assert (found["itself"], found["equal"]) == ([True, False, True], [True] * 3)
    assert found["elsewhere"]
    assert found["can be shared"]


# -- CUDA IPC ---------------------------------------------------------------------------------------------------------

IPC = "tests.hooked_ipc"


def test_weights_in_the_savers_memory_come_to_engines_by_cuda_ipc_bit_for_bit(run: Callable[..., Found]) -> None:
    found = run("updated", IPC)
    assert found["saver's"], "they could not be shared themselves"
    assert found["equal"] == [[True, True]] * 5, "awake three times, paused, and started"
    assert found["transports"] == [["cuda_ipc", "cuda_ipc"]] * 5
    assert found["stays paused"]
    assert found["made"] == [[True, True]] * 5, "on the guarded thread, and not the saver's"
    assert found["opened"] == [[0, 0]] * 5, "engines have closed what they read"
    assert (found["kept"], found["allocated"]) == ([0] * 5, 0), "a trainer that may sleep keeps no set"
    assert found["in /dev/shm"] == []


def test_a_trainer_that_does_not_sleep_keeps_one_set(run: Callable[..., Found]) -> None:
    found = run("kept", IPC)
    assert found == {"numbers": [[1]] * 4, "equal": [True] * 4, "left": 0}


def test_one_update_goes_through_a_gpus_memory_and_other_ways(run: Callable[..., Found]) -> None:
    found = run("mixed", IPC)
    assert found["equal"] == [[True] * 3] * 2
    assert found["transports"] == [["cuda_ipc", "broadcast", "shared"]] * 2


@pytest.mark.parametrize(
    ("case", "reason", "level"),
    [
        ("not capable", "CUDA IPC cannot share what torch allocates here (expandable segments", "WARNING"),
        ("too little", "memory of the GPU for a set of the weights needs 5.41 kB, and there is 1 kB", "WARNING"),
        ("hidden", "it does not see the trainer's GPU 0f3b8a51-0000-4000-8000-00000000000a", "DEBUG"),
    ],
)
def test_what_cuda_ipc_cannot_do_is_told_before_anything_or_done_another_way(
    run: Callable[..., Found], case: str, reason: str, level: str
) -> None:
    found = run("refused", IPC)[case]
    assert f"Peer-0: {reason}" in found["error"]
    assert found["calls"] == ["describe_engine"]
    assert (found["shared"], found["equal"]) == ("shared", True)
    assert found["told"][0].startswith(f"{level}: no CUDA IPC for Peer-0: {reason}")


def test_memory_of_a_gpu_that_is_used_up_between_two_updates_ends_none(run: Callable[..., Found]) -> None:
    found = run("used_up", IPC)
    assert found["transports"] == [["cuda_ipc"] * 2, ["shared"] * 2, ["cuda_ipc"] * 2]
    assert found["equal"] == [[True, True]] * 3


def test_a_set_is_open_for_one_update_and_closed_before_it_is_let_go_of(run: Callable[..., Found]) -> None:
    found = run("lines", IPC)
    assert found["equal"] == [True] * 3
    assert found["open"] == [[1, 1, 1], [0, 0, 0]] * 3, "opened, leases, held at the source"
    assert found["numbers"] == [1, 1, 1]
    assert found["order here"] == ["synchronize", "synchronize", "says with 0 open"], "read, closed, said"
    assert found["order there"] == ["stream", "told"], "written, told"


def test_memory_that_an_engine_has_open_is_never_written_to_or_freed(run: Callable[..., Found]) -> None:
    found = run("left", IPC)
    assert found["retired"] == [0, 1], "none to be given, one open elsewhere"
    assert (found["bytes stay"], found["others"], found["allocated"]) == (True, True, 2)
    assert found["closed"] == [0, [1, 0], 1], "freed once it was closed"


def test_a_source_that_is_killed_in_the_middle_is_heard_at_once(run: Callable[..., Found]) -> None:
    found = run("killed", IPC)
    assert (found["waits"], found["dead"]) == (True, True)
    assert (found["error"], found["peers"]) == ("the source has left the group", [["a group", 0]])
    assert found["open"] == [1, 0]


def test_an_engine_that_is_killed_with_a_set_open_is_heard_and_the_memory_is_freed(run: Callable[..., Found]) -> None:
    found = run("engine_killed", IPC)
    assert (found["waits"], found["error"]) == (True, "rank 1 has left the group")
    assert (found["open"], found["left"]) == ([1, 1, 0], 0)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("no share", "says what nobody understands"),
        ("a share cut short", "says what nobody understands"),
        ("a share too long", "says what nobody understands"),
        ("more than buckets", "says what nobody understands"),
        ("no handle", "cannot be opened"),
        ("another GPU", "GPU 0f3b8a51-0000-4000-8000-00000000000b, which this process does not see"),
    ],
)
def test_what_is_no_share_of_a_gpu_that_is_seen_is_not_opened(
    run: Callable[..., Found], what: str, reason: str
) -> None:
    error, opened, leases = run("strange", IPC)[what]
    assert reason in error
    assert (opened, leases) == (0, 0)


def test_a_forked_child_keeps_nothing_of_a_gpu_open_and_closes_nothing(run: Callable[..., Found]) -> None:
    found = run("forked", IPC)
    here, there = found["pipes"]
    assert here - there == 3, "a lease, and both ends of one"
    assert (found["open"], found["equal"], found["left"]) == (1, True, 0)


# -- the life of a trainer that sleeps --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_trainer_wakes_for_an_update_makes_its_groups_anew_and_goes_back_to_sleep(
    hooked: dict[str, str], ray_cluster: None, tmp_path: Path
) -> None:
    environment = {name: value for name, value in hooked.items() if name != "PYTHONPATH"}
    actors: Any = SleepingRank
    ranks = [
        actors.options(runtime_env={"env_vars": environment}).remote(rank, 2, str(tmp_path / "store"))
        for rank in range(2)
    ]

    async def states() -> list[Found]:
        return list(await asyncio.gather(*(rank.state.remote() for rank in ranks)))

    def as_it_was(updates: int) -> list[Found]:
        state = {"asleep": True, "in a group": False, "its work was tracked": False, "others are tracked": True}
        return [state | {"updates": updates, "guarded": True}] * 2

    first = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
    engines = [ToldEngine(nn.ParameterDict({"weight": torch.zeros(8)}), staged=staged) for staged in (True, False)]
    async with asyncsync.WeightSynchronizer(ranks, engines, timeout=60) as synchronizer:
        assert await states() == as_it_was(0)
        for number in range(3):
            await synchronizer.update_weights()
            assert [contents(engine.module)["weight"] for engine in engines] == [content(first + number)] * 2
            assert await states() == as_it_was(number + 1)
            await asyncio.gather(*(rank.step.remote() for rank in ranks))
        engines[0].before["receive_weights"] = failing(OSError("no"))
        with pytest.raises(asyncsync.EngineError):
            await synchronizer.update_weights()
        assert await states() == as_it_was(4), "after a failure, too"


# -- what is to be checked on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def check(hooked: dict[str, str]) -> Callable[[str], gpu_check.Outcome]:
    """Runs one of the checks, once, as on a GPU, but over the stubs."""
    known: dict[str, gpu_check.Outcome] = {}

    def check(name: str) -> gpu_check.Outcome:
        if name not in known:
            module = "tests.hooked_checks"
            known[name] = gpu_check.run(name, place="cuda", quick=True, environment=hooked, timeout=100, module=module)
        return known[name]

    return check


@pytest.mark.parametrize("name", ["guarded", "host_copies", "tracking", "cuda_ipc", "unguarded_host_copies"])
def test_what_must_hold_on_a_gpu_holds_over_the_stubs(check: Callable[[str], gpu_check.Outcome], name: str) -> None:
    outcome = check(name)
    assert (outcome.outcome, outcome.why) == ("ok", ""), outcome.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unguarded_live", "its process was ended by SIGSEGV (after: updating)"),
        ("unguarded_new_memory", "its process exited with 1 (after: resuming)"),
    ],
)
def test_a_check_that_ends_its_process_is_told(check: Callable[[str], gpu_check.Outcome], name: str, why: str) -> None:
    outcome = check(name)
    assert (outcome.outcome, outcome.why) == ("crashed", why)
    assert outcome.stderr


def test_the_guarded_check_was_really_over_a_paused_trainer(check: Callable[[str], gpu_check.Outcome]) -> None:
    figures = check("guarded").figures
    assert [figures[f"update {number}: away after"] for number in (1, 2, 3)] == ["all"] * 3
    assert [figures[f"update {number}: guarded sections"] for number in (1, 2, 3)] == [2, 1, 1]
