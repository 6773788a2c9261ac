"""What goes wrong with data sets: killed writers, full disks, shards and manifests that are damaged or gone."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from tensordict import DatasetWriter, TensorDict, open_dataset, verify
from tensordict.core.errors import SaveError
from tensordict.datasets import tidy

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
    # One that was replaced by another save is no shard of this data set.
    TensorDict(x=torch.zeros(2), batch_size=[2]).memmap(shards[3], archive=format == "archive", overwrite=True)
    with pytest.raises(SaveError, match=shards[3].name):
        open_dataset(tmp_path)[6]
    problems = verify(tmp_path, raises=False).problems
    assert len(problems) == 3 and "'x'" in problems[2]


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
        # What no line lists any more may be what the lost lines listed.
        assert tidy(tmp_path, older_than=0, complete=True) == []
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
    for line in (b'["../../x",2]', b'["00000000",-1]', b'["00000000",1e9]', b"{}", b"[" * 5000, b'["00000000",true]'):
        manifest.write_bytes(head + b"%08x %s\n" % (zlib.crc32(line, crc), line))
        with pytest.warns(UserWarning, match="line 2"):
            assert len(open_dataset(tmp_path)) == 0


def test_a_writer_that_is_never_closed(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    writer = DatasetWriter(tmp_path)
    writer.append(TensorDict(x=torch.tensor(9), y=torch.zeros(3)))
    if not (child := os.fork()):
        # What is the parent's stays as it is.
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
                refused += f"that of the process {os.getppid()}" in str(error)
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
    # A writer at work is left alone, and so is what it has made a moment ago.
    assert tidy(tmp_path) == [] and under_way.exists()
    writer.close()
    left = tmp_path / "shards" / "20200101T000000.000000-gone-1-00000000"
    (left / "00000000").mkdir(parents=True)
    (left / "00000000" / "x.memmap").write_bytes(b"12345678")
    shutil.copytree(under_way, left / "00000001")
    assert len(open_dataset(tmp_path)) == 7 and verify(tmp_path).ok
    assert tidy(tmp_path, older_than=0) == [str(left / "00000000")]
    assert tidy(tmp_path, older_than=0, complete=True) == [str(left / "00000001")]
    assert not left.exists() and len(open_dataset(tmp_path)) == 7
