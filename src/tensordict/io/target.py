"""The file that a save of one file is written to, and how it takes its place: the old save or the new one, whole.

The new file lies beside the target, as `.NAME.tensordict-new`, until all of it is there; then it is renamed. Whoever
writes it holds a lock on another file, `.NAME.tensordict-lock`, so that nobody finds the save itself locked. A saver
that was killed leaves the two, unlocked, and the next one takes them away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from tensordict.core.errors import SaveError
from tensordict.io import commit
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path


class Target:
    """The new file for `path`, as a context: it takes the place of the old one by `commit`, and is removed without.

    Args:
        path: of the save; a link is followed.
        existsok: whether there may be a file already.
        durable: whether the file and its name are to reach the disk before `commit` returns.
        check: is given the path of the file that is to be replaced, and raises when it may not be.

    Raises:
        SaveError: there is a folder or a device, a file without `existsok` or one that `check` refuses, or another
            saver at work.
        OSError: the file cannot be made; names `path`.

    Example:
        >>> import os
        >>> import tempfile
        >>> from tensordict.io.target import Target
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Target(folder + "/x") as target:
        ...         _ = os.write(target.fd, b"new")
        ...         before = os.path.exists(folder + "/x")
        ...         target.commit()
        ...     before, sorted(os.listdir(folder))
        (False, ['x'])
    """

    def __init__(
        self, path: PathLike, existsok: bool = True, durable: bool = False, check: Callable[[str], None] | None = None
    ) -> None:
        self.path = local_path(path)
        self._real = os.path.realpath(self.path)
        self._existsok = existsok
        self._durable = durable
        self._committed = False
        check_target(self.path, existsok)
        # Where the new file is until the commit: for what has to open it by its name.
        self.temporary = commit.path_beside(self._real)
        self._locks = contextlib.ExitStack()
        try:
            self._lock()
            # Looked into while nobody else replaces it.
            check_target(self.path, existsok, check)
            self.fd = self._created()
        except OSError as error:
            self._locks.close()
            raise files.named_os_error(error, "write the file", self.path) from error
        except BaseException:
            self._locks.close()
            raise

    def _lock(self) -> None:
        lock = commit.path_beside(self._real, "lock")
        if not self._locks.enter_context(commit.locked(lock, self.path, os.O_RDWR | os.O_CREAT)):
            # A file system without locks: a name of our own, which nobody cleans up after us.
            self.temporary = files.temporary_name(os.path.dirname(self._real))
        # While it is still locked: whoever opened it meanwhile sees that it is no longer there.
        self._locks.callback(_unlink, lock)

    def _created(self) -> int:
        # Not written over: a saver that was killed may have given it a second name already, that of the save.
        _unlink(self.temporary)
        return os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | system.CLOEXEC, 0o666)

    def __enter__(self) -> Target:
        return self

    def commit(self) -> None:
        """Put the file in its place.

        Raises:
            SaveError: without `existsok`: there is a file now.
            OSError: the file system refuses; names the path.
        """
        with files.naming("write the file", self.path):
            self._commit()

    def _commit(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(self.temporary, stat.S_IMODE(os.stat(self._real).st_mode))
        if self._durable:
            os.fsync(self.fd)
        # Some systems rename no file that is open.
        self._close()
        if self._existsok:
            os.replace(self.temporary, self._real)
        else:
            try:
                os.link(self.temporary, self._real)
            except FileExistsError:
                raise _exists(self.path) from None
            os.unlink(self.temporary)
        self._committed = True
        if self._durable:
            files.sync_folder(os.path.dirname(self._real))

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._close()
            if not self._committed:
                _unlink(self.temporary)
        finally:
            self._locks.close()


def check_target(path: str, existsok: bool = True, check: Callable[[str], None] | None = None) -> None:
    """Refuse to write a save where that cannot be done.

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
