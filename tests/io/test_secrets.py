"""Passwords, signatures and keys appear in no output, no file and no pickle."""

from __future__ import annotations

import copy
import io
import json
import logging
import multiprocessing
import pathlib
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from remote_server import Proxy
from torch.utils.data import DataLoader
from web_server import Web, web_server

from tensordict import DatasetWriter, TensorDict, from_csv, from_h5, load, open_dataset, verify
from tensordict.core.exceptions import SaveError
from tensordict.core.logs import logger
from tensordict.core.redaction import redact, redact_options, secrets_of_options
from tensordict.io.formats.opening import describe_save
from tensordict.io.remote.credentials import GuardedOptions, as_url
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import Remote
from tensordict_cli.runners import main

pytest.importorskip("aiohttp")
Bucket = tuple[str, Proxy, dict[str, Any]]
PASSWORD, SIGNATURE = "pass word/7", "5f2ac0ffee"
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def web(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A server with the archive `/x.tdz`, the folder `/x` and the HDF5 file `/x.h5`."""
    monkeypatch.setattr("tensordict.io.remote.urls._FIRST_DELAY", 0.01)
    monkeypatch.setenv("TENSORDICT_REMOTE_ATTEMPTS", "2")
    td = TensorDict(a=torch.arange(1000), b=TensorDict(c=torch.ones(3)))
    td.save(str(tmp_path / "save/x.tdz"))
    td.save(str(tmp_path / "save/x"))
    with web_server() as found:
        for path in (tmp_path / "save").rglob("*"):
            if path.is_file():
                found.files[f"/{path.relative_to(tmp_path / 'save')}"] = path.read_bytes()
        yield found


def with_password(web: Web, name: str) -> str:
    """A URL with a user and a password, which the server asks for."""
    web.login = f"me:{PASSWORD}"
    return f"http://me:{PASSWORD.replace(' ', '%20').replace('/', '%2F')}@{web.host}:{web.port}/{name}"


def presigned(web: Web, name: str) -> str:
    """A URL with the signature that the server asks for."""
    web.query = f"X-Amz-Signature={SIGNATURE}"
    return f"{web.url}/{name}?X-Amz-Expires=60&X-Amz-Credential=AKIAME%2F2026&{web.query}"


def refuse_secrets(text: str) -> None:
    """Fail where a text has a secret of these tests, encoded or not."""
    for secret in (PASSWORD, PASSWORD.replace(" ", "%20"), "pass%20word", "pass word", SIGNATURE, "AKIAME"):
        assert secret not in text


def messages(error: BaseException) -> str:
    """All that an error of ours says; what libraries say below it is theirs."""
    return "".join(traceback.format_exception_only(error)) + repr(error) + repr(error.args) + str(vars(error))


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:pw@host:80/a@b?x=1", "http://***@host:80/a@b?x=1"),
        ("https://token@host/a", "https://***@host/a"),
        ("http://u:p@ss@host", "http://***@host"),
        ("redis://:pw@host:6379/0", "redis://***@host:6379/0"),
        ("s3://AKIA:se/cr+et@bucket/key", "s3://***@bucket/key"),
        ("ftp://me:pw@host/a", "ftp://***@host/a"),
        ("https://h/a?X-Amz-Security-Token=t&X-Amz-Signature=s&n=1", "https://h/a?X-Amz-Security-Token=***&X-Amz-Signature=***&n=1"),
        ("https://h/a?sv=2020&sig=abc%3D&se=2026", "https://h/a?sv=2020&sig=***&se=2026"),
        ("https://h/a?Signature=s&AWSAccessKeyId=k&Expires=1", "https://h/a?Signature=***&AWSAccessKeyId=***&Expires=1"),
        ("https://h/a?access_token=x#token=y", "https://h/a?access_token=***#token=***"),
        ("https://h/a?x-goog-signature=s&api_key=k&password=p", "https://h/a?x-goog-signature=***&api_key=***&password=***"),
    ],
)  # fmt: skip
def test_secrets_are_taken_out_of_urls(url: str, shown: str) -> None:
    assert redact(url) == shown == str(as_url(url)) == f"{as_url(url)}"
    assert redact(f"cannot read '{url}', or {url} (x)") == f"cannot read '{shown}', or {shown} (x)"
    assert repr(as_url(url)) == repr(shown) and json.loads(json.dumps(as_url(url))) == shown
    assert copy.deepcopy(as_url(url)).with_secrets == url  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b:c", "http://host:80/a@b", "http://[::1]:80/a@b", "abfss://box@account.net/a", "http://h/a?author=me&page=2",
        "memory://a/b", "hdfs://me@host/a", "https://h/a?versionId=3&keys=4", "/local/file?token=5", "file?key=5",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(url: str) -> None:
    assert type(as_url(url)) is str and as_url(url) == url


def test_which_options_are_secrets() -> None:
    options: dict[str, Any] = {
        "key": "k", "secret": "s", "token": "t", "anon": False, "profile": "me", "endpoint_url": "http://host",
        "client_kwargs": {"aws_session_token": "x", "region_name": "eu"}, "account_key": "a", "connection_string": "c",
        "client_secret": "d", "sas_token": "e", "headers": {"Authorization": "Bearer f", "Accept": "*/*"},
        "proxy": "http://me:pw@host", "config_kwargs": {"retries": {"mode": "standard"}}, "auth": ("me", "pw"),
    }  # fmt: skip
    found = {"key", "secret", "token", "client_kwargs.aws_session_token", "account_key", "connection_string"}
    found |= {"client_secret", "sas_token", "headers.Authorization", "proxy", "auth"}
    assert set(secrets_of_options(options)) == found
    shown = redact_options(options)
    assert shown["client_kwargs"] == {"aws_session_token": "***", "region_name": "eu"} and shown["anon"] is False
    assert repr(GuardedOptions(options)) == repr(shown)
    for way in ("anon", "google_default", "/home/me/key.json", "~/key.json"):
        assert secrets_of_options({"token": way}) == {}


# --- what is shown and written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_url", [with_password, presigned])
def test_what_is_at_a_url_with_a_secret_is_read(web: Web, make_url: Any, tmp_path: pathlib.Path) -> None:
    for name in ("x.tdz", "x"):
        url = make_url(web, name)
        for cache in (None, tmp_path / "cache"):
            td = load(url, cache_dir=cache)
            assert td["a"].sum() == 499500 and td["b", "c"].sum() == 3
    assert verify(make_url(web, "x.tdz")).ok and describe_save(make_url(web, "x.tdz"))[0] == "archive"
    for path in (tmp_path / "cache").glob("*.json"):
        refuse_secrets(path.read_text())
        assert "***" in json.loads(path.read_text())["url"]


@pytest.mark.parametrize("make_url", [with_password, presigned])
def test_errors_show_no_secret(web: Web, make_url: Any, tmp_path: pathlib.Path) -> None:
    web.files["/bad.tdz"], web.files["/bad.csv"] = b"no archive at all" * 10, b"a,b\n1\n"
    calls: list[Any] = [load, verify, describe_save, from_h5, from_csv, open_dataset]
    texts = []
    for name in ("bad.tdz", "bad.csv", "missing", "missing.h5"):
        for call in calls:
            with pytest.raises((OSError, ValueError)) as caught:
                call(make_url(web, name))
            texts.append(messages(caught.value))
    url = make_url(web, "x.tdz")
    writes: list[Any] = [TensorDict(a=torch.ones(1)).save, TensorDict(a=torch.ones(1)).to_h5, TensorDict().memmap_]
    for call in (*writes, lambda url: load(url, mode="r+"), lambda url: from_h5(url, mode="r+"), DatasetWriter):
        with pytest.raises((OSError, ValueError)) as caught:
            call(url).extend(TensorDict(a=torch.ones(1, 1), batch_size=[1]))
        texts.append(messages(caught.value))
    # Refused, failing, and answering what was not asked.
    web.login, web.query = "other:login", "other"
    with pytest.raises(PermissionError) as refused:
        Remote(url).read("a", 0, 5)
    web.login, web.query, web.lie = "", "", "chunks"
    with pytest.raises(SaveError) as lied:
        Remote(url).read("", 0, 5)
    for text in (*texts, messages(refused.value), messages(lied.value)):
        refuse_secrets(text)
    assert sum("***@" in text or "=***" in text for text in texts) > len(texts) // 2


def test_what_libraries_say_is_shown_without_secrets(bucket: Bucket) -> None:
    url, _, options = bucket
    store = Remote(url, {**options, "key": "AKIAME", "secret": SIGNATURE})
    for text in (f"the key {SIGNATURE} of AKIAME", f"{url}?x=1&X-Amz-Signature={SIGNATURE}"):
        refuse_secrets(store.redact(text))
    for shown in (repr(store.storage_options), repr(Access.of(store.storage_options)), str(store.storage_options)):
        refuse_secrets(shown)
        assert "'secret': '***'" in shown


@pytest.mark.parametrize("make_url", [with_password, presigned])
def test_logs_and_reports_show_no_secret(web: Web, make_url: Any, tmp_path: pathlib.Path) -> None:
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        load(make_url(web, "x.tdz"), cache_dir=tmp_path / "cache")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert "fetched" in told.getvalue()
    refuse_secrets(told.getvalue())
    web.files["/cut.tdz"] = web.files["/x.tdz"][:-30]
    report = verify(make_url(web, "cut.tdz"), raises=False)
    assert not report.ok
    refuse_secrets(repr(report) + report.path)


@pytest.mark.parametrize("make_url", [with_password, presigned])
def test_commands_show_no_secret(
    web: Web, make_url: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, target = make_url(web, "x.tdz"), str(tmp_path / "copy.tdz")
    assert main(["inspect", url]) == main(["inspect", "--json", url]) == main(["verify", url]) == 0
    assert main(["convert", url, target]) == main(["diff", url, target]) == 0
    assert main(["verify", make_url(web, "missing")]) == main(["convert", target, url]) == 2
    shown = capsys.readouterr()
    refuse_secrets(shown.out + shown.err)
    assert "***" in shown.out and "***" in shown.err


def test_a_cache_tells_queries_apart_and_knows_no_password() -> None:
    """A parameter that looks like a secret may name the file."""
    first, other = (Remote(f"http://me:pw@host/a?key={key}").identity_of("") for key in (1, 2))
    assert first != other and "pw" not in first + other
    assert first == Remote("http://you:other@host/a?key=1").identity_of("")


@pytest.mark.parametrize("where", ["options", "configuration"])
def test_options_of_the_caller_stay_beside_ours(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    given = {"headers": {"X-Part": "1"}}, {"session_kwargs": {"trust_env": True}, "token": "anon"}
    if where == "configuration":
        monkeypatch.setitem(fsspec.config.conf, "http", given[0])
        monkeypatch.setitem(fsspec.config.conf, "gs", given[1])
        given = {}, {"token": "anon"}  # type: ignore[assignment]
    headers = Remote("http://me:pw@host/a", given[0]).for_fsspec()[1]["headers"]
    assert headers["X-Part"] == "1" and headers["Authorization"].startswith("Basic ")
    pytest.importorskip("gcsfs")
    session = Remote("gs://box", given[1]).for_fsspec()[1]["session_kwargs"]
    assert session["trust_env"] is True and "response_class" in session


def test_a_url_whose_secret_was_left_out_says_so() -> None:
    for url in ("http://***@host/x", "http://host/x?sig=***"):
        with pytest.raises(SaveError, match="were left out.*give the whole URL"):
            Remote(url)


# --- pickles ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(bucket: Bucket) -> tuple[str, dict[str, Any]]:
    """The URL and the options of a data set of 12 rows."""
    url, _, options = bucket
    options = {**options, "key": "AKIAME", "secret": SIGNATURE}
    with DatasetWriter(f"{url}/rows", rows_per_shard=4, storage_options=options) as writer:
        writer.extend(TensorDict(x=torch.arange(12), batch_size=[12]))
    return f"{url}/rows", options


def test_pickles_have_no_secrets(data: tuple[str, dict[str, Any]], tmp_path: pathlib.Path) -> None:
    url, options = data
    opened = open_dataset(url, storage_options=options)
    containers = (opened, opened[:3], opened.select("x"))
    for thing in (*containers, Remote(url, options), Access.of(options), GuardedOptions(options)):
        with pytest.raises(pickle.PicklingError, match="'key', 'secret'.*fsspec.*allow_secrets"):
            pickle.dumps(thing)
    # It saves what is read.
    torch.save(opened[:3], tmp_path / "x.pt")
    assert SIGNATURE.encode() not in (tmp_path / "x.pt").read_bytes()
    with pytest.raises(pickle.PicklingError, match=r"'http://\*\*\*@host/x' holds a secret.*allow_secrets"):
        pickle.dumps(Remote("http://me:pw@host/x"))
    assert copy.deepcopy(Access.of(options)).storage_options["secret"] == options["secret"]  # type: ignore[index]


def test_pickles_have_secrets_where_the_caller_says_so(data: tuple[str, dict[str, Any]]) -> None:
    url, options = data
    opened = open_dataset(url, storage_options={**options, "allow_secrets": True})
    assert pickle.loads(pickle.dumps(opened))["x"].tolist() == list(range(12))
    back = pickle.loads(pickle.dumps(Remote("http://me:pw@host/x", {"allow_secrets": True})))
    assert back.for_fsspec()[1]["headers"]["Authorization"].startswith("Basic ")


def test_pickles_find_secrets_in_the_configuration(
    data: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec.config

    url, options = data
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    content = pickle.dumps(open_dataset(url, storage_options={"anon": False}))
    assert options["endpoint_url"].encode() not in content
    assert pickle.loads(content)["x"].tolist() == list(range(12))


def _total(opened: Any, queue: Any) -> None:
    queue.put(int(opened["x"].sum()))


def _doubled(rows: Any) -> Any:
    return TensorDict(x=rows["x"] * 2, batch_size=rows.batch_size)


@pytest.mark.seconds
def test_processes_of_this_program_are_given_secrets(data: tuple[str, dict[str, Any]]) -> None:
    url, options = data
    opened = open_dataset(url, storage_options=options)
    queue = SPAWN.Queue()
    process = SPAWN.Process(target=_total, args=(opened, queue))
    process.start()
    assert queue.get(timeout=60) == 66
    process.join()
    loader = DataLoader(opened, 4, num_workers=1, multiprocessing_context="spawn", collate_fn=_first)  # type: ignore[arg-type, var-annotated]
    assert sorted(int(x) for batch in loader for x in batch) == list(range(12))
    mapped = opened.map(_doubled, num_workers=1, chunksize=4, mp_start_method="spawn")
    assert mapped["x"].tolist() == list(range(0, 24, 2))


def _first(rows: Any) -> list[int]:
    return [int(row["x"]) for row in rows]
