"""A fully-async rollout loop on vLLM: requests run on while the weights change under them, and each says where.

Run it with vLLM and asyncsync installed (``pip install 'asyncsync[vllm]'``); it makes a tiny model of its own:

    python examples/vllm_rollouts.py --steps 5
"""

import argparse
import asyncio
import itertools
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

import asyncsync

SAMPLING = SamplingParams(max_tokens=64, temperature=1.0, ignore_eos=True, detokenize=False)


def small_model():
    """A language model with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config = Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


async def rollouts(llm, synchronizer, samples, names):
    """Generate without end; an update never waits for it."""
    while True:
        prompt = torch.randint(0, 256, (8,)).tolist()
        async with synchronizer.generation() as version:
            async for answer in llm.generate({"prompt_token_ids": prompt}, SAMPLING, f"request-{next(names)}"):
                output = answer.outputs[0]
        await samples.put((version, prompt, list(output.token_ids), output.weight_versions))


def train_step(model, optimizer, batch):
    """More of the small tokens, please: the reward of a token is the higher the smaller it is."""
    tokens = torch.tensor([prompt + answer for _, prompt, answer, _ in batch])
    rewards = 1 - tokens[:, 1:] / 128
    logits = model(tokens[:, :-1]).logits
    loss = -(rewards * torch.distributions.Categorical(logits=logits).log_prob(tokens[:, 1:])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return rewards.mean().item()


async def main(steps: int) -> None:
    """Train and generate at the same time."""
    model, samples = small_model(), asyncio.Queue(maxsize=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.save_pretrained(folder := tempfile.mkdtemp())
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "gpu_memory_utilization": 0.1}
    backend = {"backend": "asyncsync"}
    engine_args = AsyncEngineArgs(folder, skip_tokenizer_init=True, weight_transfer_config=backend, **settings)
    llm = AsyncLLM.from_engine_args(engine_args)
    engines, names = [asyncsync.VLLMEngine(llm)], itertools.count()
    async with asyncsync.WeightSynchronizer(model, engines, initial_version=0, policy="recompute") as synchronizer:
        loops = [asyncio.create_task(rollouts(llm, synchronizer, samples, names)) for _ in range(8)]
        for step in range(steps):
            batch = [await samples.get() for _ in range(16)]
            reward = await asyncio.to_thread(train_step, model, optimizer, batch)
            changed = sum(len(spans or ()) > 1 for *_, spans in batch)
            print(f"step {step}: reward {reward:+.3f}; {changed} of 16 answers span an update")
            print(await synchronizer.update_weights())
        for loop in loops:
            loop.cancel()
    llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    asyncio.run(main(parser.parse_args().steps))
