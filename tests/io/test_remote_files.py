"""Files behind URLs: what is there, ranges, uploads, and networks that fail."""

from __future__ import annotations

import pathlib
import pickle
import re
import sys
import threading
import uuid
from typing import Any

import pytest
from remote_server import DROP, FAIL, REFUSE, SHORT, SLOW, Fault, Proxy

from tensordict.core.exceptions import SaveError
from tensordict.io.remote.urls import Remote, is_url

Bucket = tuple[str, Proxy, dict[str, Any]]
CONTENT = bytes(range(256)) * 40
UPLOAD = re.compile("uploadId=([^&]+)")


@pytest.fixture(params=["memory", "s3", "gs", "file"])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Remote:
    if request.param == "file":
        return Remote(f"file://{tmp_path}/below")
    if request.param == "memory":
        return Remote(f"memory://{uuid.uuid4().hex}")
    url, _, options = request.getfixturevalue("bucket" if request.param == "s3" else "gcs_bucket")
    return Remote(f"{url}/below", options)


def test_files(store: Remote, tmp_path: pathlib.Path) -> None:
    names = ["a", "b/meta.json", "b/c[0]%2F*.memmap", "b/x y.memmap"]
    for name in names[:-1]:
        store.put(name, CONTENT)
    (tmp_path / "local").write_bytes(CONTENT[:300])
    store.put(names[-1], str(tmp_path / "local"))
    assert [(file.name, file.size) for file in store.files()] == [
        ("a", len(CONTENT)),
        ("b/c[0]%2F*.memmap", len(CONTENT)),
        ("b/meta.json", len(CONTENT)),
        ("b/x y.memmap", 300),
    ]
    assert [store.find(name) for name in sorted(names)] == store.files()
    assert [file.name for file in store.files("b")] == sorted(names[1:])
    assert store.find("b") is None and store.find() is None and store.find("missing") is None
    assert store.files("missing") == []
    assert store.read("a") == CONTENT and store.read("a", -3) == CONTENT[-3:] and store.read("a", 5, 9) == CONTENT[5:9]
    assert store.read("a", 5, 5) == b"" and store.read("a", 5) == CONTENT[5:]
    store.delete(["b/c[0]%2F*.memmap", "missing"])
    assert [file.name for file in store.files("b")] == ["b/meta.json", "b/x y.memmap"]
    allowed = Remote(store.url, {**store.storage_options, "allow_secrets": True})
    assert pickle.loads(pickle.dumps(allowed)).read("a") == CONTENT


def test_the_tag_is_that_of_the_content(store: Remote) -> None:
    store.put("a", b"old content")
    before = store.find("a")
    assert before == store.find("a") == store.files()[0]
    store.put("a", b"new content")
    assert before != store.find("a") and store.read("a") == b"new content"


def test_new_files_replace_nothing(store: Remote) -> None:
    store.put("claim", b"me", new=True)
    with pytest.raises(FileExistsError, match=r"below/claim|/claim"):
        store.put("claim", b"somebody else", new=True)
    # The answer to the first one may have been lost.
    store.put("claim", b"me", new=True)
    assert store.read("claim") == b"me"


def test_one_of_many_makes_a_new_file(bucket: Bucket) -> None:
    url, _, options = bucket
    store = Remote(url, options)
    won: list[int] = []

    def claim(number: int) -> None:
        try:
            store.put("claim", str(number).encode(), new=True)
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and store.read("claim") == str(won[0]).encode()


@pytest.mark.parametrize("kind", [DROP, FAIL, SLOW, SHORT])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_what_passes_is_tried_again(bucket: Bucket, method: str, kind: str) -> None:
    url, proxy, options = bucket
    store = Remote(url, options)
    store.put("a", CONTENT)
    proxy.faults = [Fault(kind, method, times=2)]
    if method == "GET":
        assert store.read("a", 1, 5000) == CONTENT[1:5000]
    elif method == "HEAD":
        found = store.find("a")
        assert found is not None and found.size == len(CONTENT)
    else:
        store.put("a", CONTENT[::-1])
        assert store.read("a") == CONTENT[::-1]


@pytest.mark.parametrize("kind", [DROP, FAIL, SHORT])
def test_what_does_not_pass_is_an_error_that_names_the_url(bucket: Bucket, kind: str) -> None:
    url, proxy, options = bucket
    store = Remote(url, options)
    store.put("x/a", CONTENT)
    proxy.clear()
    proxy.faults = [Fault(kind, times=100)]
    with pytest.raises(SaveError, match=f"cannot read '{url}/x/a' after 3 attempts"):
        store.read("x/a", 0, 100)
    assert proxy.count("GET") == 3


def test_what_is_final_is_tried_once(bucket: Bucket) -> None:
    url, proxy, options = bucket
    store = Remote(url, options)
    store.put("a", CONTENT)
    proxy.clear()
    with pytest.raises(FileNotFoundError, match=f"{url}/missing"):
        store.read("missing")
    proxy.faults = [Fault(REFUSE, times=100)]
    with pytest.raises(PermissionError, match=f"{url}/a"):
        store.read("a")
    # A missing object is asked for without its content.
    assert proxy.count("HEAD") == 2 and proxy.count("GET") == 1
    proxy.clear()
    with pytest.raises(SaveError, match="10 bytes from byte 10230 on, where 20 should be"):
        store.read("a", 10230, 10250)


def test_parts_of_an_upload_that_fails_are_given_up(
    bucket: Bucket, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda *args, **kwargs: 5 << 20)
    url, proxy, options = bucket
    store = Remote(url, options)
    store.put("a", b"old")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(11 << 20)
    proxy.faults = [Fault(FAIL, "PUT", "partNumber=2", times=100)]
    with pytest.raises(SaveError, match=f"cannot upload '{url}/a'"):
        store.put("a", str(tmp_path / "large"))
    assert store.read("a") == b"old"
    assert proxy.count("POST", "uploads") == proxy.count("DELETE", "uploadId=") == 3
    proxy.clear()
    store.put("a", str(tmp_path / "large"))
    # A part of an upload that was given up may arrive late: it is of another upload.
    (upload,) = {found[1] for method, path, _ in proxy.requests if method == "POST" and (found := UPLOAD.search(path))}
    assert proxy.count("PUT", f"uploadId={upload}") == 3 and store.find("a").size == 11 << 20  # type: ignore[union-attr]


def test_http(bucket: Bucket) -> None:
    url, proxy, options = bucket
    name = "a b%2F[0]"
    private = Remote(url, options)
    private.put(name, CONTENT)
    store = Remote(url.replace("s3:/", proxy.url))
    for call in (store.find, store.read):
        with pytest.raises(PermissionError, match=proxy.url):
            call(name)
    private._fs.chmod(private._path(name), acl="public-read")
    found = store.find(name)
    assert found is not None and found.size == len(CONTENT)
    assert store.read(name, 3, 700) == CONTENT[3:700]
    for kind in (FAIL, DROP):
        proxy.faults = [Fault(kind, "HEAD", times=1), Fault(kind, "GET", times=1)]
        assert store.find(name) == found
        assert store.read(name, 3, 700) == CONTENT[3:700]
    with pytest.raises(SaveError, match="cannot be listed"):
        store.files()
    with pytest.raises(SaveError, match="cannot upload.*not written to"):
        store.put("a", b"")


def test_what_is_missing_is_said() -> None:
    assert (
        is_url("s3://x") and is_url("HTTPS://x") and not is_url("file:///x") and not is_url("x:/y") and not is_url(None)
    )
    with pytest.raises(SaveError, match="'odd://x' cannot be reached.*odd"):
        Remote("odd://x")


@pytest.mark.parametrize(("url", "library", "extra"), [("s3://b/x", "s3fs", "s3"), ("gs://b/x", "gcsfs", "gcs")])
def test_the_extra_of_a_scheme_is_named(url: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.delitem(registry._registry, url.partition(":")[0], raising=False)  # an earlier test may have used it
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"'{url}' cannot be reached.*{library}.*tensordict\[{extra}\]'"):
        Remote(url)


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    real = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("fsspec"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="fsspec")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensordict\[remote\]'"):
        Remote("s3://bucket/x")
