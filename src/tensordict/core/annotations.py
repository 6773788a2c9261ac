"""Resolve the annotations of tensorclass fields, and cast values to them."""

from __future__ import annotations

import sys
import types
import typing
from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import is_typeddict

from tensordict.core.contract import Contract, is_node

# Flags in overloads: one that must be True, one that must be False, and one that may also be `None`.
On = Literal[True]
No = Literal[False]
Off = Literal[False] | None


UNION = (typing.Union, types.UnionType)


def resolve(hint: object, scope: Mapping[str, Any], where: str) -> Any:
    """Return the type that an annotation names. The annotation may be a string.

    Raises:
        TypeError: a name is not in `scope`. The message begins with `where`, the class and the field.
    """
    if isinstance(hint, typing.ForwardRef):
        hint = hint.__forward_arg__
    if typing.get_origin(hint) in UNION:
        # The annotation is not a string itself, but may contain one, as in `Optional["Node"]`.
        return typing.Union[tuple(resolve(part, scope, where) for part in typing.get_args(hint))]  # noqa: UP007
    if not isinstance(hint, str):
        return hint
    try:
        # The string is part of the source of the class, so evaluating it is as safe as importing the module.
        found = eval(hint, {}, scope)
    except Exception as error:
        raise TypeError(f"the annotation {hint!r} of {where} cannot be resolved: {error}") from error
    return resolve(found, scope, where) if _find_strings(found) else found


def _find_strings(hint: object) -> list[str]:
    """Return the parts of an annotation that are strings and still have to be resolved."""
    if isinstance(hint, typing.ForwardRef):
        return [hint.__forward_arg__]
    if isinstance(hint, str):
        return [hint]
    if typing.get_origin(hint) is typing.Literal:
        return []
    parts = typing.get_args(hint)[:1] if typing.get_origin(hint) is typing.Annotated else typing.get_args(hint)
    return [text for part in parts for text in _find_strings(part)]


def scope_of(cls: type[Any], hints: Iterable[object]) -> Mapping[str, Any]:
    """Return the names that string annotations may use, from the modules of the class and its enclosing function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tensordict":
        frame = frame.f_back
    local: dict[str, Any] = {}
    if frame.f_locals is not frame.f_globals:
        # Keep only the names that annotations use. A reference to all locals would keep them alive with the class.
        texts = [text for hint in hints for text in _find_strings(hint)]
        for text in texts:
            code = compile(text, "<annotation>", "eval")
            local.update({name: frame.f_locals[name] for name in code.co_names if name in frame.f_locals})
            # A string annotation may contain further names in quotes.
            texts += [part for part in code.co_consts if isinstance(part, str) and part.isidentifier() and part != text]
    local[cls.__name__] = cls
    modules = dict.fromkeys(parent.__module__ for parent in cls.__mro__)
    return ChainMap(local, *[vars(sys.modules[name]) for name in modules if name in sys.modules])


def kinds_of(hint: object) -> list[Any]:
    """Return the classes that an annotation allows, without type arguments. Other forms stay unchanged."""
    origin = typing.get_origin(hint)
    if origin in UNION:
        return [kind for part in typing.get_args(hint) for kind in kinds_of(part)]
    return [type(None) if hint is None else origin or hint]


def is_any_of(kind: object, classes: tuple[type, ...]) -> bool:
    """Return whether `kind`, one of the `kinds_of` an annotation, is a subclass of one of these classes."""
    return isinstance(kind, type) and issubclass(kind, classes)


def is_a(value: object, hint: object) -> bool:
    """Return whether a value has the type of an annotation. Type arguments, as in `list[int]`, are ignored."""
    for kind in kinds_of(hint):
        if kind is typing.Literal:
            return value in typing.get_args(hint)
        if not isinstance(kind, type) or kind is Any or isinstance(value, kind):
            return True
    return False


def _can_cast_to(kind: object) -> bool:
    """Return whether values can be cast to this class; False for `Any`, `object`, protocols and TypedDicts."""
    if not isinstance(kind, type) or kind is object or kind is Any:  # `Any` is a class from Python 3.11 on
        return False
    return not is_typeddict(kind) and not getattr(kind, "_is_protocol", False)


def cast(value: object, hint: object, where: str) -> Any:
    """Cast a value to its annotation. Returns it unchanged if the annotation does not constrain it.

    Args:
        value: the assigned value, not `None`.
        hint: the resolved annotation.
        where: the class and the field, for errors.

    Raises:
        TypeError: the value cannot be cast.
    """
    origin = typing.get_origin(hint)
    if origin in UNION:
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return cast(value, parts[0], where) if len(parts) == 1 else value
    kind: Any = hint if origin is None else origin
    if not _can_cast_to(kind) or (isinstance(value, kind) and not (kind is int and type(value) is bool)):
        return value
    if isinstance(value, Mapping) and not issubclass(kind, (Contract, Mapping)):
        return value  # A dict is not cast: `str(d)` or `list(d)` would succeed, but nobody means that.
    try:
        if issubclass(kind, Tensor):
            # Torch would convert a container to an empty tensor, so a container stays unchanged.
            return value if isinstance(value, Contract) else torch.as_tensor(value)
        if issubclass(kind, Contract):
            if kind._is_non_tensor:
                return value if isinstance(value, Contract) else kind(value)
            if isinstance(value, Mapping):
                return kind.from_dict(value)
            if not hasattr(kind, "from_tensordict"):
                return value
            is_filled = isinstance(value, Contract) and is_node(value) and not value._is_non_tensor
            return kind.from_tensordict(value) if is_filled else kind(value)
        return value if isinstance(value, Contract) or origin is not None else kind(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{where} cannot be cast: it is annotated {getattr(hint, '__name__', hint)} and got a "
            f"{type(value).__name__} ({error})"
        ) from error
