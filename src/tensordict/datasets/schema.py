"""`Schema`: keys, classes, dtypes and shapes of the rows of a data set, against which writers check every batch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.core import ragged
from tensordict.core.exceptions import SchemaError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
from tensordict.io.formats.meta import DTYPES
from tensordict.io.formats.stack_columns import count_elements, densify_rows, join_ragged, split_ragged
from tensordict.io.formats.structure import node_from_json, node_to_json, structure_error
from tensordict.io.specification import (
    DICT,
    LAZY,
    UNBATCHED,
    VALUE_STACK,
    VALUES,
    WRAPPED,
    Specification,
    check_level,
    specification_of,
    tensorclass_over,
    to_container,
)
from tensordict.io.values import encode, encode_entry
from tensordict.memory import files
from tensordict.memory.storable import check_storable

# Marks the description of an entry that `add_column` added.
_ADDED = "added"


@dataclass(frozen=True, slots=True)
class Field:
    """An entry of every row.

    Args:
        dtype: the dtype of a tensor; `None` for values.
        shape: the shape of a row; -1 for dims in which rows may differ.
        jagged: for a ragged entry, True for nested tensors of the jagged layout.
        added: True for an entry that `add_column` added. Older shards may lack it, until they are written again.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    jagged: bool = dataclasses.field(default=False, compare=False)
    added: bool = dataclasses.field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        if self.dtype is None:
            return "a value that is no tensor"
        return f"{'ragged rows' if -1 in self.shape else 'rows'} of shape {list(self.shape)} of {self.dtype}"


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of different shapes: the elements of all rows in a flat tensor, and the table of the sizes of the rows."""

    flat: Tensor
    sizes: Tensor


# The rows of one entry: a tensor, ragged rows, or one value for each row.
Rows = Tensor | FlatRows | list[Any]


@dataclass(slots=True)
class Batch:
    """Rows that fit a schema: their number, and the rows of each entry."""

    count: int
    rows: dict[Path, Rows]


def find_difference(one: Batch, other: Batch) -> tuple[int, Path] | None:
    """Return the first row that differs between two batches of one schema, and the entry; `None` if all are equal.

    Elements are compared by their bytes, so NaN equals itself.
    """
    found: list[tuple[int, Path]] = []
    for key, rows in one.rows.items():
        others = other.rows[key]
        if isinstance(rows, Tensor) and isinstance(others, Tensor) and files.to_bytes(rows) == files.to_bytes(others):
            continue
        pairs = enumerate(zip(_contents(rows), _contents(others), strict=True))
        found += [(row, key) for row, (mine, theirs) in pairs if mine != theirs][:1]
    return min(found, default=None, key=lambda pair: pair[0])


def _contents(rows: Rows) -> list[bytes]:
    """Return the content of each row as bytes."""
    if isinstance(rows, Tensor):
        return [files.to_bytes(row) for row in rows]
    if isinstance(rows, FlatRows):
        parts = torch.split(rows.flat, rows.sizes.prod(1).tolist())
        return [files.to_bytes(size) + files.to_bytes(part) for size, part in zip(rows.sizes, parts, strict=True)]
    values = [encode(value) for value in rows]
    return [json.dumps(form).encode() + b"".join(map(files.to_bytes, tensors)) for form, tensors in values]


class Schema:
    """A description of the rows of a data set.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.datasets.schema import Schema
        >>> schema = Schema(TensorDict({"a": torch.zeros(4, 3)}, [4]))
        >>> schema.fields
        {('a',): Field(dtype=torch.float32, shape=(3,), jagged=False)}

    Args:
        batch: a container whose first batch dim runs over rows.
        ragged_keys: entries whose rows may differ in their first dim, even if the rows of `batch` do not.

    Attributes:
        fields: the entries by key.
        batch_size: the batch size of a row.
        skeleton: a specification without leaves, of dicts of tensors, tensorclasses and values.
        dense: the shape of a row, for entries whose rows are tensors of one shape.
        sizes: the bytes of such a row.
        nbytes: the sum of these bytes.

    Raises:
        SchemaError: the batch has no batch dims, or a key in `ragged_keys` is missing or cannot be ragged.
        UnsupportedEntryError: an entry has no rows.
    """

    def __init__(self, batch: Any, ragged_keys: Collection[Path] = ()) -> None:
        if not batch._batch_size:
            raise SchemaError("a batch of rows has a batch dim; append() takes one row, extend() many")
        leaves: dict[Path, Any] = {}
        skeleton = _describe_container(batch, (), leaves)
        self._set_fields(skeleton, {key: _describe_leaf(key, leaf, key in ragged_keys) for key, leaf in leaves.items()})
        missing = [joined(key) for key in ragged_keys if key not in leaves]
        if missing:
            raise SchemaError(f"ragged= names {missing}, and there are the entries {[joined(key) for key in leaves]}")

    def _set_fields(self, skeleton: Specification, fields: dict[Path, Field]) -> None:
        self.skeleton, self.fields = skeleton, fields
        self.dense: dict[Path, tuple[int, ...]] = {}
        self.sizes: dict[Path, int] = {}
        for key, field in fields.items():
            if field.dtype is not None and -1 not in field.shape:
                self.dense[key] = field.shape
                self.sizes[key] = math.prod(field.shape) * field.dtype.itemsize
        self.nbytes = sum(self.sizes.values())
        self._kinds = dict(_kinds(skeleton, ()))
        self.batch_size = skeleton.batch_size[1:]

    # --- JSON ---------------------------------------------------------------------------------------------------------

    @cached_property
    def json(self) -> dict[str, Any]:
        """A batch without rows as JSON, in the form of `io/formats/structure.py`, plus dtypes and shapes of rows."""
        return _to_json(self.skeleton, (), self.fields)

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Build the schema that `json` describes.

        Raises:
            SaveError: the description is broken; the error names the key.
        """
        schema, fields = object.__new__(cls), dict[Path, Field]()
        schema._set_fields(_from_json(value, (), fields), fields)
        schema.json = value
        return schema

    # --- added entries ------------------------------------------------------------------------------------------------

    @property
    def added_keys(self) -> set[Path]:
        """The entries that `add_column` added."""
        return {key for key, field in self.fields.items() if field.added}

    def mark_added_key(self, key: Path) -> None:
        """Mark an entry as added. Call this before `json` is read."""
        self.fields[key] = replace(self.fields[key], added=True)

    def without(self, keys: Collection[Path]) -> Schema:
        """Return this schema without some entries."""
        if self.fields.keys().isdisjoint(keys):
            return self
        made = Schema(self.sample(1).exclude(*keys))
        for key in made.fields:
            made.fields[key] = self.fields[key]
        return made

    def with_field_of(self, other: Schema, key: Path) -> Schema:
        """Return this schema with an entry of another one, as an added entry."""
        rows = self.without([key]).sample(1)
        made = Schema(rows.set(key, other.sample(1).get(key)))
        for name in made.fields:
            made.fields[name] = (other if name == key else self).fields[name]
        return made

    # --- checking -----------------------------------------------------------------------------------------------------

    def take_rows(self, batch: Any) -> Batch:
        """Check that a batch fits the schema, and return its rows.

        Raises:
            SchemaError: the batch does not fit; the error names the entry, and what was expected.
        """
        size = batch._batch_size
        if size[1:] == self.batch_size and (rows := self._take_flat(batch)) is not None:
            return Batch(size[0], rows)
        if len(size) != len(self.skeleton.batch_size) or size[1:] != self.batch_size:
            raise SchemaError(
                f"the batch size is {list(size)}, and that of a row of this data set is {list(self.batch_size)}: "
                f"a batch of n rows has {['n', *self.batch_size]}".replace("'n'", "n")
            )
        leaves: dict[Path, Any] = {}
        found = _describe_container(batch, (), leaves)
        if leaves.keys() != self.fields.keys():
            self._refuse_keys(leaves)
        if len(self._kinds) > 1 or found.kind != DICT:
            self._check_kinds(found)
        count = size[0]
        return Batch(count, {key: self._check_leaf(key, leaf, count) for key, leaf in leaves.items()})

    def _take_flat(self, batch: Any) -> dict[Path, Rows] | None:
        """Return the rows of a flat container of tensors if all fit; `None` if the batch needs the full check.

        For one entry, this takes 3 us and the full check 15. Writing 256 rows of 1 KiB takes 66.
        """
        entries = batch._entries if type(batch) is TensorDict and len(self._kinds) == 1 else None
        if type(entries) is not dict or len(entries) != len(self.dense) or len(self.dense) != len(self.fields):
            return None
        rows: dict[Path, Rows] = {}
        for name, leaf in entries.items():
            key = (name,)
            shape = self.dense.get(key)
            if shape is None or type(leaf) is not Tensor or leaf.is_nested:
                return None
            if leaf.dtype is not self.fields[key].dtype or leaf.shape[1:] != shape:
                return None
            rows[key] = leaf
        return rows

    def _check_leaf(self, key: Path, leaf: Any, count: int) -> Rows:
        field = self.fields[key]
        shape = self.dense.get(key)
        if shape is not None and isinstance(leaf, Tensor) and not leaf.is_nested:
            if leaf.dtype == field.dtype and leaf.shape[1:] == shape:
                return leaf
        elif field.dtype is None:
            if isinstance(leaf, Specification):
                return _list_values(key, leaf, count)
        elif isinstance(leaf, Tensor) and leaf.dtype == field.dtype:
            rows = _as_ragged_rows(leaf, field)
            if rows is not None:
                return rows
        got = "a value that is no tensor" if isinstance(leaf, Specification) else str(_describe_leaf(key, leaf, False))
        raise SchemaError(f"{entry_of(key)}this data set has {field}, got {got}")

    def _refuse_keys(self, leaves: Mapping[Path, Any]) -> None:
        missing = [joined(key) for key in self.fields if key not in leaves]
        unknown = [joined(key) for key in leaves if key not in self.fields]
        told = [f"it lacks {missing}"] if missing else []
        told += [f"it has {unknown}, which the data set has not"] if unknown else []
        raise SchemaError("the keys are not those of this data set: " + " and ".join(told))

    def _check_kinds(self, found: Specification) -> None:
        for key, (kind, size) in _kinds(found, ()):
            expected = self._kinds.get(key)
            if expected is None:
                raise SchemaError(f"{entry_of(key)}this data set has no container here, got a {kind}")
            if kind != expected[0]:
                raise SchemaError(f"{entry_of(key)}this data set has a {expected[0]}, got a {kind}")
            if size != expected[1]:
                raise SchemaError(
                    f"{entry_of(key)}this data set has rows of batch size {list(expected[1])}, got {list(size)}"
                )

    def refuse_other(self, other: Schema, where: str, *, ignores_added: bool = False) -> None:
        """Raise a `SchemaError` unless another schema is the same; `where` names its owner.

        With `ignores_added`, one of them may lack added entries of the other.
        """
        if (other._kinds, other.fields) == (self._kinds, self.fields):
            return
        if ignores_added and (
            only := (self.added_keys | other.added_keys) & (self.fields.keys() ^ other.fields.keys())
        ):
            self.without(only).refuse_other(other.without(only), where)
            return
        if lacking := self.added_keys - other.fields.keys():
            name = joined(min(lacking))
            raise SchemaError(f"{where} lacks the entry {name!r}, which add_column({name!r}, fn) would add to its rows")
        for key, field in self.fields.items():
            theirs = other.fields.get(key)
            if theirs is not None and (theirs.dtype, theirs.shape) != (field.dtype, field.shape):
                raise SchemaError(f"{entry_of(key)}this data set has {field}, and {where} has {theirs}")
        try:
            if other.fields.keys() != self.fields.keys():
                self._refuse_keys(other.fields)
            self._check_kinds(other.skeleton)
        except SchemaError as error:
            raise SchemaError(f"{where}: {error}") from None
        raise SchemaError(f"{where} has other containers than this data set")

    # --- containers ---------------------------------------------------------------------------------------------------

    def container(self, leaves: Mapping[Path, Any], count: int) -> Any:
        """Build a container of `count` rows over unchecked leaves: tensors, and lists of values."""
        return to_container(self.specification(leaves, count))

    def specification(self, leaves: Mapping[Path, Any], count: int) -> Specification:
        """Build the specification of `count` rows over leaves: tensors, and lists of values."""
        return _fill(self.skeleton, (), leaves, count)

    @cached_property
    def template(self) -> Any:
        """A container without rows."""
        return self.sample(0)

    def sample(self, count: int) -> Any:
        """Build a container of `count` empty rows: zeros, ragged rows without elements, and `None` for values."""
        return to_container(self.describe_sample(count))

    def describe_sample(self, count: int) -> Specification:
        """Build the specification of `sample(count)`."""
        leaves: dict[Path, Any] = {}
        for key, field in self.fields.items():
            if field.dtype is None:
                leaves[key] = [None] * count
            elif key in self.dense:
                leaves[key] = torch.zeros((count, *field.shape), dtype=field.dtype)
            else:
                sizes = torch.tensor([max(size, 0) for size in field.shape]).expand(count, -1)
                leaves[key] = join_ragged_rows(field, [FlatRows(torch.empty(0, dtype=field.dtype), sizes)])
        return self.specification(leaves, count)


def join_ragged_rows(field: Field, parts: list[FlatRows]) -> Any:
    """Build the ragged tensor of the rows of all parts."""
    flat, sizes = torch.cat([part.flat for part in parts]), torch.cat([part.sizes for part in parts])
    return join_ragged(flat, sizes, field.shape if field.jagged else None, False, ragged.SharedOffsets())


# --- walking ----------------------------------------------------------------------------------------------------------


def _describe_container(container: Any, key: Path, leaves: dict[Path, Any]) -> Specification:
    """Return the specification of a container without its leaves, and add the leaves to `leaves`.

    Leaves are tensors, and specifications of values.
    """
    form = specification_of(container, key, unread=True)
    if form.kind == LAZY:
        return _describe_container(densify_rows(container, key), key, leaves)
    if form.kind != DICT:
        if form.is_tensorclass:
            inner = _describe_container(form.entries[WRAPPED], key, leaves)
            return replace(form, device=None, entries={WRAPPED: inner})
        what = "an UnbatchedTensor" if form.kind == UNBATCHED else f"a {form.kind}"
        raise UnsupportedEntryError(f"{entry_of(key)}{what} has no rows, which is what a data set is made of")
    entries: dict[str, Any] = {}
    for name, entry in form.entries.items():
        path = (*key, name)
        if isinstance(entry, Tensor) and not hasattr(entry, "_wrapped_container"):
            # Do not keep the leaf itself: the schema outlives the first batch.
            leaves[path], entries[name] = entry, None
            continue
        inner = specification_of(entry, path)
        if inner.is_value:
            leaves[path], entries[name] = inner, replace(inner, value=None)
        else:
            entries[name] = _describe_container(entry, path, leaves)
    return replace(form, device=None, entries=entries)


def _to_json(node: Specification, key: Path, fields: Mapping[Path, Field]) -> dict[str, Any]:
    if node.kind != DICT:
        return {**_to_json(node.entries[WRAPPED], key, fields), "class": node.kind}
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        path = (*key, name)
        if entry is None:
            field = fields[path]
            entries[name] = {"dtype": str(field.dtype), "shape": list(field.shape), "jagged": field.jagged}
        else:
            entries[name] = node_to_json(entry) if entry.is_value else _to_json(entry, path, fields)
        if path in fields and fields[path].added:
            entries[name][_ADDED] = True
    return {**node_to_json(node), "batch_size": [0, *node.batch_size[1:]], "entries": entries}


def _from_json(spec: Any, key: Path, fields: dict[Path, Field]) -> Specification:
    check_level(key)
    node, tensorclass = node_from_json(spec, key)
    given = spec.get("entries")
    if node.is_value:
        fields[key] = Field(None, (), added=spec.get(_ADDED) is True)
        return node
    if node.kind != DICT or not node.batch_size or type(given) is not dict:
        raise structure_error(key, f"it is no batch of rows, but {spec!r:.80}")
    entries: dict[str, Any] = {}
    for name, item in given.items():
        path = (*key, name)
        if type(item) is dict and "kind" not in item:
            entries[name], fields[path] = None, _field_from_json(item, path)
        else:
            entries[name] = _from_json(item, path, fields)
    node.entries = entries
    return node if tensorclass is None else tensorclass_over(tensorclass, node)


def _field_from_json(item: dict[str, Any], key: Path) -> Field:
    dtype = item.get("dtype")
    if type(dtype) is not str or dtype not in DTYPES:
        raise structure_error(key, f"its dtype is {dtype!r:.80}")
    try:
        return Field(
            DTYPES[dtype],
            checks.ints(item.get("shape"), "its shape", -1),
            item.get("jagged") is True,
            item.get(_ADDED) is True,
        )
    except ValueError as error:
        raise structure_error(key, str(error)) from None


def _kinds(node: Specification, key: Path) -> Any:
    """Yield key, class and batch size of a row for every container, except the inner containers of tensorclasses."""
    yield key, (node.kind, node.batch_size[1:])
    if node.kind != DICT:
        node = node.entries[WRAPPED]
    for name, entry in node.entries.items():
        if isinstance(entry, Specification) and not entry.is_value:
            yield from _kinds(entry, (*key, name))


def _fill(node: Specification, key: Path, leaves: Mapping[Path, Any], count: int) -> Specification:
    size = torch.Size((count, *node.batch_size[1:]))
    if node.kind != DICT:
        return replace(node, batch_size=size, entries={WRAPPED: _fill(node.entries[WRAPPED], key, leaves, count)})
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        path = (*key, name)
        if isinstance(entry, Specification) and not entry.is_value:
            entries[name] = _fill(entry, path, leaves, count)
        elif isinstance(entry, Specification):
            inner = torch.Size((count, *entry.batch_size[1:]))
            entries[name] = Specification(VALUE_STACK, inner, stack_dim=0, value=leaves[path])
        else:
            entries[name] = leaves[path]
    return replace(node, batch_size=size, entries=entries)


# --- leaves -----------------------------------------------------------------------------------------------------------


def _describe_leaf(key: Path, leaf: Any, may_differ: bool) -> Field:
    if isinstance(leaf, Specification):
        return Field(None, ())
    shape = tuple(leaf.shape) if not leaf.is_nested else ()
    if leaf.is_nested:
        form = ragged.row_form(leaf)
        return Field(leaf.dtype, form or (-1,) * (leaf.dim() - 1), form is not None)
    check_storable(leaf, key)
    if may_differ:
        if len(shape) < 2:
            raise SchemaError(f"{entry_of(key)}its rows are numbers, which cannot be ragged")
        return Field(leaf.dtype, (-1, *shape[2:]), True)
    return Field(leaf.dtype, shape[1:])


def _as_ragged_rows(leaf: Tensor, field: Field) -> FlatRows | None:
    """Copy the rows of a leaf as ragged rows; `None` if they do not fit."""
    if leaf.dim() != len(field.shape) + 1:
        return None
    if leaf.is_nested:
        flat, sizes, _ = split_ragged(leaf)
        sizes = sizes.cpu()
    else:
        flat, sizes = leaf.reshape(-1), torch.tensor(leaf.shape[1:]).expand(leaf.shape[0], -1)
    form = field.shape if field.jagged else None
    try:
        count_elements(sizes, form)
    except ValueError:
        return None
    return FlatRows(flat.detach().to("cpu", copy=True).as_subclass(Tensor), sizes.clone())


def _list_values(key: Path, form: Specification, count: int) -> list[Any]:
    """Return one value for each row, after checking that JSON can hold all of them."""
    encode_entry(form.value, key, ": a data set keeps values as JSON")
    if form.kind in VALUES:
        value = form.value
        for size in reversed(form.batch_size[1:]):
            value = [value] * size
        return [value] * count
    return list(form.value)
