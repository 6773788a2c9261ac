"""The exception classes of the package, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable
from functools import partial


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that are most similar to `name`, best first."""
    names = list(known)
    if len(names) > 100:
        # The comparison below takes 20 us a name, so preselect by common prefix.
        names = heapq.nlargest(100, names, key=partial(_common_prefix_length, name))
    return difflib.get_close_matches(name, names, count)


def _common_prefix_length(name: str, other: str) -> int:
    """Return the length of the common prefix of two names."""
    return next((count for count, (a, b) in enumerate(zip(name, other)) if a != b), min(len(name), len(other)))


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the hint "; did you mean ...?" for a misspelt name; "" if no known name is similar."""
    found = nearest(name, known, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def add_note(error: BaseException, note: str) -> None:
    """Add a line to the traceback of an error, as `error.add_note` does from Python 3.11 on."""
    error.__dict__.setdefault("__notes__", []).append(note)


class MissingKeyError(KeyError):
    """A key has no entry.

    The message is built only when it is printed, since most missing keys are expected by the caller. It lists the
    existing keys, or the most similar ones if there are many.

    Args:
        key: the name that was not found, or a nested key.
        owner: the class of the container.
        known: the keys of the container that lacks the last name.
        instead: the nested key that was probably meant, or `None`.
    """

    # The largest number of listed keys.
    _SHOWN = 20

    def __str__(self) -> str:
        key, owner, known, instead = self.args
        text = f'key "{key}" not found' if isinstance(key, str) else f"key {key!r} not found"
        name = key if isinstance(key, str) else key[-1]
        if len(known) <= self._SHOWN:
            text += f" in {owner} with keys {list(known)}"
            hint = suggest(name, known)
        else:
            text += f" in {owner} with keys {nearest(name, known, 5)} and others, {len(known)} in all"
            hint = ""
        return text + (hint if instead is None else f"; did you mean the nested key {instead!r}?")


class KeyMismatchError(KeyError, RuntimeError):
    """Containers that should have the same keys have different ones."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class BatchIndexError(IndexError, RuntimeError):
    """An index does not fit the batch size."""


class LockedError(RuntimeError):
    """A structural write to a locked container, or an unlock that a locked parent forbids."""


class ShapeError(ValueError, RuntimeError):
    """A shape does not fit: of a value in an in-place write, or of a reshaped batch."""


class StackError(RuntimeError):
    """An entry of a lazy stack cannot be read as one tensor."""


class DimError(IndexError, ValueError, RuntimeError):
    """A dim is out of range."""


class NamesError(ValueError, RuntimeError):
    """Dim names do not fit the batch dims, or contradict each other."""


class SaveError(OSError, RuntimeError, ValueError):
    """A save cannot be written, or its files are inconsistent.

    Failures of the operating system (a missing file, no permission, a full disk) raise the matching plain `OSError`,
    with the path and the key in the message.
    """


class ServerFullError(SaveError):
    """The server has no memory left and refuses the write. Reading still works, and deleting makes room."""


class UnsupportedEntryError(SaveError, NotImplementedError):
    """This version cannot save or load an entry or an option."""


class SchemaError(ValueError, RuntimeError):
    """Rows do not fit the schema of a data set. The message names the entry and the expected form."""


class FieldError(AttributeError, TypeError, ValueError):
    """A name is not a field of the tensorclass, or cannot be the name of a field."""


class ContainerExpected(TypeError, RuntimeError):
    """An argument should be a container, and is not."""


class DuplicateKeyError(KeyError, ValueError):
    """Two keys of an input name the same entry."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StateError(KeyMismatchError, ShapeError):
    """A state dict does not fit the container that loads it. The message lists all differences."""


class ModuleError(KeyMismatchError):
    """A container of parameters does not fit a module."""


class WorkerError(RuntimeError):
    """A worker process ended before its work did."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker process took longer for a chunk than `timeout=` allows, and was ended."""


class OptionError(ValueError, RuntimeError):
    """Two options exclude each other."""


class InstructionError(ValueError):
    """An instruction of IFEval, or a whole row, cannot be scored. The message names the row and the field."""


class TransferError(RuntimeError):
    """A container could not be sent to another process: the two sides do not match, or the connection broke.

    Both sides raise it, and name the key.
    """


def refuse_stored(leaf: object) -> None:
    """Raise a `ShapeError` if a ragged leaf is a stand-in for a stored one, which cannot be written in place."""
    name = getattr(leaf, "_name_in_store", None)
    if name is not None:
        raise ShapeError(
            f"the ragged entry {name!r} of a store cannot be written in place: replace the whole entry, td[key] = ..."
        )
