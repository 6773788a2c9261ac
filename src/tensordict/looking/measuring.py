"""What a report says of the leaves of a save, which are read piece by piece."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from tensordict.core.keys import Path
from tensordict.io.columns import taken
from tensordict.io.comparing import pieces, read_piece, source_of
from tensordict.io.progress import Progress
from tensordict.io.specification import LAZY, WRAPPED, LeafSpec, Specification, specified
from tensordict.looking.images import first_images, image_form
from tensordict.looking.markup import number_text
from tensordict.looking.plots import finite
from tensordict.looking.reading import first_index, first_numbers
from tensordict.looking.tally import Numbers, Tally, numbers_of
from tensordict.memory.system import give_back_memory

# So many elements of a leaf, drawn at random, are in its histogram.
_SAMPLE = 1 << 16
# Rows of at most so many elements are looked at element by element, as columns of a table.
_MOST_COLUMNS = 4096
# The bytes of a leaf that is read in many pieces.
_LARGE = 32 << 20
_MOST_IMAGES, ROWS, _IN_A_CELL = 6, 5, 4
# Stands in the key of a leaf for the members of a lazy stack, which are looked at together.
MEMBER = "*"


@dataclass
class LeafGroup:
    """A leaf of a save, or the leaf of this key in all members of a lazy stack.

    batch_dims: of the container that it is in.
    """

    key: Path
    batch_dims: int
    specs: list[LeafSpec] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        """Its dtype without the name of torch; those of the members, where they differ."""
        return ", ".join(dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in self.specs))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, or that of a member, with -1 for the dims in which members or rows differ."""
        shapes = [spec.shape for spec in self.specs]
        if len({len(shape) for shape in shapes}) > 1:
            return (-1,)
        return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes))

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def is_table(self) -> bool:
        """Whether its first dim is that of the rows of a batch."""
        return len(self.specs) == 1 and self.batch_dims > 0 and not self.specs[0].ragged

    @property
    def has_columns(self) -> bool:
        """Whether each element of its rows is looked at by itself, as those of images are not."""
        row = self.shape[1:]
        return (
            self.is_table
            and len(row) > 0
            and math.prod(row) <= _MOST_COLUMNS
            and not image_form(self.shape[self.batch_dims :], self.specs[0].dtype)
        )


def groups_of(root: Specification) -> tuple[dict[Path, LeafGroup], dict[Path, list[Specification]]]:
    """The leaves of a save by their keys, and the values that are no tensors."""
    leaves: dict[Path, LeafGroup] = {}
    values: dict[Path, list[Specification]] = {}
    _collect(root, (), leaves, values)
    return leaves, values


def _collect(
    node: Specification, key: Path, leaves: dict[Path, LeafGroup], values: dict[Path, list[Specification]]
) -> None:
    inner = specified(node.entries[WRAPPED]) if node.is_tensorclass else node
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
    """Of each element of the rows of a table, its least and greatest value and how often it is NaN."""

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
        """The positions at which all rows have one number."""
        return self._at((self._least == self._greatest) & (self._nan == 0))

    def with_nan(self) -> list[tuple[int, ...]]:
        """The positions at which a row has NaN."""
        return self._at(self._nan > 0)

    def _at(self, which: Any) -> list[tuple[int, ...]]:
        return [tuple(map(int, at)) for at in np.argwhere(which.reshape(self.shape))]


@dataclass
class Measured:
    """What was found out of a leaf.

    read: how many of its elements were read for the figures; all, unless a limit was set.
    sample: finite elements for the histogram, all or drawn at random.
    rows: the text of the first rows of a table.
    is_drawn: whether the sample is not of all elements that were read.
    problem: why it could not be read.
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
        """Whether not all elements were read."""
        return self.tally.count < self.total


def measured(group: LeafGroup, limit: int, bar: Progress | None) -> Measured:
    """Read a leaf piece by piece; no more than a piece of 8 MiB, and what is shown, is in memory at a time.

    Compressed entries of archives, ragged leaves of data sets and leaves behind URLs are fetched whole, one at a time.

    Args:
        group: the leaf.
        limit: about how many bytes of it to read, in pieces at equal distances; 0 for all.
        bar: is told of the bytes that were read.
    """
    found = Measured(group, total=sum(spec.nbytes // spec.dtype.itemsize for spec in group.specs))
    try:
        _measure(found, max(1, math.ceil(group.nbytes / limit)) if limit else 1, bar)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        # What is broken, or has no numbers, is told, and the rest of the report is made.
        found.problem = f"{error}"
    return found


def _measure(found: Measured, every: int, bar: Progress | None) -> None:
    group, random = found.group, np.random.default_rng(0)
    drawn, count = np.empty(2 * _SAMPLE), 0
    if group.has_columns:
        found.columns = ColumnFigures(group.shape[1:])
    for spec in group.specs:
        source = source_of(spec)
        elements = taken(source)[0] if spec.ragged else source
        # Of what is ragged in a file, the size is known by now.
        found.total += elements.numel() - spec.nbytes // spec.dtype.itemsize
        _look(found, spec, elements)
        for index in islice(pieces(tuple(elements.shape), elements.dtype.itemsize), 0, None, every):
            piece = read_piece(elements, index)
            numbers = numbers_of(piece)
            found.tally.add(numbers)
            if numbers.dtype.kind != "c":
                found.is_drawn = found.total // every > _SAMPLE
                sample = finite(_drawn(numbers, found.total // every, random))[: drawn.size - count]
                drawn[count : count + sample.size] = sample
                count += sample.size
                del sample
                if found.columns is not None:
                    found.columns.add(numbers)
            if bar is not None:
                bar.add(piece.numel() * piece.itemsize)
            del piece, numbers
            if spec.nbytes > _LARGE:
                # What opening a shard of a data set leaves between two pieces keeps the C library from using their
                # memory again: 160 MiB grew out of 288 that were read.
                give_back_memory()
    if found.columns is not None and not found.tally.count:
        found.columns = None
    found.sample = drawn[:count].copy()


def _drawn(numbers: Numbers, total: int, random: np.random.Generator) -> Numbers:
    """All of a piece of few elements, else as many at random as are its share."""
    if total <= _SAMPLE or not numbers.size:
        return numbers
    # Rounded at random, as a piece may be of one element.
    wanted = int(_SAMPLE * numbers.size / total + random.random())
    return numbers[random.integers(0, numbers.size, wanted)]


def _look(found: Measured, spec: LeafSpec, elements: Tensor) -> None:
    """Take the first elements, images and rows."""
    group = found.group
    reader: Any = _OnIndex(elements)
    known = sum(piece.size for piece in found.first)
    if known < 8:
        found.first += first_numbers([reader], 8 - known)
    if spec.ragged:
        return
    if form := image_form(spec.shape[group.batch_dims :], spec.dtype):
        count = math.prod(spec.shape[: len(spec.shape) - len(form)])
        urls = first_images([reader], form, _MOST_IMAGES - len(found.images))
        found.images += urls
        found.more_images += count - len(urls)
    if group.is_table:
        found.rows = [_cell(row) for row in _heads(elements)]


class _OnIndex:
    """A tensor of which what is indexed is read, and nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape, self.ndim = tensor, tensor.shape, tensor.ndim

    def __getitem__(self, index: Any) -> Tensor:
        return read_piece(self._tensor, index)


def _heads(elements: Tensor) -> list[Numbers]:
    """The first elements of the first rows, read at once."""
    read = read_piece(elements, (slice(ROWS), *first_index(elements.shape[1:], _IN_A_CELL + 1)))
    return [numbers_of(row)[: _IN_A_CELL + 1] for row in read]


def _cell(numbers: Numbers) -> str:
    more = ", …" if numbers.size > _IN_A_CELL else ""
    return ", ".join(map(number_text, numbers[:_IN_A_CELL].tolist())) + more
