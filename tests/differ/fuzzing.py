"""Running programs, and gathering the groups of differences that they show."""

from __future__ import annotations

import collections
from typing import Any

from differ.comparing import Found, first_difference
from differ.judging import BAD, Group, describe, judge
from differ.programs import Construction, Line, Program, lines_of, make_program
from differ.shrinking import Shrinking
from differ.sides import Sides

# Differences that one program may show: after each, the program goes on without that line.
MOST = 8
# Two examples are enough where the reference raises.
WEAK = {"reference raises", "exception class", "reference changed something when both raise"}


class Fuzzing:
    """Runs programs by their seeds. `groups` has what was found, `counts` how much."""

    def __init__(self, sides: Sides, only: str = "") -> None:
        self.sides, self.only = sides, only
        self.counts: collections.Counter[str] = collections.Counter()
        self.groups: list[Group] = []
        # By rough and by wide key: how many groups there are, and the number of the first.
        self._found: dict[str, list[int]] = collections.defaultdict(list)

    def run(self, seed: int) -> None:
        """Draw the program of a seed, run it on both sides, and note where they differ."""
        program, theirs = make_program(seed, self.sides.reference, self.only)
        self.counts["programs"] += 1
        if theirs and "dead" in theirs[-1]:
            self.counts["reference died"] += 1
            program = program[:-1]
            theirs = self.sides.reference.run(lines_of(program))
        if not isinstance(theirs, list):
            return
        lines = [reply["exc"] is None for step, reply in zip(program, theirs) if isinstance(step, Line)]
        self.counts["lines"] += len(lines)
        self.counts["lines that run on the reference"] += sum(lines)
        ours = self.sides.ours.run(lines_of(program))
        for _ in range(MOST):
            found = first_difference(program, theirs, ours)
            if found is None:
                return
            self.counts["differences"] += 1
            self._note(seed, program, found, (theirs, ours))
            if found.is_crash() or isinstance(program[found.line], Construction):
                return
            program = without(program, found.line)
            if not any(isinstance(step, Line) for step in program):
                return
            theirs, ours = self.sides.run(lines_of(program))
            if isinstance(theirs, dict):
                return

    def _note(self, seed: int, program: Program, found: Found, replies: tuple[Any, Any]) -> None:
        """Count a difference; shrink it if it is new, and bad or unknown."""
        group = describe(program, found, replies, seed)
        letter, _ = judge(group)
        self.counts[f"judged {letter}"] += 1
        bad, serious = letter in BAD, found.kind not in WEAK
        rough = self._found[f"{group.key}|{letter}"]
        wide = self._found[f"{found.operation}|{found.kind}|{found.detail}|{letter}"]
        most_rough, most_wide = (1, 1) if not bad else (2, 8) if serious else (1, 2)
        if len(rough) >= most_rough or len(wide) >= most_wide:
            first = (rough or wide)[0]
            self.groups[first] = self.groups[first]._replace(count=self.groups[first].count + 1)
            return
        rough.append(len(self.groups))
        wide.append(len(self.groups))
        if bad and not found.kind.startswith(("crash", "hang")):
            group = describe(*Shrinking(program, found, self.sides, 110 if serious else 40).shrink(), seed)
        self.groups.append(group)


def without(program: Program, number: int) -> Program:
    """A program without a line and without all that uses its result."""
    gone = {program[number].result} - {None}
    rest = program[:number]
    for step in program[number + 1 :]:
        if not any(step.uses(name) for name in gone if name):
            rest.append(step)
        elif step.result:
            gone.add(step.result)
    return rest
