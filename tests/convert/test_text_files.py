"""CSV and JSON: round trips, what becomes of columns, and what is wrong with files, by file, column and row."""

from __future__ import annotations

import gzip
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from tensordict import MetaData, TensorDict, assert_close
from tensordict.convert import csv as convert_csv
from tensordict.convert import json as convert_json
from tensordict.core.exceptions import DuplicateKeyError, SaveError


def rows() -> TensorDict:
    return TensorDict(
        whole=torch.arange(3) - 1,
        real=torch.tensor([0.1, math.nan, 2.0]),
        flag=torch.tensor([True, False, True]),
        text=["x,y", 'a "b"\nc', "1984"],
        inner=TensorDict(deep=TensorDict(x=torch.arange(3.0), batch_size=3), batch_size=3),
        batch_size=3,
    )


def same(found: Any, td: Any, without: tuple[str, ...] = ()) -> None:
    assert set(found.keys(True, True)) == set(td.keys(True, True)) and found.batch_size == td.batch_size
    for key, value in td.items(True, True):
        if isinstance(value, torch.Tensor) and key not in without:
            torch.testing.assert_close(found[key], value, equal_nan=True)
    assert found["text"] == td["text"]


def test_csv_there_and_back(tmp_path: pathlib.Path) -> None:
    td = rows()
    td.to_csv(tmp_path / "td.csv", separator=".")
    found = TensorDict.from_csv(tmp_path / "td.csv", separator=".")
    assert found["whole"].dtype == torch.int64 and found["flag"].dtype == torch.bool
    same(found.update({"real": found["real"].float(), ("inner", "deep", "x"): found["inner", "deep", "x"].float()}), td)
    cast = TensorDict.from_csv(tmp_path / "td.csv", separator=".", dtype=torch.float32)
    assert cast["whole"].dtype == cast["real"].dtype == torch.float32
    with pytest.raises(SaveError, match="overwrite=True"):
        td.to_csv(tmp_path / "td.csv", separator=".")
    td[:2].to_csv(tmp_path / "td.csv", separator="/", overwrite=True)
    assert TensorDict.from_csv(tmp_path / "td.csv")["inner/deep/x"].shape == (2,)
    assert [path.name for path in tmp_path.iterdir()] == ["td.csv"]


def test_csv_of_pandas_reads_back(tmp_path: pathlib.Path) -> None:
    pandas = pytest.importorskip("pandas")
    td = rows()
    td.to_csv(tmp_path / "td.csv", separator=".")
    frame = pandas.read_csv(tmp_path / "td.csv")
    assert set(frame.columns) == {"whole", "real", "flag", "text", "inner.deep.x"}
    assert frame["text"].tolist() == td["text"] and frame["flag"].dtype == bool
    frame.fillna(0).to_csv(tmp_path / "frame.csv", index=False, sep=";")
    found = TensorDict.from_csv(tmp_path / "frame.csv", sep=";", usecols=["whole", "flag"])
    assert (
        found["whole"].equal(td["whole"]) and found["flag"].equal(td["flag"]) and set(found.keys()) == {"whole", "flag"}
    )
    # Arguments that change the rules go to pandas.
    td.exclude("inner", "text").to_csv(tmp_path / "more.csv", index=True)
    assert "Unnamed: 0" in TensorDict.from_csv(tmp_path / "more.csv", nrows=1).keys()


@pytest.mark.parametrize("lines", [False, True])
def test_json_there_and_back(tmp_path: pathlib.Path, lines: bool) -> None:
    td = rows()
    td["image"] = torch.arange(12.0).view(3, 2, 2)
    td.to_json(tmp_path / "td.json", lines=lines)
    found = TensorDict.from_json(tmp_path / "td.json", lines=lines, fill={"real": math.nan})
    same(found.apply(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf), td)
    td.to_json(tmp_path / "flat.json", lines=lines, separator="/")
    assert ("inner", "deep", "x") in TensorDict.from_json(
        tmp_path / "flat.json", lines=lines, separator="/", nulls="mask"
    ).keys(True)
    with pytest.raises(SaveError, match="overwrite=True"):
        td.to_json(tmp_path / "td.json")


@pytest.mark.parametrize("lines", [False, True])
def test_values_are_json_themselves(tmp_path: pathlib.Path, lines: bool) -> None:
    values = {"mixed": [1, "x"], "dicts": [{"a": 1}, {"b": [2]}], "texts": ['{"a": 1}', "1"], "pairs": [(1, 2), None]}
    td = TensorDict(**values, batch_size=2)  # type: ignore[arg-type]
    td["inner"] = TensorDict(mixed=[1.5, "x"], batch_size=2)
    for separator in (None, "/"):
        td.to_json(tmp_path / "x.json", lines=lines, separator=separator, overwrite=True)
        content = (tmp_path / "x.json").read_text()
        rows = [json.loads(line) for line in content.splitlines()] if lines else json.loads(content)
        for name in ("mixed", "dicts", "texts"):
            assert [row[name] for row in rows] == values[name]
        assert rows[0]["pairs"] == [1, 2]
        assert [row["inner"]["mixed"] if separator is None else row["inner/mixed"] for row in rows] == [1.5, "x"]


def test_what_json_columns_become(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(
        '{"l": [1], "n": {"a": 1}, "m": 1}\n\n{"l": [], "n": {"a": 2.5}, "m": 9007199254740993}\n'
        '{"m": 0.5, "l": [2, 3], "n": {"a": 3}}'
    )
    found = TensorDict.from_json(path, lines=True)
    assert [row.tolist() for row in found["l"].unbind()] == [[1], [], [2, 3]]
    assert found["n", "a"].tolist() == [1, 2.5, 3] and found["m"].tolist() == [1, 2**53, 0.5]
    path.write_text('{"a": [1, 2], "s": ["x", null]}')
    assert TensorDict.from_json(path)["s"] == ["x", None]
    path.write_text('{"a": {"x": 1, "y": 2}, "b": {"y": 6, "x": 5}}')  # as pandas writes it
    assert TensorDict.from_json(path)["b"].tolist() == [5, 6]
    path.write_text('{"s": ["u"], "n": {"t": "v"}}\n{"s": null, "n": null}')
    found = TensorDict.from_json(path, lines=True)
    assert found["s"] == [["u"], None] and found["n", "t"] == ["v", None]
    path.write_text('{"columns": ["a"], "data": [[1], [2]]}')
    assert TensorDict.from_json(path, orient="split")["a"].tolist() == [1, 2]


def test_several_files_and_urls(tmp_path: pathlib.Path) -> None:
    for i, text in enumerate(("a,s\n1,x\n", "a,s\n2.5,7\n")):
        (tmp_path / f"part{i}.csv").write_text(text)
    found = TensorDict.from_csv(tmp_path / "part*.csv")
    assert found["a"].tolist() == [1, 2.5] and found["s"] == ["x", "7"]
    td, where = TensorDict(a=torch.arange(3), batch_size=3), f"memory://{tmp_path.name}"
    td.to_csv(f"{where}/0/td.csv")
    td.to_csv(f"{where}/1/td.csv")
    td.to_json(f"{where}/td.jsonl", lines=True)
    assert TensorDict.from_csv(f"{where}/*/td.csv")["a"].tolist() == [0, 1, 2] * 2
    assert TensorDict.from_json(f"{where}/td.jsonl", lines=True)["a"].tolist() == [0, 1, 2]
    with pytest.raises(SaveError, match="overwrite=True"):
        td.to_csv(f"{where}/0/td.csv")
    for missing in (tmp_path / "no*.csv", tmp_path / "no.csv", f"{where}/no*.csv", f"{where}/no.csv"):
        with pytest.raises(FileNotFoundError):
            TensorDict.from_csv(missing)
    (tmp_path / "part2.csv").write_text("b,s\n1,x\n")
    with pytest.raises(ValueError, match=r"part2.csv: the columns are \['b', 's'\]"):
        TensorDict.from_csv(tmp_path / "part*.csv")


JSON_LINES = {
    "flat": '{"a": 1, "b": 0.1, "s": "x"}\n{"a": -2, "b": 5e-324, "s": "\\u00e9\\n\\ud83d\\ude00é"}\n',
    "integers and others": '{"a": 1}\n{"a": 2.5}\n{"a": 9007199254740993}',
    "nested": '{"a": {"b": [[1, 2], [3, 4]]}, "c": []}\n{"a": {"b": [[5, 6], [7, 8]]}, "c": [1.5]}',
    "texts that look like times": '{"s": "2020-01-01", "a": 1, "n": {"t": ["2020-01-01 10:00:00"]}}\n'
    '{"a": 2, "s": "2021-01-01T00:00:00Z", "n": {"t": []}}',
    "two rows in one line": '{"a": 1}{"a": 2}\n{"a": 3}',
    "two rows in two lines": '{"a": 1}{"a":\n2}',
    "an integer beyond int64": '{"a": 0.5}\n{"a": 9223372036854775808}',
    "words that are no JSON": '{"a": 0.5}\n{"a": Infinity}\n{"a": NaN}',
    "a word that nobody knows": '{"a": 0.5}\n{"a": Inf}',
    "a line break in text": '{"s": "x\ny"}',
    "a form feed behind": '{"a": 1}\x0c',
    "ends of lines of Windows, and empty lines": '{"a": 1}\r\n\r\n{"a": 2}\r\n',
    "lone surrogates": '{"s": "\\ud800"}',
    "a column that comes later": '{"s": "x"}\n{"s": "y", "t": "z"}\n{"t": null}',
    "no columns": "{}\n{}",
    "deep": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "not as deep": '{"a": ' + "[" * 600 + "1" + "]" * 600 + "}",
}


REFUSED = {
    "an integer beyond int64": "column 'a', row 2: 9223372036854775808 is beyond int64",
    "a word that nobody knows": "Expecting value",
    "a line break in text": "row 1: Unterminated string|Invalid control character",
    "a form feed behind": "Extra data|Expecting ',' delimiter",
    "lone surrogates": "column 's', row 1|surrogate",
    "no columns": "no columns|no rows",
    "deep": "nested too deeply",
    "not as deep": "nested too deeply",
}


@pytest.mark.parametrize("name", JSON_LINES)
@pytest.mark.parametrize("between", [None, ",", ", ", ",\n"])
def test_json_is_what_python_reads(tmp_path: pathlib.Path, name: str, between: str | None) -> None:
    text = JSON_LINES[name]
    if between is not None:
        text = text.replace("\r\n", "\n").replace("\n\n", "\n").rstrip("\n")
        text = "[" + text.replace("}\n{", "}" + between + "{").replace("}{", "}" + between + "{") + "]"
    path = tmp_path / "x.json"
    path.write_bytes(text.encode())

    def read() -> Any:
        return TensorDict.from_json(path, lines=between is None)

    if name in REFUSED:
        with pytest.raises(ValueError, match=f"x.json.*({REFUSED[name]})"):
            read()
        return
    found = read()
    lines = JSON_LINES[name].replace("}{", "}\n{").replace(":\n", ":").splitlines()
    expected = json.loads(text) if between is not None else [json.loads(line) for line in lines if line]
    for key, value in found.items(True, True):
        rows: list[Any] = expected
        for part in key if isinstance(key, tuple) else (key,):
            rows = [row.get(part) for row in rows]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 1:
            rows = list(map(float, rows))  # the nearest ones
        found_rows = [row.tolist() for row in value.unbind()] if isinstance(value, torch.Tensor) else list(value)
        assert repr(found_rows) == repr(rows)


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": "},{"},{"a": "x"}]',
        '[{"a": 1}\n{"a": 2}]',
        '[{"a": [{"b": 1},{"b": 2}]},{"a": []}]',
        '[{"a": 1},]',
        '[{"s": "}, {"},{"s": "},\\n{"}]',
        '[,{"a": 1}]',
        '[{"a": "},\n{"}]',
        '[{"a": 1},\n {"a": 2}]',
    ],
)
def test_what_is_between_rows_of_an_array(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match="x.json"):
            TensorDict.from_json(path)
        return
    name = next(iter(expected[0]))
    assert list(TensorDict.from_json(path)[name]) == [row[name] for row in expected]


def test_json_of_many_blocks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_json, "_BLOCK", 100)
    rows = [{"a": i, "s": f"2020-01-{i % 28 + 1:02}", "v": [i, i / 2][: 1 + i % 2]} for i in range(200)]
    rows[90]["a"], rows[91]["s"], rows[150]["more"] = 0.5, "é", "x"
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows[:100])) + "\n\n" + "\n".join(map(json.dumps, rows[100:])))
    found = TensorDict.from_json(path, lines=True)
    assert found["a"].tolist() == [row["a"] for row in rows] and found["s"] == [row["s"] for row in rows]
    assert [row.tolist() for row in found["v"].unbind()] == [row["v"] for row in rows]
    assert found["more"] == [row.get("more") for row in rows]
    rows[170]["a"] = "x"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="column 'a', row 17[12]: .* does not fit"):
        TensorDict.from_json(path, lines=True)


def test_what_is_written_is_what_python_writes(tmp_path: pathlib.Path) -> None:
    numbers = torch.tensor(
        [0.0, -0.0, 1.0, 1e15, 1e16, 123456789.0, 1e22, 1e-7, 5e-324, 0.1, -2.5], dtype=torch.float64
    )
    count = len(numbers)
    td = TensorDict(
        {
            "x": numbers,
            "half": torch.arange(count).half() / 3,
            "single": numbers.float(),
            "whole": torch.arange(count) - 2**62,
            "large": torch.full((count,), 2**63, dtype=torch.uint64),
            "flag": numbers > 0,
            'a "key"\n': torch.rand(count, 2, 3),
            "ragged": torch.nested.nested_tensor([torch.rand(i % 3) for i in range(count)], layout=torch.jagged),
            "text": ["plain", 'a "b"\n\\', "\x00é\u2028", "", None, "/"] + ["z"] * (count - 6),
            "none": torch.zeros(count, 0),
            "code": torch.arange(count) % 3 - 1,
            "code_categories": MetaData(["u", "v"]),
            "day": torch.arange(count, dtype=torch.int32),
            "day_arrow_type": MetaData("date32[day]"),
        },
        batch_size=count,
    )
    td["inner"] = TensorDict(x=numbers, values=[{"k": [1, None]}] * count, batch_size=count)
    td.to_json(tmp_path / "x.jsonl", lines=True)
    td.to_json(tmp_path / "x.json")
    lines = (tmp_path / "x.jsonl").read_text().split("\n")
    found = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "" and json.loads((tmp_path / "x.json").read_text()) == found
    for i, row in enumerate(found):
        for name in ("x", "half", "single", "whole", "large", "flag", 'a "key"\n'):
            assert repr(row[name]) == repr(td[name][i].tolist()), name
        assert row["ragged"] == td["ragged"][i].tolist() and row["text"] == td["text"][i] and row["none"] == []
        assert row["code"] == (None, "u", "v")[i % 3] and row["day"] == f"1970-01-{i + 1:02}"
        assert row["inner"] == {"x": numbers[i].item(), "values": {"k": [1, None]}}


BAD_CSV = {
    "more cells": (b"a,b\n1,2\n1,2,3\n", "Row #3: Expected 2 columns, got 3"),
    "fewer cells": (b"a,b\n1,2\n\n1\n", "Row #3: Expected 2 columns, got 1"),
    "mixed": (b"a,b\n1,2\nx,3\n", "column 'a', row 3: 'x' is not a number.*converters"),
    "mixed truth values": (b"a\ntrue\n1\n", "column 'a', row 3: '1' is not true"),
    "beyond int64": (b"a\n1\n9223372036854775808\n", "column 'a', row 3: 9223372036854775808 is beyond int64.*float64"),
    "no UTF-8": (b"a,b\n1,x\n2,\xe9\n", r"column 'b', row 3: b'\\xe9' is not valid UTF-8.*encoding"),
    "no UTF-8 in the header": (b"\xe9,b\n1,x\n", "can't decode byte 0xe9.*encoding"),
    "no value": (b"a,b\n1,x\n,y\n", "column 'a', row 3: there is no value.*nulls='mask'"),
    "beyond int64 among others": (
        b"a\n1\n2.5\n-9223372036854775809\n",
        "column 'a', row 4: -9223372036854775809 is beyond int64",
    ),
    "beyond int64 below others": (b"a\n1.5\n9223372036854775809\n", "column 'a', row 3: 9223372036854775809 is beyond"),
    "a name twice": (b"a,b,a\n1,2,3\n", "columns 1 and 3 are both called 'a'"),
    "a key in a leaf": (b"a,a.b\n1,2\n", "'a'"),
    "empty": (b"", "Empty CSV file"),
    "a header only": (b"a,b\n", "no rows"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_bad_csv(tmp_path: pathlib.Path, name: str) -> None:
    content, message = BAD_CSV[name]
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.csv.*{message}"):
        TensorDict.from_csv(path, separator=".")


def test_numbers_that_other_arguments_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"a;b\n18446744073709551615; 1\n0;+2\n")
    assert TensorDict.from_csv(path, sep=";", dtype=torch.float64)["a"].tolist() == [2.0**64, 0]
    assert TensorDict.from_csv(path, sep=";", dtype=torch.uint64)["a"].tolist() == [2**64 - 1, 0]
    path.write_bytes(b"1,NA\n2,4\n")
    found = TensorDict.from_csv(path, header=None, nulls="mask")
    assert set(found.keys()) == {"0", "1", "1_mask"} and found["1"].tolist() == [0, 4]
    assert TensorDict.from_csv(path, names=["x", "y"], fill=-1)["y"].tolist() == [-1, 4]
    path.write_bytes("a\nx\né\n".encode("latin-1"))
    assert TensorDict.from_csv(path, encoding="latin-1")["a"] == ["x", "é"]
    path.write_bytes(b"a,b\n1,2\n-999,3\n")
    found = TensorDict.from_csv(path, na_values=[-999], usecols=[0])  # by pandas, which has NaN then
    assert found["a"][0] == 1 and found["a"][1].isnan() and "b" not in found
    path.write_bytes(b"a\n" + b"x" * (5 << 20) + b"\n")
    with pytest.raises(ValueError, match=r"x.csv: .*a row has more than 2 MiB; low_memory=False"):
        TensorDict.from_csv(path)
    assert len(TensorDict.from_csv(path, low_memory=False)["a"][0]) == 5 << 20
    path.write_bytes(b"a\n1\nx\n")
    assert TensorDict.from_csv(path, converters={"a": str})["a"] == ["1", "x"]
    TensorDict(s=["x", None, "", " y ", "NA"], n=torch.arange(5), batch_size=5).to_csv(path, overwrite=True)
    assert TensorDict.from_csv(path)["s"] == ["x", None, "", " y ", "NA"]


CODES = {
    "in quotes": b'id,n\n"007",1\n"012",2\n',
    "below a text": b'id,n\n"x",1\n007,2\n',
}


@pytest.mark.parametrize("name", CODES)
def test_codes_are_text(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(CODES[name])
    found = TensorDict.from_csv(path)
    assert found["id"] == ["x", "007"] if "below" in name else ["007", "012"]
    assert found["n"].tolist() == [1, 2]
    path.write_bytes(b'id\n"90210"\n"02134"\n')
    with pytest.raises(ValueError, match="column 'id', row 3: '02134' is not a number"):
        TensorDict.from_csv(path)
    path.write_bytes(b'"007",1\n"012",2\n')
    assert TensorDict.from_csv(path, names=["id", "n"], usecols=["id"])["id"] == ["007", "012"]
    path.write_bytes(b"x\n1.5\n1e300\n-inf\n")
    assert TensorDict.from_csv(path)["x"].tolist() == [1.5, 1e300, -math.inf]
    path.write_bytes(b"month\n01\n12\n")  # without quotes these are numbers
    assert TensorDict.from_csv(path)["month"].tolist() == [1, 12]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_codes_in_wide_encodings_are_text(tmp_path: pathlib.Path, encoding: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text('id,n\n"007",1\n"012",2\n', encoding=encoding)
    assert TensorDict.from_csv(path, encoding=encoding)["id"] == ["007", "012"]
    path.write_text("id\n31\n0x1f\n", encoding=encoding)
    with pytest.raises(ValueError, match="column 'id', row 3: '0x1f' is not a number"):
        TensorDict.from_csv(path, encoding=encoding)


def test_cells_far_down(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.csv"

    def read(*last: str, **options: Any) -> Any:
        path.write_text("\n".join(["a", *["1"] * 1000, *last, ""]))
        return TensorDict.from_csv(path, **options)

    assert read("+2", " 3 ", "-4")["a"].tolist()[-4:] == [1, 2, 3, -4]
    assert read("NA", "2", nulls="mask")["a_mask"].tolist()[-2:] == [False, True]
    assert read("2.5", "-inf")["a"].tolist()[-3:] == [1, 2.5, -math.inf]
    assert read(str(2**53 + 1))["a"][-1] == 2**53 + 1
    assert read(str(2**64 - 1), dtype=torch.uint64)["a"][-1].item() == 2**64 - 1
    for cell, message in (
        ("0x1f", "'0x1f' is not a number"),
        ("x", "'x' is not"),
        (str(2**63), f"{2**63} is beyond int64"),
    ):
        with pytest.raises(ValueError, match=f"column 'a', row 1002: {message}"):
            read(cell)


@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("header", ["n,x", '"n","x"', '"n\nm",x', "\ufeffn,x"], ids=["plain", "quoted", "lines", "bom"])
def test_csv_on_all_processors(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, header: str, ending: str
) -> None:
    monkeypatch.setattr(convert_csv, "_BLOCK", 1 << 11)
    monkeypatch.setattr(convert_csv, "_HEAD", 1 << 8)
    path, count = tmp_path / "x.csv", 3000
    lines = [f"{i},{i / 2}" for i in range(count)]

    def read(text: str, **options: Any) -> Any:
        path.write_bytes(text.encode())
        return TensorDict.from_csv(path, **options)

    for end in (ending, ""):  # the last line may have no end
        td = read(ending.join([header, *lines]) + end)
        assert td["n\nm" if "m" in header else "n"].tolist() == list(range(count))
        assert td["x"].tolist() == [i / 2 for i in range(count)]
    td = read(ending.join([header, *lines]), usecols=["x"])
    assert set(td.keys()) == {"x"} and td["x"][-1] == (count - 1) / 2
    td = read(ending.join(lines), names=["a", "b"])
    assert td["a"].tolist() == list(range(count))
    td = read(ending.join([header, *lines, '"7","8.5"', *lines]))
    assert td["x"].tolist() == [*(i / 2 for i in range(count)), 8.5, *(i / 2 for i in range(count))]
    with pytest.raises(ValueError, match=f"Row #{count + 2}: Expected 2 columns, got 3"):
        read(ending.join([header, *lines, "1,2,3", *lines]))


def test_csv_of_which_the_end_is_of_other_cells(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_csv, "_BLOCK", 1 << 12)
    monkeypatch.setattr(convert_csv, "_HEAD", 1 << 10)
    path = tmp_path / "x.csv"
    lines = [f"{i},{i / 2},{i % 2 == 0},t{i},1" for i in range(2000)]

    def read(line: str) -> Any:
        path.write_text("\n".join(["n,x,b,s,w", *lines, line, *lines]) + "\n")
        return TensorDict.from_csv(path, nulls="mask")

    for line, name, value in (
        ("2.5,1,True,x,1", "n", 2.5),
        ("+7,1,True,x,1", "n", 7),
        ("0,NA,true,x,1", "x", 0),
        ("0,1, true ,x,1", "b", True),
        ("0,1,FALSE,x,1", "b", 0),
        ("0,1,True,,1", "s", None),
        ("0,1,True,NA,1", "s", "NA"),
        ('0,1,True,"a\nb",1', "s", "a\nb"),
    ):
        found = read(line)
        assert found[name][2000] == value and len(found["s"]) == found["n"].shape[0] == 4001
        assert found["n"][2001:].tolist() == list(range(2000)) and found["x"][4000] == 999.5
        assert found["b"][-2:].tolist() == [True, False] and found["s"][1999] == found["s"][4000] == "t1999"
        assert ("x_mask" in found) == (name == "x")
    for line, message in (
        ("0,1,1,x,1", "column 'b', row 2002: '1' is not true"),
        ("0x1,1,True,x,1", "column 'n', row 2002: '0x1' is not"),
        ("0,1,True,x", "Row #2002: Expected 5 columns, got 4"),
        ("0,x,True,x,1", "column 'x', row 2002: 'x' is not"),
    ):
        with pytest.raises(ValueError, match=message):
            read(line)
    with gzip.open(tmp_path / "x.csv.gz", "wt") as file:
        file.write(path.read_text().replace("0,x,True", "0,1,True"))
    assert TensorDict.from_csv(tmp_path / "x.csv.gz")["n"].shape == (4001,)


BAD_JSON = {
    "mixed": ('{"a": 1}\n{"a": "x"}', "column 'a', row 2: \"x\" does not fit.*number to string"),
    "mixed inside": ('{"a": {"b": 1}}\n{"a": {"b": [1]}}', "column 'a', row 2"),
    "beyond int64": ('{"a": 1}\n{"a": 9223372036854775808}', "column 'a', row 2: 9223372036854775808 is beyond int64"),
    "no value": ('{"a": 1}\n{"b": 1}', "column 'a', row 2: there is no value"),
    "no value inside": ('{"a": {"b": 1}}\n\n{"a": {"b": null}}', "column 'a.b', row 2: there is no value"),
    "no object inside": ('{"a": {"b": 1}}\n{"a": null}', "column 'a.b', row 2: there is no value"),
    "no value in a list": ('{"a": [1, 2]}\n{"a": [1]}\n{"a": [1, null]}', "column 'a', row 3: there is no value"),
    "no JSON behind an empty line": ('\n{"a": 1}\n\n{"a": }', "row 2: Expecting value"),
    "a key twice": ('{"a": 1, "a": 2}', "row 1: an object has the name 'a' twice"),
    "a key in a leaf": ('{"a": 1, "a.b": 2}', "'a'"),
    "no JSON": ('{"a": 1}\n{"a": }', "row 2: Expecting value"),
    "no object": ('{"a": 1}\n[1]', "row 2: a line is one object"),
    "empty": ("", "no rows"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json(tmp_path: pathlib.Path, name: str) -> None:
    content, message = BAD_JSON[name]
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"bad.jsonl.*{message}"):
        TensorDict.from_json(path, lines=True, separator=".")


def test_bad_json_that_is_no_lines(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.json"
    for content, message in {
        b'{"a": 1}\n{"a": 2}': "lines=True",
        b"[1]": "row 1: a row is an object, got a number",
        b'{"a": [1, 2], "b": [1]}': "different numbers of rows",
        b'{"a": {"0": 1}, "b": {"1": 1}}': "column 'b': its row names differ",
        b"": "is empty",
        b"[]": "no rows",
        b'[{"a": "\xe9"}]': "can't decode byte 0xe9",
        b"[" * 100000: "nested too deeply|Expecting",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"bad.json.*({message})"):
            TensorDict.from_json(path)


def test_what_cannot_be_written(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=TensorDict(b=torch.zeros(2), batch_size=2), m=torch.zeros(2, 3), z=["x", "y"], batch_size=2)
    with pytest.raises(ValueError, match="column 'a' is a nested container.*'a.b'"):
        td.to_csv(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="column 'm'.*to_json"):
        td.to_csv(tmp_path / "x.csv", separator=".")
    with pytest.raises(ValueError, match="column 'm'.*to_json"):  # pandas would write "[0 1 ... 98 99]"
        td.to_csv(tmp_path / "x.csv", separator=".", sep=";")
    alone = TensorDict(s=["x", None], batch_size=2)
    with pytest.raises(ValueError, match="column 's' lacks values.*empty line"):
        alone.to_csv(tmp_path / "x.csv")
    with pytest.raises(TypeError, match="column 'd': JSON has no timedelta"):
        TensorDict(d=torch.arange(2), d_arrow_type=MetaData("duration[us]"), batch_size=2).to_json(tmp_path / "x.json")
    with pytest.raises(ValueError, match="column 'a': .*infinite"):
        TensorDict(a=torch.tensor([math.inf]), batch_size=1).to_json(tmp_path / "x.json")
    with pytest.raises(TypeError, match="bytes"):
        TensorDict(a=[b"x", b"y"], batch_size=2).to_json(tmp_path / "x.json")
    clash = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}}, batch_size=2)
    with pytest.raises(ValueError, match="a.b"):
        clash.to_csv(tmp_path / "x.csv", separator=".")
    assert not list(tmp_path.iterdir())
    assert issubclass(DuplicateKeyError, ValueError)


def test_without_pyarrow(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.csv").write_text("a\n1\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for read in (TensorDict.from_csv, TensorDict.from_json):
        with pytest.raises(ModuleNotFoundError, match=r"tensordict\[tabular\]"):
            read(tmp_path / "x.csv")
    with pytest.raises(ModuleNotFoundError, match=r"tensordict\[tabular\]"):
        rows().to_csv(tmp_path / "y.csv")


def test_whole_floating_point_numbers_stay_floating_point_numbers(tmp_path: pathlib.Path) -> None:
    values = {"a": [1.0, 2.0, -3.0], "b": [1e20, 1.0, 0.0], "c": [1.0, 2.5, 3.0], "d": [math.nan, 1.0, 2.0]}
    td = TensorDict({name: torch.tensor(value) for name, value in values.items()}, [3])
    td["n"] = TensorDict({"half": torch.tensor([1, 2, 3], dtype=torch.float16)}, [3])
    td.to_csv(tmp_path / "x.csv", separator=".")
    found = TensorDict.from_csv(tmp_path / "x.csv", separator=".")
    assert all(leaf.dtype is torch.float64 for leaf in found.values(True, True))
    assert_close(found.float(), td.float(), equal_nan=True)
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[0] == "a,b,c,d,n.half" and lines[1].startswith("1.0,1e+20,1,nan,1.0")


def test_negative_zeros_keep_their_sign(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.tensor([-0.0, 1e14, 0.0]), batch_size=[3])
    td.to_csv(tmp_path / "x.csv")
    found = TensorDict.from_csv(tmp_path / "x.csv")["a"]
    assert torch.equal(found, td["a"].double()) and torch.signbit(found).tolist() == [True, False, False]


def test_names_in_the_header_have_quotes_only_where_they_need_them(tmp_path: pathlib.Path) -> None:
    names = ["plain", "with space", "a,b", 'a"b', "line\nbreak", ""]
    TensorDict({name: torch.arange(2) for name in names}, [2]).to_csv(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().startswith('plain,with space,"a,b","a""b","line\nbreak",')
    assert list(TensorDict.from_csv(tmp_path / "x.csv").keys()) == names


def test_missing_cells_with_the_options_of_from_arrow(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n,3\n")
    with pytest.raises(ValueError, match="no value"):
        TensorDict.from_csv(tmp_path / "x.csv", nulls="raise")
    assert TensorDict.from_csv(tmp_path / "x.csv", nulls="fill")["a"].tolist() == [1, 0]
    with pytest.raises(TypeError, match="exclude each other"):
        TensorDict.from_csv(tmp_path / "x.csv", batch_size=[2], auto_batch_size=True)


GROWTH = """
import sys
from pathlib import Path
from tensordict import TensorDict
def read(path):
    return TensorDict.from_parquet(path) if path.endswith("parquet") else TensorDict.from_json(path)
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
read(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
found = read(sys.argv[2])
print(status("VmHWM") - before - sum(leaf.nbytes for leaf in found.values()) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("suffix", "limit"), [("json", 60), ("parquet", 120)])
def test_reading_takes_little_memory_beside_the_rows(tmp_path: pathlib.Path, suffix: str, limit: float) -> None:
    """An array of 40 MB was in memory four times, and 200 MB of columns of Parquet twice."""
    small, large = tmp_path / f"small.{suffix}", tmp_path / f"large.{suffix}"
    td = TensorDict({f"k{i}": torch.rand(2) for i in range(32)}, [2])
    if suffix == "json":
        td.to_json(small)
        row = small.read_text().strip()[1:-1] + ",\n"
        large.write_text("[" + row * (40_000_000 // len(row)) + row.rstrip(",\n") + "]\n")
    else:
        td.to_parquet(small)
        TensorDict({f"k{i}": torch.rand(1 << 21) for i in range(24)}, [1 << 21]).to_parquet(large)
    child = subprocess.run([sys.executable, "-c", GROWTH, small, large], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert float(child.stdout) < limit
