"""`tensordict ifeval`: score how well the responses in a file follow the instructions of their prompts."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from tensordict.llm.checkers import missing_data
from tensordict.llm.responses import read_responses
from tensordict.llm.score_summary import IFEvalSummary, ifeval_summary
from tensordict.llm.scorer import IFEvalScorer
from tensordict.llm.scores import FIELDS
from tensordict.ops.collection import TensorCollection
from tensordict_cli.runners.terminal import BAD, GOOD, NAME, QUIET, Line, align, count_text, show
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 when all responses were scored, else 1."""
    data, places = read_responses(args.responses, args.prompts)
    _warn_of_missing_data(data)
    data = IFEvalScorer(errors="collect", num_workers=args.num_workers)(data)
    problems = [f"{place}: {text}" for place, row in zip(places, data.unbind(0)) for text in row["ifeval_errors"]]
    summary = ifeval_summary(data)
    responses = (
        [_describe_response(place, row) for place, row in zip(places, data.unbind(0))] if args.per_prompt else []
    )
    if args.json:
        each = {"responses": responses} if args.per_prompt else {}
        print(json.dumps({**_as_json(summary), **each, "errors": problems}))
    else:
        show(align([_format_response(response) for response in responses]))
        show(_format_summary(summary))
        for problem in problems:
            print(printable(problem), file=sys.stderr)
    return 1 if problems else 0


def _warn_of_missing_data(data: TensorCollection) -> None:
    """Warn before scoring about instructions that lack data of NLTK, with the command that installs the data."""
    ids = [name for row in data.unbind(0) for name in _read_ids(row)]
    for resource, count in missing_data(ids).items():
        print(
            f"tensordict: {count_text(count, 'instruction')} of {len(ids)} cannot be scored without NLTK's "
            f"{resource!r}, which is not installed here: python -m nltk.downloader {resource}",
            file=sys.stderr,
        )


def _read_ids(row: TensorCollection) -> list[str]:
    """Return the instruction ids of a response; skip items that are not text."""
    ids = row.get("instruction_id_list", None)
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return [name for name in ids if isinstance(name, str)] if isinstance(ids, (list, tuple)) else []


def _describe_response(place: str, row: TensorCollection) -> dict[str, Any]:
    """Return the scores of one response as true, false, or `None` for instructions that could not be scored."""
    scores = row["ifeval_score"]
    followed = {
        name: [None if math.isnan(score) else bool(score) for score in scores.get(name).flatten().tolist()]
        for name in FIELDS
    }
    strict, inst_strict, loose, inst_loose = (followed[name] for name in FIELDS)
    each = zip(_read_ids(row), inst_strict, inst_loose)
    return {
        "place": place,
        "strict": strict[0],
        "loose": loose[0],
        "instructions": [{"id": name, "strict": one, "loose": other} for name, one, other in each],
    }


# --- for people -------------------------------------------------------------------------------------------------------


def _format_summary(summary: IFEvalSummary) -> list[Line]:
    counts = [count_text(int(summary.prompts), "prompt"), count_text(int(summary.instructions), "instruction")]
    lines: list[Line] = [[(", ".join(counts), NAME)]]
    if failed := int(summary.prompt_errors):
        what = f"{count_text(failed, 'prompt')} and {count_text(int(summary.inst_errors), 'instruction')}"
        lines.append([(f"{what} could not be scored and are in no accuracy", BAD)])
    rows = [_format_row("", "strict", "loose", "number", QUIET)]
    # The two rows over everything come before the rows of the single types.
    rows += [_format_row(*cells, NAME if position < 2 else QUIET) for position, cells in enumerate(summary.table())]
    return [*lines, *align(rows)]


def _format_response(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the cells for one response: its place, its verdict, and the instructions that it does not follow."""
    words = {True: ("followed", GOOD), False: ("not followed", BAD), None: ("not scored", QUIET)}
    text, style = words[response["strict"]]
    if response["strict"] is False and response["loose"]:
        text = "followed loosely"
    failed = [item["id"] for item in response["instructions"] if not item["strict"]]
    return [(printable(response["place"]), NAME), (text, style), (printable(", ".join(failed)), "")]


def _format_row(name: str, strict: str, loose: str, number: str, style: str) -> list[tuple[str, str]]:
    return [(printable(name), style), (strict.rjust(6), ""), (loose.rjust(6), ""), (number.rjust(6), QUIET)]


# --- for programs -----------------------------------------------------------------------------------------------------


def _as_json(node: Any) -> Any:
    """Convert a nested container to a dict of numbers. NaN becomes null, because JSON has no NaN."""
    if hasattr(node, "items"):
        return {name: _as_json(value) for name, value in node.items()}
    number = node.item()
    return None if number != number else number
