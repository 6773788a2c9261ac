"""The mixin of shape operations, which rearrange batch dims like the torch.Tensor methods of the same names.

Feature dims do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import registry, settings
from tensordict.core.context import remember, remember_state
from tensordict.core.contract import Contract, is_node, named_error
from tensordict.core.exceptions import DimError, ShapeError
from tensordict.core.shapes import (
    as_dim,
    as_dims,
    as_ints,
    as_new_dim,
    as_size,
    expand_size,
    find_swapped_pair,
    infer_shape,
    move_dims,
    permutation,
)
from tensordict.ops.dims import batch_ops
from tensordict.ops.dims.batch_ops import BatchOp
from tensordict.ops.dims.sizing import Sizing, replace_leaves
from tensordict.ops.entries.locking import do_nothing
from tensordict.ops.entries.write_plans import resize
from tensordict.ops.refusals import name_entry
from tensordict.ops.storing.leaves import _walk_entries

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Shape")


class Shape(Sizing):
    """Shape operations. Negative dims count from the last batch dim. The result of a locked container is locked."""

    def _on_batch(self, op: BatchOp, undone: bool = False) -> Self:
        """Apply `op`. The result is locked, memory-mapped or shared if this container is (the latter for views only).

        Args:
            op: the operation.
            undone: the result can be used in a `with` block, which undoes the operation at its end. After
                `set_lazy_legacy(True)`, such a view is a `LazyView`.

        Raises:
            RuntimeError: torch rejects a leaf. The error names its key.
        """
        if undone and settings.lazy_legacy_possible and op.is_view and settings.lazy_legacy():
            view = registry.lookup("LazyView").over(self._wrapped_container(), op)
            result = self._rewrap(view)
            result._undo = view._undo
            return result  # type: ignore[no-any-return]
        if not isinstance(self._entries, dict) and self._members() is not None:
            result = self._rewrap(self._wrapped_container()._by_members(op))
        else:
            try:
                result = self._map(op.leaf, op.size, len(op.old), op.rename, op.on_stack)
            except RuntimeError as error:
                raise name_entry(error, _walk_entries(self, skip_uneven=True), op.leaf) from error
            if op.new_dims:
                entries = result._entries
                # A container of tensors only, the most frequent one, costs no call.
                if not isinstance(entries, dict) or list(map(type, entries.values())).count(Tensor) != len(entries):
                    result = _stack_values(result, op.new_dims)
        if self._locked and result is not self:
            result._lock_tree()
            if op.is_view:
                result._mark_as(self)
        return remember(result, self, op) if undone else result  # type: ignore[no-any-return]

    def _on_batch_in_place(self, op: BatchOp) -> Self:
        """Apply `op` to this container in place, leaf by leaf."""
        if self._members() is not None:
            self._refuse_if_locked(f"{op.name} it in place")
            stack, result = self._wrapped_container(), self._on_batch(op)._wrapped_container()
            if type(result) is not type(stack):
                raise ShapeError(
                    f"{op.name} cannot change a lazy stack in place, because its members determine its batch size; "
                    "use inplace=False"
                )
            # The batch size is cached.
            stack._entries, stack._size = result._entries, None
            return self
        if op.is_view or type(op) is batch_ops.Expand:
            self._map(op.leaf, op.size, len(op.old), op.rename, op.on_stack)  # raises before anything changes
        return replace_leaves(self, op.leaf, op.size, len(op.old), op.rename)

    def _return_self(self) -> Self:
        """Return this container from an operation that would not change it; also usable in a `with` block."""
        return remember_state(self, do_nothing)

    # --- reshaping --------------------------------------------------------------------------------------------------

    def view(self: SelfT, *shape: object, size: object = None, batch_size: object = None) -> SelfT:
        """View the same memory with another batch size, or as another dtype.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3, 4, 5)}, batch_size=[3, 4])
            >>> td.view(-1)["a"].shape, td.view(2, 6).batch_size
            (torch.Size([12, 5]), torch.Size([2, 6]))
            >>> with td.view(-1) as flat:
            ...     flat["b"] = torch.ones(12)
            >>> td["b"].shape
            torch.Size([3, 4])

        Args:
            *shape: the new batch size as ints or as one sequence; one size can be -1, and is then inferred. Or a
                `torch.dtype`.
            size: the new batch size, instead of `shape`.
            batch_size: with a dtype, the batch size of the result and of its nested containers. Needed if the change of
                dtype changes a batch dim. Lazy stacks become dense.

        Returns:
            a container of views; this container if it has that batch size already. A `with` block undoes the view at
            its end.

        Raises:
            RuntimeError: the number of elements differs, or the memory of an entry does not allow the view (use
                `reshape`).
        """
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self._view_dtype(shape[0], batch_size)
        old = self._batch_size
        new = infer_shape(as_ints(shape, size), old)
        if new == old:
            return self._return_self()
        return self._on_batch(batch_ops.Reshape(old, new, "view"), True)

    def _view_dtype(self, dtype: torch.dtype, batch_size: object) -> Self:
        view = methodcaller("view", dtype)
        if batch_size is None:
            result = self._map(view)
        else:
            # Lazy stacks become dense, because their members may not fit the new size.
            size, batch_dims = as_size(batch_size), len(self._batch_size)

            def view_stack(node: Any) -> Any:
                return node if node._is_non_tensor else node._dense()._map(view, size, batch_dims, None, view_stack)

            result = self._map(view, size, batch_dims, None, view_stack)
            _set_tree_size(result, size)
        _check_fit(result, ())
        if self._locked:
            result._lock_tree()
        return result

    def reshape(self: SelfT, *args: object, shape: object = None, size: object = None, inplace: bool = False) -> SelfT:
        """Give the elements another batch size. Returns views where the memory allows it, and copies elsewhere.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 4, 5)}, batch_size=[3, 4]).reshape(-1)["a"].shape
            torch.Size([12, 5])

        Args:
            *args: the new batch size as ints or as one sequence; one size can be -1, and is then inferred.
            shape: the new batch size, instead of `args`.
            size: the same as `shape`.
            inplace: change this container, leaf by leaf, instead of making a new one.
        """
        old = self._batch_size
        new = infer_shape(as_ints(args, size if shape is None else shape), old)
        if new == old:
            return self
        op = batch_ops.Reshape(old, new)
        return self._on_batch_in_place(op) if inplace else self._on_batch(op)

    def flatten(
        self: SelfT, start_dim: int | None = None, end_dim: int | None = None, *, inplace: bool = False
    ) -> SelfT:
        """Merge neighbouring batch dims into one.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3, 4, 5)}, batch_size=[2, 3, 4])
            >>> td.flatten(1, 2)["a"].shape
            torch.Size([2, 12, 5])

        Args:
            start_dim: the first dim to merge; the first batch dim by default.
            end_dim: the last dim to merge, inclusive; the last batch dim by default.
            inplace: change this container, leaf by leaf, instead of making a new one.

        Returns:
            views where the memory allows it, and copies elsewhere. A `with` block undoes it at its end.
        """
        old = self._batch_size
        batch_dims = len(old)
        if not batch_dims and start_dim in (None, 0, -1) and end_dim in (None, 0, -1):
            start = end = 0
        else:
            start = 0 if start_dim is None else as_dim(start_dim, batch_dims)
            end = batch_dims - 1 if end_dim is None else as_dim(end_dim, batch_dims)
            if end < start:
                raise ShapeError(f"flatten needs start_dim before end_dim, got {start_dim} and {end_dim}")
        op = batch_ops.Flatten(old, start, end)
        return self._on_batch_in_place(op) if inplace else self._on_batch(op, True)

    def unflatten(self: SelfT, dim: int, unflattened_size: object, *, inplace: bool = False) -> SelfT:
        """Split one batch dim into several dims.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(12, 5)}, batch_size=[12])
            >>> td.unflatten(0, (3, -1))["a"].shape
            torch.Size([3, 4, 5])

        Args:
            dim: the dim to split.
            unflattened_size: the sizes of the new dims; one size can be -1, and is then inferred.
            inplace: change this container, leaf by leaf, instead of making a new one.

        Returns:
            views. The last of the new dims keeps the name of the dim. A `with` block undoes it at its end.
        """
        old = self._batch_size
        dim = as_dim(dim, len(old))
        parts = infer_shape(as_ints((unflattened_size,)), old[dim : dim + 1])
        if not parts:
            raise ShapeError("unflatten needs at least one size")
        op = batch_ops.Unflatten(old, dim, parts)
        return self._on_batch_in_place(op) if inplace else self._on_batch(op, True)

    # --- reordering dims --------------------------------------------------------------------------------------------

    def permute(self: SelfT, *args: object, dims: object = None) -> SelfT:
        """Reorder the batch dims.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3, 4, 5)}, batch_size=[2, 3, 4], names=["x", "y", "z"])
            >>> td.permute(2, 0, 1)["a"].shape, td.permute(2, 0, 1).names
            (torch.Size([4, 2, 3, 5]), ['z', 'x', 'y'])

        Args:
            *args: the dims in their new order, as ints or as one sequence.
            dims: the same, by keyword.

        Returns:
            a container of views; this container if the order does not change. A `with` block undoes it at its end.

        Raises:
            IndexError: a dim is out of range.
            ValueError: a dim is missing or given twice.
        """
        return self._permute(permutation(as_ints(args, dims, "order"), len(self._batch_size)))

    def _permute(self, order: tuple[int, ...]) -> Self:
        pair = find_swapped_pair(order)
        if pair is None and order == tuple(range(len(order))):
            return self._return_self()
        old = self._batch_size
        op = batch_ops.Permute(old, *order) if pair is None else batch_ops.Transpose(old, *pair)
        return self._on_batch(op, True)

    def transpose(self: SelfT, dim0: int, dim1: int) -> SelfT:
        """Swap two batch dims. Returns views; this container if both dims are the same.

        A `with` block undoes it at its end.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3, 5)}, batch_size=[2, 3])
            >>> with td.transpose(0, 1) as swapped:
            ...     swapped["b"] = torch.zeros(3, 2)
            >>> td["b"].shape
            torch.Size([2, 3])

        Raises:
            IndexError: a dim is out of range.
        """
        old = self._batch_size
        dim0, dim1 = as_dim(dim0, len(old)), as_dim(dim1, len(old))
        return self._return_self() if dim0 == dim1 else self._on_batch(batch_ops.Transpose(old, dim0, dim1), True)

    def movedim(self, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> Self:
        """Move batch dims to other positions. The other dims keep their order (as :func:`torch.movedim`).

        Returns views.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3, 4, 5)}, batch_size=[2, 3, 4]).movedim(0, -1)["a"].shape
            torch.Size([3, 4, 2, 5])
        """
        return self._permute(move_dims(source, destination, len(self._batch_size)))

    def moveaxis(self, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> Self:
        """Move batch dims to other positions. The same as :meth:`movedim`."""
        return self.movedim(source, destination)

    def swapaxes(self, axis0: int, axis1: int) -> Self:
        """Swap two batch dims. The same as :meth:`transpose`."""
        return self.transpose(axis0, axis1)

    def swapdims(self, axis0: int, axis1: int) -> Self:
        """Swap two batch dims. The same as :meth:`transpose`."""
        return self.transpose(axis0, axis1)

    # --- dims of size 1, and expansion ------------------------------------------------------------------------------

    def squeeze(self: SelfT, dim: int | tuple[int, ...] | None = None) -> SelfT:
        """Drop batch dims of size 1.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3, 1, 4, 1)}, batch_size=[3, 1, 4])
            >>> td.squeeze().batch_size, td.squeeze(1)["a"].shape
            (torch.Size([3, 4]), torch.Size([3, 4, 1]))

        Args:
            dim: the dim, or dims, to drop if their size is 1; by default all batch dims of size 1.

        Returns:
            a container of views; this container if no dim is dropped. A `with` block undoes it at its end.
        """
        old = self._batch_size
        given = range(len(old)) if dim is None else as_dims(dim, len(old))
        dropped = [d for d in given if old[d] == 1]
        return self._on_batch(batch_ops.Squeeze(old, *dropped), True) if dropped else self._return_self()

    def unsqueeze(self: SelfT, dim: int) -> SelfT:
        """Insert a batch dim of size 1 at `dim`. Returns views; a `with` block undoes it at its end.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 5)}, batch_size=[3]).unsqueeze(-1)["a"].shape
            torch.Size([3, 1, 5])

        Raises:
            IndexError: the dim is not between `-batch_dims - 1` and `batch_dims`.
        """
        old = self._batch_size
        return self._on_batch(batch_ops.Unsqueeze(old, as_new_dim(dim, len(old))), True)

    def expand(self: SelfT, *args: object, size: object = None, shape: object = None, inplace: bool = False) -> SelfT:
        """Expand batch dims of size 1 and add leading dims, without copying (as `Tensor.expand`).

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 1, 5)}, batch_size=[3, 1]).expand(2, -1, 4)["a"].shape
            torch.Size([2, 3, 4, 5])

        Args:
            *args: the new batch size as ints or as one sequence; -1 keeps a dim.
            size: the new batch size, instead of `args`.
            shape: the same as `size`.
            inplace: change this container, leaf by leaf, instead of making a new one. A lazy stack gets new members.

        Raises:
            RuntimeError: a dim that is not of size 1 would change; or, with `inplace`, the container is locked.
        """
        old = self._batch_size
        op = batch_ops.Expand(old, expand_size(as_ints(args, shape if size is None else size), old))
        return self._on_batch_in_place(op) if inplace else self._on_batch(op)

    def expand_as(self, other: object) -> Self:
        """Expand the batch to the shape of a tensor, or each entry to its shape in another container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(1, 5)}, [1]).expand_as(torch.zeros(2, 3))["a"].shape
            torch.Size([2, 3, 5])

        Raises:
            KeyError: `other` is a container that lacks one of the entries.
        """
        if isinstance(other, Tensor):
            return self.expand(other.shape)
        if not isinstance(other, Contract):
            raise TypeError(f"expand_as takes a tensor or a container, got {type(other).__name__}")
        result = _expand_like(self, other, ())
        if self._locked:
            result._lock_tree()
        return result  # type: ignore[no-any-return]

    def broadcast_to(self, shape: object) -> Self:
        """Expand the batch to `shape`. The same as :meth:`expand` with one sequence."""
        return self.expand(shape)

    def atleast_1d(self) -> Self:
        """Add a batch dim of size 1 to a container without batch dims. Returns views, or this container."""
        return self._add_leading_dims(1)

    def atleast_2d(self) -> Self:
        """Add leading dims of size 1 until the container has two batch dims. Returns views, or this container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 5)}, batch_size=[3]).atleast_2d().batch_size
            torch.Size([1, 3])
        """
        return self._add_leading_dims(2)

    def atleast_3d(self) -> Self:
        """Add leading dims of size 1 until the container has three batch dims. Returns views, or this container."""
        return self._add_leading_dims(3)

    def _add_leading_dims(self, ndim: int) -> Self:
        result = self
        while len(result._batch_size) < ndim:
            result = result.unsqueeze(0)
        return result

    # --- moving elements --------------------------------------------------------------------------------------------

    def flip(self, dims: int | tuple[int, ...]) -> Self:
        """Reverse the order of the elements along one or several batch dims. Returns copies.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(3)}, batch_size=[3]).flip(0)["a"]
            tensor([2, 1, 0])
        """
        old = self._batch_size
        return self._on_batch(batch_ops.Flip(old, *as_dims(dims, len(old))))

    def fliplr(self) -> Self:
        """Reverse the second batch dim. The same as `flip(1)`."""
        self._require_dims(2, "fliplr")
        return self.flip(1)

    def flipud(self) -> Self:
        """Reverse the first batch dim. The same as `flip(0)`."""
        self._require_dims(1, "flipud")
        return self.flip(0)

    def _require_dims(self, count: int, what: str) -> None:
        if len(self._batch_size) < count:
            raise DimError(f"{what} needs at least {count} batch dims, got the batch size {list(self._batch_size)}")

    def rot90(self, k: int = 1, dims: tuple[int, int] = (0, 1)) -> Self:
        """Rotate by 90 degrees, `k` times, in the plane of two batch dims, from the first towards the second.

        Returns copies.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(6).view(2, 3)}, batch_size=[2, 3]).rot90()["a"].tolist()
            [[2, 5], [1, 4], [0, 3]]
        """
        self._require_dims(2, "rot90")
        old = self._batch_size
        plane = as_dims(dims, len(old))
        if len(plane) != 2:
            raise ShapeError(f"rot90 turns in a plane of two dims, got {dims}")
        return self._on_batch(batch_ops.Rot90(old, k, *plane))

    def roll(
        self, shifts: int | tuple[int, ...], dims: int | tuple[int, ...] | None = None, *, inplace: bool = False
    ) -> Self:
        """Shift the elements along batch dims. Elements that leave at one end return at the other. Returns copies.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(4)}, batch_size=[4]).roll(1, 0)["a"]
            tensor([3, 0, 1, 2])

        Args:
            shifts: the number of positions; a tuple for a tuple of dims.
            dims: the dims; by default, shift the flattened batch and restore its shape.
            inplace: replace the entries of this container, leaf by leaf, instead of making a new one.
        """
        old = self._batch_size
        if dims is None:
            op = batch_ops.Roll(old, shifts, None, len(old))
        else:
            places = (dims,) if isinstance(dims, int) else tuple(dims)
            steps = (shifts,) if isinstance(shifts, int) else tuple(shifts)
            if len(places) != len(steps):
                raise ShapeError(f"roll needs one shift per dim, got shifts={shifts} and dims={dims}")
            op = batch_ops.Roll(old, steps, tuple([as_dim(d, len(old)) for d in places]))
        return self._on_batch_in_place(op) if inplace else self._on_batch(op)

    def narrow(self, dim: int, start: int | Tensor, length: int) -> Self:
        """Select the elements `start` to `start + length` of a batch dim. Returns views.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(4)}, batch_size=[4]).narrow(0, 1, 2)["a"]
            tensor([1, 2])

        Raises:
            IndexError: `dim` or `start` is out of range.
            RuntimeError: the range goes past the end.
        """
        old = self._batch_size
        dim = as_dim(dim, len(old))
        start, extent = int(start), old[dim]
        if not -extent <= start <= extent:
            raise DimError(f"start {start} is out of range for dim {dim} of size {extent}")
        start += extent if start < 0 else 0
        if length < 0 or start + length > extent:
            raise ShapeError(f"start ({start}) + length ({length}) does not fit in dim {dim} of size {extent}")
        return self._on_batch(batch_ops.Narrow(old, dim, start, length))

    # --- repetition -------------------------------------------------------------------------------------------------

    def repeat(self, *repeats: object, inplace: bool = False) -> Self:
        """Repeat the batch along its dims (as `Tensor.repeat`). Returns copies. See also :meth:`repeat_interleave`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(2)}, batch_size=[2]).repeat(2)["a"]
            tensor([0, 1, 0, 1])

        Args:
            *repeats: the number of repetitions, one int per batch dim, or one sequence. More ints add leading dims.
            inplace: replace the entries of this container, leaf by leaf, instead of making a new one.
        """
        old = self._batch_size
        times = as_ints(repeats, what="number of repetitions")
        if len(times) < len(old) or any(n < 0 for n in times):
            raise ShapeError(
                f"repeat needs one non-negative int per batch dim at least, got {times} for the batch size {list(old)}"
            )
        op = batch_ops.Repeat(old, *times)
        return self._on_batch_in_place(op) if inplace else self._on_batch(op)

    def tile(self, dims: object) -> Self:
        """Repeat the batch along its last dims (as `Tensor.tile`). Returns copies.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3, 5)}, batch_size=[2, 3]).tile((2,))["a"].shape
            torch.Size([2, 6, 5])

        Args:
            dims: the number of repetitions, an int or a sequence. Too few numbers count for the last dims.
        """
        times = as_ints((dims,), what="number of repetitions")
        return self.repeat((1,) * (len(self._batch_size) - len(times)) + times)

    def repeat_interleave(
        self, repeats: Tensor | int, dim: int | None = None, *, output_size: int | None = None, inplace: bool = False
    ) -> Self:
        """Repeat every element of a batch dim. Returns copies.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(2)}, batch_size=[2]).repeat_interleave(2, dim=0)["a"]
            tensor([0, 0, 1, 1])

        Args:
            repeats: the number of repetitions; a tensor gives each element its own number.
            dim: the dim; by default the batch is flattened first.
            output_size: the resulting size of the dim, if known. Saves a synchronisation on GPUs.
            inplace: replace the entries of this container, leaf by leaf, instead of making a new one.
        """
        if dim is None and len(self._batch_size) != 1:
            flat = self.flatten(inplace=inplace)
            return flat.repeat_interleave(repeats, 0, output_size=output_size, inplace=inplace)
        old = self._batch_size
        dim = as_dim(0 if dim is None else dim, len(old))
        op = batch_ops.RepeatInterleave(old, dim, repeats, output_size, self._device)
        return self._on_batch_in_place(op) if inplace else self._on_batch(op)


def _stack_values(result: Any, dims: Sequence[int]) -> Any:
    """Make a stack along the new `dims` of each non-tensor value, as stacking the containers would."""
    if result._is_non_tensor:
        return result._stack_along(dims)
    entries = result._wrapped_container()._entries
    for name, value in list(entries.items()) if isinstance(entries, dict) else ():
        if type(value) is not Tensor and is_node(value) and (value._is_non_tensor or value._members() is None):
            entries[name] = _stack_values(value, dims)
    return result


def _expand_like(node: Any, other: Contract, path: tuple[str, ...]) -> Any:
    """Expand every leaf of `node` to the shape of the same entry of `other`. Returns a container of its batch size."""
    entries: dict[str, Any] = {}
    theirs = other._entries
    for name, value in node._entries.items():
        key = (*path, name)
        if name not in theirs:
            raise KeyError(f"expand_as: the other container has no entry {key!r}")
        target = theirs[name]
        if is_node(value) != is_node(target):
            raise TypeError(f"expand_as: entry {key!r} is a tensor in one of the containers only")
        if is_node(value):
            entries[name] = _expand_like(value, target, key)
        else:
            try:
                entries[name] = value.expand(target.shape)
            except RuntimeError as error:
                raise named_error(error, key) from error
    size = other._batch_size
    added = len(size) - len(node._batch_size)
    names = None if node._names is None or added < 0 else [None] * added + node._names
    return node._build(entries, size, node._device, names)


def _set_tree_size(node: Contract, size: torch.Size) -> None:
    """Set the batch size of every container of a tree."""
    resize(node, size)
    for value in node._entries.values():
        if isinstance(value, Contract) and not (value._is_non_tensor and value._members() is not None):
            _set_tree_size(value, size)


def _check_fit(node: Contract, path: tuple[str, ...]) -> None:
    """Raise if the shape of an entry does not begin with the batch size."""
    size = node._batch_size
    for name, value in node._structure().items():
        if isinstance(value, Contract) and not is_node(value):
            continue  # an `UnbatchedTensor` has a shape of its own
        if node._shape_of(name)[: len(size)] != size:
            raise ShapeError(
                f"entry {(*path, name)!r} has shape {list(value.shape)} in the new dtype, which does not begin with "
                f"the batch size {list(size)}; pass the new batch size as batch_size="
            )
        if isinstance(value, Contract):
            _check_fit(value, (*path, name))
