"""Torch's own functions on containers: the table behind `__torch_function__`."""

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
from tensordict.ops.math.autograd import gradients


def call(func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """What `func(*args, **kwargs)` is when containers are among the arguments.

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
        # Dynamo of torch 2.15 gives the name of the decorator's inner function for operators written in Python.
        name = func.__wrapped__.__name__  # type: ignore[attr-defined]
    if name in _REGIONS:
        with internals.as_plain():
            return func(*args, **(kwargs or {}))
    if torch.compiler.is_compiling() and name in _TRACED_OPERATORS and isinstance(args[0], Tensor):
        return _traced_operator(_TRACED_OPERATORS[name], *args)
    raise TypeError(
        f"torch's function {name!r} is not defined for containers; to call it on every tensor, use "
        f"td.apply({name}); to call it on one, read that entry first"
    )


def _traced_operator(name: str, tensor: Tensor, container: Any) -> Any:
    """An operator between a container and a tensor in code that Dynamo traces, which calls torch's function for it.

    Outside compiled code Python finds the container's own method by itself.
    """
    internals.break_at_in_place_operator()
    return getattr(container, name)(tensor)


def _method(name: str, **renamed: str) -> Callable[..., Any]:
    """The method `name` of the first argument; `renamed` maps torch's keywords to those of the method."""

    def implementation(*args: object, **kwargs: object) -> Any:
        container, *rest = args or (kwargs.pop("input"),)
        if not isinstance(container, Contract):
            raise TypeError(f"{name} needs a container as its first argument here, got {type(container).__name__}")
        if kwargs:
            kwargs = {renamed.get(key, key): value for key, value in kwargs.items()}
        return getattr(container, name)(*rest, **kwargs)

    return implementation


def _compared(name: str, mirrored: str) -> Callable[..., Any]:
    """The comparison `name` of the first argument, or its mirror image of the second.

    Outside compiled code Python finds the container's own method by itself. Dynamo calls this, for `td < tensor` too.
    """

    def implementation(input: object, other: object) -> Any:
        if isinstance(input, Contract):
            return getattr(input, name)(other)
        return getattr(other, mirrored)(input)

    return implementation


def _joining(join: Callable[[Any, int, Any], Any]) -> Callable[..., Any]:
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
        raise TypeError("torch.gather on containers has no sparse_grad=True")
    return input.gather(dim, index, out=out)


def _clone(input: Any, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    if memory_format is torch.preserve_format:
        return input.clone()
    return input._map(partial(torch.clone, memory_format=memory_format))


def _full_like(input: object, fill_value: object, **kwargs: object) -> Any:
    return like(input, torch.full_like, fill_value=fill_value, **kwargs)


def _like(make: Callable[..., Tensor]) -> Callable[..., Any]:
    def implementation(input: Any, **kwargs: Any) -> Any:
        return like(input, make, **kwargs)

    return implementation


def _loss(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """A loss of two containers, leaf by leaf; reduced, each leaf is one number, and there are no batch dims."""

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


# What calls a function of the user's as a part of a graph of its own: checkpoints, and regions that are compiled once.
_REGIONS = ("tag_activation_checkpoint", "invoke_subgraph")

# The functions of torch that Dynamo calls for an operator between a tensor and a container, with the tensor first, by
# name, as it does not look up functions written in Python; and the container's method.
_TRACED_OPERATORS = {
    "add": "__radd__",
    "sub": "__rsub__",
    "__rsub__": "__sub__",
    "mul": "__rmul__",
    "div": "__rtruediv__",
    "__rdiv__": "__truediv__",
    "__floordiv__": "__rfloordiv__",
    "__rfloordiv__": "__floordiv__",
    "remainder": "__rmod__",
    "__rmod__": "__mod__",
    "pow": "__rpow__",
    "__rpow__": "__pow__",
    **dict.fromkeys(("__and__", "bitwise_and"), "__rand__"),
    **dict.fromkeys(("__or__", "bitwise_or"), "__ror__"),
    **dict.fromkeys(("__xor__", "bitwise_xor"), "__rxor__"),
}

# The functions that are methods of the same name and the same arguments.
_SAME_AS_METHOD = (
    "all amax amin any atleast_1d atleast_2d atleast_3d broadcast_to chunk cummax cummin flatten flip fliplr "
    "flipud logsumexp masked_fill masked_select maximum max mean min moveaxis movedim nanmean nansum narrow "
    "numel permute prod quantile repeat_interleave reshape roll rot90 softmax squeeze std sum swapaxes swapdims "
    "tile transpose unbind unsqueeze var"
)

_TABLE: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): _method(name) for name in _SAME_AS_METHOD.split()},
    torch.unflatten: _method("unflatten", sizes="unflattened_size"),
    torch.split: _method("split", split_size_or_sections="split_size"),
    torch.functional.split: _method("split", split_size_or_sections="split_size"),
    torch.tensor_split: _method("tensor_split", sections="indices_or_sections", indices="indices_or_sections"),
    torch.stack: _joining(stack_containers),
    torch.cat: _joining(cat_containers),
    torch.concat: _joining(cat_containers),
    torch.concatenate: _joining(cat_containers),
    torch.where: _where,
    torch.gather: _gather,
    torch.clone: _clone,
    Tensor.lt: _compared("__lt__", "__gt__"),
    Tensor.gt: _compared("__gt__", "__lt__"),
    Tensor.le: _compared("__le__", "__ge__"),
    Tensor.ge: _compared("__ge__", "__le__"),
    Tensor.eq: _compared("__eq__", "__eq__"),
    Tensor.__eq__: _compared("__eq__", "__eq__"),
    Tensor.ne: _compared("__ne__", "__ne__"),
    **{loss: _loss(loss) for loss in (F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss)},
    torch.autograd.grad: gradients,
    torch.full_like: _full_like,
    **{
        make: _like(make)
        for make in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.rand_like, torch.randn_like)
    },
}
