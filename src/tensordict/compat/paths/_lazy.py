"""The module that pickles of the reference name for `LazyStackedTensorDict`."""

from tensordict.containers.lazy import LazyStackedTensorDict

__all__ = ["LazyStackedTensorDict"]
