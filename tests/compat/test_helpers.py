"""Functions of `tensordict.utils` that programs call; the expected values come from the reference or torch."""

from __future__ import annotations

import pickle
import types
import unittest
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    unravel_key,
)
from tensordict._C import unravel_keys as compiled_unravel_keys
from tensordict.base import _default_is_leaf, _is_leaf_nontensor
from tensordict.utils import (
    KeyDependentDefaultDict,
    _getitem_batch_size,
    _is_non_tensor,
    _is_tensorclass,
    _maybe_correct_neg_dim,
    _shape,
    _unravel_key_to_tuple,
    _zip_strict,
    cache,
    convert_ellipsis_to_idx,
    erase_cache,
    get_json_backend,
    implement_for,
    infer_size_impl,
    int_generator,
    is_namedtuple,
    is_namedtuple_class,
    is_nested_key,
    is_seq_of_nested_key,
    json_dumps,
    lock_blocked,
    prod,
    set_json_backend,
    strtobool,
    timeit,
    unravel_keys,
)


class Point(TensorClass):
    x: torch.Tensor


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("a", ("a",)),
        (("a",), ("a",)),
        (("a", ("b", "c")), ("a", "b", "c")),
        ((("a",),), ("a",)),
        ((), ()),
        (("a", 0), ()),
        ((0,), ()),
        (0, ()),
        (None, ()),
        (["a", "b"], ()),
        (torch.Size([1]), ()),
    ],
)
def test_unravel_key_to_tuple(key: Any, names: tuple[str, ...]) -> None:
    assert _unravel_key_to_tuple(key) == names


@pytest.mark.parametrize("unravel", [unravel_keys, compiled_unravel_keys])
def test_unravel_keys(unravel: Any) -> None:
    assert unravel("a") == "a" and unravel(("a", ("b",))) == ("a", "b")
    assert unravel(("a", 0)) == unravel_key(("a", 0)) == "a"
    with pytest.raises(RuntimeError, match="Sequence<NestedKey>"):
        unravel(["a"])


@pytest.mark.parametrize(
    ("seq", "is_one"),
    [
        (["a", "b"], True),
        (("a", ("b", "c")), True),
        ([], True),
        ("ab", True),
        (["a", 0], False),
        ([()], False),
        (None, False),
        ({"a"}, False),
        (iter(["a"]), False),
    ],
)
def test_is_seq_of_nested_key(seq: Any, is_one: bool) -> None:
    assert is_seq_of_nested_key(seq) is is_one


def test_is_nested_key() -> None:
    assert is_nested_key("a") and is_nested_key(("a", "b"))
    assert not is_nested_key(("a", 0)) and not is_nested_key(0) and not is_nested_key(())


# --- shapes and indices ---------------------------------------------------------------------------------------------

SHAPE = (4, 3, 2, 1)
MASK = torch.tensor([True, False, True, False])
INDICES = [
    0,
    -1,
    ...,
    None,
    (None, ..., None),
    slice(1, 3),
    (slice(None, None, 2), 0),
    (0, 1),
    (),
    True,
    [0, 1],
    [True, False, True, True],
    range(3),
    torch.tensor(1),
    torch.tensor([0, 1]),
    torch.tensor([[0, 1], [1, 2]]),
    MASK,
    torch.ones(4, 3, dtype=torch.bool),
    np.array([0, 1]),
    (slice(None), torch.tensor([0, 1]), ..., 0),
    (torch.tensor([0, 1]), slice(None), torch.tensor([0, 1])),
    (MASK, 0),
    (slice(None), [[0, 1], [1, 2]]),
]


@pytest.mark.parametrize("shape", [torch.Size(SHAPE), list(SHAPE)], ids=["Size", "list"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_getitem_batch_size(index: Any, shape: Any) -> None:
    assert _getitem_batch_size(shape, index) == torch.zeros(SHAPE)[index].shape


@pytest.mark.parametrize("index", [4, (0, 0, 0, 0, 0), torch.ones(3, dtype=torch.bool)], ids=str)
def test_getitem_batch_size_of_an_index_that_does_not_fit(index: Any) -> None:
    with pytest.raises(IndexError):
        _getitem_batch_size(SHAPE, index)


def test_getitem_batch_size_of_nested_lists() -> None:
    """They are one index tensor, as for a container; torch itself may read the outer list as a tuple."""
    assert _getitem_batch_size(SHAPE, [[0, 1], [1, 2]]) == torch.Size([2, 2, 3, 2, 1])


def test_getitem_batch_size_of_shapes_with_open_dims() -> None:
    """TorchRL's specs have -1 for dims of any size."""
    assert _getitem_batch_size(torch.Size([3, -1]), torch.tensor([0, 1])) == torch.Size([2, -1])


@pytest.mark.parametrize(
    ("index", "spelled"),
    [
        (..., (slice(None),) * 3),
        ((..., 0), (slice(None), slice(None), 0)),
        ((0, ...), (0, slice(None), slice(None))),
        ((0, ..., 1), (0, slice(None), 1)),
        ((None, ..., 0), (None, slice(None), slice(None), 0)),
        ((0, 1, 2, ...), (0, 1, 2)),
        ((True, ...), (True, slice(None), slice(None), slice(None))),
        ((..., [0, 1]), (slice(None), slice(None), [0, 1])),
        ((0, 1), (0, 1)),
        (0, 0),
        ([0, 1], [0, 1]),
    ],
    ids=str,
)
def test_convert_ellipsis_to_idx(index: Any, spelled: Any) -> None:
    assert convert_ellipsis_to_idx(index, [1, 2, 3]) == spelled


def test_convert_ellipsis_to_idx_counts_the_dims_of_masks() -> None:
    mask = torch.zeros(1, 2, dtype=torch.bool)
    first, second = convert_ellipsis_to_idx((mask, ...), [1, 2, 3])
    assert first is mask and second == slice(None)


@pytest.mark.parametrize("index", [(..., ...), (0, 1, 2, 3, ...)], ids=str)
def test_convert_ellipsis_to_idx_refuses(index: Any) -> None:
    with pytest.raises(RuntimeError):
        convert_ellipsis_to_idx(index, [1, 2, 3])


def test_maybe_correct_neg_dim() -> None:
    assert _maybe_correct_neg_dim(0, torch.Size([2])) == 0
    assert _maybe_correct_neg_dim(-1, torch.Size([2, 3])) == 1
    assert _maybe_correct_neg_dim(-1, [2, 3]) == 1
    assert _maybe_correct_neg_dim(-1, None, 3) == _maybe_correct_neg_dim(-1, None, ndim=3) == 2
    for dim, shape in [(-3, [2, 3]), (2, [2, 3]), (-1, [])]:
        with pytest.raises(IndexError):
            _maybe_correct_neg_dim(dim, shape)
    with pytest.raises(TypeError):
        _maybe_correct_neg_dim(-1, None)


def test_infer_size_impl() -> None:
    assert infer_size_impl([2, -1], 6) == [2, 3] == infer_size_impl((2, 3), 6)
    assert infer_size_impl(torch.Size([-1, 3]), 6) == [2, 3]
    assert infer_size_impl([], 1) == [] and infer_size_impl([-1], 0) == [0]
    for shape, numel in [([2, -1], 5), ([-1, -1], 4), ([4], 6), ([-2], 3)]:
        with pytest.raises(RuntimeError):
            infer_size_impl(shape, numel)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_shape() -> None:
    rows = [torch.zeros(2, 4), torch.zeros(3, 4)]
    assert _shape(torch.zeros(2, 3)) == torch.Size([2, 3])
    assert _shape(torch.nested.nested_tensor(rows)) == torch.Size([2, -1, 4])
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert _shape(jagged) == jagged.shape
    td = TensorDict(a=torch.zeros(3), batch_size=[3])
    assert _shape(td) == torch.Size([3]) == _shape(Point(torch.zeros(3), batch_size=[3]))
    assert _shape(lazy_stack([td, td])) == torch.Size([2, 3])
    assert _shape(NonTensorData("a", batch_size=[2])) == torch.Size([2])


# --- classes of entries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "non_tensor", "is_tensorclass", "leaf_nontensor", "default_leaf"),
    [
        (torch.Tensor, False, False, True, True),
        (UnbatchedTensor, False, False, True, True),
        (TensorDict, False, False, False, False),
        (LazyStackedTensorDict, False, False, False, False),
        (Point, False, True, False, False),
        (NonTensorData, True, True, True, False),
        (MetaData, True, True, True, False),
        (NonTensorStack, True, False, True, False),
        (int, False, False, None, True),
    ],
)
def test_questions_about_classes(
    cls: type, non_tensor: bool, is_tensorclass: bool, leaf_nontensor: bool | None, default_leaf: bool
) -> None:
    assert _is_non_tensor(cls) is non_tensor
    assert _is_tensorclass(cls) is is_tensorclass
    assert _default_is_leaf(cls) is default_leaf
    if leaf_nontensor is not None:
        assert _is_leaf_nontensor(cls) is leaf_nontensor


# --- small functions ------------------------------------------------------------------------------------------------


def test_zip_strict() -> None:
    assert list(_zip_strict([1, 2], "ab")) == [(1, "a"), (2, "b")] and list(_zip_strict()) == []
    with pytest.raises(ValueError, match="shorter"):
        list(_zip_strict([1, 2], "a"))


def test_zip_strict_in_compiled_code() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def total(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> torch.Tensor:
        return sum(x * y for x, y in _zip_strict(xs, ys))  # type: ignore[return-value]

    assert total([torch.ones(2)] * 2, [torch.full((2,), 3.0)] * 2).tolist() == [6, 6]


def test_key_dependent_default_dict() -> None:
    doubled = KeyDependentDefaultDict(lambda key: key * 2)
    assert doubled["a"] == "aa" and dict(doubled) == {"a": "aa"}
    assert "b" not in doubled and doubled.get("b") is None
    doubled.update({"c": 1})
    lengths = KeyDependentDefaultDict(len)
    lengths["abc"] = 0
    again = pickle.loads(pickle.dumps(lengths))
    assert isinstance(again, KeyDependentDefaultDict) and again["abc"] == 0 and again["xy"] == 2


@pytest.mark.parametrize("word", ["y", "Yes", "t", "TRUE", "on", "1"])
def test_strtobool(word: str) -> None:
    assert strtobool(word) == 1


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off", "0"])
def test_strtobool_of_no(word: str) -> None:
    assert strtobool(word) == 0


def test_strtobool_refuses() -> None:
    for word in ("maybe", ""):
        with pytest.raises(ValueError, match="truth value"):
            strtobool(word)


def test_int_generator() -> None:
    """The sequence that the reference's documentation shows."""
    value, found = 10, []
    for _ in range(10):
        value = int_generator(value)
        found.append(value)
    assert found == [6756, 1717, 4410, 9740, 9611, 9716, 5397, 7745, 4521, 7523]


def test_named_tuples() -> None:
    pair = namedtuple("pair", "a b")
    assert is_namedtuple(pair(1, 2)) and is_namedtuple_class(pair)
    assert not is_namedtuple((1, 2)) and not is_namedtuple(pair) and not is_namedtuple_class(tuple)
    assert not is_namedtuple(torch.zeros(2).max(0))


def test_prod() -> None:
    assert prod([2, 3]) == 6 and prod([]) == 1 and prod(torch.Size([2, 3])) == 6


def test_json() -> None:
    import json

    assert json_dumps({"a": [1, None]}) == '{"a": [1, null]}'
    set_json_backend("json")
    assert get_json_backend() is json
    with pytest.raises(ValueError, match="orjson"):
        set_json_backend("orjson")


# --- decorators -----------------------------------------------------------------------------------------------------


class Counted(TensorDict):
    calls = 0

    @cache
    def computed(self, x: Any = 1, *, y: int = 2) -> list[Any]:
        Counted.calls += 1
        return [x, y]

    @erase_cache
    def forget(self) -> str:
        return "forgotten"

    @lock_blocked
    def change(self, key: str) -> str:
        return key


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setattr(Counted, "calls", 0)
    return Counted(a=torch.zeros(2), batch_size=[2])


def test_cache_of_a_locked_container(counted: Counted) -> None:
    assert counted.computed() == counted.computed() == [1, 2] and Counted.calls == 2
    counted.lock_()
    assert counted.computed() is counted.computed() and Counted.calls == 3
    assert counted.computed(1, y=3) == [1, 3] and Counted.calls == 4
    assert counted.computed([1]) == counted.computed([1]) == [[1], 2] and Counted.calls == 6
    assert Counted.computed.__name__ == "computed"


def test_cache_is_erased(counted: Counted) -> None:
    counted.lock_().computed()
    assert counted.forget() == "forgotten"
    counted.computed()
    assert Counted.calls == 2
    counted.unlock_().lock_()
    counted.computed()
    assert Counted.calls == 3


def test_cache_of_a_nested_container_ends_with_the_lock_of_its_parent(counted: Counted) -> None:
    parent = TensorDict(a=counted, batch_size=[2]).lock_()
    counted.computed()
    parent.unlock_()
    parent.lock_()
    counted.computed()
    assert Counted.calls == 2


def test_cache_errors() -> None:
    class Failing(TensorDict):
        @cache
        def computed(self) -> None:
            raise TypeError("from the method")

    with pytest.raises(TypeError, match="from the method"):
        Failing().lock_().computed()
    with pytest.raises((TypeError, RuntimeError)) as info:

        class Plain:
            @cache
            def computed(self) -> None: ...

    assert "Plain does not derive" in str(info.value) + str(info.value.__cause__)


def test_lock_blocked(counted: Counted) -> None:
    assert counted.change("k") == "k"
    with pytest.raises(RuntimeError, match=r"change\(\)"):
        counted.lock_().change("k")
    assert Counted.change.__name__ == "change"


def test_timeit() -> None:
    timeit._REG.clear()
    with timeit("block"):
        pass

    @timeit("function")
    def three(depth: int) -> int:
        return 3 if depth == 0 else three(depth - 1)

    assert three(2) == 3
    assert [timeit._REG[name][2] for name in ("block", "function")] == [1, 3]
    mean, total, count = timeit._REG["function"]
    assert mean == pytest.approx(total / count) and total > 0
    with unittest.TestCase().assertLogs("tensordict", "INFO") as logged:
        timeit.print("run")
    assert [record.getMessage().split(" took")[0] for record in logged.records] == ["run block", "run function"]
    timeit.erase()
    assert timeit._REG == {"block": [0.0, 0.0, 0], "function": [0.0, 0.0, 0]}
    timeit._REG.clear()


# --- functions for versions of a module -----------------------------------------------------------------------------


def module(version: str) -> Any:
    made = types.ModuleType("made")
    made.__version__ = version  # type: ignore[attr-defined]
    return lambda: made


def test_implement_for_chooses_by_version() -> None:
    @implement_for(module("1.5"), None, "1.0")
    def chosen() -> str:
        return "old"

    @implement_for(module("1.5"), "1.0")
    def chosen() -> str:  # noqa: F811
        return "new"

    @implement_for("no_module_of_this_name")
    def chosen() -> str:  # noqa: F811
        return "not installed"

    assert chosen() == "new" and chosen.__name__ == "chosen"


def test_implement_for_takes_the_last_that_fits() -> None:
    @implement_for("torch", "1.0")
    def last() -> str:
        return "first"

    assert last() == "first"

    @implement_for("numpy", "1.0")
    def last() -> str:
        return "second"

    assert last() == "second"


def test_implement_for_without_a_version_that_fits() -> None:
    @implement_for("torch", None, "0.1")
    def missing() -> None: ...

    @implement_for("no_module_of_this_name")
    def missing() -> None: ...  # noqa: F811

    with pytest.raises(ModuleNotFoundError, match="Supported version of .*missing.* has not been found"):
        missing()


class Dispatching:
    @implement_for("torch", None, "1.0")
    def method(self, x: int) -> Any:
        return "old", x

    @implement_for("torch", "1.0")
    def method(self, x: int) -> Any:  # noqa: F811
        return "new", x

    @implement_for("torch", None, "1.0", class_method=True)
    def of_class(cls, x: int) -> Any:
        return "old", cls, x

    @implement_for("torch", "1.0", class_method=True)
    def of_class(cls, x: int) -> Any:  # noqa: F811
        return "new", cls, x


def test_implement_for_methods() -> None:
    assert Dispatching().method(1) == ("new", 1)
    assert Dispatching.of_class(2) == Dispatching().of_class(2) == ("new", Dispatching, 2)


def test_implement_for_in_compiled_code() -> None:
    @implement_for("torch", "1.0", compilable=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("version", "first", "beyond", "fits"),
    [
        ("2.0.0rc1", "2.0", None, True),
        ("2.13.0+cpu", "2.13", None, True),
        ("0.26", "0.26.0", None, True),
        ("0.26.0", "0.26", None, True),
        ("1.10", "1.9", "1.10", False),
        ("1.10", "1.9", "1.10.1", True),
        ("1.8", "1.9", None, False),
        ("1.8", None, None, True),
    ],
)
def test_versions(version: str, first: str | None, beyond: str | None, fits: bool) -> None:
    assert implement_for.check_version(version, first, beyond) is fits
