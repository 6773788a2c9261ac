"""Outlines: what a save holds, as a tree of forms and of the specs of tensors, without reading a tensor.

A loader that is given `described` in the place of `forms.from_form` makes all of its checks and returns an outline.
So a save can be looked at by a program that does not know its tensorclasses, and without unpickling anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged, registry
from tensordict.core.contract import Contract
from tensordict.core.errors import SaveError
from tensordict.core.keys import Path, entry_of
from tensordict.io.archive_reader import Archive
from tensordict.io.columns import Column
from tensordict.io.forms import BEHIND_FACE, DICT, LAZY, UNBATCHED, VALUES, Form, face_problem, to_form
from tensordict.io.source import Source
from tensordict.io.stores.entries import noted_class
from tensordict.io.stores.store import ArrayItem, Group, Text
from tensordict.io.structure import Complain
from tensordict.io.zipping import STORED
from tensordict.memory.names import LEAF_SUFFIX, TABLE_SUFFIX


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A tensor of a save.

    shape: with -1 for the dims along which the rows of a ragged tensor differ.
    nbytes: of its elements; what they take in the file may be less (compression).
    source: a (mapped) tensor, or what reads one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    ragged: bool
    source: Tensor | Column | Compressed


@dataclass(frozen=True, slots=True)
class Compressed:
    """A tensor that has to be unpacked."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value that only unpickling, which runs code, would give."""

    content: bytes

    def __repr__(self) -> str:
        return f"pickled, {len(self.content)} bytes"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What stands in a file of another program in the place of an entry."""

    why: str

    def __repr__(self) -> str:
        return f"<{self.why}>"


class Broken(Unreadable):
    """What stands in an outline in the place of an entry that cannot be loaded."""

    __slots__ = ()


def broken(error: OSError) -> Form:
    """The outline of an entry of which this is wrong."""
    return Form(VALUES[0], torch.Size(()), value=Broken(str(error)))


def left_pickled(source: Source, path: str, key: Path, stack: bool) -> Pickled:
    """The content of a pickle file as it is: takes the place of `value_files.unpickle`."""
    return Pickled(source.read(path))


class Packed:
    """An archive as a source whose compressed tensors are not unpacked, except the ragged ones."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.read, self.exists, self.is_folder = archive.read, archive.exists, archive.is_folder

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Any:
        """The tensor, or what reads it."""
        entry = self._archive.entries.get(path[len(self._archive.path) + 1 :])
        is_ragged = path.endswith(TABLE_SUFFIX) or self.exists(path.removesuffix(LEAF_SUFFIX) + TABLE_SUFFIX)
        if entry is None or entry.method == STORED or entry.size < math.prod(shape) * dtype.itemsize or is_ragged:
            return self._archive.map(path, dtype, shape, key)
        return Compressed(dtype, shape, partial(self._archive.map, path, dtype, shape, key))


def described(form: Form, entries: Mapping[str, Any], key: Path = ()) -> Form:
    """The form with its entries, which are outlines already: takes the place of `from_form`.

    Raises:
        SaveError: entries, batch sizes or names do not fit; the key is named.
    """
    outlines = {name: value if isinstance(value, Form) else leaf_spec(value) for name, value in entries.items()}
    inner = outlines.get(BEHIND_FACE) if form.is_face else None
    if isinstance(inner, Form):
        form = replace(form, batch_size=inner.batch_size, device=inner.device, names=inner.names)
    if problem := _problem(form, outlines):
        raise SaveError(f"{entry_of(key)}the {form.kind} that was stored does not add up: {problem}")
    return replace(form, entries=outlines)


def outline(container: Any, key: Path = ()) -> Form:
    """The outline of a container."""
    form = to_form(container, key, unread=True)
    entries = {
        name: outline(value, (*key, name)) if isinstance(value, Contract) else leaf_spec(value)
        for name, value in form.entries.items()
    }
    return replace(form, entries=entries)


def outline_of_stored(data: Any, complain: Complain | None = None) -> Form:
    """The outline of a `PersistentTensorDict`, whose tensorclasses need not be known; `complain` as in `restore`."""
    entries: dict[str, Form | LeafSpec] = {}
    for name in data._listed():
        try:
            entries[name] = _stored_entry(data, name, complain)
        except OSError as error:
            if complain is None:
                raise
            if (found := complain(error)) is not None:
                entries[name] = found
    form = Form(DICT, data._batch_size, names=data._names, entries=entries)
    name = noted_class(data._group)
    return form if name is None else Form(name, form.batch_size, names=form.names, entries={BEHIND_FACE: form})


def _stored_entry(data: Any, name: str, complain: Complain | None) -> Form | LeafSpec:
    item = data._item(name)
    if isinstance(item, Group):
        return outline_of_stored(data._over_group(name, item), complain)
    if isinstance(item, ArrayItem):
        data._check_shape(item)
        return leaf_spec(item.tensor(None))
    if isinstance(item, Text):
        return outline(data._target(name), item.key)
    return Form(VALUES[0], data._batch_size, value=Unreadable(item.why))


def leaf_spec(leaf: Tensor | Column | Compressed) -> LeafSpec:
    """The spec of a tensor."""
    if isinstance(leaf, Column):
        return LeafSpec(leaf.dtype, tuple(leaf.shape), leaf.flat.numel() * leaf.dtype.itemsize, True, leaf)
    if isinstance(leaf, Compressed):
        return LeafSpec(leaf.dtype, leaf.shape, math.prod(leaf.shape) * leaf.dtype.itemsize, False, leaf)
    if not leaf.is_nested:
        return LeafSpec(leaf.dtype, tuple(leaf.shape), leaf.numel() * leaf.itemsize, False, leaf)
    row = ragged.row_form(leaf)
    shape = tuple(ragged.shape_of(leaf)) if row is None else (leaf.size(0), *row)
    return LeafSpec(leaf.dtype, shape, ragged.elements(leaf).numel() * leaf.itemsize, True, leaf)


def walk(form: Form, key: Path = ()) -> Iterator[tuple[Path, Form | LeafSpec]]:
    """All nodes and leaves of an outline with their nested keys, a container before what is in it.

    The container behind a tensorclass is not a node of its own.
    """
    yield key, form
    for name, entry in entries_of(form).items():
        if isinstance(entry, Form):
            yield from walk(entry, (*key, name))
        else:
            yield (*key, name), entry


def entries_of(form: Form) -> Mapping[str, Form | LeafSpec]:
    """The entries of an outline; those of a tensorclass are its fields."""
    return form.entries[BEHIND_FACE].entries if form.is_face else form.entries


def _problem(form: Form, entries: Mapping[str, Form | LeafSpec]) -> str | None:
    lead = len(form.batch_size)
    if form.names is not None and len(form.names) != lead:
        return f"{len(form.names)} names for {lead} batch dims"
    if form.is_face:
        return _face_problem(form, entries.get(BEHIND_FACE))
    if form.kind == LAZY:
        return _columns_problem(form, entries) if form.columns else _stack_problem(form, entries)
    if form.kind == DICT:
        for name, entry in entries.items():
            if isinstance(entry, Form) and isinstance(entry.value, (Pickled, Broken)):
                # Its batch size may follow from the value, or is unknown.
                continue
            shape = tuple(entry.batch_size) if isinstance(entry, Form) else entry.shape
            if shape[:lead] != tuple(form.batch_size):
                return f"the shape {list(shape)} of {name!r} does not begin with {list(form.batch_size)}"
    return None


def _face_problem(form: Form, inner: Form | LeafSpec | None) -> str | None:
    if not isinstance(inner, Form):
        return "there is no container behind it"
    holds = not (inner.is_face or inner.is_value or inner.kind == UNBATCHED)
    # The entries of a lazy stack are its members.
    return face_problem(registry.declared(form.kind), inner.kind, holds, inner.entries if inner.kind == DICT else ())


def _columns_problem(form: Form, entries: Mapping[str, Form | LeafSpec]) -> str | None:
    dim = form.stack_dim or 0
    for name, entry in entries.items():
        if isinstance(entry, Form) and isinstance(entry.value, Broken):
            continue
        if isinstance(entry, LeafSpec):
            shape = [*entry.shape[1 : dim + 1], entry.shape[0], *entry.shape[dim + 1 :]]
        elif entry.is_value:
            shape = [*form.batch_size[:dim], *entry.batch_size, *form.batch_size[dim + 1 :]]
        else:
            shape = list(entry.batch_size)
        if shape[: len(form.batch_size)] != list(form.batch_size):
            return f"the shape {shape} of {name!r} does not begin with {list(form.batch_size)}"
    return None


def _stack_problem(form: Form, entries: Mapping[str, Form | LeafSpec]) -> str | None:
    dim = form.stack_dim or 0
    # -1 stands for the dims in which the members differ.
    expected = tuple(form.batch_size[:dim] + form.batch_size[dim + 1 :])
    if not entries:
        return None
    for name, entry in entries.items():
        if not isinstance(entry, Form):
            return f"member {name!r} is a tensor"
        if len(entry.batch_size) != len(expected) or any(
            size not in (-1, own) for size, own in zip(expected, entry.batch_size)
        ):
            return f"member {name!r} has batch size {list(entry.batch_size)}, which is not {list(expected)}"
    if form.batch_size[dim] != len(entries):
        return f"{len(entries)} members do not make a batch size of {list(form.batch_size)}"
    return None
