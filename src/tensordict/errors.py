"""The exception types of the package."""

from __future__ import annotations


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


class UnsupportedEntryError(SaveError, NotImplementedError):
    """An entry or an option that this version cannot save or load."""


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


class OptionError(ValueError, RuntimeError):
    """Options that exclude one another."""


class InstructionError(ValueError):
    """An instruction of IFEval, or a whole row, that cannot be scored; names the row and the field."""


class TransferError(RuntimeError):
    """A container did not get from one process to another: the two sides do not fit, or the connection broke.

    Both sides raise it, and name the key.
    """
