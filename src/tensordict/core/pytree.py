"""Register containers with torch's pytrees: flatten them into entries, and build them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tensordict.core import ragged, registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, Names, is_node
from tensordict.core.devices import place_of

T = TypeVar("T", bound=type)


class BatchDims(int):
    """The number of batch dims. The batch size itself is an attribute, `size`.

    A `Context` holds it instead of a batch size that varies in compiled code.

    `nested_compile_region` makes a constant of the structure of its arguments, which cannot contain varying sizes. Of
    this object it keeps only the number.
    """

    size: torch.Size | None = None


# The batch size in a `Context`.
HeldSize = tuple[int, ...] | BatchDims


class Context(NamedTuple):
    """Everything about a container except its entries.

    Two contexts are equal if their batch sizes have the same length, whatever the sizes are. A program of
    `torch.export` compares the context of its argument with the context that it was exported with. A context is a named
    tuple because `torch.export` can rebuild one. Making it takes 0.4 us; a frozen dataclass would take 1.3.
    """

    cls: type[Any]
    keys: tuple[str, ...]
    batch_size: HeldSize
    names: tuple[str | None, ...] | None
    device: torch.device | None
    # The number of `vmap` levels around the entries. Equality of structures ignores it.
    depth: int = 0

    def __eq__(self, other: object) -> bool:
        # Dynamo of torch 2.11 cannot compare classes with `==` if they define `__eq__`.
        return type(other) is Context and self.cls is other.cls and self._describe() == other._describe()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.cls, *self._describe()))

    def _describe(self) -> tuple[object, ...]:
        return self.keys, count_dims(self.batch_size), self.names, self.device


def register(
    cls: T,
    flatten: Callable[[Any], tuple[list[Any], object]] | None = None,
    unflatten: Callable[[Iterable[Any], Any], object] | None = None,
    flatten_with_keys: Callable[[Any], tuple[list[Any], Any]] | None = None,
) -> T:
    """Register a container class with torch's pytrees. It also works as a class decorator.

    Args:
        cls: the class. Subclasses of a registered class have to be registered themselves.
        flatten: returns the entries and a hashable context. The default returns the container's names and values, and
            fits any class with `_make`.
        unflatten: builds a container from entries and that context.
        flatten_with_keys: like `flatten`, with torch's key object in front of every entry.
    """
    own_form = flatten is not None
    internals.register_pytree_node(
        cls,
        flatten or flatten_container,
        unflatten or unflatten_container,
        serialized_type_name=f"tensordict.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys if own_form else _flatten_with_keys,
        to_dumpable_context=None if own_form else _dump_context,
        from_dumpable_context=None if own_form else _load_context,
    )
    return cls


def flatten_container(container: Contract) -> tuple[list[Any], Context]:
    """Return the entries of one level, in insertion order, and the context to rebuild the container."""
    mapping = container._entries
    values = list(mapping.values())
    names = container._names
    return values, Context(
        type(container),
        tuple(mapping),
        to_context_size(container._batch_size),
        None if names is None else tuple(names),
        container._device,
        _count_levels(values),
    )


def unflatten_container(values: Iterable[Any], context: Context) -> Any:
    """Build a container from the entries `values`, which may differ from the flattened ones.

    The batch size is kept as far as the entries still share it. Entering a `vmap` removes one dim, leaving it adds one.
    The device is kept if all entries are still on it. The result is not locked. If all entries are `None`, the result
    is `None`, because a function without return value was called on the leaves.
    """
    values = list(values)
    if is_nothing(values):
        return None
    known = [value for value in values if isinstance(value, (Tensor, Contract))]
    size = _find_size(context.batch_size, known)
    batch_dims = len(size)
    names: Names | None = None if context.names is None else list(context.names)
    device = context.device
    # Torch also builds trees of markers and specifications without shapes, which keep the batch size.
    if len(known) == len(values) and values:
        change = context.depth - _count_levels(values)
        shaped = [value for value in known if not _has_no_batch(value)]
        count = len(shaped)
        if change or context.depth:
            shaped = [value for value in shaped if not ragged.is_row_of_many(value)]
        if shaped:
            size = _find_shared_size(shaped, size, change)
        elif count and change < 0:
            size = size[-change:]  # Torch maps over the first dim of ragged leaves, their rows.
        if len(shaped) != len(values):
            values = [_resize_entry(value, size, batch_dims) for value in values]
        if len(size) != batch_dims or change:
            names = None
        if device is not None:
            here = (device, place_of(device))
            if any(value.device not in here for value in known):  # type: ignore[union-attr]
                device = None
    return context.cls._make(dict(zip(context.keys, values, strict=True)), size, device, names)


def to_context_size(size: torch.Size) -> HeldSize:
    """Convert a batch size to the form for a `Context`."""
    if not torch.compiler.is_dynamo_compiling() or not _varies(size):
        return tuple(size)
    dims = BatchDims(len(size))
    dims.size = size
    return dims


def count_dims(size: HeldSize) -> int:
    """Return the number of batch dims."""
    return int(size) if isinstance(size, BatchDims) else len(size)


def _varies(size: Sequence[int]) -> bool:
    """Return True if a size varies in a compiled or exported program. Comparing it would make it constant there."""
    if not torch.compiler.is_dynamo_compiling():
        for count in size:  # noqa: SIM110 (a generator inside any() would take four times as long)
            if type(count) is not int:
                return True
        return False
    # Torch has imported this module by itself where it compiles, and only there.
    return not all(map(torch.fx.experimental.symbolic_shapes.has_static_value, size))


def _find_size(size: HeldSize, known: Sequence[Contract | Tensor]) -> torch.Size:
    """Return the batch size of a context. If `torch.export` has lost it, derive it from the entries.

    `torch.export` makes a constant of the context of a result, and loses the varying sizes.

    Raises:
        RuntimeError: no entry shows the batch size.
    """
    if not isinstance(size, BatchDims):
        return torch.Size(size)
    if size.size is not None:
        return size.size
    for value in known:
        if not _has_no_batch(value) and len(shape := _shape_of(value)) >= size:
            return shape[: int(size)]
    raise RuntimeError("torch.compile kept no batch size for this container: take it apart in the code that uses it")


def is_nothing(values: Sequence[object]) -> bool:
    """Return whether there are entries and all of them are `None`."""
    return len(values) > 0 and values[0] is None and values.count(None) == len(values)


def _has_no_batch(value: object) -> bool:
    """Return whether an entry does not show the batch size: a non-tensor value, or a tensor with its own shape."""
    return isinstance(value, Contract) and (value._is_non_tensor or isinstance(value, Tensor))


def _resize_entry(value: Any, size: torch.Size, batch_dims: int) -> Any:
    """Resize an entry along with its container. Only entries without leaves need it, such as non-tensor values."""
    if not _has_no_batch(value) or (not _varies(size) and value._batch_size[: len(size)] == size):
        return value
    resized = value._resized_along(size, batch_dims)
    if value._names is not None and resized is not value and len(size) == batch_dims:
        resized._names = list(value._names)
    return resized


def _flatten_with_keys(container: Contract) -> tuple[list[Any], Context]:
    values, context = flatten_container(container)
    return [(internals.MappingKey(key), value) for key, value in zip(context.keys, values, strict=True)], context


def _dump_context(context: Context) -> dict[str, object]:
    """Return the context in a form that JSON can hold."""
    size = context.batch_size
    # Store only the number of dims if sizes vary.
    if not isinstance(size, BatchDims) and not all(type(count) is int for count in size):
        size = BatchDims(len(size))
    return {
        "cls": context.cls.__name__,
        "keys": list(context.keys),
        "batch_size": int(size) if isinstance(size, BatchDims) else list(size),
        "names": None if context.names is None else list(context.names),
        "device": None if context.device is None else str(context.device),
    }


def _load_context(data: dict[str, Any]) -> Context:
    size = data["batch_size"]
    return Context(
        registry.lookup(data["cls"]),
        tuple(data["keys"]),
        BatchDims(size) if isinstance(size, int) else tuple(size),
        None if data["names"] is None else tuple(data["names"]),
        None if data["device"] is None else torch.device(data["device"]),
    )


def _count_levels(values: Sequence[Any]) -> int:
    """Return the number of `vmap` levels around the most deeply wrapped entry."""
    compiling = torch.compiler.is_compiling()
    if not compiling and internals.innermost() is None:
        return 0
    # Dynamo knows only `is_batched`, and stops at the unwrapping: it cannot trace containers into `vmap`.
    is_wrapped = internals.is_batched if compiling else internals.is_transformed
    deepest = 0
    for value in values:
        if is_node(value):
            # Ask for the leaves, because reading the entries of a lazy stack would stack them.
            leaves = value._leaves()
            deepest = max(deepest, _count_levels(leaves))
        elif isinstance(value, Tensor):
            depth = 0
            # Other transforms, such as `grad`, also wrap tensors, between and around the levels of `vmap`.
            while is_wrapped(value):
                depth += internals.is_batched(value)
                value = internals.get_unwrapped(value)
            deepest = max(deepest, depth)
    return deepest


def _shape_of(value: Contract | Tensor) -> torch.Size:
    if isinstance(value, Contract):
        return value._batch_size
    return ragged.shape_of(value) if value.is_nested else value.shape


def _find_shared_size(values: Sequence[Contract | Tensor], size: torch.Size, change: int) -> torch.Size:
    """Return the longest common leading shape of all values, with at most `len(size) + change` dims.

    It may have one dim more, if a new dim precedes the old ones.
    """
    ndim = max(0, len(size) + change)
    shapes = list(map(_shape_of, values))
    first = shapes[0]
    if not change and not _varies(first[:ndim]) and not _varies(size):
        if all(shape[:ndim] == size for shape in shapes):
            return size
        # All values got a new first dim: jacfwd adds one before it maps over it.
        if size and all(shape[1 : ndim + 1] == size and shape[0] == first[0] for shape in shapes):
            return first[: ndim + 1]
    ndim = min(ndim, *(len(shape) for shape in shapes)) if len(shapes) > 1 else min(ndim, len(first))
    while any(shape[:ndim] != first[:ndim] for shape in shapes):
        ndim -= 1
    return first[:ndim]
