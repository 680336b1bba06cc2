"""Engines of several ranks: whole or not serving, whichever rank fails, and the same bytes on every rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import asyncsync
from asyncsync import EngineError, EngineGroup, EngineState, MembershipError, WeightSynchronizer, cluster
from asyncsync.connection import TransportChoice
from asyncsync.messages import EngineStatus
from tests.engines import CONNECTING, IN_PLACE, STAGED, ToldEngine, change, failing, flip_a_bit, gate_of, holds, zoo
from tests.parallel import RemoteRank, Served, become, every
from tests.sample import Zoo, contents

pytestmark = pytest.mark.asyncio

BOTH = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])


async def turns(count: int = 20) -> None:
    """Let everything else run: whatever needs no answer from a thread has happened then."""
    for _ in range(count):
        await asyncio.sleep(0)


class Rank(ToldEngine):
    """A rank that can be gone."""

    gone = False

    async def _told(self, name: str, call: Any) -> Any:
        if self.gone:
            call.close()
            raise cluster.ActorLostError
        return await super()._told(name, call)

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        call = super().abort_weight_update(epoch, published)
        return await self._told("abort_weight_update", call)  # type: ignore[no-any-return]


def ranks(count: int, *, staged: bool = True, seed: int = 50) -> list[Rank]:
    return [Rank(zoo(seed + rank), staged=staged) for rank in range(count)]


def changed(trainer: Zoo) -> dict[str, bytes]:
    """Change every tensor; what it holds then."""
    change(trainer)
    return contents(trainer)


@asynccontextmanager
async def one_group(
    *, staged: bool = True, count: int = 2, **options: Any
) -> AsyncIterator[tuple[Zoo, list[Rank], WeightSynchronizer]]:
    """A trainer, and one engine of several ranks, that has had a first update."""
    trainer, group = Zoo(1), ranks(count, staged=staged)
    options = {"bucket_size": 1024, "timeout": 60.0} | options
    async with WeightSynchronizer(trainer, [group], **options) as synchronizer:
        await synchronizer.update_weights()
        yield trainer, group, synchronizer


async def assert_whole_or_barred(group: Sequence[Rank], versions: dict[int, dict[str, bytes]]) -> bool:
    """Whether it is whole: then all ranks hold one version, bit for bit; else each turns everyone away."""
    status = await EngineGroup(group).describe_engine()
    for rank in group:
        assert (rank._asyncsync.record.tainted is None) == (status.tainted is None)
        if status.tainted is None:
            assert rank.weight_version == status.weight_version
            assert contents(rank.module) == versions[status.weight_version or 0]
        else:
            with pytest.raises(asyncsync.TaintedEngineError):
                async with rank.generating():
                    pytest.fail("a tainted rank served")
    return status.tainted is None


# -- bytes -----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
async def test_ranks_of_engines_of_all_sizes_get_the_trainers_bytes(staged: bool, bucket_size: int) -> None:
    trainer = Zoo(1)
    groups = [ranks(size, staged=staged, seed=10 * size) for size in (1, 2, 3, 1)]
    engines = [groups[0][0], tuple(groups[1]), EngineGroup(groups[2]), groups[3]]
    async with WeightSynchronizer(trainer, engines, bucket_size=bucket_size) as synchronizer:
        for version in (1, 2, 3):
            update = await synchronizer.update_weights()
            assert [outcome.engine for outcome in update.outcomes] == [f"Rank-{number}" for number in range(4)]
            assert {(outcome.weight_version, outcome.digest) for outcome in update.outcomes} == {
                (version, update.digest)
            }
            assert all(holds(rank, trainer) for group in groups for rank in group)
            change(trainer)
        assert synchronizer.ready_engines == tuple(engines)


async def test_ranks_may_be_staged_and_in_place_in_one_engine() -> None:
    trainer, group = Zoo(1), [*ranks(1), *ranks(1, staged=False)]
    async with WeightSynchronizer(trainer, [group]) as synchronizer:
        for _ in range(3):
            await synchronizer.update_weights()
            assert all(holds(rank, trainer) and gate_of(rank).is_open for rank in group)
            change(trainer)


async def test_ranks_that_receive_different_bytes_are_named() -> None:
    async with one_group() as (trainer, group, synchronizer):
        old = contents(trainer)
        change(trainer)
        flip_a_bit(group[1])
        with pytest.raises(asyncsync.EngineError, match=r"Rank-0 failed: .* rank 1 received other bytes than rank 0"):
            await synchronizer.update_weights()
        assert await assert_whole_or_barred(group, {1: old})


async def test_a_wrong_bit_at_one_rank_costs_the_other_engines_nothing() -> None:
    trainer, group, (other,) = Zoo(1), ranks(2), ranks(1)
    async with WeightSynchronizer(trainer, [group, other], bucket_size=1024) as synchronizer:
        await synchronizer.update_weights()
        change(trainer)
        flip_a_bit(group[1])
        with pytest.raises(asyncsync.EngineError, match="received other bytes") as caught:
            await synchronizer.update_weights()
        assert caught.value.update is not None
        assert holds(other, trainer)


# -- generation ------------------------------------------------------------------------------------------------------


async def test_nothing_is_generated_while_some_ranks_have_switched_and_others_have_not() -> None:
    async with one_group() as (trainer, group, synchronizer):
        change(trainer)
        switched = asyncio.Event()
        readers: list[asyncio.Task[tuple[int | None, bool]]] = []

        async def read() -> tuple[int | None, bool]:
            async with group[0].generating() as version:
                return version, all(holds(rank, trainer) for rank in group)

        async def between() -> None:
            await switched.wait()
            assert (holds(group[0], trainer), holds(group[1], trainer)) == (True, False)
            readers.append(asyncio.create_task(read()))
            await turns()
            assert not readers[0].done()

        async def note() -> None:
            switched.set()

        group[0].after["finish_weight_update"] = note
        group[1].before["finish_weight_update"] = between
        await synchronizer.update_weights()
        assert await readers[0] == (2, True)


@BOTH
async def test_ranks_go_on_computing_for_what_the_front_has_begun(staged: bool) -> None:
    async with one_group(staged=staged) as (trainer, group, synchronizer):
        old = contents(trainer)
        change(trainer)
        async with group[0].generating() as version:
            update = asyncio.create_task(synchronizer.update_weights())
            while gate_of(group[0]).is_open:
                await turns(1)
            await turns()
            async with group[1].generating() as other:
                assert version == other == 1
                assert [contents(rank.module) for rank in group] == [old, old]
        await update
        assert all(holds(rank, trainer) and gate_of(rank).is_open for rank in group)


@BOTH
async def test_every_rank_drops_its_cache_before_the_front_serves_again(staged: bool) -> None:
    class Caching(Rank):
        flushed = 0

        async def flush_cache(self) -> None:
            assert not gate_of(group[0]).is_open
            self.flushed += 1

    group = [Caching(zoo(50 + rank), staged=staged) for rank in range(3)]
    async with WeightSynchronizer(Zoo(1), [group]) as synchronizer:
        await synchronizer.update_weights()
        await synchronizer.update_weights()
    assert [rank.flushed for rank in group] == [2, 2, 2]


@BOTH
async def test_the_front_is_paused_first_and_resumed_last(staged: bool) -> None:
    calls: list[str] = []

    class Numbered(Rank):
        async def _told(self, name: str, call: Any) -> Any:
            calls.append(f"{name.partition('_')[0]} {group.index(self)}")
            return await super()._told(name, call)

    group = [Numbered(zoo(50 + rank), staged=staged) for rank in range(2)]
    async with WeightSynchronizer(Zoo(1), [group]) as synchronizer:
        await synchronizer.update_weights()
        calls.clear()
        await synchronizer.update_weights()
    receive, finish = ["receive 0", "receive 1"], ["finish 0", "finish 1"]
    if staged:
        assert calls == [*receive, "pause 0", *finish, "resume 0"]
    else:
        assert calls == ["pause 0", "pause 1", *receive, *finish, "resume 1", "resume 0"]


async def test_a_pause_that_an_update_left_behind_ends_with_the_next_that_needs_none() -> None:
    async with one_group() as (trainer, group, synchronizer):
        epoch = max(rank._asyncsync.record.epoch for rank in group)
        for rank in group:
            await rank.pause_generation(epoch, "drain")  # by a conductor that has died since
        change(trainer)
        await synchronizer.update_weights()
        assert all(holds(rank, trainer) and gate_of(rank).is_open for rank in group)


# -- failures --------------------------------------------------------------------------------------------------------

FRONT_STAGED = ("receive_weights", "pause_generation", "finish_weight_update", "resume_generation")
FAILURES = [
    *((1, step, True, when) for step, when in zip(CONNECTING, ("before", "before", "after", "after"), strict=True)),
    *((0, step, True, when) for step in FRONT_STAGED for when in ("before", "after")),
    *((1, step, True, when) for step in STAGED for when in ("before", "after")),
    *((rank, step, False, when) for rank in (0, 1) for step in IN_PLACE for when in ("before", "after")),
]


@pytest.mark.parametrize(("rank", "step", "staged", "when"), FAILURES)
async def test_a_rank_that_fails_at_any_step_leaves_the_engine_whole_or_barred_and_the_next_update_repairs(
    rank: int, step: str, staged: bool, when: str
) -> None:
    async with one_group(staged=staged) as (trainer, group, synchronizer):
        versions = {1: contents(trainer), 2: changed(trainer)}
        if step in CONNECTING:
            synchronizer._connection.forget()
            for each in group:
                each._asyncsync._binding = None
                each._asyncsync.receiver.seats[0].close()
        getattr(group[rank], when)[step] = failing(OSError("the disk is full"))
        with pytest.raises(EngineError, match=rf"Rank-0 .*rank {rank} failed: OSError: the disk is full"):
            await synchronizer.update_weights()
        whole = await assert_whole_or_barred(group, versions)
        if staged:
            assert whole != (step == "finish_weight_update" and when == "before")
            assert all(gate_of(each).is_open == whole for each in group), "what is whole serves on"
        if whole:
            assert group[0].weight_version == synchronizer.weight_version
        await synchronizer.update_weights()
        assert all(holds(each, trainer) and gate_of(each).is_open for each in group)
        assert synchronizer.ready_engines == (group,)


@pytest.mark.parametrize("failed", [0, 1])
async def test_a_commit_on_some_ranks_only_is_not_published_and_turns_away_who_waits(failed: int) -> None:
    async with one_group() as (trainer, group, synchronizer):
        change(trainer)
        readers: list[asyncio.Task[None]] = []

        async def read() -> None:
            async with group[0].generating():
                pytest.fail("a torn engine served")

        async def fail() -> None:
            readers.append(asyncio.create_task(read()))
            await turns()
            raise OSError("no")

        group[failed].before["finish_weight_update"] = fail
        with pytest.raises(EngineError) as caught:
            await synchronizer.update_weights()
        assert synchronizer.weight_version == 1
        (outcome,) = caught.value.outcomes
        assert (outcome.state, outcome.weight_version) == (EngineState.TAINTED, None)
        assert f"rank {failed}: it missed version 2: " in str(outcome.error)
        assert f"rank {1 - failed}: it holds version 2 alone: " in str(outcome.error)
        with pytest.raises(asyncsync.TaintedEngineError, match=("missed version 2", "version 2 alone")[failed]):
            await readers[0]
        assert synchronizer.ready_engines == ()


@pytest.mark.parametrize("failed", [0, 1])
async def test_a_first_commit_on_some_ranks_only_bars_them_all(failed: int) -> None:
    group = ranks(2)
    group[failed].before["finish_weight_update"] = failing(OSError("no"))
    async with WeightSynchronizer(Zoo(1), [group]) as synchronizer:
        with pytest.raises(EngineError):
            await synchronizer.update_weights()
        assert synchronizer.weight_version is None
    assert not await assert_whole_or_barred(group, {})


@BOTH
async def test_a_cache_that_one_rank_cannot_drop_bars_them_all(staged: bool) -> None:
    class Caching(Rank):
        broken = False

        async def flush_cache(self) -> None:
            if self.broken:
                raise OSError("no")

    group = [Caching(zoo(50 + rank), staged=staged) for rank in range(2)]
    async with WeightSynchronizer(Zoo(1), [group]) as synchronizer:
        await synchronizer.update_weights()
        for broken in group:
            broken.broken = True
            with pytest.raises(EngineError):
                await synchronizer.update_weights()
            assert not await assert_whole_or_barred(group, {})
            broken.broken = False
            await synchronizer.update_weights()
            assert all(gate_of(rank).is_open for rank in group)


@pytest.mark.parametrize("step", ["receive_weights", "finish_weight_update"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_gone_is_named_and_the_others_do_not_serve(rank: int, step: str) -> None:
    async with one_group(count=3) as (_, group, synchronizer):

        async def die() -> None:
            group[rank].gone = True
            raise cluster.ActorLostError

        group[rank].before[step] = die
        with pytest.raises(EngineError, match=rf"rank {rank} is gone") as caught:
            await synchronizer.update_weights()
        assert [outcome.state for outcome in caught.value.outcomes] == [EngineState.LOST]
        alive = [each for each in group if not each.gone]
        assert not await assert_whole_or_barred(alive, {})


async def test_a_rank_that_does_not_answer_the_clean_up_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsync.engines.ranks.ABORT_TIMEOUT", 0.2)
    async with one_group() as (_, group, synchronizer):
        group[0].before["receive_weights"] = failing(OSError("no"))
        group[1].before["abort_weight_update"] = asyncio.Event().wait  # type: ignore[assignment]
        with pytest.raises(EngineError) as caught:
            await synchronizer.update_weights()
        assert caught.value.outcomes[0].state is EngineState.LOST
        assert "rank 1 did not answer within 0.2 s" in str(caught.value.outcomes[0].error)
        with pytest.raises(asyncsync.TaintedEngineError, match="missed version 2"):
            async with group[0].generating():
                pytest.fail("served")


@pytest.mark.parametrize(
    ("rank", "step", "staged", "when"),
    [each for each in FAILURES if each[1] not in (*CONNECTING, "resume_generation") and (each[2] or each[0])],
)
async def test_cancelled_while_a_rank_is_in_any_call_the_engine_is_whole_or_barred(
    rank: int, step: str, staged: bool, when: str
) -> None:
    async with one_group(staged=staged) as (trainer, group, synchronizer):
        versions = {1: contents(trainer), 2: changed(trainer)}
        arrived = asyncio.Event()

        async def arrive() -> None:
            arrived.set()
            await asyncio.Event().wait()

        getattr(group[rank], when)[step] = arrive
        update = asyncio.create_task(synchronizer.update_weights())
        await arrived.wait()
        update.cancel()
        await asyncio.wait([update])
        assert update.cancelled()
        assert not synchronizer._lock.holds()
        await assert_whole_or_barred(group, versions)
        await synchronizer.update_weights()
        assert all(holds(each, trainer) and gate_of(each).is_open for each in group)


async def test_a_cancellation_that_comes_from_a_rank_is_the_ranks_failure() -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError

    for step in STAGED:
        async with one_group() as (trainer, group, synchronizer):
            group[1].before[step] = cancel
            with pytest.raises(EngineError, match="rank 1 failed: CancelledError"):
                await synchronizer.update_weights()
            await synchronizer.update_weights()
            assert all(holds(rank, trainer) for rank in group)


@pytest.mark.parametrize(
    "error",
    [
        asyncsync.PlanError("no", names=["a"]),
        asyncsync.ConnectError("no"),
        asyncsync.OutOfStepError("no"),
        asyncsync.TransferError("no", bucket=3),
        asyncsync.LinkLostError("no", bucket=3),
        asyncsync.TaintedEngineError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_keeps_its_kind_and_names_the_rank(error: Exception) -> None:
    group = ranks(2)
    group[1].before["describe_engine"] = failing(error)
    with pytest.raises(type(error), match=r"^rank 1: no") as caught:
        await EngineGroup(group).describe_engine()
    assert caught.value.__cause__ is error
    for attribute in ("names", "bucket"):
        assert getattr(caught.value, attribute, None) == getattr(error, attribute, None)


async def test_weights_that_do_not_fit_one_rank_are_refused_by_its_number() -> None:
    group = [asyncsync.ModuleEngine(nn.Linear(3, 2)), asyncsync.ModuleEngine(nn.Linear(4, 2))]
    async with WeightSynchronizer(nn.Linear(3, 2), [group]) as synchronizer:
        with pytest.raises(asyncsync.PlanError, match=r"ModuleEngine-0: rank 1: .*weight \(sent") as caught:
            await synchronizer.update_weights()
        assert caught.value.names == ("weight",)


# -- actors, and shards ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[Any]]:
    made = [RemoteRank.remote() for _ in range(3)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.ranks
@BOTH
@pytest.mark.parametrize(
    ("bucket_size", "transport"), [(64, "auto"), (1 << 20, "auto"), (64, "objects"), (1 << 20, "folder")]
)
async def test_tensor_parallel_ranks_hold_together_what_the_trainer_sends(
    actors: list[Any], tmp_path: Path, staged: bool, bucket_size: int, transport: TransportChoice
) -> None:
    pair, single = actors[:2], actors[2]
    await become(pair, "tensor parallel", tmp_path, staged=staged)
    await become([single], "replicated", tmp_path, staged=staged)
    trainer = Served(1)
    shapes = await every(pair, "here")
    assert (shapes[0]["deep"], shapes[1]["deep"]) == ((3, 3, 7), (3, 2, 7))
    options: dict[str, Any] = {"transport": transport, "folder": tmp_path if transport == "folder" else None}
    async with WeightSynchronizer(trainer, [pair, single], bucket_size=bucket_size, **options) as synchronizer:
        for version in (1, 2, 3):
            update = await synchronizer.update_weights()
            assert [outcome.digest for outcome in update.outcomes] == [update.digest] * 2
            assert await every(pair, "whole") == [contents(trainer)] * 2
            assert await cluster.call(single, "whole") == contents(trainer)
            for front in (pair[0], single):
                generated, outputs = await cluster.call(front, "generate", torch.eye(5))
                assert generated == version
                assert torch.equal(outputs, trainer(torch.eye(5)))
            trainer.step()
        assert await every(pair, "here") == shapes


@pytest.mark.ranks
@BOTH
async def test_three_ranks_of_which_some_hold_nothing_of_a_tensor(
    actors: list[Any], tmp_path: Path, staged: bool
) -> None:
    await become(actors, "tensor parallel", tmp_path, staged=staged)
    trainer = Served(1)
    async with WeightSynchronizer(trainer, [actors], bucket_size=128) as synchronizer:
        for _ in range(3):
            await synchronizer.update_weights()
            assert await every(actors, "whole") == [contents(trainer)] * 3
            trainer.step()
        if staged:
            for arenas, own in await every(actors, "staged_bytes"):
                assert arenas <= 2 * (own + 64 * len(contents(trainer))), "shards beside shards, no whole model"
        for how in ("replace_parameter", "convert_and_back"):
            await every(actors, how)
            await synchronizer.update_weights()
            assert await every(actors, "whole") == [contents(trainer)] * 3
            trainer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["tensor parallel", "replicated"])
@BOTH
async def test_rollouts_that_go_on_during_updates_never_mix_versions(
    actors: list[Any], tmp_path: Path, kind: str, staged: bool
) -> None:
    pair, inputs = actors[:2], torch.eye(5)
    await become(pair, kind, tmp_path, staged=staged)
    trainer = Served(1)
    expected: dict[int | None, torch.Tensor] = {}
    async with WeightSynchronizer(trainer, [pair], bucket_size=256) as synchronizer:
        await synchronizer.update_weights()
        expected[1] = trainer(inputs).detach()
        seen: list[tuple[int | None, torch.Tensor]] = []
        more, enough = asyncio.Event(), asyncio.Event()

        async def roll_out() -> None:
            while not enough.is_set():  # cancelled, one rank would wait for the other in a collective step for ever
                seen.append(await cluster.call(pair[0], "generate", inputs))
                more.set()

        clients = [asyncio.create_task(roll_out()) for _ in range(3)]
        try:
            for version in range(2, 8):
                trainer.step()
                expected[version] = trainer(inputs).detach()
                await synchronizer.update_weights()
                more.clear()
                await more.wait()
        finally:
            enough.set()
            await asyncio.gather(*clients)
    assert len({version for version, _ in seen}) >= 4
    assert all(torch.equal(outputs, expected[version]) for version, outputs in seen)
    assert not torch.equal(expected[2], expected[3])


@pytest.mark.ranks
async def test_a_rank_of_a_mesh_that_is_missing_is_found_by_the_tensors_that_are_not_whole(
    actors: list[Any], tmp_path: Path
) -> None:
    await become(actors, "tensor parallel", tmp_path)
    cut = {"up.weight", "up.bias", "tied.weight", "down.weight", "deep", "last", "brief", "table", "few"}
    for engine, names in ((actors[0], cut), (actors[:2], cut - {"few"}), ([actors[0], actors[2]], cut - {"few"})):
        async with WeightSynchronizer(Served(1), [engine]) as synchronizer:
            with pytest.raises(
                asyncsync.PlanError,
                match=r"ParallelEngine-0 holds only a part of brief, deep, .*: give the synchronizer a list of all",
            ) as caught:
                await synchronizer.update_weights()
            assert set(caught.value.names) == names - ({"few"} if engine is actors[0] else set())
        assert await every(actors, "is_serving") == [True] * 3


@pytest.mark.ranks
async def test_a_rank_that_holds_shards_says_what_it_cannot_do(actors: list[Any], tmp_path: Path) -> None:
    await become(actors, "tensor parallel", tmp_path)
    async with WeightSynchronizer(Served(1), [actors]) as synchronizer:
        await synchronizer.update_weights()
        with pytest.raises(EngineError, match="holds only shards of its weights"):
            await cluster.call(actors[0], "weights_digest")
        assert not (await cluster.call(actors[0], "describe_engine")).gives
    trainer = {name: tensor for name, tensor in Served(1).state_dict().items() if name != "tied.weight"}
    trainer["deep"] = torch.zeros(3, 3, 7)  # as a rank holds it
    async with WeightSynchronizer(trainer, [actors]) as synchronizer:
        with pytest.raises(asyncsync.PlanError, match=r"deep \(sent float32 \[3, 3, 7\], held float32 \[3, 5, 7\]\)"):
            await synchronizer.update_weights()


@pytest.mark.ranks
@BOTH
async def test_actors_become_engines_of_other_sizes_as_they_leave_and_join(
    actors: list[Any], tmp_path: Path, staged: bool
) -> None:
    trainer = Served(1)
    await become(actors[:2], "tensor parallel", tmp_path, staged=staged)
    await become(actors[2:], "replicated", tmp_path, staged=staged)
    now: list[Any] = [actors[:2], actors[2]]

    async def engines() -> list[Any]:
        return now

    async with WeightSynchronizer(trainer, engines) as synchronizer:
        await synchronizer.update_weights()
        await become(actors, "tensor parallel", tmp_path, staged=staged)
        now = [actors]
        trainer.step()
        update = await synchronizer.update_weights()
        assert len(update.outcomes) == 1
        assert await every(actors, "whole") == [contents(trainer)] * 3
        _, outputs = await cluster.call(actors[0], "generate", torch.eye(5))
        torch.testing.assert_close(outputs, trainer(torch.eye(5)).detach())  # torch adds a third of the bias thrice


@pytest.mark.ranks
async def test_ranks_that_join_catch_up_from_an_engine_that_is_whole(actors: list[Any], tmp_path: Path) -> None:
    trainer = Served(1)
    await become(actors[:2], "tensor parallel", tmp_path)
    await become(actors[2:], "replicated", tmp_path)
    async with WeightSynchronizer(trainer, [actors[2]], bucket_size=256) as synchronizer:
        await synchronizer.update_weights()
        old = contents(trainer)
        trainer.step()
        await synchronizer.add_engine(actors[:2])
        assert await every(actors[:2], "whole") == [old] * 2
        assert synchronizer.ready_engines == (actors[2], actors[:2])


# -- what ranks do not agree on --------------------------------------------------------------------------------------


async def test_a_group_says_of_itself_what_holds_for_every_rank() -> None:
    async with one_group(count=3) as (_, group, synchronizer):
        status = await EngineGroup(group).describe_engine()
        assert (status.world_size, status.weight_version, status.tainted) == (3, 1, None)
        assert status.instance.split("+") == [rank._asyncsync.record.instance for rank in group]
        assert len(status.connections) == 1
        assert status.plan_digest is not None
        assert not status.gives
        group[1]._asyncsync.receiver.seats[0].close()
        group[2]._asyncsync._binding = None
        group[1]._asyncsync._staged = False
        status = await EngineGroup(group).describe_engine()
        assert (status.connections, status.plan_digest, status.staged) == ((), None, False)
        group[2]._asyncsync.record.version = 7
        status = await EngineGroup(group).describe_engine()
        assert (status.weight_version, status.newest_version) == (None, 7)
        assert status.tainted == ("its ranks hold different versions: rank 0 holds 1, rank 1 holds 1, rank 2 holds 7")
        assert synchronizer.weight_version == 1


# -- membership ------------------------------------------------------------------------------------------------------


async def test_ranks_that_are_missing_or_given_twice_are_refused_by_name() -> None:
    trainer = nn.Linear(1, 1)
    a, b, c = (asyncsync.ModuleEngine(nn.Linear(1, 1)) for _ in range(3))
    for engines, message in (
        ([[]], "needs at least one rank"),
        ([a, ()], "needs at least one rank"),
        ([[a, b], [c, a]], r"rank 1 of engine 1 is given twice: it is rank 0 of engine 0 too"),
        ([[a, b], b], r"engine 1 is given twice: it is rank 1 of engine 0 too"),
        ([[a, b, a]], r"rank 2 of engine 0 is given twice: it is rank 0 of engine 0 too"),
        ([[a, b], EngineGroup([a, b])], r"engine 1 is given twice: it is engine 0 too"),
        ([[a], a], r"engine 1 is given twice: it is engine 0 too"),
    ):
        with pytest.raises(MembershipError, match=message):
            WeightSynchronizer(trainer, engines)
    with pytest.raises(MembershipError, match="needs at least one rank"):
        EngineGroup([])
    with pytest.raises(MembershipError, match="rank 1 of the engine is given twice: it is rank 0 too"):
        EngineGroup([a, a])
    with pytest.raises(TypeError, match="is no rollout engine"):
        WeightSynchronizer(trainer, [[a, 3]])
    with pytest.raises(TypeError, match="is no rollout engine"):
        WeightSynchronizer(trainer, [[[a, b], c]])
    for address in (["http://host:1"], "http://host:1"):
        with pytest.raises(
            TypeError, match=r"^'http://host:1' is no rollout engine: give asyncsync\.VLLMEngine\(…\) or "
        ):
            WeightSynchronizer(trainer, address)
    with pytest.raises(TypeError, match=r"^Sequential is no rollout engine: .* ModuleEngine\(module\)"):
        WeightSynchronizer(trainer, [nn.Sequential(nn.Linear(2, 2))])
    async with WeightSynchronizer(trainer, [[a, b]]) as synchronizer:
        with pytest.raises(MembershipError, match=r"engine that is to join is .*: it is rank 1 of ModuleEngine-0"):
            await synchronizer.add_engine(b)
        with pytest.raises(MembershipError, match=r"rank 0 of the engine that is to join is given twice"):
            await synchronizer.add_engine([b, a])
        with pytest.raises(MembershipError, match="joined already: it is ModuleEngine-0"):
            await synchronizer.add_engine((a, b))
        with pytest.raises(MembershipError, match="needs at least one rank"):
            await synchronizer.add_engine([])
        with pytest.raises(MembershipError, match="ModuleEngine is none of the engines"):
            await synchronizer.remove_engine([a, c])


async def test_a_rank_behind_two_adapters_is_found_out_when_it_says_who_it_is() -> None:
    class Adapter(Rank):
        async def describe_engine(self) -> EngineStatus:
            return await a.describe_engine()

    a, b = ranks(2)
    for engines in ([[b, a], Adapter(zoo(1))], [[a, Adapter(zoo(1))]]):
        async with WeightSynchronizer(Zoo(1), engines) as synchronizer:
            with pytest.raises(asyncsync.ConnectError, match="are the same engine, or share a rank"):
                await synchronizer.connect()


@BOTH
async def test_an_engine_of_two_ranks_leaves_and_one_of_three_joins(staged: bool) -> None:
    trainer, single = Zoo(1), Rank(zoo(2), staged=staged)
    two, three = ranks(2, staged=staged), ranks(3, staged=staged, seed=70)
    async with WeightSynchronizer(trainer, [single, two]) as synchronizer:
        await synchronizer.update_weights()
        await synchronizer.remove_engine(list(two))
        assert all(not rank._asyncsync.receiver.seats[0].taken for rank in two)
        change(trainer)  # is in the middle of a step: the one that joins gets what the others serve
        await synchronizer.add_engine(list(three))
        assert all(contents(rank.module) == contents(single.module) for rank in three)
        assert synchronizer.ready_engines == (single, three)
        for _ in range(2):
            await synchronizer.update_weights()
            assert all(holds(rank, trainer) for rank in (single, *three))
            change(trainer)
        assert not any(holds(rank, single.module) for rank in two)


async def test_the_same_ranks_in_a_new_list_are_the_same_engine_and_others_are_another() -> None:
    trainer, (a, b, c) = Zoo(1), ranks(3)
    now: list[Any] = [[a, b]]

    async def engines() -> list[Any]:
        return [list(each) for each in now]

    async with WeightSynchronizer(trainer, engines) as synchronizer:
        await synchronizer.update_weights()
        await synchronizer.update_weights()
        assert a.calls == [*CONNECTING, *FRONT_STAGED, *FRONT_STAGED]
        now[:] = [[a, b, c]]
        change(trainer)
        update = await synchronizer.update_weights()
        assert [outcome.engine for outcome in update.outcomes] == ["Rank-1"]
        assert all(holds(rank, trainer) for rank in (a, b, c))
        now[:] = [[a], [c, b]]
        change(trainer)
        await synchronizer.update_weights()
        assert all(holds(rank, trainer) for rank in (a, b, c))
        now[:] = [[a, b], [b, c]]
        with pytest.raises(MembershipError, match="rank 0 of engine 1 is given twice: it is rank 1 of engine 0"):
            await synchronizer.update_weights()
