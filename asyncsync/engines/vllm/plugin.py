"""What vLLM calls in each of its processes: the ``vllm.general_plugins`` entry point."""

from __future__ import annotations

BACKEND = "asyncsync"
"""The name for ``weight_transfer_config={"backend": …}``."""


def register() -> None:
    """Make the backend known to this process; called again, it does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "asyncsync.engines.vllm.worker", "AsyncSyncTransferEngine")
