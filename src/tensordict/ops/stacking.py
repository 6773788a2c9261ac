"""Cutting a container in pieces along a batch dim, and joining containers along one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.contract import Contract, Names, Rename, named_error, raise_key_mismatch
from tensordict.errors import ShapeError
from tensordict.keys import Path, joined
from tensordict.ops.locking import raise_locked
from tensordict.ops.writing import Writing
from tensordict.shapes import as_dim, as_new_dim, even_lengths, split_lengths, with_dim

if TYPE_CHECKING:
    from typing_extensions import Self


class Stacking(Writing):
    """`split`, `unbind` and their kin, `stack` and `cat`."""

    # --- cutting ----------------------------------------------------------------------------------------------------

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Views of the pieces along a batch dim.

        Args:
            split_size: the length of the pieces, the last of which may be shorter; or the list of all their lengths.
            dim: the dim to cut.

        Returns:
            a tuple of containers, locked if this one is.

        Raises:
            IndexError: the dim is out of range.
            ValueError: the lengths do not add up, or the length is not positive.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(5, 2)}, batch_size=[5])
            >>> [piece.batch_size[0] for piece in td.split(2)]
            [2, 2, 1]
        """
        dim = as_dim(dim, len(self._batch_size))
        return self._pieces(split_lengths(self._batch_size[dim], split_size), dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """Views of at most `chunks` pieces of equal length along a batch dim, the last possibly shorter.

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
        return self._pieces(split_lengths(length, -(-length // chunks)) if length else [0] * chunks, dim)

    def tensor_split(self, indices_or_sections: int | Sequence[int] | Tensor, dim: int = 0) -> tuple[Self, ...]:
        """Views of the pieces along a batch dim (as :func:`torch.tensor_split`).

        Args:
            indices_or_sections: the number of pieces, whose lengths differ by one at most; or the positions to cut at.
            dim: the dim to cut.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(5)}, batch_size=[5])
            >>> [piece.batch_size[0] for piece in td.tensor_split(3)]
            [2, 2, 1]
            >>> [piece.batch_size[0] for piece in td.tensor_split([1, 4])]
            [1, 3, 1]
        """
        dim = as_dim(dim, len(self._batch_size))
        length = self._batch_size[dim]
        cuts = indices_or_sections.tolist() if isinstance(indices_or_sections, Tensor) else indices_or_sections
        if isinstance(cuts, int):
            return self._pieces(even_lengths(length, cuts), dim)
        bounds = [0, *[slice(None, cut).indices(length)[1] for cut in cuts], length]
        lengths = [max(0, stop - start) for start, stop in itertools.pairwise(bounds)]
        # Cuts that go backwards give pieces that overlap, which only tensor_split itself makes.
        return self._pieces(lengths, dim, methodcaller("tensor_split", tuple(cuts), dim))

    def _pieces(
        self, lengths: list[int], dim: int, fn: Callable[[Any], Sequence[Any]] | None = None
    ) -> tuple[Self, ...]:
        size = self._batch_size
        by_length = {length: with_dim(size, dim, length) for length in set(lengths)}
        pieces = self._map_many(
            methodcaller("split_with_sizes", lengths, dim) if fn is None else fn,
            [by_length[length] for length in lengths],
            len(size),
            _same_names,
        )
        if self._locked:
            for piece in pieces:
                piece._lock_tree()
        return tuple(pieces)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Views of every element along a batch dim, which they no longer have. They are not locked.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(6).view(2, 3)}, batch_size=[2, 3])
            >>> [item["a"].tolist() for item in td.unbind(0)]
            [[0, 1, 2], [3, 4, 5]]
        """
        rest = list(self._batch_size)
        lead = len(rest)
        dim = as_dim(dim, lead)
        sizes = rest.pop(dim) * [torch.Size(rest)]
        pieces = self._map_many(methodcaller("unbind", dim), sizes, lead, lambda names: names[:dim] + names[dim + 1 :])
        return tuple(pieces)

    # --- joining ----------------------------------------------------------------------------------------------------

    @classmethod
    def stack(cls, input: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
        """Stack containers of the same keys and shapes along a new batch dim.

        Args:
            input: the containers.
            dim: where the new dim goes.
            out: a container of the resulting batch size to write into, in place, which may be locked; entries that it
                lacks are added, others that it has are left alone.

        Returns:
            a new container, or `out`.

        Raises:
            KeyError: the keys differ; the odd ones are named.
            RuntimeError: the batch sizes or the shapes of an entry differ; both, and the key, are named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> tds = [TensorDict({"a": torch.zeros(3, 5)}, batch_size=[3]) for _ in range(2)]
            >>> TensorDict.stack(tds, 1)["a"].shape
            torch.Size([3, 2, 5])
        """
        return stack_containers(input, dim, out)

    @classmethod
    def cat(cls, input: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
        """Concatenate containers of the same keys along an existing batch dim; arguments and errors as `stack`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> tds = [TensorDict({"a": torch.zeros(n, 5)}, batch_size=[n]) for n in (1, 2)]
            >>> TensorDict.cat(tds)["a"].shape
            torch.Size([3, 5])
        """
        return cat_containers(input, dim, out)

    def stack_tensors(self, *keys: Any, out_key: Any, dim: int = 0, keep_entries: bool = False) -> Self:
        """Stack entries of this container into a new one and drop them.

        Args:
            *keys: the (nested) keys of the entries.
            out_key: where the result goes.
            dim: the new dim in the result's shape.
            keep_entries: keep the entries.

        Returns:
            the same container.

        Raises:
            KeyError: an entry does not exist; nothing has changed then.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(()), b=torch.ones(())).stack_tensors("a", "b", out_key="c")
            >>> td["c"].tolist(), "a" in td
            ([0.0, 1.0], False)
        """
        return self._join_entries(keys, partial(torch.stack, dim=dim), out_key, keep_entries)

    def cat_tensors(self, *keys: Any, out_key: Any, dim: int = 0, keep_entries: bool = False) -> Self:
        """Concatenate entries of this container into a new one and drop them; arguments as :meth:`stack_tensors`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(1), b=torch.ones(1)).cat_tensors("a", "b", out_key="c")["c"].tolist()
            [0.0, 1.0]
        """
        return self._join_entries(keys, partial(torch.cat, dim=dim), out_key, keep_entries)

    def _join_entries(
        self, keys: tuple[Any, ...], join: Callable[[list[Any]], Any], out_key: Any, keep_entries: bool
    ) -> Self:
        if self._locked:
            raise_locked(f"write the entry {out_key!r}")
        values = []
        for key in keys:
            try:
                values.append(self._find(key))
            except KeyError:
                raise self._missing(key) from None
        joint = join(values)
        self.set(out_key, joint)
        if not keep_entries:
            for key in keys:
                if self._peek((key,) if isinstance(key, str) else key) is not joint:
                    self.del_(key)
        return self


def stack_containers(input: Sequence[Any], dim: int = 0, out: Any = None) -> Any:
    """Stack containers along a new batch dim; see :meth:`Stacking.stack`."""
    items = _checked(input, "stack")
    first = items[0]
    size = first._batch_size
    sizes = [item._batch_size for item in items]
    if sizes.count(size) != len(sizes):
        position, other = next((i, other) for i, other in enumerate(sizes) if other != size)
        raise ShapeError(
            f"stack needs containers of the same batch size, got {list(size)} at position 0 and {list(other)} at "
            f"position {position}"
        )
    dim = as_new_dim(dim, len(size))
    lengths = list(size)
    lengths.insert(dim, len(items))
    new = torch.Size(lengths)
    if out is not None:
        return _join_into(out, items, torch.stack, dim, new)
    fn = torch.stack if dim == 0 else partial(torch.stack, dim=dim)
    rename: Rename | None = None
    if first._names is not None and all(other._names == first._names for other in items):

        def rename(names: Names) -> Names:
            return [*names[:dim], None, *names[dim:]]

    return first._merge(items, fn, new, len(size), rename)


def cat_containers(input: Sequence[Any], dim: int = 0, out: Any = None) -> Any:
    """Concatenate containers along a batch dim; see :meth:`Stacking.cat`."""
    items = _checked(input, "cat")
    first = items[0]
    size = first._batch_size
    dim = as_dim(dim, len(size))
    length = 0
    for position, other in enumerate(items):
        theirs = other._batch_size
        if theirs != size and (len(theirs) != len(size) or with_dim(theirs, dim, size[dim]) != size):
            raise ShapeError(
                f"cat along dim {dim} needs containers whose other batch dims agree, got {list(size)} at position 0 "
                f"and {list(theirs)} at position {position}"
            )
        length += theirs[dim]
    new = with_dim(size, dim, length)
    if out is not None:
        return _join_into(out, items, torch.cat, dim, new)
    return first._merge(items, torch.cat if dim == 0 else partial(torch.cat, dim=dim), new, len(size), _same_names)


def _checked(input: Any, what: str) -> Sequence[Any]:
    """The inputs as a sequence of containers, one at least."""
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


def _join_into(out: Any, items: Sequence[Any], join: Any, dim: int, size: torch.Size) -> Any:
    """Write the stack or concatenation of `items` into `out`; every check comes before the first write."""
    if not isinstance(out, Writing):
        raise TypeError(f"out must be a container, got {type(out).__name__}")
    if out._batch_size != size:
        raise ShapeError(f"out must have the resulting batch size {list(size)}, got {list(out._batch_size)}")
    writes: list[tuple[Path, list[Tensor], Tensor]] = []
    missing: list[tuple[Any, str, Any]] = []
    _plan_join(out, items, join, dim, (), writes, missing)
    with torch._C.DisableTorchFunctionSubclass():
        for path, column, target in writes:
            try:
                join(column, dim, out=target)
            except RuntimeError as error:
                raise named_error(error, path) from error
    for node, name, value in missing:
        node._entries[name] = value
    return out


def _plan_join(
    out: Any,
    items: Sequence[Any],
    join: Any,
    dim: int,
    prefix: Path,
    writes: list[tuple[Path, list[Tensor], Tensor]],
    missing: list[tuple[Any, str, Any]],
) -> None:
    """List what goes into existing tensors of `out`, and make the entries that it lacks."""
    mappings = [item._entries for item in items]
    names = mappings[0].keys()
    for mapping in mappings:
        if mapping.keys() != names:
            raise_key_mismatch(mappings, prefix)
    targets = out._entries
    for name in names:
        path = (*prefix, name)
        column = [mapping[name] for mapping in mappings]
        target = targets.get(name)
        together = column if target is None else [*column, target]
        # Asking for the types first is a third of the time of asking each value whether it is a container.
        nodes = {issubclass(kind, Contract) for kind in set(map(type, together))}
        if len(nodes) > 1:
            raise TypeError(f"entry {joined(path)!r} is a container in one place and a tensor in another")
        if target is None:
            if out._locked:
                raise_locked(f"add the entry {joined(path)!r}, which out lacks")
            whole = _joined(join, column, dim, path)
            missing.append((out, name, out._admit(whole, path)))
        elif True in nodes:
            _plan_join(target, column, join, dim, path, writes, missing)
        else:
            shape = _joint_shape(column, join, dim, path)
            if target.shape != shape:
                raise ShapeError(
                    f"entry {joined(path)!r} of out has shape {list(target.shape)}, but the result has {list(shape)}"
                )
            writes.append((path, column, target))


def _joined(join: Any, column: list[Any], dim: int, path: Path) -> Any:
    if isinstance(column[0], Contract):
        return stack_containers(column, dim) if join is torch.stack else cat_containers(column, dim)
    try:
        return join(column, dim)
    except RuntimeError as error:
        raise named_error(error, path) from error


def _joint_shape(column: list[Tensor], join: Any, dim: int, path: Path) -> torch.Size:
    """The shape of the stack or concatenation of `column`; raises when the shapes do not fit."""
    shapes = [value.shape for value in column]
    first = shapes[0]
    expected = shapes if join is torch.stack else [with_dim(shape, dim, first[dim]) for shape in shapes]
    if expected.count(first) != len(expected):
        odd = next(shape for shape, fit in zip(shapes, expected, strict=True) if fit != first)
        raise ShapeError(f"entry {joined(path)!r} has shapes that do not fit: {list(first)} and {list(odd)}")
    if join is torch.stack:
        return torch.Size((*first[:dim], len(column), *first[dim:]))
    return with_dim(first, dim, sum(shape[dim] for shape in shapes))


def _same_names(names: Names) -> Names:
    return names
