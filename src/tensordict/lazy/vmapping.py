"""Lazy stacks as pytrees, and under `torch.vmap`.

Torch takes a lazy stack apart into its members and these into their leaves: what is done to a leaf is done to that of
one member. `torch.vmap` asks for the size of the mapped dim from the leaves, where the stack dim does not show. So the
stacks among its arguments are given to it in another form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.vmap as functorch
from torch import Tensor
from torch.utils._pytree import SequenceKey, _broadcast_to_and_flatten, tree_flatten, tree_unflatten

from tensordict import pytree, registry
from tensordict.contract import Contract
from tensordict.lazy.core import LazyCore
from tensordict.lazy.members import Members
from tensordict.shapes import as_dim


@dataclass(frozen=True)
class LazyContext:
    """What a lazy stack is apart from its members."""

    cls: type[Any]
    dim: int
    name: str | None
    hooks: tuple[Any, Any]
    # How many levels of `vmap` the members are in; says nothing about whether two structures are the same.
    depth: int = field(default=0, compare=False)


def flatten_stack(stack: Any) -> tuple[list[Any], LazyContext]:
    """The members, and the context that makes a stack of them again."""
    store = stack._entries
    members = list(store.containers)
    hooks = (store.hook_in, store.hook_out)
    return members, LazyContext(type(stack), store.dim, store.name, hooks, pytree._depth(members))


def flatten_stack_with_keys(stack: Any) -> tuple[list[tuple[Any, Any]], LazyContext]:
    """As `flatten_stack`, with the position of every member."""
    members, context = flatten_stack(stack)
    return [(SequenceKey(position), member) for position, member in enumerate(members)], context


def unflatten_stack(values: Any, context: LazyContext) -> Any:
    """A lazy stack of `values`. Leaving a level of `vmap` adds a dim in front, entering one takes it away."""
    members = list(values)
    dim = context.dim + context.depth - pytree._depth(members)
    if members and isinstance(members[0], Contract):
        dim = min(dim, len(members[0]._batch_size))
    template = None if members else registry.lookup("TensorDict")._make({}, torch.Size(()), None, None)
    return context.cls._over(Members(members, dim, *context.hooks, template, context.name))


def map_over_stacks() -> None:
    """Make `torch.vmap` map over the dims of lazy stacks.

    It has no hook for this: the one function through which it takes its arguments apart is replaced by one that calls
    it, once, and that does nothing else for arguments without lazy stacks.
    """
    original = functorch._process_batched_inputs
    if getattr(original, "_knows_stacks", False):
        return

    def process(in_dims: Any, args: tuple[Any, ...], func: Callable[..., Any]) -> Any:
        return original(*_mappable(in_dims, args), func)

    process._knows_stacks = True  # type: ignore[attr-defined]
    functorch._process_batched_inputs = process


def _mappable(in_dims: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The arguments and their mapped dims, with lazy stacks in a form whose leaves have the mapped dim."""
    flat, spec = tree_flatten(args, is_leaf=_is_stack)
    if not any(map(_is_stack, flat)) and not any(map(_has_own_shape, flat)):
        return in_dims, args
    dims = _broadcast_to_and_flatten(in_dims, spec)
    if dims is None:
        return in_dims, args
    for i, (stack, dim) in enumerate(zip(flat, dims, strict=True)):
        if _is_stack(stack) and isinstance(dim, int):
            form, dims[i] = _form(stack._bare(), dim)
            flat[i] = stack._faced(form)
        elif _has_own_shape(stack):
            dims[i] = None
    return tree_unflatten(dims, spec), tree_unflatten(flat, spec)


def _is_stack(value: Any) -> bool:
    return isinstance(value, Contract) and not value._is_non_tensor and isinstance(value._bare(), LazyCore)


def _has_own_shape(value: Any) -> bool:
    """Whether a leaf is an `UnbatchedTensor`, which is not mapped over."""
    return type(value) is not Tensor and isinstance(value, Tensor) and isinstance(value, Contract)


def _form(stack: Any, dim: int) -> tuple[Any, int]:
    """A lazy stack as it is mapped over along `dim`, and that dim in its leaves.

    Along the stack dim it is the dense stack, which leaves of unequal shapes do not allow.
    """
    dim = as_dim(dim, len(stack._batch_size))
    store = stack._entries
    members = store.containers
    if dim == store.dim or not members or any(_holds_stacks(member) for member in members):
        return stack._dense(), dim
    # Entering the map takes one off the stack dim, see `unflatten_stack`; here it goes down only if it is behind.
    return (stack, dim) if dim < store.dim else (stack._like(members, store.dim + 1), dim - 1)


def _holds_stacks(node: Contract) -> bool:
    if isinstance(node._bare(), LazyCore):
        return True
    return any(isinstance(value, Contract) and _holds_stacks(value) for value in node._outline().values())
