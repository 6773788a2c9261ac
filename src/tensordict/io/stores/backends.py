"""The kinds of stores by the name that `PersistentTensorDict(backend=...)` takes."""

from __future__ import annotations

from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.io.stores import hdf5, redis, zarr
from tensordict.io.stores.array_store import Store

# Those at a path, each a format of saves.
BACKENDS: dict[str, type[Store]] = {kind.backend: kind for kind in (hdf5.File, zarr.ZarrStore)}
# Those on a server, which are opened by an address.
_SERVERS: dict[str, type[Store]] = {kind.backend: kind for kind in (redis.Server,)}


def backend_of(name: str) -> type[Store]:
    """The kind of store of this name; an `UnsupportedEntryError` when there is none."""
    found = BACKENDS.get(name) or _SERVERS.get(name)
    if found is None:
        raise UnsupportedEntryError(f"the backend is {' or '.join(map(repr, BACKENDS))}, got {name!r}")
    return found


def backend_at(path: str) -> str:
    """The name of the kind of store that is at a path, a file or a folder; nothing when there is none."""
    return next((name for name, kind in BACKENDS.items() if kind.is_at(path)), "")
