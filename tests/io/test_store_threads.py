"""Containers in stores that threads share: some read and write rows, others add entries and delete them."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from zarr.storage import MemoryStore

from redis_server import shared_socket
from tensordict import TensorDict
from tensordict.store import TensorDictStore
from turns import at_once

COUNT = 64
STORES: dict[str, Callable[[TensorDict, pathlib.Path], Any]] = {
    "h5": lambda td, path: td.to_h5(path / "x.h5"),
    "folder": lambda td, path: td.to_zarr(path / "x.zarr", chunks="rows"),
    "memory": lambda td, path: td.to_zarr(MemoryStore()),
    "redis": lambda td, path: TensorDictStore.from_tensordict(td, unix_socket_path=shared_socket()),
    "redis, not cached": lambda td, path: TensorDictStore.from_tensordict(
        td, unix_socket_path=shared_socket(), cache_metadata=False
    ),
}


@pytest.mark.parametrize("kind", STORES)
def test_threads_share_a_store(tmp_path: pathlib.Path, kind: str) -> None:
    numbers = torch.arange(COUNT)
    td = TensorDict(a=numbers, b={"c": numbers * 2.0, "d": {"e": numbers}}, batch_size=[COUNT])
    store = STORES[kind](td, tmp_path)

    def rows() -> None:
        at = torch.randint(COUNT, (8,))
        found = store.select("a", ("b", "c"))[at]
        assert torch.equal(found["a"], at) and torch.equal(found["b", "c"], at * 2.0)

    def entries() -> None:
        assert torch.equal(store["a"], numbers) and torch.equal(store["b"]["d", "e"][3:5], numbers[3:5])

    def write() -> None:
        at = int(torch.randint(COUNT, ()))
        store.set_at_("a", td["a"][at], at)

    def adding(name: str) -> Callable[[], None]:
        values = itertools.count()

        def add() -> None:
            value = float(next(values))
            for node in (store, store["b"]):
                node[name] = torch.full((COUNT, 3), value)
                assert node[name].unique().tolist() == [value]
            for node in (store, store["b"]):
                del node[name]
                assert name not in node.keys()

        return add

    at_once(1.2, rows, rows, entries, write, adding("one"), adding("two"))
    assert (store.to_tensordict() == td).all() and set(store.keys()) == {"a", "b"}


def test_a_draft_is_begun_while_others_are_looked_through(tmp_path: pathlib.Path) -> None:
    class Growing(dict[str, Any]):
        """Grows by one item while it is iterated, as if another thread added it."""

        def __iter__(self) -> Any:
            for item in super().__iter__():
                self["n/other"] = {}
                yield item

    store = TensorDict(a=torch.arange(3), batch_size=3).to_zarr(tmp_path / "x.zarr")
    store._store.nodes._pending = Growing({"n/new": {}})
    store["b"] = torch.ones(3)
    assert store["a"].tolist() == [0, 1, 2] and list(store.keys()) == ["a", "b"]
