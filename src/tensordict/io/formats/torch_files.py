"""The form of containers in files of `torch.save`, which `torch.load(weights_only=True)` can load.

Such a file may call only functions that are registered as safe. This module registers `restored`, which builds a
container from its parts, checks all of them, and finds classes only among the imported ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensordict.core import registry
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.specification import (
    KINDS,
    Specification,
    check,
    find_class,
    is_stored_as_class,
    specification_of,
    to_container,
)

# The pickle protocol of `torch.save`. Other writers of pickles have a later default.
PROTOCOL = 2


def reduce(container: Contract) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return the result of `__reduce_ex__` for a file of `torch.save`; `None` for containers without such a form."""
    inner = container._wrapped_container()
    kind = getattr(inner, "_stored_as", type(inner).__name__)
    if kind not in KINDS or (inner is not container and not is_stored_as_class(container)):
        return None
    cls = registry.lookup(kind)
    if type(inner) is not cls and isinstance(inner, cls) and not inner._is_in_file:
        # Only the default pickle keeps a subclass that a program defines.
        return None
    try:
        form = specification_of(container)
    except UnsupportedEntryError:
        return None
    size, names = torch.Size(form.batch_size), None if form.names is None else list(form.names)
    entries = dict(form.entries)
    return restored, (form.kind, size, form.device, names, entries, form.stack_dim, form.value, bool(container._locked))


def restored(
    kind: object,
    batch_size: object,
    device: object,
    names: object,
    entries: object,
    stack_dim: object,
    value: object,
    locked: object,
) -> Any:
    """Build a container from the arguments that `reduce` returned. A file may contain any arguments.

    The name of this function is part of the files, so it stays.

    Raises:
        SaveError: the arguments are broken, or a class has not been imported.
    """
    if (
        type(kind) is not str
        or type(batch_size) is not torch.Size
        or not (device is None or type(device) is torch.device)
        or not (names is None or (type(names) is list and all(name is None or type(name) is str for name in names)))
        or type(entries) is not dict
        or not all(type(name) is str and isinstance(entry, (Tensor, Contract)) for name, entry in entries.items())
        or not (stack_dim is None or (type(stack_dim) is int and 0 <= stack_dim < len(batch_size)))
    ):
        raise SaveError(f"the saved {kind!r:.80} does not add up: its parts have the wrong types")
    if kind not in KINDS:
        find_class(kind)
    container = to_container(check(Specification(kind, batch_size, device, names, entries, stack_dim, value)))
    if locked is True and not container._locked:
        container._lock_tree()
    return container


torch.serialization.add_safe_globals([restored])
