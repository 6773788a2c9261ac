"""`tensordict verify`: check whether a save is complete."""

from __future__ import annotations

import argparse
import json

from tensordict.core.exceptions import SaveError
from tensordict.io.saving.verification import Report, verify
from tensordict_cli.runners.terminal import BAD, GOOD, NAME, count_text, show, size_text
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 when the save is sound, else 1.

    Raises:
        SaveError: the save has no known format.
    """
    report = verify(args.path, raises=False, num_threads=args.num_threads)
    if not report.format:
        raise SaveError("; ".join(report.problems))
    if args.json:
        print(json.dumps(_as_json(report)))
    elif report.ok:
        what = f"{count_text(report.leaves, 'tensor')}, {size_text(report.nbytes)}"
        summed = f", {report.checksummed:,} with checksums" if report.checksummed else ""
        # Without checksums, only the structure and the lengths of the files were checked.
        sound = "sound" if report.checksummed or not report.leaves else "sound, no checksums recorded"
        show([[(printable(report.path), NAME), (f": {report.format}, {what}{summed}: ", ""), (sound, GOOD)]])
    else:
        problems = count_text(len(report.problems), "problem")
        show([[(printable(report.path), NAME), (f": {report.format}: ", ""), (problems, BAD)]])
        show([[("  " + printable(problem), "")] for problem in report.problems])
    return 0 if report.ok else 1


def _as_json(report: Report) -> dict[str, object]:
    return {
        "path": report.path,
        "format": report.format,
        "ok": report.ok,
        "tensors": report.leaves,
        "nbytes": report.nbytes,
        "checksummed": report.checksummed,
        "problems": report.problems,
    }
