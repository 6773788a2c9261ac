"""Count and summarize the elements of a tensor that is read piece by piece; used by `inspect`, reports and trees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.io.saving.comparing import OPAQUE
from tensordict.looking.markup import number_text, span

Numbers = np.ndarray[Any, np.dtype[Any]]

# Elements are converted to float64 in pieces that fit into the cache of the processor.
_PIECE = 1 << 15
# NumPy lacks the other floating point dtypes. float32 holds each of their values exactly.
_FLOATS = (torch.float16, torch.float32, torch.float64)


def to_numbers(tensor: Tensor) -> Numbers:
    """Return the elements as a one-dimensional NumPy array, which shares the memory of the tensor if possible.

    Raises:
        TypeError: torch cannot compute with this dtype.
    """
    plain = tensor.detach().as_subclass(Tensor)
    if plain.dtype in OPAQUE:
        raise TypeError(f"there are no numbers of {plain.dtype}")
    if plain.dtype is torch.complex32:
        plain = plain.to(torch.complex64)
    elif plain.is_floating_point() and plain.dtype not in _FLOATS:
        plain = plain.float()
    return plain.cpu().resolve_conj().resolve_neg().reshape(-1).numpy()


class Tally:
    """Statistics of elements that are added piece by piece.

    NaN and infinite elements are counted, and left out of all other figures. Complex numbers have no least or greatest.

    Attributes:
        count, nan, infinite, zero: the number of all elements, and of these kinds.
        least, greatest: `None` without finite elements.
        mean: the mean of the finite elements; for bool, the share of `True`; NaN without finite elements.
    """

    def __init__(self) -> None:
        self.count = self.nan = self.infinite = self.zero = 0
        self.least: Any = None
        self.greatest: Any = None
        self.mean: Any = math.nan
        self._finite = 0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """The standard deviation with Bessel's correction; NaN for fewer than two elements."""
        return math.sqrt(self._squares / (self._finite - 1)) if self._finite > 1 else math.nan

    @property
    def is_constant(self) -> bool:
        """True when all elements are the same number."""
        return self.count > 0 and self.count == self._finite and self.least is not None and self.least == self.greatest

    def add(self, numbers: Numbers) -> None:
        """Add elements from :func:`to_numbers`."""
        for start in range(0, numbers.size, _PIECE):
            self._add(numbers[start : start + _PIECE])

    def _add(self, numbers: Numbers) -> None:
        self.count += numbers.size
        self.zero += numbers.size - int(np.count_nonzero(numbers))
        if numbers.dtype.kind in "fc":
            finite = np.isfinite(numbers)
            if not finite.all():
                nan = int(np.isnan(numbers).sum())
                self.nan += nan
                self.infinite += int(numbers.size - finite.sum()) - nan
                numbers = numbers[finite]
        if not numbers.size:
            return
        if numbers.dtype.kind != "c":
            least, greatest = numbers.min().item(), numbers.max().item()
            self.least = least if self.least is None else min(self.least, least)
            self.greatest = greatest if self.greatest is None else max(self.greatest, greatest)
        wide = numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = wide.mean().item()
            wide -= mean
            squares = float(np.vdot(wide, wide).real)
        # Merge two means and variances:
        # https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm.
        before, self._finite = self._finite, self._finite + wide.size
        gap = mean - self.mean if before else mean
        self.mean = self.mean + gap * (wide.size / self._finite) if before else mean
        self._squares += squares + (abs(gap) ** 2 * before * wide.size / self._finite if before else 0.0)


def list_figures(tally: Tally) -> dict[str, str]:
    """Return the figures of a tally as text by name, without figures that do not apply."""
    found: dict[str, str] = {}
    if tally.count == 1 and tally.least is not None:
        return {"value": number_text(tally.least)}
    if isinstance(tally.least, bool) and not tally.is_constant:
        return {"true": f"{tally.mean:.1%}"}
    if tally.is_constant:
        return {"all": number_text(tally.least)}
    if tally.least is not None:
        found |= {"min": number_text(tally.least), "mean": number_text(tally.mean), "max": number_text(tally.greatest)}
    elif not isinstance(tally.mean, float) or not math.isnan(tally.mean):
        found["mean"] = number_text(tally.mean)
    found |= {name: f"{count:,}" for name, count in (("NaN", tally.nan), ("infinite", tally.infinite)) if count}
    return found or {"elements": "none"}


def figures_html(figures: Mapping[str, str]) -> str:
    """Return figures with their names as HTML."""
    shown = (
        f'<span class="td-figure">{span("name", name)}'
        f"{span('bad' if name in ('NaN', 'infinite') else 'values', text)}</span>"
        for name, text in figures.items()
    )
    return f"<div>{' '.join(shown)}</div>"
