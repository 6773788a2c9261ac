"""Tables in files of other programs: Parquet, CSV, JSON and MDS, the streaming data sets of MosaicML."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch

from tensordict.convert import mds, parquet
from tensordict.convert.columns import Fill, Nulls, TableOptions
from tensordict.convert.csv import CsvOptions, csv_tables, refuse_compound, write_csv
from tensordict.convert.input_files import SourceFile, files_of
from tensordict.convert.json import json_tables, write_json
from tensordict.convert.text_tables import write_text
from tensordict.core.extras import require
from tensordict.io.remote.remote_saves import Access, CacheDir
from tensordict.io.remote.urls import StorageOptions
from tensordict.memory.mapped import PathLike
from tensordict.ops.storing.tabulating import Tables, finished

if TYPE_CHECKING:
    from typing_extensions import Self


class TableFiles(Tables):
    """`from_parquet`, `from_csv`, `from_json`, `from_mds`, and their opposites."""

    @overload
    @classmethod
    def from_parquet(cls, path: PathLike, *, batch_size_rows: int, **options: Any) -> Iterator[Self]: ...
    @overload
    @classmethod
    def from_parquet(cls, path: PathLike, *, batch_size_rows: None = ..., **options: Any) -> Self: ...
    @classmethod
    def from_parquet(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: object = None,
        batch_size: object = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        columns: Sequence[str] | None = None,
        nulls: Nulls = None,
        fill: Fill = None,
        metadata: bool = True,
        batch_size_rows: int | None = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
        **kwargs: Any,
    ) -> Self | Iterator[Self]:
        """A container of the columns of Parquet files, with their rows as batch dim; or an iterator over parts of it.

        Columns become what those of Arrow do, see :meth:`from_arrow`. Of a file that :meth:`to_parquet` wrote, the
        container comes back: batch dims beyond the first, names, lazy stacks and, where the program knows the class,
        tensorclasses.

        Args:
            path: a file, a folder of files, a pattern (`"part-*.parquet"`, files in the order of their names), or a URL
                of a file or pattern.
            columns: the columns to read; all by default. `"a.b"` is the field `b` of the struct `a`.
            batch_size_rows: give an iterator over containers of so many rows (the last one of a file has the rest), of
                which one is in memory at a time. All have the same entries: with `nulls="mask"`, columns in which the
                file does not say that nothing is missing are read once before.
            storage_options, cache_dir: how a URL is reached, and where copies are kept; as for :meth:`load`.
            **kwargs: of `pyarrow.parquet.read_table`, such as `filters=`; with `batch_size_rows` those of
                `pyarrow.parquet.ParquetFile.iter_batches`, such as `row_groups=`.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as for
                :meth:`from_arrow`.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            FileNotFoundError: there is no such file.
            SaveError: a file is broken or no Parquet file; it is named.
            ValueError: there is no such column, or as for :meth:`from_arrow`; the file and the column are named.

        Example:
            >>> import os, tempfile, torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "x.parquet")
            ...     TensorDict(a=torch.arange(5), batch_size=[5]).to_parquet(path)
            ...     [part["a"].tolist() for part in TensorDict.from_parquet(path, batch_size_rows=2)]
            [[0, 1], [2, 3], [4]]
        """
        reading, access = TableOptions(separator, dtype, nulls, fill, metadata), Access.of(storage_options, cache_dir)
        finish = partial(finished, cls)
        sizes = (auto_batch_size, batch_dims, device, batch_size)
        if batch_size_rows is None:
            return finish(parquet.container_of_files(path, access, columns, reading, kwargs), *sizes)  # type: ignore[no-any-return]
        parts = parquet.batches_of_files(path, access, columns, reading, batch_size_rows, kwargs)
        return (finish(part, *sizes) for part in parts)

    def to_parquet(
        self,
        path: PathLike,
        *,
        separator: str | None = None,
        nulls: Nulls = None,
        overwrite: bool = False,
        durable: bool = False,
        storage_options: StorageOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a Parquet file with one row for each element of the first batch dim, of what :meth:`to_arrow` gives.

        It is written in one step: readers see the old file or the new one. Other programs read it as columns of
        numbers, lists, structs and text.

        Args:
            path: the file, or the URL of one. A file that a container was written to is replaced.
            separator, nulls: as for :meth:`to_arrow`.
            overwrite: replace any other file, too.
            durable: return when the file has reached the disk.
            storage_options: how a URL is reached; as for :meth:`save`.
            **kwargs: of `pyarrow.parquet.write_table`, such as `compression=` and `row_group_size=`.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            SaveError: there is another file, without `overwrite`.
            UnsupportedEntryError, ValueError: as for :meth:`to_arrow`; nothing is written.
            OSError: the file cannot be written; what was there before stays.

        Example:
            >>> import os, tempfile, torch
            >>> from tensordict import TensorDict, from_parquet
            >>> td = TensorDict(a=torch.arange(4).view(2, 2), batch_size=[2, 2], names=["time", None])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td.to_parquet(os.path.join(folder, "x.parquet"))
            ...     back = from_parquet(os.path.join(folder, "x.parquet"))
            >>> back.batch_size, back.names
            (torch.Size([2, 2]), ['time', None])
        """
        parquet.write(self, path, separator, nulls, overwrite, durable, storage_options, kwargs)

    @classmethod
    def from_csv(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        nulls: Nulls = None,
        fill: Fill = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
        **kwargs: Any,
    ) -> Self:
        """A container of the columns of a CSV file, with its rows as batch dim.

        A column is what its first cell is that is not empty: integers or floating point numbers (int64, float64), truth
        values (`true`, `False`), or text, which becomes an entry that is no tensor, with `None` for empty cells. What
        does not fit that in a later row is an error. An empty cell among numbers, or `NA` or `null`, is no value; `nan`
        is a number. Rows are counted as in a spreadsheet: the header is row 1.

        Args:
            path: of the file, or its URL; a pattern (`data/*.csv`) reads all files that match, which have the same
                columns, one after the other.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            device: where the entries are moved.
            batch_size: the batch size; the number of rows by default.
            separator: splits the names of columns into nested keys, as `"."` does `"a.b"`.
            dtype: what numbers and truth values are cast to.
            nulls: `None` refuses numbers that are missing; `"mask"` adds a leaf `<name>_mask`, true where there is one.
            fill: what stands where there is none, for all columns or in a dict by name; 0 under a mask by default.
            storage_options: for a URL, what the file system of fsspec takes.
            cache_dir: for a URL, the folder that keeps what was fetched.
            **kwargs: of `pandas.read_csv`. `sep`, `delimiter`, `header`, `names`, `usecols`, `na_values`, `quotechar`,
                `escapechar` and `encoding` change none of the above; with any other, pandas reads the file by its own
                rules, which fill short rows and take mixed columns for text.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            FileNotFoundError: there is no such file.
            ValueError: rows have different numbers of cells, a column mixes types, has a number beyond int64, lacks a
                value or is no UTF-8, two columns have one name or lead to one entry, or there are no rows; names the
                file, the column and the row.

        Example:
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with open(f"{folder}/dogs.csv", "w") as file:
            ...         _ = file.write("name,size.height,size.weight\\nRex,61,30.5\\nFido,38,12\\n")
            ...     dogs = TensorDict.from_csv(f"{folder}/dogs.csv", separator=".")
            >>> dogs["name"], dogs["size", "height"]
            (['Rex', 'Fido'], tensor([61, 38]))
        """
        files = files_of(path, Access.of(storage_options, cache_dir))
        options = CsvOptions.of(kwargs, dtype)
        whole: dict[str, Any] = {"auto_batch_size": auto_batch_size, "batch_dims": batch_dims, "device": device}
        reading: dict[str, Any] = {"separator": separator, "dtype": dtype, "nulls": nulls, "fill": fill}
        with _naming(path, files):
            if options is None:
                frame = _read_by_pandas(files, "read_csv", kwargs)
                return cls.from_pandas(frame, batch_size=batch_size, **whole, **reading)
            table = csv_tables(files, options, nulls is not None or fill is not None).read_table()
            return cls.from_arrow(table, batch_size=batch_size, **whole, **reading)

    def to_csv(
        self,
        path: PathLike,
        *,
        separator: str | None = None,
        nulls: Nulls = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a CSV file: a row for each element of the first batch dim, a column for each entry.

        Text is in quotes, and what has no value an empty cell. The file appears when it is whole.

        Args:
            path: of the file, or its URL.
            separator: joins the names of nested entries, as `"."` does to `"a.b"`; without one they are refused.
            nulls: `"mask"` has an empty cell where a leaf `<name>_mask` is false; as for :meth:`to_arrow`.
            overwrite: replace a file that is there.
            storage_options: for a URL, what the file system of fsspec takes.
            **kwargs: of `pandas.DataFrame.to_csv`, which writes the file then, without the index.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            SaveError: there is a file already, without `overwrite`.
            ValueError: an entry has more dims, or is nested and there is no `separator`; it is named.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(2), b={"c": ["x", "y"]}, batch_size=[2])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td.to_csv(f"{folder}/td.csv", separator=".")
            ...     with open(f"{folder}/td.csv") as file:
            ...         print(file.read(), end="")
            "a","b.c"
            0,"x"
            1,"y"
        """
        table = self.to_arrow(separator=separator, nulls=nulls).replace_schema_metadata()
        refuse_compound(table.schema)

        def write(file: Any) -> None:
            if kwargs:
                table.to_pandas().to_csv(file, **{"index": False, **kwargs})
            else:
                write_csv(file, [table])

        write_text(path, overwrite, storage_options, write)

    @classmethod
    def from_json(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        lines: bool = False,
        nulls: Nulls = None,
        fill: Fill = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
        **kwargs: Any,
    ) -> Self:
        """A container of the records of a JSON file, with its rows as batch dim.

        Numbers become int64 or float64, objects nested containers, arrays of numbers leaves with more dims, or ragged
        ones where rows have different lengths; text, and arrays of it, entries that are no tensors. `null`, or a key
        that a row lacks, is no value.

        Args:
            path: of the file, or its URL; a pattern (`data/*.jsonl`) reads all files that match one after the other.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, storage_options, cache_dir:
                as of :meth:`from_csv`.
            lines: the file has an object on each line; otherwise it is an array of objects, or an object of columns.
            **kwargs: of `pandas.read_json`, such as `orient`: pandas reads the file then, by its own rules.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            FileNotFoundError: there is no such file.
            ValueError: a row is no object, a column mixes types, has a number beyond int64 or lacks a value, an object
                has a key twice, two columns lead to one entry, or there are no rows; names the file, the column and the
                row.

        Example:
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with open(f"{folder}/dogs.jsonl", "w") as file:
            ...         _ = file.write('{"name": "Rex", "cm": {"size": [61, 90]}}\\n')
            ...     dogs = TensorDict.from_json(f"{folder}/dogs.jsonl", lines=True)
            >>> dogs["name"], dogs["cm", "size"].shape
            (['Rex'], torch.Size([1, 2]))
        """
        files = files_of(path, Access.of(storage_options, cache_dir))
        whole: dict[str, Any] = {"auto_batch_size": auto_batch_size, "batch_dims": batch_dims, "device": device}
        reading: dict[str, Any] = {"separator": separator, "dtype": dtype, "nulls": nulls, "fill": fill}
        with _naming(path, files):
            if kwargs:
                frame = _read_by_pandas(files, "read_json", {"lines": lines, **kwargs})
                return cls.from_pandas(frame, batch_size=batch_size, **whole, **reading)
            table = json_tables(files, lines, nulls is not None or fill is not None).read_table()
            return cls.from_arrow(table, batch_size=batch_size, **whole, **reading)

    def to_json(
        self,
        path: PathLike,
        *,
        separator: str | None = None,
        nulls: Nulls = None,
        lines: bool = False,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a JSON file: an object for each element of the first batch dim.

        Nested entries are objects, leaves with more dims arrays, NaN and what has no value `null`. The file appears
        when it is whole.

        Args:
            path: of the file, or its URL.
            separator: joins the names of nested entries, as `"."` does to `"a.b"`, in place of objects in objects.
            nulls: `"mask"` has `null` where a leaf `<name>_mask` is false; as for :meth:`to_arrow`.
            lines: write an object a line, and no array around them.
            overwrite: replace a file that is there.
            storage_options: for a URL, what the file system of fsspec takes.
            **kwargs: of `pandas.DataFrame.to_json`, which writes the file then.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            SaveError: there is a file already, without `overwrite`.
            ValueError: a number is infinite.
            TypeError: a value has no form in JSON.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(2), b={"c": torch.zeros(2, 2)}, batch_size=[2])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td.to_json(f"{folder}/td.json", lines=True)
            ...     with open(f"{folder}/td.json") as file:
            ...         print(file.read(), end="")
            {"a": 0, "b": {"c": [0.0, 0.0]}}
            {"a": 1, "b": {"c": [0.0, 0.0]}}
        """
        table = self.to_arrow(separator=separator, nulls=nulls)

        def write(file: Any) -> None:
            if kwargs:
                table.to_pandas().to_json(file, **{"orient": "records", "lines": lines, **kwargs})
            else:
                write_json(file, [table], lines)

        write_text(path, overwrite, storage_options, write)

    def to_mds(
        self,
        *,
        columns: Mapping[str, str] | None = None,
        out: str | tuple[str, str] | None = None,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        writer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write the elements of the first batch dim as the samples of a streaming data set of MosaicML (format MDS).

        Numbers become `int` (int64) or what their dtype is called, leaves with more dims `ndarray`, with its shape
        unless rows have different ones. Texts become `str`, bytes `bytes`, ints `int`, floats `float64`, and other
        values `json`. MDS has no truth values, which are written as uint8, and no bfloat16, written as float32. Nested
        entries become columns with dotted names.

        Args:
            columns: the columns to write with their encodings of MDS; by default all, as above.
            out: a local folder, the URL of one, or both as a tuple.
            keep_local: keep the local files when they were uploaded.
            compression: of shards, as `"zstd:7"`.
            hashes: algorithms for checksums of shards, as `["sha1"]`.
            size_limit: the largest size of a shard, in bytes or as `"100kb"`.
            writer: an `MDSWriter` to write to instead of `out`; it is left open.
            **kwargs: of `streaming.MDSWriter`; `exist_ok=True` replaces what is in a local folder.

        Raises:
            ModuleNotFoundError: mosaicml-streaming is missing; names the extra.
            FileExistsError: there is something in `out` already.
            UnsupportedEntryError: MDS has no encoding for an entry, which is named.
            ValueError: the container has no batch dims or no entries, or two of them would be one column.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(image=torch.rand(8, 3, 4, 4), label=torch.arange(8), batch_size=[8])
            >>> td.to_mds(out="images", compression="zstd")  # doctest: +SKIP
        """
        options = {"keep_local": keep_local, "compression": compression, "size_limit": size_limit, **kwargs}
        options["hashes"] = None if hashes is None else list(hashes)
        mds.write_mds(self, columns, out, writer, options)

    @classmethod
    def from_mds(
        cls,
        path: PathLike,
        *,
        split: str | None = None,
        separator: str | None = ".",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
    ) -> Self:
        """A container of all samples of a streaming data set of MosaicML (format MDS).

        Numbers become tensors, arrays leaves with more dims, ragged ones where rows have different shapes; any other
        value is an entry that is no tensor. Columns that are pickled are refused.

        Args:
            path: the folder, or the URL of one, whose shards are fetched, and unpacked if they are compressed.
            split: the sub-folder, as `"train"`.
            separator: splits names of columns into nested keys; `None` leaves them as they are.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            device: where the entries are moved.
            batch_size: the batch size; the number of samples by default.

        Raises:
            ModuleNotFoundError: mosaicml-streaming is missing; names the extra.
            FileNotFoundError: there is no index.
            SaveError: the index is broken, names files elsewhere, or has columns that are pickled.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict.from_mds("images")  # doctest: +SKIP
        """
        entries, count = mds.read_mds(path, split, separator)
        if batch_size is None and batch_dims is None and not auto_batch_size:
            batch_size = [count]
        return cls.from_dict(
            entries, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
        )


@contextlib.contextmanager
def _naming(path: PathLike, files: Sequence[SourceFile]) -> Iterator[None]:
    """Give errors about columns the name of the file."""
    try:
        yield
    except ValueError as error:
        if any(file.path in str(error) for file in files) or isinstance(error, UnicodeError):
            raise
        raise type(error)(f"{path}: {error}") from error


def _read_by_pandas(files: Sequence[SourceFile], how: str, kwargs: Mapping[str, Any]) -> Any:
    """The rows of some files as a frame."""
    pandas = require("pandas", "tabular")
    frames = []
    for file in files:
        with file.local() as local:
            frames.append(getattr(pandas, how)(local, **kwargs))
    return frames[0] if len(frames) == 1 else pandas.concat(frames, ignore_index=True)
