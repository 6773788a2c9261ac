"""Re-export the functions that rebuild containers, for pickles and programs that name them here."""

from tensordict.compat.pickles import _make_td, _rebuild_tensordict_files_consolidated

__all__ = ["_make_td", "_rebuild_tensordict_files_consolidated"]
