"""The public place of `TensorClass`, and of values that are no tensors."""

from tensordict.containers.api import from_dataclass
from tensordict.containers.nontensor import MetaData, NonTensorData, NonTensorDataBase, NonTensorStack
from tensordict.containers.tensor_class import TensorAttrs, TensorClass, is_tensorclass, tensorclass
from tensordict.core.key_views import is_non_tensor

__all__ = [
    "MetaData",
    "NonTensorData",
    "NonTensorDataBase",
    "NonTensorStack",
    "TensorAttrs",
    "TensorClass",
    "from_dataclass",
    "is_non_tensor",
    "is_tensorclass",
    "tensorclass",
]
