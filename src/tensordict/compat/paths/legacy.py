"""Names that were here when pickles were written, or programs."""

from tensordict.containers.view import LazyView

__all__ = ["LazyView"]
