"""Functions that make the calls of forms from names of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_method(name: str, *args: Any, **options: Any) -> Callable[..., Any]:
    """A function that calls the method with its further arguments, and with these."""
    return lambda td, *given: getattr(td, name)(*given, *args, **options)


def assign_in_place(sign: str) -> Callable[..., Any]:
    """A function with the statement `td += other`, or another sign."""
    namespace: dict[str, Any] = {}
    exec(f"def change(td, other=2):\n    td {sign} other\n    return td", namespace)
    return namespace["change"]


def assign(td: Any, index: Any, value: Any) -> None:
    """The statement `td[index] = value`, since Dynamo does not trace `operator.setitem`."""
    td[index] = value


def remove(td: Any, key: Any) -> None:
    """The statement `del td[key]`."""
    del td[key]
