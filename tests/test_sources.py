"""Trainers of several sources, one a pipeline stage, and trainers with hooks: in one process, over real gloo groups."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import EngineState, PlanError, TrainerError, WeightSynchronizer
from asyncsync.messages import SendReceipt, UpdateOrder
from tests.cancelling import CancelAt
from tests.engines import ToldEngine, change, failing
from tests.sample import Zoo, contents

pytestmark = pytest.mark.asyncio

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])


def stages(count: int, seed: int = 1, *, strided: bool = True) -> nn.ModuleDict:
    """A model in stages of unequal size."""
    made: dict[str, nn.Module] = {f"s{index}": nn.Linear(3 + index, 5) for index in range(1, count)}
    return nn.ModuleDict({"s0": Zoo(seed, strided=strided), **made})


def of_stage(model: nn.ModuleDict, index: int) -> asyncsync.TrainerRank:
    return asyncsync.TrainerRank(nn.ModuleDict({f"s{index}": model[f"s{index}"]}))


@asynccontextmanager
async def pipeline(
    count: int, *, staged: bool = True, engines: int = 2, **options: Any
) -> AsyncIterator[tuple[nn.ModuleDict, list[asyncsync.TrainerRank], list[ToldEngine], WeightSynchronizer]]:
    """A trainer of stages, each with one rank, and engines that hold all of the model."""
    model = stages(count)
    ranks = [of_stage(model, index) for index in range(count)]
    fleet = [ToldEngine(stages(count, 50 + index, strided=False), staged=staged) for index in range(engines)]
    options = {"bucket_size": 256, "timeout": 60.0} | options
    async with WeightSynchronizer([[rank] for rank in ranks], fleet, **options) as synchronizer:
        yield model, ranks, fleet, synchronizer


def holds(engine: ToldEngine, model: nn.Module) -> bool:
    return contents(engine.module) == contents(model)


# -- several sources -------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
@pytest.mark.parametrize("count", [2, 5])
async def test_engines_get_the_parts_of_all_sources(count: int, bucket_size: int, staged: bool) -> None:
    async with pipeline(count, staged=staged, bucket_size=bucket_size) as (model, _, engines, synchronizer):
        for version in (1, 2, 3):
            update = await synchronizer.update_weights()
            assert update.version == version
            assert all(holds(engine, model) for engine in engines)
            assert [await engine.weights_digest() for engine in engines] == [update.digest] * 2
            assert [outcome.digest for outcome in update.outcomes] == [update.digest] * 2
            change(model)
        assert [engine.joined for engine in engines] == [list(range(count))] * 2, "one group a source, one order"


async def test_the_report_adds_up_what_the_sources_sent() -> None:
    async with pipeline(3) as (model, _, _, synchronizer):
        first = await synchronizer.update_weights()
        assert first.tensors == first.tensors_changed == len(contents(model)) - 1, "one is tied"
        assert first.bytes == sum(len(data) for name, data in contents(model).items() if name != "s0.tied")
        with torch.no_grad():
            model.get_parameter("s2.bias")[0] += 1
        second = await synchronizer.update_weights()
        assert (second.tensors_changed, second.bytes_changed) == (1, 5 * 4)
        assert second.digest != first.digest


async def test_a_joiner_gets_the_parts_of_all_sources_from_one_engine() -> None:
    async with pipeline(3) as (model, _, engines, synchronizer):
        await synchronizer.update_weights()
        joiner = ToldEngine(stages(3, 70, strided=False))
        await synchronizer.add_engine(joiner)
        assert holds(joiner, model)
        change(model)
        await synchronizer.update_weights()
        assert all(holds(engine, model) for engine in (*engines, joiner))


async def test_two_sources_that_claim_a_name_are_refused_by_it_before_anything_is_sent() -> None:
    model = stages(2)
    claims = asyncsync.TrainerRank({"s1.bias": torch.zeros(5), "s0.weight": torch.zeros(8, 3)})
    engine = ToldEngine(stages(2, 50, strided=False))
    old = contents(engine.module)
    async with WeightSynchronizer([[of_stage(model, 0)], [of_stage(model, 1)], [claims]], [engine]) as synchronizer:
        with pytest.raises(
            PlanError, match=r"^a tensor .* sources 0 and 2 both send s0\.weight; sources 1 and 2 both send s1\.bias"
        ) as caught:
            await synchronizer.update_weights()
        assert caught.value.names == ("s0.weight", "s1.bias")
        assert contents(engine.module) == old
        assert engine.calls == ["describe_engine"]


async def test_stages_given_as_ranks_of_one_trainer_are_refused_with_a_hint() -> None:
    model = stages(2)
    ranks = [of_stage(model, index) for index in range(2)]
    async with WeightSynchronizer(ranks, [ToldEngine(stages(2, 50, strided=False))]) as synchronizer:
        with pytest.raises(PlanError, match=r"ranks disagree.*give each stage of a pipeline as a list of its own"):
            await synchronizer.update_weights()
    with pytest.raises(ValueError, match="the trainer is an empty list"):
        WeightSynchronizer([], [ToldEngine(nn.Linear(1, 1))])
    with pytest.raises(ValueError, match="trainer rank 1 is given twice: it is rank 0 too"):
        WeightSynchronizer([[ranks[0]], [ranks[0]]], [ToldEngine(nn.Linear(1, 1))])


async def test_a_lone_rank_beside_lists_is_a_stage_of_its_own() -> None:
    model, engine = stages(2), ToldEngine(stages(2, 50, strided=False))
    ranks = [of_stage(model, index) for index in range(2)]
    async with WeightSynchronizer([[ranks[0]], ranks[1]], [engine]) as synchronizer:
        await synchronizer.update_weights()
    assert holds(engine, model)


@BOTH
async def test_a_source_that_fails_in_mid_update_is_named_and_the_next_update_repairs(staged: bool) -> None:
    class Failing(asyncsync.TrainerRank):
        fails = False

        async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
            if self.fails:
                raise OSError("no")
            return await super().send_weights(order)

    model, engines = stages(2), [ToldEngine(stages(2, 50 + index, strided=False), staged=staged) for index in range(2)]
    second = Failing(nn.ModuleDict({"s1": model["s1"]}))
    async with WeightSynchronizer([[of_stage(model, 0)], [second]], engines, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        change(model)
        second.fails = True
        with pytest.raises(TrainerError, match="trainer rank 1 failed: OSError: no") as caught:
            await synchronizer.update_weights()
        if staged:
            assert {outcome.state for outcome in caught.value.outcomes} == {EngineState.UNCHANGED}
        second.fails = False
        await synchronizer.update_weights()
        assert all(holds(engine, model) for engine in engines)


async def test_a_source_whose_layout_changes_is_agreed_on_anew() -> None:
    model, engine = stages(2), ToldEngine(stages(2, 50, strided=False))
    sent = ["s1.weight"]
    second = asyncsync.TrainerRank(lambda: [(name, model.state_dict()[name]) for name in sent])
    trainer = [[of_stage(model, 0)], [second]]
    async with WeightSynchronizer(trainer, [engine], partial=True, timeout=60) as synchronizer:
        await synchronizer.update_weights()
        assert not holds(engine, model)
        sent.append("s1.bias")
        await synchronizer.update_weights()
        assert holds(engine, model)


@pytest.mark.exhaustive
async def test_an_update_of_several_sources_that_is_cancelled_at_any_await_can_be_made_again() -> None:
    async def run(update: CancelAt) -> None:
        await update

    for connected in (True, False):
        for at in itertools.count():
            async with pipeline(3) as (model, ranks, engines, synchronizer):
                if connected:
                    await synchronizer.update_weights()
                change(model)
                update = CancelAt(synchronizer._update(), at, "waiting")
                await asyncio.wait([asyncio.create_task(run(update))])
                await synchronizer.update_weights()
                assert all(holds(engine, model) for engine in engines)
            assert not any(seat.taken for rank in ranks for seat in rank._asyncsync._seats), (
                "closing leaves every group"
            )
            assert not any(seat.taken for engine in engines for seat in engine._asyncsync.receiver.seats.values())
            if not update.reached:
                break
        assert at >= (3 if connected else 10)


# -- a gathering of the trainer's own --------------------------------------------------------------------------------


def sent(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor, tied ones under one name."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "tied"}


class Halves:
    """A stand-in for weights that only two ranks together can put together: each waits for the other."""

    def __init__(self, model: nn.Module, rank: int, meeting: list[tuple[int, str]]) -> None:
        self.model, self.rank, self.meeting = model, rank, meeting
        self.wrong: Any = None

    def describe(self) -> Iterable[tuple[str, torch.dtype, Sequence[int]]]:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in sent(self.model).items()]

    def gather(self, name: str) -> Tensor | None:
        self.meeting.append((self.rank, name))
        if isinstance(self.wrong, Exception):
            raise self.wrong
        if self.wrong is not None:
            return self.wrong  # type: ignore[no-any-return]
        return self.model.state_dict()[name] if self.rank == 0 else None


@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
async def test_every_rank_gathers_every_tensor_once_in_the_same_order(bucket_size: int) -> None:
    model, engines = Zoo(1), [ToldEngine(Zoo(50, strided=False)), ToldEngine(Zoo(51, strided=False), staged=False)]
    meeting: list[tuple[int, str]] = []
    halves = [Halves(model, rank, meeting) for rank in range(2)]
    ranks = [asyncsync.TrainerRank(half) for half in halves]
    assert isinstance(halves[0], asyncsync.GatheredWeights)
    async with WeightSynchronizer(ranks, engines, bucket_size=bucket_size, timeout=60) as synchronizer:
        for _ in range(2):
            meeting.clear()
            update = await synchronizer.update_weights()
            assert [contents(engine.module) == contents(model) for engine in engines] == [True, True]
            orders = [[name for rank, name in meeting if rank == which] for which in range(2)]
            assert orders[0] == orders[1]
            assert orders[0] == [name for name, tensor in sent(model).items() if tensor.numel()]
            assert update.tensors == len(sent(model))
            change(model)


async def test_names_are_mapped_and_dtypes_converted_where_the_trainer_gathers() -> None:
    model, engine = nn.Linear(3, 2), ToldEngine(nn.ModuleDict({"a": nn.Linear(3, 2)}).bfloat16())
    rank = asyncsync.TrainerRank(Halves(model, 0, []))
    async with WeightSynchronizer(
        [rank], [engine], name_map=lambda name: f"a.{name}", dtype=torch.bfloat16
    ) as synchronizer:
        await synchronizer.update_weights()
    assert torch.equal(engine.module.get_parameter("a.weight"), model.weight.bfloat16())


async def test_a_gathering_that_gives_something_else_than_it_said_is_refused_by_name() -> None:
    model, engine = nn.Linear(3, 2), ToldEngine(nn.Linear(3, 2))
    old = contents(engine.module)
    half = Halves(model, 0, [])
    rank = asyncsync.TrainerRank(half)
    async with WeightSynchronizer(rank, [engine], timeout=60) as synchronizer:
        half.wrong = torch.zeros(2, 2)
        with pytest.raises(
            asyncsync.TransferError, match=r"gathering weight gave torch.float32 \[2, 2\], described as"
        ):
            await synchronizer.update_weights()
        half.wrong = torch.zeros(2, 3).numpy()
        with pytest.raises(asyncsync.TransferError, match=r"gathering weight gave no tensor but ndarray"):
            await synchronizer.update_weights()
        half.wrong = OSError("no")
        with pytest.raises(asyncsync.TransferError, match=r"gathering weight failed: OSError: no"):
            await synchronizer.update_weights()
        half.wrong, half.rank = None, 1
        with pytest.raises(asyncsync.TransferError, match=r"gathering weight .* gave the source nothing"):
            await synchronizer.update_weights()
        assert contents(engine.module) == old
        half.rank = 0
        await synchronizer.update_weights()
        assert contents(engine.module) == contents(model)


@pytest.mark.parametrize("step", ["receive_weights", "finish_weight_update"])
async def test_every_rank_gathers_to_the_end_though_the_update_fails(step: str) -> None:
    model, engine = Zoo(1), ToldEngine(Zoo(50, strided=False))
    meeting: list[tuple[int, str]] = []
    ranks = [asyncsync.TrainerRank(Halves(model, rank, meeting)) for rank in range(2)]
    async with WeightSynchronizer(ranks, [engine], bucket_size=64, timeout=60) as synchronizer:
        await synchronizer.update_weights()

        meeting.clear()
        engine.before[step] = failing(OSError("no"))
        with pytest.raises(asyncsync.EngineError):
            await synchronizer.update_weights()
        orders = [[name for rank, name in meeting if rank == which] for which in range(2)]
        assert orders[0] == orders[1] == [name for name, tensor in sent(model).items() if tensor.numel()]


async def test_ranks_of_which_some_gather_and_some_do_not_are_refused() -> None:
    model = nn.Linear(3, 2)
    ranks = [asyncsync.TrainerRank(Halves(model, 0, [])), asyncsync.TrainerRank(model)]
    async with WeightSynchronizer(ranks, [ToldEngine(nn.Linear(3, 2))]) as synchronizer:
        with pytest.raises(PlanError, match="some give GatheredWeights, and some do not"):
            await synchronizer.update_weights()


# -- the trainer's hooks ---------------------------------------------------------------------------------------------


class Sleeper(asyncsync.TrainerRank):
    """A trainer that may be asked for its weights only between its two hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(lambda: self.read())
        self.model = model
        self.awake = False
        self.calls: list[str] = []
        self.fail_in = ""

    def before_update(self) -> None:
        assert not self.awake
        self.calls.append("before")
        if self.fail_in == "before":
            raise OSError("cannot wake")
        self.awake = True

    def after_update(self) -> None:
        assert self.awake
        self.calls.append("after")
        self.awake = False
        if self.fail_in == "after":
            raise OSError("cannot sleep")

    def read(self) -> nn.Module:
        assert self.awake
        return self.model


async def test_a_trainer_is_woken_for_every_update_and_put_to_sleep_after_it() -> None:
    trainer, engine = Sleeper(nn.Linear(3, 2)), ToldEngine(nn.Linear(3, 2))
    async with WeightSynchronizer(trainer, [engine], timeout=60) as synchronizer:
        await synchronizer.connect()
        assert trainer.calls == ["before", "after"]
        for _ in range(3):
            change(trainer.model)
            await synchronizer.update_weights()
            assert holds(engine, trainer.model)
        assert trainer.calls == ["before", "after"] * 4
        await synchronizer.add_engine(ToldEngine(nn.Linear(3, 2)))
        assert trainer.calls == ["before", "after"] * 4, "a joiner does not wake it"


@pytest.mark.parametrize("step", ["describe_engine", "accept_layout", "open_group", "receive_weights"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_hooks_are_paired_when_an_update_fails(step: str, when: str) -> None:
    trainer, engine = Sleeper(nn.Linear(3, 2)), ToldEngine(nn.Linear(3, 2))
    async with WeightSynchronizer(trainer, [engine], timeout=60) as synchronizer:
        getattr(engine, when)[step] = failing(OSError("no"))
        with pytest.raises(asyncsync.EngineError):
            await synchronizer.update_weights()
        assert trainer.calls == ["before", "after"]
        await synchronizer.update_weights()
        assert trainer.calls == ["before", "after"] * 2


async def test_the_hooks_are_paired_when_an_update_is_cancelled_at_any_await() -> None:
    async def run(update: CancelAt) -> None:
        await update

    for at in itertools.count():
        trainer, engine = Sleeper(nn.Linear(3, 2)), ToldEngine(nn.Linear(3, 2))
        async with WeightSynchronizer([[trainer], [asyncsync.TrainerRank({})]], [engine], timeout=60) as synchronizer:
            update = CancelAt(synchronizer._update(), at, "waiting")
            await asyncio.wait([asyncio.create_task(run(update))])
            assert trainer.calls in ([], ["before", "after"])
            assert not trainer.awake
            await synchronizer.update_weights()
            assert holds(engine, trainer.model)
        if not update.reached:
            break
    assert at >= 10


async def test_a_hook_that_fails_is_told() -> None:
    trainers = [Sleeper(nn.Linear(3, 2)), Sleeper(nn.Linear(3, 2))]
    for rank in trainers[1:]:
        rank.model = trainers[0].model
    engine = ToldEngine(nn.Linear(3, 2))
    async with WeightSynchronizer(trainers, [engine], timeout=60) as synchronizer:
        trainers[1].fail_in = "before"
        with pytest.raises(TrainerError, match="trainer rank 1 failed: OSError: cannot wake") as caught:
            await synchronizer.update_weights()
        assert caught.value.phase == "before update"
        assert trainers[1].calls == ["before"], "what did not wake is not put to sleep"
        assert trainers[0].calls in ([], ["before", "after"])
        trainers[1].fail_in = "after"
        with pytest.raises(TrainerError, match="trainer rank 1 failed: OSError: cannot sleep"):
            await synchronizer.update_weights()
        assert synchronizer.weight_version == engine.weight_version == 1, "the update itself has succeeded"
        engine.before["receive_weights"] = failing(OSError("no"))
        with pytest.raises(asyncsync.EngineError, match="OSError: no") as caught_too:
            await synchronizer.update_weights()
        assert any("cannot sleep" in note for note in caught_too.value.__notes__), "the first error is the one raised"
        trainers[1].fail_in = ""
        await synchronizer.update_weights()


async def test_a_trainer_without_hooks_is_not_asked_again() -> None:
    class Asked(asyncsync.TrainerRank):
        asked = 0

        async def begin_update(self) -> bool:
            type(self).asked += 1
            return await super().begin_update()

    trainer, engine = Asked(nn.Linear(3, 2)), ToldEngine(nn.Linear(3, 2))
    async with WeightSynchronizer(trainer, [engine]) as synchronizer:
        for _ in range(3):
            await synchronizer.update_weights()
    assert Asked.asked == 1


# -- a conductor that is gone ----------------------------------------------------------------------------------------


async def test_the_groups_of_a_conductor_that_is_gone_are_left_with_the_next_update() -> None:
    model, engines = stages(2), [ToldEngine(stages(2, 50 + index, strided=False)) for index in range(2)]
    ranks = [of_stage(model, index) for index in range(2)]
    gone = WeightSynchronizer([[rank] for rank in ranks], engines)
    await gone.update_weights()  # and is never closed
    async with WeightSynchronizer([[rank] for rank in ranks], engines[:1]) as synchronizer:
        await synchronizer.update_weights()
        assert [len(rank._asyncsync._seats) for rank in ranks] == [1, 1]
        assert holds(engines[0], model)


@pytest.mark.parametrize("name", ["before_update", "after_update"])
async def test_a_hook_that_is_async_is_refused(name: str) -> None:
    async def hook(self: Any) -> None: ...

    kind: Any = type("Asleep", (asyncsync.TrainerRank,), {name: hook})
    with pytest.raises(TypeError, match="must not be async"):
        kind(nn.Linear(1, 1))


async def test_the_hook_after_is_called_behind_one_before_that_takes_longer_than_anyone_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncsync.synchronizer.CLEANUP_TIMEOUT", 0.05)
    monkeypatch.setattr("asyncsync.guard.CLEANUP_TIMEOUT", 0.05)
    woken, rested = threading.Event(), threading.Event()

    class Slow(Sleeper):
        def before_update(self) -> None:
            woken.wait()
            super().before_update()

        def after_update(self) -> None:
            super().after_update()
            rested.set()

    trainer = Slow(nn.Linear(3, 2))
    async with WeightSynchronizer(trainer, [ToldEngine(nn.Linear(3, 2))], timeout=0.4) as synchronizer:
        with pytest.raises(asyncsync.WeightUpdateTimeoutError):
            await synchronizer.update_weights()
        assert trainer.calls == []
        woken.set()
        assert await asyncio.to_thread(rested.wait, 60)
        assert trainer.calls == ["before", "after"]
