"""A language model of sorts, of plain torch: the next token follows from the last, through two layers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    """Takes a token and gives the next; it has no cache, and remembers nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(64, 32, generator=generator))
        self.mixing = nn.Parameter(torch.randn(32, 32, generator=generator))
        self.bias = nn.Parameter(torch.randn(32, generator=generator))
        self.output = nn.Parameter(torch.randn(64, 32, generator=generator))

    @torch.no_grad()
    def following(self, token: int) -> int:
        """The token that follows."""
        hidden: Tensor = torch.tanh(self.embedding[token] @ self.mixing + self.bias)
        return int((self.output @ hidden).argmax())

    def digest(self) -> str:
        """A digest of the weights, told in another way than the library's."""
        return hashlib.sha256(b"".join(each.numpy().tobytes() for each in self.state_dict().values())).hexdigest()


def continued(old: nn.Module, new: nn.Module, last: int, switch: int, count: int) -> list[int]:
    """What follows a token if the weights change after ``switch`` of ``count`` tokens."""
    tokens = [last]
    for index in range(count):
        model = old if index < switch else new
        assert isinstance(model, Chain)
        tokens.append(model.following(tokens[-1]))
    return tokens[1:]
