"""Data sets: rows in and out, many writers, growing under a reader, compaction, iteration, the command line."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dataset_rows import Step, assert_rows, rows
from tensordict import DatasetWriter, NonTensorStack, TensorDict, diff, lazy_stack, load, open_dataset, verify
from tensordict.core.exceptions import SaveError, SchemaError, UnsupportedEntryError
from tensordict.datasets import DatasetLoader, compact, tidy
from tensordict.datasets.index import Manifests
from tensordict.datasets.location import Location
from tensordict.datasets.order import Order
from tensordict.memory import rows as scattered
from tensordict_cli.main import main

FORMATS = ("folder", "archive", "zarr")


def shards_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted((folder / "shards").glob("*/*"))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_go_in_and_come_out(tmp_path: pathlib.Path, format: str) -> None:
    with DatasetWriter(tmp_path / "data", rows_per_shard=4, format=format) as writer:
        writer.extend(rows(0, 3))
        writer.extend(rows(3, 6))
        writer.append(rows(9, 1)[0])
        assert (writer.rows, writer.flushed) == (10, 8)
    data = open_dataset(tmp_path / "data")
    assert len(data) == 10 and [count for _, count in data.shards()] == [4, 4, 2]
    assert_rows(data, list(range(10)))
    assert_rows(data[2:9:3], [2, 5, 8])
    assert_rows(data[[9, 0, 4, 0]], [9, 0, 4, 0])
    assert_rows(data[torch.tensor([-1, 3])], [9, 3])
    assert_rows(data[data["number"] % 5 == 1], [1, 6])
    assert_rows(data[range(8, 4, -2)], [8, 6])
    assert data[7]["name"] == "row 7" and data[7]["step"].note == "none"
    assert data.select("number", ("in", "half"))[3:5].to_tensordict().keys() == {"number", "in"}
    with pytest.raises(IndexError, match="10"):
        data[10]
    assert_rows(pickle.loads(pickle.dumps(data)), list(range(10)))
    assert_rows(load(tmp_path / "data"), list(range(10)))


def test_a_pickle_brings_the_classes_of_rows(tmp_path: pathlib.Path) -> None:
    """A process that was not forked, as a worker of a loader may be, has not imported them."""
    with DatasetWriter(tmp_path / "data", rows_per_shard=4) as writer:
        writer.extend(rows(0, 10))
    data = open_dataset(tmp_path / "data")
    with open(tmp_path / "pickle", "wb") as file:
        pickle.dump([data, data[2:9]], file)
    program = (
        "import pickle, sys; print([type(td[:2]['step']).__name__ for td in pickle.load(open(sys.argv[1], 'rb'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "pickle")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['Step', 'Step']\n", done.stderr


def test_shards_are_opened_when_rows_of_them_are_used(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=1) as writer:
        writer.extend(rows(0, 20))
    opened: list[str] = []
    real = Location.open
    monkeypatch.setattr(
        Location, "open", lambda place, name, *options: opened.append(name) or real(place, name, *options)
    )
    data = open_dataset(tmp_path)
    assert not opened
    data[[3, 17, 3]]
    assert [path[-2:] for path in opened] == ["03", "17"]


def test_rows_that_do_not_fit_change_nothing(tmp_path: pathlib.Path) -> None:
    writer = DatasetWriter(tmp_path, rows_per_shard=4)
    writer.extend(rows(0, 2))
    wrong = [
        (rows(0, 2).set("number", torch.zeros(2, 5, dtype=torch.int64)), r"'number'.*\[\].*int64.*\[5\]"),
        (rows(0, 2).set(("in", "half"), torch.zeros(2)), r"\('in', 'half'\).*float16.*float32"),
        (rows(0, 2).set("tokens", torch.zeros(2, 3, 1, dtype=torch.int64)), "'tokens'.*ragged"),
        (rows(0, 2).exclude("number"), "lacks.*number"),
        (rows(0, 2).set("more", torch.zeros(2)), "more"),
        (rows(0, 2).set("name", torch.zeros(2)), "'name'"),
        (rows(0, 2).set("number", "text"), "'number'"),
        (rows(0, 2).set("step", TensorDict(obs=torch.zeros(2, 3), note="x", batch_size=[2])), "'step'.*Step"),
        (rows(0, 2)[0], "batch size"),
    ]
    for batch, what in wrong:
        with pytest.raises(SchemaError, match=what):
            writer.extend(batch)
    with pytest.raises(UnsupportedEntryError, match=r"'name'.*object"):
        writer.extend(rows(0, 2).set_non_tensor("name", object()))
    assert writer.rows == 2
    writer.close()
    assert_rows(open_dataset(tmp_path), [0, 1])
    # Another writer is held to it, too, though it opens later; and one that began before finds out when it flushes.
    with pytest.raises(SchemaError, match="lacks"):
        DatasetWriter(tmp_path).extend(TensorDict(number=torch.zeros(1, dtype=torch.int64), batch_size=[1]))


def test_first_flush_fixes_the_schema(tmp_path: pathlib.Path) -> None:
    first, second = DatasetWriter(tmp_path), DatasetWriter(tmp_path)
    first.append(TensorDict(x=torch.zeros(3)))
    second.append(TensorDict(x=torch.zeros(4)))
    first.flush()
    with pytest.raises(SchemaError, match=r"'x'.*\[3\].*\[4\]"):
        second.flush()
    with pytest.raises(SchemaError):
        second.close()
    first.close()
    assert len(open_dataset(tmp_path)) == 1
    with pytest.raises(ValueError, match="closed"):
        first.append(TensorDict(x=torch.zeros(3)))


def test_ragged_rows(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path / "told", ragged=["t"]) as writer:
        for n in (3, 0, 2):
            writer.append(TensorDict(t=torch.arange(n * 2).view(n, 2)))
        writer.extend(TensorDict(t=torch.ones(2, 1, 2, dtype=torch.int64), batch_size=[2]))
        with pytest.raises(SchemaError, match="'t'"):
            writer.append(TensorDict(t=torch.zeros(3, 3, dtype=torch.int64)))
    found = open_dataset(tmp_path / "told")[[0, 2, 4]]["t"]
    assert [row.tolist() for row in found.unbind()] == [[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3]], [[1, 1]]]
    with DatasetWriter(tmp_path / "stack", rows_per_shard=2) as writer:
        writer.extend(lazy_stack([TensorDict(t=torch.arange(n)) for n in (2, 3, 1)]))
    assert [row.tolist() for row in open_dataset(tmp_path / "stack")["t"].unbind()] == [[0, 1], [0, 1, 2], [0]]


def test_tensorclasses_as_rows(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=2) as writer:
        writer.extend(Step(obs=torch.arange(3.0), note="a", batch_size=[3]))
    data = open_dataset(tmp_path)
    assert data["obs"].tolist() == [0, 1, 2] and data["note"] == ["a", "a", "a"]
    assert type(data[1]) is Step and data[1].obs == 1


def test_many_writers_and_a_reader_that_follows(tmp_path: pathlib.Path) -> None:
    first = DatasetWriter(tmp_path, rows_per_shard=3)
    first.extend(rows(0, 2))
    with pytest.raises(FileNotFoundError, match="nobody has flushed"):
        open_dataset(tmp_path)
    first.flush()
    data = open_dataset(tmp_path)
    view = data[1:]
    threads = [threading.Thread(target=_write, args=(tmp_path, 100 * n)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.extend(rows(2, 1))
    first.close()
    assert data.refresh() == 29 and data.refresh() == 0
    # The old rows keep their positions, and the new rows follow.
    assert data["number"][:2].tolist() == [0, 1] and view["number"].tolist() == [1]
    everything = [0, 1, 2, *(100 * n + i for n in range(1, 5) for i in range(7))]
    assert sorted(data["number"].tolist()) == everything
    again, once_more = open_dataset(tmp_path), open_dataset(tmp_path)
    assert again["number"].tolist() == once_more["number"].tolist()
    assert data.at(data.segments)["number"].tolist() == data["number"].tolist()


def _write(folder: pathlib.Path, first: int) -> None:
    with DatasetWriter(folder, rows_per_shard=3) as writer:
        writer.extend(rows(first, 7))


@pytest.mark.parametrize("format", FORMATS)
def test_assignment(tmp_path: pathlib.Path, format: str) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=2, format=format) as writer:
        writer.extend(TensorDict(x=torch.arange(5), batch_size=[5]))
    data = open_dataset(tmp_path)
    with pytest.raises(SaveError, match=r"mode='r\+'"):
        data[1:4] = TensorDict(x=torch.zeros(3, dtype=torch.int64), batch_size=[3])
    row = data[0]
    row["x"].fill_(77)
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 4]
    data = open_dataset(tmp_path, mode="r+")
    data[1:4] = TensorDict(x=torch.tensor([7, 8, 9]), batch_size=[3])
    data[-1] = TensorDict(x=torch.tensor(6))
    assert open_dataset(tmp_path)["x"].tolist() == [0, 7, 8, 9, 6]


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_not_assigned(tmp_path: pathlib.Path, format: str) -> None:
    """An archive and a Zarr group would lose them in silence."""
    first, other = ({"x": torch.arange(n, n + 4), "name": [f"{i}" for i in range(n, n + 4)]} for n in (0, 10))
    with DatasetWriter(tmp_path, rows_per_shard=2, format=format) as writer:
        writer.extend(TensorDict(first, [4]))
    data = open_dataset(tmp_path, mode="r+")
    with pytest.raises(SaveError, match=r"'name'.*select"):
        data[1:3] = TensorDict(other, [4])[1:3]
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3]
    data.select("x")[1:3] = TensorDict(other, [4]).select("x")[1:3]
    found = open_dataset(tmp_path)
    assert found["x"].tolist() == [0, 11, 12, 3] and found["name"] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("format", FORMATS)
def test_compaction_while_readers_read(tmp_path: pathlib.Path, format: str) -> None:
    for start in (0, 6):
        with DatasetWriter(tmp_path, rows_per_shard=2, format=format) as writer:
            writer.extend(rows(start, 6))
    early, late = open_dataset(tmp_path), open_dataset(tmp_path)
    assert_rows(early[:3], [0, 1, 2])
    assert compact(tmp_path, rows_per_shard=5) == (6, 3)
    assert len(shards_in(tmp_path)) == 3
    growing = DatasetWriter(tmp_path, rows_per_shard=2, format=format)
    growing.extend(rows(12, 1))
    growing.flush()
    assert compact(tmp_path, rows_per_shard=100) == (4, 1)
    # One has opened shards that are gone, the other none at all.
    for data in (early, late):
        assert_rows(data, list(range(12)))
        assert data.refresh() == 1
    growing.close()
    assert_rows(late[[12, 0]], [12, 0])
    assert [path.suffix for path in shards_in(tmp_path)] == [{"folder": "", "archive": ".tdz", "zarr": ".zarr"}[format]]
    assert tidy(tmp_path, older_than=0) == ([], {}) and verify(tmp_path).ok


@pytest.mark.parametrize("format", FORMATS)
def test_shards_that_are_moved_while_they_are_opened(
    tmp_path: pathlib.Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (0, 4):
        with DatasetWriter(tmp_path, format=format) as writer:
            writer.extend(rows(first, 4))
    data, compacted = open_dataset(tmp_path), []
    real = Location.open

    def opened(place: Any, name: str, *options: Any) -> Any:
        found = real(place, name, *options)
        if not compacted:
            compacted.append(name)
            assert compact(tmp_path) == (2, 1)
        return found

    monkeypatch.setattr(Location, "open", opened)
    assert_rows(data[torch.arange(8)], list(range(8)))
    assert compacted


def test_order_of_epochs() -> None:
    for count in (1, 2, 3, 10, 1000):
        seen = [Order(count, 7, seed).batch(n) for seed in (1,) for n in range(len(Order(count, 7, seed)))]
        assert sorted(x for part in seen for x in part) == list(range(count))
    orders = [Order(1001, 10, 3, rank, 3) for rank in range(3)]
    parts = [[int(x) for n in range(len(order)) for x in order.batch(n)] for order in orders]
    assert sorted(itertools.chain(*parts)) == list(range(1001))
    assert {len(Order(1001, 10, 3, rank, 3, drop_last=True)) for rank in range(3)} == {33}
    first, second = (Order(1000, 1000, seed).batch(0).tolist() for seed in (1, 2))
    assert first != second and first[:10] != sorted(first[:10])
    # About as many pairs rise as fall.
    assert 400 < sum(a < b for a, b in itertools.pairwise(first)) < 600


def test_workers_read_rows_into_shared_memory(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=5) as writer:
        writer.extend(TensorDict({"x": torch.arange(20)}, [20]))
    assert not open_dataset(tmp_path)[torch.arange(3)]["x"].is_shared()
    with scattered.into_shared_memory():
        rows = open_dataset(tmp_path)[torch.tensor([17, 3, 3])]
        assert rows["x"].is_shared()
    assert rows["x"].tolist() == [17, 3, 3]
    assert not open_dataset(tmp_path)[torch.arange(3)]["x"].is_shared()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iteration_goes_on_where_it_was(tmp_path: pathlib.Path, num_workers: int) -> None:
    writer = DatasetWriter(tmp_path, rows_per_shard=3)
    writer.extend(TensorDict(x=torch.arange(30), batch_size=[30]))
    writer.flush()
    loader = DatasetLoader(open_dataset(tmp_path), 4, seed=5, num_workers=num_workers)
    assert len(loader) == 8
    whole = [batch["x"].tolist() for batch in DatasetLoader(open_dataset(tmp_path), 4, seed=5)]
    batches = iter(loader)
    seen = [next(batches)["x"].tolist() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    # The data set grows and is compacted before training goes on, on another number of ranks.
    writer.extend(TensorDict(x=torch.arange(30, 40), batch_size=[10]))
    writer.close()
    compact(tmp_path, rows_per_shard=20)
    for ranks in (1, 2):
        rest: list[list[int]] = []
        for rank in range(ranks):
            again = DatasetLoader(open_dataset(tmp_path), 4, rank=rank, ranks=ranks, num_workers=num_workers)
            again.load_state_dict(state)
            rest += [batch["x"].tolist() for batch in again]
        assert sorted(itertools.chain(*seen, *rest)) == list(range(30))
        if ranks == 1:
            assert [*seen, *rest] == whole
    # The next epoch has all current rows in another order.
    second = [x for batch in again for x in batch["x"].tolist()]
    assert again.epoch == 2 and len(second) == 20
    with pytest.raises(ValueError, match="rows"):
        DatasetLoader(TensorDict(x=torch.zeros(3), batch_size=[3]), 2).load_state_dict({**state, "segments": None})
    with pytest.raises(ValueError, match="epoch"):
        again.load_state_dict({})


def test_torch_loader_and_sampler(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=3) as writer:
        writer.extend(rows(0, 8))
    loader = DataLoader(open_dataset(tmp_path), batch_size=4, num_workers=2, collate_fn=_as_it_is)
    assert_rows(torch.cat([torch.stack(list(part)) if type(part) is list else part for part in loader]), list(range(8)))


def _as_it_is(found: Any) -> Any:
    return found


def test_map_into(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path / "a", rows_per_shard=3) as writer:
        writer.extend(TensorDict(x=torch.arange(10), batch_size=[10]))
    data = open_dataset(tmp_path / "a")
    made = data.map_into(tmp_path / "b", _odd, batch_size=4, num_workers=1, format="archive")
    assert made["y"].tolist() == [1, 9, 25, 49, 81] and list(made.keys()) == ["y"]
    assert (data.apply(lambda leaf: leaf + 1)["x"] == data["x"] + 1).all()


def _odd(batch: Any) -> Any:
    x = batch["x"][batch["x"] % 2 == 1]
    return TensorDict(y=x * x, batch_size=[len(x)]) if len(x) else None


def test_ten_thousand_shards_open_at_once(tmp_path: pathlib.Path) -> None:
    """It reads one file for each writer. The shards need not exist."""
    from tensordict.datasets.lines import Line, new_id
    from tensordict.datasets.manifest import new_manifest
    from tensordict.datasets.schema import Schema
    from tensordict.datasets.writer import fix_schema

    schema = Schema(TensorDict(x=torch.zeros(1, 4), batch_size=[1]))
    fix_schema(Location.of(tmp_path), schema, False)
    writer = new_id()
    manifest = new_manifest(Location.of(tmp_path), writer, schema.json, False)
    for number in range(2000):
        manifest.add(Line(f"shards/{writer}/{number:08}", 7, 28, "0" * 64))
    manifest.close()
    data = open_dataset(tmp_path)
    assert len(data) == 14_000
    with pytest.raises(FileNotFoundError, match="00000003"):
        data[25]


def test_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "data")
    with DatasetWriter(path, rows_per_shard=2) as writer:
        writer.extend(rows(0, 5))
    assert main(["inspect", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "dataset" and report["root"]["batch_size"] == [5]
    assert report["root"]["entries"]["tokens"]["shape"] == [5, -1]
    assert main(["inspect", path]) == 0 and "Step" in capsys.readouterr().out
    assert main(["verify", path]) == 0 and "sound" in capsys.readouterr().out
    assert main(["compact", path]) == 0 and "3 shards, now 1" in capsys.readouterr().out
    assert main(["tidy", path]) == 0 and capsys.readouterr().out == ""
    assert main(["convert", path, f"{path}.tdz"]) == 0
    assert_rows(load(f"{path}.tdz"), list(range(5)))
    assert main(["convert", f"{path}.tdz", f"{path}-2", "--to", "dataset"]) == 0
    assert_rows(open_dataset(f"{path}-2"), list(range(5)))
    assert main(["convert", f"{path}.tdz", path, "--to", "dataset"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_options(tmp_path: pathlib.Path) -> None:
    for wrong in (
        {"format": "pickle"},
        {"rows_per_shard": 0},
        {"format": "archive", "checksum": True},
        {"compression": "deflate"},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}|checksums|compressed"):
            DatasetWriter(tmp_path, **wrong)
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(SaveError, match=r"own\.txt"):
        DatasetWriter(tmp_path)
    with pytest.raises(ValueError, match="mode"):
        open_dataset(tmp_path, mode="w")
    with DatasetWriter(tmp_path / "a", checksum="sha256", durable=True) as writer:
        writer.extend(rows(0, 3))
    report = verify(tmp_path / "a")
    assert report.checksummed == report.leaves and report.format == "dataset"
    with DatasetWriter(tmp_path / "b", format="archive", compression="deflate") as writer:
        writer.extend(rows(0, 3))
    assert_rows(open_dataset(tmp_path / "b"), [0, 1, 2])
    assert Manifests(Location.of(tmp_path / "nothing")).problems == []


def test_diff(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison ignores the division into shards. One side may be a save."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    with DatasetWriter(a, rows_per_shard=4) as one, DatasetWriter(b, rows_per_shard=3, format="archive") as other:
        for number in (0, 5):
            one.extend(rows(number, 5))
        changed = rows(0, 10)
        changed["in", "half"][3] += 2
        changed["name"] = ["row 0", "another", *changed["name"][2:]]
        other.extend(rows(0, 10))
    with DatasetWriter(c) as third:
        third.extend(changed)
    assert diff(a, b) == [] and main(["diff", a, b]) == 0
    assert "the same: 4 tensors" in capsys.readouterr().out
    found = {difference.key: difference for difference in diff(b, c)}
    assert found.keys() == {("in", "half"), ("name",)}
    half = found["in", "half"]
    assert (half.what, half.differing, half.max_abs) == ("elements", 1, 2.0)
    assert found["name",].what == "value" and found["name",].other[1] == "another"
    assert main(["diff", a, c]) == 1 and "1 of 10 differ" in capsys.readouterr().out
    open_dataset(c)[torch.arange(10)].save(f"{c}.tdz")
    assert diff(c, f"{c}.tdz") == []
    with DatasetWriter(b) as other:
        other.extend(rows(10, 1))
    assert {difference.what for difference in diff(a, b)} == {"batch size", "shape", "value"}
    with pytest.raises(FileNotFoundError):
        diff(a, f"{a}-none")


@pytest.mark.parametrize("format", ["folder", "archive"])
def test_checksums_name_the_shard_that_is_damaged(tmp_path: pathlib.Path, format: str) -> None:
    options = {"checksum": "blake2b"} if format == "folder" else {}
    with DatasetWriter(tmp_path, rows_per_shard=2, format=format, **options) as writer:
        writer.extend(rows(0, 6))
    assert verify(tmp_path).checksummed == verify(tmp_path).leaves
    shard = shards_in(tmp_path)[1]
    file = shard / "number.memmap" if format == "folder" else shard
    content = file.read_bytes()
    at = content.index((2).to_bytes(8, "little") + (3).to_bytes(8, "little"))
    file.write_bytes(content[:at] + b"x" + content[at + 1 :])
    report = verify(tmp_path, raises=False)
    assert len(report.problems) == 1 and shard.name in report.problems[0] and "number" in report.problems[0]
    assert "checksum" in report.problems[0]
    assert main(["verify", str(tmp_path)]) == 1


def test_repr_shows_values_of_the_first_shard(tmp_path: pathlib.Path) -> None:
    labels = NonTensorStack(*("cat", "dog", "cat", "bird"))
    rows = TensorDict({"x": torch.arange(4), "label": labels, "n": {"task": "walk"}}, [4])
    with DatasetWriter(tmp_path / "data") as writer:
        writer.extend(rows)
    text = repr(open_dataset(tmp_path / "data"))
    assert "label: Values('cat': 2, 'dog': 1, 'bird': 1)," in text and "task: Values('walk')}" in text
    with DatasetWriter(tmp_path / "data") as writer:
        writer.extend(rows)
    data = open_dataset(tmp_path / "data")
    assert "label: Values('cat': 2, 'dog': 1, 'bird': 1, in the first 4 of 8 rows)" in repr(data)
    assert len(data._shards._recent) == 1
    assert "label: Values('cat': 1, 'dog': 1)" in repr(data[:2]) and repr(data[:0])
    shutil.rmtree(tmp_path / "data" / data._shards.parts[0].path)
    assert "label: Values(they cannot be read: " in repr(open_dataset(tmp_path / "data"))


def test_loader_mixes_the_rows_of_some_shards(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path / "data", rows_per_shard=5) as writer:
        writer.extend(TensorDict(x=torch.arange(33), batch_size=[33]))
    data = open_dataset(tmp_path / "data")
    loader = DatasetLoader(data, 4, shuffle=2, seed=3)
    first, second = (torch.cat([batch["x"] for batch in loader]).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(33)) and first != second
    # The rows of two shards come before those of others, mixed.
    ends = [0]
    while ends[-1] < 33:
        shards = {row // 5 for row in first[ends[-1] : ends[-1] + 10]}
        ends.append(ends[-1] + sum(min(5, 33 - 5 * shard) for shard in sorted(shards)[:2]))
        assert {row // 5 for row in first[ends[-2] : ends[-1]]} <= shards
    assert len(ends) == 5 and first[: ends[1]] != sorted(first[: ends[1]])
    assert [row // 5 for row in first] != sorted(row // 5 for row in first)
    # Two ranks share the order.
    ranks = [DatasetLoader(data, 4, shuffle=2, seed=3, rank=rank, ranks=2) for rank in range(2)]
    assert sorted(row for loader in ranks for batch in loader for row in batch["x"].tolist()) == list(range(33))
    # A loader goes on in the same order after the shards were merged.
    half = DatasetLoader(data, 4, shuffle=2, seed=3)
    batches = iter(half)
    seen = [row for _ in range(3) for row in next(batches)["x"].tolist()]
    state = json.loads(json.dumps(half.state_dict()))
    batches.close()  # type: ignore[attr-defined]
    assert state["shards"] == [[5, 6], [3, 1]]
    compact(tmp_path / "data", rows_per_shard=100)
    again = DatasetLoader(open_dataset(tmp_path / "data"), 4)
    again.load_state_dict(state)
    assert seen + [row for batch in again for row in batch["x"].tolist()] == first
    with pytest.raises(ValueError, match="33 rows, and shards with 30"):
        again.load_state_dict({**state, "shards": [[5, 6]]})
    # Older loaders took a number for a bool.
    old = DatasetLoader(TensorDict(x=torch.arange(33), batch_size=[33]), 4, shuffle=False)
    old.load_state_dict({**{key: state[key] for key in state if key != "shards"}, "segments": None, "shuffle": 1})
    assert old.shuffle is True and [sum(len(batch) for batch in old) for _ in range(2)] == [21, 33]
    for odd in (0, -2, 2.5, "yes", None):
        for make in (
            lambda odd: DatasetLoader(data, 4, shuffle=odd),
            lambda odd: again.load_state_dict({**state, "shuffle": odd}),
        ):
            with pytest.raises(ValueError, match=f"shuffle is True, False, or the number .*got {odd!r}"):
                make(odd)
    assert DatasetLoader(data, 4, shuffle=np.int64(2)).state_dict()["shuffle"] == 2
    assert DatasetLoader(data, 4, shuffle=np.bool_(True)).state_dict()["shuffle"] is True
    with pytest.raises(ValueError, match="a TensorDict has none: pass shuffle=True"):
        DatasetLoader(data[:].to_tensordict(), 4, shuffle=3)
