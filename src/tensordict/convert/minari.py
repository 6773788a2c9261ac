"""Reading the episodes of Minari in HDF5 files as transitions; see https://minari.farama.org/content/dataset_standards/."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensordict.convert.images import ROWS
from tensordict.convert.records import NBYTES, iterate_containers
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.extras import require
from tensordict.core.keys import Path

_EPISODE = re.compile(r"episode_(\d+)")
# The keys of entries with one item for each step. Other entries also have an item after the last step.
_BY_STEP: dict[str, Path] = {
    "actions": ("action",),
    "rewards": ("next", "reward"),
    "terminations": ("next", "terminated"),
    "truncations": ("next", "truncated"),
}
_BY_STATE: dict[str, Path] = {"observations": ("observation",), "infos": ("info",)}


def read_minari(source: Any) -> Iterator[Any]:
    """Yield the steps of all episodes, some at a time.

    Args:
        source: the folder of a data set, its folder `data`, or its file.
    """
    place = os.fspath(source)
    names = ("data/main_data.hdf5", "main_data.hdf5", "")
    path = next((found for name in names if os.path.isfile(found := os.path.join(place, name).rstrip("/"))), "")
    if not path:
        raise FileNotFoundError(f"{place!r} is no data set of Minari in HDF5: there is no file data/main_data.hdf5")
    library = require("h5py", "h5")
    try:
        with library.File(path, "r") as file:
            numbers = sorted(int(found[1]) for found in map(_EPISODE.fullmatch, file) if found)
            for number in numbers:
                yield from _read_episode(library, file, f"episode_{number}", number)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise SaveError(f"{path!r}: {error}") from error


def _read_episode(library: Any, file: Any, name: str, number: int) -> Iterator[Any]:
    if not isinstance(file.get(name, getlink=True), library.HardLink):
        raise SaveError(f"{name!r} is a link to another place")
    arrays = dict(_list_arrays(library, file, (name,)))
    count = len(arrays.get(("rewards",), ()))
    row = 0
    for path, array in arrays.items():
        states = path[0] in _BY_STATE
        if not states and path[0] not in _BY_STEP:
            raise UnsupportedEntryError(f"{name} has the entry {'/'.join(path)!r}, which is not one of Minari")
        if len(array) != count + states:
            raise SaveError(f"{name}: {'/'.join(path)!r} has {len(array)} items, and there are {count} rewards")
        row += array.nbytes // max(1, len(array))
    step = max(1, min(ROWS, NBYTES // max(1, row)))
    for start in range(0, count, step):
        stop = min(count, start + step)
        columns: dict[Path, Any] = {("episode",): np.full(stop - start, number)}
        for path, array in arrays.items():
            kind, inner = path[0], path[1:]
            if kind in _BY_STEP:
                columns[_BY_STEP[kind] + inner] = _to_column(library, array, start, stop)
                continue
            key, found = _BY_STATE[kind] + inner, _to_column(library, array, start, stop + 1)
            following: Path = ("next", *key)
            columns[key], columns[following] = found[:-1], found[1:]
        yield from iterate_containers(columns, stop - start, False)


def _list_arrays(library: Any, file: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the arrays of an episode. Links and data in other files are refused."""
    group = file["/".join(path)]
    for name in group:
        inner, where = (*path, name), "/".join((*path, name))
        if not isinstance(group.get(name, getlink=True), library.HardLink):
            raise SaveError(f"{where!r} is a link to another place")
        item = group[name]
        if isinstance(item, library.Group):
            if len(inner) > 64:
                raise SaveError(f"{where!r} is nested too deeply")
            yield from _list_arrays(library, file, inner)
        elif item.external or item.is_virtual or not item.shape:
            raise SaveError(f"{where!r} has no rows of its own in this file")
        elif item.dtype.kind not in "biufc" and library.check_string_dtype(item.dtype) is None:
            raise UnsupportedEntryError(f"{where!r} has items of {item.dtype}, which is not read")
        else:
            yield inner[1:], item


def _to_column(library: Any, array: Any, start: int, stop: int) -> Any:
    if library.check_string_dtype(array.dtype) is not None:
        return array.asstr()[start:stop].tolist()
    found = array[start:stop]
    return found.astype(found.dtype.newbyteorder("="), copy=False)
