"""State dicts, files of `torch.save` and of safetensors, and deep copies, on every kind of container."""

from __future__ import annotations

import copy
import io
import pathlib
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from tensordict import from_safetensors


def same(found: Any, td: Any) -> bool:
    """Compare keys and tensors of two containers, each read through its container."""
    keys = set(td.keys(True, True))
    return set(found.keys(True, True)) == keys and all(torch.equal(found.get(key), td.get(key)) for key in keys)


@pytest.mark.parametrize("flatten", [True, False])
def test_state_dict_and_back(td: Any, kind: Kind, build: Any, flatten: bool) -> None:
    if kind.is_module:
        pytest.skip("its state dict is that of a module")
    state = td.state_dict(flatten=flatten)
    if flatten:
        assert set(state) == {".".join([key] if isinstance(key, str) else key) for key in td.keys(True, True)}
    other = build()
    with torch.no_grad():
        other.zero_()
    assert not same(other, td)
    assert other.load_state_dict(state) is other
    assert same(other, td) and other.is_locked == build().is_locked
    assert (other.batch_size, other.names) == (td.batch_size, td.names)


def test_a_state_dict_that_does_not_fit_changes_nothing(td: Any, kind: Kind) -> None:
    if kind.is_module:
        pytest.skip("its state dict is that of a module")
    state = td.state_dict()
    before = td.clone()
    name = sorted(state)[0]
    changed = {other: torch.zeros_like(value) for other, value in state.items()}
    changed["more"] = changed.pop(name)
    changed[sorted(state)[1]] = torch.zeros(1, 2, 3, 4, 5)
    with pytest.raises(RuntimeError, match=r"missing.*not in the container: 'more'.*\[1, 2, 3, 4, 5\]"):
        td.load_state_dict(changed)
    assert same(td, before)


def test_torch_save_and_back(td: Any, kind: Kind) -> None:
    file = io.BytesIO()
    torch.save(td, file)
    file.seek(0)
    again = torch.load(file, weights_only=not kind.is_module)
    assert same(again, td) and again.is_locked == td.is_locked
    assert (again.batch_size, again.names, again.device) == (td.batch_size, td.names, td.device)
    if kind.gives_own_class:
        assert type(again) is type(td)


def test_safetensors_and_back(td: Any, tmp_path: pathlib.Path) -> None:
    td.to_safetensors(tmp_path / "td.safetensors")
    again = from_safetensors(tmp_path / "td.safetensors")
    assert same(again, td) and (again.batch_size, again.names) == (td.batch_size, td.names)


def test_deep_copies_share_nothing(td: Any) -> None:
    before = td.clone()
    copied = copy.deepcopy(td)
    assert same(copied, td) and not copied.is_locked
    assert (copied.batch_size, copied.names, copied.device) == (td.batch_size, td.names, td.device)
    copied.zero_()
    assert same(td, before)
