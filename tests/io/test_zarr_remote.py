"""Zarr groups at URLs: read and written in their place, found by `load`, and networks that fail."""

from __future__ import annotations

import json
import pathlib
import pickle
from typing import Any

import pytest
import torch
from remote_server import DROP, FAIL, REFUSE, SHORT, Fault, Proxy

from tensordict import PersistentTensorDict, TensorDict, from_zarr, lazy_stack, load, verify
from tensordict.core.exceptions import SaveError
from tensordict.io.formats.opening import describe_save
from tensordict.io.remote.urls import Remote
from tensordict_cli.runners import main

pytest.importorskip("zarr", minversion="3")

from zarr.storage import MemoryStore

Bucket = tuple[str, Proxy, dict[str, Any]]


def make(value: int = 0) -> TensorDict:
    td = TensorDict(
        {"a": torch.arange(1000.0).view(100, 10) + value, "b": {"c": torch.arange(100), "word": "text"}}, [100]
    )
    td["name a/b%20"] = torch.full((100,), value)
    return td


def same(one: Any, other: TensorDict) -> bool:
    return bool((one.to_tensordict() == other).all()) and one.batch_size == other.batch_size


def test_what_is_saved_is_loaded(base: str) -> None:
    url = f"{base}/x.zarr"
    openings: list[Any] = [from_zarr, load, verify, describe_save]
    for opening in openings:
        with pytest.raises(FileNotFoundError, match=base):
            opening(url)
    with make().to_zarr(url, chunks=10) as data:
        data[3:5] = make(7)[3:5]
        data["z"] = torch.ones(100, 2)
        del data["b", "c"]
    expected = make()
    expected[3:5] = make(7)[3:5]
    expected["z"] = torch.ones(100, 2)
    del expected["b", "c"]
    opened = load(url)
    assert type(opened) is PersistentTensorDict and same(opened, expected) and opened["b", "word"] == "text"
    assert list(opened.keys()) == list(expected.keys())
    with load(url, mode="r+") as opened:
        opened["a"].zero_()
        opened["a"] = torch.ones(100, 10)
    assert load(url)["a"].sum() == 1000
    assert verify(url).ok and verify(url).leaves == 3 and describe_save(url)[0] == "zarr"
    with pytest.raises(SaveError, match=f"{url}.*overwrite=True"):
        make().to_zarr(url)
    make(9).to_zarr(url, overwrite=True)
    assert load(url)["a"][0, 0] == 9
    with pytest.raises(ValueError, match=f"{url}.*keys"):
        load(url, keys=["a"])


def test_commands(base: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    make().save(tmp_path / "local")
    assert main(["convert", str(tmp_path / "local"), f"{base}/x.zarr"]) == 0
    assert main(["convert", f"{base}/x.zarr", str(tmp_path / "back.zarr")]) == 0
    assert main(["diff", f"{base}/x.zarr", str(tmp_path / "back.zarr")]) == 0
    assert main(["verify", f"{base}/x.zarr"]) == 0
    assert "zarr, 3 tensors" in capsys.readouterr().out
    assert main(["inspect", "--json", f"{base}/x.zarr"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == f"{base}/x.zarr" and found["bytes_on_disk"] > 4000
    assert main(["convert", str(tmp_path / "local"), f"{base}/x.zarr"]) == 2
    assert "exists already; use --force" in capsys.readouterr().err


def test_options_go_to_the_server(bucket: Bucket) -> None:
    url, _, options = bucket
    make().to_zarr(f"{url}/x.zarr", storage_options=options).close()
    opened = from_zarr(f"{url}/x.zarr", storage_options=options)
    with pytest.raises(pickle.PicklingError, match="'key', 'secret'.*allow_secrets"):
        pickle.dumps(opened)
    allowed = from_zarr(f"{url}/x.zarr", storage_options={**options, "allow_secrets": True})
    assert same(pickle.loads(pickle.dumps(allowed)), make()) and same(opened, make())
    assert same(load(f"{url}/x.zarr", storage_options=options), make())
    assert verify(f"{url}/x.zarr", storage_options=options).ok
    where: dict[str, Any] = {"filename": f"{url}/x.zarr", "backend": "zarr", "storage_options": options}
    with PersistentTensorDict(**where, mode="r+", chunks=10) as data:
        data["w"] = torch.ones(100)
        copy = data.clone(newfile=f"{url}/y.zarr", storage_options=options)
        assert same(copy, data.to_tensordict())
    with pytest.raises(SaveError, match=r"s3:.*local file"):
        PersistentTensorDict(filename=f"{url}/x.h5", storage_options=options)


def test_only_the_chunks_asked_for_are_fetched(bucket: Bucket) -> None:
    url, proxy, options = bucket
    make().to_zarr(f"{url}/x.zarr", storage_options=options, chunks=10).close()
    data = load(f"{url}/x.zarr", storage_options=options)
    proxy.clear()
    assert data[35]["a"].tolist() == make()[35]["a"].tolist()
    assert proxy.count("GET", "/x.zarr/a/c/") == 1 and proxy.fetched("/a/c/") == 10 * 40


@pytest.mark.parametrize("kind", [DROP, SHORT])
def test_a_bad_network(bucket: Bucket, kind: str) -> None:
    url, proxy, options = bucket
    proxy.faults.append(Fault(FAIL, "PUT", times=2))
    make().to_zarr(f"{url}/x.zarr", storage_options=options).close()
    proxy.faults.extend([Fault(kind, "GET", path, times=1) for path in ("/zarr.json", "/a/c/0")])
    assert same(load(f"{url}/x.zarr", storage_options=options), make())
    proxy.clear()
    data = load(f"{url}/x.zarr", storage_options=options)
    proxy.faults.append(Fault(kind, "GET", "/a/c/0", times=100))
    with pytest.raises(SaveError, match=f"'a'.*{url}/x.zarr"):
        data["a"]
    proxy.clear()
    proxy.faults.append(Fault(kind, "GET", "x.zarr", times=100))
    with pytest.raises(SaveError, match=f"{url}/x.zarr"):
        from_zarr(f"{url}/x.zarr", storage_options=options)


def test_a_save_that_fails_leaves_no_group(bucket: Bucket) -> None:
    url, proxy, options = bucket
    proxy.faults.append(Fault(REFUSE, "PUT", "/b/c/c", times=100))
    with pytest.raises(PermissionError, match=f"{url}/x.zarr"):
        make().to_zarr(f"{url}/x.zarr", storage_options=options)
    proxy.clear()
    with pytest.raises(FileNotFoundError):
        load(f"{url}/x.zarr", storage_options=options)
    assert not Remote(url, options).files()


def test_an_object_that_was_cut_off_is_named(bucket: Bucket) -> None:
    url, _, options = bucket
    make().to_zarr(f"{url}/x.zarr", storage_options=options).close()
    store = Remote(f"{url}/x.zarr", options)
    store.put("a/c/0/0", store.read("a/c/0/0")[:1000])
    data = load(f"{url}/x.zarr", storage_options=options)
    with pytest.raises(SaveError, match=f"'a'.*{url}/x.zarr"):
        data["a"]
    store.put("b/c/zarr.json", b'{"node_type": ')
    report = verify(f"{url}/x.zarr", raises=False, storage_options=options)
    assert not report.ok and "('b', 'c')" in report.problems[0] and url in report.problems[0]


@pytest.mark.parametrize("many", [0, 13])
def test_http(bucket: Bucket, many: int) -> None:
    url, proxy, options = bucket
    td = make()
    for number in range(many):
        td[f"k{number}"] = torch.full((100,), number)
    public = {**options, "s3_additional_kwargs": {"ACL": "public-read"}}
    td.to_zarr(f"{url}/x.zarr", storage_options=public).close()
    store = Remote(url, options)
    store._fs.chmod(store._root, acl="public-read")
    web = f"{proxy.url}/{url.removeprefix('s3://')}/x.zarr"
    assert same(load(web), td)
    assert verify(web).ok and verify(web).leaves == 3 + many
    for write in (lambda: from_zarr(web, mode="r+"), lambda: td.to_zarr(web)):
        with pytest.raises(SaveError, match=f"{web}.*servers of HTTP"):
            write()


def test_stores_of_obstore(bucket: Bucket) -> None:
    obstore = pytest.importorskip("obstore.store")
    from zarr.storage import ObjectStore

    url, _, options = bucket
    server = {
        "endpoint": options["endpoint_url"],
        "access_key_id": options["key"],
        "secret_access_key": options["secret"],
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    store = ObjectStore(obstore.from_url(f"{url}/x.zarr", **server))
    make().to_zarr(store, chunks=50).close()
    opened = from_zarr(store)
    assert same(opened, make()) and opened[95]["b", "c"] == 95
    assert same(pickle.loads(pickle.dumps(opened)), make())
    with from_zarr(store, mode="r+") as data:
        data["z"] = torch.ones(100)
    assert load(f"{url}/x.zarr", storage_options=options)["z"].sum() == 100


def test_a_group_is_not_saved_over_itself(base: str) -> None:
    """The old group is deleted first, so that nothing would be left to read."""
    url = f"{base}/x.zarr"
    make(1).to_zarr(url).close()
    nested = TensorDict({"inner": load(url)}, [100])
    for data in (load(url), nested, load(url).select("a"), lazy_stack([load(url), load(url)])):
        with pytest.raises(SaveError, match=rf"'a'.* {url}.*to_tensordict\(\)"):
            data.to_zarr(url, overwrite=True)
    assert same(load(url), make(1)) and verify(url).ok
    load(url).to_tensordict().to_zarr(url, overwrite=True)
    assert same(load(url), make(1))
    store = MemoryStore()
    make(1).to_zarr(store).close()
    with pytest.raises(SaveError, match="to_tensordict"):
        from_zarr(store).to_zarr(store, overwrite=True)
    assert same(from_zarr(store), make(1))
