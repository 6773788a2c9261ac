"""Where pickles of earlier versions look for these."""

from tensordict.io.value_files import Place, PlaceInList

__all__ = ["Place", "PlaceInList"]
