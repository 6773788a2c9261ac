"""Progress bars: which calls have one, where it is shown, and where it is not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tensordict import (
    DatasetWriter,
    TensorDict,
    diff,
    pack_memmap,
    refresh_archive_checksums,
    unpack_memmap,
    verify,
)
from tensordict.datasets import compact
from tensordict.io.saving import progress
from tensordict.io.saving.progress import Progress, progress_bar, show_transfer
from tensordict_cli.runners import main

pytest.importorskip("tqdm")


def make() -> TensorDict:
    return TensorDict(x=torch.arange(20.0).view(10, 2), y=torch.zeros(10, dtype=torch.int64), batch_size=[10])


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts of the bars, as if somebody watched for long."""
    shown: list[str] = []
    real = Progress._show

    def show(self: Progress) -> None:
        shown.append(self._doing)
        real(self)

    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "has_viewer", lambda: not _preparing)
    monkeypatch.setattr(Progress, "_show", show)
    return shown


# Return whether the callable exists only for a test.
_preparing: list[bool] = []


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    _preparing.append(True)
    yield
    _preparing.clear()


def dataset(path: pathlib.Path) -> pathlib.Path:
    with preparing(), DatasetWriter(path / "rows", rows_per_shard=2) as writer:
        writer.extend(make())
    return path / "rows"


def saved(path: pathlib.Path, suffix: str = "", **options: Any) -> pathlib.Path:
    make().save(path / f"saved{suffix}", progress=False, **options)
    return path / f"saved{suffix}"


def table(path: pathlib.Path, kind: str) -> pathlib.Path:
    with preparing():
        getattr(make().select("y"), f"to_{kind}")(path / f"table.{kind}")
    return path / f"table.{kind}"


# Everything that reads or writes all of something, or calls a function for every part of it, and what its bar says.
CALLS: dict[str, tuple[Callable[[pathlib.Path], object], list[str]]] = {
    "save": (lambda path: make().save(path / "x"), ["saving"]),
    "save, archive": (lambda path: make().save(path / "x.tdz"), ["saving"]),
    "save, compressed": (lambda path: make().save(path / "x.tdz", compression="deflate"), ["saving"]),
    "memmap": (lambda path: make().memmap(path / "x"), ["saving"]),
    "memmap_": (lambda path: make().memmap_(path / "x"), ["saving"]),
    "consolidate": (lambda path: make().consolidate(path / "x"), ["saving"]),
    "to_safetensors": (lambda path: make().to_safetensors(path / "x"), ["saving"]),
    "to_h5": (lambda path: make().to_h5(path / "x.h5").close(), ["saving"]),
    "to_zarr": (lambda path: make().to_zarr(path / "x.zarr").close(), ["saving"]),
    "load": (lambda path: TensorDict.load(saved(path)), ["loading"]),
    "load, archive": (lambda path: TensorDict.load(saved(path, ".tdz")), ["loading"]),
    "load_memmap": (lambda path: TensorDict.load_memmap(saved(path)), ["loading"]),
    "pack_memmap": (lambda path: pack_memmap(saved(path), path / "x.tdz"), ["saving"]),
    "unpack_memmap": (lambda path: unpack_memmap(saved(path, ".tdz"), path / "x"), ["unpacking"]),
    "refresh_archive_checksums": (lambda path: refresh_archive_checksums(saved(path, ".tdz")), ["checksums"]),
    "verify": (lambda path: verify(saved(path, checksum=True)), ["verifying"]),
    "diff": (lambda path: diff(saved(path), saved(path, ".tdz")), ["comparing"]),
    # The first shard is opened for what its rows are.
    "compact": (lambda path: compact(dataset(path)), ["compacting"]),
    "from_csv": (lambda path: TensorDict.from_csv(table(path, "csv")), ["reading"]),
    "from_json": (lambda path: TensorDict.from_json(table(path, "json")), ["reading"]),
    "from_parquet": (lambda path: TensorDict.from_parquet(table(path, "parquet")), ["reading"]),
    "to_csv": (lambda path: make().select("y").to_csv(path / "x.csv"), ["writing"]),
    "to_json": (lambda path: make().to_json(path / "x.json"), ["writing"]),
    "to_parquet": (lambda path: make().to_parquet(path / "x.parquet"), ["writing"]),
    "map": (lambda path: make().map(_same, chunksize=5, num_workers=1, mp_start_method="fork"), ["map"]),
    "inspect --stats": (lambda path: main(["inspect", str(saved(path)), "--stats"]), ["reading"]),
}


def _same(td: TensorDict) -> TensorDict:
    return td


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_a_bar(
    name: str, tmp_path: pathlib.Path, bars: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "parquet" in name or "csv" in name or "json" in name:
        pytest.importorskip("pyarrow")
    call, expected = CALLS[name]
    call(tmp_path)
    assert bars == expected
    errors = capsys.readouterr().err
    assert all(f"{said}: " in errors for said in expected)


def test_transfers_have_one_bar(bars: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    make().save("memory://progress/x")
    # The local copy; then one for all tensors, and one for the description that completes the save.
    assert bars == ["saving", "uploading", "uploading"]
    bars.clear()
    loaded = TensorDict.load("memory://progress/x")
    # It fetches only a part of that.
    assert bars == ["loading"] and bool((loaded == make()).all())


def dataset_at(url: str) -> str:
    with preparing(), DatasetWriter(url, rows_per_shard=2) as writer:
        writer.extend(make())
    return url


# Calls that take `progress`, at URLs, and what is made for them before.
REMOTE: dict[str, tuple[Callable[..., object], Callable[[str], object] | None]] = {
    "save": (lambda url, **options: make().save(url, **options), None),
    "save, archive": (lambda url, **options: make().save(f"{url}.tdz", **options), None),
    "save, in a thread": (lambda url, **options: make().memmap(url, return_early=True, **options).result(), None),
    "consolidate": (lambda url, **options: make().consolidate(f"{url}.td", **options), None),
    "to_safetensors": (lambda url, **options: make().to_safetensors(url, **options), None),
    "to_h5": (lambda url, **options: make().to_h5(url, **options).close(), None),
    "to_zarr": (lambda url, **options: make().to_zarr(url, **options), None),
    "load": (TensorDict.load, lambda url: make().save(url)),
    "load_memmap": (TensorDict.load_memmap, lambda url: make().save(url)),
    "load, consolidated": (TensorDict.load, lambda url: make().consolidate(url)),
    "from_safetensors": (TensorDict.from_safetensors, lambda url: make().to_safetensors(url)),
    "verify": (verify, lambda url: make().save(url, checksum=True)),
    "diff": (lambda url, **options: diff(url, url, **options), lambda url: make().save(url)),
    "compact": (compact, dataset_at),
}


@pytest.mark.parametrize("name", REMOTE)
def test_progress_false_silences_transfers(
    name: str, tmp_path: pathlib.Path, bars: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zarr" if "zarr" in name else "h5py" if "h5" in name else "fsspec")
    call, before = REMOTE[name]
    urls = [f"memory://silent/{tmp_path.name}/{number}" for number in range(2)]
    if before is not None:
        with preparing():
            for url in urls:
                before(url)
    call(urls[0], progress=False)
    assert bars == [] and not progress._open and capsys.readouterr().err == ""
    call(urls[1])
    assert bars


def test_progress_false_ends_with_the_call(bars: list[str]) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(FileNotFoundError):
        TensorDict.load("memory://silent/nothing", progress=False)
    with progress.hide_bars(False), progress_bar(None, "inner", 1) as inner, show_transfer("fetching", 1):
        assert not inner.is_shown
    with progress.hide_bars(None), progress_bar(None, "saving", 1):
        pass
    assert not progress._open and "fetching" not in bars


def test_only_where_somebody_watches(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    make().save(tmp_path / "piped")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    make().save(tmp_path / "watched")
    assert "saving: 100%" in capsys.readouterr().err
    make().save(tmp_path / "unwanted", progress=False)
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        make().save(tmp_path / "second rank")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        make().save(tmp_path / "no tqdm")
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.parent_process", lambda: object())
        make().save(tmp_path / "worker")
    assert capsys.readouterr().err == ""
    with monkeypatch.context() as patch:
        # As `get_ipython` of a kernel of Jupyter.
        patch.setattr(sys.stderr, "isatty", lambda: False)
        shell = type("Shell", (), {"config": {"IPKernelApp": {}}})()
        patch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(lambda: shell)})())
        assert progress.has_viewer()


def test_what_is_quick_shows_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "has_viewer", lambda: True)
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with progress_bar(None, "saving", lambda: 10) as bar:
        assert bar.is_shown
        bar.add(4)
        assert capsys.readouterr().err == ""
        now[0] += 1.5
        bar.add(3)
        assert "saving:  70%" in capsys.readouterr().err
        with progress_bar(None, "inner", 1) as inner:
            assert not inner.is_shown
        with progress_bar(True, "inner", 1) as inner:
            assert inner.is_shown
    assert bar.done == 7 and not progress._open


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensordict\[progress\]'"):
        make().save(tmp_path / "x", progress=True)
    with show_transfer("fetching", 3) as shown:
        shown.add(3)
    assert shown.done == 3 and not progress._transfers


def test_on_a_real_terminal(tmp_path: pathlib.Path) -> None:
    """A slow save shows a bar there, and none when its errors go to a file."""
    program = textwrap.dedent(f"""
        import torch, tensordict
        from tensordict import TensorDict
        from tensordict.io.saving import progress
        progress._PATIENCE = 0.0  # a slow disk
        TensorDict(a=torch.ones(1 << 20)).save({str(tmp_path / "x")!r}, overwrite=True)
    """)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with subprocess.Popen([sys.executable, "-c", program], stderr=theirs) as process:
        os.close(theirs)
        output = b""
        try:
            while part := os.read(ours, 65536):
                output += part
        except OSError:
            pass  # Linux reports with this error that the other end of a terminal is closed.
    os.close(ours)
    assert process.returncode == 0 and b"saving: 100%" in output
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert piped.stderr == b""
