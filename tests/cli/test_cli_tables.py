"""`tensordict convert` from and to tables: rows, what is refused, and memory that does not grow with the file."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tensordict import TensorDict, open_dataset
from tensordict.core.exceptions import SaveError
from tensordict.io.formats.opening import describe_save
from tensordict.io.saving import progress
from tensordict_cli import main

ROOT = pathlib.Path(__file__).parents[2]


def rows() -> TensorDict:
    td = TensorDict(a=torch.arange(5), s=list("abcde"), batch_size=5)
    return td.set("inner", TensorDict(x=torch.arange(5) / 3, batch_size=5))


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_there_and_back(tmp_path: pathlib.Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    td = rows()
    source, made, back = tmp_path / f"x.{suffix}", tmp_path / "made", tmp_path / f"back.{suffix}"
    td.save(tmp_path / "save.tdz")
    assert main(["convert", str(tmp_path / "save.tdz"), str(source)]) == 0
    assert main(["convert", str(source), f"{made}/"]) == 0
    data = open_dataset(made)
    assert len(data) == 5 and data["a"].tolist() == [0, 1, 2, 3, 4] and data[3]["s"] == "d"
    torch.testing.assert_close(data["inner", "x"].float(), td["inner", "x"])
    assert main(["convert", str(made), str(back)]) == 0
    assert "5 rows" in capsys.readouterr().out
    if suffix == "parquet":
        assert TensorDict.from_parquet(back)["inner", "x"].equal(td["inner", "x"])
    else:
        assert back.read_bytes() == source.read_bytes() or suffix == "csv"
    # An existing target is not replaced.
    assert main(["convert", str(source), str(made)]) == 2 and main(["convert", str(made), str(back)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["convert", "--force", str(made), str(back)]) == 0


def test_what_fails_leaves_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.csv").write_text("a\n" + "1\n" * 10 + "x\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but no more")
    TensorDict(a=torch.zeros(())).save(tmp_path / "single.tdz")
    before = sorted(tmp_path.iterdir())
    for source, target in (
        ("bad.csv", "made"), ("bad.parquet", "made"), ("none.csv", "made"), ("n*.csv", "made"), ("single.tdz", "x.csv"),
        ("bad.csv", "x.tdz"), ("bad.csv", "bad.csv"),
    ):  # fmt: skip
        assert main(["convert", str(tmp_path / source), str(tmp_path / target)]) == 2
    said = capsys.readouterr().err
    assert "bad.csv, column 'a', row 12" in said and "bad.parquet" in said and "no batch dims" in said
    assert sorted(tmp_path.iterdir()) == before


def test_rows_that_are_none_and_parts_that_differ(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(TensorDict(a=torch.zeros(0), batch_size=0).to_arrow(), tmp_path / "none.parquet")
    count = 70_000  # more than are read at a time
    mixed = TensorDict(v=["a"] * count + [1], a=torch.zeros(count + 1, 64), batch_size=count + 1)
    mixed.save(tmp_path / "mixed.tdz")
    mixed.exclude("a").save(tmp_path / "values.tdz")
    before = sorted(tmp_path.iterdir())
    for source, target in (("none.parquet", "x.parquet"), ("none.parquet", "made"), ("mixed.tdz", "x.parquet")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target)]) == 2
    said = capsys.readouterr().err
    assert said.count("none.parquet': the table has no rows") == 2 and "from row 65536 on, entries hold values" in said
    assert sorted(tmp_path.iterdir()) == before
    assert main(["convert", str(tmp_path / "values.tdz"), str(tmp_path / "x.jsonl")]) == 0
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    assert lines[0] == '{"v": "a"}' and lines[-1] == '{"v": 1}' and len(lines) == count + 1


def test_a_file_that_arrow_could_not_read_is_not_written(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    td = TensorDict(x=torch.zeros(2), batch_size=2)
    for _ in range(99):
        td = TensorDict({"n": td}, 2)
    td.save(tmp_path / "deep")
    assert main(["convert", str(tmp_path / "deep"), str(tmp_path / "deep.parquet")]) == 2
    assert "needs 101 levels of a Parquet schema" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "deep"]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_numbers_that_are_missing(tmp_path: pathlib.Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"n": pandas.array([1, None, 3], dtype="Int64"), "x": [0.5, 1.5, 2.5], "s": ["a", None, "c"]}
    )
    source = tmp_path / f"x.{suffix}"
    if suffix == "jsonl":
        frame.to_json(source, orient="records", lines=True)
    else:
        getattr(frame, f"to_{suffix}")(source, index=False)

    def convert(*options: str, made: str = "made") -> int:
        return main(["convert", *options, str(source), str(tmp_path / made)])

    assert convert() == 2
    said = capsys.readouterr().err
    assert "'n'" in said and "--fill 0 replaces them by a number" in said and "--nulls mask adds a leaf" in said
    for option, message in (
        (["--fill", "x=0"], "column 'n'"),
        (["--fill", "0.5"], "cannot hold the fill value 0.5"),
        (["--fill", "much"], "--fill is a number"),
        (["--fill", "0", "--fill", "n=1"], "one number for all columns, or"),
    ):
        assert convert(*option) == 2 and message in capsys.readouterr().err and not (tmp_path / "made").exists()
    assert convert("--fill", "-1") == 0 and convert("--fill", "n=7", "--fill", "x=nan", made="other.jsonl") == 0
    data = open_dataset(tmp_path / "made")
    assert data["n"].tolist() == [1, -1, 3] and data["n"].dtype == torch.int64 and data[1]["s"] is None
    assert TensorDict.from_json(tmp_path / "other.jsonl", lines=True)["n"].tolist() == [1, 7, 3]
    assert main(["convert", "--fill", "0", str(tmp_path / "made"), str(tmp_path / "x.tdz")]) == 2
    assert "is a save, which has all of its numbers" in capsys.readouterr().err


def write_gaps(path: pathlib.Path, rows: int) -> None:
    """A table of many parts; only the last one lacks values."""
    n = [*range(rows - 1), None]
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"n": n, "x": [0.5] * rows, "in": [{"y": value} for value in n]}), path)
    elif path.suffix == ".csv":
        cells = (f"{'' if value is None else value}" for value in n)
        path.write_text("n,x,in.y,pad\n" + "".join(f"{cell},0.5,{cell},{'-' * 40}\n" for cell in cells))
    else:
        path.write_text("".join(json.dumps({"n": value, "x": 0.5, "in": {"y": value}}) + "\n" for value in n))


@pytest.mark.parametrize(("suffix", "rows"), [("parquet", 70_000), ("csv", 60_000), ("jsonl", 40_000)])
def test_masks_of_numbers_that_are_missing(
    tmp_path: pathlib.Path, suffix: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made, back = (tmp_path / name for name in (f"x.{suffix}", "made", f"back.{suffix}"))
    write_gaps(source, rows)
    assert main(["convert", "--nulls", "mask", "--fill", "7", str(source), str(made)]) == 0
    data = open_dataset(made)
    for name in ("n", ("in", "y")):
        values, mask = data[name], data[f"{name}_mask" if name == "n" else ("in", "y_mask")]
        assert mask.dtype is torch.bool and mask[:-1].all() and not mask[-1]
        assert values.dtype is torch.int64 and values.tolist() == [*range(rows - 1), 7]
    assert "x_mask" not in data.keys()
    assert main(["convert", "--nulls", "mask", str(made), str(back)]) == 0
    read = {"parquet": TensorDict.from_parquet, "csv": TensorDict.from_csv}.get(suffix, TensorDict.from_json)
    options = {"lines": True} if suffix == "jsonl" else {}
    one, other = (read(path, nulls="mask", **options) for path in (source, back))
    assert (one == other).all() and set(one.keys(True)) == set(other.keys(True))
    # From table to table, too; and without it, masks are columns.
    assert main(["convert", "--nulls", "mask", str(source), str(tmp_path / "other.jsonl")]) == 0
    last = (tmp_path / "other.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["n"] is None and "n_mask" not in last
    assert main(["convert", str(made), str(tmp_path / "plain.parquet")]) == 0
    assert "n_mask" in TensorDict.from_parquet(tmp_path / "plain.parquet")
    assert main(["convert", "--nulls", "mask", str(made), str(tmp_path / "x.tdz")]) == 2
    assert "--nulls is for tables" in capsys.readouterr().err


def test_rows_from_table_to_table_have_a_bar(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "has_viewer", lambda: True)
    TensorDict(a=torch.arange(70_000), batch_size=70_000).to_parquet(tmp_path / "x.parquet")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "x.parquet"), str(tmp_path / "x.csv")]) == 0
    said = capsys.readouterr().err
    assert re.search(r"writing: [3-9]\d\dk?B ", said), said


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json"])
def test_a_table_is_no_save(tmp_path: pathlib.Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"x.{suffix}"
    getattr(rows().select("a"), f"to_{suffix}")(path)
    with pytest.raises(SaveError, match="is no save but a table: from_csv, from_json or from_parquet reads it"):
        describe_save(path)
    assert TensorDict.load(path)["a"].tolist() == [0, 1, 2, 3, 4]
    assert main(["inspect", str(path)]) == 2 and "`tensordict convert` makes a data set" in capsys.readouterr().err
    # The content of a file decides its format, not its name.
    rows().to_safetensors(path, overwrite=True)
    assert TensorDict.load(path)["a"].tolist() == [0, 1, 2, 3, 4]


def test_patterns(tmp_path: pathlib.Path) -> None:
    for i in range(3):
        TensorDict(a=torch.arange(2) + i, batch_size=2).to_csv(tmp_path / f"part{i}.csv")
    assert main(["convert", str(tmp_path / "part*.csv"), str(tmp_path / "made")]) == 0
    assert open_dataset(tmp_path / "made")["a"].tolist() == [0, 1, 1, 2, 2, 3]


def test_urls(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    where = f"memory://{tmp_path.name}"
    for i in range(2):
        TensorDict(a=torch.arange(2) + i, batch_size=2).to_json(f"{where}/part{i}.jsonl", lines=True)
    assert main(["convert", f"{where}/part*.jsonl", f"{where}/made"]) == 0
    assert open_dataset(f"{where}/made")["a"].tolist() == [0, 1, 1, 2]
    assert main(["convert", f"{where}/made", f"{where}/all.parquet"]) == 0
    assert TensorDict.from_parquet(f"{where}/all.parquet")["a"].tolist() == [0, 1, 1, 2]
    # An existing target is not replaced.
    assert main(["convert", f"{where}/made", f"{where}/all.parquet"]) == 2
    assert main(["convert", f"{where}/part0.jsonl", f"{where}/all.parquet"]) == 2
    assert "--force" in capsys.readouterr().err


PEAK = """
import resource, sys
from tensordict_cli import main
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
suffix, small, large, made, back = sys.argv[1:]
assert main(["convert", small, made + "-small"]) == 0
assert main(["convert", made + "-small", made + "-small." + suffix]) == 0
before = peak()
assert main(["convert", large, made]) == 0
assert main(["convert", made, back]) == 0
print(peak() - before)
"""
COUNT = 1 << 18


def write_parquet(path: pathlib.Path, pieces: int) -> None:
    """A file of 4.5 MiB for each piece."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with parquet.ParquetWriter(path, pyarrow.schema({"x": "float64", "y": "float64"}), compression="none") as writer:
        for _ in range(pieces):
            columns = [torch.rand(COUNT, dtype=torch.float64).numpy() for _ in range(2)]
            writer.write_table(pyarrow.table(columns, names=["x", "y"]))


def write_csv(path: pathlib.Path, pieces: int) -> None:
    """A file of 3.5 MiB for each piece."""
    lines = "".join(f"{x:.6f},{x}\n" for x in torch.rand(COUNT // 2).tolist())
    with open(path, "w") as file:
        file.write("x,y\n")
        for _ in range(pieces):
            file.write(lines)


def write_json_lines(path: pathlib.Path, pieces: int) -> None:
    """A file of 5 MiB for each piece, of three times as much in objects of Python."""
    lines = "".join(json.dumps({"x": row.tolist()}) + "\n" for row in torch.rand(4096, 64, dtype=torch.float64))
    with open(path, "w") as file:
        for _ in range(pieces):
            file.write(lines)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("suffix", "write", "few", "many", "rows", "limit"),
    [
        pytest.param("parquet", write_parquet, 2, 64, 64 * COUNT, 128, marks=pytest.mark.slow),
        ("csv", write_csv, 14, 40, 20 * COUNT, 64),
        pytest.param("jsonl", write_json_lines, 3, 12, 12 * 4096, 64, marks=pytest.mark.slow),
    ],
    ids=["parquet", "csv", "jsonl"],
)
def test_memory_does_not_grow_with_the_file(
    tmp_path: pathlib.Path,
    suffix: str,
    write: Callable[[pathlib.Path, int], None],
    few: int,
    many: int,
    rows: int,
    limit: float,
) -> None:
    small, large, made, back = (
        tmp_path / name for name in (f"small.{suffix}", f"large.{suffix}", "made", f"back.{suffix}")
    )
    write(small, few)
    write(large, many)
    command = [sys.executable, "-c", PEAK, suffix, small, large, made, back]
    child = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert len(open_dataset(made)) == rows
    assert float(child.stdout.splitlines()[-1]) < limit
    if suffix == "parquet":
        assert pytest.importorskip("pyarrow.parquet").ParquetFile(back).metadata.num_rows == rows
    else:
        with open(back, "rb") as file:
            assert sum(1 for _ in file) == rows + (suffix == "csv")
