"""`tensordict verify`: whether a save is whole."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tensordict.cli.terminal import BAD, GOOD, NAME, count_text, has_tqdm, printable, show, size_text
from tensordict.errors import SaveError
from tensordict.io.verify import Report, verify

DESCRIPTION = """\
Check a save without loading it: its structure, the lengths of its files, and checksums where they were recorded (see
convert --checksum; archives always have them). Nothing is unpickled, and the tensorclasses need not be known. Exits
with 0 when it is sound, 1 when there are problems, 2 when it is missing or of no format that is known.

With --json, one object: "path", "format", "ok", "tensors" and "nbytes" (of all tensors), "checksummed" (how many of
them were compared with a checksum) and "problems", a list of lines.
"""

EXAMPLES = """\
examples:
  tensordict verify runs/1
  tensordict verify --num-threads 4 data.tdz || echo broken
  tensordict verify --json data.h5 | jq -r '.problems[]'
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="check whether a save is whole",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="the save: a folder or a file")
    parser.add_argument("--num-threads", type=int, default=0, metavar="N", help="the number of threads that read")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 when the save is sound, else 1.

    Raises:
        SaveError: it is of no format that is known.
    """
    watched = sys.stderr.isatty() and has_tqdm()
    report = verify(args.path, raises=False, num_threads=args.num_threads, progress=watched)
    if not report.format:
        raise SaveError("; ".join(report.problems))
    if args.json:
        print(json.dumps(_as_json(report)))
    elif report.ok:
        what = f"{count_text(report.leaves, 'tensor')}, {size_text(report.nbytes)}"
        summed = f", {report.checksummed:,} with checksums" if report.checksummed else ""
        show([[(printable(report.path), NAME), (f": {report.format}, {what}{summed}: ", ""), ("sound", GOOD)]])
    else:
        problems = count_text(len(report.problems), "problem")
        show([[(printable(report.path), NAME), (f": {report.format}: ", ""), (problems, BAD)]])
        show([[("  " + printable(problem), "")] for problem in report.problems])
    return 0 if report.ok else 1


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "path": report.path,
        "format": report.format,
        "ok": report.ok,
        "tensors": report.leaves,
        "nbytes": report.nbytes,
        "checksummed": report.checksummed,
        "problems": report.problems,
    }
