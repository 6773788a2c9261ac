"""Compressed entries of archives: all streams that `zipfile` writes are read, and `zipfile` reads all that are written.

A decompressor is fed and emptied in steps of `archive_reader._STEP` bytes. The tests set the step so that the end of
the compressed stream, or the end of its content, falls on each offset around a multiple of it.
"""

from __future__ import annotations

import pathlib
import random
import uuid
import zipfile
from typing import Any

import pytest
import torch

from tensordict import TensorDict, load, load_memmap, unpack_memmap, verify
from tensordict.core.exceptions import SaveError
from tensordict.io.formats import archive_reader
from tensordict.io.formats.archive_reader import Archive

METHODS = {"deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}
# zipfile has no levels of LZMA.
LEVELS = [("deflate", level) for level in range(-1, 10)] + [("bzip2", level) for level in range(1, 10)]
LEVELS += [("lzma", None)]
# The content of the example: its deflated stream ends 16 bytes behind the first MiB of output.
REGULAR = torch.arange(7, dtype=torch.uint8).repeat((1 << 20) // 7 + 3)[: (1 << 20) + 16].clone()


def contents() -> list[bytes]:
    """Streams without content, of few bytes, with long matches, without any, and mixed."""
    rng = random.Random(0)
    mixed = b"".join(rng.choice((rng.randbytes(rng.randint(1, 40)), bytes(rng.randint(1, 700)))) for _ in range(30))
    return [b"", b"x", bytes(5000), bytes(range(7)) * 600, rng.randbytes(800), mixed]


def steps_around(size: int) -> list[int]:
    """Steps that divide `size`, or nearly do."""
    parts = {size // count + near for count in (1, 2, 3, 5) for near in range(-2, 3)}
    return sorted(step for step in parts if 0 < step <= size + 2)


@pytest.mark.parametrize(("method", "level"), LEVELS)
def test_an_archive_reads_what_zipfile_writes(
    method: str, level: int | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "x.zip", contents()
    with zipfile.ZipFile(path, "w", METHODS[method], compresslevel=level) as file:
        for number, content in enumerate(written):
            file.writestr(str(number), content)
    archive = Archive(str(path))
    for number, content in enumerate(written):
        entry = archive.entries[str(number)]
        for step in {*steps_around(entry.stored), *steps_around(entry.size), 1 << 20}:
            monkeypatch.setattr(archive_reader, "_STEP", step)
            assert b"".join(archive.pieces(entry)) == content, f"entry {number} of {entry.stored} bytes, step {step}"


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_that_is_cut_off_or_followed_by_more_is_refused_at_each_step(
    method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", METHODS[method]) as file:
        file.writestr("x", contents()[-1])
    archive = Archive(str(path))
    entry = archive.entries["x"]
    for step in steps_around(entry.stored):
        monkeypatch.setattr(archive_reader, "_STEP", step)
        for stored, message in ((entry.stored - 1, "cut off|unpack to"), (entry.stored + 1, "more behind")):
            with pytest.raises(SaveError, match=message):
                list(archive.pieces(entry._replace(stored=stored)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("threads", [0, 2])
def test_zipfile_reads_what_an_archive_writes(method: str, threads: int, tmp_path: pathlib.Path) -> None:
    rng, entries = random.Random(1), {}
    for number in range(40):
        pattern = torch.frombuffer(bytearray(rng.randbytes(rng.randint(1, 50))), dtype=torch.uint8)
        entries[f"x{number}"] = pattern.repeat(rng.randint(1, 400))
    TensorDict({**entries, "regular": REGULAR}).memmap(tmp_path / "x.tdz", compression=method, num_threads=threads)
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        assert file.testzip() is None
        assert all(file.read(f"{name}.memmap") == entry.numpy().tobytes() for name, entry in entries.items())


@pytest.mark.parametrize("method", METHODS)
def test_each_reader_reads_streams_that_end_just_behind_a_step(method: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("fsspec")
    td, url = TensorDict(x=REGULAR), f"memory://{uuid.uuid4().hex}/x.tdz"
    path = tmp_path / "x.tdz"
    td.memmap(path, compression=method)
    td.save(url, compression=method)
    unpack_memmap(path, tmp_path / "folder")
    readers: list[Any] = [
        load_memmap(path),
        load_memmap(path, num_threads=2),
        load(url),
        load_memmap(tmp_path / "folder"),
    ]
    assert all(torch.equal(back["x"], REGULAR) for back in readers)
    assert verify(path).ok and verify(url).ok


@pytest.mark.seconds
def test_random_regular_tensors_come_back(tmp_path: pathlib.Path) -> None:
    rng = random.Random(2)
    for number in range(60):
        pattern = torch.frombuffer(bytearray(rng.randbytes(rng.randint(1, 300))), dtype=torch.uint8)
        size = (rng.randint(1, 3) << 20) + rng.randint(-300, 300)
        regular = pattern.repeat(size // len(pattern) + 1)[:size].clone()
        TensorDict(x=regular).memmap(tmp_path / "x.tdz", compression="deflate")
        assert torch.equal(load_memmap(tmp_path / "x.tdz")["x"], regular), f"tensor {number} of {size} bytes"
