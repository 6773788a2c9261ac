"""The public place of `PersistentTensorDict`."""

from tensordict.containers.persistent import PersistentTensorDict
from tensordict.containers.persistent import _H5Backend as _H5Backend
from tensordict.containers.served import TensorDictStore as TensorDictStore  # known by its name then

__all__ = ["PersistentTensorDict"]
