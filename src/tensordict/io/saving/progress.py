"""Progress bars for saving, loading, verifying and transfers, shown on request and on terminals and in notebooks."""

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

# The argument `progress=`: `True` shows a bar at once, and `False` shows none. `None` shows one on a terminal or in a
# notebook, once the operation has taken longer than `_PATIENCE` seconds.
ShowBar = bool | None
_PATIENCE = 1.0
# The active bars, and the active calls with `progress=False`. Nested operations show no bar unless requested.
_open: list[object] = []
# The bar of the current transfer over the network.
_transfers: list[Progress] = []


class Progress:
    """A progress bar as a context. Any thread may advance it.

    Args:
        doing: the text before the bar.
        total: the total amount, or a function that returns it when the bar is shown; `None` if it is unknown.
        unit: the unit of the amounts, bytes by default.
        patience: the seconds after which the bar is shown.

    Raises:
        ModuleNotFoundError: tqdm is not installed; names the command that installs it.

    Example:
        >>> from tensordict.io.saving.progress import Progress
        >>> with Progress("saving", 100) as progress:
        ...     progress.add(60)
        ...     progress.add(40)
        >>> progress.done
        100
    """

    is_shown = True

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
        # `tqdm.auto` writes to stderr in terminals, and below the cell in notebooks.
        with warnings.catch_warnings():
            # In a notebook without ipywidgets tqdm warns, and shows the bar as text.
            warnings.filterwarnings("ignore", "IProgress not found")
            bar = extras.require("tqdm.auto", "progress").tqdm
        self._bar = bar(desc=self._doing, total=total, initial=self.done, unit=self._unit, **scale)

    def add(self, amount: int) -> None:
        """Advance the bar by an amount."""
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
        """Stop updating the bar; it stays visible."""
        if self._bar is not None:
            self._bar.close()


class _NoBar(Progress):
    """Stands for a bar that is not shown. As a context, it hides all nested bars."""

    is_shown = False

    def __init__(self) -> None:
        self._bar = None

    def add(self, amount: int) -> None:
        """Do nothing."""


NO_BAR: Progress = _NoBar()
# Hides no nested bars.
_NO_CHANGE = contextlib.nullcontext(NO_BAR)


def progress_bar(
    show: ShowBar, doing: str, total: int | Callable[[], int | None] | None, unit: str = "B"
) -> contextlib.AbstractContextManager[Progress]:
    """Return a context that gives a bar, `NO_BAR` if none is shown; further arguments as in `Progress`."""
    if show:
        return Progress(doing, total, unit)
    if show is None and not _open and has_viewer():
        return Progress(doing, total, unit, _PATIENCE)
    return _NO_CHANGE if show is None else NO_BAR


def hide_bars(show: ShowBar) -> contextlib.AbstractContextManager[Progress]:
    """Return a context that hides all nested bars, including bars of transfers, if `show` is `False`."""
    return NO_BAR if show is False else _NO_CHANGE


class WatchedFile(io.BufferedWriter):
    """A binary file that advances a bar, for libraries that write a whole file in one call.

    Args:
        fd: the descriptor of the file, which stays open.
        progress: the bar.
    """

    def __init__(self, fd: int, progress: Progress) -> None:
        super().__init__(io.FileIO(fd, "wb", closefd=False))
        self._progress = progress

    def write(self, content: Any) -> int:
        """Write bytes, and return their number."""
        written = super().write(content)
        self._progress.add(written)
        return written


@contextlib.contextmanager
def show_transfer(doing: str, total: int) -> Iterator[Progress]:
    """Show a bar for a transfer over the network. Nested transfers, in any thread, advance the same bar."""
    if _transfers:
        yield _transfers[-1]
        return
    with progress_bar(None, doing, total) as shown:
        # The bar of a nested transfer counts the bytes even if it is not shown.
        _transfers.append(bar := shown if shown.is_shown else Progress(doing, total, patience=math.inf))
        try:
            yield bar
        finally:
            _transfers.remove(bar)


def has_viewer() -> bool:
    """Return True in the main process of a program on a terminal or in a notebook, and False in workers."""
    if multiprocessing.parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    in_notebook = shell is not None and "IPKernelApp" in shell.config
    if sys.stderr is None or not (sys.stderr.isatty() or in_notebook):
        return False
    return importlib.util.find_spec("tqdm") is not None


def count_bytes(path: str | os.PathLike[str]) -> int:
    """Return the summed length of the files of a save."""
    if not os.path.isdir(path):
        return os.stat(path).st_size
    return sum(status.st_size for status in _stat_files(path))


def count_disk_usage(path: str | os.PathLike[str]) -> int:
    """Return the summed size of the disk blocks of a save, or of its files where the system does not count blocks."""
    statuses = _stat_files(path) if os.path.isdir(path) else [os.stat(path)]
    return sum(status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size for status in statuses)


def _stat_files(folder: str | os.PathLike[str]) -> Iterator[os.stat_result]:
    """Yield the status of every file in a folder and the folders below it."""
    for inner, _, names in os.walk(folder):
        for name in names:
            yield os.lstat(os.path.join(inner, name))
