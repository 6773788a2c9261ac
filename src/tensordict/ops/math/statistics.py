"""Descriptive statistics of the elements of one leaf, like pandas' `DataFrame.describe`; `td.describe` uses them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

# The number of elements converted to float64 at a time.
_PIECE = 1 << 18
# Floating point dtypes that NumPy, or torch on other devices, can sort. Other ones convert exactly to float32.
_SORTED_FLOATS = (torch.float16, torch.float32, torch.float64)
_SORTED_ON_CPU_ONLY = (torch.uint16, torch.uint32, torch.uint64)


def name_quantiles(percentiles: Sequence[float]) -> dict[str, float]:
    """Return a dict from names of quantiles, such as `"25%"`, to fractions, in ascending order.

    Raises:
        ValueError: a fraction is not in [0, 1], or given twice.
    """
    outside = [q for q in percentiles if not 0 <= q <= 1]
    if outside:
        raise ValueError(
            f"percentiles are fractions between 0 and 1, such as 0.25 for the lower quartile, got {outside}"
        )
    names = {f"{100 * q:g}%": float(q) for q in sorted(percentiles)}
    if len(names) < len(percentiles):
        raise ValueError(f"percentiles are given once each, got {list(percentiles)}")
    return names


def compute_statistics(parts: Sequence[Tensor], quantiles: dict[str, float]) -> dict[str, Tensor]:
    """Compute statistics of all elements of tensors of one dtype. Returns scalars on the device of the tensors.

    Args:
        parts: the tensors. They must not be ragged, nor mix real and complex numbers.
        quantiles: the result of :func:`name_quantiles`.
    """
    rows = [part.detach().as_subclass(Tensor).flatten() for part in parts]
    values = rows[0] if len(rows) == 1 else torch.cat(rows)
    total, device = values.numel(), values.device
    missing, zero = _count_nan_and_zero(values)
    # Complex numbers cannot be sorted.
    values = values[~values.isnan()] if values.is_complex() else _sort(values)[: total - missing]
    mean, std = _compute_moments(values)
    found: dict[str, object] = {"count": total - missing, "mean": mean, "std": std}
    if not values.is_complex():
        found |= _compute_ranks(values, parts[0].dtype, quantiles)
    found["nan"] = missing / total if total else math.nan
    found["zero"] = zero / total if total else math.nan
    return {name: _make_scalar(value, device) for name, value in found.items()}


def _make_scalar(value: object, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device)
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.tensor(value, dtype=wide if isinstance(value, float) else None, device=device)


def _compute_moments(values: Tensor) -> tuple[float | Tensor, float]:
    """Return the mean, and the standard deviation with Bessel's correction. Two passes in float64, piece by piece."""
    count = values.numel()
    if not count:
        return math.nan, math.nan
    mean = torch.stack([piece.sum() for piece in _split_wide(values)]).sum() / count
    squares = sum([float(torch.linalg.vector_norm(piece - mean)) ** 2 for piece in _split_wide(values)])
    return mean, math.sqrt(squares / (count - 1)) if count > 1 else math.nan


def _count_nan_and_zero(values: Tensor) -> tuple[int, int]:
    """Return the number of NaN elements and the number of zero elements."""
    found = [torch.stack([piece.isnan().sum(), (piece == 0).sum()]) for piece in _split_wide(values)]
    missing, zero = torch.stack(found).sum(0).tolist()
    return missing, zero


def _split_wide(values: Tensor) -> Iterator[Tensor]:
    """Convert a tensor of one dim to float64, or to complex128, piece by piece. MPS has single precision only."""
    wide = torch.complex128 if values.is_complex() else torch.float64
    if values.device.type == "mps":
        wide = torch.complex64 if values.is_complex() else torch.float32
    return (piece.to(wide) for piece in torch.split(values, _PIECE))


def _compute_ranks(ordered: Tensor, dtype: torch.dtype, quantiles: dict[str, float]) -> dict[str, object]:
    """Return the minimum, the quantiles with linear interpolation, and the maximum of sorted elements."""
    count = ordered.numel()
    if not count:
        return dict.fromkeys(itertools.chain(["min"], quantiles, ["max"]), math.nan)
    found: dict[str, object] = {"min": ordered[0].to(dtype)}
    for name, part in quantiles.items():
        at = part * (count - 1)
        below = math.floor(at)
        low, high = (float(ordered[min(i, count - 1)]) for i in (below, below + 1))
        # Do not interpolate between two infinities, which would give NaN.
        found[name] = low if low == high or at == below else low + (high - low) * (at - below)
    return {**found, "max": ordered[-1].to(dtype)}


def _sort(values: Tensor) -> Tensor:
    """Sort a tensor of one dim in ascending order, with NaN at the end."""
    if values.is_floating_point() and values.dtype not in _SORTED_FLOATS:
        values = values.float()
    if values.is_cpu or values.dtype in _SORTED_ON_CPU_ONLY:
        # NumPy chooses an algorithm for the processor. It is 4 to 14 times faster than torch for floats and int64.
        return torch.from_numpy(np.sort(values.cpu().numpy()))
    return values.sort().values
