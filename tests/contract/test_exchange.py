"""Containers as pytrees, pickles and deep copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from contract.kinds import Kind
from contract.model import Plain, addresses, assert_leaf, assert_matches, changed, leaves, mapped
from tensordict import TensorDict


def test_pytree_round_trip(td: Any, plain: Plain, kind: Kind) -> None:
    flat, spec = pytree.tree_flatten(td)
    assert len(flat) == sum(map(kind.pieces, leaves(plain)))
    again = pytree.tree_unflatten(flat, spec)
    assert_matches(again, plain, kind.batch_size, kind.extra)
    assert again.device == td.device and again.names == td.names


def test_pytree_map(td: Any, plain: Plain, kind: Kind) -> None:
    assert_matches(pytree.tree_map(changed, td), mapped(changed, plain), kind.batch_size, kind.extra)
    if kind.gives_own_class:
        both = pytree.tree_map(lambda x, y: x == y, td, td.clone())
        assert both.all()
    inside = pytree.tree_map(changed, {"deep": [td]})
    assert_matches(inside["deep"][0], mapped(changed, plain), kind.batch_size, kind.extra)


def test_pytree_map_that_drops_dimensions(td: Any, plain: Plain, kind: Kind) -> None:
    """The batch size shrinks to the dims that every leaf still has."""
    if kind.stack_dims:
        pytest.skip("a lazy stack is mapped member by member, so its stack dim stays")
    total = pytree.tree_map(lambda x: x.sum(), td)
    assert_matches(total, mapped(torch.sum, plain), ())


def test_pytree_paths(td: Any, plain: Plain, kind: Kind) -> None:
    if kind.stack_dims:
        pytest.skip("the paths go through the members of lazy stacks")
    flat, _ = pytree.tree_flatten_with_path(td)
    assert sorted(len(path) for path, _ in flat) == sorted(len(path) for path in leaves(plain))
    found = {tuple(entry.key for entry in path): leaf for path, leaf in flat}
    for path, leaf in leaves(plain).items():
        assert_leaf(found[path], leaf, path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(td: Any, plain: Plain, kind: Kind, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(td, protocol=protocol))
    # By the protocol of `torch.save` a container over a file, or a view, is pickled as what is read.
    assert type(again) is type(td) or (protocol == 2 and type(again) is type(td.clone()))
    assert_matches(again, plain, kind.batch_size, kind.extra)
    assert again.names == td.names and again.device == td.device and again.is_locked == td.is_locked
    if not again.is_locked and kind.in_memory:
        again["new"] = torch.zeros(kind.batch_size)
        assert "new" not in td.keys()


def test_pickled_lock_still_holds_children() -> None:
    again = pickle.loads(pickle.dumps(TensorDict({"n": {"x": 1}}, lock=True)))
    assert again.is_locked and again["n"].is_locked
    with pytest.raises(RuntimeError):
        again["n"].unlock_()
    again.unlock_()
    assert not again["n"].is_locked


def test_deepcopy(td: Any, plain: Plain, kind: Kind) -> None:
    again = copy.deepcopy(td)
    assert_matches(again, plain, kind.batch_size, kind.extra)
    assert again.names == td.names and again.device == td.device
    again.unlock_()
    assert not set(addresses(again)) & set(addresses(td))
    for path in leaves(plain):
        again.set_(path, changed(again[path]))
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_shallow_copy(td: Any, plain: Plain, kind: Kind) -> None:
    again = copy.copy(td)
    assert_matches(again, plain, kind.batch_size, kind.extra)
    if kind.in_memory:
        assert addresses(again) == addresses(td)
