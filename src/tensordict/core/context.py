"""Use containers as context managers: the end of a `with` block undoes the operation that made the container."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensordict.core import torch_internals as internals
from tensordict.core.contract import ContainerT, Contract, EntryStore, differ_in_keys, is_flat, is_node
from tensordict.core.equality import same_value
from tensordict.core.keys import Key, Path, joined, path_of
from tensordict.core.replacing import replacing

if TYPE_CHECKING:
    from typing_extensions import Self


def remember(result: ContainerT, source: Contract, undo: Callable[[ContainerT], object]) -> ContainerT:
    """Store on `result` that `undo(result)` restores the form of `source`. Returns `result`.

    The reference to the source is weak. Otherwise a loop that rebinds one name to view after view would keep every
    container alive. Compiled code cannot trace weak references, so it keeps a strong one. It also cannot compare
    addresses at the end of the block, so it stores the leaves that the operation made.
    """
    if torch.compiler.is_dynamo_compiling():
        result._undo = (source, undo, _list_leaves(result))
    else:
        result._undo = (weakref.ref(source), undo)
    return result


def remember_state(container: ContainerT, undo: Callable[[ContainerT], object]) -> ContainerT:
    """Store that `undo(container)` reverts a change of state, such as a lock. Returns `container`."""
    container._undo = (None, undo)
    return container


class _Before(NamedTuple):
    """The state at the beginning of a block.

    leaves: the leaf keys of the source, which the block writes back to.
    nodes: the keys of the nested containers of the container that the block uses.
    views: the entries of that container, if they are views of the source's tensors.
    made: in compiled code, its leaves at the time of the operation, as `_list_leaves` gives them.
    """

    leaves: set[Key]
    nodes: set[Key]
    views: dict[str, Any] | None = None
    made: dict[Key, list[Any]] | None = None


# The state before a block that changes the state of one container only, such as its lock.
_UNUSED = _Before(set(), set())


class BlockContext(Contract):
    """Support `with td.unlock_():`, `with td.view(-1) as flat:` and others, for the last operation on the container."""

    _blocks: list[tuple[Any, Callable[[Any], Any], _Before]] | None = None

    # A `with` block undoes this operation if the container was not returned by an operation that can be undone. If it
    # is `None`, such a block raises an error.
    _default_undo: tuple[Any, ...] | None = None

    def __enter__(self) -> Self:
        """Open a block. Its end undoes the operation that made this container.

        Raises:
            RuntimeError: the container does not come from an operation that can be undone, or the container that the
                operation was called on is gone.
        """
        pending, self._undo = self._undo or self._wrapped_container()._default_undo, None
        if pending is None:
            raise RuntimeError(
                "`with` needs an operation that can be undone, as in `with td.unlock_():` or "
                "`with td.view(-1) as flat:`; this container does not come from one"
            )
        source, undo, *made = pending
        if isinstance(source, weakref.ref):
            source = source()
            if source is None:
                raise RuntimeError(
                    "the container that this one was made from no longer exists, so writes in the block would be lost; "
                    "keep every step of a chain: with td.view(-1) as flat, flat.unsqueeze(0) as row:"
                )
        if source is None:
            before = _UNUSED
        elif made:
            before = _Before(_leaf_keys(source), _node_keys(self), None, *made)
        elif (
            getattr(undo, "is_view", False)
            and _is_plain(source)
            and _is_plain(self)
            and _has_same_pointers(self, source)
        ):
            before = _Before(set(source._entries), set(), dict(self._entries))
        else:
            before = _Before(_leaf_keys(source), _node_keys(self))
        if self._blocks is None:
            self._blocks = []
        self._blocks.append((source, undo, before))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Undo the operation, and keep what the block wrote, also after an exception."""
        assert self._blocks is not None
        source, undo, (leaves, nodes, views, made) = self._blocks.pop()
        if not self._blocks:
            del self._blocks
        written = self
        if views is not None and _is_plain(source) and _is_plain(self):
            # Entries that are still the same views have written through to the source already.
            changed = {name: value for name, value in self._entries.items() if value is not views.get(name)}
            written = self._build(changed, self._batch_size, self._device, self._names)
            leaves = {name for name in views if name not in self._entries}
        restored = undo(written)
        if source is None:
            return
        kept = set()
        if made:
            kept = {key for key, leaves in _list_leaves(self).items() if _are_same(leaves, made.get(key, []))}
        source._write_back(restored, leaves, nodes - _node_keys(self) if nodes else nodes, kept)

    def _write_back(self, restored: Any, leaves: set[Key], gone_nodes: set[Key], kept: Collection[Key] = ()) -> None:
        """Write `restored` back into this container: delete missing entries, and write new and moved ones.

        `leaves` are the leaf keys of this container at the beginning of the block. `gone_nodes` are the nested
        containers that the block deleted. Compiled code passes `kept`: the keys whose leaves are still the tensors that
        the operation made.
        """
        members = self._members()
        if members and restored._batch_size == self._batch_size:
            with self._at_once():
                for member, piece in zip(members, self._pieces_of(restored), strict=True):
                    if piece._members() is not None and member._members() is None:
                        piece = _make_dense(member, piece, kept)
                    member._write_back(piece, _leaf_keys(member), gone_nodes, kept)
            return
        entries = self._entries
        if isinstance(entries, EntryStore) and (written := entries.write_back(restored, leaves)):
            restored, leaves = restored.exclude(*written), leaves - written
        with replacing() if isinstance(entries, EntryStore) else nullcontext():
            _write_back(self, restored, leaves, gone_nodes, kept)


def _is_plain(container: Any) -> bool:
    """Return whether the container is a plain dict of tensors, without nesting and without a wrapper."""
    entries = container._entries
    return isinstance(entries, dict) and container._wrapped_container() is container and is_flat(entries)


def _has_same_pointers(views: Any, source: Any) -> bool:
    """Return whether the entries have the same names, order and data pointers as the source's, as whole views do."""
    mine, theirs = [
        [(name, value.data_ptr()) for name, value in container._entries.items()] for container in (views, source)
    ]
    return mine == theirs


def _leaf_keys(container: Any) -> set[Key]:
    """Return the keys of the leaves. A tensorclass may have a field called `keys`."""
    return set(container._wrapped_container().keys(True, True))


def _node_keys(container: Any) -> set[Key]:
    """Return the keys of the nested containers."""
    return set(container._wrapped_container().keys(True)) - _leaf_keys(container)


def _write_back(source: Any, restored: Any, leaves: set[Key], gone_nodes: set[Key], kept: Collection[Key] = ()) -> None:
    """Implement :meth:`BlockContext._write_back` for a container without members."""
    # Reading a lazy stack makes a new tensor each time, so nested lazy stacks are updated member by member.
    stacks = list(_iter_stacks(source, restored))
    paths = {path for path, _, _ in stacks}
    for path, node, piece in stacks:
        below = [_select_below(path, keys) for keys in (leaves, gone_nodes, kept)]
        node._write_back(piece, *below)
    after = _leaf_keys(restored)
    # If a container has replaced a leaf under the same key, or a leaf a container, overwrite the entry. This keeps the
    # order of the keys.
    for key in (key for key in leaves - after if not (paths and _is_under_any(key, paths))):
        become = restored._peek(path_of(key))
        if _is_branch(become):
            source.set(key, become)
        elif become is None and not _is_below(key, after) and source._has(path_of(key)):
            source.del_(key)
    for key in sorted(gone_nodes, key=len):
        if key not in after and not _is_below(key, after) and isinstance(source.get(key, None), Contract):
            source.del_(key)
    items = restored.items(True)
    if paths:
        # Do not read the leaves of lazy stacks.
        items = [(key, restored.get(key)) for key in restored.keys(True) if not _is_under_any(key, paths)]
    added = {path_of(key) for key, value in items if is_node(value) and not source._has(path_of(key))}
    changed = {}
    for key, value in items:
        path = path_of(key)
        if any(path[:depth] in added for depth in range(1, len(path))):
            continue  # it comes with its container
        if path in added or (not _is_branch(value) and _differs(source._peek(path), value, key in kept)):
            changed[key] = value
    if changed:
        source.update(changed)


def _is_branch(value: Any) -> bool:
    """Return whether an entry is a container of entries; a container for a non-tensor value is not."""
    return is_node(value) and not value._is_non_tensor


def _differs(current: object, value: object, kept: bool = False) -> bool:
    """Return whether an entry was replaced.

    Compiled code cannot compare addresses. It passes `kept`: the value comes from the very tensor that the operation
    made from `current`. Unless that tensor was a copy, both have the same base.
    """
    if current is None or current is value:
        return current is None
    if (
        isinstance(current, Contract)
        and isinstance(value, Contract)
        and current._is_non_tensor
        and value._is_non_tensor
    ):
        return not same_value(current.tolist(), value.tolist())  # type: ignore[attr-defined]
    if kept and _same_form(current, value) and _base_of(current) is _base_of(value):
        return False
    return not same_memory(current, value)


def _base_of(tensor: Any) -> Any:
    base = internals.base_of(tensor)
    return tensor if base is None else base


def _iter_stacks(source: Contract, restored: Contract, prefix: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield the outermost nested lazy stacks of `source`, each with its path and its restored counterpart."""
    for name, node in source._structure().items():
        piece = restored._node(name) if isinstance(node, Contract) else None
        if piece is None:
            continue
        if node._batch_size == piece._batch_size and node._pair_members(piece) is not None:
            yield (*prefix, name), node, piece
        else:
            yield from _iter_stacks(node, piece, (*prefix, name))


def _list_leaves(container: Any) -> dict[Key, list[Any]]:
    """Return the leaves of each nested key. An entry of a lazy stack has one leaf for each member."""
    found: dict[Key, list[Any]] = {}
    if (members := container._members()) is not None:
        for member in members:
            for key, leaves in _list_leaves(member).items():
                found.setdefault(key, []).extend(leaves)
        return found
    for name, value in container._entries.items():
        if _is_branch(value):
            found.update((joined((name, *path_of(key))), leaves) for key, leaves in _list_leaves(value).items())
        else:
            found[name] = [value]
    return found


def _are_same(leaves: list[Any], others: list[Any]) -> bool:
    return len(leaves) == len(others) and all(leaf is other for leaf, other in zip(leaves, others, strict=True))


def _select_below(path: Path, keys: Collection[Any]) -> set[Key]:
    """Return the keys below a path, relative to it."""
    rests = [key[len(path) :] for key in keys if isinstance(key, tuple) and key[: len(path)] == path]
    return {joined(rest) for rest in rests if rest}


def _is_under_any(key: Key, paths: set[Path]) -> bool:
    """Return whether a nested key equals one of the paths, or lies below one."""
    path = path_of(key)
    return any(path[:i] in paths for i in range(1, len(path) + 1))


def _is_below(key: Key, leaves: set[Key]) -> bool:
    """Return whether a parent of a nested key is a leaf."""
    return isinstance(key, tuple) and any((key[0] if i == 1 else key[:i]) in leaves for i in range(1, len(key)))


def elements_of(container: Any) -> list[Any]:
    """Return all elements of the batch, last dim fastest, as views; `reshape` may copy."""
    found = [container]
    for _ in container._batch_size:
        found = [element for part in found for element in part.unbind(0)]
    return found


def _make_dense(member: Any, stack: Any, kept: Collection[Key]) -> Any:
    """Make a dense container from a lazy stack of the elements of `member`.

    A leaf that still consists of views of the member's leaf becomes the member's leaf itself. Compiled code passes the
    keys of these leaves as `kept`, see `_differs`.
    """
    elements, parts = elements_of(member), elements_of(stack)
    out = stack.empty(recurse=True)._dense()
    for key in stack._wrapped_container().keys(True, True):
        if member._has(path_of(key)) and all(
            not _differs(element.get(key), part.get(key), key in kept)
            for element, part in zip(elements, parts, strict=True)
        ):
            out._write(path_of(key), member.get(key))
        else:
            out._write(path_of(key), stack.get(key))
    _keep_uneven_stacks(member, stack, out)
    return out


def _keep_uneven_stacks(member: Any, stack: Any, dense: Any) -> None:
    """Replace the nested containers of `dense` whose elements have different keys by lazy stacks.

    Args:
        member: the container that they are written back to, which has lazy stacks at these places.
        stack: a lazy stack of the elements of `member`.
        dense: the dense form of `stack`, which lacks entries of single elements.
    """
    for name, node in member._structure().items():
        if _is_branch(node) and (piece := stack._node(name)) is not None:
            if node._members() is None:
                _keep_uneven_stacks(node, piece, dense._node(name))
            elif differ_in_keys(elements_of(piece)):
                dense._entries[name] = piece


def same_memory(a: object, b: object) -> bool:
    """Return whether two leaves are the same elements in the same memory; always False in compiled code."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return _same_form(a, b) and a.data_ptr() == b.data_ptr()  # type: ignore[attr-defined]


def _same_form(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()
