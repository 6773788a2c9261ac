"""The detection of the format of a save from its content, for loaders and for checks before overwriting."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Collection
from itertools import islice

from tensordict.core.exceptions import SaveError
from tensordict.io.stores.backends import BACKENDS, backend_at
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import DATASET_FOLDERS, LEAF_SUFFIX, META, SCHEMA, local_path

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
# The first entry of an archive, or of a file of `torch.save`, has one of these suffixes. The detection of the other zip
# files asks the backends, which takes longer.
_KNOWN_SUFFIXES = (META.encode(), LEAF_SUFFIX.encode(), b"/data.pkl")
# The longest header that the library of safetensors reads.
_MOST_HEADER = 100_000_000
_TORCH = "torch"
_DESCRIPTIONS = {
    "directory": "a saved folder",
    "dataset": "a data set",
    "archive": "a zip file",
    "consolidated": "a consolidated container",
    **{name: kind.a_kind for name, kind in BACKENDS.items()},
    "safetensors": "a safetensors file",
    _TORCH: "a file of torch.save",
    "": "a file of no format that is known",
}
# The suffixes of files of `torch.save`.
TORCH_SUFFIXES = (".pt", ".pth")
# The suffixes of tables. The error for such a file names the functions that read tables.
_TABLES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")
# The number of names in a foreign file that an error lists.
_SHOWN = 3


def detect_format(path: PathLike) -> str:
    """Return the format: "directory", "dataset", "archive", "consolidated", "safetensors" or one of `BACKENDS`.

    Only a few bytes are read. So the save may still be broken, or the zip file may belong to another program.

    Raises:
        FileNotFoundError: the path does not exist, or is a folder without a save.
        SaveError: the format of the file is unknown.
    """
    shown = os.fspath(path)
    local_path(path)
    if os.path.isdir(shown):
        if found := _detect_folder(shown):
            return found
        raise FileNotFoundError(errno.ENOENT, f"there is no save in this folder: it has no {META}", shown)
    found = _detect_file(shown)
    suffix = os.path.splitext(shown)[1].lower()
    if found == _TORCH or (suffix in TORCH_SUFFIXES and not found):
        raise SaveError(f"{shown!r} was written by torch.save: torch.load reads it")
    if suffix in _TABLES and not found:
        raise SaveError(
            f"{shown!r} is no save but a table: from_csv, from_json or from_parquet reads it, and the command "
            "`tensordict convert` makes a data set of it"
        )
    if not found:
        stores = ", ".join(kind.kind for kind in BACKENDS.values())
        raise SaveError(
            f"{shown!r} is of no format that is known: it is no folder with {META}, archive, consolidated container, "
            f"{stores} or safetensors file, or it was cut off"
        )
    return found


def is_known(path: str) -> bool:
    """Return True for a file with a save, and for a file of `torch.save`."""
    return bool(_detect_file(path))


def refuse_other(path: str, format: str, foreign_names: Callable[[str], Collection[str]]) -> None:
    """Raise an error unless a file or folder may be replaced: a save of this format, or an empty file or folder.

    Args:
        path: the file or folder.
        format: the format of the new save.
        foreign_names: returns the names in a file of this format if another program wrote it, and none for a save of
            this package or of the reference.

    Raises:
        SaveError: the file or folder may not be replaced; describes its content.
        OSError: it cannot be read.
    """
    is_folder = os.path.isdir(path)
    if not (os.listdir(path) if is_folder else os.path.getsize(path)):
        return
    found = _detect_folder(path) if is_folder else _detect_file(path)
    what = "a folder of other files" if is_folder and not found else _DESCRIPTIONS[found]
    if found == format:
        try:
            names = foreign_names(path)
        except SaveError as error:
            what += f" that cannot be read ({error})"
        else:
            if not names:
                return
            listed = ", ".join(repr(name) for name in islice(names, _SHOWN))
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            what += f" of another program, with {listed}{more}"
    raise SaveError(
        f"{path!r} is {what}, and only a save of the format {format!r} is replaced: pass overwrite=True to replace it "
        "all the same, or save elsewhere"
    )


def _detect_folder(path: str) -> str:
    """Return the format of a folder; an empty string for an unknown one."""
    if os.path.lexists(f"{path}/{META}"):
        return "directory"
    # A data set without its schema can still be read.
    is_dataset = os.path.lexists(f"{path}/{SCHEMA}") or all(os.path.isdir(f"{path}/{name}") for name in DATASET_FOLDERS)
    return "dataset" if is_dataset else backend_at(path)


def _detect_file(path: str) -> str:
    """Return the format of a file, `_TORCH` for a file of `torch.save`, and an empty string for an unknown one."""
    # Open without blocking, so that a pipe cannot hang the process.
    with files.closing(os.open(path, os.O_RDONLY | system.NONBLOCK | system.CLOEXEC)) as fd:
        status = os.fstat(fd)
        found = _detect_content(path, fd, status.st_size) if stat.S_ISREG(status.st_mode) else ""
        return _TORCH if found == "archive" and _is_of_torch(fd) else found


def _detect_content(path: str, fd: int, size: int) -> str:
    head = system.pread(fd, 9, 0)
    if head[:4] in _ZIP and _read_first_name(fd).endswith(_KNOWN_SUFFIXES):
        return "archive"
    if found := backend_at(path):
        return found
    if head[:4] in _ZIP:
        return "archive"
    length = int.from_bytes(head[:8], "little")
    if 2 <= length <= min(_MOST_HEADER, size - 8) and head[8:] == b"{" and _is_object(system.pread(fd, length, 8)):
        return "safetensors"
    length = int.from_bytes(system.pread(fd, 8, size - 8), "little") if size >= 8 else 0
    if 2 <= length <= size - 8:
        first, last = system.pread(fd, 1, size - 8 - length), system.pread(fd, 1, size - 9)
        return "consolidated" if (first, last) == (b"{", b"}") else ""
    return ""


def _is_of_torch(fd: int) -> bool:
    """Return True if the first entry of a zip file has the name that `torch.save` gives it."""
    return _read_first_name(fd).endswith(b"/data.pkl")


def _read_first_name(fd: int) -> bytes:
    """Return the name of the first entry of a zip file."""
    return system.pread(fd, int.from_bytes(system.pread(fd, 2, 26), "little"), 30)


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False
