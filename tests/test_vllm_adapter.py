"""vLLM's adapter where vLLM itself cannot be made to: calls that fail, lines that break, servers that answer oddly."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import EngineState, WeightSynchronizer
from asyncsync.engines import channel, http
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.channel import Exchange, Hello, Line, answer_calls, decode, encode
from asyncsync.engines.http import HTTPServer
from asyncsync.engines.vllm.clients import HTTPClient, client_for
from asyncsync.engines.vllm.lines import LinedWorkers
from asyncsync.errors import AsyncSyncError
from asyncsync.messages import EngineStatus, Policy, UpdateOrder
from asyncsync.testing import Probe, copied, failed, step
from tests.chain import Chain, continued
from tests.fake_vllm import FakeLLM

COMMIT = ["pause wait True", "start", "update", "finish", "label", "resume"]


async def serves(llm: FakeLLM, model: Chain) -> bool:
    generated = await llm.generate([7], 12, None)
    return list(generated.tokens) == continued(model, model, 7, 0, 12)


def exchange_of(engine: asyncsync.VLLMEngine) -> Exchange:
    assert isinstance(engine._workers, LinedWorkers)
    assert engine._workers._exchange is not None
    return engine._workers._exchange


@pytest.mark.asyncio
async def test_an_update_asks_vllm_for_no_more_than_it_must() -> None:
    llm, model = FakeLLM(ranks=2), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
        await synchronizer.update_weights()
        assert llm.calls == ["init", *COMMIT]
        await synchronizer.update_weights()
        assert llm.calls[len(COMMIT) + 1 :] == COMMIT, "connected, it only commits"
    assert all(task.done() for task in llm.answering) or await asyncio.gather(*llm.answering) is not None


@pytest.mark.parametrize("call", ["pause wait True", "update", "resume", "load"])
@pytest.mark.asyncio
async def test_whatever_call_fails_the_engine_is_whole_or_tainted_and_the_next_update_works(call: str) -> None:
    llm, model, old = FakeLLM(ranks=2), Chain(1), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
        await synchronizer.update_weights()
        step(model, 1)
        llm.failing.add(call)
        error = await failed(synchronizer.update_weights())
        assert "planned" in str(error)
        assert isinstance(error, asyncsync.WeightUpdateError)
        (outcome,) = error.outcomes
        loaded = call == "resume"
        if call == "load":
            assert outcome.state is EngineState.TAINTED
            assert await llm.is_sleeping(), "it stays paused"
        elif call == "resume":
            assert outcome.state in (EngineState.UPDATED, EngineState.LOST)
        else:
            assert outcome.state is (EngineState.UPDATED if loaded else EngineState.UNCHANGED)
            assert await serves(llm, model if loaded else old)
            assert await llm.get_weight_version() == str(outcome.weight_version)
        step(model, 2)
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_a_rank_whose_line_breaks_is_named_and_reached_anew() -> None:
    llm, model = FakeLLM(ranks=2), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
        await synchronizer.update_weights()
        receive = llm._ranks[1].receive_weights

        async def break_off(order: UpdateOrder) -> EngineReceipt:
            llm._ranks[1].receive_weights = receive  # type: ignore[method-assign]
            llm.answering[1].cancel()
            return await receive(order)

        llm._ranks[1].receive_weights = break_off  # type: ignore[method-assign]
        error = await failed(synchronizer.update_weights())
        assert "rank 1 is gone: its connection broke" in str(error)
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.parametrize("call", ["start", "finish", "label"])
@pytest.mark.asyncio
async def test_what_vllm_says_of_its_session_matters_less_than_what_the_workers_say(call: str) -> None:
    llm, model = FakeLLM(ranks=2), Chain(1)
    await llm.start_weight_update()  # and somebody has left one open
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
        llm.failing.add(call)
        update = await synchronizer.update_weights()
        assert await serves(llm, model)
        assert await llm.get_weight_version() == str(update.version)
    assert call not in llm.failing


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.asyncio
async def test_workers_say_themselves_whether_they_have_loaded_whatever_vllm_takes_for_their_answers(
    ranks: int,
) -> None:
    llm, model = FakeLLM(ranks=ranks), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
        await synchronizer.update_weights()
        version = 1
        for failing in ("load", "load 1", "load", "load 0", "load 1"):
            step(model, version)
            llm.failing.add(failing)
            error = await failed(synchronizer.update_weights())
            assert isinstance(error, asyncsync.WeightUpdateError)
            assert [outcome.state for outcome in error.outcomes] == [EngineState.TAINTED], failing
            assert synchronizer.weight_version == version
            version = (await synchronizer.update_weights()).version
            assert await serves(llm, model)
        assert llm._answers[1], "or it was not tested"


@pytest.mark.asyncio
async def test_an_engine_that_sleeps_or_that_others_have_paused_is_refused() -> None:
    llm, model = FakeLLM(), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)], asleep="refuse") as synchronizer:
        await synchronizer.update_weights()
        await llm.sleep()
        for _ in range(2):
            assert "asleep (kv_cache, weights released)" in str(await failed(synchronizer.update_weights()))
        await llm.wake_up()
        await llm.pause_generation(mode="keep", clear_cache=False)
        assert "somebody else has paused it" in str(await failed(synchronizer.update_weights()))
        await llm.resume_generation()
        await synchronizer.update_weights()


@pytest.mark.asyncio
async def test_an_engine_that_was_put_to_sleep_while_it_waits_for_repair_is_not_loaded_into() -> None:
    llm, model = FakeLLM(), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)], asleep="refuse") as synchronizer:
        llm.failing.add("load")
        await failed(synchronizer.update_weights())
        await llm.sleep()
        for _ in range(2):
            assert "asleep" in str(await failed(synchronizer.update_weights()))
        await llm.wake_up()
        await synchronizer.update_weights()
        assert await serves(llm, model)
    assert llm.crashes == []


@pytest.mark.parametrize("how", ["asleep", "cancelled"])
@pytest.mark.asyncio
async def test_an_engine_that_is_refused_as_it_is_met_leaves_nobody_listening(how: str) -> None:
    llm = FakeLLM()
    engine = asyncsync.VLLMEngine(llm)
    asked = asyncio.Event()

    async def is_sleeping() -> bool:
        asked.set()
        return await asyncio.Future() if how == "cancelled" else True

    llm.is_sleeping = is_sleeping  # type: ignore[method-assign]
    meeting = asyncio.create_task(engine.describe_engine())
    await asked.wait()
    if how == "cancelled":
        meeting.cancel()
    with pytest.raises(asyncsync.EngineError if how == "asleep" else asyncio.CancelledError):
        await meeting
    await asyncio.wait_for(asyncio.gather(*llm.answering), 5)
    with pytest.raises(AssertionError):
        exchange_of(engine)


@pytest.mark.asyncio
async def test_clean_up_at_an_engine_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    engine = asyncsync.VLLMEngine(llm)
    status = await engine.describe_engine()

    async def hang(*args: Any, **options: Any) -> None:
        await asyncio.Future()

    await engine.pause_generation(status.epoch, "abort")
    llm.pause_generation = llm.resume_generation = hang  # type: ignore[method-assign]
    monkeypatch.setattr("asyncsync.engines.vllm.engine.WITHIN_CLEANUP", 0.1)
    with pytest.raises(TimeoutError, match="clean-up took longer"):
        await engine.resume_generation(status.epoch)

    async def fail(*args: Any) -> EngineStatus:
        raise asyncsync.EngineError("planned: its workers do not answer")

    monkeypatch.setattr(engine._workers, "abort_weight_update", fail)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.abort_weight_update(status.epoch, published=5), 0.1)
    await engine.aclose()


@pytest.mark.asyncio
async def test_continue_is_refused_where_a_prefix_cache_would_be_served() -> None:
    llm = FakeLLM(prefix_caching=True)
    async with WeightSynchronizer(Chain(1), [asyncsync.VLLMEngine(llm)], policy="continue") as synchronizer:
        with pytest.raises(asyncsync.ConnectError, match=r"cannot continue.*enable_prefix_caching=False"):
            await synchronizer.connect()


@pytest.mark.asyncio
async def test_an_engine_without_the_backend_says_how_to_start_it() -> None:
    llm = FakeLLM()
    llm.backend = False
    async with WeightSynchronizer(Chain(1), [asyncsync.VLLMEngine(llm)]) as synchronizer:
        error = await failed(synchronizer.update_weights())
    assert 'weight_transfer_config={"backend": "asyncsync"}' in str(error)


@pytest.mark.parametrize("call", ["pause wait True", "start", "update"])
@pytest.mark.asyncio
async def test_an_engine_that_missed_a_version_which_others_serve_serves_nothing(call: str) -> None:
    model, llm, behind = Chain(1), FakeLLM(), FakeLLM()
    engines = [asyncsync.VLLMEngine(llm), asyncsync.VLLMEngine(behind)]
    async with WeightSynchronizer(model, engines) as synchronizer:
        await synchronizer.update_weights()
        step(model, 1)
        behind.failing.add(call)
        error = await failed(synchronizer.update_weights())
        assert isinstance(error, asyncsync.WeightUpdateError)
        assert [outcome.state for outcome in error.outcomes] == [EngineState.UPDATED, EngineState.TAINTED]
        assert await serves(llm, model)
        request = asyncio.create_task(serves(behind, model))
        await asyncio.wait([request], timeout=0.1)
        assert not request.done(), "who reads the new version must not be answered by the old weights"
        await synchronizer.update_weights()
        assert await request


@pytest.mark.asyncio
async def test_requests_that_a_pause_has_kept_do_not_go_on_over_torn_weights() -> None:
    llm, model = FakeLLM(), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)], policy="continue") as synchronizer:
        await synchronizer.update_weights()
        started = asyncio.Event()
        request = asyncio.create_task(llm.generate([7], 2000, started.set))
        await started.wait()
        old = copied(model)
        step(model, 1)
        llm.failing.add("load")
        await failed(synchronizer.update_weights())
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)], policy="drain") as synchronizer:
        await synchronizer.update_weights()
        assert await serves(llm, model)
    assert "pause wait True" not in llm.calls
    generated = await request
    (switch,) = (span.start for span in generated.weight_versions[1:])
    assert list(generated.tokens) == continued(old, model, 7, switch, len(generated.tokens))


@pytest.mark.asyncio
async def test_a_conductor_that_was_replaced_neither_pauses_nor_resumes_nor_loads() -> None:
    llm, model, late = FakeLLM(ranks=2), Chain(1), Chain(2)
    theirs = asyncsync.VLLMEngine(llm)
    orders: list[UpdateOrder] = []

    async def vanish() -> None:
        raise RuntimeError("planned: gone")

    class Noting(Probe):
        async def receive_weights(self, order: UpdateOrder) -> asyncsync.EngineReceipt:
            orders.append(order)
            return await super().receive_weights(order)

    probe = Noting(theirs)
    async with WeightSynchronizer(late, [probe]) as before:
        await before.update_weights()
        probe.before["finish_weight_update"] = vanish
        await failed(before.update_weights())
        async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer:
            await synchronizer.update_weights()
            calls = len(llm.calls)
            epoch = orders[-1].epoch
            for call in (
                theirs.finish_weight_update(orders[-1]),
                theirs.pause_generation(epoch, "drain"),
                theirs.resume_generation(epoch),
                theirs.receive_weights(orders[-1]),
                theirs.abort_weight_update(epoch, None),
            ):
                with pytest.raises(asyncsync.OutOfStepError):
                    await call
            assert llm.calls[calls:] == [], "vLLM is asked for nothing"
            assert await serves(llm, model)


class SlowLLM(FakeLLM):
    """Loads on a thread, as vLLM's workers do beside the one that answers; stops in the middle when told to."""

    def __init__(self) -> None:
        self.stopping, self.stopped, self.go_on = False, threading.Event(), threading.Event()
        super().__init__()

    def _load_into(self, module: Chain) -> Callable[[Iterator[tuple[str, Tensor]]], None]:
        @torch.no_grad()
        def load(weights: Iterator[tuple[str, Tensor]]) -> None:
            own = module.state_dict()
            for number, (name, tensor) in enumerate(weights):
                if number == 2 and self.stopping:
                    self.stopped.set()
                    self.go_on.wait(30)
                own[name].copy_(tensor)

        return load

    async def update_weights(self, request: Any) -> None:
        self._asked("update")
        await asyncio.to_thread(self._ranks[0].load, request.update_info["epoch"])

    async def is_sleeping(self) -> bool:
        return False  # as of an actor that does not tell


@pytest.mark.asyncio
async def test_what_is_loaded_is_not_overwritten_by_what_another_conductor_sends() -> None:
    llm, model, other = SlowLLM(), Chain(1), Chain(2)
    probe = Probe(asyncsync.VLLMEngine(llm))
    async with (
        WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)]) as synchronizer,
        WeightSynchronizer(other, [probe]) as second,
    ):
        await synchronizer.update_weights()
        await second.connect()
        llm.stopping = True
        step(model, 1)
        loading = asyncio.create_task(synchronizer.update_weights())
        await asyncio.to_thread(llm.stopped.wait)
        llm.stopping = False
        receiving, go_on = probe.watch("receive_weights"), asyncio.Event()
        received = probe.watch("finish_weight_update")
        probe.before["finish_weight_update"] = go_on.wait  # type: ignore[assignment]
        update = asyncio.create_task(second.update_weights())
        await receiving.wait()
        await asyncio.wait([asyncio.ensure_future(received.wait())], timeout=0.3)
        llm.go_on.set()
        await asyncio.wait([loading, asyncio.ensure_future(received.wait())], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([loading], timeout=1)
        assert llm.modules[0].digest() == model.digest(), "loaded whole"
        go_on.set()
        await asyncio.wait([loading, update])
        assert llm.modules[0].digest() in (model.digest(), other.digest())
        request = asyncio.create_task(llm.generate([7], 1, None))
        await asyncio.wait([request], timeout=5)
        assert request.done(), "it serves"
        assert update.done()
        assert isinstance(update.exception(), asyncsync.WeightUpdateError | None)


@pytest.mark.asyncio
async def test_a_pause_that_a_dead_conductor_has_left_ends_even_if_the_next_update_fails() -> None:
    llm, model, old = FakeLLM(), Chain(1), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await synchronizer.update_weights()
        order = await engine.describe_engine()
        await engine.pause_generation(order.epoch, "drain")
        await engine.aclose()  # the conductor died
    probe = Probe(asyncsync.VLLMEngine(llm))

    async def fail() -> None:
        raise RuntimeError("planned: receive_weights fails")

    probe.before["receive_weights"] = fail
    async with WeightSynchronizer(model, [probe]) as synchronizer:
        await failed(synchronizer.update_weights())
        assert await asyncio.wait_for(serves(llm, old), 5)


@pytest.mark.asyncio
async def test_an_engine_that_was_restarted_gets_the_update_that_finds_it_so() -> None:
    llm, model = FakeLLM(), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await synchronizer.update_weights()
        (line,) = exchange_of(engine).lines
        for answering in llm.answering:
            answering.cancel()
        vars(llm).update(vars(FakeLLM()))
        step(model, 1)
        await asyncio.wait([line._listening])
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_nothing_is_left_open_whatever_became_of_the_others() -> None:
    llm, model, other = FakeLLM(), Chain(1), asyncsync.ModuleEngine(Chain(0))
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine, other]) as synchronizer:
        await synchronizer.update_weights()
        await synchronizer.remove_engine(other)  # so that it is connected anew
        await synchronizer.update_weights()
    await asyncio.wait_for(asyncio.gather(*llm.answering), 5)
    with pytest.raises(AssertionError):
        exchange_of(engine)


@pytest.mark.asyncio
async def test_an_engine_that_is_refused_leaves_nobody_listening() -> None:
    llm, model = FakeLLM(prefix_caching=True), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine], policy="continue") as synchronizer:
        assert "cannot continue requests in flight" in str(await failed(synchronizer.update_weights()))
        assert exchange_of(engine).lines
    await asyncio.wait_for(asyncio.gather(*llm.answering), 5)


@pytest.mark.parametrize("policy", ["drain", "abort"])
@pytest.mark.asyncio
async def test_an_engine_that_was_put_to_sleep_while_the_weights_came_is_left_alone(policy: Policy) -> None:
    llm, model = FakeLLM(), Chain(1)
    engine = Probe(asyncsync.VLLMEngine(llm))
    async with WeightSynchronizer(model, [engine], policy=policy, asleep="refuse") as synchronizer:
        await synchronizer.update_weights()
        engine.after["receive_weights"] = llm.sleep
        llm.calls.clear()
        assert "asleep" in str(await failed(synchronizer.update_weights()))
        assert [call for call in llm.calls if call != "pause abort True"] == ["sleep 1"]
        await llm.wake_up()
        await synchronizer.update_weights()
        assert await serves(llm, model)


@pytest.mark.asyncio
async def test_an_engine_that_cannot_be_reached_leaves_nobody_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges: list[Exchange] = []
    opened = Exchange.open

    async def open_noted(self: Exchange) -> int:
        exchanges.append(self)
        return await opened(self)

    monkeypatch.setattr(Exchange, "open", open_noted)
    llm = FakeLLM()
    llm.failing.add("init")
    engine = asyncsync.VLLMEngine(llm)
    with pytest.raises(asyncsync.EngineError, match="planned"):
        await engine.describe_engine()
    (exchange,) = exchanges
    assert exchange._server is not None
    assert not exchange._server.is_serving()
    await asyncio.gather(engine.describe_engine(), engine.describe_engine())
    assert len(exchanges) == 2, "who comes while it is being reached waits for that"
    await engine.aclose()
    await asyncio.wait_for(asyncio.gather(*llm.answering), 5)


@pytest.mark.parametrize("policy", ["drain", "abort", "recompute", "continue"])
@pytest.mark.asyncio
async def test_a_reader_who_waits_for_a_tainted_engine_does_not_keep_it_from_being_repaired(policy: Policy) -> None:
    llm, model = FakeLLM(), Chain(1)
    async with WeightSynchronizer(model, [asyncsync.VLLMEngine(llm)], policy=policy, timeout=10) as synchronizer:
        await synchronizer.update_weights()
        step(model, 1)
        llm.failing.add("load")
        await failed(synchronizer.update_weights())
        inside = asyncio.Event()

        async def read() -> asyncsync.Completion:
            async with synchronizer.generation():
                inside.set()
                return await llm.generate([7], 12, None)

        reader = asyncio.create_task(read())
        await inside.wait()
        await synchronizer.update_weights()
        assert (await reader).finish_reason == ("abort" if policy in ("drain", "abort") else "length")
        assert await serves(llm, model)
        calls = len(llm.calls)
        await synchronizer.update_weights()
        assert not any("abort" in call for call in llm.calls[calls:]) or policy == "abort"


@pytest.mark.asyncio
async def test_checksums_of_all_workers_are_given_as_one() -> None:
    llm, model = FakeLLM(ranks=2), Chain(1)
    engine = asyncsync.VLLMEngine(llm)
    async with WeightSynchronizer(model, [engine]) as synchronizer:
        await synchronizer.update_weights()
        assert await engine.weights_checksum() == {"tp0": model.digest(), "tp1": model.digest()}


# -- lines ------------------------------------------------------------------------------------------------------------


class Echo:
    """A rank of nothing."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.joining = asyncio.Event()

    async def describe_engine(self) -> EngineStatus:
        return EngineStatus(instance="echo", device="cpu", staged=True, cannot={"abort": "it has no mouth"})

    async def leave_group(self, connection: str) -> None:
        raise ValueError(f"no {connection} here")

    async def join_group(self, connection: str, contacts: asyncsync.Contacts) -> None:
        self.joining.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def connected(echo: Echo, exchange: Exchange) -> tuple[Line, asyncio.Task[None]]:
    port = await exchange.open()
    said = Hello(token=exchange.token, rank=0, ranks=1)
    answering = asyncio.ensure_future(answer_calls(echo, said, exchange.address, port))
    return (await exchange.all_lines(5))[0], answering


@pytest.mark.asyncio
async def test_a_line_carries_values_errors_and_cancellations() -> None:
    echo, exchange = Echo(), Exchange("127.0.0.1")
    line, answering = await connected(echo, exchange)
    assert await line.call("describe_engine") == await echo.describe_engine()
    with pytest.raises(asyncsync.EngineError, match="ValueError: no group here"):
        await line.call("leave_group", "group")
    with pytest.raises(asyncsync.EngineError, match="KeyError"):
        await line.call("no_such_call")
    joining = asyncio.create_task(line.call("join_group", "group", {"0/1": b"\x00\xff"}))
    await echo.joining.wait()
    joining.cancel()
    await echo.cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await joining
    echo.joining.clear()
    waiting = asyncio.create_task(line.call("join_group", "group", {}))
    await echo.joining.wait()
    answering.cancel()
    with pytest.raises(asyncsync.EngineError, match="rank 0 is gone"):
        await waiting
    with pytest.raises(asyncsync.EngineError, match="rank 0 is gone"):
        await line.call("describe_engine")
    exchange.close()


def test_what_is_no_message_is_refused_and_what_cannot_be_one_is_not_sent() -> None:
    assert decode(encode(torch.bfloat16), torch.dtype) is torch.bfloat16
    with pytest.raises(msgspec.ValidationError, match="'nn' is no dtype"):
        decode(encode("nn"), torch.dtype)  # torch has it, and it is none
    with pytest.raises(TypeError, match="Linear is not sent"):
        encode(nn.Linear(1, 1))


class UnspeakableError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "error",
    [
        UnspeakableError(),
        FileNotFoundError("\udcff"),  # a path that is no text
        asyncsync.PlanError("PlanError", names=("\udcff",)),
        asyncio.CancelledError(),  # that nobody has asked for
        SystemExit(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.asyncio
async def test_whatever_ends_a_call_over_a_line_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def fail(echo: Echo) -> EngineStatus:
        raise error

    monkeypatch.setattr(Echo, "describe_engine", fail)
    exchange = Exchange("127.0.0.1")
    line, answering = await connected(Echo(), exchange)
    for _ in range(2):
        with pytest.raises(AsyncSyncError, match=type(error).__name__):
            await line.call("describe_engine")
    exchange.close()
    await answering


@pytest.mark.parametrize(
    "hello", [{"token": "guessed"}, {"protocol": 1}], ids=["without the token", "of another protocol"]
)
@pytest.mark.asyncio
async def test_a_stranger_gets_no_line(hello: dict[str, Any]) -> None:
    exchange = Exchange("127.0.0.1")
    port = await exchange.open()
    said = msgspec.structs.replace(Hello(token=exchange.token, rank=0, ranks=1), **hello)
    await answer_calls(Echo(), said, exchange.address, port)  # ends, since it is hung up on
    assert exchange.lines == []
    with pytest.raises(asyncsync.ConnectError, match="did not connect"):
        await exchange.all_lines(0.01)
    exchange.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 3) + b"abc",
        struct.pack("!I", 3) + b"\xc1\xc1\xc1",
        struct.pack("!I", 2**13),
        struct.pack("!I", 2**31),
        struct.pack("!I", 23) + channel.encode({"token": "\xe9", "rank": 0, "ranks": 1}),
    ],
)
@pytest.mark.asyncio
async def test_whatever_is_sent_to_an_exchange_it_goes_on(data: bytes) -> None:
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    echo, exchange = Echo(), Exchange("127.0.0.1")
    port = await exchange.open()
    reader, writer = await asyncio.open_connection(exchange.address, port)
    writer.write(data)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    line, answering = await connected(echo, exchange)
    assert (await line.call("describe_engine")).instance == "echo"
    exchange.close()
    await answering
    assert not unheard


def test_no_call_but_those_that_are_named_can_be_made() -> None:
    assert set(channel.CALLS) == {
        "describe_engine",
        "accept_layout",
        "open_group",
        "join_group",
        "leave_group",
        "receive_weights",
        "abort_weight_update",
        "note_pause",
        "check_pause",
        "released_memory",
    }


# -- HTTP -------------------------------------------------------------------------------------------------------------


def over(handler: Callable[[Any], Any]) -> HTTPClient:
    """A client whose requests a function answers."""
    import httpx

    transport = httpx.MockTransport(handler)
    return HTTPClient(HTTPServer("http://engine:8000/", api_key="secret", timeout=3, transport=transport))


@pytest.mark.asyncio
async def test_the_servers_routes() -> None:
    import httpx

    seen: list[tuple[str, str, Any]] = []

    def answer(request: Any) -> Any:
        assert request.headers["Authorization"] == "Bearer secret"
        body = json.loads(request.content) if request.content else None
        seen.append((request.method, str(request.url).removeprefix("http://engine:8000"), body))
        answers = {"/is_sleeping": {"is_sleeping": True}, "/weight_info": {"weight_version": "3"}}
        return httpx.Response(200, json=answers.get(request.url.path, {"checksums": {"a": "1"}}))

    client = over(answer)
    await client.pause("keep", clear_cache=False)
    await client.resume()
    await client.init_transfer({"port": 1})
    await client.start_update()
    await client.update({"epoch": 2})
    await client.finish_update("3")
    await client.finish_update(None)
    await client.wake_up(["weights"])
    await client.wake_up(None)
    await client.sleep(2)
    assert (await client.is_sleeping(), await client.weight_version(), await client.checksums()) == (
        True,
        "3",
        {"a": "1"},
    )
    await client.aclose()
    assert seen == [
        ("POST", "/pause?mode=keep&clear_cache=false", None),
        ("POST", "/resume", None),
        ("POST", "/init_weight_transfer_engine", {"init_info": {"port": 1}}),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"epoch": 2}}),
        ("POST", "/finish_weight_update", {"weight_version": "3"}),
        ("POST", "/finish_weight_update", {}),
        ("POST", "/wake_up?tags=weights", None),
        ("POST", "/wake_up", None),
        ("POST", "/sleep?level=2&mode=keep", None),
        ("GET", "/is_sleeping", None),
        ("GET", "/weight_info", None),
        ("POST", "/weight_checker", {"action": "checksum"}),
    ]


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (500, {"error": {"message": "Worker failed with error 'planned'"}}, "answered 500: Worker failed.*planned"),
        (401, {"error": "Unauthorized"}, "answered 401 .wrong api_key"),
        (404, {"detail": "Not Found"}, "VLLM_SERVER_DEV_MODE=1"),
        (502, "a proxy's page", "answered 502: a proxy's page"),
    ],
)
@pytest.mark.asyncio
async def test_a_servers_errors_are_told(status: int, body: Any, told: str) -> None:
    import httpx

    content = {"text": body} if isinstance(body, str) else {"json": body}
    client = over(lambda request: httpx.Response(status, **content))
    with pytest.raises(asyncsync.EngineError, match=told):
        await client.start_update()
    await client.aclose()


@pytest.mark.parametrize(("kind", "told"), [("ReadTimeout", "no answer in 3 s"), ("ConnectError", "planned")])
@pytest.mark.asyncio
async def test_a_server_that_is_not_there_is_an_engines_error(kind: str, told: str) -> None:
    import httpx

    def fail(request: Any) -> Any:
        raise getattr(httpx, kind)("planned", request=request)

    client = over(fail)
    with pytest.raises(asyncsync.EngineError, match=told):
        await client.resume()
    await client.aclose()


@pytest.mark.asyncio
async def test_a_connection_that_the_server_is_about_to_end_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.KEEP_ALIVE < 5, "vLLM ends idle ones after so many seconds"
    monkeypatch.setattr(http, "KEEP_ALIVE", 0.05)

    serving: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)  # another request, that comes in the moment in which it hangs up
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = client_for(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key=None, timeout=3)
        await client.resume()
        await asyncio.sleep(0.2)
        await client.resume()
        await client.aclose()
        await asyncio.wait([task for task in serving if task is not None])


def test_what_is_no_engine_of_vllms_is_refused() -> None:
    with pytest.raises(TypeError, match="int is no vLLM engine: it lacks pause_generation"):
        client_for(3, api_key=None, timeout=1)
    with pytest.raises(TypeError, match="is no vLLM engine"):
        asyncsync.VLLMEngine(object())
    assert "http://engine:8000" in repr(asyncsync.VLLMEngine("http://engine:8000/"))
