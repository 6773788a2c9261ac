"""Implement the commands of `tensordict`: inspect, check, convert and compare saves of every format.

The package `tensordict_cli` parses their arguments, and does so without torch.
"""

from tensordict_cli import main

__all__ = ["main"]
