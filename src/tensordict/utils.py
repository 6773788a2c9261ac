"""Public helpers that clients import from `tensordict.utils`."""

from __future__ import annotations

import logging

from torch.nn import Buffer

from tensordict.io.tree import print_directory_tree
from tensordict.keys import NestedKey, unravel_key, unravel_key_list
from tensordict.testing import assert_allclose_td, assert_close

logger = logging.getLogger("tensordict")

__all__ = [
    "Buffer",
    "NestedKey",
    "assert_allclose_td",
    "assert_close",
    "logger",
    "print_directory_tree",
    "unravel_key",
    "unravel_key_list",
]
