"""`clone`, `copy`, deep copies and pickling."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict import MemoryMappedTensor, TensorDict


def make(**kwargs: Any) -> TensorDict:
    return TensorDict({"a": torch.rand(3, 4), "b": {"c": torch.arange(3)}}, [3], **kwargs)


@pytest.mark.parametrize("clone", [TensorDict.clone, torch.clone, copy.deepcopy, TensorDict.to_tensordict])
def test_a_deep_copy_shares_nothing(clone: Any) -> None:
    td = make(device="cpu", names=["x"]).lock_()
    cloned = clone(td)
    assert type(cloned) is TensorDict
    assert not cloned.is_locked
    assert not cloned["b"].is_locked
    assert cloned.device == cloned["b"].device == torch.device("cpu")
    assert cloned.names == cloned["b"].names == ["x"]
    assert (cloned == td).all()
    cloned["a"].zero_()
    cloned["b", "new"] = torch.zeros(3)
    assert td["a"].any()
    assert ("b", "new") not in td.keys(True)


@pytest.mark.parametrize("shallow", [TensorDict.copy, copy.copy, lambda td: td.clone(recurse=False)])
def test_a_shallow_copy_shares_leaves_only(shallow: Any) -> None:
    td = make(device="cpu", names=["x"]).lock_()
    copied = shallow(td)
    assert not copied.is_locked
    assert copied["a"] is td["a"]
    assert copied["b"] is not td["b"]
    assert copied["b", "c"] is td["b", "c"]
    assert copied.names == ["x"]
    assert copied["b"].device == torch.device("cpu")
    copied["b", "new"] = torch.zeros(3)
    assert ("b", "new") not in td.keys(True)


def test_clone_is_differentiable_and_takes_a_memory_format() -> None:
    leaf = torch.ones(2, 3, 4, 5, requires_grad=True)
    td = TensorDict(a=leaf)
    td.clone()["a"].sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))
    assert td.clone(memory_format=torch.channels_last)["a"].is_contiguous(memory_format=torch.channels_last)


def test_a_clone_of_a_memory_mapped_container_is_in_memory() -> None:
    td = make().memmap_()
    assert type(td.clone()["a"]) is torch.Tensor
    assert not td.clone().is_memmap()
    assert isinstance(td.copy()["a"], MemoryMappedTensor)
    assert not td.copy().is_memmap()


def test_deepcopy_keeps_identities_and_parameters() -> None:
    shared = torch.zeros(2)
    node = TensorDict(x=torch.zeros(2))
    td = TensorDict({"a": shared, "b": {"c": shared}, "p": torch.nn.Parameter(torch.ones(2))})
    td["n1"] = node
    td._entries["n2"] = td["n1"]
    copied = copy.deepcopy(td)
    assert copied["a"] is copied["b", "c"]
    assert copied["a"] is not shared
    assert copied["n1"] is copied["n2"]
    assert isinstance(copied["p"], torch.nn.Parameter)
    assert copied["p"] is not td["p"]
    memo: dict[int, Any] = {}
    first = copy.deepcopy([td, td], memo)
    assert first[0] is first[1]


def test_deepcopy_in_the_middle_of_a_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 2
    copied = copy.deepcopy(TensorDict(a=inner, b=inner))
    assert copied["a"] is copied["b"]
    assert copied["a"] is not inner
    copied["a"].sum().backward()
    assert leaf.grad.tolist() == [2, 2]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol: int) -> None:
    td = make(device="cpu", names=["x"])
    loaded = pickle.loads(pickle.dumps(td, protocol))
    assert type(loaded) is TensorDict
    assert (loaded == td).all()
    assert loaded.batch_size == loaded["b"].batch_size == torch.Size([3])
    assert loaded.device == loaded["b"].device == torch.device("cpu")
    assert loaded.names == loaded["b"].names == ["x"]
    assert not loaded.is_locked
    loaded["new"] = torch.zeros(3)


def test_a_locked_container_unpickles_locked_with_its_owners() -> None:
    td = make()
    td["deep"] = TensorDict({"er": {"est": torch.zeros(3)}}, [3])
    loaded = pickle.loads(pickle.dumps(td.lock_()))
    assert loaded.is_locked
    assert loaded["b"].is_locked
    with pytest.raises(RuntimeError, match="locked"):
        loaded["new"] = torch.zeros(3)
    for key in ("b", ("deep", "er")):
        with pytest.raises(RuntimeError, match="nested in a locked one"):
            loaded[key].unlock_()
    loaded.unlock_()
    for key in ("b", "deep", ("deep", "er")):
        assert not loaded[key].is_locked
        assert loaded[key]._lock_owners is None


def test_an_unpickled_child_is_free_once_its_parent_is_gone() -> None:
    loaded = pickle.loads(pickle.dumps(make().lock_()))
    child = loaded["b"]
    del loaded
    gc.collect()
    child.unlock_()
    assert not child.is_locked


def test_a_child_pickled_without_its_locked_parent_is_free() -> None:
    td = make().lock_()
    child = pickle.loads(pickle.dumps(td["b"]))
    assert child.is_locked
    child.unlock_()


def test_pickle_within_a_block() -> None:
    td = make().lock_()
    with td.unlock_():
        loaded = pickle.loads(pickle.dumps(td))
        assert not loaded.is_locked
        view = pickle.loads(pickle.dumps(td.view(3)))
    assert td.is_locked
    assert loaded._undo is None
    assert view._undo is None
    with pytest.raises(RuntimeError, match="can be undone"), loaded:
        raise AssertionError


def test_pickle_of_a_memory_mapped_container_refers_to_its_files(tmp_path: Path) -> None:
    td = make().memmap_(tmp_path / "saved")
    data = pickle.dumps(td)
    loaded = pickle.loads(data)
    assert loaded.is_memmap()
    assert loaded.is_locked
    assert isinstance(loaded["a"], MemoryMappedTensor)
    assert loaded["a"].filename == td["a"].filename
    td["a"].fill_(7)
    assert (loaded["a"] == 7).all()
    loaded.unlock_()
    assert not loaded.is_memmap()


def test_identities_survive_pickling() -> None:
    shared = torch.zeros(2)
    loaded = pickle.loads(pickle.dumps(TensorDict({"a": shared, "b": {"c": shared}})))
    assert loaded["a"] is loaded["b", "c"]


def test_torch_save() -> None:
    buffer = io.BytesIO()
    td = make(names=["x"])
    torch.save(td, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert (loaded == td).all()
    assert loaded.names == ["x"]
