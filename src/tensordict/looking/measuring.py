"""Compute the figures, samples and images of saved leaves for a report, piece by piece; used by `report.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from tensordict.core.keys import Path
from tensordict.io.formats.stack_columns import split_ragged
from tensordict.io.saving.comparing import cut_pieces, open_source, read_piece
from tensordict.io.saving.progress import Progress
from tensordict.io.specification import LAZY, WRAPPED, LeafSpec, Specification, specify
from tensordict.looking.images import find_image_form, first_images
from tensordict.looking.markup import number_text
from tensordict.looking.plots import select_finite
from tensordict.looking.read_limits import first_index, first_numbers
from tensordict.looking.tally import Numbers, Tally, to_numbers
from tensordict.memory.system import give_back_memory

# A histogram uses at most this many elements of its leaf, chosen at random.
_SAMPLE = 1 << 16
# Rows with at most this many elements get figures for each column.
_MOST_COLUMNS = 4096
# Leaves above this size return freed memory to the system between pieces.
_LARGE = 32 << 20
_MOST_IMAGES, ROWS, _IN_A_CELL = 6, 5, 4
# In keys, this name stands for all members of a lazy stack, which are measured together.
MEMBER = "*"


@dataclass
class LeafGroup:
    """A leaf of a save, or the leaves of the same key in all members of a lazy stack.

    batch_dims: the number of batch dims of the container that holds it.
    """

    key: Path
    batch_dims: int
    specs: list[LeafSpec] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        """The dtype without `torch.`; all dtypes, when the members differ."""
        return ", ".join(dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in self.specs))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf or of each member, with -1 for dims that differ between members or rows."""
        shapes = [spec.shape for spec in self.specs]
        if len({len(shape) for shape in shapes}) > 1:
            return (-1,)
        return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes))

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def is_table(self) -> bool:
        """True when the first dim counts the rows of a batch."""
        return len(self.specs) == 1 and self.batch_dims > 0 and not self.specs[0].ragged

    @property
    def has_columns(self) -> bool:
        """True when each column of the rows gets its own figures. Columns of images do not."""
        row = self.shape[1:]
        return (
            self.is_table
            and len(row) > 0
            and math.prod(row) <= _MOST_COLUMNS
            and not find_image_form(self.shape[self.batch_dims :], self.specs[0].dtype)
        )


def collect_groups(root: Specification) -> tuple[dict[Path, LeafGroup], dict[Path, list[Specification]]]:
    """Collect the leaves of a save by key, and the values that are not tensors."""
    leaves: dict[Path, LeafGroup] = {}
    values: dict[Path, list[Specification]] = {}
    _collect(root, (), leaves, values)
    return leaves, values


def _collect(
    node: Specification, key: Path, leaves: dict[Path, LeafGroup], values: dict[Path, list[Specification]]
) -> None:
    inner = specify(node.entries[WRAPPED]) if node.is_tensorclass else node
    if inner.is_tensorclass:
        _collect(inner, key, leaves, values)
        return
    is_stack = inner.kind == LAZY and not inner.columns
    for name, entry in inner.fields().items():
        path = (*key, MEMBER if is_stack else name)
        if isinstance(entry, LeafSpec):
            leaves.setdefault(path, LeafGroup(path, len(node.batch_size))).specs.append(entry)
        elif entry.is_value:
            values.setdefault(path, []).append(entry)
        else:
            _collect(entry, path, leaves, values)


class ColumnFigures:
    """Least value, greatest value and number of NaNs for each column of a table."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._least = np.full(math.prod(shape), np.inf)
        self._greatest = np.full(math.prod(shape), -np.inf)
        self._nan = np.zeros(math.prod(shape), np.int64)

    def add(self, numbers: Numbers) -> None:
        """Add whole rows."""
        rows = numbers.reshape(-1, self._nan.size)
        np.fmin(self._least, np.fmin.reduce(rows, axis=0), out=self._least)
        np.fmax(self._greatest, np.fmax.reduce(rows, axis=0), out=self._greatest)
        if numbers.dtype.kind == "f":
            self._nan += np.isnan(rows).sum(0)

    def constant(self) -> list[tuple[int, ...]]:
        """Return the positions of the columns that hold one number in all rows."""
        return self._at((self._least == self._greatest) & (self._nan == 0))

    def with_nan(self) -> list[tuple[int, ...]]:
        """Return the positions of the columns that hold a NaN in any row."""
        return self._at(self._nan > 0)

    def _at(self, which: Any) -> list[tuple[int, ...]]:
        return [tuple(map(int, at)) for at in np.argwhere(which.reshape(self.shape))]


@dataclass
class LeafFigures:
    """The results of measuring one leaf.

    total: the number of its elements. Fewer are read when a limit is set.
    sample: finite elements for the histogram: all of them, or a random choice.
    rows: the text of the first rows of a table.
    is_drawn: the sample is a random choice.
    problem: the reason why the leaf could not be read.
    """

    group: LeafGroup
    tally: Tally = field(default_factory=Tally)
    total: int = 0
    sample: Numbers = field(default_factory=lambda: np.zeros(0))
    columns: ColumnFigures | None = None
    first: list[Numbers] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    more_images: int = 0
    is_drawn: bool = False
    problem: str = ""

    @property
    def is_sampled(self) -> bool:
        """True when only part of the elements was read."""
        return self.tally.count < self.total


def measure_leaf(group: LeafGroup, limit: int, bar: Progress) -> LeafFigures:
    """Measure a leaf piece by piece. Only one piece of 8 MiB, and the displayed elements, are in memory at a time.

    Compressed entries of archives, ragged leaves of data sets and leaves behind URLs are fetched whole, one at a time.

    Args:
        group: the leaf.
        limit: about how many bytes of it to read, in pieces at equal distances; 0 reads everything.
        bar: a progress bar that counts the bytes read.
    """
    found = LeafFigures(group, total=sum(spec.nbytes // spec.dtype.itemsize for spec in group.specs))
    try:
        _measure(found, max(1, math.ceil(group.nbytes / limit)) if limit else 1, bar)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        # A broken leaf, or a dtype without numbers, is reported, and the other leaves are measured all the same.
        found.problem = f"{error}"
    return found


def _measure(found: LeafFigures, every: int, bar: Progress) -> None:
    group, random = found.group, np.random.default_rng(0)
    drawn, count = np.empty(2 * _SAMPLE), 0
    if group.has_columns:
        found.columns = ColumnFigures(group.shape[1:])
    for spec in group.specs:
        source = open_source(spec)
        elements = split_ragged(source)[0] if spec.ragged else source
        # Add the elements of a ragged leaf: their number is known only once the leaf is opened.
        found.total += elements.numel() - spec.nbytes // spec.dtype.itemsize
        _read_display(found, spec, elements)
        for index in islice(cut_pieces(tuple(elements.shape), elements.dtype.itemsize), 0, None, every):
            piece = read_piece(elements, index)
            numbers = to_numbers(piece)
            found.tally.add(numbers)
            if numbers.dtype.kind != "c":
                found.is_drawn = found.total // every > _SAMPLE
                sample = select_finite(_draw_sample(numbers, found.total // every, random))[: drawn.size - count]
                drawn[count : count + sample.size] = sample
                count += sample.size
                del sample
                if found.columns is not None:
                    found.columns.add(numbers)
            bar.add(piece.numel() * piece.itemsize)
            del piece, numbers
            if spec.nbytes > _LARGE:
                # Opening a shard of a data set between two pieces keeps the C library from reusing their memory.
                # Without this call,
                # reading 288 MiB grew the process by 160 MiB.
                give_back_memory()
    if found.columns is not None and not found.tally.count:
        found.columns = None
    found.sample = drawn[:count].copy()


def _draw_sample(numbers: Numbers, total: int, random: np.random.Generator) -> Numbers:
    """Return all elements if there are few in total, else a random choice in proportion to the size of the piece."""
    if total <= _SAMPLE or not numbers.size:
        return numbers
    # Random rounding: a piece may have one element, and would never or always be chosen.
    wanted = int(_SAMPLE * numbers.size / total + random.random())
    return numbers[random.integers(0, numbers.size, wanted)]


def _read_display(found: LeafFigures, spec: LeafSpec, elements: Tensor) -> None:
    """Keep the first elements, images and rows for display."""
    group = found.group
    reader: Any = _LazyReader(elements)
    known = sum(piece.size for piece in found.first)
    if known < 8:
        found.first += first_numbers([reader], 8 - known)
    if spec.ragged:
        return
    if form := find_image_form(spec.shape[group.batch_dims :], spec.dtype):
        count = math.prod(spec.shape[: len(spec.shape) - len(form)])
        urls = first_images([reader], form, _MOST_IMAGES - len(found.images))
        found.images += urls
        found.more_images += count - len(urls)
    if group.is_table:
        found.rows = [_format_cell(row) for row in _read_first_rows(elements)]


class _LazyReader:
    """A tensor that reads only the elements that an index selects."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape, self.ndim = tensor, tensor.shape, tensor.ndim

    def __getitem__(self, index: Any) -> Tensor:
        return read_piece(self._tensor, index)


def _read_first_rows(elements: Tensor) -> list[Numbers]:
    """Return the first elements of the first rows, in one read."""
    read = read_piece(elements, (slice(ROWS), *first_index(elements.shape[1:], _IN_A_CELL + 1)))
    return [to_numbers(row)[: _IN_A_CELL + 1] for row in read]


def _format_cell(numbers: Numbers) -> str:
    more = ", …" if numbers.size > _IN_A_CELL else ""
    return ", ".join(map(number_text, numbers[:_IN_A_CELL].tolist())) + more
