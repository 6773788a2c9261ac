"""Modules that turn the output of a network into the parameters of a normal distribution, and `Delta`."""

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
        scale_mapping: the name of the mapping for the scale; see :func:`~tensordict.nn.mappings`.
        scale_lb: the lower bound of the scale.

    Raises:
        NotImplementedError: the mapping is unknown.

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
        """Return the location, the scale, and all further arguments.

        Args:
            *tensors: the tensor to split, whose last dim should be even (otherwise the location gets one element more),
            and
                others, which are returned unchanged.

        Returns:
            A tuple. The location is a view.
        """
        if not tensors:
            raise ValueError("a tensor to split is needed")
        loc, scale = tensors[0].chunk(2, -1)
        mapping = self.scale_mapping
        scale = mapping(scale)
        # A mapping with its own bound needs no second one: saves 10 of 60 us, and as much in the backward pass.
        if type(mapping) is not biased_softplus or mapping.min_val < self.scale_lb:
            scale = scale.clamp_min(self.scale_lb)
        return loc, scale, *tensors[1:]


class AddStateIndependentNormalScale(nn.Module):
    """Add a scale to a location: a parameter that does not depend on the input, mapped to positive values.

    Args:
        scale_shape: the shape of the scale, which equals the last dims of the location; an int or a sequence of ints.
            `None` uses one scale for all elements.
        scale_mapping: the name of the mapping for the scale; see :func:`~tensordict.nn.mappings`.
        scale_lb: the lower bound of the scale.
        device: the device of the scale.
        make_param: make the scale a parameter (`True`) or a buffer, which is not trained.
        init_value: its initial value, before the mapping.

    Raises:
        NotImplementedError: the mapping is unknown.

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
            self.state_independent_scale = nn.Buffer(scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_map" not in state:
            # Pickles of the reference lack this attribute.
            self._map = mappings(self.scale_mapping)

    def forward(self, loc: Tensor, *others: Any) -> tuple[Any, ...]:
        """Return the location, a scale of the same shape, and all further arguments.

        Raises:
            RuntimeError: the last dims of the location differ from the shape of the scale.
        """
        shape = self.scale_shape
        if len(shape) > loc.ndim or loc.shape[loc.ndim - len(shape) :] != shape:
            raise RuntimeError(
                f"the location has shape {list(loc.shape)}, whose last dims must be those of the scale, {list(shape)}"
            )
        # `clamp_min` comes last because it makes a new tensor, which programs can write into.
        return loc, self._map(self.state_independent_scale).expand(loc.shape).clamp_min(self.scale_lb), *others


class Delta(D.Distribution):
    """The distribution of a single point: all samples, the mean and the mode are that point.

    The log-density is infinity at the point and minus infinity elsewhere. Samples carry the gradient of the point.

    Args:
        param: the point, a tensor of shape `(*batch_shape, *event_shape)`.
        atol: the absolute tolerance for values that count as the point.
        rtol: the tolerance relative to the point.
        batch_shape: the leading dims of `param`: independent points.
        event_shape: the last dims of `param`, which make up one value. Each of the two shapes follows from the other.
            If both are omitted, values are vectors (a `param` without dims is a single number).

    Raises:
        ValueError: the shapes do not match `param`.

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
        """Move the point. The new one has the same number of batch dims as the old one."""
        self.param = param
        batch = len(self._batch_shape)
        self._batch_shape, self._event_shape = param.shape[:batch], param.shape[batch:]

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Delta:
        """Return this distribution with expanded batch dims. The point is a view."""
        param = self.param.expand(*batch_shape, *self._event_shape)
        return type(self)(param, self.atol, self.rtol, batch_shape, self._event_shape)

    @property
    def support(self) -> constraints.Constraint:
        """Real values with the shape of an event."""
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
        """Return the point, expanded to `(*sample_shape, *batch_shape, *event_shape)`, as a view."""
        return self.param.expand((*(sample_shape or ()), *self.param.shape))

    sample = rsample

    def log_prob(self, value: Tensor) -> Tensor:
        """Return infinity for values that equal the point within the tolerance, and minus infinity for others.

        Args:
            value: broadcasts with the point.

        Returns:
            A tensor with the broadcast shape of `value`, without the event dims.
        """
        same = torch.isclose(value, self.param, rtol=self.rtol, atol=self.atol)
        if self._event_shape:
            same = same.flatten(-len(self._event_shape)).all(-1)
        dtype = self.param.dtype if self.param.is_floating_point() else torch.get_default_dtype()
        infinity = torch.full_like(same, torch.inf, dtype=dtype)
        return torch.where(same, infinity, -infinity)
