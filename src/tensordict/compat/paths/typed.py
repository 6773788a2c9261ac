"""Names that were here when pickles were written, or programs."""

from tensordict.containers.typed import TypedTensorDict

__all__ = ["TypedTensorDict"]
