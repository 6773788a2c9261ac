"""Reductions on every kind of container, each leaf compared with the same call on a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.kinds import Kind
from contract.model import Path, Plain, as_path, leaves, mapped, nodes
from tensordict import TensorDict, lazy_stack

# Torch warns of the standard deviation of one element, here and in the tensors compared with.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

Reduce = Callable[..., Tensor]

# The name, and the same reduction of a tensor over one dim after the other.
OPS: dict[str, Reduce] = {
    "sum": lambda v, *a: v.sum(*a),
    "nansum": lambda v, *a: v.nansum(*a),
    "mean": lambda v, *a: v.mean(*a),
    "nanmean": lambda v, *a: v.nanmean(*a),
    "amin": lambda v, *a: v.amin(*a),
    "amax": lambda v, *a: v.amax(*a),
    "std": lambda v, d=None, k=False: torch.std(v, d, keepdim=k),
    "var": lambda v, d=None, k=False: torch.var(v, d, keepdim=k),
}


def floats(plain: Plain) -> Plain:
    return mapped(lambda leaf: leaf.to(torch.float64) / 3, plain)


@pytest.fixture
def real(td: Any) -> Any:
    """The container with leaves that all reductions take."""
    return td.double() / 3


def compare(result: Any, expected: Plain, sizes: Callable[[Path], tuple[int, ...]]) -> None:
    """The result has these leaves, and every container in it the batch size that `sizes` gives for its path."""
    found = {as_path(key) for key in result.keys(True, True)}
    assert found == set(leaves(expected))
    for path, leaf in leaves(expected).items():
        torch.testing.assert_close(result[path], leaf, equal_nan=True)
    assert result.batch_size == torch.Size(sizes(()))
    for path in nodes(expected):
        assert result[path].batch_size == torch.Size(sizes(path)), path


def own_size(kind: Kind, path: Path) -> tuple[int, ...]:
    return (*kind.batch_size, *kind.extra.get(path, ()))


@pytest.mark.parametrize("name", OPS)
def test_over_each_batch_dim(real: Any, plain: Plain, kind: Kind, name: str) -> None:
    op, count = OPS[name], len(kind.batch_size)
    for dim in range(-count, count):
        at = dim % count
        expected = mapped(lambda leaf, at=at: op(leaf, at), floats(plain))
        size = lambda path, at=at: own_size(kind, path)[:at] + own_size(kind, path)[at + 1 :]  # noqa: E731
        compare(getattr(real, name)(dim), expected, size)
        expected = mapped(lambda leaf, at=at: op(leaf, at, True), floats(plain))
        size = lambda path, at=at: tuple(1 if i == at else n for i, n in enumerate(own_size(kind, path)))  # noqa: E731
        kept = getattr(real, name)(dim=dim, keepdim=True)
        compare(kept, expected, size)
        assert kept.names == real.names
        names = real.names
        assert getattr(real, name)(dim).names == names[:at] + names[at + 1 :]
        if names[at] is not None:
            compare(getattr(real, name)(names[at], True), expected, size)
    for dim in (count, -count - 1, "no such name"):
        with pytest.raises(IndexError):
            getattr(real, name)(dim)


@pytest.mark.parametrize("name", [*OPS, "prod", "logsumexp"])
def test_over_all_batch_dims(real: Any, plain: Plain, kind: Kind, name: str) -> None:
    dims = tuple(range(len(kind.batch_size)))
    if not dims:
        pytest.skip("no batch dims")

    def op(leaf: Tensor) -> Tensor:
        if name == "prod":
            for _ in dims:
                leaf = leaf.prod(0)
            return leaf
        return leaf.logsumexp(dims) if name == "logsumexp" else OPS[name](leaf, dims)

    result = getattr(real, name)(dims)
    compare(result, mapped(op, floats(plain)), lambda path: kind.extra.get(path, ()))
    if name == "logsumexp":
        compare(real.logsumexp(), mapped(op, floats(plain)), lambda path: kind.extra.get(path, ()))
    with pytest.raises(IndexError):
        getattr(real, name)((*dims, dims[0]))


@pytest.mark.parametrize("name", [*OPS, "prod", "min", "max"])
def test_over_everything(real: Any, plain: Plain, kind: Kind, name: str) -> None:
    expected = mapped(OPS.get(name) or (lambda leaf: getattr(leaf, name)()), floats(plain))
    for result in (getattr(real, name)(), getattr(real, name)(dim=None), getattr(real, name)(reduce=False)):
        compare(result, expected, lambda path: ())
        assert not result.is_locked
        assert result.device == real.device
    kept = getattr(real, name)(dim=None, keepdim=True)
    compare(kept, ones_like_dims(expected, plain), lambda path: (1,) * len(own_size(kind, path)))
    assert kept.names == real.names


def ones_like_dims(value: Any, original: Any) -> Any:
    """Scalars with as many dims of size 1 as the original has dims."""
    if isinstance(value, dict):
        return {key: ones_like_dims(inner, original[key]) for key, inner in value.items()}
    return value.reshape((1,) * original.ndim)


@pytest.mark.parametrize("name", [*OPS, "prod"])
def test_over_features(real: Any, plain: Plain, kind: Kind, name: str) -> None:
    def reduced(tree: Plain, path: Path) -> Plain:
        batch_dims = len(own_size(kind, path))
        flat = lambda v: v.reshape(*v.shape[:batch_dims], -1)  # noqa: E731
        op = OPS.get(name) or (lambda v, d: v.prod(d))
        return {
            key: reduced(value, (*path, key)) if isinstance(value, dict) else op(flat(value), -1)
            for key, value in tree.items()
        }

    result = getattr(real, name)(dim="feature")
    compare(result, reduced(floats(plain), ()), lambda path: own_size(kind, path))
    assert result.names == real.names
    with pytest.raises(TypeError, match="keepdim"):
        getattr(real, name)("feature", keepdim=True)


@pytest.mark.parametrize("name", [*OPS, "prod"])
def test_to_one_tensor(real: Any, plain: Plain, kind: Kind, name: str) -> None:
    op = OPS.get(name) or (lambda v, *a: v.prod(*a))
    found = list(leaves(floats(plain)).values())
    everything = torch.cat([leaf.flatten() for leaf in found])
    torch.testing.assert_close(getattr(real, name)(reduce=True), op(everything))
    count = len(kind.batch_size)
    rows = torch.cat([leaf.reshape(*kind.batch_size, -1) for leaf in found], -1)
    torch.testing.assert_close(getattr(real, name)("feature", reduce=True), op(rows, -1))
    if not count:
        return
    with pytest.raises(RuntimeError, match=r"'a' of shape .* 'mask' of shape"):
        getattr(real, name)(0, reduce=True)
    alike = real.apply(lambda leaf: leaf.reshape(*leaf.shape[:count], -1).sum(-1), batch_size=kind.batch_size)
    ends = torch.cat([leaf.reshape(*kind.batch_size, -1).sum(-1) for leaf in found], count - 1)
    torch.testing.assert_close(getattr(alike, name)(-1, reduce=True), op(ends, count - 1))
    torch.testing.assert_close(getattr(alike, name)(-1, True, reduce=True), op(ends, count - 1, True))


@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes_come_with_indices(td: Any, plain: Plain, kind: Kind, name: str) -> None:
    for dim in range(-len(kind.batch_size), len(kind.batch_size)):
        at = dim % len(kind.batch_size)
        size = lambda path, at=at: own_size(kind, path)[:at] + own_size(kind, path)[at + 1 :]  # noqa: E731
        result = getattr(td, name)(dim)
        assert isinstance(result, getattr(torch.return_types, name))
        compare(result.values, mapped(lambda leaf, at=at: getattr(leaf, name)(at).values, plain), size)
        compare(result.indices, mapped(lambda leaf, at=at: getattr(leaf, name)(at).indices, plain), size)
        values = getattr(td, name)(dim, return_indices=False)
        compare(values, mapped(lambda leaf, at=at: getattr(leaf, name)(at).values, plain), size)
        kept, _ = getattr(td, name)(dim, keepdim=True)
        assert kept.batch_size[at] == 1 and kept.names == td.names
    values, indices = getattr(td, name)("feature")
    for path, leaf in leaves(plain).items():
        batch_dims = len(own_size(kind, path[:-1]))
        expected = getattr(leaf.reshape(*leaf.shape[:batch_dims], -1), name)(-1)
        assert torch.equal(values[path], expected.values) and torch.equal(indices[path], expected.indices)
    row = torch.cat([leaf.reshape(*kind.batch_size, -1).double() for leaf in leaves(plain).values()], -1)
    assert torch.equal(getattr(td.double(), name)("feature", reduce=True).indices, getattr(row, name)(-1).indices)


@pytest.mark.parametrize("name", ["cummin", "cummax"])
def test_cumulated_extremes(td: Any, plain: Plain, kind: Kind, name: str) -> None:
    for dim in range(len(kind.batch_size)):
        pair = getattr(td, name)(dim)
        assert isinstance(pair, getattr(torch.return_types, name))
        for result, part in zip(pair, (0, 1), strict=True):
            expected = mapped(lambda leaf, dim=dim, part=part: getattr(leaf, name)(dim)[part], plain)
            compare(result, expected, lambda path: own_size(kind, path))
            assert result.names == td.names
        only = getattr(td, name)(dim, return_indices=False)
        compare(only, mapped(lambda leaf, dim=dim: getattr(leaf, name)(dim).values, plain), lambda p: own_size(kind, p))


def test_softmax(real: Any, plain: Plain, kind: Kind) -> None:
    for dim in range(-len(kind.batch_size), len(kind.batch_size)):
        at = dim % len(kind.batch_size)
        expected = mapped(lambda leaf, at=at: leaf.softmax(at), floats(plain))
        result = real.softmax(dim)
        compare(result, expected, lambda path: own_size(kind, path))
        assert result.names == real.names
        assert real.softmax(dim, torch.float32).dtype is torch.float32
    with pytest.raises(IndexError):
        real.softmax(len(kind.batch_size))


def test_norm(real: Any, plain: Plain, kind: Kind) -> None:
    result = real.norm()
    compare(result, mapped(lambda leaf: leaf.norm(), floats(plain)), lambda path: ())
    single = real.to(torch.float32).norm(dtype=torch.float64)
    assert single.dtype is torch.float64
    out = result.clone().zero_()
    assert real.norm(out=out) is out
    compare(out, mapped(lambda leaf: leaf.norm(), floats(plain)), lambda path: ())


def test_quantile(real: Any, plain: Plain, kind: Kind) -> None:
    q = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    compare(real.quantile(0.3), mapped(lambda leaf: leaf.quantile(0.3), floats(plain)), lambda path: ())
    compare(real.quantile(q), mapped(lambda leaf: leaf.quantile(q), floats(plain)), lambda path: (3,))
    names = real.names
    for at in range(len(kind.batch_size)):
        size = lambda path, at=at: own_size(kind, path)[:at] + own_size(kind, path)[at + 1 :]  # noqa: E731
        expected = mapped(lambda leaf, at=at: leaf.quantile(0.3, at, interpolation="lower"), floats(plain))
        compare(real.quantile(0.3, at, interpolation="lower"), expected, size)
        several = real.quantile(q, at)
        expected = mapped(lambda leaf, at=at: leaf.quantile(q, at), floats(plain))
        compare(several, expected, lambda path, size=size: (3, *size(path)))
        assert several.names == [None, *names[:at], *names[at + 1 :]]


def test_all_and_any_over_dims(td: Any, plain: Plain, kind: Kind) -> None:
    count = len(kind.batch_size)
    assert td.any() is True and td.all() is False
    compare(td.all("feature"), features_all(plain, kind, ()), lambda path: own_size(kind, path))
    if count:
        dims = tuple(range(count))
        compare(td.any(dims), mapped(lambda leaf: leaf.any(dims), plain), lambda path: kind.extra.get(path, ()))
        kept = td.all(0, keepdim=True)
        assert kept.batch_size[0] == 1 and kept.names == td.names
    with pytest.raises(TypeError, match="keepdim"):
        td.all(keepdim=True)


def features_all(tree: Plain, kind: Kind, path: Path) -> Plain:
    batch_dims = len(own_size(kind, path))
    return {
        key: features_all(value, kind, (*path, key))
        if isinstance(value, dict)
        else value.reshape(*value.shape[:batch_dims], -1).all(-1)
        for key, value in tree.items()
    }


def test_norm_without_entries() -> None:
    for empty in (TensorDict({}, [2]), lazy_stack([TensorDict({}, [2])])):
        assert empty.norm().batch_size == () and empty.norm().is_empty()


def test_what_torch_refuses_is_refused_with_the_key(td: Any, kind: Kind) -> None:
    for call in (td.mean, td.std, td.var, td.nanmean, lambda **k: td.quantile(0.5, **k)):
        for kwargs in ({}, {"dim": "feature"}, *([{"dim": 0}] if kind.batch_size else [])):
            with pytest.raises(RuntimeError, match=r"^entry '(a|mask)'"):
                call(**kwargs)
    with pytest.raises(RuntimeError, match=r"^entry '(a|mask)'"):
        td.norm()
    if kind.batch_size:
        with pytest.raises(RuntimeError, match=r"^entry '(a|mask)'"):
            td.softmax(0)


def test_keys_transformed(real: Any, plain: Plain, kind: Kind) -> None:
    def renamed(tree: Plain) -> Plain:
        return {f"x_{key}": renamed(v) if isinstance(v, dict) else v.sum() for key, v in tree.items()}

    compare(real.sum(key_transform=lambda name: f"x_{name}"), renamed(floats(plain)), lambda path: ())
    moved = real.mean(key_transform=lambda name: ("stats", name))
    torch.testing.assert_close(moved["stats", "a"], floats(plain)["a"].mean())
    with pytest.raises(KeyError, match="'same'"):
        real.sum(key_transform=lambda name: "same")


def test_describe(real: Any, plain: Plain) -> None:
    summary = real.describe(percentiles=[0.9, 0.1])
    assert summary.batch_size == torch.Size([]) and summary.device == real.device and not summary.is_locked
    expected = {
        (*path, name): value
        for path, leaf in leaves(floats(plain)).items()
        for name, value in {
            "count": torch.tensor(leaf.numel()),
            "mean": leaf.mean(),
            "std": leaf.std(),
            "min": leaf.min(),
            "10%": leaf.quantile(0.1),
            "90%": leaf.quantile(0.9),
            "max": leaf.max(),
            "nan": torch.tensor(0.0, dtype=torch.float64),
            "zero": (leaf == 0).double().mean(),
        }.items()
    }
    assert [as_path(key) for key in summary.keys(True, True)] == list(expected)
    for path, value in expected.items():
        torch.testing.assert_close(summary[path], value, equal_nan=True)
    lines = str(summary).splitlines()
    assert lines[0].split() == ["count", "mean", "std", "min", "10%", "90%", "max", "nan", "zero"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [".".join(path), str(leaf.numel())] for path, leaf in leaves(plain).items()
    ]
