"""Servers of S3 and GCS whose listings and chunks of Zarr have no end, or are not what was asked for."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from remote_server import END, ENDLESS, SHORT, Fault, Proxy
from web_server import web_server

from tensordict import TensorDict, from_zarr
from tensordict.core.exceptions import SaveError
from tensordict.io.remote.urls import Remote

# aiohttp says so of what gcsfs does, of more than a mebibyte.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
Answer = Callable[[str, str], "bytes | None"]
Group = tuple[Remote, Proxy, str]
# Bytes that buffers may hold when a client hangs up.
SLACK = 32 << 20
# So much is read where no range is asked for.
LONGEST = 64 << 20


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> tuple[Remote, Proxy]:
    """A folder with three files, one of them deeper."""
    url, proxy, options = request.getfixturevalue("bucket" if request.param == "s3" else "gcs_bucket")
    remote = Remote(f"{url}/data", options)
    for name in ("a", "b c%20", "deep/er/d"):
        remote.put(name, b"12")
    proxy.clear()
    return remote, proxy


def is_listing(path: str) -> bool:
    parts = urlsplit(path)
    return "list-type" in parse_qs(parts.query) or parts.path.endswith("/o")


def make_pages(remote: Remote, page: Callable[[int], tuple[list[str], str | None]]) -> Answer:
    """Answers to requests for listings: the page of this number has names, and a token where there are more."""
    asked = iter(range(10**6))

    def answer(method: str, path: str) -> bytes | None:
        if not is_listing(path):
            return None
        names, token = page(next(asked))
        if not remote.is_s3:
            items = [{"name": name, "size": "2", "etag": "1", "updated": "2026-01-01T00:00:00Z"} for name in names]
            return json.dumps({"items": items, **({"nextPageToken": token} if token is not None else {})}).encode()
        entry = "<Contents><Key>{}</Key><Size>2</Size><ETag>1</ETag></Contents>"
        more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token is not None else ""
        is_cut = str(token is not None).lower()
        content = "".join(map(entry.format, names))
        return f"<ListBucketResult><IsTruncated>{is_cut}</IsTruncated>{more}{content}</ListBucketResult>".encode()

    return answer


def test_listings(store: tuple[Remote, Proxy]) -> None:
    remote, _ = store
    found = remote.files()
    assert [(file.name, file.size) for file in found] == [("a", 2), ("b c%20", 2), ("deep/er/d", 2)]
    assert found == [remote.find(file.name) for file in found]
    assert [file.name for file in remote.files("deep")] == ["deep/er/d"]
    assert remote.folders() == ["deep"] and remote.folders("deep") == ["er"]
    assert remote.files("none") == [] == remote.folders("none") == remote.files("a")


def test_pages_are_put_together(store: tuple[Remote, Proxy]) -> None:
    remote, proxy = store
    # A page may be empty, and be followed by others.
    pages: list[tuple[list[str], str | None]] = [(["data/a", "data/b"], "1"), ([], "2"), (["data/c"], None)]
    proxy.forges = make_pages(remote, pages.__getitem__)
    assert [file.name for file in remote.files()] == ["a", "b", "c"]


@pytest.mark.parametrize("has_length", [True, False])
def test_a_page_without_end(store: tuple[Remote, Proxy], has_length: bool) -> None:
    remote, proxy = store
    for call in (remote.files, remote.folders):
        proxy.clear()
        proxy.faults = [Fault(ENDLESS, times=99, has_length=has_length)]
        with pytest.raises(SaveError, match=f"cannot list '{remote.url}': the server sends more than the [0-9]+ bytes"):
            call()
        # One attempt is enough.
        assert proxy.count("GET") == 1 and proxy.sent <= LONGEST + SLACK < END
    proxy.faults = [Fault(ENDLESS, "PUT", times=99, has_length=has_length), Fault(ENDLESS, "POST", times=99)]
    with pytest.raises(SaveError, match="the server sends more than"):
        remote.put("new", b"12")


def test_pages_without_end(store: tuple[Remote, Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    remote, proxy = store
    monkeypatch.setenv("TENSORDICT_REMOTE_NAMES", "2500")
    proxy.forges = make_pages(remote, lambda page: ([f"data/{page}-{i}" for i in range(100)], str(page)))
    with pytest.raises(SaveError, match=f"cannot list '{remote.url}': the server lists more than 2,500 names"):
        remote.files()
    assert proxy.count("GET") == 26
    same: list[Callable[[int], tuple[list[str], str]]] = [
        lambda page: (["data/a"], "again"),
        lambda page: (["data/a"], str(page)),
    ]
    for page in same:
        proxy.requests.clear()
        proxy.forges = make_pages(remote, page)
        with pytest.raises(SaveError, match="lists the same names again and again"):
            remote.files()
        assert proxy.count("GET") <= 102


@pytest.mark.parametrize("name", ["other/a", "dat", f"data/{'a' * 1100}"])
def test_names_that_were_not_asked_for(store: tuple[Remote, Proxy], name: str) -> None:
    remote, proxy = store
    proxy.forges = make_pages(remote, lambda page: (["data/a", name], None))
    with pytest.raises(SaveError, match=f"the server lists '{name[:50]}.*, which was not asked for"):
        remote.files()


# --- chunks of Zarr ---------------------------------------------------------------------------------------------------


def save_group(remote: Remote, **options: Any) -> torch.Tensor:
    pytest.importorskip("zarr", minversion="3")
    content = torch.arange(4000, dtype=torch.float64).view(1000, 4)
    where = remote.url.removeprefix("file://")
    TensorDict(x=content, batch_size=[1000]).to_zarr(where, storage_options=remote.storage_options or None, **options)
    return content


@pytest.fixture
def group(store: tuple[Remote, Proxy]) -> Group:
    """An empty folder, and what is in the path of each request for a chunk of its array `x`."""
    remote, proxy = Remote(f"{store[0].url}/group", store[0].storage_options), store[1]
    return remote, proxy, "/x/c/" if remote.is_s3 else "x%2Fc%2F"


def read(remote: Remote, rows: Any = slice(None)) -> torch.Tensor:
    with from_zarr(remote.url, storage_options=remote.storage_options) as data:
        found = data[rows]["x"]
        assert isinstance(found, torch.Tensor)
        return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "compressed": {"compressors": "auto"},
    "shards": {"chunks": 10, "shards": 500},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("has_length", [True, False])
def test_a_chunk_without_end(group: Group, layout: str, has_length: bool) -> None:
    remote, proxy, chunk = group
    expected = save_group(remote, **LAYOUTS[layout])
    assert torch.equal(read(remote), expected) and torch.equal(read(remote, 3), expected[3])
    for rows in (slice(None), 3):
        proxy.clear()
        proxy.faults = [Fault(ENDLESS, path=chunk, times=99, has_length=has_length)]
        with pytest.raises(SaveError, match=f"(?s)entry 'x'.*{remote.url}.*sends more than the [0-9]+ bytes"):
            read(remote, rows)
        assert proxy.faults[0].times < 99 and proxy.sent <= LONGEST + SLACK < END
    proxy.clear()
    proxy.faults = [Fault(ENDLESS, path="zarr.json", times=99, has_length=has_length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensordict.io.stores.zarr_remote._LONGEST_DOCUMENT", 1 << 20)
        with pytest.raises(SaveError, match=f"{remote.url}.*sends more than the [0-9]+ bytes"):
            read(remote)
    assert proxy.sent <= LONGEST + SLACK


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_that_is_longer_than_its_array_allows(group: Group, layout: str) -> None:
    remote, proxy, _ = group
    save_group(remote, **LAYOUTS[layout])
    for file in remote.files("x/c"):
        remote.put(file.name, remote.read(file.name) + bytes(1 << 20))
    proxy.clear()
    with pytest.raises(SaveError, match=f"(?s)entry 'x'.*{remote.url}.*more than the .* bytes that its array allows"):
        read(remote)
    assert proxy.fetched() < 1 << 20


def test_a_part_that_is_longer_than_its_shard(group: Group) -> None:
    remote, proxy, _ = group
    save_group(remote, chunks=10, shards=1000)
    (file,) = remote.files("x/c")
    index = torch.frombuffer(bytearray(remote.read(file.name)[-1604:-4]), dtype=torch.int64).view(100, 2)
    assert index[3].tolist() == [960, 320]
    index[3, 1] = 1 << 40
    numbers = index.numpy().tobytes()
    checked = pytest.importorskip("google_crc32c").value(numbers).to_bytes(4, "little")
    remote.put(file.name, remote.read(file.name)[:-1604] + numbers + checked)
    proxy.clear()
    with pytest.raises(SaveError, match="entry 'x'.*has 1,099,511,627,776 bytes, where its array allows 33,604 in all"):
        read(remote, 35)
    assert read(remote, 40)[0] == 160 and proxy.fetched() < 100_000


def test_a_long_chunk_is_read_in_parts(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensordict.io.stores.zarr_remote._PART", 3000)
    remote, proxy, chunk = group
    expected = save_group(remote)
    proxy.clear()
    assert torch.equal(read(remote), expected)
    assert proxy.fetched(chunk) < 34_000 and proxy.count("GET", chunk) in (
        11,
        12,
        13,
    )  # GCS is asked for the length, too
    # An object that becomes shorter meanwhile is read again.
    proxy.faults = [Fault(SHORT, path=chunk, after=3)]
    assert torch.equal(read(remote), expected) and not proxy.faults[0].times


def test_texts_are_as_long_as_the_server_says(store: tuple[Remote, Proxy]) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    from zarr.storage import FsspecStore

    remote, proxy = store
    group = zarr.open_group(FsspecStore.from_url(*remote.for_fsspec()), mode="w")
    group.create_array("words", shape=(3,), dtype=str)[:] = ["a", "long " * 1000, "c"]
    with from_zarr(remote.url, storage_options=remote.storage_options) as data:
        assert data["words"][1] == "long " * 1000
    proxy.clear()
    proxy.faults = [Fault(ENDLESS, path="words%2Fc" if not remote.is_s3 else "words/c", times=9)]
    with pytest.raises(SaveError, match="entry 'words'.*sends more than the [0-9]+ bytes"):
        from_zarr(remote.url, storage_options=remote.storage_options)
    assert proxy.sent <= LONGEST + SLACK


@pytest.mark.parametrize("lie", ["length", "chunks"])
def test_a_chunk_without_end_by_http(lie: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORDICT_REMOTE_ATTEMPTS", "1")
    monkeypatch.setattr("tensordict.io.stores.zarr_remote._LONGEST_DOCUMENT", 1 << 20)
    save_group(Remote(f"{tmp_path}/x.zarr"))
    with web_server() as web:
        for file in tmp_path.rglob("*"):
            if file.is_file():
                web.files[f"/{file.relative_to(tmp_path)}"] = file.read_bytes()
        with from_zarr(f"{web.url}/x.zarr") as data:
            assert data["x"].sum() == 4000 * 3999 / 2
            web.lie = lie
            with pytest.raises(SaveError, match=f"entry 'x'.*{web.url}.*sends more than the 32001 bytes"):
                data["x"]
        with pytest.raises(SaveError, match=f"{web.url}.*sends more than the [0-9]+ bytes"):
            from_zarr(f"{web.url}/x.zarr")
        assert web.sent <= SLACK
