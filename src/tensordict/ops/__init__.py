"""The operations, one file per family; each is a mixin written on the primitives of `core/contract.py`."""
