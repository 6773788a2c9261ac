"""The public place of `pytree.py` for programs that know it under this name."""

from tensordict.lazy import LazyStackedTensorDict
from tensordict.persistent import PersistentTensorDict
from tensordict.pytree import Context, flatten_container, register, unflatten_container
from tensordict.tensordict import TensorDict

# The classes that torch takes apart. TorchRL's storages, with versions of torch before 2.4.
PYTREE_REGISTERED_TDS = (TensorDict, PersistentTensorDict)
PYTREE_REGISTERED_LAZY_TDS = (LazyStackedTensorDict,)

__all__ = [
    "PYTREE_REGISTERED_LAZY_TDS",
    "PYTREE_REGISTERED_TDS",
    "Context",
    "flatten_container",
    "register",
    "unflatten_container",
]
