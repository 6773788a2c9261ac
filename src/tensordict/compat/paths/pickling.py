"""Names that were here when pickles were written, or programs."""

from tensordict.memory.pickling import over_storage, unpacked

__all__ = ["over_storage", "unpacked"]
