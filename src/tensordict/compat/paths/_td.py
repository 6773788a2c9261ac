"""The place where pickles of the reference look for `TensorDict`."""

from tensordict.containers.dense import TensorDict

__all__ = ["TensorDict"]
