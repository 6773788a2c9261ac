"""Pickles of the reference: what its containers say of themselves, read as the state of ours.

It pickles attributes, each class under the module that it has there. `compat/pickles.py` and its neighbours have those
names, and `__setstate__` of our containers passes what it gets through `as_ours`. Nothing is run but what puts a
container together, so `torch.load(weights_only=True)` may use it: what a pickle holds may be anything, and is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tensordict.core import makers, registry
from tensordict.core.contract import Backing, Contract
from tensordict.core.exceptions import SaveError
from tensordict.io import checks
from tensordict.io.formats import consolidated
from tensordict.io.formats.reference_consolidated import OWN_NAMES
from tensordict.io.specification import (
    DICT,
    LAZY,
    VALUE_STACK,
    VALUES,
    Specification,
    check,
    tensorclass_problem,
    to_container,
)
from tensordict.io.stores.hdf5 import File

# An attribute of the reference's containers of one kind, which no state of ours has; in the order of precedence.
_DICT, _STACK, _VALUES, _TYPED = "_td_dim_names", "tensordicts", "non_tensordict", "_source"
PARAMS = "_param_td"
# The attributes of what a container is backed by, as they are pickled.
_BACKING = {f"_{name}" for name in Backing._fields}


def as_ours(cls: object, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an instance of `cls` for its attributes, of what was pickled; the reference may have done it.

    Raises:
        SaveError: it does not add up.
        UnsupportedEntryError: it is of a class that this program does not know.
    """
    for name, read in _READERS.items():
        # A view of ours has a source, too, and entries that the reference's typed containers have not.
        if name in state and not (name == _TYPED and "_entries" in state):
            made = read(cls, state)
            if state.get("_is_locked") is True:
                made._lock_tree()
            state = made.__getstate__()
            break
    if not _BACKING & state.keys():
        return state
    backing = Backing(**{name[1:]: value for name, value in state.items() if name in _BACKING})
    return {**{name: value for name, value in state.items() if name not in _BACKING}, "_backing": backing}


def make(cls: object, state: object) -> Any:
    """The container of a class and a state, as the reference pickles all of its dicts and lazy stacks."""
    if not (isinstance(cls, type) and issubclass(cls, Contract) and type(state) is dict):
        raise SaveError(f"the container that was pickled is said to be a {cls!r:.80}, which is no container")
    made: Any = cls.__new__(cls)
    made.__setstate__(state)
    return made


def rebuild(metadata: Any, storage: object) -> Any:
    """The consolidated container of its description and the bytes of its tensors."""
    container = consolidated.from_parts(_described(metadata), storage)
    params = registry.lookup("TensorDictParams")
    return params(container) if metadata.get("cls") is params else container


def _described(node: Any) -> Any:
    """The description of a container as a file has it: lists in the place of tuples, and classes by their names."""
    if type(node) is not dict:
        return node
    found: dict[Any, Any] = {}
    for name, part in node.items():
        if name in ("leaves", "non_tensors") and type(part) is dict:
            found[name] = {key: list(item) if type(item) is tuple else item for key, item in part.items()}
        elif name == "cls" and isinstance(part, type):
            found[name] = DICT if _stored_as_dict(part) else f"{part.__module__}.{part.__qualname__}"
        else:
            found[name] = part if name in OWN_NAMES else _described(part)
    return found


def _stored_as_dict(cls: object) -> bool:
    return getattr(cls, "_stored_as", None) == DICT


def _of_dict(cls: object, state: dict[str, Any]) -> Any:
    entries: Any = state.get("_tensordict")
    _check(type(entries) is dict, cls, "it has no entries")
    wrong = [
        name for name, entry in entries.items() if type(name) is not str or not isinstance(entry, (Tensor, Contract))
    ]
    _check(not wrong, cls, f"the entries {wrong!r:.80} are no tensors and no containers")
    size, device, names = _shape(cls, state)
    made = to_container(check(Specification(DICT, size, device, names, entries)))
    if state.get("_is_memmap") is True:
        made._is_memmap = True
    # Attributes of a class of the program.
    vars(made).update({name: value for name, value in state.items() if type(name) is str and name[:1] != "_"})
    return made


def _shape(cls: object, state: Mapping[str, Any]) -> tuple[torch.Size, Any, Any]:
    """The batch size, the device and the names of dims."""
    size: Any = state.get("_batch_size")
    device, names = state.get("_device"), state.get(_DICT)
    _check(type(size) is torch.Size, cls, f"its batch size is {size!r:.80}")
    _check(device is None or type(device) is torch.device, cls, f"its device is {device!r:.80}")
    try:
        names = checks.names(names)
    except ValueError as error:
        raise _refused(cls, str(error)) from None
    return size, device, names if names and any(names) else None


def _of_stack(cls: Any, state: dict[str, Any]) -> Any:
    members, name = state["tensordicts"], state.get("_td_dim_name")
    dim: Any = state.get("stack_dim")
    size: Any = state.get("_batch_size")
    fits = type(members) is list and all(isinstance(member, Contract) for member in members)
    _check(fits and type(dim) is int and type(size) is torch.Size, cls, "its members are no containers")
    kind = VALUE_STACK if cls._is_non_tensor else LAZY
    hooks = {name: hook for name in ("hook_in", "hook_out") if callable(hook := state.get(name))}
    rest = None if members else size[:dim] + size[dim + 1 :]
    _check(name is None or type(name) is str, cls, f"the name of its dim is {name!r:.80}")
    return registry.lookup(kind)(*members, stack_dim=dim, batch_size=rest, stack_dim_name=name, **hooks)


def _of_values(cls: Any, state: dict[str, Any]) -> Any:
    container: Any = state.get("tensordict")
    values = state[_VALUES]
    _check(isinstance(container, Contract) and type(values) is dict, cls, "it has no fields")
    size, device, names = container._batch_size, container._device, container._names
    if cls.__name__ in VALUES and cls._is_non_tensor:
        return cls._of(values.get("data"), size, device, names)
    of = makers.value
    found = {name: of(value, size, device, names) for name, value in values.items() if value is not None}
    problem = tensorclass_problem(
        cls, type(container).__name__, not container._is_non_tensor, [*container._structure(), *found]
    )
    _check(problem is None, cls, str(problem))
    for name, holder in found.items():
        container._entries[name] = holder
    return cls._wrapping(container)


def _of_typed(cls: Any, state: dict[str, Any]) -> Any:
    _check(isinstance(state[_TYPED], Contract), cls, "it has no container behind it")
    return cls.from_tensordict(state[_TYPED], check=False)


def is_of_file(state: Mapping[str, Any]) -> bool:
    """Whether this is the state of an HDF5 container of the reference."""
    return "group_name" in state


def of_file(cls: object, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Our state of an HDF5 container of the reference, and the containers over nested groups that it has opened.

    Raises:
        SaveError: it does not add up.
    """
    name, group = state.get("filename"), state.get("group_name")
    options: Any = state.get("kwargs")
    nested: Any = state.get("_nested_tensordicts")
    size, device, names = _shape(cls, state)
    if type(name) is not str or type(group) is not str:
        raise _refused(cls, f"its file is {name!r:.80} and its group {group!r:.80}")
    _check(type(options) is dict, cls, f"its options are {options!r:.80}")
    _check(type(nested) is dict and all(type(part) is cls for part in nested.values()), cls, "its groups are no groups")
    ours = {
        "filename": name,
        # "w" would empty the file.
        "mode": "r" if state.get("mode") == "r" else "r+",
        "group": group,
        "path": tuple(map(File.decode_part, filter(None, group.split("/")))),
        "options": File.check_options(options),
        "size": size,
        "names": names,
        "device": device,
        "locked": state.get("_is_locked") is True,
    }
    return ours, list(nested.values())


def _check(fits: bool, cls: object, what: str) -> None:
    if not fits:
        raise _refused(cls, what)


def _refused(cls: Any, what: str) -> SaveError:
    return SaveError(f"the {cls.__name__} that was pickled does not add up: {what}")


_READERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    _STACK: _of_stack, _VALUES: _of_values, _TYPED: _of_typed, _DICT: _of_dict
}  # fmt: skip
