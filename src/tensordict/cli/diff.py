"""`tensordict diff`: where two saves differ."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from tensordict.cli.terminal import (
    BAD,
    GOOD,
    NAME,
    QUIET,
    aligned,
    count_text,
    json_value,
    key_text,
    printable,
    shortened,
    show,
)
from tensordict.io.comparing import Difference, Tolerance, differences
from tensordict.io.describe import LeafSpec, walk
from tensordict.io.formats import describe_save

DESCRIPTION = """\
Compare two saves, which may be of different formats: keys, kinds of containers, batch sizes, names of dims, dtypes,
shapes, values, and then the elements of the tensors, piece by piece. Exits with 0 when they are the same, 1 when they
differ, 2 when one cannot be read.

With --json, one object: "same" (true or false) and "differences", each with "key" (a list of names), "what"
("missing" in B, "additional" in B, "kind", "batch size", "names", "stack dim", "dtype", "shape", "value" or "elements")
and what it is in "a" and in "b". For "elements" there are "differing" (how many), "of" (how many there are) and
"max_abs" (the largest absolute difference, null when it is no finite number) in their place.
"""

EXAMPLES = """\
examples:
  tensordict diff runs/1 runs/2
  tensordict diff --rtol 1e-5 --equal-nan checkpoint.tdz checkpoint.h5
  tensordict diff --json a b > differences.json || echo they differ
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "diff",
        help="compare two saves",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="a save")
    parser.add_argument("b", metavar="B", help="another one, of any format")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance for elements (default 0)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance for elements (default 0)")
    parser.add_argument("--equal-nan", action="store_true", help="take NaN for equal to NaN")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 when the saves are the same, else 1."""
    one = describe_save(args.a)[1]
    other = describe_save(args.b)[1]
    found = list(differences(one, other, Tolerance(args.rtol, args.atol, args.equal_nan)))
    if args.json:
        print(json.dumps({"same": not found, "differences": [_as_json(difference) for difference in found]}))
    elif found:
        show(aligned([_row(difference) for difference in found]))
        show([[(count_text(len(found), "difference"), QUIET)]])
    else:
        leaves = sum(isinstance(node, LeafSpec) for _, node in walk(one))
        show([[(f"the same: {count_text(leaves, 'tensor')}", GOOD)]])
    return 1 if found else 0


def _row(difference: Difference) -> list[tuple[str, str]]:
    return [(key_text(difference.key), NAME), (difference.what, BAD), (_text(difference), "")]


def _text(difference: Difference) -> str:
    if difference.what == "elements":
        by = "" if math.isnan(difference.max_abs) else f", by at most {difference.max_abs:.6g}"
        return f"{difference.differing:,} of {difference.count:,} differ{by}"
    if difference.what in ("missing", "additional"):
        return printable(difference.one or difference.other)
    return f"{_shown(difference.one, difference.what)} and {_shown(difference.other, difference.what)}"


def _shown(value: Any, what: str) -> str:
    return printable(value) if isinstance(value, str) and what != "value" else shortened(value)


def _as_json(difference: Difference) -> dict[str, Any]:
    form: dict[str, Any] = {"key": list(difference.key), "what": difference.what}
    if difference.what == "elements":
        max_abs = difference.max_abs if math.isfinite(difference.max_abs) else None
        return {**form, "differing": difference.differing, "of": difference.count, "max_abs": max_abs}
    return {**form, "a": json_value(difference.one), "b": json_value(difference.other)}
