"""Lazy stacks on a Redis server; the layout is in `redis_wire.py`.

The elements of a leaf lie one behind the other in one value on the server. To containers, each element of the stack is
a group of its own, whose arrays are parts of these values. What elements are given in one scope is gathered, and
written leaf by leaf at its end: a leaf that all elements are given as a whole, else the parts of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.stores.array_store import SIZE, ArrayItem, Item, Other, Pick
from tensordict.io.stores.redis import Scope, Server
from tensordict.io.stores.redis_items import Meta, WireArray, WireGroup, addresses, bytes_of, noted_in
from tensordict.io.stores.redis_wire import LIMIT, Address, Request
from tensordict.memory.stored_tensors import Selection, Values

# What is noted of a nested container, or of the stack itself, whose elements have unequal batch sizes.
_SIZES = "_sizes"


class StackServer(Server):
    """A lazy stack on a server.

    Attributes:
        count: the number of elements.
        dim: the dim that runs over them.
        is_new: whether the server had no such container.
    """

    a_kind = "a lazy stack on a Redis server"
    size_name = "__inner_batch_size__"
    # An index may take an element several times.
    gives_once = False

    def __init__(self, address: Address, new: tuple[int, int, Sequence[int]] | None = None) -> None:
        """Over the stack that is there; else over a new one, of this count, stack dim and batch size of elements."""
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
            if self.count < 0 or not 0 <= self.dim <= len(self.inner_size):
                raise ValueError(f"{self.count} elements along dim {dim} are no lazy stack")
            if self.count > 1 << 32:
                raise ValueError(f"{self.count} elements are more than a lazy stack has")

    @property
    def inner_size(self) -> tuple[int, ...]:
        """The batch size of the elements, of the first where they differ."""
        with self.errors(()):
            return checks.sizes(parse_json(self.header.get("__inner_batch_size__", b"[]")), "its batch size")

    def element(self, at: int | None, place: str = "", key: Path = ()) -> ElementGroup:
        """The group of an element of the stack, or of the container nested at a place; `None` stands for all."""
        return ElementGroup(self, key, place, next(addresses), at)

    def noted_of(self, place: str, at: int) -> dict[str, Any]:
        """What is noted of an element of what is at a place."""
        scope = self.scope
        if scope is not None and at in (given := scope.noted.get(place, {})):
            return given[at]
        notes = dict(self.noted(place))
        sizes = notes.pop(_SIZES, None)
        if sizes is not None:
            if type(sizes) is not list or len(sizes) != self.count:
                raise ValueError(f"its batch sizes {sizes!r:.80} are not those of {self.count} elements")
            notes[SIZE] = list(checks.sizes(sizes[at], "its batch size"))
        return notes

    def known(self, path: str) -> Meta | None:
        meta = super().known(path)
        if meta is not None and not meta.is_value:
            with self.errors(self.key_of(path)):
                shape, shapes = meta.parsed().shape, meta.shapes
            if not shape or shape[0] != self.count or (shapes is not None and len(shapes) != self.count):
                raise SaveError(
                    f"entry {joined(self.key_of(path))!r} of the {self.kind} {self.name!r} has the shape "
                    f"{meta.shape_text!r:.80}, which is not that of {self.count} elements"
                )
        return meta

    def column(self, path: str, key: Path) -> ArrayItem | None:
        """All elements of a leaf as one array, the dim of the elements first; `None` where their shapes differ."""
        meta = self.known(path)
        if meta is None or meta.is_value or meta.shapes is not None:
            return None
        return WireArray(self, key, path, meta)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _requests(self, items: Iterable[Item], pick: Pick) -> Iterator[Request]:
        """The requests for all that elements have, each once; those who come to a broken leaf tell."""
        groups = [item for item in items if isinstance(item, ElementGroup)] if pick((1,)) is not None else []
        for path in sorted({path for group in groups for path in self.below(group.place)}):
            with contextlib.suppress(SaveError, KeyError):
                meta = self.known(path)
                if meta is None or meta.is_value:
                    continue
                whole = _whole(path, meta)
                numbers = sorted({group.at for group in groups if group.at is not None})
                if any(group.at is None for group in groups):
                    if whole.nbytes <= LIMIT:
                        yield whole
                        continue
                    numbers = list(range(self.count))
                for number in numbers:
                    yield from ElementArray(self, (), path, meta, number).requests(())[1]

    def read_ahead(self, groups: Sequence[ElementGroup]) -> None:
        """Read what elements have, all of it, in as few requests as can be; to be called in a scope."""
        if self.scope is not None and not self.scope.commands:
            self._read_ahead(self.scope, groups, lambda shape: ())

    def fetch(self, request: Request, key: Path) -> Any:
        scope, meta = self.scope, self._metas.get(request.path)
        if scope is not None and meta is not None and meta.shape is not None and len(request.offsets) == 8:
            whole = _whole(request.path, meta)
            if whole != request and not scope.writes(request):
                if whole in scope.wanted:
                    self._read_portion(scope, whole, key)
                if (answer := scope.ready.get(whole)) is not None:
                    start = int.from_bytes(request.offsets, "little")
                    return memoryview(answer)[start : start + request.run]
        return super().fetch(request, key)

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> Iterator[None]:
        if self.is_together or not self.is_open:
            yield
            return
        # A thread that writes goes by what is known till all is sent: others learn nothing else meanwhile.
        with self._knowing.held if pick is None else contextlib.nullcontext(), super().together(items, pick):
            yield
            scope = self.scope
            assert scope is not None
            self._settle(scope)

    def begin(self, device: torch.device | None) -> None:
        """Have the server say what the stack is; to be called in a scope."""
        scope = self.scope
        assert scope is not None
        self.set_header("__device__", b"" if device is None else str(device).encode())
        for name, value in self.header.items():
            scope.command("SET", self.wire.base + name, value)

    def give(self, path: str, at: int, item: Item | None) -> None:
        """Have an element have an item at a path, or nothing; to be called in a scope."""
        scope = self.scope
        assert scope is not None
        for other in {*self._metas, *self._notes, *scope.given}:
            # What takes the place of a container takes away what was in it.
            if other.startswith(path + "."):
                scope.given.setdefault(other, {})[at] = None
        scope.given.setdefault(path, {})[at] = item
        if isinstance(item, ElementGroup):
            item._place, item.at = path, at
            scope.noted.setdefault(path, {})[at] = item._noted
            for name, inner in item._made.items():
                self.give(item._below(name), at, inner)
            item._made = {}

    def _settle(self, scope: Scope) -> None:
        """Turn what was given into what is sent: containers before what is in them."""
        if any(len(given) < self.count and path not in self._metas for path, given in scope.given.items()):
            # Another process may have made it since.
            self.sync()
        for path, given in sorted(scope.given.items(), key=lambda item: item[0].count(".")):
            self._put(path, given)
        for place, noted in scope.noted.items():
            self._put_notes(place, noted)
        scope.given, scope.noted = {}, {}

    def _refuse(self, path: str, why: str) -> UnsupportedEntryError:
        entry = f"entry {joined(self.key_of(path))!r} " if path else "it "
        return UnsupportedEntryError(
            f"{entry}{why}; {self.a_kind} has an entry in all elements, as tensors of one dtype or as containers. "
            "Nothing was written. An archive or a folder (memmap) holds any lazy stack"
        )

    def _put(self, path: str, given: dict[int, Any]) -> None:
        """Put what elements were given, or lose, at a path in the place of what they have there."""
        items = {at: item for at, item in given.items() if item is not None}
        kinds = {_kind(item) for item in items.values()}
        if "a value" in kinds:
            raise self._refuse(path, "is a value that is no tensor")
        meta = self._metas.get(path)
        if len(given) == self.count and len(items) in (0, self.count):
            if len(kinds) > 1:
                raise self._refuse(path, f"would be {' and '.join(sorted(kinds))} in different elements")
            order = self.order(path)
            if meta is not None or path in self._notes:
                self.drop(path)
            if kinds == {"a tensor"}:
                self._put_arrays(path, [items[at] for at in range(self.count)], order)
            elif items:
                self.note(path, {"_order": order})
            return
        kind = "a container" if self.is_node(path) else "a tensor" if meta is not None else "nothing"
        if len(items) < len(given) or kinds != {kind}:
            raise self._refuse(
                path, f"is {kind} in other elements, and {' or '.join(sorted(kinds) or ['nothing'])} in these"
            )
        if meta is not None:
            self._put_parts(path, meta.parsed(), items)

    # --- containers ---

    def _put_notes(self, place: str, given: dict[int, dict[str, Any]]) -> None:
        """Note what is noted of elements of a container: one for all, but for batch sizes."""
        if place and place not in self._notes:
            return
        each = [given[at] if at in given else self.noted_of(place, at) for at in range(self.count)]
        sizes = [list(noted.get(SIZE) or ()) for noted in each]
        notes = {**each[0], "_order": self.order(place) if place else None}
        for name in {name for noted in each for name in noted} - {SIZE, "_order"}:
            if any(noted.get(name) != notes.get(name) for noted in each):
                raise self._refuse(place, f"has another {name.strip('_')} in different elements")
        notes[_SIZES] = None if all(size == sizes[0] for size in sizes) else sizes
        if notes != self.noted(place):
            self.note(place, notes)

    # --- tensors ---

    def _put_arrays(self, path: str, items: Sequence[Any], order: int | None) -> None:
        dtypes = sorted({str(item.dtype) for item in items})
        if len(dtypes) > 1:
            raise self._refuse(path, f"has the dtypes {', '.join(dtypes)}")
        fields = {**_shape_fields([tuple(item.shape) for item in items]), "dtype": dtypes[0]}
        data: Values = np.concatenate([np.asarray(bytes_of(np.ascontiguousarray(item.content))) for item in items])
        self.add(path, fields, bytes_of(data), order)
        self._note_starts(path)

    def _note_starts(self, path: str) -> None:
        """Have the server say where the elements of a leaf begin."""
        assert self.scope is not None
        meta = self._metas[path].parsed()
        name = self.wire.data(path) + ":idx"
        if meta.shapes is None:
            self.scope.command("DEL", name)
        else:
            self.scope.command("SET", name, np.array(meta.starts, "<i8").tobytes())

    def _put_parts(self, path: str, meta: Meta, items: dict[int, Any]) -> None:
        """Write some elements of a leaf; those of another shape take the place of the old bytes."""
        scope = self.scope
        assert scope is not None
        shapes = [meta.shape_at(at) for at in range(self.count)]
        moved: list[tuple[int, int, Any]] = []
        for at, item in items.items():
            if item.dtype is not meta.dtype:
                raise self._refuse(path, f"has the dtype {meta.dtype} in other elements, and {item.dtype} was given")
            if shapes[at] == tuple(item.shape):
                ElementArray(self, item.key, path, meta, at).write((...,), item.content)
            else:
                moved.append((*meta.part(at), bytes_of(np.ascontiguousarray(item.content))))
                shapes[at] = tuple(item.shape)
        if not moved:
            return
        key, name = self.wire.data(path), self.wire.meta(path)
        scope.check(path, self.key_of(path), (name, key, meta.shape_text, meta.dtype_text, meta.nbytes))
        # The check fails when this is sent a second time.
        scope.once = True
        # From behind, so that what is moved was written to already; of two at one place, both empty but one, either.
        for start, stop, piece in sorted(moved, key=lambda part: part[:2], reverse=True):
            scope.command("SPLICE", key, start, stop, piece)
            scope.size += len(piece)
        fields = _shape_fields(shapes)
        scope.command("HDEL", name, "shapes")
        scope.command("HSET", name, *itertools.chain.from_iterable(fields.items()))
        old = {field: value for field, value in meta.fields.items() if field != b"shapes"}
        self._metas[path] = Meta({**old, **{field.encode(): value.encode() for field, value in fields.items()}})
        self._note_starts(path)


def _whole(path: str, meta: Meta) -> Request:
    """The request for all elements of a leaf."""
    return Request(path, meta.shape_text, meta.dtype_text, meta.nbytes, bytes(8))


def _shape_fields(shapes: Sequence[Sequence[int]]) -> dict[str, str]:
    """What the hash of a leaf says of the shapes of its elements."""
    first = shapes[0]
    fields = {"shape": json.dumps([len(shapes), *first])}
    if all(shape == first for shape in shapes):
        return {**fields, "homogeneous": "1"}
    return {**fields, "homogeneous": "0", "shapes": json.dumps(list(map(list, shapes)))}


def _kind(item: Item) -> str:
    return "a container" if isinstance(item, ElementGroup) else "a tensor" if isinstance(item, ArrayItem) else "a value"


# --- what is in a group -----------------------------------------------------------------------------------------------


class ElementArray(WireArray):
    """An element of a leaf."""

    def __init__(self, store: StackServer, key: Path, place: str, meta: Meta, at: int) -> None:
        super().__init__(store, key, place, meta)
        # The byte that it begins at.
        self.start, _ = meta.part(at)
        self.shape = torch.Size(meta.shape_at(at))

    def pieces(self, selection: Selection) -> tuple[tuple[int, ...], int, bytes]:
        shape, run, offsets = super().pieces(selection)
        return shape, run, (np.frombuffer(offsets, "<u8") + np.uint64(self.start)).tobytes()


class ElementGroup(WireGroup):
    """An element of the stack, or of a container that is nested in it; without a number, all of them."""

    store: StackServer

    def __init__(self, store: StackServer, key: Path, place: str | None, address: int, at: int | None) -> None:
        super().__init__(store, key, place, address)
        self.at = at

    @property
    def number(self) -> int:
        """The number of the element; of all, that of the first, which tells what the others have."""
        return self.at or 0

    def attribute(self, name: str) -> Any:
        return noted_in(self._noted if self._place is None else self.store.noted_of(self.place, self.number), name)

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        store = self.store
        if self._place is None:
            self._noted[name] = value
        elif (notes := store.noted_of(self.place, self.number)).get(name) != value:
            with store.together():
                assert store.scope is not None
                store.scope.noted.setdefault(self.place, {})[self.number] = {**notes, name: value}

    def find(self, name: str, known: Item | None = None) -> Item:
        scope, place = self.store.scope, self._below(name)
        given = {} if scope is None else scope.given.get(place, {})
        if self.at not in given:
            return super().find(name, known)
        item: Item | None = given[self.at]
        if item is None:
            raise KeyError(name)
        return item

    def _group_at(self, place: str, key: Path) -> ElementGroup:
        return self.store.element(self.at, place, key)

    def _leaf_at(self, place: str, key: Path, meta: Meta) -> Item:
        if meta.is_value:
            return Other(self.store, key, -1, "a value, which a lazy stack on a server does not have")
        return ElementArray(self.store, key, place, meta, self.number)

    def _parts(self) -> list[str]:
        store, start = self.store, f"{self.place}." if self.place else ""
        parts = dict.fromkeys(store.children(self.place), True)
        for path, column in ({} if store.scope is None else store.scope.given).items():
            if path.startswith(start) and "." not in path[len(start) :] and self.at in column:
                parts[path[len(start) :]] = column[self.at] is not None
        return [part for part, is_there in parts.items() if is_there]

    def new_group(self, key: Path) -> ElementGroup:
        return ElementGroup(self.store, key, None, -1, None)

    def put(self, name: str, item: Item) -> None:
        if self._place is None:
            self._made[name] = item
            return
        self.store.check_writable()
        with self.store.together():
            self.store.give(self._below(name), self.number, item)

    def delete(self, name: str) -> None:
        self.store.check_writable()
        with self.store.together():
            self.store.give(self._below(name), self.number, None)
