"""A fully-async rollout loop on SGLang: requests run on while the weights change under them, and each says where.

Run it with SGLang and asyncsync installed; it makes a tiny model of its own:

    python examples/sglang_rollouts.py --steps 5
"""

import argparse
import asyncio
import tempfile

import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import asyncsync

SAMPLING = {"max_new_tokens": 64, "temperature": 1.0, "ignore_eos": True}
GPU = torch.cuda.is_available()
SIZES = {"max_total_tokens": 4096, "context_length": 256, "mem_fraction_static": 0.1}
ON_A_CPU = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
SETTINGS = {"skip_tokenizer_init": True, "dtype": "float32", **SIZES, **({} if GPU else ON_A_CPU)}


def small_model():
    """A language model with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config = Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


async def rollouts(engine, synchronizer, samples):
    """Generate without end; an update never waits for it."""
    while True:
        prompt = torch.randint(0, 256, (8,)).tolist()
        async with synchronizer.generation() as version:
            answer = await engine.generate.remote(input_ids=prompt, sampling_params=SAMPLING)
        await samples.put((version, prompt, answer["output_ids"], answer["meta_info"].get("weight_versions")))


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
    actor = ray.remote(asyncsync.SGLangActor).options(num_cpus=0, num_gpus=int(GPU))
    engine = actor.remote(model_path=folder, **SETTINGS)
    adapters = [asyncsync.SGLangEngine(engine)]
    async with asyncsync.WeightSynchronizer(model, adapters, initial_version=0, policy="recompute") as synchronizer:
        loops = [asyncio.create_task(rollouts(engine, synchronizer, samples)) for _ in range(8)]
        for step in range(steps):
            batch = [await samples.get() for _ in range(16)]
            reward = await asyncio.to_thread(train_step, model, optimizer, batch)
            changed = sum(len(spans or ()) > 1 for *_, spans in batch)
            print(f"step {step}: reward {reward:+.3f}; {changed} of 16 answers span an update")
            print(await synchronizer.update_weights())
        for loop in loops:
            loop.cancel()
    await engine.shutdown.remote()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    ray.init(include_dashboard=False, log_to_driver=False)
    asyncio.run(main(parser.parse_args().steps))
