"""`pad_and_stack` and `unpad`, which implement `tensordict.pad_sequence` and `tensordict.unpad_sequence`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensordict.convert.python_structures import refuse_exclusive_keys
from tensordict.core import makers
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, identity, is_node, merged_device, named_error, raise_key_mismatch
from tensordict.core.exceptions import DimError, ShapeError
from tensordict.core.keys import Path, entry_of, joined, path_of
from tensordict.core.shapes import with_dim
from tensordict.io.specification import find_uneven
from tensordict.ops.dims.batch_ops import drop_dim
from tensordict.ops.dims.gathering import write_into
from tensordict.ops.dims.padding import Padder
from tensordict.ops.dims.stacking import stack_containers


class SequencePadding:
    """One call of `pad_sequence`: the dim, the padding values, whether it returns masks, the sides, the multiple.

    `value` is a mapping from keys to padding values, or one number for all entries; `side` likewise. Padded lengths are
    multiples of `multiple`. `used` collects the paths of entries that the mappings name.

    Raises:
        ValueError: a side or the multiple is invalid.
    """

    def __init__(self, dim: int, value: Any, masks: bool, side: Any, multiple: int) -> None:
        self.dim = dim
        self.values = _by_path(value)
        self.masks = masks
        self.sides = _by_path(side)
        self.multiple = multiple
        self.used: set[Path] = set()
        for one in self.sides.values() if isinstance(self.sides, dict) else (self.sides,):
            if one not in ("left", "right"):
                raise ValueError(f"padding_side is 'left' or 'right', got {one!r}")
        if type(multiple) is not int or multiple < 1:
            raise ValueError(f"pad_to_multiple_of is an int of at least 1, got {multiple!r}")

    def run(self, containers: Sequence[Contract]) -> tuple[Any, Any]:
        """Return the padded stack of containers, and the container of its masks, or `None`.

        Raises:
            KeyError: there is a padding value or a side for a key that has no entry.
        """
        result, masks = self.pad_nodes(containers, ())
        for named, what in ((self.values, "value"), (self.sides, "side")):
            if isinstance(named, dict) and not self.used.issuperset(named):
                unknown = [joined(path) for path in named if path not in self.used]
                known = list(result.keys(True, True))
                raise KeyError(f"there is a padding {what} for {unknown}, but the containers have the entries {known}")
        return result, masks

    def find_form(self, path: Path) -> tuple[float, str]:
        """Return the padding value and the side of an entry."""
        value, side = self.values, self.sides
        if isinstance(value, dict):
            self.used.add(path)
            value = value.get(path, 0.0)
        if isinstance(side, dict):
            self.used.add(path)
            side = side.get(path, "right")
        return value, side

    def pad_nodes(self, nodes: Sequence[Contract], path: Path) -> tuple[Any, Any]:
        """Return the padded stack of containers, and the container of its masks, or `None`."""
        mappings = [node._entries for node in nodes]
        names = mappings[0].keys()
        if any(mapping.keys() != names for mapping in mappings):
            raise_key_mismatch(mappings, path)
        first = nodes[0]
        sizes = [node._batch_size for node in nodes]
        # Nested containers may have different numbers of batch dims. The result has the dims of all.
        ndim = min(map(len, sizes)) if path else len(first._batch_size)
        size = self._find_padded_shape([one[:ndim] for one in sizes] if path else sizes, ndim, path, "batch sizes")
        entries: dict[str, Any] = {}
        masks: dict[str, Any] = {}
        for name in names:
            column = [mapping[name] for mapping in mappings]
            key = (*path, name)
            kinds = {issubclass(kind, Contract) for kind in set(map(type, column))}
            if len(kinds) > 1:
                raise TypeError(f"entry {joined(key)!r} is a container in one input and a tensor in another")
            if True in kinds and (column[0]._is_non_tensor or isinstance(column[0], Tensor)):
                # Non-tensor values and unbatched tensors do not get a mask.
                side = self.find_form(key)[1]
                entries[name] = stack_containers([self._pad_holder(value, size, side) for value in column])
                continue
            join = self.pad_nodes if True in kinds else self._make_leaf_join(ndim)
            entries[name], masks[name] = join(column, key)
        names_of = [node._names for node in nodes]
        dim_names = [None, *first._names] if first._names and names_of.count(first._names) == len(nodes) else None
        shape = torch.Size((len(nodes), *size))
        device = merged_device(nodes)
        make = makers.dense
        result = make(entries, shape, device, dim_names)
        if len({type(node) for node in nodes}) == 1:
            result = first._rewrap(result)
        return result, make(masks, shape, device, None) if self.masks else None

    def _make_leaf_join(self, ndim: int) -> Callable[[list[Tensor], Path], tuple[Tensor, Tensor | None]]:
        """Return a function that pads and stacks leaves, and makes their mask. `ndim`: the number of batch dims."""

        def join(column: list[Any], path: Path) -> tuple[Tensor, Tensor | None]:
            if True in [leaf.is_nested for leaf in column]:
                raise NotImplementedError(
                    f"entry {joined(path)!r} is ragged: make it dense first with to_padded_tensor, or use cat"
                )
            shapes = [leaf.shape for leaf in column]
            rank = len(shapes[0])
            dim = self.dim if self.dim >= 0 else rank + self.dim
            if not 0 <= dim < rank:
                raise DimError(f"entry {joined(path)!r} has shape {list(shapes[0])} and no dim {self.dim} to pad")
            shape = self._find_padded_shape(shapes, rank, path, "shapes")
            lengths = [one[dim] for one in shapes]
            if len({leaf.dtype for leaf in column}) > 1:
                dtype = reduce(torch.promote_types, [leaf.dtype for leaf in column])
                column = [leaf.to(dtype) for leaf in column]
            value, side = self.find_form(path)
            try:
                padded = _pad_leaves(column, lengths, shape[dim], dim, value, side)
            except TypeError as error:
                raise named_error(error, path) from error
            return padded, self._make_mask(lengths, shape, dim, ndim, column[0].device, side)

        return join

    def _find_padded_shape(self, shapes: list[torch.Size], ndim: int, path: Path, what: str) -> list[int]:
        """Return the shape that all inputs have after padding. Raises if they differ in another dim."""
        dim = self.dim if self.dim >= 0 else ndim + self.dim
        columns = list(enumerate(zip(*shapes)))
        differing = [at for at, sizes in columns if at != dim and sizes.count(sizes[0]) != len(sizes)]
        if differing or list(map(len, shapes)).count(ndim) != len(shapes):
            rest = drop_dim(shapes[0], dim)
            others = [shape for shape in shapes if len(shape) != ndim or drop_dim(shape, dim) != rest]
            raise ShapeError(
                f"{entry_of(path)}{what} {list(shapes[0])} and {list(others[0])} differ in more than dim {self.dim}, "
                "the one that pad_sequence pads"
            )
        return [-(-max(sizes) // self.multiple) * self.multiple if at == dim else sizes[0] for at, sizes in columns]

    def _make_mask(
        self, lengths: list[int], shape: list[int], dim: int, ndim: int, device: torch.device, side: str
    ) -> Tensor | None:
        """Return the mask of elements, `False` for padding. Its dims are the batch dims and the padded dim."""
        if not self.masks:
            return None
        longest = shape[dim]
        steps, counts = torch.arange(longest, device=device), torch.tensor(lengths, device=device)[:, None]
        mask = steps >= longest - counts if side == "left" else steps < counts
        over = shape[:ndim] if dim < ndim else [*shape[:ndim], longest]
        position = min(dim, ndim)
        return (
            mask.reshape(len(lengths), *[longest if d == position else 1 for d in range(len(over))])
            .expand(-1, *over)
            .contiguous()
        )

    def _pad_holder(self, node: Contract, size: list[int], side: str) -> Contract:
        """Pad a holder of values, or an unbatched tensor, to a batch size that starts with `size`."""
        own = node._batch_size
        missing = [longest - length for length, longest in zip(own, size, strict=False)]
        if not any(missing):
            return node
        pads = [n for extra in missing for n in ((extra, 0) if side == "left" else (0, extra))]
        return node._map(Padder(pads, 0.0), torch.Size([*size, *own[len(size) :]]), len(own), identity)


def _by_path(given: Any) -> Any:
    """Return a mapping from keys as a dict of paths, and anything else unchanged."""
    if isinstance(given, (Mapping, Contract)):
        return {path_of(key): value for key, value in given.items()}  # type: ignore[union-attr]
    return given


def _pad_leaves(column: list[Any], lengths: list[int], longest: int, dim: int, value: float, side: str) -> Tensor:
    """Pad leaves to the length `longest` along one dim, and stack them."""
    if lengths.count(longest) == len(lengths):
        return torch.stack(column)
    # Compilers fuse the calls below. That of old releases of torch (2.11) cannot trace the side of the padding.
    if not dim and longest in lengths and not torch.compiler.is_compiling():
        return internals.pad_sequence(column, True, value, side)
    behind, left = (0, 0) * (column[0].ndim - dim - 1), side == "left"
    return torch.stack(
        [
            torch.constant_pad_nd(leaf, (*behind, longest - n, 0) if left else (*behind, 0, longest - n), value)
            for leaf, n in zip(column, lengths, strict=True)
        ]
    )


def pad_and_stack(
    containers: Any, dim: int, value: object, out: object, return_mask: object, side: object, multiple: int
) -> Any:
    """Pad containers along one dim and stack them; see :func:`tensordict.pad_sequence`."""
    padding = SequencePadding(dim, value, return_mask is not False, side, multiple)
    items = list(containers)
    if not items:
        raise ShapeError("pad_sequence needs at least one container, got none")
    for position, item in enumerate(items):
        if not isinstance(item, Contract):
            raise TypeError(f"pad_sequence takes containers, got {type(item).__name__} at position {position}")
    key: Any = "masks" if return_mask is True else return_mask
    result, masks = padding.run(items)
    if masks is not None:
        if key in result:
            raise KeyError(f"the masks cannot go to {key!r}, an existing entry: pass return_mask=<a free key>")
        result.set(key, masks)
    return result if out is None else write_into(out, result)


# --- unpad_sequence ---------------------------------------------------------------------------------------------------


class _Runs(NamedTuple):
    """The elements that the rows of a batch keep along one dim: their first position, and their number."""

    starts: list[int]
    lengths: list[int]

    def cut(self, parts: Sequence[Any], dim: int, full: int) -> list[Any]:
        """Cut the tensors of all rows along a dim of length `full`. Returns views."""
        return [
            part if length == full else part.narrow(dim, start, length)
            for part, start, length in zip(parts, self.starts, self.lengths, strict=True)
        ]


class _Unpadding:
    """One call of `unpad_sequence`: the dim, and the runs of the mask that holds for every entry."""

    def __init__(self, dim: int, common: _Runs | None, longest: int) -> None:
        self.dim = dim
        self.common = common
        self.longest = longest

    def split_node(self, node: Any, masks: Any, path: Path) -> tuple[list[Any], tuple[int, _Runs] | None]:
        """Return the container of each row, and the dim and the runs along which its batch size was padded, if any."""
        is_stack_of_rows = node._members() and node.stack_dim == 0
        if is_stack_of_rows and (self.common is not None or not path) and find_uneven(node, by_keys=True) is not None:
            return self.split_stack(node, masks, path)
        refuse_exclusive_keys(node, "unpad_sequence")
        size = node._batch_size[1:]
        at, runs = (self.dim, self.common) if 0 <= self.dim < len(size) else (0, None)
        sides = True  # all entries are padded on the same side
        columns: dict[str, Any] = {}
        whole = []
        for name, value in node._entries.items():
            key = (*path, name)
            mask = None if masks is None or name not in masks else masks._entries[name]
            if isinstance(value, Contract) and (value._is_non_tensor or not is_node(value)):
                columns[name] = None
                whole.append((name, value))
                continue
            if isinstance(value, Contract):
                if masks is not None and mask is None and any(True for _ in value._walk()):
                    raise KeyError(f"the masks have no entry {joined(key)!r}, which the padded container has")
                columns[name], found = self.split_node(value, mask, key)
                if found is None:  # no tensor in it tells where the rows end
                    whole.append((name, value))
            else:
                dim = self.dim if self.dim >= 0 else value.ndim - 1 + self.dim
                columns[name], own = self.split_leaf(value, mask, dim, len(size), key)
                found = (dim, own)
            if found is None or found[0] >= len(size):
                continue
            if runs is None:
                at, runs = found
            elif found[0] == at and found[1].lengths == runs.lengths:
                sides = sides and found[1].starts == runs.starts
            else:
                raise ShapeError(
                    f"entry {joined(key)!r}: its mask keeps the lengths {found[1].lengths} along batch dim {found[0]}, "
                    f"but that of another entry keeps {runs.lengths} along batch dim {at}"
                )
        for name, value in whole:
            if runs is None and columns[name] is not None:
                continue
            parts = value.unbind(0) if is_node(value) else [value] * node._batch_size[0]
            if runs is not None and is_node(value):
                if not sides:
                    raise ShapeError(
                        f"entry {joined((*path, name))!r} has no mask, and the other entries are padded on different "
                        "sides: pad all entries on one side"
                    )
                before = (slice(None),) * at
                spans = [slice(start, start + length) for start, length in zip(*runs, strict=True)]
                parts = [part._index((*before, span)) for part, span in zip(parts, spans, strict=True)]
            columns[name] = parts
        count = node._batch_size[0]
        sizes = [size] * count if runs is None else [with_dim(size, at, length) for length in runs.lengths]
        pieces = [{name: column[row] for name, column in columns.items()} for row in range(count)]
        made = node._build_many(pieces, sizes, node._device, node._names and node._names[1:])
        return made, None if runs is None else (at, runs)

    def split_stack(self, stack: Any, masks: Any, path: Path) -> tuple[list[Any], tuple[int, _Runs] | None]:
        """Split a lazy stack of rows, each as a batch of one row: the rows may have different keys."""
        if masks is not None and masks._batch_size[:1] != stack._batch_size[:1]:
            raise ShapeError(
                f"{entry_of(path)}the masks have the batch size {list(masks._batch_size)}; it must begin with the "
                f"number of rows, {stack._batch_size[0]}, because only some rows have some of the entries"
            )
        rows: list[Any] = []
        at: int | None = None
        for position, member in enumerate(stack.unbind(0)):
            span = slice(position, position + 1)
            own = None if self.common is None else _Runs(*(column[span] for column in self.common))
            one = _Unpadding(self.dim, own, self.longest)
            made, found = one.split_node(member.unsqueeze(0), None if masks is None else masks[span], path)
            rows += made
            at = found[0] if found else at
        return rows, None if at is None or self.common is None else (at, self.common)

    def split_leaf(
        self, leaf: Tensor, mask: Tensor | None, dim: int, batch_dims: int, path: Path
    ) -> tuple[list[Tensor], _Runs]:
        """Return the rows of a leaf without padding, and the runs of its mask. `batch_dims`: of one row."""
        if not 0 <= dim < leaf.ndim - 1:
            raise DimError(f"entry {joined(path)!r} has rows of shape {list(leaf.shape[1:])} and no dim {self.dim}")
        full = leaf.shape[dim + 1]
        runs, longest = self.common, self.longest
        if runs is None:
            if mask is None:
                raise KeyError(f"the masks have no entry {joined(path)!r}, which the padded container has")
            at = 1 + min(dim, batch_dims)
            if mask.ndim <= at or len(mask) != len(leaf):
                raise ShapeError(
                    f"entry {joined(path)!r} of shape {list(leaf.shape)} has a mask of shape {list(mask.shape)}"
                )
            runs, longest = _find_runs(mask, at, path), mask.shape[at]
        if longest != full:
            raise ShapeError(
                f"entry {joined(path)!r} has the length {full} along dim {self.dim} of its rows, but its mask has the "
                f"length {longest}"
            )
        return runs.cut(leaf.unbind(0), dim, full), runs


def _find_runs(mask: Tensor, dim: int, path: Path) -> _Runs:
    """Find the elements that a mask keeps along `dim`, in each row of its first dim."""
    flags = mask.bool().movedim(dim, 1)
    length = flags.shape[1]
    if not length or not len(flags):
        return _Runs([0] * len(flags), [0] * len(flags))
    alike = True
    if flags.ndim > 2:
        flags = flags.flatten(2)
        alike = flags.shape[2] == 0 or bool((flags == flags[:, :, :1]).all())
        flags = flags.any(2)
    counts = flags.sum(1)
    rises = (flags[:, 1:] > flags[:, :-1]).sum(1) + flags[:, 0]
    found = torch.stack([flags.byte().argmax(1), counts, rises]).tolist()
    if not alike or max(found[2]) > 1:
        raise ShapeError(
            f"{entry_of(path)}the mask of each row must mark one contiguous run of elements, the same one along all "
            "other dims"
        )
    return _Runs(found[0], found[1])


def unpad(padded: Any, mask: Any, dim: int) -> Any:
    """Split a padded batch into its rows; see :func:`tensordict.unpad_sequence`."""
    if not isinstance(padded, Contract):
        raise TypeError(f"unpad_sequence takes a container, got {type(padded).__name__}")
    if not padded._batch_size:
        raise ShapeError("unpad_sequence splits the first batch dim, and the container has no batch dims")
    if mask is None:
        mask = padded._entries.get("masks")
        if not is_node(mask):
            raise ValueError("unpad_sequence needs masks: pass mask=, or a result of pad_sequence(return_mask=True)")
        padded = padded.exclude("masks")
    common, longest = None, 0
    if not isinstance(mask, Contract):
        if not isinstance(mask, Tensor):
            raise TypeError(f"the mask is a tensor or a container, got {type(mask).__name__}")
        count, longest = padded._batch_size[0], mask.shape[-1] if mask.ndim else 0
        if mask.ndim != 2 or len(mask) != count:
            raise ShapeError(f"the mask has the shape [{count}, longest row], got {list(mask.shape)}")
        common, mask = _find_runs(mask, 1, ()), None
    rows, _ = _Unpadding(dim, common, longest).split_node(padded, mask, ())
    size = None if rows else padded._batch_size[1:]
    names = padded._names and padded._names[0]
    return makers.lazy_stack(*rows, stack_dim=0, batch_size=size, stack_dim_name=names)
