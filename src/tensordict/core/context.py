"""Containers as context managers: an operation remembers how it is undone, and the end of the block undoes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensordict.core import torch_internals as internals
from tensordict.core.contract import ContainerT, Contract, EntryStore, is_flat, is_node
from tensordict.core.equality import same_value
from tensordict.core.keys import Key, Path, joined, path_of
from tensordict.core.replacing import replacing

if TYPE_CHECKING:
    from typing_extensions import Self


def remember(result: ContainerT, source: Contract, undo: Callable[[ContainerT], object]) -> ContainerT:
    """Note on `result` that `undo(result)` has the form of `source` again; returns `result`.

    The source is held weakly: a loop that rebinds one name to view after view would otherwise keep every container
    it went through alive. Compiled code, which cannot trace weak references, holds it strongly. It also notes the
    leaves that the operation made, because it cannot compare addresses at the end of the block.
    """
    if torch.compiler.is_dynamo_compiling():
        made = dict(result.items(True, True)) if result._members() is None else {}  # type: ignore[attr-defined]
        result._undo = (source, undo, made)
    else:
        result._undo = (weakref.ref(source), undo)
    return result


def remember_state(container: ContainerT, undo: Callable[[ContainerT], object]) -> ContainerT:
    """Note that `undo(container)` takes back a change of state, such as a lock; returns `container`."""
    container._undo = (None, undo)
    return container


class _Before(NamedTuple):
    """What there was when a block began.

    leaves: the keys of the leaves of the container that is written back to.
    nodes: the keys of the nested containers of the one that the block is over.
    views: the entries of the latter, where they are tensors and those of the former in another form.
    made: in compiled code, the leaves of the latter when the operation made them.
    """

    leaves: set[Key]
    nodes: set[Key]
    views: dict[str, Any] | None = None
    made: dict[Key, Any] | None = None


class BlockContext(Contract):
    """`with td.unlock_():`, `with td.view(-1) as flat:` ... over the operation that was called last."""

    _blocks: list[tuple[Any, Callable[[Any], Any], _Before]] | None = None

    # What a block undoes at its end where no operation came before it; without this, that is an error.
    _default_undo: tuple[Any, ...] | None = None

    def __enter__(self) -> Self:
        """Open a block at whose end the operation that made this container is undone.

        Raises:
            RuntimeError: when the container does not come from an operation that can be undone, or the container
                that the operation was called on is gone.
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
                    "the container that this one was made from is gone, so what is written in the block would appear "
                    "nowhere; keep every step of a chain: with td.view(-1) as flat, flat.unsqueeze(0) as row:"
                )
        if source is None:
            before = _Before(set(), set())
        elif made:
            before = _Before(set(source.keys(True, True)), _node_keys(self), None, *made)
        elif getattr(undo, "is_view", False) and _is_plain(source) and _is_plain(self) and _in_place(self, source):
            before = _Before(set(source._entries), set(), dict(self._entries))
        else:
            before = _Before(set(source.keys(True, True)), _node_keys(self))
        if self._blocks is None:
            self._blocks = []
        self._blocks.append((source, undo, before))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Undo the operation; what was written in the block is kept, also when it raised."""
        assert self._blocks is not None
        source, undo, (leaves, nodes, views, made) = self._blocks.pop()
        if not self._blocks:
            del self._blocks
        written = self
        if views is not None and _is_plain(source) and _is_plain(self):
            # Through what is still the view that it was, everything has been written already.
            changed = {name: value for name, value in self._entries.items() if value is not views.get(name)}
            written = self._build(changed, self._batch_size, self._device, self._names)
            leaves = {name for name in views if name not in self._entries}
        restored = undo(written)
        if source is None:
            return
        kept = set()
        if made:
            kept = {key for key, value in self.items(True, True) if value is made.get(key)}  # type: ignore[attr-defined]
        source._write_back(restored, leaves, nodes - _node_keys(self) if nodes else nodes, kept)

    def _write_back(self, restored: Any, leaves: set[Key], gone_nodes: set[Key], kept: Collection[Key] = ()) -> None:
        """Bring this container to the entries of `restored`: delete what has gone, write what is new or has moved.

        `leaves` are the leaves that this container had when the block began, `gone_nodes` the nested containers that
        were deleted in it. Compiled code gives `kept`: the leaves that are still the tensors the operation made.
        """
        members = self._members()
        if members and restored._batch_size == self._batch_size:
            with self._at_once():
                for member, piece in zip(members, self._pieces_of(restored), strict=True):
                    if piece._members() is not None and member._members() is None:
                        piece = _as_written(member, piece)
                    member._write_back(piece, set(member.keys(True, True)), gone_nodes)
            return
        entries = self._entries
        if isinstance(entries, EntryStore) and (written := entries.write_back(restored, leaves)):
            restored, leaves = restored.exclude(*written), leaves - written
        with replacing() if isinstance(entries, EntryStore) else nullcontext():
            _write_back(self, restored, leaves, gone_nodes, kept)


def _is_plain(container: Any) -> bool:
    """Whether all entries are tensors in a dict of the container's own."""
    entries = container._entries
    return type(entries) is dict and container._wrapped_container() is container and is_flat(entries)


def _in_place(views: Any, source: Any) -> bool:
    """Whether the entries, in their order, begin where those of the source do, as views of another form begin."""
    mine, theirs = [
        [(name, value.data_ptr()) for name, value in container._entries.items()] for container in (views, source)
    ]
    return mine == theirs


def _node_keys(container: Any) -> set[Key]:
    """The keys of the nested containers."""
    return set(container.keys(True)) - set(container.keys(True, True))


def _write_back(source: Any, restored: Any, leaves: set[Key], gone_nodes: set[Key], kept: Collection[Key] = ()) -> None:
    """See :meth:`BlockContext._write_back`."""
    # What is stacked when it is read looks new to every reader: nested lazy stacks are brought up to date by members.
    stacks = list(_stacks(source, restored))
    paths = {path for path, _, _ in stacks}
    for path, node, piece in stacks:
        node._write_back(piece, _below(path, leaves), _below(path, gone_nodes))
    after = set(restored.keys(True, True))
    # Where a node made way for a leaf, or a leaf for a node, the entry is exchanged and keeps its place.
    for key in (key for key in leaves - after if not (paths and _is_in(key, paths))):
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
        # What is in a stack is not read.
        items = [(key, restored.get(key)) for key in restored.keys(True) if not _is_in(key, paths)]
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
    """Whether an entry holds entries, which a value that is no tensor does not."""
    return is_node(value) and not value._is_non_tensor


def _differs(current: object, value: object, kept: bool = False) -> bool:
    """Whether an entry is another one than it was.

    Compiled code cannot compare addresses. It gives `kept`: `value` is made of the very tensor that the operation made
    of `current`. That one has the same base unless it is a copy.
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


def _stacks(source: Contract, restored: Contract, prefix: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """The outermost nested containers of `source` that consist of others, with what they have become."""
    for name, node in source._structure().items():
        piece = restored._node(name) if isinstance(node, Contract) else None
        if piece is None:
            continue
        if node._batch_size == piece._batch_size and node._paired(piece) is not None:
            yield (*prefix, name), node, piece
        else:
            yield from _stacks(node, piece, (*prefix, name))


def _below(path: Path, keys: set[Any]) -> set[Key]:
    """What is left of the keys that are below a path."""
    rests = [key[len(path) :] for key in keys if isinstance(key, tuple) and key[: len(path)] == path]
    return {joined(rest) for rest in rests if rest}


def _is_in(key: Key, paths: set[Path]) -> bool:
    """Whether a nested key is one of the paths, or below one."""
    path = path_of(key)
    return any(path[:i] in paths for i in range(1, len(path) + 1))


def _is_below(key: Key, leaves: set[Key]) -> bool:
    """Whether what leads to a nested key is a leaf now."""
    return isinstance(key, tuple) and any((key[0] if i == 1 else key[:i]) in leaves for i in range(1, len(key)))


def elements_of(container: Any) -> list[Any]:
    """All elements of the batch of a container, the last dim changing fastest; views, unlike those of `reshape`."""
    found = [container]
    for _ in container._batch_size:
        found = [element for part in found for element in part.unbind(0)]
    return found


def _as_written(member: Any, stack: Any) -> Any:
    """A lazy stack of the elements of `member` as a dense container, in which the leaves that are views of the
    member's are these themselves."""
    elements, parts = elements_of(member), elements_of(stack)
    out = stack.empty(recurse=True)._dense()
    for key in stack.keys(True, True):
        if member._has(path_of(key)) and all(
            same_memory(element.get(key), part.get(key)) for element, part in zip(elements, parts, strict=True)
        ):
            out._write(path_of(key), member.get(key))
        else:
            out._write(path_of(key), stack.get(key))
    return out


def same_memory(a: object, b: object) -> bool:
    """Whether two leaves are the same elements in the same memory; compiled code cannot know, and says no."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return _same_form(a, b) and a.data_ptr() == b.data_ptr()  # type: ignore[attr-defined]


def _same_form(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()
