"""UnbatchedTensor: a leaf whose shape is independent of the batch size of its container."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions

from tensordict.core import registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path, joined
from tensordict.core.shapes import as_size, joined_size
from tensordict.io.formats import torch_files

if TYPE_CHECKING:
    from typing_extensions import Self


def _constant(value: Any) -> Any:
    """Return a property with a constant value. Dynamo cannot read plain class attributes of tensor subclasses."""
    return property(lambda self: value)


@registry.register
class UnbatchedTensor(Tensor, Contract):
    """A tensor whose shape is independent of the batch size of its container.

    Operations on batch dims (indexing, reshaping, stacking) leave it unchanged, and so does assignment to a part of the
    batch. Operations on elements (arithmetic, `clone`, `to`, `apply`) apply to it as to any leaf. Torch functions of it
    and plain tensors, such as `td["a"] * td["scale"]`, return plain tensors. Torch functions of it alone, or of it and
    numbers, return an `UnbatchedTensor`.

    The walks of the contract treat it as a container whose only leaf is itself.

    Args:
        data: a tensor, or any input of `torch.as_tensor`. The memory is shared.
        batch_size: the batch size of the container. A container sets it when the entry is written.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, UnbatchedTensor
        >>> td = TensorDict(a=torch.zeros(2, 3), scale=UnbatchedTensor(torch.ones(5)), batch_size=[2])
        >>> td.reshape(1, 2)["scale"].shape, (td + 1)["scale"]
        (torch.Size([5]), UnbatchedTensor(tensor([2., 2., 2., 2., 2.])))
    """

    _batch_size = torch.Size(())
    _is_tensor: Any = _constant(True)
    _is_non_tensor: Any = _constant(False)
    _names: Any = _constant(None)
    _entries: Any = _constant(MappingProxyType({}))

    @staticmethod
    def __new__(cls, data: object, batch_size: object = None) -> Self:
        return cls._over(torch.as_tensor(data), as_size(batch_size))

    @classmethod
    def _over(cls, tensor: Tensor, batch_size: torch.Size) -> Self:
        """Make an instance that shares the memory of a tensor."""
        with internals.as_plain():
            if torch.compiler.is_dynamo_compiling():
                tensor = tensor.view_as(tensor)
            self = tensor.as_subclass(cls)
        self._batch_size = batch_size
        return self

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of its container."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: object) -> None:
        self._batch_size = as_size(size)

    def copy(self) -> Self:
        """Return an instance over the same memory, as in a shallow copy of a container; for a parameter, `self`."""
        return self._wrap_result(self)

    def clone(self, *, memory_format: torch.memory_format | None = None) -> Self:
        """Copy the tensor into new memory, as `Tensor.clone` does."""
        return self._over(super().clone(memory_format=memory_format or torch.preserve_format), self._batch_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        held = self.as_subclass(Tensor)
        if not (self.requires_grad and self.is_leaf):
            result = self._over(copy.deepcopy(held, memo), self._batch_size)
        else:
            result = self._over(copy.deepcopy(held.detach(), memo), self._batch_size)
            result.requires_grad_()
            result.__dict__.update(self.__dict__)
        memo[id(self)] = result
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function. Return a plain tensor if plain tensors, which may have batch dims, take part."""
        if not all(issubclass(cls, kind) for kind in types):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with internals.as_plain():
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, (Tensor, tuple, list)) or isinstance(result, torch.Size):
            return result
        operands = (*args, *kwargs.values()) if kwargs else args
        if _has_plain(operands) or func in get_default_nowrap_functions():
            return result
        return _wrap_new(result, _find_first(operands))

    def __reduce_ex__(self, protocol: object) -> Any:
        found = torch_files.reduce(self) if protocol == torch_files.PROTOCOL else None
        return super().__reduce_ex__(protocol) if found is None else found  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return `UnbatchedTensor(...)` around the `repr` of the tensor."""
        return f"UnbatchedTensor({self.as_subclass(Tensor)!r})"

    def __str__(self) -> str:
        """Return the text of the tensor."""
        return str(self.as_subclass(Tensor))

    def __format__(self, format_spec: str) -> str:
        """Format the tensor: a single number with `format_spec`, otherwise as text."""
        return format(self.as_subclass(Tensor), format_spec)

    # --- the contract -----------------------------------------------------------------------------------------------

    def _gather(self, found: list[Any]) -> None:
        found.append(self)

    def _walk(self, prefix: Path = (), or_template: bool = False) -> Iterator[tuple[Path, Any]]:
        yield prefix, self

    def _map(self, fn: Any, size: Any = None, batch_dims: int = 0, rename: Any = None, on_node: Any = None) -> Self:
        own = self._batch_size
        return self._wrap_result(fn(self)) if size is None else self._over(self, size + own[batch_dims:])

    def _map_some(self, fn: Callable[[Any], Any]) -> Self | None:
        result = fn(self)
        return self._wrap_result(result) if isinstance(result, Tensor) else result

    def _wrap_result(self, result: Any) -> Self:
        """Make an entry of the same container from the result of a function. Returns a parameter itself."""
        if type(result) is type(self) and getattr(result, "_is_param", False):
            result._batch_size = self._batch_size
            return result
        return self._over(result, self._batch_size)

    def _map_many(self, fn: Any, sizes: Any, batch_dims: int, rename: Any, on_node: Any = None) -> list[Self]:
        rest = self._batch_size[batch_dims:]
        return [self._over(self, size + rest) for size in sizes]

    def _map_with(self, fn: Callable[[Any, Tensor], Any], tensor: Tensor) -> NoReturn:
        raise ShapeError(
            "a tensor over the batch dims does not apply to an UnbatchedTensor: exclude the entry, or use a number or "
            "a container"
        )

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        return self._wrap_result(next(leaves))

    def _join(self, items: Sequence[Any], dim: int, stacked: bool) -> Self:
        return self._take_first(items, joined_size(items, dim, stacked))

    def _as_result(self, stack: Any) -> Any:
        members = stack._entries.containers
        if not members or not all(isinstance(member, UnbatchedTensor) for member in members):
            return stack
        return self._take_first(members, stack._batch_size)

    def _take_first(self, items: Sequence[Any], size: torch.Size) -> Self:
        """Return the first of several entries. Raises if their shapes differ, and warns if their elements differ."""
        for item in items[1:]:
            if item.shape != self.shape:
                raise ShapeError(
                    f"the shapes {list(self.shape)} and {list(item.shape)} of an UnbatchedTensor differ: it must be "
                    "the same for the whole batch"
                )
            if torch.compiler.is_compiling():
                continue  # A graph cannot depend on elements of tensors.
            if item.data_ptr() != self.data_ptr() and not torch.equal(self, item):
                warnings.warn(
                    "UnbatchedTensors of different content are joined, and the first is kept: use a tensor with batch "
                    "dims if the elements of the batch differ",
                    stacklevel=2,
                )
                break
        return self._over(self, size)

    def _compare_with_container(self, other: object, op: Callable[[Any, Any], Any]) -> Any:
        return self._over(op(self, other), self._batch_size)

    def _resized_along(self, size: torch.Size, batch_dims: int) -> Self:
        return self._over(self, size + self._batch_size[batch_dims:])

    def _write_name(self, name: str, item: object, non_blocking: bool = False, path: Path | None = None) -> NoReturn:
        raise KeyError(f"cannot write {joined(path or (name,))!r}: the entry above it is a tensor")


def _has_plain(operands: Iterable[Any]) -> bool:
    """Return whether a tensor of another class is among the operands, or in a list or tuple of them."""
    for operand in operands:
        if isinstance(operand, Tensor):
            if not isinstance(operand, UnbatchedTensor):
                return True
        elif isinstance(operand, (list, tuple)) and _has_plain(operand):
            return True
    return False


def _find_first(operands: Iterable[Any]) -> UnbatchedTensor | None:
    """Return the first UnbatchedTensor among the operands, or in a list or tuple of them."""
    for operand in operands:
        found = _find_first(operand) if isinstance(operand, (list, tuple)) else operand
        if isinstance(found, UnbatchedTensor):
            return found
    return None


def _wrap_new(result: Any, source: Any) -> Any:
    """Convert new tensors to `UnbatchedTensor`s with the batch size of `source`. Others were written in place."""
    if isinstance(result, (tuple, list)):
        return type(result)([_wrap_new(item, source) for item in result])
    if not isinstance(result, Tensor) or isinstance(result, UnbatchedTensor):
        return result
    return source._over(result, source._batch_size)
