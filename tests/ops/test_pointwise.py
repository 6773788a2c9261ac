"""Pointwise operations against the same torch calls made leaf by leaf."""

from __future__ import annotations

import itertools
import operator
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cases import OF_ONE, TESTS
from tensordict import TensorClass, TensorDict, assert_close, lazy_stack
from tensordict.core.exceptions import KeyMismatchError

# Torch warns of complex numbers of 32 bits, which half precision and complex numbers give together.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
NUMBERS = [2, -1, 1.5, 0.1, True, 2j]
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "mod": torch.remainder,
    "pow": torch.pow,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "bitwise_and": torch.bitwise_and,
    "logical_and": torch.logical_and,
}
BINARY_IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "add_": Tensor.add_,
    "sub_": Tensor.sub_,
    "mul_": Tensor.mul_,
    "div_": Tensor.div_,
    "pow_": Tensor.pow_,
    "clamp_min_": Tensor.clamp_min_,
    "clamp_max_": Tensor.clamp_max_,
    "maximum_": Tensor.clamp_min_,
    "minimum_": Tensor.clamp_max_,
}


def make(**kwargs: Any) -> TensorDict:
    return TensorDict({"a": torch.arange(12.0).view(3, 4), "b": {"c": torch.arange(3)}}, [3], **kwargs)


def values(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor([[0.25, 1.0], [-2.5, 3.0]]).to(dtype)
    return torch.tensor([[0, 1], [2, 3]]).to(dtype)


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type of its error."""
    try:
        return call()
    except (RuntimeError, TypeError) as error:
        return type(error)


def assert_same(actual: Any, expected: Any, what: Any) -> None:
    """The same error, or the same dtype, shape and values; half precision is let off its last bit."""
    if isinstance(expected, type):
        assert isinstance(actual, type) and issubclass(actual, expected), f"{what}: {actual} instead of {expected}"
        return
    assert isinstance(actual, Tensor), f"{what}: {actual} instead of {expected}"
    half = expected.dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(
        actual, expected, rtol=1e-2 if half else 0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def three(leaf: Tensor) -> TensorDict:
    """Enough leaves for every way of calling torch."""
    return TensorDict({"x": leaf.clone(), "n": {"y": leaf.clone()}, "z": leaf.clone()}, [2])


# --- against torch, over dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_ONE + TESTS)
def test_functions_of_one_operand(name: str, dtype: torch.dtype) -> None:
    leaf = values(dtype)
    for key in ("x", ("n", "y")):
        actual = outcome(lambda key=key: getattr(three(leaf), name)()[key])
        assert_same(actual, outcome(lambda: getattr(torch, name)(leaf)), (name, dtype))
    if name in OF_ONE:
        expected = outcome(lambda: getattr(Tensor, name + "_")(leaf.clone()))
        td = three(leaf)
        result = outcome(getattr(td, name + "_"))
        assert_same(result if isinstance(result, type) else td["n", "y"], expected, (name, dtype))
        if isinstance(expected, type):
            assert torch.equal(td["x"], leaf)
        else:
            assert result is td


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*BINARY, *BINARY_IN_PLACE])
def test_numbers(name: str, dtype: torch.dtype) -> None:
    if name == "logical_and":
        return  # torch takes no number there; see below
    leaf = values(dtype)
    bounds = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}
    fn = bounds.get(name) or BINARY.get(name) or BINARY_IN_PLACE[name]
    for number in NUMBERS:
        expected = outcome(lambda number=number: fn(leaf.clone(), number))
        actual = outcome(lambda number=number: getattr(three(leaf), name)(number)["n", "y"])
        assert_same(actual, expected, (name, dtype, number))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*BINARY, *BINARY_IN_PLACE])
def test_containers_and_tensors_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    fn = BINARY.get(name) or BINARY_IN_PLACE[name]
    leaf = values(dtype)
    for other in DTYPES:
        right = values(other) + (0 if other is torch.bool else 1)
        expected = outcome(lambda right=right: fn(leaf.clone(), right))
        actual = outcome(lambda right=right: getattr(three(leaf), name)(three(right))["n", "y"])
        assert_same(actual, expected, (name, dtype, other))
        for operand, aligned in ((right[1, 1], right[1, 1]), (right[0], right[0][:, None])):
            expected = outcome(lambda aligned=aligned: fn(leaf.clone(), aligned))
            actual = outcome(lambda operand=operand: getattr(three(leaf), name)(operand)["n", "y"])
            assert_same(actual, expected, (name, dtype, other, operand.ndim))


def test_numbers_are_as_exact_as_in_torch() -> None:
    leaf = torch.rand(50) * 100 - 50
    for number in (0.1, 1 / 3, 1e-30, 3, 2**24 + 1, 2**60 + 1, -7, float("inf"), float("nan"), 1e300):
        for dtype in (torch.float32, torch.float64):
            x = leaf.to(dtype)
            td = TensorDict(a=x, b=x, c=x)
            for op in (
                operator.add, operator.sub, operator.mul, operator.truediv, operator.mod, operator.floordiv,
            ):  # fmt: skip
                assert torch.equal(op(td, number)["b"].nan_to_num(), op(x, number).nan_to_num()), (op, number)
                assert torch.equal(op(number, td)["b"].nan_to_num(), op(number, x).nan_to_num()), (op, number)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_of_three_operands(dtype: torch.dtype) -> None:
    leaf = values(dtype)
    for other in (dtype, torch.float32, torch.int64):
        end = values(other) + (0 if other is torch.bool else 1)
        for what, fn, args, td_args in (
            ("lerp", torch.lerp, (end, 0.25), (three(end), 0.25)),
            ("lerp", torch.lerp, (end, end), (three(end), three(end))),
            ("lerp", torch.lerp, (end, end[0][:, None]), (three(end), end[0])),
            ("addcmul", torch.addcmul, (end, end), (three(end), three(end))),
            ("addcmul", torch.addcmul, (end[0][:, None], end), (end[0], three(end))),
            ("addcdiv", torch.addcdiv, (end, end), (three(end), three(end))),
            ("clamp", torch.clamp, (end, end), (three(end), three(end))),
            ("clamp", torch.clamp, (1, 2), (1, 2)),
            ("clamp", torch.clamp, (0.5, 2), (0.5, 2)),
            ("clamp", torch.clamp, (2, 1.5), (2, 1.5)),
        ):
            expected = outcome(lambda fn=fn, args=args: fn(leaf, *args))
            actual = outcome(lambda what=what, td_args=td_args: getattr(three(leaf), what)(*td_args)["n", "y"])
            assert_same(actual, expected, (what, dtype, other, args))
            if what == "clamp":
                continue
            expected = outcome(lambda what=what, args=args: getattr(leaf.clone(), what + "_")(*args))
            td = three(leaf)
            result = outcome(lambda td=td, what=what, td_args=td_args: getattr(td, what + "_")(*td_args)["n", "y"])
            assert_same(result, expected, (what + "_", dtype, other, args))
            if isinstance(expected, type):
                assert torch.equal(td["x"], leaf)


def test_alpha_and_value() -> None:
    td, other = make(), make() + 1
    x, y = td["a"], other["a"]
    for operand, aligned in ((other, y), (torch.arange(3), torch.arange(3)[:, None]), (5, 5)):
        assert torch.equal(td.add(operand, alpha=3)["a"], torch.add(x, aligned, alpha=3))
        assert torch.equal(td.sub(operand, alpha=3)["a"], torch.sub(x, aligned, alpha=3))
        assert torch.equal(td.rsub(operand, alpha=3)["a"], torch.rsub(x, aligned, alpha=3))
        assert torch.equal(make().add_(operand, alpha=3)["a"], torch.add(x, aligned, alpha=3))
        assert torch.equal(make().sub_(operand, alpha=3)["a"], torch.sub(x, aligned, alpha=3))
    floats, ends = td.float(), other.float()
    assert torch.equal(floats.addcmul(ends, ends, value=2)["a"], torch.addcmul(x, y, y, value=2))
    assert torch.equal(floats.addcdiv(ends, ends, 2)["a"], torch.addcdiv(x, y, y, value=2))
    assert torch.equal(floats.clone().addcdiv_(ends, ends, value=2)["a"], torch.addcdiv(x, y, y, value=2))
    assert torch.equal(floats.clone().lerp_(ends, ends)["a"], torch.lerp(x, y, y))


def test_numbers_beside_leaves_of_several_dtypes() -> None:
    """Numbers are handed to torch in two ways, which must not show."""
    sets = [[torch.float32, torch.int64], [torch.int64, torch.int32, torch.float64], DTYPES[1:9], [torch.int32] * 2]
    for dtypes in sets:
        td = TensorDict({f"{i}": values(dtype) + 1 for i, dtype in enumerate(dtypes * 2)}, [2])
        for number, op in itertools.product((2, 3.5, 0.1, -7, 2**31 + 5), BOTH_WAYS[:-1]):
            result = outcome(partial(op, td, number))
            for key, leaf in td.items():
                assert not isinstance(result, type), f"{op} {number}: {result}"
                assert_same(result[key], op(leaf, number), (op, number, leaf.dtype))


def test_in_place_on_leaves_of_several_dtypes() -> None:
    for (name, fn), number in itertools.product(BINARY_IN_PLACE.items(), (2, 1.5, True)):
        td = TensorDict({str(dtype): values(dtype) for dtype in DTYPES}, [2])
        refused = [
            str(dtype) for dtype in DTYPES if isinstance(outcome(partial(fn, values(dtype), number)), type)
        ]  # fmt: skip
        if refused:
            with pytest.raises(RuntimeError, match=f"entry '{refused[0]}'"):
                getattr(td, name)(number)
            assert all(torch.equal(td[str(dtype)], values(dtype)) for dtype in DTYPES)
        fitting = td.exclude(*refused)
        getattr(fitting, name)(number)
        for dtype in DTYPES:
            if str(dtype) not in refused:
                assert_same(fitting[str(dtype)], fn(values(dtype), number), (name, number, dtype))


# --- operators --------------------------------------------------------------------------------------------------------

BOTH_WAYS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
]  # fmt: skip
BITWISE = [operator.and_, operator.or_, operator.xor]
IN_PLACE = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
]  # fmt: skip


@pytest.mark.parametrize("op", BOTH_WAYS)
def test_operators(op: Callable[[Any, Any], Any]) -> None:
    td = make() + 1
    other = TensorDict({"b": {"c": torch.full((3,), 2)}, "a": torch.full((3, 4), 3.0)}, [3])
    x, c = td["a"], td["b", "c"]
    per_batch = torch.tensor([1.0, 2.0, 3.0])
    for right, at_a, at_c in (
        (other, other["a"], other["b", "c"]),
        (other.to_dict(), other["a"], other["b", "c"]),
        (2, 2, 2),
        (1.5, 1.5, 1.5),
        (np.float32(1.5), 1.5, 1.5),
        (np.int64(2), 2, 2),
        (torch.tensor(2), torch.tensor(2), torch.tensor(2)),
        (per_batch, per_batch[:, None], per_batch),
    ):
        assert torch.equal(op(td, right)["a"], op(x, at_a))
        assert torch.equal(op(td, right)["b", "c"], op(c, at_c))
        assert torch.equal(op(right, td)["a"], op(at_a, x))
        assert torch.equal(op(right, td)["b", "c"], op(at_c, c))
    array = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert torch.equal(op(td, array)["a"], op(x, per_batch[:, None]))


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_operators(op: Callable[[Any, Any], Any]) -> None:
    td = (make() + 1).float().lock_()
    x, c = td["a"].clone(), td["b", "c"].clone()
    before = td["a"]
    kept = td
    td = op(td, 2)
    assert td is kept and td["a"] is before
    x, c = op(x, 2), op(c, 2)
    assert torch.equal(td["a"], x) and torch.equal(td["b", "c"], c)
    td = op(td, make() + 1)
    assert torch.equal(td["a"], op(x, make()["a"] + 1))
    with pytest.raises(TypeError):
        op(td, "text")


@pytest.mark.parametrize("op", [operator.iand, operator.ior, operator.ixor])
def test_in_place_logic(op: Callable[[Any, Any], Any]) -> None:
    mask = torch.tensor([True, False, True])
    td = TensorDict({"a": torch.tensor([True, True, False]), "b": {"i": torch.arange(3)}}, [3])
    a, i = td["a"].clone(), td["b", "i"].clone()
    kept = td
    td = op(td, mask)
    assert td is kept
    assert torch.equal(td["a"], op(a, mask)) and torch.equal(td["b", "i"], op(i, mask))


def test_unary_operators() -> None:
    td = make() - 5
    assert torch.equal((-td)["a"], -td["a"])
    assert torch.equal(abs(td)["b", "c"], abs(td["b", "c"]))
    assert torch.equal((+td)["a"], td["a"]) and +td is not td


@pytest.mark.parametrize("op", [*BOTH_WAYS, *BITWISE])
def test_other_objects_are_refused(op: Callable[[Any, Any], Any]) -> None:
    for other in ("text", None, object(), [1, 2, 3]):
        with pytest.raises(TypeError):
            op(make(), other)
        if not (op is operator.mod and isinstance(other, str)):  # a format string takes anything
            with pytest.raises(TypeError):
                op(other, make())


def test_methods_name_what_they_were_given() -> None:
    for name in ("add", "mul_", "clamp_min", "logical_and", "pow_"):
        with pytest.raises(TypeError, match=f"{name} takes a container, a tensor or a number, got str"):
            getattr(make(), name)("text")
    with pytest.raises(TypeError, match="lerp takes .* got NoneType"):
        make().lerp(None, 0.5)


def test_another_class_may_answer() -> None:
    class Other:
        def __radd__(self, left: Any) -> str:
            return "radd"

    assert make() + Other() == "radd"


# --- containers: keys, shapes, structure ------------------------------------------------------------------------------


def test_structure_names_device_and_lock() -> None:
    td = make(names=["x"], device="cpu").lock_()
    plain = make()
    for result in (td + plain, td.abs(), td * 2, td - torch.arange(3), td.clamp(0, 1), -td):
        assert type(result) is TensorDict
        assert result.names == ["x"] and result.device == torch.device("cpu")
        assert result.is_locked and result["b"].is_locked
        assert result.batch_size == result["b"].batch_size == torch.Size([3])
    for result in (plain + td, plain.abs()):
        assert result.names == [None] and result.device is None and not result.is_locked
    assert td["a"] is not (td + 0)["a"]


def test_key_order_does_not_matter() -> None:
    left = TensorDict({"a": torch.ones(2), "n": {"x": torch.ones(2), "y": torch.zeros(2)}}, [2])
    right = TensorDict({"n": {"y": torch.full((2,), 5.0), "x": torch.full((2,), 7.0)}, "a": torch.full((2,), 3.0)}, [2])
    result = left + right
    assert list(result.keys(True, True)) == ["a", ("n", "x"), ("n", "y")]
    assert [result[key][0].item() for key in result.keys(True, True)] == [4, 8, 5]
    left += right
    assert [left[key][0].item() for key in left.keys(True, True)] == [4, 8, 5]


def test_keys_that_differ() -> None:
    td, less = make(), make().exclude(("b", "c"))
    for call in (td.add, td.mul_, td.maximum, lambda other: td.lerp(other, 0.5), lambda other: td.addcmul_(td, other)):
        with pytest.raises(KeyMismatchError, match=r"under 'b'.*\['c'\]"):
            call(less)
    with pytest.raises(KeyError, match=r"\['b'\]"):
        td + td.exclude("b")
    assert (td == make()).all()
    tensor_there = TensorDict({"a": torch.ones(3, 4), "b": torch.ones(3)}, [3])
    with pytest.raises(TypeError, match="'b' is a container on the left and a tensor on the right"):
        td + tensor_there
    with pytest.raises(TypeError, match="'b' is a tensor on the left and a container on the right"):
        tensor_there.add(td, default=0)


@pytest.fixture
def two_sets() -> tuple[TensorDict, TensorDict]:
    left = TensorDict({"a": torch.ones(3), "n": {"x": torch.full((3,), 2.0), "y": torch.full((3,), 3.0)}}, [3])
    right = TensorDict({"n": {"x": torch.full((3,), 5.0)}, "m": {"z": torch.full((3,), 7)}, "q": torch.ones(3, 2)}, [3])
    return left, right


def test_default_intersection(two_sets: tuple[TensorDict, TensorDict]) -> None:
    left, right = two_sets
    result = left.lock_().sub(right, default="intersection")
    assert list(result.keys(True, True)) == [("n", "x")]
    assert result["n", "x"].tolist() == [-3, -3, -3] and result.is_locked
    assert left.exclude("n").add(right, default="intersection").is_empty()
    assert list(right.mul(left, default="intersection").keys(True, True)) == [("n", "x")]


@pytest.mark.parametrize("default", [10, 10.0, torch.tensor(10.0)])
def test_default_values(two_sets: tuple[TensorDict, TensorDict], default: Any) -> None:
    left, right = two_sets
    result = left.sub(right, default=default)
    assert list(result.keys(True, True)) == ["a", ("n", "x"), ("n", "y"), ("m", "z"), "q"]
    assert [result[key].flatten()[0].item() for key in result.keys(True, True)] == [-9, -3, -7, 3, 9]
    assert result["m", "z"].dtype == torch.result_type(torch.ones(1, dtype=torch.int64), default)
    assert result["q"].shape == (3, 2) and result["m"].batch_size == torch.Size([3])


def test_default_for_every_method_that_has_one(two_sets: tuple[TensorDict, TensorDict]) -> None:
    left, right = two_sets
    for name, fn in BINARY.items():
        if name in ("mod", "bitwise_and"):
            continue
        result = getattr(left, name)(right, default=2.0)
        assert torch.equal(result["n", "y"], fn(left["n", "y"], torch.tensor(2.0))), name
        assert torch.equal(result["q"], fn(torch.tensor(2.0), right["q"])), name
    ints = left.int().bitwise_and(right.int(), default=3)
    assert torch.equal(ints["n", "y"], torch.full((3,), 3, dtype=torch.int32))


def test_default_is_refused(two_sets: tuple[TensorDict, TensorDict]) -> None:
    left, right = two_sets
    with pytest.raises(ValueError, match="\"intersection\", got 'union'"):
        left.add(right, default="union")
    # Entries of the right side alone must fit the batch size of the left side.
    with pytest.raises(RuntimeError, match="'q'.*does not begin with the batch size"):
        TensorDict({"a": torch.ones(3, 2)}, [3, 2]).add(TensorDict({"q": torch.ones(3)}, [3]), default=0)


def test_a_tensor_meets_the_batch_dims_first() -> None:
    td = TensorDict({"a": torch.rand(2, 3, 4), "b": TensorDict({"c": torch.rand(2, 3)}, [2, 3])}, [2, 3])
    for tensor in (torch.rand(2, 3), torch.rand(3), torch.rand(2, 1), torch.rand(1), torch.rand(1, 3)):
        spread = tensor.expand(2, 3)
        assert torch.equal((td * tensor)["a"], td["a"] * spread[..., None])
        assert torch.equal((td * tensor)["b", "c"], td["b", "c"] * spread)
        assert torch.equal(td.clone().mul_(tensor)["a"], td["a"] * spread[..., None])
        assert torch.equal(td.lerp(td + 1, tensor)["a"], torch.lerp(td["a"], td["a"] + 1, spread[..., None]))


def test_a_tensor_that_does_not_fit() -> None:
    td = make()
    for wrong in (torch.zeros(4), torch.zeros(3, 4)):
        with pytest.raises(RuntimeError, match=r"add: a tensor .* does not broadcast to the batch size \[3\]"):
            td + wrong
        with pytest.raises(RuntimeError, match=r"does not broadcast to the batch size \[3\]"):
            td += wrong
    with pytest.raises(RuntimeError, match=r"does not broadcast to the batch size \[3\]"):
        td.add_(torch.ones(2, 3))
    assert (td == make()).all()


def test_the_batch_grows() -> None:
    td = make(names=["x"])
    result = td + torch.arange(6).view(2, 3)
    assert result.batch_size == result["b"].batch_size == torch.Size([2, 3])
    assert result.names == [None, "x"]
    assert torch.equal(result["a"], td["a"] + torch.arange(6).view(2, 3, 1))
    one = td[:1]
    for result in (one + td, td + one):
        assert result.batch_size == result["b"].batch_size == torch.Size([3])
        assert torch.equal(result["a"], one["a"] + td["a"])
    result = one.clamp(td, td + torch.ones(2, 3).long())
    assert result.batch_size == torch.Size([2, 3])
    assert TensorDict(a=torch.ones(2)).add(torch.arange(3))["a"].shape == (3, 2)


def test_containers_of_other_batch_sizes() -> None:
    td = make()
    result = td + TensorDict(td.to_dict())
    assert result.batch_size == torch.Size([3]) and torch.equal(result["a"], td["a"] * 2)
    # Alignment at the right would enlarge a batch dim of size 1 behind its back.
    left, right = TensorDict({"a": torch.zeros(2, 1)}, [2, 1]), TensorDict({"a": torch.zeros(2, 1, 4)}, [2, 1])
    with pytest.raises(RuntimeError, match="'a'.*does not begin with the batch size"):
        left + right
    nested = TensorDict({"n": TensorDict({"x": torch.zeros(3, 1)}, [3, 1])}, [3])
    wider = TensorDict({"n": TensorDict({"x": torch.zeros(3, 5)}, [3])}, [3])
    with pytest.raises(RuntimeError, match=r"\('n', 'x'\).*does not begin with the batch size \[3, 1\]"):
        nested + wider
    assert (wider + nested)["n", "x"].shape == (3, 5)


def test_errors_name_the_entry() -> None:
    td = make()
    other = make()
    other["b", "c"] = torch.ones(3, 2)
    for call in (td.add, td.mul, lambda o: td.lerp(o, 0.5), lambda o: td.clamp(o, o)):
        with pytest.raises(RuntimeError, match=r"entry \('b', 'c'\): "):
            call(other)
    with pytest.raises(RuntimeError, match=r"entry \('b', 'c'\): .*negative integer powers"):
        make().pow(-1)
    with pytest.raises(RuntimeError, match=r"entry 'a': .*bool"):
        (td > 1).sub(td > 2)
    with pytest.raises(TypeError, match=r"entry 'a': lerp"):
        td.lerp(1.0, 0.5)
    with pytest.raises(RuntimeError, match="lower bound"):
        td.clamp()


def test_empty_containers() -> None:
    for td in (TensorDict(), TensorDict({"n": {}}, [3], names=["x"])):
        for result in (td.abs(), td + 1, td * td, td.isnan(), td.clamp(0, 1), td + torch.ones(()), td.lerp(td, 0.5)):
            assert result.is_empty() and list(result.keys()) == list(td.keys())
            assert result.batch_size == td.batch_size and result.names == td.names
        assert td.abs_() is td and td.add_(1) is td and td.mul_(td) is td


def test_clamp_out() -> None:
    td, out = make(), make()
    leaf = out["a"]
    assert td.clamp(1, 2, out=out) is out
    assert out["a"] is leaf and torch.equal(leaf, td["a"].clamp(1, 2))
    assert torch.equal(td.clamp(max=2)["a"], td["a"].clamp(max=2))
    assert torch.equal(td.clamp(min=2)["a"], td["a"].clamp(min=2))
    assert torch.equal(td.clamp(0.5, td * 2)["b", "c"], torch.tensor([0.0, 1.0, 2.0]))


def test_logical_and() -> None:
    td = make()
    assert torch.equal(td.logical_and(td)["a"], td["a"] > 0)
    assert torch.equal(td.logical_and(1)["b", "c"], td["b", "c"] > 0)
    assert not td.logical_and(False).any()
    assert torch.equal(td.logical_and(torch.tensor([0, 1, 1]))["b", "c"], td["b", "c"] > 0)


def test_special_values() -> None:
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float16, torch.float32, torch.float64):
        leaf = torch.tensor([inf, -inf, nan, 0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny], dtype=dtype)
        td = TensorDict(a=leaf, b=leaf.clone().requires_grad_())
        for name in TESTS:
            assert torch.equal(getattr(td, name)()["b"], getattr(torch, name)(leaf)), name
        assert not td.isfinite()["b"].requires_grad
    numbers = torch.tensor([complex(inf, 0), complex(0, nan), complex(1, 1)])
    for name in ("isfinite", "isnan", "isreal"):
        assert torch.equal(getattr(TensorDict(a=numbers), name)()["a"], getattr(torch, name)(numbers)), name


# --- in place: nothing changes in a call that fails -------------------------------------------------------------------


def frozen(td: TensorDict) -> tuple[TensorDict, list[int]]:
    return td.detach().clone(), [leaf._version for leaf in td.values(True, True)]


def assert_unchanged(td: TensorDict, before: tuple[TensorDict, list[int]]) -> None:
    assert (td == before[0]).all()
    assert [leaf._version for leaf in td.values(True, True)] == before[1]


def test_dtypes_are_checked_first() -> None:
    td = TensorDict({"f": torch.ones(2), "n": {"i": torch.ones(2).long()}, "m": torch.tensor([True, False])}, [2])
    before = frozen(td)
    floats = td.float()
    for call in (
        td.sqrt_, td.exp_, lambda: td.add_(1.5), lambda: td.div_(2), lambda: td.mul_(floats), td.abs_, td.neg_,
        lambda: td.pow_(-1), lambda: td.lerp_(td, 0.5),
        lambda: td.add_(torch.tensor([0.5, 1.0])), lambda: td.addcdiv_(td, td),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"entry (\('n', 'i'\)|'m'): "):
            call()
        assert_unchanged(td, before)
    with pytest.raises(RuntimeError, match="entry 'f': "):
        operator.iand(td.exclude("n"), True)
    assert_unchanged(td, before)
    # A complex operand on the right alone.
    reals = TensorDict(a=torch.ones(2), b=torch.ones(2))
    before = frozen(reals)
    with pytest.raises(RuntimeError, match="entry 'b': .*ComplexFloat"):
        reals.add_(TensorDict(a=torch.ones(2), b=torch.ones(2) * 1j))
    assert_unchanged(reals, before)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_torch_refuses_of_leaves_of_one_dtype_is_named(count: int) -> None:
    td = TensorDict({f"k{i}": torch.tensor([True, False]) for i in range(count)}, [2])
    before = frozen(td)
    for call in (td.abs_, td.exp_, lambda: td.add_(1), lambda: td.sub_(td), lambda: td.lerp_(td, 0.5)):
        with pytest.raises(RuntimeError, match="entry 'k0': "):
            call()
        assert_unchanged(td, before)


def test_shapes_are_checked_first() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2, 1), "c": torch.ones(2)}}, [2])
    before = frozen(td)
    for shape in ((2, 4), (5, 2, 1)):
        other = td.clone()
        other._entries["n"]._entries["b"] = torch.ones(shape)
        for call in (
            td.add_, td.mul_, td.maximum_, lambda o: td.lerp_(o, 0.5), lambda o: td.addcmul_(td, o),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"entry \('n', 'b'\): "):
                call(other)
            assert_unchanged(td, before)
    assert torch.equal(
        td.add_(TensorDict({"a": torch.ones(2, 1), "n": {"b": torch.ones(2, 1), "c": torch.ones(1)}}))["a"],
        torch.full((2, 3), 2.0),
    )
    with pytest.raises(RuntimeError, match="does not begin with the batch size"):
        td[:1].add_(td)


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_leaves_of_the_graph_are_checked_first(kind: Any) -> None:
    learned = torch.ones(2, requires_grad=True)
    td = TensorDict(
        {"a": torch.ones(2), "n": {"w": torch.nn.Parameter(learned.detach()) if kind is not Tensor else learned}}
    )
    before = frozen(td)
    for call in (td.abs_, lambda: td.add_(1), lambda: td.mul_(td.detach()), lambda: operator.imod(td, 2)):
        with pytest.raises(RuntimeError, match=r"entry \('n', 'w'\): a leaf of the autograd graph"):
            call()
        assert_unchanged(td, before)
    view = TensorDict(a=torch.ones(2), w=learned[:1])
    with pytest.raises(RuntimeError, match="entry 'w': a leaf of the autograd graph"):
        view.exp_()
    with torch.no_grad():
        td.add_(1)
    assert td["n", "w"].tolist() == [2, 2]
    assert td.data.mul_(2) is not td and td["a"].tolist() == [4, 4]


def test_a_repeated_element_is_named() -> None:
    td = TensorDict({"a": torch.ones(1).expand(3)}, [3])
    with pytest.raises(RuntimeError, match="entry 'a': several elements of this leaf"):
        td.add_(1)


def test_an_operand_may_be_one_of_the_leaves() -> None:
    td = TensorDict({"norm": torch.tensor([2.0, 4.0]), "x": torch.full((2, 3), 8.0), "y": torch.ones(2)}, [2])
    td.div_(td["norm"])
    assert td["norm"].tolist() == [1, 1] and td["x"][:, 0].tolist() == [4, 2] and td["y"].tolist() == [0.5, 0.25]
    td += td
    assert td["norm"].tolist() == [2, 2]
    td -= td["y"][0]
    assert td["x"][:, 0].tolist() == [7, 3] and td["y"].tolist() == [0, -0.5]


# --- autograd, transforms, subclasses ---------------------------------------------------------------------------------

SMOOTH: list[Callable[[Any, Any, Any], Any]] = [
    *[lambda x, y, w, name=name: getattr(x, name)() for name in OF_ONE if name not in ("acos", "asin")],
    lambda x, y, w: x + y * 2 - 3 * w,
    lambda x, y, w: (2 - x) / (y + 1) + 1 / w,
    lambda x, y, w: x**y + x**2 + 2**x,
    lambda x, y, w: x % 2 + x % y,
    lambda x, y, w: x.clamp(0.4, 0.8) + x.clamp_min(y) + x.clamp_max(0.5),
    lambda x, y, w: x.maximum(y) * x.minimum(y),
    lambda x, y, w: x.lerp(y, w) + x.lerp(y, 0.3),
    lambda x, y, w: x.addcmul(y, w, value=2) + x.addcdiv(y, w, value=3),
    lambda x, y, w: (x * 1).mul_(y).add_(w, alpha=2).lerp_(y, w).addcmul_(y, w).sigmoid_(),
]


@pytest.mark.parametrize("index", range(len(SMOOTH)))
def test_gradients_are_those_of_torch(index: int) -> None:
    torch.manual_seed(index)
    fn = SMOOTH[index]
    leaves = [[torch.rand(3, 2) * 0.8 + 0.1 for _ in range(3)] for _ in range(3)]
    ours, theirs = ([[leaf.clone().requires_grad_() for leaf in row] for row in leaves] for _ in range(2))
    x, y, w = (TensorDict({"a": row[0], "n": {"b": row[1]}, "c": row[2]}, [3]) for row in ours)
    sum(leaf.sum() for leaf in fn(x, y, w).values(True, True)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sum(fn(a, b, c).sum() for a, b, c in zip(*theirs, strict=True)).backward()
    for mine, expected in zip(ours, theirs, strict=True):
        for one, two in zip(mine, expected, strict=True):
            assert (one.grad is None) == (two.grad is None)
            if two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad)


def test_gradients_reach_a_tensor_operand() -> None:
    weight = torch.rand(3, requires_grad=True)
    td = TensorDict({"a": torch.rand(3, 2), "b": torch.rand(3)}, [3])
    result = td.clone().mul_(weight) + td * weight
    (result["a"].sum() + result["b"].sum()).backward()
    torch.testing.assert_close(weight.grad, 2 * (td["a"].sum(1) + td["b"]))


def test_forward_mode() -> None:
    td = TensorDict(a=torch.rand(3), b=torch.rand(3))
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch compiles its decompositions in a way that it deprecates
        dual = td.apply(lambda x: torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        result = (dual * 2.0).sin()
        tangent = torch.autograd.forward_ad.unpack_dual(result["a"]).tangent
    torch.testing.assert_close(tangent, 2 * (td["a"] * 2).cos())


def test_vmap_and_grad() -> None:
    td = TensorDict({"a": torch.rand(5, 3), "b": torch.rand(5), "c": torch.rand(5)}, [5])

    def score(a: Tensor, b: Tensor) -> Tensor:
        inner = TensorDict(a=a, b=b, c=b)
        inner = (inner * 2.0 + inner).exp().clamp_min(0.1).add_(inner)
        return inner["a"].sum() + inner["b"].sum()

    expected = torch.stack([score(a, b) for a, b in zip(td["a"], td["b"], strict=True)])
    torch.testing.assert_close(torch.vmap(score)(td["a"], td["b"]), expected)
    slopes = torch.vmap(torch.func.grad(score))(td["a"], td["b"])
    torch.testing.assert_close(slopes, 3 * (td["a"] * 3).exp() + 1)


def test_vmap_over_a_container() -> None:
    td = TensorDict({"a": torch.rand(5, 3), "b": torch.rand(5), "c": torch.rand(5)}, [5])
    result = torch.vmap(lambda x: (x + 1.5) * x.neg())(td)
    torch.testing.assert_close(result["a"], (td["a"] + 1.5) * -td["a"])


class Tagged(Tensor):
    """A subclass whose results are of the subclass."""


def test_tensor_subclasses_stay_what_torch_makes_of_them() -> None:
    td = TensorDict(a=torch.rand(3).as_subclass(Tagged), b=torch.rand(3), c=torch.rand(3))
    for result in (td.abs(), td + 1.0, td * td, td.clamp(0, 1), 2 - td):
        assert type(result["a"]) is Tagged and type(result["b"]) is Tensor
    before = td["a"].clone()
    td.add_(1.0).mul_(td)
    torch.testing.assert_close(td["a"], (before + 1) ** 2)


def test_parameters_give_plain_tensors() -> None:
    td = TensorDict(a=torch.nn.Parameter(torch.rand(3)), b=torch.nn.Parameter(torch.rand(3)))
    result = td * 2.0
    assert type(result["a"]) is Tensor and result["a"].requires_grad
    result["a"].sum().backward()
    assert td["a"].grad.tolist() == [2, 2, 2]


def test_memory_mapped_leaves_are_written_through(tmp_path: Any) -> None:
    td = make().memmap_(tmp_path)
    td.add_(1).mul_(make())
    assert torch.equal(TensorDict.load_memmap(tmp_path)["a"], (make()["a"] + 1) * make()["a"])
    assert type((td + 1)["a"]) is Tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_ragged_leaves(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    td = TensorDict({"a": ragged, "b": torch.ones(2), "c": torch.ones(2)}, [2])
    result = (td * 2.0).abs() + td
    assert result["a"].is_nested and result["a"].layout == layout
    assert [piece.tolist() for piece in result["a"].unbind()] == [[3, 3], [3, 3, 3]]
    td.mul_(3.0).add_(td)
    assert [piece.tolist() for piece in td["a"].unbind()] == [[6, 6], [6, 6, 6]] and td["b"].tolist() == [6, 6]


def test_meta_leaves() -> None:
    td = make().to("meta")
    result = (td + 1.5).abs() * td
    assert result.device == torch.device("meta") and result["b", "c"].dtype == torch.float32


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda td: td.exp(), ["_foreach_exp"]),
        (lambda td: td.exp_(), ["_foreach_exp_"]),
        (lambda td: td + td, ["_foreach_add"]),
        (lambda td: td.mul_(td), ["_foreach_mul_"]),
        (lambda td: td.lerp(td, 0.5), ["_foreach_lerp"]),
        (lambda td: td.addcdiv_(td, td), ["_foreach_addcdiv_"]),
        (lambda td: td**2, ["_foreach_pow"]),
        (lambda td: 2**td, ["_foreach_pow"]),
        (lambda td: td.maximum(1), ["_foreach_maximum"]),
        (lambda td: td.clamp(0, 1), ["_foreach_clamp_min", "_foreach_clamp_max_"]),
    ],
)
def test_one_call_for_all_leaves(call: Callable[[Any], Any], expected: list[str]) -> None:
    td = TensorDict({str(i): torch.rand(2) for i in range(10)}, [2])
    with Calls() as calls:
        call(td)
    assert [name.removeprefix("aten::") for name in calls.names] == expected


def test_torch_maximum() -> None:
    td = make()
    assert torch.equal(torch.maximum(td, td + 1)["a"], td["a"] + 1)
    with pytest.raises(TypeError, match="not defined for containers"):
        torch.fft.fft(td)


def test_compiled_code_sees_through() -> None:
    def out_of_place(td: Any, other: Any, tensor: Tensor) -> Any:
        return ((td * 2.0 + other).abs().clamp(0.1, 1.0) - 1).mul(tensor) + td.lerp(other, 0.5)

    def in_place(td: Any, other: Any, tensor: Tensor) -> Any:
        td.mul_(2.0).add_(other)
        td += 1
        return td.mul_(tensor)

    torch.compiler.reset()
    other, tensor = (make() + 1).float(), torch.tensor([1.0, 2.0, 3.0])
    for fn in (out_of_place, in_place):
        compiled = torch.compile(fn, backend="eager", fullgraph=True)
        assert (compiled(make().float(), other, tensor) == fn(make().float(), other, tensor)).all()


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.iadd])
def test_compiled_functions_of_operators_are_left_to_python(op: Callable[[Any, Any], Any]) -> None:
    # Torch hands `iadd(td, tensor)` and `add(td, tensor)` to us as the same call, and no bytecode tells which it is.
    torch.compiler.reset()
    td, other = make().float(), torch.ones(3)

    def change(td: Any) -> Any:
        return op(td, other)

    with pytest.raises(Exception, match=r"Write td\.add_\(tensor\)"):
        torch.compile(change, backend="eager", fullgraph=True)(td)
    assert torch.equal(td["a"], make().float()["a"])
    torch.compiler.reset()
    found, expected = torch.compile(change, backend="eager")(td), op(make().float(), other)
    assert (found == expected).all() and (found is td) == (op is operator.iadd)


# --- what autograd refuses changes nothing ----------------------------------------------------------------------------


class Graph(TensorClass):
    a: torch.Tensor
    b: torch.Tensor
    n: TensorDict


def graph_entries() -> dict[str, Any]:
    """Entries whose last one forbids a change in place."""
    last = torch.ones(2, requires_grad=True)
    return {"a": torch.ones(2), "b": torch.ones(2), "n": TensorDict({"x": torch.ones(2), "y": last}, [2])}


GRAPHS = {
    "dense": lambda: TensorDict(graph_entries(), [2]),
    "lazy": lambda: lazy_stack([TensorDict(graph_entries(), [2]) for _ in range(2)], 1),
    "tensorclass": lambda: Graph(**graph_entries(), batch_size=[2]),
}
WRITES = {
    "zero_": lambda td: td.zero_(),
    "add_": lambda td: td.add_(1),
    "sin_": lambda td: td.sin_(),
    "masked_fill_": lambda td: td.masked_fill_(torch.tensor([True, False]), 0.0),
    "apply_": lambda td: td.apply_(lambda x: x.detach() * 0),
    "update_": lambda td: td.update_(td.detach() * 0),
    "copy_": lambda td: td.copy_(td.detach() * 0),
    "update in place": lambda td: td.update(
        {"a": td["a"] * 0, "b": td["a"] * 0, "n": {"y": td["a"] * 0}}, inplace=True
    ),
    "update adds": lambda td: td.update({"n": {"new": td["a"], "y": td["a"] * 0}}, inplace=True),
    "update_at_": lambda td: td.update_at_((td.detach() * 0)[:1], slice(1)),
    "index": lambda td: td.__setitem__(0, (td.detach() * 0)[0]),
    "mask": lambda td: td.__setitem__(torch.tensor([True, False]), (td.detach() * 0)[:1]),
    "number": lambda td: td.__setitem__(0, 0.0),
    "tensor": lambda td: td.__setitem__(0, torch.zeros(())),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", GRAPHS)
def test_a_later_leaf_of_the_graph_leaves_the_earlier_ones_alone(make: str, write: str) -> None:
    td = GRAPHS[make]()
    before = td.detach().clone()
    with pytest.raises(RuntimeError, match=r"entry \('n', 'y'\).*requires grad"):
        WRITES[write](td)
    assert td.keys() == before.keys() and (td.detach() == before).all()
    with torch.no_grad():
        td.update_(before * 2)
    assert (td.detach() == before * 2).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda td: td.exp(), lambda td: -td, lambda td: td + 1, lambda td: td * td, lambda td: td + torch.ones(2),
        lambda td: td.lerp(td, 0.5), lambda td: td.clamp(0, 1), lambda td: td.addcmul(td, td), lambda td: 2 - td,
        lambda td: td.maximum(td), lambda td: td**2,
    ],
)  # fmt: skip
def test_results_require_grad_where_an_operand_does(call: Callable[[Any], Any]) -> None:
    td = TensorDict(a=torch.rand(2), b=torch.rand(2, requires_grad=True), c=torch.rand(2))
    result = call(td)
    assert [leaf.requires_grad for leaf in result.values()] == [False, True, False]
    assert all(torch.equal(result[name], call(td.detach())[name]) for name in "abc")
    result["b"].sum().backward()
    assert td["b"].grad is not None
    everywhere = td + torch.ones(2, requires_grad=True)
    assert all(leaf.requires_grad for leaf in everywhere.values())


def test_in_place_with_a_part_of_the_container_itself() -> None:
    for size in (2, 40):
        leaf = torch.rand(size, 3)
        td = TensorDict({"a": leaf, "n": {"b": leaf[:, 0].clone()}}, [size])
        for name in ("add", "sub", "mul", "pow", "clamp_min", "clamp_max"):
            made = td.clone()
            assert_close(getattr(made, name + "_")(made[:1]), getattr(td, name)(td[:1]))
        made = td.clone()
        assert_close(made.addcmul_(made[:1], made), td.addcmul(td[:1], td))
        made *= made[:1]


def test_in_place_with_a_part_of_the_lazy_stack_itself() -> None:
    td = TensorDict({"a": torch.rand(3, 2, 4) + 1, "n": {"b": torch.rand(3, 2) + 1}}, [3, 2])
    for name in ("add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max"):
        for dim in (0, 1):
            for part in ((slice(1),), (slice(1, 2),), (slice(None), slice(1, 2))):
                stack = td.to_lazystack(dim).clone()
                assert_close(getattr(stack, name + "_")(stack[part]), getattr(td, name)(td[part]))
    stack = td.to_lazystack().clone()
    assert_close(stack.addcmul_(stack[:1], stack[1:2]), td.addcmul(td[:1], td[1:2]))


@pytest.mark.parametrize("name", ["__sub__", "__rsub__", "__imul__", "__rtruediv__", "__pow__", "abs", "exp_", "isnan"])
def test_bound_methods_and_operators_can_be_pickled(name: str) -> None:
    method = getattr(TensorDict(a=torch.ones(2)), name)
    assert pickle.loads(pickle.dumps(method)).__name__ == method.__name__ == name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("low", [-1, 2, -1.0, 2.5])
@pytest.mark.parametrize("high", [-1, 2, -1.0, 2.5])
@pytest.mark.parametrize("form", ["number", "tensor", "container"])
def test_clamp_promotes_as_torch_before_it_compares(dtype: torch.dtype, low: float, high: float, form: str) -> None:
    leaf = torch.tensor([7, 2, 120, 0]).to(dtype)
    td = TensorDict({"a": leaf}, [4])
    bounds: Any = (low, high) if form == "number" else [torch.full((4,), bound) for bound in (low, high)]
    given = bounds if form != "container" else [TensorDict({"a": bound}, [4]) for bound in bounds]
    expected = torch.clamp(leaf, *bounds)
    result = td.clamp(*given)["a"]
    assert result.dtype is expected.dtype and result.equal(expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.add_(1),
        lambda td: td.exp_(),
        lambda td: td.clamp_min_(td + 5),
        lambda td: td.update_(td + 5),
        lambda td: td.update(td + 5, inplace=True),
        lambda td: td.__setitem__(slice(0, 2), td[:2] + 5),
    ],
)
def test_in_place_operations_refuse_expanded_leaves_before_others_change(write: Any) -> None:
    td = TensorDict({"a": torch.ones(3), "b": torch.zeros(1).expand(3), "c": torch.ones(3)}, [3])
    with pytest.raises(RuntimeError, match="several elements of this leaf of shape"):
        write(td)
    assert td["a"].tolist() == td["c"].tolist() == [1, 1, 1]


def test_an_expanded_leaf_takes_itself() -> None:
    td = TensorDict({"a": torch.ones(1), "b": torch.ones(1)}, [1]).expand(2, 3)
    td[0] = td[-1]
    assert td["a"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_containers_that_a_default_adds_have_the_names_of_their_parent() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3], names=["time"])
    nested = TensorDict({"b": torch.ones(3, 2)}, [3, 2])
    result = td.add(TensorDict({"a": torch.ones(3), "n": nested}, [3]), default=0.0)
    assert result["n"].names == ["time", None] and nested.names == [None, None]
    assert result["n", "b"].equal(nested["b"])


@pytest.mark.parametrize(
    "write",
    [
        lambda stack: stack.__setitem__([0, 1], TensorDict(a=torch.ones(2, 3), batch_size=[2])),
        lambda stack: stack.__setitem__(slice(None), 5),
        lambda stack: stack.set_at_("a", 5.0, slice(None)),
    ],
)
def test_assignments_refuse_an_expanded_leaf_of_one_member_before_others_change(write: Any) -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(3)), TensorDict(a=torch.zeros(1).expand(3))])
    with pytest.raises(RuntimeError, match="several elements of this leaf of shape"):
        write(stack)
    assert stack["a"].sum() == 0


def test_a_number_is_assigned_to_all_leaves_or_none_if_one_is_expanded() -> None:
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(1).expand(3)}, [3])
    with pytest.raises(RuntimeError, match="several elements of this leaf of shape"):
        td[:2] = 5
    assert td["a"].sum() == 0
    td[0] = 5  # one element is not expanded
    assert td["a"].tolist() == [5, 0, 0] and td["b"].tolist() == [5, 5, 5]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_leaves_change_in_place(convert: Any) -> None:
    td = TensorDict(a=convert(torch.eye(3)), b=torch.ones(2))
    td.update_({"a": convert(2 * torch.eye(3)), "b": torch.zeros(2)})
    assert td["a"].to_dense().equal(2 * torch.eye(3)) and td["b"].sum() == 0
    td.mul_(3)
    assert td["a"].to_dense().equal(6 * torch.eye(3))


def test_clamp_between_a_number_and_a_container_keeps_the_digits_of_the_number() -> None:
    td = TensorDict(a=torch.zeros(2, dtype=torch.float64))
    assert td.clamp(0.1, td + 1)["a"].tolist() == (td + 5).clamp(td, 0.1)["a"].tolist() == [0.1, 0.1]
