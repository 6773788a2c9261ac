"""The holders of non-tensor values: NonTensorData, MetaData and NonTensorStack."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from tensordict.containers.lazy import LazyStackedTensorDict
from tensordict.containers.lazy.members import Members
from tensordict.containers.lazy.vmapping import flatten_stack, flatten_stack_with_keys, unflatten_stack
from tensordict.containers.nontensor_base import (
    HolderFields,
    SavedHolder,
    TypedHolder,
    V,
    check_holders,
    flatten_holder,
    flatten_holder_with_keys,
    is_all,
    unflatten_holder,
)
from tensordict.containers.shared_file import SharedFile, ValueInFile, members_in
from tensordict.core import makers, pytree, registry, settings
from tensordict.core.contract import Clones, Contract, Device, Filler, Names, identity
from tensordict.core.devices import as_device
from tensordict.core.equality import same_value
from tensordict.core.exceptions import ShapeError
from tensordict.core.indices import checked_size, leaf_index
from tensordict.core.key_views import is_non_tensor
from tensordict.core.keys import Path, entry_of, joined
from tensordict.core.shapes import as_size, broadcasts_to, joined_size, nested_lists
from tensordict.ops.collection import TensorCollection
from tensordict.ops.converting import LinkedList
from tensordict.ops.dims.naming import as_names
from tensordict.ops.entries.adding import put_entry
from tensordict.ops.entries.locking import lock_like
from tensordict.ops.entries.reading import AS_SET
from tensordict.ops.math.logic import ValueOperators

if TYPE_CHECKING:
    from typing_extensions import Self


class _HolderBase(SavedHolder, ValueOperators, TensorCollection):
    """The base of holders and of stacks of holders. They have no entries, and arithmetic leaves their values alone."""

    _is_non_tensor: bool = True
    # True for `MetaData`: equal holders stack into one whatever the settings, and a concatenation has the first value.
    _ignores_batch: bool = False

    def _flat_values(self) -> list[Any]:
        """Return the value of every element of the batch, in row-major order."""
        raise NotImplementedError

    def _assign_values(self, at: object, new: object) -> Any:
        """Assign the values of `new` to a part of the batch. Returns this holder, or a stack that replaces it."""
        raise NotImplementedError

    if TYPE_CHECKING:

        def to_tensordict(self, *, retain_none: bool | None = None) -> Self: ...  # type: ignore[override]

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: object = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Return the values as nested lists along the batch dims; without batch dims, the value itself.

        Example:
            >>> from tensordict import NonTensorData
            >>> NonTensorData("a", batch_size=[2]).tolist()
            ['a', 'a']

        Args:
            convert_nodes, convert_tensors, tolist_first: accepted for compatibility with other containers, and ignored.
            as_linked_list: return lists that write through: assigning to an item of a list assigns to the stack.
        """
        if isinstance(self, NonTensorDataBase):
            return nested_lists(self._flat_values(), self._batch_size)
        items = [
            # Calling `tolist` of each holder would take 30 us instead of 5 us for 100 holders.
            part._value
            if type(part) is NonTensorData and not part._batch_size
            else part.tolist(as_linked_list=as_linked_list)
            for part in self.unbind(0)
        ]
        return LinkedList(items, td=self) if as_linked_list else items

    def to_dict(
        self,
        *,
        retain_none: bool = True,
        convert_tensors: object = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Return the value, or the list of the values of a stack, as `to_dict` of a container puts it into its dict.

        Args:
            retain_none, convert_tensors, tolist_first: accepted for compatibility with other containers, and ignored.
            as_linked_list: as for :meth:`tolist`.
        """
        if isinstance(self, NonTensorStack):
            return self.tolist(as_linked_list=as_linked_list)
        return self._unwrap_value()

    def update(self, input_dict_or_td: object = None, *args: object, **kwargs: object) -> Self:
        """Replace the value by the value of another holder, or by any object. A stack also takes lists and stacks.

        Returns:
            this holder.

        Raises:
            RuntimeError: the holder is locked, or the values do not fit its batch.
        """
        self._refuse_if_locked("update a holder")
        return self.update_(input_dict_or_td)

    def update_(self, input_dict_or_td: object = None, *args: object, **kwargs: object) -> Self:
        """Do the same as :meth:`update`, also on a locked holder."""
        self._update_all(input_dict_or_td)
        return self

    def _update_all(self, value: object) -> None:
        """Replace the values of the whole batch by another holder, or by any object."""
        self._assign((), value)

    def _assign(self, index: object, value: object, adds: bool = True) -> None:
        at = leaf_index(index, self._batch_size)
        size = checked_size(at, self._batch_size)
        new = _fit_holder(value, self, at, size, ())
        if self._place is not None:
            after = self.copy()
            if after._assign_values(at, new) is after:
                self._prepare_write(after)()
        if self._assign_values(at, new) is not self:
            raise ShapeError(
                f"a {type(self).__name__} holds one value for its whole batch: assign through the container that it "
                "is in, or call maybe_to_stack() first"
            )

    def _replacing(
        self, parent: Any, name: str, item: Any, at: Any, size: torch.Size, path: Path
    ) -> Callable[[], None]:
        """Check an assignment to a part of this holder, and return the function that makes it.

        Args:
            parent: the container that has this holder under `name`.
            item: a value, a list of values, or a holder.
            at: the index of the part; `()` for the whole batch.
            size: the batch size of the part.
            path: the key that errors name.
        """
        if isinstance(item, Contract) and not item._is_non_tensor:
            raise TypeError(f"entry {joined(path)!r} is a value that is no tensor and cannot be assigned a container")
        new = _fit_holder(item, self, at, size, path)
        if 0 in size and not is_all(at):
            return lambda: None  # no element of the batch is assigned to
        save = None if self._place is None else self._prepare_write(self.copy()._assign_values(at, new), path)

        def write() -> None:
            if save is not None:
                save()
            fresh = self._assign_values(at, new)
            if fresh is not parent._entries.get(name):
                lock_like(parent, fresh)
                put_entry(parent, name, fresh)
                fresh._is_memmap, fresh._memmap_prefix = self._is_memmap, self._memmap_prefix
                fresh._put_at(self._place, self._file is not None)

        return write

    def _write_name(self, name: str, item: object, non_blocking: bool = False, path: Path | None = None) -> None:
        if isinstance(self, NonTensorDataBase) and name == "data" and path is None:
            self.data = item
            return
        raise KeyError(
            f"cannot write {joined(path or (name,))!r}: the entry above it is a value that is no tensor and holds no "
            "entries"
        )

    def _join(self, items: Sequence[Any], dim: int, stacked: bool) -> Any:
        if stacked:
            check_holders(items, ())
        if _stack_to_one(items) if stacked else self._ignores_batch or _have_one_value(items):
            names = self._names
            if stacked and names is not None:
                names = [*names[:dim], None, *names[dim:]]
            return self._build({}, joined_size(items, dim, stacked), self._device, names)
        if not stacked:
            check_holders(items, ())
        # `_map` copies a holder in half the time that `copy` takes.
        parts = items if stacked else [part for item in items for part in item.unbind(dim)]
        copies = [part._map(identity) for part in parts]
        return NonTensorStack._along(copies, dim) if copies else NonTensorData._of(None, self._batch_size, self._device)

    def _as_result(self, stack: Any) -> Any:
        members = stack._entries
        if not all(member._is_non_tensor for member in members.sample):
            return stack
        if members.containers and _stack_to_one(members.containers):
            return self._build({}, stack._batch_size, stack._device, stack._names)
        return stack if isinstance(stack, NonTensorStack) else NonTensorStack._over(members)


class NonTensorDataBase(_HolderBase):
    """The base of containers that hold one non-tensor value for their whole batch.

    The walks of the contract treat a holder as a container without entries. Operations on the batch dims of a
    container therefore change the batch size of its holders and keep the value.
    """

    # `is_tensorclass` returns `True` for holders, because programs use it to detect containers of other classes.
    _is_tensorclass: bool = True
    _entries: Any = MappingProxyType({})
    _value: Any = ValueInFile()

    def __init__(
        self,
        data: object,
        _metadata: dict[str, Any] | None = None,
        _is_non_tensor: bool = True,
        *,
        batch_size: object = None,
        device: object = None,
        names: object = None,
    ) -> None:
        self._value = unwrap(data)
        self._batch_size = as_size(batch_size)
        if device is not None:
            self._device = as_device(device)
        if names is not None:
            given = as_names(names, len(self._batch_size))
            if given.count(None) != len(given):
                self._names = given

    @classmethod
    def _of(cls, value: object, batch_size: torch.Size, device: torch.device | None = None, names: Any = None) -> Self:
        """Make a holder without checks. `value` must not be a holder itself."""
        self = object.__new__(cls)
        self._value = value
        self._batch_size = batch_size
        if device is not None:
            self._device = device
        if names is not None:
            self._names = list(names)
        return self

    def _build(self, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        return self._of(self._value, batch_size, device, names)

    # --- the value --------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The value. Assignment replaces it for the whole batch.

        Raises:
            RuntimeError: on assignment to a locked holder.
        """
        return self._value

    @data.setter
    def data(self, value: Any) -> None:
        self._refuse_if_locked("replace the value of a holder")
        self.update_(unwrap(value))

    def _unwrap_value(self) -> Any:
        return self._value

    def _flat_values(self) -> list[Any]:
        return [self._value] * math.prod(self._batch_size)

    def maybe_to_stack(self) -> NonTensorDataBase | NonTensorStack:
        """Convert to a :class:`NonTensorStack`, so that each value can be replaced; without batch dims, return `self`.

        Example:
            >>> from tensordict import NonTensorData
            >>> stack = NonTensorData("a", batch_size=[2]).maybe_to_stack()
            >>> stack[0] = "b"
            >>> stack.tolist()
            ['b', 'a']
        """
        return NonTensorStack.from_nontensordata(self) if self._batch_size else self

    @classmethod
    def fields(class_or_instance) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields of a holder, as :func:`dataclasses.fields` does."""
        return dataclasses.fields(HolderFields)

    @classmethod
    def from_tensordict(cls, tensordict: Any, non_tensordict: Any = None, safe: bool = True) -> Self:
        """Make a holder of `non_tensordict["data"]` with the batch size, device and names of `tensordict`.

        Raises:
            ValueError: `non_tensordict` has no `"data"`, or (with `safe`) `tensordict` has entries.
        """
        if not non_tensordict or "data" not in non_tensordict:
            raise ValueError(f"{cls.__name__}.from_tensordict reads the value from non_tensordict={{'data': value}}")
        if safe and len(tensordict.keys()):
            raise ValueError(f"a {cls.__name__} has no entries, got {sorted(tensordict.keys())}")
        return cls._of(unwrap(non_tensordict["data"]), tensordict._batch_size, tensordict._device, tensordict._names)

    def __replace__(self, /, **changes: Any) -> Self:
        """Make a holder of another value, or with another `batch_size`, `device` or `names`; for `copy.replace`.

        Example:
            >>> from tensordict import NonTensorData
            >>> NonTensorData("a", batch_size=[2]).__replace__(data="b")
            NonTensorData(data=b, batch_size=torch.Size([2]), device=None)
        """
        state = {"batch_size": self._batch_size, "device": self._device, "names": self._names}
        return type(self)(**{"data": self._value, **state, **changes})

    def extend(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise an error, because a holder has one value for its whole batch.

        Raises:
            RuntimeError: always. Use `maybe_to_stack().extend(...)`.
        """
        raise ShapeError(f"a {type(self).__name__} holds one value and cannot grow: use maybe_to_stack().extend(...)")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the value."""
        return self._value(*args, **kwargs)

    # --- reading and writing without entries ------------------------------------------------------------------------

    def get(self, key: object, default: object = AS_SET, **kwargs: object) -> Any:
        """Return the value for the key `"data"`. Other keys count as missing."""
        return self._value if key == "data" else super().get(key, default)

    def _update_all(self, value: Any) -> None:
        if isinstance(value, NonTensorStack):
            raise ShapeError(f"a {type(self).__name__} holds one value and cannot take those of a NonTensorStack")
        value = unwrap(value)
        if self._place is not None:
            self._prepare_write(self._of(value, self._batch_size, None, self._names))()
        self._replace_value(value)

    def _replace_value(self, value: object) -> None:
        if self._file is None:
            self._value = value
        else:
            self._file.value = value

    def _take_value(self, other: Any) -> None:
        self._replace_value(other._value)

    def _use_file(self, file: SharedFile | None) -> None:
        value, self._file = self._value, file
        self.__dict__.pop("_value", None)
        self._replace_value(value)

    def _assign_values(self, at: Any, new: Any) -> Any:
        one = isinstance(new, NonTensorDataBase)
        if one and same_value(self._value, new._value):
            return self
        if one and (is_all(at) or not self._batch_size):
            self._replace_value(new._value)
            return self
        if not self._batch_size:
            # The index adds dims of size 1, so the stack holds one value.
            self._replace_value(*new._flat_values())
            return self
        if is_all(at):
            return new._map(Tensor.clone)
        return NonTensorStack._along(self.unbind(0), 0)._assign_values(at, new)

    def _stack_along(self, dims: Sequence[int]) -> Any:
        """Return a stack of equal values along these dims, from the outermost to the innermost."""
        size = self._batch_size
        if not dims or not size[dims[0]] or _stack_to_one([self]):
            return self
        dim, *rest = dims
        names = None if self._names is None else self._names[:dim] + self._names[dim + 1 :]
        inner = size[:dim] + size[dim + 1 :]
        after = [other - 1 for other in rest]
        members = [self._of(self._value, inner, self._device, names) for _ in range(size[dim])]
        return NonTensorStack._along([member._stack_along(after) for member in members] if after else members, dim)

    def _resized_along(self, size: torch.Size, batch_dims: int) -> Self:
        """Return a holder of the same value whose first `batch_dims` batch dims are replaced by `size`."""
        return self._of(self._value, size + self._batch_size[batch_dims:], self._device)

    # --- the walks --------------------------------------------------------------------------------------------------

    def _map(self, fn: Any, size: Any = None, batch_dims: int = 0, rename: Any = None, on_node: Any = None) -> Any:
        if size is None:
            value = _copy_value(self._value) if fn is Tensor.clone else self._value
            return self._of(value, self._batch_size, self._device, self._names)
        own = self._batch_size
        if isinstance(fn, Filler) and own:
            return NonTensorStack.from_nontensordata(self)._map(fn, size, batch_dims, rename, on_node)
        names = None if self._names is None else self._rename_dims(len(size), batch_dims, rename)
        return self._of(self._value, size if len(own) == batch_dims else size + own[batch_dims:], self._device, names)

    def _map_many(self, fn: Any, sizes: Any, batch_dims: int, rename: Any, on_node: Any = None) -> list[Any]:
        own = self._batch_size
        names = None if self._names is None or not sizes else self._rename_dims(len(sizes[0]), batch_dims, rename)
        rest = own[batch_dims:]
        return [self._of(self._value, size + rest if rest else size, self._device, names) for size in sizes]

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        value = _copy_value(self._value) if type(leaves) is Clones else self._value
        return self._of(value, self._batch_size, self._device, self._names)

    # --- copies and printing ----------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result = self._of(copy.deepcopy(self._value, memo), self._batch_size, self._device, self._names)
        memo[id(self)] = result
        return result

    def __repr__(self) -> str:
        """Return one line with the class, the value (long text is shortened), the batch size and the device."""
        text = str(self._value)
        if len(text) > _LONG:
            text = f"{text[:20]}  ...  {text[-20:]}"
        return f"{type(self).__name__}(data={text}, batch_size={self._batch_size}, device={self._device})"


# Longer text of one value is shortened in its middle; longer text of several values is cut.
_LONG = 200
_CUT = 50
# The maximal length of a stack of members without elements. A larger size in a file is malformed or hostile.
_MOST_EMPTY = 1 << 20


@registry.register
class NonTensorData(NonTensorDataBase):
    """The holder of a non-tensor value, such as a string or a dict, as an entry of a container.

    A container wraps every non-tensor value in a holder. `td[key]` returns the value, and `td.get(key)` the holder. The
    holder has the batch size of its container, and one value for the whole batch. Stacking holders gives a
    :class:`NonTensorStack`; with :func:`~tensordict.set_capture_non_tensor_stack`, holders of equal values stack into
    one holder.

    Args:
        data: the value. If it is a holder, its value is used.
        _metadata, _is_non_tensor: accepted for compatibility with the public signature.
        batch_size: the batch size. It has no influence on the value.
        device: the device that the holder reports.
        names: one name (or `None`) per batch dim.

    Example:
        >>> import torch
        >>> from tensordict import NonTensorData, TensorDict
        >>> td = TensorDict({"a": torch.zeros(2), "label": "cat"}, batch_size=[2])
        >>> td["label"], td.get("label")
        ('cat', NonTensorData(data=cat, batch_size=torch.Size([2]), device=None))
        >>> td[0] = {"a": 1.0, "label": "dog"}
        >>> td["label"], td[1]["label"]
        (LinkedList(['dog', 'cat']), 'cat')
    """


@registry.register
class MetaData(TypedHolder[V], NonTensorDataBase):  # type: ignore[misc]
    """The holder of a value that belongs to a container as a whole: a version, a path, a configuration.

    It differs from :class:`NonTensorData` when containers are joined: equal `MetaData` always stack into one, and a
    concatenation keeps the first value. `MetaData[str]` is a subclass whose constructor accepts only strings.

    Example:
        >>> import torch
        >>> from tensordict import MetaData, TensorDict
        >>> td = TensorDict({"a": torch.zeros(2), "source": MetaData("camera")}, batch_size=[2])
        >>> torch.stack([td, td]).get("source")
        MetaData(data=camera, batch_size=torch.Size([2, 2]), device=None)
    """

    _ignores_batch = True


@registry.register
class NonTensorStack(_HolderBase, LazyStackedTensorDict):
    """Non-tensor values, one for each element along a batch dim: a lazy stack of holders.

    Assigning a list to a container makes one, and so does stacking unequal values. `td[key]` returns the list.
    Indexing, assignment, splitting and joining along the batch dims work as for a tensor.

    Args:
        *args: the members: holders of the same number of batch dims, or values.
        stack_dim: the batch dim along which the members are stacked.
        **kwargs: as for :class:`~tensordict.LazyStackedTensorDict`.

    Raises:
        RuntimeError: a member is a container other than a holder.

    Example:
        >>> from tensordict import NonTensorStack
        >>> stack = NonTensorStack("a", "b", "c")
        >>> stack[1] = "z"
        >>> stack.tolist(), stack[1:].batch_size
        (['a', 'z', 'c'], torch.Size([2]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        members = []
        for position, value in enumerate(args):
            if isinstance(value, Contract) and not value._is_non_tensor:
                raise ShapeError(
                    f"the members of a NonTensorStack are values or their holders, got {type(value).__name__} at "
                    f"position {position}: use lazy_stack for containers"
                )
            members.append(value if isinstance(value, Contract) else NonTensorData._of(value, torch.Size(())))
        super().__init__(*members, **kwargs)
        if not members:
            store = self._entries
            store.template = NonTensorData._of(None, store.template._batch_size, store.template._device)

    @classmethod
    def _along(cls, members: Sequence[Any], dim: int) -> Self:
        """Stack these holders along `dim`, without checks."""
        return cls._over(Members(list(members), dim, template=None if members else NonTensorData._of(None, _SCALAR)))

    @classmethod
    def from_list(cls, non_tensors: object) -> Self:  # type: ignore[override]
        """Make a stack from a list of values. Nested lists become further batch dims.

        Example:
            >>> from tensordict import NonTensorStack
            >>> NonTensorStack.from_list([["a", "b"], ["c", "d"]]).batch_size
            torch.Size([2, 2])
        """
        if not isinstance(non_tensors, list):
            return cls(non_tensors)
        if non_tensors and all(isinstance(item, list) for item in non_tensors):
            return cls._along([cls.from_list(item) for item in non_tensors], 0)
        return cls(*non_tensors)

    @classmethod
    def _of_lists(cls, values: Any, size: torch.Size, dim: int, device: torch.device | None) -> Any:
        """Make a stack along `dim` from nested lists that have the shape `size`.

        Raises:
            ValueError: the lists have another shape, or `size` is absurdly large.
        """
        flat = [values]
        for length in size:
            if not all(type(part) is list and len(part) == length for part in flat):
                raise ValueError(f"the values do not lie in nested lists of {list(size)}")
            flat = [item for part in flat for item in part]
        if not flat:
            if size[dim] > _MOST_EMPTY:
                # Every member takes memory, so a size in a hostile file could use up all of it.
                raise ValueError(
                    f"a stack of {size[dim]} members without elements is larger than the limit of {_MOST_EMPTY}"
                )
            empty = NonTensorData._of(None, size[:dim] + size[dim + 1 :], device)
            return cls._over(Members([empty] * size[dim], dim, template=None if size[dim] else empty))
        return cls._along(_stack_flat(flat, size, device).unbind(dim), dim)

    @classmethod
    def from_nontensordata(cls, non_tensor: NonTensorDataBase) -> Self | NonTensorDataBase:
        """Expand a holder into nested stacks, one copy for each element of its batch; without batch dims, return it."""
        size = non_tensor._batch_size
        if not size:
            return non_tensor
        if not size[0]:  # no member tells the sizes of the other dims
            return _stack_flat([], size, non_tensor._device)  # type: ignore[no-any-return]
        return cls._along([cls.from_nontensordata(part) for part in non_tensor.unbind(0)], 0)

    def maybe_to_stack(self) -> Self:
        """Return the stack itself; see :meth:`NonTensorDataBase.maybe_to_stack`."""
        return self

    # --- the values -------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The value, if all elements have the same.

        Raises:
            AttributeError: the values differ; use :meth:`tolist`.
        """
        values = self._flat_values()
        if not values or not all(same_value(values[0], value) for value in values):
            raise AttributeError("the elements of this NonTensorStack have different values: use tolist()")
        return values[0]

    def _unwrap_value(self) -> Any:
        return self.tolist(as_linked_list=True)

    def _flat_values(self) -> list[Any]:
        return [element._value for element in self._elements()]

    # --- writing ----------------------------------------------------------------------------------------------------

    def _admit_member(self, member: object, first: object = None) -> Any:
        if not isinstance(member, Contract):
            member = NonTensorData._of(member, self._entries.sample[0]._batch_size)
        if not member._is_non_tensor:
            raise ShapeError(
                f"the members of a NonTensorStack are values or their holders, got {type(member).__name__}"
            )
        return super()._admit_member(member, first)

    def _assign_values(self, at: Any, new: Any) -> Any:
        picks = self._split_index(at)
        if picks is None:
            # The index combines elements across members, so assign every element by its position in the batch.
            values, names = self._flat_values(), self._names
            numbers = self._numbers()[at].flatten().tolist()
            theirs = new._flat_values() if isinstance(new, NonTensorStack) else [new._value] * len(numbers)
            for number, value in zip(numbers, theirs, strict=True):
                values[number] = value
            self._take_value(_stack_flat(values, self._batch_size, self._device))
            self._names = names
            return self
        members = self._entries.containers
        width = len(picks.block)
        pieces: Sequence[Any] = [new] * len(picks.positions)
        if isinstance(new, NonTensorStack) and width:
            flat = new.flatten(picks.dim, picks.dim + width - 1) if width > 1 else new
            pieces = flat.unbind(picks.dim)
        for position, piece in zip(picks.positions, pieces, strict=True):
            fresh = members[position]._assign_values(picks.rest, piece)
            if fresh is not members[position]:
                lock_like(self, fresh)
                members[position] = fresh
        return self

    def _take_value(self, other: Any) -> None:
        locked = self._locked
        self._entries, self._size = members_in(self._file, other._entries), None
        if locked:
            self._lock_tree()

    def _use_file(self, file: SharedFile | None) -> None:
        self._entries, self._file = members_in(file, self._entries), file

    def _stack_along(self, dims: Sequence[int]) -> Self:
        return self

    def _resized_along(self, size: torch.Size, batch_dims: int) -> Self:
        # `torch.vmap` does not split the values along the mapped dim.
        return self

    # --- the walks --------------------------------------------------------------------------------------------------

    def _numbers(self) -> Tensor:
        """Return the numbers of the elements, as a tensor of the batch size."""
        return torch.arange(math.prod(self._batch_size)).reshape(self._batch_size)

    def _stack_elements(self, numbers: Sequence[int], size: torch.Size) -> Any:
        """Return a stack of the elements with these numbers; -1 stands for the value `None`."""
        values = [*self._flat_values(), None]
        return _stack_flat([values[number] for number in numbers], size, self._device)

    def _dense(self, hooked: bool = False) -> Any:
        return _ElementNumbers(self)

    def _build(self, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Any:
        """Return a copy; for another batch size, a holder of the common value, or of `None` if the values differ."""
        if batch_size == self._batch_size:
            return self._each(lambda member: member.copy())
        values = self._flat_values()
        one = bool(values) and all(same_value(values[0], value) for value in values)
        return NonTensorData._of(values[0] if one else None, batch_size, device, names)

    def __repr__(self) -> str:
        """Return the class, the list of values (cut if it is long), the batch size and the device."""
        text = str(self.tolist())
        if len(text) > _CUT:
            text = f"{text[:_CUT]}..."
        lines = [text, f"batch_size={self._batch_size}", f"device={self._device}"]
        return f"{type(self).__name__}(\n    " + ",\n    ".join(lines) + ")"


class _ElementNumbers(NonTensorDataBase):
    """The dense form of a `NonTensorStack`. A function of leaves is applied to the numbers of the elements."""

    def __init__(self, stack: NonTensorStack) -> None:
        self._value = stack
        self._batch_size = stack._batch_size
        self._device = stack._device
        self._names = stack._names
        self._locked = stack._locked

    def _map(self, fn: Any, size: Any = None, batch_dims: int = 0, rename: Any = None, on_node: Any = None) -> Any:
        numbers = self._value._numbers()
        count = max(1, numbers.numel())
        # Runs `fn` twice with shifted numbers. Positions that did not shift were newly created, as by `new_ones`.
        found = fn(numbers).to(torch.int64)
        shifted = fn(numbers + count).to(torch.int64)
        numbers = torch.where(shifted - found == count, found, -1)
        out = self._value._stack_elements(numbers.flatten().tolist(), numbers.shape)
        if self._names is not None:
            out.names = self._rename_dims(len(size), batch_dims, rename)
        return out

    def _map_many(self, fn: Any, sizes: object, batch_dims: int, rename: object, on_node: object = None) -> list[Any]:
        parts = fn(self._value._numbers())
        return [self._value._stack_elements(part.flatten().tolist(), part.shape) for part in parts]


_SCALAR = torch.Size(())


def _copy_value(value: object) -> Any:
    """Copy a value. Strings, the most frequent values, skip `deepcopy`, which takes ten times as long."""
    return value if type(value) is str else copy.deepcopy(value)


def wrap(value: object, batch_size: torch.Size, device: torch.device | None = None, names: Names | None = None) -> Any:
    """Return a holder of a value for a container of this batch size, device and names. Returns holders unchanged."""
    return value if is_non_tensor(value) else NonTensorData._of(value, batch_size, device, names)


def unwrap(holder: Any) -> Any:
    """Return the value of a holder or the list of values of a stack. Returns any other object unchanged."""
    return holder._unwrap_value() if is_non_tensor(holder) else holder


def hold(item: object, size: torch.Size, device: torch.device | None = None) -> Any:
    """Return the entry that a container stores for a non-tensor value: a holder, or a stack for a list."""
    if is_non_tensor(item):
        return item
    if isinstance(item, list) and item and settings.list_to_stack():
        return NonTensorStack.from_list(item)
    return NonTensorData._of(item, size, device)


def _fit_holder(item: object, holder: Any, at: Any, size: torch.Size, path: Path) -> Any:
    """Return a holder, or a stack of matching batch size, to assign to the part `at` of `holder`.

    Raises:
        ShapeError: a stack has another batch size than the part.
    """
    new = hold(item, size)
    if isinstance(new, NonTensorStack) and 1 in new._batch_size and broadcasts_to(new._batch_size, size):
        new = new.expand(size)
    theirs = new._batch_size
    if isinstance(new, NonTensorStack) and not (_have_same_sizes(holder[at], new) if -1 in size else theirs == size):
        raise ShapeError(
            f"{entry_of(path)}values for a batch of size {list(theirs)} cannot be assigned to one of {list(size)}"
        )
    # A copy, because the assignment may change members of the stack that it reads later, as in `td[1:] = td[:-1]`.
    return new.copy() if isinstance(item, Contract) else new


def _have_same_sizes(one: Any, other: Any) -> bool:
    """Return whether two stacks, possibly ragged, have the same sizes at all levels."""
    if one._batch_size != other._batch_size or -1 not in one._batch_size:
        return bool(one._batch_size == other._batch_size)
    return all(map(_have_same_sizes, one.unbind(0), other.unbind(0)))


def _stack_flat(values: list[Any], size: torch.Size, device: torch.device | None) -> Any:
    """Make nested stacks of this batch size from values in row-major order."""
    if not size:
        return NonTensorData._of(values[0], size, device)
    if not size[0]:
        return NonTensorStack._over(Members([], 0, template=NonTensorData._of(None, size[1:], device)))
    step = math.prod(size[1:])
    return NonTensorStack._along(
        [_stack_flat(values[i * step : (i + 1) * step], size[1:], device) for i in range(size[0])], 0
    )


def _have_one_value(items: Sequence[Any]) -> bool:
    """Return whether all items are holders of the same value."""
    for item in items:
        if not isinstance(item, NonTensorDataBase) or not same_value(item._value, items[0]._value):
            return False
    return True


def _stack_to_one(items: Sequence[Any]) -> bool:
    """Return whether stacking these items gives one holder: equal values, and a setting or `MetaData` asks for it."""
    first = items[0]
    if not isinstance(first, NonTensorDataBase):
        return False
    if not first._ignores_batch and settings.capture_non_tensor_stack() is not True:
        return False
    return all(type(item) is type(first) and same_value(first._value, item._value) for item in items)


for _cls in (NonTensorData, MetaData):
    pytree.register(_cls, flatten_holder, unflatten_holder, flatten_holder_with_keys)
pytree.register(NonTensorStack, flatten_stack, unflatten_stack, flatten_stack_with_keys)


makers.value = NonTensorData._of
makers.values = NonTensorStack._of_lists
makers.value_list = NonTensorStack.from_list
makers.held = hold
