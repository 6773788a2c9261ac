"""The contract: the dozen primitives that a container supplies, and the structural walks written on top of them.

`ops/` implements every public method once, on top of this file. A container that supplies the abstract primitives is
complete.
"""

from __future__ import annotations

import itertools
import pathlib  # these two so that `typing.get_type_hints` can read the annotations of subclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.exceptions import KeyMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self

# mypy takes this name for `True`.
MYPY = False

Names = list["str | None"]
Device = torch.device | None
LeafFn = Callable[[Any], Any]
Rename = Callable[[Names], Names]
Size = torch.Size
# For functions that return a container of the same class as their argument.
ContainerT = TypeVar("ContainerT", bound="Contract")


class Backing(NamedTuple):
    """The memory that holds all leaves of a container. Unlocking the container resets it.

    is_memmap: the leaves are mapped from files, or lie in memory mapped in the same way.
    is_shared: other processes can see the memory.
    memmap_prefix: the folder that the container was saved to or loaded from.
    consolidated: the single storage that contains all leaves, and the number of leaves at that time.
    """

    is_memmap: bool = False
    is_shared: bool = False
    memmap_prefix: pathlib.Path | None = None
    consolidated: tuple[Tensor, int] | None = None


NOT_BACKED = Backing()


def _backing_field(name: str) -> Any:
    """Return a property that reads and writes one field of `_backing`."""

    def read(container: Contract) -> Any:
        return getattr(container._backing, name)

    def write(container: Any, value: Any) -> None:
        container._backing = container._backing._replace(**{name: value})

    return property(read, write)


def state_of(holder: str, name: str, read: Callable[[Any], Any]) -> Any:
    """Return a property that forwards to the same attribute of the container in the attribute `holder`.

    Each caller writes out `read`. `operator.attrgetter` would take 50 ns instead of 63, but `torch.compile` cannot
    trace it.
    """

    def write(self: object, value: object) -> None:
        setattr(getattr(self, holder), name, value)

    def delete(self: object) -> None:
        delattr(getattr(self, holder), name)

    return property(read, write, delete)


class EntryStore:
    """The base of mappings that make entries when they are read, for containers whose entries are not in a dict.

    It also describes the entries without making them.
    """

    # The container that these entries come from, for views of another container.
    source: Any = None
    # True if pieces along the first dim are cut by indexing, one at a time.
    cuts_by_index: bool = False
    # True if the tensors that are read are views of the stored data, so that writing into them changes it.
    shares: bool = False

    def structure(self) -> Mapping[str, Any]:
        """Return the names with their nested containers. Any tensor may stand for a leaf."""
        raise NotImplementedError

    def structure_with_values(self) -> Mapping[str, Any]:
        """Return the structure together with non-tensor values, for results that replace only the tensors."""
        return self.structure()

    def writable(self) -> Mapping[str, Any]:
        """Return the entries for callers that write into them; see `Contract._writable`."""
        return self  # type: ignore[return-value]

    def share_entries(self) -> Mapping[str, Any]:
        """Return the entries for callers that build another container from them with `Contract._subset`."""
        return self.writable()

    def on_read(self, fn: Callable[..., Any], position: int, keep: bool) -> Callable[..., Any]:
        """Adapt a function of leaves so that it can be called on `writable`; see `Contract._on_read`."""
        return fn

    def together(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None] | None:
        """Return a block that bundles the reads of `fn` and all writes into as few requests as possible.

        Returns `None` where bundling makes no difference, for example inside such a block.
        """
        return None

    def write_back(self, restored: object, leaves: set[Any]) -> set[Any]:
        """Write the leaves of these keys from `restored` into the stored ones, if possible. Returns their keys."""
        return set()

    def refuse_deletion(self) -> None:
        """Raise an error if entries cannot be deleted. Operations that write before they delete call this first."""

    def preview(self, name: str) -> str:
        """Return a text that describes values that `structure` leaves out, or an empty string. It may read a few."""
        return ""

    def fact(self) -> str:
        """Return a note for `repr`, such as `"op=view(6)"`, or an empty string."""
        return ""

    def node(self, name: str) -> Any:
        """Return the nested container of this name, or `None`."""
        value = self.get(name)  # type: ignore[attr-defined]
        return value if isinstance(value, Contract) else None

    def members(self, or_template: bool = False) -> Sequence[Any] | None:
        """Return the members of a lazy stack; see `Contract._members`."""
        return None


class Contract:
    """The interface of every container. `isinstance(value, Contract)` separates containers from plain tensors.

    State that most containers leave at its default is stored on the class, or in slots, so that building a container
    takes only a few attribute writes. A class with other needs (a view, a file) may define any of these as properties.
    """

    # The attributes that instances keep in slots. All others are in `__dict__`, if they differ from the class
    # attribute.
    _slots: ClassVar[tuple[str, ...]] = ()
    _batch_size: torch.Size
    _device: torch.device | None = None
    _names: Names | None = None
    _locked: bool = False
    # True if the entries belong to another container, which `underlying` returns.
    _is_over_another: bool = False
    # True if the entries stay in a file or in other containers.
    _is_in_file: bool = False
    # The names of optional entries. Reading one that is missing returns `None` instead of raising `KeyError`.
    _optional: frozenset[str] = frozenset()
    # True if the leaves are parameters: they stay in memory, and in-place writes bypass autograd.
    _holds_parameters: bool = False
    # True if a lazy stack was locked as a whole, and not through its members.
    _sealed: bool = False
    _lock_owners: list[weakref.ref[Any]] | None = None
    _backing: Backing = NOT_BACKED
    # True if the container holds a non-tensor value instead of entries.
    _is_non_tensor: bool = False
    # True for a container that is also a tensor, and a leaf to all walks: `UnbatchedTensor`.
    _is_tensor: bool = False
    _undo: tuple[Any, ...] | None = None
    # True for a lazy stack that `torch.vmap` made dense, because it maps over the stack dim.
    _was_stacked: bool = False
    # For a container that `torch.vmap` maps over the stack dim of a lazy stack: a `DenseCopy`.
    _dense_copy: Any = None
    _is_memmap: bool = _backing_field("is_memmap")
    _is_shared: bool = _backing_field("is_shared")
    _memmap_prefix: pathlib.Path | None = _backing_field("memmap_prefix")
    _consolidated: tuple[Tensor, int] | None = _backing_field("consolidated")

    if MYPY:
        # Methods that the mixins of `ops/` call on each other, on lazy stacks and on values. They are hidden from Jedi,
        # which does not order base classes as Python does, and would find these before the methods themselves.
        @property
        def stack_dim(self) -> int: ...
        def copy(self) -> Self: ...
        def empty(self, recurse: bool = ...) -> Self: ...
        def exclude(self, *keys: object) -> Self: ...

        # Tensors have these methods too, with other arguments.
        clone: Callable[..., Any]
        expand: Callable[..., Any]
        select: Callable[..., Any]
        to: Callable[..., Any]
        unbind: Callable[..., Any]

        def _has(self, path: tuple[str, ...]) -> bool: ...
        def _index(self, index: object) -> Self: ...
        def _peek(self, path: tuple[str, ...]) -> Any: ...
        def _place_on(self, fn: LeafFn, device: torch.device) -> Self: ...
        def _unwrap_value(self) -> Any: ...

    # --- primitives ---------------------------------------------------------------------------------------------
    # The entries of this level: name -> leaf or node. Reading returns the stored object, or makes one. Written objects
    # have been checked (shape, device, lock). This is an attribute because every access uses it: a method call would
    # take 45 ns more. A class without a dict of entries makes it a property over its own mapping.
    _entries: MutableMapping[str, Any]

    def _structure(self) -> Mapping[str, Any]:
        """Return the names and the nested containers, for callers that do not need the leaves.

        A container that makes its leaves on reading returns any tensor as a stand-in for a leaf.
        """
        entries = self._entries
        return entries.structure() if type(entries) is not dict and isinstance(entries, EntryStore) else entries

    def _writable(self) -> Mapping[str, Any]:
        """Return the entries for callers that may write into them, such as in-place operations.

        A container that makes its leaves on reading returns tensors that write through to its storage, if it can.
        """
        entries = self._entries
        return entries.writable() if type(entries) is not dict and isinstance(entries, EntryStore) else entries

    def _share_entries(self) -> Mapping[str, Any]:
        """Return the entries without reading any, for callers that pass some of them to `_subset`."""
        entries = self._entries
        return entries.share_entries() if type(entries) is not dict and isinstance(entries, EntryStore) else entries

    def _on_read(self, fn: Callable[..., Any], position: int = 0, keep: bool = False) -> Callable[..., Any]:
        """Adapt a function of leaves so that walks can call it on `_writable`; its argument at `position` is the leaf.

        A container over a file then calls it with the data that was read. With `keep`, a leaf that the function returns
        unchanged stays in the file.
        """
        entries = self._entries
        return entries.on_read(fn, position, keep) if isinstance(entries, EntryStore) else fn

    def _shape_of(self, name: str) -> torch.Size:
        """Return the shape of an entry, with -1 for dims that differ between the members of a lazy stack."""
        entries = self._entries
        if isinstance(entries, dict) or (members := self._members(or_template=True)) is None:
            value = self._writable()[name] if not isinstance(entries, dict) else entries[name]
            return ragged.shape_of(value) if isinstance(value, Tensor) else value.shape
        shapes = [member._shape_of(name) for member in members]
        if len({len(shape) for shape in shapes}) > 1:
            return torch.Size((-1,))
        # Compared one by one: Dynamo treats the items of a set as constants, and would recompile for each size.
        dims = [sizes[0] if all(size == sizes[0] for size in sizes) else -1 for sizes in zip(*shapes, strict=True)]
        at: int = self.stack_dim
        dims.insert(at, self._batch_size[at])
        return torch.Size(dims)

    def _node(self, name: str) -> Any:
        """Return the nested container of this name, or `None`."""
        entries = self._entries
        if type(entries) is not dict and isinstance(entries, EntryStore):
            return entries.node(name)
        value = entries.get(name)
        return value if isinstance(value, Contract) else None

    def _members(self, or_template: bool = False) -> Sequence[Any] | None:
        """Return the members of a lazy stack; `None` for any other container.

        Args:
            or_template: for a stack without members, return a container that has the keys that members would have.
        """
        entries = self._entries
        return entries.members(or_template) if type(entries) is not dict and isinstance(entries, EntryStore) else None

    def _at_once(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None]:
        """Return a block that bundles reads and writes into as few requests as possible; see `EntryStore.together`."""
        entries = self._entries
        block = entries.together(fn) if type(entries) is not dict and isinstance(entries, EntryStore) else None
        return nullcontext() if block is None else block

    def _restack(self, members: Sequence[Any], dim: int | None = None) -> Self:
        """Build a lazy stack of new members, one for each of `_members(or_template=True)`, along `dim` or `stack_dim`.

        An operation that applies to each member is `self._restack([m.op() for m in members])`.
        """
        raise NotImplementedError

    def _check_field(self, name: str) -> None:
        """Raise an error if a class that declares its fields has no field of this name."""

    def _build(
        self,
        entries: dict[str, Any],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Names | None,
    ) -> Self:
        """Build a container of this kind over `entries`, without checks or copies."""
        raise NotImplementedError

    def _build_many(
        self,
        pieces: Iterable[dict[str, Any]],
        sizes: Sequence[torch.Size],
        device: torch.device | None,
        names: Names | None,
    ) -> list[Self]:
        """Call `_build` for each piece with its batch size."""
        return [self._build(entries, size, device, names) for entries, size in zip(pieces, sizes, strict=True)]

    def _subset(self, entries: dict[str, Any], device: torch.device | None) -> Self:
        """Build a container over some entries from `_writable`, or over their copies on a device."""
        return self._build(entries, self._batch_size, device, self._names)

    # --- leaves -------------------------------------------------------------------------------------------------------
    # The tensors that hold the memory: writing into them changes the container. A lazy stack returns the leaves of one
    # member after the other. A container over a file returns tensors that stand for the stored ones.

    def _leaves(self) -> list[Any]:
        """Return all leaves of the tree, in the order of `keys(True, True)`."""
        found: list[Any] = []
        self._gather(found)
        return found

    def _gather(self, found: list[Any]) -> None:
        """Append all leaves of the tree to `found`, in the order of `_map`."""
        mapping: Mapping[str, Any] = self._entries
        if type(mapping) is not dict and isinstance(mapping, EntryStore):
            if (block := mapping.together()) is not None:
                with block:
                    return self._gather(found)
            if (members := mapping.members(False)) is not None:
                for member in members:
                    member._gather(found)
                return
            mapping = mapping.writable()
        for value in mapping.values():
            if type(value) is not Tensor and isinstance(value, Contract):
                value._gather(found)
            else:
                found.append(value)

    def _walk(self, prefix: tuple[str, ...] = (), or_template: bool = False) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the (path, leaf) pairs of the tree. The leaves of a lazy stack have their paths inside the members.

        With `or_template`, the walk includes the templates of stacks without members, as `_map` does.
        """
        mapping: Mapping[str, Any] = self._entries
        if type(mapping) is not dict and isinstance(mapping, EntryStore):
            if (members := mapping.members(or_template)) is not None:
                for member in members:
                    yield from member._walk(prefix, or_template)
                return
            mapping = mapping.writable()
        for name, value in mapping.items():
            if type(value) is not Tensor and isinstance(value, Contract):
                yield from value._walk((*prefix, name), or_template)
            else:
                yield (*prefix, name), value

    def _leaves_of(self, name: str) -> list[Any]:
        """Return the leaves of one entry."""
        if (members := self._members()) is not None:
            return [leaf for member in members for leaf in member._leaves_of(name)]
        value = self._writable()[name]
        if not isinstance(value, Contract):
            return [value]
        found: list[Any] = []
        value._gather(found)
        return found

    def _children(self) -> Iterable[Any]:
        """Return the entries of this level, including tensors; for a lazy stack, its members."""
        entries = self._entries
        if isinstance(entries, dict):
            return entries.values()
        members = self._members(or_template=True)
        return self._structure().values() if members is None else members

    def _mark(self, memmap: bool = False, shared: bool = False) -> None:
        """Mark the whole tree as memory-mapped, or as shared memory."""
        old = self._backing
        self._backing = old._replace(is_memmap=memmap or old.is_memmap, is_shared=shared or old.is_shared)
        for child in self._children():
            if type(child) is not Tensor and isinstance(child, Contract):
                child._mark(memmap, shared)

    def _mark_as(self, source: Contract) -> None:
        """Mark a locked view as memory-mapped or shared, like `source`."""
        if source._is_memmap or source._is_shared:
            self._mark(source._is_memmap, source._is_shared)

    # --- structural walks -----------------------------------------------------------------------------------------
    # All walks take the new batch size of the root, and `batch_dims`, the number of the root's batch dims that it
    # replaces. The batch size of a nested container begins with its parent's, so it becomes `size +
    # own_size[batch_dims:]`.
    #
    # The arguments are separate because building one object for them would take 5 % of `td[0]`. Dicts of entries are
    # walked directly. Members, and leaves that are made on reading, are handled only after that test.

    def _map(
        self,
        fn: LeafFn,
        size: torch.Size | None = None,
        batch_dims: int = 0,
        rename: Rename | None = None,
        on_node: LeafFn | None = None,
    ) -> Self:
        """Replace every leaf by `fn(leaf)`, in the same structure.

        Args:
            fn: called once per leaf.
            size: the root's new batch size; `None` if `fn` keeps the batch dims.
            batch_dims: the number of batch dims that `size` replaces.
            rename: maps the names of the replaced dims to the new ones; `None` drops the names (with `size`).
            on_node: does to a nested lazy stack what `fn` does to a leaf. Without it, the leaves of the stack are
                stacked for `fn`, or with the same batch dims, `fn` gets the leaves of the members.
        """
        mapping = self._entries
        on_leaf = fn
        if not isinstance(mapping, dict):
            if isinstance(mapping, EntryStore):
                if (block := mapping.together(fn)) is not None:
                    with block:
                        return self._map(fn, size, batch_dims, rename, on_node)
                if (members := mapping.members(True)) is not None:
                    if on_node is not None:
                        return on_node(self)  # type: ignore[no-any-return]
                    if size is None:
                        return self._restack([member._map(fn) for member in members])
                    return self._dense()._map(fn, size, batch_dims, rename)
            mapping, on_leaf = dict(self._writable().items()), self._on_read(fn)
        if is_flat(mapping):
            entries = dict(zip(mapping, map(on_leaf, mapping.values())))
        else:
            # No comprehension: its frame would halve the nesting depth that Python's recursion limit allows.
            entries = {}
            for name, value in mapping.items():
                if isinstance(value, Contract):
                    entries[name] = value._map(fn, size, batch_dims, rename, on_node)
                else:
                    entries[name] = on_leaf(value)
        if size is None:
            return self._build(entries, self._batch_size, self._device, self._names)
        own = self._batch_size
        return self._build(
            entries,
            size if len(own) == batch_dims else size + own[batch_dims:],
            self._device,
            None if self._names is None else self._rename_dims(len(size), batch_dims, rename),
        )

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        """Replace every leaf by the next of `leaves`, in the order of `_map`."""
        mapping: Mapping[str, Any] = self._entries
        if not isinstance(mapping, dict):
            if isinstance(mapping, EntryStore) and (block := mapping.together()) is not None:
                with block:
                    return self._rebuilt(leaves)
            if (members := self._members()) is not None:
                if not members:
                    return self.copy()
                return self._restack([member._rebuilt(leaves) for member in members])
            mapping = mapping.structure_with_values() if isinstance(mapping, EntryStore) else mapping
        if is_flat(mapping):
            entries = dict(zip(mapping, leaves))
        else:
            entries = {}
            for name, value in mapping.items():
                entries[name] = value._rebuilt(leaves) if isinstance(value, Contract) else next(leaves)
        return self._build(entries, self._batch_size, self._device, self._names)

    def _map_many(
        self,
        fn: Callable[[Any], Sequence[Any]],
        sizes: Sequence[torch.Size],
        batch_dims: int,
        rename: Rename | None,
        on_node: Callable[[Any], Sequence[Any]] | None = None,
    ) -> list[Self]:
        """Like `_map`, for an `fn` that cuts a leaf into `len(sizes)` pieces. Returns one container per piece."""
        mapping = self._entries
        on_leaf = fn
        if not isinstance(mapping, dict):
            if self._members() is not None:
                return (
                    self._dense()._map_many(fn, sizes, batch_dims, rename) if on_node is None else list(on_node(self))
                )
            if isinstance(mapping, EntryStore) and (block := mapping.together(fn)) is not None:
                with block:
                    return self._map_many(fn, sizes, batch_dims, rename, on_node)
            mapping, on_leaf = dict(self._writable().items()), self._on_read(fn)
        columns: list[Sequence[Any]] = (
            [
                value._map_many(fn, sizes, batch_dims, rename, on_node)
                if isinstance(value, Contract)
                else on_leaf(value)
                for value in mapping.values()
            ]
            if not is_flat(mapping)
            else list(map(on_leaf, mapping.values()))
        )
        own = self._batch_size
        names = None if self._names is None or not sizes else self._rename_dims(len(sizes[0]), batch_dims, rename)
        if len(own) != batch_dims:
            sizes = [size + own[batch_dims:] for size in sizes]
        if columns:
            # The keys and the rows have equal lengths by construction. Checking again would take 30 ns a piece.
            keys = list(mapping)
            pieces = [dict(zip(keys, row)) for row in zip(*columns, strict=True)]
        else:
            pieces = [{} for _ in sizes]
        return self._build_many(pieces, sizes, self._device, names)

    def _map_with(self, fn: Callable[[Any, Tensor], Any], tensor: Tensor) -> Self:
        """Replace every leaf by `fn(leaf, part)`, where `part` is the matching part of `tensor`.

        Args:
            fn: takes the leaf, and the tensor with trailing dims of size 1, so that both broadcast.
            tensor: covers the batch dims, or the first of them, and broadcasts to them.
        """
        if (members := self._members()) is not None:
            if not members and tensor.ndim > self._wrapped_container().stack_dim:
                return self._dense()._map_with(fn, tensor)
            members = self._members(or_template=True) or ()
            return self._restack([m._map_with(fn, part) for m, part in zip(members, self._parts(tensor))])
        spread, on_leaf = ByNdim(tensor), self._on_read(fn)
        entries: dict[str, Any] = {}
        for name, value in self._writable().items():
            if type(value) is not Tensor and isinstance(value, Contract):
                entries[name] = value._map_with(fn, tensor)
            else:
                entries[name] = on_leaf(value, spread[value.dim()])
        return self._build(entries, self._batch_size, self._device, self._names)

    def _pair_members(self, other: Contract) -> Sequence[tuple[Any, Any]] | None:
        """Pair the members of a lazy stack with the matching parts of `other`, a container of the same batch size.

        Returns `None` for a container without members, which is paired with `other` as a whole. `_restack` builds a
        stack from the results.
        """
        if isinstance(self._entries, dict) or not (members := self._members()) or self._is_non_tensor:
            return None
        return list(zip(members, self._pieces_of(other), strict=True))

    def _pieces_of(self, other: Any) -> Sequence[Any]:
        """Split a container of the same batch size into pieces that match the members of this lazy stack."""
        dim = self._wrapped_container().stack_dim
        other = other._wrapped_container()
        theirs = other._members()
        return theirs if theirs is not None and other.stack_dim == dim else other.unbind(dim)  # type: ignore[no-any-return]

    def _parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """Split a tensor over the batch, or over its first dims, into the parts of the members of this lazy stack."""
        dim = self._wrapped_container().stack_dim
        if tensor.ndim <= dim:
            return [tensor] * len(self._members(or_template=True) or ())
        return tensor.expand(self._batch_size[: tensor.ndim]).unbind(dim)

    def _join(self, items: Sequence[Any], dim: int, stacked: bool) -> Any:
        """Stack or concatenate containers, including this one. Returns `None` if this is done entry by entry."""
        return None

    def _as_result(self, stack: object) -> Any:
        """Wrap a lazy stack whose first member is `self` in this class."""
        return stack

    def _dense(self, hooked: bool = False) -> Self:
        """Return this container with its entries in a dict: lazy stacks are stacked, files are read.

        With `hooked`, the leaves of the stack go through its `hook_out`.
        """
        return self if isinstance(self._entries, dict) else self._map(identity)

    def _wrapped_container(self) -> Any:
        """Return the container that holds the entries; a wrapper returns the one inside."""
        return self

    def _rewrap(self, result: object) -> Any:
        """Wrap the result of an operation on `_wrapped_container` like this container, if it is a container."""
        return result

    def _merge(
        self,
        others: Sequence[Contract],
        fn: Callable[[list[Any]], Any],
        size: torch.Size,
        batch_dims: int,
        rename: Rename | None,
        path: tuple[str, ...] = (),
        on_node: Callable[[Sequence[Any]], Any] | None = None,
    ) -> Self:
        """Merge containers: each leaf of the result is `fn(leaves)` over the matching leaves of all containers.

        `others` holds all inputs, including `self`, and they must have the same keys. `on_node` merges nested
        containers that cannot be merged entry by entry: lazy stacks, values, and containers of different classes.
        """
        mappings = [other._entries for other in others]
        if type(mappings[0]) is not dict:
            dense: list[Any] = [other._dense() for other in others]
            if dense[0] is not self:
                return dense[0]._merge(dense, fn, size, batch_dims, rename, path, on_node)  # type: ignore[no-any-return]
            others, mappings = dense, [other._entries for other in dense]
        count = len(mappings[0])
        entries: dict[str, Any] = {}
        if list(map(len, mappings)).count(count) != len(mappings):
            raise_key_mismatch(mappings, path)
        try:
            for name, value in mappings[0].items():
                column = [mapping[name] for mapping in mappings]
                if type(value) is not Tensor and isinstance(value, Contract):
                    merged = None
                    alike = list(map(type, column)).count(type(value)) == len(column)
                    if not alike or not isinstance(value._entries, dict):
                        merged = _merge_whole(column, (*path, name), fn, on_node)
                    if merged is None:
                        merged = value._merge(column, fn, size, batch_dims, rename, (*path, name), on_node)
                    entries[name] = merged
                else:
                    entries[name] = fn(column)
        except KeyMismatchError:
            raise
        except KeyError:  # guarded: the error lists the names in all of them
            raise_key_mismatch(mappings, path)
        except (RuntimeError, TypeError) as error:
            raise named_error(error, (*path, name)) from error
        own = self._batch_size
        return self._build(
            entries,
            size if len(own) == batch_dims else size + own[batch_dims:],
            merged_device(others, len(size) > batch_dims),
            None if self._names is None else self._rename_dims(len(size), batch_dims, rename),
        )

    def _rename_dims(self, count: int, batch_dims: int, rename: Rename | None) -> Names | None:
        """Return the names after the first `batch_dims` dims became `count` dims."""
        if self._names is None:
            return None
        head: Names = [None] * count if rename is None else rename(self._names[:batch_dims])
        names = head + self._names[batch_dims:]
        return None if names.count(None) == len(names) else names


def differ_in_keys(containers: Iterable[Any]) -> bool:
    """Return whether some of the containers have entries that others lack, at any level."""
    return len({frozenset(container._wrapped_container().keys(True)) for container in containers}) > 1


def identity(value: object) -> Any:
    """Return a leaf, or names, unchanged."""
    return value


class Clones(itertools.chain[Any]):
    """Marks the leaves for `_rebuilt` as clones, so that containers of a value copy the value, too."""


class Filler:
    """A function for `_map` that adds elements to leaves. Entries that are no tensors get the value `None` there."""

    def __call__(self, leaf: Any) -> Any:
        raise NotImplementedError


class ByNdim(dict[int, Tensor]):
    """Caches a tensor over the batch dims with trailing dims of size 1, for each number of dims of the leaves."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def __missing__(self, ndim: int) -> Tensor:
        shape = (*self.tensor.shape, *[1] * (ndim - self.tensor.ndim))
        made = self[ndim] = self.tensor.reshape(shape)
        return made


def underlying(container: Contract) -> Any:
    """Return the container that holds the entries of a wrapper or lazy view; any other container is returned itself."""
    if not container._is_over_another:
        return container
    entries = container._entries
    if type(entries) is not dict and isinstance(entries, EntryStore) and entries.source is not None:
        return underlying(entries.source)
    return container._wrapped_container()


def distinct(members: Sequence[ContainerT]) -> Iterable[ContainerT]:
    """Return each member once: the same container may occur several times in a lazy stack."""
    if not torch.compiler.is_compiling():
        return {id(member): member for member in members}.values()
    # In compiled code, `id` would tie the graph to these very objects.
    found: list[ContainerT] = []
    for member in members:
        for other in found:
            if other is member:
                break
        else:
            found.append(member)
    return found


def is_node(value: object) -> bool:
    """Return whether a value is a container and not also a tensor, as an `UnbatchedTensor` is."""
    # This takes half the time of `isinstance(value, Tensor)`, which calls the metaclass.
    return isinstance(value, Contract) and not value._is_tensor


def is_flat(mapping: Mapping[str, Any]) -> bool:
    """Return whether no entry is a container; about 25 ns an entry."""
    for value in mapping.values():  # noqa: SIM110 (a generator inside all() would double the cost)
        if type(value) is not Tensor and isinstance(value, Contract):
            return False
    return True


def _merge_whole(
    column: list[Any], path: tuple[str, ...], fn: Callable[[list[Any]], Any], on_node: Callable[[list[Any]], Any] | None
) -> Any:
    """Merge nested containers as a whole; `None` if they have to be merged entry by entry.

    Raises:
        TypeError: containers, tensors and values are mixed.
    """
    first = column[0]
    alike = list(map(type, column)).count(type(first)) == len(column)
    if not alike:
        for other in column:
            if not isinstance(other, Contract):
                raise TypeError(f"entry {path!r} is a container in one input and a tensor in another")
        for kind, is_kind in _ENTRY_KINDS:
            odd = [other for other in column if not is_kind(other)]
            if len(odd) not in (0, len(column)):
                key = path[0] if len(path) == 1 else path
                raise TypeError(f"entry {key!r} is {kind} in one input and a {type(odd[0]).__name__} in another")
    if isinstance(first, Tensor):
        return fn(column) if on_node is None else on_node(column)
    if on_node is None:
        return None
    if first._is_non_tensor or any(other._members() is not None for other in column):
        return on_node(column)
    wrapped = not alike and any(other._wrapped_container() is not other for other in column)
    return on_node(column) if wrapped else None


_ENTRY_KINDS: list[tuple[str, Callable[[Any], bool]]] = [
    ("a value that is no tensor", lambda value: value._is_non_tensor),
    ("an UnbatchedTensor", lambda value: isinstance(value, Tensor)),
]


def merged_device(containers: Sequence[Contract], stacked: bool = False) -> torch.device | None:
    """Return the device that all containers share, or `None`. Stacked CPU containers get the first one's device."""
    devices = [container._device for container in containers]
    first = devices[0]
    if devices.count(first) == len(devices):
        return first
    return first if stacked and all(device is not None and device.type == "cpu" for device in devices) else None


def named_error(error: Exception, path: tuple[str, ...]) -> Exception:
    """Prefix the message of an error with the nested key. An error that names its key already is returned unchanged."""
    message = str(error)
    if message.startswith("entry "):
        return error
    key = path[0] if len(path) == 1 else path
    if "expected device" in message or "same device" in message:
        message += " Bring all of it to one device first, as with td.to(device)"
    elif "tensor to be equal size" in message:
        message += "; lazy_stack keeps them as they are"
    return type(error)(f"entry {key!r}: {message}")


def raise_key_mismatch(
    mappings: Sequence[Mapping[str, Any]], path: tuple[str, ...], instead: str = "use a lazy stack"
) -> NoReturn:
    """Raise the error of containers whose keys differ. The message names the keys that only some of them have.

    Args:
        mappings: the entries of each container.
        path: the path of these containers.
        instead: advice, besides selecting the common keys.
    """
    union = set().union(*mappings)
    common = set(mappings[0]).intersection(*mappings)
    odd = sorted(union - common)
    where = f" under {'.'.join(path)!r}" if path else ""
    # Among many containers, such as the steps of an episode, the deviating one is hard to find, so name it.
    lacking = next((number, key) for number, mapping in enumerate(mappings) for key in odd if key not in mapping)
    first = f" (number {lacking[0]} of {len(mappings)} lacks {lacking[1]!r})" if len(mappings) > 2 else ""
    raise KeyMismatchError(
        f"the containers must have the same keys{where}; only some of them have {odd}{first}. "
        f"Select the common keys first, or {instead}"
    )
