"""Names that were here when pickles were written, or programs."""

from tensordict.compat.pickles import _make_td, _rebuild_tensordict_files_consolidated

__all__ = ["_make_td", "_rebuild_tensordict_files_consolidated"]
