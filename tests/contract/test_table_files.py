"""Rows of every kind of container in files of other libraries."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from contract.kinds import Kind
from contract.model import Plain, leaves
from tensordict import TensorDict

# Readers of tables return a container in memory; tests/convert calls them.
READING = {"from_csv", "from_hf", "from_json", "from_mds", "from_pandas", "from_parquet", "from_polars"}
# All of them write what `to_arrow` gives.
OF_ARROW = {"to_pandas", "to_parquet", "to_polars"}


class Collecting:
    """Takes samples as an `MDSWriter` does."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.finished = 0

    def write(self, sample: dict[str, Any]) -> None:
        self.samples.append(sample)

    def finish(self) -> None:
        self.finished += 1


def test_to_mds(td: Any, plain: Plain, kind: Kind) -> None:
    writer = Collecting()
    td.to_mds(out="ignored", writer=writer)
    assert writer.finished == bool(kind.batch_size)
    td.to_mds(writer=writer, finish_writer=False)
    assert writer.finished == bool(kind.batch_size)
    count = kind.batch_size[0] if kind.batch_size else 1
    assert len(writer.samples) == 2 * count
    for path, leaf in leaves(plain).items():
        leaf = leaf if kind.batch_size else leaf[None]
        column = [sample[".".join(path)] for sample in writer.samples[:count]]
        assert [value if isinstance(value, int) else value.tolist() for value in column] == leaf.tolist()


def test_to_json(td: Any, plain: Plain, kind: Kind, tmp_path: pathlib.Path) -> None:
    if not kind.batch_size:
        with pytest.raises(ValueError, match="rows|number"):
            td.to_json(tmp_path / "td.json")
        return
    td.to_json(tmp_path / "td.json", separator=".")
    rows = json.loads((tmp_path / "td.json").read_text())
    for path, leaf in leaves(plain).items():
        assert [row[".".join(path)] for row in rows] == leaf.tolist()
    if kind.name == "dense":
        assert td.to_hf().num_rows == kind.batch_size[0]
        with pytest.raises(ValueError, match="a cell of CSV"):
            td.to_csv(tmp_path / "td.csv", separator=".")


def test_to_arrow(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        with pytest.raises(ValueError, match="rows|number"):
            td.to_arrow()
        return
    table = td.to_arrow()
    assert table.num_rows == kind.batch_size[0]
    found = TensorDict.from_arrow(table)
    for path, leaf in leaves(plain).items():
        assert found[path].equal(leaf) and found[path].dtype == leaf.dtype
