"""The one table between class names and container classes, used by loaders and by rooms that must make a container."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T", bound=type[Any])

_CLASSES: dict[str, type[Any]] = {}


def register(cls: T) -> T:
    """Make `cls` known under its class name; usable as a decorator."""
    _CLASSES[cls.__name__] = cls
    return cls


def speak_for(cls: type[Any], families: Iterable[type]) -> None:
    """Have what these families give to a class bear its name, which Python's errors about arguments begin with."""
    for family in families:
        for name, value in vars(family).items():
            functions = (value, getattr(value, "__func__", None), getattr(value, "fget", None))
            for function in functions:
                if isinstance(function, FunctionType) and function.__qualname__ == f"{family.__name__}.{name}":
                    function.__qualname__ = f"{cls.__name__}.{name}"


def lookup(name: str) -> type[Any]:
    """Return the container class with the name `name`; a `KeyError` lists the known names."""
    try:
        return _CLASSES[name]
    except KeyError:  # guarded: the error lists the names
        raise KeyError(f"no container class named {name!r} is known; known are {sorted(_CLASSES)}") from None


# The tensorclasses of the program by module and qualified name, the way a save names them. If a function declares a
# class of the same name in every call, the last one counts.
_DECLARED: dict[str, type[Any]] = {}


def declare(cls: type[Any]) -> None:
    """Make a tensorclass known to the loaders."""
    _DECLARED[f"{cls.__module__}.{cls.__qualname__}"] = cls


def declared(name: str) -> type[Any] | None:
    """Return the tensorclass of this module and qualified name; `None` if the program has not declared it."""
    return _DECLARED.get(name)
