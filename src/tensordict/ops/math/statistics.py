"""Descriptive statistics of the elements of one leaf, as `DataFrame.describe` of pandas gives them of a column."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

# How many elements are converted to float64 at a time.
_PIECE = 1 << 18
# What NumPy, or torch on other devices, sorts; other floating point dtypes are exact in float32.
_SORTED_FLOATS = (torch.float16, torch.float32, torch.float64)
_SORTED_ON_CPU_ONLY = (torch.uint16, torch.uint32, torch.uint64)


def quantile_names(percentiles: Sequence[float]) -> dict[str, float]:
    """The names of quantiles, such as `"25%"`, with the part of the elements below each, in ascending order.

    Raises:
        ValueError: one is not in [0, 1], or given twice.
    """
    outside = [q for q in percentiles if not 0 <= q <= 1]
    if outside:
        raise ValueError(f"percentiles are parts between 0 and 1, as 0.25 for the lower quartile, got {outside}")
    names = {f"{100 * q:g}%": float(q) for q in sorted(percentiles)}
    if len(names) < len(percentiles):
        raise ValueError(f"percentiles are given once each, got {list(percentiles)}")
    return names


def statistics_of(parts: Sequence[Tensor], quantiles: dict[str, float]) -> dict[str, Tensor]:
    """The statistics of all elements of some tensors of one dtype, as scalars on their device.

    Args:
        parts: the tensors, none of them ragged or complex ones among real ones.
        quantiles: what :func:`quantile_names` gives.
    """
    rows = [part.detach().as_subclass(Tensor).flatten() for part in parts]
    values = rows[0] if len(rows) == 1 else torch.cat(rows)
    total, device = values.numel(), values.device
    missing, zero = _counts(values)
    # Of complex numbers there is no order.
    values = values[~values.isnan()] if values.is_complex() else _sorted(values)[: total - missing]
    mean, std = _moments(values)
    found: dict[str, object] = {"count": total - missing, "mean": mean, "std": std}
    if not values.is_complex():
        found |= _ranks(values, parts[0].dtype, quantiles)
    found["nan"] = missing / total if total else math.nan
    found["zero"] = zero / total if total else math.nan
    return {name: _scalar(value, device) for name, value in found.items()}


def _scalar(value: object, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device)
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.tensor(value, dtype=wide if isinstance(value, float) else None, device=device)


def _moments(values: Tensor) -> tuple[float | Tensor, float]:
    """The mean, and the standard deviation with Bessel's correction: in float64, in two passes over pieces."""
    count = values.numel()
    if not count:
        return math.nan, math.nan
    mean = torch.stack([piece.sum() for piece in _wide_pieces(values)]).sum() / count
    squares = sum([float(torch.linalg.vector_norm(piece - mean)) ** 2 for piece in _wide_pieces(values)])
    return mean, math.sqrt(squares / (count - 1)) if count > 1 else math.nan


def _counts(values: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many are zero."""
    found = [torch.stack([piece.isnan().sum(), (piece == 0).sum()]) for piece in _wide_pieces(values)]
    missing, zero = torch.stack(found).sum(0).tolist()
    return missing, zero


def _wide_pieces(values: Tensor) -> Iterator[Tensor]:
    """The elements of one dim in float64, or in complex128, some at a time."""
    wide = torch.complex128 if values.is_complex() else torch.float64
    if values.device.type == "mps":
        wide = torch.complex64 if values.is_complex() else torch.float32
    return (piece.to(wide) for piece in torch.split(values, _PIECE))


def _ranks(ordered: Tensor, dtype: torch.dtype, quantiles: dict[str, float]) -> dict[str, object]:
    """The least value, the quantiles with linear interpolation, and the greatest of elements in ascending order."""
    count = ordered.numel()
    if not count:
        return dict.fromkeys(itertools.chain(["min"], quantiles, ["max"]), math.nan)
    found: dict[str, object] = {"min": ordered[0].to(dtype)}
    for name, part in quantiles.items():
        at = part * (count - 1)
        below = math.floor(at)
        low, high = (float(ordered[min(i, count - 1)]) for i in (below, below + 1))
        # Not where both are infinite, which would be NaN.
        found[name] = low if low == high or at == below else low + (high - low) * (at - below)
    return {**found, "max": ordered[-1].to(dtype)}


def _sorted(values: Tensor) -> Tensor:
    """The elements of one dim in ascending order, NaN at the end."""
    if values.is_floating_point() and values.dtype not in _SORTED_FLOATS:
        values = values.float()
    if values.is_cpu or values.dtype in _SORTED_ON_CPU_ONLY:
        # As fast as NumPy chooses by the processor: 4 to 14 times torch's speed for floats and int64.
        return torch.from_numpy(np.sort(values.cpu().numpy()))
    return values.sort().values
