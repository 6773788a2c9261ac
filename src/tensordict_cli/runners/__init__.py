"""What the commands of `tensordict` do: they look into saves of every format, check, convert and compare them.

Their arguments are in the package `tensordict_cli`, which needs no torch.
"""

from tensordict_cli import main

__all__ = ["main"]
