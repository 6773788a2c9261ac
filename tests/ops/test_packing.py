"""`pack` and `PackLayout`: all leaves as one tensor, and back."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensordict import (
    NonTensorData,
    NonTensorStack,
    PackLayout,
    TensorClass,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
)


class Body(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


def make_source() -> TensorDict:
    inner = TensorDict(stress=torch.arange(20.0).view(5, 2, 2), batch_size=[5, 2])
    return TensorDict(p=torch.arange(5.0), v=torch.arange(15.0).view(5, 3), inner=inner, batch_size=[5])


@pytest.mark.parametrize(("dim", "at"), [(-1, 1), (1, 1), (0, 0), (-2, 0)])
def test_columns_follow_the_sorted_keys(dim: int, at: int) -> None:
    td = make_source()
    flat, layout = td.pack(dim)
    assert layout.keys == (("inner", "stress"), "p", "v")
    assert layout.shapes == (torch.Size([2, 2]), torch.Size([]), torch.Size([3]))
    assert layout.offsets == (0, 4, 5) and layout.numel == 8 and layout.dim == at - 2
    assert layout.nested == (("inner", torch.Size([2]), None),)
    want = torch.cat([td["inner", "stress"].flatten(1), td["p"][:, None], td["v"]], 1)
    assert torch.equal(flat, want if at else want.T) and flat.is_contiguous()
    back = layout.unpack(flat)
    assert (back == td).all() and back["inner"].batch_size == (5, 2)
    back["p"].fill_(-1)
    assert (flat.select(at, 4) == -1).all()  # the leaves are views of the tensor, which is a copy of the leaves
    assert td["p"][1] == 1


def test_tensors_of_other_batch_dims_unpack() -> None:
    flat, layout = make_source().pack()
    assert layout.unpack(flat[0]).batch_size == () and layout.unpack(flat[None])["inner"].batch_size == (1, 5, 2)
    assert layout.unpack(flat[:0]).batch_size == (0,) and layout.unpack(flat.int())["v"].dtype is torch.int32
    with pytest.raises(ValueError, match="8 columns along dim -1, got 7"):
        layout.unpack(flat[:, 1:])
    with pytest.raises(IndexError, match="a tensor of 0 dims lacks"):
        layout.unpack(torch.tensor(1.0))
    with pytest.raises(TypeError, match="takes a tensor, got list"):
        layout.unpack([1.0])  # type: ignore[arg-type]


def test_classes_devices_and_empty_containers_come_back() -> None:
    body = Body(torch.ones(2, 3), y=torch.zeros(2), batch_size=[2])
    flat, layout = body.pack()
    assert layout.cls is Body and type(layout.unpack(flat)) is Body and layout.unpack(flat).y.shape == (2,)  # type: ignore[attr-defined]
    td = TensorDict(body=body, empty={"more": {}}, batch_size=[2], device="cpu")
    back = td.pack()[1].unpack(td.pack()[0].to("meta"))
    assert type(back["body"]) is Body and back.device == torch.device("meta") and ("empty", "more") in back
    flat, layout = TensorDictParams(TensorDict(a=torch.ones(2), b={"c": torch.ones(3)})).pack()
    assert flat.requires_grad and type(layout.unpack(flat)) is TensorDict
    nothing, layout = TensorDict(batch_size=[3]).pack(0)
    assert nothing.shape == (0, 3) and layout.unpack(nothing).batch_size == (3,)
    none, layout = TensorDict(a=torch.ones(0, 3), b=torch.ones(0), batch_size=[0]).pack()
    assert none.shape == (0, 4) and layout.unpack(none)["a"].shape == (0, 3)


def test_lazy_stacks_pack_like_their_dense_form() -> None:
    rows = [TensorDict(a=torch.full((2,), float(n)), b={"c": torch.tensor(float(n))}) for n in range(3)]
    stack = lazy_stack(rows)
    flat, layout = stack.pack()
    want, dense = stack.contiguous().pack()
    assert torch.equal(flat, want) and layout == dense
    assert TensorDict(s=stack, batch_size=[3]).pack()[1].keys == (("s", "a"), ("s", "b", "c"))
    with pytest.raises(RuntimeError, match="only some members of the lazy stack have .'z'."):
        lazy_stack([rows[0], rows[1].clone().set("z", 1.0)]).pack()
    with pytest.raises(RuntimeError, match="'a'"):
        lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)]).pack()


def test_packing_into_a_layout() -> None:
    td = make_source()
    layout = PackLayout(keys=("v", "p", ("inner", "stress")), shapes=([3], (), (2, 2)))  # type: ignore[arg-type]
    flat, made = td.pack(layout=layout)
    assert flat[1].tolist() == [3, 4, 5, 1, 4, 5, 6, 7] and made.keys == layout.keys
    assert td[:2].pack(layout=made)[0].shape == (2, 8) and td.double().pack(layout=made)[0].dtype is torch.float64
    refused: list[tuple[Any, type[Exception], str]] = [
        (lambda: td.exclude("p").pack(layout=layout), KeyError, "only one of the two has .'p'."),
        (lambda: td.clone().set("z", td["p"]).pack(layout=layout), KeyError, "only one of the two has .'z'."),
        (
            lambda: td.clone().set("v", torch.ones(5, 3, 1)).pack(layout=layout),
            ValueError,
            r"entry 'v'.*\[3, 1\].*\[3\]",
        ),
        (lambda: td.pack(0, layout=layout), ValueError, "one of dim -1, got dim=-2"),
        (lambda: td.pack(layout=3), TypeError, "got int"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorDict(a=torch.ones(2), b=1), TypeError, "entry 'b' is of torch.int64, and 'a' of torch.float32"),
        (
            lambda: TensorDict(a=1.0, b=torch.ones((), device="meta")),
            RuntimeError,
            "entry 'b' is on meta, and 'a' on cpu",
        ),
        (lambda: TensorDict(n={"b": "x"}), TypeError, r"\('n', 'b'\), a NonTensorData, .*filter_non_tensor_data"),
        (lambda: NonTensorData("x"), TypeError, "NonTensorData holds values"),
        (lambda: NonTensorStack("x", "y"), TypeError, "NonTensorStack holds values"),
        (
            lambda: TensorDict(u=UnbatchedTensor(torch.ones(2))),
            TypeError,
            "entry 'u', a UnbatchedTensor, .*no batch dims",
        ),
        (
            lambda: TensorDict(r=torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
            NotImplementedError,
            "entry 'r' is ragged",
        ),
    ],
)
def test_containers_that_cannot_be_packed(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().pack()
    with pytest.raises(IndexError, match="dim 2"):
        make_source().pack(2)


def test_layouts_are_values() -> None:
    layout = make_source().pack()[1]
    assert pickle.loads(pickle.dumps(layout)) == layout and {layout: 1}[make_source().pack()[1]] == 1
    assert dataclasses.replace(layout, dim=0).dim == 0
    assert PackLayout(("a",), ((1,),)) == PackLayout((("a",),), ([1],)), "keys and shapes have one form"  # type: ignore[arg-type]
    assert PackLayout((), (), device="cpu").device == torch.device("cpu")  # type: ignore[arg-type]
    flat = torch.arange(6.0).view(2, 3)
    made = PackLayout((("n", "a"), "b"), ((2,), ())).unpack(flat)  # type: ignore[arg-type]
    assert made["n", "a"].tolist() == [[0, 1], [3, 4]] and made["n"].batch_size == (2,)
    with pytest.raises(ValueError, match="one shape for each key"):
        PackLayout(("a",), ())
    with pytest.raises(ValueError, match="differ from each other"):
        PackLayout(("a", "a"), ((1,), (1,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="below another key"):
        PackLayout(("a", ("a", "b")), ((1,), (1,)))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dim = 0  # type: ignore[misc]


def test_gradients_flow_through() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    flat, layout = TensorDict(x=x, y=torch.zeros(2), batch_size=[2]).pack()
    layout.unpack(flat * 2)["x"].sum().backward()
    assert x.grad is not None and (x.grad == 2).all()


def double(td: Any) -> Any:
    flat, layout = td.pack()
    return layout.unpack(flat * 2)


def test_pack_compiles_to_one_graph_and_maps() -> None:
    td = make_source()
    assert (torch.compile(double, fullgraph=True, backend="eager")(td) == td * 2).all()
    assert (torch.vmap(double)(td) == td * 2).all()
