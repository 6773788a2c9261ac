"""Saving to URLs: a save is written to a temporary folder, then uploaded so that readers never see a part of it.

Servers publish a file when its upload is complete. For a folder, the top `meta.json` is uploaded last; without it, the
folder is not a save. A claim keeps a second uploader from mixing in its files (`claims.py`). Only `overwrite=True`
replaces a save: a single file in one step, a folder by deleting its `meta.json` first. New readers then find no save,
and readers that have begun notice the changed files (`RemoteSave.check`).
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
from tensordict.io.remote.remote_saves import Access, FilesToFetch, RemoteFolder, RemoteSave, naming_url
from tensordict.io.remote.urls import IN_FLIGHT, Remote, StorageOptions, is_url
from tensordict.io.saving.commit import JOURNAL
from tensordict.io.saving.progress import show_transfer
from tensordict.io.saving.source import SaveFolder, Source
from tensordict.memory import file_maps, files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META

T = TypeVar("T")

# Larger files are uploaded one at a time, each in several parts.
_LARGE = 64 << 20


def save_file(url: PathLike, storage_options: StorageOptions | None, overwrite: bool, write: Callable[[str], T]) -> T:
    """Upload the file that `write` creates at a local path; returns the result of `write`.

    Raises:
        SaveError: the URL is taken and `overwrite` is False; or the upload fails.
    """
    remote = Remote(url, storage_options)
    _check_free(remote, overwrite, META)
    with _stage(remote) as path:
        found = write(path)
        remote.put("", path)
    return found


def write_file(path: Any, storage_options: StorageOptions | None, overwrite: bool, write: Callable[[Any], T]) -> T:
    """Call `write` with a path, or with a local path whose file is uploaded to a URL; returns its result."""
    return save_file(path, storage_options, overwrite, write) if is_url(path) else write(path)


def save_folder(
    url: PathLike, storage_options: StorageOptions | None, overwrite: bool, write: Callable[[str], object]
) -> object:
    """Upload the folder that `write` creates at a local path; returns its container, mapped privately.

    Raises:
        SaveError: as `save_file`; or another process is saving to the URL.
    """
    remote = Remote(url, storage_options)
    _check_free(remote, overwrite, "")
    with _stage(remote) as path:
        write(path)
        _upload(remote, path, overwrite)
        return load_directory(path, LoadOptions(source=_StagedSource(path), unpickle=unpickle))


@contextlib.contextmanager
def _stage(remote: Remote) -> Iterator[str]:
    """Yield a temporary local path to save to. Errors name the URL; existing memory maps survive its removal."""
    with tempfile.TemporaryDirectory(prefix="tensordict-upload-") as folder:
        path = f"{folder}/{remote.url.rpartition('/')[2] or 'save'}"
        with naming_url(path, remote.url):
            yield path


def _check_free(remote: Remote, overwrite: bool, other: str) -> None:
    """Refuse a taken URL without `overwrite`, or one with a save of the other kind, recognized by the file `other`."""
    if remote.is_http:
        raise SaveError(f"cannot save to {remote.url!r}: servers of HTTP are read, and not written to")
    kinds = {"": "a file", META: "a saved folder"}
    found: dict[str, bool] = {}

    def look(name: str) -> None:
        found[name] = remote.find(name) is not None

    files.run_all([partial(look, name) for name in kinds], IN_FLIGHT)
    for name, what in kinds.items():
        if not found[name]:
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
    """Upload a folder; returns the names of files of the old save that the new one lacks."""
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
        old = _list_files_of(remote) if META in present else set()
        # Without its meta.json the old save disappears for readers. The new one appears at the end.
        remote.delete({META} & present)
        leaves = [name for name in names if name != META]
        _upload_files(remote, path, leaves, sent)
        claim.check()
        sent.append(META)
        remote.put(META, f"{path}/{META}")
    except BaseException:
        with contextlib.suppress(OSError):
            claim.check()
            remote.delete(sent)
        raise
    return (old & present).difference(names)


def _upload_files(remote: Remote, path: str, names: Iterable[str], sent: list[str]) -> None:
    sizes = {name: os.path.getsize(f"{path}/{name}") for name in names}

    def upload(name: str) -> None:
        sent.append(name)
        remote.put(name, f"{path}/{name}")

    large = {name for name, size in sizes.items() if size > _LARGE}
    with show_transfer("uploading", sum(sizes.values())):
        files.run_all([partial(upload, name) for name in sizes if name not in large], IN_FLIGHT)
        for name in sorted(large):
            upload(name)


def _names_in(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.relpath(f"{folder}/{name}", path)


def _list_files_of(remote: Remote) -> set[str]:
    """Return the names of the files of the save at a URL, from its `meta.json` files; none if it is broken."""
    save = RemoteSave(remote.url_of(""), Access(remote.storage_options))
    try:
        source = save.source()
        assert isinstance(source, RemoteFolder)
        source.ahead = False
        pickles: list[str] = []

        def list_pickle(of: Source, path: str, key: Path, stack: bool) -> object:
            pickles.append(path[len(save.path) + 1 :])
            return skip_unpickling(of, path, key, stack)

        read_directory(save.path, LoadOptions(source=FilesToFetch(source), unpickle=list_pickle))
        return {*source.list_requests(), *pickles}
    except OSError:
        return set()
    finally:
        save.close()


class _StagedSource:
    """The files of a save in a temporary folder, mapped privately, as a source of loaders."""

    def __init__(self, path: str) -> None:
        save = SaveFolder(path)
        self.read, self.exists, self.is_folder = save.read, save.exists, save.is_folder

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """Map the tensor in a file."""
        nbytes = os.path.getsize(path)
        with files.closing(files.open_file(path)) as fd:
            return file_maps.map_bytes(fd, nbytes, path).view(dtype).view(shape)

    map_ragged_file = map
