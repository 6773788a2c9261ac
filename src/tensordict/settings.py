"""Process-wide settings of the package."""

from __future__ import annotations

_get_defaults_to_none = True


def set_get_defaults_to_none(set_to_none: bool = True) -> None:
    """Choose what `get(key)` without a default does for a missing key.

    Args:
        set_to_none: `True` (the initial state) makes it return `None`, `False` makes it raise `KeyError`.

    Example:
        >>> import tensordict
        >>> td = tensordict.TensorDict()
        >>> assert td.get("missing") is None
        >>> tensordict.set_get_defaults_to_none(False)
        >>> try:
        ...     td.get("missing")
        ... except KeyError:
        ...     print("missing")
        missing
        >>> tensordict.set_get_defaults_to_none(True)
    """
    global _get_defaults_to_none
    _get_defaults_to_none = bool(set_to_none)


def get_defaults_to_none(set_to_none: bool = True) -> bool:
    """Whether `get(key)` returns `None` for a missing key when no default is given.

    The argument is accepted for compatibility with the public signature and has no effect.
    """
    return _get_defaults_to_none
