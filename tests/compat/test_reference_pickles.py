"""Pickles and files of `torch.save` that the reference wrote; `data/pickles/pickled_kinds.py` says what is in them."""

from __future__ import annotations

import io
import pathlib
import pickle
import shutil
import subprocess
import sys
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from tensordict import NonTensorData, PersistentTensorDict, TensorDict, TensorDictParams, is_tensor_collection
from tensordict.core.exceptions import SaveError
from tensordict.io.formats.pickled_containers import make, rebuild
from tensordict.nn.module import TensorDictModule

ROOT = pathlib.Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "data" / "pickles"
sys.path.insert(0, str(SAMPLES))
import pickled_kinds  # noqa: E402

NAMES = list(pickled_kinds.KINDS)
# Files that the reference loads with `weights_only=True`, given the names of its classes.
WITHOUT_CODE = [
    name
    for name in NAMES
    if not isinstance(made := pickled_kinds.KINDS[name](), nn.Module)
    and (is_tensor_collection(made) or name.startswith("state"))
    and name != "own"
]
OWN = [getattr(pickled_kinds, name) for name in ("Labelled", "Outer", "Frozen", "Typed")]


def check_container(found: Any, made: Any) -> None:
    assert type(found) is type(made)
    assert found.batch_size == made.batch_size
    if made._is_non_tensor:
        assert found.tolist() == made.tolist()
        return
    assert (found.device, found.names) == (made.device, made.names)
    assert set(found.keys()) == set(made.keys())
    if (members := made._wrapped_container()._members()) is not None:
        for one, other in zip(found._wrapped_container()._members(), members, strict=True):
            check_container(one, other)
        return
    for name in made.keys():
        check(found._entries[name], made._entries[name])


def check(found: Any, made: Any) -> None:
    """Check a loaded object against the pickled one."""
    if isinstance(made, torch.Tensor):
        assert type(found) is type(made)
        assert found.requires_grad is made.requires_grad
        if made.is_nested:
            assert found.layout is made.layout
            found, made = found.values(), made.values()
        torch.testing.assert_close(found, made, rtol=0, atol=0)
    elif is_tensor_collection(made):
        check_container(found, made)
    elif isinstance(made, nn.Module):
        check_module(found, made)
    elif isinstance(made, dict):
        assert list(found) == list(made)
        for key, value in made.items():
            check(found[key], value)
    elif isinstance(made, torch.distributions.Distribution):
        sample = made.mean
        torch.testing.assert_close(found.log_prob(sample), made.log_prob(sample))
    else:
        assert found == made


def check_module(found: nn.Module, made: nn.Module) -> None:
    assert [type(module) for module in found.modules()] == [type(module) for module in made.modules()]
    check(dict(found.state_dict()), dict(made.state_dict()))
    for name in ("in_keys", "out_keys", "out_keys_source"):
        assert getattr(found, name, None) == getattr(made, name, None)
    if isinstance(made, pickled_kinds.Net):
        check(found.stats, made.stats)
        check(found.params, made.params)
    elif hasattr(made, "in_keys"):
        results = [module(TensorDict(a=torch.ones(3, 2), batch_size=[3])) for module in (found, made)]
        check_container(*results)
    else:
        torch.testing.assert_close(found(torch.ones(2)), made(torch.ones(2)))


def loaded(name: str, suffix: str, folder: pathlib.Path = SAMPLES) -> Any:
    path = folder / f"{name}.{suffix}"
    return pickle.loads(path.read_bytes()) if suffix == "pkl" else torch.load(path, weights_only=False)


@pytest.mark.parametrize("suffix", ["pkl", "pt"])
@pytest.mark.parametrize("name", NAMES)
def test_each_kind_loads(name: str, suffix: str) -> None:
    found, made = loaded(name, suffix), pickled_kinds.KINDS[name]()
    check(found, made)
    # Consolidated containers are locked; the reference pickles the earlier lock.
    if is_tensor_collection(made) and not name.startswith("consolidated"):
        assert found.is_locked is made.is_locked


@pytest.mark.parametrize("name", NAMES)
def test_what_was_loaded_can_be_pickled_and_changed(name: str) -> None:
    found = loaded(name, "pkl")
    check(pickle.loads(pickle.dumps(found)), pickled_kinds.KINDS[name]())
    if isinstance(found, TensorDict) and not found.is_locked:
        found["new"] = torch.zeros(found.batch_size)
        found.lock_()
        with pytest.raises(RuntimeError, match="lock"):
            found["newer"] = 1


@pytest.mark.parametrize("name", WITHOUT_CODE)
def test_containers_load_without_code(name: str) -> None:
    # The reference needs these too: the classes of the program, and what is in the state of its parameters.
    with torch.serialization.safe_globals([*OWN, deque, set]):
        found = torch.load(SAMPLES / f"{name}.pt", weights_only=True)
    check(found, pickled_kinds.KINDS[name]())


def test_nothing_has_to_be_imported_or_allowed() -> None:
    program = f"import sys, torch, tensordict; print(torch.load({str(SAMPLES / 'dense.pt')!r})['n', 'b'].sum().item())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "3.0"


def test_what_is_shared_stays_shared() -> None:
    found = loaded("shared", "pt")
    assert found["x"] is found["y"]
    found["x"][1] = 7
    assert found["z"][0] == 7


def test_parameters_are_those_of_the_module() -> None:
    net = loaded("module", "pkl")
    names = [name for name, _ in net.named_parameters()]
    assert names == ["params.a", "params.n.b", "layer.weight", "layer.bias"]
    assert net.params["a"] is dict(net.named_parameters())["params.a"]
    assert net.to(torch.float64).params["a"].dtype is torch.float64


def test_selected_out_keys_can_be_reset() -> None:
    module = loaded("td_module_selected", "pkl")
    assert not module._forward_hooks_with_kwargs
    assert module.reset_out_keys().out_keys == ["b", "c"]
    assert not module._forward_hooks


def test_consolidated_containers_stay_so() -> None:
    found = loaded("consolidated", "pt")
    pointers = {found[key].untyped_storage().data_ptr() for key in ("a", ("n", "b"))}
    assert len(pointers) == 1


def test_mapped_leaves_are_those_of_their_files(tmp_path: pathlib.Path) -> None:
    made = pickled_kinds.mapped(str(tmp_path))
    content = (SAMPLES / "mapped.pkl").read_bytes().replace(b"FOLDER", str(tmp_path).encode())
    found = pickle.loads(content)
    check_container(found, made)
    assert found.is_memmap()
    assert found["a"].filename == str(tmp_path / "a.memmap")
    made["a"][0] = 9
    assert found["a"][0] == 9


def unpickled_over(folder: pathlib.Path, mode: str, source: pathlib.Path = SAMPLES) -> Any:
    """Return pickles that the reference made over its own HDF5 file, and copy the file to this folder."""
    shutil.copy(source / "hdf5.h5", folder / "data.h5")
    content = (source / f"hdf5_{mode}.pkl").read_bytes()
    return pickle.loads(content.replace(b"FOLDER", str(folder).encode()))


@pytest.mark.parametrize("mode", pickled_kinds.FILE_MODES)
def test_containers_over_files_open_theirs(tmp_path: pathlib.Path, mode: str) -> None:
    found = unpickled_over(tmp_path, mode)
    opened = found["h"] if mode == "inside" else found
    assert type(opened) is PersistentTensorDict and opened.batch_size == (3,)
    inner = opened if mode == "group" else opened["n"]
    assert inner["b"].tolist() == [1, 1, 1] and inner["m", "c"].shape == (3, 1)
    with opened:
        if mode in ("r+", "w"):
            # "w" would have emptied the file.
            opened["a"] = opened["a"] + 1
            assert opened["a"].tolist() == [[1, 2], [3, 4], [5, 6]]
            assert opened._options == ({"compression": "gzip"} if mode == "w" else {})
        else:
            with pytest.raises(SaveError, match="reading only"):
                inner["b"] = torch.zeros(3)


def test_files_that_do_not_fit_their_pickle_are_refused(tmp_path: pathlib.Path) -> None:
    unpickled_over(tmp_path, "r").close()
    state = {"filename": str(tmp_path / "data.h5"), "mode": "r", "group_name": "/", "kwargs": {}}
    state |= {"_nested_tensordicts": {}, "_batch_size": torch.Size([3]), "_device": None}
    for part, wrong, error in (
        ("filename", "missing.h5", FileNotFoundError),
        ("filename", b"data.h5", SaveError),
        ("group_name", "/q", KeyError),
        ("kwargs", {"external": "x"}, TypeError),
        ("kwargs", None, SaveError),
        ("_nested_tensordicts", {"n": open}, SaveError),
        ("_batch_size", torch.Size([4]), SaveError),
        ("_batch_size", (3,), SaveError),
        ("_device", "cpu", SaveError),
    ):
        with pytest.raises(error):
            PersistentTensorDict.__new__(PersistentTensorDict).__setstate__({**state, part: wrong})
    with open(tmp_path / "data.h5", "rb+") as file:
        file.truncate(100)
    with pytest.raises(SaveError):
        PersistentTensorDict.__new__(PersistentTensorDict).__setstate__(state)


@pytest.mark.parametrize(
    "state",
    [
        {"_td_dim_names": None},
        {"_td_dim_names": None, "_tensordict": {"a": 1}, "_batch_size": torch.Size([])},
        {"_td_dim_names": None, "_tensordict": {"a": torch.zeros(2)}, "_batch_size": torch.Size([3])},
        {"_td_dim_names": [1], "_tensordict": {}, "_batch_size": torch.Size([3])},
        {"_td_dim_names": ["x", "y"], "_tensordict": {}, "_batch_size": torch.Size([3])},
        {"_td_dim_names": None, "_tensordict": {}, "_batch_size": [3]},
        {"_td_dim_names": None, "_tensordict": {}, "_batch_size": torch.Size([]), "_device": "cpu"},
        {"tensordicts": [1], "stack_dim": 0, "_batch_size": torch.Size([1])},
        {"tensordicts": None, "stack_dim": 0, "_batch_size": torch.Size([1])},
        {"tensordicts": [], "stack_dim": 0, "_batch_size": torch.Size([0]), "_td_dim_name": 3},
        {"non_tensordict": {"data": 1}},
        {"_source": 1},
    ],
)
def test_what_does_not_add_up_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(SaveError, match="add up"):
        make(TensorDict, state)


def test_what_is_no_container_is_refused() -> None:
    with pytest.raises(SaveError, match="no container"):
        make(subprocess.Popen, {})
    with pytest.raises(SaveError, match="no container"):
        make(TensorDict, None)
    with pytest.raises(SaveError, match="inconsistent"):
        TensorDictParams.__new__(TensorDictParams).__setstate__({"_param_td": 1, "no_convert": False})
    with pytest.raises(SaveError, match="add up"):
        NonTensorData.__new__(NonTensorData).__setstate__({"tensordict": 1, "non_tensordict": {"data": 1}})


def test_consolidated_descriptions_are_checked() -> None:
    storage = torch.zeros(8, dtype=torch.uint8)
    metadata = {"device": None, "names": [None], "batch_size": [2], "is_locked": False}
    good = {"cls": "TensorDict", "non_tensors": {}, "leaves": {}, "cls_metadata": metadata}
    assert rebuild(good, storage).batch_size == torch.Size([2])
    for leaf in [
        ("torch.float32", [2], 0, 16, 0),
        ("torch.float32", [2], 4, 12, 0),
        ("torch.float32", [3], 0, 8, 0),
        3,
    ]:
        with pytest.raises(SaveError):
            rebuild({**good, "leaves": {"a": leaf}}, storage)
    for bad in [None, {}, {**good, "cls": "Nothing"}, {**good, "cls": subprocess.Popen}]:
        with pytest.raises(SaveError):
            rebuild(bad, storage)
    for bytes_ in [None, storage.float(), storage[None]]:
        with pytest.raises(SaveError):
            rebuild(good, bytes_)


def test_functions_are_not_unpickled_without_code() -> None:
    path = SAMPLES / "td_module_function.pt"
    names = [(TensorDictModule, "tensordict.nn.common.TensorDictModule")]
    with torch.serialization.safe_globals(names), pytest.raises(SaveError, match="weights_only=False"):
        torch.load(path, weights_only=True)


@pytest.mark.reference
def test_what_the_reference_pickles_today(tmp_path: pathlib.Path) -> None:
    python = ROOT / ".venv-reference-0.14" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not installed here")
    subprocess.run([python, SAMPLES / "pickled_kinds.py", tmp_path], check=True, timeout=120)
    for name, made in pickled_kinds.KINDS.items():
        for suffix in ("pkl", "pt"):
            check(loaded(name, suffix, tmp_path), made())
    (tmp_path / "data").mkdir()
    for mode in pickled_kinds.FILE_MODES:
        assert unpickled_over(tmp_path / "data", mode, tmp_path).batch_size == (3,)


def test_old_formats_are_read_from_buffers() -> None:
    # `torch.load` of an open file, as programs with remote storage have it.
    content = io.BytesIO((SAMPLES / "lazy_unequal.pt").read_bytes())
    check(torch.load(content), pickled_kinds.KINDS["lazy_unequal"]())
