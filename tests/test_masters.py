"""Weights that are rebuilt from master weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import MasterWeights, ModuleEngine, PlanError, WeightSynchronizer
from asyncsync.weights import WeightSource
from tests.sample import content, contents


class Policy(nn.Module):
    """Mixed precision: bfloat16 weights, two of them tied, one in float32, and a buffer of integers."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(37, 24)
        self.up = nn.Linear(24, 40)
        self.output = nn.Linear(24, 37, bias=False)
        self.register_buffer("steps", torch.tensor([3, 5]))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.to(torch.bfloat16)
        self.router = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.output.weight = self.embedding.weight
        for module in (self.embedding, self.up):
            module.to(device)
        self.output.weight = self.embedding.weight


def masters_of(policy: Policy) -> dict[str, Tensor]:
    """Master weights: not on bfloat16's grid, ties between two of its values among them."""
    generator = torch.Generator().manual_seed(9)
    found = {}
    for name, parameter in policy.named_parameters():
        if parameter.dtype is torch.bfloat16:
            master = torch.randn(parameter.shape, generator=generator)
            master.view(-1)[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), float("inf")])
            found[name] = master
    return found


def expected(policy: Policy, masters: Mapping[str, Tensor]) -> dict[str, bytes]:
    """What an engine is to hold: as the trainer would copy its masters into its weights."""
    rebuilt = {name: torch.empty_like(master, dtype=torch.bfloat16).copy_(master) for name, master in masters.items()}
    rebuilt["output.weight"] = rebuilt["embedding.weight"]
    return contents(policy) | {name: content(tensor) for name, tensor in rebuilt.items()}


@pytest.mark.asyncio
@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
async def test_engines_get_what_the_masters_are_in_the_weights_dtypes(bucket_size: int) -> None:
    policy = Policy(1)
    masters = masters_of(policy)
    engines = [ModuleEngine(Policy(2)), ModuleEngine(Policy(3), staged=False)]
    weights = MasterWeights(policy, masters)
    async with WeightSynchronizer(weights, engines, bucket_size=bucket_size, timeout=60) as synchronizer:
        for _ in range(2):
            update = await synchronizer.update_weights()
            assert update.tensors_changed > 0
            assert [contents(engine.module) for engine in engines] == [expected(policy, masters)] * 2
            for master in masters.values():
                master.mul_(-1.01)
            with torch.no_grad():
                policy.router.add_(1)


@pytest.mark.asyncio
async def test_weights_that_have_masters_are_not_read() -> None:
    policy = Policy(1, device="meta")
    masters = masters_of(policy)
    engine = ModuleEngine(Policy(2))
    async with WeightSynchronizer(MasterWeights(policy, lambda: masters), [engine], timeout=60) as synchronizer:
        await synchronizer.update_weights()
        assert contents(engine.module)["up.weight"] == content(masters["up.weight"].bfloat16())
        del masters["up.weight"]
        with pytest.raises(PlanError, match=r"up\.weight: on the meta device"):
            await synchronizer.update_weights()


def test_the_synchronizers_dtype_and_names_hold_for_masters_too() -> None:
    policy = Policy(1)
    source = WeightSource(MasterWeights(policy, masters_of(policy)))
    snapshot = source.read(name_map=lambda name: f"model.{name}", dtype=torch.float16)
    specs = {spec.name: (spec.dtype, spec.aliases) for spec in snapshot.specs}
    assert specs["model.up.weight"] == (torch.float16, ())
    assert specs["model.embedding.weight"] == (torch.float16, ("model.output.weight",))
    assert specs["model.steps"] == (torch.int64, ())


def test_a_master_that_two_weights_share_is_sent_in_the_dtype_of_each() -> None:
    master = torch.randn(3)
    weights = {"a": torch.empty(3, dtype=torch.bfloat16), "b": torch.empty(3, dtype=torch.float16)}
    snapshot = WeightSource(MasterWeights(weights, {"a": master, "b": master})).read()
    assert [(spec.name, spec.dtype) for spec in snapshot.specs] == [("a", torch.bfloat16), ("b", torch.float16)]


@pytest.mark.parametrize(
    ("masters", "names", "why"),
    [
        ({"stranger": torch.zeros(3)}, ["stranger"], "masters of no weight"),
        ({"weight": torch.zeros(4)}, ["weight"], "of the same shape"),
        ({"weight": torch.zeros(3, dtype=torch.int32)}, ["weight"], "floating-point"),
        ({"weight": "no tensor"}, ["weight"], "floating-point"),
        ({"count": torch.zeros(3)}, ["count"], "floating-point"),
        ({"weight": torch.zeros(3, device="meta")}, ["weight"], "on the meta device"),
    ],
)
def test_masters_that_do_not_fit_are_refused_by_name(masters: Any, names: list[str], why: str) -> None:
    weights = {"weight": torch.zeros(3, dtype=torch.bfloat16), "count": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(PlanError, match=why) as caught:
        WeightSource(MasterWeights(weights, masters)).read()
    assert list(caught.value.names) == names


@pytest.mark.parametrize("name", ["embedding.weight", "output.weight"])
@pytest.mark.parametrize(
    "weights", [lambda policy: policy, lambda policy: policy.state_dict(), lambda policy: policy.state_dict]
)
def test_of_tied_weights_either_may_have_the_master(weights: Any, name: str) -> None:
    policy = Policy(1)
    master = torch.randn(policy.embedding.weight.shape)
    snapshot = WeightSource(MasterWeights(weights(policy), {name: master})).read()
    sent = {each: tensor for spec, tensor in zip(snapshot.specs, snapshot.tensors, strict=True) for each in spec.names}
    assert sent["embedding.weight"].data_ptr() == sent["output.weight"].data_ptr() == master.data_ptr()


def test_pairs_that_come_once_are_kept() -> None:
    policy = Policy(1)
    source = WeightSource(MasterWeights(policy.named_parameters(), masters_of(policy)))
    assert [source.read().specs for _ in range(2)] == [source.read().specs] * 2


def test_tied_weights_have_one_master() -> None:
    policy = Policy(1)
    masters = masters_of(policy)
    masters["output.weight"] = masters["embedding.weight"]
    WeightSource(MasterWeights(policy, masters)).read()
    masters["output.weight"] = masters["embedding.weight"].clone()
    with pytest.raises(PlanError, match=r"two masters: output\.weight"):
        WeightSource(MasterWeights(policy, masters)).read()


@pytest.mark.parametrize(("weights", "masters"), [(3, {}), ({}, None), ({}, [torch.zeros(1)])])
def test_what_is_none_of_these_is_refused_at_once(weights: Any, masters: Any) -> None:
    with pytest.raises(TypeError):
        MasterWeights(weights, masters)


def test_a_function_of_masters_must_give_a_dict() -> None:
    masters: Any = lambda: [torch.zeros(1)]  # noqa: E731
    with pytest.raises(PlanError, match="not a dict"):
        WeightSource(MasterWeights({"weight": torch.zeros(1)}, masters)).read()


def test_a_trainer_rank_takes_them() -> None:
    asyncsync.TrainerRank(MasterWeights({"weight": torch.zeros(3)}, {}))
