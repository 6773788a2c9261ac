"""Trees for notebooks, reports of saves, and plots; used by `ops/printing.py`, `ops/plotting.py` and the CLI."""
