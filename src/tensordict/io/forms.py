"""Containers taken apart for storage and put together again: what every format keeps besides the tensors.

Every kind of container (a dict of tensors, a lazy stack, a tensorclass, a holder of a value) is described by one
`Form`. A format writes forms and tensors, and need not know the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged, registry
from tensordict.core.contract import Contract, Names
from tensordict.core.errors import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of
from tensordict.io import columns

DICT, LAZY, UNBATCHED = "TensorDict", "LazyStackedTensorDict", "UnbatchedTensor"
VALUES = ("NonTensorData", "MetaData")
VALUE_STACK = "NonTensorStack"
KINDS = (DICT, LAZY, UNBATCHED, *VALUES, VALUE_STACK)
# The name under which the container behind a tensorclass is kept.
BEHIND_FACE = "_tensordict"
# That of the tensor in an `UnbatchedTensor`.
OWN = "data"


@dataclass(slots=True)
class Form:
    """What a container is apart from its tensors.

    kind: one of `KINDS`; for a tensorclass its module and qualified name, with a dot between.
    entries: tensors, and containers that have forms of their own. The members of a lazy stack are called "0", "1", ...;
        the one entry of a tensorclass is the container behind it.
    stack_dim: of lazy stacks and stacks of values.
    value: what a holder holds; a stack of values has nested lists along its batch dims.
    missing: the fields of a tensorclass that are `None`.
    columns: whether the entries of a lazy stack are not its members but their entries, see `io/columns.py`: tensors,
        `Column`s, and forms of nested stacks and of holders of the list of values.
    """

    kind: str
    batch_size: torch.Size
    device: torch.device | None = None
    names: Names | None = None
    entries: Mapping[str, Any] = field(default_factory=dict)
    stack_dim: int | None = None
    value: Any = None
    missing: Sequence[str] = ()
    columns: bool = False

    @property
    def is_value(self) -> bool:
        """Whether there is a value in place of entries."""
        return self.kind in VALUES or self.kind == VALUE_STACK

    @property
    def is_face(self) -> bool:
        """Whether this is of a tensorclass."""
        return self.kind not in KINDS


# --- making and putting together --------------------------------------------------------------------------------------

# Makes a container of its form and its entries: `from_form`, or what makes something else of them.
Build = Callable[[Form, Mapping[str, Any], Path], Any]


def to_form(container: Any, key: Path = (), unread: bool = False, ragged_columns: bool = False) -> Form:
    """The form of one container; those nested in it are left as they are. That of a form is itself.

    Args:
        key: what errors name.
        unread: of a container over a file, give tensors that are read when they are used (`memory/stored_tensors.py`).
        ragged_columns: give ragged lazy stacks by columns, where their members are alike.

    Raises:
        UnsupportedEntryError: there is no form for it, or it cannot be stored as it is (a lazy stack with hooks); the
            key is named.
    """
    if isinstance(container, Form):
        return container
    inner = container._wrapped_container()
    if is_typed(container):
        missing = [field for field in type(container).__expected_keys__ if field not in inner._outline()]
        size, device, names = container._batch_size, container._device, container._names
        return Form(face_name(container), size, device, names, {BEHIND_FACE: inner}, missing=missing)
    container = inner  # of a face that is stored as what is behind it
    kind = getattr(container, "_stored_as", type(container).__name__)
    if kind not in KINDS:
        raise UnsupportedEntryError(f"{entry_of(key)}a {kind} cannot be stored; to_tensordict() gives what can")
    form = Form(kind, container._batch_size, container._device, container._names)
    if kind == UNBATCHED:
        form.entries = {OWN: container.as_subclass(Tensor)}
    elif kind == DICT:
        form.entries = container._targets() if unread else container._entries
    elif kind in VALUES:
        form.value = container._value
    else:
        form.stack_dim = container.stack_dim
        if kind == VALUE_STACK:
            form.value = container.tolist()
        else:
            form.entries = _members(container, key)
            found = columns.columns(list(form.entries.values()), key) if ragged_columns else None
            if found is not None:
                form = _by_columns(form, found)
    return form


def _by_columns(stack: Form, found: Mapping[str, Any]) -> Form:
    """The form of a lazy stack as columns; `found` is what `columns.columns` gives."""
    entries: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, columns.Below):
            entries[name] = _below(stack, value)
        elif isinstance(value, list):
            # One list of all values, whatever the batch size of each.
            kind, values = type(value[0]).__name__, [item._value for item in value]
            entries[name] = Form(kind, torch.Size((len(values),)), stack.device, value=values)
        else:
            entries[name] = value
    return replace(stack, entries=entries, columns=True)


def _below(stack: Form, below: columns.Below) -> Form:
    """The form of what the members of a lazy stack have under one name, as a stack of its own."""
    first, dim = below.containers[0], stack.stack_dim or 0
    size = columns.stacked_size(below.containers, dim)
    names = None if first._names is None else [*first._names[:dim], None, *first._names[dim:]]
    form = _by_columns(Form(LAZY, size, stack.device, names, stack_dim=dim), below.entries)
    if not is_typed(first):
        return form
    return Form(face_name(first), size, stack.device, names, {BEHIND_FACE: form}, missing=to_form(first).missing)


def face_name(container: Any) -> str:
    """How the class of a tensorclass is called in a form."""
    return f"{type(container).__module__}.{type(container).__qualname__}"


def is_typed(container: Any) -> bool:
    """Whether it is a tensorclass, which is stored as such; other faces are stored as the container behind them."""
    return container._wrapped_container() is not container and getattr(type(container), "_stored_as", None) is None


def _members(stack: Any, key: Path) -> dict[str, Any]:
    store = stack._entries
    if store.hook_in is not None or store.hook_out is not None:
        raise UnsupportedEntryError(f"{entry_of(key)}a lazy stack with hooks cannot be stored: call densify() first")
    return {str(position): member for position, member in enumerate(store.containers)}


def from_form(form: Form, entries: Mapping[str, Any], key: Path = ()) -> Any:
    """The container of a form and of its entries, which have been put together already.

    The content of a file may be anything: what does not fit is refused, so that the container is sound.

    Raises:
        SaveError: entries, batch sizes, names or values do not fit; the key is named.
        UnsupportedEntryError: the class is not known to this program.
    """
    try:
        return _put_together(form, entries)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"{entry_of(key)}{error}") from None
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise SaveError(f"{entry_of(key)}the {form.kind} that was stored does not add up: {error}") from error


def _put_together(form: Form, entries: Mapping[str, Any]) -> Any:
    if form.is_face:
        cls = face_class(form.kind)
        container = entries[BEHIND_FACE]
        holds = container._wrapped_container() is container and not (
            container._is_non_tensor or isinstance(container, Tensor)
        )
        if problem := face_problem(cls, type(container).__name__, holds, container._outline()):
            raise ValueError(problem)
        return cls._wrapping(container)
    cls = registry.lookup(form.kind)
    if form.is_value:
        return _holder(cls, form)
    if form.kind == UNBATCHED:
        return cls(entries[OWN], form.batch_size)
    if form.kind == LAZY:
        members = _members_of(form, entries)
        stack = cls(*members, stack_dim=form.stack_dim or 0, batch_size=None if members else _without(form))
        if stack._batch_size != form.batch_size:
            raise ValueError(f"the batch size {list(form.batch_size)} is not that of the members")
        if form.names is not None:
            stack.names = form.names
        return stack
    lead = len(form.batch_size)
    for name, value in entries.items():
        shape = value._batch_size if isinstance(value, Contract) else ragged.shape_of(value)
        if shape[:lead] != form.batch_size:
            raise ValueError(f"the shape {list(shape)} of {name!r} does not begin with {list(form.batch_size)}")
    if form.names is not None and len(form.names) != lead:
        raise ValueError(f"{len(form.names)} names for {lead} batch dims")
    return cls._make(dict(entries), form.batch_size, form.device, form.names)


def _members_of(form: Form, entries: Mapping[str, Any]) -> list[Any]:
    if not form.columns:
        return [entries[str(position)] for position in range(len(entries))]
    dim = form.stack_dim or 0
    names = None if form.names is None else [*form.names[:dim], *form.names[dim + 1 :]]
    if names is not None and not any(names):
        names = None
    return columns.members_of(entries, form.batch_size, dim, form.device, names)


def face_problem(cls: Any, kind: str, holds_entries: bool, names: Iterable[str]) -> str | None:
    """Why a tensorclass cannot be over a container of that kind with entries of these names.

    Args:
        cls: the tensorclass; `None` for one that this program does not know, which may have any fields.
        kind: the name of the kind, for errors.
        holds_entries: whether it is one that has entries at all.
        names: those of its entries.
    """
    if not holds_entries:
        return f"a {kind} holds no fields"
    if cls is not None and (unknown := sorted(set(names) - cls.__expected_keys__)):
        return f"it has entries {unknown}, which are no fields of it"
    return None


def face_class(name: str) -> Any:
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


def _holder(cls: Any, form: Form) -> Any:
    if form.kind != VALUE_STACK:
        return cls._of(form.value, form.batch_size, form.device, form.names)
    dim = form.stack_dim or 0
    stack = cls._of_lists(form.value, form.batch_size, dim, form.device)
    if form.names is not None:
        stack.names = form.names
    return stack


def _without(form: Form) -> torch.Size:
    """The batch size of the members of a stack."""
    dim = form.stack_dim or 0
    return form.batch_size[:dim] + form.batch_size[dim + 1 :]
