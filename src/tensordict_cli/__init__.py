"""The command `tensordict`: its argument parser, which needs no torch. `tensordict_cli.runners` runs the commands."""

from tensordict_cli.main import main

__all__ = ["main"]
