"""Faults of data sets: killed writers, full disks, damaged or missing shards and manifests."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from tensordict import DatasetWriter, TensorDict, load, open_dataset, verify
from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.datasets import compact, folders, tidy
from tensordict.memory import system

KILLING = pathlib.Path(__file__).with_name("killing_writers.py")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(KILLING), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def written(folder: pathlib.Path, count: int = 6, format: str = "folder") -> list[pathlib.Path]:
    with DatasetWriter(folder, rows_per_shard=2, format=format) as writer:
        writer.extend(TensorDict({"x": torch.arange(count), "y": torch.zeros(count, 3)}, [count]))
    return sorted((folder / "shards").glob("*/*"))


def test_writers_killed_at_random_moments(tmp_path: pathlib.Path) -> None:
    assert "rows" in run("random", str(tmp_path), "6", "1")


@pytest.mark.slow
def test_writers_killed_at_random_moments_200_times(tmp_path: pathlib.Path) -> None:
    assert "rows" in run("random", str(tmp_path), "200", "2")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["folder", "archive"])
def test_killed_at_every_change(tmp_path: pathlib.Path, format: str) -> None:
    assert "compaction" in run("steps", str(tmp_path), format)


def test_files_may_not_grow(tmp_path: pathlib.Path) -> None:
    """A limit on the size of files, in a process of its own; then there is none again."""
    program = f"""
import resource, signal, torch
from tensordict import DatasetWriter, TensorDict, open_dataset
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rows = lambda first: TensorDict({{"x": torch.arange(first, first + 8), "y": torch.ones(8, 4096)}}, [8])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for format in ("folder", "archive"):
    path = {str(tmp_path / "data")!r} + format
    writer = DatasetWriter(path, rows_per_shard=8, format=format)
    writer.extend(rows(0))
    writer.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, hard))
    try:
        writer.extend(rows(8))
        writer.flush()
    except OSError as error:
        assert "'y'" in str(error) or "shards" in str(error), error
        assert error.errno, error
    else:
        raise AssertionError("wrote more than the limit")
    assert len(open_dataset(path)) == 8
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if writer.rows == 8:
        writer.extend(rows(8))
    writer.close()
    data = open_dataset(path)
    assert data["x"].tolist() == list(range(16)) and bool((data["y"] == 1).all())
print("done")
"""
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.stdout == "done\n", result.stderr


def test_really_full_disk(tmp_path: pathlib.Path) -> None:
    """A small tmpfs, in a namespace of its own, which goes with the process."""
    alone = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace for mounts can be made here (unshare --map-root-user --mount)")
    program = pathlib.Path(__file__).with_name("full_disk.py")
    done = subprocess.run(
        [*alone, sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stdout == "folder archive zarr done\n", done.stderr[-3000:]
    assert list(tmp_path.iterdir()) == []


def test_full_disk_when_the_manifest_grows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = DatasetWriter(tmp_path, rows_per_shard=2)
    writer.extend(TensorDict(x=torch.arange(2), batch_size=[2]))
    writer.flush()
    writer.extend(TensorDict(x=torch.arange(2, 4), batch_size=[2]))
    real = os.write

    def refused(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    for takes_back in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda fd, content: real(fd, content[: len(content) // 2]))
            if not takes_back:
                patched.setattr(os, "ftruncate", refused)
            with pytest.raises(OSError, match=r"No space left.*jsonl"):
                writer.flush()
    with pytest.warns(UserWarning, match="cut off"):
        assert open_dataset(tmp_path)["x"].tolist() == [0, 1]
    writer.extend(TensorDict(x=torch.arange(4, 6), batch_size=[2]))
    writer.close()
    assert open_dataset(tmp_path)["x"].tolist() == list(range(6))


@pytest.mark.parametrize("format", ["folder", "archive", "zarr"])
def test_shards_that_are_gone_or_damaged(tmp_path: pathlib.Path, format: str) -> None:
    shards = written(tmp_path, 8, format)
    if format == "zarr":
        shutil.rmtree(shards[1])
        (shards[2] / "x" / "zarr.json").write_text("{")
    elif format == "folder":
        shutil.rmtree(shards[1])
        os.truncate(shards[2] / "x.memmap", 3)
    else:
        shards[1].unlink()
        os.truncate(shards[2], 50)
    data = open_dataset(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{shards[1].name}.*"):
        data[2]
    with pytest.raises(SaveError, match=f"{shards[2].name}.*"):
        data[[0, 4]]
    assert data[[0, 7, 1]]["x"].tolist() == [0, 7, 1]
    report = verify(tmp_path, raises=False)
    assert [f"{shard.name}'" in problem for shard, problem in zip(shards[1:3], report.problems)] == [True, True]
    assert len(report.problems) == 2
    # A shard that another save replaced does not belong to this data set.
    TensorDict(x=torch.zeros(2), batch_size=[2]).memmap(shards[3], archive=format == "archive", overwrite=True)
    with pytest.raises(SaveError, match=shards[3].name):
        open_dataset(tmp_path)[6]
    problems = verify(tmp_path, raises=False).problems
    assert len(problems) == 3 and ("no label" in problems[2] or "description" in problems[2])


def test_manifests_that_are_damaged(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    with DatasetWriter(tmp_path) as other:
        other.append(TensorDict(x=torch.tensor(9), y=torch.zeros(3)))
    manifest = sorted((tmp_path / "writers").iterdir())[0]
    content = manifest.read_bytes()
    damaged = [
        (content[:-5], [0, 1, 2, 3, 9], "line 4.*cut off"),
        (content[:10], [9], "line 1.*cut off"),
        (content.replace(b'00000001",2', b'00000001",3'), [0, 1, 9], "line 3.*checksum"),
        (content.split(b"\n")[0] + b"\n" + b"\n".join(content.split(b"\n")[2:]), [9], "line 2.*checksum"),
        (b"\0" * len(content), [9], "line 1"),
    ]
    for broken, numbers, what in damaged:
        manifest.write_bytes(broken)
        with pytest.warns(UserWarning, match=f"{manifest.name}.*{what}"):
            data = open_dataset(tmp_path)
        assert data["x"].tolist() == numbers and len(data.problems) == 1
        with pytest.raises(SaveError, match=what):
            verify(tmp_path)
        # The lost lines may have listed the shards that no line lists.
        swept = tidy(tmp_path, older_than=0)
        assert swept.removed == [] and all("damaged or missing" in reason for reason in swept.left.values())
    manifest.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_dataset(tmp_path)) == 7


def test_hostile_manifests(tmp_path: pathlib.Path) -> None:
    import zlib

    written(tmp_path)
    manifest = next((tmp_path / "writers").iterdir())
    head, *_ = manifest.read_bytes().splitlines(keepends=True)
    crc = int(head[:8], 16)
    digest = b"0" * 64
    wrong = [
        b'["../../x",2,0,"%s"]' % digest,
        b'["00000000",-1,0,"%s"]' % digest,
        b'["00000000",1e9,0,"%s"]' % digest,
        b'["00000000",true,0,"%s"]' % digest,
        b'["00000000",2,-1,"%s"]' % digest,
        b'["00000000",2,0,"none"]',
        b'["00000000",2,0,"%s",1,[["a",0,[1]]]]' % digest,
        b'["00000000",2,0,"%s",1,[["a",0,[1]],["a",0,[1]]]]' % digest,
        b'["00000000",2,0,"%s",1,[["a",0,9]]]' % digest,
        b"{}",
        b"[" * 5000,
    ]
    for line in wrong:
        manifest.write_bytes(head + b"%08x %s\n" % (zlib.crc32(line, crc), line))
        with pytest.warns(UserWarning, match="line 2"):
            assert len(open_dataset(tmp_path)) == 0


def test_a_writer_that_is_never_closed(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    writer = DatasetWriter(tmp_path)
    writer.append(TensorDict(x=torch.tensor(9), y=torch.zeros(3)))
    if not (child := os.fork()):
        # The child does not change the files of its parent.
        del writer
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list((tmp_path / "shards" / writer.writer).iterdir())) > 0
    with pytest.warns(RuntimeWarning, match="not closed, and 1 rows are lost"):
        del writer
    assert len(open_dataset(tmp_path)) == 6 and verify(tmp_path).ok
    program = (
        "import sys, torch\nfrom tensordict import DatasetWriter, TensorDict\nwriter = DatasetWriter(sys.argv[1])\n"
        "writer.append(TensorDict(x=torch.tensor(9), y=torch.zeros(3)))"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert "1 rows are lost" in result.stderr and "ignored" not in result.stderr


@pytest.mark.parametrize("format", ["folder", "archive"])
def test_a_writer_is_that_of_one_process(tmp_path: pathlib.Path, format: str) -> None:
    written(tmp_path)
    writer = DatasetWriter(tmp_path, format=format)
    row = TensorDict(x=torch.tensor(9), y=torch.zeros(3))
    writer.append(row)
    if not (child := os.fork()):
        refused = 0
        for call in (lambda: writer.append(row), writer.flush):
            try:
                call()
            except ValueError as error:
                refused += f"belongs to the process {os.getppid()}" in str(error)
        writer.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    writer.append(row)
    writer.close()
    assert open_dataset(tmp_path)["x"].tolist()[-2:] == [9, 9]
    assert len(open_dataset(tmp_path)) == 8 and verify(tmp_path).ok


def test_what_killed_writers_leave(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    writer = DatasetWriter(tmp_path)
    writer.append(TensorDict(x=torch.tensor(9), y=torch.zeros(3)))
    under_way = next((tmp_path / "shards" / writer.writer).iterdir())
    # A writer at work keeps its files, however old they are.
    os.utime(under_way, (0, 0))
    assert tidy(tmp_path, older_than=0) == ([], {str(under_way): "its writer is at work"}) and under_way.exists()
    writer.close()
    program = f"""
import os, signal, torch
from tensordict import DatasetWriter, TensorDict
writer = DatasetWriter({str(tmp_path)!r})
writer.append(TensorDict(x=torch.tensor(9), y=torch.zeros(3)))
print(writer.writer, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    left = tmp_path / "shards" / done.stdout.strip()
    assert len(open_dataset(tmp_path)) == 7 and verify(tmp_path).ok
    swept = tidy(tmp_path)
    assert swept.removed == [] and "a short time ago" in swept.left[str(left / "00000000")]
    assert tidy(tmp_path, older_than=0) == ([str(left / "00000000")], {})
    assert not left.exists() and not (tmp_path / "writers" / f"{left.name}.jsonl").exists()
    assert len(open_dataset(tmp_path)) == 7


def test_a_sweep_that_meets_a_writer_as_it_begins(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer has made its manifest, and not locked it yet."""
    written(tmp_path)
    real, swept = system.lock, []

    def lock(fd: int) -> None:
        if not swept and os.fstat(fd).st_size == 0 and b"jsonl" in os.readlink(f"/proc/self/fd/{fd}").encode():
            swept.append(fd)
            assert tidy(tmp_path, older_than=-60).removed == []
        real(fd)

    monkeypatch.setattr(system, "lock", lock)
    with DatasetWriter(tmp_path) as writer:
        writer.append(TensorDict(x=torch.tensor(9), y=torch.zeros(3)))
    assert swept and verify(tmp_path).ok and open_dataset(tmp_path)["x"].tolist()[-1] == 9


def cut_line(manifest: pathlib.Path) -> None:
    """Cut a manifest behind its last line but one."""
    content = manifest.read_bytes()
    manifest.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])


def test_a_line_that_is_lost_at_its_beginning(tmp_path: pathlib.Path) -> None:
    """No checksum can tell: a writer that is killed before the line leaves the same."""
    shards = written(tmp_path)
    cut_line(next((tmp_path / "writers").iterdir()))
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3]
    report = verify(tmp_path, raises=False)
    assert len(report.problems) == 1 and shards[2].name in report.problems[0]
    swept = tidy(tmp_path, older_than=0)
    assert swept.removed == [] and "name it in shards=" in swept.left[str(shards[2])] and shards[2].exists()
    with pytest.raises(ValueError, match="counts"):
        tidy(tmp_path, shards=[str(shards[0])])
    with pytest.raises(ValueError, match="not a shard"):
        tidy(tmp_path, shards=[str(tmp_path / "schema.json")])
    assert tidy(tmp_path, shards=[str(shards[2])]).removed == [str(shards[2])]
    assert verify(tmp_path).ok and open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3]


def two_writers(folder: pathlib.Path, format: str = "folder") -> None:
    for first in (0, 10):
        with DatasetWriter(folder, rows_per_shard=2, format=format) as writer:
            writer.extend(TensorDict(x=torch.arange(first, first + 4), batch_size=[4]))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "missing"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_damaged_manifest_leaves_the_rows_of_all_others(
    tmp_path: pathlib.Path, which: int, damage: str, keep: bool
) -> None:
    two_writers(tmp_path)
    assert compact(tmp_path, keep=keep) == (4, 1)
    before = sorted(str(path) for path in (tmp_path / "shards").glob("*/*"))
    manifest = sorted((tmp_path / "writers").iterdir())[which]
    content = manifest.read_bytes()
    if damage == "cut":
        manifest.write_bytes(content[:-5])
    elif damage == "flipped":
        manifest.write_bytes(content[:-5] + b"#" + content[-4:])
    elif damage == "empty":
        manifest.write_bytes(b"")
    else:
        manifest.unlink()
    # The merged shard says which rows it has, so that none is lost, whichever manifest it is.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
            swept = tidy(tmp_path, older_than=0)
            assert swept.removed == [] or (damage in ("missing", "empty") and which < 2 and not keep)
            compact(tmp_path)
    after = {str(path) for path in (tmp_path / "shards").glob("*/*")}
    assert set(before) <= after or damage in ("missing", "empty")


@pytest.mark.parametrize("lack", ["missing", "empty"])
def test_a_manifest_that_is_missing_or_empty(tmp_path: pathlib.Path, lack: str) -> None:
    two_writers(tmp_path)
    manifest = sorted((tmp_path / "writers").iterdir())[0]
    if lack == "missing":
        manifest.unlink()
    else:
        manifest.write_bytes(b"")
    shards = sorted((tmp_path / "shards" / manifest.stem).iterdir())
    with pytest.warns(UserWarning, match=f"{manifest.stem}.*is {lack}.*{shards[0].name}.*{shards[1].name}"):
        assert open_dataset(tmp_path)["x"].tolist() == [10, 11, 12, 13]
    assert len(verify(tmp_path, raises=False).problems) == 1
    with pytest.raises(SaveError, match=f"is {lack}"):
        verify(tmp_path)
    swept = tidy(tmp_path, older_than=0)
    assert swept.removed == [] and len(swept.left) == 2 and all(shard.exists() for shard in shards)


@pytest.mark.parametrize("format", ["folder", "archive", "zarr"])
def test_shards_in_the_place_of_others(tmp_path: pathlib.Path, format: str) -> None:
    shards = written(tmp_path / "data", format=format)
    (outside := tmp_path / "outside").mkdir()
    kept = outside / shards[0].name
    shards[0].rename(kept)
    # Another shard of this data set; a link to the shard itself.
    for lie, what in (
        (lambda: copied(shards[1], shards[0]), "says that it is"),
        (lambda: shards[0].symlink_to(kept), "link"),
    ):
        lie()
        data = open_dataset(tmp_path / "data")
        with pytest.raises(SaveError, match=f"{shards[0].name}.*{what}"):
            data[0]
        assert data[[2, 5]]["x"].tolist() == [2, 5]
        report = verify(tmp_path / "data", raises=False)
        assert len(report.problems) == 1 and what in report.problems[0]
        if shards[0].is_dir() and not shards[0].is_symlink():
            shutil.rmtree(shards[0])
        else:
            shards[0].unlink()
    kept.rename(shards[0])
    assert verify(tmp_path / "data").ok


def copied(source: pathlib.Path, target: pathlib.Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def test_verify_checks_what_the_manifest_says_of_a_shard(tmp_path: pathlib.Path) -> None:
    shards = written(tmp_path)
    meta = shards[0] / "meta.json"
    content = meta.read_text()
    meta.write_text(content.replace('"device":"cpu"', '"device": "cpu"'))
    assert open_dataset(tmp_path)["x"].tolist() == list(range(6))
    problems = verify(tmp_path, raises=False).problems
    assert len(problems) == 2 and "bytes" in problems[0] and "description" in problems[1]


@pytest.mark.parametrize(
    ("place", "value", "problem", "is_cheap"),
    [
        (1, 3, "it has 2 rows, and the manifest says 3", True),
        (2, 1, "bytes, and the manifest says 1$", False),
        (3, "0" * 64, "its description is not the one that the manifest names", False),
    ],
)
@pytest.mark.parametrize("format", ["folder", "archive", "zarr"])
def test_verify_checks_each_word_of_a_line(
    tmp_path: pathlib.Path, format: str, place: int, value: object, problem: str, is_cheap: bool
) -> None:
    """The checksums of the lines hold; a writer of another program could have written them."""
    from tensordict.datasets.records import to_file

    shards = written(tmp_path, format=format)
    (manifest,) = (tmp_path / "writers").iterdir()
    items = [json.loads(line[9:]) for line in manifest.read_bytes().splitlines()]
    line = next(item for item in items if item[0] == shards[1].name)
    if line[place] is None:
        # A group of Zarr has no length.
        assert format == "zarr"
        return
    line[place] = value
    manifest.write_bytes(to_file(items))
    problems = verify(tmp_path, raises=False).problems
    assert len(problems) == 1 and shards[1].name in problems[0] and re.search(problem, problems[0])
    data = open_dataset(tmp_path)
    assert data[0]["x"] == 0
    if is_cheap:
        with pytest.raises(SaveError, match=f"{shards[1].name}.*has 2 rows, and the manifest says 3"):
            data[2]


@pytest.mark.parametrize("what", ["writer", "shard", "file", "shards"])
def test_no_link_is_followed_and_nothing_of_others_removed(tmp_path: pathlib.Path, what: str) -> None:
    data, home = tmp_path / "data", tmp_path / "home"
    two_writers(data)
    (home / "00000000").mkdir(parents=True)
    (home / "00000000" / "x.memmap").write_text("precious")
    (home / "notes.txt").write_text("precious")
    mine = data / "shards" / "mine.txt"
    mine.write_text("precious")
    if what == "writer":
        (data / "shards" / "evil").symlink_to(home)
    elif what == "shard":
        # The shard that compaction removes.
        shard = sorted((data / "shards").glob("*/*"))[0]
        shard.rename(home / "moved")
        shard.symlink_to(home / "moved")
    elif what == "file":
        shard = sorted((data / "shards").glob("*/*"))[0]
        (shard / "notes.txt").symlink_to(home / "notes.txt")
    else:
        (data / "shards").rename(home / "shards")
        (data / "shards").symlink_to(home / "shards")
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(SaveError):
            compact(data)
        tidy(data, older_than=0)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    assert mine.exists() or what == "shards"
    if what == "file":
        assert (shard / "notes.txt").is_symlink() and (shard / "x.memmap").exists()


def test_merged_away_shards_stay_until_the_merged_one_is_sound(tmp_path: pathlib.Path) -> None:
    two_writers(tmp_path, "archive")
    old = sorted((tmp_path / "shards").glob("*/*"))
    compact(tmp_path, keep=True)
    (merged,) = set((tmp_path / "shards").glob("*/*")) - set(old)
    content = merged.read_bytes()
    at = content.index((11).to_bytes(8, "little"))
    merged.write_bytes(content[:at] + b"!" + content[at + 1 :])
    swept = tidy(tmp_path, older_than=0)
    assert swept.removed == [] and all("is broken" in reason for reason in swept.left.values())
    merged.unlink()
    # The shards that it was made of are read in its place.
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert tidy(tmp_path, older_than=0).removed == []
    merged.parent.mkdir(exist_ok=True)
    merged.write_bytes(content)
    assert sorted(tidy(tmp_path, older_than=0).removed) == [str(path) for path in old]
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def flip_in_merged(folder: pathlib.Path, old: list[pathlib.Path]) -> pathlib.Path:
    """Change the sixth number of `x` in the merged shard, and return the shard."""
    (merged,) = set((folder / "shards").glob("*/*")) - set(old)
    file = merged / ("x/c/0" if merged.suffix == ".zarr" else "x.memmap")
    content = file.read_bytes()
    file.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    return merged


@pytest.mark.parametrize("format", ["folder", "zarr"])
@pytest.mark.parametrize("sweep", [tidy, compact])
def test_merged_away_shards_stay_where_the_merged_one_differs(tmp_path: pathlib.Path, format: str, sweep: Any) -> None:
    """These shards have no checksums, so that the rows are compared."""
    two_writers(tmp_path, format)
    old = sorted((tmp_path / "shards").glob("*/*"))
    compact(tmp_path, keep=True)
    merged = flip_in_merged(tmp_path, old)
    with DatasetWriter(tmp_path, format=format) as writer:
        writer.extend(TensorDict(x=torch.arange(20, 22), batch_size=[2]))
    sweep(tmp_path)
    assert all(path.exists() for path in old)
    swept = tidy(tmp_path)
    first = "its row 5, entry 'x'"
    assert swept.removed == [] and all(first in reason for reason in swept.left.values())
    # A compaction has merged the damaged shard into another one, which is named then.
    assert (merged.parent.name in swept.left[str(old[0])]) == (sweep is tidy) and merged.exists()
    assert [load(path)["x"].tolist() for path in old] == [[0, 1], [2, 3], [10, 11], [12, 13]]


def test_checksums_prove_only_what_a_merged_shard_was_made_of(tmp_path: pathlib.Path) -> None:
    """An archive that was made of a damaged Zarr shard has checksums that hold, and not the rows of the oldest ones."""
    two_writers(tmp_path, "zarr")
    old = sorted((tmp_path / "shards").glob("*/*"))
    compact(tmp_path, keep=True)
    flip_in_merged(tmp_path, old)
    with DatasetWriter(tmp_path) as writer:
        writer.extend(TensorDict(x=torch.arange(20, 22), batch_size=[2]))
    compact(tmp_path, format="archive", keep=True)
    swept = tidy(tmp_path)
    assert swept.removed == [] and "00000000.tdz" in swept.left[str(old[0])]


def test_rows_that_are_compared_may_have_any_form(tmp_path: pathlib.Path) -> None:
    rows = TensorDict(
        nan=torch.full((4,), torch.nan),
        none=torch.zeros(4, 0),
        flags=torch.tensor([[True], [False], [True], [False]]),
        ragged=torch.nested.nested_tensor([torch.arange(n % 3) for n in range(4)], layout=torch.jagged),
        batch_size=[4],
    )
    rows["value"] = [1, float("nan"), "text", [1, {"a": None}]]
    with DatasetWriter(tmp_path, rows_per_shard=2, format="folder") as writer:
        writer.extend(rows)
    compact(tmp_path, keep=True)
    swept = tidy(tmp_path)
    assert len(swept.removed) == 2 and swept.left == {} and verify(tmp_path).ok


@pytest.mark.parametrize("format", ["folder", "archive", "zarr"])
def test_a_compaction_whose_line_was_lost_is_read(tmp_path: pathlib.Path, format: str) -> None:
    """Its manifest looks like one that was never longer; the old shards, which it replaced, are gone."""
    two_writers(tmp_path, format)
    before = set((tmp_path / "writers").iterdir())
    earlier = open_dataset(tmp_path)
    compact(tmp_path)
    (manifest,) = set((tmp_path / "writers").iterdir()) - before
    (merged,) = (tmp_path / "shards").glob("*/*")
    content = manifest.read_bytes()
    manifest.write_bytes(content[: content.index(b"\n") + 1])
    for data in (open_dataset(tmp_path), earlier):
        with pytest.warns(UserWarning, match=f"no manifest lists the merged shard '{merged}', which is read"):
            assert data["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [problem for problem in verify(tmp_path, raises=False).problems if "no manifest lists" not in problem] == []
    assert tidy(tmp_path, older_than=0).removed == [] and merged.exists()
    with pytest.raises(ValueError, match="counts"):
        tidy(tmp_path, shards=[merged])
    with pytest.warns(UserWarning, match="no manifest lists the merged shard"):
        compact(tmp_path)
    manifest.write_bytes(content)
    assert verify(tmp_path).ok and open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("lack", ["missing", "empty", "cut"])
def test_a_merged_shard_that_nobody_lists_or_needs(tmp_path: pathlib.Path, lack: str) -> None:
    """An upload of a compaction that failed has arrived late, or its line was lost: the old shards have all rows."""
    two_writers(tmp_path)
    old = sorted((tmp_path / "shards").glob("*/*"))
    before = set((tmp_path / "writers").iterdir())
    compact(tmp_path, keep=True)
    (manifest,) = set((tmp_path / "writers").iterdir()) - before
    (merged,) = set((tmp_path / "shards").glob("*/*")) - set(old)
    if lack == "missing":
        manifest.unlink()
    else:
        content = manifest.read_bytes()
        manifest.write_bytes(content[: content.index(b"\n") + 1] if lack == "cut" else b"")
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    (problem,) = verify(tmp_path, raises=False).problems
    assert "merged shard" in problem and merged.parent.name in problem and "no manifest lists" in problem
    swept = tidy(tmp_path, older_than=0)
    assert swept.removed == [] and "name it in shards=" in swept.left[str(merged)]
    assert tidy(tmp_path, older_than=0, shards=[merged]).removed == [str(merged)]
    assert verify(tmp_path).ok and open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_a_merged_shard_is_read_where_all_manifests_are_gone(tmp_path: pathlib.Path) -> None:
    two_writers(tmp_path)
    compact(tmp_path, keep=True)
    shutil.rmtree(tmp_path / "writers")
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    told = " ".join(str(warning.message) for warning in caught)
    assert "no manifest lists the merged shard" in told and "because line 0 of the manifest of the writer" in told


def test_compaction_leaves_damaged_shards_alone(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=2, checksum=True) as writer:
        writer.extend(TensorDict(x=torch.arange(10), batch_size=[10]))
    shards = sorted((tmp_path / "shards").glob("*/*"))
    content = (shards[2] / "x.memmap").read_bytes()
    (shards[2] / "x.memmap").write_bytes(b"!" + content[1:])
    with pytest.warns(UserWarning, match=f"{shards[2].name}.*damaged.*checksum"):
        assert compact(tmp_path) == (5, 3)
    assert len(verify(tmp_path, raises=False).problems) == 1
    (shards[2] / "x.memmap").write_bytes(content)
    assert verify(tmp_path).ok and open_dataset(tmp_path)["x"].tolist() == list(range(10))


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_the_schema_is_read_from_a_shard_where_its_file_is_broken(tmp_path: pathlib.Path, damage: str) -> None:
    two_writers(tmp_path)
    schema = tmp_path / "schema.json"
    if damage == "missing":
        schema.unlink()
    else:
        schema.write_bytes(schema.read_bytes()[:-30])
    with pytest.warns(UserWarning, match=r"schema\.json.*read from a manifest"):
        assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    with pytest.warns(UserWarning, match=r"schema\.json"), pytest.raises(SchemaError, match="lacks"):
        DatasetWriter(tmp_path).append(TensorDict(z=torch.zeros(2)))
    with pytest.raises(SaveError, match=r"schema\.json"):
        verify(tmp_path)
    shutil.rmtree(tmp_path / "writers")
    with pytest.raises(OSError, match=r"schema\.json"):
        open_dataset(tmp_path)


def test_a_manifest_takes_time_as_its_bytes(tmp_path: pathlib.Path) -> None:
    """Lines that stand for ever so many others, or for the same ones again and again, are read once."""
    from tensordict.datasets.lines import new_id
    from tensordict.datasets.records import to_file

    two_writers(tmp_path)
    held = sorted(path.stem for path in (tmp_path / "writers").iterdir())[0]
    with open_dataset(tmp_path)._manifests.place.exclusive():
        schema = open_dataset(tmp_path)._manifests.manifests[held].schema
    writer = new_id()
    items: list[list[object]] = [["tensordict data set", 3, writer, schema, 0]]
    items += [[f"{n:08}", 4, 0, "0" * 64, n + 1, [[held, 0, [2, 2]]]] for n in range(15_000)]
    items.append(["99999999", 2**52, 0, "0" * 64, 1, [[held, 2**52, [2**52]]]])
    manifest = tmp_path / "writers" / f"{writer}.jsonl"
    manifest.write_bytes(to_file(items))
    data = open_dataset(tmp_path)
    # The merged shards do not exist, but their claimed sources do.
    assert len(data) == 8 + 2**52 and data._manifests.generation() == 15_000


def test_idle_writers_keep_what_they_have_not_flushed(tmp_path: pathlib.Path) -> None:
    writer = DatasetWriter(tmp_path, rows_per_shard=100)
    writer.append(TensorDict(x=torch.tensor(0)))
    writer.flush()
    writer.append(TensorDict(x=torch.tensor(1)))
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    program = f"from tensordict.datasets import tidy; print(len(tidy({str(tmp_path)!r}, older_than=-1e6).removed))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
    writer.close()
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1]


@pytest.mark.parametrize("what", ["a link", "a folder"])
def test_a_shard_is_written_to_a_new_folder_only(tmp_path: pathlib.Path, what: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "meta.json").write_text("of somebody else")
    rows = TensorDict({"x": torch.arange(4)}, [4])
    with DatasetWriter(tmp_path / "data", format="folder") as writer:
        writer.extend(rows)
        writer.flush()
        place = tmp_path / "data" / "shards" / writer.writer / "00000001"
        if what == "a link":
            place.symlink_to(home)
        else:
            shutil.copytree(home, place)
        with pytest.raises(OSError, match="00000001"):
            writer.extend(rows)
        assert [path.name for path in home.iterdir()] == ["meta.json"]
        assert [(path.name, path.read_text()) for path in place.iterdir()] == [("meta.json", "of somebody else")]
        writer.extend(rows)  # the next number is free
    assert len(open_dataset(tmp_path / "data")) == 8


@pytest.mark.skipif(not folders._HAS_DESCRIPTORS, reason="this system has no descriptors of folders")
@pytest.mark.parametrize("by", ["a folder", "a link"])
def test_only_the_folder_that_was_looked_through_is_emptied(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    shard, other = tmp_path / "shards" / "00000000", tmp_path / "other"
    for folder in (shard, other):
        folder.mkdir(parents=True)
        (folder / "x.memmap").write_bytes(folder.name.encode())
    look = folders._find_foreign

    def find_foreign(*args: Any) -> str:
        found = look(*args)
        # Another process exchanges the folder.
        shard.rename(tmp_path / "moved")
        other.rename(shard) if by == "a folder" else shard.symlink_to(other)
        return found

    monkeypatch.setattr(folders, "_find_foreign", find_foreign)
    assert folders.remove_item(str(tmp_path), "shards", shard.name, lambda name: True)
    assert [path.read_bytes() for path in tmp_path.rglob("x.memmap")] == [b"other"]


def test_what_a_writer_killed_while_it_made_the_schema_has_left_is_removed(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.append(TensorDict(x=torch.tensor(1.0)))
    half = (tmp_path / "schema.json").read_bytes()[:40]
    staged = tmp_path / "%tmp-0123456789abcdef"
    others = [tmp_path / name for name in ("%tmp-notes", "%tmp-0123456789ABCDEF", "%tmp-0123456789abcdef0", ".notes")]
    for path in (staged, *others):
        path.write_bytes(half)
    # Another save beside the data set may be staging these.
    contents = {tmp_path / f"%tmp-{3:016x}": b"", tmp_path / f"%tmp-{4:016x}": b"another save " * 1_000}
    for path, content in contents.items():
        path.write_bytes(content)
    link, folder = tmp_path / f"%tmp-{1:016x}", tmp_path / f"%tmp-{2:016x}"
    link.symlink_to(staged)
    folder.mkdir()
    swept = tidy(tmp_path)
    assert swept.removed == [] and list(swept.left) == [str(staged)] and "a short time ago" in swept.left[str(staged)]
    with DatasetWriter(tmp_path) as writer:
        writer.append(TensorDict(x=torch.tensor(2.0)))
        assert "at work" in tidy(tmp_path, older_than=0).left[str(staged)]
    assert tidy(tmp_path, older_than=0) == ([str(staged)], {}) and not staged.exists()
    assert all(path.read_bytes() == half for path in others) and link.is_symlink() and folder.is_dir()
    assert all(path.read_bytes() == content for path, content in contents.items())
    assert len(open_dataset(tmp_path)) == 2
