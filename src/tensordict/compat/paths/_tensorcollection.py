"""The place where TorchRL's trainers look for `TensorCollection`."""

from tensordict.ops.collection import TensorCollection

__all__ = ["TensorCollection"]
