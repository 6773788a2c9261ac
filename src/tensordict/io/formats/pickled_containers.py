"""The reader of containers in pickles of the reference, for `__setstate__` and the functions that such pickles call.

The reference pickles the attributes of a container, and each class under the name of its module there.
`compat/pickles.py` and its neighbours define these names, and `__setstate__` of the containers of this package calls
`convert_state`. A pickle may have any content, so everything is checked, and only code that builds containers runs.
Therefore `torch.load(weights_only=True)` may use it.
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

# Attributes of the reference that tell its kinds of containers apart, and that states of this package lack.
_DICT, _STACK, _VALUES, _TYPED = "_td_dim_names", "tensordicts", "non_tensordict", "_source"
PARAMS = "_param_td"
# The attributes in pickles that this package keeps together in `Backing`.
_BACKING = {f"_{name}" for name in Backing._fields}


def convert_state(cls: object, state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an instance of `cls` from a pickled state of this package or of the reference.

    Raises:
        SaveError: the state is broken.
        UnsupportedEntryError: a class has not been imported.
    """
    for name, read in _READERS.items():
        # A view of this package has a `_source` too. Unlike a typed container of the reference it has `_entries`.
        if name in state and not (name == _TYPED and "_entries" in state):
            container = read(cls, state)
            if state.get("_is_locked") is True:
                container._lock_tree()
            state = container.__getstate__()
            break
    if not _BACKING & state.keys():
        return state
    backing = Backing(**{name[1:]: value for name, value in state.items() if name in _BACKING})
    return {**{name: value for name, value in state.items() if name not in _BACKING}, "_backing": backing}


def make(cls: object, state: object) -> Any:
    """Build a container from its class and its state. The reference pickles its dicts and lazy stacks in this form."""
    if not (isinstance(cls, type) and issubclass(cls, Contract) and type(state) is dict):
        raise SaveError(f"the pickle names the class {cls!r:.80}, which is no container")
    container: Any = cls.__new__(cls)
    container.__setstate__(state)
    return container


def rebuild(metadata: Any, storage: object) -> Any:
    """Build a consolidated container from its description and the bytes of its tensors."""
    container = consolidated.from_parts(_convert_description(metadata), storage)
    params = registry.lookup("TensorDictParams")
    return params(container) if metadata.get("cls") is params else container


def _convert_description(node: Any) -> Any:
    """Convert a pickled description to the form in files: tuples become lists, and classes become names."""
    if type(node) is not dict:
        return node
    found: dict[Any, Any] = {}
    for name, part in node.items():
        if name in ("leaves", "non_tensors") and type(part) is dict:
            found[name] = {key: list(item) if type(item) is tuple else item for key, item in part.items()}
        elif name == "cls" and isinstance(part, type):
            found[name] = (
                DICT if getattr(part, "_stored_as", None) == DICT else f"{part.__module__}.{part.__qualname__}"
            )
        else:
            found[name] = part if name in OWN_NAMES else _convert_description(part)
    return found


def _read_dict(cls: object, state: dict[str, Any]) -> Any:
    entries: Any = state.get("_tensordict")
    _check(type(entries) is dict, cls, "it has no entries")
    wrong = [
        name for name, entry in entries.items() if type(name) is not str or not isinstance(entry, (Tensor, Contract))
    ]
    _check(not wrong, cls, f"the entries {wrong!r:.80} are neither tensors nor containers")
    size, device, names = _read_batch(cls, state)
    container = to_container(check(Specification(DICT, size, device, names, entries)))
    if state.get("_is_memmap") is True:
        container._is_memmap = True
    # A subclass defined by a program may have more attributes.
    vars(container).update({name: value for name, value in state.items() if type(name) is str and name[:1] != "_"})
    return container


def _read_batch(cls: object, state: Mapping[str, Any]) -> tuple[torch.Size, Any, Any]:
    """Return the batch size, the device and the dim names in a state."""
    size: Any = state.get("_batch_size")
    device, names = state.get("_device"), state.get(_DICT)
    _check(type(size) is torch.Size, cls, f"its batch size is {size!r:.80}")
    _check(device is None or type(device) is torch.device, cls, f"its device is {device!r:.80}")
    try:
        names = checks.names(names)
    except ValueError as error:
        raise _state_error(cls, str(error)) from None
    return size, device, names if names and any(names) else None


def _read_stack(cls: Any, state: dict[str, Any]) -> Any:
    members, name = state["tensordicts"], state.get("_td_dim_name")
    dim: Any = state.get("stack_dim")
    size: Any = state.get("_batch_size")
    fits = type(members) is list and all(isinstance(member, Contract) for member in members)
    _check(fits and type(dim) is int and type(size) is torch.Size, cls, "its members are not containers")
    kind = VALUE_STACK if cls._is_non_tensor else LAZY
    hooks = {name: hook for name in ("hook_in", "hook_out") if callable(hook := state.get(name))}
    rest = None if members else size[:dim] + size[dim + 1 :]
    _check(name is None or type(name) is str, cls, f"the name of its dim is {name!r:.80}")
    return registry.lookup(kind)(*members, stack_dim=dim, batch_size=rest, stack_dim_name=name, **hooks)


def _read_tensorclass(cls: Any, state: dict[str, Any]) -> Any:
    """Build a tensorclass, or a holder of a value, which the reference pickles as one."""
    container: Any = state.get("tensordict")
    values = state[_VALUES]
    _check(isinstance(container, Contract) and type(values) is dict, cls, "it has no fields")
    size, device, names = container._batch_size, container._device, container._names
    if cls.__name__ in VALUES and cls._is_non_tensor:
        return cls._of(values.get("data"), size, device, names)
    hold = makers.value
    found = {name: hold(value, size, device, names) for name, value in values.items() if value is not None}
    problem = tensorclass_problem(
        cls, type(container).__name__, not container._is_non_tensor, [*container._structure(), *found]
    )
    _check(problem is None, cls, str(problem))
    for name, holder in found.items():
        container._entries[name] = holder
    return cls._wrap_container(container)


def _read_typed(cls: Any, state: dict[str, Any]) -> Any:
    _check(isinstance(state[_TYPED], Contract), cls, "it has no container behind it")
    return cls.from_tensordict(state[_TYPED], check=False)


def is_hdf5_state(state: Mapping[str, Any]) -> bool:
    """Return True for the state of an HDF5 container of the reference."""
    return "group_name" in state


def convert_hdf5_state(cls: object, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Convert the state of an HDF5 container of the reference to the form of this package.

    Returns:
        the state, and the containers over the nested groups that were open.

    Raises:
        SaveError: the state is broken.
    """
    name, group = state.get("filename"), state.get("group_name")
    options: Any = state.get("kwargs")
    nested: Any = state.get("_nested_tensordicts")
    size, device, names = _read_batch(cls, state)
    if type(name) is not str or type(group) is not str:
        raise _state_error(cls, f"its file is {name!r:.80} and its group {group!r:.80}")
    _check(type(options) is dict, cls, f"its options are {options!r:.80}")
    are_groups = type(nested) is dict and all(type(part) is cls for part in nested.values())
    _check(are_groups, cls, f"its nested groups are {nested!r:.80}")
    converted = {
        "filename": name,
        # The mode "w" would empty the file.
        "mode": "r" if state.get("mode") == "r" else "r+",
        "group": group,
        "path": tuple(map(File.decode_part, filter(None, group.split("/")))),
        "options": File.check_options(options),
        "size": size,
        "names": names,
        "device": device,
        "locked": state.get("_is_locked") is True,
    }
    return converted, list(nested.values())


def _check(fits: bool, cls: object, what: str) -> None:
    if not fits:
        raise _state_error(cls, what)


def _state_error(cls: Any, what: str) -> SaveError:
    return SaveError(f"the pickled {cls.__name__} does not add up: {what}")


_READERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    _STACK: _read_stack, _VALUES: _read_tensorclass, _TYPED: _read_typed, _DICT: _read_dict
}  # fmt: skip
