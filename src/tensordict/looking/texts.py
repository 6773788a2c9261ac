"""Summarize values that are texts: how often each occurs; used by `describe`, `repr`, notebook trees and reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from tensordict.looking.markup import printable

# Limits of a summary: texts, characters of a text; and elements that are counted for display.
_MOST_TEXTS, _MOST_CHARACTERS, MOST_COUNTED = 5, 40, 100_000


def count_texts(values: Iterable[object]) -> dict[str, int]:
    """Return how often each text occurs, the most frequent ones first; an empty dict if any value is not a text."""
    found = list(values)
    return dict(Counter(found).most_common()) if all(type(value) is str for value in found) else {}  # type: ignore[arg-type]


def count_held_texts(holder: Any) -> dict[str, int]:
    """Return how often each text occurs in the values of a holder; an empty dict if any value is not a text."""
    if holder._members() is not None:
        return count_texts(holder._flat_values())
    value, count = holder._unwrap_value(), math.prod(holder._batch_size)
    return {value: count} if type(value) is str and count else {}


def format_value(value: object) -> str:
    """Return the `repr` of a value on one line, cut if it is long."""
    text = printable(repr(value[: _MOST_CHARACTERS + 1] if isinstance(value, str) else value)).replace("\n", " ")
    return text if len(text) <= _MOST_CHARACTERS + 2 else f"{text[:_MOST_CHARACTERS]}…"


def format_counts(counts: Mapping[str, int]) -> str:
    """Format the result of :func:`count_texts`, as `'cat': 3, 'dog': 1`; a single text without its count."""
    if len(counts) == 1:
        return format_value(next(iter(counts)))
    shown = [f"{format_value(text)}: {count:,}" for text, count in islice(counts.items(), _MOST_TEXTS)]
    more = len(counts) - len(shown)
    return ", ".join([*shown, *([f"… {more:,} more"] if more else [])])


def format_values(values: list[object], total: int) -> str:
    """Format some values of a longer list: the counts of texts, or the first values."""
    counts = count_texts(values)
    shown = [format_value(value) for value in values[:_MOST_TEXTS]]
    text = format_counts(counts) if counts else ", ".join([*shown, *(["…"] if total > len(shown) else [])])
    return f"{text}, in the first {len(values):,} of {total:,} rows" if counts and len(values) < total else text


class Preview:
    """Stands for values in `repr` and in notebook trees."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Values({self.text})"
