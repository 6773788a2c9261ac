"""`python -m tensordict`: the same as the command `tensordict`."""

from __future__ import annotations

import sys

from tensordict_cli import main

if __name__ == "__main__":
    sys.exit(main())
