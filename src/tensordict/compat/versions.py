"""`implement_for`: of several functions of one name, the one for the version of a module that is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar


class implement_for:
    """Marks a function as the one for some versions of a module; all functions of its name are chosen from.

    Args:
        module_name: the name of the module, or a function that gives the module. It is imported at the first call.
        from_version: the first version; `None` for any.
        to_version: the first version that is too new; `None` for any.
        class_method: make a class method of the function.
        compilable: choose now instead of at the first call, so that compiled code sees the function itself.

    Returns:
        a function of the same name; the last one marked whose module is installed in a version that fits is called.

    Raises:
        ModuleNotFoundError: on the call, when none fits.

    Example:
        >>> from tensordict.utils import implement_for
        >>> @implement_for("torch", None, "1.0")
        ... def age():
        ...     return "old"
        >>> @implement_for("torch", "1.0")
        ... def age():
        ...     return "new"
        >>> age()
        'new'
    """

    # The functions by name; those of one name stand in the order in which they were marked.
    _candidates: ClassVar[dict[str, list[implement_for]]] = {}

    def __init__(
        self,
        module_name: str | Callable[[], ModuleType],
        from_version: str | None = None,
        to_version: str | None = None,
        *,
        class_method: bool = False,
        compilable: bool = False,
    ) -> None:
        self.module_name = module_name
        self.from_version = from_version
        self.to_version = to_version
        self.class_method = class_method
        self.compilable = compilable

    def __call__(self, fn: Callable[..., Any]) -> Any:
        name = f"{fn.__module__}.{fn.__qualname__}"
        self.fn = fn
        candidates = self._candidates.setdefault(name, [])
        candidates.append(self)
        found = _fitting(candidates) if self.compilable else None
        chosen = (len(candidates), found)

        @wraps(fn)
        def call(*args: object, **kwargs: object) -> Any:
            nonlocal chosen
            count, found = chosen
            if found is None or count != len(candidates):
                found = _fitting(candidates)
                if found is None:
                    raise ModuleNotFoundError(f"Supported version of {name!r} has not been found: {candidates}")
                chosen = (len(candidates), found)
            return found(*args, **kwargs)

        made = call if found is None else found
        return classmethod(made) if self.class_method else made

    def fits(self) -> bool:
        """Whether the module is installed in one of the versions."""
        try:
            module = import_module(self.module_name) if isinstance(self.module_name, str) else self.module_name()
        except ImportError:
            return False
        return self.check_version(module.__version__, self.from_version, self.to_version)

    @staticmethod
    def check_version(version: str, from_version: str | None, to_version: str | None) -> bool:
        """Whether a version is neither older than the first one nor as new as the second; pre-releases count."""
        release = _release(version)
        return (from_version is None or release >= _release(from_version)) and (
            to_version is None or release < _release(to_version)
        )

    def __repr__(self) -> str:
        return f"{self.module_name} from {self.from_version} to {self.to_version}"


def _fitting(candidates: list[implement_for]) -> Callable[..., Any] | None:
    return next((candidate.fn for candidate in reversed(candidates) if candidate.fits()), None)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version up to the first part that is none, without zeros at the end."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
