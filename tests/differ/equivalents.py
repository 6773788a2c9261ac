"""Does the reference disagree with itself where it differs from ours?

The other level of the reference is asked first: if it does what ours does, the two levels disagree. Then the last line
of the program runs again, on equivalent containers: dense ones in the place of lazy stacks, `TensorDict`s in the place
of tensorclasses, containers to which a leaf was added. Ours must give the same for both containers, and the reference
must give that for the equivalent one. So the reference gives two answers to one question, and ours gives one of them.
Differences that rules know by themselves may remain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from differ.comparing import MINOR, NEWEST, Difference, Found, in_states
from differ.programs import Line, Program, Step, lines_of
from differ.sides import Lines, Replies, Reply, Sides, Summary

# The functions of prelude.py that make equivalent containers, each with its name in a report.
FORMS = {
    "as_dense": "dense containers",
    "with_leaves": "containers to which a leaf is added",
    "as_tensordict": "TensorDicts",
    "fresh": "containers that share no memory with others",
    "plainest": "fresh dense TensorDicts with leaves",
}
# The forms that turn tensorclasses into TensorDicts.
OF_CLASSES = {"as_tensordict", "plainest"}
# The key that `with_leaves` adds.
ADDED = "added"

State = dict[str, Summary]
# Tells whether a rule knows a difference by itself.
Known = Callable[[Difference], bool]


def find_contradiction(program: Program, found: Found, replies: Replies, sides: Sides, known: Known) -> str:
    """Return for which equivalent containers the reference does what ours does; an empty string for none."""
    step = program[-1]
    if found.line != len(program) - 1 or not isinstance(step, Line):
        return ""
    refused = found.kind.endswith("ours raises")
    if not refused and not found.in_results():
        return ""
    lines = lines_of(program)
    if not found.of_newest() and _newest_agrees(step, sides.newest.run(lines), replies.ours, refused):
        return f"{NEWEST} does what ours does"
    if not refused and any(d.variable() != step.result and not step.uses(d.variable()) for d in found.differences):
        return ""  # a view of an operand differs, and an equivalent container would not be its source
    side = sides.newest if found.of_newest() else sides.reference
    theirs, ours = replies.newest if found.of_newest() else replies.reference, replies.ours
    for form, name in FORMS.items():
        changed = _with_form(lines, step, form)
        other, mine = side.run(changed), sides.ours.run(changed)
        if not isinstance(other, list) or not isinstance(mine, list):
            continue
        if _agrees(form, (theirs, other), (ours, mine), refused, known):
            return f"the reference does what ours does for {name}"
    return ""


def _with_form(lines: Lines, step: Step, form: str) -> Lines:
    """The program with equivalent containers just before its last line."""
    used = dict.fromkeys(re.findall(r"\b[rx]\d\b", step.code()))
    return [*lines[:-1], *[(f"{form}({name})", name) for name in used], lines[-1]]


def _newest_agrees(step: Step, newest: Any, ours: Any, refused: bool) -> bool:
    """Return whether the newest level, from the same operands, does what ours does."""
    if not isinstance(newest, list) or any(reply["exc"] for reply in newest[:-1]):
        return False
    if _differ(*(_used(step, _before(side)) for side in (newest, ours))):
        return False
    return _same_end(newest[-1], ours[-1], refused)


def _agrees(form: str, theirs: tuple[Any, Any], ours: tuple[Any, Any], refused: bool, known: Known) -> bool:
    """Return whether ours does the same for both containers, and the reference does that for the equivalent one."""
    for first, other in (theirs, ours):
        if any(reply["exc"] for reply in other[:-1]) or _differ(_before(first), _before(other), form):
            return False
    if not refused and all(map(known, _differ(theirs[0][-1]["state"], ours[0][-1]["state"], form))):
        return False  # nothing but the form differs
    if not _same_end(ours[0][-1], ours[1][-1], refused, form):
        return False
    return _same_end(theirs[1][-1], ours[1][-1], refused, form, known)


def _same_end(a: Reply, b: Reply, refused: bool, form: str = "", known: Known = lambda difference: False) -> bool:
    """Return whether two replies to the last line are the same: both refuse it alike, or both leave the same values."""
    errors = a["exc"], b["exc"]
    if refused:
        return all(errors) and _are_alike(*errors)
    if any(errors):
        return False
    return all(map(known, _differ(a["state"], b["state"], form)))


def _are_alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two errors are related; an equivalent container may lack a method, so attribute errors are not."""
    return bool(set(a["mro"]) & set(b["mro"]) - {"AttributeError"})


def _before(replies: list[dict[str, Any]]) -> State:
    """The variables before the last line."""
    return replies[-2]["state"] if len(replies) > 1 else {}


def _used(step: Step, state: State) -> State:
    return {name: summary for name, summary in state.items() if step.uses(name)}


def _differ(a: State, b: State, form: str = "") -> list[Difference]:
    """List the differences between variables, without those that a form makes and those of the way of holding."""
    plain = [{name: _plain(summary, form) for name, summary in state.items()} for state in (a, b)]
    return [difference for difference in in_states(*plain) if difference.kind not in MINOR]


def _plain(summary: Any, form: str) -> Any:
    """A summary without what a form changes."""
    if isinstance(summary, list):
        return [_plain(part, form) for part in summary]
    if not isinstance(summary, dict):
        return summary
    out = {field: _plain(part, form) for field, part in summary.items()}
    of_class = form in OF_CLASSES and out.get("cls", "").startswith("TC")
    if of_class:
        out["cls"] = "TensorDict"
    if "keys" in out and "entries" in out:
        pairs = list(zip(out["keys"], out["entries"]))
        pairs = [
            (key, part) for key, part in pairs if key != ADDED and not (of_class and part.get("cls") == "NoneType")
        ]
        out["keys"], out["entries"] = [key for key, _ in pairs], [part for _, part in pairs]
    return out
