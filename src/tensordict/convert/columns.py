"""Containers as columns, for libraries of tables: what one column is, and the container of the columns of a table.

Every library of tables is a file beside this one. It gives a `TableColumn` for each of its own columns, which
`container_of` makes a container of, and is given those of a container by `columns_of`. What no column says (more dims
of the batch, names of dims, lazy stacks, tensorclasses) is in a `TableStructure`, a JSON text that tables keep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tensordict.core import makers, ragged, registry
from tensordict.core.contract import Contract
from tensordict.core.exceptions import DuplicateKeyError, SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
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
    specification_of,
    tensorclass_over,
    tensorclass_problem,
    to_container,
)
from tensordict.io.values import NotJson, decode, encode_without_tensors
from tensordict.memory.storable import check_storable

# What follows the name of an entry in those of the ones that say more about it.
TYPE, CATEGORIES, MASK = "_arrow_type", "_categories", "_mask"
# The types that numbers may stand for, as Arrow writes them, by the dtype that these have then.
_TYPES = {
    torch.int32: re.compile(r"date32\[day\]|time32\[(s|ms)\]"),
    torch.int64: re.compile(
        r"timestamp\[(s|ms|us|ns)(, tz=[^\]]+)?\]|duration\[(s|ms|us|ns)\]|date64\[ms\]|time64\[(us|ns)\]"
    ),
    torch.float64: re.compile(r"decimal(32|64|128|256)\(([1-9]|1[0-5]), -?\d+\)"),
}
# The type of codes whose categories are in ascending order, and that of tensors of one shape.
ORDERED, TENSOR = "ordered", "fixed_shape_tensor"
_VERSION = 1

Nulls = Literal["mask"] | None
Fill = float | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How columns are read.

    separator: splits the names of columns into nested keys.
    dtype: what numbers and truth values are cast to; times and codes are left.
    nulls: `"mask"` adds a leaf `<name>_mask`, true where there is a value; `None` refuses columns that lack values.
    fill: what stands where there is no value: one number, or one for each of some columns.
    metadata: whether there are entries `<name>_arrow_type` and `<name>_categories`.
    masks: the nested keys of columns that get a mask even where nothing is missing, since there is something in other
        parts of the same table; true where it is one of elements, not of rows.
    """

    separator: str | None = None
    dtype: torch.dtype | None = None
    nulls: Nulls = None
    fill: Fill = None
    metadata: bool = True
    masks: Mapping[Path, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_nulls(self.nulls, "which refuses columns that lack values")
        if self.separator == "":
            raise ValueError("the separator of nested keys has at least one character")

    def fill_of(self, name: str) -> Any:
        """What stands for values that are missing in a column; `None` when nothing was said."""
        return self.fill.get(name) if isinstance(self.fill, Mapping) else self.fill


def check_nulls(nulls: object, otherwise: str) -> None:
    """Check what was said of values that are missing.

    Raises:
        ValueError: it is neither `"mask"` nor `None`, which means `otherwise`.
    """
    if nulls not in (None, "mask"):
        raise ValueError(f"nulls is None, {otherwise}, or 'mask', got {nulls!r}")


@dataclass(slots=True)
class TableColumn:
    """One column.

    path: the nested key of the entry.
    values: a (ragged) tensor whose first dim are the rows, or a list of one value for each.
    type: what numbers stand for, as Arrow writes it ("timestamp[us]").
    categories: what codes stand for.
    valid: where there is a value, `None` when there is everywhere.
    batch: of values, the batch dims beyond the first.
    """

    path: Path
    values: Any
    type: str | None = None
    categories: list[Any] | None = None
    valid: Tensor | None = None
    batch: Sequence[int] = ()

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the numbers; `None` for other values."""
        return self.values.dtype if isinstance(self.values, Tensor) else None

    @property
    def nullable(self) -> bool:
        """Whether values may be missing."""
        return self.valid is not None or not isinstance(self.values, Tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row, -1 for lengths that differ."""
        return tuple(ragged.shape_of(self.values)[1:]) if isinstance(self.values, Tensor) else tuple(self.batch)


@dataclass(slots=True)
class TableStructure:
    """What a container is beside its columns.

    nodes: of containers by their paths, the batch dims beyond the first (`None` without batch dims), names, the dim of
        a lazy stack, the tensorclass, values of `MetaData`, and whether there are no columns.
    notes: of the columns of a table, by their paths there, what their types do not say.
    """

    nodes: dict[Path, dict[str, Any]] = field(default_factory=dict)
    notes: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def text(self) -> str:
        """As JSON."""
        form = {"version": _VERSION, "nodes": list(self.nodes.items()), "columns": list(self.notes.items())}
        return json.dumps(form, separators=(",", ":"))

    @staticmethod
    def of_text(text: bytes | None) -> TableStructure | None:
        """What `text` gives, which may come from anywhere; `None` without one, and for those of later versions.

        Raises:
            SaveError: it is broken.
        """
        if text is None:
            return None
        try:
            form = parse_json(text)
            if form["version"] != _VERSION:
                return None
            return TableStructure(_by_path(form["nodes"]), _by_path(form["columns"]))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise SaveError(
                f"the description of a container that the table has with it ('tensordict' in the metadata of the "
                f"schema) is broken: {error!r}; without it, columns are read as those of any table"
            ) from None


def _by_path(items: Any) -> dict[Path, dict[str, Any]]:
    found: dict[Path, dict[str, Any]] = {}
    for path, content in items:
        if not all(type(name) is str for name in path) or type(content) is not dict:
            raise ValueError(f"{path!r:.80} has {content!r:.80}")
        found[tuple(path)] = content
    return found


# --- of containers ----------------------------------------------------------------------------------------------------


def columns_of(
    container: Any, text_categories: bool = False, nulls: Nulls = None
) -> tuple[list[TableColumn], int, TableStructure]:
    """The columns of a container, how many rows they have, and what it is beside them.

    The rows are its first batch dim; without batch dims, the first dim that all leaves share. `MetaData` beside a leaf
    that says what its numbers stand for is told to its column, any other to the structure.

    Args:
        text_categories: whether the table keeps categories only if they are text or bytes.
        nulls: `"mask"` has leaves `<name>_mask` say which values of others are missing.

    Raises:
        UnsupportedEntryError: an entry has no form as a column.
        ValueError: the leaves have no dim in common that would be the rows.
    """
    check_nulls(nulls, "which writes masks as columns of their own")
    found = _Columns(TableStructure(), [], None, text_categories)
    found.take(container, ())
    if found.rows is None:
        raise ValueError("the container has neither batch dims nor leaves, so that nobody can say how many rows it has")
    return _without_masks(found.columns) if nulls else found.columns, found.rows, found.structure


def _without_masks(columns: Sequence[TableColumn]) -> list[TableColumn]:
    """The columns without those that tell where others have values, which these are told."""
    by_path = {column.path: column for column in columns}
    taken: set[Path] = set()
    for mask in sorted(columns, key=lambda column: len(column.path[-1])):
        path = (*mask.path[:-1], mask.path[-1].removesuffix(MASK))
        masked = by_path.get(path)
        if masked is not None and path not in taken and _is_mask(mask, masked):
            masked.valid = mask.values
            taken.add(mask.path)
    return [column for column in columns if column.path not in taken]


def _is_mask(mask: TableColumn, masked: TableColumn) -> bool:
    """Whether a column is a truth value for each row, or for each element, of another one."""
    if mask is masked or mask.dtype is not torch.bool or masked.dtype is None:
        return False
    if not mask.values.is_nested:
        return mask.shape == () or (mask.values.shape == masked.values.shape and not masked.dtype.is_complex)
    return bool(masked.values.is_nested) and torch.equal(ragged.row_sizes(mask.values), ragged.row_sizes(masked.values))


@dataclass(slots=True)
class _Columns:
    """What is found on the walk of `columns_of`."""

    structure: TableStructure
    columns: list[TableColumn]
    rows: int | None
    text_categories: bool

    def take(self, container: Any, path: Path) -> None:
        check_level(path)
        form = specification_of(container, path)
        node: dict[str, Any] = {}
        if form.is_tensorclass:
            node["class"] = form.kind
            form = specification_of(form.entries[WRAPPED], path)
        if form.kind == LAZY:
            node["stack_dim"] = form.stack_dim
            form = specification_of(_dense(container, path), path)
            if form.is_tensorclass:
                form = specification_of(form.entries[WRAPPED], path)
        if form.kind != DICT:
            raise UnsupportedEntryError(f"{entry_of(path)}a {form.kind} has no rows, which is what a table is made of")
        size = form.batch_size
        if self.rows is None and size:
            self.rows = size[0]
        node["batch"] = list(size[1:]) if size else None
        if form.names is not None and any(form.names):
            node["names"] = form.names
        said: dict[str, Any] = {}
        before = len(self.columns)
        for name, entry in form.entries.items():
            if type(entry) is Tensor:
                self._leaf((*path, name), entry)
            else:
                self._entry(form, (*path, name), entry, said)
        if said:
            self._tell(self.columns[before:], path, said)
        if said:
            node["metadata"] = {name: _exact((*path, name), value) for name, value in said.items()}
        if len(self.columns) == before:
            node["empty"] = True
        if not path or len(node) > 1 or size[1:] or not size:
            self.structure.nodes[path] = node

    def _entry(self, parent: Specification, path: Path, entry: Any, said: dict[str, Any]) -> None:
        if isinstance(entry, Tensor) and not hasattr(entry, "_wrapped_container"):
            return self._leaf(path, entry)
        form = specification_of(entry, path)
        if form.kind == UNBATCHED:
            own = form.entries[OWN]
            return self._leaf(path, own.expand(*parent.batch_size, *own.shape))
        if not form.is_value:
            return self.take(entry, path)
        if form.kind == "MetaData":
            said[path[-1]] = form.value
            return None
        self._values(path, form)

    def _tell(self, columns: Sequence[TableColumn], path: Path, said: dict[str, Any]) -> None:
        """Tell columns of the container at `path` what is said about them, and take that from what is said."""
        for column in columns:
            if column.path[:-1] != path or column.dtype is None:
                continue
            name = column.path[-1]
            if _are_categories(column.dtype, said.get(name + CATEGORIES), self.text_categories):
                column.categories = said.pop(name + CATEGORIES)
            if _is_type(column, said.get(name + TYPE)):
                column.type = said.pop(name + TYPE)

    def _leaf(self, path: Path, leaf: Tensor) -> None:
        try:
            if not leaf.is_nested:
                check_storable(leaf)
        except UnsupportedEntryError as error:
            raise UnsupportedEntryError(f"{entry_of(path)}{error}") from None
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

    def _values(self, path: Path, form: Specification) -> None:
        size, value = form.batch_size, form.value
        if form.kind != VALUE_STACK:
            if self.rows is None and not size:
                raise ValueError(f"{entry_of(path)}a value without batch dims tells of no rows: give it a batch size")
            for length in reversed(size[1:]):
                value = [value] * length
            value = [value] * (size[0] if size else self.rows or 0)
        if self.rows is None:
            self.rows = len(value)
        self.columns.append(TableColumn(path, value, batch=list(size[1:])))


def _is_type(column: TableColumn, value: Any) -> bool:
    """Whether a value is the type of what the numbers of a column stand for."""
    if type(value) is not str or column.dtype is None:
        return False
    if column.categories is not None:
        return value == ORDERED
    if value == TENSOR:
        return len(column.shape) > 0 and not column.values.is_nested and column.dtype is not torch.bool
    pattern = _TYPES.get(column.dtype)
    return pattern is not None and pattern.fullmatch(value) is not None


def _are_categories(dtype: torch.dtype, value: Any, text: bool) -> bool:
    """Whether a value is the list of what codes of this dtype stand for."""
    if type(value) is not list or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return False
    kinds = set(map(type, value))
    try:
        # A table has one type for all of them.
        has_type = kinds <= {str} or kinds == {bytes} or (not text and len(kinds - {type(None)}) == 1)
        return has_type and len(set(value)) == len(value)
    except TypeError:  # such as lists, of which nobody can say quickly whether they are there once
        return False


def places_of(columns: Sequence[TableColumn], separator: str | None) -> list[Path]:
    """Where columns are in a table: their nested keys, or with a separator their names joined.

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


def _exact(path: Path, value: Any) -> Any:
    try:
        return encode_without_tensors(value)
    except NotJson as error:
        raise UnsupportedEntryError(f"{entry_of(path)}{error}: tables keep such values as JSON") from None


def _dense(stack: Any, path: Path) -> Any:
    """A lazy stack as one container, jagged where its rows differ."""
    members = stack._members() or ()
    if len({frozenset(member.keys(True, True)) for member in members}) > 1:
        raise UnsupportedEntryError(
            f"{entry_of(path)}the members of the lazy stack have different keys, and a table has the same columns in "
            "all rows: densify() puts empty rows where there is nothing"
        )
    try:
        return stack.densify(torch.jagged)
    except RuntimeError:
        try:  # Rows that differ in more dims than one.
            return stack.densify()
        except RuntimeError as error:
            raise UnsupportedEntryError(f"{entry_of(path)}the lazy stack has no form as rows: {error}") from None


# --- to containers ----------------------------------------------------------------------------------------------------


def paths_of(names: Sequence[str], separator: str | None) -> list[Path]:
    """The nested keys of columns.

    Raises:
        DuplicateKeyError: two columns have one name.
        TypeError: a column has no text for a name.
    """
    seen: dict[str, int] = {}
    for position, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(
                f"column {position} is called {name!r}, and keys are strings: rename the columns first, as in "
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
    """The container of columns of so many rows.

    Raises:
        DuplicateKeyError: two columns lead to the same entry, or one to an entry of the other.
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
        _place(tree, column.path, values)
        if column.valid is not None:
            _place(tree, _beside(column.path, MASK), column.valid)
        if not reading.metadata:
            continue
        if column.type is not None:
            _place(tree, _beside(column.path, TYPE), _metadata(column.type, rows))
        if column.categories is not None:
            _place(tree, _beside(column.path, CATEGORIES), _metadata(column.categories, rows))
    nodes = {} if structure is None else structure.nodes
    for path in sorted(nodes, key=len):
        if path and nodes[path].get("empty"):
            _add_empty(tree, path)
    try:
        return to_container(_node(tree, rows, nodes, ()))
    except SaveError as error:
        raise SaveError(
            f"{error}: the container that these columns were written from does not fit them any more; "
            "table.replace_schema_metadata(None) forgets it"
        ) from error


def _metadata(value: Any, rows: int) -> Specification:
    return Specification("MetaData", torch.Size((rows,)), value=value)


def _beside(path: Path, end: str) -> Path:
    return (*path[:-1], path[-1] + end)


def _level(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    for depth, name in enumerate(path):
        tree = tree.setdefault(name, {})
        if type(tree) is not dict:
            raise DuplicateKeyError(
                f"there is a column {joined(path[: depth + 1])!r} and one whose key begins so, {joined(path)!r}: "
                "rename one of them first, or choose another separator"
            )
    return tree


def _add_empty(tree: dict[str, Any], path: Path) -> None:
    """Put a container without columns into its parent; not where none of the columns of that was read."""
    for name in path[:-1]:
        tree = tree.get(name, {})
        if type(tree) is not dict:
            return
    tree.setdefault(path[-1], {})


def _place(tree: dict[str, Any], path: Path, value: Any) -> None:
    level = _level(tree, path[:-1]) if len(path) > 1 else tree
    if path[-1] in level:
        raise DuplicateKeyError(
            f"two columns lead to the entry {joined(path)!r}: rename one of them first, or choose another separator "
            f"(a column with missing values or a type of its own also makes entries called {MASK!r}, {TYPE!r} and "
            f"{CATEGORIES!r} behind its name)"
        )
    level[path[-1]] = value


def _node(tree: dict[str, Any], rows: int, nodes: Mapping[Path, dict[str, Any]], path: Path) -> Specification:
    said = nodes.get(path, {})
    try:
        batch = said.get("batch", [])
        size = torch.Size(()) if batch is None else torch.Size((rows, *checks.ints(batch, "its batch size")))
        names = checks.names(said.get("names"), len(size))
        dim = None if said.get("stack_dim") is None else checks.dim(said["stack_dim"], len(size))
        for name, value in dict(said.get("metadata", {})).items():
            tree.setdefault(name, Specification("MetaData", size, value=decode(value)))
    except (ValueError, TypeError) as error:
        raise SaveError(f"{entry_of(path)}{error}") from None
    entries: dict[str, Any] = {}
    for name, value in tree.items():
        if type(value) is dict:
            value = _node(value, rows, nodes, (*path, name))
        elif isinstance(value, Specification) and value.kind == "MetaData":
            value.batch_size = size
        entries[name] = value
    node = Specification(DICT, size, None, names, entries)
    if dim is not None:
        node.finish = _restack(dim)
    check(node, path)
    name = said.get("class")
    cls = registry.declared(name) if type(name) is str else None
    if cls is None or tensorclass_problem(cls, DICT, True, tree) is not None:
        return node
    return tensorclass_over(str(name), node)


def _restack(dim: int) -> Any:
    def finish(node: Specification, container: Contract) -> Any:
        size = container._batch_size
        batch = None if size[dim] else size[:dim] + size[dim + 1 :]
        stack = makers.lazy_stack(*container.unbind(dim), stack_dim=dim, batch_size=batch)
        if node.names is not None:
            stack.names = node.names
        return stack

    return finish
