"""Non-tensor values in the directory format: their JSON, their pickle files, and new values written to saved holders.

A value is stored in the `meta.json` of its own folder. Plain JSON approximates some values (a tuple, `nan`). Those are
stored twice: in plain JSON for other readers, and in the exact form of `io/values.py`.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, NoReturn

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io.formats.meta import (
    HOLDER_PICKLE,
    STACK_PICKLE,
    is_foreign,
    read_node,
    read_old_meta,
    value_meta,
    write_meta,
)
from tensordict.io.saving.source import FILE_SYSTEM, Source
from tensordict.io.specification import VALUE_STACK, PickledValue, Specification
from tensordict.io.values import NotJson
from tensordict.memory import files
from tensordict.memory.names import LEAF_SUFFIX, META


@dataclass(slots=True)
class ValueFiles:
    """The files of one value.

    meta: the content of `meta.json`.
    tensors: the tensors in the value, which get files named by their numbers.
    pickle_file, pickled: the name and the content of the pickle file; empty if there is none.
    """

    meta: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)
    pickle_file: str = ""
    pickled: bytes = b""

    def meta_without_tensors(self, key: Path) -> dict[str, Any]:
        """Return `meta`, for callers that write no other file.

        Raises:
            UnsupportedEntryError: the value holds tensors.
        """
        if self.tensors:
            raise UnsupportedEntryError(
                f"{entry_of(key)}a value that holds tensors can be neither shared between processes nor written into "
                "an existing save: save the container again, or keep the tensors as entries"
            )
        return self.meta


def plan_value_files(
    form: Specification, outer: tuple[int, ...], key: Path, allow_pickle: bool, shared: bool = False
) -> ValueFiles:
    """Plan the files of a value.

    Args:
        form: the specification of a holder or a stack of values.
        outer: the batch size of the container around it, which a loader assumes; `()` for a root.
        key: the key of the value, for errors.
        allow_pickle: pickle the value if it is not plain JSON. The reference can read that pickle too.
        shared: show later changes of the value to all processes that have loaded it.

    Raises:
        UnsupportedEntryError: JSON cannot store the value, and pickle is not allowed or fails.
    """
    reason = ""
    try:
        meta, tensors = value_meta(form, outer, shared)
        if not (allow_pickle and is_foreign(meta)):
            return ValueFiles(meta, tensors)
    except NotJson as error:
        reason = str(error)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"{entry_of(key)}{error}") from None
    if not allow_pickle:
        raise UnsupportedEntryError(
            f"{entry_of(key)}{reason}. Pass allow_pickle=True to pickle it; it is then loaded with allow_pickle=True "
            "only"
        )
    stack = form.kind == VALUE_STACK
    try:
        content = pickle.dumps(form.value if stack else {"data": form.value})
    except Exception as error:  # Pickling runs code of the value, which may raise any error.
        raise UnsupportedEntryError(f"{entry_of(key)}{reason}, and pickling it fails too: {error}") from error
    name = STACK_PICKLE if stack else HOLDER_PICKLE
    return ValueFiles(value_meta(form, outer, shared, pickled=name)[0], [], name, content)


def read_value_files(folder: str, key: Path) -> ValueFiles | None:
    """Read the files of the value saved in a folder; `None` for a folder without one.

    Raises:
        SaveError: the value holds tensors.
    """
    meta = read_old_meta(folder, key)
    if not meta:
        return None
    if is_foreign(meta):
        raise SaveError(
            f"{entry_of(key)}the value saved in {folder!r} has tensors, so entries cannot be added to the save: load "
            "it, and save it with the new entries elsewhere"
        )
    name = read_node(folder, key).pickled
    return ValueFiles(meta, [], name, FILE_SYSTEM.read(f"{folder}/{name}") if name else b"")


# A function that reads the value in a pickle file: takes the source, the path, the key for errors, and True for a stack
# of values.
Unpickle = Callable[[Source, str, Path, bool], Any]


def choose_unpickle(allow_pickle: object) -> Unpickle:
    """Return the function that reads pickled values, or raises an error unless `allow_pickle` is true."""
    return unpickle if allow_pickle else refuse_pickle


def unpickle(source: Source, path: str, key: Path, stack: bool) -> Any:
    """Unpickle a value. This may run any code, so it is only for callers who pass `allow_pickle=True`.

    Raises:
        SaveError: the file cannot be unpickled, or has no value.
    """
    with files.naming("read the file", path, key):
        content = source.read(path)
    try:
        found = pickle.loads(content)
    except Exception as error:  # Unpickling runs code of the save, which may raise any error.
        raise SaveError(f"{entry_of(key)}{path} cannot be unpickled: {error}") from error
    if stack:
        return found
    if not (isinstance(found, dict) and "data" in found):
        raise SaveError(f"{entry_of(key)}{path} holds a {type(found).__name__} and not a dict with 'data'")
    return found["data"]


def skip_unpickling(source: Source, path: str, key: Path, stack: bool) -> PickledValue:
    """Return the content of a pickle file without unpickling it, for callers that only inspect a save."""
    return PickledValue(source.read(path))


def refuse_pickle(source: Source, path: str, key: Path, stack: bool) -> NoReturn:
    """Raise an error for a pickled value, for callers who do not allow pickle."""
    raise UnsupportedEntryError(
        f"{entry_of(key)}the value is pickled, in {path}, and loading a pickle may run any code: pass "
        "allow_pickle=True if you trust who wrote it"
    )


@dataclass(slots=True, frozen=True)
class Place:
    """The folder of a saved value. A folder that another save puts at the same path is another place."""

    folder: str
    device: int
    inode: int

    @staticmethod
    def of(folder: str) -> Place:
        """Return the place of an existing folder."""
        status = os.stat(folder)
        return Place(folder, status.st_dev, status.st_ino)

    def exists(self) -> bool:
        """Return True if the folder exists, and another save has not replaced it."""
        try:
            status = os.stat(self.folder)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def plan_write(self, form: Specification, key: Path, shared: bool) -> Callable[[], None]:
        """Check a new value, and return a function that writes it to the file.

        The function does nothing if the folder is not writable, or if another save has replaced it.

        Raises:
            UnsupportedEntryError: JSON cannot store the value.
        """
        meta = plan_value_files(form, (), key, False, shared).meta_without_tensors(key)
        return lambda: self._write(meta, key)

    def at(self, position: int) -> PlaceInList:
        """Return the place of the value of one member, if the save has a list of the values of all members."""
        return PlaceInList(self.folder, self.device, self.inode, position)

    def _write(self, meta: dict[str, Any], key: Path) -> None:
        if not (self.exists() and os.access(self.folder, os.W_OK)):
            return
        with files.naming("write the value", f"{self.folder}/{META}", key):
            # Set the time in full resolution, because the file system may give two quick writes the same time.
            write_meta(self.folder, meta, time.time_ns())
            parts = takewhile(self._has, (f"{at}{LEAF_SUFFIX}" for at in count()))
            for name in (*filter(self._has, (HOLDER_PICKLE, STACK_PICKLE)), *parts):
                os.unlink(f"{self.folder}/{name}")

    def _has(self, name: str) -> bool:
        return os.path.lexists(f"{self.folder}/{name}")


@dataclass(slots=True, frozen=True)
class PlaceInList(Place):
    """The folder of a saved list of values, and the position of one value in the list."""

    position: int

    def plan_write(self, form: Specification, key: Path, shared: bool) -> Callable[[], None]:
        """Check a new value, and return a function that writes it into the list, as `Place.plan_write` does.

        Raises:
            UnsupportedEntryError: JSON cannot store the value.
        """
        if form.kind == VALUE_STACK:
            raise UnsupportedEntryError(
                f"{entry_of(key)}the saved lazy stack has one value for each member, and cannot take several: save the "
                "stack again"
            )
        plan_value_files(form, (), key, False).meta_without_tensors(key)
        return lambda: self._write_item(form, key)

    def _write_item(self, form: Specification, key: Path) -> None:
        """Replace one item of the list. Raises an `UnsupportedEntryError` if the list is pickled or holds tensors."""
        if not self.exists():
            return
        saved = read_node(self.folder, key)
        if saved.pickled or saved.listed:
            raise UnsupportedEntryError(
                f"entry {joined(key)!r}: its values are pickled together or hold tensors; save the stack again"
            )
        values = list(saved.value)
        values[self.position] = form.value
        size = saved.batch_size or torch.Size((len(values),))
        self._write(plan_value_files(Specification(saved.kind, size, value=values), (), key, False).meta, key)


def regular_size(values: object, least: int) -> torch.Size:
    """Find the batch size of a stack of values from its nested lists, as the reference does.

    The size has at least `least` dims, and further dims while the lists of a level have equal lengths.
    """
    size: list[int] = []
    level: list[Any] = [values]
    while all(type(part) is list for part in level):
        lengths = {len(part) for part in level}
        if len(lengths) != 1 or (0 in lengths and len(size) >= least):
            break
        size.append(lengths.pop())
        level = [item for part in level for item in part]
        if not level:
            break
    return torch.Size(size)
