"""TorchRL's trainers import `TensorCollection` from this module."""

from tensordict.ops.collection import TensorCollection

__all__ = ["TensorCollection"]
