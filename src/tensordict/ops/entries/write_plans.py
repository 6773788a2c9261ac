"""What is written: an operation that writes is a `Write`, which fills a plan while it checks; then the plan is run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from tensordict.core import foreach, ragged
from tensordict.core.contract import Contract, EntryStore, is_node, named_error
from tensordict.core.exceptions import ShapeError, nearest, refuse_stored
from tensordict.core.key_views import IsLeaf
from tensordict.core.keys import Path, joined, path_of
from tensordict.memory.file_source import FileSource
from tensordict.memory.sparse_files import make_room
from tensordict.ops.dims.naming import take_names
from tensordict.ops.entries.locking import adopt, raise_locked
from tensordict.ops.entries.numbers import overwriting, to_tensor
from tensordict.ops.entries.update_sources import nested_under

_NAMES = {str}


class WritePlan:
    """What one call writes: filled while everything is checked, then carried out by `run`.

    Attributes:
        targets, values: the tensors that are copied into, and what is copied into each: all in one call, and first.
        assigned: tensors, an index into each, and what is assigned there: then.
        steps: what is done at last, in this order: functions, and the arguments of each.
        parts: the plans that are carried out as steps of this one.
        absent: the first path at which the source has an entry and the container none.
    """

    parts: tuple[WritePlan, ...] = ()
    absent: Path | None = None

    def __init__(self) -> None:
        self.targets: list[Tensor] = []
        self.values: list[Any] = []
        self.assigned: list[tuple[Tensor, Any, Any]] = []
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def copy(self, target: Tensor, item: object, path: Path) -> None:
        """Have `item`, which broadcasts, copied into a tensor; raises naming `path` when it does not fit."""
        if not target.is_nested or not isinstance(item, Tensor):
            self.values.append(_copyable(target, item, path))
            self.targets.append(target)
            return
        try:
            refuse_stored(target)
            targets, values = ragged.copies(target, item)
        except ShapeError as error:
            raise named_error(error, path) from None
        self.targets += targets
        self.values += values

    def part(self) -> WritePlan:
        """A plan that is carried out as a step of this one: for copies that may read what those before them write."""
        part = WritePlan()
        self.parts += (part,)
        self.steps.append((part.run, ()))
        return part

    def run(self, container: Any = None, non_blocking: bool = False) -> None:
        """Write everything; `container`, which is written to, names the entry in errors.

        Raises:
            RuntimeError: a tensor is a leaf of the autograd graph that requires grad; nothing has changed.
        """
        if container is not None and container._holds_parameters and torch.is_grad_enabled():
            with torch.no_grad():
                self.run(container, non_blocking)
            return
        entries = None if container is None else container._entries
        if isinstance(entries, EntryStore) and (block := entries.together()) is not None:
            with block:
                self.run(container, non_blocking)
            return
        if FileSource.any_sparse:
            make_room(self._places(), container)
        if self.assigned or self.parts:
            foreach.refuse_graph_leaves(self._written(), container)
        if self.targets:
            foreach.copy_(self.targets, self.values, non_blocking, container)
        for target, at, item in self.assigned:
            target[at] = item
        for step, operands in self.steps:
            step(*operands)

    def _written(self) -> list[Tensor]:
        """All tensors that are written into."""
        return [target for target, _ in self._places()]

    def _places(self) -> list[tuple[Tensor, Any]]:
        """All tensors that are written into, each with the index of the part; `None` stands for all of it."""
        found = [(target, None) for target in self.targets] + [(target, at) for target, at, _ in self.assigned]
        for part in self.parts:
            found += part._places()
        return found


class Write:
    """What is written, and how: `into` says it for a container that holds its entries.

    A container gets it through `Writing._plan_write`; one that consists of others, or is the form of another one, hands
    it on to these.

    Attributes:
        plan: what `into` fills.
        adds: whether entries that are not there yet are added.
        inplace: whether entries that are there keep their memory.
    """

    plan: WritePlan
    adds: bool = False
    inplace: bool = True

    def into(self, node: Any, source: Any, prefix: Path) -> None:
        """Check what is written to a container that holds its entries, and add it to the plan.

        Args:
            node: the container.
            source: what is written to it.
            prefix: the path of the container, for errors.
        """
        raise NotImplementedError


class Update(Write):
    """The entries of a mapping or container: they are added, or replace what is there, or are copied into it."""

    adds = True

    def __init__(
        self,
        inplace: bool,
        clone: bool,
        non_blocking: bool,
        is_leaf: IsLeaf | None,
        ignore_lock: bool,
        update_batch_size: bool = False,
    ) -> None:
        self.plan = WritePlan()
        self.update_batch_size = update_batch_size
        self.inplace = inplace
        self.clone = clone
        self.non_blocking = non_blocking
        self.is_leaf = is_leaf
        self.ignore_lock = ignore_lock

    def merges(self, item: object) -> bool:
        """Whether `item` is merged into a nested container, rather than put in its place."""
        if self.is_leaf is not None and self.is_leaf(type(item)):
            return False
        if isinstance(item, Contract):
            # A value that is no tensor has nothing to be copied into the entries of a container.
            return not isinstance(item, Tensor) and not (item._is_non_tensor and self.adds)
        return isinstance(item, Mapping)

    def _replaces(self, current: Any, item: object) -> bool:
        """Whether a nested container makes way for one of another batch size, with `update_batch_size`."""
        if not self.update_batch_size or not isinstance(item, Contract) or not has_other_size(current, item):
            return False
        check_all_given(current, item)
        return True

    def into(self, node: Any, source: Any, prefix: Path) -> None:
        mapping, plan = node._entries, self.plan
        targets, values = plan.targets, plan.values
        adds, inplace = self.adds, self.inplace
        if inplace and (pairs := plain_pairs(mapping, source)) is not None and alike(*pairs):
            targets += pairs[0]
            values += pairs[1]
            return
        writable = not adds or self.ignore_lock or not node._locked
        trusting = writable and not inplace and node._device is None and not self.clone
        if trusting and (given := fitting(source, node._batch_size)) is not None:
            plan.steps.append((mapping.update, (given,)))
            return
        size = node._batch_size
        ndim, first = len(size), size[0] if len(size) else None
        fresh: dict[str, Any] = {}
        for key, item in source.items():
            if type(key) is not str:
                key, *rest = path_of(key)
                item = nested_under(rest, item)
            elif type(item) is Tensor:
                try:
                    if trusting:
                        # As in `begin_with`.
                        if not ndim or (item.shape[0] == first and (ndim == 1 or item.shape[:ndim] == size)):
                            fresh[key] = item
                            continue
                    elif inplace:
                        target = mapping.get(key)
                        if isinstance(target, Tensor) and item.shape == target.shape:
                            targets.append(target)
                            values.append(item)
                            continue
                except (RuntimeError, IndexError):
                    pass  # no dims; or a ragged tensor of the strided layout, of which torch knows no shape
            self._other(node, key, item, (*prefix, key), fresh, writable)
        if fresh:
            plan.steps.append((_store, (node, fresh)))

    def _other(self, node: Any, key: str, item: Any, path: Path, fresh: dict[str, Any], writable: bool) -> None:
        """Check an item that is no plain tensor in the place of one, and add it to the plan or to what is `fresh`."""
        current: Any = fresh[key] if key in fresh else node._entries.get(key)
        is_container = isinstance(current, Contract) and not isinstance(current, Tensor)
        if current is None and not self.adds:
            # TorchRL's processes write a step that has more entries than the specs, and the reference lets them.
            self.plan.absent = self.plan.absent or path
        elif is_container and not current._is_non_tensor and self.merges(item) and not self._replaces(current, item):
            current._plan_write(self, item, path)
        elif self.inplace and is_container and current._is_non_tensor:
            self.plan.steps.append((overwriting(current, node, key, item, path), ()))
        elif self.inplace and isinstance(current, Tensor):
            self.plan.copy(current, item, path)
        elif not self.adds:
            raise TypeError(f"entry {joined(path)!r} is a container and cannot be updated with {type(item).__name__}")
        elif not writable:
            raise_locked(f"update the entry {joined(path)!r}")
        else:
            value: Any = node._admit(item, path, self.non_blocking)
            if self.clone and (value is item or isinstance(value, Contract)):
                value = value.clone()
            fresh[key] = value


class Copy(Update):
    """The entries of a mapping or container, copied into those that are there: `update_` and `set_`."""

    adds = False
    inplace = True
    clone = False
    non_blocking = False
    is_leaf = None
    ignore_lock = False
    update_batch_size = False

    def __init__(self, plan: WritePlan | None = None) -> None:
        self.plan = WritePlan() if plan is None else plan


def has_other_size(container: Contract, source: Contract) -> bool:
    """Whether the batch dims that both have differ."""
    return any(own != new for own, new in zip(container._batch_size, source._batch_size))


def check_all_given(container: Any, source: Contract) -> None:
    """Raise unless a container of another batch size has all entries of the one that it takes the place of."""
    kept = [key for key in container.keys(True) if not source._has(path_of(key))]
    if kept:
        raise ShapeError(
            f"the batch size {list(container._batch_size)} cannot become {list(source._batch_size)}: Some keys of the "
            f"dest tensordict are not present in the source, {kept[:4]}"
        )


class Resize(Write):
    """A batch size, which is the `source`: for a container, and for nested ones whose own would not begin with it.

    Attributes:
        changes: the containers, and what becomes of their batch sizes once all has been checked.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[Contract, torch.Size]] = []

    def into(self, node: Any, source: torch.Size, prefix: Path) -> None:
        ndim = len(source)
        changes = self.changes
        changes.append((node, source))
        for name, value in node._entries.items():
            if type(value) is not Tensor and isinstance(value, Contract):
                if isinstance(value, Tensor):
                    changes.append((value, source))
                elif value._batch_size[:ndim] != source:
                    value._plan_write(self, source, (*prefix, name))  # type: ignore[attr-defined]
            elif ndim and ragged.shape_of(value)[:ndim] != source:
                raise RuntimeError(
                    f"entry {joined((*prefix, name))!r} has shape {list(ragged.shape_of(value))}, which is "
                    f"incompatible with the batch-size {list(source)}: it does not begin with it"
                )


def resize(node: Contract, size: torch.Size) -> None:
    """Set one container's batch size, known to fit its leaves; names of the dims that stay are kept."""
    names = node._names
    node._batch_size = size
    if names is not None:
        padded = (names + [None] * len(size))[: len(size)]
        node._names = padded if any(name is not None for name in padded) else None


def plain_pairs(mapping: object, source: object) -> tuple[list[Tensor], list[Tensor]] | None:
    """The entries of a container and those of a source under the same names, if all are plain tensors or parameters.

    By far the most frequent case, which is cheaper to look at as a whole than entry by entry.
    """
    given: object = source._entries if isinstance(source, Contract) else source
    if type(mapping) is not dict or type(given) is not dict:
        return None
    items: list[Any] = list(given.values())
    entries: list[Any] = list(map(mapping.get, given))
    kinds = {*map(type, entries), *map(type, items)}
    return (entries, items) if foreach.are_plain(kinds) else None


def alike(targets: list[Tensor], values: list[Tensor]) -> bool:
    """Whether tensors have the shapes of those that they are copied into."""
    try:
        return [target.shape for target in targets] == [value.shape for value in values]
    except RuntimeError:
        return False  # as far as torch can tell: a ragged tensor of the strided layout has no shape


def fitting(source: object, size: torch.Size) -> Mapping[str, Any] | None:
    """The entries of a source, if all are plain tensors that fit into a container of this batch size; `None` if not."""
    given: object = source
    if isinstance(source, Contract):
        given = source._entries
        if source._batch_size == size:
            size = torch.Size()  # the entries were checked when they were put there
    if type(given) is not dict or (given is source and {*map(type, given)} != _NAMES):
        return None
    return given if begin_with(given.values(), size) else None


def begin_with(values: Collection[Any], size: torch.Size) -> bool:
    """Whether all are plain tensors or parameters whose shapes begin with a batch size, which is all there is to check.

    By far the most frequent case, which is cheaper to look at as a whole than entry by entry.
    """
    if not foreach.are_plain({*map(type, values)}):
        return False
    ndim = len(size)
    first = size[0] if ndim else None
    try:
        # One batch dim is the common case: cutting shapes takes 130 ns.
        for value in values if ndim else ():
            if value.shape[0] != first or (ndim > 1 and value.shape[:ndim] != size):
                return False
    except (RuntimeError, IndexError):
        return False  # no dims, or a ragged tensor of the strided layout, which has no shape as far as torch can tell
    return True


def _store(node: Contract, entries: Mapping[str, Any]) -> None:
    """Add or replace entries that were checked."""
    nodes = [value for value in entries.values() if type(value) is not Tensor and is_node(value)]
    if node._locked:  # with `ignore_lock`
        for value in nodes:
            adopt(node, value)
    node._entries.update(entries)
    if node._names is None:
        for value in nodes:
            take_names(node, value)


def _copyable(target: Tensor, item: object, path: Path) -> Tensor:
    """`item` as a tensor that `target.copy_` takes, which broadcasts; raises naming `path` when it does not fit."""
    if not isinstance(item, Tensor):
        if isinstance(item, (Contract, Mapping)):
            raise TypeError(f"entry {joined(path)!r} is a tensor and cannot be updated with a container")
        item = to_tensor(item, path, None)
        if not item.ndim:
            return item
    shape = ragged.shape_of(item)
    if shape == target.shape:
        return item
    if target.is_nested or len(shape) > len(target.shape):
        raise ShapeError(
            f"entry {joined(path)!r} has shape {list(target.shape)} and cannot be updated in place with a value of "
            f"shape {list(shape)}"
        )
    check_expandable(shape, target.shape, path)
    return item


def check_expandable(shape: torch.Size, target: torch.Size, path: Path) -> None:
    """Raise unless a value of `shape` broadcasts to `target`."""
    if shape == target:
        return
    if len(shape) <= len(target) or all(n == 1 for n in shape[: len(shape) - len(target)]):
        tail = shape[-len(target) :] if target else ()
        if all(n in (1, m) for n, m in zip(reversed(tail), reversed(target))):
            return
    raise ShapeError(f"entry {joined(path)!r}: a value of shape {list(shape)} does not broadcast to {list(target)}")


def raise_no_entry(path: Path, container: Contract) -> NoReturn:
    """Raise the error of a write in place to an entry that is not there; one of the container may have been meant."""
    known = {other[-1]: other for other, _ in container._walk()}
    hint = "".join(f"; did you mean {joined(known[name])!r}?" for name in nearest(path[-1], known, 1))
    raise KeyError(f"The key {joined(path)!r} was not found in the dest tensordict: use update to add it{hint}")
