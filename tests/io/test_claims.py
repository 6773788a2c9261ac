"""Savers at one URL at once: one of them saves, the others are told, and nothing is mixed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from remote_server import FAIL, Fault, Proxy

from tensordict import PersistentTensorDict, TensorDict, from_zarr, load, verify
from tensordict.core.exceptions import SaveError
from tensordict.io.remote.claims import Claim
from tensordict.io.remote.urls import Remote
from tensordict.io.saving.commit import JOURNAL

pytest.importorskip("zarr", minversion="3")
Bucket = tuple[str, Proxy, dict[str, Any]]
SPAWN = multiprocessing.get_context("spawn")


def make(value: int, entries: int = 6) -> TensorDict:
    return TensorDict({f"k{number}": torch.full((40,), value) for number in range(entries)}, [40])


def to_zarr(value: int, url: str, **options: Any) -> None:
    make(value).to_zarr(url, chunks=10, **options).close()


def to_folder(value: int, url: str, **options: Any) -> None:
    make(value).save(url, **options)


def seen(url: str, **options: Any) -> set[float]:
    """The values in the save at a URL."""
    return {value for leaf in load(url, **options).values() for value in leaf.unique().tolist()}


SAVES: dict[str, Callable[..., None]] = {"zarr": to_zarr, "folder": to_folder}


@pytest.mark.parametrize("save", SAVES)
def test_a_second_saver_is_told_and_changes_nothing(bucket: Bucket, save: str) -> None:
    url, proxy, options = bucket
    how: dict[str, Any] = {"storage_options": options, "overwrite": True}
    SAVES[save](1, f"{url}/x", **how)
    told: list[str] = []

    def interfere(method: str, path: str) -> None:
        if method == "PUT" and "k3" in path:
            proxy.before = None
            for second in SAVES.values():
                with pytest.raises(SaveError) as error:
                    second(3, f"{url}/x", **how)
                told.append(str(error.value))

    proxy.before = interfere
    SAVES[save](2, f"{url}/x", **how)
    assert len(told) == 2
    assert all(f"is saving to '{url}/x'" in text and f"delete '{url}/x/%save'" in text for text in told)
    assert seen(f"{url}/x", storage_options=options) == {2} and verify(f"{url}/x", storage_options=options).ok
    # The claim went with the save: the next one has its turn.
    SAVES[save](4, f"{url}/x", **how)
    assert seen(f"{url}/x", storage_options=options) == {4}


def _save_in_turn(url: str, options: dict[str, Any], value: int, ready: Any, outcomes: Any) -> None:
    torch.set_num_threads(1)
    ready.wait()
    try:
        to_zarr(value, url, overwrite=True, storage_options=options)
        outcomes.put((value, ""))
    except SaveError as error:
        outcomes.put((value, str(error)))


def _all_told_or_saved(outcomes: list[tuple[int, str]], url: str, found: set[float]) -> None:
    saved = [value for value, text in outcomes if not text]
    assert saved and all(f"is saving to '{url}'" in text for _, text in outcomes if text)
    assert len(found) == 1 and found <= {float(value) for value in saved}


def test_processes_at_one_url(bucket: Bucket) -> None:
    url, _, options = bucket
    ready, outcomes = SPAWN.Barrier(3), SPAWN.Queue()
    arguments = [(f"{url}/x", options, value, ready, outcomes) for value in range(3)]
    processes = [SPAWN.Process(target=_save_in_turn, args=args) for args in arguments]
    for process in processes:
        process.start()
    found = [outcomes.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    _all_told_or_saved(found, f"{url}/x", seen(f"{url}/x", storage_options=options))
    assert verify(f"{url}/x", storage_options=options).ok
    assert all(JOURNAL not in file.name for file in Remote(url, options).files())


def _save_in_threads(url: str, count: int) -> list[tuple[int, str]]:
    """Save in this many threads at once; return each value with the error that its thread got."""
    ready, outcomes = threading.Barrier(count), list[tuple[int, str]]()

    def save(value: int) -> None:
        ready.wait()
        try:
            to_zarr(value, url, overwrite=True)
            outcomes.append((value, ""))
        except SaveError as error:
            outcomes.append((value, str(error)))

    threads = [threading.Thread(target=save, args=(value,)) for value in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_threads_at_one_url() -> None:
    url = f"memory://{uuid.uuid4().hex}/x"
    told = 0
    for _ in range(10):
        outcomes = _save_in_threads(url, 4)
        _all_told_or_saved(outcomes, url, seen(url))
        assert verify(url).ok
        told += sum(bool(text) for _, text in outcomes)
    assert told


def test_opening_to_replace_is_refused_while_somebody_saves() -> None:
    url = f"memory://{uuid.uuid4().hex}/x"
    to_zarr(1, url)
    claim = Claim(Remote(url))
    for mode in ("w", "w-", "a"):
        with pytest.raises(SaveError, match="is saving to"):
            PersistentTensorDict(filename=url, backend="zarr", mode=mode)
    # Readers and writers in place do not conflict with a claim.
    assert from_zarr(url)["k0"].sum() == 40
    from_zarr(url, mode="r+").close()
    claim.release()
    PersistentTensorDict(filename=url, backend="zarr", mode="w").close()
    assert [file.name for file in Remote(url).files()] == ["zarr.json"]


def test_a_claim_that_its_saver_lost(bucket: Bucket) -> None:
    """Somebody deletes the claim of a saver that is still at work, and saves: the first one takes nothing away."""
    url, proxy, options = bucket
    how: dict[str, Any] = {"storage_options": options, "overwrite": True}

    def interfere(method: str, path: str) -> None:
        if method == "PUT" and "k5/zarr.json" in path:
            pytest.fail("the documents go last")
        if method == "PUT" and "k5/c/3" in path:
            proxy.before = None
            store = Remote(f"{url}/x", options)
            store.delete([JOURNAL])
            store.put(JOURNAL, b"another saver")

    proxy.before = interfere
    with pytest.raises(SaveError, match="deleted the claim"):
        to_zarr(1, f"{url}/x", **how)
    names = {file.name for file in Remote(f"{url}/x", options).files()}
    assert JOURNAL in names and "k5/c/3" in names and "zarr.json" not in names


def _killed(url: str, options: dict[str, Any]) -> None:
    to_zarr(1, url, storage_options=options)


def test_a_killed_saver_leaves_its_claim(bucket: Bucket) -> None:
    url, proxy, options = bucket
    process = SPAWN.Process(target=_killed, args=(f"{url}/x", options))

    def kill(method: str, path: str) -> None:
        if method == "PUT" and "k4" in path:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    proxy.before = kill
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    proxy.before = None
    for overwrite in (False, True):
        with pytest.raises(SaveError, match=f"was killed.*delete '{url}/x/%save'"):
            to_zarr(2, f"{url}/x", storage_options=options, overwrite=overwrite)
    Remote(f"{url}/x", options).delete([JOURNAL])
    with pytest.raises(SaveError, match="overwrite=True"):
        to_zarr(2, f"{url}/x", storage_options=options)
    to_zarr(2, f"{url}/x", storage_options=options, overwrite=True)
    assert seen(f"{url}/x", storage_options=options) == {2}


def test_a_claim_that_cannot_be_deleted_is_used_again(bucket: Bucket) -> None:
    url, proxy, options = bucket
    proxy.faults.append(Fault(FAIL, "DELETE", JOURNAL.replace("%", "%25"), times=100))
    with pytest.raises(SaveError, match="%save"):
        to_zarr(1, f"{url}/x", storage_options=options)
    proxy.clear()
    to_zarr(2, f"{url}/x", storage_options=options, overwrite=True)
    assert seen(f"{url}/x", storage_options=options) == {2}
    assert JOURNAL not in {file.name for file in Remote(f"{url}/x", options).files()}


def test_a_store_without_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim of another saver is found before an upload that would overwrite it, or read back after it."""
    url = f"memory://{uuid.uuid4().hex}/x"
    store, other = Remote(url), b"another saver"
    put = Remote.put
    store.put(JOURNAL, other)
    monkeypatch.setattr(Remote, "put", lambda self, name, content, new=False: put(self, name, content))
    with pytest.raises(SaveError, match="is saving to"):
        to_zarr(1, url, overwrite=True)
    assert store.read(JOURNAL) == other
    store.delete([JOURNAL])

    def put_too_late(self: Remote, name: str, content: Any, new: bool = False) -> None:
        put(self, name, content)
        if new:
            put(self, name, other)

    monkeypatch.setattr(Remote, "put", put_too_late)
    with pytest.raises(SaveError, match="is saving to"):
        to_zarr(1, url, overwrite=True)
    assert [file.name for file in store.files()] == [JOURNAL]


def test_entries_whose_names_are_patterns(base: str) -> None:
    """Deleting the entry `a*` leaves `ab`."""
    td = TensorDict({"a*": torch.ones(3), "ab": torch.ones(3), "[b]": {"x": torch.ones(3)}, "b": {"x": torch.ones(3)}})
    td.to_zarr(f"{base}/x.zarr").close()
    with from_zarr(f"{base}/x.zarr", mode="r+") as data:
        del data["a*"], data["[b]"]
        data.set("ab", torch.zeros(3, 2), overwrite=True)
    data = load(f"{base}/x.zarr")
    assert sorted(data.keys()) == ["ab", "b"] and data["ab"].shape == (3, 2) and data["b", "x"].sum() == 3
    assert verify(f"{base}/x.zarr").ok
