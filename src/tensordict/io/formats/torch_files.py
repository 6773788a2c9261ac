"""Containers in the files of `torch.save`, in the form that `torch.load(weights_only=True)` takes.

Such a file may call only functions that are known to be harmless. The one here puts a container together from its form,
checks all of it, and looks classes up among those of the program.
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

# The pickle protocol that `torch.save` uses, which nothing else does by default.
PROTOCOL = 2


def reduced(container: Contract) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """What `__reduce_ex__` gives for a container in a file of `torch.save`; `None` for kinds that have no such form."""
    inner = container._wrapped_container()
    kind = getattr(inner, "_stored_as", type(inner).__name__)
    if kind not in KINDS or (inner is not container and not is_stored_as_class(container)):
        return None
    cls = registry.lookup(kind)
    if type(inner) is not cls and isinstance(inner, cls) and not inner._is_in_file:
        # A class of the program itself, which only its own pickle keeps.
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
    """The container of the arguments that `reduced` gave; they may be anything.

    Raises:
        SaveError: they do not add up, or are of a class that this program does not know.
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
        raise SaveError(f"the {kind!r:.80} that was saved does not add up: its parts are not of the types they have")
    if kind not in KINDS:
        find_class(kind)
    container = to_container(check(Specification(kind, batch_size, device, names, entries, stack_dim, value)))
    if locked is True and not container._locked:
        container._lock_tree()
    return container


torch.serialization.add_safe_globals([restored])
