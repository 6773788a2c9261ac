"""Containers as pytrees of torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import tensordict._pytree
from tensordict import NonTensorData, TensorClass, TensorDict, TensorDictParams, lazy_stack
from tensordict.core.pytree import register


class Point(TensorClass):
    x: torch.Tensor


def make(**kwargs: Any) -> TensorDict:
    return TensorDict({"z": torch.arange(12.0).view(3, 4), "b": {"c": torch.arange(3)}}, [3], **kwargs)


def test_flatten_and_unflatten() -> None:
    td = make(device="cpu", names=["x"])
    leaves, spec = pytree.tree_flatten({"td": td})
    assert [leaf is expected for leaf, expected in zip(leaves, (td["z"], td["b", "c"]), strict=True)] == [True, True]
    again = pytree.tree_unflatten(leaves, spec)["td"]
    assert type(again) is type(again["b"]) is TensorDict
    assert again.batch_size == again["b"].batch_size == torch.Size([3])
    assert again.device == again["b"].device == torch.device("cpu")
    assert again.names == again["b"].names == ["x"]
    assert not pytree.tree_map(lambda x: x, make().lock_()).is_locked


def test_key_paths() -> None:
    pairs, _ = pytree.tree_flatten_with_path(make())
    assert [pytree.keystr(path) for path, _ in pairs] == ["['z']", "['b']['c']"]
    mapped = pytree.tree_map_with_path(lambda path, x: x + len(path), make())
    assert mapped["b", "c"].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (lambda x: x + 1, [3]),
        (lambda x: x.unsqueeze(-1), [3]),
        (lambda x: x[:2], [2]),
        (lambda x: x.sum(), []),
        (lambda x: x[None], [1, 3]),
        (lambda x: x[None, :2], [1]),
        (lambda x: x.flatten() if x.ndim > 1 else x, []),
    ],
)
def test_the_batch_size_follows_the_leaves(fn: Any, size: list[int]) -> None:
    mapped = pytree.tree_map(fn, make())
    assert mapped.batch_size == torch.Size(size)
    assert mapped["b"].batch_size[: len(size)] == torch.Size(size)
    for value in mapped.values(True, True):
        assert value.shape[: len(size)] == torch.Size(size)


def test_the_batch_size_of_one_leaf_does_not_grow() -> None:
    assert pytree.tree_map(lambda x: x, TensorDict({"a": torch.zeros(3, 4)}, [3])).batch_size == torch.Size([3])
    assert pytree.tree_map(lambda x: x[None], TensorDict({"a": torch.zeros(3)}, [])).batch_size == torch.Size([])
    assert pytree.tree_map(lambda x: x, TensorDict({}, [3])).batch_size == torch.Size([3])


def test_the_device_is_dropped_when_leaves_leave_it() -> None:
    moved = pytree.tree_map(lambda x: x.to("meta"), make(device="cpu"))
    assert moved.device is None
    assert moved["b"].device is None


def test_values_that_are_no_tensors() -> None:
    shapes = pytree.tree_map(lambda x: tuple(x.shape), make())
    assert shapes.get("z") == (3, 4)
    assert shapes.batch_size == torch.Size([3])


def test_equality_of_structures() -> None:
    def spec(td: Any) -> Any:
        return pytree.tree_flatten(td)[1]

    assert spec(make()) == spec(make())
    assert spec(make()) == spec(pytree.tree_map(lambda x: x.double()[..., None], make()))
    assert spec(make()) != spec(TensorDict(make().to_dict()))
    assert spec(make()) != spec(make().exclude("z"))
    total = pytree.tree_map(torch.add, make(), make())
    assert torch.equal(total["z"], 2 * make()["z"])


def test_structures_can_be_written_down() -> None:
    spec = pytree.tree_flatten([make(device="cpu", names=["x"]), torch.zeros(1)])[1]
    text = pytree.treespec_dumps(spec)
    assert "tensordict.TensorDict" in json.dumps(json.loads(text))
    assert pytree.treespec_loads(text) == spec


def test_subclasses_register_themselves() -> None:
    class Special(TensorDict):
        pass

    assert pytree.tree_leaves(Special({"a": 1}))[0].__class__ is Special
    assert register(Special) is Special
    mapped = pytree.tree_map(lambda x: x + 1, Special({"a": 1}))
    assert type(mapped) is Special
    assert mapped["a"] == 2


def test_a_kind_with_another_form() -> None:
    class Reversed(TensorDict):
        pass

    register(
        Reversed,
        flatten=lambda td: ([td["y"], td["x"]], "reversed"),
        unflatten=lambda values, context: Reversed({"y": values[0], "x": values[1], "context": len(context)}),
    )
    td = pytree.tree_map(lambda x: x * 2, Reversed({"x": 1, "y": 2}))
    assert type(td) is Reversed
    assert (td["x"].item(), td["y"].item(), td["context"].item()) == (2, 4, 8)


@pytest.mark.parametrize("out_dims", [0, 1])
def test_vmap(out_dims: int) -> None:
    td = TensorDict({"a": torch.rand(3, 4, 5), "b": {"c": torch.rand(3, 4)}}, [3, 4])
    seen = []

    def fn(item: Any) -> Any:
        seen.append((item.batch_size, item["b"].batch_size))
        return TensorDict({"a": item["a"] * 2, "b": {"c": item["b", "c"].sin()}}, item.batch_size)

    out = torch.vmap(fn, out_dims=out_dims)(td)
    assert seen == [(torch.Size([4]), torch.Size([4]))]
    expected = td["a"] * 2
    assert out.batch_size == out["b"].batch_size == (torch.Size([3, 4]) if out_dims == 0 else torch.Size([4, 3]))
    assert torch.allclose(out["a"], expected if out_dims == 0 else expected.transpose(0, 1))


def test_vmap_along_another_dim_and_nested() -> None:
    td = TensorDict({"a": torch.rand(3, 4, 5)}, [3, 4])
    out = torch.vmap(lambda item: item.clone(), in_dims=1)(td)
    assert out.batch_size == torch.Size([4, 3])
    out = torch.vmap(torch.vmap(lambda item: item.clone()))(td)
    assert out.batch_size == torch.Size([3, 4])
    assert torch.equal(out["a"], td["a"])


def test_vmap_over_a_feature_dim_keeps_the_batch_dims() -> None:
    leaf = torch.arange(24.0).view(2, 2, 2, 3)
    td = TensorDict({"a": leaf, "b": {"c": torch.ones(2, 2, 1, 3)}, "v": "text"}, [2, 2])
    seen = []

    def fn(item: Any) -> Any:
        seen.append((item.batch_size, item["b"].batch_size, item["a"].shape, item["b", "c"].shape))
        return item + 1

    out = torch.vmap(fn, in_dims=3)(td)
    assert seen == [((2, 2), (2, 2), (2, 2, 2), (2, 2, 1))]
    assert out.batch_size == out["b"].batch_size == (3, 2, 2) and out["v"] == "text"
    assert torch.equal(out["a"], leaf.movedim(3, 0) + 1)
    assert torch.vmap(fn, in_dims=3, out_dims=1)(td).batch_size == (2, 3, 2)
    with pytest.raises(ValueError, match="same size"):
        torch.vmap(fn, in_dims=2)(td)


def test_vmap_over_the_first_dim_keeps_the_batch_dims_of_nested_containers() -> None:
    empty = TensorDict({}, [3, 2])
    td = TensorDict({"a": torch.ones(3), "n": TensorDict({"b": torch.ones(3, 2), "v": "text", "e": empty}, [3, 2])})
    td["n"].names = [None, "time"]
    out = torch.vmap(lambda item: item + 1)(td)
    assert out.batch_size == (3,) and out["n"].names == [None, "time"]
    assert out["n"].batch_size == out["n", "e"].batch_size == out["n"].get("v").batch_size == (3, 2)
    assert torch.equal(out["n", "b"], torch.full((3, 2), 2.0))


def test_vmap_of_a_container_that_is_not_mapped() -> None:
    td = TensorDict({"a": torch.rand(3)}, [3])
    out = torch.vmap(lambda x, item: item["a"] * x, in_dims=(0, None))(torch.arange(2.0), td)
    assert torch.equal(out, torch.stack([td["a"] * 0, td["a"]]))


def test_grad_of_a_container() -> None:
    params = TensorDict(w=torch.tensor([1.0, 2.0]), b={"c": torch.tensor(3.0)})
    grads = torch.func.grad(lambda p: (p["w"] ** 2).sum() + p["b", "c"] * 5)(params)
    assert grads["w"].tolist() == [2, 4]
    assert grads["b", "c"] == 5


def test_the_public_place() -> None:
    assert tensordict._pytree.register is register


def test_a_function_that_returns_nothing() -> None:
    seen: list[torch.Tensor] = []
    one = TensorDict(a=torch.ones(2), n={"b": torch.zeros(2)})
    for container in (one, lazy_stack([one, one]), TensorDictParams(one.clone()), Point(torch.ones(2))):
        assert pytree.tree_map(seen.append, container) is None
    assert len(seen) == 2 + 4 + 2 + 1
    assert pytree.tree_map(seen.append, [one, {"c": one}]) == [None, {"c": None}]
    some = pytree.tree_map(lambda x: None if x.sum() == 0 else x, one)
    assert some["a"] is one["a"]
    assert some["n"] is None
    assert pytree.tree_map(seen.append, TensorDict(batch_size=[3])).batch_size == (3,)


@pytest.mark.parametrize(
    "make",
    [
        lambda count: TensorDict(a=torch.ones(count, 3), batch_size=[count]),
        lambda count: lazy_stack([TensorDict(a=torch.ones(count), batch_size=[count])] * 2, 1),
        lambda count: NonTensorData("word", batch_size=[count]),
        lambda count: TensorDict(a=torch.ones(count), s=NonTensorData("word", batch_size=[count]), batch_size=[count]),
    ],
)
def test_structures_are_equal_for_any_sizes_of_as_many_batch_dims(make: Any) -> None:
    structure = pytree.tree_structure(make(4))
    assert structure == pytree.tree_structure(make(7))
    assert structure != pytree.tree_structure(make(7)[0])
