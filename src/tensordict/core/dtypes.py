"""Predicates over the dtype of a tensor, for `td.apply` and other functions that choose entries."""

from __future__ import annotations

import torch


def is_bool(*args: object) -> bool:
    """Return whether the last argument is a tensor of booleans.

    Example:
        >>> import torch
        >>> from tensordict import is_bool
        >>> is_bool(torch.ones(2) > 0), is_bool("key", torch.ones(2)), is_bool("text")
        (True, False, False)

    Args:
        *args: the value, or a key and the value, as functions of `named_apply` get them.
    """
    return _dtype_of(args) is torch.bool


def is_integer(*args: object) -> bool:
    """Return whether the last argument is a tensor of integers, signed or unsigned; booleans are not integers.

    Example:
        >>> import torch
        >>> from tensordict import is_integer
        >>> is_integer(torch.tensor(3)), is_integer(torch.tensor(True)), is_integer(3)
        (True, False, False)

    Args:
        *args: the value, or a key and the value.
    """
    dtype = _dtype_of(args)
    return dtype is not None and dtype is not torch.bool and not dtype.is_floating_point and not dtype.is_complex


def is_floating(*args: object) -> bool:
    """Return whether the last argument is a tensor of floating point numbers.

    Example:
        >>> import torch
        >>> from tensordict import is_floating
        >>> is_floating(torch.ones(2)), is_floating(torch.ones(2, dtype=torch.complex64))
        (True, False)

    Args:
        *args: the value, or a key and the value.
    """
    dtype = _dtype_of(args)
    return dtype is not None and dtype.is_floating_point


def is_inexact(*args: object) -> bool:
    """Return whether the last argument is a tensor of floating point or complex numbers.

    Example:
        >>> import torch
        >>> from tensordict import is_inexact
        >>> is_inexact(torch.ones(2, dtype=torch.complex64)), is_inexact("key", torch.tensor(1))
        (True, False)

    Args:
        *args: the value, or a key and the value.
    """
    dtype = _dtype_of(args)
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def _dtype_of(args: tuple[object, ...]) -> torch.dtype | None:
    if not args:
        raise TypeError("the predicate takes a value, or a key and a value; got no argument")
    dtype = getattr(args[-1], "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None
