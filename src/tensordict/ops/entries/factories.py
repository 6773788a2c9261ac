"""New containers of the same structure, and filling in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core import foreach
from tensordict.core.contract import Contract, EntryStore
from tensordict.core.exceptions import refuse_stored
from tensordict.core.keys import path_of
from tensordict.core.shapes import as_ints, as_size
from tensordict.ops.entries.reading import NO_DEFAULT, Reading

if TYPE_CHECKING:
    from typing_extensions import Self

# What the new_... methods of a tensor take besides the size.
_Options = dict[str, Any]


class Factories(Reading):
    """`new_zeros` and its kin, `zero_` and `fill_`."""

    def new_empty(
        self,
        *size: object,
        dtype: torch.dtype | None = None,
        device: object = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """A container of the same structure and another batch size, its entries not initialised.

        Args:
            *size: the new batch size, as ints or as one sequence.
            dtype: the dtype of all entries; by default each keeps its own.
            device: the device of the new container; by default entries stay where they are.
            requires_grad: whether autograd records operations on the entries.
            layout: the layout of the entries.
            pin_memory: whether to allocate in pinned memory.
            empty_lazy: lazy stacks come back without entries.

        Returns:
            a new container, not locked; dims of the nested containers past the batch dims are kept.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 5)}, batch_size=[3]).new_empty(7)["a"].shape
            torch.Size([7, 5])
        """
        options = _options(dtype, device, requires_grad, layout, pin_memory)
        return self._new(as_size(as_ints(size)), lambda v, shape: v.new_empty(shape, **options), device)

    def new_zeros(
        self,
        *size: object,
        dtype: torch.dtype | None = None,
        device: object = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """A container of the same structure and another batch size, filled with 0; arguments as :meth:`new_empty`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.ones(3)}, batch_size=[3]).new_zeros(2)["a"]
            tensor([0., 0.])
        """
        options = _options(dtype, device, requires_grad, layout, pin_memory)
        return self._new(as_size(as_ints(size)), lambda v, shape: v.new_zeros(shape, **options), device)

    def new_ones(
        self,
        *size: object,
        dtype: torch.dtype | None = None,
        device: object = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """A container of the same structure and another batch size, filled with 1; arguments as :meth:`new_empty`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3)}, batch_size=[3]).new_ones(2)["a"]
            tensor([1., 1.])
        """
        options = _options(dtype, device, requires_grad, layout, pin_memory)
        return self._new(as_size(as_ints(size)), lambda v, shape: v.new_ones(shape, **options), device)

    def new_full(
        self,
        size: Any,
        fill_value: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """A container of the same structure, of batch size `size`, filled with `fill_value`; else as :meth:`new_empty`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3)}, batch_size=[3]).new_full((2,), 7.0)["a"]
            tensor([7., 7.])
        """
        options = _options(dtype, device, requires_grad, layout, pin_memory)
        return self._new(as_size(as_ints((size,))), lambda v, shape: v.new_full(shape, fill_value, **options), device)

    def _new(self, size: torch.Size, make: Callable[[Tensor, tuple[int, ...]], Tensor], device: object) -> Self:
        head, batch_dims = tuple(size), len(self._batch_size)
        keep_names = (lambda names: names) if len(size) == batch_dims else None
        result = self._map(lambda v: make(v, (*head, *v.shape[batch_dims:])), size, batch_dims, keep_names)
        return result if device is NO_DEFAULT else _on_device(result, device)

    def new_tensor(
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = NO_DEFAULT,
        requires_grad: bool = False,
        pin_memory: bool | None = None,
    ) -> Self:
        """A container with the keys of this one and copies of `data` in them.

        Args:
            data: a container, whose entries are copied one by one; or a tensor (or what becomes one), which every
                entry is a copy of.
            dtype: the dtype of all entries; by default that of the entry of this container.
            device: the device of the new container; by default that of the entry of this container.
            requires_grad: whether autograd records operations on the entries.
            pin_memory: whether the entries are put in pinned memory.

        Returns:
            a new container with the batch size of `data` (its shape, for a tensor).

        Raises:
            KeyError: `data` is a container and lacks one of the keys.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(3)}, batch_size=[3]).new_tensor(torch.arange(2))["a"]
            tensor([0., 1.])
        """

        def copy(like: Tensor, source: Tensor) -> Tensor:
            target = like.device if device is NO_DEFAULT or device is None else device
            made = source.detach().to(target, like.dtype if dtype is None else dtype, copy=True)
            return (made.pin_memory() if pin_memory else made).requires_grad_(requires_grad)

        if not isinstance(data, Contract):
            data = torch.as_tensor(data)
        result = _filled_like(self, data, copy)
        return result if device is NO_DEFAULT else _on_device(result, device)  # type: ignore[no-any-return]

    def zero_(self) -> Self:
        """Write 0 into all entries, nested ones too; returns the same container, which may be locked.

        Raises:
            RuntimeError: an entry is a leaf of the autograd graph that requires grad; it is named and nothing has
                changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.ones(2)).zero_()["a"]
            tensor([0., 0.])
        """
        self._fill_leaves(self._leaves(), 0)
        return self

    def fill_(self, key: object, value: float | bool) -> Self:
        """Write a number into all elements of the entry at a nested key; returns the same container.

        Raises:
            KeyError: there is no such entry.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2)).fill_("a", 3.0)["a"]
            tensor([3., 3.])
        """
        path = path_of(key)
        if not self._has(path):
            raise self._missing(key)
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
    """A container of the same structure and sizes with leaves `make(leaf, ...)`: `torch.zeros_like` and its kin."""
    if device is not None:
        kwargs["device"] = device
    result = container._map(partial(make, **kwargs) if kwargs else make)
    return result if device is None else _on_device(result, device)


def _options(
    dtype: torch.dtype | None, device: object, requires_grad: bool, layout: torch.layout, pin_memory: bool | None
) -> _Options:
    options: _Options = {}
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


def _on_device(node: Any, device: Any) -> Any:
    """Note the device in a tree whose leaves were made there; `None` leaves it open."""
    if device is None:
        node._device = None
    else:
        device = torch.device(device)
        # A bare "cuda" stands for the current device: ask torch which one that is.
        node._device = (
            device
            if device.index is not None or device.type in ("cpu", "meta")
            else torch.empty((), device=device).device
        )
    for value in node._structure().values():
        if isinstance(value, Contract):
            _on_device(value, device)
    return node


def _filled_like(node: Any, data: Any, copy: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The structure of `node` with copies of `data`, a tensor for all leaves or a container with one for each."""
    entries: dict[str, Any] = {}
    for name, value in node._entries.items():
        source = data
        if isinstance(data, Reading):
            source = data._entries.get(name)
            if source is None:
                raise data._missing(name)
        if isinstance(value, Contract) and isinstance(value, Tensor):
            # An UnbatchedTensor: a tensor over the batch dims has no part for it.
            entries[name] = (source if isinstance(source, type(value)) else value).clone()
        elif isinstance(value, Contract):
            entries[name] = _filled_like(value, source, copy)
        elif isinstance(source, Contract):
            raise TypeError(f"new_tensor: entry {name!r} is a tensor here and a container in the data")
        else:
            entries[name] = copy(value, source)
    size = data._batch_size if isinstance(data, Contract) else data.shape
    return node._build(entries, size, node._device, None)
