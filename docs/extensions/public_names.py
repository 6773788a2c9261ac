"""The public names of the package, and the one path under which each is documented."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator

import tensordict

# The modules that programs import from. The first module that has a name documents it; the others refer to it.
MODULES = (
    "tensordict",
    "tensordict.nn",
    "tensordict.datasets",
    "tensordict.store",
    "tensordict.llm",
    "tensordict.errors",
    "tensordict.utils",
)


@functools.cache
def names_of(module: str) -> list[str]:
    """Return the public names of a module in alphabetical order."""
    return sorted((name for name in importlib.import_module(module).__all__ if not name.startswith("_")), key=str.lower)


def home(path: str) -> str:
    """Return the path that documents the object at `path`, such as `tensordict.nn.TensorDictParams`."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    own = getattr(found, "__name__", name)
    for other in MODULES:
        # Prefer the name of the object to other names for it in the same module.
        for candidate in (own, name):
            if candidate in names_of(other) and getattr(importlib.import_module(other), candidate) is found:
                return f"{other}.{candidate}"
    return path


def members_of(cls: type) -> list[str]:
    """Return the public members to document with a class: members whose docstring no public base class has."""
    if cls.__module__.split(".")[0] != "tensordict":
        return []
    above = [
        base for base in cls.__mro__[1:] if base in _public_classes() or base.__module__.split(".")[0] != "tensordict"
    ]
    found: dict[str, None] = {}
    for owner in cls.__mro__:
        if owner in above or owner in tensordict.TensorDictBase.__mro__:
            continue
        for name, value in vars(owner).items():
            doc = _doc(value)
            said = any(name in dir(base) and (doc is None or _doc_in(base, name) == doc) for base in above)
            if not name.startswith("_") and not said and (doc is not None or name in vars(cls)):
                found[name] = None
    return list(found)


@functools.cache
def operations() -> dict[str, list[str]]:
    """Return the public names of each family of operations, by the path of its class."""
    found: dict[str, list[str]] = {}
    families = tensordict.TensorCollection.__mro__[1:]
    for name in sorted(name for name in dir(tensordict.TensorDictBase) if not name.startswith("_")):
        family = next(family for family in families if name in vars(family))
        found.setdefault(f"{family.__module__}.{family.__name__}", []).append(name)
    return found


def iter_paths() -> Iterator[str]:
    """Yield the path of every public name; the reference documents each once."""
    for module in MODULES:
        for name in names_of(module):
            path = f"{module}.{name}"
            yield path
            found = getattr(importlib.import_module(module), name)
            if isinstance(found, type) and home(path) == path and found is not tensordict.TensorDictBase:
                yield from (f"{path}.{member}" for member in members_of(found))
    for names in operations().values():
        yield from (f"tensordict.TensorDictBase.{name}" for name in names)


@functools.cache
def _public_classes() -> set[type]:
    found = (getattr(importlib.import_module(module), name) for module in MODULES for name in names_of(module))
    return {cls for cls in found if isinstance(cls, type)}


def _doc(value: object) -> str | None:
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    if not (inspect.isroutine(value) or isinstance(value, (property, classmethod, staticmethod))):
        return None
    return getattr(function, "__doc__", None)


def _doc_in(cls: type, name: str) -> str | None:
    return _doc(inspect.getattr_static(cls, name))
