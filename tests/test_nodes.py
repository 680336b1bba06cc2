"""Trainer, engines and driver on different Ray nodes: judged here, seen by ``tests.nodes`` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import NODES, SPARE

# Twenty seconds; for a machine that does much else at a time, starting four nodes is the slow part.
pytestmark = [pytest.mark.nodes, pytest.mark.timeout(240)]

HOMES = {name: address for address, names in NODES.items() for name in names}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, path = Path(__file__).resolve().parent.parent, tmp_path_factory.mktemp("nodes") / "seen.json"
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    # A folder of this cluster's own: in the usual one Ray would note it as the machine's, for other programs to join.
    # And no folder of pytest's: the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.nodes", str(path)],
            cwd=root,
            env=os.environ | {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            timeout=220,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_the_ranks_are_on_different_nodes_and_so_are_the_engines(seen: Any) -> None:
    assert seen["nodes"] == HOMES
    assert len({HOMES["rank 0"], HOMES["engine 0"], HOMES["engine 1"]}) == 3
    assert HOMES["rank 0"] != HOMES["rank 1"]


@pytest.mark.parametrize("trainer", ["one rank", "two ranks"])
def test_engines_on_other_nodes_get_every_byte(seen: Any, trainer: str) -> None:
    updates = seen[trainer]["updates"]
    for update in updates:
        assert update["held"] == [update["sent"]] * 2
    assert len({update["sent"] for update in updates}) == 3


@pytest.mark.parametrize(
    ("trainer", "groups"),
    [
        ("one rank", [("engine 0", "engine 1", "rank 0")]),
        ("two ranks", [("engine 0", "engine 1", "rank 0"), ("rank 0", "rank 1")]),
    ],
)
def test_every_member_of_a_group_listens_on_its_own_node_and_is_reached_there(
    seen: Any, trainer: str, groups: list[tuple[str, ...]]
) -> None:
    members = {name for group in groups for name in group}
    assert seen[trainer]["listening"] == {name: [HOMES[name]] if name in members else [] for name in HOMES}
    assert seen[trainer]["connections"] == [list(pair) for group in groups for pair in combinations(group, 2)]
    assert seen[trainer]["left"] == {name: [] for name in HOMES}, "closing gives every port back"


def test_a_trainer_in_the_driver_listens_on_the_drivers_node(seen: Any) -> None:
    found = seen["a node that dies"]
    assert found["driver listening"] == [HOMES["rank 0"]]
    assert found["whole"]["held"] == [found["whole"]["sent"]] * 2


def test_a_node_that_dies_in_mid_update_is_an_error_that_names_the_engine_and_the_other_is_updated(seen: Any) -> None:
    found = seen["a node that dies"]
    assert found["error"]["text"].startswith("EngineActor-1 ")
    assert (found["error"]["type"], found["error"]["phase"]) == ("EngineError", "transfer")
    assert found["error"]["states"] == ["updated", "lost"]
    assert found["survivor"] == {"version": found["whole"]["version"] + 1, "held": [found["repaired"]["sent"]]}


def test_an_engine_that_was_restarted_on_another_node_is_found_there_and_catches_up(seen: Any) -> None:
    found = seen["a node that dies"]
    assert found["moved to"] == SPARE
    assert found["moved engine listening"] == [SPARE]
    assert found["caught up"] == [found["repaired"]["sent"]], "from the engine that serves it, on another node"
    assert found["repaired"]["held"] == [found["repaired"]["sent"]] * 2
    assert found["repaired"]["sent"] != found["whole"]["sent"]
