"""What is stored: containers of all kinds described in one way, which every format writes and reads.

A `Specification` describes one container (a dict of tensors, a lazy stack, a tensorclass, a holder of a value), and a
tree of them a save. A writer takes that of each container (`specification_of`); a reader gives a tree in which every
node has been checked (`check`). Loading makes the containers of it (`to_container`); inspecting and verifying walk it
(`walk`), and so need not know its tensorclasses, read no tensor and unpickle nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged, registry
from tensordict.core.contract import Contract, Names
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of
from tensordict.io.formats import stack_columns
from tensordict.io.formats.stack_columns import Column

DICT, LAZY, UNBATCHED = "TensorDict", "LazyStackedTensorDict", "UnbatchedTensor"
VALUES = ("NonTensorData", "MetaData")
VALUE_STACK = "NonTensorStack"
KINDS = (DICT, LAZY, UNBATCHED, *VALUES, VALUE_STACK)
# The name under which the container that a tensorclass wraps is kept.
WRAPPED = "_tensordict"
# That of the tensor in an `UnbatchedTensor`.
OWN = "data"


@dataclass(slots=True)
class Specification:
    """What a container is.

    kind: one of `KINDS`; for a tensorclass its module and qualified name, with a dot between.
    entries: tensors (or the `LeafSpec` of one), and containers or their specifications. The members of a lazy stack are
        called "0", "1", ...; the one entry of a tensorclass is the container that it wraps.
    stack_dim: of lazy stacks and stacks of values.
    value: what a holder holds; a stack of values has nested lists along its batch dims. A reader gives the tensors in
        it as `entries`, called `0`, `1`, ..., and its `form`, as `io/values.py` has it.
    missing: the fields of a tensorclass that are `None`.
    columns: whether the entries of a lazy stack are not its members but their entries, see `formats/columns.py`:
        tensors, `Column`s, and specifications of nested stacks and of holders of the list of values.
    finish: what a reader has yet to do: is given this specification and the container, and gives the container back.
    """

    kind: str
    batch_size: torch.Size
    device: torch.device | None = None
    names: Names | None = None
    entries: Mapping[str, Any] = field(default_factory=dict)
    stack_dim: int | None = None
    value: Any = None
    form: Any = None
    missing: Sequence[str] = ()
    columns: bool = False
    finish: Callable[[Any, Any], Any] | None = None

    @property
    def is_value(self) -> bool:
        """Whether there is a value in place of entries."""
        return self.kind in VALUES or self.kind == VALUE_STACK

    @property
    def is_tensorclass(self) -> bool:
        """Whether this is of a tensorclass, or of a class that nobody knows."""
        return self.kind not in KINDS

    def fields(self) -> Mapping[str, Specification | LeafSpec]:
        """The specifications of the entries; those of a tensorclass are its fields."""
        node = specified(self.entries[WRAPPED]) if self.is_tensorclass else self
        return {name: specified(entry) for name, entry in node.entries.items()}


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a tensor is.

    shape: with -1 for the dims along which the rows of a ragged tensor differ.
    nbytes: of its elements; what they take in the file may be less (compression).
    source: a (mapped) tensor, or what unpacks one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    ragged: bool
    source: Tensor | Column | Callable[[], Tensor]

    @staticmethod
    def of(leaf: Tensor | Column | LeafSpec) -> LeafSpec:
        """That of a leaf."""
        if isinstance(leaf, LeafSpec):
            return leaf
        if isinstance(leaf, Column):
            return LeafSpec(leaf.dtype, tuple(leaf.shape), leaf.flat.numel() * leaf.dtype.itemsize, True, leaf)
        if not leaf.is_nested:
            return LeafSpec(leaf.dtype, tuple(leaf.shape), leaf.numel() * leaf.itemsize, False, leaf)
        row = ragged.row_form(leaf)
        shape = tuple(ragged.shape_of(leaf)) if row is None else (leaf.size(0), *row)
        return LeafSpec(leaf.dtype, shape, ragged.elements(leaf).numel() * leaf.itemsize, True, leaf)


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value that only unpickling, which runs code, would give."""

    content: bytes

    def __repr__(self) -> str:
        return f"pickled, {len(self.content)} bytes"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The value in place of an entry that another program has written and this one cannot read."""

    why: str

    def __repr__(self) -> str:
        return f"<{self.why}>"


@dataclass(frozen=True, slots=True)
class Unread(Unreadable):
    """Values that are read when they are used: `read` gives them, or so many of them."""

    read: Callable[[int | None], Any]

    def __repr__(self) -> str:
        return f"<{self.why}>"


class Broken(Unreadable):
    """The value in place of an entry that cannot be loaded."""

    __slots__ = ()


def broken(error: OSError) -> Specification:
    """What stands in a tree in place of an entry of which this is wrong."""
    return Specification(VALUES[0], torch.Size(()), value=Broken(str(error)))


def walk(node: Specification, key: Path = ()) -> Iterator[tuple[Path, Specification | LeafSpec]]:
    """All nodes and leaves of a tree with their nested keys, a container before what is in it.

    The container that a tensorclass wraps is not a node of its own.
    """
    yield key, node
    for name, entry in node.fields().items():
        if isinstance(entry, Specification):
            yield from walk(entry, (*key, name))
        else:
            yield (*key, name), entry


def specified(entry: Any) -> Any:
    """The specification of an entry, whatever stands for it."""
    if isinstance(entry, Specification):
        return entry
    return specification_of(entry, unread=True) if isinstance(entry, Contract) else LeafSpec.of(entry)


# --- depth ------------------------------------------------------------------------------------------------------------

MAX_LEVELS = 100
"""A container in a save has a nested key of at most this many names, in every format.

All readers and writers are recursive. The costliest take 5 frames a level, so that a save of this depth is written and
read by a caller who has used half of Python's 1,000 frames.
"""


def check_levels(container: Contract, key: Path = ()) -> None:
    """Refuse a container whose nested containers have longer keys than `MAX_LEVELS`; before anything is written.

    Args:
        container: the container, of any depth.
        key: where it will be in the save.

    Raises:
        SaveError: one of them is too deep; its key and the limit are named.
    """
    level = [(key, container)]
    while level:
        check_level(level[0][0])
        level = [((*path, name), child) for path, node in level for name, child in _containers_in(node)]


def check_level(key: Path) -> None:
    """Raise a `SaveError` that names the limit for a container whose key is longer than `MAX_LEVELS`."""
    if len(key) > MAX_LEVELS:
        first = ", ".join(f"{name!r:.40}" for name in key[:3])
        raise SaveError(
            f"entry ({first}, ..., {key[-1]!r:.40}): it is a container nested {len(key)} levels deep, and a save has "
            f"at most {MAX_LEVELS}: flatten_keys() gives fewer levels"
        )


def _containers_in(node: Contract) -> Iterator[tuple[str, Contract]]:
    """The containers that are entries, or members, of a container, by name."""
    inner = node._wrapped_container()
    if inner._is_non_tensor:
        return
    members = inner._members()
    found = inner._structure().items() if members is None else ((str(at), item) for at, item in enumerate(members))
    for name, value in found:
        if type(value) is not Tensor and isinstance(value, Contract) and not isinstance(value, Tensor):
            yield name, value


# --- of containers ----------------------------------------------------------------------------------------------------


def specification_of(
    container: Any, key: Path = (), unread: bool = False, ragged_columns: bool = False
) -> Specification:
    """The specification of one container; those nested in it are left as they are. That of a specification is itself.

    Args:
        key: what errors name.
        unread: of a container over a file, give tensors that are read when they are used (`memory/stored_tensors.py`).
        ragged_columns: give ragged lazy stacks by columns, where their members are alike.

    Raises:
        UnsupportedEntryError: there is none, or it cannot be stored as it is (a lazy stack with hooks); the key is
            named.
    """
    if isinstance(container, Specification):
        return container
    inner = container._wrapped_container()
    if is_typed(container):
        missing = [field for field in type(container).__expected_keys__ if field not in inner._structure()]
        size, device, names = container._batch_size, container._device, container._names
        return Specification(class_name(container), size, device, names, {WRAPPED: inner}, missing=missing)
    container = inner  # of a wrapper that is stored as what it wraps
    kind = getattr(container, "_stored_as", type(container).__name__)
    if kind not in KINDS:
        raise UnsupportedEntryError(f"{entry_of(key)}a {kind} cannot be stored; to_tensordict() gives what can")
    size = container._batch_size
    if kind == DICT and any(type(count) is not int or count < 0 for count in size):
        raise UnsupportedEntryError(
            f"{entry_of(key)}a container whose batch size is {list(size)} cannot be stored: give it one of the dims "
            "whose size is a number (td.batch_size = ...)"
        )
    found = Specification(kind, size, container._device, container._names)
    if kind == UNBATCHED:
        found.entries = {OWN: container.as_subclass(Tensor)}
    elif kind == DICT:
        found.entries = container._writable() if unread else container._entries
    elif kind in VALUES:
        found.value = container._value
    else:
        found.stack_dim = container.stack_dim
        if kind == VALUE_STACK:
            found.value = container.tolist()
        else:
            found.entries = _members(container, key)
            by_name = stack_columns.columns(list(found.entries.values()), key) if ragged_columns else None
            if by_name is not None:
                found = _by_columns(found, by_name)
    return found


def _by_columns(stack: Specification, found: Mapping[str, Any]) -> Specification:
    """That of a lazy stack as columns; `found` is what `stack_columns.columns` gives."""
    entries: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, stack_columns.Below):
            entries[name] = _below(stack, value)
        elif isinstance(value, list):
            # One list of all values, whatever the batch size of each.
            kind, values = type(value[0]).__name__, [item._value for item in value]
            entries[name] = Specification(kind, torch.Size((len(values),)), stack.device, value=values)
        else:
            entries[name] = value
    return replace(stack, entries=entries, columns=True)


def _below(stack: Specification, below: stack_columns.Below) -> Specification:
    """That of what the members of a lazy stack have under one name, as a stack of its own."""
    first, dim = below.containers[0], stack.stack_dim or 0
    size = stack_columns.stacked_size(below.containers, dim)
    names = None if first._names is None else [*first._names[:dim], None, *first._names[dim:]]
    inner = _by_columns(Specification(LAZY, size, stack.device, names, stack_dim=dim), below.entries)
    if not is_typed(first):
        return inner
    return tensorclass_over(class_name(first), inner, specification_of(first).missing)


def tensorclass_over(name: str, wrapped: Any, missing: Sequence[str] = ()) -> Specification:
    """The specification of a tensorclass over a container or a specification, whose batch size it has."""
    if isinstance(wrapped, Specification):
        size, device, names = wrapped.batch_size, wrapped.device, wrapped.names
    else:
        size, device, names = wrapped._batch_size, wrapped._device, wrapped._names
    return Specification(name, size, device, names, {WRAPPED: wrapped}, missing=missing)


def class_name(container: object) -> str:
    """How the class of a tensorclass is called in a specification."""
    return f"{type(container).__module__}.{type(container).__qualname__}"


def is_typed(container: Any) -> bool:
    """Whether it is a tensorclass, which is stored as such; other wrappers are stored as the container they wrap."""
    return container._wrapped_container() is not container and getattr(type(container), "_stored_as", None) is None


def _members(stack: Any, key: Path) -> dict[str, Any]:
    store = stack._entries
    if store.hook_in is not None or store.hook_out is not None:
        raise UnsupportedEntryError(f"{entry_of(key)}a lazy stack with hooks cannot be stored: call densify() first")
    return {str(position): member for position, member in enumerate(store.containers)}


# --- checking ---------------------------------------------------------------------------------------------------------


def check(node: Specification, key: Path = ()) -> Specification:
    """The specification, once it is known to be sound: its entries, batch size and names fit each other.

    The content of a file may be anything. Entries that are specifications have been checked before.

    Raises:
        SaveError: something does not fit; the key is named.
    """
    try:
        problem = _problem(node)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        problem = str(error)
    if problem is not None:
        raise _unsound(node, key, problem)
    return node


def _unsound(node: Specification, key: Path, problem: object) -> SaveError:
    return SaveError(f"{entry_of(key)}the {node.kind} that was stored does not add up: {problem}")


def _problem(node: Specification) -> str | None:
    batch_dims = len(node.batch_size)
    if node.names is not None and len(node.names) != batch_dims:
        return f"its dim names {node.names!r:.80} do not fit {batch_dims} batch dims"
    if node.is_tensorclass:
        kind, holds_fields, names = _as_wrapped(node.entries[WRAPPED])
        return tensorclass_problem(registry.declared(node.kind), kind, holds_fields, names)
    if node.kind == LAZY and not node.columns:
        return _stack_problem(node)
    if node.kind == DICT or node.kind == LAZY:
        for name, entry in node.entries.items():
            shape = _row_shape(entry, node) if node.columns else shape_of(entry)
            if shape is not None and shape[:batch_dims] != node.batch_size:
                return f"the shape {list(shape)} of {name!r} does not begin with {list(node.batch_size)}"
    return None


def shape_of(entry: Any) -> torch.Size | None:
    """The shape of an entry of a specification; `None` where that is not known."""
    if isinstance(entry, Contract):
        return entry._batch_size
    if isinstance(entry, Tensor):
        return ragged.shape_of(entry)
    if isinstance(entry, Specification):
        return None if isinstance(entry.value, (Pickled, Broken)) else entry.batch_size
    return torch.Size(entry.shape)


def _row_shape(entry: object, stack: Specification) -> torch.Size | None:
    """The shape that an entry of a stack by columns has in the stack: its rows run along the stack dim."""
    shape, dim = shape_of(entry), stack.stack_dim or 0
    if shape is None or (isinstance(entry, Specification) and not entry.is_value):
        return shape
    rows, rest = shape[:1], shape[1:]
    if isinstance(entry, Specification):
        # One value for each member, whatever its batch size.
        rest = stack.batch_size[:dim] + stack.batch_size[dim + 1 :]
    return rest[:dim] + rows + rest[dim:]


def _stack_problem(stack: Specification) -> str | None:
    dim = stack.stack_dim or 0
    members = [stack.entries[str(position)] for position in range(len(stack.entries))]
    if not all(isinstance(member, (Specification, Contract)) for member in members):
        return "one of its members is a tensor"
    if len({len(member.batch_size) for member in members}) > 1:
        return "its members have different numbers of batch dims"
    size = (
        stack_columns.stacked_size(members, dim)
        if members
        else (*stack.batch_size[:dim], 0, *stack.batch_size[dim + 1 :])
    )
    if size != stack.batch_size:
        return f"the batch size {list(stack.batch_size)} is not that of its members, {list(size)}"
    return None


def tensorclass_problem(cls: Any, kind: str, holds_fields: bool, names: Iterable[str]) -> str | None:
    """Why a tensorclass cannot be over a container of that kind with entries of these names.

    Args:
        cls: the tensorclass; `None` for one that this program does not know, which may have any fields.
        kind: the name of the kind, for errors.
        holds_fields: whether it is one that has entries at all.
        names: those of its entries.
    """
    if not holds_fields:
        return f"a {kind} holds no fields"
    if cls is not None and (unknown := sorted(set(names) - cls.__expected_keys__)):
        return f"it has entries {unknown}, which are no fields of it"
    return None


def _as_wrapped(inner: Any) -> tuple[str, bool, Iterable[str]]:
    """What `tensorclass_problem` takes of a container or a specification."""
    if isinstance(inner, Specification):
        return inner.kind, inner.kind in (DICT, LAZY), _names_in(inner)
    holds = inner._wrapped_container() is inner and not (inner._is_non_tensor or isinstance(inner, Tensor))
    return type(inner).__name__, holds, inner._structure()


def _names_in(node: Specification) -> Iterable[str]:
    """The names of the entries; those of a lazy stack are what all of its members have."""
    if node.kind != LAZY or node.columns:
        return node.entries
    found = [set(_as_wrapped(member)[2]) for member in node.entries.values()]
    return set.intersection(*found) if found else ()


# --- to containers ----------------------------------------------------------------------------------------------------


def to_container(node: Specification, key: Path = ()) -> Any:
    """The container of a specification, which has been checked (`check`), and those of the specifications in it.

    Raises:
        SaveError: what has not been checked (the values of a stack, the rows of columns) does not fit; the key is
            named.
        UnsupportedEntryError: a class is not known to this program.
    """
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        if isinstance(entry, Specification):
            entry = to_container(entry, key if node.is_tensorclass else (*key, name))
        entries[name] = entry
    try:
        container = _made(node, entries)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"{entry_of(key)}{error}") from None
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise _unsound(node, key, error) from error
    return container if node.finish is None else node.finish(node, container)


def _made(node: Specification, entries: dict[str, Any]) -> Any:
    size, device, dim = node.batch_size, node.device, node.stack_dim or 0
    if node.is_tensorclass:
        return class_named(node.kind)._wrapping(entries[WRAPPED])
    cls = registry.lookup(node.kind)
    if node.kind == DICT:
        return cls._make(entries, size, device, node.names)
    if node.kind == UNBATCHED:
        return cls(entries[OWN], size)
    if node.kind in VALUES:
        return cls._of(node.value, size, device, node.names)
    if node.kind == VALUE_STACK:
        stack = cls._of_lists(node.value, size, dim, device)
    else:
        members = _members_of(node, entries)
        stack = cls(*members, stack_dim=dim, batch_size=None if members else size[:dim] + size[dim + 1 :])
        if stack._batch_size != size:
            raise ValueError(f"the batch size {list(size)} is not that of the members")
    if node.names is not None:
        stack.names = node.names
    return stack


def _members_of(node: Specification, entries: Mapping[str, Any]) -> list[Any]:
    if not node.columns:
        return [entries[str(position)] for position in range(len(entries))]
    dim = node.stack_dim or 0
    names = None if node.names is None else [*node.names[:dim], *node.names[dim + 1 :]]
    if names is not None and not any(names):
        names = None
    return stack_columns.members_of(entries, node.batch_size, dim, node.device, names)


def class_named(name: str) -> Any:
    """The tensorclass of this module and qualified name; nothing is imported.

    Raises:
        UnsupportedEntryError: this program has none; says what to do.
    """
    cls = registry.declared(name)
    if cls is None:
        raise UnsupportedEntryError(
            f"the tensorclass {name!r} is not known to this program: import the module that defines it before loading. "
            "Loading imports nothing by itself"
        )
    return cls
