"""A program that shows a difference, made smaller while it shows the same."""

from __future__ import annotations

import re

from differ.comparing import Found, first_difference
from differ.programs import Program, Step, lines_of
from differ.sides import Replies, Sides


class Shrinking:
    """Tries at most `budget` smaller programs; `program`, `found` and `replies` are the best so far."""

    def __init__(self, program: Program, found: Found, sides: Sides, budget: int) -> None:
        self.program, self.found, self.sides = program[: found.line + 1], found, sides
        self.budget = budget
        self.replies: Replies | None = None

    def shrink(self) -> tuple[Program, Found, Replies]:
        """The smallest program found, how it differs, and the replies of the sides to it."""
        self._drop_steps()
        while self.budget > 0 and self._simplify():
            self._drop_steps()
        return self.program, self.found, self.replies or self._run(self.program)

    def _run(self, program: Program) -> Replies:
        return self.sides.run(lines_of(program), ask_newest=self.found.of_newest())

    def _attempt(self, program: Program) -> bool:
        """Take `program` if its last line shows the same difference."""
        self.budget -= 1
        replies = self._run(program)
        found = first_difference(program, replies)
        if found is None or not self.found.same_group(found) or found.line != len(program) - 1:
            return False
        self.program, self.found, self.replies = program, found, replies
        return True

    def _drop_steps(self) -> None:
        i = len(self.program) - 2
        while i >= 0 and self.budget > 0:
            step, rest = self.program[i], self.program[i + 1 :]
            if not any(_uses(other, step) for other in rest):
                self._attempt(self.program[:i] + rest)
            elif not _uses(self.program[-1], step):  # the steps in between that use it may go as well
                self._attempt(self.program[:i] + [other for other in rest if not _uses(other, step)])
            i = min(i, len(self.program) - 1) - 1

    def _simplify(self) -> bool:
        """Make one line simpler, the last ones first; whether one could be."""
        for i in range(len(self.program) - 1, -1, -1):
            step = self.program[i]
            defined = {other.result for other in self.program[:i]}
            for simple in step.simpler():
                if self.budget <= 0:
                    return False
                code = simple.code()
                if code == step.code() or not defined.issuperset(re.findall(r"\b[rx]\d\b", code)):
                    continue
                if self._attempt([*self.program[:i], simple, *self.program[i + 1 :]]):
                    return True
        return False


def _uses(step: Step, other: Step) -> bool:
    return other.result is not None and step.uses(other.result)
