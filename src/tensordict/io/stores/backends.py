"""The kinds of stores by the name that `PersistentTensorDict(backend=...)` takes."""

from __future__ import annotations

from tensordict.io.stores import hdf5
from tensordict.io.stores.store import Store

BACKENDS: dict[str, type[Store]] = {kind.backend: kind for kind in (hdf5.File,)}


def backend_of(name: str) -> type[Store]:
    """The kind of store of this name; a `ValueError` when there is none."""
    if name not in BACKENDS:
        raise ValueError(f"the backend is {' or '.join(map(repr, BACKENDS))}, got {name!r}")
    return BACKENDS[name]


def backend_at(path: str) -> str:
    """The name of the kind of store that is at a path, a file or a folder; nothing when there is none."""
    return next((name for name, kind in BACKENDS.items() if kind.is_at(path)), "")
