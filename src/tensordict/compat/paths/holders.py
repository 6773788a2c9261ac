"""Names that were here when pickles were written, or programs."""

from tensordict.containers.nontensor_base import HolderContext, HolderFields

__all__ = ["HolderContext", "HolderFields"]
