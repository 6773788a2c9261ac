"""`Dataset.add_column`: a new entry for all rows, a shard at a time, also after a crash."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from tensordict import DatasetWriter, TensorClass, TensorDict, open_dataset, verify
from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.datasets import compact, tidy

ROWS = 10


class Step(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


def write(folder: pathlib.Path, count: int = ROWS, **options: Any) -> str:
    path = str(folder / "data")
    content = {"x": torch.arange(count), "text": [f"t{row}" for row in range(count)], "n": {"z": torch.zeros(count, 2)}}
    with DatasetWriter(path, rows_per_shard=4, **options) as writer:
        writer.extend(TensorDict(content, [count]))
    return path


def double(rows: Any) -> torch.Tensor:
    return rows["x"] * 2


def files_of(path: str) -> list[str]:
    return sorted(os.path.join(at, name) for at, _, names in os.walk(path) for name in names)


@pytest.mark.parametrize("format", ["folder", "archive", "zarr"])
def test_new_entries_of_all_kinds(tmp_path: pathlib.Path, format: str) -> None:
    path = write(tmp_path, format=format)
    before = open_dataset(path)
    sizes: list[int] = []

    def measure(rows: Any) -> torch.Tensor:
        sizes.append(len(rows))
        return double(rows)

    data = before.add_column("y", measure)
    assert sizes == [4, 4, 2] and data["y"].tolist() == [2 * row for row in range(ROWS)]
    data = data.add_column(("n", "upper"), lambda rows: [text.upper() for text in rows["text"]])
    data = data.add_column("ragged", lambda rows: torch.nested.nested_tensor(
        [torch.ones(1 + int(x) % 3) for x in rows["x"]], layout=torch.jagged))  # fmt: skip
    assert data["n", "upper"] == [f"T{row}" for row in range(ROWS)] and data[4]["ragged"].shape == (2,)
    assert data[[9, 2]]["y"].tolist() == [18, 4] and data[3:5]["text"] == ["t3", "t4"]
    # A reader that was open before keeps the old rows, and its views.
    assert list(before.keys()) == ["x", "text", "n"] and before[9]["x"] == 9 and before["text"][5] == "t5"
    assert verify(path).problems == [] and tidy(path) == ([], {})
    assert compact(path) == (3, 1) and open_dataset(path)["n", "upper"] == data["n", "upper"]
    with DatasetWriter(path) as writer, pytest.raises(SchemaError, match="lacks"):
        writer.extend(TensorDict(x=torch.arange(2), batch_size=[2]))
    with DatasetWriter(path) as writer:
        writer.extend(open_dataset(path)[:2].to_tensordict())
    assert len(open_dataset(path)) == ROWS + 2


def test_rows_of_a_tensorclass(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "data")
    with DatasetWriter(path) as writer:
        writer.extend(Step(torch.arange(5), batch_size=[5]))
    data = open_dataset(path)
    data._wrapped_container().add_column("y", lambda rows: rows.x + 1)
    assert isinstance(open_dataset(path), Step) and open_dataset(path)[2:].y.tolist() == [3, 4, 5] and data.y is None


def test_shards_of_many_writers_and_merged_ones(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)
    compact(path)
    write(tmp_path, 3)
    write(tmp_path, 6)
    data = open_dataset(path).add_column("y", double)
    assert torch.equal(data["y"], data["x"] * 2) and len(data) == ROWS + 9
    assert torch.equal(data["x"], open_dataset(path)["x"])


def test_a_call_that_fails_is_continued(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)
    calls: list[int] = []

    def fail_late(rows: Any) -> torch.Tensor:
        calls.append(int(rows["x"][0]))
        if len(calls) == 3:
            raise OSError("no more")
        return double(rows)

    with pytest.raises(OSError, match="no more"):
        open_dataset(path).add_column("y", fail_late)
    half = open_dataset(path)
    assert list(half.keys()) == ["x", "text", "n"] and half["x"].tolist() == list(range(ROWS))
    assert half[5]["text"] == "t5" and verify(path).problems == []
    with pytest.raises(SchemaError, match="'y': this data set has rows of shape.*int64, got.*float32"):
        half.add_column("y", lambda rows: rows["x"].float())
    done = half.add_column("y", fail_late)
    assert calls == [0, 4, 8, 8] and done["y"].tolist() == [2 * row for row in range(ROWS)]
    assert half["x"].tolist() == list(range(ROWS)) and verify(path).problems == []
    with pytest.raises(SchemaError, match="'y': the data set .* has an entry of this name already"):
        done.add_column("y", double)


def test_a_half_added_entry_may_stay(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)

    def fail(rows: Any) -> torch.Tensor:
        if rows["x"][0] == 4:
            raise OSError("no more")
        return double(rows)

    with pytest.raises(OSError, match="no more"):
        open_dataset(path).add_column("y", fail)
    assert tidy(path, older_than=0.0).left == {} and open_dataset(path)["x"].tolist() == list(range(ROWS))
    write(tmp_path, 3)
    assert len(open_dataset(path)) == ROWS + 3 and len(open_dataset(path).add_column("z", double)["z"]) == ROWS + 3
    compact(path)
    assert "y" not in open_dataset(path).keys() and len(open_dataset(path).add_column("y", double)["y"]) == ROWS + 3


KILLED = """
    import os, sys
    from tensordict import open_dataset
    from tensordict.datasets import columns, manifest
    path, point = sys.argv[1:]
    count = 0
    def fn(rows):
        global count
        count += 1
        if point == f"call {count}":
            os._exit(9)
        return rows["x"] * 2
    def die(*args, **options):
        os._exit(9)
    if point == "before the schema":
        columns.replace_schema = die
    if point == "after the schema":
        columns.Sweeper.remove_superseded_shards = die
    if point == "before a line":
        real = columns.new_manifest
        def new_manifest(*args):
            made = real(*args)
            made.add = die
            return made
        columns.new_manifest = new_manifest
    open_dataset(path).add_column("y", fn)
"""


@pytest.mark.parametrize("point", ["call 1", "call 3", "before a line", "before the schema", "after the schema"])
def test_a_killed_call_is_continued(tmp_path: pathlib.Path, point: str) -> None:
    path = write(tmp_path)
    reader = open_dataset(path)
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), path, point]).returncode == 9
    data = open_dataset(path)
    assert data["x"].tolist() == reader["x"].tolist() == list(range(ROWS))
    calls: list[int] = []

    def fn(rows: Any) -> torch.Tensor:
        calls.append(len(rows))
        return double(rows)

    if point == "after the schema":
        assert data["y"].tolist() == [2 * row for row in range(ROWS)]
    else:
        assert "y" not in data.keys()
        data = data.add_column("y", fn)
        assert len(calls) == {"call 1": 3, "call 3": 1, "before a line": 3, "before the schema": 0}[point]
    assert data["y"].tolist() == [2 * row for row in range(ROWS)] and reader[7]["text"] == "t7"
    swept = tidy(path, older_than=0.0)
    assert not swept.left or point == "before a line"  # a complete shard that no line lists stays
    assert open_dataset(path)["y"].tolist() == data["y"].tolist() and open_dataset(path)["text"] == data["text"]
    if point != "before a line":
        assert verify(path).problems == []
        assert len([name for name in files_of(path) if name.endswith("x.memmap")]) == 3


def test_what_cannot_be_added(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)
    data = open_dataset(path)
    before = files_of(path)
    with pytest.raises(SchemaError, match="'x': the data set"):
        data.add_column("x", double)
    with pytest.raises(SchemaError, match="'y' must return a tensor or list with one value for each of 4 rows"):
        data.add_column("y", lambda rows: torch.zeros(3))
    with DatasetWriter(path) as writer:
        writer.append(data[0].to_tensordict())
        with pytest.raises(SaveError, match="is at work"):
            data.add_column("y", double)
    with DatasetWriter("memory://add-column/data") as writer:
        writer.extend(TensorDict(x=torch.arange(2), batch_size=[2]))
    with pytest.raises(SaveError, match="is a URL"):
        open_dataset("memory://add-column/data").add_column("y", double)
    assert set(before) <= set(files_of(path)) and "y" not in open_dataset(path).keys()


def test_a_writer_that_was_made_before(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)
    writer = DatasetWriter(path)
    data = open_dataset(path).add_column("y", double)
    row = data[0].to_tensordict().exclude("y")
    with pytest.raises(SchemaError, match="make another writer"):
        writer.append(row)
    assert writer.rows == 0
    writer.close()
    assert len(open_dataset(path)) == ROWS
