"""`InteractionType`: the ways to take a value from a distribution, and how to choose one for a block of code."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints

from tensordict.nn.choices import Choice, Setting
from tensordict.ops.collection import TensorCollection


class InteractionType(str, enum.Enum):
    """How a probabilistic module takes a value from its distribution.

    `MODE`, `MEDIAN` and `MEAN` read the property of that name. `RANDOM` draws a sample, with `rsample` if the
    distribution has it. `DETERMINISTIC` reads `deterministic_sample` if it exists; else the mode of distributions with
    finitely many values, and the mean of all others.

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
    def _missing_(cls, value: object) -> InteractionType:
        if isinstance(value, str) and (name := value.lower()) != value:
            return cls(name)
        raise ValueError(f"{value!r} is not a valid InteractionType; choose one of {[kind.value for kind in cls]}")

    @classmethod
    def from_str(cls, type_str: str) -> InteractionType:
        """Return the member with this name, in any case; raises a `ValueError` for other names."""
        return cls(type_str)


# A value of a distribution: a tensor, a container (composite distributions) or a tuple of tensors.
Sample: TypeAlias = "Tensor | TensorCollection | tuple[Tensor, ...]"

_choice: Choice[InteractionType | None] = Choice(None)

_ONE = torch.Size()
_RANDOM = InteractionType.RANDOM


class set_interaction_type(Setting):  # a function to its callers, as in the public API
    """Choose how all probabilistic modules take their values, for a `with` block or a decorated function.

    Args:
        type: the type or its name, in any case; `None` leaves the choice to each module's `default_interaction_type`.
        thread_local: `True` affects only the calling thread, and keeps the blocks of other threads out of it. Threads
            started inside the block do not see the choice. Blocks inside this one stay in the thread, too. `False`
            affects all threads.

    Raises:
        ValueError: the type is unknown.

    Example:
        >>> from tensordict.nn import InteractionType, interaction_type, set_interaction_type
        >>> with set_interaction_type("mean"):
        ...     interaction_type()
        <InteractionType.MEAN: 'mean'>
    """

    _choice = _choice

    def __init__(
        self, type: InteractionType | str | None = InteractionType.DETERMINISTIC, *, thread_local: bool = False
    ) -> None:
        # Members are strings, too, but torch.compile cannot call string methods on them, so test for members first.
        kind = type if type is None or isinstance(type, InteractionType) else InteractionType.from_str(type)
        super().__init__(kind, thread_local)
        self.type = kind

    def clone(self) -> set_interaction_type:
        return self.__class__(self.type, thread_local=self._thread_local)


def interaction_type() -> InteractionType | None:
    """Return the type that the surrounding :class:`set_interaction_type` chooses; `None` without one."""
    return _choice.get() if _choice.in_threads else _choice.shared


def take_value(dist: D.Distribution, kind: InteractionType, sample_shape: torch.Size | None, samples: int) -> Sample:
    """Take a value from a distribution.

    Args:
        dist: the distribution.
        kind: the way to take the value.
        sample_shape: leading dims of the value. Samples differ along them; other values are repeated.
        samples: the number of samples for an estimate of the mean, if the distribution has no mean.
    """
    if kind is _RANDOM:
        return (dist.rsample if dist.has_rsample else dist.sample)(_ONE if sample_shape is None else sample_shape)
    value: Sample = _PROPERTIES[kind](dist, samples)
    return value if sample_shape is None or isinstance(value, tuple) else value.expand(sample_shape + value.shape)


def _mode(dist: D.Distribution, samples: int) -> Any:
    return dist.get_mode() if hasattr(dist, "get_mode") else dist.mode


def _mean(dist: D.Distribution, samples: int) -> Any:
    """Return the mean, or an estimate from samples if it has no closed form."""
    if hasattr(dist, "get_mean"):
        return dist.get_mean()
    try:
        return dist.mean
    except (AttributeError, NotImplementedError):  # guarded: Dynamo guards the class of `dist`
        draw = dist.rsample if dist.has_rsample else dist.sample
        drawn: Sample = draw((samples,))
        return tuple(part.mean(0) for part in drawn) if isinstance(drawn, tuple) else drawn.mean(0)


def _median(dist: D.Distribution, samples: int) -> Any:
    """Return the median, from the inverse cumulative distribution function if necessary."""
    if hasattr(dist, "get_median"):
        return dist.get_median()
    if hasattr(dist, "median"):
        return dist.median
    try:
        half = torch.full((), 0.5, device=_find_device(dist))
        return dist.icdf(half)
    except (NotImplementedError, AttributeError):  # guarded: Dynamo guards the class of `dist`
        raise NotImplementedError(
            f"{type(dist).__name__} has no median: neither a property `median` nor an inverse distribution function"
        ) from None


def _deterministic(dist: D.Distribution, samples: int) -> Any:
    """Return the distribution's `deterministic_sample`, or its mode if it has finitely many values, or its mean."""
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


def _find_device(dist: object) -> torch.device | None:
    """Return the device of the first parameter that is a tensor."""
    values = (getattr(dist, name, None) for name in getattr(dist, "arg_constraints", {}))
    return next((value.device for value in values if isinstance(value, Tensor)), None)


# Supports with finitely many values. The mode is one of the values; the mean need not be.
_FINITE = (type(constraints.boolean), constraints.integer_interval, type(constraints.one_hot))

_PROPERTIES: dict[InteractionType, Callable[[D.Distribution, int], Sample]] = {
    InteractionType.MODE: _mode,
    InteractionType.MEAN: _mean,
    InteractionType.MEDIAN: _median,
    InteractionType.DETERMINISTIC: _deterministic,
}
