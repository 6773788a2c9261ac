"""Names that were here when pickles were written, or programs."""

from tensordict.containers.lazy import LazyStackedTensorDict

__all__ = ["LazyStackedTensorDict"]
