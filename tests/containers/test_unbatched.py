"""`UnbatchedTensor` in stacks and under `torch.vmap`, where results differ between the elements."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tensordict import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)


def made() -> TensorDict:
    return TensorDict(a=torch.arange(6.0).view(2, 3), u=UnbatchedTensor(torch.ones(5)), batch_size=[2])


def test_it_is_not_mapped_over() -> None:
    result = torch.vmap(lambda td: td + 1)(made())
    assert type(result["u"]) is UnbatchedTensor and result["u"].tolist() == [2] * 5
    assert result.batch_size == result.get("u").batch_size == (2,)


def test_what_depends_on_the_element_leaves_as_a_tensor() -> None:
    result = torch.vmap(lambda td: td.set("z", td["a"] * td["u"].sum()))(made())
    assert type(result["z"]) is torch.Tensor and torch.equal(result["z"], made()["a"] * 5)
    assert type(result["u"]) is UnbatchedTensor

    def fresh(td: TensorDict) -> TensorDict:
        return TensorDict(u=UnbatchedTensor(td["a"].sum() + torch.zeros(5)))

    result = torch.vmap(fresh)(made())
    assert result.batch_size == (2,) and torch.equal(result["u"], made()["a"].sum(1, keepdim=True).expand(2, 5))
    assert torch.equal(torch.vmap(lambda td: td["u"] * td["a"].sum())(made()), result["u"])


def test_two_levels() -> None:
    td = TensorDict(a=torch.arange(6.0).view(2, 3), u=UnbatchedTensor(torch.ones(5)), batch_size=[2, 3])
    inner = torch.vmap(lambda item: item.set("z", item["u"] * item["a"]))
    result = torch.vmap(inner)(td)
    assert result["z"].shape == (2, 3, 5) and torch.equal(result["z"][..., 0], td["a"])


@pytest.mark.parametrize("kind", [NonTensorData, MetaData])
def test_holders_count_as_tensorclasses(kind: type) -> None:
    assert is_tensorclass(kind) and is_tensorclass(kind(1))
    assert not is_tensorclass(NonTensorStack) and not is_tensorclass(UnbatchedTensor)


def test_the_batch_size_beside_containers_without_entries() -> None:
    td = TensorDict(u=UnbatchedTensor(torch.ones(2)), b=torch.ones(3, 2), d=TensorDict(), batch_size=[3, 2])
    seen = []
    for dim in (0, 1, -1):
        result = torch.vmap(lambda part: (seen.append(part.batch_size), part)[1], dim, dim % 2)(td)
        assert result.batch_size == result["d"].batch_size == result.get("u").batch_size == (3, 2)
    assert seen == [(2,), (3,), (3,)]
    added = torch.vmap(lambda part: part.clone().set("new", torch.zeros(part.batch_size)))(td)
    assert added["new"].shape == (3, 2)


def of(value: float) -> TensorDict:
    return TensorDict(u=UnbatchedTensor(torch.full((5,), value)), a=torch.full((3, 2), value), batch_size=[3])


@pytest.mark.parametrize("target", [lazy_stack, torch.stack])
@pytest.mark.parametrize("source", [lazy_stack, torch.stack])
def test_update_between_stacks(target: Any, source: Any) -> None:
    for write in (lambda x, y: x.update_(y), lambda x, y: x.update(y, inplace=True)):
        td = target([of(1.0), of(1.0)])
        where = td["u"].data_ptr()
        write(td, source([of(2.0), of(2.0)]))
        assert td["u"].tolist() == [2.0] * 5
        assert td["u"].data_ptr() == where
        assert bool((td["a"] == 2).all())
    pieces = torch.stack([of(1.0), of(1.0)]).unbind(0)
    pieces[0].update_(of(3.0))
    assert pieces[0]["u"].tolist() == [3.0] * 5


def test_a_different_one_in_a_lazy_stack_warns_once() -> None:
    stack = lazy_stack([of(1.0), of(2.0), of(3.0)])
    with pytest.warns(UserWarning, match="UnbatchedTensors of different content") as record:
        first = stack["u"]
    assert len(record) == 1 and torch.equal(first, of(1.0)["u"])
    # Looking at what there is does not (a warning is an error here).
    keys = list(stack.keys(True, True))
    assert (
        keys == list(stack.keys(leaves_only=True)) and len(stack.keys(True)) == len(keys) and ("u",) in stack.keys(True)
    )
    assert "u" in repr(stack) and stack.lock_().is_locked and stack.clone().batch_size == (3, *of(1.0).batch_size)


def test_in_containers_of_parameters() -> None:
    inner = {"c": UnbatchedTensor(torch.arange(2))}
    params = TensorDictParams(TensorDict(b=UnbatchedTensor(torch.ones(2)), a=torch.ones(3, 2), n=inner, batch_size=[3]))
    for made in (params, params.clone(), copy.deepcopy(params), params.to(torch.float64)):
        assert [name for name, _ in made.named_parameters()] == ["b", "a"]
        assert [name for name, _ in made.named_buffers()] == ["n.c"]
        assert type(made["b"]) is UnbatchedTensor
        assert made["b"].requires_grad
        assert made["b"].is_leaf
        assert made.get("b").batch_size == (3,)
        assert torch.cat([made, made], 0)["b"].shape == (2,)
        assert torch.stack([made.data], -1).batch_size == (3, 1)
    assert copy.deepcopy(params)["b"].data_ptr() != params["b"].data_ptr()
    assert list(params.state_dict()) == ["b", "a", "n.c"]


def test_another_dtype_of_the_same_bytes() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.zeros(2)), "n": {"v": UnbatchedTensor(torch.zeros(4))}}, [3])
    wide = td.view(torch.float64)
    assert wide.batch_size == (3,) and wide["u"].tolist() == [0] and wide["n", "v"].tolist() == [0, 0]


def test_new_tensor_keeps_it_or_takes_that_of_the_data() -> None:
    td = of(1.0)
    data = TensorDict(a=torch.zeros(td["a"].shape), batch_size=td.batch_size)
    kept = td.new_tensor(data.set("u", of(3.0)["u"]))
    assert kept["u"].tolist() == [3.0] * 5 and type(kept["u"]) is UnbatchedTensor
    filled = td.new_tensor(torch.zeros(2))
    assert filled["u"].tolist() == [1.0] * 5 and filled["u"].data_ptr() != td["u"].data_ptr()


def test_gradients_are_unbatched_too() -> None:
    td = TensorDict(a=torch.ones(3, 2), n={"u": UnbatchedTensor(torch.ones(2))}, batch_size=[3]).requires_grad_()
    for container in (td, TensorDictParams(td.detach()), lazy_stack([td.clone().detach().requires_grad_()])):
        first = container[0] if container.batch_dims == 2 else container
        (first["a"].sum() + first["n", "u"].sum()).backward()
        grad = container.grad if container is first else container.grad[0]
        assert isinstance(grad["n", "u"], UnbatchedTensor) and grad["n", "u"].tolist() == [1, 1]
        assert grad[:2]["n", "u"].shape == (2,) and grad[:2]["a"].shape == (2, 2)


def test_what_is_made_of_it_and_of_batched_tensors_is_batched() -> None:
    td = TensorDict(a=torch.arange(6.0).view(2, 3), u=UnbatchedTensor(torch.ones(3)), batch_size=[2])
    index = UnbatchedTensor(torch.tensor([2, 0]))
    results = {
        "product": td["a"] * td["u"],
        "reversed": td["u"] - td["a"],
        "indexed": td["a"][:, index],
        "cat": torch.cat([td["a"], td["u"].expand(2, 3)], -1),
        "where": torch.where(td["a"] > 2, td["u"], other=td["u"]),
        "out": torch.add(td["u"], 1, out=torch.empty(3)),
    }
    assert {name: type(result) for name, result in results.items()} == dict.fromkeys(results, torch.Tensor)
    td["b"] = results["product"]
    assert td[0]["b"].shape == (3,) and td[1]["b"].tolist() == [3, 4, 5]
    # Alone, or with numbers, it stays what it is, and so does what is written to.
    kept = [
        td["u"] + 1,
        td["u"] * td["u"],
        td["u"].unbind()[0],
        torch.stack([td["u"], td["u"]]),
        td["u"].mul_(torch.ones(3)),
    ]
    assert {type(result) for result in kept} == {UnbatchedTensor}
    assert type(torch.compile(lambda td: td["a"] * td["u"], backend="eager", fullgraph=True)(td)) is torch.Tensor


def test_names_of_a_container_pass_it_by() -> None:
    td = TensorDict(
        {"u": UnbatchedTensor(torch.ones(3)), "n": TensorDict({"v": UnbatchedTensor(torch.ones(4))}, [2])}, [2]
    )
    td.names = ["time"]
    assert td.names == td["n"].names == ["time"] and td["n", "v"].shape == (4,)
    assert TensorDict({"n": td}, [2], names=["time"]).names == ["time"]
    stack = lazy_stack([TensorDict({"u": UnbatchedTensor(torch.ones(3))}, [2]), TensorDict({}, [2])])
    stack.names = ["rank", "time"]
    assert stack[0].names == ["time"]


def test_operations_in_place_pass_it_by() -> None:
    for change in (
        lambda td: td.gather(0, torch.tensor([1, 0]), inplace=True),
        lambda td: td.reshape(1, 2, inplace=True),
    ):
        td = TensorDict({"u": UnbatchedTensor(torch.ones(3)), "a": torch.arange(2)}, [2], names=["x"])
        assert change(td) is td and torch.equal(td["u"], torch.ones(3))


def test_it_counts_as_a_tensor() -> None:
    unbatched = UnbatchedTensor(torch.ones(2))
    assert not is_tensor_collection(unbatched) and not is_tensor_collection(UnbatchedTensor)


def test_a_list_of_the_members_of_a_lazy_stack():
    rows = [TensorDict(u=UnbatchedTensor(torch.full((4,), i)), batch_size=[2]) for i in range(2)]
    stack = lazy_stack(rows)
    assert all(one is row["u"] for one, row in zip(stack.get("u", as_list=True), rows, strict=True))
    assert len(TensorDict(b=stack, batch_size=[2]).get(("b", "u"), as_list=True)) == 2
    assert [len(column) for column in lazy_stack([stack, stack]).get("u", as_list=True)] == [2, 2]


def test_padding_the_tensors_of_the_members_of_a_lazy_stack() -> None:
    rows = [TensorDict(u=UnbatchedTensor(torch.ones(i + 1)), batch_size=[]) for i in range(2)]
    padded, mask = lazy_stack(rows).get("u", as_padded_tensor=True, padding_value=7, return_mask=True)
    assert type(padded) is torch.Tensor and padded.tolist() == [[1, 7], [1, 1]]
    assert mask.tolist() == [[True, False], [True, True]]
    nested = TensorDict(n=lazy_stack([lazy_stack(rows)] * 2, 1))
    assert nested.get(("n", "u"), as_padded_tensor=True).shape == (2, 2, 2)
