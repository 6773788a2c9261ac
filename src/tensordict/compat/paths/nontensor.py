"""Names that were here when pickles were written, or programs."""

from tensordict.containers.nontensor import MetaData, NonTensorData, NonTensorDataBase, NonTensorStack

__all__ = ["MetaData", "NonTensorData", "NonTensorDataBase", "NonTensorStack"]
