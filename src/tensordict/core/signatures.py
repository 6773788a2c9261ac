"""Signatures that functions share: `spells`, `refuse_unknown` and `as_function`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def spells(template: Any, without: str = "") -> Callable[[_F], _F]:
    """Show the options of `template` in the signature of a function, in place of its own `**options`.

    `help()` and completion then list every option. Annotate `**options` for type checkers, with `Unpack`.

    Args:
        template: the function, or class method, that spells the options out as keyword arguments.
        without: names of options to leave out.
    """

    def decorate(function: _F) -> _F:
        own = inspect.signature(function)
        parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        taken = {"cls", *own.parameters, *without.split()}
        for each in inspect.signature(getattr(template, "__func__", template)).parameters.values():
            if each.kind is each.VAR_KEYWORD or (each.name not in taken and each.default is not each.empty):
                kind = each.kind if each.kind is each.VAR_KEYWORD else each.KEYWORD_ONLY
                parameters.append(each.replace(kind=kind))
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def refuse_unknown(function: Callable[..., Any], options: Iterable[str]) -> None:
    """Raise an error for options that the signature of a function, which `spells` made, does not show.

    Raises:
        TypeError: there are some.
    """
    unknown = set(options).difference(function.__signature__.parameters)  # type: ignore[attr-defined]
    if unknown:
        raise TypeError(f"{function.__name__}() takes no argument {', '.join(sorted(unknown))}")


def as_function(method: _F, first: str) -> _F:
    """Return a free function that calls a method of its first argument, which is called `first`."""
    name = method.__name__

    @functools.wraps(method)
    def function(*args: Any, **options: Any) -> Any:
        if not args and first not in options:
            raise TypeError(f"{name}() needs a container, the argument {first}")
        owner, *rest = args or (options.pop(first),)
        return getattr(owner, name)(*rest, **options)

    own = inspect.signature(method)
    head, *others = own.parameters.values()
    function.__signature__ = own.replace(parameters=[head.replace(name=first), *others])  # type: ignore[attr-defined]
    function.__qualname__ = name
    return function  # type: ignore[return-value]
