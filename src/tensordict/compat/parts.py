"""A part of the batch whose new entries appear in the container that it is part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import registry
from tensordict.contract import is_node


def part_of(container: Any, at: Any) -> Any:
    """The part of a container over a dict at a basic index, an output of `leaf_index`.

    Its tensors are views. What is written under a key that it has is copied into the tensor there; a new entry becomes
    one of the container, with zeros where the part is not.
    """
    view = container._index(at)
    entries = _Linked(container, at)
    for name in view._entries:
        entries.link(name)
    return registry.lookup("TensorDict")._make(entries, view._batch_size, view._device, view._names)


class _Linked(dict[str, Any]):
    """The entries of a part: views, each of which is what it is in the container."""

    def __init__(self, source: Any, at: Any) -> None:
        super().__init__()
        self.source = source
        self.at = at

    def __setitem__(self, name: str, value: Any) -> None:
        self.source[self.at] = {name: value}
        self.link(name)

    def update(self, entries: Mapping[str, Any]) -> None:  # type: ignore[override]
        for name, value in entries.items():
            self[name] = value

    def link(self, name: str) -> None:
        """Have the entry be that part of the container's."""
        whole = self.source._entries[name]
        nested = is_node(whole) and type(whole._bare()._entries) is dict and not whole._is_non_tensor
        super().__setitem__(name, part_of(whole, self.at) if nested else whole[self.at])

    def __reduce__(self) -> Any:
        # Elsewhere there is no container to write to.
        return dict, (dict(self),)
