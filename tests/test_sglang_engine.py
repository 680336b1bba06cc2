"""The SGLang adapter over a pretended engine: what a real one cannot be made to do, and what it answers then."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import asyncsync
from asyncsync.buckets import TensorSpec
from asyncsync.engines.sglang.calls import SGLangFacts
from asyncsync.engines.sglang.memory import Memory
from asyncsync.engines.sglang.names import differing, key_of, match_names, parameter_of, parts_of
from asyncsync.engines.sglang.policies import abilities
from asyncsync.errors import (
    ConnectError,
    OutOfStepError,
    PlanError,
    TaintedEngineError,
    TransferError,
    WeightUpdateError,
)
from asyncsync.messages import ChecksumPart, Policy
from asyncsync.report import EngineState
from tests.pretended_sglang import NOT_BETWEEN, Llama, PretendedSGLang
from tests.sglang_bed import checksums

OLDER: dict[str, Any] = {"sessions": False}
SLIME: dict[str, Any] = {
    **OLDER,
    "pause_modes": ("abort",),
    "flattened_buckets": False,
    "selectors": False,
    "labels": False,
    "aborts": False,
    "timed_flush": False,
    "checksums": False,
}
"""What an actor as slime's can do."""


def adapter(**facts: Any) -> tuple[asyncsync.SGLangEngine, PretendedSGLang]:
    options = {name: facts.pop(name) for name in ("parameter_names", "check_names") if name in facts}
    engine, sglang = asyncsync.SGLangEngine("http://pretended", **options), PretendedSGLang(**facts)
    engine._client = sglang
    engine._memory = Memory(sglang)
    return engine, sglang


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def in_order(calls: Sequence[str], *wanted: str) -> bool:
    """Whether these calls were made in this order, among others."""
    rest = iter(calls)
    return all(call in rest for call in wanted)


async def state_after(update: Any) -> tuple[WeightUpdateError, EngineState]:
    with pytest.raises(WeightUpdateError) as failure:
        await update
    return failure.value, failure.value.outcomes[0].state


@pytest.mark.asyncio
async def test_an_update_in_sglangs_words() -> None:
    engine, sglang = adapter()
    trainer = Llama(1)
    async with asyncsync.WeightSynchronizer(trainer, [engine], policy="recompute", bucket_size=2048) as synchronizer:
        update = await synchronizer.update_weights()
        assert same(sglang.model, trainer)
        assert [outcome.digest for outcome in update.outcomes] == [update.digest]
        assert update.buckets > 3
        assert in_order(
            sglang.calls,
            "init_weights_update_group",
            "pause retract",
            "begin_weight_update",
            *["update_weights_from_distributed"] * update.buckets,
            "end_weight_update",
            "check_weights",
            "update_weight_version",  # last of all, and before anything is served
            "continue_generation",
        )
        assert "flush_cache" not in sglang.calls  # it went with the last bucket
        assert sglang.label == str(update.version)
        assert not sglang.paused
    assert not sglang.groups


@pytest.mark.asyncio
async def test_a_server_without_sessions() -> None:
    engine, sglang = adapter(**OLDER)
    trainer = Llama(1)
    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        await synchronizer.update_weights()
    assert same(sglang.model, trainer)
    assert not {"begin_weight_update", "end_weight_update"} & set(sglang.calls)


@pytest.mark.asyncio
async def test_an_actor_that_takes_tensors_one_by_one() -> None:
    engine, sglang = adapter(**SLIME)
    trainer = Llama(1)
    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        with pytest.raises(ConnectError, match=r"cannot drain .* only abort: its pause_generation takes no mode"):
            await synchronizer.update_weights()
    async with asyncsync.WeightSynchronizer(trainer, [engine], policy="abort") as synchronizer:
        with pytest.raises(PlanError, match="bucket_size=1"):
            await synchronizer.update_weights()
    async with asyncsync.WeightSynchronizer(trainer, [engine], policy="abort", bucket_size=1) as synchronizer:
        update = await synchronizer.update_weights()
        assert update.outcomes[0].digest is None  # nothing confirms it
        assert same(sglang.model, trainer)
        assert sglang.label == str(update.version)  # with an update of nothing, last of all
        assert sglang.calls[-2:] == ["update_weights_from_distributed", "continue_generation"]
        assert sglang.calls.count("pause abort") == 1
    assert not sglang.session


@pytest.mark.asyncio
async def test_the_label_of_an_actor_with_sessions() -> None:
    engine, sglang = adapter(**SLIME | {"sessions": True})
    for version in (1, 2):
        async with asyncsync.WeightSynchronizer(
            Llama(version), [engine], policy="abort", bucket_size=1
        ) as synchronizer:
            assert (await synchronizer.update_weights()).version == version
        assert sglang.label == str(version)
    update_of_nothing = ["begin_weight_update", "update_weights_from_distributed", "end_weight_update"]
    assert in_order(sglang.calls, "end_weight_update", *update_of_nothing, "continue_generation")
    assert not sglang.session


@pytest.mark.asyncio
async def test_an_actor_that_cannot_be_labelled_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, sglang = adapter(**SLIME | {"labels_in_updates": False})
    sglang.label = "44"
    async with asyncsync.WeightSynchronizer(Llama(1), [engine], policy="abort", bucket_size=1) as synchronizer:
        assert [(await synchronizer.update_weights()).version for _ in range(2)] == [45, 46]
        assert (await engine.describe_engine()).weight_version == 46
    assert sglang.label == "44"
    assert caplog.text.count("cannot be labelled with their version") == 1


@pytest.mark.asyncio
async def test_an_actor_without_sessions_before_an_sglang_that_wants_them() -> None:
    engine, sglang = adapter(**SLIME)
    refusal = {"success": False, "message": NOT_BETWEEN}
    sglang.before["update_weights_from_distributed"] = lambda fields: refusal
    async with asyncsync.WeightSynchronizer(Llama(1), [engine], policy="abort", bucket_size=1) as synchronizer:
        error, state = await state_after(synchronizer.update_weights())
    assert "the actor lacks one of these methods" in str(error)
    assert state is EngineState.UNCHANGED
    assert not sglang.paused


@pytest.mark.asyncio
async def test_aborting_takes_no_second_and_reaches_who_came_late() -> None:
    engine, sglang = adapter()
    async with asyncsync.WeightSynchronizer(Llama(1), [engine], policy="abort") as synchronizer:
        await synchronizer.connect()
        aborted = asyncio.Event()

        async def reader() -> None:
            async with synchronizer.generation():
                await aborted.wait()

        def abort(fields: Mapping[str, Any]) -> None:
            if sglang.calls.count("abort_request") == 3:  # it came late, and is let in before it is aborted
                aborted.set()

        await synchronizer.update_weights()
        sglang.calls.clear()
        sglang.before["abort_request"] = abort
        reading = asyncio.create_task(reader())
        await asyncio.sleep(0)
        await synchronizer.update_weights()
        await reading
    assert "pause abort" not in sglang.calls
    first = sglang.calls.index("abort_request")
    assert sglang.calls[first - 1 : first + 4] == [
        *("pause retract", "abort_request"),
        *("continue_generation", "pause retract", "abort_request"),
    ]
    begun = sglang.calls.index("begin_weight_update")
    assert sglang.calls[begun:].count("continue_generation") == 1


@pytest.mark.asyncio
async def test_draining_waits_and_pauses_again() -> None:
    engine, sglang = adapter()
    sglang.running = True

    async def ends(fields: Mapping[str, Any]) -> Any:
        if fields["names"]:
            return None  # a bucket
        await asyncio.sleep(0)
        sglang.running = False  # it has waited for what is in flight
        return {"success": False, "message": "no such group"}

    sglang.before["update_weights_from_distributed"] = ends
    async with asyncsync.WeightSynchronizer(Llama(1), [engine]) as synchronizer:
        await synchronizer.update_weights()
    asked = [call for call in sglang.calls if call in ("pause in_place", "flush_cache", "continue_generation")]
    assert asked == [
        *("pause in_place", "flush_cache", "continue_generation"),
        *("pause in_place", "flush_cache", "continue_generation"),
    ]


@pytest.mark.asyncio
async def test_a_bucket_that_is_not_loaded_taints() -> None:
    engine, sglang = adapter()
    trainer = Llama(1)
    async with asyncsync.WeightSynchronizer(trainer, [engine], bucket_size=2048) as synchronizer:
        await synchronizer.update_weights()
        sglang.calls.clear()

        def fails(fields: Mapping[str, Any]) -> Any:
            if sglang.calls.count("update_weights_from_distributed") == 3:
                return {"success": False, "message": "planned"}
            return None

        sglang.before["update_weights_from_distributed"] = fails
        error, state = await state_after(synchronizer.update_weights())
        assert isinstance(error, TransferError)
        assert error.bucket == 2
        assert "planned" in str(error)
        assert state is EngineState.TAINTED
        assert sglang.paused
        assert not sglang.session
        assert sglang.label == "1"
        with pytest.raises(TaintedEngineError, match="not received whole"):
            await engine.resume_generation(2**62)
        assert sglang.paused
        engine._record.epoch = 0
        sglang.before.clear()
        await synchronizer.update_weights()
        assert same(sglang.model, trainer)
        assert not sglang.paused


@pytest.mark.asyncio
async def test_success_without_the_weights_is_no_success() -> None:
    engine, sglang = adapter()
    trainer = Llama(1)

    async def flip_a_byte(fields: Mapping[str, Any]) -> None:
        with torch.no_grad():
            sglang.model.get_parameter("model.layers.1.mlp.up_proj.weight").view(torch.uint8)[3, 5] ^= 1

    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        sglang.before["end_weight_update"] = flip_a_byte
        error, state = await state_after(synchronizer.update_weights())
        assert "model.layers.1.mlp.gate_up_proj.weight" in str(error)
        assert "norm" not in str(error)
        assert state is EngineState.TAINTED
        assert sglang.paused
        assert sglang.label == "default"
        assert synchronizer.weight_version is None
        sglang.before.clear()
        await synchronizer.update_weights()
        assert same(sglang.model, trainer)


@pytest.mark.asyncio
async def test_failure_with_the_weights_is_none() -> None:
    engine, sglang = adapter()
    trainer = Llama(1)

    def begins_to_run(fields: Mapping[str, Any]) -> None:
        sglang.running = True  # so that the flush which comes with the last bucket fails

    def has_run(fields: Mapping[str, Any]) -> None:
        sglang.running = False

    sglang.before |= {"begin_weight_update": begins_to_run, "end_weight_update": has_run}
    async with asyncsync.WeightSynchronizer(trainer, [engine], policy="recompute") as synchronizer:
        await synchronizer.update_weights()
    assert same(sglang.model, trainer)
    assert in_order(sglang.calls, "end_weight_update", "flush_cache", "update_weight_version")


@pytest.mark.asyncio
async def test_names_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    engine, sglang = adapter()
    weights: dict[str, Any] = dict(Llama(1).state_dict())
    async with asyncsync.WeightSynchronizer(weights | {"odd": torch.zeros(3)}, [engine]) as synchronizer:
        with pytest.raises(PlanError, match="the engine holds no odd") as refused:
            await synchronizer.update_weights()
        assert refused.value.names == ("odd",)
    del weights["model.layers.0.mlp.down_proj.weight"]
    async with asyncsync.WeightSynchronizer(weights, [engine]) as synchronizer:
        with pytest.raises(PlanError, match=r"nothing is sent for .*layers\.0\.mlp\.down_proj"):
            await synchronizer.update_weights()
    assert not any(call.startswith(("pause", "begin", "update")) for call in sglang.calls)
    async with asyncsync.WeightSynchronizer(weights, [engine], partial=True) as synchronizer:
        await synchronizer.update_weights()


LACKING: dict[str, tuple[str, ...]] = {
    "layers.0.self_attn.q_proj": ("model.layers.0.self_attn.q_proj.weight",),
    "layers.1.mlp.gate_proj": ("model.layers.1.mlp.gate_proj.weight",),
    "v_proj": ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.self_attn.v_proj.weight"),
}


@pytest.mark.parametrize("options", [{}, {"parameter_names": None}], ids=["own rule", "caller's"])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("lack", LACKING)
@pytest.mark.asyncio
async def test_a_part_of_what_the_engine_fuses_is_refused(lack: str, partial: bool, options: dict[str, Any]) -> None:
    if options:
        options = {"parameter_names": lambda name: parameter_of(name, checksums(Llama(), 0, 1))}
    engine, sglang = adapter(**options)
    weights = {name: tensor for name, tensor in Llama(1).state_dict().items() if lack not in name}
    async with asyncsync.WeightSynchronizer(weights, [engine], partial=partial) as synchronizer:
        with pytest.raises(PlanError, match="fused in the engine, and only a part of it is sent") as refused:
            await synchronizer.update_weights()
    assert refused.value.names == LACKING[lack]
    assert all(name in str(refused.value) for name in LACKING[lack])
    assert not any(call.startswith(("pause", "begin", "update")) for call in sglang.calls)


@pytest.mark.asyncio
async def test_whole_fused_groups_alone_and_what_is_fused_in_the_checkpoint() -> None:
    engine, sglang = adapter()
    weights = {name: tensor for name, tensor in Llama(1).state_dict().items() if "layers.1.self_attn" in name}
    async with asyncsync.WeightSynchronizer(weights, [engine], partial=True) as synchronizer:
        await synchronizer.update_weights()
    assert torch.equal(
        sglang.model.state_dict()["model.layers.1.self_attn.q_proj.weight"], weights[next(iter(weights))]
    )
    fused = TensorSpec("a.qkv_proj.weight", torch.float32, (8, 4))
    assert match_names([fused], ["a.qkv_proj.weight"], partial=False).names == ("a.qkv_proj.weight",)


def test_a_tensor_that_is_tied_to_another_of_its_group_is_not_sent_twice() -> None:
    specs = [TensorSpec("a.q_proj.weight", torch.float32, (8, 4))]
    specs += [TensorSpec("a.k_proj.weight", torch.float32, (8, 4), ("a.v_proj.weight",))]
    with pytest.raises(PlanError, match=r"nothing comes as a\.v_proj\.weight"):
        match_names(specs, ["a.qkv_proj.weight"], partial=False)


@pytest.mark.asyncio
async def test_what_is_not_compared_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, sglang = adapter()
    trainer = Llama(1)
    for model in (trainer.model, sglang.model.model):
        model.embed_tokens = nn.Embedding(63, 16)  # SGLang fills it up with rows
    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        for _ in range(2):
            await synchronizer.update_weights()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "SGLangEngine of pretended: not compared after it has loaded: model.embed_tokens.weight"
    ]


@pytest.mark.asyncio
async def test_another_dtype_is_refused_where_the_engine_tells_its_own() -> None:
    engine, sglang = adapter()
    trainer = Llama(1).bfloat16()
    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        with pytest.raises(PlanError, match=r"give the synchronizer dtype=torch\.float32") as refused:
            await synchronizer.update_weights()
    assert "lm_head.weight" in refused.value.names
    assert not any(call.startswith(("pause", "begin", "update")) for call in sglang.calls)
    async with asyncsync.WeightSynchronizer(trainer, [engine], dtype=torch.float32) as synchronizer:
        await synchronizer.update_weights()
    trainer = Llama(2)
    trainer.model.norm.bfloat16()  # one of several is for the checksums to find
    engine, _ = adapter()
    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        with pytest.raises(TransferError, match=r"it holds other weights than were sent: model\.norm\.weight"):
            await synchronizer.update_weights()
    engine, _ = adapter(dtype="auto")
    async with asyncsync.WeightSynchronizer(Llama(1).bfloat16(), [engine]) as synchronizer:
        with pytest.raises(TransferError, match="dtype="):
            await synchronizer.update_weights()


@pytest.mark.asyncio
async def test_a_shape_that_does_not_fit_is_named() -> None:
    engine, sglang = adapter()
    name = "model.layers.1.mlp.down_proj.weight"
    weights = dict(Llama(1).state_dict()) | {name: torch.zeros(16, 40)}
    async with asyncsync.WeightSynchronizer(weights, [engine]) as synchronizer:
        error, state = await state_after(synchronizer.update_weights())
    assert f"{name} (float32 [16, 40])" in str(error)
    assert "norm" not in str(error)
    assert state is EngineState.TAINTED
    async with asyncsync.WeightSynchronizer(Llama(2), [engine]) as synchronizer:
        await synchronizer.update_weights()
        sglang.before["update_weights_from_distributed"] = lambda fields: {"success": False, "message": "planned"}
        error, _ = await state_after(synchronizer.update_weights())
    assert "pretended: SGLang's update_weights_from_distributed: planned (loading lm_head.weight (" in str(error)


@pytest.mark.asyncio
async def test_an_engine_that_does_not_tell_its_names(caplog: pytest.LogCaptureFixture) -> None:
    engine, sglang = adapter()
    sglang.before["check_weights"] = lambda fields: {"success": True, "message": "no ranks in here"}
    async with asyncsync.WeightSynchronizer(Llama(1), [engine]) as synchronizer:
        await synchronizer.update_weights()
    assert "names are not compared" in caplog.text
    assert sglang.calls.count("check_weights") == 1
    assert not (await engine.describe_engine()).checks


@pytest.mark.asyncio
async def test_one_that_joins_waits_for_an_update() -> None:
    trainer, (engine, sglang) = Llama(1), adapter()
    async with asyncsync.WeightSynchronizer(trainer, [asyncsync.ModuleEngine(Llama())]) as synchronizer:
        await synchronizer.update_weights()
        joining = asyncio.create_task(synchronizer.add_engine(engine))
        while not joining.done():
            await synchronizer.update_weights()
            await asyncio.sleep(0.01)
        await joining
        assert same(sglang.model, trainer)


@pytest.mark.asyncio
async def test_names_of_another_kind() -> None:
    engine, _ = adapter(parameter_names=lambda name: name.replace("odd.", "model."))
    fused = {name: tensor for name, tensor in Llama(1).state_dict().items() if "_proj" not in name or "o_proj" in name}
    async with asyncsync.WeightSynchronizer(fused, [engine], partial=True) as synchronizer:
        await synchronizer.update_weights()
    assert not (await engine.describe_engine()).checks
    engine, sglang = adapter(check_names=False)
    sglang.before["update_weights_from_distributed"] = lambda fields: {"success": False, "message": "planned"}
    async with asyncsync.WeightSynchronizer({"odd": torch.zeros(3)}, [engine]) as synchronizer:
        with pytest.raises(TransferError, match="planned"):
            await synchronizer.update_weights()


@pytest.mark.asyncio
async def test_an_engine_whose_label_changed_is_another_one() -> None:
    engine, sglang = adapter()
    trainer = Llama(1)
    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        await synchronizer.update_weights()
        before = await engine.describe_engine()
        assert before.weight_version == 1
        sglang.restart()
        after = await engine.describe_engine()
        assert after.instance != before.instance
        assert after.weight_version is None
        assert after.tainted is not None
        assert "restarted, or updated by another" in after.tainted
        assert after.connections == ()
        update = await synchronizer.update_weights()  # connects it anew
        assert update.version == 2
        assert same(sglang.model, trainer)


@pytest.mark.asyncio
async def test_an_engine_restarted_between_updates_is_found_out_by_the_next() -> None:
    engine, sglang = adapter()
    trainer = Llama(1)
    async with asyncsync.WeightSynchronizer(trainer, [engine]) as synchronizer:
        await synchronizer.update_weights()
        sglang.restart()
        assert (await synchronizer.update_weights()).version == 2
        sglang.restart(label="2")  # the label lies, but the group is gone
        assert (await synchronizer.update_weights()).version == 3
        assert same(sglang.model, trainer)


@pytest.mark.asyncio
async def test_the_version_goes_on_from_the_label() -> None:
    engine, sglang = adapter()
    sglang.label = "41"
    async with asyncsync.WeightSynchronizer(Llama(1), [engine]) as synchronizer:
        assert (await synchronizer.update_weights()).version == 42
    assert sglang.label == "42"


@pytest.mark.asyncio
async def test_a_session_that_was_left_open_is_ended() -> None:
    engine, sglang = adapter()
    sglang.session = True
    async with asyncsync.WeightSynchronizer(Llama(1), [engine]) as synchronizer:
        await synchronizer.update_weights()
    assert in_order(sglang.calls, "begin_weight_update", "end_weight_update", "begin_weight_update")


@pytest.mark.asyncio
async def test_an_engine_that_waits_for_bytes_is_told_that_none_will_come() -> None:
    engine, sglang = adapter()
    trainer = Llama(1)
    async with asyncsync.WeightSynchronizer(trainer, [engine], bucket_size=2048) as synchronizer:
        await synchronizer.update_weights()
        asked, receive = asyncio.Event(), sglang._update_weights_from_distributed

        async def waits(**fields: Any) -> Any:
            asked.set()
            return await receive(**fields)

        sglang._update_weights_from_distributed = waits  # type: ignore[method-assign, assignment]
        assert synchronizer._own_trainer is not None
        sender = synchronizer._own_trainer._sender.worker  # busy, so that the source does not begin
        go_on = threading.Event()
        busy = sender.submit(go_on.wait)
        update = asyncio.create_task(synchronizer.update_weights())
        await asked.wait()
        update.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)
        await asyncio.wait([update])
        assert busy.result(60)
        assert not sglang.session, "it was not left waiting for the next update's bytes"
        await synchronizer.update_weights()
        assert same(sglang.model, trainer)


@pytest.mark.asyncio
async def test_late_calls_change_nothing() -> None:
    engine, sglang = adapter()
    async with asyncsync.WeightSynchronizer(Llama(1), [engine]) as synchronizer:
        await synchronizer.update_weights()
        sglang.calls.clear()
        for call in (
            engine.pause_generation(1, "drain"),
            engine.resume_generation(1),
            engine.abort_weight_update(1, None),
            engine.compare_checksums(1, {}),
        ):
            with pytest.raises(OutOfStepError):
                await call
        assert sglang.calls == []


@pytest.mark.asyncio
async def test_an_engine_that_does_not_join_is_let_go() -> None:
    engine, sglang = adapter()
    ended = asyncio.Event()

    async def refuses(fields: Mapping[str, Any]) -> Any:
        ended.set()
        return {"success": False, "message": "planned"}

    sglang.before["init_weights_update_group"] = refuses
    async with asyncsync.WeightSynchronizer(Llama(1), [engine]) as synchronizer:
        with pytest.raises(ConnectError, match="planned"):
            await synchronizer.update_weights()
        sglang.before.clear()
        await synchronizer.update_weights()
    assert ended.is_set()
    assert not sglang.groups


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tensor_parallel_size": None}, "give tp_size"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
@pytest.mark.asyncio
async def test_engines_that_cannot_receive(facts: Mapping[str, Any], message: str) -> None:
    engine, _ = adapter(**facts)
    with pytest.raises(ConnectError, match=message):
        await engine.describe_engine()


@pytest.mark.parametrize(
    ("facts", "policies"),
    [
        ({}, ("drain", "abort", "recompute")),
        ({"radix_cache": False}, ("drain", "abort", "recompute")),
        ({"radix_cache": False, "overlap_schedule": False}, ("drain", "abort", "recompute", "continue")),
        ({"timed_flush": False}, ("abort", "recompute")),
        ({"pause_modes": ("abort",)}, ("abort",)),
    ],
)
def test_policies(facts: Mapping[str, Any], policies: tuple[Policy, ...]) -> None:
    can, cannot = abilities(known(**facts))
    assert can == policies
    assert set(can) | set(cannot) == {"drain", "abort", "recompute", "continue"}


def known(**facts: Any) -> SGLangFacts:
    return PretendedSGLang(**facts).facts


# -- names and checksums ----------------------------------------------------------------------------------------------


def specs_of(model: nn.Module) -> list[TensorSpec]:
    return [TensorSpec(name, each.dtype, tuple(each.shape)) for name, each in model.named_parameters()]


def summed(model: nn.Module, parts: Sequence[ChecksumPart]) -> str:
    pieces = []
    for part in parts:
        tensor = model.get_parameter(part.name).detach()
        pieces.append(tensor if part.block is None else part.block.of(tensor, (0,) * tensor.ndim))
    flat = torch.cat([piece.contiguous().view(-1).view(torch.uint8) for piece in pieces])
    return hashlib.sha256(bytes(flat.numpy())).hexdigest()[:16]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checksums_are_of_what_each_rank_holds(ranks: int) -> None:
    model, specs = Llama(1), specs_of(Llama(1))
    held = [checksums(model, rank, ranks) for rank in range(ranks)]
    targets = match_names(specs, set(held[0]), partial=False)
    sent = {
        key_of(rank, way, parameter): summed(model, parts)
        for parameter, sources in targets.sources.items()
        for rank in range(ranks)
        for way, parts in enumerate(parts_of(parameter, [specs[index] for index in sources], rank, ranks))
    }
    assert {key.split("/", 2)[2] for key in sent} == set(held[0])
    assert differing(sent, sent, held) == []
    other = [checksums(Llama(2), rank, ranks) for rank in range(ranks)]
    assert len(differing(sent, sent, other)) == ranks * len(held[0])
    assert len(differing(sent, {}, held)) == ranks * len(held[0])


def test_few_heads_are_held_by_several_ranks() -> None:
    specs = [TensorSpec(f"a.{kind}_proj.weight", torch.float32, (8, 4)) for kind in "qkv"]
    ways = parts_of("a.qkv_proj.weight", specs, rank=3, ranks=4)
    rows = [[(part.block.start[0], part.block.shape[0]) for part in way if part.block] for way in ways]
    assert rows == [
        [(6, 2), (6, 2), (6, 2)],  # four heads of keys
        [(6, 2), (4, 4), (4, 4)],  # two
        [(6, 2), (0, 8), (0, 8)],  # one
    ]


def test_what_no_rule_covers_is_not_compared() -> None:
    odd = TensorSpec("lm_head.weight", torch.float32, (50257, 4))  # is filled up with rows
    assert parts_of("lm_head.weight", [odd], 0, 1) == ()
    unknown = TensorSpec("a.mixer.weight", torch.float32, (8, 4))
    assert parts_of("a.mixer.weight", [unknown], 0, 1) != ()
    assert parts_of("a.mixer.weight", [unknown], 0, 2) == ()
    q_alone = TensorSpec("a.q_proj.weight", torch.float32, (8, 4))
    assert parts_of("a.qkv_proj.weight", [q_alone], 0, 1) == ()


def test_tied_tensors() -> None:
    tied = TensorSpec("lm_head.weight", torch.float32, (64, 4), ("model.embed_tokens.weight",))
    assert match_names([tied], ["model.embed_tokens.weight"], partial=False).names == ("model.embed_tokens.weight",)
    with pytest.raises(PlanError, match="one tensor at the trainer, and several parameters"):
        match_names([tied], ["model.embed_tokens.weight", "lm_head.weight"], partial=False)


def test_a_draft_models_parameters_need_not_be_sent() -> None:
    specs = [TensorSpec("a.weight", torch.float32, (4,)), TensorSpec("fc.weight", torch.float32, (4,))]
    targets = match_names(specs, ["a.weight", "draft.fc.weight", "draft.a.weight"], partial=False)
    assert targets.names == ("a.weight", "fc.weight")
