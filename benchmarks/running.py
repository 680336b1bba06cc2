"""What every benchmark does around its measuring: a private cluster, and rows to a file."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray

from benchmarks import layouts

T = TypeVar("T")


def on_a_private_cluster(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a cluster of this machine alone, which ends with it."""
    ray.init(
        num_cpus=2,
        object_store_memory=100 * layouts.MB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        return asyncio.run(work())
    finally:
        ray.shutdown()


def write_rows(rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Write the rows to a file, if one is wanted."""
    if file is not None:
        file.write_text(json.dumps(rows, indent=2) + "\n")
