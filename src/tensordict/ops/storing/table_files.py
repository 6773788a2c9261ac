"""Methods that read and write table files: Parquet, CSV, JSON and MDS, the streaming data sets of MosaicML."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch

from tensordict.convert import arrow, pandas, parquet
from tensordict.convert.columns import Fill, Nulls, TableOptions
from tensordict.convert.csv import CsvOptions, csv_tables, refuse_compound, write_csv
from tensordict.convert.input_files import SourceFile, files_of
from tensordict.convert.json import json_tables, write_json
from tensordict.convert.text_tables import write_text
from tensordict.core.extras import require
from tensordict.io.remote.remote_saves import Access, CacheDir
from tensordict.io.remote.urls import StorageOptions
from tensordict.memory.mapped import PathLike
from tensordict.ops.storing.tabulating import Tables, finish_table

if TYPE_CHECKING:
    from typing_extensions import Self


class TableFiles(Tables):
    """The methods `from_parquet`, `from_csv`, `from_json` and `from_mds`, and `to_parquet` etc."""

    @overload
    @classmethod
    def from_parquet(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = ...,
        batch_dims: int | None = ...,
        device: object = ...,
        batch_size: object = ...,
        separator: str | None = ...,
        dtype: torch.dtype | None = ...,
        columns: Sequence[str] | None = ...,
        nulls: Nulls = ...,
        fill: Fill = ...,
        metadata: bool = ...,
        batch_size_rows: int,
        storage_options: StorageOptions | None = ...,
        cache_dir: CacheDir | None = ...,
        **kwargs: Any,
    ) -> Iterator[Self]: ...
    @overload
    @classmethod
    def from_parquet(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = ...,
        batch_dims: int | None = ...,
        device: object = ...,
        batch_size: object = ...,
        separator: str | None = ...,
        dtype: torch.dtype | None = ...,
        columns: Sequence[str] | None = ...,
        nulls: Nulls = ...,
        fill: Fill = ...,
        metadata: bool = ...,
        batch_size_rows: None = ...,
        storage_options: StorageOptions | None = ...,
        cache_dir: CacheDir | None = ...,
        **kwargs: Any,
    ) -> Self: ...
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
        """Read Parquet files into a container with a batch dim over their rows, or into an iterator over parts of it.

        Example:
            >>> import os, tempfile, torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "x.parquet")
            ...     TensorDict(a=torch.arange(5), batch_size=[5]).to_parquet(path)
            ...     [part["a"].tolist() for part in TensorDict.from_parquet(path, batch_size_rows=2)]
            [[0, 1], [2, 3], [4]]

        Args:
            path: a file, a folder of files, a pattern (`"part-*.parquet"`, files in the order of their names), or a URL
                of a file or pattern.
            columns: the columns to read; all by default. `"a.b"` is the field `b` of the struct `a`.
            batch_size_rows: return an iterator over containers of this many rows. The last one of a file has the
                remaining rows. One container is in memory at a time.
            storage_options, cache_dir: for a URL, as in :meth:`load_memmap`.
            **kwargs: arguments of `pyarrow.parquet.read_table`, such as `filters=`; with `batch_size_rows`, arguments
                of `pyarrow.parquet.ParquetFile.iter_batches`, such as `row_groups=`.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as in
                :meth:`from_arrow`.

        Returns:
            a container as :meth:`from_arrow` makes it from the table. From a file of :meth:`to_parquet`, an equal copy
            of the container that was written; a tensorclass, if this program has defined the class.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            FileNotFoundError: the file does not exist.
            SaveError: a file is broken or not a Parquet file; the error names it.
            ValueError: a column does not exist, or for the same reasons as :meth:`from_arrow`; the error names the file
                and the column.

        With `batch_size_rows` and `nulls="mask"`, all parts have the same entries. So columns are read once in advance,
        unless the file states that they have no missing values.
        """
        options = TableOptions(auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata)
        options, access = replace(options, columns=columns, arguments=kwargs), Access.of(storage_options, cache_dir)
        if batch_size_rows is None:
            return finish_table(cls, parquet.container_of_files(path, access, options), options)  # type: ignore[no-any-return]
        parts = parquet.batches_of_files(path, access, batch_size_rows, options)
        return (finish_table(cls, part, options) for part in parts)

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
        """Write a Parquet file with one row for each element of the first batch dim.

        Example:
            >>> import os, tempfile, torch
            >>> from tensordict import TensorDict, from_parquet
            >>> td = TensorDict(a=torch.arange(4).view(2, 2), batch_size=[2, 2], names=["time", None])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td.to_parquet(os.path.join(folder, "x.parquet"))
            ...     back = from_parquet(os.path.join(folder, "x.parquet"))
            >>> back.batch_size, back.names
            (torch.Size([2, 2]), ['time', None])

        Other programs read it as columns of numbers, lists, structs and text; see :meth:`to_arrow`. An older file is
        replaced in one step, so readers see the old file or the new one.

        Args:
            path: the file or its URL. An older file of this method is replaced.
            separator, nulls: as in :meth:`to_arrow`.
            overwrite: replace any other file, too.
            durable: wait until the file has reached the disk, so that it survives a loss of power.
            storage_options: for a URL, as in :meth:`memmap`.
            **kwargs: arguments of `pyarrow.parquet.write_table`, such as `compression=` and `row_group_size=`.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            SaveError: a file of another program exists, without `overwrite`.
            UnsupportedEntryError, ValueError: for the same reasons as :meth:`to_arrow`; nothing is written.
            OSError: the file cannot be written; an older file is unchanged.
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
        """Read a CSV file into a container with a batch dim over its rows.

        Example:
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with open(f"{folder}/dogs.csv", "w") as file:
            ...         _ = file.write("name,size.height,size.weight\\nRex,61,30.5\\nFido,38,12\\n")
            ...     dogs = TensorDict.from_csv(f"{folder}/dogs.csv", separator=".")
            >>> dogs["name"], dogs["size", "height"]
            (LinkedList(['Rex', 'Fido']), tensor([61, 38]))

        The first non-empty cell of a column decides its type: integers (int64), floating point numbers (float64), truth
        values (`true`, `False`) or text. A later cell of another type raises an error.

        Args:
            path: the file or its URL; or a pattern (`data/*.csv`), which reads all matching files one after the other.
                They must have the same columns.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            device: the device to move the entries to.
            batch_size: the batch size; by default the number of rows.
            separator: splits column names into nested keys: with `"."`, the column `"a.b"` becomes `("a", "b")`.
            dtype: the dtype for numbers and truth values.
            nulls: with `None`, missing numbers raise an error. `"mask"` adds a bool leaf `<name>_mask`, which is false
                for missing numbers.
            fill: the element for missing numbers, or a dict with one for each column. With a mask, 0 by default.
            storage_options: for a URL, the options of fsspec's file system.
            cache_dir: for a URL, the folder that keeps the fetched file.
            **kwargs: arguments of `pandas.read_csv`. With `sep`, `delimiter`, `header`, `names`, `usecols`,
                `na_values`, `quotechar`, `escapechar` and `encoding`, the rules here apply. With any other, pandas
                reads the file by its own rules: it fills short rows, and reads mixed columns as text.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            FileNotFoundError: the file does not exist.
            ValueError: rows have different numbers of cells; a column mixes types, has a number beyond int64, lacks a
                value or is not in UTF-8; two columns give the same entry; or the file has no rows. The error names the
                file, the column and the row. Rows are counted as in a spreadsheet: the header is row 1.

        A text column becomes a value for each row, with `None` for empty cells. In a column of numbers, empty cells and
        `NA` and `null` are missing numbers; `nan` is a number.
        """
        files = files_of(path, Access.of(storage_options, cache_dir))
        options = TableOptions(auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill)
        form = CsvOptions.of(kwargs, dtype)
        with _name_file_in_errors(path, files):
            if form is None:
                return _read_by_pandas(cls, files, "read_csv", kwargs, options)  # type: ignore[no-any-return]
            table = csv_tables(files, form, options.may_lack_values).read_table()
            return finish_table(cls, arrow.container_of_table(table, options), options)  # type: ignore[no-any-return]

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
        """Write a CSV file with a row for each element of the first batch dim and a column for each entry.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(2), b={"c": ["x", "y"]}, batch_size=[2])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td.to_csv(f"{folder}/td.csv", separator=".")
            ...     with open(f"{folder}/td.csv") as file:
            ...         print(file.read(), end="")
            a,b.c
            0,"x"
            1,"y"

        Text is written in quotes, and a missing element as an empty cell. Readers see the complete file or none.

        Args:
            path: the file or its URL.
            separator: joins nested keys to column names: with `"."`, `("a", "b")` becomes `"a.b"`. Without it, nested
                entries raise an error.
            nulls: `"mask"` writes an empty cell where a leaf `<name>_mask` is false; as in :meth:`to_arrow`.
            overwrite: replace an existing file.
            storage_options: for a URL, the options of fsspec's file system.
            **kwargs: arguments of `pandas.DataFrame.to_csv`, which then writes the file, without the index.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            SaveError: the file exists, without `overwrite`.
            ValueError: an entry has more dims, or is nested and `separator` is not given; the error names it.
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
        """Read a JSON file into a container with a batch dim over its rows.

        Example:
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with open(f"{folder}/dogs.jsonl", "w") as file:
            ...         _ = file.write('{"name": "Rex", "cm": {"size": [61, 90]}}\\n')
            ...     dogs = TensorDict.from_json(f"{folder}/dogs.jsonl", lines=True)
            >>> dogs["name"], dogs["cm", "size"].shape
            (LinkedList(['Rex']), torch.Size([1, 2]))

        Numbers become int64 or float64, and objects nested containers. Arrays of numbers become leaves with more dims,
        or ragged leaves if their lengths differ. Text, and arrays of text, become values.

        Args:
            path: the file or its URL; or a pattern (`data/*.jsonl`), which reads all matching files one after the
                other.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, storage_options, cache_dir:
                as in :meth:`from_csv`. `null`, and a key that a row does not have, are missing values.
            lines: `True` if the file has one object per line. Otherwise it is an array of objects, or an object of
                columns.
            **kwargs: arguments of `pandas.read_json`, such as `orient`; pandas then reads the file by its own rules.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            FileNotFoundError: the file does not exist.
            ValueError: a row is not an object; a column mixes types, has a number beyond int64 or lacks a value; an
                object has a key twice; two columns give the same entry; or the file has no rows. The error names the
                file, the column and the row.
        """
        files = files_of(path, Access.of(storage_options, cache_dir))
        options = TableOptions(auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill)
        with _name_file_in_errors(path, files):
            if kwargs:
                return _read_by_pandas(cls, files, "read_json", {"lines": lines, **kwargs}, options)  # type: ignore[no-any-return]
            table = json_tables(files, lines, options.may_lack_values).read_table()
            return finish_table(cls, arrow.container_of_table(table, options), options)  # type: ignore[no-any-return]

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
        """Write a JSON file with an object for each element of the first batch dim.

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

        Nested containers become objects, and leaves with more dims arrays. NaN and missing elements become `null`.
        Readers see the complete file or none.

        Args:
            path: the file or its URL.
            separator: joins nested keys instead of nesting objects: with `"."`, `("a", "b")` becomes `"a.b"`.
            nulls: `"mask"` writes `null` where a leaf `<name>_mask` is false; as in :meth:`to_arrow`.
            lines: write one object per line, without an array around them.
            overwrite: replace an existing file.
            storage_options: for a URL, the options of fsspec's file system.
            **kwargs: arguments of `pandas.DataFrame.to_json`, which then writes the file.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            SaveError: the file exists, without `overwrite`.
            ValueError: a number is infinite.
            TypeError: JSON cannot hold a value.
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
        finish_writer: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a streaming data set of MosaicML (format MDS), with a sample for each element of the first batch dim.

        A container without batch dims is one sample.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(image=torch.rand(8, 3, 4, 4), label=torch.arange(8), batch_size=[8])
            >>> td.to_mds(out="images", compression="zstd")  # doctest: +SKIP

        Args:
            columns: the columns to write and their MDS encodings; by default all, with the encodings below.
            out: a local folder, its URL, or both as a tuple.
            keep_local: keep the local files after the upload.
            compression: the compression of shards, such as `"zstd:7"`.
            hashes: algorithms for checksums of shards, such as `["sha1"]`.
            size_limit: the maximum size of a shard, in bytes or as `"100kb"`.
            writer: an `MDSWriter` to write to, instead of `out`.
            finish_writer: finish `writer`, which writes the index of the data set: pass `False` to write more to it. By
                default it is finished, except by a container without batch dims.
            **kwargs: arguments of `streaming.MDSWriter`; `exist_ok=True` replaces the content of a local folder.

        Raises:
            ModuleNotFoundError: mosaicml-streaming is missing; the error names the extra.
            FileExistsError: `out` has content already.
            UnsupportedEntryError: MDS has no encoding for an entry; the error names it.
            ValueError: the container has no entries, or two entries give the same column.
            TypeError: neither `out` nor `writer` is given.

        Int64 numbers become `int`, other numbers the encoding named after their dtype. Leaves with more dims become
        `ndarray`, with a fixed shape unless they are ragged. Texts become `str`, bytes `bytes`, ints `int`, floats
        `float64`, and other values `json`. MDS has neither truth values nor bfloat16: they are written as uint8 and
        float32. Nested entries become columns with dotted names.
        """
        options = {"keep_local": keep_local, "compression": compression, "size_limit": size_limit, **kwargs}
        options["hashes"] = None if hashes is None else list(hashes)
        finishes = bool(self._batch_size) if finish_writer is None else finish_writer
        container: Any = self
        from tensordict.convert.mds import write_mds

        write_mds(container if self._batch_size else container.unsqueeze(0), columns, out, writer, finishes, options)

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
        """Read all samples of a streaming data set of MosaicML (format MDS).

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict.from_mds("images")  # doctest: +SKIP

        Numbers become tensors, and arrays become leaves with more dims, or ragged leaves if their shapes differ. Other
        objects become values.

        Args:
            path: the folder or its URL. Shards are fetched, and decompressed if needed.
            split: the sub-folder, such as `"train"`.
            separator: splits column names into nested keys; `None` does not split them.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            device: the device to move the entries to.
            batch_size: the batch size; by default the number of samples.

        Raises:
            ModuleNotFoundError: mosaicml-streaming is missing; the error names the extra.
            FileNotFoundError: the folder has no index.
            SaveError: the index is broken, names files outside of the folder, or has pickled columns.
        """
        from tensordict.convert.mds import read_mds

        entries, count = read_mds(path, split, separator)
        if batch_size is None and batch_dims is None and not auto_batch_size:
            batch_size = [count]
        return cls.from_dict(
            entries, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
        )


@contextlib.contextmanager
def _name_file_in_errors(path: PathLike, files: Sequence[SourceFile]) -> Iterator[None]:
    """Put the path in front of errors of this block, unless they name a file."""
    try:
        yield
    except ValueError as error:
        if any(file.path in str(error) for file in files) or isinstance(error, UnicodeError):
            raise
        raise type(error)(f"{path}: {error}") from error


def _read_by_pandas(
    cls: Any, files: Sequence[SourceFile], how: str, kwargs: Mapping[str, Any], options: TableOptions
) -> Any:
    """Read files with a function of pandas, one after the other."""
    pd = require("pandas", "pandas")
    frames = []
    for file in files:
        with file.local() as local:
            frames.append(getattr(pd, how)(local, **kwargs))
    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    return finish_table(cls, pandas.container_of_frame(frame, options), options)
