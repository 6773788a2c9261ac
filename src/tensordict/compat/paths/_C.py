"""The place where programs look for what the reference has compiled: the functions that take keys apart."""

from tensordict.compat.keys import _unravel_key_to_tuple, unravel_keys
from tensordict.core.keys import unravel_key, unravel_key_list

__all__ = ["_unravel_key_to_tuple", "unravel_key", "unravel_key_list", "unravel_keys"]
