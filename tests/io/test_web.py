"""Servers of HTTP and S3 that send more than was asked for, and redirects that lead elsewhere."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from remote_server import Proxy
from web_server import ENDLESS, Web, web_server

from tensordict import RemoteCache, TensorDict, load
from tensordict.core.exceptions import SaveError
from tensordict.io.remote.urls import Remote

pytest.importorskip("aiohttp")
CONTENT = bytes(range(256)) * 8
# Bytes that buffers may hold when a client hangs up; the answer has 200 MiB.
SLACK = 32 << 20


@pytest.fixture(autouse=True)
def attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensordict.io.remote.urls._FIRST_DELAY", 0.01)
    monkeypatch.setenv("TENSORDICT_REMOTE_ATTEMPTS", "2")


@pytest.fixture
def web() -> Iterator[Web]:
    """A server with the file `/a`."""
    with web_server() as found:
        found.files["/a"] = CONTENT
        yield found


@pytest.fixture
def other() -> Iterator[Web]:
    """A server with a file `/a` on another address of this machine."""
    with web_server("127.0.0.2") as found:
        found.files["/a"] = CONTENT
        yield found


# --- how much is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["length", "chunks"])
@pytest.mark.parametrize("part", [(0, 100), (5, 100), (-100, None), (0, None)])
def test_an_answer_without_end_is_not_read(web: Web, lie: str, part: tuple[int, int | None]) -> None:
    store = Remote(web.url)
    assert store.read("a", *part) == CONTENT[slice(*part)]
    web.lie = lie
    with pytest.raises(SaveError, match=f"cannot read '{web.url}/a': the server sends more than the [0-9]+ bytes"):
        store.read("a", *part)
    assert web.sent <= SLACK < ENDLESS


def test_a_load_ends_where_a_server_does_not(web: Web, tmp_path: pathlib.Path) -> None:
    TensorDict(a=torch.arange(1000)).save(str(tmp_path / "x.tdz"))
    web.files["/x.tdz"] = (tmp_path / "x.tdz").read_bytes()
    assert load(f"{web.url}/x.tdz")["a"].sum() == 499500
    web.lie = "chunks"
    for cache in (None, RemoteCache(tmp_path / "cache")):
        with pytest.raises(SaveError, match=rf"{web.url}/x\.tdz.*sends more than"):
            load(f"{web.url}/x.tdz", cache_dir=cache)
    assert web.sent <= SLACK


@pytest.mark.parametrize("lie", ["ignore", "other"])
def test_another_part_of_a_file_is_refused(web: Web, lie: str) -> None:
    store = Remote(web.url)
    web.lie = lie
    with pytest.raises(SaveError, match=r"begins at byte 0, and byte 5 was asked for"):
        store.read("a", 5, len(CONTENT))
    # From the first byte on, the two are the same.
    assert store.read("a") == store.read("a", 0, len(CONTENT)) == CONTENT


def test_an_object_of_s3_without_end_is_not_read(bucket: tuple[str, Proxy, dict[str, Any]], web: Web) -> None:
    url, _, options = bucket
    name = url.removeprefix("s3://")
    web.files[f"/{name}/a"] = CONTENT
    store = Remote(url, {**options, "endpoint_url": web.url})
    assert store.read("a", 3, 50) == CONTENT[3:50]
    for lie in ("length", "chunks"):
        web.lie = lie
        with pytest.raises(SaveError, match=f"cannot read '{url}/a'.* 48 bytes came .* where 47 were asked for"):
            store.read("a", 3, 50)
    assert web.sent <= SLACK


def test_an_object_of_gcs_without_end_is_not_read(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    # Read when it is imported: else it asks by gRPC what kind of bucket this is.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    web.files["/download/storage/v1/b/some/o/a"] = web.files["/storage/v1/b/some/o/a"] = CONTENT
    store = Remote("gs://some", {"endpoint_url": web.url, "token": "anon", "project": "test"})
    assert store.read("a", 3, 50) == CONTENT[3:50]
    web.lie = "chunks"
    with pytest.raises(SaveError, match="cannot read 'gs://some/a'.*sends more than the 47 bytes"):
        store.read("a", 3, 50)
    assert web.sent <= SLACK


def test_what_becomes_longer_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Remote("memory://longer")
    store.put("a", CONTENT)
    look, looks = store._look, []

    def grown(name: str) -> Any:
        found = look(name)
        if not looks:
            store.put("a", CONTENT * 2)
        looks.append(found)
        return found

    monkeypatch.setattr(store, "_look", grown)
    assert store.read("a") == CONTENT * 2 and len(looks) == 2


# --- redirects --------------------------------------------------------------------------------------------------------


def test_redirects_on_the_same_host_are_followed(web: Web) -> None:
    web.redirects = {"/old": "/a", "/older": f"{web.url}/old"}
    for name in ("old", "older"):
        assert Remote(web.url).read(name) == CONTENT


def test_redirects_to_another_host_are_followed_where_it_is_named(
    web: Web, other: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.redirects = {"/old": f"{other.url}/a?token=hidden"}
    for call in (Remote(web.url).find, Remote(web.url).read, lambda name: Remote(web.url).read(name, 2, 5)):
        with pytest.raises(SaveError, match=r"another host, 'http://127.0.0.2:[0-9]+/a\?token=\*\*\*'.*redirect_hosts"):
            call("old")
    assert other.asked == []
    for hosts in (["127.0.0.2"], [f"127.0.0.2:{other.port}"], "127.0.0.2"):
        assert Remote(web.url, {"redirect_hosts": hosts}).read("old") == CONTENT
    with pytest.raises(SaveError, match="another host"):
        Remote(web.url, {"redirect_hosts": ["127.0.0.2:1", "example.org"]}).read("old")
    monkeypatch.setenv("TENSORDICT_REDIRECT_HOSTS", "example.org, 127.0.0.2")
    assert Remote(web.url).read("old") == CONTENT


def test_another_port_is_another_host(web: Web) -> None:
    with web_server() as service:
        service.files["/a"] = CONTENT
        web.redirects = {"/old": f"{service.url}/a"}
        with pytest.raises(SaveError, match="another host"):
            Remote(web.url).read("old")
        assert service.asked == []
        named = Remote(web.url, {"redirect_hosts": [f"127.0.0.1:{service.port}"]})
        assert named.read("old") == CONTENT


def test_a_password_does_not_go_to_another_host(web: Web, other: Web) -> None:
    web.login, web.redirects = "me:secret word", {"/old": f"{other.url}/a"}
    url = web.url.replace("//", "//me:secret%20word@")
    assert Remote(url, {"redirect_hosts": ["127.0.0.2"]}).read("old") == CONTENT
    assert other.asked and all("Authorization" not in headers for _, _, headers in other.asked)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_redirects_from_a_public_address_stay_on_public_ones(
    web: Web, other: Web, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.redirects = {"/old": f"http://{host}:{web.port}/a", "/same": "/a"}
    # From one private address to another; the name is looked up.
    options = {"redirect_hosts": [host]}
    assert Remote(other.url, options).read("old") == CONTENT
    web.asked.clear()
    monkeypatch.setattr("tensordict.io.remote.web.is_public", lambda address: address == "127.0.0.2")
    with pytest.raises(SaveError, match=f"redirect leads to '{host}' at 127.0.0.1, which is no public address"):
        Remote(other.url, options).read("old")
    assert web.asked == []
    assert Remote(other.url, options).read("same") == CONTENT
    # A path that the caller names is read wherever it lies.
    assert Remote(web.url, options).read("a") == CONTENT


def test_public_addresses() -> None:
    from tensordict.io.remote.web import is_public

    private = "127.0.0.1 10.1.2.3 192.168.0.1 172.16.0.1 169.254.169.254 0.0.0.0 100.64.0.1 ::1 fe80::1%eth0 fc00::1"
    assert not any(map(is_public, [*private.split(), "::ffff:127.0.0.1", "::ffff:169.254.169.254"]))
    assert all(map(is_public, ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"]))


def test_encryption_is_not_given_up() -> None:
    import yarl

    from tensordict.io.remote.web import _check_redirect

    secure, open_one = yarl.URL("https://example.org/a"), yarl.URL("http://example.org/a")
    _check_redirect(open_one, secure, ())
    with pytest.raises(SaveError, match="without encryption"):
        _check_redirect(secure, open_one, ("example.org",))
    for target in ("file:///etc/passwd", "https://example.org:8443/a", "https://example.org.evil.net/a"):
        with pytest.raises(SaveError, match="another host|without encryption"):
            _check_redirect(secure, yarl.URL(target), ())
