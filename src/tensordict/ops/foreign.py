"""The mixin of `from_any`, `from_pytree`, `to_struct_array` and their kin, which convert foreign structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.convert import numpy as arrays
from tensordict.convert import pytrees
from tensordict.convert.python_structures import is_h5, is_zarr, open_structure
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import joined, path_of
from tensordict.core.shapes import as_size, refuse_two_sizes
from tensordict.core.signatures import refuse_unknown, spells
from tensordict.ops.converting import Converting, apply_options
from tensordict.ops.entries.numbers import make_entry

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from tensordict.ops.converting import FromStructure, Sizes

    _Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])


class Foreign(Converting):
    """`from_any` and its kin, and the opposite conversions."""

    @overload
    @classmethod
    def from_any(cls, obj: Mapping[Any, Any], **options: Unpack[FromStructure]) -> Self: ...
    @overload
    @classmethod
    def from_any(cls, obj: object, **options: Unpack[FromStructure]) -> Any: ...
    @classmethod
    @spells(apply_options)
    def from_any(cls, obj: Any, **options: Unpack[FromStructure]) -> Any:
        """Convert any structure to a container, including nested structures.

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

        Args:
            obj: the structure, which is not changed. A container is returned unchanged, or as a shallow copy if any of
                the other arguments are given.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: like `auto_batch_size`, but with at most this many batch dims.
            device: the device to move the entries to.
            batch_size: the batch size. The default is empty; for structured arrays, it is their shape.

        Returns:
            a container; a tensor or a stack of values for a list; any object without parts unchanged.

        Raises:
            TypeError: a key is not a (nested) string.
            ValueError: `batch_size` and `batch_dims` are both given, or two keys lead to the same entry.
            RuntimeError: an entry does not fit the batch size.

        Mappings, dataclasses, named tuples and tuples become containers; the keys of a tuple are `"0"`, `"1"`, ...
        Structured arrays, DLPack objects and writable buffers share their memory with the result. Open HDF5 files and
        groups become containers over the file; see :meth:`from_h5`. A pandas data frame becomes a container of its
        columns, with one element per row. Rows of numbers of unequal lengths become stacks of values.
        """
        if options:
            refuse_unknown(Foreign.from_any, options)
        if type(obj) is dict:
            return cls.from_dict(obj, **options)
        if isinstance(obj, (np.ndarray, np.void)) and obj.dtype.names is not None:
            return cls.from_struct_array(obj, **options)
        if is_h5(obj):
            return cls.from_h5(obj, **options)  # type: ignore[attr-defined]
        if is_zarr(obj):
            return cls.from_zarr(obj, **options)  # type: ignore[attr-defined]
        tree = open_structure(obj)
        if type(tree) is list:
            device = options.get("device")
            return make_entry(tree, ("obj",), torch.Size(()), None if device is None else as_device(device))
        if isinstance(tree, dict):
            return cls.from_dict(tree, **options)
        if not isinstance(tree, Contract) or isinstance(tree, Tensor):
            return tree
        if not isinstance(tree, cls) and not tree._is_non_tensor and hasattr(cls, "from_tensordict"):
            tree = cls.from_tensordict(tree)
        return apply_options(tree, **options)

    @classmethod
    @spells(from_any)
    def from_tuple(cls, obj: object, **options: Unpack[FromStructure]) -> Self:
        """Make a container of the elements of a tuple or list, under the keys `"0"`, `"1"`, ...

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict.from_tuple((1, 2, (3, "a"))).to_dict(convert_tensors=True)
            {'0': 1, '1': 2, '2': {'0': 3, '1': 'a'}}

        Args:
            obj: the tuple. Its elements are converted like in :meth:`from_any`, which has the same other arguments.

        Raises:
            TypeError: `obj` is neither a tuple nor a list.
        """
        if not isinstance(obj, (tuple, list)):
            raise TypeError(f"from_tuple reads a tuple or a list, got {type(obj).__name__}: from_any reads anything")
        entries = {str(position): value for position, value in enumerate(obj)}
        return cls._from_entries("from_tuple", entries, options)

    @classmethod
    @spells(from_any)
    def from_namedtuple(cls, named_tuple: object, **options: Unpack[FromStructure]) -> Self:
        """Make a container of the fields of a named tuple. Nested named tuples become nested containers.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> data = TensorDict({"a": torch.zeros(3), "nested": {"b": torch.ones(3), "c": "zero!"}}, [3])
            >>> again = TensorDict.from_namedtuple(data.to_namedtuple(), auto_batch_size=True)
            >>> again.batch_size, again["nested", "c"]
            (torch.Size([3]), 'zero!')

        Args:
            named_tuple: the instance. Its fields are converted like in :meth:`from_any`, which has the same other
                arguments.

        Raises:
            TypeError: `named_tuple` is not a named tuple.
        """
        if not isinstance(named_tuple, tuple) or not hasattr(named_tuple, "_fields"):
            what = type(named_tuple).__name__
            raise TypeError(f"from_namedtuple reads a named tuple, got {what}: from_any reads anything")
        entries = dict(zip(named_tuple._fields, named_tuple, strict=True))
        return cls._from_entries("from_namedtuple", entries, options)

    @classmethod
    def _from_entries(cls, method: str, entries: dict[str, Any], options: FromStructure) -> Self:
        """Make a container of the entries that a method has found, with the options of its caller."""
        if options:
            refuse_unknown(getattr(cls, method), options)
            refuse_two_sizes(bool(options.get("auto_batch_size")), options.get("batch_size"))
        return cls.from_dict(entries, **options)

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
        """Convert the items of a list to containers and stack them. The inverse of :meth:`tolist`.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict.from_list([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])["b"]
            LinkedList(['x', 'y'])

        Args:
            input: a list of mappings, containers, dataclasses or named tuples. Nested lists add batch dims.
            auto_batch_size: give each item, and its nested containers, the longest batch size that their entries share.
                All items get the same number of batch dims. The size -1 marks a dim whose length differs.
            batch_size: the batch size of the result, which begins with the lengths of the lists.
            device: the device to move the entries to.
            batch_dims: like `auto_batch_size`, but with at most this many batch dims.
            names: one name per batch dim.
            lazy: `True` makes lazy stacks, `False` dense ones. By default, items of unequal keys or shapes make a lazy
                stack.

        Raises:
            TypeError: an item has another type, or only some items are lists. The error names the position.
            ValueError: a list is empty, nested lists differ in length, or `batch_size` does not begin with the lengths.
            RuntimeError: with `lazy=False`, items have unequal keys or shapes.
        """
        if batch_size is not None and batch_dims is not None:
            raise ValueError("from_list takes batch_size or batch_dims, not both: batch_dims is for finding the size")
        lengths = _check_lengths(input, ())
        size = None if batch_size is None else as_size(batch_size)
        if size is not None and size[: len(lengths)] != lengths[: len(size)]:
            raise ShapeError(f"the lists have the lengths {list(lengths)}, but batch_size is {list(size)}")
        auto = auto_batch_size or batch_dims is not None
        result = _convert_and_stack(cls, input, device, lazy, auto and size is None, batch_dims)
        if size is not None:
            result._rebatch(size)
        elif batch_dims is not None and batch_dims < len(lengths):
            result.auto_batch_size_(batch_dims)
        if names is not None:
            result._name_tree(names)
        return result  # type: ignore[no-any-return]

    @overload
    @classmethod
    def from_pytree(cls, pytree: dict[Any, Any] | list[Any] | tuple[Any, ...], **options: Unpack[Sizes]) -> Self: ...
    @overload
    @classmethod
    def from_pytree(cls, pytree: Any, **options: Unpack[Sizes]) -> Any: ...
    @classmethod
    @spells(from_any, without="device")
    def from_pytree(cls, pytree: object, **options: Unpack[Sizes]) -> Any:
        """Convert a pytree to a container. Its method :meth:`to_pytree` restores the pytree.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict.from_pytree(([torch.zeros(2), 1], {("a", 0): "text"}))
            >>> td.to_pytree()
            ([tensor([0., 0.]), tensor(1)], {('a', 0): 'text'})

        Args:
            pytree: the pytree.
            batch_size: the batch size; by default empty.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: like `auto_batch_size`, but with at most this many batch dims.

        Returns:
            a container; a tensor or a holder for a pytree that is a leaf.

        Raises:
            RuntimeError: an entry does not fit the batch size.

        Each level has an entry `"_pytree_type"` with its type, except the top level of a tensorclass. Levels are lists,
        tuples, named tuples, dicts, and the types that are registered with torch's pytrees. Keys of dicts that are not
        strings are stored with their values. Numbers and arrays of numbers become tensors, and `to_pytree` returns them
        as tensors. Other leaves do not change.
        """
        refuse_unknown(Foreign.from_pytree, options)
        tree = pytrees.tree_of(pytree)
        if not isinstance(tree, dict):
            return tree
        if getattr(cls, "_is_tensorclass", False):
            del tree[pytrees.MARK]
        return cls.from_dict(tree, **options)

    @classmethod
    @spells(from_any)
    def from_struct_array(cls, struct_array: object, **options: Unpack[FromStructure]) -> Self:
        """Make a container that shares the memory of a structured array.

        Fields of numbers become tensors, and nested structures become containers. Text, bytes and times, which torch
        does not support, are copied to stacks of values.

        Example:
            >>> import numpy as np
            >>> from tensordict import TensorDict
            >>> dogs = np.array([("Rex", 9), ("Fido", 3)], dtype=[("name", "U10"), ("age", "i4")])
            >>> td = TensorDict.from_struct_array(dogs)
            >>> dogs["age"] += 1
            >>> td["age"], td["name"]
            (tensor([10,  4], dtype=torch.int32), LinkedList(['Rex', 'Fido']))

        Args:
            struct_array: the array.
            auto_batch_size: give every level the longest batch size that its entries share.
            batch_dims: like `auto_batch_size`, but with at most this many batch dims.
            device: the device to move the entries to. Devices other than the CPU get a copy.
            batch_size: the batch size; by default the shape of the array.

        Raises:
            TypeError: the array lacks named fields, or torch lacks the dtype of a field, such as objects. The error
                names the field.
            ValueError: torch cannot share the memory of a field, because its byte order is not native or its stride is
                not a multiple of the element size.
            RuntimeError: the fields do not fit the batch size.
        """
        entries, shape = arrays.entries_of(struct_array)
        if (
            options.get("batch_size") is None
            and options.get("batch_dims") is None
            and not options.get("auto_batch_size")
        ):
            options["batch_size"] = shape
        return cls._from_entries("from_struct_array", entries, options)

    # --- and back -------------------------------------------------------------------------------------------------

    @overload
    def to_namedtuple(self, dest_cls: type[_Tuple]) -> _Tuple: ...
    @overload
    def to_namedtuple(self, dest_cls: None = ...) -> Any: ...
    def to_namedtuple(self, dest_cls: object = None) -> Any:
        """Convert the container to a named tuple. Nested containers become nested named tuples.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(2), "b": {"c": "text"}}).to_namedtuple()
            GenericDict(a=tensor([0., 0.]), b=GenericDict(c='text'))

        Args:
            dest_cls: the class of the result, whose fields must be the entries. By default, a new class `GenericDict`.

        Raises:
            ValueError: the name of an entry is not a valid field name.
            TypeError: the entries are not the fields of `dest_cls`.
        """
        return pytrees.namedtuple_of(self, dest_cls)

    def to_pytree(self) -> Any:
        """Restore the pytree that :meth:`from_pytree` has converted. Any other container is returned itself.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict.from_pytree([torch.zeros(2), (1, 2)]).to_pytree()
            [tensor([0., 0.]), (tensor(1), tensor(2))]

        Raises:
            ValueError: entries have been added, deleted or renamed.
        """
        return pytrees.pytree_of(self)

    def to_struct_array(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """Copy the entries to a structured NumPy array of the shape of the batch.

        Nested containers become nested structures. The feature dims of an entry become the dims of its field. The text
        dtype for strings has the length of the longest string.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(2), "name": ["x", "y"]}, [2]).to_struct_array()
            array([(0, 'x'), (1, 'y')], dtype=[('a', '<i8'), ('name', '<U10')])

        Raises:
            TypeError: NumPy does not support a dtype or a value. The error names the entry.
        """
        return arrays.array_of(self)

    def stack_from_tensordict(
        self, dim: int = 0, *, sorted: bool | Sequence[object] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Stack the tensors of all entries, including nested ones, along a new dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(b=torch.zeros(3), a=torch.ones(3)).stack_from_tensordict(sorted=True)
            tensor([[1., 1., 1.],
                    [0., 0., 0.]])

        Args:
            dim: the position of the new dim in the shape of the result; negative values count from the end.
            sorted: `True` sorts the entries by key. A list of all keys gives another order. By default, entries are in
                the order of insertion.
            out: the tensor to write to.

        Raises:
            ValueError: the container lacks tensors, or `sorted` does not list all keys.
            RuntimeError: the shapes of the tensors differ. The error lists them.
        """
        return _join_leaves(self, sorted, "stacked", partial(torch.stack, dim=dim, out=out))

    def cat_from_tensordict(
        self, dim: int = 0, *, sorted: bool | Sequence[object] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Concatenate the tensors of all entries, including nested ones, along one of their dims.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2), b={"c": torch.ones(1)}).cat_from_tensordict()
            tensor([0., 0., 1.])

        Args:
            dim: the dim of the tensors; negative values count from the end.
            sorted: as for :meth:`stack_from_tensordict`.
            out: the tensor to write to.

        Raises:
            ValueError: the container lacks tensors, or `sorted` does not list all keys.
            RuntimeError: the shapes of the tensors do not fit. The error lists them.
        """
        return _join_leaves(self, sorted, "concatenated", partial(torch.cat, dim=dim, out=out))

    def __dlpack__(self, **options: object) -> NoReturn:
        """Refuse the conversion to one tensor. Without this method, `torch.tensor(td)` returns one without elements."""
        name = type(self).__name__
        if self._is_non_tensor:
            raise TypeError(f"a {name} is not a tensor: torch.tensor() takes its values, from its tolist()")
        key = next(iter(self._structure()), "key")
        raise TypeError(
            f"a {name} is not one tensor: read an entry, as in td[{key!r}], or join all of them by "
            "td.stack_from_tensordict() or td.cat_from_tensordict(); td.clone() copies the container"
        )

    # Torch calls this one, NumPy the other.
    __dlpack_device__ = __dlpack__


def _join_leaves(
    node: Any, order: bool | Sequence[object] | None, done: str, join: Callable[[list[Any]], Tensor]
) -> Tensor:
    """Join the tensors of all entries in the requested order, without non-tensor values; `done` names the join."""
    found = dict(node.items(include_nested=True, leaves_only=True))
    if order is True:
        found = dict(sorted(found.items(), key=lambda item: path_of(item[0])))
    elif order is not None and order is not False:
        keys: list[Any] = [joined(path_of(key)) for key in order]
        if sorted(keys, key=path_of) != sorted(found, key=path_of):
            raise ValueError(f"sorted= names each entry once: it has {keys}, and the entries are {list(found)}")
        found = {key: found[key] for key in keys}
    if not found:
        raise ValueError("the container has no tensors to join")
    try:
        return join(list(found.values()))
    except RuntimeError as error:
        shapes = ", ".join(f"{key!r}: {list(leaf.shape)}" for key, leaf in found.items())
        raise ShapeError(f"the entries cannot be {done} ({error}): {shapes}") from error


def _check_lengths(items: object, position: tuple[int, ...]) -> torch.Size:
    """Return the lengths of nested lists, which are the batch dims of their stack.

    Raises:
        TypeError: an item has a type that `from_list` does not support.
        ValueError: a list is empty, or lists of the same level differ in length.
    """
    if not isinstance(items, (list, tuple)) or hasattr(items, "_fields"):
        raise TypeError(f"from_list reads a list, got {type(items).__name__}: from_any reads anything")
    where = "".join(f"[{number}]" for number in position)
    if not items:
        raise ShapeError(f"from_list cannot stack the empty list input{where}: it needs an item to know the keys")
    nested = [type(item) in (list, tuple) for item in items]
    if any(nested) and not all(nested):
        first, second = nested.index(False), nested.index(True)
        raise TypeError(
            f"input{where}[{first}] is of type {type(items[first]).__name__}, but input{where}[{second}] is a list: "
            "either all items must be lists, or none"
        )
    if not any(nested):
        for number, item in enumerate(items):
            if type(item) is not dict and not isinstance(item, (Mapping, Contract)) and not _has_fields(item):
                raise TypeError(
                    f"input{where}[{number}] is of type {type(item).__name__}: from_list stacks mappings, containers, "
                    "dataclasses and named tuples"
                )
        return torch.Size((len(items),))
    inner = [_check_lengths(item, (*position, number)) for number, item in enumerate(items)]
    for number, lengths in enumerate(inner):
        if lengths != inner[0]:
            raise ShapeError(
                f"the lists input{where}[0] and input{where}[{number}] have the lengths {list(inner[0])} and "
                f"{list(lengths)}: stack them one by one and join them with lazy_stack"
            )
    return torch.Size((len(items), *inner[0]))


def _has_fields(item: object) -> bool:
    """Return whether an item is an instance of a dataclass or a named tuple."""
    return not isinstance(item, type) and (
        hasattr(type(item), "__dataclass_fields__") or (isinstance(item, tuple) and hasattr(item, "_fields"))
    )


def _convert_and_stack(
    cls: Any, items: Sequence[Any], device: Any, lazy: bool | None, auto: bool | None, limit: int | None
) -> Any:
    """Convert and stack checked items. With `auto`, find batch dims that all items share, `limit` at most."""
    inner = None if limit is None else max(limit - 1, 0)

    def convert(item: Any, inner: int | None) -> Any:
        if type(item) in (list, tuple):
            return _convert_and_stack(cls, item, device, lazy, auto, inner)
        return cls.from_any(item, device=device, auto_batch_size=auto, batch_dims=inner if auto else None)

    members = [convert(item, inner) for item in items]
    shared = min(member.batch_dims for member in members)
    if auto and any(member.batch_dims > shared for member in members):
        members = [convert(item, shared) for item in items]
    make = type(members[0])
    if lazy is None:
        return make.maybe_dense_stack(members, 0)
    return make.lazy_stack(members, 0) if lazy else make.stack(members, 0)
