"""The compact form of `repr`: each entry as its dtype and feature dims; see `set_printoptions(compact=True)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.looking.shown_entries import ShownLeaf, list_entries, list_entries_by_member

# A text that would be longer than this is broken into one line for each entry.
_WIDTH = 80
# The names of dtypes are shortened: `float32` to `f32`, `bfloat16` to `bf16`, `uint8` to `u8`.
_SHORT = (("torch.", ""), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))


@dataclass(slots=True)
class _TextGroup:
    """The texts of entries, or groups of further entries, that stand in braces behind `start`."""

    start: str
    items: Sequence[tuple[str, str | _TextGroup]]

    def on_one_line(self) -> str:
        return f"{self.start}{{{', '.join(f'{key}: {_on_one_line(item)}' for key, item in self.items)}}}"

    def on_many_lines(self, indent: int, behind: int) -> str:
        """Return one line for each entry. `behind`: the number of characters that follow the last brace."""
        if not self.items:
            return f"{self.start}{{}}"
        lines = []
        for number, (key, item) in enumerate(self.items):
            begin = f"{' ' * (indent + 4)}{key}: "
            text = _on_one_line(item)
            rest = 1 + behind if number == len(self.items) - 1 else 1
            if isinstance(item, _TextGroup) and len(begin) + len(text) + rest > _WIDTH:
                text = item.on_many_lines(indent + 4, rest)
            lines.append(begin + text)
        return f"{self.start}{{\n" + ",\n".join(lines) + "}"


def _on_one_line(item: str | _TextGroup) -> str:
    return item if isinstance(item, str) else item.on_one_line()


class CompactPrinter:
    """One call of `repr`, with the print options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def format_container(self, container: Contract) -> str:
        """Return the text of a container."""
        size = container._batch_size
        facts = [f"batch_size={_format_dims(size)}"] if self.options["show_batch_size"] else []
        if self.options["show_device"] and container._device is not None:
            facts.append(f"device={container._device}")
        if container._wrapped_container() is container and container._members() is not None:
            facts.append(f"stack_dim={container.stack_dim}")
        common, others = list_entries_by_member(container)
        groups = [_TextGroup("fields=", self.list_items(container, common))]
        if others:
            rest = [(str(n), _TextGroup("", self.list_items(container, entries))) for n, entries in others.items()]
            groups.append(_TextGroup("exclusive_fields=", rest))
        start = f"{type(container).__name__}({', '.join([*facts, ''])}"
        text = f"{start}{', '.join([group.on_one_line() for group in groups])})"
        if len(text) <= _WIDTH:
            return text
        text = start + groups[0].on_many_lines(0, 1)
        for group in groups[1:]:
            line = group.on_one_line()
            used = len(text) - text.rfind("\n") - 1
            text += ", " + (line if used + len(line) + 3 <= _WIDTH else group.on_many_lines(0, 1))
        return f"{text})"

    def list_items(self, container: Contract, entries: Mapping[str, Any]) -> list[tuple[str, str | _TextGroup]]:
        """Return the keys and texts of entries, in the order of the option `sort_keys`."""
        found: list[tuple[str, str | _TextGroup]] = []
        for name, value in entries.items():
            if isinstance(value, ShownLeaf):
                found.append((name, self.format_leaf(value, container)))
            elif value._is_non_tensor:
                is_one = value._members() is None and not value._ignores_batch
                found.append((name, type(value._value if is_one else value).__name__))
            else:
                kind = type(value).__name__
                extra = value._batch_size[len(container._batch_size) :]
                # The nested containers of a lazy stack are lazy stacks as well.
                implied = kind == "TensorDict" or (value._members() is not None and container._members() is not None)
                start = ("" if implied else kind) + (_format_dims(extra) if extra else "")
                found.append((name, _TextGroup(start, self.list_items(value, list_entries(value)))))
        order = self.options["sort_keys"]
        if callable(order) or order == "alphabetical":
            key = order if callable(order) else str
            found.sort(key=lambda row: key(f"{row[0]}: {_on_one_line(row[1])}"))
        return [*found, *((name, "None") for name in sorted(container._optional - container._structure().keys()))]

    def format_leaf(self, leaf: ShownLeaf, container: Contract) -> str:
        tensor = leaf.tensor
        if not isinstance(tensor, Tensor):
            return type(tensor).__name__
        text = str(leaf.dtype) if self.options["show_dtype"] else ""
        for long, short in _SHORT:
            text = text.replace(long, short)
        shape: Any = ragged.shape_of(tensor) if leaf.shape is None else leaf.shape
        size = container._batch_size
        # The shape of an entry is (-1,) if the members of a lazy stack differ in the number of dims.
        if not (isinstance(tensor, Contract) or (size and len(shape) < len(size)) or (shape[:1] == (-1,) != size[:1])):
            shape = shape[len(size) :]
        text += _format_dims(shape)
        elsewhere = container._device is None and tensor.device.type != "cpu"
        return f"{text}@{tensor.device}" if elsewhere and self.options["show_device"] else text


def _format_dims(size: torch.Size) -> str:
    return f"[{','.join(map(str, size))}]"
