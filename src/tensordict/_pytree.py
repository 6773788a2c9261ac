"""The public place of `pytree.py` for programs that know it under this name."""

from tensordict.pytree import Context, flatten_container, register, unflatten_container

__all__ = ["Context", "flatten_container", "register", "unflatten_container"]
