"""Containers on Redis servers: what goes over the wire, what others see of it, and what happens when things fail."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import pathlib
import pickle
import re
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import redis
import torch
from io_helpers_redis import base, requests
from torch import Tensor

from redis_server import RedisServer, shared_socket
from reference import Reference
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack
from tensordict.io.stores import redis as store_module
from tensordict.io.stores import redis_items, redis_wire
from tensordict.store import TensorDictStore

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def where() -> dict[str, Any]:
    return {"unix_socket_path": shared_socket()}


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[RedisServer]:
    """A server of the test's own, which keeps what was written when it is killed."""
    made = RedisServer(tmp_path, keeps=True)
    yield made
    made.kill()


@pytest.fixture
def raw() -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=shared_socket()) as client:
        yield client


def again(store: Any, **kwargs: Any) -> Any:
    """The same container as another process would open it."""
    return TensorDictStore.from_store(td_id=store.td_id, unix_socket_path=shared_socket(), **kwargs)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_container_of_100_leaves_is_one_request(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    td = TensorDict({f"k{i}": torch.full((8, 3), float(i)) for i in range(60)}, batch_size=8)
    td["deep"] = TensorDict({f"k{i}": torch.full((8,), i) for i in range(38)}, batch_size=8)
    td["text"], td["list"] = "a text", NonTensorStack(*"abcdefgh")
    store = td.to_store(**where)
    row, index = td[3].clone(), torch.tensor([6, 1, 6])
    # What is there of values is read before they are replaced.
    assert requests(monkeypatch, lambda: store.update(td)) == 2
    assert requests(monkeypatch, lambda: store.update(td.exclude("text", "list"))) == 1
    assert requests(monkeypatch, lambda: store.to_tensordict()) == 1
    assert requests(monkeypatch, lambda: store.clone()) <= 3  # the values one by one
    assert requests(monkeypatch, lambda: store[3]) == 1
    assert requests(monkeypatch, lambda: store[index]) == 1
    assert requests(monkeypatch, lambda: store[2:5]) == 1
    assert requests(monkeypatch, lambda: store.__setitem__(3, row.exclude("text", "list"))) == 1
    assert requests(monkeypatch, lambda: store["deep"].to_tensordict()) == 1
    assert requests(monkeypatch, lambda: store["k5"]) == 1
    assert requests(monkeypatch, lambda: store.select("k1", "k2")) <= 2
    numbers = td.exclude("text", "list").to_store(**where)
    # What there is, what is read, and what is written.
    for call, count in [
        (lambda: numbers + 1, 3), (lambda: numbers.abs(), 3), (lambda: numbers.sum(), 1), (lambda: numbers.double(), 1),
        (lambda: numbers.apply(torch.neg), 1), (lambda: numbers.mul_(2), 3), (lambda: numbers.apply_(Tensor.neg_), 2),
    ]:  # fmt: skip
        assert requests(monkeypatch, call) <= count
    assert torch.equal(numbers["k5"], td["k5"] * -2) and torch.equal((numbers + 1)["deep", "k3"], torch.full((8,), -5))
    assert requests(monkeypatch, lambda: numbers.zero_()) <= 3 and not numbers["k59"].any()
    # That nothing is known of yet takes one more for what there is.
    other = again(store)
    assert requests(monkeypatch, lambda: other.to_tensordict()) == 1
    for key in td.keys(True, True):
        assert key in ("text", "list") or torch.equal(store[key], td[key])
    assert (store[index] == td[index]).all()


def test_only_the_rows_that_are_asked_for_are_sent(where: dict[str, Any], raw: redis.Redis) -> None:
    store = TensorDict(a=torch.arange(1 << 20).view(-1, 64), batch_size=1 << 14).to_store(**where)
    before = raw.info("stats")["total_net_output_bytes"]
    assert torch.equal(store[[5, 9000]]["a"], torch.arange(1 << 20).view(-1, 64)[[5, 9000]])
    assert raw.info("stats")["total_net_output_bytes"] - before < 20_000
    before = raw.info("stats")["total_net_input_bytes"]
    store[77] = TensorDict(a=torch.zeros(64, dtype=torch.int64))
    assert raw.info("stats")["total_net_input_bytes"] - before < 20_000
    assert not store[77]["a"].any() and store[78]["a"].any()


INDICES = [
    0, -1, slice(2, 5), slice(None, None, 3), (slice(None), 1), (2, slice(0, 2), 0), (..., -1),
    (slice(1, 6, 2), ..., 1),
    torch.tensor([5, 0, 5]), [6, 2], torch.arange(7) % 2 == 0, (torch.tensor([1, 4]), slice(1, 3)), None,
    (slice(None), slice(None), torch.tensor([2, 0])), slice(3, 3), range(1, 4),
    (torch.tensor([1, 2]), torch.tensor([0, 3])),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_selections_are_those_of_the_tensor(where: dict[str, Any], index: Any) -> None:
    full = torch.arange(7 * 4 * 3, dtype=torch.int16).view(7, 4, 3)
    store = TensorDict(a=full).to_store(**where)
    assert torch.equal(store.get_at("a", index), full[index])
    assert torch.equal(TensorDict(a=full, batch_size=[7, 4, 3])[index]["a"], full[index])
    expected = full.clone()
    expected[index] = 1
    store.set_at_("a", torch.ones_like(full[index]), index)
    assert torch.equal(store["a"], expected)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64, torch.uint64, torch.float8_e5m2]
)
def test_dtypes(where: dict[str, Any], dtype: torch.dtype) -> None:
    value = torch.arange(6).view(3, 2).to(dtype)
    store = TensorDict(a=value, empty=torch.zeros(3, 0, dtype=dtype), one=value[0, 0], batch_size=[]).to_store(**where)
    assert again(store)["a"].dtype is dtype and again(store)["a"].view(torch.uint8).equal(value.view(torch.uint8))
    assert store["empty"].shape == (3, 0) and store["one"].shape == ()


def test_what_is_larger_than_a_request_goes_in_several(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (redis_wire, redis_items, store_module):
        monkeypatch.setattr(module, "LIMIT", 1000)
    full = torch.arange(4000).view(400, 10)
    td = TensorDict(a=full, b=full + 1, c=full.t().contiguous().t(), d=torch.zeros(400), batch_size=400)
    store = td.to_store(**where)
    assert (store.to_tensordict() == td).all() and (again(store)[100:300] == td[100:300]).all()
    store[10:390] = td[:380]
    assert torch.equal(store["a"][10:390], full[:380]) and torch.equal(store["a"][390:], full[390:])
    index = torch.randperm(400)
    assert torch.equal(store[index]["b"], store["b"][index])
    other = again(store)
    store["a"] = torch.ones(400, 3)
    assert torch.equal(other["a"], torch.ones(400, 3))


# --- what others see --------------------------------------------------------------------------------------------------


def test_another_process_sees_what_was_written_and_no_old_form(where: dict[str, Any]) -> None:
    store = TensorDict(a=torch.zeros(3, 2), b=torch.zeros(3), batch_size=3).to_store(**where)
    other = again(store)
    store["new", "deep"] = torch.ones(3)
    assert set(other.keys(True, True)) == {"a", "b", ("new", "deep")} and other["new", "deep"].sum() == 3
    store["a"] = torch.ones(3, 5)
    # What `other` knows is an array of 3 x 2.
    assert other["a"].shape == (3, 5) and other[1]["a"].shape == (5,)
    store["a"] = torch.ones(3, 4)
    with pytest.raises(OSError, match=r"'a'.*another shape or dtype.*nothing was written"):
        other.set_at_("a", torch.ones(5), 1)
    assert torch.equal(store["a"], torch.ones(3, 4))
    other.set_at_("a", torch.zeros(4), 1)
    assert store["a"].sum() == 8
    del store["b"]
    assert "b" not in other
    with pytest.raises(KeyError):
        other["b"]


def test_what_was_selected_before_it_was_replaced_is_not_read_in_the_old_form(where: dict[str, Any]) -> None:
    store = TensorDict(a=torch.zeros(4, 2), b=torch.zeros(4), batch_size=4).to_store(**where)
    selected = store.select("a")
    store[1], selected[1]
    again(store)["a"] = torch.ones(4, 2, dtype=torch.int32)
    assert store[1]["a"].dtype is torch.int32
    for read in (lambda: selected[1], lambda: selected["a"], lambda: selected.to_tensordict()):
        with pytest.raises(OSError, match="'a'.*another shape or dtype"):
            read()
    with pytest.raises(OSError, match="'a'.*another shape or dtype"):
        selected[1] = TensorDict(a=torch.ones(2))
    assert torch.equal(store["a"], torch.ones(4, 2, dtype=torch.int32))


def test_what_is_replaced_right_behind_the_check_is_checked_again(
    where: dict[str, Any], raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TensorDict(a=torch.zeros(4, 2), batch_size=4).to_store(**where)
    meta, sent, real = base(store) + "m:a", [], redis_wire.Wire.send

    def interrupted(self: Any, commands: Any, *args: Any) -> Any:
        if commands[0][0] != "WATCH":
            return real(self, commands, *args)
        sent.append(commands)
        # As another client: the first time the same is written, then another dtype.
        told = ["torch.float32", "torch.int32", "torch.int32"][len(sent) - 1]
        (*answers, done) = real(self, [*commands[:2], ("HSET", meta, "dtype", told), *commands[2:]], *args)
        return [answers[0], answers[1], *answers[3:], done]

    monkeypatch.setattr(redis_wire.Wire, "send", interrupted)
    with pytest.raises(OSError, match="'a'.*another shape or dtype.*nothing was written"):
        store[1] = TensorDict(a=torch.ones(2))
    assert len(sent) == 3 and raw.get(base(store) + "d:a") == bytes(32)
    raw.hset(meta, "dtype", "torch.float32")
    assert not raw.exists(base(store) + "__stop__") or raw.pttl(base(store) + "__stop__") <= 1


def _write_rows(path: str, td_id: str, number: int) -> None:
    store = TensorDictStore.from_store(unix_socket_path=path, td_id=td_id)
    for row in range(number, 200, 2):
        store[row] = TensorDict(a=torch.full((3,), float(row)), b={"c": torch.tensor(row)})
    for count in range(20):
        store[f"of{number}", f"k{count}"] = torch.full((200,), number)


def test_processes_that_write_other_rows_and_keys_lose_nothing(where: dict[str, Any]) -> None:
    td = TensorDict(a=torch.zeros(200, 3), b={"c": torch.zeros(200, dtype=torch.int64)}, batch_size=200)
    store = td.to_store(**where)
    context = multiprocessing.get_context("spawn")
    arguments = [(shared_socket(), store.td_id, number) for number in range(2)]
    workers = [context.Process(target=_write_rows, args=given) for given in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert torch.equal(store["b", "c"], torch.arange(200))
    assert torch.equal(store["a"], torch.arange(200.0)[:, None].expand(200, 3))
    for number in range(2):
        assert len(store[f"of{number}"].keys()) == 20 and (store[f"of{number}"] == number).all()


def test_values_names_sizes_and_empty_containers_come_back(where: dict[str, Any], raw: redis.Redis) -> None:
    inner = TensorDict(c=torch.ones(3, 1), hollow=TensorDict(batch_size=[3]), batch_size=[3, 1])
    td = TensorDict(
        {"a.b": torch.zeros(3), "": torch.ones(3), "_%x": torch.ones(3), "n": inner}, batch_size=[3], names=["t"]
    )
    td["text"], td["dict"] = "it's", NonTensorData({"x": [1, None, 2.5]}, batch_size=[3])
    td.set_non_tensor("number", 3)
    td["rows"] = NonTensorStack("p", 1, None)
    store = again(td.to_store(**where))
    assert list(store.keys()) == list(td.keys()) and store.names == ["t"]
    assert store["n"].batch_size == (3, 1) and store["n", "hollow"].batch_size == (3, 1)
    assert store["text"] == "it's" and store["number"] == 3 and store["dict"] == {"x": [1, None, 2.5]}
    assert store["rows"] == ["p", 1, None] and type(store.get("rows")) is NonTensorStack
    store["rows"] = NonTensorStack("q", 2, None)
    assert again(store)[1]["rows"] == 2
    # As the reference writes them: JSON.
    assert json.loads(raw.get(base(store) + "d:text")) == "it's"
    assert not any(b"\x80\x04" in (raw.get(key) or b"") for key in raw.scan_iter(base(store) + "d:*"))


class Sample(TensorClass):
    x: torch.Tensor
    label: str


def test_tensorclasses(where: dict[str, Any], raw: redis.Redis) -> None:
    store = Sample(x=torch.ones(3), label="l", batch_size=[3]).to_store(**where)
    found = TensorDictStore.from_store(td_id=store.td_id, **where)
    assert type(store) is type(found) is Sample and found[1].label == "l"
    plain = TensorDict(x=torch.ones(3), label="l").to_store(**where)
    assert type(again(plain, tensorclass_cls=Sample)) is Sample
    # Nothing is imported because of what is on a server.
    raw.set(base(found) + "__tensorclass__", "antigravity.Item")
    with pytest.raises(NotImplementedError, match="antigravity.Item"):
        TensorDictStore.from_store(td_id=store.td_id, **where)


def test_containers_of_zeros_are_made_by_the_server(where: dict[str, Any], raw: redis.Redis) -> None:
    schema = {"obs": ([64, 64], torch.uint8), "n": {"r": ([], torch.float32)}, "none": ([0], torch.int64)}
    before = raw.info("stats")["total_net_input_bytes"]
    store = TensorDictStore.from_schema(schema, batch_size=[1000], **where)
    assert raw.info("stats")["total_net_input_bytes"] - before < 50_000
    assert type(store) is TensorDictStore and store["obs"].shape == (1000, 64, 64) and not store["obs"].any()
    assert store["n"].batch_size == (1000,) and store["none"].shape == (1000, 0)
    store[7] = TensorDict(
        obs=torch.ones(64, 64, dtype=torch.uint8), n={"r": 2.0}, none=torch.zeros(0, dtype=torch.int64)
    )
    assert store["obs"].sum() == 64 * 64 and store["n", "r"][7] == 2
    other = TensorDict.from_schema(schema, batch_size=[2], storage="redis", prefix="mine", **where)
    assert other.batch_size == (2,) and list(raw.scan_iter("mine:*"))


def test_a_pickle_is_the_address(where: dict[str, Any]) -> None:
    store = TensorDict(a=torch.arange(1000), n={"b": torch.ones(1000)}, batch_size=1000).to_store(**where).lock_()
    data = pickle.dumps(store)
    assert len(data) < 2000
    found = pickle.loads(data)
    assert found.is_locked and torch.equal(found["a"], store["a"])
    nested = pickle.loads(pickle.dumps(store["n"]))
    assert nested["b"].sum() == 1000


def test_clients_and_pools(where: dict[str, Any], raw: redis.Redis) -> None:
    first, second = TensorDictStore(**where), TensorDictStore(**where)
    pools = {id(store._store.wire.client.connection_pool) for store in (first, second)}
    assert len(pools) == 1
    given = TensorDictStore(client=raw, batch_size=[2])
    given["a"] = torch.ones(2)
    assert given._store.wire.client is raw and pickle.loads(pickle.dumps(given))["a"].sum() == 2
    behind = redis.asyncio.Redis(unix_socket_path=shared_socket())
    found = TensorDictStore(client=behind, td_id=given.td_id)
    assert found["a"].sum() == 2
    asyncio.run(behind.aclose())
    with pytest.raises(TypeError, match="redis.Redis"):
        TensorDictStore(client=object())
    done = []
    threads = [threading.Thread(target=lambda: done.extend([first.keys(), found[1]])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 16


def test_other_servers_of_the_protocol_are_spoken_to_alike(where: dict[str, Any]) -> None:
    store = TensorDict(a=torch.ones(2)).to_store(backend="dragonfly", **where)
    assert again(store)["a"].sum() == 2


# --- time, clearing, closing ------------------------------------------------------------------------------------------


def test_a_container_is_forgotten_after_its_time(where: dict[str, Any], raw: redis.Redis) -> None:
    td = TensorDict(a=torch.zeros(3), n={"b": torch.zeros(3)}, text="x", batch_size=3)
    td.to_store(**where)[0] = td[0]  # what torch imports for the first time takes a second
    store = td.to_store(ttl=3, **where)
    keys = list(raw.scan_iter(base(store) + "*"))
    assert len(keys) >= 8 and all(0 < raw.pttl(key) <= 3000 for key in keys)
    for _ in range(3):
        time.sleep(1.2)
        store[0] = TensorDict(a=torch.ones(()), n={"b": torch.ones(())})
    assert store["a"].sum() == 1
    end = time.monotonic() + 10
    while list(raw.scan_iter(base(store) + "*")):
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(KeyError):
        store["a"]
    with pytest.raises(KeyError, match="expired"):
        again(store)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="ttl"):
            TensorDictStore(ttl=wrong, **where)


def test_what_another_process_has_added_is_not_forgotten_before_the_rest(
    where: dict[str, Any], raw: redis.Redis
) -> None:
    store = TensorDict(a=torch.zeros(3), batch_size=3).to_store(ttl=1000, **where)
    other = again(store, ttl=1000)
    store["b"] = torch.ones(3)
    for key in raw.scan_iter(base(store) + "*"):
        raw.pexpire(key, 5000)
    # It knows nothing of "b".
    other[0] = TensorDict(a=torch.ones(()))
    assert all(raw.pttl(key) > 900_000 for key in raw.scan_iter(base(store) + "*"))


def test_clear_redis_leaves_nothing(where: dict[str, Any], raw: redis.Redis) -> None:
    beside = TensorDict(a=torch.zeros(3)).to_store(**where)
    store = TensorDict(a=torch.zeros(3), n={"b": torch.zeros(3)}, text="x", batch_size=3).to_store(**where)
    store.clear_redis()
    assert not list(raw.scan_iter(base(store) + "*")) and not list(store.keys()) and list(beside.keys()) == ["a"]
    store["new"] = torch.ones(3)
    assert again(store).batch_size == (3,)
    store.lock_()
    with pytest.raises(RuntimeError, match="lock"):
        store.clear_redis()


def test_a_closed_container_says_so(where: dict[str, Any]) -> None:
    with TensorDict(a=torch.zeros(3)).to_store(**where) as store:
        pass
    assert "closed container" in repr(store)
    with pytest.raises(OSError, match="was closed"):
        store["a"]


# --- what fails -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_stored_is_named_and_leaves_everything_as_it_was(
    where: dict[str, Any], raw: redis.Redis
) -> None:
    store = TensorDict(a=torch.zeros(3), batch_size=3).to_store(**where)
    before = {key: raw.dump(key) for key in raw.scan_iter(base(store) + "*")}
    with pytest.raises(NotImplementedError, match=r"'n', 'odd'.*JSON"):
        store.update({"b": torch.ones(3), "n": {"odd": NonTensorData({1, 2}, batch_size=[3])}})
    with pytest.raises(RuntimeError, match="'b'"):
        store["b"] = torch.ones(4)
    with pytest.raises(NotImplementedError, match="'c'"):
        store["c"] = torch.nested.nested_tensor([torch.ones(1), torch.ones(2), torch.ones(1)], layout=torch.jagged)
    assert {key: raw.dump(key) for key in raw.scan_iter(base(store) + "*")} == before
    count = raw.dbsize()
    with pytest.raises(NotImplementedError, match="odd"):
        TensorDict(a=torch.ones(3), odd=NonTensorData(object())).to_store(**where)
    assert raw.dbsize() == count


HOSTILE: list[tuple[dict[str, str], bytes, str]] = [
    ({"shape": "[3, -1]", "dtype": "torch.float32"}, b"", "shape"),
    ({"shape": "[3", "dtype": "torch.float32"}, b"", "x"),
    ({"shape": '{"a": 1}', "dtype": "torch.float32"}, b"", "shape"),
    ({"shape": "[4611686018427387904]", "dtype": "torch.float32"}, b"", "shape"),
    ({"shape": "[3]", "dtype": "torch.load"}, bytes(12), "dtype"),
    ({"shape": "[3]", "dtype": "os.system"}, bytes(12), "dtype"),
    ({"shape": "[3]"}, bytes(12), "dtype"),
    ({"shape": "[3]", "dtype": "torch.float32"}, bytes(11), "fewer bytes"),
    ({"is_non_tensor": "1", "encoding": "pickle"}, pickle.dumps(print), "pickle"),
    ({"is_non_tensor": "1", "encoding": "json"}, b"{", "x"),
    ({"is_non_tensor": "1", "encoding": "json"}, b"\xff", "x"),
]


@pytest.mark.parametrize(("fields", "data", "reason"), HOSTILE, ids=str)
def test_what_others_wrote_is_checked(
    where: dict[str, Any], raw: redis.Redis, fields: dict[str, str], data: bytes, reason: str
) -> None:
    store = TensorDict(a=torch.ones(3), batch_size=[]).to_store(**where)
    raw.hset(base(store) + "m:x", mapping=fields)
    raw.set(base(store) + "d:x", data)
    raw.sadd(base(store) + "__keys__", "x", b"\xff")
    found = TensorDictStore(td_id=store.td_id, batch_size=None, **where) if "fewer" in reason else store
    with pytest.raises(OSError, match=reason):
        found["x"]
    assert found["a"].sum() == 3


@pytest.mark.parametrize("name", ["__batch_size__", "__device__", "__groups__"])
def test_a_broken_header_is_an_error(where: dict[str, Any], raw: redis.Redis, name: str) -> None:
    store = TensorDict(n={"b": torch.ones(3)}, batch_size=[]).to_store(**where)
    if name == "__groups__":
        raw.hset(base(store) + name, "n", '{"_batch_size": ["x"]}')
    else:
        raw.set(base(store) + name, "[-1, {}]")
    with pytest.raises(OSError, match="container"):
        again(store)["n"]


def test_no_such_container(where: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match=r"nothing-there.*never written"):
        TensorDictStore.from_store(td_id="nothing-there", **where)
    store = TensorDict(a=torch.zeros(3, 2), batch_size=3).to_store(**where)
    with pytest.raises(ValueError, match=r"'a'.*\[3, 2\]"):
        TensorDictStore(td_id=store.td_id, batch_size=[4], **where)
    assert again(store).batch_size == (3,)
    with pytest.raises(ValueError, match="td_id"):
        TensorDictStore(td_id="a}b", **where)


def test_no_server(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConnectionError, match=r"nowhere.sock does not answer"):
        TensorDictStore(unix_socket_path=str(tmp_path / "nowhere.sock"))


def test_a_server_that_is_killed_is_an_error_and_the_same_call_works_again(server: RedisServer) -> None:
    td = TensorDict(a=torch.ones(1000, 10), b={"c": torch.ones(1000)}, batch_size=1000)
    store = td.to_store(unix_socket_path=server.socket)
    server.kill()
    for call in (lambda: store["a"], lambda: store.zero_(), lambda: store.set("new", torch.zeros(1000))):
        with pytest.raises(ConnectionError, match="does not answer.*same call works again"):
            call()
    server.start()
    assert (store.to_tensordict() == td).all() and list(store.keys()) == ["a", "b"]
    store.set("new", torch.zeros(1000))
    store.zero_()
    assert not store["a"].any() and not store["b", "c"].any()


def test_a_restart_within_a_second_is_not_even_seen(server: RedisServer) -> None:
    store = TensorDict(a=torch.ones(10), batch_size=10).to_store(unix_socket_path=server.socket)
    server.kill()
    later = threading.Timer(0.2, server.start)
    later.start()
    store[3] = TensorDict(a=torch.tensor(5.0))
    later.join()
    assert store["a"].sum() == 14


def test_a_server_killed_in_mid_transfer_has_all_or_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (redis_wire, redis_items, store_module):
        monkeypatch.setattr(module, "LIMIT", 1 << 16)
    td = TensorDict(a=torch.zeros(1 << 18), b=torch.zeros(1 << 18), batch_size=[])
    store = td.to_store(unix_socket_path=server.socket)
    new = TensorDict(a=torch.ones(1 << 19), b=torch.ones(1 << 19))
    real, sent = store_module.Server.upload, []

    def upload(self: Any, *args: Any) -> Any:
        sent.append(args)
        if len(sent) == 2:
            server.kill()
        return real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(store_module.Server, "upload", upload)
        with pytest.raises(ConnectionError):
            store.update(new)
    assert len(sent) == 2
    server.start()
    assert (store.to_tensordict() == td).all()
    store.update(new)
    assert (store.to_tensordict() == new).all()


def test_a_server_that_has_lost_everything(tmp_path: pathlib.Path) -> None:
    server = RedisServer(tmp_path)
    try:
        store = TensorDict(a=torch.ones(10), batch_size=10).to_store(unix_socket_path=server.socket)
        server.kill()
        server.start()
        with pytest.raises(OSError, match="'a'.*no longer there.*started anew"):
            store[3] = TensorDict(a=torch.tensor(5.0))
        store["a"] = torch.ones(10)
        store[3] = TensorDict(a=torch.tensor(5.0))
        found = TensorDictStore.from_store(unix_socket_path=server.socket, td_id=store.td_id)
        assert found.batch_size == (10,) and found["a"].sum() == 14
    finally:
        server.kill()


def test_what_the_server_refuses_is_an_error(server: RedisServer) -> None:
    raw = redis.Redis(unix_socket_path=server.socket)
    store = TensorDict(a=torch.ones(10), batch_size=10).to_store(unix_socket_path=server.socket)
    raw.config_set("maxmemory", 1)
    with pytest.raises(OSError, match="container.*memory"):
        store["b"] = torch.ones(10)
    raw.config_set("maxmemory", 0)
    assert list(store.keys()) == ["a"]
    raw.config_set("requirepass", "secret")
    with pytest.raises(OSError, match="refuses|NOAUTH|Authentication"):
        TensorDictStore(unix_socket_path=server.socket, td_id=store.td_id, client_name="new")
    found = TensorDictStore(unix_socket_path=server.socket, td_id=store.td_id, password="secret")
    raw.close()
    assert found["a"].sum() == 10 and "secret" not in repr(found) + str(found._store.address)


def test_no_pickle_has_the_password(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = redis.Redis(unix_socket_path=server.socket)
    raw.config_set("requirepass", "secret word")
    where: dict[str, Any] = {"unix_socket_path": server.socket, "password": "secret word"}
    td = TensorDict(a=torch.ones(10), n=TensorDict(b=torch.ones(10)))
    store, stack = td.to_store(**where), lazy_stack([td, td]).to_store(**where)
    given = TensorDictStore(td_id=store.td_id, client=redis.Redis(**where))
    for found in (store, store["n"], stack, given):
        with pytest.raises(pickle.PicklingError, match="'password'.*TENSORDICT_REDIS_PASSWORD.*allow_secrets=True"):
            pickle.dumps(found)
    assert "secret" not in repr(store._store.address)
    # A process that multiprocessing starts is given it, and so is whoever is told to be.
    assert pickle.loads(ForkingPickler.dumps(store))["a"].sum() == 10
    allowed = TensorDictStore.from_store(td_id=store.td_id, allow_secrets=True, **where)
    assert pickle.loads(pickle.dumps(allowed))["n", "b"].sum() == 10
    monkeypatch.setenv("TENSORDICT_REDIS_PASSWORD", "secret word")
    for made in (store, stack):
        there = type(made).from_store(unix_socket_path=server.socket, td_id=made.td_id)
        data = pickle.dumps(there)
        assert b"secret" not in data and pickle.loads(data)["a"].sum() == there["a"].sum()
    raw.close()


def test_the_guide_runs() -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "redis.md").read_text(), re.S):
        exec(block.replace("/run/redis/redis.sock", shared_socket()), {})


# --- the reference ----------------------------------------------------------------------------------------------------

REFERENCE_READS = """
import json, sys, torch
from tensordict.store import TensorDictStore
store = TensorDictStore.from_store(unix_socket_path=sys.argv[1], td_id=sys.argv[2])
found = {str(key): store[key].tolist() for key in (("a"), ("n", "b"), ("new", "c"))}
found["text"], found["dict"] = store["text"], store["dict"]
found["batch"], found["row"] = list(store.batch_size), store[1]["a"].tolist()
store[2] = {"a": torch.full((2,), 9.0)}
store["mine"] = torch.arange(3)
print(json.dumps(found))
"""

REFERENCE_WRITES = """
import sys, torch
from tensordict import TensorDict, NonTensorData
from tensordict.store import TensorDictStore
td = TensorDict({"a": torch.arange(6.).view(3, 2), "n": TensorDict({"b": torch.tensor([True, False, True])}, [3]),
    "text": "x", "dict": NonTensorData({"x": [1, None]}, batch_size=[3])}, [3])
print(td.to_store(unix_socket_path=sys.argv[1])._td_id)
"""


@pytest.mark.reference
def test_the_reference_reads_and_changes_ours(where: dict[str, Any], behaviour: Reference) -> None:
    td = TensorDict(a=torch.arange(6.0).view(3, 2), n={"b": torch.arange(3)}, batch_size=3)
    td["text"], td["dict"] = "x", NonTensorData({"x": [1, None]}, batch_size=[3])
    store = td.to_store(**where)
    store["new", "c"] = torch.ones(3, 1)
    found = json.loads(behaviour.run(REFERENCE_READS, shared_socket(), store.td_id))
    assert found == {
        "a": td["a"].tolist(), "('n', 'b')": [0, 1, 2], "('new', 'c')": [[1], [1], [1]], "text": "x",
        "dict": {"x": [1, None]}, "batch": [3], "row": [2, 3],
    }  # fmt: skip
    assert torch.equal(store["a"][2], torch.full((2,), 9.0)) and torch.equal(store["mine"], torch.arange(3))


@pytest.mark.reference
def test_ours_reads_and_changes_the_reference(where: dict[str, Any], behaviour: Reference) -> None:
    td_id = behaviour.run(REFERENCE_WRITES, shared_socket()).strip()
    store = TensorDictStore.from_store(td_id=td_id, **where)
    assert store.batch_size == (3,) and store["n"].batch_size == (3,) and store.names == [None]
    assert torch.equal(store["a"], torch.arange(6.0).view(3, 2)) and store["n", "b"].tolist() == [True, False, True]
    assert store["text"] == "x" and store["dict"] == {"x": [1, None]}
    store["new", "c"] = torch.ones(3, 1)
    found = json.loads(behaviour.run(REFERENCE_READS, shared_socket(), td_id))
    assert found["('new', 'c')"] == [[1], [1], [1]] and found["batch"] == [3]
    assert torch.equal(store["a"][2], torch.full((2,), 9.0))


def test_nested_lazy_stacks_are_stored_as_dense_containers(where: dict[str, Any]) -> None:
    td = TensorDict(n=lazy_stack([TensorDict(b=torch.tensor(i)) for i in range(3)]), batch_size=3)
    assert torch.equal(td.to_store(**where)["n", "b"], torch.arange(3))
