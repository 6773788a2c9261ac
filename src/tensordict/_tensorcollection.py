"""The place where TorchRL's trainers look for `TensorCollection`."""

from tensordict.collection import TensorCollection

__all__ = ["TensorCollection"]
