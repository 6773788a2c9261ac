"""The text of a container, read back."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from strategies import Plain, structures, trees
from tensordict import (
    LazyStackedTensorDict,
    LazyView,
    MemoryMappedTensor,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    set_lazy_legacy,
    set_printoptions,
)
from tensordict import parse_tensor_dict_string as parse


def assert_same_text(td: Any, **options: Any) -> Any:
    """`td` printed, parsed and printed again."""
    again = parse(repr(td), **options)
    assert repr(again) == repr(td)
    assert type(again) is type(td)
    return again


def small() -> TensorDict:
    return TensorDict({"a": torch.ones(3, 4), "b": {"c": torch.ones(3, 0, dtype=torch.int64)}}, [3])


@given(structures())
def test_any_structure(drawn: tuple[Plain, tuple[int, ...]]) -> None:
    plain, batch_size = drawn
    td = TensorDict(plain, batch_size)
    again = assert_same_text(td)
    assert again.batch_size == td.batch_size and again.device is None
    assert set(again.keys(True)) == set(td.keys(True))
    for key in td.keys(True, True):
        assert again[key].shape == td[key].shape and again[key].dtype == td[key].dtype
        assert not again[key].any()


@given(structures(), st.integers(0, 3))
def test_any_structure_without_its_layout(drawn: tuple[Plain, tuple[int, ...]], form: int) -> None:
    """As documents quote it: in one line, without indentation, or with more of it."""
    plain, batch_size = drawn
    td = TensorDict(renamed(plain), batch_size)
    text = [
        lambda s: " ".join(s.split()),
        lambda s: "\n".join(line.strip() for line in s.splitlines()),
        lambda s: "\n\n" + textwrap.indent(s, "      ") + "\n",
        lambda s: s.replace(", ", ",\n   ").replace("(", "( ").replace("[", "[ "),
    ][form](repr(td))
    assert repr(parse(text)) == repr(td)


def renamed(plain: Plain) -> Plain:
    """With keys that survive the loss of white space."""
    return {f"k{i}.x-y": renamed(v) if isinstance(v, dict) else v for i, v in enumerate(plain.values())}


@given(trees((2, 3)), st.data())
def test_any_structure_in_a_view(plain: Plain, data: st.DataObject) -> None:
    """The text of a lazy view names its source and the operation."""
    td = TensorDict({"below": TensorDict(plain, [2, 3])}, [2])
    method, arguments = data.draw(
        st.sampled_from([("view", (3, 2)), ("permute", (1, 0)), ("unsqueeze", (1,)), ("view", (6,))])
    )
    with set_lazy_legacy(True):
        td["view"] = getattr(td["below"].unsqueeze(0), method if method != "permute" else "transpose")(*arguments).view(
            2, -1
        )
        again = assert_same_text(td)
    assert isinstance(again["view"], LazyView)


@pytest.mark.parametrize(
    "key", [" ", " a", "a ", "a: b", "}", "},x", "f(x)", "0 ->", "a,b", "日本", "'", '"', "fields={", ""]
)
def test_odd_keys(key: str) -> None:
    td = TensorDict({key: torch.zeros(2), "n": {key: torch.zeros(1)}})
    assert set(assert_same_text(td).keys(True, True)) == {key, ("n", key)}


def member(length: int, **more: Any) -> TensorDict:
    return TensorDict(
        {"a": torch.zeros(3, length), "b": {"c": torch.zeros(3), "d": torch.zeros(3, length)}, **more}, [3]
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_stacks(dim: int) -> None:
    stack = lazy_stack([member(1), member(2), member(1)], dim)
    again = assert_same_text(stack)
    assert again.stack_dim == dim and len(again.tensordicts) == 3
    for mine, theirs in zip(again.tensordicts, stack.tensordicts, strict=True):
        assert repr(mine) == repr(theirs)
    assert_same_text(stack, seed=2)


def test_lazy_stacks_with_entries_of_their_own() -> None:
    extra = {"e": torch.zeros(3), " f ": {"g": torch.zeros(3, dtype=torch.bool)}, "1 ->": torch.zeros(3)}
    stack = lazy_stack([member(1, e=torch.zeros(3)), member(1), member(1, **extra)])
    again = assert_same_text(stack)
    assert set(again.tensordicts[2].keys(True, True)) == set(stack.tensordicts[2].keys(True, True))
    assert parse(" ".join(repr(stack).replace(" f ", "f").replace("1 ->: ", "h: ").split()))[2]["f", "g"].shape == (3,)
    assert_same_text(lazy_stack([TensorDict({"a": {"b": torch.zeros(1)}}), TensorDict({"a": {"c": torch.zeros(2)}})]))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_lazy_stacks_of_lazy_stacks(dim: int) -> None:
    inner = [lazy_stack([member(n), member(n)]) for n in (1, 2)]
    again = assert_same_text(lazy_stack(inner, dim))
    assert again.batch_size == lazy_stack(inner, dim).batch_size


def test_lazy_stacks_in_other_containers() -> None:
    td = TensorDict({"lazy": lazy_stack([member(1), member(2)]), "other": torch.zeros(2)}, [2], device="cpu")
    again = assert_same_text(td)
    assert type(again["lazy"]) is LazyStackedTensorDict
    with set_lazy_legacy(True):
        assert_same_text(td["lazy"].view(-1))


def test_lazy_stacks_of_different_batch_sizes() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(n, 2)}, [n]) for n in (1, 2)])
    assert [item.batch_size for item in assert_same_text(stack).tensordicts] == [(1,), (2,)]


@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_stacks_of_none(dim: int) -> None:
    stack = lazy_stack([member(1), member(1)], dim)
    cut = stack[:0] if dim == 0 else stack[:, :0]
    again = assert_same_text(cut)
    assert again.batch_size == cut.batch_size and set(again.keys(True)) == set(cut.keys(True))


@given(structures(min_dims=1, min_side=1), st.data())
def test_any_structure_in_a_lazy_stack(drawn: tuple[Plain, tuple[int, ...]], data: st.DataObject) -> None:
    plain, batch_size = drawn
    count = data.draw(st.integers(1, 3))
    items = [TensorDict(plain, batch_size) for _ in range(count)]
    for key in data.draw(st.sets(st.sampled_from(sorted(plain)))) if plain else ():
        del items[data.draw(st.integers(0, count - 1))][key]
    assert_same_text(lazy_stack(items, data.draw(st.integers(0, len(batch_size)))))


VALUES: list[Any] = ["text", "a, b=(c", "3", 3, 2.5, None, {"k": [1, 2]}, {1}, "", "x" * 300, object]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("kind", [NonTensorData, MetaData])
def test_values(kind: Any, value: Any) -> None:
    td = TensorDict({"a": torch.zeros(2), "b": {"s": kind(value)}, "z": torch.ones(2)}, [2], device="cpu")
    again = assert_same_text(td)
    held = again["b"].get("s")
    assert type(held) is kind and held.batch_size == (2,)
    if value in (3, 2.5, None, "text", {"k": [1, 2]}):
        assert again["b", "s"] == value


def test_lists_of_values() -> None:
    td = TensorDict({"s": ["a", "b"], "n": [["a", 1], [None, 2.5]]}, [2])
    assert_same_text(td)
    assert parse(repr(td))["n"] == [["a", 1], [None, 2.5]]
    assert_same_text(lazy_stack([td, td.clone()], 1))
    cut = parse(repr(TensorDict({"s": ["x" * 40, "y" * 40]}, [2])))
    assert cut["s"] == [None, None] and isinstance(cut.get("s"), NonTensorStack)
    assert parse(repr(TensorDict({"s": [object(), 1]}, [2])))["s"] == [None, None]


def test_tensors_of_their_own_shape() -> None:
    again = assert_same_text(TensorDict({"u": UnbatchedTensor(torch.ones(5)), "a": torch.zeros(2)}, [2]))
    assert type(again["u"]) is UnbatchedTensor


def test_classes_of_leaves() -> None:
    with FakeTensorMode():
        fake = torch.zeros(2)
    td = TensorDict(
        {
            "fake": fake,
            "integers": torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False),
            "mapped": MemoryMappedTensor.from_tensor(torch.ones(2)),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "shared": torch.ones(2).share_memory_(),
        },
        [2],
    )
    again = assert_same_text(td)
    for key in td.keys():
        assert type(again[key]) is type(td[key]), key
    assert again["shared"].is_shared() and not again["mapped"].is_shared()
    assert again["parameter"].requires_grad and not again["integers"].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.uint16, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("seed", [None, 0])
def test_dtypes(dtype: torch.dtype, seed: int | None) -> None:
    again = assert_same_text(TensorDict(a=torch.zeros(2, 3, dtype=dtype)), seed=seed)
    assert again["a"].dtype == dtype


def test_ragged_leaves() -> None:
    rows = [torch.zeros(2, 3), torch.zeros(1, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    other = torch.nested.nested_tensor(rows, layout=torch.jagged)
    middle = torch.nested.nested_tensor_from_jagged(torch.zeros(2, 7), torch.tensor([0, 3, 7]), jagged_dim=2)
    td = TensorDict()
    td._entries.update(a=jagged, b=jagged + 1, c=other, d=middle)
    again = parse(repr(td), seed=0)
    assert again["a"].shape == again["b"].shape and again["a"].shape != again["c"].shape
    assert [row.shape for row in again["a"].unbind()] == [(1, 3), (2, 3)]
    assert [row.shape for row in again["d"].unbind()] == [(2, 1), (2, 2)]
    assert re.sub(r"j\d+", "j", repr(again)) == re.sub(r"j\d+", "j", repr(td))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_ragged_leaves_of_the_strided_layout() -> None:
    td = TensorDict()
    td._entries["a"] = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])
    again = assert_same_text(td)
    assert again["a"].is_nested and again["a"].layout is torch.strided


def test_devices() -> None:
    td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}}, [2], device="meta")
    assert_same_text(td)
    assert_same_text(td, seed=1)
    assert_same_text(TensorDict({"a": torch.zeros(2), "m": torch.zeros(2, device="meta")}))
    here = parse(repr(td), seed=1, device="cpu")
    assert here.device == here["b"].device == here["b", "c"].device == torch.device("cpu")
    with set_printoptions(show_field_device=False):
        without_devices = repr(TensorDict({"a": torch.zeros(2)}))
    assert parse(without_devices, device="meta")["a"].device == torch.device("meta")
    elsewhere = repr(td).replace("meta", "cuda:7")
    assert parse(elsewhere, device="cpu").device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"line 3, column 12: this Tensor .*device='cpu' would"):
        parse(elsewhere)


@pytest.mark.gpu
def test_cuda() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2], device="cuda:0")
    assert assert_same_text(td, seed=3)["a"].cpu().equal(parse(repr(td), seed=3, device="cpu")["a"])


def test_shared_containers() -> None:
    text = repr(small()).replace("is_shared=False", "is_shared=True")
    again = parse(text)
    assert repr(again) == text
    assert again.is_shared() and again.is_locked and again["b"].is_locked and again["a"].is_shared()


def test_seeds() -> None:
    text = repr(TensorDict(f=torch.zeros(100), i=torch.zeros(100, dtype=torch.int8), b=torch.zeros(100) == 0))
    first, same, other = parse(text, seed=1), parse(text, seed=1), parse(text, seed=2)
    assert (first == same).all() and not (first == other).all()
    assert first["f"].min() < 0 < first["f"].max()
    assert first["i"].min() >= 0 and 50 < first["i"].max() < 100
    assert first["b"].any() and not first["b"].all()
    state = torch.random.get_rng_state()
    parse(text, seed=1)
    assert torch.random.get_rng_state().equal(state)


@pytest.mark.parametrize(
    "options",
    [
        {"verbose": False},
        dict.fromkeys(("show_grad", "show_is_contiguous", "show_is_view", "show_storage_size"), True),
        {"show_field_device": False, "show_is_shared": False},
        {"sort_keys": "insertion"},
    ],
)
def test_print_options(options: dict[str, Any]) -> None:
    td = TensorDict({"z": torch.zeros(2, requires_grad=True), "a": {"b": torch.zeros(2)}}, [2])
    with set_printoptions(**options):
        again = assert_same_text(td)
    assert again["z"].requires_grad is bool(options.get("show_grad"))


def test_statistics_are_read_over() -> None:
    numbers = {"f": [-1e-7, 2e20], "i": [-3, 4], "b": [True, False], "one": [1.0], "c": [1 + 2j, -3j]}
    td = TensorDict({key: torch.tensor(value) for key, value in numbers.items()})
    with set_printoptions(plain=True):
        text = repr(td)
    assert repr(parse(text)) == repr(td)


def test_names() -> None:
    text = (
        "TensorDict(fields={n: TensorDict(fields={}, batch_size=torch.Size([2, 3]))}, batch_size=torch.Size([2, 3]), "
    )
    assert parse(text + "names=['time', None])").names == ["time", None]
    assert parse(text + "names=[\"it's\", 'b'])")["n"].names == ["it's", "b"]


def entry(leaf: str) -> str:
    return f"TensorDict(\n    fields={{\n        a: {leaf}}},\n    batch_size=torch.Size([2]))"


def lazy(fields: str, size: str, dim: int) -> str:
    return f"LazyStackedTensorDict(fields={fields}, batch_size=torch.Size({size}), stack_dim={dim})"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "a class and its content"),
        ("  \n TensorDict", 2, 2, "a class and its content"),
        ("TensorDict(", 1, 12, "fields=.*found the end of the text"),
        ("Tensor(shape=torch.Size([2]))", 1, 1, "expected a container"),
        ("TensorDict(fields={})", 1, 1, "batch_size="),
        ("TensorDict(batch_size=torch.Size([]))", 1, 1, "fields="),
        ("TensorDict(fields={}, batch_size=torch.Size([])", 1, 48, r"',' or '\)'"),
        ("TensorDict(fields={}, batch_size=torch.Size([])) x", 1, 50, "the end of the text, found 'x'"),
        ("TensorDict(fields={}, batch_size=[2])", 1, 34, r"torch.Size\(\[3, 4\]\)"),
        ("TensorDict(fields={}, batch_size=torch.Size([2, -1]))", 1, 34, "without -1"),
        ("TensorDict(fields={}, batch_size=torch.Size([2.5]))", 1, 46, "made of ints"),
        ("TensorDict(fields={}, batch_size=torch.Size([]), size=3)", 1, 50, "one of device=, is_shared=, names="),
        ("TensorDict(fields={}, fields={})", 1, 23, "one of batch_size="),
        ("TensorDict(fields={}, batch_size=torch.Size([]), is_shared=1)", 1, 60, "True or False"),
        ("TensorDict(fields={}, batch_size=torch.Size([]), device=cpu:x)", 1, 57, "a device"),
        ("TensorDict(fields={}, batch_size=torch.Size([]), names='a')", 1, 56, "dim names"),
        ("TensorDict(fields={}, batch_size=torch.Size([]), names=[a])", 1, 57, "a name in quotes"),
        ("TensorDict(fields={}, batch_size=torch.Size([3]), names=['a', 'b'])", 1, 1, "2 names"),
        (entry("Unknown(shape=torch.Size([2]))"), 3, 12, "one of the classes .*LazyStackedTensorDict.*Tensor"),
        (entry("Tensor(device=cpu)"), 3, 12, "shape="),
        ("TensorDict(fields={a: NonTensorData(data=x)})", 1, 42, "a value and its batch_size="),
        (entry("NonTensorStack(['a'], batch_size=torch.Size([-1]))"), 3, 45, "without -1"),
        (entry("Tensor(shape=torch.Size([3]))"), 3, 12, r"entry 'a' has shape \[3\]"),
        (entry("Tensor(shape=torch.Size([2]), dtype=torch.load)"), 3, 48, "a dtype"),
        (entry("Tensor(shape=torch.Size([2]), dtype=float32)"), 3, 48, "a dtype"),
        (entry("Tensor(shape=torch.Size([2]), dtype=torch.int64, requires_grad=True)"), 3, 12, "require gradients"),
        (entry("Tensor(shape=torch.Size([2]) dtype=torch.int64)"), 3, 41, r"',' or '\)'"),
        (entry("Tensor(shape=torch.Size([2, j1]))"), 3, 12, "a NestedTensor"),
        (entry("NestedTensor(shape=torch.Size([2, 3]))"), 3, 12, "one ragged dim"),
        (entry("Parameter(shape=torch.Size([2, -1]))"), 3, 12, "a Tensor whose first dim"),
        (entry("Tensor(shape=torch.Size([2]))").replace("a: ", "a "), 3, 9, "an entry, such as key"),
        (entry("Tensor(shape=torch.Size([2])),\n        a: Tensor(shape=torch.Size([2]))"), 4, 9, "not taken"),
        ("LazyView(op=view(2))", 1, 1, "source="),
        (lazy("{}", "[2]", 1), 1, 1, r"a stack_dim among the dims of \[2\]"),
        (lazy("{}", "[-1]", 0), 1, 1, "a stack_dim among"),
        (lazy("{a: Tensor(shape=torch.Size([3]))}", "[2]", 0), 1, 34, "dim 0 is of size 2"),
        (lazy("{a: Tensor(shape=torch.Size([1, -1]))}", "[1]", 0), 1, 34, "the one member"),
        (lazy("{}, exclusive_fields={2 -> a: Tensor(shape=torch.Size([]))}", "[2]", 0), 1, 1, "members 0 to 1"),
        (lazy("{}, exclusive_fields={a: Tensor(shape=torch.Size([]))}", "[2]", 0), 1, 52, "number of a member"),
        ("LazyView(source=Tensor(shape=torch.Size([2])), op=view(2))", 1, 17, "a container"),
        ("LazyView(source=TensorDict(fields={}, batch_size=torch.Size([2])), op=clone())", 1, 71, "a shape method"),
        ("LazyView(source=TensorDict(fields={}, batch_size=torch.Size([2])), op=view(5))", 1, 1, r"shape \[5\]"),
    ],
)  # fmt: skip
def test_malformed(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^line {line}, column {column}: .*{message}"):
        parse(text)


@given(st.data())
def test_damaged_text_is_an_error_or_another_container(data: st.DataObject) -> None:
    text = repr(small())
    at = data.draw(st.integers(0, len(text) - 1))
    size = data.draw(st.integers(0, 5))
    damaged = text[:at] + data.draw(st.text("(){}[]=,:\n ->1aTé\\'", max_size=3)) + text[at + size :]
    problem = None
    try:
        assert isinstance(parse(damaged), TensorDict)
    except ValueError as error:
        problem = str(error)
    assert problem is None or re.match(r"line \d+, column \d+: ", problem)


def test_no_code_is_run() -> None:
    for text in ("__import__('os').system('true')", "TensorDict(fields=print, batch_size=torch.Size([]))"):
        with pytest.raises(ValueError, match="line 1"):
            parse(text)


def test_deep_text() -> None:
    with pytest.raises(ValueError, match="nested more deeply"):
        parse("TensorDict(fields={a: " * 10_000)
    with pytest.raises(ValueError, match="line 1"):
        parse("TensorDict(" * 10_000)


def test_no_text() -> None:
    with pytest.raises(TypeError, match="int"):
        parse(3)  # type: ignore[arg-type]
