"""Open-or-create, for `memmap_like` and `from_schema`: they open an existing save and keep its content.

The requested container must have every entry of the save, with its kind, batch size, shape and dtype. Non-tensor values
are read from the save. A folder receives the requested entries that it lacks; other formats refuse them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import joined
from tensordict.io.saving.comparing import Difference, find_differences
from tensordict.io.specification import DICT, LAZY, is_stored_as_class, specification_of, to_container
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor

# The number of differences that an error lists.
_SHOWN = 4


def open_whole(wanted: Contract, path: str, load: Callable[[], Any]) -> Any:
    """Load the save at `path`, which must have the structure of `wanted`.

    Raises:
        SaveError: the structure differs, or the save is broken. Lists the differences.
    """
    saved, found = _compare(wanted, load)
    if found:
        raise _refusal(saved, path, found)
    return saved


def open_part(wanted: Contract, path: str, load: Callable[[], Any]) -> tuple[Any, list[Difference]]:
    """Load the save at `path`, which may lack entries of `wanted`.

    Returns:
        The loaded container, and its missing entries as differences.

    Raises:
        SaveError: the save has other entries, or is broken. Lists the differences.
    """
    saved, found = _compare(wanted, load)
    others = [difference for difference in found if difference.what != "missing"]
    if others:
        raise _refusal(saved, path, others)
    return saved, found


def _compare(wanted: Contract, load: Callable[[], Any]) -> tuple[Any, list[Difference]]:
    """Load a save, and list how it differs from `wanted`."""
    try:
        saved = load()
    except SaveError as error:
        raise SaveError(f"{error}. It is left as it is; pass overwrite=True to replace it") from error
    one, other = specification_of(wanted, unread=True), specification_of(saved, unread=True)
    return saved, list(find_differences(one, other, None))


def _refusal(saved: Any, path: str, found: list[Difference]) -> SaveError:
    """Close a save, and return an error that lists the first differences and gives advice."""
    if hasattr(saved, "close"):
        saved.close()
    listed = "; ".join(map(_describe, found[:_SHOWN])) + ("; and more" if len(found) > _SHOWN else "")
    if all(difference.what == "missing" for difference in found):
        advice = "Load it and set the new entries"
    else:
        advice = "Ask for all of its entries as they are there, load it and select() some of them"
    return SaveError(
        f"{path!r} holds a save of another structure than the one asked for, which is left as it is: {listed}. "
        f"{advice}, or save elsewhere"
    )


def _describe(found: Difference) -> str:
    where = f"entry {joined(found.key)!r}" if found.key else "the container"
    if found.what == "missing":
        return f"{where} is not in the save"
    if found.what == "additional":
        return f"{where} is in the save only"
    return f"{where} has {found.what} {found.other} in the save, and {found.one} is asked for"


def merge_and_lock(wanted: object, saved: object) -> Any:
    """Return a loaded folder in the form of a result of `memmap_like`: with the classes of `wanted`, and locked.

    Raises:
        PermissionError: a file is not writable.
    """
    result = merge(wanted, saved)
    result._mark(memmap=True)
    result._lock_tree()
    return result


def merge(wanted: Any, saved: Any) -> Any:
    """Build a container with the classes of `wanted` from the entries of `saved`. Missing ones come from `wanted`.

    Raises:
        PermissionError: a file is not writable.
    """
    if is_stored_as_class(wanted):
        return wanted._rewrap(merge(wanted._wrapped_container(), saved._wrapped_container()))
    form = specification_of(saved)
    if form.is_value:
        return saved
    entries = dict(specification_of(wanted, unread=True).entries)
    for name, value in form.entries.items():
        entries[name] = merge(entries[name], value) if isinstance(value, Contract) else _check_writable(value)
    if form.kind == DICT:
        result = wanted._build(entries, form.batch_size, as_device("cpu"), form.names)
    elif form.kind == LAZY:
        result = to_container(replace(form, entries=entries))
    else:
        return saved
    result._memmap_prefix = saved._memmap_prefix
    return result


def _check_writable(leaf: Tensor) -> Tensor:
    source = leaf._source if isinstance(leaf, MemoryMappedTensor) else None
    if isinstance(source, FileSource) and not source.shared:
        raise PermissionError(errno.EACCES, "the file holds what was saved and may not be written to", source.path)
    return leaf
