"""How a value is taken from a distribution: `InteractionType`, and the type that holds for a block."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints

from tensordict.core import torch_internals as internals
from tensordict.ops.collection import TensorCollection


class InteractionType(str, enum.Enum):
    """How a probabilistic module takes a value from its distribution.

    `MODE`, `MEDIAN` and `MEAN` read the property of that name; `RANDOM` draws a sample, by `rsample` where the
    distribution has it. `DETERMINISTIC` reads `deterministic_sample` where there is one, otherwise the mode of
    distributions with finitely many values and the mean of others.

    A member equals its value: `InteractionType.MEAN == "mean"`.

    Example:
        >>> from tensordict.nn import InteractionType
        >>> InteractionType.from_str("random")
        <InteractionType.RANDOM: 'random'>
    """

    MODE = "mode"
    MEDIAN = "median"
    MEAN = "mean"
    RANDOM = "random"
    DETERMINISTIC = "deterministic"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_str(cls, type_str: str) -> InteractionType:
        """The member of this name, in any case; `ValueError` for another."""
        return cls(type_str.lower())


# What distributions give: a tensor, a container (composite ones) or a tuple of tensors.
Sample: TypeAlias = "Tensor | TensorCollection | tuple[Tensor, ...]"

_current: InteractionType | None = None

_ONE = torch.Size()
_RANDOM = InteractionType.RANDOM


class set_interaction_type(internals.Decorator):  # a function to its callers, as in the public API
    """Choose how all probabilistic modules take their values, for a `with` block or a decorated function.

    The choice holds for all threads.

    Args:
        type: the type or its name; `None` leaves the choice to each module's `default_interaction_type`.

    Raises:
        ValueError: there is no such type.

    Example:
        >>> from tensordict.nn import InteractionType, set_interaction_type
        >>> from tensordict.nn.probabilistic import interaction_type
        >>> with set_interaction_type("mean"):
        ...     interaction_type()
        <InteractionType.MEAN: 'mean'>
    """

    def __init__(self, type: InteractionType | str | None = InteractionType.DETERMINISTIC) -> None:
        super().__init__()
        # A member is a string as well; torch.compile cannot take one for a string.
        self.type = type if type is None or isinstance(type, InteractionType) else InteractionType.from_str(type)

    def clone(self) -> set_interaction_type:
        return self.__class__(self.type)

    def __enter__(self) -> None:
        global _current
        self._before = _current
        _current = self.type

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        global _current
        _current = self._before


def interaction_type() -> InteractionType | None:
    """The type that the surrounding :class:`set_interaction_type` asks for; `None` outside of one."""
    return _current


def value_of(dist: D.Distribution, kind: InteractionType, sample_shape: torch.Size | None, samples: int) -> Sample:
    """A value of a distribution.

    Args:
        dist: the distribution.
        kind: how the value is taken.
        sample_shape: leading dims of the value, over which samples differ and other values are the same.
        samples: the number of samples that a mean is estimated from, if the distribution has none.
    """
    if kind is _RANDOM:
        return (dist.rsample if dist.has_rsample else dist.sample)(_ONE if sample_shape is None else sample_shape)
    value: Sample = _PROPERTIES[kind](dist, samples)
    return value if sample_shape is None or isinstance(value, tuple) else value.expand(sample_shape + value.shape)


def _mode(dist: D.Distribution, samples: int) -> Any:
    return dist.get_mode() if hasattr(dist, "get_mode") else dist.mode


def _mean(dist: D.Distribution, samples: int) -> Any:
    """The mean, or an estimate of it from samples where there is no closed form."""
    if hasattr(dist, "get_mean"):
        return dist.get_mean()
    try:
        return dist.mean
    except (AttributeError, NotImplementedError):  # guarded: the class decides
        draw = dist.rsample if dist.has_rsample else dist.sample
        drawn: Sample = draw((samples,))
        return tuple(part.mean(0) for part in drawn) if isinstance(drawn, tuple) else drawn.mean(0)


def _median(dist: D.Distribution, samples: int) -> Any:
    """The median, from the inverse of the distribution function if need be."""
    if hasattr(dist, "get_median"):
        return dist.get_median()
    if hasattr(dist, "median"):
        return dist.median
    try:
        half = torch.full((), 0.5, device=_device_of(dist))
        return dist.icdf(half)
    except (NotImplementedError, AttributeError):  # guarded: the class decides
        raise NotImplementedError(
            f"{type(dist).__name__} has no median: neither a property `median` nor an inverse distribution function"
        ) from None


def _deterministic(dist: D.Distribution, samples: int) -> Any:
    """What the distribution says, or its mode where there are finitely many values, or its mean."""
    value = getattr(dist, "deterministic_sample", None)
    if value is not None:
        return value
    if isinstance(dist, D.TransformedDistribution):
        if isinstance(dist, D.RelaxedOneHotCategorical):
            logits = dist.logits
            return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1)
        if isinstance(dist, D.RelaxedBernoulli):
            return (dist.logits > 0).to(dist.logits.dtype)
        if isinstance(dist, D.LogisticNormal):
            return dist.transforms[0](dist.base_dist.mean)
    try:
        support = dist.support
    except NotImplementedError:
        support = None
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return _mode(dist, samples) if isinstance(support, _FINITE) else _mean(dist, samples)


def _device_of(dist: object) -> torch.device | None:
    """The device of the first parameter that is a tensor."""
    values = (getattr(dist, name, None) for name in getattr(dist, "arg_constraints", {}))
    return next((value.device for value in values if isinstance(value, Tensor)), None)


# What has finitely many values: its mode is one of them, which its mean is not.
_FINITE = (type(constraints.boolean), constraints.integer_interval, type(constraints.one_hot))

_PROPERTIES: dict[InteractionType, Callable[[D.Distribution, int], Sample]] = {
    InteractionType.MODE: _mode,
    InteractionType.MEAN: _mean,
    InteractionType.MEDIAN: _median,
    InteractionType.DETERMINISTIC: _deterministic,
}
