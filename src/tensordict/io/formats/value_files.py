"""Values that are no tensors in the directory format: their JSON, the pickle beside it, and new values written through.

A value stands in the `meta.json` of its own folder. What JSON holds only nearly (a tuple, `nan`) stands there as any
reader understands it, and again in the exact form of `io/values.py`.
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
    read_there,
    value_meta,
    write_meta,
)
from tensordict.io.saving.source import FOLDERS, Source
from tensordict.io.specification import VALUE_STACK, PickledValue, Specification
from tensordict.io.values import NotJson
from tensordict.memory import files
from tensordict.memory.names import LEAF_SUFFIX, META


@dataclass(slots=True)
class ValueFiles:
    """The files of one value: `meta` is the content of `meta.json`, `pickled` that of the file `pickle_file`.

    The `tensors` in the value have files of their own, named by their numbers.
    """

    meta: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)
    pickle_file: str = ""
    pickled: bytes = b""

    def alone(self, key: Path) -> dict[str, Any]:
        """`meta`, where there is no other file to write.

        Raises:
            UnsupportedEntryError: the value holds tensors.
        """
        if self.tensors:
            raise UnsupportedEntryError(
                f"{entry_of(key)}a value that holds tensors can be neither shared between processes nor written into "
                "a save that is there: save the container again, or keep the tensors as entries"
            )
        return self.meta


def files_of_value(
    form: Specification, outer: tuple[int, ...], key: Path, allow_pickle: bool, shared: bool = False
) -> ValueFiles:
    """The files of the value of a form.

    Args:
        form: of a holder or a stack of them.
        outer: the batch size of the container that it is in, as a loader will know it; `()` when there is none.
        key: where it is, for errors.
        allow_pickle: whether to pickle it when plain JSON cannot hold it; readers of the reference then have it too.
        shared: whether all who load it follow its changes.

    Raises:
        UnsupportedEntryError: JSON cannot hold it, and pickle may not or cannot either.
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
    except Exception as error:  # What a value does when it is pickled is its own business.
        raise UnsupportedEntryError(f"{entry_of(key)}{reason}, and pickling it fails too: {error}") from error
    name = STACK_PICKLE if stack else HOLDER_PICKLE
    return ValueFiles(value_meta(form, outer, shared, pickled=name)[0], [], name, content)


def read_value_files(folder: str, key: Path) -> ValueFiles | None:
    """Read the files of a value that is saved in a folder; `None` when there are none.

    Raises:
        SaveError: the value holds tensors.
    """
    meta = read_there(folder, key)
    if not meta:
        return None
    if is_foreign(meta):
        raise SaveError(
            f"{entry_of(key)}the value that {folder!r} holds has tensors in it, beside which nothing can be added: "
            "load the save, and save it with the new entries elsewhere"
        )
    name = read_node(folder, key).pickled
    return ValueFiles(meta, [], name, FOLDERS.read(f"{folder}/{name}") if name else b"")


# What gives the value in the pickle file at a path; its other arguments are the key, for errors, and whether it is of a
# stack of values.
Unpickle = Callable[[Source, str, Path, bool], Any]


def unpickle(source: Source, path: str, key: Path, stack: bool) -> Any:
    """The value in a pickle file, which may run any code; only for callers who said that they trust it.

    Raises:
        SaveError: it holds none.
    """
    with files.naming("read the file", path, key):
        content = source.read(path)
    try:
        found = pickle.loads(content)
    except Exception as error:  # Unpickling runs code of the save's choice, which may raise anything.
        raise SaveError(f"{entry_of(key)}{path} cannot be unpickled: {error}") from error
    if stack:
        return found
    if not (isinstance(found, dict) and "data" in found):
        raise SaveError(f"{entry_of(key)}{path} holds a {type(found).__name__} and not a dict with 'data'")
    return found["data"]


def left_pickled(source: Source, path: str, key: Path, stack: bool) -> PickledValue:
    """The content of a pickle file as it is: what takes the place of `unpickle` where a save is only looked at."""
    return PickledValue(source.read(path))


def refuse_pickle(source: Source, path: str, key: Path, stack: bool) -> NoReturn:
    """Refuse to load a pickled value: what takes the place of `unpickle` unless the caller agreed to it."""
    raise UnsupportedEntryError(
        f"{entry_of(key)}the value is pickled, in {path}, and loading a pickle may run any code: pass "
        "allow_pickle=True if you trust who wrote it"
    )


@dataclass(slots=True, frozen=True)
class Place:
    """The folder of a saved value: that very one, and not what another save puts in its place."""

    folder: str
    device: int
    inode: int

    @staticmethod
    def of(folder: str) -> Place:
        """The place that a folder is now."""
        status = os.stat(folder)
        return Place(folder, status.st_dev, status.st_ino)

    def stands(self) -> bool:
        """Whether the folder is still there, and has not been replaced by another save."""
        try:
            status = os.stat(self.folder)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def writing(self, form: Specification, key: Path, shared: bool) -> Callable[[], None]:
        """What puts a new value into the file, once called. Where we may not write, as where another save has taken
        the place, the file stays as it is.

        Raises:
            UnsupportedEntryError: JSON cannot hold it.
        """
        meta = files_of_value(form, (), key, False, shared).alone(key)
        return lambda: self._write(meta, key)

    def at(self, position: int) -> PlaceInList:
        """The place of one of the values, where the saved value is the list of those of a stack's members."""
        return PlaceInList(self.folder, self.device, self.inode, position)

    def _write(self, meta: dict[str, Any], key: Path) -> None:
        if not (self.stands() and os.access(self.folder, os.W_OK)):
            return
        with files.naming("write the value", f"{self.folder}/{META}", key):
            # The time in full resolution: the clock of the file system may give two writes the same.
            write_meta(self.folder, meta, time.time_ns())
            parts = takewhile(self._has, (f"{at}{LEAF_SUFFIX}" for at in count()))
            for name in (*filter(self._has, (HOLDER_PICKLE, STACK_PICKLE)), *parts):
                os.unlink(f"{self.folder}/{name}")

    def _has(self, name: str) -> bool:
        return os.path.lexists(f"{self.folder}/{name}")


@dataclass(slots=True, frozen=True)
class PlaceInList(Place):
    """The place of a value in a saved list of values."""

    position: int

    def writing(self, form: Specification, key: Path, shared: bool) -> Callable[[], None]:
        """As that of any place.

        Raises:
            UnsupportedEntryError: JSON cannot hold it, or the list is pickled.
        """
        if form.kind == VALUE_STACK:
            raise UnsupportedEntryError(
                f"{entry_of(key)}there is one value for each member of the saved lazy stack, not several"
            )
        files_of_value(form, (), key, False).alone(key)
        return lambda: self._put(form, key)

    def _put(self, form: Specification, key: Path) -> None:
        if not self.stands():
            return
        saved = read_node(self.folder, key)
        if saved.pickled or saved.listed:
            raise UnsupportedEntryError(
                f"entry {joined(key)!r}: its values are pickled together or hold tensors; save the stack again"
            )
        values = list(saved.value)
        values[self.position] = form.value
        size = saved.batch_size or torch.Size((len(values),))
        self._write(files_of_value(Specification(saved.kind, size, value=values), (), key, False).meta, key)


def regular_size(values: object, least: int) -> torch.Size:
    """The batch size of a stack of values that says none: at least `least` levels of nested lists, and as many more as
    are regular, as the reference reads it."""
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
