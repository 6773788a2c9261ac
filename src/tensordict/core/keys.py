"""Nested keys: a name, or a (possibly nested) tuple of names. The package works with their flat form, the path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

Key: TypeAlias = "str | tuple[Key, ...]"  # a name, or a tuple of keys
Path = tuple[str, ...]
# The default separator of `flatten_keys` and its kin.
KEY_SEPARATOR = "."


class _NestedKeyMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return is_nested_key(instance)


if TYPE_CHECKING:
    NestedKey: TypeAlias = Key
else:

    class NestedKey(metaclass=_NestedKeyMeta):
        """The type of a nested key: `isinstance(x, NestedKey)` holds for a string or a (nested) tuple of strings.

        Example:
            >>> from tensordict import NestedKey
            >>> isinstance(("a", ("b", "c")), NestedKey), isinstance(("a", 0), NestedKey)
            (True, False)
        """


def is_nested_key(key: object) -> TypeGuard[Key]:
    """Return whether `key` is a string or a non-empty (nested) tuple of strings."""
    if isinstance(key, str):
        return True
    if not (isinstance(key, tuple) and key):
        return False
    for name in key:  # noqa: SIM110 (half the time of `all`, and every nested write asks)
        if type(name) is not str and not is_nested_key(name):
            return False
    return True


def path_of(key: object) -> Path:
    """Return the path of a nested key: a flat tuple of names.

    Raises:
        TypeError: `key` is not a string, and not a non-empty (nested) tuple of strings.
    """
    if type(key) is str:
        return (key,)
    if isinstance(key, tuple) and key:
        for name in key:
            if type(name) is not str:
                return tuple(part for name in key for part in path_of(name))
        return key
    if isinstance(key, str):
        return (str(key),)
    raise TypeError(_describe_bad_key(key))


def _describe_bad_key(key: object) -> str:
    return f"a key must be a string or a non-empty (nested) tuple of strings, got {key!r} of type {type(key).__name__}"


def path_in(key: object, place: Path) -> Path:
    """Return the path of a key of a mapping, which becomes the container at `place`.

    Raises:
        TypeError: `key` is no nested key, such as the numbers in the state dict of an optimizer.
    """
    if isinstance(key, (str, tuple)):
        return path_of(key)
    hint = "; from_pytree converts a mapping with any keys"
    if place:
        hint = (
            f" under {joined(place)!r}: store the mapping as one value, td[{place[0]!r}] = NonTensorData(mapping), or "
            "convert it by from_pytree, which takes any keys; save_checkpoint saves the states of optimizers"
        )
    raise TypeError(f"{_describe_bad_key(key)}{hint}")


def key_path(key: tuple[Any, ...]) -> Path | None:
    """Return the path of a non-empty tuple, or `None` if it is not a nested key."""
    for name in key:
        if type(name) is not str:
            return path_of(key) if is_nested_key(key) else None
    return key


def joined(path: Path) -> Key:
    """Return the canonical key of a path: the bare name for a single name, else the path itself."""
    return path[0] if len(path) == 1 else path


def entry_of(path: Path) -> str:
    """Return the beginning of an error about an entry; "" for the container itself."""
    return f"entry {joined(path)!r}: " if path else ""


def entries_of(paths: Sequence[Path]) -> str:
    """Return the beginning of an error about several entries. It names the first three and counts the others."""
    if len(paths) < 2:
        return entry_of(paths[0]) if paths else ""
    names, others = [f"{joined(path)!r}" for path in paths[:3]], len(paths) - 3
    return f"entries {', '.join(names)}{f' and {others} more' if others > 0 else ''}: "


def canonical(key: object) -> Key:
    """Return the canonical form of a nested key; raises a `TypeError` for anything else, unlike :func:`unravel_key`."""
    return joined(path_of(key))


def unravel_key(key: object) -> Key:
    """Flatten a nested key to its canonical form: a string, or a flat tuple of none, two or more strings.

    Args:
        key: a string, or a (nested) tuple of strings. Items that are not nested keys are dropped, so that programs can
            extract the keys from any tuple.

    Raises:
        RuntimeError: `key` is neither a string nor a tuple.

    Example:
        >>> from tensordict import unravel_key
        >>> unravel_key(("a",)), unravel_key(("a", ("b", "c"))), unravel_key(("a", 0)), unravel_key((0,))
        ('a', ('a', 'b', 'c'), 'a', ())
    """
    if type(key) is str:
        return key
    if isinstance(key, tuple):
        path: Path = key
        for part in key:
            if type(part) is not str:
                path = tuple([name for part in key if is_nested_key(part) for name in path_of(part)])
                break
        return joined(path)
    if isinstance(key, str):
        return str(key)
    raise RuntimeError(
        f"key should be a Sequence<NestedKey>, that is a string or a (nested) tuple of strings; got {key!r} of type "
        f"{type(key).__name__}"
    )


def unravel_key_list(keys: Iterable[Any]) -> list[Key]:
    """Flatten every nested key of a list or tuple; see :func:`unravel_key`.

    Raises:
        TypeError: `keys` is a string (which would be read letter by letter), or is not iterable.
        RuntimeError: an item is neither a string nor a tuple.

    Example:
        >>> from tensordict import unravel_key_list
        >>> unravel_key_list(["a", ("b", ("c",))])
        ['a', ('b', 'c')]
    """
    if isinstance(keys, str) or not isinstance(keys, (Sequence, set, frozenset, Iterable)):
        raise TypeError(f"expected a list of keys, got {keys!r} of type {type(keys).__name__}")
    return [unravel_key(key) for key in keys]


def unravel_key_to_tuple(key: object) -> Path:
    """Flatten a nested key to a tuple of strings; the empty tuple for anything that is not a nested key.

    Example:
        >>> from tensordict import unravel_key_to_tuple
        >>> unravel_key_to_tuple("a"), unravel_key_to_tuple(("a", ("b",))), unravel_key_to_tuple(("a", 0))
        (('a',), ('a', 'b'), ())
    """
    return path_of(key) if is_nested_key(key) else ()


def find_duplicate(names: Iterable[str]) -> str | None:
    """Return the first name that repeats an earlier one, in linear time; `None` if all names differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
