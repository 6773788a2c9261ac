"""Methods that write, delete and rename entries, and the checks that every written entry passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import makers, ragged
from tensordict.core.contract import Contract, EntryStore, distinct, identity, is_node
from tensordict.core.devices import CPU, put_on, wait_for
from tensordict.core.exceptions import ShapeError, StackError
from tensordict.core.foreach import refuse_graph_leaves, separate, separate_value
from tensordict.core.key_views import IsLeaf
from tensordict.core.keys import Path, joined, path_in, path_of
from tensordict.core.replacing import replacing
from tensordict.core.torch_internals import is_view
from tensordict.memory.file_source import FileSource
from tensordict.memory.sparse_files import make_room
from tensordict.ops.dims.naming import as_names, take_names
from tensordict.ops.entries.locking import Locking, raise_locked
from tensordict.ops.entries.numbers import make_entry
from tensordict.ops.entries.reading import NO_DEFAULT, Reading, choose_given
from tensordict.ops.entries.update_sources import merge_sources, select_from_source
from tensordict.ops.entries.write_plans import (
    Copy,
    Resize,
    Update,
    Write,
    batch_sizes_differ,
    check_source_complete,
    copy_plain,
    raise_no_entry,
    resize,
    store_plain,
    take_plain_entries,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Writing")


class Writing(Reading, Locking):
    """The methods `set`, `update`, `set_`, `update_`, `del_`, `rename_key_` and others.

    All values are checked before the first write, so that a failed call changes nothing.
    """

    # --- out-of-place writes: an entry is added or replaced ---------------------------------------------------------

    def set(
        self: SelfT,
        key: object,
        item: object,
        inplace: bool = False,
        non_blocking: bool = False,
        *,
        overwrite: bool = False,
        **kwargs: object,
    ) -> SelfT:
        """Write an entry; missing containers on the way are created.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(batch_size=[2])
            >>> td.set(("a", "b"), torch.zeros(2, 3)).get("a").batch_size
            torch.Size([2])

        Args:
            key: a string or a tuple of strings.
            item: a tensor, container, mapping, number, list or numpy array, whose shape must begin with the batch size.
                A tensor or container is stored without a copy, unless its device must change. Any other object is
                stored as a value, in a `NonTensorData`, and a list of such objects in a `NonTensorStack`.
            inplace: copy into an existing entry, instead of replacing it.
            non_blocking: passed to the transfer to the device.
            overwrite: in an HDF5 file or a Zarr group, replace an existing tensor of another shape or dtype. Without
                it, the item is cast to the dtype of the existing tensor and broadcast to its shape. In memory, entries
                are always replaced.

        Returns:
            the same container.

        Raises:
            RuntimeError: the container is locked, or the shape does not begin with the batch size, or (in a file) it
                does not broadcast to the shape of the existing tensor.
            TypeError: the item is a list of rows of different lengths, or the key is neither a string nor a tuple.
            KeyError: the key leads into a tensor.
        """
        if inplace and self._has(path_of(key)):
            return self.set_(key, item, non_blocking=non_blocking)
        if overwrite:
            with replacing():
                return self.set(key, item, non_blocking=non_blocking)
        if type(key) is str:
            self._write_name(key, item, non_blocking)
        else:
            self._write(path_of(key), item, non_blocking)
        return self

    def _write_name(self, name: str, item: object, non_blocking: bool = False, path: Path | None = None) -> None:
        """Check `item` and store it under a name of this level. Errors name `path`, the nested key in the root."""
        if self._locked:
            raise_locked(f"set the entry {name if path is None else joined(path)!r}")
        # Most items are plain tensors that fit. This check takes 0.2 us, `_admit` would take 0.6. One batch dim is the
        # common case, as in `_fill`.
        if type(item) is Tensor and (self._device is None or item.device == self._device):
            size = self._batch_size
            ndim = len(size)
            try:
                fits = not ndim or (
                    item.shape[:ndim] == size if ndim > 1 else (shape := item.shape) and shape[0] == size[0]
                )
            except RuntimeError:
                fits = False  # a ragged tensor of the strided layout has no `shape`
            if fits:
                self._entries[name] = item
                return
        if type(item) is str:
            # A string needs no checks, and its holder has no dim names to take over.
            self._entries[name] = self._admit(item, ())
            return
        value = self._admit(item, (name,) if path is None else path, non_blocking)
        self._entries[name] = value
        if self._names is None:
            take_names(self, value)

    def _write(self, path: Path, item: object, non_blocking: bool = False) -> None:
        """Check `item` and store it at `path`."""
        node: Any = self
        if self._holds_parameters and len(path) > 1:
            # A nested container does not know that it is part of a container of parameters.
            item = self._admit_item(item, path, non_blocking)  # type: ignore[attr-defined]
            self._wrapped_container()._write(path, item, non_blocking)
            return
        for name in path[:-1]:
            try:
                child = node._entries.get(name)
            except StackError:
                child = None  # a leaf whose shape differs between the members of a lazy stack
            if not isinstance(child, Contract):
                self._write_branch(path, item, non_blocking)
                return
            node = child
        node._write_name(path[-1], item, non_blocking, path)

    def _write_branch(self, path: Path, item: object, non_blocking: bool) -> None:
        """Store `item` at `path`, and create the missing containers on the way."""
        node: Any = self
        depth = 0
        while (child := node._node(path[depth])) is not None:
            node = child
            depth += 1
        name = path[depth]
        if node._is_non_tensor:
            node._write_name(name, item, non_blocking, path)
        entries = node._entries
        if name in entries:
            raise KeyError(f"cannot write {joined(path)!r}: the entry {joined(path[: depth + 1])!r} is a tensor")
        node._check_field(name)
        if node._locked:
            raise_locked(f"add the entry {joined(path)!r}")
        if not isinstance(entries, dict) and node._members():
            # Some members may have an entry of this name already. They keep it.
            node._wrapped_container()._write_to_members(path[depth:], item, path, non_blocking)
        else:
            entries[name] = node._make_branch(path[depth + 1 :], item, path, non_blocking)

    def _make_branch(self, rest: Path, item: object, path: Path, non_blocking: bool) -> Any:
        """Make a nested container that has `item` at `rest`."""
        child = self._make_child()
        child._write_name(rest[-1], item, non_blocking, path)
        for name in reversed(rest[:-1]):
            below, child = child, self._make_child()
            child._entries[name] = below
        return child

    def _make_child(self) -> Any:
        """Make an empty container with the batch size, device and names of this one, to be nested in it."""
        return makers.dense({}, self._batch_size, self._device, self._names)

    def _admit(self, item: object, path: Path, non_blocking: bool = False) -> Any:
        """Convert `item` to an entry of this container. Raises an error with `path` if it does not fit."""
        if type(item) is str:
            # Most values are strings. Their holder is made here and needs no checks.
            return makers.value(item, self._batch_size, self._device, self._names)
        if not isinstance(item, Tensor):
            # `isinstance` with the abstract class `Mapping` takes 0.3 us.
            is_dict = type(item) is dict
            if not is_dict and isinstance(item, Contract):
                return self._admit_node(item, path, non_blocking)
            if is_dict or isinstance(item, Mapping):
                child = self._make_child()
                child._fill(item, path, non_blocking)
                return child
            item = make_entry(item, path, self._batch_size, self._device)
            if not isinstance(item, Tensor):
                return self._admit_node(item, path, non_blocking)
        if self._device is not None and item.device != self._device:
            item = put_on(item, self._device, non_blocking)
        size = self._batch_size
        if isinstance(item, Contract):
            return item._over(item, size)  # type: ignore[attr-defined]
        if len(size) == 0:
            return item
        try:
            shape = item.shape
        except RuntimeError:
            shape = ragged.shape_of(item)  # see `_write_name`
        if shape[: len(size)] != size:
            raise RuntimeError(
                f"entry {joined(path)!r} has shape {list(shape)}, which does not begin with the batch size "
                f"{list(size)} (batch dimension mismatch); expand it, or give the container a shorter batch size"
            )
        return item

    def _admit_node(self, node: Any, path: Path, non_blocking: bool) -> Any:
        """Adapt a container to be nested in this one: its batch size, its device and its dim names."""
        if node is self or node._wrapped_container() is self:
            raise ValueError(
                f"entry {joined(path)!r}: a container cannot hold itself; set a copy, as td.copy() makes it"
            )
        size = self._batch_size
        if node._batch_size != size and node._batch_size[: len(size)] != size:
            node = node.copy()
            try:
                node._rebatch(size, path)
            except RuntimeError as error:
                why = (
                    "a list gives one value to each element; set_non_tensor stores the list as one value"
                    if node._is_non_tensor
                    else error
                )
                raise RuntimeError(
                    f"entry {joined(path)!r}, of batch size {list(node._batch_size)}: a nested container's batch size "
                    f"must begin with its parent's, {list(size)}, and cannot be changed to it: {why}"
                ) from error
        if self._device is not None and node._device != self._device:
            node = node.to(self._device, non_blocking=non_blocking)
        if self._names is not None:
            node = _add_leading_names(node, self._names, path)
        return node

    def _fill(
        self, source: Mapping[Any, Any], prefix: Path = (), non_blocking: bool = False, fields: Any = None
    ) -> None:
        """Write every item of a mapping into this container, which is new.

        If the items are the fields of a tensorclass, `fields` is the tensorclass. It casts them, and `None` makes no
        entry.
        """
        size = self._batch_size
        ndim = len(size)
        first = size[0] if ndim == 1 else None
        device = self._device
        on_cpu = device is not None and device.type == "cpu"
        entries = self._entries
        if device is None and type(source) is not dict and (given := take_plain_entries(source, size)) is not None:
            entries.update(given)
            return
        for key, item in source.items():
            if type(key) is str:
                # One batch dim is the common case. Comparing its size takes 120 ns, comparing slices 220 ns.
                try:
                    fits = (
                        type(item) is Tensor
                        and (device is None or (item.is_cpu if on_cpu else item.device == device))
                        and (
                            not ndim
                            or (item.shape[:ndim] == size if ndim > 1 else (shape := item.shape) and shape[0] == first)
                        )
                    )
                except RuntimeError:
                    fits = False  # see `_write_name`
                if fits:
                    entries[key] = item
                elif fields is None or (item is not None and (item := fields._as_entry(key, item, True)) is not None):
                    entries[key] = value = self._admit(item, (*prefix, key), non_blocking)
                    if self._names is None:
                        take_names(self, value)
            else:
                self._write(path_in(key, prefix), item, non_blocking)

    def setdefault(self, key: object, default: object, inplace: bool = False) -> Any:
        """Return the entry at `key`. If it is missing, write `default` first (as `dict.setdefault` does).

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=1)
            >>> td.setdefault("a", 2), td.setdefault("b", 3)
            (tensor(1), tensor(3))
        """
        path = path_of(key)
        if self._has(path):
            return self._find(key)
        added = next(path[:end] for end in range(1, len(path) + 1) if not self._has(path[:end]))
        self.set(key, default, inplace=inplace)
        try:
            return self._find(key)
        except StackError:
            # The rows of `default` have different shapes, and the lazy stack cannot return them as one tensor.
            self.del_(added)
            raise

    def create_nested(self, key: object) -> Self:
        """Add an empty nested container at `key`, or replace the entry there by one; returns the same container.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict(batch_size=[3]).create_nested(("a", "b"))["a", "b"].batch_size
            torch.Size([3])
        """
        path = path_of(key)
        self._write(path, makers.dense({}, self._batch_size, self._device, self._names))
        return self

    def update(
        self: SelfT,
        input_dict_or_td: object = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Iterable[Any] | None = None,
        is_leaf: IsLeaf | None = None,
        update_batch_size: bool = False,
        ignore_lock: bool = False,
        **kwargs: object,
    ) -> SelfT:
        """Write the entries of a mapping or container. Nested containers are merged, not replaced.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": {"b": torch.zeros(1)}})
            >>> sorted(td.update({"a": {"c": torch.ones(1)}, "d": 1.0}).keys(True, True), key=str)
            [('a', 'b'), ('a', 'c'), 'd']

        All values are checked before the first write.

        Args:
            input_dict_or_td: a container, a mapping, (key, value) pairs, or nothing but keyword arguments.
            clone: store copies.
            inplace: copy into existing entries, instead of replacing them.
            non_blocking: passed to transfers to the device.
            keys_to_update: write only the entries at these nested keys.
            is_leaf: takes a class and returns whether its instances replace an entry as a whole.
            update_batch_size: take over different batch sizes of the source and of its nested containers. The source
                must then have all entries of such a container.
            ignore_lock: write even if this container is locked.

        Returns:
            the same container.
        """
        source = merge_sources(input_dict_or_td, kwargs)
        if source is self:
            return self
        if update_batch_size and isinstance(source, Contract) and batch_sizes_differ(self, source):
            if inplace or keys_to_update is not None:
                raise ShapeError(
                    "update_batch_size=True replaces the entries of a container of another batch size, "
                    f"{list(self._batch_size)} by {list(source._batch_size)}: leave out inplace and keys_to_update"
                )
            return self._update_with_batch_size(source, clone)
        if keys_to_update is not None:
            source = select_from_source(source, keys_to_update)
        plain = is_leaf is None and not update_batch_size and isinstance(self._entries, dict)
        if plain and not (inplace or clone or self._is_over_another) and store_plain(self, source):
            return self
        queues = non_blocking if self._device is None else self._queues_transfers(non_blocking)
        if not (plain and inplace and copy_plain(self, source, queues)):
            write = Update(inplace, clone, queues, is_leaf, ignore_lock, update_batch_size)
            write.refused = self
            self._plan_write(write, source)
            write.plan.run(self, queues)
        if queues:
            self._wait_for_transfers(non_blocking)
        return self

    def _plan_write(self, write: Write, source: object, prefix: Path = ()) -> None:
        """Check the values for this container, which is at `prefix`, and add them to the plan of `write`."""
        write.into(self, source, prefix)

    def _update_with_batch_size(self, source: Contract, clone: bool) -> Self:
        if self._locked:
            raise_locked("update the batch size")
        size = source._batch_size
        check_source_complete(self, source)
        if self._device is not None:
            source = source.to(self._device)
        if self._members() and len(size) > (dim := self._wrapped_container().stack_dim):
            return self._replace_members((source.clone() if clone else source.copy()).unbind(dim))
        staged: Any = self.empty()
        staged._rebatch(size, ())
        for name, value in source._entries.items():
            staged._entries[name] = value.clone() if clone else value
        with replacing():
            for name, value in staged._entries.items():
                self._entries[name] = value
        self._batch_size = size
        return self

    def _replace_members(self, members: Sequence[Any]) -> Self:
        """Give a lazy stack other members; the stack dim stays."""
        stack = self._wrapped_container()
        template = None if members else stack._entries.sample[0].copy()
        # The batch size is cached.
        stack._entries, stack._size = stack._like(list(members), template=template)._entries, None
        return self

    # --- in-place writes: the memory of an entry changes, allowed on locked containers --------------------------------

    def set_(self, key: object, item: object, *, non_blocking: bool = False) -> Self:
        """Copy `item` into the existing entry at `key`; allowed on a locked container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> a = td["a"]
            >>> _ = td.set_("a", torch.ones(2))
            >>> a
            tensor([1., 1.])

        Args:
            key: a string or a tuple of strings.
            item: a tensor, number, list or numpy array, which is broadcast to the entry; a container or mapping for a
                nested container; any object for a value.
            non_blocking: passed to the transfer to the device.

        Returns:
            the same container.

        Raises:
            KeyError: the container has no such entry.
            ValueError: the item does not broadcast to the entry.
        """
        if self._holds_parameters and torch.is_grad_enabled():
            with torch.no_grad():
                return self.set_(key, item, non_blocking=non_blocking)
        node: Any = self
        name = key
        if type(key) is not str:
            node, name = self._find_parent(path_of(key))
        entries = node._entries
        if type(item) is Tensor and (isinstance(entries, dict) or (isinstance(entries, EntryStore) and entries.shares)):
            # The most frequent case takes 0.5 us here. A plan would take 4 us.
            current: Any = entries.get(name)  # type: ignore[union-attr]
            try:
                fits = isinstance(current, Tensor) and item.shape == current.shape
            except RuntimeError:
                fits = False  # see `_write_name`
            if fits:
                if FileSource.any_sparse:
                    make_room([(current, None)], self)
                if not torch.compiler.is_compiling() and is_view(item):
                    item = separate_value(current, item)
                try:
                    current.copy_(item, non_blocking)
                except RuntimeError as error:
                    refuse_graph_leaves([current], self)
                    current.copy_(separate(item, error), non_blocking)
                return self
        if name not in entries:
            raise node._make_missing_error(name)
        inner = node._node(name)
        if is_node(inner) and not inner._is_non_tensor and node._members() is None:
            inner.update_(item, non_blocking=non_blocking)
        else:
            write = Copy()
            node._plan_write(write, {name: item}, path_of(key)[:-1])
            write.plan.run(self, non_blocking)
        return self

    def update_(
        self,
        input_dict_or_td: object = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Iterable[object] | None = None,
        **kwargs: object,
    ) -> Self:
        """Copy the values of a mapping or container into existing entries; allowed on a locked container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2)).lock_()
            >>> td.update_({"a": torch.ones(2)})["a"]
            tensor([1., 1.])

        All shapes are checked before the first copy.

        Args:
            input_dict_or_td: as in :meth:`update`. Entries that this container does not have are ignored.
            clone: accepted for symmetry with :meth:`update`, without effect.
            non_blocking: passed to transfers to the device.
            keys_to_update: copy only the entries at these nested keys.

        Returns:
            the same container.

        Raises:
            KeyError: this container has none of the entries.
            ValueError: a value does not broadcast to its entry.
        """
        source = merge_sources(input_dict_or_td, kwargs)
        if source is self:
            return self
        if keys_to_update is not None:
            source = select_from_source(source, keys_to_update)
        queues = non_blocking if self._device is None else self._queues_transfers(non_blocking)
        if not (isinstance(self._entries, dict) and copy_plain(self, source, queues)):
            write = Copy()
            write.refused = self
            self._plan_write(write, source)
            plan = write.plan
            if plan.absent is not None and not plan.targets and not plan.steps:
                raise_no_entry(plan.absent, self)
            plan.run(self, queues)
        if queues:
            self._wait_for_transfers(non_blocking)
        return self

    def copy_(self, tensordict: object = NO_DEFAULT, non_blocking: bool = False, *, src: object = NO_DEFAULT) -> Self:
        """Copy the values of another container into the entries of this one, as :meth:`update_` does.

        Args:
            tensordict: the other container.
            non_blocking: passed to device transfers.
            src: another name of `tensordict`.
        """
        if tensordict is NO_DEFAULT or src is not NO_DEFAULT:
            tensordict = choose_given("copy_", tensordict=tensordict, src=src)
        return self.update_(tensordict, non_blocking=non_blocking)

    # --- removal and renaming ----------------------------------------------------------------------------------------

    def del_(self, key: object) -> Self:
        """Delete the entry at a nested key; returns the same container. `del td[key]` does the same.

        Example:
            >>> from tensordict import TensorDict
            >>> list(TensorDict(a=0, b=1).del_("a").keys())
            ['b']

        Raises:
            KeyError: the container has no such entry.
            RuntimeError: the container is locked.
        """
        path = (key,) if type(key) is str else path_of(key)
        if not isinstance(self._entries, dict) and (members := self._members(or_template=True)) is not None:
            self._delete_from(members, path)
            return self
        parent = self if len(path) == 1 else self._peek(path[:-1])
        within = isinstance(parent, Contract)
        if self._locked or (within and parent._locked):
            raise_locked(f"delete the entry {joined(path)!r}")
        if not within or path[-1] not in parent._entries:
            raise self._make_missing_error(joined(path))
        del parent._entries[path[-1]]
        return self

    def _delete_from(self, members: Sequence[Any], path: Path) -> None:
        """Delete an entry from all members that have it."""
        # A list, because compiled code takes an empty dict view for true.
        having = list(distinct([member for member in members if member._has_anywhere(path)]))
        if self._locked or any(member._locked for member in having):
            raise_locked(f"delete the entry {joined(path)!r}")
        if not having:
            raise self._make_missing_error(joined(path))
        with self._at_once():
            for member in having:
                member.del_(path)

    def pop(self, key: object, default: object = NO_DEFAULT) -> Any:
        """Delete the entry at a nested key and return it. If it is missing, return `default`.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=0)
            >>> td.pop("a"), td.pop("a", "missing"), len(td.keys())
            (tensor(0), 'missing', 0)

        Raises:
            KeyError: the container has no such entry, and `default` is not given.
            RuntimeError: the container is locked.
        """
        path = path_of(key)
        value = self._peek(path)
        if value is None:
            if default is NO_DEFAULT:
                raise self._make_missing_error(joined(path))
            return default
        self.del_(path)
        return value

    def popitem(self) -> tuple[str, Any]:
        """Delete the entry that was added last, and return its name and value (as `dict.popitem` does)."""
        self._refuse_if_locked("pop an entry")
        for name in reversed(list(self._entries)):
            value = self._entries[name]
            del self._entries[name]
            return name, value
        raise KeyError("popitem: the container is empty")

    def clear(self) -> Self:
        """Delete all entries; returns the same container."""
        self._refuse_if_locked("clear it")
        with self._at_once():
            for member in self._members(or_template=True) or ():
                member.clear()
            for name in list(self._entries):
                del self._entries[name]
        return self

    def rename_key_(self: SelfT, old_key: object, new_key: object, safe: bool = False) -> SelfT:
        """Move an entry to another (nested) key; returns the same container.

        Example:
            >>> from tensordict import TensorDict
            >>> list(TensorDict(a=0).rename_key_("a", ("b", "c")).keys(True, True))
            [('b', 'c')]

        Args:
            old_key: the key of the entry.
            new_key: its new key. An existing entry there is replaced.
            safe: raise an error if `new_key` exists.

        Raises:
            KeyError: `old_key` does not exist; or `new_key` exists, with `safe`.
            RuntimeError: the container is locked.
        """
        if self._locked:
            raise_locked(f"rename the entry {old_key!r}")
        old = (old_key,) if type(old_key) is str else path_of(old_key)
        new = (new_key,) if type(new_key) is str else path_of(new_key)
        parent: Any = self if len(old) == 1 else self._peek(old[:-1])
        entries: Any = parent._entries if isinstance(parent, Contract) else {}
        if old[-1] not in entries:
            raise self._make_missing_error(joined(old))
        if safe and self._has_anywhere(new):
            raise KeyError(f"cannot rename {old_key!r}: key {new_key!r} is already present in TensorDict (safe=True)")
        if old == new:
            return self
        in_level = len(old) == len(new) == 1
        if not in_level and new[: len(old)] == old:
            raise KeyError(f"cannot move the entry {old_key!r} into itself, to {new_key!r}")
        if not isinstance(entries, dict):
            if (members := self._members(or_template=True)) is not None:
                self._check_field(new[0])
                for member in members:
                    check_path_through(member, new, new)
                with self._at_once(identity):
                    for member in distinct(members):
                        member.rename_key_(old, new)
                return self
            if isinstance(entries, EntryStore):
                entries.refuse_deletion()
            # Move the stored tensors without reading them.
            entries = parent._writable()
        with self._at_once(), replacing():
            if in_level:
                # The entry stays in the same container, so it needs no checks.
                self._check_field(new[0])
                entries[new[0]] = entries[old[0]]
            else:
                if parent._locked:
                    raise_locked(f"rename the entry {old_key!r}")
                self._write(new, entries[old[-1]])
            del entries[old[-1]]
        return self

    # --- the batch size ----------------------------------------------------------------------------------------------

    def _rebatch(self, size: torch.Size, path: Path = ()) -> None:
        """Change the batch size of this container, and of nested ones whose batch size does not begin with it.

        Every entry is checked before the first change.
        """
        write = Resize()
        self._plan_write(write, size, path)
        for node, new in write.changes:
            resize(node, new)

    def _queues_transfers(self, non_blocking: bool | None) -> bool:
        """Return whether transfers to the device are queued. `_wait_for_transfers` then waits for all of them once."""
        device = self._device
        if non_blocking or device is None or device == CPU:
            return bool(non_blocking)
        # Torch makes a new string here, which takes three times as long as the comparison above.
        return device.type not in ("cpu", "meta")

    def _wait_for_transfers(self, non_blocking: bool | None) -> None:
        """Wait for the queued transfers, unless the caller passed `non_blocking=True`."""
        if not non_blocking and self._queues_transfers(False):
            assert self._device is not None
            wait_for((self._device,))

    # --- shared lookups ----------------------------------------------------------------------------------------------

    def _peek(self, path: Path) -> Any:
        """Return the entry at `path`, or `None`."""
        node: Any = self
        for name in path:
            if not isinstance(node, Contract):
                return None
            node = node._entries.get(name)
        return node

    def _get_existing(self, key: object) -> Any:
        """Return the entry at `key`, or raise a `KeyError`."""
        path = path_of(key)
        value = self._peek(path)
        if value is None:
            raise self._make_missing_error(joined(path))
        return value


def _add_leading_names(node: Any, names: list[str | None], path: Path) -> Any:
    """Return `node` with the dim names of its parent for the leading dims, as a copy if they change."""
    own = node._names or [None] * len(node._batch_size)
    merged = []
    for i, name in enumerate(own):
        outer = names[i] if i < len(names) else None
        if outer is not None and name is not None and outer != name:
            raise RuntimeError(f"entry {joined(path)!r} has dim names {own}, which disagree with its parent's {names}")
        merged.append(outer if name is None else name)
    if merged == own:
        return node
    node = node.copy()
    node._name_tree(as_names(merged, len(merged)))
    return node


def check_path_through(member: Contract, below: Path, path: Path) -> None:
    """Raise if the path `below` leads into a tensor of a member of a lazy stack. The error names `path`."""
    node = member
    for depth, name in enumerate(below[:-1], 1):
        inner = node._node(name)
        if inner is None and name in node._entries:
            raise KeyError(
                f"cannot write {joined(path)!r}: the entry {joined(below[:depth])!r} of a member is a tensor"
            )
        if inner is None:
            return
        node = inner
