"""The containers that a lazy concatenation consists of, and entries of it: rows of the entries of all of them."""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.core.contract import Contract, is_node
from tensordict.core.errors import ShapeError
from tensordict.core.keys import Path, joined
from tensordict.memory.stored_tensors import Selection, StoredTensor, Values, in_memory, tensor_of
from tensordict.ops.stacking import cat_containers

# Some rows of one part, and where they are among all that are taken.
Piece = tuple[int, Any, slice]


class Parts(Sequence[Any]):
    """Containers one behind the other: which row is in which of them. Others can only be added.

    Attributes:
        template: a container with the schema of all of them.
        starts: the first row of each, and at the end the number of rows.
    """

    def __init__(self, containers: Sequence[Any], lengths: Iterable[int] | None, template: Any) -> None:
        if template is None:
            if not len(containers):
                raise ValueError("a concatenation of no containers needs a template, which says what their entries are")
            template = containers[0]
        if not is_node(template) or template._is_non_tensor:
            raise TypeError(f"a concatenation is one of containers, got {type(template).__name__}")
        if not template._batch_size:
            raise ShapeError(
                "a concatenation runs along the first batch dim, and the template (or first part) has none"
            )
        self.template = template._wrapped_container()
        self.starts = [0]
        self._where: list[tuple[Sequence[Any], int]] = []
        self._checked: list[weakref.ref[Any] | None] = []
        self._starts_array: Values | None = None
        self.extend(containers, lengths)

    def extend(self, containers: Sequence[Any], lengths: Iterable[int] | None) -> None:
        """Add containers of these lengths behind the last one; without lengths, they are all looked at now."""
        count = len(self._where)
        if lengths is None:
            for number, part in enumerate(containers, count):
                self._check(number, part, None)
            lengths = [part._batch_size[0] for part in containers]
        else:
            lengths = [int(length) for length in lengths]
            if len(lengths) != len(containers) or any(length < 0 for length in lengths):
                raise ValueError(
                    f"there must be one length of 0 or more for each part, got {len(lengths)} lengths (the least is "
                    f"{min(lengths, default=0)}) for {len(containers)} parts"
                )
        self._where += [(containers, at) for at in range(len(containers))]
        self._checked += [None] * len(containers)
        self.starts += itertools.islice(itertools.accumulate(lengths, initial=self.starts[-1]), 1, None)
        self._starts_array = None

    @property
    def total(self) -> int:
        """The number of rows of all."""
        return self.starts[-1]

    def __len__(self) -> int:
        return len(self._where)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        number = range(len(self))[number]
        sequence, at = self._where[number]
        part = sequence[at]
        known = self._checked[number]
        if known is None or known() is not part:
            self._check(number, part, self.starts[number + 1] - self.starts[number])
            self._checked[number] = weakref.ref(part)
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {"template": self.template, "starts": self.starts, "where": self._where}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.template, self.starts, self._where = state["template"], state["starts"], state["where"]
        self._checked = [None] * len(self._where)
        self._starts_array = None

    def node(self, number: int, path: Path) -> Any:
        """The container at `path` in a part."""
        return node_at(self[number]._wrapped_container(), path)

    # --- which rows are where ---------------------------------------------------------------------------------------

    def place(self, row: int) -> tuple[int, int]:
        """The number of the part that has a row, and which of its rows it is."""
        number = bisect_right(self.starts, row) - 1
        return number, row - self.starts[number]

    def pieces(self, rows: range | Values) -> list[Piece]:
        """What to take of each part for rows that rise: a slice or an array of its rows."""
        if isinstance(rows, np.ndarray):
            return [(number, local, slice(start, stop)) for number, local, start, stop in self.groups(rows)[1]]
        if not len(rows):
            return []
        found = []
        taken = 0
        for number in range(self.place(rows[0])[0], self.place(rows[-1])[0] + 1):
            # How many of the rows come before the next part.
            before = -(-(self.starts[number + 1] - rows.start) // rows.step)
            until = min(before, len(rows))
            if until > taken:
                start = self.starts[number]
                local = slice(rows[taken] - start, rows[until - 1] - start + 1, rows.step)
                found.append((number, local, slice(taken, until)))
                taken = until
        return found

    def groups(self, rows: Values) -> tuple[Values, list[tuple[int, Values, int, int]]]:
        """Rows by part: in which order they are then, and for each part its rows and where they are in this order."""
        if self._starts_array is None:
            self._starts_array = np.asarray(self.starts, dtype=np.int64)
        numbers = self._starts_array.searchsorted(rows, "right") - 1
        order = numbers.argsort(kind="stable")
        numbers, rows = numbers[order], rows[order]
        local = rows - self._starts_array[numbers]
        cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(rows)]
        hit = numbers[cuts[:-1]].tolist() if len(rows) else []
        return order, [(n, local[i:j], i, j) for n, (i, j) in zip(hit, itertools.pairwise(cuts))]

    # --- one schema -------------------------------------------------------------------------------------------------

    def _check(self, number: int, part: Any, length: int | None) -> None:
        """Raise unless a part has the schema of the template, and as many rows as was said."""
        if not is_node(part) or part._is_non_tensor:
            raise TypeError(f"the parts of a concatenation are containers, part {number} is {type(part).__name__}")
        part = part._wrapped_container()
        size = part._batch_size
        expected = (size[0] if length is None and size else length, *self.template._batch_size[1:])
        if tuple(size) != expected:
            shown = "any number of rows" if length is None else f"{length} rows"
            raise ShapeError(
                f"part {number} of a concatenation has the batch size {list(size)}, where one of {shown} was expected, "
                f"{['*' if length is None else length, *expected[1:]]}"
            )
        _check_alike(part, self.template, number, ())


class RowsOfParts:
    """The rows of an entry of all parts as an `Array`: what is taken of it is read from the parts that have it.

    Attributes:
        rows: those of all rows of the parts that it has.
        path: where the entry is in the parts.
        shape: its shape.
    """

    __slots__ = ("parts", "path", "rows", "shape")

    def __init__(self, parts: Parts, rows: range, path: Path, row_shape: tuple[int, ...]) -> None:
        self.parts, self.rows, self.path = parts, rows, path
        self.shape = (len(rows), *row_shape)

    def tensor(self, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        """The tensor that stands for it."""
        return StoredTensor.of(self, dtype, device, self.path)

    def check(self) -> None:
        """Nothing can be closed."""

    def read(self, selection: Selection, dtype: object = None) -> Tensor:
        """The selected elements."""
        first, *others = selection
        rest = tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in others)
        if isinstance(first, (int, np.integer)):
            number, local = self.parts.place(self.rows[first])
            return self.of_part(number, (local, *rest)).clone()
        return torch.cat([self.of_part(number, (local, *rest)) for number, local, _ in self._pieces(first)])

    def of_part(self, number: int, at: Any) -> Tensor:
        """What an index takes of the tensor of one part."""
        leaf: Tensor = self._leaf(number)[2]
        return in_memory(leaf[at])

    def write(self, selection: Selection, values: Any) -> None:
        """Write to the selection."""
        first, *others = selection
        dtype = self._leaf(0)[2].dtype
        given = tensor_of(values, dtype)
        rest = tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in others)
        if isinstance(first, (int, np.integer)):
            number, local = self.parts.place(self.rows[first])
            self._to_part(number, (local, *rest), given)
            return
        for number, local, at in self._pieces(first):
            self._to_part(number, (local, *rest), given[at])

    def _pieces(self, first: slice | Values) -> list[Piece]:
        own = self.rows
        rows = own.start + first * own.step if isinstance(first, np.ndarray) else own[first]
        pieces = self.parts.pieces(rows)
        return [
            (number, torch.from_numpy(local) if isinstance(local, np.ndarray) else local, at)
            for number, local, at in pieces
        ]

    def _leaf(self, number: int) -> tuple[Any, str, Any]:
        """The container of a part that holds the entry, its name there, and the tensor."""
        *path, name = self.path
        node = self.parts.node(number, tuple(path))
        return node, name, node._writable()[name]

    def _to_part(self, number: int, at: tuple[Any, ...], values: Tensor) -> None:
        node, name, leaf = self._leaf(number)
        if node._members() is None:
            leaf[at] = values
        else:
            node.set_at_(name, values, at)


class JoinedValues:
    """The rows of an entry of all parts that no tensor can stand for: values, ragged tensors. They are read at once.

    Attributes:
        sample: the entry in the template.
    """

    __slots__ = ("parts", "path", "rows", "sample")

    def __init__(self, parts: Parts, rows: range, path: Path, sample: Any) -> None:
        self.parts, self.rows, self.path, self.sample = parts, rows, path, sample

    def read(self) -> Any:
        """The entry."""
        pieces = [(self.parts[number], local) for number, local, _ in self.parts.pieces(self.rows)]
        taken = [self._of(*piece) for piece in pieces or [(self.parts.template, slice(0, 0))]]
        return (cat_containers(taken) if len(taken) > 1 else taken[0])._entries[self.path[-1]]

    def of_part(self, number: int, at: Any) -> Any:
        """What an index takes of the entry of one part."""
        return self._of(self.parts[number], at)._entries[self.path[-1]]

    def _of(self, part: Any, at: Any) -> TensorDict:
        """A container of the entry alone."""
        *path, name = self.path
        taken = node_at(part._wrapped_container(), path).select(name)._index(at)
        return TensorDict._make({name: taken._entries[name]}, taken._batch_size, None, None)

    def sketch(self) -> Any:
        """What it is, for those who only ask that: the entry of the template, with as many rows where it has any."""
        return self.read()


def node_at(container: Any, path: Iterable[str]) -> Any:
    """The container at `path` in one."""
    for name in path:
        container = container._node(name)._wrapped_container()
    return container


def _check_alike(part: Any, template: Any, number: int, path: Path) -> None:
    """Raise unless two containers have the same entries: nested ones, values, tensors of one dtype, device and row."""
    own, expected = part._structure(), template._structure()
    where = f"part {number} of a concatenation"
    if own.keys() != expected.keys():
        raise ShapeError(
            f"{where} has other keys than the template (or first part){f' under {joined(path)!r}' if path else ''}: it "
            f"lacks {sorted(expected.keys() - own.keys())} and has {sorted(own.keys() - expected.keys())} beside them"
        )
    for name, sample in expected.items():
        value, key = own[name], (*path, name)
        kinds = _kind(value), _kind(sample)
        if kinds[0] != kinds[1]:
            raise ShapeError(
                f"entry {joined(key)!r} is {kinds[0]} in {where}, and {kinds[1]} in the template (or first part)"
            )
        if kinds[0] == _NODE:
            _check_alike(value._wrapped_container(), sample._wrapped_container(), number, key)
        elif kinds[0] == _TENSOR:
            found = tuple(part._shape_of(name)[1:]), value.dtype, value.device
            wanted = tuple(template._shape_of(name)[1:]), sample.dtype, sample.device
            if found != wanted:
                raise ShapeError(
                    f"entry {joined(key)!r} of {where} has rows of shape {list(found[0])}, {found[1]} on {found[2]}; "
                    f"those of the template (or first part) have {list(wanted[0])}, {wanted[1]} on {wanted[2]}"
                )


_NODE, _TENSOR = "a container", "a tensor"


def _kind(value: Any) -> str:
    if is_node(value):
        return "a value that is no tensor" if value._is_non_tensor else _NODE
    if isinstance(value, Contract):
        return "an UnbatchedTensor"
    return "a ragged tensor" if value.is_nested else _TENSOR
