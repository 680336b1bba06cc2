"""A real language model: finding it, loading it, generating greedily, learning from texts.

Of the demos, this module is the door to ``transformers`` (extra ``[models]``), which is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DTYPE = torch.float32
"""Engines batch what they generate, and a batch's sums are rounded otherwise than a single request's: in bfloat16 that
makes another token the best one in an answer of three, in float32 in none."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies.

    Attributes:
        folder: The folder.
        gguf: The name of the GGUF file in it; None for a Hugging Face folder.
    """

    folder: str
    gguf: str | None

    @property
    def name(self) -> str:
        """The model's name, as far as its files tell it."""
        return self.gguf.removesuffix(".gguf") if self.gguf else Path(self.folder).name

    @property
    def source(self) -> dict[str, Any]:
        """Arguments of every ``from_pretrained``; nothing is looked up on a hub."""
        source: dict[str, Any] = {"pretrained_model_name_or_path": self.folder, "local_files_only": True}
        return source | ({"gguf_file": self.gguf} if self.gguf else {})


def find_model(path: Path) -> ModelFiles:
    """Find a model, and see that what reads it is installed.

    Args:
        path: A Hugging Face folder, a GGUF file, or a folder with one GGUF file.

    Raises:
        FileNotFoundError: There is nothing there.
        ValueError: What is there is no model.
        ModuleNotFoundError: The extra ``[models]`` is not installed.
    """
    path = path.expanduser().resolve()
    if not path.exists():
        raise FileNotFoundError(f"there is no model at {path}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is not a GGUF file; give one, or a Hugging Face folder")
        files = ModelFiles(str(path.parent), path.name)
    elif (path / "config.json").exists():
        files = ModelFiles(str(path), None)
    else:
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise ValueError(f"{path} has no config.json and {len(found)} GGUF files: give a model's folder or file")
        files = ModelFiles(str(path), found[0].name)
    needed = ["transformers", *(["gguf", "accelerate"] if files.gguf else [])]
    missing = [module for module in needed if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f"--model needs {' and '.join(missing)}; for a checkout: pip install '.[models]'")
    return files


def load_model(files: ModelFiles, *, dtype: torch.dtype = DTYPE) -> nn.Module:
    """The model with its weights."""
    model: nn.Module = _transformers().AutoModelForCausalLM.from_pretrained(**files.source, dtype=dtype)
    return model.eval()


def build_model(files: ModelFiles, *, seed: int, dtype: torch.dtype = DTYPE) -> nn.Module:
    """The same model with random weights."""
    transformers = _transformers()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(**files.source)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


class Tokenizer:
    """Texts to tokens and back.

    Args:
        files: The model's.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer: Any = _transformers().AutoTokenizer.from_pretrained(**files.source)

    @property
    def end(self) -> int | None:
        """The token that ends an answer."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    def question(self, question: str) -> Tokens:
        """A question as the model wants to be asked: by its chat template, if it has one."""
        return self._encode(question, answer=None)

    def dialogue(self, question: str, answer: str) -> Tokens:
        """A question and its answer."""
        return self._encode(question, answer=answer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text, on one line."""
        return " ".join(str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).split())

    def _encode(self, question: str, *, answer: str | None) -> Tokens:
        if self._tokenizer.chat_template is None:
            text = f"Question: {question}\nAnswer:" + ("" if answer is None else f" {answer}")
            tokens = list(self._tokenizer(text)["input_ids"])
            return tuple(tokens if answer is None or self.end is None else [*tokens, self.end])
        messages = [{"role": "user", "content": question}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def generate_greedily(model: Any, prompt: Tokens, *, length: int, end: int | None) -> Tokens:
    """The most probable continuation, token by token.

    Args:
        model: A causal language model.
        prompt: What to continue.
        length: Tokens to generate at the most.
        end: The token that ends it.
    """
    tokens = torch.tensor([prompt])
    greedy = _transformers().GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=end, pad_token_id=end or 0
    )
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy)
    return tuple(output[0, len(prompt) :].tolist())


def backpropagate(model: Any, texts: Sequence[Tokens]) -> float:
    """Add the gradient of the mean next-token loss over the texts; returns that loss, in nats a token."""
    total = 0.0
    for text in texts:
        tokens = torch.tensor([text])
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss / len(texts)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _transformers() -> Any:
    """The library, without its progress bars and warnings; untyped, as much of it is."""
    import transformers

    messages: Any = transformers.utils.logging
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    return transformers
