"""Ragged lazy stacks on disk: one tensor of elements and one of shapes for each key, however many members there are."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference import Reference
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    MetaData,
    NonTensorData,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    from_consolidated,
    from_safetensors,
    lazy_stack,
    load_memmap,
    verify,
)
from tensordict.core.exceptions import SaveError
from tensordict.io.formats import stack_columns
from tensordict_cli.runners import main

ROOT = pathlib.Path(__file__).parents[2]
LENGTHS = (1, 3, 2, 5)


class Item(TensorClass):
    x: torch.Tensor
    label: str = "none"
    extra: torch.Tensor | None = None


def rows(make: Callable[[int], Any], lengths: tuple[int, ...] = LENGTHS, dim: int = 0) -> Any:
    return lazy_stack([make(length) for length in lengths], dim)


def row(n: int) -> TensorDict:
    return TensorDict({"t": torch.arange(n), "n": {"x": torch.rand(n, 2), "w": torch.rand(3)}, "id": torch.tensor(n)})


STACKS: dict[str, Callable[[], Any]] = {
    "nested": lambda: rows(row),
    "dim 1": lambda: rows(lambda n: TensorDict({"a": torch.rand(2, n), "b": torch.ones(2)}, [2]), dim=1),
    "names": lambda: LazyStackedTensorDict(
        *[TensorDict({"a": torch.rand(2, n)}, [2], names=["t"]) for n in LENGTHS], stack_dim_name="row"
    ),
    "batch sizes": lambda: rows(lambda n: TensorDict({"a": torch.rand(n, 4), "b": {"c": torch.rand(n)}}, [n])),
    "longer batch sizes below": lambda: rows(
        lambda n: TensorDict({"n": TensorDict({"z": torch.rand(2, n)}, [2, n], names=["p", "q"])}, [2])
    ),
    "an empty row": lambda: rows(lambda n: TensorDict(a=torch.rand(n)), (0, 3, 2, 0)),
    "no elements": lambda: rows(lambda n: TensorDict(a=torch.rand(0, n))),
    "two ragged dims": lambda: rows(lambda n: TensorDict(a=torch.rand(n, 6 - n))),
    "dtypes": lambda: rows(lambda n: TensorDict(a=torch.rand(n).bfloat16(), b=torch.ones(n) > 0, c=torch.rand(n) * 1j)),
    "float8": lambda: rows(lambda n: TensorDict(a=torch.rand(n).to(torch.float8_e4m3fn))),
    "strides": lambda: rows(lambda n: TensorDict(a=torch.rand(3, n).t(), b=torch.rand(2, 3).t())),
    "values": lambda: rows(lambda n: TensorDict(a=torch.rand(n), s=f"v{n}", t=("x", n), m=MetaData([n]))),
    "tensorclasses": lambda: rows(lambda n: Item(torch.rand(n), f"q{n}")),
    "tensorclasses below": lambda: rows(
        lambda n: TensorDict(c=Item(torch.rand(n), extra=torch.rand(n), batch_size=[n]), batch_size=[n])
    ),
    "an empty container": lambda: rows(lambda n: TensorDict(a=torch.rand(n), e={})),
    "names of the format": lambda: rows(
        lambda n: TensorDict({"_stack": torch.rand(n), "shape": torch.rand(2), "_names": {"_stack": torch.rand(n)}})
    ),
    "inside": lambda: TensorDict({"l": rows(row), "q": torch.ones(4)}, [4]),
    # Entries without one column for each key are stored member by member.
    "different keys": lambda: rows(lambda n: TensorDict({f"k{n}": torch.rand(n), "a": torch.rand(n)})),
    "numbers of dims": lambda: rows(lambda n: TensorDict(a=torch.rand(n, *[1] * (n % 2)))),
    "different dtypes": lambda: rows(lambda n: TensorDict(a=torch.rand(n).half() if n == 3 else torch.rand(n))),
    "unbatched": lambda: rows(lambda n: TensorDict(a=torch.rand(n), u=UnbatchedTensor(torch.ones(5)))),
    "stacks of stacks": lambda: lazy_stack([rows(row), rows(row)]),
}


def check_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype is other.dtype
        flat = [value.detach().as_subclass(torch.Tensor).reshape(-1) for value in (one, other)]
        assert torch.equal(*[value.view(torch.uint8) for value in flat])
        return
    assert (one.batch_size, one.names) == (other.batch_size, other.names)
    one, other = one._wrapped_container(), other._wrapped_container()
    if isinstance(one, LazyStackedTensorDict):
        assert one.stack_dim == other.stack_dim and len(one.tensordicts) == len(other.tensordicts)
        for mine, theirs in zip(one.tensordicts, other.tensordicts, strict=True):
            check_same(mine, theirs)
    elif one._is_non_tensor:
        assert one.tolist() == other.tolist()
    else:
        assert list(one._entries) == list(other._entries)
        for name, value in one._entries.items():
            found = other._entries[name]
            check_same(value, found.as_subclass(torch.Tensor) if type(value) is torch.Tensor else found)


WAYS: dict[str, Callable[[Any, pathlib.Path], list[Any]]] = {
    "folder": lambda stack, path: [stack.memmap(path), load_memmap(path)],
    "archive": lambda stack, path: [stack.save(path.with_suffix(".tdz")), load_memmap(path.with_suffix(".tdz"))],
    "compressed": lambda stack, path: [stack.memmap(path, archive=True, compression="deflate"), load_memmap(path)],
    "consolidated file": lambda stack, path: [stack.consolidate(path), from_consolidated(path)],
    "consolidated": lambda stack, path: [stack.consolidate()],
    "safetensors": lambda stack, path: [stack.to_safetensors(path), from_safetensors(path)][1:],
    "anonymous": lambda stack, path: [stack.memmap()],
    "in place": lambda stack, path: [(copy := stack.clone()).memmap_(path), copy, load_memmap(path)],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", STACKS.values(), ids=STACKS)
def test_comes_back(make: Callable[[], Any], way: Callable[[Any, pathlib.Path], list[Any]], tmp_path: Any) -> None:
    stack = make()
    for found in way(stack, tmp_path / "x"):
        check_same(stack, found)
    for save in tmp_path.iterdir():
        assert verify(save).ok
        assert main(["inspect", str(save)]) == 0


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_as_many_files_and_hardly_more_bytes_than_data(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    few, many = rows(row, (5, 9, 7, 8)), rows(row, tuple(torch.randint(10, 90, (500,)).tolist()))
    for name, stack in (("few", few), ("many", many)):
        stack.memmap(tmp_path / name)
    assert len(files_in(tmp_path / "few")) == len(files_in(tmp_path / "many")) == 8
    data = sum(leaf.nbytes for member in many.tensordicts for leaf in member.values(True, True))
    assert sum(path.stat().st_size for path in files_in(tmp_path / "many")) <= 1.1 * data
    many.consolidate(tmp_path / "x")
    assert os.path.getsize(tmp_path / "x") <= 1.1 * data


def test_rows_are_mapped(tmp_path: pathlib.Path) -> None:
    rows(row).memmap(tmp_path / "x")
    one, other = load_memmap(tmp_path / "x"), load_memmap(tmp_path / "x")
    assert isinstance(one[1]["t"], MemoryMappedTensor)
    one[1]["n", "x"].fill_(7)
    assert (other[1]["n", "x"] == 7).all() and not (other[2]["n", "x"] == 7).any()
    one[2].set_("id", torch.tensor(-1))
    assert load_memmap(tmp_path / "x")["id"].tolist() == [1, 3, -1, 5]
    storages = {one[i]["t"].untyped_storage().data_ptr() for i in range(4)}
    assert len(storages) == 1


def test_rows_of_archives_and_consolidated_files_are_views(tmp_path: pathlib.Path) -> None:
    rows(row).save(tmp_path / "x.tdz")
    rows(row).consolidate(tmp_path / "x")
    for stack in (load_memmap(tmp_path / "x.tdz"), from_consolidated(tmp_path / "x")):
        assert len({stack[i]["n", "x"].untyped_storage().data_ptr() for i in range(4)}) == 1


def test_nothing_is_put_together_in_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written in pieces of at most 16 MiB, whatever all of them take."""
    largest = 0
    joined = stack_columns._JoinedArray.read

    def watched(self: Any, selection: Any, dtype: Any) -> Any:
        nonlocal largest
        array = joined(self, selection, dtype)
        largest = max(largest, array.nbytes)
        return array

    monkeypatch.setattr(stack_columns._JoinedArray, "read", watched)
    stack = rows(lambda n: TensorDict(a=torch.zeros(n << 20)), (4, 3, 2, 5))
    stack.memmap(tmp_path / "x")
    assert 0 < largest <= 16 << 20
    assert load_memmap(tmp_path / "x")[3]["a"].shape == (5 << 20,)


def test_few_members_and_older_saves(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = rows(row, (1, 3, 2))
    few.memmap(tmp_path / "few")
    assert (tmp_path / "few" / "2" / "meta.json").exists()
    monkeypatch.setattr(stack_columns, "MIN_MEMBERS", 1 << 30)
    stack = rows(row)
    stack.memmap(tmp_path / "old")
    assert (tmp_path / "old" / "3" / "t.memmap").exists()
    check_same(stack, load_memmap(tmp_path / "old"))


def test_inspect_shows_a_line_for_each_key(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(row, tuple(range(1, 40))).memmap(tmp_path / "x")
    assert main(["inspect", str(tmp_path / "x")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 1 + 3 + 2
    assert any("t " in line and "int64, ragged" in line and "[39, *]" in line for line in lines)
    assert any("x " in line and "[39, *, 2]" in line for line in lines)


def test_diff_of_formats(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = rows(row)
    stack.memmap(tmp_path / "x", checksum=True)
    stack.consolidate(tmp_path / "y")
    assert main(["diff", str(tmp_path / "x"), str(tmp_path / "y")]) == 0
    load_memmap(tmp_path / "x")[1]["t"].fill_(9)
    assert main(["diff", str(tmp_path / "x"), str(tmp_path / "y")]) == 1
    assert "3 of 11 differ" in capsys.readouterr().out
    assert not verify(tmp_path / "x", raises=False).ok


def test_parts_of_a_save(tmp_path: pathlib.Path) -> None:
    stack = STACKS["batch sizes"]()
    stack.memmap(tmp_path / "x")
    found = load_memmap(tmp_path / "x", keys=[("b", "c")])
    check_same(stack.select(("b", "c")), found)
    check_same(stack[1], load_memmap(tmp_path / "x", subpath="1"))
    check_same(stack[2]["b"], load_memmap(tmp_path / "x", subpath=("2", "b")))
    with pytest.raises(KeyError, match="'zz'"):
        load_memmap(tmp_path / "x", keys=["zz"])
    for path in ("4", "x", ("1", "a")):
        with pytest.raises(SaveError, match="no container at subpath"):
            load_memmap(tmp_path / "x", subpath=path)
    unread = load_memmap(tmp_path / "x", device="meta")
    assert unread[1]["a"].is_meta and unread[1]["a"].shape == (3, 4)


def test_saved_again(tmp_path: pathlib.Path) -> None:
    stack = rows(row)
    saved = stack.memmap(tmp_path / "x")
    with pytest.raises(SaveError, match="pass copy_existing=True"):
        saved.memmap(tmp_path / "y")
    check_same(stack, saved.memmap(tmp_path / "y", copy_existing=True))
    check_same(stack, saved.memmap(tmp_path / "x"))
    check_same(stack, load_memmap(tmp_path / "x"))
    check_same(stack.apply(torch.zeros_like), stack.memmap_like(tmp_path / "z"))


def test_values_are_written_through(tmp_path: pathlib.Path) -> None:
    saved = STACKS["values"]().memmap(tmp_path / "x")
    other = load_memmap(tmp_path / "x")
    other[1].update_({"s": "new", "t": (1, 2)})
    assert [member["s"] for member in load_memmap(tmp_path / "x").tensordicts] == ["v1", "new", "v2", "v5"]
    assert saved[1]["s"] == "v3" and saved.memmap_refresh_()[1]["t"] == (1, 2)
    odd = rows(lambda n: TensorDict(a=torch.rand(n), o=NonTensorData(complex(n)))).memmap(
        tmp_path / "y", allow_pickle=True
    )
    with pytest.raises(ValueError, match="pickled together"):
        odd[0].update_({"o": "x"})


def test_a_member_has_no_folder_for_new_entries(tmp_path: pathlib.Path) -> None:
    saved = rows(row).memmap(tmp_path / "x")
    with pytest.raises(SaveError, match="add it to all members before"):
        saved[1].make_memmap("new", (2,))
    with pytest.raises(SaveError, match="make it in each member"):
        saved.make_memmap("new", (4, 2))
    anonymous = rows(row).memmap_()
    assert anonymous[1].make_memmap("new", (2,)).shape == (2,)


def test_broken(tmp_path: pathlib.Path) -> None:
    def broken(change: Callable[[dict[str, Any]], None]) -> None:
        rows(row).memmap(tmp_path / "x")
        meta = json.loads((tmp_path / "x" / "meta.json").read_text())
        change(meta)
        (tmp_path / "x" / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(SaveError):
            load_memmap(tmp_path / "x")

    broken(lambda meta: meta.update(_stack=[0]))
    broken(lambda meta: meta.update(_stack=[1, [4], None]))
    broken(lambda meta: meta.update(_stack=[0, [5], None]))
    broken(lambda meta: meta.update(_stack=[0, [4, 2], None]))
    broken(lambda meta: meta.update(_stack=[0, [4, -1], None]))
    broken(lambda meta: meta.update(_stack=[0, [4], [1]]))
    broken(lambda meta: meta.update(shape=[3]))
    (tmp_path / "many").mkdir()
    many = {"_type": "<class 'tensordict._td.TensorDict'>", "shape": [1 << 60], "_stack": [0, [1 << 60], None]}
    (tmp_path / "many" / "meta.json").write_text(json.dumps(many))
    with pytest.raises(SaveError, match="too many"):
        load_memmap(tmp_path / "many")


READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tensordict import TensorDict
td = TensorDict.load_memmap(sys.argv[1])
other = TensorDict.from_consolidated(sys.argv[2])
print(json.dumps([
    [list(td.batch_size), td["id"].tolist(), [row.tolist() for row in td["t"].unbind(0)], td["n", "w"].shape],
    [list(other.batch_size), other["id"].tolist(), [row.tolist() for row in other["t"].unbind(0)]],
]))
"""


@pytest.mark.reference
def test_the_reference_reads_ragged_leaves(reference: Reference, tmp_path: pathlib.Path) -> None:
    rows(row).memmap(tmp_path / "x")
    rows(row).consolidate(tmp_path / "y")
    found = reference.run(READ, tmp_path / "x", tmp_path / "y")
    ragged = [list(range(n)) for n in LENGTHS]
    assert json.loads(found) == [[[4], [1, 3, 2, 5], ragged, [4, 3]], [[4], [1, 3, 2, 5], ragged]]
