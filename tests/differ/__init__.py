"""Random programs, run on this package and on the reference: where do the two differ? `python tests/differ --help`."""
