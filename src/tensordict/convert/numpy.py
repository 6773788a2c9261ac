"""Conversion between containers and NumPy's structured arrays, and checks of nested lists of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tensordict.core import makers
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import ContainerExpected
from tensordict.core.keys import Path, joined
from tensordict.core.shapes import nested_lists

# The minimal length of text fields in new arrays, so that longer text can be assigned later.
_TEXT = 10


Values = np.ndarray[Any, np.dtype[Any]]


def entries_of(struct_array: object, path: Path = ()) -> tuple[dict[str, Any], torch.Size]:
    """Convert the fields of a structured array to entries of a container, and return them with the array's shape.

    Numbers become tensors over the same memory, nested structures become containers, and text, bytes and times become
    stacks of values.

    Raises:
        TypeError: the object is not a structured array, or a field has a dtype without counterpart.
        ValueError: torch cannot represent the strides of a field.
    """
    if not isinstance(struct_array, (np.ndarray, np.void)) or struct_array.dtype.names is None:
        what = getattr(struct_array, "dtype", type(struct_array).__name__)
        raise ContainerExpected(f"from_struct_array reads a NumPy array with named fields, got {what}")
    values = np.asarray(struct_array)
    entries = {name: _make_entry(values[name], (*path, name)) for name in struct_array.dtype.names}
    return entries, torch.Size(values.shape)


def container_of(struct_array: object, path: Path = ()) -> Any:
    """Make a `TensorDict` over the memory of a structured array. The array's shape becomes the batch size."""
    entries, size = entries_of(struct_array, path)
    return makers.dense(entries, size, None, None)


def _make_entry(field: Values, path: Path) -> Any:
    kind = field.dtype.kind
    if field.dtype.names is not None:
        return container_of(field, path)
    if kind in "biufc":
        try:
            return torch.from_numpy(field)
        except (TypeError, ValueError) as error:
            raise type(error)(_explain_refusal(field, path, error)) from None
    if kind in "USMm":
        values = field.tolist() if kind in "US" else nested_lists(list(field.reshape(-1)), field.shape)
        if not field.shape:
            return makers.value(values, torch.Size(()))
        return makers.values(values, torch.Size(field.shape), 0, None)
    raise TypeError(
        f"the field {joined(path)!r} has the dtype {field.dtype}, which a container cannot share: leave the field out, "
        "or give its values to set_non_tensor"
    )


def _explain_refusal(field: Values, path: Path, error: Exception) -> str:
    """Explain why torch refuses the memory of a field, and how to change the array."""
    name = joined(path)
    if not field.dtype.isnative:
        return f"the field {name!r} has foreign byte order ({field.dtype}): use array.astype(dtype.newbyteorder('='))"
    if uneven := [step for step in field.strides if step % field.itemsize]:
        way = (
            "keep the real and the imaginary part in two fields"
            if field.dtype.kind == "c"
            else "use numpy.lib.recfunctions.repack_fields(array, align=True, recurse=True)"
        )
        return (
            f"the elements of the field {name!r} ({field.dtype}) are {uneven[0]} bytes apart, not a multiple of "
            f"{field.itemsize}, so no tensor can share their memory: {way}"
        )
    if any(step < 0 for step in field.strides):
        return f"the field {name!r} runs backwards through memory, as no tensor can: use array.copy()"
    return f"the field {name!r}: {error}"


# --- to arrays ----------------------------------------------------------------------------------------------------


def array_of(node: Contract, path: Path = ()) -> Values:
    """Copy the entries of a container into a new structured array."""
    size = node._batch_size
    columns = {name: _make_column(value, size, (*path, name)) for name, value in node._entries.items()}
    if "" in columns:
        raise ValueError("a structured array cannot have a field without a name: rename the entry ''")
    rest = len(size)
    fields = [(name, column.dtype, column.shape[rest:]) for name, column in columns.items()]
    dtype = np.dtype(fields)
    if _is_unaligned(dtype, dtype.itemsize):
        dtype = np.dtype(fields, align=True)  # Adds gaps, so that tensors can share the memory.
    result = np.empty(size, dtype)
    for name, column in columns.items():
        result[name] = column
    return result


def _is_unaligned(dtype: np.dtype[Any], step: int) -> bool:
    """Return whether tensors cannot share the memory of fields whose elements are `step` bytes apart."""
    if dtype.names:
        return any(_is_unaligned(dtype[name].base, step) for name in dtype.names)
    return dtype.kind in "biufc" and bool(step % dtype.itemsize)


def _make_column(value: Any, size: torch.Size, path: Path) -> Values:
    """Return the values of one entry as an array whose shape begins with `size`."""
    if is_node(value):
        return array_of(value, path) if not value._is_non_tensor else _make_value_column(value, path)
    if value.is_nested:
        raise TypeError(
            f"entry {joined(path)!r} is ragged, which a structured array cannot hold: exclude it, or pad it with "
            "torch.nested.to_padded_tensor"
        )
    try:
        array: Values = value.numpy(force=True)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"entry {joined(path)!r} cannot be an array: {error}; convert it with .to(dtype)") from error
    if array.shape[: len(size)] != size:
        # The entry is an `UnbatchedTensor`, so repeat it for all elements.
        array = np.broadcast_to(array, (*size, *array.shape))
    return array


def _make_value_column(holder: Any, path: Path) -> Values:
    """Return non-tensor values as an array; raise if NumPy has no dtype for them."""
    flat = holder._flat_values()
    kinds = {type(value) for value in flat}
    if kinds <= {str}:
        dtype: Any = f"U{max([_TEXT, *map(len, flat)])}"
    elif kinds == {bytes}:
        dtype = f"S{max([1, *map(len, flat)])}"
    else:
        dtype = np.result_type(*flat) if all(issubclass(kind, _SCALARS) for kind in kinds) else np.dtype(object)
        if dtype.kind not in "biufcMm":
            names = sorted(kind.__name__ for kind in kinds)
            raise TypeError(
                f"entry {joined(path)!r} holds values of {', '.join(names)}, which a structured array cannot hold: "
                "exclude it, or replace them by numbers or text"
            )
    return np.array(flat, dtype=dtype).reshape(tuple(holder._batch_size))


_SCALARS = (bool, int, float, complex, np.generic)


def is_numeric(item: object) -> bool:
    """Return whether nested lists contain only numbers, tensors and numeric arrays."""
    if isinstance(item, (list, tuple)):
        return all(map(is_numeric, item))
    if isinstance(item, np.ndarray):
        return item.dtype.kind in "biufc"
    return isinstance(item, (bool, int, float, complex, np.number, np.bool_, torch.Tensor, range))


def shape_of_rows(value: object) -> tuple[int, ...] | None:
    """Return the shape of nested lists, or of a tensor or array; `None` if lists at one level differ in length."""
    if not isinstance(value, (list, tuple)):
        return tuple(value.shape) if isinstance(value, (torch.Tensor, np.ndarray)) else ()
    shapes = set(map(shape_of_rows, value))
    if len(shapes) > 1 or None in shapes:
        return None
    return (len(value), *(shapes.pop() or ())) if shapes else (0,)
