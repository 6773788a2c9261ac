"""The errors that this package raises besides those of Python, under the path that programs import them from."""

from tensordict.core.errors import (
    BatchIndexError,
    ContainerExpected,
    DimError,
    DuplicateKeyError,
    FieldError,
    InstructionError,
    KeyMismatchError,
    LockedError,
    MissingKeyError,
    ModuleError,
    NamesError,
    OptionError,
    SaveError,
    SchemaError,
    ServerFullError,
    ShapeError,
    StackError,
    StateError,
    TransferError,
    UnsupportedEntryError,
    WorkerError,
    WorkerTimeoutError,
)

__all__ = [
    "BatchIndexError", "ContainerExpected", "DimError", "DuplicateKeyError", "FieldError", "InstructionError",
    "KeyMismatchError", "LockedError", "MissingKeyError", "ModuleError", "NamesError", "OptionError",
    "SaveError", "SchemaError", "ServerFullError", "ShapeError", "StackError", "StateError",
    "TransferError", "UnsupportedEntryError", "WorkerError", "WorkerTimeoutError",
]  # fmt: skip
