"""How long an update holds vLLM's requests back, beside what vLLM's own pause and resume take.

Two contenders take turns in one run, on one engine in this process, with a tiny model (0.13 M parameters) or a larger
one of random weights. *update*: a whole update, and the part of it in which the engine is paused. *pause*: vLLM's
``pause_generation`` and ``resume_generation``, with nothing in between: no update can be shorter.

    python -m benchmarks.vllm_pause [--layers N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import asyncsync

SETTINGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "gpu_memory_utilization": 0.1}


def new_model(layers: int, hidden: int) -> Any:
    """A language model of random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    factory: Any = AutoModelForCausalLM
    return factory.from_config(config, dtype=torch.float32)


async def measure(layers: int, hidden: int, rounds: int) -> dict[str, Any]:
    """Take turns, and give the medians in milliseconds."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model = new_model(layers, hidden)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        backend = {"backend": "asyncsync"}
        args = AsyncEngineArgs(folder, skip_tokenizer_init=True, weight_transfer_config=backend, **SETTINGS)  # type: ignore[arg-type,unused-ignore]
        llm = AsyncLLM.from_engine_args(args)
    took: dict[str, list[float]] = {"update": [], "paused": [], "pause": []}
    try:
        async with asyncsync.WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
            await synchronizer.update_weights()
            for _ in range(rounds):
                start = time.perf_counter()
                update = await synchronizer.update_weights()
                took["update"].append(time.perf_counter() - start)
                took["paused"].append(update.seconds["finish"])
                start = time.perf_counter()
                await llm.pause_generation(mode="wait")
                await llm.resume_generation()
                took["pause"].append(time.perf_counter() - start)
    finally:
        llm.shutdown()
    medians = {f"{name}_ms": round(statistics.median(seconds) * 1e3, 2) for name, seconds in took.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **medians,
        "paused_over_pause": round(medians["paused_ms"] / medians["pause_ms"], 2),
    }


def main() -> None:
    """Measure, print a line, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    figures = asyncio.run(measure(arguments.layers, arguments.hidden, arguments.rounds))
    print(json.dumps(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
