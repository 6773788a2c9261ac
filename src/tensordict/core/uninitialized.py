"""Stacks of the uninitialized parameters of lazy modules, which get their sizes in the first call of `torch.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from tensordict.core import torch_internals as internals


class _Stack:
    """The base of both kinds of stacks. Until a stack has a size, its data has the shape `(number of modules, 0)`."""

    def materialize(self: Any, shape: Sequence[int], device: Any = None, dtype: Any = None) -> None:
        """Allocate the whole stack. `shape` begins with the number of modules. `self` becomes an ordinary parameter.

        Raises:
            RuntimeError: `shape` is the shape for a single module.
        """
        count = self.size(0)
        if tuple(shape[:1]) != (count,):
            raise RuntimeError(
                f"this parameter is a stack for {count} lazy modules, and a call outside torch.vmap gives it the shape "
                f"{list(shape)}: make the first call in torch.vmap over the container that holds it"
            )
        super().materialize(shape, device, dtype)  # type: ignore[misc]

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = uninitialized_like(self, _get_data(self).clone())
        return found

    def __reduce_ex__(self: Any, protocol: object) -> Any:
        return _rebuild, (type(self), self.size(0), self.requires_grad, self.device, self.dtype)


class StackedUninitializedParameter(_Stack, UninitializedParameter):
    """The parameters of several lazy modules, stacked to one parameter without a size."""


class StackedUninitializedBuffer(_Stack, UninitializedBuffer):
    """The buffers of several lazy modules, stacked to one buffer without a size."""


class _Element:
    """The base of stand-ins for one element of `stack` inside `torch.vmap`, until the stack has a size.

    Materializing it allocates the whole stack. Afterwards both share memory, so initializing the element initializes
    all.
    """

    def materialize(self: Any, shape: Sequence[int], device: Any = None, dtype: Any = None) -> None:
        """Allocate the stack for elements of this shape."""
        if is_lazy(self.stack):
            self.stack.materialize((self.stack.size(0), *shape), device, dtype)
        self.data = self.stack.data
        self.__class__ = self.cls_to_become


class _ParameterElement(_Element, UninitializedParameter):
    pass


class _BufferElement(_Element, UninitializedBuffer):
    pass


_STACKS = (StackedUninitializedParameter, StackedUninitializedBuffer)
_ELEMENTS = (_ParameterElement, _BufferElement)


def stack_lazy_leaves(leaves: Sequence[Any]) -> Any:
    """Stack the uninitialized leaves of several lazy modules to one uninitialized leaf."""
    parameters = isinstance(leaves[0], UninitializedParameter)
    data = torch.stack([_get_data(leaf) for leaf in leaves])
    return _make(StackedUninitializedParameter if parameters else StackedUninitializedBuffer, data, leaves[0])


def uninitialized_like(leaf: Any, data: Tensor) -> Any:
    """Make an uninitialized leaf of the same kind as `leaf`, with the device and dtype of `data`."""
    return _make(type(leaf), data, leaf)


def enter_map(leaf: Any, dim: int, level: int) -> Any:
    """Map a leaf for the function that `torch.vmap` calls at this level, without the dim."""
    if type(leaf) in _STACKS:
        kind = _ParameterElement if isinstance(leaf, nn.Parameter) else _BufferElement
        with _leave_transforms():
            element = _make(kind, _get_data(leaf)[0], leaf)
        element.__dict__.update(stack=leaf, mapped_dim=dim, map_level=level)
        return element
    return internals.add_batch_dim(leaf, dim, level)


def is_element(leaf: object) -> bool:
    """Return True for a stand-in for one element of a stack."""
    return type(leaf) in _ELEMENTS


def initialize_with_first_call(module: nn.Module, places: list[tuple[list[Any], str, Any]]) -> Callable[[], None]:
    """Initialize whole stacks before the next call of a lazy module, and let that call use their elements.

    Torch would initialize inside `torch.vmap`, and run the module on the whole stacks. Inside `torch.vmap`, random
    numbers for unmapped tensors raise an error, unless it was called with `randomness="same"`.

    Args:
        module: the module.
        places: for each element: the dicts that receive the mapped tensor, its name in them, and the stand-in.

    Returns:
        A function that cancels the initialization.
    """

    def initialize(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = [leaf for _, _, element in places for leaf in (element, element.stack)]
        with _leave_transforms(), _restore_on_error(leaves), _unmap_state(module):
            module.initialize_parameters(
                *internals.tree_map(_take_first, args), **internals.tree_map(_take_first, kwargs)
            )  # type: ignore[operator]
        for tables, name, element in places:
            mapped = internals.add_batch_dim(element.stack, element.mapped_dim, element.map_level)
            for table in tables:
                table[name] = mapped
        handle.remove()

    handle = module.register_forward_pre_hook(initialize, prepend=True, with_kwargs=True)
    return handle.remove


@contextmanager
def _leave_transforms() -> Iterator[None]:
    with ExitStack() as popped:
        while internals.innermost() is not None:
            popped.enter_context(internals.leave_transform())
        yield


@contextmanager
def _restore_on_error(leaves: list[Any]) -> Iterator[None]:
    """Make all leaves uninitialized again if the block fails, so that nothing trains on unfilled memory."""
    before = [(leaf, type(leaf), leaf.data) for leaf in leaves]
    try:
        yield
    except BaseException:
        for leaf, kind, data in before:
            if type(leaf) is not kind:
                leaf.data = data
                leaf.__class__ = kind
        raise


@contextmanager
def _unmap_state(module: nn.Module) -> Iterator[None]:
    """Replace mapped tensors, such as `num_batches_tracked`, by whole ones for a block."""
    tables: list[dict[str, Any]] = [module._parameters, module._buffers]
    mapped = []
    for table in tables:
        for name, value in table.items():
            if value is not None and internals.is_transformed(value):
                mapped.append((table, name, value))
                table[name] = _unwrap(value)[0]
    try:
        yield
    finally:
        for table, name, value in mapped:
            table[name] = value


def _take_first(value: Any) -> Any:
    """Return the first element of a mapped tensor; return any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    whole, dims = _unwrap(value)
    for dim in reversed(dims):
        whole = whole.select(dim, 0)
    return whole


def _unwrap(value: Any) -> tuple[Any, list[int]]:
    """Return the tensor behind all function transforms, and the dims that they map, innermost level first."""
    dims = []
    while internals.is_transformed(value):
        if internals.is_batched(value):
            dims.append(internals.get_mapped_dim(value))
        value = internals.get_unwrapped(value)
    return value, dims


def _get_data(leaf: Any) -> Any:
    """Return the data of an uninitialized leaf as a plain tensor, with the device and dtype of the leaf."""
    with internals.as_plain():
        return leaf.detach().as_subclass(Tensor)


def _make(kind: type[Any], data: Tensor, leaf: Any) -> Any:
    made = internals.make_subclass(kind, data, leaf.requires_grad)
    made.__dict__.update(leaf.__dict__)
    return made


def _rebuild(kind: type[Any], count: int, requires_grad: bool, device: Any, dtype: Any) -> Any:
    """Unpickle a stack."""
    made = internals.make_subclass(kind, torch.empty(count, 0, device=device, dtype=dtype), requires_grad)
    if kind is StackedUninitializedBuffer:
        made.__dict__.update(UninitializedBuffer().__dict__)
    return made
