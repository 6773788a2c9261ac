"""One limit of depth for all formats: at the limit a container is saved and loaded, above it nothing is written."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from redis_server import shared_socket
from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack, load, load_memmap, unpack_memmap, verify
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.specification import MAX_LEVELS
from tensordict.store import TensorDictStore

pytest.importorskip("h5py")
pytest.importorskip("zarr")
# How many frames the caller of a save or a load may have, of Python's 1,000.
FRAMES = 400


class Box(TensorClass):
    x: torch.Tensor
    inner: Any = None


def nested(levels: int) -> TensorDict:
    td = TensorDict({"x": torch.tensor([1.0, 2.0])}, [2])
    for _ in range(levels):
        td = TensorDict({"n": td, "x": torch.ones(2)}, [2])
    return td


def nested_boxes(levels: int) -> Box:
    box = Box(x=torch.tensor([1.0, 2.0]), batch_size=[2])
    for _ in range(levels):
        box = Box(x=torch.ones(2), inner=box, batch_size=[2])
    return box


def nested_stacks(levels: int) -> TensorDict:
    """A stack and its members are a level each."""
    td = TensorDict({"x": torch.tensor([1.0, 2.0])}, [2])
    for level in range(levels):
        td = lazy_stack([td]) if level % 2 else TensorDict({"n": td}, td.batch_size)
    return td


def load_h5(path: pathlib.Path) -> Any:
    with TensorDict.from_h5(path) as data:
        return data.to_tensordict()


def save_to_server(td: Any, path: pathlib.Path) -> None:
    data = td.to_store(unix_socket_path=shared_socket())
    (path.parent / "id").write_text(data.td_id)


def load_from_server(path: pathlib.Path) -> Any:
    name = (path.parent / "id").read_text()
    return TensorDictStore.from_store(td_id=name, unix_socket_path=shared_socket()).to_tensordict()


FORMATS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "folder": (lambda td, path: td.memmap(path), load_memmap),
    "archive": (lambda td, path: td.memmap(path, archive=True), load_memmap),
    "compressed archive": (lambda td, path: td.memmap(path, archive=True, compression="deflate"), load_memmap),
    "consolidated": (lambda td, path: td.consolidate(path), TensorDict.from_consolidated),
    "safetensors": (lambda td, path: td.to_safetensors(path), TensorDict.from_safetensors),
    "HDF5": (lambda td, path: td.to_h5(path).close(), load_h5),
    "Zarr": (lambda td, path: td.to_zarr(path).close(), lambda path: TensorDict.from_zarr(path).to_tensordict()),
    "Redis": (save_to_server, load_from_server),
}


def call_below(frames: int, call: Callable[[], Any]) -> Any:
    """Call with this many frames of Python on the stack, in all."""
    if frames > len_of_stack():
        return call_with(frames - len_of_stack(), call)
    return call()


def len_of_stack() -> int:
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return count


def call_with(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames <= 0 else call_with(frames - 1, call)


def innermost(container: Any) -> tuple[Any, int]:
    """The innermost container, and how many are around it."""
    count = 0
    while True:
        inner = container.get("n", None)
        if inner is None:
            inner = container.get("inner", None)
        if inner is None:
            return container, count
        container, count = inner, count + 1


@pytest.mark.parametrize("make", [nested, nested_boxes])
@pytest.mark.parametrize("name", FORMATS)
def test_a_container_at_the_limit_is_saved_and_loaded(
    name: str, make: Callable[[int], Any], tmp_path: pathlib.Path
) -> None:
    save, load = FORMATS[name]
    td, path = make(MAX_LEVELS), tmp_path / "saved"
    call_below(FRAMES, lambda: save(td, path))
    loaded, count = innermost(call_below(FRAMES, lambda: load(path)))
    assert count == MAX_LEVELS and loaded.get("x").tolist() == [1, 2]
    if path.exists():
        assert call_below(FRAMES, lambda: verify(path)).ok


@pytest.mark.parametrize("name", ["folder", "archive", "consolidated", "safetensors"])
def test_stacks_at_the_limit_are_saved_and_loaded(name: str, tmp_path: pathlib.Path) -> None:
    save, load = FORMATS[name]
    td = nested_stacks(MAX_LEVELS)
    call_below(FRAMES, lambda: save(td, tmp_path / "saved"))
    loaded = call_below(FRAMES, lambda: load(tmp_path / "saved"))
    assert (loaded == td).all()


@pytest.mark.parametrize("make", [nested, nested_boxes, nested_stacks])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("more", [1, 250])
def test_a_container_above_the_limit_is_refused_before_anything_is_written(
    more: int, name: str, make: Callable[[int], Any], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "folder" / "saved"
    with pytest.raises(SaveError, match=r"entry \('.*nested 101 levels deep, and a save has at most 100") as caught:
        FORMATS[name][0](make(MAX_LEVELS + more), path)
    assert len(str(caught.value)) < 400
    assert os.listdir(tmp_path) == []


TABLES = (".parquet", ".jsonl", ".json")


@pytest.mark.parametrize("suffix", TABLES)
def test_tables_have_the_limit(suffix: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"x{suffix}"
    # Two levels of a Parquet schema are the root and the leaf.
    most = MAX_LEVELS - 2 * (suffix == ".parquet")
    call_below(FRAMES, lambda: nested(most).save(path))
    loaded, count = innermost(call_below(FRAMES, lambda: load(path)))
    assert count == most and loaded.get("x").tolist() == [1, 2]
    path.unlink()
    for levels in (most + 1, MAX_LEVELS + 1, 5 * MAX_LEVELS):
        with pytest.raises((SaveError, UnsupportedEntryError), match="at most 100|with more than 100"):
            nested(levels).save(path)
    with pytest.raises(SaveError, match="at most 100"):
        nested(MAX_LEVELS + 1).to_arrow()
    assert os.listdir(tmp_path) == []


def test_lists_are_levels_of_a_parquet_schema(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("pyarrow")
    for levels, rank in ((96, 2), (94, 3)):
        td = TensorDict({"x": torch.zeros(2, *[1] * (rank - 1))}, [2])
        for _ in range(levels):
            td = TensorDict({"n": td}, [2])
        td.save(tmp_path / "x.parquet", overwrite=True)
        assert innermost(load(tmp_path / "x.parquet"))[1] == levels
        with pytest.raises(UnsupportedEntryError, match="column 'n' needs 101 levels of a Parquet schema"):
            TensorDict({"n": td}, [2]).save(tmp_path / "x.parquet", overwrite=True)
        assert innermost(load(tmp_path / "x.parquet"))[1] == levels


def test_a_save_above_the_limit_leaves_the_one_that_is_there(tmp_path: pathlib.Path) -> None:
    for name in ("folder", "archive", "consolidated", "safetensors", "HDF5", "Zarr"):
        save, load = FORMATS[name]
        save(nested(1), tmp_path / name)
        with pytest.raises(SaveError, match="at most 100"):
            save(nested(MAX_LEVELS + 1), tmp_path / name)
        assert innermost(load(tmp_path / name))[1] == 1
    assert sorted(os.listdir(tmp_path)) == ["HDF5", "Zarr", "archive", "consolidated", "folder", "safetensors"]


def test_memory_has_no_limit(tmp_path: pathlib.Path) -> None:
    assert innermost(nested(MAX_LEVELS + 20).memmap())[1] == MAX_LEVELS + 20
    assert innermost(nested(20).consolidate())[1] == 20
    torch.save(nested(MAX_LEVELS), tmp_path / "x.pt")
    assert innermost(torch.load(tmp_path / "x.pt", weights_only=False))[1] == MAX_LEVELS


# --- loading what is deeper -------------------------------------------------------------------------------------------


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Writers without a limit until the function that is returned is called."""
    monkeypatch.setattr("tensordict.io.specification.MAX_LEVELS", 10_000)
    return monkeypatch.undo


@pytest.mark.parametrize("name", FORMATS)
def test_a_save_that_is_deeper_is_refused(name: str, unlimited: Callable[[], None], tmp_path: pathlib.Path) -> None:
    save, load = FORMATS[name]
    path = tmp_path / "saved"
    save(nested(MAX_LEVELS + 1), path)
    unlimited()
    with pytest.raises(SaveError, match="nested 101 levels deep, and a save has at most 100"):
        load(path)
    if path.exists():
        assert "at most 100" in verify(path, raises=False).problems[0]


def test_an_archive_that_is_deeper_is_unpacked_and_not_loaded(
    unlimited: Callable[[], None], tmp_path: pathlib.Path
) -> None:
    nested(MAX_LEVELS + 1).memmap(tmp_path / "x.tdz")
    unlimited()
    unpack_memmap(tmp_path / "x.tdz", tmp_path / "x")
    with pytest.raises(SaveError, match="at most 100"):
        load_memmap(tmp_path / "x")
    # A subfolder of a save is itself a save.
    assert innermost(load_memmap(tmp_path / "x" / "n"))[1] == MAX_LEVELS


def test_names_of_other_programs_are_nested_to_the_limit(tmp_path: pathlib.Path) -> None:
    for levels in (MAX_LEVELS, MAX_LEVELS + 1):
        name = ".".join(["n"] * levels + ["x"])
        header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        path = tmp_path / f"{levels}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1, 2))
    loaded, count = innermost(call_below(FRAMES, lambda: TensorDict.from_safetensors(tmp_path / "100.safetensors")))
    assert count == MAX_LEVELS and loaded["x"].tolist() == [1, 2]
    with pytest.raises(SaveError, match=r"101 levels, and a container at most 100.*separator=None"):
        TensorDict.from_safetensors(tmp_path / "101.safetensors")
    assert list(TensorDict.from_safetensors(tmp_path / "101.safetensors", separator=None).keys()) == [name]


def test_writing_into_an_open_store_has_the_limit(tmp_path: pathlib.Path) -> None:
    with nested(MAX_LEVELS - 1).to_h5(tmp_path / "x.h5") as data:
        deep = ("n",) * (MAX_LEVELS - 1)
        data[(*deep, "below")] = TensorDict({"y": torch.zeros(2)}, [2])
        with pytest.raises(SaveError, match="at most 100"):
            data[(*deep, "more")] = TensorDict({"below": {"y": torch.zeros(2)}}, [2])
        assert data[(*deep, "below", "y")].tolist() == [0, 0]
        assert (*deep, "more") not in data.keys(True)
    assert verify(tmp_path / "x.h5").ok


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_nested_as_deep_as_they_can_be_read(name: str, tmp_path: pathlib.Path) -> None:
    save, load = FORMATS[name]
    deep: Any = "x"
    for _ in range(MAX_LEVELS):
        deep = {"k": [deep]}
    save(TensorDict(v=NonTensorData(deep)), tmp_path / "saved")
    assert load(tmp_path / "saved")["v"] == deep
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(SaveError, match=r"entry 'v'.*nested too deeply"):
        save(TensorDict(v=NonTensorData(deep)), tmp_path / "deeper")
    assert "deeper" not in str(os.listdir(tmp_path))
