"""The path under which client programs import `core/pytree.py`."""

from tensordict.containers.dense import TensorDict
from tensordict.containers.lazy import LazyStackedTensorDict
from tensordict.containers.persistent_tensordict import PersistentTensorDict
from tensordict.core.pytree import Context, flatten_container, register, unflatten_container

# The classes registered with torch's pytree. TorchRL's storages read these names with torch before 2.4.
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
