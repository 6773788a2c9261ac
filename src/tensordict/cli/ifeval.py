"""`tensordict ifeval`: how well the responses in a file follow the instructions of their prompts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tensordict.cli.terminal import BAD, NAME, QUIET, Line, aligned, count_text, show
from tensordict.llm.responses import read_responses
from tensordict.llm.scorer import IFEvalScorer
from tensordict.llm.scores import FIELDS
from tensordict.llm.summary import IFEvalSummary, ifeval_summary
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 when all responses were scored, else 1."""
    data, places = read_responses(args.responses, args.prompts)
    data = IFEvalScorer(errors="collect", num_workers=args.num_workers)(data)
    problems = [f"{place}: {text}" for place, row in zip(places, data.unbind(0)) for text in row["ifeval_errors"]]
    summary = ifeval_summary(data)
    if args.json:
        print(json.dumps({**_as_json(summary), "errors": problems}))
    else:
        show(_report(summary))
        for problem in problems:
            print(printable(problem), file=sys.stderr)
    return 1 if problems else 0


# --- for people -------------------------------------------------------------------------------------------------------


def _report(summary: IFEvalSummary) -> list[Line]:
    counts = [count_text(int(summary.prompts), "prompt"), count_text(int(summary.instructions), "instruction")]
    lines: list[Line] = [[(", ".join(counts), NAME)]]
    if failed := int(summary.prompt_errors):
        what = f"{count_text(failed, 'prompt')} and {count_text(int(summary.inst_errors), 'instruction')}"
        lines.append([(f"{what} could not be scored and are in no accuracy", BAD)])
    strict, inst_strict, loose, inst_loose = (getattr(summary, name) for name in FIELDS)
    rows = [
        _row("", "strict", "loose", "number", QUIET),
        _row("prompts", _percent(strict), _percent(loose), str(int(summary.prompts))),
        _row("instructions", _percent(inst_strict), _percent(inst_loose), str(int(summary.instructions))),
    ]
    for name, of in summary.types.items():
        rows.append(
            _row(name, _percent(of["strict_acc"]), _percent(of["loose_acc"]), str(int(of["instructions"])), QUIET)
        )
    return [*lines, *aligned(rows)]


def _row(name: str, strict: str, loose: str, number: str, style: str = NAME) -> list[tuple[str, str]]:
    return [(printable(name), style), (strict.rjust(6), ""), (loose.rjust(6), ""), (number.rjust(6), QUIET)]


def _percent(fraction: Any) -> str:
    value = float(fraction)
    return "-" if value != value else f"{100 * value:.1f}%"


# --- for programs -----------------------------------------------------------------------------------------------------


def _as_json(node: Any) -> Any:
    """A nested dict of numbers; NaN, which JSON lacks, becomes null."""
    if hasattr(node, "items"):
        return {name: _as_json(value) for name, value in node.items()}
    number = node.item()
    return None if number != number else number
