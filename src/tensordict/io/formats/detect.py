"""Which format a save is of, by its content and not by its name."""

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
# What the names of entries of an archive end with: of any other zip file it is asked what it holds.
_OURS = (META.encode(), LEAF_SUFFIX.encode(), b"/data.pkl")
# As its own library has it.
_MOST_HEADER = 100_000_000
_TORCH = "torch"
_CALLED = {
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
PICKLED = (".pt", ".pth")
# What is told of files of these names that are no saves.
_TABLES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")
# So many names of what another file holds are told.
_SHOWN = 3


def detect_format(path: PathLike) -> str:
    """The format of a save: "directory", "dataset", "archive", "consolidated", "safetensors" or one of `BACKENDS`.

    Only what tells them apart is looked at: the save may still be broken, or the zip file one of something else.

    Raises:
        FileNotFoundError: there is nothing, or a folder without a save.
        SaveError: it is of none of these formats.
    """
    shown = os.fspath(path)
    local_path(path)
    if os.path.isdir(shown):
        if found := _of_folder(shown):
            return found
        raise FileNotFoundError(errno.ENOENT, f"there is no save in this folder: it has no {META}", shown)
    found = _of_file(shown)
    suffix = os.path.splitext(shown)[1].lower()
    if found == _TORCH or (suffix in PICKLED and not found):
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
    """Return whether the content of a file is a save, or was written by `torch.save`."""
    return bool(_of_file(path))


def refuse_other(path: str, format: str, inside: Callable[[str], Collection[str]]) -> None:
    """Refuse to replace what is no save of this format; an empty file or folder holds nothing that could be lost.

    Args:
        path: the file or folder.
        format: of the save that is to take its place.
        inside: of one that looks like one of the format: the names in it when another program wrote it, none for a
            save of this package or of the reference.

    Raises:
        SaveError: it is something else, which is named.
        OSError: it cannot be read.
    """
    is_folder = os.path.isdir(path)
    if not (os.listdir(path) if is_folder else os.path.getsize(path)):
        return
    found = _of_folder(path) if is_folder else _of_file(path)
    what = "a folder of other files" if is_folder and not found else _CALLED[found]
    if found == format:
        try:
            names = inside(path)
        except SaveError as error:
            what += f" that cannot be read ({error})"
        else:
            if not names:
                return
            told = ", ".join(repr(name) for name in islice(names, _SHOWN))
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            what += f" of another program, with {told}{more}"
    raise SaveError(
        f"{path!r} is {what}, and no save of the format {format!r} that could be replaced: pass overwrite=True to "
        "replace it all the same, or save elsewhere"
    )


def _of_folder(path: str) -> str:
    """The format of a folder; nothing for any other."""
    if os.path.lexists(f"{path}/{META}"):
        return "directory"
    # A data set that has lost its schema can still be read.
    is_dataset = os.path.lexists(f"{path}/{SCHEMA}") or all(os.path.isdir(f"{path}/{name}") for name in DATASET_FOLDERS)
    return "dataset" if is_dataset else backend_at(path)


def _of_file(path: str) -> str:
    """The format of a file, `_TORCH` for one of `torch.save`; nothing for any other."""
    # Not blocking, so that a pipe cannot hang us.
    with files.closing(os.open(path, os.O_RDONLY | system.NONBLOCK | system.CLOEXEC)) as fd:
        status = os.fstat(fd)
        found = _format_of(path, fd, status.st_size) if stat.S_ISREG(status.st_mode) else ""
        return _TORCH if found == "archive" and _is_of_torch(fd) else found


def _format_of(path: str, fd: int, size: int) -> str:
    head = system.pread(fd, 9, 0)
    if head[:4] in _ZIP and _first_entry(fd).endswith(_OURS):
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
    """Whether the first entry of a zip file is the one that `torch.save` begins with."""
    return _first_entry(fd).endswith(b"/data.pkl")


def _first_entry(fd: int) -> bytes:
    """The name of the first entry of a zip file."""
    return system.pread(fd, int.from_bytes(system.pread(fd, 2, 26), "little"), 30)


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False
