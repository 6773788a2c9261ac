"""The place where pickles of the reference look for `LazyStackedTensorDict`."""

from tensordict.containers.lazy import LazyStackedTensorDict

__all__ = ["LazyStackedTensorDict"]
