"""vLLM's own ``nccl`` backend, over a communicator that is none of NCCL's: the checks, and what can go wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import ConnectError, EngineState, PlanError, TransferError, WeightSynchronizer
from asyncsync.buckets import plan_buckets
from asyncsync.engines.vllm.clients import RayClient, client_for
from asyncsync.messages import Rendezvous, UpdateOrder
from asyncsync.testing import CHECKS, Probe, failed, step
from asyncsync.transports.pynccl import STORE, PyNcclJoining, endpoint
from asyncsync.weights import WeightSource
from tests.chain import Chain, continued
from tests.fake_nccl import FakeCommunicator, FakeGroup, FakeLane, FakeNCCLLLM, eventually, nccl
from tests.test_conformance import ChainEngine, FakeVLLMSubject, little_patience
from tests.test_vllm_adapter import over

__all__ = ["little_patience", "nccl"]

CANNOT = {
    "digest": "vLLM confirms no bytes",
}
"""Checks that this backend does not pass."""


class NCCLSubject(FakeVLLMSubject):
    """The same with vLLM's own backend, that tells of no tensor what it is."""

    tells_shapes = False  # nor dtypes


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "prefix_caching"), [(1, True), (2, False)], ids=["prefixes", "two ranks"])
@pytest.mark.parametrize("check", [check for check in CHECKS if check not in CANNOT])
@pytest.mark.asyncio
async def test_the_nccl_backend_conforms(check: str, ranks: int, prefix_caching: bool, nccl: None) -> None:
    llm = FakeNCCLLLM(ranks=ranks, prefix_caching=prefix_caching)
    subject = NCCLSubject(llm, prefix_caching=prefix_caching, backend="nccl")
    await CHECKS[check](subject)
    await subject.engine.aclose()


# -- what is asked of vLLM --------------------------------------------------------------------------------------------

BUCKETS = 4  # of a chain, cut into buckets of this size
SIZE = 4096
BEGIN, END = ["pause wait True"], ["finish", "label", "resume"]
UPDATE = [*BEGIN, "start", *["update"] * BUCKETS, *END]
FIRST = [*BEGIN, "start", "finish", "start", *["update"] * BUCKETS, *END]


def connected(trainer: Any, *llms: FakeNCCLLLM, **options: Any) -> WeightSynchronizer:
    engines = [asyncsync.VLLMEngine(llm, backend="nccl") for llm in llms]
    return WeightSynchronizer(trainer, engines, **{"bucket_size": SIZE} | options)


async def serves(llm: FakeNCCLLLM, model: Chain) -> bool:
    generated = await llm.generate([7], 12, None)
    return list(generated.tokens) == continued(model, model, 7, 0, 12)


def source_communicators() -> list[FakeCommunicator]:
    return [each for each in FakeCommunicator.instances if each.group.rank == 0]


@pytest.mark.asyncio
async def test_an_update_is_one_session_and_one_call_and_one_broadcast_a_bucket(nccl: None) -> None:
    llm, model = FakeNCCLLLM(ranks=2), Chain(1)
    async with connected(model, llm) as synchronizer:
        await synchronizer.update_weights()
        assert llm.calls == ["init", *FIRST], "what an earlier session may have left is cleared first"
        await synchronizer.update_weights()
        assert llm.calls[1 + len(FIRST) :] == UPDATE
        (source,) = source_communicators()
        plan = plan_buckets(WeightSource(model).read(name_map=None, dtype=None).specs, SIZE, whole_tensors=True)
        assert source.broadcasts == [bucket.nbytes for bucket in plan.buckets] * 2
        assert all(each is not None and each.broadcasts == source.broadcasts for each in llm.communicators)
        assert source.threads == {"asyncsync-sender"}, "where the guard is"
    assert llm.calls[-1] == "shutdown"
    assert eventually(source.destroyed.is_set)


class Mixed(nn.Module):
    """Dtypes by turns, a scalar, nothing at all, what does not lie in order, and two names for one."""

    def __init__(self) -> None:
        super().__init__()
        for index, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16, torch.float64, torch.bool)):
            shapes = ((3, 5), (7,), (), (0, 2))
            for number, shape in enumerate(shapes):
                self.register_buffer(f"tensor_{index}_{number}", (torch.randn(shape) * 9).to(dtype))
        self.tied = self.tensor_0_0
        self.register_buffer("strided", torch.randn(4, 6).t()[1:, ::2])


@pytest.mark.asyncio
async def test_each_bucket_is_of_one_dtype_and_whole(nccl: None) -> None:
    llm, model = FakeNCCLLLM(), Mixed()
    held = Mixed()
    llm.modules = [held]  # type: ignore[list-item]
    async with connected(model, llm, bucket_size=64) as synchronizer:
        update = await synchronizer.update_weights()
        assert update.buckets > 5
        assert update.outcomes[0].digest is None, "vLLM confirms no bytes, and nobody says that it has"
    for name, tensor in model.state_dict().items():
        assert torch.equal(held.state_dict()[name], tensor), name


# -- what goes wrong --------------------------------------------------------------------------------------------------


def restart(llm: FakeNCCLLLM) -> None:
    vars(llm).update(vars(FakeNCCLLLM(ranks=len(llm.modules))))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "call",
    [
        *("pause wait True", "start", "update", "finish", "label", "resume"),
        pytest.param("load", marks=pytest.mark.exhaustive),  # seconds: workers are waited for
    ],
)
@pytest.mark.asyncio
async def test_whatever_call_fails_the_engine_is_whole_or_tainted_and_the_next_update_works(
    call: str, ranks: int, nccl: None
) -> None:
    llm, model, old = FakeNCCLLLM(ranks=ranks), Chain(1), Chain(1)
    async with connected(model, llm) as synchronizer:
        await synchronizer.update_weights()
        step(model, 1)
        llm.failing.add(call)
        error = await failed(synchronizer.update_weights())
        assert "planned" in str(error)
        assert isinstance(error, asyncsync.WeightUpdateError)
        (outcome,) = error.outcomes
        if call in ("update", "load"):
            assert isinstance(error, TransferError)
            assert error.bucket == 0
        if call == "pause wait True":
            assert outcome.state is EngineState.UNCHANGED
            assert await serves(llm, old)
        elif call == "resume":
            assert outcome.state in (EngineState.UPDATED, EngineState.TAINTED)
        else:
            assert outcome.state is EngineState.TAINTED
            assert await llm.is_sleeping(), "it stays paused"
        llm.failing.discard("load")
        step(model, 2)
        if ranks > 1 and call in ("start", "update", "load", "finish"):
            assert "has to be restarted" in str(error)
            assert "has to be restarted" in str(await failed(synchronizer.update_weights()))
            restart(llm)
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("failing", ["load", "load 0", "load 1", "load 2"])
@pytest.mark.asyncio
async def test_of_several_workers_that_have_failed_nothing_is_believed_until_a_restart(
    failing: str, nccl: None
) -> None:
    """vLLM takes what they have answered for answers to later calls, and would say that a worker has what it lacks."""
    llm, model = FakeNCCLLLM(ranks=3), Chain(1)
    async with connected(model, llm) as synchronizer:
        await synchronizer.update_weights()
        llm.failing.add(failing)
        assert "has to be restarted" in str(await failed(synchronizer.update_weights()))
        llm.failing.clear()
        llm.calls.clear()
        for _ in range(2):
            assert "has to be restarted" in str(await failed(synchronizer.update_weights()))
        async with connected(model, llm) as successor:
            assert "has to be restarted" in str(await failed(successor.update_weights()))
        assert llm.calls == []
        assert synchronizer.weight_version == 1
        restart(llm)
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_several_workers_that_could_not_join_serve_on_and_are_refused_until_a_restart(nccl: None) -> None:
    llm, model, old = FakeNCCLLLM(ranks=2), Chain(1), Chain(0)
    async with connected(model, llm) as synchronizer:
        llm.failing |= {"rank 0", "rank 1", "label"}
        assert "does not come" in str(await failed(synchronizer.update_weights()))
        assert await serves(llm, old)
        assert "has to be restarted" in str(await failed(synchronizer.update_weights())), "its label failed at first"
        async with connected(model, llm) as successor:
            assert "has to be restarted" in str(await failed(successor.update_weights()))
        restart(llm)
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_an_answer_that_somebody_else_has_left_is_found_in_the_pause(nccl: None) -> None:
    llm = FakeNCCLLLM(ranks=2)
    llm._answers[1].append(RuntimeError("planned: theirs"))
    async with connected(Chain(1), llm) as synchronizer:
        assert "theirs" in str(await failed(synchronizer.update_weights()))
        assert "has to be restarted" in str(await failed(synchronizer.update_weights()))


class Held(FakeNCCLLLM):
    """Its workers stop in the middle of a call until told."""

    def __init__(self, *, ranks: int = 1) -> None:
        super().__init__(ranks=ranks)
        self.holding = ""
        self.reached, self.go = threading.Event(), threading.Event()

    def _hold(self, what: str) -> None:
        if self.holding == what:
            self.reached.set()
            self.go.wait(30)

    def _join(self, rank: int) -> None:
        self._hold("join")
        super()._join(rank)

    def _finish(self, rank: int) -> None:
        self._hold("finish")
        super()._finish(rank)

    def _load_chunk(self, rank: int, weights: list[tuple[str, Tensor]]) -> None:
        self._hold("load")
        super()._load_chunk(rank, weights)


@pytest.mark.exhaustive
@pytest.mark.asyncio
async def test_several_workers_of_an_update_that_is_cancelled_as_they_join_can_be_believed(nccl: None) -> None:
    llm, model = Held(ranks=2), Chain(1)
    llm.holding = "join"
    async with connected(model, llm) as synchronizer:
        update = asyncio.create_task(synchronizer.update_weights())
        await asyncio.to_thread(llm.reached.wait, 10)
        update.cancel()
        await asyncio.sleep(0)
        llm.go.set()
        with pytest.raises(asyncio.CancelledError):
            await update
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_an_update_that_is_cancelled_as_it_ends_is_not_ended_twice(nccl: None) -> None:
    llm, model = Held(ranks=2), Chain(1)
    async with connected(model, llm) as synchronizer:
        await synchronizer.update_weights()
        llm.holding = "finish"
        update = asyncio.create_task(synchronizer.update_weights())
        await asyncio.to_thread(llm.reached.wait, 10)
        llm.calls.clear()
        update.cancel()
        await asyncio.sleep(0)
        llm.go.set()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert "finish" not in llm.calls
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_a_session_is_open_until_vllm_says_that_it_is_not(nccl: None) -> None:
    llm, model = FakeNCCLLLM(), Chain(1)
    weights = Told(model, "output")
    weights.go.set()
    async with connected(weights, llm) as synchronizer:
        llm.failing.add("finish")
        error = str(await failed(synchronizer.update_weights()))
        assert "planned: finish fails" in error
        assert "restart" not in error, "it is not that the layers cannot be completed"
        await synchronizer.update_weights()
        weights.fail = True
        llm.failing.add("finish")
        assert "planned: it does not come" in str(await failed(synchronizer.update_weights()))
        weights.fail = False
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_an_engine_that_is_asked_how_it_is_in_an_update_is_not_said_to_hang(
    nccl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsync.engines.vllm.sessions.CALL_TIMEOUT", 0.1)
    llm, model = Held(), Chain(1)
    engine = asyncsync.VLLMEngine(llm, backend="nccl")
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        llm.holding = "load"
        update = asyncio.create_task(synchronizer.update_weights())
        await asyncio.to_thread(llm.reached.wait, 10)
        assert (await engine.describe_engine()).paused
        llm.go.set()
        await update
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_who_is_still_joining_is_not_hung_up_on(nccl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would go on with the call, and be taken for done."""
    monkeypatch.setattr("asyncsync.engines.vllm.sessions.CALL_TIMEOUT", 0.1)
    llm = FakeNCCLLLM()
    engine = asyncsync.VLLMEngine(llm, backend="nccl")
    closed: list[bool] = []
    begun, go = asyncio.Event(), asyncio.Event()

    async def init(request: Any) -> None:
        begun.set()
        await go.wait()

    async def aclose() -> None:
        closed.append(True)

    llm.init_weight_transfer_engine = init  # type: ignore[method-assign]
    engine._client.aclose = aclose  # type: ignore[method-assign]
    await engine.describe_engine()
    await engine.open_group(rendezvous(1))
    joining = asyncio.create_task(engine.join_group("a", {STORE: b"127.0.0.1:1"}))
    await begun.wait()
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    await engine.leave_group("a")
    assert not closed
    go.set()
    await engine.describe_engine()
    await engine.leave_group("a")
    assert closed


@pytest.mark.asyncio
async def test_a_name_that_vllm_does_not_know_is_an_error_of_the_transfer(nccl: None) -> None:
    llm, model = FakeNCCLLLM(), Chain(1)
    weights = {"no.such.weight": torch.zeros(3)} | model.state_dict()
    engine = asyncsync.VLLMEngine(llm, backend="nccl")
    async with WeightSynchronizer(lambda: weights, [engine]) as synchronizer:
        error = await failed(synchronizer.update_weights())
        assert isinstance(error, TransferError)
        assert "no.such.weight" in str(error)
        assert error.outcomes[0].state is EngineState.TAINTED
        assert (await engine.describe_engine()).connections == (), "its source may have sent more than it took"
        del weights["no.such.weight"]
        await synchronizer.update_weights()
        assert await serves(llm, model)
        for changed in ({"no.such.weight": torch.zeros(3)}, {"bias": torch.zeros(33)}):
            kept, weights = weights, weights | changed
            with pytest.raises(PlanError, match="not the weights that the engine has loaded before") as refused:
                await synchronizer.update_weights()
            assert refused.value.names == tuple(changed)
            weights = kept
        await synchronizer.update_weights()


class Told:
    """Weights of which one comes only when told."""

    def __init__(self, model: nn.Module, held_back: str) -> None:
        self._tensors: dict[str, Tensor] = dict(model.state_dict())
        self._held_back = held_back
        self.reached, self.go, self.fail = threading.Event(), threading.Event(), False

    def describe(self) -> Iterator[tuple[str, torch.dtype, Sequence[int]]]:
        return ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items())

    def gather(self, name: str) -> Tensor:
        if name == self._held_back:
            self.reached.set()
            self.go.wait(60)
            if self.fail:
                raise RuntimeError("planned: it does not come")
        return self._tensors[name]


@pytest.mark.asyncio
async def test_vllm_never_waits_for_a_bucket_that_its_trainer_has_not_begun_to_send(nccl: None) -> None:
    llm, model = FakeNCCLLLM(), Chain(1)
    weights = Told(model, "output")
    async with connected(weights, llm) as synchronizer:
        update = asyncio.create_task(synchronizer.update_weights())
        assert await asyncio.to_thread(weights.reached.wait, 10)

        def has_the_rest() -> bool:  # and waits for nothing
            return llm.calls.count("update") == BUCKETS - 1 and not llm._core.locked()

        assert await asyncio.to_thread(eventually, has_the_rest)
        weights.fail = True
        weights.go.set()
        error = await failed(update)
        assert "planned: it does not come" in str(error)
        assert isinstance(error, asyncsync.WeightUpdateError)
        assert error.outcomes[0].state is EngineState.TAINTED
        weights.fail = False
        await synchronizer.update_weights()
        assert await serves(llm, model)


class Receiving(Probe):
    """Tells when it receives no more."""

    def __init__(self, engine: asyncsync.VLLMEngine) -> None:
        super().__init__(engine)
        self.given_up = asyncio.Event()

    async def receive_weights(self, order: UpdateOrder) -> asyncsync.EngineReceipt:
        try:
            return await super().receive_weights(order)
        finally:
            self.given_up.set()


@pytest.mark.asyncio
async def test_a_trainer_that_stalls_is_given_up_in_time(nccl: None) -> None:
    llm, model = FakeNCCLLLM(), Chain(1)
    weights = Told(model, "output")
    weights.go.set()
    engine = Receiving(asyncsync.VLLMEngine(llm, backend="nccl"))
    async with WeightSynchronizer(weights, [engine], bucket_size=SIZE) as synchronizer:
        await synchronizer.update_weights()
        weights.go.clear()
        engine.given_up.clear()
        patience, synchronizer._timeout = synchronizer._timeout, 2.0  # for this one: connecting may take its time
        update = asyncio.create_task(failed(synchronizer.update_weights()))
        assert await asyncio.to_thread(weights.reached.wait, 10)
        await engine.given_up.wait()
        weights.go.set()  # gathering is the user's own, and not interrupted
        error = await update
        assert isinstance(error, TimeoutError | TransferError), repr(error)
        synchronizer._timeout = patience
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_an_engine_that_waits_for_a_trainer_that_was_killed_is_said_to_need_a_restart(
    nccl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsync.engines.vllm.sessions.CALL_TIMEOUT", 0.2)
    monkeypatch.setattr("asyncsync.transports.pynccl._LAST_TIMEOUT", 0.2)
    llm, model = FakeNCCLLLM(), Chain(1)
    async with connected(model, llm) as synchronizer:
        await synchronizer.update_weights()
        (source,) = source_communicators()
        source.lose()
        update = asyncio.create_task(failed(synchronizer.update_weights()))
        assert await asyncio.to_thread(eventually, lambda: llm.calls.count("update") > BUCKETS and llm._core.locked())
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        for _ in range(2):
            assert "has to be restarted" in str(await failed(synchronizer.update_weights()))
        for communicator in llm.communicators:
            assert communicator is not None
            communicator.destroy()  # what ends with the process, and then:
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_an_engine_that_was_restarted_is_known_by_its_label(nccl: None) -> None:
    llm, model = FakeNCCLLLM(ranks=2), Chain(1)
    engine = asyncsync.VLLMEngine(llm, backend="nccl")
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await synchronizer.update_weights()
        before = await engine.describe_engine()
        llm._label, llm.communicators = "default", [None] * 2
        after = await engine.describe_engine()
        assert after.instance != before.instance
        assert "restarted" in str(after.tainted)
        assert after.connections == ()
        await synchronizer.update_weights()
        assert await serves(llm, model)
        llm._label, llm.communicators = "default", [None] * 2
        await synchronizer.update_weights()  # it was believed to be in step; and is connected anew in the same call
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_a_group_is_left_by_those_who_are_in_it_alone(nccl: None) -> None:
    llm, model = FakeNCCLLLM(ranks=2), Chain(1)
    async with connected(model, llm) as synchronizer:
        async with connected(model, llm) as before:
            await before.update_weights()
            await synchronizer.update_weights()
        step(model, 1)
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_an_engine_that_was_restarted_while_it_was_paused_is_paused_anew(nccl: None) -> None:
    llm, model = FakeNCCLLLM(), Chain(1)
    engine = asyncsync.VLLMEngine(llm, backend="nccl")
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await synchronizer.update_weights()
        llm.failing.add("load")
        await failed(synchronizer.update_weights())
        assert (await engine.describe_engine()).paused
        vars(llm).update(vars(FakeNCCLLLM()))
        status = await engine.describe_engine()
        assert not status.paused
        assert "restarted" in str((await engine.abort_weight_update(status.epoch, None)).tainted)
        assert await llm.is_sleeping(), "its weights are none of the trainer's"
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_whoever_finds_an_engine_paused_is_warned(nccl: None) -> None:
    llm = FakeNCCLLLM()
    await llm.pause_generation(mode="keep", clear_cache=False)
    async with connected(Chain(1), llm) as synchronizer:
        assert "restart it instead" in str(await failed(synchronizer.update_weights()))


# -- several engines --------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_each_engine_of_this_backend_has_a_group_of_its_own_and_others_share_theirs(nccl: None) -> None:
    llms, model = [FakeNCCLLLM(ranks=2), FakeNCCLLLM()], Chain(1)
    others = [ChainEngine(Chain(5), staged=True), ChainEngine(Chain(6), staged=False)]
    engines = [asyncsync.VLLMEngine(llms[0], backend="nccl"), *others, asyncsync.VLLMEngine(llms[1], backend="nccl")]
    async with WeightSynchronizer(model, engines, bucket_size=SIZE) as synchronizer:
        for seed in range(3):
            step(model, seed)
            update = await synchronizer.update_weights()
            assert [outcome.digest for outcome in update.outcomes] == [None, update.digest, update.digest, None]
            assert all([await serves(llm, model) for llm in llms])
            assert all(
                [await other.generate([7], 12, None) == tuple(continued(model, model, 7, 0, 12)) for other in others]
            )
        one, two = source_communicators()
        assert (one.group.world_size, two.group.world_size) == (3, 2)
        assert len(one.broadcasts) == len(two.broadcasts) == 3 * BUCKETS


@pytest.mark.asyncio
async def test_if_one_of_two_engines_fails_both_are_repaired_by_the_next_update(nccl: None) -> None:
    llms, model = [FakeNCCLLLM(), FakeNCCLLLM()], Chain(1)
    async with connected(model, *llms) as synchronizer:
        await synchronizer.update_weights()
        llms[1].failing.add("load")
        error = await failed(synchronizer.update_weights())
        assert "planned" in str(error)
        assert isinstance(error, asyncsync.WeightUpdateError)
        assert {outcome.state for outcome in error.outcomes} <= {EngineState.TAINTED, EngineState.UNCHANGED}
        llms[1].failing.discard("load")
        step(model, 1)
        await synchronizer.update_weights()
        assert all([await serves(llm, model) for llm in llms])


@pytest.mark.asyncio
async def test_an_engine_that_joins_gets_the_next_update(nccl: None) -> None:
    llm, model, staged = FakeNCCLLLM(), Chain(1), ChainEngine(Chain(5), staged=True)
    async with WeightSynchronizer(model, [staged]) as synchronizer:
        await synchronizer.update_weights()
        engine = asyncsync.VLLMEngine(llm, backend="nccl")
        joining = asyncio.create_task(synchronizer.add_engine(engine))
        while not joining.done():
            await synchronizer.update_weights()
        await joining
        assert await serves(llm, model)
        await synchronizer.remove_engine(engine)
        await synchronizer.update_weights()
        assert llm.calls[-1] == "shutdown"


@pytest.mark.asyncio
async def test_workers_that_wait_for_one_that_does_not_come_are_sent_away(
    nccl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsync.engines.vllm.sessions.CALL_TIMEOUT", 0.1)
    llm = FakeNCCLLLM(ranks=2)
    llm.failing.add("rank 1")
    async with connected(Chain(1), llm) as synchronizer:
        update = asyncio.create_task(synchronizer.update_weights())
        assert await asyncio.to_thread(eventually, lambda: not llm.failing)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert await asyncio.to_thread(eventually, lambda: not llm._core.locked()), "before the store gives up"
        restart(llm)
        await synchronizer.update_weights()
        assert await serves(llm, Chain(1))


@pytest.mark.exhaustive
@pytest.mark.asyncio
async def test_if_the_engine_cannot_join_its_source_is_not_held(nccl: None) -> None:
    llm = FakeNCCLLLM()
    llm.failing.add("init")
    async with connected(Chain(1), llm) as synchronizer:
        assert "planned" in str(await failed(synchronizer.update_weights()))
        await synchronizer.update_weights()
        assert await serves(llm, Chain(1))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_cannot_be_known_to_be_whole_is_refused(nccl: None) -> None:
    llm = FakeNCCLLLM(prefix_caching=True)
    for options, trainer, told in (
        ({"partial": True}, Chain(1), "cannot tell whether a part"),
        ({}, [[asyncsync.TrainerRank({name: torch.zeros(3)})] for name in "ab"], "several sources"),
    ):
        async with connected(trainer, llm, **options) as synchronizer:
            error = await failed(synchronizer.update_weights())
            assert isinstance(error, PlanError)
            assert told in str(error)
    async with connected(Chain(1), llm, policy="continue") as synchronizer:
        with pytest.raises(ConnectError, match=r"cannot continue.*enable_prefix_caching=False"):
            await synchronizer.connect()
    with pytest.raises(ValueError, match="backend must be one of asyncsync, nccl"):
        asyncsync.VLLMEngine(llm, backend="ipc")  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_an_engine_without_the_backend_says_how_to_start_it(nccl: None) -> None:
    llm = FakeNCCLLLM()
    llm.backend = False
    async with connected(Chain(1), llm) as synchronizer:
        error = await failed(synchronizer.update_weights())
    assert 'weight_transfer_config={"backend": "nccl"}' in str(error)


@pytest.mark.asyncio
async def test_a_trainer_without_vllm_is_told_what_is_missing() -> None:
    async with connected(Chain(1), FakeNCCLLLM()) as synchronizer:
        with pytest.raises(ConnectError, match="install vLLM in the trainer's process"):
            await synchronizer.connect()


@pytest.mark.asyncio
async def test_a_trainer_without_a_gpu_is_told_so(nccl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCommunicator, "disabled", True)
    async with connected(Chain(1), FakeNCCLLLM()) as synchronizer:
        with pytest.raises(ConnectError, match="vLLM found no NCCL here"):
            await synchronizer.connect()
    monkeypatch.undo()
    member = PyNcclJoining(rendezvous(rank=0), address="127.0.0.1")
    with pytest.raises(ConnectError, match="could not join vLLM's group"):
        member.join()


@pytest.mark.asyncio
async def test_an_actor_and_a_server_are_asked_what_they_are() -> None:
    import httpx

    llm = FakeNCCLLLM(ranks=2, prefix_caching=True)
    client = client_for(Remote(asyncsync.VLLMActor(llm)), api_key=None, timeout=10)
    assert (await client.ranks(), await client.prefix_caching()) == (2, True)
    await client.end_transfer()
    assert llm.calls == ["shutdown"]
    bare = client_for(Remote(Bare()), api_key=None, timeout=10)
    assert (await bare.ranks(), await bare.prefix_caching(), await bare.weight_version()) == (None, None, None)
    await bare.end_transfer()
    with pytest.raises(ConnectError, match="does not tell how many workers"):
        await asyncsync.VLLMEngine(Remote(Bare()), backend="nccl").describe_engine()

    seen: list[str] = []

    def answer(request: Any) -> Any:
        seen.append(f"{request.method} {str(request.url).removeprefix('http://engine:8000')}")
        return httpx.Response(200, json={"world_size": 4})

    server = over(answer)
    assert (await server.ranks(), await server.prefix_caching()) == (4, None)
    await server.end_transfer()
    await server.label("7")
    assert seen == [
        "GET /get_world_size?include_dp=true",
        "POST /shutdown_weight_transfer_engine",
        "POST /update_weight_version",
    ]
    await server.aclose()


class Bare:
    """An actor with what an update needs, and no more."""

    def __init__(self) -> None:
        for name in RayClient.NEEDED:
            setattr(self, name, None)


class Remote:
    """A handle to an object that is called as an actor is."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


# -- the link ---------------------------------------------------------------------------------------------------------


def rendezvous(rank: int, **changes: Any) -> Rendezvous:
    values: dict[str, Any] = {"backend": "nccl", "transport": "pynccl", "world_size": 2, "operation_timeout": 0.1}
    return Rendezvous(connection="a", rank=rank, **{"join_timeout": 60} | values | changes)


def test_only_the_source_joins_and_with_the_same_protocol() -> None:
    for wrong in (rendezvous(1), rendezvous(0, protocol=99)):
        with pytest.raises(ConnectError, match="install the same version"):
            PyNcclJoining(wrong, address="127.0.0.1")


def test_a_join_can_be_stopped_before_and_while_it_waits(nccl: None) -> None:
    for when in ("before", "while"):
        member = PyNcclJoining(rendezvous(0, join_timeout=3), address="127.0.0.1")
        if when == "before":
            member.stop()
        else:
            member._contacts.add_done_callback(lambda _, member=member: member.stop())  # type: ignore[misc]
        with pytest.raises(ConnectError, match="joining was stopped"):
            member.join()
        assert eventually(lambda member=member: not listens(member._port), 60), "the store is gone"  # type: ignore[misc]


def test_a_worker_that_comes_when_a_join_was_given_up_is_sent_away(nccl: None) -> None:
    """Where nobody listens it would look for the store for five minutes, and hold its engine."""
    member = PyNcclJoining(rendezvous(0), address="127.0.0.1")

    def come() -> None:
        FakeCommunicator(FakeGroup.create(*endpoint(member._contacts.result(), STORE), 1, 2, store_timeout=60), None)

    with ThreadPoolExecutor() as threads:
        joining = threads.submit(member.join)
        member._contacts.result()
        member.stop()
        with pytest.raises(ConnectError, match="joining was stopped"):
            joining.result()
        for _ in range(2):
            with pytest.raises(TypeError, match="no id"):
                come()


def test_a_join_that_is_stopped_while_the_device_comes_up_begins_nothing(
    nccl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, threads = PyNcclJoining(rendezvous(0), address="127.0.0.1"), set(threading.enumerate())

    def lane() -> FakeLane:
        member.stop()
        return FakeLane()

    monkeypatch.setattr("asyncsync.transports.pynccl.Lane", lane)
    with pytest.raises(ConnectError, match="joining was stopped"):
        member.join()
    assert set(threading.enumerate()) <= threads


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def link(nccl: None) -> Iterator[Any]:
    """A source's link to one worker that takes nothing yet."""
    member = PyNcclJoining(rendezvous(0), address="127.0.0.1")

    def come() -> None:
        assert eventually(lambda: member._contacts.done())
        port = int(member._contacts.result()[STORE].decode().rpartition(":")[2])
        FakeCommunicator(FakeGroup.create("127.0.0.1", port, 1, 2), None)

    worker = threading.Thread(target=come)
    worker.start()
    link = member.join()
    worker.join()
    yield link
    link.close()


def test_a_wait_is_stopped_or_ends_with_its_timeout(link: Any) -> None:
    handle, stop = link.start_send(torch.ones(4, dtype=torch.uint8)), threading.Event()
    with pytest.raises(asyncsync.LinkLostError, match=r"not taken by every worker within 0\.1 s"):
        link.wait(handle, stop)
    stop.set()
    with pytest.raises(asyncsync.LinkLostError, match="was stopped"):
        link.wait(handle, stop)
    with pytest.raises(TransferError, match="receives nothing"):
        link.start_receive(torch.ones(4, dtype=torch.uint8))


def test_a_closed_link_lets_what_it_has_begun_come_to_its_end(link: Any) -> None:
    link.start_send(torch.arange(4, dtype=torch.uint8))
    link.close()
    assert "closed" in repr(link)
    with pytest.raises(TransferError, match="closed"):
        link.start_send(torch.ones(4, dtype=torch.uint8))
    (worker,) = [each for each in FakeCommunicator.instances if each.group.rank == 1]
    taken = torch.zeros(4, dtype=torch.uint8)
    worker.broadcast(taken, src=0)
    assert taken.tolist() == [0, 1, 2, 3]
    (source,) = source_communicators()
    assert eventually(source.destroyed.is_set, 3)
