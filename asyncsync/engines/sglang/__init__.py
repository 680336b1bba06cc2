"""SGLang as a rollout engine: an adapter beside it, that speaks SGLang's own weight-update calls."""

from asyncsync.engines.sglang.actor import SGLangActor
from asyncsync.engines.sglang.engine import SGLangEngine

__all__ = ["SGLangActor", "SGLangEngine"]
