"""`assert_close`, an assertion on two containers for tests."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Assert that two containers have the same keys and, up to a tolerance, the same values.

    It compares the dtypes, shapes and devices of leaves, but not the batch sizes, names and devices of containers.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, assert_close
        >>> assert_close(TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(2) + 1e-7))
        True

    Args:
        actual: a container.
        expected: a container.
        rtol: the relative tolerance. The default depends on the dtype; see :func:`torch.testing.assert_close`.
        atol: the absolute tolerance, likewise. If only one of the two is given, the other one is zero.
        equal_nan: treat NaNs as equal.
        intersection: compare only the keys that both containers have.
        msg: appended to the error message.
        prefix: a nested key to put in front of the keys in the error message.

    Returns:
        `True`.

    Raises:
        AssertionError: leaves differ. The error names all of them.
        KeyError: the keys differ. The error names the keys that only one container has.
        TypeError: an argument is not a container.
    """
    if not isinstance(actual, Contract) or not isinstance(expected, Contract):
        raise TypeError(
            f"assert_close compares two containers, got {type(actual).__name__} and {type(expected).__name__}; "
            "for tensors, use torch.testing.assert_close"
        )
    if rtol is not None or atol is not None:
        rtol, atol = rtol or 0.0, atol or 0.0
    options = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
    path: Path = () if isinstance(prefix, tuple) and not prefix else path_of(prefix)
    differences = list_differences(actual, expected, options, intersection, path)
    if differences:
        raise AssertionError("\n".join([*differences, msg] if msg else differences))
    return True


assert_allclose_td = assert_close


def list_differences(
    actual: Contract, expected: Contract, options: dict[str, Any], intersection: bool = False, prefix: Path = ()
) -> list[str]:
    """Describe every pair of leaves that differ in one line. The arguments are as for `assert_close`.

    Raises:
        KeyError: the keys differ.
    """
    return list(_compare(actual, expected, options, intersection, prefix))


def _compare(
    actual: Contract, expected: Contract, options: dict[str, Any], intersection: bool, prefix: Path
) -> Iterator[str]:
    """Yield a line for every pair of leaves that differ."""
    if actual._batch_size == expected._batch_size and (pairs := actual._pair_members(expected)) is not None:
        for left, right in pairs:
            yield from _compare(left, right, options, intersection, prefix)
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
            yield f"key {joined(path)!r} does not match: only one side is a value that is no tensor"
        elif is_node(left) and is_node(right) and left._is_non_tensor:
            if left._batch_size != right._batch_size or not left._compare_with_container(right, torch.eq).all():
                yield f"key {joined(path)!r} does not match: the values are {left} and {right}"
        elif is_node(left) and is_node(right):
            yield from _compare(left, right, options, intersection, path)
        elif isinstance(left, Tensor) and isinstance(right, Tensor):
            difference = _describe_difference(left, right, options)
            if difference:
                yield f"key {joined(path)!r} does not match: {difference}"
        elif isinstance(left, (Contract, Tensor)) or isinstance(right, (Contract, Tensor)) or left != right:
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            yield f"key {joined(path)!r} does not match: the entries are a {kinds}"


def _row_sizes(leaf: Tensor) -> list[list[int]] | None:
    """Return the sizes of the rows of a ragged leaf; `None` for a dense leaf."""
    return ragged.row_sizes(leaf).tolist() if leaf.is_nested else None


def _describe_difference(actual: Tensor, expected: Tensor, options: dict[str, Any]) -> str:
    """Describe the difference of two leaves in one line. Returns an empty string if they are close."""
    if actual.is_nested or expected.is_nested:
        ours, theirs = _row_sizes(actual), _row_sizes(expected)
        if ours != theirs:
            return f"the rows have the sizes {ours} and {theirs}"
        actual, expected = ragged.flatten_in_row_order(actual), ragged.flatten_in_row_order(expected)
    try:
        # Compare plain tensors, so that a memory-mapped tensor can equal a tensor in memory.
        torch.testing.assert_close(
            actual.detach().as_subclass(Tensor), expected.detach().as_subclass(Tensor), **options
        )
    except AssertionError as error:
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return ""
