"""torch's own functions on containers: stacking, concatenating, making alike, and the shape operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cases import OF_ONE, TESTS
from contract.kinds import Kind
from contract.model import (
    Plain,
    addresses,
    as_path,
    assert_leaf,
    assert_matches,
    changed,
    index_map,
    leaves,
    mapped,
    picked,
)
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, lazy_stack
from tensordict import cat as td_cat
from tensordict import stack as td_stack
from tensordict.ops.math import torch_functions

Build = Callable[[], Any]


def joined(fn: Callable[..., torch.Tensor], parts: list[Plain], dim: int, batch_dims: int) -> Plain:
    """`fn` over the leaves of equal keys, `dim` counted among the batch dimensions of the result."""
    if dim < 0:
        dim += batch_dims
    first = parts[0]
    return {
        name: joined(fn, [part[name] for part in parts], dim, batch_dims)
        if isinstance(first[name], dict)
        else fn([part[name] for part in parts], dim)
        for name in first
    }


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2])
@pytest.mark.parametrize("stack", [torch.stack, td_stack, TensorDict.stack])
def test_stack(build: Build, plain: Plain, kind: Kind, dim: int, stack: Any) -> None:
    first, second = build(), build().apply(changed)
    ndim = len(kind.batch_size) + 1
    if not -ndim <= dim < ndim:
        with pytest.raises((IndexError, RuntimeError)):
            stack([first, second], dim)
        return
    result = stack([first, second], dim)
    shape = torch.stack([torch.zeros(kind.batch_size)] * 2, dim).shape
    assert_matches(result, joined(torch.stack, [plain, mapped(changed, plain)], dim, ndim), shape, kind.extra)
    assert result.device == first.device
    position = dim % ndim
    assert result.names == [*first.names[:position], None, *first.names[position:]]


@pytest.mark.parametrize("dim", [0, 1, -1, 3])
@pytest.mark.parametrize("cat", [torch.cat, td_cat, TensorDict.cat])
def test_cat(build: Build, plain: Plain, kind: Kind, dim: int, cat: Any) -> None:
    first, second = build(), build().apply(changed)
    ndim = len(kind.batch_size)
    if not -ndim <= dim < ndim:
        with pytest.raises((IndexError, RuntimeError)):
            cat([first, second], dim)
        return
    result = cat([first, second], dim)
    shape = torch.cat([torch.zeros(kind.batch_size)] * 2, dim).shape
    assert_matches(result, joined(torch.cat, [plain, mapped(changed, plain)], dim, ndim), shape, kind.extra)
    assert result.names == first.names and result.device == first.device


def test_stack_undoes_unbind_and_cat_undoes_split(td: Any, plain: Plain, kind: Kind) -> None:
    for dim in range(len(kind.batch_size)):
        assert_matches(torch.stack(td.unbind(dim), dim), plain, kind.batch_size, kind.extra)
        assert_matches(torch.cat(td.split(2, dim), dim), plain, kind.batch_size, kind.extra)


class One(TensorClass):
    content: Any


class Other(TensorClass):
    content: Any


def test_two_tensorclasses_are_not_joined(td: Any, kind: Kind) -> None:
    instances = [cls(content=td, batch_size=td.batch_size) for cls in (One, Other)]
    nested = [TensorDict({"n": instance}, td.batch_size) for instance in instances]
    joins = [torch.stack, torch.cat] if kind.batch_size else [torch.stack]
    for join in joins:
        with pytest.raises(TypeError, match="^(?!entry).*the tensorclasses One and Other"):
            join(instances)
        with pytest.raises(TypeError, match="entry 'n': .*the tensorclasses One and Other"):
            join(nested)
    out = lazy_stack([nested[0].clone(), nested[0].clone()]).densify()
    with pytest.raises(TypeError, match="entry 'n': .*the tensorclasses One and Other"):
        torch.stack(nested, out=out)
    stack = lazy_stack(instances)
    assert not isinstance(stack, (One, Other)) and [type(member) for member in stack.unbind(0)] == [One, Other]


def test_stack_out(build: Build, plain: Plain, kind: Kind) -> None:
    parts = [build(), build().apply(changed)]
    expected = joined(torch.stack, [plain, mapped(changed, plain)], 0, 0)
    out = torch.stack([build(), build()]).zero_()
    memory = addresses(out)
    assert torch.stack(parts, 0, out=out) is out
    assert_matches(out, expected, (2, *kind.batch_size), kind.extra)
    assert addresses(out) == memory
    out.zero_().lock_()
    torch.stack(parts, out=out)
    assert_matches(out, expected, (2, *kind.batch_size), kind.extra)


def test_cat_out(build: Build, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to concatenate along")
    parts = [build(), build().apply(changed)]
    out = torch.cat([build(), build()]).zero_()
    memory = addresses(out)
    assert torch.cat(parts, 0, out=out) is out
    expected = joined(torch.cat, [plain, mapped(changed, plain)], 0, 0)
    assert_matches(out, expected, out.batch_size, kind.extra)
    assert addresses(out) == memory


def test_out_of_the_wrong_batch_size(build: Build, kind: Kind) -> None:
    parts = [build(), build()]
    out = torch.stack([build(), build(), build()]).zero_()
    with pytest.raises((RuntimeError, ValueError)):
        torch.stack(parts, 0, out=out)
    assert all(not leaf.any() for leaf in out.values(True, True))
    if kind.batch_size:
        with pytest.raises((RuntimeError, ValueError)):
            torch.cat(parts, 0, out=build())


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_keys_that_differ_are_named(build: Build, kind: Kind, join: Any) -> None:
    if join is torch.cat and not kind.batch_size:
        pytest.skip("nothing to concatenate along")
    if join is torch.cat and 0 in kind.stacked:
        pytest.skip("the members of a lazy stack may have different keys")
    keys: list[Any] = ["mask"] + ([("b", "c")] if kind.nested else [])
    for key in keys:
        for parts in ([build(), build().exclude(key)], [build().exclude(key), build()]):
            with pytest.raises((RuntimeError, KeyError), match=as_path(key)[-1]):
                join(parts, 0)


def test_shapes_that_differ_are_named() -> None:
    parts = [TensorDict({"n": {"leaf": torch.zeros(3)}}), TensorDict({"n": {"leaf": torch.zeros(4)}})]
    with pytest.raises(RuntimeError, match="leaf"):
        torch.stack(parts)
    with pytest.raises(RuntimeError, match="leaf"):
        torch.cat([part.unsqueeze(0) for part in parts])


def test_batch_sizes_that_differ() -> None:
    parts = [TensorDict({"a": torch.zeros(3, 4)}, [3]), TensorDict({"a": torch.zeros(2, 4)}, [2])]
    with pytest.raises(RuntimeError):
        torch.stack(parts)
    assert torch.cat(parts).batch_size == torch.Size([5])
    with pytest.raises(RuntimeError):
        torch.cat([TensorDict({"a": torch.zeros(3, 4)}, [3, 4]), TensorDict({"a": torch.zeros(2, 5)}, [2, 5])])


@pytest.mark.parametrize("join", [TensorDict.stack, TensorDict.cat, td_stack, td_cat])
def test_nothing_to_join(join: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        join([])


def test_key_order_does_not_matter() -> None:
    first = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2])
    second = TensorDict({"b": torch.ones(2) * 3, "a": torch.ones(2) * 2}, [2])
    expected = {"a": torch.tensor([[0.0, 0], [2, 2]]), "b": torch.tensor([[1.0, 1], [3, 3]])}
    assert_matches(torch.stack([first, second]), expected, (2, 2))
    assert_matches(torch.cat([first, second]), mapped(torch.flatten, expected), (4,))


@pytest.mark.parametrize(
    ("name", "args", "value"),
    [("zeros_like", (), 0), ("ones_like", (), 1), ("full_like", (1,), 1), ("empty_like", (), None)],
)
def test_like(td: Any, plain: Plain, kind: Kind, name: str, args: tuple[Any, ...], value: int | None) -> None:
    result = getattr(torch, name)(td, *args)
    assert result.batch_size == td.batch_size and result.names == td.names and result.device == td.device
    assert not set(addresses(result)) & set(addresses(td))
    for path, leaf in leaves(plain).items():
        assert result[path].shape == leaf.shape and result[path].dtype == leaf.dtype
        if value is not None:
            assert_leaf(result[path], torch.full_like(leaf, value), path)
    doubled = getattr(torch, name)(td, *args, dtype=torch.float64)
    assert all(leaf.dtype == torch.float64 for leaf in doubled.values(True, True))
    assert_matches(td, plain, kind.batch_size, kind.extra)


@pytest.mark.parametrize("name", ["rand_like", "randn_like"])
def test_random_like(td: Any, plain: Plain, name: str) -> None:
    result = getattr(torch, name)(td, dtype=torch.float32)
    for path, leaf in leaves(plain).items():
        assert result[path].shape == leaf.shape and result[path].dtype == torch.float32
        assert leaf.numel() < 4 or result[path].unique().numel() > 1
    floats = td.float()
    assert getattr(torch, name)(floats)["a"].dtype == torch.float32


def test_clone(td: Any, plain: Plain, kind: Kind) -> None:
    result = torch.clone(td)
    assert_matches(result, plain, kind.batch_size, kind.extra)
    assert not set(addresses(result)) & set(addresses(td))


FUNCTIONS = [
    "torch.unbind(x, 0)", "torch.unbind(x, -1)", "torch.split(x, 2, 0)", "torch.split(x, [1, 2], 0)",
    "torch.chunk(x, 2, 0)", "torch.tensor_split(x, 2, 0)", "torch.squeeze(x)", "torch.squeeze(x, 1)",
    "torch.unsqueeze(x, 0)", "torch.unsqueeze(x, -1)", "torch.permute(x, (1, 0))", "torch.permute(x, (2, 0, 1))",
    "torch.transpose(x, 0, 1)", "torch.reshape(x, (-1,))", "torch.reshape(x, (2, -1))", "torch.flatten(x)",
    "torch.flatten(x, 0, 1)", "torch.unflatten(x, 0, (2, -1))", "torch.movedim(x, 0, -1)", "torch.moveaxis(x, 0, 1)",
    "torch.swapaxes(x, 0, 1)", "torch.swapdims(x, 0, 1)", "torch.broadcast_to(x, (2, 3, 4))", "torch.roll(x, 1, 0)",
    "torch.flip(x, (0,))", "torch.fliplr(x)", "torch.flipud(x)", "torch.rot90(x)", "torch.tile(x, (2, 1))",
    "torch.repeat_interleave(x, 2, 0)", "torch.narrow(x, 0, 1, 1)", "torch.atleast_1d(x)", "torch.atleast_2d(x)",
    "torch.gather(x, 0, torch.zeros(2, 4, dtype=torch.int64))", "torch.gather(x, 0, torch.tensor([1, 1]))",
    "torch.masked_select(x, torch.eye(3, 4).bool())",
]  # fmt: skip


@pytest.mark.parametrize("call", FUNCTIONS)
def test_function(td: Any, plain: Plain, kind: Kind, call: str) -> None:
    op = eval(f"lambda x: {call}", {"torch": torch})
    try:
        numbers = op(index_map(kind.batch_size))
    except (RuntimeError, IndexError, ValueError):
        if "gather" in call or "masked" in call:
            pytest.skip("an index or mask of fewer dimensions is a liberty that containers may take")
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            op(td)
        return
    if not kind.batch_size and any(form in call for form in ("(x, 0", "(x, (0", ", 2, 0")):
        pytest.skip("torch takes dim 0 of a scalar, a container need not")
    if "masked_select" in call and len(kind.batch_size) != 2:
        pytest.skip("torch broadcasts the mask and the tensor, a container has the size of its batch")
    result = op(td)
    if isinstance(numbers, torch.Tensor):
        result, numbers = [result], [numbers]
    assert len(result) == len(numbers)
    for part, part_numbers in zip(result, numbers, strict=True):
        assert_matches(part, picked(plain, kind.batch_size, part_numbers), tuple(part_numbers.shape), kind.extra)


def test_where(td: Any, plain: Plain, kind: Kind) -> None:
    condition = index_map(kind.batch_size) % 2 == 0
    result = torch.where(condition, td, torch.zeros_like(td))

    def chosen(leaf: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(leaf)
        kept[condition] = leaf[condition]
        return kept

    assert_matches(result, mapped(chosen, plain), kind.batch_size, kind.extra)


def test_a_function_without_meaning_is_refused(td: Any) -> None:
    with pytest.raises(TypeError):
        torch.linalg.svd(td)


def test_vmap_over_one_container(td: Any, plain: Plain, kind: Kind) -> None:
    """A tuple of one dim stands for the one argument, and for the one result."""
    if not kind.batch_size:
        pytest.skip("nothing to map over")
    expected = mapped(changed, plain)
    for in_dims, out_dims in ((0, 0), ((0,), (0,)), ((0,), 0), (0, (0,))):
        result = torch.vmap(lambda part: part.apply(changed), in_dims, out_dims)(td)
        assert_matches(result, expected, kind.batch_size, kind.extra)
    if len(kind.batch_size) > 1:
        moved = torch.vmap(lambda part: part.apply(changed), (1,), (0,))(td)
        order = (1, 0, *range(2, len(kind.batch_size)))
        assert moved.batch_size == td.permute(order).batch_size
        assert_matches(moved, mapped(lambda leaf: leaf.transpose(0, 1), expected))


def test_vmap_keeps_locks_and_stacks(td: Any, plain: Plain, kind: Kind) -> None:
    """A locked container is locked inside the function, and a lazy stack that the function returns is one again."""
    if not kind.batch_size:
        pytest.skip("nothing to map over")
    locks: list[bool] = []

    def fn(part: Any) -> Any:
        locks.append(part.is_locked)
        return part

    for dim in range(len(kind.batch_size)):
        result = torch.vmap(fn, dim, dim)(td)
        assert_matches(result, plain, kind.batch_size, kind.extra)
        assert result.is_locked == td.is_locked
        if isinstance(td, LazyStackedTensorDict):
            assert isinstance(result, LazyStackedTensorDict) and result.stack_dim == td.stack_dim
    assert locks == [td.is_locked] * len(kind.batch_size)
    if td.is_locked:
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            torch.vmap(lambda part: part.update({"a": part["a"] + 1}))(td)
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            torch.vmap(lambda part: part.del_("a"))(td)


@pytest.mark.parametrize(
    "loss", [F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss], ids=lambda loss: loss.__name__
)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}], ids=repr)
def test_losses(td: Any, plain: Plain, kind: Kind, loss: Callable[..., Any], options: dict[str, Any]) -> None:
    td, plain = td.to(torch.float32), mapped(torch.Tensor.float, plain)
    target = mapped(lambda leaf: changed(leaf) + 0.25, plain)
    result = loss(td, TensorDict(target, kind.batch_size), **options)
    expected = leaves(target)
    assert set(map(as_path, result.keys(True, True))) == set(expected)
    for path, leaf in leaves(plain).items():
        torch.testing.assert_close(result[path], loss(leaf, expected[path], **options))
    assert result.batch_size == (kind.batch_size if options.get("reduction") == "none" else ())
    for odd in (1.0, torch.ones(2)):
        with pytest.raises(TypeError, match="two containers"):
            loss(td, odd)
    assert loss(td, td, reduction="none").batch_size == td.batch_size


TWO = "add bitwise_and clamp_max clamp_min div logical_and maximum minimum mul pow rsub sub".split()  # noqa: SIM905
THREE = ["addcdiv", "addcmul", "clamp", "lerp"]


def assert_same_result(function: Callable[..., Any], method: Callable[..., Any]) -> None:
    """Ask that torch's function gives what the method gives; the same error where the method fails."""
    try:
        expected = method()
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error)):
            function()
        return
    result = function()
    assert type(result) is type(expected)
    for key, value in expected.items(True, True):
        torch.testing.assert_close(result.get(key), value, equal_nan=True)


def test_functions_of_numbers_are_the_methods(build: Build) -> None:
    td, other = build(), build()
    for names, others in (([*OF_ONE, *TESTS, "detach"], ()), (TWO, (other,)), (THREE, (other, other))):
        for name in names:
            assert_same_result(partial(getattr(torch, name), td, *others), partial(getattr(td, name), *others))


def test_functions_in_place_are_the_methods(build: Build) -> None:
    for name in ("abs_", "detach_", "zero_"):
        expected, td = build(), build()
        try:
            getattr(expected, name)()
        except (RuntimeError, TypeError) as error:
            with pytest.raises(type(error)):
                getattr(torch, name)(td)
            continue
        assert getattr(torch, name)(td) is td
        for key, value in expected.items(True, True):
            torch.testing.assert_close(td.get(key), value, equal_nan=True)


# Functions of torch that share the name of a method, but not its meaning or arguments, or that give no container.
OTHERS = {
    "as_tensor", "empty", "fill_", "is_floating_point", "load", "norm", "save", "scatter", "select",
}  # fmt: skip


def test_every_function_with_a_method_of_its_name_takes_containers() -> None:
    named = {name for name in dir(torch) if not name.startswith("_") and isfunction_of_torch(name)}
    found = {name for name in named if hasattr(TensorDict, name)}
    assert {name for name in found if getattr(torch, name) not in torch_functions._TABLE} == OTHERS


def isfunction_of_torch(name: str) -> bool:
    value = getattr(torch, name)
    return callable(value) and not isinstance(value, type)


ONE_OPERAND = [name for name in torch_functions._SAME_AS_METHOD.split() if name in (*OF_ONE, *TESTS, "detach")]


def call_every_function(td: Any, other: Any) -> list[Any]:
    results = [getattr(torch, name)(td) for name in ONE_OPERAND]
    results += [getattr(torch, name)(td, other) for name in TWO if name != "bitwise_and"]
    results += [getattr(torch, name)(td, other, other) for name in THREE]
    return [*results, torch.clamp(td, 0.25, 0.5), torch.masked_fill(td, td["a"] > 0.5, 0.0), torch.softmax(td, 0)]


def test_functions_compile_to_one_graph() -> None:
    td, other = (TensorDict(a=torch.rand(3), b={"c": torch.rand(3)}, batch_size=[3]) for _ in range(2))
    compiled = torch.compile(call_every_function, fullgraph=True, backend="eager")
    for got, want in zip(compiled(td, other), call_every_function(td, other), strict=True):
        for key, value in want.items(True, True):
            torch.testing.assert_close(got[key], value, equal_nan=True)


def test_functions_in_place_compile_with_breaks() -> None:
    """Dynamo does not hand these to a container; the graph breaks there."""
    td = TensorDict(a=torch.tensor([-1.0, 2.0]))
    assert torch.compile(torch.abs_, backend="eager")(td) is td and td["a"].tolist() == [1, 2]
    assert torch.clamp_max_(td, 1.5)["a"].tolist() == [1, 1.5]
    assert torch.clamp_min_(td, 1.25)["a"].tolist() == [1.25, 1.5]


NAMES_OF_PAIRS = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "logical_and")


@pytest.mark.parametrize("name", NAMES_OF_PAIRS)
def test_functions_of_a_tensor_and_a_container(name: str) -> None:
    td, tensor = TensorDict(a=torch.tensor([1.0, 2.0]), batch_size=2), torch.tensor([3.0, 1.5])
    function = getattr(torch, name)
    torch.testing.assert_close(function(tensor, td)["a"], function(tensor, td["a"]))
    torch.testing.assert_close(function(td, tensor)["a"], function(td["a"], tensor))
    # Dynamo makes the same call for `operator.iadd(td, tensor)`, which must not become `torch.add(tensor, td)`.
    fullgraph = name in ("maximum", "minimum", "logical_and")
    compiled = torch.compile(lambda *pair: function(*pair), fullgraph=fullgraph, backend="eager")
    torch.testing.assert_close(compiled(tensor, td)["a"], function(tensor, td["a"]))
    compiled = torch.compile(lambda *pair: function(*pair), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(td, tensor)["a"], function(td["a"], tensor))


def test_keywords_of_functions() -> None:
    td, tensor = TensorDict(a=torch.tensor([1.0, 2.0]), batch_size=2), torch.tensor([3.0, 1.5])
    torch.testing.assert_close(torch.add(td, tensor, alpha=2)["a"], td["a"] + 2 * tensor)
    torch.testing.assert_close(torch.add(input=td, other=1.0)["a"], td["a"] + 1)
    torch.testing.assert_close(torch.clamp(td, max=1.5)["a"], td["a"].clamp(max=1.5))
    with pytest.raises(TypeError, match="add needs a container as its first argument here, got Tensor"):
        torch.add(tensor, td, alpha=2)


@pytest.mark.parametrize("fn", [torch.tensor, torch.as_tensor, torch.asarray, torch.from_dlpack, np.from_dlpack])
def test_a_container_is_not_made_one_tensor_without_elements(fn: Callable[[Any], Any], td: Any) -> None:
    name = next(iter(td.keys()))
    with pytest.raises(
        TypeError, match=rf"a {type(td).__name__} is not one tensor: read an entry, as in td\['{name}'\]"
    ):
        fn(td)
