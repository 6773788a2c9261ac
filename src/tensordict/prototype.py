"""The public place of the tensorclass decorator for programs that know it under this name."""

from tensordict.convert.dataclasses import from_dataclass
from tensordict.tensorclass import TensorClass, tensorclass

__all__ = ["TensorClass", "from_dataclass", "tensorclass"]
