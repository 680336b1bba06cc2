"""Proof that whoever is at the other end of a group's connection is a member: that it knows the group's name.

The name is random, is never used again, and comes over the control plane. gloo asks for nothing: a stranger who finds
the port while a group is being formed, and says a small number, has a member's place, and gets what is sent to it. So
before the first byte of a weight each two members ask each other a question that nobody else can answer. Those who join
by themselves (SGLang's ranks) do not know the questions; who does, says so in its contacts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from asyncsync.errors import ConnectError
from asyncsync.messages import Contacts

_QUESTION, _ANSWER = 3, 4  # tags
_NBYTES = 32


def willing(rank: int) -> Contacts:
    """What a member that proves itself adds to its contacts."""
    return {f"proof/{rank}": b"1"}


def prove_each_other(group: ProcessGroup, name: str, rank: int, others: Iterable[int], timeout: float) -> None:
    """Collective. Ask members of a gloo group who they are, and answer them. Blocks.

    Args:
        group: The group.
        name: Its name.
        rank: This member's.
        others: Those that prove themselves.
        timeout: Seconds for all of it.

    Raises:
        ConnectError: One did not answer, or wrongly: it is not who it should be.
    """
    others = list(others)
    deadline = time.monotonic() + timeout
    questions = {other: secrets.token_bytes(_NBYTES) for other in others}
    asked = _exchange(group, questions, _QUESTION, deadline)
    answers = {other: _answer(name, asked[other], rank, other) for other in others}
    for other, found in _exchange(group, answers, _ANSWER, deadline).items():
        if not hmac.compare_digest(found, _answer(name, questions[other], other, rank)):
            raise ConnectError(f"who came as rank {other} is a stranger: it does not know the group's name")


def _answer(name: str, question: bytes, answering: int, asking: int) -> bytes:
    return hmac.digest(name.encode(), question + f"{answering}/{asking}".encode(), hashlib.sha256)


def _exchange(group: ProcessGroup, said: dict[int, bytes], tag: int, deadline: float) -> dict[int, bytes]:
    """Say something to each of some members, and hear as much from each."""
    heard = {other: torch.zeros(_NBYTES, dtype=torch.uint8) for other in said}
    kept: list[Tensor] = []
    works: list[tuple[int, Work]] = []
    for other, message in said.items():
        works.append((other, group.recv([heard[other]], other, tag)))
        kept.append(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        works.append((other, group.send([kept[-1]], other, tag)))
    for other, work in works:
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:  # gloo's
            raise ConnectError(f"rank {other} did not prove that it is a member of the group: {error}") from error
    return {other: heard[other].numpy().tobytes() for other in said}
