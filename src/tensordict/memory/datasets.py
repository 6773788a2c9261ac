"""Stored: a tensor in a dataset of an HDF5 file, of which only the part that is used is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tensordict.core.errors import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, joined
from tensordict.memory import attributes

aten = torch.ops.aten

# What is read or written in one piece where more would have to be held in memory.
SLAB = 16 << 20
# Rows that lie this much apart, on average, are read one by one; nearer ones with what is between them.
_SPREAD = 4
# The dtypes that NumPy has not are stored as unsigned integers of the same bits, with their name in an attribute.
DTYPE = "_dtype"
_BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_UNKNOWN_TO_NUMPY = {
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


def stored_dtype(dtype: torch.dtype) -> tuple[Any, str | None]:
    """The NumPy dtype of the dataset for a tensor, and the name to note when it only has the same bits.

    Raises:
        UnsupportedEntryError: there is none.
    """
    if dtype in _NUMPY:
        return _NUMPY[dtype], None
    name = str(dtype).removeprefix("torch.")
    if name not in _UNKNOWN_TO_NUMPY:
        raise UnsupportedEntryError(f"tensors of {dtype} cannot be stored in an HDF5 file")
    return _BITS[dtype.itemsize], name


def tensor_dtype(dataset: Any) -> torch.dtype | None:
    """The dtype of the tensor in a dataset; `None` when it holds no tensor.

    Raises:
        SaveError: the dtype that is noted on it is not that of its elements.
    """
    plain = dataset.dtype
    if dataset.shape is None or plain.kind not in "biufc" or plain.subdtype is not None:
        return None
    found = _TORCH.get(plain.newbyteorder("=") if plain.kind != "b" else np.dtype(bool))
    try:
        name = attributes.text(dataset, DTYPE)
    except ValueError as error:
        raise SaveError(str(error)) from None
    if name is None:
        return found
    noted = _UNKNOWN_TO_NUMPY.get(name)
    if noted is None or plain.kind != "u" or noted.itemsize != plain.itemsize:
        raise SaveError(f"the dtype {name!r:.40} that is noted on it is not that of its elements, {plain}")
    return noted  # type: ignore[no-any-return]


class Stored(Tensor):
    """A tensor in a dataset, or a part of one, in the place of what is read from it.

    It knows its shape, dtype and device; an index of integers, slices and `None` gives a smaller part without reading.
    Any other operation reads it, and gives tensors that are in memory. What is written into it is written to the file.

    Attributes:
        source: what opens the dataset, and refuses what cannot be done now (the file is closed, or not writable).
        key: what errors name.
        picks: what is taken of each dim of the dataset: one position, or a range of them.
        dims: the dim of the dataset that each dim runs over, `None` for one of size 1 that was added.
    """

    source: Any
    key: Path
    picks: list[int | range]
    dims: list[int | None]

    # Nothing is done before autograd; see `__torch_dispatch__`.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MEMORY:
            raise UnsupportedEntryError(f"{args[0]!r} is in a file and has no memory of its own; read it first")
        if torch.is_grad_enabled() and not _writes(func) and _any_requires_grad((args, kwargs)):
            # Autograd keeps what it needs for the backward pass, by which time the file may hold something else.
            args, kwargs = tree_map(in_memory, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def of(
        cls, source: object, dtype: torch.dtype, shape: Sequence[int], device: torch.device | None, key: Path
    ) -> Any:
        """All of a dataset."""
        return cls._part(source, dtype, [range(n) for n in shape], list(range(len(shape))), device, key)

    @classmethod
    def _part(
        cls,
        source: object,
        dtype: torch.dtype,
        picks: list[int | range],
        dims: list[int | None],
        device: torch.device | None,
        key: Path,
    ) -> Any:
        shape = [1 if dim is None else len(picks[dim]) for dim in dims]  # type: ignore[arg-type]
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device or _CPU)
        self.source, self.key, self.picks, self.dims = source, key, picks, dims
        return self

    def _cut(self, picks: list[int | range], dims: list[int | None]) -> Any:
        return self._part(self.source, self.dtype, picks, dims, self.device, self.key)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Stored({joined(self.key)!r}, shape={list(self.shape)}, dtype={self.dtype})"

    __reduce_ex__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Parts without reading, reads and writes of parts; all else on what is read, and back if it was written."""
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], Stored):
            done = special(*args, **(kwargs or {}))
            if done is not NotImplemented:
                return done
        if func is aten._foreach_copy_.default:
            for target, value in zip(args[0], args[1], strict=True):
                target.copy_(value)
            return None
        return _on_loaded(func, args, kwargs or {})

    # --- the part of the dataset ------------------------------------------------------------------------------------

    def _selection(self) -> tuple[Any, ...]:
        return tuple(
            pick if type(pick) is int else slice(pick.start, pick.stop, pick.step)  # type: ignore[union-attr]
            for pick in self.picks
        )

    def is_whole(self) -> bool:
        """Whether this is all of the dataset, in its own form."""
        shape = self.source.shape
        return len(self.dims) == len(shape) and self.picks == [range(n) for n in shape]

    def _lengths(self) -> list[int]:
        """The shape without the dims that were added."""
        return [len(pick) for pick in self.picks if type(pick) is range]

    def read(self) -> Tensor:
        """The elements, in memory."""
        return self._loaded(self._selection(), self._lengths()).reshape(self.shape)

    def _loaded(self, selection: tuple[Any, ...], shape: Sequence[int]) -> Tensor:
        self.source.check()
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        # Out of inference mode: a tensor that knows of no versions would not tell whether it was written into.
        with torch.inference_mode(False):
            return self._tensor(self._array(selection), shape)

    def _array(self, selection: object) -> Any:
        dataset = self.source.dataset()
        wanted = _NUMPY.get(self.dtype) or _BITS[self.dtype.itemsize]
        with self.source.named(self.key):
            return (dataset if dataset.dtype == wanted else dataset.astype(wanted))[selection]

    def _tensor(self, array: object, shape: Sequence[int]) -> Tensor:
        tensor = torch.from_numpy(np.asarray(array)).reshape(tuple(shape))
        if self.dtype not in _NUMPY:
            tensor = tensor.view(self.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            device = self.device
        return tensor if device == _CPU else tensor.to(device)

    def write(self, value: Tensor) -> None:
        """Write a tensor that broadcasts to this shape."""
        if value.shape != self.shape:
            value = value.expand(self.shape)
        value = value.squeeze(tuple(i for i, dim in enumerate(self.dims) if dim is None))
        self._stored(self._selection(), value)

    def _stored(self, selection: tuple[Any, ...], value: Tensor) -> None:
        dataset = self.source.writable()
        if not value.numel():
            return
        with self.source.named(self.key):
            if value.nbytes <= SLAB or _is_direct(value, self.dtype) or not value.ndim:
                dataset[selection] = as_array(value, self.dtype)
                return
            # Along the first dim that is taken in part or whole, so that no second copy of all exists.
            along = next(i for i, pick in enumerate(selection) if type(pick) is slice)
            pick = range(*selection[along].indices(dataset.shape[along]))
            for start, stop in slabs(value):
                rows = pick[start:stop]
                part = (*selection[:along], slice(rows.start, rows.stop, rows.step), *selection[along + 1 :])
                dataset[part] = as_array(value[start:stop], self.dtype)

    # --- rows of one dim --------------------------------------------------------------------------------------------

    def rows(self, dim: int, index: Tensor, spread: int) -> tuple[Tensor, Any, list[int]] | None:
        """What is to be read or written for positions along a dim: where they lie in it, the selection, its shape.

        Of several equal positions one is taken. Where there are few others between them, at most `spread` times as many
        in all, these are taken too, since one piece is read faster than many. `None` when that dim was added.

        Raises:
            IndexError: a position is out of bounds.
        """
        own = self.dims[dim]
        if own is None:
            return None
        pick = self.picks[own]
        assert type(pick) is range
        if index.dtype not in _INDICES:
            raise IndexError(f"an index tensor holds integers or booleans, got {index.dtype}")
        flat = index.detach().cpu().reshape(-1).to(torch.int64)
        size = len(pick)
        if flat.numel():
            low, high = int(flat.min()), int(flat.max())
            if low < -size or high >= size:
                wrong = low if low < -size else high
                raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {size}")
            if low < 0:
                flat = torch.where(flat < 0, flat + size, flat)
        positions, inverse = torch.unique(flat, return_inverse=True)
        count = positions.numel()
        selection = list(self._selection())
        if count:
            first, last = int(positions[0]), int(positions[-1])
            if last - first < spread * count:
                rows = pick[first : last + 1]
                selection[own] = slice(rows.start, rows.stop, rows.step)
                inverse = (flat - first).reshape(index.shape)
                return inverse, selection, self._with_rows(own, last - first + 1)
        selection[own] = (positions * pick.step + pick.start).numpy()
        return inverse.reshape(index.shape), selection, self._with_rows(own, count)

    def _with_rows(self, own: int, count: int) -> list[int]:
        return [count if i == own else len(p) for i, p in enumerate(self.picks) if type(p) is range]

    def _spread(self, shape: Sequence[int]) -> list[int]:
        """A shape without the dims that were added, with them."""
        lengths = iter(shape)
        return [1 if dim is None else next(lengths) for dim in self.dims]


class Rows:
    """What an index takes along the first dim of tensors, worked out once for all those of one length.

    Without it, each leaf would go through five calls of torch's dispatcher: 350 instead of 100 us a leaf for one item.
    """

    __slots__ = ("at", "order", "shape")

    def __init__(self, at: object, shape: tuple[int, ...], order: object = None) -> None:
        self.at = at
        self.shape = shape
        self.order = order

    @classmethod
    def of(cls, index: object, length: int) -> Rows | None:
        """The rows of an integer, a slice or a tensor of integers; `None` for what is left to torch, errors too."""
        if type(index) is int:
            return cls(index, ()) if -length <= index < length else None
        if type(index) is slice:
            found = range(length)[index]
            return cls(slice(found.start, found.stop, found.step), (len(found),)) if len(found) else None
        if type(index) is not Tensor or index.ndim != 1 or index.dtype not in _INDICES or not index.numel():
            return None
        flat = index.detach().cpu().numpy()
        low, high = int(flat.min()), int(flat.max())
        if low < -length or high >= length:
            return None
        if low < 0:
            flat = np.where(flat < 0, flat + length, flat)
        positions, order = np.unique(flat, return_inverse=True)
        first, last = int(positions[0]), int(positions[-1])
        if last - first < _SPREAD * len(positions):
            return cls(slice(first, last + 1), (len(flat),), flat - first)
        return cls(positions, (len(flat),), order)

    def read(self, stored: Stored) -> Tensor:
        """These rows of all of a dataset."""
        shape = (*self.shape, *stored.source.shape[1:])
        if 0 in shape:
            return stored._loaded((), shape)
        with torch.inference_mode(False):
            array = stored._array(self.at)
            if self.order is not None:
                # By NumPy: threads of torch's would cost more than they bring for a few rows.
                array = array[self.order]
            return stored._tensor(array, shape)


_CPU = torch.device("cpu")
_MEMORY = (Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.numpy)
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)


def in_memory(value: object) -> Any:
    """What is read of a `Stored`; anything else itself."""
    return value.read() if isinstance(value, Stored) else value


def as_array(value: Tensor, dtype: torch.dtype) -> Any:
    """A tensor as the array that is written to a dataset for tensors of this dtype; without a copy where possible."""
    value = in_memory(value).detach()
    value = value.to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
    if dtype not in _NUMPY:
        value = value.view(_INTEGERS[dtype.itemsize])
    return value.numpy()


def slabs(value: Tensor) -> Iterator[tuple[int, int]]:
    """The rows along the first dim that are read or written together, so that they take no more than `SLAB` bytes."""
    rows = value.shape[0]
    step = max(1, SLAB * rows // max(value.nbytes, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _is_direct(value: Tensor, dtype: torch.dtype) -> bool:
    return not isinstance(value, Stored) and value.is_cpu and value.dtype is dtype and value.is_contiguous()


# --- what is done to a part without reading all of it -----------------------------------------------------------------


def _slice(self: Stored, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    dim %= max(len(self.dims), 1)
    own = self.dims[dim]
    if own is None:
        return NotImplemented
    pick = self.picks[own]
    assert type(pick) is range
    picks = list(self.picks)
    picks[own] = pick[start:stop:step]
    return self._cut(picks, list(self.dims))


def _select(self: Stored, dim: int, index: int) -> Any:
    dim %= max(len(self.dims), 1)
    own = self.dims[dim]
    picks = list(self.picks)
    if own is not None:
        pick = picks[own]
        assert type(pick) is range
        if not -len(pick) <= index < len(pick):
            raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {len(pick)}")
        picks[own] = pick[index]
    return self._cut(picks, self.dims[:dim] + self.dims[dim + 1 :])


def _unbind(self: Stored, dim: int = 0) -> Any:
    dim %= max(len(self.dims), 1)
    return [_select(self, dim, position) for position in range(self.shape[dim])]


def _unsqueeze(self: Stored, dim: int) -> Any:
    dim %= len(self.dims) + 1
    return self._cut(list(self.picks), [*self.dims[:dim], None, *self.dims[dim:]])


def _same(self: Stored) -> Any:
    return self._cut(list(self.picks), list(self.dims))


def _clone(self: Stored, memory_format: Any = None) -> Any:
    loaded = self.read()
    return loaded if memory_format in (None, torch.preserve_format) else loaded.contiguous(memory_format=memory_format)


def _to_copy(self: Stored, *, device: Any = None, non_blocking: bool = False, **others: object) -> Any:
    if device is None or others.pop("memory_format", None) not in (None, torch.preserve_format) or any(others.values()):
        return NotImplemented
    return self._part(self.source, self.dtype, list(self.picks), list(self.dims), torch.device(device), self.key)


def _copy_(self: Stored, value: Tensor, non_blocking: bool = False) -> Any:
    self.write(value)
    return self


def _first_index(self: Stored, indices: Sequence[Any]) -> tuple[list[Any], int] | None:
    """The index tensors, masks as integers, and the first dim that has one."""
    spelled: list[Any] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            spelled += index.nonzero(as_tuple=True)
        else:
            spelled.append(index)
    first = next((i for i, index in enumerate(spelled) if index is not None), None)
    return None if first is None or len(spelled) > self.ndim else (spelled, first)


def _index(self: Stored, indices: Sequence[Any]) -> Any:
    found = _first_index(self, indices)
    if found is None:
        return NotImplemented
    spelled, dim = found
    rows = self.rows(dim, spelled[dim], _SPREAD)
    if rows is None:
        return NotImplemented
    inverse, selection, shape = rows
    block = self._loaded(tuple(selection), shape).reshape(self._spread(shape))
    spelled[dim] = inverse.to(block.device)
    return aten.index.Tensor(block, spelled)


def _index_select(self: Stored, dim: int, index: Tensor) -> Any:
    dim %= max(len(self.dims), 1)
    return _index(self, [None] * dim + [index.reshape(-1)])


def _index_put_(self: Stored, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Any:
    found = None if accumulate else _first_index(self, indices)
    rows = None if found is None else self.rows(found[1], found[0][found[1]], 1)
    if found is None or rows is None:
        return NotImplemented
    spelled, dim = found
    inverse, selection, shape = rows
    spread = self._spread(shape)
    whole = sum(index is not None for index in spelled) == 1 and torch.unique(inverse).numel() == spread[dim]
    if whole:
        block = torch.empty(spread, dtype=self.dtype, device=_CPU)
    else:
        block = self._loaded(tuple(selection), shape).to(_CPU).reshape(spread)
    spelled = [index if index is None else index.to(_CPU) for index in spelled]
    spelled[dim] = inverse
    aten.index_put_.default(block, spelled, in_memory(values).to(_CPU, self.dtype))
    self._stored(tuple(selection), block.reshape(shape))
    return self


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.unsqueeze.default: _unsqueeze,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.index_put_.default: _index_put_,
}


def _on_loaded(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on what is read, and write back what it has written into."""
    read: dict[int, tuple[Stored, Tensor]] = {}

    def load(value: object) -> Any:
        if not isinstance(value, Stored):
            return value
        if id(value) not in read:
            read[id(value)] = (value, value.read())
        return read[id(value)][1]

    loaded_args, loaded_kwargs = tree_map(load, (args, kwargs))
    result = func(*loaded_args, **loaded_kwargs)
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for target in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(target, Stored):
                target.write(read[id(target)][1])
    # What writes into its argument gives that argument.
    targets = {id(loaded): stored for stored, loaded in read.values()}
    return tree_map(lambda value: targets.get(id(value), value) if isinstance(value, Tensor) else value, result)


def _writes(func: object) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__", "__get__") or (name.endswith("_") and not name.endswith("__"))


def _any_requires_grad(value: object) -> bool:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(map(_any_requires_grad, value))
    return isinstance(value, dict) and any(map(_any_requires_grad, value.values()))
