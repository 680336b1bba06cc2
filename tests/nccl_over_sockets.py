"""Loaded in vLLM's worker processes (``worker_extension_cls``): its ``nccl`` backend as it is, but over sockets.

Replaced are NCCL's communicator and the streams of a GPU. All else is vLLM's own: how its workers meet and take their
ranks, what they receive in one call, how they cut it up, and how their layers are made ready, loaded and completed.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import packed_tensor

from tests.fake_nccl import FakeCommunicator


class OverSockets:
    """Adds nothing to a worker."""


def _streams(device: int, count: int) -> tuple[Any, ...]:
    return tuple(SimpleNamespace(synchronize=lambda: None) for _ in range(count))


pynccl.PyNcclCommunicator = FakeCommunicator
packed_tensor._get_streams = _streams
torch.cuda.stream = nullcontext  # type: ignore[assignment]
torch.accelerator.current_device_index = lambda: 0
