"""Methods that make a container of the same structure (`new_zeros`, ...), and methods that fill one in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import foreach
from tensordict.core.contract import Contract, EntryStore
from tensordict.core.exceptions import refuse_stored
from tensordict.core.keys import path_of
from tensordict.core.shapes import as_ints, as_size
from tensordict.core.signatures import spells
from tensordict.ops.entries.reading import NO_DEFAULT, Reading

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    class _New(TypedDict, total=False):
        dtype: torch.dtype | None
        device: object
        requires_grad: bool
        layout: torch.layout
        pin_memory: bool | None
        empty_lazy: bool

    SelfT = TypeVar("SelfT", bound="Factories")


def _collect_options(
    *,
    dtype: torch.dtype | None = None,
    device: object = NO_DEFAULT,
    requires_grad: bool = False,
    layout: torch.layout = torch.strided,
    pin_memory: bool | None = None,
    empty_lazy: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments for `Tensor.new_empty`, without arguments at their default."""
    options: dict[str, Any] = {}
    if layout is not torch.strided:
        options["layout"] = layout
    if requires_grad:
        options["requires_grad"] = True
    if dtype is not None:
        options["dtype"] = dtype
    if device is not NO_DEFAULT and device is not None:
        options["device"] = device
    if pin_memory is not None:
        options["pin_memory"] = pin_memory
    return options


_OPTIONS = list(inspect.signature(_collect_options).parameters)


class Factories(Reading):
    """The methods `new_empty`, `new_zeros`, `new_ones`, `new_full`, `new_tensor`, `zero_` and `fill_`."""

    @spells(_collect_options)
    def new_empty(self, *size: object, **options: Unpack[_New]) -> Self:
        """Make a container of the same structure and another batch size, with uninitialised entries.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 5)}, batch_size=[3]).new_empty(7)["a"].shape
            torch.Size([7, 5])

        Args:
            *size: the new batch size, as ints or as one sequence.
            dtype: the dtype of all entries; by default each keeps its own.
            device: the device of the new container; by default each entry keeps its own.
            requires_grad: whether autograd records operations on the entries.
            layout: the layout of the entries.
            pin_memory: whether to allocate in pinned memory.
            empty_lazy: accepted for compatibility, without effect.

        Returns:
            a new container, not locked. The new size replaces the batch dims of this container; nested containers keep
            their further batch dims.
        """
        return self._make_of_size(as_ints(size), Tensor.new_empty, options)

    @spells(_collect_options)
    def new_zeros(self, *size: object, **options: Unpack[_New]) -> Self:
        """Make a container of the same structure and another batch size, filled with 0.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.ones(3)}, batch_size=[3]).new_zeros(2)["a"]
            tensor([0., 0.])

        Takes the arguments of :meth:`new_empty`.
        """
        return self._make_of_size(as_ints(size), Tensor.new_zeros, options)

    @spells(_collect_options)
    def new_ones(self, *size: object, **options: Unpack[_New]) -> Self:
        """Make a container of the same structure and another batch size, filled with 1.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3)}, batch_size=[3]).new_ones(2)["a"]
            tensor([1., 1.])

        Takes the arguments of :meth:`new_empty`.
        """
        return self._make_of_size(as_ints(size), Tensor.new_ones, options)

    @spells(_collect_options)
    def new_full(self, size: Any, fill_value: Any, **options: Unpack[_New]) -> Self:
        """Make a container of the same structure and of batch size `size`, filled with `fill_value`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3)}, batch_size=[3]).new_full((2,), 7.0)["a"]
            tensor([7., 7.])

        Takes the other arguments of :meth:`new_empty`.
        """
        return self._make_of_size(as_ints((size,)), partial(Tensor.new_full, fill_value=fill_value), options)

    def _make_of_size(self, size: object, make: Callable[..., Tensor], options: _New) -> Self:
        """Return a container of a batch size, whose leaves `make` creates from the leaves here."""
        for name in options:
            if name not in _OPTIONS:
                raise TypeError(f"there is no argument {name!r}; the arguments are {', '.join(_OPTIONS)}")
        given, head, batch_dims = _collect_options(**options), tuple(as_size(size)), len(self._batch_size)
        keep_names = (lambda names: names) if len(head) == batch_dims else None
        result = self._map(
            lambda v: make(v, (*head, *v.shape[batch_dims:]), **given), torch.Size(head), batch_dims, keep_names
        )
        device = options.get("device", NO_DEFAULT)
        return result if device is NO_DEFAULT else _set_device(result, device)

    def new_tensor(
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = NO_DEFAULT,
        requires_grad: bool = False,
        pin_memory: bool | None = None,
    ) -> Self:
        """Make a container with the keys of this one and copies of `data`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3)}, batch_size=[3]).new_tensor(torch.arange(2))["a"]
            tensor([0., 1.])

        Args:
            data: a container, whose entries are copied to the same keys; or a tensor (or a value that `torch.as_tensor`
                takes), which is copied to every key.
            dtype: the dtype of all entries; by default each has the dtype of the entry in this container.
            device: the device of the new container; by default each entry is on the device of the entry in this
                container.
            requires_grad: whether autograd records operations on the entries.
            pin_memory: whether to put the entries in pinned memory.

        Returns:
            a new container. Its batch size is the batch size of `data`, or the shape of `data` for a tensor.

        Raises:
            KeyError: `data` is a container and lacks one of the keys.
        """

        def copy(like: Tensor, source: Tensor) -> Tensor:
            target = like.device if device is NO_DEFAULT or device is None else device
            made = source.detach().to(target, like.dtype if dtype is None else dtype, copy=True)
            return (made.pin_memory() if pin_memory else made).requires_grad_(requires_grad)

        if not isinstance(data, Contract):
            data = torch.as_tensor(data)
        result = _copy_into_structure(self, data, copy)
        return result if device is NO_DEFAULT else _set_device(result, device)  # type: ignore[no-any-return]

    def zero_(self: SelfT) -> SelfT:
        """Write 0 into all entries, nested ones too; returns the same container, which may be locked.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.ones(2)).zero_()["a"]
            tensor([0., 0.])

        Raises:
            RuntimeError: an entry is a leaf of the autograd graph that requires grad. The error names it, and nothing
                has changed.
        """
        self._fill_leaves(self._leaves(), 0)
        return self

    def fill_(self, key: object, value: float | bool) -> Self:
        """Write a number into all elements of the entry at a nested key; returns the same container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2)).fill_("a", 3.0)["a"]
            tensor([3., 3.])

        Raises:
            KeyError: the container has no such entry.
        """
        path = path_of(key)
        if not self._has(path):
            raise self._make_missing_error(key)
        node = self if len(path) == 1 else self._find(path[:-1])
        self._fill_leaves(node._leaves_of(path[-1]), value)
        return self

    def _fill_leaves(self, leaves: list[Tensor], value: float | bool) -> None:
        if self._holds_parameters:
            leaves = [leaf.detach() for leaf in leaves]
        foreach.refuse_graph_leaves(leaves, self)
        for leaf in filter(attrgetter("is_nested"), leaves):
            refuse_stored(leaf)
        stored = self._entries
        if type(stored) is not dict and isinstance(stored, EntryStore) and (block := stored.together()):
            with block:
                return self._fill_leaves(leaves, value)
        for leaf in leaves:
            leaf.fill_(value)


def like(container: Any, make: Callable[..., Tensor], *, device: object = None, **kwargs: Any) -> Any:
    """Make a container of the same structure with leaves `make(leaf, ...)`, for `torch.zeros_like` and the like."""
    if device is not None:
        kwargs["device"] = device
    result = container._map(partial(make, **kwargs) if kwargs else make)
    return result if device is None else _set_device(result, device)


def _set_device(node: Any, device: Any) -> Any:
    """Set the device of all containers of a tree; `None` for no device. The leaves are on the device already."""
    if device is None:
        node._device = None
    else:
        device = torch.device(device)
        # "cuda" without an index stands for the current device. A new tensor tells which one this is.
        node._device = (
            device
            if device.index is not None or device.type in ("cpu", "meta")
            else torch.empty((), device=device).device
        )
    for value in node._structure().values():
        if isinstance(value, Contract):
            _set_device(value, device)
    return node


def _copy_into_structure(node: Any, data: Any, copy: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Copy `data` into the structure of `node`. It is a tensor for all leaves, or a container with one for each."""
    entries: dict[str, Any] = {}
    for name, value in node._entries.items():
        source = data
        if isinstance(data, Reading):
            source = data._entries.get(name)
            if source is None:
                raise data._make_missing_error(name)
        if isinstance(value, Contract) and isinstance(value, Tensor):
            # An `UnbatchedTensor` has no batch dims, so a tensor over the batch dims has nothing to copy into it.
            entries[name] = (source if isinstance(source, type(value)) else value).clone()
        elif isinstance(value, Contract):
            entries[name] = _copy_into_structure(value, source, copy)
        elif isinstance(source, Contract):
            raise TypeError(f"new_tensor: entry {name!r} is a tensor in this container, but a container in the data")
        else:
            entries[name] = copy(value, source)
    size = data._batch_size if isinstance(data, Contract) else data.shape
    return node._build(entries, size, node._device, None)
