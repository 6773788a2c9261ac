"""Attacks on the files of a data set and on its requests: no row is lost, and none is read wrongly in silence."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from adversary import SCENES, RemotePlace, Tally, make_rows, sweep

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "io"))
from late_requests import run_trials
from remote_server import LATE, Fault, Proxy, new_bucket, options_of, s3_server

from tensordict import DatasetWriter, open_dataset, verify
from tensordict.core.exceptions import SaveError
from tensordict.datasets import compact, index, tidy
from tensordict.datasets.location import RemoteLocation
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import Remote

PROGRAM = pathlib.Path(__file__).with_name("adversary.py")
QUICK = [name for name in SCENES if not name.endswith(("zarr", "mixed"))]
SLOW_FORMATS = ["kept/zarr", "unlisted/mixed"]


def attack(folder: pathlib.Path, *arguments: str) -> dict[str, Any]:
    """The tally of the program, which no attack may end."""
    command = [sys.executable, str(PROGRAM), arguments[0], str(folder), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=7200)
    where = (folder / "attack.txt").read_text()
    assert done.returncode == 0, f"ended by {where}: {done.stderr[-3000:]}"
    tally: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(done.stdout)
    return tally


def check_tally(tally: dict[str, Any]) -> None:
    broken = tally["broken"]
    assert not broken, f"{len(broken)} of {tally['attacks']} attacks:\n" + "\n".join(broken[:20])


def test_a_sample_of_attacks_on_folders(tmp_path: pathlib.Path) -> None:
    tally = attack(tmp_path, "sample", "8", "1", *QUICK)
    assert len(tally["kinds"]) == 11 and tally["attacks"] == 9 * len(QUICK)
    check_tally(tally)


def test_a_sample_of_attacks_on_other_formats(tmp_path: pathlib.Path) -> None:
    check_tally(attack(tmp_path, "sample", "3", "2", *SLOW_FORMATS))


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_every_attack_on_a_folder(tmp_path: pathlib.Path, scene: str) -> None:
    check_tally(attack(tmp_path, "sweep", scene))


def attack_url(url: str, options: dict[str, Any] | None, scenes: list[str], count: int) -> None:
    tally = Tally()
    for name in scenes:
        sweep(RemotePlace(url, options), name, tally, count, 3)
    print(tally.to_json())
    check_tally(json.loads(tally.to_json()))


def test_a_sample_of_attacks_on_objects() -> None:
    url = f"memory://{uuid.uuid4().hex}/data"
    attack_url(url, None, [name for name in SCENES if name.endswith("archive")], 3)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_many_attacks_on_objects(scene: str) -> None:
    attack_url(f"memory://{uuid.uuid4().hex}/data", None, [scene], 150)


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[Proxy, dict[str, Any]]]:
    """A server of S3 behind a proxy, and the options to reach it; 3 attempts are made."""
    s3fs = pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch, s3_server() as proxy:
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        patch.setattr("tensordict.io.remote.urls._FIRST_DELAY", 0.01)
        patch.setenv("TENSORDICT_REMOTE_ATTEMPTS", "3")
        yield proxy, options_of(proxy)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["compacted/archive", "kept/archive", "unlisted/archive"])
def test_attacks_on_objects_of_a_server(s3: tuple[Proxy, dict[str, Any]], scene: str) -> None:
    proxy, options = s3
    attack_url(f"s3://{new_bucket(proxy)}/data", options, [scene], 100)


def test_requests_that_are_late_repeated_and_reordered(s3: tuple[Proxy, dict[str, Any]]) -> None:
    proxy, options = s3
    bucket = new_bucket(proxy)
    counts = run_trials(proxy, options, [f"s3://{bucket}/{number}" for number in range(2)], 0, 6)
    assert counts["late requests carried out"] > 0 and counts["rows acknowledged"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200, 10))
def test_requests_that_are_late_100_times(s3: tuple[Proxy, dict[str, Any]], seed: int) -> None:
    proxy, options = s3
    bucket = new_bucket(proxy)
    print(json.dumps(run_trials(proxy, options, [f"s3://{bucket}/{number}" for number in range(10)], seed)))


def test_a_late_upload_takes_nothing_away(s3: tuple[Proxy, dict[str, Any]]) -> None:
    """A flush that is answered too late is sent again; then the first upload lands, after later flushes."""
    proxy, options = s3
    url = f"s3://{new_bucket(proxy)}/data"
    with DatasetWriter(url, storage_options=options) as writer:
        for number in range(3):
            writer.extend(make_rows(3 * number, 3))
            if number == 0:
                proxy.faults.append(Fault(LATE, "PUT", "writers/", times=2))
            writer.flush()
    assert proxy.deliver() >= 1
    assert open_dataset(url, storage_options=options)["number"].tolist() == list(range(9))
    tidy(url, older_than=0, storage_options=options)
    assert open_dataset(url, storage_options=options)["number"].tolist() == list(range(9))
    assert verify(url, storage_options=options).ok


def test_a_merged_folder_has_checksums(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=3, checksum=True) as writer:
        writer.extend(make_rows(0, 6))
    compact(tmp_path)
    (content,) = (tmp_path / "shards").glob("*/*/content.memmap")
    assert verify(tmp_path).checksummed
    content.write_bytes(bytes([content.read_bytes()[0] ^ 1]) + content.read_bytes()[1:])
    with pytest.raises(OSError, match="content"):
        verify(tmp_path)


def test_what_has_the_name_of_a_shard_that_is_removed_is_left(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=3) as writer:
        writer.extend(make_rows(0, 6))
    mine = tmp_path / "shards" / writer.writer / ".00000000.gone"
    mine.write_text("mine")
    compact(tmp_path)
    left = tidy(tmp_path, older_than=0).left
    assert mine.read_text() == "mine" and mine.with_name("00000000").is_dir()
    assert set(left) == {str(mine), str(mine.with_name("00000000"))}
    assert open_dataset(tmp_path)["number"].tolist() == list(range(6))


def test_objects_whose_names_lead_out_of_a_shard(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard at a URL is checked in a temporary folder, and nothing is written beside that."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = f"memory://{uuid.uuid4().hex}/data"
    with DatasetWriter(url, format="folder") as writer:
        writer.extend(make_rows(0, 3))
    shard = f"{url.removeprefix('memory:/')}/shards/{writer.writer}/00000000"
    file = type(memory.store[f"{shard}/meta.json"])
    memory.store[f"{shard}/../../owned"] = file(memory, f"{shard}/../../owned", b"mine")
    problems = verify(url, raises=False).problems
    assert not (tmp_path / "owned").exists() and len(problems) == 1 and "could lead out" in problems[0]
    assert open_dataset(url)["number"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("what", ["a shard", "a folder", "nothing"])
def test_a_schema_that_is_a_link_is_not_followed(tmp_path: pathlib.Path, what: str) -> None:
    """The schema comes from a manifest, before and after the merge that removes the linked manifest."""
    data = tmp_path / "data"
    with DatasetWriter(data, rows_per_shard=3, format="archive") as writer:
        writer.extend(make_rows(0, 6))
    shard = data / "shards" / writer.writer / "00000000.tdz"
    (data / "schema.json").unlink()
    (data / "schema.json").symlink_to({"a shard": shard, "a folder": tmp_path, "nothing": tmp_path / "none"}[what])
    for _ in range(2):
        with pytest.warns(UserWarning, match="schema.json.*is a link.*read from a manifest"):
            assert open_dataset(data)["number"].tolist() == list(range(6))
        with pytest.warns(UserWarning, match="schema.json"):
            compact(data)
        assert not verify(data, raises=False).ok
    assert (data / "schema.json").is_symlink()


def test_a_schema_that_is_a_folder(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.extend(make_rows(0, 2))
    (tmp_path / "schema.json").unlink()
    (tmp_path / "schema.json").mkdir()
    with pytest.warns(UserWarning, match="schema.json.*read from a manifest"):
        assert open_dataset(tmp_path)["number"].tolist() == [0, 1]


def test_the_files_of_a_shard_whose_writer_was_killed_are_removed(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.extend(make_rows(0, 2))
    shard = tmp_path / "shards" / writer.writer / "00000001"
    for name in ("number.memmap", "name/meta.json", "%tmp-0123456789abcdef", "notes.txt"):
        (shard / name).parent.mkdir(parents=True, exist_ok=True)
        (shard / name).write_text("{}")
    assert list(tidy(tmp_path, older_than=0).left) == [str(shard)] and (shard / "notes.txt").exists()
    (shard / "notes.txt").unlink()
    assert tidy(tmp_path, older_than=0) == ([str(shard)], {}) and not shard.exists()


def test_an_object_whose_name_is_no_range_of_lines_stays() -> None:
    url = f"memory://{uuid.uuid4().hex}/data"
    with DatasetWriter(url, rows_per_shard=2) as writer:
        writer.extend(make_rows(0, 4))
    store = Remote(url)
    mine = f"writers/{writer.writer}/00000007-00000002.jsonl"
    store.put(mine, b"mine")
    compact(url)
    tidy(url, older_than=0)
    assert store.read(mine) == b"mine" and open_dataset(url)["number"].tolist() == [0, 1, 2, 3]


def test_objects_beside_the_manifest_of_a_killed_writer_stay() -> None:
    """A sweep, and a writer that is closed without rows, remove the manifest alone."""
    url = f"memory://{uuid.uuid4().hex}/data"
    with DatasetWriter(url) as writer:
        writer.extend(make_rows(0, 2))
    with DatasetWriter(url, format="folder") as killed:
        killed.extend(make_rows(2, 2))
    store, folder = Remote(url), f"writers/{killed.writer}"
    head, line = sorted(file.name for file in store.files(folder))
    store.delete([line, f"shards/{killed.writer}/00000000/meta.json"])
    for name in ("notes.txt", "00000099.jsonl", "00000007-00000000.jsonl", ".00000000.gone"):
        store.put(f"{folder}/{name}", b"mine")
    tidy(url, older_than=0)
    assert len(store.files(folder)) == 4 and store.find(head) is None
    assert open_dataset(url)["number"].tolist() == [0, 1] and verify(url).ok
    log = RemoteLocation(url, Access()).new_log(folder, lambda count: [count], False)
    assert store.find(head) is not None
    log.close()
    assert len(store.files(folder)) == 4 and store.find(head) is None


def test_a_manifest_that_a_sweep_removes_while_it_is_read(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.extend(make_rows(0, 2))
    other = DatasetWriter(tmp_path)
    other.extend(make_rows(2, 1))
    manifest = tmp_path / "writers" / f"{other.writer}.jsonl"
    head = manifest.read_bytes()
    with pytest.warns(RuntimeWarning, match="1 rows are lost"):
        del other
    # As it is after a kill.
    manifest.write_bytes(head)
    kept = index.list_manifests

    def list_then_remove(place: Any) -> Any:
        found = kept(place)
        manifest.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(index, "list_manifests", list_then_remove)
    assert open_dataset(tmp_path)["number"].tolist() == [0, 1] and not manifest.exists()


def test_a_claim_that_is_given_back_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}/data"
    with DatasetWriter(url) as writer:
        writer.extend(make_rows(0, 2))
    store = Remote(url)
    store.put(".compacting", b"somebody")
    read = Remote.read

    def end_before(self: Remote, name: str = "", *arguments: Any) -> bytes:
        if name == ".compacting":
            store.delete([name])
        return read(self, name, *arguments)

    monkeypatch.setattr(Remote, "read", end_before)
    with pytest.raises(SaveError, match="another process .which has ended meanwhile"):
        tidy(url)
    assert tidy(url) == ([], {})
