"""Lazy stacks on Redis servers, for `LazyStackedTensorDictStore`; `redis_wire.py` describes the layout.

A leaf of all elements is a *column*: one value on the server that concatenates their tensors. Each element of the stack
is a group, whose arrays are ranges of columns. Writes of a block are collected and sent leaf by leaf at its end: as a
new column if all elements are written, else as ranges of the old one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.stores.array_store import SIZE, ArrayItem, Item, Pick, Text, UnreadableItem
from tensordict.io.stores.redis import Scope, Server
from tensordict.io.stores.redis_items import Meta, WireArray, WireGroup, addresses, bytes_of
from tensordict.io.stores.redis_wire import Address, Request
from tensordict.memory.stored_tensors import Selection, Values

# Attribute of a container whose elements have unequal batch sizes: all of them.
_SIZES = "_batch_sizes"


class StackServer(Server):
    """An open lazy stack on a server.

    Attributes:
        count: the number of elements.
        dim: the stack dim.
        is_new: True if the server did not have the container.
    """

    a_kind = "a lazy stack on a Redis server"
    size_name = "__inner_batch_size__"
    # An index may select an element several times.
    gives_once = False

    def __init__(self, address: Address, new: tuple[int, int, Sequence[int]] | None = None) -> None:
        """Open a stack, or describe a new one by its count, stack dim and the batch size of its elements."""
        super().__init__(address)
        self.is_new = not self.exists
        if self.is_new and new is not None:
            count, self.dim, size = new
            self.count = count
            for name, value in (("count", count), ("stack_dim", self.dim), ("inner_batch_size", list(size))):
                self.header[f"__{name}__"] = json.dumps(value).encode()
            self.header["__type__"] = b"lazy_stack"
            return
        if self.is_new:
            raise address.missing()
        if not self.is_stack:
            raise SaveError(f"the container {self.name!r} is no lazy stack; TensorDictStore.from_store opens it")
        with self.errors(()):
            self.count, dim = (int(self.header.get(name, b"")) for name in ("__count__", "__stack_dim__"))
            self.dim = dim + len(self.inner_size) + 1 if dim < 0 else dim
            if not 0 <= self.count <= 1 << 32 or not 0 <= self.dim <= len(self.inner_size):
                raise ValueError(f"{self.count} elements along dim {dim} are no lazy stack")

    @property
    def inner_size(self) -> tuple[int, ...]:
        """The batch size of the elements; of the first one if they differ."""
        with self.errors(()):
            return checks.sizes(parse_json(self.header.get("__inner_batch_size__", b"[]")), "its batch size")

    def element(self, at: int | None, place: str = "", key: Path = ()) -> ElementGroup:
        """Return the group of an element, or of a container nested in it; `None` stands for all elements."""
        return ElementGroup(self, key, place, next(addresses), at)

    def attributes_of(self, place: str, at: int) -> dict[str, Any]:
        """Return the attributes of a container in an element."""
        scope = self.scope
        if scope is not None and at in (given := scope.noted.get(place, {})):
            return given[at]
        notes = {**self.attributes_at(place)}
        sizes = notes.pop(_SIZES, None)
        if sizes is not None:
            if type(sizes) is not list or len(sizes) != self.count:
                raise ValueError(f"its batch sizes {sizes!r:.80} are not those of {self.count} elements")
            notes[SIZE] = sizes[at]
        return notes

    def find_leaf(self, path: str) -> Meta | None:
        meta = super().find_leaf(path)
        if meta is not None and not meta.is_value:
            with self.errors(self.key_of(path)):
                shape, shapes = meta.parse().shape, meta.shapes
            if not shape or shape[0] != self.count or (shapes is not None and len(shapes) != self.count):
                raise SaveError(
                    f"entry {joined(self.key_of(path))!r} of the {self.kind} {self.name!r} has the shape "
                    f"{meta.shape_text!r:.80}, which is not that of {self.count} elements"
                )
        return meta

    def column(self, path: str, key: Path) -> ArrayItem | None:
        """Return a column as one array, with the stack dim first; `None` for a container or if shapes differ."""
        meta = self.find_leaf(path)
        if meta is None or meta.is_value or meta.shapes is not None:
            return None
        return WireArray(self, key, path, meta)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _requests(self, items: Iterable[Item], pick: Pick) -> Iterator[Request]:
        """Yield the requests for all entries of elements, each once. Broken leaves are skipped here."""
        groups = [item for item in items if isinstance(item, ElementGroup)] if pick((1,)) is not None else []
        is_all = any(group.at is None for group in groups)
        numbers = range(self.count) if is_all else sorted({group.number for group in groups})
        for path in sorted({path for group in groups for path in self.below(group.place)}):
            with contextlib.suppress(SaveError, KeyError):
                meta = self.find_leaf(path)
                if meta is not None and not meta.is_value:
                    for at in numbers:
                        yield from ElementArray(self, (), path, meta, at).requests((...,))[1]

    def prefetch(self, groups: Sequence[ElementGroup]) -> None:
        """Read all entries of elements in as few requests as possible; only inside of a block."""
        if self.scope is not None and not self.scope.commands:
            self._prefetch(self.scope, groups, lambda shape: ())

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> Iterator[Any]:
        # A writing thread relies on the caches until its block is sent, so other threads must not refresh them.
        with self._knowing.held if pick is None else contextlib.nullcontext(), super().together(items, pick) as scope:
            yield scope

    def assign(self, scope: Scope, path: str, at: int, item: Item | None) -> None:
        """Assign an item to a path of an element; `None` deletes the entry."""
        if self.is_node(path) or path in scope.noted:
            # Replacing a container deletes its entries.
            for other in [*self._metas, *self._notes, *scope.given]:
                if other.startswith(path + "."):
                    scope.given.setdefault(other, {})[at] = None
        scope.given.setdefault(path, {})[at] = item
        if isinstance(item, ElementGroup):
            item._place, item.at, item.number = path, at, at
            scope.noted.setdefault(path, {})[at] = item._noted
            for name, inner in item._made.items():
                self.assign(scope, item._below(name), at, inner)
            item._made = {}

    def _settle(self, scope: Scope) -> None:
        """Convert the collected writes into commands, containers before their entries."""
        if any(len(given) < self.count and path not in self._metas for path, given in scope.given.items()):
            # Another process may have created the entry meanwhile.
            self.sync()
        for path, given in sorted(scope.given.items(), key=lambda item: item[0].count(".")):
            self._write_entry(scope, path, given)
        for place, noted in scope.noted.items():
            self._write_attributes(place, noted)
        scope.given, scope.noted = {}, {}

    def refuse(self, key: Path, why: str) -> UnsupportedEntryError:
        entry = f"entry {joined(key)!r}" if key else "it"
        return UnsupportedEntryError(
            f"{entry} {why}. A lazy stack on a Redis server has each entry in all elements, as tensors of one dtype or "
            "as containers; nothing was written. td.to_tensordict().to_store(...) stores values, if all elements have "
            "the same entries and shapes. A folder, an archive (memmap) and a data set store any lazy stack, and what "
            "td.densify() makes of it"
        )

    def _write_entry(self, scope: Scope, path: str, given: dict[int, Any]) -> None:
        """Write the items that elements were given at a path, or delete their entries."""
        items = {at: item for at, item in given.items() if item is not None}
        kinds = {_kind(item) for item in given.values()}
        meta = self._metas.get(path)
        if len(given) < self.count:
            kinds.add("a tensor" if meta is not None else "a container" if self.is_node(path) else "missing")
        if len(kinds) > 1:
            raise self.refuse(self.key_of(path), f"would be {' and '.join(sorted(kinds))} in different elements")
        if len(given) < self.count:
            if meta is not None:
                self._write_elements(scope, path, meta.parse(), items)
            return
        order = self.order(path)
        if meta is not None or self.is_node(path):
            self.drop(path)
        if kinds == {"a tensor"}:
            self._write_column(scope, path, [items[at] for at in range(self.count)], order)
        elif items:
            self.note(path, {"_order": order})

    # --- containers ---

    def _write_attributes(self, place: str, given: dict[int, dict[str, Any]]) -> None:
        """Write the attributes of a container. Its elements may differ in their batch sizes only."""
        if place and place not in self._notes:
            return
        each = [given[at] if at in given else self.attributes_of(place, at) for at in range(self.count)]
        sizes = [list(noted.get(SIZE) or ()) for noted in each]
        notes = {**each[0], "_order": self.order(place) if place else None}
        for name in {name for noted in each for name in noted} - {SIZE, "_order"}:
            if any(noted.get(name) != notes.get(name) for noted in each):
                raise self.refuse(self.key_of(place), f"differs between elements in the attribute {name.strip('_')}")
        notes[_SIZES] = None if all(size == sizes[0] for size in sizes) else sizes
        if notes != self.attributes_at(place):
            self.note(place, notes)

    # --- tensors ---

    def _write_column(self, scope: Scope, path: str, items: Sequence[Any], order: int | None) -> None:
        dtypes = sorted({str(item.dtype) for item in items})
        if len(dtypes) > 1:
            raise self.refuse(self.key_of(path), f"has the dtypes {', '.join(dtypes)}")
        fields = {**_shape_fields([tuple(item.shape) for item in items]), "dtype": dtypes[0]}
        data: Values = np.concatenate([np.asarray(bytes_of(np.ascontiguousarray(item.content))) for item in items])
        self.add(path, fields, bytes_of(data), order)
        self._note_starts(scope, path)

    def _note_starts(self, scope: Scope, path: str) -> None:
        """Write the offsets of the elements of a column."""
        meta, name = self._metas[path].parse(), self.wire.data(path) + ":idx"
        starts = np.array(meta.starts, "<i8").tobytes()
        scope.commands.append(("DEL", name) if meta.shapes is None else ("SET", name, starts))

    def _write_elements(self, scope: Scope, path: str, meta: Meta, items: dict[int, Any]) -> None:
        """Write some elements of a column. Elements of another shape replace the old range of bytes."""
        old = [meta.shape_at(at) for at in range(self.count)]
        shapes, key, name = old.copy(), self.wire.data(path), self.wire.meta(path)
        scope.check(path, self.key_of(path), (name, key, meta.shape_text, meta.dtype_text, meta.nbytes))
        # From the end, so that the offsets of the remaining elements stay valid.
        for at, item in sorted(items.items(), reverse=True):
            if item.dtype is not meta.dtype:
                why = f"has the dtype {meta.dtype} in other elements, and {item.dtype} was given"
                raise self.refuse(self.key_of(path), why)
            shapes[at] = tuple(item.shape)
            if shapes[at] == old[at]:
                ElementArray(self, item.key, path, meta, at).write((...,), item.content)
            else:
                scope.command("SPLICE", key, *meta.part(at), bytes_of(np.ascontiguousarray(item.content)))
        if shapes == old:
            return
        scope.touch(path)
        # A splice is not idempotent: a repeated request is recognized by its token.
        scope.token = scope.token or uuid.uuid4().hex
        fields = {**_shape_fields(shapes), "_write": scope.token}
        scope.command("HDEL", name, "shapes")
        scope.command("HSET", name, *itertools.chain.from_iterable(fields.items()))
        kept = {field.decode(): value.decode() for field, value in meta.fields.items() if field != b"shapes"}
        self._metas[path] = Meta.of_texts({**kept, **fields})
        self._note_starts(scope, path)


def _shape_fields(shapes: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return the fields for the shapes of the elements in the hash of a column."""
    fields = {"shape": json.dumps([len(shapes), *shapes[0]])}
    if all(shape == shapes[0] for shape in shapes):
        return {**fields, "homogeneous": "1"}
    return {**fields, "homogeneous": "0", "shapes": json.dumps(shapes)}


def _kind(item: Item | None) -> str:
    return "missing" if item is None else "a container" if isinstance(item, ElementGroup) else "a tensor"


# --- items ------------------------------------------------------------------------------------------------------------


class ElementArray(WireArray):
    """The tensor of one element, a range of a column."""

    def __init__(self, store: StackServer, key: Path, place: str, meta: Meta, at: int) -> None:
        super().__init__(store, key, place, meta)
        # The byte that it begins at.
        self.start, _ = meta.part(at)
        self.shape = torch.Size(meta.shape_at(at))

    def pieces(self, selection: Selection) -> tuple[tuple[int, ...], int, bytes]:
        shape, run, offsets = super().pieces(selection)
        return shape, run, (np.frombuffer(offsets, "<u8") + np.uint64(self.start)).tobytes()


class ElementGroup(WireGroup):
    """A container in one element of the stack; without a number, in all elements."""

    store: StackServer

    def __init__(self, store: StackServer, key: Path, place: str | None, address: int, at: int | None) -> None:
        super().__init__(store, key, place, address)
        self.at = at
        # All elements have the entries and attributes of the first one.
        self.number = at or 0

    def _attributes(self) -> Mapping[str, Any]:
        return self._noted if self._place is None else self.store.attributes_of(self.place, self.number)

    def _note(self, notes: dict[str, Any]) -> None:
        with self.store.together() as scope:
            scope.noted.setdefault(self.place, {})[self.number] = notes

    def find(self, name: str, known: Item | None = None) -> Item:
        scope, place = self.store.scope, self._below(name)
        column = {} if scope is None else scope.given.get(place, {})
        if self.number not in column:
            return super().find(name, known)
        if column[self.number] is None:
            raise KeyError(name)
        return column[self.number]  # type: ignore[no-any-return]

    def _group_at(self, place: str, key: Path) -> ElementGroup:
        return self.store.element(self.at, place, key)

    def _leaf_at(self, place: str, key: Path, meta: Meta) -> Item:
        if meta.is_value:
            return UnreadableItem(self.store, key, -1, "a value, which a lazy stack on a server does not have")
        return ElementArray(self.store, key, place, meta, self.number)

    def _parts(self) -> list[str]:
        store, start = self.store, f"{self.place}." if self.place else ""
        parts = dict.fromkeys(store.children(self.place), True)
        for path, column in ({} if store.scope is None else store.scope.given).items():
            if path.startswith(start) and "." not in (part := path[len(start) :]) and self.number in column:
                parts[part] = column[self.number] is not None
        return [part for part, is_there in parts.items() if is_there]

    def new_group(self, key: Path) -> ElementGroup:
        return ElementGroup(self.store, key, None, -1, None)

    def new_text(self, key: Path, content: str) -> Text:
        raise self.store.refuse(key, "is a value that is no tensor")

    def _assign(self, scope: Scope, place: str, item: Item | None) -> None:
        self.store.assign(scope, place, self.number, item)
