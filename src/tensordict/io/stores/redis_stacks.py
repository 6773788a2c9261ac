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
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.specification import VALUES
from tensordict.io.stores.array_store import SIZE, ArrayItem, Item, Pick, StaleError, Text, UnreadableItem, decode_names
from tensordict.io.stores.entries import CLASS, KIND, NAMES, STACK_DIM, TEXT
from tensordict.io.stores.redis import Server
from tensordict.io.stores.redis_items import WireArray, WireGroup, WireText, addresses
from tensordict.io.stores.redis_layout import Meta, Scope, bytes_of, decoded, noted_in, notes_of, portions, request_for
from tensordict.io.stores.redis_protocol import Word
from tensordict.io.stores.redis_wire import ABSENT, LIMIT, Address, Request, State, Wire
from tensordict.memory.stored_tensors import Selection, Values, as_array

# The note of a nested container, or of the stack itself, whose elements differ in batch size.
_SIZES = "_sizes"
# The note of the elements that have an entry, if some lack it; for a value, that this element lacks it.
_AT, _GONE, _ABSENT = "_elements", "_absent", "null"
# The mark among the nested containers for a leaf that the reference cannot read.
_LEAF = "_leaf"
# The field of a leaf that identifies its last write. Without it, a repeated write would fail its check.
_TOKEN = "_write"

# The metadata of a leaf, without the shapes of all elements.
_LOOK = """
local shape, dtype, mark, shapes = unpack(redis.call('HMGET', KEYS[1], 'shape', 'dtype', 'is_non_tensor', 'shapes'))
return {shapes and redis.sha1hex(shapes) or shape, dtype, mark}
"""

# Replace a range of bytes by bytes of any length.
_SPLICE = """
local old = redis.call('GET', KEYS[1]) or ''
local before, behind = string.sub(old, 1, tonumber(ARGV[1])), string.sub(old, tonumber(ARGV[2]) + 1)
redis.call('SET', KEYS[1], before .. ARGV[3] .. behind, 'KEEPTTL')
return 0
"""


class StackWire(Wire):
    """The requests for a lazy stack. Some of its leaves are listed among the nested containers.

    hidden: what was listed there for these leaves, another text each time that one is written.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.hidden: dict[str, bytes] = {}

    def state(self, requests: Sequence[Request], known: State | None) -> tuple[State, list[Any]]:
        found, answers = super().state(requests, known)
        if found is known:
            return found, answers
        self.hidden = {path: raw for path, raw in found.groups.items() if _LEAF in notes_of(raw)}
        groups = {path: raw for path, raw in found.groups.items() if path not in self.hidden}
        return found._replace(paths=found.paths | self.hidden.keys(), groups=groups), answers

    def _look(self, path: str) -> Sequence[Word]:
        return "EVAL", _LOOK, 1, self.meta(path)


class StackServer(Server):
    """A lazy stack on a server.

    Attributes:
        count: the number of elements.
        dim: the dim that runs over them.
        is_new: whether the server had no such container.
    """

    a_kind = "a lazy stack on a Redis server"
    _wire = StackWire
    wire: StackWire

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
            self._own_header.update(self.header)
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

    def size_of(self, place: str, at: int) -> list[int] | None:
        """Return the batch size of an element at a place; `None` without a note."""
        scope = self.scope
        if scope is not None and at in (given := scope.sizes.get(place, {})):
            return given[at]
        notes = self.read_note(place)
        sizes = notes.get(_SIZES)
        if sizes is not None:
            if type(sizes) is not list or len(sizes) != self.count:
                raise ValueError(f"its batch sizes {sizes!r:.80} are not those of {self.count} elements")
            return list(checks.sizes(sizes[at], "its batch size"))
        found = noted_in(notes, SIZE) if place else list(self.inner_size)
        assert not isinstance(found, str)
        return found

    def find_meta(self, path: str) -> Meta | None:
        meta = super().find_meta(path)
        if meta is not None and not meta.is_value:
            count = len(parsed.shapes) if (parsed := self._parse_stack_meta(path, meta)).shapes is not None else 0
            if not parsed.shape or parsed.shape[0] != self.count or (parsed.shapes is not None and count != self.count):
                raise SaveError(
                    f"entry {joined(self.key_of(path))!r} of the {self.kind} {self.name!r} has the shape "
                    f"{parsed.shape_text!r:.80}, which is not that of {self.count} elements"
                )
        return meta

    def having(self, path: str) -> set[int]:
        """The numbers of the elements that have what is at a path."""
        meta = self._metas.get(path)
        if meta is None:
            found = self.read_note(path).get(_AT) if path in self._children else []
            if found:
                # Another process may have added it to other elements at the same time.
                found = {*found, *itertools.chain.from_iterable(map(self.having, self._under(self._metas, path)))}
        elif meta.is_value:
            found = meta.fields.get(_AT.encode())
            found = found if found is None else self._numbers(path, found)
        else:
            shapes = self._parse_stack_meta(path, meta).shapes
            found = None if shapes is None else [at for at, shape in enumerate(shapes) if shape is not None]
        return set(range(self.count) if found is None else found)

    def _numbers(self, path: str, raw: bytes) -> Any:
        with self.errors(self.key_of(path)):
            return parse_json(raw)

    def has_at(self, path: str, at: int | None) -> bool:
        """Return whether an element has the entry at a path; without a number, whether all elements have it."""
        meta = self._metas.get(path)
        if meta is not None and not meta.is_value:
            shapes = self._parse_stack_meta(path, meta).shapes
            return shapes is None or ((None not in shapes) if at is None else shapes[at] is not None)
        if meta is None and _AT not in self.read_note(path):
            return True
        having = self.having(path)
        return len(having) == self.count if at is None else at in having

    def _parse_stack_meta(self, path: str, meta: Meta) -> Meta:
        if meta.shape is not None:
            return meta
        with self.errors(self.key_of(path)):
            return meta.parse_meta()

    def column(self, path: str, key: Path) -> ArrayItem | None:
        """All elements of a leaf as one array, the dim of the elements first; `None` where their shapes differ."""
        meta = self.find_meta(path)
        if meta is None or meta.is_value or meta.shapes is not None:
            return None
        return WireArray(self, key, path, meta)

    # --- reading ------------------------------------------------------------------------------------------------------

    def sync(self, requests: Sequence[Request] = ()) -> tuple[set[str], list[Any]]:
        with self._knowing.held:
            known, hidden = set(self._metas), self.wire.hidden
            found = super().sync(requests)
            # Which elements have such a leaf is in its hash.
            changed = [path for path in known & self._metas.keys() if hidden.get(path) != self.wire.hidden.get(path)]
            if changed:
                for path, fields in zip(changed, self.wire.metas(changed), strict=True):
                    self._metas[path] = Meta(fields)
            return found

    def _read_ahead(self, scope: Scope, items: Iterable[Item], pick: Pick) -> None:
        if pick((1,)) is not None:
            self.read_ahead([item for item in items if isinstance(item, ElementGroup)])

    def read_ahead(self, groups: Sequence[ElementGroup]) -> None:
        """Read what elements have, all of it, in as few requests as can be; to be called in a scope."""
        scope = self.scope
        if scope is None or scope.commands:
            return
        if not self.address.cached or not self._metas:
            self._list_level()
        numbers = None if any(group.at is None for group in groups) else sorted({group.at or 0 for group in groups})
        paths = sorted({path for group in groups for path in self.below(group.place)} - scope.pieces.keys())
        batch: list[Request] = []
        size = 0
        for request in itertools.chain.from_iterable(self._list_requests(path, numbers) for path in paths):
            if batch and size + request.nbytes > LIMIT:
                self._read_batch(scope, batch)
                batch, size = [], 0
            batch.append(request)
            size += request.nbytes
        if batch:
            self._read_batch(scope, batch)

    def _list_requests(self, path: str, numbers: list[int] | None) -> Iterator[Request]:
        """Return the requests for elements of a leaf. Reading reports broken metadata."""
        try:
            meta = self.find_meta(path)
        except (SaveError, KeyError):
            return
        if meta is None:
            return
        if meta.is_value:
            yield Request(path)
            return
        if numbers is None:
            found = [(meta.nbytes, [0])]
        elif meta.shapes is None:
            run = meta.nbytes // max(self.count, 1)
            found = [(run, [number * run for number in numbers])]
        else:
            parts = [meta.part(number) for number in numbers]
            found = [(stop - start, [start]) for start, stop in parts]
        for run, starts in found:
            if run and starts:
                raw = np.array(starts, "<u8").tobytes()
                yield from portions(request_for(path, meta, run, raw))

    def _read_batch(self, scope: Scope, batch: list[Request]) -> None:
        if scope.is_listed:
            answers = self.wire.read(batch)
        else:
            scope.is_listed = True
            answers = self.sync(batch)[1]
        for request, answer in zip(batch, answers, strict=True):
            if answer is None or (request.run and len(answer) != request.nbytes):
                continue
            if not request.run:
                with contextlib.suppress(ValueError):
                    scope.values[request.path] = self._values_in(*answer)
                continue
            starts, pieces = scope.pieces.setdefault(request.path, ([], []))
            view = memoryview(answer)
            for at, start in enumerate(np.frombuffer(request.offsets, "<u8").tolist()):
                starts.append(start)
                pieces.append(view[at * request.run : (at + 1) * request.run])

    def fetch(self, request: Request, key: Path) -> Any:
        scope = self.scope
        if scope is not None and request.run and request.path in scope.pieces and not scope.writes(request):
            found = _piece(request, *scope.pieces[request.path])
            if found is not None:
                return found
        return super().fetch(request, key)

    def values(self, path: str, key: Path) -> tuple[list[Any], list[dict[str, Any]]]:
        """The values of all elements, and what is noted of each."""
        scope = self.scope
        if scope is not None and not scope.commands and path in scope.values:
            return scope.values[path]
        with self.errors(key):
            found = self._values_in(*super().fetch(Request(path), key))
        if scope is not None:
            scope.values[path] = found
        return found

    def _values_in(self, raw: bytes, form: bytes) -> tuple[list[Any], list[dict[str, Any]]]:
        values = parse_json(raw)
        if type(values) is not list or len(values) != self.count:
            raise ValueError(f"its values {values!r:.80} are not those of {self.count} elements")
        noted = notes_of(form) if form else {}
        each = noted.get("each") if noted.get("crc") == zlib.crc32(raw) else None
        if type(each) is not list or len(each) not in (1, self.count) or any(type(one) is not dict for one in each):
            each = [{}]
        return values, each if len(each) == self.count else each * self.count

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> Iterator[None]:
        if self.is_together or not self.is_open:
            yield
            return
        # A writing thread relies on the known metadata until everything is sent, so other threads do not update it.
        with self._knowing.held if pick is None else contextlib.nullcontext(), super().together(items, pick):
            yield
            scope = self.scope
            assert scope is not None
            if scope.given or scope.sizes:
                self._settle(scope)

    def send(self, scope: Scope) -> None:
        moved, scope.moved = scope.moved, {}
        try:
            super().send(scope)
        except StaleError:
            # If the answer was lost and the write was repeated, it is complete.
            now = {path: self._metas[path].fields.get(_TOKEN.encode()) for path in moved if path in self._metas}
            if not moved or any(now.get(path) != token.encode() for path, token in moved.items()):
                raise
        scope.pieces.clear()
        scope.values.clear()

    def begin(self, device: torch.device | None) -> None:
        """Have the server say what the stack is; to be called in a scope."""
        scope = self.scope
        assert scope is not None
        self.set_header("__device__", b"" if device is None else str(device).encode())
        for name, value in self.header.items():
            scope.command("SET", self.wire.base + name, value)

    def give(self, path: str, at: int, item: Item) -> None:
        """Have an element have an item at a path; to be called in a scope."""
        scope = self.scope
        assert scope is not None
        if path in self._children:
            # An entry that replaces a container removes its content.
            for other in [*self._under(self._metas, path), *self._under(self._notes, path)]:
                scope.given.setdefault(other, {}).setdefault(at, UnreadableItem(self, (), -1, "deleted"))
        for other in self._under(scope.given, path):
            if at in scope.given[other]:
                scope.given[other][at] = UnreadableItem(self, (), -1, "deleted")
        scope.given.setdefault(path, {})[at] = item
        if isinstance(item, ElementGroup):
            item._place, item.at = path, at
            if item._noted.get(SIZE) is not None:
                scope.sizes.setdefault(path, {})[at] = item._noted[SIZE]
            for name, inner in item._made.items():
                self.give(item._below(name), at, inner)
            item._made = {}

    def find_pending(self, path: str, at: int | None) -> Item | None:
        """Return the pending entry of an element at a path; `None` without one."""
        scope = self.scope
        return None if scope is None or at is None else scope.given.get(path, {}).get(at)

    def _settle(self, scope: Scope) -> None:
        """Turn what was given into what is sent."""
        known = self._metas.keys() | self._children.keys()
        if any(len(given) < self.count and path not in known for path, given in scope.given.items()):
            # Another process may have made it since.
            self.sync()
        # Containers before what is in them.
        for path, given in sorted(scope.given.items(), key=lambda item: item[0].count(".")):
            self._put(path, given)
        scope.given = {}
        for path, sizes in scope.sizes.items():
            if not path or path in self._notes:
                self._note_sizes(path, sizes)
        scope.sizes = {}

    @staticmethod
    def _under(paths: Iterable[str], path: str) -> list[str]:
        start = path + "."
        return [other for other in paths if other.startswith(start)]

    def _refuse(self, path: str, why: str) -> UnsupportedEntryError:
        return UnsupportedEntryError(
            f"entry {joined(self.key_of(path))!r} {why}; {self.a_kind} has an entry as tensors of one dtype in all "
            "elements that have it, or as containers, or as values. Nothing was written"
        )

    def _put(self, path: str, given: dict[int, Any]) -> None:
        """Replace the entries of elements at a path by the pending ones, or remove them."""
        lost = {at for at, item in given.items() if isinstance(item, UnreadableItem)}
        items = {at: item for at, item in given.items() if at not in lost}
        kinds = {_kind(item) for item in items.values()}
        if len(kinds) > 1:
            raise self._refuse(path, f"would be {' and '.join(sorted(kinds))} in different elements")
        having = self.having(path)
        stay = having - given.keys()
        if not stay:
            order = self.order(path)
            there = bool(having) or path in self._notes
            if there:
                self.drop(path)
            if items:
                self._add_new(path, items, order, there)
            return
        meta = self._metas.get(path)
        kind = "a container" if meta is None else "a value" if meta.is_value else "a tensor"
        if kinds and kind not in kinds:
            raise self._refuse(path, f"is {kind} in other elements, and {kinds.pop()} was given")
        if kind == "a container":
            self._put_nodes(path, items, (having - lost) | items.keys())
        elif kind == "a value":
            self._put_some_values(path, items, lost)
        else:
            self._put_parts(path, items, lost)

    def _add_new(self, path: str, items: dict[int, Any], order: int | None, there: bool) -> None:
        """Add what nothing is there of, or, where it is `there`, what has just been dropped."""
        first, scope = next(iter(items.values())), self.scope
        assert scope is not None
        if len(items) < self.count and not there:
            scope.check(path, self.key_of(path), (self.wire.meta(path), self.wire.data(path), *ABSENT))
            if not isinstance(first, ElementGroup):
                self._token(scope, path)
        if isinstance(first, ElementGroup):
            self._put_nodes(path, items, set(items), order)
        elif isinstance(first, WireText):
            texts, forms = [_ABSENT] * self.count, [{_GONE: 1} for _ in range(self.count)]
            for at, item in items.items():
                texts[at], forms[at] = _as_value(item)
            self._put_values(path, texts, forms, order)
        else:
            self._put_arrays(path, items, order)

    # --- containers ---

    def _put_nodes(self, path: str, items: dict[int, Any], having: set[int], order: int | None = None) -> None:
        """Note which elements have a container at a path, and what is noted of these."""
        notes = {"_order": order} if path not in self._notes else self.read_note(path)
        kinds = "holds tensors in values of some elements, or another kind of values,"
        for name, why in ((CLASS, "is of different classes"), (KIND, kinds), (STACK_DIM, kinds), (NAMES, "")):
            values = {item._noted.get(name) for item in items.values()}
            if path in self._notes:
                values.add(notes.get(name))
            if len(values) > 1 and why:
                raise self._refuse(path, f"{why} in different elements")
            notes = {**notes, name: values.pop() if len(values) == 1 else None}
        self.note(path, {**notes, _AT: None if len(having) == self.count else sorted(having)})
        assert self.scope is not None
        self.scope.adds = True

    def _note_sizes(self, path: str, given: dict[int, list[int]]) -> None:
        filler = next(iter(given.values()))
        sizes = [
            (self.size_of(path, at) if path in self._notes or not path else None) or filler for at in range(self.count)
        ]
        sizes = [given.get(at, size) for at, size in enumerate(sizes)]
        same = all(size == sizes[0] for size in sizes)
        notes = {**self.read_note(path), _SIZES: None if same else sizes}
        if path:
            notes[SIZE] = sizes[0]
        else:
            self.set_header("__inner_batch_size__", json.dumps(sizes[0]).encode())
        if {name: value for name, value in notes.items() if value is not None} != self.read_note(path):
            self.note(path, notes)

    # --- values ---

    def _put_some_values(self, path: str, items: dict[int, Any], lost: set[int]) -> None:
        # Not by way of `fetch`, which would send what is pending.
        (answer,) = self.wire.read([Request(path)])
        if answer is None:
            raise self._stale(path, self.key_of(path))
        with self.errors(self.key_of(path)):
            values, noted = self._values_in(*answer)
        scope, (raw, form) = self.scope, answer
        assert scope is not None
        scope.check(path, self.key_of(path), (self.wire.meta(path), self.wire.data(path), ABSENT[0], form, len(raw)))
        self._token(scope, path)
        texts, forms = [json.dumps(value, ensure_ascii=False) for value in values], list(noted)
        for at in lost:
            texts[at], forms[at] = _ABSENT, {_GONE: 1}
        for at, item in items.items():
            texts[at], forms[at] = _as_value(item)
        order = self.order(path)
        self.drop(path)
        self._put_values(path, texts, forms, order)

    def _put_values(self, path: str, texts: Sequence[str], forms: list[dict[str, Any]], order: int | None) -> None:
        """Store values, given in their JSON form."""
        content = f"[{', '.join(texts)}]"
        alike = all(form == forms[0] for form in forms)
        form = {"each": forms[:1] if alike else forms, "crc": zlib.crc32(content.encode())}
        # The hash says which entries all elements have, so nothing else must be read.
        have = json.dumps([at for at, one in enumerate(forms) if _GONE not in one]) if _GONE in str(forms) else None
        fields = {"is_non_tensor": "1", "encoding": "json", "_form": json.dumps(form)}
        self.add(path, {**fields, **({} if have is None else {_AT: have})}, WireText(self, (), "", content), order)
        self._hide(path, True)

    # --- tensors ---

    def _put_arrays(self, path: str, items: dict[int, Any], order: int | None) -> None:
        dtypes = sorted({str(item.dtype) for item in items.values()})
        if len(dtypes) > 1:
            raise self._refuse(path, f"has the dtypes {', '.join(dtypes)}")
        shapes = [tuple(items[at].shape) if at in items else None for at in range(self.count)]
        contents = [items[at].content for at in sorted(items)]
        if all(shape == shapes[0] for shape in shapes):
            data: Values = np.stack(contents)
        else:
            data = np.concatenate([np.asarray(bytes_of(np.ascontiguousarray(content))) for content in contents])
        fields: dict[str, Any] = {"dtype": dtypes[0], **_shape_fields(shapes)}
        self.add(path, fields, self._blob(data), order)
        self._note_starts(path)

    def _blob(self, data: Values) -> WireArray:
        """Bytes without a name."""
        flat: Values = np.asarray(bytes_of(data))
        made = WireArray(self, (), "", Meta.of([flat.size], torch.uint8))
        made._content = flat
        return made

    def _note_starts(self, path: str) -> None:
        """Have the server say where the elements of a leaf begin, and tell the reference of it if all have it."""
        assert self.scope is not None
        meta = self._parse_stack_meta(path, self._metas[path])
        self._hide(path, meta.shapes is not None and None in meta.shapes)
        if meta.shapes is None:
            self.scope.command("DEL", self.wire.data(path) + ":idx")
        else:
            self.scope.command("SET", self.wire.data(path) + ":idx", np.array(meta.starts, "<i8").tobytes())

    def _hide(self, path: str, hidden: bool) -> None:
        """Say of a leaf whether it is one that the reference could not read."""
        scope, base = self.scope, self.wire.base
        assert scope is not None
        if hidden:
            scope.command("SREM", base + "__keys__", path)
            note = self.wire.hidden[path] = json.dumps({_LEAF: uuid.uuid4().hex}).encode()
            scope.command("HSET", base + "__groups__", path, note)
        else:
            self.wire.hidden.pop(path, None)
            scope.command("SADD", base + "__keys__", path)
            scope.command("HDEL", base + "__groups__", path)

    def add(self, path: str, fields: Mapping[str, Any], item: WireArray | WireText, order: int | None = None) -> None:
        assert self.scope is not None
        token = self.scope.moved.get(path)
        super().add(path, fields if token is None else {**fields, _TOKEN: token}, item, order)

    def drop(self, path: str) -> None:
        hidden = self.below(path)
        super().drop(path)
        with self.together():
            assert self.scope is not None
            for leaf in hidden:
                self.scope.command("HDEL", self.wire.base + "__groups__", leaf)

    def _put_parts(self, path: str, items: dict[int, Any], lost: set[int]) -> None:
        """Write or remove some elements of a leaf. Elements of a new shape replace the old bytes."""
        meta, scope = self._parse_stack_meta(path, self._metas[path]), self.scope
        assert meta.dtype is not None and scope is not None
        shapes = [meta.shape_at(at) for at in range(self.count)]
        moved: list[tuple[int, int, Any]] = []
        for at in lost:
            moved.append((*meta.part(at), b""))
            shapes[at] = None
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
        # From behind, so that what is moved was written to already; of two at one place, both empty but one, either.
        for start, stop, piece in sorted(moved, key=lambda part: part[:2], reverse=True):
            scope.command("EVAL", _SPLICE, 1, key, start, stop, piece)
            scope.size += len(piece)
        fields = {**_shape_fields(shapes), **self._token(scope, path)}
        if "shapes" not in fields:
            scope.command("HDEL", name, "shapes")
        scope.command("HSET", name, *itertools.chain.from_iterable(fields.items()))
        old = {field: value for field, value in meta.fields.items() if field != b"shapes"}
        self._metas[path] = Meta({**old, **{field.encode(): value.encode() for field, value in fields.items()}})
        self._note_starts(path)

    @staticmethod
    def _token(scope: Scope, path: str) -> dict[str, str]:
        """Return the identifier in the hash of a leaf of a write that would fail its check if it were repeated."""
        token = scope.moved[path] = uuid.uuid4().hex
        return {_TOKEN: token}


def _piece(request: Request, starts: list[int], pieces: list[memoryview]) -> Any:
    """Cut the answer to a request out of the content; `None` if a part is missing."""
    parts: list[memoryview] = []
    for offset in np.frombuffer(request.offsets, "<u8").tolist():
        at = bisect_right(starts, offset) - 1
        if at < 0 or offset + request.run > starts[at] + len(pieces[at]):
            return None
        parts.append(pieces[at][offset - starts[at] : offset - starts[at] + request.run])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _shape_fields(shapes: Sequence[Sequence[int] | None]) -> dict[str, str]:
    """Return the shapes of the elements from the hash of a leaf, with `None` for elements that lack it."""
    first = next(shape for shape in shapes if shape is not None)
    fields = {"shape": json.dumps([len(shapes), *first])}
    if all(shape == first for shape in shapes):
        return {**fields, "homogeneous": "1"}
    texts = [None if shape is None else list(shape) for shape in shapes]
    return {**fields, "homogeneous": "0", "shapes": json.dumps(texts)}


def _as_value(item: WireText) -> tuple[str, dict[str, Any]]:
    """The form in JSON of a value that is given, and what is noted of it."""
    assert item._content is not None
    noted = item._noted or {}
    text = json.dumps(item._content, ensure_ascii=False) if noted.get(TEXT) else item._content
    return text, {name: value for name, value in noted.items() if value is not None and name != TEXT}


def _kind(item: Item) -> str:
    return "a container" if isinstance(item, ElementGroup) else "a value" if isinstance(item, Text) else "a tensor"


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


class NewArray(WireArray):
    """Set an entry of an element. It stays in memory until all elements have theirs."""

    def write(self, selection: Selection, values: Any) -> None:
        self.content[selection] = values

    def read(self, selection: Selection, dtype: Any) -> Values:
        return self.content[selection]

    @property
    def content(self) -> Values:
        if self._content is None:
            self._content = as_array(torch.zeros(self.shape, dtype=self.dtype), self.dtype)
        return self._content


class ElementText(Text):
    """A value of an element."""

    store: StackServer

    def __init__(self, store: StackServer, key: Path, place: str, at: int) -> None:
        super().__init__(store, key, next(addresses))
        self.place = place
        self.at = at

    def content(self) -> str:
        return json.dumps(self.store.values(self.place, self.key)[0][self.at], ensure_ascii=False)

    def attribute(self, name: str) -> Any:
        return noted_in(self.store.values(self.place, self.key)[1][self.at], name, VALUES[0] if name == KIND else None)

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        raise SaveError(f"entry {joined(self.key)!r}: what is noted of a value is written with it")


class ElementGroup(WireGroup):
    """An element of the stack, or of a container that is nested in it; without a number, all of them."""

    store: StackServer

    def __init__(self, store: StackServer, key: Path, place: str | None, address: int, at: int | None) -> None:
        super().__init__(store, key, place, address)
        self.at = at

    @property
    def number(self) -> int:
        """Return the number of the element; for all elements, the first one, which represents the others."""
        return self.at or 0

    def attribute(self, name: str) -> Any:
        if self._place is None:
            return self._noted.get(name)
        if name == SIZE:
            return self.store.size_of(self.place, self.number)
        if name == CLASS and not self.place:
            raw = self.store.header.get("__tensorclass__")
            return None if raw is None else raw.decode()
        return noted_in(self.store.read_note(self.place), name)

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        store = self.store
        if self._place is None:
            self._noted[name] = value
        elif name == SIZE:
            assert isinstance(value, Sequence)
            if store.size_of(self.place, self.number) != list(value):
                with store.together():
                    assert store.scope is not None
                    store.scope.sizes.setdefault(self.place, {})[self.number] = [int(size) for size in value]
        elif name == CLASS and not self.place:
            text = str(value)
            if self.number and store.header.get("__tensorclass__", b"").decode() != text:
                raise UnsupportedEntryError(
                    f"{store.a_kind} has elements of one class, and element {self.at} is {text}"
                )
            store.set_header("__tensorclass__", text.encode())
        else:
            notes = store.read_note(self.place)
            if notes.get(name) != value:
                store.note(self.place, {**notes, name: value})

    def find(self, name: str, known: Item | None = None) -> Item:
        store, place, key = self.store, self._below(name), (*self.key, name)
        store.check()
        given = store.find_pending(place, self.at)
        if given is not None:
            if isinstance(given, UnreadableItem):
                raise KeyError(name)
            return given
        meta = store.find_meta(place)
        if not store.has_at(place, self.at):
            raise KeyError(name)
        if meta is None:
            if isinstance(known, ElementGroup) and known._place == place:
                return known
            return store.element(self.at, place, key)
        if meta.is_value:
            encoding = meta.fields.get(b"encoding", b"json")
            if encoding != b"json":
                return UnreadableItem(store, key, -1, f"a value in the encoding {encoding!r:.40}, which is not read")
            return known if isinstance(known, ElementText) else ElementText(store, key, place, self.number)
        if isinstance(known, ElementArray) and known.meta is meta:
            return known
        return ElementArray(store, key, place, meta, self.number)

    def names(self) -> list[str]:
        store, start = self.store, f"{self.place}." if self.place else ""
        parts = [part for part in store.children(self.place) if store.has_at(start + part, self.at)]
        if self.at is not None and store.scope is not None and store.scope.given:
            given = {
                path[len(start) :]: column[self.at]
                for path, column in store.scope.given.items()
                if path.startswith(start) and self.at in column
            }
            parts += [part for part in given if "." not in part and part not in parts]
            parts = [part for part in parts if not isinstance(given.get(part), UnreadableItem)]
        with store.errors(self.key):
            return decode_names(parts, decoded)

    def new_group(self, key: Path) -> ElementGroup:
        return ElementGroup(self.store, key, None, -1, None)

    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        return NewArray(self.store, key, "", Meta.of(shape, dtype))

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
            self.store.give(
                self._below(name), self.number, UnreadableItem(self.store, (*self.key, name), -1, "nothing")
            )
