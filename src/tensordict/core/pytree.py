"""Containers as pytrees: how torch takes them apart into leaves and puts them together again."""

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
    """The number of batch dims, with the batch size as an attribute: stands for one that varies in compiled code.

    Torch makes a constant of the form of what `nested_compile_region` is given, in which sizes that vary cannot stand.
    Of this it keeps the number alone.
    """

    size: torch.Size | None = None


# A batch size as a context has it.
HeldSize = tuple[int, ...] | BatchDims


class Context(NamedTuple):
    """What a container is apart from its entries.

    Contexts are equal for any sizes of as many batch dims: a program of `torch.export` compares the context of its
    argument with the one that it was made with. A named tuple, which `torch.export` can rebuild, and which is made in
    0.4 us, where a frozen dataclass takes 1.3.
    """

    cls: type[Any]
    keys: tuple[str, ...]
    batch_size: HeldSize
    names: tuple[str | None, ...] | None
    device: torch.device | None
    # How many levels of `vmap` the entries are in; says nothing about whether two structures are the same.
    depth: int = 0

    def __eq__(self, other: object) -> bool:
        return type(other) is Context and self._compared() == other._compared()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return self.cls, self.keys, count_dims(self.batch_size), self.names, self.device


def register(
    cls: T,
    flatten: Callable[[Any], tuple[list[Any], object]] | None = None,
    unflatten: Callable[[Iterable[Any], Any], object] | None = None,
    flatten_with_keys: Callable[[Any], tuple[list[Any], Any]] | None = None,
) -> T:
    """Register a container class with torch's pytrees; usable as a class decorator.

    Args:
        cls: the class; a subclass of a registered class has to be registered itself.
        flatten: gives the entries and a hashable context. The default takes the container's names and
            values, as suits any class with `_make`.
        unflatten: makes a container from entries and that context.
        flatten_with_keys: as `flatten`, with torch's key in front of every entry.
    """
    own_form = flatten is not None
    internals.register_pytree_node(
        cls,
        flatten or flatten_container,
        unflatten or unflatten_container,
        serialized_type_name=f"tensordict.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys if own_form else _flatten_with_keys,
        to_dumpable_context=None if own_form else _dumpable,
        from_dumpable_context=None if own_form else _from_dumpable,
    )
    return cls


def flatten_container(container: Contract) -> tuple[list[Any], Context]:
    """The entries of one level, in insertion order, and the context that makes a container of them again."""
    mapping = container._entries
    values = list(mapping.values())
    names = container._names
    return values, Context(
        type(container),
        tuple(mapping),
        held(container._batch_size),
        None if names is None else tuple(names),
        container._device,
        _depth(values),
    )


def unflatten_container(values: Iterable[Any], context: Context) -> Any:
    """A container of the entries `values`, which may have been changed meanwhile.

    The batch size is kept as far as the entries still share it; entering or leaving a `vmap` takes one dim
    off it or adds one. The device is kept if all entries are still there. The result is not locked. Where there are
    entries, and all are `None`, so is the result: a function that returns nothing was called on the leaves.
    """
    values = list(values)
    if is_nothing(values):
        return None
    known = [value for value in values if isinstance(value, (Tensor, Contract))]
    size = _find_size(context.batch_size, known)
    batch_dims = len(size)
    names: Names | None = None if context.names is None else list(context.names)
    device = context.device
    # Torch also builds trees of markers and specifications, which have no shape: these keep the batch size.
    if len(known) == len(values) and values:
        change = context.depth - _depth(values)
        shaped = [value for value in known if not _has_no_batch(value)]
        count = len(shaped)
        if change or context.depth:
            shaped = [value for value in shaped if not ragged.is_row_of_many(value)]
        if shaped:
            size = _shared_size(shaped, size, change)
        elif count and change < 0:
            size = size[-change:]  # Torch maps over the rows of ragged leaves, the first dim.
        if len(shaped) != len(values):
            values = [_along_with(value, size, batch_dims) for value in values]
        if len(size) != batch_dims or change:
            names = None
        if device is not None:
            here = (device, place_of(device))
            if any(value.device not in here for value in known):  # type: ignore[union-attr]
                device = None
    return context.cls._make(dict(zip(context.keys, values, strict=True)), size, device, names)


def held(size: torch.Size) -> HeldSize:
    """A batch size as a context has it."""
    if not torch.compiler.is_dynamo_compiling() or not _varies(size):
        return tuple(size)
    dims = BatchDims(len(size))
    dims.size = size
    return dims


def count_dims(size: HeldSize) -> int:
    """The number of batch dims."""
    return int(size) if isinstance(size, BatchDims) else len(size)


def _varies(size: Sequence[int]) -> bool:
    """Whether a size varies in the program that torch compiles or exports; comparing it would make it constant."""
    if not torch.compiler.is_dynamo_compiling():
        return any(type(count) is not int for count in size)
    # Torch has imported this module by itself where it compiles, and only there.
    return not all(map(torch.fx.experimental.symbolic_shapes.has_static_value, size))


def _find_size(size: HeldSize, known: Sequence[Contract | Tensor]) -> torch.Size:
    """Return the batch size of a context, or the size that its entries show.

    `torch.export` makes a constant of the context of a result, and loses the sizes that vary.

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
    """Whether there are entries and all of them are `None`."""
    return len(values) > 0 and values[0] is None and values.count(None) == len(values)


def _has_no_batch(value: object) -> bool:
    """Whether an entry says nothing of the batch: a value that is no tensor, or a tensor of its own shape."""
    return isinstance(value, Contract) and (value._is_non_tensor or isinstance(value, Tensor))


def _along_with(value: Any, size: torch.Size, batch_dims: int) -> Any:
    """An entry of a container that has got another batch size: one that holds a value has no leaves to tell it from."""
    if not _has_no_batch(value) or (not _varies(size) and value._batch_size[: len(size)] == size):
        return value
    resized = value._resized_along(size, batch_dims)
    if value._names is not None and resized is not value and len(size) == batch_dims:
        resized._names = list(value._names)
    return resized


def _flatten_with_keys(container: Contract) -> tuple[list[Any], Context]:
    values, context = flatten_container(container)
    return [(internals.MappingKey(key), value) for key, value in zip(context.keys, values, strict=True)], context


def _dumpable(context: Context) -> dict[str, object]:
    """The context as JSON can hold it."""
    size = context.batch_size
    # The number of dims alone, where sizes vary.
    if not isinstance(size, BatchDims) and not all(type(count) is int for count in size):
        size = BatchDims(len(size))
    return {
        "cls": context.cls.__name__,
        "keys": list(context.keys),
        "batch_size": int(size) if isinstance(size, BatchDims) else list(size),
        "names": None if context.names is None else list(context.names),
        "device": None if context.device is None else str(context.device),
    }


def _from_dumpable(data: dict[str, Any]) -> Context:
    size = data["batch_size"]
    return Context(
        registry.lookup(data["cls"]),
        tuple(data["keys"]),
        BatchDims(size) if isinstance(size, int) else tuple(size),
        None if data["names"] is None else tuple(data["names"]),
        None if data["device"] is None else torch.device(data["device"]),
    )


def _depth(values: Sequence[Any]) -> int:
    """The number of `vmap` levels that the most deeply wrapped entry is in."""
    compiling = torch.compiler.is_compiling()
    if not compiling and internals.innermost() is None:
        return 0
    # Dynamo knows the first of the two only, and stops at the unwrapping: it cannot trace containers into `vmap`.
    is_wrapped = internals.is_batched if compiling else internals.is_transformed
    deepest = 0
    for value in values:
        if is_node(value):
            # The leaves as they are: a lazy stack would stack its own to give its entries.
            leaves = value._leaves()
            deepest = max(deepest, _depth(leaves))
        elif isinstance(value, Tensor):
            depth = 0
            # Other transforms, such as `grad`, wrap tensors too, between the levels of `vmap` and around them.
            while is_wrapped(value):
                depth += internals.is_batched(value)
                value = internals.get_unwrapped(value)
            deepest = max(deepest, depth)
    return deepest


def _shape_of(value: Contract | Tensor) -> torch.Size:
    if isinstance(value, Contract):
        return value._batch_size
    return ragged.shape_of(value) if value.is_nested else value.shape


def _shared_size(values: Sequence[Contract | Tensor], size: torch.Size, change: int) -> torch.Size:
    """The longest leading shape that all the values share, of at most `len(size) + change` dims.

    One more if a new dim lies in front of the old ones.
    """
    ndim = max(0, len(size) + change)
    shapes = list(map(_shape_of, values))
    first = shapes[0]
    if not change and not _varies(first[:ndim]) and not _varies(size):
        if all(shape[:ndim] == size for shape in shapes):
            return size
        # A dim was put in front of all: what jacfwd does before it maps over it.
        if size and all(shape[1 : ndim + 1] == size and shape[0] == first[0] for shape in shapes):
            return first[: ndim + 1]
    ndim = min(ndim, *(len(shape) for shape in shapes)) if len(shapes) > 1 else min(ndim, len(first))
    while any(shape[:ndim] != first[:ndim] for shape in shapes):
        ndim -= 1
    return first[:ndim]
