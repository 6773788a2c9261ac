"""What an update reads its values from: a container, a mapping with nested keys, keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensordict.contract import Contract, is_node
from tensordict.keys import Path, joined, path_of
from tensordict.ops.reading import Reading


def one_source(source: Any, kwargs: dict[str, Any]) -> Any:
    """The one thing an update reads from."""
    if source is None:
        return kwargs
    if type(source) is dict and not kwargs:
        return source
    if kwargs:
        source = {**dict(source.items()), **kwargs}
    if not hasattr(source, "items"):
        return dict(source)
    return source


def restricted(source: Any, keys: Iterable[Any]) -> Any:
    """The entries of `source` at these nested keys, those that exist."""
    if isinstance(keys, str):
        keys = [keys]
    if isinstance(source, Contract):
        return source.select(*keys, strict=False)  # type: ignore[attr-defined]
    out: dict[Any, Any] = {}
    for key in keys:
        path = path_of(key)
        value: Any = source
        for name in path:
            value = value.get(name, None) if isinstance(value, (Reading, Mapping)) else None
        if value is None:
            value = source.get(key)
        if value is not None:
            out[joined(path)] = value
    return out


def leaf_items(source: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of a container or mapping below all nested keys, with these."""
    for key, item in source.items():
        path = (*prefix, *path_of(key))
        if isinstance(item, Mapping) or (is_node(item) and not item._is_non_tensor):
            yield from leaf_items(item, path)
        else:
            yield path, item


def nested_under(path: Sequence[str], value: Any) -> Any:
    """`value` inside one mapping per name."""
    for name in reversed(path):
        value = {name: value}
    return value
