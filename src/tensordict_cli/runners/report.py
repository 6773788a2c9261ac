"""`tensordict report`: write a page with pictures of the content of one save, or of the differences of two."""

from __future__ import annotations

import argparse
import os
import sys

from tensordict.core.exceptions import SaveError
from tensordict.looking.html_report import MARK, report
from tensordict.memory.files import write_file
from tensordict_cli.runners.terminal import GOOD, show, size_text
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 when everything could be read, else 1."""
    _refuse_other(args.output, args.force)
    page = report(args.path, args.other, limit=args.sample << 20)
    content = page.html.encode()
    write_file(args.output, content)
    show([[(f"{printable(args.output)}: {size_text(len(content))}", GOOD)]])
    for problem in page.problems:
        print(printable(" ".join(problem.split())), file=sys.stderr)
    return 1 if page.problems else 0


def _refuse_other(target: str, force: bool) -> None:
    """Refuse to replace a file that is not a report."""
    if os.path.isdir(target):
        raise SaveError(f"{target!r} is a folder: -o takes the name of the page")
    if force or not os.path.lexists(target):
        return
    with open(target, "rb") as file:
        if file.read(len(MARK)) != MARK.encode():
            raise SaveError(f"{target!r} exists already and is not a report; use --force to replace it")
