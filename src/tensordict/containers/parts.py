"""The parts of a lazy concatenation, and its entries: the rows of an entry of all parts, read when they are used."""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.core import makers
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import SaveError, ShapeError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.core.locks import Lock
from tensordict.io.remote.remote_rows import fetch_rows
from tensordict.looking.texts import format_values
from tensordict.memory import files
from tensordict.memory import rows as scattered
from tensordict.memory.file_maps import Finder
from tensordict.memory.row_files import RowFiles, count_maps, read_rows
from tensordict.memory.stored_tensors import SPREAD, Selection, StoredTensor, Values, as_tensor, read_stored
from tensordict.ops.dims.stacking import cat_containers

# The number of a part, the index of some of its rows, and the positions of these rows in the result: a slice or array.
Piece = tuple[int, Any, Any]
# The entries of a part that lie in memory, as arrays of rows that `scattered.records` returns.
Columns = dict[Path, Values]
# The most rows whose values are read to be shown.
_MOST_PREVIEWED = 1000
# The most containers that are loaded before their arrays are kept.
BLOCK = 16
# So many rows of a file are read from a new map, fewer from the file: a map takes as long as reading ten rows, and
# serves later requests.
_MANY = 4
Item = TypeVar("Item")
Read = TypeVar("Read")


class MapsAgain(Sequence[Any]):
    """A sequence that loads its containers when they are used, and then finds their tensors without loading them.

    Attributes:
        max_maps: how many maps of files all such sequences of this process together may keep.
    """

    max_maps: int

    @abstractmethod
    def remember(self, number: int, leaves: Mapping[Path, Tensor], maps: Finder) -> bool:
        """Note the places of the tensors of a container, which was loaded and checked.

        Args:
            number: the number of the container.
            leaves: its tensors in files.
            maps: the maps of this process.

        Returns:
            True if the sequence holds the container no longer, because there are too many.
        """

    @abstractmethod
    def files_of(self, number: int) -> RowFiles | None:
        """Return the files of a container, if `remember` noted the places of its tensors; otherwise `None`."""


class Parts(Sequence[Any]):
    """The containers of a concatenation, with the position of each row. Containers can be added and not removed.

    Attributes:
        template: a container with the schema of all parts.
        starts: the first row of each part, followed by the number of rows.
        starts_array: the same as an array.
        read_only: the reason why the parts cannot be written; empty if they can.
        fixed_values: the reason why non-tensor values cannot be written; empty if they can.
        in_flight: the number of parts that are read at once. Sequences that load parts over a network set it above 1.
    """

    read_only = fixed_values = ""
    in_flight: int = 1
    # RowRequest by callers that add parts.
    growing: Lock
    # The locked parts refer to this object as if it were the container that locks them.
    _locked = True
    # See `scattered.gather`.
    announcements_left: int = 0
    # One weak reference for each part, which is dead until the part has been checked.
    _checked: list[_CheckedPart]
    starts_array: Values

    def __init__(self, containers: Sequence[Any], lengths: Iterable[int] | None, template: Any) -> None:
        if template is None:
            if not len(containers):
                raise ValueError("a concatenation of no containers needs a template: a container with their entries")
            template = containers[0]
        if not is_node(template) or template._is_non_tensor:
            raise TypeError(f"a concatenation joins containers, got {type(template).__name__}")
        if not template._batch_size:
            raise ShapeError(
                "a concatenation runs along the first batch dim, but the template (or first part) has no batch dims"
            )
        self.template = template._wrapped_container()
        self.starts = array("q", [0])
        # The sequences of containers, and the number of the first part in each.
        self._sequences: list[Sequence[Any]] = []
        self._firsts: list[int] = []
        self._start()
        self.extend(containers, lengths)

    def extend(self, containers: Sequence[Any], lengths: Iterable[int] | None) -> None:
        """Add containers of these lengths behind the last one. Without lengths, load and check all of them now."""
        count = len(self)
        if lengths is None:
            for number, part in enumerate(containers, count):
                self._check(number, part, None)
            lengths = [part._batch_size[0] for part in containers]
        else:
            lengths = [int(length) for length in lengths]
            least = min(lengths, default=0)
            if len(lengths) != len(containers) or least < 0:
                raise ValueError(
                    f"there must be one length of 0 or more for each part, got {len(lengths)} lengths (the least is "
                    f"{least}) for {len(containers)} parts"
                )
        self.in_flight = max(self.in_flight, getattr(containers, "in_flight", 1))
        self._sequences.append(containers)
        self._firsts.append(count)
        self._checked += [_NONE] * len(lengths)
        # A new array: other threads may read the old one.
        self.starts = self.starts[:-1] + array("q", itertools.accumulate(lengths, initial=self.starts[-1]))
        self.starts_array = np.frombuffer(self.starts, dtype=np.int64)

    @property
    def total(self) -> int:
        """The number of rows of all parts."""
        return self.starts[-1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        number = range(len(self))[number]
        sequence, at = self._locate(number)
        part = sequence[at]
        if self._checked[number]() is not part:
            self._check(number, part, self.starts[number + 1] - self.starts[number])
            self._checked[number] = _CheckedPart(part)
        return part

    def _locate(self, number: int) -> tuple[Sequence[Any], int]:
        """Return the sequence that has a part, and the position of the part in it."""
        at = bisect_right(self._firsts, number) - 1
        return self._sequences[at], number - self._firsts[at]

    def __getstate__(self) -> dict[str, Any]:
        state = {"template": self.template, "starts": self.starts, "read_only": self.read_only}
        state |= {"sequences": self._sequences, "firsts": self._firsts}
        return {**state, "in_flight": self.in_flight, "fixed_values": self.fixed_values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.template, self.starts = state["template"], state["starts"]
        self._sequences, self._firsts = state["sequences"], state["firsts"]
        self.read_only, self.in_flight = state["read_only"], state["in_flight"]
        self.fixed_values = state["fixed_values"]
        self._start()

    def _start(self) -> None:
        """Set the attributes that are not pickled. Every part will be checked when it is read next."""
        self.starts_array = np.frombuffer(self.starts, dtype=np.int64)
        self.growing = Lock()
        self._checked = [_NONE] * len(self)
        # The parts that were mapped again, in this order. They have no container.
        self._mapped: deque[_CheckedPart] = deque()

    def refuse_read_only(self, path: Path) -> None:
        """Raise a `SaveError` if the parts cannot be written."""
        if self.read_only:
            raise SaveError(f"{entry_of(path)}{self.read_only}")

    def refuse_values(self, path: Path, entries: Mapping[str, Any]) -> None:
        """Raise a `SaveError` if the parts, or the values in one of these entries, cannot be written."""
        self.refuse_read_only(path)
        for name, entry in entries.items() if self.fixed_values else ():
            if not isinstance(entry.sample, Tensor):
                raise SaveError(f"{entry_of((*path, name))}{self.fixed_values}")

    def node(self, number: int, path: Path) -> Any:
        """Return the container at `path` in a part."""
        return node_at(self[number]._wrapped_container(), path)

    def each(self, read: Callable[[Item], Read], items: Sequence[Item]) -> list[Read]:
        """Call `read` with each item and return the results. Items of several parts are read at once."""
        if self.in_flight == 1 or len(items) < 2:
            return [read(item) for item in items]
        found: list[Any] = [None] * len(items)

        def job(at: int) -> None:
            found[at] = read(items[at])

        files.run_all([partial(job, at) for at in range(len(items))], self.in_flight)
        return found

    def fetch(self, entries: Iterable[RowsOfParts | JoinedValues], number: int, rows: slice | Tensor) -> list[Any]:
        """Fetch rows of the tensors of one part of a save behind a URL, all at once.

        Returns:
            the tensors that lie elsewhere.
        """
        # The part may be gone. The read that follows finds where its rows are.
        with suppress(FileNotFoundError):
            return fetch_rows([entry._leaf(number)[2] for entry in entries if isinstance(entry, RowsOfParts)], rows)
        return []

    # --- the positions of rows --------------------------------------------------------------------------------------

    def place(self, row: int) -> tuple[int, int]:
        """Return the number of the part that contains a row, and the position of the row in it."""
        number = bisect_right(self.starts, row) - 1
        return number, row - self.starts[number]

    def pieces(self, rows: range | Values) -> list[Piece]:
        """Return the pieces of the parts, each a slice or an array of rows, that make up rows in any order."""
        if isinstance(rows, np.ndarray):
            request = RowRequest(self, rows)
            order = torch.from_numpy(request.picks.order)
            return [(number, local, order[at]) for number, local, at in request.pieces]
        if not len(rows):
            return []
        found = []
        taken = 0
        for number in range(self.place(rows[0])[0], self.place(rows[-1])[0] + 1):
            # The number of the rows that come before the next part.
            before = -(-(self.starts[number + 1] - rows.start) // rows.step)
            until = min(before, len(rows))
            if until > taken:
                start = self.starts[number]
                local = slice(rows[taken] - start, rows[until - 1] - start + 1, rows.step)
                found.append((number, local, slice(taken, until)))
                taken = until
        return found

    # --- rows in memory ---------------------------------------------------------------------------------------------
    # Looking up the entries of a part takes Python some microseconds, and a mini-batch may need hundreds of parts. So
    # the first gather keeps the mapped tensors of a part as arrays of rows. It also locks the part, so that no entry
    # can be replaced. The arrays are dropped together with the part.

    def find_columns(self, picks: scattered.Picks) -> list[Columns | RowFiles | None]:
        """Return the arrays of rows of the parts in `picks.hit`, or files to read a few rows from.

        `None` stands for a part that has to be loaded.
        """
        known, cuts = self._checked, picks.cuts
        found: list[Any] = [known[number].columns for number in picks.hit]
        for at, columns in enumerate(found):
            if columns is None:
                found[at] = self._find_again(picks.hit[at], cuts[at + 1] - cuts[at])
        return found

    def _find_again(self, number: int, count: int) -> Columns | RowFiles | None:
        if self._checked[number]() is not None:
            return None
        sequence, at = self._locate(number)
        if not isinstance(sequence, MapsAgain):
            return None
        files = sequence.files_of(at)
        if files is None or (count < _MANY and count_maps() >= sequence.max_maps):
            return files
        # Other maps of the process may leave none for this one.
        return self._map(number, files, sequence.max_maps) or files

    def load_columns(
        self, numbers: Sequence[int], absent: Sequence[int], found: list[Columns | RowFiles | None], loaded: list[Any]
    ) -> None:
        """Load the parts at some positions of `numbers`, and put the arrays of their rows into `found`.

        Adds the parts to `loaded`, which keeps them alive.
        """
        # Containers that are let go must not hold files until the last one is loaded.
        step = BLOCK if self.in_flight == 1 else max(1, len(absent))
        for start in range(0, len(absent), step):
            self._load_columns(numbers, absent[start : start + step], found, loaded)

    def _load_columns(
        self, numbers: Sequence[int], absent: Sequence[int], found: list[Columns | RowFiles | None], loaded: list[Any]
    ) -> None:
        parts = self.each(self.__getitem__, [numbers[at] for at in absent])
        maps = Finder()
        while parts:
            at, part = absent[len(parts) - 1], parts.pop()
            leaves: dict[Path, Tensor] = {}
            self._collect(part._wrapped_container(), self.template, (), leaves)
            if leaves:
                part._lock_tree(weakref.ref(self))
            found[at] = columns = {path: scattered.records(leaf) for path, leaf in leaves.items()}
            checked = self._checked[numbers[at]]
            # Another thread may have loaded the same part meanwhile, into another container.
            if checked() is part:
                checked.columns = columns
            sequence, place = self._locate(numbers[at])
            if isinstance(sequence, MapsAgain) and sequence.remember(place, leaves, maps):
                files = sequence.files_of(place)
                mapped = None if files is None else self._map(numbers[at], files, sequence.max_maps)
                if mapped is not None:
                    found[at] = mapped
                    continue
            loaded.append(part)

    def _map(self, number: int, files: RowFiles, most: int) -> Columns | None:
        """Map the tensors of a part again, and unmap the first part if the process then has more than `most` maps.

        Returns:
            `None` if the files are others.
        """
        columns = files.map()
        if columns:
            self._checked[number] = mapped = _CheckedPart(set())
            mapped.columns = columns
            self._mapped.append(mapped)
            if count_maps() > most:
                self._mapped.popleft().columns = None
        return columns or None

    def _collect(self, node: Any, template: Any, path: Path, leaves: dict[Path, Tensor]) -> None:
        if not isinstance(node._entries, dict):  # a loaded container has a subclass
            return
        for name, sample in template._structure().items():
            value: Any = node._entries.get(name)
            key = (*path, name)
            if is_node(sample) and is_node(value) and not value._is_non_tensor:
                self._collect(value._wrapped_container(), sample._wrapped_container(), key, leaves)
            elif isinstance(value, Tensor) and _stays_in_place(value, sample):
                leaves[key] = value

    # --- one schema -------------------------------------------------------------------------------------------------

    def _check(self, number: int, part: Any, length: int | None) -> None:
        """Raise unless a part has the schema of the template and `length` rows (`None` for any number)."""
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
        _check_against_template(part, self.template, number, ())


class _CheckedPart(weakref.ref[Any]):
    """A weak reference to a part that was checked. Once rows were gathered from it, it keeps the arrays of its rows."""

    __slots__ = ("columns",)

    columns: Columns | None

    def __new__(cls, part: object) -> _CheckedPart:
        self = super().__new__(cls, part, cls.drop_columns)
        self.columns = None
        return self

    def drop_columns(self) -> None:
        """Drop the arrays when the part is deleted."""
        self.columns = None


# A dead reference, for parts that have not been checked.
_NONE = _CheckedPart(set())


def _stays_in_place(value: Tensor, sample: Any) -> bool:
    """Return whether a tensor is a contiguous block of mapped memory with the dtype and row shape of `sample`."""
    return (
        isinstance(sample, Tensor)
        and not isinstance(value, Contract)
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
        and value.dtype is sample.dtype
        and value.shape[1:] == sample.shape[1:]
        and value.is_contiguous()
        and value.numel() > 0
        and not value.is_conj()
        and not value.is_neg()
        and not value.untyped_storage().resizable()
    )


class RowRequest:
    """A request for rows of the parts, in any order, that all entries of a container answer.

    Attributes:
        picks: the rows, grouped by part.
        loaded: the parts that were loaded for this request, kept alive until it ends.
    """

    def __init__(self, parts: Parts, rows: Values) -> None:
        starts = parts.starts_array
        numbers = starts.searchsorted(rows, "right") - 1
        self.parts = parts
        self.picks = scattered.Picks(numbers, rows - starts[numbers], len(parts))
        # The rows by their positions in the arrays, which `hold` may make for these rows.
        self._memory = self.picks
        self.loaded: list[Any] = []
        self._read: dict[Path, list[Any]] = {}

    def hold(self, entries: Callable[[], Iterable[RowsOfParts | JoinedValues]]) -> None:
        """Keep the memory alive that the rows are read from. Reads the rows of these entries that no memory has."""
        hit = self.picks.hit
        found: list[Any] = self.parts.find_columns(self.picks)
        files = {at: columns for at, columns in enumerate(found) if type(columns) is RowFiles}
        if files:
            self._read_files(files, found, entries())
        absent = [at for at, columns in enumerate(found) if columns is None]
        if absent:
            self.parts.load_columns(hit, absent, found, self.loaded)
        self._columns: list[Columns] = found

    def _read_files(
        self, files: dict[int, RowFiles], found: list[Any], entries: Iterable[RowsOfParts | JoinedValues]
    ) -> None:
        """Read rows of the parts at some positions of `picks.hit`. Put the arrays of these rows into `found`."""
        picks, cuts = self.picks, self.picks.cuts
        is_read = np.zeros(len(found), dtype=bool)
        is_read[list(files)] = True
        # The rows that are read, in the order of `read_rows`.
        order = picks.order[np.repeat(is_read, np.diff(cuts))]
        columns = {
            entry.path: np.empty(len(order), f"V{entry.row_nbytes}")
            for entry in entries
            if isinstance(entry, RowsOfParts)
        }
        ordered = picks.local[picks.order].tolist()
        changed = read_rows(list(files.values()), [ordered[cuts[at] : cuts[at + 1]] for at in files], columns)
        local = picks.local.copy()
        local[order] = np.arange(len(order))
        for place, at in enumerate(files):
            found[at] = columns
            if place in changed:
                found[at], rows = None, picks.order[cuts[at] : cuts[at + 1]]
                local[rows] = picks.local[rows]
        self._memory = copy.copy(picks)
        self._memory.local = local

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces of the parts that have rows. Their positions refer to `picks.order`."""
        cuts, local = self.picks.cuts, self.picks.local[self.picks.order]
        return [
            (number, torch.from_numpy(local[start:stop]), slice(start, stop))
            for number, start, stop in zip(self.picks.hit, cuts, cuts[1:], strict=False)
        ]

    @cached_property
    def back(self) -> Tensor:
        """The position of each row in `picks.order`."""
        order = self.picks.order
        back = np.empty_like(order)
        back[order] = np.arange(len(back))
        return torch.from_numpy(back)

    @cached_property
    def is_ascending(self) -> bool:
        """True if the rows are requested in the order of the parts."""
        order = self.picks.order
        return bool((order[1:] > order[:-1]).all())

    def prefetch(self, entries: Sequence[RowsOfParts | JoinedValues]) -> None:
        """Read the rows of several entries, from several parts at once, except for entries that lie in memory."""
        entries = [entry for entry in entries if any(entry.path not in columns for columns in self._columns)]
        if not entries:
            return

        def index_part(piece: Piece) -> list[Any]:
            self.parts.fetch(entries, piece[0], piece[1])
            return [entry.piece(piece) for entry in entries]

        read = zip(*self.parts.each(index_part, self.pieces), strict=True)
        self._read = {entry.path: list(found) for entry, found in zip(entries, read, strict=True)}

    def of(self, entry: RowsOfParts | JoinedValues) -> list[Any]:
        """Return the rows of an entry, one item for each part. Rows that were read ahead are returned once only."""
        found = self._read.pop(entry.path, None)
        return [entry.piece(piece) for piece in self.pieces] if found is None else found

    def gather(self, path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Gather the rows of an entry from memory; `None` if some part has no array of them.

        `shape` is the shape of one row.
        """
        sources: list[Any] = [columns.get(path) for columns in self._columns]
        if any(source is None for source in sources):
            return None
        out = scattered.new_rows((len(self.picks.local), *shape), dtype)
        self.parts.announcements_left = scattered.gather(sources, self._memory, out, self.parts.announcements_left)
        return out


class RowsOfParts:
    """A tensor entry of all parts, as an `Array` of their rows. A read goes to the parts that contain the rows.

    Attributes:
        rows: the rows of the concatenation that it covers.
        path: the path of the entry in each part.
        shape: the number of rows, followed by the shape of a row.
    """

    __slots__ = ("device", "dtype", "parts", "path", "rows", "shape")
    spread, rows_together = SPREAD, 1

    def __init__(
        self,
        parts: Parts,
        rows: range | Values,
        path: Path,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts, self.rows, self.path, self.dtype, self.device = parts, rows, path, dtype, device
        self.shape = (len(rows), *row_shape)

    def tensor(self) -> StoredTensor:
        """Return a `StoredTensor` over this array."""
        return StoredTensor.of(self, self.dtype, self.device, self.path)

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def over(self, rows: range | Values) -> RowsOfParts:
        """Return the same entry for other rows."""
        return RowsOfParts(self.parts, rows, self.path, self.shape[1:], self.dtype, self.device)

    def check(self) -> None:
        """Do nothing: the parts check themselves whether their files are open."""

    def read(self, selection: Selection, dtype: object = None) -> Tensor:
        """Return the selected elements as a tensor in memory."""
        first, *others = selection
        rest = tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in others)
        if isinstance(first, (int, np.integer)):
            number, local = self.parts.place(int(self.rows[first]))
            return self.index_part(number, (local, *rest)).clone()
        rows = self._row_numbers(first)
        request = RowRequest(self.parts, rows) if isinstance(rows, np.ndarray) else None
        pieces = self.parts.pieces(rows) if request is None else request.pieces
        read = torch.cat(self.parts.each(lambda piece: self.index_part(piece[0], (piece[1], *rest)), pieces))
        return read if request is None or request.is_ascending else read[request.back]

    def gather(self, request: RowRequest) -> Tensor:
        """Return the requested rows."""
        rows = request.gather(self.path, self.shape[1:], self.dtype)
        if rows is None:
            pieces = request.of(self)
            rows = (torch.cat(pieces) if len(pieces) > 1 else pieces[0])[request.back]
        return rows

    def piece(self, piece: Piece) -> Tensor:
        """Return some rows of one part."""
        return self.index_part(piece[0], piece[1])

    def index_part(self, number: int, at: Any) -> Tensor:
        """Index the tensor of one part."""
        leaf: Tensor = self._leaf(number)[2]
        return read_stored(leaf[at])

    def write(self, selection: Selection, values: Any) -> None:
        """Write values into the selected elements."""
        first, *others = selection
        given = as_tensor(values, self.dtype)
        rest = tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in others)
        if isinstance(first, (int, np.integer)):
            number, local = self.parts.place(int(self.rows[first]))
            self._to_part(number, (local, *rest), given)
            return
        for number, local, at in self.parts.pieces(self._row_numbers(first)):
            self._to_part(number, (local, *rest), given[at])

    def _row_numbers(self, first: slice | Values) -> range | Values:
        """Return the numbers of the selected rows in the parts."""
        own = self.rows
        if isinstance(own, np.ndarray):
            return own[first]
        return own.start + first * own.step if isinstance(first, np.ndarray) else own[first]

    def _leaf(self, number: int) -> tuple[Any, str, Any]:
        """Return the container of a part that holds the entry, the name of the entry there, and its tensor."""
        *path, name = self.path
        node = self.parts.node(number, tuple(path))
        return node, name, node._writable()[name]

    def _to_part(self, number: int, at: tuple[Any, ...], values: Tensor) -> None:
        self.parts.refuse_read_only(self.path)
        node, name, leaf = self._leaf(number)
        if node._members() is None:
            leaf[at] = values
        else:
            node.set_at_(name, values, at)


class JoinedValues:
    """An entry of all parts that cannot be a `StoredTensor`: values and ragged tensors, which are read as a whole.

    Attributes:
        parts, rows, path: as for `RowsOfParts`.
        sample: the entry in the template.
    """

    __slots__ = ("parts", "path", "rows", "sample")

    def __init__(self, parts: Parts, rows: range | Values, path: Path, sample: Any) -> None:
        self.parts, self.rows, self.path, self.sample = parts, rows, path, sample

    def read(self) -> Any:
        """Read and join the entry of all parts."""
        if isinstance(self.rows, np.ndarray):
            return self.gather(RowRequest(self.parts, self.rows), torch.Size((len(self.rows),)))
        pieces = self.parts.each(self.piece, self.parts.pieces(self.rows))
        pieces = pieces or [self._of(self.parts.template, slice(0, 0))]
        return (cat_containers(pieces) if len(pieces) > 1 else pieces[0])._entries[self.path[-1]]

    def gather(self, request: RowRequest, shape: torch.Size) -> Any:
        """Return the requested rows, arranged in `shape`."""
        pieces = request.of(self)
        joined = cat_containers(pieces) if len(pieces) > 1 else pieces[0]
        return joined._index(request.back.view(shape))._entries[self.path[-1]]

    def piece(self, piece: Piece) -> TensorDict:
        """Return a container with some rows of one part."""
        return self._of(self.parts[piece[0]], piece[1])

    def index_part(self, number: int, at: Any) -> Any:
        """Index the entry of one part."""
        return self._of(self.parts[number], at)._entries[self.path[-1]]

    def _of(self, part: Any, at: Any) -> TensorDict:
        """Return a container with this entry only, indexed."""
        *path, name = self.path
        taken = node_at(part._wrapped_container(), path).select(name)._index(at)
        return TensorDict._make({name: taken._entries[name]}, taken._batch_size, None, None)

    def preview(self) -> str:
        """Describe the values of the first rows of the first part; of remote parts, nothing is read."""
        pieces = self.parts.pieces(self.rows[:_MOST_PREVIEWED])[:1]
        if pieces and self.parts.in_flight == 1:
            try:
                held = self.piece(pieces[0])._entries[self.path[-1]]
                return format_values(held.flatten().tolist() if held._batch_size else [held.tolist()], len(self.rows))
            except (OSError, LookupError, RuntimeError) as error:  # not compiled: it reads files
                return f"they cannot be read: {error}"
        return f"of {len(self.parts):,} parts"

    def sketch(self, size: torch.Size, device: torch.device | None) -> Any:
        """Return a placeholder for callers that do not use the values; see `StoredContainer._sketch`. Reads nothing."""
        if is_node(self.sample):
            return makers.value(f"<values of {len(self.parts)} parts>", size, device)
        return self.sample


def node_at(container: Any, path: Iterable[str]) -> Any:
    """Return the nested container at `path`."""
    for name in path:
        container = container._node(name)._wrapped_container()
    return container


def _check_against_template(part: Any, template: Any, number: int, path: Path) -> None:
    """Raise unless two containers have the same keys, kinds of entries, dtypes, devices and row shapes."""
    own, expected = part._structure(), template._structure()
    where = f"part {number} of a concatenation"
    if own.keys() != expected.keys():
        raise ShapeError(
            f"{where} has other keys than the template (or first part){f' under {joined(path)!r}' if path else ''}: it "
            f"lacks {sorted(expected.keys() - own.keys())} and has {sorted(own.keys() - expected.keys())} in addition"
        )
    for name, sample in expected.items():
        value, key = own[name], (*path, name)
        kinds = _kind(value), _kind(sample)
        if kinds[0] != kinds[1]:
            raise ShapeError(
                f"entry {joined(key)!r} is {kinds[0]} in {where}, and {kinds[1]} in the template (or first part)"
            )
        if kinds[0] == _NODE:
            _check_against_template(value._wrapped_container(), sample._wrapped_container(), number, key)
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
