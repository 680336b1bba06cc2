"""Fixtures shared by the tests: one Ray cluster a session, and a few actors in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

os.environ["RAY_AUTH_MODE"] = "disabled"  # before ray is imported: it would write a token into the home folder

import pytest
import ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster, started once."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
