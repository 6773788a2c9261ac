"""Decorators that client programs put on methods of their container classes: locking and caching."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from tensordict.core.contract import Contract
from tensordict.ops.entries.locking import raise_locked


def lock_blocked(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method so that it raises an error while its container is locked.

    Raises:
        RuntimeError: on the call, when the container is locked.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.utils import lock_blocked
        >>> class Log(TensorDict):
        ...     @lock_blocked
        ...     def start(self):
        ...         return self.clear()
        >>> Log().lock_().start()
        Traceback (most recent call last):
        ...
        tensordict.core.exceptions.LockedError: Cannot modify locked TensorDict: cannot call start()...
    """

    @wraps(func)
    def method(self: Contract, *args: object, **kwargs: object) -> Any:
        if self._locked:
            raise_locked(f"call {func.__name__}()")
        return func(self, *args, **kwargs)

    return method


class cache:
    """Cache the result of a method while its container is locked. Unlocking clears the cache.

    The method runs on every call while the container is unlocked, or when an argument cannot be hashed. Its result must
    depend only on the structure of the container, such as its keys, because the values of a locked container can
    change.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.utils import cache
        >>> class Frame(TensorDict):
        ...     @cache
        ...     def names_of_leaves(self):
        ...         return sorted(map(str, self.keys(True, True)))
        >>> frame = Frame(a=torch.zeros(2)).lock_()
        >>> frame.names_of_leaves() is frame.names_of_leaves()
        True
    """

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._function = fun

    def __set_name__(self, owner: type[Any], name: str) -> None:
        function = self._function
        if not hasattr(owner, "_unlock_tree"):
            raise TypeError(f"cache is for methods of containers, and {owner.__name__} does not derive from one")

        @wraps(function)
        def method(container: Contract, *args: object, **kwargs: object) -> Any:
            if not container._locked:
                return function(container, *args, **kwargs)
            key = (name, args, tuple(sorted(kwargs.items())))
            try:
                hash(key)
            except TypeError:
                return function(container, *args, **kwargs)
            remembered = container.__dict__.setdefault("_remembered", {})
            if key not in remembered:
                remembered[key] = function(container, *args, **kwargs)
            return remembered[key]

        setattr(owner, name, method)
        # Only classes with a cached method clear a cache, so that all others unlock at full speed.
        if "_remembered" not in vars(owner):
            owner._remembered = None
            owner._unlock_tree = erase_cache(owner._unlock_tree)


def erase_cache(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method so that it clears the results cached by :class:`cache`."""

    @wraps(fun)
    def method(self: object, *args: object, **kwargs: object) -> Any:
        self.__dict__.pop("_remembered", None)
        return fun(self, *args, **kwargs)

    return method
