"""Names that were here when pickles were written, or programs."""

from tensordict.containers.unbatched import UnbatchedTensor

__all__ = ["UnbatchedTensor"]
