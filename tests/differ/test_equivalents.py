"""The reference disagrees with itself only where ours gives one answer, and the reference gives it for one form."""

from __future__ import annotations

from typing import Any

import pytest

from differ.equivalents import _agrees


def reply(value: Any, error: str = "") -> dict[str, Any]:
    """The reply to a line that leaves `value` in `r`, or raises."""
    state = {"x": {"k": "plain", "cls": "int", "value": 0}}
    if not error:
        state["r"] = {"k": "plain", "cls": "int", "value": value}
    return {"exc": {"cls": error, "mro": [error]} if error else None, "state": state}


def agrees(theirs: tuple[Any, Any], ours: tuple[Any, Any], refused: bool = False, form: str = "as_dense") -> bool:
    before = reply(None, "before")
    before["exc"] = None
    pairs = [([before, first], [before, before, other]) for first, other in (theirs, ours)]
    return _agrees(form, *pairs, refused, lambda difference: False)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ((1, 2), (2, 2), True),
        ((1, 1), (2, 2), False),  # the reference gives one answer, ours another one
        ((1, 2), (3, 2), False),  # ours disagrees with itself
        ((1, 3), (2, 2), False),  # the reference disagrees with itself, and never agrees with ours
        ((2, 2), (2, 2), False),  # nothing differs
    ],
)
def test_values(theirs: tuple[int, int], ours: tuple[int, int], expected: bool) -> None:
    assert agrees(tuple(map(reply, theirs)), tuple(map(reply, ours))) is expected


def test_errors() -> None:
    runs, raises = reply(1), reply(None, "ValueError")
    assert agrees((runs, raises), (raises, raises), refused=True)
    assert not agrees((runs, runs), (raises, raises), refused=True)
    assert not agrees((runs, raises), (raises, runs), refused=True)
    assert not agrees((runs, reply(None, "TypeError")), (raises, raises), refused=True)  # for another reason
    missing = reply(None, "AttributeError")
    assert not agrees((runs, missing), (missing, missing), refused=True)
    assert not agrees((runs, raises), (reply(2), reply(2)), form="with_leaves")
