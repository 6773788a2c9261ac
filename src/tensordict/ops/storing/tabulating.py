"""Methods that convert tables in memory to containers and back: Arrow, pandas, Polars and Hugging Face data sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensordict.convert import arrow, huggingface, pandas, polars
from tensordict.convert.columns import Fill, Nulls, TableOptions
from tensordict.core.keys import Key, path_of
from tensordict.core.signatures import refuse_unknown, spells
from tensordict.ops.converting import Converting, apply_options

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]
    from polars import DataFrame as PolarsFrame
    from pyarrow import Table  # type: ignore[import-untyped]
    from typing_extensions import Self, TypedDict, Unpack

    from datasets import Dataset  # type: ignore[import-untyped]

    class ReadTable(TypedDict, total=False):
        auto_batch_size: bool
        batch_dims: int | None
        device: object
        batch_size: object
        separator: str | None
        dtype: torch.dtype | None
        nulls: Nulls
        fill: Fill
        metadata: bool


class Tables(Converting):
    """The methods `from_arrow`, `from_pandas`, `from_polars` and `from_hf`, and `to_arrow` etc."""

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
        copy: bool | None = None,
        mask_key: Key | None = None,
    ) -> Self:
        """Convert an Arrow table to a container with a batch dim over its rows.

        Example:
            >>> import pyarrow
            >>> from tensordict import TensorDict
            >>> table = pyarrow.table({"x": [1.0, None], "obs": [{"pixel": 3}, {"pixel": 4}]})
            >>> td = TensorDict.from_arrow(table, nulls="mask")
            >>> td["obs", "pixel"], td["x_mask"]
            (tensor([3, 4]), tensor([ True, False]))

        The leaves share the memory of the table, which Arrow assumes to be constant. Clone a leaf before you write to
        it. Truth values, and columns in several chunks, are copied.

        Args:
            table: a `pyarrow.Table` or `RecordBatch`, or an object with Arrow's stream interface, such as a Polars
                data frame.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            device: the device to move the entries to.
            batch_size: the batch size; by default the number of rows.
            separator: splits column names into nested keys: with `"."`, the column `"a.b"` becomes `("a", "b")`.
            dtype: the dtype for numbers and truth values.
            nulls: with `None` or `"raise"`, missing numbers raise an error. `"mask"` adds a bool leaf `<name>_mask`,
                which is false for missing numbers. It has one element per row, or one per number if numbers inside
                lists are missing. `"fill"` replaces missing numbers and adds no mask.
            fill: the element for missing numbers, or a dict with one for each column. By default 0, and -1 for codes;
                NaN for floating point numbers with `nulls="fill"` or `mask_key`.
            metadata: `False` leaves out the entries `<name>_categories` and `<name>_arrow_type`.
            copy: `True` copies the columns. Otherwise they share memory where that is safe.
            mask_key: with `nulls="mask"`, put the masks into the container at this key: the mask of `("obs", "pixel")`
                is at `(mask_key, "obs", "pixel")`. Text with missing values gets a mask, too. The function
                :func:`from_arrow` does so by default, with the key `"_mask"`.

        Returns:
            a container with an entry for each column:

            - numbers and truth values become a leaf;
            - lists of one size (at any depth) and `fixed_shape_tensor` become a leaf with more dims, lists of different
              sizes a ragged leaf, and lists of other types values;
            - a struct becomes a nested container;
            - a dictionary becomes a leaf of codes; the entry `<name>_categories`, a `MetaData`, has the list of the
              categories;
            - dates, times and durations become integers in their own unit, and decimals of up to 15 digits float64,
              which is exact. The entry `<name>_arrow_type`, a `MetaData`, has their type ("timestamp[us, tz=UTC]") for
              :meth:`to_arrow`. Larger decimals become values;
            - text, bytes and all other types become values, with `None` for missing ones.

            From a table of :meth:`to_arrow`, an equal copy of the container that was converted: with all batch dims,
            dim names, lazy stacks, and tensorclasses that this program has defined.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            TypeError: `table` is not a table.
            ValueError: numbers are missing, without `nulls` and `fill`; two columns give the same entry; or `mask_key`
                is given without `nulls="mask"`.
            TypeError: `batch_size` and `auto_batch_size` are both given.
        """
        place = () if mask_key is None else path_of(mask_key)
        sizes = auto_batch_size, batch_dims, device, batch_size
        options = TableOptions(*sizes, separator, dtype, nulls, fill, metadata, place, bool(copy))
        return finish_table(cls, arrow.container_of_table(table, options), options)  # type: ignore[no-any-return]

    def to_arrow(self, *, separator: str | None = None, nulls: Nulls = None) -> Table:
        """Convert to a `pyarrow.Table` with one row for each element of the first batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(2), b=TensorDict(c=torch.zeros(2, 3)), batch_size=[2])
            >>> print(td.to_arrow(separator=".").schema.remove_metadata())
            a: int64
            b.c: fixed_size_list<item: float>[3]
              child 0, item: float

        A container without batch dims gives a row for each element of the first dim that all leaves share. The table
        shares the memory of leaves in RAM, so later writes to them change the table.

        Args:
            separator: joins nested keys to column names, instead of making structs.
            nulls: `"mask"` reads each bool leaf `<name>_mask` as the mask of the leaf `<name>`, as :meth:`from_arrow`
                makes it: one element per row, or one per number. Elements are null where the mask is false, and the
                mask is not a column. Masks of other shapes are columns.

        Raises:
            ModuleNotFoundError: pyarrow is missing; the error names the extra.
            UnsupportedEntryError: a table cannot hold an entry; the error names it.
            ValueError: two entries give the same column, or the leaves have no common rows.

        Leaves with more dims become lists of a fixed size, ragged leaves lists, and nested containers structs. Dtypes
        that Arrow does not have become types that hold them exactly: bfloat16 and float8 become float32, and complex
        numbers lists of two. Values become text, bytes or the type that Arrow infers for them, or JSON if that would
        change them. The metadata of the schema (`"tensordict"`) has the rest, so that :meth:`from_arrow` can make an
        equal container.
        """
        return arrow.table_of(self, separator, nulls=nulls)

    @classmethod
    @spells(from_arrow, without="copy mask_key")
    def from_pandas(cls, dataframe: object, **options: Unpack[ReadTable]) -> Self:
        """Convert a pandas data frame to a container with a batch dim over its rows. The index is left out.

        Example:
            >>> import pandas
            >>> from tensordict import TensorDict
            >>> frame = pandas.DataFrame({"a": [1, 2], "b.c": [0.5, 1.5], "name": ["x", "y"]})
            >>> td = TensorDict.from_pandas(frame, separator=".")
            >>> td["b", "c"].dtype, td["name"], td.batch_size
            (torch.float64, LinkedList(['x', 'y']), torch.Size([2]))

        Numbers and truth values become leaves (NaN is a number), text and other objects values.

        Args:
            dataframe: the frame. All columns are copied.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as in
                :meth:`from_arrow`.

        Raises:
            ModuleNotFoundError: pandas is missing; the error names the extra.
            TypeError: `dataframe` is not a data frame, or the name of a column is not a string.
            ValueError: for the same reasons as :meth:`from_arrow`.

        Other dtypes of pandas are converted as in :meth:`from_arrow`: dates and times to integers in their own unit,
        categories to codes (-1 for missing ones, with `nulls` or `fill`), nullable integers to leaves.
        """
        refuse_unknown(Tables.from_pandas, options)
        how = TableOptions(**options)
        return finish_table(cls, pandas.container_of_frame(dataframe, how), how)  # type: ignore[no-any-return]

    def to_pandas(self, *, separator: str | None = None, nulls: Nulls = None) -> DataFrame:
        """Convert to a `pandas.DataFrame` with one row for each element of the first batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(2), b=TensorDict(c=torch.ones(2)), batch_size=[2])
            >>> print(td.to_pandas(separator="."))
               a  b.c
            0  0  1.0
            1  1  1.0

        A container without batch dims gives a row for each element of the first dim that all leaves share.

        Args:
            separator: joins nested keys to column names; required if the container has nested entries.
            nulls: `"mask"` reads leaves `<name>_mask` as masks, as in :meth:`to_arrow`. Columns with a mask have types
                of Arrow, which keep integers as integers.

        Raises:
            ModuleNotFoundError: pandas is missing; the error names the extra.
            UnsupportedEntryError: a data frame cannot hold an entry.
            ValueError: an entry is nested and `separator` is not given; two entries give the same column; or the leaves
                have no common rows.

        Leaves with one number per row become columns of NumPy's dtypes, which are copies. Leaves with more dims, ragged
        leaves, dates and times of day become columns of Arrow (`pandas.ArrowDtype`); text and other values become
        objects.
        """
        return pandas.frame_of(self, separator, nulls)

    @classmethod
    @spells(from_arrow, without="copy mask_key")
    def from_polars(cls, dataframe: object, **options: Unpack[ReadTable]) -> Self:
        """Convert a Polars data frame to a container with a batch dim over its rows.

        Example:
            >>> import polars
            >>> from tensordict import TensorDict
            >>> TensorDict.from_polars(polars.DataFrame({"a": [1, None]}), fill=7)["a"]
            tensor([1, 7])

        Columns are converted as in :meth:`from_arrow`, and share the memory of the frame: `Array`s become leaves with
        more dims, `List`s ragged leaves, `Struct`s nested containers, `Categorical`s and `Enum`s codes.

        Args:
            dataframe: the frame.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as in
                :meth:`from_arrow`.

        Raises:
            ModuleNotFoundError: polars or pyarrow is missing; the error names the extra.
            TypeError: `dataframe` is not a data frame. Collect a lazy frame first.
            ValueError: for the same reasons as :meth:`from_arrow`.
        """
        refuse_unknown(Tables.from_polars, options)
        how = TableOptions(**options)
        return finish_table(cls, polars.container_of_frame(dataframe, how), how)  # type: ignore[no-any-return]

    def to_polars(self, *, separator: str | None = None, nulls: Nulls = None) -> PolarsFrame:
        """Convert to a `polars.DataFrame` with one row for each element of the first batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.arange(3), batch_size=[3]).to_polars()["a"].sum()
            3

        The columns are the same as in :meth:`to_arrow`.

        Args:
            separator, nulls: as in :meth:`to_arrow`.

        Raises:
            ModuleNotFoundError: polars or pyarrow is missing; the error names the extra.
            UnsupportedEntryError, ValueError: for the same reasons as :meth:`to_arrow`.
        """
        return polars.frame_of(self, separator, nulls)

    @classmethod
    @spells(from_arrow, without="copy mask_key")
    def from_hf(cls, dataset: Any, *, decode: bool | str = False, **options: Unpack[ReadTable]) -> Self:
        """Convert a data set of Hugging Face (`datasets`) to a container with a batch dim over its rows.

        Example:
            >>> from datasets import Dataset
            >>> from tensordict import TensorDict
            >>> TensorDict.from_hf(Dataset.from_dict({"x": [1.5, 2.5], "text": ["a", "b"]}))["x"]
            tensor([1.5000, 2.5000], dtype=torch.float64)

        The leaves share the memory of the data set, or the map of its file. They are copied if the data set consists of
        several pieces, or has selected rows (`select`, `shuffle`).

        Args:
            dataset: a `datasets.Dataset`; or a `DatasetDict`, which becomes a container of its splits.
            auto_batch_size, batch_dims, device, batch_size, separator, dtype, nulls, fill, metadata: as in
                :meth:`from_arrow`.
            decode: decode columns of images to uint8 leaves of shape (rows, channels, height, width); strided nested
                ones if the sizes differ. `True` keeps the channels of the files, a mode of Pillow such as "RGB"
                converts. By default such a column is a ragged uint8 leaf with the bytes of the files, which
                :func:`tensordict.datasets.decode_images` decodes.

        Raises:
            TypeError: `dataset` is of another type.
            SaveError: an image cannot be decoded.
            ValueError: for the same reasons as :meth:`from_arrow`.

        A `ClassLabel` becomes codes, and its names become the entry `<name>_categories`. Arrays (`Array2D`, ...), and
        lists of numbers that have one length in all rows, become leaves with more dims. Other columns are converted as
        in :meth:`from_arrow`. For data larger than memory, see :func:`tensordict.datasets.import_dataset`.
        """
        refuse_unknown(Tables.from_hf, options)
        how = TableOptions(**options)

        def read(dataset: Any) -> Any:
            if isinstance(dataset, dict):
                return cls.from_dict({name: read(split) for name, split in dataset.items()})
            return finish_table(cls, huggingface.container_of_dataset(dataset, how, decode), how)

        return read(dataset)  # type: ignore[no-any-return]

    def to_hf(self, *, separator: str | None = None, nulls: Nulls = None) -> Dataset:
        """Convert to a `datasets.Dataset` with a row for each element of the first batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(x=torch.arange(3), batch_size=[3]).to_hf()[1]
            {'x': 1}

        The columns are the same as in :meth:`to_arrow`, and share the memory of leaves in RAM. Codes with categories
        become a `ClassLabel`.

        Args:
            separator, nulls: as in :meth:`to_arrow`.

        Raises:
            ModuleNotFoundError: datasets is missing; the error names the extra.
            UnsupportedEntryError: a table cannot hold an entry; the error names it.
        """
        return huggingface.make_dataset(self.to_arrow(separator=separator, nulls=nulls))


def finish_table(cls: Any, container: Any, options: TableOptions) -> Any:
    """Convert a container of columns to the class `cls`, and apply the batch size and the device of the caller."""
    if not isinstance(container, cls) and hasattr(cls, "from_tensordict"):
        container = cls.from_tensordict(container)
    return apply_options(container, options.auto_batch_size, options.batch_dims, options.device, options.batch_size)
