"""The batch size itself: reading it, and changing it in place."""

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
    """`batch_size` and the other ways to ask for it."""

    @property
    def batch_size(self) -> torch.Size:
        """The leading dims that all entries share.

        Assigning another size changes what counts as batch dims; entries stay as they are. Nested containers that do
        not begin with the new size are given it. When an entry does not fit, a `RuntimeError` names it and nothing
        changes. Allowed on locked containers.

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
        """The number of batch dims."""
        return len(self._batch_size)

    def ndimension(self) -> int:
        """The number of batch dims."""
        return len(self._batch_size)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The batch size, or the size of one batch dim.

        Raises:
            IndexError: the dim is out of range.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict(batch_size=[3, 4]).size(-1)
            4
        """
        return self._batch_size if dim is None else self._batch_size[as_dim(dim, len(self._batch_size))]

    def numel(self) -> int:
        """The number of elements of the batch; 1 at least, since stacking two empty batches gives two elements."""
        return max(1, self._batch_size.numel())

    def auto_batch_size_(self, batch_dims: int | None = None, keep_compliant_size: bool = False) -> Self:
        """Set the batch size to the longest one that fits all entries.

        Nested containers are given the longest size that fits their own entries.

        Args:
            batch_dims: the largest number of batch dims, here and in nested containers.
            keep_compliant_size: leave nested containers whose batch size begins with the new one as they are.

        Returns:
            the same container; an empty one keeps its batch size.

        Raises:
            RuntimeError: a container of the tree cannot have that batch size, as a lazy stack which would lose its
                stack dim: the error that setting it raises. Nothing has changed then.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3, 4, 5), "b": {"c": torch.zeros(3, 4, 6)}})
            >>> td.auto_batch_size_().batch_size, td.auto_batch_size_(batch_dims=1).batch_size
            (torch.Size([3, 4]), torch.Size([3]))
        """
        if batch_dims is not None and batch_dims < 0:
            raise ShapeError(f"batch_dims is the largest number of batch dims, got {batch_dims}")
        nested: _Sizes = {}
        size = _common_size(self, batch_dims, nested)
        if size is None:
            return self
        before: list[tuple[Contract, torch.Size, Names | None]] = []
        with self._at_once():
            try:
                _spread(self, size, batch_dims, keep_compliant_size, nested, before)
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
    """`_map`, in place: every leaf is replaced by `fn(leaf)`, one at a time, so that no second copy of all exists.

    Raises:
        RuntimeError: a container of the tree is locked; nothing has changed then.
    """
    found: list[Any] = []
    _collect_nodes(root, found)
    nodes = list(distinct(found))
    for node in nodes:
        if isinstance(node, Locking) and node._locked:
            raise_locked("replace its entries in place")
    with root._at_once(), replacing():
        for node in nodes:
            for name in list(node._entries):
                value = node._entries[name]
                if not isinstance(value, Contract):
                    node._entries[name] = fn(value)
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


def _common_size(node: Contract, limit: int | None, nested: _Sizes | None = None) -> torch.Size | None:
    """The longest size with which every leaf of the tree begins; `None` when there is no leaf.

    `nested` gets, by name, the size of each nested container that is there, and not made on reading, and the same of
    those in it.
    """
    common: torch.Size | None = None
    if members := node._members():
        # Entries that only some of them have count too.
        for size in (_common_size(member, None) for member in members):
            common = size if common is None else common if size is None else _shared(common, size)
        dim: int = node.stack_dim
        return None if common is None else torch.Size((*common[:dim], len(members), *common[dim:])[:limit])
    # What a lazy stack makes on reading is asked for its shape only: where its members differ it cannot be made.
    structure = node._structure()
    made = structure is not node._entries
    for name, value in structure.items():
        shape: torch.Size | None
        if type(value) is Tensor and not made:
            # As `_leading_size`, without its call: half the time.
            try:
                shape = value.shape[:limit] if limit is not None else value.shape
            except RuntimeError:
                shape = _leading_size(value)[:limit]
        elif not isinstance(value, Contract):
            shape = (_before_uneven(node._shape_of(name)) if made else _leading_size(value))[:limit]
        elif isinstance(value, Tensor):
            shape = None  # An `UnbatchedTensor` fits any batch.
        elif value._is_non_tensor:
            # One value fits any batch, a stack of them only its own.
            shape = value._batch_size[:limit] if value._members() is not None else None
        else:
            inner: _Sizes = {}
            shape = _common_size(value, limit, inner)
            if nested is not None and not made:
                nested[name] = shape, inner
        if shape is None or shape == common:
            continue
        if common is None:
            common = shape
        elif shape[: len(common)] != common:
            common = _shared(common, shape)
    return common


def _shared(one: torch.Size, other: torch.Size) -> torch.Size:
    """The dims with which two sizes begin."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return one[:count]


def _before_uneven(shape: torch.Size) -> torch.Size:
    return shape[: shape.index(-1)] if -1 in shape else shape


def _leading_size(leaf: Tensor) -> torch.Size:
    """The dims of a leaf that can be batch dims: those before a ragged one."""
    try:
        shape: torch.Size = leaf.shape
        return shape if type(leaf) is Tensor or not leaf.is_nested else shape[: ragged.ragged_dim(leaf)]
    except RuntimeError:
        return ragged.shape_of(leaf)[: ragged.ragged_dim(leaf)]


def _spread(
    node: Contract,
    size: torch.Size,
    limit: int | None,
    keep: bool,
    nested: _Sizes,
    before: list[tuple[Contract, torch.Size, Any]],
) -> None:
    """Set the size of a container and the longest fitting ones of those nested in it; `before` gets what they had."""
    before.append((node, node._batch_size, node._names))
    resize(node, size)
    for name, value in node._structure().items():
        if type(value) is Tensor:
            continue
        if isinstance(value, Contract) and (value._is_non_tensor or isinstance(value, Tensor)):
            if value._batch_size[: len(size)] != size:
                before.append((value, value._batch_size, value._names))
                resize(value, size)
        elif isinstance(value, Contract) and not (keep and value._batch_size[: len(size)] == size):
            inner: _Sizes = {}
            own, inner = nested[name] if name in nested else (_common_size(value, limit, inner), inner)
            if own is not None:
                _spread(value, own, limit, keep, inner, before)
            elif value._batch_size[: len(size)] != size:
                # One without leaves keeps a size that fits.
                _spread(value, size, limit, keep, inner, before)
