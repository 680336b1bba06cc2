"""vLLM as a rollout engine: an adapter beside it, and a weight-transfer backend inside its worker processes."""

from asyncsync.engines.vllm.actor import VLLMActor
from asyncsync.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMActor", "VLLMEngine"]
