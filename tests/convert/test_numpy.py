"""Structured arrays: memory that is shared, dtypes that have no counterpart, and arrays made of containers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib import recfunctions

import tensordict
from tensordict import NonTensorData, TensorDict

DOGS = [("Rex", 9, 81.0), ("Fido", 3, 27.0)]
DTYPE = [("name", "U10"), ("age", "i4"), ("weight", "f4")]


@pytest.mark.parametrize("convert", [tensordict.from_struct_array, TensorDict.from_struct_array, TensorDict.from_any])
def test_memory_is_shared_both_ways(convert: Any) -> None:
    dogs = np.array(DOGS, dtype=DTYPE)
    td = convert(dogs)
    assert td.batch_size == (2,) and td["name"] == ["Rex", "Fido"] and td[1]["name"] == "Fido"
    dogs["age"] += 1
    td["weight"][0] = 5
    assert td["age"].tolist() == [10, 4] and dogs["weight"].tolist() == [5, 27]
    again = td.to_struct_array()
    assert (again == dogs).all() and again.shape == dogs.shape and again.dtype == dogs.dtype
    assert td[0].to_struct_array().tolist() == ("Rex", 10, 5.0)


def test_nested_structures_and_dims() -> None:
    inner = [("c", "i8"), ("d", "f4", (2,))]
    values = np.zeros((3,), dtype=np.dtype([("a", "?"), ("b", inner, (5,)), ("z", "c8")], align=True))
    td = TensorDict.from_struct_array(values)
    assert td.batch_size == (3,) and td["b"].batch_size == (3, 5) and td["b", "d"].shape == (3, 5, 2)
    values["b"]["c"][1, 2] = 7
    assert td["b", "c"][1, 2] == 7
    again = td.to_struct_array()
    assert again.dtype["b"].shape == (5,) and (again["b"]["c"] == values["b"]["c"]).all()
    assert TensorDict.from_struct_array(values, auto_batch_size=True)["b"].batch_size == (3, 5)
    assert TensorDict.from_struct_array(values, batch_dims=0).batch_size == ()
    assert TensorDict.from_struct_array(values, batch_size=[]).batch_size == ()
    assert TensorDict.from_struct_array(values, device="meta")["b", "c"].is_meta
    with pytest.raises(RuntimeError, match=r"\[4\]"):
        TensorDict.from_struct_array(values, batch_size=[4])


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_dtypes(dtype: str) -> None:
    values = np.zeros((2, 3), dtype=[("a", dtype)])
    td = TensorDict.from_struct_array(values)
    assert td.batch_size == (2, 3) and td["a"].data_ptr() == values.ctypes.data
    assert td.to_struct_array().dtype == values.dtype


def test_values_that_torch_has_not() -> None:
    dtype = np.dtype([("day", "M8[ns]"), ("took", "m8[s]"), ("raw", "S3"), ("n", "i4")], align=True)
    values = np.zeros(2, dtype=dtype)
    values["day"], values["raw"] = np.array(["2026-01-01", "2026-01-02"], "M8[ns]"), [b"ab", b"c"]
    td = TensorDict.from_struct_array(values)
    assert td["raw"] == [b"ab", b"c"] and td[1]["day"] == np.datetime64("2026-01-02", "ns")
    again = td.to_struct_array()
    assert again["day"].dtype == "M8[ns]" and again["took"].dtype == "m8[s]" and again["raw"].dtype == "S2"
    assert (again["day"] == values["day"]).all()
    assert TensorDict.from_struct_array(values[:0]).batch_size == (0,)
    assert TensorDict.from_struct_array(values[1])["raw"] == b"c"


@pytest.mark.parametrize("shape", [(0,), (0, 2), (2, 0), (2, 0, 3)])
def test_values_of_no_elements(shape: tuple[int, ...]) -> None:
    td = TensorDict.from_struct_array(np.zeros(shape, dtype=[("day", "M8[s]"), ("name", "U3")]))
    assert td.batch_size == shape
    assert td["day"] == td["name"] == np.zeros(shape).tolist()


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        (np.zeros(2, dtype=[("n", [("a", "O")])]), TypeError, r"\('n', 'a'\) has the dtype object"),
        (np.zeros(2, dtype=[("a", "V3")]), TypeError, "'a' has the dtype"),
        (np.zeros(2, dtype=[("a", ">i4")]), ValueError, "'a' has foreign byte order.*newbyteorder"),
        (np.zeros(2, dtype=[("a", "i1"), ("b", "f8")]), ValueError, "'b'.*9 bytes apart.*repack_fields"),
        (np.zeros(2, dtype=[("a", "f8"), ("b", "c16")]), ValueError, "'b'.*24 bytes apart.*imaginary"),
        (np.zeros(3, dtype=[("a", "f4")])[::-1], ValueError, "'a' runs backwards.*copy"),
        (np.zeros(2), TypeError, "named fields, got float64"),
        ([1], TypeError, "named fields, got list"),
    ],
)
def test_arrays_that_cannot_be_shared(values: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        TensorDict.from_struct_array(values)


def test_advice_helps() -> None:
    packed = np.zeros(2, dtype=[("a", "i1"), ("b", ">f8")])
    native = packed.astype(packed.dtype.newbyteorder("="))
    aligned = recfunctions.repack_fields(native, align=True, recurse=True)
    assert TensorDict.from_struct_array(aligned)["b"].shape == (2,)
    assert TensorDict.from_struct_array(aligned[::-1].copy())["a"].shape == (2,)


def test_structured_arrays_as_entries() -> None:
    values = np.zeros(2, dtype=[("x", "f4")])
    td = TensorDict({"a": values, "n": {"b": values}}, [2])
    values["x"][0] = 3
    assert td["a", "x"].tolist() == td["n", "b", "x"].tolist() == [3, 0]
    assert td["a"].batch_size == (2,)


def test_to_struct_array() -> None:
    td = TensorDict(
        {
            "a": torch.ones(3, 2, requires_grad=True),
            "n": TensorDict({"c": torch.arange(6).view(3, 2)}, [3, 2]),
            "text": ["x", "y" * 12, "z"],
            "one": NonTensorData("same"),
            "number": NonTensorData(3),
        },
        [3],
    )
    made = td.to_struct_array()
    assert made.shape == (3,) and made.dtype["a"].shape == (2,) and made.dtype["n"].shape == (2,)
    assert made["n"]["c"].tolist() == [[0, 1], [2, 3], [4, 5]] and made["text"].tolist() == td["text"]
    assert made.dtype["text"] == "U12" and made["one"].tolist() == ["same"] * 3 and made["number"].tolist() == [3] * 3
    assert TensorDict({"a": torch.zeros(3)}).to_struct_array().shape == ()
    assert TensorDict(batch_size=[3]).to_struct_array().shape == (3,)
    lazy = tensordict.lazy_stack([TensorDict(a=torch.zeros(2), s="x"), TensorDict(a=torch.ones(2), s="y")])
    assert lazy.to_struct_array()["s"].tolist() == ["x", "y"]


@pytest.mark.parametrize(
    ("entries", "error", "match"),
    [
        ({"n": {"a": torch.zeros(2, dtype=torch.bfloat16)}}, TypeError, r"\('n', 'a'\).*BFloat16.*\.to\(dtype\)"),
        ({"n": {"a": NonTensorData({"k": 1})}}, TypeError, r"\('n', 'a'\) holds values of dict"),
        ({"a": [1, "x"]}, TypeError, "'a' holds values of int, str"),
        ({"": torch.zeros(2)}, ValueError, "without a name"),
    ],
)
def test_entries_that_no_array_holds(entries: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        TensorDict(entries, [2]).to_struct_array()


def test_arrays_of_our_own_can_be_containers_again() -> None:
    td = TensorDict({"a": torch.tensor([1, 2], dtype=torch.int8), "n": {"x": torch.ones(2)}, "s": "text"}, [2])
    td["n"].batch_size = [2]
    array = td.to_struct_array()
    again = TensorDict.from_struct_array(array)
    assert again["a"].tolist() == [1, 2] and again["n", "x"].tolist() == [1, 1] and again["s"] == ["text", "text"]
    array["n"]["x"] += 1
    assert again["n", "x"].tolist() == [2, 2]
    assert TensorDict({"x": torch.ones(2), "i": torch.ones(2, dtype=torch.int32)}, [2]).to_struct_array().itemsize == 8
