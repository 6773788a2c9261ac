"""Containers over mapped files, on their way to other processes."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from piped import leaf_of, serving, set_first, shared_memory

from cases import mark_slow
from tensordict import TensorClass, TensorDict, UnbatchedTensor, lazy_stack
from tensordict.core.exceptions import SaveError
from tensordict.memory import file_maps, kernel

ROWS, COLUMNS = 8, 1 << 17
BIG = ROWS * COLUMNS * 4  # bytes of the leaf that must not be copied
PAGE = os.sysconf("SC_PAGE_SIZE")
Make = Callable[[Path], Any]


class Sample(TensorClass):
    x: torch.Tensor
    label: str


def nested() -> TensorDict:
    return TensorDict(x=torch.zeros(ROWS, COLUMNS), inner={"y": torch.arange(ROWS)}, batch_size=[ROWS])


def ragged() -> TensorDict:
    rows = [torch.zeros(n, COLUMNS) for n in (2, 3)]
    return TensorDict(x=torch.nested.nested_tensor(rows, layout=torch.jagged), batch_size=[2])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": nested,
    "lazy": lambda: lazy_stack([nested(), nested()]),
    "tensorclass": lambda: Sample(x=torch.zeros(ROWS, COLUMNS), label="cat", batch_size=[ROWS]),
    "unbatched": lambda: TensorDict(scale=UnbatchedTensor(torch.zeros(2 * COLUMNS)), batch_size=[ROWS]),
    "ragged": ragged,
}


def consolidated(container: Any, folder: Path) -> Any:
    return container.consolidate(folder / "data.bin")


def loaded(container: Any, folder: Path) -> Any:
    container.consolidate(folder / "data.bin")
    return type(container).from_consolidated(folder / "data.bin")


def from_archive(container: Any, folder: Path) -> Any:
    container.save(folder / "data.tdz")
    return TensorDict.load(folder / "data.tdz")


def from_safetensors(container: Any, folder: Path) -> Any:
    container.to_safetensors(folder / "data.safetensors")
    return TensorDict.load(folder / "data.safetensors")


def open_archive(container: Any, folder: Path) -> Any:
    container.save(folder / "data.tdz")
    return TensorDict.load(folder / "data.tdz", mode="r+")


PRIVATE = [loaded, from_archive, from_safetensors]
SHARED = [consolidated, open_archive]


def replace(path: Path, save: Any) -> None:
    """Replace a file by another one of the same layout."""
    other = path.parent / "other"
    other.mkdir()
    save(nested() + 1, other)
    os.replace(other / path.name, path)
    other.rmdir()


def first_of(container: Any) -> float:
    leaf = leaf_of(container)
    return leaf[(0,) * leaf.dim()].item()


def echo(pipe: Any) -> None:
    """Take what comes, write 7 into its first element, say what that was, and send it all back when told to."""
    torch.set_num_threads(1)
    while (found := pipe.recv()) is not None:
        was = first_of(found)
        set_first(leaf_of(found), 7)
        pipe.send((was, leaf_of(found).sum().item(), type(found).__name__, shared_memory()))
        if pipe.recv():
            pipe.send((first_of(found), found))


@pytest.fixture(scope="module")
def forked() -> Iterator[Any]:
    yield from serving(echo, "fork")


@pytest.fixture(scope="module")
def spawned() -> Iterator[Any]:
    yield from serving(echo, "spawn")


def sent(container: Any, pipe: Any) -> tuple[float, float, str]:
    """The result of the other process, which needs memory only for its own writes."""
    before = shared_memory()
    pipe.send(container)
    was, total, name, theirs = pipe.recv()
    pipe.send(False)
    assert shared_memory() - before < BIG / 8 and theirs < BIG / 8
    return was, total, name


def here_again(value: Any) -> tuple[Any, int]:
    """A value that was sent to this very process, and the length of the message."""
    message = bytes(ForkingPickler.dumps(value))
    return pickle.loads(message), len(message)


# --- shared maps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_consolidated_into_a_file_is_the_same_memory_there(kind, forked, tmp_path):
    container = consolidated(KINDS[kind](), tmp_path)
    address = leaf_of(container).data_ptr()
    assert len(ForkingPickler.dumps(container)) < 4096
    assert sent(container, forked) == (0, 7, type(container).__name__)
    assert first_of(container) == 7 and leaf_of(container).data_ptr() == address
    set_first(leaf_of(container), 8)
    assert first_of(type(container).from_consolidated(tmp_path / "data.bin")) == 8


@pytest.mark.parametrize("save", SHARED)
def test_a_spawned_process_has_the_same_memory(save, spawned, tmp_path):
    container = save(nested(), tmp_path)
    assert sent(container, spawned)[:2] == (0, 7)
    assert first_of(container) == 7


@pytest.mark.parametrize("save", SHARED)
@pytest.mark.parametrize("index", [3, slice(2, 5), slice(1, 8, 3), (..., None)])
def test_views_of_shared_maps_are_references(save, index, forked, tmp_path):
    whole = save(nested(), tmp_path)
    assert len(ForkingPickler.dumps(whole[index])) < 4096
    sent(whole[index], forked)
    expected = nested()
    set_first(leaf_of(expected[index]), 7)
    assert (whole == expected).all()
    again = TensorDict.load(next(tmp_path.iterdir()))
    assert (again == expected).all()


def test_nested_containers_and_stacks_of_shared_maps_are_references(forked, tmp_path):
    whole = consolidated(TensorDict(deep=nested(), batch_size=[]), tmp_path)
    sent(whole["deep"], forked)
    assert whole["deep", "x"][0, 0] == 7
    (tmp_path / "more").mkdir()
    stack = lazy_stack([whole["deep"], consolidated(nested(), tmp_path / "more")])
    set_first(leaf_of(stack), 0)
    sent(stack, forked)
    assert whole["deep", "x"][0, 0] == 7
    sent([stack][0].tensordicts[1], forked)
    assert stack.tensordicts[1]["x"][0, 0] == 7


@pytest.mark.parametrize("method", ["forked", "spawned"])
def test_what_comes_back_is_the_same_storage(method, tmp_path, request):
    pipe = request.getfixturevalue(method)
    container = consolidated(nested(), tmp_path)
    pipe.send(container)
    pipe.recv()
    pipe.send(True)
    _, back = pipe.recv()
    assert back["x"].data_ptr() == container["x"].data_ptr() and back.is_consolidated() and back.is_locked


def test_a_tensor_out_of_a_shared_map_is_a_reference(tmp_path):
    container = consolidated(nested(), tmp_path)
    again, length = here_again(container["x"][2])
    again[0] = 5
    assert length < 4096 and container["x"][2, 0] == 5


@pytest.mark.parametrize("save", SHARED)
def test_shared_maps_of_files_that_are_gone_are_still_shared(save, forked, tmp_path):
    container = save(nested(), tmp_path)
    path = next(tmp_path.iterdir())
    replace(path, save)
    assert sent(container, forked)[:2] == (0, 7) and first_of(container) == 7
    path.unlink()
    set_first(leaf_of(container), 3)
    assert sent(container, forked)[:2] == (3, 7) and first_of(container) == 7


def test_the_other_strategy_of_torch_leaves_the_file_its_content(forked, tmp_path):
    container = consolidated(nested(), tmp_path)
    mp.set_sharing_strategy("file_system")
    try:
        sent(container, forked)
        sent(container[2:], forked)
        out = container.map(_set_and_return, chunksize=4, num_workers=1, mp_start_method="fork")
    finally:
        mp.set_sharing_strategy("file_descriptor")
    assert container["x"][:, 0].tolist() == [7, 0, 7, 0, 0, 0, 0, 0] and (out["x"][:, 1] == 9).all()
    again = TensorDict.from_consolidated(tmp_path / "data.bin")
    assert (again["x"] == container["x"]).all() and (again["x"][:, 1] == 9).all()


def test_what_is_in_a_file_is_shared_already(tmp_path):
    container = consolidated(nested(), tmp_path)
    address = container["x"].data_ptr()
    assert container.share_memory_().is_shared() and container["x"].data_ptr() == address
    container["x"].fill_(1)
    assert (TensorDict.from_consolidated(tmp_path / "data.bin")["x"] == 1).all()


# --- private maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forked", "spawned"])
@pytest.mark.parametrize("load", PRIVATE)
def test_a_private_map_is_one_on_both_sides(load, method, tmp_path, request):
    pipe = request.getfixturevalue(method)
    container = load(nested(), tmp_path)
    assert len(ForkingPickler.dumps(container)) < 4096
    assert sent(container, pipe) == (0, 7, "TensorDict")
    assert first_of(container) == 0
    container["x"][5] = 2
    set_first(leaf_of(container), 4)
    assert sent(container[...], pipe)[:2] == (4, 7 + 2 * COLUMNS)
    assert first_of(container) == 4 and first_of(TensorDict.load(next(tmp_path.iterdir()))) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_sent_as_a_private_map(kind, forked, tmp_path):
    container = loaded(KINDS[kind](), tmp_path)
    set_first(leaf_of(container), 3)
    message = len(ForkingPickler.dumps(container))
    assert PAGE <= message < 4 * PAGE
    assert sent(container, forked) == (3, 7, type(container).__name__)
    assert first_of(container) == 3


def test_what_comes_back_has_what_was_written_on_both_sides(forked, tmp_path):
    container = loaded(nested(), tmp_path)
    container["x"][7, -1] = 5
    forked.send(container)
    forked.recv()
    container["x"][7, -1] = 6
    set_first(leaf_of(container), 1)
    forked.send(True)
    first, back = forked.recv()
    assert first == 7 and back["x"][0, 0] == 7 and back["x"][7, -1] == 5 and back.is_consolidated()
    assert container["x"][0, 0] == 1


@pytest.mark.parametrize("load", PRIVATE)
def test_all_that_was_written_arrives(load, tmp_path):
    # The last tensor ends within a page, and what is written to begins and ends anywhere.
    td = TensorDict(x=torch.arange(1 << 18), y=torch.zeros(3, 1001, dtype=torch.int8), batch_size=[])
    container = load(td, tmp_path)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        start, length = (int(n) for n in torch.randint(0, 3000, (2,), generator=generator))
        at = int(torch.randint(0, 80, (), generator=generator)) * 3000 + start
        container["x"][at : at + length] += 1
    container["y"][2, 1000] = 4
    again, length = here_again(container)
    assert (again == container).all() and (again != td).any()
    assert length < container["x"].nbytes // 4


@pytest.mark.parametrize("load", [*PRIVATE, *SHARED])
def test_leaves_of_other_forms_beside_it(load, tmp_path):
    td = nested().set("none", torch.zeros(ROWS, 0)).set("later", torch.zeros(ROWS))
    container = load(td, tmp_path)
    mixed = container.copy().set("apart", torch.arange(ROWS)).set("transposed", container["x"][:, :9].T.T)
    again, length = here_again(mixed)
    assert (again == mixed).all() and again["none"].shape == (ROWS, 0) and length < 8192
    assert again["transposed"].stride() == (COLUMNS, 1)
    first, second = here_again([container[0], container["inner"]])[0]
    assert first["x"].untyped_storage()._cdata == second["y"].untyped_storage()._cdata


def test_without_a_pagemap_all_of_it_is_sent(tmp_path, monkeypatch):
    container = loaded(nested(), tmp_path)
    set_first(leaf_of(container), 3)
    monkeypatch.setattr(kernel, "_PAGEMAP", str(tmp_path / "none"))
    again, length = here_again(container)
    assert (again == container).all() and length > BIG and again["x"].data_ptr() != container["x"].data_ptr()
    # One that says too little is none either.
    (tmp_path / "none").write_bytes(bytes(16))
    again, length = here_again(container)
    assert (again == container).all() and length > BIG


@pytest.mark.parametrize("load", PRIVATE)
@pytest.mark.parametrize("early", [False, True])
def test_private_maps_of_files_that_are_gone_arrive_as_they_were(load, early, tmp_path):
    container = load(nested(), tmp_path)
    set_first(leaf_of(container), 3)
    path = next(tmp_path.iterdir())
    if early:
        # From here on there is a descriptor.
        here_again(container)
    replace(path, load)
    again, length = here_again(container)
    assert (again == container).all() and (length < BIG) is early
    path.unlink()
    again, length = here_again(container[3])
    assert (again == container[3]).all() and (length < BIG) is early


def test_a_file_that_was_cut_off_is_an_error(tmp_path):
    for save in (consolidated, loaded):
        container = save(nested(), tmp_path)
        os.truncate(tmp_path / "data.bin", BIG // 2)
        with pytest.raises(SaveError, match=r"data\.bin.* was cut off"):
            ForkingPickler.dumps(container)
        (tmp_path / "data.bin").unlink()


def test_sharing_a_private_map_moves_it(tmp_path, forked):
    container = loaded(nested(), tmp_path).share_memory_()
    forked.send(container)
    forked.recv()
    forked.send(False)
    assert first_of(container) == 7 and first_of(TensorDict.load(tmp_path / "data.bin")) == 0


def test_plain_pickles_have_the_content(tmp_path):
    for save in (consolidated, loaded):
        container = save(nested(), tmp_path)
        content = pickle.dumps(container)
        (tmp_path / "data.bin").unlink()
        assert len(content) > BIG and (pickle.loads(content) == container).all()


# --- map --------------------------------------------------------------------------------------------------------------


def _set_and_return(chunk: Any) -> Any:
    chunk["x"][:, 1] = 9
    return chunk


def _sums(chunk: Any) -> Any:
    return TensorDict(
        total=chunk["x"].sum(-1),
        at=chunk["inner", "y"],
        shared=torch.full((len(chunk),), shared_memory()),
        batch_size=chunk.batch_size,
    )


FROM_FILES = [(load, method) for method in ("fork", "spawn", "pool") for load in (*PRIVATE, *SHARED)]
QUICK_FROM_FILES = [case for case in FROM_FILES if case[1] != "spawn" or case[0] in (loaded, consolidated)]


@pytest.mark.parametrize(("load", "method"), mark_slow(FROM_FILES, keep=QUICK_FROM_FILES))
def test_map_over_a_file_copies_nothing(load, method, tmp_path):
    container = load(nested(), tmp_path)
    container["x"][2, 3] = 4
    before, address = shared_memory(), container["x"].data_ptr()
    if method == "pool":
        # OpenMP's threads do not survive a fork.
        with mp.get_context("fork").Pool(1, torch.set_num_threads, (1,)) as pool:
            found = container.map(_sums, chunksize=4, pool=pool)
    else:
        found = container.map(_sums, chunksize=4, num_workers=1, mp_start_method=method)
    assert found["total"].tolist() == [0, 0, 4, 0, 0, 0, 0, 0] and found["at"].tolist() == list(range(ROWS))
    assert container["x"].data_ptr() == address
    assert shared_memory() - before < BIG / 8 and (found["shared"] < BIG / 8 + before).all()


@pytest.mark.parametrize("load", [*PRIVATE, *SHARED])
def test_what_map_writes_into_chunks_goes_where_the_map_goes(load, tmp_path):
    container = load(nested(), tmp_path)
    found = container.map(_set_and_return, chunksize=4, num_workers=2, mp_start_method="fork")
    assert (found["x"][:, 1] == 9).all() and found["x"].sum() == 9 * ROWS
    expected = 9.0 * ROWS if load in SHARED else 0.0
    assert container["x"].sum() == expected and TensorDict.load(next(tmp_path.iterdir()))["x"].sum() == expected


@pytest.mark.parametrize("save", SHARED)
def test_results_go_into_a_file_in_the_workers(save, tmp_path):
    out = save(nested(), tmp_path)
    assert nested().map(_set_and_return, chunksize=4, num_workers=2, mp_start_method="fork", out=out) is out
    assert TensorDict.load(next(tmp_path.iterdir()))["x"].sum() == 9 * ROWS


# --- upkeep -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [*PRIVATE, *SHARED])
def test_maps_and_descriptors_go_with_the_tensors(load, tmp_path):
    def open_here() -> int:
        gc.collect()
        return sum(str(tmp_path) in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))

    assert open_here() == 0
    container = load(nested(), tmp_path)
    again, _ = here_again(container)
    assert open_here() > 0 and file_maps.Finder().of(container["x"]) and file_maps.Finder().of(again["x"])
    address = container["x"].data_ptr()
    del container, again
    assert open_here() == 0 and address not in file_maps._known


def test_other_memory_is_in_no_map(tmp_path):
    container = loaded(nested(), tmp_path)
    finder = file_maps.Finder()
    assert finder and finder.of(torch.zeros(5)) is None and finder.of(container.clone()["x"]) is None
    assert finder.of(container["inner", "y"][3:]) is finder.of(container["x"]) is not None


def test_maps_that_outlive_their_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Python exits, the names of a module are gone before all that was made by it is."""
    path = tmp_path / "x.memmap"
    path.write_bytes(b"01234567")
    with open(path, "rb") as file:
        tensor = file_maps.map_bytes(file.fileno(), 8, str(path))
    address = tensor.data_ptr()
    known = file_maps._known
    monkeypatch.setattr(file_maps, "_known", None)
    # An exception in `__del__` becomes a warning, and warnings are errors here.
    del tensor
    gc.collect()
    assert address not in known
