"""Reading a data set: all rows that count as one container, whose shards are opened when rows of them are used."""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from tensordict.containers.concatenated import LazyConcatenatedTensorDict
from tensordict.core import pytree, registry
from tensordict.core.errors import SaveError, SchemaError
from tensordict.datasets.manifest import Manifests, Stretch
from tensordict.datasets.schema import Schema
from tensordict.datasets.writer import DatasetWriter, read_schema
from tensordict.io.detect import detect_format
from tensordict.io.formats import ARCHIVE, DIRECTORY, open_file
from tensordict.io.loading import LoadOptions, load_directory
from tensordict.io.source import PrivateSave
from tensordict.io.specification import DICT
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import SCHEMA, local_path

if TYPE_CHECKING:
    pass

# So many maps of files are kept; a process may have 65,530 by default.
_MAPS = 32_000
# Rows of a writer, by the lines of its manifest: from one line up to another.
Segment = tuple[str, int, int]


class Shards(Sequence[Any]):
    """The shards of a data set, opened when they are asked for.

    Args:
        index: where they are; it is read again when one has gone.
        parts: which rows of which shard.
        schema: what their rows are.
        mode: "r" or "r+".
        kept: those that are open, the one that was used last at the end.
    """

    def __init__(
        self,
        index: Manifests,
        parts: list[Stretch],
        schema: Schema,
        mode: str,
        kept: OrderedDict[Any, Any] | None = None,
    ) -> None:
        self._manifests, self.parts, self.schema, self._mode = index, parts, schema, mode
        self._kept: OrderedDict[Any, Any] = OrderedDict() if kept is None else kept
        self._most = max(1, _MAPS // max(1, len(schema.fields)))
        # One thread may read ahead of another.
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        # What is open is opened again on the other side.
        return type(self), (self._manifests, self.parts, self.schema, self._mode)

    def more(self, parts: list[Stretch]) -> Shards:
        """Other parts of the same data set, which share what is open."""
        return Shards(self._manifests, parts, self.schema, self._mode, self._kept)

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
        try:
            return self._rows(part)
        except FileNotFoundError:
            # Its rows may have been moved by a compaction since.
            self._manifests.read()
            moved: list[Stretch] = []
            self._manifests.add_parts(moved, part.writer, part.first, part.last)
            if [item.path for item in moved] == [part.path]:
                raise
            if len(moved) > 1:
                return LazyConcatenatedTensorDict(
                    self.more(moved), lengths=[item.rows for item in moved], template=self.schema.sample()
                )
            self.parts[number] = moved[0]
            return self._rows(moved[0])

    def _rows(self, part: Stretch) -> Any:
        # What is given again is the same container, of which is known what is in it.
        key = part.path, part.start, part.rows
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            found = self._opened(part)
            if part.rows != part.whole:
                found = found[part.start : part.start + part.rows]
            self._kept[key] = found
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found

    def _opened(self, part: Stretch) -> Any:
        path = f"{self._manifests.root}/{part.path}"
        try:
            opened = open_shard(path, self._mode)
            found = Schema(opened)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno, f"a shard of the data set {self._manifests.root!r} is missing", path
            ) from error
        except (OSError, SchemaError) as error:
            raise SaveError(f"the shard {path!r} cannot be read: {error}") from error
        if len(opened) != part.whole:
            raise SaveError(f"the shard {path!r} has {len(opened):,} rows, and the manifest says {part.whole:,}")
        try:
            self.schema.refuse_other(found, f"the shard {path!r}")
        except SchemaError as error:
            raise SaveError(str(error)) from None
        return opened


def open_shard(path: str, mode: str) -> Any:
    """The container in a shard; with "r", what is written to its tensors does not reach the files."""
    format = detect_format(path)
    if format == DIRECTORY and mode == "r":
        return load_directory(path, LoadOptions(source=PrivateSave(path)))
    if format in (DIRECTORY, ARCHIVE):
        return registry.lookup(DICT).load_memmap(path, mode=mode)
    return open_file(path, format, mode=mode)


@pytree.register
@registry.register
class Dataset(LazyConcatenatedTensorDict):
    """All rows of a data set that have been flushed, as one container; :func:`open_dataset` makes it.

    It is a :class:`~tensordict.LazyConcatenatedTensorDict`, whose parts are the shards: none is opened before one of
    its rows is used, and what is read of it are these rows.

    Attributes:
        path: the folder.
    """

    path: str
    _shards: Shards
    _manifests: Manifests
    _segments: list[Segment]

    def __init__(self, path: PathLike, mode: str = "r", segments: Sequence[Segment] | None = None) -> None:
        if mode not in ("r", "r+"):
            raise ValueError(f"a data set is opened with mode='r' or 'r+', got {mode!r}")
        self.path = os.fspath(path)
        root = local_path(path)
        schema = read_schema(root)
        if schema is None:
            raise FileNotFoundError(
                2, f"there is no data set here, or nobody has flushed a row: {SCHEMA} is missing", root
            )
        self._manifests = index = Manifests(root)
        self._read_manifests()
        index.check(schema.digest)
        if segments is None:
            counts = index.counts()
            segments = [(writer, 0, counts[writer]) for writer in sorted(counts) if counts[writer]]
        self._segments = list(segments)
        parts = self._found(self._segments)
        self._shards = Shards(index, parts, schema, mode)
        self._mode = mode
        template = schema.sample()
        super().__init__(self._shards, lengths=[part.rows for part in parts], template=template)
        if mode == "r":
            self._joint.read_only = (
                f"{self.path!r} is open for reading only: open_dataset(path, mode='r+') can be written"
            )

    def _read_manifests(self) -> None:
        known = set(self._manifests.problems)
        self._manifests.read()
        for problem in self._manifests.problems:
            if problem not in known:
                warnings.warn(f"{problem}; what it lists before is read", stacklevel=4)

    def _found(self, segments: Sequence[Segment]) -> list[Stretch]:
        parts: list[Stretch] = []
        for writer, start, stop in segments:
            if stop > self._manifests.counts().get(writer, 0):
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
        return list(self._segments)

    def at(self, segments: Sequence[Segment]) -> Dataset:
        """The data set with the rows that it had when `segments` was asked, in the same order.

        Raises:
            SaveError: some of them are gone.
        """
        return type(self)(
            self.path, self._mode, [(str(writer), int(start), int(stop)) for writer, start, stop in segments]
        )

    def refresh(self) -> int:
        """Show the rows that were flushed since, behind those that there are; views keep the rows that they have.

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
        # Manifests are also read to find shards that were moved: what counts is what is shown.
        before: dict[str, int] = {}
        for writer, _, stop in self._segments:
            before[writer] = max(stop, before.get(writer, 0))
        self._read_manifests()
        new: list[Segment] = []
        for writer, count in sorted(self._manifests.counts().items()):
            start = before.get(writer, 0)
            if count > start:
                new.append((writer, start, count))
        parts = self._found(new)
        self._segments += new
        rows = [part.rows for part in parts]
        self.extend(self._shards.more(parts), rows)
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
            path: the folder of the other one.
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
        return type(self)(path)

    def shards(self) -> Iterator[tuple[str, int]]:
        """The shards, and how many of their rows these are, in the order of the rows."""
        for part in self._found(self._segments):
            yield f"{self._manifests.root}/{part.path}", part.rows

    def __reduce__(self) -> Any:
        # What is opened, the index and the maps, is made again from the files.
        return _reopened, (type(self), self.path, self._mode, self._segments)


def _reopened(cls: type[Dataset], path: str, mode: str, segments: list[Segment]) -> Any:
    return cls(path, mode, segments)


def open_dataset(path: PathLike, *, mode: str = "r") -> Dataset:
    """All rows of a data set, in one container.

    The manifests are read, and no shard: rows are read when they are used, from the shards that hold them.

    - `data[i]`, slices, lists, tensors of positions, masks, ranges give rows, see
      :class:`~tensordict.LazyConcatenatedTensorDict`.
    - `data.select("a")` gives all rows with these entries, before anything is read.
    - `data.refresh()` shows rows that were flushed since.
    - `data[i] = row`, and whatever else writes in place, needs `mode="r+"`, and writes to the files.

    Args:
        path: the folder.
        mode: "r" leaves the files as they are: rows cannot be assigned, and what is written to a row that was read
            stays in memory. With "r+", both reach the files.

    Returns:
        the :class:`Dataset`, or a tensorclass over it where the rows are of one.

    Raises:
        FileNotFoundError: there is no data set, or nobody has flushed a row.
        SaveError: it is broken.

    Warns:
        UserWarning: a manifest is cut short or damaged, which is named; the rows that it lists before are there.

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
    data: Dataset = opened(path, mode)
    return data


def opened(path: PathLike, mode: str = "r") -> Any:
    """The data set, in the tensorclass of its rows where they are of one."""
    data = Dataset(path, mode)
    return data.schema.sample()._rewrap(data)
