"""Saving to URLs: a save is made in a temporary folder, and then uploaded so that nobody sees a part of it.

One file is there when all of it is. Of a folder, the `meta.json` at the top goes last; until then there is no save. A
claim keeps a second uploader from mixing in its files (`claims.py`). Only `overwrite=True` replaces a save: an archive
or another single file in one step, a folder after its `meta.json` has been taken away. A new reader then finds no save,
and a reader that has begun notices that the files are others (`RemoteSave.check`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.io.formats.loading import LoadOptions, load_directory, read_directory
from tensordict.io.formats.value_files import skip_unpickling, unpickle
from tensordict.io.remote.claims import Claim
from tensordict.io.remote.remote_saves import Access, RemoteFolder, RemoteSave, naming_url
from tensordict.io.remote.urls import IN_FLIGHT, Remote, StorageOptions, is_url
from tensordict.io.saving.commit import JOURNAL
from tensordict.io.saving.progress import show_transfer
from tensordict.io.saving.source import SaveFolder, Source
from tensordict.memory import file_maps, files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META

T = TypeVar("T")

# Larger files are uploaded one at a time, in parts of their own.
_LARGE = 64 << 20


def save_file(url: PathLike, storage_options: StorageOptions | None, overwrite: bool, write: Callable[[str], T]) -> T:
    """Upload the file that `write` makes at a local path; gives what that returns.

    Raises:
        SaveError: there is something at the URL, without `overwrite`; or it cannot be written.
    """
    remote = Remote(url, storage_options)
    _check_free(remote, overwrite, META)
    with _staged(remote) as path:
        found = write(path)
        remote.put("", path)
    return found


def write_file(path: Any, storage_options: StorageOptions | None, overwrite: bool, write: Callable[[Any], T]) -> T:
    """What `write` gives that makes a file at a path; at a URL, one that is uploaded then."""
    return save_file(path, storage_options, overwrite, write) if is_url(path) else write(path)


def save_folder(
    url: PathLike, storage_options: StorageOptions | None, overwrite: bool, write: Callable[[str], object]
) -> object:
    """Upload the folder that `write` makes at a local path; gives the container in it, mapped privately.

    Raises:
        SaveError: as `save_file`; or another process is saving there.
    """
    remote = Remote(url, storage_options)
    _check_free(remote, overwrite, "")
    with _staged(remote) as path:
        write(path)
        _upload(remote, path, overwrite)
        return load_directory(path, LoadOptions(source=_Staged(path), unpickle=unpickle))


@contextlib.contextmanager
def _staged(remote: Remote) -> Iterator[str]:
    """A local path to save to, of which errors do not speak; it is removed, and what is mapped there stays."""
    with tempfile.TemporaryDirectory(prefix="tensordict-upload-") as folder:
        path = f"{folder}/{remote.url.rpartition('/')[2] or 'save'}"
        with naming_url(path, remote.url):
            yield path


def _check_free(remote: Remote, overwrite: bool, other: str) -> None:
    """Refuse to replace what may not be, or what is no save of the same kind: `other` is what that would have."""
    if remote.is_http:
        raise SaveError(f"cannot save to {remote.url!r}: servers of HTTP are read, and not written to")
    for name, what in (("", "a file"), (META, "a saved folder")):
        if remote.find(name) is None:
            continue
        if name == other:
            raise SaveError(
                f"there is {what} at {remote.url!r}, which this cannot replace: delete it, or save elsewhere"
            )
        if not overwrite:
            raise SaveError(f"there is {what} at {remote.url!r} already: pass overwrite=True to replace it")


def _upload(remote: Remote, path: str, overwrite: bool) -> None:
    claim = Claim(remote)
    try:
        left = _upload_under(remote, path, overwrite, claim)
    except BaseException:
        with contextlib.suppress(OSError):
            claim.release()
        raise
    claim.release()
    remote.delete(sorted(left))


def _upload_under(remote: Remote, path: str, overwrite: bool, claim: Claim) -> set[str]:
    """Upload a folder; returns the names of the files of the old save that the new one does not have."""
    names = sorted(_names_in(path))
    sent: list[str] = []
    try:
        present = {file.name for file in remote.files()} - {JOURNAL}
        in_the_way = sorted(present.intersection(names))
        if in_the_way and not overwrite:
            raise SaveError(
                f"{remote.url_of(in_the_way[0])!r} is there, and the new save has a file of that name: pass "
                "overwrite=True to replace it, or save elsewhere"
            )
        old = _files_of(remote) if META in present else set()
        # From now on there is no save, and what replaces it is not one yet.
        remote.delete({META} & present)
        leaves = [name for name in names if name != META]
        _put(remote, path, leaves, sent)
        claim.check()
        sent.append(META)
        remote.put(META, f"{path}/{META}")
    except BaseException:
        with contextlib.suppress(OSError):
            claim.check()
            remote.delete(sent)
        raise
    return (old & present).difference(names)


def _put(remote: Remote, path: str, names: Iterable[str], sent: list[str]) -> None:
    sizes = {name: os.path.getsize(f"{path}/{name}") for name in names}

    def put(name: str) -> None:
        sent.append(name)
        remote.put(name, f"{path}/{name}")

    large = {name for name, size in sizes.items() if size > _LARGE}
    with show_transfer("uploading", sum(sizes.values())):
        files.run_all([partial(put, name) for name in sizes if name not in large], IN_FLIGHT)
        for name in sorted(large):
            put(name)


def _names_in(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.relpath(f"{folder}/{name}", path)


def _files_of(remote: Remote) -> set[str]:
    """The names of the files of the save that is there, as its `meta.json` files tell; none of a broken one."""
    save = RemoteSave(remote.url_of(""), Access(remote.storage_options))
    try:
        source = save.source()
        assert isinstance(source, RemoteFolder)
        source.wanted, source.ahead = [], False
        pickles: list[str] = []

        def noted(of: Source, path: str, key: Path, stack: bool) -> object:
            pickles.append(path[len(save.path) + 1 :])
            return skip_unpickling(of, path, key, stack)

        read_directory(save.path, LoadOptions(source=source, unpickle=noted))
        return {*source.asked(), *pickles}
    except OSError:
        return set()
    finally:
        save.close()


class _Staged:
    """The files of a save in a folder that is about to be removed, mapped privately."""

    def __init__(self, path: str) -> None:
        save = SaveFolder(path)
        self.read, self.exists, self.is_folder = save.read, save.exists, save.is_folder

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """The tensor over a file."""
        nbytes = os.path.getsize(path)
        with files.closing(files.open_file(path)) as fd:
            return file_maps.map_bytes(fd, nbytes, path).view(dtype).view(shape)
