"""The plain model that containers are compared with: a nested dict of tensors sharing their leading dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Plain = dict[str, Any]
Path = tuple[str, ...]


def leaves(plain: Plain) -> dict[Path, torch.Tensor]:
    """All tensors by their nested key, as tuples, in the order of the dicts."""
    found: dict[Path, torch.Tensor] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            found.update({(name, *rest): leaf for rest, leaf in leaves(value).items()})
        else:
            found[(name,)] = value
    return found


def nodes(plain: Plain) -> list[Path]:
    """The nested keys of all dicts inside, children before their parent."""
    found: list[Path] = []
    for name, value in plain.items():
        if isinstance(value, dict):
            found += [(name, *rest) for rest in nodes(value)] + [(name,)]
    return found


def nested_keys(plain: Plain) -> list[Path]:
    """Leaves and dicts alike, children before their parent."""
    found: list[Path] = []
    for name, value in plain.items():
        if isinstance(value, dict):
            found += [(name, *rest) for rest in nested_keys(value)]
        found.append((name,))
    return found


def mapped(fn: Callable[[torch.Tensor], torch.Tensor], plain: Plain) -> Plain:
    """The same dicts with `fn` of each tensor."""
    return {name: mapped(fn, value) if isinstance(value, dict) else fn(value) for name, value in plain.items()}


def as_key(path: Path) -> str | Path:
    """The key that a container gives for this path: a string at the top, a tuple below."""
    return path[0] if len(path) == 1 else path


def as_path(key: str | Path) -> Path:
    return (key,) if isinstance(key, str) else key


def index_map(batch_size: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this batch size whose elements number the batch elements.

    What torch makes of it under an index or a reshape tells which batch element lies where in the result. That is
    the oracle for every operation that rearranges batch dimensions.
    """
    return torch.arange(math.prod(batch_size)).reshape(batch_size)


def picked(plain: Plain, batch_size: tuple[int, ...], numbers: torch.Tensor) -> Plain:
    """The batch elements with these numbers, in the shape of `numbers`."""
    return mapped(lambda leaf: by_number(leaf, batch_size)[numbers], plain)


def by_number(leaf: torch.Tensor, batch_size: tuple[int, ...]) -> torch.Tensor:
    """The leaf with its batch dimensions laid out as one."""
    return leaf.reshape(math.prod(batch_size), *leaf.shape[len(batch_size) :])


def replaced(plain: Plain, batch_size: tuple[int, ...], numbers: torch.Tensor, values: Plain) -> Plain:
    """Return a copy whose batch elements with these numbers are `values`."""
    result: Plain = {}
    for name, old in plain.items():
        if isinstance(old, dict):
            result[name] = replaced(old, batch_size, numbers, values[name])
        else:
            flat = by_number(old, batch_size).clone()
            flat[numbers] = values[name].to(flat.dtype)
            result[name] = flat.reshape(old.shape)
    return result


def addresses(container: Any) -> list[int]:
    """Return the address of each entry, in the order of the keys."""
    return [address for leaf in container.data_ptr().values(True, True) for address in leaf.flatten().tolist()]


def changed(leaf: torch.Tensor) -> torch.Tensor:
    """Other values of the same shape and dtype, a function of the old ones alone."""
    return ~leaf if leaf.dtype is torch.bool else -leaf - 1


def assert_leaf(actual: Any, expected: torch.Tensor, key: Any) -> None:
    assert isinstance(actual, torch.Tensor), f"{key}: {type(actual)}"
    assert actual.shape == expected.shape, f"{key}: {actual.shape} instead of {expected.shape}"
    assert actual.dtype == expected.dtype, f"{key}: {actual.dtype} instead of {expected.dtype}"
    assert torch.equal(actual, expected), f"{key}: {actual} instead of {expected}"


def assert_matches(
    container: Any,
    plain: Plain,
    batch_size: tuple[int, ...] | None = None,
    extra: dict[Path, tuple[int, ...]] | None = None,
) -> None:
    """The container holds exactly these entries, and its batch sizes (`extra`: what nested ones add) fit."""
    found = {as_path(key) for key in container.keys(True, True)}
    expected = leaves(plain)
    assert found == set(expected), f"leaves {sorted(found)} instead of {sorted(expected)}"
    for path, leaf in expected.items():
        assert_leaf(container[path], leaf, path)
    everything = {as_path(key) for key in container.keys(True)}
    assert everything == set(nested_keys(plain)), f"keys {sorted(everything)} instead of {sorted(nested_keys(plain))}"
    if batch_size is not None:
        assert container.batch_size == torch.Size(batch_size)
    for path in nodes(plain):
        own = container[path].batch_size
        assert own[: container.batch_dims] == container.batch_size, f"{path}: {own} under {container.batch_size}"
        if extra is not None:
            assert own == container.batch_size + torch.Size(extra.get(path, ())), f"{path}: {own}"
