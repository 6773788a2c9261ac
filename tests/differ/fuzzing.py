"""Running programs, and gathering the groups of differences that they show."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from differ.comparing import AS_NEWEST, NEWEST, Found, first_difference
from differ.judging import BAD, Group, describe, excuse, judge
from differ.programs import Construction, Line, Program, lines_of, make_program
from differ.shrinking import Shrinking
from differ.sides import Replies, Reply, Sides

# Differences that one program may show: after each, the program goes on without that line.
MOST = 8
# Two examples are enough where the reference raises.
WEAK = {"reference raises", "exception class", "reference changed something when both raise", f"{NEWEST} raises"}
# One program in so many is drawn on the newest level: its lines use results that only this level can make.
DRAWN_ON_NEWEST = 4


class Fuzzing:
    """Runs programs by their seeds. `groups` has what was found, `counts` how much."""

    def __init__(self, sides: Sides, only: str = "") -> None:
        self.sides, self.only = sides, only
        self.counts: collections.Counter[str] = collections.Counter()
        self.groups: list[Group] = []
        # By rough and by wide key: how many groups there are, and the number of the first.
        self._found: dict[str, list[int]] = collections.defaultdict(list)

    def run(self, seed: int) -> None:
        """Draw the program of a seed, run it on all sides, and note where they differ."""
        program, replies = self._draw(seed)
        self.counts["programs"] += 1
        for _ in range(MOST):
            found = first_difference(program, replies)
            if found is None:
                return
            if found.kind == AS_NEWEST:
                self.counts["lines as on the newest level, which go no further"] += 1
            else:
                self.counts["differences"] += 1
                self._note(seed, program, found, replies)
            if found.is_crash() or isinstance(program[found.line], Construction):
                return
            program, replies = self._without(program, found.line, replies)
            if not any(isinstance(step, Line) for step in program):
                return

    def _draw(self, seed: int) -> tuple[Program, Replies]:
        """The program of a seed, and the replies to it."""
        on_newest = seed % DRAWN_ON_NEWEST == 0
        drawn = self.sides.newest if on_newest else self.sides.reference
        program, replies = make_program(seed, drawn, self.only)
        if replies and "dead" in replies[-1]:
            self.counts["reference died"] += 1
            program = program[:-1]
            replies = drawn.run(lines_of(program))
        lines = [reply["exc"] is None for step, reply in zip(program, replies) if isinstance(step, Line)]
        self.counts["lines"] += len(lines)
        self.counts["lines that run on the reference"] += sum(lines)
        known = {"newest": replies} if on_newest else {"reference": replies}
        return program, self.sides.run(lines_of(program), **known)

    def _without(self, program: Program, number: int, replies: Replies) -> tuple[Program, Replies]:
        """A program without a line and without all that uses its result, and the replies to it."""
        kept, gone = kept_without(program, number)
        rest = [program[i] for i in kept]
        sides = [replies_without(side, kept, gone) for side in replies]
        if None in sides:
            return rest, self.sides.run(lines_of(rest))
        self.counts["differences that leave no traces"] += 1
        return rest, Replies(*sides)

    def _note(self, seed: int, program: Program, found: Found, replies: Replies) -> None:
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
            smallest = Shrinking(program, found, self.sides, 110 if serious else 40).shrink()
            group = excuse(describe(*smallest, seed), *smallest, self.sides)
        self.groups.append(group)


def kept_without(program: Program, number: int) -> tuple[list[int], set[str]]:
    """The lines that stay without a line and without all that uses its result; and the variables that go."""
    gone = {name for name in (program[number].result,) if name}
    kept = list(range(number))
    for i, step in enumerate(program[number + 1 :], number + 1):
        if not any(step.uses(name) for name in gone):
            kept.append(i)
        elif step.result:
            gone.add(step.result)
    return kept, gone


def replies_without(replies: Sequence[Reply], kept: list[int], gone: set[str]) -> list[Reply] | None:
    """The replies to the lines that stay; None where one of the others has changed a variable that stays."""
    out = []
    before: dict[str, Any] = {}
    for i, reply in enumerate(replies):
        state = {name: summary for name, summary in reply["state"].items() if name not in gone}
        if i in kept:
            out.append({**reply, "state": state})
        elif state != before:
            return None
        before = state
    return out
