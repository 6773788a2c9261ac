"""Tables in memory: containers of the columns of Arrow, pandas, Polars and data sets of Hugging Face, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensordict.convert import arrow, huggingface, pandas, polars
from tensordict.convert.columns import Fill, Nulls, TableOptions
from tensordict.ops.converting import Converting
from tensordict.ops.foreign import apply_options

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]
    from polars import DataFrame as PolarsFrame
    from pyarrow import Table  # type: ignore[import-untyped]
    from typing_extensions import Self

    from datasets import Dataset  # type: ignore[import-untyped]


class Tables(Converting):
    """`from_arrow`, `from_pandas`, `from_polars`, `from_hf`, and their opposites."""

    @classmethod
    def from_arrow(
        cls,
        table: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: object = None,
        batch_size: object = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        nulls: Nulls = None,
        fill: Fill = None,
        metadata: bool = True,
    ) -> Self:
        """A container of the columns of a table of Arrow, with its rows as batch dim.

        Numbers share the memory of the table, which Arrow takes for constant: clone what is to be written to. Columns
        in several chunks are copied into one. What a column becomes:

        - numbers: a leaf; truth values, which Arrow packs into bits, are copied;
        - lists of one size at any depth and `fixed_shape_tensor`: a leaf with as many more dims; lists of other sizes:
          a ragged leaf; lists of values: values;
        - structs: nested containers; dictionaries: codes, with the list of what they stand for as the entry
          `<name>_categories`, a `MetaData`;
        - dates, times and durations: integers in their own unit; decimals of up to 15 digits: float64, which is exact.
          The entry `<name>_arrow_type`, a `MetaData`, says what they are ("timestamp[us, tz=UTC]"), so that
          :meth:`to_arrow` makes the same of them. Larger decimals: values;
        - text, bytes and all else: values, `None` where there is none.

        A table that :meth:`to_arrow` made also gives back batch dims beyond the first, names of dims, lazy stacks and,
        where the program knows the class, tensorclasses.

        Args:
            table: a `pyarrow.Table` or `RecordBatch`, or what has Arrow's stream interface, as frames of Polars do.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            device: where the entries are moved.
            batch_size: the batch size; the number of rows by default.
            separator: splits the names of columns into nested keys, as `"."` does `"a.b"`.
            dtype: what numbers and truth values are cast to.
            nulls: `None` refuses numbers that are missing; `"mask"` adds a leaf `<name>_mask`, true where there is one:
                one truth value a row, or one an element where they are missing inside lists.
            fill: what stands where there is none, for all columns or in a dict by name; 0 under a mask by default, -1
                for codes.
            metadata: `False` leaves out the entries `<name>_categories` and `<name>_arrow_type`.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            TypeError: it is no table.
            ValueError: a column lacks values, two columns have one name or lead to the same entry, or there is none.

        Example:
            >>> import pyarrow
            >>> from tensordict import TensorDict
            >>> table = pyarrow.table({"x": [1.0, None], "obs": [{"pixel": 3}, {"pixel": 4}]})
            >>> td = TensorDict.from_arrow(table, nulls="mask")
            >>> td["obs", "pixel"], td["x_mask"]
            (tensor([3, 4]), tensor([ True, False]))
        """
        container = arrow.container_of_table(table, TableOptions(separator, dtype, nulls, fill, metadata))
        return finished(cls, container, auto_batch_size, batch_dims, device, batch_size)  # type: ignore[no-any-return]

    def to_arrow(self, *, separator: str | None = None, nulls: Nulls = None) -> Table:
        """A `pyarrow.Table` with one row for each element of the first batch dim; without batch dims, of the first dim
        that all leaves share.

        It shares the memory of leaves in RAM: what is written to them shows in the table. Leaves with more dims are
        lists of fixed sizes, ragged ones lists, nested containers structs. What Arrow has no type for is written as
        what holds it exactly: bfloat16 and float8 as float32, complex numbers as lists of two. Values are text, bytes
        or what Arrow makes of them, and JSON where that would change them. The metadata of the schema has the rest
        (`"tensordict"`), with which :meth:`from_arrow` gives an equal container.

        Args:
            separator: makes columns of nested entries, by joining their names, in place of structs.
            nulls: `"mask"` takes a bool leaf `<name>_mask`, with a truth value for each row of the leaf `<name>` or for
                each of its elements, for what :meth:`from_arrow` makes of values that are missing: they are null where
                it is false, and it is no column. Others stay columns.

        Raises:
            ModuleNotFoundError: pyarrow is missing; names the extra.
            UnsupportedEntryError: an entry has no form in a table, which is named.
            ValueError: two entries would be one column, or the leaves have no rows in common.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(2), b=TensorDict(c=torch.zeros(2, 3)), batch_size=[2])
            >>> print(td.to_arrow(separator=".").schema.remove_metadata())
            a: int64
            b.c: fixed_size_list<item: float>[3]
              child 0, item: float
        """
        return arrow.table_of(self, separator, nulls=nulls)

    @classmethod
    def from_pandas(
        cls,
        dataframe: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: object = None,
        batch_size: object = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        nulls: Nulls = None,
        fill: Fill = None,
        metadata: bool = True,
    ) -> Self:
        """A container of copies of the columns of a data frame of pandas, without its index; a row is a batch element.

        Numbers and truth values become leaves (NaN is a number), text and other objects values. Columns of pandas'
        other dtypes become what those of Arrow do, see :meth:`from_arrow`: dates and times integers in their own unit,
        categories codes (-1 for none, where nulls may be), nullable integers leaves.

        Args:
            dataframe: the frame; it shares no memory with the result.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as for
                :meth:`from_arrow`.

        Raises:
            ModuleNotFoundError: pandas is missing; names the extra.
            TypeError: it is no data frame, or a column has no text for a name.
            ValueError: as for :meth:`from_arrow`.

        Example:
            >>> import pandas
            >>> from tensordict import TensorDict
            >>> frame = pandas.DataFrame({"a": [1, 2], "b.c": [0.5, 1.5], "name": ["x", "y"]})
            >>> td = TensorDict.from_pandas(frame, separator=".")
            >>> td["b", "c"].dtype, td["name"], td.batch_size
            (torch.float64, ['x', 'y'], torch.Size([2]))
        """
        container = pandas.container_of_frame(dataframe, TableOptions(separator, dtype, nulls, fill, metadata))
        return finished(cls, container, auto_batch_size, batch_dims, device, batch_size)  # type: ignore[no-any-return]

    def to_pandas(self, *, separator: str | None = None, nulls: Nulls = None) -> DataFrame:
        """A `pandas.DataFrame` with one row for each element of the first batch dim, or of the dim all leaves share.

        Leaves of one number a row become columns of NumPy's dtypes, which are copies; those with more dims and ragged
        ones, dates and times of day become columns of Arrow (`pandas.ArrowDtype`), text and other values objects.

        Args:
            separator: joins the names of nested entries to those of columns; needed where there are any.
            nulls: `"mask"` takes leaves `<name>_mask` for what is missing, as :meth:`to_arrow` does; such columns are
                Arrow's, too, which keep integers what they are.

        Raises:
            ModuleNotFoundError: pandas is missing; names the extra.
            UnsupportedEntryError: an entry has no form as a column.
            ValueError: an entry is nested, without a separator; two entries would be one column; or the leaves have no
                rows in common.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(2), b=TensorDict(c=torch.ones(2)), batch_size=[2])
            >>> print(td.to_pandas(separator="."))
               a  b.c
            0  0  1.0
            1  1  1.0
        """
        return pandas.frame_of(self, separator, nulls)

    @classmethod
    def from_polars(
        cls,
        dataframe: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: object = None,
        batch_size: object = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        nulls: Nulls = None,
        fill: Fill = None,
        metadata: bool = True,
    ) -> Self:
        """A container of the columns of a data frame of Polars, with its rows as batch dim.

        Columns become what those of Arrow do, whose memory they share, see :meth:`from_arrow`: `Array`s leaves with
        more dims, `List`s ragged ones, `Struct`s nested containers, `Categorical`s and `Enum`s codes.

        Args:
            dataframe: the frame.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as for
                :meth:`from_arrow`.

        Raises:
            ModuleNotFoundError: polars or pyarrow is missing; names the extra.
            TypeError: it is no data frame; a lazy one has to be collected first.
            ValueError: as for :meth:`from_arrow`.

        Example:
            >>> import polars
            >>> from tensordict import TensorDict
            >>> TensorDict.from_polars(polars.DataFrame({"a": [1, None]}), fill=7)["a"]
            tensor([1, 7])
        """
        container = polars.container_of_frame(dataframe, TableOptions(separator, dtype, nulls, fill, metadata))
        return finished(cls, container, auto_batch_size, batch_dims, device, batch_size)  # type: ignore[no-any-return]

    def to_polars(self, *, separator: str | None = None, nulls: Nulls = None) -> PolarsFrame:
        """A `polars.DataFrame` with one row for each element of the first batch dim, of what :meth:`to_arrow` gives.

        Args:
            separator, nulls: as for :meth:`to_arrow`.

        Raises:
            ModuleNotFoundError: polars or pyarrow is missing; names the extra.
            UnsupportedEntryError, ValueError: as for :meth:`to_arrow`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.arange(3), batch_size=[3]).to_polars()["a"].sum()
            3
        """
        return polars.frame_of(self, separator, nulls)

    @classmethod
    def from_hf(
        cls,
        dataset: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        nulls: Nulls = None,
        fill: Fill = None,
        metadata: bool = True,
    ) -> Self:
        """A container of the columns of a data set of Hugging Face (`datasets`), with its rows as batch dim.

        Numbers share the memory of the data set, or the map of its file, unless it is in several pieces or its rows
        were chosen (`select`, `shuffle`), which copies them. A `ClassLabel` becomes codes, with its names as the entry
        `<name>_categories`; arrays (`Array2D`, ...) and lists of a fixed length leaves with more dims. The rest is as
        :meth:`from_arrow` says.

        Args:
            dataset: a `datasets.Dataset`; a `DatasetDict` becomes a container of its splits.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as of
                :meth:`from_arrow`.

        Raises:
            TypeError: it is none of these.
            ValueError: as of :meth:`from_arrow`.

        Example:
            >>> from datasets import Dataset
            >>> from tensordict import TensorDict
            >>> TensorDict.from_hf(Dataset.from_dict({"x": [1.5, 2.5], "text": ["a", "b"]}))["x"]
            tensor([1.5000, 2.5000], dtype=torch.float64)
        """
        options: dict[str, Any] = {"auto_batch_size": auto_batch_size, "batch_dims": batch_dims, "device": device}
        options |= {"batch_size": batch_size, "separator": separator, "dtype": dtype}
        options |= {"nulls": nulls, "fill": fill, "metadata": metadata}
        if isinstance(dataset, dict):
            return cls.from_dict({name: cls.from_hf(split, **options) for name, split in dataset.items()})
        return cls.from_arrow(huggingface.table_of_dataset(dataset), **options)

    def to_hf(self, *, separator: str | None = None, nulls: Nulls = None) -> Dataset:
        """A `datasets.Dataset` with a row for each element of the first batch dim, over the memory of leaves in RAM.

        Columns are as :meth:`to_arrow` gives them; codes with categories become a `ClassLabel`.

        Args:
            separator, nulls: as for :meth:`to_arrow`.

        Raises:
            ModuleNotFoundError: datasets is missing; names the extra.
            UnsupportedEntryError: an entry has no form in a table, which is named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(x=torch.arange(3), batch_size=[3]).to_hf()[1]
            {'x': 1}
        """
        return huggingface.dataset_of_table(self.to_arrow(separator=separator, nulls=nulls))


def finished(
    cls: Any, container: Any, auto_batch_size: bool, batch_dims: int | None, device: object, batch_size: object
) -> Any:
    """What was read, of the class that was asked and with the batch size that was."""
    if not isinstance(container, cls) and hasattr(cls, "from_tensordict"):
        container = cls.from_tensordict(container)
    return apply_options(container, auto_batch_size, batch_dims, device, batch_size)
