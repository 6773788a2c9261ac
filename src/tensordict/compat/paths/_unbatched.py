"""The place where pickles of the reference look for `UnbatchedTensor`."""

from tensordict.containers.unbatched import UnbatchedTensor

__all__ = ["UnbatchedTensor"]
