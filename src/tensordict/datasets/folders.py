"""Opens, lists and removes files of a local data set by directory descriptors, so that no link below it is followed.

Only files that a shard can have are removed. A folder with any other file stays unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from tensordict.core.exceptions import SaveError
from tensordict.memory import files, system

_HAS_DESCRIPTORS = os.open in os.supports_dir_fd and os.scandir in os.supports_fd
# Suffix of the name of a folder that is being removed.
_GONE = ".gone"
# A function that returns True if a shard can have a file of this path below its folder.
IsOurs = Callable[[str], bool]


@contextlib.contextmanager
def open_item(root: str, name: str, flags: int = system.DIRECTORY) -> Iterator[int]:
    """Open a folder (or, with other flags, a file) below the root of a data set in a `with` block.

    Args:
        root: the folder of the data set, which may be a link itself.
        name: the path below it.
        flags: the flags for the last part of the path.

    Raises:
        SaveError: the path contains a link.
        OSError: the item cannot be opened.
    """
    fd = open_below(root, name, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def open_below(root: str, name: str, flags: int) -> int:
    """Open a file or folder below a root and return its descriptor, which the caller closes. See `open_item`."""
    refuse_links(root, name)
    parts = name.split("/")
    if not _HAS_DESCRIPTORS:
        return os.open(f"{root}/{name}", flags | system.NOFOLLOW | system.CLOEXEC)
    fd = os.open(root, system.DIRECTORY | system.CLOEXEC)
    try:
        for at, part in enumerate(parts):
            last = at == len(parts) - 1
            how = flags if last else system.DIRECTORY
            inner = os.open(part, how | system.NOFOLLOW | system.CLOEXEC, 0o666, dir_fd=fd)
            os.close(fd)
            fd = inner
    except OSError as error:
        os.close(fd)
        if error.errno == errno.ELOOP:
            raise _is_link(f"{root}/{name}") from error
        raise
    return fd


def refuse_links(root: str, name: str) -> None:
    """Raise a `SaveError` if a part of a path below the root is a link."""
    path = root
    for part in name.split("/"):
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            # Opening the path reports this error.
            return
        if stat.S_ISLNK(mode):
            raise _is_link(path)


def _is_link(path: str) -> SaveError:
    return SaveError(f"{path!r} is a link, and no link is followed in a data set: put the file or folder itself there")


def list_folder(root: str, name: str) -> dict[str, str]:
    """Return the kind ("file", "folder" or "link") of each item of a folder below the root, by name.

    The result is empty if the folder is missing or is a link.
    """
    kinds: dict[str, str] = {}
    try:
        refuse_links(root, name)
        fd = open_below(root, name, system.DIRECTORY) if _HAS_DESCRIPTORS else -1
    except (FileNotFoundError, NotADirectoryError, SaveError):
        return {}
    try:
        with os.scandir(fd if _HAS_DESCRIPTORS else f"{root}/{name}") as found:
            for entry in found:
                is_folder, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
                kinds[entry.name] = "folder" if is_folder else "file" if is_file else "link"
    except FileNotFoundError:
        return {}
    finally:
        if _HAS_DESCRIPTORS:
            os.close(fd)
    return dict(sorted(kinds.items()))


def remove_item(root: str, folder: str, name: str, is_ours: IsOurs) -> str:
    """Remove a file, or a folder with all its files if all are ours.

    A folder is renamed first, so that readers find all of it or nothing.

    Args:
        root: the folder of the data set.
        folder: the path of the item's folder, below the root.
        name: the name of the item.
        is_ours: returns True if a shard can have a file of this path below the item.

    Returns:
        the reason why the item stays; empty if it was removed.

    Raises:
        OSError: a file cannot be removed.
    """
    with open_item(root, folder) as parent:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):
            if name.endswith(_GONE):
                return "it is a file, and only folders are renamed before they are removed"
            os.unlink(name, dir_fd=parent)
            return ""
        if not stat.S_ISDIR(mode):
            return "it is a link, or no file"
        # Another process may exchange the folder. Keep this one open, so that only the checked folder is emptied.
        inner = os.open(name, system.DIRECTORY | system.NOFOLLOW | system.CLOEXEC, dir_fd=parent)
        with files.closing(inner):
            if foreign := _find_foreign(inner, is_ours):
                return f"it holds {foreign!r}, which no shard has"
            if not name.startswith("."):
                gone = f".{name}{_GONE}"
                try:
                    os.rename(name, gone, src_dir_fd=parent, dst_dir_fd=parent)
                except OSError as error:
                    return f"it cannot be renamed to {gone!r} ({error.strerror})"
                name = gone
            for path, folders, names, fd in os.fwalk(".", topdown=False, dir_fd=inner):
                for each in names:
                    if is_ours(f"{path}/{each}"[2:]):
                        os.unlink(each, dir_fd=fd)
                for each in folders:
                    with contextlib.suppress(OSError):
                        os.rmdir(each, dir_fd=fd)
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            return f"it cannot be removed ({error.strerror})"
    return ""


def _find_foreign(folder: int, is_ours: IsOurs) -> str:
    """Return the path of a file or folder that no shard has; empty if all are ours."""

    def fail(error: OSError) -> None:
        raise error

    for path, folders, names, fd in os.fwalk(".", onerror=fail, dir_fd=folder):
        for each in (*folders, *names):
            inner = f"{path}/{each}"[2:]
            mode = os.stat(each, dir_fd=fd, follow_symlinks=False).st_mode
            if not (is_ours(f"{inner}/") if stat.S_ISDIR(mode) else stat.S_ISREG(mode) and is_ours(inner)):
                return inner
    return ""
