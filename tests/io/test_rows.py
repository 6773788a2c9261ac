"""Rows of large tensors in mapped files, picked by an index tensor."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict import MemoryMappedTensor, TensorDict, from_safetensors, load_memmap, to_safetensors
from tensordict.memory import kernel, rows

COUNT, WIDTH = 5_000, 1_024
"""Of int64: 39 MiB, more than `rows` takes for small."""


@pytest.fixture(scope="module")
def data() -> TensorDict:
    """A container with one entry that is large and one that is small."""
    numbers = torch.arange(COUNT)
    return TensorDict({"large": numbers[:, None] * 10_000 + torch.arange(WIDTH), "small": numbers}, [COUNT])


@pytest.fixture(scope="module")
def saves(data: TensorDict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The container in the formats that are mapped."""
    folder = tmp_path_factory.mktemp("rows")
    data.memmap(folder / "directory")
    data.memmap(folder / "archive.tdz")
    data.consolidate(folder / "consolidated")
    to_safetensors(data, folder / "file.safetensors")
    return folder


def opened(saves: Path, kind: str) -> TensorDict:
    """One of the saves, mapped."""
    if kind == "directory":
        return load_memmap(saves / "directory")
    if kind == "archive":
        return load_memmap(saves / "archive.tdz")
    if kind == "consolidated":
        return TensorDict.from_consolidated(saves / "consolidated")
    return from_safetensors(saves / "file.safetensors")


KINDS = ["directory", "archive", "consolidated", "safetensors"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the kernel was told of, call by call."""
    found: list[int] = []
    tell = rows._announce_rows

    def record(start: int, size: int, positions: torch.Tensor) -> None:
        found.append(len(positions))
        tell(start, size, positions)

    monkeypatch.setattr(rows, "_announce_rows", record)
    # The files have just been written, and are in memory.
    monkeypatch.setattr(rows, "_seem_in_memory", lambda *_: False)
    return found


def test_rows_in_memory_are_not_asked_for(saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = opened(saves, "directory").get("large")
    at = torch.arange(0, COUNT, 50)
    expected = large.as_subclass(torch.Tensor)[at]
    monkeypatch.setattr(rows, "_announce_rows", lambda *_: pytest.fail("asked for what is in memory"))
    assert torch.equal(large[at], expected)


def test_a_kernel_that_was_wrong_is_not_believed_for_some_time(saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = opened(saves, "directory").get("large")
    at = torch.arange(0, COUNT, 50)
    asked: list[int] = []
    waits = iter(range(0, 10_000, 1_000))
    monkeypatch.setattr(rows, "_announce_rows", lambda start, size, positions: asked.append(len(positions)))
    monkeypatch.setattr(rows.system, "major_faults", lambda: next(waits))
    for _ in range(3):
        _ = large[at]
    assert asked == [len(at)] * 2
    rows._mistaken.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "at",
    [
        torch.tensor([4, 4_999, 0, 4]),
        torch.tensor([-1, 2, -5_000]),
        torch.tensor([[1, 2], [3, 3]]),
        torch.tensor([7, 8], dtype=torch.int32),
        [3, 1],
    ],
    ids=["positions", "negative", "two dims", "int32", "list"],
)
def test_rows_are_those_of_the_index(
    data: TensorDict, saves: Path, asked: list[int], kind: str, at: torch.Tensor | list[int]
) -> None:
    td = opened(saves, kind)
    part = td[at]
    assert part.batch_size == data[at].batch_size
    assert (part == data[at]).all()
    assert asked == [torch.as_tensor(at).numel()]  # Of the large entry only.


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_picks_rows(data: TensorDict, saves: Path, asked: list[int], kind: str) -> None:
    mask = torch.arange(COUNT) % 1_000 == 3
    assert (opened(saves, kind)[mask] == data[mask]).all()
    assert asked == [5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [COUNT, -COUNT - 1])
def test_a_row_that_is_not_there(saves: Path, kind: str, position: int) -> None:
    td = opened(saves, kind)
    with pytest.raises(IndexError, match="out of bounds"):
        td[torch.tensor([0, position])]


@pytest.mark.parametrize("kind", KINDS)
def test_other_indices_go_the_usual_way(data: TensorDict, saves: Path, asked: list[int], kind: str) -> None:
    td = opened(saves, kind)
    none = torch.empty(0, dtype=torch.long)
    for at in (3, slice(2, 9, 3), None, (torch.tensor([1]),), torch.tensor(5), none):
        assert (td[at] == data[at]).all()
    assert asked == []
    # A view still is one of the file.
    if kind == "directory":
        assert isinstance(td.get("large")[torch.tensor(5)], MemoryMappedTensor)


def test_a_part_of_a_leaf(data: TensorDict, saves: Path, asked: list[int]) -> None:
    large = opened(saves, "directory").get("large")
    at = torch.tensor([0, 4_900])
    assert torch.equal(large[10:4_990][at], data["large"][10:4_990][at])
    assert asked == [2]
    assert torch.equal(large.T[at % WIDTH], data["large"].T[at % WIDTH])
    assert asked == [2]


def test_many_rows_are_asked_for_in_parts(
    data: TensorDict, saves: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_AHEAD", 2_000 * WIDTH * 8)
    at = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    assert torch.equal(opened(saves, "directory").get("large")[at], data["large"][at])
    assert asked == [2_000, 2_000, 1_000]


def test_row_by_row_where_the_kernel_takes_no_lists(
    data: TensorDict, saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    class Old:
        """A C library without `process_madvise`."""

        @staticmethod
        def madvise(address: object, length: object, advice: int) -> int:
            calls.append(advice)
            return 0

    monkeypatch.setattr(kernel, "_libc", Old())
    monkeypatch.setattr(rows, "_seem_in_memory", lambda *_: False)
    at = torch.tensor([1, 5, 9])
    assert torch.equal(opened(saves, "directory").get("large")[at], data["large"][at])
    assert calls == [3, 3, 3]


def test_gradients_and_vmap(data: TensorDict, saves: Path, asked: list[int]) -> None:
    large = opened(saves, "directory").get("large")
    expected = data["large"][torch.tensor([[1, 2], [3, 4]])]
    assert torch.equal(torch.vmap(lambda at: large[at])(torch.tensor([[1, 2], [3, 4]])), expected)
    assert asked == []


def test_maps_are_forgotten_when_they_end(saves: Path) -> None:
    gc.collect()
    before = dict(rows.maps)
    td = opened(saves, "archive")
    assert len(rows.maps) == len(before) + 1
    del td
    gc.collect()
    assert rows.maps == before


def test_maps_come_while_rows_are_read(saves: Path, data: TensorDict, monkeypatch: pytest.MonkeyPatch) -> None:
    td = opened(saves, "archive")

    class Growing(dict[int, int]):
        """Grows by one item while it is iterated, as if another thread added it."""

        def items(self) -> Any:
            for item in super().items():
                self[-len(self)] = 0
                yield item

    monkeypatch.setattr(rows, "maps", Growing({0: 0, **rows.maps}))
    assert torch.equal(td[torch.tensor([3, 1])]["large"], data["large"][[3, 1]])


# --- rows of more elements than torch copies in one thread ------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "count"),
    [
        ((3, 224, 224), torch.uint8, 256),
        ((40_001,), torch.uint8, 1_000),  # an odd number of bytes
        ((3, 128, 128), torch.float32, 200),
        ((3, 256, 256), torch.float32, 50),
        ((50_002,), torch.int16, 400),
        ((34_000,), torch.bfloat16, 600),
        ((70_000,), torch.complex64, 70),
        ((70_000,), torch.float8_e4m3fn, 500),
        ((70_000,), torch.bool, 500),
    ],
)
def test_long_rows(shape: tuple[int, ...], dtype: torch.dtype, count: int, tmp_path: Path, asked: list[int]) -> None:
    numbers = torch.randint(0, 2, (count, *shape), dtype=torch.uint8).to(dtype)
    td = TensorDict({"x": numbers}, [count])
    for path in (tmp_path / "x", tmp_path / "x.tdz"):
        loaded = td.memmap(path)
        for at in (torch.tensor([[3, 0, 3], [-1, count - 1, 7]]), torch.tensor([5], dtype=torch.int32)):
            batch = loaded[at]["x"]
            expected = numbers.view(torch.uint8)[at.long()]
            assert batch.shape == (*at.shape, *shape) and batch.dtype is dtype
            assert torch.equal(batch.view(torch.uint8), expected)
        # A part of it begins somewhere in the file.
        assert torch.equal(loaded["x"][1:][torch.tensor([0, 2])].view(torch.uint8), numbers.view(torch.uint8)[[1, 3]])
    assert asked


# --- rows of many tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 100])  # Rows go one by one, or all of a tensor at once.
@pytest.mark.parametrize("width", [1, 9_000])
def test_rows_of_many_tensors_keep_their_memory_and_their_bounds(count: int, width: int) -> None:
    leaves = [torch.randn(4, width), torch.randn(7, width)]
    sources = [rows.records(leaf) for leaf in leaves]
    expected = torch.cat(leaves)
    at = torch.arange(count).numpy() * 5 % 11
    del leaves
    numbers = (at >= 4).astype(int)
    out = torch.empty(count, width)
    for announcements_left in (0, 2):
        picks = rows.Picks(numbers, at - 4 * numbers, 2)
        rows.gather(sources, picks, out, announcements_left)
        assert torch.equal(out, expected[at])
    with pytest.raises(IndexError):
        rows.gather(sources, rows.Picks(numbers, at, 2), out)
