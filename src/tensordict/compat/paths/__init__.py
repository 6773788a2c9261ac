"""Modules that can also be imported as `tensordict.NAME`, for pickles and for programs that use these paths."""
