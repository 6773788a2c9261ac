"""What a save writes to disk, whatever its format: staged, made visible at once, taken away when it fails.

The life cycle of a `Transaction`, which is a context:

- *begin*: take the lock, take away what a killed save has left, refuse to replace what is no save;
- *write*: files and folders are made where no reader looks for them;
- *commit*: all of it takes its place in one step, so that readers see the old save or the new one;
- *abort*, at the end of a block without a commit: what was written is taken away.

A process that is killed at any moment leaves the old save or the new one, and what the next save takes away.

A save that is one file is written beside its path, as `.NAME.tensordict-new`, and renamed. The lock is on another file,
`.NAME.tensordict-lock`, so that nobody finds the save itself locked.

A save that is a folder is built in a *stage*, another folder. If the folder has nothing of the same names, the stage is
in the folder itself. Its entries are renamed into the folder one after the other. `meta.json` comes last and makes it a
save. If something is in the way, the stage is beside the old folder (leaves that stay are hard links to their files),
and the two change places in one step of the file system. Files of the old folder that belong to no save of ours are
moved over, and the rest is removed: a reader that has mapped it keeps it. The lock is on the folder.

A *journal*, the file `%save`, says which stage belongs to a save that has not committed. Before the first entry leaves
the stage, the journal says of each by what it is known again: nothing else is ever removed because a journal names it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.core.logs import logger
from tensordict.io.saving import commit
from tensordict.io.saving.commit import JOURNAL
from tensordict.memory import files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META, local_path

if TYPE_CHECKING:
    from typing_extensions import Self


class Transaction(ABC):
    """All that a save writes, as a context: visible after `commit`, gone without one.

    Args:
        path: the absolute path of the save.
        durable: have everything reach the disk before the commit, and the commit itself.

    Attributes:
        staged: where what is to be `path` is until the commit.
    """

    def __init__(self, path: str, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.staged = path
        self._real = os.path.realpath(path)
        # The files and folders that it has made.
        self._files: list[str] = []
        self._folders: list[str] = []
        self._locks = contextlib.ExitStack()
        self._committed = False

    # --- begin --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    @abstractmethod
    def _begin(self) -> None:
        """Take the lock and recover from a save that was killed; nothing that is at `path` changes."""

    # --- write --------------------------------------------------------------------------------------------------------

    def at(self, path: str) -> str:
        """Where `path`, which is that of the save or lies in it, is until the commit."""
        return self.staged + path[len(self.path) :]

    def make_folder(self, path: str, key: Path = ()) -> None:
        """Make the folder that is to be `path`, and those that it lies in, unless it is there."""
        with files.naming("create the folder", path, key):
            self._make_folder(self.at(path))

    def _make_folder(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self._make_folder(parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(20, "there is a file where the folder should be", path) from None
        else:
            self._folders.append(path)

    def create(self, path: str) -> int:
        """A descriptor of the new file that is to be `path`; whoever asks for it syncs and closes it."""
        staged = self.at(path)
        fd = files.create(staged)
        self._files.append(staged)
        return fd

    @contextlib.contextmanager
    def new_file(self, path: str, key: Path = ()) -> Iterator[int]:
        """The descriptor of the new file that is to be `path`; it is synced and closed at the end of the block."""
        with files.naming("write the file", path, key):
            fd = self.create(path)
        try:
            yield fd
            with files.naming("write the file", path, key):
                self._finish(fd)
        finally:
            os.close(fd)

    def _finish(self, fd: int) -> None:
        """Do what remains to be done to a file of which all is written."""
        if self.durable:
            os.fsync(fd)

    def write(self, path: str, content: bytes, key: Path = ()) -> None:
        """Make the file that is to be `path`, with this content."""
        with self.new_file(path, key) as fd, files.naming("write the file", path, key):
            files.write_bytes(fd, content)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """A block that may be tried again: the files that it has made are taken away when it fails."""
        before = len(self._files)
        try:
            yield
        except BaseException:
            for path in self._files[before:]:
                commit.unless_it_fails(os.unlink, path)
            del self._files[before:]
            raise

    # --- commit -------------------------------------------------------------------------------------------------------

    def commit(self, meta: bytes = b"") -> None:
        """Put the save in its place.

        Args:
            meta: of a folder, the content of the `meta.json` at its top.

        Raises:
            SaveError: something that may not be replaced stands where the save has a file or a folder; nothing has
                changed then.
            OSError: the file system refuses; likewise.
        """
        self._publish(meta)
        logger.debug("saved %r", self._real)
        if self.durable:
            for folder in dict.fromkeys(os.path.dirname(made) for made in (*self._folders, self._real)):
                if os.path.isdir(folder):
                    files.sync_folder(folder)

    @abstractmethod
    def _publish(self, meta: bytes) -> None:
        """Make what was written visible in one step, and note that it is."""

    # --- abort --------------------------------------------------------------------------------------------------------

    def __exit__(self, *exc_info: object) -> None:
        try:
            if not self._committed:
                self._abort()
        finally:
            self._locks.close()

    def _abort(self) -> None:
        """Take away what was written, as far as it still can be."""
        for path in self._files:
            commit.unless_it_fails(os.unlink, path)

    def _remove_folders(self) -> None:
        for path in reversed(self._folders):
            commit.unless_it_fails(os.rmdir, path)


# --- one file ---------------------------------------------------------------------------------------------------------


class FileTransaction(Transaction):
    """A save that is one file.

    Args:
        path: of the save; a link is followed.
        existsok: whether there may be a file already.
        durable: have the file and its name reach the disk.
        check: is given the path of the file that is to be replaced, and raises when it may not be.
        parents: make the folders that it lies in.

    Raises:
        SaveError: there is a folder or a device, a file without `existsok` or one that `check` refuses, or another
            saver at work.
        OSError: the file cannot be made; names `path`.

    Example:
        >>> import os
        >>> import tempfile
        >>> from tensordict.io.saving.transaction import FileTransaction
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with FileTransaction(folder + "/x") as save:
        ...         save.write(folder + "/x", b"new")
        ...         before = os.path.exists(folder + "/x")
        ...         save.commit()
        ...     before, sorted(os.listdir(folder))
        (False, ['x'])
    """

    def __init__(
        self,
        path: PathLike,
        existsok: bool = True,
        durable: bool = False,
        check: Callable[[str], None] | None = None,
        parents: bool = False,
    ) -> None:
        super().__init__(local_path(path), durable)
        self._existsok = existsok
        self._check = check
        self._parents = parents

    def _begin(self) -> None:
        check_target(self.path, self._existsok)
        if self._parents:
            self._make_folder(os.path.dirname(self.path))
        with files.naming("write the file", self.path):
            self._lock()
            # Looked into while nobody else replaces it.
            check_target(self.path, self._existsok, self._check)
            # Not written over: a saver that was killed may have given it a second name already, that of the save.
            _unlink(self.staged)

    def _lock(self) -> None:
        """Take the lock, which is a file beside the save, and choose where that is staged."""
        lock = commit.path_beside(self._real, "lock")
        self.staged = commit.path_beside(self._real)
        if not self._locks.enter_context(commit.locked(lock, self.path, os.O_RDWR | os.O_CREAT)):
            # A file system without locks: a name of our own, which nobody cleans up after us.
            self.staged = files.temporary_name(os.path.dirname(self._real))
        # While it is still locked: whoever opened it meanwhile sees that it is no longer there.
        self._locks.callback(_unlink, lock)

    def _finish(self, fd: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(self.staged, stat.S_IMODE(os.stat(self._real).st_mode))
        super()._finish(fd)

    def _publish(self, meta: bytes) -> None:
        with files.naming("write the file", self.path):
            if self._existsok:
                os.replace(self.staged, self._real)
            else:
                try:
                    os.link(self.staged, self._real)
                except FileExistsError:
                    raise _exists(self.path) from None
                os.unlink(self.staged)
        self._committed = True

    def _abort(self) -> None:
        super()._abort()
        # The file that is locked lies in what was made for it.
        self._locks.close()
        self._remove_folders()


class TreeTransaction(FileTransaction):
    """A save that is a folder in which nothing else is kept: built beside its path, it takes the place of all there.

    The arguments are those of `FileTransaction`; `new_file` of its path is the folder.

    Raises:
        SaveError: there is a file, a folder with something in it that `check` refuses, or another saver at work.
        OSError: the folder cannot be made; names `path`.
    """

    def _begin(self) -> None:
        if self._parents:
            self._make_folder(os.path.dirname(self.path))
        with files.naming("write the folder", self.path):
            self._lock()
            commit.put_back(self._real)
            if os.path.lexists(self._real):
                self._check_replaced()
            if os.path.lexists(self.staged):
                shutil.rmtree(self.staged)

    def _check_replaced(self) -> None:
        if not os.path.isdir(self._real):
            raise SaveError(f"cannot write a folder to {self.path!r}, which is a file")
        if not self._existsok:
            raise _exists(self.path)
        if self._check is not None and os.listdir(self._real):
            self._check(self.path)

    @contextlib.contextmanager
    def new_file(self, path: str, key: Path = ()) -> Iterator[int]:
        """The folder that is to be `path`; it has reached the disk at the end of the block, if that is asked for."""
        with files.naming("create the folder", path, key):
            os.mkdir(self.at(path))
        yield -1
        if self.durable:
            for folder, _, names in os.walk(self.staged, topdown=False):
                for name in names:
                    with files.closing(files.open_file(f"{folder}/{name}")) as fd:
                        os.fsync(fd)
                files.sync_folder(folder)

    def _publish(self, meta: bytes) -> None:
        with files.naming("replace the folder", self.path):
            if not os.path.lexists(self._real):
                os.rename(self.staged, self._real)
                self._committed = True
                return
            shutil.copystat(self._real, self.staged)
            commit.swap(self.staged, self._real)
        self._committed = True
        commit.unless_it_fails(shutil.rmtree, self.staged)

    def _abort(self) -> None:
        shutil.rmtree(self.staged, ignore_errors=True)
        super()._abort()


def check_target(path: str, existsok: bool = True, check: Callable[[str], None] | None = None) -> None:
    """Refuse to write a file where that cannot be done.

    Raises:
        SaveError: there is a folder or a device, or, without `existsok`, a file; or `check` refuses the file.
        PermissionError: there is a file that we may not write.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise SaveError(f"cannot write a file to {path!r}, which is {what}")
    if not existsok:
        raise _exists(path)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file to be replaced may not be written", path)
    if check is not None:
        check(path)


def _exists(path: str) -> SaveError:
    return SaveError(f"the file {path!r} already exists; pass existsok=True to replace it")


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


class OwnFolderTransaction(Transaction):
    """A save in a new folder that nobody else writes to or looks for: its files are in their places from the start.

    The folder becomes a save with the commit, which adds its `meta.json`.

    Raises:
        FileExistsError: there is something at `path`, be it a link.
        FileNotFoundError: the folder around it is missing.
    """

    def _begin(self) -> None:
        with files.naming("create the folder", self.path):
            os.mkdir(self.path)
            self._folders.append(self.path)

    def _publish(self, meta: bytes) -> None:
        if self.durable:
            for folder in reversed(self._folders):
                files.sync_folder(folder)
        files.write_file(f"{self.path}/{META}", meta, durable=self.durable)
        self._committed = True

    def _abort(self) -> None:
        super()._abort()
        self._remove_folders()


# --- a folder ---------------------------------------------------------------------------------------------------------


class FolderTransaction(Transaction):
    """A save that is a folder.

    Args:
        root: the absolute path of the save.
        names: the files that the save has, as paths in the root.
        durable: have everything reach the disk.
        kept: those of them that are what is there already.
        overwrite: replace files that belong to no save, too.

    Raises:
        SaveError: another process or thread is saving there, the old save cannot be replaced in one step, or there is a
            file that belongs to no save where the new one has one.
        OSError: a folder cannot be made.
    """

    def __init__(
        self,
        root: str,
        names: Collection[str],
        durable: bool = False,
        kept: Collection[str] = (),
        overwrite: bool = False,
    ) -> None:
        super().__init__(root, durable)
        self._paths = names
        self._names = frozenset(name.partition("/")[0] for name in names)
        self._kept = kept
        self._overwrite = overwrite

        # True if the stage will be exchanged for a folder that holds a save.
        self.is_replacing = False

    def _begin(self) -> None:
        commit.put_back(self._real)
        self._make_folder(self._real)
        try:
            sure = self._locks.enter_context(commit.locked(self._real))
        except BaseException:
            # Whoever holds the lock may be about to write into what we have made.
            self._folders.clear()
            raise
        commit.clean(self._real, sure)
        in_the_way = sorted(self._names & frozenset(os.listdir(self._real)))
        if in_the_way:
            if not self._overwrite:
                self._refuse_others()
            self._stage_beside(in_the_way[0])
        else:
            self._stage_inside()

    def _refuse_others(self) -> None:
        """Refuse to replace files that belong to no save; empty ones hold nothing that could be lost."""
        inside: dict[str, list[str]] = {}
        for path in self._paths:
            folder, _, name = path.rpartition("/")
            inside.setdefault(folder, []).append(name)
        for folder, names in inside.items():
            there = os.path.join(self._real, folder)
            if not os.path.isdir(there):
                continue
            present = frozenset(os.listdir(there))
            own = commit.owned(there)[0]
            for name in names:
                path = os.path.join(there, name)
                if name not in present or name in own or os.path.isdir(path) or not os.lstat(path).st_size:
                    continue
                if os.path.join(folder, name) not in self._kept:
                    raise SaveError(
                        f"{path!r} is a file that belongs to no save, and the new save has one of that name: pass "
                        "overwrite=True to replace it, or save elsewhere"
                    )

    def _stage_inside(self) -> None:
        stage = files.temporary_name(self._real)
        with files.naming("create the folder", stage):
            os.mkdir(stage)
        self.staged = stage
        commit.write_journal(self._real, os.path.basename(stage))

    def _stage_beside(self, in_the_way: str) -> None:
        parent, status = os.path.dirname(self._real), os.stat(self._real)
        if status.st_dev != os.stat(parent).st_dev or parent == self._real:
            raise SaveError(
                f"{self.path!r} holds {in_the_way!r} already and is where a file system is mounted, so that it cannot "
                "be replaced in one step: save to a folder in it, or remove what it holds before"
            )
        if not os.access(self._real, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the folder holds a save and may not be written to", self.path)
        beside = commit.path_beside(self._real)
        with files.naming(f"build what replaces {self.path!r} beside it, as", beside):
            os.mkdir(beside)
        self.staged, self.is_replacing = beside, True
        self._locks.enter_context(commit.locked(beside))
        if (new := os.stat(beside)).st_gid != status.st_gid or new.st_uid != status.st_uid:
            # As with any file that is replaced by a rename: only the superuser can keep a foreign owner.
            commit.unless_it_fails(os.chown, beside, status.st_uid, status.st_gid)
        os.chmod(beside, stat.S_IMODE(status.st_mode))
        commit.write_journal(beside)

    def _publish(self, meta: bytes) -> None:
        if self.durable:
            for folder in (*reversed(self._folders), self.staged):
                files.sync_folder(folder)
        if self.is_replacing:
            files.write_new(f"{self.staged}/{META}", meta, self.durable)
            self._exchange()
        else:
            self._move_into_place(meta)

    def _move_into_place(self, meta: bytes) -> None:
        """Rename what is in the stage into the folder, `meta.json` last."""
        stage, real = self.staged, self._real
        commit.write_journal(real, os.path.basename(stage), self.durable)
        names = os.listdir(stage)
        with files.naming("write the files into the folder", self.path):
            commit.move_all(names, stage, real)
        try:
            if self.durable:
                files.sync_folder(real)
            with files.naming("write the file", f"{self.path}/{META}"):
                files.write_file(f"{real}/{META}", meta, durable=self.durable)
        except BaseException:
            commit.move_all(names, real, stage)
            raise
        self._committed = True
        os.unlink(f"{real}/{JOURNAL}")
        commit.unless_it_fails(os.rmdir, stage)

    def _exchange(self) -> None:
        """Have the new folder and the old one change places, and move what is the caller's."""
        beside, real = self.staged, self._real
        if self.durable:
            files.sync_folder(beside)
        commit.moves_between(real, beside)
        current = commit.current_folder_in(real, beside)
        with files.naming("replace the folder", self.path):
            commit.swap(beside, real)
        try:
            commit.carry(beside, real)
        except BaseException:
            commit.swap(beside, real)
            raise
        self._committed = True
        os.unlink(f"{real}/{JOURNAL}")
        if current:
            os.chdir(current)
        # What cannot be removed now (a file that a reader has open, on NFS) is left to the next save.
        commit.unless_it_fails(commit.discard, beside)

    def _abort(self) -> None:
        if self.is_replacing:
            commit.unless_it_fails(commit.discard, self.staged)
        elif self.staged != self.path:
            commit.unless_it_fails(commit.recover, self._real)
        if self.staged != self.path:
            # A full disk takes nothing, not even a journal.
            shutil.rmtree(self.staged, ignore_errors=True)
        self._remove_folders()
