"""Lazy stacks on Redis servers: elements that differ, what goes over the wire, and what happens when things fail."""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import torch
from io_helpers_redis import base, requests

from redis_server import RedisServer, shared_socket
from reference import Reference
from tensordict import LazyStackedTensorDict, NonTensorData, TensorClass, TensorDict, lazy_stack
from tensordict.io.stores import redis as store_module
from tensordict.io.stores import redis_wire
from tensordict.io.stores.array_store import StaleError
from tensordict.store import LazyStackedTensorDictStore, TensorDictStore


@pytest.fixture
def where() -> dict[str, Any]:
    return {"unix_socket_path": shared_socket()}


@pytest.fixture
def raw() -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=shared_socket()) as client:
        yield client


def again(store: Any) -> Any:
    """The same stack as another process would open it."""
    return LazyStackedTensorDictStore.from_store(td_id=store.td_id, unix_socket_path=shared_socket())


def runs(count: int = 4) -> LazyStackedTensorDict:
    """Elements that differ in the shapes of an entry."""
    members = []
    for at in range(count):
        inner = TensorDict(b=torch.tensor(at), h=torch.full((at, 2), at, dtype=torch.float16))
        members.append(TensorDict(a=torch.full((3,), float(at)), n=inner))
    return lazy_stack(members)


def assert_same(found: Any, expected: Any) -> None:
    assert found.batch_size == expected.batch_size and len(found.tensordicts) == len(expected.tensordicts)
    for ours, theirs in zip(found.tensordicts, expected.tensordicts, strict=True):
        assert set(ours.keys(True)) == set(theirs.keys(True)) and ours.batch_size == theirs.batch_size
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key])


# --- what comes back --------------------------------------------------------------------------------------------------


def test_elements_that_differ_come_back(where: dict[str, Any]) -> None:
    stack = runs()
    store = stack.to_store(**where)
    assert type(store) is LazyStackedTensorDictStore and set(store.keys(True)) == set(stack.keys(True))
    for found in (store, again(store), TensorDictStore.from_store(td_id=store.td_id, **where)):
        assert type(found) is LazyStackedTensorDictStore
        assert_same(found, stack)
        assert_same(found.to_local(), stack)
        assert type(found.to_local()) is LazyStackedTensorDict and type(found.to_local()[0]) is TensorDict
    assert torch.equal(store["n", "b"], torch.arange(4))
    with pytest.raises(RuntimeError, match="'h'.*different shapes"):
        store["n", "h"]
    assert [len(row) for row in store.get(("n", "h"), as_list=True)] == [0, 1, 2, 3]
    assert_same(store[[3, 1]], lazy_stack([stack[3], stack[1]]))
    assert all(type(member) is TensorDict for member in torch.cat([store, store])._members())
    assert str(list(store[2].keys())) in str([list(stack[2].keys())])


@pytest.mark.parametrize("dim", [0, 1])
def test_batch_dims_names_and_sizes(where: dict[str, Any], dim: int) -> None:
    members = [TensorDict(a=torch.randn(2, 5), n=TensorDict(b=torch.randn(2, 1), batch_size=[2, 1]), batch_size=[2])]
    members += [members[0] + 1, members[0] + 2]
    stack = LazyStackedTensorDict(*members, stack_dim=dim, stack_dim_name="run")
    store = stack.to_store(**where)
    for found in (store, again(store), pickle.loads(pickle.dumps(store))):
        assert found.batch_size == stack.batch_size and found.names == stack.names and found.stack_dim == dim
        assert torch.equal(found["a"], stack["a"]) and torch.equal(found["n", "b"], stack["n", "b"])
        assert found["n"].batch_size == stack["n"].batch_size
        index = (1, slice(None)) if dim else (slice(None), 1)
        assert torch.equal(found[index]["a"], stack[index]["a"])
    store[..., 0] = stack[..., 1]
    assert torch.equal(again(store)["a"][:, 0], stack["a"][:, 1])
    lengths = lazy_stack([TensorDict(a=torch.ones(length), batch_size=[length]) for length in (2, 3)]).to_store(**where)
    assert again(lengths).batch_size == (2, -1) and again(lengths)[1].batch_size == (3,)


class Run(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


def test_tensorclasses(where: dict[str, Any]) -> None:
    members = [Run(x=torch.ones(at), y=torch.tensor(at), batch_size=[]) for at in range(3)]
    store = lazy_stack(members).to_store(**where)
    for found in (store, LazyStackedTensorDictStore.from_store(td_id=store.td_id, **where)):
        assert type(found) is Run and type(found[2]) is Run and found[2].y == 2 and len(found[2].x) == 2


def test_elements_are_pickled_as_their_address(where: dict[str, Any]) -> None:
    store = lazy_stack([TensorDict(a=torch.ones(1000), n={"b": torch.tensor(at)}) for at in range(3)]).to_store(**where)
    for value, key in (
        (store, "a"),
        (store[2], "a"),
        (store[2]["n"], "b"),
        (store["n"], "b"),
        (store.split(2)[0], "a"),
    ):
        data = pickle.dumps(value)
        assert len(data) < 2000 and torch.equal(pickle.loads(data)[key], value[key])


# --- requests ---------------------------------------------------------------------------------------------------------


def test_all_of_a_stack_is_one_request(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    members = [
        TensorDict({f"k{at}": torch.full((row % 3 + at % 2,), float(row)) for at in range(8)}).update(
            {"n": {"b": torch.tensor(row)}, "even": torch.full((3,), row)}
        )
        for row in range(50)
    ]
    stack = lazy_stack(members)
    # What is there (nothing), all that is written, and that it is there.
    assert requests(monkeypatch, lambda: stack.to_store(**where)) == 2
    store = stack.to_store(**where)
    for call, count in [
        (lambda: store.to_local(), 1), (lambda: store["even"], 1), (lambda: store["n", "b"], 2),
        (lambda: store[7]["k3"], 1),
        (lambda: store[[3, 40, 3]], 1), (lambda: store[10:20], 1), (lambda: store.get("k1", as_list=True), 4),
        (lambda: store.clone(), 1), (lambda: store.copy(), 2), (lambda: store["n"] + 1, 4),
        (lambda: store.update_(stack), 1), (lambda: store.update(stack), 1),
        (lambda: store.set("new", stack["even"]), 1),
        (lambda: store.__setitem__(3, members[3]), 1), (lambda: store[5].to_tensordict(), 1),
    ]:  # fmt: skip
        assert requests(monkeypatch, call) <= count
    numbers = store.to_local().to_store(**where)
    for call, factor in [(lambda: numbers.mul_(2), 2), (lambda: numbers.apply_(torch.Tensor.neg_), -2)]:
        assert requests(monkeypatch, call) <= 3
        for ours, theirs in zip(numbers.to_local(), members):
            assert all(torch.equal(ours[key], theirs[key] * factor) for key in ("k3", "even", ("n", "b")))
    assert all(torch.equal(ours["k3"], theirs["k3"]) for ours, theirs in zip(store.to_local(), members))


def test_only_the_elements_that_are_asked_for_are_sent(where: dict[str, Any], raw: redis.Redis) -> None:
    stack = lazy_stack([TensorDict(a=torch.full((1000 + at,), float(at)), b=torch.ones(1000)) for at in range(200)])
    store = stack.to_store(**where)

    def sent(call: Any, name: str) -> int:
        before = raw.info("stats")[name]
        call()
        return int(raw.info("stats")[name] - before)

    assert sent(lambda: store[[7, 150]], "total_net_output_bytes") < 30_000
    assert sent(lambda: store[7]["a"], "total_net_output_bytes") < 15_000
    assert sent(lambda: store[7].set_("a", torch.zeros(1007)), "total_net_input_bytes") < 15_000
    assert sent(lambda: store[7].set("a", torch.zeros(5)), "total_net_input_bytes") < 15_000
    assert len(store[7]["a"]) == 5 and torch.equal(again(store)[8]["a"], stack[8]["a"])


# --- writing ----------------------------------------------------------------------------------------------------------


def test_an_element_may_change_its_shapes_and_entries(where: dict[str, Any], raw: redis.Redis) -> None:
    stack = runs()
    store = stack.to_store(**where)
    other = again(store)
    for target in (stack, store):
        target[1]["a"] = torch.arange(7.0)
        target[0].update({"a": torch.zeros(2, 2)})
        target[2]["n"] = TensorDict(b=torch.tensor(9), h=torch.ones(2, dtype=torch.float16))
    assert_same(store, stack)
    assert_same(other, stack)
    for target in (stack, store):
        target["a"] = torch.ones(4, 2, dtype=torch.int16)
        target["n"] = lazy_stack([TensorDict(q=torch.ones(at)) for at in range(4)])
        target["new"] = [torch.ones(at) for at in range(4)]
        target.rename_key_("a", "z")
        del target["new"]
    assert_same(again(store), stack)
    assert not list(raw.scan_iter(base(store) + "?:new*")) and raw.hget(base(store) + "m:z", "homogeneous") == b"1"


def test_what_has_no_form_is_named_and_nothing_is_written(where: dict[str, Any], raw: redis.Redis) -> None:
    store = runs().to_store(**where)
    before = {key: raw.dump(key) for key in raw.scan_iter(base(store) + "*")}
    for call, error in [
        (
            lambda: store[1].set("a", torch.ones(3, dtype=torch.int64)),
            "'a' has the dtype torch.float32 in other elements",
        ),
        (lambda: store[1].update({"n": {"h": torch.ones(1, 2)}, "a": torch.ones(2)}), "'n', 'h'.*has the dtype"),
        (lambda: store[1].set("a", TensorDict()), "'a' would be a container and a tensor in different elements"),
        (lambda: store[1].set("new", torch.ones(2)), "'new' would be a tensor and missing in different elements"),
        (lambda: store[1].set("new", TensorDict()), "'new' would be a container and missing in different elements"),
        (lambda: store[1].__delitem__("a"), "'a' would be a tensor and missing"),
        (lambda: store[1].__delitem__("n"), "'n' would be a container and missing"),
        (lambda: store[1].set("n", TensorDict(b=torch.tensor(1))), r"'n', 'h'\) would be a tensor and missing"),
        (lambda: store[1].set("odd", "text"), "'odd' is a value that is no tensor"),
        (lambda: store.set("odd", NonTensorData("text", batch_size=[4])), "'odd' is a value.*to_tensordict.*densify"),
        (lambda: store.set("odd", NonTensorData({1, 2}, batch_size=[4])), "'odd'.*JSON"),
    ]:
        with pytest.raises(NotImplementedError, match=error):
            call()
    with pytest.raises(RuntimeError, match="fixed"):
        store.append(TensorDict())
    assert {key: raw.dump(key) for key in raw.scan_iter(base(store) + "*")} == before
    count = raw.dbsize()
    mixed = lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(1).int())])
    with pytest.raises(NotImplementedError, match="'a' has the dtypes torch.float32, torch.int32"):
        mixed.to_store(**where)
    some = lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(1), n=TensorDict(only=torch.ones(1)))])
    with pytest.raises(NotImplementedError, match="'n' would be a container and missing"):
        some.to_store(**where)
    with pytest.raises(NotImplementedError, match="'text' is a value"):
        lazy_stack([TensorDict(a=torch.ones(1), text="a")]).to_store(**where)
    for wrong in (TensorDict(a=torch.ones(2), batch_size=[2]), LazyStackedTensorDict(), 3):
        with pytest.raises(TypeError, match="lazy stack"):
            LazyStackedTensorDictStore.from_lazy_stack(wrong, **where)
    assert raw.dbsize() == count


def test_a_stack_is_made_anew_and_found_again(where: dict[str, Any]) -> None:
    made = LazyStackedTensorDictStore(count=3, inner_batch_size=[2], stack_dim=-1, **where)
    assert made.batch_size == (2, 3) and not list(made.keys())
    made["a"] = torch.arange(6).view(2, 3)
    same = LazyStackedTensorDictStore(count=3, inner_batch_size=[2], stack_dim=1, td_id=made.td_id, **where)
    assert torch.equal(same["a"], torch.arange(6).view(2, 3))
    with pytest.raises(ValueError, match=r"3 elements of batch size \[2\] stacked along dim 1"):
        LazyStackedTensorDictStore(count=4, inner_batch_size=[2], td_id=made.td_id, **where)
    for wrong in (0, -1, 2.0):
        with pytest.raises(ValueError, match="count"):
            LazyStackedTensorDictStore(count=wrong, inner_batch_size=[], **where)
    dense = TensorDict(a=torch.ones(2)).to_store(**where)
    with pytest.raises(ValueError, match="no lazy stack"):
        again(dense)
    with pytest.raises(KeyError, match="never written"):
        LazyStackedTensorDictStore.from_store(td_id="nothing-there", **where)
    with pytest.raises(ValueError, match="LazyStackedTensorDictStore.from_store"):
        TensorDictStore(td_id=made.td_id, **where)


def _write_elements(socket: str, td_id: str, number: int) -> None:
    store = LazyStackedTensorDictStore.from_store(unix_socket_path=socket, td_id=td_id)
    for at in range(number, 40, 2):
        store[at] = TensorDict(a=torch.full((3,), float(at)))
        store[f"of{number}_{at % 4}"] = torch.full((40,), number)
        for _ in range(1000):
            try:
                store[at]["h"] = torch.full((at,), at)
                break
            except StaleError:
                pass  # the other one has changed the shape of another element since


@pytest.mark.slow
def test_processes_that_write_other_elements_lose_nothing(where: dict[str, Any]) -> None:
    store = lazy_stack([TensorDict(a=torch.zeros(3), h=torch.zeros(2).long()) for _ in range(40)]).to_store(**where)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_elements, args=(shared_socket(), store.td_id, at)) for at in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert torch.equal(store["a"], torch.arange(40.0)[:, None].expand(40, 3))
    assert all(torch.equal(row, torch.full((at,), at)) for at, row in enumerate(store.get("h", as_list=True)))
    assert all((store[key] == int(key[2])).all() for key in ("of0_0", "of0_2", "of1_1", "of1_3"))


# --- time, clearing, faults -------------------------------------------------------------------------------------------


def test_time_clearing_and_closing(where: dict[str, Any], raw: redis.Redis) -> None:
    store = runs().to_store(ttl=3, **where)
    keys = list(raw.scan_iter(base(store) + "*"))
    assert len(keys) > 8 and all(0 < raw.pttl(key) <= 3000 for key in keys)
    time.sleep(0.5)
    store[1]["a"] = torch.arange(7.0)
    assert all(2500 < raw.pttl(key) <= 3000 for key in raw.scan_iter(base(store) + "*"))
    store.clear_redis()
    assert not list(raw.scan_iter(base(store) + "*")) and not list(store.keys())
    store["new"] = torch.ones(4)
    assert again(store).batch_size == (4,) and again(store)["new"].sum() == 4
    with pytest.raises(RuntimeError, match="lock"):
        store.lock_().clear_redis()
    store.close()
    with pytest.raises(OSError, match="was closed"):
        store["new"]


def test_a_write_whose_answer_is_lost_is_sent_again(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stack = runs()
    store = stack.to_store(**where)
    real = redis_wire.Wire.write

    def twice(self: Any, *args: Any) -> int:
        real(self, *args)
        return real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(redis_wire.Wire, "write", twice)
        for target in (stack, store):
            target[1].update({"a": torch.arange(7.0), "n": {"b": torch.tensor(7)}})
            target["n"] = lazy_stack([TensorDict(q=torch.ones(at)) for at in range(4)])
    assert_same(again(store), stack)
    # Another one came first: that is no answer of one's own.
    other = again(store)
    other[1]["a"], first = torch.ones(3), store._entries.server
    monkeypatch.setattr(first, "find_leaf", lambda path: first._metas[path])
    with pytest.raises(OSError, match=r"'a'.*another shape.*nothing was written"):
        store[1].update({"a": torch.ones(9)})
    assert len(other[1]["a"]) == 3


@pytest.mark.parametrize("late", [False, True])
def test_of_two_that_change_an_entry_at_once_the_second_is_told(
    where: dict[str, Any], raw: redis.Redis, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    stack = runs()
    store = stack.to_store(**where)
    other, real = again(store), redis_wire.Wire.send
    write, theirs = {"a": torch.ones(9)}, {"a": torch.zeros(5)}
    sent: list[Any] = []

    def interrupted(self: Any, commands: Any, key: Any = ()) -> Any:
        if self is not store._entries.server.wire or commands[0][0] != "WATCH" or sent:
            return real(self, commands, key)
        sent.append(commands)
        if not late:
            other[0].update(theirs)
            return real(self, commands, key)
        # Between the check and what is carried out.
        with raw.pipeline() as pipe:
            pipe.watch(*commands[0][1:])
            failed = pipe.execute_command(*commands[1])
            other[0].update(theirs)
            pipe.multi()
            for words in commands[3:-1]:
                pipe.execute_command(*words)
            with pytest.raises(redis.WatchError):
                pipe.execute()
        return [b"OK", failed, None]

    with monkeypatch.context() as patched:
        patched.setattr(redis_wire.Wire, "send", interrupted)
        with pytest.raises(StaleError, match="nothing was written"):
            store[1].update(write)
    assert sent
    stack[0].update(theirs)
    assert_same(again(store), stack)
    store[1].update(write)
    stack[1].update(write)
    assert_same(again(store), stack)


def test_entries_go_from_all_elements_at_once(where: dict[str, Any]) -> None:
    stack = lazy_stack(
        [
            TensorDict(a=torch.ones(at), hollow=TensorDict(), n={"b": torch.ones(2), "c": TensorDict()})
            for at in range(3)
        ]
    )
    store = stack.to_store(**where)
    for change in [
        lambda td: td.filter_empty_(),
        lambda td: td["n"].rename_key_("b", "d"),
        lambda td: td.exclude("a", inplace=True),
        lambda td: td.set("n", lazy_stack([TensorDict(e=torch.ones(at)) for at in range(3)])),
        lambda td: td.select(inplace=True),
    ]:
        change(stack)
        change(store)
        for found in (store, again(store)):
            assert_same(found, stack)


def test_a_server_killed_in_mid_transfer_has_all_or_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(tmp_path, keeps=True)
    try:
        for module in ("redis", "redis_items", "redis_wire"):
            monkeypatch.setattr(f"tensordict.io.stores.{module}.LIMIT", 1 << 14)
        stack = runs()
        store = lazy_stack([member.update({"big": torch.ones(1 << 14)}) for member in stack]).to_store(
            unix_socket_path=server.socket
        )
        real, sent = store_module.Server.upload, []

        def upload(self: Any, *args: Any) -> Any:
            sent.append(args)
            server.kill()
            return real(self, *args)

        new = stack.clone()
        new["big"] = torch.zeros(4, 1 << 14)
        with monkeypatch.context() as patched:
            patched.setattr(store_module.Server, "upload", upload)
            with pytest.raises(ConnectionError, match="same call works again"):
                store.update(new)
        assert sent
        server.start()
        assert_same(store.to_local(), stack)
        store.update(new)
        assert_same(store.to_local(), new)
    finally:
        server.kill()


HOSTILE: list[tuple[str, Any]] = [
    ("__count__", "3"),
    ("__count__", "-1"),
    ("__count__", "x"),
    ("__count__", "99999999999999"),
    ("__stack_dim__", "7"),
    ("__inner_batch_size__", "[-1]"),
    ("m:h", {"shapes": "[[1], [2], {}, [3]]"}),
    ("m:h", {"shapes": "[[1]]"}),
    ("m:h", {"shapes": "[[1], [-2], [2], [3]]"}),
    ("m:h", {"shapes": "[[1], [9999999], [2], [3]]"}),
    ("m:h", {"dtype": "os.system"}),
    ("m:h", {"shape": "[2]"}),
    ("m:h", {"is_non_tensor": "1", "encoding": "pickle"}),
    ("__groups__", {"": '{"_batch_sizes": [[1]]}'}),
    ("__groups__", {"": '{"_batch_sizes": [[1], [2], [-1], ["x"]]}'}),
    ("m:h", {"shapes": "[[1], null, [2]]"}),
]


def _read_all(store: Any) -> list[Any]:
    return [again(store)[at][name] for at in range(4) for name in ("a", "h")]


@pytest.mark.parametrize(("name", "value"), HOSTILE, ids=str)
def test_what_others_wrote_is_checked(where: dict[str, Any], raw: redis.Redis, name: str, value: Any) -> None:
    members = [TensorDict(a=torch.ones(2), h=torch.ones(at)) for at in range(4)]
    store = lazy_stack(members).to_store(**where)
    if isinstance(value, dict):
        raw.hset(base(store) + name, mapping=value)
    else:
        raw.set(base(store) + name, value)
    with pytest.raises(OSError, match=r"container|'h'|'a'"):
        _read_all(store)


# --- the reference ----------------------------------------------------------------------------------------------------

# It reads no element without elements, and stacks what differs as if it were all of the first shape.
REFERENCE = """
import json, sys, torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.store import LazyStackedTensorDictStore
store = LazyStackedTensorDictStore.from_store(unix_socket_path=sys.argv[1], td_id=sys.argv[2])
found = {"keys": sorted(map(str, store.keys(True, True))), "a": store["a"].tolist(), "b": store["n", "b"].tolist()}
found["h"] = [store[at]["n", "h"].tolist() for at in range(1, 4)]
found["size"] = list(store.batch_size)
store["mine"] = torch.arange(8).view(4, 2)
store[1].set_("a", torch.full((3,), 9.0))
store[2].set_(("n", "h"), torch.full((2, 2), 8.0, dtype=torch.float16))
members = [TensorDict({"a": torch.full((2, 3), float(i)), "n": {"b": torch.full((2,), i)}}, [2]) for i in range(3)]
dim = LazyStackedTensorDict(*members, stack_dim=1)
found["dim"] = LazyStackedTensorDictStore.from_lazy_stack(dim, unix_socket_path=sys.argv[1])._td_id
members = [TensorDict({"h": torch.arange(i * 2).view(i, 2), "a": torch.tensor(i > 1)}) for i in range(4)]
found["uneven"] = LazyStackedTensorDict(*members).to_store(unix_socket_path=sys.argv[1])._td_id
print(json.dumps(found))
"""


@pytest.mark.reference
def test_stacks_are_exchanged_with_the_reference(where: dict[str, Any], behaviour: Reference) -> None:
    stack = runs()
    store = stack.to_store(**where)
    store[3]["n", "h"] = stack[3]["n", "h"] = torch.ones(2, 2, dtype=torch.float16)
    found = json.loads(behaviour.run(REFERENCE, shared_socket(), store.td_id))
    dim, uneven = (TensorDictStore.from_store(td_id=found.pop(name), **where) for name in ("dim", "uneven"))
    assert found == {
        "keys": ["('n', 'b')", "('n', 'h')", "a"], "a": stack["a"].tolist(), "b": [0, 1, 2, 3], "size": [4],
        "h": [member["n", "h"].tolist() for member in stack.tensordicts[1:]],
    }  # fmt: skip
    stack["mine"], stack[1]["a"] = torch.arange(8).view(4, 2), torch.full((3,), 9.0)
    stack[2]["n", "h"] = torch.full((2, 2), 8.0, dtype=torch.float16)
    assert_same(store, stack)
    assert dim.batch_size == (2, 3) and dim.stack_dim == 1 and dim["a"].shape == (2, 3, 3)
    assert torch.equal(dim["n", "b"], torch.arange(3).expand(2, 3)) and dim["a"][0, :, 0].tolist() == [0, 1, 2]
    rows = uneven.get("h", as_list=True)
    assert all(torch.equal(row, torch.arange(i * 2).view(i, 2)) for i, row in enumerate(rows))
    assert uneven["a"].tolist() == [False, False, True, True]
    uneven[1]["h"] = torch.zeros(3, 2).long()
    assert again(uneven)[1]["h"].shape == (3, 2) and again(uneven)[2]["h"].tolist() == [[0, 1], [2, 3]]
