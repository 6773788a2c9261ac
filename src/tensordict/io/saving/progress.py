"""Progress bars of what may take a while: shown where they are asked for, and where somebody watches."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from tensordict.core import extras

# `True` shows a bar at once, `False` none; `None` one where somebody watches, of what takes longer than `_PATIENCE`.
Wanted = bool | None
_PATIENCE = 1.0
# The bars that are at work, and the calls that want none. What is done for one of them has none of its own unless it is
# asked for.
_open: list[object] = []
# That of what is sent now.
_transfers: list[Progress] = []


class Progress:
    """A bar that any thread may move on, as a context.

    Args:
        doing: what stands before the bar.
        total: how much there is to do, or what tells when the bar is shown; `None` when nobody knows.
        unit: of what: bytes by default.
        patience: the seconds after which it is shown.

    Raises:
        ModuleNotFoundError: tqdm is not installed; says what to run.

    Example:
        >>> from tensordict.io.saving.progress import Progress
        >>> with Progress("saving", 100) as progress:
        ...     progress.add(60)
        ...     progress.add(40)
        >>> progress.done
        100
    """

    def __init__(
        self, doing: str, total: int | Callable[[], int | None] | None, unit: str = "B", patience: float = 0.0
    ) -> None:
        self._doing, self._total, self._unit = doing, total, unit
        self._lock = threading.Lock()
        self._bar: Any = None
        self._from = time.monotonic() + patience
        self.done = 0
        if not patience:
            self._show()

    def _show(self) -> None:
        total = self._total() if callable(self._total) else self._total
        scale: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if self._unit == "B" else {}
        # In terminals it writes to stderr, and in notebooks below the cell.
        with warnings.catch_warnings():
            # In a notebook without ipywidgets: the bar is a line of text then.
            warnings.filterwarnings("ignore", "IProgress not found")
            bar = extras.require("tqdm.auto", "progress").tqdm
        self._bar = bar(desc=self._doing, total=total, initial=self.done, unit=self._unit, **scale)

    def add(self, amount: int) -> None:
        """Say that so much more is done."""
        with self._lock:
            self.done += amount
            if self._bar is not None:
                self._bar.update(amount)
            elif time.monotonic() >= self._from:
                self._show()

    def __enter__(self) -> Progress:
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.remove(self)
        self.close()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def progress_bar(
    wanted: Wanted, doing: str, total: int | Callable[[], int | None] | None, unit: str = "B"
) -> contextlib.AbstractContextManager[Progress | None]:
    """A bar where it is wanted, else `None`, as a context; arguments as of `Progress`."""
    if wanted:
        return Progress(doing, total, unit)
    if wanted is None and not _open and _is_watched():
        return Progress(doing, total, unit, _PATIENCE)
    return quiet(wanted)


def quiet(wanted: Wanted) -> contextlib.AbstractContextManager[None]:
    """A block in which nothing has a bar, a transfer neither, when none is wanted (`False`)."""
    return _quiet() if wanted is False else contextlib.nullcontext()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    _open.append(_quiet)
    try:
        yield
    finally:
        _open.remove(_quiet)


class WatchedFile(io.BufferedWriter):
    """A binary file of which a bar shows how much has been written, for what writes all of something at once.

    Args:
        fd: the open file, which is not closed.
        progress: the bar, or `None`.
    """

    def __init__(self, fd: int, progress: Progress | None) -> None:
        super().__init__(io.FileIO(fd, "wb", closefd=False))
        self._progress = progress

    def write(self, content: Any) -> int:
        """Write bytes; gives how many."""
        written = super().write(content)
        if self._progress is not None:
            self._progress.add(written)
        return written


@contextlib.contextmanager
def transferring(doing: str, total: int) -> Iterator[Progress]:
    """The bar of bytes that come over a network, or go: one for all that is sent meanwhile, by whatever thread."""
    if _transfers:
        yield _transfers[-1]
        return
    with progress_bar(None, doing, total) as shown:
        _transfers.append(found := shown or Progress(doing, total, patience=math.inf))
        try:
            yield found
        finally:
            _transfers.remove(found)


def _is_watched() -> bool:
    """Whether somebody sees the bars of this process: in a terminal or a notebook, and not those of its workers."""
    if multiprocessing.parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    if sys.stderr is None or not (sys.stderr.isatty() or _in_notebook()):
        return False
    return importlib.util.find_spec("tqdm") is not None


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


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
