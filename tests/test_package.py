"""The house: imports point downward, one door to each third party, and importing starts nothing."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path
from typing import get_origin

import pytest
from torch import nn

import asyncsync

PACKAGE = Path(asyncsync.__file__).parent

FLOORS = (
    {"errors", "report"},
    {
        *(
            "shield",
            "threads",
            "digests",
            "buckets",
            "packing",
            "deltas",
            "shards",
            "clock",
            "fanout",
            "coalesce",
            "lock",
        ),
        *("devices", "masters", "memory_saver", "guard"),
    },
    {
        "weights",
        "weight_files",
        "reading",
        "messages",
        "checksums",
        "cluster",
        "transports",
        "sending",
        "baseline",
        "delta_sending",
        "sender_thread",
        "gathering",
        "held",
    },
    {"engines", "rank_worker", "trainer", "trainer_group", "shared_lock"},
    {
        "fleet",
        "membership",
        "sources",
        "attempt",
        "connection",
        "catch_up",
        "losses",
        "readers",
        "tally",
        "transaction",
        "started",
    },
    {"synchronizer"},
    {"__init__"},
    {"demo", "testing"},
    {"cli"},
    {"__main__"},
)
"""Modules and packages, lowest first; on one floor, imports must not go in a circle."""

DOORS = {
    "ray": {"cluster"},
    "torch_memory_saver": {"memory_saver"},
    "aiorwlock": {"lock"},
    "xxhash": {"digests"},
    "torch.distributed": {"transports"},
    "typer": {"cli"},
    "rich": {"cli"},
    "transformers": {"demo", "engines"},
    "vllm": {"engines", "transports"},
    "sglang": {"engines"},
    "httpx": {"engines"},
    "msgspec": {"engines"},
    "safetensors": {"weight_files"},
}
"""Third parties that one module is the door to; cli and demos may start the cluster they run on."""

PURE = {"errors", "report", "digests", "buckets", "packing", "deltas", "shards"}


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imports(path: Path, *, typing_too: bool = False) -> set[str]:
    """Full names of what a module imports, anywhere in it; what only type checkers see is left out."""
    tree = ast.parse(path.read_text())
    if not typing_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(module: str) -> str:
    return module.split(".")[0]


def own_imports(path: Path) -> set[str]:
    """The parts of the package that a module imports."""
    parts: set[str] = set()
    for name in imports(path):
        if name.startswith("asyncsync."):
            inner = part(name.removeprefix("asyncsync."))
            parts.add(inner if any(inner in floor for floor in FLOORS) else "__init__")
    return parts


def floor_of(name: str) -> int:
    return next(index for index, floor in enumerate(FLOORS) if name in floor)


def test_every_module_has_its_floor() -> None:
    assert {part(module) for module in modules()} <= set().union(*FLOORS)


def test_imports_point_downward() -> None:
    for module, path in modules().items():
        for imported in own_imports(path) - {part(module)}:
            assert floor_of(imported) <= floor_of(part(module)), f"{module} imports {imported}, a floor above"


def test_no_circle_among_the_parts() -> None:
    edges: dict[str, set[str]] = {}
    for module, path in modules().items():
        edges.setdefault(part(module), set()).update(own_imports(path) - {part(module)})
    while free := [name for name, below in edges.items() if not below & edges.keys()]:
        for name in free:
            del edges[name]
    assert not edges, f"imports go in a circle: {edges}"


def test_engines_and_trainer_do_not_import_each_other() -> None:
    assert all(
        {"engines": "trainer", "trainer": "engines"}[part(module)] not in own_imports(path)
        for module, path in modules().items()
        if part(module) in ("engines", "trainer")
    )


@pytest.mark.parametrize("third_party", DOORS)
def test_one_door_to_each_third_party(third_party: str) -> None:
    users = {
        part(module)
        for module, path in modules().items()
        if any(name == third_party or name.startswith(f"{third_party}.") for name in imports(path))
    }
    assert users - {"cli", "demo"} <= DOORS[third_party]


def test_the_pure_modules_import_neither_asyncio_nor_ray() -> None:
    for name in PURE:
        assert not {part(imported) for imported in imports(PACKAGE / f"{name}.py")} & {"asyncio", "anyio", "ray"}


def test_no_blocking_call_in_the_package() -> None:
    banned = {("ray", "get"), ("ray", "wait"), ("time", "sleep")}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in banned, f"{module}:{node.lineno}"


def test_importing_starts_nothing_and_prints_nothing() -> None:
    program = (
        "import threading, sys; before = threading.active_count(); import asyncsync;"
        "import ray; assert not ray.is_initialized(); assert threading.active_count() == before;"
        "assert not {'vllm', 'sglang', 'transformers', 'torch_memory_saver', 'typer', 'httpx'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_everything_public_is_documented() -> None:
    for name in asyncsync.__all__:
        public = getattr(asyncsync, name)
        assert public.__doc__ or get_origin(public), name  # an alias has its text beside it


def test_a_synchronizer_used_by_two_event_loops_is_refused() -> None:
    synchronizer = asyncsync.WeightSynchronizer(nn.Linear(1, 1), [asyncsync.ModuleEngine(nn.Linear(1, 1))])
    asyncio.run(synchronizer.update_weights())
    with pytest.raises(asyncsync.EventLoopError, match="belongs to the event loop"):
        asyncio.run(synchronizer.update_weights())
