"""The place where pickles of the reference look for `UnbatchedTensor`."""

from tensordict.unbatched import UnbatchedTensor

__all__ = ["UnbatchedTensor"]
