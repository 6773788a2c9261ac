"""Views of rows of a file, `data[index]`: they read when they are used, and write to the file."""

from __future__ import annotations

import pathlib
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from reference import Reference
from tensordict import PersistentTensorDict, TensorClass, TensorDict, lazy_stack
from tensordict.core.exceptions import LockedError, SaveError, ShapeError, UnsupportedEntryError

KINDS = ["h5", pytest.param("zarr", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="zarr needs 3.11"))]
INDICES: list[Any] = [
    0, -1, slice(1, 3), slice(None, None, 2), slice(2, 2), [3, 0], [], [True, False, True, False], range(1, 3),
    torch.tensor([1, -1]), torch.tensor([False, True, True, False]), torch.tensor(2), np.array([2, 0]), (), None,
    (slice(None),), (1,), (None, [0, 2]), torch.tensor([[0, 1], [2, 3]]),
]  # fmt: skip


def made(kind: str, folder: pathlib.Path, batch_size: tuple[int, ...] = (4,)) -> Any:
    shape = (*batch_size, 2)
    content = {
        "o": torch.arange(float(torch.Size(shape).numel())).view(shape),
        "i": torch.arange(torch.Size(batch_size).numel()).view(batch_size),
        "n": {"x": torch.zeros(*batch_size, 3)},
    }
    return getattr(TensorDict(content, batch_size), f"to_{kind}")(folder / f"data.{kind}")


@pytest.fixture(params=KINDS)
def data(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Any]:
    with made(request.param, tmp_path) as data:
        yield data


# The same lines here and on the reference, which has the folder to write to and prints what is in the file at last.
LINES = {
    "a loader": """
for batch in DataLoader(data, batch_size=2, collate_fn=lambda batch: batch):
    batch["o"] = torch.ones(2, 2)
""",
    "every index": """
mask = torch.arange(4) == 1
for index in (0, -1, slice(0, 2), [0, 1], torch.tensor([2, 3]), mask, range(3), (1,), slice(None, None, 2)):
    rows = data[index]
    rows["o"] = rows["o"] + 1
    rows["i"] = rows["i"].float() + 1.7
""",
    "new entries": """
rows = data[1:3]
rows["new"] = torch.ones(2, 5)
rows["n", "y"] = torch.ones(2)
rows["n"]["z"] = torch.ones(2, 1)
""",
    "nested": """
rows = data[:3]
rows["n"]["x"] = torch.ones(3, 3)
rows["n", "x"] = torch.ones(3, 1) * 2
rows[0]["o"] = torch.ones(2) * 5
rows[1] = TensorDict({"o": torch.ones(2) * 6}, [])
rows["n"] = {"x": torch.ones(3, 3) * 3}
rows.update({"o": torch.ones(3, 2) * 7})
rows.update_({"i": torch.ones(3, dtype=torch.int64) * 8})
rows.set_("o", torch.ones(3, 2) * 10)
""",
    "overwriting": """
data["i"] = torch.ones(4) * 1.7
data["o"] = torch.ones(4, 2, dtype=torch.int64)
data["n", "x"] = torch.ones(4, 1)
for write in (lambda: data.__setitem__("o", torch.ones(4, 3)), lambda: data[:2].__setitem__("o", torch.ones(2, 3))):
    try:
        write()
    except Exception:
        print("refused")
data.set("o", torch.ones(4, 3), overwrite=True)
""",
    "another device": """
there = data.to("cpu")
print(type(there).__name__, there.device)
there["new"] = torch.ones(4)
data[:2].to_tensordict()["o"] += 100
data[:2].clone()["o"] += 100
data[:2].to("cpu")["o"] += 100
""",
}
PROGRAM = """
import sys, torch
from torch.utils.data import DataLoader
from tensordict import PersistentTensorDict, TensorDict
content = {"o": torch.arange(8.).view(4, 2), "i": torch.arange(4), "n": {"x": torch.zeros(4, 3)}}
data = PersistentTensorDict.from_dict(TensorDict(content, [4]), sys.argv[1])
LINES
for key in sorted(data.keys(True, True), key=str):
    print(key, data[key].dtype, data[key].tolist())
data.close()
"""


@pytest.mark.parametrize("lines", list(LINES.values()), ids=list(LINES))
def test_lines_on_the_reference(
    lines: str, behaviour: Reference, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    program = PROGRAM.replace("LINES", lines)
    expected = behaviour.run(program, tmp_path / "theirs.h5")
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "ours.h5")])
    exec(program, {"__name__": "program"})
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_reads_and_writes(data: Any, index: Any) -> None:
    plain = data.to_tensordict()
    rows = data[index]
    assert rows.batch_size == plain[index].batch_size
    assert (rows == plain[index]).all() and (rows.clone() == plain[index]).all()
    for key in ("o", ("n", "x")):
        assert torch.equal(rows[key], plain[index][key])
        rows[key] = torch.full(rows[key].shape, 7.0)
        plain[key][index] = 7.0
    rows.mul_(2)
    plain[index] = plain[index] * 2
    assert (data == plain).all()


@pytest.mark.parametrize("first", [slice(1, 4), [3, 0, 3], 0, (slice(None), 1), torch.arange(4) > 1, None], ids=str)
@pytest.mark.parametrize("second", [0, slice(1, None), [-1, 0], None, slice(0, 0), (..., 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_views_of_views(kind: str, tmp_path: pathlib.Path, first: Any, second: Any) -> None:
    with made(kind, tmp_path, (4, 5)) as data:
        plain = data.to_tensordict()
        rows, expected = data[first][second], plain[first][second]
        assert rows.batch_size == expected.batch_size and (rows == expected).all()
        position = torch.arange(20).view(4, 5)[first][second]
        rows["o"] = torch.full((*rows.batch_size, 2), 99.0)
        plain["o"].view(20, 2)[position] = 99.0
        assert torch.equal(data["o"], plain["o"])


def test_the_last_of_equal_rows_is_written(data: Any) -> None:
    rows = data[torch.arange(4000) % 4]
    rows["o"] = torch.arange(8000.0).view(4000, 2)
    assert torch.equal(data["o"], torch.arange(7992.0, 8000.0).view(4, 2))


def test_an_index_is_kept_as_it_was(data: Any) -> None:
    index = torch.tensor([0, 1])
    rows = data[index]
    index.fill_(3)
    assert torch.equal(rows["i"], torch.tensor([0, 1]))


def test_what_fails_changes_nothing(data: Any) -> None:
    before = data.to_tensordict()
    rows = data[[0, 2]]
    for error, match, write in (
        (ShapeError, r"'o'.*\[2, 5\]", lambda: rows.set("o", torch.ones(2, 5))),
        (ShapeError, r"'o'.*\[2, 5\]", lambda: rows.update({"i": torch.zeros(2), "o": torch.ones(2, 5)})),
        (RuntimeError, r"'i'.*batch size", lambda: rows.set("i", torch.ones(3))),
        (TypeError, "'n'", lambda: rows.set("n", torch.ones(2))),
        (TypeError, "'o'", lambda: rows.set("o", {"x": torch.ones(2)})),
        (UnsupportedEntryError, "deleted", lambda: rows.pop("o")),
        (UnsupportedEntryError, "renamed", lambda: rows.rename_key_("o", "new")),
        (UnsupportedEntryError, "to_tensordict", lambda: rows.flatten_keys(inplace=True)),
        (KeyError, "absent", lambda: rows.del_("absent")),
        (ShapeError, "batch size", lambda: setattr(rows, "batch_size", [])),
        (IndexError, "bounds", lambda: rows[2]),
        (IndexError, "bounds", lambda: data[[0, 4]]),
    ):
        with pytest.raises(error, match=match):
            write()
    assert (data == before).all() and set(data.keys(True)) == set(before.keys(True))
    data.lock_()
    with pytest.raises(LockedError, match="new"):
        rows["new"] = torch.ones(2)
    rows.zero_()
    assert data["o"].sum() == before["o"][[1, 3]].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_open_for_reading(kind: str, tmp_path: pathlib.Path) -> None:
    made(kind, tmp_path).close()
    with getattr(TensorDict, f"from_{kind}")(tmp_path / f"data.{kind}") as data:
        for rows in (data[:2], data[[0, 1]], data.select("o")[:2], data[:3][[0, 1]]):
            for write in (
                lambda rows=rows: rows.set("o", torch.ones(2, 2)),
                lambda rows=rows: rows.set_("o", torch.ones(2, 2)),
                lambda rows=rows: rows.zero_(),
            ):
                with pytest.raises(SaveError, match="reading only"):
                    write()
        with pytest.raises(SaveError, match="reading only"):
            data[:2]["new"] = torch.ones(2)


def test_operations_give_containers_in_memory(data: Any) -> None:
    rows, plain = data[[3, 1]], data.to_tensordict()[[3, 1]]
    stacked = torch.stack([data[i] for i in (3, 1)])
    joined, unpickled = torch.cat([data[3:], data[1:2]]), pickle.loads(pickle.dumps(rows))
    shaped = rows.view(2, 1).squeeze(1)
    for made in (rows + 0, rows.clone(), rows.to("cpu"), rows.contiguous(), shaped, stacked, joined, unpickled):
        assert type(made) is TensorDict and (made == plain).all()
        made.zero_()
    assert (rows == plain).all()
    lazily = lazy_stack([data[3], data[1]])
    assert torch.equal(lazily["o"], plain["o"])
    lazily[0]["o"] = torch.zeros(2)
    assert not data["o"][3].any()


def test_a_copy_shares_rows_and_adds_in_memory(data: Any) -> None:
    for part in (data.select("o")[1:3], data[1:3].select("o"), data[1:3].copy()):
        part.set_("o", part["o"] + 1)
    assert torch.equal(data["o"][1], torch.tensor([5.0, 6.0]))
    copied = data[1:3].copy()
    copied["new"] = torch.ones(2)
    assert "new" in copied and "new" not in data
    copied[[0]]["new"] = torch.zeros(1)
    assert copied["new"].tolist() == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_names_values_and_tensorclasses(kind: str, tmp_path: pathlib.Path) -> None:
    class Frame(TensorClass):
        pixels: torch.Tensor
        text: Any = None

    frames = Frame(torch.zeros(3, 2), ["a", "b", "c"], batch_size=[3])
    frames.names = ["time"]
    data: Any = getattr(frames, f"to_{kind}")(tmp_path / f"frames.{kind}")
    rows = data[[2, 0]]
    assert type(rows) is Frame and rows.names == ["time"] and data[0].names == [] and list(rows.text) == ["c", "a"]
    rows.pixels = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    rows.text = ["z", "x"]
    assert data.pixels[:, 0].tolist() == [2, 0, 1] and list(data.text) == ["x", "b", "z"]
    with pytest.raises(ShapeError, match="overwrite"):
        data.set("pixels", torch.zeros(3, 4))
    assert data.set("pixels", torch.zeros(3, 4), overwrite=True).pixels.shape == (3, 4)
    rows.close()
    with pytest.raises(SaveError, match="closed"):
        data.pixels  # noqa: B018


def test_closing_a_view_closes_the_file(data: Any) -> None:
    rows = data[:2]
    for part in (rows.select("o"), data.select("o")):
        part.close()
    assert "closed" in repr(rows) and "closed" in repr(data)
    with pytest.raises(SaveError, match="closed"):
        rows["o"]


def test_to_a_device_keeps_the_file(data: Any) -> None:
    moved = data.lock_().to("cpu")
    assert type(moved) is PersistentTensorDict and moved.is_locked and moved.device == torch.device("cpu")
    assert moved["n"].device == torch.device("cpu") and moved["n"].names == data["n"].names
    moved.unlock_()["n", "new"] = torch.ones(4)
    moved[:2]["o"] = torch.zeros(2, 2)
    assert data["n", "new"].all() and not data["o"][:2].any()
    assert type(data.to(torch.float64)) is TensorDict and type(data.to("cpu", torch.float64)) is TensorDict
    moved.close()
    assert "closed" in repr(data)


def test_workers_send_what_they_read_and_get_views(tmp_path: pathlib.Path) -> None:
    made("h5", tmp_path).close()
    with TensorDict.from_h5(tmp_path / "data.h5") as data:
        rows = data[[3, 2, 1, 0]]
        loader = DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context="spawn")
        batches = list(loader)
    assert [type(batch) for batch in batches] == [TensorDict] * 2
    assert torch.cat(batches)["i"].tolist() == [3, 2, 1, 0]
