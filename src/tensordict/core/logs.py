"""The logger `tensordict`, the only one of the package; docs/guides/logging.md lists its messages."""

from __future__ import annotations

import logging

logger = logging.getLogger("tensordict")
# Without this handler, Python would print warnings and errors in programs that have not configured logging.
logger.addHandler(logging.NullHandler())
