"""Lazy stacks as pytrees, and under `torch.vmap`.

Torch takes a lazy stack apart into its members and these into their leaves: what is done to a leaf is done to that of
one member. `torch.vmap` counts its dims in the leaves, where the stack dim does not show. So the stacks among its
arguments and results are given to it in another form, with other dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensordict.containers.lazy.core import LazyCore
from tensordict.containers.lazy.members import Members
from tensordict.core import makers, pytree, vmapped
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import StackError
from tensordict.core.shapes import as_dim, as_new_dim


class LazyContext(NamedTuple):
    """Describes a lazy stack apart from its members."""

    cls: type[Any]
    dim: int
    name: str | None
    hooks: tuple[Any, Any]
    # The stack dim of what is made of the new members, when a level of `vmap` lies between; no part of the structure.
    after: int | None = None
    # How many levels of `vmap` the members are in; no part of the structure.
    depth: int = 0

    def __eq__(self, other: object) -> bool:
        return type(other) is LazyContext and self[:4] == other[:4]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:4])


def flatten_stack(stack: Any) -> tuple[list[Any], LazyContext]:
    """The members, and the context that makes a stack of them again."""
    store = stack._entries
    members = list(store.containers)
    hooks = (store.hook_in, store.hook_out)
    return members, LazyContext(type(stack), store.dim, store.name, hooks, stack._after, pytree._count_levels(members))


def flatten_stack_with_keys(stack: object) -> tuple[list[tuple[Any, Any]], LazyContext]:
    """As `flatten_stack`, with the position of every member."""
    members, context = flatten_stack(stack)
    return [(internals.SequenceKey(position), member) for position, member in enumerate(members)], context


def unflatten_stack(values: Any, context: LazyContext) -> Any:
    """A lazy stack of `values`; `None` where all of them are.

    Raises:
        RuntimeError: `torch.vmap` was entered, and is not known to this module; see `map_over_stacks`.
    """
    members = list(values)
    if pytree.is_nothing(members):
        return None
    # Torch also builds trees of numbers, which stand for the leaves on this side.
    dim = context.dim if context.after is None or not _have_tensors(members) else context.after
    if not _KNOWN and pytree._count_levels(members) > context.depth:
        raise RuntimeError(
            f"torch.vmap cannot map over a lazy stack in this version of torch, {torch.__version__}, which has changed "
            "how it takes its arguments apart: make the stack dense first, with to_tensordict()"
        )
    if members and isinstance(members[0], Contract):
        dim = min(dim, len(members[0]._batch_size))
    template = None if members else makers.dense({}, torch.Size(()), None, None)
    return context.cls._over(Members(members, dim, *context.hooks, template, context.name))


def _have_tensors(members: list[Any]) -> bool:
    leaves: list[Any] = []
    for member in members:
        if isinstance(member, Contract):
            member._gather(leaves)
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def map_over_stacks() -> bool:
    """Make `torch.vmap` map over the dims of lazy stacks, and tell whether this could be done.

    Also map over other containers as wholes, see `core/vmapped.py`. It has no hook for this: three of its functions are
    replaced by ones that call them and that do nothing else where there is no container. They are no part of torch's
    public API. Where they are missing or take other parameters they are left alone, and mapping over a lazy stack is
    an error; all else works.
    """
    originals = internals.vmap_functions()
    if originals is None:
        return False
    if all(getattr(original, "_knows_stacks", False) for original in originals):
        return True
    take_apart, enter, from_form = originals

    def process(in_dims: object, args: tuple[Any, ...], func: Callable[..., Any]) -> Any:
        flat, dims, spec = _flattened(args, in_dims)
        if not any(isinstance(value, Contract) for value in flat):
            return take_apart(in_dims, args, func)
        if dims is not None:
            dims = [vmapped.count_from_front(value, dim) for value, dim in zip(flat, dims, strict=True)]
            if _are_wholes(flat) and (size := vmapped.find_map_size(flat, dims)) is not None:
                return size, dims, flat, spec
            in_dims = _unflattened(dims, spec)
        return take_apart(*_transformed(in_dims, args, _entering), func)

    def create(flat_in_dims: list[Any], flat_args: list[Any], vmap_level: int, args_spec: object) -> Any:
        if not any(map(is_node, flat_args)):
            return enter(flat_in_dims, flat_args, vmap_level, args_spec)
        pairs = zip(flat_args, flat_in_dims, strict=True)
        return _unflattened([_enter(value, dim, vmap_level) for value, dim in pairs], args_spec)

    def unwrap(
        batched_outputs: object, out_dims: object, vmap_level: int, batch_size: int, func: Callable[..., Any]
    ) -> Any:
        one = isinstance(batched_outputs, (Tensor, Contract))
        flat, dims, spec = _flattened((batched_outputs,) if one else batched_outputs, out_dims)
        if not any(isinstance(value, Contract) for value in flat):
            return from_form(batched_outputs, out_dims, vmap_level, batch_size, func)
        if dims is not None:
            dims = [vmapped.count_from_front(value, dim, 1) for value, dim in zip(flat, dims, strict=True)]
            out_dims = dims[0] if one else _unflattened(dims, spec)
        if dims is None or not (_are_wholes(flat) and all(map(vmapped.has_place, flat, dims))):
            out_dims, batched_outputs = _transformed(out_dims, batched_outputs, _leaving)
            return from_form(batched_outputs, out_dims, vmap_level, batch_size, func)
        outputs = [
            _leave(value, dim, vmap_level, batch_size)
            if is_node(value)
            else from_form(value, dim, vmap_level, batch_size, func)
            for value, dim in zip(flat, dims, strict=True)
        ]
        return outputs[0] if one else _unflattened(outputs, spec)

    process._knows_stacks = create._knows_stacks = unwrap._knows_stacks = True  # type: ignore[attr-defined]
    internals.replace_vmap_functions(process, create, unwrap)
    return True


def _flattened(tree: object, dims: object) -> tuple[list[Any], list[Any] | None, Any]:
    """What is in a tree of tensors and containers, the dim of each (`None` if these do not fit), and the structure.

    That of a tuple of tensors and containers is `None`: torch would take 25 us to tell it.
    """
    if type(tree) is tuple and all(isinstance(value, (Tensor, Contract)) for value in tree):
        if dims is None or isinstance(dims, int):
            return list(tree), [dims] * len(tree), None
        if type(dims) is tuple and len(dims) == len(tree):
            return list(tree), list(dims), None
    flat, spec = internals.tree_flatten(tree, is_leaf=is_node)
    return flat, internals.broadcast_to_leaves(dims, spec), spec


def _unflattened(values: list[Any], spec: Any) -> Any:
    return tuple(values) if spec is None else internals.tree_unflatten(values, spec)


def _are_wholes(flat: list[Any]) -> bool:
    """Whether none of the containers has to be taken apart."""
    return all(is_node(value) and _is_plain(value) for value in flat if isinstance(value, Contract))


def _transformed(dims: object, tree: object, fn: Callable[[Any, int], tuple[Any, int]]) -> tuple[Any, Any]:
    """`fn` of every lazy stack in a tree and its dim; what has a shape of its own is not mapped.

    What was made of one element of the batch differs between them, whatever its class: it leaves as a plain tensor.
    """
    flat, spec = internals.tree_flatten(tree, is_leaf=_is_stack)
    if not any(map(_is_stack, flat)) and not any(map(_has_own_shape, flat)):
        return dims, tree
    each = internals.broadcast_to_leaves(dims, spec)
    if each is None:
        return dims, tree
    for i, (stack, dim) in enumerate(zip(flat, each, strict=True)):
        if _is_stack(stack) and isinstance(dim, int):
            form, each[i] = fn(stack._wrapped_container(), dim)
            flat[i] = stack._rewrap(form)
        elif _has_own_shape(stack) and internals.is_batched(stack):
            flat[i] = stack.as_subclass(Tensor)
        elif _has_own_shape(stack):
            each[i] = None
    return internals.tree_unflatten(each, spec), internals.tree_unflatten(flat, spec)


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor, or a container without lazy stacks, whose tensors of a shape of their own are the
    same for all of the batch."""
    if isinstance(value, Tensor):
        return not (_has_own_shape(value) and internals.is_batched(value))
    if not isinstance(value, Contract):
        return False
    if _is_stack(value):
        # Dynamo cannot tell in how many maps a leaf is, which it takes to put a stack together from leaves.
        return torch.compiler.is_dynamo_compiling() and all(map(_is_plain, value._members() or ()))
    for entry in value._structure().values():  # noqa: SIM110 (a generator inside all() would double the cost)
        if type(entry) is not Tensor and not _is_plain(entry):
            return False
    return True


def _is_stack(value: object) -> bool:
    return isinstance(value, Contract) and not value._is_non_tensor and isinstance(value._wrapped_container(), LazyCore)


def _has_own_shape(value: object) -> bool:
    """Whether a leaf is an `UnbatchedTensor`, which is not mapped over."""
    return type(value) is not Tensor and isinstance(value, Tensor) and isinstance(value, Contract)


def _enter(value: Any, dim: int | None, level: int) -> Any:
    """An argument of a mapped function, see `vmapped.enter_function`; the members of a lazy stack enter one by one."""
    if dim is None or not _is_stack(value):
        return vmapped.enter_function(value, dim, level)
    form, dim = _entering(value._wrapped_container(), dim)
    return value._rewrap(_each_crossing(form, lambda member: vmapped.enter_function(member, dim, level)))


def _leave(value: Any, dim: int, level: int, count: int) -> Any:
    """A result of a mapped function, see `vmapped.leave_function`; the members of a lazy stack leave one by one."""
    if not _is_stack(value):
        return vmapped.leave_function(value, dim, level, count)
    form, dim = _leaving(value._wrapped_container(), dim)
    return value._rewrap(_each_crossing(form, lambda member: vmapped.leave_function(member, dim, level, count)))


def _each_crossing(form: Any, cross: Callable[[Any], Any]) -> Any:
    """Move a container to the other side of a map; the members of a lazy stack cross one by one."""
    if not isinstance(form, LazyCore):
        return cross(form)
    return form._like([cross(member) for member in form._entries.containers], form._after)


def _entering(stack: Any, dim: int) -> tuple[Any, int]:
    """A lazy stack as it is mapped over along `dim`, and that dim in its leaves.

    Along the stack dim it is the dense stack, which leaves of unequal shapes do not allow.
    """
    batch_dims = len(stack._batch_size)
    if not -batch_dims <= dim < batch_dims:
        raise ValueError(
            f"vmap: got in_dim={dim} for a lazy stack of batch size {list(stack._batch_size)}, so in_dim goes from "
            f"{-batch_dims} to {batch_dims - 1}"
        )
    dim = as_dim(dim, batch_dims)
    store = stack._entries
    if dim == store.dim or not store.containers or any(_holds_stacks(member) for member in store.containers):
        return _dense(stack), dim
    behind = dim > store.dim
    return _crossing(stack, store.dim - (not behind)), dim - behind


def _leaving(stack: Any, dim: int) -> tuple[Any, int]:
    """A lazy stack to which a batch dim is added at `dim`, and that dim in its leaves."""
    dim = as_new_dim(dim, len(stack._batch_size))
    store = stack._entries
    if not store.containers or any(_holds_stacks(member) for member in store.containers):
        return _dense(stack), dim
    behind = dim > store.dim
    return _crossing(stack, store.dim + (not behind)), dim - behind


def _crossing(stack: Any, after: int) -> Any:
    """The stack, such that `after` is the stack dim of what is made of its leaves on the other side."""
    result = stack._like(stack._entries.containers)
    result._after = after
    return result


def _dense(stack: Any) -> Any:
    try:
        return stack._dense()
    except StackError as error:
        raise StackError(
            f"vmap maps over the stack dim of a lazy stack in its dense form, which it does not have: {error}. Or map "
            "over the entries that the function needs, as in vmap(fn)(stack.select(...))"
        ) from error


def _holds_stacks(node: Contract) -> bool:
    if isinstance(node._wrapped_container(), LazyCore):
        return True
    return any(isinstance(value, Contract) and _holds_stacks(value) for value in node._structure().values())


_KNOWN = map_over_stacks()
