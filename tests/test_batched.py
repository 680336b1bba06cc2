"""Requests that are generated together, over a batch that a test drives step by step; without transformers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Literal

import pytest

from asyncsync.engines.batched import BatchedGenerations
from asyncsync.engines.completion import Completion, CompletionPart, VersionLog, WeightVersionSpan
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.request import Request
from asyncsync.errors import ClosedError, EngineError, TaintedEngineError
from asyncsync.messages import Policy
from tests.cancelling import CancelAt

pytestmark = pytest.mark.asyncio

POLICIES: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")


class Stepped:
    """A batch of which each token tells the weights' version and the length of the cache: ``100 * version + length``.

    Its cache, too, tells what it was computed with: a token is negative if that was not the version of now.
    """

    parked: bool

    def __init__(self) -> None:
        self.version = 1
        self.generations = BatchedGenerations(self, lambda: self.version, GenerationGate())
        self.running: dict[str, dict[str, Any]] = {}
        self.parked = False
        self.parks: list[bool] = []
        self.may_park = asyncio.Event()
        self.may_park.set()
        self.lost_cancellations = 0

    def add(
        self, key: str, prompt: Sequence[int], max_new_tokens: int, stop: frozenset[int], options: dict[str, Any]
    ) -> None:
        assert key not in self.running
        self.running[key] = {"prompt": prompt, "left": max_new_tokens, "stop": stop, "tokens": [], "cache": set()}

    def cancel(self, key: str) -> None:
        if self.lost_cancellations:
            self.lost_cancellations -= 1
        else:
            self.running.pop(key, None)

    async def park(self) -> None:
        await self.may_park.wait()
        self.parked = True
        self.parks.append(True)

    def unpark(self) -> None:
        self.parked = False
        self.parks.append(False)

    def step(self, times: int = 1) -> None:
        """On a thread of its own, as in real life."""

        def steps() -> None:
            for _ in range(times):
                self._step()

        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()

    def _step(self) -> None:
        assert not self.parked
        outputs: list[tuple[str, Sequence[int], bool, str | None]] = []
        for key, request in list(self.running.items()):
            token = 100 * self.version + len(request["prompt"]) + len(request["tokens"])
            request["cache"].add(self.version)
            request["tokens"].append(token if request["cache"] == {self.version} else -token)
            is_over = len(request["tokens"]) == request["left"] or token in request["stop"]
            if is_over:
                del self.running[key]
            outputs.append((key, list(request["tokens"]), is_over, None))
        self.generations.take(outputs)

    def ask(self, prompt: int = 1, n: int = 4, stop: frozenset[int] = frozenset()) -> asyncio.Task[Completion]:
        """Send a request with a prompt of so many tokens."""
        return asyncio.ensure_future(self.generations.complete(Request([0] * prompt, n, stop, {})))


@pytest.fixture
def batch() -> Stepped:
    return Stepped()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def spans(completion: Completion) -> list[tuple[int | None, int, int]]:
    return [(span.version, span.start, span.end) for span in completion.weight_versions]


async def test_an_answer_ends_at_its_length_or_at_a_stop_token(batch: Stepped) -> None:
    long, stopped = batch.ask(), batch.ask(stop=frozenset({102}))
    await turn()
    batch.step(4)
    assert await long == Completion(
        tokens=(101, 102, 103, 104),
        finish_reason="length",
        weight_versions=(WeightVersionSpan(version=1, start=0, end=4),),
    )
    assert ((await stopped).tokens, (await stopped).finish_reason) == ((101, 102), "stop")


@pytest.mark.parametrize(
    ("policy", "tokens", "reason", "versions"),
    [
        ("drain", (101, 102, 103, 104), "length", [(1, 0, 4)]),
        ("abort", (101, 102), "abort", [(1, 0, 2)]),
        ("recompute", (101, 102, 203, 204), "length", [(1, 0, 2), (2, 2, 4)]),
        ("continue", (101, 102, -203, -204), "length", [(1, 0, 2), (2, 2, 4)]),
    ],
)
async def test_what_each_policy_does_with_who_is_in_flight_and_with_who_comes(
    batch: Stepped, policy: Policy, tokens: tuple[int, ...], reason: str, versions: list[tuple[int, int, int]]
) -> None:
    early = batch.ask()
    await turn()
    batch.step(2)
    holding = asyncio.ensure_future(batch.generations.hold(policy))
    await turn()
    late = batch.ask(prompt=5, n=2)
    await turn()
    assert batch.generations.waiting == 1
    if policy == "drain":
        assert not holding.done()
        batch.step(2)
    await holding
    assert batch.parks[-1:] == [True]
    batch.version = 2
    batch.generations.resume()
    assert batch.parks[-1:] == [False]
    batch.step(2)
    answer = await early
    assert (answer.tokens, answer.finish_reason, spans(answer)) == (tokens, reason, versions)
    assert ((await late).tokens, spans(await late)) == ((205, 206), [(2, 0, 2)])
    assert not batch.running


@pytest.mark.parametrize("policy", ["recompute", "continue"])
async def test_who_has_no_token_yet_is_wholly_of_the_new_version(batch: Stepped, policy: Policy) -> None:
    asked = batch.ask(n=1)
    await turn()
    await batch.generations.hold(policy)
    batch.version = 2
    batch.generations.resume()
    batch.step()
    assert spans(await asked) == [(2, 0, 1)]


async def test_three_versions_in_one_answer(batch: Stepped) -> None:
    asked = batch.ask(n=5)
    await turn()
    policies: tuple[Policy, ...] = ("continue", "recompute", "continue", "recompute")
    for policy in policies:
        batch.step()
        await batch.generations.hold(policy)
        batch.version += policy == "recompute"
        batch.generations.resume()
    batch.step()
    answer = await asked
    assert answer.tokens == (101, 102, 203, 204, 305)
    assert spans(answer) == [(1, 0, 2), (2, 2, 4), (3, 4, 5)]


@pytest.mark.parametrize("policy", ["drain", "recompute", "continue"])
async def test_an_update_that_came_to_nothing_costs_no_cache(batch: Stepped, policy: Policy) -> None:
    asked = batch.ask()
    await turn()
    batch.step(2)
    holding = asyncio.ensure_future(batch.generations.hold(policy))
    await turn()
    holding.cancel()
    await asyncio.wait([holding])
    key = next(iter(batch.running))
    batch.generations.resume()
    assert key in batch.running
    batch.step(2)
    assert spans(await asked) == [(1, 0, 4)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when", ["waiting", "handed over"])
async def test_cancelled_at_each_await_of_a_hold_nothing_stays_parked(
    policy: Policy, when: Literal["waiting", "handed over"]
) -> None:
    for at in range(10):
        batch = Stepped()
        batch.may_park.clear()
        asked = batch.ask(n=2)
        await turn()
        batch.step()

        async def finish(batch: Stepped = batch) -> None:
            await turn()
            if not batch.parked and batch.running:
                batch.step()
            batch.may_park.set()

        cancelling = CancelAt(batch.generations.hold(policy), at, when)

        async def hold(cancelling: CancelAt = cancelling) -> None:
            await cancelling

        task = asyncio.ensure_future(hold())
        await finish()
        await asyncio.wait([task], timeout=10)
        batch.generations.resume()
        assert not batch.parked
        if batch.running:
            batch.step()
        assert (await asked).finish_reason == ("abort" if policy == "abort" else "length")
        after = batch.ask(n=1)
        await turn()
        batch.step()
        await after
        if not cancelling.reached:
            return
    pytest.fail("hold never came to an end")


async def test_a_second_abort_ends_those_who_came_to_the_pause(batch: Stepped) -> None:
    await batch.generations.hold("abort")
    late = batch.ask()
    await turn()
    assert not late.done()
    await batch.generations.hold("abort")
    assert await late == Completion(tokens=(), finish_reason="abort", weight_versions=())


async def test_a_second_pause_may_drain_what_the_first_has_kept_and_tells_the_versions_apart(batch: Stepped) -> None:
    kept, anew = batch.ask(), batch.ask()
    await turn()
    batch.step()
    await batch.generations.hold("continue")
    batch.version = 2  # switched, and never resumed
    holding = asyncio.ensure_future(batch.generations.hold("drain"))
    await turn()
    batch.step(3)
    await holding
    assert batch.parked
    assert spans(await kept) == spans(await anew) == [(1, 0, 1), (2, 1, 4)]


async def test_who_reads_beside_the_batch_is_waited_for_under_every_policy(batch: Stepped) -> None:
    for policy in POLICIES:
        await batch.generations._gate.enter()
        holding = asyncio.ensure_future(batch.generations.hold(policy))
        await turn()
        assert not holding.done()
        assert not batch.parked  # the batch goes on as long as it may
        batch.generations._gate.leave()
        await holding
        batch.generations.resume()
        assert batch.generations._gate.is_open


async def test_a_tainted_engine_turns_everyone_away_until_it_resumes(batch: Stepped) -> None:
    running = batch.ask()
    await turn()
    batch.step()
    await batch.generations.hold("continue")
    waiting = batch.ask()
    await turn()
    batch.generations.bar("half of update 3")
    for asked in (running, waiting, batch.ask()):
        with pytest.raises(TaintedEngineError, match="half of update 3"):
            await asked
    assert not batch.running
    await batch.generations.hold("drain")  # the update that repairs it
    with pytest.raises(TaintedEngineError):
        await batch.ask()
    batch.version = 4
    batch.generations.resume()
    after = batch.ask(n=1)
    await turn()
    batch.step()
    assert spans(await after) == [(4, 0, 1)]


async def test_tainted_while_a_pause_drains(batch: Stepped) -> None:
    running = batch.ask()
    await turn()
    holding = asyncio.ensure_future(batch.generations.hold("drain"))
    await turn()
    batch.generations.bar("no matter")
    await holding
    with pytest.raises(TaintedEngineError):
        await running


async def test_when_the_thread_is_gone_everyone_is_told(batch: Stepped) -> None:
    running = batch.ask()
    await turn()
    holding = asyncio.ensure_future(batch.generations.hold("drain"))
    await turn()
    waiting = batch.ask()
    await turn()
    cause = IndexError("out of range")
    error = EngineError("no more")
    error.__cause__ = cause
    batch.generations.end(error)
    batch.generations.end(ClosedError("closed"))  # too late to be the reason
    for told in (running, waiting, holding, batch.ask(), asyncio.ensure_future(batch.generations.hold("abort"))):
        with pytest.raises(EngineError, match="no more") as caught:
            await told
        assert caught.value is not error
        assert caught.value.__cause__ is cause
    batch.generations.resume()
    batch.generations.bar("not any more")
    with pytest.raises(EngineError, match="no more"):
        await batch.ask()
    assert "ended" in repr(batch.generations)


async def test_one_request_that_fails_fails_alone(batch: Stepped) -> None:
    bad, good = batch.ask(), batch.ask(n=1)
    await turn()
    key = next(iter(batch.running))
    del batch.running[key]
    batch.generations.take([(key, [], True, "no such processor")])
    with pytest.raises(EngineError, match="no such processor"):
        await bad
    batch.step()
    await good


async def test_a_caller_that_gives_up_takes_its_request_along(batch: Stepped) -> None:
    running = batch.ask()
    await turn()
    batch.step()
    running.cancel()
    await asyncio.wait([running])
    assert not batch.running
    holding = asyncio.ensure_future(batch.generations.hold("drain"))
    await holding
    waiting = batch.ask()
    await turn()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert batch.generations.waiting == batch.generations.in_flight == 0


async def test_a_pause_goes_on_when_the_last_caller_gives_up(batch: Stepped) -> None:
    running = batch.ask()
    await turn()
    holding = asyncio.ensure_future(batch.generations.hold("drain"))
    await turn()
    running.cancel()
    await holding


async def test_a_cancellation_that_was_lost_is_sent_again(batch: Stepped) -> None:
    running = batch.ask(n=100)
    await turn()
    batch.lost_cancellations = 1
    running.cancel()
    await asyncio.wait([running])
    assert batch.running
    batch.step()
    assert not batch.running


async def parts(batch: Stepped, into: list[CompletionPart], n: int = 4) -> None:
    async with aclosing(batch.generations.stream(Request([0], n, frozenset(), {}, streamed=True))) as stream:
        async for part in stream:
            into.append(part)  # noqa: PERF401 - each as it comes


async def test_a_stream_gives_tokens_as_they_come_each_part_with_its_version(batch: Stepped) -> None:
    got: list[CompletionPart] = []
    streaming = asyncio.ensure_future(parts(batch, got))
    await turn()
    batch.step()
    await turn()
    assert got == [CompletionPart(tokens=(101,), weight_version=1, finish_reason=None)]
    batch.step()
    await batch.generations.hold("recompute")
    batch.version = 2
    batch.generations.resume()
    batch.step(2)
    await streaming
    assert got[1:] == [
        CompletionPart(tokens=(102,), weight_version=1, finish_reason=None),
        CompletionPart(tokens=(203, 204), weight_version=2, finish_reason="length"),
    ]


async def test_a_stream_that_is_aborted_says_so_and_one_that_fails_gives_what_it_has_first(batch: Stepped) -> None:
    aborted: list[CompletionPart] = []
    streaming = asyncio.ensure_future(parts(batch, aborted))
    await turn()
    batch.step()
    await turn()
    await batch.generations.hold("abort")
    await streaming
    assert aborted[-1] == CompletionPart(tokens=(), weight_version=None, finish_reason="abort")
    batch.generations.resume()

    failed: list[CompletionPart] = []
    streaming = asyncio.ensure_future(parts(batch, failed))
    await turn()
    batch.step()
    batch.generations.bar("no matter")
    with pytest.raises(TaintedEngineError):
        await streaming
    assert [part.tokens for part in failed] == [(101,)]


async def test_a_stream_that_is_closed_takes_its_request_along(batch: Stepped) -> None:
    stream = batch.generations.stream(Request([0], 100, frozenset(), {}, streamed=True))
    first = asyncio.ensure_future(anext(stream))
    await turn()
    batch.step()
    await first
    await stream.aclose()
    assert not batch.running


async def test_callers_on_several_loops(batch: Stepped) -> None:
    answers: list[Completion] = []

    def elsewhere() -> None:
        answers.append(asyncio.run(batch.generations.complete(Request([0], 2, frozenset(), {}))))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    here = batch.ask(n=2)
    while batch.generations.in_flight < 2:  # noqa: ASYNC110 - the other one has no event for a test
        await asyncio.sleep(0)
    batch.step(2)
    await asyncio.to_thread(thread.join, 10)
    assert answers == [await here]


async def test_who_listened_on_a_loop_that_is_closed_is_forgotten(batch: Stepped) -> None:
    def elsewhere() -> None:
        async def abandon() -> None:
            batch.generations._submit(Request([0], 2, frozenset(), {}, streamed=True))

        asyncio.run(abandon())

    await asyncio.to_thread(elsewhere)
    batch.step(2)
    assert batch.generations.in_flight == 0


async def test_a_version_that_computed_nothing_leaves_no_span() -> None:
    log = VersionLog()
    assert log.goes_on(1, 0)
    assert log.goes_on(2, 0)
    assert log.goes_on(3, 2)
    assert log.goes_on(2, 2)
    assert not log.goes_on(2, 4)
    assert log.spans(0, 5) == (WeightVersionSpan(version=2, start=0, end=5),)
    assert log.spans(3, 3) == ()
