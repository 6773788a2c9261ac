"""`pack_rows` and `unpack_rows`, which implement `tensordict.pack_sequences` and `tensordict.unpack_sequences`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import Contract, merged_device, raise_key_mismatch
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path, entry_of, joined, path_of
from tensordict.core.shapes import with_dim
from tensordict.ops.dims.stacking import cat_containers, maybe_dense_stack_containers

TOKENS, SEQUENCES, INDICES, CU_SEQLENS = "tokens", "sequences", "indices", "cu_seqlens"


def plan_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign sequences to rows of at most `max_tokens` tokens. Returns the numbers of the sequences of each row.

    Best-fit decreasing: the longest sequence comes first, and each goes to the fullest row that has space for it. This
    takes at most 11/9 of the smallest number of rows, and one more (D. S. Johnson, "Near-optimal bin packing
    algorithms", 1973). Equal lengths keep their order, and of equally full rows the older one is taken. Then the
    sequences of a row, and the rows by their first sequence, are sorted by number.
    """
    rows: list[list[int]] = []
    # A row is one sortable int: its free space times `count`, plus its number.
    count = max(len(lengths), 1)
    open_rows: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[number]
        at = bisect_left(open_rows, length * count)
        if at < len(open_rows):
            free, row = divmod(open_rows.pop(at), count)
            rows[row].append(number)
        else:
            free, row = max_tokens, len(rows)
            rows.append([number])
        insort(open_rows, (free - length) * count + row)
    return sorted(map(sorted, rows))


def pack_rows(sequences: Any, max_tokens: int, keys: Sequence[Any] | None) -> Any:
    """Pack sequences into rows of tokens; see :func:`tensordict.pack_sequences`."""
    items = list(sequences)
    if (most := index(max_tokens)) < 1:
        raise ValueError(f"max_tokens is the number of tokens of a row, at least 1, got {max_tokens}")
    for number, item in enumerate(items):
        if not isinstance(item, Contract):
            raise TypeError(f"pack_sequences takes containers, got {type(item).__name__} at position {number}")
    rest: list[Any] | None = None
    if keys is not None:
        if isinstance(keys, str):
            raise TypeError(f"keys is a list of keys, got the text {keys!r}; pass [{keys!r}]")
        paths = [path_of(key) for key in keys]
        names = list(map(joined, paths))
        for number, item in enumerate(items):
            if missing := [joined(path) for path in paths if not item._has(path)]:
                raise KeyError(f"pack_sequences: sequence {number} has no entry {missing[0]!r}")
        rest = [item.exclude(*names) for item in items]
        items = [item.select(*names) for item in items]
    if not items:
        raise ShapeError("pack_sequences needs at least one sequence, got none")
    lengths = [_count_tokens(item, number) for number, item in enumerate(items)]
    if max(lengths) > most:
        number = next(number for number, length in enumerate(lengths) if length > most)
        raise ShapeError(
            f"sequence {number} has {lengths[number]} tokens, which exceeds max_tokens={most}: cut it, or raise "
            "max_tokens"
        )
    plan = plan_rows(lengths, most)
    order = [number for row in plan for number in row]
    in_order = [lengths[number] for number in order]
    joint = _join_nodes([items[number] for number in order], in_order, order, ())
    inner = [[lengths[number] for number in row] for row in plan]
    totals = list(map(sum, inner))
    device = next((leaf.device for leaf in joint._leaves()), torch.device("cpu"))
    ends = [[0, *accumulate(row)] for row in inner]
    columns = {
        TOKENS: _split_node(joint, totals, ()),
        "position_ids": _count_positions(in_order, device).split_with_sizes(totals),
        CU_SEQLENS: _to_tensors(ends, torch.int32, device),
        "max_seqlen": [makers.value(max(row), torch.Size()) for row in inner],
        INDICES: _to_tensors(plan, torch.int64, device),
    }
    if rest is not None and any(not item.is_empty() for item in rest):
        columns[SEQUENCES] = [maybe_dense_stack_containers([rest[number] for number in row]) for row in plan]
    size, of = torch.Size(), joint._device
    rows = [makers.dense(dict(zip(columns, row)), size, of, None) for row in zip(*columns.values(), strict=True)]
    return makers.lazy_stack(*rows, stack_dim=0)


def _to_tensors(rows: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Return a tensor for each list of ints. They share the memory of one tensor, which is copied to the device."""
    flat = torch.tensor([number for row in rows for number in row], dtype=dtype).to(device)
    return flat.split_with_sizes(list(map(len, rows)))


def _count_positions(lengths: list[int], device: torch.device) -> Tensor:
    """Return the position of each token within its sequence."""
    steps = torch.arange(max(lengths), device=device)
    return torch.cat([steps.narrow(0, 0, length) for length in lengths])


def _count_tokens(node: Any, number: int) -> int:
    """Return the number of tokens: the first batch dim of a sequence, or else the length of its first leaf."""
    if node._batch_size:
        return int(node._batch_size[0])
    for path, leaf in node._walk():
        if leaf.is_nested or not leaf.ndim:
            raise _refuse_entry(path, leaf, number)
        return int(leaf.shape[0])
    raise ShapeError(f"pack_sequences: sequence {number} has no tensor that tells its number of tokens")


def _refuse_entry(path: Path, value: Any, number: int, length: int | None = None) -> Exception:
    what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
    instead = "" if length is None else f", of which the sequence has {length}"
    return ShapeError(
        f"entry {joined(path)!r} of sequence {number} has the {what}, and not one element for each token{instead}: "
        "name the entries of the tokens with keys=[...] (pack_keys of collate), and the others are stacked"
    )


def _join_nodes(nodes: Sequence[Any], lengths: list[int], numbers: Sequence[int], path: Path) -> Any:
    """Concatenate containers along their first dim, whether it is a batch dim or not.

    Args:
        nodes: the containers.
        lengths: their numbers of tokens.
        numbers: their numbers among the sequences, for errors.
        path: where they are in their sequences.

    Raises:
        KeyError: the keys differ.
        RuntimeError: an entry does not have one element for each token, or entries cannot be concatenated.
    """
    mappings = [node._entries for node in nodes]
    if any(mapping.keys() != mappings[0].keys() for mapping in mappings):
        raise_key_mismatch(mappings, path)
    first, depth = nodes[0], len(nodes[0]._batch_size)
    for node, length, number in zip(nodes, lengths, numbers, strict=True):
        if len(node._batch_size) != depth or (depth and node._batch_size != with_dim(first._batch_size, 0, length)):
            raise ShapeError(
                f"{entry_of(path)}sequence {number} has {length} tokens and batch size {list(node._batch_size)}, but "
                f"sequence {numbers[0]} batch size {list(first._batch_size)}: they may differ in the first dim only, "
                "which counts the tokens"
            )
    entries: dict[str, Any] = {}
    for name in mappings[0]:
        key = (*path, name)
        column = [mapping[name] for mapping in mappings]
        kinds = {issubclass(kind, Contract) for kind in set(map(type, column))}
        if kinds == {True} and not any(value._is_non_tensor or value._is_tensor for value in column):
            entries[name] = _join_nodes(column, lengths, numbers, key)
            continue
        for value, length, number in zip(column, lengths, numbers, strict=True):
            if not value.ndim or value.shape[0] != length:
                raise _refuse_entry(key, value, number, length)
        try:
            entries[name] = cat_containers(column) if True in kinds else torch.cat(column)
        except (RuntimeError, TypeError) as error:
            raise type(error)(f"entry {joined(key)!r} cannot be concatenated: {error}") from error
    size = with_dim(first._batch_size, 0, sum(lengths)) if depth else first._batch_size
    names = first._names if all(node._names == first._names for node in nodes) else None
    result = makers.dense(entries, size, merged_device(nodes), names)
    return first._rewrap(result) if len(set(map(type, nodes))) == 1 else result


def _split_node(node: Any, lengths: list[int], path: Path) -> list[Any]:
    """Split a container into consecutive parts along its first dim. The parts are views."""
    total = sum(lengths)
    columns: list[Sequence[Any]] = []
    entries = node._entries
    for name, value in entries.items():
        nested = isinstance(value, Contract)
        if nested and not value._is_non_tensor and not value._is_tensor:
            columns.append(_split_node(value, lengths, (*path, name)))
        elif not value.ndim or value.shape[0] != total:
            raise ShapeError(
                f"entry {joined((*path, name))!r} has the shape {list(value.shape)}, and the row has {total} tokens"
            )
        else:
            columns.append(value.split(lengths, 0) if nested else value.split_with_sizes(lengths))
    size = node._batch_size
    sizes = [with_dim(size, 0, length) if size else size for length in lengths]
    pieces = [dict(zip(entries, row)) for row in zip(*columns, strict=True)] if columns else [{} for _ in lengths]
    return node._build_many(pieces, sizes, node._device, node._names)  # type: ignore[no-any-return]


def unpack_rows(rows: Any) -> Any:
    """Split packed rows into sequences; see :func:`tensordict.unpack_sequences`."""
    found: dict[int, Any] = {}
    for number, row in enumerate([rows] if isinstance(rows, Contract) and not rows._batch_size else rows):
        if not isinstance(row, Contract):
            raise TypeError(f"unpack_sequences takes the rows of pack_sequences, got {type(row).__name__}")
        if missing := [name for name in (TOKENS, CU_SEQLENS, INDICES) if name not in row._entries]:
            raise KeyError(f"unpack_sequences takes the rows of pack_sequences, and row {number} has no {missing[0]!r}")
        ends, indices = row._entries[CU_SEQLENS].tolist(), row._entries[INDICES].tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        parts = _split_node(row._entries[TOKENS], lengths, (TOKENS,))
        if SEQUENCES in row._entries:
            parts = [part.update(rest) for part, rest in zip(parts, row._entries[SEQUENCES].unbind(0), strict=True)]
        if repeated := found.keys() & indices:
            raise ValueError(f"sequence {min(repeated)} is in several rows: unpack the rows of one batch at a time")
        found.update(zip(indices, parts, strict=True))
    if not found:
        raise ShapeError("unpack_sequences needs at least one row, got none")
    return makers.lazy_stack(*[found[number] for number in sorted(found)], stack_dim=0)
