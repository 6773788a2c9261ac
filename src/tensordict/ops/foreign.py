"""Foreign structures: containers from any Python structure, pytrees and structured arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.convert import numpy as arrays
from tensordict.convert import pytrees
from tensordict.convert.python_structures import is_h5, is_zarr, open_structure
from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import joined, path_of
from tensordict.core.shapes import as_size
from tensordict.ops.converting import Converting
from tensordict.ops.entries.numbers import stored

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    class _FromStructureOptions(TypedDict, total=False):
        auto_batch_size: bool
        batch_dims: int | None
        device: object
        batch_size: object

    _Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])


class Foreign(Converting):
    """`from_any` and its kin, and their opposites."""

    @overload
    @classmethod
    def from_any(cls, obj: Mapping[Any, Any], **options: Unpack[_FromStructureOptions]) -> Self: ...
    @overload
    @classmethod
    def from_any(cls, obj: object, **options: Unpack[_FromStructureOptions]) -> Any: ...
    @classmethod
    def from_any(
        cls,
        obj: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: object = None,
    ) -> Any:
        """A container made from any structure, at every level of it.

        Mappings, dataclasses, named tuples and tuples become containers (tuples with the keys `"0"`, `"1"`, ...), and
        structured arrays, DLPack objects and writable buffers are taken over without copying their memory. Open HDF5
        files and groups become containers over the file, see :meth:`from_h5`; data frames of pandas, containers of
        their columns with one element a row. Rows of numbers of unequal lengths become stacks of values.

        Args:
            obj: what to convert; it is not changed. A container is given back as it is, or, when any of the following
                is given, as a shallow copy with it.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: find the batch size as `auto_batch_size` does, but with at most this many dims.
            device: where the entries are moved.
            batch_size: the batch size; none by default, the shape for structured arrays.

        Returns:
            a container; a tensor, or a stack of values, for a list; anything that has no parts, as it is.

        Raises:
            TypeError: a key is no (nested) string.
            ValueError: `batch_size` and `batch_dims` are both given, or two keys lead to the same entry.
            RuntimeError: an entry does not fit the batch size.

        Example:
            >>> import torch
            >>> from dataclasses import dataclass
            >>> from tensordict import TensorDict
            >>> @dataclass
            ... class Point:
            ...     x: torch.Tensor
            >>> td = TensorDict.from_any({"point": Point(torch.zeros(3)), "pair": (1, "b")})
            >>> td["point", "x"].shape, td["pair", "1"]
            (torch.Size([3]), 'b')
        """
        if type(obj) is dict:
            return cls.from_dict(
                obj, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
            )
        given: dict[str, Any] = {"auto_batch_size": auto_batch_size, "batch_dims": batch_dims}
        given |= {"device": device, "batch_size": batch_size}
        if isinstance(obj, (np.ndarray, np.void)) and obj.dtype.names is not None:
            return cls.from_struct_array(obj, **given)
        if is_h5(obj):
            return cls.from_h5(obj, **given)  # type: ignore[attr-defined]
        if is_zarr(obj):
            return cls.from_zarr(obj, **given)  # type: ignore[attr-defined]
        tree = open_structure(obj)
        if type(tree) is list:
            return stored(tree, ("obj",), torch.Size(()), device)
        if isinstance(tree, dict):
            return cls.from_dict(tree, **given)
        if not isinstance(tree, Contract) or isinstance(tree, Tensor):
            return tree
        if not isinstance(tree, cls) and not tree._is_non_tensor and hasattr(cls, "from_tensordict"):
            tree = cls.from_tensordict(tree)
        return adjusted(tree, **given)

    @classmethod
    def from_tuple(
        cls,
        obj: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: object = None,
        batch_size: object = None,
    ) -> Self:
        """A container of the elements of a tuple, or of a list, under the keys `"0"`, `"1"`, ...

        Args:
            obj: the tuple; its elements are converted as by :meth:`from_any`. Arguments as there.

        Raises:
            TypeError: it is neither a tuple nor a list.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict.from_tuple((1, 2, (3, "a"))).to_dict(convert_tensors=True)
            {'0': 1, '1': 2, '2': {'0': 3, '1': 'a'}}
        """
        if not isinstance(obj, (tuple, list)):
            raise TypeError(f"from_tuple reads a tuple or a list, got {type(obj).__name__}: from_any reads anything")
        entries = {str(position): value for position, value in enumerate(obj)}
        return cls.from_dict(
            entries, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
        )

    @classmethod
    def from_namedtuple(
        cls,
        named_tuple: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: object = None,
        batch_size: object = None,
    ) -> Self:
        """A container of the fields of a named tuple, nested ones included.

        Args:
            named_tuple: the instance; its fields are converted as by :meth:`from_any`. Arguments as there.

        Raises:
            TypeError: it is no named tuple.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> data = TensorDict({"a": torch.zeros(3), "nested": {"b": torch.ones(3), "c": "zero!"}}, [3])
            >>> again = TensorDict.from_namedtuple(data.to_namedtuple(), auto_batch_size=True)
            >>> again.batch_size, again["nested", "c"]
            (torch.Size([3]), 'zero!')
        """
        if not isinstance(named_tuple, tuple) or not hasattr(named_tuple, "_fields"):
            what = type(named_tuple).__name__
            raise TypeError(f"from_namedtuple reads a named tuple, got {what}: from_any reads anything")
        entries = dict(zip(named_tuple._fields, named_tuple, strict=True))
        return cls.from_dict(
            entries, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
        )

    @classmethod
    def from_list(
        cls,
        input: Any,
        *,
        auto_batch_size: bool | None = None,
        batch_size: object = None,
        device: Any = None,
        batch_dims: int | None = None,
        names: object = None,
        lazy: bool | None = None,
    ) -> Self:
        """The stack of the containers that are made of the items of a list, as :meth:`tolist` gives it.

        Args:
            input: mappings, containers, dataclasses or named tuples; nested lists of them are further batch dims.
            auto_batch_size: give each item, and nested containers, the longest batch size that their entries share, of
                as many dims as that of every item; -1 stands for a dim of unequal sizes.
            batch_size: the batch size of the result, which begins with the lengths of the lists.
            device: where the entries are moved.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            names: one name per batch dim.
            lazy: `True` gives lazy stacks, `False` dense ones; without it, what has unequal keys or shapes is lazy.

        Raises:
            TypeError: an item is none of these, or the items are of both kinds; the position is named.
            ValueError: the list is empty, nested lists are of different lengths, or the lengths are not those of
                `batch_size`.
            RuntimeError: with `lazy=False`, items have unequal keys or shapes.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict.from_list([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])["b"]
            ['x', 'y']
        """
        if batch_size is not None and batch_dims is not None:
            raise ValueError("from_list takes batch_size or batch_dims, not both: batch_dims is for finding the size")
        lengths = _lengths(input, ())
        size = None if batch_size is None else as_size(batch_size)
        if size is not None and size[: len(lengths)] != lengths[: len(size)]:
            raise ShapeError(f"the lists have the lengths {list(lengths)}, the batch size asked for is {list(size)}")
        auto = auto_batch_size or batch_dims is not None
        result = _stacked(cls, input, device, lazy, auto and size is None, batch_dims)
        if size is not None:
            result.batch_size = size
        elif batch_dims is not None and batch_dims < len(lengths):
            result.auto_batch_size_(batch_dims)
        if names is not None:
            result.names = names
        return result  # type: ignore[no-any-return]

    @overload
    @classmethod
    def from_pytree(
        cls,
        pytree: dict[Any, Any] | list[Any] | tuple[Any, ...],
        *,
        batch_size: Any = ...,
        auto_batch_size: bool = ...,
        batch_dims: int | None = ...,
    ) -> Self: ...
    @overload
    @classmethod
    def from_pytree(
        cls, pytree: Any, *, batch_size: Any = ..., auto_batch_size: bool = ..., batch_dims: int | None = ...
    ) -> Any: ...
    @classmethod
    def from_pytree(
        cls, pytree: object, *, batch_size: object = None, auto_batch_size: bool = False, batch_dims: int | None = None
    ) -> Any:
        """A container that stands for a pytree, and remembers what each of its levels was.

        An entry `"_pytree_type"` per level keeps its type, so that :meth:`to_pytree` gives the pytree back. Lists,
        tuples, named tuples and dicts are levels, as is whatever was registered with torch's pytrees; keys of dicts
        that are no strings are kept beside their values. Numbers and arrays of them become tensors, and stay tensors;
        any other leaf is kept as it is.

        Args:
            pytree: what to convert.
            batch_size: the batch size; none by default.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.

        Returns:
            a container; the tensor or the holder of a pytree that is a leaf. An instance of a tensorclass has no entry
            for the type of the uppermost level.

        Raises:
            RuntimeError: an entry does not fit the batch size.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict.from_pytree(([torch.zeros(2), 1], {("a", 0): "text"}))
            >>> td.to_pytree()
            ([tensor([0., 0.]), tensor(1)], {('a', 0): 'text'})
        """
        tree = pytrees.tree_of(pytree)
        if not isinstance(tree, dict):
            return tree
        if getattr(cls, "_is_tensorclass", False):
            del tree[pytrees.MARK]
        return cls.from_dict(tree, batch_size=batch_size, auto_batch_size=auto_batch_size, batch_dims=batch_dims)

    @classmethod
    def from_struct_array(
        cls,
        struct_array: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: object = None,
        batch_size: object = None,
    ) -> Self:
        """A container over the memory of a structured array: what is written into one shows in the other.

        Fields of numbers become tensors, nested structures containers. Text, bytes and times, which torch has not, are
        copied into stacks of values.

        Args:
            struct_array: the array.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: as `auto_batch_size`, with at most this many dims.
            device: where the entries are moved; any other device than the CPU means a copy.
            batch_size: the batch size; the shape of the array by default.

        Raises:
            TypeError: it has no named fields, or a field has a dtype that has no counterpart, such as objects; the
                field is named.
            ValueError: torch cannot have the memory of a field, because its byte order is foreign or its elements lie
                apart by no multiple of their size.
            RuntimeError: the fields do not fit the batch size.

        Example:
            >>> import numpy as np
            >>> from tensordict import TensorDict
            >>> dogs = np.array([("Rex", 9), ("Fido", 3)], dtype=[("name", "U10"), ("age", "i4")])
            >>> td = TensorDict.from_struct_array(dogs)
            >>> dogs["age"] += 1
            >>> td["age"], td["name"]
            (tensor([10,  4], dtype=torch.int32), ['Rex', 'Fido'])
        """
        entries, shape = arrays.entries_of(struct_array)
        if batch_size is None and batch_dims is None and not auto_batch_size:
            batch_size = shape
        return cls.from_dict(
            entries, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
        )

    # --- and back -------------------------------------------------------------------------------------------------

    @overload
    def to_namedtuple(self, dest_cls: type[_Tuple]) -> _Tuple: ...
    @overload
    def to_namedtuple(self, dest_cls: None = ...) -> Any: ...
    def to_namedtuple(self, dest_cls: object = None) -> Any:
        """The entries as a named tuple, nested containers as nested ones.

        Args:
            dest_cls: the class to make, whose fields are the entries; a new one called `GenericDict` by default.

        Raises:
            ValueError: the name of an entry can be no field.
            TypeError: the entries are not the fields of `dest_cls`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(2), "b": {"c": "text"}}).to_namedtuple()
            GenericDict(a=tensor([0., 0.]), b=GenericDict(c='text'))
        """
        return pytrees.namedtuple_of(self, dest_cls)

    def to_pytree(self) -> Any:
        """The pytree that :meth:`from_pytree` made this container of; the container itself when it did not.

        Raises:
            ValueError: entries of one of its levels have been added, deleted or renamed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict.from_pytree([torch.zeros(2), (1, 2)]).to_pytree()
            [tensor([0., 0.]), (tensor(1), tensor(2))]
        """
        return pytrees.pytree_of(self)

    def to_struct_array(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """The entries as a structured NumPy array of the shape of the batch, into which they are copied.

        Nested containers become nested structures; the dims of an entry after the batch dims are those of its field;
        strings become text that is as long as the longest.

        Raises:
            TypeError: an entry has a dtype or holds a value for which NumPy has none; the entry is named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(2), "name": ["x", "y"]}, [2]).to_struct_array()
            array([(0, 'x'), (1, 'y')], dtype=[('a', '<i8'), ('name', '<U10')])
        """
        return arrays.array_of(self)

    def stack_from_tensordict(
        self, dim: int = 0, *, sorted: bool | Sequence[object] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The tensors of all entries, nested ones included, stacked along a new dim of theirs.

        Args:
            dim: where the new dim goes, among those of the tensors; negative values count from the end.
            sorted: `True` takes the entries in the order of their keys, a list of keys in that order; as they come
                by default.
            out: the tensor to write to.

        Raises:
            ValueError: there is no tensor, or `sorted` are not the keys.
            RuntimeError: the shapes of the tensors differ; they are named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(b=torch.zeros(3), a=torch.ones(3)).stack_from_tensordict(sorted=True)
            tensor([[1., 1., 1.],
                    [0., 0., 0.]])
        """
        keys, leaves = _leaves(self, sorted)
        try:
            return torch.stack(leaves, dim) if out is None else torch.stack(leaves, dim, out=out)
        except RuntimeError as error:
            raise ShapeError(f"the entries cannot be stacked ({error}): {_shapes(keys, leaves)}") from error

    def cat_from_tensordict(
        self, dim: int = 0, *, sorted: bool | Sequence[object] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The tensors of all entries, nested ones included, concatenated along a dim of theirs.

        Args:
            dim: the dim, among those of the tensors; negative values count from the end.
            sorted: as for :meth:`stack_from_tensordict`.
            out: the tensor to write to.

        Raises:
            ValueError: there is no tensor, or `sorted` are not the keys.
            RuntimeError: the shapes of the tensors do not fit; they are named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2), b={"c": torch.ones(1)}).cat_from_tensordict()
            tensor([0., 0., 1.])
        """
        keys, leaves = _leaves(self, sorted)
        try:
            return torch.cat(leaves, dim) if out is None else torch.cat(leaves, dim, out=out)
        except RuntimeError as error:
            raise ShapeError(f"the entries cannot be concatenated ({error}): {_shapes(keys, leaves)}") from error


def _leaves(node: Any, order: bool | Sequence[object] | None) -> tuple[list[Any], list[Any]]:
    """The keys and the tensors of all entries, in the order that is asked for; values that are no tensors left out."""
    found = dict(node.items(include_nested=True, leaves_only=True))
    if order is True:
        keys = sorted(found, key=path_of)
    elif order is None or order is False:
        keys = list(found)
    else:
        keys = [joined(path_of(key)) for key in order]
        if sorted(keys, key=path_of) != sorted(found, key=path_of):
            raise ValueError(f"sorted= names each entry once: it has {keys}, and the entries are {list(found)}")
    if not keys:
        raise ValueError("there is no tensor among the entries")
    return keys, [found[key] for key in keys]


def _shapes(keys: list[Any], leaves: list[Any]) -> str:
    return ", ".join(f"{key!r}: {list(leaf.shape)}" for key, leaf in zip(keys, leaves, strict=True))


def adjusted(container: Any, auto_batch_size: bool, batch_dims: int | None, device: Any, batch_size: Any) -> Any:
    """A container with what was asked for; itself when that is nothing, a shallow copy otherwise."""
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


def _lengths(items: object, position: tuple[int, ...]) -> torch.Size:
    """The lengths of lists within lists, which are the batch dims of their stack.

    Raises:
        TypeError: an item is not what it should be.
        ValueError: a list is empty or of another length than its neighbours.
    """
    if not isinstance(items, (list, tuple)) or hasattr(items, "_fields"):
        raise TypeError(f"from_list reads a list, got {type(items).__name__}: from_any reads anything")
    where = "".join(f"[{number}]" for number in position)
    if not items:
        raise ShapeError(f"from_list cannot stack the empty list input{where}: there is nothing to tell the keys from")
    nested = [type(item) in (list, tuple) for item in items]
    if any(nested) and not all(nested):
        first, second = nested.index(False), nested.index(True)
        raise TypeError(
            f"input{where}[{first}] is of type {type(items[first]).__name__} and input{where}[{second}] a list: items "
            "are either all lists or none is"
        )
    if not any(nested):
        for number, item in enumerate(items):
            if type(item) is not dict and not isinstance(item, (Mapping, Contract)) and not _has_fields(item):
                raise TypeError(
                    f"input{where}[{number}] is of type {type(item).__name__}: from_list stacks mappings, containers, "
                    "dataclasses and named tuples"
                )
        return torch.Size((len(items),))
    inner = [_lengths(item, (*position, number)) for number, item in enumerate(items)]
    for number, lengths in enumerate(inner):
        if lengths != inner[0]:
            raise ShapeError(
                f"the lists input{where}[0] and input{where}[{number}] have the lengths {list(inner[0])} and "
                f"{list(lengths)}: stack them one by one and join them with lazy_stack"
            )
    return torch.Size((len(items), *inner[0]))


def _has_fields(item: object) -> bool:
    """Whether this is an instance of a dataclass or a named tuple."""
    return not isinstance(item, type) and (
        hasattr(type(item), "__dataclass_fields__") or (isinstance(item, tuple) and hasattr(item, "_fields"))
    )


def _stacked(
    cls: Any, items: Sequence[Any], device: Any, lazy: bool | None, auto: bool | None, limit: int | None
) -> Any:
    """The stack of checked items; with `auto`, of as many batch dims as all have, `limit` at most."""
    inner = None if limit is None else max(limit - 1, 0)

    def one(item: Any, inner: int | None) -> Any:
        if type(item) in (list, tuple):
            return _stacked(cls, item, device, lazy, auto, inner)
        return cls.from_any(item, device=device, auto_batch_size=auto, batch_dims=inner if auto else None)

    members = [one(item, inner) for item in items]
    shared = min(member.batch_dims for member in members)
    if auto and any(member.batch_dims > shared for member in members):
        members = [one(item, shared) for item in items]
    make = type(members[0])
    if lazy is None:
        return make.maybe_dense_stack(members, 0)
    return make.lazy_stack(members, 0) if lazy else make.stack(members, 0)
