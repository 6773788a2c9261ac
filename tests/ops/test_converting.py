"""To and from dicts, lists and numpy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensordict
from tensordict import TensorDict, from_dict, fromkeys, make_tensordict


def make(**kwargs: Any) -> TensorDict:
    return TensorDict({"a": torch.arange(12.0).view(3, 4), "b": {"c": torch.arange(3)}}, [3], **kwargs)


def test_to_dict() -> None:
    td = make()
    plain = td.to_dict()
    assert type(plain["b"]) is dict
    assert plain["a"] is td["a"]
    assert plain["b"]["c"] is td["b", "c"]
    plain["b"]["new"] = 1
    assert ("b", "new") not in td.keys(True)
    assert td.to_dict(convert_tensors=True) == {"a": td["a"].tolist(), "b": {"c": [0, 1, 2]}}
    with pytest.raises(ValueError, match="'list'"):
        td.to_dict(convert_tensors="list")  # type: ignore[arg-type]


def test_to_dict_with_lists_first() -> None:
    td = TensorDict({"b": TensorDict({"c": torch.arange(2)}, [2]), "d": {"e": torch.ones(2)}})
    plain = td.to_dict(convert_tensors=True, tolist_first=True)
    assert plain == {"b": [{"c": 0}, {"c": 1}], "d": {"e": [1.0, 1.0]}}


def test_numpy_shares_memory() -> None:
    td = make()
    arrays = td.numpy()
    assert isinstance(arrays["b"]["c"], np.ndarray)
    arrays["b"]["c"][0] = 7
    assert td["b", "c"][0] == 7
    assert TensorDict(a=torch.ones(2, requires_grad=True)).numpy()["a"].tolist() == [1, 1]
    with pytest.raises(TypeError, match="entry 'a'"):
        TensorDict(a=torch.zeros(2, dtype=torch.bfloat16)).numpy()


def test_to_tensordict_is_deep_and_unlocked() -> None:
    td = make(names=["x"], device="cpu").lock_()
    copied = td.to_tensordict()
    assert type(copied) is type(copied["b"]) is TensorDict
    assert not copied.is_locked
    assert copied["a"] is not td["a"]
    assert copied["a"].data_ptr() != td["a"].data_ptr()
    assert copied.names == ["x"]
    assert copied.device == torch.device("cpu")
    assert (copied == td).all()


def test_tolist() -> None:
    td = TensorDict({"a": torch.arange(6).view(2, 3), "b": {"c": torch.ones(2, 3, 1)}}, [2, 3])
    items = td.tolist(convert_tensors=True)
    assert items[1][2] == {"a": 5, "b": {"c": [1.0]}}
    assert [len(row) for row in items] == [3, 3]
    nodes = td.tolist(convert_nodes=False)
    assert isinstance(nodes[0][1], TensorDict)
    assert nodes[0][1]["a"] == 1
    assert TensorDict(a=torch.zeros(2)).tolist(convert_tensors=True) == {"a": [0.0, 0.0]}
    assert type(td.tolist(convert_tensors="numpy")[0][0]["a"]) in (np.ndarray, np.int64)
    deep = TensorDict({"b": TensorDict({"c": torch.arange(4).view(2, 2)}, [2, 2])}, [2])
    assert deep.tolist(convert_tensors=True, tolist_first=True) == [
        {"b": [{"c": 0}, {"c": 1}]},
        {"b": [{"c": 2}, {"c": 3}]},
    ]


def test_linked_lists_write_through() -> None:
    td = TensorDict({"a": torch.arange(4).view(2, 2)}, [2, 2])
    linked = td.tolist(as_linked_list=True)
    linked[0][1] = {"a": 10}
    assert td["a"].tolist() == [[0, 10], [2, 3]]
    linked[1][:] = [{"a": 20}, {"a": 21}]
    assert td["a"].tolist() == [[0, 10], [20, 21]]
    assert linked[1] == [{"a": 20}, {"a": 21}]
    with pytest.raises(TypeError, match="as many values"):
        linked[0][:1] = []
    linked[0].reverse()  # Moving items ends the link.
    linked[0][0] = {"a": 30}
    assert td["a"].tolist() == [[0, 10], [20, 21]] and linked[0][0] == {"a": 30}


NESTED = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3, 4, 5)}}


@pytest.mark.parametrize("convert", [TensorDict.from_dict, tensordict.TensorDictBase.from_dict, from_dict])
def test_from_dict(convert: Any) -> None:
    plain = convert(NESTED)
    assert type(plain) is TensorDict
    assert plain.batch_size == plain["b"].batch_size == torch.Size([])
    assert plain["a"] is NESTED["a"]
    auto = convert(NESTED, auto_batch_size=True)
    assert auto.batch_size == torch.Size([3, 4])
    assert auto["b"].batch_size == torch.Size([3, 4, 5])
    limited = convert(NESTED, batch_dims=1)
    assert limited.batch_size == limited["b"].batch_size == torch.Size([3])
    given = convert(NESTED, batch_size=[3], device="cpu")
    assert given.batch_size == torch.Size([3])
    assert given.device == given["b"].device == torch.device("cpu")
    with pytest.raises(ValueError, match="not both"):
        convert(NESTED, batch_size=[3], batch_dims=1)
    with pytest.raises(TypeError, match="got list"):
        convert([1])
    with pytest.raises(RuntimeError, match="'a'"):
        convert(NESTED, batch_size=[5])


def test_from_dict_names_and_tuple_keys() -> None:
    td = TensorDict.from_dict({("b", "c"): torch.zeros(3), "a": torch.zeros(3)}, auto_batch_size=True, names=["x"])
    assert td.names == td["b"].names == ["x"]
    assert TensorDict.from_dict({"a": torch.zeros(3)}, batch_size=[3], names=["x"]).names == ["x"]


def test_from_dict_leaves_its_input_alone() -> None:
    child = TensorDict({"c": torch.zeros(3, 4)}, [3])
    source = TensorDict({"a": torch.zeros(3, 4), "b": child}, [])
    found = TensorDict.from_dict(source, auto_batch_size=True)
    assert found.batch_size == found["b"].batch_size == torch.Size([3, 4])
    assert source.batch_size == torch.Size([])
    assert source["b"].batch_size == child.batch_size == torch.Size([3])
    TensorDict.from_dict({"b": child}, auto_batch_size=True)
    assert child.batch_size == torch.Size([3])


def test_round_trip() -> None:
    td = make()
    assert (TensorDict.from_dict(td.to_dict(), batch_size=[3]) == td).all()
    assert (td.from_dict_instance(td.to_dict(), batch_size=[3]) == td).all()
    arrays = TensorDict.from_dict(td.numpy(), batch_size=[3])
    assert (arrays == td).all()


def test_from_dict_instance_keeps_the_kinds_of_nested_containers() -> None:
    class Special(TensorDict):
        pass

    td = TensorDict({"a": torch.zeros(3)}, [3])
    td["s"] = Special({"x": torch.zeros(3)}, [3])
    again = td.from_dict_instance(td.to_dict() | {"new": {"y": torch.ones(3)}}, batch_size=[3])
    assert type(again["s"]) is Special
    assert again["s"].batch_size == torch.Size([3])
    assert type(again["new"]) is TensorDict
    assert type(TensorDict.from_dict(td.to_dict())["s"]) is TensorDict
    with pytest.raises(TypeError, match="one mapping"):
        td.from_dict_instance({}, {})


def test_make_tensordict() -> None:
    td = make_tensordict({"a": torch.zeros(3, 4), "b": torch.zeros(3)}, b=torch.ones(3), batch_size=[3], device="cpu")
    assert td["b"].all()
    assert td.device == torch.device("cpu")
    assert make_tensordict(a=torch.zeros(3, 4), batch_size=3).batch_size == torch.Size([3])
    assert make_tensordict(NESTED, auto_batch_size=True).batch_size == torch.Size([3, 4])
    assert make_tensordict(batch_size=[3]).is_empty()
    assert make_tensordict(NESTED)["a"] is NESTED["a"]


@pytest.mark.parametrize("convert", [TensorDict.fromkeys, fromkeys])
def test_fromkeys(convert: Any) -> None:
    td = convert(["a", ("b", "c")], 1.5)
    assert td.to_dict(convert_tensors=True) == {"a": 1.5, "b": {"c": 1.5}}
    assert td.batch_size == torch.Size([])
    assert convert(iter(["a"]))["a"] == 0
    with pytest.raises(TypeError, match="key"):
        convert([1])


def test_from_dict_instance_of_a_stored_container_lies_in_memory(tmp_path: Path) -> None:
    stored = TensorDict({"a": torch.ones(3), "c": {"d": torch.ones(3)}}, batch_size=[3]).to_h5(tmp_path / "a.h5")
    made = stored.from_dict_instance(stored.to_dict(), batch_size=[3])
    assert type(made) is TensorDict and made["c", "d"].tolist() == [1.0, 1.0, 1.0]


def test_numbers_in_a_dict_of_another_batch_size_are_values() -> None:
    data = {"n": 7, "b": {"x": 0.5}, "a": torch.zeros(3)}
    td = TensorDict.from_dict(data, batch_size=[3])
    assert (td["n"], td["b", "x"], td[0]["n"]) == (7, 0.5, 7)
    assert data["b"] == {"x": 0.5}
    assert isinstance(TensorDict.from_dict(data, batch_size=[])["n"], torch.Tensor)
    with pytest.raises(RuntimeError, match="batch size"):
        TensorDict.from_dict({"n": torch.tensor(7)}, batch_size=[3])


def test_from_any_of_a_list_takes_the_name_of_a_device() -> None:
    assert TensorDict.from_any([torch.zeros(2), torch.ones(2)], device="cpu").tolist() == [[0.0, 0.0], [1.0, 1.0]]
