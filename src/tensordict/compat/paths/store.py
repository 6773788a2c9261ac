"""The public path of containers on servers (Redis and its relatives)."""

from typing import Literal

from tensordict.containers.served import TensorDictStore
from tensordict.containers.served_stacks import LazyStackedTensorDictStore

STORE_BACKENDS = Literal["redis", "dragonfly", "keydb"]

__all__ = ["STORE_BACKENDS", "LazyStackedTensorDictStore", "TensorDictStore"]
