"""The archive format: a zip file with the files of the directory format; saving, loading, packing and unpacking."""

from __future__ import annotations

import errno
import math
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io.formats import zipping
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.archive_writer import make_part, write_compressed_archive, write_plain_archive
from tensordict.io.formats.detect import refuse_other
from tensordict.io.formats.directory import FolderOptions, FolderPlan, build_meta, plan_files
from tensordict.io.formats.loading import LoadOptions, load_directory, read_directory
from tensordict.io.formats.meta import encode_meta, is_meta
from tensordict.io.formats.value_files import skip_unpickling, unpickle
from tensordict.io.formats.zipping import STORED, Entry, Part
from tensordict.io.saving import reopening
from tensordict.io.saving.commit import JOURNAL
from tensordict.io.saving.progress import NO_BAR, Progress, progress_bar
from tensordict.io.saving.transaction import FileTransaction, FolderTransaction, check_target
from tensordict.io.specification import LeafSpec, Specification
from tensordict.memory import files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import LEAF_SUFFIX, META, local_path

SUFFIX = ".tdz"

_METHODS = {name: method for method, name in zipping.METHODS.items()} | {"deflated": zipping.DEFLATE}
_LEVELS = {zipping.DEFLATE: (-1, 9), zipping.BZIP2: (1, 9), zipping.LZMA: (0, 9)}


@dataclass(slots=True)
class Compression:
    """The compression of the tensors in an archive."""

    method: int = STORED
    level: int | None = None

    @staticmethod
    def of(compression: str | int | None, level: int | None = None) -> Compression:
        """Parse the argument `compression=`: a name, or a constant of `zipfile`.

        Raises:
            UnsupportedEntryError: the method is unknown; a `ValueError`.
            ValueError: the method does not have this level.
        """
        if compression is None:
            method: int | None = STORED
        elif isinstance(compression, str):
            method = _METHODS.get(compression.lower())
        else:
            method = compression if type(compression) is int and compression in zipping.METHODS else None
        if method is None:
            raise UnsupportedEntryError(
                f"unknown compression {compression!r}; known are {sorted(_METHODS)} and {sorted(zipping.METHODS)}, "
                "the constants of zipfile"
            )
        if level is not None and method != STORED:
            low, high = _LEVELS[method]
            if not low <= level <= high:
                raise ValueError(f"compresslevel of {zipping.METHODS[method]} is {low} to {high}, got {level!r}")
        return Compression(method, level)


def wants_archive(prefix: PathLike | None, archive: bool | None, compression: str | int | None = None) -> bool:
    """Return True if a save goes into an archive. The suffix of the path decides if `archive` is `None`.

    Raises:
        ValueError: an archive is requested without a path, or compression without an archive.
    """
    wanted = archive if archive is not None else prefix is not None and os.fspath(prefix).endswith(SUFFIX)
    if wanted and prefix is None:
        raise ValueError("an archive needs a path: pass prefix='name.tdz'")
    if compression is not None and not wanted:
        raise ValueError("only archives are compressed: pass archive=True, or a prefix that ends with '.tdz'")
    return bool(wanted)


# --- saving -----------------------------------------------------------------------------------------------------------


def plan_archive(container: Contract, prefix: PathLike, options: FolderOptions) -> Callable[[], Any]:
    """Check a save, and return a function that runs it. The checks come before the first byte is written.

    Raises:
        SaveError: an entry cannot be saved, or the archive cannot be written to this path.
    """
    how = Compression.of(options.compression)
    if options.checksum not in ("", "crc32"):
        raise UnsupportedEntryError(
            f"an archive always has CRC-32 checksums, and cannot have {options.checksum!r}: pass checksum=False or "
            "'crc32'"
        )
    path = local_path(prefix)
    # `_save` checks under the lock whether the old file may be replaced, because that reads its whole index.
    check_target(path, options.existsok)
    plan = plan_files(container, path, replace(options, archive=True, share_values=False))
    parts = list(_plan_parts(plan, options.like))
    return partial(_save, container, parts, path, options, how)


def _plan_parts(plan: FolderPlan, like: bool) -> Iterator[Part]:
    """Yield all files of a plan, tensors last."""
    start = len(plan.root.folder) + 1
    for node in plan.nodes:
        meta = encode_meta(build_meta(node))
        yield make_part(f"{node.folder}/{META}"[start:], node.key, len(meta), meta, align=False)
        if node.value is not None and node.value.pickle_file:
            name, content = f"{node.folder}/{node.value.pickle_file}"[start:], node.value.pickled
            yield make_part(name, node.key, len(content), content, align=False)
    for leaf in plan.leaves:
        nbytes = leaf.tensor.numel() * leaf.tensor.element_size()
        yield make_part(leaf.file, leaf.key, nbytes, leaf.tensor, zero=like and not leaf.always)


def _save(container: Contract, parts: list[Part], path: str, options: FolderOptions, how: Compression) -> Any:
    """Write and load the new archive, and then replace the old one."""
    if (existing := _open_existing(container, path, options)) is not None:
        return existing
    # `memmap_like` has opened an old archive already.
    check = None if options.overwrite or options.like else _refuse_other
    with FileTransaction(path, options.existsok, options.durable, check, parents=True) as save:
        # Look again under the lock, because another process may have created it.
        if (existing := _open_existing(container, path, options)) is not None:
            return existing
        with save.new_file(path) as fd:
            # Writing to a tensor of an archive cannot report a full disk, so "auto" also reserves room now.
            reserve = options.preallocate is not False
            _write(fd, parts, how, options.num_threads, options.progress, reserve)
            saved = None if options.returns_nothing else _load_new(path, parts, options, fd)
        save.commit()
    return saved


def _load_new(path: str, parts: list[Part], options: FolderOptions, fd: int) -> Any:
    """Load the archive that was written to `fd`."""
    mode = "r+" if options.like else "r"
    with Archive(path, mode, options.num_threads, fd, _build_index(parts)) as source:
        return load_directory(path, LoadOptions(robust=options.robust, source=source, unpickle=unpickle))


def _open_existing(container: Contract, path: str, options: FolderOptions) -> Any:
    """Open an existing archive for `memmap_like`, which keeps its content; `None` without one."""
    if not options.like or options.overwrite or not os.path.lexists(path):
        return None
    loading = LoadOptions(robust=options.robust, mode="r+", num_threads=options.num_threads)
    if options.allow_pickle:
        loading.unpickle = unpickle
    return reopening.open_whole(container, path, partial(load_archive, path, loading))


def _refuse_other(path: str) -> None:
    refuse_other(path, "archive", _foreign_names)


def _foreign_names(path: str) -> Collection[str]:
    """Return the names in a zip file of another program; none for an archive of tensors."""
    archive = Archive(path)
    try:
        is_archive = META in archive.entries and is_meta(parse_json(archive.read(f"{archive.path}/{META}")))
    except ValueError:
        is_archive = False
    return () if is_archive else archive.entries


def _build_index(parts: Iterable[Part]) -> dict[str, Entry]:
    """Build the index that reading the archive would return, without the `record`s, which loading does not use."""
    found: dict[str, Entry] = {}
    for item in parts:
        name = item.name.decode()
        found[name] = Entry(name, item.method, item.crc, item.stored, item.size, item.start, item.header, 0)
    return found


def _write(
    fd: int, parts: list[Part], how: Compression, num_threads: int, shown: bool | None, reserve: bool = True
) -> None:
    with progress_bar(shown, "saving", sum(item.size for item in parts if not item.zero)) as progress:
        if how.method == STORED:
            write_plain_archive(fd, parts, num_threads, progress, reserve)
        else:
            write_compressed_archive(fd, parts, how.method, how.level, num_threads, progress)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_archive(prefix: PathLike, options: LoadOptions) -> Any:
    """Load an archive, or a part of it; see `load_directory`.

    Args:
        prefix: the archive.
        options: how to load; `source` is replaced.

    Raises:
        SaveError: the archive is broken, or the mode is "r+" and an entry is compressed or not aligned.
    """
    path = local_path(prefix)
    with Archive(path, options.mode or "r", options.num_threads) as source:
        check_top(source)
        return load_directory(prefix, replace(options, source=source))


def check_top(archive: Archive) -> None:
    """Raise an error for a zip file that is not a save."""
    if META not in archive.entries:
        raise SaveError(f"{archive.path!r} is a zip file but no archive of tensors: it has no {META!r} at its top")


class CompressedSource:
    """An archive as a source that does not decompress tensors, except ragged ones."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.read, self.exists, self.is_folder = archive.read, archive.exists, archive.is_folder
        self.map_ragged_file = archive.map_ragged_file

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Any:
        """Map a tensor; for a compressed one, return a `LeafSpec` that decompresses it on demand."""
        entry = self._archive.entries.get(path[len(self._archive.path) + 1 :])
        nbytes = math.prod(shape) * dtype.itemsize
        if entry is None or entry.method == STORED or entry.size < nbytes:
            return self._archive.map(path, dtype, shape, key)
        return LeafSpec(dtype, shape, nbytes, False, partial(self._archive.map, path, dtype, shape, key))


# --- archives as files ------------------------------------------------------------------------------------------------


def is_memmap_archive(path: PathLike) -> bool:
    """Check whether a file is an archive that :func:`load_memmap` can load: a sound zip file with a `meta.json`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, is_memmap_archive
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(a=torch.ones(2)).memmap(folder + "/x.tdz")
        ...     is_memmap_archive(folder + "/x.tdz"), is_memmap_archive(folder)
        (True, False)

    Args:
        path: the file. For a folder or a missing file the result is `False`.
    """
    absolute = local_path(path)
    if not os.path.isfile(absolute):
        return False
    try:
        return META in Archive(absolute).entries
    except OSError:
        return False


def pack_memmap(
    prefix: PathLike,
    archive_path: PathLike,
    *,
    compression: str | int | None = None,
    compresslevel: int | None = None,
    num_threads: int = 0,
    durable: bool = False,
    progress: bool | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Pack a saved folder into one archive.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, load_memmap, pack_memmap
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(a=torch.ones(2)).memmap(folder + "/x")
        ...     packed = pack_memmap(folder + "/x", folder + "/x.tdz")
        ...     td = load_memmap(packed)
        >>> td["a"]
        tensor([1., 1.])

    Args:
        prefix: the folder.
        archive_path: the archive, outside of the folder. An existing archive is replaced in one step; a link is
            followed.
        compression: `"stored"` (the default, which loading can map), `"deflate"`, `"bzip2"`, `"lzma"`, or the
            constant of `zipfile`.
        compresslevel: the level of the method; `None` for its default.
        num_threads: the number of threads that write or compress.
        durable: return only when the archive has reached the disk.
        progress: show a bar (needs tqdm); by default on terminals and in notebooks, after a second.
        overwrite: also replace a file that is not an archive.

    Returns:
        `archive_path`.

    Raises:
        ValueError: `prefix` is not a saved folder, or contains a link or `archive_path`; `archive_path` is a file of
            another kind; or the compression is unknown.
        OSError: a file cannot be read or written.
    """
    how = Compression.of(compression, compresslevel)
    folder, path = os.path.realpath(prefix), local_path(archive_path)
    if not os.path.isfile(f"{folder}/{META}"):
        raise SaveError(f"{os.fspath(prefix)!r} is no saved folder: it has no {META!r}")
    if f"{os.path.realpath(path)}/".startswith(f"{folder}/"):
        raise SaveError(f"the archive {path!r} would lie in the folder {folder!r} that it packs: write it elsewhere")
    parts = list(_list_parts(folder, ""))
    with FileTransaction(path, True, durable, None if overwrite else _refuse_other) as save:
        with save.new_file(path) as fd:
            _write(fd, parts, how, num_threads, progress)
        save.commit()
    return pathlib.Path(archive_path)


def _list_parts(folder: str, inner: str) -> Iterator[Part]:
    """Yield the files of a folder: `meta.json` first, files before folders."""
    with os.scandir(folder + inner) as scan:
        entries = sorted(scan, key=lambda entry: (entry.is_dir(), entry.name != META, entry.name))
    for entry in entries:
        path = f"{inner}/{entry.name}"
        if entry.name == JOURNAL or (entry.name.startswith("%tmp-") and not entry.name.endswith(LEAF_SUFFIX)):
            continue  # Leftovers of a killed save.
        if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
            raise SaveError(f"{folder + path!r} is a link or a device, which an archive cannot hold")
        if entry.is_dir():
            yield from _list_parts(folder, path)
        else:
            align = entry.name.endswith(LEAF_SUFFIX)
            yield make_part(path[1:], tuple(path[1:].split("/")), entry.stat().st_size, folder + path, align=align)


def unpack_memmap(
    archive_path: PathLike,
    prefix: PathLike,
    *,
    num_threads: int = 0,
    durable: bool = False,
    progress: bool | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Unpack an archive to a folder, and verify every checksum.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, load_memmap, unpack_memmap
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(a=torch.ones(2)).memmap(folder + "/x.tdz")
        ...     td = load_memmap(unpack_memmap(folder + "/x.tdz", folder + "/x"))
        >>> td["a"]
        MemoryMappedTensor([1., 1.])

    The folder has the files that `memmap` would write. An existing save in it is replaced in one step. Other files in
    it stay.

    Args:
        archive_path: the archive.
        prefix: the folder, created if it is missing.
        num_threads: the number of threads that unpack.
        durable: return only when the files have reached the disk.
        progress: show a bar (needs tqdm); by default on terminals and in notebooks, after a second.
        overwrite: also replace foreign files that have the name of a file in the archive.

    Returns:
        `prefix`.

    Raises:
        SaveError: such a foreign file exists; the archive is broken; or its checksums are old after writing with
            `mode="r+"`, see :func:`refresh_archive_checksums`.
        OSError: a file cannot be written, or the disk is too small.
    """
    archive = Archive(local_path(archive_path))
    check_top(archive)
    root = local_path(prefix)
    _check_space(archive, root)
    total = sum(entry.size for entry in archive.entries.values())
    transaction = FolderTransaction(root, list(archive.entries), durable, overwrite=overwrite)
    with transaction as save, progress_bar(progress, "unpacking", total) as shown:
        for folder in sorted(archive.folders()):
            save.make_folder(f"{root}/{folder}")
        content = [entry for entry in archive.entries.values() if entry.name != META and not entry.name.endswith("/")]
        jobs = [partial(_unpack_entry, archive, entry, f"{root}/{entry.name}", save, shown) for entry in content]
        files.run_all(jobs, num_threads)
        save.commit(archive.read(f"{archive.path}/{META}"))
    return pathlib.Path(prefix)


def _unpack_entry(archive: Archive, entry: Entry, path: str, save: FolderTransaction, shown: Progress) -> None:
    with save.new_file(path) as fd, files.naming("write the file", path):
        done = 0
        for piece in archive.pieces(entry):
            files.write_bytes(fd, piece, done)
            done += len(piece)
            shown.add(len(piece))


def _check_space(archive: Archive, root: str) -> None:
    """Raise an error if the disk is too small for the content of an archive."""
    folder = root
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free, total = shutil.disk_usage(folder).free, sum(entry.size for entry in archive.entries.values())
    if total > free:
        raise OSError(errno.ENOSPC, f"{archive.path!r} unpacks to {total} bytes, and the disk has {free} left", root)


def refresh_archive_checksums(archive_path: PathLike, *, num_threads: int = 0) -> pathlib.Path:
    """Update the checksums of an archive after writing to its tensors.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, load_memmap, refresh_archive_checksums
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = TensorDict(a=torch.zeros(2)).memmap_like(folder + "/x.tdz")
        ...     _ = data["a"].fill_(7)
        ...     _ = refresh_archive_checksums(folder + "/x.tdz")
        ...     td = load_memmap(folder + "/x.tdz")
        >>> td["a"]
        tensor([7., 7.])

    Writing to tensors that were loaded with `mode="r+"` does not update their checksums. Loading does not check them,
    but zip tools and :func:`unpack_memmap` do.

    Args:
        archive_path: the archive.
        num_threads: the number of threads that read.

    Returns:
        `archive_path`.

    Raises:
        SaveError: the archive is broken in another way.
    """
    archive = Archive(local_path(archive_path), "r+")
    stored = [entry for entry in archive.entries.values() if entry.method == STORED]
    with progress_bar(None, "checksums", sum(entry.size for entry in stored)) as shown:
        files.run_all([partial(_refresh, archive, entry, shown) for entry in stored], num_threads)
    return pathlib.Path(archive_path)


def _refresh(archive: Archive, entry: Entry, progress: Progress) -> None:
    crc = 0
    for piece in archive.stored_pieces(entry):
        crc = zlib.crc32(piece, crc)
        progress.add(len(piece))
    if crc != entry.crc:
        zipping.set_crc(archive.data, entry, crc)


# --- verifying --------------------------------------------------------------------------------------------------------


def find_archive_problems(
    path: PathLike, progress: Progress = NO_BAR
) -> tuple[list[tuple[str, str]], Specification | None]:
    """Check the structure of an archive, all checksums, and every `meta.json`, without loading it.

    Args:
        path: the archive.
        progress: counts the bytes that were checked.

    Returns:
        the problems, each with the name of its entry ("" for the archive itself), and the specification of the save.

    Raises:
        FileNotFoundError: the file is missing.
    """
    absolute = local_path(path)
    try:
        archive = Archive(absolute)
    except SaveError as error:
        return [("", str(error))], None
    problems: list[tuple[str, str]] = []
    for entry in archive.entries.values():
        try:
            for piece in archive.pieces(entry):
                progress.add(len(piece))
        except SaveError as error:
            problems.append((entry.name, str(error)))
    try:
        return problems, read_directory(path, LoadOptions(source=CompressedSource(archive), unpickle=skip_unpickling))
    except OSError as error:
        return [*problems, ("", str(error))], None
