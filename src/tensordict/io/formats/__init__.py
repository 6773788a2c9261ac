"""The formats on disk: one or two files for each."""
