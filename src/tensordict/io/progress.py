"""A progress bar for long saves and loads, in bytes and bytes per second."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tensordict.core import extras


class Progress:
    """A bar that any thread may move on, as a context.

    Args:
        doing: what stands before the bar.
        total: how many bytes there are; `None` when nobody knows.

    Raises:
        ModuleNotFoundError: tqdm is not installed; says what to run.

    Example:
        >>> from tensordict.io.progress import Progress
        >>> with Progress("saving", 100) as progress:
        ...     progress.add(60)
        ...     progress.add(40)
        >>> progress.done
        100
    """

    def __init__(self, doing: str, total: int | None) -> None:
        # tqdm writes to stderr.
        self._bar: Any = extras.require("tqdm", "progress").tqdm(
            desc=doing, total=total, unit="B", unit_scale=True, unit_divisor=1024
        )
        self._lock = threading.Lock()
        self.done = 0

    def add(self, nbytes: int) -> None:
        """Say that so many more bytes are through."""
        with self._lock:
            self.done += nbytes
            self._bar.update(nbytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def progress_bar(wanted: bool, doing: str, total: int | None) -> contextlib.AbstractContextManager[Progress | None]:
    """A bar where it is wanted, else `None`, as a context."""
    return Progress(doing, total) if wanted else contextlib.nullcontext()


def bytes_on_disk(path: str | os.PathLike[str]) -> int:
    """The summed length of the files of a save."""
    if not os.path.isdir(path):
        return os.stat(path).st_size
    return sum(status.st_size for status in _statuses(path))


def bytes_allocated(path: str | os.PathLike[str]) -> int:
    """What the files of a save take on the disk, which counts in blocks; their lengths where it does not say."""
    statuses = _statuses(path) if os.path.isdir(path) else [os.stat(path)]
    return sum(status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size for status in statuses)


def _statuses(folder: str | os.PathLike[str]) -> Iterator[os.stat_result]:
    for inner, _, names in os.walk(folder):
        for name in names:
            yield os.lstat(os.path.join(inner, name))
