"""A task that a small policy learns in a minute: say the digits of the prompt in reverse order.

The policy answers digit by digit, as a language model does. It is rewarded once per answer, by the share of digits
that are right: 0.1 by chance, 1 at best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIGITS = 10
LENGTH = 8
WIDTH = 64
MAX_RATIO = 2.0

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Answers to a few prompts, a group of answers to each.

    Attributes:
        version: The weight version it was generated with.
        prompts: Digits, int64 [prompts, LENGTH].
        answers: Digits, int64 [prompts, group, LENGTH].
        logprobs: Log-probability that the policy gave each of these digits, float32, shaped like the answers.
        rewards: Share of right digits, float32 [prompts, group].
    """

    version: int
    prompts: Tensor
    answers: Tensor
    logprobs: Tensor
    rewards: Tensor

    def example(self) -> tuple[str, str]:
        """The last prompt, and one answer to it."""
        return "".join(map(str, self.prompts[-1].tolist())), "".join(map(str, self.answers[-1, -1].tolist()))


def join_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of them all, as old as the oldest."""
    return Rollout(
        version=min(rollout.version for rollout in rollouts),
        prompts=torch.cat([rollout.prompts for rollout in rollouts]),
        answers=torch.cat([rollout.answers for rollout in rollouts]),
        logprobs=torch.cat([rollout.logprobs for rollout in rollouts]),
        rewards=torch.cat([rollout.rewards for rollout in rollouts]),
    )


def draw_prompts(random: Random, count: int) -> list[Prompt]:
    """Random prompts."""
    return [tuple(random.randrange(DIGITS) for _ in range(LENGTH)) for _ in range(count)]


class Policy(nn.Module):
    """A recurrent decoder that looks back at the prompt: some 42,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS + 1, WIDTH)  # one more: what stands before the first digit of an answer
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(2 * WIDTH, DIGITS)

    def forward(self, prompts: Tensor, answers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Answer prompts, or tell how probable given answers are.

        Args:
            prompts: int64 [batch, LENGTH].
            answers: The same, or None to draw them.

        Returns:
            The answers, and the log-probability of each of their digits.
        """
        memory = self.digit(prompts) + self.place.weight
        state = memory.new_zeros(len(prompts), WIDTH)
        digit = prompts.new_full((len(prompts),), DIGITS)
        drawn, logprobs = [], []
        for place in range(LENGTH):
            state = self.cell(self.digit(digit) + self.place.weight[place], state)
            attention = torch.einsum("bld,bd->bl", memory, self.query(state)).div(WIDTH**0.5).softmax(-1)
            context = torch.einsum("bl,bld->bd", attention, memory)
            scores = F.log_softmax(self.out(torch.cat([state, context], -1)), -1)
            digit = torch.multinomial(scores.exp(), 1)[:, 0] if answers is None else answers[:, place]
            drawn.append(digit)
            logprobs.append(scores.gather(1, digit[:, None])[:, 0])
        return torch.stack(drawn, 1), torch.stack(logprobs, 1)


@torch.no_grad()
def generate(policy: Policy, prompts: Sequence[Prompt], *, group: int, version: int) -> Rollout:
    """Draw ``group`` answers to every prompt, and reward them."""
    asked = torch.tensor(prompts)
    answers, logprobs = policy(asked.repeat_interleave(group, 0))
    answers = answers.view(len(asked), group, LENGTH)
    right = answers == asked.flip(1)[:, None]
    return Rollout(version, asked, answers, logprobs.view_as(answers), right.float().mean(-1))


def policy_gradient_loss(policy: Policy, rollout: Rollout) -> Tensor:
    """REINFORCE with the group's mean as the baseline, for answers that an older policy may have drawn.

    An answer's advantage is its reward minus the mean of its group, over the group's standard deviation. Each digit's
    gradient is weighted by how much more probable it has become since it was drawn (importance sampling), at most
    ``MAX_RATIO``.
    """
    group = rollout.answers.shape[1]
    rewards = rollout.rewards
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    _, logprobs = policy(rollout.prompts.repeat_interleave(group, 0), rollout.answers.flatten(0, 1))
    logprobs = logprobs.view_as(rollout.logprobs)
    ratio = (logprobs.detach() - rollout.logprobs).exp().clamp(max=MAX_RATIO)
    objective: Tensor = (ratio * advantages[..., None] * logprobs).mean()
    return -objective
