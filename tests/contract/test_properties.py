"""Properties of single operations on drawn structures, compared with a plain nested dict of tensors."""

from __future__ import annotations

import copy
import pickle
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from contract.model import (
    as_path,
    assert_leaf,
    assert_matches,
    changed,
    index_map,
    leaves,
    mapped,
    nested_keys,
    picked,
    replaced,
)
from strategies import batch_sizes, indices, shuffled_dims, simple_names, structures, trees
from tensordict import TensorDict, load_memmap

Drawn = tuple[dict[str, Any], tuple[int, ...]]


@given(structures())
def test_construction_and_to_dict(drawn: Drawn) -> None:
    plain, batch_size = drawn
    td = TensorDict(plain, batch_size)
    assert_matches(td, plain, batch_size, {})
    assert_matches(TensorDict(td.to_dict(), batch_size), plain, batch_size, {})
    assert_matches(TensorDict(dict(leaves(plain)), batch_size), plain_without_empty(plain), batch_size, {})


def plain_without_empty(plain: dict[str, Any]) -> dict[str, Any]:
    """The dicts that hold no leaf anywhere cannot be told by the leaves' keys."""
    return {
        name: plain_without_empty(value) if isinstance(value, dict) else value
        for name, value in plain.items()
        if not isinstance(value, dict) or leaves(value)
    }


@given(structures())
def test_keys_in_order(drawn: Drawn) -> None:
    plain, batch_size = drawn
    td = TensorDict(plain, batch_size)
    assert list(td.keys()) == list(plain)
    assert [as_path(key) for key in td.keys(True)] == nested_keys(plain)
    assert [as_path(key) for key in td.keys(True, True)] == list(leaves(plain))
    for (key, value), (path, leaf) in zip(td.items(True, True), leaves(plain).items(), strict=True):
        assert as_path(key) == path
        assert_leaf(value, leaf, key)


@given(st.data(), structures(min_side=1))
def test_reading_an_index(data: st.DataObject, drawn: Drawn) -> None:
    plain, batch_size = drawn
    index = data.draw(indices(batch_size))
    numbers = index_map(batch_size)[index]
    assert_matches(TensorDict(plain, batch_size)[index], picked(plain, batch_size, numbers), numbers.shape, {})


@given(st.data(), structures(min_side=1))
def test_assigning_to_an_index(data: st.DataObject, drawn: Drawn) -> None:
    plain, batch_size = drawn
    index = data.draw(indices(batch_size))
    numbers = index_map(batch_size)[index]
    values = mapped(other_values, picked(plain, batch_size, numbers))
    td = TensorDict(mapped(torch.clone, plain), batch_size)
    td[index] = TensorDict(values, numbers.shape)
    assert_matches(td, replaced(plain, batch_size, numbers, values), batch_size, {})


def other_values(leaf: torch.Tensor) -> torch.Tensor:
    return leaf + 1 if leaf.dtype in (torch.uint8, torch.complex64) else changed(leaf)


@given(structures(keys=simple_names()))
def test_flatten_keys_round_trip(drawn: Drawn) -> None:
    plain, batch_size = drawn
    plain = plain_without_empty(plain)
    td = TensorDict(plain, batch_size)
    flat = td.flatten_keys("::")
    assert_matches(flat, {"::".join(path): leaf for path, leaf in leaves(plain).items()}, batch_size)
    assert_matches(flat.unflatten_keys("::"), plain, batch_size, {})


@given(st.data(), structures(min_dims=1))
def test_permute_and_back(data: st.DataObject, drawn: Drawn) -> None:
    plain, batch_size = drawn
    dims = data.draw(shuffled_dims(batch_size))
    td = TensorDict(plain, batch_size)
    turned = td.permute(*dims)
    numbers = index_map(batch_size).permute(dims)
    assert_matches(turned, picked(plain, batch_size, numbers), numbers.shape, {})
    back = [dims.index(i) for i in range(len(dims))]
    assert_matches(turned.permute(back), plain, batch_size, {})


@given(structures(min_dims=1, min_side=1))
def test_view_and_back(drawn: Drawn) -> None:
    plain, batch_size = drawn
    td = TensorDict(plain, batch_size)
    assert_matches(td.view(-1), picked(plain, batch_size, index_map(batch_size).view(-1)), None, {})
    assert_matches(td.view(-1).view(batch_size), plain, batch_size, {})
    assert_matches(td.flatten().unflatten(0, batch_size), plain, batch_size, {})
    assert_matches(td.unsqueeze(0).squeeze(0), plain, batch_size, {})


@given(st.data(), structures(min_dims=1, min_side=1))
def test_unbind_stack_and_split_cat(data: st.DataObject, drawn: Drawn) -> None:
    plain, batch_size = drawn
    dim = data.draw(st.integers(-len(batch_size), len(batch_size) - 1))
    size = data.draw(st.integers(1, 3))
    td = TensorDict(plain, batch_size)
    assert_matches(torch.stack(td.unbind(dim), dim), plain, batch_size, {})
    parts = td.split(size, dim)
    assert [part.batch_size for part in parts] == [part.shape for part in torch.zeros(batch_size).split(size, dim)]
    assert_matches(torch.cat(parts, dim), plain, batch_size, {})
    assert_matches(torch.cat(td.chunk(size, dim), dim), plain, batch_size, {})


@given(structures())
def test_copies_are_independent(drawn: Drawn) -> None:
    plain, batch_size = drawn
    td = TensorDict(mapped(torch.clone, plain), batch_size)
    for again in (td.clone(), pickle.loads(pickle.dumps(td)), copy.deepcopy(td), td.to_tensordict()):
        assert_matches(again, plain, batch_size, {})
        again.zero_()
        again.clear()
    assert_matches(td, plain, batch_size, {})


@given(structures())
def test_pytree_round_trip(drawn: Drawn) -> None:
    plain, batch_size = drawn
    flat, spec = pytree.tree_flatten(TensorDict(plain, batch_size))
    assert_matches(pytree.tree_unflatten(flat, spec), plain, batch_size, {})


@given(st.data(), structures(keys=simple_names(), min_size=1))
def test_select_and_exclude_part_the_leaves(data: st.DataObject, drawn: Drawn) -> None:
    plain, batch_size = drawn
    paths = list(leaves(plain))
    assume(paths)
    chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, unique=True))
    td = TensorDict(plain, batch_size)
    inside, outside = td.select(*chosen), td.exclude(*chosen)
    assert {as_path(key) for key in inside.keys(True, True)} == set(chosen)
    assert {as_path(key) for key in outside.keys(True, True)} == set(paths) - set(chosen)
    assert_matches(inside, plain_without_empty(inside.to_dict()), batch_size, {})
    merged = outside.update(inside)
    assert_matches(merged, plain, batch_size, {})


@given(st.data(), batch_sizes())
def test_update_merges(data: st.DataObject, batch_size: tuple[int, ...]) -> None:
    first = data.draw(trees(batch_size, simple_names()))
    second = data.draw(trees(batch_size, simple_names()))
    td = TensorDict(first, batch_size)
    assert td.update(second) is td
    assert_matches(td, merged_plain(first, second), batch_size, {})


def merged_plain(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    result = dict(first)
    for name, value in second.items():
        old = result.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[name] = merged_plain(old, value) if both else value
    return result


@given(structures(), st.sampled_from([torch.float64, torch.int32, torch.bool, torch.bfloat16]))
def test_to_dtype(drawn: Drawn, dtype: torch.dtype) -> None:
    plain, batch_size = drawn
    assume(not any(leaf.is_complex() for leaf in leaves(plain).values()))
    assert_matches(TensorDict(plain, batch_size).to(dtype), mapped(lambda x: x.to(dtype), plain), batch_size, {})


@given(structures())
def test_comparison(drawn: Drawn) -> None:
    plain, batch_size = drawn
    td = TensorDict(plain, batch_size)
    assert (td == td.clone()).all() and not (td != td.clone()).any()
    assert_matches(td == 3, mapped(lambda leaf: leaf == 3, plain), batch_size, {})


@given(st.data(), structures(min_dims=1, min_side=1))
def test_gather(data: st.DataObject, drawn: Drawn) -> None:
    plain, batch_size = drawn
    dim = data.draw(st.integers(0, len(batch_size) - 1))
    length = data.draw(st.integers(0, 3))
    shape = [length if i == dim else size for i, size in enumerate(batch_size)]
    index = torch.arange(index_map(tuple(shape)).numel()).reshape(shape) % batch_size[dim]
    numbers = index_map(batch_size).gather(dim, index)
    result = TensorDict(plain, batch_size).gather(dim, index)
    assert_matches(result, picked(plain, batch_size, numbers), numbers.shape, {})


@given(structures(keys=simple_names()))
def test_lock_and_unlock(drawn: Drawn) -> None:
    plain, batch_size = drawn
    td = TensorDict(plain, batch_size).lock_()
    with pytest.raises(RuntimeError):
        td["fresh"] = torch.zeros(batch_size)
    assert_matches(td, plain, batch_size, {})
    td.unlock_()["fresh"] = torch.zeros(batch_size)
    assert_matches(td, plain | {"fresh": torch.zeros(batch_size)}, batch_size, {})


@given(structures())
def test_repr_shows_every_key(drawn: Drawn) -> None:
    plain, batch_size = drawn
    text = repr(TensorDict(plain, batch_size))
    for path in nested_keys(plain):
        assert f"{'    ' * 2 * len(path)}{path[-1]}: " in text


@given(structures())
def test_saving_and_loading(drawn: Drawn) -> None:
    plain, batch_size = drawn
    with tempfile.TemporaryDirectory() as folder:
        TensorDict(plain, batch_size).memmap(folder)
        assert_matches(load_memmap(folder), plain, batch_size, {})
