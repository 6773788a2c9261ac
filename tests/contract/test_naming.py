"""Names of dims on every kind of container."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, assert_matches, nodes
from tensordict import TensorDict
from tensordict.core.exceptions import NamesError

ALPHABET = ["t", "u", "v", "w"]


@pytest.fixture
def named(td: Any, kind: Kind) -> Any:
    """The container, its dims named t, u, v."""
    td.names = ALPHABET[: len(kind.batch_size)]
    return td


def assert_named(container: Any, plain: Plain, names: list[str | None]) -> None:
    """The container and all nested ones call their leading dims by these names."""
    assert container.names == names
    for path in nodes(plain):
        assert container[path].names[: len(names)] == names, path
        assert len(container[path].names) == len(container[path].batch_size)


def test_names_reach_nested_containers(named: Any, plain: Plain, kind: Kind) -> None:
    assert_named(named, plain, ALPHABET[: len(kind.batch_size)])
    named.names = None
    assert_named(named, plain, [None] * len(kind.batch_size))
    assert_matches(named, plain, kind.batch_size, kind.extra)


def test_bad_names_change_nothing(named: Any, plain: Plain, kind: Kind) -> None:
    names = ALPHABET[: len(kind.batch_size)]
    for bad in ([*names, "x"], ["x"] * 5):
        with pytest.raises(NamesError, match="do not fit"):
            named.names = bad
        with pytest.raises(NamesError, match="do not fit"):
            named.rename(*bad)
        with pytest.raises(NamesError, match="do not fit"):
            named.refine_names(*bad)
    with pytest.raises(ValueError, match="no_such"):
        named.rename_(no_such="x")
    with pytest.raises(ValueError, match="both"):
        named.rename(*names, "x", t="x")
    if len(names) > 1:
        with pytest.raises(ValueError, match="once"):
            named.rename_(t="u")
        with pytest.raises(TypeError):
            named.names = [1] * len(names)
        with pytest.raises(NamesError, match="needs names"):
            named.rename_()
    with pytest.raises(TypeError):
        named.names = "tuvw"[: len(names)]
    assert_named(named, plain, names)


def test_rename(named: Any, plain: Plain, kind: Kind) -> None:
    names = ALPHABET[: len(kind.batch_size)]
    if not names:
        assert named.rename().names == []
        return
    renamed = named.rename(t="time")
    assert_named(renamed, plain, ["time", *names[1:]])
    assert_named(named, plain, names)
    assert_matches(renamed, plain, kind.batch_size, kind.extra)
    assert not renamed.is_locked
    assert_named(named.rename("x", ...), plain, ["x", *names[1:]])
    assert_named(named.rename(..., "x"), plain, [*names[:-1], "x"])
    assert_named(named.rename(..., None), plain, [*names[:-1], None])
    assert_named(named.rename(None), plain, [None] * len(names))
    assert_named(named.rename(*reversed(names)), plain, names[::-1])
    assert named.rename_(t="time") is named
    assert_named(named, plain, ["time", *names[1:]])
    with pytest.raises(ValueError, match=r"\.\.\."):
        named.rename(..., ...)


def test_refine_names(td: Any, plain: Plain, kind: Kind) -> None:
    td.names = None
    names = ALPHABET[: len(kind.batch_size)]
    if not names:
        return
    assert td.refine_names("t", ...) is td
    assert_named(td, plain, ["t", *[None] * (len(names) - 1)])
    td.refine_names(*names)
    td.refine_names(...)
    assert_named(td, plain, names)
    with pytest.raises(RuntimeError) as info:
        td.refine_names("other", ...)
    assert str(names) in str(info.value) and "other" in str(info.value)
    with pytest.raises(RuntimeError):
        td.refine_names(None, ...)
    assert_named(td, plain, names)


def test_carried_through_operations(named: Any, plain: Plain, kind: Kind) -> None:
    names: list[str | None] = list(ALPHABET[: len(kind.batch_size)])
    assert_named(named.clone(), plain, names)
    assert_named(named.apply(lambda leaf: leaf == 0), plain, names)
    assert_named(named == named, plain, names)
    assert_named(named.unsqueeze(0), plain, [None, *names])
    if not names:
        return
    assert_named(named[0], plain, names[1:])
    assert_named(named[:1], plain, names)
    assert_named(named[[0]], plain, names)
    assert_named(named[None], plain, [None, *names])
    assert_named(named[..., 0], plain, names[:-1])
    assert_named(named.permute(*reversed(range(len(names)))), plain, names[::-1])
    assert_named(named.unbind(-1)[0], plain, names[:-1])
    assert_named(named.split(1)[0], plain, names)
    assert_named(torch.stack([named, named], -1), plain, [*names, None])
    assert_named(torch.cat([named, named]), plain, names)
    assert_named(named.any("t"), plain, names[1:])
    assert_named(named.sum(0, keepdim=True), plain, names)
    assert_named(named.flip(0), plain, names)
    assert_named(named.expand(2, *kind.batch_size), plain, [None, *names])


def test_disagreeing_names_are_an_error_that_shows_both(named: Any, kind: Kind) -> None:
    if not kind.batch_size:
        return
    other = named.rename(t="time")
    for join in (torch.stack, torch.cat):
        with pytest.raises(RuntimeError, match=r"'t'.*'time'"):
            join([named, other])
        with pytest.raises(ValueError, match=r"'time'.*'t'"):
            join([other, named.rename(None), named])
    plain_names = torch.stack([named, named.rename(None)]).names
    assert plain_names == [None] * (len(kind.batch_size) + 1)


def test_a_nested_container_of_other_names_is_refused(writable: Any, kind: Kind) -> None:
    if not kind.batch_size:
        return
    writable.names = ALPHABET[: len(kind.batch_size)]
    other = writable.rename(t="time")
    with pytest.raises(RuntimeError) as info:
        writable["other"] = other
    assert "'t'" in str(info.value) and "'time'" in str(info.value) and "'other'" in str(info.value)
    assert "other" not in writable.keys()
    writable["other"] = other.rename(None)
    assert writable["other"].names == writable.names
    deeper = writable.rename(None).select("a")
    deeper.batch_size = writable["a"].shape
    deeper.names = [*[None] * len(kind.batch_size), "t"]
    with pytest.raises(RuntimeError):
        writable["deeper"] = deeper


def test_a_container_without_names_takes_those_of_one_set_into_it(writable: Any, kind: Kind) -> None:
    size = kind.batch_size
    if not size or any(writable.names):
        pytest.skip("needs dims without names")
    names = ALPHABET[: len(size)]
    writable["new"] = TensorDict({"x": torch.zeros(size)}, size, names=names)
    assert writable.names == writable["new"].names == names
    with pytest.raises(RuntimeError, match="disagree"):
        writable["newer"] = TensorDict({}, size, names=[f"{name}x" for name in names])
    assert writable.names == names and "newer" not in writable
