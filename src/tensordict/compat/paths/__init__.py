"""Modules that are found under `tensordict` too: paths that pickles and a few programs know."""
