"""The mixin of `split`, `unbind`, `stack`, `cat` and their kin, and the functions behind the free `stack` and `cat`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import foreach, makers, ragged, settings
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, Names, Rename, identity, named_error, raise_key_mismatch
from tensordict.core.exceptions import KeyMismatchError, ShapeError
from tensordict.core.keys import Path, entry_of, joined, path_of
from tensordict.core.ragged import REFUSALS
from tensordict.core.shapes import as_dim, as_new_dim, even_lengths, split_lengths, with_dim
from tensordict.ops.dims import ragged_stacks
from tensordict.ops.dims.batch_ops import Cut
from tensordict.ops.dims.gathering import check_out, write_into
from tensordict.ops.dims.naming import check_agreement
from tensordict.ops.entries.locking import Locking, lock_like, raise_locked
from tensordict.ops.entries.reading import NO_DEFAULT, choose_given
from tensordict.ops.entries.writing import Writing
from tensordict.ops.refusals import has_ragged_leaves, retry_ragged_walk

if TYPE_CHECKING:
    from typing_extensions import Self

    _Container = TypeVar("_Container", bound=Contract)

    SelfT = TypeVar("SelfT", bound="Stacking")

_NO_NODES = {False}


class Stacking(Writing):
    """`split`, `unbind`, `stack`, `cat` and their kin."""

    # --- splitting --------------------------------------------------------------------------------------------------

    def split(self: SelfT, split_size: int | Sequence[int] | Tensor, dim: int = 0) -> tuple[SelfT, ...]:
        """Split the container into pieces along a batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(5, 2)}, batch_size=[5])
            >>> [piece.batch_size[0] for piece in td.split(2)]
            [2, 2, 1]

        Args:
            split_size: the length of the pieces (the last piece may be shorter), or a list of their lengths. Either may
                be a tensor of integers.
            dim: the dim to split.

        Returns:
            a tuple of views, which are locked if this container is.

        Raises:
            IndexError: the dim is out of range.
            ValueError: the lengths do not add up, or the length is not positive.
        """
        old = self._batch_size
        dim = as_dim(dim, len(old))
        return self._split_batch(Cut(old, dim, split_lengths(old[dim], split_size)))

    def chunk(self: SelfT, chunks: int, dim: int = 0) -> tuple[SelfT, ...]:
        """Split the container into at most `chunks` pieces of equal length along a batch dim.

        Returns views. The last piece may be shorter.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> [piece.batch_size[0] for piece in TensorDict({"a": torch.zeros(5)}, [5]).chunk(3)]
            [2, 2, 1]
        """
        if chunks <= 0:
            raise ShapeError(f"the number of chunks must be positive, got {chunks}")
        dim = as_dim(dim, len(self._batch_size))
        length = self._batch_size[dim]
        lengths = split_lengths(length, -(-length // chunks)) if length else [0] * chunks
        return self._split_batch(Cut(self._batch_size, dim, lengths))

    def tensor_split(self, indices_or_sections: int | Sequence[int] | Tensor, dim: int = 0) -> tuple[Self, ...]:
        """Split the container into pieces along a batch dim (as :func:`torch.tensor_split`). Returns views.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(5)}, batch_size=[5])
            >>> [piece.batch_size[0] for piece in td.tensor_split(3)]
            [2, 2, 1]
            >>> [piece.batch_size[0] for piece in td.tensor_split([1, 4])]
            [1, 3, 1]

        Args:
            indices_or_sections: the number of pieces, whose lengths differ by one at most; or the positions between
                them.
            dim: the dim to split.
        """
        dim = as_dim(dim, len(self._batch_size))
        length = self._batch_size[dim]
        cuts = indices_or_sections.tolist() if isinstance(indices_or_sections, Tensor) else indices_or_sections
        if isinstance(cuts, int):
            return self._split_batch(Cut(self._batch_size, dim, even_lengths(length, cuts)))
        starts = [0, *[slice(None, cut).indices(length)[1] for cut in cuts]]
        # Positions in descending order give overlapping pieces, as in torch.
        lengths = [max(0, stop - start) for start, stop in itertools.pairwise([*starts, length])]
        return self._split_batch(Cut(self._batch_size, dim, lengths, starts))

    def _split_batch(self, op: Cut) -> tuple[Self, ...]:
        """Run a split. The pieces are locked, memory-mapped or shared if this container is."""
        if not isinstance(self._entries, dict) and self._members() is not None:
            pieces = self._rewrap(self._wrapped_container()._cut_by_members(op))
        elif op.dim == 0 and getattr(self._entries, "cuts_by_index", False):
            at: Any = (
                range(op.old[0])
                if op.lengths is None
                else itertools.starmap(_make_slice, zip(*op.bounds(), strict=True))
            )
            pieces = list(map(self._index, at))
        else:
            sizes, batch_dims = op.sizes(), len(op.old)
            try:
                pieces = self._map_many(op.leaf, sizes, batch_dims, op.rename, op.on_stack)
            except REFUSALS:
                if not has_ragged_leaves(self):
                    raise
                fn = op.make_ragged_leaf()
                pieces = retry_ragged_walk(self, self._map_many, fn, sizes, batch_dims, op.rename, op.on_stack)
        if self._locked and (op.lengths is not None or self._is_memmap or self._is_shared):
            for piece in pieces:
                # A lazy stack of members of this one is locked: as another owner, it would keep them locked.
                if not piece._locked:
                    piece._lock_tree()
                piece._mark_as(self)
        return tuple(pieces)

    def unbind(self: SelfT, dim: int = 0) -> tuple[SelfT, ...]:
        """Split the container into its elements along a batch dim. Returns views, which lack that dim.

        The elements of a memory-mapped or shared container are memory-mapped or shared, and locked, like `td[i]`. Other
        elements are not locked.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(6).view(2, 3)}, batch_size=[2, 3])
            >>> [item["a"].tolist() for item in td.unbind(0)]
            [[0, 1, 2], [3, 4, 5]]
        """
        old = self._batch_size
        dim = as_dim(dim, len(old))
        entries: Any = self._entries
        if not isinstance(entries, dict) and getattr(entries, "dim", None) == dim and entries.containers:
            return self._rewrap(tuple(entries.containers))  # type: ignore[no-any-return]
        return self._split_batch(Cut(old, dim))

    # --- joining ----------------------------------------------------------------------------------------------------

    @classmethod
    def stack(cls, input: Iterable[_Container], dim: int = 0, *, out: object = None) -> _Container:
        """Stack containers of the same keys and shapes along a new batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> tds = [TensorDict({"a": torch.zeros(3, 5)}, batch_size=[3]) for _ in range(2)]
            >>> TensorDict.stack(tds, 1)["a"].shape
            torch.Size([3, 2, 5])

        Args:
            input: the containers.
            dim: the position of the new dim.
            out: a container of the resulting batch size to write into in place. It may be locked. Entries that it lacks
                are skipped, unless it is empty; its other entries do not change.

        Returns:
            a new container, or `out`.

        Raises:
            KeyError: the keys differ. The error names the keys that only some inputs have.
            RuntimeError: the batch sizes, or the shapes of an entry, differ. The error names both and the key.
        """
        return stack_containers(input, dim, out)  # type: ignore[no-any-return]

    @classmethod
    def cat(cls, input: Iterable[_Container], dim: int = 0, *, out: object = None) -> _Container:
        """Concatenate containers of the same keys along an existing batch dim.

        Arguments and errors as for :meth:`stack`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> tds = [TensorDict({"a": torch.zeros(n, 5)}, batch_size=[n]) for n in (1, 2)]
            >>> TensorDict.cat(tds)["a"].shape
            torch.Size([3, 5])
        """
        return cat_containers(input, dim, out)  # type: ignore[no-any-return]

    @classmethod
    def lazy_stack(cls, input: Iterable[Any], dim: int = 0, *, out: object = None, **kwargs: object) -> Any:
        """Stack containers along a new batch dim without copying their entries; see :func:`tensordict.lazy_stack`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> stack = TensorDict.lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))])
            >>> stack[1]["a"].shape
            torch.Size([3])
        """
        return lazy_stack_containers(input, dim, out, **kwargs)

    @classmethod
    def maybe_dense_stack(
        cls,
        input: Iterable[Any] = NO_DEFAULT,
        dim: int = 0,
        out: object = None,
        strict: bool = False,
        *,
        items: Iterable[Any] = NO_DEFAULT,
        **kwargs: object,
    ) -> Any:
        """Stack containers with :meth:`stack` if their keys and shapes agree, and with :meth:`lazy_stack` otherwise.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> tds = [TensorDict(a=torch.zeros(n)) for n in (2, 2, 3)]
            >>> [type(TensorDict.maybe_dense_stack(part)).__name__ for part in (tds[:2], tds)]
            ['TensorDict', 'LazyStackedTensorDict']

        Args:
            input: the containers.
            dim: the new dim.
            out: a container to write the result into.
            strict: accepted for compatibility.
            items: another name of `input`.
            **kwargs: as for :meth:`lazy_stack`.
        """
        return maybe_dense_stack_containers(
            choose_given("maybe_dense_stack", input=input, items=items), dim, out, **kwargs
        )

    def to_lazystack(self, dim: int = 0) -> Self:
        """Convert this container to a lazy stack of its elements along a batch dim. The elements are views.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> stack = TensorDict({"a": torch.zeros(2, 3)}, [2, 3]).to_lazystack(1)
            >>> stack.stack_dim, len(stack.tensordicts), stack.batch_size
            (1, 3, torch.Size([2, 3]))

        Args:
            dim: the stack dim of the result.

        Returns:
            a lazy stack; this container if it is a lazy stack along that dim already.

        Raises:
            IndexError: the dim is out of range.
        """
        names = self._names
        dim = as_dim(dim, len(self._batch_size))
        if self._members() is not None and self.stack_dim == dim:
            return self
        stack = makers.lazy_stack(
            *self.unbind(dim),
            stack_dim=dim,
            stack_dim_name=None if names is None else names[dim],
            batch_size=None if self._batch_size[dim] else self._batch_size[:dim] + self._batch_size[dim + 1 :],
        )
        return self._as_result(stack)  # type: ignore[no-any-return]

    def densify(self, layout: torch.layout = torch.strided) -> Self:
        """Convert every lazy stack in the tree to a `TensorDict`. Leaves of unequal shapes become nested tensors.

        The new `TensorDict` has all entries of all members. A member that lacks an entry contributes an empty leaf.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=torch.zeros(2), b=torch.zeros(1)) for _ in range(3)])
            >>> type(stack.densify()).__name__, stack.densify()["a"].shape
            ('TensorDict', torch.Size([3, 2]))
            >>> stack = lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2), b=torch.ones(2))])
            >>> [row.shape[0] for row in stack.densify()["b"].unbind()]
            [0, 2]

        Args:
            layout: the layout of the nested tensors.

        Returns:
            this container if it contains no lazy stacks. Otherwise a container of the same kind that shares the other
            leaves and contains a `TensorDict` of copies for each lazy stack. The batch size of that `TensorDict` ends
            before the first dim whose length differs between members; its values become lists.

        Raises:
            RuntimeError: a nested tensor of that layout cannot hold the leaves, or the stack dim is not the first dim.
                The error names the entry.
        """
        if self._is_non_tensor:
            return self
        if self._members() is not None:
            return self._rewrap(ragged_stacks.densify_stack(self._wrapped_container(), layout, ()))  # type: ignore[no-any-return]
        entries = {}
        changed = False
        for name, value in self._entries.items():
            dense = value.densify(layout) if type(value) is not Tensor and isinstance(value, Stacking) else value
            changed = changed or dense is not value
            entries[name] = dense
        return self._build(entries, self._batch_size, self._device, self._names) if changed else self

    def stack_tensors(self, *keys: object, out_key: object, dim: int = 0, keep_entries: bool = False) -> Self:
        """Stack entries of this container into a new entry, and drop them.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(()), b=torch.ones(())).stack_tensors("a", "b", out_key="c")
            >>> td["c"].tolist(), "a" in td
            ([0.0, 1.0], False)

        Args:
            *keys: the (nested) keys of the entries. A key may occur several times.
            out_key: the key of the result.
            dim: the position of the new dim in the shape of the result.
            keep_entries: do not drop the entries.

        Returns:
            this container.

        Raises:
            KeyError: an entry does not exist, or `out_key` lies within an entry that is dropped.
            RuntimeError: a container is locked, or shapes do not fit. Nothing changes after an error.
        """
        return self._join_entries(keys, partial(torch.stack, dim=dim), out_key, keep_entries)

    def cat_tensors(self, *keys: object, out_key: object, dim: int = 0, keep_entries: bool = False) -> Self:
        """Concatenate entries of this container into a new entry, and drop them. Arguments as :meth:`stack_tensors`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(1), b=torch.ones(1)).cat_tensors("a", "b", out_key="c")["c"].tolist()
            [0.0, 1.0]
        """
        return self._join_entries(keys, partial(torch.cat, dim=dim), out_key, keep_entries)

    def _join_entries(
        self, keys: tuple[object, ...], join: Callable[[Sequence[object]], Any], out_key: object, keep_entries: bool
    ) -> Self:
        if self._locked:
            raise_locked(f"write the entry {out_key!r}")
        out = path_of(out_key)
        values = [self._get_existing(key) for key in keys]
        gone = {} if keep_entries else {path_of(key): None for key in keys}
        for path in gone:
            if self._find_parent(path)[0]._locked:
                raise_locked(f"drop the entry {joined(path)!r}")
            if path != out and out[: len(path)] == path:
                raise KeyError(
                    f"cannot write {out_key!r} into the entry {joined(path)!r}, which is dropped: use keep_entries=True"
                )
        self.set(out_key, join(values))
        for path in gone:
            if path != out and self._has(path):
                self.del_(path)
        return self


def stack_containers(input: Iterable[Any], dim: int = 0, out: object = None) -> Any:
    """Stack containers along a new batch dim; see :meth:`Stacking.stack`."""
    items = _as_containers(input, "stack")
    if settings.lazy_legacy_possible and settings.lazy_legacy() and out is None:
        return lazy_stack_containers(items, dim)
    first = items[0]
    size = first._batch_size
    sizes = [item._batch_size for item in items]
    if sizes != [size] * len(sizes):
        position, other = next((i, other) for i, other in enumerate(sizes) if other != size)
        raise ShapeError(
            f"stack needs containers of congruent batch sizes, got {list(size)} at position 0 and {list(other)} at "
            f"position {position}"
        )
    dim = as_new_dim(dim, len(size))
    lengths = list(size)
    lengths.insert(dim, len(items))
    new = torch.Size(lengths)
    check_agreement(items, "stack")
    _check_one_class(items, "stack")
    if out is not None:
        return _join_into(out, items, torch.stack, dim, new)
    joint = None if isinstance(first._entries, dict) else _stack_as_wholes(items, dim)
    if joint is not None:
        return joint
    fn = torch.stack if dim == 0 else _bind_dim(torch.stack, dim)
    rename: Rename | None = None
    if first._names is not None and all(other._names == first._names for other in items):

        def rename(names: Names) -> Names:
            return [*names[:dim], None, *names[dim:]]

    try:
        return first._merge(items, fn, new, len(size), rename, (), partial(stack_containers, dim=dim))
    except KeyMismatchError as error:
        # Client programs match these words to fall back to a lazy stack.
        text = str(error)
        words = "The sets of keys in the tensordicts to stack are exclusive: "
        raise KeyMismatchError(text if text.startswith(words) else words + text) from None
    except REFUSALS:
        if not has_ragged_leaves(*items):
            raise
    try:
        on_node = partial(stack_containers, dim=dim)
        return first._merge(items, partial(ragged.stack, dim=dim), new, len(size), rename, (), on_node)
    except (NotImplementedError, ShapeError):
        # A tensor cannot hold ragged rows over two batch dims, but a lazy stack of the containers can.
        return lazy_stack_containers(items, dim)


def check_lazy_cat(input: Iterable[Any], dim: int) -> Sequence[Any]:
    """Return the containers to concatenate lazily. Raises unless they are of one class and `dim` is the first dim."""
    items = _as_containers(input, "lazy_cat")
    _check_one_class(items, "lazy_cat")
    if as_dim(dim, len(items[0]._batch_size)):
        raise ShapeError(
            f"lazy_cat concatenates along dim 0 only, got dim={dim}: use cat, which copies, for other dims"
        )
    return items


def _make_slice(start: int, length: int) -> slice:
    return slice(start, start + length)


def lazy_stack_containers(input: Any, dim: int = 0, out: Any = None, **kwargs: Any) -> Any:
    """Stack containers lazily along a new batch dim; see :func:`tensordict.lazy_stack`."""
    items = _as_containers(input, "lazy_stack")
    stack = makers.lazy_stack(*items, stack_dim=dim, **kwargs)
    return items[0]._as_result(stack) if out is None else write_into(out, stack)


def maybe_dense_stack_containers(input: object, dim: int = 0, out: object = None, **kwargs: object) -> Any:
    """Stack containers, lazily when they have different keys or shapes; see :func:`tensordict.maybe_dense_stack`."""
    items = _as_containers(input, "maybe_dense_stack")
    # Compare only two of them: comparing all would take as long as stacking small leaves.
    if not _are_congruent((items[0], items[-1])):
        return lazy_stack_containers(items, dim, out, **kwargs)
    try:
        return stack_containers(items, dim, out)
    except (KeyError, RuntimeError, TypeError):  # guarded: `_are_congruent` compares the names
        if _are_congruent(items):
            raise
    return lazy_stack_containers(items, dim, out, **kwargs)


def _are_congruent(items: Sequence[Contract]) -> bool:
    """Return whether containers have the same keys, shapes and devices, so that they can be stacked."""
    first = items[0]
    size, mapping = first._batch_size, first._structure()
    names = mapping.keys()
    others = [(other, other._structure()) for other in items[1:]]
    for other, theirs in others:
        if other._batch_size != size or theirs.keys() != names:
            return False
    for name, value in mapping.items():
        if type(value) is not Tensor and isinstance(value, Contract):
            nodes = [value, *[theirs[name] for _, theirs in others]]
            if not all(isinstance(node, Contract) for node in nodes) or not _are_congruent(nodes):
                return False
            continue
        shape, device = first._shape_of(name), value.device
        if value.is_nested or -1 in shape:
            return False
        for other, theirs in others:
            leaf = theirs[name]
            if isinstance(leaf, Contract) or leaf.device != device or other._shape_of(name) != shape:
                return False
    return True


def cat_containers(input: Iterable[Any], dim: int = 0, out: object = None) -> Any:
    """Concatenate containers along a batch dim; see :meth:`Stacking.cat`."""
    items = _as_containers(input, "cat")
    first = items[0]
    size = first._batch_size
    dim = as_dim(dim, len(size))
    sizes = [item._batch_size for item in items]
    # Dynamo cannot trace `sizes.count(size)`.
    if any(other != size for other in sizes):
        for position, theirs in enumerate(sizes):
            if len(theirs) != len(size) or with_dim(theirs, dim, size[dim]) != size:
                raise ShapeError(
                    f"cat along dim {dim} needs containers whose other batch dims agree, got {list(size)} at position "
                    f"0 and {list(theirs)} at position {position}"
                )
    length = sum([theirs[dim] for theirs in sizes])
    check_agreement(items, "cat")
    _check_one_class(items, "cat")
    new = with_dim(size, dim, length)
    if out is not None:
        return _join_into(out, items, torch.cat, dim, new)
    joint = _cat_as_wholes(items, dim)
    if joint is not None:
        return joint
    fn = torch.cat if dim == 0 else _bind_dim(torch.cat, dim)
    try:
        return first._merge(items, fn, new, len(size), identity, (), partial(cat_containers, dim=dim))
    except REFUSALS:
        if not has_ragged_leaves(*items):
            raise
    return first._merge(items, ragged.Cat(dim), new, len(size), identity, (), partial(cat_containers, dim=dim))


def _stack_as_wholes(items: Sequence[Any], dim: int) -> Any:
    """Stack values, or lazy stacks of equal form, whose result is a lazy stack again; `None` for other containers."""
    first = items[0]
    if first._is_non_tensor or not first._members():
        return first._join(items, dim, stacked=True)
    stacks = [item._wrapped_container() for item in items]
    at, size, name = stacks[0].stack_dim, first._batch_size, stacks[0].stack_dim_name
    for stack in stacks:
        if stack._members() is None or stack.stack_dim != at or stack._batch_size != size:
            return None
    inner, after = (dim, at + 1) if dim <= at else (dim - 1, at)
    columns = zip(*[_load(item)._members() for item in items], strict=True)
    out = first._restack([stack_containers(list(column), inner) for column in columns], after)
    if any(stack.stack_dim_name != name for stack in stacks):
        out._wrapped_container().stack_dim_name = None
    return out


def _cat_as_wholes(items: Sequence[Contract], dim: int) -> Any:
    """Concatenate containers by the method of the first class that has one; `None` if they are merged entry by entry.

    One lazy stack among the containers makes the result a lazy stack.
    """
    kinds = list(map(type, items))
    for kind in dict.fromkeys(kinds):
        other: Any = items[kinds.index(kind)]
        plain = other._is_non_tensor or other._members() is None
        joint = other._join(items, dim, stacked=False) if plain else _cat_members(other, items, dim)
        if joint is not None:
            return joint
    return None


def _cat_members(stack: Any, items: Sequence[Contract], dim: int) -> Any:
    """Concatenate containers as a lazy stack like `stack`, one of them. Returns `None` if `stack` has no members.

    Raises:
        ShapeError: the numbers of members differ, and `dim` is not the stack dim.
    """
    at = stack._wrapped_container().stack_dim
    columns = [stack._pieces_of(_load(item)) for item in items]
    if dim == at and any(columns):
        members = [member for column in columns for member in column]
        if stack._members():
            return stack._restack(members)
        name = stack._wrapped_container().stack_dim_name
        return stack._rewrap(makers.lazy_stack(*members, stack_dim=at, stack_dim_name=name))
    if not stack._members():
        return None
    if len(set(map(len, columns))) > 1:
        shown = ", ".join(str(list(item._batch_size)) for item in items)
        raise ShapeError(f"cat along dim {dim} needs lazy stacks of the same number of members, got {shown}")
    inner = dim - (dim > at)
    return stack._restack([cat_containers(list(row), inner) for row in zip(*columns, strict=True)])


def _load(item: Any) -> Any:
    """Load a stored container into memory; return any other unchanged."""
    return item.clone() if item._wrapped_container()._is_in_file else item


def _as_containers(input: Any, what: str) -> Sequence[Contract]:
    """Return the inputs as a sequence of at least one container. Raises for anything else."""
    if not isinstance(input, (list, tuple)):
        input = input.unbind(0) if isinstance(input, Stacking) else tuple(input)
    if not input:
        raise ShapeError(f"{what} needs at least one container, got an empty sequence")
    kinds = list(map(type, input))
    for kind in set(kinds):
        if not issubclass(kind, Contract):
            raise TypeError(
                f"{what} takes containers only, got {kind.__name__} at position {kinds.index(kind)} of the input"
            )
    return input  # type: ignore[no-any-return]


def _check_one_class(items: Sequence[object], what: str, path: Path = ()) -> None:
    """Raise if two of the containers belong to unrelated tensorclasses."""
    kinds: dict[Any, None] = dict.fromkeys(map(type, items))
    if len(kinds) == 1:
        return
    classes = [kind for kind in kinds if getattr(kind, "_is_tensorclass", False) and not kind._is_non_tensor]
    for other in classes[1:]:
        if not issubclass(other, classes[0]) and not issubclass(classes[0], other):
            raise TypeError(
                f"{entry_of(path)}{what} cannot join instances of the tensorclasses {classes[0].__name__} and "
                f"{other.__name__}: convert them to one class first, with {classes[0].__name__}.from_tensordict(...) "
                "or to_tensordict()"
            )


def _join_into(out: Any, items: Sequence[object], join: Any, dim: int, size: torch.Size) -> Any:
    """Write the stack or concatenation of `items` into `out`. All checks come before the first write."""
    check_out(out, size)
    writes: list[tuple[Path, list[Tensor], Tensor]] = []
    missing: list[tuple[Any, str, Any]] = []
    stacks: list[tuple[Any, Any]] = []
    _plan_join(out, items, join, dim, (), writes, missing, stacks)
    with internals.as_plain():
        for path, column, target in writes:
            try:
                join(column, dim, out=target)
            except RuntimeError as error:
                raise named_error(error, path) from error
    for node, name, value in missing:
        if isinstance(value, Locking):
            lock_like(node, value)
        node._entries[name] = value
    for stack, joint in stacks:
        stack.update(joint, inplace=True)
    return out


def _plan_join(
    out: Any,
    items: Sequence[Any],
    join: Any,
    dim: int,
    prefix: Path,
    writes: list[tuple[Path, list[Tensor], Tensor]],
    missing: list[tuple[Any, str, Any]],
    stacks: list[tuple[Any, Any]],
) -> None:
    """Check and list the writes of `_join_into`. Entries that `out` lacks are skipped, unless it is empty.

    Args:
        out: the container to write into.
        items: the containers to join.
        join: `torch.stack` or `torch.cat`.
        dim: the dim to join along.
        prefix: the path of `out`.
        writes: receives the path, the leaves to join, and the existing tensor for the result.
        missing: receives the container, the name and the value of each entry to add.
        stacks: receives each lazy stack in `out` with the container to copy into its members.
    """
    _check_one_class(items, join.__name__, prefix)
    if out._pair_members(out) is not None:
        stacks.append((out, _join_column(join, list(items), dim, prefix)))
        return
    mappings = [item._entries for item in items]
    if list(map(len, mappings)).count(len(mappings[0])) != len(mappings):
        raise_key_mismatch(mappings, prefix)
    targets = out._entries
    for name in mappings[0]:
        path = (*prefix, name)
        try:
            column = [mapping[name] for mapping in mappings]
        except KeyError:  # guarded: the error lists the names in all of them
            raise_key_mismatch(mappings, prefix)
        target = targets.get(name)
        if target is None and targets:
            out._check_field(name)
            continue
        together = column if target is None else [*column, target]
        # Comparing the types first takes a third of the time of asking each value whether it is a container.
        kinds = set(map(type, together))
        nodes = _NO_NODES if foreach.are_plain(kinds) else {issubclass(kind, Contract) for kind in kinds}
        if len(nodes) > 1:
            raise TypeError(f"entry {joined(path)!r} is a container in one place and a tensor in another")
        if target is None:
            if out._locked:
                raise_locked(f"add the entry {joined(path)!r}, which out lacks")
            out._check_field(name)
            joint = _join_column(join, column, dim, path)
            missing.append((out, name, out._admit(joint, path)))
        elif True in nodes and any(node._is_non_tensor or isinstance(node, Tensor) for node in together):
            missing.append((out, name, out._admit(_join_column(join, column, dim, path), path)))
        elif True in nodes:
            _plan_join(target, column, join, dim, path, writes, missing, stacks)
        else:
            shape = _find_joined_shape(column, join, dim, path)
            if target.shape != shape:
                raise ShapeError(
                    f"entry {joined(path)!r} of out has shape {list(target.shape)}, but the result has {list(shape)}"
                )
            writes.append((path, column, target))


def _bind_dim(join: Any, dim: int) -> Callable[[list[Any]], Any]:
    """Return a function that calls `torch.stack` or `torch.cat` along one dim."""

    def fn(column: list[Any]) -> Any:
        result = join(column, dim)
        if type(result) is not Tensor and result.is_nested:
            # Torch joins ragged leaves with regular dims to tensors that fail when they are read.
            return ragged.stack(column, dim) if join is torch.stack else ragged.Cat(dim)(column)
        return result

    return fn


def _join_column(join: Any, column: list[Any], dim: int, path: Path) -> Any:
    if isinstance(column[0], Contract):
        return stack_containers(column, dim) if join is torch.stack else cat_containers(column, dim)
    try:
        return join(column, dim)
    except RuntimeError as error:
        raise named_error(error, path) from error


def _find_joined_shape(column: list[Tensor], join: object, dim: int, path: Path) -> torch.Size:
    """Return the shape of the stack or concatenation of leaves. Raises if their shapes do not fit."""
    try:
        shapes = [value.shape for value in column]
    except RuntimeError:
        shapes = list(map(ragged.shape_of, column))  # a strided nested tensor lacks `shape`
    first = shapes[0]
    expected = shapes if join is torch.stack else [with_dim(shape, dim, first[dim]) for shape in shapes]
    if expected != [first] * len(expected):
        odd = next(shape for shape, fit in zip(shapes, expected, strict=True) if fit != first)
        raise ShapeError(f"entry {joined(path)!r} has shapes that do not fit: {list(first)} and {list(odd)}")
    if join is torch.stack:
        lengths = list(first)
        lengths.insert(dim, len(column))
        return torch.Size(lengths)
    return with_dim(first, dim, sum(shape[dim] for shape in shapes))
