"""Names that were here when pickles were written, or programs."""

from tensordict.containers.shared_values import FollowingMetaData, FollowingNonTensorData, FollowingNonTensorStack

__all__ = ["FollowingMetaData", "FollowingNonTensorData", "FollowingNonTensorStack"]
