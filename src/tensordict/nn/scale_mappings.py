"""Mappings from real to positive numbers, by name; they turn the output of a network into a scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Mapping = Callable[[Tensor], Tensor]

_SMALLEST = 1e-6  # `inv_softplus` replaces smaller values by this one


@overload
def inv_softplus(bias: float) -> float: ...


@overload
def inv_softplus(bias: Tensor) -> Tensor: ...


def inv_softplus(bias: float | Tensor) -> float | Tensor:
    """Return the inverse of softplus, `log(exp(bias) - 1)`, without overflow.

    Args:
        bias: a number, or a floating-point tensor of any shape; values below 1e-6 count as 1e-6.

    Returns:
        A number for a number, a new tensor of the same shape for a tensor.

    Example:
        >>> import torch
        >>> from tensordict.nn import inv_softplus
        >>> torch.nn.functional.softplus(inv_softplus(torch.tensor([0.5, 40.0])))
        tensor([ 0.5000, 40.0000])
    """
    if isinstance(bias, Tensor):
        bias = bias.clamp_min(_SMALLEST)
        return bias + torch.log(-torch.expm1(-bias))
    bias = max(bias, _SMALLEST)
    return bias + math.log(-math.expm1(-bias))


class biased_softplus(nn.Module):  # a function to its callers, as in the public API
    """Softplus, shifted so that 0 maps to `bias` and all values are above `min_val`: `softplus(x + shift) + min_val`.

    Args:
        bias: the value at 0; greater than `min_val`.
        min_val: the lower bound of the result.

    Example:
        >>> import torch
        >>> from tensordict.nn import biased_softplus
        >>> biased_softplus(1.0, min_val=0.1)(torch.tensor([-100.0, 0.0]))
        tensor([0.1000, 1.0000])
    """

    def __init__(self, bias: float, min_val: float = 0.01) -> None:
        super().__init__()
        self.bias = inv_softplus(bias - min_val)
        self.min_val = min_val

    def forward(self, x: Tensor) -> Tensor:
        """Return the mapped tensor, with the shape of `x`."""
        return F.softplus(x + self.bias) + self.min_val


def expln(x: Tensor) -> Tensor:
    """Return `exp(x)` up to 0 and `log(x + 1) + 1` above: positive, smooth and slowly growing.

    From Rückstieß, Felder and Schmidhuber, State-Dependent Exploration for Policy Gradient Methods, ECML 2008.

    Args:
        x: a floating-point tensor of any shape.

    Returns:
        A new tensor of the same shape.

    Example:
        >>> import torch
        >>> from tensordict.nn.scale_mappings import expln
        >>> expln(torch.tensor([0.0, 9.0]))
        tensor([1.0000, 3.3026])
    """
    # Clamp each branch to its own half. Otherwise the unused branch could give an infinite gradient.
    return torch.where(x > 0, x.clamp_min(0).log1p() + 1, x.clamp_max(0).exp())


def _identity(x: Tensor) -> Tensor:
    return x


_MAPPINGS: dict[str, Mapping] = {
    "softplus": F.softplus,
    "exp": torch.exp,
    "relu": torch.relu,
    "expln": expln,
    "biased_softplus": biased_softplus(1.0),
    "none": _identity,
}


def add_custom_mapping(name: str, mapping: Mapping) -> None:
    """Register a mapping under a name, for :func:`mappings` and all arguments that take such names.

    Args:
        name: the name. A mapping of this name is replaced.
        mapping: takes a tensor and returns one of the same shape.

    Raises:
        TypeError: the mapping cannot be called.

    Example:
        >>> import torch
        >>> from tensordict.nn import add_custom_mapping, mappings
        >>> add_custom_mapping("square", lambda x: x * x)
        >>> mappings("square")(torch.tensor([3.0]))
        tensor([9.])
    """
    if not callable(mapping):
        raise TypeError(f"the mapping {name!r} must be a function of a tensor, got {type(mapping).__name__}")
    _MAPPINGS[name] = mapping


def mappings(key: str) -> Mapping:
    """Return the mapping with a name.

    Args:
        key: `"softplus"`, `"exp"`, `"relu"`, `"expln"`, `"none"` (no change), a name from :func:`add_custom_mapping`,
            or `"biased_softplus"`, optionally with the arguments of :class:`biased_softplus`: `"biased_softplus_1.0"`,
            `"biased_softplus_1.0_0.1"`.

    Returns:
        A function from a tensor to a tensor of the same shape.

    Raises:
        NotImplementedError: the mapping is unknown.
        ValueError: `"biased_softplus_..."` is not followed by one or two numbers.

    Example:
        >>> import torch
        >>> from tensordict.nn import mappings
        >>> mappings("biased_softplus_0.5")(torch.zeros(1))
        tensor([0.5000])
    """
    known = _MAPPINGS.get(key)
    if known is not None:
        return known
    if str(key).startswith("biased_softplus_"):
        try:
            bias, *rest = map(float, key.removeprefix("biased_softplus_").split("_"))
            return biased_softplus(bias, *rest)
        except (TypeError, ValueError):
            raise ValueError(
                f"the mapping {key!r} must be 'biased_softplus_BIAS' or 'biased_softplus_BIAS_MINIMUM', with numbers"
            ) from None
    raise NotImplementedError(
        f"there is no mapping {key!r}; there are {sorted(_MAPPINGS)}, and add_custom_mapping registers others"
    )
