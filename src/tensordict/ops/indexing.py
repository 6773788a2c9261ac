"""Indexing on the batch dimensions, reading and assigning; iteration; and `[]` with keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.core import foreach, indexing, ragged, registry
from tensordict.core.contract import Contract, Names, is_node, named_error
from tensordict.core.errors import ShapeError
from tensordict.core.indexing import checked_size, is_basic, leaf_index, result_size
from tensordict.core.keys import Key, Path, is_nested_key, joined, key_path, path_of
from tensordict.core.ragged import REFUSALS
from tensordict.memory import rows
from tensordict.ops.locking import raise_locked
from tensordict.ops.numbers import stored, to_tensor
from tensordict.ops.refusals import has_ragged, retried
from tensordict.ops.sources import leaf_items, nested_under, restricted
from tensordict.ops.writing import Writing, _check_expandable, raise_no_entry, without_leading

if TYPE_CHECKING:
    from typing_extensions import Self

_KEY_KINDS = (str, tuple)


# Stands for the size of a ragged dim.
_ANY_LENGTH = 2**30


class _Assignment:
    """One call of `td[at] = ...`: what is copied where, and what is allocated, once everything has been checked."""

    __slots__ = ("adds", "allocations", "at", "basic", "lead", "parts", "size", "targets", "values", "writes")

    def __init__(self, at: Any, lead: torch.Size, size: torch.Size, adds: bool = True) -> None:
        self.at = at
        self.lead = lead
        self.size = size
        # Whether entries that are not there yet are allocated.
        self.adds = adds
        # A basic index makes views to copy into, all in one call; otherwise the leaves themselves are indexed.
        self.basic = is_basic(at)
        self.targets: list[Tensor] = []
        self.values: list[Any] = []
        self.allocations: list[tuple[Any, str, Any]] = []
        # What the members of a lazy stack are assigned.
        self.parts: list[_Assignment] = []
        # What ragged leaves are assigned.
        self.writes: list[Callable[[], Any]] = []

    def part_of(self, leaf: Any) -> torch.Size:
        """The shape of the part of a leaf or holder that is assigned: what is behind the batch dims indexed stays."""
        part: torch.Size = self.size + leaf.shape[len(self.lead) :]
        return part

    def refuse_graph_leaves(self, root: Any) -> None:
        """Refuse to write into what autograd refuses to have changed; `root` names the entry."""
        foreach.refuse_graph_leaves(self.targets, root)
        for part in self.parts:
            part.refuse_graph_leaves(root)

    def run(self, root: Any = None) -> None:
        """Write everything; `root`, which is assigned to, names the entry in errors."""
        if self.parts or not self.basic:
            self.refuse_graph_leaves(root)
        if self.basic:
            foreach.copy_(self.targets, self.values, container=root)
        else:
            for target, value in zip(self.targets, self.values, strict=True):
                target[self.at] = value
        for node, name, fresh in self.allocations:
            node._entries[name] = fresh
        for part in self.parts:
            part.run(root)
        for write in self.writes:
            write()


class Indexing(Writing):
    """`td[...]`: a key reads an entry, anything else indexes the batch dimensions as torch does."""

    @overload
    def __getitem__(self, index: tuple[()]) -> Self: ...
    @overload
    def __getitem__(self, index: Key) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        """The entry at a key (a value that is no tensor as it is), or the container indexed along its batch dims.

        Views where torch's indexing gives views, copies where it gives copies.

        Raises:
            KeyError: there is no such entry.
            IndexError: the index does not fit the batch size.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(6).view(3, 2)}, [3])
            >>> td["a"].shape, td[0]["a"], td[:2].batch_size
            (torch.Size([3, 2]), tensor([0, 1]), torch.Size([2]))
        """
        kind = type(index)
        if kind is str:
            try:
                value = self._entries[index]
            except KeyError:
                raise self._missing(index) from None
            return value if type(value) is Tensor else given(value)
        if kind is tuple and index and type(index[0]) in _KEY_KINDS:
            try:
                value = self._find(index)
                return value if type(value) is Tensor else given(value)
            except KeyError as error:
                raise self._missing(index) from error
            except TypeError:
                # A tuple of sequences after all, such as ((0, 1), (2, 3)), which indexes the batch.
                if is_nested_key(index):
                    raise
        # As the reference does. Torch makes a new view of the whole, which shares everything that can be seen.
        return self if index is Ellipsis else self._index(index)

    def _index(self, index: Any) -> Any:
        size = self._batch_size
        # Views of what is memory-mapped or shared are that too, and locked.
        backing = self._backing
        keeps = backing.is_memmap or backing.is_shared
        if type(index) is int and len(size) and not keeps:
            # The same in fewer steps: an integer is what most containers are indexed with.
            item = itemgetter(index)
            return self._map(item, result_size(index, size), len(size), _all_but_first, item)
        at = leaf_index(index, size)
        # Leaves check their bounds themselves; without leaves, somebody has to.
        new_size = checked_size(at, size) if type(at) is Tensor and self.is_empty() else result_size(at, size)
        rename = None
        if self._names is not None:
            # A mask of several dims has become one tensor for each of them.
            named = torch.as_tensor(index) if _is_mask(index) else at
            rename = lambda names: indexing.renamed(names, named, len(new_size))  # noqa: E731
        fn = rows.reader(at) if rows.maps else itemgetter(at)
        try:
            out = self._map(fn, new_size, len(size), rename, fn)
        except REFUSALS:
            if not has_ragged(self):
                raise
            out = retried(self, self._map, ragged.Index(at), new_size, len(size), rename)
        if keeps and is_basic(at):
            out._mark_as(self)
            out.lock_()
            out._undo = None
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write an entry at a key, or assign to a part of the batch.

        `td[index] = value` takes a container, a mapping, a tensor or a number, is in place and so allowed on a locked
        container. What is assigned broadcasts as a tensor does, a container by its batch size. Entries of `value` that
        this container lacks are allocated with zeros at its batch size, so that an empty container can be filled item
        by item. All shapes are checked before the first write.

        Raises:
            IndexError: the index does not fit the batch size.
            RuntimeError: batch sizes or shapes do not fit; the entry is named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> buffer = TensorDict(batch_size=[100])
            >>> buffer[3] = TensorDict({"obs": torch.ones(4)})
            >>> buffer["obs"].shape, buffer["obs"].sum()
            (torch.Size([100, 4]), tensor(4.))
        """
        kind = type(index)
        if kind is str:
            # The first lines of `_write_name`, without its call: 0.4 us instead of 0.5 for the write made most often.
            size = self._batch_size
            try:
                fits = (
                    type(value) is Tensor
                    and not self._locked
                    and self._device is None
                    and value.shape[: len(size)] == size
                )
            except RuntimeError:
                fits = False  # see `_write_name`
            if fits:
                self._entries[index] = value
            else:
                self._write_name(index, value)
        elif kind is tuple and index and type(index[0]) in _KEY_KINDS and (path := key_path(index)) is not None:
            self._write(path, value)
        else:
            self._assign(index, value)

    def _assign(self, index: Any, value: Any, adds: bool = True) -> None:
        size = self._batch_size
        at = leaf_index(index, size)
        # A mask is in bounds by its shape; the elements of other index tensors have to be looked at.
        new_size = result_size(at, size) if _is_mask(index) else checked_size(at, size)
        if isinstance(value, Contract):
            theirs = value._batch_size
            if theirs != new_size and theirs[: len(new_size)] != new_size:
                value = self._broadcast(value, index, new_size)
        elif not isinstance(value, Mapping):
            leaves = self._leaves()
            if torch.is_grad_enabled():
                foreach.refuse_graph_leaves(leaves, self)
            if any(leaf.is_nested for leaf in leaves):
                # What ragged leaves refuse is to be known before any leaf changes.
                self._plan_everywhere(torch.as_tensor(value), (), _Assignment(at, size, new_size))
            self._assign_everywhere(at, new_size, value)
            return
        plan = _Assignment(at, size, new_size, adds)
        self._plan_assign(value, (), plan)
        plan.run(self)

    def _broadcast(self, value: Any, index: Any, size: torch.Size) -> Any:
        """A container of another batch size as one that can be assigned to the part of batch size `size` at `index`."""
        theirs = value._batch_size
        while len(theirs) > len(size) and theirs[0] == 1:
            # As torch does with what is assigned to a tensor.
            value, theirs = value._index(0), theirs[1:]
        if not theirs:
            # A container without batch dims is what a dict is: each leaf has to fit, or to broadcast.
            return dict(leaf_items(value))
        if len(theirs) > len(size) or any(a not in (1, b) for a, b in zip(reversed(theirs), reversed(size))):
            raise ShapeError(
                f"cannot assign a container of batch size {list(theirs)} to the index {index!r} of a container "
                f"of batch size {list(self._batch_size)}: that part has batch size {list(size)}, which differs from "
                "the source batch size; what is assigned to it has these dims, or broadcasts to them"
            )
        return value.expand(size)

    def _assign_everywhere(self, at: Any, size: torch.Size, value: Any) -> None:
        """Assign one tensor or number to a part, of batch size `size`, of every leaf."""
        leaf: Any
        if not isinstance(value, (int, float, complex)):
            plan = _Assignment(at, self._batch_size, size)
            self._plan_everywhere(torch.as_tensor(value), (), plan)
            plan.run(self)
            return
        basic = is_basic(at)
        for name, leaf in self._entries.items():
            if type(leaf) is not Tensor and isinstance(leaf, Indexing):
                leaf._assign_everywhere(at, size, value)
            elif isinstance(leaf, Contract):
                continue  # An `UnbatchedTensor`, which has no part for the index.
            elif leaf.is_nested:
                _ragged_write(leaf, at, value, (name,))()
            elif basic:
                leaf[at].fill_(value)
            else:
                leaf[at] = value  # type: ignore[assignment]

    def _plan_everywhere(self, value: Any, prefix: Path, plan: _Assignment) -> None:
        """Check that a value fits a part of every leaf, and list where it is assigned."""
        for name, leaf in self._entries.items():
            path = (*prefix, name)
            if type(leaf) is not Tensor and isinstance(leaf, Indexing):
                leaf._plan_everywhere(value, path, plan)
            elif isinstance(leaf, Contract):
                continue
            elif leaf.is_nested:
                plan.writes.append(_ragged_write(leaf, plan.at, value, path))
            else:
                plan.values.append(_fitting(leaf, value, plan.part_of(leaf), path))
                plan.targets.append(leaf[plan.at] if plan.basic else leaf)

    def _plan_assign(self, value: Any, prefix: Path, plan: _Assignment) -> None:
        """Check every item and list what is assigned where, and what has to be allocated."""
        mapping = self._entries
        at, basic = plan.at, plan.basic
        # As a member of a lazy stack is assigned: making a view of each leaf would double the time.
        whole = basic and at == ()
        for key, item in value.items():
            if type(key) is not str:
                key, *rest = path_of(key)
                item = nested_under(rest, item)
            current: Any = mapping.get(key)
            if type(current) is Tensor or isinstance(current, Tensor):
                if type(current) is not Tensor and isinstance(current, Contract):
                    continue  # An `UnbatchedTensor`, which has no part for the index.
                try:
                    if basic:
                        # A view has the shape to compare with, and torch casts what is copied into it.
                        if not whole:
                            current = current[at]
                        if type(item) is not Tensor or item.shape != current.shape:
                            item = _fitting(current, item, current.shape, (*prefix, key))
                    else:
                        expected = plan.part_of(current)
                        if type(item) is not Tensor or item.shape != expected or item.dtype is not current.dtype:
                            item = _fitting(current, item, expected, (*prefix, key))
                except REFUSALS:
                    leaf = mapping[key]
                    if not leaf.is_nested:
                        raise
                    plan.writes.append(_ragged_write(leaf, at, item, (*prefix, key)))
                    continue
                plan.targets.append(current)
                plan.values.append(item)
                continue
            path = (*prefix, key)
            if current is None:
                if not plan.adds:
                    raise_no_entry(path)
                if self._locked:
                    raise_locked(f"allocate the entry {joined(path)!r}, which is not there yet")
                fresh = _allocated(item, at, plan.lead, plan.size, path)
                plan.allocations.append((self, key, self._admit(fresh, path)))
            elif current._is_non_tensor:
                plan.writes.append(current._replacing(self, key, item, at, plan.part_of(current), path))
            elif isinstance(item, (Contract, Mapping)):
                current._plan_assign(item, path, plan)
            else:
                current._plan_everywhere(item, path, plan)

    # --- assigning to a part of entries -------------------------------------------------------------------------------

    def set_at_(self, key: Any, value: Any, index: Any, *, non_blocking: bool = False) -> Self:
        """Copy `value` into `td.get(key)[index]`; allowed on a locked container.

        Args:
            key: a string or a tuple of strings.
            value: what torch assigns to that part of a tensor; for a nested container, what `td[index] = value` takes.
            index: applied to the tensor, whose dims behind the batch it may reach; to the batch of a nested container
                and of a value that is no tensor.
            non_blocking: passed to the device transfer, if there is one.

        Raises:
            KeyError: there is no such entry.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3)}, [2]).set_at_("a", 1.0, (..., 0))["a"]
            tensor([[1., 0., 0.],
                    [1., 0., 0.]])
        """
        path = path_of(key)
        node, name = self._holder(path)
        node._copy_at(name, value, index, path, non_blocking)
        return self

    def _copy_at(self, name: str, value: Any, index: Any, path: Path, non_blocking: bool) -> None:
        """Copy `value` into a part of the entry of this name; `path` leads there from where the write began."""
        current = self._targets()[name]
        if isinstance(current, Contract) or current.is_nested:
            if is_node(current) and not current._is_non_tensor:
                current[index] = value
            else:
                self._plan_at(name, value, index, path).run()
            return
        if isinstance(value, Tensor):
            if non_blocking and value.device != current.device:
                value = value.to(current.device, non_blocking=True)
        elif not isinstance(value, (int, float, complex)):
            value = _assignable(value, path, current.device).to(current.dtype)
        try:
            current[leaf_index(index, current.shape)] = value
        except RuntimeError as error:
            raise named_error(error, path) from error

    def _plan_at(self, name: str, value: Any, index: Any, path: Path) -> _Assignment:
        """What copies `value` into a part of the entry of this name, once everything has been checked."""
        inner = self._node(name)
        shape = self._batch_size if is_node(inner) else self._shape_of(name)
        if any(type(n) is not int or n < 0 for n in shape):
            # The ragged dim has no size; whether an index fits it is seen row by row.
            shape = torch.Size([n if type(n) is int and n >= 0 else _ANY_LENGTH for n in shape])
        at = leaf_index(index, shape)
        plan = _Assignment(at, shape, checked_size(at, shape), adds=False)
        if isinstance(inner, Tensor):
            for leaf in self._leaves_of(name):
                plan.values.append(_fitting(leaf, value, plan.size, path))
                plan.targets.append(leaf[at] if plan.basic else leaf)
        else:
            self._plan_assign({name: value}, path[:-1], plan)
        return plan

    def update_at_(
        self,
        input_dict_or_td: Any,
        idx: Any,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Iterable[Any] | None = None,
    ) -> Self:
        """Copy the values of a mapping or container into a part of the entries; allowed on a locked container.

        The index is applied to each tensor, as in :meth:`set_at_`. All shapes are checked before the first write.

        Raises:
            KeyError: an entry does not exist here.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.update_at_({"a": 1.0}, 2)["a"]
            tensor([0., 0., 1.])
        """
        source = input_dict_or_td if keys_to_update is None else restricted(input_dict_or_td, keys_to_update)
        if not isinstance(source, (Contract, Mapping)):
            raise TypeError(f"update_at_ reads from a container or a mapping, got {type(source).__name__}")
        if not indexing.is_beyond(idx, self._batch_size):
            self._assign(idx, source, adds=False)
            return self
        plans = []
        for path, item in leaf_items(source):
            node, name = self._holder(path)
            plans.append(node._plan_at(name, item, idx, path))
        for plan in plans:
            plan.run()
        return self

    def copy_at_(self, tensordict: Any, idx: Any, non_blocking: bool = False, *, fast: bool | None = True) -> Self:
        """Copy the values of another container into `self[idx]`; `fast` decides nothing, the fastest way is taken."""
        return self.update_at_(tensordict, idx, non_blocking=non_blocking)

    def __delitem__(self, key: Any) -> None:
        """Delete the entry at a nested key; raises `KeyError` when there is none."""
        self.del_(key)

    def __contains__(self, key: object) -> bool:
        """Whether there is an entry at a nested key."""
        if isinstance(key, str):
            return key in self._entries
        if not is_nested_key(key):
            raise TypeError(f"keys are strings or tuples of strings, got {key!r} of type {type(key).__name__}")
        return self._has(path_of(key))

    def __len__(self) -> int:
        """The size of the first batch dimension; 0 when there is none."""
        size = self._batch_size
        return size[0] if len(size) else 0

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the first batch dimension.

        Raises:
            TypeError: the container has no batch dimension.
        """
        if len(self._batch_size) == 0:
            raise TypeError(
                "iteration over a container without batch dims (batch_size=[]); iterate over td.items() for its entries"
            )
        return iter(self.unbind(0))  # type: ignore[attr-defined]

    def __getitems__(self, indices: Sequence[int]) -> Self:
        """Several items of the first batch dimension in one indexing call, as a `DataLoader` asks for a batch.

        The batch comes as one container, which torch's default `collate_fn` leaves as it is.
        """
        return self._index(torch.as_tensor(indices))  # type: ignore[no-any-return]


def given(value: Any) -> Any:
    """What `td[key]` gives for an entry: the value of a holder, anything else as it is."""
    return value._unwrapped() if isinstance(value, Contract) and value._is_non_tensor else value  # type: ignore[attr-defined]


def _all_but_first(names: Names) -> Names:
    return names[1:]


def _is_mask(index: Any) -> bool:
    return isinstance(index, (Tensor, np.ndarray)) and index.dtype in (torch.bool, np.bool_)


def _fitting(target: Tensor, item: Any, expected: torch.Size, path: Path) -> Any:
    """`item` if it can be assigned to a part of `target` of shape `expected`; raises naming `path` when not."""
    if not isinstance(item, Tensor):
        item = _assignable(item, path, target.device)
    if target.is_nested:
        raise ShapeError(f"entry {joined(path)!r} is ragged")
    shape = ragged.shape_of(item)
    if shape != expected:
        _check_expandable(shape, expected, path)
        item = without_leading(item, len(expected))
    # Torch casts when a basic index is assigned and refuses when an advanced one is; here both cast.
    return item if item.dtype == target.dtype else item.to(target.dtype)


def _assignable(item: Any, path: Path, device: torch.device) -> Tensor:
    """Numbers, lists and arrays of them as a tensor, to be assigned to a part of one."""
    _refuse_container(item, path)
    return to_tensor(item, path, device)


def _refuse_container(item: Any, path: Path) -> None:
    """Raise when a container or a mapping is to be assigned to a part of a tensor."""
    if isinstance(item, (Contract, Mapping)):
        raise TypeError(f"entry {joined(path)!r} is a tensor and cannot be assigned a {type(item).__name__}")


def _ragged_write(leaf: Tensor, at: Any, item: Any, path: Path) -> Callable[[], Any]:
    """What assigns `item` to a part of a ragged leaf, once called; raises naming `path` when it does not fit."""
    if isinstance(item, Contract) or not isinstance(item, (Tensor, int, float, complex)):
        item = _assignable(item, path, leaf.device)
    try:
        return ragged.assignment(leaf, at, item)
    except (RuntimeError, ValueError) as error:
        raise named_error(error, path) from None


def _spread(holder: Any, at: Any, lead: torch.Size, ndim: int) -> Any:
    """A holder for all of the batch: of the one value, or of `None` where the values of `holder` are not assigned.

    The first `ndim` batch dims of `holder` are those of the part.
    """
    make = registry.lookup("NonTensorData")
    if not isinstance(holder, registry.lookup("NonTensorStack")):
        return make._of(holder._value, lead)
    return make._of(None, lead + holder._batch_size[ndim:])._assigned(at, holder)


def _allocated(item: Any, at: Any, lead: torch.Size, new_size: torch.Size, path: Path) -> Any:
    """Zeros for all of the batch, shaped after `item`, with `item` assigned at the index."""
    if isinstance(item, Contract):
        if isinstance(item, Tensor):
            return item
        if item._is_non_tensor:
            return _spread(item, at, lead, len(new_size))
        size = lead + item._batch_size[len(new_size) :]
        entries = {name: _allocated(value, at, lead, new_size, (*path, name)) for name, value in item._entries.items()}
        names: Names | None = None
        if item._names is not None:
            names = [*([None] * len(lead)), *item._names[len(new_size) :]]
        return item._build(entries, size, item._device, names)
    if isinstance(item, Mapping):
        return {key: _allocated(value, at, lead, new_size, (*path, *path_of(key))) for key, value in item.items()}
    if not isinstance(item, Tensor):
        item = stored(item, path, new_size, None)
        if isinstance(item, Contract):
            return _spread(item, at, lead, len(new_size))
    if item.is_nested:
        raise ShapeError(f"entry {joined(path)!r} is ragged and not there yet: set all of it before assigning to parts")
    if item.shape[: len(new_size)] != new_size:
        raise ShapeError(
            f"entry {joined(path)!r} has shape {list(item.shape)}, which does not begin with the size "
            f"{list(new_size)} of the part of the batch it is assigned to"
        )
    fresh = item.new_zeros(lead + item.shape[len(new_size) :])
    fresh[at] = item
    return fresh
