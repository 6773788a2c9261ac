"""The public path of containers on servers (Redis and its relatives)."""

from typing import Literal

from tensordict.containers.stacked_store import LazyStackedTensorDictStore
from tensordict.containers.tensordict_store import TensorDictStore

STORE_BACKENDS = Literal["redis", "dragonfly", "keydb"]

__all__ = ["STORE_BACKENDS", "LazyStackedTensorDictStore", "TensorDictStore"]
