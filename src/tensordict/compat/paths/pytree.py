"""Names that were here when pickles were written, or programs."""

from tensordict.core.pytree import Context

__all__ = ["Context"]
