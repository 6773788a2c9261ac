"""Reads and writes `expected.toml`: the rows that torch refuses, that need more than two graphs, or that are wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compile_table.running import Outcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH = Path(__file__).with_name("expected.toml")
# Torch compiles for the first size, and once more for sizes that vary.
GRAPHS = 2
# The torch whose words stand in the file.
TORCH = "2.13"
HEAD = """\
# What torch makes of the rows of the table; a row that is absent here compiles as one graph, at most two times for all
# sizes, and gives what eager code gives. `python tests/compile_table --write` writes this file.
"""


@dataclass(frozen=True)
class Expected:
    """The outcome that each row should have.

    refused: torch's words by the name of the row.
    graphs: how often torch compiles a row, where that is more than twice.
    wrong: how compiled and eager code differ, where that is known and not mended.
    """

    refused: Mapping[str, str]
    graphs: Mapping[str, int]
    wrong: Mapping[str, str]

    def describe_row(self, name: str) -> Outcome:
        return Outcome(self.refused.get(name), self.graphs.get(name, 1), self.wrong.get(name))

    def find_fault(self, name: str, outcome: Outcome) -> str | None:
        """Say in words how the outcome of a row differs from the expected one."""
        words, graphs = self.refused.get(name), self.graphs.get(name, GRAPHS)
        if outcome.wrong != self.wrong.get(name):
            return outcome.wrong or f"compiled and eager code agree: remove the row from [wrong] in {PATH.name}"
        if outcome.refused != words:
            if words is None:
                return f"torch refuses the row: {outcome.refused}"
            if outcome.refused is None:
                return f"the row compiles: remove it from {PATH.name}, where torch refuses it with {words!r}"
            return f"torch refuses the row with {outcome.refused!r} in place of {words!r}"
        if outcome.graphs > graphs or (name in self.graphs and outcome.graphs != graphs):
            return f"torch compiles the row {outcome.graphs} times in place of {graphs}"
        return None


def read_expected() -> Expected:
    content = tomllib.loads(PATH.read_text())
    refused = {name: words for words, names in content["refused"].items() for name in names}
    return Expected(refused, content["graphs"], content["wrong"])


def write_expected(outcomes: Mapping[str, Outcome]) -> None:
    """Write what came of all rows; a row that is wrong stays so only if the file says that already."""
    wrong = read_expected().wrong
    by_words: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if outcome.refused:
            by_words.setdefault(outcome.refused, []).append(name)
    lines = [HEAD, "[refused]"]
    for words in sorted(by_words):
        lines += [f"{json.dumps(words)} = [", *(f"    {json.dumps(name)}," for name in by_words[words]), "]"]
    lines += ["", "[graphs]"]
    lines += [f"{json.dumps(name)} = {outcome.graphs}" for name, outcome in outcomes.items() if outcome.graphs > GRAPHS]
    lines += ["", "[wrong]"]
    lines += [f"{json.dumps(name)} = {json.dumps(text)}" for name, text in wrong.items() if outcomes[name].wrong]
    PATH.write_text("\n".join(lines) + "\n")
