"""A digest of a workload's result, so that two packages are compared only when they did the same work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def digest(value: Any) -> dict[str, list[str]]:
    """Return sorted descriptions of the content of `value`: `leaves` (path, shape, dtype, sum) and `batches`.

    Containers, dicts and lists of pairs count as mappings, so that a floor's dict compares equal to a
    container; the batch sizes, which a dict lacks, are kept apart.
    """
    leaves: list[str] = []
    batches: list[str] = []
    _walk(value, (), leaves, batches)
    return {"leaves": sorted(leaves), "batches": sorted(batches)}


def _walk(value: Any, path: tuple[Any, ...], leaves: list[str], batches: list[str]) -> None:
    if isinstance(value, Tensor):
        total = float(value.detach().double().sum())
        leaves.append(f"{path} {tuple(value.shape)} {value.dtype} {total:.5g}")
    elif hasattr(value, "batch_size"):
        batches.append(f"{path} {tuple(value.batch_size)}")
        _walk_pairs(value.items(), path, leaves, batches)
    elif isinstance(value, dict):
        _walk_pairs(value.items(), path, leaves, batches)
    elif isinstance(value, list | tuple):
        _walk_sequence(value, path, leaves, batches)
    else:
        leaves.append(f"{path} {value!r}")


def _walk_pairs(pairs: Iterable[tuple[Any, Any]], path: tuple[Any, ...], leaves: list[str], batches: list[str]) -> None:
    for key, value in pairs:
        _walk(value, (*path, key), leaves, batches)


def _walk_sequence(
    items: list[Any] | tuple[Any, ...], path: tuple[Any, ...], leaves: list[str], batches: list[str]
) -> None:
    pairs = all(isinstance(item, tuple) and len(item) == 2 and _is_key(item[0]) for item in items)
    if pairs and any(not _is_key(item[1]) for item in items):
        _walk_pairs(items, path, leaves, batches)
    elif all(_is_key(item) for item in items):
        # Keys: which ones there are matters, their order does not.
        leaves.extend(f"{path} {item!r}" for item in items)
    else:
        for place, item in enumerate(items):
            _walk(item, (*path, place), leaves, batches)


def _is_key(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, tuple) and all(isinstance(part, str) for part in value))
