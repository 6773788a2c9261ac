"""`tensordict diff`: print the differences between two saves."""

from __future__ import annotations

import argparse
import json
import math

from tensordict.io.formats.opening import describe_save
from tensordict.io.saving.comparing import Difference
from tensordict.io.saving.save_diff import diff
from tensordict.io.specification import LeafSpec, walk
from tensordict_cli.runners.terminal import (
    BAD,
    GOOD,
    NAME,
    QUIET,
    align,
    count_text,
    json_value,
    key_text,
    shorten,
    show,
)
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 when the saves are the same, else 1."""
    found = diff(args.a, args.b, rtol=args.rtol, atol=args.atol, equal_nan=args.equal_nan)
    if args.json:
        print(json.dumps({"same": not found, "differences": [_as_json(difference) for difference in found]}))
    elif found:
        show(align([_format_row(difference) for difference in found]))
        show([[(count_text(len(found), "difference"), QUIET)]])
    else:
        leaves = sum(isinstance(node, LeafSpec) for _, node in walk(describe_save(args.a)[1]))
        show([[(f"the same: {count_text(leaves, 'tensor')}", GOOD)]])
    return 1 if found else 0


def _format_row(difference: Difference) -> list[tuple[str, str]]:
    return [(key_text(difference.key), NAME), (difference.what, BAD), (_format_difference(difference), "")]


def _format_difference(difference: Difference) -> str:
    if difference.what == "elements":
        by = "" if math.isnan(difference.max_abs) else f", by at most {difference.max_abs:.6g}"
        return f"{difference.differing:,} of {difference.count:,} differ{by}"
    if difference.what in ("missing", "additional"):
        return printable(difference.one or difference.other)
    return f"{_format_value(difference.one, difference.what)} and {_format_value(difference.other, difference.what)}"


def _format_value(value: object, what: str) -> str:
    return printable(value) if isinstance(value, str) and what != "value" else shorten(value)


def _as_json(difference: Difference) -> dict[str, object]:
    form: dict[str, object] = {"key": list(difference.key), "what": difference.what}
    if difference.what == "elements":
        max_abs = difference.max_abs if math.isfinite(difference.max_abs) else None
        return {**form, "differing": difference.differing, "of": difference.count, "max_abs": max_abs}
    return {**form, "a": json_value(difference.one), "b": json_value(difference.other)}
