"""Forms: one call each, and the kinds of container that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# A tree of two levels; every operation runs on it.
NESTED = ("nested",)
# The containers whose leaves live in different places.
MAIN = ("nested", "lazy")
# Those and a wrapper around a container.
MOST = (*MAIN, "tensorclass")
# Containers that may be written in place.
WRITABLE = (*MOST, "view")
# Every class and state whose leaves are plain tensors.
EVERY = (*WRITABLE, "params", "named", "locked", "inside", "typed", "lazy-tensorclass")
# Containers that any entry may be added to.
GROWING = ("nested", "lazy", "view", "named")


@dataclass(frozen=True)
class Form:
    """One call that must give the same in eager and in compiled code.

    name: the name of the method, then `: ` and what is special about the call.
    call: takes a container of the kind, and what `given` returns.
    kinds: names of the kinds of container; see `kinds.py`.
    given: makes further arguments from the name of the kind and the size.
    quick: the kind that runs in `make test`; all kinds run in `make test-slow`.
    without: the kinds on which eager code raises an error.
    """

    name: str
    call: Callable[..., Any]
    kinds: tuple[str, ...] = MAIN
    given: Callable[[str, int], tuple[Any, ...]] | None = None
    quick: str | None = None
    without: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The name of the method that the form calls."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Row:
    """A form on one kind of container."""

    form: Form
    kind: str

    @property
    def name(self) -> str:
        return f"{self.form.name} [{self.kind}]"

    @property
    def quick(self) -> bool:
        return self.form.quick == self.kind


def make_rows(forms: Iterable[Form]) -> dict[str, Row]:
    """The rows of all forms by their names, which differ."""
    rows: dict[str, Row] = {}
    for form in forms:
        for kind in form.kinds:
            if kind in form.without:
                continue
            row = Row(form, kind)
            if row.name in rows:
                raise ValueError(f"two rows are called {row.name!r}: give one of the forms another name")
            rows[row.name] = row
    return rows
