"""The checks that every engine must pass, on engines of plain torch; and that the checks can fail."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

import asyncsync
from asyncsync.connection import TransportChoice
from asyncsync.messages import Policy, UpdateOrder
from asyncsync.testing import CHECKS, parted
from tests.chain import Chain, continued
from tests.engines import gate_of
from tests.fake_vllm import FakeLLM

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These engines answer within milliseconds, or not at all."""
    monkeypatch.setattr("asyncsync.testing.PATIENCE", 0.5)


@pytest.fixture(
    params=["shared", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("broadcast", "folder"))]
)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TransportChoice:
    """What the checks' updates go through."""
    chosen: TransportChoice = request.param
    options: dict[str, Any] = {"transport": chosen, "folder": tmp_path if chosen == "folder" else None}
    monkeypatch.setattr("asyncsync.testing.WeightSynchronizer", partial(asyncsync.WeightSynchronizer, **options))
    return chosen


class ChainEngine(asyncsync.ModuleEngine):
    """Generates with a chain, a token for each turn of the loop."""

    async def generate(self, prompt: Sequence[int], count: int, started: Callable[[], None] | None) -> tuple[int, ...]:
        async with self.generating():
            tokens = [prompt[-1]]
            for _ in range(count):
                tokens.append(self.module.following(tokens[-1]))  # type: ignore[operator]
                if started is not None and len(tokens) == 2:
                    started()
                await asyncio.sleep(0)
            return tuple(tokens[1:])


class ChainSubject:
    """A module engine, put to the checks."""

    prompt = PROMPT
    tokens = 300
    policies: tuple[Policy, ...] = ("drain",)
    tells_shapes = True

    def __init__(self, *, staged: bool, kind: type[ChainEngine] = ChainEngine) -> None:
        self.engine: Any = kind(Chain(0), staged=staged)
        self.trainer = Chain(1)

    async def generate(
        self, prompt: Sequence[int], count: int, started: Callable[[], None] | None = None
    ) -> asyncsync.Completion:
        tokens = await self.engine.generate(prompt, count, started)
        return asyncsync.Completion(tokens=tokens, finish_reason="length", weight_versions=())

    def expected(self, old: nn.Module, new: nn.Module, switch: int, count: int, policy: Policy) -> list[int]:
        return continued(old, new, PROMPT[-1], switch, count)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio
async def test_module_engines_conform(check: str, staged: bool, transport: TransportChoice) -> None:
    await CHECKS[check](ChainSubject(staged=staged))


class FakeVLLMSubject(ChainSubject):
    """vLLM's adapter over an engine that is none of vLLM's."""

    def __init__(self, llm: FakeLLM, *, prefix_caching: bool, backend: Literal["asyncsync", "nccl"]) -> None:
        self.llm = llm
        self.engine = asyncsync.VLLMEngine(llm, backend=backend)
        self.trainer = Chain(1)
        every: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
        self.policies = every[:3] if prefix_caching else every

    async def generate(
        self, prompt: Sequence[int], count: int, started: Callable[[], None] | None = None
    ) -> asyncsync.Completion:
        return await self.llm.generate(prompt, count, started)


@pytest.mark.parametrize(("ranks", "prefix_caching"), [(1, True), (2, False)], ids=["prefixes", "two ranks"])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio
async def test_the_adapter_for_vllm_conforms(
    check: str, ranks: int, prefix_caching: bool, transport: TransportChoice
) -> None:
    llm = FakeLLM(ranks=ranks, prefix_caching=prefix_caching)
    subject = FakeVLLMSubject(llm, prefix_caching=prefix_caching, backend="asyncsync")
    await CHECKS[check](subject)
    await subject.engine.aclose()


class Unmoved(ChainEngine):
    """Says that it has switched, and has not."""

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        kept = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        await super().finish_weight_update(order)
        self.module.load_state_dict(kept)


class Careless(ChainEngine):
    """Goes on generating while its weights are overwritten."""

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        await super().pause_generation(epoch, policy)
        gate_of(self).resume()


class Forgetful(ChainEngine):
    """Serves what it holds after a failure, whatever that is."""

    async def abort_weight_update(self, epoch: int, published: int | None) -> asyncsync.EngineStatus:
        status = await super().abort_weight_update(epoch, published)
        self._asyncsync.record.tainted = None
        gate_of(self).resume()
        return status


class Unaware(ChainEngine):
    """Serves whatever it is told of others."""

    async def abort_weight_update(self, epoch: int, published: int | None) -> asyncsync.EngineStatus:
        status = await super().abort_weight_update(epoch, published)
        gate_of(self).resume()
        return status


class Patient(ChainEngine):
    """Pauses for whoever asks, however late."""

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        await super().pause_generation(max(epoch, self._asyncsync.record.epoch), policy)


class Hasty(ChainEngine):
    """Does not wait for requests in flight."""

    async def generate(self, prompt: Sequence[int], count: int, started: Callable[[], None] | None) -> tuple[int, ...]:
        async with self.generating():
            pass
        tokens = [prompt[-1]]
        for _ in range(count):
            tokens.append(self.module.following(tokens[-1]))  # type: ignore[operator]
            if started is not None and len(tokens) == 2:
                started()
            for _ in range(20):  # it takes much longer than the call for which it ought to be waited
                await asyncio.sleep(0)
        return tuple(tokens[1:])


class Boastful(ChainEngine):
    """Says that it keeps a policy which it does not."""

    async def describe_engine(self) -> asyncsync.EngineStatus:
        return replace(await super().describe_engine(), policies=("drain", "recompute"))


@pytest.mark.parametrize(
    ("kind", "staged", "said"),
    [
        (Hasty, True, "under drain finish_weight_update must not come back before requests in flight have ended"),
        (Hasty, False, "under drain pause_generation must not come back before requests in flight have ended"),
        (Boastful, True, "it keeps ['drain', 'recompute'], and the subject that it must ['drain']"),
    ],
)
@pytest.mark.asyncio
async def test_the_check_of_policies_says_what_is_wrong(kind: type[ChainEngine], staged: bool, said: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        await CHECKS["policies"](ChainSubject(staged=staged, kind=kind))


class Short(ChainSubject):
    """Its requests are over as soon as they have begun."""

    tokens = 1


class Silent(ChainSubject):
    """Does not tell when a request has begun."""

    async def generate(
        self, prompt: Sequence[int], count: int, started: Callable[[], None] | None = None
    ) -> asyncsync.Completion:
        return await super().generate(prompt, count)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (Short, r"the request was over before (pause_generation|finish_weight_update): give a longer one"),
        (Silent, r"must call started\(\)"),
    ],
)
@pytest.mark.asyncio
async def test_a_request_that_is_not_in_flight_proves_nothing(
    subject: type[ChainSubject], said: str, staged: bool
) -> None:
    with pytest.raises(AssertionError, match=said):
        await CHECKS["policies"](subject(staged=staged))


def test_messages_are_of_a_few_tokens() -> None:
    many = list(range(10_000))
    assert parted([*many[:41], *([7] * 259)], many) == (
        "from token 41 of 300 on it is [7, 7, 7, 7, 7, 7, 7, 7] …, and should be [41, 42, 43, 44, 45, 46, 47, 48] …"
    )
    assert parted(many[:2], many[:3]) == "from token 2 of 2 on it is [] …, and should be [2] …"


@pytest.mark.parametrize(
    ("kind", "staged", "check"),
    [
        (Unaware, True, "missed version"),
        (Unaware, False, "failed bucket"),
        (Patient, True, "old epochs"),
        (Unmoved, True, "updates"),
        (Unmoved, True, "digest"),
        (Careless, False, "requests around updates"),
        (Forgetful, False, "failed bucket"),
    ],
)
@pytest.mark.asyncio
async def test_the_checks_find_what_is_wrong(kind: type[ChainEngine], staged: bool, check: str) -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        await CHECKS[check](ChainSubject(staged=staged, kind=kind))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.asyncio
async def test_the_subject_that_is_written_down_conforms(check: str) -> None:
    page = (Path(__file__).parent.parent / "docs" / "adapters.md").read_text()
    namespace: dict[str, Any] = {"__name__": "docs.adapters"}
    exec(page.split("```python\n")[1].split("```")[0], namespace)
    await CHECKS[check](namespace["Subject"]())
