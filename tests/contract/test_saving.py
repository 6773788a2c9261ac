"""The directory format on every kind of container."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, append_memmap, lazy_stack
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.io.formats import opening as formats
from tensordict.io.formats.detect import detect_format
from tensordict.memmap import MemoryMappedTensor


def check(found: Any, td: Any, kind: Kind, mapped: bool = True) -> None:
    keys = set(td.keys(True, True))
    assert set(found.keys(True, True)) == keys
    assert all(torch.equal(found.get(key), td.get(key)) for key in keys)
    assert (found.batch_size, found.names) == (td.batch_size, td.names)
    assert not mapped or all(isinstance(leaf, MemoryMappedTensor) for leaf in found._leaves())
    if kind.gives_own_class or (kind.stack_dims and kind.in_memory):
        assert type(found) is type(td)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_memmap_and_back(td: Any, kind: Kind, num_threads: int, tmp_path: pathlib.Path) -> None:
    saved = td.memmap(tmp_path / "saved", copy_existing=True, num_threads=num_threads)
    loaded = TensorDict.load_memmap(tmp_path / "saved")
    for found in (saved, loaded, td.memmap(copy_existing=True)):
        check(found, td, kind)
    assert saved.is_memmap() and saved.is_locked and saved.device == torch.device("cpu")
    assert not loaded.is_locked
    with pytest.raises(RuntimeError, match="existsok=True"):
        td.memmap(tmp_path / "saved", copy_existing=True, existsok=False)
    check(loaded.memmap_refresh_(), td, kind)


def test_memmap_in_place(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    if not kind.in_memory or not kind.reads_memory or kind.is_module:
        pytest.skip("its entries cannot be replaced by other tensors")
    before = td.clone()
    assert td.memmap_(tmp_path / "saved", copy_existing=True) is td
    # The leaves of a view are views of the mapped ones.
    check(td, before, kind, mapped=kind.keeps_identity)
    td.zero_()
    assert all(not value.any() for value in TensorDict.load_memmap(tmp_path / "saved").values(True, True))


def test_memmap_like(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    like = td.memmap_like(tmp_path / "saved", copy_existing=True)
    for found in (like, TensorDict.load_memmap(tmp_path / "saved")):
        check(found, torch.zeros_like(td), kind)


def test_memmap_like_opens_what_is_there(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    first = td.memmap_like(tmp_path / "saved")
    first.update_(td)
    again = td.memmap_like(tmp_path / "saved")
    check(again, td, kind)
    assert type(again) is type(first) and again.is_memmap() and again.is_locked
    assert again.saved_path == first.saved_path
    again.zero_()
    check(first, torch.zeros_like(td), kind)
    first.update_(td)
    with pytest.raises(RuntimeError, match="existsok=True"):
        td.memmap_like(tmp_path / "saved", existsok=False)
    check(td.memmap_like(tmp_path / "saved", overwrite=True), torch.zeros_like(td), kind)


def test_memmap_like_adds_what_is_not_there(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    first = TensorDict({"td": td}, td.batch_size[:1]).memmap_like(tmp_path / "saved")
    first["td"].update_(td)
    wanted = TensorDict({"more": torch.ones(td.batch_size), "td": td, "again": td}, td.batch_size[:1])
    added = wanted.memmap_like(tmp_path / "saved")
    for found in (added, TensorDict.load_memmap(tmp_path / "saved")):
        check(found["td"], td, kind)
        check(found["again"], torch.zeros_like(td), kind)
        assert not found["more"].any()
    added["td"].zero_()
    check(first["td"], torch.zeros_like(td), kind)


def test_memmap_like_shares_no_memory(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    for source in (td.memmap(copy_existing=True), td.memmap(tmp_path / "saved", copy_existing=True)):
        for like in (source.memmap_like(), source.memmap_like(tmp_path / "other", overwrite=True)):
            check(like, torch.zeros_like(td), kind)
            check(source, td, kind)


VIEWS: dict[str, Any] = {
    "item": lambda td: td[0],
    "slice": lambda td: td[:1],
    "none": lambda td: td[None],
    "view": lambda td: td.view(1, *td.batch_size),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "squeeze": lambda td: td.unsqueeze(1).squeeze(1),
    "permute": lambda td: td.unsqueeze(0).permute(1, 0, *range(2, td.ndim + 1)),
    "transpose": lambda td: td.unsqueeze(0).transpose(0, 1),
    "narrow": lambda td: td.narrow(0, 0, 1),
    "split": lambda td: td.split(1)[0],
    "unbind": lambda td: td.unbind(0)[0],
    "iteration": lambda td: next(iter(td)),
    "lazy stack": lambda td: lazy_stack([td, td]),
    "lazy stack of items": lambda td: lazy_stack(list(td)),
}
COPIES: dict[str, Any] = {
    "rows": lambda td: td[torch.tensor([0])],
    "clone": lambda td: td.clone(),
    "roll": lambda td: td.roll(1, 0),
    "stack": lambda td: torch.stack([td, td]),
    "lazy stack with another": lambda td: lazy_stack([td, td.clone()]),
}


@pytest.mark.parametrize("way", ["memmap", "shared"])
def test_what_views_say_of_their_memory(way: str, td: Any, kind: Kind) -> None:
    source = td.memmap(copy_existing=True) if way == "memmap" else td.to_tensordict().share_memory_()
    if not source.batch_dims:
        pytest.skip("has no batch dims to make views along")
    said = {}
    for name, make in (VIEWS | COPIES).items():
        if isinstance(source._wrapped_container(), LazyStackedTensorDict) and name in ("view", "roll", "rows"):
            # Across the members it is a copy; rows are members.
            continue
        made = make(source)
        nested = [value for value in made.values(True) if isinstance(value, TensorDictBase)]
        flags = {(node.is_memmap(), node.is_shared(), node.is_locked) for node in (made, *nested)}
        expected = (way == "memmap", way == "shared", True)
        said[name] = flags == {expected} if name in VIEWS else not (made.is_memmap() or made.is_shared())
    assert said == dict.fromkeys(said, True)


def test_loading_some_entries(td: Any, tmp_path: pathlib.Path) -> None:
    td.memmap(tmp_path / "saved", copy_existing=True)
    for key in td.keys(True, True):
        found = TensorDict.load_memmap(tmp_path / "saved", keys=[key])
        assert list(found.keys(True, True)) == [key] and torch.equal(found.get(key), td.get(key))


@pytest.mark.parametrize("suffix", [".tdz", ".consolidated", ".safetensors", ".h5", ".zarr"])
def test_save_and_load_go_by_the_suffix(td: Any, kind: Kind, suffix: str, tmp_path: pathlib.Path) -> None:
    if suffix == ".zarr":
        pytest.importorskip("zarr", reason="zarr needs Python 3.11")
    path = tmp_path / f"saved{suffix}"
    saved = td.save(path)
    assert detect_format(path) == formats.SUFFIXES[suffix]
    if suffix in (".h5", ".zarr"):
        saved.close()
    loaded = TensorDict.load(path)
    check(loaded.to_tensordict(), td.to_tensordict(), replace(kind, gives_own_class=False, stack_dims=()), mapped=False)
    if suffix in (".h5", ".zarr"):
        loaded.close()
    with pytest.raises(ValueError, match=r"x\.h5'.*num_threads"):
        td.save(tmp_path / "x.h5", num_threads=2)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_tables_go_by_the_suffix(td: Any, kind: Kind, suffix: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"saved{suffix}"
    if not kind.batch_size:
        with pytest.raises(UnsupportedEntryError, match=f"saved{suffix}.*cannot hold.*'.tdz'"):
            td.save(path)
        assert not path.exists()
        return
    assert td.save(path) is td
    loaded = TensorDict.load(path)
    assert loaded.batch_size[:1] == td.batch_size[:1]
    for key in td.keys(True, True):
        assert torch.equal(loaded[key].to(td.get(key).dtype), td.get(key))
    with pytest.raises(UnsupportedEntryError, match=r"saved\.csv.*cannot hold"):
        td.save(tmp_path / "saved.csv")
    assert not (tmp_path / "saved.csv").exists()


def test_appended_rows(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    td.memmap(tmp_path / "saved", copy_existing=True)
    if not kind.batch_size or kind.stack_dims:
        with pytest.raises(ValueError, match="no batch dims|cannot grow"):
            append_memmap(tmp_path / "saved", td)
        check(TensorDict.load_memmap(tmp_path / "saved"), td, kind)
        return
    append_memmap(tmp_path / "saved", td)
    found = TensorDict.load_memmap(tmp_path / "saved")
    assert found.batch_size == (2 * kind.batch_size[0], *kind.batch_size[1:]) and found.names == td.names
    for rows in (found[: kind.batch_size[0]], found[kind.batch_size[0] :]):
        assert all(torch.equal(rows.get(key), td.get(key)) for key in td.keys(True, True))


def test_an_atomic_save_needs_a_path(td: Any, tmp_path: pathlib.Path) -> None:
    for save in (td.memmap, td.save, td.dumps) if not td.is_memmap() else ():
        with pytest.raises(ValueError, match="needs a path"):
            save(atomic=True)
    td.memmap(tmp_path / "saved", copy_existing=True, atomic=True)
    assert set(TensorDict.load_memmap(tmp_path / "saved").keys(True, True)) == set(td.keys(True, True))


def test_a_private_map_keeps_the_save(td: Any, kind: Kind, tmp_path: pathlib.Path) -> None:
    td.memmap(tmp_path / "saved", copy_existing=True)
    TensorDict.load_memmap(tmp_path / "saved", mode="r").zero_()
    check(TensorDict.load_memmap(tmp_path / "saved"), td, kind)
    TensorDict.load_memmap(tmp_path / "saved", mode="r+").zero_()
    assert not any(leaf.any() for leaf in TensorDict.load_memmap(tmp_path / "saved")._leaves())
