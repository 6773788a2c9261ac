"""The single steps of a transaction on the file system: locks, exchanges of folders, recovery from killed saves.

`io/saving/transaction.py` calls them, and describes their order.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.logs import logger
from tensordict.io.formats.meta import HOLDER_PICKLE, STACK_PICKLE, is_meta, special_entries
from tensordict.io.saving.source import FILE_SYSTEM
from tensordict.io.specification import WRAPPED
from tensordict.memory import files, system
from tensordict.memory.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name

# An encoded entry name cannot equal these names, because `%t` and `%s` are not valid percent-encodings.
JOURNAL = "%save"
TEMPORARY = re.compile(r"%tmp-[0-9a-f]{16}")
# The files and folders of a save that its meta.json does not name.
_FIXED_FILES = {META, JOURNAL, HOLDER_PICKLE, STACK_PICKLE}
_FIXED_FOLDERS = {WRAPPED}

_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
_LONGEST_NAME = 200
# The seconds that a reader waits for a folder that is being replaced.
_PATIENCE = 2.0
# The number of times that a reader starts again because the save was replaced meanwhile.
_TRIES = 20

T = TypeVar("T")


# --- locks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold_lock(
    path: str,
    shown: str = "",
    flags: int = system.DIRECTORY,
    patience: float = 0,
    *,
    folder: int | None = None,
    mode: int = 0o666,
) -> Iterator[bool]:
    """Hold the lock on a folder or a file for a block.

    Yields `False` if the file system has no locks, as some network file systems.

    Args:
        path: the folder or the file.
        shown: the path for errors; `path` when empty.
        flags: further flags for `os.open`.
        patience: the seconds to wait for another holder of the lock.
        folder: the descriptor of the folder that `path` is relative to.
        mode: the permissions of a file that is created.

    Raises:
        SaveError: another process or thread holds the lock.
        OSError: the folder or the file cannot be opened.
    """
    if not system.HAS_LOCKS:
        yield False
        return
    open_path = partial(os.open, path, system.CLOEXEC | system.NOFOLLOW | flags, mode, dir_fd=folder)
    try:
        fd, has_locks = acquire(open_path, path, shown or path, patience, folder)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            # The parent folder is missing.
            raise
        # The holder of the lock has just replaced or removed it.
        raise _busy_error(shown or path) from None
    try:
        yield has_locks
    finally:
        # Closing the descriptor would not unlock it if a forked child has it too.
        with contextlib.suppress(OSError):
            system.unlock(fd)
        os.close(fd)


def acquire(
    open_path: Callable[[], int], path: str, shown: str, patience: float, folder: int | None = None
) -> tuple[int, bool]:
    """Open a file or a folder and lock it. Returns the descriptor, and `False` if the file system has no locks.

    Args:
        open_path: opens the file or the folder.
        path, shown, patience, folder: as in `hold_lock`.

    Raises:
        SaveError: another process or thread holds the lock.
    """
    limit = time.monotonic() + patience
    while True:
        fd = open_path()
        if not system.HAS_LOCKS:
            return fd, False
        try:
            system.lock(fd)
            # Another save may have replaced or removed the file between opening and locking it.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path, dir_fd=folder, follow_symlinks=False), os.fstat(fd)):
                    return fd, True
        except BlockingIOError:
            if time.monotonic() >= limit:
                os.close(fd)
                raise _busy_error(shown) from None
            time.sleep(0.001)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return fd, False
            os.close(fd)
            raise
        os.close(fd)


def _busy_error(path: str) -> SaveError:
    return SaveError(f"another process or thread is saving to {path!r}: wait until it is done, or save elsewhere")


# --- exchanging folders -----------------------------------------------------------------------------------------------


def path_beside(real: str, what: str = "new") -> str:
    """Return the hidden path beside a save for its replacement ("new"), its old content ("old") or its "lock"."""
    parent, name = os.path.split(real)
    if len(name.encode()) > _LONGEST_NAME:
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return os.path.join(parent, f".{name}.tensordict-{what}")


def swap(first: str, second: str) -> None:
    """Exchange two folders, in one step where the file system supports that."""
    try:
        _rename_exchange(first, second)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
    else:
        return
    # For a moment nothing is at `second`. Readers wait for it, also after this process was killed: see `_wait_for`.
    aside = path_beside(second, "old")
    os.rename(second, aside)
    try:
        os.rename(first, second)
    except BaseException:
        os.rename(aside, second)
        raise
    os.rename(aside, first)


def _rename_exchange(first: str, second: str) -> None:
    _rename_by_flags(first, second, _RENAME_EXCHANGE)


def _rename_by_flags(first: str, second: str, flags: int) -> None:
    call = getattr(system.libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), second)


def move(first: str, second: str) -> None:
    """Rename a file or a folder without replacing anything.

    Raises:
        FileExistsError: a file or a folder has the second name.
    """
    try:
        _rename_by_flags(first, second, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        if os.path.lexists(second):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), second) from None
        os.rename(first, second)


def move_all(names: Iterable[str], source: str, target: str) -> None:
    """Move files and folders from one folder to another without replacing any. If one fails, all are moved back."""
    done: list[str] = []
    try:
        for name in names:
            move(f"{source}/{name}", f"{target}/{name}")
            done.append(name)
    except BaseException:
        for name in reversed(done):
            os.rename(f"{target}/{name}", f"{source}/{name}")
        raise


def put_back(real: str) -> None:
    """Undo a `swap` in several steps whose process was killed half way, if there was one.

    Raises:
        SaveError: the swap is still running, or another file or folder is at its path.
    """
    aside = path_beside(real, "old")
    if not os.path.lexists(aside):
        return
    with hold_lock(aside):
        logger.info("a save to %r was cut off: its old content is put back", real)
        try:
            # `os.rename` replaces only an empty folder.
            is_whole = any(os.path.lexists(f"{real}/{name}") for name in (META, "zarr.json"))
            os.rename(aside, path_beside(real) if is_whole else real)
        except OSError as error:
            raise SaveError(
                f"a save to {real!r} was cut off, and its old content waits in {aside!r}, which cannot be moved back "
                f"({error.strerror}): move or remove one of the two"
            ) from error


def read_consistently(root: str, read: Callable[[], T]) -> T:
    """Call `read` until no other save has replaced the one at `root` meanwhile, so that no result mixes two saves.

    Raises:
        SaveError: the save was replaced during every one of 20 calls.
        OSError: `read` raised it.
    """
    for _ in range(_TRIES):
        before, after = _folder_state(root), None
        try:
            result = read()
        except OSError:
            if _folder_state(root) == before and (before is not None or not _wait_for(root)):
                raise
        else:
            after = _folder_state(root)
            if after == before:
                return result
    if after is not None and before is not None and after[:2] == before[:2]:
        # Only the time differs: it is the same folder, and another process keeps adding entries.
        return result
    raise SaveError(f"{root!r} is replaced faster than it can be read: read it when no process saves there")


def _folder_state(root: str) -> tuple[int, int, int] | None:
    """Return numbers that change when another folder replaces this one; `None` for a missing folder."""
    try:
        status = os.stat(root)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _wait_for(root: str) -> bool:
    """Wait for a folder that a `swap` in several steps has moved away. Returns `True` once it exists.

    If the swapping process was killed, put the old folder back.
    """
    real = os.path.realpath(root)
    limit = time.monotonic() + _PATIENCE
    while not os.path.isdir(real) and os.path.lexists(path_beside(real, "old")):
        try:
            put_back(real)
        except SaveError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.001)
    return os.path.isdir(real)


def current_folder_in(real: str, beside: str) -> str:
    """Return the current folder if it lies in the save at `real`, which `beside` will replace; else an empty string.

    After the exchange, `os.chdir` to the returned path enters the new folder of the same name.

    Raises:
        SaveError: the current folder belongs to the old save, and the new one lacks it.
    """
    try:
        current = os.getcwd()
    except FileNotFoundError:
        return ""
    if current != real and not current.startswith(real + "/"):
        return ""
    if not os.path.isdir(beside + current[len(real) :]) and os.path.lexists(f"{current}/{META}"):
        raise SaveError(f"the new save lacks the current folder, {current!r}: os.chdir() to another folder first")
    return current


# --- files of the caller ----------------------------------------------------------------------------------------------


def move_foreign_files(old: str, new: str) -> None:
    """Move the files that do not belong to the save from one folder to another. If one fails, all are moved back."""
    done: list[str] = []
    made: list[str] = []
    folders, moves = plan_moves(old, new)
    try:
        for inner in folders:
            os.mkdir(new + inner)
            made.append(inner)
        for path in moves:
            os.rename(old + path, new + path)
            done.append(path)
    except OSError as error:
        for path in reversed(done):
            os.rename(new + path, old + path)
        for inner in reversed(made):
            os.rmdir(new + inner)
        raise files.named_os_error(error, "keep the other files in it, and so replace the folder", new) from error


def plan_moves(old: str, new: str, inner: str = "") -> tuple[list[str], list[str]]:
    """Return the folders to create in `new`, and the entries of `old` to move there, each as "/path/within".

    Raises:
        SaveError: the old folder has a file where the new save has a folder, or the other way round.
    """
    folders: list[str] = []
    moves: list[str] = []
    own_files, own_folders = list_own_names(old + inner)
    with os.scandir(old + inner) as found:
        entries = list(found)
    for entry in entries:
        path = f"{inner}/{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if not is_folder and (entry.name in own_files or TEMPORARY.fullmatch(entry.name)):
            continue
        if entry.is_symlink() and entry.name in own_folders:
            # The new folder replaces the link. The target of the link stays.
            continue
        target = new + path
        taken = os.path.lexists(target)
        if taken and os.path.isdir(target) != is_folder:
            raise SaveError(
                f"there is a {'folder' if is_folder else 'file'} where the save has a "
                f"{'file' if is_folder else 'folder'}: {path[1:]!r} in {new!r}"
            )
        if not is_folder:
            if not taken:
                moves.append(path)
        elif taken or (entry.name in own_folders and os.path.lexists(f"{old}{path}/{META}")):
            below, kept = plan_moves(old, new, path)
            if kept and not taken:
                folders.append(path)
            folders += below
            moves += kept
        else:
            moves.append(path)
    return folders, moves


def list_own_names(folder: str) -> tuple[Collection[str], Collection[str]]:
    """Return the names of the files and of the folders that belong to the save in this folder."""
    try:
        meta: Any = parse_json(FILE_SYSTEM.read(f"{folder}/{META}"))
    except (OSError, ValueError):
        meta = None
    if not is_meta(meta):
        return (), ()
    apart = [name for name, _ in special_entries(meta)]
    names = {name for name in meta if "/" not in name} | set(apart)
    names |= {_encode_name(name) for name in (*meta, *apart)}
    own_folders = names | _FIXED_FOLDERS | {"%2E".join(name.rsplit(".", 1)) for name in names}
    if "stack_dim" in meta:
        with os.scandir(folder) as found:
            own_folders |= {entry.name for entry in found if entry.name.isdecimal()}
    own_files = {name + suffix for name in names for suffix in (LEAF_SUFFIX, TABLE_SUFFIX)}
    return own_files | _FIXED_FILES, own_folders


def _encode_name(name: str) -> str:
    try:
        return file_name(name, robust=True)
    except SaveError:
        # The name cannot be encoded as a file name, so a file of it cannot exist.
        return ""


# --- recovery from killed saves ---------------------------------------------------------------------------------------


def clean(real: str, beside: str, has_locks: bool) -> None:
    """Remove the files that killed saves left in this locked folder and in the stage beside it.

    Raises:
        SaveError: the file system has no locks, so the files may belong to a running save.
    """
    names = os.listdir(real)
    if os.path.lexists(beside):
        _refuse_unless(has_locks, real, beside)
        logger.info("removing what a save to %r that was cut off has left beside it", real)
        with hold_lock(beside):
            if not os.path.lexists(f"{beside}/{JOURNAL}"):
                # The folders were exchanged already, so `beside` holds the old save.
                move_foreign_files(beside, real)
            discard(beside)
    if JOURNAL in names:
        _refuse_unless(has_locks, real, f"{real}/{JOURNAL}")
        logger.info("removing what a save to %r that was cut off has left in it", real)
        recover(real)
    for name in names:
        if TEMPORARY.fullmatch(name):
            _remove_temporary(f"{real}/{name}", real, has_locks)


def _remove_temporary(path: str, real: str, has_locks: bool) -> None:
    """Remove a temporary file of a killed save, or its empty stage."""
    if os.path.isdir(path) and not os.path.islink(path):
        _refuse_unless(has_locks, real, path)
        if os.listdir(path):
            raise SaveError(
                f"the folder {path!r} has the name of a stage of a save, but no journal names it: look at its content, "
                "and remove it"
            )
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _refuse_unless(has_locks: bool, real: str, found: str) -> None:
    if not has_locks:
        raise SaveError(
            f"there is {found!r}: another process is saving to {real!r}, or was killed while it did. The file system "
            "has no locks to tell which: remove that file or folder if no process is saving"
        )


class _Identity(NamedTuple):
    """The identity of a file or a folder, which changes when another one takes its name.

    The inode number alone is not enough: the file system gives it to another file once the first one is removed.
    """

    inode: int
    modified: int

    @staticmethod
    def of(path: str) -> _Identity | None:
        """Return the identity of a file or a folder; `None` for a missing path, a link or a device."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        return _Identity(status.st_ino, status.st_mtime_ns) if plain else None


def write_journal(folder: str, stage: str = "", durable: bool = False) -> None:
    """Write a journal into a folder: the list of the entries that a save is about to move there.

    The journal is JSON. It records its own inode number, so that a copy of it is recognized and ignored, and the
    identities of the stage and of each entry in it.

    Args:
        folder: the folder.
        stage: the name of the folder in it whose entries will be moved, or an empty string.
        durable: flush the journal to the disk.
    """
    identities = {}
    for name in os.listdir(f"{folder}/{stage}") if stage else ():
        if (identity := _Identity.of(f"{folder}/{stage}/{name}")) is not None:
            identities[name] = identity
    with files.replaced_file(f"{folder}/{JOURNAL}", durable) as fd:
        parts = {"inode": os.fstat(fd).st_ino, "stage": stage, "entries": identities}
        if stage:
            parts["stage_inode"] = os.stat(f"{folder}/{stage}").st_ino
        files.write_bytes(fd, json.dumps(parts).encode())


def recover(real: str) -> None:
    """Remove the files that a killed save made in a folder, and its journal. A committed save stays.

    Raises:
        SaveError: the journal was not written by a save to this folder.
    """
    stage, stage_inode, entries = _read_journal(f"{real}/{JOURNAL}")
    trash = f"{real}/{stage}"
    # Entries are moved into the stage before the stage is removed, so that a killed recovery can be repeated.
    identity_of_trash = _Identity.of(trash) if stage else None
    has_trash = identity_of_trash is not None and identity_of_trash.inode == stage_inode and os.path.isdir(trash)
    is_saved = os.path.lexists(f"{real}/{META}")
    for name, identity in entries.items() if not is_saved else ():
        path = f"{real}/{name}"
        if _Identity.of(path) != identity:
            continue
        if has_trash:
            os.rename(path, f"{trash}/{name}")
        else:
            _remove([path])
    if has_trash:
        shutil.rmtree(trash)
    os.unlink(f"{real}/{JOURNAL}")


def _read_journal(path: str) -> tuple[str, int, dict[str, _Identity]]:
    """Return the name of the stage, its inode number, and the identities of the entries that a journal lists.

    Raises:
        SaveError: the file was not written at this path by a save of this user.
    """
    try:
        with open(os.open(path, os.O_RDONLY | system.NONBLOCK | system.NOFOLLOW | system.CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a file")
            found = parse_json(file.read())
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise ValueError("it belongs to another user")
        if found["inode"] != status.st_ino:
            raise ValueError("it is a copy")
        stage, entries = found["stage"], found["entries"]
        if not all(map(_is_name, (*entries, stage or "none"))):
            raise ValueError("it names files elsewhere")
        known = {name: _Identity(*identity) for name, identity in entries.items()}
        return stage, found["stage_inode"] if stage else 0, known
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SaveError(
            f"{path!r} is not the journal of a save that this user made in this folder ({error}), so the files that it "
            "names are kept: remove it, and the files that a killed save may have left here"
        ) from error


def _is_name(name: object) -> bool:
    """Return True for the name of an entry of a folder, and False for a path that leads elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", os.sep, "\0"} & set(name)


def discard(folder: str) -> None:
    """Remove a folder, its journal last: if this process is killed, the next save finds the journal and continues."""
    if not os.path.lexists(f"{folder}/{JOURNAL}"):
        write_journal(folder)
    _remove(f"{folder}/{name}" for name in os.listdir(folder) if name != JOURNAL)
    shutil.rmtree(folder)


def empty(folder: str) -> None:
    """Remove the content of a folder."""
    _remove(os.path.join(folder, name) for name in os.listdir(folder))


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


# --- cleaning up ------------------------------------------------------------------------------------------------------


def try_to(call: Any, *args: Any) -> None:
    """Call a function and ignore an `OSError`, for cleaning up after an error or after a commit."""
    with contextlib.suppress(OSError):
        call(*args)
