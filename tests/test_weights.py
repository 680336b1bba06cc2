"""Reading weights: what is accepted, what is refused, and by which name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncsync.buckets import plan_buckets
from asyncsync.digests import StreamingDigests
from asyncsync.errors import PlanError
from asyncsync.packing import is_dense, pack, pack_and_hash
from asyncsync.weights import WeightSource
from tests.sample import Zoo


def names(weights: Any, **options: Any) -> list[str]:
    return [name for spec in WeightSource(weights).read(**options).specs for name in spec.names]


def linear() -> nn.Linear:
    return nn.Linear(2, 3)


SOURCES: dict[str, Callable[[nn.Linear], Any]] = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "pairs": lambda module: list(module.named_parameters()),
    "iterator": lambda module: module.named_parameters(),
    "function": lambda module: module.named_parameters,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_live_tensors_update_after_update(kind: str) -> None:
    module = linear()
    source = WeightSource(SOURCES[kind](module))
    for _ in range(2):
        snapshot = source.read()
        assert [spec.name for spec in snapshot.specs] == ["weight", "bias"]
        assert snapshot.tensors[0].data_ptr() == module.weight.data_ptr()
        assert not snapshot.tensors[0].requires_grad


def test_a_function_is_asked_anew() -> None:
    made: list[Tensor] = []

    def make() -> dict[str, Tensor]:
        made.append(torch.full((1,), len(made)))
        return {"a": made[-1]}

    source = WeightSource(make)
    assert [source.read().tensors[0].item() for _ in range(3)] == [0, 1, 2]


def test_tied_weights_are_one_tensor_with_every_name() -> None:
    snapshot = WeightSource(Zoo()).read()
    tied = [spec for spec in snapshot.specs if spec.aliases]
    assert [spec.names for spec in tied] == [("weight", "tied")]
    assert "scratch" not in [spec.name for spec in snapshot.specs]


def test_views_of_one_memory_that_differ_are_tensors_of_their_own() -> None:
    base = torch.randn(4, 4)
    snapshot = WeightSource({"a": base, "b": base.t(), "c": base[:2], "d": base}).read()
    assert [spec.names for spec in snapshot.specs] == [("a", "d"), ("b",), ("c",)]


def test_empty_tensors_are_never_tied() -> None:
    assert names({"a": torch.empty(0), "b": torch.empty(0)}) == ["a", "b"]
    assert not WeightSource({"a": torch.empty(0), "b": torch.empty(0)}).read().specs[0].aliases


def test_name_map_renames_and_leaves_out() -> None:
    renames = {"weight": "model.weight", "bias": None}
    assert names(linear(), name_map=renames.get) == ["model.weight"]


def test_name_map_that_makes_duplicates_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="duplicate names in the weights: same"):
        names(linear(), name_map=lambda name: "same")


def test_duplicate_names_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"duplicate names in the weights: a$") as caught:
        names([("a", torch.zeros(1)), ("b", torch.zeros(1)), ("a", torch.ones(1))])
    assert caught.value.names == ("a",)


def test_dtype_converts_floating_point_only() -> None:
    specs = WeightSource({"f": torch.zeros(1), "i": torch.zeros(1, dtype=torch.int64)}).read(dtype=torch.bfloat16).specs
    assert [spec.dtype for spec in specs] == [torch.bfloat16, torch.int64]


def test_state_that_is_no_tensor_of_the_module_is_left_out() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            del state

    assert names(WithExtra(2, 3)) == ["weight", "bias"]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(2, device="meta"), "meta device"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "no tensor": (lambda: 3.0, "not a tensor but float"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_sent_is_refused_by_name(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(PlanError, match=reason) as caught:
        names({"fine": torch.zeros(1), "odd.weight": make()})
    assert caught.value.names == ("odd.weight",)
    assert "odd.weight" in str(caught.value)


def test_what_is_no_weights_at_all_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="not int"):
        WeightSource(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="pairs"):
        names([torch.zeros(1)])


def test_the_same_memory_read_as_other_values_is_not_tied() -> None:
    tensor = torch.complex(torch.arange(3.0), torch.ones(3))
    snapshot = WeightSource({"a": tensor, "b": tensor.conj(), "c": tensor.imag, "d": tensor.conj().imag}).read()
    assert [spec.aliases for spec in snapshot.specs] == [(), (), (), ()]


def _moved(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.clone()


def _converted(module: nn.Linear) -> None:
    module.half()


def _replaced(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.zeros(5, 2))


def _tied(module: nn.Linear) -> None:
    module.bias.data = module.weight.data[:, 0]
    module.weight.data = module.bias.data


def _renamed(module: nn.Linear) -> None:
    module.register_parameter("scale", module.bias)
    del module.bias


def _restrided(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.as_strided(module.weight.shape, (1, module.weight.shape[0]))


def _negated(module: nn.Linear) -> None:
    module.weight.data = torch._neg_view(module.weight.data)


@pytest.mark.parametrize("change", [_moved, _converted, _replaced, _tied, _renamed, _restrided, _negated])
def test_what_changed_since_the_last_reading_is_found(change: Callable[[nn.Linear], None]) -> None:
    module = linear()
    source = WeightSource(module)
    source.read()
    change(module)
    again, anew = source.read(), WeightSource(module).read()
    assert again.specs == anew.specs
    assert [tensor.data_ptr() for tensor in again.tensors] == [tensor.data_ptr() for tensor in anew.tensors]
    assert list(again.dense) == list(map(is_dense, again.specs, again.tensors))
    assert all(not tensor.requires_grad for tensor in again.tensors)


@pytest.mark.parametrize("nbytes", [1000, 200_000])
def test_memory_that_is_moved_between_reading_and_copying_is_read_where_it_is(nbytes: int) -> None:
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    snapshot = WeightSource({"a": tensor}).read()
    tensor.untyped_storage().share_memory_()  # as putting it on a queue of torch.multiprocessing does
    tensor.fill_(2)
    plan = plan_buckets(snapshot.specs)
    packed, hashed = (torch.zeros(plan.arena_nbytes, dtype=torch.uint8) for _ in range(2))
    pack(plan, plan.buckets[0], snapshot.tensors, packed, snapshot.dense)
    pack_and_hash(plan, plan.buckets[0], snapshot.tensors, hashed, snapshot.dense, StreamingDigests(1))
    assert torch.equal(packed[:nbytes], tensor)
    assert torch.equal(hashed[:nbytes], tensor)


def test_what_cannot_be_sent_any_more_is_refused_by_name() -> None:
    weights = {"a": torch.zeros(2), "b": torch.zeros(2)}
    source = WeightSource(weights)
    source.read()
    weights["b"] = torch.zeros(2, device="meta")
    with pytest.raises(PlanError, match="b: on the meta device"):
        source.read()


def test_a_parameter_that_is_none_makes_no_weight_of_state_that_is_none() -> None:
    class Quiet(nn.Linear):
        def get_extra_state(self) -> None:
            return None

        def set_extra_state(self, state: None) -> None:
            pass

    assert names(Quiet(2, 3, bias=False)) == ["weight"]
