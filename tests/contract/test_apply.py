"""apply, apply_ and named_apply with all their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, addresses, as_key, assert_matches, changed, leaves, mapped
from tensordict import TensorDict


def only_ints(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.dtype == torch.int64 else None


def test_apply(td: Any, plain: Plain, kind: Kind) -> None:
    result = td.apply(changed)
    assert_matches(result, mapped(changed, plain), kind.batch_size, kind.extra)
    assert not result.is_locked and result.names == td.names and result.device == td.device
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_apply_with_others(td: Any, plain: Plain, kind: Kind) -> None:
    result = td.apply(lambda x, y, z: torch.stack([x, y, z], -1), td, td)
    expected = mapped(lambda leaf: torch.stack([leaf] * 3, -1), plain)
    assert_matches(result, expected, kind.batch_size, kind.extra)
    with pytest.raises(KeyError, match="a"):
        td.apply(lambda x, y: x, td.exclude("a"))


def test_apply_default(td: Any, plain: Plain, kind: Kind) -> None:
    other = td.exclude("a")
    result = td.apply(lambda x, y: x if y is None else changed(y), other, default=None)
    assert_matches(result, mapped(changed, plain) | {"a": plain["a"]}, kind.batch_size, kind.extra)


def test_apply_new_batch_size(td: Any, plain: Plain, kind: Kind) -> None:
    result = td.apply(lambda x: x.unsqueeze(0), batch_size=[1, *kind.batch_size])
    assert_matches(result, mapped(lambda leaf: leaf.unsqueeze(0), plain), (1, *kind.batch_size))
    assert td.apply(changed, batch_size=[]).batch_size == torch.Size([])
    if kind.batch_size:
        with pytest.raises(RuntimeError):
            td.apply(lambda x: x.new_zeros(7, 7))


def test_apply_refuses_names_that_do_not_fit(td: Any) -> None:
    """A container with more names than batch dims could be saved, and not be loaded again."""
    calls: list[Any] = []
    for options in ({}, {"batch_size": []}):
        with pytest.raises(RuntimeError, match=r"do not fit \d batch dims"):
            td.apply(calls.append, names=["x"] * 7, **options)
    assert not calls


def test_apply_names_and_device(td: Any, kind: Kind) -> None:
    names = [f"dim{i}" for i in range(len(kind.batch_size))]
    if kind.names is None:
        assert td.apply(changed, names=names).names == names
    assert td.apply(changed, device="cpu").device == torch.device("cpu")
    assert td.apply(changed, device=None).device is None


def test_apply_in_place(td: Any, plain: Plain, kind: Kind) -> None:
    memory = addresses(td)
    assert td.apply(changed, inplace=True) is td
    assert_matches(td, mapped(changed, plain), kind.batch_size, kind.extra)
    assert td.apply_(changed) is td
    assert_matches(td, plain, kind.batch_size, kind.extra)
    assert not kind.in_memory or addresses(td) == memory


def test_apply_in_place_runs_for_its_effect(td: Any, plain: Plain, kind: Kind) -> None:
    td.apply_(lambda x: x.zero_())
    assert_matches(td, mapped(torch.zeros_like, plain), kind.batch_size, kind.extra)


def test_apply_filters(td: Any, plain: Plain, kind: Kind) -> None:
    assert_matches(td.apply(only_ints), {"a": plain["a"]}, kind.batch_size)
    assert_matches(td.apply(only_ints, filter_empty=True), {"a": plain["a"]}, kind.batch_size)
    kept = td.apply(only_ints, filter_empty=False)
    assert_matches(kept, {"a": plain["a"]} | ({"b": {"d": {}}} if kind.nested else {}), kind.batch_size)
    assert td.apply(lambda x: None) is None
    assert td.apply(lambda x: None, filter_empty=True) is None
    assert td.apply(lambda x: None, filter_empty=False).is_empty()


def test_apply_keeps_empty_nodes_by_default() -> None:
    td = TensorDict({"hollow": {}, "x": 1})
    assert set(td.apply(changed).keys()) == {"hollow", "x"}
    assert set(td.apply(changed, filter_empty=True).keys()) == {"x"}


def test_apply_propagates_the_lock(td: Any) -> None:
    td.lock_()
    assert not td.apply(changed).is_locked
    assert td.apply(changed, propagate_lock=True).is_locked


def test_apply_on_nodes(td: Any, plain: Plain, kind: Kind) -> None:
    seen: list[type] = []

    def note(value: Any) -> Any:
        seen.append(type(value))
        return value.clone()

    result = td.apply(note, call_on_nested=True)
    assert len(seen) == sum(kind.calls((name,)) for name in plain)
    nested = [name for name, value in plain.items() if isinstance(value, dict)]
    assert sum(not issubclass(cls, torch.Tensor) for cls in seen) == sum(kind.calls((name,)) for name in nested)
    assert_matches(result, plain, kind.batch_size, kind.extra)


def test_apply_out(td: Any, plain: Plain, kind: Kind) -> None:
    out = td.empty()
    assert td.apply(changed, out=out) is out
    assert_matches(out, mapped(changed, plain), kind.batch_size)


def test_out_replaces_entries(writable: Any, build: Callable[[], Any], plain: Plain, kind: Kind) -> None:
    td, mask = build(), torch.zeros(kind.batch_size, dtype=torch.bool)
    other = td.apply(changed)
    for write in (lambda out: td.apply(changed, out=out), lambda out: td.where(mask, other, out=out)):
        out = build().unlock_()
        shared = out.copy()
        assert write(out) is out
        assert_matches(out, mapped(changed, plain), kind.batch_size)
        if kind.in_memory:
            assert_matches(shared, plain, kind.batch_size)
    assert writable.apply(changed, out=writable) is writable
    assert_matches(writable, mapped(changed, plain), kind.batch_size)


def test_a_locked_out_is_refused(td: Any, build: Callable[[], Any], plain: Plain, kind: Kind) -> None:
    out, mask = build().lock_(), torch.ones(kind.batch_size, dtype=torch.bool)
    for write in (lambda: td.apply(changed, out=out), lambda: td.where(mask, td, out=out)):
        with pytest.raises(RuntimeError, match="lock"):
            write()
    assert_matches(out, plain, kind.batch_size, kind.extra)


def test_the_lock_is_propagated_to_out(td: Any, kind: Kind) -> None:
    out = td.empty()
    td.lock_()
    assert td.apply(changed, out=out, propagate_lock=True) is out and out.is_locked


def test_apply_with_names(td: Any, plain: Plain, kind: Kind) -> None:
    for nested_keys in (False, True):
        called: list[Any] = []
        expected: list[Any] = []
        td.apply(lambda name, x, called=called: called.append(name), named=True, nested_keys=nested_keys)
        td.named_apply(lambda name, x, called=expected: called.append(name), nested_keys=nested_keys)
        assert called == expected and len(called) >= len(leaves(plain))
    td.apply_(lambda name, x: changed(x) if name == "a" else x, named=True)
    assert_matches(td, plain | {"a": changed(plain["a"])}, kind.batch_size, kind.extra)


def test_named_apply(td: Any, plain: Plain, kind: Kind) -> None:
    short: list[str] = []
    full: list[Any] = []
    td.named_apply(lambda name, x: short.append(name))
    td.named_apply(lambda name, x: full.append(name), nested_keys=True)
    called = [path for path in leaves(plain) for _ in range(kind.pieces(path))]
    assert sorted(short) == sorted(path[-1] for path in called)
    assert sorted(full, key=str) == sorted((as_key(path) for path in called), key=str)
    result = td.named_apply(lambda name, x, y: changed(y) if name == "a" else x, td)
    assert_matches(result, plain | {"a": changed(plain["a"])}, kind.batch_size, kind.extra)


def test_an_error_in_the_function_surfaces(td: Any, plain: Plain, kind: Kind) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    for inplace in (False, True):
        with pytest.raises(ZeroDivisionError):
            td.apply(fail, inplace=inplace)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_apply_moves_to_the_device(td: Any) -> None:
    result = td.apply(lambda x: x, device="meta")
    assert result.device == torch.device("meta")
    assert {leaf.device.type for leaf in result._leaves()} == {"meta"}
    assert td.apply(lambda x: x, device="cpu").device == torch.device("cpu")
    assert td.apply(lambda x: x, device=None).device is None
