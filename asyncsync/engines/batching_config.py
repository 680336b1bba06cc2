"""How transformers is to sample and to batch: what was asked for, less what cannot be kept over a weight update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

PAGE_SIZE = 32
CPU_CACHE_TOKENS = 8192
CPU_BATCH_TOKENS = 512
"""On a CPU: what transformers takes by itself is most of the machine's memory, for each engine."""

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""The modes of ``torch.compile`` that capture CUDA graphs."""


def stop_tokens(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """The tokens that end an answer, from all that transformers takes for them."""
    if eos_token_id is None:
        return frozenset()
    found = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    return frozenset(token for token in found if token >= 0)


def as_generation_config(model: Any, given: Any) -> Any:
    """A ``GenerationConfig`` of our own: what was given, or else a greedy one.

    Raises:
        ValueError: It asks for several answers to a request.
    """
    from transformers import GenerationConfig

    if given is None:
        own = getattr(model, "generation_config", None)
        greedy: Any = GenerationConfig  # whose constructor has no types
        given = greedy(do_sample=False, eos_token_id=getattr(own, "eos_token_id", None))
    if (given.num_return_sequences or 1) > 1 or (given.num_beams or 1) > 1:
        raise ValueError("num_return_sequences and num_beams must be 1: send the same prompt several times")
    config = copy.deepcopy(given)
    if config.eos_token_id is None:
        config.eos_token_id = -1  # what the manager would write into it, with a warning
    return config


def as_batching_config(model: Any, given: Any, *, staged: bool) -> Any:
    """A ``ContinuousBatchingConfig`` of our own, that keeps to what an update needs.

    Args:
        model: The model.
        given: One to start from, or None.
        staged: Whether the model's parameters are pointed elsewhere by an update.

    Raises:
        ValueError: It asks for compiled code that would go on reading the memory they lay in.
    """
    from transformers import ContinuousBatchingConfig

    if given is not None:
        config = copy.deepcopy(given)
    elif model.device.type == "cpu":
        blocks = CPU_CACHE_TOKENS // PAGE_SIZE
        config = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=blocks, max_batch_tokens=CPU_BATCH_TOKENS)
    else:
        config = ContinuousBatchingConfig()
    config.allow_block_sharing = False
    config.use_async_batching = False
    config.max_queue_size = 0  # a bounded queue makes who adds a request wait
    config.drop_unsupported_processors = False  # not without a word, at least
    if staged:
        config.use_cuda_graph = False
        for compiled in (config.varlen_compile_config, config.decode_compile_config):
            if compiled is not None and compiled.mode in GRAPH_MODES:
                raise ValueError(
                    f"mode {compiled.mode!r} of torch.compile uses CUDA graphs, which go on reading where the weights "
                    "lay, and a staged engine's move: use staged=False, or another mode"
                )
    return config


def refuse_processors(processors: Sequence[Any]) -> None:
    """Refuse what transformers would leave out of a batch, or perhaps get wrong, with no more than a warning.

    Raises:
        ValueError: There is such a logits processor; named.
    """
    # Unknown is None; those made for batches have no such attribute.
    names = [type(one).__name__ for one in processors if not getattr(one, "supports_continuous_batching", True)]
    if names:
        raise ValueError(f"transformers cannot do this for requests that are batched: {', '.join(names)}")
