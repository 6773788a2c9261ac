"""Ragged leaves: nested tensors of torch's two layouts, and what torch's own calls refuse to do with them.

In the strided layout (a plain `torch.Tensor` whose `is_nested` is true) every row has a shape of its own, and the rows
follow one another in a buffer. In the jagged layout the rows differ along one dim only: `values` holds them side by
side along it, `offsets` says where each begins, and `lengths`, if there are any, that there are holes between them.

The operations of the package call torch first and come here when torch refuses, so that plain tensors pay nothing.
Functions that say "a leaf" take plain ones too, and do to them what torch does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tensordict.core import torch_internals as internals
from tensordict.core.errors import ShapeError, refuse_stored

# What torch raises when it cannot do something with a nested tensor (NotImplementedError is a RuntimeError).
REFUSALS = (RuntimeError, ValueError, AssertionError)

_MASKS = (torch.bool, torch.uint8)
_ALL = slice(None)


# --- what they are made of --------------------------------------------------------------------------------------------


def is_ragged(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a nested tensor, of either layout."""
    return isinstance(value, Tensor) and value.is_nested


def is_row_of_many(value: object) -> bool:
    """Whether a value is the rows of a ragged leaf under `torch.vmap`, of which torch tells no sizes."""
    return isinstance(value, Tensor) and internals.is_batched(value) and internals.get_unwrapped(value).is_nested


def shape_of(leaf: Tensor) -> torch.Size:
    """The shape of a leaf; -1 stands for a ragged dim of the strided layout, torch's `j1` for one of the jagged, and -1
    for every dim of a row under `torch.vmap`.

    A parameter of a lazy module has no shape yet: one unknown dim, after the stack dim where it is a stack of such.
    """
    if not leaf.is_nested or leaf.layout is torch.jagged:
        if type(leaf) is not Tensor and isinstance(leaf, (UninitializedBuffer, UninitializedParameter)):
            return torch.Size((*leaf.size()[:-1], -1))
        try:
            return leaf.shape
        except RuntimeError:
            return torch.Size([-1] * leaf.dim())
    sizes = _table(leaf)
    if not len(sizes):
        return torch.Size((0,))
    even = (sizes == sizes[0]).all(0).tolist()
    return torch.Size((len(sizes), *[n if same else -1 for n, same in zip(sizes[0].tolist(), even, strict=True)]))


def ragged_dim(leaf: Tensor) -> int:
    """The first dim along which the rows of a ragged leaf differ, or may."""
    if leaf.layout is torch.jagged:
        return jagged_dim(leaf)
    shape = shape_of(leaf)
    return shape.index(-1) if -1 in shape else len(shape)


def jagged_dim(leaf: Tensor) -> int:
    """The ragged dim of a leaf of the jagged layout."""
    return internals.jagged_dim(leaf)


def offsets_of(leaf: Tensor) -> Tensor:
    """Where the rows of a leaf of the jagged layout begin in its values, and where the last one ends."""
    return leaf.offsets()  # type: ignore[attr-defined, no-any-return]


def lengths_of(leaf: Tensor) -> Tensor | None:
    """The lengths of the rows of a leaf of the jagged layout with holes between them; `None` for one without."""
    return leaf.lengths()  # type: ignore[attr-defined, no-any-return]


def jagged_parts(leaf: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The values, offsets and lengths of a leaf of the jagged layout, which together hold it."""
    return leaf.values(), offsets_of(leaf), lengths_of(leaf)


def row_sizes(leaf: Tensor) -> Tensor:
    """The shapes of the rows of a ragged leaf: an int64 table of shape (rows, dims), on the CPU."""
    if leaf.layout is not torch.jagged:
        return _table(leaf)
    lengths = _row_lengths(leaf).cpu()
    shape = list(leaf.values().shape)
    shape[jagged_dim(leaf) - 1] = 0
    table = torch.tensor(shape, dtype=torch.int64).repeat(len(lengths), 1)
    table[:, jagged_dim(leaf) - 1] = lengths
    return table


def row_form(leaf: Tensor) -> tuple[int, ...] | None:
    """The shape of every row of a leaf of the jagged layout, with -1 for the ragged dim; `None` for the strided one."""
    if leaf.layout is not torch.jagged:
        return None
    form = list(leaf.values().shape)
    form[jagged_dim(leaf) - 1] = -1
    return tuple(form)


def compact(leaf: Tensor) -> Tensor:
    """A ragged leaf with one row right behind the other: itself when it is so, else a copy."""
    if leaf.layout is torch.jagged:
        return leaf if is_compact(leaf) else RaggedRows(_ALL, copy=True)(leaf)
    leaf = leaf if type(leaf) is Tensor else leaf.detach().as_subclass(Tensor)
    return leaf.contiguous()


def is_compact(leaf: Tensor) -> bool:
    """Whether the rows of a ragged leaf lie right behind each other, so that its elements are its memory."""
    return lengths_of(leaf) is None if leaf.layout is torch.jagged else bool(leaf.is_contiguous())


def elements(leaf: Tensor) -> Tensor:
    """The elements of a leaf and no others, in a plain tensor: what is in the holes of a ragged one is left out."""
    if not leaf.is_nested:
        return leaf
    if leaf.layout is not torch.jagged and not leaf.size(0):
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return compact(leaf).values()


def from_buffer(buffer: Tensor, sizes: Tensor) -> Tensor:
    """The nested tensor of the strided layout over the rows of these sizes, one behind the other in a flat `buffer`."""
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=buffer.dtype, device=buffer.device)
    if buffer.storage_offset():
        # Torch counts from where the storage begins, whatever the buffer is a part of.
        buffer = buffer.clone()
    sizes = sizes.contiguous()
    strides = torch.ones_like(sizes)
    if sizes.shape[1] > 1:
        strides[:, :-1] = sizes[:, 1:].flip(-1).cumprod(-1).flip(-1)
    numels = sizes.prod(-1)
    return internals.nested_from_buffer(buffer, sizes, strides, numels.cumsum(0) - numels)


def from_jagged(values: Tensor, offsets: Tensor, ragged: int = 1, lengths: Tensor | None = None) -> Tensor:
    """The nested tensor of the jagged layout over `values`, with `ragged` as its ragged dim."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, ragged)


def _with_elements(leaf: Tensor, values: Tensor, new_dims: int = 0) -> Tensor:
    """A nested tensor with the rows of `leaf` and these elements, in the order of its own.

    In the jagged layout elements may have `new_dims` more dims before the ragged one than `leaf` has.
    """
    if leaf.layout is torch.jagged:
        return from_jagged(values, offsets_of(leaf), jagged_dim(leaf) + new_dims, lengths_of(leaf))
    return from_buffer(values, _table(leaf))


def deep_copy(leaf: Tensor) -> Tensor:
    """A copy in memory of its own of a leaf of the strided layout, which `copy.deepcopy` does not know."""
    copied = compact(leaf).detach().clone()
    return copied.requires_grad_(leaf.requires_grad)


def _table(leaf: Tensor) -> Tensor:
    """The sizes of the rows, in the strided layout."""
    if not leaf.size(0):
        return torch.empty((0, 1), dtype=torch.int64)
    return internals.nested_sizes(leaf).as_subclass(Tensor)


def _row_lengths(leaf: Tensor) -> Tensor:
    """The lengths of the rows, in the jagged layout."""
    lengths = lengths_of(leaf)
    return offsets_of(leaf).diff() if lengths is None else lengths


def _from_rows(rows: Sequence[Tensor], leaf: Tensor, ragged: int) -> Tensor:
    """A new nested tensor of the layout of `leaf`; in the jagged one, its ragged dim is `ragged`."""
    if leaf.layout is not torch.jagged:
        if not rows:
            return torch.nested.nested_tensor([], dtype=leaf.dtype, device=leaf.device)
        return torch.nested.as_nested_tensor(list(rows), layout=torch.strided)
    lengths = offsets_of(leaf).new_tensor([row.shape[ragged - 1] for row in rows])
    return from_jagged(torch.cat(list(rows), ragged - 1), _offsets_from(lengths), ragged)


def _offsets_from(lengths: Tensor) -> Tensor:
    """Where rows of these lengths begin, one behind the other, and where the last one ends."""
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _formless(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what}: torch has no nested tensor of that form. Use a lazy stack, or pad the entry")


class SharedOffsets:
    """The offsets of rows of given lengths: the same tensor for the same lengths, as leaves that are computed with each
    other need it."""

    def __init__(self) -> None:
        self._known: list[Tensor] = []

    def __call__(self, lengths: Tensor) -> Tensor:
        """The offsets of rows of these lengths."""
        offsets = _offsets_from(lengths)
        for known in self._known:
            if torch.equal(known, offsets):
                return known
        self._known.append(offsets)
        return offsets


def from_row_order(flat: Tensor, sizes: Tensor, ragged: int, row: Sequence[int], share: SharedOffsets) -> Tensor:
    """The nested tensor of the jagged layout whose rows stand behind each other in C order in `flat`.

    Args:
        flat: the elements; the result is a view of them if the rows differ along their first dim.
        sizes: the sizes of the rows.
        ragged: the ragged dim of the result.
        row: the shape of all rows, with anything at the ragged dim.
        share: where its offsets come from.
    """
    offsets = share(sizes[:, ragged - 1].contiguous())
    if ragged == 1 or not len(sizes):
        shape = [int(offsets[-1]) if dim == ragged - 1 else size for dim, size in enumerate(row)]
        return from_jagged(flat.view(shape), offsets, ragged)
    return from_jagged(torch.cat(from_buffer(flat, sizes).unbind(), ragged - 1), offsets, ragged)


# --- rows -------------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Where some rows of the jagged layout lie: in a stretch of its values, or at these positions."""

    offsets: Tensor
    lengths: Tensor | None = None
    start: int = 0
    length: int = 0
    positions: Tensor | None = None


class RaggedRows:
    """Takes the same rows of any number of ragged leaves.

    Leaves of the jagged layout that share their offsets share those of the results too, as torch asks of nested tensors
    that are computed with each other. A slice of one is a view, unless it leaves rows out; anything else is a copy,
    since most of torch's calls refuse nested tensors that are not contiguous.

    Args:
        rows: a slice, or an int64 tensor of one dim.
        copy: whether slices are copied too, which closes holes.
    """

    def __init__(self, rows: slice | Tensor, copy: bool = False) -> None:
        self.rows = rows
        self.copy = copy
        self._known: list[tuple[Tensor, Tensor | None, _Part]] = []

    def __call__(self, leaf: Tensor) -> Tensor:
        """The rows of one leaf."""
        if leaf.layout is not torch.jagged:
            return self._of_strided(leaf)
        part = self.part(leaf)
        ragged, values = jagged_dim(leaf), leaf.values()
        if part.positions is None:
            values = values.narrow(ragged - 1, part.start, part.length)
        else:
            values = values.index_select(ragged - 1, part.positions)
        return from_jagged(values, part.offsets, ragged, part.lengths)

    def part(self, leaf: Tensor) -> _Part:
        """Where the rows of a leaf of the jagged layout lie."""
        offsets, lengths = offsets_of(leaf), lengths_of(leaf)
        for known_offsets, known_lengths, part in self._known:
            if known_offsets is offsets and known_lengths is lengths:
                return part
        part = self._located(offsets, lengths)
        self._known.append((offsets, lengths, part))
        return part

    def _located(self, offsets: Tensor, lengths: Tensor | None) -> _Part:
        rows = self.rows
        if isinstance(rows, slice) and not self.copy:
            first, last, step = rows.indices(len(offsets) - 1)
            if step == 1 and last > first:
                bounds = offsets[first : last + 1]
                start, stop = int(bounds[0]), int(bounds[-1])
                return _Part(bounds - start, None if lengths is None else lengths[first:last], start, stop - start)
        if isinstance(rows, Tensor):
            rows = rows.to(offsets.device)
        positions, bounds = positions_of(offsets[:-1][rows], (offsets.diff() if lengths is None else lengths)[rows])
        return _Part(bounds, positions=positions)

    def _of_strided(self, leaf: Tensor) -> Tensor:
        rows = self.rows if isinstance(self.rows, slice) else self.rows.cpu()
        sizes = _table(leaf)
        numels = sizes.prod(-1)
        positions, _ = positions_of((numels.cumsum(0) - numels)[rows], numels[rows])
        return from_buffer(elements(leaf).index_select(0, positions.to(leaf.device)), sizes[rows])


def positions_of(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Where the elements of rows are that start here and are so long; and the offsets of the rows once put together."""
    offsets = _offsets_from(lengths)
    total = int(offsets[-1])
    shifts = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return shifts + torch.arange(total, dtype=shifts.dtype, device=shifts.device), offsets


# --- indexing ---------------------------------------------------------------------------------------------------------


class Index:
    """Applies one index, an output of `leaf_index`, to any number of leaves, as `leaf[at]` does to plain ones.

    An integer gives a row, which is a plain tensor. What keeps the first dim keeps a leaf ragged.

    Raises:
        NotImplementedError: torch has no nested tensor of the form of the result.
    """

    def __init__(self, at: Any) -> None:
        self.at = at
        items = tuple(chain.from_iterable(map(_as_integers, at if isinstance(at, tuple) else (at,))))
        self.head: Any = items[0] if items else _ALL
        self.rest = items[1:]
        if isinstance(self.head, Tensor) and self.head.ndim == 0:
            self.head = int(self.head)
        self.rows = RaggedRows(self.head) if isinstance(self.head, (slice, Tensor)) else None

    def __call__(self, leaf: Tensor) -> Tensor:
        """One leaf, indexed."""
        if not leaf.is_nested:
            return leaf[self.at]
        self.check(leaf)
        if self.rows is None:
            return leaf[self.head][self.rest]
        if self._is_paired():
            return self._paired(leaf)
        if isinstance(self.head, Tensor) or self.head != _ALL:
            leaf = self.rows(leaf)
        if not self.rest:
            return leaf
        if leaf.layout is not torch.jagged:
            return _from_rows([row[self.rest] for row in leaf.unbind()], leaf, 0)
        values = leaf.values()
        part = values[self.rest]
        return _with_elements(leaf, part, part.ndim - values.ndim)

    def check(self, leaf: Tensor) -> None:
        """Refuse an index whose result has no form for this ragged leaf."""
        shape = list(shape_of(leaf))
        if not isinstance(self.head, (int, slice, Tensor)) or isinstance(self.head, bool):
            raise _formless(f"a new dim cannot stand before the rows of a ragged entry of shape {shape}")
        if isinstance(self.head, Tensor) and self.head.ndim > 1:
            raise _formless(
                f"an index of shape {list(self.head.shape)} cannot take the place of the rows of a ragged entry of "
                f"shape {shape}"
            )
        tensors = [position for position, item in enumerate(self.rest) if not isinstance(item, (slice, type(None)))]
        apart = bool(tensors) and len(tensors) != tensors[-1] - tensors[0] + 1
        if apart and isinstance(self.head, slice) and any(isinstance(item, Tensor) for item in self.rest):
            raise _formless(f"index tensors apart from each other put a dim before the rows of shape {shape}")
        ragged = ragged_dim(leaf)
        if self.rows is not None and sum(item is not None for item in self.rest) >= ragged:
            raise _formless(f"the index {self.at!r} reaches the ragged dim {ragged} of shape {shape}")

    def places(self, leaf: Tensor) -> list[Tensor]:
        """What the index takes of each row, as views to write to; the head is not an integer."""
        rows = leaf.unbind()
        if self._is_paired():
            picked = [items.tolist() for items in self._picks()]
            return [rows[row][pick] for row, *pick in zip(*picked, strict=True)]
        head = self.head.cpu() if isinstance(self.head, Tensor) else self.head
        return [rows[row][self.rest] if self.rest else rows[row] for row in torch.arange(len(rows))[head].tolist()]

    def _is_paired(self) -> bool:
        """Whether index tensors of several dims go together, so that each combination picks one place of one row."""
        return isinstance(self.head, Tensor) and any(isinstance(item, Tensor) for item in self.rest)

    def _picks(self) -> list[Tensor]:
        """The rows and, for each, the place in every further dim that is indexed."""
        if not all(isinstance(item, (int, Tensor)) for item in self.rest):
            raise _formless(f"slices and index tensors together, as in {self.at!r}, cannot index a ragged entry")
        items = torch.broadcast_tensors(*[torch.as_tensor(item).cpu() for item in (self.head, *self.rest)])  # type: ignore[no-untyped-call]
        if items[0].ndim != 1:
            raise _formless(f"index tensors of shape {list(items[0].shape)} cannot take the place of ragged rows")
        return list(items)

    def _paired(self, leaf: Tensor) -> Tensor:
        rows, *columns = self._picks()
        if leaf.layout is not torch.jagged:
            return _from_rows(self.places(leaf), leaf, 0)
        part = RaggedRows(rows, copy=True).part(leaf)
        positions = _known(part.positions)
        lengths = part.offsets.diff()
        where: list[Any] = [
            torch.repeat_interleave(column.to(lengths.device), lengths, output_size=len(positions))
            for column in columns
        ]
        # Dims between those indexed and the ragged one come behind the elements picked.
        between = [_ALL] * (jagged_dim(leaf) - 1 - len(columns))
        values = leaf.values()[tuple(where + between + [positions])]
        return from_jagged(values.movedim(0, len(between)), part.offsets, len(between) + 1)


def _as_integers(item: object) -> tuple[Any, ...]:
    """An item of an index; a mask in the form of the integer indices that torch makes of it."""
    return item.nonzero(as_tuple=True) if isinstance(item, Tensor) and item.dtype in _MASKS else (item,)


def _known(positions: Tensor | None) -> Tensor:
    assert positions is not None
    return positions


# --- cutting and joining ----------------------------------------------------------------------------------------------


class Split:
    """Cuts any number of leaves at the same places along one dim.

    Args:
        starts: where the pieces begin.
        lengths: how long they are.
        dim: the dim.
    """

    def __init__(self, starts: Iterable[int], lengths: Iterable[int], dim: int) -> None:
        self.dim = dim
        self.slices = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        self.rows = [RaggedRows(piece) for piece in self.slices]

    def __call__(self, leaf: Tensor) -> list[Tensor]:
        """The pieces of one leaf; views, but copies for the strided layout."""
        if not leaf.is_nested:
            return [leaf.narrow(self.dim, piece.start, piece.stop - piece.start) for piece in self.slices]
        if not self.dim:
            return [rows(leaf) for rows in self.rows]
        _check_regular(leaf, self.dim)
        before = (_ALL,) * self.dim
        return [Index((*before, piece))(leaf) for piece in self.slices]


def unbind(leaf: Tensor, dim: int) -> Sequence[Tensor]:
    """The elements of a leaf along one dim, which they no longer have."""
    if not leaf.is_nested or not dim:
        return leaf.unbind(dim)
    _check_regular(leaf, dim)
    before = (_ALL,) * dim
    return [Index((*before, i))(leaf) for i in range(shape_of(leaf)[dim])]


def stack(leaves: Sequence[Tensor], dim: int) -> Tensor:
    """The stack of leaves along a new dim, behind their rows and before their ragged dim; their rows must agree.

    Raises:
        NotImplementedError: there is no form for it in torch.
        ShapeError: the rows differ.
    """
    if not any(map(is_ragged, leaves)):
        return torch.stack(list(leaves), dim)
    first = _alike(leaves)
    if not dim or dim > ragged_dim(first):
        raise _formless(f"ragged entries of shape {list(shape_of(first))} cannot be stacked along dim {dim}")
    return _by_row(torch.stack, leaves, dim, first)


def _by_row(join: Callable[..., Tensor], leaves: Sequence[Tensor], dim: int, first: Tensor) -> Tensor:
    """What `join`, `torch.cat` or `torch.stack`, makes of the rows of leaves along a dim before the ragged one."""
    if first.layout is not torch.jagged:
        return _from_rows(
            [join(row, dim - 1) for row in zip(*[leaf.unbind() for leaf in leaves], strict=True)], first, 0
        )
    columns = [compact(leaf) for leaf in leaves]
    offsets = offsets_of(columns[0])
    for leaf in columns[1:]:
        _check_same_lengths(offsets.diff(), _row_lengths(leaf), offsets is offsets_of(leaf))
    values = join([leaf.values() for leaf in columns], dim - 1)
    return _with_elements(columns[0], values, int(join is torch.stack))


class Cat:
    """Concatenates columns of leaves along one dim; leaves that share their offsets share those of the results."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._known: list[tuple[list[Tensor], Tensor]] = []

    def __call__(self, leaves: Sequence[Tensor]) -> Tensor:
        """The concatenation of the leaves of one entry."""
        if not any(map(is_ragged, leaves)):
            return torch.cat(list(leaves), self.dim)
        first = _alike(leaves)
        if self.dim:
            _check_regular(first, self.dim)
            return _by_row(torch.cat, leaves, self.dim, first)
        if first.layout is not torch.jagged:
            filled = [leaf for leaf in leaves if leaf.size(0)]
            tables = [_table(leaf) for leaf in filled]
            return from_buffer(
                torch.cat([elements(leaf) for leaf in leaves]), torch.cat(tables) if filled else _table(first)
            )
        columns = [compact(leaf) for leaf in leaves]
        values = torch.cat([leaf.values() for leaf in columns], jagged_dim(first) - 1)
        return from_jagged(values, self._offsets([offsets_of(leaf) for leaf in columns]), jagged_dim(first))

    def _offsets(self, parts: list[Tensor]) -> Tensor:
        for known, offsets in self._known:
            if all(map(is_, known, parts)):
                return offsets
        offsets = _offsets_from(torch.cat([part.diff() for part in parts]))
        self._known.append((parts, offsets))
        return offsets


def _check_regular(leaf: Tensor, dim: int) -> None:
    """Refuse to cut or join along the ragged dim, or behind it."""
    ragged = ragged_dim(leaf)
    if dim >= ragged:
        raise _formless(f"dim {dim} of a ragged entry of shape {list(shape_of(leaf))} is not before its ragged dim")


def _alike(leaves: Sequence[Tensor]) -> Tensor:
    """The first of leaves that are all ragged, and in the same way."""
    forms = {_form(leaf) for leaf in leaves}
    if len(forms) > 1:
        raise ShapeError(
            f"ragged entries can only be joined with entries of the same layout and ragged dim, got {sorted(forms)}; "
            "torch.nested.as_nested_tensor(tensor, layout=...) makes a dense one ragged"
        )
    return leaves[0]


def _form(leaf: Tensor) -> str:
    if not leaf.is_nested:
        return "dense"
    return f"jagged along dim {jagged_dim(leaf)}" if leaf.layout is torch.jagged else "strided"


def _check_same_lengths(ours: Tensor, theirs: Tensor, known: bool = False) -> None:
    if not known and not (len(ours) == len(theirs) and bool((ours == theirs.to(ours.device)).all())):
        raise ShapeError(f"the lengths of the ragged rows differ: {_shown(ours)} and {_shown(theirs)}")


def _shown(lengths: Tensor) -> str:
    text = str(lengths[:8].tolist())
    return text if len(lengths) <= 8 else f"{text[:-1]}, ...]"


# --- elements ---------------------------------------------------------------------------------------------------------


def elementwise(op: Callable[..., Tensor], *operands: object) -> Tensor:
    """`op(*operands)`, where any may be a leaf and the others leaves, numbers or tensors that broadcast to it.

    Raises:
        ShapeError: the rows of two ragged leaves differ, or a tensor does not broadcast to the rows.
    """
    leaf = next(filter(is_ragged, operands), None)
    if leaf is None:
        return op(*operands)
    form = compact(leaf)
    values = op(*[_spread(value, form) for value in operands])
    if values.shape != elements(form).shape:
        raise _unfit(operands)
    return _with_elements(form, values)


def where(condition: Tensor, ours: Any, theirs: Any) -> Tensor:
    """`torch.where` of leaves and numbers. Where rows of ragged leaves differ, the condition has to pick whole rows.

    Raises:
        ShapeError: the rows differ, and the condition picks elements of them.
    """
    try:
        return torch.where(condition, ours, theirs)
    except REFUSALS:
        leaf = next(filter(is_ragged, (ours, theirs)), None)
        if leaf is None:
            raise
    try:
        return elementwise(torch.where, condition, ours, theirs)
    except ShapeError:
        by_row = condition.numel() in (1, condition.shape[0]) and is_ragged(ours) and is_ragged(theirs)
        if not by_row or ours.size(0) != theirs.size(0):
            raise
    rows = torch.arange(leaf.size(0), device=condition.device)
    picked = torch.where(condition.reshape(-1), rows, rows + len(rows))
    return RaggedRows(picked)(Cat(0)((ours, theirs)))


def in_place(leaf: Tensor, *operands: object) -> tuple[list[Any], Callable[[], None] | None]:
    """Plain tensors and numbers in place of a ragged leaf and what stands beside it, to write into the first of them.

    Returns:
        these, and what has to be called behind the operation when the first is a copy of the elements of the leaf:
        those of a leaf with holes do not lie together.

    Raises:
        ShapeError: the rows of two ragged leaves differ, or a tensor does not broadcast to the rows.
    """
    refuse_stored(leaf)
    form = compact(leaf)
    values = [elements(form), *[_spread(value, form) for value in operands]]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    if torch.broadcast_shapes(*shapes) != shapes[0]:  # type: ignore[no-untyped-call]
        raise _unfit((leaf, *operands))
    if is_compact(leaf):
        return values, None
    return values, partial(_copy_all, list(leaf.unbind()), list(form.unbind()))


def _unfit(operands: Sequence[Any]) -> ShapeError:
    shapes = " and ".join(str(list(shape_of(value))) for value in operands if isinstance(value, Tensor))
    return ShapeError(f"shapes {shapes} do not broadcast to that of the ragged entry")


def _spread(value: object, form: Tensor) -> Any:
    """The elements of `value` so that they meet those of `form`, a compact ragged leaf."""
    if value is form or not isinstance(value, Tensor) or not value.ndim:
        return elements(form) if value is form else value
    if value.is_nested:
        return _matched(value, form)
    if value.ndim > form.ndim:
        raise ShapeError(f"a tensor of shape {list(value.shape)} has more dims than a ragged entry, {form.ndim}")
    value = value.reshape((*[1] * (form.ndim - value.ndim), *value.shape))
    count = form.size(0)
    if value.shape[0] not in (1, count):
        raise ShapeError(f"a tensor of shape {list(value.shape)} does not broadcast to {count} ragged rows")
    value = value.expand(count, *value.shape[1:])
    if form.layout is not torch.jagged:
        rows = [part.expand(row.shape).reshape(-1) for part, row in zip(value, form.unbind(), strict=True)]
        return torch.cat(rows) if rows else elements(form)
    ragged = jagged_dim(form)
    if value.shape[ragged] != 1:
        raise ShapeError(
            f"a dense tensor of shape {list(value.shape)} does not broadcast to a ragged entry of shape "
            f"{list(form.shape)}: its size along dim {ragged} must be 1"
        )
    repeated = torch.repeat_interleave(value.select(ragged, 0), offsets_of(form).diff(), 0)
    return repeated.movedim(0, ragged - 1)


def _matched(value: Tensor, form: Tensor) -> Tensor:
    """The elements of a ragged leaf whose rows are those of `form`, in the order of its elements."""
    if value.layout is form.layout is torch.jagged and jagged_dim(value) == jagged_dim(form):
        _check_same_lengths(_row_lengths(form), _row_lengths(value), offsets_of(value) is offsets_of(form))
        return elements(value)
    ours, theirs = row_sizes(form), row_sizes(value)
    if not torch.equal(ours, theirs):
        raise ShapeError(f"the sizes of the ragged rows differ: {ours[:8].tolist()} and {theirs[:8].tolist()}")
    if form.layout is torch.jagged:
        return torch.cat(value.unbind(), jagged_dim(form) - 1) if len(ours) else elements(form)
    return in_row_order(value)


def like(value: Tensor, leaf: Tensor) -> Tensor:
    """The rows of one ragged leaf in the layout of another with the same rows: torch takes them for the same shape.

    Raises:
        ShapeError: `value` is not ragged, or its rows are not of the same shapes.
    """
    if not is_ragged(value):
        raise ShapeError(f"shape {list(value.shape)} is not that of a ragged entry, {list(shape_of(leaf))}")
    values = _matched(value, compact(leaf))
    if leaf.layout is torch.jagged and lengths_of(leaf) is not None:
        positions = _known(RaggedRows(_ALL, copy=True).part(leaf).positions)
        values = torch.zeros_like(leaf.values()).index_copy(jagged_dim(leaf) - 1, positions, values)
    return _with_elements(leaf, values)


def in_row_order(leaf: Tensor) -> Tensor:
    """The elements of a ragged leaf, flat, each row behind the other in C order."""
    if leaf.layout is torch.jagged and jagged_dim(leaf) > 1 and leaf.size(0):
        return torch.cat([row.reshape(-1) for row in leaf.unbind()])
    return elements(leaf).reshape(-1)


def copies(target: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Plain tensors, and those to copy into them, that together copy the rows of a nested tensor into another one.

    Raises:
        ShapeError: `value` is not ragged, or its rows are not of the same shapes.
    """
    if not is_ragged(value):
        raise ShapeError(
            f"a ragged entry of shape {list(shape_of(target))} cannot be updated in place with a dense value of shape "
            f"{list(value.shape)}"
        )
    form = compact(target)
    source = _matched(value, form)
    if is_compact(target):
        return [elements(target)], [source]
    return list(target.unbind()), list(value.unbind())


def assignment(leaf: Tensor, at: object, value: object) -> Callable[[], Any]:
    """Check that `value` can be assigned to the part of a ragged leaf at an index; what is returned does it, in place.

    RaggedRows keep their lengths, as whatever is assigned in place keeps its shape.

    Args:
        leaf: the ragged leaf.
        at: an output of `leaf_index`.
        value: a number, a tensor that broadcasts to every row taken, or a nested tensor of rows of the same shapes.

    Raises:
        ShapeError: the value does not fit.
    """
    refuse_stored(leaf)
    index = Index(at)
    index.check(leaf)
    if isinstance(value, Tensor):
        value = value.to(leaf.device, leaf.dtype)
    if index.rows is None:
        return _copies([leaf[index.head][index.rest]], [value])
    if leaf.layout is torch.jagged and not index.rest and (is_ragged(value) or not isinstance(value, Tensor)):
        rows = RaggedRows(index.head, copy=True)
        part = rows.part(leaf)
        dim, positions = jagged_dim(leaf) - 1, _known(part.positions)
        if not isinstance(value, Tensor):
            return partial(leaf.values().index_fill_, dim, positions, value)
        return partial(leaf.values().index_copy_, dim, positions, _matched(value, rows(leaf)))
    places = index.places(leaf)
    return _copies(places, _row_values(value, places))


def _row_values(value: object, places: list[Tensor]) -> list[Any]:
    """What each row is assigned: its own part of the value, or the same one as all others."""
    if is_ragged(value) or (places and isinstance(value, Tensor) and value.ndim > places[0].ndim):
        parts = list(value.unbind())
        if len(parts) != len(places):
            raise ShapeError(f"{len(parts)} rows cannot be assigned to {len(places)}")
        return parts
    return [value] * len(places)


def _copies(places: list[Tensor], values: list[Any]) -> Callable[[], None]:
    for row, (place, value) in enumerate(zip(places, values, strict=True)):
        if isinstance(value, Tensor):
            try:
                value.expand(place.shape)
            except RuntimeError as error:
                raise ShapeError(
                    f"a value of shape {list(value.shape)} does not fit row {row} of the part assigned, of shape "
                    f"{list(place.shape)}: rows keep their lengths in place"
                ) from error
    return partial(_copy_all, places, values)


def _copy_all(targets: list[Tensor], values: list[Any]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)


def padded(leaf: Tensor, padding: float = 0.0) -> Tensor:
    """A plain tensor with the rows of a ragged leaf, all made as long as the longest with `padding` at the end."""
    if leaf.layout is not torch.jagged or jagged_dim(leaf) == 1:
        # Torch does this for some dtypes and not where there are holes; of other ragged dims it finds no gradient.
        with contextlib.suppress(*REFUSALS):
            dense: Tensor = torch.nested.to_padded_tensor(leaf, padding)
            return dense
    leaf = compact(leaf)
    flat, sizes, ragged = elements(leaf), row_sizes(leaf), 1
    if leaf.layout is torch.jagged:
        ragged = jagged_dim(leaf)
        flat, sizes = flat.movedim(ragged - 1, 0), sizes[:, ragged - 1 : ragged]
    mask = _mask(sizes).to(leaf.device)
    out = flat.new_full((*mask.shape, *flat.shape[1:]), padding)
    out[mask] = flat
    return out.movedim(1, ragged)


def valid(leaf: Tensor, ndim: int) -> Tensor:
    """Where the first `ndim` dims of a padded leaf hold elements of the ragged one, as a bool tensor."""
    return _mask(row_sizes(leaf)[:, : ndim - 1]).to(leaf.device)


def _mask(sizes: Tensor) -> Tensor:
    """Which places of a tensor that is large enough for rows of these sizes belong to them."""
    longest = sizes.amax(0).tolist() if len(sizes) else [0] * sizes.shape[1]
    mask = torch.ones((len(sizes), *longest), dtype=torch.bool)
    for dim, longest_here in enumerate(longest):
        within = torch.arange(longest_here) < sizes[:, dim, None]
        mask &= within.reshape(len(sizes), *[-1 if other == dim else 1 for other in range(len(longest))])
    return mask
