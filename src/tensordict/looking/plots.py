"""Plot leaves with Matplotlib as histograms or lines; used by `TensorDict.plot` and by reports."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract, is_node
from tensordict.core.extras import require
from tensordict.core.keys import Path
from tensordict.looking.markup import number_text
from tensordict.looking.read_limits import why_unreadable
from tensordict.looking.tally import Numbers, to_numbers
from tensordict.memory.stored_tensors import read_stored

BINS = 40
# Matplotlib adds coordinates, which overflows for larger values.
_FARTHEST = 1e300
# Limits of a plot: elements read for a histogram, points of a line, and lines with a color of their own.
_MOST, _POINTS, _LINES = 1 << 20, 2000, 8


def draw_figure(
    container: Any, dim: int | None, bins: int, most: int, ax: Any, figsize: tuple[float, float] | None
) -> Any:
    """Draw the figure for `TensorDict.plot`, which has checked the arguments."""
    leaves = [
        (path, node, name) for path, node, name in _iter_leaves(container, ()) if dim is None or _has_dim(node, name)
    ]
    if not leaves:
        raise ValueError(f"there is no leaf of numbers to plot; the keys are {list(container.keys(True))!r:.200}")
    shown = leaves[:most]
    axes = _make_axes(ax, len(shown), figsize)
    for place, (path, node, name) in zip(axes, shown):
        if dim is None:
            _draw_histogram(place, path, node, name, bins)
        else:
            _draw_lines(place, path, node, name, dim)
    for place in axes[len(shown) :]:
        place.set_axis_off()
    figure = axes[0].figure
    if len(leaves) > len(shown):
        rest = len(leaves) - len(shown)
        text = f"{rest:,} more {'leaf is' if rest == 1 else 'leaves are'} not shown: keys= chooses, most= shows more"
        figure.supxlabel(text, fontsize="small")
    return figure


def _iter_leaves(node: Contract, path: Path) -> Iterator[tuple[Path, Any, str]]:
    """Yield for each numeric leaf its nested key, its container, and its name in that container."""
    for name, value in node._structure().items():
        if is_node(value):
            if not value._is_non_tensor:
                yield from _iter_leaves(value, (*path, name))
        elif isinstance(value, Tensor) and not why_unreadable(value) and not value.dtype.is_complex:
            yield (*path, name), node, name


def _has_dim(node: Contract, name: str) -> bool:
    return all(type(size) is int and size >= 0 for size in node._shape_of(name))


def _make_axes(ax: Any, count: int, figsize: tuple[float, float] | None) -> Sequence[Any]:
    if ax is not None:
        places = np.atleast_1d(np.asarray(ax, dtype=object)).reshape(-1).tolist()
        if len(places) < count:
            raise ValueError(
                f"there are {count} leaves and {len(places)} axes: keys= chooses leaves, most= limits them"
            )
        return places  # type: ignore[no-any-return]
    columns = min(count, math.ceil(math.sqrt(count)), 4)
    rows = math.ceil(count / columns)
    figure = require("matplotlib.figure", "report").Figure(figsize or (3.2 * columns, 2.4 * rows), layout="constrained")
    # Notebooks call this method to display the figure, even without `%matplotlib inline`.
    figure._repr_png_ = partial(_encode_png, figure)
    return np.atleast_1d(figure.subplots(rows, columns)).reshape(-1).tolist()  # type: ignore[no-any-return]


def _encode_png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


# --- histograms -------------------------------------------------------------------------------------------------------


def bin_edges(samples: Sequence[Numbers], bins: int = BINS) -> Numbers | None:
    """Return the edges of histogram bins that cover all samples.

    For integers, every bin covers the same number of integers. Returns `None` when there are no elements, or when
    they are too far apart for Matplotlib.
    """
    filled = [sample for sample in samples if sample.size]
    if not filled:
        return None
    low, high = float(min(sample.min() for sample in filled)), float(max(sample.max() for sample in filled))
    if max(-low, high) > _FARTHEST:
        return None
    # Above 2**52, float64 has no halves, so edges between integers cannot be expressed.
    if max(-low, high) < 1 << 52 and all((sample == np.round(sample)).all() for sample in filled):
        width = math.ceil((high - low + 1) / bins)
        return np.arange(low - 0.5, high + width, width)
    return np.linspace(low, high, bins + 1) if low < high else np.array([low - 0.5, low + 0.5])


def is_constant(sample: Numbers) -> bool:
    """Return whether all elements are one number, or there are none."""
    return not sample.size or bool(sample.min() == sample.max())


def select_finite(numbers: Numbers) -> Numbers:
    """Return the finite elements as float64."""
    wide = numbers.astype(np.float64)
    return wide[np.isfinite(wide)]


def _draw_histogram(place: Any, path: Path, node: Any, name: str, bins: int) -> None:
    rows = len(node) if node._batch_size else 1
    shape = node._shape_of(name)
    # A ragged dim has the size -1 or a symbolic size.
    count = math.prod(size for size in shape if type(size) is int and size > 0)
    step = max(1, math.ceil(count / _MOST)) if rows > 1 else 1
    taken = node._index(slice(None, None, step)) if step > 1 else node
    parts = [ragged.pack_elements(read_stored(leaf)) for leaf in taken._leaves_of(name)]
    numbers = np.concatenate([to_numbers(part) for part in parts]) if parts else np.zeros(0)
    sample = select_finite(numbers)
    notes = [f"1 of {step:,} rows"] if step > 1 else []
    if missing := numbers.size - sample.size:
        notes.append(f"{missing:,} not finite")
    edges = bin_edges([sample], bins)
    if edges is None:
        notes.append("no numbers" if not sample.size else "too far apart")
    elif is_constant(sample):
        place.text(0.5, 0.5, f"constant: {number_text(sample[0].item())}", ha="center", transform=place.transAxes)
        place.set(xticks=[], yticks=[])
    else:
        place.stairs(np.histogram(sample, edges)[0], edges, fill=True)
    _set_title(place, path, notes)


def _set_title(place: Any, path: Path, notes: Sequence[str]) -> None:
    # Matplotlib reads text between dollar signs as a formula.
    place.set_title(".".join(path).replace("$", r"\$"), fontsize="medium", loc="left")
    if notes:
        place.set_title(", ".join(notes), fontsize="x-small", loc="right")
    place.tick_params(labelsize="small")


# --- lines ------------------------------------------------------------------------------------------------------------


def _draw_lines(place: Any, path: Path, node: Any, name: str, dim: int) -> None:
    length = node._batch_size[dim]
    step = max(1, math.ceil(length / _POINTS))
    taken = node._index((slice(None),) * dim + (slice(None, None, step),)) if step > 1 else node
    leaf = read_stored(taken._entries[name])
    table = to_numbers(leaf.movedim(dim, 0)).reshape(leaf.shape[dim], -1).astype(np.float64)
    at = np.arange(0, length, step)
    notes = [f"1 of {step:,} points"] if step > 1 else []
    lines = table.shape[1]
    if lines <= _LINES:
        for number in range(lines):
            place.plot(at, table[:, number], label=str(number) if lines > 1 else None)
        if lines > 1:
            place.legend(fontsize="x-small")
    else:
        notes.append(f"mean and range of {lines:,}")
        with np.errstate(invalid="ignore", over="ignore"):
            place.plot(at, table.mean(1))
            place.fill_between(at, table.min(1), table.max(1), alpha=0.25, linewidth=0)
    label = None if node._names is None else node._names[dim]
    place.set_xlabel(label or f"dim {dim}", fontsize="small")
    _set_title(place, path, notes)
