"""Operations on ragged leaves, which are torch's nested tensors, beyond what torch itself supports.

In the strided layout (a plain `torch.Tensor` whose `is_nested` is true), every row has its own shape, and the rows
follow one another in a buffer. In the jagged layout, the rows differ in one dim only. `values` holds them side by side
along that dim, `offsets` holds the start of each row, and `lengths` is given if there are gaps (holes) between the
rows.

The operations of the package call torch first, and come here when torch raises an error, so plain tensors lose no time.
Functions that take "a leaf" accept plain tensors too, and treat them as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tensordict.core import torch_internals as internals
from tensordict.core.exceptions import ShapeError, refuse_stored

# The errors that torch raises for unsupported operations on nested tensors (NotImplementedError is a RuntimeError).
REFUSALS = (RuntimeError, ValueError, AssertionError)

# Returns the ragged dim of a jagged leaf.
jagged_dim = internals.jagged_dim

_MASKS = (torch.bool, torch.uint8)
_ALL = slice(None)


# --- parts of a ragged leaf -------------------------------------------------------------------------------------------


def is_ragged(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a nested tensor, of either layout."""
    return isinstance(value, Tensor) and value.is_nested


def is_row_of_many(value: object) -> bool:
    """Return whether a value is a row of a ragged leaf under `torch.vmap`, whose sizes torch does not know."""
    return isinstance(value, Tensor) and internals.is_batched(value) and internals.get_unwrapped(value).is_nested


def shape_of(leaf: Tensor) -> torch.Size:
    """Return the shape of a leaf. A ragged dim is -1 (strided layout) or torch's symbol `j1` (jagged layout).

    Rows under `torch.vmap` have -1 in all dims. A parameter of a lazy module has no shape yet: it gets one unknown dim,
    after the stack dim if it is a stack of such parameters.
    """
    if not leaf.is_nested or leaf.layout is torch.jagged:
        if type(leaf) is not Tensor and isinstance(leaf, (UninitializedBuffer, UninitializedParameter)):
            return torch.Size((*leaf.size()[:-1], -1))
        try:
            return leaf.shape
        except RuntimeError:
            return torch.Size([-1] * leaf.dim())
    sizes = _strided_sizes(leaf)
    if not len(sizes):
        return torch.Size((0,))
    even = (sizes == sizes[0]).all(0).tolist()
    return torch.Size((len(sizes), *[n if same else -1 for n, same in zip(sizes[0].tolist(), even, strict=True)]))


def ragged_dim(leaf: Tensor) -> int:
    """Return the first dim that differs, or may differ, between the rows of a ragged leaf."""
    if leaf.layout is torch.jagged:
        return jagged_dim(leaf)
    shape = shape_of(leaf)
    return shape.index(-1) if -1 in shape else len(shape)


def offsets_of(leaf: Tensor) -> Tensor:
    """Return the starts of the rows of a jagged leaf in its values, followed by the end of the last row."""
    return leaf.offsets()  # type: ignore[attr-defined, no-any-return]


def lengths_of(leaf: Tensor) -> Tensor | None:
    """Return the lengths of the rows of a jagged leaf with holes; `None` if it has no holes."""
    return leaf.lengths()  # type: ignore[attr-defined, no-any-return]


def jagged_parts(leaf: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values, offsets and lengths of a jagged leaf, which define it completely."""
    return leaf.values(), offsets_of(leaf), lengths_of(leaf)


def row_sizes(leaf: Tensor) -> Tensor:
    """Return the shapes of the rows of a ragged leaf: an int64 table of shape (rows, dims), on the CPU."""
    if leaf.layout is not torch.jagged:
        return _strided_sizes(leaf)
    lengths = _row_lengths(leaf).cpu()
    shape = list(leaf.values().shape)
    shape[jagged_dim(leaf) - 1] = 0
    table = torch.tensor(shape, dtype=torch.int64).repeat(len(lengths), 1)
    table[:, jagged_dim(leaf) - 1] = lengths
    return table


def row_form(leaf: Tensor) -> tuple[int, ...] | None:
    """Return the shape that all rows of a jagged leaf share, with -1 for the ragged dim; `None` for a strided leaf."""
    if leaf.layout is not torch.jagged:
        return None
    form = list(leaf.values().shape)
    form[jagged_dim(leaf) - 1] = -1
    return tuple(form)


def compact(leaf: Tensor) -> Tensor:
    """Return a ragged leaf without holes between its rows. Copy only if the leaf has holes."""
    if leaf.layout is torch.jagged:
        return leaf if is_compact(leaf) else RaggedRows(_ALL, copy=True)(leaf)
    leaf = leaf if type(leaf) is Tensor else leaf.detach().as_subclass(Tensor)
    return leaf.contiguous()


def is_compact(leaf: Tensor) -> bool:
    """Return whether a ragged leaf has no holes, so that its memory contains exactly its elements."""
    return lengths_of(leaf) is None if leaf.layout is torch.jagged else bool(leaf.is_contiguous())


def pack_elements(leaf: Tensor) -> Tensor:
    """Return the elements of a ragged leaf as a plain tensor, without the content of holes. Others are returned as
    they are."""
    if not leaf.is_nested:
        return leaf
    if leaf.layout is not torch.jagged and not leaf.size(0):
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return compact(leaf).values()


def from_buffer(buffer: Tensor, sizes: Tensor) -> Tensor:
    """Build a strided nested tensor from a flat `buffer` that holds rows of these sizes, one after the other."""
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=buffer.dtype, device=buffer.device)
    if buffer.storage_offset():
        # Torch counts from the start of the storage, even if the buffer is a part of it.
        buffer = buffer.clone()
    sizes = sizes.contiguous()
    strides = torch.ones_like(sizes)
    if sizes.shape[1] > 1:
        strides[:, :-1] = sizes[:, 1:].flip(-1).cumprod(-1).flip(-1)
    numels = sizes.prod(-1)
    return internals.nested_from_buffer(buffer, sizes, strides, numels.cumsum(0) - numels)


def from_jagged(values: Tensor, offsets: Tensor, ragged: int = 1, lengths: Tensor | None = None) -> Tensor:
    """Build a jagged nested tensor from `values`, with `ragged` as its ragged dim."""
    return internals.nest_jagged(values, offsets, lengths, ragged)


def _with_elements(leaf: Tensor, values: Tensor, new_dims: int = 0) -> Tensor:
    """Build a nested tensor with the row sizes of `leaf` and new elements, in the same order.

    In the jagged layout, the elements may have `new_dims` more dims before the ragged dim than `leaf`.
    """
    if leaf.layout is torch.jagged:
        return from_jagged(values, offsets_of(leaf), jagged_dim(leaf) + new_dims, lengths_of(leaf))
    return from_buffer(values, _strided_sizes(leaf))


def deep_copy(leaf: Tensor) -> Tensor:
    """Copy a strided leaf to new memory; `copy.deepcopy` does not support it."""
    copied = compact(leaf).detach().clone()
    return copied.requires_grad_(leaf.requires_grad)


def _strided_sizes(leaf: Tensor) -> Tensor:
    """Return the row sizes of a strided leaf."""
    if not leaf.size(0):
        return torch.empty((0, 1), dtype=torch.int64)
    return internals.nested_sizes(leaf).as_subclass(Tensor)


def _row_lengths(leaf: Tensor) -> Tensor:
    """Return the row lengths of a jagged leaf."""
    lengths = lengths_of(leaf)
    return offsets_of(leaf).diff() if lengths is None else lengths


def _build_from_rows(rows: Sequence[Tensor], leaf: Tensor, ragged: int) -> Tensor:
    """Build a nested tensor from rows, in the layout of `leaf`. In the jagged layout, `ragged` is its ragged dim."""
    if leaf.layout is not torch.jagged:
        if not rows:
            return torch.nested.nested_tensor([], dtype=leaf.dtype, device=leaf.device)
        return torch.nested.as_nested_tensor(list(rows), layout=torch.strided)
    lengths = offsets_of(leaf).new_tensor([row.shape[ragged - 1] for row in rows])
    return from_jagged(torch.cat(list(rows), ragged - 1), _build_offsets(lengths), ragged)


def _build_offsets(lengths: Tensor) -> Tensor:
    """Return the starts of consecutive rows of these lengths, followed by the end of the last row."""
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _unsupported_form(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what}: torch has no nested tensor of that form. Use a lazy stack, or pad the entry")


@dataclass(slots=True)
class SharedOffsets:
    """Builds offsets, and returns the same tensor for equal lengths.

    Torch computes with two jagged leaves only if they share their offsets tensor.
    """

    _known: list[Tensor] = field(default_factory=list)

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the offsets of rows of these lengths."""
        offsets = _build_offsets(lengths)
        for known in self._known:
            if torch.equal(known, offsets):
                return known
        self._known.append(offsets)
        return offsets


def from_row_order(flat: Tensor, sizes: Tensor, ragged: int, row: Sequence[int], share: SharedOffsets) -> Tensor:
    """Build a jagged nested tensor from rows that follow one another in C order in `flat`.

    Args:
        flat: the elements. The result is a view of them if the rows differ in their first dim.
        sizes: the sizes of the rows.
        ragged: the ragged dim of the result.
        row: the shape of a row, with any number for the ragged dim.
        share: makes the offsets.
    """
    offsets = share(sizes[:, ragged - 1].contiguous())
    if ragged == 1 or not len(sizes):
        shape = [int(offsets[-1]) if dim == ragged - 1 else size for dim, size in enumerate(row)]
        return from_jagged(flat.view(shape), offsets, ragged)
    return from_jagged(torch.cat(from_buffer(flat, sizes).unbind(), ragged - 1), offsets, ragged)


# --- rows -------------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """The location of some rows of a jagged leaf in its values: a contiguous stretch, or a list of positions."""

    offsets: Tensor
    lengths: Tensor | None = None
    start: int = 0
    length: int = 0
    positions: Tensor | None = None


class RaggedRows:
    """Selects the same rows from any number of ragged leaves.

    Jagged leaves that share their offsets give results that share theirs, so torch can compute with the results. A
    slice gives a view, unless it skips rows. Everything else gives a copy, because most of torch's calls do not support
    nested tensors that are not contiguous.

    Args:
        rows: a slice, or an int64 tensor with one dim.
        copy: copy slices too, which closes holes.
    """

    def __init__(self, rows: slice | Tensor, copy: bool = False) -> None:
        self.rows = rows
        self.copy = copy
        self._known: list[tuple[Tensor, Tensor | None, _Part]] = []

    def __call__(self, leaf: Tensor) -> Tensor:
        """Return the rows of one leaf."""
        if leaf.layout is not torch.jagged:
            return self._select_rows(leaf)
        part = self.part(leaf)
        ragged, values = jagged_dim(leaf), leaf.values()
        if part.positions is None:
            values = values.narrow(ragged - 1, part.start, part.length)
        else:
            values = values.index_select(ragged - 1, part.positions)
        return from_jagged(values, part.offsets, ragged, part.lengths)

    def part(self, leaf: Tensor) -> _Part:
        """Return the location of the rows of a jagged leaf."""
        offsets, lengths = offsets_of(leaf), lengths_of(leaf)
        for known_offsets, known_lengths, part in self._known:
            if known_offsets is offsets and known_lengths is lengths:
                return part
        part = self._locate(offsets, lengths)
        self._known.append((offsets, lengths, part))
        return part

    def _locate(self, offsets: Tensor, lengths: Tensor | None) -> _Part:
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

    def _select_rows(self, leaf: Tensor) -> Tensor:
        rows = self.rows if isinstance(self.rows, slice) else self.rows.cpu()
        sizes = _strided_sizes(leaf)
        numels = sizes.prod(-1)
        positions, _ = positions_of((numels.cumsum(0) - numels)[rows], numels[rows])
        return from_buffer(pack_elements(leaf).index_select(0, positions.to(leaf.device)), sizes[rows])


def positions_of(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of all elements of rows with these starts and lengths, and the offsets of the new rows."""
    offsets = _build_offsets(lengths)
    total = int(offsets[-1])
    shifts = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return shifts + torch.arange(total, dtype=shifts.dtype, device=shifts.device), offsets


# --- indexing ---------------------------------------------------------------------------------------------------------


class Index:
    """Applies one index, an output of `leaf_index`, to any number of leaves, as `leaf[at]` does to plain tensors.

    An integer gives a row, which is a plain tensor. An index that keeps the first dim gives a ragged leaf.

    Raises:
        NotImplementedError: torch has no nested tensor for the form of the result.
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
        """Index one leaf."""
        if not leaf.is_nested:
            return leaf[self.at]
        self.check(leaf)
        if self.rows is None:
            return leaf[self.head][self.rest]
        if self._picks_places():
            return self._pick_places(leaf)
        if isinstance(self.head, Tensor) or self.head != _ALL:
            leaf = self.rows(leaf)
        if not self.rest:
            return leaf
        if leaf.layout is not torch.jagged:
            return _build_from_rows([row[self.rest] for row in leaf.unbind()], leaf, 0)
        values = leaf.values()
        part = values[self.rest]
        return _with_elements(leaf, part, part.ndim - values.ndim)

    def check(self, leaf: Tensor) -> None:
        """Raise an error if torch has no nested tensor for the result on this ragged leaf."""
        shape = list(shape_of(leaf))
        if not isinstance(self.head, (int, slice, Tensor)) or isinstance(self.head, bool):
            raise _unsupported_form(f"a new dim cannot stand before the rows of a ragged entry of shape {shape}")
        if isinstance(self.head, Tensor) and self.head.ndim > 1:
            raise _unsupported_form(
                f"an index of shape {list(self.head.shape)} cannot take the place of the rows of a ragged entry of "
                f"shape {shape}"
            )
        tensors = [position for position, item in enumerate(self.rest) if not isinstance(item, (slice, type(None)))]
        apart = bool(tensors) and len(tensors) != tensors[-1] - tensors[0] + 1
        if apart and isinstance(self.head, slice) and any(isinstance(item, Tensor) for item in self.rest):
            raise _unsupported_form(
                f"index tensors that are not adjacent put a dim before the rows of a ragged entry of shape {shape}"
            )
        ragged = ragged_dim(leaf)
        if self.rows is not None and sum(item is not None for item in self.rest) >= ragged:
            raise _unsupported_form(f"the index {self.at!r} reaches the ragged dim {ragged} of shape {shape}")

    def places(self, leaf: Tensor) -> list[Tensor]:
        """Return views of the selected part of each row, to write to. The index of the rows must not be an integer."""
        rows = leaf.unbind()
        if self._picks_places():
            picked = [items.tolist() for items in self._picks()]
            return [rows[row][pick] for row, *pick in zip(*picked, strict=True)]
        head = self.head.cpu() if isinstance(self.head, Tensor) else self.head
        return [rows[row][self.rest] if self.rest else rows[row] for row in torch.arange(len(rows))[head].tolist()]

    def _picks_places(self) -> bool:
        """Return whether tensors index several dims, so that their items together pick single places of rows."""
        return isinstance(self.head, Tensor) and any(isinstance(item, Tensor) for item in self.rest)

    def _picks(self) -> list[Tensor]:
        """Return the picked rows, and for each of them the place in every further indexed dim."""
        if not all(isinstance(item, (int, Tensor)) for item in self.rest):
            raise _unsupported_form(
                f"slices and index tensors together, as in {self.at!r}, cannot index a ragged entry"
            )
        items = torch.broadcast_tensors(*[torch.as_tensor(item).cpu() for item in (self.head, *self.rest)])  # type: ignore[no-untyped-call]
        if items[0].ndim != 1:
            raise _unsupported_form(
                f"index tensors of shape {list(items[0].shape)} cannot take the place of ragged rows"
            )
        return list(items)

    def _pick_places(self, leaf: Tensor) -> Tensor:
        rows, *columns = self._picks()
        if leaf.layout is not torch.jagged:
            return _build_from_rows(self.places(leaf), leaf, 0)
        part = RaggedRows(rows, copy=True).part(leaf)
        positions = _require_positions(part.positions)
        lengths = part.offsets.diff()
        where: list[Any] = [
            torch.repeat_interleave(column.to(lengths.device), lengths, output_size=len(positions))
            for column in columns
        ]
        # Dims between the indexed ones and the ragged one move behind the picked elements.
        between = [_ALL] * (jagged_dim(leaf) - 1 - len(columns))
        values = leaf.values()[tuple(where + between + [positions])]
        return from_jagged(values.movedim(0, len(between)), part.offsets, len(between) + 1)


def _as_integers(item: object) -> tuple[Any, ...]:
    """Replace a mask in an index by the integer indices that torch would make of it."""
    return item.nonzero(as_tuple=True) if isinstance(item, Tensor) and item.dtype in _MASKS else (item,)


def _require_positions(positions: Tensor | None) -> Tensor:
    assert positions is not None
    return positions


# --- splitting and joining --------------------------------------------------------------------------------------------


class Split:
    """Splits any number of leaves into the same pieces along one dim.

    Args:
        starts: the starts of the pieces.
        lengths: the lengths of the pieces.
        dim: the dim.
    """

    def __init__(self, starts: Iterable[int], lengths: Iterable[int], dim: int) -> None:
        self.dim = dim
        self.slices = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        self.rows = [RaggedRows(piece) for piece in self.slices]

    def __call__(self, leaf: Tensor) -> list[Tensor]:
        """Return the pieces of one leaf: views, or copies for the strided layout."""
        if not leaf.is_nested:
            return [leaf.narrow(self.dim, piece.start, piece.stop - piece.start) for piece in self.slices]
        if not self.dim:
            return [rows(leaf) for rows in self.rows]
        _check_regular(leaf, self.dim)
        before = (_ALL,) * self.dim
        return [Index((*before, piece))(leaf) for piece in self.slices]


def unbind(leaf: Tensor, dim: int) -> Sequence[Tensor]:
    """Split a leaf into its elements along one dim, and drop that dim."""
    if not leaf.is_nested or not dim:
        return leaf.unbind(dim)
    _check_regular(leaf, dim)
    before = (_ALL,) * dim
    return [Index((*before, i))(leaf) for i in range(shape_of(leaf)[dim])]


def stack(leaves: Sequence[Tensor], dim: int) -> Tensor:
    """Stack leaves along a new dim after the row dim and before the ragged dim. Their rows must have equal lengths.

    Raises:
        NotImplementedError: torch has no nested tensor for the result.
        ShapeError: the rows differ.
    """
    if not any(map(is_ragged, leaves)):
        return torch.stack(list(leaves), dim)
    first = _check_same_form(leaves)
    if not dim or dim > ragged_dim(first):
        raise _unsupported_form(f"ragged entries of shape {list(shape_of(first))} cannot be stacked along dim {dim}")
    return _join_by_row(torch.stack, leaves, dim, first)


def _join_by_row(join: Callable[..., Tensor], leaves: Sequence[Tensor], dim: int, first: Tensor) -> Tensor:
    """Call `join` (`torch.cat` or `torch.stack`) on the rows of leaves, along a dim before the ragged one."""
    if first.layout is not torch.jagged:
        return _build_from_rows(
            [join(row, dim - 1) for row in zip(*[leaf.unbind() for leaf in leaves], strict=True)], first, 0
        )
    columns = [compact(leaf) for leaf in leaves]
    offsets = offsets_of(columns[0])
    for leaf in columns[1:]:
        _check_same_lengths(offsets.diff(), _row_lengths(leaf), offsets is offsets_of(leaf))
    values = join([leaf.values() for leaf in columns], dim - 1)
    return _with_elements(columns[0], values, int(join is torch.stack))


class Cat:
    """Concatenates columns of leaves along one dim. Leaves that share offsets give results that share offsets."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._known: list[tuple[list[Tensor], Tensor]] = []

    def __call__(self, leaves: Sequence[Tensor]) -> Tensor:
        """Concatenate the leaves of one entry."""
        if not any(map(is_ragged, leaves)):
            return torch.cat(list(leaves), self.dim)
        first = _check_same_form(leaves)
        if self.dim:
            _check_regular(first, self.dim)
            return _join_by_row(torch.cat, leaves, self.dim, first)
        if first.layout is not torch.jagged:
            filled = [leaf for leaf in leaves if leaf.size(0)]
            tables = [_strided_sizes(leaf) for leaf in filled]
            return from_buffer(
                torch.cat([pack_elements(leaf) for leaf in leaves]),
                torch.cat(tables) if filled else _strided_sizes(first),
            )
        columns = [compact(leaf) for leaf in leaves]
        values = torch.cat([leaf.values() for leaf in columns], jagged_dim(first) - 1)
        return from_jagged(values, self._offsets([offsets_of(leaf) for leaf in columns]), jagged_dim(first))

    def _offsets(self, parts: list[Tensor]) -> Tensor:
        for known, offsets in self._known:
            if all(map(is_, known, parts)):
                return offsets
        offsets = _build_offsets(torch.cat([part.diff() for part in parts]))
        self._known.append((parts, offsets))
        return offsets


def _check_regular(leaf: Tensor, dim: int) -> None:
    """Raise an error for a dim that is the ragged one or follows it."""
    ragged = ragged_dim(leaf)
    if dim >= ragged:
        raise _unsupported_form(
            f"dim {dim} of a ragged entry of shape {list(shape_of(leaf))} is not before its ragged dim"
        )


def _check_same_form(leaves: Sequence[Tensor]) -> Tensor:
    """Return the first leaf, after checking that all have the same layout and ragged dim."""
    forms = {_describe_form(leaf) for leaf in leaves}
    if len(forms) > 1:
        raise ShapeError(
            f"ragged entries can only be joined with entries of the same layout and ragged dim, got {sorted(forms)}; "
            "torch.nested.as_nested_tensor(tensor, layout=...) makes a dense one ragged"
        )
    return leaves[0]


def _describe_form(leaf: Tensor) -> str:
    if not leaf.is_nested:
        return "dense"
    return f"jagged along dim {jagged_dim(leaf)}" if leaf.layout is torch.jagged else "strided"


def _check_same_lengths(ours: Tensor, theirs: Tensor, known: bool = False) -> None:
    if not known and not (len(ours) == len(theirs) and bool((ours == theirs.to(ours.device)).all())):
        raise ShapeError(
            f"the lengths of the ragged rows differ: {_format_lengths(ours)} and {_format_lengths(theirs)}"
        )


def _format_lengths(lengths: Tensor) -> str:
    text = str(lengths[:8].tolist())
    return text if len(lengths) <= 8 else f"{text[:-1]}, ...]"


# --- elements ---------------------------------------------------------------------------------------------------------


def elementwise(op: Callable[..., Tensor], *operands: object) -> Tensor:
    """Call `op(*operands)` on the elements of leaves. Operands are leaves, numbers, or tensors that broadcast to them.

    Raises:
        ShapeError: the rows of two ragged leaves differ, or a tensor does not broadcast to the rows.
    """
    leaf = next(filter(is_ragged, operands), None)
    if leaf is None:
        return op(*operands)
    form = compact(leaf)
    values = op(*[_align_elements(value, form) for value in operands])
    if values.shape != pack_elements(form).shape:
        raise _broadcast_error(operands)
    return _with_elements(form, values)


def where(condition: Tensor, ours: Any, theirs: Any) -> Tensor:
    """Call `torch.where` on leaves and numbers. If ragged rows differ, the condition must select whole rows.

    Raises:
        ShapeError: the rows differ, and the condition selects single elements.
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
    """Return plain tensors and numbers for a ragged leaf and its other operands, so that `op` can write into the first.

    Returns:
        the operands, and a function to call after the operation, or `None`. A leaf with holes is written as a copy of
        its elements, and the function copies the result back.

    Raises:
        ShapeError: the rows of two ragged leaves differ, or a tensor does not broadcast to the rows.
    """
    refuse_stored(leaf)
    form = compact(leaf)
    values = [pack_elements(form), *[_align_elements(value, form) for value in operands]]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    if torch.broadcast_shapes(*shapes) != shapes[0]:  # type: ignore[no-untyped-call]
        raise _broadcast_error((leaf, *operands))
    if is_compact(leaf):
        return values, None
    return values, partial(_copy_all, list(leaf.unbind()), list(form.unbind()))


def _broadcast_error(operands: Sequence[Any]) -> ShapeError:
    shapes = " and ".join(str(list(shape_of(value))) for value in operands if isinstance(value, Tensor))
    return ShapeError(f"shapes {shapes} do not broadcast to that of the ragged entry")


def _align_elements(value: object, form: Tensor) -> Any:
    """Return the elements of `value`, aligned with the elements of `form`, a compact ragged leaf."""
    if value is form or not isinstance(value, Tensor) or not value.ndim:
        return pack_elements(form) if value is form else value
    if value.is_nested:
        return _match_rows(value, form)
    if value.ndim > form.ndim:
        raise ShapeError(f"a tensor of shape {list(value.shape)} has more dims than a ragged entry, {form.ndim}")
    value = value.reshape((*[1] * (form.ndim - value.ndim), *value.shape))
    count = form.size(0)
    if value.shape[0] not in (1, count):
        raise ShapeError(f"a tensor of shape {list(value.shape)} does not broadcast to {count} ragged rows")
    value = value.expand(count, *value.shape[1:])
    if form.layout is not torch.jagged:
        rows = [part.expand(row.shape).reshape(-1) for part, row in zip(value, form.unbind(), strict=True)]
        return torch.cat(rows) if rows else pack_elements(form)
    ragged = jagged_dim(form)
    if value.shape[ragged] != 1:
        raise ShapeError(
            f"a dense tensor of shape {list(value.shape)} does not broadcast to a ragged entry of shape "
            f"{list(form.shape)}: its size along dim {ragged} must be 1"
        )
    repeated = torch.repeat_interleave(value.select(ragged, 0), offsets_of(form).diff(), 0)
    return repeated.movedim(0, ragged - 1)


def _match_rows(value: Tensor, form: Tensor) -> Tensor:
    """Return the elements of a ragged leaf in the order of `form`'s elements. Both must have rows of the same sizes."""
    if value.layout is form.layout is torch.jagged and jagged_dim(value) == jagged_dim(form):
        _check_same_lengths(_row_lengths(form), _row_lengths(value), offsets_of(value) is offsets_of(form))
        return pack_elements(value)
    ours, theirs = row_sizes(form), row_sizes(value)
    if not torch.equal(ours, theirs):
        raise ShapeError(f"the sizes of the ragged rows differ: {ours[:8].tolist()} and {theirs[:8].tolist()}")
    if form.layout is torch.jagged:
        return torch.cat(value.unbind(), jagged_dim(form) - 1) if len(ours) else pack_elements(form)
    return flatten_in_row_order(value)


def like(value: Tensor, leaf: Tensor) -> Tensor:
    """Convert a ragged leaf to the layout of another leaf with the same rows, so that torch finds their shapes equal.

    Raises:
        ShapeError: `value` is not ragged, or its rows have other shapes.
    """
    if not is_ragged(value):
        raise ShapeError(
            f"a dense value of shape {list(value.shape)} does not fit a ragged entry of shape {list(shape_of(leaf))}"
        )
    values = _match_rows(value, compact(leaf))
    if leaf.layout is torch.jagged and lengths_of(leaf) is not None:
        positions = _require_positions(RaggedRows(_ALL, copy=True).part(leaf).positions)
        values = torch.zeros_like(leaf.values()).index_copy(jagged_dim(leaf) - 1, positions, values)
    return _with_elements(leaf, values)


def flatten_in_row_order(leaf: Tensor) -> Tensor:
    """Return the elements of a ragged leaf as a flat tensor, row after row in C order."""
    if leaf.layout is torch.jagged and jagged_dim(leaf) > 1 and leaf.size(0):
        return torch.cat([row.reshape(-1) for row in leaf.unbind()])
    return pack_elements(leaf).reshape(-1)


def pair_copies(target: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return lists of targets and sources: plain tensors to copy, in order to copy a value into a nested tensor.

    Args:
        target: the nested tensor.
        value: another one; or a tensor without dims, for all elements. Torch does not write one that requires grad.

    Raises:
        ShapeError: `value` is neither, or its rows have other shapes.
    """
    if not value.ndim and not (value.requires_grad and torch.is_grad_enabled()):
        targets = [pack_elements(target)] if is_compact(target) else list(target.unbind())
        return targets, [value] * len(targets)
    if not is_ragged(value):
        raise ShapeError(
            f"a ragged entry of shape {list(shape_of(target))} cannot be updated in place with a dense value of shape "
            f"{list(value.shape)}"
        )
    form = compact(target)
    source = _match_rows(value, form)
    if is_compact(target):
        return [pack_elements(target)], [source]
    return list(target.unbind()), list(value.unbind())


def assignment(leaf: Tensor, at: object, value: object) -> Callable[[], Any]:
    """Check that `value` fits the indexed part of a ragged leaf, and return a function that assigns it in place.

    Rows keep their lengths, because an in-place assignment never changes a shape.

    Args:
        leaf: the ragged leaf.
        at: an output of `leaf_index`.
        value: a number, a tensor that broadcasts to every selected row, or a nested tensor with rows of the same
            shapes.

    Raises:
        ShapeError: the value does not fit.
    """
    refuse_stored(leaf)
    index = Index(at)
    index.check(leaf)
    if isinstance(value, Tensor):
        value = value.to(leaf.device, leaf.dtype)
    if index.rows is None:
        return _plan_copies([leaf[index.head][index.rest]], [value])
    if leaf.layout is torch.jagged and not index.rest and (is_ragged(value) or not isinstance(value, Tensor)):
        rows = RaggedRows(index.head, copy=True)
        part = rows.part(leaf)
        dim, positions = jagged_dim(leaf) - 1, _require_positions(part.positions)
        if not isinstance(value, Tensor):
            return partial(leaf.values().index_fill_, dim, positions, value)
        target, elements = leaf.values(), _match_rows(value, rows(leaf))
        if elements.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            elements = elements.clone()  # torch refuses to copy a leaf into itself
        return partial(target.index_copy_, dim, positions, elements)
    places = index.places(leaf)
    return _plan_copies(places, _split_rows(value, places))


def _split_rows(value: object, places: list[Tensor]) -> list[Any]:
    """Return the value for each row: its own part of `value`, or the same value for all rows."""
    if is_ragged(value) or (places and isinstance(value, Tensor) and value.ndim > places[0].ndim):
        parts = list(value.unbind())
        if len(parts) != len(places):
            raise ShapeError(f"a value with {len(parts)} rows cannot be assigned to {len(places)} rows")
        return parts
    return [value] * len(places)


def _plan_copies(places: list[Tensor], values: list[Any]) -> Callable[[], None]:
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
