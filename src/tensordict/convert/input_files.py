"""The files that a path stands for: one, those that match a pattern, or what is behind URLs."""

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
    """A file that is read.

    Attributes:
        path: where it is, as errors tell it.
        access: how a URL is reached.
    """

    path: str
    access: Access

    @contextlib.contextmanager
    def local(self) -> Iterator[str]:
        """A block in which the file, or a copy of what is at a URL, is at this local path."""
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
    """The files that a path, a URL or a pattern of either (`*`, `?`, `[...]`, `**`) stands for, by name.

    A URL with a `?` alone is no pattern: that begins a query.

    Raises:
        FileNotFoundError: there are none.
        SaveError: the pattern is a URL of HTTP, which lists nothing.
    """
    place = as_url(path)
    if is_url(place):
        full = full_url(place)
        names = _matching(full, access) if any(sign in full for sign in "*[") else [place]
    else:
        place = without_scheme(place)
        # A file may be called so, too.
        literal = os.path.lexists(place) or not any(sign in place for sign in _MAGIC)
        names = [place] if literal else sorted(filter(os.path.isfile, glob.glob(place, recursive=True)))
        if literal and not os.path.lexists(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
    if not names:
        raise FileNotFoundError(errno.ENOENT, "no file matches this pattern", str(place))
    return [SourceFile(name, access) for name in names]


def _matching(pattern: str, access: Access) -> list[str]:
    parts = pattern.split("/")
    fixed = next(i for i, part in enumerate(parts) if any(sign in part for sign in _MAGIC))
    remote = Remote("/".join(parts[:fixed]), access.storage_options)
    wanted = parts[fixed:]
    return [remote.url_of(file.name) for file in remote.files() if _matches(file.name.split("/"), wanted)]


def _matches(parts: list[str], wanted: list[str]) -> bool:
    """Whether the parts of a path are those of a pattern, of which `**` stands for any number."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_matches(parts[i:], wanted[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])
