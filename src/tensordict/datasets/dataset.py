"""Reading a data set: all rows that count as one container, whose shards are opened when rows of them are used."""

from __future__ import annotations

import errno
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.concatenated import LazyConcatenatedTensorDict
from tensordict.containers.dense import TensorDict
from tensordict.containers.on_disk import FileSelection
from tensordict.core import pytree, registry
from tensordict.core.contract import is_node
from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.core.keys import Path
from tensordict.core.locks import Lock
from tensordict.datasets.index import Manifests, Stretch
from tensordict.datasets.location import Location
from tensordict.datasets.schema import Schema
from tensordict.datasets.writer import DatasetWriter, schema_there
from tensordict.io.remote.remote_saves import Access, CacheDir
from tensordict.io.remote.urls import StorageOptions
from tensordict.memory.mapped import PathLike
from tensordict.memory.stored_tensors import Selection, StoredTensor, in_memory, tensor_of

# So many maps of files are kept; a process may have 65,530 by default. And so many copies of what is behind URLs, each
# an open file.
_MAPS, _COPIES = 32_000, 256
# Rows of a writer, by the lines of its manifest: from one line up to another.
Segment = tuple[str, int, int]


class Shards(Sequence[Any]):
    """The shards of a data set, opened when they are asked for.

    Args:
        index: where they are; it is read again when one has gone.
        parts: which rows of which shard.
        schema: what their rows are.
        mode: "r" or "r+".

    Attributes:
        in_flight: how many are best read at once.
    """

    def __init__(self, index: Manifests, parts: list[Stretch], schema: Schema, mode: str) -> None:
        self._manifests, self.parts, self.schema, self._mode = index, parts, schema, mode
        self.in_flight = index.place.in_flight
        # Those that are open: the ones that were used last, the last at the end; and those that somebody uses.
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._used: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self._most = _COPIES if index.place.is_remote else max(1, _MAPS // max(1, len(schema.fields)))
        # Several threads may read; nothing is opened while it is held.
        self._lock = Lock()

    def __reduce__(self) -> Any:
        # What is open is opened again on the other side.
        return type(self), (self._manifests, self.parts, self.schema, self._mode)

    def more(self, parts: list[Stretch]) -> Shards:
        """Other parts of the same data set, which share what is open."""
        other = object.__new__(Shards)
        other.__dict__.update(self.__dict__, parts=parts)
        return other

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
        # It may be moved once more, while it is looked for.
        while True:
            try:
                return self._rows(part)
            except FileNotFoundError as error:
                moved = self._moved(part, error)
                if len(moved) > 1:
                    return self._joined(moved)
                part = self.parts[number] = moved[0]

    def _moved(self, part: Stretch, error: FileNotFoundError) -> list[Stretch]:
        """The rows of a part whose shard is gone, in the places where they are; else the error is raised."""
        self._manifests.read()
        while True:
            moved: list[Stretch] = []
            self._manifests.add_parts(moved, part.writer, part.first, part.last)
            if [item.path for item in moved] != [part.path]:
                return moved
            # A merged shard is gone: the shards that it was made of may still be there. Or the line of a merged shard
            # was lost, which stands for the one that is gone.
            if not self._manifests.give_up(part.path):
                problems = self._manifests.find_orphans()
                if not problems:
                    break
                for problem in problems:
                    warnings.warn(f"{problem}; all other rows are read", stacklevel=4)
        raise error

    def _joined(self, parts: list[Stretch]) -> Any:
        return LazyConcatenatedTensorDict(
            self.more(parts), lengths=[item.rows for item in parts], template=self.schema.template
        )

    def moved(self, part: Stretch, error: FileNotFoundError) -> Any:
        """The rows of a part that is gone."""
        return self._joined(self._moved(part, error))

    def is_there(self, part: Stretch) -> bool:
        """Whether a part is where it was."""
        return self._manifests.place.has_shard(part.path)

    def _rows(self, part: Stretch) -> Any:
        # What is given again is the same container, of which is known what is in it.
        key = part.path, part.start, part.rows
        with self._lock.held:
            found = self._used.get(key)
        if found is None:
            found = self._read(part)
        with self._lock.held:
            # Another thread may have opened it meanwhile.
            found = self._kept[key] = self._used.setdefault(key, found)
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found

    def _read(self, part: Stretch) -> Any:
        """The rows of a part; a `FileNotFoundError` where it is not there, or goes while it is opened."""
        try:
            found = self._opened(part)
            if getattr(found._wrapped_container(), "_is_in_file", False):
                found = self._followed(found, part, ())
            elif part.rows != part.whole:
                found = found[part.start : part.start + part.rows]
        except (OSError, LookupError) as error:
            if isinstance(error, FileNotFoundError) or self.is_there(part):
                raise
            raise self.missing(part) from error
        # Of a shard of Zarr that is gone, values and ragged rows are read as if they were empty.
        if not self.is_there(part):
            raise self.missing(part)
        return found

    def missing(self, part: Stretch) -> FileNotFoundError:
        """The error for a part that is gone."""
        place = self._manifests.place
        what = f"a shard of the data set {place.root!r} is missing"
        return FileNotFoundError(errno.ENOENT, what, str(place.path(part.path)))

    def _opened(self, part: Stretch) -> Any:
        place = self._manifests.place
        path = place.path(part.path)
        try:
            opened = place.open(part.path, self._mode)
            found = Schema(opened)
        except FileNotFoundError as error:
            raise self.missing(part) from error
        except (OSError, SchemaError) as error:
            raise SaveError(f"the shard {path!r} cannot be read: {error}") from error
        if len(opened) != part.whole:
            raise SaveError(f"the shard {path!r} has {len(opened):,} rows, and the manifest says {part.whole:,}")
        try:
            self.schema.refuse_other(found, f"the shard {path!r}")
        except SchemaError as error:
            raise SaveError(str(error)) from None
        return opened

    def _followed(self, container: Any, part: Stretch, path: Path) -> Any:
        """The rows of a part in a container that is read when it is used: a compaction may move them until then."""
        inner = container._wrapped_container()
        own = slice(part.start, part.start + part.rows)
        entries: dict[str, Any] = {}
        # Values and ragged rows.
        read: dict[str, Any] = {}
        for name, value in inner._writable().items():
            if isinstance(value, StoredTensor):
                array = _RowsOfShard(self, part, (*path, name), value[own])
                entries[name] = StoredTensor.of(array, value.dtype, None, value.key)
            elif is_node(value) and not value._is_non_tensor:
                entries[name] = self._followed(value, part, (*path, name))
            else:
                entries[name] = read[name] = value
        if part.rows != part.whole:
            entries.update(TensorDict._make(read, inner._batch_size, inner._device, None)._index(own)._entries)
        size = torch.Size((part.rows, *inner._batch_size[1:]))
        return container._rewrap(FileSelection._of(entries, size, inner._device, inner._names))


class _RowsOfShard:
    """Rows of a tensor of a shard that is no map, as an `Array`: they are read where they are by then.

    A file that is mapped stays there when a compaction removes it; what is read piece by piece does not.
    """

    rows_together = 1

    def __init__(self, shards: Shards, part: Stretch, path: Path, rows: Any) -> None:
        self._shards, self._part, self._path, self._rows = shards, part, path, rows
        self.shape, self.spread = tuple(rows.shape), rows.array.spread

    def check(self) -> None:
        """Nothing can be closed."""

    def read(self, selection: Selection, dtype: object = None) -> Tensor:
        """The selected elements."""
        at = _as_index(selection)
        try:
            found: Tensor = in_memory(self._rows[at])
            # Of a shard of Zarr that is gone, zeros are read.
            if not self._shards.is_there(self._part):
                raise self._shards.missing(self._part)
        except FileNotFoundError as error:
            found = in_memory(self._shards.moved(self._part, error)._peek_unread(self._path)[at])
        return found

    def write(self, selection: Selection, values: Any) -> None:
        """Write to the selection."""
        self._rows[_as_index(selection)] = tensor_of(values, self._rows.dtype)


def _as_index(selection: Selection) -> Any:
    return tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in selection)


@pytree.register
@registry.register
class Dataset(LazyConcatenatedTensorDict):
    """All rows of a data set that have been flushed, as one container; :func:`open_dataset` makes it.

    It is a :class:`~tensordict.LazyConcatenatedTensorDict`, whose parts are the shards: none is opened before one of
    its rows is used, and what is read of it are these rows.

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
        # The URL of a place hides its secrets where it is shown.
        self.path = place.root if place.is_remote else os.fspath(path)
        if place.is_remote and mode != "r":
            raise ValueError(f"mode='r+' writes to the files, and {self.path!r} is only read: mode='r' can be had")
        schema = schema_there(place)
        self._manifests = index = Manifests(place)
        self._told: set[str] = set()
        self._read_manifests(thorough=True)
        index.check(schema)
        counts = index.counts()
        if segments is None:
            segments = [(writer, 0, count) for writer, count in sorted(counts.items()) if count]
        self._segments = list(segments)
        parts = self._found(self._segments, counts)
        self._shards = Shards(index, parts, schema, mode)
        self._mode = mode
        super().__init__(self._shards, lengths=[part.rows for part in parts], template=schema.template)
        if mode == "r":
            self._joint.read_only = (
                f"{self.path!r} is open for reading only: open_dataset(path, mode='r+') can be written"
            )
        else:
            self._joint.fixed_values = (
                "values that are no tensors are not written in place: assign the tensors alone, "
                "data.select(...)[i] = rows, or write the data set anew with map_into"
            )

    def _read_manifests(self, *, thorough: bool = False) -> None:
        self._manifests.read(thorough=thorough)
        for problem in self._manifests.problems:
            if problem not in self._told:
                self._told.add(problem)
                warnings.warn(f"{problem}; all other rows are read", stacklevel=4)

    def _found(self, segments: Sequence[Segment], counts: dict[str, int]) -> list[Stretch]:
        parts: list[Stretch] = []
        for writer, start, stop in segments:
            if stop > counts.get(writer, 0):
                raise SaveError(f"{self.path!r} has lost shards: those up to line {stop} of the writer {writer!r}")
            self._manifests.add_parts(parts, writer, start, stop)
        return parts

    @property
    def schema(self) -> Schema:
        """What every row is."""
        return self._shards.schema

    @property
    def problems(self) -> list[str]:
        """What is wrong with the manifests, one line each; `verify` looks into the shards, too."""
        return self._manifests.problems

    @property
    def segments(self) -> list[Segment]:
        """Which rows these are, for :meth:`at`: (writer, first line, last line + 1) of manifests, in their order."""
        return self._shown()[1]

    def _shown(self) -> tuple[int, list[Segment]]:
        """How many rows these are, and which, as they are when no other thread refreshes."""
        with self._joint.growing.held:
            return len(self), list(self._segments)

    def at(self, segments: Sequence[Segment]) -> Dataset:
        """The data set with the rows that it had when `segments` was asked, in the same order.

        Raises:
            SaveError: some of them are gone.
        """
        given = [(str(writer), int(start), int(stop)) for writer, start, stop in segments]
        return type(self)(self.path, self._mode, given, self._access)

    def refresh(self) -> int:
        """Show the rows that were flushed since, behind those that there are; views keep the rows that they have.

        Other threads may read meanwhile, see :meth:`extend`.

        Returns:
            the number of new rows.

        Raises:
            OSError: a manifest cannot be read.

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
        """
        with self._joint.growing.held:
            # Manifests are also read to find shards that were moved: what counts is what is shown.
            before: dict[str, int] = {}
            for writer, _, stop in self._segments:
                before[writer] = max(stop, before.get(writer, 0))
            self._read_manifests()
            counts = self._manifests.counts()
            starts = [(writer, before.get(writer, 0)) for writer in sorted(counts)]
            new = [(writer, start, counts[writer]) for writer, start in starts if counts[writer] > start]
            parts = self._found(new, counts)
            rows = [part.rows for part in parts]
            self.extend(self._shards.more(parts), rows)
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
        """Write what a function makes of the rows into another data set, a batch at a time.

        Args:
            path: the folder of the other one, or its URL.
            fn: is given each batch, in the order of the rows, and gives the rows that are written in its place: any
                number of them, or `None` for none.
            batch_size: how many rows it is given at once.
            num_workers: how many processes call it; 0 calls it here.
            options: those of :class:`DatasetWriter`.

        Returns:
            the other data set.

        Raises:
            FileNotFoundError: no rows were written.
            SchemaError, OSError: as :meth:`DatasetWriter.extend`; what was written before stays.

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
        """
        from tensordict.datasets.loader import DatasetLoader

        loader = DatasetLoader(self, batch_size, shuffle=False, rank=0, ranks=1, num_workers=num_workers, transform=fn)
        with DatasetWriter(path, **options) as writer:
            for rows in loader:
                if rows is not None and len(rows):
                    writer.extend(rows)
        return type(self)(path, access=Access.of(options.get("storage_options")))

    def shards(self) -> Iterator[tuple[str, int]]:
        """The shards, and how many of their rows these are, in the order of the rows."""
        for part in self._found(self._segments, self._manifests.counts()):
            yield self._manifests.place.path(part.path), part.rows

    def __reduce__(self) -> Any:
        # What is opened, the index and the maps, is made again from the files.
        return _reopened, (type(self), self.path, self._mode, self._segments, self._access, self.schema.template)


def _reopened(cls: type[Dataset], path: str, mode: str, segments: list[Segment], access: Access, *_: object) -> Any:
    # With rows of it, as opening the files imports no class of rows, and reading a pickle does.
    return cls(path, mode, segments, access)


def open_dataset(
    path: PathLike,
    *,
    mode: str = "r",
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> Dataset:
    """All rows of a data set, in one container.

    The manifests are read, and no shard: rows are read when they are used, from the shards that hold them.

    - `data[i]`, slices, lists, tensors of positions, masks, ranges give rows, see
      :class:`~tensordict.LazyConcatenatedTensorDict`.
    - `data.select("a")` gives all rows with these entries, before anything is read.
    - `data.refresh()` shows rows that were flushed since.
    - `data[i] = row`, and whatever else writes in place, needs `mode="r+"`, and writes to the files.

    Args:
        path: the folder, or its URL. Of what is at a URL, the rows that are used are fetched, when they are used.
        mode: "r" leaves the files as they are: rows cannot be assigned, and what is written to a row that was read
            stays in memory. With "r+", both reach the files; it is for local folders.
        storage_options, cache_dir: of a URL, as in :meth:`TensorDict.load`; what is fetched is kept in `cache_dir`, and
            without it as long as the shard is among the 256 that were used last.

    Returns:
        the :class:`Dataset`, or a tensorclass over it where the rows are of one.

    Raises:
        FileNotFoundError: there is no data set, or nobody has flushed a row.
        SaveError: it is broken.

    Warns:
        UserWarning: a manifest is missing or damaged, which is named, as are the shards that no manifest lists; all
        other
            rows are there.

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
    """
    data: Dataset = opened(path, mode, Access.of(storage_options, cache_dir))
    return data


def opened(path: PathLike, mode: str, access: Access) -> Any:
    """The data set, in the tensorclass of its rows where they are of one."""
    data = Dataset(path, mode, access=access)
    return data.schema.template._rewrap(data)
