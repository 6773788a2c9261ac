"""Containers from foreign structures, one file per kind."""

from tensordict.convert.mappings import from_dict, fromkeys, make_tensordict

__all__ = ["from_dict", "fromkeys", "make_tensordict"]
