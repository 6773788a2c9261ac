"""Groups of differences, and what is known about them.

`judged.txt` has rules, first match wins: a letter, a pattern over a group's text, a note. `judged-newest.txt` has those
for lines that level 0.14.3 refuses and the newest level runs. `judged-properties.txt` comes before both: its rules are
about one difference between values, or about one error, whatever the operation. A group of several differences that no
rule covers as a whole is judged difference by difference. `seen.txt` has the digests of single groups that somebody
looked at and found to be no more than arguable.
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from differ.comparing import NEWEST, Difference, Found, receiver
from differ.equivalents import find_contradiction
from differ.programs import Program, text_of
from differ.sides import Replies, Sides

JUDGED = pathlib.Path(__file__).with_name("judged.txt")
JUDGED_NEWEST = pathlib.Path(__file__).with_name("judged-newest.txt")
JUDGED_PROPERTIES = pathlib.Path(__file__).with_name("judged-properties.txt")
SEEN = pathlib.Path(__file__).with_name("seen.txt")
UNKNOWN = "?"
# The letter of groups in which the reference disagrees with itself (equivalents.py).
EXCUSED = "r"
# Groups of these letters fail a run.
BAD = "A?"
# In judged-newest.txt: what is known beside level 0.14.3 holds here, too. Its rules call the kinds of differences so:
AS_BESIDE_OLD = "="
OLD_KINDS = {
    f"{NEWEST}: result": "result",
    f"{NEWEST}: state": "state",
    f"{NEWEST} runs, ours raises": "ours raises",
    f"{NEWEST} raises": "reference raises",
}


# The end of the key of a group whose differences are those between values.
OF_VALUES = re.compile(r" \| (0\.15\.3: )?(result|state) \| [^|]*$")

_KIND_AND_PLACE = re.compile(r"(.*?) at ([^:\n]*):")


class Group(NamedTuple):
    """Differences of one kind in one operation on one kind of container, with a program that shows it."""

    key: str
    seed: int
    count: int
    program: str
    reference: str
    ours: str
    differences: list[str]
    # For which equivalent containers the reference does what ours does.
    excuse: str = ""

    def __str__(self) -> str:
        lines = [self.key, f"program: {self.program}", f"reference: {self.reference}", f"ours: {self.ours}"]
        return "\n".join(lines + self.differences)

    def printed(self) -> str:
        program = self.program.replace("\n", "\n    ")
        sides = f"    reference: {self.reference[:300]}\n    ours:      {self.ours[:300]}"
        differences = "".join(f"\n      {difference}" for difference in self.differences[:4])
        return f"    # seed {self.seed}\n    {program}\n{sides}{differences}"


def describe(program: Program, found: Found, replies: Replies, seed: int) -> Group:
    """The group that a difference belongs to."""
    kind = receiver(program, found, replies)
    key = f"{found.operation} | {kind} | {found.kind} | {found.detail}"
    theirs = found.newest if found.of_newest() else found.reference
    sides = [f"{error['cls']}: {error['msg']}" if error else "runs" for error in (theirs, found.ours)]
    if found.is_crash():
        sides[1] = found.detail
    return Group(key, seed, 1, text_of(program), *sides, [str(d) for d in found.differences])


@cache
def rules(path: pathlib.Path) -> list[tuple[str, re.Pattern[str], str]]:
    """Letter, pattern and note of each rule."""
    out = []
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            letter, pattern, *note = line.split("\t")
            out.append((letter, re.compile(pattern, re.DOTALL), note[0] if note else ""))
    return out


@cache
def seen() -> frozenset[str]:
    return frozenset(SEEN.read_text().split())


def digest(key: str) -> str:
    return hashlib.sha1(key.encode()).hexdigest()[:8]


def excuse(group: Group, program: Program, found: Found, replies: Replies, sides: Sides) -> Group:
    """The group, with what speaks for ours if the reference disagrees with itself."""

    def known(difference: Difference) -> bool:
        return _judge_whole(_one_of(group, str(difference)))[0] not in BAD

    return group._replace(excuse=find_contradiction(program, found, replies, sides, known))


def judge(group: Group) -> tuple[str, str]:
    """Letter and note of a group."""
    letter, note = _judge_by_rules(group)
    return (EXCUSED, group.excuse) if group.excuse and letter in BAD else (letter, note)


def _judge_by_rules(group: Group) -> tuple[str, str]:
    """Judge several differences one by one, if no rule covers them as a whole."""
    letter, note = _judge_whole(group)
    if letter not in BAD or len(group.differences) < 2 or not OF_VALUES.search(group.key):
        return letter, note
    letters = {}
    for difference in _without_consequences(group.differences):
        letter, note = _judge_whole(_one_of(group, difference))
        if letter in BAD:
            return _judge_whole(group)
        letters[letter] = note
    return min(letters.items())


def _without_consequences(differences: list[str]) -> list[str]:
    """Leave out values of another shape, names of another batch size, and keys of another class, at the same place."""
    causes = {"values": "shape", "names": "batch_size", "keys": "type"}
    places = {tuple(_KIND_AND_PLACE.match(difference).groups()) for difference in differences}
    out = []
    for difference in differences:
        kind, place = _KIND_AND_PLACE.match(difference).groups()
        if (causes.get(kind), place) not in places:
            out.append(difference)
    return out


def _one_of(group: Group, difference: str) -> Group:
    """A group with one of its differences only."""
    kind = re.match(r"(.*?) at \w", difference)[1]
    return group._replace(key=f"{group.key.rsplit(' | ', 1)[0]} | {kind}", differences=[difference])


def _judge_whole(group: Group) -> tuple[str, str]:
    text = str(group)
    beside_old = text
    for kind, old in OLD_KINDS.items():
        beside_old = beside_old.replace(f" | {kind} |", f" | {old} |", 1)
    if len(group.differences) == 1 or not OF_VALUES.search(group.key):
        letter, note = _judge_by(JUDGED_PROPERTIES, beside_old)
        if letter != UNKNOWN:
            return letter, note
    if f" | {NEWEST}" in group.key:
        letter, note = _judge_by(JUDGED_NEWEST, text)
        if letter != AS_BESIDE_OLD:
            return letter, note
    letter, note = _judge_by(JUDGED, beside_old)
    return ("d", "looked at") if letter == UNKNOWN and digest(group.key) in seen() else (letter, note)


def _judge_by(path: pathlib.Path, text: str) -> tuple[str, str]:
    for letter, pattern, note in rules(path):
        if pattern.search(text):
            return letter, note
    return UNKNOWN, ""


def accept(groups: Iterable[Group]) -> None:
    """Append the groups without a judgement to the seen ones."""
    new = {digest(group.key) for group in groups if judge(group)[0] == UNKNOWN}
    SEEN.write_text("\n".join(sorted(seen() | new)) + "\n")


def report(groups: Iterable[Group], letters: str = "") -> tuple[str, collections.Counter[str]]:
    """The groups as text, of some letters or of all; and how many there are of each letter."""
    merged: dict[tuple[str, str], list[Group]] = {}
    notes = {}
    for group in groups:
        letter, notes[group.key] = judge(group)
        merged.setdefault((letter, group.key), []).append(group)
    lines = []
    for (letter, key), examples in sorted(merged.items()):
        if letters and letter not in letters:
            continue
        note = f"   -- {notes[key]}" if notes[key] else ""
        lines.append(f"[{letter}] x{sum(group.count for group in examples)} :: {key}{note}")
        lines += [group.printed() for group in sorted(examples, key=lambda group: len(group.program))[:3]]
    counts = collections.Counter(letter for letter, _ in merged)
    lines.append(f"groups: {dict(sorted(counts.items()))}")
    return "\n".join(lines), counts


def save(groups: Iterable[Group], path: pathlib.Path) -> None:
    path.write_text("".join(json.dumps(group._asdict()) + "\n" for group in groups))


def load(folder: pathlib.Path) -> list[Group]:
    """The groups that earlier runs have left."""
    lines = [line for path in sorted(folder.glob("groups-*.jsonl")) for line in path.read_text().splitlines()]
    return [Group(**json.loads(line)) for line in lines]
