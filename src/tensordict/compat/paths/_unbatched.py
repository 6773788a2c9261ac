"""The module that pickles of the reference name for `UnbatchedTensor`."""

from tensordict.containers.unbatched import UnbatchedTensor

__all__ = ["UnbatchedTensor"]
