"""Containers on Redis servers whose memory is full, and calls that fail: these have written all or nothing."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import torch

from redis_server import RedisServer
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tensordict.io.stores import redis as store_module
from tensordict.io.stores import redis_items, redis_wire
from tensordict.store import LazyStackedTensorDictStore, TensorDictStore


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that may hold 8 MiB."""
    made = RedisServer(tmp_path_factory.mktemp("redis"), memory=8 << 20)
    yield made
    made.kill()


@pytest.fixture
def server(small: RedisServer) -> RedisServer:
    """The same server, without any key."""
    with redis.Redis(unix_socket_path=small.socket) as client:
        client.flushall()
    return small


def where(server: RedisServer) -> dict[str, Any]:
    return {"unix_socket_path": server.socket}


def dense() -> TensorDict:
    """A container with every kind of entry, of batch size 8."""
    td = TensorDict(a=torch.arange(24.0).view(8, 3), mask=torch.arange(8) % 3 == 0, batch_size=8, names=["time"])
    td["n"] = TensorDict(b=torch.arange(8), hollow=TensorDict(batch_size=8), batch_size=8)
    td["text"], td["list"] = "a text", NonTensorStack(*"abcdefgh")
    td["dict"] = NonTensorData({"x": [1, None]}, batch_size=[8])
    return td


def uneven() -> Any:
    """A lazy stack whose elements differ in shapes."""
    members = []
    for at in range(4):
        inner = TensorDict(b=torch.tensor(at), h=torch.full((at, 2), at, dtype=torch.float16))
        members.append(TensorDict(a=torch.full((3,), float(at)), n=inner))
    return lazy_stack(members)


def opened(store: Any, **kwargs: Any) -> Any:
    """The container as another process would open it."""
    connection = store._wrapped_container()
    server = (connection._entries.server if store._members() else connection._store).address.connection
    return TensorDictStore.from_store(td_id=store.td_id, unix_socket_path=server["unix_socket_path"], **kwargs)


def plain(value: Any) -> Any:
    """A value in memory, in a form that can be compared with `==`."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, list):
        return [plain(one) for one in value]
    if hasattr(value, "keys") and hasattr(value, "batch_size"):
        if value._members():
            return [plain(member) for member in value.unbind(value.stack_dim)]
        return value.batch_size, value.names, {name: plain(value[name]) for name in sorted(value.keys())}
    return value.tolist() if hasattr(value, "tolist") else value


DENSE_READS: dict[str, Callable[[Any], Any]] = {
    "opening": lambda td: td if isinstance(td, TensorDict) else opened(td),
    "opening by the class": lambda td: (
        td if isinstance(td, TensorDict) else TensorDictStore(td_id=td.td_id, batch_size=[8], **_where(td))
    ),
    "opening without a cache": lambda td: td if isinstance(td, TensorDict) else opened(td, cache_metadata=False),
    "a pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "a copy": copy.copy,
    "all": lambda td: td.to_tensordict(),
    "a clone": lambda td: td.clone(),
    "an entry": lambda td: td["a"],
    "a nested entry": lambda td: td["n", "b"],
    "a nested container": lambda td: td["n"],
    "a text": lambda td: td["text"],
    "a dict": lambda td: td["dict"],
    "a list": lambda td: td["list"],
    "a default": lambda td: td.get("none", None),
    "an element": lambda td: td[3],
    "the last element": lambda td: td[-1],
    "a slice": lambda td: td[2:5],
    "a slice with a step": lambda td: td[::3],
    "a list of elements": lambda td: td[[6, 1, 6]],
    "a tensor of elements": lambda td: td[torch.tensor([5, 0])],
    "a mask": lambda td: td[torch.arange(8) % 2 == 0],
    "an element of an entry": lambda td: td.get_at("a", (slice(None), 1)),
    "the keys": lambda td: sorted(td.keys()),
    "all keys": lambda td: sorted(map(str, td.keys(True, True))),
    "the length": len,
    "the batch size": lambda td: td.batch_size,
    "the names": lambda td: td.names,
    "membership": lambda td: ("a" in td, ("n", "b") in td.keys(True), "none" in td),
    "the shown form": lambda td: len(repr(td)) > 0,
    "arithmetic": lambda td: td.select("a", "n") + 1,
    "a sum": lambda td: td.select("a").sum(),
    "equality": lambda td: (td.select("a", "n") == dense().select("a", "n")).all(),
}

STACK_READS: dict[str, Callable[[Any], Any]] = {
    "opening": lambda td: td if _is_local(td) else opened(td),
    "opening by the class": lambda td: (
        td if _is_local(td) else LazyStackedTensorDictStore(td_id=td.td_id, count=4, inner_batch_size=[], **_where(td))
    ),
    "a pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "all": lambda td: td if _is_local(td) else td.to_local(),
    "an entry": lambda td: td["a"],
    "entries that differ": lambda td: td.get(("n", "h"), as_list=True),
    "an element": lambda td: td[2],
    "an entry of an element": lambda td: td[2]["n", "h"],
    "some elements": lambda td: td[[0, 2]],
    "a slice": lambda td: td[1:3],
    "a mask": lambda td: td[torch.tensor([True, False, False, True])],
    "the keys": lambda td: sorted(td.keys()),
    "the keys of an element": lambda td: sorted(td[1].keys()),
    "the length": len,
}


def _where(store: Any) -> dict[str, Any]:
    held = store._entries.server if store._members() else store._store
    return {"unix_socket_path": held.address.connection["unix_socket_path"]}


def _is_local(td: Any) -> bool:
    return not isinstance(td, LazyStackedTensorDictStore)


@pytest.fixture(params=["known", "new"])
def known(request: pytest.FixtureRequest) -> bool:
    """Whether the container that is read knows its leaves from before the server was full."""
    return bool(request.param == "known")


@pytest.mark.parametrize("read", DENSE_READS.values(), ids=DENSE_READS.keys())
def test_a_container_on_a_full_server_is_read(server: RedisServer, read: Callable[[Any], Any], known: bool) -> None:
    store = dense().to_store(**where(server))
    server.fill()
    assert plain(read(store if known else opened(store))) == plain(read(dense()))


@pytest.mark.parametrize("read", STACK_READS.values(), ids=STACK_READS.keys())
def test_a_lazy_stack_on_a_full_server_is_read(server: RedisServer, read: Callable[[Any], Any], known: bool) -> None:
    store = uneven().to_store(**where(server))
    server.fill()
    assert plain(read(store if known else opened(store))) == plain(read(uneven()))


# --- writes -----------------------------------------------------------------------------------------------------------


def _set_batch_size(td: Any) -> None:
    td.batch_size = []


def _set_names(td: Any) -> None:
    td.names = ["other"]


DENSE_WRITES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a new entry": ("'new'", lambda td: td.set("new", torch.zeros(8))),
    "a new text": ("'new'", lambda td: td.set_non_tensor("new", "x")),
    "a new nested entry": ("'n', 'new'", lambda td: td.set(("n", "new"), torch.zeros(8))),
    "a new nested container": ("'new', 'c'", lambda td: td.set("new", TensorDict(c=torch.zeros(8), batch_size=8))),
    "an entry": ("'a'", lambda td: td.set("a", torch.zeros(8, 3))),
    "an entry of another shape": ("'a'", lambda td: td.set("a", torch.zeros(8))),
    "a text": ("'text'", lambda td: td.set_non_tensor("text", "other")),
    "an entry in place": ("'a'", lambda td: td.set_("a", torch.zeros(8, 3))),
    "some elements of an entry": ("'a'", lambda td: td.set_at_("a", torch.zeros(2, 3), [1, 5])),
    "an element": ("'a'", lambda td: td.__setitem__(3, TensorDict(a=torch.zeros(3), n={"b": torch.tensor(0)}))),
    "a slice": ("'a'", lambda td: td.__setitem__(slice(2), TensorDict(a=torch.zeros(2, 3), batch_size=2))),
    "a list of elements": ("'a'", lambda td: td.__setitem__([5, 0], TensorDict(a=torch.zeros(2, 3), batch_size=2))),
    "several entries": ("'a'.*'new'", lambda td: td.update({"a": torch.zeros(8, 3), "new": torch.zeros(8)})),
    "several entries in place": ("'a'.*'mask'", lambda td: td.update_(dense().select("a", "mask").zero_())),
    "zeros": ("'a'", lambda td: td.zero_()),
    "arithmetic in place": ("'a'", lambda td: td.select("a").mul_(2)),
    "a function in place": ("'a'", lambda td: td.select("a", "n").neg_()),
    "a function of leaves in place": ("'a'", lambda td: td.apply_(lambda leaf: leaf.zero_())),
    "a sum in place": ("'a'", lambda td: td.select("a", "n").add_(dense().select("a", "n") + 1)),
    "a copy in place": ("'a'", lambda td: td.copy_(dense().zero_())),
    "one number": ("'a'", lambda td: td.fill_("a", 3)),
    "another name of a nested entry": ("'other'", lambda td: td.rename_key_(("n", "b"), "other")),
    "flat keys": ("'n.b'", lambda td: td.flatten_keys(inplace=True)),
    "other names of dims": ("container", lambda td: td.rename_("other")),
    "another name of an entry": ("'other'", lambda td: td.rename_key_("a", "other")),
    "all entries by a function": ("'a'", lambda td: td.apply(torch.zeros_like, inplace=True)),
    "sums": ("'a'", lambda td: td.update(td.select("a", "n") + 1)),
    "what is masked": ("'a'", lambda td: td.masked_fill_(torch.arange(8) < 3, 0)),
    "the batch size that fits": ("container", lambda td: td.auto_batch_size_(batch_dims=0)),
    "a batch size": ("container", _set_batch_size),
    "names": ("container", _set_names),
    "another container": ("container", lambda td: dense().to_store(**_where(td))),
    "an empty container": ("container", lambda td: TensorDictStore(batch_size=[3], **_where(td))),
    "zeros from a schema": (
        "'x'",
        lambda td: TensorDictStore.from_schema({"x": ([2], torch.uint8)}, batch_size=[9], **_where(td)),
    ),
}


@pytest.mark.parametrize(("named", "write"), DENSE_WRITES.values(), ids=DENSE_WRITES.keys())
def test_a_write_to_a_full_server_fails_and_changes_nothing(
    server: RedisServer, named: str, write: Callable[[Any], Any]
) -> None:
    store = dense().to_store(**where(server))
    before = server.dump()
    server.fill()
    with pytest.raises(OSError, match=rf"(?s){named}.*the server is full.*maxmemory"):
        write(store)
    assert server.dump() == before
    # Nor does this process believe that something has changed.
    assert plain(store) == plain(opened(store)) == plain(dense()) and store.names == opened(store).names == ["time"]
    server.empty()
    write(store)
    assert server.dump() != before


STACK_WRITES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an entry of all": ("'a'", lambda td: td.set("a", torch.zeros(4, 3))),
    "a new entry of all": ("'new'", lambda td: td.set("new", torch.zeros(4, 3))),
    "an entry of one": ("'a'", lambda td: td[1].set("a", torch.zeros(3))),
    "an entry of one, in place": ("'a'", lambda td: td[1].set_("a", torch.zeros(3))),
    "an entry of one, of another shape": ("'a'", lambda td: td[1].set("a", torch.zeros(2))),
    "an element": ("'a'", lambda td: td.__setitem__(1, TensorDict(a=torch.zeros(3)))),
    "zeros": ("'a'", lambda td: td.zero_()),
    "another stack": ("container", lambda td: uneven().to_store(**_where(td))),
}


@pytest.mark.parametrize(("named", "write"), STACK_WRITES.values(), ids=STACK_WRITES.keys())
def test_a_write_to_a_lazy_stack_on_a_full_server_fails_and_changes_nothing(
    server: RedisServer, named: str, write: Callable[[Any], Any]
) -> None:
    store = uneven().to_store(**where(server))
    before = server.dump()
    server.fill()
    with pytest.raises(OSError, match=rf"(?s){named}.*the server is full.*maxmemory"):
        write(store)
    assert server.dump() == before
    assert plain(store.to_local()) == plain(opened(store).to_local()) == plain(uneven())
    server.empty()
    write(store)
    assert server.dump() != before


def _limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (redis_wire, redis_items, store_module):
        monkeypatch.setattr(module, "LIMIT", size)


def test_a_server_that_gets_full_in_the_middle_of_a_write_keeps_nothing_of_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, 1 << 18)
    store = TensorDict(a=torch.zeros(1 << 18, dtype=torch.uint8), batch_size=[]).to_store(**where(server))
    before = server.dump()
    large = torch.ones(3 << 20, dtype=torch.uint8)
    with pytest.raises(OSError, match=r"'c'.*the server is full"):
        store.update({"a": torch.ones(4), "b": large, "c": large, "d": large})
    assert server.dump() == before and sorted(opened(store).keys()) == ["a"]
    with pytest.raises(OSError, match=r"'c'.*the server is full"):
        TensorDict(b=large, c=large, d=large).to_store(**where(server))
    assert server.dump() == before


def test_a_stale_write_is_not_carried_out_when_a_full_server_is_emptied_behind_the_check(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TensorDict(a=torch.zeros(4, 2), batch_size=4).to_store(**where(server))
    other, real = opened(store), redis_wire.Wire.send
    other["a"] = torch.zeros(4, 3, dtype=torch.int16)
    before = server.dump()

    def interrupted(self: Any, commands: Any, key: Any = ()) -> Any:
        if commands[0][0] != "WATCH":
            return real(self, commands, key)
        # As another client, which makes room behind the check.
        answers = real(self, [*commands[:2], ("CONFIG", "SET", "maxmemory", 8 << 20), *commands[2:]], key)
        return [*answers[:2], *answers[3:]]

    with redis.Redis(unix_socket_path=server.socket) as client:
        client.config_set("maxmemory", 1)
        with monkeypatch.context() as patched:
            patched.setattr(redis_wire.Wire, "send", interrupted)
            with pytest.raises(OSError, match="'a'.*another shape or dtype.*nothing was written"):
                store[1] = TensorDict(a=torch.ones(2))
        client.config_set("maxmemory", 8 << 20)
    assert server.dump() == before


# --- what frees memory ------------------------------------------------------------------------------------------------


DELETIONS: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda td: td.__delitem__("a"),
    "a nested entry": lambda td: td.__delitem__(("n", "b")),
    "a nested container": lambda td: td.__delitem__("n"),
    "a popped entry": lambda td: td.pop("a"),
    "all but some": lambda td: td.select("a", inplace=True),
    "some": lambda td: td.exclude("a", inplace=True),
    "all": lambda td: td.clear(),
}


@pytest.mark.parametrize("stack", [False, True], ids=["dense", "stack"])
@pytest.mark.parametrize("delete", DELETIONS.values(), ids=DELETIONS.keys())
def test_what_only_deletes_works_on_a_full_server(
    server: RedisServer, delete: Callable[[Any], Any], stack: bool
) -> None:
    expected = uneven() if stack else dense()
    store = expected.to_store(ttl=1000, **where(server))
    server.fill()
    delete(store)
    delete(expected)
    assert plain(opened(store)) == plain(expected) and plain(store) == plain(expected)
    with redis.Redis(unix_socket_path=server.socket) as client:
        assert all(client.pttl(key) > 0 for key in client.scan_iter("tensordict:*"))


@pytest.mark.parametrize("stack", [False, True], ids=["dense", "stack"])
def test_clear_redis_makes_room_on_a_full_server(server: RedisServer, stack: bool) -> None:
    store = (uneven() if stack else dense()).to_store(**where(server))
    beside = TensorDict(large=torch.zeros(1 << 20, dtype=torch.uint8)).to_store(**where(server))
    server.fill()
    if stack:
        store = TensorDictStore(td_id=beside.td_id, **where(server))
    store.clear_redis()
    beside.clear_redis()
    remaining = server.dump()
    assert not remaining or stack
    dense().to_store(**where(server))


# --- all or nothing ---------------------------------------------------------------------------------------------------


def _calls() -> Iterator[Any]:
    """Calls that write to a container that is there."""
    apart = ("another container", "an empty container", "zeros from a schema", "another stack")
    for make, writes in ((dense, DENSE_WRITES), (uneven, STACK_WRITES)):
        for name, (_, write) in writes.items():
            if name not in apart:
                yield pytest.param(make, write, id=f"{make.__name__}: {name}")
        for name, delete in DELETIONS.items():
            yield pytest.param(make, delete, id=f"{make.__name__}: deleting {name}")


@pytest.mark.parametrize("limit", [32 << 20, 32], ids=["one request", "several requests"])
@pytest.mark.parametrize(("make", "call"), list(_calls()))
def test_a_call_whose_connection_is_lost_has_written_all_or_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, make: Any, call: Callable[[Any], Any], limit: int
) -> None:
    _limit(monkeypatch, limit)
    expected, real = make(), redis_wire.Wire.send
    before = plain(expected)
    call(expected)
    after, found = plain(expected), []
    for last in itertools.count():
        store, sent = make().to_store(**where(server)), []

        def send(self: Any, *args: Any, last: int = last, sent: list[Any] = sent) -> Any:
            sent.append(args)
            if len(sent) > last:
                raise ConnectionError("the connection is lost")
            return real(self, *args)

        with monkeypatch.context() as patched:
            patched.setattr(redis_wire.Wire, "send", send)
            with contextlib.suppress(ConnectionError):
                call(store)
        other = opened(store)
        found.append(plain(other.to_local()))
        assert found[-1] in (before, after)
        if len(sent) <= last:
            break
    assert found[0] == before and found[-1] == after != before


# --- what is uploaded ahead -------------------------------------------------------------------------------------------


def _uploaded(server: RedisServer) -> list[bytes]:
    return [key for key in server.dump() if b"}:t:" in key]


def _in_place(td: Any) -> None:
    td.select("a", "n").mul_(2)


@pytest.mark.parametrize("write", [_in_place, lambda td: td.update({"a": torch.ones(8, 5)})], ids=["in place", "new"])
def test_what_is_uploaded_ahead_is_gone_after_the_call_and_expires_without_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], Any]
) -> None:
    _limit(monkeypatch, 32)
    store, real = dense().to_store(**where(server)), redis_wire.Wire.write
    write(store)
    assert not _uploaded(server)

    def lost(self: Any, *args: Any) -> Any:
        raise ConnectionError("the connection is lost")

    with monkeypatch.context() as patched:
        patched.setattr(redis_wire.Wire, "write", lost)
        with pytest.raises(ConnectionError):
            write(store)
    left = _uploaded(server)
    with redis.Redis(unix_socket_path=server.socket) as client:
        assert left and all(0 < client.pttl(key) <= 3_600_000 for key in left)

    def forgetting(self: Any, *args: Any) -> Any:
        with redis.Redis(unix_socket_path=server.socket) as client:
            client.delete(*_uploaded(server))
        return real(self, *args)

    before = plain(opened(store).to_local())
    with monkeypatch.context() as patched:
        patched.setattr(redis_wire.Wire, "write", forgetting)
        with pytest.raises(OSError, match="'[an]'.*lost what was uploaded.*nothing was"):
            write(store)
    assert plain(opened(store).to_local()) == plain(store) == before and not _uploaded(server)


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_server_that_has_lost_a_piece_of_an_upload_is_found_out(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    _limit(monkeypatch, 1 << 10)
    store, real, sent = dense().to_store(**where(server)), redis_wire.Wire.send, []
    before = server.dump()

    def send(self: Any, commands: Any, *args: Any) -> Any:
        if any(words[0] == "SETRANGE" for words in commands):
            sent.append(commands)
        if len(sent) == 3:
            # As a server that was started anew, and had not written its last pieces to the disk.
            with redis.Redis(unix_socket_path=server.socket) as client:
                (name,) = _uploaded(server)
                kept = client.getrange(name, 0, 512 * pieces - 1) if pieces else b""
                client.delete(name)
                client.append(name, kept)
        return real(self, commands, *args)

    with monkeypatch.context() as patched:
        patched.setattr(redis_wire.Wire, "send", send)
        with pytest.raises(OSError, match="'large'.*lost what was uploaded.*nothing was written"):
            store["large"] = torch.ones(8, 500, dtype=torch.uint8)
    assert server.dump() == before


def test_a_large_write_in_place_whose_answer_is_lost_is_sent_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, 32)
    store, real, sent = dense().to_store(**where(server)), redis_wire._exchange, []

    def twice(connection: Any, commands: Any) -> Any:
        answers = real(connection, commands)
        if commands[0][0] == "WATCH" and not sent:
            sent.append(commands)
            raise redis.ConnectionError("the answer is lost")
        return answers

    monkeypatch.setattr(redis_wire, "_exchange", twice)
    _in_place(store)
    assert sent and torch.equal(store["a"], dense()["a"] * 2) and torch.equal(store["n", "b"], torch.arange(8) * 2)
    assert not _uploaded(server)


def test_a_tensor_that_is_larger_than_the_server_takes_is_named_and_leaves_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, 1 << 19)
    store = dense().to_store(**where(server))
    before = server.dump()
    with redis.Redis(unix_socket_path=server.socket) as client:
        known = client.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
        client.config_set("proto-max-bulk-len", 1 << 20)
        try:
            with pytest.raises(OSError, match="entry 'large': .*proto-max-bulk-len"):
                store["large"] = torch.zeros(8, 3 << 17, dtype=torch.uint8) + 1
        finally:
            client.config_set("proto-max-bulk-len", known)
    assert server.dump() == before and "large" not in store


def test_the_number_of_elements_on_a_server_is_fixed(server: RedisServer) -> None:
    store = uneven().to_store(**where(server))
    before = server.dump()
    for change in (store.append, lambda member: store.insert(0, member)):
        with pytest.raises(RuntimeError, match="number of elements .*is fixed"):
            change(uneven()[0])
    assert server.dump() == before and len(store) == 4


def test_a_class_that_the_program_has_not_imported_is_not_looked_for(server: RedisServer) -> None:
    store = TensorDict(a=torch.zeros(3), batch_size=3).to_store(**where(server))
    with redis.Redis(unix_socket_path=server.socket) as client:
        client.set(store._store.wire.base + "__tensorclass__", "this.Sample")
    with pytest.raises(NotImplementedError, match="this.Sample"):
        opened(store)
    assert "this" not in sys.modules
