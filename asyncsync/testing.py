"""What every rollout engine must do, as checks that any adapter can be put through.

A *subject* is an engine to be tested: what a synchronizer is given, a trainer whose weights fit it, a way to generate
with it and to know what must come out. Each of :data:`CHECKS` is a coroutine that puts one through its paces and raises
``AssertionError`` where it does not do what the :class:`~asyncsync.RolloutEngine` protocol promises; they can run in
any order, one after another, on the same engine.

Example:
    ::

        @pytest.mark.parametrize("check", asyncsync.testing.CHECKS)
        @pytest.mark.asyncio(loop_scope="module")
        async def test_conformance(subject, check):
            await asyncsync.testing.CHECKS[check](subject)

Bytes are real and so are process groups; where a call must fail or be cancelled, the engine stands behind a
:class:`Probe`, and the order of things is forced by its events.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from asyncsync.engines.base import CheckedEngine, EngineReceipt, GivingEngine, RolloutEngine
from asyncsync.engines.completion import Completion
from asyncsync.engines.group import EngineGroup
from asyncsync.engines.remote import as_rank
from asyncsync.errors import AsyncSyncError, EngineError, OutOfStepError, PlanError, WeightUpdateError
from asyncsync.messages import Checksums, Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder, next_epoch
from asyncsync.report import EngineState
from asyncsync.synchronizer import WeightSynchronizer

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds after which a request that was not answered is taken to wait for the engine to be resumed."""


class Subject(Protocol):
    """An engine to be tested."""

    @property
    def engine(self) -> Any:
        """What a synchronizer is given."""
        ...

    @property
    def trainer(self) -> nn.Module:
        """Its weights are sent. The checks change them at will."""
        ...

    @property
    def prompt(self) -> Sequence[int]:
        """A prompt, long enough that an engine with a prefix cache would keep what it came to."""
        ...

    @property
    def tokens(self) -> int:
        """So many tokens take much longer than a pause: a request of that many is in flight in one."""
        ...

    @property
    def policies(self) -> Sequence[Policy]:
        """What the engine must be able to do with requests in flight, no more and no less."""
        ...

    @property
    def tells_shapes(self) -> bool:
        """Whether the engine knows before the first byte that a tensor's shape or dtype does not fit."""
        ...

    async def generate(
        self, prompt: Sequence[int], count: int, started: Callable[[], None] | None = None
    ) -> Completion:
        """Generate greedily, to the last of ``count`` tokens.

        Args:
            prompt: Token ids.
            count: How many to generate.
            started: To be called once the first of them are there, while others are still to come.
        """
        ...

    def expected(self, old: nn.Module, new: nn.Module, switch: int, count: int, policy: Policy) -> Sequence[int]:
        """What the prompt must give if the weights change after ``switch`` tokens.

        Args:
            old: Has the weights before.
            new: Has those after.
            switch: How many tokens the old ones make.
            count: How many there are.
            policy: ``"recompute"``: the new weights compute the cache anew; ``"continue"``: they use the old one.
        """
        ...


class Probe:
    """An engine behind which each call can be watched, failed or cancelled. Satisfies :class:`RolloutEngine`.

    Args:
        engine: The engine, in any form that a synchronizer takes.

    Attributes:
        entered: Set when a call of that name comes.
        before: Awaited, once, before the call of that name goes on.
        after: Awaited, once, after it has.
        calls: The names of all calls, in order.
    """

    def __init__(self, engine: Any) -> None:
        group = isinstance(engine, list | tuple) and not isinstance(engine, EngineGroup)
        self._engine: RolloutEngine = EngineGroup(engine) if group else as_rank(engine)
        self.entered: dict[str, asyncio.Event] = {}
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self.calls: list[str] = []

    def watch(self, name: str) -> asyncio.Event:
        """An event that is set when the next call of a name comes."""
        event = self.entered[name] = asyncio.Event()
        return event

    async def _pass(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(name)
        if (event := self.entered.pop(name, None)) is not None:
            event.set()
        if (before := self.before.pop(name, None)) is not None:
            await before()
        result = await call()
        if (after := self.after.pop(name, None)) is not None:
            await after()
        return result

    async def describe_engine(self) -> EngineStatus:
        """See :class:`RolloutEngine`."""
        return await self._pass("describe_engine", self._engine.describe_engine)

    async def accept_layout(self, layout: Layout) -> None:
        """See :class:`RolloutEngine`."""
        await self._pass("accept_layout", functools.partial(self._engine.accept_layout, layout))

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :class:`RolloutEngine`."""
        return await self._pass("open_group", functools.partial(self._engine.open_group, rendezvous))

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :class:`RolloutEngine`."""
        await self._pass("join_group", functools.partial(self._engine.join_group, connection, contacts))

    async def leave_group(self, connection: str) -> None:
        """See :class:`RolloutEngine`."""
        await self._pass("leave_group", functools.partial(self._engine.leave_group, connection))

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :class:`RolloutEngine`."""
        await self._pass("pause_generation", functools.partial(self._engine.pause_generation, epoch, policy))

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :class:`RolloutEngine`."""
        return await self._pass("receive_weights", functools.partial(self._engine.receive_weights, order))

    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        """See :class:`RolloutEngine`."""
        return await self._pass("finish_weight_update", functools.partial(self._engine.finish_weight_update, order))

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :class:`RolloutEngine`."""
        return await self._pass(
            "abort_weight_update", functools.partial(self._engine.abort_weight_update, epoch, published)
        )

    async def resume_generation(self, epoch: int) -> None:
        """See :class:`RolloutEngine`."""
        await self._pass("resume_generation", functools.partial(self._engine.resume_generation, epoch))

    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :class:`~asyncsync.GivingEngine`."""
        giving = cast("GivingEngine", self._engine)
        return await self._pass("give_weights", functools.partial(giving.give_weights, order))

    async def wanted_checksums(self) -> Checksums:
        """See :class:`~asyncsync.CheckedEngine`."""
        checked = cast("CheckedEngine", self._engine)
        return await self._pass("wanted_checksums", checked.wanted_checksums)

    async def compare_checksums(self, epoch: int, checksums: Mapping[str, str]) -> None:
        """See :class:`~asyncsync.CheckedEngine`."""
        checked = cast("CheckedEngine", self._engine)
        await self._pass("compare_checksums", functools.partial(checked.compare_checksums, epoch, checksums))


# -- what the checks are made of --------------------------------------------------------------------------------------


def step(model: nn.Module, seed: int) -> None:
    """Change every floating-point weight a little, at random: what a trainer's step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values():
            if tensor.is_floating_point() and tensor.numel():
                spread = float(tensor.float().std(unbiased=False)) or 0.1
                noise = torch.randn(tensor.shape, generator=generator) * spread / 2
                tensor.add_(noise.to(tensor.dtype))


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, as it is now."""
    import copy

    return copy.deepcopy(model)


async def serves(subject: Subject, model: nn.Module, what: str) -> None:
    """Assert that the engine generates what a model does."""
    generated = await subject.generate(subject.prompt, 16)
    expected = list(subject.expected(model, model, 0, 16, "recompute"))
    assert list(generated.tokens) == expected, f"{what}: {parted(generated.tokens, expected)}"


def parted(tokens: Sequence[int], expected: Sequence[int], most: int = 8) -> str:
    """For a message: where tokens are others than were expected, and a few of them."""
    other = next((at for at, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(tokens), len(expected)) if other is None else other
    here, there = list(tokens[at : at + most]), list(expected[at : at + most])
    return f"from token {at} of {len(tokens)} on it is {here} …, and should be {there} …"


async def failed(update: Awaitable[Any]) -> WeightUpdateError | PlanError:
    """The error of an update that must fail."""
    try:
        report = await update
    except (WeightUpdateError, PlanError) as error:
        return error
    raise AssertionError(f"it should have failed, but came to {report}")


@asynccontextmanager
async def _whole_or_not_serving(
    subject: Subject, probe: Probe, old: nn.Module, new: nn.Module, what: str
) -> AsyncIterator[None]:
    """Assert that an engine serves the old weights whole, or the new ones whole, or nothing until it is repaired.

    The body repairs it. A request that had to wait for that is answered by the new weights.
    """
    status = await probe.describe_engine()
    request = asyncio.create_task(subject.generate(subject.prompt, 16))
    await asyncio.wait([request], timeout=PATIENCE)
    waited = not request.done()
    if status.tainted is not None:
        served = not waited and request.exception() is None
        assert not served, f"{what}: it is tainted ({status.tainted}), and serves"
    try:
        yield
        if not waited and request.exception() is not None:
            assert status.tainted is not None, f"{what}: it is whole, and turns requests away: {request.exception()!r}"
            return
        generated = list((await request).tokens)
    finally:
        request.cancel()
    whole = [list(subject.expected(model, model, 0, 16, "recompute")) for model in (old, new)]
    assert generated in (whole[1:] if waited else whole), f"{what}: it serves no whole weights: {generated} of {whole}"


class _Failing:
    """Weights that stop coming in the middle."""

    def __init__(self, model: nn.Module, after: int) -> None:
        self._tensors: dict[str, Tensor] = dict(model.state_dict())
        self._after = after

    def describe(self) -> Iterator[tuple[str, torch.dtype, Sequence[int]]]:
        return ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items())

    def gather(self, name: str) -> Tensor:
        self._after -= 1
        if self._after < 0:
            raise RuntimeError(f"planned: {name} does not come")
        return self._tensors[name]


# -- the checks -------------------------------------------------------------------------------------------------------


async def check_updates(subject: Subject) -> None:
    """Connect, and update five times: after each, the engine generates what the trainer's model does."""
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.connect()
        last = None
        for seed in range(5):
            step(subject.trainer, seed)
            update = await synchronizer.update_weights()
            assert last is None or update.version == last + 1, "versions grow by one"
            last = update.version
            await serves(subject, subject.trainer, f"after update {seed + 1}")


async def check_digest(subject: Subject) -> None:
    """The engine confirms what it received, and an update that changes nothing says so."""
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        step(subject.trainer, 10)
        first = await synchronizer.update_weights()
        assert [outcome.digest for outcome in first.outcomes] == [first.digest]
        again = await synchronizer.update_weights()
        assert again.digest == first.digest
        assert again.tensors_changed == 0
        await serves(subject, subject.trainer, "after an update that changed nothing")


async def check_small_buckets(subject: Subject) -> None:
    """However finely the weights are cut, they come whole."""
    async with WeightSynchronizer(subject.trainer, [subject.engine], bucket_size=1024) as synchronizer:
        step(subject.trainer, 20)
        update = await synchronizer.update_weights()
        assert update.buckets > 2
        await serves(subject, subject.trainer, "after an update of small buckets")


async def check_reconnect(subject: Subject) -> None:
    """A synchronizer that is gone leaves nothing behind that the next would stumble over."""
    for seed in (30, 31):
        step(subject.trainer, seed)
        async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
            await synchronizer.update_weights()
            await serves(subject, subject.trainer, "with a new synchronizer")
    abandoned = WeightSynchronizer(subject.trainer, [subject.engine])
    await abandoned.update_weights()  # its group stays open at the engine
    step(subject.trainer, 32)
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, "with a synchronizer that found the group of another")
    await abandoned.aclose()


async def check_wrong_weights(subject: Subject) -> None:
    """Weights that do not fit are refused by name before anything is sent, and the engine serves on."""
    before = copied(subject.trainer)
    async with WeightSynchronizer(before, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
    state: dict[str, Tensor] = dict(subject.trainer.state_dict())
    first = next(name for name, tensor in state.items() if tensor.ndim >= 2)
    wrong: dict[str, Mapping[str, Tensor]] = {
        "a name that the engine does not know": state | {"no.such.weight": torch.zeros(3)},
        "a name that is missing": {name: tensor for name, tensor in state.items() if name != first},
    }
    if subject.tells_shapes:
        wrong["a shape that does not fit"] = state | {first: torch.cat([state[first], state[first]])}
        wrong["another dtype"] = state | {first: state[first].double()}
    for what, weights in wrong.items():
        name = "no.such.weight" if "know" in what else first
        async with WeightSynchronizer(weights, [subject.engine]) as synchronizer:
            error = await failed(synchronizer.update_weights())
        assert isinstance(error, PlanError), f"{what}: {error!r}"
        assert name in str(error) or name in error.names or what == "a name that is missing", f"{what}: {error}"
        await serves(subject, before, what)


async def check_failed_bucket(subject: Subject) -> None:
    """If bytes stop coming, the engine is whole or says that it is not; the next update repairs it."""
    old = copied(subject.trainer)
    async with WeightSynchronizer(old, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
    step(subject.trainer, 40)
    probe = Probe(subject.engine)
    weights = _Failing(subject.trainer, after=len(subject.trainer.state_dict()) // 2)
    async with WeightSynchronizer(weights, [probe], bucket_size=1024) as synchronizer:
        error = await failed(synchronizer.update_weights())
        assert isinstance(error, WeightUpdateError), repr(error)
        assert "planned" in str(error), f"the cause is told: {error!r}"
        assert all(outcome.state is not EngineState.UPDATED for outcome in error.outcomes)
    async with (
        _whole_or_not_serving(subject, probe, old, subject.trainer, "after a failed bucket"),
        WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer,
    ):
        await synchronizer.update_weights()
    await serves(subject, subject.trainer, "after the update that repairs it")


async def check_missed_version(subject: Subject) -> None:
    """An engine that is told of a version which others serve, and which it does not hold, serves nothing."""
    async with WeightSynchronizer(subject.trainer, [subject.engine]) as synchronizer:
        await synchronizer.update_weights()
    old = copied(subject.trainer)
    step(subject.trainer, 45)
    probe = Probe(subject.engine)
    async with WeightSynchronizer(subject.trainer, [probe]) as synchronizer:
        await synchronizer.connect()
        status = await probe.describe_engine()
        missed = await probe.abort_weight_update(next_epoch(status.epoch), status.newest_version + 1)
        assert missed.tainted is not None, "it does not hold the version that counts"
        assert missed.weight_version is None
        async with _whole_or_not_serving(subject, probe, old, subject.trainer, "after a missed version"):
            await synchronizer.update_weights()
        await serves(subject, subject.trainer, "after the update that repairs it")


async def check_old_epochs(subject: Subject) -> None:
    """Calls that come late, of an epoch older than the newest the engine has seen, are refused and change nothing."""
    probe = Probe(subject.engine)
    async with WeightSynchronizer(subject.trainer, [probe]) as synchronizer:
        step(subject.trainer, 46)
        await synchronizer.update_weights()
        epoch = (await probe.describe_engine()).epoch - 1
        late: Mapping[str, Callable[[], Awaitable[Any]]] = {
            "pause_generation": lambda: probe.pause_generation(epoch, "drain"),
            "resume_generation": lambda: probe.resume_generation(epoch),
            "abort_weight_update": lambda: probe.abort_weight_update(epoch, None),
        }
        for name, call in late.items():
            try:
                await call()
            except OutOfStepError:
                pass
            else:
                raise AssertionError(f"a late {name} was not refused")
            await serves(subject, subject.trainer, f"after a late {name}")


async def check_cancellation(subject: Subject) -> None:
    """Cancelled in any call, before or after it has had its effect: the engine is whole or tainted, the next works."""
    probe = Probe(subject.engine)
    async with WeightSynchronizer(subject.trainer, [probe]) as synchronizer:
        await synchronizer.update_weights()
        probe.calls.clear()
        await synchronizer.update_weights()
        # Resuming is clean-up, which a cancellation waits for: hanging there is another matter.
        calls = sorted(set(probe.calls) - {"resume_generation"})
    for name in calls:
        for when in ("before", "after"):
            old = copied(subject.trainer)
            step(subject.trainer, 50)
            probe = Probe(subject.engine)
            async with WeightSynchronizer(subject.trainer, [probe]) as synchronizer:
                reached = asyncio.Event()
                await synchronizer.connect()

                async def hang(reached: asyncio.Event = reached) -> None:
                    reached.set()
                    await asyncio.Event().wait()

                getattr(probe, when)[name] = hang
                update = asyncio.create_task(synchronizer.update_weights())
                await reached.wait()
                update.cancel()
                with suppress(asyncio.CancelledError, AsyncSyncError):
                    await update
                where = f"cancelled {when} {name}"
                async with _whole_or_not_serving(subject, probe, old, subject.trainer, where):
                    await synchronizer.update_weights()
                await serves(subject, subject.trainer, f"after an update that was cancelled {when} {name}")


async def check_failing_calls(subject: Subject) -> None:
    """An engine that fails in any call is named, and whole or tainted; the next update works."""
    probe = Probe(subject.engine)
    async with WeightSynchronizer(subject.trainer, [probe]) as synchronizer:
        await synchronizer.update_weights()
        probe.calls.clear()
        await synchronizer.update_weights()
        calls = sorted(set(probe.calls))
        for name in calls:
            old = copied(subject.trainer)
            step(subject.trainer, 60)

            async def fail(name: str = name) -> None:
                raise RuntimeError(f"planned: {name} fails")

            probe.before[name] = fail
            error = await failed(synchronizer.update_weights())
            assert isinstance(error, EngineError), repr(error)
            assert "planned" in str(error), f"the cause is told: {error!r}"
            async with _whole_or_not_serving(subject, probe, old, subject.trainer, f"{name} failed"):
                await synchronizer.update_weights()
            await serves(subject, subject.trainer, f"after an update in which {name} failed")


async def check_policies(subject: Subject) -> None:
    """Each policy does with requests in flight what it promises, and says where the weights changed."""
    status = await Probe(subject.engine).describe_engine()
    told, wanted = set(status.policies), set(subject.policies)
    assert told == wanted, (
        f"the engine says that it keeps {sorted(told)}, and the subject that it must {sorted(wanted)}"
    )
    for policy in status.policies:
        await _check_policy(subject, policy)


class _InFlight:
    """A request that is in flight when the engine is paused, or told to switch if that comes first.

    It begins in that call, right before the engine gets it.

    Args:
        subject: Whose engine.
        probe: What stands before it.
    """

    def __init__(self, subject: Subject, probe: Probe) -> None:
        self._subject = subject
        self._answer: asyncio.Task[Completion] | None = None
        self._over_before: str | None = None  # the call
        self._outlasted: str | None = None
        self._started = asyncio.Event()
        for call in ("pause_generation", "finish_weight_update"):
            probe.before[call] = functools.partial(self._begin, probe, call)

    async def _begin(self, probe: Probe, call: str) -> None:
        if self._answer is not None:
            return
        subject, started = self._subject, asyncio.create_task(self._started.wait())
        self._answer = asyncio.create_task(subject.generate(subject.prompt, subject.tokens, self._started.set))
        await asyncio.wait([started, self._answer], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._answer.done():
            self._over_before = call
        begun = asyncio.get_running_loop().time()
        probe.after[call] = functools.partial(self._look_whether_over, self._answer, call, begun)

    async def _look_whether_over(self, answer: asyncio.Task[Completion], call: str, begun: float) -> None:
        # Its answer may be on its way. That takes less than the call did, if that has waited for the request.
        await asyncio.wait([answer], timeout=asyncio.get_running_loop().time() - begun)
        if not answer.done():
            self._outlasted = call

    async def answer(self, policy: Policy) -> Completion:
        """What it came to.

        Raises:
            AssertionError: It was not in flight, or was not let finish under a policy which does that.
        """
        assert self._answer is not None, "the engine was neither paused nor told to switch"
        answer = await self._answer
        assert self._started.is_set(), "a subject's generate() must call started() once its first tokens are there"
        assert self._over_before is None, (
            f"the request was over before {self._over_before}: give a longer one (Subject.tokens)"
        )
        assert self._outlasted is None or policy != "drain", (
            f"under drain {self._outlasted} must not come back before requests in flight have ended, and it has "
            "(or give a longer request)"
        )
        return answer

    def cancel(self) -> None:
        """End it, if it has begun."""
        if self._answer is not None:
            self._answer.cancel()


async def _check_policy(subject: Subject, policy: Policy) -> None:
    probe = Probe(subject.engine)
    async with WeightSynchronizer(subject.trainer, [probe], policy=policy) as synchronizer:
        step(subject.trainer, 70)
        await synchronizer.update_weights()
        old = copied(subject.trainer)
        await serves(subject, old, f"before an update under {policy}")  # and a prefix cache holds the prompt now
        step(subject.trainer, 71)
        request = _InFlight(subject, probe)
        try:
            update = await synchronizer.update_weights()
            generated = await request.answer(policy)
        finally:
            request.cancel()
        count, reason = len(generated.tokens), generated.finish_reason
        switch = count
        if policy in ("recompute", "continue"):
            assert reason == "length", (
                f"under {policy} a request goes on to its last token, and does not end by {reason}"
            )
            assert count == subject.tokens, (
                f"under {policy} a request gets all of its {subject.tokens} tokens, not {count}"
            )
            spans = generated.weight_versions
            assert spans, "the engine must say where the weights changed"
            assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]], f"{spans} do not join"
            assert spans[-1].version == update.version, f"{spans}: the last is of version {update.version}"
            switch = spans[-1].start
            assert 0 < switch < count, f"the weights changed in the middle: {spans}"
        elif policy == "abort":
            assert reason == "abort", f"under abort a request in flight ends by that, not by {reason}"
            assert count < subject.tokens, f"under abort a request has fewer than its {subject.tokens} tokens"
        else:
            assert count == subject.tokens, (
                f"under drain a request gets all of its {subject.tokens} tokens, not {count}"
            )
        expected = list(subject.expected(old, subject.trainer, switch, count, policy))
        what = f"under {policy}, {switch} of {count} tokens old"
        assert list(generated.tokens) == expected, f"{what}: {parted(generated.tokens, expected)}"
        await serves(subject, subject.trainer, f"a request after an update under {policy}")
        step(subject.trainer, 72)
        await synchronizer.update_weights()
        await serves(subject, subject.trainer, f"after an update under {policy} with nothing in flight")


async def check_requests_around_updates(subject: Subject) -> None:
    """Requests that come at any moment of an update run wholly under the old weights or wholly under the new."""
    models = [copied(subject.trainer)]
    async with WeightSynchronizer(subject.trainer, [subject.engine], policy="drain") as synchronizer:
        await synchronizer.update_weights()
        expected = [list(subject.expected(models[0], models[0], 0, 16, "recompute"))]
        results: list[list[int]] = []
        answers: asyncio.Queue[list[int]] = asyncio.Queue()
        stop = asyncio.Event()

        async def keep_asking() -> None:
            while not stop.is_set():
                tokens = list((await subject.generate(subject.prompt, 16)).tokens)
                results.append(tokens)
                answers.put_nowait(tokens)

        async with asyncio.TaskGroup() as clients:
            for _ in range(3):
                clients.create_task(keep_asking())
            try:
                for seed in range(80, 84):
                    step(subject.trainer, seed)
                    expected.append(list(subject.expected(subject.trainer, subject.trainer, 0, 16, "recompute")))
                    await synchronizer.update_weights()
                    while not answers.empty():
                        answers.get_nowait()
                    for _ in range(6):  # all that were in flight, and one more each
                        latest = await answers.get()
                    assert latest == expected[-1], "what is asked after an update is answered by its weights"
            finally:
                stop.set()
        mixed = [tokens for tokens in results if tokens not in expected]
        assert not mixed, f"{len(mixed)} of {len(results)} requests ran on no whole version: {mixed[0]}"


CHECKS: Mapping[str, Callable[[Subject], Awaitable[None]]] = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}
"""Every check, by what it looks at."""
