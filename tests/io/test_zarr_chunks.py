"""Chunks of Zarr groups that are missing or broken: `verify` names them, and raises no false alarm."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cases import mark_slow
from reference import Reference

pytest.importorskip("zarr", reason="zarr needs Python 3.11")

import zarr
from remote_server import Proxy
from zarr.codecs import GzipCodec

from tensordict import PersistentTensorDict, TensorDict, from_zarr, verify
from tensordict.io.remote.urls import Remote
from tensordict_cli.runners import main

LAYOUTS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks of rows": {"chunks": 10},
    "chunks of both dims": {"chunks": (10, 2)},
    "compressed": {"chunks": 10, "compressors": GzipCodec()},
    "shards": {"chunks": 5, "shards": 10},
    "compressed shards": {"chunks": 5, "shards": 10, "compressors": GzipCodec()},
}
Change = Callable[[Any], object]


def make(many: int = 0) -> TensorDict:
    td = TensorDict(
        {
            "a": torch.arange(75.0).view(25, 3),
            "zeros": torch.zeros(25, 3),
            "n": {"half": torch.rand(25).bfloat16(), "word": "text"},
            "scalars": torch.arange(25) % 2,
        },
        [25],
    )
    rows = [torch.full((1 + row % 3, 2), float(row)) for row in range(25)]
    td["ragged"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for number in range(many):
        td[f"k{number}"] = torch.zeros(25)
    return td


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "data.zarr")


def chunks_of(path: str) -> list[pathlib.Path]:
    """Return the chunks of a group in a folder, but not the chunks of values."""
    found = [file for file in pathlib.Path(path).rglob("*") if file.is_file() and file.name != "zarr.json"]
    return sorted(file for file in found if "word" not in file.parts)


def name_of(path: str, chunk: pathlib.Path) -> str:
    return chunk.relative_to(path).as_posix().partition("/c")[0].replace("/", ".")


@pytest.mark.parametrize(
    ("layout", "many"),
    mark_slow(
        [*((layout, 0) for layout in LAYOUTS), ("one chunk", 12)],
        keep=[("chunks of rows", 0), ("compressed shards", 0), ("one chunk", 12)],
    ),
)
def test_each_chunk_that_is_gone_or_cut_off_is_named(path: str, layout: str, many: int) -> None:
    make(many).to_zarr(path, **LAYOUTS[layout]).close()
    assert verify(path).ok
    chunks = chunks_of(path)
    assert len({name_of(path, chunk) for chunk in chunks}) == 6 + many
    for number, chunk in enumerate(chunks):
        content, key = chunk.read_bytes(), chunk.relative_to(path).as_posix().partition("/c")
        entry = "ragged" if key[0].startswith("ragged/") else key[0].rpartition("/")[2]
        chunk.unlink()
        report = verify(path, raises=False)
        assert any(f"'{entry}'" in problem for problem in report.problems), (chunk, report.problems)
        assert any(repr(f"c{key[2]}") in problem for problem in report.problems), (chunk, report.problems)
        chunk.write_bytes(content[: len(content) // 2 if number % 2 else 0])
        report = verify(path, raises=False)
        assert any(f"'{entry}'" in problem for problem in report.problems), (chunk, report.problems)
        chunk.write_bytes(content)
    assert verify(path).ok


def test_many_missing_chunks_are_one_line(path: str) -> None:
    make().to_zarr(path, chunks=1).close()
    shutil.rmtree(pathlib.Path(path, "a", "c"))
    (problem,) = verify(path, raises=False).problems
    assert problem == (
        "entry 'a': 25 of the 25 chunks that were written are missing, and read as 0.0: 'c/0/0', 'c/1/0', 'c/2/0', and "
        "22 more"
    )


def test_a_document_that_is_gone_is_named(path: str) -> None:
    make().to_zarr(path).close()
    pathlib.Path(path, "n", "half", "zarr.json").unlink()
    assert verify(path, raises=False).problems == ["entry ('n', 'half'): its zarr.json is missing"]


def test_the_command_shows_it(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    make().to_zarr(path, chunks=10).close()
    assert main(["verify", path]) == 0
    pathlib.Path(path, "a", "c", "1", "0").unlink()
    assert main(["verify", path]) == 1
    captured = capsys.readouterr()
    assert (
        "'a': 1 of the 3 chunks that were written are missing, and read as 0.0: 'c/1/0'" in captured.out + captured.err
    )


WRITES: dict[str, Change] = {
    "rows of zeros": lambda data: data.select("a", "zeros", "scalars").__setitem__(slice(0, 20), 0),
    "all zeros": lambda data: data.update_(make().select("a", "scalars").apply(torch.zeros_like)),
    "a new entry": lambda data: data.set("new", torch.zeros(25, 2)),
    "an entry of another shape": lambda data: data.set("a", torch.zeros(25, 7), overwrite=True),
    "another ragged entry": lambda data: data.set("ragged", make()["ragged"] * 0),
    "an entry less": lambda data: data.pop("a"),
    "a nested container": lambda data: data.set("m", TensorDict(x=torch.zeros(25), batch_size=[25])),
}


@pytest.mark.parametrize(
    ("write", "layout"),
    mark_slow(
        [(write, layout) for write in WRITES for layout in ("chunks of rows", "compressed shards")],
        keep=[*((write, "chunks of rows") for write in WRITES), ("rows of zeros", "compressed shards")],
    ),
)
def test_what_is_written_later_is_sound_and_checked(path: str, layout: str, write: str) -> None:
    options = LAYOUTS[layout]
    make().to_zarr(path, **options).close()
    with PersistentTensorDict(filename=path, backend="zarr", mode="r+", **options) as data:
        WRITES[write](data)
    assert verify(path).ok
    for chunk in chunks_of(path):
        content = chunk.read_bytes()
        chunk.unlink()
        assert not verify(path, raises=False).ok, chunk
        chunk.write_bytes(content)


def test_a_group_to_fill_has_only_the_chunks_that_were_written(path: str) -> None:
    schema = {"a": ([3], torch.float32)}
    data = TensorDict.from_schema(schema, batch_size=[100], storage="zarr", filename=path, chunks=10)
    assert not chunks_of(path) and verify(path).ok
    data[5:25] = TensorDict(a=torch.ones(20, 3), batch_size=[20])
    assert len(chunks_of(path)) == 3 and verify(path).ok
    chunks_of(path)[1].write_bytes(b"short")
    assert "'c/1/0' (it has 5 bytes, and not 120)" in verify(path, raises=False).problems[0]
    # All of it at once: from then on no chunk may be missing.
    data["a"] = torch.ones(100, 3)
    data.close()
    assert verify(path).ok
    chunks_of(path)[4].unlink()
    assert "1 of the 10 chunks" in verify(path, raises=False).problems[0]


def test_other_programs_may_leave_out_chunks(path: str) -> None:
    group = zarr.create_group(path)
    array = group.create_array("a", shape=(100, 3), chunks=(10, 3), dtype="f4")
    array[:20] = 1
    assert verify(path).ok and len(chunks_of(path)) == 2
    chunks_of(path)[0].write_bytes(b"short")
    assert "'c/0/0'" in verify(path, raises=False).problems[0]


def test_rows_that_zarr_appends_may_be_zeros(path: str) -> None:
    make().to_zarr(path, chunks=10).close()
    array: Any = zarr.open_group(path)["a"]
    array.resize((60, 3))
    assert array.nchunks == 6 and not verify(path, raises=False).problems[1:]
    document = pathlib.Path(path, "a", "zarr.json")
    assert json.loads(document.read_text())["attributes"]["__tensordict__"]["written"] == [25, 3]
    assert "chunk" not in "".join(verify(path, raises=False).problems)
    array.resize((10, 3))
    assert "chunk" not in "".join(verify(path, raises=False).problems)


@pytest.mark.parametrize("written", [[25], [25, -1], "all", [25, 3, 1]])
def test_a_broken_note_is_told(path: str, written: object) -> None:
    make().to_zarr(path).close()
    document = pathlib.Path(path, "a", "zarr.json")
    content = json.loads(document.read_text())
    content["attributes"]["__tensordict__"]["written"] = written
    document.write_text(json.dumps(content))
    (problem,) = verify(path, raises=False).problems
    assert "'a'" in problem and "written" in problem


def test_a_huge_grid_is_not_walked(path: str) -> None:
    make().to_zarr(path, chunks=10).close()
    document = pathlib.Path(path, "a", "zarr.json")
    content = json.loads(document.read_text())
    content["chunk_grid"]["configuration"]["chunk_shape"] = [1, 1]
    content["shape"] = content["attributes"]["__tensordict__"]["written"] = [1 << 40, 3]
    document.write_text(json.dumps(content))
    root = pathlib.Path(path, "zarr.json")
    root.write_text(root.read_text().replace("25", str(1 << 40)))
    problems = verify(path, raises=False).problems
    assert any(f"of the {3 << 40:,} chunks" in problem for problem in problems)


@pytest.mark.parametrize("layout", mark_slow(["chunks of rows", "compressed shards"], keep=["chunks of rows"]))
def test_at_urls(base: str, layout: str) -> None:
    url = f"{base}/x.zarr"
    make().to_zarr(url, **LAYOUTS[layout]).close()
    assert verify(url).ok
    store = Remote(url)
    chunks = [file.name for file in store.files() if "/c" in file.name and "word" not in file.name]
    for name in [next(name for name in chunks if name.startswith(start)) for start in ("a/", "n/half/", "ragged/")]:
        content = store.read(name)
        store.delete([name])
        assert "missing" in "".join(verify(url, raises=False).problems)
        store.put(name, content[:-1])
        assert not verify(url, raises=False).ok
        store.put(name, content)
    with from_zarr(url, mode="r+") as data:
        data["a"].zero_()
    assert verify(url).ok


def test_over_http(bucket: tuple[str, Proxy, dict[str, Any]]) -> None:
    url, proxy, options = bucket
    public = {**options, "s3_additional_kwargs": {"ACL": "public-read"}}
    make().to_zarr(f"{url}/x.zarr", storage_options=public, chunks=10).close()
    store = Remote(url, options)
    store._fs.chmod(store._root, acl="public-read")
    web = f"{proxy.url}/{url.removeprefix('s3://')}/x.zarr"
    assert verify(web).ok
    store.delete(["x.zarr/a/c/1/0"])
    assert "1 of the 3 chunks" in verify(web, raises=False).problems[0]


def test_in_a_zip_file(tmp_path: pathlib.Path) -> None:
    import zipfile

    make().to_zarr(tmp_path / "x.zip", chunks=10).close()
    assert verify(tmp_path / "x.zip").ok
    with zipfile.ZipFile(tmp_path / "x.zip") as old, zipfile.ZipFile(tmp_path / "y.zip", "w") as new:
        for name in old.namelist():
            if name != "a/c/2/0":
                new.writestr(name, old.read(name))
    assert "'c/2/0'" in verify(tmp_path / "y.zip", raises=False).problems[0]


WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
TensorDict({"a": torch.zeros(20, 3), "b": {"c": torch.arange(20)}}, [20]).to_zarr(sys.argv[1], chunks=(5,))
"""


@pytest.mark.reference
def test_zeros_that_the_reference_leaves_out_are_sound(reference: Reference, path: str) -> None:
    reference.run(WRITE, path)
    report = verify(path)
    assert report.ok and report.leaves == 2
    assert len(chunks_of(path)) < math.ceil(20 / 5) * 2
