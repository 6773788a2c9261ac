"""Names that were here when pickles were written, or programs."""

from tensordict.containers.lazy.stack import LazyStackedTensorDict

__all__ = ["LazyStackedTensorDict"]
