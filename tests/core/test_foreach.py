"""In-place writes take one call for all leaves where they can, and must not lose gradients or batching by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensordict import MemoryMappedTensor, TensorDict
from tensordict.core import foreach

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "update_": lambda td, new: td.update_(new),
    "update_ by key": lambda td, new: td.set_("a", new["a"]).set_(("b", "c"), new["b", "c"]),
    "update(inplace)": lambda td, new: td.update(new, inplace=True),
    "apply_": lambda td, new: td.apply_(lambda _, value: value, new),
    "assignment": lambda td, new: td.__setitem__(slice(None), new),
    "assignment by tensor": lambda td, new: td.__setitem__(torch.arange(3), new),
    "update_at_": lambda td, new: td.update_at_(new, slice(0, 3)),
}


def _zeros() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}}, [3])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_gradients_flow_through_in_place_writes(write: Callable[[Any, Any], Any]) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    td = _zeros()
    write(td, TensorDict({"a": weight * torch.ones(3, 2), "b": {"c": weight * torch.ones(3)}}, [3]))
    (td["a"].sum() + td["b", "c"].sum()).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 9


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_overwriting_what_has_a_history_cuts_its_gradient(write: Callable[[Any, Any], Any]) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    td = _zeros().apply(lambda leaf: leaf + weight)
    assert td is not None
    write(td, _zeros())
    (td["a"].sum() + td["b", "c"].sum() + 0 * weight).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 0


@pytest.mark.parametrize("write", ["update_", "apply_", "assignment"])
def test_in_place_writes_under_vmap(write: str) -> None:
    def fill(row: torch.Tensor) -> torch.Tensor:
        td = TensorDict({"a": torch.zeros_like(row), "b": torch.zeros_like(row)}, row.shape)
        new = TensorDict({"a": row, "b": row + 1}, row.shape)
        WRITES[write](td, new)
        return td["a"] + td["b"]

    rows = torch.arange(6.0).view(2, 3)
    assert torch.vmap(fill)(rows).equal(2 * rows + 1)


def test_clone_under_vmap() -> None:
    rows = torch.arange(6.0).view(2, 3)
    assert torch.vmap(lambda row: TensorDict(a=row, b=row).clone()["b"])(rows).equal(rows)


def test_usable_for_plain_tensors_and_parameters_only() -> None:
    assert foreach.usable([torch.zeros(1), torch.zeros(2, dtype=torch.int)])
    assert foreach.usable([torch.zeros(1), torch.nn.Parameter(torch.zeros(1))])
    assert not foreach.usable([torch.zeros(1), MemoryMappedTensor.zeros(1)])
    assert not foreach.usable([])


@pytest.mark.parametrize("shape", [(3, 1), (2,), (1,), ()])
def test_in_place_writes_broadcast_as_copy_does(shape: tuple[int, ...]) -> None:
    value = torch.full(shape, 2.0)
    assert _zeros().set_("a", value)["a"].sum() == 12
    assert _zeros().update_({"a": value})["a"].sum() == 12


@pytest.mark.parametrize("shape", [(2, 2), (1, 3, 2), (3,)])
def test_in_place_writes_that_do_not_broadcast_change_nothing(shape: tuple[int, ...]) -> None:
    td = _zeros()
    with pytest.raises(ValueError, match=r"entry 'a'"):
        td.update_({("b", "c"): torch.ones(3), "a": torch.ones(shape)})
    assert not td.any()
