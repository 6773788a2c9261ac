"""Small functions that client programs import from `tensordict.utils` and that have nothing to do with containers."""

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
    """Zip iterables of equal length. TorchRL uses it everywhere.

    Raises:
        ValueError: during iteration, when one iterable is shorter than the others.
    """
    return zip(*iterables, strict=True)


class _LockedSchema(tuple[Any, ...]):
    """The keys of a locked container. Pickles of the reference store one next to the container."""

    __slots__ = ()


class KeyDependentDefaultDict(defaultdict[Any, Any]):
    """A dict that computes a missing value from its key.

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
    """Return 1 for a word that means yes, and 0 for a word that means no, in any case.

    Yes: `y`, `yes`, `t`, `true`, `on`, `1`. No: `n`, `no`, `f`, `false`, `off`, `0`.

    Raises:
        ValueError: the word is not in these lists.

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
    """Return the pseudo-random int below 10,000 that follows `seed`, from the first 8 bytes of NumPy's generator.

    Example:
        >>> from tensordict.utils import int_generator
        >>> int_generator(10), int_generator(int_generator(10))
        (6756, 1717)
    """
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % 10_000


def prod(sequence: Iterable[Any]) -> Any:
    """Return the product of the elements: :func:`math.prod`, which old versions of Python lacked."""
    return math.prod(sequence)


def is_namedtuple(obj: object) -> bool:
    """Return whether an object is a named tuple.

    Example:
        >>> from collections import namedtuple
        >>> from tensordict.utils import is_namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    return isinstance(obj, tuple) and is_namedtuple_class(type(obj))


def is_namedtuple_class(cls: object) -> bool:
    """Return whether a class is a named tuple class, such as :func:`collections.namedtuple` creates."""
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_asdict")


def json_dumps(data: object, **kwargs: Any) -> str:
    """Write JSON: :func:`json.dumps`."""
    return json.dumps(data, **kwargs)


def get_json_backend() -> ModuleType:
    """Return the module that writes JSON: Python's own."""
    return json


def set_json_backend(backend: str) -> None:
    """Choose the module that writes JSON. The only choice is `"json"`, Python's own.

    Raises:
        ValueError: the backend is another one.
    """
    if backend != "json":
        raise ValueError(f"JSON is written by Python's own module: the backend is 'json', got {backend!r}")
