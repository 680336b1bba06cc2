"""What differs is found bit by bit, and applied exactly or not at all."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncsync.baseline import Baseline
from asyncsync.buckets import Bucket, Plan, TensorSpec, plan_buckets
from asyncsync.deltas import Changes, Grain, Renewal, Run, apply, grain_of, read
from asyncsync.errors import TransferError
from asyncsync.packing import arena_views, pack
from asyncsync.sending import OwnTensors
from asyncsync.transports.changes_file import changes_head, read_parcels
from asyncsync.transports.envelopes import Content
from asyncsync.weight_files import Run as FileRun
from tests.sample import DTYPES, content, random_bytes, random_tensor

SHAPES = ((), (1,), (3,), (7, 5), (64,), (2, 0), (40, 33))


def scratch(nbytes: int) -> Tensor:
    """Memory full of what was there before."""
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def renew(plan: Plan, bucket: Bucket, tensors: Sequence[Tensor], base: Tensor) -> Renewal:
    """Make a bucket equal to new tensors."""
    renewal = Renewal(grain_of(plan, bucket), base)
    for start, part in OwnTensors(plan, tensors).parts(bucket, scratch):
        renewal.take(start, part)
    return renewal


def of_width(width: int, elements: int) -> Grain:
    """A bucket of one run."""
    return Grain(elements * width, (Run(0, elements * width, width),), elements, 0)


def message_of(grain: Grain, new: Tensor, base: Tensor) -> tuple[Changes, Tensor]:
    """The message that makes one bucket equal to another, which it is made here."""
    renewal = Renewal(grain, base)
    renewal.take(0, new)
    changes = renewal.changes()
    assert changes is not None
    return changes, changes.write(torch.empty(changes.nbytes, dtype=torch.uint8))


def differing(old: Tensor, new: Tensor) -> int:
    """How many elements of two tensors differ, one by one; those of 16 bytes count as two."""
    width = min(old.dtype.itemsize, 8)
    ours, theirs = content(old), content(new)
    return sum(ours[at : at + width] != theirs[at : at + width] for at in range(0, len(ours), width))


@settings(deadline=None)  # a loaded machine is no failure
@given(
    tensors=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=8),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    bucket_size=st.sampled_from([64, 512, 2**20]),
    strided=st.booleans(),
    whole_tensors=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_what_differs_makes_old_tensors_equal_to_new_ones(
    tensors: list[tuple[torch.dtype, tuple[int, ...]]],
    density: float,
    bucket_size: int,
    strided: bool,
    whole_tensors: bool,
    seed: int,
) -> None:
    specs = [TensorSpec(str(index), dtype, shape) for index, (dtype, shape) in enumerate(tensors)]
    plan = plan_buckets(specs, bucket_size, whole_tensors=whole_tensors)
    random = np.random.default_rng(seed)
    old = [random_tensor(dtype, shape, seed + index) for index, (dtype, shape) in enumerate(tensors)]
    new = [tensor.clone() for tensor in old]
    for tensor in new:
        flat = tensor.view(-1).view(torch.uint8).numpy()
        flat[random.random(len(flat)) < density] ^= 1  # bools stay bools
    given_ = [tensor.t().contiguous().t() if strided and tensor.ndim == 2 else tensor for tensor in new]
    base = torch.zeros(plan.arena_nbytes, dtype=torch.uint8)
    for bucket in plan.buckets:
        pack(plan, bucket, old, base[bucket.start : bucket.stop])
    held = base.clone()
    found = sent = 0
    for bucket in plan.buckets:
        place, theirs = base[bucket.start : bucket.stop], held[bucket.start : bucket.stop]
        before = place.clone()
        renewal = renew(plan, bucket, given_, place)
        found += renewal.count
        changes = renewal.changes()
        if changes is None:
            theirs.copy_(place)
            continue
        sent += changes.nbytes
        assert changes.count == 0 or changes.nbytes < bucket.nbytes
        if changes.count:
            message = changes.write(torch.empty(changes.nbytes, dtype=torch.uint8))
            apply(message, grain_of(plan, bucket).runs, theirs)
            back = changes.write(torch.empty(changes.nbytes, dtype=torch.uint8), back=True)
            undone = place.clone()
            apply(back, grain_of(plan, bucket).runs, undone)
            assert torch.equal(undone, before)
    for arena in (base, held):
        assert [content(view) for view in arena_views(plan, arena)] == [content(tensor) for tensor in new]
    assert found == sum(map(differing, old, new))
    assert density > 0 or sent == 0


@pytest.mark.parametrize(("gap", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4)])
def test_gaps_have_the_smallest_width_that_fits(gap: int, width: int) -> None:
    grain = of_width(2, 200_000)
    base = random_bytes(grain.nbytes, 1)
    new = base.clone()
    new.view(torch.int16)[[3, 3 + gap + 1]] ^= 1
    _, message = message_of(grain, new, base.clone())
    assert struct.unpack_from("<QQ", message.numpy().tobytes()) == (2, width)
    apply(message, grain.runs, base)
    assert torch.equal(base, new)


def test_zeros_of_both_signs_differ_and_the_same_nan_does_not() -> None:
    base = torch.tensor([0.0, float("nan"), 1.0, 2.0] * 8)
    new = base.clone()
    new[0] = -0.0
    changes, message = message_of(of_width(4, 32), new.view(torch.uint8), base.view(torch.uint8))
    assert changes.count == 1
    assert read(message, of_width(4, 32).runs)[0].places.tolist() == [0]


def test_a_bucket_of_which_too_much_differs_is_renewed_all_the_same() -> None:
    grain = of_width(2, 500_000)
    base, new = random_bytes(grain.nbytes, 1), random_bytes(grain.nbytes, 2)
    expected = int((base.view(torch.int16) != new.view(torch.int16)).sum())
    renewal = Renewal(grain, base)
    renewal.take(0, new[:600_000])
    renewal.take(600_000, new[600_000:])
    assert renewal.changes() is None
    assert torch.equal(base, new)
    assert renewal.count == expected


SOUND = of_width(2, 1000)


def sound_message() -> tuple[Tensor, Tensor]:
    """A bucket, and a message for it."""
    base = random_bytes(SOUND.nbytes, 1)
    new = base.clone()
    new.view(torch.int16)[5::50] ^= 3
    return base, message_of(SOUND, new, base.clone())[1]


@settings(deadline=None)
@given(data=st.data())
def test_a_corrupt_message_is_an_error_or_stays_inside(data: st.DataObject) -> None:
    base, message = sound_message()
    corrupt = bytearray(message.numpy().tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        corrupt[data.draw(st.integers(0, len(corrupt) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(corrupt)))
    if data.draw(st.booleans()):
        del corrupt[cut:]
    memory = torch.full((3 * SOUND.nbytes,), 7, dtype=torch.uint8)
    memory[SOUND.nbytes : 2 * SOUND.nbytes] = base
    try:
        apply(torch.tensor(list(corrupt), dtype=torch.uint8), SOUND.runs, memory[SOUND.nbytes : 2 * SOUND.nbytes])
    except TransferError:
        assert torch.equal(memory[SOUND.nbytes : 2 * SOUND.nbytes], base), "nothing was written"
    assert (memory[: SOUND.nbytes] == 7).all()
    assert (memory[2 * SOUND.nbytes :] == 7).all()


@settings(deadline=None)
@given(
    contents=st.lists(st.sampled_from([(Content.NOTHING, 0), (Content.DELTA, 40), (Content.WHOLE, 64)]), min_size=3),
    data=st.data(),
)
def test_a_corrupt_file_of_changes_is_an_error_or_leads_to_its_end(
    contents: list[tuple[Content, int]], data: st.DataObject
) -> None:
    plan = plan_buckets([TensorSpec("w", torch.uint8, (64 * len(contents),))], 64)
    head, body = changes_head(plan, 7, {}), bytearray()
    for kind, nbytes in contents:
        body += struct.pack("<QQ", kind, nbytes) + bytes(nbytes if kind is Content.DELTA else 0)
    sound = bytes(body)
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    fd = os.memfd_create("changes")
    os.write(fd, head + body)
    try:
        parcels = list(read_parcels(fd, head, plan, 1))
    except TransferError:
        assert body != sound
    else:
        messages = [parcel for parcel in parcels if isinstance(parcel, FileRun)]
        assert sum(parcel in plan.buckets for parcel in parcels) + len(messages) <= len(plan.buckets)
        assert 16 * len(plan.buckets) + sum(stop for run in messages for _, stop in run.spans) == len(body)
        assert all(16 <= run.start < len(body) and 0 < run.spans[0][1] < 64 for run in messages)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (0, 1001, "1001 elements of 1000"),
        (0, 21, "ends in the middle|all it has to say"),
        (8, 3, "gaps of 3 bytes"),
        (8, 8, "ends in the middle"),
    ],
)
def test_a_message_that_speaks_of_too_much_says_so(at: int, value: int, what: str) -> None:
    base, message = sound_message()
    message[at : at + 8] = torch.tensor(list(value.to_bytes(8, "little")), dtype=torch.uint8)
    with pytest.raises(TransferError, match=what):
        apply(message, SOUND.runs, base)


def test_a_message_whose_gaps_lead_out_says_so() -> None:
    base, message = sound_message()
    message[-24:-8] = 255
    with pytest.raises(TransferError, match="more than the 1000 elements"):
        apply(message, SOUND.runs, base)


def test_gaps_of_eight_bytes_cannot_lead_out_by_overflowing() -> None:
    head = struct.pack("<QQ", 2, 8)
    body = struct.pack("<HHxxxx", 1, 2) + struct.pack("<QQ", 2**63 + 1, 2**63 + 4)
    message = torch.tensor(list(head + body), dtype=torch.uint8)
    with pytest.raises(TransferError, match="more than the 1000 elements"):
        apply(message, SOUND.runs, random_bytes(SOUND.nbytes, 1))


def test_what_changed_is_cut_to_a_part() -> None:
    base, message = sound_message()
    (changed,) = read(message, SOUND.runs)
    part = base[200:400].clone()
    changed.within(200, 400).write(part)
    apply(message, SOUND.runs, base)
    assert torch.equal(part, base[200:400])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_on_a_device_torch_writes_the_same(width: int) -> None:
    grain = of_width(width, 1000)
    base = random_bytes(grain.nbytes, 1)
    new = base.clone()
    new[::97] ^= 0x80
    _, message = message_of(grain, new, base.clone())
    read(message, grain.runs)[0].write_on_device(base)
    assert torch.equal(base, new)


# -- what a source holds ----------------------------------------------------------------------------------------------


class Held:
    """Tensors, and a baseline that takes them."""

    def __init__(self) -> None:
        self.plan = plan_buckets([TensorSpec(str(index), torch.bfloat16, (500,)) for index in range(4)], 2000)
        self.tensors = [random_tensor(torch.bfloat16, (500,), index) for index in range(4)]
        self.base = Baseline()

    def take(self, epoch: int, against: int | None, *, stop_in: int | None = None) -> None:
        """Take what the tensors are now; or begin to."""
        base = self.base
        base.begin(self.plan, against)
        for bucket in self.plan.buckets:
            place = base.place(bucket)
            if not base.compares:
                pack(self.plan, bucket, self.tensors, place)
                continue
            renewal = renew(self.plan, bucket, self.tensors, place)
            base.note(bucket, renewal.changes())
            if bucket.index == stop_in:
                return
        base.end(epoch)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the baseline has exactly these bytes."""
        views = arena_views(self.plan, self.base._memory)
        return [content(view) for view in views] == [content(tensor) for tensor in tensors]

    def step(self, *, all_of: bool = False) -> list[Tensor]:
        """Change the tensors; what they were."""
        before = [tensor.clone() for tensor in self.tensors]
        for tensor in self.tensors:
            tensor.view(torch.int16)[:: 1 if all_of else 20] ^= 1
        return before


def test_an_update_that_was_not_ended_is_taken_back() -> None:
    held = Held()
    held.take(1, None)
    assert held.base.epochs_of(held.plan) == (1,)
    before = held.step()
    held.take(2, 1, stop_in=1)
    assert held.base.epochs_of(held.plan) == (1,)
    held.base.begin(held.plan, 1)
    assert held.holds(before)


def test_an_update_that_was_ended_and_then_failed_can_still_be_taken_back() -> None:
    held = Held()
    held.take(1, None)
    before = held.step()
    held.take(2, 1)
    assert held.base.epochs_of(held.plan) == (2, 1)
    assert held.holds(held.tensors)
    held.base.begin(held.plan, 1)
    assert held.holds(before)
    assert held.base.epochs_of(held.plan) == (1,)


def test_what_was_sent_whole_cannot_be_taken_back() -> None:
    held = Held()
    held.take(1, None)
    held.step(all_of=True)
    held.take(2, 1, stop_in=0)
    assert held.base.epochs_of(held.plan) == ()
    held.take(3, None)
    assert held.base.epochs_of(held.plan) == (3,)
    assert held.holds(held.tensors)


def test_another_layout_is_held_anew() -> None:
    held = Held()
    held.take(1, None)
    other = plan_buckets([TensorSpec("w", torch.int8, (9,))])
    assert held.base.epochs_of(held.plan) == (1,)
    assert held.base.epochs_of(other) == ()
    held.base.begin(other, None)
    assert held.base.epochs_of(other) == held.base.epochs_of(held.plan) == ()


def test_comparing_lets_other_threads_run() -> None:
    """Else a loop would stand still while a large bucket is compared."""
    grain = of_width(2, 2**25)
    base = torch.zeros(grain.nbytes, dtype=torch.uint8)
    renewal, done = Renewal(grain, base), threading.Event()

    def compare() -> None:
        renewal.take(0, torch.zeros(grain.nbytes, dtype=torch.uint8))
        done.set()

    thread = threading.Thread(target=compare)
    thread.start()
    times = 0
    while not done.wait(0.0005):
        times += 1
    thread.join()
    assert times >= 2
