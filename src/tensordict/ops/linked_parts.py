"""Views of a part of the batch that also add new entries to the source; used by `_get_sub_tensordict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import is_node


def link_part(container: Any, at: Any) -> Any:
    """Return the part of a container at a basic index, the result of `leaf_index`. Its entries must be in a dict.

    The tensors of the part are views. Writing to an existing key copies into the view. A new entry is added to the
    container, with zeros outside the part.
    """
    view = container._index(at)
    entries = _LinkedEntries(container, at)
    for name, part in view._entries.items():
        entries.store_view(name, part)
    return makers.dense(entries, view._batch_size, view._device, view._names)


class _LinkedEntries(dict[str, Any]):
    """The entries of a part: views of the entries of `source` at the index `at`."""

    def __init__(self, source: Any, at: object) -> None:
        super().__init__()
        self.source = source
        self.at = at

    def __setitem__(self, name: str, value: Any) -> None:
        self.source[self.at] = {name: value}
        self.store_view(name, self.source._entries[name][self.at])

    def update(self, entries: Mapping[str, Any]) -> None:  # type: ignore[override]
        for name, value in entries.items():
            self[name] = value

    def store_view(self, name: str, part: Any) -> None:
        """Store a view as the entry. The view of a nested container is linked to it in the same way."""
        if type(part) is not Tensor and is_node(part) and type(part._wrapped_container()._entries) is dict:
            part = part._rewrap(link_part(self.source._entries[name]._wrapped_container(), self.at))
        super().__setitem__(name, part)

    def __reduce__(self) -> Any:
        # Another process lacks the source, so a pickle contains a plain dict.
        return dict, (dict(self),)
