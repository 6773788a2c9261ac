"""Small functions of `tensordict.utils` that have nothing to do with containers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

_TRUE = frozenset(("y", "yes", "t", "true", "on", "1"))
_FALSE = frozenset(("n", "no", "f", "false", "off", "0"))


def _zip_strict(*iterables: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """:func:`zip` of iterables that must be of one length: all over TorchRL.

    Raises:
        ValueError: on the way, one of them is shorter than the others.
    """
    return zip(*iterables, strict=True)


class _LockedSchema(tuple[Any, ...]):
    """The keys of a locked container, which pickles of the reference hold beside it."""

    __slots__ = ()


class KeyDependentDefaultDict(defaultdict[Any, Any]):
    """A dict whose missing values are made by a function of the key.

    Example:
        >>> from tensordict.utils import KeyDependentDefaultDict
        >>> lengths = KeyDependentDefaultDict(len)
        >>> lengths["abc"], dict(lengths)
        (3, {'abc': 3})
    """

    def __init__(self, fun: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = fun

    def __missing__(self, key: object) -> Any:
        made = self[key] = self._make(key)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._make,), None, None, iter(self.items())


def strtobool(val: str) -> int:
    """1 or 0 for a word that means yes or no, in any case: `y`, `yes`, `t`, `true`, `on`, `1`, and their opposites.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> from tensordict.utils import strtobool
        >>> strtobool("Yes"), strtobool("off")
        (1, 0)
    """
    word = val.lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"a truth value is one of {sorted(_TRUE | _FALSE)}, got {val!r}")
    return int(word in _TRUE)


def int_generator(seed: int) -> int:
    """The int below 10,000 that follows `seed` in a pseudo-random sequence: the first 8 bytes of NumPy's generator.

    Example:
        >>> from tensordict.utils import int_generator
        >>> int_generator(10), int_generator(int_generator(10))
        (6756, 1717)
    """
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % 10_000


def prod(sequence: Iterable[Any]) -> Any:
    """:func:`math.prod`, under the name that versions of Python without it needed."""
    return math.prod(sequence)


def is_namedtuple(obj: object) -> bool:
    """Whether an object is a named tuple.

    Example:
        >>> from collections import namedtuple
        >>> from tensordict.utils import is_namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    return isinstance(obj, tuple) and is_namedtuple_class(type(obj))


def is_namedtuple_class(cls: object) -> bool:
    """Whether a class is one of named tuples, as :func:`collections.namedtuple` makes them."""
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_asdict")


def json_dumps(data: object, **kwargs: Any) -> str:
    """:func:`json.dumps`."""
    return json.dumps(data, **kwargs)


def get_json_backend() -> ModuleType:
    """The module that writes JSON, which is that of the standard library."""
    return json


def set_json_backend(backend: str) -> None:
    """Choose what writes JSON: `"json"`, the standard library, which is the only choice.

    Raises:
        ValueError: another one was asked for.
    """
    if backend != "json":
        raise ValueError(f"JSON is written by Python's own module: the backend is 'json', got {backend!r}")
