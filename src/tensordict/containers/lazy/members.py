"""Members: the entries of a lazy stack, a mapping that stacks on reading and splits on writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import Contract, EntryStore, distinct
from tensordict.core.devices import put_on
from tensordict.core.exceptions import ShapeError, StackError
from tensordict.core.keys import Path, joined
from tensordict.ops.entries.locking import raise_locked

Hook = Callable[[Any], Any] | None
_NO_BLOCK = nullcontext()


class Members(EntryStore, MutableMapping[str, Any]):
    """The members of a lazy stack as a mapping of its entries. Its names are the names that all members have.

    Attributes:
        containers: the members.
        dim: the stack dim.
        hook_in: called on a leaf before it is split among the members.
        hook_out: called on a leaf after it was stacked.
        template: a container that describes the members of an empty stack: their batch size, and the entries of the
            stack that it was sliced from. `None` if there are members.
        name: the name of the stack dim.
        path: the path of the stack in an outer one, for errors.
    """

    __slots__ = ("containers", "dim", "hook_in", "hook_out", "name", "path", "template")

    def __init__(
        self,
        containers: list[Any],
        dim: int,
        hook_in: Hook = None,
        hook_out: Hook = None,
        template: Any = None,
        name: str | None = None,
        path: Path = (),
    ) -> None:
        self.containers = containers
        self.dim = dim
        self.hook_in = hook_in
        self.hook_out = hook_out
        self.template = template
        self.name = name
        self.path = path

    @property
    def sample(self) -> list[Any]:
        """The members, or the template of an empty stack."""
        return self.containers or [self.template]

    def members(self, or_template: bool = False) -> list[Any]:
        return self.containers or ([self.template] if or_template else [])

    def reading(self, name: str) -> AbstractContextManager[None]:
        """Return a block that bundles reading one entry of all members into as few requests as possible."""
        return _NO_BLOCK

    # --- the mapping ------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self.read(name)
        if value is None:
            return default
        return value if self.hook_out is None or isinstance(value, Contract) else self.hook_out(value)

    def read(self, name: str) -> Any:
        """Return an entry without calling `hook_out`; `None` if a member lacks it."""
        if not self.containers:
            value = self.template._entries.get(name)
            if value is None or isinstance(value, Contract):
                return None if value is None else self._stack(name, [], value)
            return value.unsqueeze(self.dim).narrow(self.dim, 0, 0)
        column = [member._entries.get(name) for member in self.containers]
        for value in column:
            if value is None:
                return None
        if type(column[0]) is not Tensor and isinstance(column[0], Contract):
            return self.stack_nested(name, column)
        try:
            return torch.stack(column, self.dim)
        except (RuntimeError, TypeError) as error:
            # TorchRL's `step_mdp` recognizes this error by its first words, and then steps each member.
            reason = _explain_stack_error((*self.path, name), column, error)
            raise StackError(f"Failed to stack tensors within a tensordict: {reason}") from error

    def stack_nested(self, name: str, column: Sequence[Any]) -> Any:
        """Stack the nested containers of this name."""
        if list(map(type, column)).count(type(column[0])) != len(column):
            for position, value in enumerate(column):
                if not isinstance(value, Contract):
                    key = joined((*self.path, name))
                    raise StackError(
                        f"entry {key!r} is a container in member 0 and a tensor in member {position}: "
                        f"read it with get({key!r}, as_list=True)"
                    )
        return self._stack(name, list(column), None)

    def _stack(self, name: str, containers: list[Any], template: Any) -> Any:
        make = makers.lazy_stack
        path = (*self.path, name)
        stack = make._over(Members(containers, self.dim, self.hook_in, self.hook_out, template, self.name, path))
        return (containers[0] if containers else template)._as_result(stack)

    def structure(self) -> dict[str, Any]:
        """Return the entries without stacking leaves: nested containers as lazy stacks, and leaves of member 0."""
        first, *rest = self.sample
        found: dict[str, Any] = {}
        for name, value in first._structure().items():
            if all(name in other._entries for other in rest):
                found[name] = value
                if type(value) is not Tensor and isinstance(value, Contract):
                    column = [member._entries[name] for member in self.containers]
                    odd = [item for item in column if not isinstance(item, Contract)]
                    found[name] = odd[0] if odd else self._stack_structure(name, column, None if column else value)
        return found

    def node(self, name: str) -> Any:
        """Return the nested container of this name; `None` if there is none."""
        column = []
        for member in self.sample:
            value = member._node(name)
            if value is None:
                return None
            column.append(value)
        return (
            self._stack_structure(name, column, None) if self.containers else self._stack_structure(name, [], column[0])
        )

    def _stack_structure(self, name: str, containers: list[Any], template: object) -> Any:
        """Do the same as `_stack` for callers that need only the structure: do not compare `UnbatchedTensor`s."""
        if containers and isinstance(containers[0], Tensor):
            containers = [containers[0]] * len(containers)
        return self._stack(name, containers, template)

    def apply_hook_in(self, value: object) -> Any:
        """Apply `hook_in` to a value, or to the leaves of a container."""
        if self.hook_in is None:
            return value
        return value._map(self.hook_in) if isinstance(value, Contract) else self.hook_in(value)

    def __setitem__(self, name: str, value: Any) -> None:
        value = self.apply_hook_in(value)
        if not self.containers:
            self.template._entries[name] = sample_of(value, self.dim)
            return
        self.write(name, pieces_of(value, self.dim, len(self.containers)))

    def write(self, name: str, pieces: Sequence[Any]) -> None:
        """Store one value in each member."""
        if len(pieces) != len(self.containers):
            raise ShapeError(f"entry {name!r} has {len(pieces)} pieces for the {len(self.containers)} members")
        for member in self.containers:
            if member._locked:
                raise_locked(f"set the entry {name!r} of a member of this lazy stack")
        kinds: set[Any] = set(map(type, self.containers))
        wrapped = any(kind._wrapped_container is not Contract._wrapped_container for kind in kinds)
        if wrapped:
            for member in self.containers:
                member._check_field(name)
        for member, piece in zip(self.containers, pieces, strict=True):
            device = member._device
            piece = piece if device is None or piece.device == device else put_on(piece, device)
            if wrapped:
                # The wrapper converts the piece; a container of parameters makes a parameter of it.
                member._write_name(name, piece)
            else:
                member._entries[name] = piece

    def __delitem__(self, name: str) -> None:
        sample = self.sample
        for member in sample:
            if name not in member._entries:
                raise KeyError(name)
            if member._locked:
                raise_locked(f"delete the entry {name!r} of a member of this lazy stack")
        for member in distinct(sample):
            del member._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Return the names that all members have, in the order of the first member."""
        first, *others = [member._entries for member in self.sample]
        # Lists the view of keys, because compiled code does not guard the order of `list(first)`.
        names = list(first.keys())
        # The order is nearly always the same, and comparing lists takes half the time of comparing views of keys.
        if list(map(list, others)).count(names) != len(others):
            for other in others:
                names = [name for name in names if name in other]
        return names

    def __len__(self) -> int:
        return len(self.names())

    def keys(self) -> KeysView[str]:
        return _NameView(self)

    def __repr__(self) -> str:
        return repr(self.names())

    def __contains__(self, name: object) -> bool:
        for member in self.sample:  # noqa: SIM110 (a generator would double the cost)
            if name not in member._entries:
                return False
        return True


class _NameView(KeysView[str]):
    # Replaces the view of `MutableMapping`, which iterates through a slower generator.
    _mapping: Members

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping.names())

    def __repr__(self) -> str:
        return f"KeysView({self._mapping!r})"


def pieces_of(value: Any, dim: int, count: int) -> Sequence[Any]:
    """Split an entry into one piece for each of `count` members. An `UnbatchedTensor` goes to all members."""
    if isinstance(value, Tensor) and isinstance(value, Contract):
        return value._map_many(
            list, [value._batch_size[:dim] + value._batch_size[dim + 1 :]] * count, len(value._batch_size), None
        )
    return value.unbind(dim)  # type: ignore[no-any-return]


def common_size(containers: Sequence[Any]) -> torch.Size:
    """Return the batch size of the containers, with -1 for dims with different sizes.

    Nested entries can have different numbers of batch dims. The result has the smallest number.
    """
    first: torch.Size = containers[0]._batch_size
    sizes = [container._batch_size for container in containers]
    if sizes == [first] * len(sizes):
        return first
    return torch.Size([column[0] if len(set(column)) == 1 else -1 for column in zip(*sizes)])


def sample_of(value: Any, dim: int) -> Any:
    """Convert an entry of an empty stack to an entry of its template."""

    def one(leaf: Any) -> Any:
        shape = list(leaf.shape)
        del shape[dim]
        return leaf.new_zeros(shape)

    if not isinstance(value, Contract):
        return one(value)
    size = value._batch_size
    return value._map(one, size[:dim] + size[dim + 1 :], len(size))


def _explain_stack_error(path: Path, column: list[Any], error: Exception) -> str:
    """Explain why the leaves at `path` cannot be stacked, and how to read them."""
    name = joined(path)
    for position, value in enumerate(column):
        if not isinstance(value, Tensor):
            return (
                f"entry {name!r} is a tensor in member 0 and a {type(value).__name__} in member {position}: "
                f"read it with get({name!r}, as_list=True)"
            )
    devices = list(dict.fromkeys(str(value.device) for value in column))
    if len(devices) > 1:
        return (
            f"entry {name!r} is on different devices in the members of the lazy stack, {', '.join(devices)}: move "
            f"them to one (td.to(device)), or read the entry with get({name!r}, as_list=True)"
        )
    shapes = list(dict.fromkeys(str(list(value.shape)) for value in column if not value.is_nested))
    if len(shapes) > 1:
        shown = ", ".join(shapes[:4]) + (", ..." if len(shapes) > 4 else "")
        return (
            f"entry {name!r} has different shapes in the members of the lazy stack, {shown}, and cannot be stacked: "
            f"read it with get({name!r}, as_list=True), as_nested_tensor=True or as_padded_tensor=True"
        )
    return f"entry {name!r} cannot be stacked: {error}. Read it with get({name!r}, as_list=True)"
