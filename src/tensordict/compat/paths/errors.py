"""The exception classes of this package, under the path that client programs import them from."""

from tensordict.core.exceptions import (
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
