"""Fixtures of tests of URLs: one S3 server for all tests, and a bucket for each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from remote_server import Proxy, gcs_options_of, gcs_server, new_bucket, new_gcs_bucket, options_of, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[Proxy]:
    """A server of S3 behind a proxy, for the whole session."""
    pytest.importorskip("s3fs")
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def bucket(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy, dict[str, Any]]]:
    """The URL of a new bucket, the proxy before its server, and the options to reach it; 3 attempts are made."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr("tensordict.io.remote.urls._FIRST_DELAY", 0.01)
    monkeypatch.setenv("TENSORDICT_REMOTE_ATTEMPTS", "3")
    name = new_bucket(s3)
    s3.clear()
    yield f"s3://{name}", s3, options_of(s3)
    s3.clear()
    s3.before = None


@pytest.fixture(scope="session")
def gcs() -> Iterator[Proxy]:
    """A server of GCS behind a proxy, for the whole session."""
    with pytest.MonkeyPatch.context() as patch:
        # gcsfs would ask by gRPC what kind of bucket it is, which this server does not know.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs")
        with gcs_server() as proxy:
            yield proxy


@pytest.fixture
def gcs_bucket(gcs: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy, dict[str, Any]]]:
    """As `bucket`, of GCS."""
    monkeypatch.setattr("tensordict.io.remote.urls._FIRST_DELAY", 0.01)
    monkeypatch.setenv("TENSORDICT_REMOTE_ATTEMPTS", "3")
    name = new_gcs_bucket(gcs)
    gcs.clear()
    yield f"gs://{name}", gcs, gcs_options_of(gcs)
    gcs.clear()


@pytest.fixture(params=["memory", "s3", "gs"])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty folder that can be reached without options."""
    import fsspec.config

    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    url, _, options = request.getfixturevalue("bucket" if request.param == "s3" else "gcs_bucket")
    # As `FSSPEC_S3_ENDPOINT_URL` and its like do for a process that starts with them.
    monkeypatch.setitem(fsspec.config.conf, request.param, options)
    return f"{url}/some where"
