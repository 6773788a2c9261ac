"""A compiled function is compiled again for a container that answers its questions differently.

Each read is called twice in compiled code, with two containers that differ in one respect, in both orders. Dynamo sets
no guard where a `KeyError` or an `AttributeError` is caught, so a wrong form of a read gives the answer of the first
container for the second one, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensordict import (
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    is_non_tensor,
    is_tensor_collection,
    lazy_cat,
    lazy_stack,
    set_lazy_legacy,
)
from tensordict.base import NO_DEFAULT
from tensordict.nn import TensorDictModule, TensorDictSequential

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Read = Callable[[Any], Any]
# The content of a container: a number stands for a tensor, a dict for a nested container.
Content = dict[str, Any]


class Fields(TensorClass):
    a: torch.Tensor | None = None
    k: torch.Tensor | None = None
    n: TensorDict | None = None
    v: str | None = None


class Keys(TypedTensorDict, total=False):
    a: torch.Tensor
    k: torch.Tensor
    n: TensorDict
    v: str


class KeysWithDefaults(TypedTensorDict):
    a: torch.Tensor = None
    k: torch.Tensor = None
    n: TensorDict = None
    v: str = None


# --- kinds of containers ----------------------------------------------------------------------------------------------


def tensors(content: Content, size: tuple[int, ...]) -> Content:
    return {
        name: tensors(value, size)
        if isinstance(value, dict)
        else torch.full((*size, 2), value)
        if isinstance(value, float)
        else value
        for name, value in content.items()
    }


def dense(content: Content, size: tuple[int, ...] = (2,), **state: Any) -> TensorDict:
    return TensorDict(tensors(content, size), batch_size=size, **state)


def with_state(td: Any, names: list[str] | None = None, lock: bool = False) -> Any:
    if names is not None:
        td.names = names
    return td.lock_() if lock else td


def stacked(content: Content, names: Any = None, lock: bool = False, **state: Any) -> LazyStackedTensorDict:
    return with_state(lazy_stack([row.clone() for row in dense(content, **state).unbind(0)]), names, lock)


def stacked_twice(content: Content, names: Any = None, lock: bool = False, **state: Any) -> LazyStackedTensorDict:
    td = lazy_stack([stacked(content, **state), stacked(content, **state)])
    return with_state(td, names and [*names, None], lock)


def fields(content: Content, size: tuple[int, ...] = (2,), **state: Any) -> Fields:
    values = tensors(content, size)
    if isinstance(values.get("n"), dict):
        values["n"] = TensorDict(values["n"], size)
    return Fields(**values, batch_size=size, **state)


def stacked_fields(content: Content, names: Any = None, lock: bool = False, **state: Any) -> Any:
    return with_state(lazy_stack([row.clone() for row in fields(content, **state).unbind(0)]), names, lock)


def fields_over_stack(content: Content, **state: Any) -> Fields:
    return Fields.from_tensordict(stacked(content, **state))


def viewed(content: Content, size: tuple[int, ...] = (2,), names: Any = None, **state: Any) -> Any:
    source = dense(content, (1, *size), names=names and [None, *names], **state)
    with set_lazy_legacy(True):
        return source.view(size)


def part(content: Content, size: tuple[int, ...] = (2,), names: Any = None, lock: bool = False, **state: Any) -> Any:
    source = dense(content, (3, *size), names=names and [None, *names], **state)
    return with_state(source._get_sub_tensordict(1), lock=lock)


def params(content: Content, lock: bool = False, **state: Any) -> TensorDictParams:
    return with_state(TensorDictParams(dense(content, **state), no_convert=True), lock=lock)


def concatenated(content: Content, names: Any = None, lock: bool = False, **state: Any) -> Any:
    return with_state(lazy_cat([dense(content, (1,), **state), dense(content, (1,), **state)]), lock=lock)


KINDS: dict[str, Callable[..., Any]] = {
    "dense": dense,
    "nested": lambda content, **state: TensorDict(inner=dense(content, **state)),
    "lazy stack": stacked,
    "stack of stacks": stacked_twice,
    "tensorclass": fields,
    "tensorclass over a stack": fields_over_stack,
    "stack of tensorclasses": stacked_fields,
    "typed": lambda content, **state: Keys.from_tensordict(dense(content, **state)),
    "typed with defaults": lambda content, **state: KeysWithDefaults.from_tensordict(dense(content, **state)),
    "params": params,
    "view": viewed,
    "part": part,
    "concatenation": concatenated,
    "shared": lambda content, **state: dense(content, **state).share_memory_().unlock_(),
}
QUICK = ["dense", "tensorclass", "lazy stack"]
# Dynamo refuses to trace the operation of a lazy view, the reading of parts, and the module that copies parameters.
LEAVES_GRAPH = {"view", "concatenation", "params"}


# --- what two containers differ in ------------------------------------------------------------------------------------

A = {"a": 1.0}
# The two contents, and the key that is read.
ENTRIES: dict[str, tuple[Content, Content, Any]] = {
    "entry": (A, {**A, "k": 2.0}, "k"),
    "nested entry": ({**A, "n": {"b": 3.0}}, {**A, "n": {"b": 3.0, "k": 2.0}}, ("n", "k")),
    "level": (A, {**A, "n": {"k": 2.0}}, ("n", "k")),
    "second level": ({**A, "n": {"b": 3.0}}, {**A, "n": {"b": 3.0, "d": {"k": 2.0}}}, ("n", "d", "k")),
    "container": (A, {**A, "n": {"k": 2.0}}, "n"),
    "value": (A, {**A, "v": "text"}, "v"),
    "value of another": ({**A, "v": "x"}, {**A, "v": "longer"}, "v"),
    "tensor or container": ({**A, "n": {"k": 2.0}}, {**A, "n": {"k": {"k": 2.0}}}, ("n", "k")),
}
QUICK_ENTRIES = ["entry", "level", "value"]


def tried(call: Read) -> Read:
    """Call it, and answer as a program does that catches the error of a missing entry."""

    def read(td: Any) -> Any:
        try:
            return call(td)
        except KeyError:
            return "absent"

    return read


def tried_attribute(name: str) -> Read:
    def read(td: Any) -> Any:
        try:
            return getattr(td, name)
        except AttributeError:
            return "absent"

    return read


def tried_unused(key: Any) -> Read:
    def read(td: Any) -> str:
        try:
            td[key]
            return "there"
        except KeyError:
            return "absent"

    return read


def quick_reads(key: Any) -> dict[str, Read]:
    """The ways to read an entry that may be absent."""
    return {
        "get": lambda td: td.get(key),
        "get default": lambda td: td.get(key, 5),
        "get_at": lambda td: td.get_at(key, 0, 5),
        "try": tried(lambda td: td[key]),
        "in": lambda td: key in td,
        "keys": lambda td: sorted(map(str, td.keys(True))),
        "pop": lambda td: td.pop(key, 5),
        "setdefault": lambda td: td.setdefault(key, td["a"] * 7),
        "del": tried(lambda td: td.__delitem__(key)),
        "copy": lambda td: td.copy(),
        **({"attribute": tried_attribute(key)} if isinstance(key, str) else {}),
    }


def more_reads(key: Any) -> dict[str, Read]:
    return {
        "get is None": lambda td: td.get(key) is None,
        "get without default": tried(lambda td: td.get(key, NO_DEFAULT)),
        "get_non_tensor": lambda td: td.get_non_tensor(key, 5),
        "get_str": lambda td: td._get_str(key, 5) if isinstance(key, str) else None,
        "try unused": tried_unused(key),
        "not in": lambda td: 1 if key not in td else 2,
        "in keys": lambda td: key in td.keys(True),
        "in leaves": lambda td: key in td.keys(True, True),
        "leaves": lambda td: sorted(map(str, td.keys(True, True))),
        "len keys": lambda td: len(td.keys()),
        "len nested keys": lambda td: len(td.keys(True)),
        "values": lambda td: list(td.values(True, True)),
        "items": lambda td: dict(td.items()),
        "unpacked": lambda td: sorted({**td}),
        "pop unused": lambda td: (td.pop(key, 5), None)[1],
        "try pop": tried(lambda td: td.pop(key)),
        "try set_": tried(lambda td: td.set_(key, td["a"] * 2)),
        "set in place": lambda td: td.set(key, td["a"] * 5, inplace=True),
        "entry_class": tried(lambda td: td.entry_class(key).__name__),
        "get_item_shape": tried(lambda td: td.get_item_shape(key)),
        "is_non_tensor": tried(lambda td: td.is_non_tensor(key)),
        "select": tried(lambda td: td.select(key)),
        "select leniently": lambda td: td.select(key, strict=False),
        "exclude": lambda td: td.exclude(key),
        "rename": tried(lambda td: td.rename_key_(key, "a")),
        "update": lambda td: td.update({"a": td["a"] * 3}),
        "clone": lambda td: td.clone() if not isinstance(td, TensorDictParams) else None,
        "apply": lambda td: td.apply(lambda leaf: leaf + 1),
        "apply beside": lambda td: td.exclude("v").apply(
            lambda one, other: one if other is None else one + other, td.select("a"), default=None
        ),
        "apply without default": tried(
            lambda td: td.exclude("v").apply(lambda one, other: one + other, td.select("a"))
        ),
        "flatten_keys": lambda td: sorted(td.flatten_keys(".").keys()),
        "row": lambda td: td[0],
        "to_dict": lambda td: td.to_dict(),
        "depth": lambda td: td.depth,
        "is_empty": lambda td: td.exclude("a").is_empty(),
        **({"getattr": lambda td: getattr(td, key, 5)} if isinstance(key, str) else {}),
        **({"hasattr": lambda td: hasattr(td, key)} if isinstance(key, str) else {}),
    }


# The two contents and states.
STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "names": ({}, {"names": ["t"]}),
    "other names": ({"names": ["s"]}, {"names": ["t"]}),
    "device": ({}, {"device": "cpu"}),
    "lock": ({}, {"lock": True}),
    "size": ({}, {"size": (3,)}),
    "dims": ({}, {"size": (2, 2)}),
}
QUICK_STATES: dict[str, Read] = {
    "names": lambda td: td.names,
    "has names": lambda td: td._has_names(),
    "device": lambda td: td.device,
    "is_locked": lambda td: td.is_locked,
    "batch_size": lambda td: td.batch_size,
    "len": lambda td: len(td),
    "copy": lambda td: td.copy(),
}
QUICK_STATES_OF = ["names", "device", "lock"]
MORE_STATES: dict[str, Read] = {
    "device is None": lambda td: td.device is None,
    "ndim": lambda td: (td.ndim, td.numel()),
    "clone": lambda td: td.clone() if not isinstance(td, TensorDictParams) else None,
    "add": lambda td: td + 1,
    "names of a row": lambda td: td[0].names,
    "names of a stack": lambda td: torch.stack([td, td]).names,
    "lock of a stack": lambda td: lazy_stack([td, td]).is_locked,
    "device of a stack": lambda td: lazy_stack([td, td]).device,
    "state of a nested container": lambda td: (td["n"].is_locked, td["n"].names, td["n"].device, td["n"].batch_size),
    "write": lambda td: "locked" if td.is_locked else td.set("k", td["a"] * 2),
    "is_shared": lambda td: (td.is_shared(), td.is_memmap()),
    "empty": lambda td: td.empty(),
}
EMPTY_READS: dict[str, Read] = {
    "is_empty": lambda td: td.is_empty(),
    "len keys": lambda td: len(td.keys()),
    "not keys": lambda td: not td.keys(),
    "leaves": lambda td: len(list(td.keys(True, True))),
    "first": lambda td: next(iter(td.keys()), None),
    "apply": lambda td: td.apply(lambda leaf: leaf + 1),
    "copy": lambda td: td.copy(),
}
ORDER_READS: dict[str, Read] = {
    "keys": lambda td: list(td.keys()),
    "leaves": lambda td: list(td.keys(True, True)),
    "loop": lambda td: torch.cat([td[key] for key in td.keys()], -1),
    "values": lambda td: torch.cat(list(td.values()), -1),
    "leaf values": lambda td: torch.cat(list(td.values(True, True)), -1),
    "copy": lambda td: torch.cat(list(td.copy().values()), -1),
    "shallow clone": lambda td: torch.cat(list(td.clone(False).values()), -1),
    "clone": lambda td: torch.cat(list(td.clone().values()), -1) if not isinstance(td, TensorDictParams) else None,
    "exclude": lambda td: list(td.exclude("v").keys()),
    "replace": lambda td: list(td.replace({"k": td["k"] * 2}).keys()),
    "to_dict": lambda td: list(td.to_dict()),
    "add": lambda td: torch.cat(list((td + 1).values()), -1),
    "row": lambda td: torch.cat(list(td[0].values()), -1),
    "stack": lambda td: list(lazy_stack([td, td]).keys()),
    "popitem": lambda td: td.popitem()[0],
}


# --- the comparison ---------------------------------------------------------------------------------------------------


def described(value: Any) -> Any:
    """A result in a form that can be compared with `==`."""
    if is_tensor_collection(value):
        if is_non_tensor(value):
            return type(value), value.tolist(), value.batch_size
        entries = [(key, described(value.get(key))) for key in value.keys()]
        return type(value), value.batch_size, value.names, value.device, value.is_locked, entries
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return [described(item) for item in value] if type(value) in (list, tuple) else value


def outcome(call: Read, td: Any) -> Any:
    """The result of a call, or that it raised: with `fullgraph`, Dynamo raises an error of its own in its place."""
    try:
        return described(call(td))
    except Exception:
        return "an error"


def differing(
    reads: dict[str, Read], kind: str, first: Callable[[], Any], second: Callable[[], Any], fullgraph: bool
) -> list[str]:
    """List the reads that give another result in compiled code than in Python, each with the difference."""
    found = []
    for name, given in reads.items():
        read = (lambda td, given=given: given(td["inner"])) if kind == "nested" else given
        for makers in ((first, second), (second, first)):
            torch._dynamo.reset()
            compiled = torch.compile(read, fullgraph=fullgraph and kind not in LEAVES_GRAPH, backend="eager")
            for make in makers:
                td, same = make(), make()
                pair = [(outcome(call, of), described(of)) for call, of in ((compiled, td), (read, same))]
                if pair[0] != pair[1]:
                    found.append(f"{name}: {pair[0]}, not {pair[1]}")
    return found


def of_entries(kind: str, change: str, fullgraph: bool, all_reads: bool) -> list[str]:
    first, second, key = ENTRIES[change]
    # Dynamo does not trace `tensor.name` of the tensor that a stack makes, where the way to an entry ends at it.
    fullgraph = fullgraph and not ("stack" in kind and change == "tensor or container")
    reads = {**quick_reads(key), **(more_reads(key) if all_reads else {})}
    return differing(reads, kind, lambda: KINDS[kind](first), lambda: KINDS[kind](second), fullgraph)


def of_states(kind: str, change: str, fullgraph: bool, all_reads: bool) -> list[str]:
    first, second = STATES[change]
    content, make = {**A, "n": {"b": 2.0}}, KINDS[kind]
    reads = {**QUICK_STATES, **(MORE_STATES if all_reads else {})}
    return differing(reads, kind, lambda: make(content, **first), lambda: make(content, **second), fullgraph)


def of_emptiness(kind: str, fullgraph: bool) -> list[str]:
    return differing(EMPTY_READS, kind, lambda: KINDS[kind]({}), lambda: KINDS[kind](A), fullgraph)


def of_order(kind: str, fullgraph: bool) -> list[str]:
    make = KINDS[kind]
    return differing(
        ORDER_READS, kind, lambda: make({"a": 1.0, "k": 2.0}), lambda: make({"k": 2.0, "a": 1.0}), fullgraph
    )


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)
    torch._dynamo.reset()


@pytest.mark.parametrize("change", QUICK_ENTRIES)
@pytest.mark.parametrize("kind", ["dense", "lazy stack"])
def test_entries(kind: str, change: str) -> None:
    assert of_entries(kind, change, True, False) == []


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("change", ENTRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_all_kinds(kind: str, change: str, fullgraph: bool) -> None:
    assert of_entries(kind, change, fullgraph, False) == []


@pytest.mark.slow
@pytest.mark.parametrize("change", QUICK_ENTRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_reads_of_entries(kind: str, change: str) -> None:
    assert of_entries(kind, change, True, True) == []


@pytest.mark.parametrize("change", QUICK_STATES_OF)
@pytest.mark.parametrize("kind", QUICK)
def test_states(kind: str, change: str) -> None:
    assert of_states(kind, change, True, False) == []


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("change", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_all_kinds(kind: str, change: str, fullgraph: bool) -> None:
    assert of_states(kind, change, fullgraph, True) == []


def test_emptiness_and_order() -> None:
    assert of_emptiness("dense", True) + of_order("dense", True) == []


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_emptiness_and_order_of_all_kinds(kind: str, fullgraph: bool) -> None:
    assert of_emptiness(kind, fullgraph) + of_order(kind, fullgraph) == []


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_optional_field_decides_on_a_branch(fullgraph: bool) -> None:
    def total(batch: Fields) -> torch.Tensor:
        return batch.a.sum() if batch.k is None else (batch.a * batch.k).sum()

    without, both = Fields(a=torch.ones(4)), Fields(a=torch.ones(4), k=torch.tensor([1.0, 0, 0, 0]))
    for batches in ((without, both), (both, without)):
        torch._dynamo.reset()
        compiled = torch.compile(total, fullgraph=fullgraph, backend="eager")
        assert [compiled(batch).item() for batch in batches] == [total(batch).item() for batch in batches]


def test_an_entry_that_one_member_of_a_stack_has() -> None:
    without, both = dense(A)[0], dense({**A, "k": 2.0})[0]
    makers = [
        lambda members=members: lazy_stack([td.clone() for td in members])
        for members in ((both, without), (without, both), (both, both), (without, without))
    ]
    reads = {name: read for name, read in quick_reads("k").items() if name in ("get", "try", "in", "keys")}
    for second in makers[1:3]:
        assert differing(reads, "lazy stack", makers[0], second, True) == []
    assert differing(reads, "lazy stack", makers[2], makers[3], True) == []


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_parameter_that_is_there_from_the_second_call_on(fullgraph: bool) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        bias = held.get("bias", None)
        return x if bias is None else x + bias

    held, x = TensorDictParams(TensorDict(weight=torch.ones(2))), torch.ones(2)
    compiled = torch.compile(shifted, fullgraph=fullgraph, backend="eager")
    assert compiled(x).tolist() == [1, 1]
    held["bias"] = torch.ones(2)
    assert compiled(x).tolist() == [2, 2]
    del held["bias"]
    assert compiled(x).tolist() == [1, 1]


def test_out_keys_that_are_selected_after_the_first_call() -> None:
    def make(*selected: str) -> TensorDictSequential:
        double = TensorDictModule(lambda a: 2 * a, in_keys=["a"], out_keys=["b"])
        net = TensorDictSequential(double, TensorDictModule(lambda b: b + 1, in_keys=["b"], out_keys=["c"]))
        return net.select_out_keys(*selected) if selected else net

    for selected in (("c",), ()), ((), ("c",)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda net, td: sorted(net(td).keys()), backend="eager")
        for names in selected:
            assert compiled(make(*names), dense(A)) == sorted(make(*names)(dense(A)).keys())


def test_a_read_that_finds_nothing_is_compiled_once() -> None:
    """An entry more, which the function does not look at, compiles nothing."""
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda td: td["a"] * 2 if td.get("k") is None else td["k"], fullgraph=True, backend=count)
    for content in (A, A, {**A, "v": "text"}, {**A, "n": {"b": 1.0}}):
        compiled(dense(content))
    assert count.frame_count == 1
