"""Lazy concatenations: what the contract suite, which runs on them too, does not ask for."""

from __future__ import annotations

import functools
import gc
import pathlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tensordict import (
    LazyConcatenatedTensorDict,
    MemoryMappedTensor,
    NonTensorStack,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    assert_close,
    lazy_cat,
    lazy_stack,
    load_memmap,
)

LENGTHS = [2, 3, 0, 1, 4]


class Point(TensorClass):
    x: torch.Tensor
    label: str


def part(length: int, start: int = 0) -> TensorDict:
    rows = torch.arange(start, start + length)
    return TensorDict(
        a=rows[:, None] + torch.tensor([0.0, 0.5]),
        b=TensorDict(c=rows.clone(), d=TensorDict(e=rows.bool(), batch_size=length), batch_size=length),
        batch_size=length,
    )


@pytest.fixture
def parts() -> list[TensorDict]:
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [part(length, start) for length, start in zip(LENGTHS, starts, strict=True)]


class Shards(Sequence[Any]):
    """Parts that are loaded when they are asked for, and not kept."""

    def __init__(self, folders: list[pathlib.Path]) -> None:
        self.folders = folders
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.folders)

    def __getitem__(self, number: Any) -> Any:
        self.loaded.append(number)
        return load_memmap(self.folders[number])


@pytest.fixture
def shards(parts: list[TensorDict], tmp_path: pathlib.Path) -> Shards:
    folders = [tmp_path / str(i) for i in range(len(parts))]
    for td, folder in zip(parts, folders, strict=True):
        td.memmap(folder)
    return Shards(folders)


INDICES: list[Any] = [
    0,
    -1,
    slice(None),
    slice(1, 8),
    slice(0, 10, 3),
    slice(4, 4),
    range(2, 9, 2),
    range(9, 0, -3),
    [3, 1, 9, 0, 3, -1],
    [5],
    [],
    torch.tensor([[1, 2, 8], [9, 0, 0]]),
    torch.tensor([7, 2], dtype=torch.int32),
    torch.arange(10) % 3 == 0,
    torch.zeros(10, dtype=torch.bool),
    None,
    (slice(2, 6), None),
    (torch.tensor([4, 1]),),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_takes_what_it_takes_of_the_copy(parts: list[TensorDict], index: Any) -> None:
    td, dense = lazy_cat(parts), torch.cat(parts)
    assert_close(td[index], dense[index])
    assert td[index].batch_size == dense[index].batch_size
    view = td[1:9:2]
    if not isinstance(index, torch.Tensor) and index not in INDICES[7:9]:
        return
    assert_close(view[[3, 0, -1]], dense[1:9:2][[3, 0, -1]])


def test_views(parts: list[TensorDict]) -> None:
    td = lazy_cat(parts)
    row = td[3]
    row["b", "c"].fill_(77)
    assert parts[1]["b", "c"][1] == 77
    view = td[1:7][1:][::2]
    assert isinstance(view, LazyConcatenatedTensorDict) and len(view) == 3
    view[1] = {"a": torch.full((2,), 99.0)}
    assert (parts[1]["a"][2] == 99).all() and (td["a"] == 99).sum() == 2
    assert isinstance(td[range(2, 5)], LazyConcatenatedTensorDict)
    assert all(isinstance(piece, LazyConcatenatedTensorDict) for piece in td.split(4) + td.chunk(3))
    assert [len(piece) for piece in td.split(4)] == [4, 4, 2]
    for position, row in enumerate(td):
        assert row["a"].untyped_storage().data_ptr() in {p["a"].untyped_storage().data_ptr() for p in parts}
        assert_close(row, torch.cat(parts)[position])
    with pytest.raises(IndexError, match="out of bounds"):
        td[10]
    with pytest.raises(IndexError, match="index 10 is out of bounds for dimension 0 with size 10"):
        td[[0, 10]]


def test_writes_go_to_the_parts(parts: list[TensorDict]) -> None:
    td, dense = lazy_cat(parts), torch.cat(parts)
    for target in (td, dense):
        target[[9, 2, 4]] = {"b": {"c": torch.tensor([90, 20, 40])}}
        target[torch.arange(10) > 7] = {"a": torch.zeros(2, 2)}
        target.set_("a", target["a"] * 2)
        target.update_({("b", "d", "e"): torch.ones(10, dtype=torch.bool)})
        target[1:3].fill_(("b", "c"), -1)
        target["b"].apply_(lambda leaf: leaf.logical_not() if leaf.dtype is torch.bool else leaf + 1)
        target.set_at_("a", 5.0, (slice(2, 4), 1))
    assert_close(torch.cat(parts), dense)
    assert_close(td, dense)
    before = td.clone()
    with pytest.raises(RuntimeError, match="'a'"):
        td[3:6] = {"b": {"c": torch.zeros(3)}, "a": torch.zeros(4, 2)}
    assert_close(td, before)


def test_entries_of_its_own(parts: list[TensorDict]) -> None:
    td, dense = lazy_cat(parts), torch.cat(parts)
    for target in (td, dense):
        target["weight"] = torch.arange(10.0)
        target["b", "label"] = NonTensorStack(*map(str, range(10)))
        target["u"] = UnbatchedTensor(torch.arange(3))
        target["moved"] = target["b", "d"]
        del target["b", "d"]
    assert "weight" not in parts[0] and ("b", "d") in parts[0].keys(True)
    for index in (4, slice(3, 8, 2), [9, 0, 5], slice(None)):
        assert_close(td[index].exclude("u"), dense[index].exclude("u"))
        assert td[index]["b", "label"] == dense[index]["b", "label"] if index == 4 else True
        assert torch.equal(td[index]["u"].as_subclass(torch.Tensor), torch.arange(3))
    assert td[[9, 0]]["b", "label"] == ["9", "0"]
    with pytest.raises(RuntimeError, match="after entries of the concatenation were added"):
        td.extend([part(1)])


def test_nothing_is_loaded_before_it_is_read(shards: Shards, parts: list[TensorDict]) -> None:
    td = LazyConcatenatedTensorDict(shards, lengths=LENGTHS, template=parts[0][:0])
    repr(td), len(td), list(td.keys(True, True)), td.batch_size, td.select("a"), td.exclude("a")[2:5], td.copy(), td[3:]
    td.split(2), td.lock_().unlock_(), iter(td)
    assert shards.loaded == []
    assert next(iter(td))["b", "c"] == 0 and set(shards.loaded) == {0}
    shards.loaded.clear()
    assert_close(td[6:8].select("b").to_tensordict(), torch.cat(parts).select("b")[6:8])
    assert set(shards.loaded) == {4}
    shards.loaded.clear()
    assert_close(td[[9, 2, 8]], torch.cat(parts)[[9, 2, 8]])
    assert sorted(shards.loaded) == [1, 4]
    row = td[3]
    assert isinstance(row["a"], MemoryMappedTensor)
    row["a"].fill_(3)
    assert (load_memmap(shards.folders[1])["a"][1] == 3).all()
    td[8:] = {"b": {"c": torch.tensor([5, 6])}}
    assert load_memmap(shards.folders[4])["b", "c"].tolist() == [6, 7, 5, 6]


def test_a_part_that_is_not_as_said_is_named(shards: Shards, parts: list[TensorDict]) -> None:
    lengths = [*LENGTHS[:-1], 5]
    td = LazyConcatenatedTensorDict(shards, lengths=lengths, template=parts[0])
    assert_close(td[:6].to_tensordict(), torch.cat(parts)[:6])
    with pytest.raises(RuntimeError, match=r"part 4 .* batch size \[4\], where one of 5 rows"):
        td[7]
    with pytest.raises(ValueError, match="one length of 0 or more for each part, got 4 lengths"):
        LazyConcatenatedTensorDict(shards, lengths=LENGTHS[1:], template=parts[0])
    with pytest.raises(ValueError, match="needs a template"):
        LazyConcatenatedTensorDict([])
    assert LazyConcatenatedTensorDict([], template=parts[0])["a"].shape == (0, 2)


def test_parts_of_another_schema(parts: list[TensorDict]) -> None:
    def refused(change: Any, match: str) -> None:
        other = change(part(3))
        with pytest.raises((RuntimeError, TypeError), match=match):
            lazy_cat([*parts, other])

    refused(lambda td: td.update({"a": torch.zeros(3, 4)}), r"entry 'a' of part 5 .*rows of shape \[4\]")
    refused(lambda td: td.update({("b", "c"): torch.zeros(3)}), r"entry .*'c'.* of part 5 .*torch.float32")
    refused(lambda td: td.exclude(("b", "d")), r"part 5 .* under 'b': it lacks \['d'\]")
    refused(lambda td: td.update({"b": torch.zeros(3)}), "entry 'b' is a tensor in part 5")
    refused(lambda td: td.update({"new": torch.zeros(3)}), r"has \['new'\]")
    refused(lambda td: TensorDict(batch_size=[3, 2]), "batch size")
    refused(lambda td: torch.zeros(3), "Tensor")
    with pytest.raises(RuntimeError, match="dim=1"):
        lazy_cat([TensorDict(batch_size=[2, 3])], 1)
    with pytest.raises(RuntimeError, match="first batch dim"):
        LazyConcatenatedTensorDict([TensorDict(a=torch.zeros(2))])
    td = lazy_cat(parts)
    with pytest.raises(RuntimeError, match="extend adds parts"):
        td.batch_size = [10, 2]


def test_more_parts(parts: list[TensorDict]) -> None:
    td = lazy_cat(parts[:3]).lock_()
    view, nested, rows = td[1:], td["b"], td[:]
    td.extend(parts[3:])
    assert td.is_locked and td["b"].is_locked
    assert_close(td, torch.cat(parts))
    assert_close(td[[9, 0]], torch.cat(parts)[[9, 0]])
    assert_close(view, torch.cat(parts)[1:5])
    assert_close(nested, torch.cat(parts)[:5]["b"])
    for stale in (view, nested, rows):
        with pytest.raises(RuntimeError, match="to a view or a nested container"):
            stale.extend([part(1)])
    with pytest.raises(RuntimeError, match="part 5"):
        td.extend([TensorDict(a=torch.zeros(1), batch_size=1)])
    assert len(td) == 10 and len(td.parts) == 5


def test_strings_and_ragged_rows() -> None:
    def ragged(*lengths: int) -> TensorDict:
        rows = [torch.full((n,), float(n)) for n in lengths]
        return TensorDict(
            r=torch.nested.nested_tensor(rows, layout=torch.jagged),
            s=NonTensorStack(*[f"row {n}" for n in lengths]),
            t=torch.tensor(lengths),
            batch_size=len(lengths),
        )

    parts = [ragged(1, 2), ragged(3, 4, 5)]
    td = lazy_cat(parts)
    assert "Values(" in repr(td) and set(td.keys()) == {"r", "s", "t"}
    assert td["s"] == [f"row {n}" for n in range(1, 6)]
    assert [row.tolist() for row in td["r"].unbind()] == [[float(n)] * n for n in range(1, 6)]
    some = td[[4, 0, 2]]
    assert some["s"] == ["row 5", "row 1", "row 3"] and [len(row) for row in some["r"].unbind()] == [5, 1, 3]
    assert td[1:4][1:]["s"] == ["row 3", "row 4"] and td[3]["s"] == "row 4" and td[3]["r"].tolist() == [4.0] * 4
    assert td[1:4].to_tensordict()["t"].tolist() == [2, 3, 4]
    assert pickle.loads(pickle.dumps(td[1:4]))["s"] == ["row 2", "row 3", "row 4"]


def test_writing_strings_and_ragged_rows() -> None:
    def two(*lengths: int) -> TensorDict:
        rows = [torch.full((n,), float(n)) for n in lengths]
        values = NonTensorStack(*map(str, lengths))
        ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return TensorDict(n=TensorDict(r=ragged, s=values, batch_size=2), t=torch.tensor(lengths), batch_size=2)

    parts = [two(1, 2), two(3, 4)]
    td = lazy_cat(parts)
    td[2] = {"n": {"s": "new", "r": torch.zeros(3)}, "t": 7}
    td[[3, 0]] = TensorDict(n=TensorDict(s=NonTensorStack("x", "y"), batch_size=2), batch_size=2)
    assert parts[0]["n", "s"] == ["y", "2"] and parts[1]["n", "s"] == ["new", "x"] and parts[1]["t"].tolist() == [7, 4]
    assert parts[1]["n", "r"].unbind()[0].tolist() == [0, 0, 0]
    td[1:].update_({"n": {"s": ["a", "b", "c"]}})
    td["n"].set_("r", td["n", "r"] + 1)
    assert td["n", "s"] == ["y", "a", "b", "c"] == parts[0]["n", "s"] + parts[1]["n", "s"]
    assert [row.tolist() for row in parts[0]["n", "r"].unbind()] == [[2], [3, 3]]
    td["n"].set_at_("r", 8.0, 3)
    assert parts[1]["n", "r"].unbind()[1].tolist() == [8] * 4
    with pytest.raises(RuntimeError):
        td[0] = {"t": 9, "n": {"r": torch.zeros(5)}}
    assert td["t"].tolist() == [1, 2, 7, 4]
    td["n", "s"] = NonTensorStack(*"pqrs")
    assert parts[0]["n", "s"] == ["y", "a"] and td[[3, 1]]["n", "s"] == ["s", "q"]


def test_parts_of_other_kinds(parts: list[TensorDict], tmp_path: pathlib.Path) -> None:
    dense = torch.cat(parts)
    files = [td.to_h5(tmp_path / f"{i}.h5") for i, td in enumerate(parts)]
    assert all(isinstance(file, PersistentTensorDict) for file in files)
    stacks = [lazy_stack(list(td.unbind(0))) if len(td) else td for td in parts]
    for kinds in (
        files,
        stacks,
        [lazy_cat(parts[:2]), *parts[2:]],
        [parts[0], files[1], stacks[2], stacks[3], files[4]],
    ):
        td = lazy_cat(kinds)
        for index in (4, slice(1, 8), [8, 3, 3, 0]):
            assert_close(td[index].to_tensordict(), dense[index])
        assert_close(td["b"].to_tensordict(), dense["b"])
        td[[8, 1]] = {"a": torch.tensor([[8.0, 8.5], [1.0, 1.5]])}
        td[3:7] = dense[3:7]
        assert_close(td.to_tensordict(), dense)
    for file in files:
        file.close()


def test_tensorclasses() -> None:
    points = [
        Point(x=torch.arange(2.0), label="near", batch_size=[2]),
        Point(x=torch.arange(2.0, 5.0), label="near", batch_size=[3]),
    ]
    td = lazy_cat(points)
    assert isinstance(td, Point) and isinstance(td[1:4], Point) and isinstance(td[[4, 0]], Point)
    assert td.x.tolist() == [0, 1, 2, 3, 4] and td[[4, 0]].x.tolist() == [4, 0] and isinstance(td[2], Point)
    nested = lazy_cat([TensorDict(p=point, batch_size=point.batch_size) for point in points])
    assert isinstance(nested["p"], Point) and isinstance(nested[3]["p"], Point)
    nested[4] = {"p": Point(x=torch.tensor(50.0), label="near", batch_size=[])}
    assert points[1].x[2] == 50


def test_joins_saves_and_pickles(parts: list[TensorDict], tmp_path: pathlib.Path) -> None:
    td, dense = lazy_cat(parts), torch.cat(parts)
    assert_close(torch.cat([td, td[:2]]), torch.cat([dense, dense[:2]]))
    assert_close(lazy_stack([td, td]).contiguous(), torch.stack([dense, dense]))
    td.memmap(tmp_path / "saved")
    assert_close(load_memmap(tmp_path / "saved"), dense)
    td[2:7].save(tmp_path / "part.td")
    assert_close(TensorDict.load(tmp_path / "part.td"), dense[2:7])
    again = pickle.loads(pickle.dumps(td.lock_()[2:7]))
    assert isinstance(again, LazyConcatenatedTensorDict) and again.is_locked
    assert_close(again, dense[2:7])


def test_gradients_flow_to_the_parts() -> None:
    parts = [TensorDict(a=torch.ones(n, 2, requires_grad=True), batch_size=n) for n in (2, 3)]
    td = lazy_cat(parts)
    (td["a"].sum() + td[[4, 0]]["a"].sum() + td[1]["a"].sum()).backward()
    assert parts[0]["a"].grad.sum(1).tolist() == [4, 4] and parts[1]["a"].grad.sum(1).tolist() == [2, 2, 4]


def mapped(folder: pathlib.Path, **entries: torch.Tensor) -> TensorDict:
    length = len(next(iter(entries.values())))
    return load_memmap(TensorDict(entries, batch_size=length).memmap(folder)._memmap_prefix)


ROWS = {
    "bytes": torch.randint(255, (20, 3), dtype=torch.uint8),
    "flags": torch.rand(20) > 0.5,
    "halves": torch.randn(20, 5, dtype=torch.bfloat16),
    "long": torch.randn(20, 4 * 32768 // 3),
    "number": torch.arange(20),
    "nothing": torch.zeros(20, 0),
    "complex": torch.randn(20, 2, dtype=torch.complex64),
}


@pytest.mark.parametrize("cut", [[20], [1, 6, 0, 13], [5] * 4], ids=str)
@pytest.mark.parametrize("saved", ["folder", "views", "archive"])
def test_rows_of_files(tmp_path: pathlib.Path, saved: str, cut: list[int]) -> None:
    whole = TensorDict(ROWS, batch_size=20)
    if saved == "folder":
        parts = [mapped(tmp_path / str(i), **dict(p.items())) for i, p in enumerate(whole.split(cut))]
    elif saved == "views":
        parts = list(mapped(tmp_path / "one", **ROWS).split(cut))
    else:
        for number, piece in enumerate(whole.split(cut)):
            piece.save(tmp_path / f"{number}.tdz")
        parts = [TensorDict.load(tmp_path / f"{number}.tdz") for number in range(len(cut))]
    td = lazy_cat(parts)
    for index in (torch.randint(20, (50,)), [19], torch.arange(19, -1, -1), torch.tensor([[-1, 0], [-20, 7]])):
        found = td[index]
        assert type(found) is TensorDict and found.batch_size == torch.as_tensor(index).shape
        for name, rows in ROWS.items():
            assert torch.equal(found[name], rows[index]), name
        assert_close(td[3:17:2][[6, 0]], whole[3:17:2][[6, 0]])
    td[[4, 4, 11]] = {"number": torch.tensor([40, 40, 110])}
    assert td[[11, 4]]["number"].tolist() == [110, 40]


def test_files_stay_what_they_are_while_their_rows_are_read(tmp_path: pathlib.Path) -> None:
    parts = [mapped(tmp_path / str(i), a=torch.full((3,), i)) for i in range(3)]
    td = lazy_cat(parts)
    assert not any(part.is_locked for part in parts)
    assert td[[8, 1]]["a"].tolist() == [2, 0]
    assert [part.is_locked for part in parts] == [True, False, True]
    for change in (lambda: parts[0].set("a", torch.zeros(3)), lambda: parts[0].unlock_()):
        with pytest.raises(RuntimeError, match="locked"):
            change()
    parts[0]["a"].fill_(7)
    assert td[[8, 1]]["a"].tolist() == [2, 7]
    del td
    gc.collect()
    parts[0].unlock_()["a"] = torch.zeros(3)


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Threads take turns a hundred times as often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("short_turns")
def test_parts_that_come_and_go(tmp_path: pathlib.Path) -> None:
    """A sequence that keeps the last two parts, which threads read at a time."""
    for number in range(6):
        mapped(tmp_path / str(number), a=torch.full((4, 300), float(number)))

    class Recent(Shards):
        def __init__(self) -> None:
            super().__init__([tmp_path / str(number) for number in range(6)])
            self.kept = functools.lru_cache(2)(load_memmap)

        def __getitem__(self, number: Any) -> Any:
            return self.kept(self.folders[number])

    td = LazyConcatenatedTensorDict(Recent(), lengths=[4] * 6, template=load_memmap(tmp_path / "0"))

    def read(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            at = torch.randint(24, (8,), generator=generator)
            if not torch.equal(td[at]["a"], (at // 4)[:, None].expand(8, 300).float()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(40)))
    td.parts[5]["a"].fill_(9)
    assert td[[23]]["a"].unique().tolist() == [9]


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.mul_(2),
        lambda td: td.zero_(),
        lambda td: td.apply_(lambda leaf: leaf + 1),
        lambda td: td.masked_fill_(torch.tensor([True] * 6), 9.0),
        lambda td: td.fill_("ragged", 7),
    ],
    ids=["mul_", "zero_", "apply_", "masked_fill_", "fill_"],
)
def test_arithmetic_in_place_on_ragged_rows_is_refused(change: Callable[[Any], object]) -> None:
    def part(start: int) -> TensorDict:
        rows = [torch.full((n,), float(start + n)) for n in (1, 2, 3)]
        ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return TensorDict(flat=torch.arange(3.0) + start, ragged=ragged, batch_size=3)

    parts = [part(1), part(10)]
    with pytest.raises(RuntimeError, match="cannot be written in place"):
        change(lazy_cat(parts))
    for changed, fresh in zip(parts, (part(1), part(10)), strict=True):
        assert torch.equal(changed["flat"], fresh["flat"])
        assert torch.equal(changed["ragged"].values(), fresh["ragged"].values())


@pytest.mark.parametrize(
    "call", ["clone()", "add(1)", "mul(2)", "neg()", "exp()", "isnan()", "clamp(0, 1)", "lerp(td, 0.5)"]
)
def test_values_of_the_parts_stay_what_they_are(call: str) -> None:
    """The structure of a concatenation says `<values of 2 parts>` of a value. A result has the value itself."""
    rows = TensorDict({"a": torch.ones(1), "v": "text", "n": TensorDict({"b": torch.ones(1), "w": "deep"}, [1])}, [1])
    td = lazy_cat([rows, rows.clone()])
    result = eval(f"td.{call}", {"td": td})
    assert result.get("v").tolist() == ["text", "text"] and result.get(("n", "w")).tolist() == ["deep", "deep"]
