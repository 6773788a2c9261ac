"""The pytree form of lazy stacks, and their support in `torch.vmap`.

As a pytree, a lazy stack consists of its members, and these of their leaves. `torch.vmap` counts dims in leaves, which
lack the stack dim. So this module converts lazy stacks, and their dims, before they enter and leave a mapped function.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensordict.containers.lazy.core import LazyCore
from tensordict.containers.lazy.members import Members
from tensordict.core import makers, pytree, vmapped
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, differ_in_keys, is_node
from tensordict.core.exceptions import StackError


class _MappedCopies(threading.local):
    """The mapped dense copies of lazy stacks, for each level of `vmap` that runs in this thread."""

    def __init__(self) -> None:
        self.by_level: dict[int, list[Any]] = {}


_COPIES = _MappedCopies()


class DenseCopy(NamedTuple):
    """What a function that is mapped over the stack dim of a lazy stack gets: a dense copy of the stack.

    Args:
        stack: the lazy stack.
        dense: the copy, before it is mapped.
        counts: how often each leaf of the copy was written before the call; see `count_writes`.
        members: the members of the stack. Empty if an outer `vmap` maps their dims, too.
    """

    stack: Any
    dense: Any
    counts: list[int | None]
    members: list[Any]


class LazyContext(NamedTuple):
    """The pytree context of a lazy stack: everything except its members."""

    cls: type[Any]
    dim: int
    name: str | None
    hooks: tuple[Any, Any]
    # The number of `vmap` levels that the members are in. Ignored in comparisons.
    depth: int = 0

    def __eq__(self, other: object) -> bool:
        return type(other) is LazyContext and self[:4] == other[:4]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:4])


def flatten_stack(stack: Any) -> tuple[list[Any], LazyContext]:
    """Return the members, and the context that `unflatten_stack` needs."""
    store = stack._entries
    members = list(store.containers)
    hooks = (store.hook_in, store.hook_out)
    return members, LazyContext(type(stack), store.dim, store.name, hooks, pytree._count_levels(members))


def flatten_stack_with_keys(stack: object) -> tuple[list[tuple[Any, Any]], LazyContext]:
    """Do the same as `flatten_stack`, with the position of every member as key."""
    members, context = flatten_stack(stack)
    return [(internals.SequenceKey(position), member) for position, member in enumerate(members)], context


def unflatten_stack(values: Any, context: LazyContext) -> Any:
    """Make a lazy stack of `values`; return `None` if all values are `None`.

    Raises:
        RuntimeError: this happens inside `torch.vmap`, and `map_over_stacks` does not support this version of torch.
    """
    members = list(values)
    if pytree.is_nothing(members):
        return None
    dim = context.dim
    if not _KNOWN and pytree._count_levels(members) > context.depth:
        raise RuntimeError(
            f"torch.vmap cannot map over a lazy stack in this version of torch, {torch.__version__}, because its "
            "internal functions have changed: make the stack dense first, with to_tensordict()"
        )
    if members and isinstance(members[0], Contract):
        dim = min(dim, len(members[0]._batch_size))
    template = None if members else makers.dense({}, torch.Size(()), None, None)
    return context.cls._over(Members(members, dim, *context.hooks, template, context.name))


def map_over_stacks() -> bool:
    """Make `torch.vmap` map over the dims of lazy stacks. Returns whether it succeeded.

    Also makes it map over other containers as wholes; see `core/vmapped.py`. `torch.vmap` has no hook for this, so
    three of its private functions are replaced. For inputs without containers, they only call the originals. If
    a function is missing or has other parameters, nothing is replaced, and mapping over a lazy stack raises.
    """
    originals = internals.vmap_functions()
    if originals is None:
        return False
    if all(getattr(original, "_knows_stacks", False) for original in originals):
        return True
    take_apart, enter, from_form = originals

    def process(in_dims: object, args: tuple[Any, ...], func: Callable[..., Any]) -> Any:
        flat, dims, spec = _flatten_with_dims(args, in_dims)
        if not any(isinstance(value, Contract) for value in flat):
            return take_apart(in_dims, args, func)
        if dims is not None:
            dims = [vmapped.count_from_front(value, dim) for value, dim in zip(flat, dims, strict=True)]
            if not _are_wholes(flat):
                flat, dims = _make_plain(flat, dims)
            elif (size := vmapped.find_map_size(flat, dims)) is not None:
                return size, dims, [_make_dense_along(*pair) for pair in zip(flat, dims, strict=True)], spec
            _check_dims(flat, dims)
            in_dims, args = _unflatten(dims, spec), _unflatten(flat, spec)
        return take_apart(in_dims, args, func)

    def create(flat_in_dims: list[Any], flat_args: list[Any], vmap_level: int, args_spec: object) -> Any:
        if not any(map(is_node, flat_args)):
            return enter(flat_in_dims, flat_args, vmap_level, args_spec)
        _COPIES.by_level.pop(vmap_level, None)  # left by a function that raised
        pairs = zip(flat_args, flat_in_dims, strict=True)
        return _unflatten([_enter(value, dim, vmap_level) for value, dim in pairs], args_spec)

    def unwrap(
        batched_outputs: object, out_dims: object, vmap_level: int, batch_size: int, func: Callable[..., Any]
    ) -> Any:
        if copies := _COPIES.by_level.pop(vmap_level, None):
            _write_back(copies)
        one = isinstance(batched_outputs, (Tensor, Contract))
        flat, dims, spec = _flatten_with_dims((batched_outputs,) if one else batched_outputs, out_dims)
        if not any(isinstance(value, Contract) for value in flat):
            return from_form(batched_outputs, out_dims, vmap_level, batch_size, func)
        if dims is None:
            return from_form(batched_outputs, out_dims, vmap_level, batch_size, func)
        dims = [vmapped.count_from_front(value, dim, 1) for value, dim in zip(flat, dims, strict=True)]
        if not _are_wholes(flat) or not all(map(vmapped.has_place, flat, dims)):
            flat, dims = _make_plain(flat, dims)
            batched_outputs, out_dims = (flat[0], dims[0]) if one else (_unflatten(flat, spec), _unflatten(dims, spec))
            return from_form(batched_outputs, out_dims, vmap_level, batch_size, func)
        outputs = [
            _leave(value, dim, vmap_level, batch_size)
            if is_node(value)
            else from_form(value, dim, vmap_level, batch_size, func)
            for value, dim in zip(flat, dims, strict=True)
        ]
        return outputs[0] if one else _unflatten(outputs, spec)

    process._knows_stacks = create._knows_stacks = unwrap._knows_stacks = True  # type: ignore[attr-defined]
    internals.replace_vmap_functions(process, create, unwrap)
    return True


def _flatten_with_dims(tree: object, dims: object) -> tuple[list[Any], list[Any] | None, Any]:
    """Flatten a tree of tensors and containers. Returns the values, the dim of each, and the structure.

    The dims are `None` if they do not fit the tree. The structure is `None` for a plain tuple, because torch would
    take 25 us to compute it.
    """
    if type(tree) is tuple and all(isinstance(value, (Tensor, Contract)) for value in tree):
        if dims is None or isinstance(dims, int):
            return list(tree), [dims] * len(tree), None
        if type(dims) is tuple and len(dims) == len(tree):
            return list(tree), list(dims), None
    flat, spec = internals.tree_flatten(tree, is_leaf=is_node)
    return flat, internals.broadcast_to_leaves(dims, spec), spec


def _unflatten(values: list[Any], spec: Any) -> Any:
    return tuple(values) if spec is None else internals.tree_unflatten(values, spec)


def _are_wholes(flat: list[Any]) -> bool:
    """Return whether all containers can be mapped as wholes, without flattening them."""
    return all(is_node(value) and _is_plain(value) for value in flat if isinstance(value, Contract))


def _make_plain(flat: list[Any], dims: list[Any]) -> tuple[list[Any], list[Any]]:
    """Prepare values that torch takes apart by itself, because some of them cannot be mapped as wholes.

    Lazy stacks become dense. A batched `UnbatchedTensor` has another value for each element of the batch, so it becomes
    a plain tensor. Any other one is not mapped.
    """
    values, places = list(flat), list(dims)
    for i, value in enumerate(flat):
        if _is_stack(value):
            values[i] = value._rewrap(_dense(value._wrapped_container()))
        elif _has_own_shape(value) and internals.is_batched(value):
            values[i] = value.as_subclass(Tensor)
        elif _has_own_shape(value):
            places[i] = None
    return values, places


def _check_dims(flat: list[Any], dims: list[Any]) -> None:
    for value, dim in zip(flat, dims, strict=True):
        batch_dims = len(value._batch_size) if _is_stack(value) else 0
        if batch_dims and isinstance(dim, int) and not 0 <= dim < batch_dims:
            raise ValueError(
                f"vmap: got in_dim={dim} for a lazy stack of batch size {list(value._batch_size)}, so in_dim goes from "
                f"{-batch_dims} to {batch_dims - 1}"
            )


def _is_plain(value: object) -> bool:
    """Return whether a value is a tensor or a container, without batched `UnbatchedTensor`s."""
    if isinstance(value, Tensor):
        return not (_has_own_shape(value) and internals.is_batched(value))
    if not isinstance(value, Contract):
        return False
    if _is_stack(value):
        return all(map(_is_plain, value._members() or ()))
    for entry in value._structure().values():  # noqa: SIM110 (a generator inside all() would double the cost)
        if type(entry) is not Tensor and not _is_plain(entry):
            return False
    return True


def _is_stack(value: object) -> bool:
    return isinstance(value, Contract) and not value._is_non_tensor and isinstance(value._wrapped_container(), LazyCore)


def _has_own_shape(value: object) -> bool:
    """Return whether a leaf is an `UnbatchedTensor`, which is not mapped over."""
    return type(value) is not Tensor and isinstance(value, Tensor) and isinstance(value, Contract)


def _make_dense_along(value: Any, dim: int | None) -> Any:
    """Make a lazy stack dense, if it is mapped over its stack dim. Returns any other value unchanged."""
    if dim is None or not _is_stack(value):
        return value
    stack = value._wrapped_container()
    store = stack._entries
    if dim != store.dim and store.containers:
        return value
    dense = _dense(stack)
    dense._was_stacked = True
    counts = [internals.count_writes(leaf) for _, leaf in dense._walk()]
    dense._dense_copy = DenseCopy(stack, dense, counts, list(store.containers))
    if stack._locked:
        dense._lock_tree()
    return value._rewrap(dense)


def _enter(value: Any, dim: int | None, level: int) -> Any:
    """Convert an argument of a mapped function; see `vmapped.enter_function`. Members of a stack enter one by one."""

    def enter_node(node: Any) -> Any:
        return _enter(node, dim, level)

    if dim is None or not is_node(value):
        return vmapped.enter_function(value, dim, level, enter_node)
    container = value._wrapped_container()
    if isinstance(container, LazyCore):
        value = _make_dense_along(value, dim)
        container = value._wrapped_container()
        if isinstance(container, LazyCore):
            at = container.stack_dim
            inner = dim - (dim > at)
            members = [_enter(member, inner, level) for member in container._entries.containers]
            return value._rewrap(container._like(members, at - (dim < at)))
    result = vmapped.enter_function(value, dim, level, enter_node)
    if container._was_stacked:
        _mark_stacked(result)
    if (copied := container._dense_copy) is not None:
        mapped = result._wrapped_container()
        # An inner `vmap` maps a container that is mapped already, and whose rows are not the members.
        mapped._dense_copy = copied if copied.dense is container else copied._replace(members=[])
        _COPIES.by_level.setdefault(level, []).append(mapped if torch.compiler.is_compiling() else weakref.ref(mapped))
    return result


def _write_back(copies: list[Any]) -> None:
    """Copy the in-place writes of a mapped function from dense copies to the members of their lazy stacks.

    Where torch does not count writes, copy all entries, except those that cannot be written in all members.
    """
    for entry in copies:
        mapped = entry() if isinstance(entry, weakref.ref) else entry
        if mapped is None:
            continue
        stack, dense, counts, _ = mapped._dense_copy
        for (path, leaf), count in zip(dense._walk(), counts, strict=True):
            if count is None:
                written = all(_is_writable(member.get(path)) for member in stack._entries.containers)
            else:
                written = internals.count_writes(leaf) != count
            if written:
                stack.set_(path, leaf)


def _is_writable(leaf: Tensor) -> bool:
    """Return whether autograd allows to write into a leaf, and each of its elements has a place of its own."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True))
    return not expanded and not (leaf.requires_grad and torch.is_grad_enabled())


def _mark_stacked(value: Any) -> None:
    """Mark a mapped container, and those inside, as a stack without its stack dim. `_leave` stacks them again."""
    container = value._wrapped_container()
    container._was_stacked = True
    for entry in container._structure().values():
        if is_node(entry) and not entry._is_non_tensor:
            _mark_stacked(entry)


def _leave(value: Any, dim: int, level: int, count: int) -> Any:
    """Convert a result of a mapped function; see `vmapped.leave_function`. Members of a stack leave one by one."""
    container = value._wrapped_container()
    if isinstance(container, LazyCore):
        if members := container._entries.containers:
            at = container.stack_dim
            inner = dim - (dim > at)
            left = [_leave(member, inner, level, count) for member in members]
            return value._rewrap(container._like(left, at + (dim <= at)))
        value = value._rewrap(_dense(container))
    result = vmapped.leave_function(value, dim, level, count, lambda node: _leave(node, dim, level, count))
    return _stack_again(value, result, dim)


def _stack_again(mapped: Any, result: Any, dim: int) -> Any:
    """Make lazy stacks along `dim` of the containers in `result` that `mapped` marks as stacks."""
    if not mapped._wrapped_container()._was_stacked:
        for name, entry in mapped._structure().items():
            if type(entry) is not Tensor and is_node(entry) and not entry._is_non_tensor and entry._members() is None:
                node = result._node(name)
                if (stacked := _stack_again(entry, node, dim)) is not node:
                    result._entries[name] = stacked
        return result
    members = list(result._wrapped_container().unbind(dim))
    copied = mapped._wrapped_container()._dense_copy
    if copied is not None and copied.members:
        pairs = zip(members, copied.members, strict=True)
        members = [_take_other_entries(member, old, copied.dense) for member, old in pairs]
    stack = makers.lazy_stack._over(Members(members, dim))
    if result._locked:
        stack._lock_tree()
    return result._rewrap(stack)


def _take_other_entries(made: Any, old: Any, dense: Any) -> Any:
    """Add the entries of `old` that the mapped function has not seen, because other members lack them.

    Returns `made`, or a lazy stack of its rows if the rows of `old` have different keys.
    """
    if made._members() is None and _is_uneven(old):
        stack = made.to_lazystack(old._wrapped_container().stack_dim)
        pairs = zip(stack._members(), old._members(), strict=True)
        rows = [_take_other_entries(row, old_row, dense) for row, old_row in pairs]
        return stack._rewrap(stack._wrapped_container()._like(rows))
    for name, value in old._structure().items():
        if not dense._has((name,)):
            made._write((name,), value.copy() if is_node(value) else value)
        elif is_node(value) and not value._is_non_tensor and is_node(inner := made._peek((name,))):
            whole = _take_other_entries(inner, value, dense._node(name))
            if whole is not inner:
                made._entries[name] = whole
    return made


def _is_uneven(value: Any) -> bool:
    """Return whether the members of a lazy stack, or members of these, have different keys."""
    members = value._members() or ()
    return differ_in_keys(members) or any(map(_is_uneven, members))


def _dense(stack: Any) -> Any:
    try:
        return stack._dense()
    except StackError as error:
        raise StackError(
            f"vmap needs the dense form of a lazy stack to map over its stack dim, but the members differ: {error}. Or "
            "map over the entries that the function needs, as in vmap(fn)(stack.select(...))"
        ) from error


_KNOWN = map_over_stacks()
