"""Open-or-create: where there is a save already, `memmap_like` and `from_schema` open it and keep it as it is.

Only a save of the structure that is asked for is opened: the same keys, kinds, batch sizes, shapes and dtypes. Values
that are no tensors are those of the save.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.errors import SaveError
from tensordict.core.keys import joined
from tensordict.io.comparing import Difference, differences
from tensordict.io.specification import DICT, LAZY, is_typed, specification_of, to_container
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor

# So many differences are told.
_SHOWN = 4


def opened(wanted: Contract, path: str, load: Callable[[], Any]) -> Any:
    """What `load` gives of the save at `path`, which must have the structure of `wanted`.

    Raises:
        SaveError: it has another one, or is broken; says what differs, and how to replace it.
    """
    try:
        saved = load()
    except SaveError as error:
        raise SaveError(f"{error}. It is left as it is; pass overwrite=True to replace what is there") from error
    one, other = specification_of(wanted, unread=True), specification_of(saved, unread=True)
    found = list(islice(differences(one, other, None), _SHOWN + 1))
    if found:
        if hasattr(saved, "close"):
            saved.close()
        told = "; ".join(map(_told, found[:_SHOWN])) + ("; and more" if len(found) > _SHOWN else "")
        raise SaveError(
            f"{path!r} holds a save of another structure than the one asked for, which is left as it is: {told}. Pass "
            "overwrite=True to replace it, or save elsewhere"
        )
    return saved


def _told(found: Difference) -> str:
    where = f"entry {joined(found.key)!r}" if found.key else "the container"
    if found.what == "missing":
        return f"{where} is not in the save"
    if found.what == "additional":
        return f"{where} is in the save only"
    return f"{where} has {found.what} {found.other} in the save, and {found.one} is asked for"


def as_mapped(wanted: object, saved: object) -> Any:
    """A save that was loaded from a folder as `memmap_like` gives it: of the classes of `wanted`, and locked.

    Raises:
        PermissionError: a file may not be written to.
    """
    result = _of_classes(wanted, saved)
    result._mark(memmap=True)
    result._lock_tree()
    return result


def _of_classes(wanted: Any, saved: Any) -> Any:
    if is_typed(wanted):
        return wanted._rewrap(_of_classes(wanted._wrapped_container(), saved._wrapped_container()))
    form = specification_of(saved)
    if form.is_value:
        return saved
    others = specification_of(wanted, unread=True).entries
    entries = {
        name: _of_classes(others[name], value) if isinstance(value, Contract) else _writable(value)
        for name, value in form.entries.items()
    }
    if form.kind == DICT:
        result = wanted._build(entries, form.batch_size, as_device("cpu"), form.names)
    elif form.kind == LAZY:
        result = to_container(replace(form, entries=entries))
    else:
        return saved
    result._memmap_prefix = saved._memmap_prefix
    return result


def _writable(leaf: Tensor) -> Tensor:
    source = leaf._source if isinstance(leaf, MemoryMappedTensor) else None
    if isinstance(source, FileSource) and not source.shared:
        raise PermissionError(errno.EACCES, "the file holds what was saved and may not be written to", source.path)
    return leaf
