"""Pickles and files of `torch.save` that this package wrote before its modules moved into rooms.

`data/earlier_pickles/more_kinds.py` says what is in them, with `data/pickles/pickled_kinds.py`.
"""

from __future__ import annotations

import copy
import importlib
import pathlib
import pickle
import sys
from typing import Any

import pytest
import torch

import tensordict
from test_reference_pickles import OWN, check, check_container

SAMPLES = pathlib.Path(__file__).parent / "data" / "earlier_pickles"
sys.path.insert(0, str(SAMPLES))
import more_kinds  # noqa: E402
from more_kinds import pickled_kinds  # noqa: E402

# Torch says so whenever it puts a pickled `TreeSpec` together.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")

# Every name of the package that pickles of that time can hold, and that has moved since.
NAMES = {
    "tensordict.errors": "LockedError MissingKeyError SaveError ShapeError WorkerError",
    "tensordict.following": "FollowingMetaData FollowingNonTensorData FollowingNonTensorStack",
    "tensordict.holders": "HolderContext HolderFields",
    "tensordict.lazy": "LazyStackedTensorDict",
    "tensordict.lazy.members": "Members",
    "tensordict.lazy.stack": "LazyStackedTensorDict",
    "tensordict.lazy.vmapping": "LazyContext",
    "tensordict.legacy": "LazyView",
    "tensordict.memmap": "MemoryMappedTensor _from_file",
    "tensordict.nontensor": "MetaData NonTensorData NonTensorDataBase NonTensorStack",
    "tensordict.persistent": "PersistentTensorDict",
    "tensordict.pickling": "over_storage unpacked",
    "tensordict.prototype.fx": "TDGraphModule",
    "tensordict.pytree": "Context",
    "tensordict.tensorclass": "TensorClass",
    "tensordict.tensordict": "TensorDict",
    "tensordict.typed": "TypedTensorDict",
    "tensordict.unbatched": "UnbatchedTensor",
    "tensordict.utils": "isin remove_duplicates expand_right",
    "tensordict.views": "NESTED_TENSORS_AS_LISTS NESTED_TENSORS_AS_LISTS_NONTENSOR",
}


@pytest.mark.parametrize("path", [f"{module} {name}" for module, names in NAMES.items() for name in names.split()])
def test_names_in_pickles(path: str) -> None:
    module, name = path.split()
    found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert getattr(found, "__name__", name) == name
    # One object under both names, not a second one.
    assert found is getattr(importlib.import_module(found.__module__), name)


@pytest.mark.parametrize("name", more_kinds.MOVED)
def test_containers_load(name: str) -> None:
    found, made = pickle.loads((SAMPLES / f"{name}.pkl").read_bytes()), pickled_kinds.KINDS[name]()
    check(found, made)
    check(pickle.loads(pickle.dumps(found)), made)


@pytest.mark.parametrize("name", more_kinds.SAVED)
@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_containers_load(name: str, weights_only: bool) -> None:
    with torch.serialization.safe_globals(OWN):
        found = torch.load(SAMPLES / f"{name}.pt", weights_only=weights_only)
    check(found, pickled_kinds.KINDS[name]())


@pytest.mark.parametrize("name", more_kinds.KINDS)
def test_other_objects_load(name: str) -> None:
    found, made = pickle.loads((SAMPLES / f"{name}.pkl").read_bytes()), more_kinds.KINDS[name]()
    if isinstance(made, Exception):
        assert type(found) is type(made) and str(found) == str(made)
    elif name == "typed_value":
        assert type(found) is type(made) and found.data == made.data
    else:
        check(found, made)


def test_mapped_leaves_are_those_of_their_files(tmp_path: pathlib.Path) -> None:
    made = pickled_kinds.mapped(str(tmp_path))
    found = pickle.loads((SAMPLES / "mapped.pkl").read_bytes().replace(b"FOLDER", str(tmp_path).encode()))
    check_container(found, made)
    assert found["a"].filename == str(tmp_path / "a.memmap")


def test_the_old_paths_are_not_copies() -> None:
    old: Any = importlib.import_module("tensordict.nontensor")
    assert old.NonTensorData is tensordict.NonTensorData
    assert copy.copy(tensordict.NonTensorData("x")).__class__ is old.NonTensorData
