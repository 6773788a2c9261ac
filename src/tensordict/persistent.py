"""The public place of `PersistentTensorDict`."""

from tensordict.containers.persistent_tensordict import PersistentTensorDict
from tensordict.containers.persistent_tensordict import _H5Backend as _H5Backend
from tensordict.containers.tensordict_store import TensorDictStore as TensorDictStore  # known by its name then

__all__ = ["PersistentTensorDict"]
