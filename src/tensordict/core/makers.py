"""The constructors of containers that the rooms below `containers/` call; each class gives its own once.

A loader that reads the name of a class in a file looks it up in `registry`. All other code that has no instance to
build from calls one of these. They check nothing, as `Contract._build` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tensordict.core.contract import Names

# Entries, batch size, device, names.
dense: Callable[[dict[str, Any], torch.Size, torch.device | None, Names | None], Any]
# A holder of one value: value, batch size, and optionally device and names.
value: Callable[..., Any]
# A stack of values in nested lists: lists, batch size, stack dim, device.
values: Callable[[Any, torch.Size, int, torch.device | None], Any]
# A stack of the values of a list; nested lists are further batch dims.
value_list: Callable[[list[Any]], Any]
# A holder of any value, or the stack of the values of a list: value, batch size, device.
held: Callable[[object, torch.Size, torch.device | None], Any]
lazy_stack: type[Any]
# A container over an array store: the store, and the options of `PersistentTensorDict._open_store`.
open_store: Callable[..., Any]
