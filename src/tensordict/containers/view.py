"""LazyView: the lazy result of `view`, `permute` and similar operations under `set_lazy_legacy(True)`."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.tensordict_base import FixedSize, TensorDictBase
from tensordict.core import pytree, registry
from tensordict.core.context import remember, remember_state
from tensordict.core.contract import (
    NOT_BACKED,
    Backing,
    Contract,
    Device,
    EntryStore,
    LeafFn,
    Names,
    is_flat,
    named_error,
    state_of,
)
from tensordict.core.keys import Path, path_of
from tensordict.core.settings import set_lazy_legacy
from tensordict.ops.dims.batch_ops import BatchOp, Reshape
from tensordict.ops.entries.locking import do_nothing

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.ops.collection import TensorCollection


class _ViewEntries(EntryStore, MutableMapping[str, Any]):
    """The entries of another container. Reads apply an operation on batch dims, and writes apply its inverse.

    `op` applies to the first batch dims of the source. Further batch dims are left alone.
    """

    __slots__ = ("_back", "op", "source")

    def __init__(self, source: object, op: BatchOp) -> None:
        self.source = source
        self.op = op
        # The inverse as a function of leaves, made at the first write.
        self._back: LeafFn | None = None

    def __getstate__(self) -> Any:
        return {"source": self.source, "forward": self.op.call(), "outer": self.op.old}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, *arguments = state["forward"]
        with set_lazy_legacy(True):
            view = getattr(TensorDict._make({}, state["outer"], None, None), name)(*arguments)
        self.source, self.op, self._back = state["source"], view._entries.op, None

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self.source._entries.get(name)
        return default if value is None else self.apply_op((name,), value)

    def __setitem__(self, name: str, value: Any) -> None:
        entries = self.source._entries
        if not isinstance(value, Contract):
            if self._back is None:
                self._back = self.op.inverse().leaf
            entries[name] = _apply_to_leaf(self._back, value, (name,))
        elif isinstance(value, Tensor):
            entries[name] = value._resized_along(self.op.old, len(self.op.size))  # type: ignore[attr-defined]
        elif isinstance(value, LazyView) and value._entries.op.same_as(self.op):
            entries[name] = value._source
        else:
            node = _apply_to_node(self.op.inverse(), value)
            # `_admit` gives the new node the dim names of the source.
            entries[name] = self.source._admit(node, (name,))

    def __delitem__(self, name: str) -> None:
        del self.source._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source._entries)

    def __len__(self) -> int:
        return len(self.source._entries)

    def __contains__(self, name: object) -> bool:
        return name in self.source._entries

    def values(self) -> ValuesView[Any]:
        return _ViewValues(self)

    def items(self) -> ItemsView[str, Any]:
        return _ViewItems(self)

    @property
    def shares(self) -> bool:  # type: ignore[override]
        # All lazy operations return views of leaves.
        entries = self.source._entries
        return type(entries) is dict or (isinstance(entries, EntryStore) and entries.shares)

    def structure(self) -> Mapping[str, Any]:
        # Returns the leaves of the source: only the keys are needed, and reshaping could fail.
        structure: Mapping[str, Any] = self.source._structure()
        if is_flat(structure):
            return structure
        apply_op = self.apply_op
        return {
            name: apply_op((name,), value) if isinstance(value, Contract) else value
            for name, value in structure.items()
        }

    def fact(self) -> str:
        name, *arguments = self.op.call()
        return f"op={name}({', '.join(map(repr, arguments))})"

    def read_items(self) -> Iterator[tuple[str, Any]]:
        """Iterate over names and entries. Each entry is read from the source once."""
        return ((name, self.apply_op((name,), value)) for name, value in self.source._entries.items())

    def apply_op(self, path: Path, value: Any) -> Any:
        """Apply the operation to an entry of the source. Errors name its `path`."""
        if type(value) is not Tensor and isinstance(value, Contract):
            if isinstance(value, Tensor):
                return value._resized_along(self.op.size, len(self.op.old))  # type: ignore[attr-defined]
            return _apply_to_node(self.op, value) if value._is_non_tensor else LazyView(value, self.op)
        return _apply_to_leaf(self.op.leaf, value, path)


# The views of `MutableMapping` would look up every name again.


class _ViewValues(ValuesView[Any]):
    _mapping: _ViewEntries

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._mapping.read_items())


class _ViewItems(ItemsView[str, Any]):
    _mapping: _ViewEntries

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._mapping.read_items()


@pytree.register
@registry.register
class LazyView(FixedSize, TensorDictBase):
    """The result of `view`, `permute`, `transpose`, `squeeze` and `unsqueeze` under `set_lazy_legacy(True)`.

    Reading an entry reads it from the source and reshapes it. Writing an entry, even a new one, reshapes it back and
    writes it to the source. The view shares the device and the lock of the source, and its batch size cannot be
    changed. Operations return plain `TensorDict`s. The inverse operation returns the source itself.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, set_lazy_legacy
        >>> td = TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3])
        >>> with set_lazy_legacy(True):
        ...     swapped = td.permute(1, 0)
        ...     assert swapped.permute(1, 0) is td
        >>> swapped["b"] = torch.zeros(3, 2, 5)
        >>> td["b"].shape
        torch.Size([2, 3, 5])
    """

    _is_over_another = True
    _size_reason = "a lazy view", "its source", "use td.copy(), a separate container over the same tensors"
    _entries: _ViewEntries
    # Saving a view stores its entries as a plain TensorDict.
    _stored_as = "TensorDict"
    # Operations return a TensorDict, because new entries have no source.
    _make = TensorDict._make

    def __init__(self, source: Any, op: BatchOp) -> None:
        self._source = source
        self._entries = _ViewEntries(source, op)
        size, old = source._batch_size, op.old
        self._size = op.size if size == old else op.size + size[len(old) :]
        remember_state(self, do_nothing)

    @classmethod
    def over(cls, source: Any, op: BatchOp) -> TensorCollection:
        """Apply `op` to `source` lazily. Returns a view, a lazy stack of views, or the source of a view if `op`
        inverts it."""
        if isinstance(source, LazyView) and op.same_as(source._entries.op.inverse()):
            return source._source  # type: ignore[no-any-return]
        members: Any = None if isinstance(op, Reshape) else source._members()
        found = op.on_members(source.stack_dim, len(members)) if members else None
        if found is None or found[1] is None:
            return cls(source, op)
        inner, dim = found
        views = [m if inner is None else m._on_batch(inner.with_size(m._batch_size), True) for m in members]
        return remember(source._restack(views, dim), source, op)  # type: ignore[no-any-return]

    def _build(self, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        return self._make(entries, batch_size, device, names)  # type: ignore[return-value]

    def __repr__(self) -> str:
        """Return the source and the operation."""
        source = repr(self._source).replace("\n", "\n    ")
        return f"LazyView(\n    source={source},\n    {self._entries.fact()})"

    def _find(self, key: object) -> Any:
        # Makes one view of the entry, instead of one for each container on the path.
        return self._entries.apply_op(path_of(key), self._source._find(key))

    # --- the state, shared with the source --------------------------------------------------------------------------

    @property
    def _names(self) -> Names | None:
        names = self._source._names
        if names is None:
            return None
        return _map_names(self._entries.op, names)

    @_names.setter
    def _names(self, names: Names | None) -> None:
        if names is not None and len(names) != len(self._size):
            self._refuse_size(torch.Size(self._size[: len(names)]))
        through = self._entries
        theirs = None if names is None else _map_names(through.op.inverse(), names)
        restored = theirs and _map_names(through.op, theirs)
        if names is not None and restored != names:
            raise RuntimeError(
                f"the names {names} of a lazy view do not fit its source, whose batch size is "
                f"{list(self._source._batch_size)}; name the dims of the source instead"
            )
        self._source._names = theirs

    _device: torch.device | None = state_of("_source", "_device", lambda self: self._source._device)
    _locked: bool = state_of("_source", "_locked", lambda self: self._source._locked)

    @property
    def _backing(self) -> Backing:
        # Leaves out the files of the source, because entries added to the view are in memory.
        return NOT_BACKED._replace(is_shared=self._source._is_shared)

    @_backing.setter
    def _backing(self, backing: Backing) -> None:
        self._source._is_shared = backing.is_shared


def _apply_to_leaf(fn: LeafFn, leaf: Tensor, path: Path) -> Any:
    """Apply an operation to a leaf. Errors name its path."""
    try:
        return fn(leaf)
    except RuntimeError as error:
        raise named_error(error, path) from error


def _apply_to_node(op: BatchOp, node: Contract) -> Any:
    """Apply an operation to the first batch dims of a container."""
    return node._map(op.leaf, op.size, len(op.old), op.rename, op.on_stack)


def _map_names(op: BatchOp, names: Names) -> Names | None:
    """Return the dim names after an operation; `None` if all are `None`."""
    batch_dims = len(op.old)
    renamed = op.rename(names[:batch_dims]) + names[batch_dims:]
    return renamed if any(name is not None for name in renamed) else None
