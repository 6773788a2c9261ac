"""Data sets of more shards than stay open: packed lines and parts, and shards that are mapped without a container."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tensordict import DatasetWriter, TensorDict, open_dataset
from tensordict.containers import parts
from tensordict.datasets import compact, dataset, manifest
from tensordict.datasets.index import ShardPart, ShardParts
from tensordict.datasets.lines import Line, Lines
from tensordict.datasets.records import to_file
from tensordict.memory import row_files, system
from tensordict.memory.file_maps import FilePlace

DIGEST = "0123456789abcdef" * 4


def write(path: Path, format: str, count: int = 20) -> Any:
    rows = TensorDict({"x": torch.arange(count), "in": {"y": torch.arange(2.0 * count).view(count, 2)}}, [count])
    with DatasetWriter(path, rows_per_shard=2, format=format) as writer:
        writer.extend(rows)
    return rows


def read_twice(data: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open all shards, keep one container, and read each shard again, by maps."""
    monkeypatch.setattr(dataset, "_MAX_CONTAINERS", 2)
    at = torch.randperm(len(rows))
    assert (data[at] == rows[at]).all()
    assert len(data._shards._recent) == 1
    opened = []
    monkeypatch.setattr(type(data._shards), "_open", lambda self, part: opened.append(part))
    assert (data[at] == rows[at]).all() and (data[at] == rows[at]).all()
    assert not opened
    monkeypatch.undo()


@pytest.mark.parametrize("format", ["folder", "archive"])
def test_shards_are_mapped_again(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", format)
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    # No more stay mapped than may.
    keep_mapped(data, 3, monkeypatch)
    assert (data[torch.arange(20)] == rows).all() and len(data._joint._mapped) == 3


@pytest.mark.parametrize("format", ["folder", "archive"])
def test_rows_of_shards_that_are_not_mapped_are_read(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = torch.arange(40 * 2_000).view(40, 2_000)
    rows = write(tmp_path / "data", format, 40).set("in", {"y": torch.arange(80.0).view(40, 2), "long": long})
    with DatasetWriter(tmp_path / "long", rows_per_shard=5, format=format) as writer:
        writer.extend(rows)
    data = open_dataset(tmp_path / "long")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, 3, monkeypatch)
    monkeypatch.setattr(parts, "_MANY", 1_000)
    opened = count_descriptors()
    monkeypatch.setattr(type(data._shards), "_open", lambda self, part: pytest.fail("a shard was opened"))
    for at in (torch.randperm(40), torch.randint(-40, 40, (6, 7)), torch.randint(40, (1_000,)), torch.tensor([39])):
        assert (data[at] == rows[at]).all()
        assert (data[::2].select("in", ("in", "y"))[at % 20]["in", "y"] == rows["in", "y"][::2][at % 20]).all()
    assert len(data._joint._mapped) == 3 and count_descriptors() == opened


def test_a_shard_of_which_many_rows_are_read_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "folder")
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, 2, monkeypatch)
    assert (data[torch.arange(20)] == rows).all()
    first = data._joint._mapped[0]
    at = torch.arange(10, 14).repeat(2)
    assert (data[at] == rows[at]).all()
    assert len(data._joint._mapped) == 2 and data._joint._mapped[0] is not first and first.columns is None


def test_rows_are_read_when_no_map_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "archive")
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, 100, monkeypatch)

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("unable to mmap: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "from_file", fail)
    monkeypatch.setattr(type(data._shards), "_open", lambda self, part: pytest.fail("a shard was opened"))
    assert (data[torch.arange(20)] == rows).all()


def test_a_shard_that_was_cut_short_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "folder")
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, 0, monkeypatch)
    # The file is cut after it was opened and found to be the one that was checked.
    announce = system.announce_read

    def cut(fd: int, offset: int, size: int) -> None:
        announce(fd, offset, size)
        os.truncate(next((tmp_path / "data/shards").glob("*/00000003/x.memmap")), 8)

    monkeypatch.setattr(system, "announce_read", cut)
    with pytest.raises(OSError, match=r"00000003.*entry 'x'"):
        data[torch.arange(20)]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_errors_while_rows_are_read(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "archive")
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, 0, monkeypatch)
    opened, pread = count_descriptors(), system.pread

    def fail_once(fd: int, size: int, offset: int) -> bytes:
        monkeypatch.setattr(system, "pread", pread)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(system, "pread", fail_once)
    if code == errno.EIO:
        with pytest.raises(OSError, match=r"cannot read rows of.*/data/shards/.*tdz"):
            data[torch.arange(20)]
        assert count_descriptors() == opened
    # Network file systems have no content of a file that another machine removed: its rows are looked for again.
    assert (data[torch.arange(20)] == rows).all()


def test_a_file_that_is_replaced_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "archive")
    write(tmp_path / "other", "archive", 22)
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, 100, monkeypatch)
    other = next((tmp_path / "other/shards").glob("*/00000003*"))
    from_file = torch.from_file

    def replace_and_map(path: str, *arguments: Any, **options: Any) -> torch.Tensor:
        if "00000003" in path and other.exists():
            os.replace(other, path)
        return from_file(path, *arguments, **options)

    monkeypatch.setattr(torch, "from_file", replace_and_map)
    with pytest.raises(OSError, match=r"00000003.*another shard lies in its place"):
        data[torch.arange(20)]


def keep_mapped(data: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let go of all shards, and let so many be mapped again."""
    data._joint._start()
    data._shards._recent.clear()
    is_archive = data._shards.parts.path_of(0).endswith(".tdz")
    maps_per_shard = 1 if is_archive else len(data._shards.schema.fields)
    monkeypatch.setattr(data._shards, "max_maps", row_files.count_maps() + count * maps_per_shard)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("mapped", [0, 100])
@pytest.mark.parametrize("format", ["folder", "archive"])
def test_other_files_are_not_mapped_again(
    tmp_path: Path, format: str, mapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(tmp_path / "data", format)
    write(tmp_path / "other", format, 22)
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, mapped, monkeypatch)
    data._shards._recent.clear()
    # A save of another data set takes the place of a shard, with a file of the same length.
    shard = next((tmp_path / "data/shards").glob("*/00000003*"))
    other = next((tmp_path / "other/shards").glob("*/00000003*"))
    shutil.rmtree(shard) if shard.is_dir() else shard.unlink()
    os.rename(other, shard)
    with pytest.raises(OSError, match=r"00000003.*another shard lies in its place"):
        data[torch.arange(20)]
    assert (data[torch.arange(6)] == rows[:6]).all()


@pytest.mark.parametrize("mapped", [0, 100])
@pytest.mark.parametrize("format", ["folder", "archive"])
def test_mapped_shards_are_compacted(tmp_path: Path, format: str, mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", format)
    data = open_dataset(tmp_path / "data")
    read_twice(data, rows, monkeypatch)
    keep_mapped(data, mapped, monkeypatch)
    assert compact(tmp_path / "data", rows_per_shard=10) == (10, 2)
    assert (data[torch.arange(20)] == rows).all()


def test_writes_to_a_container_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "folder")
    data = open_dataset(tmp_path / "data", mode="r+")
    read_twice(data, rows, monkeypatch)
    data[4] = rows[0]
    assert data[torch.tensor([4, 5])]["x"].tolist() == [0, 5]
    assert open_dataset(tmp_path / "data")[torch.tensor([4, 5])]["x"].tolist() == [0, 5]


def run_with_few_files(script: str, *arguments: str) -> None:
    limit = 160
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert not done.returncode, done.stderr


def test_more_archives_than_files_may_be_open(tmp_path: Path) -> None:
    write(tmp_path / "data", "archive", 400)
    script = (
        "import sys, torch; from tensordict import open_dataset; data = open_dataset(sys.argv[1])\n"
        "for _ in range(2): assert data[torch.randperm(400)]['x'].sort().values.equal(torch.arange(400))\n"
    )
    run_with_few_files(script, str(tmp_path / "data"))


def test_archives_that_come_later_may_be_more_than_files(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from tensordict import DatasetWriter, TensorDict, open_dataset\n"
        "def add(format, count):\n"
        "    with DatasetWriter(sys.argv[1], rows_per_shard=1, format=format) as writer:\n"
        "        writer.extend(TensorDict({'x': torch.arange(count)}, [count]))\n"
        "add('folder', 9); data = open_dataset(sys.argv[1]); add('archive', 200)\n"
        "assert data.refresh() == 200 and sum(int(row['x']) for row in data) == 19936\n"
    )
    run_with_few_files(script, str(tmp_path / "data"))


def test_more_shards_at_a_url_than_files_may_be_open() -> None:
    script = (
        "import torch; from tensordict import DatasetWriter, TensorDict, open_dataset\n"
        "from tensordict.datasets import DatasetLoader\n"
        "with DatasetWriter('memory://few/data', rows_per_shard=1) as writer:\n"
        "    writer.extend(TensorDict({'x': torch.arange(300)}, [300]))\n"
        "data = open_dataset('memory://few/data')\n"
        "batches = list(DatasetLoader(data, 8, shuffle=4))\n"
        "assert torch.cat([batch['x'] for batch in batches]).sort().values.equal(torch.arange(300))\n"
    )
    run_with_few_files(script)


def test_maps_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "folder", 60)
    monkeypatch.setattr("tensordict.memory.system.count_maps_and_files", lambda: (40, 1024))
    monkeypatch.setattr(dataset, "_MAX_CONTAINERS", 2)
    data = open_dataset(tmp_path / "data")
    for _ in range(2):
        assert (data[torch.arange(60)] == rows).all()
        for row in range(60):
            assert (data[row] == rows[row]).all()
        maps = Path("/proc/self/maps").read_text()
        assert 20 <= maps.count(str(tmp_path)) <= 30


def test_data_sets_share_the_limit_of_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "data", "folder", 60)
    monkeypatch.setattr("tensordict.memory.system.count_maps_and_files", lambda: (40, 1024))
    monkeypatch.setattr(dataset, "_MAX_CONTAINERS", 2)
    both = [open_dataset(tmp_path / "data") for _ in range(2)]
    for data in [*both, *both, *both]:
        assert (data[torch.arange(60)] == rows).all()
        for row in range(60):
            assert (data[row] == rows[row]).all()
    assert 20 <= row_files.count_maps() <= 22
    del data, both
    gc.collect()
    assert row_files.count_maps() == 0


def test_threads_note_places(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowList(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            time.sleep(0.1)

    monkeypatch.setattr(dataset, "find_place", lambda leaf, maps: FilePlace(f"/{leaf}", 64 * leaf, (0, 0, 0, 0)))
    places = dataset._Places(2)
    places._known = SlowList()

    def note(number: int) -> bool:
        return places.note(number, f"/{number}", {("x",): number}, None)  # type: ignore[dict-item, arg-type]

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(note, range(2)))
    assert [places._known[number] for number in places._numbers] == [((("x",), "", 0),), ((("x",), "", 64),)]


def test_lines_are_added_while_others_read() -> None:
    lines = Lines("w")
    texts = [f'["{number:08}",1,null,"{DIGEST}"]'.encode() for number in range(30_000)]
    assert all(map(lines.add_text, texts[:20_000]))
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            lines.table()

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            assert all(map(lines.add_text, texts[20_000:]))
        finally:
            stop.set()
        assert not any(reader.result() for reader in readers)
    assert len(lines) == 30_000


def test_a_manifest_that_contradicts_itself_is_damaged() -> None:
    def pack(first: int, *numbers: int) -> bytes:
        head = [*manifest._MAGIC, "w", {"x": 1}, first]
        return to_file([head, *([f"{number:08}", 1, None, DIGEST] for number in numbers)])

    class Place:
        contents: ClassVar = {"a": pack(0, 0, 1), "b": pack(1, 5, 1)}

        def path(self, name: str) -> str:
            return f"/{name}"

        def read(self, name: str, start: int, size: int) -> tuple[bytes, int]:
            return self.contents[name][start:], size

    found = manifest.Manifest("w")
    listed = [
        manifest.ManifestFile(name, first, first + 2, len(Place.contents[name])) for first, name in ((0, "a"), (1, "b"))
    ]
    manifest.read_manifest(Place(), found, listed)  # type: ignore[arg-type]
    assert found.problem == "'/b' contradicts the files before it: the shard '00000001' is listed twice"
    assert [line.path for line in found.lines] == ["shards/w/00000000", "shards/w/00000001"]


def test_lines_are_packed() -> None:
    lines = Lines("w")
    merged = Line("shards/w/00000007.tdz", 3, 9, DIGEST, 1, (("v", 0, (1, 2)),))
    made = [
        Line("shards/w/00000000", 1, None, DIGEST),
        Line("shards/w/00000000.tdz", 2**40, 0, DIGEST),
        merged,
        Line("shards/w/00000003.zarr", 5, 2**50, DIGEST[::-1]),
    ]
    for line in made:
        lines.add(line)
    assert list(lines) == made == lines[:] and lines[-1] == made[-1] and lines.merged == {2: merged}
    assert lines.paths() == {line.path for line in made} and list(lines.first(3)) == made[:3]
    assert lines.has("shards/w/00000003.zarr") and not lines.has("shards/w/00000003")
    assert not lines.has("shards/v/00000000")
    for line in made:
        with pytest.raises(ValueError, match="listed twice"):
            lines.add(line)
    with pytest.raises(IndexError):
        lines[4]
    assert list(lines) == made and lines.merged == {2: merged}


def test_texts_of_lines_are_those_of_json() -> None:
    lines = Lines("w")
    usual = [f'["00000000.tdz",1,null,"{DIGEST}"]', f'["00000001",999999999999999,0,"{DIGEST}"]']
    assert all(lines.add_text(text.encode()) for text in usual) and len(lines) == 2
    assert lines[0] == Line("shards/w/00000000.tdz", 1, None, DIGEST)
    with pytest.raises(ValueError, match="listed twice"):
        lines.add_text(usual[1].encode())
    others = [
        '["00000002",0,0,"D"]', '["00000002",01,0,"D"]', '["00000002",1,0,"D",1,[]]', '["2",1,0,"D"]',
        '["00000002",1,0,"D"]\n', '["00000002", 1,0,"D"]', '["00000002",-1,0,"D"]', '["00000002",1,1.0,"D"]',
        '["00000002/",1,0,"D"]', '["00000002.T",1,0,"D"]', '["00000002",9999999999999999,0,"D"]',
    ]  # fmt: skip
    assert not any(lines.add_text(text.replace("D", DIGEST).encode()) for text in others) and len(lines) == 2


def test_parts_are_packed() -> None:
    lines = Lines("w")
    for number, suffix in enumerate(("", ".tdz", "")):
        lines.add(Line(f"shards/w/{number:08}{suffix}", number + 1, None, DIGEST))
    parts = ShardParts.of([ShardPart("shards/m/00000009.zarr", 2, 3, 10, "v", 4, 6)])
    parts.add_lines("w", lines, 1, 3)
    assert list(parts.list_rows()) == [3, 2, 3]
    assert parts[1:] == [
        ShardPart("shards/w/00000001.tdz", 0, 2, 2, "w", 1, 2), ShardPart("shards/w/00000002", 0, 3, 3, "w", 2, 3)
    ]  # fmt: skip
    parts[-1] = moved = ShardPart("shards/n/00000001", 5, 3, 9, "w", 2, 3)
    assert list(parts) == [ShardPart("shards/m/00000009.zarr", 2, 3, 10, "v", 4, 6), parts[1], moved]
