"""Names that were here when pickles were written, or programs."""

from tensordict.containers.lazy.vmapping import LazyContext

__all__ = ["LazyContext"]
