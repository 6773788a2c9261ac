"""A folder that only its user can read or change, such as a cache of files behind URLs.

Every operation opens the folder, checks who may use it, and reaches the files through the descriptor. So nobody can put
another folder in its place between the check and the use. No link is followed, and a file that somebody else could have
written to is refused. A system without users and descriptors of folders (Windows) makes no such checks.
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
        """Make the folder if it is missing, and check it.

        Raises:
            SaveError: others may use it, or it belongs to another user, or is a link.
            OSError: it cannot be made.
        """
        os.makedirs(self.path, 0o700, exist_ok=True)
        with self._opened():
            pass

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder; one that is made has the mode 0600.

        Returns:
            the descriptor, which the caller closes.

        Raises:
            FileNotFoundError: there is none, and `flags` does not ask for a new one.
            SaveError: it is a link or no plain file, or somebody else could have written to it.
        """
        with self._opened() as folder:
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
        """The content of a file; raises as `open`."""
        with open(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Put a file in its place in one step: readers see the old content or the new one."""
        staged = os.path.basename(files.temporary_name(""))
        fd = self.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with files.closing(fd):
                files.write_bytes(fd, content)
            with self._opened() as folder:
                os.replace(self._at(staged, folder), self._at(name, folder), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            commit.unless_it_fails(self.unlink, staged)
            raise

    def unlink(self, name: str) -> None:
        """Remove a file, or a link and not what it leads to."""
        with self._opened() as folder:
            os.unlink(self._at(name, folder), dir_fd=folder)

    def status(self, name: str) -> os.stat_result:
        """The status of a file; a link is not followed."""
        with self._opened() as folder:
            return os.stat(self._at(name, folder), dir_fd=folder, follow_symlinks=False)

    def names(self) -> list[str]:
        """The names of all files in the folder; an empty list for a missing folder."""
        try:
            with self._opened() as folder:
                return os.listdir(self.path if folder is None else folder)
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def locked(self, name: str, flags: int, patience: float) -> Iterator[None]:
        """Hold the lock on a file for a block; the lock ends with the process at the latest.

        Args:
            name: the file.
            flags: what else it is opened with; `os.O_CREAT` makes it.
            patience: how many seconds to wait for another process or thread.

        Raises:
            SaveError: another one holds it all that time, or the file is refused as by `open`.
            FileNotFoundError: there is none, and `flags` does not make it.
        """
        flags |= os.O_RDWR | system.NONBLOCK
        # Whoever could open the file could lock it, too, so the file is checked first.
        os.close(self.open(name, flags))
        with self._opened() as folder:
            shown = f"{self.path}/{name}"
            with commit.locked(self._at(name, folder), shown, flags, patience, folder=folder, mode=_MODE):
                yield

    def _at(self, name: str, folder: int | None) -> str:
        return name if folder is not None else f"{self.path}/{name}"

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Open and check the folder; gives its descriptor, or `None` on a system without such descriptors."""
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
            # Linux says ENOTDIR of a link.
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
                f"process is of the user {os.geteuid()}: name a folder of your own"
            )
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise SaveError(
                f"{self.path!r} is open to other users (mode {mode:04o}), who could read or change what is kept there: "
                f"close it with: chmod 700 {shlex.quote(self.path)}"
            )

    def _check_file(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self._refusal(name, "is no plain file")
        if not _BY_DESCRIPTOR:
            return
        if status.st_uid != os.geteuid():
            raise self._refusal(name, f"belongs to the user {status.st_uid}")
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise self._refusal(name, f"was open to other users (mode {mode:04o})")
        if status.st_nlink > 1:
            raise self._refusal(name, "has a second name, a hard link")

    def _refusal(self, name: str, what: str) -> SaveError:
        # `RemoteSave.naming` replaces a whole path by the URL, so this path is given in two parts.
        remove = f"cd {shlex.quote(self.path)} && rm {shlex.quote(name)}"
        return SaveError(
            f"the file {name!r} in {self.path!r} {what}, so it may not be what was kept there: remove it: {remove}"
        )
