"""The transactions of all savers: a save stages its files, and a commit makes them visible in one step.

The life cycle of a `Transaction`, which is a context:

- *begin*: take the lock, remove the leftovers of killed saves, and refuse to replace foreign files;
- *write*: create files and folders where readers do not look for them;
- *commit*: put all of them in place in one step, so that readers see the old save or the new one;
- *abort*, at the end of a block without a commit: remove the files that were written.

A process that is killed at any moment leaves the old save or the new one, and leftovers that the next save removes.

A save that is one file is written beside its path, as `.NAME.tensordict-new`, and renamed. The lock is on another file,
`.NAME.tensordict-lock`, so that nobody finds the save itself locked.

A save that is a folder is built in a *stage*, another folder. If the save creates the folder, the stage is beside it,
and one rename replaces the empty folder by it. If something is in the way, the stage is beside the old folder,
too (leaves that stay are hard links to their files), and the two change places in one step of the file system. Files of
the old folder that belong to no save of ours are moved over, and the rest is removed: a reader that has mapped it keeps
it. If the folder exists and has nothing of the same names, the stage is in the folder itself. Its entries are renamed
into the folder one after the other. `meta.json` comes last and makes it a save. The lock is on the folder.

A *journal*, the file `%save`, names the stage of a save that has not committed. Before the first entry leaves the
stage, the journal records the identity of each entry. Recovery removes only files with these identities.
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
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META, local_path

if TYPE_CHECKING:
    from typing_extensions import Self


class Transaction(ABC):
    """The files that a save writes, as a context: `commit` makes them visible, and without it they are removed.

    Args:
        path: the absolute path of the save.
        durable: flush all files to the disk before the commit, and then the commit itself.

    Attributes:
        staged: the path that stands for `path` until the commit.
        published: True once readers may have seen the new files.
    """

    def __init__(self, path: str, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.staged = path
        self._real = os.path.realpath(path)
        # The files and folders that this transaction created.
        self._files: list[str] = []
        self._folders: list[str] = []
        self._locks = contextlib.ExitStack()
        self._committed = False
        self.published = False

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
        """Take the lock and remove the leftovers of a killed save. An existing save at `path` is not changed."""

    # --- write --------------------------------------------------------------------------------------------------------

    def at(self, path: str) -> str:
        """Return the staged path of `path`, which is the save itself or a file in it."""
        return self.staged + path[len(self.path) :]

    def make_folder(self, path: str, key: Path = ()) -> None:
        """Create the folder for `path` in the stage with its parents, if it does not exist."""
        with files.naming("create the folder", path, key):
            self._make_folder(self.at(path))

    def _make_folder(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path and not os.path.isdir(parent):
            self._make_folder(parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(20, "there is a file where the folder should be", path) from None
        else:
            self._folders.append(path)

    def create(self, staged: str) -> int:
        """Create a file in the stage. The caller syncs and closes the descriptor."""
        fd = os.open(staged, system.CREATE, 0o666)
        self._files.append(staged)
        return fd

    @contextlib.contextmanager
    def new_file(self, path: str, key: Path = ()) -> Iterator[int]:
        """Create the file for `path` in the stage; sync and close its descriptor at the end of the block."""
        with files.naming("write the file", path, key):
            fd = self.create(self.at(path))
        try:
            yield fd
            with files.naming("write the file", path, key):
                self._finish(fd)
        finally:
            os.close(fd)

    def _finish(self, fd: int) -> None:
        """Flush a complete file to the disk, if the save is durable."""
        if self.durable:
            os.fsync(fd)

    def write(self, path: str, content: bytes, key: Path = ()) -> None:
        """Create the file for `path` with this content in the stage."""
        with self.new_file(path, key) as fd, files.naming("write the file", path, key):
            files.write_bytes(fd, content)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block that may be repeated: if it fails, remove the files that it created."""
        before = len(self._files)
        try:
            yield
        except BaseException:
            for path in self._files[before:]:
                commit.try_to(os.unlink, path)
            del self._files[before:]
            raise

    # --- commit -------------------------------------------------------------------------------------------------------

    def commit(self, meta: bytes = b"") -> None:
        """Put the save in its place.

        Args:
            meta: for a folder, the content of the `meta.json` at its top.

        Raises:
            SaveError: the save has a file or a folder where a foreign one exists. The old save is unchanged.
            OSError: the file system refuses a step. The old save is unchanged.
        """
        self._publish(meta)
        logger.debug("saved %r", self._real)
        if self.durable:
            for folder in dict.fromkeys(os.path.dirname(made) for made in (*self._folders, self._real)):
                if os.path.isdir(folder):
                    files.sync_folder(folder)

    @abstractmethod
    def _publish(self, meta: bytes) -> None:
        """Make the staged files visible in one step, and set `_committed`."""

    # --- abort --------------------------------------------------------------------------------------------------------

    def __exit__(self, *exc_info: object) -> None:
        try:
            if not self._committed:
                self._abort()
        finally:
            self._locks.close()

    def _abort(self) -> None:
        """Remove the files that were written, and ignore errors."""
        for path in self._files:
            commit.try_to(os.unlink, path)

    def _remove_folders(self) -> None:
        for path in reversed(self._folders):
            commit.try_to(os.rmdir, path)


# --- one file ---------------------------------------------------------------------------------------------------------


class FileTransaction(Transaction):
    """A save that is one file.

    Args:
        path: the path of the save; a link is followed.
        existsok: replace an existing file.
        durable: flush the file and its name to the disk.
        check: is called with the path of the existing file, and raises an error if it may not be replaced.
        parents: create missing parent folders.

    Raises:
        SaveError: `path` is a folder or a device; or a file exists, and `existsok` is false or `check` refuses it; or
            another process is saving there.
        OSError: the file cannot be created; names `path`.

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
            # Check again under the lock, because another process may have written the file before.
            check_target(self.path, self._existsok, self._check)
            # Remove the old staged file instead of writing over it: it may be a hard link to the save, if a save with
            # `existsok=False` was killed between `os.link` and `os.unlink`.
            _unlink(self.staged)

    def _lock(self) -> None:
        """Lock the lock file beside the save, and choose the staged path."""
        lock = commit.path_beside(self._real, "lock")
        self.staged = commit.path_beside(self._real)
        if not self._locks.enter_context(commit.hold_lock(lock, self.path, os.O_RDWR | os.O_CREAT)):
            # Without locks the staged path needs a unique name. If this process is killed, the file stays.
            self.staged = files.temporary_name(os.path.dirname(self._real))
        # The lock file is removed while it is locked: `acquire` checks that the file it opened still has its name.
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
                    raise _exists_error(self.path) from None
                os.unlink(self.staged)
        self._committed = True

    def _abort(self) -> None:
        super()._abort()
        # Remove the lock file first: it lies in one of the created folders, and only empty folders can be removed.
        self._locks.close()
        self._remove_folders()


class TreeTransaction(FileTransaction):
    """A save that is a folder without foreign files: it is built beside its path, and replaces the whole old folder.

    It takes the arguments of `FileTransaction`. `new_file(path)` creates the folder itself.

    Raises:
        SaveError: `path` is a file; or `check` refuses a folder that is not empty; or another process is saving there.
        OSError: the folder cannot be created; names `path`.
    """

    def _begin(self) -> None:
        if self._parents:
            self._make_folder(os.path.dirname(self.path))
        with files.naming("write the folder", self.path):
            self._lock()
            commit.put_back(self._real)
            if os.path.lexists(self._real):
                self._check_folder()
            if os.path.lexists(self.staged):
                # A `FolderTransaction` locks its stage, which has the same path.
                with commit.hold_lock(self.staged, self.path):
                    shutil.rmtree(self.staged)

    def _check_folder(self) -> None:
        """Raise an error if the old folder may not be replaced."""
        if not os.path.isdir(self._real):
            raise SaveError(f"cannot write a folder to {self.path!r}, which is a file")
        if not self._existsok:
            raise _exists_error(self.path)
        if self._check is not None and os.listdir(self._real):
            self._check(self.path)

    @contextlib.contextmanager
    def new_file(self, path: str, key: Path = ()) -> Iterator[int]:
        """Create the folder for `path`. If the save is durable, flush its files to the disk at the end of the block."""
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
        commit.try_to(shutil.rmtree, self.staged)

    def _abort(self) -> None:
        shutil.rmtree(self.staged, ignore_errors=True)
        super()._abort()


def check_target(path: str, existsok: bool = True, check: Callable[[str], None] | None = None) -> None:
    """Check that a file can be written to `path`.

    Raises:
        SaveError: `path` is a folder or a device; or a file exists, and `existsok` is false or `check` refuses it.
        PermissionError: the existing file is not writable.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise SaveError(f"cannot write a file to {path!r}, which is {what}")
    if not existsok:
        raise _exists_error(path)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file to be replaced may not be written", path)
    if check is not None:
        check(path)


def _exists_error(path: str) -> SaveError:
    return SaveError(f"the file {path!r} already exists; pass existsok=True to replace it")


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


class OwnFolderTransaction(Transaction):
    """A save in a new folder that no other process uses, such as a shard: its files are not staged.

    The commit adds the `meta.json`, which makes the folder a save.

    Raises:
        FileExistsError: a file, a folder or a link exists at `path`.
        FileNotFoundError: the parent folder is missing.
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
        names: the paths of all files of the save, relative to the root.
        durable: flush everything to the disk.
        kept: the names of the files that stay unchanged.
        overwrite: replace foreign files, too.

    Raises:
        SaveError: another process or thread is saving there; or the old save cannot be replaced in one step; or a
            foreign file has the name of a file of the save.
        OSError: a folder cannot be created.
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
        self._names = frozenset([name.partition("/")[0] for name in names])
        self._kept = kept
        self._overwrite = overwrite
        self._beside = commit.path_beside(self._real)
        # True if the stage is beside the folder, and not in it.
        self._is_beside = False
        # True if the stage will be exchanged with an old folder.
        self.is_replacing = False

    def _begin(self) -> None:
        commit.put_back(self._real)
        self._make_folder(self._real)
        try:
            has_locks = self._locks.enter_context(commit.hold_lock(self._real))
        except BaseException:
            # The holder of the lock may be about to write into these folders, so the abort must not remove them.
            self._folders.clear()
            raise
        commit.clean(self._real, self._beside, has_locks)
        in_the_way = sorted(self._names & frozenset(os.listdir(self._real)))
        if in_the_way:
            if not self._overwrite:
                self._refuse_foreign_files()
            self._check_exchange(in_the_way[0])
            self._stage_beside()
            self.is_replacing = True
        elif self._real in self._folders:
            self._stage_beside()
        else:
            self._stage_inside()

    def _refuse_foreign_files(self) -> None:
        """Raise an error if the save would replace a file that belongs to no save. Empty files may be replaced."""
        inside: dict[str, list[str]] = {}
        for path in self._paths:
            folder, _, name = path.rpartition("/")
            inside.setdefault(folder, []).append(name)
        for folder, names in inside.items():
            old = os.path.join(self._real, folder)
            if not os.path.isdir(old):
                continue
            present = frozenset(os.listdir(old))
            own = commit.list_own_names(old)[0]
            for name in names:
                path = os.path.join(old, name)
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
        self.staged, self._is_beside = stage, False
        commit.write_journal(self._real, os.path.basename(stage))

    def _check_exchange(self, in_the_way: str) -> None:
        """Raise an error if the old folder cannot be replaced."""
        parent, status = os.path.dirname(self._real), os.stat(self._real)
        if status.st_dev != os.stat(parent).st_dev or parent == self._real:
            raise SaveError(
                f"{self.path!r} holds {in_the_way!r} already and is where a file system is mounted, so that it cannot "
                "be replaced in one step: save to a folder in it, or empty it first"
            )
        if not os.access(self._real, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the folder holds a save and may not be written to", self.path)

    def _stage_beside(self) -> None:
        status = os.stat(self._real)
        beside = self._beside
        try:
            os.mkdir(beside)
        except OSError as error:
            raise files.named_os_error(error, f"build what replaces {self.path!r} beside it, as", beside) from error
        self.staged, self._is_beside = beside, True
        self._locks.enter_context(commit.hold_lock(beside))
        if (new := os.stat(beside)).st_gid != status.st_gid or new.st_uid != status.st_uid:
            # Only the superuser can give the new folder another owner, so an error is ignored.
            commit.try_to(os.chown, beside, status.st_uid, status.st_gid)
        os.chmod(beside, stat.S_IMODE(status.st_mode))
        commit.write_journal(beside)

    def _publish(self, meta: bytes) -> None:
        if self.durable:
            for folder in (*reversed(self._folders), self.staged):
                files.sync_folder(folder)
        if self._is_beside:
            files.write_new(f"{self.staged}/{META}", meta, self.durable)
            if self.durable:
                files.sync_folder(self.staged)
        if self.is_replacing:
            self._exchange()
        elif not (self._is_beside and self._rename_stage()):
            self._move_into_place(meta)

    def _rename_stage(self) -> bool:
        """Replace the empty folder by the stage. If that fails, move the files to a stage in the folder."""
        beside, real = self.staged, self._real
        try:
            os.rename(beside, real)
        except OSError:
            # Another program has put something into the folder, or this file system replaces no folders.
            try:
                self._stage_inside()
                commit.move_all(set(os.listdir(beside)) - {JOURNAL, META}, beside, self.staged)
            finally:
                commit.try_to(commit.discard, beside)
            return False
        self._committed = True
        os.unlink(f"{real}/{JOURNAL}")
        return True

    def _move_into_place(self, meta: bytes) -> None:
        """Move the entries of the stage into the folder, and write `meta.json` last."""
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
        commit.try_to(os.rmdir, stage)

    def _exchange(self) -> None:
        """Exchange the new folder and the old one, and move the caller's files to the new one."""
        beside, real = self.staged, self._real
        commit.plan_moves(real, beside)
        current = commit.current_folder_in(real, beside)
        with files.naming("replace the folder", self.path):
            commit.swap(beside, real)
        self.published = True
        try:
            commit.move_foreign_files(beside, real)
        except BaseException:
            commit.swap(beside, real)
            raise
        self._committed = True
        os.unlink(f"{real}/{JOURNAL}")
        if current:
            os.chdir(current)
        # Files that cannot be removed (on NFS, if a reader has them open) are left to the next save.
        commit.try_to(commit.discard, beside)

    def _abort(self) -> None:
        if self._is_beside:
            commit.try_to(commit.discard, self.staged)
        elif self.staged != self.path:
            commit.try_to(commit.recover, self._real)
        if self.staged != self.path:
            # On a full disk `discard` cannot write its journal, so the stage may still exist.
            shutil.rmtree(self.staged, ignore_errors=True)
        self._remove_folders()
