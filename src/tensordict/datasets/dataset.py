"""`open_dataset` and `Dataset`: all committed rows of a data set as one container, which opens shards when needed."""

from __future__ import annotations

import errno
import os
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.concatenated import LazyConcatenatedTensorDict
from tensordict.containers.dense import TensorDict
from tensordict.containers.on_disk import FileSelection
from tensordict.containers.parts import BLOCK, MapsAgain
from tensordict.core import pytree, registry
from tensordict.core.contract import is_node
from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.core.keys import Key, Path
from tensordict.core.locks import Lock
from tensordict.datasets.index import Manifests, ShardPart, ShardParts
from tensordict.datasets.location import Location, format_of
from tensordict.datasets.schema import Schema
from tensordict.datasets.writer import DatasetWriter, require_schema
from tensordict.io.formats.opening import ARCHIVE
from tensordict.io.remote.remote_saves import Access, CacheDir
from tensordict.io.remote.urls import StorageOptions
from tensordict.memory import system
from tensordict.memory.file_maps import Finder, find_place
from tensordict.memory.mapped import PathLike
from tensordict.memory.row_files import RowFiles
from tensordict.memory.stored_tensors import Selection, StoredTensor, as_tensor, read_stored

# The most copies of remote shards that stay open, each an open file. The most shards whose containers stay open if
# their tensors can be mapped again without one: a container takes 3 KB, a map 1 KB. The most maps.
_MAX_COPIES, _MAX_CONTAINERS, _MAX_MAPS = 256, 1_024, 100_000
# Rows of a writer, as a range of lines of its manifest: (writer, first line, last line + 1).
Segment = tuple[str, int, int]


class Shards(MapsAgain):
    """The shards of a data set as a sequence that opens a shard when it is indexed.

    Args:
        index: the places of all rows; it is read again when a shard is gone.
        parts: the rows of this sequence, shard by shard.
        schema: describes a row.
        mode: "r" or "r+".

    Attributes:
        in_flight: how many shards are best read at once.
    """

    def __init__(self, index: Manifests, parts: ShardParts, schema: Schema, mode: str) -> None:
        self._manifests, self.parts, self.schema, self._mode = index, parts, schema, mode
        self.in_flight = index.place.in_flight
        # Open shards: the most recently used ones, the latest at the end; and all that are referenced elsewhere.
        self._recent: OrderedDict[Any, Any] = OrderedDict()
        self._in_use: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        # Programs need some maps and files for other purposes, too. A mapped archive keeps its file open.
        maps, files = system.count_maps_and_files()
        columns = max(1, len(schema.fields))
        self.max_maps = min(maps // 2, _MAX_MAPS)
        self._max_open = max(1, min(_MAX_COPIES, files // 4) if index.place.is_remote else maps // 4 // columns)
        self._max_archives = max(1, min(self._max_open, files // 2))
        self._places = _Places(len(parts))
        # Guards the two dicts when several threads read. No shard is opened while it is held.
        self._lock = Lock()

    def __reduce__(self) -> Any:
        # The other process opens the shards again.
        return type(self), (self._manifests, self.parts, self.schema, self._mode)

    def with_parts(self, parts: ShardParts) -> Shards:
        """Return a sequence of other parts of the same data set that shares the open shards."""
        other = object.__new__(Shards)
        other.__dict__.update(self.__dict__, parts=parts, _places=_Places(len(parts)))
        return other

    def remember(self, number: int, leaves: Mapping[Path, Tensor], maps: Finder) -> bool:
        """Note the places of the tensors of a shard. Let its container go if there are many."""
        part = self.parts[number]
        if leaves.keys() != self.schema.fields.keys():
            return False
        if not self._places.note(number, self._manifests.place.path(part.path), leaves, maps):
            return False
        with self._lock.held:
            # Leave room for the next block, which must not push out shards that a request still holds.
            if len(self._recent) < min(self._count_open(part) - BLOCK, _MAX_CONTAINERS):
                return False
            self._recent.pop((part.path, part.start, part.rows), None)
        return True

    def files_of(self, number: int) -> RowFiles | None:
        """Return the files of a shard, if `remember` noted the places of its tensors; otherwise `None`."""
        found = self._places.find(number)
        path = self._manifests.place.path(self.parts.path_of(number)) if found else ""
        return RowFiles(path, *found, self.schema.sizes) if found else None

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        part = self.parts[number]
        # A compaction may move the rows again while this looks for them.
        while True:
            try:
                return self._rows(part)
            except FileNotFoundError as error:
                moved = self._locate_again(part, error)
                if len(moved) > 1:
                    return self._join(moved)
                part = self.parts[number] = moved[0]

    def _locate_again(self, part: ShardPart, error: FileNotFoundError) -> ShardParts:
        """Find the new places of the rows of a part whose shard is gone. Raise `error` if there are none."""
        self._manifests.read()
        while True:
            moved = ShardParts()
            self._manifests.add_parts(moved, part.writer, part.first, part.last)
            if [item.path for item in moved] != [part.path]:
                return moved
            # If a merged shard is gone, its original shards may still exist. If an original shard is gone, the
            # manifest may have lost the line of the merged shard that replaced it.
            if not self._manifests.give_up(part.path):
                problems = self._manifests.find_orphans()
                if not problems:
                    break
                for problem in problems:
                    warnings.warn(f"{problem}; all other rows are read", stacklevel=4)
        raise error

    def _join(self, parts: ShardParts) -> Any:
        return LazyConcatenatedTensorDict(
            self.with_parts(parts), lengths=parts.list_rows(), template=self.schema.template
        )

    def read_again(self, part: ShardPart, error: FileNotFoundError) -> Any:
        """Read the rows of a part whose shard is gone from their new places."""
        return self._join(self._locate_again(part, error))

    def is_there(self, part: ShardPart) -> bool:
        """Return True if the shard of a part still exists."""
        return self._manifests.place.has_shard(part.path)

    def _rows(self, part: ShardPart) -> Any:
        # Return the same container for the same rows, because it caches what it has read.
        key = part.path, part.start, part.rows
        with self._lock.held:
            found = self._in_use.get(key)
        if found is None:
            found = self._read_part(part)
        with self._lock.held:
            # If another thread has opened the shard meanwhile, use its container.
            found = self._recent[key] = self._in_use.setdefault(key, found)
            self._recent.move_to_end(key)
            most = self._count_open(part)
            while len(self._recent) > most:
                self._recent.popitem(last=False)
        return found

    def _count_open(self, part: ShardPart) -> int:
        """Return how many shards may stay open once this one is. Refreshes and compactions may add archives."""
        return self._max_archives if format_of(part.path) == ARCHIVE else self._max_open

    def _read_part(self, part: ShardPart) -> Any:
        """Read the rows of a part. Raise `FileNotFoundError` if its shard is gone or goes during the call."""
        try:
            found = self._open(part)
            if getattr(found._wrapped_container(), "_is_in_file", False):
                found = self._follow(found, part, ())
            elif part.rows != part.whole:
                found = found[part.start : part.start + part.rows]
        except (OSError, LookupError) as error:
            if isinstance(error, FileNotFoundError) or self.is_there(part):
                raise
            raise self.make_missing_error(part) from error
        # Zarr reads values and ragged rows of a missing group as empty, without an error.
        if not self.is_there(part):
            raise self.make_missing_error(part)
        return found

    def make_missing_error(self, part: ShardPart) -> FileNotFoundError:
        """Return the error for a part whose shard is gone."""
        place = self._manifests.place
        what = f"a shard of the data set {place.root!r} is missing"
        return FileNotFoundError(errno.ENOENT, what, str(place.path(part.path)))

    def _open(self, part: ShardPart) -> Any:
        place = self._manifests.place
        path = place.path(part.path)
        try:
            opened = place.open(part.path, self._mode, part.whole * self.schema.nbytes)
            opened = self._manifests.hide_added_keys(opened, part.path, self.schema)
            found = Schema(opened)
        except FileNotFoundError as error:
            raise self.make_missing_error(part) from error
        except (OSError, SchemaError) as error:
            raise SaveError(f"the shard {path!r} cannot be read: {error}") from error
        if len(opened) != part.whole:
            raise SaveError(f"the shard {path!r} has {len(opened):,} rows, and the manifest says {part.whole:,}")
        try:
            self.schema.refuse_other(found, f"the shard {path!r}")
        except SchemaError as error:
            raise SaveError(str(error)) from None
        return opened

    def _follow(self, container: Any, part: ShardPart, path: Path) -> Any:
        """Wrap the rows of a part of an array store, so that a compaction may move them before they are read."""
        inner = container._wrapped_container()
        own = slice(part.start, part.start + part.rows)
        entries: dict[str, Any] = {}
        # Values and ragged rows, which are in memory.
        read: dict[str, Any] = {}
        for name, value in inner._writable().items():
            if isinstance(value, StoredTensor):
                array = _ShardArray(self, part, (*path, name), value[own])
                entries[name] = StoredTensor.of(array, value.dtype, None, value.key)
            elif is_node(value) and not value._is_non_tensor:
                entries[name] = self._follow(value, part, (*path, name))
            else:
                entries[name] = read[name] = value
        if part.rows != part.whole:
            entries.update(TensorDict._make(read, inner._batch_size, inner._device, None)._index(own)._entries)
        size = torch.Size((part.rows, *inner._batch_size[1:]))
        return container._rewrap(FileSelection._of(entries, size, inner._device, inner._names))


class _Places:
    """The places of the tensors of shards in their files, in 16 bytes for each shard.

    Args:
        count: the number of shards.
    """

    def __init__(self, count: int) -> None:
        # Each entry with the end of its file's path, after that of the shard, and its first byte. Shards share layouts.
        self._layouts: dict[tuple[tuple[Path, str, int], ...], int] = {}
        self._known: list[tuple[tuple[Path, str, int], ...]] = []
        # For each shard the number of its layout, and a hash that tells its files from others.
        self._numbers, self._hashes = array("q", [-1]) * count, array("q", [0]) * count
        # Guards the numbers of the layouts.
        self._lock = Lock()

    def note(self, number: int, path: str, leaves: Mapping[Path, Tensor], maps: Finder) -> bool:
        """Note the places of the tensors of a shard. Return False if they lie elsewhere than in its files."""
        found = {key: find_place(leaf, maps) for key, leaf in leaves.items()}
        layout = []
        identities = dict[str, tuple[int, ...]]()
        for key, place in found.items():
            if place is None or not place.path.startswith(path):
                return False
            suffix = place.path[len(path) :]
            layout.append((key, suffix, place.offset))
            identities[suffix] = place.identity
        form = tuple(layout)
        with self._lock.held:
            if form not in self._layouts:
                self._layouts[form] = len(self._known)
                self._known.append(form)
        self._hashes[number] = hash(tuple(identities.values()))
        self._numbers[number] = self._layouts[form]
        return True

    def find(self, number: int) -> tuple[tuple[tuple[Path, str, int], ...], int] | None:
        """Return the layout of a shard and the hash of its files, if its places were noted; otherwise `None`."""
        layout = self._numbers[number]
        return None if layout < 0 else (self._known[layout], self._hashes[number])


class _ShardArray:
    """Rows of a tensor in an array store, as an `Array` that follows the rows when a compaction moves them.

    A mapped file stays readable after its removal; an array that is read piece by piece does not.

    Attributes:
        inner: the rows in the store, a `StoredTensor`.
    """

    rows_together = 1

    def __init__(self, shards: Shards, part: ShardPart, path: Path, rows: Any) -> None:
        self._shards, self._part, self._path, self.inner = shards, part, path, rows
        self._fetched: ref[Tensor] | None = None
        self.shape, self.spread = tuple(rows.shape), rows.array.spread

    def check(self) -> None:
        """Do nothing, since nothing can be closed."""

    def read(self, selection: Selection, dtype: object = None) -> Tensor:
        """Read the selected elements."""
        at = _to_torch_index(selection)
        fetched = None if self._fetched is None else self._fetched()
        if fetched is not None:
            return fetched[at].clone()
        try:
            found: Tensor = read_stored(self.inner[at])
            # Zarr reads a missing group as zeros, without an error.
            if not self._shards.is_there(self._part):
                raise self._shards.make_missing_error(self._part)
        except FileNotFoundError as error:
            found = read_stored(self._shards.read_again(self._part, error)._peek_unread(self._path)[at])
        return found

    def fetch(self) -> Tensor:
        """Read all rows. Later reads take them from the result, as long as somebody holds it."""
        found = self.read((slice(None),))
        self._fetched = ref(found)
        return found

    def write(self, selection: Selection, values: Any) -> None:
        """Write to the selection."""
        self.inner[_to_torch_index(selection)] = as_tensor(values, self.inner.dtype)


def _to_torch_index(selection: Selection) -> Any:
    return tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in selection)


@pytree.register
@registry.register
class Dataset(LazyConcatenatedTensorDict):
    """All flushed rows of a data set as one container. Call :func:`open_dataset` to get one.

    A `Dataset` is a :class:`~tensordict.LazyConcatenatedTensorDict` whose parts are the shards. It opens a shard when a
    row of it is first used, and reads only the rows that are used.

    Attributes:
        path: the folder or the URL.
    """

    path: str
    _access: Access
    _shards: Shards
    _manifests: Manifests
    _segments: list[Segment]

    def __init__(
        self, path: PathLike, mode: str = "r", segments: Sequence[Segment] | None = None, access: Access | None = None
    ) -> None:
        if mode not in ("r", "r+"):
            raise ValueError(f"a data set is opened with mode='r' or 'r+', got {mode!r}")
        self._access = access or Access()
        place = Location.of(path, self._access)
        # `place.root` hides the secrets of a URL in messages.
        self.path = place.root if place.is_remote else os.fspath(path)
        if place.is_remote and mode != "r":
            raise ValueError(f"mode='r+' writes to the files, and {self.path!r} is a URL: open it with mode='r'")
        schema = require_schema(place)
        self._manifests = index = Manifests(place)
        self._warned: set[str] = set()
        self._read_manifests(thorough=True)
        index.check(schema)
        counts = index.count_lines()
        if segments is None:
            segments = [(writer, 0, count) for writer, count in sorted(counts.items()) if count]
        self._segments = list(segments)
        parts = self._find_parts(self._segments, counts)
        self._shards = Shards(index, parts, schema, mode)
        self._mode = mode
        super().__init__(self._shards, lengths=parts.list_rows(), template=schema.template)
        if mode == "r":
            self._joint.read_only = (
                f"{self.path!r} is open for reading only: open_dataset(path, mode='r+') can be written"
            )
        else:
            self._joint.fixed_values = (
                "values other than tensors cannot be written in place: assign the tensors alone, "
                "data.select(...)[i] = rows, or write the data set anew with map_into"
            )

    def _read_manifests(self, *, thorough: bool = False) -> None:
        self._manifests.read(thorough=thorough)
        for problem in self._manifests.problems:
            if problem not in self._warned:
                self._warned.add(problem)
                warnings.warn(f"{problem}; all other rows are read", stacklevel=4)

    def _find_parts(self, segments: Sequence[Segment], counts: dict[str, int]) -> ShardParts:
        parts = ShardParts()
        for writer, start, stop in segments:
            if stop > counts.get(writer, 0):
                raise SaveError(f"{self.path!r} has lost shards: those up to line {stop} of the writer {writer!r}")
            self._manifests.add_parts(parts, writer, start, stop)
        return parts

    @property
    def schema(self) -> Schema:
        """The schema: it describes a row."""
        return self._shards.schema

    @property
    def problems(self) -> list[str]:
        """The damage to manifests, one line each. `verify` checks the shards, too."""
        return self._manifests.problems

    @property
    def segments(self) -> list[Segment]:
        """The rows of this container, for :meth:`at`: (writer, first line, last line + 1) of manifests, in order."""
        return self._snapshot()[1]

    def _snapshot(self) -> tuple[int, list[Segment]]:
        """Return the number of rows and the segments, both from before or both from after a `refresh`."""
        with self._joint.growing.held:
            return len(self), list(self._segments)

    def at(self, segments: Sequence[Segment]) -> Dataset:
        """Open the data set with the rows that it had when `segments` was read, in the same order.

        Raises:
            SaveError: some of the rows are gone.
        """
        given = [(str(writer), int(start), int(stop)) for writer, start, stop in segments]
        return type(self)(self.path, self._mode, given, self._access)

    def refresh(self) -> int:
        """Append the rows that were flushed since the last call. Views keep their rows.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import DatasetWriter, TensorDict, open_dataset
            >>> folder = tempfile.TemporaryDirectory()
            >>> writer = DatasetWriter(folder.name + "/data")
            >>> writer.append(TensorDict(x=torch.tensor(1.0)))
            >>> writer.flush()
            >>> data = open_dataset(folder.name + "/data")
            >>> writer.append(TensorDict(x=torch.tensor(2.0)))
            >>> writer.close()
            >>> data.refresh(), data["x"]
            (1, tensor([1., 2.]))

        Returns:
            the number of new rows.

        Raises:
            OSError: a manifest cannot be read.

        Other threads may read during this call, see :meth:`extend`.
        """
        with self._joint.growing.held:
            # The search for moved shards reads manifests, too. So compare with the segments, not with the manifests.
            before: dict[str, int] = {}
            for writer, _, stop in self._segments:
                before[writer] = max(stop, before.get(writer, 0))
            self._read_manifests()
            counts = self._manifests.count_lines()
            starts = [(writer, before.get(writer, 0)) for writer in sorted(counts)]
            new = [(writer, start, counts[writer]) for writer, start in starts if counts[writer] > start]
            parts = self._find_parts(new, counts)
            rows = parts.list_rows()
            self.extend(self._shards.with_parts(parts), rows)
            self._segments += new
        return sum(rows)

    def map_into(
        self,
        path: PathLike,
        fn: Callable[[Any], Any],
        *,
        batch_size: int = 1024,
        num_workers: int = 0,
        **options: Any,
    ) -> Dataset:
        """Apply a function to all rows, a batch at a time, and write the results to another data set.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import DatasetWriter, TensorDict, open_dataset
            >>> folder = tempfile.TemporaryDirectory()
            >>> with DatasetWriter(folder.name + "/data") as writer:
            ...     writer.extend(TensorDict({"x": torch.arange(4)}, [4]))
            >>> data = open_dataset(folder.name + "/data")
            >>> data.map_into(folder.name + "/even", lambda rows: rows[rows["x"] % 2 == 0])["x"]
            tensor([0, 2])

        Args:
            path: the folder of the new data set, or its URL.
            fn: receives the batches in the order of the rows. It returns the rows to write, any number of them, or
                `None` for no rows.
            batch_size: the number of rows of a batch.
            num_workers: the number of processes that call `fn`; 0 calls it in this process.
            options: of :class:`DatasetWriter`.

        Returns:
            the new data set.

        Raises:
            FileNotFoundError: no rows were written.
            SchemaError, OSError: as :meth:`DatasetWriter.extend`; rows that were written before remain.
        """
        from tensordict.datasets.loader import DatasetLoader

        loader = DatasetLoader(self, batch_size, shuffle=False, rank=0, ranks=1, num_workers=num_workers, transform=fn)
        with DatasetWriter(path, **options) as writer:
            for rows in loader:
                if rows is not None and len(rows):
                    writer.extend(rows)
        return type(self)(path, access=Access.of(options.get("storage_options")))

    def add_column(self, name: Key, fn: Callable[[Any], Any]) -> Dataset:
        """Add an entry to all rows of a data set in a folder, a shard at a time.

        Example:
            >>> import tempfile
            >>> from tensordict import DatasetWriter, TensorDict, open_dataset
            >>> folder = tempfile.TemporaryDirectory()
            >>> with DatasetWriter(folder.name + "/data") as writer:
            ...     writer.extend(TensorDict(x=range(3), batch_size=[3]))
            >>> open_dataset(folder.name + "/data").add_column("y", lambda rows: rows["x"] * 2)["y"]
            tensor([0, 2, 4])

        Each shard is written again with the new entry, so the disk needs room for a second copy of all rows, until the
        old shards are removed at the end. All readers see the old rows until then, and a reader that is open keeps
        them. After a crash, call this again with the same function: finished shards are not written again.

        Args:
            name: the nested key of the new entry. Its parent must exist.
            fn: receives the rows of one shard, a container that reads the entries that are used. It returns the new
                entry: a tensor or a list with one value for each row.

        Returns:
            the data set with the new entry, opened again with the same mode.

        Raises:
            SchemaError: the rows have such an entry, or `fn` returns another dtype or shape for another shard.
            SaveError: a writer is at work, another process compacts the data set, a manifest is damaged, or the data
                set is at a URL.
            OSError: a file cannot be written.
        """
        from tensordict.datasets.columns import add_column

        add_column(self._manifests.place, name, fn)
        return type(self)(self.path, self._mode, access=self._access)

    def shards(self) -> Iterator[tuple[str, int]]:
        """Yield the path of each shard and the number of its rows in this container, in the order of the rows."""
        for part in self._find_parts(self._segments, self._manifests.count_lines()):
            yield self._manifests.place.path(part.path), part.rows

    def __reduce__(self) -> Any:
        # The process that unpickles this reads the index and maps the shards again.
        return _reopen, (type(self), self.path, self._mode, self._segments, self._access, self.schema.template)


def _reopen(cls: type[Dataset], path: str, mode: str, segments: list[Segment], access: Access, *_: object) -> Any:
    # `_` is the template. Its pickle imports the class of the rows, which opening the files does not.
    return cls(path, mode, segments, access)


def open_dataset(
    path: PathLike,
    *,
    mode: str = "r",
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> Dataset:
    """Open a data set: all its rows as one container, which reads a row when it is used.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import DatasetWriter, TensorDict, open_dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> with DatasetWriter(folder.name + "/data", rows_per_shard=4) as writer:
        ...     writer.extend(TensorDict({"x": torch.arange(10), "y": torch.zeros(10, 3)}, [10]))
        >>> data = open_dataset(folder.name + "/data")
        >>> data.batch_size, data[[7, 2]]["x"], data.select("y")[3:5]["y"].shape
        (torch.Size([10]), tensor([7, 2]), torch.Size([2, 3]))

    - `data[i]` reads rows; `i` is an int, a slice, a range, a list or tensor of positions, or a mask, see
      :class:`~tensordict.LazyConcatenatedTensorDict`.
    - `data.select("a")` is a container of all rows with these entries only; it reads nothing.
    - `data.refresh()` appends rows that were flushed since.
    - `data[i] = row` and other in-place writes need `mode="r+"` and change the files.

    Args:
        path: the folder, or its URL, from which rows are fetched when they are used.
        mode: with "r", rows cannot be assigned, and writes to a row that was read stay in memory. With "r+", which
            is for local folders, both reach the files.
        storage_options, cache_dir: of a URL, as in :meth:`TensorDict.load`. Fetched rows are kept in `cache_dir`, and
            without it as long as their shard is among the 256 most recently used ones (fewer if the
            process may open fewer than 1,024 files).

    Returns:
        the :class:`Dataset`, or a tensorclass over it if the rows are of one.

    Raises:
        FileNotFoundError: the data set does not exist, or has no flushed rows yet.
        SaveError: the data set is broken.

    Warns:
        UserWarning: a manifest is missing or damaged. The warning names it, and the shards that no manifest lists; all
            other rows are read.

    Only the manifests are read at first, and no shard.
    """
    data: Dataset = open_with_row_class(path, mode, Access.of(storage_options, cache_dir))
    return data


def open_with_row_class(path: PathLike, mode: str, access: Access) -> Any:
    """Open a data set, in the tensorclass of its rows if they are of one."""
    data = Dataset(path, mode, access=access)
    return data._shards.schema.template._rewrap(data)
