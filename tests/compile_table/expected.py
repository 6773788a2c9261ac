"""Reads and writes `expected.toml`: the rows that torch refuses, and the rows that need more than two graphs."""

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
# sizes. `python tests/compile_table --write` writes this file.
"""


@dataclass(frozen=True)
class Expected:
    """What is to come of each row.

    refused: torch's words by the name of the row.
    graphs: how often torch compiles a row, where that is more than twice.
    """

    refused: Mapping[str, str]
    graphs: Mapping[str, int]

    def find_fault(self, name: str, outcome: Outcome) -> str | None:
        """What is wrong with the outcome of a row, in words."""
        words, graphs = self.refused.get(name), self.graphs.get(name, GRAPHS)
        if outcome.wrong:
            return outcome.wrong
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
    return Expected(refused, content["graphs"])


def write_expected(outcomes: Mapping[str, Outcome]) -> None:
    by_words: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if outcome.refused:
            by_words.setdefault(outcome.refused, []).append(name)
    lines = [HEAD, "[refused]"]
    for words in sorted(by_words):
        lines += [f"{json.dumps(words)} = [", *(f"    {json.dumps(name)}," for name in by_words[words]), "]"]
    lines += ["", "[graphs]"]
    lines += [f"{json.dumps(name)} = {outcome.graphs}" for name, outcome in outcomes.items() if outcome.graphs > GRAPHS]
    PATH.write_text("\n".join(lines) + "\n")
