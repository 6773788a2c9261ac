"""The columns between containers and table libraries. Each library has a file next to this one.

To read, a library converts its columns to `TableColumn`s, and `container_of` makes a container of them. To write,
`columns_of` gives the `TableColumn`s of a container. Facts that columns cannot express (further batch dims, dim names,
lazy stacks, tensorclasses) are in a `TableStructure`, which tables keep as JSON text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tensordict.core import makers, ragged, registry
from tensordict.core.contract import Contract
from tensordict.core.exceptions import DuplicateKeyError, SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.core.shapes import refuse_two_sizes
from tensordict.io.formats.stack_columns import densify_rows
from tensordict.io.formats.structure import node_from_json, node_to_json
from tensordict.io.specification import (
    DICT,
    LAZY,
    OWN,
    UNBATCHED,
    VALUE_STACK,
    WRAPPED,
    Specification,
    check,
    check_level,
    find_uneven,
    specification_of,
    tensorclass_over,
    tensorclass_problem,
    to_container,
)
from tensordict.io.values import decode, encode_entry
from tensordict.memory.storable import check_storable

# The suffixes of entries that describe the entry of the name before the suffix.
TYPE, CATEGORIES, MASK = "_arrow_type", "_categories", "_mask"
# The Arrow types that numbers of each dtype may stand for.
_TYPES = {
    torch.int32: re.compile(r"date32\[day\]|time32\[(s|ms)\]"),
    torch.int64: re.compile(
        r"timestamp\[(s|ms|us|ns)(, tz=[^\]]+)?\]|duration\[(s|ms|us|ns)\]|date64\[ms\]|time64\[(us|ns)\]"
    ),
    torch.float64: re.compile(r"decimal(32|64|128|256)\(([1-9]|1[0-5]), -?\d+\)"),
}
# The type names of codes with ordered categories, and of tensors of fixed shape.
ORDERED, TENSOR = "ordered", "fixed_shape_tensor"
_VERSION = 2

Nulls = Literal["raise", "fill", "mask"] | None
Fill = float | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Options for reading tables, in the order of the parameters of `from_arrow`.

    auto_batch_size, batch_dims, device, batch_size: the sizes and the device of the container of all columns.
    separator: split the names of columns at this string into nested keys.
    dtype: cast numbers and bools to this dtype. Times and codes are not cast.
    nulls: `"mask"` adds a leaf `<name>_mask`, true where there is a value. `"fill"` fills without a mask. `None` and
        `"raise"` refuse columns with nulls.
    fill: the number that replaces nulls; or a mapping from column names to numbers.
    metadata: add entries `<name>_arrow_type` and `<name>_categories`.
    mask_key: put the masks into the container at this key, under the keys of their columns, instead of `<name>_mask`.
    copy: copy columns whose memory could be shared.
    masks: the nested keys of columns that always get a mask, because other parts of the same table have nulls. The
        value is true for a mask of elements, and false for a mask of rows.
    shapes: the shape of the rows of columns whose type does not tell it, because it has lists of variable length.
        Without a shape such rows become ragged. It does not apply to columns in which whole rows are null.
    columns: the columns to read from a file; `None` for all.
    arguments: further arguments for the library that reads the file.
    """

    auto_batch_size: bool = False
    batch_dims: int | None = None
    device: object = None
    batch_size: object = None
    separator: str | None = None
    dtype: torch.dtype | None = None
    nulls: Nulls = None
    fill: Fill = None
    metadata: bool = True
    mask_key: Path = ()
    copy: bool = False
    masks: Mapping[Path, bool] = field(default_factory=dict)
    shapes: Mapping[Path, Sequence[int]] = field(default_factory=dict)
    columns: Sequence[str] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_two_sizes(self.auto_batch_size, self.batch_size)
        if self.nulls not in (None, "raise", "fill", "mask"):
            raise ValueError(f"nulls is 'raise' or None, 'fill' or 'mask', got {self.nulls!r}")
        if self.mask_key and self.nulls != "mask":
            raise ValueError(f"mask_key= is for nulls='mask', and nulls is {self.nulls!r}")
        if self.separator == "":
            raise ValueError("the separator of nested keys has at least one character")

    @property
    def may_lack_values(self) -> bool:
        """True if missing numbers are allowed."""
        return self.fills or self.fill is not None

    def fill_of(self, name: str) -> Any:
        """Return the fill value of a column; `None` if there is none."""
        return self.fill.get(name) if isinstance(self.fill, Mapping) else self.fill

    @property
    def fills(self) -> bool:
        """True if nulls are filled, with or without a mask."""
        return self.nulls in ("fill", "mask")

    @property
    def default_fill(self) -> float:
        """The number that fills nulls of floating point columns, unless `fill` says another one."""
        return 0.0 if self.nulls == "mask" and not self.mask_key else math.nan


@dataclass(slots=True)
class TableColumn:
    """One column of a table.

    path: the nested key of the entry.
    values: a (ragged) tensor whose first dim is the rows, or a list with one value per row.
    type: the Arrow type that numbers stand for ("timestamp[us]").
    categories: the values that codes stand for.
    valid: a mask that is false for nulls; `None` without nulls.
    batch: for non-tensor values, the batch dims after the first.
    """

    path: Path
    values: Any
    type: str | None = None
    categories: list[Any] | None = None
    valid: Tensor | None = None
    batch: Sequence[int] = ()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of numbers; `None` for other values."""
        return self.values.dtype if isinstance(self.values, Tensor) else None

    @property
    def nullable(self) -> bool:
        """True if values may be missing."""
        return self.valid is not None or not isinstance(self.values, Tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row, with -1 for lengths that differ."""
        return tuple(ragged.shape_of(self.values)[1:]) if isinstance(self.values, Tensor) else tuple(self.batch)


@dataclass(slots=True)
class TableStructure:
    """The description of a container that is stored next to its columns.

    nodes: for each container, by path: its description in the form of `io/formats/structure.py`, with 0 rows, the
        values of `MetaData`, and a flag for containers without columns.
    notes: for each column, by its path in the table: facts that its type does not express.
    """

    nodes: dict[Path, dict[str, Any]] = field(default_factory=dict)
    notes: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the description as JSON text."""
        form = {"version": _VERSION, "nodes": list(self.nodes.items()), "columns": list(self.notes.items())}
        return json.dumps(form, separators=(",", ":"))

    @staticmethod
    def from_json(text: bytes | None) -> TableStructure | None:
        """Parse a description, which is not trusted. Returns `None` without text, and for later versions.

        Raises:
            SaveError: the text is broken.
        """
        if text is None:
            return None
        try:
            form = parse_json(text)
            if form["version"] != _VERSION:
                return None
            return TableStructure(_parse_items(form["nodes"]), _parse_items(form["columns"]))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise SaveError(
                f"the description of a container in the table ('tensordict' in the metadata of the schema) is "
                f"broken: {error!r}; remove it to read the columns as those of any table"
            ) from None


def _parse_items(items: Any) -> dict[Path, dict[str, Any]]:
    found: dict[Path, dict[str, Any]] = {}
    for path, content in items:
        if not all(type(name) is str for name in path) or type(content) is not dict:
            raise ValueError(f"{path!r:.80} has {content!r:.80}")
        found[tuple(path)] = content
    return found


# --- from containers --------------------------------------------------------------------------------------------------


def columns_of(
    container: Any, text_categories: bool = False, nulls: Nulls = None
) -> tuple[list[TableColumn], int, TableStructure]:
    """Return the columns of a container, the number of rows, and the structure.

    The first batch dim gives the rows; without batch dims, the first dim that all leaves share. `MetaData` with the
    type or the categories of a leaf goes into its column. Other `MetaData` goes into the structure.

    Args:
        text_categories: tells that the table keeps categories only if they are text or bytes.
        nulls: `"mask"` uses leaves `<name>_mask` as the masks of other leaves.

    Raises:
        UnsupportedEntryError: an entry has no form as a column.
        ValueError: the leaves have no common first dim.
    """
    if nulls not in (None, "mask"):
        raise ValueError(f"nulls is None, which writes masks as columns of their own, or 'mask', got {nulls!r}")
    found = _ColumnCollector(TableStructure(), [], None, text_categories)
    found.collect(container, ())
    if found.rows is None:
        raise ValueError("the container has neither batch dims nor leaves, so the number of rows is unknown")
    return _attach_masks(found.columns) if nulls else found.columns, found.rows, found.structure


def _attach_masks(columns: Sequence[TableColumn]) -> list[TableColumn]:
    """Attach masks to the columns that they belong to, and return the other columns."""
    by_path = {column.path: column for column in columns}
    taken: set[Path] = set()
    for mask in sorted(columns, key=lambda column: len(column.path[-1])):
        path = (*mask.path[:-1], mask.path[-1].removesuffix(MASK))
        masked = by_path.get(path)
        if masked is not None and path not in taken and _is_mask_of(mask, masked):
            masked.valid = mask.values
            taken.add(mask.path)
    return [column for column in columns if column.path not in taken]


def _is_mask_of(mask: TableColumn, masked: TableColumn) -> bool:
    """Return whether a column is a mask of the rows, or of the elements, of another column."""
    if mask is masked or mask.dtype is not torch.bool or masked.dtype is None:
        return False
    if not mask.values.is_nested:
        return mask.shape == () or (mask.values.shape == masked.values.shape and not masked.dtype.is_complex)
    return bool(masked.values.is_nested) and torch.equal(ragged.row_sizes(mask.values), ragged.row_sizes(masked.values))


@dataclass(slots=True)
class _ColumnCollector:
    """Collects the columns and the structure of a container, for `columns_of`."""

    structure: TableStructure
    columns: list[TableColumn]
    rows: int | None
    text_categories: bool

    def collect(self, container: Any, path: Path) -> None:
        check_level(path)
        form = specification_of(container, path)
        described: dict[str, Any] = {}
        if form.is_tensorclass:
            described["class"] = form.kind
            form = specification_of(form.entries[WRAPPED], path)
        kind, dim = form.kind, form.stack_dim
        if kind == LAZY:
            form = specification_of(_densify(container, path), path)
            if form.is_tensorclass:
                form = specification_of(form.entries[WRAPPED], path)
        if form.kind != DICT:
            raise UnsupportedEntryError(f"{entry_of(path)}a {form.kind} has no rows for a table")
        size = form.batch_size
        if self.rows is None and size:
            self.rows = size[0]
        described |= node_to_json(replace(form, kind=kind, stack_dim=dim, device=None))
        # All parts of a table have one description, whatever their numbers of rows.
        described["batch_size"] = [0, *size[1:]] if size else []
        metadata: dict[str, Any] = {}
        before = len(self.columns)
        for name, entry in form.entries.items():
            if type(entry) is Tensor:
                self._collect_leaf((*path, name), entry)
            else:
                self._collect_entry(form, (*path, name), entry, metadata)
        if metadata:
            self._assign_metadata(self.columns[before:], path, metadata)
        if metadata:
            described["metadata"] = {
                name: encode_entry(value, (*path, name), ": tables keep such values as JSON", tensors=False).form
                for name, value in metadata.items()
            }
        if len(self.columns) == before:
            described["empty"] = True
        self.structure.nodes[path] = described

    def _collect_entry(self, parent: Specification, path: Path, entry: Any, metadata: dict[str, Any]) -> None:
        if isinstance(entry, Tensor) and not hasattr(entry, "_wrapped_container"):
            return self._collect_leaf(path, entry)
        form = specification_of(entry, path)
        if form.kind == UNBATCHED:
            own = form.entries[OWN]
            return self._collect_leaf(path, own.expand(*parent.batch_size, *own.shape))
        if not form.is_value:
            return self.collect(entry, path)
        if form.kind == "MetaData":
            metadata[path[-1]] = form.value
            return None
        self._collect_values(path, form)

    def _assign_metadata(self, columns: Sequence[TableColumn], path: Path, metadata: dict[str, Any]) -> None:
        """Move the types and categories in `metadata` to the columns of the container at `path`."""
        for column in columns:
            if column.path[:-1] != path or column.dtype is None:
                continue
            name = column.path[-1]
            if _are_categories(column.dtype, metadata.get(name + CATEGORIES), self.text_categories):
                column.categories = metadata.pop(name + CATEGORIES)
            if _can_have_type(column, metadata.get(name + TYPE)):
                column.type = metadata.pop(name + TYPE)

    def _collect_leaf(self, path: Path, leaf: Tensor) -> None:
        if not leaf.is_nested:
            check_storable(leaf, path)
        if leaf.is_meta:
            raise UnsupportedEntryError(f"{entry_of(path)}it is on the meta device and has no content")
        if not leaf.dim():
            raise ValueError(f"{entry_of(path)}it is a single number without rows: td.unsqueeze(0) makes one row of it")
        rows = leaf.size(0)
        if self.rows is None:
            self.rows = rows
        elif rows != self.rows:
            raise ValueError(
                f"{entry_of(path)}it has {rows} rows where other entries have {self.rows}: give the container a batch "
                "size, or exclude the entry"
            )
        self.columns.append(TableColumn(path, leaf))

    def _collect_values(self, path: Path, form: Specification) -> None:
        size, value = form.batch_size, form.value
        if form.kind != VALUE_STACK:
            if self.rows is None and not size:
                raise ValueError(f"{entry_of(path)}a value without batch dims has no rows: give it a batch size")
            for length in reversed(size[1:]):
                value = [value] * length
            value = [value] * (size[0] if size else self.rows or 0)
        if self.rows is None:
            self.rows = len(value)
        self.columns.append(TableColumn(path, value, batch=list(size[1:])))


def _can_have_type(column: TableColumn, value: Any) -> bool:
    """Return whether `value` is the name of a type, and the column may have this type."""
    if type(value) is not str or column.dtype is None:
        return False
    if column.categories is not None:
        return value == ORDERED
    if value == TENSOR:
        return len(column.shape) > 0 and not column.values.is_nested and column.dtype is not torch.bool
    pattern = _TYPES.get(column.dtype)
    return pattern is not None and pattern.fullmatch(value) is not None


def _are_categories(dtype: torch.dtype, value: Any, text: bool) -> bool:
    """Return whether a value is a list of categories for codes of this dtype."""
    if type(value) is not list or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return False
    kinds = set(map(type, value))
    try:
        # A table has one type for all categories.
        has_type = kinds <= {str} or kinds == {bytes} or (not text and len(kinds - {type(None)}) == 1)
        return has_type and len(set(value)) == len(value)
    except TypeError:  # Categories that cannot be hashed, such as lists, cannot be checked for duplicates quickly.
        return False


def places_of(columns: Sequence[TableColumn], separator: str | None) -> list[Path]:
    """Return the path of each column in a table: its nested key, or with a separator its joined name.

    Raises:
        DuplicateKeyError: two entries would be one column.
    """
    if separator is None:
        return [column.path for column in columns]
    found: dict[Path, Path] = {}
    for column in columns:
        place = (separator.join(column.path),)
        if place in found:
            raise DuplicateKeyError(
                f"entries {joined(found[place])!r} and {joined(column.path)!r} would both be the column {place[0]!r}: "
                "rename one of them, or choose another separator"
            )
        found[place] = column.path
    return list(found)


def _densify(stack: Any, path: Path) -> Any:
    """Make one container of a lazy stack whose members have the same keys."""
    if find_uneven(stack, by_keys=True) is not None:
        raise UnsupportedEntryError(
            f"{entry_of(path)}the members of the lazy stack have different keys, and a table has the same columns in "
            "all rows: densify() adds empty rows for missing entries"
        )
    return densify_rows(stack, path)


# --- to containers ----------------------------------------------------------------------------------------------------


def paths_of(names: Sequence[str], separator: str | None) -> list[Path]:
    """Return the nested keys of columns from their names.

    Raises:
        DuplicateKeyError: two columns have the same name.
        TypeError: the name of a column is not a string.
    """
    seen: dict[str, int] = {}
    for position, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(
                f"column {position} is called {name!r}, but keys must be strings: rename the columns first, as in "
                "frame.rename(columns=str)"
            )
        if (first := seen.setdefault(name, position)) != position:
            raise DuplicateKeyError(
                f"columns {first + 1} and {position + 1} are both called {name!r}: rename one of them first"
            )
    if separator is None:
        return [(name,) for name in names]
    return [tuple(name.split(separator)) for name in names]


def container_of(
    columns: Sequence[TableColumn], rows: int, structure: TableStructure | None, reading: TableOptions
) -> Any:
    """Make a container from columns.

    Raises:
        DuplicateKeyError: the key of a column equals the key of another one, or begins with it.
        SaveError: the structure does not fit the columns.
    """
    tree: dict[str, Any] = {}
    for column in columns:
        values = column.values
        if isinstance(values, Tensor):
            if reading.dtype is not None and column.type is None and column.categories is None:
                values = values.to(reading.dtype)
        else:
            values = Specification(VALUE_STACK, torch.Size((rows, *column.batch)), stack_dim=0, value=values)
        insert_entry(tree, column.path, values)
        if column.valid is not None:
            place = (*reading.mask_key, *column.path) if reading.mask_key else _sibling(column.path, MASK)
            insert_entry(tree, place, column.valid)
        if not reading.metadata:
            continue
        if column.type is not None:
            insert_entry(tree, _sibling(column.path, TYPE), _make_metadata(column.type, rows))
        if column.categories is not None:
            insert_entry(tree, _sibling(column.path, CATEGORIES), _make_metadata(column.categories, rows))
    nodes = {} if structure is None else structure.nodes
    for path in sorted(nodes, key=len):
        if path and nodes[path].get("empty"):
            _add_empty(tree, path)
    try:
        return to_container(_build_node(tree, rows, nodes, ()))
    except SaveError as error:
        raise SaveError(
            f"{error}: the columns have changed since they were written from a container; "
            "table.replace_schema_metadata(None) removes the description of that container"
        ) from error


def _make_metadata(value: Any, rows: int) -> Specification:
    return Specification("MetaData", torch.Size((rows,)), value=value)


def _sibling(path: Path, end: str) -> Path:
    return (*path[:-1], path[-1] + end)


def _add_empty(tree: dict[str, Any], path: Path) -> None:
    """Add a container without columns to its parent, if columns of the parent were read."""
    for name in path[:-1]:
        tree = tree.get(name, {})
        if type(tree) is not dict:
            return
    tree.setdefault(path[-1], {})


def insert_entry(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Put an entry into nested dicts.

    Raises:
        DuplicateKeyError: another entry is there, or at the beginning of the path.
    """
    for depth, name in enumerate(path[:-1], 1):
        tree = tree.setdefault(name, {})
        if type(tree) is not dict:
            raise DuplicateKeyError(
                f"{joined(path[:depth])!r} and {joined(path)!r} inside it cannot both be entries: rename one of them "
                "first, or choose another separator"
            )
    if path[-1] in tree:
        raise DuplicateKeyError(
            f"there are two entries {joined(path)!r}: rename one of them first, or choose another separator (a column "
            f"with missing values or a type of its own also makes entries called {MASK!r}, {TYPE!r} and {CATEGORIES!r} "
            "behind its name)"
        )
    tree[path[-1]] = value


def _build_node(tree: dict[str, Any], rows: int, nodes: Mapping[Path, dict[str, Any]], path: Path) -> Specification:
    described = nodes.get(path, {"kind": DICT, "batch_size": [0]})
    node, tensorclass = node_from_json(described, path)
    size = torch.Size((rows, *node.batch_size[1:])) if node.batch_size else node.batch_size
    try:
        for name, value in dict(described.get("metadata", {})).items():
            tree.setdefault(name, Specification("MetaData", size, value=decode(value)))
    except (ValueError, TypeError) as error:
        raise SaveError(f"{entry_of(path)}{error}") from None
    entries: dict[str, Any] = {}
    for name, value in tree.items():
        if type(value) is dict:
            value = _build_node(value, rows, nodes, (*path, name))
        elif isinstance(value, Specification) and value.kind == "MetaData":
            value.batch_size = size
        entries[name] = value
    finish = None if node.stack_dim is None else partial(_restack, node.stack_dim)
    found = check(Specification(DICT, size, None, node.names, entries, finish=finish), path)
    cls = None if tensorclass is None else registry.declared(tensorclass)
    if tensorclass is None or cls is None or tensorclass_problem(cls, DICT, True, tree) is not None:
        return found
    return tensorclass_over(tensorclass, found)


def _restack(dim: int, node: Specification, container: Contract) -> Any:
    """Return the lazy stack that was written as a container of all its rows."""
    size = container._batch_size
    batch = None if size[dim] else size[:dim] + size[dim + 1 :]
    return makers.lazy_stack(*container.unbind(dim), stack_dim=dim, batch_size=batch, names=node.names)
