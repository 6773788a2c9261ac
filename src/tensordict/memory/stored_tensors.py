"""`StoredTensor`: a tensor in an array of a store, such as an HDF5 file, that reads and writes only the parts used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.core import torch_internals as internals
from tensordict.core.devices import place_of
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.core.keys import Path, entry_of, joined

aten = torch.ops.aten
T = TypeVar("T")

# Large tensors are read and written in pieces of this many bytes, to save memory.
SLAB = 16 << 20
# If a range has at most this many times as many rows as needed, all its rows are read at once.
SPREAD = 4
# Dtypes that NumPy lacks are stored as unsigned integers of the same bits, with their name in an attribute.
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_UNKNOWN_TO_NUMPY: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for name in (
        "bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu", "float4_e2m1fn_x2",
    )
    if (dtype := getattr(torch, name, None)) is not None
}  # fmt: skip
_NUMPY = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_TORCH = {numpy: dtype for dtype, numpy in _NUMPY.items()}


def stored_dtype(dtype: torch.dtype, key: Path = ()) -> tuple[np.dtype[Any], str | None]:
    """Return the NumPy dtype of the array for a tensor, and the name to store beside it if only the bits are the same.

    Raises:
        UnsupportedEntryError: no NumPy dtype can hold such tensors.
    """
    if dtype in _NUMPY:
        return _NUMPY[dtype], None
    name = str(dtype).removeprefix("torch.")
    if name not in _UNKNOWN_TO_NUMPY:
        raise UnsupportedEntryError(f"{entry_of(key)}tensors of {dtype} cannot be stored as an array")
    return _BITS[dtype.itemsize], name


def tensor_dtype(dtype: np.dtype[Any], noted: str | None) -> torch.dtype | None:
    """Return the dtype of the tensor in an array, or `None` if the array holds no tensor.

    Args:
        dtype: the NumPy dtype of the array.
        noted: the name that `stored_dtype` returned, if the array has one.

    Raises:
        ValueError: the name does not fit the elements.
    """
    if dtype.kind not in "biufc" or dtype.subdtype is not None:
        return None
    if noted is None:
        return _TORCH.get(dtype.newbyteorder("=") if dtype.kind != "b" else np.dtype(bool))
    found = _UNKNOWN_TO_NUMPY.get(noted)
    if found is None or dtype.kind != "u" or found.itemsize != dtype.itemsize:
        raise ValueError(f"the dtype {noted!r:.40} that is noted on it is not that of its elements, {dtype}")
    return found


# A selection of an array: for each dim a position or a slice with a positive step. One dim may have an array of rising
# positions instead.
Selection = tuple[Any, ...]
# Elements in memory.
Values = np.ndarray[Any, np.dtype[Any]]


class Array(Protocol):
    """An array of a store, as a `StoredTensor` needs it. Errors of the store name the path and the key."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""

    @property
    def spread(self) -> int:
        """How many times as many rows as needed a read may cover; 1 for exactly the needed rows. See `SPREAD`."""

    @property
    def rows_together(self) -> int:
        """The number of rows along the first dim that the store keeps as one piece, best written at once."""

    def check(self) -> None:
        """Raise a `SaveError` if the store was closed."""

    def read(self, selection: Selection, dtype: np.dtype[Any]) -> Values | Tensor:
        """Return the selected elements as a NumPy array of this dtype, or as a tensor on any device."""

    def write(self, selection: Selection, values: Values) -> None:
        """Write an array to the selection; a `SaveError` if the store is read-only."""


class StoredTensor(Tensor):
    """A tensor in an array of a store, or a part of one, that is read when it is used.

    Shape, dtype and device are known without reading, and so is the part at an index of integers, slices and `None`.
    Any other operation reads the elements and returns tensors in memory. Writes go to the store.

    Attributes:
        array: the array.
        key: the key of the entry, for `repr`.
        picks: for each dim of the array, the selected positions: one int, a range, or an array of rising positions.
        dims: for each dim of this tensor, the dim of the array; `None` for an added dim of size 1.
    """

    array: Array
    key: Path
    picks: list[Any]
    dims: list[int | None]
    # Plain attributes: torch's properties would go through `__torch_function__`, some microseconds each.
    shape: torch.Size = torch.Size(())
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    is_nested: bool = False

    # Operations run in `__torch_dispatch__`, below autograd.
    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and type(args[0]) is StoredTensor and type(args[1]) is Tensor:
            # A shortcut to the same call in `__torch_dispatch__`.
            args[0].write(args[1])
            return args[0]
        if func in _MEMORY:
            raise UnsupportedEntryError(f"{args[0]!r} is in a file and has no memory of its own; read it first")
        if torch.is_grad_enabled() and not _writes(func) and _any_requires_grad((args, kwargs)):
            # Autograd saves its inputs for the backward pass, and the file may change before that: read it first.
            args, kwargs = internals.tree_map(read_stored, (args, kwargs))
            return func(*args, **kwargs)
        with internals.as_plain():
            return func(*args, **kwargs)

    @classmethod
    def of(cls, array: Array, dtype: torch.dtype, device: torch.device | None, key: Path) -> StoredTensor:
        """Return the tensor of a whole array."""
        shape = array.shape
        return cls._part(array, dtype, [range(n) for n in shape], list(range(len(shape))), device, key)

    @classmethod
    def _part(
        cls,
        array: Array,
        dtype: torch.dtype,
        picks: list[Any],
        dims: list[int | None],
        device: torch.device | None,
        key: Path,
    ) -> StoredTensor:
        shape = torch.Size([1 if dim is None else len(picks[dim]) for dim in dims])
        device = _CPU if device is None else place_of(device)
        self: StoredTensor = internals.make_wrapper(cls, shape, dtype=dtype, device=device)
        self.array, self.key, self.picks, self.dims = array, key, picks, dims
        self.shape, self.dtype, self.device = shape, dtype, device
        return self

    def _to_device(self, device: torch.device) -> StoredTensor:
        """Return the same part, which moves to that device when it is read."""
        return self._part(self.array, self.dtype, self.picks, self.dims, device, self.key)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StoredTensor({joined(self.key)!r}, shape={list(self.shape)}, dtype={self.dtype})"

    __reduce_ex__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Turn copies of the whole part into reads and writes of the store. Run any other operation in memory."""
        first = args[0]
        if isinstance(first, StoredTensor):
            if func is aten.copy_.default:
                first.write(args[1])
                return first
            if func in (aten.fill_.Scalar, aten.zero_.default):
                first.write(torch.full((), *args[1:] or (0,), dtype=first.dtype, device=_CPU))
                return first
            if func in (aten.alias.default, aten.detach.default):
                return first._to_device(first.device)
            if func is aten.clone.default and not kwargs:
                return first.read()
            if func is internals.aten_to_copy and kwargs and kwargs.keys() <= {"device", "non_blocking"}:
                return first._to_device(kwargs["device"])
        return _call_in_memory(func, args, kwargs or {})

    # --- all of it ----------------------------------------------------------------------------------------------------

    def _build_selection(self) -> list[Any]:
        return [slice(pick.start, pick.stop, pick.step) if isinstance(pick, range) else pick for pick in self.picks]

    def is_whole(self) -> bool:
        """Return True if this is the whole array, with its dims in their order."""
        shape = self.array.shape
        return len(self.dims) == len(shape) and self.picks == [range(n) for n in shape]

    def read(self) -> Tensor:
        """Read the elements into memory."""
        return self._read(tuple(self._build_selection()), self.shape)

    def _read(self, selection: Selection, shape: Sequence[int], order: Values | None = None) -> Tensor:
        """Read a selection as a tensor of a shape; `order` then picks rows along the first dim."""
        self.array.check()
        dtype, device = self.dtype, self.device
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        # Inference tensors have no version counters, which tell whether a tensor was written to.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NO_CONTEXT:
            array = self.array.read(selection, _NUMPY.get(dtype) or _BITS[dtype.itemsize])
            if order is not None:
                # For a few rows, NumPy is faster than torch's threads.
                array = array[order] if isinstance(array, np.ndarray) else array[torch.from_numpy(order)]
            tensor = as_tensor(array, dtype).reshape(tuple(shape))
            return tensor if device == _CPU else tensor.to(device)

    def write(self, value: Tensor, watch: Callable[[int], None] | None = None) -> None:
        """Write a tensor that broadcasts to this shape; `watch` receives the number of bytes of each write."""
        if value.shape != self.shape:
            value = value.expand(self.shape)
        if None in self.dims:
            value = value.squeeze(tuple(i for i, dim in enumerate(self.dims) if dim is None))
        selection = self._build_selection()
        if value.nbytes <= SLAB or not value.ndim or (watch is None and _is_direct(value, self.dtype)):
            self.array.write(tuple(selection), as_array(value, self.dtype))
            if watch is not None:
                watch(value.nbytes)
            return
        # Write slab by slab along the first dim with a slice, so that no second copy of the whole tensor exists.
        along = next(i for i, pick in enumerate(selection) if type(pick) is slice)
        pick = range(*selection[along].indices(self.array.shape[along]))
        for start, stop in slabs(value, self.array.rows_together if along == 0 else 1):
            rows = pick[start:stop]
            part = (*selection[:along], slice(rows.start, rows.stop, rows.step), *selection[along + 1 :])
            self.array.write(part, as_array(value[start:stop], self.dtype))
            if watch is not None:
                watch((stop - start) * value.nbytes // len(value))

    # --- parts --------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        found = self._parse_index(index)
        if found is None:
            return self.read()[index]
        part, tensors = found
        if not _has_tensors(tensors):
            return part
        part, tensors = part._narrow_rows(tensors, self.array.spread)
        return part.read()[_as_index(tensors)]

    def __setitem__(self, index: Any, value: object) -> None:
        value = read_stored(torch.as_tensor(value))
        found = self._parse_index(index)
        if found is None:
            content = self.read()
            content[index] = value
            self.write(content)
            return
        part, tensors = found
        if not _has_tensors(tensors):
            while value.ndim > part.ndim and value.shape[0] == 1:
                value = value[0]
            part.write(value)
            return
        part, tensors = part._narrow_rows(tensors, 1)
        given = [(dim, tensor) for dim, tensor in enumerate(tensors) if tensor is not None]
        (dim, first), *others = given
        if not others and torch.unique(first).numel() == part.shape[dim]:
            if dim == 0 and first.ndim == 1:
                # The last one of equal positions wins, which torch does not promise.
                last = np.empty(part.shape[0], np.int64)
                last[first.numpy(force=True)] = np.arange(len(first))
                whole = value.expand((len(first), *part.shape[1:]))
                part.write(whole[torch.from_numpy(last).to(value.device)])
                return
            content = torch.empty(part.shape, dtype=part.dtype, device=_CPU)
        else:
            content = part.read().to(_CPU)
        at = _as_index([None if tensor is None else tensor.to(_CPU) for tensor in tensors])
        content[at] = value.to(_CPU, self.dtype)
        part.write(content)

    def _parse_index(self, index: object) -> tuple[StoredTensor, list[Tensor | None]] | None:
        """Split an index into the part that its integers, slices and `None` select, and index tensors for that part.

        Returns `None` if the index has other items, or if torch refuses it.
        """
        items: list[Any] = [_simplify_item(item) for item in (index if isinstance(index, tuple) else (index,))]
        if not all(item is None or item is Ellipsis or type(item) in (int, slice, Tensor) for item in items):
            return None
        rest = len(self.dims) - sum([_count_dims(item) for item in items])
        ellipses = sum(item is Ellipsis for item in items)
        if rest < 0 or ellipses > 1:
            return None
        picks, dims, tensors = list(self.picks), list[int | None](), list[Tensor | None]()
        at = 0
        for item in items if ellipses else (*items, Ellipsis):
            count = rest if item is Ellipsis else _count_dims(item)
            over = self.dims[at : at + count]
            if item is None:
                over = [None]
            elif isinstance(item, Tensor):
                if item.dtype in _MASKS and item.shape != self.shape[at : at + count]:
                    return None
                tensors += item.nonzero(as_tuple=True) if item.dtype in _MASKS else (item,)
            elif item is not Ellipsis:
                pick = range(1) if over[0] is None else picks[over[0]]
                if not isinstance(pick, range) or (type(item) is slice and not (item.step is None or item.step > 0)):
                    return None
                if type(item) is int and not -len(pick) <= item < len(pick):
                    raise IndexError(f"index {item} is out of bounds for dimension {at} with size {len(pick)}")
                if over[0] is not None:
                    picks[over[0]] = pick[item]
                elif type(item) is slice and not pick[item]:
                    return None
                over = [] if type(item) is int else over
            dims += over
            tensors += [None] * (len(dims) - len(tensors))
            at += count
        return self._part(self.array, self.dtype, picks, dims, self.device, self.key), tensors

    def _narrow_rows(self, tensors: list[Tensor | None], spread: int) -> tuple[StoredTensor, list[Tensor | None]]:
        """Narrow this part to the rows that the first index tensor needs. Return it and the index tensors for it.

        If the rows lie close together, the part also has the rows between them: at most `spread` times as many in all.
        """
        dim, index = next((at, tensor) for at, tensor in enumerate(tensors) if tensor is not None)
        own = self.dims[dim]
        pick = None if own is None else self.picks[own]
        if own is None or not isinstance(pick, range):
            return self, tensors
        rows = Rows.of(index, len(pick), spread, dim)
        picks = list(self.picks)
        picks[own] = pick[rows.at] if isinstance(rows.at, slice) else rows.at * pick.step + pick.start
        order = torch.from_numpy(rows.order).to(self.device)
        part = self._part(self.array, self.dtype, picks, self.dims, self.device, self.key)
        return part, [*tensors[:dim], order, *tensors[dim + 1 :]]

    def read_rows(self, rows: Rows) -> Tensor:
        """Read rows of a whole array along the first dim. Many arrays can share one `Rows`."""
        return self._read((rows.at,), (*rows.shape, *self.array.shape[1:]), rows.order)


class RowsArray:
    """Rows of a tensor as an `Array`: reads and writes go to the tensor.

    Args:
        leaf: the tensor, a `StoredTensor` or one in memory.
        read: reads the rows of a tensor; its attribute `index` is the index of the rows.
        check: raises an error if the tensor can no longer be read.
        shape: the shape of the rows.
    """

    spread = SPREAD

    def __init__(self, leaf: Any, read: Any, check: Callable[[], None] | None, shape: torch.Size) -> None:
        self.leaf, self.rows, self.shape = leaf, read, shape
        self._check = check
        # All rows are written at once.
        self.rows_together = max(1, shape[0]) if shape else 1

    def check(self) -> None:
        if self._check is not None:
            self._check()

    def read(self, selection: Selection, dtype: object) -> Tensor:
        found: Tensor = self.rows(self.leaf)
        return found[_torch_index(selection)]

    def write(self, selection: Selection, values: Values) -> None:
        content = as_tensor(values, self.leaf.dtype)
        if content.shape != self.shape:
            # Only whole rows can be assigned: read them, change a part, and write them back.
            whole = read_stored(self.rows(self.leaf)).to(_CPU, copy=True)
            whole[_torch_index(selection)] = content
            content = whole
        with torch.no_grad():
            self.leaf[self.rows.index] = content.to(self.leaf.device)


def _torch_index(selection: Selection) -> tuple[Any, ...]:
    return tuple([torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in selection])


@dataclass(slots=True)
class Rows:
    """The fastest way to read rows along a dim: a selection of the array, and the order of the rows in the result.

    at: the selection: a position, a slice, or rising positions.
    shape: replaces the dim in the shape of the result.
    order: for each row, its position among the rows that were read; `None` if they have the right order.
    """

    at: int | slice | Values
    shape: tuple[int, ...]
    order: Values | None = None

    @classmethod
    def of_index(cls, index: object, size: int, spread: int) -> Rows | None:
        """Return the rows of an int, a slice or a 1-dimensional index tensor; `None` for any other index.

        See `of` for `spread`.
        """
        if type(index) is int:
            return cls(index % size, ()) if -size <= index < size else None
        if type(index) is slice:
            taken = range(size)[index]
            return cls(slice(taken.start, taken.stop, taken.step), (len(taken),)) if taken.step > 0 else None
        return (
            cls.of(index, size, spread)
            if type(index) is Tensor and index.ndim == 1 and index.dtype in _INDICES
            else None
        )

    @classmethod
    def of(cls, index: Tensor, size: int, spread: int, dim: int = 0) -> Rows:
        """Return the rows at the positions in an index tensor, along a dim of this size.

        Equal positions are read once. If the rows lie close together, the rows between them are read, too, because one
        piece is faster than many: at most `spread` times as many rows in all.

        Raises:
            IndexError: a position is out of bounds, or the index does not hold integers.
        """
        if index.dtype not in _INDICES:
            raise IndexError(f"an index tensor holds integers or booleans, got {index.dtype}")
        shape = tuple(index.shape)
        flat = index.detach().cpu().numpy().reshape(-1).astype(np.int64)
        if not flat.size:
            return cls(slice(0, 0), shape, flat.reshape(shape))
        low, high = int(flat.min()), int(flat.max())
        if low < -size or high >= size:
            wrong = low if low < -size else high
            raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {size}")
        if low < 0:
            flat = np.where(flat < 0, flat + size, flat)
        positions, order = np.unique(flat, return_inverse=True)
        first, last = int(positions[0]), int(positions[-1])
        if last - first < spread * len(positions):
            return cls(slice(first, last + 1), shape, (flat - first).reshape(shape))
        return cls(positions, shape, order.reshape(shape))


_CPU = torch.device("cpu")
_NO_CONTEXT = nullcontext()
_MEMORY = (Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.numpy)
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)
_MASKS = (torch.bool, torch.uint8)


@overload
def read_stored(value: Tensor) -> Tensor: ...
@overload
def read_stored(value: T) -> T: ...
def read_stored(value: object) -> object:
    """Read a `StoredTensor` into memory. Return any other value unchanged."""
    return value.read() if isinstance(value, StoredTensor) else value


def as_array(value: Tensor, dtype: torch.dtype) -> Values:
    """Convert a tensor to the array that a store keeps for tensors of this dtype; without a copy if possible."""
    if (
        type(value) is Tensor
        and _is_direct(value, dtype)
        and not (value.requires_grad or value.is_conj() or value.is_neg())
    ):
        return value.numpy() if dtype in _NUMPY else value.view(_INTEGERS[dtype.itemsize]).numpy()
    value = read_stored(value).detach()
    value = value.to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
    if dtype not in _NUMPY:
        value = value.view(_INTEGERS[dtype.itemsize])
    return value.numpy()


def as_tensor(values: Values | Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the result of `as_array` back to a tensor of this dtype. Return a tensor unchanged."""
    if isinstance(values, Tensor):
        return values
    tensor = torch.from_numpy(np.asarray(values))
    return tensor if dtype in _NUMPY else tensor.view(dtype)


def slabs(value: Tensor, together: int = 1) -> Iterator[tuple[int, int]]:
    """Yield first and last row of each slab of at most `SLAB` bytes along the first dim.

    The number of rows in a slab is a multiple of `together`, even if so many rows have more bytes.
    """
    rows = value.shape[0]
    step = max(together, SLAB * rows // max(value.nbytes, 1) // together * together)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _is_direct(value: Tensor, dtype: torch.dtype) -> bool:
    return not isinstance(value, StoredTensor) and value.is_cpu and value.dtype is dtype and value.is_contiguous()


def _simplify_item(item: object) -> object:
    """Convert an index tensor without dims to an int if it holds one, else to `NotImplemented`.

    Return any other item unchanged.
    """
    if not isinstance(item, Tensor):
        return item
    if item.ndim:
        return item.as_subclass(Tensor)
    return int(item) if item.dtype in _INDICES else NotImplemented


def _count_dims(item: object) -> int:
    """Return the number of dims that an item of an index consumes."""
    if isinstance(item, Tensor):
        return item.ndim if item.dtype in _MASKS else 1
    return int(type(item) in (int, slice))


def _has_tensors(tensors: Sequence[Tensor | None]) -> bool:
    return any(tensor is not None for tensor in tensors)


def _as_index(tensors: Sequence[Tensor | None]) -> tuple[slice | Tensor, ...]:
    return tuple(slice(None) if tensor is None else tensor for tensor in tensors)


def _call_in_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Read all arguments, call the function, and write the arguments back that it has changed."""
    read: dict[int, tuple[StoredTensor, Tensor]] = {}

    def load(value: object) -> object:
        if not isinstance(value, StoredTensor):
            return value
        if id(value) not in read:
            read[id(value)] = (value, value.read())
        return read[id(value)][1]

    loaded_args, loaded_kwargs = internals.tree_map(load, (args, kwargs))
    result = func(*loaded_args, **loaded_kwargs)
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for target in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(target, StoredTensor):
                target.write(read[id(target)][1])
    # An in-place function returns its argument: return the stored one.
    targets = {id(loaded): stored for stored, loaded in read.values()}
    return internals.tree_map(
        lambda value: targets.get(id(value), value) if isinstance(value, Tensor) else value, result
    )


def _writes(func: object) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__", "__get__") or (name.endswith("_") and not name.endswith("__"))


def _any_requires_grad(value: object) -> bool:
    if isinstance(value, Tensor):
        with internals.as_plain():
            return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(map(_any_requires_grad, value))
    return isinstance(value, dict) and any(map(_any_requires_grad, value.values()))
