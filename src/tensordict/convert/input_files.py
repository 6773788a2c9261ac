"""The input files of the table readers: a path, a pattern, or URLs."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass

from tensordict.io.remote.credentials import as_url, full_url
from tensordict.io.remote.remote_saves import Access, RemoteSave
from tensordict.io.remote.urls import Remote, is_url
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import without_scheme

_MAGIC = "*?["


@dataclass(frozen=True)
class SourceFile:
    """An input file.

    Attributes:
        path: its path or URL, as given in errors.
        access: the options to access a URL.
    """

    path: str
    access: Access

    @contextlib.contextmanager
    def local(self) -> Iterator[str]:
        """Provide the file at a local path during a block. A URL is downloaded."""
        if not is_url(self.path):
            yield self.path
            return
        save = RemoteSave(self.path, self.access)
        try:
            with save.naming():
                yield save.local()
                save.check()
        finally:
            save.close()


def files_of(path: PathLike, access: Access) -> list[SourceFile]:
    """Return the files that match a path, a URL or a pattern (`*`, `?`, `[...]`, `**`), sorted by name.

    A `?` in a URL begins a query, and does not make it a pattern.

    Raises:
        FileNotFoundError: no file matches.
        SaveError: the pattern is an HTTP URL, and HTTP servers cannot list files.
    """
    place = as_url(path)
    if is_url(place):
        full = full_url(place)
        names = _match_remote_files(full, access) if any(sign in full for sign in "*[") else [place]
    else:
        place = without_scheme(place)
        # A file may have such a name itself.
        literal = os.path.lexists(place) or not any(sign in place for sign in _MAGIC)
        names = [place] if literal else sorted(filter(os.path.isfile, glob.glob(place, recursive=True)))
        if literal and not os.path.lexists(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
    if not names:
        raise FileNotFoundError(errno.ENOENT, "no file matches this pattern", str(place))
    return [SourceFile(name, access) for name in names]


def _match_remote_files(pattern: str, access: Access) -> list[str]:
    parts = pattern.split("/")
    fixed = next(i for i, part in enumerate(parts) if any(sign in part for sign in _MAGIC))
    remote = Remote("/".join(parts[:fixed]), access.storage_options)
    wanted = parts[fixed:]
    return [remote.url_of(file.name) for file in remote.files() if _match_parts(file.name.split("/"), wanted)]


def _match_parts(parts: list[str], wanted: list[str]) -> bool:
    """Return whether the parts of a path match the parts of a pattern. `**` matches any number of parts."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_match_parts(parts[i:], wanted[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], wanted[0]) and _match_parts(parts[1:], wanted[1:])
