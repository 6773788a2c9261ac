"""Parse JSON from files and networks; used by all formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tensordict.core.keys import find_duplicate


def parse_json(content: str | bytes, constants: bool = True) -> Any:
    """Parse a JSON text, and reject objects with duplicate names. The time is linear in the length of the text.

    Args:
        content: the text. Bytes are decoded as UTF-8, or as UTF-16 or UTF-32 if RFC 4627 says so.
        constants: accept `NaN` and the infinities, which Python writes but JSON lacks.

    Returns:
        The value: a dict, a list, a str, an int, a float, a bool or `None`.

    Raises:
        ValueError: the text cannot be parsed, is nested too deeply for Python's parser, or has a duplicate name.

    Example:
        >>> from tensordict.core.json_text import parse_json
        >>> parse_json('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> parse_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
          ...
        ValueError: an object has the name 'a' twice
    """
    if not isinstance(content, str):
        content = content.decode(json.detect_encoding(content), "surrogatepass")
    try:
        return (_decode if constants else _decode_strictly)(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object has the name {find_duplicate(name for name, _ in pairs)!r:.200} twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Decoders are made once, because `json.loads` with a hook makes one per call.
_decode: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_build_object).decode
_decode_strictly: Callable[[str], Any] = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_constant=_refuse_constant
).decode
