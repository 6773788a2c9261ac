"""`tensordict tidy`: no leftovers."""

from __future__ import annotations

import argparse

from tensordict.datasets import tidy
from tensordict_cli.runners.terminal import show
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 when it is done."""
    removed = tidy(args.path, older_than=args.older_than, complete=args.complete)
    show([[(printable(path), "")] for path in removed])
    return 0
