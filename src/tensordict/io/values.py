"""Values that are no tensors as JSON: which ones it can hold, and what is written for those that it only nearly can.

What has no form here (`NotJson`) can be kept by pickle only, which nothing is written with or read with unless the
caller agrees.
"""

from __future__ import annotations

import math
from typing import Any

# Larger ints are read by Python's own reader, but not by that of the reference.
_INT_BITS = 64
_TUPLE, _FLOAT, _DICT = "%tuple", "%float", "%dict"
_DEEP = "a value that is nested too deeply, or in itself, has no form in JSON"
_ODD_FLOATS = {"nan", "inf", "-inf"}


class NotJson(TypeError):
    """A value that JSON cannot hold so that it is the same when read again."""


def plain(value: object) -> Any:
    """The value as any reader understands it: a tuple is a list, and a float that is not finite is `null`.

    Raises:
        NotJson: when not even that is possible; its message names the type and where it is.
    """
    try:
        return _plain(value, "")
    except RecursionError:
        raise NotJson(_DEEP) from None


def exact(value: Any) -> Any:
    """The value as `restored` gives it back, the same in type and content; equal to `plain` for most.

    Raises:
        NotJson: as `plain`.
    """
    try:
        return _exact(value)
    except RecursionError:
        raise NotJson(_DEEP) from None


def _exact(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return {_TUPLE: [_exact(item) for item in value]}
    if kind is list:
        return [_exact(item) for item in value]
    if kind is dict:
        items = {_checked_key(key, ""): _exact(item) for key, item in value.items()}
        return {_DICT: items} if any(key.startswith("%") for key in items) else items
    if kind is float and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    return _plain(value, "")


def restored(form: object) -> Any:
    """The value of what `exact` gave.

    Raises:
        ValueError: the form is none that `exact` gives.
    """
    try:
        return _restore(form)
    except RecursionError:
        raise ValueError(_DEEP) from None


def _restore(form: Any) -> Any:
    if type(form) is list:
        return [_restore(item) for item in form]
    if type(form) is not dict:
        return form
    tags = [key for key in form if key.startswith("%")]
    if not tags:
        return {key: _restore(item) for key, item in form.items()}
    content = form[tags[0]]
    if form.keys() == {_TUPLE} and type(content) is list:
        return tuple(_restore(item) for item in content)
    if form.keys() == {_FLOAT} and content in _ODD_FLOATS:
        return float(content)
    if form.keys() == {_DICT} and type(content) is dict:
        return {key: _restore(item) for key, item in content.items()}
    raise ValueError(f"{form!r:.80} is no form of a value")


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        if not _is_unicode(value):
            raise NotJson(f"a str with lone surrogates{where} is no text that a file can hold")
        return value
    if kind is int:
        if value.bit_length() >= _INT_BITS:
            raise NotJson(f"an int of {value.bit_length()} bits{where} is larger than readers of JSON take")
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if kind in (list, tuple):
        return [_plain(item, f"{where or ' at '}[{position}]") for position, item in enumerate(value)]
    if kind is dict:
        return {_checked_key(key, where): _plain(item, f"{where or ' at '}[{key!r}]") for key, item in value.items()}
    raise NotJson(f"a {kind.__name__}{where} has no form in JSON")


def _checked_key(key: object, where: str) -> str:
    if type(key) is not str or not _is_unicode(key):
        raise NotJson(f"a dict with the key {key!r:.40}{where}, which is no text, has no form in JSON")
    return key


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
