"""The exception types of the package."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable
from functools import partial


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names that are most like `name`, those first that are."""
    names = list(known)
    if len(names) > 100:
        # The comparison below takes 20 us a name.
        names = heapq.nlargest(100, names, key=partial(_shared, name))
    return difflib.get_close_matches(name, names, count)


def _shared(name: str, other: str) -> int:
    """How many characters two names begin with alike."""
    return next((count for count, (a, b) in enumerate(zip(name, other)) if a != b), min(len(name), len(other)))


def meant(name: str, known: Iterable[str]) -> str:
    """What an error says about a name that is like one that there is; nothing when none is."""
    found = nearest(name, known, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def add_note(error: BaseException, note: str) -> None:
    """Have the traceback of an error say more, as `error.add_note` does, which Python 3.10 has not."""
    error.__dict__.setdefault("__notes__", []).append(note)


class MissingKeyError(KeyError):
    """There is no entry at a key.

    The message is made when it is asked for, since most missing keys are expected by somebody: it lists the keys that
    there are, or, where they are many, the nearest.

    Args:
        key: the name that was not found, or a nested key.
        owner: the class of the container.
        known: the keys of the container in which the last name was not found.
        instead: the nested key that was meant, if there is one.
    """

    # How many keys are listed.
    _SHOWN = 20

    def __str__(self) -> str:
        key, owner, known, instead = self.args
        text = f'key "{key}" not found' if isinstance(key, str) else f"key {key!r} not found"
        name = key if isinstance(key, str) else key[-1]
        if len(known) <= self._SHOWN:
            text += f" in {owner} with keys {list(known)}"
            hint = meant(name, known)
        else:
            text += f" in {owner} with keys {nearest(name, known, 5)} and others, {len(known)} in all"
            hint = ""
        return text + (hint if instead is None else f"; did you mean the nested key {instead!r}?")


class KeyMismatchError(KeyError, RuntimeError):
    """Containers that should have the same keys do not."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class BatchIndexError(IndexError, RuntimeError):
    """An index does not fit the batch size."""


class LockedError(RuntimeError):
    """A structural write to a locked container, or an unlock that a locked parent forbids."""


class ShapeError(ValueError, RuntimeError):
    """A shape does not fit: that of a value in an in-place write, or that asked of a batch."""


class StackError(RuntimeError):
    """An entry of a lazy stack cannot be read as one tensor."""


class DimError(IndexError, ValueError, RuntimeError):
    """A dim is out of range."""


class NamesError(ValueError, RuntimeError):
    """Names of dims that do not fit the batch dims, or that disagree."""


class SaveError(OSError, RuntimeError, ValueError):
    """A save that cannot be written, or whose files do not add up.

    Failures of the operating system itself (a missing file, no permission, a full disk) are plain `OSError`s of the
    fitting kind, with the path and the key in their message.
    """


class ServerFullError(SaveError):
    """A server has no memory left for what is written, and refuses it; it is still read, and deleting makes room."""


class UnsupportedEntryError(SaveError, NotImplementedError):
    """An entry or an option that this version cannot save or load."""


class SchemaError(ValueError, RuntimeError):
    """Rows that do not fit the schema of a data set; names the entry, and says what was expected."""


class FieldError(AttributeError, TypeError, ValueError):
    """A name that is no field of a tensorclass, or that a field cannot have."""


class ContainerExpected(TypeError, RuntimeError):
    """A container was expected, and something else was given."""


class DuplicateKeyError(KeyError, ValueError):
    """Two keys of an input lead to the same entry."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StateError(KeyMismatchError, ShapeError):
    """A state dict does not fit the container that it is to be loaded into; lists all that does not."""


class ModuleError(KeyMismatchError):
    """A container of parameters does not fit a module."""


class WorkerError(RuntimeError):
    """A worker process ended before its work did."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker process took longer for a chunk than `timeout=` allows, and was ended."""


class OptionError(ValueError, RuntimeError):
    """Options that exclude one another."""


class InstructionError(ValueError):
    """An instruction of IFEval, or a whole row, that cannot be scored; names the row and the field."""


class TransferError(RuntimeError):
    """A container did not get from one process to another: the two sides do not fit, or the connection broke.

    Both sides raise it, and name the key.
    """


def refuse_stored(leaf: object) -> None:
    """Raise a `ShapeError` for a ragged leaf that is noted to stand for one in a store."""
    name = getattr(leaf, "_name_in_store", None)
    if name is not None:
        raise ShapeError(
            f"the ragged entry {name!r} of a store is not written in place: replace it as a whole, td[key] = ..."
        )
