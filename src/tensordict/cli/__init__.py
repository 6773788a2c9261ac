"""The command `tensordict`, which looks into saves of every format, checks, converts and compares them."""

from tensordict.cli.main import main

__all__ = ["main"]
