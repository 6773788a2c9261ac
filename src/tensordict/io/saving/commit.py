"""The steps of a transaction on the file system: locks, folders that change places, what killed saves have left.

`io/saving/transaction.py` says in which order they are taken.
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
from tensordict.io.formats.meta import HOLDER_PICKLE, STACK_PICKLE, is_meta, listed_apart
from tensordict.io.saving.source import FOLDERS
from tensordict.io.specification import WRAPPED
from tensordict.memory import files, system
from tensordict.memory.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name

# No encoded entry name equals these, as `%t` and `%s` are no percent-encodings.
JOURNAL = "%save"
TEMPORARY = re.compile(r"%tmp-[0-9a-f]{16}")
# What a folder may hold besides the files that its meta.json names.
_FIXED_FILES = {META, JOURNAL, HOLDER_PICKLE, STACK_PICKLE}
_FIXED_FOLDERS = {WRAPPED}

_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
_LONGEST_NAME = 200
# How long a reader waits for a folder that is being replaced, in seconds.
_PATIENCE = 2.0
# How often it reads again what has been replaced while it read.
_TRIES = 20

T = TypeVar("T")


# --- locks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(
    path: str,
    shown: str = "",
    flags: int = system.DIRECTORY,
    patience: float = 0,
    *,
    folder: int | None = None,
    mode: int = 0o666,
) -> Iterator[bool]:
    """Hold the lock on a folder or a file; gives `False` on a file system that has no locks (as some of networks).

    Args:
        path: what is locked.
        shown: what errors name; `path` when empty.
        flags: what else it is opened with.
        patience: so many seconds to wait for whoever holds it.
        folder: the descriptor of the folder that `path` is relative to.
        mode: the permissions of a file that is made.

    Raises:
        SaveError: another process or thread holds it.
        OSError: it cannot be opened.
    """
    if not system.HAS_LOCKS:
        yield False
        return
    opened = partial(_opened, path, shown or path, flags, folder, mode)
    fd, sure = acquire(opened, path, shown or path, patience, folder)
    try:
        yield sure
    finally:
        # Explicitly, because a forked child may have the descriptor too.
        unless_it_fails(system.unlock, fd)
        os.close(fd)


def acquire(
    opened: Callable[[], int], path: str, shown: str, patience: float, folder: int | None = None
) -> tuple[int, bool]:
    """Open a file or a folder and lock it; return the descriptor, and whether the file system has locks.

    Args:
        opened: opens it.
        path, shown, patience, folder: as in `locked`.

    Raises:
        SaveError: another process or thread holds the lock.
    """
    limit = time.monotonic() + patience
    while True:
        fd = opened()
        if not system.HAS_LOCKS:
            return fd, False
        try:
            system.lock(fd)
            # It may have been replaced since it was opened.
            if _is_still(path, folder, fd):
                return fd, True
        except BlockingIOError:
            if time.monotonic() >= limit:
                os.close(fd)
                raise _busy(shown) from None
            time.sleep(0.001)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return fd, False
            os.close(fd)
            raise
        os.close(fd)


def _opened(path: str, shown: str, flags: int, folder: int | None, mode: int) -> int:
    try:
        return os.open(path, system.CLOEXEC | system.NOFOLLOW | flags, mode, dir_fd=folder)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            # Its folder is missing.
            raise
        raise _busy(shown) from None


def _busy(path: str) -> SaveError:
    return SaveError(f"another process or thread is saving to {path!r}: wait until it is done, or save elsewhere")


def _is_still(path: str, folder: int | None, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, dir_fd=folder, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


# --- changing places --------------------------------------------------------------------------------------------------


def path_beside(real: str, what: str = "new") -> str:
    """The path beside a save under which its replacement is built ("new"), it waits itself ("old"), or its lock is."""
    parent, name = os.path.split(real)
    if len(name.encode()) > _LONGEST_NAME:
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return os.path.join(parent, f".{name}.tensordict-{what}")


def swap(first: str, second: str) -> None:
    """Have two folders change places, in one step where the file system can."""
    try:
        _rename_exchange(first, second)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
    else:
        return
    # A reader may find nothing at `second` for a moment, and so may everyone when we are killed: see `_await`.
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
    """Rename a file or a folder, and replace nothing.

    Raises:
        FileExistsError: something has the second name.
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
    """Rename these entries of one folder into another one, or none of them when that fails; nothing is replaced."""
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
    """Undo a `swap` in several steps that was cut off, if there was one.

    Raises:
        SaveError: it is still going on, or something else stands in the place.
    """
    aside = path_beside(real, "old")
    if not os.path.lexists(aside):
        return
    with locked(aside):
        logger.info("a save to %r was cut off: its old content is put back", real)
        try:
            # A folder that has something in it is not replaced by this.
            is_whole = any(os.path.lexists(f"{real}/{name}") for name in (META, "zarr.json"))
            os.rename(aside, path_beside(real) if is_whole else real)
        except OSError as error:
            raise SaveError(
                f"a save to {real!r} was cut off, and its old content waits in {aside!r}, which cannot be moved back "
                f"({error.strerror}): move or remove one of the two"
            ) from error


def read_consistently(root: str, read: Callable[[], T]) -> T:
    """What `read` gives of a save, all of it from one: where another has taken its place meanwhile, it reads again.

    Raises:
        SaveError: that happens each time.
        OSError: as `read`.
    """
    for _ in range(_TRIES):
        before, after = _state(root), None
        try:
            result = read()
        except OSError:
            if _state(root) == before and (before is not None or not _await(root)):
                raise
        else:
            after = _state(root)
            if after == before:
                return result
    if after is not None and before is not None and after[:2] == before[:2]:
        # Still the same folder, to which entries are being added.
        return result
    raise SaveError(f"{root!r} is replaced faster than it can be read")


def _state(root: str) -> tuple[int, int, int] | None:
    """What changes when another folder is put in the place of this one; `None` when there is none."""
    try:
        status = os.stat(root)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _await(root: str) -> bool:
    """Whether a folder that is missing is there now: it is missing for a moment where folders cannot be exchanged.

    Where the process that was replacing it has been killed, its old content is put back.
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
    """The current folder when it lies in what is replaced; `os.chdir` takes us to the folder in its place then."""
    try:
        current = os.getcwd()
    except FileNotFoundError:
        return ""
    if current != real and not current.startswith(real + "/"):
        return ""
    if not os.path.isdir(beside + current[len(real) :]) and os.path.lexists(f"{current}/{META}"):
        raise SaveError(f"the current folder, {current!r}, is no part of the new save: os.chdir() to another one first")
    return current


# --- what is the caller's ---------------------------------------------------------------------------------------------


def carry(old: str, new: str) -> None:
    """Move what belongs to no save of ours from one folder to another, or nothing when that fails."""
    done: list[str] = []
    made: list[str] = []
    folders, moves = moves_between(old, new)
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
        raise files.named_os_error(error, "keep what is no part of the save, and so replace the folder", new) from error


def moves_between(old: str, new: str, inner: str = "") -> tuple[list[str], list[str]]:
    """The folders to make in `new`, and what to move there from `old`, each as "/path/within".

    Raises:
        SaveError: a file stands where the new save has a folder, or the other way round.
    """
    folders: list[str] = []
    moves: list[str] = []
    own_files, own_folders = owned(old + inner)
    with os.scandir(old + inner) as found:
        entries = list(found)
    for entry in entries:
        path = f"{inner}/{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if not is_folder and (entry.name in own_files or TEMPORARY.fullmatch(entry.name)):
            continue
        if entry.is_symlink() and entry.name in own_folders:
            # Replaced as any link is: what it leads to stays.
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
            below, kept = moves_between(old, new, path)
            if kept and not taken:
                folders.append(path)
            folders += below
            moves += kept
        else:
            moves.append(path)
    return folders, moves


def owned(folder: str) -> tuple[Collection[str], Collection[str]]:
    """The names of the files and of the folders in a folder that belong to the save in it."""
    try:
        meta: Any = parse_json(FOLDERS.read(f"{folder}/{META}"))
    except (OSError, ValueError):
        meta = None
    if not is_meta(meta):
        return (), ()
    apart = [name for name, _ in listed_apart(meta)]
    names = {name for name in meta if "/" not in name} | set(apart)
    names |= {_encoded(name) for name in (*meta, *apart)}
    own_folders = names | _FIXED_FOLDERS | {"%2E".join(name.rsplit(".", 1)) for name in names}
    if "stack_dim" in meta:
        with os.scandir(folder) as found:
            own_folders |= {entry.name for entry in found if entry.name.isdecimal()}
    own_files = {name + suffix for name in names for suffix in (LEAF_SUFFIX, TABLE_SUFFIX)}
    return own_files | _FIXED_FILES, own_folders


def _encoded(name: str) -> str:
    try:
        return file_name(name, robust=True)
    except SaveError:
        # Has no form as a file name, and so no file.
        return ""


# --- what killed saves leave ------------------------------------------------------------------------------------------


def clean(real: str, sure: bool) -> None:
    """Take away what saves to this folder that were killed have left in it and beside it; the folder is locked.

    Raises:
        SaveError: without `sure` locks: it may belong to a save that is going on.
    """
    beside = path_beside(real)
    names = os.listdir(real)
    if os.path.lexists(beside):
        _refuse_unless(sure, real, beside)
        logger.info("removing what a save to %r that was cut off has left beside it", real)
        with locked(beside):
            if not os.path.lexists(f"{beside}/{JOURNAL}"):
                # The two have changed places already: this is the old one.
                carry(beside, real)
            discard(beside)
    if JOURNAL in names:
        _refuse_unless(sure, real, f"{real}/{JOURNAL}")
        logger.info("removing what a save to %r that was cut off has left in it", real)
        recover(real)
    for name in names:
        if TEMPORARY.fullmatch(name):
            _remove_temporary(f"{real}/{name}", real, sure)


def _remove_temporary(path: str, real: str, sure: bool) -> None:
    """Remove a file of a save that was cut off, or the folder that such a save made and did not write to."""
    if os.path.isdir(path) and not os.path.islink(path):
        _refuse_unless(sure, real, path)
        if os.listdir(path):
            raise SaveError(
                f"the folder {path!r} has the name of one that a save makes, but no journal of a save names it: look "
                "at what is in it, and remove it"
            )
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _refuse_unless(sure: bool, real: str, found: str) -> None:
    if not sure:
        raise SaveError(
            f"there is {found!r}: another process is saving to {real!r}, or was killed while it did. The file system "
            "has no locks, which would tell: remove that file or folder if no save is going on"
        )


class _Identity(NamedTuple):
    """The identity of a file or a folder that a save made, which another one of its name lacks.

    The number of the inode alone would not: a file system gives it to another file when the first one is removed.
    """

    inode: int
    modified: int

    @staticmethod
    def of(path: str) -> _Identity | None:
        """The identity of a file or a folder; `None` when there is none, or a link or a device."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        return _Identity(status.st_ino, status.st_mtime_ns) if plain else None


def write_journal(folder: str, stage: str = "", durable: bool = False) -> None:
    """Write into a folder what a save is about to move there, in place of an older journal.

    The journal is JSON. It has its own inode number, so that a copy of it proves nothing, and what tells the stage and
    each entry of the stage from any other file.

    Args:
        folder: the folder.
        stage: the name of the folder in it whose entries will be moved; empty when there is none.
        durable: have it reach the disk.
    """
    made = {}
    for name in os.listdir(f"{folder}/{stage}") if stage else ():
        if (found := _Identity.of(f"{folder}/{stage}/{name}")) is not None:
            made[name] = found
    temporary = files.temporary_name(folder)
    with files.naming("write the file", f"{folder}/{JOURNAL}"):
        try:
            with files.closing(files.create(temporary)) as fd:
                parts = {"inode": os.fstat(fd).st_ino, "stage": stage, "entries": made}
                if stage:
                    parts["stage_inode"] = os.stat(f"{folder}/{stage}").st_ino
                files.write_bytes(fd, json.dumps(parts).encode())
                if durable:
                    os.fsync(fd)
            os.replace(temporary, f"{folder}/{JOURNAL}")
        except BaseException:
            unless_it_fails(os.unlink, temporary)
            raise


def recover(real: str) -> None:
    """Remove what a save that was cut off made in a folder, and its journal; what it committed stays.

    Raises:
        SaveError: the journal was not written by a save to this folder.
    """
    stage, stage_inode, entries = _read_journal(f"{real}/{JOURNAL}")
    trash = f"{real}/{stage}"
    # Entries are moved into the stage first: all of the stage is removed, so that recovery may be cut off, too.
    there = _Identity.of(trash) if stage else None
    has_trash = there is not None and there.inode == stage_inode and os.path.isdir(trash)
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
    """The name of the stage, its inode number, and the identities of the entries that a journal names.

    Raises:
        SaveError: the file was not written at this path by a save of this user.
    """
    try:
        with open(os.open(path, os.O_RDONLY | system.NONBLOCK | system.NOFOLLOW | system.CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no file")
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
            f"{path!r} is not the journal of a save that this user made in this folder, so that nothing is removed "
            f"which it names ({error}): remove it, and what a save that was cut off may have left here"
        ) from error


def _is_name(name: object) -> bool:
    """Tell the name of an entry of a folder from a path that leads elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", os.sep, "\0"} & set(name)


def discard(folder: str) -> None:
    """Remove a folder of which nothing is needed, and say so in it to the end, in case that we are killed meanwhile."""
    if not os.path.lexists(f"{folder}/{JOURNAL}"):
        write_journal(folder)
    _remove(f"{folder}/{name}" for name in os.listdir(folder) if name != JOURNAL)
    shutil.rmtree(folder)


def empty(folder: str) -> None:
    """Remove all that is in a folder."""
    _remove(os.path.join(folder, name) for name in os.listdir(folder))


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


# --- small things -----------------------------------------------------------------------------------------------------


def unless_it_fails(call: Any, *args: Any) -> None:
    """For tidying up, which must not hide the error that it follows, nor spoil what has succeeded."""
    with contextlib.suppress(OSError):
        call(*args)
