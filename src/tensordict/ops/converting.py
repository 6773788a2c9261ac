"""The mixin of `to_dict`, `from_dict`, `numpy`, `tolist` and their kin."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeVar

import numpy as np
import torch
from torch import Tensor

from tensordict.convert.dataclasses import from_dataclass
from tensordict.convert.python_structures import open_structure, refuse_exclusive_keys
from tensordict.core import makers, registry
from tensordict.core.contract import Contract, EntryStore, named_error
from tensordict.core.equality import TextMask
from tensordict.core.exceptions import ShapeError, StackError
from tensordict.core.keys import path_of
from tensordict.core.shapes import as_size
from tensordict.core.signatures import refuse_unknown, spells

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    class Sizes(TypedDict, total=False):
        """How to find the batch size of a container that is made from other data."""

        auto_batch_size: bool | None
        batch_dims: int | None
        batch_size: object

    class FromStructure(Sizes, total=False):
        device: object

    class FromDict(FromStructure, total=False):
        names: object

    SelfT = TypeVar("SelfT", bound="Converting")

ConvertTensors = bool | Literal["numpy"]


def _hold_numbers(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Copy a nested dict with its Python numbers as non-tensor values, which fit any batch size."""
    out = tree.copy()
    for key, value in out.items():
        if type(value) is dict:
            out[key] = _hold_numbers(value)
        elif isinstance(value, (int, float, complex, np.generic)):
            out[key] = makers.value(value, as_size(()))
    return out


def apply_options(
    container: Any,
    auto_batch_size: bool | None = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> Any:
    """Apply the options of `from_any` to a container. Returns a shallow copy; the container itself without options."""
    if batch_size is not None and batch_dims is not None:
        raise ValueError("from_any takes batch_size or batch_dims, not both: batch_dims is for finding the size")
    if device is not None and container.device != torch.device(device):
        container = container.to(device)
    if batch_size is not None:
        container = container.copy()
        container.batch_size = batch_size
    elif auto_batch_size or batch_dims is not None:
        container = container.copy().auto_batch_size_(batch_dims)
    return container


class Converting(Contract):
    """Conversion to and from plain Python structures."""

    def to_dict(
        self, *, retain_none: bool = True, convert_tensors: ConvertTensors = False, tolist_first: bool = False
    ) -> dict[str, Any]:
        """Convert the container to a nested dict.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(2), "b": {"c": torch.tensor(1.0)}})
            >>> td.to_dict(convert_tensors=True)
            {'a': [0, 1], 'b': {'c': 1.0}}

        Args:
            retain_none: keep entries that are `None`.
            convert_tensors: `False` keeps the tensors. `True` converts them to (nested) lists of numbers, and `"numpy"`
                to arrays, which share memory with CPU tensors. A ragged leaf becomes a list or tuple of its rows.
            tolist_first: convert nested containers with batch dims to lists of dicts; see :meth:`tolist`.

        Raises:
            RuntimeError: only some members of a lazy stack have an entry, or its entries cannot be stacked.
        """
        if convert_tensors is not False and convert_tensors not in (True, False, "numpy"):
            raise ValueError(f"convert_tensors is True, False or 'numpy', got {convert_tensors!r}")
        entries = self._entries
        if not isinstance(entries, dict):
            refuse_exclusive_keys(self, "to_dict")
        plain: dict[str, Any] = dict(entries)
        for name, value in plain.items():
            if type(value) is Tensor:
                if convert_tensors:
                    plain[name] = _to_plain(name, value, convert_tensors)
            elif isinstance(value, Converting):
                if tolist_first and value._batch_size:
                    plain[name] = value.tolist(convert_tensors=convert_tensors, tolist_first=True)
                else:
                    plain[name] = value.to_dict(
                        retain_none=retain_none, convert_tensors=convert_tensors, tolist_first=tolist_first
                    )
            elif convert_tensors and isinstance(value, Tensor):
                plain[name] = _to_plain(name, value, convert_tensors)
        if not retain_none:
            return {name: value for name, value in plain.items() if value is not None}
        if self._optional:
            plain.update(dict.fromkeys(sorted(self._optional - plain.keys())))
        return plain

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """Make an unlocked deep copy, and convert every container in it to a `TensorDict`.

        Args:
            retain_none: `False` drops entries that are `None`. `True` adds entries for fields of a tensorclass that are
                `None`.

        Raises:
            RuntimeError: an entry of a lazy stack cannot be stacked; see :meth:`densify`. Entries that only some
                members have are dropped.
        """
        if self._is_non_tensor:
            return self.clone()
        # Read the state from the inner container: through a wrapper it takes longer.
        container: Any = self._wrapped_container() if self._is_over_another else self
        # Reading entries from a file copies them; `_unread` entries avoid a second copy.
        stored = container._unread._entries if container._is_in_file else container._entries
        if isinstance(stored, EntryStore) and (block := stored.together(Tensor.clone)) is not None:
            with block:
                return self.to_tensordict(retain_none=retain_none)
        if not isinstance(stored, dict) and container._members() is not None:
            entries = container._dense(hooked=True)._entries
        else:
            entries = {
                name: value.to_tensordict(retain_none=retain_none)
                if isinstance(value, Converting)
                else (value.clone() if isinstance(value, Tensor) else value)
                for name, value in stored.items()
                if value is not None or retain_none is not False
            }
        state = (container._batch_size, container._device, container._names)
        if retain_none:
            entries.update({name: makers.value(None, *state) for name in sorted(self._optional - entries.keys())})
        return makers.dense(entries, *state)

    def numpy(self) -> dict[str, Any]:
        """Convert the container to a nested dict of NumPy arrays, which share memory with CPU tensors.

        A ragged leaf becomes a tuple of its rows.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.arange(3)).numpy()
            {'a': array([0, 1, 2])}

        Raises:
            TypeError: NumPy does not support a dtype. The error names the entry.
        """
        return self.to_dict(convert_tensors="numpy")

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: ConvertTensors = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Convert the container to nested lists along the batch dims, with a dict for every item.

        A container without batch dims becomes a dict.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(2)}, [2]).tolist(convert_tensors=True)
            [{'a': 0}, {'a': 1}]

        Args:
            convert_nodes: with `False`, the items are containers.
            convert_tensors: as for :meth:`to_dict`.
            tolist_first: convert nested containers to lists along the batch dims that only they have.
            as_linked_list: return lists that write through: assigning to an item assigns to this container.
        """
        if not self._batch_size:
            if not convert_nodes:
                return self
            return self.to_dict(convert_tensors=convert_tensors, tolist_first=tolist_first)
        items = [
            item.tolist(
                convert_nodes=convert_nodes,
                convert_tensors=convert_tensors,
                tolist_first=tolist_first,
                as_linked_list=as_linked_list,
            )
            for item in self.unbind(0)
        ]
        return LinkedList(items, td=self) if as_linked_list else items

    @classmethod
    def from_dict(
        cls: type[SelfT],
        input_dict: object,
        *,
        auto_batch_size: bool | None = None,
        batch_size: object = None,
        device: object = None,
        batch_dims: int | None = None,
        names: object = None,
    ) -> SelfT:
        """Make a container from a (nested) dict, or from another container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> data = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3, 5)}}
            >>> TensorDict.from_dict(data, auto_batch_size=True).batch_size
            torch.Size([3])

        Args:
            input_dict: the dict. Its keys may be nested keys, and its values any values of a `TensorDict`, or
                structures that :meth:`from_any` converts. With a `batch_size` that is not empty, Python numbers are
                stored as non-tensor values. The dict is not changed.
            auto_batch_size: without `batch_size`, give every level the longest batch size that its entries share.
            batch_size: the batch size; by default empty.
            device: the device to move the entries to.
            batch_dims: like `auto_batch_size`, but with at most this many batch dims.
            names: one name per batch dim.

        Raises:
            ValueError: both `batch_size` and `batch_dims` are given, or two keys lead to the same entry.
            RuntimeError: an entry does not fit the batch size.
        """
        if batch_size is not None and batch_dims is not None:
            raise ValueError("from_dict takes batch_size or batch_dims, not both: batch_dims is for finding the size")
        make: Any = cls if hasattr(cls, "_make") else registry.lookup("TensorDict")
        tree = input_dict
        if type(input_dict) is dict or not isinstance(input_dict, Contract):
            if type(input_dict) is not dict and not isinstance(input_dict, Mapping):
                if not hasattr(input_dict, "items"):
                    raise TypeError(f"from_dict reads a mapping or a container, got {type(input_dict).__name__}")
                input_dict = dict(input_dict.items())  # for example a pandas Series
            if batch_size is not None and type(input_dict) is dict and as_size(batch_size):
                input_dict = _hold_numbers(input_dict)
            tree = open_structure(input_dict)
        if batch_size is not None or not (auto_batch_size or batch_dims is not None):
            return make(tree, batch_size, device, names)  # type: ignore[no-any-return]
        result = make(tree, None, device)
        if tree is not input_dict or type(tree) is not dict:
            # Copy, so that setting the batch size does not change containers that are nested in the input.
            result = result.copy()
        result.auto_batch_size_(batch_dims)
        if names is not None:
            result._name_tree(names)
        return result  # type: ignore[no-any-return]

    @spells(from_dict)
    def from_dict_instance(self, input_dict: Any, *others: object, **options: Unpack[FromDict]) -> Self:
        """Make a container from a dict. Nested containers get the classes that they have in this container.

        Args:
            input_dict: a dict, for instance the result of :meth:`to_dict`.
            others: accepted for compatibility with the public signature; must be empty.
            auto_batch_size: as for :meth:`from_dict`, like the remaining arguments.
        """
        if others:
            raise TypeError("from_dict_instance reads one mapping; pass the other arguments by keyword")
        entries = {}
        for key, value in input_dict.items():
            try:
                known = self._peek(path_of(key))
            except StackError:  # the members of a lazy stack hold different kinds
                known = None
            if isinstance(known, Converting) and isinstance(value, Mapping):
                value = known.from_dict_instance(value)
            elif getattr(self, "_is_tensorclass", False) and hasattr(known, "_value") and isinstance(value, Number):
                # Keep the number a non-tensor value, for example in a field that casts to `int`.
                value = makers.value(value, as_size(()))
            entries[key] = value
        # `_build` returns the class of the result in memory, also if this container is over a file.
        kind: Any = type(self._build({}, as_size(()), None, None))
        return kind.from_dict(entries, **options)  # type: ignore[no-any-return]

    @classmethod
    @spells(apply_options)
    def from_dataclass(
        cls, dataclass: Any, *, dest_cls: Any = None, as_tensorclass: bool = False, **options: Unpack[FromStructure]
    ) -> Self:
        """Make a container of the fields of a dataclass instance. Nested dataclasses become nested containers.

        Example:
            >>> from dataclasses import dataclass
            >>> import torch
            >>> from tensordict import TensorDict
            >>> @dataclass
            ... class Point:
            ...     x: torch.Tensor
            >>> TensorDict.from_dataclass(Point(torch.zeros(3)), auto_batch_size=True).batch_size
            torch.Size([3])

        Args:
            dataclass: the instance. Its fields are converted like in :meth:`from_any`; `None` becomes a value.
            dest_cls: with `as_tensorclass`, the tensorclass of the result.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: with `auto_batch_size`, the largest number of batch dims.
            as_tensorclass: return a tensorclass instead, like :func:`tensordict.from_dataclass`.
            device: the device to move the entries to.
            batch_size: the batch size of the result.

        Raises:
            TypeError: `dataclass` is not an instance of a dataclass.
        """
        refuse_unknown(Converting.from_dataclass, options)
        if as_tensorclass or (isinstance(dataclass, type) and dataclasses.is_dataclass(dataclass)):
            return from_dataclass(dataclass, dest_cls=dest_cls, **options)  # type: ignore[no-any-return]
        if not dataclasses.is_dataclass(dataclass):
            raise TypeError(f"from_dataclass reads an instance of a dataclass, got {type(dataclass).__name__}")
        return cls.from_dict(open_structure(dataclass), **options)

    @classmethod
    def fromkeys(cls, keys: Iterable[Any], value: object = 0) -> Self:
        """Make a container without batch dims that has the same value under every (nested) key.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict.fromkeys(["a", ("b", "c")], 1)["b", "c"]
            tensor(1)
        """
        return cls.from_dict(dict.fromkeys(keys, value))


def _unlinked(name: str) -> Any:
    """Return a method of lists that moves items, after which the list no longer writes to its container."""
    method = getattr(list, name)

    def move(self: LinkedList, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self._container = None
        return result

    return functools.update_wrapper(move, method)


class LinkedList(list[Any]):
    """A list of the items of a container along its first batch dim. Assigning to an item writes to the container.

    Methods that move items, such as `append` and `sort`, change the list only, and end the link to the container.

    Args:
        items: the items.
        td: the container that assignments write to; `None` for none.
    """

    def __init__(self, items: Iterable[object] = (), *, td: Any = None) -> None:
        super().__init__(items)
        self._container = td

    def __setitem__(self, index: SupportsIndex | slice, value: Any) -> None:
        if self._container is None:
            super().__setitem__(index, value)
        elif isinstance(index, slice):
            values = list(value)
            positions = range(*index.indices(len(self)))
            if len(values) != len(positions):
                raise TypeError(
                    "a slice of this list is a part of a batch and takes as many values as it has: copy the list first "
                    "with list(...)"
                )
            for position, item in zip(positions, values, strict=True):
                self[position] = item
        else:
            self._container[index.__index__()] = value
            super().__setitem__(index, value)

    def __eq__(self, other: object) -> Any:
        """Compare with a text by element, which gives a mask; with anything else, as a list does."""
        return _compare_texts(self, other, True) if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return _compare_texts(self, other, False) if isinstance(other, str) else super().__ne__(other)

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__repr__()})"

    def __reduce__(self) -> Any:
        # A pickle or a copy is a plain list, because it lacks the container to write to.
        return list, (list(self),)

    append, extend, insert, pop = map(_unlinked, ("append", "extend", "insert", "pop"))
    remove, clear, sort, reverse = map(_unlinked, ("remove", "clear", "sort", "reverse"))
    __delitem__, __iadd__, __imul__ = map(_unlinked, ("__delitem__", "__iadd__", "__imul__"))


def _compare_texts(texts: LinkedList, text: str, equal: bool) -> Tensor:
    """Return the mask of the items that equal a text, or that differ from it, along the batch dims.

    Raises:
        ShapeError: the batch is ragged.
    """

    def compare(item: Any) -> Any:
        if isinstance(item, LinkedList):
            return list(map(compare, item))
        return (isinstance(item, str) and item == text) is equal

    try:
        return TextMask.of(torch.tensor(compare(texts), dtype=torch.bool), not equal)
    except ValueError:
        raise ShapeError(
            f"the texts of a ragged batch cannot be compared with {text!r:.80}, since a mask has rows of one length: "
            "compare the members of the lazy stack one by one"
        ) from None


def _to_plain(name: str, value: Tensor, convert: ConvertTensors) -> Any:
    try:
        if value.is_nested:
            rows = [_to_plain(name, row, convert) for row in value.unbind()]
            return tuple(rows) if convert == "numpy" else rows
        return value.numpy(force=True) if convert == "numpy" else value.tolist()
    except (TypeError, RuntimeError) as error:
        raise named_error(error, (name,)) from error
