"""`append_memmap`: what grows, what is refused, and what a failure leaves (test_transaction.py kills it)."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import pytest
import torch

import tensordict
from reference import Reference
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    append_memmap,
    load_memmap,
    verify,
)
from tensordict.memory import files


class Point(TensorClass):
    x: torch.Tensor
    name: str
    other: torch.Tensor | None = None


def rows(count: int, first: int = 0) -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(first, first + count),
            "n": TensorDict({"b": torch.full((count, 2), float(first)), "c": {}}, [count]),
            "one": NonTensorData({"k": (1, 2)}, batch_size=[count]),
            "each": NonTensorStack(*[f"row {first + row}" for row in range(count)]),
            "p": Point(x=torch.ones(count, 2), name="p", batch_size=[count]),
            "half": torch.ones(count, dtype=torch.bfloat16),
        },
        [count],
        names=["time"],
    )


def test_every_kind_of_entry(tmp_path: pathlib.Path) -> None:
    mapped = rows(3).memmap(tmp_path / "saved", checksum="sha256")
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    inode = os.stat(mapped["a"].filename).st_ino
    append_memmap(tmp_path / "saved", rows(2, 3))
    append_memmap(tmp_path / "saved", rows(0, 5))
    found = load_memmap(tmp_path / "saved")
    assert found.batch_size == (5,) and found.names == ["time"]
    assert found["a"].tolist() == [0, 1, 2, 3, 4] and found["n", "b"][:, 0].tolist() == [0, 0, 0, 3, 3]
    assert found["one"] == {"k": (1, 2)} and found["each"] == [f"row {row}" for row in range(5)]
    assert type(found["p"]) is Point and found["p"].batch_size == (5,) and found["p"].name == "p"
    assert found["p"].other is None and found["half"].dtype is torch.bfloat16 and found["n", "c"].batch_size == (5,)
    # Who has mapped the save keeps its rows, and shares them.
    assert os.stat(found["a"].filename).st_ino == inode and mapped.batch_size == (3,)
    mapped["a"][1] = 7
    assert found["a"].tolist() == [0, 7, 2, 3, 4]
    found["a"][1] = 1
    assert (tmp_path / "saved" / "notes.txt").read_text() == "mine" and os.listdir(tmp_path) == ["saved"]
    report = verify(tmp_path / "saved")
    assert report.ok and report.checksummed == report.leaves


def test_a_save_without_rows_and_without_files(tmp_path: pathlib.Path) -> None:
    rows(0).memmap(tmp_path / "saved")
    (tmp_path / "saved" / "a.memmap").unlink()  # the reference writes none
    append_memmap(tmp_path / "saved", rows(2))
    assert load_memmap(tmp_path / "saved")["a"].tolist() == [0, 1]


def test_plain_names_of_older_saves(tmp_path: pathlib.Path) -> None:
    TensorDict({"a b": torch.zeros(2), "c d": {"x": torch.zeros(2)}}, [2]).memmap(tmp_path / "s", robust_key=False)
    append_memmap(tmp_path / "s", TensorDict({"a b": torch.ones(1), "c d": {"x": torch.ones(1)}}, [1]))
    found = load_memmap(tmp_path / "s")
    assert found["a b"].tolist() == found["c d", "x"].tolist() == [0, 0, 1]


def test_rows_of_the_save_itself(tmp_path: pathlib.Path) -> None:
    append_memmap(tmp_path / "s", rows(3).memmap(tmp_path / "s")[1:])
    assert load_memmap(tmp_path / "s")["a"].tolist() == [0, 1, 2, 1, 2]


def test_a_backup_of_hard_links_is_not_touched(tmp_path: pathlib.Path) -> None:
    rows(3).memmap(tmp_path / "s")
    (tmp_path / "backup").mkdir()
    os.link(tmp_path / "s" / "a.memmap", tmp_path / "backup" / "a.memmap")
    os.symlink(tmp_path / "s" / "a.memmap", tmp_path / "s" / "link")
    append_memmap(tmp_path / "s", rows(2, 3))
    assert (tmp_path / "backup" / "a.memmap").stat().st_size == 24
    assert load_memmap(tmp_path / "s")["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_leaf_that_is_a_link_becomes_a_file(tmp_path: pathlib.Path) -> None:
    TensorDict(a=torch.zeros(2), b=torch.zeros(2), batch_size=[2]).memmap(tmp_path / "s")
    (tmp_path / "s" / "a.memmap").unlink()
    (tmp_path / "s" / "a.memmap").symlink_to("b.memmap")
    append_memmap(tmp_path / "s", TensorDict(a=torch.ones(1), b=torch.full((1,), 2.0), batch_size=[1]))
    found = load_memmap(tmp_path / "s")
    assert found["a"].tolist() == [0, 0, 1] and found["b"].tolist() == [0, 0, 2]


def state(root: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


MISFITS: dict[str, tuple[Any, str]] = {
    "an entry too few": (rows(2).exclude("a"), "lack the entries \\['a'\\]"),
    "an entry too many": (rows(2).set("z", torch.zeros(2)), "\\['z'\\], which the save lacks"),
    "another dtype": (rows(2).set("a", torch.zeros(2)), "'a': rows of torch.float32"),
    "another shape": (rows(2).set("a", torch.zeros(2, 3, dtype=torch.int64)), "'a': .* shape \\[3\\]"),
    "no rows": (rows(2)[0], "batch size \\[\\]"),
    "other batch dims": (TensorDict(batch_size=[2, 3]), "batch size \\[2, 3\\]"),
    "another value": (rows(2).set("one", "text"), "'one': the rows have another value"),
    "a tensor for a node": (rows(2).set("n", torch.zeros(2)), "'n': the save or the rows have a tensor"),
    "another class": (rows(2).set("p", TensorDict(x=torch.ones(2, 2), name="p", batch_size=[2])), "'p': .* Point"),
    "the meta device": (rows(2).to("meta"), "meta device"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_change_nothing(name: str, tmp_path: pathlib.Path) -> None:
    more, message = MISFITS[name]
    rows(3).memmap(tmp_path / "s")
    before = state(tmp_path)
    with pytest.raises(ValueError, match=message):
        append_memmap(tmp_path / "s", more)
    assert state(tmp_path) == before


RAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (LazyStackedTensorDict(TensorDict(x=torch.ones(2)), TensorDict(x=torch.ones(3))), "LazyStackedTensorDict"),
        (
            TensorDict(
                x=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), batch_size=[2]
            ),
            "'x' is ragged",
        ),
        (TensorDict(x=torch.ones(2)), "no batch dims"),
    ],
)
def test_what_cannot_grow(saved: Any, message: str, tmp_path: pathlib.Path) -> None:
    saved.memmap(tmp_path / "s")
    before = state(tmp_path)
    with pytest.raises(ValueError, match=message):
        append_memmap(tmp_path / "s", saved)
    assert state(tmp_path) == before


def test_unbatched_tensors_stay(tmp_path: pathlib.Path) -> None:
    saved = TensorDict(a=torch.zeros(2), u=UnbatchedTensor(torch.arange(3)), batch_size=[2])
    saved.memmap(tmp_path / "s")
    append_memmap(tmp_path / "s", saved[:1])
    assert load_memmap(tmp_path / "s")["u"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="UnbatchedTensor"):
        append_memmap(tmp_path / "s", saved.clone().set("u", UnbatchedTensor(torch.zeros(3, dtype=torch.int64))))


def test_what_is_no_folder_with_a_save(tmp_path: pathlib.Path) -> None:
    rows(2).memmap(tmp_path / "s.tdz")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "s.tdz", tmp_path / "empty", tmp_path / "missing", "memory://there/s"):
        with pytest.raises(ValueError, match="no save in a folder"):
            append_memmap(path, rows(2))


def test_pickled_values(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.zeros(2), v=NonTensorData({1, 2}, batch_size=[2]), batch_size=[2])
    td.memmap(tmp_path / "s", allow_pickle=True)
    with pytest.raises(ValueError, match="pickle"):
        append_memmap(tmp_path / "s", td)
    append_memmap(tmp_path / "s", td, allow_pickle=True)
    assert load_memmap(tmp_path / "s", allow_pickle=True)["v"] == {1, 2}


@pytest.mark.parametrize("failing", ["write_tensor", "sync_folder"])
def test_a_full_disk_leaves_every_file_as_it_was(
    failing: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = rows(3).memmap(tmp_path / "s")
    before, real, calls = state(tmp_path), getattr(files, failing), 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(files, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        append_memmap(tmp_path / "s", rows(2, 3), durable=True)
    monkeypatch.undo()
    assert state(tmp_path) == before and saved["a"].tolist() == [0, 1, 2]
    append_memmap(tmp_path / "s", rows(2, 3), durable=True)
    assert load_memmap(tmp_path / "s")["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_file_system_without_hard_links(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(3).memmap(tmp_path / "s")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    append_memmap(tmp_path / "s", rows(2, 3))
    assert load_memmap(tmp_path / "s")["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.reference
def test_a_folder_of_the_reference(reference: Reference, tmp_path: pathlib.Path) -> None:
    reference.run(
        "import torch\n"
        "from tensordict import TensorDict, NonTensorData\n"
        "TensorDict({'a': torch.zeros(3), 'n': TensorDict({'b': torch.ones(3, 2)}, [3]), 's': NonTensorData('q', "
        f"batch_size=[3])}}, [3]).memmap({str(tmp_path / 's')!r})"
    )
    more = TensorDict({"a": torch.ones(2), "n": TensorDict({"b": torch.zeros(2, 2)}, [2]), "s": "q"}, [2])
    tensordict.append_memmap(tmp_path / "s", more)
    found = load_memmap(tmp_path / "s")
    assert found["a"].tolist() == [0, 0, 0, 1, 1] and found["n"].batch_size == (5,) and found["s"] == "q"
    reference.run(
        "from tensordict import TensorDict\n"
        f"td = TensorDict.load_memmap({str(tmp_path / 's')!r})\n"
        "assert td.batch_size == (5,) and td['n', 'b'].sum() == 6 and td['s'] == 'q', td"
    )
