"""A part of the batch whose new entries appear in the container that it is part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import is_node


def part_of(container: Any, at: Any) -> Any:
    """The part of a container over a dict at a basic index, an output of `leaf_index`.

    Its tensors are views. What is written under a key that it has is copied into the tensor there; a new entry becomes
    one of the container, with zeros where the part is not.
    """
    view = container._index(at)
    entries = _Linked(container, at)
    for name, part in view._entries.items():
        entries.show(name, part)
    return makers.dense(entries, view._batch_size, view._device, view._names)


class _Linked(dict[str, Any]):
    """The entries of a part: views, each of which is what it is in the container."""

    def __init__(self, source: Any, at: object) -> None:
        super().__init__()
        self.source = source
        self.at = at

    def __setitem__(self, name: str, value: Any) -> None:
        self.source[self.at] = {name: value}
        self.show(name, self.source._entries[name][self.at])

    def update(self, entries: Mapping[str, Any]) -> None:  # type: ignore[override]
        for name, value in entries.items():
            self[name] = value

    def show(self, name: str, part: Any) -> None:
        """Have the entry be this part of the container's, or one that is linked to a nested container."""
        if type(part) is not Tensor and is_node(part) and type(part._wrapped_container()._entries) is dict:
            part = part._rewrap(part_of(self.source._entries[name]._wrapped_container(), self.at))
        super().__setitem__(name, part)

    def __reduce__(self) -> Any:
        # Elsewhere there is no container to write to.
        return dict, (dict(self),)
