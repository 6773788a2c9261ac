"""The place where pickles of the reference look for `TensorDict`."""

from tensordict.tensordict import TensorDict

__all__ = ["TensorDict"]
