"""Reading and writing of containers in array stores, for `PersistentTensorDict` and the formats HDF5 and Zarr.

A container is a group. Its batch size, the names of its dims and its tensorclass are attributes. A value is a text, in
JSON unless the value is a string, and an attribute has the kind of its holder.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract, Names
from tensordict.core.devices import put_on
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
from tensordict.io.formats import stack_columns
from tensordict.io.formats.structure import Complain
from tensordict.io.remote.urls import Remote
from tensordict.io.saving.progress import progress_bar
from tensordict.io.specification import (
    DICT,
    LAZY,
    VALUE_STACK,
    VALUES,
    WRAPPED,
    PickledValue,
    Specification,
    UnreadableValue,
    check,
    check_level,
    class_name,
    find_uneven,
    shape_of,
    specification_of,
    tensorclass_over,
)
from tensordict.io.stores.array_store import SIZE, ArrayItem, ForeignArray, Group, Item, Store, Text, UnreadableItem
from tensordict.io.values import EncodedValue, NotJson, decode, encode
from tensordict.memory.files import is_direct
from tensordict.memory.storable import check_storable
from tensordict.memory.stored_tensors import SLAB, StoredTensor, as_array, stored_dtype

NAMES, CLASS, KIND, STACK_DIM, TEXT = "_names", "_class", "_kind", "_stack_dim", "_text"
# Attribute of the group of a ragged tensor: the shape of its rows in the jagged layout as JSON, `null` if strided.
RAGGED = "_ragged"
_ELEMENTS, _SIZES = "values", "sizes"
# Name of the JSON in the group of a value that contains tensors. The tensors are named "0", "1", ...
_FORM = "form"


# --- reading ----------------------------------------------------------------------------------------------------------


def read_state(item: Item) -> tuple[torch.Size | None, Names | None, str | None]:
    """Read the batch size, the names of the batch dims and the name of the tensorclass; `None` for a missing attribute.

    Raises:
        SaveError: an attribute has the wrong type.
    """
    with item.store.errors(item.key):
        sizes, names = item.numbers(SIZE), item.text(NAMES)
        size = None if sizes is None else torch.Size(checks.sizes(sizes, "its batch size"))
        return size, None if names is None else checks.names(parse_json(names)), item.text(CLASS)


def read_class(group: Group) -> str | None:
    """Read the name of the tensorclass of a group; `None` for a plain container."""
    with group.store.errors(group.key):
        return group.text(CLASS)


def is_value(item: Item) -> TypeGuard[Text | Group]:
    """Return True if an item is a value: a text, or a group of a text and the tensors in the value."""
    if not isinstance(item, Group):
        return isinstance(item, Text)
    with item.store.errors(item.key):
        return item.text(KIND) is not None


def value_of(
    item: Text | Group, size: torch.Size, device: torch.device | None, names: Names | None, unread: bool = False
) -> Specification:
    """Read the specification of a value in a container of this batch size, device and names.

    Args:
        unread: read the tensors in the value only when they are used.

    Raises:
        SaveError: the stored form of the value is invalid.
    """
    with item.store.errors(item.key):
        parts: dict[str, Any] = {}
        content: Item = item
        if isinstance(item, Group):
            content = item.find(_FORM) if item.has(_FORM) else item
            for at in range(len(item.names()) - 1):
                part = _part_of(item, str(at)).tensor(device)
                parts[str(at)] = part if unread else part.read()
        if not isinstance(content, Text):
            raise ValueError("is a value in parts, and its form in JSON is missing")
        if content.is_pickled:
            return _unpickle_value(content, size, device, names, unread)
        text = content.content()
        noted = item.text(KIND)
        kind = VALUES[0] if noted is None else noted
        if kind not in (*VALUES, VALUE_STACK):
            raise ValueError(f"{kind!r:.40} is no kind of a value")
        is_text = noted is None or item.attribute(TEXT) is not None
        told = text if is_text else parse_json(text)
        value = told if is_text else decode(told, list(parts.values()))
        dims = item.numbers(STACK_DIM) if kind == VALUE_STACK else None
        own, own_names, _ = read_state(item)
        if kind != VALUE_STACK and own is not None and own[: len(size)] != size:
            # The container got another batch size later. A single value fits every batch size.
            own = None
        form = Specification(kind, size if own is None else own, device, own_names or names)
        form.stack_dim, form.value, form.form, form.entries = dims[0] if dims else None, value, told, parts
    return form


def _unpickle_value(
    item: Text, size: torch.Size, device: torch.device | None, names: Names | None, unread: bool
) -> Specification:
    """Read a pickled value. Describing a store does not unpickle it.

    Raises:
        ValueError: the store was opened without `allow_pickle`.
    """
    kind = item.text(KIND) or VALUES[0]
    own = item.numbers(SIZE)
    form = Specification(kind, size if own is None else torch.Size(own), device, names)
    form.stack_dim = 0 if kind == VALUE_STACK else None
    if unread:
        form.value = PickledValue(item.pickled())
    elif not item.store.allow_pickle:
        raise ValueError("its value is pickled; a pickle may run any code: allow_pickle=True loads it, if you trust it")
    else:
        form.value = pickle.loads(item.pickled())
    return form


def foreign_value(
    item: ForeignArray, size: torch.Size, device: torch.device | None, names: Names | None
) -> Specification:
    """Read an array of another program as a value: as a whole, or as one value for each element of the batch."""
    found = item.elements()
    if item.store.reads_stacks and size and found.shape[: len(size)] == tuple(size):
        return Specification(VALUE_STACK, size, device, names, stack_dim=0, value=found.tolist())
    return Specification(VALUES[0], size, device, names, value=found)


def specification_in(
    group: Group, complain: Complain | None = None, outer: torch.Size | None = None, above: tuple[int, ...] = ()
) -> Specification:
    """Read the specification of the container in a group. Its tensors are read when they are used.

    Args:
        group: the group of the container.
        complain: called with the error of a broken entry, returns a substitute; by default the error is raised.
        outer: the batch size of the enclosing container, if it is known.
        above: as in `lineage_of`.

    Raises:
        SaveError: batch sizes and shapes contradict each other; the key is named.
    """
    lineage, (noted, names, tensorclass) = lineage_of(group, above), read_state(group)
    size = outer if noted is None else noted
    if outer is not None and size is not None and size[: len(outer)] != outer:
        raise SaveError(f"{entry_of(group.key)}its batch size {list(size)} does not begin with {list(outer)}")
    node = Specification(DICT, torch.Size(()) if size is None else size, None, names)
    entries: dict[str, Any] = {}
    for name in group.names():
        try:
            item = group.find(name)
            if is_ragged(item):
                entries[name] = ragged_in(item, size, None)
            elif isinstance(item, Group) and not is_value(item):
                entries[name] = specification_in(item, complain, size, lineage)
            else:
                entries[name] = _entry_in(item, node)
        except OSError as error:
            if complain is None:
                raise
            if (found := complain(error)) is not None:
                entries[name] = found
    node.entries = entries
    if size is None:
        _fit_size(node)
    check(node, group.key)
    return node if tensorclass is None else tensorclass_over(tensorclass, node)


def _entry_in(item: Item, node: Specification) -> Any:
    """Return a leaf of a container, or the specification of a value."""
    size = node.batch_size
    if is_value(item):
        return value_of(item, size, None, node.names, unread=True)
    if isinstance(item, UnreadableItem):
        return Specification(VALUES[0], size, value=UnreadableValue(item.why))
    assert isinstance(item, ArrayItem)
    if item.shape[: len(size)] != size:
        where = f"entry {joined(item.key)!r}"
        raise SaveError(f"{where} has shape {list(item.shape)}, which does not begin with the batch size {list(size)}")
    return item.tensor(None)


def is_ragged(item: Item) -> TypeGuard[Group]:
    """Return True if an item is the group of a ragged tensor."""
    if not item.store.holds_ragged or not isinstance(item, Group):
        return False
    with item.store.errors(item.key):
        return item.text(RAGGED) is not None


def check_rows(group: Group, size: torch.Size | None) -> None:
    """Check that the number of rows of a ragged tensor equals the batch size.

    Raises:
        SaveError: the numbers differ.
    """
    count = _part_of(group, _SIZES).shape[:1]
    if size and size != count:
        raise SaveError(
            f"entry {joined(group.key)!r} is ragged and has {list(count)} rows, and not the batch size {list(size)}"
        )


def ragged_in(group: Group, size: torch.Size | None, device: torch.device | None) -> Tensor:
    """Read the ragged tensor in a group of a container of this batch size.

    Raises:
        SaveError: its parts contradict each other or the batch size.
    """
    check_rows(group, size)
    with group.store.errors(group.key):
        row = parse_json(group.text(RAGGED) or "null")
        if row is not None:
            row = checks.ints(row, "the shape of its rows", least=-1)
        flat, sizes = (_part_of(group, name).tensor(None).read() for name in (_ELEMENTS, _SIZES))
        if flat.dim() != 1 or stack_columns.count_elements(sizes, row) != len(flat):
            raise ValueError(f"its {list(flat.shape)} elements are not those of rows of the sizes that are noted")
        leaf = stack_columns.join_ragged(flat, sizes, row, False, ragged.SharedOffsets())
    assert isinstance(leaf, Tensor)
    return leaf if device is None else put_on(leaf, device)


def _part_of(group: Group, name: str) -> ArrayItem:
    """Return one of the arrays of a ragged tensor or a value; raises `SaveError` if it is missing."""
    with group.store.errors(group.key):
        try:
            part = group.find(name)
        except KeyError:
            raise ValueError(f"is kept in parts, and its part {name!r} is missing") from None
        if not isinstance(part, ArrayItem):
            raise ValueError(f"is kept in parts, and its part {name!r} is no array")
        return part


def _fit_size(node: Specification) -> None:
    """Set the batch size of a container that another program wrote without one: the longest that fits its tensors."""
    sizes = [
        shape_of(entry)
        for entry in node.entries.values()
        if not isinstance(entry, Specification) or (entry.entries and not entry.is_value)
    ]
    columns = zip(*(size for size in sizes if size is not None))
    node.batch_size = torch.Size([column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)])
    for entry in node.entries.values():
        if isinstance(entry, Specification) and entry.kind in VALUES:
            entry.batch_size = node.batch_size


def lineage_of(group: Group, above: tuple[int, ...]) -> tuple[int, ...]:
    """Return the addresses of a group and its ancestors; raises `SaveError` if it contains itself."""
    check_level(group.key)
    if group.address in above:
        where = f"entry {joined(group.key)!r} of the {group.store.kind} {group.store.name!r}"
        raise SaveError(f"{where} is nested in itself")
    return (*above, group.address)


# --- writing ----------------------------------------------------------------------------------------------------------
# An item gets its name after all of it was written, so a failed write leaves the store unchanged.


def note(item: Item, size: torch.Size, names: Names | None) -> None:
    """Write a batch size and names as attributes of a group or a text."""
    item.set_attributes({SIZE: list(size), NAMES: None if names is None else json.dumps(names)})


def write_item(group: Group, value: Any, options: Mapping[str, Any], key: Path, above: tuple[int, ...] = ()) -> Item:
    """Write an entry to the store of `group`, as an item without a name.

    An entry of the same store is returned itself if the store `shares` items. It is not copied then.

    Args:
        group: the group that will get the item.
        value: the leaf, container or value.
        above: the addresses of `group` and its ancestors.
        options: as for `Store.check_options`, for leaves.
        key: the key for errors.

    Raises:
        UnsupportedEntryError: the entry cannot be stored; the key is named.
    """
    if group.store.shares and (there := _find_item(group.store, value, key, above)) is not None:
        return there
    if isinstance(value, Contract):
        return _write_node(group, value, options, key, above)
    check_leaf(group.store, value, key)
    if value.is_nested:
        return _write_ragged(group, value, options, key)
    array = group.new_array(key, tuple(value.shape), value.dtype, options)
    fill(array, value)
    return array


def _find_item(store: Store, value: object, key: Path, above: tuple[int, ...]) -> Item | None:
    """Return the item of this store that a leaf or container reads from; `None` if it is elsewhere."""
    if isinstance(value, StoredTensor):
        array = value.array
        return array if value.is_whole() and isinstance(array, ArrayItem) and array.store is store else None
    inner = value._wrapped_container() if isinstance(value, Contract) else None
    group: Any = getattr(inner, "_group", None)
    if group is None or group.store is not store:
        return None
    if read_class(group) != (None if inner is value else class_name(value)):
        return None
    if group.address in above:
        raise SaveError(f"entry {joined(key)!r} would be nested in itself")
    return group  # type: ignore[no-any-return]


def check_leaf(store: Store | type[Store], value: Tensor, key: Path) -> None:
    """Raise an `UnsupportedEntryError` that names the key if a tensor cannot be stored."""
    if value.is_nested and not store.holds_ragged:
        raise _unsupported_kind(store, "ragged tensor", key)
    if not value.is_nested:
        check_storable(value, key)
    if value.is_meta:
        raise UnsupportedEntryError(f"{entry_of(key)}a tensor on the meta device has no content that could be stored")
    stored_dtype(value.dtype, key)


def fill(array: ArrayItem, value: Tensor) -> None:
    """Write a tensor into an array of its shape and dtype, piece by piece if it is large and not contiguous."""
    progress = array.store.progress
    if array.is_blank and _is_zero(value):
        return
    if not progress.is_shown and (value.nbytes <= SLAB or is_direct(value)):
        array.write((...,), as_array(value, value.dtype))
    elif value.numel():
        array.tensor(None).write(value, progress.add)
    array.record_written()


def _is_zero(value: Tensor) -> bool:
    """Return True for a tensor that expands a single zero, as templates of new stores do."""
    if not value.numel() or any(value.stride()):
        return False
    return not value[(0,) * value.dim()].reshape(1).view(torch.uint8).any()


def _write_ragged(group: Group, value: Tensor, options: Mapping[str, Any], key: Path) -> Group:
    flat, sizes, row = stack_columns.split_ragged(value)
    node = group.new_group(key)
    with group.store.errors(key):
        node.set_attribute(RAGGED, json.dumps(row))
    for name, part in ((_ELEMENTS, flat), (_SIZES, sizes)):
        array = node.new_array((*key, name), tuple(part.shape), part.dtype, options)
        fill(array, part)
        node.attach(name, array)
    return node


def _write_node(
    group: Group, container: Contract, options: Mapping[str, Any], key: Path, above: tuple[int, ...]
) -> Item:
    form = specification_of(container, key, unread=True)
    if form.is_value:
        return _write_value(group, form, options, key)
    node = group.new_group(key)
    write_container(node, container, options, above, form)
    return node


def check_container(
    store: type[Store], target: object, container: Contract, key: Path = (), allow_pickle: bool = False
) -> None:
    """Check that a container can be saved in a store whose content is deleted first.

    Args:
        store: the kind of store.
        target: the store's path or address, as for `Store.open`.
        container: the container to save.
        key: the key for errors.
        allow_pickle: values may be pickled.

    Raises:
        UnsupportedEntryError: an entry cannot be stored; it is named.
        SaveError: an entry is read from `target`.
    """
    form = specification_of(container, key, unread=True)
    if form.is_tensorclass:
        container = form.entries[WRAPPED]
        form = specification_of(container, key, unread=True)
    if form.kind == LAZY:
        _check_even(container, key)
        for member in container._members() or ():
            check_container(store, target, member, key, allow_pickle)
    elif form.is_value:
        encoded = _encode_value(store, form.value, key, allow_pickle)
        for at, tensor in enumerate(() if encoded is None else encoded.tensors):
            check_leaf(store, tensor, (*key, str(at)))
    elif form.kind != DICT:
        raise _unsupported_kind(store, form.kind, key)
    else:
        for name, value in form.entries.items():
            if isinstance(value, Contract):
                check_container(store, target, value, (*key, name), allow_pickle)
            else:
                check_leaf(store, value, (*key, name))
                _check_elsewhere(target, value, (*key, name))


def _check_elsewhere(target: object, value: Tensor, key: Path) -> None:
    array: object = value.array if isinstance(value, StoredTensor) else None
    if not isinstance(array, Item):
        return
    source = array.store.source
    if source is target or (isinstance(source, Remote) and isinstance(target, Remote) and source.url == target.url):
        raise SaveError(
            f"entry {joined(key)!r} is read from {array.store.name}, which would be deleted first: save elsewhere, or "
            "read all of it into memory by to_tensordict()"
        )


def _unsupported_kind(store: Store | type[Store], kind: str, key: Path) -> UnsupportedEntryError:
    return UnsupportedEntryError(f"{entry_of(key)}{store.a_kind} holds no {kind}; a folder or an archive (memmap) does")


def _encode_value(store: Store | type[Store], value: object, key: Path, allow_pickle: bool) -> EncodedValue | None:
    """Encode a value; returns `None` if it must be pickled, and raises `UnsupportedEntryError` if it may not be."""
    try:
        return encode(value)
    except NotJson as error:
        if allow_pickle and store.holds_pickles:
            return None
        raise _unsupported_value(store, error, key) from None


def _unsupported_value(store: Store | type[Store], error: Exception, key: Path) -> UnsupportedEntryError:
    return UnsupportedEntryError(
        f"entry {joined(key)!r}: {error}; values that are no tensors are kept as JSON in {store.a_kind}"
    )


def write_container(
    group: Group,
    container: Contract,
    options: Mapping[str, Any],
    above: tuple[int, ...] = (),
    form: Specification | None = None,
) -> None:
    """Write a container into an empty group; `above` as in `write_item`, `form` is its specification.

    Raises:
        UnsupportedEntryError: an entry cannot be stored; it is named.
        OSError: the store cannot be written.
    """
    key, errors = group.key, group.store.errors
    check_level(key)
    form = form or specification_of(container, key, unread=True)
    if form.is_tensorclass:
        with errors(key):
            group.set_attribute(CLASS, form.kind)
        container = form.entries[WRAPPED]
        form = specification_of(container, key, unread=True)
    if form.kind == LAZY:
        _check_even(container, key)
        form = Specification(DICT, form.batch_size, form.device, form.names, container._entries)
    if form.kind != DICT:
        raise _unsupported_kind(group.store, form.kind, key)
    with errors(key):
        note(group, form.batch_size, form.names)
    for name in form.entries:
        group.attach(name, write_item(group, form.entries[name], options, (*key, name), above))


def write_store(
    store: Store, container: Contract, options: Mapping[str, Any], progress: bool | None, allow_pickle: bool = False
) -> None:
    """Write a container as the root group of an empty store, and close the store.

    Raises:
        UnsupportedEntryError: an entry cannot be stored; it is named.
        OSError: the store cannot be written.
    """
    store.allow_pickle = allow_pickle
    with contextlib.closing(store):
        form = specification_of(container, unread=True)
        if form.is_value:
            raise UnsupportedEntryError(
                f"a value that is no tensor is no {store.kind} by itself; put it into a TensorDict"
            )
        with progress_bar(progress, "saving", lambda: _nbytes(container)) as store.progress:
            write_container(store.root, container, options, (), form)
        with store.errors(()):
            store.flush()


def _nbytes(container: Contract) -> int:
    entries = specification_of(container, unread=True).entries.values()
    return sum(_nbytes(value) if isinstance(value, Contract) else value.numel() * value.itemsize for value in entries)


def _check_even(stack: object, key: Path) -> None:
    """Refuse a lazy stack whose members differ in their keys or shapes."""
    if (uneven := find_uneven(stack, key)) is not None:
        raise UnsupportedEntryError(
            f"entry {joined(uneven)!r} has different shapes in the members of a lazy stack, or is not in all of them, "
            "and has no form as one array: a folder or an archive (memmap) holds it as it is; Zarr holds what "
            "densify(torch.jagged) gives; or save a padded form"
        )


def _write_pickle(group: Group, form: Specification, key: Path) -> Item:
    """Write a pickled value, in the form of the reference."""
    try:
        content = pickle.dumps(form.value)
    except Exception as error:  # Pickling runs code of the value, which may raise any error.
        raise _unsupported_value(group.store, error, key) from error
    item = group.new_pickle(key, content)
    with group.store.errors(key):
        item.set_attributes({KIND: form.kind, STACK_DIM: form.stack_dim})
        note(item, form.batch_size, form.names)
    return item


def _write_value(group: Group, form: Specification, options: Mapping[str, Any], key: Path) -> Item:
    store, value = group.store, form.value
    is_text = not store.texts_are_json and type(value) is str and "\0" not in value
    encoded = EncodedValue(value, []) if is_text else _encode_value(store, value, key, store.allow_pickle)
    if encoded is None:
        return _write_pickle(group, form, key)
    content, tensors = encoded
    text = content if is_text else json.dumps(content)
    node = group.new_group(key) if tensors else None
    try:
        item: Item = group.new_text(key, text) if node is None else node.new_text((*key, _FORM), text)
    except UnicodeEncodeError as error:
        raise _unsupported_value(group.store, error, key) from None
    if node is not None:
        node.attach(_FORM, item)
        for at, tensor in enumerate(tensors):
            node.attach(str(at), write_item(node, tensor, options, (*key, str(at))))
        item = node
    with group.store.errors(key):
        item.set_attributes({KIND: form.kind, TEXT: 1 if is_text else None, STACK_DIM: form.stack_dim})
        note(item, form.batch_size, form.names)
    return item
