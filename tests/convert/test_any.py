"""`from_any` and its kin: what becomes of every structure, and what is refused."""

from __future__ import annotations

import array
import collections
import pathlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch

import tensordict
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    from_any,
    lazy_stack,
)


class Pair(NamedTuple):
    a: Any
    b: Any = None


@dataclass
class Plain:
    x: Any
    y: Any = None


@dataclass
class Both:
    a: Any
    b: Any


class Point(TensorClass):
    x: torch.Tensor
    y: Any = None


class Typed(TypedTensorDict):
    x: torch.Tensor


def shape(*size: int) -> torch.Tensor:
    return torch.zeros(size)


FORMS: list[tuple[str, Any]] = [
    ("mapping", {"a": shape(3, 4), "b": {"c": shape(3, 4, 5)}}),
    ("ordered", collections.OrderedDict(a=shape(3, 4), b=collections.OrderedDict(c=shape(3, 4, 5)))),
    ("tuple keys", {("b", "c"): shape(3, 4, 5), "a": shape(3, 4)}),
    ("named tuple", Pair(shape(3, 4), {"c": shape(3, 4, 5)})),
    ("dataclass", Both(shape(3, 4), {"c": shape(3, 4, 5)})),
    ("container", TensorDict({"a": shape(3, 4), "b": {"c": shape(3, 4, 5)}})),
]  # fmt: skip


@pytest.mark.parametrize("obj", [form for _, form in FORMS], ids=[name for name, _ in FORMS])
@pytest.mark.parametrize("convert", [tensordict.from_any, TensorDict.from_any, TensorDictBase.from_any])
def test_every_structure_gives_the_same(convert: Any, obj: Any) -> None:
    plain = convert(obj)
    assert type(plain) is TensorDict and plain.batch_size == plain["b"].batch_size == ()
    assert set(plain.keys(True, True)) == {"a", ("b", "c")} and plain["b", "c"].shape == (3, 4, 5)
    auto = convert(obj, auto_batch_size=True)
    assert auto.batch_size == (3, 4) and auto["b"].batch_size == (3, 4, 5)
    limited = convert(obj, auto_batch_size=True, batch_dims=1)
    assert limited.batch_size == limited["b"].batch_size == (3,)
    assert convert(obj, batch_dims=1).batch_size == (3,)
    given = convert(obj, batch_size=[3], device="meta")
    assert given.batch_size == (3,) and given.device == given["b", "c"].device == torch.device("meta")
    with pytest.raises(ValueError, match="not both"):
        convert(obj, batch_size=[3], batch_dims=1)
    with pytest.raises(RuntimeError, match=r"'(a|c)'"):
        convert(obj, batch_size=[5])


def test_structures_inside_structures() -> None:
    obj = {"pair": (1, "b"), "named": Pair(Plain(1.5), (shape(2),)), "none": None, "kept": {1, 2}, "list": [1, 2]}
    td = TensorDict.from_any(obj)
    assert td["pair", "0"] == 1 and td["pair", "1"] == "b"
    assert td["named", "a", "x"] == 1.5 and td["named", "a", "y"] is None and td["named", "b", "0"].shape == (2,)
    assert td["none"] is None and td["kept"] == {1, 2} and td["list"].tolist() == [1, 2]
    assert obj["pair"] == (1, "b") and isinstance(obj["named"], Pair)
    assert TensorDict.from_dict(obj)["named", "a", "x"] == 1.5


def test_tensors_are_taken_as_they_are() -> None:
    leaf, child = shape(3), TensorDict(x=shape(3))
    td = TensorDict.from_any({"a": leaf, "child": child})
    assert td["a"] is leaf and td["child"] is child
    assert TensorDict.from_any(child) is child and TensorDict.from_any(Point(leaf)).x is leaf
    resized = TensorDict.from_any(child, batch_size=[3])
    assert resized.batch_size == (3,) and resized["x"] is child["x"] and child.batch_size == ()


def test_what_has_no_parts_is_given_back() -> None:
    leaf = shape(3)
    assert TensorDict.from_any(leaf) is leaf and TensorDict.from_any(1) == 1 and TensorDict.from_any(None) is None
    assert TensorDict.from_any([1, 2]).tolist() == [1, 2]
    values = TensorDict.from_any(["a", "b"])
    assert isinstance(values, NonTensorStack) and values.tolist() == ["a", "b"]


def test_buffers_and_dlpack_share_their_memory() -> None:
    numbers, view, values = array.array("f", [1, 2]), np.zeros(3), np.arange(4)

    class Foreign:
        def __dlpack__(self, **kwargs: Any) -> Any:
            return torch.from_numpy(values).__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return torch.from_numpy(values).__dlpack_device__()

    td = TensorDict.from_any({"array": numbers, "view": memoryview(view), "dlpack": Foreign(), "numpy": values})
    numbers[0], view[1], values[2] = 7, 8, 9
    assert td["array"].tolist() == [7, 2] and td["view"].tolist() == [0, 8, 0]
    assert td["dlpack"].tolist() == td["numpy"].tolist() == [0, 1, 9, 3]
    out = np.from_dlpack(td["numpy"])
    out[0] = 5
    assert values[0] == 5 and memoryview(td.numpy()["array"])[0] == 7
    assert TensorDict.from_any({"a": memoryview(b"abc")})["a"].tolist() == [97, 98, 99]
    assert TensorDict.from_any({"a": b"abc"})["a"] == b"abc"


@pytest.mark.parametrize(
    ("obj", "match"),
    [
        ({("a", "b"): 1, "a": {"b": 2}}, "'b'"),
        ({"a": {"b": 1}, ("a", "b"): 2}, "'b'"),
        ({"a": 1, ("a", "b"): 2}, "'a'"),
        ({("a", "b"): 2, "a": 1}, "'a'"),
        ({("a",): 1, "a": 2}, "'a'"),
        ({"a": TensorDict(b=1), ("a", "b"): 2}, "'b'"),
        ({"a": TensorDict(b=1), ("a",): {"b": 2}}, "'a'"),
        ({"x": {("a",): 1, "a": 2}}, r"\('x', 'a'\)"),
    ],
)
def test_two_keys_of_one_place_are_refused(obj: Any, match: str) -> None:
    for convert in (TensorDict.from_any, TensorDict.from_dict):
        with pytest.raises((KeyError, ValueError), match=match):
            convert(obj)
    assert all(not isinstance(value, TensorDict) or value["b"] == 1 for value in obj.values())


def test_tuple_keys_join_what_is_nested() -> None:
    child = TensorDict(b=1)
    td = TensorDict.from_any({"a": {"b": 1}, ("a", "c"): 2, "t": child, ("t", "c", "d"): 3})
    assert td.to_dict(convert_tensors=True) == {"a": {"b": 1, "c": 2}, "t": {"b": 1, "c": {"d": 3}}}
    assert list(child.keys()) == ["b"]


def test_open_hdf5_files(tmp_path: pathlib.Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["a"] = np.arange(3)
        file.create_group("g")["b"] = np.zeros((3, 2))
        for td, key in ((TensorDict.from_any(file), "g"), (TensorDict.from_any({"x": file["g"]}), "x")):
            nested = td.get(key)
            assert type(nested) is PersistentTensorDict and nested["b"].shape == (3, 2)
        assert TensorDict.from_any(file, batch_size=[3])["a"].tolist() == [0, 1, 2]
        assert TensorDict.from_any({"x": file["a"]})["x"].tolist() == [0, 1, 2]


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match=r"got 1 of type int under 'a': .*td\['a'\] = NonTensorData.*from_pytree"):
        TensorDict.from_any({"a": {1: 2}})
    with pytest.raises(TypeError, match="named tuple, got tuple"):
        TensorDict.from_namedtuple((1, 2))
    with pytest.raises(TypeError, match="tuple or a list, got dict"):
        TensorDict.from_tuple({})
    with pytest.raises(TypeError, match="dataclass, got dict"):
        TensorDict.from_dataclass({})


@pytest.mark.parametrize("convert", [tensordict.from_tuple, TensorDict.from_tuple])
def test_from_tuple(convert: Any) -> None:
    td = convert((shape(3), (shape(3, 2), "x"), None), auto_batch_size=True, device="cpu")
    assert list(td.keys()) == ["0", "1", "2"] and td.batch_size == (3,) and td["1"].batch_size == (3, 2)
    assert td["1", "1"] == "x" and td["2"] is None and td.device == torch.device("cpu")
    assert convert([1, 2])["1"] == 2 and convert(Pair(1, 2))["1"] == 2


@pytest.mark.parametrize("convert", [tensordict.from_namedtuple, TensorDict.from_namedtuple])
def test_named_tuples_both_ways(convert: Any) -> None:
    data = TensorDict({"a": shape(3), "nested": {"a": shape(3), "text": "zero!"}}, [3])
    named = data.to_namedtuple()
    assert repr(named) == (
        "GenericDict(a=tensor([0., 0., 0.]), nested=GenericDict(a=tensor([0., 0., 0.]), text='zero!'))"
    )
    assert named.a is data["a"] and type(named) is type(data.to_namedtuple())
    again = convert(named, auto_batch_size=True)
    assert (again == data).all() and again["nested"].batch_size == (3,) and again["nested", "text"] == "zero!"
    assert TensorDict(a=1, b=2).to_namedtuple(Pair) == Pair(1, 2)
    assert TensorDict(a=1).to_namedtuple(Pair) == Pair(1, None)
    for entries, match in (({"b": 1}, "'a'.*missing"), ({"a": 1, "c": 2}, "'c'.*not declared")):
        with pytest.raises(TypeError, match=match):
            TensorDict(entries).to_namedtuple(Pair)
    with pytest.raises(TypeError, match="named tuple"):
        data.to_namedtuple(dict)
    for name in ("a b", "class", "_x", "0"):
        with pytest.raises(ValueError, match=rf"\('deep', '{name}'\).*rename_key_"):
            TensorDict({"deep": {name: 1}}).to_namedtuple()


ITEMS = [{"a": shape(3), "s": "x"}, {"a": shape(3), "s": "y"}]


@pytest.mark.parametrize("item", [lambda d: d, TensorDict, lambda d: Pair(d["a"], d["s"])])
def test_from_list(item: Any) -> None:
    items = [item(entries) for entries in ITEMS]
    name = "b" if isinstance(items[0], Pair) else "s"
    td = TensorDict.from_list(items)
    assert type(td) is TensorDict and td.batch_size == (2,) and td["a"].shape == (2, 3) and td[name] == ["x", "y"]
    assert TensorDict.from_list(items, names=["time"], device="cpu").names == ["time"]
    assert type(TensorDict.from_list(items, lazy=True)) is LazyStackedTensorDict
    assert TensorDict.from_list(items, batch_size=[2]).batch_size == (2,)


def test_from_list_batch_sizes() -> None:
    items = [{"a": shape(3, 4), "b": {"c": shape(3, 5)}} for _ in range(2)]
    auto = TensorDict.from_list(items, auto_batch_size=True)
    assert auto.batch_size == (2, 3) and auto["b"].batch_size == (2, 3, 5)
    assert TensorDict.from_list(items, batch_dims=1).batch_size == (2,)
    assert TensorDict.from_list(items, batch_size=[2, 3]).batch_size == (2, 3)
    assert TensorDict.from_list(items, batch_size=[]).batch_size == ()
    with pytest.raises(ValueError, match=r"\[2\].*\[3\]"):
        TensorDict.from_list(items, batch_size=[3])
    with pytest.raises(RuntimeError, match="'a'"):
        TensorDict.from_list(items, batch_size=[2, 4])
    with pytest.raises(ValueError, match="not both"):
        TensorDict.from_list(items, batch_size=[2], batch_dims=1)


def test_nested_lists_are_batch_dims() -> None:
    td = TensorDict({"a": torch.arange(6).view(2, 3), "s": [["a", "b", "c"], ["d", "e", "f"]]}, [2, 3])
    again = TensorDict.from_list(td.tolist())
    assert again.batch_size == (2, 3) and (again["a"] == td["a"]).all() and again["s"] == td["s"]


def test_lists_of_unequal_items() -> None:
    uneven = TensorDict.from_list([{"a": shape(3)}, {"a": shape(2)}], auto_batch_size=True)
    assert isinstance(uneven, LazyStackedTensorDict) and uneven.batch_size == (2, -1) and uneven[1].batch_size == (2,)
    items = [{"a": shape(2, 3), "b": {"c": shape(2)}}, {"a": shape(3, 3), "b": {"c": shape(3)}}]
    nested = TensorDict.from_list(items, auto_batch_size=True)
    assert nested.batch_size == (2, -1) and [member["b"].batch_size for member in nested] == [(2,), (3,)]
    assert TensorDict.from_list(items, batch_dims=1).batch_size == (2,)
    assert TensorDict.from_list([items, items], batch_dims=2).batch_size == (2, 2)
    # Every member gets the batch dims that all entries allow, including entries that only some members have.
    for odd in ([{"a": shape(2), "c": 1}, {"a": shape(2)}], [{"a": shape(2)}, {"a": "text"}]):
        assert TensorDict.from_list(odd, auto_batch_size=True).batch_size == (2,)
    keys = TensorDict.from_list([{"a": 1}, {"b": 2}])
    assert isinstance(keys, LazyStackedTensorDict) and keys[1]["b"] == 2
    with pytest.raises(RuntimeError, match="'a', 'b'"):
        TensorDict.from_list([{"a": 1}, {"b": 2}], lazy=False)


@pytest.mark.parametrize(
    ("items", "error", "match"),
    [
        ([], ValueError, "empty list input"),
        ([[{}], []], ValueError, r"empty list input\[1\]"),
        ([{"a": 1}, 3], TypeError, r"input\[1\] is of type int"),
        ([[{"a": 1}, "x"]], TypeError, r"input\[0\]\[1\] is of type str"),
        ([{"a": 1}, [{"a": 1}]], TypeError, r"input\[0\] is of type dict, but input\[1\] is a list"),
        ([[{"a": 1}], [{"a": 1}, {"a": 2}]], ValueError, r"input\[0\] and input\[1\] have the lengths \[1\] and \[2\]"),
        ({"a": 1}, TypeError, "reads a list, got dict"),
    ],
)
def test_lists_that_make_no_stack(items: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        TensorDict.from_list(items)


def test_tensorclasses_are_made_of_everything() -> None:
    struct = np.zeros(3, dtype=[("x", "f4"), ("y", "i4")])
    plain = {"x": shape(3), "y": "text"}
    made = [
        Point.from_any(plain, auto_batch_size=True),
        Point.from_any(Plain(**plain), batch_size=[3]),
        Point.from_dict(plain, batch_dims=1),
        Point.from_dataclass(Plain(**plain), auto_batch_size=True),
        Point.from_namedtuple(collections.namedtuple("P", "x y")(**plain), auto_batch_size=True),
        Point.from_list([{"x": torch.tensor(0.0), "y": "text"}] * 3),
        Point.from_pytree(plain, batch_size=[3]),
        Point.from_any(TensorDict(plain, [3])),
        Point(shape(3), "text", batch_size=[3]).from_dict_instance(plain, batch_size=[3]),
    ]
    for point in made:
        assert type(point) is Point and point.batch_size == (3,) and point.x.shape == (3,)
        assert point.y in ("text", ["text"] * 3)
    array_made = Point.from_any(struct)
    struct["x"] += 1
    assert type(array_made) is Point and array_made.batch_size == (3,) and array_made.x.tolist() == [1, 1, 1]
    assert Point(shape(2)).to_namedtuple()._asdict().keys() == {"x", "y"}
    point = Point(shape(2))
    assert Point.from_any(point) is point and TensorDict.from_any(point) is point and point.to_pytree() is point
    for bad in ({"x": shape(3), "z": 1}, (1, 2)):
        with pytest.raises(ValueError, match="no field of Point"):
            Point.from_any(bad)
    assert type(Typed.from_any({"x": shape(2)})) is type(Typed.from_any(TensorDict(x=shape(2)))) is Typed


def test_stack_and_cat_of_entries() -> None:
    td = TensorDict({"b": shape(3), "n": {"a": torch.ones(3)}, "text": "x"}, [3])
    assert td.stack_from_tensordict().tolist() == [[0] * 3, [1] * 3]
    assert td.stack_from_tensordict(-1, sorted=[("n", "a"), "b"]).tolist() == [[1, 0]] * 3
    assert td.cat_from_tensordict().tolist() == [0, 0, 0, 1, 1, 1]
    out = torch.empty(2, 3)
    assert td.stack_from_tensordict(out=out) is out and out[1].all()
    assert TensorDict({"z": shape(1), "a": torch.ones(2)}).cat_from_tensordict(sorted=True).tolist() == [1, 1, 0]
    for sorted_ in (["b"], ["b", "b"], ["b", "c"]):
        with pytest.raises(ValueError, match="names each entry once"):
            td.stack_from_tensordict(sorted=sorted_)
    uneven = TensorDict({"a": shape(2), "n": {"b": shape(2, 1)}})
    with pytest.raises(RuntimeError, match=r"'a': \[2\], \('n', 'b'\): \[2, 1\]"):
        uneven.stack_from_tensordict()
    with pytest.raises(RuntimeError, match=r"'a': \[2\]"):
        uneven.cat_from_tensordict()
    with pytest.raises(ValueError, match="no tensor"):
        TensorDict(a="x").stack_from_tensordict()
    point = Point(shape(2), torch.ones(2))
    assert point.stack_from_tensordict().tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "rows", [[[1, 2], [3]], [[], [1]], [[[1], [2]], [[3]]], [torch.zeros(2), torch.zeros(3)]], ids=str
)
def test_rows_of_unequal_lengths_are_stacks_of_values(rows: list[Any]) -> None:
    for made in (from_any({"a": rows}).get("a"), from_any(rows), from_any({"n": ({"a": rows},)})["n", "0"].get("a")):
        assert type(made) is NonTensorStack and len(made) == 2
        assert all(
            torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1]
            for pair in zip(made.tolist(), rows, strict=True)
        )
    if not isinstance(rows[0], torch.Tensor):
        with pytest.raises(TypeError, match="'a'.*no.* a regular array"):
            TensorDict(a=rows)
    assert torch.equal(from_any({"a": [[1, 2], [3, 4]]})["a"], torch.tensor([[1, 2], [3, 4]]))


def test_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2, 3], "b": [1.5, 2, 3], "s": ["x", "y", None]})
    for made in (from_any(frame), from_any({"k": frame})["k"], TensorDict.from_any((frame,))["0"]):
        assert type(made) is TensorDict and made.batch_size == (3,) and made[1]["s"] == "y"
        assert made["a"].tolist() == [1, 2, 3] and made["b"].dtype == torch.float64 and made["s"][0] == "x"
    made = TensorDict(frame, batch_size=[3])
    assert made["a"].tolist() == [1, 2, 3] and made[0]["s"] == "x" and TensorDict(frame)["s"][:2] == ["x", "y"]
    assert from_any({"c": frame["s"]}).get("c").batch_size == (3,)
    # A series alone is a value, like an array or a number. `from_any` reads it as a mapping only on request.
    assert from_any(frame["a"]) is not None and type(from_any(frame["a"])) is pandas.Series
    series = pandas.Series([1, 2], index=["x", "y"])
    assert TensorDict.from_dict(series).to_dict(convert_tensors=True) == {"x": 1, "y": 2}
    assert from_any(frame[["a"]], auto_batch_size=True).batch_size == (3,)
    with pytest.raises(TypeError, match="column 0 is called 0"):
        from_any(pandas.DataFrame([[1]]))
    with pytest.raises(ValueError, match="columns 1 and 2 are both called 'a'"):
        from_any(pandas.DataFrame([[1, 2]], columns=["a", "a"]))


@pytest.mark.parametrize("method", ["to_dict", "to_namedtuple", "numpy"])
def test_entries_that_only_some_members_have_are_not_lost(method: str) -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(2), x=torch.zeros(1)), TensorDict(a=torch.ones(2))])
    for container in (stack, TensorDict(n=stack), lazy_stack([stack, stack])):
        with pytest.raises(RuntimeError, match=r"cannot complete when there are exclusive keys: .*\['x'\]"):
            getattr(container, method)()
    ragged = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))])
    with pytest.raises(RuntimeError, match="Failed to stack tensors within a tensordict"):
        getattr(ragged, method)()


def test_a_dict_with_nothing_to_open_is_not_shared() -> None:
    data: dict[Any, Any] = {"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3)}}
    td = TensorDict.from_dict(data, auto_batch_size=True)
    td["c"], td["n", "c"] = torch.zeros(3, 2), torch.zeros(3)
    assert list(data) == ["a", "n"] and list(data["n"]) == ["b"]
    assert td.batch_size == (3,) and td["n"].batch_size == (3,)
    # A tuple key adds to an existing dict, whose other entries do not change.
    both = TensorDict.from_dict({**data, ("n", "d"): torch.ones(3)})
    assert sorted(both["n"].keys()) == ["b", "d"] and list(data["n"]) == ["b"]
