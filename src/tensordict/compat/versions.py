"""`implement_for`: choose among functions of the same name by the installed version of a module."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar


class implement_for:
    """Register a function for some versions of a module. A call runs the function that fits the installed version.

    Args:
        module_name: the name of the module, or a function that returns it. It is imported at the first call.
        from_version: the first version that fits; `None` for any.
        to_version: the first version that is too new; `None` for any.
        class_method: turn the function into a class method.
        compilable: choose at once instead of at the first call, so that compiled code sees the chosen function itself.

    Returns:
        A function of the same name. It calls the last registered function that fits.

    Raises:
        ModuleNotFoundError: on the call, when no function fits.

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

    # All registered functions by name, in the order of registration.
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
        found = _choose(candidates) if self.compilable else None
        chosen = (len(candidates), found)

        @wraps(fn)
        def call(*args: object, **kwargs: object) -> Any:
            nonlocal chosen
            count, found = chosen
            if found is None or count != len(candidates):
                found = _choose(candidates)
                if found is None:
                    raise ModuleNotFoundError(f"Supported version of {name!r} has not been found: {candidates}")
                chosen = (len(candidates), found)
            return found(*args, **kwargs)

        made = call if found is None else found
        return classmethod(made) if self.class_method else made

    def fits(self) -> bool:
        """Return whether the module is installed in one of the versions."""
        try:
            module = import_module(self.module_name) if isinstance(self.module_name, str) else self.module_name()
        except ImportError:
            return False
        return self.check_version(module.__version__, self.from_version, self.to_version)

    @staticmethod
    def check_version(version: str, from_version: str | None, to_version: str | None) -> bool:
        """Return whether `from_version <= version < to_version`; a pre-release counts as its release."""
        release = _parse_release(version)
        return (from_version is None or release >= _parse_release(from_version)) and (
            to_version is None or release < _parse_release(to_version)
        )

    def __repr__(self) -> str:
        return f"{self.module_name} from {self.from_version} to {self.to_version}"


def _choose(candidates: list[implement_for]) -> Callable[..., Any] | None:
    return next((candidate.fn for candidate in reversed(candidates) if candidate.fits()), None)


def _parse_release(version: str) -> tuple[int, ...]:
    """Parse the numbers of a version up to the first part that is not a number, without trailing zeros."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
