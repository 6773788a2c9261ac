"""The one logger of the package, `tensordict`; docs/guides/logging.md lists what is logged."""

from __future__ import annotations

import logging

logger = logging.getLogger("tensordict")
# Without this, Python would print warnings and errors of programs that have set up no logging.
logger.addHandler(logging.NullHandler())
