"""Build the display of containers in notebooks: a tree that folds, in HTML without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from tensordict.core.contract import Contract, EntryStore
from tensordict.looking.images import find_image_form, first_images
from tensordict.looking.markup import (
    count_text,
    escape,
    first_values,
    note,
    pictures,
    read_style,
    shorten,
    size_text,
    span,
    table,
)
from tensordict.looking.read_limits import Budget, elements_of, first_numbers
from tensordict.looking.shown_entries import ShownLeaf, has_stored_leaves, list_entries_by_member
from tensordict.looking.tally import figures_html, list_figures
from tensordict.looking.texts import MOST_COUNTED, Preview, count_held_texts, format_counts, format_value

# Limits of a tree: entries of one container, entries in all; then rows and characters of a value.
_MOST_ENTRIES, _MOST_IN_ALL = 60, 500
_MOST_ROWS, _MOST_TEXT, _MOST_IN_A_LINE = 8, 2000, 80
_MOST_IMAGES = 6
# A container with more entries starts closed, unless it is the outermost one.
_OPEN = 12
_STORED = "read when it is used, and not to be shown: to_tensordict() of some rows has the values"

# Sorts names for display.
Order = Callable[[Iterable[str]], list[str]]


def tree_html(container: Contract, order: Order) -> str:
    """Return the tree of a container as HTML, with its style sheet, in an element of the class `tensordict`.

    Leaves start closed. Inside are their figures and first elements, read within the limits of `read_limits.py`.
    """
    style, tree = read_style("style.css"), _Tree(order).node("", container, 0)[0]
    return f'<div class="tensordict"><style>{style}</style>{tree}</div>'


class _Tree:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._budget = Budget()
        self._left = _MOST_IN_ALL

    def node(self, key: str, container: Any, depth: int, shown: bool = True) -> tuple[str, int]:
        """Return the HTML of a container with its entries, and its bytes; "" as HTML if not `shown`."""
        common, others = list_entries_by_member(container)
        entries: dict[str, Any] = dict(common)
        for position, own in others.items():
            entries |= {f"{position} -> {name}": value for name, value in own.items()}
        names, stored = self._order(entries), has_stored_leaves(container)
        nbytes = 0
        items: list[str] = []
        for name in names:
            fits = shown and len(items) < _MOST_ENTRIES and self._left > 0
            self._left -= fits
            item, size = self._entry(name, entries[name], container, stored, depth, fits)
            nbytes += size
            if fits:
                items.append(item)
        if not shown:
            return "", nbytes
        if len(items) < len(names):
            rest = len(names) - len(items)
            items.append(note(f"… {rest:,} more {'entry' if rest == 1 else 'entries'}"))
        head = " ".join(
            [
                *([span("key", key)] if key else []),
                span("kind", type(container).__name__),
                span("facts", _format_facts(container) + ("" if names else " (empty)")),
                span("size", size_text(nbytes)),
            ]
        )
        opened = ' open="open"' if depth == 0 or (depth < 3 and len(names) <= _OPEN) else ""
        # Jupyter strips the style sheet from untrusted notebooks. Inline styles stay.
        body = f'<div class="td-entries" style="padding-left: 1em">{"".join(items)}</div>'
        return f'<details class="td-node"{opened}><summary>{head}</summary>{body}</details>', nbytes

    def _entry(
        self, name: str, value: Any, container: Contract, stored: bool, depth: int, shown: bool
    ) -> tuple[str, int]:
        """Return the HTML of an entry, and its bytes; "" as HTML if not `shown`."""
        if not isinstance(value, ShownLeaf):
            if not value._is_non_tensor:
                return self.node(name, value, depth + 1, shown)
            return self._value_html(name, value) if shown else "", 0
        if isinstance(value.tensor, Preview):
            text = value.tensor.text
            return _row_html(name, ["", str(list(container._batch_size))], _text_html(text), text), 0
        if not isinstance(value.tensor, Tensor):
            return _row_html(name, ["", "", "", "", type(value.tensor).__name__], _text_html(repr(value.tensor))), 0
        nbytes = _count_bytes(value)
        return self._leaf(name, value, len(container._batch_size), stored, nbytes) if shown else "", nbytes

    def _leaf(self, name: str, leaf: ShownLeaf, batch_dims: int, stored: bool, nbytes: int) -> str:
        shape = leaf.shape_text.removeprefix("torch.Size(").removesuffix(")")
        dtype = str(leaf.dtype).removeprefix("torch.")
        cells = [dtype, shape, str(leaf.tensor.device), size_text(nbytes), leaf.kind]
        return _row_html(name, cells, note(_STORED) if stored else self._content_html(leaf, batch_dims))

    def _content_html(self, leaf: ShownLeaf, batch_dims: int) -> str:
        try:
            return self._read_html(leaf, batch_dims)
        except (RuntimeError, TypeError, ValueError, OSError) as error:
            # Tensor subclasses of other packages may refuse any operation.
            return note(f"its elements cannot be read: {error}")

    def _read_html(self, leaf: ShownLeaf, batch_dims: int) -> str:
        parts = [elements_of(part) for part in leaf.parts or [leaf.tensor]]
        for why in parts:
            if isinstance(why, str):
                return note(why)
        tensors: list[Any] = parts
        tally = self._budget.tally(tensors)
        pieces = [note(tally) if isinstance(tally, str) else figures_html(list_figures(tally))]
        first = first_numbers(tensors)
        count = sum(part.numel() for part in tensors)
        if count > 1 or isinstance(tally, str):
            pieces.append(first_values([number for piece in first for number in piece.tolist()], count))
        if not leaf.tensor.is_nested:
            pieces.append(_pictures_html(leaf, tensors, batch_dims))
        return "".join(pieces)

    def _value_html(self, name: str, holder: Any) -> str:
        size = list(holder._batch_size)
        if holder._members() is None:
            value = holder._unwrap_value()
            text = value if isinstance(value, str) else repr(value)
            return _row_html(name, [type(value).__name__, str(size)], _text_html(text), format_value(value))
        first = holder[:_MOST_ROWS].tolist() if size and size[0] else []
        rows = [
            [str(row), shorten(value if isinstance(value, str) else repr(value), _MOST_ROWS * _MOST_IN_A_LINE)]
            for row, value in enumerate(first)
        ]
        kinds = {type(value).__name__ for value in first}
        more = note(f"… {count_text(size[0] - len(rows), 'more row')}") if size[0] > len(rows) else ""
        kind = kinds.pop() if len(kinds) == 1 else ""
        counts = count_held_texts(holder) if kind == "str" and math.prod(size) <= MOST_COUNTED else {}
        start = [*map(format_value, first[:2]), *(["…"] if math.prod(size) > 2 else [])]
        text = format_counts(counts) if counts else ", ".join(start)
        return _row_html(name, [kind, str(size)], table(["row", "value"], rows) + more, text)


def _format_facts(container: Any) -> str:
    facts = [f"batch_size={list(container._batch_size)}", f"device={container._device}"]
    if container._names is not None:
        facts.append(f"names={list(container._names)}")
    if container._members() is not None:
        facts.append(f"stack_dim={container._wrapped_container().stack_dim}")
    if isinstance(container._entries, EntryStore) and (fact := container._entries.fact()):
        facts.append(fact)
    return ", ".join(facts)


def _count_bytes(leaf: ShownLeaf) -> int:
    """Return the bytes of the elements of a leaf."""
    if leaf.shape is not None and -1 not in leaf.shape:
        return math.prod(leaf.shape) * leaf.dtype.itemsize
    return sum(_count_elements(part) * part.itemsize for part in leaf.parts or [leaf.tensor])


def _count_elements(tensor: Tensor) -> int:
    if is_lazy(tensor):
        return 0
    return tensor.values().numel() if tensor.is_nested and tensor.is_contiguous() else tensor.numel()


def _row_html(name: str, cells: Sequence[str], body: str, preview: str = "") -> str:
    """Return the HTML of a leaf or a value: one line, which may end in a preview, and a body that opens."""
    titles = ("dtype", "shape", "device", "size", "kind")
    pieces = [span("key", name), *(span(title, cell) for title, cell in zip(titles, cells))]
    head = " ".join([*pieces, *([span("preview", preview)] if preview else [])])
    return f'<details class="td-leaf"><summary>{head}</summary><div class="td-body">{body}</div></details>'


def _pictures_html(leaf: ShownLeaf, tensors: Sequence[Tensor], batch_dims: int) -> str:
    """Return the first images of a leaf as HTML; "" when it does not look like images."""
    shape = leaf.shape or leaf.tensor.shape
    form = "" if -1 in shape else find_image_form(shape[batch_dims:], leaf.dtype)
    if not form:
        return ""
    urls = first_images(tensors, form, _MOST_IMAGES)
    return pictures(urls, math.prod(shape[: len(shape) - len(form)]) - len(urls))


def _text_html(text: str) -> str:
    return f'<div class="td-text">{escape(shorten(text, _MOST_TEXT))}</div>'
