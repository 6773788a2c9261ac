"""The formats on disk, one or two files for each, and the functions over all of them in `opening.py`."""
