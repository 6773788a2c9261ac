"""`Specification`, the description of a stored container that every format writes and reads.

A `Specification` describes one container (a dict of tensors, a lazy stack, a tensorclass, a holder of a value), and a
tree of them describes a save. Writers call `specification_of` for each container. Readers build a tree, and `check`
every node. Loading builds the containers from the tree (`to_container`). Inspecting and verifying walk the tree
(`walk`), without importing its tensorclasses, reading tensors or unpickling.
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
VALUE_KINDS = (*VALUES, VALUE_STACK)
KINDS = (DICT, LAZY, UNBATCHED, *VALUE_KINDS)
# The name of the entry for the container that a tensorclass wraps.
WRAPPED = "_tensordict"
# The name of the entry for the tensor of an `UnbatchedTensor`.
OWN = "data"


@dataclass(slots=True)
class Specification:
    """The description of one container.

    kind: one of `KINDS`; for a tensorclass its module and qualified name, joined by a dot.
    entries: tensors (or their `LeafSpec`s), and containers or their specifications. The members of a lazy stack are
        named "0", "1", ...; the only entry of a tensorclass is the container that it wraps.
    stack_dim: the stack dim of a lazy stack or a stack of values.
    value: the value of a holder; for a stack of values, nested lists along its batch dims. Readers put the tensors in
        the value into `entries`, named "0", "1", ..., and its encoded form (`io/values.py`) into `form`.
    missing: the fields of a tensorclass that are `None`.
    columns: True if the entries of a lazy stack are columns instead of members, see `formats/stack_columns.py`:
        tensors, `Column`s, and specifications of nested stacks and of holders of the list of values.
    finish: a step that a reader adds to loading: takes this specification and the container, and returns the container.
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
        """True for a holder of a value or a stack of values."""
        return self.kind in VALUE_KINDS

    @property
    def is_tensorclass(self) -> bool:
        """True for a tensorclass, or for an unknown class."""
        return self.kind not in KINDS

    def fields(self) -> Mapping[str, Specification | LeafSpec]:
        """Return the specifications of the entries; for a tensorclass, of its fields."""
        node = specify(self.entries[WRAPPED]) if self.is_tensorclass else self
        return {name: specify(entry) for name, entry in node.entries.items()}


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The description of one tensor.

    shape: the shape, with -1 for the dims along which the rows of a ragged tensor differ.
    nbytes: the bytes of its elements; a compressed file may take fewer.
    source: the tensor, which may be mapped; or its column; or a function that decompresses it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    ragged: bool
    source: Tensor | Column | Callable[[], Tensor]

    @staticmethod
    def of(leaf: Tensor | Column | LeafSpec) -> LeafSpec:
        """Describe a leaf or a column."""
        if isinstance(leaf, LeafSpec):
            return leaf
        if isinstance(leaf, Column):
            return LeafSpec(leaf.dtype, tuple(leaf.shape), leaf.flat.numel() * leaf.dtype.itemsize, True, leaf)
        if not leaf.is_nested:
            return LeafSpec(leaf.dtype, tuple(leaf.shape), leaf.numel() * leaf.itemsize, False, leaf)
        row = ragged.row_form(leaf)
        shape = tuple(ragged.shape_of(leaf)) if row is None else (leaf.size(0), *row)
        return LeafSpec(leaf.dtype, shape, ragged.pack_elements(leaf).numel() * leaf.itemsize, True, leaf)


@dataclass(frozen=True, slots=True)
class PickledValue:
    """The value of an entry that was not unpickled, because unpickling runs code."""

    content: bytes

    def __repr__(self) -> str:
        return f"pickled, {len(self.content)} bytes"


@dataclass(frozen=True, slots=True)
class UnreadableValue:
    """The value that stands for an entry of another program that this package cannot read."""

    why: str

    def __repr__(self) -> str:
        return f"<{self.why}>"


@dataclass(frozen=True, slots=True)
class DeferredValue(UnreadableValue):
    """A value that is read on demand: `read(None)` returns all of it, and `read(n)` its first `n` items."""

    read: Callable[[int | None], Any]

    def __repr__(self) -> str:
        return f"<{self.why}>"


class BrokenValue(UnreadableValue):
    """The value that stands for an entry that cannot be loaded."""

    __slots__ = ()


def replace_broken(error: OSError) -> Specification:
    """Return a specification that stands for an entry that raised this error."""
    return Specification(VALUES[0], torch.Size(()), value=BrokenValue(str(error)))


def walk(node: Specification, key: Path = ()) -> Iterator[tuple[Path, Specification | LeafSpec]]:
    """Yield all nodes and leaves of a tree with their nested keys, each container before its entries.

    A tensorclass and the container that it wraps are one node.
    """
    yield key, node
    for name, entry in node.fields().items():
        if isinstance(entry, Specification):
            yield from walk(entry, (*key, name))
        else:
            yield (*key, name), entry


def specify(entry: Any) -> Any:
    """Return the specification of an entry: a container, a tensor, or a specification already."""
    if isinstance(entry, Specification):
        return entry
    return specification_of(entry, unread=True) if isinstance(entry, Contract) else LeafSpec.of(entry)


# --- depth ------------------------------------------------------------------------------------------------------------

MAX_LEVELS = 100
"""The greatest length of the nested key of a container in a save, in every format.

All readers and writers are recursive and take at most 5 frames a level. So a caller who has used half of Python's 1,000
frames can still write and read a save of this depth.
"""


def check_levels(container: Contract) -> None:
    """Check, before a save, that no nested container has a key of more than `MAX_LEVELS` names.

    Args:
        container: the container, of any depth.

    Raises:
        SaveError: a nested container is too deep; names its key and the limit.
    """
    level: list[tuple[Path, Contract]] = [((), container)]
    while level:
        check_level(level[0][0])
        level = [((*path, name), child) for path, node in level for name, child in _containers_in(node)]


def check_level(key: Path) -> None:
    """Raise a `SaveError` if the key of a container has more than `MAX_LEVELS` names."""
    if len(key) > MAX_LEVELS:
        first = ", ".join(f"{name!r:.40}" for name in key[:3])
        raise SaveError(
            f"entry ({first}, ..., {key[-1]!r:.40}): it is a container nested {len(key)} levels deep, and a save has "
            f"at most {MAX_LEVELS}: flatten_keys() gives fewer levels"
        )


def _containers_in(node: Contract) -> Iterator[tuple[str, Contract]]:
    """Yield the containers that are entries or members of a container, with their names."""
    inner = node._wrapped_container()
    if inner._is_non_tensor:
        return
    members = inner._members()
    found = inner._structure().items() if members is None else ((str(at), item) for at, item in enumerate(members))
    for name, value in found:
        if type(value) is not Tensor and isinstance(value, Contract) and not isinstance(value, Tensor):
            yield name, value


# --- from containers --------------------------------------------------------------------------------------------------


def specification_of(
    container: Any, key: Path = (), unread: bool = False, ragged_columns: bool = False
) -> Specification:
    """Describe one container. Nested containers stay containers, and a specification is returned unchanged.

    Args:
        key: the key of the container, for errors.
        unread: describe the tensors of a file by tensors that are read on demand (`memory/stored_tensors.py`).
        ragged_columns: describe a ragged lazy stack by its columns, if its members have the same structure.

    Raises:
        UnsupportedEntryError: this kind of container cannot be stored, or is a lazy stack with hooks; names the key.
    """
    if isinstance(container, Specification):
        return container
    inner = container._wrapped_container()
    if inner is not container and is_stored_as_class(container):
        missing = [field for field in type(container).__expected_keys__ if field not in inner._structure()]
        size, device, names = container._batch_size, container._device, container._names
        return Specification(class_name(container), size, device, names, {WRAPPED: inner}, missing=missing)
    container = inner  # other wrappers are stored as the container that they wrap
    kind = getattr(container, "_stored_as", type(container).__name__)
    if kind not in KINDS:
        raise UnsupportedEntryError(f"{entry_of(key)}a {kind} cannot be stored: save its to_tensordict() instead")
    size = container._batch_size
    if kind == DICT and [count for count in size if type(count) is not int or count < 0]:
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
            by_name = stack_columns.collect_columns(list(found.entries.values()), key) if ragged_columns else None
            if by_name is not None:
                found = _by_columns(found, by_name)
    return found


def _by_columns(stack: Specification, found: Mapping[str, Any]) -> Specification:
    """Describe a lazy stack by its columns, as `stack_columns.collect_columns` returned them."""
    entries: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, stack_columns.NestedColumns):
            entries[name] = _describe_nested(stack, value)
        elif isinstance(value, list):
            # One value for each member, whatever its batch size.
            kind, values = type(value[0]).__name__, [item._value for item in value]
            entries[name] = Specification(kind, torch.Size((len(values),)), stack.device, value=values)
        else:
            entries[name] = value
    return replace(stack, entries=entries, columns=True)


def _describe_nested(stack: Specification, below: stack_columns.NestedColumns) -> Specification:
    """Describe the containers that the members of a lazy stack have under one name as a lazy stack of their own."""
    first, dim = below.containers[0], stack.stack_dim or 0
    size = stack_columns.stacked_size(below.containers, dim)
    names = None if first._names is None else [*first._names[:dim], None, *first._names[dim:]]
    inner = _by_columns(Specification(LAZY, size, stack.device, names, stack_dim=dim), below.entries)
    if not is_stored_as_class(first):
        return inner
    return tensorclass_over(class_name(first), inner, specification_of(first).missing)


def tensorclass_over(name: str, wrapped: Any, missing: Sequence[str] = ()) -> Specification:
    """Describe a tensorclass over a container or a specification, with the batch size, device and names of that."""
    if isinstance(wrapped, Specification):
        size, device, names = wrapped.batch_size, wrapped.device, wrapped.names
    else:
        size, device, names = wrapped._batch_size, wrapped._device, wrapped._names
    return Specification(name, size, device, names, {WRAPPED: wrapped}, missing=missing)


def class_name(container: object) -> str:
    """Return the module and qualified name of a tensorclass, as a specification stores it."""
    return f"{type(container).__module__}.{type(container).__qualname__}"


def is_stored_as_class(container: Any) -> bool:
    """Return True for a tensorclass, and False for wrappers that are stored as the container that they wrap."""
    return container._wrapped_container() is not container and getattr(type(container), "_stored_as", None) is None


def _members(stack: Any, key: Path) -> dict[str, Any]:
    store = stack._entries
    if store.hook_in is not None or store.hook_out is not None:
        raise UnsupportedEntryError(f"{entry_of(key)}a lazy stack with hooks cannot be stored: call densify() first")
    return {str(position): member for position, member in enumerate(store.containers)}


def find_uneven(stack: Any, key: Path = (), by_keys: bool = False) -> Path | None:
    """Return the key of an entry that cannot be stacked to one dense tensor; `None` if all entries of a stack can.

    Members of nested lazy stacks are compared, too. An entry that only some members have cannot be stacked. With
    `by_keys`, all others can.
    """
    names = stack._structure()
    for member in stack._members():
        inner = member._wrapped_container()
        if inner._members() is not None and (found := find_uneven(inner, key, by_keys)) is not None:
            return found
        for name in inner._structure():
            if name not in names:
                return (*key, name)
    for name in names:
        node = stack._node(name)
        if node is None:
            if not by_keys and (-1 in stack._shape_of(name) or any(map(ragged.is_ragged, stack._leaves_of(name)))):
                return (*key, name)
            continue
        inner, found = node._wrapped_container(), None
        if not inner._is_non_tensor and inner._members() is not None:
            found = find_uneven(inner, (*key, name), by_keys)
        if found is not None:
            return found
    return None


# --- checking ---------------------------------------------------------------------------------------------------------


def check(node: Specification, key: Path = ()) -> Specification:
    """Check that the entries, batch size and names of a specification from a file fit together, and return it.

    Entries that are specifications must have been checked before.

    Raises:
        SaveError: a part does not fit; names the key.
    """
    try:
        problem = _find_problem(node)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        problem = str(error)
    if problem is not None:
        raise _misfit_error(node, key, problem)
    return node


def _misfit_error(node: Specification, key: Path, problem: object) -> SaveError:
    return SaveError(f"{entry_of(key)}the stored {node.kind} does not add up: {problem}")


def _find_problem(node: Specification) -> str | None:
    batch_dims = len(node.batch_size)
    if node.names is not None and len(node.names) != batch_dims:
        return f"its dim names {node.names!r:.80} do not fit {batch_dims} batch dims"
    if node.kind == DICT or node.columns:
        for name, entry in node.entries.items():
            shape = _row_shape(entry, node) if node.columns else shape_of(entry)
            if shape is not None and shape[:batch_dims] != node.batch_size:
                return f"the shape {list(shape)} of {name!r} does not begin with {list(node.batch_size)}"
    elif node.kind == LAZY:
        return _find_stack_problem(node)
    elif node.is_tensorclass:
        kind, holds_fields, names = _describe_wrapped(node.entries[WRAPPED])
        return tensorclass_problem(registry.declared(node.kind), kind, holds_fields, names)
    return None


def shape_of(entry: Any) -> torch.Size | None:
    """Return the shape of an entry of a specification; `None` if it is unknown."""
    if isinstance(entry, Contract):
        return entry._batch_size
    if isinstance(entry, Tensor):
        return ragged.shape_of(entry) if entry.is_nested else entry.shape
    if isinstance(entry, Specification):
        return None if isinstance(entry.value, (PickledValue, BrokenValue)) else entry.batch_size
    return torch.Size(entry.shape)


def _row_shape(entry: object, stack: Specification) -> torch.Size | None:
    """Return the shape that a column has in its stack, where the rows of the column run along the stack dim."""
    shape, dim = shape_of(entry), stack.stack_dim or 0
    if shape is None or (isinstance(entry, Specification) and not entry.is_value):
        return shape
    rows, rest = shape[:1], shape[1:]
    if isinstance(entry, Specification):
        # One value for each member, whatever its batch size.
        rest = stack.batch_size[:dim] + stack.batch_size[dim + 1 :]
    return rest[:dim] + rows + rest[dim:]


def _find_stack_problem(stack: Specification) -> str | None:
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
        return f"its batch size is {list(stack.batch_size)}, and its members make {list(size)}"
    return None


def tensorclass_problem(cls: Any, kind: str, holds_fields: bool, names: Iterable[str]) -> str | None:
    """Return the reason why a tensorclass cannot wrap a container with entries of these names, or `None` if it can.

    Args:
        cls: the tensorclass; `None` for an unknown one, which may have any fields.
        kind: the name of the kind of the container, for errors.
        holds_fields: False if this kind of container has no entries.
        names: the names of its entries.
    """
    if not holds_fields:
        return f"a {kind} holds no fields"
    if cls is not None and (unknown := sorted(set(names) - cls.__expected_keys__)):
        return f"it has entries {unknown}, which are no fields of it"
    return None


def _describe_wrapped(inner: Any) -> tuple[str, bool, Iterable[str]]:
    """Return the arguments of `tensorclass_problem` for a wrapped container or its specification."""
    if isinstance(inner, Specification):
        return inner.kind, inner.kind in (DICT, LAZY), _names_in(inner)
    holds = inner._wrapped_container() is inner and not (inner._is_non_tensor or isinstance(inner, Tensor))
    return type(inner).__name__, holds, inner._structure()


def _names_in(node: Specification) -> Iterable[str]:
    """Return the names of the entries; for a lazy stack, the names that all of its members have."""
    if node.kind != LAZY or node.columns:
        return node.entries
    found = [set(_describe_wrapped(member)[2]) for member in node.entries.values()]
    return set.intersection(*found) if found else ()


# --- to containers ----------------------------------------------------------------------------------------------------


def to_container(node: Specification, key: Path = ()) -> Any:
    """Build the container of a specification that `check` has checked, with its nested containers.

    Raises:
        SaveError: a part that `check` skips (the values of a stack, the rows of columns) does not fit; names the key.
        UnsupportedEntryError: a class has not been imported.
    """
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        if isinstance(entry, Specification):
            entry = to_container(entry, key if node.is_tensorclass else (*key, name))
        entries[name] = entry
    try:
        container = _build(node, entries)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"{entry_of(key)}{error}") from None
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise _misfit_error(node, key, error) from error
    return container if node.finish is None else node.finish(node, container)


def _build(node: Specification, entries: dict[str, Any]) -> Any:
    size, device, dim = node.batch_size, node.device, node.stack_dim or 0
    if node.kind not in KINDS:
        return find_class(node.kind)._wrap_container(entries[WRAPPED])
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
        members = _build_members(node, entries)
        stack = cls(*members, stack_dim=dim, batch_size=None if members else size[:dim] + size[dim + 1 :])
        if stack._batch_size != size:
            raise ValueError(f"its batch size is {list(size)}, and its members make {list(stack._batch_size)}")
    if node.names is not None:
        stack.names = node.names
    return stack


def _build_members(node: Specification, entries: Mapping[str, Any]) -> list[Any]:
    if not node.columns:
        return [entries[str(position)] for position in range(len(entries))]
    dim = node.stack_dim or 0
    names = None if node.names is None else [*node.names[:dim], *node.names[dim + 1 :]]
    if names is not None and not any(names):
        names = None
    return stack_columns.build_members(entries, node.batch_size, dim, node.device, names)


def find_class(name: str) -> Any:
    """Find a tensorclass by its module and qualified name among the imported ones.

    Raises:
        UnsupportedEntryError: it has not been imported.
    """
    cls = registry.declared(name)
    if cls is None:
        raise UnsupportedEntryError(
            f"the tensorclass {name!r} is not known to this program: import the module that defines it before loading. "
            "Loading imports nothing by itself"
        )
    return cls
