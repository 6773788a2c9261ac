"""The module that pickles of the reference name for `TensorDict`."""

from tensordict.containers.dense import TensorDict

__all__ = ["TensorDict"]
