"""Containers as modules."""

from tensordict.nn.params import TensorDictParams

__all__ = ["TensorDictParams"]
