"""LazyStackedTensorDict: the public class of lazy stacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tensordict.containers.lazy.core import LazyCore
from tensordict.containers.lazy.dims import LazyDims
from tensordict.containers.lazy.member_writes import LazyWrites
from tensordict.containers.lazy.members import Hook, Members
from tensordict.containers.lazy.vmapping import flatten_stack, flatten_stack_with_keys, unflatten_stack
from tensordict.core import makers, pytree, registry
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import joined, path_of
from tensordict.core.shapes import as_new_dim, as_size
from tensordict.looking.shown_entries import list_entries_by_member
from tensordict.ops import printing
from tensordict.ops.dims import ragged_stacks
from tensordict.ops.entries.reading import NO_DEFAULT

if TYPE_CHECKING:
    from collections.abc import KeysView

    from typing_extensions import Self

    from tensordict.containers.dense import TensorDict
    from tensordict.core.keys import Key
    from tensordict.ops.collection import TensorCollection


@registry.register
class LazyStackedTensorDict(LazyWrites):
    """A stack of containers along a batch dim that keeps them as members, and stacks an entry when it is read.

    The members may differ in the shapes of their leaves, in their keys, in device and in nesting. The keys of the stack
    are the keys that all members have. Read other entries from a member, as in `stack[0]["key"]`.

    - Reading an entry stacks it and returns a copy. A nested container is read as a lazy stack of nested containers.
    - Writing an entry splits it and writes one piece to each member. A list is read like the output of `Tensor.tolist`;
      its items may differ in shape.
    - Indexing the stack dim returns the members themselves, not copies: `stack[0] is stack.tensordicts[0]`.
    - Operations run in every member, and the results are stacked lazily, if possible. Otherwise the leaves are stacked
      and the result is a `TensorDict`.

    A stack without members has no entries, unless it was sliced from a stack with members. Then it keeps the keys of
    that stack.

    Args:
        *tensordicts: the members, with the same number of batch dims.
        stack_dim: the position of the stack dim in the batch dims of the result. Negative values count from the end.
        hook_out: called on every stacked leaf before it is returned.
        hook_in: called on every leaf that is written as one tensor, before it is split.
        batch_size: checked against the batch size of the stack. For a stack without members, the batch size of its
            members.
        device: if given, members are moved to it.
        names: one name (or `None`) per batch dim. The members get the names of their dims.
        stack_dim_name: the name of the stack dim.
        strict_shape: raise if the batch sizes of the members differ, instead of showing -1 for the dim.

    Raises:
        TypeError: a member is not a container.
        RuntimeError: the members have different numbers of batch dims, or (with `strict_shape`) sizes.
        IndexError: `stack_dim` is out of range.

    Example:
        >>> import torch
        >>> from tensordict import LazyStackedTensorDict, TensorDict
        >>> stack = LazyStackedTensorDict(TensorDict(a=torch.zeros(2), b=torch.ones(1)), TensorDict(a=torch.zeros(3)))
        >>> stack.batch_size, list(stack.keys()), stack[1]["a"].shape
        (torch.Size([2]), ['a'], torch.Size([3]))
        >>> stack.get("a", as_padded_tensor=True).shape
        torch.Size([2, 3])
        >>> stack["c"] = torch.arange(2)
        >>> stack[1]["c"]
        tensor(1)
    """

    def __init__(
        self,
        *tensordicts: Any,
        stack_dim: int = 0,
        hook_out: Hook = None,
        hook_in: Hook = None,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
    ) -> None:
        members = list(tensordicts)
        for position, member in enumerate(members):
            if not isinstance(member, Contract):
                hint = "; pass the members one by one" if isinstance(member, (list, tuple)) else ""
                raise TypeError(
                    f"the members of a lazy stack are containers, got {type(member).__name__} at position "
                    f"{position}{hint}"
                )
        template: Any = None
        if members:
            size = _check_member_sizes(members, strict_shape)
        else:
            # Members that are added later have at least `stack_dim` batch dims.
            size = torch.Size((0,) * max(stack_dim, 0)) if batch_size is None else as_size(batch_size)
            template = makers.dense({}, size, None if device is None else as_device(device), None)
        if device is not None:
            members = [member.to(device) for member in members]
        self._size = None
        self._entries = Members(members, as_new_dim(stack_dim, len(size)), hook_in, hook_out, template)
        if members and batch_size is not None and as_size(batch_size) != self._batch_size:
            raise ShapeError(
                f"the batch size {list(as_size(batch_size))} is not that of the stack, {list(self._batch_size)}"
            )
        if names is not None:
            self.names = names
        if stack_dim_name is not None:
            self._entries.name = stack_dim_name

    @classmethod
    def from_dict(
        cls,
        input_dict: Any,
        *others: object,
        auto_batch_size: bool | None = None,
        batch_size: object = None,
        device: object = None,
        batch_dims: int | None = None,
        stack_dim_name: str | None = None,
        stack_dim: int = 0,
        names: Any = None,
    ) -> Any:
        """Make a lazy stack of containers from a list of (nested) dicts.

        Example:
            >>> import torch
            >>> from tensordict import LazyStackedTensorDict
            >>> LazyStackedTensorDict.from_dict([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}]).batch_size
            torch.Size([2])

        Args:
            input_dict: the dicts of the members; or a mapping that has them under `"0"`, `"1"` and so on. Any other
                mapping becomes one container, as by :meth:`TensorDict.from_dict`.
            *others: the dicts of further members. `input_dict` is then the first one.
            auto_batch_size, batch_size, device, batch_dims: for each member, as for :meth:`TensorDict.from_dict`.
            stack_dim_name: the name of the stack dim.
            stack_dim: the dim of the result along which the members are stacked.
            names: one name per batch dim of the result.

        Raises:
            IndexError: `stack_dim` is out of range.
            ValueError: the list has no dicts.
        """
        options: Any = {
            "auto_batch_size": auto_batch_size, "batch_size": batch_size, "device": device, "batch_dims": batch_dims
        }  # fmt: skip
        inputs = _list_inputs(input_dict, others)
        if inputs is None:
            return super().from_dict(input_dict, **options, names=names)
        if not inputs:
            raise ValueError("from_dict of a lazy stack needs the dict of one member at least")
        members = [super(LazyStackedTensorDict, cls).from_dict(item, **options) for item in inputs]
        return makers.lazy_stack(*members, stack_dim=stack_dim, stack_dim_name=stack_dim_name, names=names)

    # --- the members ------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """The leading dims that all entries share, with -1 for dims with different sizes in the members."""
        # The body of `_batch_size`, inlined: 85 ns instead of 150 ns.
        return self._size or self._read_size()

    @batch_size.setter
    def batch_size(self, size: Any) -> None:
        self._rebatch(as_size(size))

    if TYPE_CHECKING:

        def unbind(self, dim: int = 0) -> tuple[TensorCollection, ...]: ...  # type: ignore[override]
        @overload  # type: ignore[override]
        def __getitem__(self, index: int) -> TensorCollection: ...
        @overload
        def __getitem__(self, index: tuple[()]) -> Self: ...
        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: Any) -> Self: ...
        def __getitem__(self, index: object) -> Any: ...
        def __iter__(self) -> Iterator[TensorCollection]: ...  # type: ignore[override]
        def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> TensorDict: ...  # type: ignore[override]
        def densify(self, layout: torch.layout = torch.strided) -> TensorDict: ...  # type: ignore[override]

    @property
    def tensordicts(self) -> list[TensorCollection]:
        """The list of members, not a copy. Change it only with :meth:`append`, :meth:`insert` and :meth:`extend`.

        Change the batch size of a member through the stack, which caches it.
        """
        return self._entries.containers

    @property
    def stack_dim(self) -> int:
        """The batch dim along which the members are stacked."""
        return self._entries.dim

    @property
    def stack_dim_name(self) -> str | None:
        """The name of the stack dim."""
        return self._entries.name

    @stack_dim_name.setter
    def stack_dim_name(self, name: str | None) -> None:
        names = self.names
        names[self.stack_dim] = name
        self.names = names

    @property
    def hook_in(self) -> Hook:
        """The function that is called on every leaf that is written as one tensor, before it is split."""
        return self._entries.hook_in

    @property
    def hook_out(self) -> Hook:
        """The function that is called on every stacked leaf before it is returned."""
        return self._entries.hook_out

    def append(self, tensordict: object) -> None:
        """Add a member behind the last one, as `list.append`.

        Example:
            >>> import torch
            >>> from tensordict import LazyStackedTensorDict, TensorDict
            >>> stack = LazyStackedTensorDict()
            >>> stack.append(TensorDict(a=torch.zeros(2)))
            >>> stack.batch_size
            torch.Size([1])

        Args:
            tensordict: a container with the batch size of the members. It is not copied.

        Raises:
            RuntimeError: the stack is locked, or the batch sizes differ.
            TypeError: it is not a container.
        """
        self.insert(len(self._entries.containers), tensordict)

    def insert(self, index: int, tensordict: object) -> None:
        """Add a member at a position of the stack dim, as `list.insert`; see :meth:`append` for the errors."""
        self._refuse_if_locked("add a member")
        member = self._admit_member(tensordict)
        if is_dynamo_compiling():
            self._add_to_new_list(index, [member])
        else:
            self._entries.containers.insert(index, member)
        self._size = None

    def extend(self, tensordict: Iterable[Any]) -> None:
        """Add members behind the last one, as `list.extend`.

        Example:
            >>> import torch
            >>> from tensordict import LazyStackedTensorDict, TensorDict
            >>> stack = LazyStackedTensorDict(TensorDict(a=torch.zeros(2)))
            >>> stack.extend([TensorDict(a=torch.zeros(n)) for n in range(3)])
            >>> stack.batch_size
            torch.Size([4])

        Args:
            tensordict: the new members. A container is unbound along its first dim.

        Raises:
            RuntimeError: the stack is locked, or a batch size differs. No member is added then.
        """
        self._refuse_if_locked("add members")
        members = list(tensordict)
        fitting = [self._admit_member(member, members[0]) for member in members]
        if is_dynamo_compiling():
            self._add_to_new_list(len(self._entries.containers), fitting)
        else:
            self._entries.containers += fitting
        self._size = None

    def _add_to_new_list(self, index: int, members: list[Any]) -> None:
        """Add members by making a new list. Dynamo cannot rebuild a stack whose list was changed in place."""
        before = self._entries.containers
        self._entries.containers = [*before[:index], *members, *before[index:]]

    def _admit_member(self, member: object, first: Any = None) -> Any:
        """Return `member` if it is a container with the batch size of the members; raise otherwise.

        An empty stack without batch size and entries accepts any batch size. If several members are added at once,
        all must have the batch size of `first`.
        """
        if not isinstance(member, Contract):
            raise TypeError(f"the members of a lazy stack are containers, got {type(member).__name__}")
        store = self._entries
        size = store.sample[0]._batch_size
        theirs = member._batch_size
        if not store.containers and not any(size) and not len(store):
            size = theirs if first is None else first._batch_size
            if len(theirs) < store.dim:
                raise ShapeError(
                    f"a lazy stack along dim {store.dim} has members of {store.dim} batch dims at least, got one of "
                    f"batch size {list(theirs)}"
                )
        if theirs == size:
            return member
        if len(theirs) != len(size) or -1 not in self._batch_size:
            raise ShapeError(f"a member of this lazy stack has the batch size {list(size)}, got one of {list(theirs)}")
        return member

    # --- reading ----------------------------------------------------------------------------------------------------

    def get_nestedtensor(self, key: Any, default: Any = NO_DEFAULT, *, layout: torch.layout | None = None) -> Tensor:
        """Return the members' leaves at a (nested) key as a nested tensor.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=torch.ones(1), b=torch.ones(2)), TensorDict(a=torch.ones(2))])
            >>> stack.get_nestedtensor("a", layout=torch.jagged).offsets()
            tensor([0, 1, 3])
            >>> stack.get_nestedtensor("b", torch.zeros(3)).unbind()[1]
            tensor([0., 0., 0.])

        Args:
            key: a string or a tuple of strings.
            default: a tensor replaces the leaf of each member that lacks the entry. Any other default is returned if a
                member lacks it.
            layout: the layout of the nested tensor: `torch.strided` (the default) or `torch.jagged`.

        Raises:
            KeyError: a member lacks the entry and no default is given.
            RuntimeError: the leaves do not fit this layout, or the stack dim is not 0.
            TypeError: the entry is a container.
        """
        path = path_of(key)
        column = []
        for member in self._entries.containers:
            if member._has(path):
                column.append(member._find(path))
            elif isinstance(default, Tensor):
                column.append(default)
            elif default is NO_DEFAULT:
                raise self._make_missing_error(key)
            else:
                return default  # type: ignore[no-any-return]
            if isinstance(column[-1], Contract):
                raise TypeError(f"entry {joined(path)!r} is a container, not a tensor: read it with get")
        return ragged_stacks.make_nested_tensor(self, column, torch.strided if layout is None else layout, path)

    def valid_keys(
        self, include_nested: bool = False, leaves_only: bool = False, is_leaf: Any = None, *, sort: bool = False
    ) -> KeysView[str | tuple[str, ...]]:
        """Return a live view of the keys that all members have; the same as :meth:`keys`."""
        return self.keys(include_nested, leaves_only, is_leaf, sort=sort)

    # --- printing ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return the class, the common entries, the entries of single members, the batch size and the device."""
        if printing.is_compact():
            return printing.format_compactly(self)
        with self._at_once():
            common, others = list_entries_by_member(self)
            exclusive = []
            for position, entries in others.items():
                lines = printing.format_fields(entries).replace("\n", "\n    ")
                exclusive.append(f"{position} ->{lines}")
            facts = [_exclusive_text(exclusive), *self._facts(), f"stack_dim={self._entries.dim}"]
            return printing.format_container(type(self).__name__, {"fields": common}, facts)


def _exclusive_text(parts: list[str]) -> str:
    if not parts:
        return "exclusive_fields={\n    }"
    return "exclusive_fields={\n        " + ",\n        ".join(parts) + "}"


def _check_member_sizes(members: list[Any], strict: bool) -> torch.Size:
    """Return the batch size of the first member; raise if others have another number of dims, or (`strict`) size."""
    size: torch.Size = members[0]._batch_size
    for position, other in enumerate(members):
        theirs = other._batch_size
        if theirs != size and (strict or len(theirs) != len(size)):
            hint = "" if len(theirs) != len(size) else ", which strict_shape=False allows"
            raise ShapeError(
                f"the members of a lazy stack must have batch sizes of the same number of dims, got {list(size)} at "
                f"position 0 and {list(theirs)} at position {position}{hint}"
            )
    return size


pytree.register(LazyStackedTensorDict, flatten_stack, unflatten_stack, flatten_stack_with_keys)
registry.speak_for(LazyStackedTensorDict, (LazyWrites, LazyDims, LazyCore))


makers.lazy_stack = LazyStackedTensorDict


def _list_inputs(input_dict: Any, others: tuple[object, ...]) -> list[Any] | None:
    """Return the inputs of the members; `None` if the input is one container."""
    if others:
        return [input_dict, *others]
    if isinstance(input_dict, (list, tuple)):
        return list(input_dict)
    if isinstance(input_dict, Contract) or not input_dict:
        return None
    numbers = [str(number) for number in range(len(input_dict))]
    if set(input_dict) != set(numbers) or not all(isinstance(input_dict[key], (Mapping, Contract)) for key in numbers):
        return None
    return [input_dict[key] for key in numbers]
