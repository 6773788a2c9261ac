"""The mixin of `to`, `cpu`, `cuda`, `float` and their kin, which move or cast all entries."""

from __future__ import annotations

import builtins
import itertools
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tensordict.core.context import remember, remember_state
from tensordict.core.contract import ContainerT, Contract, LeafFn, identity
from tensordict.core.devices import as_device, place_of, put_on, wait_for
from tensordict.core.shapes import as_size
from tensordict.ops.refusals import name_entry
from tensordict.ops.storing.describing import convert_leaves, is_description
from tensordict.ops.storing.leaves import Leaves, _walk

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Casting")

# Takes the key of a leaf, as a tuple of names, and the leaf. Returns whether to cast it.
CastFilter = Callable[[Any, Any], object]
# The methods that take a `cast_filter`.
CASTS = (
    "to", "type", "float", "double", "half", "bfloat16", "bool", "int", "float16", "float32", "float64",
    "complex32", "complex64", "complex128", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "qint8", "qint32", "quint8", "quint4x2",
)  # fmt: skip


class Casting(Leaves):
    """`to` and its kin. Annotations spell `builtins.bool`, because `bool` is a method of this class."""

    # --- device ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """The device of all entries, or `None` if they may be on different devices. Use :meth:`to` to change it."""
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        raise RuntimeError(
            "the device cannot be assigned, because entries would have to move: use td.to(device), which returns a "
            "new container, td.clear_device_() or td.auto_device_()"
        )

    def to(self: SelfT, *args: Any, **kwargs: Any) -> SelfT:
        """Move the entries to another device, cast them to another dtype, or both.

        Call it as `to(device)`, `to(dtype)`, `to(device, dtype)`, `to(tensor)` or `to(container)`. `non_blocking` and
        `copy` may follow by position, as in `torch.Tensor.to`. `to(td.attrs())` casts each leaf to the device and dtype
        described there under the same key; see :meth:`attrs`. Keys that only one of the two has are ignored.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2), b=torch.ones(2))
            >>> td.to(torch.float16).dtype, td.to("cpu").device
            (torch.float16, device(type='cpu'))
            >>> with td.to(torch.float64) as precise:
            ...     precise["b"] = precise["b"] / 3
            >>> td["b"]
            tensor([0.3333, 0.3333])
            >>> td.to(torch.float16, cast_filter=lambda key, leaf: key == ("a",))["b"].dtype
            torch.float32

        Args:
            device: a device, or a string or number that names one.
            dtype: the dtype of every leaf.
            other: a tensor or a container, whose device and dtype the result gets. A container has a dtype only if
                all of its leaves share it.
            non_blocking: return while copies to or from an accelerator are still running. By default, all copies are
                queued together and awaited once.
            copy: copy leaves even if they do not change.
            memory_format: the memory format of leaves whose number of dims it fits.
            batch_size: the batch size of the result.
            non_blocking_pin: copy the leaves to pinned memory first, with `num_threads` threads.
            num_threads: for `non_blocking_pin`; see :meth:`pin_memory`.
            inplace: replace the leaves in this container instead of making a new one.
            cast_filter: takes the key of a leaf as a tuple of names, such as `("next", "done")`, and the leaf. If the
                result is false, the leaf keeps its dtype, and only moves. It is called for each tensor if a dtype is
                given, in a lazy stack for each member. Predicates such as :func:`is_inexact` fit. A tensorclass may
                have a filter of its own, which `cast_filter=None` turns off.

        Returns:
            a new container, which is locked if this container is and shares the leaves that do not change. This
            container itself if it is on the device already and you ask for nothing else (`batch_size` is then set in
            place). At the end of a block, `with td.to("cuda") as moved:` copies changes back, in the original dtypes.

        Raises:
            RuntimeError: torch does not support the cast. The error names the entry.
            TypeError: the arguments match none of these forms.
        """
        if not kwargs and len(args) == 1 and type(args[0]) is torch.dtype:
            return self._remember_move(self._cast(args[0]))
        if len(args) == 1 and isinstance(args[0], Contract) and is_description(args[0]):
            if more := sorted(kwargs.keys() - {"cast_filter"}):
                raise TypeError(f"to() takes no other arguments with a description of the leaves, got {more}")
            return self._same_lock(convert_leaves(self, args[0]))
        request = _parse_arguments(args, kwargs)
        if request.plain and (request.device is None or request.device == self._device):
            result = self
            if self._undo is None and not torch.compiler.is_compiling():
                # The end of a block `with td.to("cpu"):` has nothing to undo then.
                remember_state(self, _undo_nothing)
        else:
            result = self._move(request) if request.cast_filter is None else self._cast_and_move(request)
            result = self._replace_leaves(result) if request.inplace else self._remember_move(self._same_lock(result))
        if request.batch_size is not None and result is self:
            self.batch_size = request.batch_size
        elif request.batch_size is not None:
            # `_rebatch` also works on a frozen tensorclass. The result is new, so this changes no other container.
            result._rebatch(request.batch_size)  # type: ignore[attr-defined]
        return result

    def _remember_move(self, result: ContainerT) -> ContainerT:
        """Store on the result of `to` that the end of a block copies changes back. Returns the result."""
        source = self if torch.compiler.is_compiling() else weakref.ref(self)
        return remember(result, self, partial(_restore, source, self._holds_parameters))

    def cpu(self: SelfT, **kwargs: object) -> SelfT:
        """Move the entries to the CPU. Keyword arguments as for :meth:`to`."""
        return self.to("cpu", **kwargs)

    def cuda(self: SelfT, device: int | None = None, **kwargs: object) -> SelfT:
        """Move the entries to a CUDA device, by default the current one. Keyword arguments as for :meth:`to`."""
        if device is None or type(device) is int:
            device = torch.device("cuda" if device is None else f"cuda:{device}")  # type: ignore[assignment]
        return self.to(device, **kwargs)

    def clear_device_(self) -> Self:
        """Set the device of the whole tree to `None`. Entries stay where they are; new entries are not moved."""
        self._set_device(None)
        return self

    def auto_device_(self) -> Self:
        """Set the device of the whole tree to the device that all leaves share, if any. Returns this container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2)).auto_device_().device
            device(type='cpu')
        """
        devices = {leaf.device for leaf in self._leaves()}
        if len(devices) == 1:
            self._set_device(devices.pop())
        return self

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device
        # The structure of a lazy stack lacks the entries that only some members have.
        for value in self._members() or self._structure().values():
            if isinstance(value, Casting):
                value._set_device(device)

    @property
    def is_cuda(self) -> builtins.bool:
        """True if the device is a CUDA device."""
        return self._device is not None and self._device.type == "cuda"

    @property
    def is_cpu(self) -> builtins.bool:
        """True if the device is the CPU; False if it is `None`."""
        return self._device is not None and self._device.type == "cpu"

    @property
    def is_meta(self) -> builtins.bool:
        """True if the device is the meta device."""
        return self._device is not None and self._device.type == "meta"

    def pin_memory(self: SelfT, num_threads: int | None = None, inplace: builtins.bool = False) -> SelfT:
        """Copy the entries to pinned CPU memory. An accelerator can copy from it asynchronously.

        Args:
            num_threads: the number of threads that pin the leaves. `None` and 0 use the calling thread, and torch then
                splits each copy over its own threads. This is faster: on an H100's host by 15 times for 100 leaves of
                4 KiB, and by 4 times for eight leaves of 16 MiB.
            inplace: replace the leaves in this container instead of making a new one.

        Raises:
            RuntimeError: this machine lacks an accelerator to pin memory for.
        """
        leaves = self._leaves()
        if not num_threads or len(leaves) < 2:
            pinned = list(map(Tensor.pin_memory, leaves))
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                pinned = list(pool.map(Tensor.pin_memory, leaves))
        result = self._rebuilt(iter(pinned))
        return self._replace_leaves(result) if inplace else self._same_lock(result)

    def pin_memory_(self, num_threads: int | None = 0) -> Self:
        """Replace the leaves by copies in pinned memory; see :meth:`pin_memory`. Returns this container."""
        return self.pin_memory(num_threads, inplace=True)

    def _move(self, request: _Request) -> Self:
        """Return a new container of leaves that are moved and cast as requested."""
        device = request.device
        if device is None:
            return self._map_or_name(_make_cast(request, {}))
        if self._consolidated is not None and request.plain:
            whole = self._moved_whole(device, request.non_blocking)  # type: ignore[attr-defined]
            if whole is not None:
                return whole  # type: ignore[no-any-return]
        source = self
        if request.non_blocking_pin and device.type not in ("cpu", "meta"):
            source = self.pin_memory(request.num_threads)
        if torch.compiler.is_compiling():
            # A compiled function cannot wait for a stream, so these copies block unless requested otherwise.
            options = {"device": place_of(device), "non_blocking": request.non_blocking}
            return source._map_or_name(_make_cast(request, options), device)
        here = identity if request.plain else _make_cast(request, {})
        if device.type == "cpu" and all([leaf.is_cpu for leaf in source._leaves()]):  # noqa: C419 (half the time)
            return source._map_or_name(here, device)
        fn = _make_cast(request, {"device": place_of(device), "non_blocking": True})
        if device.type != "cpu":
            result = source._map_or_name(fn, device)
            if not request.non_blocking:
                wait_for((device,))
            return result
        # Copies to the CPU run on the streams of the devices that the leaves come from.
        origins: set[torch.device] = set()

        def fetch(leaf: Any) -> Any:
            if leaf.is_cpu:
                return here(leaf)
            origins.add(leaf.device)
            return fn(leaf)

        result = source._map_or_name(fetch, device)
        if not request.non_blocking:
            wait_for(origins)
        return result

    def _cast_and_move(self, request: _Request) -> Self:
        """Cast the leaves that the filter selects, and then move all of them."""
        rest = request._replace(dtype=None)
        cast = self if request.dtype is None else self._cast_some(_casts[request.dtype], request.cast_filter)
        return cast if rest.plain and request.device in (None, self._device) else cast._move(rest)

    def _map_or_name(self, fn: Callable[[Any], Any], device: Any = "kept") -> Self:
        """Map `fn` over all leaves, and set the device of every node if one is given. Errors name the entry."""
        try:
            return self._map(fn) if device == "kept" else self._place_on(fn, device)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise name_entry(error, _walk(self), fn) from error

    def _place_on(self, fn: Callable[[Any], object], device: torch.device) -> Self:
        """Return a container of `fn(leaf)` for each leaf, with the device `device` at every level."""
        mapping: Mapping[str, Any] = self._entries
        if not isinstance(mapping, dict):
            if (members := self._members(or_template=True)) is not None:
                return self._restack([member._place_on(fn, device) for member in members])
            # A tensor in a file that only changes its device stays there. Reading moves it.
            mapping = self._writable()
        entries = dict(mapping.items())
        for name, value in entries.items():
            if type(value) is not Tensor and isinstance(value, Casting):
                entries[name] = value._place_on(fn, device)
            elif fn is not identity:
                entries[name] = fn(value)
        if not isinstance(mapping, dict):
            return self._subset(entries, device)
        return self._build(entries, self._batch_size, device, self._names)

    # --- dtype ----------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that all leaves share; `None` if they differ, or without leaves."""
        dtypes = {leaf.dtype for leaf in self._leaves()}
        return dtypes.pop() if len(dtypes) == 1 else None

    def is_floating_point(self) -> builtins.bool:
        """Return whether all leaves are floating point."""
        return all(leaf.is_floating_point() for leaf in self._leaves())

    def type(self, dst_type: object, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to a dtype, or to a tensor type such as `"torch.DoubleTensor"` (as `torch.Tensor.type`).

        Args:
            dst_type: the dtype or the name of the type.
            cast_filter: selects the leaves to cast; see :meth:`to`.
        """
        if isinstance(dst_type, torch.dtype):
            return self._cast(dst_type, cast_filter)

        def cast_leaf(leaf: Any) -> Any:
            return leaf.type(dst_type)

        if cast_filter is not None:
            return self._same_lock(self._cast_some(cast_leaf, cast_filter))
        return self._same_lock(self._map_or_name(cast_leaf))

    def _cast(self, dtype: torch.dtype, cast_filter: CastFilter | None = None) -> Self:
        """Return a new container of leaves of this dtype. Leaves that have it already are shared."""
        cast = _casts[dtype]
        result = self._map_or_name(cast) if cast_filter is None else self._cast_some(cast, cast_filter)
        if self._locked:
            result._lock_tree()
        return result

    def _cast_some(self, cast: LeafFn, cast_filter: CastFilter | None) -> Self:
        """Replace each leaf by `cast(leaf)` if `cast_filter(key, leaf)` is true; share the others.

        Raises:
            TypeError: the filter is not a function.
        """
        if not callable(cast_filter):
            raise TypeError(f"cast_filter takes the key and the leaf and returns a bool, got {cast_filter!r:.80}")
        pairs = list(self._walk(or_template=True))
        chosen = [bool(cast_filter(path, leaf)) for path, leaf in pairs]
        flags = iter(chosen)
        try:
            return self._map(lambda leaf: cast(leaf) if next(flags) else leaf)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise name_entry(error, itertools.compress(pairs, chosen), cast) from error

    def bfloat16(self: SelfT, *, cast_filter: CastFilter | None = None) -> SelfT:
        """Cast every leaf to `torch.bfloat16`."""
        return self._cast(torch.bfloat16, cast_filter)

    def bool(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.bool`."""
        return self._cast(torch.bool, cast_filter)

    def complex32(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex32`."""
        return self._cast(torch.complex32, cast_filter)

    def complex64(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex64`."""
        return self._cast(torch.complex64, cast_filter)

    def complex128(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex128`."""
        return self._cast(torch.complex128, cast_filter)

    def double(self: SelfT, *, cast_filter: CastFilter | None = None) -> SelfT:
        """Cast every leaf to `torch.float64`."""
        return self._cast(torch.float64, cast_filter)

    def float(self: SelfT, *, cast_filter: CastFilter | None = None) -> SelfT:
        """Cast every leaf, including integers, to `torch.float32`.

        Args:
            cast_filter: selects the leaves to cast; see :meth:`to`. The other methods that cast take it too.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.arange(2)).float()["a"]
            tensor([0., 1.])
        """
        return self._cast(torch.float32, cast_filter)

    def float16(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float16`."""
        return self._cast(torch.float16, cast_filter)

    def float32(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float32`."""
        return self._cast(torch.float32, cast_filter)

    def float64(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float64`."""
        return self._cast(torch.float64, cast_filter)

    def half(self: SelfT, *, cast_filter: CastFilter | None = None) -> SelfT:
        """Cast every leaf to `torch.float16`."""
        return self._cast(torch.float16, cast_filter)

    def int(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int32`."""
        return self._cast(torch.int32, cast_filter)

    def int8(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int8`."""
        return self._cast(torch.int8, cast_filter)

    def int16(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int16`."""
        return self._cast(torch.int16, cast_filter)

    def int32(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int32`."""
        return self._cast(torch.int32, cast_filter)

    def int64(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int64`."""
        return self._cast(torch.int64, cast_filter)

    def uint8(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint8`."""
        return self._cast(torch.uint8, cast_filter)

    def uint16(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint16`."""
        return self._cast(torch.uint16, cast_filter)

    def uint32(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint32`."""
        return self._cast(torch.uint32, cast_filter)

    def uint64(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint64`."""
        return self._cast(torch.uint64, cast_filter)

    def qint8(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.qint8`, if torch supports that cast."""
        return self._cast(torch.qint8, cast_filter)

    def qint32(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.qint32`, if torch supports that cast."""
        return self._cast(torch.qint32, cast_filter)

    def quint8(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.quint8`, if torch supports that cast."""
        return self._cast(torch.quint8, cast_filter)

    def quint4x2(self, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.quint4x2`, if torch supports that cast."""
        return self._cast(torch.quint4x2, cast_filter)


class _Request(NamedTuple):
    """The arguments of a call of `to`."""

    device: torch.device | None
    dtype: torch.dtype | None = None
    non_blocking: builtins.bool = False
    copy: builtins.bool = False
    memory_format: torch.memory_format | None = None
    batch_size: torch.Size | None = None
    non_blocking_pin: builtins.bool = False
    num_threads: builtins.int | None = None
    inplace: builtins.bool = False
    cast_filter: CastFilter | None = None

    @property
    def plain(self) -> builtins.bool:
        """True if the call changes only the device, so that leaves on that device are shared."""
        return self.dtype is None and self.memory_format is None and not self.copy


# The dtypes that torch uses for Python's types of numbers.
_OF_NUMBERS: dict[object, torch.dtype] = {
    float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128
}  # fmt: skip
_POSITIONS = ("device", "dtype", "non_blocking", "copy")
_KEYWORDS = frozenset(
    (
        *_POSITIONS,
        *("other", "tensor", "memory_format", "batch_size", "non_blocking_pin", "num_threads", "inplace"),
        "cast_filter",
    )
)


def _parse_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Request:
    """Parse the arguments of `to`."""
    # The frequent forms first: the general code takes 3 us.
    if not kwargs and args and isinstance(args[0], (str, torch.device)):
        if len(args) == 1:
            return _Request(as_device(args[0]))
        if len(args) == 2 and isinstance(args[1], torch.dtype):
            return _Request(as_device(args[0]), args[1])
    given = dict(kwargs)
    if args:
        first = args[0]
        names: tuple[str, ...]
        if isinstance(first, (torch.dtype, type)):
            names = _POSITIONS[1:]
        elif isinstance(first, (Tensor, Contract)):
            names = ("other", *_POSITIONS[2:])
        else:
            names = _POSITIONS
        if len(args) > len(names):
            raise TypeError(f"to() takes at most {len(names)} positional arguments of this form, got {len(args)}")
        for name, value in zip(names, args, strict=False):
            if name in given:
                raise TypeError(f"to() got {name!r} by position and by keyword")
            given[name] = value
    unknown = given.keys() - _KEYWORDS
    if unknown:
        raise TypeError(f"to() got unknown keywords {sorted(unknown)}; known are {sorted(_KEYWORDS)}")
    device, dtype = given.get("device"), given.get("dtype")
    other = given.get("other", given.get("tensor"))
    if other is not None:
        if device is not None or dtype is not None:
            raise TypeError("to() takes either device and dtype, or a tensor or container that has them, not both")
        if not isinstance(other, (Tensor, Contract)):
            raise TypeError(f"to() can take the device and dtype of a tensor or container, not of {other!r}")
        device, dtype = other.device, other.dtype  # type: ignore[union-attr]
    dtype = _OF_NUMBERS.get(dtype, dtype)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"to() needs a torch.dtype, or the type of a number, got {dtype!r}")
    size = given.get("batch_size")
    return _Request(
        None if device is None else as_device(device),
        dtype,
        bool(given.get("non_blocking", False)),
        bool(given.get("copy", False)),
        given.get("memory_format"),
        None if size is None else as_size(size),
        bool(given.get("non_blocking_pin", False)),
        given.get("num_threads"),
        bool(given.get("inplace", False)),
        given.get("cast_filter"),
    )


_FORMAT_DIMS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _make_cast(request: _Request, options: dict[str, Any]) -> Callable[[Any], object]:
    """Return a function that casts one leaf. A channels-last format applies only to leaves of its number of dims."""
    if request.dtype is not None:
        if not options and request.memory_format is None and not request.copy:
            return _casts[request.dtype]
        options = {**options, "dtype": request.dtype}
    if request.copy:
        options = {**options, "copy": True}
    cast = partial(Tensor.to, **options)
    if request.memory_format is None:
        return cast
    formatted = partial(Tensor.to, **options, memory_format=request.memory_format)
    dims = _FORMAT_DIMS.get(request.memory_format)
    if dims is None:
        return formatted
    unformatted = cast if options else identity
    return lambda leaf: formatted(leaf) if leaf.ndim == dims else unformatted(leaf)


class _Casts(dict[torch.dtype, Callable[[Any], Any]]):
    """Maps each dtype to the fastest call that casts a leaf to it.

    If the leaf has the dtype already, `Tensor.to` takes 1.0 us and `Tensor.float` 0.3 us.
    """

    def __missing__(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return partial(Tensor.to, dtype=dtype)


_casts = _Casts(
    {
        torch.float16: Tensor.half,
        torch.float32: Tensor.float,
        torch.float64: Tensor.double,
        torch.bfloat16: Tensor.bfloat16,
        torch.bool: Tensor.bool,
        torch.uint8: Tensor.byte,
        torch.int8: Tensor.char,
        torch.int16: Tensor.short,
        torch.int32: Tensor.int,
        torch.int64: Tensor.long,
    }
)


def _undo_nothing(result: object) -> object:
    return result


def _restore(source: object, bypasses_autograd: bool, result: object) -> Any:
    """Undo `to` at the end of a block.

    With `bypasses_autograd`, it copies into parameters, too. Otherwise new tensors replace these.
    """
    if isinstance(source, weakref.ref):
        source = source()
    return result if source is None else _copy_back(result, source, bypasses_autograd)


def _copy_back(result: Any, source: Any, bypasses_autograd: bool) -> Any:
    """Move and cast the entries of `result` back, and copy them into the leaves of `source` where it has them."""
    if result._batch_size == source._batch_size and (pairs := source._pair_members(result)) is not None:
        return source._restack([_copy_back(piece, own, bypasses_autograd) for own, piece in pairs])
    current = source._entries
    device = source._device
    entries: dict[str, Any] = {}
    for name, value in result._entries.items():
        old = current.get(name)
        if isinstance(value, Contract):
            if isinstance(old, Contract):
                value = _copy_back(value, old, bypasses_autograd)
            elif device is not None:
                value = value._place_on(partial(put_on, device=device), device)
        elif isinstance(old, Tensor):
            value = _copy_leaf_back(value, old, bypasses_autograd)
        elif device is not None:
            value = put_on(value, device)
        entries[name] = value
    return result._build(entries, result._batch_size, device, result._names)


def _copy_leaf_back(value: Tensor, old: Tensor, bypasses_autograd: bool) -> Tensor:
    """Copy `value` into the old leaf and return this leaf; a new tensor if autograd or a new shape forbids that."""
    if value is old:
        return old
    # Unmodified entries keep their original tensor, because casting back can lose precision.
    if value.dtype != old.dtype and value.shape == old.shape and torch.equal(value, old.to(value.device, value.dtype)):
        return old
    if value.shape == old.shape and bypasses_autograd:
        with torch.no_grad():
            return old.copy_(value)
    if value.shape != old.shape or value.requires_grad or old.requires_grad:
        return value.to(old.device, old.dtype)
    return old.copy_(value)
