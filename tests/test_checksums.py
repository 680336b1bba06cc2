"""Checksums of what is sent, for engines that can tell what they have loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync import WeightSynchronizer
from asyncsync.buckets import TensorSpec, plan_buckets
from asyncsync.checksums import Witness, checksum
from asyncsync.messages import ChecksumPart, Checksums, EngineStatus
from asyncsync.packing import pack
from asyncsync.shards import Block
from tests.engines import change


def sha(*tensors: Tensor) -> str:
    """The checksum, told in another way."""
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


@pytest.mark.parametrize("bucket_size", [64, 1 << 20], ids=["many buckets", "one bucket"])
def test_parts_of_tensors_are_hashed_in_the_order_asked_for_whatever_order_they_come_in(bucket_size: int) -> None:
    tensors = {
        "a": torch.randn(4, 6),
        "b": torch.randn(2, 6),
        "empty": torch.empty(0, 6),
        "c": torch.arange(5, dtype=torch.int64),
        "one": torch.tensor(2.5),
    }
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    plan = plan_buckets(specs, bucket_size, whole_tensors=True)
    wanted: Checksums = {
        "in order": (ChecksumPart("a"), ChecksumPart("b")),
        "turned round": (ChecksumPart("one"), ChecksumPart("c"), ChecksumPart("empty"), ChecksumPart("a")),
        "rows": (ChecksumPart("a", Block((2, 0), (2, 6))), ChecksumPart("b", Block((1, 0), (1, 6)))),
        "columns": (ChecksumPart("a", Block((0, 3), (4, 3))),),
        "twice": (ChecksumPart("b"), ChecksumPart("b")),
        "unknown": (ChecksumPart("a"), ChecksumPart("z")),
    }
    witness = Witness(plan, wanted)
    for bucket in plan.buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        pack(plan, bucket, list(tensors.values()), buffer)
        witness.add(bucket, buffer)
    a, b = tensors["a"], tensors["b"]
    assert witness.result() == {
        "in order": sha(a, b),
        "turned round": sha(tensors["one"], tensors["c"], a),
        "rows": sha(a[2:], b[1:]),
        "columns": sha(a[:, 3:]),
        "twice": sha(b, b),
    }
    assert checksum([a, b]) == sha(a, b)


class Checking(asyncsync.ModuleEngine):
    """A module engine that compares, as one that loads by itself would."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.compared: list[Mapping[str, str]] = []

    async def describe_engine(self) -> EngineStatus:
        from dataclasses import replace

        return replace(await super().describe_engine(), whole_tensors=True, checks=True)

    async def wanted_checksums(self) -> Checksums:
        return {"all": tuple(ChecksumPart(name) for name in self.module.state_dict())}

    async def compare_checksums(self, epoch: int, checksums: Mapping[str, str]) -> None:
        self.compared.append(checksums)
        if checksums != {"all": checksum(list(self.module.state_dict().values()))}:
            self._asyncsync.record.taint("what it holds is not what was sent", frozenset(self.module.state_dict()))
            raise asyncsync.TransferError("what it holds is not what was sent")


@pytest.mark.asyncio
async def test_engines_compare_what_they_have_loaded_before_the_version_is_published() -> None:
    model = nn.Linear(5, 3)
    engines = [Checking(nn.Linear(5, 3)), Checking(nn.Linear(5, 3)), asyncsync.ModuleEngine(nn.Linear(5, 3))]
    async with WeightSynchronizer(model, engines) as synchronizer:
        for _ in range(2):
            change(model)
            await synchronizer.update_weights()
    assert [len(engine.compared) for engine in engines[:2]] == [2, 2]
    assert engines[0].compared == engines[1].compared
    assert engines[0].compared[0] != engines[0].compared[1]


@pytest.mark.asyncio
async def test_an_engine_that_holds_other_bytes_is_tainted_and_the_next_update_repairs_it() -> None:
    class Wrong(Checking):
        async def finish_weight_update(self, order: asyncsync.UpdateOrder) -> None:
            await super().finish_weight_update(order)
            if order.version == 2:
                with torch.no_grad():
                    self.module.state_dict()["bias"].add_(1)

    model = nn.Linear(5, 3)
    engines = [Wrong(nn.Linear(5, 3)), Checking(nn.Linear(5, 3))]
    async with WeightSynchronizer(model, engines) as synchronizer:
        await synchronizer.update_weights()
        change(model)
        with pytest.raises(asyncsync.TransferError, match=r"Wrong-0.*not what was sent") as caught:
            await synchronizer.update_weights()
        assert caught.value.phase == "check"
        assert [str(outcome.state) for outcome in caught.value.outcomes] == ["tainted", "updated"]
        assert synchronizer.ready_engines == (engines[1],)
        update = await synchronizer.update_weights()
        assert update.version == 3
        assert len(synchronizer.ready_engines) == 2
