"""A language model of 0.1 M parameters with random weights, and what it must generate.

Engines of every kind load it from a folder; transformers' own greedy decoding, in float32, says which tokens must come
out, also when the weights change in the middle of a generation. Its matrices are scaled up, so that the best token is
best by far and no engine's order of summation can change it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 256
_SCALE = 8.0  # of matrices, over transformers' initialization: logits lie apart by far more than rounding moves them


def tiny_config() -> Any:
    """Configuration of the model: what vLLM and SGLang can both run on a CPU (heads of 32, for vLLM's attention)."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )


def tiny_model(seed: int = 0) -> nn.Module:
    """The model with the random weights of a seed, in float32; leaves torch's random state as it is."""
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = Qwen3ForCausalLM(tiny_config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(_SCALE)
                else:
                    parameter.uniform_(0.5, 1.5)  # norms, which begin as ones: they shall differ from seed to seed, too
    return model.eval()


def save_tiny(path: Path | str, seed: int = 0) -> Path:
    """Save the model to a folder that engines can load. It has no tokenizer: prompts are token ids."""
    model: Any = tiny_model(seed)
    model.save_pretrained(path)
    return Path(path)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in ids]


def greedy(model: nn.Module, prompt_ids: list[int], count: int) -> list[int]:
    """The tokens that transformers generates greedily."""
    ids = torch.tensor([prompt_ids])
    generator: Any = model
    with torch.no_grad():
        # The mask is given, since transformers would take a token that is the padding token for padding. And one
        # begins without end and padding tokens, so that nothing ends early.
        output = generator.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return [int(token) for token in output[0, len(prompt_ids) :]]


def greedy_recomputed(old: nn.Module, new: nn.Module, prompt_ids: list[int], switch: int, count: int) -> list[int]:
    """What a request gives whose weights change after ``switch`` tokens, its cache computed anew under the new ones."""
    before = greedy(old, prompt_ids, switch) if switch else []
    return before + greedy(new, prompt_ids + before, count - switch) if count > switch else before[:count]


def greedy_continued(old: nn.Module, new: nn.Module, prompt_ids: list[int], switch: int, count: int) -> list[int]:
    """What a request gives whose weights change after ``switch`` tokens, and that goes on over its old cache.

    The last token before the switch is in no cache yet: the new weights compute its keys and values.
    """
    generated: list[int] = []
    cache: Any = None
    feed = torch.tensor([prompt_ids])
    with torch.no_grad():
        while len(generated) < count:
            model: Any = old if len(generated) < switch else new
            output = model(feed, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            feed = _best(output.logits)
            generated.append(int(feed))
    return generated


def _best(logits: Tensor) -> Tensor:
    return logits[:, -1].argmax(dim=-1, keepdim=True)
