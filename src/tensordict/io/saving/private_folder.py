"""A folder that only its user can read or change, for the cache of remote files.

Every operation opens the folder, checks its owner and mode, and reaches the files through the descriptor. So nobody can
replace the folder between the check and the use. Links are not followed, and files that another user could have written
to are refused. Systems without users and descriptors of folders (Windows) skip these checks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Iterator

from tensordict.core.exceptions import SaveError
from tensordict.io.saving import commit
from tensordict.memory import files, system

_BY_DESCRIPTOR = system.has_folder_descriptors()
_MODE = 0o600


class PrivateFolder:
    """A folder that belongs to the user of this process and is closed to all others.

    Args:
        path: the folder. `create` makes it, with the mode 0700.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def create(self) -> None:
        """Create the folder if it is missing, and check it.

        Raises:
            SaveError: the folder is open to other users, belongs to another user, or is a link.
            OSError: the folder cannot be created.
        """
        os.makedirs(self.path, 0o700, exist_ok=True)
        with self._open_folder():
            pass

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder. A new file gets the mode 0600.

        Returns:
            the descriptor, which the caller closes.

        Raises:
            FileNotFoundError: the file is missing, and `flags` lacks `os.O_CREAT`.
            SaveError: it is a link or another special file, or another user could have written to it.
        """
        with self._open_folder() as folder:
            try:
                where = self._at(name, folder)
                fd = os.open(where, flags | system.CLOEXEC | system.NOFOLLOW | system.NONBLOCK, _MODE, dir_fd=folder)
            except OSError as error:
                error.filename = f"{self.path}/{name}"
                if error.errno == errno.ELOOP:
                    raise self._refusal(name, "is a link") from error
                raise
        try:
            self._check_file(name, os.fstat(fd))
        except SaveError:
            os.close(fd)
            raise
        return fd

    def read(self, name: str) -> bytes:
        """Return the content of a file; raises the errors of `open`."""
        with open(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file in one step: readers see the old content or the new one."""
        staged = os.path.basename(files.temporary_name(""))
        fd = self.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with files.closing(fd):
                files.write_bytes(fd, content)
            with self._open_folder() as folder:
                os.replace(self._at(staged, folder), self._at(name, folder), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            commit.try_to(self.unlink, staged)
            raise

    def unlink(self, name: str) -> None:
        """Remove a file. Of a link, only the link itself is removed."""
        with self._open_folder() as folder:
            os.unlink(self._at(name, folder), dir_fd=folder)

    def status(self, name: str) -> os.stat_result:
        """Return the status of a file; a link is not followed."""
        with self._open_folder() as folder:
            return os.stat(self._at(name, folder), dir_fd=folder, follow_symlinks=False)

    def names(self) -> list[str]:
        """Return the names of all files in the folder; an empty list for a missing folder."""
        try:
            with self._open_folder() as folder:
                return os.listdir(self.path if folder is None else folder)
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def hold_lock(self, name: str, flags: int, patience: float) -> Iterator[None]:
        """Hold the lock on a file for a block. The system releases it if the process ends.

        Args:
            name: the file.
            flags: further flags for `os.open`; `os.O_CREAT` creates the file.
            patience: the seconds to wait for another holder of the lock.

        Raises:
            SaveError: another process or thread holds the lock all that time, or `open` refuses the file.
            FileNotFoundError: the file is missing, and `flags` lacks `os.O_CREAT`.
        """
        flags |= os.O_RDWR | system.NONBLOCK
        # Check the file first: another user who can open it could hold its lock.
        os.close(self.open(name, flags))
        with self._open_folder() as folder:
            shown = f"{self.path}/{name}"
            with commit.hold_lock(self._at(name, folder), shown, flags, patience, folder=folder, mode=_MODE):
                yield

    def _at(self, name: str, folder: int | None) -> str:
        return name if folder is not None else f"{self.path}/{name}"

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int | None]:
        """Open and check the folder. Yields its descriptor, or `None` on a system without descriptors of folders."""
        if not _BY_DESCRIPTOR:
            yield None
            return
        with files.closing(self._descriptor()) as folder:
            self._check_folder(os.fstat(folder))
            yield folder

    def _descriptor(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | system.DIRECTORY | system.NOFOLLOW | system.CLOEXEC)
        except OSError as error:
            # Linux raises ENOTDIR for a link.
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(self.path):
                real = os.path.realpath(self.path)
                raise SaveError(
                    f"{self.path!r} is a link, which is not followed: name {real!r} itself, if that is your folder"
                ) from error
            raise

    def _check_folder(self, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise SaveError(
                f"{self.path!r} belongs to the user {status.st_uid}, who could change what is kept there, and this "
                f"process runs as the user {os.geteuid()}: name a folder of your own"
            )
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise SaveError(
                f"{self.path!r} is open to other users (mode {mode:04o}), who could read or change what is kept there: "
                f"close it with: chmod 700 {shlex.quote(self.path)}"
            )

    def _check_file(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self._refusal(name, "is not a plain file")
        if not _BY_DESCRIPTOR:
            return
        if status.st_uid != os.geteuid():
            raise self._refusal(name, f"belongs to the user {status.st_uid}")
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise self._refusal(name, f"was open to other users (mode {mode:04o})")
        if status.st_nlink > 1:
            raise self._refusal(name, "has a second name, a hard link")

    def _refusal(self, name: str, what: str) -> SaveError:
        # The path is given in two parts, because `RemoteSave.naming` would replace the whole path by the URL.
        remove = f"cd {shlex.quote(self.path)} && rm {shlex.quote(name)}"
        return SaveError(
            f"the file {name!r} in {self.path!r} {what}, so it may not be what was kept there: remove it: {remove}"
        )
