"""Tables of Arrow, pandas, Polars and Parquet: into containers and back, and opened by other programs."""

from __future__ import annotations

import datetime
import decimal
import math
import os
import pathlib
import types

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tensordict
from tensordict import (
    MetaData,
    NonTensorData,
    TensorClass,
    TensorDict,
    from_pandas,
    from_parquet,
    from_polars,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
    set_kernel_memory_info,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")

from_arrow = TensorDict.from_arrow

NUMBERS = [getattr(torch, name) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")]
NUMBERS += [torch.float16, torch.float32, torch.float64]


class Frame(TensorClass):
    pixels: torch.Tensor
    label: str | None = None


def address(array: pa.Array) -> int:
    return array.buffers()[1].address + array.offset * array.type.bit_width // 8


def same(one: TensorDict, other: TensorDict) -> None:
    """Compare everything that tables keep of two containers."""
    assert type(one) is type(other) and one.batch_size == other.batch_size
    assert one.names == other.names
    assert set(one.keys()) == set(other.keys())
    if hasattr(one, "tensordicts"):
        assert one.stack_dim == other.stack_dim
        for left, right in zip(one.tensordicts, other.tensordicts, strict=True):
            same(left, right)
        return
    for key in one.keys():
        left, right = one.get(key), other.get(key)
        if not isinstance(left, torch.Tensor):
            if is_tensor_collection(left) and not is_non_tensor(left):
                same(left, right)
            else:
                assert values(left) == values(right)
        elif left.is_nested:
            assert left.dtype == right.dtype and left.layout == right.layout
            assert all(torch.equal(a, b) for a, b in zip(left.unbind(), right.unbind(), strict=True))
        else:
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def values(entry: object) -> object:
    return entry.tolist() if is_non_tensor(entry) else entry


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_numbers_share_their_memory_both_ways(dtype):
    td = TensorDict(a=torch.arange(6).to(dtype), batch_size=[6])
    table = td.to_arrow()
    assert address(table["a"].chunk(0)) == td["a"].data_ptr()
    part = table.slice(2, 3)
    back = from_arrow(part)
    assert back["a"].dtype is dtype and torch.equal(back["a"].double(), td["a"][2:5].double())
    assert back["a"].data_ptr() == td["a"][2:].data_ptr()


def test_lists_times_codes_and_structs_share_memory_too():
    times = pa.array([1, 2, 3], pa.timestamp("us"))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2)
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), ["x", "y"])
    ragged = pa.array([[1], [2, 3], []], pa.list_(pa.int64()))
    struct = pa.StructArray.from_arrays([times.view(pa.int64())], ["inner"])
    td = from_arrow(pa.table({"t": times, "l": lists, "c": codes, "r": ragged, "s": struct}))
    assert td["t"].data_ptr() == td["s", "inner"].data_ptr() == times.buffers()[1].address
    assert td["l"].data_ptr() == lists.values.buffers()[1].address
    assert td["c"].data_ptr() == codes.indices.buffers()[1].address
    assert td["r"].values().data_ptr() == ragged.values.buffers()[1].address
    frame = pl.DataFrame({"a": np.arange(5)})
    assert from_polars(frame)["a"].data_ptr() == frame["a"].to_numpy(allow_copy=False).ctypes.data


def test_the_memory_outlives_the_table_and_the_container():
    td = from_arrow(pa.table({"a": np.arange(100_000)}))
    assert torch.equal(td["a"], torch.arange(100_000))
    table = TensorDict(a=torch.arange(100_000), batch_size=[100_000]).to_arrow()
    assert table["a"].to_numpy().sum() == sum(range(100_000))


def test_chunks_are_joined_and_bits_unpacked():
    column = pa.chunked_array([[1, 2], [3], []], pa.int64())
    flags = pa.chunked_array([[True, False], [True]])
    words = pa.chunked_array([pa.array(["x", "y"]).dictionary_encode(), pa.array(["z"]).dictionary_encode()])
    td = from_arrow(pa.table({"a": column, "f": flags, "w": words}))
    assert td["a"].tolist() == [1, 2, 3] and td["f"].tolist() == [True, False, True]
    assert [td["w_categories"][code] for code in td["w"].tolist()] == ["x", "y", "z"]


# --- types ----------------------------------------------------------------------------------------------------------

TYPED = {
    "date32": pa.array([datetime.date(2024, 2, 29)] * 2),
    "date64": pa.array([datetime.date(2024, 2, 29)] * 2, pa.date64()),
    "time32": pa.array([1, 2], pa.time32("s")),
    "time64": pa.array([1, 2], pa.time64("ns")),
    "naive": pa.array([1, -2], pa.timestamp("ms")),
    "zoned": pa.array([1, 2], pa.timestamp("ns", "Europe/Berlin")),
    "duration": pa.array([-1, 2], pa.duration("us")),
    "decimal": pa.array([decimal.Decimal("-1234567890.12"), decimal.Decimal("0.10")], pa.decimal128(12, 2)),
    "large": pa.array([decimal.Decimal("12345678901234567890.12")] * 2, pa.decimal128(30, 2)),
    "codes": pa.array(["x", "y"]).dictionary_encode(),
    "ordered": pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int16()), ["lo", "hi"], ordered=True),
    "bools": pa.array([True, False]),
    "matrix": pa.array([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.int32(), 3), 2)),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 3]), pa.array([[1.0] * 6, [2.0] * 6], pa.list_(pa.float32(), 6))
    ),
    "lists": pa.array([[1, 2], []], pa.list_(pa.int64())),
    "rows": pa.array([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], pa.list_(pa.list_(pa.float32(), 2))),
    "text": pa.array(["ä", None]),
    "binary": pa.array([b"\x00", b"x"]),
    "struct": pa.array([{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": {"c": "y"}}]),
}


@pytest.mark.parametrize("by", ["arrow", "parquet", "polars"])
@pytest.mark.parametrize("name", TYPED)
def test_types_come_back(name, by, tmp_path):
    array = TYPED[name]
    td = from_arrow(pa.table({"x": array}))
    if by == "arrow":
        table = td.to_arrow()
    elif by == "parquet":
        td.to_parquet(tmp_path / "x.parquet")
        table = from_parquet(tmp_path / "x.parquet").to_arrow()
    else:
        if name in ("date64", "time32", "tensor"):
            pytest.skip("Polars has other types for this")
        table = from_polars(td.to_polars()).to_arrow()
        if table["x"].type != array.type:
            assert table["x"].cast(array.type).to_pylist() == array.to_pylist()
            return
    if (name, by) in (("date64", "parquet"), ("time32", "parquet")):
        array = array.cast(table["x"].type)  # Parquet has days and milliseconds
    assert table["x"].type == array.type or name == "large"
    assert table["x"].combine_chunks().equals(array) or table["x"].to_pylist() == array.to_pylist()


@pytest.mark.parametrize("by", ["arrow", "parquet", "polars", "pandas"])
def test_types_with_more_dims_come_back(by, tmp_path):
    typed = {
        "t": pa.array([1, -2, 3, 4], pa.timestamp("us", "UTC")),
        "d": pa.array([decimal.Decimal("0.29")] * 4, pa.decimal128(12, 2)),
        "c": pa.array(["x", None, "y", "x"]).dictionary_encode(),
    }
    flat = from_arrow(pa.table(typed), fill={"c": -1})
    td = TensorDict(batch_size=[2])
    for name in typed:
        td[name] = flat[name].view(2, 2)
        td["ragged" + name] = torch.nested.nested_tensor_from_jagged(flat[name], torch.tensor([0, 1, 4]))
        for end in {name + "_arrow_type", name + "_categories"} & set(flat.keys()):
            td[end] = td["ragged" + end] = MetaData(flat[end])
    if by == "arrow":
        back = from_arrow(td.to_arrow())
    elif by == "parquet":
        td.to_parquet(tmp_path / "x")
        back = from_parquet(tmp_path / "x")
    elif by == "polars":
        back = from_polars(td.to_polars(), fill=-1)
    else:
        back = from_pandas(td.to_pandas(), fill=-1)
    if by in ("arrow", "parquet"):
        same(back, td)
    for name in typed:
        assert back[name].tolist() == td[name].tolist()
        assert [row.tolist() for row in back["ragged" + name].unbind()] == [
            row.tolist() for row in td["ragged" + name].unbind()
        ]
    assert "timestamp[us, tz=UTC]" == back["t_arrow_type"] == back["raggedt_arrow_type"]
    assert ["x", "y"] == back["c_categories"] == back["raggedc_categories"]


def test_numbers_that_no_longer_are_what_they_stood_for():
    td = from_arrow(pa.table({"t": pa.array([1, 2], pa.timestamp("us")), "d": TYPED["decimal"], "c": TYPED["codes"]}))
    # With another dtype they are numbers, and the entries beside them do not change.
    for other in (td.exclude("d").double(), td.float()):
        table = other.to_arrow()
        assert {str(kind) for kind in table.schema.types} <= {"double", "float"}
        same(from_arrow(table), other)
    for value in (0.001, 1e15, math.nan, math.inf):
        changed = td.clone()
        changed["d"] += value
        with pytest.raises(ValueError, match=r"entry 'd'.*decimal128\(12, 2\).*'d_arrow_type'"):
            changed.to_arrow()
    changed = td.clone()
    changed["c"] += 1
    with pytest.raises(ValueError, match="entry 'c'.*'c_categories'"):
        changed.to_arrow()
    assert changed.exclude("c_categories").to_arrow()["c"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "categories",
    [["u", "v", "w"], ["u", "u", "v"], [10, 20, 30], [b"u", b"v", b"w"], ["u", None, "v"], [1, 2.5, "x"], []],
)
def test_codes_stay_codes(categories, tmp_path):
    codes = torch.tensor([2, 2, 0, 1, -1] if categories else [-1])
    td = TensorDict(c=codes, c_categories=MetaData(categories), batch_size=[len(codes)])
    same(from_arrow(td.to_arrow()), td)
    td.to_parquet(tmp_path / "x", row_group_size=2)
    same(from_parquet(tmp_path / "x"), td)


def test_what_types_become():
    td = from_arrow(pa.table(TYPED))
    assert td["date32"].dtype is torch.int32 and td["zoned"].tolist() == [1, 2]
    assert td["zoned_arrow_type"] == "timestamp[ns, tz=Europe/Berlin]"
    assert td["decimal"].dtype is torch.float64 and td["large"][0] == decimal.Decimal("12345678901234567890.12")
    assert td["codes"].tolist() == [0, 1] and td["codes_categories"] == ["x", "y"]
    assert td["matrix"].shape == td["tensor"].shape == (2, 2, 3)
    assert td["lists"].is_nested and td["rows"].unbind()[1].shape == (2, 2)
    assert td["text"] == ["ä", None] and td["binary"] == [b"\x00", b"x"]
    assert td["struct", "a"].tolist() == [1, 2] and td["struct", "b", "c"] == ["x", "y"]
    bare = from_arrow(pa.table(TYPED), metadata=False)
    assert not [key for key in bare.keys() if key.endswith(("_arrow_type", "_categories"))]


def test_a_permuted_tensor_type_gives_its_logical_shape():
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    array = pa.ExtensionArray.from_storage(kind, pa.array([[0, 1, 2, 3, 4, 5]], pa.list_(pa.int32(), 6)))
    assert torch.equal(from_arrow(pa.table({"x": array}))["x"][0], torch.arange(6, dtype=torch.int32).view(2, 3).T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.bool])
def test_dtypes_that_arrow_lacks_come_back(dtype, tmp_path):
    td = TensorDict(a=torch.tensor([[1.5, 0.0], [-2.0, 3.0]]).to(dtype), batch_size=[2])
    td.to_parquet(tmp_path / "x")
    back = from_parquet(tmp_path / "x")["a"]
    assert back.dtype is dtype and torch.equal(back.to(torch.complex128), td["a"].to(torch.complex128))


# --- values that are missing ----------------------------------------------------------------------------------------

MISSING = {
    "ints": pa.array([1, None, 3]),
    "floats": pa.array([1.0, None, float("nan")]),
    "bools": pa.array([True, None, False]),
    "times": pa.array([1, None, 3], pa.timestamp("us")),
    "matrix": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)),
    "inner": pa.array([[1, None], [5, 6], [3, 4]], pa.list_(pa.int64(), 2)),
    "lists": pa.array([[1, 2], None, [3]]),
    "codes": pa.array(["x", None, "y"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_values_are_refused_or_masked(name):
    table = pa.table({"ok": [1, 2, 3], name: MISSING[name]})
    with pytest.raises(ValueError, match=rf"column '{name}' lacks 1 of"):
        from_arrow(table)
    td = from_arrow(table, nulls="mask")
    mask = td[f"{name}_mask"]
    assert "ok_mask" not in td
    if name == "inner":
        assert mask.tolist() == [[True, False], [True, True], [True, True]] and td["inner"][0, 1] == 0
    else:
        assert mask.tolist() == [True, False, True]
        row = td[name].unbind()[1]
        assert row.numel() == 0 if name == "lists" else (row == (-1 if name == "codes" else 0)).all()
    part = from_arrow(table.slice(2), nulls="mask")
    assert f"{name}_mask" not in part


@pytest.mark.parametrize("dtype", [*NUMBERS, torch.bool], ids=str)
def test_every_dtype_is_filled(dtype):
    kind = (
        pa.bool_()
        if dtype is torch.bool
        else TensorDict(a=torch.zeros(1, dtype=dtype), batch_size=[1]).to_arrow()["a"].type
    )
    values = pa.array([1, None], pa.int64()).cast(kind)
    most = 1 if dtype is torch.bool else torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    td = from_arrow(pa.table({"a": values, "l": pa.ListArray.from_arrays([0, 1, 2], values)}), fill=most, nulls="mask")
    assert td["a"].dtype is dtype and td["a"].tolist() == [1, most] and td["a_mask"].tolist() == [True, False]
    assert [row.tolist() for row in td["l"].unbind()] == [[1], [most]]
    with pytest.raises(ValueError, match="cannot hold the fill value -inf" if not dtype.is_floating_point else "lacks"):
        from_arrow(pa.table({"a": values}), fill=-math.inf if not dtype.is_floating_point else None)


def test_values_that_are_missing_in_lists(tmp_path):
    lists = pa.array([[1, None], None, [2], [None, 4, 5]])
    deep = pa.array([[[1.0, None]], [], None, [[1.0], [2.0, 3.0]]])
    td = from_arrow(pa.table({"l": lists}), nulls="mask", fill=7)
    assert [row.tolist() for row in td["l"].unbind()] == [[1, 7], [], [2], [7, 4, 5]]
    assert [row.tolist() for row in td["l_mask"].unbind()] == [[True, False], [], [True], [False, True, True]]
    # Of one form: what holds of the one is found in the other.
    assert torch.where(td["l_mask"], td["l"], 0).sum().item() == 12
    td.to_parquet(tmp_path / "x")
    same(from_parquet(tmp_path / "x"), td)
    assert from_arrow(pa.table({"l": deep}), nulls="mask")["l"][0] == [[1.0, None]]  # rows of no one form: values


@pytest.mark.parametrize("name", MISSING)
def test_masks_become_missing_values_again(name, tmp_path):
    table = pa.table({"ok": [1, 2, 3], name: MISSING[name]})
    td = from_arrow(table, nulls="mask")
    back = td.to_arrow(nulls="mask")
    assert back.schema.remove_metadata() == table.schema
    assert str(back[name].to_pylist()) == str(table[name].to_pylist())  # NaN is not equal to NaN
    same(from_arrow(back, nulls="mask"), td)
    td.to_parquet(tmp_path / "x.parquet", nulls="mask")
    same(from_parquet(tmp_path / "x.parquet", nulls="mask"), td)
    frame = td.to_pandas(nulls="mask")
    assert frame[name].isna().sum() == table[name].null_count and list(frame) == ["ok", name]
    assert from_pandas(frame, nulls="mask")[f"{name}_mask"].equal(td[f"{name}_mask"]) or name == "floats"
    assert td.to_polars(nulls="mask")[name].null_count() == table[name].null_count
    # Unasked, a mask is a column like others.
    assert f"{name}_mask" in td.to_arrow().schema.names and td.to_arrow()[name].null_count == (name == "codes")


def test_rows_of_ragged_and_wide_leaves_that_are_missing(tmp_path):
    rows = torch.tensor([True, False, True])
    rag = torch.nested.nested_tensor([torch.arange(2), torch.arange(0), torch.arange(3)], layout=torch.jagged)
    td = TensorDict(z=torch.zeros(3, dtype=torch.complex64), z_mask=rows, h=torch.ones(3, 2, dtype=torch.bfloat16))
    td["h_mask"], td["r"], td["r_mask"] = rows, rag, rows
    td["t"], td["t_arrow_type"], td["t_mask"] = torch.ones(3, 2), MetaData("fixed_shape_tensor"), rows
    td["u"], td["u_categories"], td["u_mask"] = torch.tensor([0, 1, 1], dtype=torch.uint8), MetaData(["a", "b"]), rows
    td.batch_size = [3]
    table = td.to_arrow(nulls="mask")
    assert table.schema.names == ["z", "h", "r", "t", "u"] and {column.null_count for column in table.columns} == {1}
    assert table["u"].to_pylist() == ["a", None, "b"] and isinstance(table["t"].type, pa.FixedShapeTensorType)
    td["h"][1], td["t"][1], td["u"] = 0, 0, torch.tensor([0, -1, 1])
    same(from_arrow(table, nulls="mask"), td)


def test_what_looks_like_a_mask_and_is_none():
    td = TensorDict(a=torch.zeros(2, 3), a_mask=torch.ones(2, 4, dtype=torch.bool), b=torch.zeros(2), batch_size=[2])
    td["b_mask"], td["c_mask"], td["s"] = torch.zeros(2), torch.zeros(2, dtype=torch.bool), ["x", "y"]
    td["s_mask"] = torch.zeros(2, dtype=torch.bool)
    td["d"] = td["d_mask"] = td["d_mask_mask"] = torch.tensor([True, False])
    table = td.to_arrow(nulls="mask")
    assert table.schema.names == [name for name in td.keys() if name != "d_mask"]
    assert table["d"].to_pylist() == [True, None] and table["d_mask_mask"].to_pylist() == [True, False]
    with pytest.raises(ValueError, match="nulls is"):
        td.to_arrow(nulls="drop")


@pytest.mark.parametrize("statistics", [True, False])
def test_parts_of_a_file_have_the_same_masks(tmp_path, statistics):
    lists = pa.list_(pa.int64())
    table = pa.table(
        {
            "late": pa.array([1, 2, 3, None]),
            "whole": [1.0] * 4,
            "matrix": pa.array([[1, 2], None, [3, None], [4, 5]], pa.list_(pa.int64(), 2)),
            "deep": [{"x": value} for value in ([1, 2], None, [3], [None, 4])],
            "empty": pa.array([[1], None, [2], [3, 4]], lists),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3, write_statistics=statistics)
    whole = from_parquet(tmp_path / "x.parquet", nulls="mask")
    assert "whole_mask" not in whole and whole["empty_mask"].dim() == 1 and whole["matrix_mask"].dim() == 2
    for rows in (1, 2, 4):
        parts = list(from_parquet(tmp_path / "x.parquet", nulls="mask", batch_size_rows=rows))
        for key in ("late_mask", "matrix_mask", ("deep", "x_mask"), "empty_mask"):
            rows_of = [row.tolist() for part in parts for row in part[key].unbind()]
            assert rows_of == [row.tolist() for row in whole[key].unbind()], key
        assert all(set(part.keys(True)) == set(whole.keys(True)) for part in parts)
    part = next(from_parquet(tmp_path / "x.parquet", nulls="mask", batch_size_rows=2, columns=["late", "deep.x"]))
    assert set(part.keys(True, True)) == {"late", "late_mask", ("deep", "x"), ("deep", "x_mask")}


def test_missing_values_are_filled():
    table = pa.table({"a": pa.array([1, None]), "b": pa.array([None, 2.5]), "s": pa.array(["x", None])})
    td = from_arrow(table, fill=7)
    assert td["a"].tolist() == [1, 7] and td["b"].tolist() == [7.0, 2.5] and td["s"] == ["x", None]
    by_name = types.MappingProxyType({"a": 1, "b": float("nan"), "s": ""})
    assert from_arrow(table, fill=by_name)["s"] == ["x", ""]
    joined = pa.table({"a/s": pa.array(["x", None]), "a/n": pa.array([1.5, None], pa.float32())})
    found = from_arrow(joined, separator="/", fill={"a/s": "y", "a/n": 0.1})
    assert found["a", "s"] == ["x", "y"] and found["a", "n"][1] == torch.tensor(0.1)
    with pytest.raises(ValueError, match="column 'b' lacks 1 of 2"):
        from_arrow(table, fill={"a": 1})
    with pytest.raises(ValueError, match=r"'a' is of torch.int64, which cannot hold the fill value 0.5"):
        from_arrow(table, fill=0.5)
    with pytest.raises(ValueError, match="nulls is"):
        from_arrow(table, nulls="drop")
    assert table["a"].null_count == 1  # the memory of the table was not filled
    nested = pa.table({"s": pa.array([{"x": 1}, None])})
    with pytest.raises(ValueError, match=r"column 's.x' lacks 1"):
        from_arrow(nested)


# --- containers -----------------------------------------------------------------------------------------------------


CONTAINERS = ["batch", "names", "lazy", "lazy inside", "class", "class inside", "ragged", "values", "more values"]
CONTAINERS += ["grid of values", "empty inside", "no batch", "no rows", "size zero"]


def containers() -> dict[str, TensorDict]:
    jagged = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 4)])
    return {
        "batch": TensorDict(
            a=torch.arange(12.0).view(2, 3, 2), b=TensorDict(c=torch.ones(2, 3), batch_size=[2, 3]), batch_size=[2, 3]
        ),
        "names": TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3], names=["time", None]),
        "lazy": lazy_stack([TensorDict(a=torch.ones(n), b=torch.tensor(n)) for n in (1, 2, 3)]),
        "lazy inside": TensorDict(
            s=lazy_stack([TensorDict(x=torch.full((2,), n), batch_size=[2]) for n in range(3)], 1), batch_size=[2]
        ),
        "class": Frame(pixels=torch.ones(2, 4), label=["x", "y"], batch_size=[2]),
        "class inside": TensorDict(f=Frame(pixels=torch.ones(2, 4), batch_size=[2]), n=torch.ones(2), batch_size=[2]),
        "ragged": TensorDict(j=jagged, s=strided, batch_size=[2]),
        "values": TensorDict(
            s=["x", "y"], m=[1, "x"], d=[{"a": 1}, {"b": [2]}], t=[(1, 2), None], batch_size=[2], a=torch.ones(2)
        ),
        "more values": TensorDict(
            v=NonTensorData("x", batch_size=[2]), about=MetaData({"k": (1,)}), a=torch.ones(2)
        ).auto_batch_size_(1),
        "grid of values": TensorDict(s=[["a", "b"], ["c", "d"]], a=torch.ones(2, 2), batch_size=[2, 2]),
        "empty inside": TensorDict(a=torch.ones(2), e=TensorDict(batch_size=[2]), batch_size=[2]),
        "no batch": TensorDict(a=torch.ones(2), b=torch.ones(2, 3)),
        "no rows": TensorDict(a=torch.ones(0, 3), s=TensorDict(b=torch.ones(0), batch_size=[0]), batch_size=[0]),
        "size zero": TensorDict(a=torch.ones(2, 0), b=torch.ones(2, 3, 0), batch_size=[2]),
    }


@pytest.mark.parametrize("separator", [None, "."])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_survive_arrow_and_parquet(name, separator, tmp_path):
    td = containers()[name]
    same(from_arrow(td.to_arrow(separator=separator), separator=separator), td)
    if name == "size zero":
        with pytest.raises(OSError, match="column '[ab]' has rows without elements"):
            td.to_parquet(tmp_path / "x.parquet", separator=separator)
        assert not list(tmp_path.iterdir())
        return
    td.to_parquet(tmp_path / "x.parquet", separator=separator)
    same(from_parquet(tmp_path / "x.parquet", separator=separator), td)


def test_containers_whose_columns_are_not_read_are_not_there(tmp_path):
    td = TensorDict(
        a=torch.ones(2),
        b=TensorDict(c=torch.ones(2, 3), e=TensorDict(batch_size=[2, 3]), batch_size=[2, 3], names=["x", "y"]),
        s=lazy_stack([TensorDict(x=torch.ones(2), batch_size=[2])] * 3, 1),
        e=TensorDict(e=TensorDict(batch_size=[2]), batch_size=[2]),
        batch_size=[2],
    )
    td.to_parquet(tmp_path / "x")
    same(from_parquet(tmp_path / "x", columns=["a"]), td.select("a", "e"))
    same(from_parquet(tmp_path / "x", columns=["a", "b"]), td.select("a", "b", "e"))
    table = td.to_arrow(separator=".")
    same(from_arrow(table.drop_columns(["b.c", "s.x"]), separator="."), td.select("a", "e"))
    assert set(from_arrow(table).keys()) == {"a", "b.c", "s.x", "e"}


def test_classes_that_nobody_knows_are_plain(monkeypatch):
    from tensordict.core import registry

    table = containers()["class"].to_arrow()
    monkeypatch.setattr(registry, "_DECLARED", {})
    td = from_arrow(table)
    assert type(td) is TensorDict and td["label"] == ["x", "y"]
    monkeypatch.undo()
    assert type(from_arrow(table)) is Frame
    assert type(Frame.from_arrow(pa.table({"pixels": [1.0]}))) is Frame


def test_metadata_from_anywhere_is_checked():
    table = containers()["batch"].to_arrow()
    for text in (b"no json", b"[]", b'{"version":2,"nodes":[[[1],{}]],"columns":[]}', b"[" * 100_000):
        with pytest.raises(OSError, match="description of a container"):
            from_arrow(table.replace_schema_metadata({b"tensordict": text}))
    for facts in (
        '"batch_size":[0,99]',
        '"batch_size":[0,-1]',
        '"batch_size":"x"',
        '"batch_size":[0,3],"stack_dim":7',
        '"batch_size":[0],"names":[1]',
        '"batch_size":[0],"class":1',
    ):
        node = f'{{"kind":"TensorDict",{facts}}}'
        text = f'{{"version":2,"nodes":[[[],{node}]],"columns":[]}}'
        with pytest.raises(OSError, match="replace_schema_metadata"):
            from_arrow(table.replace_schema_metadata({b"tensordict": text}))
    for note in ('{"dtype":"load"}', '{"dtype":"complex64"}'):
        text = f'{{"version":2,"nodes":[],"columns":[[["a"],{note}]]}}'
        with pytest.raises(ValueError, match="'a'"):
            from_arrow(pa.table({"a": [1]}).replace_schema_metadata({b"tensordict": text}))


# --- names of columns -----------------------------------------------------------------------------------------------


def test_columns_nest_at_the_separator():
    table = pa.table({"a": [1], "b.c": [2], "b.d": [3]})
    assert set(from_arrow(table).keys()) == {"a", "b.c", "b.d"}
    assert set(from_arrow(table, separator=".").keys(True, True)) == {"a", ("b", "c"), ("b", "d")}


def test_names_that_collide_are_refused():
    for table in (
        pa.table([[1], [2]], names=["a", "a.b"]),
        pa.table([[1], [{"b": 1}]], names=["a.b", "a"]),
        pa.table([[1], [2]], names=["a", "a"]),
        pa.table([pa.array([1, None]), pa.array([1, 2])], names=["a", "a_mask"]),
    ):
        with pytest.raises(ValueError, match="'a"):
            from_arrow(table, separator=".", nulls="mask")
    td = TensorDict({"a.b": torch.ones(2), "a": TensorDict(b=torch.ones(2), batch_size=[2])}, [2])
    for write in (td.to_arrow, td.to_pandas):
        with pytest.raises(ValueError, match=r"'a.b' and \('a', 'b'\)"):
            write(separator=".")


def test_what_has_no_form_is_named():
    assert from_arrow(pa.table({})).batch_size == from_pandas(pd.DataFrame()).batch_size == (0,)
    with pytest.raises(TypeError, match="got dict"):
        from_arrow({"a": 1})
    with pytest.raises(ValueError, match="no entries"):
        TensorDict(batch_size=[2]).to_arrow()
    with pytest.raises(ValueError, match=r"'b'.*3 rows"):
        TensorDict(a=torch.ones(2), b=torch.ones(3)).to_arrow()
    with pytest.raises(ValueError, match="single number"):
        TensorDict(a=torch.tensor(1)).to_arrow()
    with pytest.raises(OSError, match="'o'"):
        TensorDict(o=NonTensorData(object(), batch_size=[2]), batch_size=[2]).to_arrow()
    with pytest.raises(OSError, match="different keys"):
        lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(b=torch.ones(1))]).to_arrow()
    with pytest.raises(OSError, match="surrogates"):
        TensorDict(s=["\ud800", "x"], batch_size=[2]).to_arrow()


# --- pandas ---------------------------------------------------------------------------------------------------------


def test_frames_of_pandas_come_back():
    frame = pd.DataFrame(
        {
            "i": np.arange(3, dtype=np.int16),
            "f": [1.0, np.nan, 3.0],
            "b": [True, False, True],
            "s": ["x", None, "z"],
            "t": pd.to_datetime(["2020-01-01", "2021-01-01", "2022-01-01"]),
            "z": pd.to_datetime(["2020-01-01"] * 3).tz_localize("Europe/Berlin"),
            "d": pd.to_timedelta([1, 2, 3], unit="s"),
            "c": pd.Categorical(["u", None, "v"], ordered=True),
            "o": [{"a": 1}, None, (1, 2)],
        }
    )
    td = from_pandas(frame, nulls="mask")
    assert td["i"].dtype is torch.int16 and torch.isnan(td["f"][1]) and td["c"].tolist() == [0, -1, 1]
    assert td["o"] == [{"a": 1}, None, (1, 2)] and td["c_categories"] == ["u", "v"]
    pd.testing.assert_frame_equal(td.exclude("c_mask").to_pandas(), frame)
    td["i"][0] = 100
    assert frame["i"][0] == 0  # a frame shares nothing with the container


@pytest.mark.parametrize("name", [name for name in TYPED if name not in ("binary", "large", "text", "struct")])
def test_types_come_back_from_pandas(name):
    td = from_arrow(pa.table({"x": TYPED[name]}))
    back = from_pandas(td.to_pandas())
    if name == "tensor":
        td, back = (one.exclude("x_arrow_type") for one in (td, back))
    if "x_categories" in td:  # of which pandas has codes of its own dtype
        assert back["x"].tolist() == td["x"].tolist() and back["x_categories"] == td["x_categories"]
        td, back = (one.exclude("x") for one in (td, back))
    same(back, td)


def test_frames_of_pandas_with_other_dtypes():
    frame = pd.DataFrame({"n": pd.array([1, 2], "Int64"), "a": pd.array([1.5, 2], pd.ArrowDtype(pa.float32()))})
    td = from_pandas(frame, dtype=torch.float64)
    assert td["n"].dtype is td["a"].dtype is torch.float64 and td["n"].tolist() == [1, 2]
    frame["n"] = pd.array([1, None], "Int64")
    with pytest.raises(ValueError, match="column 'n' lacks 1 of 2"):
        from_pandas(frame)
    assert TensorDict(z=torch.tensor([1j, 2]), batch_size=[2]).to_pandas()["z"].tolist() == [1j, 2]
    with pytest.raises(ValueError, match=r"column 'l' is of .*astype"):
        from_pandas(pd.DataFrame({"l": np.zeros(2, np.longdouble)}))
    swapped = pd.DataFrame({"x": np.arange(3).astype(">i4")})
    assert from_pandas(swapped)["x"].tolist() == [0, 1, 2]


def test_containers_as_frames_of_pandas():
    td = TensorDict(a=torch.arange(2), b=TensorDict(c=torch.ones(2, 2), batch_size=[2]), batch_size=[2])
    with pytest.raises(ValueError, match="separator"):
        td.to_pandas()
    frame = td.to_pandas(separator="/")
    assert list(frame.columns) == ["a", "b/c"] and frame.index.tolist() == [0, 1]
    back = from_pandas(frame, separator="/")
    assert (back == td).all()
    frame.loc[0, "a"] = 5
    assert td["a"][0] == 0
    assert TensorDict(a=torch.ones(2, dtype=torch.bfloat16), batch_size=[2]).to_pandas()["a"].tolist() == [1.0, 1.0]
    assert len(from_pandas(frame.iloc[:0], separator="/")) == 0


def test_frames_of_pandas_that_are_refused():
    for frame, error in (
        (pd.DataFrame({1: [1]}), TypeError),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ValueError),
        (pd.DataFrame({"a": pd.to_datetime(["2020-01-01", None])}), ValueError),
        (pd.Series([1]), TypeError),
    ):
        with pytest.raises(error, match=r"column|frame"):
            from_pandas(frame)
    assert from_pandas(pd.DataFrame(index=[1, 2])).batch_size == (2,)
    for column in (pl.Series("o", [object()], dtype=pl.Object), pl.Series("o", [2**70], dtype=pl.Int128)):
        with pytest.raises(ValueError, match="column 'o' is of"):
            from_polars(column.to_frame())
    with pytest.raises(TypeError, match="collect"):
        from_polars(pl.LazyFrame({"a": [1]}))


@pytest.mark.parametrize(
    "options", [{"auto_batch_size": True}, {"batch_dims": 1}, {"batch_size": []}, {"device": "cpu"}]
)
def test_batch_sizes_that_are_asked_for(options):
    frame = pd.DataFrame({"a": [1, 2]})
    td = from_pandas(frame, **options)
    assert td.batch_size == torch.Size([] if "batch_size" in options else [2])
    assert (td.device is not None) == ("device" in options)


# --- Parquet --------------------------------------------------------------------------------------------------------


def test_other_programs_open_the_files(tmp_path):
    import duckdb

    path = str(tmp_path / "x.parquet")
    td = TensorDict(
        a=torch.arange(3),
        h=torch.ones(3, dtype=torch.float16),
        m=torch.ones(3, 2, 2),
        s=["x", "y", "z"],
        b=TensorDict(c=torch.tensor([True, False, True]), batch_size=[3]),
        j=torch.nested.nested_tensor([torch.ones(1), torch.ones(0), torch.ones(2)], layout=torch.jagged),
        batch_size=[3],
    )
    td.to_parquet(path)
    frame = pd.read_parquet(path)
    assert frame["a"].tolist() == [0, 1, 2] and frame["b"][0] == {"c": True} and list(frame["j"][2]) == [1.0, 1.0]
    polars = pl.read_parquet(path)
    assert polars["m"].dtype == pl.Array(pl.Float32, (2, 2)) and polars["s"].to_list() == ["x", "y", "z"]
    assert polars["b"].struct.field("c").to_list() == [True, False, True] and polars["h"].to_list() == [1.0] * 3
    rows = duckdb.sql(f"select a, b.c, m, len(j), h from '{path}' where a > 0 order by a").fetchall()
    assert rows[0][:2] == (1, False) and rows[1][3] == 2 and rows[0][4] == 1.0
    assert [list(row) for row in rows[0][2]] == [[1.0, 1.0]] * 2


def test_files_are_replaced_only_when_they_are_ours(tmp_path):
    path = tmp_path / "x.parquet"
    td = TensorDict(a=torch.arange(3), batch_size=[3])
    td.to_parquet(path)
    (td + 1).to_parquet(path)
    assert from_parquet(path)["a"].tolist() == [1, 2, 3]
    bad = TensorDict(o=NonTensorData(object(), batch_size=[3]), batch_size=[3])
    with pytest.raises(OSError, match="'o'"):
        bad.to_parquet(path)
    with pytest.raises((TypeError, OSError)):
        td.to_parquet(path, compression="unheard of")
    assert from_parquet(path)["a"].tolist() == [1, 2, 3] and os.listdir(tmp_path) == ["x.parquet"]
    for other in (b"text", pa.table({"a": [1]})):
        pq.write_table(other, path) if isinstance(other, pa.Table) else path.write_bytes(other)
        before = path.read_bytes()
        with pytest.raises(OSError, match="overwrite=True"):
            td.to_parquet(path)
        assert path.read_bytes() == before
    td.to_parquet(path, overwrite=True, compression="zstd")
    assert from_parquet(path)["a"].tolist() == [0, 1, 2]


def test_files_that_are_broken_are_named(tmp_path):
    path = tmp_path / "x.parquet"
    TensorDict(a=torch.arange(1000), batch_size=[1000]).to_parquet(path)
    content = path.read_bytes()
    for cut in (b"", b"PAR1", content[: len(content) // 2], content[:8] + bytes(2000) + content[2008:]):
        path.write_bytes(cut)
        for read in (from_parquet, lambda path: list(from_parquet(path, batch_size_rows=10))):
            with pytest.raises(OSError, match="x.parquet"):
                read(path)
    with pytest.raises(FileNotFoundError):
        from_parquet(tmp_path / "nothing")
    pq.write_table(pa.table({"a": [1, None]}), path)
    with pytest.raises(ValueError, match=r"column 'a' lacks 1 of 2.*x.parquet"):
        from_parquet(path)
    with pytest.raises(ValueError, match=r"no column 'aa'.*x.parquet"):
        from_parquet(path, columns=["aa"])


def test_files_are_read_in_parts_by_patterns_and_at_urls(tmp_path):
    for part in range(3):
        td = TensorDict(a=torch.arange(4) + 4 * part, b=TensorDict(c=torch.ones(4), batch_size=[4]), batch_size=[4])
        td.to_parquet(tmp_path / f"part-{part}.parquet")
        td.to_parquet(f"memory://columns/part-{part}.parquet")
    for place in (tmp_path, "memory://columns"):
        pattern = f"{place}/part-*.parquet"
        assert from_parquet(pattern)["a"].tolist() == list(range(12))
        parts = list(from_parquet(pattern, batch_size_rows=3))
        assert [part.batch_size[0] for part in parts] == [3, 1] * 3
        assert torch.cat(parts)["a"].tolist() == list(range(12))
    assert from_parquet(tmp_path)["a"].tolist() == list(range(12))
    assert set(from_parquet(tmp_path / "part-1.parquet", columns=["b.c"]).keys(True, True)) == {("b", "c")}
    with pytest.raises(ValueError, match="batch_size_rows"):
        from_parquet(pattern, batch_size_rows=0)
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "part-3.parquet")
    td.to_parquet(tmp_path / "part-4.parquet")
    with pytest.raises(OSError, match=r"its columns are a: string, but.*part-0.*in .*part-3"):
        from_parquet(tmp_path / "part-*.parquet")


def test_files_that_mean_other_dtypes_are_not_taken_together(tmp_path):
    exact = TensorDict(a=torch.tensor([1 + 2**-20]), batch_size=[1])
    exact.bfloat16().to_parquet(tmp_path / "0.parquet")
    exact.to_parquet(tmp_path / "1.parquet")
    with pytest.raises(OSError, match=r"0.parquet.*other dtypes.*batch_size_rows=.*1.parquet"):
        from_parquet(tmp_path / "*.parquet")
    parts = list(from_parquet(tmp_path / "*.parquet", batch_size_rows=1))
    assert [part["a"].dtype for part in parts] == [torch.bfloat16, torch.float32] and parts[1]["a"].equal(exact["a"])


@pytest.mark.parametrize("library", ["pyarrow", "pandas", "polars"])
def test_a_library_that_is_missing_is_named(library, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, library, None)
    td = TensorDict(a=torch.ones(2), batch_size=[2])
    call = {"pyarrow": td.to_arrow, "pandas": td.to_pandas, "polars": td.to_polars}[library]
    extra = "tabular" if library == "pyarrow" else library
    with pytest.raises(ModuleNotFoundError, match=rf"tensordict\[{extra}\]"):
        call()


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_was_mapped_for_reading(known: bool, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.arrow"
    table = pa.table({"a": list(range(5_000)), "b": [0.5] * 5_000})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    mapped = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    with set_kernel_memory_info(known):
        td = TensorDict.from_arrow(mapped)
    # Over the memory of the map, which this process then has of its own where something is written.
    assert (td["a"].data_ptr() == mapped["a"].chunk(0).buffers()[1].address) is known
    td["a"].add_(1)
    assert td["a"][:3].tolist() == [1, 2, 3] and td["b"].sum() == 2_500
    assert pa.ipc.open_file(str(path)).read_all()["a"][:2].to_pylist() == [0, 1]


def test_extension_types_are_what_they_are_stored_as() -> None:
    table = pa.table(
        {
            "id": pa.array([b"0" * 16, b"1" * 16], pa.uuid()),
            "text": pa.array(['{"a": 1}', "2"], pa.json_()),
            "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8())),
        }
    )
    td = from_arrow(table)
    assert td["id"] == [b"0" * 16, b"1" * 16] and td["text"] == ['{"a": 1}', "2"]
    assert td["flag"].dtype == torch.int8 and td["flag"].tolist() == [1, 0]
    assert td.to_arrow().schema.types == [pa.binary(), pa.string(), pa.int8()]


# --- the function from_arrow, as in the reference of level 0.15.3 -----------------------------------------------------


GAPS = {"i": [1, None], "f": [None, 0.5], "s": ["x", None], "n": [{"x": 1}, {"x": None}], "whole": [1, 2]}


def test_masks_in_a_container_of_their_own() -> None:
    table = pa.table(GAPS)
    td = tensordict.from_arrow(table, nulls="mask")
    assert td["i"].tolist() == [1, 0] and td["f"].isnan().tolist() == [True, False] and td["s"] == ["x", None]
    found = {key: leaf.tolist() for key, leaf in td["_mask"].items(True, True)}
    assert found == {"i": [True, False], "f": [False, True], "s": [True, False], ("n", "x"): [True, False]}
    assert tensordict.from_arrow(table, nulls="mask", mask_key=("a", "b"))["a", "b", "i"].tolist() == [True, False]
    assert from_arrow(table, nulls="mask", mask_key="m")["m", "n", "x"].tolist() == [True, False]
    assert set(tensordict.to_arrow(td).column_names) == {*GAPS, "_mask"}


def test_filling_without_masks() -> None:
    td = tensordict.from_arrow(pa.table(GAPS), nulls="fill")
    assert set(td.keys()) == set(GAPS) and td["i"].tolist() == [1, 0] and td["f"][0].isnan()
    assert tensordict.from_arrow(pa.table(GAPS), nulls="fill", fill=7)["f"].tolist() == [7, 0.5]


def test_refused_options_of_from_arrow() -> None:
    for nulls in ("raise", None):
        with pytest.raises(ValueError, match="lacks 1 of 2"):
            tensordict.from_arrow(pa.table(GAPS), nulls=nulls)
    with pytest.raises(ValueError, match="'raise' or None, 'fill' or 'mask'"):
        tensordict.from_arrow(pa.table(GAPS), nulls="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask_key= is for"):
        tensordict.from_arrow(pa.table(GAPS), mask_key="m", nulls="fill")
    with pytest.raises(ValueError, match="'_mask'"):
        tensordict.from_arrow(pa.table({**GAPS, "_mask": [1, 2]}), nulls="mask")
    with pytest.raises(TypeError, match="exclude each other"):
        tensordict.from_arrow(pa.table({"a": [1]}), batch_size=[1], auto_batch_size=True)


def test_copies() -> None:
    values = pa.array(np.arange(5))
    address = values.buffers()[1].address
    shared, copied = (tensordict.from_arrow(pa.table({"a": values}), copy=copy)["a"] for copy in (None, True))
    assert shared.data_ptr() == address != copied.data_ptr() and copied.tolist() == shared.tolist()
