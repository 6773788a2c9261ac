"""What stands between a network and a normal distribution, and the distribution of a single point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch import distributions as D
from torch.distributions import constraints

from tensordict.nn.scale_mappings import biased_softplus, mappings


class NormalParamExtractor(nn.Module):
    """Split a tensor in two along its last dim: a location, and a scale that is mapped to positive values.

    Args:
        scale_mapping: the name of the mapping of the scale; see :func:`~tensordict.nn.mappings`.
        scale_lb: the lower bound of the scale.

    Raises:
        NotImplementedError: there is no mapping of that name.

    Example:
        >>> import torch
        >>> from tensordict.nn import NormalParamExtractor
        >>> loc, scale = NormalParamExtractor()(torch.zeros(3, 4))
        >>> loc.shape, scale[0]
        (torch.Size([3, 2]), tensor([1., 1.]))
    """

    def __init__(self, scale_mapping: str = "biased_softplus_1.0", scale_lb: float = 1e-4) -> None:
        super().__init__()
        self.scale_mapping = mappings(scale_mapping)
        self.scale_lb = scale_lb

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The location, the scale, and whatever else was given.

        Args:
            *tensors: the tensor to split, whose last dim should be even (the location gets one more element
                otherwise), and others that are passed on.

        Returns:
            a tuple; the location is a view.
        """
        if not tensors:
            raise ValueError("a tensor to split is needed")
        loc, scale = tensors[0].chunk(2, -1)
        mapping = self.scale_mapping
        scale = mapping(scale)
        # What has a bound of its own need not be bounded again: 10 of 60 us, and as much backwards.
        if type(mapping) is not biased_softplus or mapping.min_val < self.scale_lb:
            scale = scale.clamp_min(self.scale_lb)
        return loc, scale, *tensors[1:]


class AddStateIndependentNormalScale(nn.Module):
    """Put a scale beside a location: a parameter that does not depend on the input, mapped to positive values.

    Args:
        scale_shape: the shape of the scale, that of the last dims of the location; an int or a sequence of ints.
            `None` is a single scale for all.
        scale_mapping: the name of the mapping of the scale; see :func:`~tensordict.nn.mappings`.
        scale_lb: the lower bound of the scale.
        device: where the scale is.
        make_param: make it a parameter (`True`) or a buffer, which is not trained.
        init_value: its first value, before the mapping.

    Raises:
        NotImplementedError: there is no mapping of that name.

    Example:
        >>> import torch
        >>> from tensordict.nn import AddStateIndependentNormalScale
        >>> loc, scale = AddStateIndependentNormalScale(4)(torch.zeros(3, 4))
        >>> scale.shape, bool((scale == 1).all())
        (torch.Size([3, 4]), True)
    """

    state_independent_scale: Tensor

    def __init__(
        self,
        scale_shape: int | Sequence[int] | None = None,
        *,
        scale_mapping: str = "exp",
        scale_lb: float = 1e-4,
        device: torch.device | str | int | None = None,
        make_param: bool = True,
        init_value: float = 0.0,
    ) -> None:
        super().__init__()
        shape = (scale_shape,) if isinstance(scale_shape, int) else scale_shape
        self.scale_shape = Size(shape or ())
        self.scale_lb = scale_lb
        self.scale_mapping = scale_mapping
        self._map = mappings(scale_mapping)
        scale = torch.full(self.scale_shape, float(init_value), device=device)
        if make_param:
            self.state_independent_scale = nn.Parameter(scale)
        else:
            self.register_buffer("state_independent_scale", scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_map" not in state:
            # As the reference pickles it.
            self._map = mappings(self.scale_mapping)

    def forward(self, loc: Tensor, *others: Any) -> tuple[Any, ...]:
        """The location, a scale of its shape, and whatever else was given.

        Raises:
            RuntimeError: the last dims of the location are not the shape of the scale.
        """
        shape = self.scale_shape
        if len(shape) > loc.ndim or loc.shape[loc.ndim - len(shape) :] != shape:
            raise RuntimeError(
                f"the location has shape {list(loc.shape)}, whose last dims must be those of the scale, {list(shape)}"
            )
        # Bounded last: that makes a tensor of its own, into which programs can write.
        return loc, self._map(self.state_independent_scale).expand(loc.shape).clamp_min(self.scale_lb), *others


class Delta(D.Distribution):
    """The distribution of a single point, which all samples, the mean and the mode are.

    The log-density is infinite there and minus infinity elsewhere. Samples carry the gradient of the point.

    Args:
        param: the point, a tensor of shape `(*batch_shape, *event_shape)`.
        atol: the absolute difference within which a value counts as the point.
        rtol: the same, relative to the point.
        batch_shape: the leading dims of `param` that are independent of each other.
        event_shape: the last dims of `param` that make up one value. Each of the two follows from the other; without
            any, values are vectors (a `param` without dims is a single number).

    Raises:
        ValueError: the shapes are not those of `param`.

    Example:
        >>> import torch
        >>> from tensordict.nn.distributions import Delta
        >>> dist = Delta(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> dist.batch_shape, dist.log_prob(torch.tensor([1.0, 2.0]))
        (torch.Size([2]), tensor([inf, -inf]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (as in torch)
    has_rsample = True

    def __init__(
        self,
        param: Tensor,
        atol: float = 1e-6,
        rtol: float = 1e-6,
        batch_shape: Sequence[int] | None = None,
        event_shape: Sequence[int] | None = None,
    ) -> None:
        shape = param.shape
        if batch_shape is None:
            events = min(len(shape), 1) if event_shape is None else len(event_shape)
            batch = len(shape) - events
        else:
            batch = len(batch_shape)
        found = shape[: max(batch, 0)], shape[max(batch, 0) :]
        for name, given, there in zip(("batch_shape", "event_shape"), (batch_shape, event_shape), found):
            if given is not None and tuple(given) != there:
                raise ValueError(f"{name} {list(given)} is no part of the shape of the point, {list(shape)}")
        self.param = param
        self.atol = atol
        self.rtol = rtol
        super().__init__(*found, validate_args=False)

    def update(self, param: Tensor) -> None:
        """Move the point; the new one has as many batch dims as the old one."""
        self.param = param
        batch = len(self._batch_shape)
        self._batch_shape, self._event_shape = param.shape[:batch], param.shape[batch:]

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Delta:
        """This distribution with its batch dims expanded; the point is a view."""
        param = self.param.expand(*batch_shape, *self._event_shape)
        return type(self)(param, self.atol, self.rtol, batch_shape, self._event_shape)

    @property
    def support(self) -> constraints.Constraint:
        """Real values of the shape of an event."""
        return constraints.independent(constraints.real, len(self._event_shape))  # type: ignore[no-untyped-call]

    @property
    def mean(self) -> Tensor:
        """The point itself."""
        return self.param

    mode = deterministic_sample = mean

    @property
    def variance(self) -> Tensor:
        """Zeros."""
        return torch.zeros_like(self.param)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """The point, expanded to `(*sample_shape, *batch_shape, *event_shape)`: a view."""
        return self.param.expand(*(sample_shape or ()), *self.param.shape)

    sample = rsample

    def log_prob(self, value: Tensor) -> Tensor:
        """Infinity where a value is the point, within the tolerance, and minus infinity elsewhere.

        Args:
            value: broadcasts with the point.

        Returns:
            a tensor of the shape of `value`, broadcast, without the dims of an event.
        """
        same = torch.isclose(value, self.param, rtol=self.rtol, atol=self.atol)
        if self._event_shape:
            same = same.flatten(-len(self._event_shape)).all(-1)
        dtype = self.param.dtype if self.param.is_floating_point() else torch.get_default_dtype()
        infinity = torch.full_like(same, torch.inf, dtype=dtype)
        return torch.where(same, infinity, -infinity)
