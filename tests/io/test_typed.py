"""The directory format of values, lazy stacks, tensorclasses and unbatched tensors."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import pathlib
import pickle
from typing import Any

import pytest
import torch

from cases import mark_slow
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnbatchedTensor,
    is_leaf_nontensor,
    lazy_stack,
    load_memmap,
)
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.memmap import MemoryMappedTensor

SAMPLES = pathlib.Path(__file__).parents[1] / "data" / "format"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text())
HOLDER = {"_type": "<class 'tensordict.tensorclass.NonTensorData'>", "_is_non_tensor": True, "_metadata": None}
STACK = {"_type": "<class 'tensordict.tensorclass.NonTensorStack'>", "stack_dim": 0, "device": None}
LAZY = {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>", "stack_dim": 0}
NODE = {"shape": [2], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}


class Inner(TensorClass):
    a: torch.Tensor


class Item(TensorClass):
    x: torch.Tensor
    label: str
    extra: torch.Tensor | None = None
    inner: Inner | None = None
    anything: Any = None


class Step(TypedTensorDict):
    obs: torch.Tensor


class Odd:
    """A value that only pickle can hold."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def meta(folder: pathlib.Path) -> Any:
    return json.loads((folder / "meta.json").read_text())


def put(folder: pathlib.Path, content: Any) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(content))
    return folder


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def both(td: Any, folder: pathlib.Path, **options: Any) -> list[Any]:
    """The container after saving it, after loading it, and as memory-mapped in anonymous memory."""
    saved = td.memmap(folder, **options)
    loaded = TensorDict.load_memmap(folder, allow_pickle=options.get("allow_pickle"))
    return [saved, loaded, td.memmap(**options)]


# --- the samples ------------------------------------------------------------------------------------------------------


def check(found: Any, expected: dict[str, Any]) -> None:
    assert list(found.batch_size) == expected["batch_size"]
    assert len(expected["leaves"])
    for name, leaf in expected["leaves"].items():
        key = json.loads(name)
        value = found.get(key if isinstance(key, str) else tuple(key))
        if "bits" in leaf:
            raw = value.contiguous().view(-1).view(torch.uint8).tolist()
            assert {"bits": raw, "dtype": str(value.dtype), "shape": list(value.shape)} == leaf
        elif "repr" in leaf:
            assert repr(value) == leaf["repr"] or repr(found[key]) == leaf["repr"]
        else:
            assert (value if isinstance(value, str) else value.tolist()) == leaf["data"]


def test_sample_of_values() -> None:
    td = TensorDict.load_memmap(SAMPLES / "samples" / "nontensor")
    check(td, EXPECTED["nontensor"])
    assert (td["string"], td["number"], td["dict"], td["stack"]) == ("hello", 3, {"a": 1}, ["x", "y"])
    assert td.get("string").batch_size == (2,) and type(td.get("stack")) is NonTensorStack


def test_sample_of_a_lazy_stack() -> None:
    stack = TensorDict.load_memmap(SAMPLES / "samples" / "lazy")
    assert type(stack) is LazyStackedTensorDict
    assert (stack.stack_dim, stack.batch_size) == (EXPECTED["lazy"]["stack_dim"], (3,))
    for member, expected in zip(stack.tensordicts, EXPECTED["lazy"]["items"], strict=True):
        check(member, expected)


def test_sample_of_a_tensorclass(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SAMPLES / "samples" / "tensorclass"
    with pytest.raises(UnsupportedEntryError, match=r"'item'.*samples\.Sample.*import the module"):
        TensorDict.load_memmap(folder)

    class Sample(TensorClass):
        data: torch.Tensor
        label: str
        extra: torch.Tensor | None = None

    monkeypatch.setattr("tensordict.core.registry._DECLARED", {"samples.Sample": Sample})
    td = TensorDict.load_memmap(folder)
    check(td, EXPECTED["tensorclass"])
    assert type(td["item"]) is Sample and td["item"].label == "seven" and td["item"].extra is None


def test_sample_with_a_pickle() -> None:
    folder = SAMPLES / "samples" / "pickled"
    with pytest.raises(UnsupportedEntryError, match=r"'cls'.*other\.pickle.*allow_pickle=True"):
        TensorDict.load_memmap(folder)
    td = TensorDict.load_memmap(folder, allow_pickle=True)
    check(td, EXPECTED["pickled"])
    assert td["cls"] is torch.nn.Linear
    # Only requested entries are unpickled.
    assert list(TensorDict.load_memmap(folder, keys=["t"]).keys()) == ["t"]


# --- values -----------------------------------------------------------------------------------------------------------

EXACT: dict[str, Any] = {
    "text": "hello",
    "odd text": 'ünï "\\ \n\0 \U0001f600',
    "none": None,
    "bool": True,
    "int": -(2**62),
    "float": 0.1,
    "nothing": "",
    "list": [1, [2.5, None], "x"],
    "tuple": (1, (2, [3])),
    "dict": {"a": {"b": (1,)}, "": 2},
    "tagged dict": {"%tuple": [1], "%float": "nan"},
    "inf": float("-inf"),
    "big float": 1e308,
}


@pytest.mark.parametrize("value", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("cls", [NonTensorData, MetaData])
def test_values_come_back_the_same(cls: Any, value: Any, tmp_path: pathlib.Path) -> None:
    td = TensorDict({"t": torch.zeros(2), "deep": {"v": cls(value, batch_size=[2])}}, [2])
    for result in both(td, tmp_path):
        holder = result.get(("deep", "v"))
        assert type(holder) is cls and holder.batch_size == (2,)
        assert type(holder.data) is type(value) and repr(holder.data) == repr(value)
    assert not list(tmp_path.rglob("*pickle*"))


def test_nan_comes_back(tmp_path: pathlib.Path) -> None:
    TensorDict(v=NonTensorData([float("nan")])).memmap(tmp_path)
    assert math.isnan(TensorDict.load_memmap(tmp_path)["v"][0])
    # Other readers find what JSON has in its place.
    assert meta(tmp_path / "v")["data"] == [None]


def test_what_other_readers_see(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"v": "x", "w": NonTensorData((1, 2), batch_size=[2]), "s": NonTensorStack("a", "b")}, [2])
    td.memmap(tmp_path)
    assert meta(tmp_path)["v"] == {"type": "NonTensorData"}
    assert meta(tmp_path / "v") == {**HOLDER, "data": "x"}
    # The reference refuses keys that it does not know, except in "_metadata".
    assert meta(tmp_path / "w") == {**HOLDER, "data": [1, 2], "_metadata": {"_exact": {"%tuple": [1, 2]}}}
    assert meta(tmp_path / "s") == {**STACK, "data": ["a", "b"], "_shape": [2]}


def test_holders_with_a_batch_size_and_names_of_their_own(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"v": NonTensorData("x", batch_size=[2, 3], names=["t", "u"])}, [2], names=["t"])
    for result in both(td, tmp_path / "in"):
        assert result.get("v").batch_size == (2, 3) and result.get("v").names == ["t", "u"]
    root = NonTensorData((1,), batch_size=[4])
    for result in both(root, tmp_path / "root"):
        assert type(result) is NonTensorData and (result.data, result.batch_size) == ((1,), (4,))


STACKS: dict[str, Any] = {
    "plain": lambda: NonTensorStack("a", "b"),
    "tuples": lambda: NonTensorStack((1,), (2, 3)),
    "lists": lambda: NonTensorStack([1], [2]),
    "two dims": lambda: NonTensorStack(NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f")),
    "dim 1": lambda: NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("d", "e"), stack_dim=1),
    "nothing": lambda: NonTensorStack(),
    "holders of a batch": lambda: NonTensorStack(NonTensorData("a", batch_size=[3]), NonTensorData(1, batch_size=[3])),
}


@pytest.mark.parametrize("make", STACKS.values(), ids=STACKS)
def test_stacks_of_values_come_back(make: Any, tmp_path: pathlib.Path) -> None:
    stack = make()
    td = TensorDict({"s": stack}, batch_size=stack.batch_size[:1])
    for result in (*both(stack, tmp_path / "root"), *(found.get("s") for found in both(td, tmp_path / "in"))):
        assert type(result) is NonTensorStack
        assert (result.tolist(), result.batch_size) == (stack.tolist(), stack.batch_size)
        assert result.stack_dim == stack.stack_dim


def test_stacks_that_say_no_shape(tmp_path: pathlib.Path) -> None:
    put(tmp_path / "a", {**STACK, "data": [["a", "b"], ["c", "d"]]})
    assert TensorDict.load_memmap(tmp_path / "a").batch_size == (2, 2)
    put(tmp_path / "b", {**STACK, "data": [["a", "b"], ["c"]]})
    assert TensorDict.load_memmap(tmp_path / "b").tolist() == [["a", "b"], ["c"]]
    put(tmp_path, {**NODE, "a": {"type": "NonTensorStack"}, "b": {"type": "NonTensorStack"}})
    td = TensorDict.load_memmap(tmp_path)
    assert (td.get("a").batch_size, td.get("b").batch_size) == ((2, 2), (2,))


# --- pickle -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Odd(1), "Odd has no form in JSON"),
        (b"x", "bytes"),
        ({frozenset(): 2}, "key frozenset"),
        ([{"a": (b"x",)}], r"bytes at \[0\]\['a'\]\[0\]"),
    ],
)
def test_pickle_needs_consent(value: Any, reason: str, tmp_path: pathlib.Path) -> None:
    td = TensorDict({"t": torch.zeros(2), "n": {"v": NonTensorData(value)}})
    for method in ("memmap", "memmap_", "memmap_like", "save", "dumps"):
        for options in ({"prefix": tmp_path / "saved"}, {"share_non_tensor": True}):
            with pytest.raises(UnsupportedEntryError, match=rf"(?s)\('n', 'v'\).*{reason}.*allow_pickle=True"):
                getattr(td, method)(**options)
    # In memory it stays what it is.
    assert td.memmap()["n", "v"] is td.memmap_like()["n", "v"] is td["n", "v"]
    assert type(td.clone().memmap_()["n", "v"]) is type(value)
    assert not os.listdir(tmp_path) and not td.is_locked
    saved = td.memmap(tmp_path, allow_pickle=True)
    with pytest.raises(UnsupportedEntryError, match=r"\('n', 'v'\).*allow_pickle=True"):
        TensorDict.load_memmap(tmp_path)
    for result in (saved, load_memmap(tmp_path, allow_pickle=True)):
        assert result["n", "v"] == value
    assert pickle.loads((tmp_path / "n" / "v" / "other.pickle").read_bytes()).keys() == {"data"}
    again = TensorDict().load_memmap_(tmp_path, allow_pickle=True)
    assert type(again["n", "v"]) is type(value)
    loaded = load_memmap(tmp_path, allow_pickle=True)
    with pytest.raises(UnsupportedEntryError, match=r"\('n', 'v'\).*allow_pickle=True"):
        loaded.memmap_refresh_()
    assert type(loaded.memmap_refresh_(allow_pickle=True)["n", "v"]) is type(value)


def test_pickled_stack(tmp_path: pathlib.Path) -> None:
    stack = NonTensorStack(Odd(1), "x")
    with pytest.raises(UnsupportedEntryError, match=r"Odd at \[0\] has no form in JSON"):
        stack.memmap(tmp_path)
    for result in both(stack, tmp_path, allow_pickle=True):
        assert result.tolist() == [Odd(1), "x"]
    assert meta(tmp_path)["data"] == "pickle.pkl"
    with pytest.raises(UnsupportedEntryError, match=r"pickle\.pkl.*allow_pickle=True"):
        TensorDict.load_memmap(tmp_path)


def test_values_that_nothing_can_hold(tmp_path: pathlib.Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedEntryError, match="'v'.*nested in itself"):
        TensorDict(v=NonTensorData(endless)).memmap(tmp_path)
    with pytest.raises(UnsupportedEntryError, match="'v'.*function.*pickling it fails too"):
        TensorDict(v=NonTensorData(lambda: 0)).memmap(tmp_path, allow_pickle=True)
    assert not os.listdir(tmp_path)


def test_a_value_over_a_pickled_one(tmp_path: pathlib.Path) -> None:
    TensorDict(v=NonTensorData(b"x")).memmap(tmp_path, allow_pickle=True)
    TensorDict(v=NonTensorData("x")).memmap(tmp_path)
    assert TensorDict.load_memmap(tmp_path)["v"] == "x"
    assert sorted(files(tmp_path)) == ["meta.json", "v/meta.json"]


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\x80\x04K\x01.", pickle.dumps({"x": 1}), pickle.dumps(Trap())[:-5]]
)
def test_broken_pickle(content: bytes, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "save" / "v", HOLDER)
    put(tmp_path / "save", {**NODE, "v": {"type": "NonTensorData"}})
    pickled = tmp_path / "save" / "v" / "other.pickle"
    pickled.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UnsupportedEntryError, match=r"'v'.*allow_pickle"):
        TensorDict.load_memmap(tmp_path / "save")
    assert os.listdir(tmp_path) == ["save"]
    pickled.write_bytes(content)
    with pytest.raises(SaveError, match=r"'v'.*other\.pickle"):
        TensorDict.load_memmap(tmp_path / "save", allow_pickle=True)
    pickled.unlink()
    with pytest.raises(FileNotFoundError, match="'v'"):
        TensorDict.load_memmap(tmp_path / "save", allow_pickle=True)


# --- lazy stacks ------------------------------------------------------------------------------------------------------


def named() -> LazyStackedTensorDict:
    members = [TensorDict({"a": torch.full((2, i + 1), i)}, [2], names=["x"]) for i in range(3)]
    return LazyStackedTensorDict(*members, stack_dim=1, stack_dim_name="time")


LAZY_STACKS: dict[str, Any] = {
    "unequal": lambda: lazy_stack([TensorDict(a=torch.ones(i + 1)) for i in range(11)]),
    "different keys": lambda: lazy_stack([TensorDict(a=torch.ones(1), b="x"), TensorDict(a=torch.ones(2))]),
    "named": named,
    "nested": lambda: LazyStackedTensorDict(named(), named(), stack_dim=0),
    "values": lambda: lazy_stack([TensorDict(v="x"), TensorDict(v=(1,))]),
    "unequal batch": lambda: LazyStackedTensorDict(TensorDict(batch_size=[2]), TensorDict(batch_size=[3])),
    "tensorclasses": lambda: lazy_stack(
        [Item(torch.ones(i), label=str(i), inner=Inner(torch.ones(i)) if i else None) for i in range(3)]
    ),
    "empty": lambda: LazyStackedTensorDict(stack_dim=1, batch_size=[2, 0]),
}


def parts(container: Any) -> list[Any]:
    """The members, all the way down."""
    inner = container._wrapped_container()
    if not isinstance(inner, LazyStackedTensorDict) or isinstance(inner, NonTensorStack):
        return [container]
    return [part for member in inner.tensordicts for part in parts(member)]


@pytest.mark.parametrize("make", LAZY_STACKS.values(), ids=LAZY_STACKS)
@pytest.mark.parametrize("inside", [False, True])
def test_lazy_stacks_come_back(make: Any, inside: bool, tmp_path: pathlib.Path) -> None:
    stack = make()
    results = [found["s"] for found in both(TensorDict(s=stack), tmp_path)] if inside else both(stack, tmp_path)
    for result in results:
        assert type(result) is type(stack)
        one, other = result._wrapped_container(), stack._wrapped_container()
        assert type(one) is LazyStackedTensorDict and one.stack_dim == other.stack_dim
        assert (one.batch_size, one.names) == (other.batch_size, other.names)
        assert len(parts(one)) == len(parts(other))
        for mine, theirs in zip(parts(one), parts(other), strict=True):
            assert type(mine) is type(theirs)
            assert mine.to_dict().keys() == theirs.to_dict().keys()
            for (key, value), (_, expected) in zip(mine.items(True, True), theirs.items(True, True), strict=True):
                same = torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected
                assert same, key
    saved, loaded, anonymous = results
    assert all(
        isinstance(leaf, MemoryMappedTensor) for part in parts(loaded._wrapped_container()) for leaf in part._leaves()
    )
    for result in (saved, anonymous):
        assert result.is_memmap() and (result.is_locked or not parts(result._wrapped_container()))


def test_members_write_their_files(tmp_path: pathlib.Path) -> None:
    stack = LAZY_STACKS["unequal"]()
    assert stack.memmap_(tmp_path) is stack and stack.saved_path == tmp_path
    stack[3]["a"].fill_(7)
    stack[4].update_({"a": torch.full((5,), 8.0)})
    again = TensorDict.load_memmap(tmp_path)
    assert again[3]["a"].tolist() == [7] * 4 and again[4]["a"].tolist() == [8] * 5
    # Fewer members leave no trace of the others.
    stack[:2].memmap(tmp_path, copy_existing=True)
    assert len(TensorDict.load_memmap(tmp_path).tensordicts) == 2


def test_unlocking_ends_it(tmp_path: pathlib.Path) -> None:
    stack = LAZY_STACKS["values"]().memmap_(tmp_path)
    stack.unlock_()
    assert not stack.is_memmap() and not stack[0].is_memmap()
    stack[0].set("v", "new", inplace=True)
    assert TensorDict.load_memmap(tmp_path)[0]["v"] == "x"


# --- tensorclasses and others -----------------------------------------------------------------------------------------


def item() -> Item:
    return Item(torch.ones(2, 3), "cat", inner=Inner(torch.zeros(2), batch_size=[2]), anything=("u", 2), batch_size=[2])


def test_tensorclass(tmp_path: pathlib.Path) -> None:
    for result in both(TensorDict({"i": item()}, [2]), tmp_path):
        found = result["i"]
        assert type(found) is Item and type(found.inner) is Inner
        assert (found.label, found.anything, found.extra, found.x.tolist()) == ("cat", ("u", 2), None, [[1] * 3] * 2)
    assert meta(tmp_path / "i") == {"_type": f"<class '{__name__}.Item'>", "extra": None}
    assert type(Item.load_memmap(tmp_path / "i")) is Item
    assert type(TensorDict.load_memmap(tmp_path, subpath=("i", "inner"))) is Inner
    assert TensorDict.load_memmap(tmp_path, subpath="i/label").batch_size == (2,)
    # Written through, as any value.
    saved = TensorDict.load_memmap(tmp_path)
    saved["i"].update_({"label": "dog"})
    assert TensorDict.load_memmap(tmp_path)["i"].label == "dog"


def test_local_tensorclass(tmp_path: pathlib.Path) -> None:
    class Local(TensorClass):
        x: torch.Tensor

    Local(torch.ones(2), batch_size=[2]).memmap(tmp_path)
    assert meta(tmp_path)["_type"].endswith("test_local_tensorclass.<locals>.Local'>")
    assert type(TensorDict.load_memmap(tmp_path)) is Local


def test_unbatched_tensor(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.arange(5)), "t": torch.zeros(2)}, [2])
    for result in both(td, tmp_path / "a"):
        assert type(result["u"]) is UnbatchedTensor and result["u"].tolist() == [0, 1, 2, 3, 4]
        assert result[0]["u"].shape == (5,)
    td.memmap_(tmp_path / "b")
    td["u"].fill_(1)
    assert TensorDict.load_memmap(tmp_path / "b")["u"].tolist() == [1] * 5
    # The reference knows no such entries, and passes over this list.
    assert meta(tmp_path / "b")["_entries"] == [["u", {"type": "UnbatchedTensor"}]]
    assert TensorDict.load_memmap(tmp_path / "b", device="meta")["u"].shape == (5,)


def test_typed_tensordict_is_a_tensordict_on_disk(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"s": Step(obs=torch.ones(2), batch_size=[2])}, [2])
    saved, loaded, anonymous = both(td, tmp_path)
    assert type(saved["s"]) is Step and type(anonymous["s"]) is Step
    assert type(loaded["s"]) is TensorDict and Step.from_tensordict(loaded["s"]).obs.tolist() == [1, 1]
    assert meta(tmp_path)["s"] == {"type": "TensorDict"}


def test_like_keeps_the_values(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"i": item(), "l": lazy_stack([TensorDict(a=torch.ones(2), v=str(i)) for i in range(2)])}, [2])
    for result in (td.memmap_like(tmp_path), td.memmap_like(), TensorDict.load_memmap(tmp_path)):
        assert result["i"].label == "cat" and result["l"]["v"] == ["0", "1"]
        assert result["i"].x.tolist() == [[0] * 3] * 2 and result["l"]["a"].tolist() == [[0, 0]] * 2


@pytest.mark.parametrize("num_threads", [0, 3])
def test_return_early(num_threads: int, tmp_path: pathlib.Path) -> None:
    future = TensorDict(i=item(), v="x").memmap(tmp_path, return_early=True, num_threads=num_threads)
    assert future.result()["v"] == "x" and TensorDict.load_memmap(tmp_path)["i"].label == "cat"


def test_names_that_need_encoding(tmp_path: pathlib.Path) -> None:
    td = TensorDict()
    for name in ("", "..", "a/b", "meta.json", "shape", "_type", "data"):
        td[name] = NonTensorData((name,))
        td["n" + name] = lazy_stack([TensorDict(a=torch.ones(1))])
    td.memmap(tmp_path / "saved")
    again = TensorDict.load_memmap(tmp_path / "saved")
    assert set(again.keys()) == set(td.keys()) and os.listdir(tmp_path) == ["saved"]
    assert all(again[name] == (name,) for name in ("", "..", "a/b", "meta.json", "shape", "_type", "data"))


def test_existsok_and_copies(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"i": item(), "u": UnbatchedTensor(torch.ones(3))}, [2])
    saved = td.memmap(tmp_path / "a")
    for value in (td, item(), NonTensorData("x")):
        with pytest.raises(SaveError, match="existsok=True"):
            value.memmap(tmp_path / "a", existsok=False)
    with pytest.raises(SaveError, match="copy_existing=True"):
        saved.memmap(tmp_path / "b")
    saved.memmap(tmp_path / "b", copy_existing=True)
    one, other = files(tmp_path / "a"), files(tmp_path / "b")
    assert one == other
    # Saving the saved again changes nothing.
    saved.memmap(tmp_path / "a")
    assert files(tmp_path / "a") == one


# --- partial loading, refreshing --------------------------------------------------------------------------------------


def test_keys(tmp_path: pathlib.Path) -> None:
    stack = lazy_stack([TensorDict(a=torch.ones(2), b=torch.zeros(2)) for _ in range(2)])
    td = TensorDict({"i": item(), "n": {"a": torch.ones(2), "b": {"c": "x"}}, "l": stack, "t": torch.ones(2)}, [2])
    td.memmap(tmp_path)

    def names(*keys: Any, **options: Any) -> set[Any]:
        found = TensorDict.load_memmap(tmp_path, keys=list(keys), **options)
        return {
            key if isinstance(key, str) else ".".join(key) for key in found.keys(True, True, is_leaf=is_leaf_nontensor)
        }

    assert names("t") == {"t"}
    assert names(("n", "b", "c"), "t") == {"n.b.c", "t"}
    assert names("n", ("n", "a")) == names(("n", "a"), "n") == {"n.a", "n.b.c"}
    assert names(("i", "x"), ("i", "inner", "a")) == {"i.x", "i.inner.a"}
    assert names(("l", "b")) == {"l.b"}
    assert names("a", subpath="n") == {"a"}
    assert names() == set()
    assert set(load_memmap(tmp_path, keys="t").keys()) == {"t"}
    (tmp_path / "n" / "b" / "c" / "meta.json").write_text("broken")
    (tmp_path / "t.memmap").unlink()
    assert names(("n", "a")) == {"n.a"}
    with pytest.raises(KeyError, match=r"\('n', 'z'\).*\['a', 'b'\]"):
        names(("n", "z"))
    with pytest.raises(KeyError, match=r"'t' in .* is a tensor"):
        names(("t", "z"))
    with pytest.raises(KeyError, match=r"\('l', '0', 'z'\)"):
        names(("l", "z"))
    with pytest.raises(KeyError, match=r"\('i', 'label', 'z'\)"):
        names(("i", "label", "z"))
    with pytest.raises(ValueError, match="not both"):
        TensorDict.load_memmap(tmp_path, keys=["n"], out=TensorDict())


def test_subpath(tmp_path: pathlib.Path) -> None:
    TensorDict({"l": lazy_stack([item(), item()])}).memmap(tmp_path)
    inner = TensorDict.load_memmap(tmp_path, subpath="l/1/inner")
    assert type(inner) is Inner and inner.saved_path == tmp_path / "l/_tensordict/1/inner/_tensordict"
    for wrong in ("l/2", "l/x", "l/00", "l/1/nothing"):
        with pytest.raises(SaveError, match="subpath"):
            TensorDict.load_memmap(tmp_path, subpath=wrong)


def test_refresh(tmp_path: pathlib.Path) -> None:
    stack = lazy_stack([TensorDict(a=torch.ones(1), v="x"), TensorDict(a=torch.ones(2), v="y")])
    td = TensorDict({"i": item(), "l": stack, "v": "x", "s": ["a", "b"]}, [2])
    writer = td.memmap_(tmp_path)
    reader = TensorDict.load_memmap(tmp_path)
    kept, leaf = reader["i"], reader["i"].x
    writer["i"].update_({"label": "dog"})
    writer.update_({"v": "z", "s": ["c", "d"]})
    writer["l"][1].update_({"v": "changed"})
    assert (reader["v"], reader["i"].label, reader["s"]) == ("x", "cat", ["a", "b"])
    reader.memmap_refresh_()
    assert (reader["v"], reader["i"].label, reader["s"]) == ("z", "dog", ["c", "d"])
    assert reader["l"][1]["v"] == "changed"
    assert reader["i"] is kept and reader["i"].x is leaf
    for container in (reader["i"], NonTensorData.load_memmap(tmp_path / "v"), TensorDict.load_memmap(tmp_path / "s")):
        assert container.memmap_refresh_() is container


def test_out(tmp_path: pathlib.Path) -> None:
    item().memmap(tmp_path / "i")
    target = Item(torch.zeros(2, 3), "old", batch_size=[2])
    assert Item.load_memmap(tmp_path / "i", out=target) is target and target.label == "cat"
    stack = lazy_stack([TensorDict(a=torch.ones(2)) for _ in range(2)])
    stack.memmap(tmp_path / "l")
    other = lazy_stack([TensorDict(a=torch.zeros(2)) for _ in range(2)])
    members = list(other.tensordicts)
    TensorDict.load_memmap(tmp_path / "l", out=other)
    assert all(a is b for a, b in zip(other.tensordicts, members, strict=True)) and other["a"].sum() == 4
    before = TensorDict(a=torch.zeros(2))
    for name in ("i", "l"):
        with pytest.raises(SaveError, match=r"cannot be loaded into a TensorDict"):
            TensorDict.load_memmap(tmp_path / name, out=before)
    assert before["a"].tolist() == [0, 0]


def test_make_memmap_in_other_kinds(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"i": item(), "l": lazy_stack([TensorDict(), TensorDict()])}, [2]).memmap_(tmp_path)
    td["i"].make_memmap("extra", (2,)).fill_(3)
    td.make_memmap(("i", "inner", "a2"), (2,))
    assert TensorDict.load_memmap(tmp_path, subpath="i", keys=["extra"]).extra.tolist() == [3, 3]
    with pytest.raises(UnsupportedEntryError, match=r"\('l', 'a'\).*each member"):
        td.make_memmap(("l", "a"), (2,))
    td["l"][0].make_memmap("a", ())


# --- new values -------------------------------------------------------------------------------------------------------


def make(folder: pathlib.Path | None, **options: Any) -> TensorDict:
    td = TensorDict({"v": "x", "s": ["a", "b"], "n": {"m": MetaData(1)}, "t": torch.zeros(2)}, [2])
    return td.memmap_(folder, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_new_values_are_written_through(loaded: bool, share: bool, tmp_path: pathlib.Path) -> None:
    td = make(tmp_path, share_non_tensor=share)
    if loaded:
        td = TensorDict.load_memmap(tmp_path)

    def now() -> Any:
        again = TensorDict.load_memmap(tmp_path)
        assert (td["v"], td["s"], td["n", "m"]) == (again["v"], again["s"], again["n", "m"])
        assert (again.get("v").batch_size, again.get("s").batch_size) == ((2,), (2,))
        return again["v"], again["s"], again["n", "m"]

    td.update_({"v": (1, 2), "n": {"m": 2}})
    assert now() == ((1, 2), ["a", "b"], 2)
    td.set_("v", "set")
    td.set("v", "set too", inplace=True)
    assert now()[0] == "set too"
    td.update_({"s": ["c", "d"]})
    assert now()[1] == ["c", "d"]
    td["s"][0] = "e"
    td.get("s")[1] = "f"
    assert now()[1] == ["e", "f"]
    td.set_at_("s", "g", 0)
    assert now()[1] == ["g", "f"]
    td.get("v").update_("holder")
    td.get("s").update_(["h", "i"])
    assert now() == ("holder", ["h", "i"], 2)
    td.memmap(tmp_path)
    assert now() == ("holder", ["h", "i"], 2)


def test_one_value_becomes_several(tmp_path: pathlib.Path) -> None:
    td = make(tmp_path)
    td[0] = {"v": "first", "s": "z", "t": 1.0, "n": {"m": 1}}
    again = TensorDict.load_memmap(tmp_path)
    for result in (td, again):
        assert result["v"] == ["first", "x"] and result["s"] == ["z", "b"]
    assert type(again.get("v")) is NonTensorStack
    td.update_({"v": ["p", "q"]})
    assert TensorDict.load_memmap(tmp_path)["v"] == ["p", "q"]


def test_values_without_a_file() -> None:
    td = make(None)
    td.update_({"v": "new"})
    assert td["v"] == "new"


def test_a_value_that_cannot_be_written_through(tmp_path: pathlib.Path) -> None:
    td = make(tmp_path)
    before = files(tmp_path)
    for write in (lambda: td.update_({"t": torch.ones(2), "v": b"x"}), lambda: td.get("v").update_(b"x")):
        with pytest.raises(UnsupportedEntryError, match="bytes has no form in JSON"):
            write()
    assert files(tmp_path) == before and td["v"] == "x" and td["t"].tolist() == [0, 0]


def test_what_was_pickled_gives_way(tmp_path: pathlib.Path) -> None:
    td = TensorDict(v=NonTensorData(b"x"), s=NonTensorStack(b"a", b"b")).memmap_(tmp_path, allow_pickle=True)
    td.update_({"v": "x"})
    td.get("s").update_(["a", "b"])
    again = TensorDict.load_memmap(tmp_path)
    assert again["v"] == "x" and again["s"] == ["a", "b"]
    assert not list(tmp_path.rglob("*.p*kl*"))


def test_a_save_in_the_place_is_left_alone(tmp_path: pathlib.Path) -> None:
    old = make(tmp_path)
    shared = make(tmp_path / "shared", share_non_tensor=True)
    make(tmp_path)
    TensorDict({"v": "other"}).memmap(tmp_path / "shared")
    for td in (old, shared):
        td.update_({"v": "of the old one"})
        assert td["v"] == "of the old one"
    assert TensorDict.load_memmap(tmp_path)["v"] == "x"
    assert TensorDict.load_memmap(tmp_path / "shared")["v"] == "other"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_where_we_may_not_write(tmp_path: pathlib.Path) -> None:
    make(tmp_path)
    (tmp_path / "v").chmod(0o555)
    td = TensorDict.load_memmap(tmp_path)
    td.update_({"v": "mine alone"})
    assert td["v"] == "mine alone" and TensorDict.load_memmap(tmp_path)["v"] == "x"


# --- values that processes share --------------------------------------------------------------------------------------


def in_child(td: Any, given: Any, told: Any) -> None:
    """Say what is seen, then write, then wait, then say what is seen again."""
    told.put((td["v"], td["s"], td["n", "m"]))
    td.update_({"v": "child", "n": {"m": (1,)}})
    td["s"][1] = "child"
    told.put("written")
    given.get(timeout=60)
    told.put((td["v"], td["s"], td["n", "m"]))


SHARING = list(itertools.product([True, False], [True, False], ["fork", "spawn"]))


@pytest.mark.parametrize(
    ("share", "prefix", "how"),
    mark_slow(SHARING, keep=[case for case in SHARING if "fork" in case or case == (True, True, "spawn")]),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_share_non_tensor(share: bool, prefix: bool, how: str, tmp_path: pathlib.Path) -> None:
    td = make(tmp_path if prefix else None, share_non_tensor=share)
    context = multiprocessing.get_context(how)
    given, told = context.Queue(), context.Queue()
    child = context.Process(target=in_child, args=(td, given, told))
    child.start()
    first = ("x", ["a", "b"], 1)
    assert told.get(timeout=60) == first
    assert told.get(timeout=60) == "written"
    theirs = ("child", ["a", "child"], (1,))
    assert (td["v"], td["s"], td["n", "m"]) == (theirs if share else first)
    td.update_({"v": "parent", "s": ["p", "q"]})
    given.put("go on")
    assert told.get(timeout=60) == (("parent", ["p", "q"], (1,)) if share else theirs)
    child.join(60)
    assert child.exitcode == 0
    assert td["v"] == "parent"


def test_who_loads_it_shares_too(tmp_path: pathlib.Path) -> None:
    td = make(tmp_path, share_non_tensor=True)
    one, other = TensorDict.load_memmap(tmp_path), TensorDict.load_memmap(tmp_path)
    for number in range(20):
        one.update_({"v": str(number), "s": [number, "x"]})
        assert td["v"] == other["v"] == str(number)
        assert td["s"] == other["s"] == [number, "x"]
        assert other[0]["s"] == number
    plain = other.clone()
    assert type(plain.get("v")) is NonTensorData and type(plain.get("s")) is NonTensorStack
    td.update_({"v": "later", "s": ["later"] * 2})
    assert plain["v"] == "19" and other["v"] == "later"
    assert td.get("s").is_locked and td.get("s")[0].is_locked
    td.unlock_()
    assert type(td.get("v")) is NonTensorData and type(td.get("s")) is NonTensorStack
    td.set("v", "mine", inplace=True)
    assert other["v"] == "later"


def test_the_folder_of_shared_values_goes_away(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    td = make(None, share_non_tensor=True)
    copy = pickle.loads(pickle.dumps(td))
    assert len(os.listdir(tmp_path)) == 3
    td.update_({"v": "new"})
    assert copy["v"] == "new"
    del td
    assert os.listdir(tmp_path) == []
    assert copy["v"] == "new" and copy["s"] == ["a", "b"]


def test_shared_one_value_stays_one(tmp_path: pathlib.Path) -> None:
    td = make(tmp_path, share_non_tensor=True)
    for write in (
        lambda: td.set_at_("v", "y", 0),
        lambda: td.update_({"v": ["p", "q"]}),
        lambda: td.__setitem__(0, {"v": "y", "s": "y", "t": 1.0, "n": {"m": 1}}),
    ):
        with pytest.raises(RuntimeError, match="'v'.*maybe_to_stack"):
            write()
    assert (td["v"], td["s"], td["t"].tolist()) == ("x", ["a", "b"], [0, 0])


# --- saves that do not add up -----------------------------------------------------------------------------------------

UNSOUND: dict[str, tuple[Any, str]] = {
    "stack dim is missing": ({k: v for k, v in LAZY.items() if k != "stack_dim"}, "stack_dim.*None"),
    "stack dim is text": ({**LAZY, "stack_dim": "0"}, "stack_dim.*'0'"),
    "stack dim is a bool": ({**LAZY, "stack_dim": True}, "stack_dim.*True"),
    "stack dim is negative": ({**LAZY, "stack_dim": -1}, "stack_dim.*-1"),
    "stack dim is large": ({**LAZY, "stack_dim": 10**30}, "stack_dim"),
    "count is negative": ({**LAZY, "_count": -1}, "number of members"),
    "count is a float": ({**LAZY, "_count": 1.0}, "number of members"),
    "names of numbers": ({**LAZY, "_names": [1]}, "dim names"),
    "too many names": ({**LAZY, "_shape": [0], "_names": ["x", "y"]}, "does not add up"),
    "empty stack of a wrong dim": ({**LAZY, "stack_dim": 3, "_shape": [0]}, "does not add up"),
    "shape of an empty stack": ({**LAZY, "_shape": [-1]}, "non-negative"),
    "no values": (STACK, "no values"),
    "values are text": ({**STACK, "data": "abc"}, "'abc' and not a list"),
    "values of no shape": ({**STACK, "data": ["a", "b"], "_shape": [3]}, "does not add up.*nested lists of"),
    "values of a deeper shape": ({**STACK, "data": ["a", "b"], "_shape": [2, 2]}, "does not add up"),
    "values of a huge shape": ({**STACK, "data": [], "_shape": [2**62, 2**62]}, "does not add up"),
    "stack dim past the values": ({**STACK, "stack_dim": 1, "data": ["a"]}, "does not add up"),
    "exact values are broken": ({**STACK, "data": [1], "_exact": {"%float": "1"}}, "value is broken"),
    "exact value is broken": ({**HOLDER, "data": 1, "_metadata": {"_exact": {"%what": 1}}}, "value is broken"),
    "shape of a holder": ({**HOLDER, "data": 1, "_metadata": {"_shape": "2"}}, "batch size is '2'"),
    "names of a holder": ({**HOLDER, "data": 1, "_metadata": {"_shape": [2], "_names": []}}, "dim names"),
    "unbatched without a tensor": ({**NODE, "_type": "<class 'tensordict.UnbatchedTensor'>"}, "does not add up"),
}


@pytest.mark.parametrize(("content", "message"), UNSOUND.values(), ids=UNSOUND)
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_unsound_metadata(content: Any, message: str, nested: bool, tmp_path: pathlib.Path) -> None:
    folder = put(tmp_path / "inner", content) if nested else put(tmp_path, content)
    if nested:
        put(tmp_path, {**NODE, "shape": [], "inner": {"type": "X"}})
    with pytest.raises(SaveError, match=message) as caught:
        TensorDict.load_memmap(tmp_path)
    assert not nested or "'inner'" in str(caught.value)
    assert "does not add up" in str(caught.value) or str(folder) in str(caught.value)


def test_unsound_structure(tmp_path: pathlib.Path) -> None:
    put(tmp_path / "lazy", {**LAZY, "_count": 2**62})
    put(tmp_path / "lazy" / "0", {**NODE})
    with pytest.raises(FileNotFoundError, match="'1'"):
        TensorDict.load_memmap(tmp_path / "lazy")
    put(tmp_path / "lazy" / "1", {**NODE, "shape": [2, 3]})
    put(tmp_path / "lazy", LAZY)
    with pytest.raises(SaveError, match="does not add up"):
        TensorDict.load_memmap(tmp_path / "lazy")
    # A holder whose batch size does not begin with its container's.
    put(tmp_path / "v", {**HOLDER, "data": 1, "_metadata": {"_shape": [3]}})
    put(tmp_path, {**NODE, "v": {"type": "NonTensorData"}})
    with pytest.raises(SaveError, match=r"\[3\] of 'v' does not begin with \[2\]"):
        TensorDict.load_memmap(tmp_path)
    # A tensorclass over a value, or over another tensorclass.
    for behind in ({**HOLDER, "data": 1}, {**STACK, "data": ["a"]}):
        put(tmp_path / "c" / "_tensordict", behind)
        put(tmp_path / "c", {"_type": f"<class '{__name__}.Inner'>"})
        with pytest.raises(SaveError, match="does not add up"):
            TensorDict.load_memmap(tmp_path / "c")
    Inner(torch.ones(2)).memmap(tmp_path / "c" / "_tensordict")
    with pytest.raises(SaveError, match="does not add up"):
        TensorDict.load_memmap(tmp_path / "c")
    deep = tmp_path / "deep"
    for _ in range(400):
        put(deep, {**LAZY, "_count": 1})
        deep = deep / "0"
    with pytest.raises((SaveError, OSError)):
        TensorDict.load_memmap(tmp_path / "deep")


@pytest.mark.parametrize("depth", [990, 100_000])
def test_deep_values(depth: int, tmp_path: pathlib.Path) -> None:
    text = json.dumps({**HOLDER, "data": 1, "_metadata": {"_exact": "%"}})
    put(tmp_path, {}).joinpath("meta.json").write_text(text.replace('"%"', "[" * depth + "]" * depth))
    with pytest.raises(SaveError, match=r"meta\.json is broken.*(not JSON|value is broken)"):
        TensorDict.load_memmap(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(7, 1 << 20), (3, 5 << 20), (1 << 19,)])
@pytest.mark.parametrize("checksum", [False, True])
def test_streaming_from_a_device(shape: tuple[int, ...], checksum: bool, tmp_path: pathlib.Path) -> None:
    host = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    device = host.cuda()
    leaves = {"plain": device, "strided": device.flip(0).movedim(0, -1), "conj": torch.complex(device, device).conj()}
    TensorDict(leaves).memmap(tmp_path, num_threads=2, checksum=checksum)
    again = TensorDict.load_memmap(tmp_path)
    assert torch.equal(again["plain"], host) and torch.equal(again["strided"], host.flip(0).movedim(0, -1))
    assert torch.equal(again["conj"].imag, -host)


@pytest.mark.gpu
def test_values_and_stacks_on_a_device(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"i": item(), "u": UnbatchedTensor(torch.ones(3))}, [2], device="cuda")
    for result in both(td, tmp_path)[:2]:
        assert result["i"].label == "cat" and result["u"].tolist() == [1, 1, 1] and result.device.type == "cpu"
    moved = TensorDict.load_memmap(tmp_path, device="cuda")
    assert moved["i"].x.is_cuda and moved["u"].is_cuda and moved.get(("i", "label")).device.type == "cuda"


def test_a_tensorclass_takes_over_the_folder_that_it_names(tmp_path: pathlib.Path) -> None:
    saved = Inner(a=torch.ones(2), batch_size=[2]).memmap(tmp_path)
    for folder in (tmp_path, saved.saved_path):
        item = Inner(a=torch.zeros(2), batch_size=[2])
        assert item.load_memmap_(folder) is item and item.a.tolist() == [1, 1]
