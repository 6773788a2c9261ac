"""Functions on nested keys, under private names that client programs import."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.core.keys import Key, is_nested_key, unravel_key, unravel_key_to_tuple

# TorchRL (`RewardSum`), its tests and BenchMARL use this name of `tensordict.utils` and `tensordict._C`.
_unravel_key_to_tuple = unravel_key_to_tuple


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
