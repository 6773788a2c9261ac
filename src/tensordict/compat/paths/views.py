"""Names that were here when pickles were written, or programs."""

from tensordict.core.key_views import NESTED_TENSORS_AS_LISTS, NESTED_TENSORS_AS_LISTS_NONTENSOR

__all__ = ["NESTED_TENSORS_AS_LISTS", "NESTED_TENSORS_AS_LISTS_NONTENSOR"]
