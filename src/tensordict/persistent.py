"""The public place of `PersistentTensorDict`."""

from tensordict.containers.persistent import PersistentTensorDict
from tensordict.containers.persistent import _H5Backend as _H5Backend

__all__ = ["PersistentTensorDict"]
