"""The command `tensordict`: its parser, which needs no torch. What the commands do is in `tensordict_cli.runners`."""

from tensordict_cli.main import main

__all__ = ["main"]
