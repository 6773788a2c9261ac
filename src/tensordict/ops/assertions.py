"""Assertions on containers, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract, is_node, raise_key_mismatch
from tensordict.core.keys import Path, joined, path_of


def assert_close(
    actual: object,
    expected: object,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    msg: str = "",
    prefix: object = (),
) -> bool:
    """Check that two containers have the same keys and, up to a tolerance, the same values.

    Batch sizes, names and containers' devices are not compared; the dtypes, shapes and devices of leaves are.

    Args:
        actual: a container.
        expected: a container.
        rtol: the relative tolerance; by default that of :func:`torch.testing.assert_close` for the dtype.
        atol: the absolute tolerance; as `rtol`. One that is given alone makes the other zero.
        equal_nan: whether NaNs are equal to each other.
        intersection: compare only the keys that both have.
        msg: put at the end of the error.
        prefix: a nested key, put in front of the keys that the error names.

    Returns:
        `True`.

    Raises:
        AssertionError: leaves differ; every one of them is named.
        KeyError: the containers do not have the same keys; the odd ones are named.
        TypeError: an argument is not a container.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, assert_close
        >>> assert_close(TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(2) + 1e-7))
        True
    """
    if not isinstance(actual, Contract) or not isinstance(expected, Contract):
        raise TypeError(
            f"assert_close compares two containers, got {type(actual).__name__} and {type(expected).__name__}; "
            "for tensors there is torch.testing.assert_close"
        )
    if rtol is not None or atol is not None:
        rtol, atol = rtol or 0.0, atol or 0.0
    options = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
    differences: list[str] = []
    path: Path = () if isinstance(prefix, tuple) and not prefix else path_of(prefix)
    _compare(actual, expected, options, intersection, path, differences)
    if differences:
        raise AssertionError("\n".join([*differences, msg] if msg else differences))
    return True


assert_allclose_td = assert_close


def _compare(
    actual: Contract,
    expected: Contract,
    options: dict[str, Any],
    intersection: bool,
    prefix: Path,
    differences: list[str],
) -> None:
    """Append a line for every pair of leaves that differ."""
    if actual._batch_size == expected._batch_size and (pairs := actual._pair_members(expected)) is not None:
        for left, right in pairs:
            _compare(left, right, options, intersection, prefix, differences)
        return
    ours, theirs = actual._entries, expected._entries
    if not intersection and ours.keys() != theirs.keys():
        raise_key_mismatch([ours, theirs], prefix)
    for name in ours:
        if name not in theirs:
            continue
        left, right = ours[name], theirs[name]
        path = (*prefix, name)
        if is_node(left) and is_node(right) and left._is_non_tensor is not right._is_non_tensor:
            differences.append(f"key {joined(path)!r} does not match: only one side is a value that is no tensor")
        elif is_node(left) and is_node(right) and left._is_non_tensor:
            if left._batch_size != right._batch_size or not left._compare_with_container(right, torch.eq).all():
                differences.append(f"key {joined(path)!r} does not match: the values are {left} and {right}")
        elif is_node(left) and is_node(right):
            _compare(left, right, options, intersection, path, differences)
        elif isinstance(left, Tensor) and isinstance(right, Tensor):
            difference = _difference(left, right, options)
            if difference:
                differences.append(f"key {joined(path)!r} does not match: {difference}")
        elif isinstance(left, (Contract, Tensor)) or isinstance(right, (Contract, Tensor)) or left != right:
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            differences.append(f"key {joined(path)!r} does not match: the entries are a {kinds}")


def _rows(leaf: Tensor) -> list[list[int]] | None:
    """The sizes of the rows of a ragged leaf; `None` for a dense one."""
    return ragged.row_sizes(leaf).tolist() if leaf.is_nested else None


def _difference(actual: Tensor, expected: Tensor, options: dict[str, Any]) -> str:
    """How two leaves differ, on one line; empty when they do not."""
    if actual.is_nested or expected.is_nested:
        ours, theirs = _rows(actual), _rows(expected)
        if ours != theirs:
            return f"the rows have the sizes {ours} and {theirs}"
        actual, expected = ragged.in_row_order(actual), ragged.in_row_order(expected)
    try:
        # Subclasses that only say where the memory is, such as memory-mapped tensors, compare by value.
        torch.testing.assert_close(
            actual.detach().as_subclass(Tensor), expected.detach().as_subclass(Tensor), **options
        )
    except AssertionError as error:
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return ""
