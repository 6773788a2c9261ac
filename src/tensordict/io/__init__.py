"""The on-disk formats, one file each, and the file operations under them."""
