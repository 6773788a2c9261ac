"""Names that were here when pickles were written, or programs."""

from tensordict.containers.lazy.members import Members

__all__ = ["Members"]
