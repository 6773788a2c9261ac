"""Functions on nested keys, under private names that client programs import."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.core.keys import Key, Path, is_nested_key, path_of, unravel_key


def _unravel_key_to_tuple(key: object) -> Path:
    """Return a nested key as a tuple of names; the empty tuple for an object that is not a nested key.

    `tensordict.utils._unravel_key_to_tuple`: TorchRL (`RewardSum`), its tests and BenchMARL use it.

    Example:
        >>> from tensordict.compat.nested_keys import _unravel_key_to_tuple
        >>> _unravel_key_to_tuple("a"), _unravel_key_to_tuple(("a", ("b", "c"))), _unravel_key_to_tuple(("a", 0))
        (('a',), ('a', 'b', 'c'), ())
    """
    return path_of(key) if is_nested_key(key) else ()


def unravel_keys(key: object) -> Key:
    """Call :func:`~tensordict.unravel_key`. TorchRL's tests import it as `tensordict._C.unravel_keys`.

    Example:
        >>> from tensordict.utils import unravel_keys
        >>> unravel_keys(("a", ("b",)))
        ('a', 'b')
    """
    return unravel_key(key)


def is_seq_of_nested_key(seq: object) -> bool:
    """Return whether an object is a sequence of nested keys. TorchRL checks the keys of its KL transforms with it.

    Example:
        >>> from tensordict.utils import is_seq_of_nested_key
        >>> is_seq_of_nested_key(["a", ("b", "c")]), is_seq_of_nested_key(["a", 0])
        (True, False)
    """
    return isinstance(seq, Sequence) and all(map(is_nested_key, seq))
