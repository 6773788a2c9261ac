"""Torch's own functions on containers, such as `torch.stack`: the table that `__torch_function__` looks up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.ops.dims.stacking import cat_containers, stack_containers
from tensordict.ops.entries.factories import like
from tensordict.ops.math.autograd import compute_gradients


def call(func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Call a function of torch with containers among the arguments.

    Raises:
        TypeError: the function is not defined for containers.
    """
    implementation = _TABLE.get(func)
    if implementation is not None:
        return implementation(*args, **(kwargs or {}))
    if not all(issubclass(kind, (Contract, Tensor)) for kind in types):
        return NotImplemented
    name = getattr(func, "__name__", repr(func))
    if name == "wrapped":
        # For operators written in Python, Dynamo of torch 2.15 passes the decorator's inner function.
        name = func.__wrapped__.__name__  # type: ignore[attr-defined]
    if name in _REGIONS:
        with internals.as_plain():
            return func(*args, **(kwargs or {}))
    if torch.compiler.is_compiling() and name in _TRACED_OPERATORS and isinstance(args[0], Tensor):
        return _run_operator(_TRACED_OPERATORS[name], *args)
    raise TypeError(
        f"torch's function {name!r} is not defined for containers; to call it on every tensor, use "
        f"td.apply({name}); to call it on one, read that entry first"
    )


def _run_operator(name: str, left: object, container: Any) -> Any:
    """Run an operator with a tensor or a number on the left and a container on the right, by a method of the container.

    Dynamo calls torch's function for `tensor + td`. Outside compiled code, Python calls the method directly.
    """
    if name.startswith("__"):
        internals.break_at_in_place_operator()
    return getattr(container, name)(left)


def _make_method_call(name: str, **renamed: str) -> Callable[..., Any]:
    """Return a function that calls the method `name` of its first argument.

    `renamed` maps torch's keyword arguments to keyword arguments of the method.
    """

    def implementation(*args: object, **kwargs: object) -> Any:
        container, *rest = args or (kwargs.pop("input"),)
        if not isinstance(container, Contract):
            if name in _MIRRORED and not kwargs:
                return _run_operator(_MIRRORED[name], container, *rest)
            raise TypeError(f"{name} needs a container as its first argument here, got {type(container).__name__}")
        if kwargs:
            kwargs = {renamed.get(key, key): value for key, value in kwargs.items()}
        return getattr(container, name)(*rest, **kwargs)

    return implementation


def _make_comparison(name: str, mirrored: str) -> Callable[..., Any]:
    """Return a function that calls the comparison `name` of a container on the left, or `mirrored` on the right.

    Outside compiled code, Python calls the container's method directly. Dynamo calls this function, also for
    `td < tensor`.
    """

    def implementation(input: object, other: object) -> Any:
        if isinstance(input, Contract):
            return getattr(input, name)(other)
        return getattr(other, mirrored)(input)

    return implementation


def _make_join(join: Callable[[Any, int, Any], Any]) -> Callable[..., Any]:
    def implementation(tensors: object, dim: int = 0, *, out: object = None) -> Any:
        return join(tensors, dim, out)

    return implementation


def _where(condition: Any, input: Any, other: Any, *, out: Any = None) -> Any:
    if isinstance(input, Contract):
        return input.where(condition, other, out=out)  # type: ignore[attr-defined]
    if isinstance(condition, Tensor):
        return other.where(~condition, input, out=out)
    raise TypeError(f"torch.where on containers needs a tensor as its condition, got {type(condition).__name__}")


def _gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False, out: Any = None) -> Any:
    if sparse_grad:
        raise TypeError("torch.gather on containers does not support sparse_grad=True; leave it out")
    return input.gather(dim, index, out=out)


def _clone(input: Any, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    if memory_format is torch.preserve_format:
        return input.clone()
    return input._map(partial(torch.clone, memory_format=memory_format))


def _full_like(input: object, fill_value: object, **kwargs: object) -> Any:
    return like(input, torch.full_like, fill_value=fill_value, **kwargs)


def _make_like(make: Callable[..., Tensor]) -> Callable[..., Any]:
    def implementation(input: Any, **kwargs: Any) -> Any:
        return like(input, make, **kwargs)

    return implementation


def _make_loss(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function that computes a loss of two containers, leaf by leaf.

    With a reduction, each leaf of the result is one number, and the result lacks batch dims.
    """

    def implementation(
        input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", **kwargs: Any
    ) -> Any:
        for name, value in (("input", input), ("target", target)):
            if not isinstance(value, Contract):
                raise TypeError(f"{loss.__name__} takes two containers, got {type(value).__name__} as {name}")
        if size_average is not None or reduce is not None:
            reduction = internals.reduction_of(size_average, reduce)
        size = None if reduction == "none" else torch.Size(())
        return input.apply(partial(loss, reduction=reduction, **kwargs), target, batch_size=size)

    return implementation


# Functions of torch that call a user's function in a subgraph: checkpoints, and regions that are compiled once.
_REGIONS = ("tag_activation_checkpoint", "invoke_subgraph")

# For `torch.<key>(a, container)`, where `a` is a tensor or a number: the method to call, as in `container.__radd__(a)`.
_MIRRORED = {
    "add": "__radd__",
    "sub": "__rsub__",
    "mul": "__rmul__",
    "div": "__rtruediv__",
    "pow": "__rpow__",
    "bitwise_and": "__rand__",
    "logical_and": "logical_and",
    "maximum": "maximum",
    "minimum": "minimum",
}

# Dynamo calls these functions of torch for an operator with a tensor on the left and a container on the right. Each
# maps to the container's method. They are listed by name, since Dynamo cannot look up functions written in Python.
_TRACED_OPERATORS = {
    **_MIRRORED,
    "__rsub__": "__sub__",
    "__rdiv__": "__truediv__",
    "__floordiv__": "__rfloordiv__",
    "__rfloordiv__": "__floordiv__",
    "remainder": "__rmod__",
    "__rmod__": "__mod__",
    "__rpow__": "__pow__",
    "__and__": "__rand__",
    **dict.fromkeys(("__or__", "bitwise_or"), "__ror__"),
    **dict.fromkeys(("__xor__", "bitwise_xor"), "__rxor__"),
}

# Functions that call the method of the same name with the same arguments.
_SAME_AS_METHOD = (
    "abs acos add addcdiv addcmul asin atan bitwise_and ceil clamp clamp_max clamp_min cos cosh detach div erf "
    "erfc exp expm1 floor frac isfinite isnan isneginf isposinf isreal lerp lgamma log log10 log1p log2 "
    "logical_and minimum mul neg pow reciprocal round rsub sigmoid sign sin sinh sqrt sub tan tanh trunc "
    "all amax amin any atleast_1d atleast_2d atleast_3d broadcast_to chunk cummax cummin flatten flip fliplr "
    "flipud logsumexp masked_fill masked_select maximum max mean min moveaxis movedim nanmean nansum narrow "
    "numel permute prod quantile repeat_interleave reshape roll rot90 softmax squeeze std sum swapaxes swapdims "
    "tile transpose unbind unsqueeze var "
    "abs_ acos_ asin_ atan_ ceil_ clamp_max_ clamp_min_ cos_ cosh_ detach_ erf_ erfc_ exp_ expm1_ floor_ frac_ "
    "log10_ log1p_ log2_ log_ neg_ reciprocal_ round_ sigmoid_ sin_ sinh_ sqrt_ tan_ tanh_ trunc_ zero_"
)

_TABLE: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): _make_method_call(name) for name in _SAME_AS_METHOD.split()},
    torch.unflatten: _make_method_call("unflatten", sizes="unflattened_size"),
    torch.split: _make_method_call("split", split_size_or_sections="split_size"),
    torch.functional.split: _make_method_call("split", split_size_or_sections="split_size"),
    torch.tensor_split: _make_method_call(
        "tensor_split", sections="indices_or_sections", indices="indices_or_sections"
    ),
    torch.stack: _make_join(stack_containers),
    torch.cat: _make_join(cat_containers),
    torch.concat: _make_join(cat_containers),
    torch.concatenate: _make_join(cat_containers),
    torch.allclose: _make_method_call("allclose"),
    torch.where: _where,
    torch.gather: _gather,
    torch.clone: _clone,
    Tensor.lt: _make_comparison("__lt__", "__gt__"),
    Tensor.gt: _make_comparison("__gt__", "__lt__"),
    Tensor.le: _make_comparison("__le__", "__ge__"),
    Tensor.ge: _make_comparison("__ge__", "__le__"),
    Tensor.eq: _make_comparison("__eq__", "__eq__"),
    Tensor.__eq__: _make_comparison("__eq__", "__eq__"),
    Tensor.ne: _make_comparison("__ne__", "__ne__"),
    **{loss: _make_loss(loss) for loss in (F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss)},
    torch.autograd.grad: compute_gradients,
    torch.full_like: _full_like,
    **{
        make: _make_like(make)
        for make in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.rand_like, torch.randn_like)
    },
}
