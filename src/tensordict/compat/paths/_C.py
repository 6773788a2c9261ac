"""The key functions that the reference implements in C++, for programs that import them from here."""

from tensordict.compat.nested_keys import _unravel_key_to_tuple, unravel_keys
from tensordict.core.keys import unravel_key, unravel_key_list

__all__ = ["_unravel_key_to_tuple", "unravel_key", "unravel_key_list", "unravel_keys"]
