"""The normal distribution on an interval. The formulas keep their precision even for intervals far out in a tail.

All distances are measured from the mode, the point of the interval closest to `loc`, in units of `scale * sqrt(2)`. At
distance `s` the density is proportional to `exp(-s * (s + 2 * offset))`, where `offset` leads from `loc` to the mode.
With this choice no term under- or overflows, however far away the mode is. Masses are differences of values of `erfcx`,
in units of `sqrt(pi) / 2`. For the moments see N. L. Johnson, S. Kotz and N. Balakrishnan, Continuous Univariate
Distributions 1, 1994, section 13.10.1; for sampling by inversion, L. Devroye, Non-Uniform Random Variate Generation,
1986, section II.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Size, Tensor
from torch import distributions as D
from torch.autograd.forward_ad import unpack_dual
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all
from torch.special import erfcx

from tensordict.core import torch_internals as internals

if TYPE_CHECKING:
    from typing_extensions import Self

# Beyond this distance from the mode, the mass is zero in double precision.
_REACH = 28.0

_UNIT = math.sqrt(math.pi) / 2


class _Interval(NamedTuple):
    """An interval, described relative to its mode."""

    mode: Tensor
    unit: Tensor  # the unit of all distances below
    offset: Tensor  # from `loc` to the mode, with its sign
    p: Tensor  # the absolute value of `offset`
    left: Tensor  # from the lower bound to the mode
    right: Tensor  # from the mode to the upper bound
    side: Tensor  # the mass of one side of the mode, if there were no bound
    past_left: Tensor  # the part of `side` that the lower bound cuts off
    past_right: Tensor  # the part of `side` that the upper bound cuts off
    mass: Tensor  # the mass of the interval


def _measure_interval(loc: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> _Interval:
    mode = loc.clamp(a, b)
    unit = scale * math.sqrt(2)
    offset = (mode - loc) / unit
    p = offset.abs()
    # Clamp before the division: gradients through an infinite bound would be 0 * infinity.
    reach = _REACH * unit.detach()
    left = torch.minimum(mode - a, reach) / unit
    right = torch.minimum(b - mode, reach) / unit
    side, past_left, past_right = erfcx(p), _mass_beyond(p, left), _mass_beyond(p, right)
    mass = (side - past_left) + (side - past_right)
    return _Interval(mode, unit, offset, p, left, right, side, past_left, past_right, mass)


def _mass_beyond(p: Tensor, s: Tensor) -> Tensor:
    """Return the mass beyond the distance `s` from the mode, on one side and without a bound."""
    y = p + s
    mass: Tensor = torch.exp(-s * (y + p)) * erfcx(y)
    return mass


def _invert_mass(p: Tensor, side: Tensor, beyond: Tensor) -> Tensor:
    """Return the distance `s` with `_mass_beyond(p, s) == beyond`.

    Halley's method on the logarithm of `_mass_beyond`, whose derivatives are known. The starting value has the right
    slope at 0, and is off by 7 % at most for any `p`, so two steps reach 1e-13.
    """
    depth = torch.log(side / beyond)
    slope = (1 / _UNIT) / side
    s: Tensor = 2 * depth / (slope + torch.sqrt(slope * slope + 3.4 * depth))
    for _ in range(2):
        y = p + s
        ratio = erfcx(y)
        error = s * (y + p) - torch.log(ratio / beyond)
        s = s - error * ratio / (1 / _UNIT + error * (y * ratio - 0.5 / _UNIT))
    return s


def _needs_derivative(tensor: Tensor) -> bool:
    """Return whether the caller may ask for a derivative of a tensor, in reverse or forward mode."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return tensor.requires_grad or unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class TruncatedNormal(D.Distribution):
    """A normal distribution, cut off outside an interval.

    Densities, probabilities and samples are accurate for any interval, even hundreds of `scale`s away from `loc`.
    `rsample` and `icdf` are differentiable once, in all parameters.

    Args:
        loc: the mean of the normal distribution. All parameters are numbers or floating-point tensors, and broadcast.
        scale: its standard deviation. Values from 0 to `eps`, 1e-6, count as `eps`.
        a: the lower bound; may be `-inf`.
        b: the upper bound; may be `inf`.
        validate_args: check parameters and values, as torch's distributions do.

    Raises:
        ValueError: with `validate_args`: `a` is not less than `b`, `scale` is negative, or a parameter is NaN.

    Example:
        >>> import torch
        >>> from tensordict.nn import TruncatedNormal
        >>> dist = TruncatedNormal(torch.zeros(2), torch.ones(2), -1.0, torch.tensor([1.0, 9.0]))
        >>> dist.mean, dist.log_prob(torch.zeros(2))
        (tensor([0.0000, 0.2876]), tensor([-0.5372, -0.7462]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {  # noqa: RUF012 (as in torch)
        "loc": constraints.real,
        "scale": constraints.positive,
        # The constructor compares these two with each other. Comparisons with NaN are False, so NaN is rejected, too.
        "a": constraints.dependent(is_discrete=False, event_dim=0),
        "b": constraints.dependent(is_discrete=False, event_dim=0),
    }
    has_rsample = True
    # The smallest `scale`.
    eps: float = 1e-6

    def __init__(
        self,
        loc: Tensor | float,
        scale: Tensor | float,
        a: Tensor | float,
        b: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, scale, self.a, self.b = broadcast_all(loc, scale, a, b)
        self.scale = scale.clamp_min(self.eps)
        super().__init__(self.loc.shape, validate_args=validate_args)
        if self._validate_args and not internals.is_all_true(self.a < self.b):
            raise ValueError(f"the lower bound a must be less than the upper bound b, got a={self.a} and b={self.b}")
        if self._validate_args and not internals.is_all_true(scale >= 0):
            raise ValueError(f"the scale must not be negative, got {scale}")
        self._seen = _measure_interval(*self._as(torch.promote_types(self.loc.dtype, torch.float32)))

    def _as(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.loc.to(dtype), self.scale.to(dtype), self.a.to(dtype), self.b.to(dtype)

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Self:
        """Return this distribution with expanded batch dims. Its parameters are views."""
        new: Self = self._get_checked_instance(TruncatedNormal, _instance)  # type: ignore[no-untyped-call]
        shape = Size(batch_shape)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(shape))
        new._seen = _Interval(*(value.expand(shape) for value in self._seen))
        super(TruncatedNormal, new).__init__(shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        """The interval."""
        return constraints.interval(self.a, self.b)  # type: ignore[no-untyped-call]

    @property
    def auc(self) -> Tensor:
        """The probability of the interval under the full normal distribution."""
        return (self._seen.mass * torch.exp(-self._seen.p.square()) / 2).to(self.loc.dtype)

    # --- moments ------------------------------------------------------------------------------------------------------

    def _moments(self) -> tuple[_Interval, Tensor, Tensor]:
        """Return the interval, and the first two moments of the distance from the mode, in double precision.

        In a tail the moments are small differences of large numbers.
        """
        seen = _measure_interval(*self._as(torch.float64))
        total = seen.mass * (2 * _UNIT)
        at_a = torch.exp(-seen.left * (seen.left - 2 * seen.offset)) / total
        at_b = torch.exp(-seen.right * (seen.right + 2 * seen.offset)) / total
        first = at_a - at_b - seen.offset
        return seen, first, 0.5 - seen.offset * first - seen.left * at_a - seen.right * at_b

    @property
    def mean(self) -> Tensor:
        """The mean, with the batch shape."""
        seen, first, _ = self._moments()
        return (seen.mode + seen.unit * first).to(self.loc.dtype)

    deterministic_sample = mean

    @property
    def mode(self) -> Tensor:
        """The point of the interval closest to `loc`."""
        return self._seen.mode.to(self.loc.dtype)

    @property
    def variance(self) -> Tensor:
        """The variance, with the batch shape."""
        seen, first, second = self._moments()
        return (seen.unit.square() * (second - first.square()).clamp_min(0)).to(self.loc.dtype)

    def entropy(self) -> Tensor:
        """Return the differential entropy in nats, with the batch shape."""
        seen, first, second = self._moments()
        return (torch.log(seen.unit * seen.mass * _UNIT) + second + 2 * seen.offset * first).to(self.loc.dtype)

    # --- densities and probabilities ----------------------------------------------------------------------------------

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density at a value; minus infinity outside the interval.

        Raises:
            ValueError: with `validate_args`, if a value lies outside the interval.
        """
        density = self._log_density((value - self._seen.mode) / self._seen.unit).to(self.loc.dtype)
        if self._validate_args:
            self._validate_sample(value)
            return density
        return torch.where((value < self.a) | (value > self.b), -torch.inf, density)

    def _log_density(self, away: Tensor) -> Tensor:
        """Return the log-density at a signed distance from the mode."""
        seen = self._seen
        return -away * (away + 2 * seen.offset) - torch.log(seen.mass * seen.unit * _UNIT)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of values less than or equal to `value`."""
        seen = self._seen
        away = (value.clamp(self.a, self.b) - seen.mode) / seen.unit
        # No `abs` here, because its gradient is 0 at 0.
        inner = seen.side - _mass_beyond(seen.p, torch.where(away < 0, -away, away).clamp_max(_REACH))
        left = seen.side - seen.past_left
        return ((left + torch.where(away < 0, -inner, inner)) / seen.mass).to(self.loc.dtype)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the value with a given `cdf`: `a` for probabilities up to 0, `b` for probabilities from 1 on."""
        found, away = self._inverse(value)
        if _needs_derivative(value):
            with torch.no_grad():
                slope = torch.exp(-self._log_density(away))
            found = found + slope * (value - value.detach())
        found = torch.where(value <= 0, self.a, torch.where(value >= 1, self.b, found))
        return found.to(self.loc.dtype)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Draw values of shape `(*sample_shape, *batch_shape)` by inversion, differentiable in the parameters."""
        mass = self._seen.mass
        shape = self._extended_shape(Size(sample_shape or ()))
        return self._inverse(torch.rand(shape, dtype=mass.dtype, device=mass.device))[0].to(self.loc.dtype)

    def _invert(self, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value with a given `cdf`, and its signed distance from the mode."""
        seen = self._seen
        # A `with` block, because torch.compile does not support the decorator on methods.
        with torch.no_grad():
            right = chance * seen.mass > seen.side - seen.past_left
            rest = torch.where(right, 1 - chance, chance) * seen.mass
            beyond = rest + torch.where(right, seen.past_right, seen.past_left)
            s = _invert_mass(seen.p, seen.side, beyond.clamp_min(torch.finfo(beyond.dtype).tiny))
            away = torch.where(right, s, -s)
            found = (seen.mode + away * seen.unit).clamp(self.a, self.b)
        # Detach explicitly, because forward-mode derivatives ignore `no_grad`.
        return found.detach(), away.detach()

    def _inverse(self, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Like `_invert`, with the gradient in the parameters, which follows from `cdf(value) = chance`.

        M. Figurnov, S. Mohamed and A. Mnih, Implicit Reparameterization Gradients, NeurIPS 2018.
        """
        chance = chance.detach()
        found, away = self._invert(chance)
        seen = self._seen
        if not _needs_derivative(seen.mass):
            return found, away
        with torch.no_grad():
            unit, offset, left, right = (x.detach() for x in (seen.unit, seen.offset, seen.left, seen.right))
            # The ratio of the densities at the bound and at the value, times the share of the interval on the other
            # side.
            by_a = torch.exp(torch.log1p(-chance) + (away + left) * (away - left + 2 * offset))
            by_b = torch.exp(torch.log(chance) + (away - right) * (away + right + 2 * offset))
            z = away + offset
        bounds = by_a * (seen.offset - seen.left) + by_b * (seen.offset + seen.right)
        path = self.loc + z * seen.unit + unit * bounds
        return found + (path - path.detach()), away


class TruncatedStandardNormal(TruncatedNormal):
    """The standard normal distribution, cut off outside an interval.

    Args:
        a: the lower bound.
        b: the upper bound.
        validate_args: as for :class:`TruncatedNormal`.
    """

    def __init__(self, a: Tensor | float, b: Tensor | float, validate_args: bool | None = None) -> None:
        super().__init__(0.0, 1.0, a, b, validate_args)
