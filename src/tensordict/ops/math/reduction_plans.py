"""The implementation of reductions, used by `reducing.py`: plans, and the walk that applies them level by level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor

from tensordict.core import foreach, makers, ragged
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, EntryStore, LeafFn, Names, is_flat, named_error
from tensordict.core.exceptions import KeyMismatchError, ShapeError, StackError
from tensordict.core.keys import Path, joined, path_of
from tensordict.ops.dims.naming import Naming
from tensordict.ops.entries.reading import NO_DEFAULT
from tensordict.ops.storing.leaves import Leaves, _walk_entries

if TYPE_CHECKING:
    from typing_extensions import Self

# Called as op(leaf), op(leaf, dims) or op(leaf, dims, True). `dims` is an int or a tuple of several ints.
Op = Callable[..., Any]
# Takes the leaves of one container and its number of batch dims. Returns the result of each leaf.
Apply = Callable[[list[Any], int], Iterable[Any]]
# Takes the batch size and the names of one container before the reduction. Returns the ones after it.
After = Callable[[torch.Size, "Names | None"], "tuple[torch.Size, Names | None]"]
KeyTransform = Callable[[Any], Any]
# Batch dims by number or by name, `"feature"`, or `None` for all elements of each leaf.
Dims = int | str | Sequence[int | str] | None
TreeT = TypeVar("TreeT", bound="ReductionBase")


class Casts(TypedDict, total=False):
    """Options of reductions that cast first."""

    dtype: torch.dtype | None


class Sums(Casts, total=False):
    """Options of sums and means."""

    key_transform: KeyTransform | None


class Spreads(TypedDict, total=False):
    """Options of the standard deviation and the variance."""

    correction: int
    key_transform: KeyTransform | None


class Quantiles(TypedDict, total=False):
    """Options of quantiles."""

    interpolation: str
    key_transform: KeyTransform | None


TORCH_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)

# Up to this many elements in total, copying the leaves into one tensor costs less than a call for each leaf. Beyond it,
# torch uses more threads, which could change the order of a sum.
_SMALL = 32768
# Fewer leaves than this are never stacked.
_MIN_STACKED = 4


class Reduction(NamedTuple):
    """An operation that reduces tensors.

    op: the operation on one tensor.
    combine: reduces the results of several tensors to the result of all, if that is possible.
    many: the operation over all elements of each of several tensors, if torch has one call for it.
    stacked: stack small leaves of equal shape and call `op` once. Saves time if `op` takes torch more than 2.5 us.
    added: the size of the leading dim that `op` adds, if any.
    """

    op: Op
    combine: Op | None = None
    many: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
    stacked: bool = False
    added: int | None = None


class ReductionPlan(NamedTuple):
    """A reduction of all containers of a tree.

    apply: reduces the leaves of one container.
    after: returns the new batch size and names of one container.
    dims: the batch dims to reduce.
    along: makes the same plan for other batch dims; `None` if the plan reduces all elements of each leaf.
    shift: the number of leading dims that the reduction adds.
    drops_dims: True if the reduction removes `dims`.
    """

    apply: Apply
    after: After
    dims: tuple[int, ...] = ()
    along: Callable[[tuple[int, ...]], ReductionPlan] | None = None
    shift: int = 0
    drops_dims: bool = False

    def for_members(self, stack_dim: int) -> ReductionPlan:
        """Return the plan for the members of a lazy stack, whose stack dim is not in `dims`."""
        return self if self.along is None else self.along(tuple([dim - (dim > stack_dim) for dim in self.dims]))

    def stack_dim(self, before: int) -> int:
        """Return the stack dim of a lazy stack after the reduction."""
        return before + self.shift - (sum([dim < before for dim in self.dims]) if self.drops_dims else 0)


class ReductionBase(Leaves, Naming):
    """The implementation of `Reducing`, which documents the arguments."""

    def _reduce(
        self, how: Reduction, dim: Dims, keepdim: bool, reduce: bool | None, key_transform: KeyTransform | None = None
    ) -> Self | Tensor:
        """Run a reduction with the arguments of a public method."""
        kept = keepdim is not NO_DEFAULT and bool(keepdim)
        if not reduce:
            result = self._run_plan(self._plan(how, dim, kept))
            return result if key_transform is None else rename_keys(result, key_transform)
        if _is_everything(dim):
            return self._reduce_to_one(how.op, kept, how.combine)
        if is_feature(dim):
            refuse_keepdim(kept, "dim='feature' removes the feature dims")
            return self._reduce_all_features(how)
        dims = self._dims(dim)
        return self._call_on_all(how.op, self._concatenate_leaves(dims[0]), _unpack_single(dims), kept)  # type: ignore[no-any-return]

    def _plan(self, how: Reduction, dim: Dims, keepdim: bool) -> ReductionPlan:
        """Make the plan for the dims that the argument `dim` describes."""
        if _is_everything(dim):
            return plan_everything(how, keepdim)
        if is_feature(dim):
            refuse_keepdim(keepdim, "dim='feature' removes the feature dims")
            return plan_features(how)
        return plan_along(how, keepdim, self._dims(dim))

    def _run_plan(self, plan: ReductionPlan) -> Self:
        """Run a plan on every level of the tree. Errors of torch are prefixed with the key of the leaf."""
        try:
            return self._apply_plan(plan)
        except StackError:
            raise
        except TORCH_ERRORS as error:
            raise _name_entry(self, plan, error, ()) from error

    def _apply_plan(self, plan: ReductionPlan) -> Self:
        own, stored = self._batch_size, self._entries
        if type(stored) is not dict and isinstance(stored, EntryStore) and (block := stored.together(Tensor.clone)):
            with block:
                return self._apply_plan(plan)
        try:
            # Copy the entries: a lazy stack makes them anew at each read.
            entries = dict(stored)
        except StackError:
            return self._apply_plan_to_members(plan)
        apply = plan.apply
        if is_flat(entries):
            entries = dict(zip(entries, apply(list(entries.values()), len(own)) if entries else ()))
        else:
            leaves = [value for value in entries.values() if not isinstance(value, Contract)]
            results = iter(apply(leaves, len(own)) if leaves else ())
            for name, value in entries.items():
                if isinstance(value, ReductionBase):
                    entries[name] = value._apply_plan(plan)
                elif not isinstance(value, Contract):
                    entries[name] = next(results)
        size, names = plan.after(own, self._names)
        return self._build(entries, size, self._device, names)

    def _apply_plan_to_members(self, plan: ReductionPlan) -> Self:
        """Reduce a lazy stack with an entry that cannot be stacked: each member by itself, or all elements together.

        Raises:
            StackError: the plan reduces the stack dim, or the entry is not a tensor in every member.
        """
        members = [member for member, _ in self._pair_members(self) or ()]
        at: int = self.stack_dim
        if at in plan.dims or (
            plan.along is None and any(_has_both_kinds(members, name) for name in self._structure())
        ):
            dict(self._entries)  # raises the StackError that names the entry
        if plan.along is None:
            return self._reduce_uneven(plan)
        inner, name = plan.for_members(at), self._names[at] if self._names else None
        parts = [member._apply_plan(inner) for member in members]
        stack: Any = makers.lazy_stack(*parts, stack_dim=plan.stack_dim(at), stack_dim_name=name)
        return stack  # type: ignore[no-any-return]

    def _reduce_uneven(self, plan: ReductionPlan) -> Self:
        """Reduce all elements of each entry of a lazy stack whose members have different shapes."""
        batch_dims = len(self._batch_size)
        entries: dict[str, Any] = {}
        for name, value in self._structure().items():
            if isinstance(value, ReductionBase):
                entries[name] = value._apply_plan(plan)
                continue
            leaves = self._leaves_of(name)
            ndim = 1 + max([leaf.dim() for leaf in leaves])
            (entries[name],) = plan.apply([flatten_leaves(leaves).view([1] * (ndim - 1) + [-1])], batch_dims)
        size, names = plan.after(self._batch_size, self._names)
        return self._build(entries, size, self._device, names)

    def _run_pair_plan(self, plan: ReductionPlan) -> tuple[Self, Self]:
        """Run a plan that returns a pair for each leaf. Returns a container of first items and one of second items."""
        seconds: list[Any] = []

        def collect_seconds(apply: Apply) -> Apply:
            def take_firsts(leaves: list[Tensor], batch_dims: int) -> list[Tensor]:
                pairs = list(apply(leaves, batch_dims))
                seconds.extend([pair[1] for pair in pairs])
                return [pair[0] for pair in pairs]

            return take_firsts

        first = self._run_plan(_replace_apply(plan, collect_seconds))
        remaining = iter(seconds)
        return first, self._apply_plan(
            _replace_apply(plan, lambda _: lambda leaves, batch_dims: [next(remaining) for _ in leaves])
        )

    # --- one tensor of all leaves -----------------------------------------------------------------------------------

    def _reduce_to_one(self, op: Op, keepdim: bool, combine: Op | None) -> Tensor:
        """Reduce the elements of all leaves to one."""
        refuse_keepdim(keepdim, "everything is reduced to one element")
        leaves = self._leaves()
        if not leaves:
            raise _empty_error()
        try:
            if combine is not None and sum([leaf.numel() for leaf in leaves]) > _SMALL:
                return combine(torch.stack([op(leaf) for leaf in _drop_gaps(leaves)]))  # type: ignore[no-any-return]
            return op(flatten_leaves(leaves))  # type: ignore[no-any-return]
        except TORCH_ERRORS as error:
            raise _name_entry(self, _plan_per_leaf(op), error, ()) from error

    def _reduce_all_features(self, how: Reduction) -> Tensor:
        """Reduce the feature elements of all leaves; of each member by itself if a lazy stack cannot stack them."""
        try:
            row = self._concatenate_features()
        except StackError:
            if (pairs := self._pair_members(self)) is None:
                raise
            at: int = self.stack_dim
            return torch.stack([one._reduce_all_features(how) for one, _ in pairs], at + (how.added is not None))
        result: Tensor = self._call_on_all(how.op, row, -1)
        return result

    def _call_on_all(self, op: Op, joined: Tensor, *args: object) -> Any:
        """Call `op` on one tensor of all leaves. Errors of torch are prefixed with the key of the leaf."""
        try:
            return op(joined, *args)
        except TORCH_ERRORS as error:
            raise _name_entry(self, _plan_per_leaf(op), error, ()) from error

    def _concatenate_leaves(self, dim: int) -> Tensor:
        """Concatenate all leaves along a batch dim. Raises if their shapes differ."""
        pairs = list(_walk_entries(self))
        if not pairs:
            raise _empty_error()
        try:
            return torch.cat([leaf for _, leaf in pairs], dim)
        except RuntimeError as error:
            (first, leaf), *others = pairs
            for path, other in others:
                if other.shape != leaf.shape:
                    raise ShapeError(
                        f"entries {joined(first)!r} of shape {list(leaf.shape)} and {joined(path)!r} of shape "
                        f"{list(other.shape)} cannot be reduced to one tensor: along batch dims the leaves must have "
                        'the same shape. Reduce over dim="feature", or over everything'
                    ) from error
            raise

    def _concatenate_features(self) -> Tensor:
        """Concatenate the flattened feature elements of all leaves. The result has the batch dims and one more dim."""
        batch_dims = len(self._batch_size)
        rows = [flatten_features(leaf, batch_dims) for _, leaf in _walk_entries(self)]
        if not rows:
            raise _empty_error()
        return torch.cat(rows, -1)


# --- plans, and the functions for the leaves of one level -----------------------------------------------------------


def plan_along(how: Reduction, keepdim: bool, dims: tuple[int, ...]) -> ReductionPlan:
    """Plan a reduction along batch dims."""
    return ReductionPlan(
        partial(apply_along, how, dims, keepdim),
        partial(_size_after_along, dims, keepdim, how.added),
        dims,
        partial(plan_along, how, keepdim),
        0 if how.added is None else 1,
        not keepdim,
    )


def plan_everything(how: Reduction, keepdim: bool = False) -> ReductionPlan:
    """Plan a reduction of all elements of each leaf."""
    return ReductionPlan(partial(_apply_whole, how, keepdim), partial(_size_after_whole, keepdim, how.added))


def plan_features(how: Reduction, dims: tuple[int, ...] = ()) -> ReductionPlan:
    """Plan a reduction of all feature dims."""
    apply, after = partial(_apply_to_features, how), partial(_size_after_along, (), False, how.added)
    return ReductionPlan(apply, after, (), partial(plan_features, how), 0 if how.added is None else 1)


def plan_same_size(apply: Callable[[tuple[int, ...]], Apply], dims: tuple[int, ...]) -> ReductionPlan:
    """Plan an operation along batch dims that keeps the batch size, such as softmax."""
    return ReductionPlan(apply(dims), _keep_size, dims, partial(plan_same_size, apply))


def _keep_size(size: torch.Size, names: Names | None) -> tuple[torch.Size, Names | None]:
    return size, names


def _replace_apply(plan: ReductionPlan, change: Callable[[Apply], Apply]) -> ReductionPlan:
    """Return a copy of the plan with another function for the leaves."""
    made = plan.along
    return plan._replace(
        apply=change(plan.apply), along=None if made is None else lambda dims: _replace_apply(made(dims), change)
    )


def _plan_per_leaf(op: Op) -> ReductionPlan:
    """Plan to call `op` on every leaf."""
    return ReductionPlan(lambda leaves, batch_dims: [op(leaf) for leaf in leaves], _keep_size)


def _has_ragged_leaf(leaves: list[Any]) -> bool:
    # Takes 2 us for 100 leaves. attrgetter would be faster, but torch.compile cannot trace it.
    return True in [leaf.is_nested for leaf in leaves]


def _drop_gaps(leaves: list[Any]) -> list[Any]:
    """Replace each ragged leaf by a plain tensor of its elements, without the gaps between rows."""
    return list(map(ragged.pack_elements, leaves)) if _has_ragged_leaf(leaves) else leaves


def _apply_whole(how: Reduction, keepdim: bool, leaves: list[Any], batch_dims: int) -> Iterable[Any]:
    op = how.op
    if keepdim:
        pairs, first = zip(leaves, _drop_gaps(leaves), strict=True), [] if how.added is None else [how.added]
        return [op(dense, tuple(range(dense.dim())), True).reshape(first + [1] * leaf.dim()) for leaf, dense in pairs]
    leaves = _drop_gaps(leaves)
    if how.many is not None and foreach.usable(leaves):
        try:
            return foreach.detach_constants(how.many(leaves), leaves)
        except (RuntimeError, TypeError):
            # One call rejects integers next to leaves that require grad, but separate calls accept them. Older versions
            # of torch lack the call.
            return list(map(op, leaves))
    if how.stacked and _can_stack(leaves):
        return _split_results(op(torch.stack(leaves).view(len(leaves), -1), 1), how)
    return map(op, leaves)


def apply_along(
    how: Reduction, dims: tuple[int, ...], keepdim: bool, leaves: list[Any], batch_dims: int
) -> Iterable[object]:
    op = how.op
    if how.stacked and _can_stack(leaves):
        return _split_results(op(torch.stack(leaves), _unpack_single(tuple([dim + 1 for dim in dims])), keepdim), how)
    arg = _unpack_single(dims)
    return [op(leaf, arg, True) for leaf in leaves] if keepdim else [op(leaf, arg) for leaf in leaves]


def _apply_to_features(how: Reduction, leaves: list[Any], batch_dims: int) -> Iterable[object]:
    if _has_ragged_leaf(leaves):
        fn = _make_feature_op(how.op, batch_dims)
        return [_reduce_by_row(how, leaf, batch_dims) if leaf.is_nested else fn(leaf) for leaf in leaves]
    if how.stacked and _can_stack(leaves):
        return _split_results(_make_feature_op(how.op, batch_dims + 1)(torch.stack(leaves)), how)
    return map(_make_feature_op(how.op, batch_dims), leaves)


def _reduce_by_row(how: Reduction, leaf: object, batch_dims: int) -> Any:
    """Reduce the feature dims of a ragged leaf row by row. Torch supports few reductions of a whole ragged leaf."""
    fn = _make_feature_op(how.op, batch_dims - 1)
    return stack_rows([fn(row) for row in list_rows(leaf, batch_dims)], leaf, 0 if how.added is None else 1)


def list_rows(leaf: Any, batch_dims: int) -> Sequence[Tensor]:
    """Return the rows of a ragged leaf. A leaf without rows gives one dummy row, to find the shape of its result.

    Args:
        leaf: a ragged leaf.
        batch_dims: the number of its batch dims.
    """
    sample = ragged.shape_of(leaf)[1:batch_dims]
    return leaf.unbind() or (torch.ones((*sample, 1), dtype=leaf.dtype, device=leaf.device),)


def stack_rows(results: list[Tensor], leaf: Any, dim: int = 0) -> Tensor:
    """Stack the results for `list_rows` to one tensor, and drop the result of the dummy row."""
    stacked = torch.stack(results, dim)
    return stacked if leaf.size(0) else stacked.narrow(dim, 0, 0)


def _make_feature_op(op: Op, batch_dims: int) -> LeafFn:
    """Return a function that calls `op` on the feature dims of a leaf, or on an added dim of size 1 without them."""

    def fn(leaf: Tensor) -> Any:
        count = leaf.dim() - batch_dims
        if count == 1:
            return op(leaf, -1)
        return op(leaf, tuple(range(batch_dims, batch_dims + count))) if count else op(leaf.unsqueeze(-1), -1)

    return fn


_form = attrgetter("shape", "dtype", "device")
_requires_grad = attrgetter("requires_grad")


def _can_stack(leaves: list[Any]) -> bool:
    """Return whether leaves can be stacked, and stacking them saves time: 10 means take 16 us instead of 40 us."""
    return (
        len(leaves) >= _MIN_STACKED
        and 0 < leaves[0].numel() * len(leaves) <= _SMALL
        and foreach.usable(leaves)
        and not (torch.is_grad_enabled() and True in map(_requires_grad, leaves))
        and all(map(Tensor.is_contiguous, leaves))
        and len(set(map(_form, leaves))) == 1
    )


def _split_results(stacked: Tensor, how: Reduction) -> list[Tensor]:
    """Split the result of a stack into the results of the leaves.

    Returns `data` of each part: the parts then have separate version counters, so that writing to one of them does not
    invalidate the others for autograd.
    """
    return [part.data for part in stacked.unbind(0 if how.added is None else 1)]


# --- the new batch size and names -----------------------------------------------------------------------------------


def _size_after_whole(keepdim: bool, added: int | None, size: torch.Size, names: Names | None) -> Any:
    front = [] if added is None else [added]
    if not keepdim:
        return torch.Size(front), None
    return torch.Size([*front, *[1] * len(size)]), None if names is None else [*[None] * len(front), *names]


def _size_after_along(
    dims: tuple[int, ...], keepdim: bool, added: int | None, size: torch.Size, names: Names | None
) -> tuple[torch.Size, Names | None]:
    if keepdim:
        size = torch.Size([1 if i in dims else n for i, n in enumerate(size)])
    elif len(dims) == 1:
        at = dims[0]
        size = size[:at] + size[at + 1 :]
        names = None if names is None else names[:at] + names[at + 1 :]
    elif dims:
        size = torch.Size([n for i, n in enumerate(size) if i not in dims])
        names = None if names is None else [name for i, name in enumerate(names) if i not in dims]
    if added is not None:
        size, names = torch.Size((added, *size)), None if names is None else [None, *names]
    return size, names if names is not None and any(names) else None


# --- helpers --------------------------------------------------------------------------------------------------------


def _is_everything(dim: Dims) -> bool:
    return dim is NO_DEFAULT or dim is None or (isinstance(dim, (tuple, list)) and not dim)


def is_feature(dim: Dims) -> bool:
    return type(dim) is str and dim == "feature"


def refuse_keepdim(keepdim: bool, why: str) -> None:
    if keepdim:
        raise TypeError(f"{why}, so keepdim=True cannot keep a dim")


def flatten_features(leaf: Tensor, batch_dims: int) -> Tensor:
    """Flatten the feature dims of a leaf to one dim."""
    count = leaf.dim() - batch_dims
    return leaf if count == 1 else leaf.flatten(batch_dims) if count else leaf.unsqueeze(-1)


def flatten_leaves(leaves: list[Tensor]) -> Tensor:
    """Concatenate the elements of all leaves to a tensor of one dim."""
    if foreach.usable(leaves) and not _has_ragged_leaf(leaves):
        # This takes 0.5 us a leaf instead of 1.1 us.
        return internals.flatten_dense_tensors(leaves)
    return torch.cat([leaf.flatten() for leaf in _drop_gaps(leaves)])


def reduce_to_bool(leaves: list[Tensor], method: Callable[..., Any], settles: bool) -> bool:
    """Test all elements of all leaves with `Tensor.all` or `Tensor.any`.

    Small leaves are tested together. Large CPU leaves are tested one by one until one decides the result. The results
    of leaves on another device are transferred together.

    Args:
        leaves: the tensors.
        method: `Tensor.all` or `Tensor.any`.
        settles: the result of one leaf that decides the result of all: `False` for `all`, `True` for `any`.
    """
    if torch.compiler.is_compiling():
        # Compute one result from all leaves, because a comparison per leaf fails: Dynamo evaluates `bool(flag) is True`
        # to False for every flag.
        flags = [method(ragged.pack_elements(leaf)).bool() for leaf in leaves]
        return bool(method(torch.stack([flag.to(flags[0].device) for flag in flags]))) if flags else not settles
    if leaves and sum([leaf.numel() for leaf in leaves]) <= _SMALL and len(set(map(_kind, leaves))) == 1:
        try:
            return bool(method(flatten_leaves(leaves)))
        except RuntimeError:
            if not any(map(ragged.is_ragged, leaves)):
                raise
    by_device: dict[torch.device, list[Tensor]] = {}
    # `pack_elements` drops the gaps between the rows of a ragged leaf.
    for leaf in map(ragged.pack_elements, leaves):
        if not leaf.is_cpu:
            by_device.setdefault(leaf.device, []).append(method(leaf).bool())
        elif bool(method(leaf)) is settles:
            return settles
    is_settled = any(bool(method(torch.stack(flags))) is settles for flags in by_device.values())
    return settles if is_settled else not settles


def _kind(leaf: Tensor) -> tuple[torch.dtype, torch.device]:
    return leaf.dtype, leaf.device


def rename_keys(node: TreeT, key_transform: KeyTransform | None) -> TreeT:
    """Return a container of the same entries under the keys that `key_transform` returns for their names."""
    if key_transform is None:
        return node
    if (pairs := node._pair_members(node)) is not None:
        return node._restack([rename_keys(member, key_transform) for member, _ in pairs])
    result = node._build({}, node._batch_size, node._device, node._names)
    for name, value in node._entries.items():
        *parents, last = path_of(key_transform(name))
        holder = result
        for parent in parents:
            if parent not in holder._entries:
                holder._entries[parent] = node._build({}, node._batch_size, node._device, node._names)
            holder = holder._entries[parent]
            if not isinstance(holder, Contract):
                raise _duplicate_key_error(parent, name)
        if last in holder._entries:
            raise _duplicate_key_error(last, name)
        holder._entries[last] = rename_keys(value, key_transform) if isinstance(value, ReductionBase) else value
    return result


def _unpack_single(dims: tuple[int, ...]) -> Any:
    """Return a single dim as an int, and several as a tuple. Torch parses an int faster, and some functions need it."""
    return dims[0] if len(dims) == 1 else dims


def _duplicate_key_error(key: str, name: str) -> Exception:
    return KeyMismatchError(
        f"key_transform returns {key!r} for the entry {name!r} and for an earlier entry; it must return unique keys"
    )


def _empty_error() -> Exception:
    return ShapeError("reduce=True needs at least one entry; the container is empty")


def _has_both_kinds(members: Sequence[Contract], name: str) -> bool:
    """Return whether an entry is a container in some members of a lazy stack and a tensor in others."""
    return len({member._node(name) is None for member in members}) > 1


def _name_entry(node: Contract, plan: ReductionPlan, error: Exception, path: Path) -> Exception:
    """Find the leaf on which the plan raised `error`. Returns the error prefixed with its key, or `error` itself."""
    batch_dims = len(node._batch_size)
    try:
        entries = dict(node._entries)
    except StackError:
        inner = plan.for_members(node.stack_dim)
        named = [_name_entry(member, inner, error, path) for member, _ in node._pair_members(node) or ()]
        return next((found for found in named if found is not error), error)
    for name, value in entries.items():
        key = (*path, name)
        if isinstance(value, Contract):
            found = _name_entry(value, plan, error, key)
            if found is not error:
                return found
            continue
        try:
            list(plan.apply([value], batch_dims))
        except TORCH_ERRORS as again:
            return named_error(again, key)
    return error
