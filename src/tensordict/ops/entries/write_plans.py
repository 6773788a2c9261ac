"""Writes in two steps: a `Write` checks all values and fills a `WritePlan`; running the plan changes the container.

A write that fails its checks therefore changes nothing. `update`, `update_`, `set_` and assignments use this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tensordict.core import foreach, ragged
from tensordict.core.contract import Contract, EntryStore, differ_in_keys, is_node, named_error
from tensordict.core.exceptions import ShapeError, nearest, refuse_stored
from tensordict.core.indices import is_basic
from tensordict.core.key_views import IsLeaf
from tensordict.core.keys import Path, joined, path_in, path_of
from tensordict.core.torch_internals import is_view
from tensordict.memory.file_source import FileSource
from tensordict.memory.sparse_files import make_room
from tensordict.ops.dims.naming import take_names
from tensordict.ops.entries.locking import lock_like, raise_locked
from tensordict.ops.entries.numbers import make_overwrite, to_tensor
from tensordict.ops.entries.update_sources import nest_under

_NAMES = {str}


class WritePlan:
    """The checked writes of one call. `run` carries them out in the order of these attributes.

    Attributes:
        targets, values: tensors, and the value to copy into each; all copies are one call.
        separates: true if `run` looks for values that share memory with a target, and copies them first.
        assigned: tensors, an index into each, and the value to assign there.
        steps: functions and their arguments, called in this order.
        parts: other plans that run as steps of this one.
        absent: the first path that the source has, with a tensor or value, and the container does not; or `None`.
    """

    parts: tuple[WritePlan, ...] = ()
    absent: Path | None = None

    def __init__(self, separates: bool = False) -> None:
        self.separates = separates
        self.targets: list[Tensor] = []
        self.values: list[Any] = []
        self.assigned: list[tuple[Tensor, Any, Any]] = []
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def copy(self, target: Tensor, item: Any, path: Path) -> None:
        """Plan to copy `item` into a tensor; it is broadcast. Raises an error with `path` if it does not fit."""
        if not target.is_nested or not isinstance(item, Tensor):
            item = _make_copyable(target, item, path)
        if not target.is_nested:
            self.targets.append(target)
            self.values.append(item)
            return
        try:
            refuse_stored(target)
            targets, values = ragged.pair_copies(target, item)
        except ShapeError as error:
            raise named_error(error, path) from None
        self.targets += targets
        self.values += values

    def add_part(self) -> WritePlan:
        """Add an empty plan that runs as a step of this one.

        It runs after earlier parts, so its copies may read tensors that an earlier part writes.
        """
        part = WritePlan()
        self.parts += (part,)
        self.steps.append((part.run, ()))
        return part

    def run(self, container: Any = None, non_blocking: bool = False) -> None:
        """Write everything. Errors name entries of `container`, the container that is written to.

        Raises:
            RuntimeError: a tensor is a leaf of the autograd graph that requires grad, or expanded; nothing has changed.
        """
        if container is not None and container._holds_parameters and torch.is_grad_enabled():
            with torch.no_grad():
                self.run(container, non_blocking)
            return
        entries = None if container is None else container._entries
        if type(entries) is not dict and isinstance(entries, EntryStore) and (block := entries.together()) is not None:
            with block:
                self.run(container, non_blocking)
            return
        if not torch.compiler.is_compiling() and self._may_overlap():
            self._separate_values()
        if FileSource.any_sparse:
            make_room(self._list_places(), container)
        if self.assigned or self.parts:
            places = self._list_places()
            foreach.refuse_graph_leaves([target for target, _ in places], container)
            # Torch refuses to write into an expanded part of a leaf. At an index tensor it only warns.
            gaps = [(t, at) for t, at in places if t.layout is torch.strided and not t.is_contiguous() and is_basic(at)]
            if gaps:
                foreach.refuse_expanded([target if at is None else target[at] for target, at in gaps], container)
        if self.targets:
            foreach.copy_(self.targets, self.values, non_blocking, container)
        for target, at, item in self.assigned:
            foreach.assign(target, at, item)
        for step, operands in self.steps:
            step(*operands)

    def _may_overlap(self) -> bool:
        """Return whether values may share memory with targets: views, and members of a lazy stack."""
        if self.values and _may_share(self.values, self.separates):
            return True
        return self.separates and (
            bool(self.parts) or any(isinstance(item, Tensor) and is_view(item) for _, _, item in self.assigned)
        )

    def _separate_values(self) -> None:
        """Copy each value that shares memory with a target, so that no write changes a value that is written later.

        Torch notices this for a single copy only, and only between tensors without gaps.
        """
        plans, targets, values = [self], self.targets, self.values
        if self.parts or self.assigned:
            plans += self._list_parts()
            targets = [target for plan in plans for target in plan.targets]
            values = [value for plan in plans for value in plan.values]
            for plan in plans:
                targets += [target for target, _, _ in plan.assigned]
                values += [item for _, _, item in plan.assigned if isinstance(item, Tensor)]
        if not foreach.share_storage(targets, values):
            return
        copied = sum(len(plan.targets) for plan in plans)
        # A value that is the target itself, as in `td[0] += 1`, needs no copy. A meta tensor has no elements.
        pairs = zip(targets[:copied], values, strict=False)
        moved = [value for target, value in pairs if not (target.is_meta or target.is_set_to(value))]
        shared = foreach.find_overlapping(targets, [*moved, *values[copied:]])
        for plan in plans:
            plan.values = [value.clone() if id(value) in shared else value for value in plan.values]
            plan.assigned = [
                (target, at, item.clone() if id(item) in shared else item) for target, at, item in plan.assigned
            ]

    def _list_parts(self) -> list[WritePlan]:
        """Return all plans that run as steps of this one, or of one of its parts."""
        return [inner for part in self.parts for inner in (part, *part._list_parts())]

    def _list_places(self) -> list[tuple[Tensor, Any]]:
        """Return all tensors to write into, each with the index of the written part, or `None` for the whole tensor."""
        found = [(target, None) for target in self.targets] + [(target, at) for target, at, _ in self.assigned]
        for part in self.parts:
            found += part._list_places()
        return found


class Write:
    """The base of all writes. `into` checks the values for one container and adds them to the plan.

    `Writing._plan_write` calls it. A lazy stack passes the write on to its members, and a wrapper to the container
    inside.

    Attributes:
        plan: the plan that `into` fills.
        adds: true if missing entries are added.
        inplace: true if existing entries keep their memory.
        refused: a container that `copy_plain` or `store_plain` refused, so that no second attempt is made.
    """

    plan: WritePlan
    adds: bool = False
    inplace: bool = True
    refused: Any = None

    def into(self, node: Any, source: Any, prefix: Path) -> None:
        """Check the values for a container, and add their writes to the plan.

        Args:
            node: the container, which holds its entries itself.
            source: the values; each subclass defines their form.
            prefix: the path of the container, for errors.
        """
        raise NotImplementedError


class Update(Write):
    """Adds the entries of a mapping or container, replaces existing entries, or (with `inplace`) copies into them."""

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
        """Return whether `item` is merged into a nested container, instead of replacing it."""
        if self.is_leaf is not None and self.is_leaf(type(item)):
            return False
        if isinstance(item, Contract):
            # A value has no entries to merge.
            return not isinstance(item, Tensor) and not (item._is_non_tensor and self.adds)
        return isinstance(item, Mapping)

    def _replaces(self, current: Any, item: object) -> bool:
        """Return whether `item` replaces a nested container because it has another batch size (`update_batch_size`)."""
        if not self.update_batch_size or not isinstance(item, Contract) or not batch_sizes_differ(current, item):
            return False
        check_source_complete(current, item)
        return True

    def into(self, node: Any, source: Any, prefix: Path) -> None:
        plan, inplace, tries = self.plan, self.inplace, node is not self.refused
        targets, values = plan.targets, plan.values
        merging = self.is_leaf is None and not self.update_batch_size
        if tries and inplace and merging and pair_plain(node, source, targets, values):
            return
        mapping, adds = node._entries, self.adds
        writable = not adds or self.ignore_lock or not node._locked
        trusting = writable and not inplace and not self.clone
        size, device = node._batch_size, node._device
        if trusting and tries and (given := take_plain_entries(source, size, device)) is not None:
            plan.steps.append((mapping.update, (given,)))
            return
        ndim, first = len(size), size[0] if len(size) else None
        fresh: dict[str, Any] = {}
        for key, item in source.items():
            if type(key) is not str:
                key, *rest = path_in(key, prefix)
                item = nest_under(rest, item)
            elif type(item) is Tensor:
                try:
                    if trusting:
                        # The same check as in `have_batch_size`.
                        if (device is None or item.device == device) and (
                            not ndim or (item.shape[0] == first and (ndim == 1 or item.shape[:ndim] == size))
                        ):
                            fresh[key] = item
                            continue
                    elif inplace:
                        target = mapping.get(key)
                        if isinstance(target, Tensor) and item.shape == target.shape:
                            targets.append(target)
                            values.append(item)
                            continue
                except (RuntimeError, IndexError):
                    pass  # no dims; or a ragged tensor of the strided layout, which has no `shape`
            self._plan_entry(node, key, item, (*prefix, key), fresh, writable)
        if fresh:
            plan.steps.append((_store_entries, (node, fresh)))

    def _plan_entry(self, node: Any, key: str, item: Any, path: Path, fresh: dict[str, Any], writable: bool) -> None:
        """Check an item that `into` has no shortcut for, and add it to the plan or to `fresh`, the entries to store."""
        current: Any = fresh[key] if key in fresh else node._entries.get(key)
        is_container = isinstance(current, Contract) and not isinstance(current, Tensor)
        if current is None and not self.adds:
            # TorchRL's processes write steps with more entries than their specs, and the reference allows this.
            if self.plan.absent is None and _has_leaves(item):
                self.plan.absent = path
        elif is_container and not current._is_non_tensor and self.merges(item) and not self._replaces(current, item):
            if self.adds and current._members() is None and _has_uneven_members(item):
                # Only a lazy stack can hold the entries that some members lack.
                if not writable or (current._locked and not self.ignore_lock):
                    raise_locked(f"update the entry {joined(path)!r}")
                if item._batch_size[: len(current._batch_size)] != current._batch_size:
                    raise ShapeError(
                        f"entry {joined(path)!r}: a lazy stack of batch size {list(item._batch_size)}, whose members "
                        f"have different keys, cannot update a container of batch size {list(current._batch_size)}"
                    )
                current = fresh[key] = current.to_lazystack(item.stack_dim)
            current._plan_write(self, item, path)
        elif self.inplace and is_container and current._is_non_tensor:
            self.plan.steps.append((make_overwrite(current, node, key, item, path), ()))
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
    """Copies the entries of a mapping or container into existing entries, for `update_` and `set_`."""

    adds = False
    inplace = True
    clone = False
    non_blocking = False
    is_leaf = None
    ignore_lock = False
    update_batch_size = False

    def __init__(self, plan: WritePlan | None = None) -> None:
        self.plan = WritePlan() if plan is None else plan


def _has_leaves(item: Any) -> bool:
    """Return whether an item is a tensor or a value, or contains one; a lazy stack also in some members only."""
    if is_node(item):
        return item._is_non_tensor or any(map(_has_leaves, item._members() or item._structure().values()))
    return not isinstance(item, Mapping) or any(map(_has_leaves, item.values()))


def _has_uneven_members(item: Any) -> bool:
    """Return whether an item is a lazy stack with entries that only some of its members have."""
    return isinstance(item, Contract) and differ_in_keys(item._members() or ())


def batch_sizes_differ(container: Contract, source: Contract) -> bool:
    """Return whether the batch sizes differ in the dims that both have."""
    return any(own != new for own, new in zip(container._batch_size, source._batch_size))


def check_source_complete(container: Any, source: Contract) -> None:
    """Raise if `source`, which has another batch size and replaces `container`, does not have all of its entries."""
    parts = container._members() or [container]
    kept = [key for part in parts for key in part._wrapped_container().keys(True) if not source._has(path_of(key))]
    if kept:
        raise ShapeError(
            f"the batch size {list(container._batch_size)} cannot become {list(source._batch_size)}: Some keys of the "
            f"dest tensordict are not present in the source, {kept[:4]}"
        )


class Resize(Write):
    """Sets the batch size of a container, and of each nested container whose batch size does not begin with it.

    Attributes:
        changes: the containers and their new batch sizes, to be set after all checks.
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
    """Set the batch size of one container without checks. The remaining dims keep their names."""
    names = node._names
    node._batch_size = size
    if names is not None:
        padded = (names + [None] * len(size))[: len(size)]
        node._names = padded if any(name is not None for name in padded) else None


def store_plain(node: Any, source: object) -> bool:
    """Store the entries of a container or dict in a tree of containers, if all are plain tensors that fit.

    Returns `False`, and stores nothing, if an entry needs another check. Most updates need none: two leaves take 0.8 us
    here, and 1.9 us with an `Update`.
    """
    found: list[tuple[Any, Mapping[str, Any]]] = []
    if not _gather_plain(type(node), node, source, found):
        return False
    for entries, given in found:
        entries.update(given)
    return True


def _gather_plain(kind: Any, node: Any, source: Any, found: list[tuple[Any, Mapping[str, Any]]]) -> bool:
    """Append the entries of each container, and the new ones, for `store_plain`. Returns `False` at the first misfit.

    Args:
        kind: the class of the containers.
        node: a container of this class.
        source: a container of this class, or a dict.
        found: the list to append to.
    """
    entries, size, device = node._entries, node._batch_size, node._device
    if node._locked or not isinstance(entries, dict):
        return False
    few = False
    if type(source) is kind:
        checked = source._batch_size == size and (device is None or source._device == device)
        source = source._entries
        if checked and foreach.are_plain({*map(type, source.values())}):
            found.append((entries, source))
            return True
    elif type(source) is dict:  # Another mapping may make its values when they are read.
        few = len(source) < 5
    else:
        return False
    # A look at all types takes 0.3 us. Without it, most checks of a source with a string at its end would be in vain.
    if not few and not {*map(type, source.values())} <= {Tensor, Parameter, dict, kind}:
        return False
    ndim = len(size)
    first = size[0] if ndim else None
    flat = True
    try:
        for key, item in source.items():
            if type(item) is Tensor or type(item) is Parameter:
                if (
                    type(key) is not str
                    # One batch dim is the common case. Comparing a slice of the shape would take 130 ns.
                    or (ndim == 1 and item.shape[0] != first)
                    or (ndim > 1 and item.shape[:ndim] != size)
                    or (device is not None and item.device != device)
                ):
                    return False
            elif type(child := entries.get(key)) is kind and _gather_plain(kind, child, item, found):
                flat = False
            else:
                return False
    except (RuntimeError, IndexError):
        return False  # no dims; or a ragged tensor of the strided layout, which has no `shape`
    found.append((entries, source if flat else {key: item for key, item in source.items() if isinstance(item, Tensor)}))
    return True


def copy_plain(node: Any, source: object, non_blocking: bool = False, at: Any = None) -> bool:
    """Copy the leaves of a container or dict into the same leaves of `node`, or into their parts at a basic index.

    Returns `False`, and copies nothing, if `pair_plain` refuses them, or if a value may share memory with a leaf. Most
    copies need no other check.
    """
    targets: list[Tensor] = []
    values: list[Tensor] = []
    if node._holds_parameters or not pair_plain(node, source, targets, values, at):
        return False
    if not values:
        return True
    looks = not torch.compiler.is_compiling() and _may_share(values, at is not None)
    if looks and foreach.share_storage(targets, values):
        return False
    # Sparse files need no room here, because their tensors are mapped ones.
    foreach.copy_(targets, values, non_blocking, node, plain=True)
    return True


def pair_plain(node: Any, source: object, targets: list[Tensor], values: list[Tensor], at: Any = None) -> bool:
    """Pair the leaves of a container or mapping with the same leaves of `node`, or with their parts at `at`.

    Returns `False`, and appends nothing, unless all of them are plain tensors or parameters whose shapes agree, and
    each nested container is of the class of `node`. In this most frequent case, leaves need no other check.
    """
    start = len(targets)
    given = source._entries if isinstance(source, Contract) else source
    try:
        fits = _pair_plain(type(node), node._entries, given, targets, values, at is None)
        if fits and at is not None:
            targets[start:] = [target[at] for target in targets[start:]]
            fits = [part.shape for part in targets[start:]] == [value.shape for value in values[start:]]
    except ragged.REFUSALS:
        fits = False  # a ragged tensor of the strided layout has neither `shape` nor views
    if not fits:
        del targets[start:], values[start:]
    return fits


def _pair_plain(kind: Any, mapping: Any, given: Any, targets: list[Any], values: list[Any], whole: bool) -> bool:
    """Append the pairs for `pair_plain`. Returns `False` at the first entry that does not qualify.

    Args:
        kind: the class of nested containers.
        mapping, given: the entries of the container, and the mapping of new values.
        targets, values: the lists to append to.
        whole: compare the shapes of the leaves.
    """
    if not isinstance(mapping, dict) or not isinstance(given, dict):
        return False
    find = mapping.get
    entry: Any
    for name, item in given.items():
        entry = find(name)
        if type(entry) is not Tensor or type(item) is not Tensor:
            if type(entry) is kind:
                if type(item) is kind:
                    item = item._entries
                if not _pair_plain(kind, entry._entries, item, targets, values, whole):
                    return False
                continue
            if not foreach.are_plain({type(entry), type(item)}):
                return False
        if whole and entry.shape != item.shape:
            return False
        targets.append(entry)
        values.append(item)
    return True


def _may_share(values: Sequence[Tensor], separates: bool) -> bool:
    """Return whether values may share memory with targets: views, and members of a lazy stack.

    An update copies from other containers, or from views of this one: the first value tells. Others, with `separates`,
    may copy from a mixture.
    """
    return True in map(is_view, values) if separates else is_view(values[0])


def take_plain_entries(
    source: object, size: torch.Size, device: torch.device | None = None
) -> Mapping[str, Any] | None:
    """Return the entries of a source, if all are plain tensors that fit a container, else `None`.

    Args:
        source: a container or a mapping.
        size, device: of the container that takes the entries.
    """
    if isinstance(source, Contract):
        given: object = source._entries
        if not isinstance(given, dict):
            return None
        # A source of the same batch size and device has checked its entries.
        if source._batch_size == size and (device is None or source._device == device):
            return given if foreach.are_plain({*map(type, given.values())}) else None
    else:
        given = source
        if type(given) is not dict or {*map(type, given)} != _NAMES:
            return None
    if not have_batch_size(given.values(), size):
        return None
    if device is not None and any([value.device != device for value in given.values()]):  # noqa: C419 (faster)
        return None
    return given


def have_batch_size(values: Collection[Any], size: torch.Size) -> bool:
    """Return whether all values are plain tensors or parameters whose shapes begin with a batch size.

    Such values need no further checks. In this most frequent case, one check of all values is faster than a check of
    each.
    """
    if not foreach.are_plain({*map(type, values)}):
        return False
    ndim = len(size)
    first = size[0] if ndim else None
    try:
        # One batch dim is the common case. Comparing a slice of the shape would take 130 ns.
        for value in values if ndim else ():
            if value.shape[0] != first or (ndim > 1 and value.shape[:ndim] != size):
                return False
    except (RuntimeError, IndexError):
        return False  # no dims; or a ragged tensor of the strided layout, which has no `shape`
    return True


def _store_entries(node: Contract, entries: Mapping[str, Any]) -> None:
    """Add or replace entries, as a step of a plan. They have been checked."""
    nodes = [value for value in entries.values() if type(value) is not Tensor and is_node(value)]
    if node._locked:  # with `ignore_lock`
        for value in nodes:
            lock_like(node, value)
    node._entries.update(entries)
    if node._names is None:
        for value in nodes:
            take_names(node, value)


def _make_copyable(target: Tensor, item: object, path: Path) -> Tensor:
    """Return `item` as a tensor that broadcasts to `target`. Raises an error with `path` if it does not."""
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
    """Raise if a value of shape `shape` does not broadcast to the shape `target`."""
    if shape == target:
        return
    if len(shape) <= len(target) or all(n == 1 for n in shape[: len(shape) - len(target)]):
        tail = shape[-len(target) :] if target else ()
        if all(n in (1, m) for n, m in zip(reversed(tail), reversed(target))):
            return
    raise ShapeError(f"entry {joined(path)!r}: a value of shape {list(shape)} does not broadcast to {list(target)}")


def raise_no_entry(path: Path, container: Contract) -> NoReturn:
    """Raise the error for an in-place write to a missing entry. It suggests a similar key of the container."""
    known = {other[-1]: other for other, _ in container._walk()}
    hint = "".join(f"; did you mean {joined(known[name])!r}?" for name in nearest(path[-1], known, 1))
    raise KeyError(f"The key {joined(path)!r} was not found in the dest tensordict: use update to add it{hint}")
