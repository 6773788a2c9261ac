"""Names and members that client programs use although they are not part of the public API.

Each one is a re-export or a few lines, and its docstring names the programs that need it. Nothing else in the package
uses them. Modules with paths that programs import (`utils.py`, `compat/paths/_C.py`, ...) export them from here.
`client_names.tsv` lists every name with its programs.
"""
