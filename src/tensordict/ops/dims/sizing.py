"""The mixin of `batch_size`, its other names, and `auto_batch_size_`; also in-place replacement of all leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import ContainerT, Contract, LeafFn, Names, Rename, distinct
from tensordict.core.exceptions import ShapeError
from tensordict.core.replacing import replacing
from tensordict.core.shapes import as_dim, as_size
from tensordict.ops.entries.locking import Locking, raise_locked
from tensordict.ops.entries.write_plans import resize
from tensordict.ops.entries.writing import Writing

if TYPE_CHECKING:
    from typing_extensions import Self

_Sizes = dict[str, Any]


class Sizing(Writing):
    """`batch_size` and its other names."""

    @property
    def batch_size(self) -> torch.Size:
        """The leading dims that all entries share.

        Assign another size to change the number of batch dims. The tensors do not change. A nested container gets the
        new size if its own size does not begin with it. If an entry does not fit, a `RuntimeError` names it and nothing
        changes. Also works on a locked container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3, 4)})
            >>> td.batch_size = [3]
            >>> td[0]["a"].shape
            torch.Size([4])
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: Any) -> None:
        self._rebatch(as_size(size))

    @property
    def shape(self) -> torch.Size:
        """The same as :attr:`batch_size`."""
        return self._batch_size

    @shape.setter
    def shape(self, size: object) -> None:
        self._rebatch(as_size(size))

    @property
    def batch_dims(self) -> int:
        """The number of batch dims."""
        return len(self._batch_size)

    @property
    def ndim(self) -> int:
        """The number of batch dims."""
        return len(self._batch_size)

    def dim(self) -> int:
        """Return the number of batch dims."""
        return len(self._batch_size)

    def ndimension(self) -> int:
        """Return the number of batch dims."""
        return len(self._batch_size)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the batch size, or the size of one batch dim.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict(batch_size=[3, 4]).size(-1)
            4

        Raises:
            IndexError: the dim is out of range.
        """
        return self._batch_size if dim is None else self._batch_size[as_dim(dim, len(self._batch_size))]

    def numel(self) -> int:
        """Return the number of elements of the batch, at least 1: the stack of two empty batches has two elements."""
        return max(1, self._batch_size.numel())

    def auto_batch_size_(self, batch_dims: int | None = None, keep_compliant_size: bool = False) -> Self:
        """Set the batch size to the longest one that fits all entries.

        Each nested container gets the longest size that fits its own entries.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3, 4, 5), "b": {"c": torch.zeros(3, 4, 6)}})
            >>> td.auto_batch_size_().batch_size, td.auto_batch_size_(batch_dims=1).batch_size
            (torch.Size([3, 4]), torch.Size([3]))

        Args:
            batch_dims: the largest number of batch dims, also in nested containers.
            keep_compliant_size: do not change nested containers whose batch size begins with the new one.

        Returns:
            this container. An empty container keeps its batch size.

        Raises:
            RuntimeError: a nested container cannot have the new batch size, for example a lazy stack that would lose
                its stack dim. Nothing changes then.
        """
        if batch_dims is not None and batch_dims < 0:
            raise ShapeError(f"batch_dims is the largest number of batch dims, got {batch_dims}")
        nested: _Sizes = {}
        size = _find_common_size(self, batch_dims, nested)
        if size is None:
            return self
        before: list[tuple[Contract, torch.Size, Names | None]] = []
        with self._at_once():
            try:
                _set_sizes(self, size, batch_dims, keep_compliant_size, nested, before)
            except RuntimeError:
                for node, old, names in reversed(before):
                    node._batch_size = old
                    if node._names is not names:
                        node._names = names
                raise
        return self


def replace_leaves(
    root: ContainerT, fn: LeafFn, size: torch.Size, batch_dims: int, rename: Rename | None
) -> ContainerT:
    """Replace every leaf by `fn(leaf)` in place; see `_map` for the other arguments.

    The leaves are replaced one at a time, so that memory never holds two copies of all.

    Raises:
        RuntimeError: a container of the tree is locked. Nothing changes then.
        NotImplementedError: a container of the tree is a lazy stack whose batch size would change. Likewise.
    """
    found: list[Any] = []
    _collect_nodes(root, found)
    nodes = list(distinct(found))
    for node in nodes:
        if isinstance(node, Locking) and node._locked:
            raise_locked("replace its entries in place")
        if node._members() is not None and size != root._batch_size[:batch_dims]:
            raise NotImplementedError(
                "the batch size of a lazy stack cannot change in place, because its members determine it: use "
                "inplace=False, or to_tensordict() first"
            )
    # Torch refuses many operations on ragged leaves, so they are called before the first entry changes.
    # Their results are kept by place. A file makes a new leaf at each read, so a later leaf can have the same id.
    ready: dict[tuple[int, str], Any] = {}
    for number, node in enumerate(nodes):
        # A lazy stack cannot stack ragged leaves. `_writable` does not read the other leaves of a file.
        for name, value in node._writable().items() if node._members() is None else ():
            if not isinstance(value, Contract) and value.is_nested:
                ready[number, name] = fn(value)
    with root._at_once(), replacing():
        for number, node in enumerate(nodes):
            for name in list(node._entries):
                value = node._entries[name]
                if not isinstance(value, Contract):
                    node._entries[name] = ready.pop(at) if (at := (number, name)) in ready else fn(value)
                elif value._is_non_tensor:
                    node._entries[name] = value._map(fn, size, batch_dims, rename)
                del value
            if node._names is not None:
                node._names = node._rename_dims(len(size), batch_dims, rename)
            node._batch_size = size + node._batch_size[batch_dims:]
    return root


def _collect_nodes(node: Contract, out: list[Any]) -> None:
    out.append(node)
    for value in node._structure().values():
        if isinstance(value, Contract) and not value._is_non_tensor:
            _collect_nodes(value, out)


def _find_common_size(node: Contract, limit: int | None, nested: _Sizes | None = None) -> torch.Size | None:
    """Return the longest size that the shapes of all leaves begin with; `None` without leaves.

    Args:
        node: a container.
        limit: the largest number of dims.
        nested: receives the sizes of nested containers that are stored and not made on reading: name -> (size, sizes
            of the containers in it).
    """
    common: torch.Size | None = None
    if members := node._members():
        # Entries that only some members have count as well.
        for size in (_find_common_size(member, None) for member in members):
            common = size if common is None else common if size is None else _common_prefix(common, size)
        dim: int = node.stack_dim
        return None if common is None else torch.Size((*common[:dim], len(members), *common[dim:])[:limit])
    # Ask a lazy stack only for the shape of an entry. Reading the entry fails if the members differ.
    structure = node._structure()
    made = structure is not node._entries
    for name, value in structure.items():
        shape: torch.Size | None
        if type(value) is Tensor and not made:
            # `_leading_size`, inlined, takes half the time.
            try:
                shape = value.shape[:limit] if limit is not None else value.shape
            except RuntimeError:
                shape = _leading_size(value)[:limit]
        elif not isinstance(value, Contract):
            shape = (_cut_at_uneven(node._shape_of(name)) if made else _leading_size(value))[:limit]
        elif isinstance(value, Tensor):
            shape = None  # An `UnbatchedTensor` fits any batch.
        elif value._is_non_tensor:
            # A single value fits any batch. A stack of values fits only its own batch.
            shape = value._batch_size[:limit] if value._members() is not None else None
        else:
            inner: _Sizes = {}
            shape = _find_common_size(value, limit, inner)
            if nested is not None and not made:
                nested[name] = shape, inner
        if shape is None or shape == common:
            continue
        if common is None:
            common = shape
        elif shape[: len(common)] != common:
            common = _common_prefix(common, shape)
    return common


def _common_prefix(one: torch.Size, other: torch.Size) -> torch.Size:
    """Return the leading dims that two sizes have in common."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return one[:count]


def _cut_at_uneven(shape: torch.Size) -> torch.Size:
    return shape[: shape.index(-1)] if -1 in shape else shape


def _leading_size(leaf: Tensor) -> torch.Size:
    """Return the leading dims of a leaf that can be batch dims. They end before a ragged dim."""
    try:
        shape: torch.Size = leaf.shape
        return shape if type(leaf) is Tensor or not leaf.is_nested else shape[: ragged.ragged_dim(leaf)]
    except RuntimeError:
        return ragged.shape_of(leaf)[: ragged.ragged_dim(leaf)]


def _set_sizes(
    node: Contract,
    size: torch.Size,
    limit: int | None,
    keep: bool,
    nested: _Sizes,
    before: list[tuple[Contract, torch.Size, Any]],
) -> None:
    """Set the batch size of a container, and of each nested container the longest one that fits.

    Appends each changed container with its old size and names to `before`.
    """
    before.append((node, node._batch_size, node._names))
    resize(node, size)
    structure = node._structure()
    for name, value in structure.items():
        _set_nested(value, size, limit, keep, nested.get(name), before)
    for member in node._members() or ():
        # The structure of a lazy stack lacks what only some members have.
        own_limit = None if limit is None else limit - 1
        for name, value in member._structure().items():
            if name not in structure:
                _set_nested(value, member._batch_size, own_limit, keep, None, before)


def _set_nested(
    value: Tensor | Contract,
    size: torch.Size,
    limit: int | None,
    keep: bool,
    found: tuple[torch.Size | None, _Sizes] | None,
    before: list[tuple[Contract, torch.Size, Any]],
) -> None:
    """Set the batch size of an entry in a container of batch size `size`; see `_set_sizes`.

    Args:
        found: what `_find_common_size` has found for the entry; `None` if it was not asked.
    """
    if not isinstance(value, Contract):
        return
    if value._is_non_tensor or isinstance(value, Tensor):
        if value._batch_size[: len(size)] != size:
            before.append((value, value._batch_size, value._names))
            resize(value, size)
    elif not (keep and value._batch_size[: len(size)] == size):
        inner: _Sizes = {}
        own, inner = found or (_find_common_size(value, limit, inner), inner)
        if own is not None:
            _set_sizes(value, own, limit, keep, inner, before)
        elif value._batch_size[: len(size)] != size:
            # A container without leaves gets the new size only if its own does not begin with it.
            _set_sizes(value, size, limit, keep, inner, before)
