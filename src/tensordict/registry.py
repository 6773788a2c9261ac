"""The one table between class names and container classes, used by loaders and by rooms that must make a container."""

from __future__ import annotations

from typing import Any

_CLASSES: dict[str, type[Any]] = {}


def register(cls: type[Any]) -> type[Any]:
    """Make `cls` known under its class name; usable as a decorator."""
    _CLASSES[cls.__name__] = cls
    return cls


def lookup(name: str) -> type[Any]:
    """The container class known under `name`; a `KeyError` lists the known ones."""
    try:
        return _CLASSES[name]
    except KeyError:
        raise KeyError(f"no container class named {name!r} is known; known are {sorted(_CLASSES)}") from None
