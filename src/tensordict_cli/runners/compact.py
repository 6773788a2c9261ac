"""`tensordict compact`: merge the small shards of a data set into larger ones."""

from __future__ import annotations

import argparse

from tensordict.datasets import compact
from tensordict_cli.runners.terminal import NAME, count_text, show
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command and return 0."""
    before, after = compact(
        args.path, rows_per_shard=args.rows, format=args.format, durable=args.durable, keep=args.keep
    )
    show([[(printable(args.path), NAME), (f": {count_text(before, 'shard')}, now {after:,}", "")]])
    return 0
