"""The engine over transformers' continuous batching, compared token for token with transformers' own generation.

Needs the extra ``[models]``, and no more than a tiny model of random weights.
"""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Literal

import anyio
import pytest
import torch

import asyncsync
from asyncsync import Completion, TransformersEngine, WeightSynchronizer, cluster
from asyncsync.demo.actors import running
from asyncsync.engines.batched import BatchState
from asyncsync.messages import Policy
from tests.cancelling import CancelAt
from tests.tiny_model import VOCABULARY, greedy, greedy_continued, greedy_recomputed, tiny_model

pytestmark = [pytest.mark.models]

PROMPTS: tuple[list[int], ...] = ([3, 1, 4, 1, 5], [0] * 40, list(range(100, 230)), [7])
LENGTH = 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Brake:
    """Lets a model take so many steps, and no more until it is let go."""

    def __init__(self, model: Any) -> None:
        self._changed = threading.Condition()
        self._left: float = float("inf")
        self._stands = False
        model.register_forward_pre_hook(lambda *_: self._step())

    def _step(self) -> None:
        with self._changed:
            self._stands = self._left == 0
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._left > 0, 60)
            self._stands = False
            self._left -= 1

    def allow(self, steps: float) -> None:
        with self._changed:
            self._left = steps
            self._changed.notify_all()

    async def stands(self) -> None:
        """Wait until the model stands before its next step."""

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._stands, 60)

        await asyncio.to_thread(wait)


class Driven:
    """An engine of a tiny model, a trainer's model, and a synchronizer, all in this process."""

    def __init__(self, engine: TransformersEngine, trainer: Any, synchronizer: WeightSynchronizer) -> None:
        self.engine, self.trainer, self.synchronizer = engine, trainer, synchronizer
        self.brake = Brake(engine.module)
        self.batched = engine._asyncsync.batched

    def train(self, seed: int) -> Any:
        """The trainer's model becomes another one."""
        self.trainer.load_state_dict(tiny_model(seed).state_dict())

    def ask(self, prompt: list[int], n: int, **options: Any) -> asyncio.Task[Completion]:
        return asyncio.ensure_future(self.engine.generate(prompt, max_new_tokens=n, **options))

    async def is_held(self) -> None:
        while self.batched._state is not BatchState.HELD:  # noqa: ASYNC110 - it has no event for a test
            await asyncio.sleep(0.001)

    async def wants_to_park(self) -> None:
        status = self.engine._asyncsync.batch._status
        while not status.is_pause_requested():  # noqa: ASYNC110 - it has no event for a test
            await asyncio.sleep(0.001)


@asynccontextmanager
async def driven(*, staged: bool = True, policy: Policy = "drain", **options: Any) -> AsyncIterator[Driven]:
    engine = TransformersEngine(tiny_model(99), staged=staged, **options)
    trainer = tiny_model(1)
    try:
        async with WeightSynchronizer(trainer, [engine], policy=policy, timeout=60) as synchronizer:
            await synchronizer.update_weights()
            yield Driven(engine, trainer, synchronizer)
    finally:
        await engine.aclose()


def spans(answer: Completion) -> list[tuple[int | None, int, int]]:
    return [(span.version, span.start, span.end) for span in answer.weight_versions]


@cluster.remote(num_cpus=0)
class Engine(TransformersEngine):
    def __init__(self, seed: int, staged: bool) -> None:
        torch.set_num_threads(1)
        super().__init__(tiny_model(seed), staged=staged)


@cluster.remote(num_cpus=0)
class Trainer(asyncsync.TrainerRank):
    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.model = tiny_model(seed)
        super().__init__(self.model)

    def train(self, seed: int) -> None:
        self.model.load_state_dict(tiny_model(seed).state_dict())


@pytest.mark.ray
@pytest.mark.asyncio
async def test_after_each_of_five_updates_actors_answer_as_the_trainers_model_does(ray_cluster: None) -> None:
    async with running((Trainer, (1,)), (Engine, (98, True)), (Engine, (99, False))) as (trainer, *engines):
        before = await engines[0].generate.remote(PROMPTS[0], max_new_tokens=LENGTH)
        assert (list(before.tokens), spans(before)) == (
            greedy(tiny_model(98), PROMPTS[0], LENGTH),
            [(None, 0, LENGTH)],
        )
        async with WeightSynchronizer(trainer, engines) as synchronizer:
            for version in range(1, 6):
                await trainer.train.remote(version)
                await synchronizer.update_weights()
                model = tiny_model(version)
                for engine in engines:
                    answers = await asyncio.gather(
                        *(engine.generate.remote(prompt, max_new_tokens=LENGTH) for prompt in PROMPTS)
                    )
                    for prompt, answer in zip(PROMPTS, answers, strict=True):
                        assert list(answer.tokens) == greedy(model, prompt, LENGTH)
                        assert (answer.finish_reason, spans(answer)) == ("length", [(version, 0, LENGTH)])
        streamed = [await part async for part in engines[0].stream.remote(PROMPTS[1], max_new_tokens=LENGTH)]
        assert [token for part in streamed for token in part.tokens] == greedy(model, PROMPTS[1], LENGTH)
        assert [part.finish_reason for part in streamed][-1] == "length"


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("policy", ["drain", "abort", "recompute", "continue"])
@pytest.mark.asyncio
async def test_requests_in_flight_end_or_switch_exactly_where_the_engine_says(policy: Policy, staged: bool) -> None:
    old, new, n, k = tiny_model(1), tiny_model(2), LENGTH, 9
    async with driven(staged=staged, policy=policy) as it:
        it.brake.allow(k)  # the longest prompt fits in one step, so each request has k tokens then
        early = [it.ask(prompt, n) for prompt in PROMPTS]
        await it.brake.stands()
        it.train(2)
        updating = asyncio.ensure_future(it.synchronizer.update_weights())
        await it.is_held()
        late = [it.ask(prompt, n) for prompt in PROMPTS]
        if policy != "drain":
            await it.wants_to_park()
        it.brake.allow(float("inf"))
        await updating
        answers = await asyncio.gather(*early)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            if policy == "abort":
                at = len(answer.tokens)
                assert 0 < at < n
                assert (list(answer.tokens), answer.finish_reason) == (greedy(old, prompt, at), "abort")
                assert spans(answer) == [(1, 0, at)]
                continue
            assert answer.finish_reason == "length"
            if policy == "drain":
                assert (list(answer.tokens), spans(answer)) == (greedy(old, prompt, n), [(1, 0, n)])
                continue
            (_, start, at), *rest = spans(answer)
            assert (start, rest) == (0, [(2, at, n)])
            recomputed, continued = (
                reference(old, new, prompt, at, n) for reference in (greedy_recomputed, greedy_continued)
            )
            assert list(answer.tokens) == (recomputed if policy == "recompute" else continued)
            # At a neighbouring token it would have been another answer, so the place is not told by chance.
            assert recomputed[at:] != greedy(old, prompt, n)[at:]
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*late), strict=True):
            assert (list(answer.tokens), spans(answer)) == (greedy(new, prompt, n), [(2, 0, n)])


@pytest.mark.asyncio
async def test_the_references_tell_the_policies_apart() -> None:
    old, new, n, k = tiny_model(1), tiny_model(2), LENGTH, 9
    prompt = PROMPTS[2]
    assert (
        greedy_recomputed(old, new, prompt, 0, n) == greedy_continued(old, new, prompt, 0, n) == greedy(new, prompt, n)
    )
    assert (
        greedy_recomputed(old, new, prompt, n, n) == greedy_continued(old, new, prompt, n, n) == greedy(old, prompt, n)
    )
    assert greedy_recomputed(old, new, prompt, k, n) != greedy_continued(old, new, prompt, k, n)
    assert greedy_continued(old, new, prompt, k, n) != greedy_continued(old, new, prompt, k + 1, n)


@pytest.mark.parametrize("policy", ["drain", "abort", "recompute", "continue"])
@pytest.mark.asyncio
async def test_a_prefix_is_never_served_from_the_old_weights(policy: Policy) -> None:
    from transformers import ContinuousBatchingConfig

    # Sharing is asked for, with pages that the prompts fill many times.
    sharing = ContinuousBatchingConfig(page_size=4, num_blocks=512, max_batch_tokens=256, allow_block_sharing=True)
    new, prompt = tiny_model(2), PROMPTS[2]
    async with driven(policy=policy, continuous_batching_config=sharing) as it:
        await it.engine.generate(prompt, max_new_tokens=4)
        it.brake.allow(2)
        in_flight = it.ask(prompt, 20)  # lives on over the update, if the policy lets it
        await it.brake.stands()
        it.train(2)
        updating = asyncio.ensure_future(it.synchronizer.update_weights())
        await it.is_held()
        it.brake.allow(float("inf"))
        await updating
        answers = await asyncio.gather(it.ask(prompt, LENGTH), it.ask([*prompt, 9, 9], LENGTH), in_flight)
        assert list(answers[0].tokens) == greedy(new, prompt, LENGTH)
        assert list(answers[1].tokens) == greedy(new, [*prompt, 9, 9], LENGTH)


@pytest.mark.asyncio
async def test_a_caller_that_is_cancelled_leaves_room_for_others() -> None:
    from transformers import ContinuousBatchingConfig

    small = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=64)
    async with driven(continuous_batching_config=small) as it:
        assert it.engine._asyncsync.batch.capacity == 64
        for _ in range(2):
            it.brake.allow(35)
            asked = [it.ask(PROMPTS[0], 50) for _ in range(3)]  # more than the cache holds: by now, two are put off
            await it.brake.stands()
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            it.brake.allow(float("inf"))
            answer = await asyncio.wait_for(it.engine.generate(PROMPTS[3], max_new_tokens=40), 20)
            assert list(answer.tokens) == greedy(tiny_model(1), PROMPTS[3], 40)
        assert it.batched.in_flight == 0


@pytest.mark.parametrize("policy", ["drain", "recompute", "continue"])
@pytest.mark.asyncio
async def test_more_requests_than_the_cache_holds(policy: Policy) -> None:
    from transformers import ContinuousBatchingConfig

    small = ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=64)
    old, new, n = tiny_model(1), tiny_model(2), 40
    async with driven(policy=policy, continuous_batching_config=small) as it:
        it.brake.allow(30)
        asked = [it.ask([7 + index, 1], n) for index in range(6)]
        await it.brake.stands()
        it.train(2)
        updating = asyncio.ensure_future(it.synchronizer.update_weights())
        await it.is_held()
        it.brake.allow(float("inf"))
        await updating
        for index, answer in enumerate(await asyncio.gather(*asked)):
            at = next((span.end for span in answer.weight_versions if span.version == 1), 0)
            if policy != "continue":  # what is put off loses its cache
                assert list(answer.tokens) == greedy_recomputed(old, new, [7 + index, 1], at, n)
            assert len(answer.tokens) == n


@pytest.mark.parametrize("policy", ["drain", "abort", "recompute", "continue"])
@pytest.mark.parametrize("when", ["waiting", "handed over"])
@pytest.mark.asyncio
async def test_a_hold_that_is_cancelled_at_any_await_leaves_the_thread_going(
    policy: Policy, when: Literal["waiting", "handed over"]
) -> None:
    async with driven() as it:
        for at in range(10):
            asked = it.ask(PROMPTS[0], 20)
            cancelling = CancelAt(it.batched.hold(policy), at, when)

            async def hold(cancelling: CancelAt = cancelling) -> None:
                await cancelling

            await asyncio.wait([asyncio.ensure_future(hold())], timeout=20)
            it.batched.resume()
            assert (await asyncio.wait_for(asked, 20)).finish_reason == ("abort" if policy == "abort" else "length")
            after = await asyncio.wait_for(it.engine.generate(PROMPTS[1], max_new_tokens=4), 20)
            assert list(after.tokens) == greedy(tiny_model(1), PROMPTS[1], 4)
            if not cancelling.reached:
                return
    pytest.fail("hold never came to an end")


@pytest.mark.asyncio
async def test_a_tainted_engine_serves_nobody_until_an_update_has_repaired_it() -> None:
    async with driven() as it:
        it.brake.allow(3)
        in_flight = it.ask(PROMPTS[0], 400)
        await it.brake.stands()
        it.engine._asyncsync.record.taint("it missed version 2")
        for asked in (in_flight, it.ask(PROMPTS[0], 4)):
            with pytest.raises(asyncsync.TaintedEngineError, match="missed version 2"):
                await asked
        it.brake.allow(float("inf"))
        it.train(3)
        await it.synchronizer.update_weights()
        answer = await it.engine.generate(PROMPTS[0], max_new_tokens=8)
        assert (list(answer.tokens), spans(answer)) == (greedy(tiny_model(3), PROMPTS[0], 8), [(2, 0, 8)])


@pytest.mark.asyncio
async def test_a_model_that_fails_fails_every_caller_and_every_update() -> None:
    async with driven() as it:
        it.brake.allow(3)
        in_flight = [it.ask(prompt, 20) for prompt in PROMPTS]
        await it.brake.stands()

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("no such layer")

        it.engine.module.get_submodule("model.layers.0").register_forward_pre_hook(fail)
        it.brake.allow(float("inf"))
        for asked in in_flight:
            with pytest.raises(asyncsync.EngineError, match="ZeroDivisionError: no such layer") as caught:
                await asked
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(asyncsync.EngineError, match="generates no more"):
            await it.engine.generate(PROMPTS[0])
        with pytest.raises(asyncsync.EngineError, match="generates no more"):
            await it.synchronizer.update_weights()


@pytest.mark.asyncio
async def test_what_cannot_be_computed_is_refused_before_it_can_end_the_thread() -> None:
    async with driven() as it:
        for prompt, n, words in (
            ([], 1, "one token at least"),
            ([1], 0, "must be positive"),
            ([VOCABULARY], 1, "between 0 and 255"),
            ([-1], 1, "between 0 and 255"),
            ([1], 8192, "room for"),
        ):
            with pytest.raises(ValueError, match=words):
                await it.engine.generate(prompt, max_new_tokens=n)
        with pytest.raises(ValueError, match="cannot bring its own temperature"):
            await it.engine.generate([1], temperature=0.5)
        first = greedy(tiny_model(1), [5], 12)
        stopped = await it.engine.generate([5], max_new_tokens=12, stop_token_ids=[first[4]])
        at = first.index(first[4]) + 1
        assert (list(stopped.tokens), stopped.finish_reason) == (first[:at], "stop")


@pytest.mark.asyncio
async def test_requests_with_their_own_temperature() -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config: Any = GenerationConfig
    async with driven(
        generation_config=config(do_sample=True, temperature=0.9),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=8, max_batch_tokens=64, per_request_processors=True
        ),
    ) as it:
        cold, _ = await asyncio.gather(
            it.engine.generate([5], max_new_tokens=8, temperature=1e-4),
            it.engine.generate([5], max_new_tokens=8, temperature=3.0),
        )
        assert list(cold.tokens) == greedy(tiny_model(1), [5], 8)


@pytest.mark.asyncio
async def test_reading_the_weights_beside_the_batch_holds_an_update_off() -> None:
    async with driven(policy="continue") as it:
        async with it.engine.generating() as version:
            updating = asyncio.ensure_future(it.synchronizer.update_weights())
            await it.is_held()
            await asyncio.sleep(0.02)
            assert (version, updating.done()) == (1, False)
        await updating


@pytest.mark.asyncio
async def test_closed_it_generates_no_more() -> None:
    async with driven() as it:
        it.brake.allow(2)
        asked = it.ask(PROMPTS[0], 20)
        await it.brake.stands()
        closing = asyncio.ensure_future(it.engine.aclose())
        with pytest.raises(asyncsync.ClosedError):
            await asked
        it.brake.allow(float("inf"))
        await closing
        with pytest.raises(asyncsync.ClosedError):
            await it.engine.generate([1])


@contextmanager
def threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert not [thread for thread in threading.enumerate() if thread not in before]


def test_an_engine_that_nobody_holds_ends_its_threads() -> None:
    with threads_end():
        engine = TransformersEngine(tiny_model(1))
        tokens = asyncio.run(engine.generate([5], max_new_tokens=4)).tokens
        assert list(tokens) == greedy(tiny_model(1), [5], 4)
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("parked", [True, False])
def test_the_interpreter_ends_with_an_engine_that_generates(parked: bool) -> None:
    program = (
        "import asyncio; from asyncsync import TransformersEngine; from tests.tiny_model import tiny_model\n"
        "engine = TransformersEngine(tiny_model(1))\n"
        "async def main():\n"
        "    asyncio.ensure_future(engine.generate([1], max_new_tokens=500))\n"
        "    await asyncio.sleep(0.1)\n"
        f"    if {parked}: await engine._asyncsync.batched.hold('continue')\n"
        "loop = asyncio.new_event_loop(); loop.run_until_complete(main()); print('done')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.filterwarnings("ignore:Passing `no_repeat:UserWarning")
def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no language model"):
        TransformersEngine(torch.nn.Linear(1, 1))
    from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

    graphs = ContinuousBatchingConfig(varlen_compile_config=CompileConfig(mode="reduce-overhead"))
    with pytest.raises(ValueError, match="CUDA graphs"):
        TransformersEngine(tiny_model(1), continuous_batching_config=graphs)
    config: Any = GenerationConfig
    with pytest.raises(ValueError, match="send the same prompt"):
        TransformersEngine(tiny_model(1), generation_config=config(do_sample=True, num_return_sequences=2))
    with pytest.raises(ValueError, match="NoRepeatNGram"):
        TransformersEngine(tiny_model(1), generation_config=config(do_sample=False, no_repeat_ngram_size=2))


@pytest.mark.asyncio
async def test_a_stream_tells_the_version_of_each_token() -> None:
    async with driven(policy="recompute") as it:
        it.brake.allow(5)
        got: list[asyncsync.CompletionPart] = []

        async def listen() -> None:
            async with aclosing(it.engine.stream(PROMPTS[0], max_new_tokens=LENGTH)) as parts:
                async for part in parts:
                    got.append(part)  # noqa: PERF401 - each as it comes

        listening = asyncio.ensure_future(listen())
        await it.brake.stands()
        it.train(2)
        updating = asyncio.ensure_future(it.synchronizer.update_weights())
        await it.wants_to_park()
        it.brake.allow(float("inf"))
        await updating
        await listening
        by_version = {
            version: [token for part in got if part.weight_version == version for token in part.tokens]
            for version in (1, 2)
        }
        at = len(by_version[1])
        assert at == 6  # five, and the step that had begun
        expected = greedy_recomputed(tiny_model(1), tiny_model(2), PROMPTS[0], at, LENGTH)
        assert by_version[1] + by_version[2] == expected


@pytest.mark.parametrize("policy", ["abort", "recompute"])
@pytest.mark.asyncio
async def test_many_callers_over_many_updates(policy: Policy) -> None:
    """Each span of each answer is what the model of that version says after what came before."""
    from transformers import ContinuousBatchingConfig

    draws = random.Random(0)
    models = {version: tiny_model(version) for version in range(1, 7)}
    answers: list[tuple[list[int], int, Completion]] = []
    small = ContinuousBatchingConfig(page_size=4, num_blocks=60, max_batch_tokens=64)
    async with driven(policy=policy, continuous_batching_config=small) as it:

        async def call() -> None:
            while True:
                prompt = draws.choices(range(VOCABULARY), k=draws.choice([1, 5, 30, 70]))
                n = draws.randrange(1, 60)
                asked = it.ask(prompt, n)
                if draws.random() < 0.2:
                    await asyncio.sleep(0.01)
                    asked.cancel()
                    await asyncio.wait([asked])
                else:
                    answers.append((prompt, n, await asked))

        async with anyio.create_task_group() as callers:
            for _ in range(8):
                callers.start_soon(call)
            for version in range(2, 7):
                seen = len(answers)
                while len(answers) < seen + 5:  # noqa: ASYNC110 - it has no event for a test
                    await asyncio.sleep(0.001)
                it.trainer.load_state_dict(models[version].state_dict())
                await it.synchronizer.update_weights()
            callers.cancel_scope.cancel()
    for prompt, n, answer in answers:
        assert answer.finish_reason == "abort" or len(answer.tokens) == n
        for span in answer.weight_versions:
            before = [*prompt, *answer.tokens[: span.start]]
            assert span.version is not None
            expected = greedy(models[span.version], before, span.end - span.start)
            assert list(answer.tokens[span.start : span.end]) == expected
    if policy == "recompute":
        assert any(len(answer.weight_versions) > 1 for _, _, answer in answers)
