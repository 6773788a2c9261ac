"""Lazy stacks on a Redis server; the layout is in `redis_wire.py`.

The elements of a leaf lie one behind the other in one value on the server. To containers, each element of the stack is
a group of its own, whose arrays are parts of these values. What elements are given in one scope is gathered, and
written leaf by leaf at its end: a leaf that all elements are given as a whole, else the parts of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.stores.array_store import ArrayItem, Item, Pick, UnreadableItem
from tensordict.io.stores.entries import CLASS
from tensordict.io.stores.redis import HIDDEN, Scope, Server
from tensordict.io.stores.redis_items import Meta, WireArray, WireGroup, addresses, bytes_of, decoded, noted_in
from tensordict.io.stores.redis_wire import LIMIT, Address, Request
from tensordict.memory.stored_tensors import Selection, Values

# What the paths of entries begin with that one element has for itself, before its number: no name is encoded so.
_OWN = "_%%"
# What is noted of a nested container that an element lacks and others have.
_ABSENT = "_absent"


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
        return {**self.noted(place), **self._notes.get(own_path(at, place), {})}

    @staticmethod
    def key_of(path: str) -> Path:
        return Server.key_of(shared_path(path)[1])

    def known(self, path: str) -> Meta | None:
        meta = super().known(path)
        if meta is not None and not meta.is_value and not path.startswith(_OWN):
            with self.errors(self.key_of(path)):
                shape, shapes = meta.parsed().shape, meta.shapes
            if not shape or shape[0] != self.count or (shapes is not None and len(shapes) != self.count):
                raise SaveError(
                    f"entry {joined(self.key_of(path))!r} of the {self.kind} {self.name!r} has the shape "
                    f"{meta.shape_text!r:.80}, which is not that of {self.count} elements"
                )
        return meta

    def has(self, path: str, at: int | None) -> bool:
        """Whether an element has what is at a path, or without a number all have it, as far as is known."""
        meta, shapes = self._metas.get(path), None
        if meta is not None and not meta.is_value:
            with contextlib.suppress(ValueError):
                shapes = meta.parsed().shapes
        if at is None:
            if meta is not None and (shapes is None or None not in shapes):
                return True
            if not any(part.startswith(_OWN) for part in self.tree.get("", ())):
                return meta is None and self.is_node(path)
            return all(self.has(path, number) for number in range(self.count))
        own = own_path(at, path)
        if own in self._metas:
            return True
        if own in self._notes:
            return _ABSENT not in self._notes[own]
        return (shapes is None or shapes[at : at + 1] != [None]) if meta is not None else self.is_node(path)

    def known_at(self, path: str, at: int | None) -> tuple[str, Meta | None]:
        """Where an element has what is at a path, and what is known of it if it is a leaf; else a `KeyError`."""
        own = own_path(at or 0, path)
        if own not in self._metas:
            with contextlib.suppress(KeyError):
                self.known(path)
        if not self.has(path, at):
            raise KeyError(decoded(path.rpartition(".")[2]))
        return (own, self._metas[own]) if own in self._metas else (path, self._metas.get(path))

    def column(self, path: str, key: Path) -> ArrayItem | None:
        """All elements of a leaf as one array, the dim of the elements first; `None` where it is not in one piece."""
        try:
            meta = self.known(path)
        except KeyError:  # not compiled: a server is asked
            if own_path(0, path) in self._metas or own_path(0, path) in self._notes:
                return None
            raise
        if meta is None or meta.is_value or meta.shapes is not None:
            return None
        return WireArray(self, key, path, meta)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _requests(self, items: Iterable[Item], pick: Pick) -> Iterator[Request]:
        """The requests for all that elements have, each once; those who come to a broken leaf tell."""
        groups = [item for item in items if isinstance(item, ElementGroup)] if pick((1,)) is not None else []
        numbers = sorted({group.at for group in groups if group.at is not None})
        if is_all := any(group.at is None for group in groups):
            numbers = list(range(self.count))
        wanted, places = set(numbers), {group.place for group in groups}
        for path in sorted(self._metas):
            owner, shared = shared_path(path)
            if (owner is not None and owner not in wanted) or not any(_is_below(shared, place) for place in places):
                continue
            with contextlib.suppress(SaveError, KeyError):
                meta = self.known(path)
                if meta is None or meta.is_value:
                    yield Request(path)
                elif owner is not None:
                    yield from WireArray(self, (), path, meta.parsed()).requests(())[1]
                elif is_all and (whole := _whole(path, meta)).nbytes <= LIMIT:
                    yield whole
                else:
                    for at in numbers:
                        if meta.shape_at(at) is not None:
                            yield from ElementArray(self, (), path, meta, at).requests(())[1]

    def read_ahead(self, groups: Sequence[ElementGroup]) -> None:
        """Read what elements have, all of it, in as few requests as can be; to be called in a scope."""
        if self.scope is not None and not self.scope.commands:
            self._read_ahead(self.scope, groups, lambda shape: ())

    def fetch(self, request: Request, key: Path) -> Any:
        scope, meta = self.scope, self._metas.get(request.path)
        if scope is not None and not request.run and request not in scope.ready:
            # Where the value of one element is asked for, those of others mostly are next.
            owns = (own_path(at, shared_path(request.path)[1]) for at in range(self.count))
            wanted = [own for own in owns if own in self._metas and self._metas[own].is_value]
            scope.wanted.update(dict.fromkeys(map(Request, wanted)))
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
        # What takes the place of a container takes away what was in it.
        below = [*self.under(path), *(shared_path(own)[1] for own in self.under(own_path(at, path)))]
        for other in [*below, *(other for other in scope.given if other.startswith(path + "."))]:
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
        entry = f"entry {joined(self.key_of(path))!r}" if path else "it"
        return UnsupportedEntryError(
            f"{entry} {why}; {self.a_kind} has an entry as tensors of one dtype in all elements that have it, or as "
            "containers of one class, or as values. Nothing was written"
        )

    def _put(self, path: str, given: dict[int, Any]) -> None:
        """Put what elements were given, or lose, at a path in the place of what they have there."""
        items = {at: item for at, item in given.items() if item is not None}
        kinds = {_kind(item) for item in items.values()}
        if len(kinds) > 1:
            raise self._refuse(path, f"would be {' and '.join(sorted(kinds))} in different elements")
        for own in [own for at in given if (own := own_path(at, path)) in self._metas or own in self._notes]:
            self.drop(own)
        if len(given) == self.count:
            order = self.order(path)
            if path in self._metas or self.is_node(path):
                self.drop(path)
            if len(items) == self.count and kinds == {"a tensor"}:
                self._put_arrays(path, [items[at] for at in range(self.count)], order)
                return
            if len(items) == self.count and kinds == {"a container"}:
                self.note(path, {"_order": order})
                return
        meta = self._metas.get(path)
        kind = "a tensor" if meta is not None else "a container" if self.is_node(path) else None
        if kind is not None and kinds - {kind}:
            raise self._refuse(path, f"is {kind} in other elements, and {kinds.pop()} was given")
        if meta is not None:
            self._put_parts(path, meta.parsed(), given)
            return
        for at, item in given.items():
            own = own_path(at, path)
            if item is None and kind is not None:
                self.set_notes(own, {_ABSENT: 1})
            elif item is not None and kind is None and isinstance(item, ElementGroup):
                self.note(own, item._noted)
            elif item is not None and kind is None:
                self.add(own, item.fields(), item.data())

    # --- containers ---

    def _put_notes(self, place: str, given: dict[int, dict[str, Any]]) -> None:
        """Note what is noted of elements of a container: of all what the first has, of others what differs."""
        known = self.noted(place)
        if len(given) == self.count and (not place or place in self._notes):
            names = [name for name in given[0] if all(name in noted for noted in given.values())]
            known = {**{name: given[0][name] for name in names}, "_order": known.get("_order")}
            if known != self.noted(place):
                self.note(place, known)
        for at, noted in given.items():
            own = own_path(at, place)
            names = [name for name in {*noted, *known} if noted.get(name) != known.get(name) and name != "_order"]
            if CLASS in names and known:
                raise self._refuse(place, "is of different classes in different elements")
            if names:
                self.set_notes(own, {**self._notes.get(own, {}), **{name: noted.get(name) for name in names}})

    # --- tensors ---

    def _put_arrays(self, path: str, items: Sequence[Any], order: int | None) -> None:
        dtypes = sorted({str(item.dtype) for item in items})
        if len(dtypes) > 1:
            raise self._refuse(path, f"has the dtypes {', '.join(dtypes)}")
        fields = {**_shape_fields([tuple(item.shape) for item in items]), "dtype": dtypes[0]}
        data: Values = np.concatenate([np.asarray(bytes_of(np.ascontiguousarray(item.content))) for item in items])
        self.add(path, fields, bytes_of(data), order)
        self._note_starts(path)

    def list_leaf(self, path: str) -> None:
        """Have the server list a leaf, hidden from the reference where not all elements have it."""
        assert self.scope is not None
        meta, base = self._metas[path], self.wire.base
        if path.startswith(_OWN) or None in (meta.parsed().shapes or ()):
            self._hidden[path] = {name.decode(): value.decode() for name, value in meta.fields.items()}
            self.scope.command("SREM", base + "__keys__", path)
            self.scope.command("HSET", base + "__groups__", path, json.dumps({HIDDEN: self._hidden[path]}))
            return
        if self._hidden.pop(path, None) is not None:
            self.scope.command("HDEL", base + "__groups__", path)
        super().list_leaf(path)

    def _note_starts(self, path: str) -> None:
        """Have the server say where the elements of a leaf begin."""
        assert self.scope is not None
        meta = self._metas[path].parsed()
        name = self.wire.data(path) + ":idx"
        if meta.shapes is None:
            self.scope.command("DEL", name)
        else:
            self.scope.command("SET", name, np.array(meta.starts, "<i8").tobytes())

    def _put_parts(self, path: str, meta: Meta, given: dict[int, Any]) -> None:
        """Write, or take away, some elements of a leaf; those of another shape take the place of the old bytes."""
        scope = self.scope
        assert scope is not None
        shapes = [meta.shape_at(at) for at in range(self.count)]
        moved: list[tuple[int, int, Any]] = []
        for at, item in given.items():
            if item is None:
                if shapes[at] is not None:
                    moved.append((*meta.part(at), b""))
                    shapes[at] = None
                continue
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
        scope.token = scope.token or uuid.uuid4().hex
        # From behind, so that what is moved was written to already; of two at one place, both empty but one, either.
        for start, stop, piece in sorted(moved, key=lambda part: part[:2], reverse=True):
            scope.command("SPLICE", key, start, stop, piece)
            scope.size += len(piece)
        fields = {**_shape_fields(shapes), "_write": scope.token}
        scope.command("HDEL", name, "shapes")
        scope.command("HSET", name, *itertools.chain.from_iterable(fields.items()))
        old = {field.decode(): value.decode() for field, value in meta.fields.items() if field != b"shapes"}
        self._metas[path] = Meta.of_texts({**old, **fields})
        self._note_starts(path)
        self.list_leaf(path)


def _whole(path: str, meta: Meta) -> Request:
    """The request for all elements of a leaf."""
    return Request(path, meta.shape_text, meta.dtype_text, meta.nbytes, bytes(8))


def _shape_fields(shapes: Sequence[Sequence[int] | None]) -> dict[str, str]:
    """What the hash of a leaf says of the shapes of its elements, `None` of those that lack it."""
    first = next((shape for shape in shapes if shape is not None), ())
    fields = {"shape": json.dumps([len(shapes), *first])}
    if all(shape == first for shape in shapes):
        return {**fields, "homogeneous": "1"}
    return {**fields, "homogeneous": "0", "shapes": json.dumps(shapes)}


def own_path(at: int | None, path: str) -> str:
    """Where an element has what it has at a path for itself."""
    return f"{_OWN}{at}.{path}" if path else f"{_OWN}{at}"


def shared_path(path: str) -> tuple[int | None, str]:
    """The number of the element that has a path for itself, `None` for a path of all, and the path in the element."""
    if not path.startswith(_OWN):
        return None, path
    number, _, shared = path[len(_OWN) :].partition(".")
    return int(number) if number.isdecimal() and len(number) < 11 else -1, shared


def _is_below(path: str, place: str) -> bool:
    return not place or path == place or path.startswith(place + ".")


def _kind(item: Item) -> str:
    return "a container" if isinstance(item, ElementGroup) else "a tensor" if isinstance(item, ArrayItem) else "a value"


# --- what is in a group -----------------------------------------------------------------------------------------------


class ElementArray(WireArray):
    """An element of a leaf."""

    def __init__(self, store: StackServer, key: Path, place: str, meta: Meta, at: int) -> None:
        super().__init__(store, key, place, meta)
        # The byte that it begins at.
        self.start, _ = meta.part(at)
        self.shape = torch.Size(meta.shape_at(at) or ())

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

    def _known(self, place: str) -> tuple[str, Meta | None]:
        return self.store.known_at(place, self.at)

    def _group_at(self, place: str, key: Path) -> ElementGroup:
        return self.store.element(self.at, place, key)

    def _leaf_at(self, place: str, key: Path, meta: Meta) -> Item:
        if place.startswith(_OWN):
            return super()._leaf_at(place, key, meta)
        if meta.is_value:
            return UnreadableItem(self.store, key, -1, "a value, which a lazy stack on a server does not have")
        return ElementArray(self.store, key, place, meta, self.number)

    def _parts(self) -> list[str]:
        store, own, start = self.store, own_path(self.number, self.place), f"{self.place}." if self.place else ""
        places = {part: start + part for part in store.children(self.place) if not part.startswith(_OWN)}
        for part in store.tree.get(own, ()):
            places.setdefault(part, f"{own}.{part}")
        found = {part for part in places if store.has(start + part, self.at)}
        for path, column in ({} if store.scope is None else store.scope.given).items():
            if path.startswith(start) and "." not in (part := path[len(start) :]) and self.at in column:
                places.setdefault(part, path)
                (found.discard if column[self.at] is None else found.add)(part)
        return sorted(found, key=lambda part: store._rank(places[part]))

    def new_group(self, key: Path) -> ElementGroup:
        return ElementGroup(self.store, key, None, -1, None)

    def attach(self, name: str, item: Item) -> None:
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
