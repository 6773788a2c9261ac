"""`tensordict.verify`, which checks the structure, the file sizes and the checksums of a save without loading it."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io.formats import consolidated, safetensors
from tensordict.io.formats.archive import find_archive_problems
from tensordict.io.formats.detect import detect_format
from tensordict.io.formats.loading import LoadOptions, read_directory
from tensordict.io.formats.meta import CHECKSUM, TABLE_CHECKSUM, special_entries
from tensordict.io.formats.opening import REGISTERED_FORMATS, describe_save, read_at
from tensordict.io.formats.structure import SIZES
from tensordict.io.formats.value_files import skip_unpickling
from tensordict.io.remote.credentials import as_url
from tensordict.io.remote.remote_saves import Access, CacheDir, RemoteSave
from tensordict.io.remote.urls import IN_FLIGHT, Remote, StorageOptions, is_url
from tensordict.io.saving import checksums
from tensordict.io.saving.checksums import RecordedChecksum
from tensordict.io.saving.progress import Progress, hide_bars, progress_bar
from tensordict.io.saving.source import SaveFolder
from tensordict.io.specification import LeafSpec, Specification, walk
from tensordict.io.stores.backends import BACKENDS, backend_of
from tensordict.io.stores.entries import specification_in
from tensordict.memory import files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name, local_path, without_scheme


@dataclass(slots=True)
class Report:
    """The result of :func:`verify`.

    Args:
        path: the path of the save.
        format: "directory", "archive", "consolidated", "h5", "zarr", "safetensors" or "dataset"; empty when unknown.
        leaves: the number of tensors.
        nbytes: the bytes of their elements.
        checksummed: the number of tensors that were compared with a recorded checksum.
        problems: one line for each problem; empty for a sound save.
    """

    path: str
    format: str = ""
    leaves: int = 0
    nbytes: int = 0
    checksummed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if the save has no problems."""
        return not self.problems


# A function that fills in a report. An error that it raises becomes one more problem.
Verifier = Callable[[Report, int, Progress, Access], None]


def verify(
    path: PathLike,
    *,
    raises: bool = True,
    num_threads: int = 0,
    progress: bool | None = None,
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> Report:
    """Check a save of any format without loading it. Nothing is unpickled, and its classes need not be importable.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, verify
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = TensorDict(a=torch.zeros(2)).memmap(folder, checksum=True)
        ...     sound = verify(folder)
        ...     _ = saved["a"].fill_(1)
        ...     changed = verify(folder, raises=False)
        >>> sound.ok, sound.leaves, sound.checksummed
        (True, 1, 1)
        >>> changed.problems
        ["entry 'a': its crc32 checksum is d5065190, and 6522df69 was recorded"]

    The structure, the names, shapes and dtypes, and the length of every file are checked. The content of files is read
    only if checksums were recorded by `checksum=` (HDF5 files cannot record them), and always in an archive. In a Zarr
    group that this package saved, every chunk must exist. Compressed chunks and shards are decoded, one at a time for
    each thread; of other chunks the length is checked.

    Args:
        path: a folder or a file, or its URL. A save at a URL is fetched, except uncompressed chunks of Zarr.
        raises: `False` returns a report with the problems instead.
        num_threads: the number of threads that read.
        progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
        storage_options, cache_dir: for a URL, as in :meth:`TensorDict.load_memmap`.

    Returns:
        A report: `format`, `leaves`, `nbytes`, `checksummed`, `problems` and `ok`.

    Raises:
        FileNotFoundError: `path` does not exist, also with `raises=False`.
        SaveError: the save has problems; lists all of them.
    """
    check = partial(_verify_local, num_threads=num_threads, progress=progress)
    if is_url(path):
        access = Access.of(storage_options, cache_dir)
        with hide_bars(progress):
            report = read_at(
                path,
                access,
                partial(_verify_remote, check),
                lambda format, registered: _fill_report(
                    Report(as_url(path), format), registered.verify, num_threads, progress, access
                ),
            )
    else:
        report = check(without_scheme(path))
    if raises and report.problems:
        raise SaveError(f"{report.path!r} is broken: " + "; ".join(report.problems))
    return report


def _verify_remote(check: Callable[[PathLike], Report], save: RemoteSave) -> Report:
    """Check a save at a URL: in place if its format allows that, else in a local copy."""
    if (remote := save.in_place) is not None:
        report = Report(save.url, save.format)
        return _fill_report(report, partial(_verify_store, where=remote), IN_FLIGHT, False)
    with tempfile.TemporaryDirectory(prefix="tensordict-verify-") as folder:
        path = save.mirror(folder)
        report = check(path)
    report.path = save.url
    report.problems = [problem.replace(path, save.url) for problem in report.problems]
    return report


def _verify_local(path: PathLike, num_threads: int, progress: bool | None) -> Report:
    local_path(path)
    report = Report(os.fspath(path))
    if not os.path.lexists(report.path):
        raise FileNotFoundError(2, "there is no save here", report.path)
    try:
        report.format = detect_format(path)
    except (OSError, ValueError) as error:
        report.problems.append(str(error))
        return report
    registered = REGISTERED_FORMATS.get(report.format)
    verifier = VERIFIERS.get(report.format, _verify_structure) if registered is None else registered.verify
    return _fill_report(report, verifier, num_threads, progress)


def _fill_report(
    report: Report, verifier: Verifier, num_threads: int, progress: bool | None, access: Access | None = None
) -> Report:
    try:
        with progress_bar(progress, "verifying", None) as shown:
            verifier(report, num_threads, shown, access or Access())
    except (OSError, ValueError) as error:
        # Other errors are not problems of the save, such as an ImportError.
        report.problems.append(str(error))
    return report


def _verify_structure(report: Report, num_threads: int, progress: Progress, access: Access) -> None:
    """Check a file of a format whose reader checks everything before it reads a tensor."""
    _count(report, describe_save(report.path)[1])


def _count(report: Report, root: Specification) -> None:
    for _, entry in walk(root):
        if isinstance(entry, LeafSpec):
            report.leaves += 1
            report.nbytes += entry.nbytes


def _verify_directory(report: Report, num_threads: int, progress: Progress, access: Access) -> None:
    source = _CheckingSource(report, progress)
    options = LoadOptions(unpickle=skip_unpickling, source=source)
    options.complain = lambda error: report.problems.append(str(error))
    read_directory(report.path, options)
    files.run_all(source.jobs, num_threads)
    report.problems.sort()


class _CheckingSource:
    """The folders of a save as a source that checks every file, and maps only the files of ragged tensors."""

    def __init__(self, report: Report, progress: Progress) -> None:
        self.report = report
        self.progress = progress
        # The functions that read the files with checksums.
        self.jobs: list[Callable[[], None]] = []
        # The descriptions of entries in each meta.json, by folder and name.
        self._specs: dict[str, dict[str, Any]] = {}
        self._save = SaveFolder(os.path.abspath(report.path))
        self.exists, self.is_folder = self._save.exists, self._save.is_folder

    def read(self, path: str) -> bytes:
        """Return the content of a small file."""
        content = self._save.read(path)
        folder, _, name = path.rpartition("/")
        if name == META:
            self._specs[folder] = _read_specs(content)
        return content

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """Check a file, record its problems, and return a tensor of this shape without content."""
        return self._check(path, dtype, shape, key, False)

    def map_ragged_file(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """Check a file of a ragged tensor, record its problems, and map it."""
        return self._check(path, dtype, shape, key, True)

    def _check(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path, nested: bool) -> Tensor:
        self._save.check(path, key)
        folder, _, file = path.rpartition("/")
        spec = self._specs.get(folder, {}).get(key[-1], {})
        table = nested and file.removesuffix(TABLE_SUFFIX) in (key[-1], file_name(key[-1], True))
        nbytes = math.prod(shape) * dtype.itemsize
        if not table:
            self.report.leaves += 1
            self.report.nbytes += nbytes
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if nested or 0 in shape or os.path.lexists(f"{folder}/{key[-1]}{LEAF_SUFFIX}"):
                # The loader tries another file name, or needs no file.
                self.report.leaves -= not table
                self.report.nbytes -= 0 if table else nbytes
                raise
            self._problem(key, f"its file, {path!r}, is missing")
            return torch.empty(shape, dtype=dtype, device="meta")
        wrong = ""
        if not stat.S_ISREG(status.st_mode):
            wrong = f"{path!r} is not a regular file"
        elif status.st_size != nbytes:
            wrong = f"{path!r} has {status.st_size} bytes, and {list(shape)} of {dtype} takes {nbytes}"
        elif (recorded := spec.get(TABLE_CHECKSUM if table else CHECKSUM)) is not None:
            self.jobs.append(partial(self._compare, path, recorded, key))
            self.report.checksummed += not table
        if nested:
            # The loader reads the sizes of the rows, which are part of the structure.
            if wrong:
                raise SaveError(_problem_of(key, wrong))
            return self._save.map(path, dtype, shape, key)
        if wrong:
            self._problem(key, wrong)
        return torch.empty(shape, dtype=dtype, device="meta")

    def _compare(self, path: str, recorded: object, key: Path) -> None:
        with files.naming("read the file", path, key):
            wrong = checksums.find_mismatch(path, recorded, self.progress.add)
        if wrong:
            self._problem(key, wrong)

    def _problem(self, key: Path, what: str) -> None:
        self.report.problems.append(_problem_of(key, what))


def _problem_of(key: Path, what: str) -> str:
    return f"entry {joined(key)!r}: {what}"


def _read_specs(content: bytes) -> dict[str, Any]:
    """Return the descriptions of entries in a meta.json, by name. Empty for a broken file, which its reader reports."""
    try:
        meta = parse_json(content)
    except ValueError:
        return {}
    if not isinstance(meta, dict):
        return {}
    return {name: spec for name, spec in (*meta.items(), *special_entries(meta)) if isinstance(spec, dict)}


def _verify_archive(report: Report, num_threads: int, progress: Progress, access: Access) -> None:
    problems, root = find_archive_problems(report.path, progress)
    report.problems += [f"{name}: {problem}" if name else problem for name, problem in problems]
    if root is not None:
        _count(report, root)
    report.checksummed = report.leaves


def _verify_store(
    report: Report, num_threads: int, progress: Progress, access: Access, where: Remote | None = None
) -> None:
    with contextlib.closing(backend_of(report.format).open(where or report.path, "r")) as store:
        _count(report, specification_in(store.root, lambda error: report.problems.append(str(error))))
        report.problems += store.find_damage(num_threads)


def _verify_checksums(
    read_checksums: Callable[[str], list[RecordedChecksum]],
    report: Report,
    num_threads: int,
    progress: Progress,
    access: Access,
) -> None:
    """Check a file that stores the checksums of its own tensors, if any."""
    _count(report, describe_save(report.path)[1])

    def compare(part: RecordedChecksum) -> None:
        wrong = checksums.find_mismatch(report.path, part.checksum, progress.add, part.start, part.nbytes)
        if wrong:
            report.problems.append(f"entry {part.entry!r}: {wrong}")

    found = read_checksums(report.path)
    names = {part.entry for part in found}
    tables = sum(part.entry.endswith(SIZES) and part.entry.removesuffix(SIZES) in names for part in found)
    report.checksummed = len(found) - tables
    files.run_all([partial(compare, part) for part in found], num_threads)
    report.problems.sort()


VERIFIERS: dict[str, Verifier] = {
    **dict.fromkeys(BACKENDS, _verify_store),
    "directory": _verify_directory,
    "archive": _verify_archive,
    "consolidated": partial(_verify_checksums, consolidated.read_checksums),
    "safetensors": partial(_verify_checksums, safetensors.read_checksums),
}
