"""Sources of updates: containers, mappings with nested keys, (key, value) pairs and keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensordict.core.contract import Contract, is_node
from tensordict.core.keys import Path, path_of


def merge_sources(source: Any, kwargs: dict[str, Any]) -> Any:
    """Return one mapping or container with the entries of an update, from its argument and its keyword arguments."""
    if source is None:
        return kwargs
    if type(source) is dict and not kwargs:
        return source
    if kwargs:
        source = {**dict(source.items()), **kwargs}
    if hasattr(source, "items"):
        return source
    try:
        return dict(source)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "an update reads from a container, a mapping, (key, value) pairs or keyword arguments, got "
            f"{type(source).__name__}"
        ) from error


def select_from_source(source: Any, keys: Iterable[object]) -> Any:
    """Return the entries of `source` at these nested keys, without missing keys."""
    if isinstance(keys, str):
        keys = [keys]
    if isinstance(source, Contract):
        return source.select(*keys, strict=False)
    nested = [key for key in source.keys() if type(key) is not str]
    out: dict[Any, Any] = {}
    for path in map(path_of, keys):
        for key in (path[0], *nested):
            own, value = path_of(key), source.get(key)
            if value is None:
                continue
            if own[: len(path)] == path:
                out[key] = value
            elif path[: len(own)] == own and isinstance(value, (Contract, Mapping)):
                found = select_from_source(value, [path[len(own) :]])
                out.update({(*own, *path_of(below)): item for below, item in found.items()})
    return out


def walk_leaf_items(source: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Iterate over the leaves and values of a container or mapping, as (path, value) pairs."""
    for key, item in source.items():
        path = (*prefix, *path_of(key))
        if isinstance(item, Mapping) or (is_node(item) and not item._is_non_tensor):
            yield from walk_leaf_items(item, path)
        else:
            yield path, item


def nest_under(path: Sequence[str], value: object) -> Any:
    """Wrap `value` in one dict for each name of `path`."""
    for name in reversed(path):
        value = {name: value}
    return value
