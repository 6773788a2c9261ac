"""`tensordict tidy`: remove the leftovers of killed writers from a data set."""

from __future__ import annotations

import argparse
import sys

from tensordict.datasets import tidy
from tensordict_cli.runners.terminal import show
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command and return 0."""
    sweep = tidy(args.path, older_than=args.older_than, shards=args.remove)
    show([[(printable(path), "")] for path in sweep.removed])
    for path, reason in sweep.left.items():
        print(f"left: {printable(path)}: {printable(reason)}", file=sys.stderr)
    return 0
