"""`tensordict ifeval`: how well the responses in a file follow the instructions of their prompts."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from tensordict.llm.checkers import missing_data
from tensordict.llm.responses import read_responses
from tensordict.llm.scorer import IFEvalScorer
from tensordict.llm.scores import FIELDS
from tensordict.llm.summary import IFEvalSummary, ifeval_summary
from tensordict.ops.collection import TensorCollection
from tensordict_cli.runners.terminal import BAD, GOOD, NAME, QUIET, Line, aligned, count_text, show
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 when all responses were scored, else 1."""
    data, places = read_responses(args.responses, args.prompts)
    _say_what_is_missing(data)
    data = IFEvalScorer(errors="collect", num_workers=args.num_workers)(data)
    problems = [f"{place}: {text}" for place, row in zip(places, data.unbind(0)) for text in row["ifeval_errors"]]
    summary = ifeval_summary(data)
    responses = [_response(place, row) for place, row in zip(places, data.unbind(0))] if args.per_prompt else []
    if args.json:
        each = {"responses": responses} if args.per_prompt else {}
        print(json.dumps({**_as_json(summary), **each, "errors": problems}))
    else:
        show(aligned([_line(response) for response in responses]))
        show(_report(summary))
        for problem in problems:
            print(printable(problem), file=sys.stderr)
    return 1 if problems else 0


def _say_what_is_missing(data: TensorCollection) -> None:
    """Say beforehand what instructions cannot be checked, and what to do."""
    ids = [name for row in data.unbind(0) for name in _ids(row)]
    for resource, count in missing_data(ids).items():
        print(
            f"tensordict: {count_text(count, 'instruction')} of {len(ids)} cannot be scored without NLTK's "
            f"{resource!r}, which is not installed here: python -m nltk.downloader {resource}",
            file=sys.stderr,
        )


def _ids(row: TensorCollection) -> list[str]:
    """The ids of the instructions of a response, as far as they are any."""
    ids = row.get("instruction_id_list", None)
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return [name for name in ids if isinstance(name, str)] if isinstance(ids, (list, tuple)) else []


def _response(place: str, row: TensorCollection) -> dict[str, Any]:
    """How one response did: a fact is true, false, or `None` where it could not be scored."""
    scores = row["ifeval_score"]
    followed = {name: [_fact(value) for value in scores.get(name).flatten().tolist()] for name in FIELDS}
    strict, inst_strict, loose, inst_loose = (followed[name] for name in FIELDS)
    each = zip(_ids(row), inst_strict, inst_loose)
    return {
        "place": place,
        "strict": strict[0],
        "loose": loose[0],
        "instructions": [{"id": name, "strict": one, "loose": other} for name, one, other in each],
    }


def _fact(score: float) -> bool | None:
    return None if math.isnan(score) else bool(score)


# --- for people -------------------------------------------------------------------------------------------------------


def _report(summary: IFEvalSummary) -> list[Line]:
    counts = [count_text(int(summary.prompts), "prompt"), count_text(int(summary.instructions), "instruction")]
    lines: list[Line] = [[(", ".join(counts), NAME)]]
    if failed := int(summary.prompt_errors):
        what = f"{count_text(failed, 'prompt')} and {count_text(int(summary.inst_errors), 'instruction')}"
        lines.append([(f"{what} could not be scored and are in no accuracy", BAD)])
    rows = [_row("", "strict", "loose", "number", QUIET)]
    # Those over all come before those of the types.
    rows += [_row(*cells, NAME if position < 2 else QUIET) for position, cells in enumerate(summary.table())]
    return [*lines, *aligned(rows)]


def _line(response: dict[str, Any]) -> list[tuple[str, str]]:
    """What one response did: where it stands, whether it follows all, and the instructions that it does not follow."""
    words = {True: ("followed", GOOD), False: ("not followed", BAD), None: ("not scored", QUIET)}
    text, style = words[response["strict"]]
    if response["strict"] is False and response["loose"]:
        text = "followed loosely"
    failed = [item["id"] for item in response["instructions"] if not item["strict"]]
    return [(printable(response["place"]), NAME), (text, style), (printable(", ".join(failed)), "")]


def _row(name: str, strict: str, loose: str, number: str, style: str) -> list[tuple[str, str]]:
    return [(printable(name), style), (strict.rjust(6), ""), (loose.rjust(6), ""), (number.rjust(6), QUIET)]


# --- for programs -----------------------------------------------------------------------------------------------------


def _as_json(node: Any) -> Any:
    """A nested dict of numbers; NaN, which JSON lacks, becomes null."""
    if hasattr(node, "items"):
        return {name: _as_json(value) for name, value in node.items()}
    number = node.item()
    return None if number != number else number
