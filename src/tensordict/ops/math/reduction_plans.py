"""How reductions are carried out: the walk over the levels of a tree, one call for leaves of one form, one for all."""

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
from tensordict.ops.storing.leaves import Leaves, _entries_of

if TYPE_CHECKING:
    from typing_extensions import Self

# Called as op(leaf), op(leaf, dims) or op(leaf, dims, True), `dims` being an int or a tuple of several ints.
Op = Callable[..., Any]
# The results for the leaves of one container, given these and the number of its batch dims.
Apply = Callable[[list[Any], int], Iterable[Any]]
# The batch size and the names of one container after the reduction.
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

# Up to this many elements in all, one copy of the leaves costs less than a call per leaf. Torch starts more threads
# above it, so that the order of a sum could change.
_SMALL = 32768
_FEW = 4


class Reduction(NamedTuple):
    """What is done to the elements.

    op: the operation on one tensor.
    combine: makes the result for several tensors from those of each, where that is possible.
    many: `op` over all elements of each of several tensors, where torch has one call for that.
    stacked: do `op` to the stack of leaves that are small and alike: worth it where `op` takes torch more than 2.5 us.
    added: the size of the dim that `op` adds in front, if any.
    """

    op: Op
    combine: Op | None = None
    many: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
    stacked: bool = False
    added: int | None = None


class ReductionPlan(NamedTuple):
    """How a reduction goes over a tree.

    apply: gives the results for the leaves of each container.
    after: gives the batch size and the names of each.
    dims: the batch dims that it works along.
    along: makes the same of other batch dims; `None` when all elements of each leaf are reduced, wherever they are.
    shift: how many dims it adds in front.
    gone: whether `dims` are no more afterwards.
    """

    apply: Apply
    after: After
    dims: tuple[int, ...] = ()
    along: Callable[[tuple[int, ...]], ReductionPlan] | None = None
    shift: int = 0
    gone: bool = False

    def inside(self, stack_dim: int) -> ReductionPlan:
        """The same for the members of a lazy stack along a dim that is none of `dims`."""
        return self if self.along is None else self.along(tuple([dim - (dim > stack_dim) for dim in self.dims]))

    def stack_dim(self, before: int) -> int:
        """Where the dim of the lazy stack is afterwards."""
        return before + self.shift - (sum([dim < before for dim in self.dims]) if self.gone else 0)


class ReductionBase(Leaves, Naming):
    """The mechanism behind `Reducing`, whose methods say what the arguments mean."""

    def _reduced(
        self, how: Reduction, dim: Dims, keepdim: bool, reduce: bool | None, key_transform: KeyTransform | None = None
    ) -> Self | Tensor:
        """The reduction along what `dim` says."""
        kept = keepdim is not NO_DEFAULT and bool(keepdim)
        if not reduce:
            result = self._by_level(self._plan(how, dim, kept))
            return result if key_transform is None else with_keys(result, key_transform)
        if _is_everything(dim):
            return self._pooled(how.op, kept, how.combine)
        if is_feature(dim):
            refuse_keepdim(kept, "dim='feature' removes the feature dims")
            return self._over_all_features(how)
        dims = self._dims(dim)
        return self._over_all(how.op, self._end_to_end(dims[0]), _unpacked(dims), kept)  # type: ignore[no-any-return]

    def _plan(self, how: Reduction, dim: Dims, keepdim: bool) -> ReductionPlan:
        """How each leaf is reduced along what `dim` says."""
        if _is_everything(dim):
            return over_everything(how, keepdim)
        if is_feature(dim):
            refuse_keepdim(keepdim, "dim='feature' removes the feature dims")
            return over_features(how)
        return along(how, keepdim, self._dims(dim))

    def _by_level(self, plan: ReductionPlan) -> Self:
        """The same structure with all leaves replaced by what `plan` gives for those of each level.

        An error of torch is raised again with the key of the leaf in front.
        """
        try:
            return self._reduced_by(plan)
        except StackError:
            raise
        except TORCH_ERRORS as error:
            raise _naming_entry(self, plan, error, ()) from error

    def _reduced_by(self, plan: ReductionPlan) -> Self:
        own, stored = self._batch_size, self._entries
        if type(stored) is not dict and isinstance(stored, EntryStore) and (block := stored.together(Tensor.clone)):
            with block:
                return self._reduced_by(plan)
        try:
            # A copy, since a lazy stack makes its entries on reading.
            entries = dict(stored)
        except StackError:
            return self._reduced_by_members(plan)
        apply = plan.apply
        if is_flat(entries):
            entries = dict(zip(entries, apply(list(entries.values()), len(own)) if entries else ()))
        else:
            leaves = [value for value in entries.values() if not isinstance(value, Contract)]
            results = iter(apply(leaves, len(own)) if leaves else ())
            for name, value in entries.items():
                if isinstance(value, ReductionBase):
                    entries[name] = value._reduced_by(plan)
                elif not isinstance(value, Contract):
                    entries[name] = next(results)
        size, names = plan.after(own, self._names)
        return self._build(entries, size, self._device, names)

    def _reduced_by_members(self, plan: ReductionPlan) -> Self:
        """`_reduced_by` for a lazy stack with an entry that cannot be stacked: along other dims each member by itself.

        Raises:
            StackError: the reduction runs along the stack dim, or the entry is not a tensor in every member.
        """
        members = [member for member, _ in self._pair_members(self) or ()]
        at: int = self.stack_dim
        if at in plan.dims or (plan.along is None and any(_is_mixed(members, name) for name in self._structure())):
            # Reading says what is wrong.
            dict(self._entries)
        if plan.along is None:
            return self._whole_apart(plan)
        inner, name = plan.inside(at), self._names[at] if self._names else None
        parts = [member._reduced_by(inner) for member in members]
        stack: Any = makers.lazy_stack(*parts, stack_dim=plan.stack_dim(at), stack_dim_name=name)
        return stack  # type: ignore[no-any-return]

    def _whole_apart(self, plan: ReductionPlan) -> Self:
        """The reduction of all elements of each entry, which the members have in different shapes."""
        batch_dims = len(self._batch_size)
        entries: dict[str, Any] = {}
        for name, value in self._structure().items():
            if isinstance(value, ReductionBase):
                entries[name] = value._reduced_by(plan)
                continue
            leaves = self._leaves_of(name)
            ndim = 1 + max([leaf.dim() for leaf in leaves])
            (entries[name],) = plan.apply([row_of(leaves).view([1] * (ndim - 1) + [-1])], batch_dims)
        size, names = plan.after(self._batch_size, self._names)
        return self._build(entries, size, self._device, names)

    def _split_by_level(self, plan: ReductionPlan) -> tuple[Self, Self]:
        """`_by_level` where `plan` gives pairs: a container of the first, and one of the second of each."""
        seconds: list[Any] = []

        def collecting(apply: Apply) -> Apply:
            def firsts(leaves: list[Tensor], batch_dims: int) -> list[Tensor]:
                pairs = list(apply(leaves, batch_dims))
                seconds.extend([pair[1] for pair in pairs])
                return [pair[0] for pair in pairs]

            return firsts

        first = self._by_level(_with_apply(plan, collecting))
        remaining = iter(seconds)
        return first, self._reduced_by(
            _with_apply(plan, lambda _: lambda leaves, batch_dims: [next(remaining) for _ in leaves])
        )

    # --- one tensor of all leaves -----------------------------------------------------------------------------------

    def _pooled(self, op: Op, keepdim: bool, combine: Op | None) -> Tensor:
        """`op` over the elements of all leaves."""
        refuse_keepdim(keepdim, "everything is reduced to one element")
        leaves = self._leaves()
        if not leaves:
            raise _nothing_to_reduce()
        try:
            if combine is not None and sum([leaf.numel() for leaf in leaves]) > _SMALL:
                return combine(torch.stack([op(leaf) for leaf in _dense(leaves)]))  # type: ignore[no-any-return]
            return op(row_of(leaves))  # type: ignore[no-any-return]
        except TORCH_ERRORS as error:
            raise _naming_entry(self, _for_each(op), error, ()) from error

    def _over_all_features(self, how: Reduction) -> Tensor:
        """`how` over the feature elements of all leaves; a lazy stack that cannot stack them asks its members."""
        try:
            row = self._side_by_side()
        except StackError:
            if (pairs := self._pair_members(self)) is None:
                raise
            at: int = self.stack_dim
            return torch.stack([one._over_all_features(how) for one, _ in pairs], at + (how.added is not None))
        result: Tensor = self._over_all(how.op, row, -1)
        return result

    def _over_all(self, op: Op, joined: Tensor, *args: object) -> Any:
        """`op` on one tensor of all leaves; an error of torch is raised again with the key of the leaf it is about."""
        try:
            return op(joined, *args)
        except TORCH_ERRORS as error:
            raise _naming_entry(self, _for_each(op), error, ()) from error

    def _end_to_end(self, dim: int) -> Tensor:
        """All leaves, which must have the same shape, concatenated along a batch dim."""
        pairs = list(_entries_of(self))
        if not pairs:
            raise _nothing_to_reduce()
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

    def _side_by_side(self) -> Tensor:
        """The batch, with all feature elements of all leaves in one last dim."""
        batch_dims = len(self._batch_size)
        rows = [one_feature_dim(leaf, batch_dims) for _, leaf in _entries_of(self)]
        if not rows:
            raise _nothing_to_reduce()
        return torch.cat(rows, -1)


# --- what is applied to the leaves of one level ---------------------------------------------------------------------


def along(how: Reduction, keepdim: bool, dims: tuple[int, ...]) -> ReductionPlan:
    """The reduction along batch dims."""
    return ReductionPlan(
        partial(apply_along, how, dims, keepdim),
        partial(after_along, dims, keepdim, how.added),
        dims,
        partial(along, how, keepdim),
        0 if how.added is None else 1,
        not keepdim,
    )


def over_everything(how: Reduction, keepdim: bool = False) -> ReductionPlan:
    """The reduction of all elements of each leaf."""
    return ReductionPlan(partial(_apply_whole, how, keepdim), partial(_after_whole, keepdim, how.added))


def over_features(how: Reduction, dims: tuple[int, ...] = ()) -> ReductionPlan:
    """The reduction of all dims that are no batch dims."""
    apply, after = partial(_apply_to_features, how), partial(after_along, (), False, how.added)
    return ReductionPlan(apply, after, (), partial(over_features, how), 0 if how.added is None else 1)


def staying(apply: Callable[[tuple[int, ...]], Apply], dims: tuple[int, ...]) -> ReductionPlan:
    """What `apply` gives along some batch dims, all dims being kept."""
    return ReductionPlan(apply(dims), _as_before, dims, partial(staying, apply))


def _as_before(size: torch.Size, names: Names | None) -> tuple[torch.Size, Names | None]:
    return size, names


def _with_apply(plan: ReductionPlan, change: Callable[[Apply], Apply]) -> ReductionPlan:
    """A reduction that goes the same way and does something else to the leaves."""
    made = plan.along
    return plan._replace(
        apply=change(plan.apply), along=None if made is None else lambda dims: _with_apply(made(dims), change)
    )


def _for_each(op: Op) -> ReductionPlan:
    """`op` on every leaf."""
    return ReductionPlan(lambda leaves, batch_dims: [op(leaf) for leaf in leaves], _as_before)


def _any_ragged(leaves: list[Any]) -> bool:
    # 2 us for 100 leaves; torch.compile knows no attrgetter.
    return True in [leaf.is_nested for leaf in leaves]


def _dense(leaves: list[Any]) -> list[Any]:
    """The leaves, plain tensors of the elements of ragged ones in their place: what is in holes does not count."""
    return list(map(ragged.elements, leaves)) if _any_ragged(leaves) else leaves


def _apply_whole(how: Reduction, keepdim: bool, leaves: list[Any], batch_dims: int) -> Iterable[Any]:
    op = how.op
    if keepdim:
        pairs = zip(leaves, _dense(leaves), strict=True)
        return [op(dense, tuple(range(dense.dim())), True).reshape([1] * leaf.dim()) for leaf, dense in pairs]
    leaves = _dense(leaves)
    if how.many is not None and foreach.usable(leaves):
        try:
            return foreach.detach_constants(how.many(leaves), leaves)
        except (RuntimeError, TypeError):
            # Integers beside leaves that require grad are refused in one call, and fine in calls of their own. A torch
            # without the call refuses, too.
            return list(map(op, leaves))
    if how.stacked and _alike(leaves):
        return _cut(op(torch.stack(leaves).view(len(leaves), -1), 1), how)
    return map(op, leaves)


def apply_along(
    how: Reduction, dims: tuple[int, ...], keepdim: bool, leaves: list[Any], batch_dims: int
) -> Iterable[object]:
    op = how.op
    if how.stacked and _alike(leaves):
        return _cut(op(torch.stack(leaves), _unpacked(tuple([dim + 1 for dim in dims])), keepdim), how)
    arg = _unpacked(dims)
    return [op(leaf, arg, True) for leaf in leaves] if keepdim else [op(leaf, arg) for leaf in leaves]


def _apply_to_features(how: Reduction, leaves: list[Any], batch_dims: int) -> Iterable[object]:
    if _any_ragged(leaves):
        fn = _over_features(how.op, batch_dims)
        return [_row_by_row(how, leaf, batch_dims) if leaf.is_nested else fn(leaf) for leaf in leaves]
    if how.stacked and _alike(leaves):
        return _cut(_over_features(how.op, batch_dims + 1)(torch.stack(leaves)), how)
    return map(_over_features(how.op, batch_dims), leaves)


def _row_by_row(how: Reduction, leaf: object, batch_dims: int) -> Any:
    """The reduction of the feature dims of a ragged leaf, of which torch has few: row by row."""
    fn = _over_features(how.op, batch_dims - 1)
    return restacked([fn(row) for row in rows_of(leaf, batch_dims)], leaf, 0 if how.added is None else 1)


def rows_of(leaf: Any, batch_dims: int) -> Sequence[Tensor]:
    """The rows of a ragged leaf over `batch_dims` batch dims; where there are none, one to see what becomes of rows."""
    sample = ragged.shape_of(leaf)[1:batch_dims]
    return leaf.unbind() or (torch.ones((*sample, 1), dtype=leaf.dtype, device=leaf.device),)


def restacked(results: list[Tensor], leaf: Any, dim: int = 0) -> Tensor:
    """The results for what `rows_of` gave, in one tensor."""
    stacked = torch.stack(results, dim)
    return stacked if leaf.size(0) else stacked.narrow(dim, 0, 0)


def _over_features(op: Op, batch_dims: int) -> LeafFn:
    """`op` along the dims from `batch_dims` on; a leaf that has none counts as one with a single feature."""

    def fn(leaf: Tensor) -> Any:
        count = leaf.dim() - batch_dims
        if count == 1:
            return op(leaf, -1)
        return op(leaf, tuple(range(batch_dims, batch_dims + count))) if count else op(leaf.unsqueeze(-1), -1)

    return fn


_form = attrgetter("shape", "dtype", "device")
_requires_grad = attrgetter("requires_grad")


def _alike(leaves: list[Any]) -> bool:
    """Whether leaves can be stacked, and cost less so than one by one: 10 means take 16 us instead of 40 us."""
    return (
        len(leaves) >= _FEW
        and 0 < leaves[0].numel() * len(leaves) <= _SMALL
        and foreach.usable(leaves)
        and not (torch.is_grad_enabled() and True in map(_requires_grad, leaves))
        and all(map(Tensor.is_contiguous, leaves))
        and len(set(map(_form, leaves))) == 1
    )


def _cut(stacked: Tensor, how: Reduction) -> list[Tensor]:
    """The result of each leaf. As `data`, or writing to one would make autograd think that all were written to."""
    return [part.data for part in stacked.unbind(0 if how.added is None else 1)]


# --- the batch size and the names afterwards ------------------------------------------------------------------------


def _after_whole(keepdim: bool, added: int | None, size: torch.Size, names: Names | None) -> Any:
    front = [] if added is None else [added]
    if not keepdim:
        return torch.Size(front), None
    return torch.Size([*front, *[1] * len(size)]), None if names is None else [*[None] * len(front), *names]


def after_along(
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


# --- small parts ----------------------------------------------------------------------------------------------------


def _is_everything(dim: Dims) -> bool:
    return dim is NO_DEFAULT or dim is None or (isinstance(dim, (tuple, list)) and not dim)


def is_feature(dim: Dims) -> bool:
    return type(dim) is str and dim == "feature"


def refuse_keepdim(keepdim: bool, why: str) -> None:
    if keepdim:
        raise TypeError(f"{why}, so there is no dim that keepdim=True could keep")


def one_feature_dim(leaf: Tensor, batch_dims: int) -> Tensor:
    """The leaf with its feature dims as one."""
    count = leaf.dim() - batch_dims
    return leaf if count == 1 else leaf.flatten(batch_dims) if count else leaf.unsqueeze(-1)


def row_of(leaves: list[Tensor]) -> Tensor:
    """The elements of all leaves in one dim."""
    if foreach.usable(leaves) and not _any_ragged(leaves):
        # 0.5 us a leaf instead of 1.1 us.
        return internals.flatten_dense_tensors(leaves)
    return torch.cat([leaf.flatten() for leaf in _dense(leaves)])


def of_all(leaves: list[Tensor], method: Callable[..., Any], settles: bool) -> bool:
    """`Tensor.all` or `Tensor.any` of all leaves: small ones at once, the CPU's in turn, others in one transfer.

    Args:
        leaves: the tensors.
        method: the one or the other.
        settles: what one leaf can say for all of them.
    """
    if torch.compiler.is_compiling():
        # One number for the graph. Dynamo takes `bool(flag) is True` for false, whatever the flag is.
        flags = [method(ragged.elements(leaf)).bool() for leaf in leaves]
        return bool(method(torch.stack([flag.to(flags[0].device) for flag in flags]))) if flags else not settles
    if leaves and sum([leaf.numel() for leaf in leaves]) <= _SMALL and len(set(map(_kind, leaves))) == 1:
        try:
            return bool(method(row_of(leaves)))
        except RuntimeError:
            if not any(map(ragged.is_ragged, leaves)):
                raise
    by_device: dict[torch.device, list[Tensor]] = {}
    # What is in the holes of a ragged leaf does not count.
    for leaf in map(ragged.elements, leaves):
        if not leaf.is_cpu:
            by_device.setdefault(leaf.device, []).append(method(leaf).bool())
        elif bool(method(leaf)) is settles:
            return settles
    is_settled = any(bool(method(torch.stack(flags))) is settles for flags in by_device.values())
    return settles if is_settled else not settles


def _kind(leaf: Tensor) -> tuple[torch.dtype, torch.device]:
    return leaf.dtype, leaf.device


def with_keys(node: TreeT, key_transform: KeyTransform | None) -> TreeT:
    """The same entries under the keys that `key_transform` gives for the name of each, level by level."""
    if key_transform is None:
        return node
    if (pairs := node._pair_members(node)) is not None:
        return node._restack([with_keys(member, key_transform) for member, _ in pairs])
    result = node._build({}, node._batch_size, node._device, node._names)
    for name, value in node._entries.items():
        *parents, last = path_of(key_transform(name))
        holder = result
        for parent in parents:
            if parent not in holder._entries:
                holder._entries[parent] = node._build({}, node._batch_size, node._device, node._names)
            holder = holder._entries[parent]
            if not isinstance(holder, Contract):
                raise _key_taken(parent, name)
        if last in holder._entries:
            raise _key_taken(last, name)
        holder._entries[last] = with_keys(value, key_transform) if isinstance(value, ReductionBase) else value
    return result


def _unpacked(dims: tuple[int, ...]) -> Any:
    """One dim as an int, which torch parses faster, and which some operations need."""
    return dims[0] if len(dims) == 1 else dims


def _key_taken(key: str, name: str) -> Exception:
    return KeyMismatchError(f"key_transform gives {key!r} for the entry {name!r}, and for another one before it")


def _nothing_to_reduce() -> Exception:
    return ShapeError("reduce=True needs one entry at least; the container is empty")


def _is_mixed(members: Sequence[Contract], name: str) -> bool:
    """Whether an entry is a container in some members of a lazy stack and a tensor in others."""
    return len({member._node(name) is None for member in members}) > 1


def _naming_entry(node: Contract, plan: ReductionPlan, error: Exception, path: Path) -> Exception:
    """`error`, raised on some leaf by this plan, with the key of that leaf in front."""
    batch_dims = len(node._batch_size)
    try:
        entries = dict(node._entries)
    except StackError:
        inner = plan.inside(node.stack_dim)
        named = [_naming_entry(member, inner, error, path) for member, _ in node._pair_members(node) or ()]
        return next((found for found in named if found is not error), error)
    for name, value in entries.items():
        inside = (*path, name)
        if isinstance(value, Contract):
            found = _naming_entry(value, plan, error, inside)
            if found is not error:
                return found
            continue
        try:
            list(plan.apply([value], batch_dims))
        except TORCH_ERRORS as again:
            return named_error(again, inside)
    return error
