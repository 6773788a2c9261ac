"""The contract: the dozen primitives that a container supplies, and the structural walks written on top of them.

Every public method of the package is written once, in `ops/`, on what this file declares. A container is done when it
supplies the abstract primitives; everything else follows.
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
from tensordict.core.errors import KeyMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self

Names = list["str | None"]
LeafFn = Callable[[Any], Any]
Rename = Callable[[Names], Names]
Size = torch.Size
# A container, where a function gives back one of the class that it was given.
ContainerT = TypeVar("ContainerT", bound="Contract")


class Backing(NamedTuple):
    """What the leaves of a container were put in, all of them, since it was last unlocked.

    is_memmap: files, or memory that is mapped as they are.
    is_shared: memory that other processes see.
    memmap_prefix: the folder that the container was saved to or loaded from.
    consolidated: the one storage that all leaves lie in, and how many there were then.
    """

    is_memmap: bool = False
    is_shared: bool = False
    memmap_prefix: pathlib.Path | None = None
    consolidated: tuple[Tensor, int] | None = None


NOT_BACKED = Backing()


def _backing_field(name: str) -> Any:
    """One of the fields of `_backing`, as an attribute of the container."""

    def read(container: Contract) -> Any:
        return getattr(container._backing, name)

    def write(container: Any, value: Any) -> None:
        container._backing = container._backing._replace(**{name: value})

    return property(read, write)


def state_of(holder: str, name: str, read: Callable[[Any], Any]) -> Any:
    """An attribute of a container that is that of another one, which it has as its attribute `holder`.

    `read` is written out for each: `operator.attrgetter` would take 50 ns instead of 63, but `torch.compile` cannot
    trace it.
    """

    def write(self: object, value: object) -> None:
        setattr(getattr(self, holder), name, value)

    def delete(self: object) -> None:
        delattr(getattr(self, holder), name)

    return property(read, write, delete)


class EntryStore:
    """The entries of a container that are kept elsewhere than in a dict: a mapping that makes them when they are read.

    It also says what there is without making it.
    """

    # The container whose entries these are, in another form.
    source: Any = None
    # Whether the container is cut along its first dim piece by piece, by indexing it.
    cuts_by_index: bool = False
    # Whether tensors that are read are views of what is kept, so that what is written into them is written there.
    shares: bool = False

    def structure(self) -> Mapping[str, Any]:
        """The names with nested containers, and any tensor in the place of a leaf."""
        raise NotImplementedError

    def structure_with_values(self) -> Mapping[str, Any]:
        """Give the structure with the values that are no tensors, which a result with other leaves keeps."""
        return self.structure()

    def writable(self) -> Mapping[str, Any]:
        """The entries for those who write into them; see `Contract._writable`."""
        return self  # type: ignore[return-value]

    def shared(self) -> Mapping[str, Any]:
        """The entries for those who make another container over them, with `Contract._subset`."""
        return self.writable()

    def on_read(self, fn: Callable[..., Any], position: int, keep: bool) -> Callable[..., Any]:
        """A function of leaves as it is called on `writable`; see `Contract._on_read`."""
        return fn

    def together(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None] | None:
        """A block in which what `fn` reads of the leaves, and what is written, goes in as few requests as can be.

        `None` where that makes no difference, as in such a block.
        """
        return None

    def write_back(self, restored: object, leaves: set[Any]) -> set[Any]:
        """Write what can be written into the leaves of these keys, from a container that has them, too; their keys."""
        return set()

    def refuse_deletion(self) -> None:
        """Raise an error if entries cannot be deleted; for what writes before it deletes."""

    def fact(self) -> str:
        """What to show of it beside the entries, such as `"op=view(6)"`; empty when there is nothing."""
        return ""

    def node(self, name: str) -> Any:
        """The nested container of this name, `None` when there is none."""
        value = self.get(name)  # type: ignore[attr-defined]
        return value if isinstance(value, Contract) else None

    def members(self, or_template: bool = False) -> Sequence[Any] | None:
        """The containers that a lazy stack consists of; see `Contract._members`."""
        return None


class Contract:
    """What a container of tensors supplies; `isinstance(value, Contract)` tells a node from a leaf.

    State that most containers leave at its default lives on the class, or in slots, so that building a container costs
    a few attribute writes. A class with other needs (a view, a file) may define any of these as properties.
    """

    # The attributes that the instances of a class have in slots. The others are in `__dict__`, where they differ from
    # what the class says.
    _slots: ClassVar[tuple[str, ...]] = ()
    _batch_size: torch.Size
    _device: torch.device | None = None
    _names: Names | None = None
    _locked: bool = False
    # Whether the entries are those of another container, which `underlying` gives.
    _is_over_another: bool = False
    # Whether the entries are in a file, or in other containers, and stay there.
    _is_in_file: bool = False
    # The names that read as `None` where there is no entry.
    _optional: frozenset[str] = frozenset()
    # Whether the leaves are parameters: they stay in memory, and writes in place go past autograd.
    _holds_parameters: bool = False
    # Whether a lazy stack was locked itself, and not its members one by one.
    _sealed: bool = False
    _lock_owners: list[weakref.ref[Any]] | None = None
    _backing: Backing = NOT_BACKED
    # Whether the class stands for a value that is no tensor.
    _is_non_tensor: bool = False
    # Whether the container is a tensor too, and so a leaf to all walks: an `UnbatchedTensor`.
    _is_tensor: bool = False
    _undo: tuple[Any, ...] | None = None
    _is_memmap: bool = _backing_field("is_memmap")
    _is_shared: bool = _backing_field("is_shared")
    _memmap_prefix: pathlib.Path | None = _backing_field("memmap_prefix")
    _consolidated: tuple[Tensor, int] | None = _backing_field("consolidated")

    if TYPE_CHECKING:
        # What families of operations call of each other, and of lazy stacks and values.
        @property
        def stack_dim(self) -> int: ...
        def copy(self) -> Self: ...
        def empty(self, recurse: bool = ...) -> Self: ...
        def exclude(self, *keys: object) -> Self: ...

        # Of tensors too, with other arguments.
        clone: Callable[..., Any]
        expand: Callable[..., Any]
        select: Callable[..., Any]
        to: Callable[..., Any]
        unbind: Callable[..., Any]

        def _has(self, path: tuple[str, ...]) -> bool: ...
        def _index(self, index: object) -> Self: ...
        def _peek(self, path: tuple[str, ...]) -> Any: ...
        def _placed(self, fn: LeafFn, device: torch.device) -> Self: ...
        def _unwrapped(self) -> Any: ...

    # --- primitives ---------------------------------------------------------------------------------------------
    # The entries of this level, name -> leaf or node. Reading gives what is stored (or made on reading), writing takes
    # what has been checked already (shape, device, lock). An attribute, because every access goes through it: a method
    # call in its place would cost 45 ns. A class whose entries are no dict makes it a property over its own mapping.
    _entries: MutableMapping[str, Any]

    def _structure(self) -> Mapping[str, Any]:
        """The entries for those who only ask what there is: names, which are containers, and these containers.

        A container that makes its leaves when they are read gives any tensor in the place of a leaf.
        """
        entries = self._entries
        return entries.structure() if type(entries) is not dict and isinstance(entries, EntryStore) else entries

    def _writable(self) -> Mapping[str, Any]:
        """The entries for those who may write into them, as operands of what is done in place.

        A container that makes its leaves when they are read gives, where it can, tensors that write to where it keeps
        them.
        """
        entries = self._entries
        return entries.writable() if type(entries) is not dict and isinstance(entries, EntryStore) else entries

    def _shared(self) -> Mapping[str, Any]:
        """The entries for those who make another container over them, with `_subset`; nothing is read for that."""
        entries = self._entries
        return entries.shared() if type(entries) is not dict and isinstance(entries, EntryStore) else entries

    def _on_read(self, fn: Callable[..., Any], position: int = 0, keep: bool = False) -> Callable[..., Any]:
        """A function of leaves as the walks call it on `_writable`, whose argument at `position` is the leaf.

        A container over a file has it called on what is read there; with `keep`, a leaf that the function gives back
        stays the one in the file.
        """
        entries = self._entries
        return entries.on_read(fn, position, keep) if isinstance(entries, EntryStore) else fn

    def _shape_of(self, name: str) -> torch.Size:
        """The shape of the entry of this name, with -1 for dims in which what it is made of differs."""
        entries = self._entries
        if type(entries) is dict or (members := self._members(or_template=True)) is None:
            value = self._writable()[name] if type(entries) is not dict else entries[name]
            return ragged.shape_of(value) if isinstance(value, Tensor) else value.shape
        shapes = [member._shape_of(name) for member in members]
        if len({len(shape) for shape in shapes}) > 1:
            return torch.Size((-1,))
        # Compared one by one: Dynamo takes the members of a set for constants, and would compile anew for each size.
        dims = [sizes[0] if all(size == sizes[0] for size in sizes) else -1 for sizes in zip(*shapes, strict=True)]
        at: int = self.stack_dim
        dims.insert(at, self._batch_size[at])
        return torch.Size(dims)

    def _node(self, name: str) -> Any:
        """The nested container of this name, `None` when there is none."""
        entries = self._entries
        if type(entries) is not dict and isinstance(entries, EntryStore):
            return entries.node(name)
        value = entries.get(name)
        return value if isinstance(value, Contract) else None

    def _members(self, or_template: bool = False) -> Sequence[Any] | None:
        """The containers that a lazy stack consists of, `None` for any other container.

        Args:
            or_template: for a stack without members, give the container that knows which entries these would have.
        """
        entries = self._entries
        return entries.members(or_template) if type(entries) is not dict and isinstance(entries, EntryStore) else None

    def _at_once(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None]:
        """A block in which what is read and written goes in as few requests as can be; see `EntryStore.together`."""
        entries = self._entries
        block = entries.together(fn) if type(entries) is not dict and isinstance(entries, EntryStore) else None
        return nullcontext() if block is None else block

    def _restacked(self, members: Sequence[Any], dim: int | None = None) -> Self:
        """The lazy stack of what was made of each of `_members(or_template=True)`, along `dim` or the dim of this one.

        An operation that a stack does member by member is `self._restacked([m.op() for m in members])`.
        """
        raise NotImplementedError

    def _check_field(self, name: str) -> None:
        """Refuse the name of a new entry: none, unless the class declares those that there can be."""

    def _build(
        self,
        entries: dict[str, Any],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Names | None,
    ) -> Self:
        """A new container of this kind over `entries`, which it takes over and does not check."""
        raise NotImplementedError

    def _build_many(
        self,
        pieces: Iterable[dict[str, Any]],
        sizes: Sequence[torch.Size],
        device: torch.device | None,
        names: Names | None,
    ) -> list[Self]:
        """One `_build` per piece, each with its batch size."""
        return [self._build(entries, size, device, names) for entries, size in zip(pieces, sizes, strict=True)]

    def _subset(self, entries: dict[str, Any], device: torch.device | None) -> Self:
        """A container over some of the entries of this one as `_writable` gives them, or what they are on a device."""
        return self._build(entries, self._batch_size, device, self._names)

    # --- leaves -------------------------------------------------------------------------------------------------------
    # The tensors that hold the memory: what is written into them is written into the container. A lazy stack gives
    # those of its members one after the other, a container over a file tensors that stand for those in the file.

    def _leaves(self) -> list[Any]:
        """All leaves of the tree, in the order of `keys(True, True)`."""
        found: list[Any] = []
        self._gather(found)
        return found

    def _gather(self, found: list[Any]) -> None:
        """Append all leaves of the tree, in the order in which `_map` goes."""
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

    def _walk(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The (path, leaf) pairs of the tree; those of a lazy stack are the paths in its members."""
        mapping: Mapping[str, Any] = self._entries
        if type(mapping) is not dict and isinstance(mapping, EntryStore):
            if (members := mapping.members(False)) is not None:
                for member in members:
                    yield from member._walk(prefix)
                return
            mapping = mapping.writable()
        for name, value in mapping.items():
            if type(value) is not Tensor and isinstance(value, Contract):
                yield from value._walk((*prefix, name))
            else:
                yield (*prefix, name), value

    def _leaves_of(self, name: str) -> list[Any]:
        """The leaves of one entry."""
        if (members := self._members()) is not None:
            return [leaf for member in members for leaf in member._leaves_of(name)]
        value = self._writable()[name]
        if not isinstance(value, Contract):
            return [value]
        found: list[Any] = []
        value._gather(found)
        return found

    def _children(self) -> Iterable[Any]:
        """The entries of this level, tensors too; the members of a container that consists of such."""
        entries = self._entries
        if type(entries) is dict:
            return entries.values()
        members = self._members(or_template=True)
        return self._structure().values() if members is None else members

    def _mark(self, memmap: bool = False, shared: bool = False) -> None:
        """Say of the whole tree that it is memory-mapped, or in shared memory."""
        old = self._backing
        self._backing = old._replace(is_memmap=memmap or old.is_memmap, is_shared=shared or old.is_shared)
        for child in self._children():
            if type(child) is not Tensor and isinstance(child, Contract):
                child._mark(memmap, shared)

    def _mark_as(self, source: Contract) -> None:
        """Say of a view, which is locked, what `source` says of itself: that it is memory-mapped, or shared."""
        if source._is_memmap or source._is_shared:
            self._mark(source._is_memmap, source._is_shared)

    # --- structural walks -----------------------------------------------------------------------------------------
    # All take the new batch size of the root and `batch_dims`, the number of batch dims of the root that it replaces: a
    # nested container, whose batch size begins with its parent's, gets `size + its own batch size past batch_dims`.
    #
    # The arguments are no object that describes the walk: making one takes 5 % of `td[0]`. Entries in a dict are walked
    # at once; what else there is, members or leaves that are made when they are read, is asked for behind that test.

    def _map(
        self,
        fn: LeafFn,
        size: torch.Size | None = None,
        batch_dims: int = 0,
        rename: Rename | None = None,
        on_node: LeafFn | None = None,
    ) -> Self:
        """The same structure with every leaf replaced by `fn(leaf)`.

        Args:
            fn: called once per leaf.
            size: the root's new batch size; `None` when `fn` leaves the batch dims as they are.
            batch_dims: the number of batch dims that `size` replaces.
            rename: maps the names of the replaced dims to the new ones; `None` drops the names (with `size`).
            on_node: does to a container what `fn` does to a leaf, for nested lazy stacks; without it their leaves are
                stacked for `fn`.
        """
        mapping = self._entries
        on_leaf = fn
        if type(mapping) is not dict:
            if isinstance(mapping, EntryStore):
                if (block := mapping.together(fn)) is not None:
                    with block:
                        return self._map(fn, size, batch_dims, rename, on_node)
                if (members := mapping.members(True)) is not None:
                    if size is None:
                        return self._restacked([member._map(fn) for member in members])
                    return self._dense()._map(fn, size, batch_dims, rename) if on_node is None else on_node(self)
            mapping, on_leaf = dict(self._writable().items()), self._on_read(fn)
        if is_flat(mapping):
            entries = dict(zip(mapping, map(on_leaf, mapping.values())))
        else:
            # No comprehension: its frame would halve the depth of nesting that Python's recursion limit leaves.
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
            None if self._names is None else self._renamed(len(size), batch_dims, rename),
        )

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        """The same structure with every leaf replaced by the next of `leaves`, in the order in which `_map` goes."""
        mapping: Mapping[str, Any] = self._entries
        if type(mapping) is not dict:
            if isinstance(mapping, EntryStore) and (block := mapping.together()) is not None:
                with block:
                    return self._rebuilt(leaves)
            if (members := self._members()) is not None:
                if not members:
                    return self.copy()
                return self._restacked([member._rebuilt(leaves) for member in members])
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
        """As `_map`, for an `fn` that cuts a leaf in `len(sizes)` pieces: one container per piece."""
        mapping = self._entries
        on_leaf = fn
        if type(mapping) is not dict:
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
        names = None if self._names is None or not sizes else self._renamed(len(sizes[0]), batch_dims, rename)
        if len(own) != batch_dims:
            sizes = [size + own[batch_dims:] for size in sizes]
        if columns:
            # The names and the row are of one length by construction; checking it again would cost 30 ns a piece.
            keys = list(mapping)
            pieces = [dict(zip(keys, row)) for row in zip(*columns, strict=True)]
        else:
            pieces = [{} for _ in sizes]
        return self._build_many(pieces, sizes, self._device, names)

    def _map_with(self, fn: Callable[[Any, Tensor], Any], tensor: Tensor) -> Self:
        """The same structure with every leaf replaced by `fn(leaf, its part of the tensor)`.

        Args:
            fn: takes the leaf, and the tensor as a view with dims of size 1 behind, so that the two broadcast.
            tensor: lies over the batch dims, or over the first of them, and broadcasts to them.
        """
        if (members := self._members()) is not None:
            if not members and tensor.ndim > self._wrapped_container().stack_dim:
                return self._dense()._map_with(fn, tensor)
            members = self._members(or_template=True) or ()
            return self._restacked([m._map_with(fn, part) for m, part in zip(members, self._parts(tensor))])
        spread, on_leaf = ByNdim(tensor), self._on_read(fn)
        entries: dict[str, Any] = {}
        for name, value in self._writable().items():
            if type(value) is not Tensor and isinstance(value, Contract):
                entries[name] = value._map_with(fn, tensor)
            else:
                entries[name] = on_leaf(value, spread[value.dim()])
        return self._build(entries, self._batch_size, self._device, self._names)

    def _paired(self, other: Contract) -> Sequence[tuple[Any, Any]] | None:
        """The members of a lazy stack with what belongs to each of `other`, a container of the same batch size.

        `None` for a container that has no members, and so is to be paired with `other` itself. What is made of the
        pairs goes to `_restacked`.
        """
        if type(self._entries) is dict or not (members := self._members()) or self._is_non_tensor:
            return None
        return list(zip(members, self._pieces_of(other), strict=True))

    def _pieces_of(self, other: Any) -> Sequence[Any]:
        """A container of the batch size of this lazy stack, in the pieces that belong to the members."""
        dim = self._wrapped_container().stack_dim
        other = other._wrapped_container()
        theirs = other._members()
        return theirs if theirs is not None and other.stack_dim == dim else other.unbind(dim)  # type: ignore[no-any-return]

    def _parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """The part of a tensor over the batch, or over its first dims, that belongs to each member of a lazy stack."""
        dim = self._wrapped_container().stack_dim
        if tensor.ndim <= dim:
            return [tensor] * len(self._members(or_template=True) or ())
        return tensor.expand(self._batch_size[: tensor.ndim]).unbind(dim)

    def _joined(self, items: Sequence[Any], dim: int, stacked: bool) -> Any:
        """The stack or concatenation of containers, this one among them; `None` where it is made entry by entry."""
        return None

    def _as_result(self, stack: object) -> Any:
        """The lazy stack of containers of which this is the first, in the form in which it is read and returned."""
        return stack

    def _dense(self, hooked: bool = False) -> Self:
        """This container with its entries in a dict: without a lazy stack at its root, read from its file.

        `hooked` calls the `hook_out` of the stack on its leaves.
        """
        return self if type(self._entries) is dict else self._map(unchanged)

    def _wrapped_container(self) -> Any:
        """The container that holds the entries, where this one wraps another."""
        return self

    def _rewrap(self, result: object) -> Any:
        """What `_wrapped_container` gave, in a wrapper as this one, where it is a container."""
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
        """The structure of `self` with every leaf replaced by `fn([this leaf of each of the others])`.

        `others` holds all the inputs, `self` among them, and must agree on the keys. `on_node` does to containers what
        `fn` does to leaves, for nested ones that are no mappings of leaves, or of different classes.
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
                    if type(value._entries) is not dict or list(map(type, column)).count(type(value)) != len(column):
                        merged = _merged_at_once(column, (*path, name), fn, on_node)
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
            None if self._names is None else self._renamed(len(size), batch_dims, rename),
        )

    def _renamed(self, count: int, batch_dims: int, rename: Rename | None) -> Names | None:
        """The names after `batch_dims` leading dims became `count` dims."""
        if self._names is None:
            return None
        head: Names = [None] * count if rename is None else rename(self._names[:batch_dims])
        names = head + self._names[batch_dims:]
        return None if names.count(None) == len(names) else names


def unchanged(value: object) -> Any:
    """Leaves, or names, as they are."""
    return value


class Clones(itertools.chain[Any]):
    """The clones of leaves as `_rebuilt` takes them: containers that hold a value know it is to be copied too."""


class ByNdim(dict[int, Tensor]):
    """A tensor over the batch dims with dims of size 1 behind, made once per number of dims that the leaves have."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def __missing__(self, ndim: int) -> Tensor:
        shape = (*self.tensor.shape, *[1] * (ndim - self.tensor.ndim))
        made = self[ndim] = self.tensor.reshape(shape)
        return made


def underlying(container: Contract) -> Any:
    """The container that has the entries: what a wrapper or a lazy view is over; of others, the container itself."""
    if not container._is_over_another:
        return container
    entries = container._entries
    if type(entries) is not dict and isinstance(entries, EntryStore) and entries.source is not None:
        return underlying(entries.source)
    return container._wrapped_container()


def distinct(members: Sequence[ContainerT]) -> Iterable[ContainerT]:
    """Each of them once: one container may be several members of a lazy stack."""
    if not torch.compiler.is_compiling():
        return {id(member): member for member in members}.values()
    # `id` would bind a graph to these containers.
    found: list[ContainerT] = []
    for member in members:
        for other in found:
            if other is member:
                break
        else:
            found.append(member)
    return found


def is_node(value: object) -> bool:
    """Whether a value holds entries: a container that is no leaf at the same time, as an `UnbatchedTensor` is."""
    # Half the time of `isinstance(value, Tensor)`, which asks the metaclass.
    return isinstance(value, Contract) and not value._is_tensor


def is_flat(mapping: Mapping[str, Any]) -> bool:
    """Whether no entry is a container; about 25 ns an entry."""
    for value in mapping.values():  # noqa: SIM110 (a generator inside all() would double the cost)
        if type(value) is not Tensor and isinstance(value, Contract):
            return False
    return True


def _merged_at_once(
    column: list[Any], path: tuple[str, ...], fn: Callable[[list[Any]], Any], on_node: Callable[[list[Any]], Any] | None
) -> Any:
    """What is made of nested containers that are not merged entry by entry; `None` for those that are.

    Raises:
        TypeError: a container, a tensor or a value stands beside something else.
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
    """The device that all the containers share, or `None`; stacked ones on the CPU have the index of the first one."""
    devices = [container._device for container in containers]
    first = devices[0]
    if devices.count(first) == len(devices):
        return first
    return first if stacked and all(device is not None and device.type == "cpu" for device in devices) else None


def named_error(error: Exception, path: tuple[str, ...]) -> Exception:
    """`error` again with the nested key in front of its message; an error that names its key already is kept."""
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
    """Raise the error of containers that should have the same keys, naming those that only some have.

    Args:
        mappings: the entries of each.
        path: where these containers are.
        instead: what could be done, beside selecting the common keys.
    """
    union = set().union(*mappings)
    common = set(mappings[0]).intersection(*mappings)
    odd = sorted(union - common)
    where = f" under {'.'.join(path)!r}" if path else ""
    # Among many, as the steps of an episode, the odd one is hard to find.
    lacking = next((number, key) for number, mapping in enumerate(mappings) for key in odd if key not in mapping)
    first = f" (number {lacking[0]} of {len(mappings)} lacks {lacking[1]!r})" if len(mappings) > 2 else ""
    raise KeyMismatchError(
        f"the containers must have the same keys{where}; only some of them have {odd}{first}. "
        f"Select the common keys first, or {instead}"
    )
